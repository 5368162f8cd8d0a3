"""A badge as SVG: a figure beside its name, which nothing outside the file draws."""

from __future__ import annotations

from html import escape

from lipaudit.report.blocks import Badge
from lipaudit.report.cells import plain
from lipaudit.report.form import Format

SIZE, PAD, HEIGHT = 11, 6, 20
LEFT = "#434a53"
"""Behind the name."""


def render(badge: Badge) -> bytes:
    """Draw the name on grey and the figure on its colour; screen readers read both."""
    label, message = (escape(plain(text)) for text in (badge.label, badge.message))
    left, right = (_width(plain(text)) + 2 * PAD for text in (badge.label, badge.message))
    lines = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}: {message}">',
        f"<title>{label}: {message}</title>",
        f'<clipPath id="r"><rect width="{left + right}" height="{HEIGHT}" rx="3"/></clipPath>',
        '<g clip-path="url(#r)">',
        f'<rect width="{left}" height="{HEIGHT}" fill="{LEFT}"/>',
        f'<rect x="{left}" width="{right}" height="{HEIGHT}" fill="{badge.colour}"/>',
        "</g>",
        f'<g fill="#ffffff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="{SIZE}" '
        'text-rendering="geometricPrecision" aria-hidden="true">',
        f'<text x="{PAD}" y="14" textLength="{left - 2 * PAD}">{label}</text>',
        f'<text x="{left + PAD}" y="14" textLength="{right - 2 * PAD}">{message}</text>',
        "</g>",
        "</svg>",
    )
    return ("\n".join(lines) + "\n").encode()


def _width(text: str) -> int:
    """Return how wide a text is in the font that is set, or one that is cut as it is."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family="DejaVu Sans")
    # An advance, not an outline, would count blanks at the ends; there are none.
    return round(TextPath((0, 0), text, size=SIZE, prop=font, usetex=False).get_extents().x1) + 1


FORMAT = Format(
    "badge",
    takes="badge",
    render=render,
    suffixes=(".svg",),
    refusal=(
        "a badge is of one report, or of a judgement",
        "lipaudit report A.json -o badge.svg writes it.",
    ),
)
