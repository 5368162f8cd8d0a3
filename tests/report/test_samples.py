"""One sample of a report, beside all: what is said of it is what the sections say."""

import json
import math
import re
from statistics import median

import pytest

from lipaudit import schema
from lipaudit.errors import InputError, UsageError
from lipaudit.measures import layouts
from lipaudit.report import of_reports, of_sample, render, terminal
from lipaudit.report.blocks import Table
from lipaudit.report.document import choose_sample
from lipaudit.tables.report import Example, Gradient
from lipaudit.tables.trials import FLAGS
from lipaudit.tables.weakest import find_worst
from tests.commands import invoke
from tests.gate import cases
from tests.report.conftest import find_chapter, keep, make_report, swap

pytestmark = pytest.mark.usefixtures("blank_charts")

IDS, NORMS = (make_report().section("jacobian").samples[name] for name in ("ids", "norm"))
ATTACKS = "Which attacks succeed?"
BROKEN = {13, 15, 16, 17, 18, 19, 20, 21, 23}
"""At 2/255; from 5 on at 4/255 (see the stored report)."""


@pytest.fixture
def placed(report):
    """The report, with a file for each sample; two files have one name."""
    files = tuple(f"{'cat' if i < 12 else 'dog'}/{i % 20}.png" for i in range(24))
    measured = ("jacobian", "attack", "certify", "certify.radius")
    part = keep(report, *map(report.section, measured))
    return part.model_copy(update={"samples": {"ids": IDS, "place": files}})


def list_worst(report):
    """Return the rows of the table of worst samples."""
    blocks = find_chapter(show(report), "worst-samples").blocks
    return next(block for block in blocks if isinstance(block, Table)).rows


def show(report, sample=None):
    """Return the page of a sample; without one, of the worst samples."""
    return of_sample(report, "x.json", sample).page()


def told(page, title: str) -> dict[str, tuple[str, ...]]:
    """Return the cells of each figure: its value, that of all samples, and its rank."""
    (chapter,) = (chapter for chapter in page.chapters if chapter.title == title)
    table = chapter.blocks[0]
    labels = [column.label for column in table.columns]
    found = {}
    for row in table.rows:
        cells = dict(zip(labels, row, strict=True))  # columns without values are left out
        found[row[0]] = tuple(cells.get(name, "") for name in ("value", "all", "from the worst"))
    return found


def test_the_worst_are_broken_in_most_balls_and_then_steepest(report):
    correct = {name: i != 3 for i, name in enumerate(IDS[::-1])}
    balls = {name: (i in BROKEN) + (i >= 5) for i, name in enumerate(IDS)}
    norms = {n: -1.0 if v is None or v != v else v for n, v in zip(IDS, NORMS, strict=True)}
    expected = sorted(IDS, key=lambda n: (not correct[n], -balls[n] * correct[n], -norms[n]))
    assert find_worst(report, 24) == expected
    assert find_worst(report) == expected[:10]
    rows = list_worst(report)
    assert [row[0] for row in rows] == [name[:12] for name in expected[:10]]
    assert rows[0][1] == "linf 2/255"
    assert rows[-1][1] == "linf 4/255"


def test_places_stand_beside_the_samples_though_the_worst_has_none(report):
    first = find_worst(report)[0]
    ids = tuple(name for name in IDS if name != first)
    places = {"ids": ids, "place": tuple(f"index {IDS.index(name)}" for name in ids)}
    blocks = find_chapter(show(report.model_copy(update={"samples": places})), "worst-samples")
    table = next(block for block in blocks.blocks if isinstance(block, Table))
    assert [column.label for column in table.columns[:2]] == ["sample", "place"]
    assert table.rows[0][1] is None
    assert table.rows[1][1].startswith("index ")


def test_what_says_yes_or_no_is_told_from_numbers_that_are_0_and_1(report):
    flags = {n for layout in layouts().values() for n, c in layout.sample_columns.items()
             if c.meaning.startswith("Whether")}  # fmt: skip
    assert flags | {"converged"} == FLAGS
    attack = report.section("attack")
    values = {**attack.samples, "label": tuple(i % 2 for i in range(24))}
    binary = attack.model_copy(update={"samples": values})
    page = show(keep(report, binary), IDS[0])
    assert told(page, ATTACKS)["label"] == ("1", "", "")


