"""A history as a page: where each figure stands, how it got there, when it changed most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lipaudit.report.blocks import (
    Block,
    Chapter,
    Curve,
    Document,
    Frame,
    Heatmap,
    Line,
    Paragraph,
    Scorecard,
    Series,
    Table,
)
from lipaudit.report.cells import number, pretty, significant, text
from lipaudit.report.draw.glyphs import level
from lipaudit.report.page.document import LEGEND, MORE
from lipaudit.report.page.remarks import merged
from lipaudit.report.page.views.common import FIT
from lipaudit.results import BoundsRow, Column, Note
from lipaudit.results.figures import finite
from lipaudit.results.history import History, Point, Reading, readings

STEP = Column(label="step", meaning="Of the training, at which it was measured.", format="d")
EPOCH = Column(label="epoch", meaning="Pass over the training's data.", format=".3g", domain="")
SECONDS = Column(label="cost", meaning="What measuring took.", unit="s", format=".2g", domain="")
CHECKPOINT = Column(label="checkpoint", meaning="The file or directory.", format="s")
SHARE = Column(label="share of samples", meaning="Classified rightly.", format=".0%", domain="")
ROWS = Column(label="fragile rows", meaning="Mean over heads.", format=".0%")
NORM = Column(label="Jacobian norm", meaning="Over the samples.")
HEAD = Column(label="||J|| of a head", meaning="Median over the samples.")
OWN = Column(label="of the training", meaning="As the training gave it.", domain="")
CURVES = {
    "accuracy": ("Accuracy, with 95 % Wilson limits", SHARE),
    "norm": ("Jacobian norm of the model", NORM),
    "heads": ("Exact norms of heads", HEAD),
    "fragile": ("Fragile attention rows", ROWS),
}
"""The pictures, each of a group of figures, and how their vertical axis reads."""
LEFT_OUT = ("jacobian_norm/max",)
"""What is no curve: one sample decides it."""
WIDE = 30.0
"""How many times the smallest value the largest is where a curve has a logarithmic axis."""
SPARK = 16
"""Characters of a line that shows the course of a figure."""
FACTOR, POINTS = 1.25, 0.05
"""A change of a norm, or of a share without limits, is named from here on."""


@dataclass(frozen=True)
class Course:
    """One figure at every step where it was measured."""

    last: Reading
    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


def page(history: History) -> Document:
    """Lay a history out: the scorecard of the last step, the curves, the heads, all steps."""
    known = courses(history)
    chapters = [
        Chapter("curves", "Curves", (*_curves(known), *_own(history))),
        Chapter("heads", "Heads over time", tuple(_heads(history))),
        Chapter("steps", "Steps", (_table(history, known),)),
        Chapter("reading", "How to read the figures", (Paragraph(HOW), Paragraph(LEGEND))),
    ]
    return replace(_opening(history, known), chapters=tuple(c for c in chapters if c.blocks))


def screen(history: History) -> Document:
    """Lay out what fits a screen."""
    return replace(_opening(history, courses(history)), more=MORE)


def frame(history: History) -> Frame:
    """Return a line for every step: its figures by the names that loggers use, and its own."""
    facts = ("step", "epoch", "seconds", "checkpoint")
    rows = [
        {name: getattr(point, name) for name in facts}
        | {reading.name: reading.value for reading in readings(point.summary)}
        | {f"own/{name}": value for name, value in point.figures.items()}
        for point in history.points
    ]
    names = tuple(dict.fromkeys([*facts, *(name for row in rows for name in row)]))
    return Frame(names, tuple(tuple(row.get(name) for name in names) for row in rows))


def courses(history: History) -> list[Course]:
    """Return the course of every figure, in the order in which summaries give them."""
    seen: dict[str, list[tuple[int, Reading]]] = {}
    for point in history.points:
        for reading in readings(point.summary):
            seen.setdefault(reading.name, []).append((point.step, reading))
    return [
        Course(
            each[-1][1],
            tuple(step for step, _ in each),
            tuple(reading.value for _, reading in each),
            tuple(reading.low for _, reading in each),
            tuple(reading.high for _, reading in each),
        )
        for each in seen.values()
    ]


def _opening(history: History, known: Sequence[Course]) -> Document:
    lines = tuple(map(_line, known))
    return Document(
        title=f"lipaudit: {history.model} over its training",
        facts=tuple(_facts(history)),
        findings=tuple((said, "curves") for said in _changes(known)),
        chapters=(),
        notes=_notes(history.points),
        scorecard=Scorecard(lines) if lines else None,
    )


def _facts(history: History) -> Iterator[tuple[str, str]]:
    points = history.points
    yield "model", history.model
    suites = dict.fromkeys(point.suite[:16] for point in points if point.suite)
    yield "data", ", suite ".join([history.data, *suites])
    yield "measured", ", ".join(history.measures)
    if points:
        measured = sum(not history.measures.keys() <= point.failures.keys() for point in points)
        many = str(measured) if measured == len(points) else f"{measured} of {len(points)}"
        ends = f"{points[0].step} to {points[-1].step}"
        yield "steps", f"{ends}, {many} measured; the scorecard is of each figure's last"
    shares = [point.share for point in points if point.share is not None]
    seconds = sum(point.seconds for point in points)
    cost = f"{number(seconds, '.3g' if seconds < 1000 else '.0f')} s"
    yield "cost", f"{cost}, {shares[-1]:.1%} of the time of the training" if shares else cost


def _notes(points: Sequence[Point]) -> tuple[Note, ...]:
    """Return what failed, and the warnings of all points, each once."""
    failed = [
        Note(level="warning", code="not-measured", text=f"step {p.step}: {name} failed: {reason}")
        for p in points
        for name, reason in p.failures.items()
    ]
    return merged([*failed, *_warned(points)])


def _warned(points: Sequence[Point]) -> Iterator[Note]:
    """Yield each warning as it last was, with the steps that have it where not all do."""
    given: dict[tuple[str, str], dict[int, str]] = {}
    for point in points:
        for warned in point.summary.warnings:
            given.setdefault((warned.measure, warned.code), {})[point.step] = warned.text
    for (measure, code), texts in given.items():
        *others, last = texts
        where = f"at step {last}" if not others else f"at {len(texts)} steps, the last {last}"
        said = [measure, "" if len(texts) == len(points) else where, texts[last]]
        yield Note(level="warning", code=code, text=": ".join(filter(None, said)))


def _line(course: Course) -> Line:
    """Set the last value of a figure beside the first, the best and the way between them."""
    column, values = course.last.column, course.values
    if len(values) == 1:
        return Line(course.last.label, values[-1], column, f"step {course.steps[-1]} alone")
    said = [f"{spark(values)} first {text(values[0], column)}"]
    if finite(values):
        lower = column.better == "lower"
        most = (min if lower else max)(finite(values))
        at = course.steps[values.index(most)]
        said.append(f"{'lowest' if lower else 'highest'} {text(most, column)} at {at}")
    return Line(course.last.label, values[-1], column, "; ".join(said))


def spark(values: Sequence[float]) -> str:
    """Draw a line of bars from the smallest to the largest value, thinned out to `SPARK`.

    >>> spark((0.0, 1.0, 2.0, 7.0))
    '▁▂▃█'
    """
    known = finite(values)
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = max(len(values) / SPARK, 1.0)
    picked = [values[-1 - round(i * step)] for i in range(min(len(values), SPARK))][::-1]
    span = high - low or 1.0
    return "".join(level((v - low) / span) if math.isfinite(v) else " " for v in picked)


def _changes(known: Sequence[Course]) -> Iterator[str]:
    """Say between which steps figures changed most, those of the same steps together."""
    together: dict[tuple[int, int], list[str]] = {}
    for course in known:
        for steps, said in _change(course):
            together.setdefault(steps, []).append(said)
    for (old, new), each in sorted(together.items()):
        yield f"Largest changes from step {old} to {new}: {'; '.join(each)}."


def _change(course: Course) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield between which steps a figure changed most, if that is more than noise may be."""
    moves = list(pairwise(range(len(course.values))))
    finite_moves = [m for m in moves if len(finite([course.values[i] for i in m])) == 2]
    if not finite_moves:
        return
    share = course.last.column.format.endswith("%")
    i, j = max(finite_moves, key=lambda m: _size(course, m, share=share))
    if not _telling(course, i, j, share=share):
        return
    old, new = (text(course.values[k], course.last.column) for k in (i, j))
    times = "" if share else f" (×{significant(course.values[j] / course.values[i])})"
    said = f"{pretty(course.last.label)}, {old} to {new}{times}"
    yield (course.steps[i], course.steps[j]), said


