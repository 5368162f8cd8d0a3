"""Worst-case tokens, weighted configurations and fits against dense Jacobians."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipaudit.theory.products import dense_jacobian
from lipaudit.wings.growth.worst_tokens import (
    Adversary,
    adversary,
    duplicated_norm,
    mean_field_norm,
    move_heads,
    power_law,
    weighted_norm,
)
from tests.theory.cases import growing_head


def random_head(seed, *, biases=True, **how):
    return growing_head(seed, **({"width": 5, "dv": 2} | how), biased="qkv" if biases else "")


def copied(heads, counts):
    """The dense Jacobian where each token is there several times."""
    return dense_jacobian(move_heads(heads, heads.x.repeat_interleave(counts, 1)))[0, 0]


def norm(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


seeds = st.integers(0, 2**31)


@settings(max_examples=25, deadline=None)
@given(seeds, st.lists(st.integers(1, 4), min_size=2, max_size=4), st.booleans())
def test_the_norm_of_a_sequence_with_copies(seed, counts, biases):
    heads = random_head(seed, n=len(counts), biases=biases)
    counts = torch.tensor(counts)
    found = float(duplicated_norm(heads, counts.double()))
    assert found == pytest.approx(norm(copied(heads, counts)), rel=1e-10)


@settings(max_examples=25, deadline=None)
@given(seeds, st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_the_mean_field_constant_moves_copies_together(seed, counts):
    heads, counts = random_head(seed, n=len(counts)), torch.tensor(counts)
    spread = torch.eye(len(counts), dtype=torch.float64).repeat_interleave(counts, 0)
    spread = spread / counts.double().sqrt()  # orthonormal: x_i over its copies
    full = copied(heads, counts)
    into = torch.kron(spread, torch.eye(heads.x.shape[2]).double())
    out = torch.kron(spread, torch.eye(heads.v.shape[3]).double())
    together = norm(out.T @ full @ into)
    for weights in (counts.double(), counts.double() / 7):
        assert float(weighted_norm(heads, weights)) == pytest.approx(together, rel=1e-10)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_worst_case_tokens_are_an_eigenvector_with_the_gap_that_n_max_says(sign, biases):
    heads = random_head(3, biases=biases, gain=2.0)
    maps = replace(heads.to_k, weight=sign * heads.to_q.weight)  # A is definite
    heads = move_heads(replace(heads, to_k=maps), heads.x)
    worst = adversary(heads)
    assert (worst.lead, worst.follow) == ((1, 0.5) if sign == 1 else (-1, 1))
    wq, wk = heads.to_q.weight[0], heads.to_k.weight[0]
    a = float(heads.scale[0, 0]) * wk @ wq.T
    torch.testing.assert_close(a @ worst.u, worst.eigenvalue * worst.u)
    # At n = n_max the first token holds half of the attention of the others.
    radius = worst.radius(101.0)
    p = move_heads(heads, worst.tokens(101, radius)).attention()[0, 0]
    assert float(p[5, 0]) == pytest.approx(0.5, abs=1e-9)
    assert worst.n_max(radius) == pytest.approx(101.0)


@pytest.mark.parametrize("eigenvalue", [1.0, 1e-9, 1e-18, -1e-18])
def test_the_radius_of_a_small_eigenvalue_is_that_of_the_bias(eigenvalue):
    """2 gamma R^2 + tilt R = log(n_max - 1), also where the first term is far below the second."""
    lead, follow = (1.0, 0.5) if eigenvalue > 0 else (-1.0, 1.0)
    worst = Adversary(torch.ones(1), eigenvalue, lead, follow, tilt=2.0)
    for n_max in (3.0, 1e6):
        assert worst.n_max(worst.radius(n_max)) == pytest.approx(n_max, rel=1e-9)


def worst_norms(heads, worst, radius, lengths):
    at = move_heads(heads, worst.points(radius))
    counts = [torch.tensor([1.0, n - 1.0], dtype=torch.float64) for n in lengths]
    return [float(duplicated_norm(at, c)) for c in counts]


@pytest.mark.parametrize("seed", range(6))
def test_the_worst_case_grows_like_root_n_then_peaks_and_falls(seed):
    heads = random_head(seed, width=8, d=4, dv=4, biases=seed % 2 == 1)
    worst = adversary(heads)
    large = worst.radius(1e30)
    lengths = torch.logspace(1.5, 12, 12, dtype=torch.float64).round()
    fit = power_law(lengths, torch.tensor(worst_norms(heads, worst, large, lengths.tolist())))
    assert fit.exponent == pytest.approx(0.5, abs=0.05)
    small = worst.radius(1e4)
    far = worst_norms(heads, worst, small, (1e7, 1e8))
    near = max(worst_norms(heads, worst, small, (1e4, 2e4, 4e4)))
    assert near > worst_norms(heads, worst, small, (1e3,))[0]
    assert near > far[0] > far[1]


def test_the_mean_field_norm_is_the_plateau_over_all_multiplicities():
    heads = random_head(5, gain=2.0)
    worst = adversary(heads)
    radius = worst.radius(300.0)
    top, at = mean_field_norm(heads, worst, radius)
    points = move_heads(heads, worst.points(radius))
    weights = torch.logspace(-2, 6, 400, dtype=torch.float64)
    each = [float(weighted_norm(points, torch.tensor([1.0, w]).double())) for w in weights]
    assert top == pytest.approx(max(each), rel=1e-3)
    assert float(weights[int(np.argmax(each))]) == pytest.approx(at, rel=0.05)


def test_power_laws_are_ordinary_least_squares():
    gen = torch.Generator().manual_seed(0)
    n = torch.tensor([8.0, 8, 16, 16, 32, 32, 64, 64], dtype=torch.float64)
    noise = 0.05 * torch.randn(8, generator=gen, dtype=torch.float64)
    norms = 2 * n**0.3 * noise.exp()
    fit, (x, y) = power_law(n, norms), (n.log().numpy(), norms.log().numpy())
    (slope, level), spread = np.polyfit(x, y, 1, cov=True)
    assert fit.exponent == pytest.approx(slope)
    assert fit.exponent_se == pytest.approx(spread[0, 0] ** 0.5)
    assert fit.constant == pytest.approx(math.exp(level))
    assert fit.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)
    few = power_law(n[[0, 2]], norms[[0, 2]])  # two points say nothing of an error
    assert math.isnan(few.exponent_se)
    for points in ([0], [0, 0, 0]):
        assert math.isnan(power_law(n[points], norms[points]).exponent)
    level = power_law(n, n / n)
    assert math.isnan(level.r2)
    assert level.exponent_se == pytest.approx(0, abs=1e-12)
    waves = (-1.0) ** torch.arange(len(n), dtype=torch.float64)
    close = power_law(n, n.sqrt() * (1 + 1e-10 * waves)).exponent_se
    assert 1e-12 < close < 1e-9


@pytest.mark.parametrize("name", ["rotary", "softcap", "relative", "sink"])
def test_only_affine_heads_with_plain_logits_have_worst_case_tokens(random_layer, name):
    heads = random_layer(name).heads.row(0).pick(slice(0, 1))
    for ask in (adversary, lambda heads: move_heads(heads, heads.x)):
        with pytest.raises(ValueError, match="affine"):
            ask(heads)
