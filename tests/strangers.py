"""Measures that nobody has heard of: registered as a plug-in would be, for one test."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lipaudit.results import Column, MeasureRecord, Row, measures
from lipaudit.results.measures import OWN


def register(
    monkeypatch: pytest.MonkeyPatch, row: type[Row], samples: Mapping[str, Column] | None = None
) -> None:
    """Add a measure of one row type, until the test ends or it is registered again."""
    record = MeasureRecord(
        name=row.section, rows=(row,), samples=samples or {}, options="", runs=""
    )
    monkeypatch.setitem(OWN, record.name, record)
    measures.cache_clear()


@pytest.fixture
def registry():
    """Forget afterwards what a test registered."""
    yield
    measures.cache_clear()
