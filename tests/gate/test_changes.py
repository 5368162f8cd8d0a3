"""What became of samples and heads, against scipy and against counts made by hand."""

import numpy as np
import pytest
from scipy import stats

from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate import compare, judge
from lipaudit.gate.judging import TOLERANCE
from lipaudit.measures import layouts
from lipaudit.measures.certify import CERTIFY_TABLE
from lipaudit.tables.report import Failure

RNG = np.random.default_rng(33)
EXACT = RNG.lognormal(0, 0.3, (6, 8))
NOISE = RNG.normal(0, 0.05, (6, 8))


def pair_of(old, new):
    return compare([old, new]).pairs[0]


def exact_heads(pair):
    return [head for head in pair.heads if head.metric == "bounds.exact:each"]


@pytest.fixture
def heads(report, bounds):
    """Every head of a model against the same with other norms."""

    def changes(norms, old=EXACT):
        pair = pair_of(report(bounds(old)), report(bounds(norms), weights="b"))
        return exact_heads(pair)

    return changes


def test_a_head_changes_by_the_geometric_mean_with_the_limits_of_student(heads):
    factors = np.array([[1.0, 1.02, 0.9, 1.5, 1.0, 0.97]]).T * np.exp(NOISE)
    exact = heads(EXACT * factors)
    assert {(head.unit, head.samples) for head in exact} == {("%", 8)}
    stored = np.array([[float(f"{v:.6g}") for v in line] for line in EXACT * factors])
    ratios = np.log(stored) - np.log([[float(f"{v:.6g}") for v in line] for line in EXACT])
    for head, line in zip(exact, ratios, strict=True):
        low, high = stats.ttest_1samp(line, 0).confidence_interval(0.95)
        expected = np.expm1([line.mean(), low, high])
        assert [head.paired, head.low, head.high] == pytest.approx(expected, rel=1e-6, abs=1e-9)
        ps = (
            stats.ttest_1samp(line, TOLERANCE, alternative="greater").pvalue,
            stats.ttest_1samp(line, -TOLERANCE, alternative="less").pvalue,
        )
        assert head.p == pytest.approx(2 * min(ps), rel=1e-6)


def test_what_stands_is_corrected_for_all_heads_by_holm(heads):
    factors = np.array([[1.0, 1.05, 1.07, 1.5, 0.94, 1.0]]).T * np.exp(NOISE)
    changes = heads(EXACT * factors)
    ps = sorted(head.p for head in changes)
    adjusted = np.maximum.accumulate([min(1.0, p * (6 - i)) for i, p in enumerate(ps)])
    by_p = sorted(changes, key=lambda head: head.p)
    assert [head.p_adjusted for head in by_p] == pytest.approx(adjusted)
    assert [head.stands for head in by_p] == list(adjusted <= 0.05)
    assert 0 < sum(head.stands for head in changes) < sum(head.p <= 0.05 for head in changes)


def test_a_change_below_the_accuracy_of_norms_never_stands(heads):
    for head in heads(EXACT * (1 + 5e-5)):
        assert (head.p, head.stands) == (1.0, False)


FLAGS = {  # correct and robust, in the first report and in the other
    "stays": ((1, 1), (1, 1)),
    "breaks": ((1, 1), (1, 0)),
    "mends": ((1, 0), (1, 1)),
    "goes wrong": ((1, 1), (0, 0)),
    "comes right": ((0, 0), (1, 0)),
    "heals": ((0, 0), (1, 1)),
    "is wrong": ((0, 0), (0, 0)),
}


@pytest.fixture
def attacked(report, attack):
    def one(side, **options):
        correct, robust = zip(*(flags[side] for flags in FLAGS.values()), strict=True)
        return report(attack(robust, correct=correct, **options), weights="ab"[side])

    return one


CLEAN, BALL = "attack.correct", "attack.robust@worst,linf,2/255"


def shares(pair):
    return [v for v in pair.verdicts if v.mcnemar is not None]


def test_samples_that_changed_sides(attacked, ids):
    pair = pair_of(attacked(0), attacked(1))
    named = dict(zip(ids(len(FLAGS)), FLAGS, strict=True))
    turned = {named[s.id]: (s.lost, s.gained) for s in pair.samples}
    assert turned == {
        "stays": ((), ()),
        "breaks": ((BALL,), ()),
        "mends": ((), (BALL,)),
        "goes wrong": ((CLEAN, BALL), ()),
        "comes right": ((), (CLEAN,)),
        "heals": ((), (CLEAN, BALL)),
        "is wrong": ((), ()),
    }
    for sample in pair.samples:
        (_, robust), (_, after) = FLAGS[named[sample.id]]
        assert sample.figures[BALL] == (robust, after)
    clean, ball = shares(pair)
    assert (clean.old, clean.new, clean.lost, clean.gained) == (4 / 7, 5 / 7, 1, 2)
    assert (ball.name, ball.old, ball.new, ball.lost, ball.gained) == (
        *("worst,linf,2/255", 3 / 7, 3 / 7),
        *(2, 2),
    )
    assert clean.mcnemar == pytest.approx(stats.binomtest(1, 3).pvalue)
    assert [named[pair.samples[i].id] for i in (0, 1, -1)] == ["goes wrong", "breaks", "heals"]


