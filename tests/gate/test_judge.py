"""Rules, and their verdicts on pairs of reports."""

import math
import re
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipaudit.errors import BaselineError, UsageError
from lipaudit.gate import compare, judge, statistics
from lipaudit.gate.conditions import promote
from lipaudit.gate.contrasts import examine
from lipaudit.gate.judging import require_judgeable
from lipaudit.gate.rules import Limit, configure, parse_rule
from lipaudit.measures import layouts
from lipaudit.measures.bounds import BALLS_TABLE
from lipaudit.tables import Note
from tests.gate.cases import (
    EXACT,
    NORMS,
    attack,
    bounds,
    certify,
    flags,
    jacobian,
    new,
    report,
    rules,
    sample_ids,
    with_samples,
)


@pytest.mark.parametrize(
    ("metric", "limit", "known"),
    [
        ("jacobian.norm:median", " <= +5%", ("relative", "1/20", "%")),
        ("jacobian.norm", "<=+5%", ("relative", "1/20", "%")),
        ("attack.robust@linf,2/255", " >= -2pp", ("difference", "-1/50", "pp")),
        ("bounds.exact:max", " <= 40", ("absolute", "40", "")),
        ("attention.intermediate:mean", " <= +0.05", ("difference", "1/20", "")),
        ("bounds.exact@layer=3,head=1", " <= +20%", ("relative", "1/5", "%")),
        ("bounds.layers.exact_out:each", " <= -1.5e-1%", ("relative", "-3/2000", "%")),
        ("jacobian.margin", " >= -.1", ("difference", "-1/10", "")),
        ("bounds.exact_max:each", " <= 2", ("absolute", "2", "")),
    ],
)
def test_grammar(metric, limit, known):
    rule = parse_rule(metric + limit)
    usual = {"jacobian": "median", "attack": "mean", "bounds": "each"}
    stated = metric if ":" in metric else f"{metric}:{usual[rule.measure]}"
    assert (rule.metric, rule.op) == (stated, limit.strip()[:2])
    kind, value, unit = known
    assert rule.limit == Limit(kind, Fraction(value), unit)


@pytest.mark.parametrize(
    ("text", "message", "advice"),
    [
        ("jacobian.norms <= +5%", "unknown metric", "jacobian.norm"),
        ("jacobian.norm:medain <= +5%", "unknown statistic", "median"),
        ("jacobian.norm < +5%", "not a rule", "jacobian.norm:median <= +5%"),
        ("jacobian.norm == 5", "not a rule", "attack.robust"),
        ("jacobian.norm <= 5%", "not a limit", "+5%"),
        ("attack.robust >= 2pp", "not a limit", "-2pp"),
        ("jacobian.norm <= 1.05x", "not a limit", "+5%"),
        ("jacobian.norm <= -100%", "not a limit", "+5%"),
        ("jacobian.norm <= five", "not a limit", "+5%"),
        ("jacobian.norm:each <= +5%", "one value per sample", "median"),
        ("attack.robust:each >= -2pp", "one value per sample", "mean"),
        ("attack.robust >= -2", "a share is between 0 and 1", "-2pp"),
        ("attack.clean:each >= -2", "a share is between 0 and 1", "-2pp"),
        ("attention.intermediate:mean <= 5", "a share is between 0 and 1", "0.6 for 60%"),
        ("bounds.module <= 3", "unknown metric", "bounds"),
        ("", "not a rule", "jacobian.norm"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(text, message, advice):
    with pytest.raises(UsageError, match=message) as caught:
        parse_rule(text)
    assert advice in caught.value.advice
    assert caught.value.exit_code == 2


@given(
    st.decimals("-99", "1000", places=4).filter(lambda d: d == d), st.sampled_from(["%", "pp", ""])
)
@settings(deadline=None, max_examples=60)
def test_limits_are_exact(number, unit):
    text = f"{number:+f}{unit}"
    value = parse_rule(f"jacobian.norm <= {text}").limit.value
    assert value == Fraction(number) / (100 if unit else 1)


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=40)
def test_any_text_is_a_rule_or_a_usage_error(text):
    with suppress(UsageError):
        assert parse_rule(text).text


def test_configuration():
    table = {"rules": ["jacobian.norm <= 40"], "alpha": 0.01, "strict": True}
    assert configure(table)["rules"][0].text == "jacobian.norm <= 40"
    assert configure(table)["alpha"] == 0.01
    texts = ["bounds.exact <= +1%", "bounds.exact:max <= 4"]
    assert [rule.text for rule in configure(table, texts)["rules"]] == texts
    assert configure({}) == {"rules": (), "alpha": 0.05, "strict": False}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rule": []}, "unknown key 'rule'.*Did you mean 'rules'"),
        ({"rules": "jacobian.norm <= 40"}, "not of type list"),
        ({"alpha": "small"}, "not of type float"),
        ({"rules": ["nothing"]}, "not a rule"),
    ],
)
def test_a_broken_configuration_is_refused(table, message):
    with pytest.raises(UsageError) as refused:
        configure(table)
    assert re.search(message, f"{refused.value.message} {refused.value.advice}")


