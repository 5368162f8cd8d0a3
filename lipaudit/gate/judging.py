"""Judge the changes between two reports: one contrast for each row or column of a rule.

`judge` tests whether the limit of a rule is exceeded, `judge_change` whether there is a change at
all. Both use the same contrasts, so a change has one interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError, EvaluationError, UsageError
from lipaudit.gate.comparable import (
    REPEAT,
    find_fault,
    find_obstacle,
    has_other_starts,
    has_same_weights,
    list_differences,
    list_warnings,
    require_same_conditions,
)
from lipaudit.gate.pairing import (
    ALL_BUT_FEW,
    RuleValues,
    align_sections,
    is_mean,
    keep_known,
    read,
    spell_radii_as,
)
from lipaudit.gate.rules import DEFAULT_RULES, Rule, parse_rule
from lipaudit.gate.statistics import (
    DIGITS,
    LEAST,
    LEVEL,
    STATISTICS,
    Evidence,
    Values,
    compute_changes,
    correct_by_holm,
    judge_by_bootstrap,
    judge_mean,
    judge_median,
    judge_share,
)
from lipaudit.gate.verdicts import Judgement, Verdict, VerdictStatus
from lipaudit.measures.audit import USUAL
from lipaudit.tables import Report, Section
from lipaudit.tables.trials import FLAGS

TOLERANCE = 1e-4
"""Default relative accuracy of norms; smaller changes count as no change."""
MOVED = 3
"""Number of most-changed samples that are named."""
ROUNDING = 1e-6
"""Rounding error of a difference (a margin), as a share of the larger value."""
SHOWN = parse_rule("attack.correct >= -0pp")


@dataclass(frozen=True)
class Contrast:
    """The comparison that a rule makes for one row or column.

    Attributes:
        name: the row or column; empty if there is only one.
        old: the baseline's value; None for absolute limits.
        new: the current value.
        evidence: statistics of the change; None if the values are compared without a test.
        changes: the paired change for the worse of each sample; None without a test.
        moved: the few samples that changed most for the worse, the worst first.
        same: whether weights and values equal the baseline's within their accuracy, and the rule
            requires no improvement. For attacks with other random starts the weights decide.
    """

    name: str
    old: float | None
    new: float
    evidence: Evidence | None = None
    changes: Values | None = field(default=None, compare=False, repr=False)
    moved: tuple[str, ...] = ()
    same: bool = False


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
    samples, pair by pair. Holm's procedure over the rules limits the chance of flagging any rule
    that holds to alpha. A rule over several rows enters with the smallest p-value of its rows,
    corrected by Holm over these rows.

    Args:
        current: the report to judge.
        baseline: the report to compare it with.
        rules: the rules; empty: `DEFAULT_RULES` for the sections that a report has. A note names
            the others, if an audit usually has their section.
        alpha: chance of a false alarm of the whole gate.
        strict: whether `inconclusive` and `pass (not proven)` fail.

    Raises:
        UsageError: a rule matches nothing, or does not suit its metric.
    """
    if not 0 < alpha < 1:
        raise UsageError(f"alpha must be between 0 and 1, not {alpha}")
    chosen = tuple(rules)
    if not rules:
        known = {section.measure for report in (current, baseline) for section in report.sections}
        chosen = tuple(rule for rule in DEFAULT_RULES if rule.measure in known)
        if not chosen:
            named = ", ".join(sorted(known)) or "an empty report"
            raise UsageError(f"no default rule exists for {named}", _suggest_rule(current))
    examinations = [_examine(rule, current, baseline, typed=bool(rules)) for rule in chosen]
    usual = () if rules else (rule for rule in DEFAULT_RULES if rule.measure in USUAL)
    verdicts = tuple(_decide(chosen, examinations, alpha))
    moved = {sample for verdict in verdicts for sample in verdict.moved}
    places = baseline.found("place") | current.found("place")
    # Clean accuracies are shown if both reports have them.
    sections = [report.section(SHOWN.measure) for report in (current, baseline)]
    shown = all(section and SHOWN.column in section.samples for section in sections)
    clean = _examine(SHOWN, current, baseline, alone=True) if shown else []
    return Judgement(
        current=current.run.model.spec,
        baseline=baseline.run.model.spec,
        alpha=alpha,
        strict=strict,
        verdicts=verdicts,
        places={sample: places[sample] for sample in sorted(moved & places.keys())},
        shown=tuple(_make_verdict(SHOWN, c, LEVEL) for c in clean if isinstance(c, Contrast)),
        notes=(
            *(
                f"not judged, because neither report has its section: {rule.text}"
                for rule in usual
                if rule not in chosen
            ),
            *list_differences(current, baseline).values(),
        ),
        warnings=list_warnings(current, baseline),
    )


