"""What a rule contrasts: the values of two reports, on the samples that both have.

A rule names a column and a statistic. `examine` gives a contrast for each of its rows or columns,
and for each of its groups of samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lipaudit.errors import BaselineError, EvaluationError, UsageError
from lipaudit.gate import conditions, groups, pairing, statistics
from lipaudit.gate.pairing import Key, RuleValues
from lipaudit.gate.rules import Rule
from lipaudit.gate.statistics import DIGITS, FEWEST, Evidence, Values
from lipaudit.gate.verdicts import Verdict, VerdictStatus
from lipaudit.tables import Reduction, Report, Section
from lipaudit.tables.columns import reduce_values
from lipaudit.tables.trials import FLAGS

TOLERANCE = 1e-4
"""Default relative accuracy of norms; smaller changes count as no change."""
ROUNDING = 1e-6
"""Rounding error of a difference (a margin), as a share of the larger value."""
OF_WEIGHTS = "the weights"
"""Domain of figures that depend on no sample: any change of them is certain."""
NONE = np.zeros(0)
LISTED = 8
"""Number of rows that a message names."""


@dataclass(frozen=True, eq=False)
class Contrast:
    """The comparison that a rule makes for one row or column.

    Attributes:
        name: the row or column; empty if there is only one.
        group: the group of samples; empty: all.
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
    group: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return what names the contrast among those of its rule."""
        return self.name, self.group


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
        status: VerdictStatus = "not comparable"
        if isinstance(error, EvaluationError):
            status = "error"
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
    new = current.section(rule.measure)
    old = baseline.section(rule.measure)
    if new is None and old is None:
        text = f"{rule.text!r} matches nothing: neither report has a section {rule.measure}"
        raise UsageError(text)
    if new is None:
        raise BaselineError(f"the current report has no section {rule.measure}")
    # The current report comes first: a run that failed is an error, whatever the baseline is.
    points = pairing.read_trusted(rule, current, new, lenient=lenient).points
    if rule.limit.kind == "absolute":
        if rule.group:
            return _contrast_own_groups(rule, current, new)
        return [Contrast(str(name), None, value) for name, value in points.items()]
    if old is None:
        raise BaselineError(f"the baseline has no section {rule.measure}")
    try:
        pairing.read_trusted(rule, baseline, old, lenient=lenient)
    except EvaluationError as error:
        raise BaselineError(f"baseline: {error.message}") from None
    obstacle = conditions.find_obstacle(current, baseline, rule.measure, lenient=lenient)
    if obstacle:
        raise BaselineError(obstacle)
    tolerance = TOLERANCE
    tol = new.settings.get("tol")
    if isinstance(tol, float):  # of a plug-in, it may be anything
        tolerance = max(TOLERANCE, tol)
    shared = _find_shared(rule, new, old, lenient=lenient)
    if rule.group:
        members = groups.find_members(rule, current, baseline, lenient=lenient)
        contrasts = _contrast_groups(rule, shared, members, tolerance)
    else:
        after, before, ids = _read_shared(rule, shared)
        contrasts = _contrast_rows(rule, after, before, ids, tolerance)
    # Other starts break other samples of the same model, which is no change of the model.
    restarted = conditions.has_other_starts(new, old) and rule.column not in ("clean", "correct")
    same = compute_margin(rule) >= 0 and conditions.has_same_weights(current, baseline)
    if not lenient:
        _require_test(rule, new, contrasts)
    return [replace(c, same=same and (c.same or restarted)) for c in contrasts]


def _require_test(rule: Rule, new: Section, contrasts: Sequence[Contrast]) -> None:
    """Refuse a rule without a test: a gate would fail by chance.

    Figures of the weights need none, as they do not vary.

    Raises:
        UsageError: no contrast has a test.
    """
    tested = any(contrast.evidence is not None for contrast in contrasts)
    if tested or rule.about.domain == OF_WEIGHTS:
        return
    text = f"{rule.text!r}: how far {rule.measure}.{rule.column} varies by chance is unknown"
    advice = "Use an absolute limit, such as <= 0.1 or >= 0.5."
    how = rule.about.reduction
    if how is not None and how.values in new.sample_columns:
        advice = f"Judge its samples: {rule.measure}.{how.values}:{how.stat}. {advice}"
    raise UsageError(text, advice)


def _contrast_groups(
    rule: Rule, shared: Shared, members: Mapping[str, Collection[str]], tol: float
) -> list[Contrast]:
    """Return the contrasts of a rule over the samples of each group, the worst change first."""
    after, before, ids = _read_shared(rule, shared)
    places = {name: i for i, name in enumerate(ids)}
    contrasts = list[Contrast]()
    for group, samples in members.items():
        index = sorted(places[name] for name in samples if name in places)
        if not index:  # in a comparison: none of them converged
            continue
        own_ids = tuple(ids[i] for i in index)
        if rule.per_sample:
            own_after = pairing.select(rule, after, index)
            own_before = pairing.select(rule, before, index)
        else:
            own_after, own_before, _ = _read_shared(rule, shared.select(index))
        found = _contrast_rows(rule, own_after, own_before, own_ids, tol)
        contrasts += (replace(contrast, group=group) for contrast in _keep_distinct(rule, found))
    return sorted(contrasts, key=partial(_rank_contrast, rule))


def _contrast_rows(
    rule: Rule, after: RuleValues, before: RuleValues, ids: tuple[str, ...], tol: float
) -> list[Contrast]:
    """Return the contrast of each row or column over some shared samples.

    Raises:
        BaselineError: only one of the sections has a row.
    """
    # A head that is gone may be the one that got worse. A new one has nothing to compare with, but
    # it changes a median over all heads.
    missing = [name for name in before.names if name not in after.names]
    if not (rule.per_sample or rule.stat == "each"):
        missing += [name for name in after.names if name not in before.names]
    if missing:
        names = [str(name) for name in missing[:LISTED]]
        if len(missing) > LISTED:
            names.append("...")
        raise BaselineError(f"{rule.metric}: only one of the reports has {'; '.join(names)}")
    return [_contrast(rule, name, before, after, ids, tol) for name in before.points]


def _contrast_own_groups(rule: Rule, current: Report, section: Section) -> list[Contrast]:
    """Return the figure of each group of one report, for an absolute limit, the worst first.

    Raises:
        BaselineError: the report has no groups, or lacks the values of each sample.
    """
    contrasts = list[Contrast]()
    for group, members in groups.list_own_members(rule, current, "the current report").items():
        take = [i for i, name in enumerate(section.ids) if name in members]
        reading = pairing.read(rule, section, take, again=not rule.per_sample)
        pairing.require_finite(rule, reading)
        own = [Contrast(str(name), None, value) for name, value in reading.points.items()]
        for contrast in _keep_distinct(rule, own):
            contrasts.append(replace(contrast, group=group, ids=tuple(members)))
    return sorted(contrasts, key=partial(_rank_contrast, rule))


def _keep_distinct(rule: Rule, contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return the contrasts of a group; one alone if every row is of the same figure of samples."""
    if rule.group and rule.about.reduction == pairing.RIGHT:
        return [replace(contrast, name="") for contrast in contrasts[:1]]
    return [*contrasts]


