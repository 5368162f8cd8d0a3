"""The output contract: a report, its sections, and how each column reads.

A column carries everything a renderer or the gate must know of it: label, unit, format, which way
is better, the domain on which the figure holds and how far it is proven.
"""

from lipaudit.tables.columns import Array as Array
from lipaudit.tables.columns import Column as Column
from lipaudit.tables.columns import Row as Row
from lipaudit.tables.columns import Status as Status
from lipaudit.tables.report import Data as Data
from lipaudit.tables.report import Layout as Layout
from lipaudit.tables.report import Model as Model
from lipaudit.tables.report import Note as Note
from lipaudit.tables.report import Report as Report
from lipaudit.tables.report import Run as Run
from lipaudit.tables.report import Section as Section
from lipaudit.tables.report import model_labels as model_labels
