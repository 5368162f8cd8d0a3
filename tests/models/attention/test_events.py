"""Recognising attention calls and linear maps, op by op."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipaudit.models.attention.calls import AttentionCall, Explicit, Fused, Linear, make_additive
from lipaudit.models.attention.events import READERS, AttentionMode

GENERATOR = torch.Generator().manual_seed(0)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).requires_grad_()


def calls_of(forward) -> list[AttentionCall]:
    found: list[AttentionCall] = []

    with AttentionMode(lambda call, _: found.append(call)):
        forward()
    return found


def compute_probabilities(call: AttentionCall) -> torch.Tensor:
    """Return P as a call defines it, in plain operations."""
    if isinstance(call.form, Explicit):
        return call.form.p
    logits = call.form.scale * (call.q @ call.k.mT)
    if call.form.mask is not None:
        logits = logits + make_additive(call.form.mask, logits.dtype)
    if call.form.causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
    p = torch.softmax(logits, -1)
    # A row without keys: softmax gives NaN, the fused op zero.
    return p if call.form.mask is None else p.masked_fill(logits.isneginf().all(-1, True), 0.0)


MASK = torch.tensor([[True, True, False, True, False]]).expand(4, 5)
NOTHING_SEEN = MASK & (torch.arange(4) != 2)[:, None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"is_causal": True},
        {"attn_mask": MASK},
        {"attn_mask": NOTHING_SEEN},
        {"attn_mask": rows(1, 1, 4, 5).detach()},
    ],
)
def test_fused_calls(options):
    q, k, v = rows(2, 4, 4, 8), rows(2, 4, 5, 8), rows(2, 4, 5, 6)
    (call,) = calls_of(lambda: F.scaled_dot_product_attention(q, k, v, **options))
    assert isinstance(call.form, Fused)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(call.output, want)
    torch.testing.assert_close(compute_probabilities(call) @ call.v, want)


def tokens_first(q, k, v):
    q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))
    p = (torch.einsum("ibhd,jbhd->ijbh", q, k) * 0.5).permute(2, 3, 0, 1).softmax(-1)
    return torch.einsum("bhij,jbhc->bhic", p, v)


def by_hand_as_functions(q, k, v):
    e = torch.exp(torch.matmul(q, k.mT) * 0.5)
    return torch.matmul(torch.div(e, torch.sum(e, dim=-1).unsqueeze(-1)), v)


def transposed(q, k, v):
    return (v.mT @ (q @ k.mT * 0.5).softmax(dim=-1).mT).mT


@pytest.mark.parametrize("attend", [tokens_first, transposed, by_hand_as_functions])
def test_written_out_softmax(attend):
    """Spellings that no own module has."""
    q, k, v = rows(2, 3, 4, 6), rows(2, 3, 5, 6), rows(2, 3, 5, 7)
    (call,) = calls_of(lambda: attend(q, k, v))
    p = (q @ k.mT * 0.5).softmax(-1)
    torch.testing.assert_close(compute_probabilities(call).reshape(p.shape), p)
    torch.testing.assert_close(call.q.reshape(q.shape), q)
    torch.testing.assert_close(call.k.reshape(k.shape), k)
    torch.testing.assert_close(call.v.reshape(v.shape), v)
    output = call.output.mT if call.transposed else call.output
    torch.testing.assert_close(output.reshape(2, 3, 4, 7), p @ v)


# --- linear maps

WEIGHT = nn.Parameter(torch.randn(6, 8, generator=GENERATOR), requires_grad=False)
BIAS = torch.randn(6, generator=GENERATOR)
KERNEL = nn.Parameter(torch.randn(6, 4, 1, 1, generator=GENERATOR), requires_grad=False)
PER_HEAD = nn.Parameter(torch.randn(8, 3, 2, generator=GENERATOR), requires_grad=False)


def linear_maps(func, args, kwargs) -> list[Linear]:
    """Every way to read an op as a linear map."""
    read = (each.read() for each in READERS[func](*args, **kwargs)) if func in READERS else ()
    return [linear for linear in read if linear is not None]


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (F.linear, (torch.ones(2, 5, 8), WEIGHT, BIAS), {}),
        (F.linear, (), {"input": torch.ones(2, 5, 8), "weight": WEIGHT}),
        (torch.addmm, (BIAS, torch.ones(5, 8), WEIGHT.T), {}),
        (F.conv2d, (torch.ones(2, 8, 3, 3), WEIGHT[:, :, None, None], BIAS), {}),
        (F.conv2d, (torch.ones(2, 8, 3, 3), KERNEL, BIAS, 1, 0, 1, 2), {}),
        (F.conv1d, (torch.ones(2, 8, 3), WEIGHT[:, :, None]), {"padding": "same"}),
        (torch.Tensor.__matmul__, (torch.ones(2, 5, 8), WEIGHT.T), {}),
        (torch.einsum, ("bnd,ed->bne", torch.ones(2, 5, 8), WEIGHT), {}),
        (torch.einsum, ("bnd,dhc->bnhc", torch.ones(2, 5, 8), PER_HEAD), {}),
        (torch.einsum, ("bnd,dhc->bhnc", torch.ones(2, 5, 8), PER_HEAD), {}),
        (torch.einsum, ("bnd,ed->ben", torch.ones(2, 5, 8), WEIGHT), {}),
        (torch.einsum, ("bndh,dhc->bhnc", torch.ones(2, 5, 8, 3), PER_HEAD), {}),
        (torch.matmul, (torch.ones(2, 1, 5, 8), PER_HEAD.movedim(1, 0)), {}),
        (torch.matmul, (torch.ones(2, 3, 5, 8), PER_HEAD.movedim(1, 0)), {}),
        (torch.bmm, (torch.ones(2, 5, 8), WEIGHT.T.expand(2, -1, -1)), {}),
        (torch.tensordot, (torch.ones(2, 5, 8), WEIGHT.T, 1), {}),
    ],
)
def test_linear_maps_are_recognised(func, args, kwargs):
    args = [
        torch.rand_like(a) if isinstance(a, torch.Tensor) and (a == 1).all() else a for a in args
    ]
    (linear, *_) = linear_maps(func, args, kwargs)
    y = linear.outputs(func(*args, **kwargs))
    bias = 0 if linear.bias is None else linear.bias
    torch.testing.assert_close(linear.inputs @ linear.weight + bias, y)


def test_a_weight_may_stand_on_the_left():
    weight, x = torch.randn(6, 8), torch.randn(2, 8, 5)
    linear = linear_maps(torch.matmul, (weight, x), {})[-1]
    torch.testing.assert_close(linear.inputs @ linear.weight, linear.outputs(weight @ x))


def test_learned_queries_are_no_weight():
    """They have heads in common with the keys."""
    maps = READERS[torch.matmul](torch.randn(3, 1, 4), torch.randn(2, 3, 4, 5))
    assert [each.op for each in maps] == ["linear"]


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (F.conv2d, (torch.ones(2, 8, 3, 3), WEIGHT[:, :, None, None], BIAS, 2)),
        (F.conv2d, (torch.ones(2, 8, 3, 3), WEIGHT[:, :, None, None], BIAS, 1, 1)),
        (F.conv2d, (torch.ones(2, 8, 3, 3), torch.ones(6, 8, 3, 3))),
        (torch.relu, (torch.ones(3),)),
    ],
)
def test_other_ops_are_not(func, args):
    assert not linear_maps(func, args, {})
