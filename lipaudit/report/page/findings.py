"""Findings of a report beside its scorecard: sentences that chance does not explain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import correlation

from lipaudit.tables import Report, Section
from lipaudit.tables.figures import Z95, finite, order
from lipaudit.tables.report import rows_of
from lipaudit.tables.trials import WORST, TrialKey, parse_column

# Rank correlation


# With fewer pairs even rho = 0.7 cannot be distinguished from 0.
FEWEST = 8


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho over `count` pairs, with its 95 % limits."""

    rho: float
    low: float
    high: float
    count: int


def compute_spearman(x: Sequence[float], y: Sequence[float]) -> Correlation | None:
    """Return Spearman's rho, or None if it is undefined.

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
"""Per-sample figures that may predict whether attacks break it, with their labels."""
HALF = 0.5
"""A key is called a sink when it takes more than this share of a head's mass."""
NAMED = 3


def diagnose(report: Report) -> Iterator[tuple[str, str]]:
    """Yield sentences, each with the section that it comes from."""
    rows = rows_of(report.section("attention"))
    sinks = sorted((r for r in rows if order(r.sink_max) > HALF), key=lambda r: -r.sink_max)
    if sinks:
        places = Counter(row.sink_token for row in sinks).most_common(NAMED)
        listed = ", ".join(f"{place} ({count} heads)" for place, count in places)
        where = listed if len(places) > 1 else f"{places[0][0]} in all of them"
        text = f"In {len(sinks)} of {len(rows)} heads one key takes more than half of the mass"
        yield f"{text}; at position {where}.", "attention"
    yield from _find_predictors(report)


def _find_predictors(report: Report) -> Iterator[tuple[str, str]]:
    """Name the figures that separate broken from robust samples, beyond chance."""
    jacobian, found = report.section("jacobian"), _find_attack(report)
    if jacobian is None or found is None:
        return
    trial, broken = found
    attack = "the worst attack" if trial.attack == WORST else trial.attack
    for figure, label in FEATURES.items():
        values = {i: v for i, v in _list_finite(jacobian, figure).items() if i in broken}
        rank = compute_spearman([*values.values()], [float(broken[i]) for i in values])
        if rank is None or rank.low * rank.high <= 0:
            continue
        side = "larger" if rank.rho > 0 else "smaller"
        yield (
            f"Samples with a {side} {label} are broken more often by {attack} at {trial.ball}: "
            f"Spearman correlation {rank.rho:.2f} [{rank.low:.2f}, {rank.high:.2f}], "
            f"{rank.count} samples.",
            "jacobian",
        )


def _find_attack(report: Report) -> tuple[TrialKey, dict[str, bool]] | None:
    """Return the attack that splits the samples most evenly, and which samples it broke.

    The samples are those classified correctly and with a norm. The worst case over attacks is used
    if it was recorded. None if every attack breaks all samples or none.
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
            # The split nearest to half and half is the most informative one.
            split.append((abs(share - 0.5), trial, known))
    return min(split, key=lambda each: each[0])[1:] if split else None


def _list_finite(section: Section, name: str) -> dict[str, float]:
    values = zip(section.ids, section.samples.get(name, ()), strict=False)
    return {key: float(value) for key, value in values if finite([value])}  # type: ignore[arg-type]
