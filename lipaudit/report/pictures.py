"""Charts as data, and their description in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from lipaudit.report.cells import format_number, format_value, write_math
from lipaudit.tables import Column

Matrix = tuple[tuple[float | None, ...], ...]
EXTREME = 1e290
"""Larger values are not drawn: matplotlib overflows when it adds margins."""


@dataclass(frozen=True)
class Heatmap:
    """A matrix in colours: one value per layer and head, or per query and key.

    Attributes:
        title: printed above the map.
        values: one row per name of `rows`; None for missing entries.
        rows: names of the rows.
        columns: names of the columns.
        column: the column that formats a value.
        axes: what the rows and the columns are.
        centre: neutral value of a scale with two sides, such as 0 for differences.
        square: whether the cells are square, and shown in pictures only: an attention map.
        image: picture below the entries: a PNG file in base64.
    """

    title: str
    values: Matrix
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    column: Column
    axes: tuple[str, str] = ("layer", "head")
    centre: float | None = None
    square: bool = False
    image: str = ""


@dataclass(frozen=True)
class Histogram:
    """Counts per bin, for one or several groups over the same bins."""

    title: str
    x: Column
    edges: tuple[float, ...]
    counts: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Series:
    """Named points, with an interval around y if `low` and `high` are given.

    Attributes:
        label: name of the series.
        x: coordinates along the horizontal axis.
        y: coordinates along the vertical axis.
        low: lower ends of the intervals.
        high: upper ends of the intervals.
        guide: whether this is a line for comparing slopes, drawn thin and without marks.
        names: name of each point (a head, a sample), for its tooltip.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    guide: bool = field(default=False, kw_only=True)
    names: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Curve:
    """Points with intervals.

    Attributes:
        title: printed above it.
        x: the column of the horizontal axis.
        y: the column of the vertical axis.
        series: one colour each.
        log: draw both axes logarithmic.
        joined: whether lines join the points.
        ticks: places on the horizontal axis by name; empty: automatic.
    """

    title: str
    x: Column
    y: Column
    series: tuple[Series, ...]
    log: bool = False
    joined: bool = True
    ticks: dict[str, float] = field(default_factory=dict)


Picture = Heatmap | Histogram | Curve


def describe(block: Picture) -> str:
    """Describe a picture in words: its title, its axes, and the largest figure."""
    match block:
        case Heatmap():
            known = [v for row in block.values for v in row if v is not None and v == v]
            text = f"{len(block.rows)} x {len(block.columns)} entries"
            text += f", largest {format_value(max(known), block.column)}" if known else ""
        case Histogram():
            low, high = (format_number(end, ".3g") for end in (block.edges[0], block.edges[-1]))
            text = f"histogram of {write_math(block.x.label)} from {low} to {high}"
        case Curve():
            names = ", ".join(series.label for series in block.series)
            text = f"{write_math(block.y.label)} over {write_math(block.x.label)} for {names}"
    return f"{block.title}: {text}."


@dataclass(frozen=True)
class Scale:
    """A range of colours for values between two ends."""

    low: float
    high: float
    log: bool

    def share(self, value: float | None) -> float | None:
        """Return the place of a value from 0 to 1; None if it is outside or not a number."""
        if value is None or not self.low <= value <= self.high:
            return None
        ends = self.low, value, self.high
        low, value, high = map(math.log, ends) if self.log else ends
        return (value - low) / ((high - low) or 1.0)


def compute_scale(block: Heatmap) -> Scale:
    """Return the scale of a map's colours.

    Positive values get a logarithmic scale if they span more than a decade and most are at its low
    end; shares never do. With a centre, both sides are equally long.
    """
    known = [v for row in block.values for v in row if v is not None and abs(v) < EXTREME]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if block.centre is not None:
        far = max(high - block.centre, block.centre - low) or 1.0
        return Scale(block.centre - far, block.centre + far, False)
    # Shares keep a linear scale: 10 % has to look like a tenth of 100 %.
    share = block.square or block.column.format.endswith("%")
    wide = low > 0 and high > 10 * low and not share
    # Crowded: the median is in the lowest quarter, where a linear scale would show one colour.
    log = wide and median(known) < low + 0.25 * (high - low)
    return Scale(low, high if high > low else low + 1.0, log)
