"""The estimate of what the rounding of the forward pass moves a norm by, against that move."""

from dataclasses import replace

import pytest
import torch

from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.head_norms import bound_error, forward_error, head_norms
from lipaudit.theory.heads import affine_heads
from lipaudit.theory.products import dense_jacobian, head_products

GAINS = (1.0, 30.0, 300.0, 3e3, 3e4)


def some_heads(seed: int, gain: float, tokens: str = "plain"):
    """The same heads computed in single precision and in double."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 12, 16, generator=generator)
    near = torch.arange(12) % 2 * (1 - 1e-5)
    x = {
        "plain": x,
        "twins": x + near[:, None] * (x[:, torch.arange(12) // 2 * 2] - x),  # pairs, but for 1e-5
        "doubled": x[:, torch.arange(12) // 2],
        "constant": x[:, torch.zeros(12, dtype=torch.long)],
        "tiny": 1e-6 * x,
        "huge": 1e3 * x,
    }[tokens]
    wq, wk, wv = torch.randn(3, 2, 16, 8, generator=generator) / 4
    single = affine_heads(x, gain * wq, wk, wv)
    return single, affine_heads(x.double(), gain * wq.double(), wk.double(), wv.double())


def norms(heads):
    return torch.linalg.matrix_norm(dense_jacobian(heads.to(torch.float64)), 2)


@pytest.mark.parametrize("gain", GAINS)
def test_rounding_moves_norms_by_no_more_than_estimated(gain):
    for seed in range(5):
        single, double = some_heads(seed, gain)
        moved = (norms(single) / norms(double) - 1).abs()
        assert (moved <= forward_error(single)).all()


def test_giant_entries_of_a_bias_count_and_masks_do_not():
    single, _ = some_heads(0, 1.0)
    bias = torch.zeros(1, 1, 12, 12)
    assert (forward_error(replace(single, bias=bias + 5e3)) > 1e-4).all()
    for mask in (-torch.inf, -1e4, torch.finfo(torch.float32).min):
        masked = replace(single, bias=bias + torch.full((12, 12), 1.0).triu(1) * mask)
        masked = replace(masked, bias=masked.bias.nan_to_num(0.0, neginf=mask))
        assert (forward_error(masked) < 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_logits_are_too_large_to_count(dtype):
    """A mask that is made from the tokens may have entries of 1e22, as large as its largest."""
    heads, bias = some_heads(0, 1.0)[dtype == torch.float64], torch.full((1, 1, 12, 12), 1e22)
    assert (forward_error(replace(heads, bias=bias.to(dtype))) == 1).all()


@pytest.mark.parametrize(
    ("gain", "tokens"), [*((gain, "plain") for gain in (*GAINS, 1e6)), (1e6, "twins")]
)
def test_exact_norms_are_those_of_the_rounded_heads(gain, tokens):
    """Where single precision cannot tell P, or twins apart, double makes the iteration again."""
    for seed in range(5):
        single, _ = some_heads(seed, gain, tokens)
        exact = head_norms(single, seeds=[0, 1], within=1e-4)
        assert exact.converged.all()
        torch.testing.assert_close(exact.norm, norms(single), rtol=1e-4, atol=0)


@pytest.mark.parametrize("gain", [1.0, 1e2, 1e4, 1e7])
@pytest.mark.parametrize("tokens", ["plain", "doubled", "constant", "tiny", "huge"])
def test_products_are_off_by_no_more_than_derived(gain, tokens):
    """In single precision beside double, from the same q, k, v and P."""
    single, _ = some_heads(3, gain, tokens)
    double = single.to(torch.float64)
    double._maps[torch.float64] = single.attention().double()
    u = torch.randn(4, 12 * 8, generator=torch.Generator().manual_seed(4))
    u = u / torch.linalg.vector_norm(u, dim=1, keepdim=True)
    truth = torch.linalg.vector_norm(
        torch.einsum("px,pxy->py", u.double(), dense_jacobian(double).flatten(0, 1)), dim=1
    )
    computed = head_products(single).pulled_norm(u).double()
    allowed = bound_error(single, truth.view(2, 2).float()).flatten()
    assert ((computed - truth).abs() <= allowed).all()


@pytest.mark.parametrize("gain", [1e2, 1e4, 1e7, 1e12])
def test_rows_that_are_one_hot_cost_norms_no_digits(gain):
    """P is the identity but for 1e-30: ||J|| is ||W_V||, whatever the size of the logits."""
    x = torch.eye(6, dtype=torch.float64)[None] + 1e-3
    generator = torch.Generator().manual_seed(5)
    root = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    wv = torch.randn(1, 6, 4, generator=generator, dtype=torch.float64)
    heads = affine_heads(x, gain * root[None], root[None], wv)
    exact, truth = head_norms(heads, seeds=[0]).norm, torch.linalg.matrix_norm(wv, 2)
    slack = bound_error(heads, exact)
    assert heads.attention().amax(-1).amin() > 1 - 1e-12
    torch.testing.assert_close(exact, truth[None], rtol=1e-11, atol=0)
    assert (slack < 1e-10 * exact).all()
    assert (head_bounds(heads)["sharp"] >= exact - slack).all()
