"""Commands in processes of their own, forked from one that has imported what all of them import.

They begin in a tenth of a second where an interpreter takes five, and end as any process does.
"""

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

IMPORTED = [
    "lipaudit.api",
    "lipaudit.cli.app",
    "lipaudit.engine.execute",
    "lipaudit.report",
    "matplotlib.figure",
    "timm",
    "torch._dynamo",
    "torch.distributed.rendezvous",
    "transformers",
]
"""What most commands import; none of it runs a model."""
WITHIN = 400.0
"""Seconds after which a process hangs."""


def nothing() -> None:
    """What is done before most commands."""


def wait() -> None:
    """Do nothing until a signal ends the process: a test stops it here, on any machine."""
    while True:
        signal.pause()


def fail() -> None:
    from lipaudit.errors import EvaluationError

    raise EvaluationError("no figures", "Try again.")


def stop_after_parts(count: int, stop: Callable[[], None], rank: str | None = None) -> None:
    """Let a process wait or fail once it has kept so many parts of a measure.

    Args:
        count: of parts.
        stop: `wait` or `fail`.
        rank: of the process that stops; None: any.
    """
    from lipaudit.engine.files import Journal

    keep, numbers = Journal.keep, Counter[int]()

    def keep_and_stop(self: Journal, part: Any) -> None:
        keep(self, part)
        numbers[id(self)] += 1
        if numbers[id(self)] == count and rank in (None, os.environ.get("RANK")):
            stop()

    Journal.keep = keep_and_stop


def installed(folder: Path) -> None:
    """Be where a folder's packages are installed, too: lipaudit reads once which there are."""
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lipaudit"]:
        del sys.modules[name]


@dataclass(frozen=True)
class Command:
    """A command that has begun: the process that runs it, and the files that it writes to."""

    process: BaseProcess
    stderr: Path
    stdout: Path

    def ended(self) -> tuple[int, str]:
        """Its exit status, negative for a signal, and what it said, once it has ended."""
        self.process.join(WITHIN)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"it hangs: {self.stderr.read_text()}")
        return self.process.exitcode, self.stderr.read_text()


@functools.cache
def _forked():
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()
    return context


def forked(function: Callable[..., None], *args: object) -> BaseProcess:
    """Start a function of a module in a process of its own."""
    process = _forked().Process(target=function, args=args)
    process.start()
    return process


def begun(
    *args: str,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    before: Callable[[], None] = nothing,
    then: Sequence[Sequence[str]] = (),
) -> Command:
    """Start a command in a folder, with its cache there: as the fixture `elsewhere` does here.

    Args:
        args: as they are typed.
        cwd: the folder.
        env: variables of its own.
        before: a function of a module that is called first, in the process.
        then: commands that follow in the same process, as long as all is well.
    """
    number = len(list(cwd.glob("*.stderr")))
    said, printed = (cwd / f"{number}.{name}" for name in ("stderr", "stdout"))
    said.touch()
    given = {"XDG_CACHE_HOME": str(cwd / "cache"), "COLUMNS": "300"} | dict(env or {})
    commands = [list(args), *map(list, then)]
    process = forked(_forked_run, commands, given, before, said, printed)
    return Command(process, said, printed)


def completed(*args: object, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` gives it; the options are of `begun`."""
    command = begun(*map(str, args), cwd=cwd, **options)
    code, said = command.ended()
    return subprocess.CompletedProcess(list(args), code, command.stdout.read_text(), said)


def ranks(size: int, *args: str, cwd: Path, **options: Any) -> list[Command]:
    """Start a command in several processes that know each other; the options are of `begun`."""
    meeting = {"WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        begun(*args, cwd=cwd, env=meeting | {"RANK": f"{rank}"}, **options) for rank in range(size)
    ]


def free_port() -> str:
    """A port that nobody has, below those that the system itself hands out before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as taken, suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return str(port)


def _forked_run(
    commands: list[list[str]],
    env: Mapping[str, str],
    before: Callable[[], None],
    said: Path,
    printed: Path,
) -> None:
    for number, path in ((1, printed), (2, said)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    # What runs in the background of a shell has SIGINT ignored, and children inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(said.parent)
    os.environ |= env
    torch.set_num_threads(1)  # with more, sums may change their order from run to run
    before()
    run(commands)


def run(commands: list[list[str]]) -> None:
    """Run commands one after the other, up to the first that fails."""
    from lipaudit.cli import main

    for args in commands:
        sys.argv = ["lipaudit", *args]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":  # what a launcher starts
    run(json.loads(Path(sys.argv[1]).read_text()))


def pose(monkeypatch: pytest.MonkeyPatch, *, rank: int) -> None:
    """Be one of two processes of a launcher, which have not met."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"RANK": f"{rank}", "WORLD_SIZE": "2", **meeting}.items():
        monkeypatch.setenv(name, value)
