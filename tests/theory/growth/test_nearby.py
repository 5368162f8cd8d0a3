"""The ascent in a ball around X against dense Jacobians and the slope of their norm."""

import pytest
import torch

from lipaudit.theory.exact.head_norms import head_norms
from lipaudit.theory.growth.ascent import ball_norm

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


def test_larger_balls_hold_larger_norms(random_layer):
    heads = random_layer("biases").heads
    norms = [head_norms(heads, seeds=[0, 1], tol=1e-9).norm]
    norms += [ball_norm(heads, r, seeds=[0, 1]) for r in (0.01, 0.1, 1.0)]
    assert (torch.stack(norms).diff(dim=0) > 0).all()


def test_each_sample_and_head_is_searched_on_its_own(random_layer):
    heads = random_layer("padding").heads
    together = ball_norm(heads, 0.1, seeds=[3, 4])
    for b in range(2):
        alone = ball_norm(heads.row(b).pick(slice(1, 2)), 0.1, seeds=[3, 4])
        torch.testing.assert_close(alone, together[b : b + 1, 1:2])


def test_heads_that_are_not_affine_have_none(random_layer):
    heads = random_layer("rotary").heads
    assert ball_norm(heads, 0.1, seeds=[0, 1]).isnan().all()
