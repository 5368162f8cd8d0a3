"""Per-sample columns: how they read, for one sample beside all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lipaudit.report.cells import UNMEASURED, pretty, text
from lipaudit.results import Column, Report
from lipaudit.results.figures import finite, middle, order
from lipaudit.results.samples import FLAGS
from lipaudit.results.trials import parse_column

CLASSES = ("label", "predicted")
"""Per-sample columns that hold the number of a class."""


@dataclass(frozen=True)
class Figure:
    """A per-sample column of a section: how it reads, and its values by sample id."""

    section: str
    name: str
    column: Column
    values: Mapping[str, Any]
    classes: Mapping[int, str]

    @property
    def label(self) -> str:
        """Its heading, and the trial or ball that it is of."""
        trial, label = parse_column(self.name)[1], pretty(self.column.label)
        return label if trial is None else f"{label}, {trial}"

    @property
    def flag(self) -> bool:
        """Whether it says yes or no."""
        return parse_column(self.name)[0] in FLAGS

    def rank(self, sample: str) -> str:
        """Return the place of a sample among all, the worst first; nothing where none is."""
        if self.column.better is None or self.flag or not finite([self.values[sample]]):
            return ""
        sign = 1 if self.column.better == "lower" else -1
        own = sign * order(self.values[sample])
        worse = sum(sign * value > own for value in finite(self.values.values()))
        return f"{worse + 1} of {len(finite(self.values.values()))}"

    def named(self, number: Any) -> str:
        """Return the number of a class, and its name where that says more."""
        name = self.classes.get(number, "") if isinstance(number, int) else ""
        shown = text(number, self.column)
        return f"{shown} ({name})" if name not in ("", shown) else shown

    def cells(self, sample: str) -> tuple[str, ...]:
        """Return what a table says of it for one sample, beside all."""
        value, known = self.values[sample], finite(self.values.values())
        if self.flag:
            share = f"{sum(known) / len(known):.0%} yes" if known else ""
            return self.label, text(None if value is None else bool(value), self.column), share, ""
        if self.name in CLASSES:
            return self.label, self.named(value), "", ""
        typical = "" if self.column.format in UNMEASURED else text(middle(known), self.column)
        return self.label, text(value, self.column), typical, self.rank(sample)


def figures(report: Report) -> list[Figure]:
    """Return the per-sample columns of all sections."""
    return [
        Figure(
            s.measure,
            name,
            s.sample_column(name),
            dict(zip(s.ids, values, strict=True)),
            s.classes,
        )
        for s in report.sections
        for name, values in s.samples.items()
        if name != "ids"
    ]