def judge_change(
    rule: Rule, current: Report, baseline: Report, level: float = LEVEL
) -> list[Verdict]:
    """Return for each row of a rule without a margin whether it changed, at its own level.

    Precision and preprocessing may differ, and few shared samples suffice.
    """
    examined = _examine(rule, current, baseline, alone=True)
    if isinstance(examined, Verdict):
        return [examined.model_copy(update={"rule": rule.metric})]
    verdicts = []
    for contrast in examined:
        verdict = _make_verdict(rule, contrast, level)
        ends = [verdict.change] if verdict.low is None else [verdict.low, verdict.high]
        none = ("change_status", "change_low", "change_high", "detectable", "samples_needed")
        fields = dict.fromkeys(none) | {"rule": verdict.metric}
        fields["status"] = _reword(verdict.status, ends, verdict.unit)
        verdicts.append(verdict.model_copy(update=fields))
    return verdicts


def _suggest_rule(report: Report) -> str:
    """Write a rule for a section that the report has."""
    rules = (
        f"Such as --fail-on '{section.measure}.{name} {sign}5%'; "
        for section in report.sections
        for name, column in section.columns.items()
        if column.better and name not in FLAGS
        for sign in ["<= +" if column.better == "lower" else ">= -"]
    )
    measure = report.sections[0].measure if report.sections else "rules"
    return f"{next(rules, '')}lipaudit explain {measure} lists what a rule can name."


