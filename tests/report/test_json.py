from __future__ import annotations

import json

import pytest

from lipaudit import schema
from lipaudit.gate import rank
from lipaudit.report import of_reports, render
from lipaudit.report.formats import json as renderer


def test_file_is_strict_json_and_reads_back_the_same(report):
    text = renderer.render(report).decode()
    json.loads(text, parse_constant=pytest.fail)
    assert schema.dumps(schema.loads(text)) == text


def test_several_reports_are_their_ranking(report, other):
    written = json.loads(render(of_reports(report, other), "json"))
    assert [model["model"] for model in written["models"]] == [
        model.model for model in rank([report, other]).models
    ]
