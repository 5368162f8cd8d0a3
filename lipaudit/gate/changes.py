"""What changed from one report to another: head by head, and sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lipaudit.errors import BaselineError, LipauditError
from lipaudit.gate.comparable import find_fault, require_same_protocol
from lipaudit.gate.contrasts import TOLERANCE, Contrast, contrast_values, express_change
from lipaudit.gate.pairing import name_rows
from lipaudit.gate.rules import BINARY, Rule, no_change
from lipaudit.gate.statistics import (
    ALPHA,
    LEVEL,
    compute_two_sided,
    correct_by_holm,
    judge_mean,
    judge_share,
)
from lipaudit.tables import Column, Report, Section
from lipaudit.tables.columns import Cell, Float, Frozen
from lipaudit.tables.figures import order
from lipaudit.tables.trials import WORST, TrialKey, parse_column

Kind = Literal["clean", "attacked", "certified"]
Ends = tuple[Float | None, Float | None]
"""A figure in the first report, and in the other; None where there is none."""


class HeadChange(Frozen):
    """How one head changed in one column.

    Attributes:
        layer: of the head.
        head: within the layer.
        old: its figure in the first report.
        new: its figure in the other.
        change: the paired change over the samples, of the two figures where no samples are kept.
        low: lower 95 % limit of the paired change, for this head alone.
        high: upper one.
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
    """How every head changed in one column, in the order of the first report.

    Attributes:
        metric: e.g. `bounds.exact`.
        unit: of the changes, as of a `Verdict`: "%" (a share of the old figure), "pp" or "".
        samples: pairs behind each change; 0 where none are kept.
        heads: one entry each.
    """

    metric: str
    unit: str
    samples: int
    heads: tuple[HeadChange, ...]


