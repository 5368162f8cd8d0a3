"""A judgement as SARIF 2.1.0, which code scanning shows beside the files of a repository.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lipaudit import __version__
from lipaudit.errors import ExitCode
from lipaudit.report.cells import plain
from lipaudit.report.form import Format
from lipaudit.report.formats import json

if TYPE_CHECKING:
    from lipaudit.gate import Judgement, Verdict

SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
UNJUDGED = (ExitCode.INTERNAL, ExitCode.BASELINE)
"""With these exit codes not every rule was judged."""


def render(judgement: Judgement) -> bytes:
    """Write what fails as errors, and what is inconclusive as warnings; a pass is no result."""
    metrics = list(dict.fromkeys(verdict.metric for verdict in judgement.verdicts))
    driver = {
        "name": "lipaudit",
        "semanticVersion": __version__,
        "rules": [_rule(metric, judgement) for metric in metrics],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(judgement)],
        "results": [
            _result(verdict, level, metrics.index(verdict.metric), judgement.baseline_file)
            for verdict in judgement.verdicts
            if (level := _level(judgement, verdict))
        ],
    }
    return json.render({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _level(judgement: Judgement, verdict: Verdict) -> str:
    if judgement.fails(verdict):
        return "error"
    return "warning" if verdict.status == "inconclusive" else ""


def _rule(metric: str, judgement: Judgement) -> dict[str, Any]:
    """Describe what a metric is, and what is asked of it."""
    rules = dict.fromkeys(v.rule for v in judgement.verdicts if v.metric == metric)
    asked = f"The gate asks for {' and '.join(rules)}."
    return {
        "id": metric,
        "shortDescription": _text(f"{metric}: less robust than the gate allows"),
        "fullDescription": _text(asked),
        "help": _text(f"{asked} `lipaudit explain '{metric}'` says what it means."),
        "defaultConfiguration": {"level": "error"},
    }


def _result(verdict: Verdict, level: str, rule: int, file: str) -> dict[str, Any]:
    # Of the rule and its row alone: the same regression has the same mark in the next run, with
    # other figures and another model, and two in one file are told apart.
    mark = sha256(f"{verdict.rule}\n{verdict.name}".encode()).hexdigest()[:16]
    place: dict[str, Any] = {
        "logicalLocations": [
            {"fullyQualifiedName": plain(f"{verdict.metric} {verdict.name}".strip())}
        ]
    }
    if file:
        place["physicalLocation"] = {
            "artifactLocation": {"uri": _uri(file)},
            "region": {"startLine": 1},
        }
    return {
        "ruleId": verdict.metric,
        "ruleIndex": rule,
        "level": level,
        "message": _text(verdict.line),
        "locations": [place],
        "partialFingerprints": {"primaryLocationLineHash": f"{mark}:1", "lipaudit/v1": mark},
        "properties": {"status": verdict.status, **verdict.texts},
    }


def _invocation(judgement: Judgement) -> dict[str, Any]:
    said = [("warning", text) for text in judgement.warnings]
    said += [("note", text) for text in judgement.notes]
    return {
        "executionSuccessful": judgement.exit_code not in UNJUDGED,
        "exitCode": judgement.exit_code,
        "exitCodeDescription": plain(judgement.reason),
        "toolExecutionNotifications": [
            {"level": level, "message": _text(text)} for level, text in said
        ],
    }


def _text(text: str) -> dict[str, str]:
    return {"text": plain(text)}


def _uri(file: str) -> str:
    """Return a path as a URI: relative ones are of the repository's root."""
    path = PurePath(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


FORMAT = Format(
    "sarif",
    takes="judgement",
    render=render,
    suffixes=(".sarif",),
    refusal=("SARIF is of a judgement", "lipaudit gate CURRENT -o gate.sarif writes it."),
)
