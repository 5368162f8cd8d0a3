"""A judgement as workflow commands of GitHub, which annotate a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.report.form import Format

if TYPE_CHECKING:
    from lipaudit.gate import Judgement


def render(judgement: Judgement) -> bytes:
    """Write an error per failure and a warning per unproven rule, one to a line."""
    lines = []
    for verdict in judgement.verdicts:
        failed = judgement.fails(verdict)
        if failed or verdict.unproven:
            title = _escaped(f"lipaudit: {verdict.status}", more=":,")
            level = "error" if failed else "warning"
            lines.append(f"::{level} title={title}::{_escaped(verdict.line)}\n")
    return "".join(lines).encode()


def _escaped(text: str, *, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


FORMAT = Format(
    "annotations",
    takes="judgement",
    render=render,
    refusal=(
        "annotations are of a judgement",
        "lipaudit gate CURRENT -f annotations writes them.",
    ),
)
