"""Who changed sides, and every sample before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lipaudit.gate.comparison import Kind, Outcome, Pair, SampleChange
from lipaudit.report.blocks import Block, Paragraph, Scatter, Series, Table
from lipaudit.report.cells import pretty
from lipaudit.report.page.views.common import CHARACTERS, FIT, SAMPLE, with_places
from lipaudit.results import Column, sample_columns
from lipaudit.results.history import KINDS

FLIPS = (
    "Gained: samples that came to the good side (right, robust, certified). Lost: samples that "
    "left it. McNemar: chance of a difference as large if as many came as left."
)
NORM = "jacobian.norm"
SIDES = ("as before", "lost", "gained")
"""Kinds of samples in a scatter, in the order of colours."""
ASKED = Column(label="asked", meaning="What is asked of every sample.", format="s")
BECAME = Column(label="became", meaning="What the sample was, and what it is now.", format="s")


def called(kind: Kind, ball: str) -> str:
    """Call an outcome as the scorecard does."""
    return ", ".join(filter(None, (KINDS[kind][0], ball)))


def blocks(pair: Pair, places: Mapping[str, str]) -> list[Block]:
    """Show who changed sides, and every sample before and after."""
    flipped = [sample for sample in pair.samples if sample.flipped]
    shown, rest = flipped[:FIT], len(flipped) - FIT
    title = f"The first {FIT} of {len(flipped)} that flipped" if rest > 0 else "That flipped"
    drawn: list[Block] = []
    if pair.outcomes:
        drawn += [Paragraph(FLIPS), _outcomes(pair.outcomes)]
    if flipped:
        drawn.append(_sample_table(title, pair, shown, places))
    drawn += _scatters(pair, places)
    if pair.samples:
        title = f"All samples ({len(pair.samples)})"
        drawn.append(_sample_table(title, pair, pair.samples, places, folded=True))
    return drawn


def _outcomes(outcomes: Sequence[Outcome]) -> Table:
    formats = {"samples": "d", "old": ".1%", "new": ".1%", "lost": "d", "gained": "d"}
    return Table(
        title="",
        columns=(
            ASKED,
            *(Column(label=k, meaning="", format=how, domain="") for k, how in formats.items()),
            Column(label="McNemar", meaning="", format=".2g", domain=""),
        ),
        rows=tuple(
            (
                called(o.kind, o.ball),
                o.samples,
                o.old / o.samples,
                o.new / o.samples,
                o.lost,
                o.gained,
                o.mcnemar,
            )
            for o in outcomes
        ),
        strong=frozenset(i for i, o in enumerate(outcomes) if o.mcnemar <= 0.05),
    )


def _sample_table(
    title: str,
    pair: Pair,
    samples: Sequence[SampleChange],
    places: Mapping[str, str],
    *,
    folded: bool = False,
) -> Table:
    """Tabulate samples before and after, by the figures that half of them have."""
    have = Counter(metric for sample in samples for metric in sample.figures)
    metrics = [metric for metric in _metrics(pair) if 2 * have[metric] >= len(samples)]
    table = Table(
        title=title,
        columns=(SAMPLE, BECAME, *(_column(m, when) for m in metrics for when in ("old", "new"))),
        rows=tuple(
            (
                sample.id,
                _became(sample) or None,
                *(end for m in metrics for end in sample.figures.get(m, (None, None))),
            )
            for sample in samples
        ),
        folded=folded,
    )
    return with_places(table, places)


def _became(sample: SampleChange) -> str:
    """Say what a sample was and is, where that is not the same."""
    said = ((name, *states) for name, states in sample.states.items())
    return "; ".join(f"{name}: {old} → {new}" for name, old, new in said if old != new)


def _metrics(pair: Pair) -> list[str]:
    """Return the figures of samples: those of most samples first, the norm before others."""
    counts = Counter(metric for sample in pair.samples for metric in sample.figures)
    return sorted(counts, key=lambda metric: (-counts[metric], metric != NORM))


def _column(metric: str, when: str) -> Column:
    """Return how a per-sample figure reads: `||J||, old`."""
    named, _, trial = metric.partition("@")
    measure, _, name = named.rpartition(".")
    column = sample_columns(measure)[name]
    return replace(column, label=", ".join(filter(None, (column.label, trial, when))))


def _scatters(pair: Pair, places: Mapping[str, str]) -> list[Scatter]:
    """Draw each figure of the samples, old against new."""
    drawn = (_scatter(metric, pair, places) for metric in _metrics(pair))
    return [scatter for scatter in drawn if scatter]


def _scatter(metric: str, pair: Pair, places: Mapping[str, str]) -> Scatter | None:
    known = [(s, *ends) for s in pair.samples if (ends := s.ends(metric))]
    if not known:
        return None
    groups = {kind: [p for p in known if _side(p[0]) == kind] for kind in SIDES}
    return Scatter(
        title=f"{pretty(_column(metric, '').label)} of every sample, new over old",
        x=_column(metric, "old"),
        y=_column(metric, "new"),
        series=tuple(
            Series(
                label=f"{kind} ({len(group)})",
                x=tuple(x for _, x, _ in group),
                y=tuple(y for _, _, y in group),
                names=tuple(_name(sample, places) for sample, _, _ in group),
            )
            for kind, group in groups.items()
        ),
        log=all(x > 0 and y > 0 for _, x, y in known),
        equal=True,
    )


def _side(sample: SampleChange) -> str:
    return "lost" if sample.lost else "gained" if sample.gained else "as before"


def _name(sample: SampleChange, places: Mapping[str, str]) -> str:
    place = places.get(sample.id, "")
    said = [sample.id[:CHARACTERS], place, _became(sample)]
    return ", ".join(filter(None, said))
