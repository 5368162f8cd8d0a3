import sys
from dataclasses import replace

import pytest
import torch

from lipaudit.attacks.balls import distance
from lipaudit.attacks.evaluate import Chunk, derive_seed, evaluate_chunk
from lipaudit.attacks.kinds import CHUNK, read_plan
from lipaudit.attacks.signs import Checks, note_signs, note_square
from lipaudit.errors import EvaluationError, UsageError

NORMS = pytest.mark.parametrize("norm", ["linf", "l2"])


def evaluate(f, x, y, plan, **how):
    """Attack samples chunk by chunk."""
    for number, start in enumerate(range(0, len(x), CHUNK)):
        some = slice(start, start + CHUNK)
        yield from evaluate_chunk(f, Chunk(number, x[some], y[some]), plan, **how)


@pytest.fixture
def everything(radius):
    """Every attack, in short, each on all correct samples."""

    def build(norm, eps=None, steps=6):
        radii = [radius(eps or ("0.08" if norm == "linf" else "0.4"))]
        names = ("fgsm", "pgd", "apgd-ce", "apgd-t", "fab-t", "square")
        plans = (
            read_plan(f"custom:{name}", norm=norm, radii=radii, steps=steps, queries=8 * steps)
            for name in names
        )
        return tuple(trial for plan in plans for trial in plan)

    return build


@NORMS
@pytest.mark.parametrize("name", ["conv", "attention"])
def test_flags_come_from_the_points_that_are_handed_out(digits, everything, norm, name):
    model, x, y = getattr(digits, name), digits.x[:32], digits.y[:32]
    clean, *outcomes = evaluate(model, x, y, everything(norm))
    for outcome in outcomes:
        x_adv, eps = outcome.x_adv, float(outcome.trial.radius)
        assert torch.equal(outcome.robust, model(x_adv).argmax(1) == y)
        assert torch.equal(outcome.tried, clean.robust)
        torch.testing.assert_close(outcome.distance, distance(x_adv, x, norm))
        assert outcome.distance.max() <= eps + 1e-6
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1
        assert torch.equal(x_adv[~clean.robust], x[~clean.robust])
        assert outcome.robust.sum() < clean.robust.sum()


@NORMS
def test_the_device_batch_size_changes_nothing_and_the_seed_repeats(digits, everything, norm):
    x, y, plan = digits.x[:6], digits.y[:6], everything(norm, steps=3)

    def flags(batch_size, seed=3):
        outcomes = evaluate(digits.conv, x, y, plan, batch_size=batch_size, seed=seed)
        return [(o.robust, o.x_adv, o.forwards, o.backwards, o.seed) for o in outcomes]

    first = flags(64)
    for one, two in zip(first, flags(64), strict=True):
        assert torch.equal(one[1], two[1])
    for batch_size in (1, 4):
        for one, two in zip(first, flags(batch_size), strict=True):
            assert torch.equal(one[0], two[0])
            assert one[2:] == two[2:]
    assert not torch.equal(first[2][1], flags(64, seed=4)[2][1])  # pgd starts elsewhere


def test_a_sample_does_not_notice_its_neighbours(linear, radius):
    """Square aside, which draws one window for all survivors of a chunk."""
    model, x, y = linear(4, dtype=torch.float64)
    others = y.clone()
    others[::2] = (y[::2] + 2) % 4
    plan = read_plan("custom:pgd,apgd-ce,apgd-t,fab-t", radii=[radius("0.005")], steps=5)
    for one, two in zip(
        evaluate(model, x, y, plan), evaluate(model, x, others, plan), strict=True
    ):
        assert torch.equal(one.robust[1::2], two.robust[1::2])
        torch.testing.assert_close(one.x_adv[1::2], two.x_adv[1::2])


@pytest.mark.parametrize("wrong", [False, True])
def test_radius_zero_and_what_is_misclassified_change_nothing(digits, everything, wrong):
    logits = digits.conv(digits.x)
    y, plan = logits.argmin(1) if wrong else digits.y, everything("l2", None if wrong else "0")
    clean, *outcomes = evaluate(digits.conv, digits.x, y, plan)
    assert clean.robust.any() != wrong
    assert len(outcomes) == 6
    for outcome in outcomes:
        assert torch.equal(outcome.x_adv, digits.x)
        assert torch.equal(outcome.robust, clean.robust)
        assert torch.equal(outcome.tried, clean.robust)
        assert outcome.forwards == 0


