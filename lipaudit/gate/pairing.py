"""The values that two sections hold for a rule, on the samples that both have.

Samples of two reports are matched by their ids or their places, rows and columns by their names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError, EvaluationError, UsageError, suggestion
from lipaudit.gate.comparable import REPEAT
from lipaudit.gate.rules import Rule
from lipaudit.gate.statistics import STATISTICS, Values
from lipaudit.tables import Array, Report, Row, Section
from lipaudit.tables.columns import naming
from lipaudit.tables.trials import (
    WORST,
    TrialKey,
    is_repeat,
    parse_column,
    parse_radius,
    worst_cases,
)

TESTED = ("each", "median")
"""Row statistics with a test over samples; other statistics are compared as plain values."""
_NAMES = ("layer", "head", "from", "to", "mode", "n", "r", "module")


@dataclass(frozen=True)
class RuleValues:
    """The values that one report holds for one rule.

    Attributes:
        names: names of the rows or columns.
        points: the value to judge, by row or column; one value, named "", for a statistic over
            rows.
        pairs: the values per sample behind each point, (samples,), if stored; for the median over
            rows, those behind each row.
        ids: the samples, in the order of `pairs`.
    """

    names: tuple[str, ...]
    points: Mapping[str, float]
    pairs: Mapping[str, Values]
    ids: tuple[str, ...]


def read(rule: Rule, section: Section) -> RuleValues:
    """Read the values of a rule; rows that are null (not measured) are left out.

    Raises:
        UsageError: the rule matches nothing.
    """
    rows = dict(zip(name_rows(section), section.rows, strict=True))
    if rule.per_sample:
        pairs = _read_columns(rule, section)
        statistic = STATISTICS[rule.stat]
        points = {name: float(statistic(v)) if v.size else np.nan for name, v in pairs.items()}
    else:
        kept = [n for n in rows if all(_matches(rows[n], w, section) for w in rule.selector)]
        kept = _choose_worst({name: rows[name].key for name in kept}, rule.selector)
        cells = {name: rows[name].get(rule.column) for name in kept}
        points = {name: float(cell) for name, cell in cells.items() if cell is not None}
        # The values per sample behind rows: an array with the column's name, rows x samples.
        stored, shape = section.arrays.get(rule.column), (len(rows), len(section.ids))
        pairs = {}
        if rule.stat in TESTED and stored is not None and stored.shape == shape:
            pairs = dict(zip(rows, stored.numpy(), strict=True))
        pairs = {name: line for name, line in pairs.items() if name in points}
        if is_mean(rule):
            # If a sample has no such token, the mean over tokens is compared without a test.
            pairs = {name: line for name, line in pairs.items() if np.isfinite(line).all()}
    if not points:
        some = "; ".join([*rows][:8]) + ("; ..." if len(rows) > 8 else "")
        columns = [name for name in section.samples if parse_column(name)[0] == rule.column]
        advice = f"Rows: {some}." if rows else ""
        if columns:
            advice = f"Columns: {', '.join(columns)}."
        if left := [note.text for note in section.notes if note.code == "left-out"]:
            advice = f"Left out: {'; '.join(left)}. {advice}".strip()
        raise UsageError(f"{rule.text!r} matches nothing in section {section.measure}", advice)
    names = tuple(points)
    if not rule.per_sample and rule.stat != "each":
        points = {"": float(STATISTICS[rule.stat](list(points.values())))}
    return RuleValues(names, points, pairs, section.ids)


def spell_radii_as(values: RuleValues, other: RuleValues) -> RuleValues:
    """Rename values so that equal radii are written as in another report: 1/20 as 0.05."""
    known = {TrialKey.parse(name): name for name in other.names}

    def spell(name: str) -> str:
        trial = TrialKey.parse(name)
        return known.get(trial, name) if trial else name

    return RuleValues(
        tuple(map(spell, values.names)),
        {spell(name): point for name, point in values.points.items()},
        {spell(name): line for name, line in values.pairs.items()},
        values.ids,
    )


def is_mean(rule: Rule) -> bool:
    """Say whether the rows of a rule are means over the tokens of all samples."""
    return rule.reduction is not None and rule.reduction.stat == "mean"


def name_rows(section: Section) -> list[str]:
    """Name rows by their keys: `layer 3 head 1`, `apgd-ce,linf,2/255`."""
    names, counts = [], Counter[str]()
    for row in section.rows:
        known = {key: row[key] for key in _NAMES if row.get(key) not in (None, "")}
        if row.key:
            name = str(row.key)
        elif "layer" in row:
            shown = [key for key in ("layer", "head", "mode", "n", "r") if key in known]
            name = " ".join(f"{key} {known[key]}" for key in shown)
        elif known:
            name = ",".join(map(str, known.values()))
        else:
            cells = [(key, row[key]) for key in naming(section.columns) if row[key] is not None]
            texts = (cell if isinstance(cell, str) else f"{key} {cell}" for key, cell in cells)
            name = " ".join(filter(None, texts))
        counts[name] += 1
        names.append(f"{name} #{counts[name]}" if counts[name] > 1 else name)
    return names


def _read_columns(rule: Rule, section: Section) -> dict[str, Values]:
    """Read the per-sample columns `column` and `column@A,B,...` that the selector matches."""
    values: dict[TrialKey | None, Values] = {}
    for name, cells in section.samples.items():
        kind, trial = parse_column(name)
        if kind == rule.column:
            if any(isinstance(cell, str) for cell in cells):
                raise EvaluationError("a column of numbers holds text", "Create the report again.")
            values[trial] = np.array([np.nan if v is None else float(v) for v in cells])
    if rule.column == "robust":
        # The worst case of every ball, if the report does not hold it.
        balls = worst_cases(trial for trial in values if trial and trial.attack)
        worst: dict[TrialKey | None, Values] = {
            ball: np.min([values[trial] for trial in inside], axis=0)
            for ball, inside in balls.items()
        }
        values = worst | values
    trials = {
        str(trial or ""): trial
        for trial in values
        if all(trial and trial.matches(word) for word in rule.selector)
    }
    return {name: values[trials[name]] for name in _choose_worst(trials, rule.selector)}


def _choose_worst(trials: Mapping[str, TrialKey | None], selector: tuple[str, ...]) -> list[str]:
    """Keep the worst case over the attacks, unless the selector names an attack."""
    attacks = {name: trial.attack if trial else "" for name, trial in trials.items()}
    if {word.removeprefix("attack=") for word in selector} & set(attacks.values()):
        return list(trials)
    return [name for name in trials if attacks[name] == WORST] or list(trials)


def _matches(row: Row, word: str, section: Section) -> bool:
    """Say whether a word of a selector matches a row.

    Raises:
        UsageError: the word names a column that the rows do not have.
    """
    key, equals, value = word.partition("=")
    if (trial := row.key) and trial.matches(word):
        return True
    if not equals:
        return any(isinstance(cell, str) and cell == word for cell in row.values())
    if key not in row:
        message = f"rows of {section.measure} have no column {key!r}"
        raise UsageError(message, suggestion(key, row))
    cell = row[key]
    return float(parse_radius(value)) == cell if isinstance(cell, float) else value == str(cell)


ALL_BUT_FEW = 0.95
"""Share of the baseline's samples that the gate needs, so that hard samples cannot be left out."""


