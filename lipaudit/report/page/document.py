"""The page of one report, or of several side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from lipaudit.report.blocks import (
    Block,
    Card,
    Chapter,
    Document,
    Paragraph,
    Points,
    list_notes,
    make_table,
)
from lipaudit.report.cells import STATUS
from lipaudit.report.page.chapters import find_display, name_chapter, show_sections
from lipaudit.report.page.facts import (
    describe_gaps,
    format_setting,
    list_common_notes,
    list_facts,
    list_top_notes,
    open_page,
)
from lipaudit.report.page.rows import Sections
from lipaudit.report.page.samples import show_worst
from lipaudit.report.page.scorecard import make_scorecard, suggest_steps, write_answer
from lipaudit.tables import Column, Note, Report, Section, model_labels
from lipaudit.tables.worst import broken

SEED = "seed"
"""Name of the setting seed, which the page lists among the facts of the run."""
MORE = "--details prints all sections; lipaudit explain WORD says what a word means."
WORDS = Chapter(
    "words",
    "What do the words mean?",
    (
        Card(tuple(STATUS.items())),
        Paragraph("lipaudit explain WORD explains any word of this page."),
    ),
    folded=True,
)
"""The end of every page."""
OPEN = ("bounds", "jacobian", "attack", "certify")
"""Chapters of an audit that are not folded."""
SHORT = ("model", "data", "run", "reason")
"""Facts on one screen."""


def make_page(report: Report) -> Document:
    """Return the page of a report."""
    facts = list_facts(report).items()
    notes = list_top_notes(report)
    opening = open_page(write_answer(report), describe_gaps(report), facts, notes)
    chapters = [opening, *_show_scorecard(report)]
    if steps := tuple(suggest_steps(report)):
        chapters.append(Chapter("next-steps", "What to do next", (Points(steps),)))
    chapters += _show_sections(report)
    if broken(report) or any("norm" in section.samples for section in report.sections):
        title = "Which samples are the least robust?"
        chapters.append(Chapter("worst-samples", title, show_worst(report)))
    return Document(f"lipaudit: {report.run.model.spec}", (*chapters, WORDS))


def make_screen(report: Report) -> Document:
    """Return a page for one screen: the answer, warnings and the scorecard."""
    return _shorten(report, list_top_notes(report), MORE)


def make_card(report: Report) -> Document:
    """Return the page of `print(report)`: the model and the scorecard."""
    warnings = sum(note.level == "warning" for note in list_top_notes(report))
    whole = "lipaudit.render(report, 'table') has all sections."
    return _shorten(report, (), f"Warnings: {warnings}. {whole}" if warnings else whole)


def _shorten(report: Report, notes: Iterable[Note], more: str) -> Document:
    facts = list_facts(report)
    facts["run"] = f"{facts['status']}; {facts['run']}"
    short = ((name, facts[name]) for name in SHORT if name in facts)
    opening = open_page(write_answer(report), describe_gaps(report), short, notes)
    end = Chapter("", "", (Paragraph(more),))
    title = f"lipaudit: {report.run.model.spec}"
    return Document(title, (opening, *_show_scorecard(report), end))


def _show_scorecard(report: Report) -> list[Chapter]:
    card = make_scorecard(report)
    return [Chapter("scorecard", "Scorecard", (card,))] if card else []


# Sections


def _show_sections(report: Report) -> list[Chapter]:
    """Return a chapter for each section of one report."""
    warnings = [n for s in report.sections for n in s.notes if n.level == "warning"]
    shown = [*list_common_notes(report), *warnings]  # the top of the page shows these
    chapters: list[Chapter] = []
    for section in report.sections:
        name = section.measure
        # The enclosing section lists the same settings.
        blocks = show_section(section, shown, {} if "." in name else section.settings)
        folded = bool(chapters) and name not in OPEN
        chapters.append(Chapter(name, name_chapter(section), blocks, folded))
    return chapters


def show_section(
    section: Section, shown: Collection[Note] = (), settings: dict[str, Any] | None = None
) -> tuple[Block, ...]:
    """Return the blocks of a section: its tables and pictures, settings and notes.

    Args:
        section: the section; a failed one shows its reason.
        shown: notes that the page already shows.
        settings: settings to show; by default all of the section.
    """
    if section.failure is not None:
        return tuple(compare_sections({"": section}))
    # A switch that is on is shown by its name; what is off or unset is left out.
    listed = "; ".join(
        name if value is True else f"{name} {format_setting(value)}"
        for name, value in (section.settings if settings is None else settings).items()
        if name != SEED and value is not False and value not in (None, [], ())
    )
    return (
        *([Paragraph(about)] if (about := find_display(section).about) else []),
        *compare_sections({"": section}),
        *([Paragraph(f"Settings: {listed}.")] if listed else []),
        *list_notes(note for note in section.notes if note not in shown),
    )


def compare_sections(sections: Sections) -> Iterable[Block]:
    """Yield the blocks of one measure of reports, by the report's label; first the failures."""
    for label, section in sections.items():
        if section.failure:
            start = f"{label}: FAILED" if label else "FAILED"
            yield Paragraph(f"{start}: {section.failure.reason}. {section.failure.advice}".strip())
    measured = {k: s for k, s in sections.items() if s.rows or len(s.samples) > 1}
    if measured:
        yield from show_sections(measured)
    elif not any(section.failure for section in sections.values()):
        yield Paragraph("No results: nothing was measured.")


