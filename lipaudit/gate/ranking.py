"""Models ranked on the samples that they share: who is shown to be better, and who is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, Literal

import numpy as np

from lipaudit.errors import BaselineError, LipauditError, UsageError
from lipaudit.gate.contrasts import TOLERANCE, contrasts, printed
from lipaudit.gate.matching import matched, other_names
from lipaudit.gate.rules import Rule, parse_rule
from lipaudit.gate.statistics import Evidence, holm, median_change
from lipaudit.results import Note, Report, model_labels
from lipaudit.results.columns import Float, Frozen
from lipaudit.results.figures import finite
from lipaudit.results.summary import Accuracy, Head, Summary, summary
from lipaudit.results.trials import parse_radius

ALPHA = 0.05
"""The chance of telling any two models apart that do not differ."""
Standing = Literal[
    "best",
    "not distinguishable from the best",
    "behind the best",
    "not comparable",
    "not measured",
    "",
]


class ModelNorm(Frozen):
    """The Jacobian norms of a model: the median with its 95 % limits (order statistics), p95.

    The limits are None where there are too few samples for any.
    """

    start: str
    end: str
    median: Float | None
    low: Float | None
    high: Float | None
    p95: Float | None
    samples: int


class Difference(Frozen):
    """A model against the best one, sample by sample.

    Attributes:
        estimate: of accuracies, new less best (unit "pp", a share); of norms, the median over
            samples of new over best, less one (unit "%").
        low: lower limit; those of all pairs of models hold together with 95 % (Holm).
        high: upper limit.
        unit: of the three.
        p: two-sided p-value of "no difference".
        p_adjusted: the same after Holm's correction over all pairs of models.
        samples: that both were measured on.
    """

    estimate: Float
    low: Float
    high: Float
    unit: str
    p: Float
    p_adjusted: Float
    samples: int


class Ranked(Frozen):
    """One model among others.

    Attributes:
        model: its name.
        rank: one more than models are shown to be better; None where it is not ranked.
        standing: what that means; empty where nothing ranks any.
        reason: why it is not comparable.
        difference: from the best, where it is not that itself.
        accuracy: clean, under attack by ball, certified, with 95 % limits (Wilson).
        norm: of the model's Jacobian.
        head: the steepest.
        fragile: share of attention rows in the fragile regime.
    """

    model: str
    rank: int | None = None
    standing: Standing = ""
    reason: str = ""
    difference: Difference | None = None
    accuracy: tuple[Accuracy, ...]
    norm: ModelNorm | None
    head: Head | None
    fragile: Float | None


class Ranking(Frozen):
    """Models beside each other, the best first.

    Attributes:
        criterion: the metric that they are ranked by, as rules name it; empty where they have
            none, and stand as they were given.
        ball: of the accuracy that it is.
        better: its better direction.
        pairs: of models that were tested: limits hold for all of them together.
        models: the models.
        notes: what is to be known of the order.
    """

    criterion: str = ""
    ball: str = ""
    better: Literal["lower", "higher"] = "lower"
    pairs: int = 0
    models: tuple[Ranked, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class _Criterion:
    """A metric by which models can be ranked, and what each model has of it."""

    rule: Rule
    figures: tuple[float | None, ...]
    ball: str = ""

    @property
    def models(self) -> list[int]:
        """The models that have a figure, the better ones first."""
        known = [(value, i) for i, value in enumerate(self.figures) if value is not None]
        return [i for _, i in sorted(known, key=lambda each: self.rule.worse * each[0])]


@dataclass(frozen=True)
class _Pair:
    """What the samples that two models share say.

    Attributes:
        evidence: how much worse the second is.
        p: two-sided p-value of "they differ by no more than `within`".
        within: the accuracy of the figures.
        same: whether the two are one model.
    """

    evidence: Evidence
    p: float
    within: float
    same: bool


@dataclass(frozen=True)
class _Tested:
    """A pair, its p-value after correction, and the two-sided level at which it is tested."""

    pair: _Pair
    p_adjusted: float
    level: float

    @property
    def worse(self) -> bool:
        """Whether the second is shown to be worse."""
        low = self.pair.evidence.limits(self.level / 2)[0]
        return not self.pair.same and low > self.pair.within


Places = tuple[int, int]


def rank(reports: Sequence[Report]) -> Ranking:
    """Rank models by accuracy under attack, else certified, else by the median Jacobian norm.

    Two models are told apart where the limits of their paired difference leave 0 out: Bonett and
    Price's of an accuracy, the sign test's of the median ratio of norms. Limits hold for all pairs
    of models together (Holm). An accuracy is that of the smallest ball that most models have.

    Args:
        reports: one of each model, on samples that they share.

    Raises:
        UsageError: there is no report.
    """
    if not reports:
        raise UsageError("there is nothing to rank", "Give the reports of the models.")
    names, shared = model_labels(reports), matched(reports)
    rows = [_row(name, report) for name, report in zip(names, reports, strict=True)]
    notes = tuple(_paired_by_place(reports, names))
    criterion = next(iter(_criteria(reports)), None)
    if criterion is None:
        return Ranking(models=tuple(rows), notes=notes)
    pairs, reasons = _tested(criterion, shared)
    standings = _standings(criterion, pairs, reasons)
    ranked = {i for i, said in standings.items() if "rank" in said}
    return Ranking(
        criterion=criterion.rule.metric,
        ball=criterion.ball,
        better="lower" if criterion.rule.worse > 0 else "higher",
        pairs=sum({*places} <= ranked for places in pairs) // 2,
        models=tuple(rows[i].model_copy(update=standings[i]) for i in standings),
        notes=notes,
    )


def _row(name: str, report: Report) -> Ranked:
    """Sum a model up."""
    summed, section = summary(report), report.section("jacobian")
    norms = None
    if summed.norms and section:
        known = finite(section.samples.get("norm", ()))
        low, high = limits_of_median(known)
        given = {name: getattr(summed.norms, name) for name in ("start", "end", "median", "p95")}
        norms = ModelNorm(low=low, high=high, samples=summed.norms.samples, **given)
    return Ranked(
        model=name,
        accuracy=summed.accuracy,
        norm=norms,
        head=summed.heads.steepest[0] if summed.heads else None,
        fragile=summed.fragile.share if summed.fragile else None,
    )


def limits_of_median(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % limits of a median, exact whatever the distribution: order statistics.

    Of fewer than six values there are none.

    >>> limits_of_median(range(1, 11))
    (2.0, 9.0)
    """
    if len(values) == 0:
        return None, None
    limits = median_change(np.array(values, dtype=np.float64)).limits(ALPHA / 2)
    low, high = (float(limit) if np.isfinite(limit) else None for limit in limits)
    return low, high