def test_a_sample_stands_beside_all(report):
    page = show(report, IDS[20])
    jacobian, attacks = told(page, "How sensitive is the whole model?"), told(page, ATTACKS)
    assert jacobian["model ‖J‖"] == (f"{NORMS[20]:.3g}", f"{median(NORMS[:22]):.3g}", "2 of 22")
    assert jacobian["margin"] == ("2.00", "4.55", "4 of 24")
    assert jacobian["correct"] == ("no", "95.8% yes, 79.8 to 99.3%", "")
    assert attacks["robust, worst,linf,2/255"] == ("no", "62.5% yes, 42.7 to 78.8%", "")
    assert told(show(report, IDS[2]), ATTACKS)["robust, worst,linf,4/255"][0] == "yes"


def test_it_goes_by_its_id_the_beginning_of_it_and_its_place(placed):
    for said in (IDS[7], IDS[7][:3], "cat/7.png", "7.png"):
        assert choose_sample(placed, said) == IDS[7]
    for said, message, advice in (
        ("1.png", "'1.png' is 2 samples", "There are: 010101010101, cat/1.png; 151515151515, "),
        ("cta/7.png", "no sample 'cta/7.png'", "Did you mean 'cat/7.png'"),
        ("", "'' is 24 samples", "There are: "),
    ):
        with pytest.raises(UsageError, match=message) as refused:
            choose_sample(placed, said)
        assert advice in refused.value.advice


def test_a_report_without_samples_says_so(report):
    alone = keep(report, report.section("scaling"))
    for sample in (None, "x"):
        with pytest.raises(InputError, match="has no results for single samples"):
            of_sample(alone, "x.json", sample)


def test_pictures_of_the_worst_stand_on_the_page(placed):
    worst_one = find_worst(placed)[0]
    example = Example(
        trial="pgd,linf,2/255", image="iVBO", adversarial="iVBP", difference="iVBQ", times=12.5,
        classes=("cat", "<b>dog"), before=(0.9, 0.1), after=(0.2, 0.8),
    )  # fmt: skip
    attack = placed.section("attack").model_copy(update={"examples": {worst_one: example}})
    report = swap(placed, attack)
    assert schema.loads(schema.dumps(report)).section("attack").examples == {worst_one: example}
    for shown in (report, of_sample(report, "x", None), of_sample(report, "x", worst_one)):
        page = render(shown, "html").decode()
        for picture in ("iVBO", "iVBP", "iVBQ"):
            assert page.count(f'src="data:image/png;base64,{picture}"') == 1
        assert "taken for &lt;b&gt;dog: score 10% became 80% by pgd, linf 2/255" in page
        assert "difference × 12" in page
        assert "The html format has the pictures" in render(shown, "table").decode()
    other = render(of_sample(report, "x", find_worst(placed)[1]), "html").decode()
    assert "data:image/png;base64,iVBO" not in other


WORDS = ("[CLS]", "*good*", "<b>film", "\x1b[31m", " ", "indeed")
SHARE = (0.004, 0.5, 0.25, 0.125, 0.0625, 0.0125)


@pytest.fixture
def written(placed):
    """The report of texts, whose tokens it keeps of the worst two."""
    kept = {
        find_worst(placed)[0]: Gradient(of="margin", tokens=WORDS, shares=SHARE, left_out=7),
        find_worst(placed)[1]: Gradient(of="direction", tokens=("a",) * 90, shares=(1 / 90,) * 90),
    }
    jacobian = placed.section("jacobian").model_copy(update={"gradients": kept})
    return swap(placed, jacobian)


def test_tokens_are_kept_in_the_file(written):
    again = schema.loads(schema.dumps(written)).section("jacobian").gradients
    assert again == written.section("jacobian").gradients
    with pytest.raises(ValueError, match="1 shares of 2 tokens"):
        Gradient(of="margin", tokens=("a", "b"), shares=(1.0,))
    with pytest.raises(ValueError, match="pattern"):  # a picture is base64 and nothing else
        Example(trial="", image='" onload="', classes=("", ""), before=(0, 0), after=(0, 0))


