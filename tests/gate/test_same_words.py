"""Gate, comparison and `inspect` have one word, one interval and one share for the same pair."""

import numpy as np
import pytest
from scipy import stats

from lipaudit.gate import compare, judge
from lipaudit.gate.rules import parse_rule
from lipaudit.measures import layouts
from lipaudit.measures.attention import ATTENTION_TABLE
from lipaudit.report import of_sample
from lipaudit.tables import Array
from lipaudit.tables.columns import wilson

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
RULES = ("jacobian.norm:median <= +5%", "jacobian.norm:p95 <= +5%", "attack.robust >= -2pp")


def both(report, jacobian, attack, norms, count, rule):
    before = np.r_[np.ones(count - count // 4, int), np.zeros(count // 4, int)]
    after = np.where(norms[:count] > 1.05 * NORMS[:count], 0, before)
    old = report(jacobian(NORMS[:count]), attack(before), spec="old")
    new = report(jacobian(norms[:count]), attack(after), spec="new", weights="b")
    first, *rest = rule.split(" ")
    metric = first if ":" in first else f"{first}:mean"
    gate = [
        v
        for v in judge(new, old, (parse_rule(rule), parse_rule("jacobian.norm <= +50%"))).verdicts
        if v.rule == rule
    ]
    (pair,) = compare([old, new]).pairs
    found = {v.name: v for v in pair.verdicts if v.metric == metric}
    return gate, found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("change", CHANGES)
def test_the_same_change_has_one_word_and_one_interval(report, jacobian, attack, change, rule):
    gate, found = both(report, jacobian, attack, *CHANGES[change], rule)
    assert gate
    for verdict in gate:
        other = found[verdict.name]
        if verdict.status == "unchanged":
            assert other.status == "unchanged"
            continue
        assert (verdict.change_status, other.status) == (other.status, verdict.change_status)
        assert (verdict.change_low, verdict.change_high) == (other.low, other.high)


def test_a_rule_that_is_left_open_names_the_change(report, jacobian, attack):
    gate, _ = both(report, jacobian, attack, *CHANGES["a little steeper"], RULES[0])
    (verdict,) = gate
    assert verdict.status != "regressed"
    assert verdict.change_status == "regressed"
    assert "; the change alone: regressed, 95 % limits +" in verdict.line


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
    ids = tuple(f"{i:016x}" for i in range(values.shape[1]))
    kept = {"softmax_norm": Array.of(values)}
    return layouts()["attention"].section(rows=rows, samples={"ids": ids}, arrays=kept)


@pytest.mark.parametrize("metric", ["bounds.exact", "attention.softmax_norm"])
@pytest.mark.parametrize("change", OVER_HEADS)
def test_the_median_over_heads_has_one_word_and_one_interval(report, bounds, metric, change):
    after = OVER_HEADS[change]
    before = HEADS[:, : after.shape[1]]
    kept = after if metric.startswith("attention") else np.nan_to_num(after, nan=1.0)
    make = attention if metric.startswith("attention") else bounds
    old, new = report(make(before)), report(make(kept), weights="b")
    rule = parse_rule(f"{metric}:median <= +5%")
    (gate,) = judge(new, old, (rule, parse_rule(f"{metric}:max <= 1e9"))).verdicts[:1]
    found = {v.metric: v for v in compare([old, new]).pairs[0].verdicts}[f"{metric}:median"]
    assert gate.change_status == found.status
    assert (gate.change_low, gate.change_high) == (found.low, found.high)
    # Student's t on the log-ratios of the medians over the heads that all samples have
    before, kept = (Array.of(values).numpy() for values in (before, kept))  # as a report has them
    whole = np.isfinite(kept).all(1)
    ratios = np.log(np.median(kept[whole], 0) / np.median(before[whole], 0))
    if np.ptp(ratios) > 0:
        ends = stats.t.interval(0.95, ratios.size - 1, ratios.mean(), stats.sem(ratios))
        assert (found.low, found.high) == pytest.approx(np.expm1(ends))
    assert gate.samples == found.samples == ratios.size


@pytest.mark.parametrize("metric", ["bounds.exact", "attention.softmax_norm"])
def test_a_head_has_one_interval(report, bounds, metric):
    make = attention if metric.startswith("attention") else bounds
    after = OVER_HEADS["a little steeper"]
    old, new = report(make(HEADS)), report(make(after), weights="b")
    gate = judge(new, old, (parse_rule(f"{metric}:each <= +5%"),)).verdicts
    heads = [h for h in compare([old, new]).pairs[0].heads if h.metric == f"{metric}:each"]
    assert [(v.change_low, v.change_high) for v in gate] == [(h.low, h.high) for h in heads]
    assert [(v.name, v.old, v.new) for v in gate] == [(h.name, h.old, h.new) for h in heads]


def test_a_share_is_the_same_in_every_command(report, attack, jacobian):
    rng = np.random.default_rng(9)
    robust = np.stack([rng.random(40) < 0.5, rng.random(40) < 0.7]).astype(int)
    correct = np.maximum(robust.max(0), rng.random(40) < 0.9)
    sections = [attack(line, correct=correct) for line in robust]
    norms = rng.lognormal(0, 0.5, 40)
    # six samples repeat the first: they count once
    ids = [*sections[0].ids[:34], *(f"{sections[0].ids[0]}-{i}" for i in range(2, 8))]
    sections = [
        s.model_copy(update={"samples": s.samples | {"ids": tuple(ids)}}) for s in sections
    ]
    measured = [jacobian(norms * factor, ids=tuple(ids)) for factor in (1.0, 1.2)]
    old, new = (
        report(*pair, weights=name, spec=name)
        for pair, name in zip(zip(sections, measured, strict=True), "ab", strict=True)
    )
    rules = tuple(map(parse_rule, ("attack.robust >= -2pp", "jacobian.norm:median <= +5%")))
    gate = judge(new, old, rules).verdicts
    found = {v.metric: v for v in compare([old, new]).pairs[0].verdicts}
    for each, at in ((old, "old"), (new, "new")):
        page = of_sample(each, "x.json", ids[0]).page()
        cells = {row[0]: row[2] for chapter in page.chapters[1:] for row in chapter.blocks[0].rows}
        share, median = (getattr(verdict, at) for verdict in gate)
        assert (share, median) == tuple(getattr(found[v.metric], at) for v in gate)
        low, high = wilson(round(34 * share), 34)
        said = f"{share:.1%} yes, {100 * low:.1f} to {high:.1%}"
        assert cells["robust, worst,linf,2/255"] == said
        assert cells["‖J‖"] == f"{median:.3g}".ljust(4, "0")
