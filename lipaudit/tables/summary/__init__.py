"""The scorecard of a report as data: what a reader is told first."""

from __future__ import annotations

from lipaudit.tables.summary.drawn import shared as shared
from lipaudit.tables.summary.drawn import steepest as steepest
from lipaudit.tables.summary.drawn import summary as summary
from lipaudit.tables.summary.records import KINDS as KINDS
from lipaudit.tables.summary.records import Accuracy as Accuracy
from lipaudit.tables.summary.records import Fragile as Fragile
from lipaudit.tables.summary.records import Head as Head
from lipaudit.tables.summary.records import Heads as Heads
from lipaudit.tables.summary.records import Norms as Norms
from lipaudit.tables.summary.records import Radii as Radii
from lipaudit.tables.summary.records import Summary as Summary
from lipaudit.tables.summary.records import Tightness as Tightness
from lipaudit.tables.summary.records import Warned as Warned
