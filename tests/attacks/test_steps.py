"""Steps of attacks: balls, what asks the model for gradients, FGSM and PGD in closed form."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lipaudit.attacks.balls import Ball, check_inside, distance, project, random_start, steepest
from lipaudit.attacks.oracle import (
    ByRow,
    Meter,
    Oracle,
    fgsm,
    logits_and_gradient,
    logits_of,
    margins,
    pgd,
)
from lipaudit.errors import EvaluationError
from lipaudit.models import model_norms
from lipaudit.models.linearize import linearize

NORMS = ["linf", "l2", "l1", "token-l2"]
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
    for z in (x, torch.randn_like(x)):
        assert torch.equal(project(z, x, Ball(norm, 0.0)), x)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_steepest_direction_maximises_the_inner_product(norm, scale):
    """Whatever the scale of the gradient."""
    gradient, ball = torch.randn(4, 3, 6, dtype=torch.float64), Ball(norm, 1.0, None)
    step = steepest(gradient * scale, ball)
    dual = {
        "linf": gradient.abs().flatten(1).sum(1),
        "l2": gradient.flatten(1).norm(dim=1),
        "l1": gradient.flatten(1).abs().amax(1),
        "token-l2": gradient.norm(dim=-1).sum(1),
    }[norm]
    torch.testing.assert_close((gradient * step).flatten(1).sum(1), dual)
    lengths = distance(step, torch.zeros_like(gradient), norm)
    torch.testing.assert_close(lengths, torch.ones(4, dtype=torch.float64))
    single = steepest(gradient.float() * scale, ball)
    torch.testing.assert_close(single, step.float(), rtol=1e-5, atol=1e-6)
    assert not steepest(torch.zeros(2, 3, 4), ball).any()


def test_the_distance_of_tokens_is_that_of_the_farthest():
    delta = torch.tensor([[[3.0, 4.0], [0.0, -6.0]]])
    assert distance(delta, torch.zeros_like(delta), "token-l2").item() == 6.0


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
    cube, sphere = (
        random_start(x, Ball(norm, 0.1), torch.Generator().manual_seed(0)) for norm in NORMS[:2]
    )
    assert (cube - x).std().item() == pytest.approx(0.2 / math.sqrt(12), rel=0.03)
    assert (cube - x).mean().abs() < 0.002
    torch.testing.assert_close(distance(sphere, x, "l2"), torch.full((500,), 0.1))


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return net


@pytest.fixture
def x():
    return torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def oracle_on(f, n, size, meter=None):
    return Oracle(f, torch.arange(n), size, meter or Meter())


@pytest.mark.parametrize("size", [1, 4, 9, 64])
def test_gradients_through_the_pieces_are_those_of_autograd(model, x, size):
    """And backward leaves the parameters alone."""
    weight = torch.randn(9, 3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((model(leaf) * weight).sum(), leaf)
    other = x.clone().requires_grad_()
    logits = oracle_on(model, 9, size)(other)
    (logits * weight).sum().backward()
    torch.testing.assert_close(logits, model(x))
    torch.testing.assert_close(other.grad, expected)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("size", "calls"), [(1, [1] * 9), (4, [4, 4, 1]), (64, [9])])
def test_passes_count_samples_and_calls_keep_to_the_device_batch(model, x, size, calls):
    sizes, meter = [], Meter()

    def f(z):
        sizes.append(len(z))
        return model(z)

    oracle = oracle_on(f, 9, size, meter)
    oracle(x)
    logits_and_gradient(oracle, x, torch.zeros(9, dtype=torch.int64))
    assert (meter.forwards, meter.backwards) == (18, 9)
    assert sizes == 2 * calls  # forward and backward at once: no forward pass is repeated


def test_a_model_by_row_is_told_which_rows_it_gets(x):
    rows = torch.tensor([4, 7, 8])
    shift = torch.arange(9, dtype=torch.float64)[:, None]
    by_row = ByRow(lambda z, r: z[:, :2] + shift[r])
    found = Oracle(by_row, rows, 2)(x[rows])
    torch.testing.assert_close(found, x[rows, :2] + shift[rows])


def test_logits_may_be_overwritten_and_an_output_without_gradient_has_gradient_zero(x):
    kept, y = torch.randn(9, 3), torch.zeros(9, dtype=torch.int64)
    logits, before = oracle_on(lambda _: kept, 9, 64)(x), kept.clone()
    logits[:] = 0
    assert torch.equal(kept, before)
    for f in (lambda z: z.round()[:, :2].detach(), lambda _: torch.randn(9, 2).requires_grad_()):
        for g in (f, oracle_on(f, 9, 64)):
            assert not logits_and_gradient(g, x, y)[1].any()


def test_the_gradient_is_that_of_each_samples_own_loss(model, x):
    y = torch.tensor([0, 1, 2] * 3)
    logits, gradient = logits_and_gradient(model, x, y)
    for i in range(9):
        leaf = x[i : i + 1].clone().requires_grad_()
        F.cross_entropy(model(leaf), y[i : i + 1]).backward()
        torch.testing.assert_close(gradient[i : i + 1], leaf.grad)
    torch.testing.assert_close(logits, model(x))
    model.zero_grad(set_to_none=True)


def test_logits_are_found_in_what_a_model_returns():
    logits = torch.randn(2, 3)
    for output in (logits, SimpleNamespace(logits=logits), (logits, None)):
        assert logits_of(output) is logits
    for output in (torch.randn(2, 3, 4), {"scores": 1}, None):
        with pytest.raises(EvaluationError, match="an attack needs logits"):
            logits_of(output)


def test_a_margin_is_the_same_to_attacks_and_to_radii():
    """One word, one thing: f_y - max over the others, here and in the section `jacobian`."""
    weight, y = torch.randn(5, 7, dtype=torch.float64), torch.tensor([0, 3, 4, 2])

    def f(z, _rows=None):
        return z @ weight.T

    x = torch.randn(4, 7, dtype=torch.float64)
    assert torch.equal(margins(f(x), y) > 0, f(x).argmax(1) == y)
    torch.testing.assert_close(
        margins(f(x), y), model_norms.compute_margins(linearize(f, x), y, rivals=4).margin
    )


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 4, 6), (2, 3, 4, 5)])
def test_fgsm_on_a_linear_model_is_the_closed_form(linear, classes, shape):
    model, x, y = linear(classes, shape, dtype=torch.float64)
    p = model(x).softmax(1)
    gradient = ((p - torch.eye(classes)[y]) @ model.w).reshape(x.shape)
    torch.testing.assert_close(fgsm(model, x, y, Ball("linf", 0.1)), x + 0.1 * gradient.sign())
    unit = gradient / gradient.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
    torch.testing.assert_close(fgsm(model, x, y, Ball("l2", 0.3)), x + 0.3 * unit)
    if len(shape) == 2:
        unit = gradient / gradient.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(fgsm(model, x, y, Ball("token-l2", 0.3)), x + 0.3 * unit)


@pytest.mark.parametrize("norm", NORMS)
def test_pgd_on_a_linear_model_reaches_the_optimum(linear, norm):
    model, x, y = linear(2, (3, 5), dtype=torch.float64)
    ball = Ball(norm, 0.1)
    start = random_start(x, ball, torch.Generator().manual_seed(0))
    z = pgd(model, x, y, ball, start=start, steps=40, step_size=0.1)
    dual = {
        "linf": lambda d: d.abs().sum(),
        "l2": lambda d: d.norm(),
        "l1": lambda d: d.abs().max(),
        "token-l2": lambda d: d.reshape(3, 5).norm(dim=1).sum(),
    }[norm](model.w[1] - model.w[0])
    torch.testing.assert_close(
        margins(model(z), y), margins(model(x), y) - 0.1 * dual, rtol=1e-6, atol=1e-6
    )


def test_in_l1_pgd_fills_one_pixel_after_the_other_to_the_edge_of_the_box():
    """Slopes 4, 3, 2, 1 from 0.5: to gain 3.9 it takes 0.5 of two pixels, and 0.2 of the third."""
    slopes, x, y = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.full((1, 4), 0.5), torch.tensor([0])

    def f(z):
        return torch.stack([torch.full((len(z),), 3.9), (z - 0.5) @ slopes], 1)

    for eps, robust in ((1.18, True), (1.22, False)):
        z = pgd(f, x, y, Ball("l1", eps, (0.0, 1.0)), start=x, steps=200)
        assert bool(margins(f(z), y) > 0) == robust


def test_in_l1_the_rounding_of_a_large_image_is_that_of_the_pixels_that_moved():
    x, ball = torch.full((1, 3, 224, 224), 0.5), Ball("l1", 12.0, (0.0, 1.0))
    z = x.clone()
    z[0, 0, 0, :24] = 1.0
    assert torch.equal(check_inside(z, x, ball, "mine"), z)
    z[0, 0, 0, 24] = 0.6
    with pytest.raises(EvaluationError, match="left the ball or the box on 1 samples, by up to"):
        check_inside(z, x, ball, "mine")


def test_pgd_returns_an_iterate_that_succeeded_on_the_way():
    """Wrong only on a thin shell: the last iterate has walked through it."""

    def f(z):
        shell = 1 - 100 * (z.sum(1) - 0.5).abs()
        return torch.stack([torch.zeros_like(shell), z.sum(1) + 10 * shell.clamp_min(0) - 5], 1)

    x, y = torch.full((1, 1), 0.1), torch.tensor([0])
    z = pgd(f, x, y, Ball("linf", 0.8), start=x, steps=8, step_size=0.1)
    assert margins(f(z), y) < 0
    assert z.item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_pgd_finds_on_two_pixels_what_brute_force_finds(norm):
    generator = torch.Generator().manual_seed(3)
    inner = 8 * torch.randn(2, 16, generator=generator, dtype=torch.float64)
    outer = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    phase = 4 * torch.randn(16, generator=generator, dtype=torch.float64)

    def f(z):
        return torch.sin(z @ inner + phase) @ outer

    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    y = f(x).argmax(1)
    ball = Ball(norm, 0.05)
    z = x
    for _ in range(5):
        start = random_start(x, ball, generator)
        new = pgd(f, x, y, ball, start=start, steps=30)
        better = margins(f(new), y) < margins(f(z), y)
        z = torch.where(better[:, None], new, z)

    line = torch.linspace(-0.05, 0.05, 121, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    grid = grid[grid.norm(dim=1) <= 0.05] if norm == "l2" else grid
    points = x[:, None] + grid
    outside = ((points < 0) | (points > 1)).any(-1)
    worst = margins(f(points.flatten(0, 1)), y.repeat_interleave(len(grid))).reshape(60, -1)
    worst = worst.masked_fill(outside, torch.inf).amin(1)

    broken = margins(f(z), y) < 0
    assert torch.equal(broken, worst < 0)
    assert 10 < int(broken.sum()) < 50
    assert (distance(z, x, norm) <= 0.05 + 1e-12).all()
