import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipaudit.attacks.balls import Ball, distance, project, random_start, steepest

NORMS = ["linf", "l2", "token-l2"]
SHAPES = [(2,), (3, 4), (2, 3, 5), (1, 2, 2, 3)]


@st.composite
def problems(draw, box=(0.0, 1.0)):
    """A ball, samples inside the box, and points anywhere."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (5, *draw(st.sampled_from(SHAPES)))
    eps = draw(st.sampled_from([0.0, 1e-4, 2 / 255, 0.3, 2.0]))
    far = draw(st.sampled_from([1e-6, 0.1, 10.0]))
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    z = x + far * torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, z, Ball(draw(st.sampled_from(NORMS)), eps, box)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_projections_and_starts_are_in_the_ball_and_in_the_box(problem):
    x, z, ball = problem
    p, start = project(z, x, ball), random_start(x, ball, torch.Generator().manual_seed(0))
    for point, slack in ((p, 1e-12), (start, 1e-6)):
        assert (distance(point, x, ball.norm) <= ball.eps + slack).all()
        assert 0 <= point.min() <= point.max() <= 1
    torch.testing.assert_close(project(p, x, ball), p, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(problems(box=None), st.integers(0, 2**31))
def test_without_a_box_no_point_of_the_ball_is_nearer(problem, seed):
    x, z, ball = problem
    p = project(z, x, ball)
    other = random_start(x, ball, torch.Generator().manual_seed(seed))
    assert (((p - z).flatten(1) ** 2).sum(1) <= ((other - z).flatten(1) ** 2).sum(1) + 1e-9).all()


@pytest.mark.parametrize("norm", NORMS)
def test_radius_zero_gives_the_sample_back_bit_for_bit(norm):
    x = torch.rand(3, 4, 5)
    assert torch.equal(project(torch.randn_like(x), x, Ball(norm, 0.0)), x)
    assert torch.equal(project(x, x, Ball(norm, 0.0)), x)


@pytest.mark.parametrize("norm", NORMS)
def test_the_steepest_direction_maximises_the_inner_product(norm):
    gradient = torch.randn(4, 3, 6, dtype=torch.float64)
    ball = Ball(norm, 1.0, None)
    best = (gradient * steepest(gradient, ball)).flatten(1).sum(1)
    dual = {
        "linf": gradient.abs().flatten(1).sum(1),
        "l2": gradient.flatten(1).norm(dim=1),
        "token-l2": gradient.norm(dim=-1).sum(1),
    }[norm]
    torch.testing.assert_close(best, dual)
    torch.testing.assert_close(
        distance(steepest(gradient, ball), torch.zeros_like(gradient), norm),
        torch.ones(4, dtype=torch.float64),
    )
    assert not steepest(torch.zeros(2, 3, 4), ball).any()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_direction_does_not_depend_on_the_scale_of_the_gradient(scale):
    gradient = torch.tensor([[3.0, -4.0]])
    step = steepest(gradient * scale, Ball("l2", 1.0))
    torch.testing.assert_close(step, torch.tensor([[0.6, -0.8]]))


def test_distances_are_the_norms_they_are_called():
    delta = torch.tensor([[[3.0, 4.0], [0.0, -6.0]]])
    zero = torch.zeros_like(delta)
    assert distance(delta, zero, "linf").item() == 6.0
    assert distance(delta, zero, "l2").item() == pytest.approx(math.sqrt(61))
    assert distance(delta, zero, "token-l2").item() == 6.0


@pytest.mark.parametrize("norm", NORMS)
def test_masked_tokens_stay_and_do_not_use_up_the_budget(norm):
    mask = torch.tensor([[True, True, False]])
    ball = Ball(norm, 0.5, None, mask)
    x, gradient = torch.zeros(1, 3, 4), torch.randn(1, 3, 4)
    z = project(x + 9 * steepest(gradient, ball), x, ball)
    assert not z[0, 2].any()
    assert distance(z, x, norm).item() == pytest.approx(0.5)
    start = random_start(x, ball, torch.Generator().manual_seed(0))
    assert not start[0, 2].any()
    assert torch.equal(ball[torch.tensor([0, 0])].mask, mask[[0, 0]])


def test_starts_fill_the_cube_and_lie_on_the_sphere():
    x = torch.full((500, 10), 0.5)
    cube = random_start(x, Ball("linf", 0.1), torch.Generator().manual_seed(0)) - x
    assert cube.std().item() == pytest.approx(0.2 / math.sqrt(12), rel=0.03)
    assert cube.mean().abs() < 0.002
    sphere = random_start(x, Ball("l2", 0.1), torch.Generator().manual_seed(0))
    torch.testing.assert_close(distance(sphere, x, "l2"), torch.full((500,), 0.1))
