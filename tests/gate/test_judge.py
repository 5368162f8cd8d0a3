import numpy as np
import pytest

from lipaudit.errors import UsageError
from lipaudit.gate import judge
from lipaudit.gate.rules import parse_rule
from lipaudit.measures import layouts
from lipaudit.measures.bounds import BALLS_TABLE
from lipaudit.tables import Note

RNG = np.random.default_rng(11)
EXACT = RNG.lognormal(0, 0.3, (12, 8))  # 6 layers of 2 heads, 8 samples


def rules(*texts):
    return tuple(map(parse_rule, texts))


def statuses(judgement):
    return {(v.metric, v.name): v.status for v in judgement.verdicts}


def only(judgement):
    (verdict,) = judgement.verdicts
    return verdict


def flags(ones, count=128):
    return np.r_[np.ones(ones, int), np.zeros(count - ones, int)]


@pytest.fixture
def pair(report, bounds, jacobian, attack, norms):
    """Two reports out of one set of figures, the second changed by the test."""

    def build(*, head=None, factor=1.0, scale=1.0, lost=0, weights="b", noise=0.0, **run):
        exact = EXACT * np.exp(noise * np.random.default_rng(1).normal(size=EXACT.shape))
        if head is not None:
            exact[head] *= factor
        changed = norms * scale * np.exp(noise * np.random.default_rng(2).normal(size=norms.size))
        return report(
            bounds(exact), jacobian(changed), attack(flags(90 - lost)), weights=weights, **run
        )

    return build, report(bounds(EXACT), jacobian(norms), attack(flags(90)), weights="a")


def test_every_default_rule_can_fail(pair):
    build, baseline = pair
    judgement = judge(build(head=0, factor=2, scale=1.3, lost=40), baseline)
    broken = {v.metric for v in judgement.verdicts if v.status == "regressed"}
    assert broken == {
        "jacobian.norm:median",
        "bounds.exact:each",
        "attack.robust:mean",
    }


def test_limits_p_values_and_statuses_agree(pair):
    build, baseline = pair
    for lost in range(0, 45, 3):
        judgement = judge(build(head=3, factor=1.3, noise=0.1, lost=lost, scale=1.06), baseline)
        for v in judgement.verdicts:
            worse = v.low > 0.2 if v.metric == "bounds.exact:each" else None
            if v.metric == "attack.robust:mean":
                worse = v.high < -0.02
            if worse is not None:
                assert (v.status == "regressed") == worse
            assert (v.status == "regressed") == (v.p_adjusted <= 0.05)
            assert (v.status == "regressed") == (v.p <= v.level)


def test_holm_over_rules_then_rows(pair):
    build, baseline = pair
    judgement = judge(build(head=7, factor=1.5, noise=0.02), baseline)
    (broken,) = (v for v in judgement.verdicts if v.status == "regressed")
    assert (broken.name, judgement.exit_code) == ("layer 3 head 1", 1)
    by_metric = {}
    for v in judgement.verdicts:
        by_metric.setdefault(v.metric, []).append(v)
    # The head's rule has the smallest p-value: tested at .05/3, its 12 rows at .05/3/12.
    head = next(v for v in by_metric["bounds.exact:each"] if v.name == "layer 3 head 1")
    assert head.level == pytest.approx(0.05 / 3 / 12)
    assert by_metric["jacobian.norm:median"][0].level == pytest.approx(0.05 / 2)


@pytest.mark.parametrize(
    ("lost", "status", "code"),
    [
        (0, "pass", 0),
        (2, "pass (not proven)", 6),
        (6, "inconclusive", 6),
        (30, "regressed", 1),
        (-20, "improved", 0),
    ],
)
def test_verdicts_on_accuracy(pair, lost, status, code):
    build, baseline = pair
    chosen = rules("attack.robust >= -2pp")
    judgement = judge(build(lost=lost), baseline, chosen, strict=True)
    assert only(judgement).status == status
    assert judgement.exit_code == code
    lenient = judge(build(lost=lost), baseline, chosen)
    assert lenient.exit_code == (code if code != 6 else 0)


