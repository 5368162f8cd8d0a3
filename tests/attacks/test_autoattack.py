"""AutoAttack: closed forms, and the package's own runs from the same draws."""

import logging
import sys
from dataclasses import replace

import pytest
import torch
from pyautoattack import AutoAttack
from pyautoattack.autopgd_base import APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack

from lipaudit.attacks.autoattack import CLEAR, LOSSES, NORMS, find_height
from lipaudit.attacks.balls import Ball, distance, random_start
from lipaudit.attacks.evaluate import Chunk, derive_seed, evaluate_chunk
from lipaudit.attacks.kinds import ATTACKS, STANDARD_L1, adapt, read_plan
from lipaudit.attacks.oracle import margins
from lipaudit.models.sources.timm import load_demo
from lipaudit.tables.trials import parse_radius

NAMES = [name for name, kind in ATTACKS.items() if ".autoattack:" in kind.function]
EACH = pytest.mark.parametrize("name", NAMES)
BALLS = pytest.mark.parametrize(("norm", "eps"), [("linf", "0.08"), ("l2", "0.5"), ("l1", "2")])
MUTE = logging.Logger("pyautoattack", logging.CRITICAL)


class Counted:
    """A model that lists how many samples it is given at a time."""

    def __init__(self, model):
        self.model, self.sizes = model, []

    def __call__(self, x):
        self.sizes.append(len(x))
        return self.model(x)


def run(model, x, y, name, radius, eps, norm="linf", box=(0.0, 1.0), **settings):
    """Return the plan, and the outcomes of the clean samples and of each attack."""
    eps = eps if isinstance(eps, str) else f"{eps:.12f}"
    name = name if name == "standard" else f"custom:{name}"
    plan = read_plan(name, norm=norm, radii=[radius(eps)], **settings)
    return plan, list(evaluate_chunk(model, Chunk(0, x, y), plan, box=box))


@pytest.mark.parametrize("classes", [2, 3, 4, 9, 10])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_ensemble_is_exact_on_a_linear_model(linear, radius, norm, classes):
    """The nearest boundary is known in closed form: what is within reach breaks, and only that."""
    model, x, y = linear(classes, (2, 3, 4), samples=12)
    reach = model.reach(x, y, norm)
    eps = float(reach[reach > 0].median()) * 1.01
    assert ((reach - eps).abs() > 2e-3 * eps).all()
    _, outcomes = run(model, x, y, "standard", radius, eps, norm, steps=12, queries=10)
    assert torch.equal(outcomes[0].robust, reach > 0)
    assert torch.equal(outcomes[-1].robust, reach > eps)
    assert 0 < int(outcomes[-1].robust.sum()) < int(outcomes[0].robust.sum())


@pytest.mark.parametrize("classes", [2, 3, 4, 9, 10, 1000])
@EACH
def test_each_attack_runs_with_any_number_of_classes_or_says_why(linear, radius, name, classes):
    model, x, y = linear(classes)
    eps = float(model.reach(x, y, "linf").max()) * 4
    plan, (clean, outcome) = run(model, x, y, name, radius, eps, box=None, steps=20, queries=200)
    fitted, notes = adapt(plan[0].attacks[0], classes)
    assert outcome.notes == notes
    if fitted.turns == 0:
        assert torch.equal(outcome.robust, clean.robust)
        assert outcome.forwards == 0
    else:
        assert int(outcome.robust.sum()) <= (2 if name == "square" else 0)


@EACH
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    "shape", [(6,), (3, 5), (1, 4, 4), (3, 7, 5), (1, 14, 14), (2, 5, 28), (2, 2, 6, 6)]
)
def test_any_shape_of_sample_is_attacked_inside_its_ball(linear, radius, name, norm, shape):
    model, x, y = linear(4, shape)
    eps = 0.15 if norm == "linf" else 0.4
    _, (clean, outcome) = run(model, x, y, name, radius, eps, norm, steps=5, queries=60)
    z, within = outcome.x_adv, model.reach(x, y, norm) <= eps + 1e-6
    assert z.shape == x.shape
    assert (distance(z, x, norm) <= eps + 1e-6).all()
    assert z.min() >= 0
    assert z.max() <= 1
    broken = clean.robust & ~outcome.robust
    assert torch.equal(outcome.robust, model(z).argmax(1) == y)
    assert not (broken & ~within).any()
    assert broken.any() or not (within & clean.robust).any()


