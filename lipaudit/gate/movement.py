"""How the predictions of the same samples moved from one report to another.

The paired table counts samples that are right or wrong in either report. The divergence of the
outputs sees changes that turn no prediction yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError
from lipaudit.gate import pairing, readings, statistics
from lipaudit.gate.statistics import LEVEL, Movement, Proportion, Values
from lipaudit.tables import Report, Section
from lipaudit.tables.report import SCORES

NOT_STORED = "a report has no outputs: they are stored of few classes (attack)"
OTHER_CLASSES = "the outputs of the two reports are of other classes"


def describe_movement(current: Report, baseline: Report) -> Movement | None:
    """Return how the predictions of shared samples changed; None without predictions.

    The first section with predictions in both reports is used.

    Args:
        current: the second report.
        baseline: the first report.
    """
    for old in baseline.sections:
        new = current.section(old.measure)
        if new is None or "predicted" not in new.samples or "predicted" not in old.samples:
            continue
        try:  # the indices of the shared samples in both sections, however few (`least`)
            indices = pairing.find_shared(old.measure, new.ids, known=old.ids, least=0.0)
        except BaselineError:  # no sample is shared
            continue
        return _compare_sections(new, old, *indices)
    return None


def _compare_sections(
    new: Section, old: Section, new_indices: Sequence[int], old_indices: Sequence[int]
) -> Movement:
    """Return how predictions changed between two sections of the same measure.

    Args:
        new: the section of the second report.
        old: the section of the first report.
        new_indices: the indices of the shared samples in the new section.
        old_indices: the indices of the same samples in the old section, in the same order.
    """
    count = len(old_indices)
    # Two models may number the same classes differently: if both sections have names of the
    # classes, names are compared.
    is_named = _has_names(new, new_indices) and _has_names(old, old_indices)
    after = _name_predictions(new, new_indices, is_named)
    before = _name_predictions(old, old_indices, is_named)
    equal = np.array([one == two for one, two in zip(before, after, strict=True)])
    share = Proportion.of(int(equal.sum()), count)
    fields: dict[str, Any] = {"measure": old.measure, "samples": count, "equal": share}
    right_before = _read_flags(old, old_indices)
    right_after = _read_flags(new, new_indices)
    known = ~np.isnan(right_before) & ~np.isnan(right_after)  # samples with a label
    labelled = int(known.sum())
    if labelled:
        fields |= _count_moves(
            was_right=right_before[known] == 1,
            is_right=right_after[known] == 1,
            moved=~equal[known],
        )
    fields |= _measure_divergence(new, old, new_indices, old_indices)
    return Movement(labelled=labelled, **fields)


def _count_moves(was_right: Any, is_right: Any, moved: Any) -> dict[str, Any]:
    """Return how many predictions became wrong or right, and the change of the accuracy.

    `low` and `high` are 95% limits of the change of the accuracy (Bonett and Price). `mcnemar` is
    the two-sided p-value of "as many predictions became wrong as right" (McNemar's exact test).

    Args:
        was_right: (samples,), whether each labelled sample was classified correctly before.
        is_right: (samples,), whether each sample is classified correctly now.
        moved: (samples,), whether the prediction of each sample changed.
    """
    labelled = len(was_right)
    lost = int((was_right & ~is_right).sum())
    gained = int((~was_right & is_right).sum())
    other = int((~was_right & ~is_right & moved).sum())
    evidence = statistics.judge_share(worse=lost, better=gained, samples=labelled)
    # Limits of the change for the worse. The accuracy changes by the negative of this change: so
    # both limits change their sign, and low and high are exchanged.
    worse_low, worse_high = evidence.limits(LEVEL)
    return {
        "right_to_wrong": Proportion.of(lost, labelled),
        "wrong_to_right": Proportion.of(gained, labelled),
        "wrong_to_other": Proportion.of(other, labelled),
        "change": (gained - lost) / labelled,
        "low": 0.0 - worse_high,  # not -worse_high, which may be -0.0
        "high": 0.0 - worse_low,
        "mcnemar": evidence.mcnemar,
    }


def _has_names(section: Section, indices: Sequence[int]) -> bool:
    """Return whether every predicted class has a name; names are comparable between models."""
    predicted = section.samples["predicted"]
    return all(predicted[i] is None or predicted[i] in section.classes for i in indices)


def _name_predictions(section: Section, indices: Sequence[int], is_named: bool) -> list[Any]:
    """Return the predicted class of each sample: the name if `is_named`, else the number."""
    predicted = [section.samples["predicted"][i] for i in indices]
    if not is_named:
        return predicted
    names: dict[Any, str] = {**section.classes}
    return [names.get(number) for number in predicted]


def _read_flags(section: Section, indices: Sequence[int]) -> Values:
    """Return 1 for each correctly classified sample, 0 for a wrong one, NaN without a label."""
    cells = section.samples.get("correct") or [None] * len(section.ids)
    return readings.read_numbers(cells[i] for i in indices)


def _measure_divergence(
    new: Section, old: Section, new_indices: Sequence[int], old_indices: Sequence[int]
) -> dict[str, Any]:
    """Return the mean KL divergence of the outputs with 95% limits, or why there is none.

    Args:
        new: the section of the second report.
        old: the section of the first report.
        new_indices: the indices of the shared samples in the new section.
        old_indices: the indices of the same samples in the old section, in the same order.
    """
    after = _read_scores(new, new_indices)
    before = _read_scores(old, old_indices)
    if after is None or before is None:
        return {"reason": NOT_STORED}
    renamed = any(new.classes.get(number, name) != name for number, name in old.classes.items())
    if after.shape != before.shape or renamed:
        return {"reason": OTHER_CLASSES}
    divergence = compute_divergence(before, after)
    # The bootstrap judges the change from one list of values to another. The change from zeros to
    # the divergences is their mean, so its limits are limits of the mean.
    zeros = np.zeros(len(divergence))

    def compute_changes(first: Values, second: Values) -> Values:
        # Return the change of the mean in each draw, (draws,). Both arguments are values of
        # samples that were drawn with replacement, (draws, samples).
        return np.asarray(second.mean(1) - first.mean(1))

    fields: dict[str, Any] = {"kl": float(divergence.mean())}
    least = statistics.LEAST["mean"]
    if len(divergence) >= least and np.isfinite(divergence).all():
        evidence = statistics.judge_by_bootstrap(
            old=zeros, new=divergence, change=compute_changes, least=least
        )
        fields["kl_low"], fields["kl_high"] = evidence.limits(LEVEL)
    return fields


def _read_scores(section: Section, indices: Sequence[int]) -> Values | None:
    """Return the log-probabilities of the classes, (samples, classes), if they are stored."""
    stored = section.arrays.get(SCORES)
    if stored is None or stored.shape[1:] != (len(section.ids),):
        return None
    return stored.numpy()[:, indices].T


def compute_divergence(first: Values, second: Values) -> Values:
    """Return KL(p || q) = sum_c p_c (log p_c - log q_c) of every sample, in nats.

    Args:
        first: log p, (samples, classes); stored with six digits, so they are normalised again.
        second: log q.
    """
    log_p = first - np.logaddexp.reduce(first, axis=1, keepdims=True)
    log_q = second - np.logaddexp.reduce(second, axis=1, keepdims=True)
    p = np.exp(log_p)
    with np.errstate(invalid="ignore"):  # for p = 0 the term is 0, not 0 * (-inf) = NaN
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    # Rounding may leave a divergence of equal outputs just below 0.
    return np.asarray(np.maximum(terms.sum(1), 0.0))
