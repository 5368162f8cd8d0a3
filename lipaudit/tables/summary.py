"""The scorecard of a report as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any, Literal

from lipaudit.tables import columns
from lipaudit.tables.columns import Float, Frozen, finite, group_values, order
from lipaudit.tables.report import Note, Report, Section
from lipaudit.tables.trials import WORST, is_repeat, parse_radius
from lipaudit.tables.weakest import contradictions


class Accuracy(Frozen):
    """A share of samples that are right, with its 95 % limits (Wilson).

    Attributes:
        kind: clean, corrupted (mean over corruptions), attacked (no attack broke it), certified
            (no attack can break it) or smoothed (certified by votes under noise).
        norm: norm of the ball; empty without attack.
        eps: its radius as typed.
        ball: the ball in words.
        attacks: the attacks.
        share: share of the samples.
        low: lower limit.
        high: upper limit.
        samples: number of samples.
        undecided: for certificates, number of samples neither certified nor broken.
    """

    kind: Literal["clean", "corrupted", "attacked", "certified", "smoothed"]
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
    """Certified radii of the samples.

    Attributes:
        norm: norm of the balls.
        median: median certified radius of the correct samples.
        low: lower 95 % limit of that median; None with too few samples.
        high: upper 95 % limit.
        adversarial: median of the smallest adversarial radii found.
        samples: number of correct samples.
    """

    norm: str
    median: Float
    low: Float | None
    high: Float | None
    adversarial: Float | None
    samples: int


class ModelNorms(Frozen):
    """The Jacobian norms of the model over the samples; `sample` has the largest.

    `low` and `high` are 95 % limits of the median (order statistics); None with too few samples.
    """

    start: str
    end: str
    norm: str
    median: Float | None
    low: Float | None
    high: Float | None
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


class SteepestHeads(Frozen):
    """The heads that amplify most, steepest first, beside all of them."""

    steepest: tuple[Head, ...]
    median: Float
    heads: int


class Fragile(Frozen):
    """The share of attention rows in the fragile regime.

    Attributes:
        share: share of fragile rows, mean over heads.
        heads: number of heads with more than half of their rows there.
        of: number of heads.
        side: the regime of most other rows.
        k: k of the JaSMin penalty that moves rows to that side; None if none helps.
    """

    share: Float
    heads: int
    of: int
    side: Literal["uniform", "one-hot"]
    k: int | None


class HeadShare(Frozen):
    """The share of a head in the sensitivity (median over samples)."""

    layer: int
    head: int
    share: Float


class Sources(Frozen):
    """Where the sensitivity comes from: shares of it (median over samples), which overlap.

    Attributes:
        attention: share that passes any attention; None if unknown, as the next two.
        patterns: share that passes any attention map.
        mlps: share that passes any branch without attention.
        largest: the head with the largest share.
        steepest: the share of the steepest head; None if its norm or its share is unknown.
        samples: number of samples.
    """

    attention: Float | None
    patterns: Float | None
    mlps: Float | None
    largest: HeadShare
    steepest: HeadShare | None = None
    samples: int


class Tightness(Frozen):
    """How many times a bound exceeds the exact norm, over heads."""

    bound: str
    status: columns.Status
    median: Float
    largest: Float
    heads: int


class Summary(Frozen):
    """The content of a scorecard.

    Attributes:
        warnings: warnings, those on all figures first; others begin with their measure.
        accuracy: clean, then under attack by ball, then certified.
        radii: certified radii.
        norms: norms of the model's Jacobian.
        sources: where the sensitivity comes from.
        heads: the steepest heads.
        fragile: fragile attention rows.
        bounds: tightness of the bounds, in the order of tables.
    """

    warnings: tuple[Note, ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    radii: Radii | None = None
    norms: ModelNorms | None = None
    sources: Sources | None = None
    heads: SteepestHeads | None = None
    fragile: Fragile | None = None
    bounds: tuple[Tightness, ...] = ()


# From the sections of a report


# Number of heads that are listed.
STEEPEST = 3
# A head is called fragile when more than this share of its rows is.
HALF = 0.5
# With a smaller share of intermediate rows, a penalty has no effect.
FEW = 0.05
# With a smaller share of the sensitivity in attention maps, a penalty on maps can gain little.
LITTLE = 0.2


def summary(report: Report) -> Summary:
    """Return the summary of a report; figures that it lacks are left out."""

    def rank(accuracy: Accuracy) -> tuple[bool, str, float]:
        # The clean one has no norm: it is the first.
        radius = parse_radius(accuracy.eps or "0")
        proven = accuracy.kind in ("certified", "smoothed")
        return proven, accuracy.norm, float(radius)

    readers: dict[str, tuple[str, Callable[[Section], Any]]] = {
        "radii": ("certify.radius", partial(_make_radii, report.section("certify"))),
        "norms": ("jacobian", _make_norms),
        "sources": ("jacobian.shares", partial(_make_sources, report.section("bounds"))),
        "heads": ("bounds", _make_heads),
        "fragile": ("attention", _make_fragile),
        "bounds": ("bounds", _list_tightness),
    }
    figures: dict[str, Any] = {}
    for name, (measure, read) in readers.items():
        section = report.section(measure)
        if section is not None and section.rows:
            figures[name] = read(section)
    sources = figures.get("sources")
    fragile = figures.get("fragile")
    if sources and fragile and sources.patterns is not None and sources.patterns < LITTLE:
        figures["fragile"] = fragile.model_copy(update={"k": None})
    return Summary(
        warnings=tuple(_list_warnings(report)),
        accuracy=tuple(sorted(_list_accuracies(report), key=rank)),
        **figures,
    )


def list_shared_notes(report: Report) -> list[Note]:
    """Return the notes that all measures share: on model and data, not on single figures."""
    if not report.sections:
        return []
    main = [section for section in report.sections if "." not in section.measure]
    first, *others = main or report.sections
    shared = list(first.notes)
    for section in others:
        shared = [note for note in shared if note in section.notes]
    return shared


def _list_warnings(report: Report) -> Iterator[Note]:
    known = contradictions(report)
    if known:  # one of the two results is wrong
        sample, ball, trial = known[0]
        by = ""
        if trial.attack:
            by = f" by {trial.attack}"
        text = (
            f"a contradiction: sample {sample} is certified in {ball.ball} and was broken{by} "
            f"in {trial.ball} (such samples: {len(known)}). One of the two is wrong: try "
            "--dtype float64, and report this as a bug in lipaudit"
        )
        yield Note.warn("contradiction", text)
    # The measure that leads each note: that of the first section, none of a shared note.
    leads: dict[Note, str] = dict.fromkeys(list_shared_notes(report), "")
    for section in report.sections:
        for note in section.notes:
            leads.setdefault(note, section.measure)
    for note, measure in leads.items():
        if note.level == "warning":
            yield note.add_lead(measure)


def _list_accuracies(report: Report) -> Iterator[Accuracy]:
    """Yield the accuracy without attack, those under attack by ball, and the certified ones."""
    for measure in ("attack", "jacobian", "certify", "corrupt"):
        clean = _make_clean(report.section(measure))
        if clean is not None:
            yield clean
            break
    rows = {section.measure: section.rows for section in report.sections}
    balls = group_values(((row.norm, row.eps), row) for row in rows.get("attack", ()))
    for group in balls.values():
        tried = tuple(row.attack for row in group if row.attack != WORST)
        worst = [row for row in group if row.attack == WORST]
        if not worst and len(group) == 1:
            worst = group
        for row in worst:
            yield from _make_accuracy("attacked", "robust", row, attacks=tried)
    for row in rows.get("certify", ()):
        # Robust accuracy comes from certificates only if no attack section has the ball.
        if (row.norm, row.eps) not in balls:
            yield from _make_accuracy("attacked", "robust", row)
        yield from _make_accuracy("certified", "certified", row, undecided=row.undecided)
    for row in rows.get("smoothing", ()):
        yield from _make_accuracy("smoothed", "certified", row)
    for row in rows.get("corrupt", ()):
        if row.corruption == "mean":
            yield from _make_accuracy("corrupted", "accuracy", row)


def _make_clean(section: Section | None) -> Accuracy | None:
    """Return the accuracy without attack on the samples of a section; repeats count once."""
    if section is None:
        return None
    flags = finite(_list_unrepeated(section, "correct"))
    if not flags:
        return None
    right = sum(flag > 0 for flag in flags)
    samples = len(flags)
    low, high = columns.wilson(right, samples)
    return Accuracy(kind="clean", share=right / samples, low=low, high=high, samples=samples)


def _list_unrepeated(section: Section, name: str) -> Iterator[Any]:
    """Yield the cells of a per-sample column without repeated samples."""
    cells = section.samples.get(name, ())
    for sample, cell in zip(section.ids, cells, strict=False):
        if not is_repeat(sample):
            yield cell


def _make_accuracy(kind: Any, name: str, row: columns.Row, **others: Any) -> Iterator[Accuracy]:
    """Yield the share in the column `name` of a row with its limits; nothing without a share."""
    if row[name] is None:
        return
    if row.key is not None:
        others["norm"] = row.norm
        others["eps"] = row.trial.radius.text
        others["ball"] = row.trial.ball
    yield Accuracy(
        kind=kind,
        share=row[name],
        low=row[f"{name}_low"],
        high=row[f"{name}_high"],
        samples=row.samples,
        **others,
    )


def _make_radii(balls: Section | None, section: Section) -> Radii | None:
    row = section.rows[0]
    if not finite([row.radius]):
        return None
    proven: Iterable[Any] = ()
    if balls is not None:
        proven = balls.samples.get("radius", ())
    low, high = columns.median_limits(proven) or (None, None)
    return Radii(
        norm=row.norm,
        median=order(row.radius),
        low=low,
        high=high,
        adversarial=row.radius_adversarial,
        samples=row.samples,
    )


def _make_norms(section: Section) -> ModelNorms | None:
    rows = [row for row in section.rows if not row.module]
    if not rows or not finite((rows[0].median, rows[0].max)):
        return None
    row = rows[0]
    norms = dict(zip(section.ids, section.samples.get("norm", ()), strict=False))
    # The sample with the largest norm; empty if unknown.
    known = [sample for sample, norm in norms.items() if finite([norm])]
    steepest = max(known, key=lambda sample: order(norms[sample]), default="")
    low, high = columns.median_limits(norms.values()) or (None, None)
    return ModelNorms(
        start=row.from_,
        end=row.to,
        norm=row.norm,
        median=row.median,
        low=low,
        high=high,
        p95=row.p95,
        max=row.max,
        sample=steepest,
        samples=row.samples,
        converged=row.converged,
    )


def _make_sources(bounds: Section | None, section: Section) -> Sources | None:
    """Summarise the shares; repeated samples count once."""
    known = [row for row in section.rows if finite([row.share])]
    if not known:
        return None
    shares: dict[tuple[int, int], HeadShare] = {}
    for row in known:
        share = HeadShare(layer=row.layer, head=row.head, share=row.share)
        shares[row.layer, row.head] = share
    first = columns.largest(known, "share", 1)[0]
    steepest = None
    if bounds is not None:
        for row in columns.largest(bounds.rows, "exact", 1):
            steepest = shares.get((row.layer, row.head))
    return Sources(
        attention=columns.middle(_list_unrepeated(section, "attention")),
        patterns=columns.middle(_list_unrepeated(section, "patterns")),
        mlps=columns.middle(_list_unrepeated(section, "mlps")),
        largest=shares[first.layer, first.head],
        steepest=steepest,
        samples=first.samples,
    )


def _make_heads(section: Section) -> SteepestHeads | None:
    known = [row for row in section.rows if finite([row.exact])]
    if not known:
        return None
    steepest = []
    for row in columns.largest(known, "exact", STEEPEST):
        head = Head(layer=row.layer, head=row.head, exact=order(row.exact))
        steepest.append(head)
    typical = median(finite(row.exact for row in known))
    return SteepestHeads(steepest=tuple(steepest), median=typical, heads=len(known))


def steepest(sections: Iterable[Section], count: int) -> list[str]:
    """Return the heads with the largest exact norms as LAYER.HEAD, largest first."""
    rows: list[columns.Row] = []
    for section in sections:
        if section.measure == "bounds":
            rows += section.rows
    return [f"{row.layer}.{row.head}" for row in columns.largest(rows, "exact", count)]


def _make_fragile(section: Section) -> Fragile | None:
    """Summarise fragile rows, and choose the penalty that moves rows to their nearer regime.

    JaSMin with k = 0 lowers g1, towards uniform or one-hot rows. With k > 1 it lowers g1 / g_k,
    which also flattens one-hot rows, and ignores rows with at most k keys.
    """
    rows = [row for row in section.rows if finite([row.intermediate])]
    if not rows:
        return None
    shares = {}
    for name in ("intermediate", "uniform", "categorical"):
        total = sum(finite(row[name] for row in rows))
        shares[name] = total / len(rows)
    side: Literal["uniform", "one-hot"] = "one-hot"
    if shares["uniform"] > shares["categorical"]:
        side = "uniform"
    # A row of n <= k keys has no g_k: with short rows only k = 0 affects all rows.
    k: Any = section.settings.get("k", 10)
    has_long_rows = isinstance(k, int) and max(row.tokens for row in rows) > k
    penalty = None
    if shares["intermediate"] >= FEW:
        penalty = 0
        if side == "uniform" and has_long_rows:
            penalty = k
    return Fragile(
        share=shares["intermediate"],
        heads=sum(order(row.intermediate) > HALF for row in rows),
        of=len(rows),
        side=side,
        k=penalty,
    )


def _list_tightness(section: Section) -> Iterator[Tightness]:
    for name, column in columns.find_bounds(section.columns).items():
        logs = finite(columns.log10_ratio(row, name) for row in section.rows)
        if logs:
            yield Tightness(
                bound=name,
                status=column.status,
                median=_raise_ten(median(logs)),
                largest=_raise_ten(max(logs)),
                heads=len(logs),
            )


def _raise_ten(exponent: float) -> float:
    """Return 10^exponent; infinity above the largest float, 1.8e308."""
    if exponent < 308:
        return float(10**exponent)
    return math.inf
