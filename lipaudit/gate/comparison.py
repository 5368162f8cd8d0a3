"""Compare reports sample by sample: figures, heads, and samples whose verdict changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

from lipaudit.errors import BaselineError, LipauditError, UsageError
from lipaudit.gate.comparable import (
    REPEAT,
    find_fault,
    find_obstacle,
    has_same_weights,
    list_differences,
)
from lipaudit.gate.judging import (
    TOLERANCE,
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
from lipaudit.gate.rules import no_change
from lipaudit.gate.statistics import ALPHA, compute_two_sided, correct_by_holm, judge_share
from lipaudit.gate.verdicts import Verdict
from lipaudit.tables import Report, Section, model_labels
from lipaudit.tables.columns import Float, Frozen
from lipaudit.tables.figures import order
from lipaudit.tables.trials import FLAGS, WORST, TrialKey, parse_column

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


class VerdictChange(Frozen):
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
    outcomes: tuple[VerdictChange, ...]
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
    verdicts = [verdict for pair in pairs for verdict in pair.verdicts]
    if all(verdict.reason for verdict in verdicts):
        measured = []
        for name, report in zip(names, reports, strict=True):
            sections = [s.measure + " (failed)" * bool(s.failure) for s in report.sections]
            measured.append(f"{name}: {', '.join(sections) or 'nothing'}")
        reason = f"no common section ({'; '.join(measured)})"
        whole = all(r.shard is None and r.status == "complete" for r in reports)
        raise BaselineError(
            f"the reports cannot be compared: {verdicts[0].reason if verdicts else reason}",
            REPEAT if whole else UNFINISHED,
        )
    return Comparison(models=tuple(names), pairs=pairs)


def _compare_two(reports: tuple[Report, Report], names: tuple[str, str], by_place: str) -> Pair:
    (old, new), unsettled = _leave_out_unsettled(reports)
    both = [(s, after) for s in old.sections if (after := new.section(s.measure)) is not None]
    differing = list_differences(new, old)
    warnings = [text for name, text in differing.items() if name in SPOILING]
    warnings += [by_place] if by_place else []
    notes = [
        f"not compared, because only {name} has it: {section.measure}"
        for report, other, name in ((old, new, names[0]), (new, old, names[1]))
        for section in report.sections
        if other.section(section.measure) is None
    ]
    for before, after in both:
        measure, shared = before.measure, set(before.ids) & set(after.ids)
        if shared and set(before.ids) != set(after.ids):
            warnings.append(
                f"compared over the {len(shared)} shared samples (of {len(set(before.ids))} and "
                f"{len(set(after.ids))}): {measure}"
            )
        for name, column in before.sample_columns.items():
            known = shared - find_missing(name, (before, after))
            if column.better and 0 < len(known) < len(shared):
                notes.append(
                    f"compared over the {len(known)} of {len(shared)} samples with a value in "
                    f"both reports: {measure}.{name}"
                )
    warnings += unsettled
    if has_same_weights(new, old):
        warnings.append("both reports are of the same weights")
    notes += (text for name, text in differing.items() if name not in SPOILING)
    # Heads are compared by the columns of `MAPPED`, else by all with a better direction.
    changes = (
        compute_head_changes(f"{section.measure}.{name}", old, new)
        for section in new.sections
        if {"layer", "head"} <= section.columns.keys()
        for name in MAPPED.get(
            section.measure, [name for name, column in section.columns.items() if column.better]
        )
    )
    comparable = {
        before.measure: (before, after)
        for before, after in both
        if not (find_fault(old, before) or find_fault(new, after))
        and not find_obstacle(new, old, after, before)
    }
    flips = _find_flips(comparable)
    return Pair(
        old=names[0],
        new=names[1],
        verdicts=tuple(
            v for sections in both for v in _judge_columns(sections, (old, new), names)
        ),
        heads=tuple(filter(None, changes)),
        outcomes=tuple(outcome for outcome, _ in flips),
        samples=_list_sample_changes(comparable, flips, old.found("place") | new.found("place")),
        warnings=tuple(warnings),
        notes=tuple(notes),
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
        figures: list[list[float]] = []
        for section in sections:
            if name in sampled:  # of all trials
                lines = [v for c, v in section.samples.items() if parse_column(c)[0] == name]
                cells = [cell for line in lines for cell in line]
            else:
                # Rows of balls and attacks repeat what their samples say.
                plain = not section.sample_columns
                cells = [row.get(name) for row in section.rows if plain or "layer" in row]
            figures.append([float(cell) for cell in cells if isinstance(cell, int | float)])
        stats = ["median"]
        if name in sampled:
            stats = ["mean"] if name in FLAGS else ["median", "p95"]
        for stat in stats if any(figures) else ():
            rule = no_change(f"{measure}.{name}:{stat}", column, chain(*figures), sections)
            if all(figures):
                yield from judge_change(rule, reports[1], reports[0])
            else:
                yield refuse(rule, f"{names[0 if figures[1] else 1]} has none")


NAMED = 6
"""Number of left-out rows that a note names."""


def _leave_out_unsettled(reports: tuple[Report, Report]) -> tuple[list[Report], list[str]]:
    """Remove from both reports the rows and samples that failed or did not converge in one.

    A gate refuses such a report; a comparison shows the rest.

    Returns:
        Both reports, and a note for each section that lost something.
    """
    left = [keep_sections(report, lambda section: section.failure is None) for report in reports]
    notes = []
    for section in left[0].sections:
        both = [each for r in left if (each := r.section(section.measure)) is not None]
        rows, samples = set[str](), set[str]()
        for each in both:
            pairs = zip(name_rows(each), each.rows, strict=True)
            rows |= {name for name, row in pairs if row.get("converged") is False}
            flags = zip(each.ids, each.samples.get("converged", ()), strict=False)
            samples |= {name for name, flag in flags if flag is False}
        parts = []
        for each in both if rows or samples else ():
            down = [i for i, name in enumerate(name_rows(each)) if name not in rows]
            across = [i for i, name in enumerate(each.ids) if name not in samples]
            part = select(each, across, down)
            if len(down) < len(each.rows):  # values of a sample are over all rows
                part = part.model_copy(update={"samples": {"ids": part.ids}})
            parts.append(part)
        # A section that would become empty stays, and is refused later.
        if len(parts) < 2 or not all(s.rows and (s.ids or "ids" not in s.samples) for s in parts):
            continue
        for i, part in enumerate(parts):
            kept = (part if s.measure == part.measure else s for s in left[i].sections)
            left[i] = left[i].model_copy(update={"sections": tuple(kept)})
        which = [f"{len(samples)} of {len(section.ids)} samples"] if samples else []
        which += [", ".join(sorted(rows)[:NAMED]) + ", ..." * (len(rows) > NAMED)] if rows else []
        text = f"{' and '.join(which)} of {section.measure}"
        notes.append(f"left out, because not converged in one report: {text}")
    return left, notes


# Heads


MAPPED = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm", "intermediate")}
"""Columns compared head by head. In other sections: all columns with a better direction."""


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
    heads = []
    for c in contrasts:
        p, p_adjusted = tested.get(c.name, (None, None))
        change, low, high = None, None, None
        if c.evidence is not None and p_adjusted is not None:
            change = express_change(rule, c.evidence.estimate)
            low, high = express_limits(rule, c.evidence)
        elif c.old is not None and (c.old or rule.limit.kind != "relative"):
            # Without values per sample, the change of the two figures.
            change = c.new / c.old - 1 if rule.limit.kind == "relative" else c.new - c.old
        heads.append(
            HeadChange(
                layer=cells[c.name]["layer"],
                head=cells[c.name]["head"],
                old=c.old,
                new=c.new,
                change=change,
                low=low,
                high=high,
                p=p,
                p_adjusted=p_adjusted,
                stands=p_adjusted is not None and p_adjusted <= ALPHA,
            )
        )
    samples = max((line.size for line in lines.values()), default=0)
    return HeadChanges(metric=metric, unit=rule.limit.unit, samples=samples, heads=tuple(heads))


# Samples that changed sides


ASKED: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("clean", "correct", ("attack", "jacobian", "certify")),
    ("attacked", "robust", ("attack", "certify")),
    ("certified", "certified", ("certify",)),
)
"""Each kind of verdict, its column, and the sections that have it; the first section counts."""
GOOD: dict[Kind, str] = {"clean": "right", "attacked": "robust", "certified": "certified"}
BAD: dict[Kind, str] = {"clean": "wrong", "attacked": "broken", "certified": "not certified"}


State = tuple[bool, str]
"""Whether the verdict on a sample is good, and its name."""
Flips = tuple[VerdictChange, dict[str, tuple[State, State]]]
"""One verdict, and its state for each sample in both reports."""


def _find_flips(comparable: Mapping[str, Sections]) -> list[Flips]:
    """Return the verdicts that changed, for every ball in both reports."""
    found: dict[tuple[Kind, TrialKey | None], Flips] = {}
    for kind, column, measures in ASKED:
        for sections in (comparable[name] for name in measures if name in comparable):
            columns, there = (_name_columns(column, section) for section in sections)
            for ball in columns:
                if ball not in there or (kind, ball) in found:
                    continue
                old = _read_states(kind, columns[ball], sections[0])
                new = _read_states(kind, there[ball], sections[1])
                states = {sample: (old[sample], new[sample]) for sample in old if sample in new}
                flags = [(before[0], after[0]) for before, after in states.values()]
                lost, gained = flags.count((True, False)), flags.count((False, True))
                chance = judge_share(lost, gained, len(flags)).mcnemar if flags else None
                outcome = VerdictChange(
                    kind=kind,
                    ball=ball.ball if ball else "",
                    samples=len(flags),
                    old=sum(before for before, _ in flags),
                    new=sum(after for _, after in flags),
                    lost=lost,
                    gained=gained,
                    mcnemar=1.0 if chance is None else chance,
                )
                found[kind, ball] = outcome, states
    return [(outcome, states) for outcome, states in found.values() if states]


def _list_sample_changes(
    comparable: Mapping[str, Sections], flips: Sequence[Flips], places: Mapping[str, str]
) -> tuple[SampleChange, ...]:
    """Return all shared samples, the worst change first."""
    figures: dict[str, dict[str, Ends]] = {i: {} for _, states in flips for i in states}
    for measure, (before, after) in comparable.items():
        for name in before.samples:
            column = before.sample_columns.get(parse_column(name)[0])
            if column is None or column.better is None or parse_column(name)[0] in FLAGS:
                continue
            old, new = (
                {
                    sample: float(cell) if isinstance(cell, int | float) else None
                    for sample, cell in zip(s.ids, s.samples.get(name, ()), strict=False)
                }
                for s in (before, after)
            )
            for sample in (sample for sample in old if sample in new):
                ends = old[sample], new[sample]
                figures.setdefault(sample, {})[f"{measure}.{name}"] = ends
    changes = []
    for sample, known in figures.items():
        states = {outcome.name: each[sample] for outcome, each in flips if sample in each}
        changes.append(
            SampleChange(
                id=sample,
                place=places.get(sample, ""),
                figures=known,
                states={name: (old[1], new[1]) for name, (old, new) in states.items()},
                lost=tuple(name for name, (old, new) in states.items() if old[0] > new[0]),
                gained=tuple(name for name, (old, new) in states.items() if old[0] < new[0]),
            )
        )

    def rank(change: SampleChange) -> tuple[int, float]:
        norm = change.figures.get("jacobian.norm", (None, None))[1]
        return len(change.gained) - len(change.lost), -order(norm)

    # Those that lost most first; of equal ones that with the larger norm.
    return tuple(sorted(changes, key=rank))


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


def _read_states(kind: Kind, column: str, section: Section) -> dict[str, State]:
    """Return whether each sample has a good verdict, and the name of its verdict."""
    flags = section.samples[column]
    right = section.samples.get("correct", (1,) * len(flags))
    # A certificate says more than yes and no: undecided, broken.
    name = column.replace("certified@", "verdict@", 1) if kind == "certified" else ""
    verdicts = section.samples.get(name, (None,) * len(flags))
    states = {}
    for sample, flag, ok, text in zip(section.ids, flags, right, verdicts, strict=True):
        plain = GOOD[kind] if flag else "wrong" if ok == 0 else BAD[kind]
        if flag is not None:
            states[sample] = bool(flag), text if isinstance(text, str) else plain
    return states
