"""One visit of a layer: everything that is computed of it shares one attention map."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.head_norms import head_norms, layer_norms, splitting_gain
from lipaudit.theory.heads import Heads, affine_heads

KINDS = ("affine", "padding", "rotary", "causal", "windows", "softcap", "sink-padding")


class Softmaxes(TorchFunctionMode):
    """Counts the softmaxes by precision."""

    def __init__(self):
        super().__init__()
        self.count: Counter[torch.dtype] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.softmax:
            self.count[args[0].dtype] += 1
        return func(*args, **(kwargs or {}))


def visit(heads: Heads):
    """All that the measure `bounds` asks of a layer."""
    seeds = range(int(heads.sample.max()) + 1)
    norms = head_norms(heads, seeds=seeds)
    values = {"exact": norms.norm, "layer": layer_norms(heads, seeds=seeds).concat.norm}
    if not heads.is_causal() and heads.sink is None:
        values["gain"] = splitting_gain(heads, norms.norm, seeds=seeds)
    return values | head_bounds(heads)


@pytest.mark.parametrize("size", [{}, {"n": 40, "width": 30, "d": 6}], ids=["dense", "factored"])
@pytest.mark.parametrize("name", KINDS)
def test_the_map_is_computed_once_in_each_precision(random_layer, name, size):
    heads = random_layer(name, **size).heads.to(torch.float32)
    with Softmaxes() as softmaxes:
        visit(heads)
    assert softmaxes.count == {torch.float32: 1, torch.float64: 1}


@pytest.mark.parametrize("name", KINDS)
def test_a_shared_map_changes_no_number(random_layer, name):
    heads = random_layer(name).heads
    shared, seeds = visit(heads), range(2)
    alone = head_bounds(replace(heads)) | {"exact": head_norms(replace(heads), seeds=seeds).norm}
    for key, value in alone.items():
        torch.testing.assert_close(shared[key], value, rtol=1e-12, atol=0, equal_nan=True)


def test_a_part_of_a_causal_layer_is_not_taken_for_causal(random_layer):
    heads = random_layer("affine").heads
    mask = torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    mask[:, 0] = torch.full((5, 5), -torch.inf).triu(1)
    heads = replace(heads, bias=mask)
    assert not heads.is_causal()
    assert [heads.pick(slice(h, h + 1)).is_causal() for h in (0, 1)] == [True, False]


@pytest.mark.parametrize("change", ["q", "k", "scale", "bias", "sink"])
def test_other_logits_have_another_map(random_layer, change):
    heads = random_layer("sink", position_bias=True).heads
    p = heads.attention()
    other = replace(heads, **{change: 2 * getattr(heads, change)})
    assert not torch.equal(other.attention(), p)
    with pytest.raises(ValueError, match=change):
        heads.with_same_map(**{change: getattr(heads, change)})


def test_what_is_cast_down_does_not_share_the_digits_it_has_lost(random_layer):
    heads = random_layer("affine").heads
    p = heads.attention()
    rounded = heads.to(torch.float32).to(torch.float64).attention()
    assert not torch.equal(rounded, p)
    torch.testing.assert_close(rounded, p, rtol=1e-5, atol=0)


def test_a_known_map_carries_gradients_all_the_same():
    weights = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    heads = affine_heads(x, *weights)
    with torch.no_grad():
        heads.attention()
    with torch.inference_mode():
        heads.attention()
    truth = (4**-0.5 * heads.q @ heads.k.mT).softmax(-1)[..., 0].sum()
    (expected,) = torch.autograd.grad(truth, x, retain_graph=True)
    (gradient,) = torch.autograd.grad(heads.attention()[..., 0].sum(), x)
    torch.testing.assert_close(gradient, expected)
