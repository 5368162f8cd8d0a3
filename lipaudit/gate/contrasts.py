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

from lipaudit.errors import BaselineError, EvaluationError, UsageError, list_first
from lipaudit.gate import conditions, groups, pairing, readings, statistics
from lipaudit.gate.readings import Key, RuleValues
from lipaudit.gate.rules import Rule
from lipaudit.gate.statistics import DIGITS, FEWEST, Evidence, Values
from lipaudit.gate.verdicts import Verdict, VerdictStatus
from lipaudit.tables import Reduction, Report, Section
from lipaudit.tables.columns import reduce_values
from lipaudit.tables.formats import format_count
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


ContrastKey = tuple[str, str]
"""The row and the group of samples of a contrast."""


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
    def key(self) -> ContrastKey:
        """Return row and group, which identify the contrast among all contrasts of a rule."""
        return self.name, self.group


def examine(
    rule: Rule, current: Report, baseline: Report, *, lenient: bool = False, typed: bool = False
) -> list[Contrast] | Verdict:
    """Return the contrasts of a rule, or the verdict that it cannot be judged.

    A contrast has the old and new value of one row (a head, an attack) or per-sample column, and
    the statistics of their change.

    Args:
        rule: the rule.
        current: the report to judge.
        baseline: the report to compare it with.
        lenient: True for a comparison, False for a gate. A comparison accepts reports with other
            precision or preprocessing and with few shared samples, and leaves out rows and samples
            that did not converge. A gate refuses such reports.
        typed: whether the user wrote the rule; then a rule that suits no figure is an error.

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

    A contrast has the old and new value of one row (a head, an attack) or per-sample column, and
    the statistics of their change.

    Args:
        rule: the rule.
        current: the report to judge.
        baseline: the report to compare it with.
        lenient: True for a comparison, False for a gate. A comparison leaves out rows and samples
            that did not converge; a gate refuses such reports.

    Raises:
        EvaluationError: the current report is not complete, finite and converged.
        BaselineError: the two reports are not comparable.
        UsageError: the rule matches nothing, or does not suit its metric.
    """
    if not any(report.section(rule.measure) for report in (current, baseline)):
        text = f"{rule.text!r} matches nothing: neither report has a section {rule.measure}"
        raise UsageError(text)
    new = readings.require_section(rule, current, "the current report")
    # The current report is checked first: a failed run is an error, whatever the baseline is.
    points = readings.read_trusted(rule, current, new, lenient=lenient).points
    if rule.limit.kind == "absolute":  # a limit on the current figure, which needs no baseline
        if rule.group:
            return _contrast_own_groups(rule, current, new)
        return _contrast_current(points)
    old = readings.require_section(rule, baseline, "the baseline")
    _require_comparable(rule, current, baseline, old, lenient)
    shared = _find_shared(rule, new, old, lenient=lenient)
    if rule.group:
        members = groups.find_members(rule, current, baseline, (new, old), lenient=lenient)
        contrasts = _contrast_groups(rule, shared, members, _read_tolerance(new), lenient=lenient)
    else:
        new_values, old_values, ids = _read_shared(rule, shared)
        contrasts = _contrast_rows(
            rule, new_values, old_values, ids, _read_tolerance(new), lenient=lenient
        )
    if not lenient:
        _require_test(rule, new, contrasts)
    same = _decide_same(rule, current, baseline)
    if same is None:  # the values decide: `same` of each contrast says whether they are equal
        return contrasts
    return [replace(contrast, same=same) for contrast in contrasts]


def _decide_same(rule: Rule, current: Report, baseline: Report) -> bool | None:
    """Return whether a figure gets the verdict `unchanged`.

    * False: never, even if its values are equal. Only equal weights prove that nothing changed.
    * None: if its values are equal, too (`Contrast.same`).
    * True: whatever its values are, because they differ by chance.

    Args:
        rule: a rule on a change.
        current: the report to judge.
        baseline: the report to compare it with.
    """
    # A rule with a negative margin demands an improvement: an unchanged figure breaks it, and must
    # be judged.
    if compute_margin(rule) < 0 or not conditions.has_same_weights(current, baseline):
        return False
    # The weights are equal. Figures without attack (also `clean` and `correct` in the section
    # `attack`) have no random start: the values decide.
    if rule.measure != "attack" or rule.column in ("clean", "correct"):
        return None
    # With other random starts, an attack breaks other samples of the same model, so figures under
    # attack differ by chance: they count as unchanged.
    return conditions.has_other_starts(current, baseline) or None


