"""Reports in which a value is another: whatever it is, they are drawn, judged or refused.

The long run draws every one of them: python -m pytest -m slow tests/report/test_damaged.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest

import lipaudit
from lipaudit.errors import LipauditError
from lipaudit.gate import compare, configure, judge
from lipaudit.report import (
    Subject,
    of_comparison,
    of_history,
    of_judgement,
    of_reports,
    of_sample,
    render,
)
from lipaudit.results import Report
from lipaudit.results.history import History, measured
from lipaudit.schema import dumps, loads

EMPTY = History(lipaudit="0", created="now", model="m", data="d")

VALUES = (None, True, -1, 0, 1e308, float("nan"), "x", "", [], {}, [None], [[]], {"a": None})
MEASURES: dict[str, dict[str, Any]] = {
    "bounds": {"samples": 1},
    "attention": {"samples": 1, "map": "0.0"},
    "jacobian": {"samples": 2, "per_layer": True},
    "attack": {"samples": 2, "eps": "0.1", "attack": "fgsm"},
    "scaling": {"samples": 1, "modes": "real,radius", "lengths": "4:8:log2", "layers": "0"},
}
Place = tuple[str | int, ...]
FAULTS: dict[str, list[tuple[Place, Any]]] = {
    "bounds": [(("sections", 0, "rows"), None)],
    "attention": [
        (("sections", 0, "settings", "k"), []),
        (("sections", 0, "arrays", "g1_ratio_hist", "data", 0), None),
        (("sections", 0, "arrays", "p1p2_hist", "data", 0), -1),
        (("sections", 0, "arrays", "p1p2_edges", "data", 0), None),
        (("sections", 0, "arrays", "map_tokens@0.0", "data", 0), None),
    ],
    "jacobian": [(("sections", 0, "samples", "norm", 0), "")],
    "attack": [(("sections", 0, "rows", 0, "robust"), value) for value in (-1, 1e308)],
    "scaling": [(("sections", 0, "rows", 0, "n"), value) for value in (-1, 0)],
}
"""What once ended in an internal error."""


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    return {
        name: dumps(lipaudit.measure("demo", name, **options))
        for name, options in MEASURES.items()
    }


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where a value may stand in a document: of lists only the first two items."""
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else []
    inner = enumerate(value[:2]) if isinstance(value, list) else inner
    for key, each in inner:
        yield from places(each, (*place, key))


def use(document: str, place: Place, value: Any) -> None:
    """Draw and judge a report with another value in a place; only lipaudit's errors may come."""
    damaged = deepcopy(json.loads(document))
    inner = damaged
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with suppress(LipauditError):
        report = loads(json.dumps(damaged))
        for form in ("table", "markdown", "html", "json"):
            render(report, form)
        judge(report, loads(document), **configure({}, ()))
        for subject in subjects(report, loads(document)):
            with suppress(LipauditError):
                shown = subject()
                for form in ("table", "markdown", "json"):
                    render(shown, form)


def subjects(report: Report, whole: Report) -> Iterator[Callable[[], Subject]]:
    """Everything else that a damaged report is shown in, beside one that is whole."""
    yield lambda: of_reports(whole, report)
    yield lambda: of_comparison(compare([whole, report]), [whole, report])
    yield lambda: of_judgement(judge(report, whole, **configure({}, ())))
    yield lambda: of_sample(report, "report.json", None)
    yield lambda: of_history(EMPTY.with_points([measured(report, step=0, seconds=1.0)]))


@pytest.mark.parametrize("name", FAULTS)
def test_what_once_was_an_internal_error(reports, name):
    for place, value in FAULTS[name]:
        use(reports[name], place, value)


@pytest.mark.parametrize("name", MEASURES)
def test_some_of_all(reports, name):
    chosen = random.Random(name)
    everywhere = list(places(json.loads(reports[name])))
    for _ in range(12):
        use(reports[name], chosen.choice(everywhere), chosen.choice(VALUES))


@pytest.mark.slow(seconds=200)
@pytest.mark.parametrize("name", MEASURES)
def test_all(reports, name):
    for place in places(json.loads(reports[name])):
        for value in VALUES:
            use(reports[name], place, value)
