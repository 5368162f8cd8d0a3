"""The worst samples of a report, and contradictions between attacks and certificates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from lipaudit.tables.figures import finite, order
from lipaudit.tables.report import Report, Section
from lipaudit.tables.trials import Radius, TrialKey, parse_column

SHOWN = 10
"""Number of samples that are shown."""
# ||x||_inf <= max_t ||x_t||_2 <= ||x||_2: a ball in an earlier norm is inside the later ones.
INSIDE = ("l2", "token-l2", "linf")
"""Norms in an order in which no norm is smaller than the next one."""


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


def broken(report: Report) -> dict[str, set[TrialKey]]:
    """Return, for each correctly classified sample, the balls in which attacks broke it."""
    balls: dict[str, set[TrialKey]] = {}
    for section in filter(None, map(report.section, ("attack", "certify"))):
        for sample, trial in _list_fallen(section):
            balls.setdefault(sample, set()).add(replace(trial, attack=""))
    return balls


def worst(report: Report, count: int = SHOWN) -> list[str]:
    """Return the least robust samples: broken in most balls first, then by norm.

    Without norms, samples with the smallest certified balls come first. Misclassified samples come
    last.
    """
    balls = broken(report)
    # Each column is read from the first section that has it.
    norms, right, proven = (
        next(
            (
                dict(zip(s.ids, s.samples[n], strict=False))
                for s in report.sections
                if n in s.samples
            ),
            {},
        )
        for n in ("norm", "correct", "radius")
    )

    def rank(sample: str) -> tuple[bool, int, float, float]:
        radius = min(finite([proven.get(sample)]), default=math.inf)
        many = len(balls.get(sample, ()))
        return right.get(sample) == 0, -many, -order(norms.get(sample)), radius

    known = dict.fromkeys(sample for section in report.sections for sample in section.ids)
    return sorted(known, key=rank)[:count]


def contradictions(report: Report) -> list[Contradiction]:
    """Return, for each sample broken in a certified ball, the first such pair.

    The distance of an example in one norm bounds its distance in the later norms of `INSIDE`.
    """
    certificates, attack = report.section("certify"), report.section("attack")
    certified = [
        (sample, trial)
        for kind, trial, sample, value in _list_figures(certificates)
        if kind == "certified" and trial is not None and value == 1
    ]
    certified += _list_searched(certificates, "radius")
    attacks: dict[str, list[TrialKey]] = {}
    for section in (attack, certificates) if certified else ():
        # An attack may stop before its radius: the example is then inside a smaller ball.
        far = {(i, t): value for kind, t, i, value in _list_figures(section) if kind == "distance"}
        for sample, trial in _list_fallen(section):
            reached = map(_make_radius, finite([far.get((sample, trial))]))
            ball = replace(trial, radius=min([trial.radius, *reached], key=float))
            attacks.setdefault(sample, []).append(ball)
        for sample, ball in _list_searched(section, "radius_adversarial"):
            attacks.setdefault(sample, []).append(ball)
    first: dict[str, Contradiction] = {}
    for sample, ball in certified:
        for trial in attacks.get(sample, ()):
            compared = {trial.norm, ball.norm} <= {*INSIDE}
            inner = compared and INSIDE.index(trial.norm) <= INSIDE.index(ball.norm)
            if inner and trial.radius.value <= ball.radius.value:
                first.setdefault(sample, Contradiction(sample, ball, trial))
    return list(first.values())


def _list_fallen(section: Section | None) -> Iterator[tuple[str, TrialKey]]:
    """Yield the correct samples, with each trial that broke them."""
    right = {i: value for kind, _, i, value in _list_figures(section) if kind == "correct"}
    for kind, trial, sample, value in _list_figures(section):
        if kind == "robust" and trial is not None and value == 0 and right.get(sample) != 0:
            yield sample, trial


def _list_figures(section: Section | None) -> Iterator[tuple[str, TrialKey | None, str, Any]]:
    """Yield every per-sample figure of a section: kind, trial, sample, value."""
    if section is not None:
        for name, values in section.samples.items():
            kind, trial = parse_column(name)
            for sample, value in zip(section.ids, values, strict=False):
                yield kind, trial, sample, value


def _list_searched(section: Section | None, column: str) -> Iterator[tuple[str, TrialKey]]:
    """Yield the balls of certified and adversarial radii, if these were searched."""
    for kind, _, sample, value in _list_figures(section):
        if section is not None and kind == column and finite([value]) and value > 0:
            norm = section.settings.get("norm") or "linf"
            yield sample, TrialKey("", str(norm), _make_radius(value))


def _make_radius(value: float) -> Radius:
    """Return a radius that was measured, not typed."""
    # Exact, so that rounding of the text does not affect comparisons of radii.
    return Radius(f"{value:.4g}", Fraction(value))
