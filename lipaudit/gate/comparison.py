"""Compare reports sample by sample: data for summaries, tables, heat-maps and scatters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate.changes import (
    HeadChanges,
    Outcome,
    SampleChange,
    compute_head_changes,
    find_flips,
    list_head_metrics,
    list_sample_changes,
)
from lipaudit.gate.comparable import REPEAT, has_same_weights, list_differences
from lipaudit.gate.judging import judge_change, refuse
from lipaudit.gate.pairing import (
    explain_pairing,
    find_missing,
    keep_sections,
    match_samples,
    name_rows,
    select,
)
from lipaudit.gate.rules import BINARY, no_change
from lipaudit.gate.verdicts import Verdict
from lipaudit.tables import Report, Section, model_labels
from lipaudit.tables.columns import Frozen
from lipaudit.tables.trials import parse_column


class Pair(Frozen):
    """One model against the first.

    Attributes:
        old: name of the first model.
        new: name of the other.
        verdicts: one per metric: improved, regressed, unchanged, not comparable, or inconclusive
            (its 95 % interval contains 0). A column of rows is judged by its median over the
            rows, sample by sample; where no samples are kept it has no interval and is compared
            as it is.
        heads: how each head changed, a record per column.
        outcomes: how many samples changed sides.
        samples: every sample that both reports have, those that lost most first, those that
            gained most last.
        warnings: what spoils the comparison: other data, other samples, other settings.
        notes: what differs without spoiling it.
    """

    old: str
    new: str
    verdicts: tuple[Verdict, ...]
    heads: tuple[HeadChanges, ...]
    outcomes: tuple[Outcome, ...]
    samples: tuple[SampleChange, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


class Comparison(Frozen):
    """Everything that `lipaudit compare` shows.

    Attributes:
        models: names of the models in the order given.
        pairs: every model but the first, against the first.
    """

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


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
    names, alike = model_labels(reports), match_samples(reports)
    said = explain_pairing(reports, names)
    pairs = tuple(
        _compare_two((alike[0], report), (names[0], name), said.get(name, ""))
        for report, name in zip(alike[1:], names[1:], strict=True)
    )
    judged = [v for pair in pairs for v in pair.verdicts if not v.reason]
    if not judged:
        reasons = [v.reason for pair in pairs for v in pair.verdicts] or [
            _explain_nothing(reports, names)
        ]
        whole = all(r.shard is None and r.status == "complete" for r in reports)
        advice = REPEAT if whole else UNFINISHED
        raise BaselineError(f"the reports have nothing to compare: {reasons[0]}", advice)
    return Comparison(models=tuple(names), pairs=pairs)


def _explain_nothing(reports: Sequence[Report], names: Sequence[str]) -> str:
    measured = (
        f"{name}: {', '.join(_name_section(s) for s in report.sections) or 'nothing'}"
        for name, report in zip(names, reports, strict=True)
    )
    return f"no common section ({'; '.join(measured)})"


def _name_section(section: Section) -> str:
    return section.measure if section.failure is None else f"{section.measure} (failed)"


def _compare_two(reports: tuple[Report, Report], names: tuple[str, str], by_place: str) -> Pair:
    reports, unsettled = leave_out_unsettled(reports)
    old, new = reports
    both = [(s, after) for s in old.sections if (after := new.section(s.measure)) is not None]
    differing = list_differences(new, old)
    flips = find_flips(old, new)
    return Pair(
        old=names[0],
        new=names[1],
        verdicts=tuple(v for sections in both for v in judge_columns(sections, reports, names)),
        heads=tuple(
            h for metric in list_head_metrics(new) if (h := compute_head_changes(metric, old, new))
        ),
        outcomes=tuple(flip.outcome for flip in flips),
        samples=list_sample_changes(old, new, flips),
        warnings=(
            *(text for name, text in differing.items() if name in SPOILING),
            *([by_place] if by_place else []),
            *_list_partial(both),
            *unsettled,
            *(["both reports are of the same weights"] if has_same_weights(new, old) else []),
        ),
        notes=(
            *_list_unshared(old, new, names),
            *(text for sections in both for text in list_incomplete(sections)),
            *(text for name, text in differing.items() if name not in SPOILING),
        ),
    )


def _list_unshared(old: Report, new: Report, names: tuple[str, str]) -> Iterator[str]:
    """Say which sections only one of two reports has."""
    for report, other, name in ((old, new, names[0]), (new, old, names[1])):
        for section in report.sections:
            if other.section(section.measure) is None:
                yield f"not compared, only {name} has it: {section.measure}"


def _list_partial(both: Sequence[tuple[Section, Section]]) -> Iterator[str]:
    """Say which sections are compared over some of their samples."""
    for sections in both:
        old, new = (set(section.ids) for section in sections)
        if old != new and old & new:
            yield (
                f"compared over the {len(old & new)} samples that both have, of {len(old)} and "
                f"{len(new)}: {sections[0].measure}"
            )


Reports = tuple[Report, Report]
Sections = tuple[Section, Section]
ABSENT = ("has none", "has one in both")
"""How the reason of a verdict ends where there is nothing to compare, whatever was done."""


def judge_columns(
    sections: Sections, reports: Reports, names: tuple[str, str]
) -> Iterator[Verdict]:
    """Judge every column with a better direction of a section that both reports have.

    Args:
        sections: the section, of the first report and of the other.
        reports: both.
        names: what they are called.
    """
    measure, sampled = sections[0].measure, sections[0].sample_columns
    columns = {**sampled, **sections[0].columns, **sections[1].columns, **sampled}
    for name, column in columns.items():
        if not column.better and not (name in sampled and name == "correct"):
            continue
        if name in sampled:
            stats = ["mean"] if name in BINARY else ["median", "p95"]
            figures = [_read_samples(section, name) for section in sections]
        else:
            stats, figures = ["median"], [_read_rows(section, name) for section in sections]
        for stat in stats if any(figures) else ():
            rule = no_change(f"{measure}.{name}:{stat}", column, chain(*figures), sections)
            if all(figures):
                yield from judge_change(rule, reports[1], reports[0])
            else:
                yield refuse(rule, f"{names[0 if figures[1] else 1]} has none")


def list_incomplete(sections: Sections) -> Iterator[str]:
    """Say which columns not every shared sample has a figure of in both reports."""
    measure = sections[0].measure
    both = set(sections[0].ids) & set(sections[1].ids)
    for name, column in sections[0].sample_columns.items():
        known = both - find_missing(name, sections)
        if column.better and 0 < len(known) < len(both):
            yield (
                f"compared over the {len(known)} of {len(both)} samples for which both have a "
                f"figure: {measure}.{name}"
            )


def _read_rows(section: Section, name: str) -> list[float]:
    """Return the figures of a column that is compared by its rows.

    It is so where rows are of layers, or no samples are kept.
    """
    sampled = bool(section.sample_columns)
    shown = [row.get(name) for row in section.rows if "layer" in row or not sampled]
    return [float(value) for value in shown if value is not None]


def _read_samples(section: Section, name: str) -> list[float]:
    """Return the figures of a per-sample column, of all of its trials."""
    columns = (cells for c, cells in section.samples.items() if parse_column(c)[0] == name)
    return [float(cell) for cells in columns for cell in cells if isinstance(cell, int | float)]


NAMED = 6
"""How many rows that are left out are named."""


def leave_out_unsettled(reports: tuple[Report, Report]) -> tuple[tuple[Report, Report], list[str]]:
    """Leave out of both reports what failed or did not converge in one, and say what.

    A gate refuses such a report whole; a comparison shows what can be seen. A section of which
    nothing would be left stays, and is refused.

    Returns:
        Both reports, and a sentence for each section of which something was left out.
    """
    finished = [keep_sections(r, lambda section: section.failure is None) for r in reports]
    said = []
    for section in finished[0].sections:
        sections = [report.section(section.measure) for report in finished]
        both = [each for each in sections if each is not None]
        rows, samples = set[str](), set[str]()
        for each in both:
            pairs = zip(name_rows(each), each.rows, strict=True)
            rows |= {name for name, row in pairs if row.get("converged") is False}
            flags = zip(each.ids, each.samples.get("converged", ()), strict=False)
            samples |= {name for name, flag in flags if flag is False}
        kept = [_leave_out(each, rows, samples) for each in both]
        some = all(s.rows and (s.ids or "ids" not in s.samples) for s in kept)
        if len(both) < len(reports) or not (rows or samples) or not some:
            continue
        finished = [
            _replace_section(report, each) for report, each in zip(finished, kept, strict=True)
        ]
        said.append(
            f"left out, not converged in one of them: {_name_left_out(rows, samples, section)}"
        )
    return (finished[0], finished[1]), said


def _leave_out(section: Section, rows: Collection[str], samples: Collection[str]) -> Section:
    """Return a section without some rows and samples.

    What it keeps of each sample over all of its rows goes with any of these.
    """
    down = [i for i, name in enumerate(name_rows(section)) if name not in rows]
    across = [i for i, name in enumerate(section.ids) if name not in samples]
    part = select(section, across, down)
    if len(down) < len(section.rows):
        part = part.model_copy(update={"samples": {"ids": part.ids}})
    return part


def _replace_section(report: Report, section: Section) -> Report:
    sections = (section if s.measure == section.measure else s for s in report.sections)
    return report.model_copy(update={"sections": tuple(sections)})


def _name_left_out(rows: Collection[str], samples: Collection[str], section: Section) -> str:
    named: Sequence[str] = sorted(rows)
    more = ", ..." * (len(named) > NAMED)
    parts = [
        f"{len(samples)} of {len(section.ids)} samples" if samples else "",
        f"{', '.join(named[:NAMED])}{more}" if named else "",
    ]
    return f"{' and '.join(filter(None, parts))} of {section.measure}"
