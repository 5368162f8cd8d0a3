"""What swapping layers says: shares that add up, their rest, and where nothing can be said."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from scipy import stats

from lipaudit.errors import EvaluationError
from lipaudit.gate.attribution import Attribution, attribution

ENDS = {"old": "A", "new": "B", "start": "pixels", "target": "logits", "same": 2}


def facts(count):
    return [{"layer": f"layer {i}", "entries": 10, "moved": 0.1} for i in range(count)]


def norms_of(worth, count, samples, **more):
    """The norms of models with some of their layers new, by a function of (layers, sample)."""
    every = frozenset(range(count))

    def norm(layers):
        return np.exp([worth(frozenset(layers), i) for i in range(samples)])

    return {
        "old": norm(()),
        "new": norm(every),
        "swapped": np.array([norm({g}) for g in range(count)]),
        "undone": np.array([norm(every - {g}) for g in range(count)]),
    } | more


def summed(worth, count=3, samples=5, **more):
    ends = ENDS | {"samples": tuple(map(str, range(samples)))}
    return attribution(ends, facts(count), norms_of(worth, count, samples, **more))


ALONE = np.random.default_rng(0).normal(0.3, 0.1, (3, 5))
PAIRS = np.random.default_rng(1).normal(0.0, 0.2, (3, 3, 5))


def pairwise(layers, i):
    pairs = sum(PAIRS[g, h, i] for g, h in combinations(sorted(layers), 2))
    return 1.0 + sum(ALONE[g, i] for g in layers) + pairs


def shapley(worth, count, samples):
    """The mean gain of a layer over all orders in which layers may become new."""
    gains = np.zeros((count, samples))
    orders = list(permutations(range(count)))
    for order in orders:
        for place, g in enumerate(order):
            before = frozenset(order[:place])
            gains[g] += [worth(before | {g}, i) - worth(before, i) for i in range(samples)]
    return gains / len(orders)


def test_where_two_layers_interact_at_most_effects_are_shapley_values():
    shown = summed(pairwise)
    truth = shapley(pairwise, 3, 5)
    whole = np.mean([pairwise(frozenset(range(3)), i) - 1.0 for i in range(5)])
    assert shown.change.mean == pytest.approx(whole)
    for layer, gains in zip(shown.layers, truth, strict=True):
        assert layer.effect.mean == pytest.approx(gains.mean())
        assert layer.share == pytest.approx(gains.mean() / whole)
    assert shown.rest.share == pytest.approx(0, abs=1e-12)
    assert abs(shown.rest.swapped.mean) > 0.01
    assert shown.rest.swapped.mean == pytest.approx(-shown.rest.undone.mean)


def test_what_three_layers_do_together_is_the_rest():
    shown = summed(lambda layers, i: pairwise(layers, i) + 0.5 * (len(layers) == 3))
    # Undoing any one of the three takes all of it away: half of it three times is too much.
    assert shown.rest.effect.mean == pytest.approx(0.5 - 3 * 0.25)
    total = sum(layer.share for layer in shown.layers) + shown.rest.share
    assert total == pytest.approx(1)


def test_limits_are_those_of_students_t():
    (layer, *_) = summed(pairwise).layers
    gains = shapley(pairwise, 3, 5)[0]
    low, high = stats.t.interval(0.95, 4, gains.mean(), stats.sem(gains))
    assert (layer.effect.low, layer.effect.high) == pytest.approx((low, high))


def test_what_is_linearised_has_a_rest_of_its_own():
    slopes = np.tile([[0.1], [0.2], [0.3]], 5)
    shown = summed(pairwise, linear_old=slopes)
    assert [layer.linear_old.mean for layer in shown.layers] == pytest.approx([0.1, 0.2, 0.3])
    assert shown.rest.linear_old.mean == pytest.approx(shown.change.mean - 0.6)
    assert shown.layers[0].linear_new is None
    assert set(shown.values) == {"change", "swapped", "undone", "linear_old"}
    assert shown.values["swapped"].shape == (3, 5)


def test_no_shares_of_a_change_that_may_be_none():
    shown = summed(lambda layers, i: (-1) ** i * len(layers) * 0.1, samples=4)
    assert [layer.share for layer in shown.layers] == [None] * 3
    assert [note.code for note in shown.notes] == ["no-change"]
    assert summed(lambda layers, i: 1e-5 * len(layers)).rest.share is None
    one_way = summed(lambda layers, i: len(layers) * (0.1 + 3 * i), samples=2)
    assert one_way.change.low < 0 < one_way.change.high
    assert [layer.share for layer in one_way.layers] == pytest.approx([1 / 3] * 3)
    alone = summed(pairwise, samples=1)
    assert (alone.change.low, alone.change.high) == (None, None)
    assert sum(layer.share for layer in alone.layers) + alone.rest.share == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "told"), [((9, 8, 9, 8, -1), True), ((9, 8, -7, 8, -1), False)]
)
def test_shares_need_a_change_whose_limits_leave_0_out(changes, told):
    """Where samples went both ways; the mean is far from 0 either way."""
    low, high = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
    assert (low * high > 0) == told
    shown = summed(lambda layers, i: len(layers) * changes[i] / 30)
    shares = [layer.share for layer in shown.layers]
    assert shares == (pytest.approx([1 / 3] * 3) if told else [None] * 3)


def test_what_takes_part_in_a_fall_has_a_share_above_0():
    shown = summed(
        lambda layers, i: -sum((0.1, 0.4, -0.2)[g] for g in layers) - i * len(layers) / 99
    )
    first, second, third = (layer.share for layer in shown.layers)
    assert second > first > 0 > third
    assert first + second + third == pytest.approx(1)


@pytest.mark.parametrize("zero", [set(), {0}, {1, 2}, {0, 1, 2}])
def test_samples_with_a_norm_of_0_are_left_out_and_counted(zero):
    def worth(layers, i):
        return -np.inf if i == 2 and layers == zero else pairwise(layers, i)

    shown = summed(worth, linear_old=np.tile([0.0, 1.0, np.nan, 3.0, 4.0], (3, 1)))
    assert shown.samples == ("0", "1", "3", "4")
    assert shown.values["change"].shape == (4,)
    assert shown.layers[0].linear_old.mean == 2.0
    assert [(n.code, "1" in n.text) for n in shown.notes] == [("zero-norms", True)]
    with pytest.raises(EvaluationError, match="every sample is 0"):
        summed(lambda layers, i: -np.inf)


def test_json_reads_back():
    shown = summed(pairwise)
    assert Attribution.model_validate_json(shown.model_dump_json()) == shown
