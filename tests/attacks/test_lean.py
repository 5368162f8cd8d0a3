"""The preset lean: the verdicts of AutoAttack for a part of its passes, and it says what it is."""

import torch

from lipaudit.attacks.evaluate import Chunk, evaluate_chunk
from lipaudit.attacks.oracle import Turn
from lipaudit.attacks.plan import STANDARD, Attack, read_plan


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