def _size(course: Course, move: tuple[int, int], *, share: bool) -> float:
    old, new = (course.values[i] for i in move)
    if share or min(old, new) <= 0:
        return abs(new - old)
    return abs(math.log(new / old))


def _telling(course: Course, i: int, j: int, *, share: bool) -> bool:
    """Tell whether a change is larger than the limits of both figures, or than a set size."""
    low, high = (course.low[i], course.low[j]), (course.high[i], course.high[j])
    if None not in (*low, *high):
        (a, b), (c, d) = finite(low), finite(high)
        return b > c or a > d
    size = _size(course, (i, j), share=share)
    return size >= (POINTS if share else math.log(FACTOR)) and min(course.values) > 0


def _curves(known: Sequence[Course]) -> Iterator[Curve]:
    for group, (title, column) in CURVES.items():
        series = tuple(
            Series(pretty(c.last.label), tuple(map(float, c.steps)), c.values, c.low, c.high)
            for c in known
            if c.last.group == group and c.last.name not in LEFT_OUT
        )
        if series:
            yield _curve(title, column, series)


def _curve(title: str, column: Column, series: tuple[Series, ...]) -> Curve:
    """Draw a curve, over a wide span by its logarithm: one that diverges flattens the rest."""
    known = finite(v for each in series for v in each.y)
    wide = bool(known) and min(known) > 0 and max(known) > WIDE * min(known)
    if column.format.endswith("%") or not wide:
        return Curve(title, STEP, column, series)
    return Curve(f"{title}, log scale", STEP, column, series, log_y=True)