def _examine(
    rule: Rule, current: Report, baseline: Report, *, alone: bool = False, typed: bool = False
) -> list[Contrast] | Verdict:
    """Return the contrasts of a rule, or a verdict that it cannot be judged.

    Raises:
        UsageError: a rule of the user matches nothing, or does not suit its metric.
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
    """Return the verdict on a rule that cannot be judged."""
    return Verdict(rule=rule.text, metric=rule.metric, status=status, reason=reason)


# What a rule contrasts


def contrast_values(
    rule: Rule, current: Report, baseline: Report, least: float = ALL_BUT_FEW
) -> list[Contrast]:
    """Return the contrasts of a rule over the shared samples, in the order of the baseline.

    Args:
        rule: the rule.
        current: the report to judge.
        baseline: the report to compare it with.
        least: smallest share of the baseline's samples that both reports need.

    Raises:
        EvaluationError: the current report is not complete, finite and converged.
        BaselineError: the two reports are not comparable.
        UsageError: the rule matches nothing, or does not suit its metric.
    """
    new, old = current.section(rule.measure), baseline.section(rule.measure)
    if new is None and old is None:
        raise UsageError(f"{rule.text!r} matches nothing: no measure is called {rule.measure}")
    if new is None:
        raise BaselineError(f"the current report has no section {rule.measure}", REPEAT)
    if current.shard is not None:
        raise BaselineError(
            find_fault(current, new), "Merge all shards with lipaudit merge first."
        )
    if not least and old is not None:
        new, old = keep_known(rule, new, old)
    reading = read_trusted(rule, current, new)
    if rule.limit.kind == "absolute":
        return [Contrast(name, None, value) for name, value in reading.points.items()]
    if old is None:
        raise BaselineError(f"the baseline has no section {rule.measure}", "Save a new baseline.")
    try:
        read_trusted(rule, baseline, old)
    except EvaluationError as error:
        raise BaselineError(f"baseline: {error.message}", "Save a new baseline.") from None
    if obstacle := find_obstacle(current, baseline, new, old):
        raise BaselineError(obstacle, REPEAT)
    restarted = has_other_starts(new, old) and rule.column not in ("clean", "correct")
    new, old = align_sections(rule, new, old, least)
    same = compute_margin(rule) >= 0 and has_same_weights(current, baseline)
    before = read(rule, old)
    after = spell_radii_as(read(rule, new), before)
    missing = [name for name in before.names if name not in after.names]
    if not (rule.per_sample or rule.stat == "each"):
        missing += [name for name in after.names if name not in before.names]
    if missing:
        which = "; ".join(missing[:8]) + ("; ..." if len(missing) > 8 else "")
        raise BaselineError(f"{rule.metric}: only one of the reports has {which}", REPEAT)
    tol = new.settings.get("tol")
    tol = max(TOLERANCE, tol) if isinstance(tol, float) else TOLERANCE
    changes = (_contrast(rule, name, before, after, tol) for name in before.points)
    return [replace(c, same=same and (c.same or restarted)) for c in changes]


def read_trusted(rule: Rule, report: Report, section: Section) -> RuleValues:
    """Read the values of a rule from a report's section; refuse unreliable ones.

    Raises:
        EvaluationError: the values are not complete, finite and converged.
        UsageError: the rule matches nothing.
    """
    if reason := find_fault(report, section):
        raise EvaluationError(reason, "Let the run finish, or raise --tol.")
    reading = read(rule, section)
    for name, point in reading.points.items():
        values = reading.pairs.get(name, np.array([point]))
        bad = int((~np.isfinite(values)).sum()) or int(not math.isfinite(point))
        if bad:
            where = f" ({name})" if name else ""
            count = "1 value is" if bad == 1 else f"{bad} values are"
            raise EvaluationError(
                f"{rule.metric}{where}: {count} not finite",
                "Fix the model: NaN and infinite values cannot be judged.",
            )
    return reading


def _contrast(rule: Rule, name: str, old: RuleValues, new: RuleValues, tol: float) -> Contrast:
    """Compare a row or column: by its samples, else by their medians, else without a test."""
    first, last = old.points[name], new.points[name]
    before, now = np.array([first]), np.array([last])
    paired, evidence = name in old.pairs and name in new.pairs, None
    if paired:
        before, now = old.pairs[name], new.pairs[name]
        if rule.stat == "each" and not is_mean(rule):
            first, last = float(np.median(before)), float(np.median(now))
        evidence = _test_change(rule, before, now)
    # Figures are the same if they are equal within their accuracy.
    if rule.column in FLAGS and rule.per_sample:
        same = bool(np.array_equal(before, now))
    else:
        slack = ROUNDING * float(np.abs(before).max(initial=0.0))
        same = bool(np.isclose(now, before, rtol=tol, atol=slack).all())
    if not paired:
        _require_positive(rule, before, now)
        # The medians of each sample over the rows that have a figure of every sample.
        both = [(line, new.pairs[row]) for row, line in old.pairs.items() if row in new.pairs]
        known = [lines for lines in both if np.isfinite(lines).all()]
        if not known:
            return Contrast(name, first, last, same=same)
        before, now = (np.median(np.stack(lines), axis=0) for lines in zip(*known, strict=True))
        _require_positive(rule, before, now)
        evidence = judge_mean(_compute_change(rule, before, now))
    worse = _compute_change(rule, before, now)
    # If a stored array belongs to no samples, no sample is named.
    most = np.argsort(-worse, kind="stable")[:MOVED] if worse.size == len(old.ids) else ()
    moved = tuple(old.ids[i] for i in most if worse[i] > 0)
    return Contrast(name, first, last, evidence, changes=worse, moved=moved, same=same)


def _test_change(rule: Rule, old: Values, new: Values) -> Evidence:
    """Choose the test of a rule, as in the table of docs/guide/gate.md."""
    relative = rule.limit.kind == "relative"
    if rule.stat == "mean" and np.isin((old, new), (0, 1)).all():
        if relative:
            raise UsageError(
                f"{rule.text!r}: a change of a share is given in percentage points",
                "Use -2pp in place of -2%.",
            )
        worse = rule.worse * (new - old)
        return judge_share(int((worse > 0).sum()), int((worse < 0).sum()), old.size)
    if rule.stat == "max":
        raise UsageError(
            f"{rule.text!r}: the random variation of a maximum is unknown",
            "Use an absolute limit for `max`, or judge p95.",
        )
    _require_positive(rule, old, new)
    if rule.stat == "median":
        return judge_median(_compute_change(rule, old, new))
    if rule.stat == "each":
        return judge_mean(_compute_change(rule, old, new))
    statistic = STATISTICS[rule.stat]
    return judge_by_bootstrap(
        old,
        new,
        lambda a, b: _compute_change(rule, statistic(a, axis=1), statistic(b, axis=1)),
        LEAST[rule.stat],
    )


def _compute_change(rule: Rule, old: Values, new: Values) -> Values:
    """Return changes for the worse: logarithms of ratios for a relative limit."""
    return rule.worse * compute_changes(old, new, relative=rule.limit.kind == "relative")


def _require_positive(rule: Rule, *values: Values) -> None:
    if rule.limit.kind == "relative" and any((each < 0).any() for each in values):
        raise UsageError(
            f"{rule.text!r}: {rule.measure}.{rule.column} can be negative, so a relative "
            "change has no meaning",
            "Use an absolute change, such as >= -0.1.",
        )


# Verdicts


def compute_margin(rule: Rule) -> float:
    """Return the largest change for the worse that a rule allows, in the scale of `Evidence`."""
    limit = float(rule.limit.value)
    value = math.log1p(limit) if rule.limit.kind == "relative" else limit
    return round(rule.worse * value, DIGITS)


def express_change(rule: Rule, worse: float) -> float:
    """Return a change in the printed form: new over old minus 1, or new minus old."""
    value = rule.worse * worse
    with np.errstate(over="ignore"):
        return float(np.expm1(value)) if rule.limit.kind == "relative" else value


def express_limits(rule: Rule, evidence: Evidence, level: float = LEVEL) -> tuple[float, float]:
    """Return the limits of a change in the printed form, the lower one first."""
    low, high = sorted(express_change(rule, limit) for limit in evidence.limits(level))
    return low, high


def _decide(
    rules: Sequence[Rule], examinations: Sequence[list[Contrast] | Verdict], alpha: float
) -> Iterator[Verdict]:
    """Correct for many rules, then within each rule for many rows, both by Holm's procedure."""
    rows = [
        {c.name: c.evidence.p(compute_margin(rule)) for c in found if c.evidence and not c.same}
        if isinstance(found, list)
        else {}
        for rule, found in zip(rules, examinations, strict=True)
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
            p, row_level = of_rows.get(contrast.name, (None, alpha))
            adjusted = None if p is None else min(1.0, max(of_rule, p * alpha / level))
            yield _make_verdict(rule, contrast, row_level, adjusted)


def _make_verdict(
    rule: Rule, contrast: Contrast, level: float, adjusted: float | None = None
) -> Verdict:
    """Return the verdict on a contrast: by its test, else by its plain values."""
    evidence, old, new = contrast.evidence, contrast.old, contrast.new
    known: dict[str, Any] = {"rule": rule.text, "metric": rule.metric, "name": contrast.name}
    known |= {"old": old, "new": new, "unit": rule.limit.unit}
    if evidence is None or contrast.same:
        status: VerdictStatus = "pass"
        if contrast.same:
            status = "unchanged"
        elif _compare_to_limit(rule, new, old) > 0:
            status = "regressed"
        elif old is not None and _compare_to_limit(rule, old, new) > 0:
            status = "improved"
        return Verdict(status=status, **known)
    bound, alone = compute_margin(rule), express_limits(rule, evidence)
    low, high = express_limits(rule, evidence, level)
    status, lowest, needed = _read_status(evidence, level, bound), evidence.limits(level)[0], None
    if status == "inconclusive" and math.isfinite(lowest):
        # The distance to the limit shrinks with the root of the number of samples.
        ratio = (evidence.estimate - lowest) / (evidence.estimate - bound)
        needed = math.ceil(evidence.samples * ratio**2)
    reach = evidence.reach(bound, level)
    detectable = express_change(rule, reach) if math.isfinite(reach) else rule.worse * math.inf
    return Verdict(
        status=status,
        paired=express_change(rule, evidence.estimate),
        low=low,
        high=high,
        p=evidence.p(bound),
        p_adjusted=adjusted,
        level=level,
        change_status=_reword(_read_status(evidence, LEVEL, 0.0), alone, rule.limit.unit),
        change_low=alone[0],
        change_high=alone[1],
        mcnemar=evidence.mcnemar,
        samples=evidence.samples,
        detectable=None if math.isnan(reach) else detectable,
        moved=contrast.moved,
        samples_needed=needed,
        **known,
    )


def _compare_to_limit(rule: Rule, new: float, old: float | None) -> int:
    """Compare a value with its limit: 1 if it breaks the limit, 0 if equal, -1 if inside.

    The comparison uses exact decimals of 12 digits, so that 73 % is never below 73 %.
    """
    bound = rule.limit.value
    if old is not None and rule.limit.kind == "relative":
        bound = _to_decimal(float(_to_decimal(old) * (1 + bound)))
    elif old is not None and rule.limit.kind == "difference":
        bound = _to_decimal(float(_to_decimal(old) + bound))
    over = rule.worse * (_to_decimal(new) - bound)
    return (over > 0) - (over < 0)


def _to_decimal(value: float) -> Fraction:
    return Fraction(format(value, f".{DIGITS}g"))


def _reword(status: VerdictStatus, ends: Sequence[float | None], unit: str) -> VerdictStatus:
    """Turn a status against a margin of 0 into the answer whether there is a change."""
    if unit and all(end is not None and abs(end) <= TOLERANCE for end in ends):
        return "unchanged"
    return "inconclusive" if status in ("pass", "pass (not proven)") else status


def _read_status(evidence: Evidence, level: float, bound: float) -> VerdictStatus:
    """Derive a verdict from the limits; equality with the margin passes."""
    found = evidence.estimate, *evidence.limits(level)
    estimate, low, high = (round(value, DIGITS) for value in found)
    if low > bound:
        return "regressed"
    if high < -abs(bound):
        return "improved"
    if estimate > bound:
        return "inconclusive"
    return "pass" if high <= bound else "pass (not proven)"
