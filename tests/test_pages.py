"""What the documentation, a release and the code say of each other."""

import ast
import inspect
import pkgutil
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lipaudit
from lipaudit import errors
from lipaudit.engine import results
from lipaudit.errors import ExitCode
from lipaudit.gate.rules import configure
from lipaudit.measures import layouts
from lipaudit.report import RENDERERS
from lipaudit.settings import RunOptions
from lipaudit.tables.plugins import GROUP
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.wings.training.monitor import CALLBACKS
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


def test_every_page_that_is_cited_exists():
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    pages = {ROOT / name: path for path, text in texts.items() for name in CITED.findall(text)}
    assert ROOT / "docs/errors.md" in pages
    assert {page: path for page, path in pages.items() if not page.is_file()} == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(path):
    links = LINKED.findall(path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_site_lists_every_page_once_and_none_installs_by_name_what_no_index_has():
    text = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8")
    listed = [name for name in re.findall(r"[\w/-]+\.md$", text, re.M) if "reference/" not in name]
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
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


def test_the_page_of_errors_has_every_exit_code_and_every_class_with_its_code():
    lines = {int(code): name.strip("`") for code, name, *_ in rows(r"\d+")}
    assert lines == {code.value: code.name for code in errors.ExitCode} | {130: "", 143: ""}
    lines = {name.strip("`"): int(code) for name, code, _ in rows(r"`\w+Error`")}
    assert lines == {kind.__name__: kind.exit_code.value for kind in CLASSES}


def test_the_page_of_configuration_has_every_key_and_variable():
    """A name in capitals, in a file of the package that looks at the environment, is one of it."""
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    shared = re.search(r"## Keys\n.*?```\n(.*?)```", text, re.DOTALL)
    known = sorted(name.replace("_", "-") for name in RunOptions.options())
    assert re.split(r",\s+", shared[1].strip()) == known
    keys = re.findall(r"^\| `([a-z]+)` \|", text, re.M)
    assert sorted(keys) == sorted(configure({}))
    own = text[text.index("Read by lipaudit:") : text.index("Read by what lipaudit")]
    listed = set(re.findall(r"`([A-Z_]+)`(?=[^|]*\|[^|]*\|$)", own, re.M))
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "lipaudit").rglob("*.py")]
    looking = "".join(text for text in files if re.search(r"\bos\.environ\b|\benv=\"", text))
    named = set(re.findall(r"[\"']([A-Z][A-Z]+(?:_[A-Z]+)+|RANK)[\"']", looking))
    assert listed == named


def test_every_command_is_shown_at_work():
    shown = "".join(page.read_text(encoding="utf-8") for page in tutorials.PAGES)
    names = [f"lipaudit {name}" for name in list_commands()]
    assert "lipaudit baseline save" in names
    assert [name for name in names if not re.search(rf"^\$ {name}\b", shown, re.M)] == []


SLOW = {
    "guide/certify": pytest.mark.slow(seconds=150),
    "guide/smoothing": pytest.mark.slow(seconds=40),
    "guide/train": pytest.mark.slow(seconds=22),
}
"""Pages whose commands take long, and are tested one by one elsewhere."""


def replay(page):
    name = f"{page.parent.name}/{page.stem}"
    return pytest.param(page, id=name, marks=SLOW.get(name, ()))


@pytest.mark.ci
@pytest.mark.rounding
@pytest.mark.parametrize("page", [replay(page) for page in tutorials.PAGES])
def test_a_tutorial_prints_what_it_says(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    assert tutorials.differences(text, tutorials.replayed(text, tmp_path)) == []


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))


PUBLIC = {
    "lipaudit": (
        [name for name in lipaudit.__all__ if name != "__version__"],
        "LipauditError ModelSpec Observer Report attention_penalty audit bounds load "
        "measure merge monitor rank render summarize watch",
    ),
    "lipaudit.bounds": (
        dir(lipaudit.bounds),
        "appendix_c ball_norm ball_sharp castin every exact heads hu mean_field sharp theorem3 "
        "theorem3_g1",
    ),
    "lipaudit.monitor": ([*CALLBACKS], "LightningCallback TrainerCallback"),
    "commands": (
        [name.replace(" ", "-") for name in list_commands()],
        "attack attention audit baseline-check baseline-save baseline-update bounds "
        "certify check compare corrupt env explain gate init inspect jacobian merge models report "
        "scaling schema train watch weights",
    ),
    "formats": ([*RENDERERS], "csv html json junit latex markdown table text"),
    "exit codes": (
        [f"{code.value}:{code.name}" for code in ExitCode],
        "0:OK 1:REGRESSION 2:USAGE 3:INTERNAL 4:INPUT 5:BASELINE 6:NOT_PROVEN 7:TIME_LIMIT",
    ),
    "groups of entry points": ([GROUP], "lipaudit.wings"),
    "wings of lipaudit": (
        [*PYPROJECT["project"]["entry-points"][GROUP]],
        "certificates corruptions growth training",
    ),
    "scripts": ([*PYPROJECT["project"]["scripts"]], "lipaudit"),
    "extras": (
        [*PYPROJECT["project"]["optional-dependencies"]],
        "accelerate datasets dev onnx peft",
    ),
    "inputs of the action": (
        [*ACTION["inputs"]],
        "baseline current data fail-on html junit markdown report strict torch-index",
    ),
    "outputs of the action": ([*ACTION["outputs"]], "exit-code page verdict"),
    "hooks": ([hook["id"] for hook in HOOKS], "lipaudit-baseline-check"),
}
"""What others write into code, builds and configuration: what there is, and what is promised.

A new name is added here; one that goes or changes breaks a build: say so in CHANGELOG.md.
"""


