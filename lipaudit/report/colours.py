"""Viridis without matplotlib: readable for colour-blind eyes and in grey."""

from __future__ import annotations

Rgb = tuple[int, int, int]
# every eighth of matplotlib's viridis
VIRIDIS: tuple[Rgb, ...] = (
    (68, 1, 84),
    (71, 44, 122),
    (59, 81, 139),
    (44, 113, 142),
    (33, 144, 141),
    (39, 173, 129),
    (92, 200, 99),
    (170, 220, 50),
    (253, 231, 37),
)


def viridis(share: float) -> Rgb:
    """Return the colour of a share of 0 to 1."""
    index, rest = divmod(min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1), 1)
    low, high = VIRIDIS[int(index)], VIRIDIS[min(int(index) + 1, len(VIRIDIS) - 1)]
    red, green, blue = (round(a + (b - a) * rest) for a, b in zip(low, high, strict=True))
    return red, green, blue


def contrast(rgb: Rgb) -> str:
    """Return black or white, whichever reads better on a colour (Rec. 709 luma)."""
    luma = 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]
    return "#000000" if luma > 110 else "#ffffff"
