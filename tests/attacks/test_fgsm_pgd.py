import pytest
import torch

from lipaudit.attacks.balls import Ball, distance, random_start
from lipaudit.attacks.oracle import fgsm, margins, pgd


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


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_fgsm_breaks_a_linear_model_of_two_classes_exactly_within_reach(linear, norm):
    model, x, y = linear(2, (1, 5, 5), samples=60)
    reach = model.reach(x, y, norm)
    eps = float(reach[reach > 0].median())
    broken = margins(model(fgsm(model, x, y, Ball(norm, eps * 1.001))), y) < 0
    assert torch.equal(broken, reach < eps * 1.001)
    assert 0 < int(broken.sum()) < 60


@pytest.mark.parametrize("norm", ["linf", "l2", "token-l2"])
def test_pgd_on_a_linear_model_reaches_the_optimum(linear, norm):
    model, x, y = linear(2, (3, 5), dtype=torch.float64)
    ball = Ball(norm, 0.1)
    start = random_start(x, ball, torch.Generator().manual_seed(0))
    z = pgd(model, x, y, ball, start=start, steps=40, step_size=0.1)
    dual = {
        "linf": lambda d: d.abs().sum(),
        "l2": lambda d: d.norm(),
        "token-l2": lambda d: d.reshape(3, 5).norm(dim=1).sum(),
    }[norm](model.w[1] - model.w[0])
    torch.testing.assert_close(
        margins(model(z), y), margins(model(x), y) - 0.1 * dual, rtol=1e-6, atol=1e-6
    )


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
