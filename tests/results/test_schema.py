"""Reports as JSON: their summary, and files of earlier versions."""

from __future__ import annotations

import json

import lipaudit
from lipaudit import schema
from lipaudit.results.summary import summary


def older(text: str) -> str:
    """Return a report as version 1.0 wrote it."""
    document = json.loads(text)
    del document["summary"]
    return json.dumps(document | {"schema_version": "1.0"})


def test_a_report_is_written_with_its_summary_and_read_without():
    report = lipaudit.measure("demo", "bounds", samples=1)
    text = schema.dumps(report)
    document = json.loads(text)
    assert list(document).index("summary") < list(document).index("sections")
    assert document["summary"] == json.loads(summary(report).model_dump_json())
    assert schema.loads(text) == report
    forged = json.dumps(document | {"summary": {"warnings": "none"}})
    assert schema.dumps(schema.loads(forged)) == text


def test_a_report_of_version_1_0_is_read_and_written_as_one_of_this():
    text = schema.dumps(lipaudit.measure("demo", "bounds", samples=1))
    assert schema.dumps(schema.loads(older(text))) == text


def test_the_schema_describes_the_summary():
    described = schema.json_schema()
    assert described["properties"]["summary"] == {"$ref": "#/$defs/Summary"}
    names = described["$defs"]["Summary"]["properties"]
    assert {"warnings", "accuracy", "norms", "heads", "fragile", "bounds"} <= names.keys()
    assert {"Accuracy", "Tightness"} <= described["$defs"].keys()
