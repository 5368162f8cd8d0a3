"""Results as bytes: reports, comparisons and judgements, in every format.

A result is a `Subject`: its possible forms (`formats`). A page consists of blocks
(`page.document`); every format draws the blocks of a page, or writes another form.
"""

from __future__ import annotations

from collections.abc import Sequence

from lipaudit.report.formats import COMPARISON as COMPARISON
from lipaudit.report.formats import JUDGEMENT as JUDGEMENT
from lipaudit.report.formats import RENDERERS as RENDERERS
from lipaudit.report.formats import REPORT as REPORT
from lipaudit.report.formats import Form as Form
from lipaudit.report.formats import Format as Format
from lipaudit.report.formats import Subject as Subject
from lipaudit.report.formats import find_file_format as find_file_format
from lipaudit.report.formats import find_format as find_format
from lipaudit.report.formats import of_comparison as of_comparison
from lipaudit.report.formats import of_judgement as of_judgement
from lipaudit.report.formats import of_reports as of_reports
from lipaudit.report.formats import of_sample as of_sample
from lipaudit.tables import Report

MOST_LINES = 25
"""Largest number of lines of a printed report."""


def render(shown: Report | Sequence[Report] | Subject, format: str) -> bytes:
    """Write a result in a format.

    Args:
        shown: a report, several reports to show side by side, or the result of `of_reports`,
            `of_comparison` or `of_judgement`.
        format: a name in `RENDERERS`.

    Raises:
        UsageError: the format is unknown, or cannot show the result.
    """
    reports = [shown] if isinstance(shown, Report) else shown
    subject = of_reports(*reports) if isinstance(reports, Sequence) else reports
    how = find_format(format, subject.keys())
    return how.render(subject[how.takes]())


def summarize(report: Report) -> str:
    """Return the scorecard of a report as plain text, in at most `MOST_LINES` lines."""
    from lipaudit.report import terminal
    from lipaudit.report.page.document import make_card

    lines = terminal.render(make_card(report), width=100).decode().rstrip("\n").split("\n")
    if len(lines) > MOST_LINES:
        more = f"and {len(lines) - MOST_LINES + 1} more lines"
        lines = [*lines[: MOST_LINES - 2], more, lines[-1]]
    return "\n".join(lines)
