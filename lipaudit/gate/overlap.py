"""Two sections over the samples that both have: what any comparison of them is made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError
from lipaudit.gate.comparable import REPEAT
from lipaudit.gate.rules import Rule
from lipaudit.gate.statistics import STATISTICS, Values
from lipaudit.results import Array, Report, Row, Section
from lipaudit.results.samples import REDUCTIONS, Reduction, is_repeat

ALL_BUT_FEW = 0.95
"""Share of the baseline's samples that the gate needs: the hard ones cannot be left out."""


def matched(reports: Sequence[Report]) -> list[Report]:
    """Name the samples of every report as the first does, where they are the same inputs.

    An id is of a sample as its model takes it: another size of image, another tokenizer or
    another order of classes gives the same input another id. Inputs are the same where they stand
    at the same place of the same data, and begin alike where they are texts.
    """
    first, *others = reports
    return [first, *(_renamed(report, other_names(report, first)) for report in others)]


def paired_by_place(reports: Sequence[Report], names: Sequence[str]) -> dict[str, str]:
    """Say which reports are matched to the first by the place of their samples, by name."""
    return {
        name: f"{name} sees the samples in another form than {names[0]}: they are paired by their "
        f"place in {report.run.data.spec}"
        for name, report in zip(names[1:], reports[1:], strict=True)
        if other_names(report, reports[0])
    }


def other_names(report: Report, first: Report) -> dict[str, str]:
    """Return what the first report calls the samples of another; empty where ids are alike."""
    here, there = report.found("place"), first.found("place")
    known = {place: name for name, place in there.items()}
    if set(here) & set(there) or len(known) < len(there) or not _may_be_same(report, first):
        return {}
    names = {name: known[place] for name, place in here.items() if place in known}
    if len(names) < min(len(here), len(there)):
        return {}
    texts, begun = report.found("text"), first.found("text")
    alike = all(texts.get(name) == begun.get(old) for name, old in names.items())
    return names if alike else {}


def _may_be_same(report: Report, first: Report) -> bool:
    """Tell whether other ids may be of the same inputs: else the data have changed."""
    new, old = report.run, first.run
    same_data = (new.data.spec, new.data.commit) == (old.data.spec, old.data.commit)
    seen_otherwise = new.preprocess != old.preprocess or bool(report.found("text"))
    # A command names its models: that of two reports is of one audit of both.
    one, two = (run.command.replace(" --resume", "") for run in (new, old))
    return same_data and (seen_otherwise or one == two)


def _renamed(report: Report, names: Mapping[str, str]) -> Report:
    if not names:
        return report
    sections = tuple(
        section.model_copy(update={"samples": _called(section.samples, names)})
        for section in report.sections
    )
    samples = _called(report.samples, names)
    return report.model_copy(update={"sections": sections, "samples": samples})


def _called(columns: dict[str, tuple[Any, ...]], names: Mapping[str, str]) -> dict[str, Any]:
    ids = tuple(names.get(str(name), name) for name in columns.get("ids", ()))
    return columns | ({"ids": ids} if ids else {})


def aligned(
    rule: Rule, new: Section, old: Section, least: float = ALL_BUT_FEW
) -> tuple[Section, Section]:
    """Return both sections over their shared samples, in the old one's order.

    Where both have the same samples, rows stay as they are. Otherwise the cells that the rule
    reads are computed again, from what the reports keep of each sample.

    Args:
        rule: which of the columns is read.
        new: a section.
        old: the section it is compared with.
        least: the share of the old one's samples that has to be shared.

    Raises:
        BaselineError: fewer samples are shared, or the reports do not keep what the cells are
            made of.
    """
    after, before = new.ids, old.ids
    if not after or not before:
        return new, old  # of one suite, or `same_protocol` has refused them
    places = shared(rule.measure, after, before, least)
    how = REDUCTIONS.get(rule.measure, {}).get(rule.column)
    arrays = {rule.column} | (how.arrays if how else set())
    new, old = _over(new, places[0], arrays), _over(old, places[1], arrays)
    if rule.per_sample or sorted(after) == sorted(before):
        return new, old
    return _computed(rule, how, new), _computed(rule, how, old)


def shared(
    measure: str, new: Sequence[str], old: Sequence[str], least: float
) -> tuple[list[int], list[int]]:
    """Return where the distinct samples of both reports stand in each of them.

    Raises:
        BaselineError: fewer than the least share of the old ones are shared, or none.
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


def _over(section: Section, take: list[int], names: Collection[str]) -> Section:
    """Return a section with some of its samples, in this order, and these of their arrays."""
    shape = (len(section.rows), len(section.ids))
    kept = {n: a for n, a in section.arrays.items() if n in names and a.shape == shape}
    return section.model_copy(
        update={
            "samples": {n: tuple(cells[i] for i in take) for n, cells in section.samples.items()},
            "arrays": {n: Array.of(array.numpy()[:, take]) for n, array in kept.items()},
        }
    )


def _computed(rule: Rule, how: Reduction | None, section: Section) -> Section:
    """Return a section with the column of a rule computed from the samples it has."""
    if how is None and rule.stat == "each" and rule.column in section.arrays:
        return section  # what is tested are the samples themselves
    cells = how and _reduced(how, section)
    if not cells:
        raise BaselineError(
            f"{rule.measure}.{rule.column}: a report has it over all of its samples only, and "
            "these two are not over the same ones",
            REPEAT,
        )
    given = [row.cells()[rule.column] is not None for row in section.rows]
    if any(math.isnan(cell) for cell, known in zip(cells, given, strict=True) if known):
        raise BaselineError(
            f"{rule.measure}.{rule.column}: none of the shared samples has it", REPEAT
        )
    rows = [
        row.model_copy(update={rule.column: cell}) if known else row
        for row, cell, known in zip(section.rows, cells, given, strict=True)
    ]
    return section.model_copy(update={"rows": tuple(rows)})


def _reduced(how: Reduction, section: Section) -> list[float]:
    """Return a column of the rows from what is kept of the samples; nothing if it is not kept."""
    behind = [_behind(name, section) for name in (how.values, how.per, how.weights)]
    values, per, weights = behind
    if values is None or (how.per and per is None):
        return []
    if per is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where(per > 0, values / per, np.nan)
    if weights is not None:
        totals = np.where(weights > 0, values * weights, 0.0).sum(1)
        with np.errstate(invalid="ignore"):
            return list(map(float, totals / weights.sum(1)))
    lines = (line[~np.isnan(line)] for line in values)
    return [float(STATISTICS[how.stat](line)) if line.size else np.nan for line in lines]


def _behind(name: str, section: Section) -> Values | None:
    """Return what is kept of each sample for each row, (rows, samples)."""
    if name in section.arrays:
        return section.arrays[name].numpy()
    columns = [_column(name, row, section) for row in section.rows]
    known = [column for column in columns if column is not None]
    return np.array(known, dtype=np.float64) if name and len(known) == len(columns) else None


def _column(name: str, row: Row, section: Section) -> tuple[object, ...] | None:
    """Return the per-sample column of the row's attack or ball, or of the only row."""
    if row.key:
        own = section.samples.get(row.key.column(name))
        return own or section.samples.get(name)
    return section.samples.get(name) if len(section.rows) == 1 else None
