"""Results of commands (reports, a comparison, a judgement) in each of their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from lipaudit.report.formats import Form, Subject

if TYPE_CHECKING:
    from lipaudit.gate import Comparison, Judgement
    from lipaudit.report.blocks import Document
    from lipaudit.tables import Report

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
    from lipaudit.report import records
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
    from lipaudit.report import records
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