def _rank_contrast(rule: Rule, contrast: Contrast) -> float:
    """Order contrasts: the largest change for the worse first, or else the worst value."""
    if contrast.evidence is not None:
        return -contrast.evidence.estimate
    before = contrast.old or 0.0
    return -rule.worse * (contrast.new - before)


@dataclass(frozen=True)
class Shared:
    """The samples that two sections share.

    Attributes:
        sections: the current section and the baseline's.
        takes: indices of the shared samples in each, in the order of the baseline; None: the
            sections name no samples, and all are read.
        again: whether rows are computed again from these samples.
        skipped: rows that did not converge in a comparison.
    """

    sections: tuple[Section, Section]
    takes: tuple[list[int] | None, list[int] | None]
    again: bool
    skipped: set[Key]

    def select(self, index: Sequence[int]) -> Shared:
        """Return some of the shared samples, by their places among these."""
        new, old = self.takes
        assert new is not None
        assert old is not None
        takes = [new[i] for i in index], [old[i] for i in index]
        return replace(self, takes=takes, again=True)


def _find_shared(rule: Rule, new: Section, old: Section, *, lenient: bool) -> Shared:
    """Find the samples that both sections have.

    Rows are computed again from their samples if the two sections have others.

    Raises:
        BaselineError: too few samples are shared, or nothing converged.
    """
    rows = set[Key]()
    samples = set[str]()
    if lenient:
        # Norms that did not converge may be far too low, in either report: none is compared.
        column = rule.column if rule.per_sample else ""
        rows, samples = pairing.find_unsettled((new, old), column)
    if rows and (rule.per_sample or rows >= pairing.index_rows(old).keys()):
        raise BaselineError(f"{rule.measure}: {len(rows)} rows did not converge")
    shared = set(new.ids) & set(old.ids)
    if shared and shared <= samples:
        raise BaselineError(
            f"{rule.measure}: {len(samples)} samples did not converge, or have no value"
        )
    if not (new.ids and old.ids):  # without ids, `find_obstacle` has refused other samples
        return Shared((new, old), (None, None), again=False, skipped=rows)
    known = ["" if name in samples else name for name in old.ids]
    least = 0.0 if lenient else pairing.ALL_BUT_FEW
    takes = pairing.find_shared(rule.measure, new.ids, known, least)
    again = not rule.per_sample and (bool(samples) or sorted(new.ids) != sorted(old.ids))
    return Shared((new, old), takes, again=again, skipped=rows)


