"""Batches are halved where memory runs out; weights kept as stored are converted seldom."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from lipaudit import measure
from lipaudit.data.batch import ProcessBatches
from lipaudit.engine.execute import execute
from lipaudit.engine.prepare import Request, prepare
from lipaudit.measures import AuditOptions, load_measures
from lipaudit.settings import RunOptions
from tests.commands import replace_parts
from tests.nets import TEXT

NAMES = ("bounds", "attention", "jacobian", "attack")
FULL = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),  # of the host
)


def job(samples=8, **run):
    """All measures of the demo on a few samples, of one layer."""
    plan = AuditOptions(quick=True, attack="fgsm").plan(demo=True)
    for name in ("bounds", "attention"):
        plan[name] = plan[name].model_copy(update={"layers": (1,)})
    return prepare(Request("demo", plan, RunOptions(samples=samples, **run)))


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_halved_until_they_fit_and_nothing_is_measured_twice(monkeypatch, name):
    """No more than three samples fit: five are tried, then two at a time."""
    asked = job(5, dtype="float64", batch_size=5)
    options = {name: asked.request.measures[name]}
    asked = replace(asked, counts={name: 5}, request=replace(asked.request, measures=options))
    whole, sizes = execute(asked), []
    measure = load_measures()[name]

    def parts(net, batches, options):
        for part in measure.compute(
            net, ProcessBatches(batches.first, fit(batches, options)), options
        ):
            sizes.append(len(part.ids))
            yield part

    def fit(batches, options):
        for batch in batches:
            if min(len(batch), getattr(options, "batch_size", None) or 5) > 3:
                raise FULL[name == "jacobian"]
            yield batch

    replace_parts(monkeypatch, name, parts)
    cut = execute(asked)
    assert sizes == ([5] if measure.chunk else [2, 2, 1])
    for before, after in zip(whole.sections, cut.sections, strict=True):
        for one, other in zip(before.rows, after.rows, strict=True):
            for key in one.keys() - {"seconds"}:
                value = one[key]
                assert other[key] == (
                    pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                ), key


PASSES_OF_SURVEY = 5


class Conversions(TorchDispatchMode):
    """Counts the entries of bfloat16 that are copied to float32."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[1].dtype == torch.bfloat16:
            self.entries += args[1].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["attention", "bounds"])
def test_weights_are_lifted_once_for_a_survey_and_once_for_a_batch(tmp_path, name):
    module = LlamaForCausalLM(LlamaConfig(**TEXT)).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    with Conversions() as lifted:
        measure(str(tmp_path), name, weights="stored", samples=6, max_tokens=8, batch_size=2)
    passes = lifted.entries / sum(p.numel() for p in module.parameters())
    assert passes == pytest.approx(PASSES_OF_SURVEY + 3, rel=0.3)
