"""SARIF: what its specification asks of each object, and what code scanning makes of results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lipaudit import schema
from lipaudit.cli.commands import build
from lipaudit.gate import judge, parse_rule, promote
from lipaudit.report import of_judgement, render

EXACT = np.random.default_rng(1).lognormal(0, 0.3, (12, 8))
ROBUST = np.r_[np.ones(90, int), np.zeros(38, int)]
MESSAGE = {"text!": str}
OBJECTS = {
    "log": {"$schema": str, "version!": {"2.1.0"}, "runs!": ["run"]},
    "run": {"tool!": "tool", "invocations": ["invocation"], "results": ["result"]},
    "tool": {"driver!": "driver"},
    "driver": {"name!": str, "semanticVersion": str, "rules": ["rule"]},
    "rule": {
        "id!": str,
        "shortDescription": "message",
        "fullDescription": "message",
        "help": "message",
        "defaultConfiguration": "configuration",
    },
    "configuration": {"level": {"none", "note", "warning", "error"}},
    "invocation": {
        "executionSuccessful!": bool,
        "exitCode": int,
        "exitCodeDescription": str,
        "toolExecutionNotifications": ["notification"],
    },
    "notification": {"message!": "message", "level": {"none", "note", "warning", "error"}},
    "result": {
        "message!": "message",
        "ruleId": str,
        "ruleIndex": int,
        "level": {"none", "note", "warning", "error"},
        "locations": ["location"],
        "partialFingerprints": dict,
        "properties": dict,
    },
    "location": {"physicalLocation": "physical", "logicalLocations": ["logical"]},
    "physical": {"artifactLocation!": "artifact", "region": "region"},
    "artifact": {"uri": str},
    "region": {"startLine!": int},
    "logical": {"fullyQualifiedName": str},
    "message": MESSAGE,
}
"""Properties of the objects of SARIF 2.1.0 that are written (sections 3.13 to 3.58 of the
specification) and their types; `!` marks what an object must have."""


def faults(value, kind, where="log") -> list[str]:
    """Say where a value is no object of the specification."""
    if isinstance(kind, list):
        items = value if isinstance(value, list) else [None]
        return [f for i, item in enumerate(items) for f in faults(item, kind[0], f"{where}[{i}]")]
    if isinstance(kind, set):
        return [] if value in kind else [f"{where} is {value!r}"]
    if isinstance(kind, type):
        return [] if type(value) is kind else [f"{where} is no {kind.__name__}"]
    known = {name.rstrip("!"): of for name, of in OBJECTS[kind].items()}
    if not isinstance(value, dict):
        return [f"{where} is no object"]
    wrong = [f"{where}.{name} is unknown" for name in value.keys() - known.keys()]
    wrong += [
        f"{where}.{n[:-1]} is missing"
        for n in OBJECTS[kind]
        if n[-1] == "!" and n[:-1] not in value
    ]
    return wrong + [
        f for n, v in value.items() if n in known for f in faults(v, known[n], f"{where}.{n}")
    ]


def sarif(judgement) -> dict:
    document = json.loads(render(of_judgement(judgement), "sarif"))
    assert faults(document, "log") == []
    return document["runs"][0]


@pytest.fixture
def failed(report, bounds, attack):
    changed, worse = EXACT.copy(), ROBUST.copy()
    changed[7] *= 1.5
    worse[:6] = 0
    current = report(bounds(changed), attack(worse), weights="b", spec="x\x1b")
    return judge(current, report(bounds(EXACT), attack(ROBUST)))


def test_the_checks_of_this_file_find_what_is_wrong():
    good = {"version": "2.1.0", "runs": [{"tool": {"driver": {"name": "x"}}}]}
    assert faults(good, "log") == []
    assert faults({"runs": [], "version": "2.0"}, "log") == ["log.version is '2.0'"]
    assert faults({"version": "2.1.0"}, "log") == ["log.runs is missing"]
    assert faults(good | {"more": 1}, "log") == ["log.more is unknown"]
    assert faults(good | {"runs": [{"tool": 1}]}, "log") == ["log.runs[0].tool is no object"]


def test_what_fails_is_an_error_and_what_is_open_a_warning(failed):
    run = sarif(failed)
    levels = [(r["level"], r["properties"]["status"]) for r in run["results"]]
    assert levels == [("error", "regressed"), ("warning", "inconclusive")]
    (head, accuracy) = run["results"]
    assert "layer 3 head 1" in head["message"]["text"]
    assert accuracy["locations"][0]["logicalLocations"] == [
        {"fullyQualifiedName": "attack.robust:mean worst,linf,2/255"}
    ]
    rules = run["tool"]["driver"]["rules"]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    (invocation,) = run["invocations"]
    assert (invocation["exitCode"], invocation["executionSuccessful"]) == (1, True)
    strict = sarif(failed.model_copy(update={"strict": True}))
    assert [r["level"] for r in strict["results"]] == ["error", "error"]


def test_a_pass_is_no_result_and_its_warnings_are_of_the_run(report, jacobian, norms):
    same = judge(report(jacobian(norms)), report(jacobian(norms)))
    spoilt = same.model_copy(update={"warnings": ("random weights",)})
    run = sarif(spoilt)
    assert run["results"] == []
    said = run["invocations"][0]["toolExecutionNotifications"]
    assert {"level": "warning", "message": {"text": "random weights"}} in said


def test_what_could_not_be_judged_is_an_error_of_a_run_that_did_not_succeed(
    report, jacobian, norms
):
    run = sarif(judge(report(jacobian(norms), dtype="float16"), report(jacobian(norms))))
    assert {result["level"] for result in run["results"]} == {"error"}
    assert (run["invocations"][0]["executionSuccessful"]) is False


def marks(judgement) -> list[dict]:
    return [result["partialFingerprints"] for result in sarif(judgement)["results"]]


def test_a_regression_keeps_its_mark_from_run_to_run(failed, report, bounds, attack):
    changed, worse = EXACT.copy(), ROBUST.copy()
    changed[7] *= 1.7
    worse[:7] = 0
    later = report(bounds(changed), attack(worse), weights="c", spec="another", seed=3)
    again = judge(later, report(bounds(EXACT), attack(ROBUST)))
    assert marks(again) == marks(failed)
    assert len({str(mark) for mark in marks(failed)}) == 2
    for mark in marks(failed):
        assert re.fullmatch(r"[0-9a-f]{16}:1", mark["primaryLocationLineHash"])
    twice = tuple(parse_rule(f"bounds.exact:each <= +{p}%") for p in (10, 20))
    both = judge(report(bounds(changed), weights="b"), report(bounds(EXACT)), twice)
    assert len(marks(both)) == len({str(mark) for mark in marks(both)}) == 2
    assert len(sarif(both)["tool"]["driver"]["rules"]) == 1


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("lipaudit-baseline.json", "lipaudit-baseline.json"),
        ("of models/base #1.json", "of%20models/base%20%231.json"),
        ("/srv/base.json", "file:///srv/base.json"),
    ],
)
def test_a_result_lies_in_the_file_of_the_baseline(failed, file, uri):
    run = sarif(failed.model_copy(update={"baseline_file": file}))
    for result in run["results"]:
        (place,) = result["locations"]
        assert place["physicalLocation"]["artifactLocation"] == {"uri": uri}
        assert place["physicalLocation"]["region"] == {"startLine": 1}
    bare = sarif(failed)["results"][0]["locations"][0]
    assert "physicalLocation" not in bare


def test_the_command_writes_it_with_the_baseline_that_it_was_given(
    report, bounds, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    base = promote(report(bounds(EXACT)), "first")
    Path("kept").mkdir()
    Path("kept/base.json").write_text(schema.dumps(base), encoding="utf-8")
    Path("now.json").write_text(
        schema.dumps(report(bounds(EXACT * 2), weights="b")), encoding="utf-8"
    )
    done = CliRunner().invoke(
        build(), ["gate", "now.json", "-b", "kept/base.json", "-o", "gate.sarif"]
    )
    assert done.exit_code == 1, done.output
    document = json.loads(Path("gate.sarif").read_text())
    assert faults(document, "log") == []
    results = document["runs"][0]["results"]
    assert len(results) == 12
    assert {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results} == {
        "kept/base.json"
    }
