"""The scorecard of a report as data, its worst samples, and contradictions in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

from lipaudit.tables import columns
from lipaudit.tables.columns import Float, Frozen, finite, group_values, order
from lipaudit.tables.report import Note, Report, Section
from lipaudit.tables.trials import WORST, Radius, TrialKey, is_repeat, parse_column, parse_radius


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

    def rank(a: Accuracy) -> tuple[bool, str, float]:  # the clean one has no norm: it is the first
        return a.kind in ("certified", "smoothed"), a.norm, float(parse_radius(a.eps or "0"))

    readers: dict[str, tuple[str, Callable[[Section], Any]]] = {
        "radii": ("certify.radius", partial(_make_radii, report.section("certify"))),
        "norms": ("jacobian", _make_norms),
        "sources": ("jacobian.shares", partial(_make_sources, report.section("bounds"))),
        "heads": ("bounds", _make_heads),
        "fragile": ("attention", _make_fragile),
        "bounds": ("bounds", _list_tightness),
    }
    figures = {
        name: read(section)
        for name, (measure, read) in readers.items()
        if (section := report.section(measure)) and section.rows
    }
    sources, fragile = figures.get("sources"), figures.get("fragile")
    if sources and fragile and sources.patterns is not None and sources.patterns < LITTLE:
        figures["fragile"] = fragile.model_copy(update={"k": None})
    warnings, accuracies = tuple(_list_warnings(report)), _list_accuracies(report)
    return Summary(warnings=warnings, accuracy=tuple(sorted(accuracies, key=rank)), **figures)


def list_shared_notes(report: Report) -> list[Note]:
    """Return the notes that all measures share: on model and data, not on single figures."""
    if not report.sections:
        return []
    first, *others = [s for s in report.sections if "." not in s.measure] or report.sections
    return [note for note in first.notes if all(note in section.notes for section in others)]


def _list_warnings(report: Report) -> Iterator[Note]:
    known = contradictions(report)
    if known:  # one of the two results is wrong
        sample, ball, trial = known[0]
        by = f" by {trial.attack}" if trial.attack else ""
        text = (
            f"a contradiction: sample {sample} is certified in {ball.ball} and was broken{by} "
            f"in {trial.ball} (such samples: {len(known)}). One of the two is wrong: try "
            "--dtype float64, and report this as a bug in lipaudit"
        )
        yield Note.warn("contradiction", text)
    given = [("", note) for note in list_shared_notes(report)]
    given += [(section.measure, note) for section in report.sections for note in section.notes]
    owners = group_values((note, name) for name, note in given if note.level == "warning")
    yield from (note.add_lead(measures[0]) for note, measures in owners.items())


def _list_accuracies(report: Report) -> Iterator[Accuracy]:
    """Yield the accuracy without attack, those under attack by ball, and the certified ones.

    The first is that of the attacked samples, if there are any. Robust accuracy comes from
    certificates only if no attack section has the ball.
    """
    for section in filter(None, map(report.section, ("attack", "jacobian", "certify", "corrupt"))):
        cells = zip(section.ids, section.samples.get("correct", ()), strict=False)
        if flags := finite(flag for name, flag in cells if not is_repeat(name)):
            right, n = sum(flag > 0 for flag in flags), len(flags)
            low, high = columns.wilson(right, n)
            yield Accuracy(kind="clean", share=right / n, low=low, high=high, samples=n)
            break
    rows = {section.measure: section.rows for section in report.sections}
    balls = group_values(((row.norm, row.eps), row) for row in rows.get("attack", ()))
    found: list[tuple[str, str, columns.Row, dict[str, Any]]] = []
    for group in balls.values():
        tried = tuple(row.attack for row in group if row.attack != WORST)
        worst = [row for row in group if row.attack == WORST] or group[:1] * (len(group) == 1)
        found += [("attacked", "robust", row, {"attacks": tried}) for row in worst]
    for row in rows.get("certify", ()):
        if (row.norm, row.eps) not in balls:
            found.append(("attacked", "robust", row, {}))
        found.append(("certified", "certified", row, {"undecided": row.undecided}))
    found += [("smoothed", "certified", row, {}) for row in rows.get("smoothing", ())]
    means = [row for row in rows.get("corrupt", ()) if row.corruption == "mean"]
    found += [("corrupted", "accuracy", row, {}) for row in means]
    for kind, name, row, more in found:
        if row[name] is not None:
            if row.key is not None:
                more |= {"norm": row.norm, "eps": row.trial.radius.text, "ball": row.trial.ball}
            known = {"share": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}
            yield Accuracy(kind=kind, samples=row.samples, **known, **more)


def _make_radii(balls: Section | None, section: Section) -> Radii | None:
    row = section.rows[0]
    if not finite([row.radius]):
        return None
    proven = balls.samples.get("radius", ()) if balls else ()
    low, high = columns.median_limits(proven) or (None, None)
    known = {"norm": row.norm, "median": order(row.radius), "samples": row.samples}
    return Radii(low=low, high=high, adversarial=row.radius_adversarial, **known)


def _make_norms(section: Section) -> ModelNorms | None:
    rows = [row for row in section.rows if not row.module]
    if not rows or not finite((rows[0].median, rows[0].max)):
        return None
    # The sample with the largest norm; empty if unknown.
    norms = dict(zip(section.ids, section.samples.get("norm", ()), strict=False))
    known = [name for name in norms if finite([norms[name]])]
    sample = max(known, key=lambda name: order(norms[name]), default="")
    names = ("norm", "median", "p95", "max", "samples", "converged")
    figures = {"start": rows[0].from_, "end": rows[0].to} | {n: rows[0][n] for n in names}
    low, high = columns.median_limits(norms.values()) or (None, None)
    return ModelNorms(sample=sample, low=low, high=high, **figures)


def _make_sources(bounds: Section | None, section: Section) -> Sources | None:
    """Summarise the shares; repeated samples count once."""
    known = [row for row in section.rows if finite([row.share])]
    if not known:
        return None
    shares = {
        (row.layer, row.head): HeadShare(layer=row.layer, head=row.head, share=row.share)
        for row in known
    }
    first = columns.largest(known, "share", 1)[0]
    steep = columns.largest(bounds.rows, "exact", 1) if bounds else []
    steepest = shares.get((steep[0].layer, steep[0].head)) if steep else None
    totals = {}
    for name in ("attention", "patterns", "mlps"):
        cells = zip(section.ids, section.samples.get(name, ()), strict=False)
        totals[name] = columns.middle(cell for sample, cell in cells if not is_repeat(sample))
    largest = shares[first.layer, first.head]
    return Sources(largest=largest, steepest=steepest, samples=first.samples, **totals)


def _make_heads(section: Section) -> SteepestHeads | None:
    known = [row for row in section.rows if finite([row.exact])]
    if not known:
        return None
    rows = columns.largest(known, "exact", STEEPEST)
    steepest = (Head(layer=row.layer, head=row.head, exact=order(row.exact)) for row in rows)
    typical = median(finite(row.exact for row in known))
    return SteepestHeads(steepest=tuple(steepest), median=typical, heads=len(known))


def steepest(sections: Iterable[Section], count: int) -> list[str]:
    """Return the heads with the largest exact norms as LAYER.HEAD, largest first."""
    rows = [row for section in sections if section.measure == "bounds" for row in section.rows]
    return [f"{row.layer}.{row.head}" for row in columns.largest(rows, "exact", count)]


def _make_fragile(section: Section) -> Fragile | None:
    """Summarise fragile rows, and choose the penalty that moves rows to their nearer regime.

    JaSMin with k = 0 lowers g1, towards uniform or one-hot rows. With k > 1 it lowers g1 / g_k,
    which also flattens one-hot rows, and ignores rows with at most k keys.
    """
    rows = [row for row in section.rows if finite([row.intermediate])]
    if not rows:
        return None
    names = ("intermediate", "uniform", "categorical")
    shares = {name: sum(finite(row[name] for row in rows)) / len(rows) for name in names}
    flat = shares["uniform"] > shares["categorical"]
    # A row of n <= k keys has no g_k: with short rows only k = 0 affects all rows.
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


def _list_tightness(section: Section) -> Iterator[Tightness]:
    for name, column in columns.find_bounds(section.columns).items():
        if logs := finite(columns.log10_ratio(row, name) for row in section.rows):
            # The largest float is 1.8e308.
            typical, most = (10**x if x < 308 else math.inf for x in (median(logs), max(logs)))
            known = {"status": column.status, "median": typical, "largest": most}
            yield Tightness(bound=name, heads=len(logs), **known)


# Number of samples that are shown.
SHOWN = 10
# ||x||_inf <= max_t ||x_t||_2 <= ||x||_2 <= ||x||_1: a ball in an earlier norm is inside the
# later ones. Norms in an order in which no norm is smaller than the next one.
INSIDE = ("l1", "l2", "token-l2", "linf")


class Contradiction(NamedTuple):
    """A sample that an attack broke inside a certified ball: one of the two is wrong.

    Attributes:
        sample: its id.
        certified: the certified ball.
        attack: the trial, with the distance of the example as radius.
    """

    sample: str
    certified: TrialKey
    attack: TrialKey


def broken(report: Report) -> dict[str, set[TrialKey]]:
    """Return, for each correctly classified sample, the balls in which attacks broke it."""
    balls: dict[str, set[TrialKey]] = {}
    for section in filter(None, map(report.section, ("attack", "certify"))):
        for sample, trial in _list_fallen(section):
            balls.setdefault(sample, set()).add(replace(trial, attack=""))
    return balls


def worst(report: Report, count: int = SHOWN) -> list[str]:
    """Return the least robust samples: broken in most balls first, then by norm.

    Without norms, samples with the smallest certified balls come first. Misclassified samples come
    last.
    """
    balls, figures = broken(report), dict[str, dict[str, Any]]()
    for section in report.sections:
        for name, values in section.samples.items():  # of the first section that has it
            figures.setdefault(name, dict(zip(section.ids, values, strict=False)))
    norms, right, proven = (figures.get(name, {}) for name in ("norm", "correct", "radius"))

    def rank(sample: str) -> tuple[bool, int, float, float]:
        radius = min(finite([proven.get(sample)]), default=math.inf)
        many = len(balls.get(sample, ()))
        return right.get(sample) == 0, -many, -order(norms.get(sample)), radius

    known = dict.fromkeys(sample for section in report.sections for sample in section.ids)
    return sorted(known, key=rank)[:count]


def contradictions(report: Report) -> list[Contradiction]:
    """Return, for each sample broken in a certified ball, the first such pair.

    The distance of an example in one norm bounds its distance in the later norms of `INSIDE`.
    """
    certificates = report.section("certify")
    if certificates is None:
        return []
    proven = [
        (i, t) for kind, t, i, v in _list_figures(certificates) if kind == "certified" and v == 1
    ]
    certified = [(sample, trial) for sample, trial in proven if trial is not None]
    certified += _list_searched(certificates, "radius")
    attacks: dict[str, list[TrialKey]] = {}
    for section in filter(None, (report.section("attack"), certificates)):
        # An attack may stop before its radius: the example is then inside a smaller ball.
        far = {(i, t): value for kind, t, i, value in _list_figures(section) if kind == "distance"}
        for sample, trial in _list_fallen(section):
            reached = map(_make_radius, finite([far.get((sample, trial))]))
            ball = replace(trial, radius=min([trial.radius, *reached], key=float))
            attacks.setdefault(sample, []).append(ball)
        for sample, ball in _list_searched(section, "radius_adversarial"):
            attacks.setdefault(sample, []).append(ball)
    first: dict[str, Contradiction] = {}
    for sample, ball in certified:
        for trial in attacks.get(sample, ()):
            compared = {trial.norm, ball.norm} <= {*INSIDE}
            inner = compared and INSIDE.index(trial.norm) <= INSIDE.index(ball.norm)
            if inner and trial.radius.value <= ball.radius.value:
                first.setdefault(sample, Contradiction(sample, ball, trial))
    return list(first.values())


def _list_fallen(section: Section) -> Iterator[tuple[str, TrialKey]]:
    """Yield the correct samples, with each trial that broke them."""
    right = {i: value for kind, _, i, value in _list_figures(section) if kind == "correct"}
    for kind, trial, sample, value in _list_figures(section):
        if kind == "robust" and trial is not None and value == 0 and right.get(sample) != 0:
            yield sample, trial


def _list_figures(section: Section) -> Iterator[tuple[str, TrialKey | None, str, Any]]:
    """Yield every per-sample figure of a section: kind, trial, sample, value."""
    for name, values in section.samples.items():
        kind, trial = parse_column(name)
        for sample, value in zip(section.ids, values, strict=False):
            yield kind, trial, sample, value


def _list_searched(section: Section, column: str) -> Iterator[tuple[str, TrialKey]]:
    """Yield the balls of certified and adversarial radii, if these were searched."""
    for kind, _, sample, value in _list_figures(section):
        if kind == column and finite([value]) and value > 0:
            norm = section.settings.get("norm") or "linf"
            yield sample, TrialKey("", str(norm), _make_radius(value))


def _make_radius(value: float) -> Radius:
    """Return a radius that was measured, not typed."""
    # Exact, so that rounding of the text does not affect comparisons of radii.
    return Radius(f"{value:.4g}", Fraction(value))