def match_samples(
    reports: Sequence[Report], names: Sequence[str]
) -> tuple[list[Report], dict[str, str]]:
    """Rename the samples of every report as in the first one, if they are the same inputs.

    An id belongs to a preprocessed sample: another image size, tokenizer or order of classes gives
    the same input another id. Inputs are the same if they have the same place in the same data;
    texts must also begin alike.

    Args:
        reports: the reports, to be matched with the first.
        names: names of the reports.

    Returns:
        The reports, and a note, by name, for each report that was matched by places.
    """
    first, notes = reports[0], dict[str, str]()
    matched = [first]
    for name, report in zip(names[1:], reports[1:], strict=True):
        ids = _map_ids(report, first)
        if ids:
            notes[name] = (
                f"{name} reads the samples in another form than {names[0]}, so samples are "
                f"paired by their place in {report.run.data.spec}"
            )
            sections = tuple(
                section.model_copy(update={"samples": _rename_ids(section.samples, ids)})
                for section in report.sections
            )
            samples = _rename_ids(report.samples, ids)
            report = report.model_copy(update={"sections": sections, "samples": samples})
        matched.append(report)
    return matched, notes


def _map_ids(report: Report, first: Report) -> dict[str, str]:
    """Map the ids of another report to those of the first; empty if ids are equal."""
    places, old_places = report.found("place"), first.found("place")
    known = {place: name for name, place in old_places.items()}
    shared = places.keys() & old_places.keys()
    if shared or len(known) < len(old_places):
        return {}
    # Other ids of the same data: the inputs were prepared in another way, or the data changed.
    new, old = report.run, first.run
    if (new.data.spec, new.data.commit) != (old.data.spec, old.data.commit):
        return {}
    # A command lists its models, so two reports with equal commands come from one audit.
    one, two = (run.command.replace(" --resume", "") for run in (new, old))
    if new.preprocess == old.preprocess and not report.found("text") and one != two:
        return {}
    ids = {name: known[place] for name, place in places.items() if place in known}
    if len(ids) < min(len(places), len(old_places)):
        return {}
    texts, old_texts = report.found("text"), first.found("text")
    return ids if all(texts.get(n) == old_texts.get(old) for n, old in ids.items()) else {}