def test_a_page_shades_tokens_and_names_the_first(written):
    listed, alone = (of_sample(written, "x", each) for each in (None, find_worst(written)[0]))
    for shown in (written, listed, alone):
        page = render(shown, "html").decode()
        assert '<b style="--s:1.00" title="50.0%">*good*</b>' in page
        assert '<b style="--s:0.50" title="25.0%">&lt;b&gt;film</b>' in page
        assert '<span style="--s:0.01" title="0.4%">[CLS]</span>' in page
        assert "\x1b" not in page
        assert "*good* 50.0%, &lt;b&gt;film 25.0%, \\x1b[31m 12.5%, \u2423 6.2%" in page
        assert "share of the gradient (computed, at the measured samples)" in page
        assert "7 more tokens left out: 4.6%" in page
    assert (
        "share of the steepest direction (estimate, at the measured samples)"
        in render(written, "html").decode()
    )
    text = render(alone, "markdown").decode()
    assert "\\[CLS\\] **\\*good\\*** **&lt;b&gt;film** **\\\\x1b\\[31m** **\u2423** indeed" in text


def test_a_terminal_lists_the_first_tokens_and_shows_one_text_whole(written):
    listed = render(of_sample(written, "x", None), "table").decode()
    assert "*good* 50.0%, <b>film 25.0%" in " ".join(listed.split())
    assert "indeed" not in listed
    page = of_sample(written, "x", find_worst(written)[0]).page()
    plain = terminal.render(page, width=40).decode()
    assert "[CLS] *good* (50.0%) <b>film (25.0%)\n" in plain
    assert "\x1b[31m" not in terminal.render(page, width=40, colour="truecolor").decode()
    long = terminal.render(
        of_sample(written, "x", find_worst(written)[1]).page(), width=40
    ).decode()
    rows = [line for line in long.splitlines() if line.startswith("a a")]
    assert sum(row.split().count("a") for row in rows) == 90
    assert max(map(len, rows)) <= 40