@pytest.mark.parametrize("kind", PUBLIC)
def test_public_names_are_those_that_are_promised(kind):
    names, promised = PUBLIC[kind]
    assert sorted(names) == promised.split()


def test_the_source_distribution_has_what_its_tests_read():
    sent = set(PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    text = Path(__file__).read_text(encoding="utf-8")
    read = {path.split("/")[0] for path in re.findall(r'ROOT / "([\w./-]+)', text)}
    assert read | {"lipaudit", "tests", "benchmarks", ".ci"} == sent | {"pyproject.toml"}


def list_imports(path: Path, *, for_types: bool) -> set[str]:
    """Return the packages that a file imports when it runs, or those that only its types need."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    under_type_checking = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    imported = set()
    for node in ast.walk(tree):
        if (node in under_type_checking) is not for_types:
            continue
        if isinstance(node, ast.Import):
            imported.update(each.name.split(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add(str(node.module).split(".")[0])
    return imported - sys.stdlib_module_names - {"lipaudit"}


@pytest.mark.parametrize("for_types", [False, True], ids=["at-run-time", "for-types"])
def test_what_is_imported_is_declared(for_types):
    # What only types need is for developers: a user does not install it. Lightning is there when
    # its callback is asked for.
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    groups = [texts for name, texts in extras.items() if name != "dev" or for_types]
    texts = [*project["dependencies"], *(text for group in groups for text in group)]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    files = (ROOT / "lipaudit").rglob("*.py")
    imported = set().union(*(list_imports(path, for_types=for_types) for path in files))
    packages = packages_distributions()
    undeclared = {
        name
        for name in imported - {"lightning"}
        if declared.isdisjoint(map(canonicalize_name, packages.get(name, [name])))
    }
    assert undeclared == set()


def test_links_of_the_readme_are_absolute_on_an_index():
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    source = PYPROJECT["project"]["urls"]["Source"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.findall(r"\]\((?!https?:)([^)]+)", text)
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert len(relative) > 20
    assert f"]({source}/raw/v$HFPR_VERSION/docs/pictures/demo.png)" in text
    shown = {name: "raw" if name.startswith("docs/pictures") else "blob" for name in relative}
    address = source + "/{}/v$HFPR_VERSION/{})"  # pictures as they are, pages as pages
    assert [name for name, how in shown.items() if address.format(how, name) not in text] == []
    assert all(url.startswith(source) for url in PYPROJECT["project"]["urls"].values())


def test_the_container_has_the_declared_versions_and_a_user_that_is_not_root():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    python = next(re.search(r"python:(3\.\d+)-slim", line) for line in lines if "FROM" in line)
    assert f"Programming Language :: Python :: {python[1]}" in PYPROJECT["project"]["classifiers"]
    (torch,) = [line for line in lines if "torch>=" in line]
    declared = [d for d in PYPROJECT["project"]["dependencies"] if d.startswith("torch")]
    assert re.findall(r'"(torch[^"]+)"', torch) == declared
    assert "ARG TORCH_BACKEND=cpu" in lines
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users
    assert users[-1] != "root"


def test_version_and_date_are_the_same_wherever_they_stand(monkeypatch):
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[([\d.]+)\] - ([\d-]+)$", changes, re.M)
    assert (citation["version"], citation["date-released"]) == released[0]
    assert lipaudit.__version__ == released[0][0]
    page = (ROOT / "docs/guide/gate.md").read_text(encoding="utf-8")
    pins = re.findall(r"REPOSITORY(?:@|\n +rev: )(\S+)", page)
    assert pins == [f"v{lipaudit.__version__}"] * 3
    # A report has that of the code that ran: an editable install keeps the one it was made with.
    monkeypatch.setattr(results, "version", lambda _name: "0.0")
    versions = results.versions.__wrapped__()
    assert (versions["lipaudit"], versions["torch"]) == (lipaudit.__version__, "0.0")


def test_every_slow_test_names_its_seconds():
    texts = {path.name: path.read_text() for path in Path(__file__).parent.rglob("*.py")}
    slow = [name for name, text in texts.items() for _ in re.findall(r"\bmark\.slow\b", text)]
    assert len(slow) > 10
    named = r"\bmark\.slow\(seconds=[1-9]"
    assert slow == [name for name, text in texts.items() for _ in re.findall(named, text)]
