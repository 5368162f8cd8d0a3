"""What fails: a model on one sample, which is named, or the machine, whatever the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lipaudit
from lipaudit.errors import EvaluationError, find_user_error
from lipaudit.models.linearize import linearize
from lipaudit.models.net import ModelSpec
from lipaudit.schema import load
from tests.commands import find_differences, invoke, replace_parts
from tests.models.conftest import Handwritten
from tests.nets import seeded

FACTORY = """
from tests.engine.test_failing import spec

def nan():
    return spec("nan")

def ends():
    return spec("ends")
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
        if self.how == "ends" and bool(bad.any()):
            raise SystemExit(1)
        if self.how == "gradient" and bool(bad.any()) and out.requires_grad:
            raise NotImplementedError("no backward pass here")
        return out / (~bad).to(out)[:, None] if self.how == "nan" else out


def spec(how: str) -> ModelSpec:
    return ModelSpec(seeded(lambda: Failing(how)), (5, 12), kind="tokens")


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
    assert "next:" not in done.stderr  # a partial report cannot be a baseline
    report = load("run/report.json")
    assert report.failures.keys() == {"jacobian"}
    assert len(report.section("attention").samples["ids"]) == 6
    assert list(tmp_path.rglob("*.npz"))
    # A model that ends the program ends no gate with the code of a regression.
    done = invoke("jacobian", "py:own.py:ends", "--data", "data.npz", code=None)
    said = "error: the model ended the program (SystemExit: 1)" in done.stderr
    assert (done.exit_code, said) == (3, True)


MEASURES: dict[str, dict[str, Any]] = dict.fromkeys(("bounds", "attention", "jacobian"), {})
MEASURES |= {"attack": {"attack": "pgd", "norm": "l2", "eps": "0.1", "steps": 2}}
WHERE = (0.02, 0.3, 0.8)
"""Shares of a run after which the machine fails."""


class Faulty(TorchDispatchMode):
    """Raise an error at one operation, counted from 1; or at all from there on."""

    def __init__(self, at: int, error: Exception | None = None, *, lasting: bool = False) -> None:
        super().__init__()
        self.at, self.error, self.lasting, self.count = at, error, lasting, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.error and (self.count == self.at or (self.lasting and self.count > self.at)):
            raise self.error
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def sound():
    return ModelSpec(seeded(Handwritten), (5, 12), kind="tokens")


def measured(spec: ModelSpec, name: str) -> list[dict[str, Any]]:
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    data = (x, torch.tensor([0, 1]))
    report = lipaudit.measure(spec, name, data=data, dtype="float64", **MEASURES[name])
    return [section.model_dump(mode="json") for section in report.sections]


@pytest.fixture(scope="module")
def whole(sound):
    """Of each measure, what it gives and the number of its operations."""
    results = {}
    for name in MEASURES:
        with Faulty(0) as counted:
            sections = measured(sound, name)
        results[name] = sections, counted.count
    return results


@pytest.mark.parametrize("name", MEASURES)
def test_a_fault_of_a_device_is_never_laid_to_the_model(sound, whole, name):
    for share in WHERE:
        error = RuntimeError("CUDA error: device-side assert triggered")
        with pytest.raises(Exception, match="device-side assert") as caught:  # noqa: SIM117
            with Faulty(int(share * whole[name][1]), error, lasting=True):
                measured(sound, name)
        met = find_user_error(caught.value)
        assert met is not None, share
        assert met.message.startswith("the device failed"), share


@pytest.mark.parametrize("name", MEASURES)
def test_too_little_memory_changes_no_figure(sound, whole, name):
    sections, operations = whole[name]
    for share in WHERE:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        try:
            with Faulty(int(share * operations), error):
                again = measured(sound, name)
        except Exception as caught:
            met = find_user_error(caught)
            assert met is not None, share
            assert met.message.startswith("out of memory"), share
        else:
            assert find_differences(again, sections, rel=1e-6, abs=1e-9) == [], share


def test_only_what_cannot_be_mapped_over_is_done_one_by_one(monkeypatch):
    def refuse(function):
        def call(*rows):
            raise RuntimeError(said)

        return call

    x = torch.ones(2, 3)
    monkeypatch.setattr(torch, "vmap", refuse)
    said = "vmap"
    assert linearize(lambda z, _: z.tanh(), x).rows.shape == (2, 3, 3)
    said = "CUDA error: launch failure"
    with pytest.raises(RuntimeError, match=said):
        _ = linearize(lambda z, _: z.tanh(), x).rows


class Pass(torch.autograd.Function):
    """The identity, which fails once, at one of its forward and backward passes."""

    left = 0

    @staticmethod
    def forward(ctx, x):
        return Pass.backward(ctx, x)

    @staticmethod
    def backward(ctx, x):
        Pass.left -= 1
        if not Pass.left:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return x.clone()


class Passing(nn.Module):
    """Attention; its logits may have a gate, which no closed form describes."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.qkv, self.gated = nn.Linear(4, 12), gated

    def forward(self, x):
        q, k, v = Pass.apply(self.qkv(x)).chunk(3, -1)
        logits = q @ k.mT * (x.mean((1, 2), keepdim=True) if self.gated else 1)
        return logits.softmax(-1) @ v


@pytest.mark.parametrize("gated", [False, True])
def test_a_passing_fault_of_a_device_ends_a_run_wherever_it_strikes(gated):
    """A fault that is caught where a module is read would make its layer numerical."""
    x, report, at, said = torch.ones(1, 2, 4), None, 1, []
    model = nn.Sequential(Passing(gated), nn.Flatten(), nn.Linear(8, 2))
    while report is None:
        Pass.left, at = at, at + 4
        try:
            spec = ModelSpec(model, (2, 4), kind="tokens")
            report = lipaudit.measure(spec, "attention", data=x)
        except EvaluationError as error:
            said.append(str(error))
    assert Pass.left > 0
    assert all("the device failed" in text for text in said)
