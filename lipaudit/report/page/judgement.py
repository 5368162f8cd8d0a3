"""A judgement of the gate: line by line, and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lipaudit.gate.verdicts import Judgement, Verdict
from lipaudit.report.blocks import Block, Brief, Chapter, Document, Notes, Paragraph, Table
from lipaudit.results import Column, Note

MARKS = {"improved": "✓", "pass": "✓", "unchanged": "="}
FEW = 6
"""Rows of one rule that are written out when none of them stands out."""
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
        written: what is written out: all when they are few, else those that are no plain pass.
        rest: how many others there are, by status.
    """

    rule: str
    written: tuple[Verdict, ...]
    rest: Counter[str]


def lines(judgement: Judgement) -> list[str]:
    """Write a judgement line by line, the outcome last."""
    written = [f"{judgement.current} against {judgement.baseline}", ""]
    written += [f"! warning: {text}" for text in judgement.warnings]
    for judged in _by_rule(judgement):
        written += [f"{_mark(judgement, verdict)} {verdict.line}" for verdict in judged.written]
        more = "more " if judged.written else ""
        rest = judged.rest.items()
        written += [f"  {judged.rule}: {count} {more}rows {status}" for status, count in rest]
    written += [f"  shown, never failing: {_figures(verdict)}" for verdict in judgement.shown]
    written += [f"  note: {note}" for note in judgement.notes]
    return [*written, "", _reason(judgement)]


def page(judgement: Judgement) -> Document:
    """Lay a judgement out: the outcome, a table of verdicts, the remarks."""
    shown = [Note(level="info", code="never-fails", text=_figures(v)) for v in judgement.shown]
    notes = [Note(level="info", code="note", text=text) for text in judgement.notes]
    remarks: list[Block] = [Notes((*shown, *notes))] if shown or notes else []
    return Document(
        title=_title(judgement),
        facts=(),
        findings=(),
        notes=tuple(
            Note(level="warning", code="spoils", text=text) for text in judgement.warnings
        ),
        chapters=(
            Chapter(
                "verdicts",
                "Verdicts",
                (Paragraph(_reason(judgement)), _table(judgement), Paragraph(PAIRED), *remarks),
            ),
        ),
    )


def brief(judgement: Judgement) -> Brief:
    """Return the outcome for a pull request: what fails first, then what is no plain pass."""
    written = [v for judged in _by_rule(judgement) for v in judged.written]
    written.sort(key=lambda v: (not judgement.fails(v), not _stands_out(judgement, v)))
    texts = ("baseline", "current", "change")
    return Brief(
        title=_title(judgement),
        remarks=(_reason(judgement), *(f"warning: {text}" for text in judgement.warnings)),
        heads=("verdict", "rule", "row", *texts),
        rows=tuple(
            (*_named(judgement, verdict), *(verdict.texts[name] for name in texts))
            for verdict in written
        ),
        align="lllrrr",
    )


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
        yield Judged(rule, tuple(telling), rest)


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
