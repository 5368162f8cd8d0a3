"""Viridis without matplotlib: readable for colour-blind eyes and in grey."""

from __future__ import annotations

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


def viridis(share: float) -> Rgb:
    """Return the colour of a share of 0 to 1."""
    index, rest = divmod(min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1), 1)
    low, high = VIRIDIS[int(index)], VIRIDIS[min(int(index) + 1, len(VIRIDIS) - 1)]
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
