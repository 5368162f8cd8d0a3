"""The examples of the guide on watching run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lipaudit import schema

GUIDE = Path(__file__).parents[2] / "docs/guide/watch.md"
FOLDERS = {
    "loop": "watched",
    "trainer": "bert/lipaudit-watch",
    "lightning": "lipaudit-watch",
}


def examples() -> dict[str, str]:
    found = re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return dict(found)


def test_the_guide_has_its_examples():
    assert list(examples()) == list(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_runs_and_measures(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(examples()[name], f"{GUIDE.name}: {name}", "exec"), {"__name__": "example"})  # noqa: S102
    reports = {
        step: schema.load(tmp_path / FOLDERS[name] / f"step-{step:07}.json") for step in (0, 2, 4)
    }
    assert not any(report.failures for report in reports.values())
    assert (tmp_path / FOLDERS[name] / "report.html").exists()