def _contrast_current(points: Mapping[Key, float]) -> list[Contrast]:
    """Return a contrast without an old value for each current figure, for an absolute limit."""
    return [Contrast(name=str(name), old=None, new=value) for name, value in points.items()]


def _require_comparable(
    rule: Rule, current: Report, baseline: Report, old: Section, lenient: bool
) -> None:
    """Refuse a baseline with unreliable figures, or one that was measured in another way.

    Args:
        rule: a rule on a change.
        current: the report to judge.
        baseline: the report to compare it with.
        old: the section of the baseline.
        lenient: True for a comparison, False for a gate.

    Raises:
        BaselineError: the message says why the two reports cannot be compared.
    """
    try:
        readings.read_trusted(rule, baseline, old, lenient=lenient)
    except EvaluationError as error:
        raise BaselineError(f"baseline: {error.message}") from None
    obstacle = conditions.find_obstacle(current, baseline, rule.measure, lenient=lenient)
    if obstacle:
        raise BaselineError(obstacle)


def _read_tolerance(section: Section) -> float:
    """Return the relative accuracy of the norms in a section: smaller changes are no change."""
    tol = section.settings.get("tol")
    if isinstance(tol, float):  # a plug-in may have another setting of this name
        return max(TOLERANCE, tol)
    return TOLERANCE


def _require_test(rule: Rule, new: Section, contrasts: Sequence[Contrast]) -> None:
    """Refuse a rule on a change if no row has a statistical test: a gate would fail by chance.

    Figures of the weights do not vary by chance, so their rules are accepted without a test.

    Args:
        rule: a rule on a change.
        new: the section of the current report.
        contrasts: the rows or columns that the rule judges.

    Raises:
        UsageError: no contrast has a test.
    """
    tested = any(contrast.evidence is not None for contrast in contrasts)
    if tested or rule.about.domain == OF_WEIGHTS:
        return
    text = f"{rule.text!r}: how far {rule.measure}.{rule.column} varies by chance is unknown"
    advice = "Use an absolute limit, such as <= 0.1 or >= 0.5."
    # A row that is a statistic of a per-sample column can be judged by that column.
    how = rule.about.reduction
    if how is not None and how.values in new.sample_columns:
        advice = f"Judge its samples: {rule.measure}.{how.values}:{how.stat}. {advice}"
    raise UsageError(text, advice)


def _contrast_groups(
    rule: Rule,
    shared: Shared,
    members: Mapping[str, Collection[str]],
    tol: float,
    *,
    lenient: bool,
) -> list[Contrast]:
    """Return the contrasts of a rule over the samples of each group, the worst change first.

    Args:
        rule: a rule by group.
        shared: the samples that both sections have.
        members: the ids of the samples of each group.
        tol: relative accuracy of norms; smaller changes count as no change.
        lenient: True for a comparison, False for a gate.
    """
    # For a rule on rows, only the ids are used: the rows are statistics of all shared samples.
    new_values, old_values, ids = _read_shared(rule, shared)
    position = {name: i for i, name in enumerate(ids)}
    contrasts = list[Contrast]()
    for group, samples in members.items():
        index = sorted(position[name] for name in samples if name in position)
        # Samples that did not converge are left out of a comparison: a group may lose all of its.
        if not index:
            continue
        group_ids = tuple(ids[i] for i in index)
        if rule.per_sample:  # take the values of the group's samples
            new_of_group = readings.select(rule, new_values.sample_values, index)
            old_of_group = readings.select(rule, old_values.sample_values, index)
        else:  # compute the rows again from the group's samples
            new_of_group, old_of_group, _ = _read_shared(rule, shared.select(index))
        rows = _contrast_rows(rule, new_of_group, old_of_group, group_ids, tol, lenient=lenient)
        # The accuracy without attack is the same in the rows of all attacks: one of them is kept.
        contrasts += (replace(contrast, group=group) for contrast in _drop_copies(rule, rows))
    return sorted(contrasts, key=partial(_rank_contrast, rule))


