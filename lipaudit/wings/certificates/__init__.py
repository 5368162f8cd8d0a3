"""A whole network on a ball of inputs: a form enters, certified ranges and margins result.

A `Form` represents a tensor as a function of the input: centre, coefficients of symbols, and
slack. An unmodified model runs on forms; each operation has a rule. The result holds for every
input of the ball, for **the real-valued function that the stored weights define**: rounding of our
own computation is part of the slack (`rounding`). A program that evaluates the model in float32
adds its own rounding, which the certificate does not cover. Values that a model computes from its
weights alone (tables of positions, masks, the mean of pixels in its own dtype) are taken as its
program computes them.
"""

from lipaudit.tables.plugins import Wing
from lipaudit.wings.certificates.measure import CERTIFY
from lipaudit.wings.certificates.smoothing import SMOOTHING

WING = Wing(measures=(CERTIFY, SMOOTHING))
