"""Compare reports sample by sample: data for summaries, tables, heat-maps and scatters."""

from __future__ import annotations

from lipaudit.gate.comparison.pairs import compare as compare
from lipaudit.gate.comparison.records import Comparison as Comparison
from lipaudit.gate.comparison.records import HeadChange as HeadChange
from lipaudit.gate.comparison.records import HeadChanges as HeadChanges
from lipaudit.gate.comparison.records import Kind as Kind
from lipaudit.gate.comparison.records import Outcome as Outcome
from lipaudit.gate.comparison.records import Pair as Pair
from lipaudit.gate.comparison.records import SampleChange as SampleChange
