"""A pair has one word, one interval and one share in every command, and over other samples."""

from contextlib import suppress
from importlib.resources import files

import numpy as np
import pytest
from scipy import stats

import lipaudit
from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge
from lipaudit.gate.conditions import promote
from lipaudit.gate.rules import STATS, list_metrics, parse_rule
from lipaudit.measures import layouts
from lipaudit.measures.attention import ATTENTION_TABLE
from lipaudit.report import of_sample
from lipaudit.tables import Array
from lipaudit.tables.columns import wilson
from lipaudit.tables.trials import FLAGS
from tests.gate.cases import (
    attack,
    bounds,
    flags,
    jacobian,
    new,
    report,
    rules,
    sample_ids,
    with_samples,
)

NORMS = np.random.default_rng(5).lognormal(0, 0.4, 64)
NOISE = np.random.default_rng(6).normal(0, 0.05, 64)
CHANGES = {
    "steeper": (1.1 * NORMS, 64),
    "flatter": (0.9 * NORMS, 64),
    "as it was": (NORMS, 64),
    "noisy": (NORMS * np.exp(NOISE), 64),
    "a little steeper": (NORMS * np.exp(0.03 + NOISE), 64),
    "few samples": (NORMS * np.exp(0.03 + NOISE), 5),
}
RULES = ("jacobian.norm:median <= +5%", "jacobian.norm:p95 <= +5%", "attack.robust:mean >= -2pp")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_same_change_has_one_word_and_one_interval(change, rule):
    norms, count = CHANGES[change]
    before = flags(count - count // 4, count)
    after = np.where(norms[:count] > 1.05 * NORMS[:count], 0, before)
    old = report(jacobian(NORMS[:count]), attack(before))
    current = new(jacobian(norms[:count]), attack(after))
    judged = judge(current, old, rules(rule, "jacobian.norm <= +50%")).verdicts
    found = {(v.metric, v.name): v for v in compare([old, current]).pairs[0].verdicts}
    gate = [v for v in judged if v.rule == rule]
    assert gate
    for verdict in gate:
        other = found[verdict.metric, verdict.name]
        if verdict.status == "unchanged":
            assert other.status == "unchanged"
            continue
        assert verdict.change_status == other.status
        assert (verdict.low, verdict.high) == (other.low, other.high)
        assert verdict.status != "regressed" or other.status == "regressed"
    if (change, rule) == ("a little steeper", RULES[0]):  # a change within the limit is named
        assert verdict.status == "pass"
        assert verdict.change_status == "regressed"
        assert "; the change alone: regressed" in verdict.line


HEADS = np.random.default_rng(7).lognormal(0, 0.3, (4, 12))
SHAKEN = np.random.default_rng(8).normal(0, 0.02, (4, 12))
OVER_HEADS = {
    "steeper": HEADS * np.exp(0.1 + SHAKEN),
    "flatter": HEADS * np.exp(-0.1 + SHAKEN),
    "as it was": HEADS,
    "noisy": HEADS * np.exp(SHAKEN),
    "a little steeper": HEADS * np.exp(0.02 + SHAKEN),
    "one sample much steeper": HEADS * np.where(np.arange(12) == 3, 9.0, 1.0),
    "a head without a figure of one sample": np.where(HEADS[1, 2] == HEADS, np.nan, 1.1 * HEADS),
    "few samples": (HEADS * np.exp(0.02 + SHAKEN))[:, :3],
}


def attention(values):
    """A section whose rows are means over tokens, and what is kept of each sample."""
    rows = tuple(
        ATTENTION_TABLE.row(
            layer=i // 2, head=i % 2, softmax_norm=float(line[np.isfinite(line)].mean())
        )
        for i, line in enumerate(values)
    )
    kept, samples = {"softmax_norm": Array.of(values)}, {"ids": sample_ids(values.shape[1])}
    return layouts()["attention"].section(rows=rows, samples=samples, arrays=kept)


@pytest.mark.parametrize("metric", ["bounds.exact", "attention.softmax_norm"])
@pytest.mark.parametrize("change", OVER_HEADS)
def test_heads_and_their_median_have_one_word_and_one_interval(metric, change):
    after = OVER_HEADS[change]
    before = HEADS[:, : after.shape[1]]
    kept = after if metric.startswith("attention") else np.nan_to_num(after, nan=1.0)
    make = attention if metric.startswith("attention") else bounds
    old, current = report(make(before)), new(make(kept))
    (pair,) = compare([old, current]).pairs
    judged = judge(current, old, rules(f"{metric}:median <= +5%", f"{metric}:max <= 1e9"))
    gate, found = judged.verdicts[0], {v.metric: v for v in pair.verdicts}[f"{metric}:median"]
    assert gate.change_status == found.status
    assert (gate.low, gate.high) == (found.low, found.high)
    # order statistics of the log-ratios of the medians over the heads that all samples have
    before, kept = (Array.of(values).numpy() for values in (before, kept))  # as a report has them
    whole = np.isfinite(kept).all(1)
    ratios = np.log(np.median(kept[whole], 0) / np.median(before[whole], 0))
    rank = int(stats.binom.ppf(0.025, ratios.size, 0.5))
    if rank:
        ends = np.sort(ratios)[[rank - 1, ratios.size - rank]]
        assert (found.low, found.high) == pytest.approx(np.expm1(ends), abs=1e-9)
    assert gate.samples == found.samples == ratios.size
    if change == "a little steeper":
        rows = judge(current, old, rules(f"{metric}:each <= +5%")).verdicts
        heads = [h for h in pair.heads if h.metric == f"{metric}:each"]
        assert [(v.low, v.high) for v in rows] == [(h.low, h.high) for h in heads]
        assert [(v.name, v.old, v.new) for v in rows] == [(h.name, h.old, h.new) for h in heads]


def test_means_over_tokens_count_the_tokens_of_each_shared_sample():
    old, current = (attention(np.array([[1.0, 3.0, 9.0][:count]])) for count in (2, 3))
    tokens = Array.of(np.array([[1.0, 3.0, 5.0]]))
    current = current.model_copy(update={"arrays": current.arrays | {"rows": tokens}})
    judged = judge(new(current), report(old), rules("attention.softmax_norm:max <= +50%"))
    assert judged.verdicts[0].new == (1.0 + 3 * 3.0) / 4


def without_rows(section):
    """Rows made by hand count repeats, which those of a run do not."""
    return section.model_copy(update={"rows": ()})


def test_a_share_is_the_same_in_every_command():
    rng = np.random.default_rng(9)
    robust = np.stack([rng.random(40) < 0.5, rng.random(40) < 0.7]).astype(int)
    correct = np.maximum(robust.max(0), rng.random(40) < 0.9)
    norms = rng.lognormal(0, 0.5, 40)
    # six samples repeat the first: they count once
    first, *others = sample_ids(34)
    ids = (first, *others, *(f"{first}-{i}" for i in range(2, 8)))
    old, current = (
        report(
            without_rows(with_samples(attack(line, correct=correct), ids=ids)),
            without_rows(jacobian(norms * factor, ids=ids)),
            weights=name,
            spec=name,
        )
        for line, factor, name in zip(robust, (1.0, 1.2), "ab", strict=True)
    )
    texts = "attack.robust >= -2pp", "jacobian.norm:median <= +5%"
    gate = judge(current, old, rules(*texts)).verdicts
    found = {v.metric: v for v in compare([old, current]).pairs[0].verdicts}
    for each, at in ((old, "old"), (current, "new")):
        page = of_sample(each, "x.json", first).page()
        cells = {row[0]: row[2] for chapter in page.chapters[1:] for row in chapter.blocks[0].rows}
        share, median = (getattr(verdict, at) for verdict in gate)
        assert (share, median) == tuple(getattr(found[v.metric], at) for v in gate)
        low, high = wilson(round(34 * share), 34)
        said = f"{share:.1%} yes, {100 * low:.1f} to {high:.1%}"
        assert cells["robust, worst,linf,2/255"] == said
        assert cells["model ‖J‖"] == f"{median:.3g}".ljust(4, "0")


PLAN = {
    "bounds": {"radius": "0.03", "layers": "0"},
    "attention": {"layers": "0"},
    "jacobian": {"per_layer": True, "layers": "0"},
    "attack": {"eps": "0.1", "attack": "fgsm,pgd", "steps": 1},
}
BASE = tuple(range(8))
OTHER = {
    "a superset in another order": (*range(5, 11), *range(4, -1, -1)),
    "a subset": (6, 2, 3),
    "some of them and others": (11, 7, 1, 0, 9, 3, 4, 5),
    "one of them": (4, 10),
    "the same in another order": BASE[::-1],
}


@pytest.fixture(scope="module")
def audit():
    """Audit a demo model on some of the digits; each only once."""
    with np.load(str(files("lipaudit.data") / "assets" / "digits_test.npz")) as kept:
        x, y = kept["x"], kept["y"]
    audits = {}

    def audited(rows, model="demo", plan=PLAN):
        if (model, rows) not in audits:
            data = x[list(rows)], y[list(rows)]
            audits[model, rows] = lipaudit.audit(model, plan, data=data, samples=len(rows))
        return audits[model, rows]

    return audited


@pytest.fixture(scope="module")
def every_rule(audit):
    """Every metric by two statistics, as far as they make sense for what is measured here."""
    report = audit(BASE)
    sensible = []
    names = sorted(set(list_metrics()) - {"attack.seconds"})  # wall time is no figure of the model
    for number, metric in enumerate(names):
        limit = "+1pp" if metric.rpartition(".")[2] in FLAGS else "+1%"
        stats = (STATS[(number + step) % len(STATS)] for step in (0, 1))
        for text in (f"{metric}:{stat} <= {limit}" for stat in stats):
            with suppress(UsageError):
                judge(report, report, [parse_rule(text)])
                sensible.append(parse_rule(text))
    assert {rule.measure for rule in sensible} == {s.measure for s in report.sections}
    return sensible


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("a superset in another order", "unchanged"),
        ("the same in another order", "unchanged"),
        ("a subset", "not comparable"),
        ("some of them and others", "not comparable"),
    ],
)
def test_every_rule_finds_equal_weights_unchanged(audit, every_rule, name, status):
    """The gate wants most samples of the baseline."""
    other = audit(OTHER[name])
    judged = judge(other, audit(BASE), every_rule).verdicts
    assert {verdict.status for verdict in judged} == {status}
    assert judge(other, audit(BASE)).exit_code == (0 if status == "unchanged" else 5)