def _contrast_rows(
    rule: Rule,
    new: RuleValues,
    old: RuleValues,
    ids: tuple[str, ...],
    tol: float,
    *,
    lenient: bool,
) -> list[Contrast]:
    """Return the contrast (old and new value with their test) of each row or per-sample column.

    Args:
        rule: the rule.
        new: the values of the current report on some shared samples.
        old: the values of the baseline on the same samples.
        ids: the ids of the samples; empty if the values do not belong to samples.
        tol: relative accuracy of norms; smaller changes count as no change.
        lenient: True for a comparison, False for a gate.

    Raises:
        BaselineError: only one of the reports has a row.
    """
    # Rows that are gone, such as a head, may be the rows that got worse: refuse them. New rows
    # have no old value, and are refused only if they change a statistic over all rows.
    unmatched = [name for name in old.names if name not in new.names]
    if not (rule.per_sample or rule.stat == "each"):
        unmatched += [name for name in new.names if name not in old.names]
    if unmatched:
        names = "; ".join(list_first(unmatched, LISTED))
        raise BaselineError(f"{rule.metric}: only one of the reports has {names}")
    return [_contrast_row(rule, name, old, new, ids, tol, lenient=lenient) for name in old.points]


def _contrast_own_groups(rule: Rule, current: Report, section: Section) -> list[Contrast]:
    """Return the figure of each group of one report, for an absolute limit, the worst first.

    Args:
        rule: a rule by group with an absolute limit, so that no baseline is needed.
        current: the report to judge.
        section: the section of the report that the rule reads.

    Raises:
        BaselineError: the report has no groups, or lacks the values of each sample.
    """
    contrasts = []
    for group, members in groups.list_own_members(rule, current, "the current report").items():
        indices = [i for i, name in enumerate(section.ids) if name in members]
        # The stored rows are statistics of all samples: they are computed again for each group.
        reading = readings.read(rule, section, indices, recompute=not rule.per_sample)
        readings.require_finite(rule, reading)
        # The accuracy without attack is the same in the rows of all attacks: one of them is kept.
        for contrast in _drop_copies(rule, _contrast_current(reading.points)):
            contrasts.append(replace(contrast, group=group, ids=tuple(members)))
    return sorted(contrasts, key=partial(_rank_contrast, rule))


def _drop_copies(rule: Rule, contrasts: list[Contrast]) -> list[Contrast]:
    """Return the contrasts of a group of samples, one for each row that a rule judges.

    The accuracy without attack (RIGHT) is the same in the rows of all attacks: then only one
    contrast is returned, without the name of an attack.
    """
    if rule.about.reduction == readings.RIGHT:
        return [replace(contrast, name="") for contrast in contrasts[:1]]
    return contrasts


def _rank_contrast(rule: Rule, contrast: Contrast) -> float:
    """Return the sort key of a row that a rule judges; the worst row has the smallest key.

    The key is minus the change for the worse: as estimated by the test, or new - old without a
    test. For an absolute limit, which has no old value, old counts as 0.
    """
    if contrast.evidence is not None:
        return -contrast.evidence.estimate
    old = contrast.old or 0.0  # None becomes 0
    return -rule.worse * (contrast.new - old)  # `worse` is -1 if smaller values are worse


@dataclass(frozen=True)
class Shared:
    """The samples that two sections share.

    Attributes:
        sections: the current section and the baseline's.
        skipped: rows that did not converge in a comparison.
        indices: indices of the shared samples in each, in the order of the baseline; None: the
            sections name no samples, and all are read.
        recompute: whether rows are computed again from these samples.
    """

    sections: tuple[Section, Section]
    skipped: set[Key]
    indices: tuple[list[int] | None, list[int] | None] = (None, None)
    recompute: bool = False

    def select(self, index: Sequence[int]) -> Shared:
        """Return some of the shared samples, such as a group.

        The stored rows of the two sections are statistics of all samples, so they have to be
        computed again.

        Args:
            index: positions in the lists of shared samples.
        """
        new, old = self.indices  # in the current section, and in the baseline's
        # None only if samples have no ids. Then no sample belongs to a group, and nothing calls
        # this method.
        assert new is not None
        assert old is not None
        indices = [new[i] for i in index], [old[i] for i in index]
        return replace(self, indices=indices, recompute=True)


