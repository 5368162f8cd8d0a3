"""Several models in the order of one metric, the best first.

Each model is compared with the best sample by sample, with the verdicts of `judging`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

from lipaudit.errors import EvaluationError, LipauditError, UsageError
from lipaudit.gate import pairing, readings
from lipaudit.gate.contrasts import examine
from lipaudit.gate.judging import judge_change
from lipaudit.gate.readings import Key
from lipaudit.gate.rules import Rule, no_change, parse_rule
from lipaudit.gate.statistics import LEVEL
from lipaudit.gate.verdicts import Verdict
from lipaudit.measures import list_headlines, summarise
from lipaudit.tables import Note, Notes, Report, Section, model_labels
from lipaudit.tables.columns import Frozen
from lipaudit.tables.trials import FLAGS, TrialKey

EXAMPLE = "Such as attack.robust@linf,4/255 or jacobian.norm:p95."
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
    summary: Section


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
    notes: Notes = ()


# The fields of `Ranked` by name, for models by their index.
_Fields = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Criterion:
    """A metric that can rank models, in one ball, and the figure of each model by its index.

    Attributes:
        rule: names the metric; it allows no change.
        name: the row or ball of the figures.
        figures: the figure of each model that has one.
    """

    rule: Rule
    name: Key
    figures: dict[int, float]


def rank(reports: Sequence[Report], by: str | None = None) -> Ranking:
    """Rank models by accuracy under attack, else certified, else by the median Jacobian norm.

    Each model is compared with the best as in `compare` (see `_rank_comparable`). Accuracy under
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
    # `by_place` has a note for each model whose samples have other ids. Its samples were matched
    # by their places in the data.
    matched, by_place = pairing.match_samples(reports, names)
    criteria = _list_criteria(reports, by)
    # By index of the model, the best model first: the fields of its `Ranked` (rank, outcome, ...).
    # A model that cannot be compared has a reason and no rank; one without the metric no entry.
    entries = _rank_models(criteria[0], matched) if criteria else {}
    about_ranking: dict[str, Any] = {}  # fields of the `Ranking`
    # How many models were compared with the best one: all models with a rank but this one.
    compared = sum("rank" in fields for fields in entries.values()) - 1
    indices = range(len(names))
    if compared >= 1:
        about_ranking = _describe_criterion(criteria[0]) | {"compared": compared}
        for i in indices:  # models without the metric come last
            entries.setdefault(i, {"outcome": "not measured"})
    else:
        # No two models can be compared: they keep the given order, some with the reason.
        refused = {i: fields for i, fields in entries.items() if "reason" in fields}
        entries = {i: refused.get(i, {}) for i in indices}
    models = tuple(
        Ranked(model=names[i], summary=summarise(reports[i]), **fields)
        for i, fields in entries.items()
    )
    notes = tuple(Note.info("paired-by-place", text) for text in by_place.values())
    return Ranking(models=models, notes=notes, **about_ranking)


def _describe_criterion(criterion: Criterion) -> dict[str, str]:
    """Return the fields of a `Ranking` on its metric: name, better direction and ball."""
    rule = criterion.rule
    ball = criterion.name.ball if isinstance(criterion.name, TrialKey) else ""
    better = "lower" if rule.worse > 0 else "higher"
    return {"criterion": rule.metric, "better": better, "ball": ball}


