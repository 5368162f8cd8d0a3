"""The GitHub action and the pre-commit hook, run with a command that records its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def action():
    return yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


@pytest.fixture
def recorded(tmp_path):
    """Run a script with a `lipaudit` that prints one argument to a line and exits 6."""
    tool = tmp_path / "lipaudit"
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 6\n')
    tool.chmod(0o755)

    def run(script, **variables):
        env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **variables}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines()

    return run


def test_the_action_passes_every_input_as_it_is(action, recorded):
    step = action["runs"]["steps"][-1]
    code, arguments = recorded(
        step["run"],
        CURRENT="$(touch /tmp/x); audit.json",
        BASELINE="base line.json",
        FAIL_ON="jacobian.norm:median <= +5%\n\nattack.robust >= -2pp\n",
        STRICT="true",
        JUNIT="gate.xml",
        SARIF="of code/gate.sarif",
        BRIEF="gate.md",
        HTML="gate.html",
    )
    assert code == 6
    assert arguments == [
        "gate",
        "--baseline",
        "base line.json",
        "--fail-on",
        "jacobian.norm:median <= +5%",
        "--fail-on",
        "attack.robust >= -2pp",
        "--strict",
        "--format",
        "brief",
        "--output",
        "gate.xml",
        "--output",
        "of code/gate.sarif",
        "--output",
        "gate.md",
        "--output",
        "gate.html",
        "--",
        "$(touch /tmp/x); audit.json",
    ]


def test_the_action_with_its_defaults(action, recorded):
    step = action["runs"]["steps"][-1]
    names = {name.replace("-", "_").upper(): name for name in action["inputs"]}
    values = {v: action["inputs"][n].get("default", "audit.json") for v, n in names.items()}
    assert set(values) == set(step["env"])
    _, arguments = recorded(step["run"], **values)
    assert arguments == ["gate", "--baseline", "lipaudit-baseline.json", "--", "audit.json"]


def test_inputs_reach_the_shell_as_variables_only(action):
    for step in action["runs"]["steps"]:
        assert "${{" not in step["run"]


def test_the_hook_runs_the_check(recorded):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    _, arguments = recorded(hook["entry"])
    assert arguments == ["baseline", "check"]
