"""The table of formats, the one path on which every command writes, terminals, LaTeX, CSV."""

import csv
import io
import math
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.cells import cell_len

from lipaudit import schema
from lipaudit.gate import compare, rank
from lipaudit.report import (
    JUDGEMENT,
    RENDERERS,
    REPORT,
    Format,
    find_format,
    of_comparison,
    of_reports,
    render,
    terminal,
)
from lipaudit.report.blocks import Card, Chapter, Document, Heatmap, Table
from lipaudit.report.markup import escape_latex, escape_markdown, render_latex
from lipaudit.tables import Column, Section
from tests.commands import invoke, refuse
from tests.report.conftest import find_chapter, keep, rename, show


@pytest.fixture
def folder(report, tmp_path, monkeypatch):
    """A working directory with a report that the gate can judge."""
    saved = keep(report, *map(report.section, ("bounds.layers", "attack")))
    (tmp_path / "a.json").write_text(schema.dumps(saved), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path


GATE = ("gate", "a.json", "-b", "a.json", "--fail-on", "bounds.layers.exact <= 500")


def test_a_format_is_a_function_and_an_entry(folder, monkeypatch):
    """Every command that has a page writes it, whatever is written in it."""

    def outline(page):
        return "".join(f"* {c.title}\n" for c in page.chapters if c.title).encode()

    monkeypatch.setitem(RENDERERS, "outline", Format("outline", "page", outline, (".org",)))
    assert "* Which attacks succeed?\n" in invoke("report", "a.json", "-f", "outline").stdout
    assert invoke("compare", "a.json", "a.json", "-o", "c.org").stdout == ""
    assert "What changed from" in (folder / "c.org").read_text()
    monkeypatch.setenv("COLUMNS", "200")  # a narrower screen gets the table in parts
    table = invoke(*GATE, "-f", "table").stdout
    # Absolute limits have no baseline and no change: columns without values are left out.
    heads = ["verdict", "figure", "current", "rule"]
    assert heads in [line.split() for line in table.splitlines()]
    gated = invoke(*GATE, "-o", "g.org")
    assert gated.stdout.endswith("(exit code 0)\n")
    assert (
        folder / "g.org"
    ).read_text() == "* What to do next\n* What is the verdict on each rule?\n"


def test_what_each_format_shows_and_how_its_files_are_called():
    kinds = {"report": REPORT, "compared": REPORT, "judged": JUDGEMENT}
    shown = {
        name: {kind for kind, forms in kinds.items() if known.takes in forms}
        for name, known in RENDERERS.items()
    }
    assert all(known.name == name for name, known in RENDERERS.items())
    assert shown == {
        **dict.fromkeys(("html", "json", "latex", "markdown", "table"), set(kinds)),
        **dict.fromkeys(("junit", "text"), {"judged"}),
        "csv": {"report", "compared"},
    }
    for name, forms, format in (
        ("a.TXT", REPORT, "table"),
        ("a.txt", JUDGEMENT, "text"),
        ("a.md", REPORT, "markdown"),
        ("a.json", JUDGEMENT, "json"),
    ):
        assert find_format(Path(name), forms).name == format


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("-f", "nonsense"), "There are: text, table, json, html, markdown, latex, junit"),
        (("-o", "x.pdf"), "There are: .txt, .json, .html, .htm, .md, .markdown, .tex, .xml"),
    ],
)
def test_the_gate_refuses_what_it_cannot_write_before_it_measures(folder, args, says, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    (folder / "bad.py").write_text("def model():\n    raise SystemExit('it was measured')\n")
    said = refuse(2, says, "gate", "py:bad.py:model", "-b", "a.json", *args)
    assert "measured" not in said


@pytest.mark.parametrize("command", [("report", "a.json"), ("compare", "a.json", "a.json"), GATE])
@pytest.mark.parametrize("bad", ["bad.pdf", "nowhere/x.json"])
def test_nothing_is_written_where_not_all_can_be(folder, command, bad):
    assert invoke(*command, "-o", "good.html", "-o", bad, code=2).stdout == ""
    assert not (folder / "good.html").exists()


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
    assert literal(escape_latex(hostile)) == shown
    blocks = (
        Card(((hostile, hostile),)),
        Table(hostile, (NAME, VALUE), ((hostile, 1.0), (hostile, 2.0)), strong={1}),
        Heatmap(hostile, ((1.0,),), (hostile,), (hostile,), VALUE),
    )
    page = Document(hostile, (Chapter("c", hostile, blocks),))
    assert len(check(render_latex(page).decode())) == 2


@pytest.mark.parametrize(
    ("escape", "text", "written"),
    [
        (escape_latex, "‖J‖ ≤ 2×", r"$\Vert$J$\Vert$ $\leq$ 2$\times$"),
        (escape_latex, "headᵃ", r"head\textsuperscript{a}"),
        (escape_latex, "café ñ Å", "café ñ Å"),
        (escape_latex, "中\x1b", r"U+4E2D\textbackslash{}x1b"),
        (escape_markdown, "<script>", "&lt;script&gt;"),
        (escape_markdown, "a|b", r"a\|b"),
        (escape_markdown, "*x* _y_ `z`", r"\*x\* \_y\_ \`z\`"),
        (escape_markdown, "[x](javascript:1)", r"\[x\](javascript:1)"),
        (escape_markdown, "two\n# lines", "two\\\\x0a\\# lines"),
        (escape_markdown, "back\\slash", r"back\\slash"),
    ],
)
def test_a_sign_is_written_so_that_its_format_shows_it(escape, text, written):
    assert escape(text) == written


def read(shown) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(shown, "csv").decode(), newline="")))