def _rename_ids(columns: dict[str, tuple[Any, ...]], names: Mapping[str, str]) -> dict[str, Any]:
    ids = tuple(names.get(str(name), name) for name in columns.get("ids", ()))
    return columns | ({"ids": ids} if ids else {})


def align_sections(
    rule: Rule, new: Section, old: Section, least: float = ALL_BUT_FEW
) -> tuple[Section, Section]:
    """Return both sections on their shared samples, in the old section's order.

    If both have the same samples, rows do not change. Otherwise the cells that the rule reads are
    computed again from the stored values per sample.

    Args:
        rule: the rule, which names the column.
        new: a section.
        old: the section to compare it with.
        least: smallest share of the old samples that both sections need.

    Raises:
        BaselineError: too few samples are shared, or the reports lack the values per sample.
    """
    after, before = new.ids, old.ids
    if not after or not before:
        return new, old  # equal in one suite; else `find_obstacle` has refused them
    places = find_shared(rule.measure, after, before, least)
    arrays = {rule.column} | (rule.reduction.arrays if rule.reduction else set())
    new, old = (
        select(section, take, arrays=arrays)
        for section, take in zip((new, old), places, strict=True)
    )
    if rule.per_sample or sorted(after) == sorted(before):
        return new, old
    return _recompute_rows(rule, new), _recompute_rows(rule, old)


def find_missing(column: str, sections: Iterable[Section]) -> set[str]:
    """Return the samples without a figure in some trial of a column."""
    return {
        sample
        for section in sections
        for name, cells in section.samples.items()
        if parse_column(name)[0] == column
        for sample, cell in zip(section.ids, cells, strict=True)
        if not isinstance(cell, int | float)
    }


def keep_known(rule: Rule, new: Section, old: Section) -> tuple[Section, Section]:
    """Return both sections without the samples that lack a figure in one of them.

    Raises:
        BaselineError: no sample is left.
    """
    missing = find_missing(rule.column, (new, old)) if rule.per_sample else set[str]()
    both = set(new.ids) & set(old.ids)
    if not missing:
        return new, old
    if both and both <= missing:
        raise BaselineError("no sample has one in both", REPEAT)
    places = ([i for i, name in enumerate(s.ids) if name not in missing] for s in (new, old))
    after, before = (
        select(section, kept, arrays=()) for section, kept in zip((new, old), places, strict=True)
    )
    return after, before


