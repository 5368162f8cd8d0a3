"""Swapping layers of real models: the layer that was changed is named, and the cost before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lipaudit.api.measuring import measure
from lipaudit.data.batch import Batch
from lipaudit.data.loading import Samples
from lipaudit.engine.attribution import attribute
from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Request, prepare
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.hf.outputs import hf_spec
from lipaudit.models.sources.loading import load_net
from lipaudit.models.sources.spec import LoadOptions, ModelSpec
from lipaudit.settings import JacobianOptions, RunOptions


class Seen(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes, self.moved, self.done = [], [], 0

    def note(self, note):
        self.notes.append(note)

    def begins(self, measure, samples):
        self.begun = (measure, samples, len(self.notes))

    def moves(self, measure, samples):
        self.moved.append(samples)

    def advances(self, measure, samples):
        self.done += samples


def job_of(model="demo", *, net=None, samples=None, count=4, **run):
    options = RunOptions(samples=count, device="cpu", **run)
    request = Request(model, {"jacobian": JacobianOptions()}, options)
    return prepare(request, net=net, samples=samples)


def changed_demo(*parts, by=0.05):
    """The demo with some of its weights a little larger."""
    net = load_net("demo", LoadOptions(device="cpu"))
    with torch.no_grad():
        for name, p in net.module.named_parameters():
            if name.startswith(parts):
                p *= 1 + by
    return net


@pytest.fixture(scope="module")
def demo():
    return job_of()


@pytest.mark.parametrize("grouping", ["layer", "block"])
def test_the_one_layer_that_changed_explains_all_of_it(demo, grouping):
    seen = Seen()
    shown = attribute(demo, changed_demo("blocks.1.mlp"), grouping=grouping, observer=seen)
    (layer,) = shown.layers
    assert layer.layer == {"layer": "blocks.1.mlp", "block": "blocks.1"}[grouping]
    assert shown.same == {"layer": 16, "block": 7}[grouping]
    swapped, undone, change = (shown.values[n].numpy() for n in ("swapped", "undone", "change"))
    assert np.array_equal(swapped[0], change)
    assert np.array_equal(undone[0], change)
    assert abs(change).min() > 0
    assert shown.rest.effect.mean == shown.rest.swapped.mean == 0
    assert layer.moved == pytest.approx(0.05, rel=1e-5)


def test_a_change_that_the_function_does_not_see_has_no_share(demo):
    """A softmax does not see the bias of its keys."""
    other = changed_demo("blocks.1.mlp")
    with torch.no_grad():
        qkv = other.module.blocks[0].attn.qkv
        width = qkv.bias.shape[0] // 3
        qkv.bias[width : 2 * width] += 0.5
    shown = attribute(demo, other)
    names = [layer.layer for layer in shown.layers]
    assert names == ["blocks.0.attn", "blocks.1.mlp"]
    assert abs(shown.layers[0].effect.mean) < 1e-5 * abs(shown.layers[1].effect.mean)


def test_first_order_is_near_for_small_steps(demo):
    shown = attribute(demo, changed_demo("blocks.0", "head", by=1e-3), grouping="block")
    for layer in shown.layers:
        for linear, swap in ((layer.linear_old, layer.swapped), (layer.linear_new, layer.undone)):
            assert linear.mean == pytest.approx(swap.mean, rel=0.02)
    assert abs(shown.rest.effect.mean) < 1e-2 * abs(shown.change.mean)


class Scaled(nn.Module):
    """x -> C (a x): its norm is a |C|, whose logarithm is a sum over both layers."""

    def __init__(self, a: float, c: torch.Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, len(c), bias=False)
        with torch.no_grad():
            self.first.weight.copy_(a * torch.eye(6))
            self.second.weight.copy_(c)

    def forward(self, x):
        return self.second(self.first(x)).flatten(1)


def scaled(a, c):
    spec = ModelSpec(Scaled(a, c), (3, 6), kind="tokens")
    return assemble(spec, LoadOptions(dtype="float64", device="cpu"), name="own", source="py")


def job_of_scaled(c):
    samples = Samples("own", Batch(torch.rand(3, 3, 6), None, ("a1", "b2", "c3")), (), None, ())
    return job_of(net=scaled(1.0, c), samples=samples, count=3, dtype="float64")


def test_a_linear_network_has_its_shares_in_closed_form():
    c = torch.diag(torch.tensor([3.0, 2.0, 1.0, 1.0, 1.0, 1.0]))[:4]
    shown = attribute(job_of_scaled(c), scaled(1.5, 0.25 * c))
    first, second = shown.layers
    assert shown.change.mean == pytest.approx(np.log(1.5 * 0.25))
    assert first.effect.mean == pytest.approx(np.log(1.5))
    assert second.effect.mean == pytest.approx(np.log(0.25))
    assert first.linear_old.mean == pytest.approx(0.5)
    assert first.linear_new.mean == pytest.approx(1 - 1 / 1.5)
    assert first.share + second.share == pytest.approx(1)
    assert shown.rest.effect.mean == pytest.approx(0, abs=1e-9)
    assert (shown.start, shown.target, shown.samples) == ("tokens", "logits", ("a1", "b2", "c3"))


def test_two_singular_values_that_are_alike_are_said():
    """Of three tokens that are mapped alike every singular value is there three times."""
    shown = attribute(job_of_scaled(torch.eye(6)), scaled(1.5, torch.eye(6)))
    (note,) = [note for note in shown.notes if note.code == "small-gap"]
    assert note.text.startswith("in 3 of 3 samples")


def test_a_fault_of_a_mixture_names_what_was_swapped(demo):
    """Two models that are fine may be none together: here attention overflows."""
    other = changed_demo("blocks.0.attn.qkv", "blocks.0.norm1", by=0.0)
    with torch.no_grad():
        other.module.blocks[0].norm1.weight *= 1e30
        other.module.blocks[0].norm1.bias *= 1e30
        other.module.blocks[0].attn.qkv.weight *= 1e-30
    with pytest.raises(EvaluationError, match="demo with blocks.0.norm1 of demo: .* not finite"):
        attribute(demo, other)


def test_where_no_second_derivative_exists_swaps_alone_are_given(demo, monkeypatch):
    def refuse(*_):
        raise InputError("the norm cannot be differentiated in the weights: some operation")

    monkeypatch.setattr("lipaudit.engine.attribution.norm_slopes", refuse)
    shown = attribute(demo, changed_demo("blocks.0"))
    assert {layer.linear_old for layer in shown.layers} == {None}
    assert shown.rest.linear_new is None
    assert [note.code for note in shown.notes] == ["not-linearised"]


def test_a_tied_embedding_is_one_layer_and_moves_the_samples_as_well():
    """Of a language model the table is where samples lie, and the head."""
    import transformers

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 40}

    def net(step):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
            module = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                table = module.transformer.wte.weight
                table += step * torch.randn_like(table)
        options = LoadOptions(device="cpu", dtype="float64")
        return assemble(hf_spec(module, options), options, name="tied", source="hf")

    x = torch.arange(3, 15).view(2, 6)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    samples = Samples(
        "own", Batch(x.masked_fill(~mask, 0), None, ("a1", "b2"), mask), (), None, ()
    )
    job = job_of(net=net(0.0), samples=samples, count=2, dtype="float64")
    shown = attribute(job, net(1e-4))
    (layer,) = shown.layers
    assert (layer.layer, layer.entries) == ("transformer.wte", 40 * 16)
    assert [note.code for note in shown.notes if note.level == "info"] == ["tied"]
    assert shown.start == "embeddings"
    for name in ("linear_old", "linear_new"):
        linear, swapped = shown.values[name].numpy()[0], shown.values["swapped"].numpy()[0]
        assert linear == pytest.approx(swapped, rel=0.05)


def test_all_of_demo_to_robust_is_the_change_that_both_show(demo):
    other = load_net("demo:robust", LoadOptions(device="cpu"))
    before = {n: (t.data_ptr(), t.clone()) for n, t in demo.net.module.state_dict().items()}
    seen = Seen()
    shown = attribute(demo, other, grouping="block", observer=seen)
    for name, value in demo.net.module.state_dict().items():
        assert value.data_ptr() == before[name][0]
        assert torch.equal(value, before[name][1])
    reports = (measure(m, "jacobian", samples=4, device="cpu") for m in ("demo", "demo:robust"))
    old, new = (np.array(r.section("jacobian").samples["norm"]) for r in reports)
    assert shown.values["change"].numpy() == pytest.approx(np.log(new / old), rel=1e-4)
    assert sum(
        layer.effect.mean for layer in shown.layers
    ) + shown.rest.effect.mean == pytest.approx(shown.change.mean)
    assert seen.begun[0] == "attribution"
    assert [n.code for n in seen.notes[: seen.begun[2]]][-1] == "swaps"
    assert "8 of 8 layers differ: 18 norms of 4 samples" in seen.notes[seen.begun[2] - 1].text
    assert seen.moved == sorted(seen.moved)
    assert (seen.moved[-1] < 4, seen.done) == (True, 4)


def test_samples_may_be_cut_into_batches(demo):
    other = changed_demo("blocks.2")
    whole = attribute(demo, other)
    parted = attribute(job_of(batch_size=3), other)
    assert parted.samples == whole.samples
    for name, array in whole.values.items():
        assert parted.values[name].numpy() == pytest.approx(array.numpy(), rel=1e-3, abs=1e-5)


def test_the_same_weights_are_refused(demo):
    with pytest.raises(InputError, match="same weights"):
        attribute(demo, load_net("demo", LoadOptions(device="cpu")))


def test_models_that_differ_in_more_than_weights_are_refused(demo):
    other = changed_demo("blocks.0")
    other.module.blocks[1].norm1.eps = 1.0
    with pytest.raises(InputError, match="differ in more than weights"):
        attribute(demo, other)
