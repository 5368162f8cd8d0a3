"""The table of formats, and the one path on which every command writes."""

from pathlib import Path

import pytest

from lipaudit import schema
from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge, parse_rule
from lipaudit.report import (
    COMPARISON,
    JUDGEMENT,
    RENDERERS,
    REPORT,
    Format,
    find_file_format,
    of_comparison,
    of_judgement,
    of_reports,
    render,
)
from lipaudit.report.page.judgement import COLUMNS
from tests.commands import invoke
from tests.report.conftest import keep

RULES = "bounds.exact:median <= +20%", "attack.robust >= -2pp"


@pytest.fixture
def folder(report, tmp_path, monkeypatch):
    """A working directory with a report that the gate can judge."""
    kept = tuple(report.section(name) for name in ("bounds.layers", "attack"))
    saved = keep(report, *kept)
    (tmp_path / "a.json").write_text(schema.dumps(saved), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path


def lipaudit(*args):
    return invoke(*args, code=None)


GATE = ("gate", "a.json", "-b", "a.json", "--fail-on", "bounds.layers.exact <= +5%")


def test_a_format_is_a_function_and_an_entry(folder, monkeypatch):
    """Every command that has a page writes it, whatever is written in it."""

    def outline(page):
        return "".join(f"* {chapter.title}\n" for chapter in page.chapters).encode()

    monkeypatch.setitem(RENDERERS, "outline", Format("outline", "page", outline, (".org",)))
    assert "* Which attacks succeed?\n" in lipaudit("report", "a.json", "-f", "outline").stdout
    compared = lipaudit("compare", "a.json", "a.json", "-o", "c.org")
    assert (compared.exit_code, compared.stdout) == (0, "")
    assert "What changed from" in (folder / "c.org").read_text()
    gated = lipaudit(*GATE, "-o", "g.org")
    assert gated.stdout.endswith("(exit code 0)\n")
    assert (folder / "g.org").read_text() == "* What is the verdict on each rule?\n"


def test_what_each_format_shows_and_how_its_files_are_called():
    kinds = {"report": REPORT, "compared": COMPARISON, "judged": JUDGEMENT}
    shown = {
        name: {kind for kind, forms in kinds.items() if known.takes in forms}
        for name, known in RENDERERS.items()
    }
    assert all(known.name == name for name, known in RENDERERS.items())
    assert shown == {
        **dict.fromkeys(("html", "json", "latex", "markdown", "table"), set(kinds)),
        **dict.fromkeys(("junit", "text"), {"judged"}),
        "brief": {"report", "compared", "judged"},
        "csv": {"report", "compared"},
    }
    suffixes = [s for known in RENDERERS.values() for s in known.suffixes if not known.asked]
    assert {s for s in suffixes if suffixes.count(s) > 1} == {".txt"}
    assert find_file_format(Path("a.TXT"), REPORT).name == "table"
    assert find_file_format(Path("a.txt"), JUDGEMENT).name == "text"


@pytest.mark.parametrize(
    ("name", "chosen", "gets"),
    [
        ("a.md", None, "markdown"),
        ("a.md", "brief", "brief"),
        ("a.md", "json", "markdown"),
        ("a.markdown", "brief", "markdown"),
        ("a.json", "brief", "json"),
    ],
)
def test_of_formats_of_one_suffix_a_file_gets_the_one_that_was_named(name, chosen, gets):
    assert find_file_format(Path(name), REPORT, RENDERERS.get(chosen)).name == gets


def test_a_file_is_what_the_format_says_where_its_suffix_leaves_a_choice(folder):
    done = lipaudit("report", "a.json", "-f", "brief", "-o", "brief.md", "-o", "page.html")
    assert (done.exit_code, done.stdout[:4]) == (0, "### ")
    assert (folder / "brief.md").read_bytes() == done.stdout_bytes
    assert (folder / "page.html").read_text().startswith("<!doctype html>")
    assert lipaudit("report", "a.json", "-o", "page.md").exit_code == 0
    assert (folder / "page.md").read_text().startswith("# lipaudit")


def test_the_forms_that_are_promised_are_those_that_come(report, other):
    assert of_reports(report).keys() - {"screen"} == REPORT
    assert of_reports(report, other).keys() - {"screen"} == REPORT
    assert of_comparison(compare([report, other]), [report, other]).keys() == COMPARISON
    rules = tuple(map(parse_rule, RULES))
    assert of_judgement(judge(report, report, rules)).keys() == JUDGEMENT


@pytest.mark.parametrize("name", [n for n, f in RENDERERS.items() if f.takes not in REPORT])
def test_a_format_that_cannot_show_a_report_says_which_can(report, name):
    plain = keep(report)
    with pytest.raises(UsageError) as refused:
        render(plain, name)
    assert refused.value.message
    assert refused.value.advice == "There are: brief, csv, html, json, latex, markdown, table."


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("-f", "nonsense"), "There are: brief, html, json, junit, latex, markdown, table"),
        (("-o", "x.pdf"), "There are: .html, .htm, .json, .xml, .tex, .md, .markdown"),
    ],
)
def test_the_gate_refuses_what_it_cannot_write_before_it_measures(folder, args, says, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    (folder / "bad.py").write_text("def model():\n    raise SystemExit('it was measured')\n")
    done = lipaudit("gate", "py:bad.py:model", "-b", "a.json", *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert "measured" not in done.output


@pytest.mark.parametrize("command", [("report", "a.json"), ("compare", "a.json", "a.json"), GATE])
@pytest.mark.parametrize(
    ("files", "status"),
    [(("good.html", "bad.pdf"), 2), (("good.html", "nowhere/x.json"), 2)],
)
def test_nothing_is_written_where_not_all_can_be(folder, command, files, status):
    options = [word for name in files for word in ("-o", name)]
    done = lipaudit(*command, *options)
    assert (done.exit_code, done.stdout) == (status, "")
    assert not (folder / "good.html").exists()


@pytest.mark.parametrize("command", [("report", "a.json"), ("compare", "a.json", "a.json"), GATE])
@pytest.mark.parametrize("name", ["html", "json", "latex", "markdown", "table"])
def test_stdout_and_a_file_get_the_same_bytes(folder, command, name):
    suffix = next(iter(RENDERERS[name].suffixes))
    path = folder / f"x{suffix if suffix != '.txt' else '.md'}"
    done = lipaudit(*command, "-f", name, "-o", str(path))
    assert done.exit_code == 0, done.output
    assert done.stdout
    if suffix != ".txt":
        assert path.read_bytes() == done.stdout_bytes


def test_a_judgement_is_a_page_like_any_other(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a narrower one gets the table in parts
    text = lipaudit(*GATE).stdout
    table = lipaudit(*GATE, "-f", "table").stdout
    page = lipaudit(*GATE, "-f", "html").stdout
    for name in ("layer 0", "layer 2"):
        assert all(name in shown for shown in (text, table, page))
    assert "<h2>What is the verdict on each rule? " in page
    head = next(line for line in table.splitlines() if line.startswith("verdict"))
    assert head.split() == [*COLUMNS]
