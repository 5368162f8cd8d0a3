"""The ingredient of Appendix C against singular values, in both precisions."""

from dataclasses import replace

import pytest
import torch

from lipaudit.theory import ingredients
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.policy import POLICY, Policy
from lipaudit.theory.spectral import keeps_single

N, D = 24, 10
SINGLE = Policy(single_keys=1)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_squared_spread_lies_between_its_bounds(spread, outlier, dtype):
    p, x = maps_and_tokens(spread, outlier)
    values = dense_spread(p, x)
    gram = x @ x.mT
    unit = gram.diagonal(0, -2, -1).amax(-1)[:, None]
    upper, lower = ingredients.squared_spread(p.to(dtype), (gram / unit[..., None]).to(dtype))
    truth = values.pow(4).sum(-1).sqrt().amax(-1) / unit
    assert (lower <= truth).all()
    assert (truth <= upper).all()


@pytest.mark.parametrize("outlier", [1.0, 100.0])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 50.0])
def test_single_precision_costs_no_more_than_its_tolerance(spread, outlier):
    p, x = maps_and_tokens(spread, outlier)
    double = ingredients.bound_token_spread(as_centred(p), x @ x.mT)
    single = ingredients.bound_token_spread(as_centred(p), x @ x.mT, SINGLE)
    assert (single >= dense_spread(p, x)[..., 0].amax(-1) * (1 - 1e-12)).all()
    assert (single <= double * (1 + POLICY.single_loss)).all()


def test_single_precision_is_left_alone_where_products_may_be_rounded_further():
    p, x = maps_and_tokens(1.0, 1.0)
    single = ingredients.bound_token_spread(as_centred(p), x @ x.mT, SINGLE)
    with torch.autocast("cpu"):
        double = ingredients.bound_token_spread(as_centred(p), x @ x.mT, SINGLE)
    assert (double < single).all()


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
