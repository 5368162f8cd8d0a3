"""Our loops beside the package's own, from the same draws: the same points, with fewer passes."""

import logging
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_projections import projection_l2, projection_linf
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from lipaudit.attacks.autoattack import CLEAR, step_onto
from lipaudit.attacks.balls import Ball, distance, random_start
from lipaudit.attacks.evaluate import Chunk, evaluate_chunk
from lipaudit.attacks.kinds import ATTACKS
from lipaudit.attacks.oracle import Turn, margins
from lipaudit.attacks.plan import Attack, read_plan

pytestmark = pytest.mark.rounding

NORMS = {"linf": "Linf", "l2": "L2"}
BALLS = pytest.mark.parametrize("ball", [Ball("linf", 0.08), Ball("l2", 0.5)], ids=NORMS.get)
MUTE = logging.Logger("pyautoattack", logging.CRITICAL)


class Counted:
    """A model that counts the samples it is given."""

    def __init__(self, model):
        self.model, self.samples = model, 0

    def __call__(self, x):
        self.samples += len(x)
        return self.model(x)


def turn_of(attack, x, ball, number=0):
    generator = torch.Generator().manual_seed(3)
    return Turn(attack, number, generator, lambda: random_start(x, ball, generator))


def drawn(attack, x, ball):
    """The seed and the start that a turn draws."""
    turn = turn_of(attack, x, ball)
    return int(torch.randint(2**62, (1,), generator=turn.generator)), turn.start()


@pytest.fixture
def dtype(name, monkeypatch):
    """Float64, also where the package would round to float32.

    A step follows the sign of a gradient, which float32 turns where the gradient is small. Square
    takes no gradient, and draws in float32.
    """
    if name == "square":
        yield torch.float32
        return
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield torch.float64
    torch.set_default_dtype(torch.float32)


def package(f, x: Tensor, y: Tensor, ball: Ball, attack: Attack) -> tuple[Tensor, Tensor]:
    """What the package ends at, and which samples it left standing."""
    how = {"norm": NORMS[ball.norm], "eps": ball.eps, "device": "cpu"}
    number, start = drawn(attack, x, ball)
    if attack.name == "square":
        run = SquareAttack(f, n_queries=attack.queries, resc_schedule=False, **how)
        run.init_hyperparam(x)
        torch.manual_seed(number)
        z = run.attack_single_run(x, y)[1]
        return z, margins(f(z), y) > 0
    if attack.name == "fab-t":
        run = FABAttack_PT(f, n_iter=attack.steps, **how)
        run.target_class = 2
        z = run.attack_single_run(x, y, is_targeted=True)
        return z, (f(z).argmax(1) == y) | (distance(z, x, ball.norm) > ball.eps)
    if attack.name == "apgd-t":
        run = APGDAttack_targeted(f, n_iter=attack.steps, logger=MUTE, **how)
        run.y_target = f(x).sort(dim=1)[1][:, -2]
    else:
        loss = attack.name.removeprefix("apgd-")
        run = APGDAttack(f, n_iter=attack.steps, loss=loss, logger=MUTE, **how)
    run.init_hyperparam(x)
    highest, stands, _, _ = run.attack_single_run(x, y, x_init=start)
    return highest, stands


@BALLS
@pytest.mark.parametrize("model", ["conv", "attention"])
@pytest.mark.parametrize("name", ["apgd-ce", "apgd-dlr", "apgd-t", "fab-t", "square"])
def test_the_same_draws_leave_the_same_samples_at_the_same_points(
    digits, name, model, ball, dtype
):
    f, attack = Counted(deepcopy(getattr(digits, model)).to(dtype)), Attack(name, 40, queries=300)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        right = f(digits.x.to(dtype)).argmax(1) == digits.y
        x, y = digits.x[right].to(dtype), digits.y[right]
        f.samples = 0
        theirs, stands = package(f, x, y, ball, attack)
        f.model.zero_grad(set_to_none=True)
        asked, f.samples = f.samples, 0
        ours = ATTACKS[name].load()(f, x, y, ball, turn_of(attack, x, ball))
        fewer = f.samples
        inside = distance(ours, x, ball.norm) <= ball.eps + 1e-6
        assert inside.all()
        assert torch.equal(f(ours).argmax(1) == y, stands)
    assert 0 < int(stands.sum()) < len(y)
    if name == "fab-t":
        found = ~stands
        torch.testing.assert_close(ours[found], theirs[found], rtol=0, atol=1e-4)
    else:
        torch.testing.assert_close(ours[stands], theirs[stands], rtol=0, atol=1e-6)
    assert fewer < asked or (name, ball.norm) == ("square", "l2")


