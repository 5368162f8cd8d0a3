"""A judgement of the gate: as lines, as a page, and in brief."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from lipaudit.gate.rules import parse_rule
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
from lipaudit.tables import Column, Note

MARKS = {"improved": "✓", "pass": "✓", "unchanged": "="}
GRAVEST: tuple[VerdictStatus, ...] = get_args(VerdictStatus)[::-1]
"""Verdicts, the most severe first."""
FEW = 6
"""Rules with at most this many rows are listed row by row."""
MOST = 8
"""Largest number of verdicts listed per rule and above the table."""
COLUMNS = {
    "verdict": "s",
    "rule": "s",
    "row": "s",
    "baseline": "",
    "current": "",
    "change": "",
    "paired": "",
    "limits": "s",
    "samples": "",
}
"""Columns of the table: `s` is text, aligned left; others are aligned right."""
PAIRED = (
    "Change: of the two values shown. Paired: the tested change, each sample against itself, "
    "with its limits."
)


@dataclass(frozen=True)
class RuleVerdicts:
    """The verdicts on one rule.

    Attributes:
        rule: the rule as the user wrote it.
        verdicts: all verdicts.
        written: the verdicts to list: all if they are few, else those that do not simply pass.
        others: number of further verdicts, by status.
    """

    rule: str
    verdicts: tuple[Verdict, ...]
    written: tuple[Verdict, ...]
    others: Counter[str]


def group_by_rule(judgement: Judgement) -> Iterator[RuleVerdicts]:
    """Yield the verdicts on each rule."""
    rules: dict[str, list[Verdict]] = {}
    for verdict in judgement.verdicts:
        rules.setdefault(verdict.rule, []).append(verdict)
    for rule, verdicts in rules.items():
        written = [
            v
            for v in verdicts
            if len(verdicts) <= FEW or judgement.fails(v) or v.status not in ("pass", "unchanged")
        ]
        others = Counter[str](v.status for v in verdicts if v not in written)
        yield RuleVerdicts(rule, tuple(verdicts), tuple(written), others)


def list_lines(judgement: Judgement) -> list[str]:
    """Write a judgement line by line, the outcome last."""
    lines = [f"{judgement.current} against {judgement.baseline}", ""]
    lines += [f"! warning: {text}" for text in judgement.warnings]
    for group in group_by_rule(judgement):
        first = _sort_verdicts(judgement, group.written)[:MOST]
        lines += [f"{_choose_mark(judgement, verdict)} {verdict.line}" for verdict in first]
        cut = Counter[str](v.status for v in group.written if v not in first)
        for status, count in (cut + group.others).items():
            listed = "; -f table lists them" if status in cut else ""
            lines.append(f"  {group.rule}: {count} {'more ' * bool(first)}rows {status}{listed}")
    lines += [f"  shown, never failing: {_write_figures(verdict)}" for verdict in judgement.shown]
    lines += [f"  note: {note}" for note in judgement.notes]
    return [*lines, "", f"{judgement.reason} (exit code {judgement.exit_code})"]


def make_judgement_page(judgement: Judgement) -> Document:
    """Lay a judgement out: the outcome, a table of verdicts, the remarks."""
    texts = [*map(_write_figures, judgement.shown), *judgement.notes]
    notes = tuple(Note(level="info", code="note", text=text) for text in texts)
    remarks: list[Block] = [Notes(notes)] if notes else []
    verdicts = (_tabulate(judgement), Paragraph(PAIRED), *remarks)
    file = f" ({judgement.baseline_file})" if judgement.baseline_file else ""
    strict = ", and rules that are not proven fail" if judgement.strict else ""
    ending = "passed" if judgement.exit_code == 0 else "failed"
    return Document(
        title=f"lipaudit gate {ending}: {judgement.current} against {judgement.baseline}",
        outcome=_find_outcome(judgement),
        facts=(
            ("current", judgement.current),
            ("baseline", judgement.baseline + file),
            ("confidence", f"{1 - judgement.alpha:.4g} over all rules together{strict}"),
        ),
        findings=tuple(_list_findings(judgement)),
        notes=tuple(
            Note(level="warning", code="spoils", text=text) for text in judgement.warnings
        ),
        chapters=(Chapter("verdicts", "What is the verdict on each rule?", verdicts),),
    )


def _find_outcome(judgement: Judgement) -> Banner:
    """Count the verdicts, the gravest first."""
    statuses = [verdict.status for verdict in judgement.verdicts]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in GRAVEST if s in statuses)
    if judgement.exit_code:
        return Banner(f"FAILED (exit code {judgement.exit_code}): {counts}", "broken")
    return Banner(f"PASSED: {counts}", "open" if UNPROVEN.intersection(statuses) else "kept")


def _list_findings(judgement: Judgement) -> Iterator[tuple[str, str]]:
    """Yield the failing verdicts, then the inconclusive ones; at most the first few."""
    groups = [_sort_verdicts(judgement, group.verdicts) for group in group_by_rule(judgement)]
    telling = [v for verdicts in groups for v in verdicts if judgement.fails(v)]
    telling += [
        v
        for verdicts in groups
        for v in verdicts
        if v.status == "inconclusive" and v not in telling
    ]
    for verdict in telling[:MOST]:
        yield f"{verdict.line}{_name_moved(judgement, verdict)}", "verdicts"
    if len(telling) > MOST:
        yield f"and {len(telling) - MOST} more", "verdicts"


def _name_moved(judgement: Judgement, verdict: Verdict) -> str:
    """Name the samples that changed most, with their places."""
    names = ((name[:CHARACTERS], judgement.places.get(name)) for name in verdict.moved)
    named = ", ".join(f"{name} ({place})" if place else name for name, place in names)
    return f"; samples that changed most: {named}" if named else ""


def _sort_verdicts(judgement: Judgement, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
    """Sort many verdicts on one rule: failing ones first, then by the size of the change."""
    if len(verdicts) <= MOST:
        return verdicts
    # For an upper limit the largest excess comes first, for a lower one the largest shortfall.
    sign = 1 if parse_rule(verdicts[0].rule, trusted=True).op == "<=" else -1

    def worse(verdict: Verdict) -> tuple[bool, float]:
        values = (verdict.paired, verdict.change, verdict.new)
        known = [] if verdict.reason else [each for each in values if each is not None]
        return judgement.fails(verdict), sign * known[0] if known else math.inf

    return sorted(verdicts, key=worse, reverse=True)


def _choose_mark(judgement: Judgement, verdict: Verdict) -> str:
    return "✗" if judgement.fails(verdict) else MARKS.get(verdict.status, "~")


def _write_figures(verdict: Verdict) -> str:
    texts = verdict.texts
    chance = "" if verdict.mcnemar is None else f", exact McNemar p = {verdict.mcnemar:.3g}"
    values = f"{texts['baseline']} -> {texts['current']}"
    return f"{verdict.metric}: {values} ({texts['change']}{chance})"


def _tabulate(judgement: Judgement) -> Table:
    """Tabulate the verdicts, failing ones first, then the gravest; plain passes are counted."""
    groups = [*group_by_rule(judgement)]
    written = [verdict for group in groups for verdict in group.written]
    written.sort(key=lambda v: (not judgement.fails(v), GRAVEST.index(v.status)))
    rows = [
        (f"{_choose_mark(judgement, v)} {v.status}", v.rule, v.reason or v.name, *v.texts.values())
        for v in written
    ]
    for group in groups:
        more, blank = "more " * bool(group.written), ("",) * (len(COLUMNS) - 3)
        rows += [(s, group.rule, f"{n} {more}rows", *blank) for s, n in group.others.items()]
    columns = (Column(label=name, meaning="", format=how) for name, how in COLUMNS.items())
    return Table("", tuple(columns), tuple(rows))
