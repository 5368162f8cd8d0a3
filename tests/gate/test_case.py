"""A checkpoint that lost 12.5 points of clean accuracy once passed the gate: it and its mirror."""

import numpy as np
import pytest

from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge
from lipaudit.gate.rules import parse_rule
from lipaudit.report import of_judgement, render
from tests.gate.cases import attack, flags, jacobian, new, report, with_samples

COUNT = 128
NORMS = np.random.default_rng(3).lognormal(0.0, 0.5, COUNT)


def turn(ones, lost, gained):
    """Flags before and after: so many ones, of which some are lost, and some others gained."""
    before = flags(ones, COUNT)
    after = before.copy()
    after[:lost] = 0
    after[ones : ones + gained] = 1
    return before, after


CLEAN, ROBUST = turn(115, 22, 6), turn(83, 36, 19)


def measure(clean, robust, scale, radius, **run):
    norms = jacobian(scale * NORMS)
    figures = with_samples(norms, correct=clean.astype(bool), radius_first_order=radius / NORMS)
    make = new if run else report
    return make(figures, attack(robust, correct=clean), **run)


OLD = measure(CLEAN[0], ROBUST[0], 1.0, 1.0)
WORSE = measure(CLEAN[1], ROBUST[1], 0.25, 0.6, weights="b")


def describe(current, baseline):
    judgement = judge(current, baseline)
    text = render(of_judgement(judgement), "text").decode().splitlines()
    verdicts = compare([baseline, current]).pairs[0].verdicts
    words = {(v.metric, v.name): (v.status, v.low, v.high) for v in verdicts}
    return judgement, text, words


def test_a_worse_checkpoint_fails_and_the_answer_comes_first():
    judgement, text, words = describe(WORSE, OLD)
    assert judgement.exit_code == 1
    assert text[0].startswith(
        "worse: clean accuracy 89.8% -> 77.3% (proven: at least 4.3 points lower), "
        "robust accuracy (linf 2/255) 64.8% -> 51.6% (proven: at least 1.9 points lower)"
    )
    assert text[-1] == "worse: 3 regressed, 1 improved (exit code 1)"
    (norm,) = (v for v in judgement.verdicts if v.metric == "jacobian.norm:median")
    assert "smaller norms do not make this model more robust" in norm.line
    for verdict in judgement.verdicts:  # compare says the same
        status, low, high = words[verdict.metric, verdict.name]
        assert (status, low, high) == (verdict.status, verdict.low, verdict.high)
    for name in ("markdown", "junit", "html"):
        page = " ".join(render(of_judgement(judgement), name).decode().replace("\\", "").split())
        arrow = "-" if name == "junit" else "→"
        assert f"worse: clean accuracy 89.8% {arrow}" in page, name


def test_the_mirror_passes_and_an_equal_one_too():
    judgement, text, words = describe(
        OLD.model_copy(update={"run": WORSE.run}), WORSE.model_copy(update={"run": OLD.run})
    )
    assert judgement.exit_code == 1  # by its norms alone: accuracy and radius improved
    statuses = {v.metric: v.status for v in judgement.verdicts}
    assert statuses["attack.correct:mean"] == statuses["attack.robust:mean"] == "improved"
    assert statuses["jacobian.radius_first_order:median"] == "improved"
    assert words["attack.correct:mean", ""][0] == "improved"
    assert text[0].startswith("worse: Jacobian norm ")
    equal, text, _ = describe(measure(CLEAN[0], ROBUST[0], 1.0, 1.0, weights="c"), OLD)
    assert (equal.exit_code, equal.outcome) == (0, "pass")
    assert text[0].startswith("pass: ")


@pytest.mark.parametrize("seed", range(5))
def test_one_that_is_only_noisy_does_not_fail(seed):
    rng = np.random.default_rng(seed)
    noise = np.exp(rng.normal(0, 0.15, (2, COUNT)))
    clean = np.where(rng.random(COUNT) < 0.03, 1 - CLEAN[0], CLEAN[0])
    robust = np.where(rng.random(COUNT) < 0.05, 1 - ROBUST[0], ROBUST[0])
    judgement, _, _ = describe(measure(clean, robust, noise[0], noise[1], weights="d"), OLD)
    assert judgement.exit_code == 0


def test_compare_counts_misclassified_samples_in_the_radius_as_the_gate_does():
    """Reports store no radius of them; without them a model that errs more looks better."""
    right = OLD.section("jacobian")
    radii = 1.3 * np.array(right.samples["radius_first_order"])
    wrong = np.arange(COUNT) < 80
    stored = [None if is_wrong else r for r, is_wrong in zip(radii, wrong, strict=True)]
    worse = with_samples(right, radius_first_order=stored, correct=(~wrong).tolist())
    current = new(worse, OLD.section("attack"))
    judgement, _, words = describe(current, OLD)
    (gate,) = (v for v in judgement.verdicts if v.metric.startswith("jacobian.radius"))
    assert (gate.status, gate.samples) == ("regressed", COUNT)
    assert words[gate.metric, ""] == (gate.status, gate.low, gate.high)


def test_strict_lets_no_demanded_improvement_pass_that_is_not_proven():
    noise = np.random.default_rng(1).normal(-0.14, 0.25, COUNT)
    current = new(jacobian(NORMS * np.exp(noise)))
    rule = parse_rule("jacobian.norm <= -10%")
    judgement = judge(current, report(jacobian(NORMS)), [rule], strict=True)
    (verdict,) = judgement.verdicts
    # It fell by more than 10%, but its limits begin below that.
    assert verdict.paired < -0.1 < verdict.high < 0
    assert (verdict.status, judgement.exit_code) == ("pass", 6)
    lenient = judge(current, report(jacobian(NORMS)), [rule])
    assert lenient.exit_code == 0


def test_a_demanded_improvement_that_fails_says_what_is_proven():
    noise = np.random.default_rng(1).normal(-0.05, 0.1, COUNT)
    rule = parse_rule("jacobian.norm <= -10%")
    judgement = judge(new(jacobian(NORMS * np.exp(noise))), report(jacobian(NORMS)), [rule])
    assert judgement.exit_code == 1
    assert judgement.reason.endswith("(proven: less than jacobian.norm <= -10% asks)")


def test_strict_says_how_many_samples_would_prove_an_equal_model():
    strict = judge(measure(CLEAN[0], ROBUST[0], 1.0, 1.0, weights="c"), OLD, strict=True)
    assert strict.exit_code == 6
    # z sqrt(2) / (n + 2) at n = 128, against 2 points
    high = 1.959964 * np.sqrt(2) / 130
    needed = int(np.ceil(COUNT * (high / 0.02) ** 2))
    first = strict.verdicts[0]
    assert (first.status, first.samples_needed) == ("pass", needed)
    assert f"about {needed} samples would prove the limit" in strict.reason
    assert f"about {needed} samples would prove it" in strict.summary
    lenient = judge(measure(CLEAN[0], ROBUST[0], 1.0, 1.0, weights="c"), OLD)
    assert lenient.verdicts[0].samples_needed is None


@pytest.mark.parametrize("limit", ["-2", "+5", "60", "-200pp"])
def test_a_share_has_no_limit_beyond_one(limit):
    with pytest.raises(UsageError, match="a share is between 0 and 1"):
        parse_rule(f"attack.robust >= {limit}")
