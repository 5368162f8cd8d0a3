"""Every bound against the dense Jacobian by autograd, for every kind of head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipaudit.theory import sharp
from lipaudit.theory.bounds import BOUNDS, affine_only, head_bounds
from lipaudit.theory.sharp import (
    affine_query_term,
    affine_rows,
    centred,
    exact_blocks,
    nonnegative_norm,
    spectral_norm,
)

AFFINE = ("hu", "castin", "mean_field", "appendix_c")


@pytest.fixture(params=[0, sharp.SMALL], ids=["formula", "small"])
def _both_ways(request, monkeypatch):
    """Small layers take exact block norms: go through the formula too."""
    monkeypatch.setattr(sharp, "SMALL", request.param)


@pytest.mark.usefixtures("_both_ways")
def test_every_bound_is_above_the_exact_norm(layer):
    exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
    found = head_bounds(layer.heads)
    for name in BOUNDS:
        there = ~found[name].isnan()
        assert (found[name] >= exact)[there].all(), name
    assert (found["sharp"] <= found["theorem3"]).all()
    assert (found["theorem3"] <= found["theorem3_g1"] * (1 + 1e-12)).all()


def test_bounds_for_affine_heads_are_missing_elsewhere_and_only_there(layer):
    found = head_bounds(layer.heads)
    for name in AFFINE:
        assert found[name].isnan().all() == (affine_only(layer.heads) is not None), name


@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 10**6), gain=st.sampled_from([0.1, 1.0, 5.0, 20.0]))
def test_bounds_hold_for_random_weights_of_any_size(random_layer, seed, gain):
    for name in ("biases", "causal", "position-bias", "qk-norm", "cross-attention"):
        layer = random_layer(name, seed=seed, gain=gain)
        exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
        found = head_bounds(layer.heads)
        for bound in BOUNDS:
            there = ~found[bound].isnan()
            assert (found[bound] >= exact * (1 - 1e-12))[there].all(), (name, bound)


def test_ingredients_are_what_they_are_called(random_layer):
    heads = random_layer("affine").heads
    found = head_bounds(heads)
    p = heads.attention()
    jacobians = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    torch.testing.assert_close(found["p_norm"], torch.linalg.matrix_norm(p, 2), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        found["softmax_norm_max"], torch.linalg.matrix_norm(jacobians, 2).amax(-1)
    )
    torch.testing.assert_close(found["x_norm"][:, 0], torch.linalg.matrix_norm(heads.x, 2))
    torch.testing.assert_close(found["radius"][:, 0], heads.x.norm(dim=-1).amax(-1))


def test_one_token_is_bounded_by_its_value_map(random_layer):
    heads = random_layer("affine", n=1).heads
    wv = torch.linalg.matrix_norm(heads.to_v.weight, 2).expand(2, -1)
    torch.testing.assert_close(head_bounds(heads)["sharp"], wv)


def test_hu_is_above_theorem_3_for_tokens_of_size_one_or_more(random_layer):
    for seed in range(5):
        layer = random_layer("affine", seed=seed)
        found = head_bounds(layer.heads)
        assert (layer.heads.x.flatten(1).norm(dim=1) >= 1).all()
        assert (found["hu"] >= found["theorem3"]).all()


def test_hu_is_not_given_where_it_does_not_hold(random_layer):
    heads = random_layer("affine").heads
    tiny = type(heads)(**{**vars(heads), "x": heads.x * 1e-6})
    assert head_bounds(tiny)["hu"].isnan().all()


def test_the_certificate_of_a_nonnegative_matrix_is_an_upper_bound():
    b = torch.rand(20, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b[:, 3] = 0
    exact = torch.linalg.matrix_norm(b, 2)
    for steps in (0, 3, 10):
        assert (nonnegative_norm(b, steps) >= exact * (1 - 1e-14)).all()
    assert (nonnegative_norm(b, 10) <= exact * 1.003).all()


def test_the_formula_bounds_every_block(random_layer):
    heads = random_layer("biases").heads
    at = centred(heads)
    rows = affine_rows(heads, at)
    blocks = at.p * sharp._affine_beta(at, rows) + torch.diag_embed(
        affine_query_term(heads, at, rows)
    )
    assert (blocks >= exact_blocks(heads) * (1 - 1e-12)).all()


def test_the_query_term_is_the_frobenius_norm(random_layer):
    heads = random_layer("biases").heads
    at = centred(heads)
    p, v, k = heads.attention(), heads.v, heads.k
    c = p[..., None] * (v[:, :, None] - (p @ v)[:, :, :, None])
    t = torch.einsum("bhija,bhjd->bhiad", c, k) @ heads.to_q.weight.mT[:, None]
    truth = heads.scale[..., None] * torch.linalg.matrix_norm(t)
    found = affine_query_term(heads, at, affine_rows(heads, at))
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-9)


def test_the_spectral_norm_is_that_of_the_svd():
    a = torch.randn(3, 4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(spectral_norm(a), torch.linalg.matrix_norm(a, 2))