def test_within_a_trial_and_over_restarts_only_survivors_are_attacked(digits, radius):
    def outcomes(attacks, **how):
        plan = read_plan(f"custom:{attacks}", radii=[radius("0.08")], **how)
        return evaluate(digits.conv, digits.x, digits.y, plan)

    clean, apgd, square = outcomes("apgd-ce,square", steps=5, queries=20)
    assert torch.equal(apgd.tried, clean.robust)
    assert torch.equal(square.tried, apgd.robust)
    broken = apgd.tried & ~apgd.robust
    assert 6 * int(apgd.robust.sum()) < apgd.backwards < 6 * int(apgd.tried.sum())
    assert 7 * int(apgd.robust.sum()) < apgd.forwards < 7 * int(apgd.tried.sum())
    assert torch.equal(square.x_adv[broken], apgd.x_adv[broken])
    (_, one), (_, four) = (outcomes("pgd", steps=3, restarts=n) for n in (1, 4))
    assert not (four.robust & ~one.robust).any()
    passes = 5
    assert one.forwards == passes * int(one.tried.sum())
    assert four.forwards <= one.forwards + 3 * passes * int(one.robust.sum())


def test_a_chunk_alone_gives_what_it_gives_among_others(digits, radius):
    """Seeds differ by attack and chunk."""
    x, y = digits.x.repeat(2, 1, 1, 1), digits.y.repeat(2)
    plan = read_plan("custom:pgd,square", radii=[radius("0.08")], steps=3, queries=30)
    both = [*evaluate(digits.conv, x, y, plan, seed=5)]
    together = both[len(both) // 2 :]
    alone = evaluate_chunk(digits.conv, Chunk(1, x[CHUNK:], y[CHUNK:]), plan, seed=5)
    for one, two in zip(together, alone, strict=True):
        assert torch.equal(one.x_adv, two.x_adv)
    seeds = {derive_seed(s, a, c) for s in (0, 1) for a in ("pgd", "square") for c in (0, 1, 11)}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_callers_state_comes_back_and_its_default_dtype_does_not_matter(digits, everything):
    model, plan = digits.conv, everything("l2", steps=2)
    usual = [o.x_adv for o in evaluate(model, digits.x[:8], digits.y[:8], plan)]
    kept = torch.full_like(model[0].weight, 7.0)
    model[0].weight.grad = kept.clone()
    trace, state = sys.gettrace(), torch.get_rng_state()

    def tracer(_frame, _event, _arg):
        return None

    sys.settrace(tracer)
    torch.set_default_dtype(torch.float64)
    try:
        other = [o.x_adv for o in evaluate(model, digits.x[:8], digits.y[:8], plan)]
        assert sys.gettrace() is tracer
        assert torch.get_default_dtype() == torch.float64
    finally:
        sys.settrace(trace)
        torch.set_default_dtype(torch.float32)
        grads = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(one, two) for one, two in zip(usual, other, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(grads[0], kept)
    assert all(grad is None for grad in grads[1:])
    assert all(p.requires_grad for p in model.parameters())


def test_samples_in_half_precision_are_refused_and_none_give_no_outcome(radius):
    plan = read_plan("custom:fgsm", radii=[radius("0.1")])
    with pytest.raises(UsageError, match="float16"):
        list(evaluate(lambda z: z, torch.rand(4, 3).half(), torch.tensor([0, 1, 2, 0]), plan))
    nothing = evaluate(lambda z: z, torch.rand(0, 3), torch.zeros(0, dtype=torch.int64), plan)
    assert list(nothing) == []


def test_values_that_are_not_finite_stop_the_evaluation(linear, radius):
    model, x, y = linear(3)

    def overflow(z):
        return model(z) / ((z - x[: len(z)]).abs().amax() < 1e-6)

    outcomes = evaluate(overflow, x, y, read_plan("custom:fgsm", radii=[radius("0.1")]))
    assert next(outcomes).robust.any()
    with pytest.raises(EvaluationError, match="not finite on 20 fgsm samples of chunk 0"):
        next(outcomes)


FINE = Checks(classes=10, samples=100, correct=90, zero_gradients=0, random=0, probabilities=0)


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        *((replace(FINE, correct=n), n < 16) for n in (0, 10, 15, 17, 90)),
        (replace(FINE, classes=2, samples=2, correct=2), False),  # no sample wrong is no guessing
        (replace(FINE, classes=2, samples=2, correct=1), True),
    ],
)
def test_guessing_is_told_from_knowing(checks, expected):
    assert ["clean-accuracy-at-chance"] * expected == [note.code for note in note_signs(checks)]


def test_counts_add_up_and_keep_the_classes():
    total = FINE + replace(FINE, zero_gradients=3, random=2)
    assert total == Checks(10, 200, 180, 3, 2, 0)
    assert "3 of 180" in note_signs(total)[0].text


@pytest.mark.parametrize(
    ("before", "after", "samples", "flag"),
    [(50, 50, 64, False), (50, 49, 64, True), (500, 498, 1000, False), (500, 497, 1000, True)],
)
def test_square_doing_better_than_gradients_is_a_warning(before, after, samples, flag):
    notes = note_square(before, after, samples)
    assert bool(notes) == flag
    assert all(note.level == "warning" and str(before - after) in note.text for note in notes)
