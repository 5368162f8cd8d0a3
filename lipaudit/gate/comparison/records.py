"""What `lipaudit compare` finds, as data: every table, picture and line is drawn from these."""

from __future__ import annotations

import math
from typing import Literal

from lipaudit.gate.attribution import Attribution
from lipaudit.gate.verdicts import Verdict
from lipaudit.results.columns import Float, Frozen

Kind = Literal["clean", "attacked", "certified"]
Ends = tuple[Float | None, Float | None]
"""A figure in the first report, and in the other; None where there is none."""


class HeadChange(Frozen):
    """How one head changed in one column.

    Attributes:
        layer: of the head.
        head: within the layer.
        old: its figure in the first report.
        new: its figure in the other.
        change: the paired change over the samples, of the two figures where no samples are kept.
        low: lower 95 % limit of the paired change, for this head alone.
        high: upper one.
        p: two-sided p-value of "it has not changed beyond the accuracy of norms" (Student's t).
        p_adjusted: the same after Holm's correction over the heads of this column.
        stands: whether the change is proven after that correction (at 5 %).
    """

    layer: int
    head: int
    old: Float | None
    new: Float | None
    change: Float | None
    low: Float | None = None
    high: Float | None = None
    p: Float | None = None
    p_adjusted: Float | None = None
    stands: bool = False


class HeadChanges(Frozen):
    """How every head changed in one column, in the order of the first report.

    Attributes:
        metric: e.g. `bounds.exact`.
        unit: of the changes, as of a `Verdict`: "%" (a share of the old figure), "pp" or "".
        samples: pairs behind each change; 0 where none are kept.
        heads: one entry each.
    """

    metric: str
    unit: str
    samples: int
    heads: tuple[HeadChange, ...]


class Outcome(Frozen):
    """How many samples changed sides in one question: right, robust or certified.

    Attributes:
        kind: of the question.
        ball: in which ball it is asked; empty without attack.
        samples: how many both reports have.
        old: how many of them are on the good side in the first report.
        new: how many in the other.
        lost: how many left the good side.
        gained: how many came to it.
        mcnemar: exact two-sided p-value of "as many leave as come".
    """

    kind: Kind
    ball: str
    samples: int
    old: int
    new: int
    lost: int
    gained: int
    mcnemar: Float

    @property
    def name(self) -> str:
        """What the states of samples name it: `clean`, `linf 0.1`, `certified linf 0.1`."""
        kind = "" if self.kind == "attacked" else self.kind
        return " ".join(filter(None, (kind, self.ball)))


class SampleChange(Frozen):
    """One sample in both reports.

    Attributes:
        id: its id.
        place: where it is found; empty where that is not known.
        figures: the per-sample columns that have a better direction, by metric
            (`jacobian.norm`).
        states: what became of it, by the name of the outcome: `("robust", "broken")`.
        lost: the outcomes in which it left the good side.
        gained: those in which it came to it.
    """

    id: str
    place: str
    figures: dict[str, Ends]
    states: dict[str, tuple[str, str]]
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()

    def ends(self, metric: str) -> tuple[float, float] | None:
        """Return a figure before and after; None unless both are finite numbers."""
        old, new = self.figures.get(metric, (None, None))
        if old is None or new is None or not (math.isfinite(old) and math.isfinite(new)):
            return None
        return old, new

    @property
    def flipped(self) -> bool:
        """Whether it changed sides in any outcome."""
        return bool(self.lost or self.gained)


class Pair(Frozen):
    """One model against the first.

    Attributes:
        old: name of the first model.
        new: name of the other.
        verdicts: one per metric: improved, regressed, unchanged, not comparable, or inconclusive
            (its 95 % interval contains 0). A column of rows is judged by its median over the
            rows, sample by sample; where no samples are kept it has no interval and is compared
            as it is.
        heads: how each head changed, a record per column.
        outcomes: how many samples changed sides.
        samples: every sample that both reports have, those that lost most first, those that
            gained most last.
        warnings: what spoils the comparison: other data, other samples, other settings.
        notes: what differs without spoiling it.
    """

    old: str
    new: str
    verdicts: tuple[Verdict, ...]
    heads: tuple[HeadChanges, ...]
    outcomes: tuple[Outcome, ...]
    samples: tuple[SampleChange, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


class Comparison(Frozen):
    """Everything that `lipaudit compare` shows.

    Attributes:
        models: names of the models in the order given.
        pairs: every model but the first, against the first.
        attributions: of the change of the norm to layers, of every pair, where that was asked for.
    """

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]
    attributions: tuple[Attribution, ...] = ()
