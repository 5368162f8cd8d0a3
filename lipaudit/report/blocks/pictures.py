"""Pictures as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lipaudit.results import Column

Matrix = tuple[tuple[float | None, ...], ...]
State = Literal["kept", "open", "broken"]
"""Whether something is shown to be allowed, may be either, or is shown not to be."""


@dataclass(frozen=True)
class Heatmap:
    """One value per layer and head, or per head and step.

    Attributes:
        title: printed above it.
        values: a row per layer; None where there is no such head.
        rows: names of the layers.
        columns: names of the heads.
        column: how a value reads.
        centre: value without colour, of a scale with two sides: 0 of differences, 1 of ratios.
        axes: what goes down, and what across.
    """

    title: str
    values: Matrix
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    column: Column
    centre: float | None = None
    axes: tuple[str, str] = ("layer", "head")

    def place(self, row: str, column: str) -> str:
        """Name the head of a cell, and its step."""
        by_step = self.axes[1] != "head"
        return f"{row}, {self.axes[1]} {column}" if by_step else f"{row}.{column}"


@dataclass(frozen=True)
class Histogram:
    """Counts per bin, for one or several groups over the same bins."""

    title: str
    x: Column
    edges: tuple[float, ...]
    counts: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Series:
    """Named points, with an interval around y where `low` and `high` are given.

    Attributes:
        label: their name.
        x: along the horizontal axis.
        y: along the vertical axis.
        low: lower ends of the intervals.
        high: upper ends of the intervals.
        left: lower ends of intervals around x, of points that are not joined.
        right: upper ends of those.
        fit: values of a fit at the same x; it is then drawn in place of the joining line.
        guide: a line to compare slopes with, drawn thin and without marks where there is ink.
        names: what each point is of (a head, a sample), to be read at the point.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    fit: tuple[float | None, ...] = ()
    guide: bool = field(default=False, kw_only=True)
    names: tuple[str, ...] = field(default=(), kw_only=True)
    left: tuple[float | None, ...] = field(default=(), kw_only=True)
    right: tuple[float | None, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Scatter:
    """Points that are not joined.

    Attributes:
        title: printed above it.
        x: how the horizontal axis reads.
        y: how the vertical axis reads.
        series: one kind of point each.
        log: draw both axes logarithmic, and positive points only.
        diagonal: draw the line y = x.
        equal: give both axes the same ends.
    """

    title: str
    x: Column
    y: Column
    series: tuple[Series, ...]
    log: bool = True
    diagonal: bool = True
    equal: bool = False

    @property
    def logs(self) -> tuple[bool, bool]:
        """Which axes are logarithmic: the horizontal, the vertical."""
        return self.log, self.log


@dataclass(frozen=True)
class Curve:
    """Joined points with intervals.

    Attributes:
        title: printed above it.
        x: how the horizontal axis reads.
        y: how the vertical axis reads.
        series: one line each.
        log: draw both axes logarithmic.
        log_y: draw the vertical axis logarithmic.
        ticks: places on the horizontal axis by name; empty: as the drawing sees fit.
    """

    title: str
    x: Column
    y: Column
    series: tuple[Series, ...]
    log: bool = False
    ticks: dict[str, float] = field(default_factory=dict)
    log_y: bool = False

    @property
    def logs(self) -> tuple[bool, bool]:
        """Which axes are logarithmic: the horizontal, the vertical."""
        return self.log, self.log or self.log_y


@dataclass(frozen=True)
class Density:
    """A dense matrix over two axes: a joint histogram or an attention map.

    Attributes:
        title: printed above it.
        x: how the horizontal axis reads.
        y: how the vertical axis reads.
        values: one row per y.
        x_range: outer edges of the first and of the last column.
        y_range: outer edges of the first and of the last row.
        value: how an entry reads.
        down: draw the first row on top, as matrices are written.
        names: of the places along both axes, where they have any.
        image: what the entries lie over: a PNG file in base64.
    """

    title: str
    x: Column
    y: Column
    values: Matrix
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    value: Column
    down: bool = False
    names: tuple[str, ...] = ()
    image: str = ""


@dataclass(frozen=True)
class Shares:
    """Bars that are each cut into the same parts, which add up to one.

    Attributes:
        title: printed above them.
        x: how a share reads.
        bars: what each bar is of.
        parts: the share of each part, a number per bar, by the part's name.
    """

    title: str
    x: Column
    bars: tuple[str, ...]
    parts: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Forest:
    """Figures of several things on either side of 0: bars with intervals, and marks.

    Attributes:
        title: printed above them.
        x: how a figure reads.
        bars: what each bar is of, from top to bottom.
        series: figures along `x`, at the number of their bar along `y`; the first is drawn as
            bars.
    """

    title: str
    x: Column
    bars: tuple[str, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Interval:
    """A value between its limits, beside the end of what is allowed of it.

    Attributes:
        label: what it is of.
        value: in the unit of the axis.
        low: its lower limit; None where there is none.
        high: its upper limit.
        end: of what is allowed.
        below: whether what is allowed lies below that end, not above it.
        state: whether it is shown to be allowed.
    """

    label: str
    value: float
    low: float | None
    high: float | None
    end: float
    below: bool
    state: State


@dataclass(frozen=True)
class Intervals:
    """Intervals below each other, on one axis."""

    title: str
    x: Column
    rows: tuple[Interval, ...]


Picture = Heatmap | Histogram | Scatter | Curve | Density | Shares | Intervals | Forest
