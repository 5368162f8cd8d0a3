"""A measure of one's own: its table, its options and its record. Nothing here needs torch."""

from __future__ import annotations

from typing import ClassVar

from lipaudit.settings import MeasureOptions, MeasureRecord, option
from lipaudit.tables import Column, Layout

TABLE = Layout(
    name="confidence",
    title="Confidence of the predictions",
    fixed={
        "temperature": Column("T", "What the logits are divided by.", domain="", needed=True),
        "mean": Column("mean", "Mean over the samples.", format=".1%", better="higher"),
        "low": Column("lowest", "Smallest over the samples.", format=".1%"),
    },
    sample_columns={"confidence": Column("confidence", "Of the prediction.", better="higher")},
)


class ConfidenceOptions(MeasureOptions):
    """How sure the model is of its predictions: the largest softmax of its logits.

    [dim]Example:[/] [cyan]lipaudit confidence demo --temperature 2[/]
    """

    samples: ClassVar[int] = 32
    temperature: float = option(1.0, "Divide the logits by it.", gt=0)


CONFIDENCE = MeasureRecord(
    name="confidence",
    tables=(TABLE,),
    options=ConfidenceOptions,
    runs="lipaudit_example.softmax:MEASURE",
)
