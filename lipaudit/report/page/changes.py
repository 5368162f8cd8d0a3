"""Heads and samples of two reports, before and after."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.gate.changes import HeadChange, HeadChanges, Kind, Outcome, SampleChange
from lipaudit.gate.comparison import Pair
from lipaudit.gate.verdicts import Verdict, amount
from lipaudit.report.blocks import Block, Paragraph, Table, make_table
from lipaudit.report.cells import write_math
from lipaudit.report.page.common import CHARACTERS, FIT, HEAD, SAMPLE, add_place_column, map_heads
from lipaudit.report.pictures import Heatmap, Scatter, Series
from lipaudit.results import Column, layouts
from lipaudit.results.summary import KINDS

# Heads


STANDS = (
    "A change stands where it is proven with Holm's correction over all heads of the column: the "
    "chance of naming any head that has not changed is 5 %. Limits are of each head alone, over "
    "its samples (Student's t)."
)
MOST = 10
"""How many heads are tabulated of many."""
STAND = Column(label="stands", meaning="Whether the change stands after Holm.", format="")
ADJUSTED = Column(label="p (Holm)", meaning="Corrected over the heads.", format=".2g", domain="")


def rank_heads(changes: HeadChanges) -> list[HeadChange]:
    """Return the heads that moved, those that moved most first; equal ratios up and down alike."""
    relative = changes.unit == "%"

    def size(change: HeadChange) -> float:
        value = change.change
        if value is None or math.isnan(value):
            return -1.0
        return abs(math.log1p(value)) if relative and value > -1 else abs(value)

    return [head for head in sorted(changes.heads, key=size, reverse=True) if size(head) >= 0]


def format_change_limits(change: HeadChange | Verdict, unit: str) -> str:
    """Write the limits of a paired change; why there are none, where the samples are too few."""
    if change.low is None or change.high is None:
        return ""
    if change.high == math.inf and change.low in (-1.0, -math.inf):
        return "too few samples"
    return f"{amount(change.low, unit)} to {amount(change.high, unit)}"


def show_heads(pair: Pair) -> list[Block]:
    """Show the heads that moved most, all of them, and their changes as maps."""
    if not pair.heads:
        return []
    most = rank_heads(pair.heads[0])
    shown = most if len(most) <= FIT else most[:MOST]
    of = f" ({len(shown)} of {len(most)})" if len(shown) < len(most) else ""
    title = f"Heads that moved most{of}, by {pair.heads[0].metric}"
    rest = [_tabulate_heads(f"All heads ({len(most)})", pair, most, folded=True)]
    return [
        Paragraph(STANDS),
        _count_changes(pair),
        _tabulate_heads(title, pair, shown),
        *(rest if len(shown) < len(most) else []),
        *map(_map_changes, pair.heads),
    ]


def _count_changes(pair: Pair) -> Table:
    """Count the heads of every column whose change is significant after Holm's correction."""
    rows: list[tuple[Any, ...]] = []
    for c in pair.heads:
        moved = [head.change or 0 for head in c.heads if head.stands]
        up = sum(change > 0 for change in moved)
        counts = (len(moved), up, len(moved) - up) if c.samples else (None, None, None)
        rows.append((c.metric, len(c.heads), *counts, c.samples))
    labels = ("heads", "stands", "up", "down", "samples")
    columns = (
        Column(label="metric", meaning="A column of heads.", format="s"),
        *(Column(label=label, meaning="", format="d") for label in labels),
    )
    return Table("Changes that stand", columns, tuple(rows))


def _tabulate_heads(
    title: str, pair: Pair, heads: Sequence[HeadChange], *, folded: bool = False
) -> Table:
    """Tabulate how heads changed in the first column, then before and after in every column."""
    unit, none = pair.heads[0].unit, (None, None)
    stands = [None if head.p_adjusted is None else head.stands for head in heads]
    shown: list[tuple[Column, Iterable[Any]]] = [
        (HEAD, [f"{head.layer}.{head.head}" for head in heads]),
        (Column("change", "", format=""), [amount(head.change, unit) for head in heads]),
        (
            Column("95 % limits", "", format=""),
            [format_change_limits(head, unit) or None for head in heads],
        ),
        (ADJUSTED, [head.p_adjusted for head in heads]),
        (STAND, stands),
    ]
    for changes in pair.heads:
        known = {(h.layer, h.head): (h.old, h.new) for h in changes.heads}
        column = find_row_column(changes.metric)
        for end, when in enumerate(("old", "new")):
            values = [known.get((head.layer, head.head), none)[end] for head in heads]
            shown.append((replace(column, label=f"{column.label}, {when}"), values))
    strong = frozenset(i for i, head in enumerate(heads) if head.stands)
    return make_table(title, shown, strong=strong, folded=folded)


def find_row_column(metric: str) -> Column:
    """Return how the column of a metric of rows reads."""
    measure, _, name = metric.rpartition(".")
    return layouts()[measure].columns[name]


def _map_changes(changes: HeadChanges) -> Heatmap:
    times, how = {"%": (1.0, "+.1%"), "pp": (100.0, "+.1f"), "": (1.0, "+.3g")}[changes.unit]
    column = Column(
        label="change",
        meaning="New against old, sample by sample.",
        unit="pp" if changes.unit == "pp" else "",
        format=how,
        status=find_row_column(changes.metric).status,
    )
    known = ((h.layer, h.head, h.change) for h in changes.heads)
    values = {(i, j): None if v is None else v * times for i, j, v in known}
    return map_heads(f"{changes.metric}: change of every head", values, column, centre=0.0)


# Samples


