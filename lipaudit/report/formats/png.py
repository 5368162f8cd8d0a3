"""An attention map or a sample of a report as a PNG picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lipaudit.report.blocks import Item, Passage
from lipaudit.report.form import Format

if TYPE_CHECKING:
    from lipaudit.report.blocks import Curve, Density


def render(picture: Sequence[Density | Curve | Item | Passage]) -> bytes:
    """Draw an attention map or a row of one, side by side with what it lies over, or a sample."""
    from lipaudit.report.draw import plots, portraits

    of_samples = Item | Passage
    drawn = [portraits.png(b) if isinstance(b, of_samples) else plots.png(b) for b in picture]
    return drawn[0] if len(drawn) == 1 else portraits.joined(drawn)


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
