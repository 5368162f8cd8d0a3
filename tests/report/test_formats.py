"""The table of formats, and the one path on which every command writes."""

from pathlib import Path

import pytest

from lipaudit import schema
from lipaudit.errors import UsageError
from lipaudit.report import JUDGEMENT, RENDERERS, REPORT, Format, find_format, render
from tests.commands import invoke
from tests.report.conftest import keep


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
        return "".join(f"* {c.title}\n" for c in page.chapters if c.title).encode()

    monkeypatch.setitem(RENDERERS, "outline", Format("outline", "page", outline, (".org",)))
    assert "* Which attacks succeed?\n" in lipaudit("report", "a.json", "-f", "outline").stdout
    compared = lipaudit("compare", "a.json", "a.json", "-o", "c.org")
    assert (compared.exit_code, compared.stdout) == (0, "")
    assert "What changed from" in (folder / "c.org").read_text()
    monkeypatch.setenv("COLUMNS", "200")  # a narrower screen gets the table in parts
    table = lipaudit(*GATE, "-f", "table").stdout
    heads = ["verdict", "rule", "row", "baseline", "current", "change", "paired", "limits"]
    assert [*heads, "samples"] in [line.split() for line in table.splitlines()]
    gated = lipaudit(*GATE, "-o", "g.org")
    assert gated.stdout.endswith("(exit code 0)\n")
    assert (folder / "g.org").read_text() == "* What is the verdict on each rule?\n"


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


@pytest.mark.parametrize("name", [n for n, f in RENDERERS.items() if f.takes not in REPORT])
def test_a_format_that_cannot_show_a_report_says_which_can(report, name):
    plain = keep(report)
    with pytest.raises(UsageError) as refused:
        render(plain, name)
    assert refused.value.message
    assert refused.value.advice == "There are: table, json, html, markdown, latex, csv."


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
    done = lipaudit("gate", "py:bad.py:model", "-b", "a.json", *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert "measured" not in done.output


@pytest.mark.parametrize("command", [("report", "a.json"), ("compare", "a.json", "a.json"), GATE])
@pytest.mark.parametrize("bad", ["bad.pdf", "nowhere/x.json"])
def test_nothing_is_written_where_not_all_can_be(folder, command, bad):
    done = lipaudit(*command, "-o", "good.html", "-o", bad)
    assert (done.exit_code, done.stdout) == (2, "")
    assert not (folder / "good.html").exists()
