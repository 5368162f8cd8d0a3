"""Which reports are judged or are a baseline: the documented exit code, a reason, no traceback."""

import json
import math
import re
import shlex

import numpy as np
import pytest

from lipaudit import schema
from lipaudit.errors import BaselineError, InputError, UsageError
from lipaudit.gate import judge
from lipaudit.gate.conditions import load_baseline, promote
from lipaudit.report import of_judgement, render
from lipaudit.tables import Array, Note
from lipaudit.tables.report import SCHEMA_VERSION
from tests.commands import invoke
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
    sample_ids,
    with_samples,
)

FOUR, ROBUST = EXACT[:4], flags(90)


def fallback(section):
    note = Note(level="info", code="attack-replaced", text="apgd-t ran as apgd-dlr")
    return section.model_copy(update={"notes": (note,)})


STEEP, HEADS = report(jacobian()), report(bounds(FOUR))
ATTACKED = report(attack(ROBUST))
NEW_STEEP, NEW_HEADS, NO_HEADS = new(jacobian()), new(bounds(FOUR)), report(bounds(0 * FOUR))
NEW_ATTACKED = new(attack(ROBUST))
STUCK = report(jacobian(converged=[False] * 64))
STUCK_HEADS = report(bounds(FOUR, converged=False))
BOTH = report(jacobian(), attack(ROBUST))
ONE_STUCK = report(jacobian(converged=[True] * 63 + [False]))
ONE, NEXT = report(jacobian([1.0])), new(jacobian([2.0], ids=sample_ids(1, 1)))
TWO_ATTACKS = report(attack(ROBUST, attacks=("apgd-ce", "square")))
HEADS_AND_STEEP = report(bounds(FOUR), jacobian())
SUM, MEAN = (report(jacobian(), options={"score": how}) for how in ("sum", "mean"))
with np.errstate(all="ignore"):
    NAN, ZERO = report(jacobian(NORMS * math.nan)), report(jacobian(0 * NORMS))
    PAIRS = {  # by exit code: words of the reason, current, baseline, rules
        0: [
            ("unchanged", STEEP, STEEP),
            ("pass", NEW_STEEP, STEEP),
            ("", new(jacobian(0 * NORMS)), ZERO),
            ("not proven", new(jacobian([2.0])), report(jacobian([1.0]))),
            ("improved", new(jacobian(0 * NORMS)), STEEP),
            ("pass", NEW_HEADS, report(bounds(FOUR * ([0] + 7 * [1])))),
            ("not proven", new(jacobian([2.0, 3.0])), report(jacobian([1.0]))),
            ("pass", new(jacobian(NORMS[3:], ids=sample_ids(61, 3))), STEEP),
            ("pass", new(attack([ROBUST, ROBUST], eps=("2/255", "4/255"))), ATTACKED),
        ],
        3: [
            ("not finite", new(jacobian(NORMS * math.nan)), STEEP),
            ("not finite", NAN, NAN),
            ("1 value is not finite", report(jacobian(np.r_[NORMS[:-1], math.inf])), STEEP),
            ("64 values are not finite", new(with_samples(jacobian(), norm=64 * [None])), STEEP),
            ("no samples", report(jacobian([])), STEEP),
            ("8 values are not finite", new(bounds(FOUR * math.inf)), HEADS),
            ("64 samples did not converge", STUCK, STUCK),
            ("cut short", report(jacobian(), status="partial"), STEEP),
            ("1 sample did not converge", ONE_STUCK, STEEP),
            ("4 rows did not converge", STUCK_HEADS, HEADS),
            ("not finite", NAN, STEEP, "jacobian.norm:max <= 40"),
            # an error outweighs a regression
            ("cut short", report(jacobian(NORMS * 2), attack(ROBUST), status="partial"), BOTH),
        ],
        5: [
            ("baseline: ", NEW_STEEP, NAN),
            ("no samples", STEEP, report(jacobian([]))),
            ("only 0 of the baseline's 1", NEXT, ONE),
            ("4 rows did not converge", NEW_HEADS, STUCK_HEADS, "bounds.sharp:mean <= +5%"),
            ("only 0 of the baseline's 64", new(jacobian(ids=sample_ids(64, 100))), STEEP),
            ("only 60 of the baseline's 64", new(jacobian(ids=sample_ids(64, 4))), STEEP),
            ("eps lacks 2/255", new(attack(ROBUST, eps=("4/255",))), ATTACKED),
            ("steps 100 became 10", new(attack(ROBUST, steps=10)), ATTACKED),
            ("weaker than the baseline: square,linf,2/255", NEW_ATTACKED, TWO_ATTACKS),
            ("apgd-t ran as apgd-dlr", new(fallback(attack(ROBUST))), ATTACKED),
            ("current report has no section jacobian", NEW_HEADS, HEADS_AND_STEEP),
            ("baseline has no section jacobian", new(bounds(FOUR), jacobian()), HEADS),
            ("only one of the reports has layer 1 head 1", new(bounds(FOUR[:3])), HEADS),
            ("baseline: bounds: 4 rows", NEW_HEADS, STUCK_HEADS),
            ("score: sum became mean", MEAN, SUM),
            ("tol 0.0001 became 0.01", new(jacobian(tol=0.01)), STEEP),
            # what cannot be compared does, too
            ("steps 100 became 1", new(jacobian(NORMS * 2), attack(ROBUST, steps=1)), BOTH),
        ],
        1: [
            ("Jacobian norm 0 -> 1.035 (proven)", NEW_STEEP, ZERO),
            (
                "head norm (layer 0 head 0) 0 -> 1.126 (proven)",
                NEW_HEADS,
                report(bounds(FOUR * [[0], [1], [1], [1]])),
            ),
            ("head norm (max) 0 -> ", NEW_HEADS, NO_HEADS, "bounds.exact:max <= +5%"),
        ],
    }


