"""Which layers explain the change of a norm: a chapter of a comparison, or a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lipaudit.gate.attribution import Attribution, Explained, LayerShare, LogRatio
from lipaudit.report.blocks import (
    Block,
    Chapter,
    Document,
    Forest,
    Notes,
    Paragraph,
    Series,
    Table,
)
from lipaudit.report.cells import number
from lipaudit.results import Column

MOST = 20
"""Layers of a table; of more the largest are shown, and all of them folded away."""
NAMED = 3
"""Layers that the first sentence names."""
HOW = (
    "Swapped: the old model with this layer of the new one. Undone: the new model, against itself "
    "with this layer of the old one. The two differ where layers interact; change is their mean, "
    "in logarithms. Share is of the change of ln ‖J‖: shares add up to all of it, with the rest, "
    "which is what three layers or more do together. Linear is the same to first order, from the "
    "derivative at either end: what small steps would do."
)
REST = "rest: no layer alone"
LN = "ln(new / old)"


def chapters(attributions: Sequence[Attribution]) -> Iterator[Chapter]:
    """Lay out attributions, of each the layer that explains most first."""
    for i, shown in enumerate(attributions):
        title = f"Which layers explain the change of ‖J‖: {shown.new} against {shown.old}"
        yield Chapter(f"attribution-{i}", title, tuple(_blocks(shown)))


def findings(attributions: Sequence[Attribution]) -> Iterator[tuple[str, str]]:
    """Say what changed and by which layers, and the chapter that it comes from."""
    for i, shown in enumerate(attributions):
        yield f"Layers: {_sentence(shown)}", f"attribution-{i}"


def page(attribution: Attribution) -> Document:
    """Lay out an attribution by itself."""
    facts = (("old", attribution.old), ("new", attribution.new))
    return Document(
        title="lipaudit: which layers explain a change",
        facts=facts,
        findings=(),
        chapters=tuple(chapters([attribution])),
    )


def _blocks(shown: Attribution) -> Iterator[Block]:
    yield Paragraph(_sentence(shown))
    yield Paragraph(HOW)
    ranked = sorted(shown.layers, key=lambda layer: -abs(layer.effect.mean))
    more = len(ranked) > MOST
    yield _table(f"The {MOST} layers with the largest share" if more else "", shown, ranked[:MOST])
    if more:
        yield _table("All layers, in the order of the model", shown, shown.layers, folded=True)
    yield _forest(shown, ranked[:MOST])
    if shown.notes:
        yield Notes(shown.notes)


def _sentence(shown: Attribution) -> str:
    """Say what changed, and which layers did most of it."""
    count = len(shown.samples)
    many = f"geometric mean over {count} samples" if count > 1 else "one sample"
    change = shown.change
    ends = _limits(change)
    limits = f", 95 % limits {ends}" if ends else ""
    what = f"‖J‖ from {shown.start} to {shown.target} changed by {_percent(change.mean)}"
    differ = f"{len(shown.layers)} of {len(shown.layers) + shown.same} layers differ"
    first = sorted(shown.layers, key=lambda layer: -(layer.share or 0.0))[:NAMED]
    largest = [f"{one.layer} {one.share:.0%}" for one in first if (one.share or 0.0) >= 0.005]
    most = f" The largest shares: {', '.join(largest)}." if largest else ""
    return f"{what} ({many}{limits}). {differ}.{most}"


def _limits(log: LogRatio) -> str | None:
    if log.low is None or log.high is None:
        return None
    return f"{_percent(log.low)} to {_percent(log.high)}"


def _percent(log: float) -> str:
    return number(math.expm1(log), "+.1%")


COLUMNS = (
    Column("layer", "Path of the module, or of the tensor where no module has it.", format="s"),
    Column("share", "Of the change of ln ||J||, what this layer explains.", format=".1%"),
    Column("change", "Mean of swapped and undone, as a change of ||J||.", format="+.1%"),
    Column("95 % limits", "Of the change, over the samples (Student's t).", format="s"),
    Column("swapped", "This layer of the new model in the old one.", format="+.1%"),
    Column("undone", "The new model, against itself with the old layer.", format="+.1%"),
    Column("linear, old", "Swapped, to first order.", format="+.1%", status="estimate"),
    Column("linear, new", "Undone, to first order.", format="+.1%", status="estimate"),
    Column("moved", "||new - old|| / ||old|| of the layer's weights.", format=".2g", domain=""),
)


def _table(
    title: str,
    shown: Attribution,
    layers: Sequence[LayerShare],
    *,
    folded: bool = False,
) -> Table:
    change = shown.change
    told = None if shown.rest.share is None else 1.0
    whole = Explained(
        share=told,
        effect=change,
        swapped=change,
        undone=change,
        linear_old=change if shown.rest.linear_old else None,
        linear_new=change if shown.rest.linear_new else None,
    )
    rows = [_row(layer.layer, layer, layer.moved) for layer in layers]
    rows += [_row(REST, shown.rest, None), _row("all layers", whole, None)]
    return Table(
        title=title,
        columns=COLUMNS,
        rows=tuple(rows),
        strong=frozenset({len(rows) - 1}),
        folded=folded,
    )


def _row(name: str, part: Explained, moved: float | None) -> tuple[object, ...]:
    effect = part.effect
    logs = (part.swapped, part.undone, part.linear_old, part.linear_new)
    others = [None if log is None else math.expm1(log.mean) for log in logs]
    return (name, part.share, math.expm1(effect.mean), _limits(effect), *others, moved)


def _forest(shown: Attribution, layers: Sequence[LayerShare]) -> Forest:
    """Draw shares, or logarithms where the change is not told from none."""
    unit = shown.change.mean if shown.rest.share is not None else 1.0
    parts = [*layers, shown.rest]

    def series(label: str, logs: Sequence[LogRatio | None], *, ends: bool = False) -> Series:
        known = [(i, log) for i, log in enumerate(logs) if log is not None]
        return Series(
            label,
            x=tuple(log.mean / unit for _, log in known),
            y=tuple(float(i) for i, _ in known),
            left=tuple(_end(log.low, unit) for _, log in known) if ends else (),
            right=tuple(_end(log.high, unit) for _, log in known) if ends else (),
        )

    lines = (
        series("change, with 95 % limits", [part.effect for part in parts], ends=True),
        series("swapped", [part.swapped for part in parts]),
        series("undone", [part.undone for part in parts]),
        series("linear, old", [part.linear_old for part in parts]),
        series("linear, new", [part.linear_new for part in parts]),
    )
    told = shown.rest.share is not None
    column = COLUMNS[1] if told else Column(LN, "Of the norms.", format=".2g")
    names = (*(layer.layer for layer in layers), REST)
    return Forest("What each layer explains", column, names, tuple(s for s in lines if s.x))


def _end(end: float | None, unit: float) -> float | None:
    return None if end is None else end / unit