def only(judgement):
    (verdict,) = judgement.verdicts
    return verdict


BASELINE = report(bounds(EXACT), jacobian(), attack(flags(90)))


def build(*, head=None, factor=1.0, scale=1.0, lost=0, noise=0.0, **run):
    """The report of a model like the baseline's, but for what is said."""
    exact = EXACT * np.exp(noise * np.random.default_rng(1).normal(size=EXACT.shape))
    if head is not None:
        exact[head] *= factor
    norms = NORMS * scale * np.exp(noise * np.random.default_rng(2).normal(size=NORMS.size))
    return new(bounds(exact), jacobian(norms), attack(flags(90 - lost)), **run)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"head": slice(None), "factor": 2, "scale": 1.3, "lost": 40}, "regressed"),
        ({"head": slice(None), "factor": 0.5, "scale": 0.7, "lost": -30}, "improved"),
        ({"weights": "a", "noise": 1e-6}, "unchanged"),  # measured again, to its accuracy
    ],
)
def test_every_default_rule_can_fail_and_improve(changes, status):
    judged = judge(build(**changes), BASELINE).verdicts
    metrics = "jacobian.norm:median", "bounds.exact:each", "attack.robust:mean"
    found = {(v.metric, v.status) for v in judged if v.metric != "attack.correct:mean"}
    assert found == {(metric, status) for metric in metrics}


def labelled(section, correct, radius):
    return with_samples(section, correct=correct, radius_first_order=radius)


def test_clean_accuracy_and_the_radius_fail_by_default():
    """Clean accuracy is judged once; a misclassified sample has the radius 0."""
    right, lost = np.ones(64, bool), np.arange(64) < 60
    radius = np.where(lost, 0.8 * NORMS, np.nan).tolist()
    radius = [None if np.isnan(value) else value for value in radius]
    old = report(labelled(jacobian(), right, NORMS))
    current = new(labelled(jacobian(0.5 * NORMS), lost, radius))
    found = {v.metric: v for v in judge(current, old).verdicts}
    fallen = found["jacobian.radius_first_order:median"]
    assert (fallen.status, fallen.samples) == ("regressed", 64)
    assert fallen.paired == pytest.approx(-0.2)
    assert found["jacobian.correct:mean"].status == "inconclusive"
    norm = found["jacobian.norm:median"]
    assert norm.status == "improved"
    assert "first-order radius (margin over gradient norm) fell too" in norm.line
    both = [with_samples(attack(flags(60, 64)), correct=c) for c in (right, lost)]
    judged = judge(new(*current.sections, both[1]), report(*old.sections, both[0]))
    assert sum(v.metric.endswith("correct:mean") for v in judged.verdicts) == 1
    better = judge(old, new(labelled(jacobian(2 * NORMS), right, 0.9 * NORMS)))
    assert not any(v.remark for v in better.verdicts)


def test_fewer_certificates_are_a_regression_and_weaker_attacks_no_comparison():
    old, current = report(certify(["certified"] * 24)), new(certify(["certified", "broken"] * 12))
    judgement = judge(current, old)
    verdict = only(judgement)
    assert (verdict.metric, verdict.name) == ("certify.certified:mean", "linf,0.01")
    assert (verdict.status, judgement.exit_code) == ("regressed", 1)
    assert judge(old, old).exit_code == 0
    compared = {v.metric: v.status for v in compare([old, current]).pairs[0].verdicts}
    assert compared["certify.certified:mean"] == "regressed"
    skipped = Note(level="info", code="attack-skipped", text="apgd-t did not run")
    weaker = old.sections[0].model_copy(update={"notes": (skipped,)})
    judgement = judge(report(weaker), old)
    assert judgement.exit_code == 5
    assert "certify: weaker than the baseline: apgd-t did not run" in judgement.reason


def test_limits_p_values_and_statuses_agree():
    limits = {"bounds.exact:each": 0.2, "attack.robust:mean": -0.02, "jacobian.norm:median": 0.1}
    for lost in range(0, 45, 6):
        judgement = judge(build(head=3, factor=1.3, noise=0.1, lost=lost, scale=1.06), BASELINE)
        for v in judgement.verdicts:
            way = -1 if v.unit == "pp" else 1
            beyond = way * (v.paired - limits.get(v.metric, -0.02)) > 1e-12
            proven = v.p_adjusted <= 0.05 and v.p <= 0.025
            assert (v.status == "regressed") == (beyond and proven)
            assert (v.status == "inconclusive") == (beyond and not proven)
            assert (v.change_status == "regressed") == (v.p <= 0.025)
            assert (v.low > 0 or v.high < 0) == (v.change_status in ("regressed", "improved"))