def test_figures_of_a_sample_before_and_after(report, jacobian, norms):
    places = {
        "ids": jacobian(norms).samples["ids"],
        "place": tuple(f"index {i}" for i in range(64)),
    }
    old = report(jacobian(norms)).model_copy(update={"samples": places})
    pair = pair_of(old, report(jacobian(1.1 * norms), weights="b"))
    assert [s.figures["jacobian.norm"][1] for s in pair.samples] == sorted(1.1 * norms)[::-1]
    for sample in pair.samples:
        i = places["ids"].index(sample.id)
        assert sample.figures == {"jacobian.norm": (norms[i], 1.1 * norms[i])}
        assert sample.place == f"index {i}"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"dtype": "float64"}, "dtype: float32 became float64"),
        ({"preprocess": {"mean": [0.0], "std": [0.5]}}, "preprocess mean: [0.5] became [0.0]"),
    ],
)
def test_what_spoils_a_comparison_is_a_warning(report, jacobian, norms, run, said):
    pair = pair_of(report(jacobian(norms)), report(jacobian(norms), weights="b", **run))
    assert [text[: len(said)] for text in pair.warnings] == [said]
    assert pair.notes == ()


def test_the_same_weights_are_called_so(report, jacobian, norms):
    assert pair_of(report(jacobian(norms)), report(jacobian(norms))).warnings == (
        "both reports are of the same weights",
    )


def stuck(section, row):
    rows = list(section.rows)
    rows[row] = rows[row].replace(converged=False)
    return section.model_copy(update={"rows": tuple(rows)})


@pytest.mark.parametrize("swapped", [False, True])
def test_a_head_that_did_not_converge_is_left_out_and_named(report, bounds, swapped):
    whole = report(bounds(EXACT))
    loud = EXACT.copy()
    loud[3] *= 100
    reports = [whole, report(stuck(bounds(loud), 3), weights="b")]
    pair = pair_of(*(reports[::-1] if swapped else reports))
    assert pair.warnings == (
        ("left out, because not converged in one report: layer 1 head 1 of bounds"),
    )
    assert [(h.layer, h.head, h.change) for h in exact_heads(pair)] == [
        (layer, head, 0.0) for layer in range(3) for head in range(2) if (layer, head) != (1, 1)
    ]
    judged = {v.metric: v for v in pair.verdicts}
    assert judged["bounds.exact:median"].old == np.median(
        np.median(EXACT[[0, 1, 2, 4, 5]], axis=1)
    )
    # over all heads of a sample, the stuck one too
    assert "1 rows did not converge" in judged["bounds.exact_max:median"].reason


def test_samples_that_did_not_converge_are_left_out_and_counted(report, jacobian, norms):
    flags = [[True] * 64, [True] * 64]
    flags[0][5] = flags[1][9] = False
    steep = 1.1 * norms
    steep[9] *= 1000
    pair = pair_of(
        report(jacobian(norms, converged=flags[0])),
        report(jacobian(steep, converged=flags[1]), weights="b"),
    )
    assert pair.warnings == (
        "left out, because not converged in one report: 2 of 64 samples of jacobian",
    )
    norm = next(v for v in pair.verdicts if v.metric == "jacobian.norm:median")
    assert (norm.samples, norm.paired) == (62, pytest.approx(0.1))
    assert len(pair.samples) == 62


def test_a_sample_that_did_not_converge_is_left_out_of_every_head(report, bounds):
    def unsure(norms, place):
        section = bounds(norms)
        flags = tuple(i != place for i in range(8))
        samples = section.samples | {"converged": flags}
        return section.model_copy(update={"samples": samples})

    loud = 1.2 * EXACT
    loud[:, 5] *= 100
    pair = pair_of(report(unsure(EXACT, 2)), report(unsure(loud, 5), weights="b"))
    for head in exact_heads(pair):
        assert head.samples == 6
        assert [head.paired, head.low, head.high] == pytest.approx([0.2] * 3, rel=1e-4)