def _find_shared(rule: Rule, new: Section, old: Section, *, lenient: bool) -> Shared:
    """Find the samples that both sections have, and the rows that cannot be compared.

    The result has the indices of the shared samples in both sections; the rows to leave out
    (`skipped`); and whether rows, which are statistics of all samples of a section, have to be
    computed again from the shared samples (`recompute`).

    Args:
        rule: the rule that reads the sections.
        new: the section of the current report.
        old: the section of the baseline.
        lenient: True for a comparison, False for a gate. A comparison needs few shared samples,
            and leaves out rows and samples that did not converge. A gate has refused sections with
            such rows or samples before this call.

    Raises:
        BaselineError: too few samples are shared, or nothing converged.
    """
    unconverged_rows = set[Key]()
    unconverged_samples = set[str]()
    if lenient:
        unconverged_rows, unconverged_samples = _find_unconverged(rule, new, old)
    shared = Shared(sections=(new, old), skipped=unconverged_rows)
    # Without ids nothing has to be matched: `find_obstacle`, which ran before, refuses sections
    # without ids unless both are of the same samples, or of the weights alone.
    if not (new.ids and old.ids):
        return shared
    # Leave out unconverged samples: their ids become "", which matches no sample of the current
    # report. All other samples stay at their indices.
    old_ids = ["" if name in unconverged_samples else name for name in old.ids]
    # The share of the baseline's samples that has to be in the current report.
    least = 0.0 if lenient else pairing.ALL_BUT_FEW
    indices = pairing.find_shared(rule.measure, new.ids, old_ids, least)
    # Rows are computed again if the sections have different samples, or if samples are left out.
    # A per-sample rule reads no rows: it takes the values of the shared samples.
    recompute = not rule.per_sample and (
        bool(unconverged_samples) or sorted(new.ids) != sorted(old.ids)
    )
    return replace(shared, indices=indices, recompute=recompute)


def _find_unconverged(rule: Rule, new: Section, old: Section) -> tuple[set[Key], set[str]]:
    """Return the rows and the ids of samples that a comparison leaves out.

    Norms that did not converge in one report may be far too low: they are not compared. A
    per-sample rule also leaves out samples without a value in its column.

    Raises:
        BaselineError: nothing is left to compare.
    """
    column = rule.column if rule.per_sample else ""
    rows, samples = readings.find_unconverged((new, old), column)
    # A row that did not converge does not say which samples caused it. So a per-sample rule cannot
    # leave out these samples. A rule on rows can leave out rows, but needs at least one.
    if rows and (rule.per_sample or rows >= readings.index_rows(old).keys()):
        raise BaselineError(f"{rule.measure}: {format_count(len(rows), 'row')} did not converge")
    shared = set(new.ids).intersection(old.ids)
    if shared and shared <= samples:
        raise BaselineError(
            f"{rule.measure}: {len(samples)} samples did not converge, or have no value"
        )
    return rows, samples


def _read_shared(rule: Rule, shared: Shared) -> tuple[RuleValues, RuleValues, tuple[str, ...]]:
    """Return the values of a rule on the shared samples (current, baseline), and the ids.

    The ids are in the order of the baseline, and empty if the sections have no ids.

    Raises:
        BaselineError: the reports lack the values per sample.
        EvaluationError: a value is not finite.
    """
    values = []  # of the current report and of the baseline
    # `indices` are those of the shared samples; None if the sections have no ids.
    for section, indices in zip(shared.sections, shared.indices, strict=True):
        reading = readings.read(
            rule, section, indices, recompute=shared.recompute, skipped=shared.skipped
        )
        readings.require_finite(rule, reading)
        values.append(reading)
    new_values, old_values = values
    _, old = shared.sections
    _, old_indices = shared.indices
    return new_values, old_values, tuple(old.ids[i] for i in old_indices or ())


