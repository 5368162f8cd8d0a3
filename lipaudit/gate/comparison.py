"""Compare reports sample by sample: data for tables, heat-maps and distributions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lipaudit.errors import BaselineError, LipauditError, UsageError
from lipaudit.gate.comparable import REPEAT, differences
from lipaudit.gate.contrasts import Contrast, contrasts
from lipaudit.gate.judging import judge_alone
from lipaudit.gate.rules import BINARY, Rule, parse_rule
from lipaudit.gate.values import row_names
from lipaudit.gate.verdicts import Verdict, VerdictStatus
from lipaudit.results import Column, Report, Section, model_labels, sample_columns
from lipaudit.results.columns import Float, Frozen
from lipaudit.results.trials import parse_column

LEVEL = 0.025
"""One-sided level of the limits: together they are a 95 % interval."""
TOLERANCE = 1e-4
"""Relative accuracy of the norms: a smaller change of a figure without an interval is none."""
HEAT = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm",)}
"""Columns that are mapped over the heads; of other sections all that have a better direction."""
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
        reasons = [v.reason for pair in pairs for v in pair.verdicts] or ["no common section"]
        raise BaselineError(f"the reports have nothing to compare: {reasons[0]}", REPEAT)
    return Comparison(
        models=tuple(names), pairs=pairs, jacobian=tuple(_distributions(reports, names))
    )


def _pair(old: Report, new: Report, old_name: str, new_name: str) -> Pair:
    verdicts = [v for rule in _rules(old, new) for v in judge_alone(rule, new, old, LEVEL)]
    return Pair(
        old=old_name,
        new=new_name,
        verdicts=tuple(_neutral(verdict) for verdict in verdicts),
        ratios=tuple(r for metric in _mapped(new) if (r := _ratios(metric, old, new))),
        notes=differences(new, old),
    )


def _neutral(verdict: Verdict) -> Verdict:
    """Reword a verdict for a question without a margin: is there a change?"""
    status = _NO_MARGIN.get(verdict.status, verdict.status)
    if verdict.change is not None and not verdict.samples and abs(verdict.change) <= TOLERANCE:
        status = "unchanged"
    rule = verdict.metric
    return verdict.model_copy(
        update={"status": status, "rule": rule, "detectable": None, "samples_needed": None}
    )


def _rules(old: Report, new: Report) -> Iterator[Rule]:
    """Return a rule without a margin for every metric that has a better direction."""
    for section in old.sections:
        if new.section(section.measure) is None:
            continue
        for name, column in sample_columns(section.measure).items():
            if column.better or name == "correct":
                yield from _sample_rules(section, name, column)
        for name, column in section.columns().items():
            sampled = name in sample_columns(section.measure)
            if column.better and not sampled and _by_rows(section, name):
                op = "<=" if column.better == "lower" else ">="
                yield parse_rule(f"{section.measure}.{name}:median {op} +0%")


def _sample_rules(section: Section, name: str, column: Column) -> Iterator[Rule]:
    columns = [c for c in section.samples if parse_column(c)[0] == name]
    if not columns or any(cell is None for c in columns for cell in section.samples[c]):
        return
    metric = f"{section.measure}.{name}"
    op = "<=" if column.better == "lower" else ">="
    if name in BINARY:
        yield parse_rule(f"{metric}:mean {op} +0pp")
        return
    values = [v for v in section.samples[columns[0]] if isinstance(v, int | float)]
    limit = "+0%" if all(v >= 0 for v in values) else "+0"
    yield parse_rule(f"{metric}:median {op} {limit}")
    yield parse_rule(f"{metric}:p95 {op} {limit}")


def _by_rows(section: Section, name: str) -> bool:
    """Tell whether a column is compared by its rows: of layers, or where no samples are kept."""
    cells = [row.cells() for row in section.rows]
    sampled = bool(sample_columns(section.measure))
    return any(row.get(name) is not None and ("layer" in row or not sampled) for row in cells)


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
        changes = contrasts(rule, new, old) if section else []
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
