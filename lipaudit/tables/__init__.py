"""The output format: a report, its sections, and the description of each column.

A column describes itself for renderers and the gate: label, unit, format, better direction, the
domain on which the figure holds, and its status.
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
