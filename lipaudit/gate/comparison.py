"""Compare reports sample by sample: data for tables, heat-maps and distributions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lipaudit.errors import BaselineError, LipauditError, UsageError
from lipaudit.gate.comparable import REPEAT, differences
from lipaudit.gate.contrasts import TOLERANCE, Contrast, contrasts
from lipaudit.gate.judging import judge_alone
from lipaudit.gate.rules import BINARY, parse_rule
from lipaudit.gate.values import row_names
from lipaudit.gate.verdicts import Verdict, VerdictStatus
from lipaudit.results import Column, Report, Section, model_labels, sample_columns
from lipaudit.results.columns import Float, Frozen
from lipaudit.results.trials import parse_column

LEVEL = 0.025
"""One-sided level of the limits: together they are a 95 % interval."""
HEAT = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm",)}
"""Columns that are mapped over the heads; of other sections all that have a better direction."""
Figures = list[float] | None
"""Of a column in a report; None where it has no such column."""
_NO_MARGIN: dict[VerdictStatus, VerdictStatus] = {
    "pass": "inconclusive",
    "pass (not proven)": "inconclusive",
}


class HeadRatios(Frozen):
    """Log-ratio of one column for every head: the mean of ln(new / old) over shared samples.

    Attributes:
        metric: e.g. `bounds.exact`.
        layers: the layers, one per line of `values`.
        heads: the heads, one per entry of a line.
        values: log-ratios; None where a model has no such head or no such figure.
    """

    metric: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    values: tuple[tuple[Float | None, ...], ...]


class Pair(Frozen):
    """One model against the first.

    Attributes:
        old: name of the first model.
        new: name of the other.
        verdicts: one per metric: improved, regressed, unchanged, not comparable, or inconclusive
            (its 95 % interval contains 0). Columns of rows have no interval: they are compared
            as they are, on these samples.
        ratios: per-head log-ratios, for heat-maps.
        notes: what differs without forbidding the comparison.
    """

    old: str
    new: str
    verdicts: tuple[Verdict, ...]
    ratios: tuple[HeadRatios, ...]
    notes: tuple[str, ...]


class Distribution(Frozen):
    """Jacobian norms of one model on the samples that all reports share, in one order."""

    model: str
    values: tuple[Float, ...]


class Comparison(Frozen):
    """Everything that `lipaudit compare` shows.

    Attributes:
        models: names of the models in the order given.
        pairs: every model but the first, against the first.
        jacobian: one distribution per report that has Jacobian norms, side by side.
    """

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]
    jacobian: tuple[Distribution, ...]


def compare(reports: Sequence[Report]) -> Comparison:
    """Compare every report with the first on their shared samples.

    Intervals hold for each metric by itself: a comparison explores, the gate decides.

    Raises:
        UsageError: for fewer than two reports.
        BaselineError: when the reports have nothing that can be compared.
    """
    if len(reports) < 2:
        raise UsageError("compare needs at least two reports", "lipaudit compare A.json B.json")
    names = model_labels(reports)
    pairs = tuple(
        _pair(reports[0], report, names[0], name)
        for report, name in zip(reports[1:], names[1:], strict=True)
    )
    judged = [v for pair in pairs for v in pair.verdicts if not v.reason]
    if not judged:
        reasons = [v.reason for pair in pairs for v in pair.verdicts] or [_nothing(reports, names)]
        raise BaselineError(f"the reports have nothing to compare: {reasons[0]}", REPEAT)
    return Comparison(
        models=tuple(names), pairs=pairs, jacobian=tuple(_distributions(reports, names))
    )


def _nothing(reports: Sequence[Report], names: Sequence[str]) -> str:
    measured = (
        f"{name}: {', '.join(section.measure for section in report.sections) or 'nothing'}"
        for name, report in zip(names, reports, strict=True)
    )
    return f"no common section ({'; '.join(measured)})"


def _pair(old: Report, new: Report, old_name: str, new_name: str) -> Pair:
    names = (old_name, new_name)
    both = [(s, after) for s in old.sections if (after := new.section(s.measure)) is not None]
    verdicts = [v for sections in both for v in _verdicts(sections, (old, new), names)]
    return Pair(
        old=old_name,
        new=new_name,
        verdicts=tuple(verdicts),
        ratios=tuple(r for metric in _mapped(new) if (r := _ratios(metric, old, new))),
        notes=(*_alone(old, new, names), *_fewer(both), *differences(new, old)),
    )


def _alone(old: Report, new: Report, names: tuple[str, str]) -> Iterator[str]:
    """Say which sections only one of two reports has."""
    for report, other, name in ((old, new, names[0]), (new, old, names[1])):
        for section in report.sections:
            if other.section(section.measure) is None:
                yield f"not compared, only {name} has it: {section.measure}"


def _fewer(both: Sequence[tuple[Section, Section]]) -> Iterator[str]:
    """Say which sections are compared over some of their samples."""
    for sections in both:
        old, new = (set(section.samples.get("ids", ())) for section in sections)
        if old != new and old & new:
            yield (
                f"compared over the {len(old & new)} samples that both have, of {len(old)} and "
                f"{len(new)}: {sections[0].measure}"
            )


def _verdicts(
    sections: tuple[Section, Section], reports: tuple[Report, Report], names: tuple[str, str]
) -> Iterator[Verdict]:
    """Judge every column of a section that has a better direction."""
    for text, figures in _metrics(sections):
        rule = replace(parse_rule(text), text=text.partition(" ")[0])
        missing = [name for name, values in zip(names, figures, strict=True) if values is None]
        if all(figures):
            yield from map(_neutral, judge_alone(rule, reports[1], reports[0], LEVEL))
        elif len(missing) < len(names):
            reason = f"{missing[0]} has none" if missing else "not every sample has one"
            yield Verdict(
                rule=rule.text, metric=rule.metric, status="not comparable", reason=reason
            )


def _neutral(verdict: Verdict) -> Verdict:
    """Reword a verdict for a question without a margin: is there a change?"""
    status = _NO_MARGIN.get(verdict.status, verdict.status)
    ends = [verdict.change] if verdict.low is None else [verdict.low, verdict.high]
    if verdict.unit == "%" and all(end is not None and abs(end) <= TOLERANCE for end in ends):
        status = "unchanged"
    return verdict.model_copy(
        update={
            "status": status,
            "rule": verdict.metric,
            "detectable": None,
            "samples_needed": None,
        }
    )


def _metrics(sections: tuple[Section, Section]) -> Iterator[tuple[str, list[Figures]]]:
    """Yield a rule without a margin per metric with a better direction, and its figures in each.

    A change is relative unless figures are negative, and in points of shares.
    """
    measure = sections[0].measure
    sampled = sample_columns(measure)
    for name, column in sampled.items():
        if column.better or name == "correct":
            values = [_sampled(section, name) for section in sections]
            for stat in ("mean",) if name in BINARY else ("median", "p95"):
                limit = "+0pp" if name in BINARY else _limit(values)
                yield f"{measure}.{name}:{stat} {_op(column)} {limit}", values
    for name, column in (sections[0].columns() | sections[1].columns()).items():
        if column.better and name not in sampled:
            values = [_by_rows(section, name) for section in sections]
            yield f"{measure}.{name}:median {_op(column)} {_limit(values)}", values


def _op(column: Column) -> str:
    return "<=" if column.better == "lower" else ">="


def _limit(values: Sequence[Figures]) -> str:
    return "+0%" if all(value >= 0 for each in values for value in each or ()) else "+0"


def _sampled(section: Section, name: str) -> Figures:
    """Return the figures of a per-sample column; empty unless every sample has one."""
    columns = [c for c in section.samples if parse_column(c)[0] == name]
    cells = [cell for column in columns for cell in section.samples[column]]
    numbers = [float(cell) for cell in cells if isinstance(cell, int | float)]
    return (numbers if len(numbers) == len(cells) else []) if columns else None


def _by_rows(section: Section, name: str) -> Figures:
    """Return the figures of a column that is compared by its rows.

    It is so where rows are of layers, or no samples are kept.
    """
    sampled = bool(sample_columns(section.measure))
    cells = [row.cells() for row in section.rows]
    shown = [row.get(name) for row in cells if "layer" in row or not sampled]
    return [float(value) for value in shown if value is not None] or None


def _mapped(report: Report) -> Iterator[str]:
    """Return the columns of heads whose changes are mapped."""
    for section in report.sections:
        columns = section.columns()
        if {"layer", "head"} <= columns.keys():
            better = [name for name, column in columns.items() if column.better]
            names = HEAT.get(section.measure, better)
            yield from (f"{section.measure}.{name}" for name in names)


def _ratios(metric: str, old: Report, new: Report) -> HeadRatios | None:
    """Return the log-ratio of every head, nothing where the two models do not compare."""
    rule = parse_rule(f"{metric}:each <= +0%")
    section = new.section(rule.measure)
    try:
        changes = contrasts(rule, new, old, least=0.0) if section else []
    except LipauditError:
        return None
    if section is None or not changes:
        return None
    rows = dict(zip(row_names(section.rows), section.rows, strict=True))
    cells = [(rows[contrast.name].cells(), _log_ratio(contrast)) for contrast in changes]
    values = {(cell["layer"], cell["head"]): value for cell, value in cells}
    layers, heads = (tuple(sorted({key[i] for key in values})) for i in (0, 1))
    lines = tuple(tuple(values.get((layer, head)) for head in heads) for layer in layers)
    return HeadRatios(metric=metric, layers=layers, heads=heads, values=lines)


def _log_ratio(contrast: Contrast) -> float | None:
    if contrast.evidence is not None:
        return contrast.evidence.estimate
    return math.log(contrast.new / contrast.old) if contrast.old and contrast.new > 0 else None


def _distributions(reports: Sequence[Report], names: Sequence[str]) -> Iterator[Distribution]:
    """Return the Jacobian norms on the samples that all reports with such norms share."""
    kept = [
        (name, dict(zip(section.samples["ids"], section.samples["norm"], strict=True)))
        for name, report in zip(names, reports, strict=True)
        if (section := report.section("jacobian")) and "norm" in section.samples
    ]
    shared = [i for i in (kept[0][1] if kept else ()) if all(i in norms for _, norms in kept)]
    for name, norms in kept:
        yield Distribution(model=name, values=tuple(_float(norms[i]) for i in shared))


def _float(cell: object) -> float:
    return float(cell) if isinstance(cell, int | float) else math.nan
