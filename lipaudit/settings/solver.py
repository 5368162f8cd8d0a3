"""How exactly norms are taken."""

from __future__ import annotations

from typing import Any

from lipaudit.settings.measure import MeasureOptions
from lipaudit.settings.option import option
from lipaudit.theory.accuracy import TOL, WITHIN


class NormOptions(MeasureOptions):
    """Options of a measure that takes norms by Lanczos steps.

    Attributes:
        tol: relative accuracy of the norms, estimated.
        max_steps: most Lanczos steps per norm.
        within: how far the probabilistic limit may lie above a norm: what is proven.
    """

    tol: float = option(TOL, "Estimated relative accuracy of the norms.", gt=0, lt=1)
    max_steps: int = 300
    within: float = option(
        WITHIN, "Proven relative accuracy of the norms (prob. 0.999).", gt=0, allow_inf_nan=False
    )

    @property
    def accuracy(self) -> dict[str, Any]:
        """What the solver is asked for."""
        return {"tol": self.tol, "max_steps": self.max_steps, "within": self.within}
