"""Awkward pairs of reports: the documented exit code each, a reason, and never a traceback."""

import json
import math

import numpy as np
import pytest

from lipaudit import schema
from lipaudit.errors import BaselineError, InputError
from lipaudit.gate import judge
from lipaudit.gate.conditions import load_baseline
from lipaudit.gate.rules import parse_rule
from lipaudit.report import of_judgement, render
from lipaudit.tables import Note
from lipaudit.tables.report import SCHEMA_VERSION
from tests.gate.conftest import make_attack as attack
from tests.gate.conftest import make_bounds as bounds
from tests.gate.conftest import make_jacobian as jacobian
from tests.gate.conftest import make_report as report
from tests.gate.conftest import sample_ids

NORMS = np.random.default_rng(0).lognormal(0, 0.5, 64)
EXACT = np.random.default_rng(1).lognormal(0, 0.3, (4, 8))
ROBUST = np.r_[np.ones(90, int), np.zeros(38, int)]


def fallback(section):
    note = Note(level="info", code="attack-replaced", text="apgd-t ran as apgd-dlr")
    return section.model_copy(update={"notes": (note,)})


def nulled(section):
    """Every norm null, as a measure writes what it could not compute."""
    none = (None,) * len(section.samples["norm"])
    return section.model_copy(update={"samples": {**section.samples, "norm": none}})


def new(*sections, **run):
    """A report of other weights than the baseline's."""
    return report(*sections, weights="b", **run)


STEEP, HEADS = report(jacobian(NORMS)), report(bounds(EXACT))
ATTACKED = report(attack(ROBUST))
NEW_STEEP, NEW_HEADS = new(jacobian(NORMS)), new(bounds(EXACT))
NEW_ATTACKED = new(attack(ROBUST))
STUCK = report(jacobian(NORMS, converged=[False] * 64))
STUCK_HEADS = report(bounds(EXACT, converged=False))
BOTH = report(jacobian(NORMS), attack(ROBUST))
ONE_STUCK = report(jacobian(NORMS, converged=[True] * 63 + [False]))
ONE, NEXT = report(jacobian([1.0])), new(jacobian([2.0], ids=sample_ids(1, 1)))
TWO_ATTACKS = report(attack(ROBUST, attacks=("apgd-ce", "square")))
HEADS_AND_STEEP = report(bounds(EXACT), jacobian(NORMS))
COARSE, MOVED = (
    report(jacobian(NORMS), **how)
    for how in ({"dtype": "bfloat16"}, {"preprocess": {"mean": (0.485,), "std": [0.5]}})
)
SUM, MEAN = (report(jacobian(NORMS), options={"score": how}) for how in ("sum", "mean"))
with np.errstate(all="ignore"):
    NAN, ZERO = report(jacobian(NORMS * math.nan)), report(jacobian(0 * NORMS))
    PAIRS = {  # by exit code: words of the reason, current, baseline, rules
        0: [
            ("unchanged", STEEP, STEEP),
            ("pass", NEW_STEEP, STEEP),
            ("", new(jacobian(0 * NORMS)), ZERO),
            ("inconclusive", new(jacobian([2.0])), report(jacobian([1.0]))),
            ("improved", new(jacobian(0 * NORMS)), STEEP),
            ("pass", NEW_HEADS, report(bounds(EXACT * ([0] + 7 * [1])))),
            ("inconclusive", new(jacobian([2.0, 3.0])), report(jacobian([1.0]))),
            ("pass", new(jacobian(NORMS[3:], ids=sample_ids(61, 3))), STEEP),
            ("pass", new(attack([ROBUST, ROBUST], eps=("2/255", "4/255"))), ATTACKED),
        ],
        3: [
            ("not finite", new(jacobian(NORMS * math.nan)), STEEP),
            ("not finite", NAN, NAN),
            ("1 value is not finite", report(jacobian(np.r_[NORMS[:-1], math.inf])), STEEP),
            ("not finite", new(nulled(jacobian(NORMS))), STEEP),
            ("no samples", report(jacobian([])), STEEP),
            ("8 values are not finite", new(bounds(EXACT * math.inf)), HEADS),
            ("64 samples did not converge", STUCK, STUCK),
            ("cut short", report(jacobian(NORMS), status="partial"), STEEP),
            ("1 samples did not converge", ONE_STUCK, STEEP),
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
            ("only 0 of the baseline's 64", new(jacobian(NORMS, ids=sample_ids(64, 100))), STEEP),
            ("only 60 of the baseline's 64", new(jacobian(NORMS, ids=sample_ids(64, 4))), STEEP),
            ("eps lacks 2/255", new(attack(ROBUST, eps=("4/255",))), ATTACKED),
            ("steps 100 became 10", new(attack(ROBUST, steps=10)), ATTACKED),
            ("weaker than the baseline: square,linf,2/255", NEW_ATTACKED, TWO_ATTACKS),
            ("apgd-t ran as apgd-dlr", new(fallback(attack(ROBUST))), ATTACKED),
            ("current report has no section jacobian", NEW_HEADS, HEADS_AND_STEEP),
            ("baseline has no section jacobian", new(bounds(EXACT), jacobian(NORMS)), HEADS),
            ("only one of the reports has layer 1 head 1", new(bounds(EXACT[:3])), HEADS),
            ("baseline: bounds: 4 rows", NEW_HEADS, STUCK_HEADS),
            ("dtype: float32 became bfloat16", COARSE, STEEP),
            ("preprocess mean: [0.5] became [0.485]", MOVED, STEEP),
            ("score: sum became mean", MEAN, SUM),
            ("tol 0.0001 became 0.01", new(jacobian(NORMS, tol=0.01)), STEEP),
            # what cannot be compared does, too
            ("steps 100 became 1", new(jacobian(NORMS * 2), attack(ROBUST, steps=1)), BOTH),
        ],
        1: [
            ("(+inf, limits +inf to +inf", NEW_STEEP, ZERO),
            ("layer 0 head 0: 0 -> ", NEW_HEADS, report(bounds(EXACT * [[0], [1], [1], [1]]))),
            ("(+inf)", NEW_HEADS, report(bounds(0 * EXACT)), "bounds.exact:max <= +5%"),
        ],
    }


