"""What became of samples and heads, against scipy and against counts made by hand."""

import numpy as np
import pytest
from scipy import stats

from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate import compare, judge
from lipaudit.measures import layouts
from lipaudit.tables.report import Failure
from tests.gate.cases import (
    NORMS,
    attack,
    bounds,
    certify,
    flags,
    jacobian,
    new,
    report,
    sample_ids,
    with_samples,
)

RNG = np.random.default_rng(33)
EXACT = RNG.lognormal(0, 0.3, (6, 8))
NOISE = RNG.normal(0, 0.05, (6, 8))


def pair_of(old, current):
    return compare([old, current]).pairs[0]


def exact_heads(pair):
    return [head for head in pair.heads if head.metric == "bounds.exact:each"]


def verdicts(pair):
    return {(v.metric, v.name): v for v in pair.verdicts}


def heads(factors):
    """Every head of a model against the same with other norms."""
    return exact_heads(pair_of(report(bounds(EXACT)), new(bounds(EXACT * factors))))


def test_a_head_changes_by_the_median_with_its_order_statistics():
    factors = np.array([[1.0, 1.02, 0.9, 1.5, 1.0, 0.97]]).T * np.exp(NOISE)
    exact = heads(factors)
    assert {(head.unit, head.samples) for head in exact} == {("%", 8)}
    stored = np.array([[float(f"{v:.6g}") for v in line] for line in EXACT * factors])
    ratios = np.log(stored) - np.log([[float(f"{v:.6g}") for v in line] for line in EXACT])
    for head, line in zip(exact, ratios, strict=True):
        # Of 8 samples the extremes are limits: below both with 1/256, and the next with 9/256.
        expected = np.expm1([np.median(line), line.min(), line.max()])
        assert [head.paired, head.low, head.high] == pytest.approx(expected, rel=1e-6, abs=1e-9)
        above = int((line > 0).sum())
        assert head.p == pytest.approx(stats.binomtest(above, 8, alternative="greater").pvalue)


def test_what_stands_is_corrected_for_all_heads_together():
    """All 256 flips of the samples, counted one by one; a head may move either way.

    Half of the level is for all heads, half for the two that move by 1% or more.
    """
    factors = np.array([[1.0, 1.002, 0.999, 1.5, 1.0, 0.5]]).T * np.exp(NOISE / 10)
    changes = heads(factors)
    signs = np.array([[-1 if ratio < 1 else 1 for ratio in line] for line in factors])
    flips = np.array([[1 - 2 * (i >> j & 1) for j in range(8)] for i in range(256)])
    counts = np.abs(flips @ signs.T)
    for i, head in enumerate(changes):
        shares = []
        for family in (range(6), (3, 5)):
            most = counts[:, [j for j in family if counts[0, j] <= counts[0, i]]]
            if i in family:
                shares.append((most.max(1) >= counts[0, i]).mean())
        assert head.p_adjusted == pytest.approx(min(1.0, 2 * min(shares)))
        assert head.stands == (head.p_adjusted <= 0.05)
    assert [head.stands for head in changes] == [i in (3, 5) for i in range(6)]
    for head in heads(1 + 5e-5):  # below the accuracy of norms
        assert (head.p_adjusted, head.stands) == (1.0, False)


CLEAN, BALL = "attack.correct", "attack.robust@worst,linf,2/255"
SIDES = {  # correct and robust, in the first report and in the other; what was lost and gained
    "stays": ((1, 1), (1, 1), (), ()),
    "breaks": ((1, 1), (1, 0), (BALL,), ()),
    "mends": ((1, 0), (1, 1), (), (BALL,)),
    "goes wrong": ((1, 1), (0, 0), (CLEAN, BALL), ()),
    "comes right": ((0, 0), (1, 0), (), (CLEAN,)),
    "heals": ((0, 0), (1, 1), (), (CLEAN, BALL)),
    "is wrong": ((0, 0), (0, 0), (), ()),
}


def shares(pair):
    return [v for v in pair.verdicts if v.mcnemar is not None]


