"""The attention map of a report as a PNG picture."""

from __future__ import annotations

from collections.abc import Sequence

from lipaudit.errors import UsageError
from lipaudit.report.blocks import Chapter
from lipaudit.report.page.views.attention import drawn
from lipaudit.results import Report


def render(*reports: Report, lead: Sequence[Chapter] = ()) -> bytes:
    """Draw the map, or the row of one, that a report holds.

    Raises:
        UsageError: no report or several hold one.
    """
    from lipaudit.report.draw.plots import png

    sections = [report.section("attention") for report in reports]
    found = [block for section in sections if section for block in drawn(section)]
    if len(found) != 1:
        raise UsageError(
            f"a picture needs one attention map, not {len(found)}",
            "lipaudit attention MODEL --map LAYER.HEAD -o map.png draws one.",
        )
    return png(found[0])
