"""The attention map of a report as a PNG picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.report.form import Format

if TYPE_CHECKING:
    from lipaudit.report.blocks import Curve, Density


def render(picture: Density | Curve) -> bytes:
    """Draw an attention map, or a row of one."""
    from lipaudit.report.draw.plots import png

    return png(picture)


FORMAT = Format(
    "png",
    takes="picture",
    render=render,
    suffixes=(".png",),
    refusal=(
        "a PNG shows one attention map",
        "lipaudit attention MODEL --map LAYER.HEAD -o map.png draws one.",
    ),
)
