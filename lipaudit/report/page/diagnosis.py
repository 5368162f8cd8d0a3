"""What stands out in a report beside its scorecard: sentences drawn from its numbers alone.

Nothing is said that chance explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from lipaudit.report.cells import significant
from lipaudit.report.page.broken import FEATURES, Breakage, breakage
from lipaudit.report.page.views.common import head
from lipaudit.results import AttentionRow, BoundsRow, Report
from lipaudit.results.figures import finite, largest, order, typed

HALF = 0.5
"""A key is called a sink when it takes more than this share of a head's mass."""
APART = 2.0
"""Sharp and exact are said to diverge above this ratio."""
NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One sentence, and the rows and column that it comes from."""

    text: str
    source: str


def diagnosis(report: Report) -> list[Finding]:
    """Return what stands out, in the order of the sections."""
    return [finding for find in FINDERS for finding in find(report)]


def _divergence(report: Report) -> Iterator[Finding]:
    layers: dict[int, list[float]] = {}
    for row in _bounds(report):
        layers.setdefault(row.layer, []).extend(finite([row.log10_ratio("sharp")]))
    ratios = {layer: 10 ** median(logs) for layer, logs in layers.items() if logs}
    apart = sorted((layer for layer in ratios if ratios[layer] > APART), key=lambda i: -ratios[i])
    if apart:
        named = _named((str(layer), significant(ratios[layer])) for layer in apart)
        layer = "layer" if len(apart) == 1 else "layers"
        text = f"Sharp bound and exact norm differ more than {APART:g}-fold in {layer} {named}."
        yield Finding(text, f"bounds {apart[0]}.*, sharp / exact")


def _splitting(report: Report) -> Iterator[Finding]:
    rows = _bounds(report)
    gaining = [row for row in rows if order(row.splitting_gain) > 1.01]
    if gaining:
        top = largest(gaining, "splitting_gain", NAMED)
        named = _named(
            (head(row), f"{significant(order(row.splitting_gain))} times") for row in top
        )
        text = f"Duplicating tokens raises ‖J‖ in {len(gaining)} of {len(rows)} heads: {named}."
        yield Finding(text, f"bounds {head(top[0])}, splitting_gain")


def _sinks(report: Report) -> Iterator[Finding]:
    rows = _attention(report)
    sinks = [row for row in rows if order(row.sink_max) > HALF]
    if sinks:
        places = Counter(row.sink_token for row in sinks).most_common(NAMED)
        named = _named((str(place), f"{count} heads") for place, count in places)
        named = named if len(places) > 1 else f"{places[0][0]} in all of them"
        (top,) = largest(sinks, "sink_max", 1)
        text = f"In {len(sinks)} of {len(rows)} heads one key takes more than half of the mass"
        yield Finding(f"{text}; at position {named}.", f"attention {head(top)}, sink_max")


def _broken(report: Report) -> Iterator[Finding]:
    """Say which figures tell the samples apart that an attack breaks, where that is no chance."""
    attacked = breakage(report)
    for name, label in FEATURES.items() if attacked else ():
        rank = attacked.correlation(name) if attacked else None
        if attacked and rank and rank.low * rank.high > 0:
            side = "larger" if rank.rho > 0 else "smaller"
            said = f" breaks more of the samples of {side} {label}"
            if name == "norm":
                said += _quarter(attacked)
            yield Finding(
                f"{attacked.attack[0].upper()}{attacked.attack[1:]}{said}: Spearman correlation "
                f"{rank.rho:.2f} [{rank.low:.2f}, {rank.high:.2f}], {rank.count} samples.",
                f"jacobian {name}, attack {attacked.column}",
            )


def _quarter(attacked: Breakage) -> str:
    """Count what an attack breaks among the most sensitive quarter and among the rest."""
    ranked = sorted(attacked.broken, key=lambda name: -attacked.features["norm"][name])
    cut = max(len(ranked) // 4, 1)
    inside = sum(attacked.broken[name] for name in ranked[:cut])
    outside = sum(attacked.broken[name] for name in ranked[cut:])
    return f" ({inside} of the {cut} largest, {outside} of the other {len(ranked) - cut})"


def _bounds(report: Report) -> list[BoundsRow]:
    return typed(report.section("bounds"), BoundsRow)


def _attention(report: Report) -> list[AttentionRow]:
    return typed(report.section("attention"), AttentionRow)


def _named(pairs: Iterable[tuple[str, str]]) -> str:
    named = [f"{name} ({value})" for name, value in pairs]
    return ", ".join(named[:NAMED]) + _more(named)


def _more(named: Sequence[str]) -> str:
    return f" and {len(named) - NAMED} more" if len(named) > NAMED else ""


FINDERS: tuple[Callable[[Report], Iterator[Finding]], ...] = (
    _divergence,
    _splitting,
    _sinks,
    _broken,
)
