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
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError, EvaluationError, UsageError
from lipaudit.gate import conditions, pairing, statistics
from lipaudit.gate.movement import describe_movement
from lipaudit.gate.pairing import Key, RuleValues
from lipaudit.gate.rules import (
    NORM,
    RADIUS,
    Judgement,
    Rule,
    Verdict,
    VerdictStatus,
    choose_rules,
    list_absent,
)
from lipaudit.gate.statistics import ALPHA, DIGITS, FEWEST, LEVEL, Evidence, Values
from lipaudit.tables import Reduction, Report, Section
from lipaudit.tables.columns import reduce_values
from lipaudit.tables.summary import summary
from lipaudit.tables.trials import FLAGS

TOLERANCE = 1e-4
"""Default relative accuracy of norms; smaller changes count as no change."""
ROUNDING = 1e-6
"""Rounding error of a difference (a margin), as a share of the larger value."""
FELL = (
    "the first-order radius (margin over gradient norm) fell too: smaller norms do not make this "
    "model more robust"
)
MANY = 1000
"""Largest ratio between an interval and its change for which a verdict asks for samples."""
OF_WEIGHTS = "the weights"
"""Domain of figures that depend on no sample: any change of them is certain."""
_LARGEST = Fraction(sys.float_info.max)
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
        rules: the rules; empty: `DEFAULT_RULES` for the sections that a report has. A note names
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
    notes = [] if rules else list_absent(chosen)
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
        warnings=tuple(note.text for note in summary(current).warnings),
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
    # Without a test, a gate would fail by chance; figures of the weights do not vary.
    untested = all(contrast.evidence is None for contrast in contrasts)
    if untested and not lenient and rule.about.domain != OF_WEIGHTS:
        text = f"{rule.text!r}: how far {rule.measure}.{rule.column} varies by chance is unknown"
        advice = "Use an absolute limit, such as <= 0.1 or >= 0.5."
        how = rule.about.reduction
        if how is not None and how.values in new.sample_columns:
            advice = f"Judge its samples: {rule.measure}.{how.values}:{how.stat}. {advice}"
        raise UsageError(text, advice)
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
        # The statistic of each sample over the rows that have a figure of every sample.
        both = [(line, new.pairs[row]) for row, line in old.pairs.items() if row in new.pairs]
        known = [lines for lines in both if np.isfinite(lines).all()]
        if not known or rule.stat == "each":
            return Contrast(str(name), first, last, same=same)
        before, now = (
            reduce_values(rule.stat, np.stack(lines), axis=0) for lines in zip(*known, strict=True)
        )
        worse = _compute_change(rule, before, now)
        evidence = statistics.judge_median(worse)
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
    stat = rule.stat
    least = statistics.LEAST.get(stat, FEWEST)
    if stat == "each" and pairing.is_mean(rule) and rule.limit.kind == "difference":
        # The row is a mean, and differences add up: a median of flags that seldom change is 0.
        stat, least = "mean", statistics.LEAST["share"]
    if stat in ("median", "each"):
        return statistics.judge_median(worse)

    def change(before: Values, now: Values) -> Values:
        ends = (reduce_values(stat, values, axis=1) for values in (before, now))
        return _compute_change(rule, *ends)

    return statistics.judge_by_bootstrap(old, new, change, least)


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


def _compute_null(rule: Rule) -> float:
    """Return the change that a test must exceed: none, or the improvement that a rule demands."""
    return min(0.0, _compute_margin(rule))


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
    rows = list[dict[str, float]]()
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
            of_row = rows[i].get(contrast.name)
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


def _adjust_rows(rule: Rule, contrasts: Sequence[Contrast]) -> dict[str, float]:
    """Return the p-value of "no worse" of every row, corrected for the rows of a rule.

    Sign tests of many rows are corrected jointly, other tests by Holm's procedure.
    """
    null = _compute_null(rule)
    tests = {c.name: c.evidence.p(null) for c in contrasts if c.evidence}
    if len(tests) > 1 and all(c.evidence and c.evidence.of_signs for c in contrasts):
        changes = np.stack([contrast.changes for contrast in contrasts])
        quiet = statistics.QUIET * max(0.0, _compute_margin(rule))
        adjusted = statistics.correct_jointly(changes - null, quiet).tolist()
        return dict(zip(tests, adjusted, strict=True))
    return {name: p for name, (p, _) in statistics.correct_by_holm(tests).items()}


def judge_change(rule: Rule, contrast: Contrast, level: float = LEVEL) -> Verdict:
    """Say whether there is a change at all: the verdict on a rule without a margin."""
    verdict = _make_verdict(rule, contrast, level)
    status = verdict.change_status
    if status is None:
        status = _reword(verdict.status, [verdict.change], verdict.unit)
    return verdict.model_copy(update={"status": status, "change_status": None})


def _make_verdict(rule: Rule, contrast: Contrast, level: float) -> Verdict:
    """Return the figures of a contrast, and the verdict where it has no test.

    Args:
        rule: the rule.
        contrast: the contrast.
        level: one-sided level of the limits, and of the word for the change alone.
    """
    evidence, old, new = contrast.evidence, contrast.old, contrast.new
    known: dict[str, Any] = {"rule": rule.text, "metric": rule.metric, "name": contrast.name}
    known |= {"old": old, "new": new, "unit": rule.limit.unit}
    if evidence is not None and evidence.mcnemar is not None:
        worse = contrast.changes
        known |= {"lost": int((worse > 0).sum()), "gained": int((worse < 0).sum())}
        known["mcnemar"] = evidence.mcnemar
    if contrast.same:
        return Verdict(status="unchanged", **known)
    if evidence is None:
        status: VerdictStatus = "pass"
        if _breaks_limit(rule, new, old):
            status = "regressed"
        elif old is not None and _breaks_limit(rule, old, new):
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
    margin = _compute_margin(rule)
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
        update["status"] = "improved"
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

    The comparison uses exact decimals of 12 digits, so that 73 % is never below 73 %.
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
