"""The measure `margins`: by how much the largest logit exceeds the second largest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from lipaudit.measures.base import Measure, MeasureOptions, Part, join_parts, sample_ids
from lipaudit.settings.option import option
from lipaudit.tables import Column, Section
from lipaudit.tables.columns import Reduction
from lipaudit.tables.report import Layout

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net

MARGINS_TABLE = Layout(
    name="margins",
    title="How far are the predictions from a tie?",
    fixed={
        "median": Column(
            "median", "Median margin.", better="higher", reduction=Reduction("median", "margin")
        ),
        "mean": Column(
            "mean", "Mean margin.", better="higher", reduction=Reduction("mean", "margin")
        ),
    },
    sample_columns={
        "margin": Column("margin", "Largest logit minus second largest.", better="higher")
    },
)


class MarginsOptions(MeasureOptions):
    """The margin of every sample: its largest logit minus the second largest.

    Example: lipaudit margins demo
    """

    samples: ClassVar[int] = 64
    temperature: float = option(1.0, "Divide the logits by it.", gt=0)


def measure(net: Net, batches: Iterable[Batch], options: MarginsOptions) -> Iterator[Part]:
    """Yield the margins of each batch."""
    import torch

    for batch in batches:
        with torch.no_grad():
            logits = net.output(batch).double() / options.temperature
            first, second = logits.topk(2, dim=1).values.unbind(1)
        yield Part(batch.ids, {"margin": (first - second).cpu().numpy()})


def summarise(parts: Sequence[Part], options: MarginsOptions) -> list[Section]:
    """Make the section."""
    values = join_parts(parts, "margin")
    samples = {"ids": sample_ids(parts), "margin": tuple(values.tolist())}
    row = MARGINS_TABLE.row(**MARGINS_TABLE.reduce({"margin": values}))
    return [MARGINS_TABLE.section(settings=options.model_dump(), rows=(row,), samples=samples)]


MARGINS = Measure("margins", (MARGINS_TABLE,), MarginsOptions, measure, summarise, batch=64)
