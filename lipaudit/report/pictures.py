"""Charts as data, their description in words, and the colours of all formats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from lipaudit.errors import visible
from lipaudit.report.cells import format_number, format_value, write_math
from lipaudit.tables import Column

Matrix = tuple[tuple[float | None, ...], ...]
State = Literal["kept", "open", "broken"]
"""State of a rule in a chart: allowed, undecided or violated."""
Span = tuple[float, float]


@dataclass(frozen=True)
class Heatmap:
    """One value per layer and head.

    Attributes:
        title: printed above the map.
        values: a row per layer; None for missing heads.
        rows: names of the layers.
        columns: names of the heads.
        column: the column that formats a value.
        centre: neutral value of a scale with two sides: 0 for differences, 1 for ratios.
    """

    title: str
    values: Matrix
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    column: Column
    centre: float | None = None


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
class Scatter:
    """Positive points on logarithmic axes with the line y = x; each series has its own marks."""

    title: str
    x: Column
    y: Column
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Curve:
    """Points with intervals, joined by lines.

    Attributes:
        title: printed above it.
        x: the column of the horizontal axis.
        y: the column of the vertical axis.
        series: one line each.
        log: draw both axes logarithmic.
        ticks: places on the horizontal axis by name; empty: automatic.
    """

    title: str
    x: Column
    y: Column
    series: tuple[Series, ...]
    log: bool = False
    ticks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Density:
    """A dense matrix over two axes: a joint histogram or an attention map.

    Attributes:
        title: printed above it.
        x: the column of the horizontal axis.
        y: the column of the vertical axis.
        values: one row per y.
        x_range: outer edges of the first and of the last column.
        y_range: outer edges of the first and of the last row.
        value: the column that formats an entry.
        down: whether the first row is on top, as in a matrix.
        names: names of the places along both axes, if any.
        image: picture below the entries: a PNG file in base64.
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


Picture = Heatmap | Histogram | Scatter | Curve | Density


def describe(block: Picture) -> str:
    """Describe a picture in words: its title, its axes, and the figures or the extremes."""
    match block:
        case Heatmap():
            known = [
                (value, f"{row}.{column}")
                for row, line in zip(block.rows, block.values, strict=True)
                for column, value in zip(block.columns, line, strict=True)
                if value is not None and value == value
            ]
            text = f"{len(block.rows)} layers x {len(block.columns)} heads"
            if known:
                value, place = max(known)
                text += f", largest {format_value(value, block.column)} at {place}"
        case Histogram():
            low, high = (format_number(end, ".3g") for end in (block.edges[0], block.edges[-1]))
            text = f"histogram of {write_math(block.x.label)} from {low} to {high}"
        case Density():
            across, up = name_places(block)
            value, y, x = max(
                (v or 0.0, y, x) for y, row in enumerate(block.values) for x, v in enumerate(row)
            )
            size = f"{len(up)} x {len(across)} entries"
            text = (
                f"{size}, largest {format_value(value, block.value)} at {across[x][0]}, {up[y][0]}"
            )
        case Scatter() | Curve():
            names = ", ".join(series.label for series in block.series)
            text = f"{write_math(block.y.label)} over {write_math(block.x.label)} for {names}"
    return f"{block.title}: {text}."


def name_places(block: Density) -> tuple[list[tuple[str, Span]], list[tuple[str, Span]]]:
    """Name the columns and rows of a matrix: by number if they are counted, else by their ends."""
    axes = []
    for column, (first, last), count in (
        (block.x, block.x_range, len(block.values[0])),
        (block.y, block.y_range, len(block.values)),
    ):
        # Entries are equally wide; counted places have their number in the middle.
        step, places = (last - first) / count, []
        for i in range(count):
            low, high = first + i * step, first + (i + 1) * step
            text = f"{format_number(low, '.3g')} to {format_number(high, '.3g')}"
            if column.format == "d" and step == 1:
                name = f" ({visible(block.names[i])})" if i < len(block.names) else ""
                text = f"{low + 0.5:.0f}{name}"
            places.append((f"{write_math(column.label)} {text}", (low, high)))
        axes.append(places)
    return axes[0], axes[1]


# Colours of charts and of the map of heads, readable for colour-blind eyes


Rgb = tuple[int, int, int]
EXTREME = 1e290
"""Larger values are not drawn: matplotlib overflows when it adds margins."""
# Okabe and Ito's colours, distinguishable for colour-blind eyes; a page may redefine --c0, ...
CATEGORIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
# Every sixteenth colour of matplotlib's viridis; the eleven of ColorBrewer's RdBu, blue first.
VIRIDIS = """440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80 3fbc73
5ec962 84d44b addc30 d8e219 fde725"""
DIVERGING = "053061 2166ac 4393c3 92c5de d1e5f0 f7f7f7 fddbc7 f4a582 d6604d b2182b 67001f"


@dataclass(frozen=True)
class Scale:
    """A range of colours for values between two ends."""

    low: float
    high: float
    log: bool
    colours: tuple[Rgb, ...]

    def share(self, value: float | None) -> float | None:
        """Return the place of a value from 0 to 1; None if it is outside or not a number."""
        if value is None or not self.low <= value <= self.high:
            return None
        ends = self.low, value, self.high
        low, value, high = map(math.log, ends) if self.log else ends
        return (value - low) / ((high - low) or 1.0)

    def colour(self, share: float) -> Rgb:
        """Return the colour of a share of 0 to 1."""
        index, part = divmod(min(max(share, 0.0), 1.0) * (len(self.colours) - 1), 1)
        low, high = (self.colours[min(int(index) + i, len(self.colours) - 1)] for i in (0, 1))
        red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
        return red, green, blue


def compute_scale(block: Heatmap) -> Scale:
    """Return the scale of a map's colours.

    Positive values get a logarithmic scale if they span more than a decade and most are at its low
    end; shares never do. With a centre, both sides are equally long.
    """
    known = [v for row in block.values for v in row if v is not None and abs(v) < EXTREME]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if block.centre is not None:
        far = max(high - block.centre, block.centre - low) or 1.0
        return Scale(block.centre - far, block.centre + far, False, _parse_colours(DIVERGING))
    # Shares keep a linear scale: 10 % has to look like a tenth of 100 %.
    wide = low > 0 and high > 10 * low and not block.column.format.endswith("%")
    # Crowded: the median is in the lowest quarter, where a linear scale would show one colour.
    log = wide and median(known) < low + 0.25 * (high - low)
    return Scale(low, high if high > low else low + 1.0, log, _parse_colours(VIRIDIS))


def choose_ink(colour: Rgb) -> str:
    """Return black or white, whichever has the higher contrast (WCAG 2) on a colour."""
    shares = [channel / 255 for channel in colour]
    # Invert the transfer curve of sRGB.
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares
    )
    # Both contrasts are equal at (L + 0.05)^2 = 1.05 * 0.05.
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def _parse_colours(hexadecimal: str) -> tuple[Rgb, ...]:
    return tuple((c[0], c[1], c[2]) for c in map(bytes.fromhex, hexadecimal.split()))
