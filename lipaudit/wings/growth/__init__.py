"""How the constants grow with the length of the input."""

from lipaudit.tables.plugins import Wing
from lipaudit.wings.growth.scaling import SCALING

WING = Wing(
    measures=(SCALING,),
    drawings={"lengths": "lipaudit.wings.growth.length_curves:draw_lengths"},
)
