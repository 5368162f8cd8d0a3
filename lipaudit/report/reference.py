"""Figures of known models, which say whether a figure is large.

`python -m benchmarks yardstick` measures them. The file `reference.json` is the one source of
pages and of docs/reference.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from lipaudit.measures import layouts
from lipaudit.report import cells
from lipaudit.report.blocks import Cells, Chapter, Paragraph
from lipaudit.report.rows import tabulate_rows
from lipaudit.tables import Column, Report, Row
from lipaudit.tables.columns import finite, log10_ratio, middle
from lipaudit.tables.formats import join_texts
from lipaudit.tables.trials import WORST

FILE = "reference.json"


@dataclass(frozen=True)
class Yardstick:
    """A figure of a report that known models have, too.

    Attributes:
        label: its name.
        metric: the column that formats it.
        read: its value in a report; None if the report lacks it.
        where: what has to be equal for a comparison, such as the ball of an attack.
    """

    label: str
    metric: str
    read: Callable[[Report], float | None]
    where: Callable[[Report], str] = lambda _report: ""

    @property
    def column(self) -> Column:
        """Return the column that formats the figure."""
        measure, _, name = self.metric.rpartition(".")
        return layouts()[measure].columns[name]


def _list_rows(report: Report, measure: str) -> Sequence[Row]:
    """Return the rows of a section; none if the section is missing."""
    section = report.section(measure)
    return section.rows if section else ()


def _list_cells(report: Report, measure: str, name: str) -> list[float]:
    """Return the finite values of a column; none if the section is missing."""
    return finite(row.get(name) for row in _list_rows(report, measure))


def _read_steepest(report: Report) -> float | None:
    """Return the norm of the steepest head."""
    return max(_list_cells(report, "bounds", "exact"), default=None)


def _read_usual_head(report: Report) -> float | None:
    """Return the norm of the median head."""
    return middle(_list_cells(report, "bounds", "exact"))


def _read_tightness(report: Report) -> float | None:
    """Return how many times the bound `sharp` is the exact norm, at the median head."""
    # The median of base-10 logarithms, because a bound may be too large for a float.
    exponent = middle(log10_ratio(row, "sharp") for row in _list_rows(report, "bounds"))
    if exponent is None:
        return None
    return 10**exponent


def _read_fragile(report: Report) -> float | None:
    """Return the share of attention rows that are neither flat nor one-hot (mean over heads)."""
    shares = _list_cells(report, "attention", "intermediate")
    if not shares:
        return None
    return fmean(shares)


def _read_sensitivity(report: Report) -> float | None:
    """Return the norm of the model's Jacobian, output by input (median over samples)."""
    medians = _list_cells(report, "jacobian", "median")
    if not medians:
        return None
    return medians[0]  # the first row is the Jacobian of the model


def _name_ends(report: Report) -> str:
    """Return the input and the output of the measured Jacobian in words: `pixels to logits`."""
    rows = _list_rows(report, "jacobian")
    if not rows:
        return ""
    return f"{rows[0].get('from')} to {rows[0].get('to')}"


def _read_patterns(report: Report) -> float | None:
    """Return the share of the sensitivity through attention maps (median over samples)."""
    section = report.section("jacobian.shares")
    if section is None:
        return None
    return middle(section.samples.get("patterns", ()))


def _find_attacked(report: Report) -> Row | None:
    """Return the row of all attacks together in the smallest ball, if attacks ran."""
    rows = _list_rows(report, "attack")
    return next((row for row in rows if row.attack == WORST), None)


def _read_robust(report: Report) -> float | None:
    """Return the accuracy under all attacks together."""
    row = _find_attacked(report)
    if row is None:
        return None
    accuracy: float | None = row.robust
    return accuracy


def _name_ball(report: Report) -> str:
    """Return the ball of the accuracy under attack in words; empty if no attack ran."""
    row = _find_attacked(report)
    if row is None:
        return ""
    return row.trial.ball


YARDSTICKS = (
    Yardstick("robust accuracy", "attack.robust", _read_robust, _name_ball),
    Yardstick("model sensitivity, median ||J||", "jacobian.median", _read_sensitivity, _name_ends),
    Yardstick("sensitivity via attention maps", "jacobian.shares.share", _read_patterns),
    Yardstick("steepest attention head, ||J||", "bounds.exact", _read_steepest),
    Yardstick("median attention head, ||J||", "bounds.exact", _read_usual_head),
    Yardstick("fragile attention rows", "attention.intermediate", _read_fragile),
    Yardstick("bound sharp / exact norm", "bounds.sharp", _read_tightness),
)
ALIKE = (
    "sensitivity via attention maps",
    "median attention head, ||J||",
    "fragile attention rows",
    "bound sharp / exact norm",
)
"""Figures that differ by less than 10% between demo and demo:robust: pages do not compare them.

Of these two models one is robust and one is not, so the figures do not tell the two apart.
"""
ABOUT = (
    "Each model on its own data (docs/reference.md). A column is here if it tells demo:robust "
    "(78.1% robust at linf 0.1) from demo (7.8%). Left out, as both have nearly the same value: "
    "sensitivity via attention maps, median head, fragile rows, bound / norm."
)


@cache
def list_known() -> tuple[Mapping[str, Any], ...]:
    """Return the known models, each with its name, its kind, its data and its figures."""
    text = files("lipaudit.report").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


def compare_with_known(report: Report) -> Iterator[Chapter]:
    """Yield a chapter with a table of the figures of a report and of known models, if any.

    A known model has a row if it has one of the figures under equal conditions (`where`), such as
    the ball of an attack. Figures of `ALIKE` are not compared.
    """
    columns = cells.pick_columns("model")
    own: Cells = {"model": report.run.model.spec}
    others: dict[str, Cells] = {}
    for yardstick in YARDSTICKS:
        label = yardstick.label
        value = yardstick.read(report)
        if value is None or label in ALIKE:
            continue
        where = yardstick.where(report)
        for model in list_known():
            name = model["name"]
            figure = model["figures"].get(label)
            # No comparison with itself.
            if figure and figure["where"] == where and name != own["model"]:
                others.setdefault(name, {"model": name})[label] = figure["value"]
                columns[label] = replace(
                    yardstick.column, label=join_texts([label, where]), domain=""
                )
                own[label] = value
    if others:
        tables = tabulate_rows(columns, [own, *others.values()], strong={0})
        yield Chapter("reference", "Is that much?", (*tables, Paragraph(ABOUT)))
