"""A judgement as workflow commands of GitHub, which annotate a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lipaudit.report.form import Format

if TYPE_CHECKING:
    from lipaudit.gate import Judgement


def render(judgement: Judgement) -> bytes:
    """Write what spoils the figures, an error per failure and a warning per unproven rule."""
    lines = [
        f"::warning title=lipaudit%3A figures::{_escaped(text)}\n" for text in judgement.warnings
    ]
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
