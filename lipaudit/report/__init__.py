"""Results as bytes: reports, comparisons, rankings, judgements and samples, in every format.

A result is a `Subject`. Formats for people write its page, a `Document` of blocks; formats for
programs write its record. A new format is a function, and its line in the list below.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from lipaudit.errors import UsageError, suggestion
from lipaudit.report import terminal
from lipaudit.report.markup import HTML, MARKDOWN, render_html, render_latex, render_markdown
from lipaudit.report.records import (
    JSON,
    list_rows,
    write_csv,
    write_json,
    write_junit,
    write_lines,
)
from lipaudit.tables import Report

if TYPE_CHECKING:
    from lipaudit.gate.comparison import Comparison
    from lipaudit.gate.verdicts import Judgement
    from lipaudit.report.blocks import Document

MOST_LINES = 25
"""Largest number of lines of a printed report."""

Form = Literal["page", "record", "rows", "lines", "judgement"]
"""A `Document`, what JSON writes, rows of plain values, lines of text, or a `Judgement`."""
REPORT: tuple[Form, ...] = ("page", "record", "rows")
"""Forms of a report, of several and of a comparison."""
JUDGEMENT: tuple[Form, ...] = ("page", "record", "lines", "judgement")
FACTS: tuple[Form, ...] = ("lines", "record")


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
    Format("text", "lines", write_lines, (".txt",)),
    Format("table", "page", terminal.render, (".txt",), screen=terminal.write),
    Format(JSON, "record", write_json, (".json",)),
    Format(HTML, "page", render_html, (".html", ".htm")),
    Format(MARKDOWN, "page", render_markdown, (".md", ".markdown")),
    Format("latex", "page", render_latex, (".tex",)),
    Format("csv", "rows", write_csv, (".csv",)),
    Format("junit", "judgement", write_junit, (".xml",)),
)
RENDERERS: dict[str, Format] = {known.name: known for known in _FORMATS}
"""Every format, by the name that `--format` takes; a terminal gets the first possible one."""


@dataclass(frozen=True)
class Subject:
    """A result of a command, which formats write.

    Attributes:
        forms: the forms that it has.
        record: what JSON writes: a report, a ranking, a comparison, a judgement or plain values.
        reports: the reports that its page shows.
        files: the files of these reports, for commands on the page; empty if unknown.
        lines: the result as lines of text.
        sheet: its page, if nothing but the record would describe it.
    """

    forms: Collection[Form]
    record: Any
    reports: Sequence[Report] = ()
    files: Sequence[str] = ()
    lines: Sequence[str] = ()
    sheet: Document | None = None

    def page(self, *, short: bool = False) -> Document:
        """Return the page that shows the result, for one screen if it is to be short."""
        if self.sheet is not None:  # a page that was made with the result, such as of a sample
            return self.sheet
        if isinstance(self.record, Report):
            from lipaudit.report import document

            return document.make_page(self.record, short=short)
        from lipaudit.report import judgements

        return judgements.make_page(self.record, self.reports, self.files, short=short)

    def take(self, form: Form, *, short: bool = False) -> Any:
        """Return the result in the form that a format writes.

        Args:
            form: `page` (chapters for people), `rows` (a table for CSV) or `lines` (plain text);
                any other form is the record itself, for JSON and JUnit.
            short: whether a page has to fit one screen.
        """
        if form == "page":
            return self.page(short=short)
        if form == "rows":
            return list_rows(self.record, self.reports)
        if form == "lines":
            return self.lines
        return self.record


def of_reports(*reports: Report, by: str | None = None) -> Subject:
    """Return what `render` needs to show one report, or several ranked and side by side.

    Args:
        reports: the reports.
        by: the metric that ranks the models; None: the usual one. `order` keeps the given order.

    Raises:
        UsageError: no report has the metric.
    """
    if len(reports) == 1:
        return Subject(forms=REPORT, record=reports[0], reports=reports)
    from lipaudit.gate import rank

    return Subject(forms=REPORT, record=rank(reports, by), reports=reports)


def of_sample(report: Report, name: str, sample: str | None) -> Subject:
    """Return what `render` needs to show all figures of one sample, or the worst samples.

    Args:
        report: the report.
        name: name of the report in hints.
        sample: name of the sample; None for the worst samples.

    Raises:
        InputError: the report has no results for single samples.
        UsageError: no sample has this name, or several have.
    """
    from lipaudit.report import document
    from lipaudit.tables.weakest import find_worst

    record: Any
    if sample is None:
        record = [document.record_sample(report, each) for each in find_worst(report)]
    else:
        sample = document.choose_sample(report, sample)
        record = document.record_sample(report, sample)
    page = document.inspect_samples(report, name, sample)
    return Subject(forms=("page", "record"), record=record, sheet=page)


def of_comparison(
    comparison: Comparison, reports: Sequence[Report], files: Sequence[str] = ()
) -> Subject:
    """Return what `render` needs to show changes between reports, then the reports side by side.

    Args:
        comparison: the changes.
        reports: the compared reports.
        files: the files of the reports, for the commands of the page; empty if unknown.
    """
    return Subject(forms=REPORT, record=comparison, reports=reports, files=files)


def of_judgement(
    judgement: Judgement, reports: Sequence[Report] = (), files: Sequence[str] = ()
) -> Subject:
    """Return what `render` needs to show the verdicts of the gate.

    Args:
        judgement: the verdicts.
        reports: the reports of the baseline and of the current model, for commands of the page.
        files: the files of these reports; empty if unknown.
    """
    from lipaudit.report.gates import write_verdicts

    return Subject(
        forms=JUDGEMENT,
        record=judgement,
        reports=reports,
        files=files,
        lines=write_verdicts(judgement),
    )


def render(shown: Report | Sequence[Report] | Subject, format: str) -> bytes:
    """Write a result in a format.

    Args:
        shown: a report, several reports to show side by side, or the result of `of_reports`,
            `of_comparison` or `of_judgement`.
        format: a name in `RENDERERS`.

    Raises:
        UsageError: the format is unknown, or cannot show the result.
    """
    if isinstance(shown, Report):
        shown = of_reports(shown)
    elif not isinstance(shown, Subject):
        shown = of_reports(*shown)
    writer = find_format(format, shown.forms)
    form = writer.takes  # the form that the format writes, such as a page for HTML
    return writer.render(shown.take(form))


def summarize(report: Report) -> str:
    """Return the scorecard of a report as plain text, in at most `MOST_LINES` lines."""
    from lipaudit.report.document import make_card

    lines = terminal.render(make_card(report), width=100).decode().rstrip("\n").split("\n")
    if len(lines) > MOST_LINES:
        # The last line, which says where all sections are, stays.
        more = f"and {len(lines) - MOST_LINES + 1} more lines"
        lines = [*lines[: MOST_LINES - 2], more, lines[-1]]
    return "\n".join(lines)


def find_format(wanted: str | Path, forms: Collection[Form]) -> Format:
    """Return the format with a name, or the format for the suffix of a file.

    Args:
        wanted: the value of `--format`, or the path of a file; empty for the default.
        forms: the forms in which the result can be shown: page, rows, lines or record.

    Raises:
        UsageError: for an unknown format, or one that cannot show the result.
    """
    # The formats that write one of these forms.
    possible = [known for known in RENDERERS.values() if known.takes in forms]
    if not wanted:
        return possible[0]
    names: dict[str, Format] = {}  # by name, or by suffix if a file is given
    if isinstance(wanted, Path):
        name = wanted.suffix.lower()
        problem = f"cannot tell the format of {wanted}"
        for known in possible:  # several formats may share a suffix: the first of them counts
            for suffix in known.suffixes:
                names.setdefault(suffix, known)
    else:
        name = wanted
        problem = f"unknown format {wanted!r}"
        names = {known.name: known for known in possible}
    if name in names:
        return names[name]
    # The format exists, but it cannot show this result: the advice lists those that can.
    if any(name in (known.name, *known.suffixes) for known in RENDERERS.values()):
        raise UsageError(f"{name} is not possible here", suggestion(name="", known=names))
    raise UsageError(problem, suggestion(name, names))