def cells(section: Section) -> list[tuple[str, str, str, object]]:
    """The layer, sample, column and value of every cell, in order."""
    rows = [
        (str(at) if (at := row.get("layer")) is not None else "", "", name, value)
        for row in section.rows
        for name, value in row.items()
        if name not in ("layer", "head")
    ]
    ids = section.samples.get("ids", ())
    return rows + [
        ("", sample, name, value)
        for name, values in section.samples.items()
        for sample, value in zip(ids, values, strict=True)
        if name != "ids"
    ]


def same(line: dict[str, str], value: object) -> bool:
    if value is None or isinstance(value, str):
        return (line["value"], line["text"]) == ("", value or "")
    number = float(line["value"])
    return not line["text"] and (number == value or (math.isnan(number) and value != value))


def test_every_cell_of_rows_and_samples_is_a_line_that_reads_back(report):
    expected = [(s.measure, *cell) for s in report.sections for cell in cells(s)]
    ids = report.section("jacobian").samples["ids"]
    places = {name: f"cat, {i}.png" for i, name in enumerate(ids)}
    stored = {"ids": tuple(places), "place": tuple(places.values())}
    lines = read(report.model_copy(update={"samples": stored}))
    assert len(lines) == len(expected) > 1000
    for line, (measure, layer, sample, name, value) in zip(lines, expected, strict=True):
        known = (line["measure"], line["layer"], line["sample"], line["column"])
        assert known == (measure, layer, sample, name)
        assert same(line, value), line
        assert line["place"] == places.get(sample, "")
    assert {line["model"] for line in lines} == {report.run.model.spec}


def test_lines_say_what_is_proven_and_obey_no_name(report):
    lines = read(report)
    rows = {(li["measure"], li["row"], li["column"]): li for li in lines if li["row"]}
    exact = rows["bounds", "layer 0 head 1", "exact"]
    assert (exact["status"], exact["domain"]) == ("exact", "at X")
    assert rows["bounds", "layer 0 head 1", "theorem3"]["status"] == "bound"
    assert rows["bounds", "layer 0 head 1", "module"]["status"] == ""
    robust = next(li for li in lines if li["column"].startswith("robust@"))
    assert robust["status"] == "empirical"
    for spec, written in (
        ('a,\x1b[31m"b"\nc', r'a,\x1b[31m"b"\x0ac'),
        ('=LINK("x")', '\'=LINK("x")'),
    ):
        named = read(rename(report, spec=spec))
        assert {line["model"] for line in named} == {written}
        assert all(not line["value"].startswith("'") for line in named)


def test_several_reports_are_a_row_a_model(report, other):
    ranking = rank([report, other])
    lines = read(of_reports(report, other))
    assert [line["model"] for line in lines] == [model.model for model in ranking.models]
    for line, model in zip(lines, ranking.models, strict=True):
        assert line["outcome"] == model.outcome
        assert len(model.summary.rows) == 16
        for row in model.summary.rows:
            assert float(line[row.figure]) == row.value


