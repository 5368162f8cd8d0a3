"""Groups of samples, and how predictions moved, as tables of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lipaudit.gate.comparison import Pair
from lipaudit.gate.groups import list_group_figures
from lipaudit.gate.statistics import ALPHA, Movement, Proportion
from lipaudit.measures import find_column
from lipaudit.report.blocks import Block, Cells, Paragraph, Table
from lipaudit.report.cells import (
    HEADINGS,
    format_limits,
    format_value,
    format_with_limits,
    pick_columns,
    read_words,
)
from lipaudit.report.rows import list_distinct, read_verdict, tabulate_rows
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
    paired="paired change",
    limits="95% limits",
    p_adjusted="p (groups)",
)
MOVEMENT = pick_columns("predictions", "samples", "share", "95% limits")


def show_groups(report: Report) -> list[Table]:
    """Return a table for each per-sample figure, with a row for each group of samples.

    Without groups there are no tables.
    """
    tables = []
    for figures in list_group_figures(report):  # one figure of all groups, the worst group first
        first = figures[0]
        column = find_column(first.metric)
        if first.metric.endswith(":mean"):  # the mean of yes-or-no values (1 and 0) is a share
            column = replace(column, format=".1%")
        rows = []
        for figure in figures[:MOST]:
            value = format_value(figure.value, column)
            if figure.low is None:  # an upper limit has no lower one: ≤ 62.5%
                value = format_with_limits(value, None, figure.high, column)
            row: Cells = {"group": figure.group, "samples": figure.samples, "value": value}
            if figure.low is not None and figure.high is not None:
                row["95% limits"] = format_limits(figure.low, figure.high, column)
            rows.append(row)
        title = f"{first.metric} {first.name}".rstrip()
        if len(figures) > MOST:
            title += f" (the worst {MOST} of {len(figures)})"
        tables += tabulate_rows(GROUPS, rows, title)
    return tables


# Two reports


def count_part(shown: Sequence[object], all_of_them: Sequence[object]) -> str:
    """Return the end of a title, " (10 of 32)", if only some rows are shown; else empty."""
    if len(shown) == len(all_of_them):
        return ""
    return f" ({len(shown)} of {len(all_of_them)})"


def show_group_changes(pair: Pair, most: int) -> list[Table]:
    """Show how groups of samples changed: a table for each figure, with the worst group first.

    Args:
        pair: the comparison of two models.
        most: largest number of groups in a table.
    """
    tables = []
    # The verdicts on each figure. `pair.groups` has the worst group of a figure first.
    figures = group_values(((v.metric, v.name), v) for v in list_distinct(pair.groups))
    for verdicts in figures.values():  # of one figure: a verdict for each group
        rows = []
        proven = set()  # indices of rows: they are printed in bold
        for i, verdict in enumerate(verdicts[:most]):
            rows.append(read_verdict(verdict))
            if verdict.p_adjusted is not None and verdict.p_adjusted <= ALPHA:
                proven.add(i)
        # The title names the figure, without the group of the first verdict.
        without_group = verdicts[0].model_copy(update={"group": ""})
        title = without_group.subject + count_part(rows, verdicts)
        tables += tabulate_rows(GROUP_CHANGES, rows, title, strong=proven)
    return tables


MOVES = read_words()["moves"]
"""Kinds of moves of a prediction, in words."""


def _list_moves(movement: Movement) -> Iterator[tuple[str, Proportion]]:
    """Yield each kind of move in words, such as `right to wrong`, and the share of predictions.

    Kinds whose share is unknown are left out: without labels, no prediction is right or wrong.
    """
    for name, words in MOVES.items():
        proportion: Proportion | None = getattr(movement, name)
        if proportion is not None:
            yield words, proportion


def show_movement(movement: Movement | None) -> list[Block]:
    """Show how many predictions became wrong, became right or stayed equal, with 95% limits."""
    if movement is None:  # a report has no predictions
        return []
    rows = []
    for words, moved in _list_moves(movement):
        rows.append(
            {
                "predictions": words,
                "samples": moved.count,
                "share": f"{moved.share:.1%}",
                "95% limits": f"{moved.low:.1%} to {moved.high:.1%}",
            }
        )
    return [*tabulate_rows(MOVEMENT, rows), Paragraph(_describe_divergence(movement))]


def _describe_divergence(movement: Movement) -> str:
    """Say how far the outputs of the two models are apart, or why this is unknown."""
    if movement.kl is None:
        return f"No divergence of the outputs: {movement.reason}."
    text = f"Mean KL divergence of the outputs: {movement.kl:.3g} nats"
    if movement.kl_low is not None:
        text += f" (limits {movement.kl_low:.3g} to {movement.kl_high:.3g})"
    return f"{text}."


def write_movement(movement: Movement) -> str:
    """Write in one line how many predictions of two models are equal, and how the others moved.

    For example: "90.6% of 64 predictions are equal (81.0 to 95.6%); right to wrong 6".
    """
    equal = movement.equal
    text = f"{equal.share:.1%} of {movement.samples} predictions are equal"
    text += f" ({equal.low:.1%} to {equal.high:.1%})"
    _, *moves = _list_moves(movement)  # the first are the equal predictions
    if moves:
        text += f"; {', '.join(f'{words} {moved.count}' for words, moved in moves)}"
    if movement.kl is not None:
        text += f"; mean KL {movement.kl:.3g} nats"
    return text
