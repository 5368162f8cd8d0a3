"""Which samples of a report are the worst."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lipaudit.results.figures import order
from lipaudit.results.report import Report, Section
from lipaudit.results.trials import TrialKey, parse_column

SHOWN = 10
"""How many samples are shown of all."""


def ids(section: Section) -> tuple[str, ...]:
    """Return the samples that a section has columns for."""
    return tuple(map(str, section.samples.get("ids", ())))


def broken(report: Report) -> dict[str, set[TrialKey]]:
    """Return the balls in which attacks broke each sample that is not wrong without."""
    balls: dict[str, set[TrialKey]] = {}
    for section in filter(None, map(report.section, ("attack", "certify"))):
        right = dict(zip(ids(section), section.samples.get("correct", ()), strict=False))
        for name, values in section.samples.items():
            kind, trial = parse_column(name)
            if kind == "robust" and trial is not None:
                for sample, stands in zip(ids(section), values, strict=False):
                    if stands == 0 and right.get(sample) != 0:
                        balls.setdefault(sample, set()).add(replace(trial, attack=""))
    return balls


def worst(report: Report, count: int = SHOWN) -> list[str]:
    """Return the samples that are least robust: those broken in most balls, then by their norm.

    What is classified wrongly without an attack comes last.
    """
    balls, norms, right = broken(report), _values(report, "norm"), _values(report, "correct")

    def rank(sample: str) -> tuple[bool, int, float]:
        return right.get(sample) == 0, -len(balls.get(sample, ())), -order(norms.get(sample))

    known = dict.fromkeys(sample for section in report.sections for sample in ids(section))
    return sorted(known, key=rank)[:count]


def _values(report: Report, column: str) -> dict[str, Any]:
    """Return a per-sample column of the first section that has it, by id."""
    sections = (section for section in report.sections if column in section.samples)
    section = next(sections, None)
    return (
        {} if section is None else dict(zip(ids(section), section.samples[column], strict=False))
    )