@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t"])
def test_a_broken_sample_leaves_and_is_broken_whatever_the_rounding(digits, name):
    """With twice the steps it costs no more; its margin is clear of what rounding may change."""
    ball, (x, y) = Ball("linf", 0.3), (digits.x[:16], digits.y[:16])
    f = Counted(digits.conv)
    asked = []
    for steps in (60, 120):
        f.samples = 0
        z = ATTACKS[name].load()(f, x, y, ball, turn_of(Attack(name, steps=steps), x, ball))
        asked.append(f.samples)
        logits = digits.conv(z)
        assert (margins(logits, y) < -0.9 * CLEAR * logits.abs().amax(1)).all()
    assert asked[0] == asked[1] < 16 * 30


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ["apgd-t", "fab-t"])
def test_turns_that_share_a_batch_leave_what_one_after_the_other_leaves(
    linear, radius, monkeypatch, name, norm
):
    model, x, y = linear(6, dtype=torch.float64)
    eps = float(model.reach(x, y, norm).median())
    plan = read_plan(
        f"custom:{name}", norm=norm, radii=[radius(f"{eps:.12f}")], steps=10, restarts=2
    )
    calls = Counted(model)
    together = list(evaluate_chunk(calls, Chunk(0, x, y), plan))[-1]
    monkeypatch.setitem(ATTACKS, name, replace(ATTACKS[name], together=False))
    apart = list(evaluate_chunk(model, Chunk(0, x, y), plan))[-1]
    assert torch.equal(together.robust, apart.robust)
    assert 0 < int(apart.robust.sum()) < int(apart.tried.sum())
    torch.testing.assert_close(together.x_adv[apart.robust], apart.x_adv[apart.robust])


def test_turns_share_a_batch_where_few_samples_are_left(digits, radius):
    sizes = []

    def f(x):
        sizes.append(len(x))
        return digits.conv(x)

    plan = read_plan("custom:fab-t", radii=[radius("0.01")], steps=3)
    stands = list(evaluate_chunk(f, Chunk(0, digits.x[:5], digits.y[:5]), plan))[-1].robust
    assert stands.all()
    assert max(sizes) == 9 * 5
    assert sum(sizes) == 5 * (2 + 9 * (3 * 2 + 1))


@pytest.mark.parametrize(("norm", "project"), [("linf", projection_linf), ("l2", projection_l2)])
def test_the_step_onto_a_hyperplane_is_the_least_one(norm, project):
    """The package's own, from one sort; ours solves the same equation, in the same box."""
    draw = torch.Generator().manual_seed(0)
    points = torch.rand(40, 30, generator=draw)
    points[:, :8] = points[:, :8].round()
    slopes = torch.randn(40, 30, generator=draw)
    slopes[:, 10:14] = 0
    values = torch.randn(40, generator=draw) * torch.logspace(-3, 1.3, 40)
    theirs = project(points, slopes, (slopes * points).sum(1) - values)
    ours = step_onto(points, slopes, values, norm)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    left = values + (slopes * ours).sum(1)
    reached = left.abs() < 1e-4
    assert 0 < int(reached.sum()) < 40
    moved = (points + ours)[~reached]
    assert ((moved * (1 - moved)).abs() < 1e-6)[slopes[~reached] != 0].all()
    assert not step_onto(points[:2], torch.zeros(2, 30), values[:2], norm).any()


def test_square_asks_nothing_twice(digits):
    """A row whose changes were all refused is asked no more, however many queries are left."""
    x, y = digits.x[:6], digits.y[:6]
    ball, answered, f = Ball("linf", 0.03), [], Counted(digits.conv)
    for queries in (3000, 6000):
        f.samples = 0
        attack = Attack("square", queries=queries)
        z = ATTACKS["square"].load()(f, x, y, ball, turn_of(attack, x, ball))
        assert (digits.conv(z).argmax(1) == y).all()
        answered.append(f.samples)
    assert answered[1] < 1.1 * answered[0] < 0.4 * 6 * 3000
