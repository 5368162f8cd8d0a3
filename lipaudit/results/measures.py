"""The record of each measure: what everything but the measure itself must know of it.

Its row types and per-sample columns are what reports, tables, `lipaudit explain` and the gate
read; its options make its command. No torch is imported: what runs it is named as text.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from lipaudit.errors import UsageError
from lipaudit.results.columns import Column, Layout
from lipaudit.results.plugins import entries
from lipaudit.results.rows import (
    ATTACK_TABLE,
    ATTENTION_TABLE,
    BALLS_TABLE,
    BOUNDS_TABLE,
    CERTIFY_TABLE,
    FITS_TABLE,
    JACOBIAN_TABLE,
    LAYERS_TABLE,
    RADII_TABLE,
    SCALING_TABLE,
    SPLITS_TABLE,
)

GROUP = "lipaudit.measures"


@dataclass(frozen=True, kw_only=True)
class MeasureRecord:
    """A measure, as the command line, the gate and the report know it.

    Attributes:
        name: of its command and of its section.
        tables: the layouts of its sections: of the section of its own name first, then of those
            that are called NAME.SOMETHING.
        options: "module:name" of its `MeasureOptions`, whose docstring is the help of its command.
        runs: "module:name" of its `lipaudit.measures.Measure`, imported when it is first run.
    """

    name: str
    tables: tuple[Layout, ...]
    options: str
    runs: str

    def load(self, reference: str) -> Any:
        """Return what `options` or `runs` names.

        Raises:
            UsageError: it is not there, or its module cannot be imported.
        """
        try:
            return pkgutil.resolve_name(reference)
        except Exception as error:  # whatever the module of a plug-in raises
            reason = f"{type(error).__name__}: {error}"
            raise UsageError(
                f"the measure {self.name}: {reference} cannot be loaded: {reason}",
                "Update or uninstall the package that brings it.",
            ) from error


def _own(name: str, *tables: Layout) -> MeasureRecord:
    return MeasureRecord(
        name=name,
        tables=tables,
        options=f"lipaudit.settings.measure:{name.capitalize()}Options",
        runs=f"lipaudit.measures.{name}:MEASURE",
    )


OWN: dict[str, MeasureRecord] = {
    record.name: record
    for record in (
        _own("bounds", BOUNDS_TABLE, LAYERS_TABLE, BALLS_TABLE),
        _own("attention", ATTENTION_TABLE),
        _own("jacobian", JACOBIAN_TABLE),
        _own("attack", ATTACK_TABLE),
        _own("certify", CERTIFY_TABLE, RADII_TABLE),
        _own("scaling", SCALING_TABLE, FITS_TABLE, SPLITS_TABLE),
    )
}
"""The measures that come along."""


@cache
def measures() -> Mapping[str, MeasureRecord]:
    """Return the record of every measure by its name: ours, then those of plug-ins.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    return MappingProxyType({**OWN, **entries(GROUP, MeasureRecord, OWN, check=_fault)})


def _fault(record: MeasureRecord) -> str:
    """Say what is wrong with the record of a plug-in."""
    sections = [table.name for table in record.tables]
    if not sections or sections[0] != record.name:
        return f"has no table of the section {record.name!r}"
    strange = [s for s in sections[1:] if not s.startswith(f"{record.name}.")]
    return f"has a table of the section {strange[0]!r}" if strange else ""


def find_column(metric: str) -> Column:
    """Return how a metric of rows or samples reads (`bounds.exact:median`, `attack.robust@pgd`).

    One of a measure that is not installed reads as its name.
    """
    measure, _, name = re.split("[@:]", metric)[0].rpartition(".")
    layout = layouts().get(measure)
    columns = {**layout.columns, **layout.sample_columns} if layout else {}
    return columns.get(name, Column(name, ""))


def layouts() -> dict[str, Layout]:
    """Return the layout of every section, by the section's name."""
    return {table.name: table for record in measures().values() for table in record.tables}