def test_samples_that_changed_sides():
    (old, robust), (later, after) = (
        zip(*(sides[i] for sides in SIDES.values()), strict=True) for i in (0, 1)
    )
    pair = pair_of(report(attack(robust, correct=old)), new(attack(after, correct=later)))
    named = dict(zip(sample_ids(len(SIDES)), SIDES, strict=True))
    for sample in pair.samples:
        (_, before), (_, now), lost, gained = SIDES[named[sample.id]]
        assert (sample.lost, sample.gained) == (lost, gained)
        assert sample.figures[BALL] == (before, now)
    clean, ball = shares(pair)
    assert (clean.old, clean.new, clean.lost, clean.gained) == (4 / 7, 5 / 7, 1, 2)
    assert (ball.name, ball.old, ball.new) == ("worst,linf,2/255", 3 / 7, 3 / 7)
    assert (ball.lost, ball.gained) == (2, 2)
    assert clean.mcnemar == pytest.approx(stats.binomtest(1, 3).pvalue)
    assert [named[pair.samples[i].id] for i in (0, 1, -1)] == ["goes wrong", "breaks", "heals"]
    assert len(pair.samples) == len(SIDES)


def test_figures_of_a_sample_before_and_after():
    places = {"ids": sample_ids(64), "place": tuple(f"index {i}" for i in range(64))}
    old = report(jacobian()).model_copy(update={"samples": places})
    pair = pair_of(old, new(jacobian(1.1 * NORMS)))
    assert [s.figures["jacobian.norm"][1] for s in pair.samples] == sorted(1.1 * NORMS)[::-1]
    for sample in pair.samples:
        i = places["ids"].index(sample.id)
        assert sample.figures == {"jacobian.norm": (NORMS[i], 1.1 * NORMS[i])}
        assert sample.place == f"index {i}"


FINE = {"mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 0.875}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"dtype": "float64"}, "dtype: float32 became float64"),
        ({}, {"preprocess": FINE | {"mean": [0.0]}}, "preprocess mean: [0.5] became [0.0]"),
        (
            {"preprocess": FINE | {"interpolation": "nearest"}},
            {"preprocess": FINE},
            "preprocess interpolation: nearest became bicubic",
        ),
        ({}, {"preprocess": FINE}, None),  # a resizing that one report alone states
    ],
)
def test_what_spoils_a_comparison_is_a_warning_and_ends_the_gate(before, after, said):
    old, current = report(jacobian(), **before), new(jacobian(), **after)
    pair, judged = pair_of(old, current), judge(current, old)
    assert [text[: len(said or "")] for text in pair.warnings] == [said] * bool(said)
    assert pair.notes == ()
    assert judged.exit_code == 5 * bool(said)
    assert (said or "") in judged.reason


def stuck(section, row):
    rows = list(section.rows)
    rows[row] = rows[row].replace(converged=False)
    return section.model_copy(update={"rows": tuple(rows)})


@pytest.mark.parametrize("swapped", [False, True])
def test_a_head_that_did_not_converge_is_left_out_and_named(swapped):
    loud = EXACT * np.where(np.arange(6) == 3, 100, 1)[:, None]
    reports = [report(bounds(EXACT)), new(stuck(bounds(loud), 3))]
    pair = pair_of(*(reports[::-1] if swapped else reports))
    assert pair.warnings == (
        ("left out, because not converged in one report: layer 1 head 1 of bounds"),
    )
    assert [(h.layer, h.head, h.change) for h in exact_heads(pair)] == [
        (layer, head, 0.0) for layer in range(3) for head in range(2) if (layer, head) != (1, 1)
    ]
    judged = verdicts(pair)
    left = np.median(np.median(EXACT[[0, 1, 2, 4, 5]], axis=1))
    assert judged["bounds.exact:median", ""].old == left
    # over all heads of a sample, the stuck one too
    assert "1 row did not converge" in judged["bounds.exact_max:median", ""].reason


