"""The figures of groups of samples, as tables of a page."""

from __future__ import annotations

from dataclasses import replace

from lipaudit.gate.groups import list_group_figures
from lipaudit.measures import find_column
from lipaudit.report.blocks import Block, Cells, make_table
from lipaudit.report.cells import format_limits, format_value
from lipaudit.tables import Column, Report

MOST = 12
"""Number of groups in a table on one page; the worst come first."""


def show_groups(report: Report) -> list[Block]:
    """Return a table of the groups for each figure of samples; nothing without groups."""
    found = list[Block]()
    for figures in list_group_figures(report):
        first = figures[0]
        column = find_column(first.metric)
        if first.metric.endswith(":mean"):
            column = replace(column, format=".1%")
        rows = list[Cells]()
        for figure in figures[:MOST]:
            limits = ""
            if figure.low is not None and figure.high is not None:
                limits = format_limits(figure.low, figure.high, column)
            rows.append(
                {
                    "group": figure.group,
                    "samples": figure.samples,
                    "value": format_value(figure.value, column),
                    "limits of the group": limits or None,
                }
            )
        title = f"{first.metric} {first.name}".rstrip()
        if len(figures) > MOST:
            title = f"{title} (the worst {MOST} of {len(figures)})"
        found.append(make_table(title, rows, COLUMNS))
    return found


COLUMNS = {
    "samples": Column.count("samples", "Number of distinct samples of the group."),
    "value": Column.text("value", "Of yes or no the share of yes, else the median."),
    "limits of the group": Column.text(
        "95 % limits", "Of a share Wilson's; of a median those of the sign test."
    ),
}
"""Columns of these tables that other tables use in another sense."""
