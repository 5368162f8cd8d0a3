"""Measures that nobody has heard of: registered as a plug-in would be, for one test."""

import pytest

from lipaudit.settings import MeasureOptions, MeasureRecord, measures
from lipaudit.settings.registry import OWN
from lipaudit.tables import Layout


def register(monkeypatch: pytest.MonkeyPatch, table: Layout) -> None:
    """Add a measure of one table, until the test ends or it is registered again."""
    record = MeasureRecord(name=table.name, tables=(table,), options=MeasureOptions, runs="")
    monkeypatch.setitem(OWN, record.name, record)
    measures.cache_clear()


@pytest.fixture
def registry():
    """Forget afterwards what a test registered."""
    yield
    measures.cache_clear()