def test_the_command_shows_one_and_lists_the_worst(placed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups = {"group": tuple("dark" if name == IDS[7] else "" for name in placed.samples["ids"])}
    grouped = placed.model_copy(update={"samples": placed.samples | groups})
    (tmp_path / "x.json").write_text(schema.dumps(grouped))

    def run(*args: str):
        return invoke("inspect", "x.json", *args, code=None, columns=80)

    listed = run().stdout
    assert "For one of the 24" in " ".join(listed.split())
    assert listed.index(IDS[21][:12]) < listed.index(IDS[19][:12])
    shown = run("cat/7.png")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    data = json.loads(run("cat/7.png", "-f", "json").stdout)
    assert (data["id"], data["place"], data["group"]) == (IDS[7], "cat/7.png", "dark")
    assert re.search(r"^group +dark$", shown.stdout, re.MULTILINE)
    assert {"measure": "jacobian", "name": "norm", "value": NORMS[7]} in data["figures"]
    assert [each["id"] for each in json.loads(run("-f", "json").stdout)] == find_worst(placed)
    refused = run("nowhere.png")
    assert refused.exit_code == 2
    assert "no sample 'nowhere.png'" in refused.stderr


def test_classes_go_by_their_names(placed):
    name = find_worst(placed)[0]
    example = Example(
        trial="words,words,2", text='a "film"', classes=("up", "down"), before=(1, 0), after=(0, 1)
    )
    attack = placed.section("attack")
    columns = {**attack.samples, "label": tuple(range(24)), "predicted": (None,) * 24}
    ids = attack.samples["ids"]
    at = ids.index(name)
    classes = {at: "up", at + 1: str(at + 1)}
    update = {"samples": columns, "classes": classes, "examples": {name: example}}
    report = swap(placed, attack.model_copy(update=update))
    assert schema.loads(schema.dumps(report)).section("attack").classes == update["classes"]
    said = told(show(report, name), ATTACKS)
    assert said["label"] == (f"{at} (up)", "", "")
    assert said["predicted"][0] == "\u2013"
    other = told(show(report, ids[at + 1]), ATTACKS)
    assert other["label"][0] == str(at + 1)  # its name says no more
    data = of_sample(report, "x", name).record
    assert {"measure": "attack", "name": "label", "value": at, "class": "up"} in data["figures"]
    assert data["example"]["before"] == [1.0, 0.0]
    assert data["example"].keys().isdisjoint({"image", "adversarial", "difference"})
    for format in ("table", "markdown", "html"):
        text = render(of_sample(report, "x", name), format).decode().replace("\\", "")
        text = " ".join(text.split())
        assert "true class up: score 100% became 0%" in text
        assert "taken for down: score 0% became 100% by words, 2 words" in text
        assert "the text became" in text


def test_samples_without_figures_to_rank_them_are_not_called_the_worst():
    heads = cases.report(cases.bounds([[1.0, 2.0, 3.0]] * 4))
    unbroken = cases.report(cases.attack([1] * 8, correct=[0, *[1] * 7]))
    for alone in (heads, unbroken):
        ids = alone.main_sections[0].ids
        assert "Look at the worst" not in render(alone, "table").decode()
        shown = show(alone)
        (table,) = (block for block in shown.chapters[-1].blocks if isinstance(block, Table))
        assert [row[0] for row in table.rows] == [name[:12] for name in ids[:10]]
        text = terminal.render(shown).decode()
        assert "The first samples: no figure of this report ranks them" in text
        assert "worst" not in text
        assert "least robust" not in text
    broken = cases.report(cases.attack([1] * 7 + [0]))
    last = broken.sections[0].ids[-1][:12]
    assert f"Look at the worst samples, first {last}" in render(broken, "table").decode()


def test_shares_that_are_upper_limits_have_no_lower_one():
    """A time limit ended the attacks: unknown samples are not broken so far."""
    flags = (0, 1, None, None, 0, None, None, None)  # the last four are of the second class
    attack = cases.attack([0] * 8)
    columns = {name: flags for name in attack.samples if name.startswith("robust@")}
    attack = cases.with_samples(attack, **columns, label=[1] * 4 + [2] * 4)
    groups = {"ids": cases.sample_ids(8), "place": range(8), "group": ["a"] * 4 + ["b"] * 4}
    samples = {name: tuple(map(str, values)) for name, values in groups.items()}
    cut = cases.report(attack).model_copy(update={"samples": samples})
    page = of_reports(cut).page()
    tables = [block for block in find_chapter(page, "attack").blocks if isinstance(block, Table)]
    (classes,) = (table for table in tables if table.title == "How accurate is each class?")
    assert [row[-1] for row in classes.rows] == ["\u2264 75.0%"] * 2
    of_groups = find_chapter(page, "groups").blocks
    (robust,) = (table for table in of_groups if table.title.startswith("attack.robust"))
    assert list(map(tuple, robust.rows)) == [(g, 4, "\u2264 75.0%") for g in "ab"]
    name = samples["ids"][0]
    said = told(show(cut, name), ATTACKS)
    assert said["robust, worst,linf,2/255"][:2] == ("no", "\u2264 75.0% yes")
    known = swap(cut, cases.with_samples(attack, **{key: (0, *[1] * 7) for key in columns}))
    said = told(show(known, name), ATTACKS)  # Wilson's limits of 7 of 8
    assert said["robust, worst,linf,2/255"][1] == "87.5% yes, 52.9 to 97.8%"


def test_figures_that_are_no_numbers_are_strings_in_json(report):
    section = report.section("jacobian")
    values = (math.inf, -math.inf, math.nan, *section.samples["norm"][3:])
    changed = section.model_copy(update={"samples": section.samples | {"norm": values}})
    odd = keep(report, changed)
    for name, value in zip(IDS, ("Infinity", "-Infinity", "NaN"), strict=False):
        record = json.loads(render(of_sample(odd, "x", name), "json"))
        assert [f["value"] for f in record["figures"] if f["name"] == "norm"] == [value]
    assert render(of_sample(odd, "x", None), "json")
