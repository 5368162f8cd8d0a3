"""Every measure by its name: ours, in the order of an audit, then those of plug-ins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from lipaudit.settings.attack import ATTACK
from lipaudit.settings.attention import ATTENTION
from lipaudit.settings.bounds import BOUNDS
from lipaudit.settings.certify import CERTIFY
from lipaudit.settings.jacobian import JACOBIAN
from lipaudit.settings.measure import MeasureOptions, MeasureRecord
from lipaudit.settings.scaling import SCALING
from lipaudit.tables.columns import Column
from lipaudit.tables.plugins import entries
from lipaudit.tables.report import Layout

GROUP = "lipaudit.measures"


OWN: dict[str, MeasureRecord] = {
    record.name: record for record in (BOUNDS, ATTENTION, JACOBIAN, ATTACK, CERTIFY, SCALING)
}
"""lipaudit's own measures."""


@cache
def measures() -> Mapping[str, MeasureRecord]:
    """Return the record of every measure by its name: ours, then those of plug-ins.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    return MappingProxyType({**OWN, **entries(GROUP, MeasureRecord, OWN, check=_find_fault)})


def _find_fault(record: MeasureRecord) -> str:
    sections = [table.name for table in record.tables]
    if not sections or sections[0] != record.name:
        return f"has no table of the section {record.name!r}"
    strange = [s for s in sections[1:] if not s.startswith(f"{record.name}.")]
    return f"has a table of the section {strange[0]!r}" if strange else ""


def layouts() -> dict[str, Layout]:
    """Return the layout of every section, by the section's name."""
    return {table.name: table for record in measures().values() for table in record.tables}


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
    return {name: record.options for name, record in measures().items()}