def _rank_models(criterion: Criterion, reports: Sequence[Report]) -> _Fields:
    """Return the fields of `Ranked` for each model that has the metric, by index, best first.

    Models that cannot be compared with the ranked ones come last, with the reason.

    Args:
        criterion: the metric, and the figure of each model.
        reports: the reports of all models, with shared samples.
    """
    rule = criterion.rule
    # With this sign the larger figure is the worse one.
    worse = {i: rule.worse * figure for i, figure in criterion.figures.items()}
    # Models whose own figure is not reliable: the fault of one is no reason against the others.
    faulty: _Fields = {}
    for i in worse:
        fault = _find_fault(rule, reports[i])
        if fault:
            faulty[i] = {"outcome": "not comparable", "reason": fault}
    models = sorted(worse.keys() - faulty.keys(), key=lambda i: (worse[i], i))
    if not models:
        return faulty
    # The pairs {i, j} of models that cannot be compared, each with the reason.
    incomparable = _find_incomparable(rule, models, reports)
    # All models that can be compared with `base` are ranked. It is the model in the fewest
    # incomparable pairs. If it were the best model, another attack on this one model would leave
    # all other models unranked. (Models that can be compared with `base` have its settings and
    # attacks, so they can be compared with each other.)
    base = min(models, key=lambda i: sum(i in pair for pair in incomparable))
    ranked = {i: worse[i] for i in models if frozenset((i, base)) not in incomparable}
    entries = _rank_comparable(rule, ranked, reports)
    unranked = [i for i in models if i not in ranked]
    if unranked and len(ranked) == 1:  # `base` was compared with no other model: no rank either
        unranked = models
    for i in unranked:
        reason = next(incomparable[pair] for pair in incomparable if i in pair)
        entries[i] = {"outcome": "not comparable", "reason": reason}
    return entries | faulty


def _find_fault(rule: Rule, report: Report) -> str:
    """Return why the figure of a model is not reliable, such as a partial run, or ""."""
    section = readings.require_section(rule, report, "the report")
    try:
        readings.read_trusted(rule, report, section, lenient=True)
    except EvaluationError as error:
        return error.message
    return ""


def _find_incomparable(
    rule: Rule, models: Sequence[int], reports: Sequence[Report]
) -> dict[frozenset[int], str]:
    """Return the pairs of models (by index) that cannot be compared, each with the reason."""
    reasons = {}
    # Both orders of a pair are tried: a comparison is refused if the new model lacks an attack of
    # the old model, not vice versa.
    for i, j in permutations(models, 2):
        reason = _compare_two(rule, new=reports[i], old=reports[j]).reason
        if reason:
            reasons[frozenset((i, j))] = reason
    return reasons


def _rank_comparable(rule: Rule, worse: Mapping[int, float], reports: Sequence[Report]) -> _Fields:
    """Return the fields of `Ranked` for models that can all be compared, by index, best first.

    Each model is compared with the best: by Bonett and Price's limits for an accuracy, by the sign
    test for the median ratio of norms. A model that is not proven to be worse than the best shares
    rank 1. With n models the limits are one-sided at 2.5% / (n - 1). So, by the union bound, a
    model that no other beats is called behind with a chance of at most 2.5%, whichever model is
    taken as the best.

    Args:
        rule: names the figure; it allows no change.
        worse: the figure of each model, larger if worse; the model with the best figure first.
        reports: the reports of all models.
    """
    # Bonferroni's correction for comparing all other models with the best model.
    level = LEVEL / max(1, len(worse) - 1)
    # The model with the best figure (the first one) may not be the best sample by sample: a later
    # model that is proven to be better than the best one so far takes its place.
    best, *others = worse
    for i in others:
        if _compare_two(rule, new=reports[i], old=reports[best], level=level).status == "improved":
            best = i
    entries: _Fields = {best: {"rank": 1, "outcome": "best"}}
    for i in worse:
        if i == best:
            continue
        change = _compare_two(rule, new=reports[i], old=reports[best], level=level)
        place = 1  # shared with the best model, unless this one is proven to be worse
        if change.status == "regressed":
            # After all models with a better figure. At least 2: the best model itself, which is
            # the best sample by sample, may have a worse figure.
            place = max(2, 1 + sum(figure < worse[i] for figure in worse.values()))
            outcome = "behind the best"
        elif worse[i] == worse[best]:  # not proven to be worse, and with an equal figure
            outcome = "best"
        else:
            outcome = "not distinguishable from the best"
        entries[i] = {"rank": place, "outcome": outcome, "difference": change}
    # Sorting keeps the order of equal ranks: the best model stays first.
    return dict(sorted(entries.items(), key=lambda entry: entry[1]["rank"]))


