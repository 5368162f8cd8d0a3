"""Measures that nobody has heard of: registered as a plug-in would be, for one test."""

import pytest

from lipaudit.measures import OWN, load_measures
from lipaudit.measures.base import Measure, MeasureOptions
from lipaudit.tables import Column, Layout
from lipaudit.tables.columns import HEAD, count_column, text_column

SPREAD = Layout(
    name="spread",
    fixed={
        "stage": text_column("stage", "Part of the model.", needed=True),
        "depth": count_column("depth", "Blocks before it."),
        "spread": Column(
            "||S|| <= 1",
            "How far features spread.",
            better="lower",
            unit="nat",
            format=".2f",
            status="estimate",
            domain="ball",
        ),
        "share": Column("moved", "Share of features that moved.", format=".1%"),
    },
    sample_columns={
        "tension": Column("tension", "Of the sample.", better="lower"),
        "ok": Column("ok", "Whether it is.", format=""),
    },
)
HEAT = Layout(
    name="heat",
    title="How hot heads are",
    fixed={
        **HEAD,
        "heat": Column("T", "Temperature.", better="lower"),
        "other": Column("U", "Of no better direction."),
    },
)


def register(monkeypatch: pytest.MonkeyPatch, table: Layout) -> None:
    """Add a measure of one table, until the test ends or it is registered again."""
    measure = Measure(
        name=table.name,
        tables=(table,),
        options=MeasureOptions,
        compute=lambda _net, _batches, _options: iter(()),
        summarise=lambda _parts, _options: [],
        batch=8,
    )
    monkeypatch.setitem(OWN, measure.name, measure)
    load_measures.cache_clear()


@pytest.fixture
def registry():
    """Forget afterwards what a test registered."""
    yield
    load_measures.cache_clear()
