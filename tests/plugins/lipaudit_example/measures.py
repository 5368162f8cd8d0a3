"""A measure of one's own: its row, its options and its record. Nothing here needs torch."""

from __future__ import annotations

from typing import ClassVar

from lipaudit.results import Column, MeasureRecord, Row
from lipaudit.results.columns import Float, column
from lipaudit.settings import MeasureOptions, option


class ConfidenceRow(Row):
    """How sure the model is of its predictions."""

    section: ClassVar[str] = "confidence"
    title: ClassVar[str] = "Confidence of the predictions"
    temperature: Float = column("T", "What the logits are divided by.", ..., domain="")
    mean: Float = column("mean", "Mean over the samples.", ..., format=".1%", better="higher")
    low: Float = column("lowest", "Smallest over the samples.", ..., format=".1%")


class ConfidenceOptions(MeasureOptions):
    """How sure the model is of its predictions: the largest softmax of its logits.

    [dim]Example:[/] [cyan]lipaudit confidence demo --temperature 2[/]
    """

    samples: ClassVar[int] = 32
    temperature: float = option(1.0, "Divide the logits by it.", gt=0)


CONFIDENCE = MeasureRecord(
    name="confidence",
    rows=(ConfidenceRow,),
    samples={"confidence": Column("confidence", "Of the prediction.", better="higher")},
    options="lipaudit_example.measures:ConfidenceOptions",
    runs="lipaudit_example.softmax:MEASURE",
)
