"""What stands out in a report: sentences drawn from its numbers and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from lipaudit.report.cells import significant
from lipaudit.report.page.broken import Breakage, breakage
from lipaudit.report.page.views.common import head
from lipaudit.results import AttentionRow, BoundsRow, JacobianRow, Report
from lipaudit.results.figures import finite, largest, middle, order, typed

HALF = 0.5
"""A head is called fragile, or a sink, when more than this share of its rows or mass is."""
APART = 2.0
"""Sharp and exact are said to diverge above this ratio."""
FEW = 0.05
"""Where fewer rows than this are intermediate, a penalty has nothing to pull."""
NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One sentence, and the rows and column that it comes from."""

    text: str
    source: str


def diagnosis(report: Report) -> list[Finding]:
    """Return what stands out, in the order of the sections."""
    return [finding for find in FINDERS for finding in find(report)]


def _amplifying(report: Report) -> Iterator[Finding]:
    rows = [row for row in _bounds(report) if finite([row.exact])]
    if len(rows) < 2:
        return
    first, *rest = largest(rows, "exact", NAMED)
    norm, typical = order(first.exact), median(finite(row.exact for row in rows))
    times = f", {significant(norm / typical)} times the median head" if typical else ""
    others = _named((head(row), significant(order(row.exact))) for row in rest)
    yield Finding(
        f"Head {head(first)} amplifies most: ‖J‖ = {significant(norm)}{times}; next {others}.",
        f"bounds {head(first)}, exact",
    )


def _divergence(report: Report) -> Iterator[Finding]:
    layers: dict[int, list[float]] = {}
    for row in _bounds(report):
        layers.setdefault(row.layer, []).extend(finite([row.log10_ratio("sharp")]))
    ratios = {layer: 10 ** median(logs) for layer, logs in layers.items() if logs}
    apart = sorted((layer for layer in ratios if ratios[layer] > APART), key=lambda i: -ratios[i])
    if apart:
        named = _named((str(layer), significant(ratios[layer])) for layer in apart)
        text = f"Sharp bound and exact norm differ more than {APART:g}-fold in layers {named}."
        yield Finding(text, f"bounds {apart[0]}.*, sharp / exact")
    rows = [row for row in _bounds(report) if finite([row.sharp_ratio_max])]
    if not apart and rows:
        (worst,) = largest(rows, "sharp_ratio_max", 1)
        most = significant(order(worst.sharp_ratio_max))
        text = f"The sharp bound is at most {most} times exact on every head and sample."
        yield Finding(text, f"bounds {head(worst)}, sharp_ratio_max")


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


def _fragile(report: Report) -> Iterator[Finding]:
    rows = [row for row in _attention(report) if finite([row.intermediate])]
    if not rows:
        return
    fragile = [row for row in rows if order(row.intermediate) > HALF]
    top = largest(rows, "intermediate", min(max(len(fragile), 1), NAMED))
    named = _named((head(row), f"{row.intermediate:.0%}") for row in top)
    count = f"{len(fragile)} of {len(rows)} heads have" if fragile else "No head has"
    which = ": " if fragile else "; most in "
    yield Finding(
        f"{count} more than half of their rows in the intermediate regime{which}{named}.",
        f"attention {head(top[0])}, intermediate",
    )


def _jasmin(report: Report) -> Iterator[Finding]:
    """Choose the penalty that pulls rows to the side where the model's rows already lie.

    JaSMin k = 0 lowers g1 itself, towards uniform or one-hot rows; k > 1 lowers g1 / g_k, which
    flattens one-hot rows too and leaves rows with at most k keys out.
    """
    section = report.section("attention")
    rows = [row for row in _attention(report) if finite([row.intermediate])]
    k = section.settings.get("k", 10) if section else None
    if not rows or not isinstance(k, int):
        return
    names = ("intermediate", "uniform", "categorical")
    shares = {n: sum(finite(getattr(r, n) for r in rows)) / len(rows) for n in names}
    if shares["intermediate"] < FEW:
        return
    short = max(row.tokens for row in rows) <= k
    flat = shares["uniform"] > shares["categorical"] and not short
    side = "uniform" if shares["uniform"] > shares["categorical"] else "one-hot"
    why = f"no row has more than {k} keys" if short else f"most others are near {side}"
    yield Finding(
        f"{shares['intermediate']:.0%} of rows are intermediate, {why}: "
        f"suggests JaSMin with k={k if flat else 0}.",
        "attention means, intermediate, uniform, categorical",
    )


