"""Pictures of the documentation: those of the package, as files that stand alone."""

from __future__ import annotations

import re

from lipaudit.report.blocks import Curve, Series
from lipaudit.report.charts import draw_svg
from lipaudit.tables import Column

SPACE = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" color="#333333"'
PAPER = '<rect width="100%" height="100%" fill="#ffffff"/>'


def curves(title: str, x: str, y: str, series: tuple[Series, ...]) -> Curve:
    """Lines over sizes, both axes logarithmic."""
    across, up = (Column(label=label, meaning=label, format=",.4g") for label in (x, y))
    return Curve(title, across, up, series, log=True)


def standalone(block: Curve) -> str:
    """Draw a picture, dark on white, as a file."""
    text = re.sub(r"var\(--c\d+, (#\w+)\)", r"\1", draw_svg(block))
    width = int(re.search(r"--width:(\d+)px", text)[1])
    text = text.replace('<g class="marks">', '<g fill="none" pointer-events="all">')
    text = re.sub(r' style="--width:\d+px"', "", text, count=1)
    opened = re.sub(r"^<svg", f'<svg {SPACE} width="{width}"', text)
    return re.sub(r"^(<svg[^>]*>)", lambda m: m[1] + PAPER, opened) + "\n"