def test_a_section_of_which_nothing_converged_is_refused(report, jacobian, bounds, norms):
    reports = [
        report(bounds(EXACT), jacobian(norms, converged=[False] * 64), weights=name)
        for name in "ab"
    ]
    pair = pair_of(*reports)
    reasons = {v.metric: v.reason for v in pair.verdicts}
    assert "64 samples did not converge" in reasons["jacobian.norm:median"]
    assert reasons["bounds.exact:median"] == ""


def test_what_failed_keeps_nothing_else_from_being_compared(report, jacobian, attack, norms):
    failed = layouts()["attack"].section(failure=Failure(reason="out of memory", exit_code=3))
    old = report(jacobian(norms), attack([1]), spec="old")
    new = report(jacobian(norms), failed, spec="new", weights="b", status="partial")
    pair = pair_of(old, new)
    assert {v.status for v in pair.verdicts} == {"unchanged"}
    assert pair.notes == ("not compared, because only old has it: attack",)


ROBUST = np.r_[np.ones(90, int), np.zeros(38, int)]


@pytest.fixture
def louder(report, bounds, jacobian, attack, norms):
    """Three reports: a model, the same with one louder head, and one that is 10 % steeper."""
    changed = EXACT.copy()
    changed[4] *= 1.5
    return (
        report(bounds(EXACT), jacobian(norms), attack(ROBUST), spec="old"),
        report(bounds(changed), jacobian(norms), attack(ROBUST), spec="new", weights="b"),
        report(bounds(EXACT), jacobian(1.1 * norms), attack(1 - ROBUST), spec="c", weights="c"),
    )


def verdicts(pair):
    return {(v.metric, v.name): v for v in pair.verdicts}


def test_changes_come_with_an_interval_and_a_verdict(louder):
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


def test_an_improvement_is_the_mirror_image(louder):
    forth, back = (compare(pair).pairs[0] for pair in (louder[::2], louder[::-2]))
    mirror = {"regressed": "improved", "improved": "regressed"}
    back = verdicts(back)
    for key, verdict in verdicts(forth).items():
        assert back[key].status == mirror.get(verdict.status, verdict.status)


def test_what_cannot_be_compared_is_named_beside_what_can(louder, report, jacobian, norms):
    loose = report(*louder[0].sections[:1], jacobian(norms, tol=0.1), weights="b", spec="loose")
    found = verdicts(compare([louder[0], loose]).pairs[0])
    assert found["jacobian.norm:median", ""].status == "not comparable"
    assert "tol" in found["jacobian.norm:median", ""].reason
    assert found["bounds.exact:median", ""].status == "unchanged"


def test_nothing_to_compare(report, jacobian, bounds, ids, norms):
    with pytest.raises(UsageError, match="at least two"):
        compare([report(jacobian(norms))])
    with pytest.raises(BaselineError, match="no common section"):
        compare([report(jacobian(norms)), report(bounds(EXACT))])
    with pytest.raises(BaselineError, match="only 0 of"):
        compare([report(jacobian(norms)), report(jacobian(norms, ids=ids(64, 99)))])


def test_where_a_run_was_cut_short_it_says_to_go_on(report, jacobian, norms):
    whole = report(jacobian(norms))
    partial = whole.model_copy(update={"status": "partial"})
    for pair in ([whole, partial], [partial, whole]):
        with pytest.raises(BaselineError, match="partial") as refused:
            compare(pair)
        assert "--resume" in refused.value.advice


def with_margins(section, margins):
    return section.model_copy(update={"samples": {**section.samples, "margin": tuple(margins)}})


def test_a_column_that_only_one_report_has_is_named(report, jacobian, norms):
    classifier = with_margins(jacobian(norms), norms - 1.0)
    pair = compare([report(classifier, spec="c"), report(jacobian(norms), spec="e")]).pairs[0]
    found = verdicts(pair)
    assert found["jacobian.norm:median", ""].status == "unchanged"
    assert ("jacobian.margin:median", "") not in found
    assert pair.notes == ("not compared, because only c has it: jacobian.margin",)


def test_a_column_is_compared_over_the_samples_that_have_it_in_both(report, jacobian, norms):
    old, new = [None, *norms[1:]], [*1.2 * norms[:-1], None]
    reports = [
        report(with_margins(jacobian(norms), old)),
        report(with_margins(jacobian(norms), new), weights="b"),
    ]
    for pair, times in (
        (compare(reports).pairs[0], 1.2),
        (compare(reports[::-1]).pairs[0], 1 / 1.2),
    ):
        margin = verdicts(pair)["jacobian.margin:median", ""]
        assert (margin.samples, margin.reason) == (62, "")
        assert 1 + margin.paired == pytest.approx(times)
        assert sorted((margin.old, margin.new)) == pytest.approx(
            [np.median(norms[1:-1]), 1.2 * np.median(norms[1:-1])]
        )


