"""Which samples a report knows, and by which names they go."""

from __future__ import annotations

from collections.abc import Callable

from lipaudit.errors import InputError, UsageError, suggestion
from lipaudit.report.page.samples.figures import figures
from lipaudit.report.page.views.common import CHARACTERS
from lipaudit.results import Report
from lipaudit.results.worst import SHOWN as MOST
from lipaudit.results.worst import broken


def chosen(report: Report, said: str) -> str:
    """Return the id of a sample that is named by it, by its first characters or by its place.

    Raises:
        InputError: the report has no samples.
        UsageError: none is named so, or several.
    """
    require_samples(report)
    every, at = known(report), report.found("place")
    ways: tuple[Callable[[str], bool], ...] = (
        lambda i: i == said,
        lambda i: i in at and said in (at[i], _last(at[i])),
        lambda i: i.startswith(said),
    )
    named = next(filter(None, ([i for i in every if way(i)] for way in ways)), [])
    if len(named) == 1:
        return named[0]
    if not named:
        names = [*(i[:CHARACTERS] for i in every), *at.values()]
        advice = "Name one by its id or place; lipaudit inspect REPORT lists the worst."
        raise UsageError(f"the report has no sample {said!r}", suggestion(said, names, advice))
    some = ", ".join(f"{i[:CHARACTERS]} ({at[i]})" if i in at else i for i in named[:MOST])
    raise UsageError(f"{said!r} is {len(named)} samples", f"There are: {some}.")


def _last(place: str) -> str:
    """Return the number of a place, or the name of its file."""
    return place.partition(",")[0].replace("/", " ").rpartition(" ")[2]


def known(report: Report) -> list[str]:
    """Return every sample of which something is known."""
    measured = (i for section in report.sections for i in section.ids)
    return list(dict.fromkeys([*measured, *report.found("place")]))


def ranked(report: Report) -> bool:
    """Tell whether a report knows which of its samples are the worst."""
    return any(f.name == "norm" for f in figures(report)) or bool(broken(report))


def require_samples(report: Report) -> None:
    """Refuse a report that has no samples.

    Raises:
        InputError: with what to type for one that has.
    """
    if not any(section.ids for section in report.sections):
        raise InputError(
            "the report says nothing of single samples",
            "bounds, jacobian, attack and certify do: lipaudit audit MODEL has most of them.",
        )
