"""Compare reports sample by sample: figures, heads, and samples whose verdict changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from lipaudit.errors import BaselineError, LipauditError, UsageError
from lipaudit.gate.comparable import (
    REPEAT,
    find_fault,
    has_same_weights,
    list_differences,
    require_same_protocol,
)
from lipaudit.gate.judging import (
    TOLERANCE,
    Contrast,
    contrast_values,
    express_change,
    express_limits,
    judge_change,
    refuse,
)
from lipaudit.gate.pairing import (
    find_missing,
    keep_sections,
    match_samples,
    name_rows,
    select,
)
from lipaudit.gate.rules import Rule, no_change
from lipaudit.gate.statistics import ALPHA, compute_two_sided, correct_by_holm, judge_share
from lipaudit.gate.verdicts import Verdict
from lipaudit.tables import Column, Report, Section, model_labels
from lipaudit.tables.columns import Cell, Float, Frozen
from lipaudit.tables.figures import order
from lipaudit.tables.samples import FLAGS
from lipaudit.tables.trials import WORST, TrialKey, parse_column

Kind = Literal["clean", "attacked", "certified"]
Ends = tuple[Float | None, Float | None]
"""A figure in the first and in the second report; None if missing."""


class HeadChange(Frozen):
    """The change of one head in one column.

    Attributes:
        layer: layer of the head.
        head: number of the head in the layer.
        old: its figure in the first report.
        new: its figure in the other report.
        change: the paired change over the samples; without values per sample, the change of the
            two figures.
        low: lower 95 % limit of the paired change, for this head alone.
        high: upper 95 % limit.
        p: two-sided p-value of "it has not changed beyond the accuracy of norms" (Student's t).
        p_adjusted: the same after Holm's correction over the heads of this column.
        stands: whether the change is proven after that correction (at 5 %).
    """

    layer: int
    head: int
    old: Float | None
    new: Float | None
    change: Float | None
    low: Float | None = None
    high: Float | None = None
    p: Float | None = None
    p_adjusted: Float | None = None
    stands: bool = False


class HeadChanges(Frozen):
    """The changes of all heads in one column, in the order of the first report.

    Attributes:
        metric: e.g. `bounds.exact`.
        unit: unit of the changes, as in `Verdict`: "%" (a share of the old figure), "pp" or "".
        samples: pairs behind each change; 0 without values per sample.
        heads: one entry per head.
    """

    metric: str
    unit: str
    samples: int
    heads: tuple[HeadChange, ...]


class Outcome(Frozen):
    """The number of samples whose verdict changed: right, robust or certified.

    Attributes:
        kind: kind of verdict.
        ball: the ball; empty without attack.
        samples: number of shared samples.
        old: number with a good verdict in the first report.
        new: number with a good verdict in the other report.
        lost: number whose verdict became bad.
        gained: number whose verdict became good.
        mcnemar: exact two-sided p-value of "losing and gaining are equally likely".
    """

    kind: Kind
    ball: str
    samples: int
    old: int
    new: int
    lost: int
    gained: int
    mcnemar: Float

    @property
    def name(self) -> str:
        """Return the name of the verdict in the states of samples: `clean`, `linf 0.1`."""
        kind = "" if self.kind == "attacked" else self.kind
        return " ".join(filter(None, (kind, self.ball)))


class SampleChange(Frozen):
    """One sample in both reports.

    Attributes:
        id: its id.
        place: its place in the data; empty if unknown.
        figures: the per-sample columns that have a better direction, by metric
            (`jacobian.norm`).
        states: verdicts in both reports, by the name of the outcome: `("robust", "broken")`.
        lost: the outcomes that became bad.
        gained: the outcomes that became good.
    """

    id: str
    place: str
    figures: dict[str, Ends]
    states: dict[str, tuple[str, str]]
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()

    @property
    def flipped(self) -> bool:
        """Return whether any verdict changed."""
        return bool(self.lost or self.gained)


class Pair(Frozen):
    """The comparison of one model with the first.

    Attributes:
        old: name of the first model.
        new: name of the other.
        verdicts: one per metric: improved, regressed, unchanged, not comparable, or inconclusive
            (its 95 % interval contains 0). A column of rows is judged by its median over the rows,
            sample by sample; without values per sample it is compared without an interval.
        heads: changes of heads, a record per column.
        outcomes: numbers of samples whose verdict changed.
        samples: the shared samples, those with the most losses first, the most gains last.
        warnings: differences that invalidate the comparison: other data, samples or settings.
        notes: other differences.
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
    """The result of `lipaudit compare`.

    Attributes:
        models: names of the models in the order given.
        pairs: every further model, compared with the first.
    """

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


SPOILING = frozenset({"dtype", "preprocess", "starts"})
"""Conditions that must be equal for a comparison (the samples are checked separately)."""
UNFINISHED = "Finish the run (same command with --resume), or merge its shards."


def compare(reports: Sequence[Report]) -> Comparison:
    """Compare every report with the first one on their shared samples.

    Intervals hold for each metric alone: a comparison explores, the gate decides.

    Raises:
        UsageError: there are fewer than two reports.
        BaselineError: the reports have nothing in common.
    """
    if len(reports) < 2:
        raise UsageError("compare needs at least two reports", "lipaudit compare A.json B.json")
    names = model_labels(reports)
    matched, notes = match_samples(reports, names)
    pairs = tuple(
        _compare_two((matched[0], report), (names[0], name), notes.get(name, ""))
        for report, name in zip(matched[1:], names[1:], strict=True)
    )
    judged = [v for pair in pairs for v in pair.verdicts if not v.reason]
    if not judged:
        reasons = [v.reason for pair in pairs for v in pair.verdicts] or [
            _explain_nothing(reports, names)
        ]
        whole = all(r.shard is None and r.status == "complete" for r in reports)
        advice = REPEAT if whole else UNFINISHED
        raise BaselineError(f"the reports cannot be compared: {reasons[0]}", advice)
    return Comparison(models=tuple(names), pairs=pairs)


def _explain_nothing(reports: Sequence[Report], names: Sequence[str]) -> str:
    measured = []
    for name, report in zip(names, reports, strict=True):
        sections = [s.measure + " (failed)" * bool(s.failure) for s in report.sections]
        measured.append(f"{name}: {', '.join(sections) or 'nothing'}")
    return f"no common section ({'; '.join(measured)})"


def _compare_two(reports: tuple[Report, Report], names: tuple[str, str], by_place: str) -> Pair:
    reports, unsettled = _leave_out_unsettled(reports)
    old, new = reports
    both = [(s, after) for s in old.sections if (after := new.section(s.measure)) is not None]
    differing = list_differences(new, old)
    flips = _find_flips(old, new)
    return Pair(
        old=names[0],
        new=names[1],
        verdicts=tuple(v for sections in both for v in _judge_columns(sections, reports, names)),
        heads=tuple(
            heads
            for metric in _list_head_metrics(new)
            if (heads := compute_head_changes(metric, old, new))
        ),
        outcomes=tuple(flip.outcome for flip in flips),
        samples=_list_sample_changes(old, new, flips),
        warnings=(
            *(text for name, text in differing.items() if name in SPOILING),
            *([by_place] if by_place else []),
            *_list_partial(both),
            *unsettled,
            *(["both reports are of the same weights"] if has_same_weights(new, old) else []),
        ),
        notes=(
            *_list_unshared(old, new, names),
            *(text for sections in both for text in _list_incomplete(sections)),
            *(text for name, text in differing.items() if name not in SPOILING),
        ),
    )


def _list_unshared(old: Report, new: Report, names: tuple[str, str]) -> Iterator[str]:
    """Note which sections only one of two reports has."""
    for report, other, name in ((old, new, names[0]), (new, old, names[1])):
        for section in report.sections:
            if other.section(section.measure) is None:
                yield f"not compared, because only {name} has it: {section.measure}"


def _list_partial(both: Sequence[tuple[Section, Section]]) -> Iterator[str]:
    """Note which sections are compared on a part of their samples."""
    for sections in both:
        old, new = (set(section.ids) for section in sections)
        if old != new and old & new:
            yield (
                f"compared over the {len(old & new)} shared samples (of {len(old)} and "
                f"{len(new)}): {sections[0].measure}"
            )


# Figures


Sections = tuple[Section, Section]
ABSENT = ("has none", "has one in both")
"""Ending of a verdict's reason if there is nothing to compare."""


def _judge_columns(
    sections: Sections, reports: tuple[Report, Report], names: tuple[str, str]
) -> Iterator[Verdict]:
    """Judge every column with a better direction of a section that both reports have."""
    measure, sampled = sections[0].measure, sections[0].sample_columns
    columns = {**sampled, **sections[0].columns, **sections[1].columns, **sampled}
    for name, column in columns.items():
        if not column.better and not (name in sampled and name == "correct"):
            continue
        if name in sampled:
            stats = ["mean"] if name in FLAGS else ["median", "p95"]
            figures = [_read_samples(section, name) for section in sections]
        else:
            stats, figures = ["median"], [_read_rows(section, name) for section in sections]
        for stat in stats if any(figures) else ():
            rule = no_change(f"{measure}.{name}:{stat}", column, chain(*figures), sections)
            if all(figures):
                yield from judge_change(rule, reports[1], reports[0])
            else:
                yield refuse(rule, f"{names[0 if figures[1] else 1]} has none")


def _list_incomplete(sections: Sections) -> Iterator[str]:
    """Note which columns lack a figure of a shared sample in one report."""
    measure = sections[0].measure
    both = set(sections[0].ids) & set(sections[1].ids)
    for name, column in sections[0].sample_columns.items():
        known = both - find_missing(name, sections)
        if column.better and 0 < len(known) < len(both):
            yield (
                f"compared over the {len(known)} of {len(both)} samples with a value in both "
                f"reports: {measure}.{name}"
            )


def _read_rows(section: Section, name: str) -> list[float]:
    """Return the figures of a column that is compared by rows.

    This applies to rows of layers, and to sections without values per sample.
    """
    sampled = bool(section.sample_columns)
    shown = [row.get(name) for row in section.rows if "layer" in row or not sampled]
    return [float(value) for value in shown if value is not None]


def _read_samples(section: Section, name: str) -> list[float]:
    """Return the figures of a per-sample column, of all of its trials."""
    columns = (cells for c, cells in section.samples.items() if parse_column(c)[0] == name)
    return [float(cell) for cells in columns for cell in cells if isinstance(cell, int | float)]


NAMED = 6
"""Number of left-out rows that a note names."""


def _leave_out_unsettled(
    reports: tuple[Report, Report],
) -> tuple[tuple[Report, Report], list[str]]:
    """Remove from both reports the rows and samples that failed or did not converge in one.

    A gate refuses such a report; a comparison shows the rest. A section that would become empty
    stays, and is refused later.

    Returns:
        Both reports, and a note for each section that lost something.
    """
    old, new = (keep_sections(r, lambda section: section.failure is None) for r in reports)
    said = []
    for section in old.sections:
        both = [each for r in (old, new) if (each := r.section(section.measure)) is not None]
        rows, samples = set[str](), set[str]()
        for each in both:
            pairs = zip(name_rows(each), each.rows, strict=True)
            rows |= {name for name, row in pairs if row.get("converged") is False}
            flags = zip(each.ids, each.samples.get("converged", ()), strict=False)
            samples |= {name for name, flag in flags if flag is False}
        kept = [_leave_out(each, rows, samples) for each in both]
        some = all(s.rows and (s.ids or "ids" not in s.samples) for s in kept)
        if len(both) == 2 and (rows or samples) and some:
            old, new = (_replace_section(r, s) for r, s in zip((old, new), kept, strict=True))
            which = _name_left_out(rows, samples, section)
            said.append(f"left out, because not converged in one report: {which}")
    return (old, new), said


def _leave_out(section: Section, rows: Collection[str], samples: Collection[str]) -> Section:
    """Return a section without some rows and samples.

    Removing a row also removes the values of each sample over all rows.
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


# Heads


MAPPED = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm", "intermediate")}
"""Columns compared head by head. In other sections: all columns with a better direction."""


def _list_head_metrics(report: Report) -> Iterator[str]:
    """Return the columns of heads to compare head by head."""
    for section in report.sections:
        columns = section.columns
        if {"layer", "head"} <= columns.keys():
            better = [name for name, column in columns.items() if column.better]
            names = MAPPED.get(section.measure, better)
            yield from (f"{section.measure}.{name}" for name in names)


def compute_head_changes(metric: str, old: Report, new: Report) -> HeadChanges | None:
    """Return the change of every head; None if the two models cannot be compared."""
    measure, _, name = metric.rpartition(".")
    before, after = old.section(measure), new.section(measure)
    if before is None or after is None:
        return None
    figures = (row.get(name) for section in (before, after) for row in section.rows)
    column = replace(after.columns[name], better="lower")
    rule = no_change(f"{metric}:each", column, (v for v in figures if v is not None), [after])
    try:
        contrasts = contrast_values(rule, new, old, least=0.0)
    except LipauditError:
        return None
    lines = {c.name: c.changes for c in contrasts if c.changes is not None}
    p_values = [compute_two_sided(line, TOLERANCE) for line in lines.values()]
    adjusted = correct_by_holm(p_values, ALPHA)[0]
    tested = dict(zip(lines, zip(p_values, adjusted, strict=True), strict=True))
    cells = dict(zip(name_rows(after), after.rows, strict=True))
    return HeadChanges(
        metric=metric,
        unit=rule.limit.unit,
        samples=max((line.size for line in lines.values()), default=0),
        heads=tuple(
            HeadChange(
                layer=cells[c.name]["layer"],
                head=cells[c.name]["head"],
                old=c.old,
                new=c.new,
                **_describe(rule, c, *tested.get(c.name, (None, None))),
            )
            for c in contrasts
        ),
    )


def _describe(
    rule: Rule, contrast: Contrast, p: float | None, adjusted: float | None
) -> dict[str, object]:
    """Return the change of a head: over its samples, or of its two figures."""
    evidence, old, new = contrast.evidence, contrast.old, contrast.new
    if evidence is None or adjusted is None:
        relative = rule.limit.kind == "relative"
        if old is None or (relative and not old):
            return {"change": None}
        return {"change": new / old - 1 if relative else new - old}
    low, high = express_limits(rule, evidence)
    change = {"change": express_change(rule, evidence.estimate), "low": low, "high": high}
    return change | {"p": p, "p_adjusted": adjusted, "stands": adjusted <= ALPHA}


# Samples that changed sides


ASKED: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("clean", "correct", ("attack", "jacobian", "certify")),
    ("attacked", "robust", ("attack", "certify")),
    ("certified", "certified", ("certify",)),
)
"""Each kind of verdict, its column, and the sections that have it; the first section counts."""
GOOD: dict[Kind, str] = {"clean": "right", "attacked": "robust", "certified": "certified"}
BAD: dict[Kind, str] = {"clean": "wrong", "attacked": "broken", "certified": "not certified"}


@dataclass(frozen=True)
class Flips:
    """One verdict, and its value for each sample in both reports."""

    outcome: Outcome
    states: dict[str, tuple[str, str]]
    lost: frozenset[str]
    gained: frozenset[str]


def _find_flips(old: Report, new: Report) -> list[Flips]:
    """Return the verdicts that changed, for every ball in both reports."""
    asked: dict[tuple[Kind, TrialKey | None], Flips] = {}
    for kind, column, measures in ASKED:
        for measure in measures:
            for before, after in _find_comparable(measure, old, new):
                there = _name_columns(column, after)
                for ball, name in _name_columns(column, before).items():
                    if ball in there and (kind, ball) not in asked:
                        sides = (
                            _read_states(kind, name, before),
                            _read_states(kind, there[ball], after),
                        )
                        asked[kind, ball] = _count_flips(kind, ball, *sides)
    return [flips for flips in asked.values() if flips.outcome.samples]


def _list_sample_changes(old: Report, new: Report, flips: list[Flips]) -> tuple[SampleChange, ...]:
    """Return all shared samples, the worst change first."""
    figures: dict[str, dict[str, Ends]] = {sample: {} for f in flips for sample in f.states}
    for metric, values in _read_figures(old, new):
        for sample, ends in values.items():
            figures.setdefault(sample, {})[metric] = ends
    places = old.found("place") | new.found("place")
    changes = (
        SampleChange(
            id=sample,
            place=places.get(sample, ""),
            figures=known,
            states={f.outcome.name: f.states[sample] for f in flips if sample in f.states},
            lost=tuple(f.outcome.name for f in flips if sample in f.lost),
            gained=tuple(f.outcome.name for f in flips if sample in f.gained),
        )
        for sample, known in figures.items()
    )

    def rank(change: SampleChange) -> tuple[int, float]:
        norm = change.figures.get("jacobian.norm", (None, None))[1]
        return len(change.gained) - len(change.lost), -order(norm)

    # Those that lost most first; of equal ones that with the larger norm.
    return tuple(sorted(changes, key=rank))


def _find_comparable(measure: str, old: Report, new: Report) -> Iterator[tuple[Section, Section]]:
    """Yield a section of both reports, if both measured it with equal settings."""
    before, after = old.section(measure), new.section(measure)
    if before is None or after is None or find_fault(old, before) or find_fault(new, after):
        return
    try:
        require_same_protocol(new, old, after, before)
    except BaselineError:
        return
    yield before, after


def _name_columns(column: str, section: Section) -> dict[TrialKey | None, str]:
    """Name the column with the verdict for each ball: the worst case over attacks, or the only."""
    trials: dict[TrialKey | None, dict[str, str]] = {}
    for name in section.samples:
        kind, trial = parse_column(name)
        if kind == column:
            ball = trial and replace(trial, attack="")
            trials.setdefault(ball, {})[trial.attack if trial else ""] = name
    return {
        ball: names[WORST] if WORST in names else next(iter(names.values()))
        for ball, names in trials.items()
        if WORST in names or len(names) == 1
    }


def _read_states(kind: Kind, column: str, section: Section) -> dict[str, tuple[bool, str]]:
    """Return whether each sample has a good verdict, and the name of its verdict."""
    flags = section.samples[column]
    right = section.samples.get("correct", (1,) * len(flags))
    verdicts = section.samples.get(
        column.replace("certified@", "verdict@", 1), (None,) * len(flags)
    )
    return {
        sample: (bool(flag), _name_state(kind, flag, ok, said if kind == "certified" else None))
        for sample, flag, ok, said in zip(section.ids, flags, right, verdicts, strict=True)
        if flag is not None
    }


def _name_state(kind: Kind, flag: Cell, right: Cell, said: Cell) -> str:
    if isinstance(said, str):
        return said
    return GOOD[kind] if flag else "wrong" if right == 0 else BAD[kind]


def _count_flips(
    kind: Kind,
    ball: TrialKey | None,
    old: dict[str, tuple[bool, str]],
    new: dict[str, tuple[bool, str]],
) -> Flips:
    both = [sample for sample in old if sample in new]
    lost = frozenset(i for i in both if old[i][0] > new[i][0])
    gained = frozenset(i for i in both if old[i][0] < new[i][0])
    chance = judge_share(len(lost), len(gained), len(both)).mcnemar if both else None
    outcome = Outcome(
        kind=kind,
        ball=ball.ball if ball else "",
        samples=len(both),
        old=sum(old[i][0] for i in both),
        new=sum(new[i][0] for i in both),
        lost=len(lost),
        gained=len(gained),
        mcnemar=1.0 if chance is None else chance,
    )
    return Flips(outcome, {i: (old[i][1], new[i][1]) for i in both}, lost, gained)


def _read_figures(old: Report, new: Report) -> Iterator[tuple[str, dict[str, Ends]]]:
    """Yield the per-sample columns that have a better direction, by metric: both values by id."""
    for section in old.sections:
        columns = section.sample_columns
        named = [n for n in section.samples if _has_direction(n, columns)]
        for before, after in _find_comparable(section.measure, old, new) if named else ():
            for name in named:
                old_cells, new_cells = (
                    dict(zip(s.ids, s.samples.get(name, ()), strict=False))
                    for s in (before, after)
                )
                shared = (i for i in old_cells if i in new_cells)
                both = {i: (_to_number(old_cells[i]), _to_number(new_cells[i])) for i in shared}
                yield f"{section.measure}.{name}", both


def _has_direction(name: str, columns: Mapping[str, Column]) -> bool:
    """Say whether a per-sample column has a better direction."""
    kind = parse_column(name)[0]
    return kind in columns and columns[kind].better is not None and kind not in FLAGS


def _to_number(cell: object) -> float | None:
    return float(cell) if isinstance(cell, int | float) else None
