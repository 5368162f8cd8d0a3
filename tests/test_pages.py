"""What the documentation and the code say of each other: pages that exist, codes that are true."""

import inspect
import pkgutil
import re
from importlib.resources import files
from pathlib import Path

import pytest

import lipaudit
from lipaudit import errors
from lipaudit.gate.rules import configure
from lipaudit.measures import layouts
from lipaudit.settings import RunOptions
from lipaudit.theory.bounds.record import load_bounds
from tests import tutorials
from tests.commands import list_commands

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    *PAGES,
    *sorted((ROOT / "lipaudit").rglob("*.py")),
    *sorted((ROOT / "lipaudit").rglob("*.html")),
    *(ROOT / name for name in ("pyproject.toml", "action.yml", ".pre-commit-hooks.yaml")),
]
CITED = re.compile(r"(?<![\w/.])docs/[\w/.-]+\.\w+")
LINKED = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.LipauditError)
]


def cited(path):
    return [ROOT / name for name in CITED.findall(path.read_text(encoding="utf-8"))]


def linked(path):
    return [path.parent / name for name in LINKED.findall(path.read_text(encoding="utf-8"))]


def test_every_page_that_is_cited_exists():
    pages = {page: path for path in SOURCES for page in cited(path)}
    assert ROOT / "docs/errors.md" in pages
    assert {page: path for page, path in pages.items() if not page.is_file()} == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(path):
    assert [page for page in linked(path) if not page.exists()] == []


def test_the_site_lists_every_page_once():
    text = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8")
    listed = [name for name in re.findall(r"[\w/-]+\.md$", text, re.M) if "reference/" not in name]
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def test_no_page_installs_by_name_what_no_index_has():
    by_name = re.compile(r"pip install lipaudit\b")
    assert [page for page in PAGES if by_name.search(page.read_text(encoding="utf-8"))] == []


def test_what_the_theory_names_is_there():
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs/theory").glob("*.md")]
    functions = [name for text in texts for name in re.findall(r"`(lipaudit[\w.]+:\w+)`", text)]
    tests = [name for text in texts for name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", text)]
    assert len(functions) > 10
    assert len(tests) > 20
    for name in functions:
        pkgutil.resolve_name(name)
    for path, name in tests:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_the_theory_has_every_bound():
    """On its page; a bound of a head at least as comments in its file."""
    text = (ROOT / "docs/theory/bounds.md").read_text(encoding="utf-8")
    files = {name: inspect.getmodule(bound.compute) for name, bound in load_bounds().items()}
    proven = {name for name, file in files.items() if "\n    # " in inspect.getsource(file)}
    tables = layouts().values()
    names = {
        name
        for table in tables
        if table.name.startswith("bounds")
        for name, column in table.columns.items()
        if column.status in ("bound", "certified") and not name.startswith("log10_")
    }
    assert names >= {*load_bounds(), "ball_sharp", "sharp_rss"}
    assert {name for name in names if f"`{name}`" not in text} <= proven == files.keys()


def rows(first):
    """Return the cells of the table of docs/errors.md whose lines begin so."""
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    lines = re.findall(rf"^\| ({first}) \|(.*)\|$", text, re.M)
    return [(key, *(cell.strip() for cell in rest.split("|"))) for key, rest in lines]


def test_the_page_of_errors_has_every_exit_code():
    lines = {int(code): name.strip("`") for code, name, *_ in rows(r"\d+")}
    assert lines == {code.value: code.name for code in errors.ExitCode} | {130: "", 143: ""}


def test_the_page_of_errors_has_every_class_and_its_code():
    lines = {name.strip("`"): int(code) for name, code, _ in rows(r"`\w+Error`")}
    assert lines == {kind.__name__: kind.exit_code.value for kind in CLASSES}


def test_the_page_of_configuration_has_every_key():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    shared = re.search(r"## Keys\n.*?```\n(.*?)```", text, re.DOTALL)
    known = sorted(name.replace("_", "-") for name in RunOptions.options())
    assert re.split(r",\s+", shared[1].strip()) == known
    keys = re.findall(r"^\| `([a-z]+)` \|", text, re.M)
    assert sorted(keys) == sorted(configure({}))


def test_the_page_of_configuration_has_every_variable():
    """A name in capitals, in a file of the package that looks at the environment, is one of it."""
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    own = text[text.index("Read by lipaudit:") : text.index("Read by what lipaudit")]
    listed = set(re.findall(r"`([A-Z_]+)`(?=[^|]*\|[^|]*\|$)", own, re.M))
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "lipaudit").rglob("*.py")]
    looking = "".join(text for text in files if re.search(r"\bos\.environ\b|\benv=\"", text))
    named = set(re.findall(r"[\"']([A-Z][A-Z]+(?:_[A-Z]+)+|RANK)[\"']", looking))
    assert listed == named


def test_the_report_that_the_site_shows_has_the_figures_of_this_code():
    shown = lipaudit.load(ROOT / "docs/site/demo.json").section("bounds").arrays["sharp"]
    report = lipaudit.audit("demo", ["bounds"], samples=1)
    now = report.section("bounds").arrays["sharp"].data
    assert shown.data[:: shown.shape[1]] == pytest.approx(now, rel=1e-3)


def test_the_package_is_typed():
    assert (files("lipaudit") / "py.typed").is_file()


def test_every_command_is_shown_at_work():
    shown = "".join(page.read_text(encoding="utf-8") for page in tutorials.PAGES)
    names = [f"lipaudit {name}" for name in list_commands()]
    assert "lipaudit baseline save" in names
    assert [name for name in names if not re.search(rf"^\$ {name}\b", shown, re.M)] == []


SLOW = {
    "guide/certify": pytest.mark.slow(seconds=150),
    "guide/train": pytest.mark.slow(seconds=22),
}
"""Pages whose commands take long, and are tested one by one elsewhere."""


def replay(page):
    name = f"{page.parent.name}/{page.stem}"
    return pytest.param(page, id=name, marks=SLOW.get(name, ()))


@pytest.mark.rounding
@pytest.mark.parametrize("page", [replay(page) for page in tutorials.PAGES])
def test_a_tutorial_prints_what_it_says(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    assert tutorials.differences(text, tutorials.replayed(text, tmp_path)) == []
