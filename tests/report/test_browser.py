"""The page in a real browser: nothing is wider than the window, and heads are marked everywhere.

The page permits one script only, so the copies that are measured here have no policy, and a script
of the test that writes what it found into the document.
"""

import json
import re
import shutil
import subprocess

import pytest

from lipaudit.gate import compare
from lipaudit.report import of_comparison, of_reports, render

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--virtual-time-budget=4000",
)  # fmt: skip
FOUND = re.compile(r'<pre id="found">(.*?)</pre>', re.DOTALL)
SCRIPT = """<script>addEventListener("load", () => {
  const found = (() => { %s })();
  const place = document.createElement("pre");
  place.id = "found";
  place.textContent = JSON.stringify(found);
  document.body.append(place);
});</script></body>"""


def run_in_browser(page: bytes, folder, code: str, width: int):
    """Return what a function of JavaScript returns on a page, in a window of this width."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.decode(), count=1)
    file = folder / "page.html"
    file.write_text(text.replace("</body>", SCRIPT % code), encoding="utf-8")
    command = [
        BROWSER, *SWITCHES, f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},800", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = FOUND.search(done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def pages(report, other):
    """The page of a report, of several, and of a comparison."""
    return {
        "one": render(report, "html"),
        "several": render(of_reports(report, other), "html"),
        "comparison": render(of_comparison(compare([report, other]), [report, other]), "html"),
    }


WIDER = """
const wide = [...document.querySelectorAll(".scroll")].filter(
  each => !each.closest("details") && each.scrollWidth > each.clientWidth + 1);
return {
  page: document.documentElement.scrollWidth,
  window: innerWidth,
  wide: wide.map(each => each.innerText.slice(0, 200)),
  columns: getComputedStyle(document.querySelector(".grid")).gridTemplateColumns.split(" ").length,
};
"""


@pytest.mark.parametrize(("width", "columns"), [(1280, 2), (700, 1)])
@pytest.mark.parametrize("name", ["one", "several", "comparison"])
def test_nothing_scrolls_sideways(pages, tmp_path, name, width, columns):
    found = run_in_browser(pages[name], tmp_path, WIDER, width)
    assert found["window"] == width
    assert found["page"] <= width
    assert found["wide"] == []
    assert found["columns"] == columns


OPENED = """
const shown = () => [...document.querySelectorAll("th")].filter(
  each => !each.closest("details") && each.checkVisibility()).length;
const before = shown();
for (const each of document.querySelectorAll(".columns")) each.open = true;
return [before, shown()];
"""


def test_columns_that_do_not_fit_can_be_opened(pages, tmp_path):
    before, after = run_in_browser(pages["comparison"], tmp_path, OPENED, 700)
    assert before < after


MARKED = """
const kinds = () => [...document.querySelectorAll(".chosen")].map(each => each.tagName);
const row = [...document.querySelectorAll("tr[data-of]")].find(
  each => each.dataset.of.startsWith("head "));
const of = row.dataset.of;
row.click();
const clicked = kinds(), status = document.querySelector("#selected").textContent;
row.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
const escaped = kinds();
const mark = document.querySelector(`.marks [data-of="${of}"]`);
mark.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
return { of, clicked, status, escaped, pressed: kinds(), focus: mark.tabIndex };
"""


def test_a_head_is_marked_in_every_map_chart_and_table(pages, tmp_path):
    found = run_in_browser(pages["one"], tmp_path, MARKED, 1280)
    assert found["of"].startswith("head ")
    assert {"TR", "rect", "circle"} <= {*found["clicked"]}
    assert found["status"].startswith(found["of"])
    assert found["escaped"] == []
    assert found["pressed"] == found["clicked"]
    assert found["focus"] == 0
