"""Colours of charts and of the map of heads, readable for colour-blind eyes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from lipaudit.report.pictures import Heatmap

Rgb = tuple[int, int, int]
EXTREME = 1e290
"""Values beyond it are not drawn: matplotlib overflows when it adds margins to them."""
# Okabe and Ito's colours, which colour-blind eyes tell apart; a page may set --c0, ... anew.
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
        low, high = (
            self.colours[int(index)],
            self.colours[min(int(index) + 1, len(self.colours) - 1)],
        )
        red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
        return red, green, blue


def compute_scale(block: Heatmap) -> Scale:
    """Return the scale of a map's colours.

    Positive values that span more than a decade and crowd at its low end are placed by their
    logarithm, shares never. About a centre both sides reach equally far.
    """
    known = [v for row in block.values for v in row if v is not None and abs(v) < EXTREME]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if block.centre is not None:
        far = max(high - block.centre, block.centre - low) or 1.0
        return Scale(block.centre - far, block.centre + far, False, _parse_colours(DIVERGING))
    # Shares keep their linear scale: 10 % has to look like a tenth of 100 %.
    wide = low > 0 and high > 10 * low and not block.column.format.endswith("%")
    # Crowded: the median is in the lowest quarter, where a linear scale would show one colour.
    log = wide and median(known) < low + 0.25 * (high - low)
    return Scale(low, high if high > low else low + 1.0, log, _parse_colours(VIRIDIS))


def choose_ink(colour: Rgb) -> str:
    """Return black or white, whichever has the higher contrast (WCAG 2) on a colour."""
    shares = [channel / 255 for channel in colour]
    # The transfer curve of sRGB, undone.
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares
    )
    # Contrast to both is equal where (L + 0.05)^2 = 1.05 * 0.05.
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


def _parse_colours(hexadecimal: str) -> tuple[Rgb, ...]:
    return tuple((c[0], c[1], c[2]) for c in map(bytes.fromhex, hexadecimal.split()))
