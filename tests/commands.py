"""Commands as they are typed, run in this process, and measures that do what a test needs."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from lipaudit.attacks.kinds import attack_kinds
from lipaudit.cli.app import app
from lipaudit.cli.judge import load_remeasure
from lipaudit.cli.tools import list_explanations
from lipaudit.engine.results import versions
from lipaudit.measures import load_audit_options, load_measures
from lipaudit.report.topics import list_topics
from lipaudit.schema import dumps, load
from lipaudit.tables import Report
from lipaudit.tables.plugins import load_wings
from lipaudit.theory.bounds.record import load_bounds

UNTIMED = ("seconds", "batch_size")
"""What may differ between two runs of one command."""


def list_commands(group: Any = None, path: str = "") -> dict[str, Any]:
    """Return every command by what is typed for it."""
    found = {}
    for name, command in (group or get_command(app)).commands.items():
        typed = f"{path} {name}".strip()
        inner = hasattr(command, "commands")
        found |= list_commands(command, typed) if inner else {typed: command}
    return found


def invoke(*args: object, code: int | None = 0, columns: int | None = None) -> Result:
    """Run a command to its end; fail where its exit code is another (None: any will do)."""
    env = {} if columns is None else {"COLUMNS": f"{columns}"}
    done = CliRunner(env=env).invoke(app, [str(each) for each in args], terminal_width=columns)
    if code is not None:
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.stderr
        assert "internal error" not in done.stderr
    return done


def refuse(code: int, says: str, *args: object) -> str:
    """Run a command that ends in one error and prints nothing else; return what it says."""
    done = invoke(*args, code=code)
    assert len(re.findall("^error: ", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert says in " ".join(done.stderr.split()), done.stderr
    assert done.stdout == ""
    return done.stderr


def read_figures(report: Report | str | Path) -> dict[str, Any]:
    """Return what stands in the file of a report, but for times and the command."""
    document = json.loads(dumps(report if isinstance(report, Report) else load(Path(report))))
    for name in ("created", "command"):
        document["run"].pop(name)
    for row in (row for section in document["sections"] for row in section["rows"]):
        row.pop("seconds", None)
    return document


def read_sections(report: Report | str | Path) -> list[dict[str, Any]]:
    """Return the sections of a report, but for times."""
    return read_figures(report)["sections"]


def find_differences(
    here: Any, there: Any, *, rel: float, abs: float, path: str = ""
) -> list[str]:
    """Return where two documents differ by more than rounding, times aside."""
    if isinstance(here, dict):
        pairs = [(name, here[name], there[name]) for name in here if name not in UNTIMED]
    elif isinstance(here, list | tuple):
        assert len(here) == len(there), path
        pairs = [(i, *pair) for i, pair in enumerate(zip(here, there, strict=True))]
    else:
        number = isinstance(here, float) and isinstance(there, float)
        wanted = pytest.approx(there, rel=rel, abs=abs, nan_ok=True) if number else there
        return [] if here == wanted else [f"{path}: {here} {there}"]
    deeper = (find_differences(a, b, rel=rel, abs=abs, path=f"{path}.{at}") for at, a, b in pairs)
    return [line for lines in deeper for line in lines]


def read_without_maps(report: Report | str | Path) -> dict[str, Any]:
    """Return the figures without the attention map, which several processes do not draw."""
    document = read_figures(report)
    for section in document["sections"]:
        arrays = {n: a for n, a in section.get("arrays", {}).items() if not n.startswith("map")}
        section["arrays"] = arrays
        section.pop("attended", None)
    return document


def replace_parts(monkeypatch: pytest.MonkeyPatch, name: str, parts: Any) -> None:
    """Let a measure compute its parts by a function of the test's own."""
    monkeypatch.setitem(load_measures(), name, replace(load_measures()[name], compute=parts))


def break_measure(
    monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, model: str | None = None
) -> list[str]:
    """Let a measure fail on a model (None: on all); the list gets the models that it measures."""
    compute, seen = load_measures()[name].compute, []

    def parts(net, batches, options):
        seen.append(net.name)
        if model in (None, net.name):
            raise copy(error)  # each with a traceback of its own
        yield from compute(net, batches, options)

    replace_parts(monkeypatch, name, parts)
    return seen


@contextmanager
def installed(folder: Path | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Have the packages in a folder beside those that are installed; read anew what all add."""
    read = (attack_kinds, load_bounds, load_measures, load_wings)
    read += (load_audit_options, load_remeasure, list_explanations, list_topics, versions)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if folder:
                patch.syspath_prepend(folder)
            for function in read:
                function.cache_clear()
            yield patch
    finally:
        for function in read:
            function.cache_clear()


def write_package(
    folder: Path, package: str, source: str, entry: str = "", group: str = "lipaudit.wings"
) -> None:
    """Write a package of one module as it is when installed, with one entry point: its WING."""
    module = f"{package.replace('-', '_')}_of_strangers"
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(f"from lipaudit.tables.plugins import Wing\n{source}")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry or package} = {module}:WING\n")
    sys.modules.pop(module, None)


class Harmful:
    """Makes a folder "harm" when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("harm",)
