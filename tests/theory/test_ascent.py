"""The ascent in a small ball against the gradient of a head's norm."""

import math
from dataclasses import replace

import pytest
import torch

from lipaudit.errors import UsageError
from lipaudit.theory.ascent import ball_norm
from tests.theory.cases import affine_layer

AFFINE = ("affine", "biases", "causal", "position-bias", "padding", "windows")
AFFINE += ("learned-query-same-length", "one-token")


def slope(layer, b, h):
    """The length of the gradient of ||J|| of a head, by plain autograd."""
    x = layer.heads.x[b].detach().requires_grad_()
    size = layer.heads.q.shape[2] * layer.heads.v.shape[3]
    jacobian = torch.autograd.functional.jacobian(
        lambda z: layer.output(b, h, z, z), x, create_graph=True
    )
    norm = torch.linalg.matrix_norm(jacobian.reshape(size, -1), 2)
    (gradient,) = torch.autograd.grad(norm, x)
    return float(norm.detach()), float(gradient.norm())


@pytest.mark.parametrize("name", AFFINE)
def test_a_small_ball_holds_what_the_gradient_promises(random_layer, name):
    r, layer = 1e-3, random_layer(name)
    found = ball_norm(layer.heads, r, seeds=[0, 1])
    for b, h in [(0, 0), (1, 1)]:
        norm, steepest = slope(layer, b, h)
        assert float(found[b, h]) == pytest.approx(norm + r * steepest, rel=1e-4)


def test_queries_that_see_no_key_change_nothing(random_layer):
    # Padding on the left under a causal mask: padded queries see padded keys alone.
    heads = random_layer("causal", n=5).heads
    bias = torch.zeros(1, 1, 1, 5, dtype=torch.float64)
    bias[..., :2] = -torch.inf
    valid = torch.tensor([[False, False, True, True, True]]).expand(2, -1)
    padded = replace(heads, x=heads.x * valid[..., None], bias=bias, valid=valid)
    rows = {name: getattr(heads, name)[:, :, 2:] for name in "qkv"}
    short = affine_layer(replace(heads, x=heads.x[:, 2:], **rows))
    found = ball_norm(padded, 1e-3, seeds=[0, 1])
    for b, h in [(0, 0), (1, 1)]:
        norm, steepest = slope(short, b, h)
        assert float(found[b, h]) == pytest.approx(norm + 1e-3 * steepest, rel=1e-4)


@pytest.mark.parametrize("r", [-1.0, math.nan])
def test_a_negative_radius_is_refused(random_layer, r):
    with pytest.raises(UsageError, match="0 or more"):
        ball_norm(random_layer("affine").heads, r, seeds=[0, 1])


def test_heads_that_are_not_affine_have_none(random_layer):
    heads = random_layer("rotary").heads
    assert ball_norm(heads, 0.1, seeds=[0, 1]).isnan().all()
