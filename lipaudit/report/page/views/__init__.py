"""What is shown of each section, and of the sections of several reports side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from lipaudit.report.blocks import Block, Notes, Paragraph
from lipaudit.report.page.remarks import merged
from lipaudit.report.page.views import (
    attack,
    attention,
    bounds,
    certify,
    default,
    jacobian,
    scaling,
)
from lipaudit.report.page.views.common import SideBySide, View, located
from lipaudit.results import Note, Section, row_types
from lipaudit.results.report import Failure

VIEWS: dict[str, View] = {
    "bounds": bounds.view,
    "bounds.ball": bounds.ball_view,
    "attention": attention.view,
    "jacobian": jacobian.view,
    "attack": attack.view,
    "certify": certify.view,
    "certify.radius": certify.radius_view,
    "scaling": scaling.view,
    "scaling.fit": scaling.fit_view,
}
"""View of each section; `default` shows a section without one."""

SIDE_BY_SIDE: dict[str, SideBySide] = {
    "bounds": bounds.side_by_side,
    "bounds.layers": bounds.layers_side_by_side,
    "bounds.ball": bounds.balls_side_by_side,
    "attention": attention.side_by_side,
    "jacobian": jacobian.side_by_side,
    "attack": attack.side_by_side,
    "certify": certify.side_by_side,
    "scaling": scaling.side_by_side,
    "scaling.fit": scaling.fit_side_by_side,
}
"""How each section of several reports is shown; `default` for one without an entry."""


def title(measure: str) -> str:
    """Return the heading of a section."""
    return row_types()[measure].title or measure


def blocks(
    section: Section,
    said: Collection[Note] = (),
    known: Mapping[str, str] = MappingProxyType({}),
    settings: Mapping[str, Any] | None = None,
) -> tuple[Block, ...]:
    """Return what is shown of a section: settings, warnings, figures and tables, other notes.

    Of one that failed: why.

    Args:
        section: what is shown.
        said: notes that stand above it already.
        known: where samples are found, by id.
        settings: those that are written; by default all of its own.
    """
    if section.failure is not None:
        return (failed(section.failure),)
    own = section.settings if settings is None else settings
    idle = OF_COLUMNS.get(section.measure, frozenset()) - section.samples.keys()
    ran = _listed({name: value for name, value in own.items() if name not in idle})
    notes = [note for note in section.notes if note not in said]
    spoiling, others = (
        merged(n for n in notes if (n.level == "warning") == w) for w in (True, False)
    )
    view = VIEWS.get(section.measure, default.view)
    return (
        *([Notes(spoiling)] if spoiling else []),
        *([Paragraph(f"Settings: {ran}.")] if ran else []),
        *((located(b, known) for b in view(section)) if _measured(section) else [NOTHING]),
        *([Notes(others)] if others else []),
    )


def side_by_side(sections: Mapping[str, Section]) -> tuple[Block, ...]:
    """Return what is shown of one measure over several reports, by the report's label."""
    filled = {label: section for label, section in sections.items() if _measured(section)}
    lost = [
        Paragraph(f"{label}: {failed(section.failure).text}")
        for label, section in sections.items()
        if section.failure is not None
    ]
    if not filled:
        return tuple(lost) or (NOTHING,)
    view = SIDE_BY_SIDE.get(next(iter(filled.values())).measure, default.side_by_side)
    return (*lost, *view(filled))


def _measured(section: Section) -> bool:
    """Tell whether there is anything to show: rows, or what is told of every sample."""
    return bool(section.rows or len(section.samples) > 1)


def failed(failure: Failure) -> Paragraph:
    """Say why a measure has no result."""
    advice = f" {failure.advice}" if failure.advice else ""
    return Paragraph(f"FAILED: {failure.reason}.{advice}")


def _listed(settings: Mapping[str, Any]) -> str:
    """Write settings; of what is switched on the name, and nothing of what is off or not given."""
    own = {k: v for k, v in settings.items() if k != SEED and v is not False}
    given = {name: value for name, value in own.items() if value not in (None, [], ())}
    return "; ".join(
        name if value is True else f"{name} {listed(value)}" for name, value in given.items()
    )


def listed(value: Any) -> str:
    """Write a setting; lists without brackets."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


OF_COLUMNS = {"jacobian": frozenset({"rivals"})}
"""Settings of a column of the same name, by measure: without that they did nothing."""
SEED = "seed"
"""A setting that is the run's: the facts of the page have it."""
NOTHING = Paragraph("No rows: nothing was measured.")