def _compare_two(rule: Rule, new: Report, old: Report, level: float = LEVEL) -> Verdict:
    """Return the verdict on the change from the old model to the new one.

    Args:
        rule: names the figure; it allows no change.
        new: the report of one model.
        old: the report of another.
        level: one-sided error probability of each limit of the change.
    """
    examined = examine(rule, new, old, lenient=True)
    if isinstance(examined, Verdict):  # the reason why the two models cannot be compared
        return examined
    verdict = judge_change(rule, examined[0], level)  # the rule names a single figure
    # Without limits nothing was tested: the two models cannot be compared.
    if verdict.low is None and verdict.status != "unchanged":
        return verdict.model_copy(update={"reason": "the reports have no value of it per sample"})
    return verdict


def make_rule(metric: str) -> Rule:
    """Return the rule that compares models by a metric: it allows no change for the worse.

    Args:
        metric: as rules name it: `attack.robust@linf,4/255`, `jacobian.norm:p95`.

    Raises:
        UsageError: the metric does not exist, has no better direction, or is not a single figure.
    """
    plain = parse_rule(f"{metric} <= +0")  # any limit: only the metric is read
    fault = ""
    # FLAGS are the yes-or-no columns, such as `robust`: yes is better, though `about`, the
    # description of the column, does not say so of all of them.
    if not plain.about.better and plain.column not in FLAGS:
        fault = "has no better direction"
    elif plain.stat == "each":
        fault = "has one value per row"
    elif plain.stat == "max":
        fault = "varies too much by chance (a maximum)"
    elif plain.group:
        fault = "is of a group of samples"
    if fault:
        raise UsageError(f"models cannot be ranked by {metric}: it {fault}", EXAMPLE)
    # The limit is +0 in the worse direction. Judged by it, a model is better or worse than another
    # one if any change between their figures is proven.
    return no_change(metric)


def _list_criteria(reports: Sequence[Report], by: str | None) -> list[Criterion]:
    """Return the metrics that can rank the models, the metric that most models have first.

    A metric comes with the figure of each model, and once for each ball of an attack.

    Args:
        reports: the reports of all models.
        by: the only metric to rank by, or `order` for none; None: the headline figures.

    Raises:
        UsageError: no report has the metric `by`, or it is several figures.
    """
    if by == ORDER:
        return []
    # Several sections may have the same figure, such as robust accuracy: only the first is used.
    usual: dict[str, str] = {}
    for name, headline in list_headlines():
        if headline.ranks and any(report.section(name) for report in reports):
            usual.setdefault(headline.name, f"{name}.{headline.column}")
    metrics = [by] if by else usual.values()
    criteria = list[Criterion]()
    for metric in metrics:
        criteria += _read_criteria(metric, reports)
    if by and not criteria:
        raise UsageError(f"no report has {by}", EXAMPLE)
    if by and len(criteria) > 1:
        names = "; ".join(str(criterion.name) for criterion in criteria)
        raise UsageError(f"{by} matches several values: {names}", EXAMPLE)
    return sorted(criteria, key=lambda criterion: -len(criterion.figures))


def _read_criteria(metric: str, reports: Sequence[Report]) -> Iterator[Criterion]:
    """Yield a criterion (rule and figures) for every ball of a metric, the smallest ball first.

    A metric without balls, such as a norm, has one criterion.
    """
    rule = make_rule(metric)
    # The figure of each model, by row or ball and then by index of the model.
    figures = dict[Key, dict[int, float]]()
    for i, report in enumerate(reports):
        section = report.section(rule.measure)
        if section is None:
            continue
        with suppress(LipauditError):  # raised if nothing matches
            for name, value in readings.read(rule, section).points.items():
                figures.setdefault(name, {})[i] = value

    for name in sorted(figures, key=_order_by_size):
        rule_of_ball = rule
        if isinstance(name, TrialKey):
            if not float(name.radius):  # in the ball of radius 0 nothing is attacked
                continue
            if not rule.selector:  # the metric names no ball: each ball is a criterion
                rule_of_ball = replace(rule, selector=(name.norm, name.radius.text))
        yield Criterion(rule_of_ball, name, figures[name])


def _order_by_size(name: Key) -> tuple[str, float]:
    """Return the sort key of a figure: figures without a ball first, then by norm and radius."""
    if not isinstance(name, TrialKey):
        return "", 0.0
    return name.norm, float(name.radius)
