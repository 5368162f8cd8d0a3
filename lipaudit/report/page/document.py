"""One page out of one report, or out of several side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lipaudit.report.blocks import (
    Block,
    Chapter,
    Document,
    Notes,
    Paragraph,
    Scorecard,
    make_table,
)
from lipaudit.report.cells import STATUS, write_math
from lipaudit.report.glossary import ATTACKS, NORMS, WORDS
from lipaudit.report.page import accuracy, heads, norms
from lipaudit.report.page.common import (
    SideBySide,
    View,
    add_places,
    compare_rows,
    find_places,
    view_rows,
)
from lipaudit.report.page.findings import diagnose
from lipaudit.report.page.opening import (
    describe_gaps,
    list_facts,
    list_leading_notes,
    list_shared_notes,
    list_versions,
    make_scorecard,
    merge_notes,
    suggest_steps,
)
from lipaudit.report.page.ranking import tabulate_scorecards
from lipaudit.report.page.samples import has_ranking, show_worst
from lipaudit.results import Column, Note, Report, Section, layouts, model_labels
from lipaudit.results.report import Failure
from lipaudit.results.summary import summary

# Sections


VIEWS: dict[str, View] = {
    "bounds": heads.view_bounds,
    "bounds.ball": heads.view_balls,
    "attention": heads.view_attention,
    "jacobian": norms.view_jacobian,
    "attack": accuracy.view_attack,
    "certify": accuracy.view_certify,
    "certify.radius": accuracy.view_radii,
    "scaling": norms.view_scaling,
    "scaling.fit": norms.view_fits,
}
"""View of each section; `default` shows a section without one."""

SIDE_BY_SIDE: dict[str, SideBySide] = {
    "bounds": heads.compare_bounds,
    "bounds.layers": heads.compare_layers,
    "bounds.ball": heads.compare_balls,
    "attention": heads.compare_attention,
    "jacobian": norms.compare_jacobian,
    "attack": accuracy.compare_attack,
    "certify": accuracy.compare_certify,
    "scaling": norms.compare_scaling,
    "scaling.fit": norms.compare_fits,
}
"""How each section of several reports is shown; `default` for one without an entry."""
OF_COLUMNS = {"jacobian": frozenset({"rivals"})}
"""Settings of a column of the same name, by measure: without that they did nothing."""
SEED = "seed"
"""A setting of the run, which is among the facts of the page."""
NOTHING = Paragraph("No rows: nothing was measured.")


def find_title(measure: str) -> str:
    """Return the heading of a section."""
    return layouts()[measure].title or measure


def show_section(
    section: Section,
    said: Collection[Note] = (),
    known: Mapping[str, str] = MappingProxyType({}),
    settings: Mapping[str, Any] | None = None,
) -> tuple[Block, ...]:
    """Return the blocks of a section: warnings, settings, tables and charts, other notes.

    Of one that failed: why.

    Args:
        section: what is shown.
        said: notes that stand above it already.
        known: where samples are found, by id.
        settings: those that are written; by default all of its own.
    """
    if section.failure is not None:
        return (describe_failure(section.failure),)
    own = section.settings if settings is None else settings
    idle = OF_COLUMNS.get(section.measure, frozenset()) - section.samples.keys()
    ran = _list_settings({name: value for name, value in own.items() if name not in idle})
    notes = [note for note in section.notes if note not in said]
    spoiling, others = (
        merge_notes(n for n in notes if (n.level == "warning") == w) for w in (True, False)
    )
    view = VIEWS.get(section.measure, view_rows)
    return (
        *([Notes(spoiling)] if spoiling else []),
        *([Paragraph(f"Settings: {ran}.")] if ran else []),
        *((add_places(b, known) for b in view(section)) if _has_figures(section) else [NOTHING]),
        *([Notes(others)] if others else []),
    )


def compare_sections(sections: Mapping[str, Section]) -> tuple[Block, ...]:
    """Return the blocks that compare one measure over several reports, by the report's label."""
    filled = {label: section for label, section in sections.items() if _has_figures(section)}
    lost = [
        Paragraph(f"{label}: {describe_failure(section.failure).text}")
        for label, section in sections.items()
        if section.failure is not None
    ]
    if not filled:
        return tuple(lost) or (NOTHING,)
    view = SIDE_BY_SIDE.get(next(iter(filled.values())).measure, compare_rows)
    return (*lost, *view(filled))


def _has_figures(section: Section) -> bool:
    """Return whether a section has rows or per-sample columns."""
    return bool(section.rows or len(section.samples) > 1)


def describe_failure(failure: Failure) -> Paragraph:
    """Say why a measure has no result."""
    advice = f" {failure.advice}" if failure.advice else ""
    return Paragraph(f"FAILED: {failure.reason}.{advice}")


def _list_settings(settings: Mapping[str, Any]) -> str:
    """Format settings: a switch that is on by its name; what is off or unset is left out."""
    own = {k: v for k, v in settings.items() if k != SEED and v is not False}
    given = {name: value for name, value in own.items() if value not in (None, [], ())}
    return "; ".join(
        name if value is True else f"{name} {format_setting(value)}"
        for name, value in given.items()
    )


