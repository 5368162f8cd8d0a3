"""The output contract: a report, its sections, and how each column reads.

A column carries everything a renderer or the gate must know of it: label, unit, format, which way
is better, the domain on which the figure holds and how far it is proven.
"""

from lipaudit.results.columns import Array as Array
from lipaudit.results.columns import Column as Column
from lipaudit.results.columns import Row as Row
from lipaudit.results.columns import Status as Status
from lipaudit.results.report import Data as Data
from lipaudit.results.report import Layout as Layout
from lipaudit.results.report import Model as Model
from lipaudit.results.report import Note as Note
from lipaudit.results.report import Report as Report
from lipaudit.results.report import Run as Run
from lipaudit.results.report import Section as Section
from lipaudit.results.report import model_labels as model_labels
