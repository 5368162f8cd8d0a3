"""The page as a browser lays it out, and what it does under pointer and keys, and on paper."""

import math

import pytest

from lipaudit.report import html
from lipaudit.report.blocks import Chapter, Curve, Document, Heatmap, Series, Table
from lipaudit.tables import Column
from tests.report import chromium

pytestmark = pytest.mark.skipif(
    chromium.PROGRAM is None, reason=f"none of {chromium.NAMES} is installed"
)
PAPER = 718
"""Pixels across an A4 sheet less the margins that browsers leave."""
LOOK = """({
  inner: innerWidth,
  scroll: document.documentElement.scrollWidth,
  height: document.documentElement.scrollHeight,
  outside: [...document.querySelectorAll("body *")]
    .filter(e => !e.closest(".scroll > *, nav > *"))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + " " + e.className),
  loads: performance.getEntriesByType("resource").map(e => e.name)
    .filter(name => !name.startsWith("data:")),
})"""
ROWS = '[...document.querySelectorAll("#bounds details tbody tr")]'
NUMBER = Column(label="number", meaning="What a heading means.")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = chromium.Chromium(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["page", "double_page"])
def test_page_fits_and_loads_nothing(browser, request, width, name):
    browser.open(request.getfixturevalue(name), width=width)
    found = browser.run(LOOK)
    assert found["inner"] == width
    assert found["scroll"] <= width
    assert found["outside"] == []
    assert found["loads"] == []
    assert found["height"] > 3000


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</main>", "</main><script>document.title = 'taken'</script>"),
        ('"use strict";', '"use strict"; document.title = "taken";'),
    ],
)
def test_no_other_script_runs(browser, page, old, new):
    assert old in page
    browser.open(page.replace(old, new))
    assert browser.run("document.title") != "taken"


# tables


def heading(browser, label: str) -> str:
    """Open the table of all heads, and name a button of it for scripts."""
    browser.run('document.querySelector("#bounds details").open = true')
    browser.run(
        'window.th = [...document.querySelectorAll("#bounds details th")]'
        f".find(th => th.textContent.replace(/[^ -~]/g, '') === {label!r})"
    )
    assert browser.run("Boolean(th)")
    browser.run('th.scrollIntoView({block: "center", inline: "center", behavior: "instant"})')
    return "th.querySelector('button')"


def click(browser, element: str) -> None:
    box = browser.run(f"{element}.getBoundingClientRect().toJSON()")
    browser.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def heads(browser) -> list[tuple[int, int]]:
    """Return the heads in the order in which their rows stand."""
    texts = browser.run(f"{ROWS}.map(tr => [tr.cells[0].textContent, tr.cells[1].textContent])")
    return [(int(layer), int(head)) for layer, head in texts]


@pytest.mark.parametrize(("label", "name"), [("exact", "exact"), ("mean field", "mean_field")])
def test_rows_sort_by_value_with_what_is_missing_last(browser, page, report, label, name):
    """Values of 0.4 to infinity, written with exponents; one was not measured, one is NaN."""
    rows = {(r.layer, r.head): getattr(r, name) for r in report.section("bounds").rows}
    missing = {head for head, value in rows.items() if value is None or math.isnan(value)}
    known = sorted((h for h in rows if h not in missing), key=rows.__getitem__)
    browser.open(page)
    button = heading(browser, label)
    assert heads(browser) == list(rows)
    for state, expected in (("ascending", known), ("descending", known[::-1])):
        click(browser, button)
        assert browser.run("th.ariaSort") == state
        order = heads(browser)
        assert [rows[h] for h in order[: len(known)]] == [rows[h] for h in expected]
        assert set(order[len(known) :]) == missing
    click(browser, button)
    assert browser.run("th.ariaSort") == "none"
    assert heads(browser) == list(rows)


def table(*values: object, column: Column = NUMBER) -> str:
    """Return a page with a table of one column."""
    block = Table("t", (column,), tuple((value,) for value in values))
    chapter = Chapter("one", "One", (block,))
    return html.render(Document("t", (chapter,))).decode()


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ((1.001, 1.0012, 1.0031), NUMBER),  # all of them say 1.00
        ((9.0, 80.0, 700.0, 1.2e5), NUMBER),
        ((-3.0, 0.02, 0.1), Column(label="n", meaning="", format=".1%")),
        (("7.8% (3 to 17%)", "31.2% (2 to 40%)", "98.4% (9 to 99%)"), NUMBER),  # with limits
        ((True, False), Column(label="n", meaning="", format="d")),
        (("0.2", "2.0", "2.10", "10.1"), Column(label="head", meaning="", format="s")),
    ],
)
def test_columns_sort_by_what_they_hold(browser, values, column):
    browser.open(table(*values[::-1], column=column))
    texts = browser.run('[...document.querySelectorAll("td")].map(td => td.textContent)')
    click(browser, 'document.querySelector("th button")')
    after = browser.run('[...document.querySelectorAll("td")].map(td => td.textContent)')
    expected = sorted(texts) if column.format == "d" else texts[::-1]
    assert after == expected
    given = browser.run('[...document.querySelectorAll("td")].map(td => td.dataset.v || "")')
    assert [float(v) for v in given if v] == sorted(float(v) for v in given if v)