def _paired_by_place(reports: Sequence[Report], names: Sequence[str]) -> Iterator[Note]:
    first, *others = names
    for name, report in zip(others, reports[1:], strict=True):
        if other_names(report, reports[0]):
            text = (
                f"{name} sees the samples in another form than {first}: they are paired by their "
                f"place in {report.run.data.spec}"
            )
            yield Note(level="info", code="paired-by-place", text=text)


def _criteria(reports: Sequence[Report]) -> list[_Criterion]:
    """Return what models can be ranked by, first what most of them have."""
    summaries = [summary(report) for report in reports]
    shares = [dict(_balls(summed)) for summed in summaries]
    attacked = "attack" if any(report.section("attack") for report in reports) else "certify"
    metrics = {"attacked": f"{attacked}.robust", "certified": "certify.certified"}
    criteria = []
    for ball in sorted({ball for known in shares for ball in known}):
        accuracy = next(known[ball] for known in shares if ball in known)
        rule = f"{metrics[ball[0]]}@{accuracy.norm},{accuracy.eps}:mean >= +0pp"
        figures = tuple(known[ball].share if ball in known else None for known in shares)
        criteria.append(_Criterion(parse_rule(rule), figures, accuracy.ball))
    norms = tuple(summed.norms.median if summed.norms else None for summed in summaries)
    criteria.append(_Criterion(parse_rule("jacobian.norm:median <= +0%"), norms))
    return sorted((c for c in criteria if c.models), key=lambda c: -len(c.models))


def _balls(summed: Summary) -> Iterator[tuple[tuple[str, str, Fraction], Accuracy]]:
    for accuracy in summed.accuracy:
        if accuracy.kind != "clean" and (radius := parse_radius(accuracy.eps).value):
            yield (accuracy.kind, accuracy.norm, radius), accuracy