def _sinks(report: Report) -> Iterator[Finding]:
    rows = _attention(report)
    sinks = [row for row in rows if order(row.sink_max) > HALF]
    if sinks:
        places = Counter(row.sink_token for row in sinks).most_common(NAMED)
        named = _named((str(place), f"{count} heads") for place, count in places)
        (top,) = largest(sinks, "sink_max", 1)
        text = f"In {len(sinks)} of {len(rows)} heads one key takes more than half of the mass"
        yield Finding(f"{text}; at position {named}.", f"attention {head(top)}, sink_max")


def _sensitive(report: Report) -> Iterator[Finding]:
    section = report.section("jacobian")
    if section is None or not {"ids", "norm"} <= section.samples.keys():
        return
    norms = dict(zip(section.samples["ids"], section.samples["norm"], strict=True))
    known = {name: value for name, value in norms.items() if finite([value])}
    typical = middle(known.values())
    if len(known) > 1 and typical:
        top = max(known, key=lambda name: order(known[name]))
        norm = order(known[top])
        text = (
            f"Sample {str(top)[:12]} is the most sensitive: ‖J‖ = {significant(norm)}, "
            f"{significant(norm / typical)} times the median of {len(known)}."
        )
        yield Finding(text, f"jacobian sample {str(top)[:12]}, norm")


def _broken(report: Report) -> Iterator[Finding]:
    attacked = breakage(report)
    if attacked is None:
        return
    yield _quarter(attacked)
    for name, label in (("norm", "‖J‖"), ("radius_first_order", "first-order radius")):
        rank = attacked.correlation(name)
        if rank is not None:
            yield Finding(
                f"Spearman correlation of {label} with being broken by {attacked.attack}: "
                f"{rank.rho:.2f} [{rank.low:.2f}, {rank.high:.2f}], {rank.count} samples.",
                f"jacobian {name}, attack {attacked.column}",
            )


def _quarter(attacked: Breakage) -> Finding:
    """Count what an attack breaks among the most sensitive quarter and among the rest."""
    ranked = sorted(attacked.broken, key=lambda name: -attacked.features["norm"][name])
    cut = max(len(ranked) // 4, 1)
    inside = sum(attacked.broken[name] for name in ranked[:cut])
    outside = sum(attacked.broken[name] for name in ranked[cut:])
    attack = attacked.attack[0].upper() + attacked.attack[1:]
    return Finding(
        f"{attack} breaks {inside} of the {cut} most sensitive samples "
        f"and {outside} of the other {len(ranked) - cut}.",
        f"jacobian norm, attack {attacked.column}",
    )


def _unconverged(report: Report) -> Iterator[Finding]:
    missed = [head(row) for row in _bounds(report) if not row.converged]
    if missed:
        names = ", ".join(missed[:NAMED]) + _more(missed)
        text = (
            f"{len(missed)} of {len(_bounds(report))} heads did not meet the tolerance: {names}."
        )
        yield Finding(text, f"bounds {missed[0]}, converged")
    for row in typed(report.section("jacobian"), JacobianRow):
        if row.converged < row.samples:
            short = row.samples - row.converged
            text = (
                f"{short} of {row.samples} Jacobian norms ({row.norm}) did not meet the tolerance."
            )
            yield Finding(text, f"jacobian {row.from_} to {row.to}, converged")


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
    _amplifying,
    _divergence,
    _splitting,
    _fragile,
    _jasmin,
    _sinks,
    _sensitive,
    _broken,
    _unconverged,
)
