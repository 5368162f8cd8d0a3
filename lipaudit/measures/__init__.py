"""What can be measured: one generator of Parts per sub-command."""

from importlib import import_module

from lipaudit.measures.measure import Measure as Measure
from lipaudit.measures.measure import Part as Part
from lipaudit.settings import RECORDS


def _measure(runs: str) -> Measure:
    module, _, name = runs.partition(":")
    measure: Measure = getattr(import_module(module), name)
    return measure


MEASURES: dict[str, Measure] = {name: _measure(record.runs) for name, record in RECORDS.items()}
"""Every measure, by the name of its sub-command and section."""
