"""All formats, their choice by name or by the suffix of a file, and the results they write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from lipaudit.errors import UsageError, suggestion
from lipaudit.report import html, latex, markdown, records, terminal

if TYPE_CHECKING:
    from lipaudit.gate import Comparison, Judgement
    from lipaudit.report.blocks import Document
    from lipaudit.tables import Report

Form = Literal["page", "screen", "record", "frame", "lines", "judgement"]
"""A `Document`, a `Document` for one screen, a pydantic model, rows of plain values, lines of
text, or a `Judgement` of the gate."""
Subject = Mapping[Form, Callable[[], Any]]
"""A result: for each form, the function that creates it."""


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: its name in `--format`.
        takes: the form that it writes.
        render: turns that form into the bytes of a file.
        suffixes: suffixes of its files.
        asked: whether it writes files only if `--format` names it; the suffix alone means another
            format.
        screen: writes the form to a stream with the terminal's width and colours; None if a
            terminal gets the bytes of a file.
    """

    name: str
    takes: Form
    render: Callable[[Any], bytes]
    suffixes: tuple[str, ...] = ()
    asked: bool = False
    screen: Callable[[Any, TextIO], None] | None = None


_FORMATS = (
    Format("brief", "page", markdown.render_brief, (".md",), asked=True),
    Format("csv", "frame", records.write_csv, (".csv",)),
    Format("html", "page", html.render, (".html", ".htm")),
    Format("json", "record", records.write_json, (".json",)),
    Format("junit", "judgement", records.write_junit, (".xml",)),
    Format("latex", "page", latex.render, (".tex",)),
    Format("markdown", "page", markdown.render, (".md", ".markdown")),
    Format("table", "page", terminal.render, (".txt",), screen=terminal.write),
    Format("text", "lines", records.write_lines, (".txt",)),
)
RENDERERS: dict[str, Format] = {known.name: known for known in _FORMATS}
"""Every format, by the name that `--format` takes."""


USUAL = ("text", "table", "json")
"""Default formats of a terminal, by preference."""


def find_format(name: str, forms: Collection[Form]) -> Format:
    """Return a format by its name.

    Args:
        name: the value of `--format`.
        forms: the forms of the result.

    Raises:
        UsageError: for an unknown format, or one that cannot show the result.
    """
    if name not in RENDERERS:
        known = [known.name for known in RENDERERS.values() if known.takes in forms]
        raise UsageError(f"unknown format {name!r}", suggestion(name, known))
    return _require_form(RENDERERS[name], forms)


def find_file_format(path: Path, forms: Collection[Form], chosen: Format | None = None) -> Format:
    """Return the format of a file, by its suffix.

    If several formats share the suffix, the chosen one comes first, then the result's own form,
    then a page. So `.txt` is the lines of a judgement and the tables of a report; `.md` is a page,
    or a brief if that was chosen.

    Args:
        path: path of the file.
        forms: the forms of the result.
        chosen: the value of `--format`.

    Raises:
        UsageError: the suffix has no format, or its format cannot show the result.
    """
    suffix = path.suffix.lower()
    if chosen and suffix in chosen.suffixes:
        return chosen
    candidates = [f for f in RENDERERS.values() if suffix in f.suffixes and not f.asked]
    if not candidates:
        usual = [f for f in RENDERERS.values() if f.takes in forms and not f.asked]
        known = [suffix for each in usual for suffix in each.suffixes]
        message = f"cannot tell the format of {path} from its name"
        raise UsageError(message, suggestion(suffix, dict.fromkeys(known)))
    # A result with its own form (lines of a judgement) is written in that form.
    candidates.sort(key=lambda known: (known.takes not in forms, known.takes == "page"))
    return _require_form(candidates[0], forms)


def find_usual_format(forms: Collection[Form]) -> Format:
    """Return the default format of a terminal: the first one that the result has a form for."""
    return next(known for n in USUAL if (known := RENDERERS[n]).takes in forms)


