"""The measures: one generator of Parts for each sub-command."""

from lipaudit.measures import attack, attention, bounds, certify, jacobian, scaling
from lipaudit.measures.measure import Measure as Measure
from lipaudit.measures.measure import Part as Part
from lipaudit.settings import measures

MEASURES: dict[str, Measure] = {
    "bounds": bounds.MEASURE,
    "attention": attention.MEASURE,
    "jacobian": jacobian.MEASURE,
    "attack": attack.MEASURE,
    "certify": certify.MEASURE,
    "scaling": scaling.MEASURE,
}
MEASURES |= {name: record.load() for name, record in measures().items() if name not in MEASURES}
"""All measures, by the name of their command and section; plug-ins come last."""
