import math
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

from lipaudit.gate import compare, judge
from lipaudit.gate.verdicts import Verdict, format_change
from lipaudit.report import of_judgement, render
from lipaudit.report.blocks import Paragraph
from tests.gate.cases import (
    EXACT,
    NORMS,
    attack,
    bounds,
    flags,
    jacobian,
    new,
    report,
    rules,
    with_samples,
)

HOSTILE = "<script>|`x`|\n::error::\x1b[31m"


def write(judgement, name):
    return render(of_judgement(judgement), name).decode()


@pytest.fixture(scope="module")
def failed():
    changed = EXACT * np.where(np.arange(12) == 7, 1.5, 1)[:, None]
    worse = new(bounds(changed), attack(flags(90) - flags(4)), spec=HOSTILE)
    chosen = rules("bounds.exact:each <= +20%", "attack.robust >= -2pp")
    return judge(worse, report(bounds(EXACT), attack(flags(90))), chosen)


def test_of_many_rows_a_log_tells_those_that_grew_most_and_counts_the_others():
    """Of ten layers head 0 grows by 30% and the layer's number, head 1 wildly, by 60 or so."""
    growth = np.exp(np.random.default_rng(0).normal(np.log(1.6), 2, (20, 8)))
    growth[::2] = 1.3 + np.arange(10)[:, None] / 100
    many = judge(new(bounds(growth)), report(bounds(np.ones((20, 8)))))
    lines = write(many, "text").splitlines()
    rows = [line.split(":")[2] for line in lines if "head" in line and "more" not in line]
    assert rows == [f"each <= +20% layer {layer} head 0" for layer in range(9, 1, -1)]
    assert "  bounds.exact:each <= +20%: 2 more rows regressed; -f table lists them" in lines
    assert max(verdict.paired for verdict in many.verdicts[1::2]) > 0.39
    for status, count in Counter(verdict.status for verdict in many.verdicts[1::2]).items():
        listed = "" if status.startswith("pass") else "; -f table lists them"
        assert f"  bounds.exact:each <= +20%: {count} more rows {status}{listed}" in lines


def test_every_format_writes_the_figures_of_a_verdict_alike():
    """The samples in the middle grow by 20%, and with them the median; all others by 1%."""
    old, growth = np.repeat([0.5, 1.0, 2.0], 21), np.repeat([1.01, 1.2, 1.01], 21)
    judgement = judge(new(jacobian(old * growth)), report(jacobian(old)))
    median = judgement.verdicts[0]
    assert median.change != pytest.approx(median.paired, abs=0.1)
    names = "baseline", "current", "change", "paired", "limits"
    pieces = [piece for name in names if (piece := median.texts[name])]
    for format in ("text", "table", "markdown", "html", "junit"):
        text = write(judgement, format).replace("\\", "")
        assert [piece for piece in pieces if piece not in text] == [], format


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({"old": 0.0, "new": 0.0, "unit": "%"}, 0.0),
        ({"old": 0.0, "new": 2.0, "unit": "%"}, math.inf),
        ({"old": 2.0, "new": 0.0, "unit": "%"}, -1.0),
        ({"old": -1.0, "new": 1.0}, 2.0),
        ({"new": 1.0}, None),
    ],
)
def test_the_change_of_figures_that_may_be_zero(values, change):
    verdict = Verdict(rule="r", metric="m", status="pass", **values)
    assert verdict.change == change


def test_the_change_is_that_of_the_two_figures():
    generator = np.random.default_rng(0)
    noisy = NORMS * np.exp(generator.normal(0, 0.5, NORMS.size))
    exact = EXACT * np.exp(generator.normal(0, 0.5, EXACT.shape))
    old = report(bounds(EXACT), jacobian(), attack(flags(90)))
    current = new(bounds(exact), jacobian(noisy), attack(generator.permutation(flags(90))))
    for verdict in (*judge(current, old).verdicts, *compare([old, current]).pairs[0].verdicts):
        share = verdict.new / verdict.old - 1 if verdict.unit == "%" else verdict.new - verdict.old
        assert verdict.change == pytest.approx(share, rel=1e-12)
        assert f"({format_change(share, verdict.unit)}" in verdict.figures
        summary = verdict.metric.rpartition(":")[2]
        if verdict.paired is not None and summary not in ("median", "each"):
            assert verdict.paired == pytest.approx(verdict.change, abs=1e-12)


@pytest.mark.parametrize("rule", ["norm:p95 <= +5%", "norm:p95 >= -5%"])
def test_no_change_is_never_minus_zero(rule):
    old, current = report(jacobian(np.ones(64))), new(jacobian(np.ones(64)))
    (verdict,) = judge(current, old, rules(f"jacobian.{rule}")).verdicts
    ends = (verdict.low, verdict.high, verdict.paired)
    assert list(map(str, ends)) == ["0.0"] * 3


def test_limits_are_called_infinite_only_where_they_are():
    better = judge(new(attack(np.ones(128, int))), report(attack(flags(0))))
    assert better.verdicts[1].status == "improved"
    assert "too few samples" not in write(better, "text")
    one = judge(new(jacobian([2.0])), report(jacobian([1.0])))
    assert "(+100%, too few samples, n = 1)" in write(one, "text")
    # Thirty samples are not few: a norm became 0 in one of them, and left 0 in another.
    norms = np.ones((2, 30))
    norms[[0, 1], [0, 1]] = 0.0
    old, current = (bounds(norms[i : i + 1], heads=1) for i in (0, 1))
    (head,) = judge(new(current), report(old)).verdicts
    assert (head.low, head.high, head.samples) == (0.0, 0.0, 30)
    assert "too few samples" not in head.figures


