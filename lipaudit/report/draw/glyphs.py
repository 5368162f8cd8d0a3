"""Pictures out of characters, for terminals and plain Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len

from lipaudit.report.blocks import Curve, Density, Histogram, Scatter, Shares
from lipaudit.report.cells import number, plain, pretty
from lipaudit.report.draw.axes import written
from lipaudit.report.draw.layout import wrap

LEVELS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
POINTS = "o+x*#@%&"
SHADES = " ░▒▓█"
PARTS = "█▒░·"
LONGEST = 28
"""Characters of a name that stands beside its bar, not above it."""


def level(share: float) -> str:
    """Return the bar glyph for a share of 0 to 1."""
    return LEVELS[min(int(_part(share) * len(LEVELS)), len(LEVELS) - 1)]


def _part(share: float) -> float:
    """Return a share as it can be drawn: what is no number, of a damaged file, is nothing."""
    return min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0


def bar(share: float, width: int) -> str:
    """Return a horizontal bar that fills a share of `width` characters, to an eighth."""
    whole, eighth = divmod(round(_part(share) * width * 8), 8)
    return "█" * whole + EIGHTHS[eighth].strip()


def bars(block: Histogram | Shares, width: int) -> list[str]:
    """Draw what consists of bars, a line each."""
    return _shares(block, width) if isinstance(block, Shares) else _histogram(block, width)


def _histogram(block: Histogram, width: int) -> list[str]:
    """Draw a histogram, a line per bin, group below group."""
    block = coarse(block)
    spans = _spans(block)
    lines = []
    for label, counts in block.counts.items():
        top = max(counts, default=0) or 1
        lines += [plain(label)] * (len(block.counts) > 1)
        lines += [
            f"{span}  {bar(count / top, width)} {number(count, '.4g')}"
            for span, count in zip(spans, counts, strict=True)
        ]
    return lines


def _shares(block: Shares, width: int) -> list[str]:
    """Draw bars cut into parts, a line per bar, and the parts by their glyph."""
    names = [plain(name) for name in block.bars]
    pad = max(map(cell_len, names), default=0)
    lines = []
    for i, name in enumerate(names):
        drawn, total = "", 0.0
        for part, glyph in zip(block.parts.values(), PARTS, strict=False):
            total += _part(part[i])
            drawn += glyph * (round(_part(total) * width) - len(drawn))
        beside = name + " " * (pad - cell_len(name) + 2)
        lines += [beside + drawn] if pad <= LONGEST else [*wrap(name, LONGEST + width), drawn]
    legend = zip(PARTS, block.parts, strict=False)
    return [*lines, "   ".join(f"{glyph} {plain(name)}" for glyph, name in legend)]


def coarse(block: Histogram, bins: int = 20) -> Histogram:
    """Join neighbouring bins until no more than `bins` are left."""
    step = -(-(len(block.edges) - 1) // bins)
    starts = range(0, len(block.edges) - 1, step)
    return replace(
        block,
        edges=(*(block.edges[i] for i in starts), block.edges[-1]),
        counts={k: tuple(sum(v[i : i + step]) for i in starts) for k, v in block.counts.items()},
    )


def plot(block: Scatter | Curve, width: int, height: int = 14) -> list[str]:
    """Draw points on a grid of characters, with the ends of both axes written out."""
    points = list(_points(block))
    if not points:
        return ["(no points)"]
    x0, x1 = _ends([x for x, _, _ in points])
    shares = isinstance(block, Curve) and block.y.format.endswith("%")
    y0, y1 = (0.0, 1.0) if shares else _ends([y for _, y, _ in points])
    grid = [[" "] * width for _ in range(height)]
    for x, y, glyph in points:
        column = round(_part((x - x0) / (x1 - x0)) * (width - 1))
        grid[round(_part((y1 - y) / (y1 - y0)) * (height - 1))][column] = glyph
    return _framed(block, grid, (x0, x1, y0, y1))


def pixels(block: Density, width: int) -> list[list[float]]:
    """Lay a density out as shares of 0 to 1, two lines of them per line of text.

    Entries become squares of equal size, or squares of entries become their mean. Shares are
    roots, as in the picture: small entries stay visible.
    """
    import numpy as np

    values = np.array(block.values, dtype=np.float64)
    join = -(-values.shape[1] // width)
    rows, columns = (range(0, size, join) for size in values.shape)
    sums = np.add.reduceat(np.add.reduceat(values, rows, 0), columns, 1)
    counts = np.add.reduceat(np.add.reduceat(np.ones_like(values), rows, 0), columns, 1)
    shares = np.sqrt(sums / counts / (float((sums / counts).max()) or 1.0))
    shares = shares if block.down else shares[::-1]
    times = next((t for t in (4, 2) if t * shares.shape[1] <= width), 1)
    large = shares.repeat(times, 0).repeat(times, 1)
    lines: list[list[float]] = np.pad(large, ((0, len(large) % 2), (0, 0))).tolist()
    return lines


def density(block: Density, width: int) -> list[str]:
    """Draw a density in shades."""
    shares = pixels(block, width)
    return [
        "".join(
            SHADES[round(_part((a + b) / 2) * (len(SHADES) - 1))]
            for a, b in zip(*pair, strict=True)
        )
        for pair in zip(shares[::2], shares[1::2], strict=True)
    ]


def map_plot(block: Density, width: int) -> list[str]:
    """Draw a density in shades, with the ends of both axes written out."""
    rows = density(block, width)
    left, below = frame(block, len(rows[0]), len(rows))
    return [*(start + row for start, row in zip(left, rows, strict=True)), *below]


def frame(block: Density, width: int, height: int) -> tuple[list[str], list[str]]:
    """Return what stands left of each line of a density, and the lines below it: its axes."""
    x0, x1 = _limits(block.x_range, len(block.values[0]), block.x.format)
    y0, y1 = _limits(block.y_range, len(block.values), block.y.format)
    ticks = [y0, *[""] * (height - 2), y1] if block.down else [y1, *[""] * (height - 2), y0]
    pad = max(map(len, ticks))
    label = pretty(block.x.label).center(max(width - len(x0) - len(x1), 0))
    below = [f"{' ' * pad} └{'─' * width}", f"{' ' * (pad + 2)}{x0}{label}{x1}"]
    return [f"{tick:>{pad}} │" for tick in ticks[:height]], below


def _limits(ends: tuple[float, float], entries: int, spec: str) -> tuple[str, str]:
    """Name the ends of an axis: whole numbers name the entries, others their outer edges."""
    half = (ends[1] - ends[0]) / entries / 2 if spec == "d" else 0.0
    return number(ends[0] + half, "g"), number(ends[1] - half, "g")


def legend(block: Scatter | Curve) -> str:
    """Say what the axes and the glyphs are."""
    shown = [s for s in block.series if not s.guide]
    names = [f"{POINTS[i % len(POINTS)]} {plain(s.label)}" for i, s in enumerate(shown)]
    return f"{pretty(block.y.label)} over {pretty(block.x.label)}: " + "   ".join(names)


def _spans(block: Histogram) -> list[str]:
    ends = [number(edge, ".3g") for edge in block.edges]
    left, right = max(map(len, ends[:-1])), max(map(len, ends[1:]))
    return [f"{a:>{left}} to {b:>{right}}" for a, b in zip(ends, ends[1:], strict=False)]


def _points(block: Scatter | Curve) -> Iterator[tuple[float, float, str]]:
    for index, series in enumerate(s for s in block.series if not s.guide):
        for x, y in zip(series.x, series.y, strict=True):
            if all(v > 0 or not log for v, log in zip((x, y), block.logs, strict=True)):
                across, up = (
                    math.log10(v) if log else v for v, log in zip((x, y), block.logs, strict=True)
                )
                yield across, up, POINTS[index % len(POINTS)]


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = max(0.5, abs(low) / 2)  # of one large number 0.5 would be rounded away
    return (low, high) if high > low else (low - room, high + room)


def _power(exponent: float) -> float:
    """Return 10 to a power; what is beyond all numbers is infinite."""
    try:
        return math.pow(10, exponent)
    except OverflowError:
        return math.inf


def _told_apart(ends: tuple[float, float], spec: str) -> list[str]:
    """Write the ends of an axis, with more digits than a table where these do not differ."""
    texts = [number(end, spec) for end in ends]
    return texts if texts[0] != texts[1] else written(ends, spec)


def _framed(
    block: Scatter | Curve,
    grid: list[list[str]],
    ends: tuple[float, float, float, float],
) -> list[str]:
    logs = (block.logs[0],) * 2 + (block.logs[1],) * 2
    x0, x1, y0, y1 = (_power(end) if log else end for end, log in zip(ends, logs, strict=True))
    low, high = _told_apart((y0, y1), block.y.format)
    left = [high, *[""] * (len(grid) - 2), low]
    pad = max(map(len, left))
    rows = [f"{tick:>{pad}} │{''.join(row)}" for tick, row in zip(left, grid, strict=True)]
    names = (
        {place: name for name, place in block.ticks.items()} if isinstance(block, Curve) else {}
    )
    texts = zip((x0, x1), _told_apart((x0, x1), block.x.format), strict=True)
    first, last = (names.get(end) or text for end, text in texts)
    axis = first + last.rjust(len(grid[0]) - len(first))
    return [*rows, " " * pad + " └" + "─" * len(grid[0]), " " * (pad + 2) + axis]
