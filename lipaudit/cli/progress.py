"""Progress and notes on stderr: a bar with the time left; without a terminal, some lines."""

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
from lipaudit.measures import load_measures
from lipaudit.tables import Note

HEARTBEAT = 30.0


@contextmanager
def mute_libraries(*, quiet: bool) -> Iterator[None]:
    """Make the libraries that download models and data as quiet as the command."""
    if not quiet:
        yield
        return
    from lipaudit.data.hub import silence_clients

    with silence_clients():
        yield


class OnStderr(Observer):
    """Draws the progress of a job; restores the terminal at the end of its block.

    Args:
        model: name of the model.
        quiet: whether to print nothing, and to silence the downloading libraries.
        verbose: whether to print the traceback of a failed measure.
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
        """Print a note; of notes that differ by a measure or a number, only the first.

        Notes on reused parts of a resumed run are printed for each measure.
        """
        # Every measure of an audit repeats notes on loading: print only the first.
        colour = "yellow" if note.level == "warning" else "dim"
        numbers = rf"\d[\d.,]*|\b({'|'.join(load_measures())})\b"
        blank = note.text if note.code == "reused" else re.sub(numbers, "#", note.text)
        shape = note.code, blank
        if not self.quiet and shape not in self.said:
            self.said.add(shape)
            self.console.print(f"[{colour}]note:[/] {escape(visible(note.text))}")

    def begins(self, measure: str, samples: int) -> None:
        """Start a bar, or the clock without a terminal."""
        self.label, self.total, self.done = visible(f"{measure} {self.model}"), samples, 0
        self.start = self.last = time.monotonic()
        if not self.quiet and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("samples, left:"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.add_task(self.label, total=samples)
            self.bar.start()

    def advances(self, measure: str, samples: int) -> None:
        """Move the bar, or print the remaining time now and then."""
        self.done += samples
        self.moves(measure, 0.0)

    def moves(self, measure: str, samples: float) -> None:
        """Move the bar within a part, too."""
        done, now = self.done + samples, time.monotonic()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done)
        # No estimate is possible before the first sample or after the last.
        elif not self.quiet and now - self.last >= HEARTBEAT and 0 < done < self.total:
            left = (now - self.start) / done * (self.total - done)
            text = f"{self.label}: {done:.0f}/{self.total} samples, about {left:.0f} s left"
            self.console.print(text, markup=False)
            self.last = now

    def fails(self, measure: str, error: Exception) -> None:
        """Remove the bar, and print that the other measures continue."""
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
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