def _read_shared(rule: Rule, shared: Shared) -> tuple[RuleValues, RuleValues, tuple[str, ...]]:
    """Read both sections on their shared samples, and the ids of these in order.

    Raises:
        BaselineError: the reports lack the values per sample.
        EvaluationError: a value is not finite.
    """
    readings = list[RuleValues]()
    for section, take in zip(shared.sections, shared.takes, strict=True):
        reading = pairing.read(rule, section, take, again=shared.again, skipped=shared.skipped)
        pairing.require_finite(rule, reading)
        readings.append(reading)
    after, before = readings
    _, old = shared.sections
    _, take = shared.takes
    return after, before, tuple(old.ids[i] for i in take or ())


def _contrast(
    rule: Rule, name: Key, old: RuleValues, new: RuleValues, ids: tuple[str, ...], tol: float
) -> Contrast:
    """Compare a row or column: by its samples, else by their medians, else without a test."""
    first = old.points[name]
    last = new.points[name]
    paired = name in old.pairs and name in new.pairs
    if paired:
        before = old.pairs[name]
        now = new.pairs[name]
        # Medians of exactly the tested samples, so that figures and their change agree.
        if rule.stat == "each" and not pairing.is_mean(rule):
            first = float(np.median(before))
            last = float(np.median(now))
    else:
        before = np.array([first])
        now = np.array([last])
    worse = _compute_change(rule, before, now)
    same = _are_same(rule, before, now, tol)
    if paired:
        evidence = _test_change(rule, before, now, worse)
    else:
        # The statistic of each sample over the rows that have a figure of every sample.
        lines = _stack_rows(old, new)
        if lines is None or rule.stat == "each":
            return Contrast(str(name), first, last, same=same)
        before, now = (reduce_values(rule.stat, each, axis=0) for each in lines)
        worse = _compute_change(rule, before, now)
        evidence = statistics.judge_median(worse)
    # Stored arrays without ids name no sample.
    named = ids if worse.size == len(ids) else ()
    return Contrast(str(name), first, last, evidence, before, now, worse, named, same)


def _are_same(rule: Rule, before: Values, now: Values, tol: float) -> bool:
    """Say whether figures are equal within their accuracy."""
    if rule.column in FLAGS and rule.per_sample:
        return bool(np.array_equal(before, now))
    slack = ROUNDING * float(np.abs(before).max(initial=0.0))
    return bool(np.isclose(now, before, rtol=tol, atol=slack).all())


def _stack_rows(old: RuleValues, new: RuleValues) -> tuple[Values, Values] | None:
    """Return the values of all rows that both reports have of every sample, (rows, samples)."""
    before = list[Values]()
    now = list[Values]()
    for row, values in old.pairs.items():
        others = new.pairs.get(row)
        if others is not None and np.isfinite((values, others)).all():
            before.append(values)
            now.append(others)
    if not before:
        return None
    return np.stack(before), np.stack(now)


def _test_change(rule: Rule, old: Values, new: Values, worse: Values) -> Evidence:
    """Choose the test of a rule, as in the table of docs/guide/gate.md."""
    share = rule.stat == "mean"
    if rule.stat == "each":
        share = rule.about.reduction in (Reduction("mean", rule.column), pairing.RIGHT)
    if share and np.isin((old, new), (0, 1)).all():
        if rule.limit.kind == "relative":
            text = f"{rule.text!r}: a share changes in percentage points"
            raise UsageError(text, "Write -2pp, not -2%.")
        lost = int((worse > 0).sum())
        gained = int((worse < 0).sum())
        return statistics.judge_share(lost, gained, old.size)
    if rule.stat == "max":
        raise UsageError(
            f"{rule.text!r}: the variation of a maximum is unknown",
            "Use an absolute limit for `max`, or judge p95.",
        )
    stat = rule.stat
    least = statistics.LEAST.get(stat, FEWEST)
    if stat == "each" and pairing.is_mean(rule) and rule.limit.kind == "difference":
        # The row is a mean, and differences add up: a median of flags that seldom change is 0.
        stat = "mean"
        least = statistics.LEAST["share"]
    if stat in ("median", "each"):
        return statistics.judge_median(worse)

    def change(before: Values, now: Values) -> Values:
        old_figures = reduce_values(stat, before, axis=1)
        new_figures = reduce_values(stat, now, axis=1)
        return _compute_change(rule, old_figures, new_figures)

    return statistics.judge_by_bootstrap(old, new, change, least)


def _compute_change(rule: Rule, old: Values, new: Values) -> Values:
    """Return changes for the worse: logarithms of ratios for a relative limit.

    Raises:
        UsageError: the limit is relative, and a figure is negative.
    """
    if rule.limit.kind != "relative":
        return rule.worse * (new - old)
    if (np.append(old, new) < 0).any():
        raise UsageError(
            f"{rule.text!r}: a figure that can be negative has no relative change",
            "Use an absolute change, such as >= -0.1.",
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        return rule.worse * np.where(new == old, 0.0, np.log(new) - np.log(old))


def compute_margin(rule: Rule) -> float:
    """Return the largest change for the worse that a rule allows, in the scale of `Evidence`."""
    margin = float(rule.limit.value)
    if rule.limit.kind == "relative":
        margin = math.log1p(margin)
    return round(rule.worse * margin, DIGITS)
