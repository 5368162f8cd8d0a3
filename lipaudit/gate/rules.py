"""Rules of the gate, `METRIC[@SELECTOR][:STAT] OP LIMIT`: reading them, and the default ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from lipaudit.errors import UsageError, suggestion
from lipaudit.measures import (
    USUAL,
    find_column,
    find_headline,
    layouts,
    list_headlines,
    load_measures,
)
from lipaudit.tables import Column, Layout, Report, Section
from lipaudit.tables.columns import group_values
from lipaudit.tables.formats import write_math
from lipaudit.tables.plugins import explain_missing
from lipaudit.tables.trials import FLAGS

Stat = Literal["median", "mean", "p95", "max", "each"]
Op = Literal["<=", ">="]
LimitKind = Literal["absolute", "relative", "difference"]
STATS: tuple[str, ...] = get_args(Stat)

_RULE = re.compile(
    r"(?P<metric>[\w.]+)\s*(?:@(?P<selector>[^:<>]*?))?\s*(?::\s*(?P<stat>\w+))?\s*"
    r"(?P<op><=|>=)\s*(?P<limit>\S+)"
)
# No infinity, underscore or fraction, which Fraction() would take, and no power that takes
# forever.
_LIMIT = re.compile(r"(?P<number>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?)(?P<unit>%|pp|)")
_EXAMPLE = "Write a rule like jacobian.norm:median <= +5% or attack.robust@linf,2/255 >= -2pp."


GROUP = "group="
"""How the word of a selector begins that names a group of samples."""
EACH = "each"
"""All groups, one by one."""


@dataclass(frozen=True)
class Limit:
    """The right-hand side of a rule.

    Attributes:
        kind: absolute (on the current run), relative (change over the baseline's value) or
            difference (change in the metric's own unit).
        value: the limit; a relative one is a share (+5% is 1/20), percentage points too.
        unit: unit of changes: "%", "pp" or "".
    """

    kind: LimitKind
    value: Fraction
    unit: str = ""


@dataclass(frozen=True)
class Rule:
    """One rule of the gate.

    Attributes:
        text: the rule as the user wrote it.
        measure: the section it reads, e.g. `jacobian`.
        column: the per-sample column or the column of the section's rows.
        selector: words that pick rows, e.g. ("linf", "2/255") or ("layer=3", "head=1").
        stat: how values become one number.
        op: `<=` (larger is worse) or `>=` (smaller is worse).
        limit: the limit.
        per_sample: whether it reads a per-sample column rather than a column of rows.
        about: the description of its column.
        group: the group of samples that it reads (`@group=NAME`), or `each`; empty: all samples.
    """

    text: str
    measure: str
    column: str
    selector: tuple[str, ...]
    stat: Stat
    op: Op
    limit: Limit
    per_sample: bool
    about: Column
    group: str = ""

    @property
    def metric(self) -> str:
        """Return the metric in the printed form: `bounds.exact:each`."""
        words = [*self.selector]
        if self.group:
            words.append(f"{GROUP}{self.group}")
        where = f"@{','.join(words)}" if words else ""
        return f"{self.measure}.{self.column}{where}:{self.stat}"

    @property
    def worse(self) -> int:
        """Return the sign of a change for the worse."""
        return 1 if self.op == "<=" else -1


def parse_rule(text: str, sections: Iterable[Section] = ()) -> Rule:
    """Read `METRIC[@SELECTOR][:STAT] OP LIMIT`.

    Without STAT, a per-sample column is judged by its median, or by its mean if the values are 0
    or 1. A column of rows is judged row by row (`each`).

    Args:
        text: the rule.
        sections: sections of reports; a rule may name their columns and those of installed
            measures.

    Raises:
        UsageError: the text is not a rule, or names an unknown metric or statistic.
    """
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a rule", _EXAMPLE)
    measure, _, column = match["metric"].rpartition(".")
    table = _find_table(match["metric"], sections)
    stat = _read_statistic(match["stat"], column, table)
    per_sample = stat != "each" and column in table.sample_columns
    columns = table.sample_columns if per_sample else table.columns
    selector, group = _read_selector(match["selector"] or "", table)
    limit = _read_limit(match["limit"], text)
    # Yes-or-no values, whose mean is a share, or a column of shares in percent. (Signed shares of
    # sensitivity may exceed 1: they have no better direction.)
    is_flag = per_sample and column in FLAGS
    about = columns[column]
    is_share = about.format.endswith("%") and bool(about.better) and limit.kind != "relative"
    if (is_flag or is_share) and abs(limit.value) > 1:
        advice = "Write -2pp for a change by two points, 0.6 for 60%."
        raise UsageError(f"{text!r}: a share is between 0 and 1, not {match['limit']}", advice)
    return Rule(
        text=" ".join(text.split()),
        measure=measure,
        column=column,
        selector=selector,
        stat=stat,
        op="<=" if match["op"] == "<=" else ">=",
        limit=limit,
        per_sample=per_sample,
        about=about,
        group=group,
    )


def _find_table(metric: str, sections: Iterable[Section]) -> Layout | Section:
    """Return the table that has a metric: a section of a report, else that of a measure.

    Raises:
        UsageError: no table has the metric.
    """
    tables = layouts() | {section.measure: section for section in sections}
    known = list_metrics(tables)
    if metric not in known:
        raise UsageError(f"unknown metric {metric!r}", suggestion(metric, known))
    return tables[metric.rpartition(".")[0]]


def _read_selector(text: str, table: Layout | Section) -> tuple[tuple[str, ...], str]:
    """Return the words of a selector that pick rows, and the group of samples ("" for all)."""
    stripped = map(str.strip, text.split(","))
    group = ""
    selector = []
    for word in filter(None, stripped):
        # `group=NAME` names a group, unless the rows have a column `group`.
        if word.startswith(GROUP) and "group" not in table.columns:
            group = word.removeprefix(GROUP)
        else:
            selector.append(word)
    return tuple(selector), group


def no_change(metric: str, values: Iterable[float] = (), sections: Iterable[Section] = ()) -> Rule:
    """Return the rule that allows no change of a metric.

    The limit is in percentage points for shares. For other figures it is relative, or a difference
    if a figure is or can be negative.

    Args:
        metric: with its statistic: `jacobian.norm:median`.
        values: the figures.
        sections: sections of the reports with the metric.
    """
    rule = parse_rule(f"{metric} <= +0", sections)
    limit = "+0"
    if rule.about.format.endswith("%") or rule.column in FLAGS:  # a share
        limit = "+0pp"
    elif not rule.about.signed and all(value >= 0 for value in values):
        limit = "+0%"
    op: Op = "<=" if rule.about.better == "lower" else ">="  # a change for the worse breaks it
    # The text is printed beside verdicts: without a limit, as a comparison has none.
    return replace(rule, text=rule.metric, op=op, limit=_read_limit(limit, metric))


def configure(
    table: Mapping[str, Any], fail_on: Sequence[str] = (), sections: Sequence[Section] = ()
) -> dict[str, Any]:
    """Read `[tool.lipaudit.gate]`; `fail_on` replaces its rules.

    Returns:
        Keyword arguments of `judge`: rules, alpha, strict.

    Raises:
        UsageError: a key is unknown, a value has the wrong type, or a rule cannot be read.
    """
    usual = {"rules": [], "alpha": 0.05, "strict": False}
    for key, value in table.items():
        if key not in usual:
            message = f"unknown key {key!r} in [tool.lipaudit.gate]"
            raise UsageError(message, suggestion(key, usual))
        kind = type(usual[key])
        if not isinstance(value, kind):
            message = f"{key} = {value!r} in [tool.lipaudit.gate] is not of type {kind.__name__}"
            raise UsageError(message, "Such as rules = [...], alpha = 0.05, strict = true.")
    given = {**usual, **table}
    texts = fail_on or given["rules"]
    return given | {"rules": tuple(parse_rule(str(text), sections) for text in texts)}


def list_metrics(tables: Mapping[str, Layout | Section] | None = None) -> tuple[str, ...]:
    """Return the metrics of tables, by default of all installed measures."""
    if tables is None:
        tables = layouts()
    of_rows = []
    of_samples = []
    for measure, table in tables.items():
        of_rows += _name_metrics(measure, table.columns)
        of_samples += _name_metrics(measure, table.sample_columns)
    return tuple(dict.fromkeys(of_rows + of_samples))


def _name_metrics(measure: str, columns: Mapping[str, Column]) -> list[str]:
    """Return the metrics of the columns of a measure that are not text (format "s")."""
    return [f"{measure}.{name}" for name, column in columns.items() if column.format != "s"]


def _read_statistic(text: str | None, column: str, table: Layout | Section) -> Stat:
    """Return the statistic of a rule: as typed, or the default of the column.

    Args:
        text: the statistic as typed; None if the rule has none.
        column: the column that the rule judges.
        table: the section of the column.

    Raises:
        UsageError: there is no such statistic, or the column does not have it.
    """
    if text is None:
        if column not in table.sample_columns:
            return "each"
        return "mean" if column in FLAGS else "median"
    if text not in STATS:
        raise UsageError(f"unknown statistic {text!r}", suggestion(text, STATS))
    # `each` needs a column of numbers in the rows of the table. Texts (format "s") and yes-or-no
    # values have none.
    row = table.columns.get(column)
    has_no_numbers = row is None or row.format == "s" or column in FLAGS
    if text == "each" and has_no_numbers:
        raise UsageError(
            f"{column} has one value per sample, and `each` judges the rows of a table",
            "Use median, mean, p95 or max.",
        )
    return text  # type: ignore[return-value]


def _read_limit(text: str, rule: str) -> Limit:
    """Return the limit at the end of a rule.

    A number without a sign is an absolute limit. With a sign it limits a change: relative with %,
    a difference in percentage points with pp, else a difference.

    Raises:
        UsageError: the text is not a limit; the message names the rule.
    """
    match = _LIMIT.fullmatch(text)
    if match and math.isfinite(float(match["number"])):
        value = Fraction(match["number"])
        signed = text[0] in "+-"
        unit = match["unit"]
        if not unit:
            return Limit("difference" if signed else "absolute", value)
        if signed and unit == "pp":
            return Limit("difference", value / 100, unit="pp")
        if signed and value > -100:  # nothing falls by more than 100%
            return Limit("relative", value / 100, unit="%")
    advice = "Write a change with a sign (+5%, -2pp, +0.1), an absolute value without (0.7)."
    raise UsageError(f"{text!r} is not a limit (in {rule!r})", advice)


RADIUS = parse_rule("jacobian.radius_first_order:median >= +0%")
NORM = parse_rule("jacobian.norm:median <= +0%")
"""No change of the radius, and of the norm that is set against it."""


def list_default_rules() -> list[Rule]:
    """Return the default rules that sections declare, in the order of their figures."""
    return [parse_rule(headline.rule) for _, headline in list_headlines() if headline.rule]


def find_words(metric: str) -> str:
    """Return the words that name a metric in a sentence, or else the heading of its column."""
    headline = find_headline(metric)
    if headline is not None:
        return headline.words or headline.label
    column = re.split("[@:]", metric)[0]  # `jacobian.margin` of `jacobian.margin:median`
    return WORDS.get(column) or write_math(find_column(column).label)


WORDS = {
    "attention.g1": "bound g1 of attention rows",
    "attention.softmax_norm": "softmax norm of attention rows",
    "bounds.exact_max": "largest head norm",
    "bounds.layers.exact": "layer norm before W_O",
    "bounds.layers.exact_out": "layer norm with W_O",
    "bounds.sharp": "bound sharp",
    "jacobian.shares.carried": "norm that a head carries",
}
"""Words for figures that are compared and no headline."""


def choose_rules(*reports: Report) -> tuple[Rule, ...]:
    """Return the default rules for the sections of reports; clean accuracy is judged once.

    Raises:
        UsageError: there are none.
    """
    sections = [section for report in reports for section in report.sections]
    # A figure that several sections have, such as clean accuracy, is judged once.
    chosen = {}
    # The main figures of all measures, some with a default rule, by the names of their sections.
    for name, headline in list_headlines():
        owners = [section for section in sections if section.measure == name]
        if headline.labelled:  # only sections of labelled samples have the figure
            owners = [section for section in owners if headline.column in section.samples]
        if owners and headline.rule and headline.name not in chosen:
            chosen[headline.name] = parse_rule(headline.rule)
    if not chosen:
        known = sorted({section.measure for section in sections})
        raise UsageError(
            f"no default rule exists for {', '.join(known) or 'an empty report'}",
            "Name a rule with --fail-on; lipaudit explain MEASURE lists what it can name.",
        )
    return tuple(chosen.values())


def list_absent(chosen: Sequence[Rule]) -> list[str]:
    """Return notes on default rules that were not judged, because no report has their section.

    Only rules of measures that an audit usually runs are named.
    """
    judged = {rule.measure for rule in chosen}
    absent = [rule for rule in list_default_rules() if rule.measure in {*USUAL} - judged]
    groups = group_values((rule.measure, rule.text) for rule in absent)
    return [
        f"not judged, because neither report has a section {measure}: {', '.join(texts)}"
        for measure, texts in groups.items()
    ]


def list_uninstalled(*reports: Report) -> list[str]:
    """Return a note on sections that are not judged because their measure is not installed."""
    sections = [section.measure for report in reports for section in report.sections]
    # `jacobian.shares` is a section of the measure `jacobian`.
    names = {section.partition(".")[0] for section in sections} - load_measures().keys()
    if not names:
        return []
    advice = explain_missing() or "Install the packages that measured them."
    text = f"not judged, because the measure is not installed: {', '.join(sorted(names))}"
    return [f"{text}. {advice}"]