def _contrast_row(
    rule: Rule,
    name: Key,
    old: RuleValues,
    new: RuleValues,
    ids: tuple[str, ...],
    tol: float,
    *,
    lenient: bool,
) -> Contrast:
    """Return the old and new value of one row or per-sample column, with a test if possible.

    There are three cases:

    * Both reports have the value of this row or column for every sample: `sample_values` has them
      by its name, and their changes are tested.
    * The figure is a statistic over all rows, such as the median norm of all heads. Its name is ""
      and `sample_values` has the values of each row. From these the statistic is computed for
      every sample, and its change gets the sign test.
    * Otherwise there are only two figures, which are compared without a test.

    Args:
        rule: the rule.
        name: the row or column.
        old: the values of the baseline.
        new: the values of the current report on the same samples.
        ids: the ids of the samples; empty if the values do not belong to samples.
        tol: relative accuracy of norms; smaller changes count as no change.
        lenient: True for a comparison, False for a gate.
    """
    # Both reports have the value of every sample of this row or column.
    paired = name in old.sample_values and name in new.sample_values
    old_figure = _read_figure(rule, name, old, paired)
    new_figure = _read_figure(rule, name, new, paired)
    # The values to compare: those of the samples, (samples,), else only the figure.
    before = old.sample_values[name] if paired else np.array([old_figure])
    now = new.sample_values[name] if paired else np.array([new_figure])
    same = _are_same(rule, before, now, tol)
    untested = Contrast(str(name), old=old_figure, new=new_figure, same=same)
    worse = _compute_change(rule, before, now)  # positive is worse
    if paired:
        evidence = _test_change(rule, before, now, worse)
    else:
        # The statistic over all rows of each sample; None if the rule judges each row by itself,
        # or no row has values per sample.
        reduced = _reduce_rows(rule, old, new, lenient=lenient)
        if reduced is None:
            return untested
        before, now = reduced
        worse = _compute_change(rule, before, now)
        evidence = statistics.judge_median(worse)
    # A section without ids may still have values for each sample: then no ids are stored.
    tested_ids = ids if worse.size == len(ids) else ()
    return replace(
        untested, evidence=evidence, before=before, now=now, changes=worse, ids=tested_ids
    )


def _read_figure(rule: Rule, name: Key, values: RuleValues, paired: bool) -> float:
    """Return the value of a row or column that is printed beside the test of its change.

    It is the figure of the report, with one exception. If the rule judges each row by the median
    change of its samples, the median of its samples is printed, which agrees with the tested
    change. (Rows that are means have another test and keep their figure.)

    Args:
        rule: the rule.
        name: the row or column.
        values: the figures, and the values of the samples behind them.
        paired: whether both reports have the values of the samples.
    """
    if paired and rule.stat == "each" and not readings.is_mean(rule):
        return float(np.median(values.sample_values[name]))
    return values.points[name]


def _are_same(rule: Rule, before: Values, now: Values, tol: float) -> bool:
    """Say whether old and new values, (samples,), are equal within their relative accuracy.

    Yes-or-no values of samples must be exactly equal. (In a row such a column is a share.)
    """
    if rule.column in FLAGS and rule.per_sample:
        return bool(np.array_equal(before, now))
    # A margin is a difference of logits: near 0 its rounding error is larger than tol times the
    # margin. So an absolute tolerance (slack) is added.
    # (The largest finite value: a first-order radius may be infinite.)
    slack = ROUNDING * float(np.abs(before[np.isfinite(before)]).max(initial=0.0))
    return bool(np.isclose(now, before, rtol=tol, atol=slack).all())


def _reduce_rows(
    rule: Rule, old: RuleValues, new: RuleValues, *, lenient: bool
) -> tuple[Values, Values] | None:
    """Return the statistic over rows (such as the median norm of heads) for each sample.

    Rows count if their values are finite for every sample in the baseline.

    Args:
        rule: the rule, which has the statistic.
        old: the values of the baseline; `sample_values` has those of every sample, by row.
        new: the values of the current report.
        lenient: True for a comparison, which leaves out rows that are not finite now. A gate
            refuses them.

    Returns:
        The old and the new statistic, (samples,) each. None if no row counts, or if the rule
        judges each row by itself.

    Raises:
        EvaluationError: in a gate, values of such a row are not finite now. Without the row, a
            head that diverged would not count.
    """
    before = []  # (rows, samples)
    now = []
    for row, old_values in old.sample_values.items():
        new_values = new.sample_values.get(row)
        if new_values is None or not np.isfinite(old_values).all():
            continue
        if not np.isfinite(new_values).all():
            if lenient:
                continue
            raise EvaluationError(f"{rule.metric}: values of {row} are not finite now")
        before.append(old_values)
        now.append(new_values)
    if not before or rule.stat == "each":
        return None
    old_figures = reduce_values(rule.stat, np.stack(before), axis=0)
    return old_figures, reduce_values(rule.stat, np.stack(now), axis=0)


