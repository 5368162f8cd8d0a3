"""Which samples of a report are the worst, and of which it says what cannot be."""

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
# ||x||_inf <= max_t ||x_t||_2 <= ||x||_2: a ball in an earlier norm lies within the later ones.
INSIDE = ("l2", "token-l2", "linf")
"""Norms in an order in which no norm is smaller than the next one."""


class Contradiction(NamedTuple):
    """A sample that an attack broke within a ball that is certified: one of the two is wrong.

    Attributes:
        sample: its id.
        certified: the ball.
        attack: the trial; its radius is how far it went.
    """

    sample: str
    certified: TrialKey
    attack: TrialKey


def broken(report: Report) -> dict[str, set[TrialKey]]:
    """Return the balls in which attacks broke each sample that is not wrong without."""
    balls: dict[str, set[TrialKey]] = {}
    for section in filter(None, map(report.section, ("attack", "certify"))):
        for sample, trial in _list_fallen(section):
            balls.setdefault(sample, set()).add(replace(trial, attack=""))
    return balls


def worst(report: Report, count: int = SHOWN) -> list[str]:
    """Return the samples that are least robust: those broken in most balls, then by their norm.

    Where norms were not measured, those come first of which the smallest balls are certified.
    What is classified wrongly without an attack comes last.
    """
    balls, norms, right = (
        broken(report),
        _read_values(report, "norm"),
        _read_values(report, "correct"),
    )
    proven = _read_values(report, "radius")

    def rank(sample: str) -> tuple[bool, int, float, float]:
        radius = min(finite([proven.get(sample)]), default=math.inf)
        many = len(balls.get(sample, ()))
        return right.get(sample) == 0, -many, -order(norms.get(sample)), radius

    known = dict.fromkeys(sample for section in report.sections for sample in section.ids)
    return sorted(known, key=rank)[:count]


def contradictions(report: Report) -> list[Contradiction]:
    """Return, of each sample that was broken within a certified ball, the first such pair.

    An example at a distance in one norm is no farther in those that `INSIDE` names behind it.
    """
    certified = list(_list_certified(report))
    attacks: dict[str, list[TrialKey]] = {}
    for sample, trial in _list_attacked(report) if certified else ():
        attacks.setdefault(sample, []).append(trial)
    first: dict[str, Contradiction] = {}
    for sample, ball in certified:
        for trial in attacks.get(sample, ()):
            if _lies_within(trial, ball):
                first.setdefault(sample, Contradiction(sample, ball, trial))
    return list(first.values())


def _lies_within(trial: TrialKey, ball: TrialKey) -> bool:
    """Tell whether all points of one ball lie in another."""
    if not {trial.norm, ball.norm} <= {*INSIDE}:
        return False
    inner = INSIDE.index(trial.norm) <= INSIDE.index(ball.norm)
    return inner and trial.radius.value <= ball.radius.value


def _list_certified(report: Report) -> Iterator[tuple[str, TrialKey]]:
    """Yield the samples that are certified, with the ball."""
    section = report.section("certify")
    for kind, trial, sample, value in _list_figures(section):
        if kind == "certified" and trial is not None and value == 1:
            yield sample, trial
    yield from _list_searched(section, "radius")


def _list_attacked(report: Report) -> Iterator[tuple[str, TrialKey]]:
    """Yield the samples that attacks broke, with a ball that the example lies in."""
    for section in (report.section("attack"), report.section("certify")):
        # An attack may stop nearer than its radius allows: its example lies in the smaller ball.
        far = {(i, t): value for kind, t, i, value in _list_figures(section) if kind == "distance"}
        for sample, trial in _list_fallen(section):
            reached = map(_make_radius, finite([far.get((sample, trial))]))
            yield sample, replace(trial, radius=min([trial.radius, *reached], key=float))
        yield from _list_searched(section, "radius_adversarial")


def _list_fallen(section: Section | None) -> Iterator[tuple[str, TrialKey]]:
    """Yield the samples that are right without an attack, with each trial that broke them."""
    right = {i: value for kind, _, i, value in _list_figures(section) if kind == "correct"}
    for kind, trial, sample, value in _list_figures(section):
        if kind == "robust" and trial is not None and value == 0 and right.get(sample) != 0:
            yield sample, trial


def _list_figures(section: Section | None) -> Iterator[tuple[str, TrialKey | None, str, Any]]:
    """Yield every per-sample figure of a section: its kind, its trial, its sample, itself."""
    if section is not None:
        for name, values in section.samples.items():
            kind, trial = parse_column(name)
            for sample, value in zip(section.ids, values, strict=False):
                yield kind, trial, sample, value


def _list_searched(section: Section | None, column: str) -> Iterator[tuple[str, TrialKey]]:
    """Yield the balls whose radius a certificate has searched for, where there is one."""
    for kind, _, sample, value in _list_figures(section):
        if section is not None and kind == column and finite([value]) and value > 0:
            norm = section.settings.get("norm") or "linf"
            yield sample, TrialKey("", str(norm), _make_radius(value))


def _make_radius(value: float) -> Radius:
    """Return a radius that was measured, not typed."""
    # Exact, so that a comparison of radii is not decided by the rounding of the text.
    return Radius(f"{value:.4g}", Fraction(value))


def _read_values(report: Report, column: str) -> dict[str, Any]:
    """Return a per-sample column of the first section that has it, by id."""
    sections = (section for section in report.sections if column in section.samples)
    section = next(sections, None)
    return {} if section is None else dict(zip(section.ids, section.samples[column], strict=False))
