"""The groups of samples in two reports, and the figures of a report by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lipaudit.errors import BaselineError, LipauditError, join_few
from lipaudit.gate import pairing, readings
from lipaudit.gate.rules import EACH, Rule, no_change
from lipaudit.gate.statistics import Values
from lipaudit.tables import Report, Section
from lipaudit.tables.columns import (
    Float,
    Frozen,
    group_values,
    limit_robust,
    median_limits,
    order,
    wilson,
)
from lipaudit.tables.trials import FLAGS, is_repeat

MEASURE = "Measure it again with --group-column NAME (a column of the table, or classes)."
LISTED = 8
"""Number of groups that a message names."""


def require_groups(report: Report, what: str) -> dict[str, str]:
    """Return the group of each sample of a report, by id.

    Raises:
        BaselineError: the report has no groups.
    """
    if not report.groups:
        raise BaselineError(f"{what} has no groups of samples", MEASURE)
    return report.groups


def find_members(
    rule: Rule,
    current: Report,
    baseline: Report,
    sections: tuple[Section, Section],
    *,
    lenient: bool,
) -> dict[str, frozenset[str]]:
    """Return the ids of the shared samples of each group that a rule judges, by group.

    Shared samples are in both reports. Groups without shared samples are left out.

    Args:
        rule: a rule by group: one group, or each.
        current: the report to judge.
        baseline: the report to compare the current one with.
        sections: the sections of both reports that the rule reads.
        lenient: True for a comparison, False for a gate. A gate refuses groups of which many
            samples are missing in the current report.

    Raises:
        BaselineError: a report has no groups, a sample changed its group, no group has a shared
            sample, or a gate misses samples of a group.
    """
    # The group of each sample, by id.
    new_groups = require_groups(current, "the current report")
    old_groups = require_groups(baseline, "the baseline")
    new, old = sections
    _require_same_groups(new_groups, old_groups)
    old_members = _list_members(old, old_groups)
    new_ids = set(new.ids)
    shared_members = {}
    for group in _choose_groups(rule, old_members):
        in_group = old_members[group]
        shared = in_group & new_ids
        if shared:
            shared_members[group] = shared
        # A gate needs 95% of the baseline's samples of a group (ALL_BUT_FEW). It must not pass
        # because hard samples were left out.
        if not lenient and len(shared) < pairing.ALL_BUT_FEW * len(in_group):
            raise BaselineError(
                f"{rule.measure}: only {len(shared)} of the baseline's {len(in_group)} samples "
                f"of group {group} are in the current report"
            )
    if not shared_members:
        raise BaselineError(f"{rule.measure}: no group has a shared sample")
    return shared_members


def _require_same_groups(now: dict[str, str], then: dict[str, str]) -> None:
    """Refuse reports in which a sample has different groups; groups are given by sample id."""
    moved = [name for name in now.keys() & then.keys() if now[name] != then[name]]
    if moved:
        first = min(moved)
        raise BaselineError(
            f"{len(moved)} samples are in another group than in the baseline "
            f"(sample {first}: {then[first]} became {now[first]})"
        )


def list_own_members(rule: Rule, report: Report, what: str) -> dict[str, frozenset[str]]:
    """Return the ids of the samples of each group that a rule reads in one report, by group.

    Args:
        rule: a rule by group: one group, or each.
        report: the report.
        what: words for the report in messages.

    Raises:
        BaselineError: the report has no such section, no groups, or not the group of the rule.
    """
    section = readings.require_section(rule, report, what)
    members = _list_members(section, require_groups(report, what))
    return {group: members[group] for group in _choose_groups(rule, members)}


def note_new_groups(current: Report, baseline: Report) -> list[str]:
    """Name the groups whose change cannot be judged, because only the current report has them."""
    new = sorted({*current.groups.values()} - {*baseline.groups.values()})
    if not (new and baseline.groups):
        return []
    return [f"the baseline has no such group, so no change is judged: {join_few(new, LISTED)}"]


def _list_members(section: Section, groups: dict[str, str]) -> dict[str, frozenset[str]]:
    """Return the ids of the distinct samples of a section by group.

    Args:
        section: the section of the samples.
        groups: the group of each sample, by id.
    """
    # (group, id of a sample); a repeated sample has another id and is left out.
    pairs = ((groups[i], i) for i in section.ids if i in groups and not is_repeat(i))
    return {group: frozenset(ids) for group, ids in group_values(pairs).items()}


def _choose_groups(rule: Rule, members: dict[str, frozenset[str]]) -> Sequence[str]:
    """Return the groups that a rule names: all groups of a report, or a single one.

    Args:
        rule: a rule by group.
        members: the samples of each group of the report.

    Raises:
        BaselineError: the report has no such group.
    """
    if rule.group == EACH:
        return [*members]
    if rule.group not in members:
        listed = ", ".join([*members][:LISTED])
        raise BaselineError(f"there is no group {rule.group!r}", f"There are: {listed}.")
    return [rule.group]


# Figures of one report


class GroupFigure(Frozen):
    """A figure of the samples of one group.

    Attributes:
        metric: the metric with its statistic: `attack.robust:mean`.
        name: its trial, such as `worst,linf,2/255`; empty if there is only one.
        group: the group.
        samples: number of its distinct samples that have a value.
        value: the figure.
        low: lower 95% limit (Wilson for shares, order statistics for medians); None: too few
            samples, or the figure is an upper limit.
        high: upper 95% limit; the figure itself if it is an upper limit.
    """

    metric: str
    name: str
    group: str
    samples: int
    value: Float
    low: Float | None = None
    high: Float | None = None


def list_group_figures(report: Report) -> Iterator[list[GroupFigure]]:
    """Yield a list of figures for each per-sample metric: one for each group, worst group first.

    The figure of yes-or-no values is their share in the group. The figure of other values is their
    median over the samples of the group.
    """
    groups = report.groups
    if not groups:
        return
    for section in report.sections:
        ids = section.ids
        for column, about in section.sample_columns.items():
            # Columns with a better direction, and `correct`, whose share is the accuracy.
            has_direction = about.better or column == "correct"
            if not has_direction or not ids:
                continue
            stat = "mean" if column in FLAGS else "median"
            # A rule in name only: it has the column and its worse direction (`rule.worse`, the
            # sign of a change for the worse). Its limit, "no change", is not used.
            rule = no_change(f"{section.measure}.{column}:{stat}", sections=[section])
            try:  # the values of the samples, by attack and ball
                reading = readings.read(rule, section, range(len(ids)))
            except LipauditError:  # no sample has a value
                continue
            for trial, values in reading.sample_values.items():
                figures = _summarise_groups(rule, str(trial), ids, values, groups)
                # `order` returns the number, and -inf for NaN, which comes last.
                worst_first = sorted(figures, key=lambda each: -order(rule.worse * each.value))
                if worst_first:
                    yield worst_first


def _summarise_groups(
    rule: Rule, name: str, ids: Sequence[str], values: Values, groups: dict[str, str]
) -> Iterator[GroupFigure]:
    """Yield the figure of each group, a share or a median, with 95% confidence limits.

    Args:
        rule: names the metric and its statistic: `mean` for yes-or-no values, else `median`.
        name: the attack and ball of the values; empty if there is only one column.
        ids: the ids of the samples.
        values: the value of each sample, (samples,).
        groups: the group of each sample, by id.
    """
    # The flag `robust` is NaN if not all attacks ran, and those that did broke nothing: such a
    # sample counts. Any other NaN has no value.
    has_unknown = rule.column == "robust"
    pairs = [
        (groups[sample], value)
        for sample, value in zip(ids, values.tolist(), strict=True)
        if sample in groups and not is_repeat(sample) and (has_unknown or not np.isnan(value))
    ]
    for group, numbers in group_values(pairs).items():
        value, low, high = _summarise_values(numbers, rule)
        yield GroupFigure(
            metric=rule.metric,
            name=name,
            group=group,
            samples=len(numbers),
            value=value,
            low=low,
            high=high,
        )


def _summarise_values(
    values: Sequence[float], rule: Rule
) -> tuple[float, float | None, float | None]:
    """Return the share of yes, or the median, with 95% limits; None: too few values for limits.

    The lower limit alone is None if the share is an upper limit, because attacks are missing.
    """
    if rule.column == "robust":
        return limit_robust(values)
    if rule.stat == "mean":
        yes = sum(values)
        return yes / len(values), *wilson(yes, len(values))
    low, high = median_limits(values) or (None, None)
    return float(np.median(values)), low, high
