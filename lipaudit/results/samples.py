"""The per-sample columns of every section."""

from __future__ import annotations

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
            reading="By how much the true class leads. Null for a misclassified sample's radius.",
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
    },
}
"""Per-sample columns of each section; `robust@ATTACK,NORM,EPS` reads as `robust`."""