def test_samples_that_did_not_converge_are_left_out_and_counted():
    """Of the norms of the model, and of every head."""
    unsure = [np.arange(64) != place for place in (5, 9)]
    steep = 1.1 * NORMS * np.where(unsure[1], 1, 1000)
    pair = pair_of(*(
        report(jacobian(norms, converged=tuple(kept.tolist())), weights=name)
        for norms, kept, name in zip((NORMS, steep), unsure, "ab", strict=True)
    ))  # fmt: skip
    assert pair.warnings == (
        "left out, because not converged in one report: 2 of 64 samples of jacobian",
    )
    norm = verdicts(pair)["jacobian.norm:median", ""]
    assert (norm.samples, norm.paired) == (62, pytest.approx(0.1))
    assert len(pair.samples) == 62
    flagged = [[i != place for i in range(8)] for place in (2, 5)]
    loud = 1.2 * EXACT * np.where(flagged[1], 1, 100)
    old, current = (
        with_samples(bounds(norms), converged=kept)
        for norms, kept in zip((EXACT, loud), flagged, strict=True)
    )
    for head in exact_heads(pair_of(report(old), new(current))):
        assert head.samples == 6
        assert [head.paired, head.low, head.high] == pytest.approx([0.2] * 3, rel=1e-4)


def test_what_fails_keeps_nothing_else_from_being_compared():
    unsure = jacobian(converged=[False] * 64)
    reasons = verdicts(pair_of(report(bounds(EXACT), unsure), new(bounds(EXACT), unsure)))
    assert "64 samples did not converge" in reasons["jacobian.norm:median", ""].reason
    assert reasons["bounds.exact:median", ""].reason == ""
    failed = layouts()["attack"].section(failure=Failure(reason="out of memory", exit_code=3))
    old = report(jacobian(), attack([1]), spec="old")
    pair = pair_of(old, new(jacobian(), failed, status="partial"))
    assert {v.status for v in pair.verdicts} == {"unchanged"}
    assert pair.notes == ("not compared, because only old has it: attack",)


@pytest.fixture(scope="module")
def louder():
    """Three reports: a model, the same with one louder head, and one that is 10% steeper."""
    changed, robust = EXACT * np.where(np.arange(6) == 4, 1.5, 1)[:, None], flags(90)
    return (
        report(bounds(EXACT), jacobian(), attack(robust), spec="old"),
        new(bounds(changed), jacobian(), attack(robust), spec="new"),
        new(bounds(EXACT), jacobian(1.1 * NORMS), attack(1 - robust), spec="c", weights="c"),
    )


def test_changes_come_with_an_interval_and_a_verdict(louder):
    """An improvement is the mirror image."""
    comparison = compare(louder)
    assert comparison.models == ("old", "new", "c")
    found = verdicts(comparison.pairs[1])
    median = found["jacobian.norm:median", ""]
    assert median.status == "regressed"
    assert (median.change, median.low, median.high) == pytest.approx((0.1, 0.1, 0.1))
    assert median.new == pytest.approx(1.1 * median.old)
    robust = found["attack.robust:mean", "worst,linf,2/255"]
    assert (robust.old, robust.new, robust.status) == (90 / 128, 38 / 128, "regressed")
    assert found["attack.correct:mean", ""].status == "inconclusive"
    assert found["bounds.exact:median", ""].status == "unchanged"
    mirror = {"regressed": "improved", "improved": "regressed"}
    back = verdicts(pair_of(*louder[::-2]))
    for key, verdict in found.items():
        assert back[key].status == mirror.get(verdict.status, verdict.status)


PARTIAL = report(jacobian(), status="partial")
OTHERS = report(jacobian(ids=sample_ids(64, 99)))


