import numpy as np
import pytest

from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate import compare
from lipaudit.report import of_comparison, render

RNG = np.random.default_rng(21)
EXACT = RNG.lognormal(0, 0.3, (6, 8))
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


def test_a_section_that_only_one_report_has_is_noted(report, bounds, jacobian, attack, norms):
    old = report(bounds(EXACT), attack(ROBUST), spec="old")
    new = report(bounds(EXACT), jacobian(norms), spec="new", weights="b")
    pair = compare([old, new]).pairs[0]
    assert "not compared, because only old has it: attack" in pair.notes
    assert "not compared, because only new has it: jacobian" in pair.notes


def test_few_shared_samples_are_compared_and_counted(report, jacobian, ids, norms):
    old, new = jacobian(norms), jacobian(1.1 * norms[54:], ids=ids(10, 54))
    pair = compare([report(old), report(new, weights="b")]).pairs[0]
    median = verdicts(pair)["jacobian.norm:median", ""]
    assert (median.status, median.samples) == ("regressed", 10)
    assert median.old == np.median(norms[54:])
    said = "compared over the 10 shared samples (of 64 and 10): jacobian"
    assert said in pair.warnings


def test_changes_below_the_accuracy_of_the_norms_are_none(report, jacobian, norms):
    new = jacobian(norms * (1 + 1e-6))
    pair = compare([report(jacobian(norms)), report(new, weights="b")]).pairs[0]
    assert verdicts(pair)["jacobian.norm:median", ""].status == "unchanged"


def test_figures_that_are_no_numbers_are_counted_as_not_compared(report, jacobian, attack, norms):
    old = report(jacobian(norms), attack(np.ones(64, int)))
    new = report(jacobian(np.full(64, np.nan)), attack(np.ones(64, int)), weights="b")
    comparison = compare([old, new])
    found = verdicts(comparison.pairs[0])
    assert found["jacobian.norm:median", ""].reason.endswith("64 values are not finite")
    page = render(of_comparison(comparison, [old, new]), "brief").decode()
    assert "Of 4 figures: 2 inconclusive, 2 not compared." in " ".join(page.split())
