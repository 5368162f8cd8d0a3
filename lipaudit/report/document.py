"""The page of one report, or of several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lipaudit.report import opening
from lipaudit.report.blocks import Card, Cells, Chapter, Document, Paragraph, Points, make_table
from lipaudit.report.cells import STATUS
from lipaudit.report.samples import show_worst
from lipaudit.report.sections import find_display, name_chapter, show_section, show_sections
from lipaudit.tables import Column, Note, Report, model_labels
from lipaudit.tables.columns import group_values
from lipaudit.tables.summary import broken

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
SHORT = ("model", "data", "run", "reason")
"""Facts on one screen."""


def make_page(report: Report, *, short: bool = False) -> Document:
    """Return the page of a report.

    Args:
        report: the report.
        short: for one screen: the answer, warnings and the scorecard. The page of a single
            measure is short enough.
    """
    notes = opening.list_top_notes(report)
    if short and sum("." not in section.measure for section in report.sections) > 1:
        return _shorten(report, notes, MORE)
    facts = opening.list_facts(report).items()
    answer, gaps = opening.write_answer(report), opening.describe_gaps(report)
    chapters = [opening.open_page(answer, gaps, facts, notes), *opening.show_scorecard(report)]
    if steps := tuple(opening.suggest_steps(report)):
        chapters.append(Chapter("next-steps", "What to do next", (Points(steps),)))
    warnings = [n for s in report.sections for n in s.notes if n.level == "warning"]
    # The top of the page shows these notes.
    chapters += list_chapters([report], [*opening.list_common_notes(report), *warnings])
    if broken(report) or any("norm" in s.samples and s.ids for s in report.sections):
        title = "Which samples are the least robust?"
        chapters.append(Chapter("worst-samples", title, show_worst(report)))
    return Document(f"lipaudit: {report.run.label}", (*chapters, WORDS))


def list_chapters(reports: Sequence[Report], shown: Sequence[Note] = ()) -> Iterator[Chapter]:
    """Yield the chapters of sections, with notes that the page does not show yet."""
    names = model_labels(reports) if len(reports) > 1 else [""]
    measures = dict.fromkeys(s.measure for report in reports for s in report.sections)
    for number, measure in enumerate(measures):
        pairs = ((k, r.section(measure)) for k, r in zip(names, reports, strict=True))
        sections = {name: section for name, section in pairs if section is not None}
        first = next(iter(sections.values()))
        blocks = show_section(first, shown) if "" in sections else tuple(show_sections(sections))
        folded = number > 0 and find_display(first).folded
        yield Chapter(measure, name_chapter(first), blocks, folded)


def make_card(report: Report) -> Document:
    """Return the page of `print(report)`: the model and the scorecard."""
    warnings = sum(note.level == "warning" for note in opening.list_top_notes(report))
    whole = "lipaudit.render(report, 'table') has all sections."
    return _shorten(report, (), f"Warnings: {warnings}. {whole}" if warnings else whole)


def _shorten(report: Report, notes: Iterable[Note], more: str) -> Document:
    facts = opening.list_facts(report)
    facts["run"] = f"{facts['status']}; {facts['run']}"
    short = ((name, facts[name]) for name in SHORT if name in facts)
    answer, gaps = opening.write_answer(report), opening.describe_gaps(report)
    start, end = opening.open_page(answer, gaps, short, notes), Chapter("", "", (Paragraph(more),))
    title = f"lipaudit: {report.run.label}"
    return Document(title, (start, *opening.show_scorecard(report), end))


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
    chapters += list_chapters(reports)
    # The facts that differ are beside each other.
    facts = list(map(opening.list_facts, reports))
    keys = dict.fromkeys(name for each in facts for name in each)
    differing = [key for key in keys if len({each.get(key) for each in facts}) > 1]
    columns = {i: Column(name, "", format="s") for i, name in enumerate(model_labels(reports))}
    audited: list[Cells] = [
        {"fact": key} | {i: each.get(key) for i, each in enumerate(facts)} for key in differing
    ]
    if audited:
        chapters += [Chapter("models", "What was audited?", (make_table("", audited, columns),))]
    return Document(title, (*chapters, WORDS))


def open_several(reports: Sequence[Report], answer: str, *, short: bool) -> Chapter:
    """Return the opening of a page of several reports: what they lack, share and warn of."""
    lacks = zip(model_labels(reports), map(opening.describe_gaps, reports), strict=True)
    gaps = (f"{name}: {gap}" for name, gap in lacks if gap)
    facts = [opening.list_facts(report).items() for report in reports]
    common = [fact for fact in facts[0] if all(fact in each for each in facts)]
    common = [fact for fact in common if fact[0] in SHORT or not short]
    outcome = Paragraph(answer, "answer") if answer else None
    return opening.open_page(outcome, " ".join(gaps), common, list_warnings(reports))


def list_warnings(reports: Sequence[Report]) -> list[Note]:
    """Return the warnings of several reports, each once, with the names unless all have it."""
    owners = group_values(
        (note, name)
        for name, report in zip(model_labels(reports), reports, strict=True)
        for note in opening.list_top_notes(report)
        if note.level == "warning"
    )
    leads = {n: "" if len(who) == len(reports) else ", ".join(who) for n, who in owners.items()}
    return [note.add_lead(lead) for note, lead in leads.items()]
