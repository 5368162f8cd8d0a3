"""The GitHub action and the pre-commit hook, run with a command that records its arguments."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lipaudit.schema import dumps
from tests.gate.cases import NORMS, jacobian, report

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def action():
    return yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


@pytest.fixture
def shell(tmp_path):
    """Run a script as a runner does, with a command of this name in place of the real one."""

    def run(script, name, body, **variables):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        env = {"PATH": path, "GITHUB_OUTPUT": str(tmp_path / "outputs"), **variables}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    return run


PRINT = 'printf "%s\\n" "$@"\nexit 6'
"""A `lipaudit` that prints one argument to a line."""


def test_the_action_passes_every_input_as_it_is(action, shell):
    step = action["runs"]["steps"][-1]
    done = shell(
        step["run"],
        "lipaudit",
        PRINT,
        CURRENT="$(touch /tmp/x); audit.json",
        BASELINE="base line.json",
        FAIL_ON="jacobian.norm:median <= +5%\n\nattack.robust >= -2pp\n",
        STRICT="true",
        JUNIT="gate.xml",
        MARKDOWN="gate.md",
        HTML="gate.html",
        REPORT="now.json",
    )
    assert done.returncode == 6
    rules = "--fail-on 'jacobian.norm:median <= +5%' --fail-on 'attack.robust >= -2pp' --strict"
    files = "--output gate.xml --output gate.md --output gate.html --report now.json"
    typed = f"gate --baseline 'base line.json' {rules} {files} -- '$(touch /tmp/x); audit.json'"
    assert done.stdout.splitlines() == shlex.split(typed)
    names = {name.replace("-", "_").upper(): name for name in action["inputs"]}
    defaults = {v: action["inputs"][n].get("default", "audit.json") for v, n in names.items()}
    given = {name for step in action["runs"]["steps"] for name in step.get("env", ())}
    assert set(defaults) == given - {"FOLDER"}
    typed = "gate --baseline lipaudit-baseline.json -- audit.json"
    assert shell(step["run"], "lipaudit", PRINT, **defaults).stdout.splitlines() == typed.split()
    assert not any("${{" in step.get("run", "") for step in action["runs"]["steps"])


@pytest.mark.parametrize(
    ("growth", "code", "verdict"),
    [(1.0, 0, "pass: 1 unchanged"), (1.5, 1, "worse: Jacobian norm ")],
)
def test_a_job_gets_a_summary_and_outputs(action, shell, tmp_path, growth, code, verdict):
    weights = "a" if growth == 1 else "b"
    (tmp_path / "old.json").write_text(dumps(report(jacobian())))
    (tmp_path / "new.json").write_text(dumps(report(jacobian(growth * NORMS), weights=weights)))
    step = action["runs"]["steps"][-1]
    given = {"CURRENT": "new.json", "BASELINE": "old.json", "HTML": "gate.html"}
    job = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "summary", "PYTHONPATH": str(ROOT)}
    python = f'exec "{sys.executable}" -m lipaudit "$@"'
    done = shell(step["run"], "lipaudit", python, **(dict.fromkeys(step["env"], "") | job | given))
    assert done.returncode == code, done.stderr
    lines = (tmp_path / "outputs").read_text().splitlines()
    said = dict(line.split("=", 1) for line in lines)
    assert said.keys() == set(action["outputs"])
    assert all(f"steps.gate.outputs.{n} " in v["value"] for n, v in action["outputs"].items())
    assert said["verdict"].startswith(verdict)
    assert said["verdict"] in done.stdout
    assert (said["exit-code"], said["page"]) == (str(code), "gate.html")
    assert "jacobian.norm" in (tmp_path / "summary").read_text()


@pytest.mark.parametrize("index", ["", "https://example.org/cpu"])
def test_torch_is_installed_first_from_the_index_that_is_named(action, shell, tmp_path, index):
    (step,) = [each for each in action["runs"]["steps"] if each["name"] == "Install lipaudit"]
    body = """[ "$3" = freeze ] && echo 'torch==2.11.0' && exit
[ "$4" = -c ] && grep ^torch "$5" && shift 2
printf '%s ' "$@"; echo"""
    (tmp_path / "bin").mkdir()
    where = {"TORCH_INDEX": index, "GITHUB_ACTION_PATH": "of the action", "FOLDER": str(tmp_path)}
    done = shell(step["run"], "bin/python", body, GITHUB_PATH=str(tmp_path / "path"), **where)
    first = [f"-m pip install torch torchvision --index-url {index}"] if index else []
    installed = [line.strip() for line in done.stdout.splitlines()]
    assert [line for line in installed if not line.startswith("torch==")][:-1] == first
    assert installed[-2] == "torch==2.11.0"  # what the job has stays
    assert installed[-1].endswith(" of the action")
    assert (tmp_path / "path").read_text() == f"{tmp_path}/bin\n"


def test_the_hook_runs_the_check(shell):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert shell(hook["entry"], "lipaudit", PRINT).stdout.splitlines() == ["baseline", "check"]


def test_the_environment_is_cached_unless_it_is_that_of_the_job(action, shell, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]")
    step = action["runs"]["steps"][0]

    def choose(prefix, index=""):
        body = f'case "$1" in -c) echo "{prefix}";; *) echo "$@";; esac'
        where = {"RUNNER_TEMP": "/tmp/job", "RUNNER_OS": "Linux", "RUNNER_ARCH": "X64"}
        done = shell(
            step["run"], "python", body,
            GITHUB_ACTION_PATH=str(tmp_path), TORCH_INDEX=index, **where,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "outputs").read_text().splitlines()
        (tmp_path / "outputs").unlink()
        return dict(line.split("=", 1) for line in lines)

    assert choose("/job/venv") == {"folder": "/job/venv"}
    cached = choose("")
    assert cached["folder"] == "/tmp/job/lipaudit"
    assert cached == choose("")
    assert cached["key"] != choose("", "https://example.org/cpu")["key"]
