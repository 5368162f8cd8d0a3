"""Baselines: ordinary reports, reduced so that they fit into git."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from lipaudit import schema
from lipaudit.errors import BaselineError, InputError, LipauditError, UsageError
from lipaudit.gate.comparable import find_fault
from lipaudit.gate.judging import read_trusted
from lipaudit.gate.pairing import ALL_BUT_FEW, find_shared
from lipaudit.gate.rules import DEFAULT_RULES
from lipaudit.tables import Report

_SAVE = "Save a baseline with lipaudit baseline save REPORT."


def load_baseline(path: Path) -> Report:
    """Read a baseline.

    Raises:
        BaselineError: the file is missing, damaged or of a newer schema.
    """
    try:
        return schema.load(path)
    except InputError as error:
        advice = _SAVE if not path.exists() else error.advice
        raise BaselineError(f"baseline: {error.message}", advice) from None


def require_samples(baseline: Report, ids: Mapping[str, Sequence[str]]) -> None:
    """Refuse a measurement on other samples than the baseline's.

    Args:
        baseline: the baseline.
        ids: ids of the samples to measure, by measure.

    Raises:
        BaselineError: too few samples are in the baseline.
    """
    for section in baseline.sections:
        known = section.ids
        if known and section.measure in ids:
            try:
                find_shared(section.measure, ids[section.measure], known, ALL_BUT_FEW)
            except BaselineError as error:
                spec = baseline.run.data.spec
                raise BaselineError(
                    error.message, f"Give the baseline's samples ({spec}) with --data."
                ) from None


def promote(report: Report, reason: str) -> Report:
    """Turn a report into a baseline: the figures that the gate reads, without wall times.

    Arrays that no rule reads (histograms, maps) are left out.

    Args:
        report: a finished report.
        reason: why the report is accepted; stored in the run.

    Raises:
        UsageError: the reason is missing.
        BaselineError: the report cannot be a baseline.
    """
    if not reason.strip():
        raise UsageError("a baseline needs a reason", "Add a reason: --reason 'first release'.")
    if reasons := find_problems(report):
        advice = (
            "Merge all shards with lipaudit merge first." if report.shard else "Measure again."
        )
        raise BaselineError(f"this report cannot be a baseline: {reasons[0]}", advice)
    sections = []
    for section in report.sections:
        # Arrays behind rows stay, so that rows can be computed again for shared samples.
        columns = section.columns
        behind = (column.reduction.arrays for column in columns.values() if column.reduction)
        kept = columns.keys() | set(chain.from_iterable(behind))
        rows = section.rows
        if "seconds" in columns:
            rows = tuple(row.replace(seconds=None) for row in rows)
        arrays = {name: array for name, array in section.arrays.items() if name in kept}
        sections.append(section.model_copy(update={"rows": rows, "arrays": arrays}))
    run = report.run.model_copy(update={"reason": reason.strip()})
    return report.model_copy(update={"run": run, "sections": tuple(sections)})


def find_problems(report: Report) -> list[str]:
    """Return the reasons why a report cannot be a baseline.

    It must be complete and converged, with finite figures for the default rules.
    """
    reasons = [reason for section in report.sections if (reason := find_fault(report, section))]
    for rule in DEFAULT_RULES:
        section = report.section(rule.measure)
        try:
            _ = section and read_trusted(rule, report, section)
        except LipauditError as error:
            reasons.append(error.message)
    return list(dict.fromkeys(reasons)) or ([] if report.sections else ["it has no sections"])
