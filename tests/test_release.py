"""What a release promises: names that no change touches unnoticed, and files that go with it."""

import ast
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
from lipaudit.attacks.kinds import GROUP as ATTACKS
from lipaudit.engine import results
from lipaudit.errors import ExitCode
from lipaudit.measures import GROUP as MEASURES
from lipaudit.monitor import CALLBACKS
from lipaudit.report import RENDERERS
from lipaudit.theory.bounds.record import GROUP as BOUNDS
from tests.commands import list_commands

ROOT = Path(__file__).parents[1]
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
        "certify check compare env explain gate init inspect jacobian merge models report scaling "
        "schema train watch",
    ),
    "formats": ([*RENDERERS], "csv html json junit latex markdown table text"),
    "exit codes": (
        [f"{code.value}:{code.name}" for code in ExitCode],
        "0:OK 1:REGRESSION 2:USAGE 3:INTERNAL 4:INPUT 5:BASELINE 6:NOT_PROVEN 7:TIME_LIMIT",
    ),
    "groups of entry points": (
        [ATTACKS, BOUNDS, MEASURES],
        "lipaudit.attacks lipaudit.bounds lipaudit.measures",
    ),
    "scripts": ([*PYPROJECT["project"]["scripts"]], "lipaudit"),
    "extras": ([*PYPROJECT["project"]["optional-dependencies"]], "accelerate datasets dev"),
    "inputs of the action": (
        [*ACTION["inputs"]],
        "baseline current fail-on html junit markdown report strict torch-index",
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


def test_what_is_imported_is_declared():
    project = PYPROJECT["project"]
    extras = [text for each in project["optional-dependencies"].values() for text in each]
    declared = {
        canonicalize_name(Requirement(text).name) for text in (*project["dependencies"], *extras)
    }
    imported = set()
    for path in (ROOT / "lipaudit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(each.name.split(".")[0] for each in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    packages = packages_distributions()
    undeclared = {
        name
        for name in imported - sys.stdlib_module_names - {"lipaudit"}
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
    missing = {name for name in relative if f"{source}/{_view(name)}/{name})" not in text}
    assert missing == set()
    assert all(url.startswith(source) for url in PYPROJECT["project"]["urls"].values())


def _view(name):
    """What shows a file of the repository: pictures as they are, pages as pages."""
    return f"{'raw' if name.startswith('docs/pictures') else 'blob'}/v$HFPR_VERSION"


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


def test_pages_pin_the_action_and_the_hook_to_this_version():
    page = (ROOT / "docs/guide/gate.md").read_text(encoding="utf-8")
    pins = re.findall(r"[\w-]+/lipaudit(?:@|\n +rev: )(\S+)", page)
    assert pins == [f"v{lipaudit.__version__}"] * 2


def test_version_and_date_are_the_same_wherever_they_stand():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[([\d.]+)\] - ([\d-]+)$", changes, re.M)
    assert (citation["version"], citation["date-released"]) == released[0]
    assert lipaudit.__version__ == released[0][0]


def test_a_report_has_the_version_of_the_code_that_ran(monkeypatch):
    """An editable install keeps the version that it was made with."""
    monkeypatch.setattr(results, "version", lambda _name: "0.0")
    versions = results.versions.__wrapped__()
    assert (versions["lipaudit"], versions["torch"]) == (lipaudit.__version__, "0.0")


SLOW = re.compile(r"\bmark\.slow\b")
NAMED = re.compile(r"\bmark\.slow\(seconds=[1-9]")


def test_every_slow_test_names_its_seconds():
    texts = {path.name: path.read_text() for path in Path(__file__).parent.rglob("*.py")}
    slow = {name: len(SLOW.findall(text)) for name, text in texts.items()}
    assert sum(slow.values()) > 10
    assert slow == {name: len(NAMED.findall(text)) for name, text in texts.items()}
