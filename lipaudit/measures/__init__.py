"""What can be measured: one generator of Parts per sub-command."""

from lipaudit.measures.measure import Measure as Measure
from lipaudit.measures.measure import Part as Part
from lipaudit.settings import measures

MEASURES: dict[str, Measure] = {name: record.load() for name, record in measures().items()}
"""All measures by the name of their command and section; plug-ins come last."""