def test_holm_over_rules_then_rows_together():
    growth = np.where(np.arange(12) == 7, 1.5, 0.9)[:, None]
    judgement = judge(new(bounds(EXACT * growth), jacobian(), attack(flags(90))), BASELINE)
    (broken,) = (v for v in judgement.verdicts if v.status == "regressed")
    assert (broken.name, judgement.exit_code) == ("layer 3 head 1", 1)
    # In one of 256 flips of all signs this head grows in all samples, in one all others do.
    assert broken.p == pytest.approx(1 / 256)
    assert broken.p_adjusted == pytest.approx(4 * 2 / 256)
    quiet = judge(build(head=7, factor=1.5, noise=0.02), BASELINE)
    (head,) = (v for v in quiet.verdicts if v.status == "regressed")
    assert head.p_adjusted == pytest.approx(4 / 256)  # the others move by less than 4%
    loud = judge(build(head=7, factor=1.5, noise=0.12), BASELINE)
    (head,) = (v for v in loud.verdicts if v.name == "layer 3 head 1")
    assert head.status == "inconclusive"  # others rise in all samples by chance: 16 tell
    assert 8 < head.samples_needed <= 20


def test_few_samples_prove_nothing_and_say_how_many_do():
    four = judge(new(bounds(3 * EXACT[:1, :4])), report(bounds(EXACT[:1, :4])))
    assert (only(four).status, only(four).samples_needed) == ("inconclusive", 6)
    six = judge(new(bounds(3 * EXACT[:1, :6])), report(bounds(EXACT[:1, :6])))
    assert only(six).status == "regressed"


