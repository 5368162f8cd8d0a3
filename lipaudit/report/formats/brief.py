"""A result in 15 lines of Markdown, for a pull request."""

from __future__ import annotations

from lipaudit.report.blocks import Brief
from lipaudit.report.form import Format
from lipaudit.report.formats.markdown import escape, grid

MOST = 9
"""Rows of the table: with them it is 15 lines."""


def render(brief: Brief) -> bytes:
    """Write the title, the remarks in one paragraph, and the first rows of the table."""
    rows = list(brief.rows)
    if len(rows) > MOST:
        more = f"and {len(rows) - MOST + 1} more"
        rows = [*rows[: MOST - 1], (more, *[""] * (len(brief.heads) - 1))]
    texts = [[escape(text) for text in row] for row in rows]
    remarks = "<br>".join(map(escape, brief.remarks))
    lines = [f"### {escape(brief.title)}", "", remarks, ""]
    lines += grid([*map(escape, brief.heads)], texts, brief.align) if texts else []
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


FORMAT = Format(
    "brief",
    takes="brief",
    render=render,
    suffixes=(".md",),
    asked=True,
    refusal=(
        "a brief is of one report, of a comparison or of a judgement",
        "lipaudit compare OLD.json NEW.json -f brief writes one of what changed.",
    ),
)
