"""The scorecard of a report as data: what a reader is told first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Literal

from lipaudit.tables.bounds import ranked
from lipaudit.tables.columns import Float, Frozen, Row, Status
from lipaudit.tables.common import ACCURACY, CERTIFIED_SHARE
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
from lipaudit.tables.trials import WORST, parse_radius
from lipaudit.tables.worst import contradictions

KINDS = {
    "clean": ("clean accuracy", ACCURACY["clean"]),
    "attacked": ("robust accuracy", ACCURACY["robust"]),
    "certified": ("certified accuracy", CERTIFIED_SHARE),
}
"""The label and the column of each kind of accuracy."""


class Accuracy(Frozen):
    """A share of samples that are right, with its 95 % limits (Wilson).

    Attributes:
        kind: without attack; what no attack of a ball broke; what is proven that none can break.
        norm: of the ball; empty without attack.
        eps: its radius as it was typed.
        ball: both, as people say it.
        attacks: those that were tried.
        share: of the samples.
        low: lower limit.
        high: upper limit.
        samples: how many.
        undecided: of a certificate, how many are neither proven nor broken.
    """

    kind: Literal["clean", "attacked", "certified"]
    norm: str = ""
    eps: str = ""
    ball: str = ""
    attacks: tuple[str, ...] = ()
    share: Float
    low: Float | None
    high: Float | None
    samples: int
    undecided: int | None = None


class Radii(Frozen):
    """How far around the samples nothing is classified otherwise, proven.

    Attributes:
        norm: of the balls.
        median: of the certified radii of the samples that are right.
        low: lower limit of that median, of 95 %; None where samples are too few for limits.
        high: upper limit.
        adversarial: the median of the smallest adversarial radii found.
        samples: how many are right.
    """

    norm: str
    median: Float
    low: Float | None
    high: Float | None
    adversarial: Float | None
    samples: int


class Norms(Frozen):
    """The Jacobian norms of the model over the samples; `sample` has the largest."""

    start: str
    end: str
    norm: str
    median: Float | None
    p95: Float | None
    max: Float | None
    sample: str
    samples: int
    converged: int


class Head(Frozen):
    """A head and its exact norm (median over samples)."""

    layer: int
    head: int
    exact: Float


class Heads(Frozen):
    """The heads that amplify most, steepest first, beside all of them."""

    steepest: tuple[Head, ...]
    median: Float
    heads: int


class Fragile(Frozen):
    """How many attention rows are in the fragile regime.

    Attributes:
        share: of all rows, the mean over heads.
        heads: how many have more than half of their rows there.
        of: how many heads there are.
        side: the regime of most other rows.
        k: of the JaSMin penalty that pulls rows to that side; None where nothing is to be pulled.
    """

    share: Float
    heads: int
    of: int
    side: Literal["uniform", "one-hot"]
    k: int | None


class Tightness(Frozen):
    """How many times a bound lies above the exact norm, over heads."""

    bound: str
    status: Status
    median: Float
    largest: Float
    heads: int


class Warned(Frozen):
    """A warning, and the measure whose figures it is about; empty: all of them."""

    measure: str
    code: str
    text: str


class Summary(Frozen):
    """What a report says in one screen.

    Attributes:
        warnings: what must be known before any figure, those on all figures first.
        accuracy: without attack, then under attack by ball, then certified.
        radii: that are certified.
        norms: of the model's Jacobian.
        heads: the steepest.
        fragile: attention rows.
        bounds: against the exact norms, in the order of tables.
    """

    warnings: tuple[Warned, ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    radii: Radii | None = None
    norms: Norms | None = None
    heads: Heads | None = None
    fragile: Fragile | None = None
    bounds: tuple[Tightness, ...] = ()


# From the sections of a report


STEEPEST = 3
"""Number of heads that are listed."""
HALF = 0.5
"""A head is called fragile when more than this share of its rows is."""
FEW = 0.05
"""With a smaller share of intermediate rows, a penalty has no effect."""


def summary(report: Report) -> Summary:
    """Sum a report up; what its sections do not say is left out."""
    bounds = rows_of(report.section("bounds"))
    attacks = rows_of(report.section("attack"))
    certified = rows_of(report.section("certify"))
    balls = (*_list_attacked(attacks), *_list_certified(certified, attacks))
    return Summary(
        warnings=tuple(_list_warnings(report)),
        accuracy=(*_count_correct(report), *sorted(balls, key=_sort_key)),
        radii=_make_radii(report),
        norms=_make_norms(report.section("jacobian")),
        heads=_make_heads(bounds),
        fragile=_make_fragile(report.section("attention")),
        bounds=tuple(_list_tightness(bounds)),
    )


def shared(report: Report) -> list[Note]:
    """Return the notes that every measure has: on the model and the data, not on some figures."""
    if not report.sections:
        return []
    first, *others = [s for s in report.sections if "." not in s.measure] or report.sections
    return [note for note in first.notes if all(note in section.notes for section in others)]


def _list_warnings(report: Report) -> Iterator[Warned]:
    yield from _list_contradictions(report)
    given = [("", note) for note in shared(report)]
    given += [(section.measure, note) for section in report.sections for note in section.notes]
    owners: dict[Note, str] = {}
    for measure, note in given:
        if note.level == "warning":
            owners.setdefault(note, measure)
    for note, measure in owners.items():
        yield Warned(measure=measure, code=note.code, text=note.text)


def _list_contradictions(report: Report) -> Iterator[Warned]:
    """Yield what would show that a certificate or an attack is wrong, if it ever came to that."""
    known = contradictions(report)
    if known:
        sample, ball, trial = known[0]
        by = f" by {trial.attack}" if trial.attack else ""
        text = (
            f"a contradiction: sample {sample} is certified in {ball.ball} and was broken{by} "
            f"in {trial.ball} (such samples: {len(known)}). One of the two is wrong: try "
            "--dtype float64, and report this as a bug in lipaudit"
        )
        yield Warned(measure="", code="contradiction", text=text)


def _count_correct(report: Report) -> Iterator[Accuracy]:
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


def _list_attacked(rows: Sequence[Row]) -> Iterator[Accuracy]:
    balls: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        balls.setdefault((row.norm, row.eps), []).append(row)
    for group in balls.values():
        tried = tuple(row.attack for row in group if row.attack != WORST)
        worst = [row for row in group if row.attack == WORST] or group[:1] * (len(group) == 1)
        for row in worst:
            if row.robust is not None:
                yield _make_accuracy("attacked", row, "robust", attacks=tried)


def _make_accuracy(
    kind: Literal["attacked", "certified"], row: Row, name: str, **more: Any
) -> Accuracy:
    """Return the accuracy of a ball: a column of its row, with its limits."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    more |= {"norm": row.norm, "eps": row.trial.radius.text, "ball": row.trial.ball}
    return Accuracy(kind=kind, share=row[name], low=low, high=high, samples=row.samples, **more)