def test_an_inconclusive_verdict_says_what_would_settle_it(pair):
    build, baseline = pair
    verdict = only(judge(build(lost=6), baseline, rules("attack.robust >= -2pp")))
    assert verdict.status == "inconclusive"
    assert verdict.samples_needed > verdict.samples == 128
    needed = f"about {verdict.samples_needed} samples would decide it (this run has 128)"
    assert f"{needed}, or a limit beyond {100 * verdict.low:+.3g}pp" in verdict.line
    wider = rules(f"attack.robust >= {100 * verdict.low - 0.1:.1f}pp")
    assert only(judge(build(lost=6), baseline, wider)).status == "pass"


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
def test_absolute_limits_judge_the_current_run_even_of_the_same_model(pair, rule, status):
    build, baseline = pair
    verdict = only(judge(build(weights="a"), baseline, rules(rule)))
    assert verdict.status == status
    assert verdict.old is None


@pytest.mark.parametrize(
    ("old", "new", "rule", "status"),
    [
        (0.73, 0.73, "bounds.exact:max >= 0.73", "pass"),
        (1.1, 1.1 * 1.05, "bounds.exact:max <= +5%", "pass"),
        (1.1, 1.155001, "bounds.exact:max <= +5%", "regressed"),
        (0.1, 0.1 + 0.2, "bounds.exact:max <= +0.2", "pass"),
        (3.0, 2.7, "bounds.exact:max >= -10%", "pass"),
        (3.0, 2.69, "bounds.exact:max >= -10%", "regressed"),
        (3.0, 2.0, "bounds.exact:max <= +10%", "improved"),
        (0.0, 0.0, "bounds.exact:max <= +10%", "pass"),
        (0.0, 1e-9, "bounds.exact:max <= +10%", "regressed"),
        (2.0, 1.9, "bounds.exact:max <= -10%", "regressed"),
    ],
)
def test_figures_compared_as_they_are_meet_their_limit_exactly(
    report, bounds, old, new, rule, status
):
    before, now = (bounds([[v] * 8], heads=1) for v in (old, new))
    row = now.rows[0].replace(exact=new)
    now = now.model_copy(update={"rows": (row,)})
    assert only(judge(report(now, weights="b"), report(before), rules(rule))).status == status


@pytest.mark.parametrize(
    ("factor", "status"), [(1.2, "pass"), (1.2001, "regressed"), (1 / 1.2001, "improved")]
)
def test_a_ratio_exactly_at_its_limit_passes(report, bounds, factor, status):
    exact = np.array([[1.0, 1.1, 1.25, 1.3, 1.45, 1.6, 1.75, 2.0]])
    judgement = judge(
        report(bounds(exact * factor, heads=1), weights="b"),
        report(bounds(exact, heads=1)),
    )
    assert only(judgement).status == status


def test_selectors_pick_rows_and_columns(pair, report, attack):
    build, baseline = pair
    judgement = judge(build(), baseline, rules("bounds.exact@layer=3 <= +20%"))
    assert [v.name for v in judgement.verdicts] == ["layer 3 head 0", "layer 3 head 1"]
    radii = report(
        attack([flags(90), flags(40)], eps=("2/255", "4/255"), attacks=("apgd-ce", "square"))
    )
    names = {
        rule: [v.name for v in judge(radii, radii, rules(rule)).verdicts]
        for rule in (
            "attack.robust >= -2pp",
            "attack.robust@linf,4/255 >= -2pp",
            "attack.robust@eps=4/255,attack=square >= -2pp",
        )
    }
    assert list(names.values()) == [
        ["worst,linf,2/255", "worst,linf,4/255"],
        ["worst,linf,4/255"],
        ["square,linf,4/255"],
    ]