@EACH
def test_other_boxes_give_the_same_attack_and_double_precision_stays(linear, radius, name):
    model, x, y = linear(4, dtype=torch.float64)
    how = {"steps": 10, "queries": 80}
    reach = model.reach(x, y, "linf")
    eps, seen = 1.5 * float(reach[reach > 0].median()), set()

    def f(z):
        seen.add(z.dtype)
        return model(z)

    unit = run(f, x, y, name, radius, eps, **how)[1][1]
    assert seen == {unit.x_adv.dtype} == {torch.float64}
    assert torch.equal(unit.robust, model(unit.x_adv).argmax(1) == y)
    assert torch.equal(unit.robust, run(*linear(4), name, radius, eps, **how)[1][1].robust)
    assert 0 < int(unit.robust.sum()) < int(unit.tried.sum())
    for box in ((-2.0, 3.0), (0.0, 255.0), None):
        low, width = (-1.5, 3.0) if box is None else (box[0], box[1] - box[0])
        _, (_, other) = run(
            lambda z, low=low, width=width: model((z - low) / width), low + width * x, y, name,
            radius, eps * width, box=box, **how,
        )  # fmt: skip
        assert torch.equal(unit.robust, other.robust)


@EACH
def test_a_single_survivor_is_attacked_like_the_others(linear, radius, name):
    model, x, y = linear(4)
    reach = model.reach(x, y, "linf")
    weakest = int(reach.masked_fill(reach <= 0, torch.inf).argmin())
    others = model(x).argmin(1)
    others[weakest] = y[weakest]
    eps = 8 * float(reach[weakest])
    _, (clean, outcome) = run(model, x, others, name, radius, eps, steps=20, queries=500)
    assert int(clean.robust.sum()) == int(outcome.tried.sum()) == 1
    assert not outcome.robust.any()


def run_package(f, x, y, name, ball, how):
    """Return which samples the package leaves standing, from the draws of chunk 0."""
    generator = torch.Generator().manual_seed(derive_seed(0, name, 0))
    seed = int(torch.randint(2**62, (1,), generator=generator))
    start = random_start(x, ball, generator)
    options = {"norm": NORMS[ball.norm], "eps": ball.eps, "device": "cpu"}
    torch.manual_seed(seed)
    if name == "square":
        attack = SquareAttack(f, n_queries=how["queries"], resc_schedule=False, **options)
        attack.init_hyperparam(x)
        return margins(f(attack.attack_single_run(x, y)[1]), y) > 0
    if name == "fab-t":
        attack = FABAttack_PT(f, n_iter=how["steps"], **options)
        attack.target_class = 2
        z = attack.attack_single_run(x, y, is_targeted=True)
        return (f(z).argmax(1) == y) | (distance(z, x, ball.norm) > ball.eps)
    attack = APGDAttack_targeted(f, n_iter=how["steps"], logger=MUTE, **options)
    attack.loss, attack.y_target = LOSSES[name], f(x).sort(dim=1)[1][:, -2]
    attack.init_hyperparam(x)
    if ball.norm == "l1":
        early = 3 * how["steps"] // 10
        radii, counts = (
            [3 * ball.eps, 2 * ball.eps, ball.eps],
            [early, early, how["steps"] - 2 * early],
        )
        return attack.decr_eps_pgd(x, y, radii, counts)[1]
    return attack.attack_single_run(x, y, x_init=start)[1]


@BALLS
@EACH
@pytest.mark.rounding
def test_leaving_out_broken_samples_changes_no_verdict(digits, radius, name, norm, eps):
    """At one target; what is left out is known: passes on broken samples, repeated queries."""
    how = {"steps": 40, "queries": 300}
    right = digits.attention(digits.x).argmax(1) == digits.y
    x, y = digits.x[right], digits.y[right]
    f = Counted(digits.attention)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        theirs = run_package(f, x, y, name, Ball(norm, float(eps)), how)
    asked = sum(f.sizes)
    (trial,) = read_plan(f"custom:{name}", norm=norm, radii=[radius(eps)], **how)
    trial = replace(trial, attacks=(replace(trial.attacks[0], targets=1),))
    outcome = list(evaluate_chunk(f, Chunk(0, x, y), [trial]))[-1]
    assert torch.equal(outcome.robust, theirs)
    assert 0 < int(theirs.sum()) < len(y)
    assert outcome.forwards < asked or name == "square"


@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t"])
def test_a_broken_sample_leaves_and_is_broken_whatever_the_rounding(digits, radius, name):
    """With twice the steps it costs no more; its margin is clear of what rounding may change."""
    x, y = digits.x[:16], digits.y[:16]
    asked = []
    for steps in (60, 120):
        outcome = run(digits.conv, x, y, name, radius, "0.3", steps=steps)[1][-1]
        asked.append(outcome.forwards)
        logits = digits.conv(outcome.x_adv)
        assert (margins(logits, y) < -0.9 * CLEAR * logits.abs().amax(1)).all()
    assert asked[0] == asked[1] < 16 * 30


