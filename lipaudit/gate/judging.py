"""Judge a report against a baseline by rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lipaudit.errors import BaselineError, EvaluationError, UsageError
from lipaudit.gate.comparable import list_differences, require_same_conditions, word_warnings
from lipaudit.gate.contrasts import (
    TOLERANCE,
    Contrast,
    compare_to_limit,
    compute_margin,
    contrast_values,
    express_change,
)
from lipaudit.gate.rules import BINARY, DEFAULT_RULES, Rule, parse_rule
from lipaudit.gate.statistics import DIGITS, LEVEL, Evidence, correct_by_holm
from lipaudit.gate.verdicts import Judgement, Verdict, VerdictStatus
from lipaudit.settings.audit import USUAL
from lipaudit.tables import Report

SHOWN = parse_rule("attack.correct >= -0pp")
Examined = list[Contrast] | Verdict
"""What a rule contrasts, or the verdict that it could not be judged."""


def judge(
    current: Report,
    baseline: Report,
    rules: Sequence[Rule] = (),
    *,
    alpha: float = 0.05,
    strict: bool = False,
) -> Judgement:
    """Judge a report against a baseline.

    Absolute limits are judged on the current report alone. Changes are judged on the shared
    samples, pair by pair: Holm's procedure over the rules keeps the chance of flagging any rule
    that holds at alpha. A rule over several rows enters it with the smallest p-value of its
    rows, corrected by Holm over those rows.

    Args:
        current: the report to judge.
        baseline: the report to compare it with.
        rules: `DEFAULT_RULES` where empty, less those whose section neither report has; which
            these are is noted, as far as an audit usually has it.
        alpha: chance of a false alarm of the whole gate.
        strict: whether `inconclusive` and `pass (not proven)` fail.

    Raises:
        UsageError: when a rule matches nothing or makes no sense for its metric.
    """
    if not 0 < alpha < 1:
        raise UsageError(f"alpha must lie between 0 and 1, not {alpha}")
    chosen = tuple(rules) or _choose_rules(current, baseline)
    examinations = [_examine(rule, current, baseline, typed=bool(rules)) for rule in chosen]
    usual = () if rules else (rule for rule in DEFAULT_RULES if rule.measure in USUAL)
    dropped = (rule for rule in usual if rule not in chosen)
    verdicts = tuple(_decide(chosen, examinations, alpha))
    named = {sample for verdict in verdicts for sample in verdict.moved}
    places = baseline.found("place") | current.found("place")
    return Judgement(
        current=current.run.model.spec,
        baseline=baseline.run.model.spec,
        alpha=alpha,
        strict=strict,
        verdicts=verdicts,
        places={sample: places[sample] for sample in sorted(named & places.keys())},
        shown=_judge_clean_accuracy(current, baseline),
        notes=(
            *(f"not judged, neither report has its section: {rule.text}" for rule in dropped),
            *list_differences(current, baseline).values(),
        ),
        warnings=word_warnings(current, baseline),
    )


def judge_change(
    rule: Rule, current: Report, baseline: Report, level: float = LEVEL
) -> list[Verdict]:
    """Say of each row of a rule without a margin whether it changed, at a level for itself.

    Precision and preprocessing may differ, and few samples may be shared.
    """
    examined = _examine(rule, current, baseline, alone=True)
    if isinstance(examined, Verdict):
        return [examined.model_copy(update={"rule": rule.metric})]
    return [_describe_change(rule, contrast, level) for contrast in examined]


def _describe_change(rule: Rule, contrast: Contrast, level: float) -> Verdict:
    verdict = _make_verdict(rule, contrast, level, None)
    ends = [verdict.change] if verdict.low is None else [verdict.low, verdict.high]
    return verdict.model_copy(
        update={
            "status": _reword(verdict.status, ends, verdict.unit),
            "rule": verdict.metric,
            "change_status": None,
            "change_low": None,
            "change_high": None,
            "detectable": None,
            "samples_needed": None,
        }
    )


def _choose_rules(current: Report, baseline: Report) -> tuple[Rule, ...]:
    """Return the default rules whose section at least one report has."""
    measures = {section.measure for report in (current, baseline) for section in report.sections}
    kept = tuple(rule for rule in DEFAULT_RULES if rule.measure in measures)
    if not kept:
        raise UsageError(
            f"no default rule is about {', '.join(sorted(measures)) or 'what was not measured'}",
            _suggest_rule(current),
        )
    return kept


def _suggest_rule(report: Report) -> str:
    """Write a rule on what a report has."""
    rules = (
        f"Such as --fail-on '{section.measure}.{name} {sign}5%'; "
        for section in report.sections
        for name, column in section.columns.items()
        if column.better and name not in BINARY
        for sign in ["<= +" if column.better == "lower" else ">= -"]
    )
    measure = report.sections[0].measure if report.sections else "rules"
    return f"{next(rules, '')}lipaudit explain {measure} lists what a rule can name."


def _judge_clean_accuracy(current: Report, baseline: Report) -> tuple[Verdict, ...]:
    """Return the clean accuracies, where both reports have them."""
    sections = [report.section(SHOWN.measure) for report in (current, baseline)]
    if not all(section and SHOWN.column in section.samples for section in sections):
        return ()
    examined = _examine(SHOWN, current, baseline, alone=True)
    found = [] if isinstance(examined, Verdict) else examined
    return tuple(_make_verdict(SHOWN, contrast, LEVEL, None) for contrast in found)


def _examine(
    rule: Rule, current: Report, baseline: Report, *, alone: bool = False, typed: bool = False
) -> Examined:
    """Return what a rule contrasts, or the verdict that it could not be judged.

    Raises:
        UsageError: the rule was typed, and matches nothing or makes no sense for its metric.
    """
    try:
        if alone:
            return contrast_values(rule, current, baseline, least=0.0)
        changes = contrast_values(rule, current, baseline)
        if rule.limit.kind != "absolute":
            require_same_conditions(current.run, baseline.run)
        return changes
    except EvaluationError as error:
        return refuse(rule, error.message, "error")
    except (BaselineError, UsageError) as error:
        if typed and isinstance(error, UsageError):
            raise
        return refuse(rule, error.message)


def refuse(rule: Rule, reason: str, status: VerdictStatus = "not comparable") -> Verdict:
    """Return the verdict on what cannot be judged."""
    return Verdict(rule=rule.text, metric=rule.metric, status=status, reason=reason)


def _decide(
    rules: Sequence[Rule], examinations: Sequence[Examined], alpha: float
) -> Iterator[Verdict]:
    """Correct for many rules, then within each rule for many rows, both by Holm's procedure."""
    rows = [
        {c.name: c.tested.p(compute_margin(rule)) for c in examined if c.tested is not None}
        if isinstance(examined, list)
        else {}
        for rule, examined in zip(rules, examinations, strict=True)
    ]
    smallest = [min(1.0, len(ps) * min(ps.values())) for ps in rows if ps]
    corrected = zip(*correct_by_holm(smallest, alpha), strict=True)
    for rule, examined, ps in zip(rules, examinations, rows, strict=True):
        if isinstance(examined, Verdict):
            yield examined
            continue
        of_rule, level = next(corrected) if ps else (0.0, alpha)
        of_rows = dict(
            zip(ps, zip(*correct_by_holm([*ps.values()], level), strict=True), strict=True)
        )
        for contrast in examined:
            p, own = of_rows.get(contrast.name, (None, alpha))
            adjusted = None if p is None else min(1.0, max(of_rule, p * alpha / level))
            yield _make_verdict(rule, contrast, own, adjusted)


