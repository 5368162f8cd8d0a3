"""The measure `jacobian`: its options and its table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, model_validator

from lipaudit.errors import UsageError
from lipaudit.settings.measure import MeasureRecord, NormOptions
from lipaudit.settings.option import Need, option
from lipaudit.tables.columns import Column, Reduction, count_column, text_column
from lipaudit.tables.common import CONVERGED, NORM, STOPPED, UPPER, WITHIN_COLUMN
from lipaudit.tables.report import Layout

StartPoint = Literal["pixels", "embeddings"]


ENDS = ("logits", "probabilities", "loss", "hidden", "features", "tokens")


PLACED = ("logits", "probabilities", "hidden")
"""Outputs that take a position in a text."""


FEW_STEPS = 2
"""Number of Lanczos steps whose memory is tried."""


POSITION = re.compile(r"last|all|-?\d{1,9}")


class Target(NamedTuple):
    """Output of the Jacobian.

    Attributes:
        what: one of `ENDS`.
        where: position in a text: last, all, or an index among the tokens without padding, from 0,
            or from the end if negative; empty: not given.
    """

    what: str
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read `loss`, `logits` or `logits:5`.

        Raises:
            ValueError: the text is none of these.
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
        """Return the target in the typed form."""
        return ":".join(filter(None, self))


EndPoint = Annotated[str, AfterValidator(lambda text: Target.parse(text).text)]
"""Output of a Jacobian, as `Target` reads it."""


def _decides(options: JacobianOptions) -> bool:
    what, where = Target.parse(options.target or "logits")
    return what == "logits" and where != "all"


OF_CLASSES = Need("--to logits", _decides)


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

    start: StartPoint | None = option(
        None, "Input of the Jacobian: pixels or embeddings (for text: embeddings).", "--from"
    )
    target: EndPoint | None = option(
        None,
        "Output of the Jacobian: logits, probabilities, loss, hidden, features or tokens. At "
        "a text position: logits:5.",
        "--to",
        values=lambda: (*ENDS, *(f"{end}:all" for end in PLACED)),
    )
    norm: Literal["2", "inf"] = option(
        "2", "Norm of the Jacobian: 2 (spectral) or inf (largest L1 row norm)."
    )
    rivals: int = option(
        16,
        "Largest number of other classes to consider for the first-order radius.",
        need=OF_CLASSES,
        ge=1,
    )
    per_layer: bool = option(
        False, "Also compute the norm of every block, from its input to its output."
    )

    def shorten(self, layers: Mapping[int, bool]) -> Self:
        """Return options with few steps at one place: each step adds one vector."""
        end = self.target and self.target.replace(":all", ":last")  # as many at a time
        quick = {"max_steps": FEW_STEPS, "per_layer": False, "target": end}
        return self.model_copy(update=quick)

    @model_validator(mode="after")
    def _spectral(self) -> JacobianOptions:
        if self.per_layer and self.norm != "2":
            raise UsageError(
                "the norms of blocks are spectral", "Leave out --norm or --per-layer."
            )
        return self


JACOBIAN_TABLE = Layout(
    name="jacobian",
    title="Jacobian norms",
    sample_columns={
        "norm": Column("||J||", "Norm of the sample's Jacobian.", better="lower", reading=NORM),
        "norm_median": Column("median ||J||", "Median of the norms at all positions of the text."),
        "position": Column(
            "position",
            "Position in the text where the norm is largest: the token index from 0, without "
            "padding.",
            format="d",
            domain="",
        ),
        "loss": Column(
            "loss",
            "Cross-entropy loss: of the class, or the mean over the next tokens of a text.",
            unit="nat",
            better="lower",
        ),
        "upper": Column(
            "upper", "Probabilistic upper limit of norm.", status="estimate", reading=UPPER
        ),
        "products": Column("products", "Products used.", format="d"),
        "converged": Column("converged", f"{STOPPED}.", format="", reading=CONVERGED),
        "margin": Column(
            "margin",
            "f_y - max_(j != y) f_j.",
            better="higher",
            reading="Lead of the true class over the next best (for a language model: of the "
            "predicted next token). Misclassified samples have no radius.",
        ),
        "radius_first_order": Column(
            "first-order radius",
            "First-order distance to another class: min_j (f_y - f_j) / ||grad(f_y - f_j)||. "
            "A lower limit of it if `complete` is no. Not a certificate.",
            better="higher",
            status="estimate",
            reading="Distance to the nearest class if the model were linear. An attack may "
            "succeed within it, or fail beyond it.",
        ),
        "rivals": Column(
            "rivals", "Number of other classes j considered for the radius.", format="d"
        ),
        "complete": Column(
            "complete",
            "Whether no other class can be nearer.",
            format="",
            reading="Classes are considered in the order of their margin. The search ends when no "
            "further class can be nearer (probability 99.9 %) or after --rivals classes. In the "
            "second case, complete is no and the radius is a lower limit.",
        ),
        "correct": Column("correct", "Whether the prediction is right.", format=""),
    },
    fixed={
        "from": text_column("from", "Input of the Jacobian."),
        "to": text_column("to", "Output of the Jacobian."),
        "module": text_column("module", "Block that is differentiated; empty: the whole model."),
        "norm": text_column("norm", "2 (spectral) or inf (largest L1 row norm).", default="2"),
        "samples": count_column("samples", "Number of samples."),
        "mean": Column("mean", "Mean norm.", better="lower", reduction=Reduction("mean", "norm")),
        "median": Column(
            "median", "Median norm.", better="lower", reduction=Reduction("median", "norm")
        ),
        "p95": Column(
            "p95", "95th percentile.", better="lower", reduction=Reduction("p95", "norm")
        ),
        "max": Column("max", "Largest norm.", better="lower", reduction=Reduction("max", "norm")),
        "method": text_column("method", "Method of the norm: dense VJPs or Lanczos."),
        "tol": Column("tol", "Requested relative accuracy (estimated).", domain=""),
        "within": WITHIN_COLUMN,
        "products": Column("products", "Mean number of Jacobian products per sample.", domain=""),
        "converged": count_column("converged", f"{STOPPED}: samples.", reading=CONVERGED),
    },
)


JACOBIAN = MeasureRecord(name="jacobian", tables=(JACOBIAN_TABLE,), options=JacobianOptions)
