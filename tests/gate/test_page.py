"""The page of a judgement: its outcome first, and pictures in which verdicts can be seen."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from lipaudit.gate import judge, parse_rule
from lipaudit.report import charts, of_judgement, render
from lipaudit.report.charts import draw_svg
from lipaudit.report.pictures import STATES, Interval, Intervals
from lipaudit.results import Column

EXACT = np.random.default_rng(1).lognormal(0, 0.3, (12, 8))
ROBUST = np.r_[np.ones(90, int), np.zeros(38, int)]


ENDS = {
    "jacobian.norm:median <= +5%": 5.0,
    "jacobian.norm:p95 <= +10%": 10.0,
    "bounds.exact:each <= +20%": 20.0,
    "attack.robust >= -2pp": -2.0,
}


def page(judgement):
    return of_judgement(judgement)["page"]()


def pictures(judgement) -> list[Intervals]:
    blocks = [block for chapter in page(judgement).chapters for block in chapter.blocks]
    return [block for block in blocks if isinstance(block, Intervals)]


@pytest.fixture
def failed(report, bounds, attack):
    changed, worse = EXACT.copy(), ROBUST.copy()
    changed[7] *= 1.5
    worse[:6] = 0
    current = report(bounds(changed), attack(worse), weights="b")
    return judge(current, report(bounds(EXACT), attack(ROBUST)))


@pytest.mark.parametrize("format", ["table", "markdown", "html"])
def test_the_outcome_comes_first_then_warnings_then_what_failed(failed, format):
    shown = failed.model_copy(
        update={"warnings": ("zero gradients",), "baseline_file": "base.json"}
    )
    text = " ".join(render(of_judgement(shown), format).decode().replace("\\", "").split())
    words = (
        "FAILED (exit code 1): 1 regressed, 1 inconclusive, 11 pass",
        "base.json",
        "zero gradients",
        "What stands out",
        "regressed: bounds.exact:each",
        "How far are the changes from what is allowed?",
        "What is the verdict on each rule?",
    )
    places = [text.replace("&lt;", "<").find(word) for word in words]
    if format == "html":  # its header links to the sections
        headings = [text.find(f"<h2>{word}") for word in (words[3], *words[-2:])]
        places[3], places[-2:] = headings[0], headings[1:]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("format", ["table", "markdown", "html"])
def test_the_samples_that_changed_most_are_named_where_they_are_found(
    report, attack, jacobian, norms, ids, format
):
    steeper, robust = norms * 1.2, np.ones(128, int)
    steeper[[5, 40, 7]] *= (3, 2, 1.5)
    robust[[60, 61]] = 0
    named = ids(128)
    current = report(jacobian(steeper), attack(robust), weights="b").model_copy(
        update={"samples": {"ids": named, "place": tuple(f"val/{i}.png" for i in range(128))}}
    )
    judgement = judge(current, report(jacobian(norms), attack(np.ones(128, int))))
    moved = {verdict.metric: verdict.moved for verdict in judgement.verdicts}
    assert moved["jacobian.norm:median"] == (named[5], named[40], named[7])
    assert moved["attack.robust:mean"] == (named[60], named[61])
    text = render(of_judgement(judgement), format).decode().replace("\\", "")
    first = f"{named[5][:12]} (val/5.png), {named[40][:12]} (val/40.png)"
    assert f"samples that changed most: {first}" in " ".join(text.split())
    better = judge(report(jacobian(norms / 2), weights="b"), report(jacobian(norms)))
    assert [verdict.moved for verdict in better.verdicts] == [(), ()]


def test_a_pass_says_whether_all_of_it_is_proven(report, jacobian, norms):
    same = judge(report(jacobian(norms)), report(jacobian(norms)))
    assert page(same).outcome.text == "PASSED: 2 unchanged"
    assert (page(same).outcome.state, page(same).findings) == ("kept", ())
    wide = norms * np.exp(np.random.default_rng(0).normal(0, 0.5, norms.size))
    rules = (parse_rule("jacobian.norm:median <= +5%"),)
    noisy = judge(report(jacobian(wide), weights="b"), report(jacobian(norms)), rules)
    assert [v.status for v in noisy.verdicts] == ["pass (not proven)"]
    assert page(noisy).outcome.state == "open"
    assert page(noisy.model_copy(update={"strict": True})).outcome.state == "broken"


def within(line: Interval, value: float) -> bool:
    return value <= line.end if line.below else value >= line.end


@pytest.mark.parametrize("seed", range(12))
def test_what_a_picture_shows_is_what_was_decided(report, bounds, jacobian, attack, norms, seed):
    """Limits beyond the end of what is allowed are a broken rule, across it an open one."""
    generator = np.random.default_rng(seed)
    change = np.exp(generator.normal(generator.uniform(-0.3, 0.3), 0.2, norms.size))
    exact = EXACT * np.exp(generator.normal(0, 0.2, EXACT.shape))
    flipped = np.where(generator.random(ROBUST.size) < 0.2, 1 - ROBUST, ROBUST)
    judgement = judge(
        report(bounds(exact), jacobian(norms * change), attack(flipped), weights="b"),
        report(bounds(EXACT), jacobian(norms), attack(ROBUST)),
    )
    drawn = {row.label: row for block in pictures(judgement) for row in block.rows}
    seen = set()
    for verdict in judgement.verdicts:
        line = drawn.get(f"{verdict.metric} {verdict.name}".strip())
        if line is None:
            assert verdict.metric == "bounds.exact:each"
            continue
        figures = (verdict.paired, verdict.low, verdict.high)
        assert (line.value, line.low, line.high) == pytest.approx([100 * v for v in figures])
        assert line.end == ENDS[verdict.rule]
        ends = [within(line, end) for end in (line.low, line.high)]
        state = "kept" if all(ends) else "open" if any(ends) else "broken"
        assert line.state == state, verdict.line
        seen.add(state)
    assert len(drawn) <= 2 + 8 + 1
    assert seen


def test_of_many_rows_the_nearest_to_breaking_are_drawn(report, bounds):
    exact = np.random.default_rng(3).lognormal(0, 0.3, (144, 8))
    growth = np.linspace(0.5, 1.5, 144)[:, None] * np.exp(
        np.random.default_rng(4).normal(0, 0.001, exact.shape)
    )
    judgement = judge(report(bounds(exact * growth), weights="b"), report(bounds(exact)))
    (picture,) = pictures(judgement)
    rows = [f"bounds.exact:each layer {i // 2} head {i % 2}" for i in range(143, 135, -1)]
    assert sorted(row.label for row in picture.rows) == sorted(rows)
    assert {row.state for row in picture.rows} == {"broken"}


def test_of_many_rows_that_all_keep_a_rule_the_nearest_to_breaking_it_is_drawn(report, bounds):
    exact = np.random.default_rng(3).lognormal(0, 0.3, (144, 8))
    growth = np.linspace(0.5, 1.1, 144)[:, None]
    judgement = judge(report(bounds(exact * growth), weights="b"), report(bounds(exact)))
    ((line,),) = [picture.rows for picture in pictures(judgement)]
    assert line.label == "bounds.exact:each layer 71 head 1 (nearest of 144)"
    assert line.value == pytest.approx(10, rel=1e-5)  # reports keep six digits


def test_a_limit_on_a_value_is_drawn_in_its_own_unit(report, bounds, jacobian, norms):
    rules = tuple(map(parse_rule, ("jacobian.norm:max <= 2", "bounds.exact:max >= 0.1")))
    current = report(bounds(EXACT), jacobian(norms))
    first, second = pictures(judge(current, current, rules))
    (high,), (low,) = first.rows, second.rows
    assert (high.value, high.end, high.low) == (pytest.approx(norms.max()), 2.0, None)
    assert (high.below, high.state) == (True, "broken")
    assert (low.below, low.state, low.end) == (False, "kept", 0.1)
    assert high.value == pytest.approx(norms.max())


def test_what_was_not_judged_is_in_the_table_and_in_no_picture(report, jacobian, norms):
    judgement = judge(report(jacobian(norms), dtype="float16"), report(jacobian(norms)))
    assert pictures(judgement) == []
    assert "dtype float32 became float16" in render(of_judgement(judgement), "html").decode()


def block(*rows: Interval) -> Intervals:
    axis = Column(label="paired change", meaning="", format="+.3g", unit="%")
    return Intervals("Changes", axis, rows)


def test_a_limit_that_is_far_or_infinite_ends_at_the_edge(report, attack):
    few = judge(report(attack([1, 1, 0]), weights="b"), report(attack([1, 1, 1])))
    (picture,) = pictures(few)
    assert draw_svg(picture).startswith("<svg")
    rows = [
        Interval("near", 4.0, -2.0, 9.0, 5.0, True, "open"),
        Interval("far", 4.0, -math.inf, 1e12, 5.0, True, "open"),
    ]
    ticks = [float(v) for v in re.findall(r">([+-]?[\d.]+)%?</text>", draw_svg(block(*rows)))]
    assert -20 < min(ticks) < 0
    assert 5 <= max(ticks) < 20
    assert draw_svg(block(*rows)).count("<path") > draw_svg(block(rows[0])).count("<path")
    assert "far: +4% (-inf to +1e12%), allowed +5%: not proven" in draw_svg(block(rows[1]))


def test_every_state_differs_by_more_than_its_colour():
    rows = [
        Interval(state, i, i - 1.0, i + 1.0, 0.5, True, state)
        for i, state in enumerate(("kept", "open", "broken"))
    ]
    drawn = draw_svg(block(*rows))
    for state, (colour, _) in charts.LOOKS.items():
        assert colour in drawn
        assert f">{STATES[state]}<" in drawn
    assert len({mark for _, mark in charts.LOOKS.values()}) == 3
    assert (
        'aria-label="Changes: paired change; kept: 0% (-1% to +1%), allowed +0.5%: kept' in drawn
    )


def test_a_brief_has_the_gravest_first_with_what_was_tested(failed):
    strict = failed.model_copy(update={"strict": True})
    for shown in (failed, strict):
        lines = render(of_judgement(shown), "brief").decode().splitlines()
        head, _, *rows = [line for line in lines if line.startswith("|")]
        assert head.endswith("| change | paired, limits |")
        first, second = shown.verdicts[7], shown.verdicts[-1]
        assert "✗ regressed" in rows[0]
        assert f"{first.texts['paired']} ({first.texts['limits']})" in rows[0]
        assert "inconclusive" in rows[1]
        assert f"{second.texts['paired']} ({second.texts['limits']})" in rows[1]
