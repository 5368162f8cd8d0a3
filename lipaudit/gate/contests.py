"""Models tested against each other, pair by pair: which are shown to be better than which."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any, Literal

from lipaudit.errors import BaselineError, LipauditError, UsageError
from lipaudit.gate.contrasts import TOLERANCE, contrasts, printed
from lipaudit.gate.rules import BINARY, Rule, parse_rule
from lipaudit.gate.statistics import ALPHA, Evidence, holm
from lipaudit.gate.values import read
from lipaudit.results import Report, row_types, sample_columns
from lipaudit.results.columns import Float, Frozen
from lipaudit.results.summary import Accuracy, Summary, summary
from lipaudit.results.trials import TrialKey, parse_radius

EXAMPLE = "Such as attack.robust@linf,4/255, certify.certified@linf,1/255 or jacobian.norm:p95."
Standing = Literal[
    "best",
    "not distinguishable from the best",
    "behind the best",
    "not comparable",
    "not measured",
    "",
]


class Difference(Frozen):
    """A model against the best one, sample by sample.

    Attributes:
        estimate: of accuracies, new less best (unit "pp", a share); of norms, the median over
            samples of new over best, less one (unit "%").
        low: lower limit, at the level at which Holm's procedure tests this pair: with 95 % no
            limits of any pair leave out 0 where there is no difference.
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


@dataclass(frozen=True)
class Criterion:
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


@dataclass(frozen=True)
class Contest:
    """Models tested against each other by one criterion.

    Attributes:
        criterion: what is compared.
        pairs: of models that could be tested, in both directions.
        reasons: why others could not be.
    """

    criterion: Criterion
    pairs: Mapping[Places, _Pair]
    reasons: Mapping[Places, str]

    def apart(self) -> dict[int, dict[str, str]]:
        """Say of every model why it cannot be compared."""
        said = {i: reason for (i, _), reason in self.reasons.items()}
        return {i: {"outcome": "not comparable", "reason": said[i]} for i in said}


def criteria(reports: Sequence[Report]) -> list[Criterion]:
    """Return what models can be ranked by, first what most of them have."""
    summaries = [summary(report) for report in reports]
    shares = [dict(_balls(summed)) for summed in summaries]
    attacked = "attack" if any(report.section("attack") for report in reports) else "certify"
    metrics = {"attacked": f"{attacked}.robust", "certified": "certify.certified"}
    criteria = []
    for ball in sorted({ball for known in shares for ball in known}):
        accuracy = next(known[ball] for known in shares if ball in known)
        metric = f"{metrics[ball[0]]}@{accuracy.norm},{accuracy.eps}:mean"
        figures = tuple(known[ball].share if ball in known else None for known in shares)
        criteria.append(Criterion(_rule(f"{metric} >= +0pp"), figures, accuracy.ball))
    norms = tuple(summed.norms.median if summed.norms else None for summed in summaries)
    criteria.append(Criterion(_rule("jacobian.norm:median <= +0%"), norms))
    return sorted((c for c in criteria if c.models), key=lambda c: -len(c.models))


def rule_of(metric: str) -> Rule:
    """Return how models are compared by a metric that somebody names.

    Args:
        metric: as rules name it: `attack.robust@linf,4/255`, `jacobian.norm:p95`.

    Raises:
        UsageError: there is no such metric, it has no better direction, or is no single figure.
    """
    plain = parse_rule(f"{metric} <= +0")
    known = {**row_types()[plain.measure].columns(), **sample_columns(plain.measure)}
    better = known[plain.column].better or ("higher" if plain.column in BINARY else None)
    refused = {"each": "has a figure for each row", "max": "may be a maximum by chance"}
    why = refused.get(plain.stat, "") if better else "has no better direction"
    if why:
        raise UsageError(f"models cannot be ranked by {metric}: it {why}", EXAMPLE)
    limit = "+0pp" if plain.column in BINARY else "+0%"
    return _rule(f"{metric} {'<=' if better == 'lower' else '>='} {limit}")


def chosen(metric: str, reports: Sequence[Report]) -> Criterion:
    """Return the criterion that somebody names.

    Raises:
        UsageError: as of `rule_of`; no report has it; or it is several figures.
    """
    rule = rule_of(metric)
    points = [_points(rule, report) for report in reports]
    names = list(dict.fromkeys(name for each in points for name in each))
    if not names:
        raise UsageError(f"no report has {rule.metric}", EXAMPLE)
    if len(names) > 1:
        raise UsageError(f"{rule.metric} is several figures: {'; '.join(names)}", EXAMPLE)
    trial = TrialKey.parse(names[0])
    figures = tuple(each.get(names[0]) for each in points)
    return Criterion(rule, figures, trial.ball if trial else "")


