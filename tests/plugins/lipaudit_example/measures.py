"""A measure of one's own, in one file. Nothing here needs torch before it measures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from lipaudit.measures.base import (
    AuditRole,
    Measure,
    MeasureOptions,
    Part,
    join_parts,
    sample_ids,
)
from lipaudit.settings.option import option
from lipaudit.tables import Column, Display, Layout, Section
from lipaudit.tables.summary import Headline

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net

TABLE = Layout(
    name="confidence",
    title="Confidence of the predictions",
    display=Display(about="The largest softmax of the logits.", drawings=("confidences",)),
    headlines=(
        Headline(
            name="confidence",
            column="mean",
            label="mean confidence",
            sentence="Mean confidence {value:.0%}.",
            rule="confidence.confidence:median >= -10%",
        ),
    ),
    fixed={
        "temperature": Column("T", "What the logits are divided by.", domain="", needed=True),
        "mean": Column("mean", "Mean over the samples.", format=".1%", better="higher"),
        "low": Column("lowest", "Smallest over the samples.", format=".1%"),
    },
    sample_columns={"confidence": Column("confidence", "Of the prediction.", better="higher")},
)


class ConfidenceOptions(MeasureOptions):
    """How sure the model is of its predictions: the largest softmax of its logits.

    Example: lipaudit confidence demo --temperature 2
    """

    samples: ClassVar[int] = 32
    temperature: float = option(1.0, "Divide the logits by it.", gt=0)


def measure(net: Net, batches: Iterable[Batch], options: ConfidenceOptions) -> Iterator[Part]:
    """Yield the confidence of every sample."""
    import torch

    for batch in batches:
        with torch.no_grad():
            p = (net.output(batch) / options.temperature).double().softmax(1)
        yield Part(batch.ids, {"confidence": p.amax(1).cpu().numpy()})


def summarise(parts: Sequence[Part], options: ConfidenceOptions) -> list[Section]:
    """Make the section."""
    values = join_parts(parts, "confidence")
    row = TABLE.row(
        temperature=options.temperature, mean=float(values.mean()), low=float(values.min())
    )
    samples = {"ids": sample_ids(parts), "confidence": tuple(values.tolist())}
    return [TABLE.section(settings=options.model_dump(), rows=(row,), samples=samples)]


CONFIDENCE = Measure(
    name="confidence",
    tables=(TABLE,),
    options=ConfidenceOptions,
    compute=measure,
    summarise=summarise,
    batch=16,
    audit=AuditRole(switch="Also measure the confidence.", samples={"quick": 8}),
)