def _make_verdict(rule: Rule, contrast: Contrast, level: float, adjusted: float | None) -> Verdict:
    verdict = Verdict(
        rule=rule.text,
        metric=rule.metric,
        name=contrast.name,
        status=_compare_plainly(rule, contrast),
        old=contrast.old,
        new=contrast.new,
        unit=rule.limit.unit,
    )
    evidence = contrast.tested
    if evidence is None:
        return verdict
    bound, low = compute_margin(rule), evidence.limits(level)[0]
    status, ends = _read_status(evidence, level, bound), _express_limits(rule, evidence, level)
    alone = _express_limits(rule, evidence, LEVEL)
    return verdict.model_copy(
        update={
            "status": status,
            "paired": express_change(rule, evidence.estimate),
            "low": ends[0],
            "high": ends[1],
            "p": evidence.p(bound),
            "p_adjusted": adjusted,
            "level": level,
            "change_status": _reword(_read_status(evidence, LEVEL, 0.0), alone, verdict.unit),
            "change_low": alone[0],
            "change_high": alone[1],
            "mcnemar": evidence.mcnemar,
            "samples": evidence.samples,
            "detectable": _compute_detectable(rule, evidence, level),
            "moved": contrast.moved,
            "samples_needed": _estimate_samples(evidence, bound, low)
            if status == "inconclusive"
            else None,
        }
    )


def _express_limits(rule: Rule, evidence: Evidence, level: float) -> list[float]:
    """Return the limits of a change as they are printed, the lower one first."""
    return sorted(express_change(rule, limit) for limit in evidence.limits(level))


def _reword(status: VerdictStatus, ends: Sequence[float | None], unit: str) -> VerdictStatus:
    """Reword a status against a margin of 0 for the question: is there a change?"""
    if unit and all(end is not None and abs(end) <= TOLERANCE for end in ends):
        return "unchanged"
    return "inconclusive" if status in ("pass", "pass (not proven)") else status


def _read_status(evidence: Evidence, level: float, bound: float) -> VerdictStatus:
    """Read a verdict off the limits; equality with the margin passes."""
    found = evidence.estimate, *evidence.limits(level)
    estimate, low, high = (round(value, DIGITS) for value in found)
    if low > bound:
        return "regressed"
    if high < -abs(bound):
        return "improved"
    if estimate > bound:
        return "inconclusive"
    return "pass" if high <= bound else "pass (not proven)"


def _compare_plainly(rule: Rule, contrast: Contrast) -> VerdictStatus:
    """Judge values as they are."""
    if contrast.same:
        return "unchanged"
    if compare_to_limit(rule, contrast.new, contrast.old) > 0:
        return "regressed"
    better = contrast.old is not None and compare_to_limit(rule, contrast.old, contrast.new) > 0
    return "improved" if better else "pass"


def _compute_detectable(rule: Rule, evidence: Evidence, level: float) -> float | None:
    """Return the smallest change seen that would have been called a regression."""
    reach = evidence.reach(compute_margin(rule), level)
    if math.isnan(reach):
        return None
    return express_change(rule, reach) if math.isfinite(reach) else rule.worse * math.inf


def _estimate_samples(evidence: Evidence, bound: float, low: float) -> int | None:
    """Estimate the samples at which a change of this size would be proven."""
    if not math.isfinite(low):
        return None
    ratio = (evidence.estimate - low) / (evidence.estimate - bound)
    return math.ceil(evidence.samples * ratio**2)