def _sort_key(accuracy: Accuracy) -> tuple[bool, str, float]:
    return accuracy.kind == "certified", accuracy.norm, float(parse_radius(accuracy.eps))


def _list_certified(rows: Sequence[Row], attacks: Sequence[Row]) -> Iterator[Accuracy]:
    """Yield what is proven of each ball, and what attacks left of it where none else says so."""
    said = {(row.norm, row.eps) for row in attacks}
    for row in rows:
        if row.robust is not None and (row.norm, row.eps) not in said:
            yield _make_accuracy("attacked", row, "robust")
        if row.certified is not None:
            yield _make_accuracy("certified", row, "certified", undecided=row.undecided)


def _make_radii(report: Report) -> Radii | None:
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


def _make_norms(section: Section | None) -> Norms | None:
    rows = [row for row in rows_of(section) if not row.module]
    if section is None or not rows or not finite((rows[0].median, rows[0].max)):
        return None
    names = ("norm", "median", "p95", "max", "samples", "converged")
    figures = {name: rows[0][name] for name in names}
    return Norms(start=rows[0].from_, end=rows[0].to, sample=_name_largest(section), **figures)


def _name_largest(section: Section) -> str:
    """Return the id of the sample with the largest norm, empty where none is known."""
    ids, norms = (section.samples.get(name, ()) for name in ("ids", "norm"))
    known = [(v, str(i)) for i, v in zip(ids, norms, strict=False) if finite([v])]
    return max(known, key=lambda pair: order(pair[0]))[1] if known else ""


def _make_heads(rows: Sequence[Row]) -> Heads | None:
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


def _make_fragile(section: Section | None) -> Fragile | None:
    """Choose, too, the penalty that pulls rows to the side where the model's rows already lie.

    JaSMin k = 0 lowers g1 itself, towards uniform or one-hot rows; k > 1 lowers g1 / g_k, which
    flattens one-hot rows too and leaves rows with at most k keys out.
    """
    rows = [row for row in rows_of(section) if finite([row.intermediate])]
    if section is None or not rows:
        return None
    shares = {n: _average(rows, n) for n in ("intermediate", "uniform", "categorical")}
    flat = shares["uniform"] > shares["categorical"]
    # A row of n <= k keys has no g_k: with short rows only k = 0 pulls them all.
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


def _average(rows: Sequence[Row], name: str) -> float:
    return sum(finite(row[name] for row in rows)) / len(rows)


def _list_tightness(rows: Sequence[Row]) -> Iterator[Tightness]:
    for bound in ranked():
        logs = finite(log10_ratio(row, bound.name) for row in rows)
        typical = middle(logs)
        if typical is not None:
            yield Tightness(
                bound=bound.name,
                status=bound.status,
                median=_raise_ten(typical),
                largest=_raise_ten(max(logs)),
                heads=len(logs),
            )


def _raise_ten(logarithm: float) -> float:
    """Return 10 to a power, infinite where that is no number of the machine."""
    # The largest float is 1.8e308.
    return 10**logarithm if logarithm < 308 else math.inf
