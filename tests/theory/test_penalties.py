"""The penalties by hand, at their edges, and their gradients."""

import math

import pytest
import torch

from lipaudit.theory.penalties import EPS, jasmin, jasmin_rows, specformer


def maps(*shape: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(*shape, dtype=torch.float64, generator=generator)).softmax(-1)


def by_hand(row: torch.Tensor, k: int) -> float:
    p = [*sorted(row.tolist(), reverse=True), 0.0]
    g = [p[i] * (1 - p[i] + p[i + 1]) for i in range(len(p) - 1)]
    return math.log(max(g[0], EPS)) - (math.log(g[k - 1] + EPS) if k else 0.0)


@pytest.mark.parametrize("k", [0, 2, 3])
@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_the_penalty_is_the_formula(k, reduction):
    p = maps(2, 3, 4, 5)
    reduce = {"max": max, "mean": lambda rows: sum(rows) / len(rows)}[reduction]
    total = sum(reduce([by_hand(row, k) for row in p[b, h]]) for b in range(2) for h in range(3))
    assert float(jasmin(p, k=k, reduction=reduction)) == pytest.approx(total / 2, rel=1e-12)


def test_rows_that_do_not_count_change_nothing():
    p = maps(2, 2, 4, 6)
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    wild = torch.where(mask[:, None, :, None], p, maps(2, 2, 4, 6, spread=9.0, seed=1))
    padded = p * mask[:, None, :, None]
    for reduction in ("max", "mean"):
        plain = jasmin(p, k=3, reduction=reduction, mask=mask)
        torch.testing.assert_close(jasmin(wild, k=3, reduction=reduction, mask=mask), plain)
        torch.testing.assert_close(jasmin(padded, k=3, reduction=reduction), plain)
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    assert jasmin(p, mask=nothing) == 0


@pytest.mark.parametrize("k", [2, 3, 5])
def test_known_rows(k):
    equal = torch.zeros(12, dtype=torch.float64)
    equal[: k + 1] = 1 / (k + 1)
    assert abs(float(jasmin_rows(equal, k)[0])) < EPS * (k + 1) ** 2
    uniform = torch.zeros(12, dtype=torch.float64)
    uniform[:k] = 1 / k
    assert float(jasmin_rows(uniform, k)[0]) == pytest.approx(math.log(k / (k - 1)), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 2, 10])
@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_one_hot_and_causal_rows_are_finite(dtype, k, reduction):
    logits = torch.zeros(1, 2, 6, 6, dtype=dtype, requires_grad=True)
    hot = torch.zeros(6, 6, dtype=dtype)
    hot[:3].fill_diagonal_(1e4)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    p = (logits + hot).masked_fill(future, -torch.inf).softmax(-1)
    value = jasmin(p, k=k, reduction=reduction)
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_short_rows_are_left_out_of_ratios():
    p = torch.ones(6, 6, dtype=torch.float64).tril()
    p /= p.sum(-1, keepdim=True)
    assert jasmin_rows(p, 3)[1].tolist() == [False, False, False, True, True, True]
    assert jasmin_rows(p, 0)[1].all()


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_gradients_of_jasmin(k, reduction):
    logits = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda t: jasmin(t.softmax(-1), k=k, reduction=reduction), logits
    )


def test_k_is_zero_or_more_than_one():
    for k in (1, -1):
        with pytest.raises(ValueError, match="more than 1"):
            jasmin(maps(1, 1, 2, 3), k=k)


def test_specformer_is_the_squared_norm_of_every_head():
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(20, 4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = whole.transpose(0, 1)
    exact = torch.linalg.matrix_norm(weight, 2).square().sum()
    vector = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    for _ in range(200):
        value, vector = specformer(weight, vector)
    torch.testing.assert_close(value, exact, rtol=1e-3, atol=0)
    gradients = [torch.autograd.grad(v, whole)[0] for v in (value, exact)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-3)
