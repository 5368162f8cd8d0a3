"""Findings of a report beside its scorecard: sentences that chance does not explain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import correlation, median

from lipaudit.report.cells import format_significant
from lipaudit.report.page.common import name_head
from lipaudit.results import Report, Section
from lipaudit.results.figures import Z95, finite, largest, log10_ratio, order
from lipaudit.results.report import rows_of
from lipaudit.results.trials import WORST, TrialKey, parse_column

# Rank correlation


FEWEST = 8


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho over `count` pairs, with its 95 % limits."""

    rho: float
    low: float
    high: float
    count: int


def compute_spearman(x: Sequence[float], y: Sequence[float]) -> Correlation | None:
    """Return Spearman's rho, None where it means nothing.

    Ties share the mean of their ranks. The limits are those of Bonett and Wright (2000):
    tanh(atanh rho ± 1.96 sqrt((1 + rho²/2) / (n - 3))).

    Args:
        x: finite values.
        y: as many finite values; 0/1 is allowed.

    Returns:
        None for fewer than 8 pairs and where all values of one side are equal.
    """
    if len(x) < FEWEST or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    rho = max(-1.0, min(1.0, correlation(_rank_values(x), _rank_values(y))))
    if abs(rho) == 1:
        return Correlation(rho, rho, rho, len(x))
    reach = Z95 * math.sqrt((1 + rho**2 / 2) / (len(x) - 3))
    centre = math.atanh(rho)
    return Correlation(rho, math.tanh(centre - reach), math.tanh(centre + reach), len(x))


def _rank_values(values: Sequence[float]) -> list[float]:
    """Rank from 1 up; ties share the mean of their ranks."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values), start=1):
        places.setdefault(value, []).append(place)
    return [sum(places[v]) / len(places[v]) for v in values]


# Findings


FEATURES = {"norm": "‖J‖", "radius_first_order": "first-order radius"}
"""Figures of a sample that may predict whether attacks break it, with their names on a page."""
HALF = 0.5
"""A key is called a sink when it takes more than this share of a head's mass."""
APART = 2.0
"""Above this ratio a layer's sharp bound is named as loose."""
NAMED = 3


@dataclass(frozen=True)
class Finding:
    """One sentence, and the rows and column that it comes from."""

    text: str
    source: str


def diagnose(report: Report) -> list[Finding]:
    """Return the findings, in the order of the sections."""
    finders = (_find_loose_bounds, _find_splitting, _find_sinks, _find_predictors)
    return [finding for find in finders for finding in find(report)]


def _find_loose_bounds(report: Report) -> Iterator[Finding]:
    layers: dict[int, list[float]] = {}
    for row in rows_of(report.section("bounds")):
        layers.setdefault(row.layer, []).extend(finite([log10_ratio(row, "sharp")]))
    ratios = {layer: 10 ** median(logs) for layer, logs in layers.items() if logs}
    apart = sorted((layer for layer in ratios if ratios[layer] > APART), key=lambda i: -ratios[i])
    if apart:
        named = _name_first((str(layer), format_significant(ratios[layer])) for layer in apart)
        layer = "layer" if len(apart) == 1 else "layers"
        text = f"Sharp bound and exact norm differ more than {APART:g}-fold in {layer} {named}."
        yield Finding(text, f"bounds {apart[0]}.*, sharp / exact")


def _find_splitting(report: Report) -> Iterator[Finding]:
    rows = rows_of(report.section("bounds"))
    gaining = [row for row in rows if order(row.splitting_gain) > 1.01]
    if gaining:
        top = largest(gaining, "splitting_gain", NAMED)
        named = _name_first(
            (name_head(row), f"{format_significant(order(row.splitting_gain))} times")
            for row in top
        )
        text = f"Duplicating tokens raises ‖J‖ in {len(gaining)} of {len(rows)} heads: {named}."
        yield Finding(text, f"bounds {name_head(top[0])}, splitting_gain")


def _find_sinks(report: Report) -> Iterator[Finding]:
    rows = rows_of(report.section("attention"))
    sinks = [row for row in rows if order(row.sink_max) > HALF]
    if sinks:
        places = Counter(row.sink_token for row in sinks).most_common(NAMED)
        named = _name_first((str(place), f"{count} heads") for place, count in places)
        named = named if len(places) > 1 else f"{places[0][0]} in all of them"
        (top,) = largest(sinks, "sink_max", 1)
        text = f"In {len(sinks)} of {len(rows)} heads one key takes more than half of the mass"
        yield Finding(f"{text}; at position {named}.", f"attention {name_head(top)}, sink_max")


def _find_predictors(report: Report) -> Iterator[Finding]:
    """Name the figures that tell apart the samples that an attack breaks, beyond chance."""
    jacobian, found = report.section("jacobian"), _find_attack(report)
    if jacobian is None or found is None:
        return
    trial, broken = found
    attack = (
        "The worst attack"
        if trial.attack == WORST
        else f"{trial.attack[0].upper()}{trial.attack[1:]}"
    )
    for figure, label in FEATURES.items():
        values = {i: v for i, v in _list_finite(jacobian, figure).items() if i in broken}
        rank = compute_spearman([*values.values()], [float(broken[i]) for i in values])
        if rank is None or rank.low * rank.high <= 0:
            continue
        side = "larger" if rank.rho > 0 else "smaller"
        counts = ""
        if figure == "norm":  # how many of the most sensitive quarter, and of the others
            largest_first = sorted(values, key=lambda i: -values[i])
            cut = max(len(values) // 4, 1)
            inside, outside = (
                sum(broken[i] for i in part) for part in (largest_first[:cut], largest_first[cut:])
            )
            counts = (
                f" ({inside} of the {cut} largest, {outside} of the other {len(values) - cut})"
            )
        yield Finding(
            f"{attack} at {trial.ball} breaks more of the samples of {side} {label}{counts}: "
            f"Spearman correlation {rank.rho:.2f} [{rank.low:.2f}, {rank.high:.2f}], "
            f"{rank.count} samples.",
            f"jacobian {figure}, attack {trial.column('robust')}",
        )


def _find_attack(report: Report) -> tuple[TrialKey, dict[str, bool]] | None:
    """Return the attack that splits the samples most evenly, and whether it broke each of them.

    Samples are those that are classified rightly and have a norm. All attacks together are taken
    where they were recorded. None if every attack breaks all samples or none.
    """
    attack, jacobian = report.section("attack"), report.section("jacobian")
    if attack is None or jacobian is None:
        return None
    measured = _list_finite(jacobian, "norm")
    columns = ((name, *parse_column(name)) for name in attack.samples)
    trials = {t: name for name, kind, t in columns if t and kind == "robust"}
    correct = attack.samples.get("correct", (1,) * len(attack.ids))
    split = []
    for trial in [trial for trial in trials if trial.attack == WORST] or trials:
        rows = zip(attack.ids, correct, attack.samples[trials[trial]], strict=True)
        known = {i: not ok for i, right, ok in rows if right and ok is not None and i in measured}
        if len(set(known.values())) == 2:
            share = sum(known.values()) / len(known)
            split.append((abs(share - 0.5), trial, known))
    return min(split, key=lambda each: each[0])[1:] if split else None


def _list_finite(section: Section, name: str) -> dict[str, float]:
    values = zip(section.ids, section.samples.get(name, ()), strict=False)
    return {key: float(value) for key, value in values if finite([value])}  # type: ignore[arg-type]


def _name_first(pairs: Iterable[tuple[str, str]]) -> str:
    named = [f"{name} ({value})" for name, value in pairs]
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return ", ".join(named[:NAMED]) + more
