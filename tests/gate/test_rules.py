import re
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipaudit.errors import UsageError
from lipaudit.gate.rules import Limit, configure, parse_rule


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
    st.decimals("-99", "1000", places=4).filter(lambda d: d == d),
    st.sampled_from(["%", "pp", ""]),
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
    replaced = configure(table, ["bounds.exact <= +1%", "bounds.exact:max <= 4"])
    assert [rule.text for rule in replaced["rules"]] == [
        "bounds.exact <= +1%",
        "bounds.exact:max <= 4",
    ]
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
