"""Single precision in the blocks of affine heads: never too small, and given up where it costs."""

from dataclasses import replace

import pytest
import torch

from lipaudit.theory.block_norms import affine_rows, query_term
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.heads import affine_heads, unit_values
from lipaudit.theory.ingredients import Ingredients, Tokens
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.products import dense_jacobian

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


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("name", NAMES)
def test_single_precision_bounds_both_sides(random_layer, name, gain):
    for seed in range(5):
        double, single = both(random_layer(name, seed=seed, gain=gain).heads)
        t, gap = query_term(*single)
        exact_t = query_term(*double)[0]
        assert t.dtype == torch.float32
        assert (t >= exact_t * (1 - DOUBLE)).all()
        assert (t - gap <= exact_t * (1 + DOUBLE)).all()


SINGLE = Policy(dense_entries=0, single_keys=1, single_blocks=1)
DOUBLE_ONLY = Policy(dense_entries=0, single_keys=10**6, single_blocks=10**6)


def sharp(heads, policy):
    return head_bounds(replace(heads, policy=policy))["sharp"]


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("name", NAMES)
def test_the_bound_loses_no_more_than_its_tolerance(random_layer, name, gain):
    heads = random_layer(name, gain=gain).heads
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
