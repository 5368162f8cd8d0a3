"""A result as strict JSON: the data themselves."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from lipaudit import schema
from lipaudit.report.form import Format
from lipaudit.results import Report


def render(record: BaseModel | dict[str, Any] | list[Any]) -> bytes:
    """Write a report, a comparison, a judgement or plain values."""
    if isinstance(record, Report):
        return schema.dumps(record).encode()
    if isinstance(record, BaseModel):
        return record.model_dump_json(indent=2).encode() + b"\n"
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


FORMAT = Format(
    "json",
    takes="record",
    render=render,
    suffixes=(".json",),
    refusal=(
        "there are no data here to write as JSON",
        "lipaudit report A.json -f json writes those of a report.",
    ),
)
