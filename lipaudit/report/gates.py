"""The verdicts of the gate: lines of a log, and a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import get_args

from lipaudit.errors import join_few
from lipaudit.gate.verdicts import Judgement, Verdict, VerdictStatus
from lipaudit.report.blocks import (
    Block,
    Cells,
    Chapter,
    Document,
    Paragraph,
    Points,
    Tone,
    list_steps,
)
from lipaudit.report.cells import pick_columns
from lipaudit.report.changes import GREY, PAIRED_NOTE, count_samples, draw_changes
from lipaudit.report.groups import write_movement
from lipaudit.report.opening import open_page
from lipaudit.report.rows import read_change, read_verdict, tabulate_rows, write_arrows
from lipaudit.report.steps import suggest_after_judgement
from lipaudit.tables import Note, Report
from lipaudit.tables.columns import group_values
from lipaudit.tables.formats import format_count

MARKS = {"improved": "✓", "pass (proven)": "✓", "pass": "·", "unchanged": "="}
"""Marks of statuses. A pass without proof gets no tick; `_choose_mark` has the exceptions."""
GRAVEST: tuple[VerdictStatus, ...] = get_args(VerdictStatus)[::-1]
"""Verdicts, the most severe first."""
ALONE = 6
"""Rules with at most this many rows are listed row by row."""
MOST = 8
"""Largest number of verdicts listed line by line for a rule."""
PASSED = ("pass (proven)", "pass", "unchanged")
TEXTS = pick_columns(
    "baseline",
    "current",
    paired="paired change",
    limits="limits",
    rule="rule",
    samples="samples",
    samples_needed="samples needed",
    change="change",
)
VERDICTS = pick_columns("verdict", "figure") | TEXTS
IN_GATE = {1: "regressed", 2: "improved", GREY: "neither"}
"""What a picture calls the verdicts on changes, by colour: like the table below it."""


RuleVerdicts = tuple[str, list[Verdict], list[Verdict]]
"""A rule, its verdicts to list one by one, and its verdicts to sum up by status."""


def write_verdicts(judgement: Judgement) -> list[str]:
    """Write a judgement line by line: the answer first, the outcome with its counts last."""
    lines = [judgement.reason, f"{judgement.current} against {judgement.baseline}", ""]
    lines += (f"! warning: {text}" for text in judgement.warnings)

    def rank(group: RuleVerdicts) -> int:
        # The sort key of a rule: 0 if it fails, 1 if it is not proven, 2 if it passes.
        _, listed, _ = group
        return min((rank_verdict(judgement, verdict) for verdict in listed), default=2)

    # For each rule, verdicts to list one by one, and verdicts that pass, which are only counted.
    for rule, listed, passed in sorted(_group_verdicts(judgement), key=rank):
        for verdict in listed[:MOST]:
            mark = _choose_mark(judgement, verdict)
            lines.append(f"{mark} {verdict.line}")
        # A log has at most MOST lines for a rule. The verdicts beyond them are counted like those
        # that pass, but the table (-f table) lists them.
        hidden = listed[MOST:]
        cut = {verdict.status for verdict in hidden}
        counts = Counter(verdict.status for verdict in hidden + passed)
        more = "more " if listed else ""
        for status, count in counts.items():
            line = f"  {rule}: {format_count(count, more + 'row')} {status}"
            if status in cut:
                line += "; -f table lists them"
            lines.append(line)
    if judgement.predictions is not None:
        lines.append(f"  {write_movement(judgement.predictions)}")
    lines += (f"  note: {note}" for note in judgement.notes)
    return [*lines, "", f"{judgement.summary} (exit code {judgement.exit_code})"]


def rank_verdict(judgement: Judgement, verdict: Verdict) -> int:
    """Return 0 for a verdict that fails, 1 for an inconclusive verdict, 2 for all others."""
    if judgement.fails(verdict):
        return 0
    return 1 if verdict.status == "inconclusive" else 2


def make_judgement_page(
    judgement: Judgement, reports: Sequence[Report], files: Sequence[str]
) -> Document:
    """Return the page of a judgement of the gate: the answer, next steps and the verdicts.

    Args:
        judgement: the judgement.
        reports: the reports of the baseline and of the current model; empty if unknown.
        files: the files of these reports, for commands; empty if unknown.
    """
    ending, undecided, tone = _describe_ending(judgement)
    # The reason begins with the outcome: "pass: ...", "not proven: ..." or "worse: ...". The first
    # two repeat `ending`, with which the answer begins.
    reason = write_arrows(judgement.reason).removeprefix("not proven: ").removeprefix("pass: ")
    answer = f"{ending.upper()} (exit code {judgement.exit_code}){undecided}: {reason}."
    if judgement.outcome != "pass":
        answer += f" Verdicts: {judgement.counts}."
    confidence = f"{100 * (1 - judgement.alpha):.4g}%"
    facts = (
        ("current", judgement.current),
        ("baseline", f"{judgement.baseline} ({judgement.baseline_file})".removesuffix(" ()")),
        ("confidence", confidence),
    )
    warnings = [Note.warn(code="differs", text=warning) for warning in judgement.warnings]
    opening = open_page(answer=Paragraph(answer, tone=tone), facts=facts, notes=warnings)
    explanation = Paragraph(_explain_confidence(judgement, confidence))
    contents = [*_show_verdicts(judgement), explanation]
    verdicts = Chapter("verdicts", "What is the verdict on each rule?", contents)
    steps = list_steps(suggest_after_judgement(judgement, reports, files))
    title = f"lipaudit gate {ending}{undecided}: {judgement.current} against {judgement.baseline}"
    return Document(title, (opening, *steps, verdicts))


def _explain_confidence(judgement: Judgement, confidence: str) -> str:
    """Say for what the confidence of verdicts and of limits holds, and what --strict means.

    Args:
        judgement: the judgement of the gate.
        confidence: the confidence in percent, such as "95%".
    """
    text = (
        f"Verdicts: {confidence} confidence over all rules together. Limits: {confidence} "
        f"confidence for each figure alone{count_samples(judgement.verdicts)}."
    )
    if judgement.strict:
        text += " Rules that are not proven fail (--strict)."
    return text


def _describe_ending(judgement: Judgement) -> tuple[str, str, Tone]:
    """Return how the gate ended, how many figures are undecided, and the tone of the answer.

    The second text is empty, or such as ", 2 of 5 figures undecided". The tone is the colour of
    the answer on the page: good ("kept"), undecided ("open") or bad ("broken").
    """
    if judgement.exit_code:
        return "failed", "", "broken"
    undecided = sum(verdict.status == "inconclusive" for verdict in judgement.verdicts)
    if undecided:
        text = f", {undecided} of {format_count(len(judgement.verdicts), 'figure')} undecided"
        return "CI passes", text, "open"
    if all(verdict.proven for verdict in judgement.verdicts):
        return "passed", "", "kept"
    return "passed", "", "open"  # some rules pass without proof


def _group_verdicts(judgement: Judgement) -> Iterator[RuleVerdicts]:
    """Yield each rule of the gate, its verdicts to list, and its verdicts to sum up.

    A rule with at most ALONE verdicts lists all of them. A rule with more verdicts sums up the
    verdicts that pass and lists only the rest; if many are left, the worst verdict first.
    """
    rules = group_values((verdict.rule, verdict) for verdict in judgement.verdicts)
    for rule, verdicts in rules.items():
        listed = []
        passed = []
        for verdict in verdicts:
            # Under --strict, a verdict of status `pass` fails if it is not proven.
            passes = verdict.status in PASSED and not judgement.fails(verdict)
            if passes and len(verdicts) > ALONE:
                passed.append(verdict)
            else:
                listed.append(verdict)
        if len(listed) > ALONE:  # shorter lists keep the order of the verdicts
            listed.sort(key=partial(_put_worst_first, judgement))
        yield rule, listed, passed


def _put_worst_first(judgement: Judgement, verdict: Verdict) -> tuple[bool, float]:
    """Return the sort key that puts failing verdicts of a rule first, then the worst values.

    Under an upper limit (`<=`), the largest value is the worst; under a lower limit (`>=`), the
    smallest. A figure that cannot be compared (its verdict has a reason) comes before all values.
    """
    value = read_change(verdict)
    if value is None:  # the limit is on the figure itself, not on its change
        value = verdict.new
    badness = math.inf
    if value is not None and not verdict.reason:
        badness = -value if ">=" in verdict.rule else value
    return not judgement.fails(verdict), -badness


def _choose_mark(judgement: Judgement, verdict: Verdict) -> str:
    """Return the mark in front of a verdict.

    ✗: it fails. ✓: an improvement, or a pass that needs no more proof. ·: a pass without proof.
    =: unchanged. ~: any other status, such as inconclusive.
    """
    if judgement.fails(verdict):
        return "✗"
    # Two kinds of verdict have the status `pass`. A rule on a change, such as at most +10%, whose
    # test did not prove it: MARKS has a dot. A limit on the figure itself, such as a norm of at
    # most 3: nothing is tested, so no proof is missing (`proven` is true), and it gets a tick.
    if verdict.status == "pass" and verdict.proven:
        return "✓"
    return MARKS.get(verdict.status, "~")


def _show_verdicts(judgement: Judgement) -> list[Block]:
    """Return a picture of the changes, a table of all verdicts (the worst first), and remarks."""
    # For each rule, verdicts to list one by one, and verdicts that pass, to sum up in one row.
    groups = [*_group_verdicts(judgement)]
    verdicts = []
    for _, listed, _ in groups:
        verdicts += listed
    verdicts.sort(key=lambda v: (rank_verdict(judgement, v), GRAVEST.index(v.status)))
    rows = list[Cells]()
    for verdict in verdicts:
        row = read_verdict(verdict)
        row["verdict"] = f"{_choose_mark(judgement, verdict)} {verdict.status}"
        row["figure"] = verdict.reason or verdict.subject
        rows.append(row)
    for rule, _, passed in groups:
        rows += _sum_up(rule, passed)
    parts: list[Block] = [*draw_changes(((v.subject, v) for v in verdicts), words=IN_GATE)]
    if parts:
        parts.insert(0, Paragraph(PAIRED_NOTE))
    return [*parts, *tabulate_rows(VERDICTS, rows), *_list_remarks(judgement, verdicts)]


def _sum_up(rule: str, verdicts: Iterable[Verdict]) -> Iterator[Cells]:
    """Yield a table row for each status of a rule's verdicts, with the names of their figures.

    Args:
        rule: the rule.
        verdicts: its verdicts, all of a status that passes.
    """
    for status, names in group_values((v.status, v.row) for v in verdicts).items():
        yield dict.fromkeys(TEXTS, "") | {  # all other cells are blank
            "verdict": f"{MARKS[status]} {status}",
            "rule": rule,
            "figure": f"{format_count(len(names), 'row')}: {join_few(names, MOST)}",
        }


def _list_remarks(judgement: Judgement, verdicts: Iterable[Verdict]) -> Iterator[Points]:
    """Yield a list: how predictions moved, remarks on verdicts, notes; nothing if all are empty.

    Args:
        judgement: the judgement of the gate.
        verdicts: the verdicts of the table above the list.
    """
    points = []  # (kind, text, command); none has a command
    if judgement.predictions is not None:
        points.append(("predictions", write_movement(judgement.predictions), ""))
    remarks = [f"{verdict.subject}: {verdict.remark}" for verdict in verdicts if verdict.remark]
    points += [("note", text, "") for text in (*remarks, *judgement.notes)]
    if points:
        yield Points(points)