FLIPS = (
    "Gained: samples that came to the good side (right, robust, certified). Lost: samples that "
    "left it. McNemar: chance of a difference as large if as many came as left."
)
NORM = "jacobian.norm"
SIDES = ("as before", "lost", "gained")
"""Kinds of samples in a scatter, in the order of colours."""
ASKED = Column(label="asked", meaning="What is asked of every sample.", format="s")
BECAME = Column(label="became", meaning="What the sample was, and what it is now.", format="s")


def name_outcome(kind: Kind, ball: str) -> str:
    """Name an outcome as the scorecard does."""
    return ", ".join(filter(None, (KINDS[kind][0], ball)))


def show_samples(pair: Pair, places: Mapping[str, str]) -> list[Block]:
    """Show who changed sides, and every sample before and after."""
    flipped = [sample for sample in pair.samples if sample.flipped]
    shown, rest = flipped[:FIT], len(flipped) - FIT
    title = f"The first {FIT} of {len(flipped)} that flipped" if rest > 0 else "That flipped"
    drawn: list[Block] = []
    if pair.outcomes:
        drawn += [Paragraph(FLIPS), _tabulate_outcomes(pair.outcomes)]
    if flipped:
        drawn.append(_tabulate_samples(title, pair, shown, places))
    metrics = (m for m in _list_metrics(pair) if any(s.ends(m) for s in pair.samples))
    drawn += [_plot_metric(metric, pair, places) for metric in metrics]
    if pair.samples:
        title = f"All samples ({len(pair.samples)})"
        drawn.append(_tabulate_samples(title, pair, pair.samples, places, folded=True))
    return drawn


def _tabulate_outcomes(outcomes: Sequence[Outcome]) -> Table:
    figures: dict[str, tuple[str, list[Any]]] = {
        "samples": ("d", [o.samples for o in outcomes]),
        "old": (".1%", [o.old / o.samples for o in outcomes]),
        "new": (".1%", [o.new / o.samples for o in outcomes]),
        "lost": ("d", [o.lost for o in outcomes]),
        "gained": ("d", [o.gained for o in outcomes]),
        "McNemar": (".2g", [o.mcnemar for o in outcomes]),
    }
    asked = ASKED, [name_outcome(o.kind, o.ball) for o in outcomes]
    shown = ((Column(k, "", format=how, domain=""), v) for k, (how, v) in figures.items())
    strong = frozenset(i for i, o in enumerate(outcomes) if o.mcnemar <= 0.05)
    return make_table("", [asked, *shown], strong=strong)


def _tabulate_samples(
    title: str,
    pair: Pair,
    samples: Sequence[SampleChange],
    places: Mapping[str, str],
    *,
    folded: bool = False,
) -> Table:
    """Tabulate samples before and after, by the figures that half of them have."""
    have = Counter(metric for sample in samples for metric in sample.figures)
    metrics = [metric for metric in _list_metrics(pair) if 2 * have[metric] >= len(samples)]
    shown: list[tuple[Column, list[Any]]] = [
        (SAMPLE, [sample.id for sample in samples]),
        (BECAME, [_describe_change(sample) or None for sample in samples]),
    ]
    for metric in metrics:
        for end, when in enumerate(("old", "new")):
            values = [sample.figures.get(metric, (None, None))[end] for sample in samples]
            shown.append((_find_sample_column(metric, when), values))
    return add_place_column(make_table(title, shown, folded=folded), places)


def _describe_change(sample: SampleChange) -> str:
    """Describe how the verdicts on a sample changed."""
    said = ((name, *states) for name, states in sample.states.items())
    return "; ".join(f"{name}: {old} → {new}" for name, old, new in said if old != new)


def _list_metrics(pair: Pair) -> list[str]:
    """Return the figures of samples: those of most samples first, the norm before others."""
    counts = Counter(metric for sample in pair.samples for metric in sample.figures)
    return sorted(counts, key=lambda metric: (-counts[metric], metric != NORM))


def _find_sample_column(metric: str, when: str) -> Column:
    """Return how a per-sample figure reads: `||J||, old`."""
    named, _, trial = metric.partition("@")
    measure, _, name = named.rpartition(".")
    column = layouts()[measure].samples[name]
    return replace(column, label=", ".join(filter(None, (column.label, trial, when))))


def _plot_metric(metric: str, pair: Pair, places: Mapping[str, str]) -> Scatter:
    """Draw a figure of the samples, new over old, in a group for each side that they took."""
    known = [(s, *ends) for s in pair.samples if (ends := s.ends(metric))]
    groups: dict[str, list[tuple[SampleChange, float, float]]] = {side: [] for side in SIDES}
    for sample, x, y in known:
        side = "lost" if sample.lost else "gained" if sample.gained else "as before"
        groups[side].append((sample, x, y))
    return Scatter(
        title=f"{write_math(_find_sample_column(metric, '').label)} of every sample, new over old",
        x=_find_sample_column(metric, "old"),
        y=_find_sample_column(metric, "new"),
        series=tuple(
            Series(
                label=f"{kind} ({len(group)})",
                x=tuple(x for _, x, _ in group),
                y=tuple(y for _, _, y in group),
                names=tuple(_name_point(sample, places) for sample, _, _ in group),
            )
            for kind, group in groups.items()
        ),
        log=all(x > 0 and y > 0 for _, x, y in known),
        equal=True,
    )


def _name_point(sample: SampleChange, places: Mapping[str, str]) -> str:
    place = places.get(sample.id, "")
    said = [sample.id[:CHARACTERS], place, _describe_change(sample)]
    return ", ".join(filter(None, said))
