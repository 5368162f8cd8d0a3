"""Runs tutorials and guides, and writes what their commands print into them.

    python -m tests.tutorials docs/guide/gate.md docs/guide/bounds.md ...

A block with a title is a file of that name; a pyproject.toml is installed. A console block is a
command behind each $, over several lines where they end in a backslash, and what it prints to
stdout, of which a line `...` leaves out a part. Other blocks of Python are executed, and a block
of text behind one is what it prints. `$ python FILE` runs a script of the folder docs/tutorials. A
block below a comment belongs to another test.
"""

import io
import os
import re
import runpy
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lipaudit.cli.app import app
from tests import processes

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if page.parent.name == "tutorials" or "```console" in page.read_text(encoding="utf-8")
)
BLOCK = re.compile(
    r'(?<!-->\n)^```(console|python|text|toml|json)(?: title="(.+?)")?\n(.*?)^```$', re.M | re.S
)
EXAMPLE = re.compile(r"<!-- test: (\w+) -->\n```python\n(.*?)```", re.DOTALL)
TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
model = BertForSequenceClassification(
    BertConfig(vocab_size=50, intermediate_size=64, num_labels=2, **size)
)
ids = torch.randint(1, 50, (16, 12))
data = [
    {"input_ids": i, "attention_mask": torch.ones_like(i), "labels": n % 2}
    for n, i in enumerate(ids)
]
quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
arguments = TrainingArguments("bert", max_steps=4, **quiet)
"""
COMMAND = re.compile(r"(?:.*\\\n)*.*\n")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
LEFT_OUT = "..."


def examples(guide: str) -> dict[str, str]:
    """Return the code below each comment `test: NAME` of a guide."""
    return dict(EXAMPLE.findall((ROOT / f"docs/guide/{guide}.md").read_text(encoding="utf-8")))


def run_example(code: str) -> None:
    exec(compile(code, "example", "exec"), {"__name__": "example"})  # noqa: S102


def replayed(text: str, folder: Path) -> str:
    """Return a page with what its commands print in an empty folder."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    printed = io.StringIO()

    def block(match: re.Match[str]) -> str:
        kind, title, body = match.groups()
        if title:
            Path(folder, title).write_text(body, encoding="utf-8")
            if title == "pyproject.toml":
                _install(folder, tomllib.loads(body)["project"])
        elif kind == "python":
            printed.truncate(printed.seek(0))
            with redirect_stdout(printed):
                exec(compile(body, "tutorial", "exec"), names)  # noqa: S102
        elif kind == "text":
            return f"```text\n{_shortened(printed.getvalue(), body)}```"
        elif kind == "console":
            return "```console\n" + "".join(_console(body)) + "```"
        return match[0]

    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # as a notebook in that folder would have it
        return BLOCK.sub(block, text)


def _console(body: str) -> Iterator[str]:
    for part in re.split(r"^(?=\$ )", body, flags=re.M):
        if not part:
            continue
        command = COMMAND.match(part)[0]
        yield command
        line = command.removeprefix("$ ").replace("\\\n", "").strip()
        yield _shortened(_run(line), part.removeprefix(command))


def _install(folder: Path, project: dict[str, Any]) -> None:
    """Write what an installation of a package would: who it is, and what it declares."""
    about = Path(folder, f"{project['name']}-{project['version']}.dist-info")
    about.mkdir()
    about.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    about.joinpath("entry_points.txt").write_text("\n".join(lines))


def _run(command: str) -> str:
    line, _, code = command.partition("  # exit code ")
    name, *args = shlex.split(line)
    if name == "python":
        runpy.run_path(str(ROOT / "docs/tutorials" / args[0]))
        return ""
    assert name == "lipaudit", command
    if any(Path().glob("*.dist-info")):  # what is installed is read once in a process
        return _run_apart(args)
    done = CliRunner().invoke(app, args, env={"COLUMNS": "80"})
    assert done.exit_code == int(code or 0), f"{command}\n{done.output}"
    return done.stdout


def _run_apart(args: list[str]) -> str:
    here = Path.cwd()
    before = partial(processes.installed, here)
    done = processes.completed(*args, cwd=here, env={"COLUMNS": "80"}, before=before)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _shortened(printed: str, shown: str) -> str:
    """Leave out of an output what a page leaves out of it: it says where each part begins."""
    lines = printed.splitlines(keepends=True)
    if f"\n{LEFT_OUT}\n" not in f"\n{shown}":
        return printed
    first, *parts = f"\n{shown}".split(f"\n{LEFT_OUT}\n")
    kept = "".join(lines[: first.count("\n")])
    for part in parts:
        size = part.rstrip("\n").count("\n") + 1
        if not part:
            kept += f"{LEFT_OUT}\n"
            continue
        begin = part.partition("\n")[0]
        at = next((i for i, line in enumerate(lines) if _alike(line, begin)), len(lines))
        kept += "".join([f"{LEFT_OUT}\n", *lines[at : at + size]])
    return kept


def differences(page: str, replay: str) -> list[tuple[str, str]]:
    """Return the lines that differ by more than numbers do from one machine to the next."""
    lines = list(zip(page.splitlines(), replay.splitlines(), strict=False))
    longer = abs(page.count("\n") - replay.count("\n"))
    return [pair for pair in lines if not _alike(*pair)] + [("", "")] * longer


def _alike(a: str, b: str) -> bool:
    words = (" ".join(NUMBER.sub("0", line).split()) for line in (a, b))
    if len(set(words)) > 1:
        return False
    pairs = zip(map(float, NUMBER.findall(a)), map(float, NUMBER.findall(b)), strict=True)
    return all(abs(x - y) <= 0.02 * max(abs(x), abs(y)) for x, y in pairs)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(replayed(path.read_text("utf-8"), Path(folder)), encoding="utf-8")
