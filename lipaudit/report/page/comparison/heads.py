"""The heads that moved most, all of them, and their changes as maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lipaudit.gate.comparison import HeadChange, HeadChanges, Pair
from lipaudit.gate.verdicts import Verdict, amount
from lipaudit.report.blocks import Block, Heatmap, Paragraph, Table
from lipaudit.report.page.views.common import FIT, HEAD
from lipaudit.results import Column, row_types

STANDS = (
    "A change stands where it is proven with Holm's correction over all heads of the column: the "
    "chance of naming any head that has not changed is 5 %. Limits are of each head alone, over "
    "its samples (Student's t)."
)
MOST = 10
"""How many heads are tabulated of many."""
STAND = Column(label="stands", meaning="Whether the change stands after Holm.", format="")
ADJUSTED = Column(label="p (Holm)", meaning="Corrected over the heads.", format=".2g", domain="")


def ranked(changes: HeadChanges) -> list[HeadChange]:
    """Return the heads that moved, those that moved most first; equal ratios up and down alike."""
    relative = changes.unit == "%"

    def size(change: HeadChange) -> float:
        value = change.change
        if value is None or math.isnan(value):
            return -1.0
        return abs(math.log1p(value)) if relative and value > -1 else abs(value)

    return [head for head in sorted(changes.heads, key=size, reverse=True) if size(head) >= 0]


def limits(change: HeadChange | Verdict, unit: str) -> str:
    """Write the limits of a paired change; why there are none, where the samples are too few."""
    if change.low is None or change.high is None:
        return ""
    if change.high == math.inf and change.low in (-1.0, -math.inf):
        return "too few samples"
    return f"{amount(change.low, unit)} to {amount(change.high, unit)}"


def blocks(pair: Pair) -> list[Block]:
    """Show the heads that moved most, all of them, and their changes as maps."""
    if not pair.heads:
        return []
    most = ranked(pair.heads[0])
    shown = most if len(most) <= FIT else most[:MOST]
    of = f" ({len(shown)} of {len(most)})" if len(shown) < len(most) else ""
    title = f"Heads that moved most{of}, by {pair.heads[0].metric}"
    rest = [_head_table(f"All heads ({len(most)})", pair, most, folded=True)]
    return [
        Paragraph(STANDS),
        _counts(pair),
        _head_table(title, pair, shown),
        *(rest if len(shown) < len(most) else []),
        *map(_heatmap, pair.heads),
    ]


def _counts(pair: Pair) -> Table:
    """Count in every column the heads whose change stands."""
    labels = ("heads", "stands", "up", "down", "samples")
    told = [(c, [head.change or 0 for head in c.heads if head.stands]) for c in pair.heads]
    return Table(
        title="Changes that stand",
        columns=(
            Column(label="metric", meaning="A column of heads.", format="s"),
            *(Column(label=label, meaning="", format="d") for label in labels),
        ),
        rows=tuple(
            (c.metric, len(c.heads), *(_stood(moved) if c.samples else (None,) * 3), c.samples)
            for c, moved in told
        ),
    )


def _stood(changes: Sequence[float]) -> tuple[int, int, int]:
    """Count changes, those up and those down."""
    up = sum(change > 0 for change in changes)
    return len(changes), up, len(changes) - up


def _head_table(
    title: str, pair: Pair, heads: Sequence[HeadChange], *, folded: bool = False
) -> Table:
    """Tabulate how heads changed in the first column, then before and after in every column."""
    known = [{(h.layer, h.head): h for h in changes.heads} for changes in pair.heads]
    lead = pair.heads[0]
    return Table(
        title=title,
        columns=(
            HEAD,
            *(Column(label=label, meaning="", format="") for label in ("change", "95 % limits")),
            ADJUSTED,
            STAND,
            *(
                replace(_row_column(changes.metric), label=f"{label}, {when}")
                for changes in pair.heads
                for label in [_row_column(changes.metric).label]
                for when in ("old", "new")
            ),
        ),
        rows=tuple(
            (
                f"{head.layer}.{head.head}",
                amount(head.change, lead.unit),
                limits(head, lead.unit) or None,
                head.p_adjusted,
                head.stands if head.p_adjusted is not None else None,
                *(end for each in known for end in _ends(each.get((head.layer, head.head)))),
            )
            for head in heads
        ),
        strong=frozenset(i for i, head in enumerate(heads) if head.stands),
        folded=folded,
    )


def _ends(head: HeadChange | None) -> tuple[float | None, float | None]:
    return (None, None) if head is None else (head.old, head.new)


def _row_column(metric: str) -> Column:
    measure, _, name = metric.rpartition(".")
    return row_types()[measure].columns()[name]


def _heatmap(changes: HeadChanges) -> Heatmap:
    at = {(head.layer, head.head): head.change for head in changes.heads}
    layers, heads = (sorted({key[i] for key in at}) for i in (0, 1))
    times, how = {"%": (1.0, "+.1%"), "pp": (100.0, "+.1f"), "": (1.0, "+.3g")}[changes.unit]
    return Heatmap(
        title=f"{changes.metric}: change of every head",
        values=tuple(
            tuple(v * times if (v := at.get((i, j))) is not None else None for j in heads)
            for i in layers
        ),
        rows=tuple(map(str, layers)),
        columns=tuple(map(str, heads)),
        column=Column(
            label="change",
            meaning="New against old, sample by sample.",
            unit="pp" if changes.unit == "pp" else "",
            format=how,
            status=_row_column(changes.metric).status,
        ),
        centre=0.0,
    )