@pytest.mark.parametrize("selector", ["", "@linf,2/255"])
def test_a_report_without_the_worst_case_pairs_with_one_that_has_it(report, attack, selector):
    whole = report(attack([flags(90)], attacks=("apgd-ce", "square")))
    section = whole.section("attack")
    old = section.model_copy(update={
        "rows": tuple(row for row in section.rows if row.attack != "worst"),
        "samples": {n: v for n, v in section.samples.items() if "worst" not in n},
    })  # fmt: skip
    old.samples["robust@square,linf,2/255"] = tuple(reversed(flags(90)))
    verdict = only(judge(whole, report(old), rules(f"attack.robust{selector} >= -2pp")))
    both = sum(a and b for a, b in zip(flags(90), reversed(flags(90)), strict=True))
    assert verdict.name == "worst,linf,2/255"
    assert (verdict.old, verdict.new, verdict.samples) == (both / 128, 90 / 128, 128)


@pytest.mark.parametrize("word", ["8/510", "eps=8/510", "eps=4 / 255"])
@pytest.mark.parametrize("metric", ["robust@{}:mean >= 0.1", "eps@{}:each >= 0"])
def test_selectors_know_a_radius_however_it_is_written(report, attack, word, metric):
    radii = report(attack([flags(90), flags(40)], eps=("2/255", "4/255")))
    verdict = only(judge(radii, radii, rules("attack." + metric.format(word))))
    assert verdict.name == "worst,linf,4/255"
    assert verdict.new == pytest.approx(40 / 128 if "robust" in metric else 4 / 255)


def test_row_columns_without_samples_are_compared_as_they_are(pair):
    build, baseline = pair
    louder = build(head=2, factor=3.0)
    verdict = only(judge(louder, baseline, rules("bounds.exact:mean <= +5%")))
    old, new = (np.mean([r.exact for r in x.section("bounds").rows]) for x in (baseline, louder))
    assert (verdict.old, verdict.new) == pytest.approx((old, new))
    assert verdict.status == "regressed"
    assert verdict.samples == 0


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("bounds.exact@layer=99 <= +20%", "matches nothing"),
        ("bounds.exact@color=red <= +20%", "no column 'color'"),
        ("scaling.norm:max <= 3", "matches nothing"),
        ("attack.robust@l2 >= -2pp", "matches nothing"),
        ("bounds.castin:each <= 3", "matches nothing"),
        ("jacobian.norm:max <= +5%", "variation of a maximum is unknown"),
        ("attack.robust >= -2%", "percentage points"),
    ],
)
def test_a_rule_without_a_meaning_here_is_a_usage_error(pair, rule, message):
    build, baseline = pair
    with pytest.raises(UsageError, match=message):
        judge(build(), baseline, rules(rule))
    for alpha in (0.0, 1.0, -1.0):
        with pytest.raises(UsageError, match="alpha"):
            judge(build(), baseline, alpha=alpha)


def test_negative_values_have_no_relative_change(report, jacobian, norms):
    section = jacobian(norms)
    section = section.model_copy(update={"samples": {**section.samples, "margin": tuple(-norms)}})
    with pytest.raises(UsageError, match="negative"):
        judge(report(section, weights="b"), report(section), rules("jacobian.margin >= -5%"))
    lower = section.model_copy(
        update={"samples": {**section.samples, "margin": tuple(-norms - 0.5)}}
    )
    judgement = judge(
        report(lower, weights="b"), report(section), rules("jacobian.margin >= -0.1")
    )
    assert only(judgement).status == "regressed"
    assert only(judgement).change == pytest.approx(-0.5)


def test_a_default_rule_without_its_section_is_dropped_and_named(report, bounds):
    section = report(bounds(EXACT))
    judgement = judge(section, section)
    assert {v.metric for v in judgement.verdicts} == {"bounds.exact:each"}
    assert sum("not judged" in note for note in judgement.notes) == 2


