"""The page of one report, or of several side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lipaudit.report.blocks import (
    Block,
    Chapter,
    Document,
    Facts,
    Notes,
    Paragraph,
    make_table,
)
from lipaudit.report.cells import LIMITS, STATUS, write_math
from lipaudit.report.glossary import ATTACKS, NORMS, WORDS
from lipaudit.report.page.chapters import find_plan
from lipaudit.report.page.facts import (
    describe_gaps,
    list_facts,
    list_leading_notes,
    list_top_notes,
    merge_notes,
)
from lipaudit.report.page.findings import diagnose
from lipaudit.report.page.ranking import tabulate_scorecards
from lipaudit.report.page.samples import show_worst
from lipaudit.report.page.scorecard import make_scorecard, suggest_steps, write_answer
from lipaudit.report.page.views import list_all_rows
from lipaudit.tables import Column, Note, Report, Section, model_labels
from lipaudit.tables.report import Failure
from lipaudit.tables.summary import summary
from lipaudit.tables.worst import broken

SEED = "seed"
"""Name of the setting seed, which the page lists among the facts of the run."""
NOTHING = Paragraph("No results: nothing was measured.")
MORE = "--details prints all sections; lipaudit explain WORD says what a word means."
EXPLAIN = "lipaudit explain WORD explains any word of this page."
OPEN = ("bounds", "jacobian", "attack", "certify")
"""Chapters of an audit that are not folded."""


def show_section(
    section: Section,
    said: Collection[Note] = (),
    settings: Mapping[str, Any] | None = None,
) -> tuple[Block, ...]:
    """Return the blocks of a section: its views, all rows, settings and notes.

    Args:
        section: the section; a failed one shows its reason.
        said: notes that the page already shows.
        settings: settings to show; by default all of the section.
    """
    if section.failure is not None:
        return (_describe_failure("", section.failure),)
    plan = find_plan(section.measure, section.title)
    # A switch that is on is shown by its name; what is off or unset is left out.
    given = section.settings if settings is None else settings
    listed = "; ".join(
        name if value is True else f"{name} {format_setting(value)}"
        for name, value in given.items()
        if name != SEED and value is not False and value not in (None, [], ())
    )
    notes = merge_notes(note for note in section.notes if note not in said)
    views = plan.views if plan.whole else (*plan.views, list_all_rows)
    blocks = [block for view in views for block in view({"": section})]
    return (
        *([Paragraph(plan.about)] if plan.about else []),
        *(blocks if _has_figures(section) else [NOTHING]),
        *([Paragraph(f"Settings: {listed}.")] if listed else []),
        *([Notes(notes)] if notes else []),
    )


def compare_sections(sections: Mapping[str, Section]) -> tuple[Block, ...]:
    """Return the blocks that compare one measure over several reports, by the report's label."""
    filled = {label: section for label, section in sections.items() if _has_figures(section)}
    failed = [_describe_failure(f"{k}: ", s.failure) for k, s in sections.items() if s.failure]
    if not filled:
        return tuple(failed) or (NOTHING,)
    first = next(iter(filled.values()))
    plan = find_plan(first.measure, first.title)
    views = plan.several or plan.views
    return (*failed, *(block for view in views for block in view(filled)))


def _has_figures(section: Section) -> bool:
    """Return whether a section has rows or per-sample columns."""
    return bool(section.rows or len(section.samples) > 1)


def _describe_failure(label: str, failure: Failure) -> Paragraph:
    return Paragraph(f"{label}FAILED: {failure.reason}. {failure.advice}".strip())


