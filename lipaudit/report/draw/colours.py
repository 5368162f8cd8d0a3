"""Colour scales without matplotlib: viridis, and blue to red, readable for colour-blind eyes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from lipaudit.report.blocks import Heatmap

Rgb = tuple[int, int, int]
# every sixteenth of matplotlib's viridis
VIRIDIS: tuple[Rgb, ...] = (
    (68, 1, 84),
    (72, 24, 106),
    (71, 45, 123),
    (66, 64, 134),
    (59, 82, 139),
    (51, 99, 141),
    (44, 114, 142),
    (38, 130, 142),
    (33, 145, 140),
    (31, 160, 136),
    (40, 174, 128),
    (63, 188, 115),
    (94, 201, 98),
    (132, 212, 75),
    (173, 220, 48),
    (216, 226, 25),
    (253, 231, 37),
)


# ColorBrewer's RdBu, from blue to red
DIVERGING: tuple[Rgb, ...] = (
    (5, 48, 97),
    (33, 102, 172),
    (67, 147, 195),
    (146, 197, 222),
    (209, 229, 240),
    (247, 247, 247),
    (253, 219, 199),
    (244, 165, 130),
    (214, 96, 77),
    (178, 24, 43),
    (103, 0, 31),
)
CATEGORIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Okabe and Ito's colours, told apart by colour-blind eyes; a page may set --c0, ... anew."""
WIDE = 10.0
"""Positive values that span more than this factor may be coloured by their logarithm."""
CROWDED = 0.25
"""They are where their median lies in this part of the scale at its low end."""


@dataclass(frozen=True)
class Scale:
    """Where values lie between the ends of a range of colours."""

    low: float
    high: float
    log: bool
    colours: tuple[Rgb, ...]

    def share(self, value: float | None) -> float | None:
        """Place a value from 0 to 1; None where it lies outside or is no number."""
        if value is None or not self.low <= value <= self.high:
            return None
        low, value, high = (
            map(math.log, (self.low, value, self.high))
            if self.log
            else (self.low, value, self.high)
        )
        return (value - low) / ((high - low) or 1.0)

    def colour(self, share: float) -> Rgb:
        """Return the colour of a share of 0 to 1."""
        return _between(self.colours, share)


def scale(block: Heatmap) -> Scale:
    """Return the scale of a map's colours.

    Positive values that span more than a decade and crowd at its low end are placed by their
    logarithm, shares never. About a centre both sides reach equally far; ratios, whose centre is
    positive, by their logarithm.
    """
    known = [v for row in block.values for v in row if v is not None and math.isfinite(v)]
    low, high, centre = min(known, default=0.0), max(known, default=1.0), block.centre
    if centre is None:
        wide = low > 0 and high > WIDE * low and not block.column.format.endswith("%")
        log = wide and median(known) < low + CROWDED * (high - low)
        return Scale(low, high if high > low else low + 1.0, log, VIRIDIS)
    if centre > 0 and low > 0:
        far = max(high / centre, centre / low)
        far = far if far > 1 else 2.0
        return Scale(centre / far, centre * far, True, DIVERGING)
    far = max(high - centre, centre - low) or 1.0
    return Scale(centre - far, centre + far, False, DIVERGING)


def viridis(share: float) -> Rgb:
    """Return viridis' colour of a share of 0 to 1."""
    return _between(VIRIDIS, share)


def _between(colours: tuple[Rgb, ...], share: float) -> Rgb:
    index, rest = divmod(min(max(share, 0.0), 1.0) * (len(colours) - 1), 1)
    low, high = colours[int(index)], colours[min(int(index) + 1, len(colours) - 1)]
    red, green, blue = (round(a + (b - a) * rest) for a, b in zip(low, high, strict=True))
    return red, green, blue


def contrast(rgb: Rgb) -> str:
    """Return black or white, whichever has the higher contrast (WCAG 2) on a colour."""
    red, green, blue = (_linear(channel / 255) for channel in rgb)
    # equal contrast to both where (L + 0.05)^2 = 1.05 * 0.05
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def _linear(channel: float) -> float:
    """Undo the sRGB transfer curve."""
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