def test_clean_accuracy_is_shown_but_never_fails(report, attack):
    worse = report(attack(flags(60), correct=flags(64)), weights="b")
    judgement = judge(worse, report(attack(flags(60), correct=flags(120))))
    assert judgement.notes[-1].startswith(
        "clean accuracy, which never fails: 0.9375 -> 0.5 (-43.8pp, limits "
    )
    assert judgement.exit_code == 0


def test_what_differs_without_harm_is_noted(pair):
    build, baseline = pair
    current = build(seed=1, device="cuda:0", versions={"torch": "2.7.0"})
    warning = Note(level="warning", code="zero-gradients", text="3 samples have no gradient")
    sections = [s.model_copy(update={"notes": (warning,)}) for s in current.sections[-1:]]
    current = current.model_copy(update={"sections": (*current.sections[:-1], *sections)})
    judgement = judge(current, baseline)
    assert judgement.exit_code == 0
    assert judgement.notes[1:] == (
        "seed: 0 became 1",
        "device: cpu became cuda",
        "torch: 2.6.0 became 2.7.0",
    )
    assert judgement.warnings == ("attack: 3 samples have no gradient",)


def test_the_same_weights_measured_again_to_their_accuracy_are_unchanged(pair):
    build, baseline = pair
    judgement = judge(build(weights="a", noise=1e-6), baseline)
    assert set(statuses(judgement).values()) == {"unchanged"}


def test_attacks_that_begin_elsewhere_prove_no_change_of_the_same_weights(report, attack):
    old, new = report(attack(flags(90))), report(attack(flags(80), seed=1))
    judgement = judge(new, old)
    assert only(judgement).status == "unchanged"
    assert any("random starts" in note for note in judgement.notes)
    clean = report(attack(flags(80), correct=flags(100), seed=1))
    assert only(judge(clean, old, rules("attack.correct >= -1pp"))).status == "regressed"
    again = judge(report(attack(flags(80))), old)
    assert only(again).status != "unchanged"
    other = judge(report(attack(flags(40), seed=1), weights="b"), old)
    assert only(other).status == "regressed"
    assert not any("random starts" in note for note in other.notes)


def test_norms_of_another_map_are_not_judged(report, jacobian, norms):
    section = jacobian(norms)
    row = section.rows[0].replace(to="features")
    encoder = section.model_copy(update={"rows": (row,)})
    judgement = judge(report(encoder, weights="b"), report(section))
    assert {v.status for v in judgement.verdicts} == {"not comparable"}
    assert "pixels to logits are now norms of pixels to features" in judgement.reason


def test_rows_that_a_report_keeps_whole_are_not_judged_over_other_samples(report, bounds, ids):
    more = report(bounds(np.c_[EXACT, EXACT[:, :2]], ids=ids(10)), weights="b")
    judged = judge(more, report(bounds(EXACT)), rules("bounds.tokens:each <= +1%"))
    assert {v.status for v in judged.verdicts} == {"not comparable"}
    assert judged.exit_code == 5
    kept = judge(more, report(bounds(EXACT)), rules("bounds.sharp:max <= +1%"))
    assert only(kept).status == "pass"


def test_a_radius_picks_balls_by_its_value(report):
    rows = tuple(
        BALLS_TABLE.row(layer=2, head=head, r=r, ball_sharp=1.0 + r)
        for head in (0, 1)
        for r in (1 / 255, 0.03)
    )
    balls = report(layouts()["bounds.ball"].section(rows=rows))
    names = {
        rule: [v.name for v in judge(balls, balls, rules(rule)).verdicts]
        for rule in (
            "bounds.ball.ball_sharp@r=1/255 <= +5%",
            "bounds.ball.ball_sharp@r=0.030,head=1 <= +5%",
        )
    }
    assert list(names.values()) == [
        [f"layer 2 head {head} r {1 / 255}" for head in (0, 1)],
        ["layer 2 head 1 r 0.03"],
    ]
    with pytest.raises(UsageError, match="'wide' is not a radius"):
        judge(balls, balls, rules("bounds.ball.ball_sharp@r=wide <= +5%"))
