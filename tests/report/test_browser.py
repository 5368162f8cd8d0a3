"""The page as a browser lays it out."""

from __future__ import annotations

import html as markup
import json
import re
import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {BROWSERS} is installed")

LOOK = """
<iframe style="border:0;width:%dpx;height:800px" srcdoc="%s"></iframe>
<pre id="result"></pre>
<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe").contentWindow, page = frame.document;
  const outside = [...page.querySelectorAll("body *")].filter(
    e => !e.closest(".scroll > *") && e.getBoundingClientRect().right > frame.innerWidth + 1);
  document.getElementById("result").textContent = JSON.stringify({
    inner: frame.innerWidth,
    scroll: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    outside: outside.map(e => e.tagName + " " + e.className),
    loads: frame.performance.getEntriesByType("resource").map(e => e.name)
      .filter(name => !name.startsWith("data:")),
  });
});
</script>
"""


@pytest.fixture
def look(tmp_path):
    """Lay a page out in a frame of some width and say what came of it."""

    def measure(text: str, width: int) -> dict[str, object]:
        file = tmp_path / "frame.html"
        file.write_text(LOOK % (width, markup.escape(text)), encoding="utf-8")
        arguments = ("--headless", "--no-sandbox", "--disable-gpu", "--dump-dom")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        nowhere = "--host-resolver-rules=MAP * ~NOTFOUND"
        done = subprocess.run(
            [BROWSER, *arguments, profile, nowhere, file.as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
        return json.loads(markup.unescape(found[1]))

    return measure


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["page", "double_page"])
def test_page_fits_and_loads_nothing(look, request, width, name):
    found = look(request.getfixturevalue(name), width)
    assert found["inner"] == width
    assert found["scroll"] <= width
    assert found["outside"] == []
    assert found["loads"] == []
    assert found["height"] > 3000


def test_the_look_sees_what_it_looks_for(look, page):
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    bad = (
        '<img src="http://example.invalid/x.png"><p class="wide" style="width:2000px">x</p></body>'
    )
    found = look(page.replace("</body>", bad), 1280)
    assert found["scroll"] > 1280
    assert "P wide" in found["outside"]
    assert found["loads"] == ["http://example.invalid/x.png"]