@pytest.mark.parametrize("width", [60, 80, 100])
def test_every_number_and_heading_survives_a_narrow_terminal(report, other, width):
    """The words of the narrow text are those of the full text, only laid out anew."""
    pattern = re.compile(r"[\w.%×‖/+-]*\d[\w.%×‖/+-]*")

    def words(text: bytes) -> set[str]:
        return set(pattern.findall(text.decode()))

    for page in (show(report), show(report, other)):
        whole, narrow = terminal.render(page), terminal.render(page, width=width)
        assert words(whole) <= words(narrow)
        assert max(map(cell_len, narrow.decode().splitlines())) <= width
        # Off a terminal no table is split.
        assert "…" not in whole.decode()
    assert terminal.render(show(report)).decode().count("head   ‖J‖ᵃ") == 1


def test_colour_changes_no_word(report):
    coloured = terminal.render(show(report), width=80, colour="truecolor").decode()
    plain = terminal.render(show(report), width=80).decode()
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    outside_maps = [line for line in plain.splitlines() if not re.search("[▁▂▃▄▅▆▇█]", line)]
    assert set(outside_maps) <= {line.rstrip() for line in stripped.splitlines()}


XTERM = {"COLUMNS": "70", "TERM": "xterm-256color", "COLORTERM": "", "NO_COLOR": ""}


@pytest.mark.parametrize(
    ("env", "is_terminal", "how"),
    [
        (XTERM, True, {"width": 70, "colour": "256"}),
        (XTERM | {"NO_COLOR": "1"}, True, {"width": 70}),
        ({"COLUMNS": "66"}, False, {"width": 66}),
        ({"COLUMNS": ""}, False, {"width": 80}),
    ],
)
def test_a_stream_gets_its_width_and_its_colours(report, env, is_terminal, how, monkeypatch):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.get_terminal_size", Mock(side_effect=OSError))
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    terminal.write(show(report), stream)
    assert stream.getvalue().encode() == terminal.render(show(report), **how)


def test_names_that_rows_go_by_are_not_broken(report, other):
    """A comparison is wider than 80 columns: its figures stand whole in every piece of it."""
    comparison = compare([report, other])
    page = of_comparison(comparison, [report, other]).page()
    lines = terminal.render(page, width=80).decode().splitlines()
    names = {v.subject for pair in comparison.pairs for v in pair.verdicts if not v.reason}
    assert max(map(len, names)) > 80 // 3
    for name in names:
        assert sum(name in line for line in lines) >= 2, name


def test_heads_say_in_what_their_norm_is_taken(report):
    """A column that says the same of every head of most models is shown where it does not."""
    section = report.section("bounds")
    other = section.rows[0].replace(input="queries apart")
    mixed = section.model_copy(update={"rows": (other, *section.rows[1:])})
    for part, shown in ((section, False), (mixed, True)):
        blocks = find_chapter(show(keep(report, part)), "bounds").blocks
        table = next(block for block in blocks if isinstance(block, Table))
        labels = [column.label for column in table.columns]
        assert ("input" in labels) == shown
        assert all(len(row) == len(labels) for row in table.rows)


def test_long_names_and_wide_characters_leave_room_for_every_column(report, other):
    wide = rename(report, spec="模型权重/" * 12)
    lines = terminal.render(show(wide, other), width=80).decode().splitlines()
    assert max(cell_len(line) for line in lines if " " in line) <= 80
    assert sum(line.count("模型权重") for line in lines) > 12

    def renamed(one, spec):
        section = one.section("jacobian")
        rows = (row.replace(module="encoder.layers.11.attention.output") for row in section.rows)
        named = section.model_copy(update={"rows": tuple(rows)})
        return rename(keep(one, named), spec=spec)

    pair = renamed(report, "models/first/a/long/one"), renamed(other, "models/another/long/one")
    lines = terminal.render(show(*pair), width=80).decode().splitlines()
    rows = [line for line in lines if line.startswith("pixels")]
    assert rows
    assert max(map(cell_len, rows)) <= 80