def find_shared(
    measure: str, new: Sequence[str], old: Sequence[str], least: float
) -> tuple[list[int], list[int]]:
    """Return the indices of the distinct shared samples in both reports.

    Raises:
        BaselineError: fewer than the smallest share are in both, or none.
    """
    place = {name: i for i, name in enumerate(new)}
    distinct = [(i, name) for i, name in enumerate(old) if not is_repeat(name)]
    pairs = [(place[name], i) for i, name in distinct if name in place]
    if not pairs or len(pairs) < least * len(distinct):
        needed = f" ({100 * least:g} % are needed)" if least else ""
        raise BaselineError(
            f"{measure}: only {len(pairs)} of the baseline's {len(distinct)} samples are in the "
            f"current report{needed}",
            REPEAT,
        )
    return [i for i, _ in pairs], [i for _, i in pairs]


def keep_sections(report: Report, wanted: Callable[[Section], bool]) -> Report:
    """Return a report with some of its sections; failures of the others do not count."""
    status = "complete" if report.failures and not report.unmeasured else report.status
    kept = tuple(section for section in report.sections if wanted(section))
    return report.model_copy(update={"sections": kept, "status": status})


def select(
    section: Section,
    across: Sequence[int],
    down: Sequence[int] | None = None,
    *,
    arrays: Collection[str] | None = None,
) -> Section:
    """Return a section with a selection of its samples and rows, in this order.

    Args:
        section: the section.
        across: indices of the samples.
        down: indices of the rows; None: all.
        arrays: names of the arrays over rows and samples to keep; None: all.
    """
    shape = (len(section.rows), len(section.ids))
    rows = range(shape[0]) if down is None else down
    kept = section.arrays.keys() if arrays is None else arrays
    return section.model_copy(
        update={
            "rows": tuple(section.rows[i] for i in rows),
            "samples": {
                name: tuple(cells[i] for i in across) for name, cells in section.samples.items()
            },
            "arrays": {
                name: Array.of(array.numpy()[np.ix_(rows, across)])
                for name, array in section.arrays.items()
                if name in kept and array.shape == shape
            },
        }
    )


def _recompute_rows(rule: Rule, section: Section) -> Section:
    """Return a section with the column of a rule computed from its samples."""
    how = rule.reduction
    if how is None and rule.stat == "each" and rule.column in section.arrays:
        return section  # the test uses the samples themselves
    names = (how.values, how.per, how.weights) if how else ("", "", "")
    values, per, weights = (_read_samples(name, section) for name in names)
    if how is None or values is None or not len(values) or (how.per and per is None):
        raise BaselineError(
            f"{rule.measure}.{rule.column} is stored only over all samples of a report, and "
            "the two reports have different samples",
            REPEAT,
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        if per is not None:
            values = np.where(per > 0, values / per, np.nan)
        if weights is not None:
            cells: Any = np.where(weights > 0, values * weights, 0.0).sum(1) / weights.sum(1)
        else:
            lines = (line[~np.isnan(line)] for line in values)
            cells = [STATISTICS[how.stat](line) if line.size else np.nan for line in lines]
    rows = []
    for row, cell in zip(section.rows, map(float, cells), strict=True):
        known = row[rule.column] is not None
        if known and math.isnan(cell):
            metric = f"{rule.measure}.{rule.column}"
            raise BaselineError(f"{metric}: no shared sample has a value", REPEAT)
        rows.append(row.replace(**{rule.column: cell}) if known else row)
    return section.model_copy(update={"rows": tuple(rows)})


def _read_samples(name: str, section: Section) -> Values | None:
    """Return the stored values of each sample for each row, (rows, samples).

    The source is an array, or the per-sample columns of the rows' attacks or balls, or the column
    of the only row.
    """
    if name in section.arrays:
        return section.arrays[name].numpy()
    keys = [row.key for row in section.rows]
    columns = [section.samples.get(key.column(name)) if key else None for key in keys]
    if len(keys) == 1 or all(keys):
        columns = [column or section.samples.get(name) for column in columns]
    known = [column for column in columns if column]
    return np.array(known, dtype=np.float64) if name and len(known) == len(keys) else None
