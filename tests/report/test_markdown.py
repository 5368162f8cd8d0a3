import re

import pytest

from lipaudit.report import markdown
from lipaudit.report.page.document import make_page


def test_tables_have_as_many_cells_in_every_row(report, other):
    for reports in ((report,), (report, other)):
        text = markdown.render(make_page(*reports)).decode()
        for grid in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in grid.splitlines()}) == 1


@pytest.mark.parametrize(
    ("hostile", "escaped"),
    [
        ("<script>", "&lt;script&gt;"),
        ("a|b", r"a\|b"),
        ("*x* _y_ `z`", r"\*x\* \_y\_ \`z\`"),
        ("[x](javascript:1)", r"\[x\](javascript:1)"),
        ("two\n# lines", "two\\\\x0a\\# lines"),
        ("back\\slash", r"back\\slash"),
    ],
)
def test_markup_is_taken_literally(hostile, escaped):
    assert markdown.escape(hostile) == escaped


def test_only_our_own_tags_are_markup(report, other):
    text = (
        markdown.render(make_page(report)).decode()
        + markdown.render(make_page(report, other)).decode()
    )
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    tags = set(re.findall(r"<[^>]*>", "\n".join(lines)))
    assert tags <= {
        f"<{end}{tag}>" for tag in ("details", "summary", "sub", "code", "br") for end in ("", "/")
    }
    assert "\x1b" not in text
