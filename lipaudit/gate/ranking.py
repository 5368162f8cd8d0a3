"""Ranking of models: each is compared with the best one on the samples that both have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

from lipaudit.errors import UsageError
from lipaudit.gate.judging import judge_change
from lipaudit.gate.pairing import keep_sections, match_samples, read
from lipaudit.gate.rules import Rule, no_change, parse_rule
from lipaudit.gate.statistics import LEVEL
from lipaudit.gate.verdicts import Verdict
from lipaudit.measures import layouts
from lipaudit.tables import Note, Report, model_labels
from lipaudit.tables.columns import Float, Frozen
from lipaudit.tables.figures import median_limits
from lipaudit.tables.summary import Accuracy, Head, summary
from lipaudit.tables.trials import FLAGS, TrialKey, parse_radius

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


class ModelNorm(Frozen):
    """The Jacobian norms of a model: p95, and the median with 95 % limits (order statistics).

    With too few samples the limits are None.
    """

    start: str
    end: str
    median: Float | None
    low: Float | None
    high: Float | None
    p95: Float | None
    samples: int


class Ranked(Frozen):
    """One model in a ranking.

    Attributes:
        model: its name.
        rank: 1 for the best model and those not distinguishable from it, else the place by the
            figure; None without a rank.
        outcome: the rank in words; empty without a ranking.
        reason: why the model is not comparable.
        difference: the verdict on its difference from the best model; None for the best.
        accuracy: clean, under attack by ball, certified, with 95 % limits (Wilson).
        norm: norms of the model's Jacobian.
        head: the steepest head.
        fragile: share of attention rows in the fragile regime.
    """

    model: str
    rank: int | None = None
    outcome: Standing = ""
    reason: str = ""
    difference: Verdict | None = None
    accuracy: tuple[Accuracy, ...]
    norm: ModelNorm | None
    head: Head | None
    fragile: Float | None


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
    """A metric that can rank models, and the figure of each model."""

    rule: Rule
    figures: tuple[float | None, ...]
    ball: str = ""

    @property
    def models(self) -> list[int]:
        """Return the models that have a figure, the better ones first."""
        known = [(value, i) for i, value in enumerate(self.figures) if value is not None]
        return [i for _, i in sorted(known, key=lambda each: self.rule.worse * each[0])]


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
    rows = [_summarise_model(name, report) for name, report in zip(names, reports, strict=True)]
    asked = (
        [] if by == ORDER else [choose_criterion(by, reports)] if by else list_criteria(reports)
    )
    notes = [Note(level="info", code="paired-by-place", text=text) for text in by_place.values()]
    updates: dict[int, dict[str, Any]] = {}
    for criterion in asked:
        found = _rank_models(criterion, matched)
        compared = sum(fields["outcome"] != "not comparable" for fields in found.values()) - 1
        if compared > 0:
            missing = (i for i in range(len(rows)) if i not in found)
            found |= {i: {"outcome": "not measured"} for i in missing}
            return Ranking(
                criterion=criterion.rule.metric,
                ball=criterion.ball,
                better="lower" if criterion.rule.worse > 0 else "higher",
                compared=compared,
                models=tuple(rows[i].model_copy(update=found[i]) for i in found),
                notes=tuple(notes),
            )
        reasons = {i: fields for i, fields in found.items() if fields.get("reason")}
        updates = updates or reasons
        for text in dict.fromkeys(fields["reason"] for fields in reasons.values()):
            text = f"not ranked by {criterion.rule.metric}: {text}"
            notes.append(Note(level="info", code="not-compared", text=text))
    models = (row.model_copy(update=updates.get(i, {})) for i, row in enumerate(rows))
    return Ranking(models=tuple(models), notes=tuple(notes))


def _summarise_model(name: str, report: Report) -> Ranked:
    summed, section = summary(report), report.section("jacobian")
    norms = None
    if summed.norms and section:
        low, high = median_limits(section.samples.get("norm", ())) or (None, None)
        given = {name: getattr(summed.norms, name) for name in ("start", "end", "median", "p95")}
        norms = ModelNorm(low=low, high=high, samples=summed.norms.samples, **given)
    return Ranked(
        model=name,
        accuracy=summed.accuracy,
        norm=norms,
        head=summed.heads.steepest[0] if summed.heads else None,
        fragile=summed.fragile.share if summed.fragile else None,
    )


def _rank_models(criterion: Criterion, reports: Sequence[Report]) -> dict[int, dict[str, Any]]:
    """Return the entries of the models that have the metric: the ranked ones first, by rank."""
    rule, models = criterion.rule, criterion.models
    worse = [rule.worse * (figure or 0.0) for figure in criterion.figures]
    own = [keep_sections(r, lambda section: section.measure == rule.measure) for r in reports]
    # A difference may show in one direction only, such as an attack that one model has in
    # addition.
    apart: dict[frozenset[int], str] = {}
    for i, j in permutations(models, 2):
        if reason := _compare_two(rule, own[i], own[j]).reason:
            apart[frozenset((i, j))] = reason
    base = min(models, key=lambda i: sum(i in pair for pair in apart))
    ranked = [i for i in models if frozenset((i, base)) not in apart]
    level, best = LEVEL / max(1, len(ranked) - 1), ranked[0]
    for i in ranked:  # the model with the best figure may not be the best sample by sample
        if i != best and _compare_two(rule, own[i], own[best], level).status == "improved":
            best = i
    updates: dict[int, dict[str, Any]] = {}
    for i in ranked:
        change = None if i == best else _compare_two(rule, own[i], own[best], level)
        behind = change is not None and change.status == "regressed"
        ahead = sum(worse[j] < worse[i] for j in ranked)
        equal = worse[i] == worse[best] and not behind
        words = "behind" if behind else "not distinguishable from"
        outcome = "best" if i == best or equal else f"{words} the best"
        place = max(2, 1 + ahead) if behind else 1
        updates[i] = {"rank": place, "outcome": outcome, "difference": change}
    order = sorted(updates, key=lambda i: (i != best, updates[i]["rank"]))
    outside = [i for i in models if i not in ranked or ranked == [i] != models]
    reasons = {i: next(apart[pair] for pair in apart if pair >= {i}) for i in outside}
    unlike = {i: {"outcome": "not comparable", "reason": reasons[i]} for i in outside}
    return {i: updates[i] for i in order} | unlike


def _compare_two(rule: Rule, new: Report, old: Report, level: float = LEVEL) -> Verdict:
    """Return the change from one model to another, in the words of `compare`."""
    verdict = judge_change(rule, new, old, level)[0]
    if verdict.low is None and verdict.status != "unchanged" and not verdict.reason:
        return verdict.model_copy(update={"reason": "the reports keep it of no sample"})
    return verdict


def list_criteria(reports: Sequence[Report]) -> list[Criterion]:
    """Return the metrics that can rank models, those of most models first."""
    summaries = [summary(report) for report in reports]
    shares = [
        {
            (a.kind, a.norm, radius): a
            for a in summed.accuracy
            if a.kind != "clean" and (radius := parse_radius(a.eps).value)
        }
        for summed in summaries
    ]
    attacked = "attack" if any(report.section("attack") for report in reports) else "certify"
    metrics = {"attacked": f"{attacked}.robust", "certified": "certify.certified"}
    criteria = []
    for ball in sorted({ball for known in shares for ball in known}):
        accuracy = next(known[ball] for known in shares if ball in known)
        metric = f"{metrics[ball[0]]}@{accuracy.norm},{accuracy.eps}:mean"
        figures = tuple(known[ball].share if ball in known else None for known in shares)
        criteria.append(Criterion(make_rule(metric), figures, accuracy.ball))
    norms = tuple(summed.norms.median if summed.norms else None for summed in summaries)
    criteria.append(Criterion(make_rule("jacobian.norm:median"), norms))
    return sorted((c for c in criteria if c.models), key=lambda c: -len(c.models))


def make_rule(metric: str) -> Rule:
    """Return the rule that compares models by a metric of the user.

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


def choose_criterion(metric: str, reports: Sequence[Report]) -> Criterion:
    """Return the criterion of a metric of the user.

    Raises:
        UsageError: as in `make_rule`; or no report has it; or it is several figures.
    """
    rule = make_rule(metric)
    points: list[Mapping[str, float]] = []
    for report in reports:
        section = report.section(rule.measure)
        points.append({})
        if section is not None and section.failure is None:
            with suppress(UsageError):  # raised if nothing matches
                points[-1] = read(rule, section).points
    names = list(dict.fromkeys(name for each in points for name in each))
    if not names:
        raise UsageError(f"no report has {rule.metric}", EXAMPLE)
    if len(names) > 1:
        raise UsageError(f"{rule.metric} matches several values: {'; '.join(names)}", EXAMPLE)
    trial = TrialKey.parse(names[0])
    figures = tuple(each.get(names[0]) for each in points)
    return Criterion(rule, figures, trial.ball if trial else "")
