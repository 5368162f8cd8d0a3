"""A result as strict JSON: the data themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit import schema
from lipaudit.report.form import Format
from lipaudit.results import Report

if TYPE_CHECKING:
    from pydantic import BaseModel


def render(record: BaseModel) -> bytes:
    """Write a report, a comparison or a judgement."""
    if isinstance(record, Report):
        return schema.dumps(record).encode()
    return record.model_dump_json(indent=2).encode() + b"\n"


FORMAT = Format(
    "json",
    takes="record",
    render=render,
    suffixes=(".json",),
    refusal=(
        "reports side by side do not fit one JSON file",
        "lipaudit compare A.json B.json -f json writes what changed; table, markdown and html "
        "set reports side by side.",
    ),
)
