"""The page of a judgement: its outcome first, then the verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from lipaudit.gate import judge, parse_rule
from lipaudit.report import of_judgement, render

EXACT = np.random.default_rng(1).lognormal(0, 0.3, (12, 8))
ROBUST = np.r_[np.ones(90, int), np.zeros(38, int)]


def page(judgement):
    return of_judgement(judgement)["page"]()


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
        "What is the verdict on each rule?",
    )
    places = [text.replace("&lt;", "<").find(word) for word in words]
    if format == "html":  # its header links to the sections
        headings = [text.find(f"<h2>{word}") for word in (words[3], words[-1])]
        places[3], places[-1] = headings
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
    assert [verdict.moved for verdict in better.verdicts] == [()]


def test_a_pass_says_whether_all_of_it_is_proven(report, jacobian, norms):
    same = judge(report(jacobian(norms)), report(jacobian(norms)))
    assert page(same).outcome.text == "PASSED: 1 unchanged"
    assert (page(same).outcome.state, page(same).findings) == ("kept", ())
    wide = norms * np.exp(np.random.default_rng(0).normal(0, 0.5, norms.size))
    rules = (parse_rule("jacobian.norm:median <= +5%"),)
    noisy = judge(report(jacobian(wide), weights="b"), report(jacobian(norms)), rules)
    assert [v.status for v in noisy.verdicts] == ["pass (not proven)"]
    assert page(noisy).outcome.state == "open"
    assert page(noisy.model_copy(update={"strict": True})).outcome.state == "broken"


def test_a_brief_has_the_gravest_first_with_what_was_tested(failed):
    strict = failed.model_copy(update={"strict": True})
    for shown in (failed, strict):
        lines = render(of_judgement(shown), "brief").decode().splitlines()
        head, _, *rows = [line for line in lines if line.startswith("|")]
        assert head.endswith("| change | paired | limits | samples |")
        for row, verdict in zip(rows, (shown.verdicts[7], shown.verdicts[-1]), strict=False):
            assert verdict.status in row
            assert f"| {verdict.texts['paired']} | {verdict.texts['limits']} |" in row
        assert "✗ regressed" in rows[0]
        assert "inconclusive" in rows[1]
