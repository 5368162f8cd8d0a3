"""Nothing but W_V has a scale: every norm and bound scales with it, exactly."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_bounds import ball_sharp, ball_size_bounds, head_bounds
from lipaudit.theory.head_norms import head_norms, layer_norms, splitting_gain
from lipaudit.theory.heads import unit_values
from tests.theory.cases import POLICIES

KINDS = ("affine", "biases", "causal", "rotary", "all-norm", "cross-attention", "padding")
POWERS = (-30, -12, 12, 30)  # of ten
FACTORS = {
    torch.float32: [(2.0**bits, 1.0) for bits in (-100, -40, 40, 100)],  # one head beside another
    torch.float64: [(2.0**bits, 2.0**bits) for bits in (-1000, 530)],  # W_V^2 is 0 or infinite
}


def scaled(heads, factors):
    """W_V of every head, with its bias, times a number of its own."""
    f = torch.tensor(factors, dtype=heads.v.dtype)
    to_v = heads.to_v
    if to_v.local is not None:
        to_v = replace(to_v, local=to_v.local * f[:, None, None, None])
    else:
        bias = None if to_v.bias is None else to_v.bias * f[:, None]
        to_v = replace(to_v, weight=to_v.weight * f[:, None, None], bias=bias)
    return replace(heads, v=heads.v * f[:, None, None], to_v=to_v)


def bounds_of(heads):
    at_x, sizes = head_bounds(heads), ball_size_bounds(heads, 0.1)
    bounds = {name: at_x[name] for name in load_bounds()} | {"ball": ball_sharp(heads, 0.1)}
    return bounds | {f"{name} on a ball": bound for name, bound in sizes.items()}


@pytest.mark.parametrize("name", KINDS)
def test_bounds_scale_with_each_heads_values(random_layer, name):
    layer = random_layer(name)
    exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
    for dtype, policy in product(FACTORS, POLICIES):
        heads = replace(layer.heads.to(dtype), policy=policy)
        usual = bounds_of(heads)
        for factors in FACTORS[dtype]:
            f = torch.tensor(factors, dtype=torch.float64)
            for bound, value in bounds_of(scaled(heads, factors)).items():
                want = f * usual[bound]
                torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True)
                assert dtype is torch.float32 or (value.isnan() | (value >= f * exact)).all()


@pytest.mark.parametrize("name", KINDS)
def test_norms_scale_with_the_values(random_layer, name):
    layer = random_layer(name)
    heads, how = layer.heads.to(torch.float32), {"seeds": [0, 1], "tol": 1e-6}
    exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
    concat, out = (
        torch.linalg.matrix_norm(layer.layer_jacobian(out=each), 2) for each in (False, True)
    )
    for factor in (10.0**power for power in POWERS):
        one = scaled(heads, (factor, 1.0))
        norms, both = head_norms(one, **how), layer_norms(scaled(heads, (factor, factor)), **how)
        # The same W_V W_O,h in another way: the size of the values moves to W_O.
        moved = replace(one, out=heads.out / torch.tensor([factor, 1.0])[:, None, None])
        same = layer_norms(moved, **how).out
        assert norms.converged.all()
        for found, want in (
            (norms.norm, exact * torch.tensor([factor, 1.0]).double()),
            (both.concat.norm, factor * concat),
            (both.out.norm, factor * out),
            (same.norm, out),
        ):
            torch.testing.assert_close(found, want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("power", POWERS)
def test_the_gain_of_splitting_has_no_scale(random_layer, power):
    heads = random_layer("affine").heads.to(torch.float32)
    plain, gain = (
        splitting_gain(each, head_norms(each, seeds=[0, 1]).norm, seeds=[0, 1])
        for each in (heads, scaled(heads, (10.0**power, 1.0)))
    )
    torch.testing.assert_close(gain, plain, rtol=1e-3, atol=0)


def test_a_bias_that_swamps_the_values_costs_them_no_digits(random_layer):
    """b_V drops out of the Jacobian; in single precision 1e-4 of x W_V beside it is rounded."""
    layer = random_layer("biases")
    exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
    swamped = replace(layer.heads.to_v, bias=layer.heads.to_v.bias + 1e4)
    heads = replace(layer.heads, v=layer.heads.v + 1e4, to_v=swamped).to(torch.float32)
    norms = head_norms(heads, seeds=[0, 1], tol=1e-6).norm
    torch.testing.assert_close(norms, exact, rtol=2e-5, atol=0)


def test_powers_of_two_change_no_digit(layer):
    unit, c = unit_values(layer.heads)
    assert torch.equal(unit.v * c[:, None, None], layer.heads.v)
    assert torch.equal(c, 2.0 ** c.log2().round())
