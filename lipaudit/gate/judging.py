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
from collections.abc import Iterator, Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np

from lipaudit.errors import UsageError
from lipaudit.gate import conditions, groups, statistics
from lipaudit.gate.contrasts import (
    OF_WEIGHTS,
    TOLERANCE,
    Contrast,
    ContrastKey,
    compute_margin,
    examine,
)
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

    Absolute limits are judged on the current report alone. Changes are judged on the samples that
    both reports have, sample by sample. A rule is `regressed` if a change for the worse is proven
    and the estimate of the change is beyond the limit. A checkpoint that is no worse is flagged
    with a probability of at most alpha, over all rules and rows: p-values are corrected by Holm's
    procedure over the rules, and by sign flips or Holm's procedure over the rows of a rule.

    Args:
        current: the report to judge.
        baseline: the report to compare the current one with.
        rules: the rules; empty: the default rules of all sections in the reports. Notes name
            default rules whose section is missing, if an audit usually has this section.
        alpha: chance of a false alarm of the whole gate.
        strict: whether `inconclusive` and `pass` fail if the limit is not proven to hold.

    Raises:
        UsageError: a rule matches nothing, or does not suit its metric; or alpha is too small for
            the test of a rule.
    """
    if not 0 < alpha < 1:
        raise UsageError(f"alpha must be between 0 and 1, not {alpha}")
    chosen = tuple(rules) or choose_rules(current, baseline)
    # typed: a rule that the user wrote must match something, else it is an error.
    examinations = [examine(rule, current, baseline, typed=bool(rules)) for rule in chosen]
    for examined in examinations:
        _require_level(examined, alpha)
    verdicts = list(_judge_rules(chosen, examinations, alpha, strict=strict))
    return Judgement(
        current=current.run.label,
        baseline=baseline.run.label,
        alpha=alpha,
        strict=strict,
        verdicts=tuple(_add_remarks(verdicts, current, baseline)),
        notes=tuple(_list_notes(rules, chosen, current, baseline)),
        predictions=describe_movement(current, baseline),
        warnings=tuple(note.text for note in list_warnings(current)),
    )


def _list_notes(
    rules: Sequence[Rule], chosen: Sequence[Rule], current: Report, baseline: Report
) -> Iterator[str]:
    """Yield notes on rules and groups that are not judged, then differences between the reports.

    Args:
        rules: the user's rules; empty: the default ones.
        chosen: the rules that are judged.
        current: the report to judge.
        baseline: the report to compare the current one with.
    """
    if not rules:
        yield from list_absent(chosen)
        yield from list_uninstalled(current, baseline)
    if any(rule.group == EACH for rule in chosen):
        yield from groups.note_new_groups(current, baseline)
    # If gradients misled the attacks on the baseline, its robust accuracy may be too high.
    for section in baseline.sections:
        for note in section.notes:
            if note.code == "gradient-masking":
                yield f"{baseline.run.label}: {note.text}"
    for _, text in conditions.list_differences(current, baseline):
        yield text


def _add_remarks(
    verdicts: Sequence[Verdict], current: Report, baseline: Report
) -> Iterator[Verdict]:
    """Yield the verdicts, and add a remark to those that a reader may misunderstand.

    An inconclusive figure that is worse by its own confidence limits gets the reason: many figures
    are judged together. An improved Jacobian norm gets a remark if the first-order radius (margin
    over gradient norm) fell. Smaller norms alone do not make a model more robust: its margins may
    shrink faster.
    """
    tested = sum(verdict.p_adjusted is not None for verdict in verdicts)
    for verdict in verdicts:
        # `status` judges all figures together, `change_status` this figure alone.
        if (verdict.status, verdict.change_status) == ("inconclusive", "regressed"):
            remark = f"its own limits exclude 0, but {tested} figures are judged together"
            verdict = verdict.model_copy(update={"remark": remark})
        # NORM and RADIUS allow no change of the Jacobian norm and of the first-order radius.
        if verdict.metric == NORM.metric and verdict.status == "improved":
            radius = examine(RADIUS, current, baseline, lenient=True)
            # `examine` returns a verdict in place of a list if a report has no radius.
            if isinstance(radius, list) and judge_change(RADIUS, radius[0]).status == "regressed":
                verdict = verdict.model_copy(update={"remark": FELL})
        yield verdict


def _require_level(examined: list[Contrast] | Verdict, alpha: float) -> None:
    """Refuse a rule whose test needs more random draws than there are, whatever it would find.

    Args:
        examined: the rows of the rule, or the verdict that it cannot be judged.
        alpha: error probability of the gate.

    Raises:
        UsageError: alpha is too small for the test.
    """
    contrasts = examined if isinstance(examined, list) else []
    if any(each.evidence is not None and each.evidence.by_draws for each in contrasts):
        statistics.require_level(alpha)


def require_judgeable(rules: Sequence[Rule], baseline: Report, alpha: float = ALPHA) -> None:
    """Refuse rules that cannot judge any report, before a model is measured for hours.

    Each rule compares the baseline with itself. If this comparison has no test, no comparison of
    another report with the baseline has one.

    Args:
        rules: the user's rules; empty: the default ones.
        baseline: the baseline.
        alpha: error probability of the gate.

    Raises:
        UsageError: a rule matches nothing, or does not suit its metric; or no default rule exists;
            or alpha is too small for the test of a rule.
        BaselineError: a rule reads groups of samples that the baseline does not have.
    """
    for rule in rules or choose_rules(baseline):
        if rule.group:
            groups.list_own_members(rule, baseline, "the baseline")
        # A change needs a figure in the baseline. An absolute limit may name a row that only the
        # current report has, such as one of `transfer`. But a calibration error (ece) is missing
        # if there are too few samples, and then the current report, of as many samples, lacks it
        # like the baseline.
        lacks_alike = rule.column.startswith("ece") and "transfer" not in rule.text
        if lacks_alike or rule.limit.kind != "absolute":
            _require_level(examine(rule, baseline, baseline, typed=bool(rules)), alpha)


# Verdicts


def _compute_null(rule: Rule) -> float:
    """Return the change that a test must exceed: 0, or less if a rule demands an improvement."""
    return min(0.0, compute_margin(rule))


def _express_change(rule: Rule, worse: float) -> float:
    """Return a change in the printed form: new / old - 1 for a relative limit, else new - old.

    Args:
        rule: the rule; its `worse` is -1 if a smaller value is worse.
        worse: the change, positive for the worse: a log-ratio if the limit is relative.
    """
    change = rule.worse * worse + 0.0  # adding 0.0 turns -0.0 into 0.0
    if rule.limit.kind != "relative":
        return change
    with np.errstate(over="ignore"):
        return float(np.expm1(change))  # exp(log(new / old)) - 1


def _judge_rules(
    rules: Sequence[Rule],
    examinations: Sequence[list[Contrast] | Verdict],
    alpha: float,
    *,
    strict: bool,
) -> Iterator[Verdict]:
    """Yield a verdict for each row of each rule, with p-values that are corrected for many tests.

    First the p-values of the rows of a rule are corrected for the number of rows. The smallest of
    them is the p-value of the rule. Holm's procedure corrects it for the number of rules. So a
    model that is no worse is flagged with a probability of at most alpha.

    Args:
        rules: the rules.
        examinations: for each rule, a contrast (old and new values with their test) for each row,
            or the verdict with the reason why the rule cannot be judged.
        alpha: error probability of the whole gate.
        strict: whether limits must be proven.
    """
    # For each rule, the p-values of "no worse" by row, corrected for the rows of the rule. Empty
    # if no row has a test.
    p_of_rows = []
    contrasts_of = [each if isinstance(each, list) else [] for each in examinations]
    # Holm's procedure corrects for the rules that have a test, and for no others.
    testable = sum(any(map(_is_tested, contrasts)) for contrasts in contrasts_of)
    for rule, contrasts in zip(rules, contrasts_of, strict=True):
        p_of_rows.append(_adjust_rows(rule, contrasts, level=alpha / max(1, testable)))
    smallest = {i: min(p_values.values()) for i, p_values in enumerate(p_of_rows) if p_values}
    corrected = statistics.correct_by_holm(smallest)
    judged = zip(rules, examinations, p_of_rows, strict=True)
    for i, (rule, examined, p_values) in enumerate(judged):
        if isinstance(examined, Verdict):
            yield examined
            continue
        # The corrected p-value of the rule, and the factor by which Holm's procedure corrects it.
        p_of_rule, factor = corrected.get(i, (1.0, 1))
        for contrast in examined:
            p_of_row = p_values.get(contrast.key)
            verdict = _make_verdict(rule, contrast, level=alpha / 2)
            if p_of_row is None:
                yield _doubt_untested(verdict, rule)
                continue
            # A row is proven to be worse only if its rule is proven to be worse.
            adjusted = min(1.0, max(p_of_rule, p_of_row * factor))
            # The one-sided level of one test among all tests of the gate (Bonferroni), only to
            # estimate how many samples would prove a change. It is never above alpha / 2: that is
            # the level which `_judge_tested` asks of the uncorrected test of a row, too.
            level = alpha / max(2, len(smallest) * len(p_values))
            yield _judge_tested(verdict, rule, contrast, adjusted, alpha, level, strict=strict)


def _doubt_untested(verdict: Verdict, rule: Rule) -> Verdict:
    """Return a verdict without a test, with a weaker status if it claims a change.

    `regressed` becomes `inconclusive`, and `improved` becomes `pass`: without a test, the change
    may be chance. Absolute limits (which have no old value) and figures of the weights alone do
    not vary by chance: their verdict stays.
    """
    weaker = {"regressed": "inconclusive", "improved": "pass"}
    if verdict.old is None or verdict.status not in weaker or rule.about.domain == OF_WEIGHTS:
        return verdict
    return verdict.model_copy(update={"status": weaker[verdict.status]})


def _is_tested(contrast: Contrast) -> bool:
    """Return whether a row has a test that counts: a row that surely did not change has none."""
    return contrast.evidence is not None and not contrast.same


def _adjust_rows(
    rule: Rule, contrasts: Sequence[Contrast], level: float
) -> dict[ContrastKey, float]:
    """Return the p-values of "no worse" of the rows of a rule, corrected for testing many rows.

    Rows with sign tests (heads, for example) are corrected jointly by randomly flipping signs: the
    correction is smaller if heads change together. Rows with other tests, groups of samples, and
    all rows at a level that random flips cannot reach are corrected by Holm's procedure.

    Args:
        rule: the rule.
        contrasts: the old and new value of each row or group of the rule, and their test. Those
            without a test, and equal ones, are left out.
        level: the smallest level at which the rule may be tested among all rules.

    Returns:
        The p-value of each contrast, by its key.
    """
    tested = [contrast for contrast in contrasts if _is_tested(contrast)]
    # The test of each row: its number of samples, and the p-value of each null hypothesis.
    tests = {contrast.key: contrast.evidence for contrast in tested if contrast.evidence}
    # The change under the null hypothesis: 0, or less if the rule demands an improvement.
    null = _compute_null(rule)
    # The level of the row with the smallest p-value, which Holm's procedure multiplies most.
    finest = level / max(1, len(tests))
    p_values = {key: test.p(null, finest) for key, test in tests.items()}
    # Several rows with sign tests on the same samples (groups have different samples). A p-value
    # of random flips is at least 1 / draws: at a smaller level it could prove nothing.
    of_signs = all(test.of_signs for test in tests.values())
    enough_draws = not statistics.needs_more_draws(level)
    if of_signs and enough_draws and len(p_values) > 1 and not rule.group:
        changes = np.stack([contrast.changes for contrast in tested])  # (rows, samples)
        # Rows whose changes are usually below a quarter of the limit (QUIET) are not tested: they
        # cannot break the limit. Their p-value is 1, and the other rows are corrected for fewer.
        quiet = statistics.QUIET * max(0.0, compute_margin(rule))
        # changes - null: a sign test tests a median change of 0.
        adjusted = statistics.correct_jointly(changes - null, quiet).tolist()
        return dict(zip(p_values, adjusted, strict=True))  # both in the order of `tested`
    # All other rows are corrected by Holm's procedure. A group with fewer samples than its test
    # needs proves nothing: its p-value is 1, and it does not count in the correction.
    if rule.group:
        p_values = {key: p for key, p in p_values.items() if tests[key].has_enough_samples}
    corrected = statistics.correct_by_holm(p_values)
    return dict.fromkeys(tests, 1.0) | {key: p for key, (p, _) in corrected.items()}


def judge_change(rule: Rule, contrast: Contrast, level: float = LEVEL) -> Verdict:
    """Return the verdict on whether a figure changed at all, however little.

    Its status is `unchanged`, `improved`, `regressed` or, if nothing is proven, `inconclusive`.

    Args:
        rule: a rule that allows no change.
        contrast: the values, and their test if they have one.
        level: one-sided error probability of each limit of the change.
    """
    verdict = _make_verdict(rule, contrast, level)
    # `status` of this verdict judges the limit of the rule, `change_status` the change alone. Only
    # the change counts here, so it becomes the status.
    status = verdict.change_status
    # Without a test, the two values alone are compared: the status under a rule that allows no
    # change is `regressed` or `improved`, by the sign of their change. `pass` means equal values.
    if status is None:
        status = _find_change_status(verdict.status, [verdict.change], verdict.unit)
    update: dict[str, Any] = {"status": status, "change_status": None}
    evidence = contrast.evidence
    if status == "inconclusive" and evidence is not None:
        # The direction that more samples could prove: 1 for worse, -1 for better.
        way = math.copysign(1.0, evidence.estimate)
        p_no_worse = evidence.p(0.0)
        # The p-value of "no better" is about 1 - p_no_worse. The smaller one is that of `way`.
        p_of_way = min(p_no_worse, 1 - p_no_worse)
        update["samples_needed"] = _estimate_needed(evidence, p_of_way, level, way)
    return verdict.model_copy(update=update)


def _forbids_improvement(rule: Rule) -> bool:
    """Return whether a rule forbids a figure to get better, such as accuracy <= 0.9.

    Such a rule only guards against a change. A value far within its limit, such as an accuracy of
    0.2 under this rule, is a worse one, and must not be called improved.
    """
    better = rule.about.better
    if better is None and rule.column in FLAGS:
        better = "higher"
    forbidden = "higher" if rule.op == "<=" else "lower"  # the values that break the limit
    return better == forbidden


def _make_verdict(rule: Rule, contrast: Contrast, level: float) -> Verdict:
    """Return the verdict on one row of a rule, with its figures and a status.

    Equal values get the status `unchanged`. Without a test, the values are compared with the limit
    of the rule. A tested change gets the preliminary status `pass`: `_judge_tested` sets the final
    one, once the p-values of all rows are corrected. `change_status` says whether a tested figure
    changed at all, whatever the limit: regressed or improved if its confidence limits exclude 0.

    Args:
        rule: the rule.
        contrast: the old and new value of the row, and their test if they have one.
        level: one-sided error probability of each confidence limit of the change.
    """
    evidence = contrast.evidence
    known = _describe_contrast(rule, contrast)
    if contrast.same:
        return Verdict(status="unchanged", **known)
    if evidence is None:
        status = _compare_untested(rule, contrast.new, contrast.old)
        return Verdict(status=status, samples=len(contrast.ids), **known)
    low, high = evidence.limits(level)
    # In the printed form a change for the worse may be negative: then the ends are exchanged.
    ends = sorted(_express_change(rule, end) for end in (low, high))
    known |= {
        "low": ends[0],
        "high": ends[1],
        "samples": evidence.samples,
        "paired": _express_change(rule, evidence.estimate),
        "p": evidence.p(_compute_null(rule), level),
    }
    # `low` and `high` are limits of the change for the worse, whichever direction this is.
    proven: VerdictStatus = "inconclusive"
    if round(low, DIGITS) > 0:
        proven = "regressed"
    elif round(high, DIGITS) < 0:
        proven = "improved"
    change_status = _find_change_status(proven, ends, rule.limit.unit)
    return Verdict(status="pass", change_status=change_status, **known)


def _describe_contrast(rule: Rule, contrast: Contrast) -> dict[str, Any]:
    """Return the fields of a `Verdict` on what was compared: rule, row, old and new value.

    For a share of samples (an accuracy), three more: how many samples `lost` the property (right
    before, wrong now), how many `gained` it, and McNemar's p-value of equal counts.
    """
    known = {
        "rule": rule.text,
        "metric": rule.metric,
        "name": contrast.name,
        "group": contrast.group,
        "old": contrast.old,
        "new": contrast.new,
        "unit": rule.limit.unit,
    }
    if contrast.evidence is None or contrast.evidence.mcnemar is None:
        return known
    worse = contrast.changes  # of each sample, positive for the worse
    return known | {
        "lost": int((worse > 0).sum()),
        "gained": int((worse < 0).sum()),
        "mcnemar": contrast.evidence.mcnemar,
    }


def _compare_untested(rule: Rule, new: float, old: float | None) -> VerdictStatus:
    """Return the status of a row without a test, by its values and the limit of the rule."""
    if _breaks_limit(rule, new, old):
        return "regressed"
    # If a change from the new value back to the old one would break the limit, the new value is
    # better by more than the limit allows.
    if old is not None and _breaks_limit(rule, old, new) and not _forbids_improvement(rule):
        return "improved"
    return "pass"


def _judge_tested(
    verdict: Verdict,
    rule: Rule,
    contrast: Contrast,
    adjusted: float,
    alpha: float,
    level: float,
    *,
    strict: bool,
) -> Verdict:
    """Return the verdict on a tested change with its final status.

    All changes are for the worse: positive is worse. With `margin` for the largest change that the
    rule allows, `estimate` for the observed change and `high` for its upper confidence limit, the
    first of these cases holds:

    * estimate > margin: `regressed` if the change for the worse is proven (adjusted <= alpha, and
      p of this row alone <= alpha / 2), else `inconclusive`.
    * estimate < -|margin|, high < 0 and high <= margin: better by more than the size of the limit,
      and proven to be better. `improved`; but `pass (proven)` under a rule that forbids a figure
      to get better (`_forbids_improvement`).
    * high <= margin: `pass (proven)`, the limit is proven to hold.
    * else: `pass`, the status of `verdict`.

    Args:
        verdict: the verdict on the row, with its figures and the status `pass`.
        rule: the rule.
        contrast: the old and new value of the row, and the test of their change.
        adjusted: p-value of "no worse", corrected over all rules and rows.
        alpha: error probability of the gate.
        level: level of one test among all tests, to estimate how many samples are needed.
        strict: whether a limit must be proven.
    """
    evidence = contrast.evidence
    assert evidence is not None
    margin = compute_margin(rule)
    p = verdict.p or 0.0
    estimate = round(evidence.estimate, DIGITS)
    _, upper_limit = evidence.limits(alpha / 2)
    high = round(upper_limit, DIGITS)
    update: dict[str, Any] = {"p_adjusted": adjusted}
    if estimate > margin:
        # The uncorrected test of the row must prove the change, too (p <= alpha / 2). Then the
        # command `compare` says the same of this row.
        if adjusted <= alpha and p <= alpha / 2:
            update["status"] = "regressed"
        else:
            update["status"] = "inconclusive"
            update["samples_needed"] = _estimate_needed(evidence, p, level)
    # `high <= margin` matters if the rule demands an improvement (margin < 0): it must be proven.
    elif estimate < -abs(margin) and high < 0 and high <= margin:
        update["status"] = "pass (proven)" if _forbids_improvement(rule) else "improved"
    elif high <= margin:
        update["status"] = "pass (proven)"
    elif strict:  # within the limit, but not proven: --strict fails it
        update["samples_needed"] = _count_to_prove(evidence.samples, estimate, high, margin)
    return verdict.model_copy(update=update)


def _count_to_prove(n: int, estimate: float, high: float, margin: float) -> int | None:
    """Estimate how many samples would prove that a change of this size is within its limit.

    The distance between the estimate and the upper confidence limit shrinks like 1 / sqrt(n). So
    the upper limit reaches the margin with m samples, where
    sqrt(m / n) = (high - estimate) / (margin - estimate). None if no number of samples proves it.

    Args:
        n: number of samples of the run.
        estimate: the observed change for the worse.
        high: the upper confidence limit of the change.
        margin: the largest change that the rule allows.
    """
    distance = margin - estimate
    if not math.isfinite(high) or distance <= 0:
        return None
    ratio = min((high - estimate) / distance, MANY)  # a larger ratio counts as MANY
    return max(n + 1, math.ceil(n * ratio**2))


def _estimate_needed(evidence: Evidence, p: float, level: float, way: float = 1.0) -> int | None:
    """Estimate how many samples would prove a change of this size; None if no estimate exists.

    Args:
        evidence: the statistics of the change with the n samples of this run.
        p: the p-value of "no worse" (or "no better") for this row alone.
        level: the p-value that would prove the change among all tests.
        way: 1 to prove a change for the worse, -1 for the better.
    """
    # Even if all n samples get worse, the p-value of a sign test is 2^-n.
    all_worse = 0.5**evidence.samples
    least = max(evidence.least, math.ceil(-math.log2(level)))
    estimate = way * evidence.estimate
    low = -math.inf
    # Limits by random draws at a very small level take long: the p-value estimates as well.
    if not (evidence.by_draws and statistics.needs_more_draws(level)):
        low = min(way * end for end in evidence.limits(level))
    # `ratio` is sqrt(m / n), if m samples prove the change.
    if math.isfinite(low) and 0 < estimate < math.inf:
        # The distance of the lower limit from the estimate shrinks like 1 / sqrt(n). The limit
        # reaches 0 with m samples, where sqrt(m / n) = (estimate - low) / estimate. A limit above
        # 0 counts as 0: then one more sample is the estimate.
        ratio = 1 - min(low, 0.0) / estimate
    elif all_worse < p < 0.5:
        # Without limits: the normal quantile z of the p-value grows like sqrt(n), so
        # sqrt(m / n) = z(level) / z(p). p < 1/2, so that z(p) > 0.
        ratio = NormalDist().inv_cdf(1 - level) / NormalDist().inv_cdf(1 - p)
    elif evidence.samples < least and (p <= all_worse or not evidence.has_enough_samples):
        # All samples got worse, or there are too few for a p-value: more is not known.
        return least
    else:
        return None
    # A ratio above MANY counts as MANY.
    needed = math.ceil(evidence.samples * min(ratio, MANY) ** 2)
    return max(least, evidence.samples + 1, needed)


def _breaks_limit(rule: Rule, new: float, old: float | None) -> bool:
    """Return whether a value breaks the limit of a rule; a value equal to the limit does not.

    The comparison uses exact decimals of 12 digits, so that 73% is never below 73%.

    Args:
        rule: the rule.
        new: the value.
        old: the value that a limit on a change starts from; None for an absolute limit.
    """
    # An infinite value (a first-order radius, if a gradient is 0) is beyond every limit, or within
    # it. It has no decimals.
    if math.isinf(new):
        return rule.worse * new > 0
    bound = rule.limit.value  # of the new value
    if old is not None and rule.limit.kind == "relative":
        bound = _round_digits(_to_decimal(old) * (1 + bound))
    elif old is not None and rule.limit.kind == "difference":
        bound = _round_digits(_to_decimal(old) + bound)
    return rule.worse * (_to_decimal(new) - bound) > 0  # `worse` is -1 if smaller is worse


def _round_digits(value: Fraction) -> Fraction:
    """Round to 12 digits; a value too large for a float is returned as it is."""
    return _to_decimal(float(value)) if abs(value) < _LARGEST else value


def _to_decimal(value: float) -> Fraction:
    return Fraction(format(value, f".{DIGITS}g"))


def _find_change_status(
    status: VerdictStatus, ends: Sequence[float | None], unit: str
) -> VerdictStatus:
    """Return whether a figure changed at all: its status under a rule that allows no change.

    It is `unchanged` if both confidence limits of the change are smaller than the accuracy of
    norms. Otherwise `pass` becomes `inconclusive`, because `pass` says only that the rule is not
    broken, not that the value stayed the same. All other statuses are returned as they are.

    Args:
        status: the status under the rule.
        ends: the confidence limits of the change, or the change if there are none.
        unit: unit of the change: "%", "pp", or empty for a difference. Differences have no common
            accuracy and are never called unchanged here.
    """
    # Norms have a relative accuracy of TOLERANCE: a smaller change counts as no change.
    if unit and all(end is not None and abs(end) <= TOLERANCE for end in ends):
        return "unchanged"
    return "inconclusive" if status == "pass" else status
