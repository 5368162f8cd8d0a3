"""Progress and remarks on stderr: a bar with the time left, off a terminal a heartbeat."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lipaudit.engine.observer import Observer
from lipaudit.results import Note

HEARTBEAT = 30.0


@contextmanager
def muted(*, quiet: bool) -> Iterator[None]:
    """Let the libraries that fetch models and data be as quiet as the command is."""
    if not quiet:
        yield
        return
    from lipaudit.data.hub.commit import hushed

    with hushed():
        yield


class OnStderr(Observer):
    """Draws what happens to a job; on leaving its block the terminal is as it was.

    Args:
        model: as it was named.
        quiet: whether to say nothing.
    """

    def __init__(self, model: str, *, quiet: bool) -> None:
        self.model, self.quiet = model, quiet
        self.console = Console(stderr=True, soft_wrap=True, highlight=False)
        self.bar: Progress | None = None
        self.label, self.total, self.done = "", 0, 0
        self.start = self.last = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note(self, note: Note) -> None:
        """Print a remark; it is also in the report."""
        colour = "yellow" if note.level == "warning" else "dim"
        if not self.quiet:
            self.console.print(f"[{colour}]note:[/] {escape(note.text)}")

    def begins(self, measure: str, samples: int) -> None:
        """Start a bar, or the clock of the heartbeat."""
        self.label, self.total, self.done = f"{measure} {self.model}", samples, 0
        self.start = self.last = time.monotonic()
        if not self.quiet and self.console.is_terminal:
            self.bar = _bar(self.console)
            self.bar.add_task(self.label, total=samples)
            self.bar.start()

    def advances(self, measure: str, samples: int) -> None:
        """Move the bar, or say now and then how long it will take."""
        self.done += samples
        if self.bar is not None:
            self.bar.advance(self.bar.task_ids[0], samples)
        elif not self.quiet:
            self._beat(time.monotonic())

    def ends(self, measure: str) -> None:
        """Take the bar away."""
        self.close()

    def close(self) -> None:
        """Take the bar away, if there is one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _beat(self, now: float) -> None:
        if now - self.last < HEARTBEAT or self.done >= self.total:
            return
        left = (now - self.start) / self.done * (self.total - self.done)
        text = f"{self.label}: {self.done}/{self.total} samples, about {left:.0f} s left"
        self.console.print(text)
        self.last = now


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("samples, left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
