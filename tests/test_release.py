"""What a release promises: names that no change touches unnoticed, and files that go with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import lipaudit
from lipaudit.attacks.kinds import GROUP as ATTACKS
from lipaudit.cli.commands import build
from lipaudit.engine import provenance
from lipaudit.errors import ExitCode
from lipaudit.monitor.callbacks import CALLBACKS
from lipaudit.report.formats import RENDERERS
from lipaudit.settings.registry import GROUP as MEASURES
from lipaudit.tables.bounds import GROUP as BOUNDS

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))


def commands(command=None, path=""):
    """Every command as it is typed."""
    inner = getattr(command or get_command(build()), "commands", None)
    if inner is None:
        return [path]
    return [
        name for key, each in inner.items() for name in commands(each, f"{path} {key}".strip())
    ]


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
        [name.replace(" ", "-") for name in commands()],
        "attack attention audit baseline-check baseline-save baseline-show baseline-update bounds "
        "certify check compare env explain gate init inspect jacobian merge models report scaling "
        "schema train watch",
    ),
    "formats": (
        [*RENDERERS],
        "brief csv html json junit latex markdown table text",
    ),
    "exit codes": (
        [f"{code.value}:{code.name}" for code in ExitCode],
        "0:OK 1:REGRESSION 2:USAGE 3:INTERNAL 4:INPUT 5:BASELINE 6:NOT_PROVEN 7:TIME_LIMIT",
    ),
    "groups of entry points": (
        [ATTACKS, BOUNDS, MEASURES],
        "lipaudit.attacks lipaudit.bounds lipaudit.measures",
    ),
    "scripts": ([*PYPROJECT["project"]["scripts"]], "lipaudit"),
    "extras": (
        [*PYPROJECT["project"]["optional-dependencies"]],
        "accelerate datasets dev mlflow peft tensorboard wandb",
    ),
    "inputs of the action": (
        [*ACTION["inputs"]],
        "baseline brief current fail-on html junit report strict torch-index",
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
    sent = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    read = {
        "lipaudit",
        "tests",
        "benchmarks",
        "docs",
        "CHANGELOG.md",
        "CITATION.cff",
        "action.yml",
    }
    assert read | {".pre-commit-hooks.yaml", ".ci"} == set(sent)


def test_version_and_date_are_the_same_wherever_they_stand():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[([\d.]+)\] - ([\d-]+)$", changes, re.M)
    assert (citation["version"], citation["date-released"]) == released[0]
    assert lipaudit.__version__ == released[0][0]


def test_a_report_has_the_version_of_the_code_that_ran(monkeypatch):
    """An editable install keeps the version that it was made with."""
    monkeypatch.setattr(provenance, "version", lambda _name: "0.0")
    versions = provenance.versions()
    assert (versions["lipaudit"], versions["torch"]) == (lipaudit.__version__, "0.0")
