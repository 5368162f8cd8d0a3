"""Judge the changes between two reports: one contrast for each row or column of a rule.

The gate, a comparison and a ranking all take this way: a rule names a column and a statistic,
`examine` contrasts the values of two reports on their shared samples, and a verdict says what the
test of the contrast proves. A rule is `regressed` if a change for the worse is proven, over all
rules and rows together, and its estimate is beyond the limit. `judge_change` says whether there is
a change at all. Both read the same contrast, so a change has one interval.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from lipaudit.errors import UsageError
from lipaudit.gate import conditions, groups, statistics
from lipaudit.gate.contrasts import OF_WEIGHTS, TOLERANCE, Contrast, compute_margin, examine
from lipaudit.gate.movement import describe_movement
from lipaudit.gate.rules import (
    EACH,
    NORM,
    RADIUS,
    Rule,
    choose_rules,
    list_absent,
    list_uninstalled,
)
from lipaudit.gate.statistics import ALPHA, DIGITS, LEVEL, Evidence
from lipaudit.gate.verdicts import Judgement, Verdict, VerdictStatus
from lipaudit.tables import Report
from lipaudit.tables.summary import list_warnings
from lipaudit.tables.trials import FLAGS

FELL = (
    "the first-order radius (margin over gradient norm) fell too: smaller norms do not make this "
    "model more robust"
)
MANY = 1000
"""Largest ratio between an interval and its change for which a verdict asks for samples."""
_LARGEST = Fraction(sys.float_info.max)


def judge(
    current: Report,
    baseline: Report,
    rules: Sequence[Rule] = (),
    *,
    alpha: float = ALPHA,
    strict: bool = False,
) -> Judgement:
    """Judge a report against a baseline.

    Absolute limits are judged on the current report alone. Changes are judged on the shared
    samples, pair by pair: a rule is regressed if a change for the worse is proven and its estimate
    is beyond the limit. A checkpoint that is no worse is flagged with a probability of at most
    alpha, over all rules and rows (Holm's procedure over the rules; over the rows of a rule sign
    flips, or Holm's procedure).

    Args:
        current: the report to judge.
        baseline: the report to compare it with.
        rules: the rules; empty: the default rules for the sections that a report has. A note names
            the others, if an audit usually has their section.
        alpha: chance of a false alarm of the whole gate.
        strict: whether `inconclusive` and `pass` fail where the limit is not proven to hold.

    Raises:
        UsageError: a rule matches nothing, or does not suit its metric.
    """
    if not 0 < alpha < 1:
        raise UsageError(f"alpha must be between 0 and 1, not {alpha}")
    chosen = tuple(rules) or choose_rules(current, baseline)
    examinations = [examine(rule, current, baseline, typed=bool(rules)) for rule in chosen]
    notes: list[str] = []
    if not rules:
        notes += list_absent(chosen)
        notes += list_uninstalled(current, baseline)
    if any(rule.group == EACH for rule in chosen):
        notes += groups.note_new_groups(current, baseline)
    # If gradients misled the attacks on the baseline, its robust accuracy may be too high.
    notes_of_baseline = [note for section in baseline.sections for note in section.notes]
    masking = (note.text for note in notes_of_baseline if note.code == "gradient-masking")
    notes += (f"{baseline.run.label}: {text}" for text in masking)
    notes += (text for _, text in conditions.list_differences(current, baseline))
    verdicts = _decide(chosen, examinations, alpha, strict=strict)
    return Judgement(
        current=current.run.label,
        baseline=baseline.run.label,
        alpha=alpha,
        strict=strict,
        verdicts=tuple(_add_remarks(verdicts, current, baseline)),
        notes=tuple(notes),
        predictions=describe_movement(current, baseline),
        warnings=tuple(note.text for note in list_warnings(current)),
    )


def _add_remarks(
    verdicts: Iterable[Verdict], current: Report, baseline: Report
) -> Iterator[Verdict]:
    """Yield the verdicts; an improved Jacobian norm gets a remark if the radius fell, too.

    The radius is the first-order estimate of robustness: the margin over the gradient norm. So
    smaller norms do not make a model more robust if its margins shrink faster.
    """
    for verdict in verdicts:
        if verdict.metric == NORM.metric and verdict.status == "improved":
            radius = examine(RADIUS, current, baseline, lenient=True)
            # `examine` returns a verdict, no list, if a report has no radius.
            status = isinstance(radius, list) and judge_change(RADIUS, radius[0]).status
            if status == "regressed":
                yield verdict.model_copy(update={"remark": FELL})
                continue
        yield verdict


def require_judgeable(rules: Sequence[Rule], baseline: Report) -> None:
    """Refuse rules that no report can be judged by, before a model is measured for hours.

    The baseline is compared with itself: a change without a test there has none in any report.

    Args:
        rules: the user's rules; empty: the default ones.
        baseline: the baseline.

    Raises:
        UsageError: a rule matches nothing, or does not suit its metric; or no default rule exists.
        BaselineError: a rule reads groups of samples that the baseline does not have.
    """
    for rule in rules or choose_rules(baseline):
        if rule.group:
            groups.list_own_members(rule, baseline, "the baseline")
        # An absolute limit is on the current report, which may have rows that the baseline lacks.
        # Calibration errors (ece) depend on the number of samples, which is the same in both: so
        # both reports have them or neither, except those of examples of another model (transfer).
        is_calibration = rule.column.startswith("ece") and "transfer" not in rule.text
        if is_calibration or rule.limit.kind != "absolute":
            examine(rule, baseline, baseline, typed=bool(rules))


# Verdicts


def _compute_null(rule: Rule) -> float:
    """Return the change that a test must exceed: none, or the improvement that a rule demands."""
    return min(0.0, compute_margin(rule))


def _express_change(rule: Rule, worse: float) -> float:
    """Return a change in the printed form: new over old minus 1, or new minus old.

    Args:
        rule: the rule.
        worse: the change for the worse: a log-ratio if the limit of the rule is relative.
    """
    value = rule.worse * worse + 0.0  # no change is 0.0, also where lower is worse: never -0.0
    with np.errstate(over="ignore"):
        return float(np.expm1(value)) if rule.limit.kind == "relative" else value


def _decide(
    rules: Sequence[Rule],
    examinations: Sequence[list[Contrast] | Verdict],
    alpha: float,
    *,
    strict: bool,
) -> Iterator[Verdict]:
    """Yield the verdicts of all rules; tests are corrected for many rows, then for many rules.

    The p-value of a rule is the smallest of its rows; Holm's procedure corrects it for the number
    of rules. So a model that is no worse is flagged with a probability of at most alpha.

    Args:
        rules: the rules.
        examinations: for each rule, the contrasts of its rows, or the verdict that says why it
            cannot be judged.
        alpha: error probability of the whole gate.
        strict: whether limits must be proven.
    """
    # For each rule, the p-values of "no worse" by row, corrected for the rows of the rule.
    rows = list[dict[tuple[str, str], float]]()
    for rule, found in zip(rules, examinations, strict=True):
        tested = found if isinstance(found, list) else []
        rows.append(_adjust_rows(rule, [c for c in tested if c.evidence and not c.same]))
    smallest = {i: min(p_values.values()) for i, p_values in enumerate(rows) if p_values}
    corrected = statistics.correct_by_holm(smallest)
    for i, (rule, examined) in enumerate(zip(rules, examinations, strict=True)):
        if isinstance(examined, Verdict):
            yield examined
            continue
        # Holm's p-value of the rule, and the number of rules by which it was multiplied.
        p_of_rule, times = corrected.get(i, (1.0, 1))
        for contrast in examined:
            p_of_row = rows[i].get(contrast.key)
            verdict = _make_verdict(rule, contrast, alpha / 2)
            if p_of_row is None:
                yield _doubt_untested(verdict, rule)
                continue
            # A row is proven to be worse only if its rule is.
            adjusted = min(1.0, max(p_of_rule, p_of_row * times))
            # The level of one test among all of the gate (Bonferroni), one-sided. From it, only
            # the number of samples is estimated that would prove a change.
            level = alpha / max(2, len(smallest) * len(rows[i]))
            yield _settle(verdict, rule, contrast, adjusted, alpha, level, strict=strict)


def _doubt_untested(verdict: Verdict, rule: Rule) -> Verdict:
    """Return a verdict without a test; a claim that values changed becomes a weaker one.

    Absolute limits and figures of the weights alone need no test: they do not vary by chance.
    """
    doubted = {"regressed": "inconclusive", "improved": "pass"}
    if verdict.old is None or verdict.status not in doubted or rule.about.domain == OF_WEIGHTS:
        return verdict
    return verdict.model_copy(update={"status": doubted[verdict.status]})


def _adjust_rows(rule: Rule, contrasts: Sequence[Contrast]) -> dict[tuple[str, str], float]:
    """Return the p-values of "no worse" of the rows of a rule, corrected for testing many rows.

    Sign tests (of many heads, for example) are corrected jointly by flipping signs: heads that
    change together then cost less than independent ones. Groups of samples and rows with other
    tests are corrected by Holm's procedure.

    Args:
        rule: the rule.
        contrasts: the rows or groups of the rule that have a test.

    Returns:
        The p-value of each contrast, by its key.
    """
    null = _compute_null(rule)  # 0, or below it if the rule demands an improvement
    p_values = {c.key: c.evidence.p(null) for c in contrasts if c.evidence}
    if rule.group:
        # A group with fewer samples than its test needs proves nothing: its p-value is 1, and it
        # does not count among the tests that the other groups are corrected for.
        large = {c.key for c in contrasts if c.evidence and c.evidence.samples >= c.evidence.least}
        tested = {key: p_values[key] for key in p_values if key in large}
        corrected = statistics.correct_by_holm(tested)
        return {key: corrected[key][0] if key in large else 1.0 for key in p_values}
    if len(p_values) > 1 and all(c.evidence and c.evidence.of_signs for c in contrasts):
        changes = np.stack([contrast.changes for contrast in contrasts])  # (rows, samples)
        # Rows that usually move by less than a quarter of the limit cannot break it.
        quiet = statistics.QUIET * max(0.0, compute_margin(rule))
        adjusted = statistics.correct_jointly(changes - null, quiet).tolist()
        return dict(zip(p_values, adjusted, strict=True))
    return {key: p for key, (p, _) in statistics.correct_by_holm(p_values).items()}


def judge_change(rule: Rule, contrast: Contrast, level: float = LEVEL) -> Verdict:
    """Return the verdict on whether a figure changed at all, however little.

    Args:
        rule: a rule that allows no change.
        contrast: the values, and their test if they have one.
        level: one-sided error probability of each limit of the change.
    """
    verdict = _make_verdict(rule, contrast, level)
    status = verdict.change_status
    if status is None:  # without a test, the values alone are compared
        status = _reword(verdict.status, [verdict.change], verdict.unit)
    return verdict.model_copy(update={"status": status, "change_status": None})


def _praises_loss(rule: Rule) -> bool:
    """Say whether a rule asks for less of a figure that is better higher, or for more of a norm.

    Such a rule guards against change; what it allows is no improvement.
    """
    better = rule.about.better
    if better is None and rule.column in FLAGS:
        better = "higher"
    if better is None:
        return False
    return (better == "higher") == (rule.op == "<=")


def _make_verdict(rule: Rule, contrast: Contrast, level: float) -> Verdict:
    """Return the verdict on one row of a rule: its figures; without a test also its final status.

    A tested change has the status `pass` until the p-values of all rows are corrected.

    Args:
        rule: the rule.
        contrast: the old and new value of the row, and their test if they have one.
        level: one-sided error probability of each limit of the change. The change alone, without
            the limit of the rule, is regressed or improved if its limits exclude 0.
    """
    evidence = contrast.evidence
    old = contrast.old
    new = contrast.new
    known: dict[str, Any] = {"rule": rule.text, "metric": rule.metric, "name": contrast.name}
    known["group"] = contrast.group
    known |= {"old": old, "new": new, "unit": rule.limit.unit}
    if evidence is not None and evidence.mcnemar is not None:  # a share of yes-or-no values
        worse = contrast.changes
        known |= {"lost": int((worse > 0).sum()), "gained": int((worse < 0).sum())}
        known["mcnemar"] = evidence.mcnemar
    if contrast.same:
        return Verdict(status="unchanged", **known)
    if evidence is None:
        status: VerdictStatus = "pass"
        if contrast.group:
            known["samples"] = len(contrast.ids)
        if _breaks_limit(rule, new, old):
            status = "regressed"
        # The way back would break the limit: so the new value is better by more than that.
        elif old is not None and _breaks_limit(rule, old, new) and not _praises_loss(rule):
            status = "improved"
        return Verdict(status=status, **known)
    low, high = evidence.limits(level)
    ends = sorted(_express_change(rule, end) for end in (low, high))
    known |= {"low": ends[0], "high": ends[1], "samples": evidence.samples}
    known |= {"paired": _express_change(rule, evidence.estimate)}
    known["p"] = evidence.p(_compute_null(rule))
    alone: VerdictStatus = "inconclusive"
    if round(low, DIGITS) > 0:
        alone = "regressed"
    elif round(high, DIGITS) < 0:
        alone = "improved"
    alone = _reword(alone, ends, rule.limit.unit)
    return Verdict(status="pass", change_status=alone, **known)


def _settle(
    verdict: Verdict,
    rule: Rule,
    contrast: Contrast,
    adjusted: float,
    alpha: float,
    level: float,
    *,
    strict: bool,
) -> Verdict:
    """Decide a tested change: proven or not, within the limit or beyond it.

    Args:
        verdict: the figures of the row.
        rule: the rule.
        contrast: the old and new value of the row, and the test of their change.
        adjusted: p-value of "no worse" over all rules and rows.
        alpha: error probability of the gate.
        level: level of one test among all, from which the needed samples are estimated.
        strict: whether a limit must be proven.
    """
    evidence = contrast.evidence
    assert evidence is not None
    margin = compute_margin(rule)
    p = verdict.p or 0.0
    estimate = round(evidence.estimate, DIGITS)
    high = round(evidence.limits(alpha / 2)[1], DIGITS)
    update: dict[str, Any] = {"p_adjusted": adjusted}
    # The limits of the row alone must exclude 0, too: then `compare` uses the same word.
    worse_is_proven = adjusted <= alpha and p <= alpha / 2
    if estimate > margin and not worse_is_proven:
        update |= {
            "status": "inconclusive",
            "samples_needed": _estimate_needed(evidence, p, level),
        }
    elif estimate > margin:
        update["status"] = "regressed"
    # Better by more than the limit allows for the worse, and proven to be better at all.
    elif estimate < -abs(margin) and high < 0 and high <= margin:
        update["status"] = "pass (proven)" if _praises_loss(rule) else "improved"
    elif high <= margin:
        update["status"] = "pass (proven)"
    elif strict:  # within the limit, but not proven: --strict fails it
        update["samples_needed"] = _count_to_prove(evidence.samples, estimate, high, margin)
    return verdict.model_copy(update=update)


def _count_to_prove(n: int, estimate: float, high: float, margin: float) -> int | None:
    """Estimate how many samples would prove that a change of this size is within its limit.

    The distance of the upper confidence limit from the estimate shrinks like 1 / sqrt(n): it has
    to shrink to the distance of the margin.

    Args:
        n: number of samples of the run.
        estimate: the observed change for the worse.
        high: its upper confidence limit.
        margin: the largest change that the rule allows.
    """
    distance = margin - estimate
    if not math.isfinite(high) or distance <= 0:
        return None
    ratio = min((high - estimate) / distance, MANY)
    return max(n + 1, math.ceil(n * ratio**2))


def _estimate_needed(evidence: Evidence, p: float, level: float) -> int | None:
    """Estimate how many samples would prove a change of this size; None if no estimate exists.

    Args:
        evidence: the statistics of the change.
        p: its p-value of "no worse", for this row alone.
        level: the p-value that would prove it among all tests of the gate.
    """
    # Even if all n samples get worse, the p-value of a sign test is 2^-n.
    least = max(evidence.least, math.ceil(-math.log2(level)))
    if evidence.samples < least:
        return least
    low = evidence.limits(level)[0]
    if math.isfinite(low) and 0 < evidence.estimate < math.inf:
        # The distance of the lower limit from the estimate shrinks like 1 / sqrt(n), until the
        # limit reaches 0.
        ratio = 1 - min(low, 0.0) / evidence.estimate
    elif 0 < p < 0.5:
        # Without limits: the normal quantile of the p-value grows like sqrt(n).
        ratio = NormalDist().inv_cdf(1 - level) / NormalDist().inv_cdf(1 - p)
    else:
        return None
    return max(evidence.samples + 1, math.ceil(evidence.samples * min(ratio, MANY) ** 2))


def _breaks_limit(rule: Rule, new: float, old: float | None) -> bool:
    """Say whether a value breaks its limit; a value equal to the limit does not.

    The comparison uses exact decimals of 12 digits, so that 73% is never below 73%.

    Args:
        rule: the rule.
        new: the value.
        old: the value that a limit on a change starts from; None for an absolute limit.
    """
    bound = rule.limit.value
    if old is not None and rule.limit.kind == "relative":
        bound = _round_digits(_to_decimal(old) * (1 + bound))
    elif old is not None and rule.limit.kind == "difference":
        bound = _round_digits(_to_decimal(old) + bound)
    return rule.worse * (_to_decimal(new) - bound) > 0


def _round_digits(value: Fraction) -> Fraction:
    """Round to 12 digits; a value that is no float stays as it is."""
    return _to_decimal(float(value)) if abs(value) < _LARGEST else value


def _to_decimal(value: float) -> Fraction:
    return Fraction(format(value, f".{DIGITS}g"))


def _reword(status: VerdictStatus, ends: Sequence[float | None], unit: str) -> VerdictStatus:
    """Return whether a figure changed, from the status of a rule that allows no change.

    Args:
        status: the status of that rule.
        ends: the confidence limits of the change, or the change alone.
        unit: its unit: "%", "pp", or empty for a difference, which has no common accuracy.
    """
    # Norms are computed to a relative accuracy of TOLERANCE: a smaller change is none.
    if unit and all(end is not None and abs(end) <= TOLERANCE for end in ends):
        return "unchanged"
    return "inconclusive" if status == "pass" else status
