"""What a summary of a report is made of."""

from __future__ import annotations

from typing import Literal

from lipaudit.tables.columns import Float, Frozen, Status
from lipaudit.tables.common import ACCURACY, CERTIFIED_SHARE

KINDS = {
    "clean": ("clean accuracy", ACCURACY["clean"]),
    "attacked": ("robust accuracy", ACCURACY["robust"]),
    "certified": ("certified accuracy", CERTIFIED_SHARE),
}
"""The label and the column of each kind of accuracy."""


class Accuracy(Frozen):
    """A share of samples that are right, with its 95 % limits (Wilson).

    Attributes:
        kind: without attack; what no attack of a ball broke; what is proven that none can break.
        norm: of the ball; empty without attack.
        eps: its radius as it was typed.
        ball: both, as people say it.
        attacks: those that were tried.
        share: of the samples.
        low: lower limit.
        high: upper limit.
        samples: how many.
        undecided: of a certificate, how many are neither proven nor broken.
    """

    kind: Literal["clean", "attacked", "certified"]
    norm: str = ""
    eps: str = ""
    ball: str = ""
    attacks: tuple[str, ...] = ()
    share: Float
    low: Float | None
    high: Float | None
    samples: int
    undecided: int | None = None


class Radii(Frozen):
    """How far around the samples nothing is classified otherwise, proven.

    Attributes:
        norm: of the balls.
        median: of the certified radii of the samples that are right.
        low: lower limit of that median, of 95 %; None where samples are too few for limits.
        high: upper limit.
        adversarial: the median of the smallest adversarial radii found.
        samples: how many are right.
    """

    norm: str
    median: Float
    low: Float | None
    high: Float | None
    adversarial: Float | None
    samples: int


class Norms(Frozen):
    """The Jacobian norms of the model over the samples; `sample` has the largest."""

    start: str
    end: str
    norm: str
    median: Float | None
    p95: Float | None
    max: Float | None
    sample: str
    samples: int
    converged: int


class Head(Frozen):
    """A head and its exact norm (median over samples)."""

    layer: int
    head: int
    exact: Float


class Heads(Frozen):
    """The heads that amplify most, steepest first, beside all of them."""

    steepest: tuple[Head, ...]
    median: Float
    heads: int


class Fragile(Frozen):
    """How many attention rows are in the fragile regime.

    Attributes:
        share: of all rows, the mean over heads.
        heads: how many have more than half of their rows there.
        of: how many heads there are.
        side: the regime of most other rows.
        k: of the JaSMin penalty that pulls rows to that side; None where nothing is to be pulled.
    """

    share: Float
    heads: int
    of: int
    side: Literal["uniform", "one-hot"]
    k: int | None


class Tightness(Frozen):
    """How many times a bound lies above the exact norm, over heads."""

    bound: str
    status: Status
    median: Float
    largest: Float
    heads: int


class Warned(Frozen):
    """A warning, and the measure whose figures it is about; empty: all of them."""

    measure: str
    code: str
    text: str


class Summary(Frozen):
    """What a report says in one screen.

    Attributes:
        warnings: what must be known before any figure, those on all figures first.
        accuracy: without attack, then under attack by ball, then certified.
        radii: that are certified.
        norms: of the model's Jacobian.
        heads: the steepest.
        fragile: attention rows.
        bounds: against the exact norms, in the order of tables.
    """

    warnings: tuple[Warned, ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    radii: Radii | None = None
    norms: Norms | None = None
    heads: Heads | None = None
    fragile: Fragile | None = None
    bounds: tuple[Tightness, ...] = ()
