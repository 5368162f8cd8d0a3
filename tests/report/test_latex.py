"""Tables for papers and pages in Markdown: whole, and literal."""

import re

import pytest

from lipaudit.gate import compare
from lipaudit.report import latex, markdown, of_comparison, render
from lipaudit.report.blocks import Card, Chapter, Document, Heatmap, Table
from lipaudit.tables import Column

NAME = Column(label="name", meaning="", format="s")
VALUE = Column(label="value", meaning="")
HOSTILE = ("\\input{x}%&$#_{}~^", "a & b \\\\ c", "[2cm]", "*", "x\n\\end{table}", "--x", '?`<|>"')


def literal(text):
    """Read escaped text back, as LaTeX sets it."""
    words = {"backslash": "\\", "asciitilde": "~", "asciicircum": "^", "asciigrave": "`"}
    words |= {"less": "<", "greater": ">", "bar": "|"}
    token = r"\\text([a-z]+)\{\}|\\([{}$&#%_])|\{([\[*-])\}|([^\\{}$&#%_~^<>|`\[*-])"
    assert re.fullmatch(f"(?:{token})*", text), text
    return "".join(words.get(m[1], "") or m[2] or m[3] or m[4] for m in re.finditer(token, text))


def check(text):
    """Every environment ends, every row has a cell for each column, all letters are Latin."""
    assert all(ord(character) < 0x180 for character in text)
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    tables = re.findall(r"\\begin\{tabular\}\{([^\n]*)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    for align, body in tables:
        columns = len(re.sub(r"\{.*?\}+", "", align))
        rules = [line for line in body.splitlines() if line.endswith("rule")]
        rows = [line for line in body.splitlines() if not line.endswith("rule")]
        assert (rules[0], rules[-1]) == ("\\toprule", "\\bottomrule")
        for row in rows:
            assert row.endswith(r" \\")
            assert not row.startswith(("[", "*"))
            assert len(re.findall(r"(?<!\\)&", row)) == columns - 1
    bare = re.sub(r"\\.", "", re.sub(r"^%.*$", "", text, flags=re.MULTILINE))
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert not set("#%~^_") & set(bare)
    return tables


def test_reports_and_comparisons_are_whole_tables(report, other):
    one = render(report, "latex").decode()
    assert len(check(one)) > 3
    assert "Scorecard" in one
    pair = [report, other]
    for shown in (pair, of_comparison(compare(pair), pair)):
        assert check(render(shown, "latex").decode())


@pytest.mark.parametrize("hostile", HOSTILE)
def test_every_special_character_is_set_as_it_is(hostile):
    shown = hostile.replace("\n", r"\x0a")
    assert literal(latex.escape(hostile)) == shown
    blocks = (
        Card(((hostile, hostile),)),
        Table(hostile, (NAME, VALUE), ((hostile, 1.0), (hostile, 2.0)), strong={1}),
        Heatmap(hostile, ((1.0,),), (hostile,), (hostile,), VALUE),
    )
    page = Document(hostile, (Chapter("c", hostile, blocks),))
    assert len(check(latex.render(page).decode())) == 2


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("‖J‖ ≤ 2×", r"$\Vert$J$\Vert$ $\leq$ 2$\times$"),
        ("headᵃ", r"head\textsuperscript{a}"),
        ("café ñ Å", "café ñ Å"),
        ("中\x1b", r"U+4E2D\textbackslash{}x1b"),
    ],
)
def test_a_sign_is_written_so_that_latex_has_it_in_its_fonts(text, written):
    assert latex.escape(text) == written


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
