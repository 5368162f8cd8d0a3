"""Options of `lipaudit jacobian`."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, model_validator

from lipaudit.errors import UsageError
from lipaudit.settings.option import Need, option
from lipaudit.settings.solver import NormOptions

StartPoint = Literal["pixels", "embeddings"]
ENDS = ("logits", "probabilities", "loss", "hidden", "features", "tokens")
PLACED = ("logits", "probabilities", "hidden")
"""Ends that may be asked for at a position of a text."""
POSITION = re.compile(r"last|all|-?\d{1,9}")


class Target(NamedTuple):
    """What is differentiated.

    Attributes:
        what: one of `ENDS`.
        where: the position of a text: last, all, or its number among the tokens that are not
            padded, from 0, from the end where negative; empty: not said.
    """

    what: str
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `loss`, `logits` or `logits:5`.

        Raises:
            ValueError: when it is none of these.
        """
        what, colon, where = text.partition(":")
        placed = what in PLACED and POSITION.fullmatch(where)
        if what not in ENDS or (colon and not placed):
            raise ValueError(
                f"it must be {', '.join(ENDS[:-1])} or {ENDS[-1]}; {', '.join(PLACED)} take a "
                "position: logits:5, logits:-2, logits:last, logits:all"
            )
        return cls(what, where)

    @property
    def text(self) -> str:
        """As it is typed."""
        return ":".join(filter(None, self))


def _an_end(text: str) -> str:
    return Target.parse(text).text


EndPoint = Annotated[str, AfterValidator(_an_end)]
"""What a Jacobian is of, as `Target` reads it."""


def _decides(options: JacobianOptions) -> bool:
    what, where = Target.parse(options.target or "logits")
    return what == "logits" and where != "all"


OF_CLASSES = Need("--to logits", _decides)
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
      [cyan]lipaudit jacobian ./qwen --data book.txt --to loss[/]
      [cyan]lipaudit jacobian ./qwen --data book.txt --to logits:all[/]
    """

    samples: ClassVar[int] = 64
    scores = "asked"

    start: StartPoint | None = option(None, "pixels or embeddings; text: embeddings.", "--from")
    target: EndPoint | None = option(
        None,
        "logits, probabilities, loss, hidden, features or tokens; at a position: logits:5.",
        "--to",
        values=lambda: (*ENDS, *(f"{end}:all" for end in PLACED)),
    )
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
