"""A picture of one's own, in the chapter of a section; it works for several reports, too."""

from __future__ import annotations

from collections.abc import Iterator

from lipaudit.report.blocks import Curve, Series
from lipaudit.report.rows import Sections
from lipaudit.tables import Column

SHARE = Column("share of the samples", "Samples that are at most as confident.", format=".0%")


def draw_confidences(sections: Sections) -> Iterator[Curve]:
    """Draw the confidences in rising order, a line for each report."""
    lines = []
    for label, section in sections.items():
        values = tuple(sorted(section.samples["confidence"]))
        shares = tuple((i + 1) / len(values) for i in range(len(values)))
        lines.append(Series(label or "samples", shares, values))
    column = section.sample_column("confidence")
    yield Curve("How sure is the model of its samples?", SHARE, column, tuple(lines))