# pictures


def middle(browser, selector: str, index: int = 0) -> tuple[float, float]:
    """Return the middle of an element after it was brought into the window."""
    browser.run(f"window.it = document.querySelectorAll({selector!r})[{index}]")
    browser.run('it.scrollIntoView({block: "center", behavior: "instant"})')
    box = browser.run("it.getBoundingClientRect().toJSON()")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def cut_labels(browser) -> list[str]:
    """Return the texts of pictures that reach beyond their picture, where they are cut off."""
    return browser.run(
        """[...document.querySelectorAll("svg text")].filter(e => {
          const own = e.getBoundingClientRect(), all = e.closest("svg").getBoundingClientRect();
          return own.left < all.left - 1 || own.right > all.right + 1
            || own.top < all.top - 1 || own.bottom > all.bottom + 1;
        }).map(e => e.textContent)"""
    )


def test_no_label_is_cut_off(browser, page, double_page):
    share, names = Column("p(2)", ""), tuple(f"token {i}" for i in range(20))
    cells = tuple(tuple(99.0 * (i == j == 3) for i in range(20)) for j in range(20))
    points = Series("a model", (1.0, 1e5), (1.0, 2e9))
    squares = (
        Heatmap("map", cells, names, names, share, ("query", "key"), square=True),
        Curve("pair", share, share, (points,), log=True, joined=False),
    )
    drawn = html.render(Document("t", (Chapter("one", "One", squares),))).decode()
    for each in (page, double_page, drawn):
        browser.open(each)
        assert browser.run('document.querySelectorAll("svg text").length') > 20
        assert cut_labels(browser) == []


# media


CONTRAST = """(() => {
  const parts = text => text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const weights = [0.2126, 0.7152, 0.0722];
  const light = text => parts(text).reduce((sum, v, i) => sum + v * weights[i], 0);
  const page = light(getComputedStyle(document.body).backgroundColor);
  const ratio = c => (Math.max(page, c) + 0.05) / (Math.min(page, c) + 0.05);
  const texts = "p, td, th, a, code, li b, figcaption, .standing";
  return [page, ...[...document.querySelectorAll(texts)].map(e => ratio(light(
    getComputedStyle(e).color))), ...[...document.querySelectorAll("svg text")]
    .filter(e => getComputedStyle(e).fill === getComputedStyle(document.body).color)
    .map(e => ratio(light(getComputedStyle(e).fill)))];
})()"""


def test_text_is_legible_in_light_and_dark(browser, page):
    """WCAG 2 asks for a contrast of 4.5."""
    browser.open(page)
    for scheme in ("light", "dark"):
        browser.media("screen", color_scheme=scheme)
        ground, *ratios = browser.run(CONTRAST)
        assert (ground > 0.5) == (scheme == "light")
        assert len(ratios) > 1000
        assert min(ratios) >= 4.5


def test_paper_gets_everything_in_light_colours(browser, page):
    browser.open(page, width=PAPER)
    browser.media("print", color_scheme="dark")
    style = "getComputedStyle(document.body)"
    assert browser.run(f"{style}.backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run(f"{style}.color") == "rgb(0, 0, 0)"
    assert browser.run('getComputedStyle(document.documentElement).getPropertyValue("--c0")') == ""
    hidden = '[...document.querySelectorAll("main td, main th, svg, figcaption")]'
    assert browser.run(f"{hidden}.filter(e => !e.checkVisibility()).length") == 0
    assert browser.run('document.querySelectorAll("details:not([open]) td").length') > 100
    left = '[...document.querySelectorAll("nav, .anchor")]'
    assert browser.run(f"{left}.filter(e => e.checkVisibility()).length") == 0
    cut = '[...document.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right'
    assert browser.run(f"{cut} > {PAPER + 1}).map(e => e.outerHTML.slice(0, 80))") == []
    figures = 'document.querySelectorAll("figure.picture")'
    assert browser.run(f"new Set([...{figures}].map(e => getComputedStyle(e).breakInside)).size")
    assert browser.run(f"getComputedStyle({figures}[0]).breakInside") == "avoid"


# without scripts


def test_nothing_is_missing_without_scripts(browser, page):
    texts = '[...document.querySelectorAll("main td, main th, main p, main li")]'
    texts += ".map(e => e.textContent)"
    seen = []
    for scripts in (True, False):
        browser.open(page, scripts=scripts)
        seen.append(browser.run(texts))
        assert bool(browser.run('document.querySelectorAll("button").length')) == scripts
    assert seen[0] == seen[1]
    titles = 'document.querySelectorAll(".marks title").length'
    assert (
        browser.run(titles) == browser.run('document.querySelectorAll(".marks > *").length') > 50
    )
