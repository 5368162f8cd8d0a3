"""Every measure by its name: ours, in the order of an audit, then those of plug-ins."""

from __future__ import annotations

import re
from functools import cache

from lipaudit.measures.attack import ATTACK
from lipaudit.measures.attention import ATTENTION
from lipaudit.measures.bounds import BOUNDS
from lipaudit.measures.certify import CERTIFY
from lipaudit.measures.jacobian import JACOBIAN
from lipaudit.measures.measure import Measure, MeasureOptions
from lipaudit.measures.scaling import SCALING
from lipaudit.tables.columns import Column
from lipaudit.tables.plugins import entries
from lipaudit.tables.report import Layout

GROUP = "lipaudit.measures"


OWN: dict[str, Measure] = {
    measure.name: measure for measure in (BOUNDS, ATTENTION, JACOBIAN, ATTACK, CERTIFY, SCALING)
}
"""lipaudit's own measures. A new one is its file and its name here."""


@cache
def load_measures() -> dict[str, Measure]:
    """Return the measure of every measure by its name: ours, then those of plug-ins.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    return {**OWN, **entries(GROUP, Measure, OWN, check=_find_fault)}


def _find_fault(measure: Measure) -> str:
    sections = [table.name for table in measure.tables]
    if not sections or sections[0] != measure.name:
        return f"has no table of the section {measure.name!r}"
    strange = [s for s in sections[1:] if not s.startswith(f"{measure.name}.")]
    return f"has a table of the section {strange[0]!r}" if strange else ""


def layouts() -> dict[str, Layout]:
    """Return the layout of every section, by the section's name."""
    return {table.name: table for measure in load_measures().values() for table in measure.tables}


def find_column(metric: str) -> Column:
    """Return the column of a metric (`bounds.exact:median`, `attack.robust@pgd`).

    If its measure is not installed, the column has the metric's name only.
    """
    measure, _, name = re.split("[@:]", metric)[0].rpartition(".")
    layout = layouts().get(measure)
    columns = {**layout.columns, **layout.sample_columns} if layout else {}
    return columns.get(name, Column(name, ""))


def option_types() -> dict[str, type[MeasureOptions]]:
    """Return the options of every measure by its name."""
    return {name: measure.options for name, measure in load_measures().items()}
