"""What the measure of `measures.py` runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from lipaudit.data.batch import Batch
from lipaudit.measures import Measure, Part
from lipaudit.measures.measure import join_parts, sample_ids
from lipaudit.models.net import Net
from lipaudit.tables import Section
from lipaudit_example.measures import TABLE, ConfidenceOptions


@torch.no_grad()
def measure(net: Net, batches: Iterable[Batch], options: ConfidenceOptions) -> Iterator[Part]:
    """Yield the confidence of every sample."""
    for batch in batches:
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


MEASURE = Measure(measure, summarise, batch=16)