def test_text_names_the_head_and_counts_the_rest(failed):
    lines = write(failed, "text").splitlines()
    assert lines[0] == (
        "worse: head norm (layer 3 head 1) 0.9521 -> 1.428 (proven: at least 50% higher)"
    )
    assert lines[1] == "<script>|`x`|\\x0a::error::\\x1b[31m against demo"
    assert lines[3].startswith(
        "✗ regressed: bounds.exact:each <= +20% layer 3 head 1: 0.9521 -> 1.428 (+50%, limits"
    )
    assert lines[4] == "  bounds.exact:each <= +20%: 11 more rows pass (proven)"
    assert lines[5].startswith("~ inconclusive: attack.robust >= -2pp worst,linf,2/255")
    assert lines[-1] == "worse: 11 pass (proven), 1 regressed, 1 inconclusive (exit code 1)"


@pytest.mark.parametrize(
    ("shift", "proven"), [(0.07, "at least 0.07 lower"), (3e-4, "at least 0.0003 lower")]
)
def test_a_proven_change_below_a_tenth_is_not_called_zero(shift, proven):
    """Margins differ by tenths of a logit: all of them fall by the same amount."""
    margins = np.random.default_rng(0).normal(0.2, 0.02, 64)
    old, current = (with_samples(jacobian(NORMS), margin=m) for m in (margins, margins - shift))
    judgement = judge(new(current), report(old), rules("jacobian.margin:median >= -0.0001"))
    assert judgement.reason.endswith(f"(proven: {proven})")


def test_junit_has_a_case_per_verdict_and_fails_where_the_gate_does(failed):
    suite = ElementTree.fromstring(write(failed, "junit")).find("testsuite")
    cases = suite.findall("testcase")
    assert len(cases) == len(failed.verdicts) == int(suite.get("tests"))
    broken = [case for case in cases if case.find("failure") is not None]
    assert [case.get("name") for case in broken] == ["bounds.exact:each <= +20% layer 3 head 1"]
    counts = [suite.get(kind) for kind in ("failures", "errors", "skipped")]
    assert counts == ["1", "0", "1"]  # what is not proven did not pass
    assert suite.find("system-out").text == f"{failed.reason} (exit code 1)"
    unjudged = judge(report(jacobian(), dtype="float16"), report(jacobian()))
    suite = ElementTree.fromstring(write(unjudged, "junit")).find("testsuite")
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")


@pytest.mark.parametrize("format", ["table", "markdown", "html"])
def test_the_outcome_comes_first_then_warnings_then_what_failed(failed, format):
    update = {"warnings": ("zero gradients",), "baseline_file": "base.json"}
    text = write(failed.model_copy(update=update), format)
    text = " ".join(text.replace("\\", "").split()).replace("&lt;", "<")
    words = (
        "FAILED (exit code 1): worse: head norm (layer 3 head 1) 0.9521 →",
        "11 pass (proven), 1 regressed, 1 inconclusive",
        "base.json",
        "zero gradients",
        "What is the verdict on each rule?",
        "✗ regressed",
    )
    places = [text.find(word) for word in words]
    assert -1 not in places
    if format == "html":  # its header links to the sections, and facts are folded at its end
        places[2] = text.rfind(words[2])
        places[4] = text.find(f"<h2>{words[4]}")
        assert places.pop(2) > max(places)
    assert places == sorted(places)


def test_a_pass_says_whether_all_of_it_is_proven():
    def answer(judgement):
        return of_judgement(judgement).page().chapters[0].blocks[0]

    same = judge(report(jacobian()), report(jacobian()))
    assert answer(same) == Paragraph("PASSED (exit code 0): 1 unchanged.", "kept")
    wide = NORMS * np.exp(np.random.default_rng(0).normal(0, 0.5, NORMS.size))
    noisy = judge(new(jacobian(wide)), report(jacobian()), rules("jacobian.norm:median <= +5%"))
    assert [v.status for v in noisy.verdicts] == ["pass"]
    assert answer(noisy).tone == "open"
    assert answer(noisy.model_copy(update={"strict": True})).tone == "broken"


def test_no_format_calls_an_inconclusive_rule_a_pass():
    """The first line and the last say "not proven", and how many samples would prove it."""
    open_one = judge(new(attack(flags(86))), report(attack(flags(90))))
    needed = open_one.verdicts[1].samples_needed
    first, *_, last = write(open_one, "text").splitlines()
    said = f"about {needed} samples would prove "
    change = "robust accuracy (linf 2/255) 70.3% -> 67.2% (-3.12pp, limit -2pp, about "
    assert first.startswith(f"not proven: {change}")
    assert said in first
    assert last == f"not proven: 1 pass, 1 inconclusive; {said}it (exit code 0)"
    for format in ("table", "markdown", "html"):
        text = " ".join(write(open_one, format).split()).replace("&gt;", ">").replace("\\", "")
        undecided = "1 of 2 figures undecided: robust accuracy (linf 2/255)"
        assert f"CI PASSES (exit code 0), {undecided}" in text, format
        assert f"Measure both models on at least {needed} samples" in text, format
        sure = (
            "95% confidence over all rules together. Limits: 95% confidence for each figure alone"
        )
        assert text.count(sure) == 1
        assert "PASSED" not in text


def test_markdown_keeps_its_table_whatever_the_model_is_called(failed):
    text = write(failed, "markdown")
    assert "<script>" not in text
    assert "\x1b" not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in table}
    assert widths == {3, 11}  # the facts, and the verdicts
    assert "layer 3 head 1" in text