def format_setting(value: Any) -> str:
    """Write a setting; lists without brackets."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# Pages


def make_page(*reports: Report, lead: Sequence[Chapter] = ()) -> Document:
    """Return the page of a report, or of several side by side after the leading chapters."""
    if len(reports) > 1:
        return _show_several(reports, lead)
    report = reports[0]
    warnings = [n for s in report.sections for n in s.notes if n.level == "warning"]
    said = [*list_top_notes(report), *warnings]  # the top of the page shows these
    chapters = []
    for index, section in enumerate(report.sections):
        name, settings = section.measure, section.settings
        whole = report.section(name.partition(".")[0])
        if whole and whole is not section and whole.settings == settings:
            settings = {}  # the enclosing section lists the same
        folded = index > 0 and name not in OPEN
        blocks = show_section(section, said, settings)
        chapters.append(Chapter(name, find_plan(name, section.title).question, blocks, folded))
    if broken(report) or any("norm" in section.samples for section in report.sections):
        title = "Which samples are the least robust?"
        chapters.append(Chapter("worst-samples", title, show_worst(report)))
    return replace(_start_page(report), chapters=(*chapters, _explain_page(report)))


def _show_several(reports: Sequence[Report], lead: Sequence[Chapter]) -> Document:
    names = model_labels(reports)
    chapters: list[Chapter] = []
    for measure in dict.fromkeys(s.measure for report in reports for s in report.sections):
        sections = {
            name: section
            for name, report in zip(names, reports, strict=True)
            if (section := report.section(measure)) is not None
        }
        title = next(iter(sections.values())).title
        folded, blocks = bool(chapters) and measure not in OPEN, compare_sections(sections)
        chapters.append(Chapter(measure, find_plan(measure, title).question, blocks, folded))
    # The facts that differ are beside each other.
    common = _list_common_facts(reports)
    facts = [dict(fact for fact in list_facts(report) if fact not in common) for report in reports]
    keys = list(dict.fromkeys(name for each in facts for name in each))
    cells: list[list[Any]] = [keys, *([each.get(key) for key in keys] for each in facts)]
    columns = (Column(label=name, meaning="", format="s") for name in ("fact", *names))
    audited = make_table("", zip(columns, cells, strict=True))
    cards = (tabulate_scorecards(names, reports),)
    return replace(
        _start_several(reports),
        chapters=(
            *lead,
            Chapter("scorecards", "How do the scorecards compare?", cards),
            *chapters,
            *([Chapter("models", "What was audited?", (audited,))] if keys else []),
            _explain_page(*reports),
        ),
    )


def make_screen(report: Report) -> Document:
    """Return a page for one screen: the answer, warnings, the scorecard, the findings."""
    page = _start_page(report)
    known = dict(page.facts)
    known["run"] = f"{known['status']}; {known['run']}"
    return replace(
        page,
        facts=tuple(
            (name, known[name]) for name in ("model", "data", "run", "reason") if name in known
        ),
        findings=tuple((text, "") for text, _ in page.findings),
        more=MORE,
        steps=(),
    )


def make_card(report: Report) -> Document:
    """Return the page of `print(report)`: the model and the scorecard."""
    page = make_screen(report)
    warnings = sum(note.level == "warning" for note in page.notes)
    whole = "lipaudit.render(report, 'table') has all sections."
    return replace(
        page,
        notes=(),
        findings=(),
        more=f"Warnings: {warnings}. {whole}" if warnings else whole,
    )


def make_ranking_screen(reports: Sequence[Report], lead: Chapter) -> Document:
    """Return a page of several reports for one screen: the samples, warnings, one chapter."""
    data = dict.fromkeys(f"{r.run.data.samples} samples of {r.run.data.spec}" for r in reports)
    page = _start_several(reports)
    return replace(page, facts=(("data", "; ".join(data)),), chapters=(lead,), more=MORE)


def _start_page(report: Report) -> Document:
    """Return the page of a report without its sections."""
    card = make_scorecard(report)
    return Document(
        title=f"lipaudit: {report.run.model.spec}",
        outcome=write_answer(report),
        facts=list_facts(report),
        findings=tuple(diagnose(report)),
        chapters=(),
        partial=describe_gaps(report),
        notes=list_leading_notes(report),
        scorecard=card,
        steps=suggest_steps(report, card),
    )


def _explain_page(*reports: Report) -> Chapter:
    """Explain the words of the page and, for one report, the preprocessing of its samples."""
    known, pairs = {**ATTACKS, **NORMS, **WORDS}, dict[str, str]()
    for report in reports:
        # The words of the scorecard: its figures, norms and attacks.
        card, accuracy = make_scorecard(report), summary(report).accuracy
        words = [line.label.partition(",")[0] for line in (card.lines if card else ())]
        words += [each.norm for each in accuracy] + [a for each in accuracy for a in each.attacks]
        pairs |= {word: write_math(known[word]) for word in words if word in known}
    pairs |= {status: f"{text}. {LIMITS[status]}" for status, text in STATUS.items()}
    if len(reports) == 1:
        run = reports[0].run
        prepared = (f"{name} {format_setting(value)}" for name, value in run.preprocess.items())
        pairs["preprocessing"] = "; ".join(prepared) or "none"
        versions = {"lipaudit": run.lipaudit} | run.versions
        pairs["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    title = "What do the words mean, and how was this measured?"
    blocks = (Facts(tuple(pairs.items())), Paragraph(EXPLAIN))
    return Chapter("words", title, blocks, folded=True)


def _start_several(reports: Sequence[Report]) -> Document:
    """Return the page of several reports without chapters: gaps, common facts, all warnings."""
    named = list(zip(model_labels(reports), reports, strict=True))
    lacks = [f"{name}: {missing}" for name, report in named if (missing := describe_gaps(report))]
    return Document(
        title=f"lipaudit: {len(reports)} models side by side",
        facts=_list_common_facts(reports),
        findings=(),
        chapters=(),
        partial=" ".join(lacks),
        notes=merge_notes(
            note.model_copy(update={"text": f"{name}: {note.text}"})
            for name, report in named
            for note in list_leading_notes(report)
            if note.level == "warning"
        ),
    )


def _list_common_facts(reports: Sequence[Report]) -> tuple[tuple[str, str], ...]:
    """Return the facts that hold for all reports."""
    first, *others = (list_facts(report) for report in reports)
    return tuple(fact for fact in first if all(fact in each for each in others))
