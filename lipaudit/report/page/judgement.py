"""A judgement of the gate: line by line, and as a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from lipaudit.gate.rules import parse_rule
from lipaudit.gate.verdicts import UNPROVEN, Judgement, Verdict, VerdictStatus
from lipaudit.report.blocks import (
    Block,
    Brief,
    Chapter,
    Document,
    Notes,
    Outcome,
    Paragraph,
    Table,
)
from lipaudit.report.page.margins import margins
from lipaudit.report.page.views.common import CHARACTERS
from lipaudit.results import Column, Note

MARKS = {"improved": "✓", "pass": "✓", "unchanged": "="}
GRAVEST: tuple[VerdictStatus, ...] = get_args(VerdictStatus)[::-1]
"""Verdicts, what fails first."""
FEW = 6
"""Rows of one rule that are written out when none of them stands out."""
TOLD = 8
"""How many verdicts are told in full: of each rule line by line, and above the table."""
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
"""Columns of the table: `s` is text, set to the left; what is empty is set to the right."""
PAIRED = (
    "Change: of the two figures. Paired: what was tested, each sample against itself; limits are "
    "of it."
)


@dataclass(frozen=True)
class Judged:
    """The verdicts on one rule.

    Attributes:
        rule: as it was written.
        verdicts: all of them.
        written: what is written out: all when they are few, else those that are no plain pass.
        rest: how many others there are, by status.
    """

    rule: str
    verdicts: tuple[Verdict, ...]
    written: tuple[Verdict, ...]
    rest: Counter[str]


def lines(judgement: Judgement) -> list[str]:
    """Write a judgement line by line, the outcome last."""
    written = [f"{judgement.current} against {judgement.baseline}", ""]
    written += [f"! warning: {text}" for text in judgement.warnings]
    for judged in _by_rule(judgement):
        told = _worst_first(judgement, judged.written)[:TOLD]
        written += [f"{_mark(judgement, verdict)} {verdict.line}" for verdict in told]
        untold = Counter[str](v.status for v in judged.written if v not in told)
        more = "more " if told else ""
        listed = "; -f table lists them" if untold else ""
        rest = (untold + judged.rest).items()
        written += [
            f"  {judged.rule}: {count} {more}rows {status}{listed if status in untold else ''}"
            for status, count in rest
        ]
    written += [f"  shown, never failing: {_figures(verdict)}" for verdict in judgement.shown]
    written += [f"  note: {note}" for note in judgement.notes]
    return [*written, "", _reason(judgement)]


def page(judgement: Judgement) -> Document:
    """Lay a judgement out: the outcome, a table of verdicts, the remarks."""
    shown = [Note(level="info", code="never-fails", text=_figures(v)) for v in judgement.shown]
    pictures = margins([judged.verdicts for judged in _by_rule(judgement)])
    notes = [Note(level="info", code="note", text=text) for text in judgement.notes]
    remarks: list[Block] = [Notes((*shown, *notes))] if shown or notes else []
    return Document(
        title=_title(judgement),
        outcome=_outcome(judgement),
        facts=tuple(_facts(judgement)),
        findings=tuple(_findings(judgement)),
        notes=tuple(
            Note(level="warning", code="spoils", text=text) for text in judgement.warnings
        ),
        chapters=(
            *([Chapter("margins", "Changes and what is allowed", pictures)] if pictures else []),
            Chapter("verdicts", "Verdicts", (_table(judgement), Paragraph(PAIRED), *remarks)),
        ),
    )


def _outcome(judgement: Judgement) -> Outcome:
    """Count the verdicts, the gravest first."""
    statuses = [verdict.status for verdict in judgement.verdicts]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in GRAVEST if s in statuses)
    if judgement.exit_code:
        return Outcome(f"FAILED (exit code {judgement.exit_code}): {counts}", "broken")
    return Outcome(f"PASSED: {counts}", "open" if UNPROVEN.intersection(statuses) else "kept")


def _facts(judgement: Judgement) -> Iterator[tuple[str, str]]:
    file = f" ({judgement.baseline_file})" if judgement.baseline_file else ""
    yield "current", judgement.current
    yield "baseline", judgement.baseline + file
    strict = ", and what is not proven fails" if judgement.strict else ""
    yield "confidence", f"{1 - judgement.alpha:.4g} over all rules together{strict}"


def _findings(judgement: Judgement) -> Iterator[tuple[str, str]]:
    """Say what fails, then what is open, the first of them in full."""
    verdicts = [
        v for judged in _by_rule(judgement) for v in _worst_first(judgement, judged.verdicts)
    ]
    telling = [v for v in verdicts if judgement.fails(v)]
    telling += [v for v in verdicts if v.status == "inconclusive" and v not in telling]
    for verdict in telling[:TOLD]:
        yield f"{verdict.line}{_moved(judgement, verdict)}", "verdicts"
    if len(telling) > TOLD:
        yield f"and {len(telling) - TOLD} more", "verdicts"


def _moved(judgement: Judgement, verdict: Verdict) -> str:
    """Name the samples that changed most, and where they are found."""
    places = {name: f" ({place})" for name, place in judgement.places.items()}
    named = ", ".join(name[:CHARACTERS] + places.get(name, "") for name in verdict.moved)
    return f"; samples that changed most: {named}" if named else ""


def brief(judgement: Judgement) -> Brief:
    """Return the outcome for a pull request: what fails first, and of that the gravest."""
    written = [v for judged in _by_rule(judgement) for v in judged.written]
    written.sort(key=lambda v: (not judgement.fails(v), GRAVEST.index(v.status)))
    return Brief(
        title=_title(judgement),
        remarks=(_reason(judgement), *(f"warning: {text}" for text in judgement.warnings)),
        heads=("verdict", "rule", "row", "baseline", "current", "change", "paired, limits"),
        rows=tuple((*_named(judgement, verdict), *_briefly(verdict)) for verdict in written),
        align="lllrrrr",
    )


def _briefly(verdict: Verdict) -> tuple[str, ...]:
    """Return the figures, their change, and the change that was tested with its limits."""
    texts = verdict.texts
    limits = f" ({texts['limits']})" if texts["limits"] else ""
    first = (texts[name] for name in ("baseline", "current", "change"))
    return (*first, f"{texts['paired']}{limits}")


def _title(judgement: Judgement) -> str:
    outcome = "passed" if judgement.exit_code == 0 else "failed"
    return f"lipaudit gate {outcome}: {judgement.current} against {judgement.baseline}"


def _reason(judgement: Judgement) -> str:
    return f"{judgement.reason} (exit code {judgement.exit_code})"


def _named(judgement: Judgement, verdict: Verdict) -> tuple[str, str, str]:
    said = f"{_mark(judgement, verdict)} {verdict.status}"
    return said, verdict.rule, verdict.reason or verdict.name


def _by_rule(judgement: Judgement) -> Iterator[Judged]:
    rules: dict[str, list[Verdict]] = {}
    for verdict in judgement.verdicts:
        rules.setdefault(verdict.rule, []).append(verdict)
    for rule, verdicts in rules.items():
        telling = [v for v in verdicts if len(verdicts) <= FEW or _stands_out(judgement, v)]
        rest = Counter[str](v.status for v in verdicts if v not in telling)
        yield Judged(rule, tuple(verdicts), tuple(telling), rest)


def _worst_first(judgement: Judgement, verdicts: Sequence[Verdict]) -> Sequence[Verdict]:
    """Sort the verdicts on one rule, where there are many: what fails, by how much is worse."""
    if len(verdicts) <= TOLD:
        return verdicts
    sign = 1 if parse_rule(verdicts[0].rule).op == "<=" else -1

    def worse(verdict: Verdict) -> tuple[bool, float]:
        values = (verdict.paired, verdict.change, verdict.new)
        known = [] if verdict.reason else [each for each in values if each is not None]
        return judgement.fails(verdict), sign * known[0] if known else math.inf

    return sorted(verdicts, key=worse, reverse=True)


def _stands_out(judgement: Judgement, verdict: Verdict) -> bool:
    return judgement.fails(verdict) or verdict.status not in {"pass", "unchanged"}


def _mark(judgement: Judgement, verdict: Verdict) -> str:
    return "✗" if judgement.fails(verdict) else MARKS.get(verdict.status, "~")


def _figures(verdict: Verdict) -> str:
    texts = verdict.texts
    chance = "" if verdict.mcnemar is None else f", exact McNemar p = {verdict.mcnemar:.3g}"
    values = f"{texts['baseline']} -> {texts['current']}"
    return f"{verdict.metric}: {values} ({texts['change']}{chance})"


def _table(judgement: Judgement) -> Table:
    rows: list[tuple[str, ...]] = []
    for judged in _by_rule(judgement):
        rows += [_row(judgement, verdict) for verdict in judged.written]
        more = "more " if judged.written else ""
        blank = ("",) * (len(COLUMNS) - 3)
        rows += [(s, judged.rule, f"{n} {more}rows", *blank) for s, n in judged.rest.items()]
    columns = (Column(label=name, meaning="", format=how) for name, how in COLUMNS.items())
    return Table("", tuple(columns), tuple(rows))


def _row(judgement: Judgement, verdict: Verdict) -> tuple[str, ...]:
    return (*_named(judgement, verdict), *verdict.texts.values())
