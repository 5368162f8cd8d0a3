"""A whole network on a ball of inputs: a form enters, certified ranges and margins result.

A `Form` represents a tensor as a function of the input: centre, coefficients of symbols, and
slack. An unmodified model runs on forms; each operation has a rule. The result holds for every
input of the ball, for **the real-valued function that the stored weights define**: rounding of our
own computation is part of the slack (`symbols`). A program that evaluates the model in float32
adds its own rounding, which the certificate does not cover. Values that a model computes from its
weights alone (tables of positions, masks, the mean of pixels in its own dtype) are taken as its
program computes them.
"""

from lipaudit.tables.plugins import Wing
from lipaudit.wings.certificates.certify import CERTIFY
from lipaudit.wings.certificates.smoothing import SMOOTHING

VERDICTS = {
    "wrong": "The sample is misclassified without an attack: there is nothing to certify.",
    "broken": "An attack, or the search of a proof, found a misclassified input in the ball.",
    "certified": "Proven: every input of the ball is classified correctly.",
    "undecided": "No attack broke the sample and no proof succeeded; see the column why.",
    "bound": "Why a sample is undecided: loose bounds, and no ReLU to split further.",
    "signs": "Why a sample is undecided: loose bounds, although all signs of ReLUs are fixed.",
    "nodes": "Why a sample is undecided: branch and bound reached its limit --nodes.",
    "seconds": "Why a sample is undecided: the time limit --seconds ended the proof.",
    "tokens": "Why a sample is undecided: near words would be tokenized differently.",
    "unbounded": "Why a sample is undecided: the bounds overflowed; the ball is too large.",
}
WING = Wing(
    measures=(CERTIFY, SMOOTHING),
    topics={"Verdicts of certificates": VERDICTS},
)
