"""The values that a section holds for a rule: of its rows, its columns and its samples.

Values are refused if they are not finite, did not converge, or contradict their samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lipaudit.errors import BaselineError, EvaluationError, UsageError, suggestion
from lipaudit.gate.rules import RADIUS, Rule
from lipaudit.gate.statistics import Values
from lipaudit.tables import Reduction, Report, Row, Section, trials
from lipaudit.tables.columns import list_keys, reduce_values
from lipaudit.tables.formats import format_count
from lipaudit.tables.trials import WORST, TrialKey

Key = TrialKey | str
"""The name of a row or a per-sample column; trials are equal in any notation of their radius."""
RIGHT = Reduction("mean", "correct")
"""Share of samples that are right, which a row has but no array."""
AGREEMENT = 1e-4
"""Relative error between a row and its samples, which are stored with six digits."""
_NAMES = ("layer", "head", "part", "from", "to", "mode", "n", "r", "module")


@dataclass(frozen=True)
class RuleValues:
    """The values that one report holds for one rule.

    Attributes:
        names: names of the rows or columns.
        points: the value to judge, by row or column; one value, named "", for a statistic over
            rows.
        sample_values: the values per sample behind each point, (samples,), if stored; for a
            statistic over rows, those behind each row.
    """

    names: tuple[Key, ...]
    points: Mapping[Key, float]
    sample_values: Mapping[Key, Values]


def require_section(rule: Rule, report: Report, what: str) -> Section:
    """Return the section of a report that a rule reads.

    Raises:
        BaselineError: the report has no such section; the message calls the report `what`.
    """
    section = report.section(rule.measure)
    if section is None:
        raise BaselineError(f"{what} has no section {rule.measure}")
    return section


def read(
    rule: Rule,
    section: Section,
    samples: Sequence[int] | None = None,
    *,
    recompute: bool = False,
    skipped: Collection[Key] = (),
) -> RuleValues:
    """Return the values of a rule in a section: figures by row or column, and values per sample.

    Rows with an empty cell were not measured and are left out.

    Args:
        rule: the rule.
        section: the section.
        samples: indices of the samples to use; None: all, repeated samples once.
        recompute: whether to compute rows again from these samples: a stored row is a statistic of
            all samples.
        skipped: names of rows to leave out.

    Raises:
        UsageError: the rule matches nothing.
        BaselineError: the rows cannot be computed again.
    """
    if samples is None:
        samples = _list_distinct(section)
    indices = list(samples)
    if rule.per_sample:
        reading = select(rule, _read_columns(rule, section), indices)
    else:
        reading = _read_rows(rule, section, indices, recompute=recompute, skipped=skipped)
    if not reading.names:
        raise UsageError(
            f"{rule.text!r} matches nothing in section {section.measure}",
            _describe_choice(rule, section),
        )
    return reading


def _list_distinct(section: Section) -> list[int]:
    """Return the indices of the samples; a sample that is repeated in the data counts once."""
    return [i for i, name in enumerate(section.ids) if not trials.is_repeat(name)]


def select(rule: Rule, columns: Mapping[Key, Values], indices: list[int]) -> RuleValues:
    """Return the values of a per-sample rule on the samples at these indices.

    Args:
        rule: the rule, whose statistic makes a figure of the values of a column.
        columns: the values of all samples in each column, (samples,).
        indices: indices of samples. Without any, the figures are NaN.
    """
    selected = {key: values[indices] for key, values in columns.items()}
    points = dict.fromkeys(selected, math.nan)  # the figure of each column
    if indices:
        points = {key: float(reduce_values(rule.stat, values)) for key, values in selected.items()}
    return RuleValues(tuple(selected), points, selected)


def _read_rows(
    rule: Rule, section: Section, indices: list[int], *, recompute: bool, skipped: Collection[Key]
) -> RuleValues:
    """Return the values of a rule on the rows of a section: figures, and values per sample.

    With `each`, a rule on rows has a figure for each row. Otherwise it has a single figure, a
    statistic over the rows.

    Args:
        rule: a rule on rows.
        section: the section of the rows.
        indices: indices of the samples to use.
        recompute: whether to compute rows again from these samples.
        skipped: names of rows to leave out.
    """
    rows = index_rows(section)
    points = _read_figures(rule, section, rows, skipped)
    sample_values = _read_sample_values(rule, section, indices, rows, points)
    if recompute and points and _must_recompute(rule, sample_values):
        reduced = dict(zip(rows, _reduce_samples(rule, section, indices), strict=True))
        points = {key: reduced[key] for key in points}
    names = tuple(points)
    if names and rule.stat != "each":
        points = {"": float(reduce_values(rule.stat, list(points.values())))}
    return RuleValues(names, points, sample_values)


def _must_recompute(rule: Rule, sample_values: Mapping[Key, Values]) -> bool:
    """Return whether the figures of rows must be computed again for other samples.

    They must, with one exception: a rule on `each` row, a column that does not say which statistic
    over samples its cells are (`reduction`), and stored values of every sample. Then these values
    are tested sample by sample, and the median of the chosen samples is shown.

    Args:
        rule: a rule on rows.
        sample_values: the stored values of the samples behind each row.
    """
    is_tested = rule.stat == "each" and rule.about.reduction is None and sample_values
    return not is_tested


def _read_figures(
    rule: Rule, section: Section, rows: Mapping[Key, Row], skipped: Collection[Key]
) -> dict[Key, float]:
    """Return the value that a rule reads in each row, by the name of the row.

    The selector of the rule picks the rows: `linf,2/255`, `layer=3,head=1`. A selector without an
    attack picks the worst case over all attacks. A row with an empty cell was not measured and is
    left out.

    Args:
        rule: names the column, and has the words of the selector; a row must match all words.
        section: the section of the rows.
        rows: the rows by name.
        skipped: names of rows to leave out, because they did not converge.
    """
    matching = []
    for key, row in rows.items():
        matches = all(_matches(row, word, section) for word in rule.selector)
        if key not in skipped and matches:
            matching.append(key)
    points = {}
    for key in _choose_worst(matching, rule.selector):
        cell = rows[key].get(rule.column)
        if cell is not None:
            points[key] = float(cell)
    return points


def _read_sample_values(
    rule: Rule,
    section: Section,
    indices: list[int],
    rows: Collection[Key],
    points: Mapping[Key, float],
) -> dict[Key, Values]:
    """Return the stored values of all samples behind each row, (samples,) each; empty if none.

    Args:
        rule: the rule that reads the rows.
        section: the section of the rows.
        indices: indices of the samples to read.
        rows: the names of all rows, in the order of the section.
        points: the rows that the rule picks, with their figures.
    """
    # The array with the name of the column has the values of all rows, (rows, samples). An array
    # of another shape has other values.
    stored = section.arrays.get(rule.column)
    if stored is not None and stored.shape == (len(rows), len(section.ids)):
        of_rows = {}
        for key, values in zip(rows, stored.numpy()[:, indices], strict=True):
            # A mean over some tokens is NaN for a sample without such tokens. Then the row cannot
            # be tested sample by sample: its values are left out.
            complete = not is_mean(rule) or np.isfinite(values).all()
            if key in points and complete:
                of_rows[key] = values
        return of_rows
    # RIGHT is the accuracy without attack: all rows of attacks have the same values per sample.
    if rule.stat == "each" and rule.about.reduction == RIGHT and section.samples:
        flags = np.array(section.samples["correct"], dtype=float)
        return dict.fromkeys(points, flags[indices])
    return {}


def _describe_choice(rule: Rule, section: Section) -> str:
    """Return the hint for a rule that matches nothing: the columns or rows that exist.

    If the run left results out, the hint begins with the reason.
    """
    kind = "Columns"
    # Of `robust@pgd,linf,2/255`, the first part `robust` is the column.
    names = [name for name in section.samples if trials.parse_column(name)[0] == rule.column]
    if not names:
        kind = "Rows"
        names = [*map(str, index_rows(section))]
    advice = f"{kind}: {'; '.join(names[:8]) or 'none'}."
    reasons = [note.text for note in section.notes if note.code == "left-out"]
    # In the section `attack`, only calibration errors (ece) are left out: for other columns these
    # reasons would mislead.
    if reasons and (section.measure != "attack" or rule.column.startswith("ece")):
        advice = f"Left out: {'; '.join(reasons)}. {advice}"
    return advice


def find_fault(report: Report, section: Section, *, lenient: bool = False) -> str:
    """Return why the figures of a section are not reliable, or "".

    Reasons are a failed measure, an incomplete run, no samples, or values that did not converge.

    Args:
        report: the report.
        section: the section of the report.
        lenient: True for a comparison: other sections may have failed, and rows and samples that
            did not converge are accepted, because the caller leaves them out.
    """
    if section.failure is not None:
        return f"{section.measure} failed: {section.failure.reason}"
    if report.failures and not lenient:
        return f"the report is partial: {', '.join(report.failures)} failed"
    if report.unmeasured:
        return "the report is partial: the time limit ended its run"
    if report.status != "complete" and not report.failures:
        return "the report is partial: its run was cut short"
    if section.samples.get("ids") == () or not (section.rows or section.samples):
        return f"section {section.measure} has no samples"
    if lenient:
        return ""
    rows, samples = find_unconverged([section])
    if samples:
        return f"{section.measure}: {format_count(len(samples))} did not converge"
    if rows:
        return f"{section.measure}: {format_count(len(rows), 'row')} did not converge"
    return ""


def read_trusted(
    rule: Rule, report: Report, section: Section, *, lenient: bool = False
) -> RuleValues:
    """Return the values of a rule in a section of a report; refuse unreliable values.

    Raises:
        EvaluationError: the values are not complete, finite and converged.
        UsageError: the rule matches nothing.
    """
    fault = find_fault(report, section, lenient=lenient) or find_contradiction(
        section, rule.column
    )
    if fault:
        raise EvaluationError(fault)
    reading = read(rule, section)
    if not lenient:
        require_finite(rule, reading)
    return reading


def require_finite(rule: Rule, reading: RuleValues) -> None:
    """Refuse values that are not finite.

    Raises:
        EvaluationError: a value is NaN or infinite. The message counts such values of the first
            row or column that has any.
    """
    # The first-order radius is margin / gradient norm. It may be infinite, as the norm may be 0:
    # only NaN is bad there.
    is_bad = np.isnan if rule.column == RADIUS.column else lambda values: ~np.isfinite(values)
    for name, point in reading.points.items():
        # The values of the samples behind the figure, if stored. The figure itself is checked,
        # too: it may be bad although the values are not.
        of_samples = reading.sample_values.get(name, np.array([point]))
        bad = max(int(is_bad(of_samples).sum()), int(is_bad(np.array(point))))
        if bad == 1:
            raise EvaluationError(f"{rule.metric}: 1 value is not finite")
        if bad:
            raise EvaluationError(f"{rule.metric}: {bad} values are not finite")


def find_contradiction(section: Section, column: str) -> str:
    """Return a text if a figure of a row differs from the statistic over its samples, else "".

    For example, a row has the median norm 3, and the norms of the samples have the median 4. Such
    a report was edited or is damaged.

    Args:
        section: the section.
        column: the column of the figures, or the per-sample column behind them.
    """
    distinct = _list_distinct(section)
    for name, about in section.columns.items():
        how = about.reduction  # how a cell is computed from samples
        # Only simple statistics are checked: no ratios (`per`), and no weighted means.
        if how is None or how.per or how.weights in section.arrays:
            continue
        if column not in (name, how.values):
            continue
        for key, cell, values in _list_reduced(section, name, how):
            # Without a figure, or without a value for every sample, there is nothing to compare.
            if cell is None or values.size != len(section.ids):
                continue
            known = values[distinct]
            if np.isnan(known).all():
                continue
            expected = _reduce_known(how.stat, known)
            if not np.isclose(cell, expected, rtol=AGREEMENT, atol=0.0, equal_nan=True):
                where = section.measure
                if str(key):
                    where += f".{name} of {key}"
                return (
                    f"{where} is {cell:.4g}, and its samples give {expected:.4g}: the report "
                    "contradicts itself"
                )
    return ""


def _list_reduced(
    section: Section, name: str, how: Reduction
) -> Iterator[tuple[Key, float | None, Values]]:
    """Yield the rows of a section whose figure can be computed again from stored values.

    Args:
        section: the section of the rows.
        name: the column of the figure.
        how: how the figure is computed: `how.values` is the name of an array (rows, samples) or of
            a per-sample column.

    Yields:
        The name of the row; its figure in the report, such as the median norm of a head; and the
        values that it is computed from, such as the norm of this head on each sample.
    """
    rows = index_rows(section)
    stored = section.arrays.get(how.values)
    if stored is not None:
        if stored.shape == (len(rows), len(section.ids)):
            for (row_name, row), values in zip(rows.items(), stored.numpy(), strict=True):
                yield row_name, row.get(name), values
        return
    for row_name, row in rows.items():
        # A per-sample column belongs to the row of an attack in a ball, or to the only row.
        column = how.values
        if row.key is not None:  # the attack and ball of the row
            column = row.key.column(column)
        elif len(rows) > 1:
            continue
        cells = section.samples.get(column, ())
        # A column of texts has no numbers to compute a statistic from.
        if not any(isinstance(cell, str) for cell in cells):
            yield row_name, row.get(name), read_numbers(cells)


def is_mean(rule: Rule) -> bool:
    """Return whether the rows of a rule are means over samples, or over the tokens of samples."""
    return rule.about.reduction is not None and rule.about.reduction.stat == "mean"


def index_rows(section: Section) -> dict[Key, Row]:
    """Return the rows by their names: `layer 3 head 1`, `apgd-ce,linf,2/255`."""
    rows = {}
    counts = Counter[Key]()
    for row in section.rows:
        name = _name_row(row, section)
        counts[name] += 1
        if counts[name] > 1:
            name = f"{name} #{counts[name]}"
        rows[name] = row
    return rows


def _name_row(row: Row, section: Section) -> Key:
    """Return the name of a row in rules, such as `layer 3 head 1` or `pgd,linf,2/255`.

    It is made of the cells that tell the row from the other rows, by the first of four rules that
    applies: a row of a layer, of an attack in a ball, with other cells of _NAMES, any other row.
    """
    # _NAMES are the columns that name a row: layer, head, from, to, module, ...
    known = {key: row[key] for key in _NAMES if row.get(key) not in (None, "")}
    if "layer" in row:  # `layer 3 head 1`, `layer 0 part MLP`, `layer 0 head 0 mode real n 8`
        # `from` and `to` are equal in all rows of layers, and the number of a layer already says
        # which module it is.
        redundant = ("from", "to", "module")
        return " ".join(f"{key} {cell}" for key, cell in known.items() if key not in redundant)
    if row.key:  # an attack and a ball: `pgd,linf,2/255`
        return row.key
    if known:  # the ends of a Jacobian, or a module: `pixels,logits`, `blocks.0`
        return ",".join(map(str, known.values()))
    # Rows of any other section, as of a plug-in: `clean`, `temperature 1.0`.
    texts = []
    for key in list_keys(section.columns):
        cell = row[key]
        if isinstance(cell, str):
            texts.append(cell)
        elif cell is not None:
            texts.append(f"{key} {cell}")
    return " ".join(filter(None, texts))


def _read_columns(rule: Rule, section: Section) -> dict[Key, Values]:
    """Return the values of the samples in the columns that a rule names, by attack and ball.

    A rule on `robust` names `robust@pgd,linf,2/255` and all other columns `robust@...`: the key of
    each is the attack and ball after the @. The key of a column without @ is "". The selector of
    the rule (`linf,2/255`) leaves the columns of these balls; of several attacks in one ball only
    the worst case, unless the selector names an attack.

    Raises:
        EvaluationError: such a column has texts.
    """
    values = {}
    for name, cells in section.samples.items():
        column, trial = trials.parse_column(name)
        if column == rule.column:
            if any(isinstance(cell, str) for cell in cells):
                raise EvaluationError(f"{section.measure}.{name} holds text")
            values[trial or ""] = read_numbers(cells)
    # The first-order radius of a misclassified sample is 0: it already has another class. This
    # radius depends on no attack, so it has one column, without @.
    if rule.column == RADIUS.column and values:
        radii = values[""]
        wrong = [*_list_wrong(section)]
        radii[np.isin(_name_samples(section, radii.size), wrong)] = 0.0
    # A sample is robust in a ball if no attack inside the ball broke it: the minimum over the
    # attacks. If the report stores this worst case, the stored column is used.
    if rule.column == "robust":
        attacked = [key for key in values if isinstance(key, TrialKey) and key.attack]
        worst: dict[Key, Values] = {
            ball: np.min([values[trial] for trial in inside], axis=0)
            for ball, inside in trials.worst_cases(attacked).items()
        }
        values = worst | values
    chosen = [key for key in values if _matches_all(key, rule.selector)]
    return {key: values[key] for key in _choose_worst(chosen, rule.selector)}


def read_numbers(cells: Iterable[Any]) -> Values:
    """Return a per-sample column as numbers; empty cells are NaN."""
    return np.array([np.nan if cell is None else float(cell) for cell in cells])


def _name_samples(section: Section, count: int) -> Sequence[str]:
    """Return the ids of samples, or their numbers in old reports without ids."""
    return section.ids or [str(i) for i in range(count)]


def _matches_all(key: Key, words: Sequence[str]) -> bool:
    """Return whether a column matches all words of a selector, such as `pgd` and `2/255`.

    Args:
        key: the attack and ball of the column; a text if it has none.
        words: the words.
    """
    if isinstance(key, TrialKey):
        return all(key.matches(word) for word in words)
    return not words  # without attack and ball, a column matches no word


def _choose_worst(keys: Sequence[Key], selector: tuple[str, ...]) -> list[Key]:
    """Return the keys of the worst case over all attacks only, so that no attack counts twice.

    All keys are returned if the selector names an attack, or if there is no worst case, as for
    rows of heads.
    """
    attacks: dict[Key, str] = {key: key.attack for key in keys if isinstance(key, TrialKey)}
    # The words `pgd` and `attack=pgd` both name an attack.
    words = {word.removeprefix("attack=") for word in selector}
    if words.isdisjoint(attacks.values()):
        worst = [key for key in keys if attacks.get(key) == WORST]
        if worst:
            return worst
    return [*keys]


def _matches(row: Row, word: str, section: Section) -> bool:
    """Return whether a word of a selector matches a row.

    A word is `column=value`, the radius or norm of the row's ball, or a text in a cell of the row.

    Raises:
        UsageError: the word names a column that the rows do not have.
    """
    key, equals, value = word.partition("=")
    if row.key and row.key.matches(word):  # the radius or norm of the row's ball
        return True
    if not equals:
        return any(isinstance(cell, str) and cell == word for cell in row.values())
    if key not in row:
        raise UsageError(f"rows of {section.measure} have no column {key!r}", suggestion(key, row))
    cell = row[key]
    if isinstance(cell, float):
        return float(trials.parse_radius(value)) == cell
    return value == str(cell)


def _reduce_samples(rule: Rule, section: Section, indices: list[int]) -> list[float]:
    """Compute the figure of each row again, from some of the samples.

    The accuracy without attack is the share of samples that are right. Any other figure is a
    statistic of the row's values in an array, or their weighted mean.

    Args:
        rule: names the column; its description has the statistic over samples.
        section: the section of the rows.
        indices: indices of the samples.

    Raises:
        BaselineError: the report lacks the values of each sample.
    """
    how = rule.about.reduction  # the statistic over samples, and the array of their values
    metric = f"{rule.measure}.{rule.column}"
    if how == RIGHT and "correct" in section.samples:
        flags = np.array(section.samples["correct"], dtype=float)[indices]
        return [float(flags.mean())] * len(section.rows)
    # The values of the samples, (rows, samples). A ratio (of values `per` other values) has none.
    stored = None
    if how is not None and not how.per:
        stored = section.arrays.get(how.values)
    if how is None or stored is None:
        raise BaselineError(
            f"{metric} is stored only over all samples of a report, and the two reports have "
            "others"
        )
    weights = None
    if how.weights in section.arrays:
        weights = section.arrays[how.weights].numpy()[:, indices]
    cells = []
    for i, values in enumerate(stored.numpy()[:, indices]):
        if weights is None:
            cell = _reduce_known(how.stat, values)
        else:
            cell = _average(values, weights[i])
        # NaN: the row has a figure of all samples, but none of the chosen samples has a value.
        if section.rows[i][rule.column] is not None and math.isnan(cell):
            raise BaselineError(f"{metric}: no shared sample has a value")
        cells.append(cell)
    return cells


def _reduce_known(stat: str, values: Values) -> float:
    """Return a statistic of the values that are not NaN; NaN if all values are NaN."""
    known = values[~np.isnan(values)]
    if not known.size:
        return math.nan
    return float(reduce_values(stat, known))


def _average(values: Values, weights: Values) -> float:
    """Return the weighted mean of the values with a weight > 0; NaN if all weights are 0."""
    weighted = weights > 0
    if not weighted.any():
        return math.nan
    return float((values[weighted] * weights[weighted]).sum() / weights.sum())


def find_unconverged(sections: Iterable[Section], column: str = "") -> tuple[set[Key], set[str]]:
    """Return the names of rows and the ids of samples that did not converge in a section.

    Args:
        sections: the sections.
        column: a per-sample column. Samples without a value in this column are returned, too.
    """
    rows = set()
    samples = set[str]()
    for section in sections:
        for key, row in index_rows(section).items():
            if row.get("converged") is False:
                rows.add(key)
        for name, cells in section.samples.items():  # per-sample columns
            ids = _name_samples(section, len(cells))
            if name == "converged":
                samples |= {ids[i] for i, flag in enumerate(cells) if not flag}
            elif trials.parse_column(name)[0] == column:
                without_value = {
                    ids[i] for i, cell in enumerate(cells) if not isinstance(cell, int | float)
                }
                # A misclassified sample has no stored radius: it counts as 0, which is a value.
                if column == RADIUS.column:
                    without_value -= _list_wrong(section)
                samples |= without_value
    return rows, samples


def _list_wrong(section: Section) -> set[str]:
    """Return the ids of misclassified samples."""
    flags = section.samples.get("correct", ())
    ids = _name_samples(section, len(flags))
    return {ids[i] for i, flag in enumerate(flags) if flag is not None and not flag}
