"""Progress on stderr: a bar with the time left on a terminal, a heartbeat line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lipaudit.measures.measure import Part

HEARTBEAT = 30.0
T = TypeVar("T", bound=Part)


def tracked(parts: Iterable[T], *, total: int, label: str, quiet: bool) -> Iterator[T]:
    """Yield the parts unchanged and show how many samples are done."""
    console = Console(stderr=True)
    if quiet:
        yield from parts
    elif console.is_terminal:
        yield from _bar(parts, total, label, console)
    else:
        yield from _heartbeat(parts, total, label, console)


def _bar(parts: Iterable[T], total: int, label: str, console: Console) -> Iterator[T]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TextColumn("samples, left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task(label, total=total)
        for part in parts:
            progress.advance(task, len(part.ids))
            yield part


def _heartbeat(parts: Iterable[T], total: int, label: str, console: Console) -> Iterator[T]:
    start = last = time.monotonic()
    done = 0
    for part in parts:
        done += len(part.ids)
        now = time.monotonic()
        if now - last >= HEARTBEAT and done < total:
            left = (now - start) / done * (total - done)
            console.print(f"{label}: {done}/{total} samples, about {left:.0f} s left")
            last = now
        yield part
