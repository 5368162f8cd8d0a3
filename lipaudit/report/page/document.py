"""One page out of one report, or out of several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.report.blocks import Block, Chapter, Document, Paragraph, Scorecard, Table
from lipaudit.report.cells import STATUS, pretty
from lipaudit.report.glossary import ATTACKS, NORMS, WORDS
from lipaudit.report.page.diagnosis import diagnosis
from lipaudit.report.page.facts import facts, versions
from lipaudit.report.page.ranking import scorecards
from lipaudit.report.page.remarks import lack, leading, merged, of_all
from lipaudit.report.page.samples import ranked, shown
from lipaudit.report.page.scorecard import scorecard
from lipaudit.report.page.steps import steps
from lipaudit.report.page.views import blocks, listed, side_by_side, title
from lipaudit.report.page.views.common import places
from lipaudit.results import Column, Report, Section, model_labels
from lipaudit.results.summary import summary

BRIEF = ("model", "data", "run")
"""The facts that a screen has room for."""
MORE = "--details prints all sections; lipaudit explain WORD says what a word means."
LEGEND = " ".join(f"{name.capitalize()}: {meaning}." for name, meaning in STATUS.items())
EXPLAIN = "lipaudit explain WORD says what a word of this page means."


def document(*reports: Report, lead: Sequence[Chapter] = ()) -> Document:
    """Lay out a report; several reports are set side by side, below the chapters that lead."""
    return _single(reports[0]) if len(reports) == 1 else _several(reports, lead)


def screen(report: Report) -> Document:
    """Lay out what fits a screen: what was audited, warnings, the scorecard, what stands out."""
    page = _opening(report)
    known = dict(page.facts)
    known["run"] = f"{known['status']}; {known['run']}"
    return replace(
        page,
        facts=tuple((name, known[name]) for name in BRIEF),
        findings=tuple((text, "") for text, _ in page.findings),
        more=MORE,
    )


def card(report: Report) -> Document:
    """Lay out what `print(report)` shows: what was audited and the scorecard, without commands."""
    page, figures = screen(report), scorecard(report, short=True)
    warnings = sum(note.level == "warning" for note in page.notes)
    whole = "lipaudit.render(report, 'table') has all sections."
    return replace(
        page,
        notes=(),
        scorecard=figures and Scorecard(tuple(replace(f, command="") for f in figures.lines)),
        findings=(),
        more=f"Warnings: {warnings}. {whole}" if warnings else whole,
    )


def screen_of_several(reports: Sequence[Report], lead: Chapter) -> Document:
    """Lay out what fits a screen of several reports: the samples, warnings, one chapter."""
    data = dict.fromkeys(f"{r.run.data.samples} samples of {r.run.data.spec}" for r in reports)
    return replace(
        _opening_of_several(reports),
        facts=(("data", "; ".join(data)),),
        chapters=(lead,),
        more=MORE,
    )


def _opening(report: Report) -> Document:
    """Lay out what stands above the sections."""
    card = scorecard(report)
    return Document(
        title=f"lipaudit: {report.run.model.spec}",
        facts=facts(report),
        findings=tuple((finding.text, finding.source) for finding in diagnosis(report)),
        chapters=(),
        partial=lack(report),
        notes=leading(report),
        scorecard=card,
        steps=steps(report, card),
    )


def _single(report: Report) -> Document:
    run, said, known = report.run, of_all(report), places(report)
    preprocess = "; ".join(f"{name} {listed(value)}" for name, value in run.preprocess.items())
    last: tuple[Block, ...] = (
        *_words(report),
        Paragraph(f"{LEGEND} {EXPLAIN}"),
        *([Paragraph(f"Preprocessing: {preprocess}.")] if preprocess else []),
        Paragraph(f"{versions(report)}."),
    )
    chapters = (
        *(
            Chapter(s.measure, title(s.measure), blocks(s, said, known, _settings(report, s)))
            for s in report.sections
        ),
        *([Chapter("worst", "Samples", shown(report))] if ranked(report) else []),
        Chapter("reading", "How to read the figures", last),
    )
    return replace(_opening(report), chapters=chapters)


def _words(report: Report) -> Iterator[Block]:
    """Explain the words of the scorecard: its figures, and the norms and attacks they name."""
    card, accuracy = scorecard(report), summary(report).accuracy
    known = {**ATTACKS, **NORMS, **WORDS}
    words = [line.label.partition(",")[0] for line in (card.lines if card else ())]
    words += [each.norm for each in accuracy] + [a for each in accuracy for a in each.attacks]
    for word in dict.fromkeys(words):
        if word in known:
            yield Paragraph(pretty(f"{word[0].upper()}{word[1:]}: {known[word]}"))


def _settings(report: Report, section: Section) -> Mapping[str, Any]:
    """Return the settings of a section; none where it is part of one that ran with the same."""
    whole = report.section(section.measure.partition(".")[0])
    if whole is None or whole is section or whole.settings != section.settings:
        return section.settings
    return {}


def _several(reports: Sequence[Report], lead: Sequence[Chapter]) -> Document:
    names = model_labels(reports)
    measures = dict.fromkeys(s.measure for report in reports for s in report.sections)
    chapters = []
    for measure in measures:
        sections = {
            name: section
            for name, report in zip(names, reports, strict=True)
            if (section := report.section(measure)) is not None
        }
        chapters.append(Chapter(measure, title(measure), side_by_side(sections)))
    cards = Chapter("scorecards", "Scorecards", (scorecards(names, reports),))
    return replace(
        _opening_of_several(reports),
        chapters=(
            *lead,
            cards,
            *chapters,
            Chapter("models", "Models", (_models(names, reports),)),
            Chapter("reading", "How to read the figures", (Paragraph(f"{LEGEND} {EXPLAIN}"),)),
        ),
    )


def _opening_of_several(reports: Sequence[Report]) -> Document:
    """Lay out what stands above the chapters: what is missing, and all that is warned of."""
    named = list(zip(model_labels(reports), reports, strict=True))
    lacks = [f"{name}: {missing}" for name, report in named if (missing := lack(report))]
    return Document(
        title=f"lipaudit: {len(reports)} models side by side",
        facts=_alike(reports),
        findings=(),
        chapters=(),
        partial=" ".join(lacks),
        notes=merged(
            note.model_copy(update={"text": f"{name}: {note.text}"})
            for name, report in named
            for note in leading(report)
            if note.level == "warning"
        ),
    )


def _alike(reports: Sequence[Report]) -> tuple[tuple[str, str], ...]:
    """Return the facts that hold for all reports."""
    first, *others = (facts(report) for report in reports)
    return tuple(fact for fact in first if all(fact in each for each in others))


def _models(names: Sequence[str], reports: Sequence[Report]) -> Block:
    columns, alike = ("fact", *names), _alike(reports)
    known = [dict(fact for fact in facts(report) if fact not in alike) for report in reports]
    keys = dict.fromkeys(name for each in known for name in each)
    return Table(
        title="What was audited",
        columns=tuple(Column(label=name, meaning="", format="s") for name in columns),
        rows=tuple((key, *(each.get(key) for each in known)) for key in keys),
    )
