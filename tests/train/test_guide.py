"""The examples of the guide on training run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs/guide/train.md"


def examples() -> dict[str, str]:
    found = re.findall(r"<!-- test: (\w+) -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return dict(found)


def test_the_guide_has_its_examples():
    assert list(examples()) == ["loop", "trainer", "specformer"]


@pytest.mark.parametrize("name", ["loop", "trainer", "specformer"])
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "trainer":
        pytest.importorskip("accelerate")
    exec(compile(examples()[name], f"{GUIDE.name}: {name}", "exec"), {"__name__": "example"})  # noqa: S102
