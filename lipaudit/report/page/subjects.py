"""What the commands show: reports, a comparison, a judgement, in each form that it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from lipaudit.errors import UsageError
from lipaudit.report.form import Form, Subject

if TYPE_CHECKING:
    from lipaudit.gate import Attribution, Comparison, Judgement
    from lipaudit.report.blocks import Curve, Density, Document, Passage
    from lipaudit.results import Report
    from lipaudit.results.history import History

RANKED: frozenset[Form] = frozenset({"page", "brief", "record", "frame"})
"""The forms of several reports."""
REPORT: frozenset[Form] = RANKED
DRAWN: frozenset[Form] = REPORT | {"picture"}
"""The forms of a report that holds an attention map."""
COMPARISON: frozenset[Form] = frozenset({"page", "screen", "brief", "record", "frame"})
JUDGEMENT: frozenset[Form] = frozenset({"page", "brief", "record", "lines", "judgement"})
HISTORY: frozenset[Form] = frozenset({"page", "record", "frame"})


def of_reports(*reports: Report, by: str | None = None) -> Subject:
    """Show one report, or several ranked and side by side.

    Args:
        reports: what is shown.
        by: the metric that several are ranked by, if not by the usual one.
    """
    subject = _of_one(reports[0]) if len(reports) == 1 else _of_several(reports, by)
    if _pictures(reports):
        subject["picture"] = lambda: _picture(reports)
    return subject


def _of_one(report: Report) -> dict[Form, Callable[[], Any]]:
    from lipaudit.report import frame
    from lipaudit.report.page.document import document, screen
    from lipaudit.report.page.scorecard import brief

    subject: dict[Form, Callable[[], Any]] = {
        "page": cache(lambda: document(report)),
        "record": lambda: report,
        "brief": lambda: brief(report),
        "frame": lambda: frame.of_report(report),
    }
    if sum("." not in s.measure for s in report.sections) > 1:
        subject["screen"] = lambda: screen(report)
    return subject


def _of_several(reports: Sequence[Report], by: str | None) -> dict[Form, Callable[[], Any]]:
    from lipaudit.gate import rank
    from lipaudit.report import frame
    from lipaudit.report.page.document import document, screen_of_several
    from lipaudit.report.page.ranking import brief, chapter, leading

    ranking = cache(lambda: rank(reports, by))
    return {
        "page": cache(lambda: document(*reports, lead=leading(ranking()))),
        "screen": lambda: screen_of_several(reports, chapter(ranking())),
        "record": ranking,
        "brief": lambda: brief(ranking(), reports),
        "frame": lambda: frame.of_ranking(ranking()),
    }


def of_sample(report: Report, name: str, sample: str | None) -> Subject:
    """Show what is known of a sample, by its id or place; of none: which are the worst.

    Args:
        report: that has it.
        name: what the report is called in advice.
        sample: as it is named.

    Raises:
        InputError: the report says nothing of single samples.
        UsageError: it has none of that name, or several.
    """
    from lipaudit.report.page import samples
    from lipaudit.results.worst import worst

    if sample is None:
        page = samples.overview(report, name)
        return {
            "page": lambda: page,
            "record": lambda: [samples.record(report, each) for each in worst(report)],
        }
    one = samples.chosen(report, sample)
    return {
        "page": lambda: samples.inspected(report, one),
        "picture": lambda: (samples.portrait(report, one),),
        "record": lambda: samples.record(report, one),
    }


def of_comparison(comparison: Comparison, reports: Sequence[Report]) -> Subject:
    """Show what changed between reports, before the reports themselves side by side."""
    from lipaudit.report import frame
    from lipaudit.report.page.comparison.chapters import chapters
    from lipaudit.report.page.comparison.opening import brief, opened, screen
    from lipaudit.report.page.document import document
    from lipaudit.report.page.views.common import places

    @cache
    def page() -> Document:
        known = {name: place for report in reports for name, place in places(report).items()}
        whole = document(*reports, lead=chapters(comparison, known))
        return opened(whole, comparison, reports)

    return {
        "page": page,
        "screen": lambda: screen(page()),
        "brief": lambda: brief(comparison),
        "record": lambda: comparison,
        "frame": lambda: frame.of_comparison(comparison),
    }


def of_history(history: History) -> Subject:
    """Show what was measured over a training."""
    from lipaudit.report.page.history import frame, page, screen

    return {
        "page": cache(lambda: page(history)),
        "screen": lambda: screen(history),
        "record": lambda: json.loads(history.model_dump_json(by_alias=True)),
        "frame": lambda: frame(history),
    }


def of_attribution(attribution: Attribution) -> Subject:
    """Show which layers explain the change of a norm."""
    from lipaudit.report.page.comparison.attribution import page

    return {"page": cache(lambda: page(attribution)), "record": lambda: attribution}


def of_judgement(judgement: Judgement) -> Subject:
    """Show what the gate decided."""
    from lipaudit.report.page.judgement import brief, lines, page

    return {
        "page": cache(lambda: page(judgement)),
        "brief": lambda: brief(judgement),
        "record": lambda: judgement,
        "lines": lambda: lines(judgement),
        "judgement": lambda: judgement,
    }


def _pictures(reports: Sequence[Report]) -> list[tuple[Density | Curve | Passage, ...]]:
    """Return what was drawn of a head, report by report."""
    from lipaudit.report.page.views.attention import drawn

    sections = [report.section("attention") for report in reports]
    return [blocks for section in sections if section and (blocks := tuple(drawn(section)))]


def _picture(reports: Sequence[Report]) -> tuple[Density | Curve | Passage, ...]:
    pictures = _pictures(reports)
    if len(pictures) != 1:
        raise UsageError(
            f"a picture needs one attention map, not {len(pictures)}",
            "lipaudit attention MODEL --map LAYER.HEAD -o map.png draws one.",
        )
    return pictures[0]
