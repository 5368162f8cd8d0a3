"""Whether each metric improved or regressed: a rule without a margin for every one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from lipaudit.gate.comparison.heads import no_change, row_pairs
from lipaudit.gate.judging import change_word, judge_alone, measured
from lipaudit.gate.rules import BINARY, Rule, parse_rule
from lipaudit.gate.statistics import LEVEL, mean_change, paired_changes
from lipaudit.gate.verdicts import Verdict
from lipaudit.results import Column, Report, Section, sample_columns
from lipaudit.results.trials import parse_column

Reports = tuple[Report, Report]
Sections = tuple[Section, Section]
ABSENT = ("has none", "has one in both")
"""How the reason of a verdict ends where there is nothing to compare, whatever was done."""


def verdicts(sections: Sections, reports: Reports, names: tuple[str, str]) -> Iterator[Verdict]:
    """Judge every column with a better direction of a section that both reports have.

    Args:
        sections: the section, of the first report and of the other.
        reports: both.
        names: what they are called.
    """
    measure = sections[0].measure
    sampled = sample_columns(measure)
    for name, column in sampled.items():
        if column.better or name == "correct":
            yield from _of_samples(name, column, sections, reports, names)
    for name, column in (sections[0].columns() | sections[1].columns()).items():
        if column.better and name not in sampled:
            yield from _of_rows(name, column, sections, reports, names)


def incomplete(sections: Sections) -> Iterator[str]:
    """Say which columns not every shared sample has a figure of in both reports."""
    measure, both = sections[0].measure, _shared(sections)
    for name, column in sample_columns(measure).items():
        known = _known(name, sections)
        if column.better and 0 < len(known) < len(both):
            yield (
                f"compared over the {len(known)} of {len(both)} samples for which both have a "
                f"figure: {measure}.{name}"
            )


def _of_samples(
    name: str, column: Column, sections: Sections, reports: Reports, names: tuple[str, str]
) -> Iterator[Verdict]:
    """Judge a per-sample column over the samples for which both reports have a figure."""
    stats = ("mean",) if name in BINARY else ("median", "p95")
    limit = "+0pp" if name in BINARY else no_change(column, _numbers(name, sections))
    rules = [_rule(f"{sections[0].measure}.{name}:{stat}", column, limit) for stat in stats]
    absent = [label for label, s in zip(names, sections, strict=True) if not _cells(name, s)]
    both, known = _shared(sections), _known(name, sections)
    if absent:
        reason = f"{absent[0]} has none" if len(absent) == 1 else ""
        yield from (_unjudged(rule, reason) for rule in rules if reason)
    elif both and not known:
        yield from (_unjudged(rule, "no sample has one in both") for rule in rules)
    else:
        if not _complete(name, sections):
            reports = _only(reports[0], sections[0], known), _only(reports[1], sections[1], known)
        for rule in rules:
            yield from map(_neutral, judge_alone(rule, reports[1], reports[0]))


def _of_rows(
    name: str, column: Column, sections: Sections, reports: Reports, names: tuple[str, str]
) -> Iterator[Verdict]:
    """Judge a column of rows: of layers and heads, or of any where no samples are kept."""
    figures = [_by_rows(section, name) for section in sections]
    numbers = [value for values in figures for value in values]
    rule = _rule(f"{sections[0].measure}.{name}:median", column, no_change(column, numbers))
    absent = [label for label, values in zip(names, figures, strict=True) if not values]
    if len(absent) == 1:
        yield _unjudged(rule, f"{absent[0]} has none")
    elif not absent:
        for verdict in judge_alone(rule, reports[1], reports[0]):
            yield _neutral(_paired(verdict, rule, sections))


def _paired(verdict: Verdict, rule: Rule, sections: Sections) -> Verdict:
    """Judge the median over rows sample by sample, where the samples behind the rows are kept."""
    if verdict.reason or verdict.status == "unchanged":
        return verdict
    sides = row_pairs(rule.column, *sections).values()
    if not sides:
        return verdict
    old, new = (np.median(np.stack(lines), axis=0) for lines in zip(*sides, strict=True))
    evidence = mean_change(rule.worse * paired_changes(old, new, relative=rule.limit.unit == "%"))
    return verdict.model_copy(update=measured(rule, evidence, LEVEL))


def _neutral(verdict: Verdict) -> Verdict:
    """Reword a verdict for a question without a margin: is there a change?"""
    ends = [verdict.change] if verdict.low is None else [verdict.low, verdict.high]
    return verdict.model_copy(
        update={
            "status": change_word(verdict.status, ends, verdict.unit),
            "rule": verdict.metric,
            "change_status": None,
            "change_low": None,
            "change_high": None,
            "detectable": None,
            "samples_needed": None,
        }
    )


def _rule(metric: str, column: Column, limit: str) -> Rule:
    """Return the rule without a margin for a metric."""
    op = "<=" if column.better == "lower" else ">="
    return replace(parse_rule(f"{metric} {op} {limit}"), text=metric)


def _unjudged(rule: Rule, reason: str) -> Verdict:
    return Verdict(rule=rule.text, metric=rule.metric, status="not comparable", reason=reason)


def _by_rows(section: Section, name: str) -> list[float]:
    """Return the figures of a column that is compared by its rows.

    It is so where rows are of layers, or no samples are kept.
    """
    sampled = bool(sample_columns(section.measure))
    cells = [row.cells() for row in section.rows]
    shown = [row.get(name) for row in cells if "layer" in row or not sampled]
    return [float(value) for value in shown if value is not None]


def _cells(name: str, section: Section) -> list[tuple[object, ...]]:
    """Return the per-sample columns of a name: one, or one of each trial."""
    return [values for c, values in section.samples.items() if parse_column(c)[0] == name]


def _numbers(name: str, sections: Iterable[Section]) -> list[float]:
    cells = (cell for s in sections for values in _cells(name, s) for cell in values)
    return [float(cell) for cell in cells if isinstance(cell, int | float)]


def _complete(name: str, sections: Sections) -> bool:
    """Tell whether every sample of both sections, shared or not, has a figure in every trial."""
    cells = (cell for s in sections for values in _cells(name, s) for cell in values)
    return all(isinstance(cell, int | float) for cell in cells)


def _shared(sections: Sections) -> list[str]:
    """Return the samples that both sections have."""
    old, new = sections
    there = set(new.ids)
    return [i for i in old.ids if i in there]


def _known(name: str, sections: Sections) -> set[str]:
    """Return the shared samples for which both sections have a figure, in every trial."""
    known = set(_shared(sections))
    for section in sections:
        for values in _cells(name, section):
            pairs = zip(section.ids, values, strict=True)
            known &= {i for i, cell in pairs if isinstance(cell, int | float)}
    return known


def _only(report: Report, section: Section, known: set[str]) -> Report:
    """Return a report with some of the samples of a section; arrays that no longer fit stay."""
    keep = [i in known for i in section.ids]
    samples = {
        name: tuple(cell for cell, kept in zip(cells, keep, strict=True) if kept)
        for name, cells in section.samples.items()
    }
    part = section.model_copy(update={"samples": samples})
    sections = tuple(part if each is section else each for each in report.sections)
    return report.model_copy(update={"sections": sections})
