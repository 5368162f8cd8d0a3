"""The measure `attention`: its options and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

from pydantic import Field, field_validator

from lipaudit.settings.measure import MeasureOptions, MeasureRecord, keep_ends
from lipaudit.settings.option import needs, option
from lipaudit.settings.parsing import Layers, read_head
from lipaudit.tables.columns import Column, Reduction, count_column
from lipaudit.tables.common import HEAD
from lipaudit.tables.report import Layout


class AttentionOptions(MeasureOptions):
    """How each head distributes its attention, and which heads are in the fragile regime.

    A row is intermediate (fragile) when g1 = p(1) (1 - p(1) + p(2)) exceeds gamma.

    [dim]Examples:[/]
      [cyan]lipaudit attention demo[/]
      [cyan]lipaudit attention demo --map 1.3 -o map.html[/]
      [cyan]lipaudit attention ./my-bert --data reviews.csv --map 3.1 --query 0[/]
    """

    samples: ClassVar[int] = 32
    reads_heads: ClassVar[bool] = True

    layers: Layers = option(None, "Measure only these attention layers, e.g. 0,5-7.")
    gamma: float = option(
        0.1, "Rows with g1 above this value count as intermediate (fragile).", gt=0, lt=0.25
    )
    k: int = option(10, "k of the columns gk and g1/gk (a number of keys).", gt=1)
    p_norm_tokens: int = option(2048, "Do not compute ||P|| for more tokens than this.", ge=0)
    # These two options change no number, so the report does not record them as settings.
    map: str | None = option(
        None,
        "Draw the attention map of LAYER.HEAD for the first sample (on the HTML page).",
        exclude=True,
    )
    query: int | None = option(
        None,
        "With --map: draw this row (query) of the map, averaged over the samples.",
        exclude=True,
        need=needs("map"),
        ge=0,
    )

    candidates: tuple[str, ...] = Field((), exclude=True)
    """Heads whose maps are stored until it is known which one is drawn."""

    def shorten(self, layers: Mapping[int, bool]) -> Self | None:
        """Return the options for two of the layers."""
        ends = keep_ends(layers)
        return self.model_copy(update={"layers": ends}) if ends else None

    def draw_steepest(self, heads: Sequence[str], *, some: bool) -> Self:
        """Return options that draw the map of the first head, or store the maps of candidates."""
        if not heads:
            return self
        return self.model_copy(update={"candidates": heads} if some else {"map": heads[0]})

    @field_validator("map")
    @classmethod
    def _named(cls, text: str | None) -> str | None:
        return None if text is None else "{}.{}".format(*read_head(text))


OVER_ROWS = "mean over all rows (queries) of all samples"
OVER_SAMPLES = "mean over a sample's rows, then over samples"


ATTENTION_TABLE = Layout(
    name="attention",
    title="Heads: attention distributions",
    fixed={
        **HEAD,
        "tokens": count_column("tokens", "Keys of the longest sample."),
        "top1": Column("p(1)", f"Largest entry of a row; {OVER_ROWS}."),
        "top2": Column("p(2)", f"Second largest entry of a row; {OVER_ROWS}."),
        "g1": Column(
            "g1",
            f"p(1) (1 - p(1) + p(2)), bounds ||M||; {OVER_ROWS}.",
            better="lower",
            reading="0: the row is one-hot or spread over very many keys. 1/2: two keys share the "
            "row. The norm of the softmax Jacobian is at most g1, and close to it.",
            reduction=Reduction("mean", "g1", weights="rows"),
        ),
        "g1_max": Column("g1 max", "Largest g1 of any row of any sample."),
        "softmax_norm": Column(
            "||M||",
            f"||diag(p) - p p^T|| of a row; {OVER_ROWS}.",
            better="lower",
            reduction=Reduction("mean", "softmax_norm", weights="rows"),
        ),
        "softmax_norm_max": Column("||M|| max", "Largest ||M|| of any row of any sample."),
        "g1_ratio": Column("g1/||M||", f"How tight g1 is (1 is exact); {OVER_ROWS}."),
        "gk_ratio": Column(
            "g1/gk",
            f"g1 / g_k; {OVER_ROWS}.",
            reading="Ratio of g1 to gk. JaSMin training with k > 1 pushes it towards 1.",
        ),
        "entropy": Column("entropy", f"Shannon entropy of a row; {OVER_ROWS}.", unit="nat"),
        "entropy_normalized": Column(
            "entropy/log n", f"Entropy over its largest value; {OVER_ROWS}."
        ),
        "support": Column(
            "support",
            f"exp(entropy), the effective number of keys; {OVER_ROWS}.",
            reading="Number of keys that would give the same entropy with equal weights.",
        ),
        "sink_first": Column(
            "sink first", f"Share of attention on the first key; {OVER_SAMPLES}."
        ),
        "sink_max": Column(
            "sink max",
            f"Share of attention on a sample's most attended key; {OVER_SAMPLES}.",
            reading="Share of all attention that goes to one key. Sinks are normal in "
            "language models; a change of the sink token reaches every other token.",
        ),
        "sink_token": Column(
            "sink at",
            "Position of the most attended key (in its window), in most samples.",
            format="d",
        ),
        "uniform": Column(
            "uniform", "Share of the rows of all samples that are close to uniform.", format=".1%"
        ),
        "intermediate": Column(
            "intermediate",
            "Share of the rows of all samples in the fragile regime, g1 > gamma.",
            better="lower",
            format=".1%",
            reading="Rows that are neither near uniform nor near one-hot: small changes of the "
            "logits move much attention. A high share is what JaSMin training lowers; by itself "
            "it is no vulnerability.",
            reduction=Reduction("mean", "intermediate", weights="long_rows"),
        ),
        "categorical": Column(
            "categorical",
            "Share of the rows of all samples that are close to one-hot.",
            format=".1%",
        ),
        "short_rows": count_column(
            "short rows", "Rows with fewer than 3 keys; the shares leave them out."
        ),
        "p_norm": Column(
            "||P||",
            "Spectral norm of a sample's attention matrix (the largest over windows); mean "
            "over samples.",
        ),
    },
)


ATTENTION = MeasureRecord(name="attention", tables=(ATTENTION_TABLE,), options=AttentionOptions)