@pytest.mark.parametrize(
    ("code", "reason", "current", "baseline", "rules"),
    [
        (code, reason, current, baseline, rules)
        for code, cases in PAIRS.items()
        for reason, current, baseline, *rules in cases
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_pair(code, reason, current, baseline, rules):
    judgement = judge(current, baseline, tuple(map(parse_rule, rules)))
    assert judgement.exit_code == code
    assert reason in judgement.reason
    subject = of_judgement(judgement)
    text, markdown, xml = (render(subject, f).decode() for f in ("text", "markdown", "junit"))
    assert f"(exit code {code})" in text
    assert ("failed" if code else "passed") in markdown
    assert ("<failure" in xml or "<error" in xml) == bool(code)


def test_a_judgement_of_nothing_is_strict_json():
    judgement = judge(report(jacobian(NORMS * math.nan)), report(jacobian(NORMS)))

    def refuse(token):
        raise AssertionError(token)

    document = json.loads(judgement.model_dump_json(), parse_constant=refuse)
    assert document["exit_code"] == 3


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
        lambda text: text.replace('"shape": [4, 8]', '"shape": [4, 9]', 1),
    ],
    ids=["cut", "empty", "list", "newer", "foreign", "misspelt", "longer column", "shape"],
)
def test_a_damaged_or_newer_baseline_is_refused(tmp_path, damage):
    text = schema.dumps(report(bounds(EXACT), jacobian(NORMS)))
    damaged = damage(text)
    assert damaged != text
    path = tmp_path / "baseline.json"
    path.write_text(damaged, encoding="utf-8")
    with pytest.raises(BaselineError) as caught:
        load_baseline(path)
    assert caught.value.exit_code == 5
    assert caught.value.advice
    with pytest.raises(InputError) as caught:
        schema.load(path)
    assert caught.value.exit_code == 4


def test_a_missing_baseline_says_how_to_make_one(tmp_path):
    with pytest.raises(BaselineError, match="cannot read") as caught:
        load_baseline(tmp_path / "none.json")
    assert "baseline save" in caught.value.advice
