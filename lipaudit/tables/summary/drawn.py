"""How the summary of a report is drawn from its sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from lipaudit.tables.bounds import ranked
from lipaudit.tables.columns import Row
from lipaudit.tables.figures import (
    finite,
    largest,
    log10_ratio,
    median_limits,
    middle,
    order,
    wilson,
)
from lipaudit.tables.report import Note, Report, Section, rows_of
from lipaudit.tables.samples import is_repeat
from lipaudit.tables.summary.records import (
    Accuracy,
    Fragile,
    Head,
    Heads,
    Norms,
    Radii,
    Summary,
    Tightness,
    Warned,
)
from lipaudit.tables.trials import WORST, parse_radius
from lipaudit.tables.worst import contradictions

STEEPEST = 3
"""How many heads are named."""
HALF = 0.5
"""A head is called fragile when more than this share of its rows is."""
FEW = 0.05
"""Where fewer rows than this are intermediate, a penalty has nothing to pull."""


def summary(report: Report) -> Summary:
    """Sum a report up; what its sections do not say is left out."""
    bounds = rows_of(report.section("bounds"))
    attacks = rows_of(report.section("attack"))
    certified = rows_of(report.section("certify"))
    balls = (*_attacked(attacks), *_certified(certified, attacks))
    return Summary(
        warnings=tuple(_warned(report)),
        accuracy=(*_clean(report), *sorted(balls, key=_ball)),
        radii=_radii(report),
        norms=_norms(report.section("jacobian")),
        heads=_heads(bounds),
        fragile=_fragile(report.section("attention")),
        bounds=tuple(_tightness(bounds)),
    )


def shared(report: Report) -> list[Note]:
    """Return the notes that every measure has: on the model and the data, not on some figures."""
    if not report.sections:
        return []
    first, *others = [s for s in report.sections if "." not in s.measure] or report.sections
    return [note for note in first.notes if all(note in section.notes for section in others)]


def _warned(report: Report) -> Iterator[Warned]:
    yield from _contradicted(report)
    given = [("", note) for note in shared(report)]
    given += [(section.measure, note) for section in report.sections for note in section.notes]
    owners: dict[Note, str] = {}
    for measure, note in given:
        if note.level == "warning":
            owners.setdefault(note, measure)
    for note, measure in owners.items():
        yield Warned(measure=measure, code=note.code, text=note.text)


def _contradicted(report: Report) -> Iterator[Warned]:
    """Yield what would show that a certificate or an attack is wrong, if it ever came to that."""
    known = contradictions(report)
    if known:
        sample, ball, trial = known[0]
        by = f" by {trial.attack}" if trial.attack else ""
        text = (
            f"a contradiction: sample {sample} is certified in {ball.ball} and was broken{by} in "
            f"{trial.ball} (such samples: {len(known)}). One of the two is wrong: trust neither, "
            "try --dtype float64, and report it as a fault of lipaudit"
        )
        yield Warned(measure="", code="contradiction", text=text)


def _clean(report: Report) -> Iterator[Accuracy]:
    """Count what is right without attack, on the samples that were attacked if there are any."""
    for measure in ("attack", "jacobian", "certify"):
        section = report.section(measure)
        cells = section.samples.get("correct", ()) if section else ()
        pairs = zip(section.ids if section else (), cells, strict=False)
        flags = finite(flag for name, flag in pairs if not is_repeat(name))
        if flags:
            right = sum(flag > 0 for flag in flags)
            low, high = wilson(right, len(flags))
            yield Accuracy(
                kind="clean", share=right / len(flags), low=low, high=high, samples=len(flags)
            )
            return


def _attacked(rows: Sequence[Row]) -> Iterator[Accuracy]:
    balls: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        balls.setdefault((row.norm, row.eps), []).append(row)
    for group in balls.values():
        tried = tuple(row.attack for row in group if row.attack != WORST)
        worst = [row for row in group if row.attack == WORST] or group[:1] * (len(group) == 1)
        for row in worst:
            if row.robust is not None:
                yield Accuracy(
                    kind="attacked",
                    norm=row.norm,
                    eps=row.trial.radius.text,
                    ball=row.trial.ball,
                    attacks=tried,
                    share=row.robust,
                    low=row.robust_low,
                    high=row.robust_high,
                    samples=row.samples,
                )


def _ball(accuracy: Accuracy) -> tuple[bool, str, float]:
    return accuracy.kind == "certified", accuracy.norm, float(parse_radius(accuracy.eps))


def _certified(rows: Sequence[Row], attacks: Sequence[Row]) -> Iterator[Accuracy]:
    """Yield what is proven of each ball, and what attacks left of it where none else says so."""
    said = {(row.norm, row.eps) for row in attacks}
    for row in rows:
        ball: Any = {"norm": row.norm, "eps": row.trial.radius.text, "ball": row.trial.ball}
        ball["samples"] = row.samples
        if row.robust is not None and (row.norm, row.eps) not in said:
            low, high = row.robust_low, row.robust_high
            yield Accuracy(kind="attacked", share=row.robust, low=low, high=high, **ball)
        if row.certified is not None:
            yield Accuracy(
                kind="certified",
                share=row.certified,
                low=row.certified_low,
                high=row.certified_high,
                undecided=row.undecided,
                **ball,
            )


def _radii(report: Report) -> Radii | None:
    rows = rows_of(report.section("certify.radius"))
    if not rows or not finite([rows[0].radius]):
        return None
    row, section = rows[0], report.section("certify")
    limits = median_limits(section.samples.get("radius", ()) if section else ())
    low, high = limits or (None, None)
    return Radii(
        norm=row.norm,
        median=order(row.radius),
        low=low,
        high=high,
        adversarial=row.radius_adversarial,
        samples=row.samples,
    )


def _norms(section: Section | None) -> Norms | None:
    rows = [row for row in rows_of(section) if not row.module]
    if section is None or not rows or not finite((rows[0].median, rows[0].max)):
        return None
    row = rows[0]
    return Norms(
        start=row.from_,
        end=row.to,
        norm=row.norm,
        median=row.median,
        p95=row.p95,
        max=row.max,
        sample=_most_sensitive(section),
        samples=row.samples,
        converged=row.converged,
    )


def _most_sensitive(section: Section) -> str:
    """Return the id of the sample with the largest norm, empty where none is known."""
    ids, norms = (section.samples.get(name, ()) for name in ("ids", "norm"))
    known = [(v, str(i)) for i, v in zip(ids, norms, strict=False) if finite([v])]
    return max(known, key=lambda pair: order(pair[0]))[1] if known else ""


def _heads(rows: Sequence[Row]) -> Heads | None:
    known = [row for row in rows if finite([row.exact])]
    if not known:
        return None
    steepest = tuple(
        Head(layer=row.layer, head=row.head, exact=order(row.exact))
        for row in largest(known, "exact", STEEPEST)
    )
    typical = median(finite(row.exact for row in known))
    return Heads(steepest=steepest, median=typical, heads=len(known))


def steepest(sections: Iterable[Section], count: int) -> list[str]:
    """Return the heads of the largest exact norms as LAYER.HEAD, the largest first."""
    rows = [row for section in sections if section.measure == "bounds" for row in section.rows]
    return [f"{row.layer}.{row.head}" for row in largest(rows, "exact", count)]


def _fragile(section: Section | None) -> Fragile | None:
    """Choose, too, the penalty that pulls rows to the side where the model's rows already lie.

    JaSMin k = 0 lowers g1 itself, towards uniform or one-hot rows; k > 1 lowers g1 / g_k, which
    flattens one-hot rows too and leaves rows with at most k keys out.
    """
    rows = [row for row in rows_of(section) if finite([row.intermediate])]
    if section is None or not rows:
        return None
    shares = {n: _mean(rows, n) for n in ("intermediate", "uniform", "categorical")}
    flat = shares["uniform"] > shares["categorical"]
    k: Any = section.settings.get("k", 10)
    long = isinstance(k, int) and max(row.tokens for row in rows) > k
    pulled = (k if flat and long else 0) if shares["intermediate"] >= FEW else None
    return Fragile(
        share=shares["intermediate"],
        heads=sum(order(row.intermediate) > HALF for row in rows),
        of=len(rows),
        side="uniform" if flat else "one-hot",
        k=pulled,
    )


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(finite(row[name] for row in rows)) / len(rows)


def _tightness(rows: Sequence[Row]) -> Iterator[Tightness]:
    for bound in ranked():
        logs = finite(log10_ratio(row, bound.name) for row in rows)
        typical = middle(logs)
        if typical is not None:
            yield Tightness(
                bound=bound.name,
                status=bound.status,
                median=_power(typical),
                largest=_power(max(logs)),
                heads=len(logs),
            )


def _power(logarithm: float) -> float:
    """Return 10 to a power, infinite where that is no number of the machine."""
    return 10**logarithm if logarithm < 308 else math.inf
