"""Which layer's change explains the change of a model's norm: what swapping layers showed.

For a sample, let n(S) be the norm of the old model with the layers S of the new one, and D all
that differ. Two swaps of a layer g are seen, in logarithms, which add up:

    swapped   ln n({g}) / n({})        only this layer is new
    undone    ln n(D) / n(D - {g})     only this layer is no longer old

They differ where layers interact. Their mean is the layer's effect: the Shapley value of g where
no more than two layers interact, which 2 swaps for each layer give and not 2^layers. What the
effects of all layers leave of ln n(D) / n({}) is the rest: interactions of three layers or more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lipaudit.errors import EvaluationError
from lipaudit.gate.contrasts import TOLERANCE
from lipaudit.gate.statistics import LEVEL, Values, mean_change
from lipaudit.results import Array
from lipaudit.results.columns import Float, Frozen
from lipaudit.results.report import Note

NO_CHANGE = Note(
    level="warning",
    code="no-change",
    text="the norm hardly changed, or went up in some samples and down in others so that the 95 % "
    "limits contain 0: no shares of the change are given",
)
SMALL_GAP = 0.02
"""Below it, as a share of the norm, the two largest singular values soon change places."""


class LogRatio(Frozen):
    """Mean over the samples of ln(new / old), and its 95 % limits by Student's t.

    The limits are None where one sample is all there is.
    """

    mean: Float
    low: Float | None
    high: Float | None


class Explained(Frozen):
    """What is explained of the change of the norm: by a layer, or by none.

    Attributes:
        share: of the mean change of ln norm; None where there hardly is one (`NO_CHANGE`).
        effect: mean of swapped and undone.
        swapped: by this layer of the new model in the old one.
        undone: by this layer in the new model, against the old one there.
        linear_old: `swapped` to first order, from the derivative at the old model; None where the
            model has no second derivative.
        linear_new: `undone` to first order, from the derivative at the new model.
    """

    share: Float | None
    effect: LogRatio
    swapped: LogRatio
    undone: LogRatio
    linear_old: LogRatio | None
    linear_new: LogRatio | None


class LayerShare(Explained):
    """What one layer explains.

    Attributes:
        layer: path of the module; of a tensor that no layer has, its own.
        entries: numbers of it that differ.
        moved: ||theta_new - theta_old|| / ||theta_old||; None where the old ones are 0.
    """

    layer: str
    entries: int
    moved: Float | None


class Attribution(Frozen):
    """How the change of the Jacobian norm from one model to another is explained by layers.

    Attributes:
        old: name of the first model.
        new: name of the second.
        start: from where the Jacobian is taken.
        target: to where.
        samples: ids of the samples.
        change: of the norm: ln(new / old).
        layers: those that differ, in the order of the model.
        rest: what no layer explains alone; of the linearised figures what first order misses.
        same: how many layers do not differ.
        values: behind these figures: `change`, (samples,), `swapped`, `undone`, `linear_old` and
            `linear_new`, (layers, samples), in ln(new / old).
        notes: what is to be known of the figures.
    """

    old: str
    new: str
    start: str
    target: str
    samples: tuple[str, ...]
    change: LogRatio
    layers: tuple[LayerShare, ...]
    rest: Explained
    same: int
    values: dict[str, Array]
    notes: tuple[Note, ...] = ()


Facts = Mapping[str, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def attribution(
    ends: Facts,
    layers: Sequence[Facts],
    norms: Mapping[str, Values],
    *,
    notes: Sequence[Note] = (),
) -> Attribution:
    """Sum up what swapping layers showed.

    Args:
        ends: the fields of an `Attribution` that name what was measured, and `same`.
        layers: layer, entries and moved of those that differ.
        norms: of every sample, `old` and `new`, (samples,); with one layer swapped, `swapped`, or
            undone, `undone`, (layers, samples); and, where they are known, `linear_old` and
            `linear_new`: the first-order change of the norm over the norm, (layers, samples).
        notes: remarks on them.

    Raises:
        EvaluationError: no norm is above 0.
    """
    values, left = _logarithms(norms)
    kept = tuple(np.array(ends["samples"])[left].tolist())
    change = _log_ratio(values["change"])
    told = _told(values["change"], change)
    whole = change.mean if told else None
    sums = {n: values["change"] - v.sum(0) for n, v in values.items() if n != "change"}
    if dropped := len(left) - len(kept):
        text = f"samples where a norm is 0 are left out: {dropped}"
        notes = [*notes, Note(level="warning", code="zero-norms", text=text)]
    return Attribution(
        **(dict(ends) | {"samples": kept}),
        change=change,
        layers=tuple(
            LayerShare(
                **facts, **_explained({n: v[i] for n, v in values.items() if v.ndim > 1}, whole)
            )
            for i, facts in enumerate(layers)
        ),
        rest=Explained(**_explained(sums, whole)),
        values={name: Array.of(each) for name, each in values.items()},
        notes=(*notes, *([] if told else [NO_CHANGE])),
    )


def _logarithms(norms: Mapping[str, Values]) -> tuple[dict[str, Values], Mask]:
    """Return the changes in logarithms, and which samples have them."""
    taken = [norms["old"], norms["new"], *norms["swapped"], *norms["undone"]]
    left = np.all(np.array(taken) > 0, axis=0)
    if not left.any():
        raise EvaluationError(
            "the norm of every sample is 0 somewhere on the way: there is no ratio to explain",
            "Look at the samples: lipaudit jacobian MODEL -f json.",
        )
    log = {name: np.log(norms[name][..., left]) for name in ("old", "new", "swapped", "undone")}
    values = {
        "change": log["new"] - log["old"],
        "swapped": log["swapped"] - log["old"],
        "undone": log["new"] - log["undone"],
    }
    slopes = {n: norms[n][..., left] for n in ("linear_old", "linear_new") if n in norms}
    return values | slopes, left


def _explained(values: Mapping[str, Values], whole: float | None) -> dict[str, Any]:
    """Return the fields of an `Explained`, of one layer or of the rest."""
    effect = _log_ratio((values["swapped"] + values["undone"]) / 2)
    return {
        "share": effect.mean / whole if whole else None,
        "effect": effect,
        "swapped": _log_ratio(values["swapped"]),
        "undone": _log_ratio(values["undone"]),
        "linear_old": _log_ratio(values["linear_old"]) if "linear_old" in values else None,
        "linear_new": _log_ratio(values["linear_new"]) if "linear_new" in values else None,
    }


def _log_ratio(changes: Values) -> LogRatio:
    evidence = mean_change(changes)
    low, high = evidence.limits(LEVEL)
    known = math.isfinite(low) and math.isfinite(high)
    return LogRatio(
        mean=float(changes.mean()), low=low if known else None, high=high if known else None
    )


def _told(changes: Values, change: LogRatio) -> bool:
    """Say whether there is a change to have shares of: what is near 0 has shares of any size."""
    one_way = bool(np.all(changes > 0) or np.all(changes < 0))
    beyond = change.low is not None and change.high is not None and change.low * change.high > 0
    return (one_way or beyond) and abs(change.mean) > TOLERANCE
