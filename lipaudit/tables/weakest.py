"""The least robust samples of a report, and samples that are certified and broken at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from lipaudit.tables.columns import finite, group_values, order
from lipaudit.tables.report import Report, Section
from lipaudit.tables.trials import Radius, TrialKey, parse_column

# Number of samples that are shown.
SHOWN = 10
# ||x||_inf <= max_t ||x_t||_2 <= ||x||_2 <= ||x||_1: a ball in an earlier norm is inside the
# later ones. Norms in an order in which no norm is smaller than the next one.
INSIDE = ("l1", "l2", "token-l2", "linf")


class Contradiction(NamedTuple):
    """A sample that an attack broke inside a certified ball: one of the two is wrong.

    Attributes:
        sample: its id.
        certified: the certified ball.
        attack: the trial, with the distance of the example as radius.
    """

    sample: str
    certified: TrialKey
    attack: TrialKey


def find_broken(report: Report) -> dict[str, set[TrialKey]]:
    """Return, for each correctly classified sample, the balls in which attacks broke it."""
    balls: dict[str, set[TrialKey]] = {}
    for section in report.sections:
        for sample, trial in _list_broken(section):
            ball = replace(trial, attack="")  # the attack does not matter
            balls.setdefault(sample, set()).add(ball)
    return balls


def can_rank(report: Report) -> bool:
    """Return whether a report has what `find_worst` ranks samples by.

    These are broken samples, norms of the model, or certified radii.
    """
    for name in ("norm", "radius"):
        if finite(_find_figures(report, name).values()):
            return True
    return bool(find_broken(report))


def find_worst(report: Report, count: int = SHOWN) -> list[str]:
    """Return the ids of the least robust samples.

    Samples that attacks broke in most balls come first, then samples with the largest norm, then
    samples with the smallest certified radius. Misclassified samples come last. If nothing ranks
    the samples (see `can_rank`), these are the first ones of the data.
    """
    balls = find_broken(report)
    norms = _find_figures(report, "norm")
    right = _find_figures(report, "correct")
    proven = _find_figures(report, "radius")

    def rank(sample: str) -> tuple[bool, int, float, float]:
        # The sort key of a sample: correctly classified samples first; among these, samples with
        # the most broken balls, then the largest norm, then the smallest certified radius.
        wrong = right.get(sample) == 0
        broken_balls = len(balls.get(sample, ()))
        norm = order(norms.get(sample))  # -inf, hence last, if it is missing or NaN
        radius = min(finite([proven.get(sample)]), default=math.inf)
        return wrong, -broken_balls, -norm, radius

    samples = dict.fromkeys(sample for section in report.sections for sample in section.ids)
    if not can_rank(report):
        return [*samples][:count]
    return sorted(samples, key=rank)[:count]


def _find_figures(report: Report, name: str) -> dict[str, Any]:
    """Return the value of each sample in a per-sample column, by sample id.

    The first section with this column is used; the result is empty if no section has one.
    """
    for section in report.sections:
        if name in section.samples:
            return dict(zip(section.ids, section.samples[name], strict=True))
    return {}


def find_contradictions(report: Report) -> list[Contradiction]:
    """Return the samples with an adversarial example inside a certified ball.

    A certificate proves that no adversarial example is in a ball around the sample. If an attack
    found an example inside this ball, the attack or the certificate is wrong. Each sample is
    returned once, with the first certified ball and attack that contradict each other.
    """
    certified = list(_list_certified(report))
    if not certified:
        return []
    attacks = group_values(_list_attacked(report))
    contradictions: dict[str, Contradiction] = {}
    for sample, ball in certified:
        for trial in attacks.get(sample, ()):
            if _is_inside(trial, ball):
                contradictions.setdefault(sample, Contradiction(sample, ball, trial))
    return list(contradictions.values())


def _list_attacked(report: Report) -> Iterator[tuple[str, TrialKey]]:
    """Yield each broken sample with the smallest known ball of its adversarial example.

    The distance of the example from the sample may be smaller than the radius of the attack. The
    example is then inside a smaller ball, with this distance as radius.
    """
    for section in report.sections:
        distances = {}  # by sample and trial; not every attack stores them
        for kind, trial, sample, value in _list_figures(section):
            if kind == "distance":
                distances[sample, trial] = value
        for sample, trial in _list_broken(section):
            radii = [trial.radius]
            radii += map(_make_radius, finite([distances.get((sample, trial))]))
            yield sample, replace(trial, radius=min(radii, key=float))
        # Examples of a search for the smallest radius.
        yield from _list_searched(section, "radius_adversarial")


def _list_certified(report: Report) -> Iterator[tuple[str, TrialKey]]:
    """Yield each certified sample of a report with its certified ball."""
    for section in report.sections:
        column = section.sample_columns.get("certified")
        # Only certificates of the model itself (domain "ball"). A certificate of a smoothed
        # classifier does not contradict an attack on the model.
        if column is None or column.domain != "ball":
            continue
        for kind, trial, sample, value in _list_figures(section):
            if kind == "certified" and trial is not None and value == 1:
                yield sample, trial
        # The largest certified radius of each sample, if it was searched for.
        yield from _list_searched(section, "radius")


def _is_inside(inner: TrialKey, outer: TrialKey) -> bool:
    """Return whether a ball is known to be inside another ball around the same sample."""
    if inner.norm not in INSIDE or outer.norm not in INSIDE:
        return False
    # For every vector l1 >= l2 >= token-l2 >= linf, the order of INSIDE. So a ball of a norm is
    # inside the balls of all later norms with the same radius.
    if INSIDE.index(inner.norm) > INSIDE.index(outer.norm):
        return False
    return inner.radius.value <= outer.radius.value


def _list_broken(section: Section) -> Iterator[tuple[str, TrialKey]]:
    """Yield each correctly classified sample that an attack broke, with the attack and ball.

    A section without a column `correct` says nothing on the classification without attack. Then
    every sample counts as correctly classified.
    """
    figures = list(_list_figures(section))
    right = {sample: value for kind, _, sample, value in figures if kind == "correct"}
    for kind, trial, sample, value in figures:
        is_broken = kind == "robust" and value == 0
        if is_broken and trial is not None and right.get(sample) != 0:
            yield sample, trial


def _list_figures(section: Section) -> Iterator[tuple[str, TrialKey | None, str, Any]]:
    """Yield every per-sample figure of a section: (column, attack and ball, sample id, value).

    The column `robust@pgd,linf,2/255` gives `robust`, and the attack and ball `pgd,linf,2/255`. A
    column without @, such as `margin`, has no attack and ball: None.
    """
    for name, values in section.samples.items():
        kind, trial = parse_column(name)
        for sample, value in zip(section.ids, values, strict=True):
            yield kind, trial, sample, value


def _list_searched(section: Section, column: str) -> Iterator[tuple[str, TrialKey]]:
    """Yield each sample with the ball whose radius a search found for this sample.

    Samples without a finite positive radius are left out.

    Args:
        section: the section.
        column: `radius` for the largest certified radius of each sample, `radius_adversarial` for
            the smallest radius at which a search found an adversarial example.
    """
    for name, _, sample, value in _list_figures(section):
        if name == column and finite([value]) and value > 0:
            norm = section.settings.get("norm") or "linf"
            # No attack: a search for radii combines proofs or attacks of several kinds.
            yield sample, TrialKey(attack="", norm=str(norm), radius=_make_radius(value))


def _make_radius(value: float) -> Radius:
    """Return a measured number as a radius."""
    # The value is exact: rounding of the text must not affect comparisons of radii.
    return Radius(text=f"{value:.4g}", value=Fraction(value))
