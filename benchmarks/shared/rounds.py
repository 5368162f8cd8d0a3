"""What a round of a benchmark gives, and the table of several rounds of one or two commits."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version

import numpy as np

from benchmarks.shared.timing import Spread, spread


@dataclass(frozen=True)
class Round:
    """One round of a subject (a model, a command) at one commit.

    Attributes:
        forward: CPU seconds of a plain forward of the same samples, None where there is none.
        seconds: CPU seconds by quantity, written in forwards where there is one.
        plain: other figures by name with unit, as they are.
        figures: what was computed, flat: norms as `exact ...`, and bounds of one of them as
            `bound NAME of exact ...`.
        problems: quantities that this commit cannot give, and why.
    """

    forward: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    plain: dict[str, float] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def quantities(self) -> dict[str, float]:
        """Every figure of the table, in its unit."""
        if self.forward is None:
            return {f"{name} (CPU s)": s for name, s in self.seconds.items()} | self.plain
        forwards = {name: seconds / self.forward for name, seconds in self.seconds.items()}
        return {"a plain forward (CPU ms)": 1e3 * self.forward} | forwards | self.plain


Subject = Callable[[], Round]
"""One round; what it sets up it keeps for the next."""
Sides = Mapping[str, Sequence[Round]]
"""The rounds of each side, in their order: the commit before, if there is one, comes first."""


def table(subject: str, sides: Sides) -> Iterator[str]:
    """Write a subject as Markdown: medians of every side (ends), and of their ratio by rounds."""
    names = list(sides)
    heads = [*names, f"{names[1]} / {names[0]}"] if len(names) > 1 else names
    yield f"| {subject} | {' | '.join(heads)} |"
    yield f"|---|{'--:|' * len(heads)}"
    rows = {name: None for rounds in sides.values() for r in rounds for name in r.quantities()}
    for row in rows:
        columns = [[r.quantities().get(row) for r in rounds] for rounds in sides.values()]
        cells = [*map(_cell, columns), *([_ratio(*columns)] if len(names) > 1 else [])]
        yield f"| {row} | {' | '.join(cells)} |"
    yield ""
    yield from _verdicts(sides)
    for name, rounds in sides.items():
        for what, why in {k: v for r in rounds for k, v in r.problems.items()}.items():
            yield f"* {name} has no {what}: {why}"


def footer(command: str, repeats: int, commits: Mapping[str, str]) -> str:
    """Say what a table was made by."""
    versions = f"torch {version('torch')}, Python {platform.python_version()}"
    where = f"one thread of an {platform.machine()} machine without a GPU"
    each = ", ".join(f"{side} is {commit}" for side, commit in commits.items())
    return (
        f"`{command}`: CPU time, medians of {repeats} rounds in turn (ends); {each}; {where}, "
        f"{versions}, {datetime.now(UTC):%Y-%m-%d}."
    )


def _cell(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return str(spread(known)) if known else "–"


def _ratio(before: Sequence[float | None], after: Sequence[float | None]) -> str:
    pairs = zip(before, after, strict=False)
    ratios = [b / a for a, b in pairs if a and b is not None]
    return str(Spread(*spread(ratios))) if ratios else "–"


def _verdicts(sides: Sides) -> Iterator[str]:
    """Compare what was computed: exact norms with each other, bounds with exact norms."""
    first = [rounds[0].figures for rounds in sides.values() if rounds]
    if len(first) > 1:
        for name in (n for n in first[0] if n.startswith("exact") and n in first[1]):
            yield f"* {name}: {_difference(first[0][name], first[1][name])}"
    for side, figures in zip(sides, first, strict=False):
        for line in _below(figures):
            yield f"* {side}: {line}"


def _difference(before: Sequence[float], after: Sequence[float]) -> str:
    """The largest relative difference of two lists of norms."""
    a, b = np.array(before, dtype=float), np.array(after, dtype=float)
    if a.shape != b.shape:
        return f"{len(a):,} figures before, {len(b):,} after: not compared"
    known = np.isfinite(a) & np.isfinite(b)
    apart = np.abs(b - a)[known] / np.maximum(np.abs(a[known]), np.finfo(float).tiny)
    changed = f"; {(~known).sum():,} not given" if not known.all() else ""
    return (
        f"{known.sum():,} norms, largest relative difference {apart.max(initial=0):.1e}{changed}"
    )


def _below(figures: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """How many bounds lie below the exact norm that they bound."""
    below = total = 0
    for name, values in figures.items():
        if name.startswith("bound "):
            bound = np.array(values, dtype=float)
            exact = np.array(figures[name.partition(" of ")[2]], dtype=float)
            below += int((bound < exact).sum())
            total += int((np.isfinite(bound) & np.isfinite(exact)).sum())
    if total:
        yield f"{below:,} of {total:,} bounds below the exact norm"
