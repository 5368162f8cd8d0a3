"""The least robust samples of a report, and samples that are certified and broken at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from lipaudit.tables.columns import finite, order
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
        for sample, trial in _list_fallen(section):
            ball = replace(trial, attack="")  # whichever attack it was
            balls.setdefault(sample, set()).add(ball)
    return balls


def find_worst(report: Report, count: int = SHOWN) -> list[str]:
    """Return the least robust samples: broken in most balls first, then by norm.

    Without norms, samples with the smallest certified balls come first. Misclassified samples come
    last.
    """
    balls = find_broken(report)
    norms = _find_figures(report, "norm")
    right = _find_figures(report, "correct")
    proven = _find_figures(report, "radius")

    def rank(sample: str) -> tuple[bool, int, float, float]:
        # The sort key: misclassified samples last, then most broken balls first, then the largest
        # norm, then the smallest certified radius.
        wrong = right.get(sample) == 0
        broken_balls = len(balls.get(sample, ()))
        norm = order(norms.get(sample))
        radius = min(finite([proven.get(sample)]), default=math.inf)
        return wrong, -broken_balls, -norm, radius

    samples: dict[str, None] = {}
    for section in report.sections:
        samples |= dict.fromkeys(section.ids)
    return sorted(samples, key=rank)[:count]


def _find_figures(report: Report, name: str) -> dict[str, Any]:
    """Return a per-sample column by sample, of the first section that has it."""
    for section in report.sections:
        if name in section.samples:
            return dict(zip(section.ids, section.samples[name], strict=False))
    return {}


def find_contradictions(report: Report) -> list[Contradiction]:
    """Return the samples with an adversarial example inside a ball that is certified.

    One of the two results is wrong. A sample with several such pairs is returned once.
    """
    certified = list(_list_certified(report))
    if not certified:
        return []
    # The balls that contain an adversarial example, by sample.
    attacks: dict[str, list[TrialKey]] = {}
    for section in report.sections:
        # An attack may stop before its radius: the example is then inside a smaller ball.
        distances = {}
        for kind, trial, sample, value in _list_figures(section):
            if kind == "distance":
                distances[sample, trial] = value
        for sample, trial in _list_fallen(section):
            radii = [trial.radius]
            radii += map(_make_radius, finite([distances.get((sample, trial))]))
            ball = replace(trial, radius=min(radii, key=float))
            attacks.setdefault(sample, []).append(ball)
        for sample, ball in _list_searched(section, "radius_adversarial"):
            attacks.setdefault(sample, []).append(ball)
    first: dict[str, Contradiction] = {}
    for sample, ball in certified:
        for trial in attacks.get(sample, ()):
            if _is_inside(trial, ball):
                first.setdefault(sample, Contradiction(sample, ball, trial))
    return list(first.values())


def _list_certified(report: Report) -> Iterator[tuple[str, TrialKey]]:
    """Yield the samples that the report certifies, each with its ball."""
    for section in report.sections:
        column = section.sample_columns.get("certified")
        # Only certificates of the model itself: those of a smoothed classifier, which have another
        # domain, do not contradict an attack on the model.
        if column is None or column.domain != "ball":
            continue
        for kind, trial, sample, value in _list_figures(section):
            if kind == "certified" and trial is not None and value == 1:
                yield sample, trial
        yield from _list_searched(section, "radius")


def _is_inside(inner: TrialKey, outer: TrialKey) -> bool:
    """Say whether a ball around a sample is known to be inside another ball around it."""
    if inner.norm not in INSIDE or outer.norm not in INSIDE:
        return False
    # The norms of INSIDE never grow from one to the next: l1 >= l2 >= token-l2 >= linf. So a ball
    # of one norm is inside the ball of the same radius of every later norm.
    if INSIDE.index(inner.norm) > INSIDE.index(outer.norm):
        return False
    return inner.radius.value <= outer.radius.value


def _list_fallen(section: Section) -> Iterator[tuple[str, TrialKey]]:
    """Yield each correctly classified sample that an attack broke, with the attack and ball."""
    figures = list(_list_figures(section))
    right = {sample: value for kind, _, sample, value in figures if kind == "correct"}
    for kind, trial, sample, value in figures:
        is_broken = kind == "robust" and value == 0
        if is_broken and trial is not None and right.get(sample) != 0:
            yield sample, trial


def _list_figures(section: Section) -> Iterator[tuple[str, TrialKey | None, str, Any]]:
    """Yield every per-sample figure of a section: kind, trial, sample, value."""
    for name, values in section.samples.items():
        kind, trial = parse_column(name)
        for sample, value in zip(section.ids, values, strict=False):
            yield kind, trial, sample, value


def _list_searched(section: Section, column: str) -> Iterator[tuple[str, TrialKey]]:
    """Yield each sample with the ball of its own radius, if a search found one.

    Args:
        section: the section.
        column: `radius` for the largest certified radius of each sample, `radius_adversarial` for
            the smallest radius at which a search found an adversarial example.
    """
    for kind, _, sample, value in _list_figures(section):
        if kind == column and finite([value]) and value > 0:
            norm = section.settings.get("norm") or "linf"
            yield sample, TrialKey("", str(norm), _make_radius(value))


def _make_radius(value: float) -> Radius:
    """Return a radius that was measured, not typed."""
    # Exact, so that rounding of the text does not affect comparisons of radii.
    return Radius(f"{value:.4g}", Fraction(value))
