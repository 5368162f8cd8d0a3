"""All formats, their choice by name or by the suffix of a file, and the results they write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from lipaudit.errors import UsageError, suggestion
from lipaudit.report import html, latex, markdown, records, terminal

if TYPE_CHECKING:
    from lipaudit.gate import Comparison, Judgement
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
        screen: writes the form to a stream with the terminal's width and colours; None if a
            terminal gets the bytes of a file.
    """

    name: str
    takes: Form
    render: Callable[[Any], bytes]
    suffixes: tuple[str, ...] = ()
    screen: Callable[[Any, TextIO], None] | None = None


_FORMATS = (
    # Of formats with one suffix, a file gets the first that can show the result.
    Format("text", "lines", records.write_lines, (".txt",)),
    Format("table", "page", terminal.render, (".txt",), screen=terminal.write),
    Format("json", "record", records.write_json, (".json",)),
    Format("html", "page", html.render, (".html", ".htm")),
    Format("markdown", "page", markdown.render, (".md", ".markdown")),
    Format("latex", "page", latex.render, (".tex",)),
    Format("csv", "frame", records.write_csv, (".csv",)),
    Format("junit", "judgement", records.write_junit, (".xml",)),
)
RENDERERS: dict[str, Format] = {known.name: known for known in _FORMATS}
"""Every format, by the name that `--format` takes; a terminal gets the first possible one."""


def find_format(name: str, forms: Collection[Form]) -> Format:
    """Return a format by its name.

    Args:
        name: the value of `--format`; empty for the default.
        forms: the forms of the result.

    Raises:
        UsageError: for an unknown format, or one that cannot show the result.
    """
    able = [known for known in RENDERERS.values() if known.takes in forms]
    if not name:
        return able[0]
    names = [known.name for known in able]
    if name not in RENDERERS:
        raise UsageError(f"unknown format {name!r}", suggestion(name, names))
    if name not in names:
        raise UsageError(f"{name} is not possible here", f"There are: {', '.join(names)}.")
    return RENDERERS[name]


def find_file_format(path: Path, forms: Collection[Form]) -> Format:
    """Return the format of a file, by its suffix.

    Raises:
        UsageError: the suffix has no format that can show the result.
    """
    able = [known for known in RENDERERS.values() if known.takes in forms]
    for known in able:
        if path.suffix.lower() in known.suffixes:
            return known
    suffixes = dict.fromkeys(suffix for known in able for suffix in known.suffixes)
    raise UsageError(
        f"cannot tell the format of {path}: its suffix names none that is possible here",
        suggestion(path.suffix.lower(), suffixes),
    )


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
    from lipaudit.report.page import document
    from lipaudit.report.page.ranking import describe_ranking, make_ranking_chapter

    if len(reports) == 1:
        report = reports[0]
        one: dict[Form, Callable[[], Any]] = {
            "page": cache(lambda: document.make_page(report)),
            "record": lambda: report,
            "frame": lambda: records.list_cells(report),
        }
        several = sum("." not in section.measure for section in report.sections) > 1
        return one | ({"screen": lambda: document.make_screen(report)} if several else {})
    ranking = cache(lambda: rank(reports, by))

    def make_page(*, short: bool) -> Any:
        opening = document.open_several(reports, describe_ranking(ranking()), short=short)
        chapter = make_ranking_chapter(ranking(), reports, short=short)
        return document.make_pages(reports, [opening, chapter], short=short)

    return {
        "page": cache(lambda: make_page(short=False)),
        "screen": lambda: make_page(short=True),
        "record": ranking,
        "frame": lambda: records.list_rows(make_ranking_chapter(ranking(), reports)),
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

    one = samples.choose_sample(report, sample) if sample is not None else None
    page = samples.inspect_samples(report, name, one)
    shown = [one] if one is not None else worst(report)
    found = [samples.record_sample(report, each) for each in shown]
    return {"page": lambda: page, "record": lambda: found if one is None else found[0]}


def of_comparison(comparison: Comparison, reports: Sequence[Report]) -> Subject:
    """Show the changes between reports, then the reports side by side."""
    from lipaudit.report.page.comparison import make_comparison_page

    return {
        "page": cache(lambda: make_comparison_page(comparison, reports, short=False)),
        "screen": lambda: make_comparison_page(comparison, reports, short=True),
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
