"""Models ranked on the samples that they share: who is shown to be better, and who is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from lipaudit.errors import UsageError
from lipaudit.gate.contests import (
    Contest,
    Difference,
    Standing,
    chosen,
    contest,
    criteria,
    standings,
)
from lipaudit.gate.overlap import matched, paired_by_place
from lipaudit.results import Note, Report, model_labels
from lipaudit.results.columns import Float, Frozen
from lipaudit.results.figures import median_limits
from lipaudit.results.summary import Accuracy, Head, summary


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


class Ranked(Frozen):
    """One model among others.

    Attributes:
        model: its name.
        rank: one more than models are shown to be better; None where it is not ranked.
        outcome: what that means; empty where nothing ranks any.
        reason: why it is not comparable.
        difference: from the best, where it is not that itself.
        accuracy: clean, under attack by ball, certified, with 95 % limits (Wilson).
        norm: of the model's Jacobian.
        head: the steepest.
        fragile: share of attention rows in the fragile regime.
    """

    model: str
    rank: int | None = None
    outcome: Standing = ""
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


def rank(reports: Sequence[Report], by: str | None = None) -> Ranking:
    """Rank models by accuracy under attack, else certified, else by the median Jacobian norm.

    Two models are told apart where the limits of their paired difference leave 0 out: Bonett and
    Price's of an accuracy, the sign test's of the median ratio of norms. Limits hold for all pairs
    of models together (Holm). An accuracy is that of the smallest ball that most models have.

    Args:
        reports: one of each model, on samples that they share.
        by: the metric in place of these, as rules name it: `attack.robust@linf,4/255`.

    Raises:
        UsageError: there is no report, or none that has the metric.
    """
    if not reports:
        raise UsageError("there is nothing to rank", "Give the reports of the models.")
    names, shared = model_labels(reports), matched(reports)
    rows = [_row(name, report) for name, report in zip(names, reports, strict=True)]
    asked = [chosen(by, reports)] if by else criteria(reports)
    contests = [contest(criterion, shared) for criterion in asked]
    by_place = paired_by_place(reports, names).values()
    notes = [Note(level="info", code="paired-by-place", text=text) for text in by_place]
    notes += _passed_over(contests)
    decisive = next((each for each in contests if each.pairs), None)
    if decisive is None:
        apart = contests[0].apart() if contests else {}
        models = (row.model_copy(update=apart.get(i, {})) for i, row in enumerate(rows))
        return Ranking(models=tuple(models), notes=tuple(notes))
    said = standings(decisive)
    ranked = {i for i, fields in said.items() if "rank" in fields}
    criterion = decisive.criterion
    return Ranking(
        criterion=criterion.rule.metric,
        ball=criterion.ball,
        better="lower" if criterion.rule.worse > 0 else "higher",
        pairs=sum({*places} <= ranked for places in decisive.pairs) // 2,
        models=tuple(rows[i].model_copy(update=said[i]) for i in said),
        notes=tuple(notes),
    )


def _row(name: str, report: Report) -> Ranked:
    """Sum a model up."""
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


def _passed_over(contests: Sequence[Contest]) -> Iterator[Note]:
    """Say by what models are not ranked although they have it."""
    last = next((i for i, each in enumerate(contests) if each.pairs), 0)
    for each in contests[:last]:
        for reason in dict.fromkeys(each.reasons.values()):
            text = f"not ranked by {each.criterion.rule.metric}: {reason}"
            yield Note(level="info", code="not-compared", text=text)
