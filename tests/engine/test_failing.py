"""A model that fails on one sample: the sample is named, and what is measured is kept."""

from pathlib import Path

import numpy as np
import pytest
import torch

import lipaudit
from lipaudit.errors import EvaluationError
from lipaudit.models.net import ModelSpec
from lipaudit.schema import load
from tests.commands import invoke, replace_parts
from tests.models.conftest import Handwritten

FACTORY = """
from tests.engine.test_failing import spec

def nan():
    return spec("nan")
"""
BAD = 3
"""Which of the samples it fails on."""


class Failing(Handwritten):
    """A model that fails on a sample that begins with a 7: NaN, an error, one of its gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x):
        out, bad = super().forward(x), x[:, 0, 0] == 7
        if self.how == "raises" and bool(bad.any()):
            raise ValueError("index 9 is out of range\nand more")
        if self.how == "gradient" and bool(bad.any()) and out.requires_grad:
            raise NotImplementedError("no backward pass here")
        return out / (~bad).to(out)[:, None] if self.how == "nan" else out


def spec(how: str) -> ModelSpec:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ModelSpec(Failing(how), (5, 12), kind="tokens")


@pytest.fixture(scope="module")
def data():
    x = torch.randn(6, 5, 12, generator=torch.Generator().manual_seed(1))
    x[BAD, 0, 0] = 7
    return x, torch.arange(6) % 2


SAYS = {
    "nan": "its output is not finite",
    "raises": "ValueError: index 9 is out of range",
    "gradient": "NotImplementedError: no backward pass here",
}


@pytest.mark.parametrize("how", SAYS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("jacobian", {"batch_size": 2}),
        ("attack", {"eps": "0.1", "attack": "pgd", "norm": "l2", "steps": 2}),
    ],
)
def test_the_sample_on_which_a_model_fails_is_named(how, name, options, data):
    with pytest.raises(EvaluationError) as failed:
        lipaudit.measure(spec(how), name, data=data, samples=6, **options)
    place = failed.value.message.partition(")")[0].rpartition("(")[2]
    assert torch.equal(data[0][int(place.removeprefix("index "))], data[0][BAD])
    assert failed.value.message.endswith(f"({place}): {SAYS[how]}")
    assert failed.value.message.startswith("the model fails on sample ")
    assert "Leave that sample out" in failed.value.advice
    if how == "raises":
        assert isinstance(failed.value.__cause__, ValueError)


def test_a_model_is_not_blamed_for_what_it_does_not_do(data, monkeypatch):
    def broken(*_args, **_options):
        raise ZeroDivisionError("a bug")

    replace_parts(monkeypatch, "jacobian", broken)
    with pytest.raises(ZeroDivisionError):
        lipaudit.measure(spec("fine"), "jacobian", data=data, samples=6)


def test_what_is_measured_before_is_kept_and_the_other_measures_go_on(data, elsewhere, tmp_path):
    Path("own.py").write_text(FACTORY)
    np.savez("data.npz", x=data[0].numpy(), y=data[1].numpy())
    args = ("audit", "py:own.py:nan", "--data", "data.npz", "-n", "6", "--batch-size", "1")
    options = ("--only", "jacobian,attention", "--run-dir", "run")
    done = invoke(*args, *options, code=3)
    assert "the model fails on sample" in done.stderr
    report = load("run/report.json")
    assert report.failures.keys() == {"jacobian"}
    assert len(report.section("attention").samples["ids"]) == 6
    assert list(tmp_path.rglob("*.npz"))
