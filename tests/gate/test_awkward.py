"""Awkward pairs of reports: the documented exit code each, a reason, and never a traceback."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lipaudit import schema
from lipaudit.errors import BaselineError, InputError
from lipaudit.gate import judge, load_baseline, parse_rule
from lipaudit.report import of_judgement, render
from lipaudit.tables import Note
from lipaudit.tables.report import SCHEMA_VERSION

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


# name, current, baseline, rules, exit code, words of the reason; the builders are the fixtures
PAIRS = [
    ("all equal", lambda r, b, j, a, i: (r(j(NORMS)), r(j(NORMS))), (), 0, "unchanged"),
    (
        "all equal, other weights",
        lambda r, b, j, a, i: (r(j(NORMS), weights="b"), r(j(NORMS))),
        (),
        0,
        "pass",
    ),
    ("all zero", lambda r, b, j, a, i: (r(j(0 * NORMS), weights="b"), r(j(0 * NORMS))), (), 0, ""),
    (
        "all NaN",
        lambda r, b, j, a, i: (r(j(NORMS * math.nan), weights="b"), r(j(NORMS))),
        (),
        3,
        "not finite",
    ),
    (
        "all NaN in both",
        lambda r, b, j, a, i: (r(j(NORMS * math.nan)), r(j(NORMS * math.nan))),
        (),
        3,
        "not finite",
    ),
    (
        "NaN in the baseline",
        lambda r, b, j, a, i: (r(j(NORMS), weights="b"), r(j(NORMS * math.nan))),
        (),
        5,
        "baseline: ",
    ),
    (
        "one infinity",
        lambda r, b, j, a, i: (r(j(np.r_[NORMS[:-1], math.inf])), r(j(NORMS))),
        (),
        3,
        "1 value is not finite",
    ),
    (
        "nulls",
        lambda r, b, j, a, i: (r(nulled(j(NORMS)), weights="b"), r(j(NORMS))),
        (),
        3,
        "not finite",
    ),
    ("empty", lambda r, b, j, a, i: (r(j([])), r(j(NORMS))), (), 3, "no samples"),
    ("empty baseline", lambda r, b, j, a, i: (r(j(NORMS)), r(j([]))), (), 5, "no samples"),
    (
        "one sample",
        lambda r, b, j, a, i: (r(j([2.0]), weights="b"), r(j([1.0]))),
        (),
        0,
        "inconclusive",
    ),
    (
        "a baseline of zeros",
        lambda r, b, j, a, i: (r(j(NORMS), weights="b"), r(j(0 * NORMS))),
        (),
        1,
        "(+inf, limits +inf to +inf",
    ),
    (
        "zeros now",
        lambda r, b, j, a, i: (r(j(0 * NORMS), weights="b"), r(j(NORMS))),
        (),
        0,
        "improved",
    ),
    (
        "a head of zeros",
        lambda r, b, j, a, i: (r(b(EXACT), weights="b"), r(b(EXACT * [[0], [1], [1], [1]]))),
        (),
        1,
        "layer 0 head 0: 0 -> ",
    ),
    (
        "a sample of zeros in a head",
        lambda r, b, j, a, i: (r(b(EXACT), weights="b"), r(b(EXACT * ([0] + 7 * [1])))),
        (),
        0,
        "pass",
    ),
    (
        "rows of zeros, compared as they are",
        lambda r, b, j, a, i: (r(b(EXACT), weights="b"), r(b(0 * EXACT))),
        ("bounds.exact:max <= +5%",),
        1,
        "(+inf)",
    ),
    (
        "an infinite head",
        lambda r, b, j, a, i: (r(b(EXACT * math.inf), weights="b"), r(b(EXACT))),
        (),
        3,
        "8 values are not finite",
    ),
    (
        "one sample in either, another one",
        lambda r, b, j, a, i: (r(j([2.0], ids=i(1, 1)), weights="b"), r(j([1.0]))),
        (),
        5,
        "only 0 of the baseline's 1",
    ),
    (
        "one sample, and more now",
        lambda r, b, j, a, i: (r(j([2.0, 3.0]), weights="b"), r(j([1.0]))),
        (),
        0,
        "inconclusive",
    ),
    (
        "none converged in either",
        lambda r, b, j, a, i: tuple(r(j(NORMS, converged=[False] * 64)) for _ in range(2)),
        (),
        3,
        "64 samples have not converged",
    ),
    (
        "no head converged then",
        lambda r, b, j, a, i: (r(b(EXACT), weights="b"), r(b(EXACT, converged=False))),
        ("bounds.sharp:mean <= +5%",),
        5,
        "4 rows have not converged",
    ),
    (
        "disjoint samples",
        lambda r, b, j, a, i: (r(j(NORMS, ids=i(64, 100)), weights="b"), r(j(NORMS))),
        (),
        5,
        "only 0 of the baseline's 64",
    ),
    (
        "94 % shared",
        lambda r, b, j, a, i: (r(j(NORMS, ids=i(64, 4)), weights="b"), r(j(NORMS))),
        (),
        5,
        "only 60 of the baseline's 64",
    ),
    (
        "95 % shared",
        lambda r, b, j, a, i: (
            r(j(NORMS[3:], ids=i(61, 3)), weights="b"),
            r(j(NORMS)),
        ),
        (),
        0,
        "pass",
    ),
    (
        "changed eps",
        lambda r, b, j, a, i: (r(a(ROBUST, eps=("4/255",)), weights="b"), r(a(ROBUST))),
        (),
        5,
        "eps lost 2/255",
    ),
    (
        "one more eps",
        lambda r, b, j, a, i: (
            r(a([ROBUST, ROBUST], eps=("2/255", "4/255")), weights="b"),
            r(a(ROBUST)),
        ),
        (),
        0,
        "pass",
    ),
    (
        "weaker attack",
        lambda r, b, j, a, i: (r(a(ROBUST, steps=10), weights="b"), r(a(ROBUST))),
        (),
        5,
        "steps 100 became 10",
    ),
    (
        "fewer attacks",
        lambda r, b, j, a, i: (
            r(a(ROBUST), weights="b"),
            r(a(ROBUST, attacks=("apgd-ce", "square"))),
        ),
        (),
        5,
        "also ran square,linf,2/255",
    ),
    (
        "attack fell back",
        lambda r, b, j, a, i: (r(fallback(a(ROBUST)), weights="b"), r(a(ROBUST))),
        (),
        5,
        "apgd-t ran as apgd-dlr",
    ),
    (
        "section missing now",
        lambda r, b, j, a, i: (r(b(EXACT), weights="b"), r(b(EXACT), j(NORMS))),
        (),
        5,
        "current report has no section jacobian",
    ),
    (
        "section missing then",
        lambda r, b, j, a, i: (r(b(EXACT), j(NORMS), weights="b"), r(b(EXACT))),
        (),
        5,
        "baseline has no section jacobian",
    ),
    (
        "a head less",
        lambda r, b, j, a, i: (r(b(EXACT[:3]), weights="b"), r(b(EXACT))),
        (),
        5,
        "only one of the reports has layer 1 head 1",
    ),
    (
        "partial",
        lambda r, b, j, a, i: (r(j(NORMS), status="partial"), r(j(NORMS))),
        (),
        3,
        "cut short",
    ),
    (
        "not converged",
        lambda r, b, j, a, i: (r(j(NORMS, converged=[True] * 63 + [False])), r(j(NORMS))),
        (),
        3,
        "1 samples have not converged",
    ),
    (
        "rows not converged",
        lambda r, b, j, a, i: (r(b(EXACT, converged=False)), r(b(EXACT))),
        (),
        3,
        "4 rows have not converged",
    ),
    (
        "baseline not converged",
        lambda r, b, j, a, i: (r(b(EXACT), weights="b"), r(b(EXACT, converged=False))),
        (),
        5,
        "baseline: bounds: 4 rows",
    ),
    (
        "other dtype",
        lambda r, b, j, a, i: (r(j(NORMS), dtype="bfloat16"), r(j(NORMS))),
        (),
        5,
        "dtype float32 became bfloat16",
    ),
    (
        "other preprocessing",
        lambda r, b, j, a, i: (
            r(j(NORMS), preprocess={"mean": (0.485,), "std": [0.5]}),
            r(j(NORMS)),
        ),
        (),
        5,
        "mean [0.5] became [0.485]",
    ),
    (
        "other scores",
        lambda r, b, j, a, i: (
            r(j(NORMS), options={"score": "mean"}),
            r(j(NORMS), options={"score": "sum"}),
        ),
        (),
        5,
        "--score sum became mean",
    ),
    (
        "looser tolerance",
        lambda r, b, j, a, i: (r(j(NORMS, tol=1e-2), weights="b"), r(j(NORMS))),
        (),
        5,
        "tol 0.0001 became 0.01",
    ),
    (
        "an absolute limit on NaN",
        lambda r, b, j, a, i: (r(j(NORMS * math.nan)), r(j(NORMS))),
        ("jacobian.norm:max <= 40",),
        3,
        "not finite",
    ),
    (
        "an error outweighs a regression",
        lambda r, b, j, a, i: (
            r(j(NORMS * 2), a(ROBUST), status="partial"),
            r(j(NORMS), a(ROBUST)),
        ),
        (),
        3,
        "cut short",
    ),
    (
        "what cannot be compared outweighs a regression",
        lambda r, b, j, a, i: (
            r(j(NORMS * 2), a(ROBUST, steps=1), weights="b"),
            r(j(NORMS), a(ROBUST)),
        ),
        (),
        5,
        "steps 100 became 1",
    ),
]


@pytest.mark.parametrize(
    ("build", "rules", "code", "reason"),
    [pytest.param(*case[1:], id=case[0]) for case in PAIRS],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_pair(report, bounds, jacobian, attack, ids, build, rules, code, reason):
    with np.errstate(all="ignore"):
        current, baseline = build(report, bounds, jacobian, attack, ids)
    judgement = judge(current, baseline, tuple(map(parse_rule, rules)))
    assert judgement.exit_code == code
    assert reason in judgement.reason
    subject = of_judgement(judgement)
    text, markdown, xml = (render(subject, f).decode() for f in ("text", "markdown", "junit"))
    assert f"(exit code {code})" in text
    assert ("failed" if code else "passed") in markdown
    assert ("<failure" in xml or "<error" in xml) == bool(code)


def test_a_judgement_of_nothing_is_strict_json(report, jacobian):
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
def test_a_damaged_or_newer_baseline_is_refused(tmp_path, report, bounds, jacobian, damage):
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
