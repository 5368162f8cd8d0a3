"""Nothing but W_V has a scale: every norm and bound scales with it, exactly."""

from dataclasses import replace

import pytest
import torch

from lipaudit.theory.ball import ball_sharp, ball_size_bounds
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.head_bounds import head_bounds
from lipaudit.theory.head_norms import head_norms, layer_norms, splitting_gain
from lipaudit.theory.heads import unit_values

KINDS = ("affine", "biases", "causal", "rotary", "all-norm", "cross-attention", "padding")
POWERS = (-30, -12, 12, 30)  # of ten
BITS = (-100, -40, 40, 100)  # of two


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


@pytest.mark.parametrize("name", KINDS)
def test_bounds_scale_with_each_heads_values(random_layer, policy, name):
    heads = random_layer(name).heads.to(torch.float32)
    plain = head_bounds(replace(heads, policy=policy))
    for power in BITS:  # one head beside an ordinary one
        bounds = head_bounds(replace(scaled(heads, (2.0**power, 1.0)), policy=policy))
        for bound in load_bounds():
            want = plain[bound] * torch.tensor([2.0**power, 1.0], dtype=torch.float64)
            torch.testing.assert_close(bounds[bound], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [-1000, 530])
@pytest.mark.parametrize("name", ["affine", "biases", "cross-attention"])
def test_values_near_the_ends_of_float64_scale_too(random_layer, policy, name, bits):
    """Squares of W_V would vanish or overflow: weights are measured in its own unit."""
    layer, factor = random_layer(name), 2.0**bits
    plain = replace(layer.heads, policy=policy)
    each = [
        head_bounds(heads) | {"ball": ball_sharp(heads, 0.1)} | ball_size_bounds(heads, 0.1)
        for heads in (plain, scaled(plain, (factor, factor)))
    ]
    exact = torch.linalg.matrix_norm(layer.jacobian(), 2)
    for name in ("ball", *load_bounds()):
        usual, found = (bounds[name] for bounds in each)
        torch.testing.assert_close(found, factor * usual, rtol=0, atol=0, equal_nan=True)
        assert (found.isnan() | (found >= factor * exact)).all()


@pytest.mark.parametrize("name", KINDS)
def test_norms_scale_with_each_heads_values(random_layer, name):
    layer = random_layer(name)
    heads, exact = layer.heads.to(torch.float32), torch.linalg.matrix_norm(layer.jacobian(), 2)
    for power in POWERS:
        norms = head_norms(scaled(heads, (10.0**power, 1.0)), seeds=[0, 1], tol=1e-6)
        want = exact * torch.tensor([10.0**power, 1.0], dtype=torch.float64)
        torch.testing.assert_close(norms.norm, want, rtol=2e-5, atol=0)
        assert norms.converged.all()


@pytest.mark.parametrize("name", ["affine", "biases", "rotary", "cross-attention"])
def test_norms_of_layers_scale_with_the_values(random_layer, name):
    layer = random_layer(name)
    heads = layer.heads.to(torch.float32)
    exact, through = (
        torch.linalg.matrix_norm(layer.layer_jacobian(out=out), 2) for out in (False, True)
    )
    for power in POWERS:
        factor = 10.0**power
        both = layer_norms(scaled(heads, (factor, factor)), seeds=[0, 1], tol=1e-6)
        torch.testing.assert_close(both.concat.norm, factor * exact, rtol=2e-5, atol=0)
        torch.testing.assert_close(both.out.norm, factor * through, rtol=2e-5, atol=0)
        # The same W_V W_O,h in another way: the size of the values moves to W_O.
        moved = replace(scaled(heads, (factor, 1.0)), out=heads.out.clone())
        moved.out[0] /= factor
        same = layer_norms(moved, seeds=[0, 1], tol=1e-6)
        torch.testing.assert_close(same.out.norm, through, rtol=2e-5, atol=0)


@pytest.mark.parametrize("power", POWERS)
def test_the_gain_of_splitting_has_no_scale(random_layer, power):
    heads = random_layer("affine").heads.to(torch.float32)
    plain = splitting_gain(heads, head_norms(heads, seeds=[0, 1]).norm, seeds=[0, 1])
    small = scaled(heads, (10.0**power, 1.0))
    gain = splitting_gain(small, head_norms(small, seeds=[0, 1]).norm, seeds=[0, 1])
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