def _require_form(known: Format, forms: Collection[Form]) -> Format:
    if known.takes not in forms:
        able = ", ".join(each.name for each in RENDERERS.values() if each.takes in forms)
        raise UsageError(f"{known.name} is not possible here", f"There are: {able}.")
    return known


# Results of commands in each of their forms


REPORT: frozenset[Form] = frozenset({"page", "record", "frame"})
"""Forms of a report, and of several."""
COMPARISON: frozenset[Form] = frozenset({"page", "screen", "record", "frame"})
JUDGEMENT: frozenset[Form] = frozenset({"page", "record", "lines", "judgement"})


def of_reports(*reports: Report, by: str | None = None) -> Subject:
    """Show one report, or several ranked and side by side.

    Args:
        reports: the reports.
        by: metric of the ranking, if not the usual one; or `order` for no ranking.
    """
    from lipaudit.gate import rank
    from lipaudit.report.blocks import Banner
    from lipaudit.report.page.document import make_page, make_ranking_screen, make_screen
    from lipaudit.report.page.ranking import describe_ranking, make_ranking_chapter

    if len(reports) == 1:
        report = reports[0]
        one: dict[Form, Callable[[], Any]] = {
            "page": cache(lambda: make_page(report)),
            "record": lambda: report,
            "frame": lambda: records.list_cells(report),
        }
        several = sum("." not in section.measure for section in report.sections) > 1
        return one | ({"screen": lambda: make_screen(report)} if several else {})
    ranking = cache(lambda: rank(reports, by))

    def answer(page: Document) -> Document:
        outcome = " ".join(describe_ranking(ranking()))
        return replace(page, outcome=Banner(outcome) if outcome else None)

    return {
        "page": cache(lambda: answer(make_page(*reports, lead=[make_ranking_chapter(ranking())]))),
        "screen": lambda: answer(make_ranking_screen(reports, make_ranking_chapter(ranking()))),
        "record": ranking,
        "frame": lambda: records.list_models(ranking()),
    }


def of_sample(report: Report, name: str, sample: str | None) -> Subject:
    """Show all figures of one sample; without a sample, the worst ones.

    Args:
        report: the report.
        name: name of the report in hints.
        sample: name of the sample.

    Raises:
        InputError: the report has no results for single samples.
        UsageError: no sample has this name, or several have.
    """
    from lipaudit.report.page import samples
    from lipaudit.tables.worst import worst

    if sample is None:
        page = samples.make_overview(report, name)
        return {
            "page": lambda: page,
            "record": lambda: [samples.record_sample(report, each) for each in worst(report)],
        }
    one = samples.choose_sample(report, sample)
    return {
        "page": lambda: samples.inspect_sample(report, one),
        "record": lambda: samples.record_sample(report, one),
    }


def of_comparison(comparison: Comparison, reports: Sequence[Report]) -> Subject:
    """Show the changes between reports, then the reports side by side."""
    from lipaudit.report.page.comparison import MORE, make_chapters, open_comparison
    from lipaudit.report.page.document import make_page
    from lipaudit.report.page.facts import find_places

    @cache
    def page() -> Document:
        known = {name: place for report in reports for name, place in find_places(report).items()}
        whole = make_page(*reports, lead=make_chapters(comparison, known))
        return open_comparison(whole, comparison, reports)

    def screen() -> Document:
        findings = tuple((text, "") for text, _ in page().findings)
        return replace(page(), findings=findings, chapters=(), more=MORE)

    return {
        "page": page,
        "screen": screen,
        "record": lambda: comparison,
        "frame": lambda: records.list_samples(comparison),
    }


def of_judgement(judgement: Judgement) -> Subject:
    """Show the verdicts of the gate."""
    from lipaudit.report.page.judgement import list_lines, make_judgement_page

    return {
        "page": cache(lambda: make_judgement_page(judgement)),
        "record": lambda: judgement,
        "lines": lambda: list_lines(judgement),
        "judgement": lambda: judgement,
    }
