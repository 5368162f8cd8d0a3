"""A history: what was measured of a model while it was trained, one point per step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from lipaudit.results.certify import CertifyRow
from lipaudit.results.columns import Column, Float, Frozen
from lipaudit.results.figures import finite, typed
from lipaudit.results.report import Report
from lipaudit.results.rows import AttackRow, AttentionRow, BoundsRow, JacobianRow
from lipaudit.results.summary import Accuracy, Summary, summary

HISTORY_VERSION = "1.0"

KINDS = {
    "clean": ("clean accuracy", AttackRow.columns()["clean"]),
    "attacked": ("under attack", AttackRow.columns()["robust"]),
    "certified": ("certified", CertifyRow.columns()["certified"]),
}
"""How each accuracy is called, and how it reads."""


class Point(Frozen):
    """What was measured at one step.

    Attributes:
        step: of the training.
        session: the process that trained meanwhile; empty where checkpoints were measured.
        epoch: of the training, where it is known.
        time: when.
        seconds: what measuring took.
        share: of the time since the training began, what all measuring has taken; None where
            nothing was trained meanwhile.
        checkpoint: the file or directory that was measured, within the watched one.
        state: its size and time of change, by which a new one is told.
        suite: identity of the samples.
        report: the full report, relative to the history; empty where none is kept.
        failures: why measures have no figures, by their name.
        figures: the training's own, as they were given.
        summary: of the report.
        heads: the exact norm of every head (median over samples), by LAYER.HEAD.
    """

    step: int
    session: str = ""
    epoch: Float | None = None
    time: str
    seconds: Float
    share: Float | None = None
    checkpoint: str = ""
    state: str = ""
    suite: str = ""
    report: str = ""
    failures: dict[str, str] = {}
    figures: dict[str, Float] = {}
    summary: Summary = Summary()
    heads: dict[str, Float] = {}


class History(Frozen):
    """The points of a training, in the order of their steps.

    Attributes:
        model: what was watched.
        data: where its samples come from.
        measures: the options of each measure.
        options: what else decides the figures: seed, precision, how model and data are read.
        points: one per step.
    """

    schema_: Literal["lipaudit.history"] = Field("lipaudit.history", alias="schema")
    schema_version: str = HISTORY_VERSION
    lipaudit: str
    created: str
    model: str
    data: str
    measures: dict[str, dict[str, Any]] = {}
    options: dict[str, Any] = {}
    points: tuple[Point, ...] = ()

    def with_points(self, points: Iterable[Point]) -> History:
        """Return it with more points, in the order in which they were measured.

        Of several points of a step the last counts. A training that went back to an earlier step,
        to go on from a checkpoint, say, goes on from there: what it had beyond is superseded.
        """
        steps: dict[int, Point] = {point.step: point for point in self.points}
        session = self.points[-1].session if self.points else ""
        for point in points:
            if point.session != session:
                steps = {step: kept for step, kept in steps.items() if step < point.step}
            session = point.session
            steps[point.step] = point
        ordered = tuple(steps[step] for step in sorted(steps))
        return self.model_copy(update={"points": ordered})


@dataclass(frozen=True)
class Reading:
    """One figure of a summary.

    Attributes:
        name: by which a store of metrics keeps it.
        label: as a page calls it.
        group: the figures that share a picture with it.
        column: how it reads.
        value: the figure.
        low: lower limit, where it has one.
        high: upper limit.
    """

    name: str
    label: str
    group: Literal["accuracy", "norm", "heads", "fragile"]
    column: Column
    value: float
    low: float | None = None
    high: float | None = None


def readings(summed: Summary) -> Iterator[Reading]:
    """Yield the figures of a summary that a training is watched by."""
    yield from map(_accuracy, summed.accuracy)
    columns = JacobianRow.columns()
    for name in ("median", "p95", "max") if summed.norms else ():
        for value in finite([getattr(summed.norms, name)]):
            label = f"Jacobian norm, {name}"
            yield Reading(f"jacobian_norm/{name}", label, "norm", columns[name], value)
    if summed.heads:
        exact, steepest = BoundsRow.columns()["exact"], summed.heads.steepest[0].exact
        for name, label, value in (
            ("steepest", "steepest head, ||J||", steepest),
            ("median", "median head, ||J||", summed.heads.median),
        ):
            yield Reading(f"heads/{name}", label, "heads", exact, value)
    if summed.fragile:
        column, share = AttentionRow.columns()["intermediate"], summed.fragile.share
        yield Reading("fragile_rows", "fragile rows", "fragile", column, share)


def _accuracy(one: Accuracy) -> Reading:
    label, column = KINDS[one.kind]
    ball = re.sub(r"[^A-Za-z0-9.]+", "_", f"{one.norm} {one.eps}")
    name = f"{one.kind}_accuracy" + (f"/{ball}" if one.norm else "")
    label += f", {one.ball}" if one.ball else ""
    return Reading(name, label, "accuracy", column, one.share, one.low, one.high)


def measured(report: Report, /, **known: Any) -> Point:
    """Return the point of a report.

    Args:
        report: what was measured.
        known: what the report does not say: step, seconds, figures...
    """
    rows = typed(report.section("bounds"), BoundsRow)
    return Point(
        time=report.run.created,
        suite=report.run.data.suite_id,
        failures={name: failure.reason for name, failure in report.failures.items()},
        summary=summary(report),
        heads={f"{r.layer}.{r.head}": float(f"{r.exact:.6g}") for r in rows if finite([r.exact])},
        **known,
    )
