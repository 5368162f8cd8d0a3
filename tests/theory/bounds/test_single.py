"""Single precision in the ingredients of bounds: never too small, and given up where it costs."""

from dataclasses import replace

import pytest
import torch

from lipaudit.theory import ingredients
from lipaudit.theory.block_norms import affine_rows, query_term
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.heads import affine_heads, unit_values
from lipaudit.theory.ingredients import Ingredients, Tokens
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.products import dense_jacobian
from lipaudit.theory.spectral import keeps_single

DOUBLE = 1e-6  # what double precision loses itself
GAINS = [0.1, 1.0, 5.0, 20.0]  # one-hot rows at the end, where differences cancel
POWER_STEPS = 1e-4  # what ten of them leave differs between matrices that differ by rounding
NAMES = ["affine", "biases", "causal", "position-bias", "padding", "cross-attention"]


def both(heads):
    """The ingredients of a layer in both precisions."""
    heads = unit_values(heads)[0]
    known = Ingredients(heads, Tokens(heads))
    at, rows = known.at, affine_rows(known)
    return (at, rows), (at.single, rows.single)


SINGLE = Policy(dense_entries=0, single_keys=1, single_blocks=1)
DOUBLE_ONLY = Policy(dense_entries=0, single_keys=10**6, single_blocks=10**6)


def sharp(heads, policy):
    return head_bounds(replace(heads, policy=policy))["sharp"]


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("name", NAMES)
def test_single_precision_bounds_both_sides_and_loses_no_more_than_its_tolerance(
    random_layer, name, gain
):
    for seed in range(5):
        heads = random_layer(name, seed=seed, gain=gain).heads
        double, single = both(heads)
        t, gap = query_term(*single)
        exact_t = query_term(*double)[0]
        assert t.dtype == torch.float32
        assert (t >= exact_t * (1 - DOUBLE)).all()
        assert (t - gap <= exact_t * (1 + DOUBLE)).all()
    single, double = (sharp(heads, policy) for policy in (SINGLE, DOUBLE_ONLY))
    assert (single <= double * (1 + POLICY.single_loss + POWER_STEPS)).all()


def test_double_precision_takes_over_where_single_costs_too_much(random_layer):
    heads = random_layer("biases", n=9).heads
    double = sharp(heads, DOUBLE_ONLY)
    assert (sharp(heads, SINGLE) != double).any()
    given_up = sharp(heads, replace(SINGLE, single_loss=0.0))
    torch.testing.assert_close(given_up, double, rtol=1e-12, atol=0)


def test_a_nearly_singular_key_projection_keeps_its_images(random_layer):
    """The bound on balls divides by ||u_i||: a norm that is only an upper bound will not do."""
    heads = random_layer("affine").heads
    weight = heads.to_k.weight * torch.tensor([1.0, 1.0, 1e-8], dtype=torch.float64)
    weak = replace(heads, to_k=replace(heads.to_k, weight=weight), k=heads.x[:, None] @ weight)
    weak = replace(weak, q=heads.q * torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    u = torch.linalg.vector_norm(weak.scale[..., None, None] * weak.q @ weight.mT, dim=-1)
    images = affine_rows(Ingredients(weak, Tokens(weak))).u[..., 0]
    torch.testing.assert_close(images, u, rtol=1e-6, atol=0)


@pytest.mark.parametrize("channels", [1, 2000])
def test_the_allowance_of_the_query_term_covers_sums_over_query_channels(channels):
    """kappa = z z^T sums d terms, which may be far more than the d_v of the values."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 4, generator=gen, dtype=torch.float64)
    weights = (torch.randn(1, 4, d, generator=gen).double() for d in (channels, channels, 1))
    _, (at, rows) = both(affine_heads(x, *weights))
    t, gap = (end.double() for end in query_term(at, rows))
    worst = channels * torch.finfo(torch.float32).eps / 2  # gamma_d, for positive terms attained
    assert (t.square() - (t - gap).square() >= 2 * worst * t.square()).all()


@pytest.mark.parametrize("size", [1e12, 1e16, 1e22])
def test_what_moves_constant_values_hardly_is_no_zero_in_single_precision(random_layer, size):
    """Nothing moves through them, and squares of what keys and queries move are beyond float32."""
    heads = random_layer("affine").heads
    keys = replace(heads.to_k, weight=heads.to_k.weight / size)
    heads = replace(heads, to_v=None, to_k=keys, k=heads.k / size, to_q=None)
    exact = torch.linalg.matrix_norm(dense_jacobian(heads), 2)
    assert (sharp(heads, SINGLE) >= exact * (1 - DOUBLE)).all()


# The ingredient of Appendix C against singular values.

N, D = 24, 10
KEYS = Policy(single_keys=1)


def maps_and_tokens(spread, outlier):
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, N, N, dtype=torch.float64, generator=gen)
    x = torch.randn(2, N, D, dtype=torch.float64, generator=gen)
    x[:, 0] *= outlier
    return (spread * logits).softmax(-1), x - x.mean(1, keepdim=True)


def as_centred(p):
    rows, one = p[..., :0], p[..., :1]
    return ingredients.Centred(p, seen=one, k=rows, v=rows, o=rows, s=one[..., :1, :])


def dense_spread(p, x):
    m = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    return torch.linalg.svdvals(x[:, None, None].mT @ m)


@pytest.mark.parametrize("outlier", [1.0, 100.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 50.0])
def test_the_spread_lies_between_its_bounds_and_single_precision_costs_little(spread, outlier):
    p, x = maps_and_tokens(spread, outlier)
    values, gram = dense_spread(p, x), x @ x.mT
    unit = gram.diagonal(0, -2, -1).amax(-1)[:, None]
    truth = values.pow(4).sum(-1).sqrt().amax(-1) / unit
    for dtype in (torch.float32, torch.float64):
        upper, lower = ingredients.squared_spread(p.to(dtype), (gram / unit[..., None]).to(dtype))
        assert ((lower <= truth) & (truth <= upper)).all()
    double = ingredients.bound_token_spread(as_centred(p), gram)
    single = ingredients.bound_token_spread(as_centred(p), gram, KEYS)
    assert (single >= values[..., 0].amax(-1) * (1 - 1e-12)).all()
    assert (single <= double * (1 + POLICY.single_loss)).all()
    assert (spread, outlier) != (1.0, 1.0) or (double < single).all()
    with torch.autocast("cpu"):  # which may round products further
        assert torch.equal(ingredients.bound_token_spread(as_centred(p), gram, KEYS), double)


LOWERED = {
    "cpu": lambda: torch.set_float32_matmul_precision("medium"),
    "cuda": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
}


@pytest.mark.parametrize("kind", LOWERED)
def test_the_precision_of_products_is_read(kind):
    device, before = torch.device(kind), torch.get_float32_matmul_precision()
    assert keeps_single(device)
    try:
        LOWERED[kind]()
        assert not keeps_single(device)
    finally:
        torch.set_float32_matmul_precision(before)
    assert keeps_single(device)
    assert not keeps_single(torch.device("meta"))


def test_bounds_do_not_depend_on_how_maps_are_cut(random_layer):
    heads = random_layer("causal", n=7, samples=3).heads
    whole = head_bounds(replace(heads, policy=Policy(dense_entries=0)))
    cut = head_bounds(replace(heads, policy=Policy(dense_entries=0, map_entries=1)))
    for name in load_bounds():
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-9, atol=0)
