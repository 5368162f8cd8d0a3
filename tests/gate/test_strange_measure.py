"""Rules on a measure that the gate has never heard of: names and directions from its columns."""

import numpy as np
import pytest

from lipaudit.errors import UsageError
from lipaudit.gate import compare, judge
from lipaudit.gate.conditions import promote
from lipaudit.gate.rules import parse_rule
from lipaudit.measures import layouts
from tests.strangers import HEAT, SPREAD, register
from tests.strangers import registry as registry

TENSION = np.random.default_rng(5).lognormal(0, 0.3, 64)


@pytest.fixture
def strange(monkeypatch, registry, report, ids):
    """A report of two measures that are registered as a plug-in would."""
    register(monkeypatch, SPREAD)
    register(monkeypatch, HEAT)

    def build(stem=1.0, trunk=2.0, times=1.0, hot=1.0, weights="a"):
        spread = layouts()["spread"].section(
            rows=[
                SPREAD.row(stage="stem", depth=0, spread=stem),
                SPREAD.row(stage="trunk", depth=3, spread=trunk),
            ],
            samples={"ids": ids(64), "tension": tuple((times * TENSION).tolist())},
        )
        heat = HEAT.section(
            rows=[HEAT.row(layer=i, head=0, heat=1.0 + i * hot) for i in range(2)],
        )
        return report(spread, heat, weights=weights)

    return build


def verdicts(current, baseline, *rules):
    judgement = judge(current, baseline, tuple(map(parse_rule, rules)))
    return {(v.metric, v.name): v.status for v in judgement.verdicts}


def test_a_rule_judges_each_row_by_the_name_its_columns_give(strange):
    assert verdicts(strange(trunk=2.5, weights="b"), strange(), "spread.spread <= +5%") == {
        ("spread.spread:each", "stem depth 0"): "pass",
        ("spread.spread:each", "trunk depth 3"): "regressed",
    }


@pytest.mark.parametrize("selector", ["stem", "depth=0"])
def test_a_selector_picks_rows_by_their_columns(strange, selector):
    rule = f"spread.spread@{selector} <= +5%"
    found = verdicts(strange(trunk=9.0, weights="b"), strange(), rule)
    assert list(found.values()) == ["pass"]


def test_samples_are_judged_pair_by_pair(strange):
    current, rule = strange(times=1.1, weights="b"), "spread.tension <= {}"
    (verdict,) = judge(current, strange(), (parse_rule(rule.format("+5%")),)).verdicts
    assert (verdict.status, verdict.samples) == ("regressed", 64)
    assert (verdict.low, verdict.change, verdict.high) == pytest.approx((0.1, 0.1, 0.1))
    assert list(verdicts(current, strange(), rule.format("+20%")).values()) == ["pass"]


def test_a_comparison_has_its_figures_and_a_map_of_its_heads(strange):
    pair = compare([strange(), strange(trunk=4.0, hot=2.0, weights="b")]).pairs[0]
    found = {v.metric: v.status for v in pair.verdicts}
    assert found["heat.heat:median"] == "regressed"
    assert found["spread.tension:median"] == "unchanged"
    assert {head.metric for head in pair.heads} == {"heat.heat:each"}
    assert [head.change for head in pair.heads] == pytest.approx([0.0, 0.5])
    assert [head.name for head in pair.heads] == ["layer 0 head 0", "layer 1 head 0"]


def test_a_baseline_keeps_it(strange):
    assert promote(strange(), "first").section("spread") == strange().section("spread")


def test_what_it_does_not_have_is_refused(strange):
    for text in ("spread.width <= +5%", "spread.stage <= +5%", "sprawl.spread <= +5%"):
        with pytest.raises(UsageError, match="unknown metric"):
            parse_rule(text)
    with pytest.raises(UsageError, match="matches nothing"):
        verdicts(strange(), strange(), "spread.spread@branch <= +5%")
