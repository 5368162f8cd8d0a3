"""Progress and remarks on stderr: a bar with the time left, off a terminal a heartbeat."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lipaudit.engine.execute import Observer
from lipaudit.errors import visible
from lipaudit.settings import measures
from lipaudit.tables import Note

HEARTBEAT = 30.0


@contextmanager
def mute_libraries(*, quiet: bool) -> Iterator[None]:
    """Let the libraries that fetch models and data be as quiet as the command is."""
    if not quiet:
        yield
        return
    from lipaudit.data.hub import silence_clients

    with silence_clients():
        yield


class OnStderr(Observer):
    """Draws what happens to a job; on leaving its block the terminal is as it was.

    Args:
        model: as it was named.
        quiet: whether to say nothing, nor the libraries that fetch models and data.
        verbose: whether to show where a measure failed.
    """

    def __init__(self, model: str, *, quiet: bool, verbose: bool = False) -> None:
        self.model, self.quiet, self.verbose = model, quiet, verbose
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.bar: Progress | None = None
        self.label, self.total, self.done = "", 0, 0
        self.said: set[tuple[str, str]] = set()
        self.start = self.last = 0.0

    def __enter__(self) -> Self:
        self.muted = ExitStack()
        self.muted.enter_context(mute_libraries(quiet=self.quiet))
        return self

    def __exit__(self, *_: object) -> None:
        self.muted.close()
        self.close()

    def note(self, note: Note) -> None:
        """Print a remark, and of several that differ by a measure or a number the first.

        What a resumed run reuses is printed for each measure.
        """
        # Every measure of an audit repeats a remark on loading: only the first is printed.
        colour = "yellow" if note.level == "warning" else "dim"
        shape = note.code, note.text if note.code == "reused" else _blank_numbers(note.text)
        if not self.quiet and shape not in self.said:
            self.said.add(shape)
            self.console.print(f"[{colour}]note:[/] {escape(visible(note.text))}")

    def begins(self, measure: str, samples: int) -> None:
        """Start a bar, or the clock of the heartbeat."""
        self.label, self.total, self.done = visible(f"{measure} {self.model}"), samples, 0
        self.start = self.last = time.monotonic()
        if not self.quiet and self.console.is_terminal:
            self.bar = _make_bar(self.console)
            self.bar.add_task(self.label, total=samples)
            self.bar.start()

    def advances(self, measure: str, samples: int) -> None:
        """Move the bar, or say now and then how long it will take."""
        self.done += samples
        self.moves(measure, 0.0)

    def moves(self, measure: str, samples: float) -> None:
        """Do so within the samples that are measured together, too."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done + samples)
        elif not self.quiet:
            self._beat(time.monotonic(), self.done + samples)

    def fails(self, measure: str, error: Exception) -> None:
        """Take the bar away, and say that the others still run."""
        self.close()
        if self.verbose:
            said = visible("".join(traceback.format_exception(error)), keep="\n\t")
            self.console.print(said, markup=False)
        if not self.quiet:
            reason = str(error).partition("\n")[0]
            self.console.print(
                f"[red]{measure} failed:[/] {escape(visible(reason))}; the others still run"
            )

    def ends(self, measure: str) -> None:
        """Take the bar away."""
        self.close()

    def close(self) -> None:
        """Take the bar away, if there is one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _beat(self, now: float, done: float) -> None:
        # Nothing can be estimated before the first sample, and nothing is left after the last.
        if now - self.last < HEARTBEAT or not 0 < done < self.total:
            return
        left = (now - self.start) / done * (self.total - done)
        text = f"{self.label}: {done:.0f}/{self.total} samples, about {left:.0f} s left"
        self.console.print(text, markup=False)
        self.last = now


def _blank_numbers(text: str) -> str:
    return re.sub(rf"\d[\d.,]*|\b({'|'.join(measures())})\b", "#", text)


def _make_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("samples, left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