# Several reports


def make_pages(
    reports: Sequence[Report], lead: Sequence[Chapter], *, short: bool = False
) -> Document:
    """Return the page of several reports side by side, after the leading chapters.

    Args:
        reports: the reports.
        lead: the chapters that come first.
        short: for one screen: without sections.
    """
    title, chapters = f"lipaudit: {len(reports)} models side by side", [*lead]
    if short:
        return Document(title, (*chapters, Chapter("", "", (Paragraph(MORE),))))
    names = model_labels(reports)
    for measure in dict.fromkeys(s.measure for report in reports for s in report.sections):
        pairs = ((k, r.section(measure)) for k, r in zip(names, reports, strict=True))
        sections = {name: section for name, section in pairs if section is not None}
        heading = name_chapter(next(iter(sections.values())))
        folded = len(chapters) > len(lead) and measure not in OPEN
        blocks = tuple(compare_sections(sections))
        chapters.append(Chapter(measure, heading, blocks, folded))
    # The facts that differ are beside each other.
    facts = list(map(list_facts, reports))
    keys = dict.fromkeys(name for each in facts for name in each)
    differing = [key for key in keys if len({each.get(key) for each in facts}) > 1]
    columns = (
        (Column(name, "", format="s"), [each.get(key) for key in differing])
        for name, each in zip(names, facts, strict=True)
    )
    audited = make_table("", [("fact", differing), *columns])
    chapters += [Chapter("models", "What was audited?", (audited,))] if differing else []
    return Document(title, (*chapters, WORDS))


def open_several(reports: Sequence[Report], answer: str, *, short: bool) -> Chapter:
    """Return the opening of a page of several reports: what they lack, share and warn of."""
    names = model_labels(reports)
    gaps = (
        f"{k}: {gap}" for k, r in zip(names, reports, strict=True) if (gap := describe_gaps(r))
    )
    facts = [list_facts(report).items() for report in reports]
    common = [fact for fact in facts[0] if all(fact in each for each in facts)]
    common = [fact for fact in common if fact[0] in SHORT or not short]
    outcome = Paragraph(answer, "answer") if answer else None
    return open_page(outcome, " ".join(gaps), common, list_warnings(reports))


def list_warnings(reports: Sequence[Report]) -> list[Note]:
    """Return the warnings of several reports, with the name of the report."""
    return [
        note.model_copy(update={"text": f"{name}: {note.text}"})
        for name, report in zip(model_labels(reports), reports, strict=True)
        for note in list_top_notes(report)
        if note.level == "warning"
    ]