def _own(history: History) -> Iterator[Curve]:
    """Draw the training's own figures, each by itself: they share no unit."""
    names = dict.fromkeys(name for point in history.points for name in point.figures)
    for name in names:
        pairs = [
            (float(p.step), value)
            for p in history.points
            for value in finite([p.figures.get(name)])
        ]
        if pairs:
            x, y = zip(*pairs, strict=True)
            yield _curve(f"{name}, of the training itself", OWN, (Series(name, x, y),))


def _heads(history: History) -> Iterator[Block]:
    points = [point for point in history.points if point.heads]
    names = sorted({name for p in points for name in p.heads}, key=_place)
    if names:
        yield Heatmap(
            "Exact norm of every head at every step",
            tuple(tuple(point.heads.get(name) for point in points) for name in names),
            tuple(names),
            tuple(str(point.step) for point in points),
            BoundsRow.columns()["exact"],
            axes=("head", "step"),
        )


def _place(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))


def _table(history: History, known: Sequence[Course]) -> Table:
    points = history.points
    optional: dict[Column, list[Any]] = {
        EPOCH: [p.epoch for p in points],
        CHECKPOINT: [p.checkpoint or None for p in points],
        SECONDS: [p.seconds for p in points],
    }
    given = {column: values for column, values in optional.items() if any(values)}
    columns = [replace(c.last.column, label=c.last.label) for c in known]
    at = [dict(zip(c.steps, c.values, strict=True)) for c in known]
    return Table(
        title=f"Every step ({len(points)})" if len(points) > FIT else "",
        columns=(STEP, *given, *columns),
        rows=tuple(
            (p.step, *(values[i] for values in given.values()), *(each.get(p.step) for each in at))
            for i, p in enumerate(points)
        ),
        folded=len(points) > FIT,
    )


HOW = (
    "Every step was measured on the same samples, so that its figures differ by the weights "
    "alone. Limits are those of one step; two steps that share samples may differ by less than "
    "their limits and still differ. A change lies somewhere between the two steps that are named."
)
