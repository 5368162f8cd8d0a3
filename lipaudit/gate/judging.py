"""Judge the changes between two reports: one contrast for each row or column of a rule.

The gate, a comparison and a ranking all take this way: a rule names a column and a statistic,
`examine` contrasts the values of two reports on their shared samples, and a verdict says what the
test of the contrast proves. `decide` asks whether the limit of a rule is exceeded, `judge_change`
whether there is a change at all; both read the same contrast, so a change has one interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError, EvaluationError, UsageError
from lipaudit.gate import conditions, pairing, statistics
from lipaudit.gate.pairing import Key, RuleValues
from lipaudit.gate.rules import DEFAULT_RULES, Judgement, Rule, Verdict, VerdictStatus, parse_rule
from lipaudit.gate.statistics import DIGITS, LEVEL, Evidence, Values
from lipaudit.measures import USUAL
from lipaudit.tables import Reduction, Report, Section
from lipaudit.tables.columns import reduce_values
from lipaudit.tables.summary import summary
from lipaudit.tables.trials import FLAGS

TOLERANCE = 1e-4
"""Default relative accuracy of norms; smaller changes count as no change."""
ROUNDING = 1e-6
"""Rounding error of a difference (a margin), as a share of the larger value."""
CLEAN = parse_rule("attack.correct >= -0pp")
"""Clean accuracy is shown beside the verdicts, if both reports have it."""
NONE = np.zeros(0)


@dataclass(frozen=True, eq=False)
class Contrast:
    """The comparison that a rule makes for one row or column.

    Attributes:
        name: the row or column; empty if there is only one.
        old: the baseline's value; None for absolute limits.
        new: the current value.
        evidence: statistics of the change; None if the values are compared without a test.
        before: the baseline's values, sample by sample; empty without a test.
        now: the current values.
        changes: the paired changes for the worse.
        ids: the samples; empty if the values belong to none.
        same: whether weights and values equal the baseline's within their accuracy, and the rule
            requires no improvement. For attacks with other random starts the weights decide.
    """

    name: str
    old: float | None
    new: float
    evidence: Evidence | None = None
    before: Values = field(default_factory=NONE.copy)
    now: Values = field(default_factory=NONE.copy)
    changes: Values = field(default_factory=NONE.copy)
    ids: tuple[str, ...] = ()
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
    chosen = tuple(rules) or choose_rules(current, baseline)
    examinations = [examine(rule, current, baseline, typed=bool(rules)) for rule in chosen]
    absent = [r for r in DEFAULT_RULES if not rules and r not in chosen and r.measure in USUAL]
    notes = [f"not judged, because neither report has its section: {r.text}" for r in absent]
    clean = examine(CLEAN, current, baseline, lenient=True)
    if isinstance(clean, list):
        notes.append(f"clean accuracy, which never fails: {judge_change(CLEAN, clean[0]).figures}")
    codes = "gradient-masking", "examples-back"
    signs = (n.text for s in baseline.sections for n in s.notes if n.code in codes)
    notes += (f"{baseline.run.label}: {text}" for text in signs)
    notes += (text for _, text in conditions.list_differences(current, baseline))
    return Judgement(
        current=current.run.label,
        baseline=baseline.run.label,
        alpha=alpha,
        strict=strict,
        verdicts=tuple(_decide(chosen, examinations, alpha)),
        notes=tuple(notes),
        warnings=tuple(note.text for note in summary(current).warnings),
    )


def choose_rules(*reports: Report) -> tuple[Rule, ...]:
    """Return the default rules for the sections of reports.

    Raises:
        UsageError: there are none.
    """
    known = {section.measure for report in reports for section in report.sections}
    chosen = tuple(rule for rule in DEFAULT_RULES if rule.measure in known)
    if not chosen:
        raise UsageError(
            f"no default rule exists for {', '.join(sorted(known)) or 'an empty report'}",
            "Name a rule with --fail-on; lipaudit explain MEASURE lists what it can name.",
        )
    return chosen


def require_judgeable(rules: Sequence[Rule], baseline: Report) -> None:
    """Refuse rules that no report can be judged by, before a model is measured for hours.

    A change that has no test between the baseline and itself has none at all. An absolute limit
    is judged on the current report, which may have rows that the baseline has not; but both have
    the same number of samples, so both have calibration errors or neither has.

    Raises:
        UsageError: a rule matches nothing, or does not suit its metric; or no default rule exists.
    """
    for rule in rules or choose_rules(baseline):
        rated = rule.column.startswith("ece") and "transfer" not in rule.text
        if rated or rule.limit.kind != "absolute":
            examine(rule, baseline, baseline, typed=bool(rules))


# What a rule contrasts


def examine(
    rule: Rule, current: Report, baseline: Report, *, lenient: bool = False, typed: bool = False
) -> list[Contrast] | Verdict:
    """Return the contrasts of a rule, or the verdict that it cannot be judged.

    Args:
        rule: the rule.
        current: the report to judge.
        baseline: the report to compare it with.
        lenient: for a comparison: precision and preprocessing may differ, few shared samples
            suffice, and what did not converge is left out. A gate refuses such reports.
        typed: whether the user wrote the rule; a rule that suits no figure is then an error.

    Raises:
        UsageError: a rule of the user matches nothing, or does not suit its metric.
    """
    try:
        return _contrast_reports(rule, current, baseline, lenient)
    except (BaselineError, EvaluationError, UsageError) as error:
        if typed and isinstance(error, UsageError):
            raise
        status: VerdictStatus = "error" if isinstance(error, EvaluationError) else "not comparable"
        return Verdict(rule=rule.text, metric=rule.metric, status=status, reason=error.message)


def _contrast_reports(
    rule: Rule, current: Report, baseline: Report, lenient: bool
) -> list[Contrast]:
    """Return the contrasts of a rule over the shared samples, in the order of the baseline.

    Raises:
        EvaluationError: the current report is not complete, finite and converged.
        BaselineError: the two reports are not comparable.
        UsageError: the rule matches nothing, or does not suit its metric.
    """
    new, old = current.section(rule.measure), baseline.section(rule.measure)
    text = f"{rule.text!r} matches nothing: neither report has a section {rule.measure}"
    if new is None and old is None:
        raise UsageError(text)
    if new is None:
        raise BaselineError(f"the current report has no section {rule.measure}")
    if current.shard is not None:
        raise BaselineError(pairing.find_fault(current, new))
    # The current report comes first: a run that failed is an error, whatever the baseline is.
    points = pairing.read_trusted(rule, current, new, lenient=lenient).points
    if rule.limit.kind == "absolute":
        return [Contrast(str(name), None, value) for name, value in points.items()]
    if old is None:
        raise BaselineError(f"the baseline has no section {rule.measure}")
    try:
        pairing.read_trusted(rule, baseline, old, lenient=lenient)
    except EvaluationError as error:
        raise BaselineError(f"baseline: {error.message}") from None
    if obstacle := conditions.find_obstacle(current, baseline, rule.measure, lenient=lenient):
        raise BaselineError(obstacle)
    after, before, ids = _read_shared(rule, new, old, lenient)
    # A head that is gone may be the one that got worse. A new one has nothing to compare with, but
    # it changes a median over all heads.
    missing = [name for name in before.names if name not in after.names]
    if not (rule.per_sample or rule.stat == "each"):
        missing += [name for name in after.names if name not in before.names]
    if missing:
        which = "; ".join(map(str, missing[:8])) + ("; ..." if len(missing) > 8 else "")
        raise BaselineError(f"{rule.metric}: only one of the reports has {which}")
    # Other starts break other samples of the same model, which is no change of the model.
    restarted = conditions.has_other_starts(new, old) and rule.column not in ("clean", "correct")
    same = _compute_margin(rule) >= 0 and conditions.has_same_weights(current, baseline)
    tol = new.settings.get("tol")  # of a plug-in, it may be anything
    tol = max(TOLERANCE, tol) if isinstance(tol, float) else TOLERANCE
    contrasts = [_contrast(rule, name, before, after, ids, tol) for name in before.points]
    # Without a test of a share of samples, a gate would fail by chance.
    about, untested = rule.about, any(contrast.evidence is None for contrast in contrasts)
    share = about.format.endswith("%") and about.status in ("estimate", "empirical")
    if share and untested and not (about.reduction or lenient or rule.per_sample):
        text = f"{rule.text!r}: how far {rule.measure}.{rule.column} varies by chance is unknown"
        raise UsageError(text, "Use an absolute limit, such as <= 0.1 or >= 0.5.")
    return [replace(c, same=same and (c.same or restarted)) for c in contrasts]


def _read_shared(
    rule: Rule, new: Section, old: Section, lenient: bool
) -> tuple[RuleValues, RuleValues, tuple[str, ...]]:
    """Read both sections on their shared samples, in the old section's order.

    Rows are computed again from their samples if the two sections have others.

    Raises:
        BaselineError: too few samples are shared, or the reports lack the values per sample.
        EvaluationError: in a comparison, nothing converged, or a value is not finite.
    """
    column = rule.column if rule.per_sample else ""
    # Norms that did not converge may be far too low, in either report: neither may be compared.
    rows, samples = pairing.find_unsettled((new, old), column) if lenient else (set(), set())
    if rows and (rule.per_sample or rows >= pairing.index_rows(old).keys()):
        raise BaselineError(f"{rule.measure}: {len(rows)} rows did not converge")
    shared = set(new.ids) & set(old.ids)
    if shared and shared <= samples:
        raise BaselineError(
            f"{rule.measure}: {len(samples)} samples did not converge, or have no value"
        )
    takes: tuple[list[int] | None, list[int] | None] = None, None
    again = False
    if new.ids and old.ids:  # without ids, `find_obstacle` has refused other samples
        known = [name if name not in samples else "" for name in old.ids]
        least = 0.0 if lenient else pairing.ALL_BUT_FEW
        takes = pairing.find_shared(rule.measure, new.ids, known, least)
        again = not rule.per_sample and (bool(samples) or sorted(new.ids) != sorted(old.ids))
    pairs = zip((new, old), takes, strict=True)
    after, before = (pairing.read(rule, s, take, again=again, skipped=rows) for s, take in pairs)
    for reading in (after, before):
        pairing.require_finite(rule, reading)
    return after, before, tuple(old.ids[i] for i in takes[1] or ())


def _contrast(
    rule: Rule, name: Key, old: RuleValues, new: RuleValues, ids: tuple[str, ...], tol: float
) -> Contrast:
    """Compare a row or column: by its samples, else by their medians, else without a test."""
    first, last = old.points[name], new.points[name]
    before, now = np.array([first]), np.array([last])
    paired = name in old.pairs and name in new.pairs
    if paired:
        before, now = old.pairs[name], new.pairs[name]
        # Medians of exactly the tested samples, so that figures and their change agree.
        if rule.stat == "each" and not pairing.is_mean(rule):
            first, last = float(np.median(before)), float(np.median(now))
    worse = _compute_change(rule, before, now)
    # Figures are the same if they are equal within their accuracy.
    if rule.column in FLAGS and rule.per_sample:
        same = bool(np.array_equal(before, now))
    else:
        slack = ROUNDING * float(np.abs(before).max(initial=0.0))
        same = bool(np.isclose(now, before, rtol=tol, atol=slack).all())
    if paired:
        evidence = _test_change(rule, before, now, worse)
    else:
        # The medians of each sample over the rows that have a figure of every sample.
        both = [(line, new.pairs[row]) for row, line in old.pairs.items() if row in new.pairs]
        known = [lines for lines in both if np.isfinite(lines).all()]
        if not known:
            return Contrast(str(name), first, last, same=same)
        before, now = (np.median(np.stack(lines), axis=0) for lines in zip(*known, strict=True))
        worse = _compute_change(rule, before, now)
        evidence = statistics.judge_mean(worse)
    # Stored arrays without ids name no sample.
    named = ids if worse.size == len(ids) else ()
    return Contrast(str(name), first, last, evidence, before, now, worse, named, same)


def _test_change(rule: Rule, old: Values, new: Values, worse: Values) -> Evidence:
    """Choose the test of a rule, as in the table of docs/guide/gate.md."""
    flags = (Reduction("mean", rule.column), pairing.RIGHT)
    row_of_flags = rule.stat == "each" and rule.about.reduction in flags
    if (rule.stat == "mean" or row_of_flags) and np.isin((old, new), (0, 1)).all():
        text = f"{rule.text!r}: a share changes in percentage points"
        if rule.limit.kind == "relative":
            raise UsageError(text, "Write -2pp, not -2%.")
        return statistics.judge_share(int((worse > 0).sum()), int((worse < 0).sum()), old.size)
    if rule.stat == "max":
        raise UsageError(
            f"{rule.text!r}: the variation of a maximum is unknown",
            "Use an absolute limit for `max`, or judge p95.",
        )
    if rule.stat in ("median", "each"):
        return (statistics.judge_median if rule.stat == "median" else statistics.judge_mean)(worse)

    def change(before: Values, now: Values) -> Values:
        ends = (reduce_values(rule.stat, values, axis=1) for values in (before, now))
        return _compute_change(rule, *ends)

    return statistics.judge_by_bootstrap(old, new, change, statistics.LEAST[rule.stat])


def _compute_change(rule: Rule, old: Values, new: Values) -> Values:
    """Return changes for the worse: logarithms of ratios for a relative limit.

    Raises:
        UsageError: the limit is relative, and a figure is negative.
    """
    if rule.limit.kind != "relative":
        return rule.worse * (new - old)
    negative = (np.append(old, new) < 0).any()
    if negative:
        raise UsageError(
            f"{rule.text!r}: a figure that can be negative has no relative change",
            "Use an absolute change, such as >= -0.1.",
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        return rule.worse * np.where(new == old, 0.0, np.log(new) - np.log(old))


# Verdicts


def _compute_margin(rule: Rule) -> float:
    """Return the largest change for the worse that a rule allows, in the scale of `Evidence`."""
    limit = float(rule.limit.value)
    value = math.log1p(limit) if rule.limit.kind == "relative" else limit
    return round(rule.worse * value, DIGITS)


def _express_change(rule: Rule, worse: float) -> float:
    """Return a change in the printed form: new over old minus 1, or new minus old."""
    value = rule.worse * worse + 0.0  # no change is 0.0, also where lower is worse: never -0.0
    with np.errstate(over="ignore"):
        return float(np.expm1(value)) if rule.limit.kind == "relative" else value


def _express_limits(rule: Rule, evidence: Evidence, level: float) -> tuple[float, float]:
    """Return the limits of a change in the printed form, the lower one first."""
    low, high = sorted(_express_change(rule, limit) for limit in evidence.limits(level))
    return low, high


def _decide(
    rules: Sequence[Rule], examinations: Sequence[list[Contrast] | Verdict], alpha: float
) -> Iterator[Verdict]:
    """Correct for many rules, then within each rule for many rows, both by Holm's procedure."""
    rows = list[dict[str, float]]()
    for rule, found in zip(rules, examinations, strict=True):
        tested = found if isinstance(found, list) else []
        margin = _compute_margin(rule)
        rows.append({c.name: c.evidence.p(margin) for c in tested if c.evidence and not c.same})
    # By the union bound, whatever the dependence between rows.
    smallest = {i: min(1.0, len(ps) * min(ps.values())) for i, ps in enumerate(rows) if ps}
    corrected = statistics.correct_by_holm(smallest, alpha)
    for i, (rule, examined) in enumerate(zip(rules, examinations, strict=True)):
        if isinstance(examined, Verdict):
            yield examined
            continue
        of_rule, level = corrected.get(i, (0.0, alpha))
        of_rows = statistics.correct_by_holm(rows[i], level)
        for contrast in examined:
            p, row_level = of_rows.get(contrast.name, (None, alpha))
            # Rejected at its own level exactly when the adjusted one is at most alpha.
            adjusted = None if p is None else min(1.0, max(of_rule, p * alpha / level))
            yield _make_verdict(rule, contrast, row_level, adjusted)


