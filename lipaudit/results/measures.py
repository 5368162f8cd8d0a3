"""The record of each measure: what everything but the measure itself must know of it.

Its row types and per-sample columns are what reports, tables, `lipaudit explain` and the gate
read; its options make its command. No torch is imported: what runs it is named as text.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from lipaudit.errors import UsageError
from lipaudit.results.columns import Column, Row
from lipaudit.results.plugins import entries
from lipaudit.results.rows import (
    AttackRow,
    AttentionRow,
    BallRow,
    BoundsRow,
    CertifyRadiusRow,
    CertifyRow,
    JacobianRow,
    LayerRow,
    ScalingFitRow,
    ScalingRow,
    ScalingSplitRow,
)
from lipaudit.results.samples import SAMPLES

GROUP = "lipaudit.measures"


@dataclass(frozen=True, kw_only=True)
class MeasureRecord:
    """A measure, as the command line, the gate and the report know it.

    Attributes:
        name: of its command and of its section.
        rows: row types of its sections: of the section of its own name first, then of those that
            are called NAME.SOMETHING.
        samples: the columns that its section has for every sample.
        options: "module:name" of its `MeasureOptions`, whose docstring is the help of its command.
        runs: "module:name" of its `lipaudit.measures.Measure`, imported when it is first run.
    """

    name: str
    rows: tuple[type[Row], ...]
    samples: Mapping[str, Column] = field(default_factory=dict)
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


def _own(name: str, kind: str, *rows: type[Row]) -> MeasureRecord:
    return MeasureRecord(
        name=name,
        rows=rows,
        samples=SAMPLES.get(name, {}),
        options=f"lipaudit.settings.measure:{kind}Options",
        runs=f"lipaudit.measures.{name}:MEASURE",
    )


OWN: dict[str, MeasureRecord] = {
    record.name: record
    for record in (
        _own("bounds", "Bounds", BoundsRow, LayerRow, BallRow),
        _own("attention", "Attention", AttentionRow),
        _own("jacobian", "Jacobian", JacobianRow),
        _own("attack", "Attack", AttackRow),
        _own("certify", "Certify", CertifyRow, CertifyRadiusRow),
        _own("scaling", "Scaling", ScalingRow, ScalingFitRow, ScalingSplitRow),
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
    sections = [row.section for row in record.rows]
    if not sections or sections[0] != record.name:
        return f"has no row type of the section {record.name!r}"
    strange = [s for s in sections[1:] if not s.startswith(f"{record.name}.")]
    return f"has rows of a section {strange[0]!r}" if strange else ""


def row_types() -> dict[str, type[Row]]:
    """Return the row type of every section, by the section's name."""
    return {row.section: row for record in measures().values() for row in record.rows}


def sample_columns(section: str) -> Mapping[str, Column]:
    """Return the per-sample columns of a section; `robust@ATTACK,NORM,EPS` reads as `robust`."""
    record = measures().get(section)
    return {} if record is None else record.samples