def _points(rule: Rule, report: Report) -> Mapping[str, float]:
    """Return the figures of a rule in a report; none where it has none."""
    section = report.section(rule.measure)
    if section is None or section.failure is not None:
        return {}
    try:
        return read(rule, section).points
    except UsageError:
        return {}


def _rule(text: str) -> Rule:
    """Return a rule that errors call by its metric: nobody wrote its limit."""
    return replace(parse_rule(text), text=text.rpartition(" ")[0].rpartition(" ")[0])


def _balls(summed: Summary) -> Iterator[tuple[tuple[str, str, Fraction], Accuracy]]:
    for accuracy in summed.accuracy:
        if accuracy.kind != "clean" and (radius := parse_radius(accuracy.eps).value):
            yield (accuracy.kind, accuracy.norm, radius), accuracy


def contest(criterion: Criterion, reports: Sequence[Report]) -> Contest:
    """Test every pair of models that have the metric."""
    pairs: dict[Places, _Pair] = {}
    reasons: dict[Places, str] = {}
    own = [_alone(report, criterion.rule.measure) for report in reports]
    for i, j in combinations(criterion.models, 2):
        try:
            pairs |= _pair(criterion.rule, (i, j), own)
        except LipauditError as error:
            reasons[i, j] = reasons[j, i] = error.message
    return Contest(criterion, pairs, reasons)


def _alone(report: Report, measure: str) -> Report:
    """Leave out the other measures: that one of them failed is no matter here."""
    whole = report.failures and not report.unmeasured
    status = "complete" if whole else report.status
    kept = tuple(section for section in report.sections if section.measure == measure)
    return report.model_copy(update={"sections": kept, "status": status})


def _pair(rule: Rule, places: Places, reports: Sequence[Report]) -> dict[Places, _Pair]:
    """Test whether two models differ, by their shared samples.

    Raises:
        LipauditError: they are not comparable.
    """
    old, new = (reports[i] for i in places)
    ids = [{*r.sections[0].ids} for r in (old, new)]
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


def standings(contest: Contest) -> dict[int, dict[str, Any]]:
    """Return what is said of every model, by its place: the ranked ones first, the best first."""
    criterion, pairs = contest.criterion, contest.pairs
    models = criterion.models
    base = max(models, key=lambda i: sum((i, j) in pairs for j in models))
    ranked = [i for i in models if i == base or (i, base) in pairs]
    tested = _corrected({k: pair for k, pair in pairs.items() if {*k} <= {*ranked}})
    ranks = {j: 1 + sum(tested[i, j].worse for i in ranked if (i, j) in tested) for j in ranked}
    best, *others = sorted(ranked, key=lambda i: ranks[i])
    said: dict[int, dict[str, Any]] = {best: {"rank": ranks[best], "outcome": "best"}}
    for i in others:
        said[i] = {"rank": ranks[i]} | _against(criterion.rule, tested.get((best, i)))
        if criterion.figures[i] == criterion.figures[best] and ranks[i] == ranks[best]:
            said[i]["outcome"] = "best"  # the order in which they are named makes none the better
    for i in (i for i in models if i not in said):
        said[i] = {"outcome": "not comparable", "reason": contest.reasons[i, base]}
    missing = (i for i in range(len(criterion.figures)) if i not in said)
    return said | {i: {"outcome": "not measured"} for i in missing}


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
        return {"outcome": "not distinguishable from the best"}
    evidence = tested.pair.evidence
    ends = [printed(rule, limit) for limit in evidence.limits(tested.level / 2)]
    if rule.limit.unit == "pp":  # no two shares are further apart
        ends = [min(max(end, -1.0), 1.0) for end in ends]
    difference = Difference(
        estimate=printed(rule, evidence.estimate),
        low=min(ends),
        high=max(ends),
        unit=rule.limit.unit,
        p=tested.pair.p,
        p_adjusted=tested.p_adjusted,
        samples=evidence.samples,
    )
    behind = "behind the best" if tested.worse else "not distinguishable from the best"
    return {"outcome": behind, "difference": difference}