class Outcome(Frozen):
    """How many samples changed sides in one question: right, robust or certified.

    Attributes:
        kind: of the question.
        ball: in which ball it is asked; empty without attack.
        samples: how many both reports have.
        old: how many of them are on the good side in the first report.
        new: how many in the other.
        lost: how many left the good side.
        gained: how many came to it.
        mcnemar: exact two-sided p-value of "as many leave as come".
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
        """What the states of samples name it: `clean`, `linf 0.1`, `certified linf 0.1`."""
        kind = "" if self.kind == "attacked" else self.kind
        return " ".join(filter(None, (kind, self.ball)))


class SampleChange(Frozen):
    """One sample in both reports.

    Attributes:
        id: its id.
        place: where it is found; empty where that is not known.
        figures: the per-sample columns that have a better direction, by metric
            (`jacobian.norm`).
        states: what became of it, by the name of the outcome: `("robust", "broken")`.
        lost: the outcomes in which it left the good side.
        gained: those in which it came to it.
    """

    id: str
    place: str
    figures: dict[str, Ends]
    states: dict[str, tuple[str, str]]
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()

    @property
    def flipped(self) -> bool:
        """Whether it changed sides in any outcome."""
        return bool(self.lost or self.gained)


MAPPED = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm", "intermediate")}
"""Columns that are followed head by head; of other sections all that have a better direction."""


def list_head_metrics(report: Report) -> Iterator[str]:
    """Return the columns of heads whose changes are followed."""
    for section in report.sections:
        columns = section.columns
        if {"layer", "head"} <= columns.keys():
            better = [name for name, column in columns.items() if column.better]
            names = MAPPED.get(section.measure, better)
            yield from (f"{section.measure}.{name}" for name in names)


def compute_head_changes(metric: str, old: Report, new: Report) -> HeadChanges | None:
    """Return the change of every head, nothing where the two models do not compare."""
    measure, _, name = metric.rpartition(".")
    before, after = old.section(measure), new.section(measure)
    if before is None or after is None:
        return None
    figures = (row.get(name) for section in (before, after) for row in section.rows)
    column = replace(after.columns[name], better="lower")
    rule = no_change(f"{metric}:each", column, (v for v in figures if v is not None), [after])
    try:
        changes = contrast_values(rule, new, old, least=0.0)
    except LipauditError:
        return None
    if not changes:
        return None
    lines = {c.name: c.changes for c in changes if c.changes is not None}
    chances = [compute_two_sided(judge_mean, line, TOLERANCE) for line in lines.values()]
    tested = dict(
        zip(lines, zip(chances, correct_by_holm(chances, ALPHA)[0], strict=True), strict=True)
    )
    cells = {n: dict(r) for n, r in zip(name_rows(after), after.rows, strict=True)}
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
            for c in changes
        ),
    )


def _describe(
    rule: Rule, contrast: Contrast, p: float | None, adjusted: float | None
) -> dict[str, object]:
    """Return the change of a head: over its samples, of its two figures where none are kept."""
    evidence, old, new = contrast.evidence, contrast.old, contrast.new
    if evidence is None or adjusted is None:
        relative = rule.limit.kind == "relative"
        if old is None or (relative and not old):
            return {"change": None}
        return {"change": new / old - 1 if relative else new - old}
    low, high = (express_change(rule, end) for end in evidence.limits(LEVEL))
    change = {"change": express_change(rule, evidence.estimate), "low": low, "high": high}
    return change | {"p": p, "p_adjusted": adjusted, "stands": adjusted <= ALPHA}


ASKED: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("clean", "correct", ("attack", "jacobian", "certify")),
    ("attacked", "robust", ("attack", "certify")),
    ("certified", "certified", ("certify",)),
)
"""Each kind of outcome, the column that answers it, and the sections that have it; of two that
ask the same, the first counts."""
GOOD: dict[Kind, str] = {"clean": "right", "attacked": "robust", "certified": "certified"}
BAD: dict[Kind, str] = {"clean": "wrong", "attacked": "broken", "certified": "not certified"}


@dataclass(frozen=True)
class Flips:
    """One outcome, and the sides on which each sample stands in both reports."""

    outcome: Outcome
    states: dict[str, tuple[str, str]]
    lost: frozenset[str]
    gained: frozenset[str]


def find_flips(old: Report, new: Report) -> list[Flips]:
    """Return who changed sides: in every ball that both reports ask about."""
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


def list_sample_changes(old: Report, new: Report, flips: list[Flips]) -> tuple[SampleChange, ...]:
    """Return every sample that both reports have, the worst change first."""
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
    return tuple(sorted(changes, key=_make_sort_key))


def _make_sort_key(change: SampleChange) -> tuple[int, float]:
    """Sort those first that lost most, of equal ones that with the larger norm."""
    norm = change.figures.get("jacobian.norm", (None, None))[1]
    return len(change.gained) - len(change.lost), -order(norm)


def _find_comparable(measure: str, old: Report, new: Report) -> Iterator[tuple[Section, Section]]:
    """Yield a section of both reports, nothing where it was not measured alike."""
    before, after = old.section(measure), new.section(measure)
    if before is None or after is None or find_fault(old, before) or find_fault(new, after):
        return
    try:
        require_same_protocol(new, old, after, before)
    except BaselineError:
        return
    yield before, after


def _name_columns(column: str, section: Section) -> dict[TrialKey | None, str]:
    """Name the column that answers for each ball: the worst case over the attacks, or the only."""
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
    """Return whether each sample is on the good side, and what it is called where it stands."""
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
                kept = [
                    dict(zip(s.ids, s.samples.get(name, ()), strict=False))
                    for s in (before, after)
                ]
                yield (
                    f"{section.measure}.{name}",
                    {
                        i: (_to_number(kept[0][i]), _to_number(kept[1][i]))
                        for i in kept[0]
                        if i in kept[1]
                    },
                )


def _has_direction(name: str, columns: Mapping[str, Column]) -> bool:
    """Tell whether a per-sample column holds figures of which less, or more, is better."""
    kind = parse_column(name)[0]
    return kind in columns and columns[kind].better is not None and kind not in BINARY


def _to_number(cell: object) -> float | None:
    return float(cell) if isinstance(cell, int | float) else None