def test_a_column_without_a_sample_in_common_is_named(report, jacobian, norms):
    sides = [None] * 32 + [1.0] * 32, [1.0] * 32 + [None] * 32
    pair = compare([report(with_margins(jacobian(norms), side)) for side in sides]).pairs[0]
    reason = verdicts(pair)["jacobian.margin:median", ""].reason
    assert reason == "jacobian: 64 samples did not converge, or have no value"


def test_figures_that_turn_negative_change_by_a_difference(report, jacobian, norms):
    old, new = (with_margins(jacobian(norms), norms - shift) for shift in (0.0, 3.0))
    pair = compare([report(old), report(new, weights="b")]).pairs[0]
    margin = verdicts(pair)["jacobian.margin:median", ""]
    assert (margin.status, margin.unit) == ("regressed", "")
    assert margin.change == pytest.approx(-3.0)


def test_few_shared_samples_are_compared_and_counted(report, jacobian, ids, norms):
    old, new = jacobian(norms), jacobian(1.1 * norms[54:], ids=ids(10, 54))
    pair = compare([report(old), report(new, weights="b")]).pairs[0]
    median = verdicts(pair)["jacobian.norm:median", ""]
    assert (median.status, median.samples) == ("regressed", 10)
    assert median.old == np.median(norms[54:])
    said = "compared over the 10 shared samples (of 64 and 10): jacobian"
    assert said in pair.warnings


def test_figures_that_are_no_numbers_are_counted_as_not_compared(report, jacobian, attack, norms):
    old = report(jacobian(norms), attack(np.ones(64, int)))
    new = report(jacobian(np.full(64, np.nan)), attack(np.ones(64, int)), weights="b")
    comparison = compare([old, new])
    found = verdicts(comparison.pairs[0])
    assert found["jacobian.norm:median", ""].reason.endswith("64 values are not finite")
    assert [v.status for v in found.values()].count("error") == 2


def certified(verdicts):
    column = [int(v == "certified") for v in verdicts]
    row = CERTIFY_TABLE.row(norm="linf", eps=0.01, eps_text="0.01", samples=len(verdicts))
    return layouts()["certify"].section(
        settings={"seed": 0},
        rows=(row,),
        samples={
            "ids": tuple(f"s{i}" for i in range(len(verdicts))),
            "correct": tuple(int(v != "wrong") for v in verdicts),
            "verdict@linf,0.01": tuple(verdicts),
            "robust@linf,0.01": tuple(int(v in ("certified", "undecided")) for v in verdicts),
            "certified@linf,0.01": tuple(column),
        },
    )


def test_samples_without_an_answer_stand_on_no_side(report):
    old, new = certified(["certified", "broken", "certified"]), certified(["certified"] * 3)
    unknown = {name: (*flags[:2], None) for name, flags in new.samples.items() if name != "ids"}
    new = new.model_copy(update={"samples": new.samples | unknown})
    pair = pair_of(report(old), report(new, weights="b"))
    assert [(v.samples, v.old, v.new, v.lost, v.gained) for v in shares(pair)] == [
        (2, 1, 1, 0, 0),
        (2, 0.5, 1, 0, 1),
        (2, 0.5, 1, 0, 1),
    ]


def test_certificates_that_are_lost_and_gained(report):
    old = certified(["certified", "undecided", "broken", "certified"])
    new = certified(["undecided", "certified", "undecided", "wrong"])
    pair = pair_of(report(old), report(new, weights="b"))
    assert [(v.metric, v.lost, v.gained) for v in shares(pair)] == [
        ("certify.correct:mean", 1, 0),
        ("certify.robust:mean", 1, 1),
        ("certify.certified:mean", 2, 1),
    ]
    figures = {s.id: s.figures["certify.certified@linf,0.01"] for s in pair.samples}
    assert figures == {"s0": (1, 0), "s1": (0, 1), "s2": (0, 0), "s3": (1, 0)}
    assert pair.samples[0].id == "s3"


def test_a_resizing_that_one_report_alone_states_spoils_nothing(report, jacobian, norms):
    fine = {"mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 0.875}
    old, new = report(jacobian(norms)), report(jacobian(norms), weights="b", preprocess=fine)
    assert pair_of(old, new).warnings == ()
    assert judge(new, old).exit_code == 0
    nearest = report(jacobian(norms), preprocess=fine | {"interpolation": "nearest"})
    judged = judge(new, nearest)
    assert judged.exit_code == 5
    assert "preprocess interpolation: nearest became bicubic" in judged.reason
