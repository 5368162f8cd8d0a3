"""Several reports beside each other: what changed from the first one.

Figures are compared sample by sample, with the verdicts of `judging`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError, UsageError, list_first
from lipaudit.gate import conditions, pairing, readings, statistics
from lipaudit.gate.contrasts import TOLERANCE, Contrast, ContrastKey, examine
from lipaudit.gate.judging import judge_change
from lipaudit.gate.movement import describe_movement
from lipaudit.gate.rules import EACH, Op, Rule, no_change
from lipaudit.gate.statistics import ALPHA, Movement
from lipaudit.gate.verdicts import Verdict
from lipaudit.measures import find_headline
from lipaudit.tables import Report, Section, model_labels
from lipaudit.tables.columns import Float, Frozen, order
from lipaudit.tables.trials import FLAGS, TrialKey, parse_column


class HeadChange(Verdict):
    """The verdict on the change of one head, with 95% limits for this head alone.

    `p_adjusted` is the p-value of "it has not changed beyond the accuracy of norms" (two-sided
    sign test), over all heads of the column together.

    Attributes:
        layer: layer of the head.
        head: number of the head in the layer.
    """

    layer: int
    head: int

    @property
    def stands(self) -> bool:
        """Return whether the change is proven after the correction over all heads (at 5%)."""
        return self.p_adjusted is not None and self.p_adjusted <= ALPHA


class SampleChange(Frozen):
    """One sample in both reports.

    Attributes:
        id: its id.
        place: its place in the data; empty if unknown.
        figures: its figures in both reports, by metric (`jacobian.norm`); yes is 1 and no is 0.
        lost: the metrics that changed from yes to no.
        gained: the metrics that changed from no to yes.
    """

    id: str
    place: str
    figures: dict[str, tuple[Float, Float]]
    lost: tuple[str, ...] = ()
    gained: tuple[str, ...] = ()


class Pair(Frozen):
    """The comparison of one model with the first.

    Attributes:
        old: name of the first model.
        new: name of the other.
        verdicts: one per metric: improved, regressed, unchanged, not comparable, or inconclusive
            (its 95% interval contains 0). A column of rows is judged by its median over the rows,
            sample by sample; without values per sample it is compared without an interval.
        heads: changes of heads, column by column.
        groups: the changes of groups of samples, figure by figure, the worst group first;
            `p_adjusted` is the two-sided p-value over all groups of the figure (Holm).
        predictions: how the predictions moved; None if a report has none.
        samples: the shared samples, those with the most losses first, the most gains last.
        warnings: differences that invalidate the comparison: other data, samples or settings.
        notes: other differences.
    """

    old: str
    new: str
    verdicts: tuple[Verdict, ...]
    heads: tuple[HeadChange, ...]
    groups: tuple[Verdict, ...] = ()
    predictions: Movement | None = None
    samples: tuple[SampleChange, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


class Comparison(Frozen):
    """The result of `lipaudit compare`.

    Attributes:
        models: names of the models in the order given.
        pairs: every further model, compared with the first.
    """

    models: tuple[str, ...]
    pairs: tuple[Pair, ...]


MAPPED = {"bounds": ("exact", "sharp"), "attention": ("softmax_norm", "intermediate")}
"""Columns compared head by head. In other sections: all columns with a better direction."""
OF_HEADS_ALONE = frozenset({"jacobian.shares.carried"})
"""Columns compared head by head alone: what one head carries less, another may carry more."""
STILL = 0.01
"""Heads of which half of the samples change by less than 1% hardly move."""
LISTED = 6
"""Number of left-out rows that a note names."""
REPEAT = "Measure with the baseline's settings: lipaudit gate MODEL --baseline FILE."
UNFINISHED = "Finish the run (same command with --resume)."


def compare(reports: Sequence[Report]) -> Comparison:
    """Compare every report with the first one on their shared samples.

    Intervals hold for each metric alone: a comparison explores, the gate decides.

    Raises:
        UsageError: there are fewer than two reports.
        BaselineError: the reports have nothing in common.
    """
    if len(reports) < 2:
        raise UsageError("compare needs at least two reports", "lipaudit compare A.json B.json")
    names = model_labels(reports)
    # `by_place` has a note for each model whose samples have other ids: they are matched by their
    # place in the data.
    matched, by_place = pairing.match_samples(reports, names)
    first, *others = matched
    pairs = tuple(
        _compare_with_first(first, report, names=(names[0], name), by_place=by_place.get(name, ""))
        for name, report in zip(names[1:], others, strict=True)
    )
    reasons = [verdict.reason for pair in pairs for verdict in pair.verdicts]
    # Only a verdict on figures that cannot be compared has a reason. If every verdict has one, or
    # if there is no verdict, nothing was compared.
    if all(reasons):
        reason = next(iter(reasons), "they have no common section")
        advice = REPEAT
        if any(report.status != "complete" for report in reports):
            advice = UNFINISHED
        raise BaselineError(f"the reports cannot be compared: {reason}", advice)
    return Comparison(models=tuple(names), pairs=pairs)


Judged = tuple[Rule, Contrast]
"""A rule that allows no change, and the old and new values that it judges."""


@dataclass
class Changes:
    """Everything that changed between two reports, in the order in which it is found.

    Attributes:
        verdicts: one per figure.
        heads: the changes of heads.
        groups: the changes of groups of samples.
        sampled: the rules and contrasts of figures that every sample has.
        unpaired: sections and figures that one report alone has, and whether it is the second.
        left_out: texts that say which rows and samples are not compared.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    heads: list[HeadChange] = field(default_factory=list)
    groups: list[Verdict] = field(default_factory=list)
    sampled: list[Judged] = field(default_factory=list)
    unpaired: list[tuple[str, bool]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def _compare_with_first(old: Report, new: Report, names: tuple[str, str], by_place: str) -> Pair:
    """Return the comparison of a report with the first one: verdicts, samples and warnings.

    Args:
        old: the first report.
        new: the report to compare with the first one.
        names: the names of the old and the new model.
        by_place: a warning that samples are matched by their place in the data; empty if they are
            matched by their ids.
    """
    # Differences between the two runs: the kind (`dtype`, `seed`) and a text. The kinds in
    # SPOILING change the figures of the same model, so they become warnings. All other kinds
    # become notes.
    differences = conditions.list_differences(new, old)
    warnings = [text for kind, text in differences if kind in conditions.SPOILING]
    if by_place:
        warnings.append(by_place)
    if conditions.has_same_weights(new, old):
        warnings.append("both reports are of the same weights")
    changes = _find_changes(old, new)
    warnings += changes.left_out
    notes = []
    for name, is_new in sorted(changes.unpaired):
        owner = names[is_new]  # False is 0, the old model; True is 1, the new one
        notes.append(f"not compared, because only {owner} has it: {name}")
    notes += (text for kind, text in differences if kind not in conditions.SPOILING)
    return Pair(
        old=names[0],
        new=names[1],
        verdicts=tuple(changes.verdicts),
        heads=tuple(changes.heads),
        groups=tuple(changes.groups),
        predictions=describe_movement(new, old),
        samples=_list_samples(changes.sampled, old.places | new.places),
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def _find_changes(old: Report, new: Report) -> Changes:
    """Compare the sections that two reports share, and list those that only one report has."""
    before = _index_sections(old)
    after = _index_sections(new)
    changes = Changes()
    for measure in before.keys() ^ after.keys():
        changes.unpaired.append((measure, measure in after))
    for measure, section in before.items():
        if measure in after:
            changes.left_out += _describe_left_out(section, after[measure])
            _compare_sections(old, new, section, after[measure], changes)
    return changes


def _compare_sections(
    old: Report, new: Report, before: Section, after: Section, changes: Changes
) -> None:
    """Add to `changes` the verdict on every column of a section, and the changes of its heads.

    A column that only one report has is added to `changes.unpaired`.

    Args:
        old: the first report.
        new: the report to compare with the first one.
        before: a section of the first report.
        after: the section of the same measure in the new report.
        changes: the changes found so far.
    """
    has_heads = {"layer", "head"} <= after.columns.keys()
    for name in _list_columns(before, after):
        metric = f"{before.measure}.{name}"
        old_figures = _list_figures(before, name)
        new_figures = _list_figures(after, name)
        if not (old_figures and new_figures):
            if old_figures or new_figures:
                changes.unpaired.append((metric, bool(new_figures)))
            continue
        # The figures decide the unit of a change: no percentage if a figure is negative.
        figures = old_figures + new_figures
        for stat in _choose_statistics(before, after, name):
            rule = no_change(f"{metric}:{stat}", figures, sections=(before, after))
            _compare_figure(rule, old, new, changes)
        # MAPPED names the columns to compare head by head; for other measures every column is.
        if has_heads and name in MAPPED.get(before.measure, (name,)):
            rule = no_change(f"{metric}:each", figures, sections=(before, after))
            # The old and new value of each head; or a verdict with the reason why the two reports
            # cannot be compared. `lenient`: rows and samples that did not converge are left out.
            examined = examine(rule, new, old, lenient=True)
            if not isinstance(examined, Verdict):
                changes.heads += _judge_heads(rule, examined, after)
            elif metric in OF_HEADS_ALONE:
                # The column has no other verdict: report why the heads cannot be compared.
                changes.verdicts.append(examined)


def _choose_statistics(before: Section, after: Section, name: str) -> list[str]:
    """Return the statistics by which a column is compared.

    A per-sample column is compared by statistics over the samples: the mean (a share) for FLAGS,
    the yes-or-no columns such as `correct`, else the median and the 95th percentile. A column of
    heads is compared by a statistic over the heads, and other rows one by one (`each`).
    """
    metric = f"{after.measure}.{name}"
    # The norm that one head carries may move to another head: a statistic over all heads says
    # little. So such columns are compared head by head only.
    if metric in OF_HEADS_ALONE:
        return []
    if name in before.sample_columns:
        return ["mean"] if name in FLAGS else ["median", "p95"]
    if "layer" not in after.columns:  # other rows than heads are few: each row is compared
        return ["each"]
    # The same statistic as on the scorecard, if the scorecard shows this column.
    headline = find_headline(metric)
    return [headline.over_heads if headline else "median"]


def _compare_figure(rule: Rule, old: Report, new: Report, changes: Changes) -> None:
    """Add the verdict on a figure to `changes`; for per-sample figures also samples and groups.

    Args:
        rule: names the figure: a column and a statistic.
        old: the first report.
        new: the report to compare with the first one.
        changes: the changes found so far.
    """
    examined = examine(rule, new, old, lenient=True)
    if isinstance(examined, Verdict):  # the reason why the reports cannot be compared
        changes.verdicts.append(examined)
        return
    # Each contrast has an old and a new value, and the test of their change.
    changes.verdicts += (judge_change(rule, contrast) for contrast in examined)
    # The median and p95 of a column have the same samples: they are added once, for the median.
    if rule.per_sample and rule.stat != "p95":
        changes.sampled += ((rule, contrast) for contrast in examined)
        changes.groups += _judge_groups(rule, old, new)


def _index_sections(report: Report) -> dict[str, Section]:
    """Return the sections that did not fail, by measure."""
    return {section.measure: section for section in report.sections if section.failure is None}


def _list_columns(before: Section, after: Section) -> Iterator[str]:
    """Yield the columns to compare, per-sample columns first.

    These are the columns with a better direction, and `correct`, whose mean is the accuracy.
    """
    sampled = before.sample_columns
    for name, column in sampled.items():
        if column.better or name == "correct":
            yield name
    for name, column in (before.columns | after.columns).items():
        if column.better and name not in sampled:
            yield name


def _list_figures(section: Section, name: str) -> list[float]:
    """Return all numbers of a column of a section: one for each sample, else one for each row."""
    cells = list[Any]()
    if name in section.sample_columns:
        # One column for each attack and ball, such as `robust@pgd,linf,2/255`.
        for column, values in section.samples.items():
            if parse_column(column)[0] == name:
                cells += values
    else:
        # A row with a layer (a head) always counts: no per-sample column has its figure. Another
        # row, such as that of an attack, is in most sections only a statistic of the per-sample
        # columns, which are compared in its place. It counts if the section has no such columns,
        # or if an array has the values of the samples behind this column.
        all_rows_count = not section.sample_columns or name in section.arrays
        cells += (row.get(name) for row in section.rows if all_rows_count or "layer" in row)
    return [float(cell) for cell in cells if isinstance(cell, int | float)]


def _describe_left_out(before: Section, after: Section) -> Iterator[str]:
    """Yield texts that say which rows and samples of two sections are not compared."""
    measure = before.measure
    # Rows and samples that did not converge in one of the sections: norms may be far too low.
    rows, samples = readings.find_unconverged((before, after))
    which = []
    if samples:
        which.append(f"{len(samples)} of {len(before.ids)} samples")
    if rows:
        names = sorted(map(str, rows))
        which.append(", ".join(list_first(names, LISTED)))
    if which:
        yield f"left out, because not converged in one report: {' and '.join(which)} of {measure}"
    old = set(before.ids)
    new = set(after.ids)
    shared = old & new
    if shared and old != new:
        yield (
            f"compared over the {len(shared)} shared samples (of {len(old)} and {len(new)}): "
            f"{measure}"
        )


def _judge_groups(rule: Rule, old: Report, new: Report) -> Iterator[Verdict]:
    """Yield the verdict on the change of a figure in each group of samples.

    Nothing is yielded unless both reports have groups. `p_adjusted` of a verdict is the two-sided
    p-value of "this group has not changed": twice the smaller of the one-sided p-values of "no
    worse" and "no better". Holm's procedure corrects it for the number of groups.

    Args:
        rule: names the figure. The rule allows no change, so that every change has a verdict.
        old: the first report.
        new: the report to compare with the first one.
    """
    if not (old.groups and new.groups):
        return
    rule = replace(rule, group=EACH)
    # The text of the rule is printed beside each verdict: here it is the metric with
    # "@group=each", for example `attack.robust@group=each:mean`.
    rule = replace(rule, text=rule.metric)
    examined = examine(rule, new, old, lenient=True)
    if isinstance(examined, Verdict):  # the reason why the groups cannot be compared
        yield examined
        return
    # `examined` has a contrast for each group: the old and new values, and their test as
    # `evidence`. The test is one-sided (worse). The rule with the opposite operator tests the
    # other side (better).
    other_way: Op = "<=" if rule.op == ">=" else ">="
    opposite = examine(replace(rule, op=other_way), new, old, lenient=True)
    assert not isinstance(opposite, Verdict)
    # By group, the smaller of the two one-sided p-values, at most 1/2.
    smaller = dict[ContrastKey, float]()
    for contrast in (*examined, *opposite):
        evidence = contrast.evidence
        # A group with fewer samples than the test needs can prove nothing. It gets no p-value and
        # does not count in the correction for the number of groups.
        if evidence is not None and evidence.has_enough_samples:
            # p(0.0) is the p-value of "the change for the worse is at most 0".
            smaller[contrast.key] = min(smaller.get(contrast.key, 0.5), evidence.p(0.0))
    corrected = statistics.correct_by_holm({key: 2 * p for key, p in smaller.items()})
    for contrast in examined:
        adjusted, _ = corrected.get(contrast.key, (None, 0))
        yield judge_change(rule, contrast).model_copy(update={"p_adjusted": adjusted})


def _judge_heads(
    rule: Rule, contrasts: Sequence[Contrast], section: Section
) -> Iterator[HeadChange]:
    """Yield the change of every attention head in a column.

    `p_adjusted` of a change is the p-value of "this head has not changed": a two-sided sign test
    over the samples. It is corrected for the number of heads by randomly flipping the signs of the
    changes.

    Args:
        rule: names the column. The rule allows no change of any head.
        contrasts: the old and new value of each head, and their test if they have one.
        section: the section of the heads in the new report.
    """
    tested = [contrast for contrast in contrasts if contrast.evidence is not None]
    adjusted = {}
    if tested:
        changes = np.stack([contrast.changes for contrast in tested])  # (heads, samples)
        # Two corrections: over all heads that change at all (TOLERANCE), and over the heads with a
        # median change above 1% (STILL). The first alone would not prove a large change of one
        # head among many tiny changes. Each correction has half of the level (Bonferroni): so the
        # smaller p-value is doubled.
        p_of_all = statistics.correct_jointly(changes, quiet=TOLERANCE, both_sides=True)
        p_of_large = statistics.correct_jointly(changes, quiet=STILL, both_sides=True)
        p_values = np.minimum(1.0, 2 * np.minimum(p_of_all, p_of_large))
        for contrast, p in zip(tested, p_values, strict=True):
            adjusted[contrast.name] = float(p)
    rows = readings.index_rows(section)
    for contrast in contrasts:
        name = contrast.name
        fields = dict(judge_change(rule, contrast)) | {"p_adjusted": adjusted.get(name)}
        yield HeadChange(**fields, layer=rows[name]["layer"], head=rows[name]["head"])


def _list_samples(
    contrasts: Sequence[Judged], places: Mapping[str, str]
) -> tuple[SampleChange, ...]:
    """Return every sample of both reports with its old and new figures, most losses first.

    Some metrics are yes-or-no: a sample is right, robust or certified. A sample loses such a
    metric if the value changes from yes to no, and gains the metric if it changes from no to yes.

    Args:
        contrasts: for each per-sample column, the rule and the old and new values.
        places: the place of each sample in the data, by id.
    """
    figures, signs = _pair_figures(contrasts)
    samples = []
    for sample, of_sample in figures.items():
        lost = []
        gained = []
        for name, (old, new) in of_sample.items():
            worse = signs.get(name, 0) * (new - old)  # 0 for a norm, which is not yes-or-no
            if worse > 0:
                lost.append(name)
            elif worse < 0:
                gained.append(name)
        change = SampleChange(
            id=sample,
            place=places.get(sample, ""),
            figures=of_sample,
            lost=tuple(lost),
            gained=tuple(gained),
        )
        samples.append(change)
    return tuple(sorted(samples, key=_rank_sample))


# Old and new figure of a sample by metric, such as `attack.robust@worst,linf,2/255`.
_Figures = dict[str, tuple[float, float]]


def _pair_figures(
    contrasts: Sequence[Judged],
) -> tuple[dict[str, _Figures], dict[str, int]]:
    """Return the old and new figures of each sample, and the direction of yes-or-no metrics.

    Args:
        contrasts: for each per-sample column, the rule and the old and new values.

    Returns:
        The pair (old, new) by id of the sample and then by metric; and for each yes-or-no metric
        the sign of a change for the worse: -1 if no is worse, as for `robust`.
    """
    figures: dict[str, _Figures] = {}
    signs = {}
    first_measures: dict[tuple[str, str], str] = {}
    for rule, contrast in contrasts:
        name = f"{rule.measure}.{rule.column}"
        if contrast.name:
            name += f"@{contrast.name}"
        if rule.column in FLAGS:
            trial = TrialKey.parse(contrast.name)  # attack and ball, such as `pgd,linf,2/255`
            ball = trial.ball if trial else ""
            # Several measures may have the same yes-or-no column for the same ball, such as
            # `correct`. Only the first of these measures is used, with all its attacks.
            first_measure = first_measures.setdefault((rule.column, ball), rule.measure)
            if rule.measure != first_measure:
                continue
            signs[name] = rule.worse
        # strict=False: if the samples have no ids, the values are of no use here.
        for sample, before, now in zip(contrast.ids, contrast.before, contrast.now, strict=False):
            figures.setdefault(sample, {})[name] = (float(before), float(now))
    return figures, signs


def _rank_sample(change: SampleChange) -> tuple[int, float]:
    """Return the sort key of a sample: most losses net of gains first, then the largest new norm.

    Losses and gains are yes-or-no metrics (right, robust) that changed to no, or to yes. The norm
    is that of the Jacobian.
    """
    balance = len(change.gained) - len(change.lost)
    if "jacobian.norm" not in change.figures:  # samples without a norm come last
        return balance, math.inf
    _, norm = change.figures["jacobian.norm"]
    return balance, -order(norm)  # `order` returns the norm, and -inf for NaN: it comes last
