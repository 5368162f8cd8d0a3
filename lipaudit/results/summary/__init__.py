"""The scorecard of a report as data: what a reader is told first."""

from __future__ import annotations

from lipaudit.results.summary.drawn import shared as shared
from lipaudit.results.summary.drawn import steepest as steepest
from lipaudit.results.summary.drawn import summary as summary
from lipaudit.results.summary.records import KINDS as KINDS
from lipaudit.results.summary.records import Accuracy as Accuracy
from lipaudit.results.summary.records import Fragile as Fragile
from lipaudit.results.summary.records import Head as Head
from lipaudit.results.summary.records import Heads as Heads
from lipaudit.results.summary.records import Norms as Norms
from lipaudit.results.summary.records import Radii as Radii
from lipaudit.results.summary.records import Summary as Summary
from lipaudit.results.summary.records import Tightness as Tightness
from lipaudit.results.summary.records import Warned as Warned