@pytest.mark.parametrize(
    ("reports", "error", "says", "advice"),
    [
        ([report(jacobian())], UsageError, "at least two", ""),
        ([report(jacobian()), report(bounds(EXACT))], BaselineError, "no common section", ""),
        ([report(jacobian()), OTHERS], BaselineError, "only 0 of", ""),
        ([report(jacobian()), PARTIAL], BaselineError, "partial", "--resume"),
        ([PARTIAL, report(jacobian())], BaselineError, "partial", "--resume"),
    ],
)
def test_nothing_to_compare(reports, error, says, advice):
    with pytest.raises(error, match=says) as refused:
        compare(reports)
    assert advice in refused.value.advice


def with_margins(margins):
    return with_samples(jacobian(), margin=margins)


def test_a_column_that_only_one_report_has_is_named():
    pair = pair_of(report(with_margins(NORMS - 1.0), spec="c"), report(jacobian(), spec="e"))
    found = verdicts(pair)
    assert found["jacobian.norm:median", ""].status == "unchanged"
    assert ("jacobian.margin:median", "") not in found
    assert pair.notes == ("not compared, because only c has it: jacobian.margin",)
    sides = [None] * 32 + [1.0] * 32, [1.0] * 32 + [None] * 32  # no sample in common
    pair = pair_of(*(report(with_margins(side)) for side in sides))
    reason = verdicts(pair)["jacobian.margin:median", ""].reason
    assert reason == "jacobian: 64 samples did not converge, or have no value"


def test_a_column_is_compared_over_the_samples_that_have_it_in_both():
    old = report(with_margins([None, *NORMS[1:]]))
    current = new(with_margins([*1.2 * NORMS[:-1], None]))
    for pair, times in ((pair_of(old, current), 1.2), (pair_of(current, old), 1 / 1.2)):
        margin = verdicts(pair)["jacobian.margin:median", ""]
        assert (margin.samples, margin.reason) == (62, "")
        assert 1 + margin.paired == pytest.approx(times)
        medians = np.median(NORMS[1:-1]), 1.2 * np.median(NORMS[1:-1])
        assert sorted((margin.old, margin.new)) == pytest.approx(medians)


def test_figures_that_turn_negative_change_by_a_difference():
    old, current = (with_margins(NORMS - shift) for shift in (0.0, 3.0))
    margin = verdicts(pair_of(report(old), new(current)))["jacobian.margin:median", ""]
    assert (margin.status, margin.unit) == ("regressed", "")
    assert margin.change == pytest.approx(-3.0)


def test_few_shared_samples_are_compared_and_counted():
    few = jacobian(1.1 * NORMS[54:], ids=sample_ids(10, 54))
    pair = pair_of(report(jacobian()), new(few))
    median = verdicts(pair)["jacobian.norm:median", ""]
    assert (median.status, median.samples) == ("regressed", 10)
    assert median.old == np.median(NORMS[54:])
    assert "compared over the 10 shared samples (of 64 and 10): jacobian" in pair.warnings


def test_certificates_that_are_lost_and_gained():
    """A sample without an answer is on no side."""
    old = certify(["certified", "undecided", "broken", "certified"])
    current = certify(["undecided", "certified", "undecided", "wrong"])
    pair = pair_of(report(old), new(current))
    assert [(v.metric, v.lost, v.gained) for v in shares(pair)] == [
        ("certify.correct:mean", 1, 0),
        ("certify.robust:mean", 1, 1),
        ("certify.certified:mean", 2, 1),
    ]
    figures = {s.id: s.figures["certify.certified@linf,0.01"] for s in pair.samples}
    assert figures == dict(zip(sample_ids(4), ((1, 0), (0, 1), (0, 0), (1, 0)), strict=True))
    assert pair.samples[0].id == sample_ids(4)[3]
    old, current = certify(["certified", "broken", "certified"]), certify(["certified"] * 3)
    unknown = {name: (*side[:2], None) for name, side in current.samples.items() if name != "ids"}
    pair = pair_of(report(old), new(with_samples(current, **unknown)))
    assert [(v.samples, v.old, v.new, v.lost, v.gained) for v in shares(pair)] == [
        (2, 1, 1, 0, 0),
        (2, 0.5, 1, 0, 1),
        (2, 0.5, 1, 0, 1),
    ]
