"""A judgement of the gate: as lines, as a page, and in brief."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from lipaudit.gate.verdicts import UNPROVEN, Judgement, Verdict, VerdictStatus
from lipaudit.report.blocks import (
    Banner,
    Block,
    Chapter,
    Document,
    Notes,
    Paragraph,
    Table,
)
from lipaudit.report.page.facts import CHARACTERS
from lipaudit.report.pictures import State
from lipaudit.tables import Column, Note

MARKS = {"improved": "✓", "pass": "✓", "unchanged": "="}
GRAVEST: tuple[VerdictStatus, ...] = get_args(VerdictStatus)[::-1]
"""Verdicts, the most severe first."""
FEW = 6
"""Rules with at most this many rows are listed row by row."""
MOST = 8
"""Largest number of verdicts listed per rule and above the table."""
COLUMNS = (
    dict.fromkeys(("verdict", "rule", "row"), "s")
    | dict.fromkeys(("baseline", "current", "change", "paired"), "")
    | {"limits": "s", "samples": ""}
)
"""Columns of the table: `s` is text, aligned left; others are aligned right."""
PAIRED = (
    "Change: of the two values shown. Paired: the tested change, each sample against itself, "
    "with its limits."
)


def group_by_rule(
    judgement: Judgement,
) -> Iterator[tuple[str, list[Verdict], list[Verdict], Counter[str]]]:
    """Yield each rule, its verdicts, those to list, and the number of others by status.

    Listed are all verdicts if they are few, else those that do not simply pass.
    """
    rules: dict[str, list[Verdict]] = {}
    for verdict in judgement.verdicts:
        rules.setdefault(verdict.rule, []).append(verdict)
    for rule, verdicts in rules.items():
        listed = [
            v
            for v in verdicts
            if len(verdicts) <= FEW or judgement.fails(v) or v.status not in ("pass", "unchanged")
        ]
        yield rule, verdicts, listed, Counter(v.status for v in verdicts if v not in listed)


def list_lines(judgement: Judgement) -> list[str]:
    """Write a judgement line by line, the outcome last."""
    lines = [f"{judgement.current} against {judgement.baseline}", ""]
    lines += [f"! warning: {text}" for text in judgement.warnings]
    for rule, _, listed, others in group_by_rule(judgement):
        first = _sort_verdicts(judgement, listed)[:MOST]
        lines += [f"{_choose_mark(judgement, verdict)} {verdict.line}" for verdict in first]
        cut = Counter[str](v.status for v in listed if v not in first)
        for status, count in (cut + others).items():
            where = "; -f table lists them" if status in cut else ""
            lines.append(f"  {rule}: {count} {'more ' * bool(first)}rows {status}{where}")
    lines += [f"  note: {note}" for note in judgement.notes]
    return [*lines, "", f"{judgement.reason} (exit code {judgement.exit_code})"]


def make_judgement_page(judgement: Judgement) -> Document:
    """Lay a judgement out: the outcome, a table of verdicts, the remarks."""
    # Verdicts are counted with the gravest first.
    statuses = [verdict.status for verdict in judgement.verdicts]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in GRAVEST if s in statuses)
    if judgement.exit_code:
        outcome = Banner(f"FAILED (exit code {judgement.exit_code}): {counts}", "broken")
    else:
        state: State = "open" if UNPROVEN.intersection(statuses) else "kept"
        outcome = Banner(f"PASSED: {counts}", state)
    notes = tuple(Note(level="info", code="note", text=text) for text in judgement.notes)
    warnings = (Note(level="warning", code="spoils", text=text) for text in judgement.warnings)
    remarks: list[Block] = [Notes(notes)] if notes else []
    verdicts = (_tabulate(judgement), Paragraph(PAIRED), *remarks)
    file = f" ({judgement.baseline_file})" if judgement.baseline_file else ""
    strict = ", and rules that are not proven fail" if judgement.strict else ""
    ending = "failed" if judgement.exit_code else "passed"
    return Document(
        title=f"lipaudit gate {ending}: {judgement.current} against {judgement.baseline}",
        outcome=outcome,
        facts=(
            ("current", judgement.current),
            ("baseline", judgement.baseline + file),
            ("confidence", f"{1 - judgement.alpha:.4g} over all rules together{strict}"),
        ),
        findings=tuple(_list_findings(judgement)),
        notes=tuple(warnings),
        chapters=(Chapter("verdicts", "What is the verdict on each rule?", verdicts),),
    )


def _list_findings(judgement: Judgement) -> Iterator[tuple[str, str]]:
    """Yield the failing verdicts, then the inconclusive ones; at most the first few."""
    groups = (_sort_verdicts(judgement, group[1]) for group in group_by_rule(judgement))
    verdicts = [verdict for group in groups for verdict in group]
    telling = [v for v in verdicts if judgement.fails(v)]
    telling += [v for v in verdicts if v.status == "inconclusive" and not judgement.fails(v)]
    for verdict in telling[:MOST]:
        names = ((name[:CHARACTERS], judgement.places.get(name)) for name in verdict.moved)
        moved = ", ".join(f"{name} ({place})" if place else name for name, place in names)
        changed = f"; samples that changed most: {moved}" if moved else ""
        yield f"{verdict.line}{changed}", "verdicts"
    if len(telling) > MOST:
        yield f"and {len(telling) - MOST} more", "verdicts"


def _sort_verdicts(judgement: Judgement, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
    """Sort many verdicts on one rule: failing ones first, then by the size of the change."""
    if len(verdicts) <= MOST:
        return verdicts
    # For an upper limit the largest excess comes first, for a lower one the largest shortfall.
    sign = -1 if ">=" in verdicts[0].rule else 1

    def worse(verdict: Verdict) -> tuple[bool, float]:
        values = (verdict.paired, verdict.change, verdict.new)
        known = [] if verdict.reason else [each for each in values if each is not None]
        return judgement.fails(verdict), sign * known[0] if known else math.inf

    return sorted(verdicts, key=worse, reverse=True)


def _choose_mark(judgement: Judgement, verdict: Verdict) -> str:
    return "✗" if judgement.fails(verdict) else MARKS.get(verdict.status, "~")


def _tabulate(judgement: Judgement) -> Table:
    """Tabulate the verdicts, failing ones first, then the gravest; plain passes are counted."""
    groups = [*group_by_rule(judgement)]
    verdicts = [verdict for _, _, listed, _ in groups for verdict in listed]
    verdicts.sort(key=lambda v: (not judgement.fails(v), GRAVEST.index(v.status)))
    rows = [
        (f"{_choose_mark(judgement, v)} {v.status}", v.rule, v.reason or v.name, *v.texts.values())
        for v in verdicts
    ]
    for rule, _, listed, others in groups:
        more, blank = "more " * bool(listed), ("",) * (len(COLUMNS) - 3)
        rows += [(status, rule, f"{n} {more}rows", *blank) for status, n in others.items()]
    columns = (Column(label=name, meaning="", format=how) for name, how in COLUMNS.items())
    return Table("", tuple(columns), tuple(rows))