def format_setting(value: Any) -> str:
    """Write a setting; lists without brackets."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# Pages


BRIEF = ("model", "data", "run")
"""The facts that a screen has room for."""
MORE = "--details prints all sections; lipaudit explain WORD says what a word means."
LEGEND = " ".join(f"{name.capitalize()}: {meaning}." for name, meaning in STATUS.items())
EXPLAIN = "lipaudit explain WORD says what a word of this page means."


def make_page(*reports: Report, lead: Sequence[Chapter] = ()) -> Document:
    """Lay out a report; several reports are set side by side, below the chapters that lead."""
    return _show_one(reports[0]) if len(reports) == 1 else _show_several(reports, lead)


def make_screen(report: Report) -> Document:
    """Return a page for one screen: the model, warnings, the scorecard, the findings."""
    page = _start_page(report)
    known = dict(page.facts)
    known["run"] = f"{known['status']}; {known['run']}"
    return replace(
        page,
        facts=tuple((name, known[name]) for name in BRIEF),
        findings=tuple((text, "") for text, _ in page.findings),
        more=MORE,
    )


def make_card(report: Report) -> Document:
    """Return the page of `print(report)`: the model and the scorecard, without commands."""
    page, figures = make_screen(report), make_scorecard(report, short=True)
    warnings = sum(note.level == "warning" for note in page.notes)
    whole = "lipaudit.render(report, 'table') has all sections."
    return replace(
        page,
        notes=(),
        scorecard=figures and Scorecard(tuple(replace(f, command="") for f in figures.lines)),
        findings=(),
        more=f"Warnings: {warnings}. {whole}" if warnings else whole,
    )


def make_ranking_screen(reports: Sequence[Report], lead: Chapter) -> Document:
    """Return a page of several reports for one screen: the samples, warnings, one chapter."""
    data = dict.fromkeys(f"{r.run.data.samples} samples of {r.run.data.spec}" for r in reports)
    return replace(
        _start_several(reports),
        facts=(("data", "; ".join(data)),),
        chapters=(lead,),
        more=MORE,
    )


def _start_page(report: Report) -> Document:
    """Return the page of a report without its sections."""
    card = make_scorecard(report)
    return Document(
        title=f"lipaudit: {report.run.model.spec}",
        facts=list_facts(report),
        findings=tuple((finding.text, finding.source) for finding in diagnose(report)),
        chapters=(),
        partial=describe_gaps(report),
        notes=list_leading_notes(report),
        scorecard=card,
        steps=suggest_steps(report, card),
    )


def _show_one(report: Report) -> Document:
    run, said, known = report.run, list_shared_notes(report), find_places(report)
    preprocess = "; ".join(
        f"{name} {format_setting(value)}" for name, value in run.preprocess.items()
    )
    last: tuple[Block, ...] = (
        *_explain_words(report),
        Paragraph(f"{LEGEND} {EXPLAIN}"),
        *([Paragraph(f"Preprocessing: {preprocess}.")] if preprocess else []),
        Paragraph(f"{list_versions(report)}."),
    )
    chapters = (
        *(
            Chapter(
                s.measure,
                find_title(s.measure),
                show_section(s, said, known, _find_settings(report, s)),
            )
            for s in report.sections
        ),
        *([Chapter("worst", "Samples", show_worst(report))] if has_ranking(report) else []),
        Chapter("reading", "How to read the figures", last),
    )
    return replace(_start_page(report), chapters=chapters)


def _explain_words(report: Report) -> Iterator[Block]:
    """Explain the words of the scorecard: its figures, and the norms and attacks they name."""
    card, accuracy = make_scorecard(report), summary(report).accuracy
    known = {**ATTACKS, **NORMS, **WORDS}
    words = [line.label.partition(",")[0] for line in (card.lines if card else ())]
    words += [each.norm for each in accuracy] + [a for each in accuracy for a in each.attacks]
    for word in dict.fromkeys(words):
        if word in known:
            yield Paragraph(write_math(f"{word[0].upper()}{word[1:]}: {known[word]}"))


def _find_settings(report: Report, section: Section) -> Mapping[str, Any]:
    """Return the settings of a section; none if the section that it is part of shows the same."""
    whole = report.section(section.measure.partition(".")[0])
    if whole is None or whole is section or whole.settings != section.settings:
        return section.settings
    return {}


def _show_several(reports: Sequence[Report], lead: Sequence[Chapter]) -> Document:
    names = model_labels(reports)
    measures = dict.fromkeys(s.measure for report in reports for s in report.sections)
    chapters = []
    for measure in measures:
        sections = {
            name: section
            for name, report in zip(names, reports, strict=True)
            if (section := report.section(measure)) is not None
        }
        chapters.append(Chapter(measure, find_title(measure), compare_sections(sections)))
    cards = Chapter("scorecards", "Scorecards", (tabulate_scorecards(names, reports),))
    return replace(
        _start_several(reports),
        chapters=(
            *lead,
            cards,
            *chapters,
            Chapter("models", "Models", (_tabulate_models(names, reports),)),
            Chapter("reading", "How to read the figures", (Paragraph(f"{LEGEND} {EXPLAIN}"),)),
        ),
    )


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


def _tabulate_models(names: Sequence[str], reports: Sequence[Report]) -> Block:
    alike = _list_common_facts(reports)
    known = [dict(fact for fact in list_facts(report) if fact not in alike) for report in reports]
    keys = list(dict.fromkeys(name for each in known for name in each))
    cells: list[list[Any]] = [keys, *([each.get(key) for key in keys] for each in known)]
    columns = (Column(label=name, meaning="", format="s") for name in ("fact", *names))
    return make_table("What was audited", zip(columns, cells, strict=True))
