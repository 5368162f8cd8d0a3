"""The examples of the guide on training run as they stand."""

import pytest

from tests.tutorials import TRAINER, examples, run_example

EXAMPLES = examples("train")


def test_the_guide_has_its_examples():
    assert list(EXAMPLES) == ["loop", "trainer"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "trainer":
        pytest.importorskip("accelerate")
    run_example((TRAINER if name == "trainer" else "") + EXAMPLES[name])
