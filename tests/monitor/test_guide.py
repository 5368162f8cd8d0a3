"""The examples of the guide on watching run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lipaudit import schema

GUIDE = Path(__file__).parents[2] / "docs/guide/watch.md"
HISTORIES = {
    "loop": "watched",
    "trainer": "bert/lipaudit-watch",
    "lightning": "lipaudit-watch",
}


def examples() -> dict[str, str]:
    found = re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return dict(found)


def test_the_guide_has_its_examples():
    assert list(examples()) == list(HISTORIES)


@pytest.mark.parametrize("name", HISTORIES)
def test_an_example_runs_and_measures(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(examples()[name], f"{GUIDE.name}: {name}", "exec"), {"__name__": "example"})  # noqa: S102
    history = schema.load_history(tmp_path / HISTORIES[name] / "history.jsonl")
    assert [point.step for point in history.points] == [0, 2, 4]
    assert not any(point.failures for point in history.points)
    assert (tmp_path / HISTORIES[name] / "history.html").exists()