def test_targets_share_a_batch_where_few_samples_are_left(digits, radius):
    f = Counted(digits.conv)
    outcome = run(f, digits.x[:5], digits.y[:5], "fab-t", radius, "0.01", steps=3)[1][-1]
    assert outcome.robust.all()
    assert max(f.sizes) == 9 * 5
    assert outcome.forwards == 5 * 9 * (1 + 3 * 2 + 1)


def test_square_asks_nothing_twice(digits, radius):
    """Small images repeat squares: twice the queries cost hardly more."""
    x, y = digits.x[:3], digits.y[:3]
    few, many = (
        run(digits.conv, x, y, "square", radius, "0.03", queries=n)[1][-1] for n in (900, 1800)
    )
    assert many.robust.all()
    assert many.forwards < 1.5 * few.forwards < 3 * 900


def test_fab_warns_of_radii_below_float32(linear, radius):
    """The package computes in float32, whatever the samples are."""
    model, x, y = linear(4, dtype=torch.float64)
    for name, warned in (("fab-t", True), ("apgd-t", False)):
        outcome = run(model, x, y, name, radius, "0.0000001", steps=2)[1][-1]
        assert ["ball-below-resolution"] * warned == [note.code for note in outcome.notes][1:]


def test_the_l2_grid_of_square_fits_exactly_where_the_package_says():
    """Sizes that the package cannot start on are enlarged, all others are left alone."""
    for rows in (1, 4, 5, 8, 12, 13, 14, 17, 18, 19, 24, 28):
        for columns in (7, 14, 28):
            high = find_height(rows, columns)
            assert starts(high, columns)
            assert starts(rows, columns) == (high == rows)
            assert high - rows <= 4


def starts(rows, columns):
    attack = SquareAttack(
        lambda z: z.flatten(1).sum(1)[:, None] * torch.tensor([1.0, -1.0]),
        norm="L2",
        n_queries=0,
        eps=0.1,
    )
    x = torch.full((2, 1, rows, columns), 0.5)
    attack.init_hyperparam(x)
    try:
        attack.attack_single_run(x, torch.zeros(2, dtype=torch.int64))
    except (RuntimeError, ZeroDivisionError):
        return False
    return True


def test_the_standard_in_l1_has_the_packages_own_numbers():
    package = AutoAttack(lambda x: x, norm="L1", eps=12.0)
    apgd, targeted, fab, square = STANDARD_L1
    assert [attack.name for attack in STANDARD_L1] == package.attacks_to_run
    assert (apgd.restarts, apgd.steps) == (package.apgd.n_restarts, package.apgd.n_iter_orig)
    assert (targeted.targets, fab.targets) == (
        package.apgd_targeted.n_target_classes,
        package.fab.n_target_classes,
    )
    assert square.queries == package.square.n_queries
    (trial,) = read_plan("autoattack", norm="l1", radii=[parse_radius("12")])
    assert trial.attacks == STANDARD_L1


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize(("norm", "eps"), [("linf", "0.1"), ("l2", "0.5")])
@pytest.mark.parametrize("name", ["attention", "demo"])
def test_flags_agree_with_the_packages_whole_evaluation(digits, radius, name, norm, eps):
    f = digits.attention
    if name == "demo":
        module = load_demo().module.eval().requires_grad_(False)
        f = lambda x: module((x - 0.5) / 0.5)  # noqa: E731
    trace = sys.gettrace()
    try:
        with torch.random.fork_rng(devices=[]):
            package = AutoAttack(f, norm=NORMS[norm], eps=float(eps), seed=0)
            x_adv, _ = package.run_standard_evaluation(digits.x, digits.y, batch_size=64)
    finally:
        sys.settrace(trace)
    with torch.no_grad():
        theirs = f(x_adv).argmax(1) == digits.y
    ours = run(f, digits.x, digits.y, "standard", radius, eps, norm)[1][-1].robust
    assert int((ours == theirs).sum()) >= 62
    assert int(ours.sum()) <= int(theirs.sum()) + 2
    many = run(f, digits.x, digits.y, "pgd", radius, eps, norm, steps=100, restarts=5)[1][-1]
    assert int(many.robust.sum()) >= int(ours.sum()) - 2
    assert 0 < int(ours.sum()) < 64
