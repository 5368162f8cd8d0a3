import pytest
import torch
from pyautoattack.square import SquareAttack

from lipaudit.attacks.balls import Ball, distance, random_start
from lipaudit.attacks.evaluate import Chunk, evaluate_chunk
from lipaudit.attacks.kinds import ATTACKS
from lipaudit.attacks.oracle import Turn
from lipaudit.attacks.plan import STANDARD, Attack, adapt, read_plan
from lipaudit.attacks.square import find_canvas
from lipaudit.errors import UsageError

PACKAGE = [name for name, kind in ATTACKS.items() if not kind.masked]
EACH = pytest.mark.parametrize("name", PACKAGE)
CLASSES = pytest.mark.parametrize("classes", [2, 3, 4, 9, 10])


def auto(model, x, y, ball, turn):
    return turn.attack.kind.load()(model, x, y, ball, turn)


def turn_on(attack, x, ball, number=0):
    generator = torch.Generator().manual_seed(number)
    return Turn(attack, number, generator, lambda: random_start(x, ball, generator))


def run(model, x, y, plan, **options):
    return list(evaluate_chunk(model, Chunk(0, x, y), plan, **options))


@CLASSES
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_ensemble_is_exact_on_a_linear_model(linear, radius, norm, classes):
    """The nearest boundary is known in closed form: what is within reach breaks, and only that."""
    model, x, y = linear(classes, (2, 3, 4), samples=12)
    reach = model.reach(x, y, norm)
    eps = float(reach[reach > 0].median()) * 1.01
    assert ((reach - eps).abs() > 2e-3 * eps).all()
    plan = read_plan("standard", norm=norm, radii=[radius(f"{eps:.12f}")], steps=12, queries=10)
    outcomes = run(model, x, y, plan)
    assert torch.equal(outcomes[0].robust, reach > 0)
    assert torch.equal(outcomes[-1].robust, reach > eps)
    assert 0 < int(outcomes[-1].robust.sum()) < int(outcomes[0].robust.sum())


@pytest.mark.parametrize("classes", [2, 3, 4, 9, 10, 1000])
@EACH
def test_each_attack_runs_with_any_number_of_classes_or_says_why_not(
    linear, radius, name, classes
):
    model, x, y = linear(classes)
    reach = model.reach(x, y, "linf")
    eps = float(reach.max()) * 4
    plan = read_plan(f"custom:{name}", radii=[radius(f"{eps:.12f}")], steps=20, queries=200)
    clean, outcome = run(model, x, y, plan, box=None)
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
def test_any_shape_of_sample_is_attacked_inside_its_ball(linear, name, norm, shape):
    model, x, y = linear(4, shape)
    x, y = x[model(x).argmax(1) == y], y[model(x).argmax(1) == y]
    ball = Ball(norm, 0.15 if norm == "linf" else 0.4)
    attack = Attack(name, steps=5, queries=60)
    z = auto(model, x, y, ball, turn_on(attack, x, ball))
    assert z.shape == x.shape
    assert (distance(z, x, norm) <= ball.eps + 1e-6).all()
    assert z.min() >= 0
    assert z.max() <= 1
    broken = model(z).argmax(1) != y
    within = model.reach(x, y, norm) <= ball.eps + 1e-6
    assert not (broken & ~within).any()
    assert broken.any() or not within.any()


@EACH
@pytest.mark.parametrize("box", [(-2.0, 3.0), (0.0, 255.0), None])
def test_other_boxes_give_the_same_attack_in_other_units(linear, name, box):
    low, width = (-1.5, 3.0) if box is None else (box[0], box[1] - box[0])
    model, x, y = linear(4, dtype=torch.float64)
    x, y = x[model(x).argmax(1) == y], y[model(x).argmax(1) == y]
    attack = Attack(name, steps=10, queries=80)
    unit = Ball("linf", 0.05)
    there = Ball("linf", 0.05 * width, box)

    def moved(z):
        return model((z - low) / width)

    found = auto(model, x, y, unit, turn_on(attack, x, unit))
    moved_x = low + width * x
    other = auto(moved, moved_x, y, there, turn_on(attack, moved_x, there))
    assert torch.equal(model(found).argmax(1) == y, moved(other).argmax(1) == y)
    assert (distance(other, moved_x, "linf") <= there.eps * (1 + 1e-5)).all()


@EACH
def test_double_precision_models_are_attacked_and_judged_in_double(linear, radius, name):
    model, x, y = linear(5, dtype=torch.float64)
    seen = set()

    def f(z):
        seen.add(z.dtype)
        return model(z)

    plan = read_plan(f"custom:{name}", radii=[radius("0.05")], steps=10, queries=50)
    outcome = run(f, x, y, plan)[-1]
    assert seen == {torch.float64}
    assert outcome.x_adv.dtype == torch.float64
    assert torch.equal(outcome.robust, model(outcome.x_adv).argmax(1) == y)
    single = run(*linear(5), plan)[-1]
    assert torch.equal(outcome.robust, single.robust)


