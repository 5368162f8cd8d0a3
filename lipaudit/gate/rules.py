"""Rules of the gate: `METRIC[@SELECTOR][:STAT] OP LIMIT`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from lipaudit.errors import UsageError, suggestion
from lipaudit.measures import layouts
from lipaudit.tables import Column, Layout, Section
from lipaudit.tables.columns import Reduction
from lipaudit.tables.trials import FLAGS

Stat = Literal["median", "mean", "p95", "max", "each"]
LimitKind = Literal["absolute", "relative", "difference"]
STATS: tuple[str, ...] = get_args(Stat)

_RULE = re.compile(
    r"(?P<metric>[\w.]+)\s*(?:@(?P<selector>[^:<>]*?))?\s*(?::\s*(?P<stat>\w+))?\s*"
    r"(?P<op><=|>=)\s*(?P<limit>\S+)"
)
# No infinity, underscore or fraction, which Fraction() would take.
_LIMIT = re.compile(r"(?P<number>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?)(?P<unit>%|pp|)")
_EXAMPLE = "Write a rule like jacobian.norm:median <= +5% or attack.robust@linf,2/255 >= -2pp."


@dataclass(frozen=True)
class Limit:
    """The right-hand side of a rule.

    Attributes:
        kind: absolute (on the current run), relative (change over the baseline's value) or
            difference (change in the metric's own unit).
        value: the limit; a relative one is a share (+5 % is 1/20), percentage points too.
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
        reduction: how its column of rows is computed from samples; None if impossible.
    """

    text: str
    measure: str
    column: str
    selector: tuple[str, ...]
    stat: Stat
    op: Literal["<=", ">="]
    limit: Limit
    per_sample: bool = False
    reduction: Reduction | None = None

    @property
    def metric(self) -> str:
        """Return the metric in the printed form: `bounds.exact:each`."""
        where = f"@{','.join(self.selector)}" if self.selector else ""
        return f"{self.measure}.{self.column}{where}:{self.stat}"

    @property
    def worse(self) -> int:
        """Return the sign of a change for the worse."""
        return 1 if self.op == "<=" else -1


def parse_rule(text: str, sections: Iterable[Section] = ()) -> Rule:
    """Read `METRIC[@SELECTOR][:STAT] OP LIMIT`.

    Without STAT, a per-sample column is judged by its median (its mean where it holds 0 or 1),
    a column of rows row by row (`each`).

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
    tables: dict[str, Layout | Section] = {**layouts()}
    tables |= {section.measure: section for section in sections}
    measure, _, column = match["metric"].rpartition(".")
    known = _list_metrics(tables)
    if match["metric"] not in known:
        raise UsageError(f"unknown metric {match['metric']!r}", suggestion(match["metric"], known))
    stat = _stat(match["stat"], column, tables[measure])
    row = tables[measure].columns.get(column)
    selector = (match["selector"] or "").split(",")
    return Rule(
        text=" ".join(text.split()),
        measure=measure,
        column=column,
        selector=tuple(word.strip() for word in selector if word.strip()),
        stat=stat,
        op="<=" if match["op"] == "<=" else ">=",
        limit=_limit(match["limit"], text),
        per_sample=stat != "each" and column in tables[measure].sample_columns,
        reduction=row.reduction if row else None,
    )


def no_change(
    metric: str, column: Column, values: Iterable[float] = (), sections: Iterable[Section] = ()
) -> Rule:
    """Return the rule that allows no change of a metric.

    The limit is in percentage points for shares, and relative for other figures unless they are
    negative.

    Args:
        metric: with its statistic: `jacobian.norm:median`.
        column: its column.
        values: the figures.
        sections: sections of the reports with the metric.
    """
    rule = parse_rule(f"{metric} <= +0", sections)
    share = column.format.endswith("%") or rule.column in FLAGS
    limit = "+0pp" if share else "+0%" if all(value >= 0 for value in values) else "+0"
    op: Literal["<=", ">="] = "<=" if column.better == "lower" else ">="
    return replace(rule, text=rule.metric, op=op, limit=_limit(limit, metric))


def configure(
    table: Mapping[str, Any], fail_on: Sequence[str] = (), sections: Sequence[Section] = ()
) -> dict[str, Any]:
    """Read `[tool.lipaudit.gate]`; `fail_on` replaces its rules.

    Returns:
        Keyword arguments of `judge`: rules, alpha, strict.

    Raises:
        UsageError: a key is unknown, a value has the wrong type, or a rule cannot be read.
    """
    usual: dict[str, Any] = {"rules": [], "alpha": 0.05, "strict": False}
    for key, value in table.items():
        if key not in usual:
            message = f"unknown key {key!r} in [tool.lipaudit.gate]"
            raise UsageError(message, suggestion(key, usual))
        if not isinstance(value, kind := type(usual[key])):
            message = f"{key} = {value!r} in [tool.lipaudit.gate] is not of type {kind.__name__}"
            raise UsageError(message, "Such as rules = [...], alpha = 0.05, strict = true.")
    given = {**usual, **table}
    texts = fail_on or given["rules"]
    return given | {"rules": tuple(parse_rule(str(text), sections) for text in texts)}


def metrics() -> tuple[str, ...]:
    """Return the names of all metrics of installed measures."""
    return _list_metrics(layouts())


def _list_metrics(tables: Mapping[str, Layout | Section]) -> tuple[str, ...]:
    pairs = tables.items()
    rows = [(name, *pair) for name, table in pairs for pair in table.columns.items()]
    rows += [(name, *pair) for name, table in pairs for pair in table.sample_columns.items()]
    known = (f"{measure}.{name}" for measure, name, column in rows if column.format != "s")
    return tuple(dict.fromkeys(known))


def _stat(text: str | None, column: str, table: Layout | Section) -> Stat:
    sampled = column in table.sample_columns
    if text is None:
        return "each" if not sampled else "mean" if column in FLAGS else "median"
    if text not in STATS:
        raise UsageError(f"unknown statistic {text!r}", suggestion(text, STATS))
    row = table.columns.get(column)
    if text == "each" and (row is None or row.format == "s" or column in FLAGS):
        raise UsageError(
            f"{column} has one value per sample, and `each` judges the rows of a table",
            "Use median, mean, p95 or max.",
        )
    return text  # type: ignore[return-value]


def _limit(text: str, rule: str) -> Limit:
    if match := _LIMIT.fullmatch(text):
        value, signed, unit = Fraction(match["number"]), text[0] in "+-", match["unit"]
        if not unit:
            return Limit("difference" if signed else "absolute", value)
        if signed and unit == "pp":
            return Limit("difference", value / 100, "pp")
        if signed and value > -100:  # nothing falls by more than 100 %
            return Limit("relative", value / 100, "%")
    raise UsageError(
        f"{text!r} is not a limit (in {rule!r})",
        "Write a change with a sign (+5%, -2pp, +0.1), an absolute value without (0.7).",
    )


DEFAULT_RULES = tuple(
    map(
        parse_rule,
        (
            "jacobian.norm:median <= +5%",
            "bounds.exact:each <= +20%",
            "attack.robust >= -2pp",
            "certify.certified >= -2pp",
        ),
    )
)
"""Default rules; each keeps its level with any number of samples."""
