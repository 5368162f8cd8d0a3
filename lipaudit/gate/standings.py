"""Ranking of models: each is compared with the best one on the samples that both have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

from lipaudit.errors import LipauditError, UsageError
from lipaudit.gate.judging import examine, judge_change
from lipaudit.gate.pairing import Key, match_samples, read
from lipaudit.gate.rules import Rule, no_change, parse_rule
from lipaudit.gate.statistics import LEVEL
from lipaudit.gate.verdicts import Verdict
from lipaudit.measures import layouts
from lipaudit.tables import Note, Report, model_labels
from lipaudit.tables.columns import Frozen
from lipaudit.tables.summary import Summary, summary
from lipaudit.tables.trials import FLAGS, TrialKey

EXAMPLE = "Such as attack.robust@linf,4/255, certify.certified@linf,1/255 or jacobian.norm:p95."
Standing = Literal[
    "best",
    "not distinguishable from the best",
    "behind the best",
    "not comparable",
    "not measured",
    "",
]
ORDER = "order"
"""Word in place of a metric: models are not ranked and keep the given order."""
RANKING = ("attack.robust", "certify.robust", "certify.certified", "jacobian.norm:median")
"""Metrics that rank models; the first of those that most models have decides."""


class Ranked(Frozen):
    """One model in a ranking.

    Attributes:
        model: its name.
        rank: 1 for the best model and those not distinguishable from it, else the place by the
            figure; None without a rank.
        outcome: the rank in words; empty without a ranking.
        reason: why the model is not comparable.
        difference: the verdict on its difference from the best model; None for the best.
        summary: its figures, as on the scorecard.
    """

    model: str
    rank: int | None = None
    outcome: Standing = ""
    reason: str = ""
    difference: Verdict | None = None
    summary: Summary


class Ranking(Frozen):
    """Several models, the best first.

    Attributes:
        criterion: the metric of the ranking, as rules name it; empty if there is none and the
            models keep the given order.
        ball: the ball of an accuracy.
        better: better direction of the metric.
        compared: number of models compared with the best.
        models: the models.
        notes: notes on the order.
    """

    criterion: str = ""
    ball: str = ""
    better: Literal["lower", "higher"] = "lower"
    compared: int = 0
    models: tuple[Ranked, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Criterion:
    """A metric that can rank models, in one ball, and the figure of each model by its index."""

    rule: Rule
    name: Key
    figures: dict[int, float]


def rank(reports: Sequence[Report], by: str | None = None) -> Ranking:
    """Rank models by accuracy under attack, else certified, else by the median Jacobian norm.

    Each model is compared with the best as in `compare`: by Bonett and Price's limits for an
    accuracy, by the sign test for the median ratio of norms. With n models the limits are
    one-sided at 2.5 % / (n - 1). So, by the union bound, a model that no other beats is called
    behind with a chance of at most 2.5 %, whichever model is taken as the best. Accuracy under
    attack means the smallest ball that most models have.

    Args:
        reports: one report per model, with shared samples.
        by: another metric, as rules name it: `attack.robust@linf,4/255`; or `order` to keep the
            given order without ranks.

    Raises:
        UsageError: there are no reports, or none has the metric.
    """
    if not reports:
        raise UsageError("no reports were given to rank", "Give the reports of the models.")
    names = model_labels(reports)
    matched, by_place = match_samples(reports, names)
    models = [
        Ranked(model=name, summary=summary(report))
        for name, report in zip(names, reports, strict=True)
    ]
    notes = [Note(level="info", code="paired-by-place", text=text) for text in by_place.values()]
    criteria = _list_criteria(reports, by)
    found = _rank_models(criteria[0], matched) if criteria else {}
    compared = sum("rank" in fields for fields in found.values()) - 1
    if compared < 1:
        refused = {i: fields for i, fields in found.items() if "reason" in fields}
        rows = (model.model_copy(update=refused.get(i, {})) for i, model in enumerate(models))
        return Ranking(models=tuple(rows), notes=tuple(notes))
    found |= {i: {"outcome": "not measured"} for i in range(len(models)) if i not in found}
    criterion = criteria[0]
    return Ranking(
        criterion=criterion.rule.metric,
        ball=criterion.name.ball if isinstance(criterion.name, TrialKey) else "",
        better="lower" if criterion.rule.worse > 0 else "higher",
        compared=compared,
        models=tuple(models[i].model_copy(update=fields) for i, fields in found.items()),
        notes=tuple(notes),
    )


def _rank_models(criterion: Criterion, reports: Sequence[Report]) -> dict[int, dict[str, Any]]:
    """Return the entries of the models that have the metric: the ranked ones first, by rank."""
    rule = criterion.rule
    worse = {i: rule.worse * figure for i, figure in criterion.figures.items()}
    models = sorted(worse, key=lambda i: (worse[i], i))
    # A difference may show in one direction only, such as an attack that one model has in
    # addition.
    apart: dict[frozenset[int], str] = {}
    for i, j in permutations(models, 2):
        if reason := _compare_two(rule, reports[i], reports[j]).reason:
            apart[frozenset((i, j))] = reason
    # The one that most can be compared with decides who is ranked, or a model with other attacks
    # and the best figure would leave all others unranked.
    base = min(models, key=lambda i: sum(i in pair for pair in apart))
    ranked = [i for i in models if frozenset((i, base)) not in apart]
    # Bonferroni, over the comparisons with the best.
    level, best = LEVEL / max(1, len(ranked) - 1), ranked[0]
    for i in ranked:  # the model with the best figure may not be the best sample by sample
        if i != best and _compare_two(rule, reports[i], reports[best], level).status == "improved":
            best = i
    found: dict[int, dict[str, Any]] = {}
    for i in ranked:
        change = None if i == best else _compare_two(rule, reports[i], reports[best], level)
        behind = change is not None and change.status == "regressed"
        ahead = sum(worse[j] < worse[i] for j in ranked)
        equal = worse[i] == worse[best] and not behind
        words = "behind" if behind else "not distinguishable from"
        outcome = "best" if i == best or equal else f"{words} the best"
        place = max(2, 1 + ahead) if behind else 1
        found[i] = {"rank": place, "outcome": outcome, "difference": change}
    order = sorted(found, key=lambda i: (i != best, found[i]["rank"]))
    # Alone, a model is compared with none.
    outside = [i for i in models if i not in ranked or ranked == [i] != models]
    reasons = {i: next(apart[pair] for pair in apart if pair >= {i}) for i in outside}
    unlike = {i: {"outcome": "not comparable", "reason": reasons[i]} for i in outside}
    return {i: found[i] for i in order} | unlike


def _compare_two(rule: Rule, new: Report, old: Report, level: float = LEVEL) -> Verdict:
    """Return the change from one model to another, in the words of `compare`."""
    examined = examine(rule, new, old, lenient=True)
    verdict = examined if isinstance(examined, Verdict) else judge_change(rule, examined[0], level)
    if verdict.low is None and verdict.status != "unchanged" and not verdict.reason:
        return verdict.model_copy(update={"reason": "the reports keep it of no sample"})
    return verdict


def make_rule(metric: str) -> Rule:
    """Return the rule that compares models by a metric.

    Args:
        metric: as rules name it: `attack.robust@linf,4/255`, `jacobian.norm:p95`.

    Raises:
        UsageError: the metric does not exist, has no better direction, or is not a single figure.
    """
    plain = parse_rule(f"{metric} <= +0")
    layout = layouts()[plain.measure]
    known = {**layout.columns, **layout.sample_columns}
    better = known[plain.column].better or ("higher" if plain.column in FLAGS else None)
    refused = {"each": "has one value per row", "max": "varies too much by chance (a maximum)"}
    why = refused.get(plain.stat, "") if better else "has no better direction"
    if why:
        raise UsageError(f"models cannot be ranked by {metric}: it {why}", EXAMPLE)
    return no_change(metric, known[plain.column])


def _list_criteria(reports: Sequence[Report], by: str | None) -> list[Criterion]:
    """Return the metric of the user, else those that can rank models, of most models first.

    Raises:
        UsageError: no report has the metric of the user, or it is several figures.
    """
    if by == ORDER:
        return []
    if by:
        found, metric = list(_read_criteria(by, reports)), make_rule(by).metric
        if not found:
            raise UsageError(f"no report has {metric}", EXAMPLE)
        if len(found) > 1:
            names = "; ".join(str(criterion.name) for criterion in found)
            raise UsageError(f"{metric} matches several values: {names}", EXAMPLE)
        return found
    attacked = any(report.section("attack") for report in reports)
    metrics = (metric for metric in RANKING if not attacked or metric != "certify.robust")
    usual = [criterion for metric in metrics for criterion in _read_criteria(metric, reports)]
    return sorted(usual, key=lambda criterion: -len(criterion.figures))


def _read_criteria(metric: str, reports: Sequence[Report]) -> Iterator[Criterion]:
    """Yield a metric for each of its balls, the smaller ones first, with the models' figures."""
    rule, figures = make_rule(metric), dict[Key, dict[int, float]]()
    for i, report in enumerate(reports):
        section = report.section(rule.measure)
        with suppress(LipauditError):  # raised if nothing matches
            for name, value in read(rule, section).points.items() if section else ():
                figures.setdefault(name, {})[i] = value

    def size(name: Key) -> tuple[str, float]:
        return (name.norm, float(name.radius)) if isinstance(name, TrialKey) else ("", 1.0)

    for name in sorted(figures, key=size):
        each = rule
        if isinstance(name, TrialKey) and not rule.selector:
            each = replace(rule, selector=(name.norm, name.radius.text))
        if size(name)[1] > 0:  # in the ball of radius 0 nothing is attacked
            yield Criterion(each, name, figures[name])
