"""A judgement of the gate: as lines, and as a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import get_args

from lipaudit.gate.verdicts import UNPROVEN, Judgement, Verdict, VerdictStatus
from lipaudit.report.blocks import Block, Chapter, Document, Paragraph, Points, make_table
from lipaudit.report.page.facts import CHARACTERS, open_page
from lipaudit.tables import Note

MARKS = {"improved": "✓", "pass": "✓", "unchanged": "="}
GRAVEST: tuple[VerdictStatus, ...] = get_args(VerdictStatus)[::-1]
"""Verdicts, the most severe first."""
FEW = 6
"""Rules with at most this many rows are listed row by row."""
MOST = 8
"""Largest number of verdicts listed line by line for a rule, and of failures on a page."""
COLUMNS = ("baseline", "current", "change", "paired", "limits", "samples")


def list_lines(judgement: Judgement) -> list[str]:
    """Write a judgement line by line, the outcome last."""
    lines = [f"{judgement.current} against {judgement.baseline}", ""]
    lines += [f"! warning: {text}" for text in judgement.warnings]
    for rule, listed, passed in _group_verdicts(judgement):
        first = listed[:MOST]
        lines += [f"{_choose_mark(judgement, verdict)} {verdict.line}" for verdict in first]
        cut = Counter[str](verdict.status for verdict in listed[MOST:])
        for status, count in (cut + passed).items():
            where = "; -f table lists them" if status in cut else ""
            lines.append(f"  {rule}: {count} {'more ' * bool(first)}rows {status}{where}")
    lines += [f"  note: {note}" for note in judgement.notes]
    return [*lines, "", f"{judgement.reason} (exit code {judgement.exit_code})"]


def make_judgement_page(judgement: Judgement) -> Document:
    """Return the page of a judgement: the outcome, a table of verdicts, the remarks."""
    statuses = [verdict.status for verdict in judgement.verdicts]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in GRAVEST if s in statuses)
    answer = Paragraph(f"FAILED (exit code {judgement.exit_code}): {counts}", "broken")
    if not judgement.exit_code:
        tone = "open" if UNPROVEN.intersection(statuses) else "kept"
        answer = Paragraph(f"PASSED: {counts}", tone)  # type: ignore[arg-type]
    file = f" ({judgement.baseline_file})" if judgement.baseline_file else ""
    strict = ", and rules that are not proven fail" if judgement.strict else ""
    facts = (
        ("current", judgement.current),
        ("baseline", judgement.baseline + file),
        ("confidence", f"{1 - judgement.alpha:.4g} over all rules together{strict}"),
    )
    warnings = (Note(level="warning", code="spoils", text=text) for text in judgement.warnings)
    opening = open_page(answer, "", facts, warnings)
    chapter = Chapter("verdicts", "What is the verdict on each rule?", _show_verdicts(judgement))
    ending = "failed" if judgement.exit_code else "passed"
    title = f"lipaudit gate {ending}: {judgement.current} against {judgement.baseline}"
    return Document(title, (opening, chapter))


def _group_verdicts(judgement: Judgement) -> Iterator[tuple[str, list[Verdict], Counter[str]]]:
    """Yield each rule, its verdicts to list, the worst first, and how many others passed.

    All verdicts are listed if they are few, else those that do not simply pass.
    """
    rules: dict[str, list[Verdict]] = {}
    for verdict in judgement.verdicts:
        rules.setdefault(verdict.rule, []).append(verdict)
    for rule, verdicts in rules.items():
        # For an upper limit the largest excess comes first, for a lower one the largest shortfall.
        sign = -1 if ">=" in rule else 1

        def rank(verdict: Verdict, sign: int = sign) -> tuple[bool, float]:
            values = (verdict.paired, verdict.change, verdict.new)
            known = [each for each in values if each is not None and not verdict.reason]
            return not judgement.fails(verdict), -sign * known[0] if known else -math.inf

        listed = [
            v
            for v in verdicts
            if len(verdicts) <= FEW or judgement.fails(v) or v.status not in ("pass", "unchanged")
        ]
        others = Counter[str](v.status for v in verdicts if v not in listed)
        yield rule, sorted(listed, key=rank) if len(listed) > FEW else listed, others


def _choose_mark(judgement: Judgement, verdict: Verdict) -> str:
    return "✗" if judgement.fails(verdict) else MARKS.get(verdict.status, "~")


def _show_verdicts(judgement: Judgement) -> list[Block]:
    """Explain the failing verdicts in a sentence each, then tabulate all, failing ones first."""
    groups = [*_group_verdicts(judgement)]
    verdicts = [verdict for _, listed, _ in groups for verdict in listed]
    verdicts.sort(key=lambda v: (not judgement.fails(v), GRAVEST.index(v.status)))
    rows: list[tuple[str, ...]] = [
        (f"{_choose_mark(judgement, v)} {v.status}", v.rule, v.reason or v.name)
        + tuple(v.texts[name] for name in COLUMNS)
        for v in verdicts
    ]
    for rule, listed, passed in groups:
        more, blank = "more " * bool(listed), ("",) * len(COLUMNS)
        rows += [(status, rule, f"{n} {more}rows", *blank) for status, n in passed.items()]
    names = ("verdict", "rule", "row", *COLUMNS)
    points = []
    for v in verdicts:
        if judgement.fails(v) or v.status == "inconclusive":
            places = ((name[:CHARACTERS], judgement.places.get(name)) for name in v.moved)
            moved = ", ".join(f"{name} ({place})" if place else name for name, place in places)
            changed = f"; samples that changed most: {moved}" if moved else ""
            points.append(("", f"{v.line}{changed}", ""))
    points = points[:MOST]
    notes = tuple(("note", text, "") for text in judgement.notes)
    blocks: list[Block] = [Points(tuple(points))] if points else []
    if rows:
        blocks.append(make_table("", zip(names, zip(*rows, strict=True), strict=True)))
    return [*blocks, *([Points(notes)] if notes else [])]
