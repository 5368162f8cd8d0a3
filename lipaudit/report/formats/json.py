"""A result as strict JSON: the data themselves."""

from __future__ import annotations

import json
import math
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
        return schema.escaped(record.model_dump_json(indent=2)).encode() + b"\n"
    text = json.dumps(_strict(record), indent=2, ensure_ascii=False, allow_nan=False)
    return schema.escaped(text).encode() + b"\n"


def _strict(value: Any) -> Any:
    """Return plain values with NaN and infinities as strings, as reports have them."""
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


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