def judge_change(rule: Rule, contrast: Contrast, level: float = LEVEL) -> Verdict:
    """Say whether there is a change at all: the verdict on a rule without a margin."""
    verdict = _make_verdict(rule, contrast, level)
    ends = [verdict.change] if verdict.low is None else [verdict.low, verdict.high]
    none = ("change_status", "change_low", "change_high", "samples_needed")
    status = _reword(verdict.status, ends, verdict.unit)
    return verdict.model_copy(update=dict.fromkeys(none) | {"status": status})


def _make_verdict(
    rule: Rule, contrast: Contrast, level: float, adjusted: float | None = None
) -> Verdict:
    """Return the verdict on a contrast: by its test, else by its plain values."""
    evidence, old, new = contrast.evidence, contrast.old, contrast.new
    known: dict[str, Any] = {"rule": rule.text, "metric": rule.metric, "name": contrast.name}
    known |= {"old": old, "new": new, "unit": rule.limit.unit}
    worse = contrast.changes
    if evidence is not None and evidence.mcnemar is not None:
        known |= {"lost": int((worse > 0).sum()), "gained": int((worse < 0).sum())}
        known["mcnemar"] = evidence.mcnemar
    if evidence is None or contrast.same:
        status: VerdictStatus = "pass"
        if contrast.same:
            status = "unchanged"
        elif _breaks_limit(rule, new, old):
            status = "regressed"
        elif old is not None and _breaks_limit(rule, old, new):
            status = "improved"
        return Verdict(status=status, **known)
    bound, lowest = _compute_margin(rule), evidence.limits(level)[0]
    known |= {"p": evidence.p(bound), "p_adjusted": adjusted, "samples": evidence.samples}
    known["low"], known["high"] = _express_limits(rule, evidence, level)
    ends = known["change_low"], known["change_high"] = _express_limits(rule, evidence, LEVEL)
    change = _reword(_read_status(evidence, LEVEL, 0.0), ends, rule.limit.unit)
    status = _read_status(evidence, level, bound)
    if status == "inconclusive" and math.isfinite(lowest):
        # The distance to the limit shrinks with the root of the number of samples.
        ratio = (evidence.estimate - lowest) / (evidence.estimate - bound)
        known["samples_needed"] = math.ceil(evidence.samples * ratio**2)
    known |= {"paired": _express_change(rule, evidence.estimate), "level": level}
    return Verdict(status=status, change_status=change, **known)


def _breaks_limit(rule: Rule, new: float, old: float | None) -> bool:
    """Say whether a value breaks its limit; a value equal to the limit does not.

    The comparison uses exact decimals of 12 digits, so that 73 % is never below 73 %.
    """
    bound = rule.limit.value
    if old is not None and rule.limit.kind == "relative":
        bound = _to_decimal(float(_to_decimal(old) * (1 + bound)))
    elif old is not None and rule.limit.kind == "difference":
        bound = _to_decimal(float(_to_decimal(old) + bound))
    return rule.worse * (_to_decimal(new) - bound) > 0


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
