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
    notes_of_baseline = [note for section in baseline.sections for note in section.notes]
    signs = (note.text for note in notes_of_baseline if note.code == "gradient-masking")
    notes += (f"{baseline.run.label}: {text}" for text in signs)
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
    """Say beside a norm that improved whether the radius fell, too."""
    for verdict in verdicts:
        if verdict.metric == NORM.metric and verdict.status == "improved":
            radius = examine(RADIUS, current, baseline, lenient=True)
            fell = isinstance(radius, list) and judge_change(RADIUS, radius[0]).status
            if fell == "regressed":
                yield verdict.model_copy(update={"remark": FELL})
                continue
        yield verdict


def require_judgeable(rules: Sequence[Rule], baseline: Report) -> None:
    """Refuse rules that no report can be judged by, before a model is measured for hours.

    A change that has no test between the baseline and itself has none at all. An absolute limit
    is judged on the current report, which may have rows that the baseline has not; but both have
    the same number of samples, so both have calibration errors or neither has.

    Raises:
        UsageError: a rule matches nothing, or does not suit its metric; or no default rule exists.
        BaselineError: a rule reads groups of samples that the baseline does not have.
    """
    for rule in rules or choose_rules(baseline):
        if rule.group:
            groups.list_own_members(rule, baseline, "the baseline")
        rated = rule.column.startswith("ece") and "transfer" not in rule.text
        if rated or rule.limit.kind != "absolute":
            examine(rule, baseline, baseline, typed=bool(rules))


# Verdicts


def _compute_null(rule: Rule) -> float:
    """Return the change that a test must exceed: none, or the improvement that a rule demands."""
    return min(0.0, compute_margin(rule))


def _express_change(rule: Rule, worse: float) -> float:
    """Return a change in the printed form: new over old minus 1, or new minus old."""
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
    """Correct for many rows within each rule, then for many rules by Holm's procedure."""
    rows = list[dict[tuple[str, str], float]]()
    for rule, found in zip(rules, examinations, strict=True):
        tested = found if isinstance(found, list) else []
        rows.append(_adjust_rows(rule, [c for c in tested if c.evidence and not c.same]))
    smallest = {i: min(ps.values()) for i, ps in enumerate(rows) if ps}
    corrected = statistics.correct_by_holm(smallest)
    for i, (rule, examined) in enumerate(zip(rules, examinations, strict=True)):
        if isinstance(examined, Verdict):
            yield examined
            continue
        of_rule, times = corrected.get(i, (1.0, 1))
        for contrast in examined:
            of_row = rows[i].get(contrast.key)
            verdict = _make_verdict(rule, contrast, alpha / 2)
            if of_row is None:
                yield _doubt_untested(verdict, rule)
                continue
            adjusted = min(1.0, max(of_rule, of_row * times))
            level = alpha / max(2, len(smallest) * len(rows[i]))
            yield _settle(verdict, rule, contrast, adjusted, alpha, level, strict=strict)


def _doubt_untested(verdict: Verdict, rule: Rule) -> Verdict:
    """Take back a claim that no test proves: of a change, other than of the weights."""
    doubted = {"regressed": "inconclusive", "improved": "pass"}
    if verdict.old is None or verdict.status not in doubted or rule.about.domain == OF_WEIGHTS:
        return verdict
    return verdict.model_copy(update={"status": doubted[verdict.status]})


def _adjust_rows(rule: Rule, contrasts: Sequence[Contrast]) -> dict[tuple[str, str], float]:
    """Return the p-value of "no worse" of every row, corrected for the rows of a rule.

    Sign tests of many rows are corrected jointly, other tests and groups by Holm's procedure.
    """
    null = _compute_null(rule)
    tests = {c.key: c.evidence.p(null) for c in contrasts if c.evidence}
    if rule.group:
        # Groups that are too small to prove anything do not count.
        large = {c.key for c in contrasts if c.evidence and c.evidence.samples >= c.evidence.least}
        corrected = statistics.correct_by_holm({key: tests[key] for key in tests if key in large})
        return {key: corrected[key][0] if key in large else 1.0 for key in tests}
    if len(tests) > 1 and all(c.evidence and c.evidence.of_signs for c in contrasts):
        changes = np.stack([contrast.changes for contrast in contrasts])
        quiet = statistics.QUIET * max(0.0, compute_margin(rule))
        adjusted = statistics.correct_jointly(changes - null, quiet).tolist()
        return dict(zip(tests, adjusted, strict=True))
    return {key: p for key, (p, _) in statistics.correct_by_holm(tests).items()}


def judge_change(rule: Rule, contrast: Contrast, level: float = LEVEL) -> Verdict:
    """Say whether there is a change at all: the verdict on a rule without a margin."""
    verdict = _make_verdict(rule, contrast, level)
    status = verdict.change_status
    if status is None:
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
    """Return the figures of a contrast, and the verdict where it has no test.

    Args:
        rule: the rule.
        contrast: the contrast.
        level: one-sided level of the limits, and of the word for the change alone.
    """
    evidence, old, new = contrast.evidence, contrast.old, contrast.new
    known: dict[str, Any] = {"rule": rule.text, "metric": rule.metric, "name": contrast.name}
    known["group"] = contrast.group
    known |= {"old": old, "new": new, "unit": rule.limit.unit}
    if evidence is not None and evidence.mcnemar is not None:
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
        verdict: its figures.
        rule: the rule.
        contrast: the contrast, with a test.
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
    elif estimate < -abs(margin) and high < 0 and high <= margin:
        update["status"] = "pass (proven)" if _praises_loss(rule) else "improved"
    elif high <= margin:
        update["status"] = "pass (proven)"
    elif strict:
        update["samples_needed"] = _count_to_prove(evidence.samples, estimate, high, margin)
    return verdict.model_copy(update=update)


def _count_to_prove(n: int, estimate: float, high: float, margin: float) -> int | None:
    """Estimate the number of samples that would prove a limit by a change of the same size.

    The distance of the upper limit from the estimate shrinks with the root of that number.
    """
    room = margin - estimate
    if not math.isfinite(high) or room <= 0:
        return None
    ratio = min((high - estimate) / room, MANY)
    return max(n + 1, math.ceil(n * ratio**2))


def _estimate_needed(evidence: Evidence, p: float, level: float) -> int | None:
    """Estimate the number of samples that would prove a change of the same size.

    The distance of a limit from the estimate shrinks with the root of the number of samples, and
    the normal quantile of a p-value grows with it.
    """
    least = max(evidence.least, math.ceil(-math.log2(level)))
    if evidence.samples < least:
        return least
    low = evidence.limits(level)[0]
    if math.isfinite(low) and 0 < evidence.estimate < math.inf:
        ratio = 1 - min(low, 0.0) / evidence.estimate
    elif 0 < p < 0.5:
        ratio = NormalDist().inv_cdf(1 - level) / NormalDist().inv_cdf(1 - p)
    else:
        return None
    return max(evidence.samples + 1, math.ceil(evidence.samples * min(ratio, MANY) ** 2))


def _breaks_limit(rule: Rule, new: float, old: float | None) -> bool:
    """Say whether a value breaks its limit; a value equal to the limit does not.

    The comparison uses exact decimals of 12 digits, so that 73% is never below 73%.
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
    """Turn a status into the answer whether there is a change."""
    if unit and all(end is not None and abs(end) <= TOLERANCE for end in ends):
        return "unchanged"
    return "inconclusive" if status == "pass" else status