@EACH
def test_a_single_survivor_is_attacked_like_the_others(linear, radius, name):
    model, x, y = linear(4)
    reach = model.reach(x, y, "linf")
    weakest = int(reach.masked_fill(reach <= 0, torch.inf).argmin())
    others = model(x).argmin(1)
    others[weakest] = y[weakest]
    eps = radius(f"{8 * float(reach[weakest]):.12f}")
    plan = read_plan(f"custom:{name}", radii=[eps], steps=20, queries=500)
    clean, outcome = run(model, x, others, plan)
    assert int(clean.robust.sum()) == int(outcome.tried.sum()) == 1
    assert not outcome.robust.any()


@pytest.mark.parametrize(
    "ball", [Ball("token-l2", 0.1, None), Ball("l2", 0.1, None, torch.ones(2, 3, dtype=bool))]
)
@EACH
def test_tokens_and_masks_are_left_to_fgsm_and_pgd(linear, radius, name, ball):
    model, x, y = linear(4, (3, 5), samples=2)
    plan = read_plan(f"custom:{name}", norm=ball.norm, radii=[radius("0.1")])
    with pytest.raises(UsageError, match=f"{name} cannot") as caught:
        next(evaluate_chunk(model, Chunk(0, x, y, ball.mask), plan, box=None))
    assert "--attack fgsm,pgd" in caught.value.advice


def test_turns_go_through_targets_and_starts():
    attack = Attack("apgd-t", targets=3, restarts=2)
    turns = [turn_on(attack, torch.zeros(1, 2), Ball("l2", 0.1), n) for n in range(attack.turns)]
    assert [(t.target, t.restart) for t in turns] == [
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
        (4, 0),
        (4, 1),
    ]


def test_the_l2_grid_of_square_fits_exactly_where_the_package_says():
    """Sizes that the package cannot start on are enlarged, all others are left alone."""
    for rows in (1, 4, 5, 8, 12, 13, 14, 17, 18, 19, 24, 28):
        for columns in (7, 14, 28):
            enlarged = find_canvas(rows, columns)
            assert starts(*enlarged)
            assert starts(rows, columns) == (enlarged == (rows, columns))
            assert enlarged[0] - rows <= 4
            assert enlarged[1] - columns <= 4


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


def both(f, digits, radius, eps, norm="linf", **settings):
    """What standard and lean leave standing, and the passes that each took."""
    ends, passes = [], []
    for name in ("standard", "lean"):
        plan = read_plan(name, norm=norm, radii=[radius(eps)], **settings)
        outcomes = list(evaluate_chunk(f, Chunk(0, digits.x[:32], digits.y[:32]), plan))
        ends.append(outcomes[-1].robust)
        passes.append(sum(o.forwards + o.backwards for o in outcomes))
    return ends, passes


def test_the_verdicts_are_those_of_autoattack_for_fewer_passes(digits, radius):
    ends, passes = both(digits.attention, digits, radius, "0.06", queries=500)
    assert torch.equal(*ends)
    assert 8 < int(ends[0].sum()) < 28
    assert passes[1] < 0.6 * passes[0]


def test_in_l2_balls_too(digits, radius):
    ends, passes = both(digits.conv, digits, radius, "0.6", norm="l2", steps=50, queries=10)
    assert torch.equal(*ends)
    assert 0 < int(ends[0].sum()) < 28
    assert passes[1] < 0.8 * passes[0]


def test_square_is_not_given_up_where_it_alone_gets_on(digits, radius):
    """Rounded pixels have no gradient: what falls, falls to Square, late queries among them."""

    def rounded(x):
        return digits.conv((8 * x).round() / 8)

    ends, _ = both(rounded, digits, radius, "0.12", steps=10, queries=2000)
    assert torch.equal(*ends)
    assert 4 < int(ends[0].sum()) < 28


def test_a_sample_is_given_up_where_even_four_times_its_progress_would_not_do():
    gap, progress = torch.tensor([8.0, 8.0, 8.0, 8.0]), torch.tensor([0.0, 1.0, 1.1, torch.inf])
    turn = Turn(Attack("square", hope=4.0), 0, torch.Generator(), lambda: gap)
    assert turn.hopeless(gap, progress, 2.0).tolist() == [True, False, False, False]
    assert turn.hopeless(gap, progress, 1.9).tolist() == [True, True, False, False]
    never = Turn(STANDARD[0], 0, torch.Generator(), lambda: gap)
    assert not never.hopeless(gap, progress, 2.0).any()
    assert not never.hopeless(gap, progress, 0.0).any()


def test_it_says_that_it_gives_up(radius):
    (lean,), (standard,) = (read_plan(n, radii=[radius("0.1")]) for n in ("lean", "standard"))
    assert [note.code for note in lean.notes] == ["gives-up"]
    assert not standard.notes
    assert [a.name for a in lean.attacks] == [a.name for a in standard.attacks]
    assert lean.label == "lean"