def _tested(
    criterion: _Criterion, reports: Sequence[Report]
) -> tuple[dict[Places, _Pair], dict[Places, str]]:
    """Test every pair of models in both directions; of one that cannot be, say why."""
    pairs: dict[Places, _Pair] = {}
    reasons: dict[Places, str] = {}
    own = [_alone(report, criterion.rule.measure) for report in reports]
    for i, j in combinations(criterion.models, 2):
        try:
            pairs |= _pair(criterion.rule, (i, j), own)
        except LipauditError as error:
            reasons[i, j] = reasons[j, i] = error.message
    return pairs, reasons


def _alone(report: Report, measure: str) -> Report:
    """Leave out the other measures: that one of them failed is no matter here."""
    status = "complete" if report.failures else report.status
    kept = tuple(section for section in report.sections if section.measure == measure)
    return report.model_copy(update={"sections": kept, "status": status})


def _pair(rule: Rule, places: Places, reports: Sequence[Report]) -> dict[Places, _Pair]:
    """Test whether two models differ, by their shared samples.

    Raises:
        LipauditError: they are not comparable.
    """
    old, new = (reports[i] for i in places)
    ids = [{*r.sections[0].samples.get("ids", ())} for r in (old, new)]
    if all(ids) and not ids[0] & ids[1]:
        raise BaselineError(f"{rule.measure}: other samples were measured")
    within = math.log1p(TOLERANCE) if rule.limit.kind == "relative" else 0.0
    both = [contrasts(rule, *each, least=0.0)[0] for each in ((new, old), (old, new))]
    evidence = [contrast.evidence for contrast in both]
    if None in evidence:
        raise BaselineError(f"{rule.metric}: the reports keep it of no sample")
    p = min(1.0, 2 * min(each.p(within) for each in evidence if each))
    there, back = (_Pair(e, p, within, both[0].same) for e in evidence if e)
    return {places: there, places[::-1]: back}


def _standings(
    criterion: _Criterion, pairs: Mapping[Places, _Pair], reasons: Mapping[Places, str]
) -> dict[int, dict[str, Any]]:
    """Return what is said of every model, by its place: the ranked ones first, the best first."""
    models = criterion.models
    base = max(models, key=lambda i: sum((i, j) in pairs for j in models))
    ranked = [i for i in models if i == base or (i, base) in pairs]
    tested = _corrected({k: pair for k, pair in pairs.items() if {*k} <= {*ranked}})
    ranks = {j: 1 + sum(tested[i, j].worse for i in ranked if (i, j) in tested) for j in ranked}
    best, *others = sorted(ranked, key=lambda i: ranks[i])
    said: dict[int, dict[str, Any]] = {best: {"rank": ranks[best], "standing": "best"}}
    for i in others:
        said[i] = {"rank": ranks[i]} | _against(criterion.rule, tested.get((best, i)))
    for i in (i for i in models if i not in said):
        said[i] = {"standing": "not comparable", "reason": reasons[i, base]}
    missing = (i for i in range(len(criterion.figures)) if i not in said)
    return said | {i: {"standing": "not measured"} for i in missing}


def _corrected(pairs: Mapping[Places, _Pair]) -> dict[Places, _Tested]:
    """Correct for the number of pairs of models."""
    once = [places for places in pairs if places[0] < places[1]]
    adjusted, levels = holm([pairs[places].p for places in once], ALPHA)
    return {
        places: _Tested(pairs[places], p, level)
        for each, p, level in zip(once, adjusted, levels, strict=True)
        for places in (each, each[::-1])
    }


def _against(rule: Rule, tested: _Tested | None) -> dict[str, Any]:
    """Say how a model stands against the best one, as fields of `Ranked`."""
    if tested is None:
        return {"standing": "not distinguishable from the best"}
    evidence = tested.pair.evidence
    low, high = (printed(rule, limit) for limit in evidence.limits(tested.level / 2))
    difference = Difference(
        estimate=printed(rule, evidence.estimate),
        low=min(low, high),
        high=max(low, high),
        unit=rule.limit.unit,
        p=tested.pair.p,
        p_adjusted=tested.p_adjusted,
        samples=evidence.samples,
    )
    behind = "behind the best" if tested.worse else "not distinguishable from the best"
    return {"standing": behind, "difference": difference}
