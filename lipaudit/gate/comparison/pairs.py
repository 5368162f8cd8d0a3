"""Every report against the first: what changed, and what spoils the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate.comparable import REPEAT, differences, same_weights
from lipaudit.gate.comparison.heads import head_changes, mapped
from lipaudit.gate.comparison.records import Comparison, Pair
from lipaudit.gate.comparison.samples import sample_changes, side_changes
from lipaudit.gate.comparison.settled import settled
from lipaudit.gate.comparison.verdicts import incomplete, verdicts
from lipaudit.gate.overlap import matched, paired_by_place
from lipaudit.results import Report, Section, model_labels

SPOILING = frozenset({"dtype", "preprocess", "starts"})
"""Conditions without which figures are not of the same thing; other data is, by their samples."""
UNFINISHED = "Let the run finish (the same command with --resume), or merge its shards."


def compare(reports: Sequence[Report]) -> Comparison:
    """Compare every report with the first on their shared samples.

    Intervals hold for each metric by itself: a comparison explores, the gate decides.

    Raises:
        UsageError: for fewer than two reports.
        BaselineError: when the reports have nothing that can be compared.
    """
    if len(reports) < 2:
        raise UsageError("compare needs at least two reports", "lipaudit compare A.json B.json")
    names, alike = model_labels(reports), matched(reports)
    said = paired_by_place(reports, names)
    pairs = tuple(
        _pair((alike[0], report), (names[0], name), said.get(name, ""))
        for report, name in zip(alike[1:], names[1:], strict=True)
    )
    judged = [v for pair in pairs for v in pair.verdicts if not v.reason]
    if not judged:
        reasons = [v.reason for pair in pairs for v in pair.verdicts] or [_nothing(reports, names)]
        whole = all(r.shard is None and r.status == "complete" for r in reports)
        advice = REPEAT if whole else UNFINISHED
        raise BaselineError(f"the reports have nothing to compare: {reasons[0]}", advice)
    return Comparison(models=tuple(names), pairs=pairs)


def _nothing(reports: Sequence[Report], names: Sequence[str]) -> str:
    measured = (
        f"{name}: {', '.join(section.measure for section in report.sections) or 'nothing'}"
        for name, report in zip(names, reports, strict=True)
    )
    return f"no common section ({'; '.join(measured)})"


def _pair(reports: tuple[Report, Report], names: tuple[str, str], by_place: str) -> Pair:
    reports, unsettled = settled(reports)
    old, new = reports
    both = [(s, after) for s in old.sections if (after := new.section(s.measure)) is not None]
    differing = differences(new, old)
    flips = side_changes(old, new)
    return Pair(
        old=names[0],
        new=names[1],
        verdicts=tuple(v for sections in both for v in verdicts(sections, reports, names)),
        heads=tuple(h for metric in mapped(new) if (h := head_changes(metric, old, new))),
        outcomes=tuple(flip.outcome for flip in flips),
        samples=sample_changes(old, new, flips),
        warnings=(
            *(text for name, text in differing.items() if name in SPOILING),
            *([by_place] if by_place else []),
            *_fewer(both),
            *unsettled,
            *(["both reports are of the same weights"] if same_weights(new, old) else []),
        ),
        notes=(
            *_alone(old, new, names),
            *(text for sections in both for text in incomplete(sections)),
            *(text for name, text in differing.items() if name not in SPOILING),
        ),
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
        old, new = (set(section.ids) for section in sections)
        if old != new and old & new:
            yield (
                f"compared over the {len(old & new)} samples that both have, of {len(old)} and "
                f"{len(new)}: {sections[0].measure}"
            )
