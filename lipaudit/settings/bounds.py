"""Options of `lipaudit bounds`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from lipaudit.settings.option import Need, option
from lipaudit.settings.parsing import Balls, Layers
from lipaudit.settings.solver import NormOptions
from lipaudit.theory.accuracy import LAYER_WITHIN, WITHIN


class BoundsOptions(NormOptions):
    """Lipschitz bounds of every attention head beside its exact Jacobian norm.

    For each head: the exact norm ||J|| of its Jacobian on each sample, and the upper bounds of
    Hu 2024, Castin 2024, Yudin 2025 and lipaudit's own, far tighter one (sharp).

    --radius goes beyond the samples: for every head a Lipschitz constant on the ball of that
    radius around the tokens X of its layer, certified, and the largest norm that gradient ascent
    finds there.

    --input module takes the norms in what the module around each layer takes, where that is
    something else than the projections read: numerically, and without bounds.

    [dim]Examples:[/]
      [cyan]lipaudit bounds demo[/]
      [cyan]lipaudit bounds demo --radius 0.01,0.03,0.1[/]
      [cyan]lipaudit bounds timm:vit_base_patch16_224 --data photos/ --samples 16[/]
      [cyan]lipaudit bounds ./my-bert --data reviews.csv --layers 0,5-7 -o bounds.json[/]
    """

    once: ClassVar[Mapping[str, Any]] = {"concat": True, "layer_within": WITHIN}

    radius: Balls = option(
        (),
        "Also on balls ||X' - X||_F <= r of token space: 0.03 or 0.01,0.03.",
        need=Need("--input projections", lambda options: options.input == "projections"),
    )
    layers: Layers = option(None, "Only these attention layers, e.g. 0,5-7.")
    input: Literal["projections", "module"] = option(
        "projections", "Norms in what the projections read, or what their module takes."
    )
    concat: bool = option(False, "Also norms of each layer's heads side by side, before W_O.")
    layer_within: float = option(
        LAYER_WITHIN,
        "Proven relative accuracy of the norms of layers (prob. 0.999).",
        gt=0,
        allow_inf_nan=False,
    )

    @property
    def layer_accuracy(self) -> dict[str, Any]:
        """What the solver is asked for where a norm is that of a layer."""
        return self.accuracy | {"within": self.layer_within}
