"""What became of each sample: its figures before and after, and on which side it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lipaudit.errors import BaselineError
from lipaudit.gate.comparable import fault, same_protocol
from lipaudit.gate.comparison.records import Ends, Kind, Outcome, SampleChange
from lipaudit.gate.rules import BINARY
from lipaudit.gate.statistics import share_change
from lipaudit.results import Column, Report, Section, sample_columns
from lipaudit.results.columns import Cell
from lipaudit.results.figures import order
from lipaudit.results.trials import WORST, TrialKey, parse_column

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


def side_changes(old: Report, new: Report) -> list[Flips]:
    """Return who changed sides: in every ball that both reports ask about."""
    asked: dict[tuple[Kind, TrialKey | None], Flips] = {}
    for kind, column, measures in ASKED:
        for measure in measures:
            for before, after in _comparable(measure, old, new):
                there = _by_ball(column, after)
                for ball, name in _by_ball(column, before).items():
                    if ball in there and (kind, ball) not in asked:
                        sides = _states(kind, name, before), _states(kind, there[ball], after)
                        asked[kind, ball] = _flips(kind, ball, *sides)
    return [flips for flips in asked.values() if flips.outcome.samples]


def sample_changes(old: Report, new: Report, flips: list[Flips]) -> tuple[SampleChange, ...]:
    """Return every sample that both reports have, the worst change first."""
    figures: dict[str, dict[str, Ends]] = {sample: {} for f in flips for sample in f.states}
    for metric, values in _figures(old, new):
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
    return tuple(sorted(changes, key=_rank))


def _rank(change: SampleChange) -> tuple[int, float]:
    """Sort those first that lost most, of equal ones that with the larger norm."""
    norm = change.figures.get("jacobian.norm", (None, None))[1]
    return len(change.gained) - len(change.lost), -order(norm)


def _comparable(measure: str, old: Report, new: Report) -> Iterator[tuple[Section, Section]]:
    """Yield a section of both reports, nothing where it was not measured alike."""
    before, after = old.section(measure), new.section(measure)
    if before is None or after is None or fault(old, before) or fault(new, after):
        return
    try:
        same_protocol(new, old, after, before)
    except BaselineError:
        return
    yield before, after


def _by_ball(column: str, section: Section) -> dict[TrialKey | None, str]:
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


def _states(kind: Kind, column: str, section: Section) -> dict[str, tuple[bool, str]]:
    """Return whether each sample is on the good side, and what it is called where it stands."""
    flags = section.samples[column]
    right = section.samples.get("correct", (1,) * len(flags))
    verdicts = section.samples.get(
        column.replace("certified@", "verdict@", 1), (None,) * len(flags)
    )
    return {
        sample: (bool(flag), _state(kind, flag, ok, said if kind == "certified" else None))
        for sample, flag, ok, said in zip(section.ids, flags, right, verdicts, strict=True)
        if flag is not None
    }


def _state(kind: Kind, flag: Cell, right: Cell, said: Cell) -> str:
    if isinstance(said, str):
        return said
    return GOOD[kind] if flag else "wrong" if right == 0 else BAD[kind]


def _flips(
    kind: Kind,
    ball: TrialKey | None,
    old: dict[str, tuple[bool, str]],
    new: dict[str, tuple[bool, str]],
) -> Flips:
    both = [sample for sample in old if sample in new]
    lost = frozenset(i for i in both if old[i][0] > new[i][0])
    gained = frozenset(i for i in both if old[i][0] < new[i][0])
    chance = share_change(len(lost), len(gained), len(both)).mcnemar if both else None
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


def _figures(old: Report, new: Report) -> Iterator[tuple[str, dict[str, Ends]]]:
    """Yield the per-sample columns that have a better direction, by metric: both values by id."""
    for section in old.sections:
        columns = sample_columns(section.measure)
        named = [n for n in section.samples if _graded(n, columns)]
        for before, after in _comparable(section.measure, old, new) if named else ():
            for name in named:
                kept = [
                    dict(zip(s.ids, s.samples.get(name, ()), strict=False))
                    for s in (before, after)
                ]
                yield (
                    f"{section.measure}.{name}",
                    {
                        i: (_number(kept[0][i]), _number(kept[1][i]))
                        for i in kept[0]
                        if i in kept[1]
                    },
                )


def _graded(name: str, columns: Mapping[str, Column]) -> bool:
    """Tell whether a per-sample column holds figures of which less, or more, is better."""
    kind = parse_column(name)[0]
    return kind in columns and columns[kind].better is not None and kind not in BINARY


def _number(cell: object) -> float | None:
    return float(cell) if isinstance(cell, int | float) else None
