"""An attention map or a sample of a report as a PNG picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.report.blocks import Item, Passage
from lipaudit.report.form import Format

if TYPE_CHECKING:
    from lipaudit.report.blocks import Curve, Density


def render(picture: Density | Curve | Item | Passage) -> bytes:
    """Draw an attention map, a row of one, or a sample."""
    from lipaudit.report.draw import plots, portraits

    if isinstance(picture, Item | Passage):
        return portraits.png(picture)
    return plots.png(picture)


FORMAT = Format(
    "png",
    takes="picture",
    render=render,
    suffixes=(".png",),
    refusal=(
        "a PNG shows one attention map or one sample",
        "lipaudit attention MODEL --map LAYER.HEAD -o map.png draws the one, "
        "lipaudit inspect REPORT SAMPLE -o sample.png the other.",
    ),
)