@pytest.mark.parametrize(("lost", "count"), [(1, 4), (1, 5), (2, 5)])
def test_few_samples_say_how_many_prove_a_loss_of_this_size(lost, count):
    """So many samples with the same share of losses prove it, and half of them do not."""

    def lose(times):
        broken = attack(1 - flags(times * lost, times * count))
        kept = attack(flags(times * count, times * count))
        return only(judge(new(broken), report(kept), rules("attack.robust >= -2pp")))

    few = lose(1)
    assert few.status == "inconclusive"
    times = math.ceil(few.samples_needed / count)
    assert lose(times).status == "regressed"
    assert lose(times // 2).status == "inconclusive"


@pytest.mark.parametrize(
    ("lost", "status", "code"),
    [
        (0, "pass", 6),
        (2, "pass", 6),
        (4, "inconclusive", 6),
        (6, "regressed", 1),
        (30, "regressed", 1),
        (-20, "improved", 0),
    ],
)
def test_verdicts_on_accuracy(lost, status, code):
    chosen = rules("attack.robust >= -2pp")
    judgement = judge(build(lost=lost), BASELINE, chosen, strict=True)
    verdict = only(judgement)
    assert (verdict.status, judgement.exit_code) == (status, code)
    lenient = judge(build(lost=lost), BASELINE, chosen)
    assert lenient.exit_code == (code if code != 6 else 0)
    if status == "inconclusive":  # and says what would prove it
        assert verdict.samples_needed > verdict.samples == 128
        proof = "would prove that it became worse at all, and this run has 128"
        needed = f"about {verdict.samples_needed} samples {proof}"
        assert needed in verdict.line
        assert needed in judgement.reason
        assert f"not proven: 1 inconclusive; {needed[:12]}" in judgement.summary
        many = verdict.samples_needed
        old, current = (
            report(attack(flags(ones * many // 128, many))) for ones in (90, 90 - lost)
        )
        more = judge(current.model_copy(update={"run": new().run}), old, chosen)
        assert only(more).status == "regressed"
        wider = rules(f"attack.robust >= {100 * verdict.low - 0.1:.1f}pp")
        assert only(judge(build(lost=lost), BASELINE, wider)).status == "pass (proven)"


@pytest.mark.parametrize(
    ("rule", "status"),
    [
        ("bounds.exact:max <= 40", "pass"),
        ("bounds.exact:max <= 0.5", "regressed"),
        ("jacobian.norm:max <= 1000", "pass"),
        ("jacobian.norm:p95 <= 0.1", "regressed"),
        ("attack.robust >= 0.7", "pass"),
        ("attack.robust >= 0.71", "regressed"),
    ],
)
def test_absolute_limits_judge_the_current_run_even_of_the_same_model(rule, status):
    verdict = only(judge(build(weights="a"), BASELINE, rules(rule)))
    assert (verdict.status, verdict.old) == (status, None)


def of_weights(value):
    return report(
        layouts()["weights"].section(rows=[layouts()["weights"].row(layer=0, head=0, ov=value)])
    )


@pytest.mark.parametrize(
    ("old", "current", "rule", "status"),
    [
        (0.73, 0.73, "weights.ov:max >= 0.73", "pass"),
        (1.1, 1.1 * 1.05, "weights.ov:max <= +5%", "pass"),
        (1.1, 1.155001, "weights.ov:max <= +5%", "regressed"),
        (0.1, 0.1 + 0.2, "weights.ov:max <= +0.2", "pass"),
        (3.0, 2.7, "weights.ov:max >= -10%", "pass"),
        (3.0, 2.69, "weights.ov:max >= -10%", "regressed"),
        (3.0, 2.0, "weights.ov:max <= +10%", "improved"),
        (0.0, 0.0, "weights.ov:max <= +10%", "pass"),
        (0.0, 1e-9, "weights.ov:max <= +10%", "regressed"),
        (2.0, 1.9, "weights.ov:max <= -10%", "regressed"),
        (1e308, 1e308, "weights.ov:max <= +300%", "pass"),
    ],
)
def test_figures_compared_as_they_are_meet_their_limit_exactly(old, current, rule, status):
    """Those of the weights: any change of them is certain."""
    now = of_weights(current).model_copy(update={"run": new().run})
    judgement = judge(now, of_weights(old), rules(rule), strict=True)
    assert only(judgement).status == status
    assert judgement.exit_code == (status == "regressed")


@pytest.mark.parametrize(
    ("factor", "status"),
    [(1.2, "pass (proven)"), (1.2001, "regressed"), (1 / 1.2001, "improved")],
)
def test_a_ratio_exactly_at_its_limit_passes(factor, status):
    exact = np.array([[1.0, 1.1, 1.25, 1.3, 1.45, 1.6, 1.75, 2.0]])
    judgement = judge(new(bounds(exact * factor, heads=1)), report(bounds(exact, heads=1)))
    assert only(judgement).status == status


RADII = report(
    attack([flags(90), flags(40)], eps=("2/255", "4/255"), attacks=("apgd-ce", "square"))
)
BALLS = report(
    layouts()["bounds.ball"].section(
        rows=[
            BALLS_TABLE.row(layer=2, head=head, r=r, ball_sharp=1.0 + r)
            for head in (0, 1)
            for r in (1 / 255, 0.03)
        ]
    )
)


@pytest.mark.parametrize(
    ("measured", "rule", "names"),
    [
        (BASELINE, "bounds.exact@layer=3 <= +20%", ["layer 3 head 0", "layer 3 head 1"]),
        (RADII, "attack.robust >= -2pp", ["worst,linf,2/255", "worst,linf,4/255"]),
        (RADII, "attack.robust@linf,4/255 >= -2pp", ["worst,linf,4/255"]),
        (RADII, "attack.robust@eps=4/255,attack=square >= -2pp", ["square,linf,4/255"]),
        # a radius, however it is written
        *(
            (RADII, f"attack.{metric}", ["worst,linf,4/255"])
            for word in ("8/510", "eps=8/510", "eps=4 / 255")
            for metric in (f"robust@{word}:mean >= 0.1", f"eps@{word}:each >= 0")
        ),
        (
            BALLS,
            "bounds.ball.ball_sharp@r=1/255 <= 5",
            [f"layer 2 head {head} r {1 / 255}" for head in (0, 1)],
        ),
        (BALLS, "bounds.ball.ball_sharp@r=0.030,head=1 <= 5", ["layer 2 head 1 r 0.03"]),
    ],
)
def test_selectors_pick_rows_and_columns(measured, rule, names):
    judged = judge(measured, measured, rules(rule)).verdicts
    assert [v.name for v in judged] == names
    if "8/510" in rule:
        assert judged[0].new == pytest.approx(40 / 128 if "robust" in rule else 4 / 255)


@pytest.mark.parametrize("selector", ["", "@linf,2/255"])
def test_a_report_without_the_worst_case_pairs_with_one_that_has_it(selector):
    section = attack([flags(90)], attacks=("apgd-ce", "square"))
    old = section.model_copy(update={
        "rows": tuple(row for row in section.rows if row.attack != "worst"),
        "samples": {n: v for n, v in section.samples.items() if "worst" not in n},
    })  # fmt: skip
    old.samples["robust@square,linf,2/255"] = tuple(reversed(flags(90)))
    verdict = only(judge(report(section), report(old), rules(f"attack.robust{selector} >= -2pp")))
    both = sum(flags(90) & flags(90)[::-1])
    assert verdict.name == "worst,linf,2/255"
    assert (verdict.old, verdict.new, verdict.samples) == (both / 128, 90 / 128, 128)


@pytest.mark.parametrize("stat", ["mean", "max", "p95", "median"])
def test_a_statistic_over_rows_is_judged_by_that_of_each_sample(stat):
    louder = build(head=slice(None), factor=1.5)
    verdict = only(judge(louder, BASELINE, rules(f"bounds.exact:{stat} <= +5%")))
    rows = ([r.exact for r in x.section("bounds").rows] for x in (BASELINE, louder))
    reduce = {"p95": lambda values: np.quantile(values, 0.95)}.get(stat) or getattr(np, stat)
    assert (verdict.old, verdict.new) == pytest.approx(tuple(map(reduce, rows)))
    assert (verdict.status, verdict.samples) == ("regressed", 8)
    assert verdict.paired == pytest.approx(0.5, rel=1e-5)  # stored with six digits
    # One sample in which a head is far louder raises the maximum, and proves nothing.
    odd = EXACT.copy()
    odd[3, 2] *= 100
    verdict = only(judge(new(bounds(odd)), BASELINE, rules(f"bounds.exact:{stat} <= +5%")))
    assert verdict.status.startswith("pass")


@pytest.mark.parametrize("stat", ["mean", "max", "p95", "median"])
def test_a_head_that_overflows_is_not_left_out_of_a_statistic_over_heads(stat):
    """At one sample; at all others it grew by a factor of 100."""
    diverged = EXACT.copy()
    diverged[0] *= 100
    diverged[0, 3] = np.inf
    judged = judge(new(bounds(diverged)), BASELINE, rules(f"bounds.exact:{stat} <= +5%"))
    assert (only(judged).status, judged.exit_code) == ("error", 3)
    assert "values of layer 0 head 0 are not finite now" in only(judged).reason
    # A comparison leaves the head out.
    (rule,) = rules(f"bounds.exact:{stat} <= +5%")
    (contrast,) = examine(rule, new(bounds(diverged)), BASELINE, lenient=True)
    assert contrast.evidence.samples == 8
    # The baseline cannot say what such a head became: the others are judged.
    back = judge(new(bounds(EXACT)), report(bounds(diverged)), rules("bounds.exact:median <= +5%"))
    assert only(back).status.startswith("pass")


def test_a_repeated_sample_counts_once_for_an_absolute_limit():
    """Of 10 samples 4 are robust; one of these is in the data 11 times."""
    robust = np.array([1] * 4 + [0] * 6 + [1] * 10)
    section = attack(robust)
    ids = [*section.ids[:10], *(f"{section.ids[0]}-{i}" for i in range(2, 12))]
    rows = [row.replace(robust=0.4, samples=10) for row in section.rows]
    section = with_samples(section, ids=ids).model_copy(update={"rows": tuple(rows)})
    for limit, status in ((0.39, "pass"), (0.41, "regressed")):
        verdict = only(judge(new(section), BASELINE, rules(f"attack.robust >= {limit}")))
        assert (verdict.new, verdict.status) == (0.4, status)


def test_rows_that_contradict_their_samples_are_named():
    def edit(section, **cells):
        rows = (section.rows[0].replace(**cells), *section.rows[1:])
        return section.model_copy(update={"rows": rows})

    for section, cells, says in (
        (bounds(EXACT), {"exact": 99.0}, "bounds.exact of layer 0 head 0 is 99, and its samples"),
        (bounds(EXACT), {"exact_max": 0.01}, "bounds.exact_max of layer 0 head 0 is 0.01"),
        (jacobian(), {"median": 99.0}, "jacobian.median of pixels,logits is 99"),
        (attack(flags(90)), {"robust": 0.99}, "attack.robust of apgd-ce,linf,2/255 is 0.99"),
    ):
        column = next(iter(cells))
        measured = {"median": "jacobian.norm"}.get(column, f"{section.measure}.{column}")
        chosen = rules(f"{measured} >= 0")
        edited = edit(section, **cells)
        judgement = judge(new(edited), report(section), chosen)
        assert judgement.exit_code == 3
        assert says in judgement.reason
        assert judge(new(section), report(section), chosen).exit_code == 0
        with pytest.raises(BaselineError, match="contradicts itself"):
            promote(report(edited), "why")


NEGATIVE = report(with_samples(jacobian(), margin=-NORMS))


@pytest.mark.parametrize(
    ("rule", "message", "measured"),
    [
        ("bounds.exact@layer=99 <= +20%", "matches nothing", BASELINE),
        ("bounds.exact@color=red <= +20%", "no column 'color'", BASELINE),
        ("scaling.norm:max <= 3", "matches nothing", BASELINE),
        ("attack.robust@l2 >= -2pp", "matches nothing", BASELINE),
        ("bounds.castin:each <= 3", "matches nothing", BASELINE),
        ("jacobian.norm:max <= +5%", "variation of a maximum is unknown", BASELINE),
        ("attack.robust >= -2%", "percentage points", BASELINE),
        ("jacobian.margin >= -5%", "negative", NEGATIVE),
        ("bounds.ball.ball_sharp@r=wide <= +5%", "'wide' is not a radius", BALLS),
    ],
)
def test_a_rule_without_a_meaning_here_is_a_usage_error(rule, message, measured):
    current = measured.model_copy(update={"run": new().run})
    with pytest.raises(UsageError, match=message):
        judge(current, measured, rules(rule))


@pytest.mark.parametrize("alpha", [0.0, 1.0, -1.0])
def test_a_level_is_a_share(alpha):
    with pytest.raises(UsageError, match="alpha"):
        judge(build(), BASELINE, alpha=alpha)


@pytest.mark.parametrize("alpha", [0.05, 0.001, 1e-4, 1e-9])
def test_heads_that_double_fail_a_gate_of_any_level(alpha):
    """In all 64 samples: p is 2^-64 for each head, far below the 1 in 2000 of random flips."""
    exact = np.random.default_rng(1).lognormal(0, 0.3, (12, 64))
    chosen = rules("bounds.exact:each <= +5%", "jacobian.norm:median <= +5%")
    old = report(bounds(exact), jacobian(NORMS))
    doubled = judge(new(bounds(2 * exact), jacobian(NORMS)), old, chosen, alpha=alpha)
    assert {v.status for v in doubled.verdicts if v.metric == "bounds.exact:each"} == {"regressed"}
    assert doubled.exit_code == 1
    assert judge(new(bounds(exact), jacobian(NORMS)), old, chosen, alpha=alpha).exit_code == 0


@pytest.mark.parametrize(
    ("alpha", "others"),
    [(0.05, 0), (0.05, 119), (2e-4, 0)],  # alone; among 120 rules; at a small level
)
def test_a_mean_that_doubles_fails_a_gate_of_many_rules_or_a_small_level(alpha, others):
    """In all 256 samples, though 2000 draws of a bootstrap have no p-value below 1 in 2000."""
    generator = np.random.default_rng(2)
    norms = generator.lognormal(0, 0.3, 256)
    noise = generator.lognormal(0, 0.05, 256)
    old = report(jacobian(norms))
    chosen = rules("jacobian.norm:mean <= +5%", *["jacobian.norm:median <= +150%"] * others)
    worse = judge(new(jacobian(2 * noise * norms)), old, chosen, alpha=alpha)
    verdict = worse.verdicts[0]
    assert (verdict.status, worse.exit_code) == ("regressed", 1)
    assert verdict.p_adjusted <= alpha
    assert 0.9 < verdict.low < 1 < verdict.high < 1.1
    assert judge(new(jacobian(norms)), old, chosen, alpha=alpha).exit_code == 0


def test_an_alpha_that_draws_cannot_reach_is_refused_whatever_the_values_are():
    norms = np.random.default_rng(2).lognormal(0, 0.3, 256)
    current, old = new(jacobian(2 * norms)), report(jacobian(norms))
    with pytest.raises(UsageError, match="cannot be tested at a level of 5e-10") as refused:
        judge(current, old, rules("jacobian.norm:mean <= +5%"), alpha=1e-9)
    assert refused.value.advice == "Raise alpha, or judge the median."
    # Before a model is measured; and if nothing changed, too.
    with pytest.raises(UsageError, match="half of alpha"):
        require_judgeable(rules("jacobian.norm:mean <= +5%"), old, 1e-9)
    with pytest.raises(UsageError, match="half of alpha"):
        judge(new(jacobian(norms)), old, rules("jacobian.norm:mean <= +5%"), alpha=1e-9)
    assert judge(current, old, rules("jacobian.norm:median <= +5%"), alpha=1e-9).exit_code == 1


@pytest.mark.parametrize("factor", [1.02, 2])
def test_a_mean_among_very_many_rules_is_inconclusive_and_no_error(factor, monkeypatch):
    """At a level that no draws reach; the samples needed take no fine limits."""
    generator = np.random.default_rng(2)
    norms = generator.lognormal(0, 0.3, 256)
    noise = generator.lognormal(0, 0.2, 256)
    old = report(jacobian(norms), bounds(EXACT))
    current = new(jacobian(factor * noise * norms), bounds(EXACT))
    monkeypatch.setattr(statistics, "FINEST", 1e-3)  # 2000 draws at most, not 200,000
    chosen = rules("jacobian.norm:mean <= +1%", *["bounds.exact:median <= +5%"] * 199)
    verdict = judge(current, old, chosen, alpha=0.003).verdicts[0]
    assert verdict.status == "inconclusive"
    assert verdict.samples_needed > 256


def test_rules_without_a_test_do_not_lower_the_level_of_others():
    """Of a mean that doubled, 200,000 draws have no p-value below 5e-6."""
    norms = np.random.default_rng(2).lognormal(0, 0.3, 256)
    chosen = rules("jacobian.norm:mean <= +5%", *["jacobian.norm:max <= 1000"] * 119)
    current, old = new(jacobian(2 * norms)), report(jacobian(norms))
    verdict = judge(current, old, chosen).verdicts[0]
    assert (verdict.status, verdict.p_adjusted) == ("regressed", 1 / 2000)


def test_heads_fail_at_the_very_level_of_random_flips():
    """At 0.0045 / 9 = 1 / 2000, where a p-value of 1 / 2000 times 9 is above by a rounding."""
    exact = np.random.default_rng(1).lognormal(0, 0.3, (12, 64))
    others = ["jacobian.norm:median <= +5%"] * 8
    chosen = rules("bounds.exact:each <= +5%", *others)
    old = report(bounds(exact), jacobian(NORMS))
    current = new(bounds(2 * exact), jacobian(NORMS))
    assert judge(current, old, chosen, alpha=0.0045).exit_code == 1


def test_negative_values_change_by_a_difference():
    lower = new(with_samples(jacobian(), margin=-NORMS - 0.5))
    verdict = only(judge(lower, NEGATIVE, rules("jacobian.margin >= -0.1")))
    assert verdict.status == "regressed"
    assert verdict.change == pytest.approx(-0.5)


def test_notes_name_what_is_not_judged_and_what_differs_without_harm():
    heads = report(bounds(EXACT))
    judgement = judge(heads, heads)
    assert {v.metric for v in judgement.verdicts} == {"bounds.exact:each"}
    assert sum("not judged" in note for note in judgement.notes) == 2
    current = build(seed=1, device="cuda:0", versions={"torch": "2.7.0"})
    warning = Note(level="warning", code="zero-gradients", text="3 samples have no gradient")
    *others, last = current.sections
    sections = (*others, last.model_copy(update={"notes": (warning,)}))
    judgement = judge(current.model_copy(update={"sections": sections}), BASELINE)
    assert judgement.exit_code == 0
    changes = "seed: 0 became 1", "device: cpu became cuda", "torch: 2.6.0 became 2.7.0"
    assert judgement.notes == changes
    assert judgement.warnings == ("attack: 3 samples have no gradient",)


def test_a_note_says_that_one_run_alone_tried_examples_of_another_model():
    plain = attack(flags(60))
    moved = attack(flags(60), attacks=("apgd-ce", "transfer"))
    (noted,) = judge(new(moved), report(plain)).notes[2:]
    assert noted.startswith("attack: worst includes transfer")
    assert not judge(new(moved), report(moved)).notes[2:]
    run = report(plain).run.model_copy(update={"preprocess": {"mean": [0.5]}})
    saved = plain.model_copy(update={"files": {"a.safetensors": "0" * 64}})
    baseline = report(saved).model_copy(update={"run": run})
    current = new(plain).model_copy(
        update={"run": new().run.model_copy(update=dict(run) | {"model": new().run.model})}
    )
    assert any("were not tried again" in note for note in judge(current, baseline).notes)


def test_attacks_that_begin_elsewhere_prove_no_change_of_the_same_weights():
    old, again = report(attack(flags(90))), report(attack(flags(80), seed=1))
    robust = rules("attack.robust >= -2pp")
    judgement = judge(again, old, robust)
    assert only(judgement).status == "unchanged"
    assert any("random starts" in note for note in judgement.notes)
    clean = report(attack(flags(80), correct=flags(100), seed=1))
    assert only(judge(clean, old, rules("attack.correct >= -1pp"))).status == "regressed"
    assert only(judge(report(attack(flags(80))), old, robust)).status != "unchanged"
    # Another spelling of options is no other model: the preprocessing itself is compared.
    spelt = {"class_names": "./names.txt", "mean": "0.5", "std": "0.5", "preprocess": "resize"}
    current = report(attack(flags(80), seed=1), options=spelt)
    compared = {v.metric: v.status for v in compare([old, current]).pairs[0].verdicts}
    assert compared["attack.robust:mean"] == "unchanged"
    # The same weights in another model: with other arguments of the constructor, or other pixels.
    for how in (
        {"options": {"model_kwargs": "act=relu"}},
        {"options": {"arch": "py:other.py:make"}},
        {"preprocess": {"mean": [0.1], "std": [0.5]}},
    ):
        worse = report(attack(flags(40), seed=1), **how)
        compared = {v.metric: v.status for v in compare([old, worse]).pairs[0].verdicts}
        assert compared["attack.robust:mean"] == "regressed"
        if "options" in how:  # a gate refuses other preprocessing
            assert only(judge(worse, old, robust)).status == "regressed"
    other = judge(new(attack(flags(40), seed=1)), old, robust)
    assert only(other).status == "regressed"
    assert not any("random starts" in note for note in other.notes)


def test_norms_of_another_map_are_not_judged():
    section = jacobian()
    encoder = section.model_copy(update={"rows": (section.rows[0].replace(to="features"),)})
    judgement = judge(new(encoder), report(section))
    assert {v.status for v in judgement.verdicts} == {"not comparable"}
    assert "pixels to logits are now norms of pixels to features" in judgement.reason


def test_rows_that_a_report_keeps_whole_are_not_judged_over_other_samples():
    more = new(bounds(np.c_[EXACT, EXACT[:, :2]], ids=sample_ids(10)))
    judged = judge(more, report(bounds(EXACT)), rules("bounds.tokens:each <= +1%"))
    assert {v.status for v in judged.verdicts} == {"not comparable"}
    assert judged.exit_code == 5
    kept = judge(more, report(bounds(EXACT)), rules("bounds.sharp:max <= +1%"))
    assert only(kept).status == "pass (proven)"


@pytest.mark.parametrize("column", ["ece", "ece_clean", "robust_class"])
def test_a_change_that_may_be_chance_is_refused_where_no_test_tells(column):
    """Calibration and the worst class have no test: only an absolute limit may fail a gate."""
    old, worse = attack(flags(90)), attack(flags(80))
    known = [
        s.model_copy(update={"rows": tuple(row.replace(**{column: 0.5}) for row in s.rows)})
        for s in (old, worse)
    ]
    with pytest.raises(UsageError, match="by chance is unknown") as caught:
        judge(new(known[1]), report(known[0]), rules(f"attack.{column} <= +1pp"))
    assert "absolute limit" in caught.value.advice
    verdict = judge(new(known[1]), report(known[0]), rules(f"attack.{column} <= 0.4")).verdicts[0]
    assert verdict.status == "regressed"


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("attack.ece <= +1pp", "by chance is unknown"),
        ("attack.robust <= +5%", "changes in percentage points"),
        ("attack.robust@l2 >= -2pp", "matches nothing"),
        ("bounds.exact <= +5%", "neither report has a section bounds"),
        ("attack.robust@l2 >= 0.1", ""),  # rows of the current report alone
        ("attack.ece <= 0.1", ""),
        ("attack.ece@transfer <= 0.1", ""),
        ("attack.robust@transfer >= 0.8", ""),  # they may come with the current report
        ("attack.robust@transfer,linf,2/255 >= -2pp", "matches nothing"),
        ("attack.robust@attack=transfer >= -2pp", "matches nothing"),
        ("attack.robust >= -2pp", ""),
    ],
)
def test_a_baseline_alone_tells_that_no_report_can_be_judged_by_a_rule(rule, says):
    old = attack(flags(90))
    before = report(old.model_copy(update={"rows": tuple(r.replace(ece=0.5) for r in old.rows)}))
    if not says:
        require_judgeable(rules(rule), before)
        return
    with pytest.raises(UsageError, match=says):
        require_judgeable(rules(rule), before)


def test_a_calibration_error_of_few_samples_is_missed_before_a_model_is_measured():
    """Other columns that match nothing do not name what is left out."""
    note = Note.info("left-out", "a calibration error (ECE) needs 30 samples")
    few = report(attack(flags(8, 10)).model_copy(update={"notes": (note,)}))
    advice = {
        "attack.ece <= 0.1": "needs 30 samples",
        "attack.robust@0.9 >= -2pp": "Columns: robust@",
    }
    for rule, says in advice.items():
        with pytest.raises(UsageError, match="matches nothing") as caught:
            require_judgeable(rules(rule), few)
        assert says in caught.value.advice
        assert ("Left out" in caught.value.advice) == ("ece" in rule)


def test_clean_accuracy_of_a_row_is_tested_by_its_samples():
    """Accuracy that fell by 6 points fell beyond 5, if chance does not explain it."""

    def rows(correct):
        section = attack(flags(60), correct=correct)
        cells = tuple(row.replace(clean=float(np.mean(correct))) for row in section.rows)
        return section.model_copy(update={"rows": cells})

    old, few, many = (rows(flags(n)) for n in (120, 112, 60))
    mixed = rows(np.roll(flags(112), 30))
    for section, status in ((mixed, "inconclusive"), (few, "regressed"), (many, "regressed")):
        verdict = only(judge(new(section), report(old), rules("attack.clean >= -5pp")))
        by_samples = only(judge(new(section), report(old), rules("attack.correct:mean >= -5pp")))
        assert (verdict.status, verdict.figures) == (status, by_samples.figures)


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("attack.robust <= -2pp", lambda lost: attack(flags(100 - lost))),
        ("jacobian.norm:median >= +10%", lambda lost: jacobian(NORMS * (1 + lost))),
        ("weights.ov:max >= +10%", lambda lost: of_weights(1.0 + lost).sections[0]),
    ],
)
def test_a_loss_is_no_improvement_though_a_rule_asks_for_it(text, section):
    (verdict,) = judge(new(section(40)), report(section(0)), rules(text)).verdicts
    assert verdict.status in ("pass", "pass (proven)")
    # The other way round, what is gained breaks the rule.
    (verdict,) = judge(new(section(0)), report(section(40)), rules(text)).verdicts
    assert verdict.status == "regressed"


def test_a_proven_change_of_millions_of_percent_is_rounded_down():
    verdict = only(judge(report(jacobian(NORMS * 1e5)), report(jacobian(NORMS))))
    proven = float(re.search(r"at least ([\d.]+)%", verdict.proof)[1])
    assert proven == pytest.approx(100 * (1e5 - 1), rel=1e-3)
    assert proven <= 100 * verdict.low * (1 + 1e-9)
