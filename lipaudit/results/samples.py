"""What every section keeps of each sample: columns of their own, and what rows are made of."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lipaudit.results import readings
from lipaudit.results.columns import Column

SAMPLES: dict[str, dict[str, Column]] = {
    "bounds": {
        "exact_max": Column(
            label="largest head", meaning="Largest head norm of the sample.", better="lower"
        )
    },
    "jacobian": {
        "norm": Column(
            label="||J||",
            meaning="Norm of the sample's Jacobian.",
            better="lower",
            reading=readings.NORM,
        ),
        "norm_median": Column(
            label="median ||J||",
            meaning="Median of the norms at all positions of the text.",
        ),
        "position": Column(
            label="position",
            meaning="Where in the text the norm is largest: the number of the token, from 0, "
            "without padding.",
            format="d",
            domain="",
        ),
        "loss": Column(
            label="loss",
            meaning="Cross-entropy: of the class, or the mean over a text's own next tokens.",
            unit="nat",
            better="lower",
        ),
        "upper": Column(
            label="upper",
            meaning="Probabilistic upper limit of norm.",
            status="estimate",
            reading=readings.UPPER,
        ),
        "products": Column(label="products", meaning="Products used.", format="d"),
        "converged": Column(
            label="converged",
            meaning=f"{readings.STOPPED}.",
            format="",
            reading=readings.CONVERGED,
        ),
        "margin": Column(
            label="margin",
            meaning="f_y - max_(j != y) f_j.",
            better="higher",
            reading="By how much the true class leads; of a language model, the token it would "
            "write next. Null for a misclassified sample's radius.",
        ),
        "radius_first_order": Column(
            label="first-order radius",
            meaning="min_j (f_y - f_j) / ||grad(f_y - f_j)|| over all other classes j, or a lower "
            "limit of it (complete: no): indicative, never a certificate.",
            better="higher",
            status="estimate",
            reading="Distance to the nearest class if the model were linear. An attack may "
            "succeed within it, or fail beyond it.",
        ),
        "rivals": Column(
            label="rivals", meaning="Other classes j looked at for the radius.", format="d"
        ),
        "complete": Column(
            label="complete",
            meaning="Whether the other classes are no nearer.",
            format="",
            reading="Classes are looked at by their margin, until the limit of the Jacobian norm "
            "shows that none of the others can be nearer (probability 0.999, as `upper`) or "
            "--rivals are done. If not complete, the radius given is the limit below which none "
            "of the others can lie.",
        ),
        "correct": Column(label="correct", meaning="Whether the prediction is right.", format=""),
    },
    "attack": {
        "label": Column(label="label", meaning="True class.", format="d"),
        "predicted": Column(label="predicted", meaning="Predicted class.", format="d"),
        "correct": Column(label="correct", meaning="Whether the prediction is right.", format="d"),
        "robust": Column(
            label="robust",
            meaning="Whether the sample withstood the attack.",
            better="higher",
            domain="ball",
            status="empirical",
            format="d",
            reading=readings.ROBUST,
        ),
        "distance": Column(
            label="distance",
            meaning="How far the example that was tried last lies from the sample, in the norm of "
            "the attack; of texts, how many changes.",
            domain="",
        ),
        "loss": Column(
            label="loss",
            meaning="Negative log-likelihood of the continuation in nats (of --score mean, per "
            "token); @ATTACK: of the example that broke it, else the highest that was met.",
            better="lower",
            status="empirical",
            domain="",
        ),
    },
    "certify": {
        "label": Column(label="label", meaning="True class; empty: unknown.", format="d"),
        "predicted": Column(label="predicted", meaning="Predicted class.", format="d"),
        "correct": Column(label="correct", meaning="Whether the prediction is right.", format="d"),
        "verdict": Column(
            label="verdict",
            meaning="wrong, broken, certified or undecided.",
            domain="ball",
            format="s",
        ),
        "why": Column(
            label="why undecided",
            meaning="What a sample that is undecided is undecided for.",
            domain="",
            format="s",
        ),
        "robust": Column(
            label="robust",
            meaning="Whether the sample withstood the attack.",
            better="higher",
            domain="ball",
            status="empirical",
            format="d",
            reading=readings.ROBUST,
        ),
        "certified": Column(
            label="certified",
            meaning="Whether nothing in the ball is classified otherwise, proven.",
            better="higher",
            domain="ball",
            status="certified",
            format="d",
            reading=readings.CERTIFIED,
        ),
        "radius": Column(
            label="certified radius",
            meaning="Largest radius that was certified.",
            better="higher",
            domain="ball",
            status="certified",
            reading="Every input nearer than that is classified alike, proven: see certified. "
            "Larger balls may be as safe, but were not proven to be.",
        ),
        "radius_adversarial": Column(
            label="adversarial radius",
            meaning="Distance of the nearest adversarial example that attacks found.",
            better="higher",
            domain="ball",
            status="empirical",
            reading="An upper limit of the distance of the nearest one there is; empty where "
            "attacks found none.",
        ),
    },
}
"""Per-sample columns of each section; `robust@ATTACK,NORM,EPS` reads as `robust`, and
`certified@NORM,EPS` as `certified`."""

FLAGS = frozenset({"certified", "complete", "converged", "correct", "robust"})
"""Per-sample columns that say yes or no, as true and false or as 1 and 0."""


def require_flags(measure: str, samples: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a column of yes and no that holds another number.

    Raises:
        ValueError: with the column and the number.
    """
    for name, cells in samples.items() if measure in SAMPLES else ():
        if name.partition("@")[0] not in FLAGS:
            continue
        for cell in cells:
            if isinstance(cell, float | int) and math.isfinite(cell) and cell not in (0, 1):
                raise ValueError(f"{name} holds {cell}, which is neither 0 nor 1")


def is_repeat(name: str) -> bool:
    """Tell whether an id is that of a sample that repeats an earlier one.

    >>> is_repeat("0123456789abcdef-2"), is_repeat("0123456789abcdef")
    (True, False)
    """
    return re.fullmatch(r"[0-9a-f]{16}-\d+", name) is not None
