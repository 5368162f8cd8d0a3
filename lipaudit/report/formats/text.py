"""A judgement as text: for a terminal, a pull request, GitHub's annotations, a JUnit reader."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from lipaudit.gate.verdicts import UNPROVEN, Judgement, Verdict, amount, number

MARKS = {"improved": "✓", "pass": "✓", "unchanged": "="}
FEW = 6
"""Rows of one rule that are written out when none of them stands out."""
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_text(judgement: Judgement) -> str:
    """Write a judgement as plain text; of a rule over many rows, those that stand out."""
    lines = [f"{judgement.current} against {judgement.baseline}", ""]
    for rule, verdicts in _by_rule(judgement).items():
        told = _telling(judgement, verdicts)
        lines += [f"{_mark(judgement, verdict)} {verdict.line}" for verdict in told]
        lines += _rest(rule, verdicts, told)
    lines += [f"  shown, never failing: {_figures(verdict)}" for verdict in judgement.shown]
    lines += [f"  note: {note}" for note in judgement.notes]
    lines += ["", f"{judgement.reason} (exit code {judgement.exit_code})"]
    return "\n".join(map(_plain, lines)) + "\n"


def render_markdown(judgement: Judgement) -> str:
    """Write a judgement as a GitHub table, for a step summary or a comment."""
    head = "failed" if judgement.exit_code else "passed"
    lines = [
        f"### lipaudit gate {head}: {_cell(judgement.current)} against "
        f"{_cell(judgement.baseline)}",
        "",
        "| verdict | rule | row | baseline | current | change | limits | samples |",
        "|---|---|---|--:|--:|--:|---|--:|",
    ]
    for rule, verdicts in _by_rule(judgement).items():
        told = _telling(judgement, verdicts)
        lines += [_row(judgement, verdict) for verdict in told]
        lines += [
            f"| | {_cell(line.strip())} | | | | | | |" for line in _rest(rule, verdicts, told)
        ]
    lines += ["", _cell(judgement.reason), ""]
    lines += [f"- shown, never failing: {_cell(_figures(v))}" for v in judgement.shown]
    lines += [f"- {_cell(note)}" for note in judgement.notes]
    return "\n".join(lines) + "\n"


def render_annotations(judgement: Judgement) -> str:
    """Write GitHub workflow commands: an error per failure, a warning per unproven rule."""
    lines = []
    for verdict in judgement.verdicts:
        if judgement.fails(verdict):
            level = "error"
        elif verdict.status in UNPROVEN:
            level = "warning"
        else:
            continue
        title = _escaped(f"lipaudit: {verdict.status}", more=":,")
        lines.append(f"::{level} title={title}::{_escaped(verdict.line)}\n")
    return "".join(lines)


def render_junit(judgement: Judgement) -> bytes:
    """Write a judgement as JUnit XML: a test case per verdict."""
    failed = [v for v in judgement.verdicts if judgement.fails(v)]
    errors = [v for v in failed if v.reason]
    counts = {
        "tests": str(len(judgement.verdicts)),
        "failures": str(len(failed) - len(errors)),
        "errors": str(len(errors)),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "lipaudit gate", **counts})
    for verdict in judgement.verdicts:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            {"classname": _xml(verdict.metric), "name": _xml(f"{verdict.rule} {verdict.name}")},
        )
        if judgement.fails(verdict):
            kind = "error" if verdict.reason else "failure"
            note = {"message": _xml(verdict.line), "type": verdict.status}
            ElementTree.SubElement(case, kind, note)
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(verdict.line)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _by_rule(judgement: Judgement) -> dict[str, list[Verdict]]:
    rules: dict[str, list[Verdict]] = {}
    for verdict in judgement.verdicts:
        rules.setdefault(verdict.rule, []).append(verdict)
    return rules


def _telling(judgement: Judgement, verdicts: list[Verdict]) -> list[Verdict]:
    """Return all verdicts of a rule when they are few, else those that are no plain pass."""
    if len(verdicts) <= FEW:
        return verdicts
    plain = {"pass", "unchanged"}
    return [v for v in verdicts if judgement.fails(v) or v.status not in plain]


def _rest(rule: str, verdicts: list[Verdict], told: list[Verdict]) -> Iterator[str]:
    """Count the verdicts that were not written out."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        if verdict not in told:
            counts[verdict.status] = counts.get(verdict.status, 0) + 1
    for status, count in counts.items():
        yield f"  {rule}: {count} {'more ' if told else ''}rows {status}"


def _mark(judgement: Judgement, verdict: Verdict) -> str:
    return "✗" if judgement.fails(verdict) else MARKS.get(verdict.status, "~")


def _figures(verdict: Verdict) -> str:
    change = amount(verdict.change, verdict.unit)
    chance = "" if verdict.mcnemar is None else f", exact McNemar p = {verdict.mcnemar:.3g}"
    return f"{verdict.metric}: {number(verdict.old)} -> {number(verdict.new)} ({change}{chance})"


def _row(judgement: Judgement, verdict: Verdict) -> str:
    limits = ""
    if verdict.low is not None:
        ends = amount(verdict.low, verdict.unit), amount(verdict.high, verdict.unit)
        limits = f"{ends[0]} to {ends[1]}"
    cells = (
        f"{_mark(judgement, verdict)} {verdict.status}",
        verdict.rule,
        verdict.reason or verdict.name,
        "" if verdict.old is None else number(verdict.old),
        "" if verdict.new is None else number(verdict.new),
        amount(verdict.change, verdict.unit),
        limits,
        str(verdict.samples or ""),
    )
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Keep a hostile model name from breaking the table or becoming HTML."""
    return html.escape(_plain(text), quote=False).replace("|", "\\|").replace("`", "'")


def _plain(text: str) -> str:
    """Show control characters instead of obeying them."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _escaped(text: str, *, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
