from __future__ import annotations

import json

import pytest

from lipaudit import schema
from lipaudit.errors import UsageError
from lipaudit.report import of_reports, render
from lipaudit.report.formats import json as renderer


def test_file_is_strict_json_and_reads_back_the_same(report):
    text = renderer.render(report).decode()
    json.loads(text, parse_constant=pytest.fail)
    assert schema.dumps(schema.loads(text)) == text


def test_several_reports_have_no_common_file(report, other):
    with pytest.raises(UsageError, match="do not fit one JSON file"):
        render(of_reports(report, other), "json")
