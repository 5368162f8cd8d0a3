"""The ascent in a small ball against the gradient of a head's norm."""

import pytest
import torch

from lipaudit.theory.ascent import ball_norm

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


def test_heads_that_are_not_affine_have_none(random_layer):
    heads = random_layer("rotary").heads
    assert ball_norm(heads, 0.1, seeds=[0, 1]).isnan().all()
