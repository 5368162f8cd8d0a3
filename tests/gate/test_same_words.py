"""The gate and a comparison have the same word and the same interval for the same change."""

import numpy as np
import pytest

from lipaudit.gate import compare, judge, parse_rule

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
    assert "; the change by itself: regressed, 95 % limits +" in verdict.line