def _test_change(rule: Rule, old: Values, new: Values, worse: Values) -> Evidence:
    """Return the test of "no worse" for the change of one figure (see docs/guide/gate.md).

    A share of yes-or-no values is tested by McNemar's exact test. A maximum over samples is
    refused. Medians are tested by the sign test. Means and 95th percentiles are tested by random
    exchanges of old and new values, with bootstrap limits.

    Args:
        rule: the rule, whose statistic and limit choose the test.
        old: values of the baseline, (samples,).
        new: current values of the same samples, (samples,).
        worse: change of each sample for the worse, (samples,): a log-ratio for a relative limit.
    """
    # A mean over the samples is a share if all values are 0 or 1.
    if _judges_mean(rule) and np.isin((old, new), (0, 1)).all():
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
    least = statistics.LEAST.get(stat, FEWEST)  # the number of samples that the test needs
    # `each` tests the median of the changes, except for rows that are means over samples: of these
    # the change of the mean is tested. (The median of the changes would be 0 for yes-or-no values
    # that seldom change.)
    if stat == "each" and readings.is_mean(rule) and rule.limit.kind == "difference":
        stat = "mean"
        least = statistics.LEAST["share"]
    if stat in ("median", "each"):
        return statistics.judge_median(worse)

    def compute_changes(before: Values, now: Values) -> Values:
        # Return the change of the statistic (`stat`, such as the mean) in each draw of samples,
        # (draws,). Both arguments are values of one report, (draws, samples).
        old_figures = reduce_values(stat, before, axis=1)
        new_figures = reduce_values(stat, now, axis=1)
        return _compute_change(rule, old_figures, new_figures)

    return statistics.judge_by_bootstrap(old, new, change=compute_changes, least=least)


def _judges_mean(rule: Rule) -> bool:
    """Return whether a rule judges plain means over samples (not over their tokens).

    It does by its statistic, or because it judges the rows of a table (`each`) whose cells are
    means over samples.
    """
    if rule.stat != "each":
        return rule.stat == "mean"
    # `rule.about` describes the column; `reduction` says how a cell is computed from samples. A
    # plain mean has no weights and no divisor: of the array with the column's name, or of the
    # right predictions (RIGHT, the accuracy without attack).
    means = (Reduction(stat="mean", values=rule.column), readings.RIGHT)
    return rule.about.reduction in means


def _compute_change(rule: Rule, old: Values, new: Values) -> Values:
    """Return changes, positive for the worse: log(new / old) for a relative limit, else new - old.

    The sign is reversed if smaller values are worse (`rule.worse` is -1).

    Raises:
        UsageError: the limit is relative, and a figure is negative.
    """
    relative = rule.limit.kind == "relative"
    if relative and (np.append(old, new) < 0).any():
        raise UsageError(
            f"{rule.text!r}: a figure that can be negative has no relative change",
            "Use an absolute change, such as >= -0.1.",
        )
    # Equal values have the change 0, even if both are infinite, or 0 and without a logarithm.
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.log(new) - np.log(old) if relative else new - old
    return rule.worse * np.where(new == old, 0.0, change)


def compute_margin(rule: Rule) -> float:
    """Return the largest change for the worse that a rule allows: a log-ratio for relative limits.

    For example log(1.05) for `norm <= +5%`, and 0.02 for `accuracy >= -2pp`. The margin is
    negative if the rule demands an improvement.
    """
    change = float(rule.limit.value)  # 0.05 for +5%
    if rule.limit.kind == "relative":
        change = math.log1p(change)
    return round(rule.worse * change, DIGITS)  # `worse` is -1 if smaller values are worse
