"""Every bound above the truth, and every norm equal to it, where rounding and ties hide.

Tokens that are constant, doubled, clustered, zero, tiny or huge; uniform, one-hot and tied rows;
values that vanish, have clustered singular values or any scale; masks; both precisions. The truth
is a dense Jacobian in float64 by autograd through attention written out anew.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipaudit.theory.ascent import ball_norm
from lipaudit.theory.ball import ball_sharp
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.head_norms import bound_error, head_norms
from lipaudit.theory.heads import Heads, Projection, affine_heads, unit_values
from lipaudit.theory.products import dense_jacobian

N, WIDTH, HEADS, D = 6, 5, 2, 3
ROUNDING = 1e-9  # of logits up to 3e5, computed in two ways


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def distinct(x: Tensor, groups: Tensor) -> Tensor:
    return x[:, groups]


TOKENS = {
    "random": lambda x: x,
    "constant": lambda x: distinct(x, torch.zeros(N, dtype=torch.long)),
    "doubled": lambda x: distinct(x, torch.arange(N) // 2),
    "tripled": lambda x: distinct(x, torch.arange(N) % 2),
    "clustered": lambda x: distinct(x, torch.arange(N) // 3) + 1e-9 * x,
    "zero": lambda x: 0 * x,
    "one-zero": lambda x: x * (torch.arange(N) > 0)[:, None],
    "tiny": lambda x: 1e-8 * x,
    "huge": lambda x: 1e2 * x,
    "one-huge": lambda x: x * torch.where(torch.arange(N) == 2, 1e2, 1.0)[:, None],
}
VALUES = {
    "random": lambda w: w,
    "zero": lambda w: 0 * w,
    "orthogonal": lambda w: torch.linalg.qr(w).Q,
    "rank-one": lambda w: w[..., :1] @ w[:, :1],
    "small": lambda w: 1e-25 * w,
    "large": lambda w: 1e25 * w,
    "one-small": lambda w: w * torch.tensor([1.0, 1e-25])[:, None, None],
}
MASKS = {
    "none": None,
    "causal": torch.full((N, N), -torch.inf, dtype=torch.float64).triu(1),
    "window": torch.where(
        torch.arange(N) // 3 == (torch.arange(N) // 3)[:, None], 0.0, -torch.inf
    ),
    "own": torch.where(torch.eye(N, dtype=torch.bool), 0.0, -torch.inf),
    "swin": torch.where(torch.arange(N) // 3 == (torch.arange(N) // 3)[:, None], 0.0, -100.0),
    "bias": 3 * randn(99, N, N),
}


def head_output(heads: Heads, h: int, x: Tensor) -> Tensor:
    """Plain attention of one head on the tokens of one sample."""
    q, k, v = (
        x @ p.weight[h] + (0 if p.bias is None else p.bias[h])
        for p in (heads.to_q, heads.to_k, heads.to_v)
    )
    logits = float(heads.scale) * q @ k.T
    logits = logits if heads.bias is None else logits + heads.bias[0, 0]
    return torch.softmax(logits, -1) @ v


def truth(heads: Heads) -> Tensor:
    """||J|| of every head, (batch, heads)."""
    size = (N * heads.v.shape[3], N * heads.x.shape[2])
    return torch.stack(
        [
            torch.stack(
                [
                    dense_norm(
                        torch.autograd.functional.jacobian(
                            lambda z, h=h: head_output(heads, h, z), x, vectorize=True
                        ).reshape(size)
                    )
                    for h in range(HEADS)
                ]
            )
            for x in heads.x
        ]
    )


def dense_norms(j: Tensor) -> Tensor:
    return torch.stack([torch.stack([dense_norm(one) for one in row]) for row in j])


def dense_norm(j: Tensor) -> Tensor:
    largest = j.abs().amax().clamp_min(1e-300)
    return largest * torch.linalg.matrix_norm(j / largest, 2)


def corner(seed: int, tokens: str, values: str, mask: str, *, gain: float, biases: bool) -> Heads:
    """Two heads on two samples, float64 tensors with entries that single precision has."""
    x = TOKENS[tokens](randn(seed, 2, N, WIDTH)).float().double()
    wq, wk, wv = (randn(seed + i, HEADS, WIDTH, D) / WIDTH**0.5 for i in (1, 2, 3))
    wq, wv = gain * wq, VALUES[values](wv).float().double()
    heads = affine_heads(x, wq, wk, wv)
    if biases:
        bias = {"q": randn(seed + 4, HEADS, D), "k": randn(seed + 5, HEADS, D)}
        bias["v"] = wv.abs().amax((1, 2))[:, None] * randn(seed + 6, HEADS, D).float().double()
        to = {n: getattr(heads, f"to_{n}") for n in "qkv"}
        made = {f"to_{n}": Projection(to[n].weight, bias[n], None, "affine") for n in "qkv"}
        rows = {n: getattr(heads, n) + bias[n][:, None] for n in "qkv"}
        heads = replace(heads, **made, **rows)
    return heads if MASKS[mask] is None else replace(heads, bias=MASKS[mask][None, None])


corners = {
    "seed": st.integers(0, 10**6),
    "tokens": st.sampled_from([*TOKENS]),
    "values": st.sampled_from([*VALUES]),
    "mask": st.sampled_from([*MASKS]),
    "gain": st.sampled_from([0.0, 1e-3, 1.0, 30.0]),
    "biases": st.booleans(),
}


@settings(deadline=None, max_examples=60)
@given(**corners)
def test_no_bound_is_below_the_exact_norm(policy, seed, tokens, values, mask, gain, biases):
    heads = corner(seed, tokens, values, mask, gain=gain, biases=biases)
    exact, bounds = truth(heads), head_bounds(replace(heads, policy=policy))
    for name in load_bounds():
        given = ~bounds[name].isnan()
        assert (bounds[name] >= exact * (1 - ROUNDING))[given].all(), name
    assert (bounds["sharp"] <= bounds["theorem3"]).all()


@settings(deadline=None, max_examples=25, derandomize=True)
@given(**corners)
def test_exact_lies_between_its_ends(seed, tokens, values, mask, gain, biases):
    """Not above the truth; and the truth is not above `upper`, but for one start in 1000."""
    heads = corner(seed, tokens, values, mask, gain=gain, biases=biases)
    norm, exact = head_norms(heads, seeds=[seed, seed + 1]), truth(heads)
    assert norm.converged.all()
    assert (norm.norm <= exact * (1 + ROUNDING)).all()
    assert (norm.upper >= exact * (1 - ROUNDING)).all()
    proven = head_norms(heads, seeds=[seed, seed + 1], within=1e-4)
    assert (proven.norm >= exact * (1 - 1e-4)).all()


@settings(deadline=None, max_examples=60)
@given(**corners)
@example(seed=3879, tokens="tiny", values="random", mask="causal", gain=0.0, biases=True)
def test_in_single_precision_too_no_bound_is_below_what_is_called_exact(
    seed, tokens, values, mask, gain, biases
):
    heads = corner(seed, tokens, values, mask, gain=gain, biases=biases).to(torch.float32)
    norm, bounds = head_norms(heads, seeds=[seed, seed + 1]), head_bounds(heads)
    unit, size = unit_values(heads)  # a bias costs values their digits: norms are those without
    exact = size * dense_norms(dense_jacobian(unit.to(torch.float64)))
    assert (norm.norm <= exact * (1 + ROUNDING)).all()
    for name in load_bounds():
        there = ~bounds[name].isnan()
        assert (bounds[name] >= norm.norm * (1 - ROUNDING))[there].all(), name


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_equal_tokens_have_the_norm_of_their_map_at_any_size(size, mask):
    """Where all v_j are equal, so is every o_i: J = P kron W_V^T, whatever the logits (1e13)."""
    x = size * randn(0, 1, 1, 64).expand(1, 40, 64)
    weights = [randn(i, 2, 64, 8) for i in (1, 2, 3)]
    bias = (
        torch.full((40, 40), -torch.inf, dtype=torch.float64).triu(1) if mask == "causal" else None
    )
    heads = replace(affine_heads(x, *weights), bias=None if bias is None else bias[None, None])
    # A product may round some of its rows in another way: here all of them are the same.
    equal = {name: getattr(heads, name)[:, :, :1].expand(-1, -1, 40, -1) for name in "qkv"}
    heads = replace(heads, **equal)
    exact = dense_norms(heads.attention()) * dense_norms(weights[2][None])
    norms, sharp = head_norms(heads, seeds=[0], tol=1e-8), head_bounds(heads)["sharp"]
    for found in (dense_norms(dense_jacobian(heads)), norms.norm):
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=0)
    assert (sharp >= norms.norm).all()
    assert (bound_error(heads, norms.norm) < 1e-8 * exact).all()
    r = 1e-3 * size
    found, limit = ball_norm(heads, r, seeds=[0]), ball_sharp(heads, r, sharp=sharp)
    assert (found <= limit).all()
