"""What can be measured: one generator of Parts per sub-command."""

from lipaudit.measures.attack import ATTACK
from lipaudit.measures.attention import ATTENTION
from lipaudit.measures.bounds import BOUNDS_MEASURE
from lipaudit.measures.jacobian import JACOBIAN
from lipaudit.measures.measure import Measure as Measure
from lipaudit.measures.measure import Options as Options
from lipaudit.measures.measure import Part as Part
from lipaudit.measures.measure import parse_layers as parse_layers
from lipaudit.measures.scaling import SCALING

MEASURES: dict[str, Measure] = {
    "attention": ATTENTION,
    "bounds": BOUNDS_MEASURE,
    "jacobian": JACOBIAN,
    "attack": ATTACK,
    "scaling": SCALING,
}
"""Every measure, by the name of its sub-command and section."""
