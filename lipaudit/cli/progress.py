"""Progress and notes on stderr: a bar with the time left; without a terminal, some lines."""

from __future__ import annotations

import gc
import re
import sys
import time
import traceback
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lipaudit.cli.app import Terminal
from lipaudit.data.hub import silence_clients
from lipaudit.engine.execute import Observer
from lipaudit.errors import first_line, visible
from lipaudit.measures import load_measures
from lipaudit.tables import Note

# Seconds between two lines without a terminal: a log shows that work goes on, and stays short.
HEARTBEAT = 30.0


# A console on stderr: long lines are not broken.
make_console = partial(Console, stderr=True, soft_wrap=True, highlight=False)


@dataclass(eq=False)
class OnStderr(Observer):
    """Draws the progress of a job; restores the terminal at the end of its block.

    Attributes:
        terminal: quiet silences the downloading libraries, too; verbose prints the traceback of a
            failed measure.
        console: where it is drawn.
        bar: the bar of the current measure, on a terminal.
        printed: code and text of the notes that were printed, with # for measures and numbers.
        silence: keeps stdout for the result, inside the block until it is closed.
    """

    terminal: Terminal
    console: Console = field(default_factory=make_console)
    bar: Progress | None = None
    printed: set[tuple[str, str]] = field(default_factory=set)

    def __enter__(self) -> Self:
        """Send prints of model code to stderr, and silence download messages with --quiet.

        Both end with the block, or as soon as a command closes `silence` to print its result.
        """
        # `main` disabled the garbage collector; unused objects of a model would keep its tensors.
        # What was imported so far stays: the collector would walk through it again and again.
        if not gc.isenabled():
            gc.freeze()
            gc.enable()
        self.silence = ExitStack()
        # Text that the code of a model prints is no part of the result: it goes to stderr.
        self.silence.enter_context(redirect_stdout(sys.stderr))
        if self.terminal.quiet:
            self.silence.enter_context(silence_clients())
        return self

    def __exit__(self, *_: object) -> None:
        self.ends("")  # first: the bar puts back the stdout that it found
        self.silence.close()

    def note(self, note: Note) -> None:
        """Print a note on stderr, unless a similar one was printed.

        Every measure of an audit repeats notes on loading, with another number or name of a
        measure: only the first is printed. Notes with the code "reused" (results of an earlier
        run) or "so-far" (samples that no attack broke so far) report progress: all are printed.
        """
        if self.terminal.quiet:
            return
        template = note.text
        if note.code not in ("reused", "so-far"):
            # Numbers and names of measures become #, so that similar notes are equal.
            measures = "|".join(load_measures())
            template = re.sub(rf"\d[\d.,]*|\b({measures})\b", "#", template)
        if (note.code, template) in self.printed:
            return
        self.printed.add((note.code, template))
        colour = "yellow" if note.level == "warning" else "dim"
        text = escape(visible(note.text))
        self.console.print(f"[{colour}]note:[/] {text}")

    def begins(self, measure: str, samples: int) -> None:
        """Start to show the progress of a measure: a bar on a terminal, else only the clock."""
        self.total = samples
        self.done = 0
        self.start = time.monotonic()
        self.last_line = self.start
        if not self.terminal.quiet and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("samples, left:"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.add_task(measure, total=samples)
            self.bar.start()

    def advances(self, measure: str, samples: int) -> None:
        """Move the bar, or print the remaining time now and then."""
        self.done += samples
        self.moves(measure, samples=0.0)

    def moves(self, measure: str, samples: float) -> None:
        """Show progress: move the bar on a terminal, else print a line every HEARTBEAT seconds.

        Args:
            measure: the current measure.
            samples: number of finished samples in the current batch; it may be a fraction.
        """
        # Samples of finished batches, and of the current one.
        done = self.done + samples
        now = time.monotonic()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done)
            return
        is_due = now - self.last_line >= HEARTBEAT
        # No estimate is possible before the first sample or after the last.
        if is_due and 0 < done < self.total and not self.terminal.quiet:
            seconds = (now - self.start) / done
            left = seconds * (self.total - done)
            text = f"{measure}: {done:.0f}/{self.total} samples, about {left:.0f} s left"
            self.console.print(text, markup=False)
            self.last_line = now

    def fails(self, measure: str, error: Exception) -> None:
        """Remove the bar, and print why the measure failed and that other measures continue."""
        self.ends(measure)
        if self.terminal.verbose:
            text = visible("".join(traceback.format_exception(error)), keep="\n\t")
            self.console.print(text, markup=False)
        if not self.terminal.quiet:
            reason = f"{escape(visible(first_line(error)))}; the others still run"
            self.console.print(f"[red]{escape(visible(measure))} failed:[/] {reason}")

    def ends(self, measure: str) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
