"""Groups of samples, and how predictions moved, as tables of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lipaudit.gate.comparison import Pair
from lipaudit.gate.groups import list_group_figures
from lipaudit.gate.statistics import ALPHA, Movement, Proportion
from lipaudit.gate.verdicts import format_change
from lipaudit.measures import find_column
from lipaudit.report.blocks import Block, Cells, Paragraph
from lipaudit.report.cells import (
    HEADINGS,
    format_limits,
    format_value,
    pick_columns,
    read_words,
)
from lipaudit.report.rows import read_verdict, tabulate_rows
from lipaudit.tables import Column, Report
from lipaudit.tables.columns import group_values

MOST = 12
"""Number of groups in a table on one page; the worst come first."""
GROUPS = {
    "group": HEADINGS["group"],
    "samples": Column.count("samples", "Number of distinct samples of the group."),
    "value": Column.text("value", "Of yes or no the share of yes, else the median."),
    "95% limits": Column.text(
        "95% limits", "Of a share Wilson's; of a median those of the sign test."
    ),
}
"""The columns of groups; other sections use some of the names in another sense."""
GROUP_CHANGES = pick_columns(
    "group",
    "samples",
    baseline="old",
    current="new",
    paired="paired",
    limits="95% limits",
    p_adjusted="p (groups)",
)
MOVEMENT = pick_columns("predictions", "samples", "share", "95% limits")


def show_groups(report: Report) -> list[Block]:
    """Return a table for each per-sample figure, with a row for each group of samples.

    Without groups there are no tables.
    """
    found = list[Block]()
    for figures in list_group_figures(report):
        first = figures[0]
        column = find_column(first.metric)
        if first.metric.endswith(":mean"):  # the mean of yes-or-no values (1 and 0) is a share
            column = replace(column, format=".1%")
        rows = list[Cells]()
        for figure in figures[:MOST]:
            row: Cells = {
                "group": figure.group,
                "samples": figure.samples,
                "value": format_value(figure.value, column),
            }
            if figure.low is not None and figure.high is not None:
                row["95% limits"] = format_limits(figure.low, figure.high, column)
            rows.append(row)
        title = f"{first.metric} {first.name}".rstrip()
        if len(figures) > MOST:
            title = f"{title} (the worst {MOST} of {len(figures)})"
        found += tabulate_rows(GROUPS, rows, title)
    return found


# Two reports


def count_part(shown: Sequence[object], all_of_them: Sequence[object]) -> str:
    """Return for a title how many of all rows are shown: " (10 of 32)"; empty if all are shown."""
    if len(shown) == len(all_of_them):
        return ""
    return f" ({len(shown)} of {len(all_of_them)})"


def show_group_changes(pair: Pair, most: int) -> list[Block]:
    """Show how groups of samples changed: a table for each figure, with the worst group first.

    Args:
        pair: the comparison of two models.
        most: largest number of groups in a table.
    """
    found = list[Block]()
    figures = group_values(((v.metric, v.name), v) for v in pair.groups if not v.reason)
    for (metric, name), verdicts in figures.items():
        rows = list[Cells]()
        proven = set[int]()
        for i, verdict in enumerate(verdicts[:most]):
            row = read_verdict(verdict)
            # Without a test there is no median of paired changes: show the change of the group.
            row["paired"] = row["paired"] or row["change"]
            rows.append(row)
            if verdict.p_adjusted is not None and verdict.p_adjusted <= ALPHA:
                proven.add(i)
        title = f"{metric} {name}".rstrip() + count_part(rows, verdicts)
        found += tabulate_rows(GROUP_CHANGES, rows, title, strong=proven)
    return found


MOVES = read_words()["moves"]
"""Kinds of moves of a prediction, in words."""


def _list_moves(movement: Movement) -> Iterator[tuple[str, Proportion]]:
    """Yield each kind of move in words, and how many predictions made it, if known."""
    for name, words in MOVES.items():
        part: Proportion | None = getattr(movement, name)
        if part is not None:
            yield words, part


def show_movement(movement: Movement) -> list[Block]:
    """Show how many predictions became wrong, became right or stayed equal, with limits."""
    rows = list[Cells]()
    for words, part in _list_moves(movement):
        rows.append(
            {
                "predictions": words,
                "samples": part.count,
                "share": f"{part.share:.1%}",
                "95% limits": f"{part.low:.1%} to {part.high:.1%}",
            }
        )
    found: list[Block] = [*tabulate_rows(MOVEMENT, rows)]
    text = " ".join(_describe_movement(movement))
    if text:
        found.append(Paragraph(text))
    return found


def _describe_movement(movement: Movement) -> Iterator[str]:
    """Yield the change of the accuracy and the divergence of the outputs, in a sentence each."""
    if movement.change is not None and movement.mcnemar is not None:
        limits = f"{format_change(movement.low, 'pp')} to {format_change(movement.high, 'pp')}"
        change = format_change(movement.change, "pp")
        yield f"Accuracy {change} (limits {limits}, McNemar p = {movement.mcnemar:.2g})."
    if movement.kl is None:
        yield f"No divergence of the outputs: {movement.reason}."
        return
    text = f"Mean KL divergence of the outputs: {movement.kl:.3g} nats"
    if movement.kl_low is not None:
        text += f" (limits {movement.kl_low:.3g} to {movement.kl_high:.3g})"
    yield f"{text}."


def write_movement(movement: Movement) -> str:
    """Write in a line how the predictions moved."""
    equal = movement.equal
    text = f"{equal.share:.1%} of {movement.samples} predictions are equal"
    text += f" ({equal.low:.1%} to {equal.high:.1%})"
    counts = list[str]()
    for words, part in _list_moves(movement):
        if part is not equal:
            counts.append(f"{words} {part.count}")
    if counts:
        text += f"; {', '.join(counts)}"
    if movement.kl is not None:
        text += f"; mean KL {movement.kl:.3g} nats"
    return text