def test_a_baseline_keeps_all_that_other_samples_need(audit, every_rule):
    more = audit(OTHER["a superset in another order"])
    whole, slim = (
        judge(more, old, every_rule) for old in (audit(BASE), promote(audit(BASE), "new"))
    )
    assert slim.verdicts == whole.verdicts


@pytest.mark.parametrize("name", OTHER)
def test_a_comparison_finds_the_same_weights_unchanged(audit, name):
    reports = audit(BASE), audit(OTHER[name])
    for pair in (compare(reports).pairs[0], compare(reports[::-1]).pairs[0]):
        compared = {v.metric.rpartition(":")[0]: v.status for v in pair.verdicts if not v.reason}
        assert set(compared.values()) == {"unchanged"}
        measured = {name for name in layouts() if name.partition(".")[0] in PLAN}
        # None of its figures is better lower or higher, and shares are compared head by head.
        measured -= {"jacobian.paths", "jacobian.shares"}
        assert {metric.rpartition(".")[0] for metric in compared} >= measured
        assert pair.heads
        assert all(abs(head.change) < 1e-4 and not head.stands for head in pair.heads)


def test_another_model_is_judged_as_if_measured_on_the_shared_samples_only(audit):
    name = "some of them and others"
    shared = tuple(i for i in BASE if i in OTHER[name])
    plan = {measure: options for measure, options in PLAN.items() if measure != "attack"}
    exactly = compare([audit(shared), audit(shared, "demo:jasmin", plan)]).pairs[0]
    partly = compare([audit(BASE), audit(OTHER[name], "demo:jasmin", plan)]).pairs[0]
    expected = {(v.metric, v.name): v for v in exactly.verdicts}
    assert expected.keys() == {(v.metric, v.name) for v in partly.verdicts}
    assert {v.status for v in partly.verdicts} & {"improved", "regressed"}
    for verdict in partly.verdicts:
        alike = expected[verdict.metric, verdict.name]
        assert verdict.status == alike.status
        for name in ("old", "new", "paired", "low", "high"):
            ours, theirs = getattr(verdict, name), getattr(alike, name)
            assert ours == theirs or ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
