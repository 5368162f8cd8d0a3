"""Options of `lipaudit scaling`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lipaudit.settings.measure import MeasureOptions
from lipaudit.settings.option import Need, option
from lipaudit.settings.parsing import Layers, Lengths, Names, listed
from lipaudit.theory.accuracy import TOL

ScalingMode = Literal["real", "adversarial", "radius", "ascent", "split"]
WORST = Need("a --mode of worst cases, which real is not", lambda o: {*o.modes} != {"real"})
ScalingModes = Annotated[tuple[ScalingMode, ...], listed]


class ScalingOptions(MeasureOptions):
    """How the norms of attention layers and of the model grow with the number of tokens.

    [dim]Modes:[/]
      real         your samples at growing lengths: text cut, images resized
      adversarial  worst-case tokens: the norm grows like sqrt n up to n_max
      radius       the same tokens at growing radius
      ascent       the largest norm that searches find within the radius
      split        every token duplicated, and attacks that do so first

    [dim]Examples:[/]
      [cyan]lipaudit scaling demo[/]
      [cyan]lipaudit scaling ./my-bert --data book.txt --lengths 8:512:log7 -n 8[/]
      [cyan]lipaudit scaling ./my-bert --mode adversarial --heads 0.8,5.11[/]
      [cyan]lipaudit scaling timm:vit_tiny_patch16_224 --lengths 16:196:log4[/]
    """

    samples: ClassVar[int] = 4

    lengths: Lengths = option("8:256:log8", "Tokens, FIRST:LAST:logCOUNT.")
    modes: ScalingModes = option(
        "real,adversarial,radius,ascent,split",
        "real, adversarial, radius, ascent, split (comma-separated).",
        "--mode",
        min_length=1,
    )
    layers: Layers = option(None, "Only these attention layers, e.g. 0,5-7.")
    heads: Names = option(
        None, "Also these heads: 0.8,5.11 or all. Default: the strongest per layer."
    )
    radius: Annotated[float, Field(gt=0, le=1e6)] | None = option(
        None, "Worst case at this radius beside the layer's own.", need=WORST
    )
    mask: Literal["own", "none", "causal", "both"] = option(
        "own", "Mask of the worst case: own, none, causal or both.", need=WORST
    )
    tol: float = option(TOL, "Estimated relative accuracy of the norms.", gt=0, lt=1)

    @property
    def tokens(self) -> int | None:
        """Of how many tokens texts have to be, where the measure needs long ones."""
        return max(self.lengths) if "real" in self.modes else None

    def outline(self, samples: int) -> str:
        """Say before it begins what will be measured, where that is not obvious."""
        heads = "the strongest head of each layer" if self.heads is None else "the heads given"
        on_data = {"real", "split"} & set(self.modes)
        worst = [mode for mode in self.modes if mode != "real"]
        parts = [
            f"{samples} samples at {len(self.lengths)} lengths" if on_data else "",
            f"{', '.join(worst)} of {heads}" if worst else "",
        ]
        return "; ".join(filter(None, parts))
