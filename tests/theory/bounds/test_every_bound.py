"""Every bound above the truth, for every kind of head and every hostile one; norms equal to it.

In every way that bounds are computed, and in both precisions. The truth is a dense Jacobian in
float64 by autograd through attention written out anew.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lipaudit.theory import Policy
from lipaudit.theory.ascent import ball_norm
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_bounds import ball_sharp, head_bounds
from lipaudit.theory.head_norms import bound_error, head_norms
from lipaudit.theory.heads import affine_heads, are_affine_everywhere, unit_values
from lipaudit.theory.products import dense_jacobian
from tests.theory.cases import MASKS, POLICIES, TOKENS, VALUES, corner, dense_norms, randn, truth

AFFINE = ("hu", "castin", "mean_field", "appendix_c")  # missing for other heads, and only there
ROUNDING = 1e-9  # of logits up to 3e5, computed in two ways


def test_every_bound_is_above_the_exact_norm(layer):
    exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
    for policy in POLICIES:
        bounds = head_bounds(replace(layer.heads, policy=policy))
        for name in load_bounds():
            there = ~bounds[name].isnan()
            assert (bounds[name] >= exact)[there].all(), (name, policy)
            everywhere = name not in AFFINE or are_affine_everywhere(layer.heads)
            assert (there if everywhere else ~there).all(), name
        assert (bounds["sharp"] <= bounds["theorem3"]).all()
        assert (bounds["theorem3"] <= bounds["theorem3_g1"] * (1 + 1e-12)).all()


LONG = Policy(map_limit=0, chunk_entries=24)
SEEDS = range(10)


def test_bounds_of_maps_that_are_not_kept_hold_and_are_hardly_larger(layer):
    heads = layer.heads
    exact, kept = head_norms(heads, seeds=SEEDS, tol=1e-9).norm, head_bounds(heads)
    met = head_bounds(replace(heads, policy=LONG))
    for name in ("softmax_norm_max", "x_norm", "radius"):
        torch.testing.assert_close(met[name], kept[name], rtol=1e-9, atol=0)
    true = torch.linalg.matrix_norm(heads.attention(), 2)
    assert (met["p_norm"] >= true * (1 - 1e-9)).all()
    assert (met["p_norm"] <= 1.1 * true).all()
    for name in load_bounds():
        there = ~kept[name].isnan()
        assert torch.equal(there, ~met[name].isnan())
        assert (met[name] >= exact * (1 - 1e-9))[there].all()
        if name != "sharp":  # small layers have it exact, longer ones bounded
            assert (met[name] <= 1.1 * kept[name])[there].all()


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
def test_no_bound_is_below_the_exact_norm(seed, tokens, values, mask, gain, biases):
    heads = corner(seed, tokens, values, mask, gain=gain, biases=biases)
    exact = truth(heads)
    for policy in POLICIES:
        bounds = head_bounds(replace(heads, policy=policy))
        for name in load_bounds():
            given = ~bounds[name].isnan()
            assert (bounds[name] >= exact * (1 - ROUNDING))[given].all(), (name, policy)
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
def test_no_bound_is_below_exact_in_single_precision(seed, tokens, values, mask, gain, biases):
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