@pytest.mark.parametrize(
    ("code", "reason", "current", "baseline", "texts"),
    [
        (code, reason, current, baseline, texts)
        for code, cases in PAIRS.items()
        for reason, current, baseline, *texts in cases
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_pair(code, reason, current, baseline, texts):
    judgement = judge(current, baseline, rules(*texts))
    assert judgement.exit_code == code
    assert reason in judgement.reason
    subject = of_judgement(judgement)
    text, markdown, xml = (render(subject, f).decode() for f in ("text", "markdown", "junit"))
    assert f"(exit code {code})" in text
    assert judgement.reason in " ".join(text.splitlines()[:1])
    endings = {"pass": "passed", "not proven": "CI passes"}
    ending = "failed" if code else endings[judgement.outcome]
    assert f"lipaudit gate {ending}" in markdown
    assert ("<error" in xml) == (code in (3, 5))
    assert ("<failure" in xml) == (code == 1 or "regressed" in text)
    document = json.loads(judgement.model_dump_json(), parse_constant=pytest.fail)
    assert document["exit_code"] == code
    if code == 3:  # and is no baseline, either
        with pytest.raises(BaselineError, match=re.escape(reason)):
            promote(current, "why")


@pytest.fixture(scope="module")
def full():
    """All that is kept of an audit of 144 heads."""
    section = bounds(np.tile(EXACT, (12, 1)), heads=12)
    edges = Array.of(np.linspace(0, 1, 51))
    histogram = {"g1_ratio_hist": Array.of(np.ones((144, 50))), "g1_ratio_edges": edges}
    section = section.model_copy(update={"arrays": section.arrays | histogram})
    return report(attack(flags(90)), jacobian(), section)


def test_a_baseline_is_a_small_report_that_judges_like_the_original(tmp_path, full):
    path, text = tmp_path / "baseline.json", schema.dumps(promote(full, "first release"))
    path.write_text(text, encoding="utf-8")
    baseline = load_baseline(path)
    assert baseline.run.reason == "first release"
    assert judge(full, baseline).verdicts == judge(full, full).verdicts
    assert promote(baseline, "first release") == baseline
    assert len(text) < 140_000
    assert "\r" not in text
    assert "g1_ratio_hist" not in text
    assert '"seconds": 1.25' not in text
    assert text.count("2026-") == 1


def test_what_is_not_promoted():
    """And no report that the gate cannot judge: see test_pair."""
    with pytest.raises(UsageError, match="reason"):
        promote(STEEP, "  ")
    with pytest.raises(BaselineError, match="no sections"):
        promote(report(), "why")


@pytest.mark.parametrize("where", [(), ("-o", "kept here.json")])
def test_the_command_that_a_refusal_names_works_as_it_stands(where, full, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "my report.json").write_text(schema.dumps(full))
    args = ["baseline", "save", "my report.json", *where]
    invoke(*args)
    refused = invoke(*args, code=2)
    command = refused.stderr.partition("Use: lipaudit ")[2].strip()
    invoke(*shlex.split(command))
    path = where[1] if where else "lipaudit-baseline.json"
    assert load_baseline(tmp_path / path).run.reason == "..."


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: text.replace(f'"{SCHEMA_VERSION}"', '"3.0"', 1),
        lambda text: text.replace('"lipaudit.report"', '"other.report"', 1),
        lambda text: text.replace('"sections"', '"sektions"', 1),
        lambda text: text.replace('"norm": [', '"norm": [1.0, ', 1),
        lambda text: text.replace('"shape": [12, 8]', '"shape": [12, 9]', 1),
        None,
    ],
    ids=["cut", "empty", "list", "newer", "foreign", "misspelt", "longer", "shape", "missing"],
)
def test_a_damaged_newer_or_missing_baseline_is_refused(tmp_path, damage):
    text = schema.dumps(report(bounds(EXACT), jacobian()))
    path = tmp_path / "baseline.json"
    if damage:
        assert damage(text) != text
        path.write_text(damage(text), encoding="utf-8")
    with pytest.raises(BaselineError, match=None if damage else "cannot read") as caught:
        load_baseline(path)
    assert caught.value.exit_code == 5
    assert ("baseline save" in caught.value.advice) == (damage is None)
    assert caught.value.advice
    with pytest.raises(InputError) as caught:
        schema.load(path)
    assert caught.value.exit_code == 4
    assert caught.value.advice or not damage
