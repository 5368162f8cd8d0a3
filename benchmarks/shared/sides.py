"""The code of a commit and that of the working tree, timed in turn: a process each.

Both run the benchmarks of the working tree; only the package `lipaudit` is another. A side is
asked for one round at a time by its standard input, and answers on its standard output.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.shared.rounds import Round, Subject

ROOT = Path(__file__).parents[2]
ENTRY = ROOT / "benchmarks"
ABSENT = (ImportError, AttributeError, TypeError, LookupError)
"""What is raised where a commit lacks a function, or has it with other arguments."""


def git(*args: str) -> bytes:
    """What a git command of this repository prints."""
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(args)}: {done.stderr.decode().strip()}")
    return done.stdout


def commit(name: str) -> str:
    """The short name of a commit."""
    return git("rev-parse", "--short", f"{name}^{{commit}}").decode().strip()


def present() -> str:
    """What the working tree is."""
    changed = " with changes" if git("status", "--porcelain", "--", "lipaudit").strip() else ""
    return commit("HEAD") + changed


@contextmanager
def package_of(name: str) -> Iterator[Path]:
    """A folder with the package as a commit has it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = git("archive", commit(name), "lipaudit")
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            file.extractall(folder, filter="data")
        yield Path(folder)


class Side:
    """A process with the package of one folder.

    Attributes:
        subjects: what it can measure, in order.
    """

    def __init__(self, package: Path, arguments: Sequence[str]) -> None:
        command = [sys.executable, str(ENTRY), "--side", str(package), *arguments]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.subjects: list[str] = self._answer()

    def round(self, subject: str) -> Round:
        """Ask for one round."""
        self.process.stdin.write(f"{subject}\n")
        self.process.stdin.flush()
        return Round(**self._answer())

    def end(self) -> None:
        """Let it leave."""
        self.process.stdin.close()
        self.process.wait()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self.process.wait()}")
        return json.loads(line)


def compared(
    sides: Mapping[str, Path], arguments: Sequence[str], repeats: int
) -> Iterator[tuple[str, dict[str, list[Round]]]]:
    """Yield every subject with the rounds of all sides, which take turns."""
    with ExitStack() as stack:
        running = {name: Side(package, arguments) for name, package in sides.items()}
        for side in running.values():
            stack.callback(side.end)
        for subject in list(running.values())[-1].subjects:
            rounds: dict[str, list[Round]] = {name: [] for name in running}
            for _ in range(repeats):
                for name, side in running.items():
                    rounds[name].append(side.round(subject))
            yield subject, rounds


def serve(subjects: Mapping[str, Subject]) -> None:
    """Be a side: a round of what is asked for, until nothing is."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    print(json.dumps(list(subjects)), file=answers, flush=True)
    for line in sys.stdin:
        result = attempt(subjects.get(line.strip(), nothing))
        print(json.dumps(asdict(result)), file=answers, flush=True)


def attempt(subject: Subject) -> Round:
    """A round, or why there is none: an older commit may lack what a newer one has."""
    try:
        return subject()
    except ABSENT as error:
        return Round(problems={"figures": f"{type(error).__name__}: {error}"})


def nothing() -> Round:
    """What a side gives of a subject that it does not know."""
    raise LookupError("the benchmark cannot be imported there")
