"""A badge as the JSON that shields.io reads from an endpoint."""

from __future__ import annotations

from lipaudit.report.blocks import Badge
from lipaudit.report.cells import plain
from lipaudit.report.form import Format
from lipaudit.report.formats import json


def render(badge: Badge) -> bytes:
    """Write the name, the figure and its colour."""
    return json.render(
        {
            "schemaVersion": 1,
            "label": plain(badge.label),
            "message": plain(badge.message),
            "color": badge.colour,
        }
    )


FORMAT = Format(
    "endpoint",
    takes="badge",
    render=render,
    suffixes=(".json",),
    asked=True,
    refusal=(
        "a badge is of one report, or of a judgement",
        "lipaudit report A.json -f endpoint -o badge.json writes it.",
    ),
)
