"""The output format: a report, its sections, and the description of each column.

A column describes itself for renderers and the gate: label, unit, format, better direction, the
domain on which the figure holds, and its status.
"""

from lipaudit.tables.columns import Array, Column, Reduction, Row, Status
from lipaudit.tables.report import (
    Data,
    Display,
    Layout,
    Model,
    Note,
    Notes,
    Report,
    Run,
    Section,
    model_labels,
)

__all__ = ["Array", "Column", "Data", "Display", "Layout", "Model", "Note", "Notes", "Reduction"]
__all__ += ["Report", "Row", "Run", "Section", "Status", "model_labels"]
