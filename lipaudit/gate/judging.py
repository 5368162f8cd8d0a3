"""Judge a report against a baseline by rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import cast

from lipaudit.errors import BaselineError, EvaluationError, UsageError
from lipaudit.gate.comparable import differences, same_conditions, spoils
from lipaudit.gate.contrasts import TOLERANCE, Contrast, contrasts, excess, margin, printed
from lipaudit.gate.rules import BINARY, DEFAULT_RULES, Rule, metrics, parse_rule
from lipaudit.gate.statistics import DIGITS, LEVEL, Evidence, holm
from lipaudit.gate.verdicts import Judgement, Verdict, VerdictStatus
from lipaudit.results import Report
from lipaudit.settings.audit import USUAL

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
    chosen = tuple(rules) or _applicable(current, baseline)
    examinations = [_examine(rule, current, baseline, typed=bool(rules)) for rule in chosen]
    usual = () if rules else (rule for rule in DEFAULT_RULES if rule.measure in USUAL)
    dropped = (rule for rule in usual if rule not in chosen)
    verdicts = tuple(chain.from_iterable(_decide(chosen, examinations, alpha)))
    named = {sample for verdict in verdicts for sample in verdict.moved}
    places = baseline.found("place") | current.found("place")
    return Judgement(
        current=current.run.model.spec,
        baseline=baseline.run.model.spec,
        alpha=alpha,
        strict=strict,
        verdicts=verdicts,
        places={sample: places[sample] for sample in sorted(named & places.keys())},
        shown=_shown(current, baseline),
        notes=(
            *(f"not judged, neither report has its section: {rule.text}" for rule in dropped),
            *differences(current, baseline).values(),
        ),
        warnings=spoils(current, baseline),
    )


def judge_alone(rule: Rule, current: Report, baseline: Report) -> list[Verdict]:
    """Judge one rule by itself: each row at `LEVEL`, whatever precision and samples are shared."""
    examined = _examine(rule, current, baseline, alone=True)
    if isinstance(examined, Verdict):
        return [examined]
    return [_verdict(rule, contrast, LEVEL, None) for contrast in examined]


def _applicable(current: Report, baseline: Report) -> tuple[Rule, ...]:
    """Return the default rules whose section at least one report has."""
    measures = {section.measure for report in (current, baseline) for section in report.sections}
    kept = tuple(rule for rule in DEFAULT_RULES if rule.measure in measures)
    if not kept:
        raise UsageError(
            f"no default rule is about {', '.join(sorted(measures)) or 'what was not measured'}",
            _suggested(current),
        )
    return kept


def _suggested(report: Report) -> str:
    """Write rules on what a report has."""
    rules = [
        f"--fail-on '{section.measure}.{name} {'<= +5%' if how.better == 'lower' else '>= -5%'}'"
        for section in report.sections
        for name, how in section.columns().items()
        if how.better and name not in BINARY and f"{section.measure}.{name}" in metrics()
    ]
    which = f"Such as {rules[0]}; " if rules else ""
    return (
        f"{which}lipaudit explain {report.sections[0].measure if report.sections else 'rules'}"
        " lists what a rule can name."
    )


def _shown(current: Report, baseline: Report) -> tuple[Verdict, ...]:
    """Return the clean accuracies, where both reports have them."""
    sections = [report.section(SHOWN.measure) for report in (current, baseline)]
    if not all(section and SHOWN.column in section.samples for section in sections):
        return ()
    return tuple(v for v in judge_alone(SHOWN, current, baseline) if not v.reason)


def _examine(
    rule: Rule, current: Report, baseline: Report, *, alone: bool = False, typed: bool = False
) -> Examined:
    """Return what a rule contrasts, or the verdict that it could not be judged.

    Raises:
        UsageError: the rule was typed, and matches nothing or makes no sense for its metric.
    """
    try:
        if alone:
            return contrasts(rule, current, baseline, least=0.0)
        changes = contrasts(rule, current, baseline)
        if rule.limit.kind != "absolute":
            same_conditions(current.run, baseline.run)
        return changes
    except EvaluationError as error:
        return _unjudged(rule, "error", error.message)
    except (BaselineError, UsageError) as error:
        if typed and isinstance(error, UsageError):
            raise
        return _unjudged(rule, "not comparable", error.message)


def _unjudged(rule: Rule, status: VerdictStatus, reason: str) -> Verdict:
    return Verdict(rule=rule.text, metric=rule.metric, status=status, reason=reason)


def _decide(
    rules: Sequence[Rule], examinations: Sequence[Examined], alpha: float
) -> list[list[Verdict]]:
    """Correct for many rules, then within each rule for many rows."""
    rows = [_p_values(rule, examined) for rule, examined in zip(rules, examinations, strict=True)]
    family = [i for i, p in enumerate(rows) if p]
    smallest = [min(1.0, len(rows[i]) * min(rows[i])) for i in family]
    adjusted, levels = holm(smallest, alpha)
    corrected = dict(zip(family, zip(levels, adjusted, strict=True), strict=True))
    return [
        [examined]
        if isinstance(examined, Verdict)
        else _rows(rule, examined, *corrected.get(i, (alpha, 0.0)), alpha)
        for i, (rule, examined) in enumerate(zip(rules, examinations, strict=True))
    ]


def _p_values(rule: Rule, examined: Examined) -> list[float]:
    if isinstance(examined, Verdict):
        return []
    tested = (contrast.evidence for contrast in examined if not contrast.same)
    return [evidence.p(margin(rule)) for evidence in tested if evidence is not None]


def _rows(
    rule: Rule, changes: list[Contrast], level: float, adjusted: float, alpha: float
) -> list[Verdict]:
    """Correct the rows of one rule at its level, and judge each."""
    tested = [
        contrast for contrast in changes if contrast.evidence is not None and not contrast.same
    ]
    within, levels = holm(_p_values(rule, changes), level)
    corrected = {
        contrast.name: (own, min(1.0, max(adjusted, p * alpha / level)))
        for contrast, own, p in zip(tested, levels, within, strict=True)
    }
    return [
        _verdict(rule, contrast, *corrected.get(contrast.name, (alpha, None)))
        for contrast in changes
    ]


def _verdict(rule: Rule, contrast: Contrast, level: float, adjusted: float | None) -> Verdict:
    verdict = Verdict(
        rule=rule.text,
        metric=rule.metric,
        name=contrast.name,
        status=_plain_status(rule, contrast),
        old=contrast.old,
        new=contrast.new,
        unit=rule.limit.unit,
    )
    if contrast.same or contrast.evidence is None:
        return verdict
    said = measured(rule, contrast.evidence, level)
    told = {"p_adjusted": adjusted, "moved": contrast.moved}
    return verdict.model_copy(update=said | told | _alone(rule, contrast.evidence))


def _alone(rule: Rule, evidence: Evidence) -> dict[str, object]:
    """Return the word and the limits for the change by itself, as `compare` has them."""
    free = replace(rule, limit=replace(rule.limit, value=Fraction(0)))
    said = measured(free, evidence, LEVEL)
    low, high, status = said["low"], said["high"], said["status"]
    assert isinstance(low, float)
    assert isinstance(high, float)
    word = change_word(cast("VerdictStatus", status), (low, high), rule.limit.unit)
    return {"change_status": word, "change_low": low, "change_high": high}


def change_word(status: VerdictStatus, ends: Sequence[float | None], unit: str) -> VerdictStatus:
    """Reword a status for a question without a margin: is there a change?

    Args:
        status: against a margin of 0.
        ends: of the interval of the change.
        unit: of the ends.
    """
    if unit and all(end is not None and abs(end) <= TOLERANCE for end in ends):
        return "unchanged"
    return "inconclusive" if status in ("pass", "pass (not proven)") else status


def measured(rule: Rule, evidence: Evidence, level: float) -> dict[str, object]:
    """Return what the samples say of one change, as fields of a verdict at a level."""
    bound = margin(rule)
    low, high = evidence.limits(level)
    status = _status(evidence.estimate, low, high, bound)
    ends = sorted((printed(rule, low), printed(rule, high)))
    return {
        "status": status,
        "paired": printed(rule, evidence.estimate),
        "low": ends[0],
        "high": ends[1],
        "p": evidence.p(bound),
        "level": level,
        "mcnemar": evidence.mcnemar,
        "samples": evidence.samples,
        "detectable": _detectable(rule, evidence, level),
        "samples_needed": _needed(evidence, bound, low) if status == "inconclusive" else None,
    }


def _status(estimate: float, low: float, high: float, bound: float) -> VerdictStatus:
    """Read a verdict off the limits; equality with the margin passes."""
    estimate, low, high = (round(value, DIGITS) for value in (estimate, low, high))
    if low > bound:
        return "regressed"
    if high < -abs(bound):
        return "improved"
    if estimate > bound:
        return "inconclusive"
    return "pass" if high <= bound else "pass (not proven)"


def _plain_status(rule: Rule, contrast: Contrast) -> VerdictStatus:
    """Judge values as they are."""
    if contrast.same:
        return "unchanged"
    if excess(rule, contrast.new, contrast.old) > 0:
        return "regressed"
    better = contrast.old is not None and excess(rule, contrast.old, contrast.new) > 0
    return "improved" if better else "pass"


def _detectable(rule: Rule, evidence: Evidence, level: float) -> float | None:
    """Return the smallest change seen that would have been called a regression."""
    reach = evidence.reach(margin(rule), level)
    if math.isnan(reach):
        return None
    return printed(rule, reach) if math.isfinite(reach) else rule.worse * math.inf


def _needed(evidence: Evidence, bound: float, low: float) -> int | None:
    """Estimate the samples at which a change of this size would be proven."""
    if not math.isfinite(low):
        return None
    ratio = (evidence.estimate - low) / (evidence.estimate - bound)
    return math.ceil(evidence.samples * ratio**2)
