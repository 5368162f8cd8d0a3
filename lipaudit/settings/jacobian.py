"""Options of `lipaudit jacobian`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from lipaudit.errors import UsageError
from lipaudit.settings.option import Need, option
from lipaudit.settings.solver import NormOptions

StartPoint = Literal["pixels", "embeddings"]
OF_CLASSES = Need("--to logits", lambda options: options.target in (None, "logits"))
EndPoint = Literal["logits", "probabilities", "features", "tokens"]
Grouping = Literal["layer", "block"]
"""What is swapped at a time between checkpoints: parts of blocks (attention, MLP), or blocks."""
SWAPPED = 8
"""On how many samples layers are swapped when nobody says."""


class JacobianOptions(NormOptions):
    """The exact norm of the whole model's Jacobian, sample by sample.

    With class scores also, per sample, the margin and the first-order radius: indicative at a
    point, never a certificate.

    [dim]Examples:[/]
      [cyan]lipaudit jacobian demo[/]
      [cyan]lipaudit jacobian demo --per-layer[/]
      [cyan]lipaudit jacobian timm:vit_tiny_patch16_224 --data photos/ --from embeddings[/]
      [cyan]lipaudit jacobian ./my-bert --data reviews.csv --to features[/]
    """

    samples: ClassVar[int] = 64

    start: StartPoint | None = option(None, "pixels or embeddings; text: embeddings.", "--from")
    target: EndPoint | None = option(None, "logits, probabilities, features or tokens.", "--to")
    norm: Literal["2", "inf"] = option("2", "2 (spectral), or inf (largest L1 row norm).")
    rivals: int = option(
        16, "Most classes to look at for the first-order radius.", need=OF_CLASSES, ge=1
    )
    per_layer: bool = option(False, "Also the norm of every block, input to output.")

    @model_validator(mode="after")
    def _spectral(self) -> JacobianOptions:
        if self.per_layer and self.norm != "2":
            raise UsageError(
                "the norms of blocks are spectral", "Leave out --norm or --per-layer."
            )
        return self
