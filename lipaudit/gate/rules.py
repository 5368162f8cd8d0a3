"""Rules of the gate, `METRIC[@SELECTOR][:STAT] OP LIMIT`, and the verdicts on them.

All printed lines and the exit code come from verdicts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from pydantic import computed_field

from lipaudit.errors import ExitCode, UsageError, suggestion
from lipaudit.gate.statistics import Movement
from lipaudit.measures import USUAL, layouts, list_headlines, load_measures
from lipaudit.tables import Column, Layout, Report, Section
from lipaudit.tables.columns import Float, Frozen, group_values
from lipaudit.tables.plugins import explain_missing
from lipaudit.tables.trials import FLAGS, TrialKey

Stat = Literal["median", "mean", "p95", "max", "each"]
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
        about: the description of its column.
        group: the group of samples that it reads (`@group=NAME`), or `each`; empty: all samples.
    """

    text: str
    measure: str
    column: str
    selector: tuple[str, ...]
    stat: Stat
    op: Literal["<=", ">="]
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
    if match["metric"] not in (known := list_metrics(tables)):
        raise UsageError(f"unknown metric {match['metric']!r}", suggestion(match["metric"], known))
    measure, _, column = match["metric"].rpartition(".")
    table = tables[measure]
    stat = _stat(match["stat"], column, table)
    per_sample = stat != "each" and column in table.sample_columns
    selector, group = _read_selector(match["selector"] or "", table)
    limit = _limit(match["limit"], text)
    if per_sample and column in FLAGS and abs(limit.value) > 1:
        advice = "Write -2pp for a change by two points, 0.6 for 60 %."
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
        about=(table.sample_columns if per_sample else table.columns)[column],
        group=group,
    )


def _read_selector(text: str, table: Layout | Section) -> tuple[tuple[str, ...], str]:
    """Return the words that pick rows, and the group of samples, if a word names one."""
    stripped = map(str.strip, text.split(","))
    words = [word for word in stripped if word]
    group = ""
    selector = []
    for word in words:
        # A table may have a column of that name.
        if word.startswith(GROUP) and "group" not in table.columns:
            group = word.removeprefix(GROUP)
        else:
            selector.append(word)
    return tuple(selector), group


def no_change(metric: str, values: Iterable[float] = (), sections: Iterable[Section] = ()) -> Rule:
    """Return the rule that allows no change of a metric.

    The limit is in percentage points for shares, and relative for other figures unless they are
    or can be negative.

    Args:
        metric: with its statistic: `jacobian.norm:median`.
        values: the figures.
        sections: sections of the reports with the metric.
    """
    rule = parse_rule(f"{metric} <= +0", sections)
    share = rule.about.format.endswith("%") or rule.column in FLAGS
    relative = not rule.about.signed and all(value >= 0 for value in values)
    limit = "+0pp" if share else "+0%" if relative else "+0"
    op: Literal["<=", ">="] = "<=" if rule.about.better == "lower" else ">="
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


def list_metrics(tables: Mapping[str, Layout | Section] | None = None) -> tuple[str, ...]:
    """Return the metrics of tables, by default of all installed measures."""
    pairs = (layouts() if tables is None else tables).items()
    rows = [(name, *pair) for name, table in pairs for pair in table.columns.items()]
    rows += [(name, *pair) for name, table in pairs for pair in table.sample_columns.items()]
    known = (f"{measure}.{name}" for measure, name, column in rows if column.format != "s")
    return tuple(dict.fromkeys(known))


def _stat(text: str | None, column: str, table: Layout | Section) -> Stat:
    if text is None:
        own = column in table.sample_columns
        return "each" if not own else "mean" if column in FLAGS else "median"
    if text not in STATS:
        raise UsageError(f"unknown statistic {text!r}", suggestion(text, STATS))
    row = table.columns.get(column)
    each_sample = text == "each" and (row is None or row.format == "s" or column in FLAGS)
    if each_sample:
        raise UsageError(
            f"{column} has one value per sample, and `each` judges the rows of a table",
            "Use median, mean, p95 or max.",
        )
    return text  # type: ignore[return-value]


def _limit(text: str, rule: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    if match and math.isfinite(float(match["number"])):
        value = Fraction(match["number"])
        signed = text[0] in "+-"
        unit = match["unit"]
        if not unit:
            return Limit("difference" if signed else "absolute", value)
        if signed and unit == "pp":
            return Limit("difference", value / 100, "pp")
        if signed and value > -100:  # nothing falls by more than 100 %
            return Limit("relative", value / 100, "%")
    advice = "Write a change with a sign (+5%, -2pp, +0.1), an absolute value without (0.7)."
    raise UsageError(f"{text!r} is not a limit (in {rule!r})", advice)


RADIUS, NORM = (
    parse_rule(text)
    for text in ("jacobian.radius_first_order:median >= +0%", "jacobian.norm:median <= +0%")
)
"""No change of the radius, and of the norm that is set against it."""


def list_default_rules() -> list[Rule]:
    """Return the default rules that sections declare, in the order of their figures."""
    return [parse_rule(headline.rule) for _, headline in list_headlines() if headline.rule]


def find_words(measure: str, column: str) -> str:
    """Return the words for a figure of a section in a sentence; empty if it has none."""
    layout = layouts().get(measure)
    for headline in layout.headlines if layout else ():
        if headline.column == column:
            return headline.words or headline.label
    return ""


def choose_rules(*reports: Report) -> tuple[Rule, ...]:
    """Return the default rules for the sections of reports; clean accuracy is judged once.

    Raises:
        UsageError: there are none.
    """
    sections = [section for report in reports for section in report.sections]
    # A figure that several sections have, such as clean accuracy, is judged once.
    chosen: dict[str, Rule] = {}
    for name, headline in list_headlines():
        owners = [section for section in sections if section.measure == name]
        if headline.labelled:
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
    """Name the default rules of usual measures that neither report has."""
    judged = {rule.measure for rule in chosen}
    absent = [rule for rule in list_default_rules() if rule.measure in {*USUAL} - judged]
    groups = group_values((rule.measure, rule.text) for rule in absent)
    return [
        f"not judged, because neither report has a section {measure}: {', '.join(texts)}"
        for measure, texts in groups.items()
    ]


def list_uninstalled(*reports: Report) -> list[str]:
    """Name the sections without default rules because their measure is not installed here."""
    sections = [section.measure for report in reports for section in report.sections]
    names = {section.partition(".")[0] for section in sections} - load_measures().keys()
    if not names:
        return []
    advice = explain_missing() or "Install the packages that measured them."
    text = f"not judged, because the measure is not installed: {', '.join(sorted(names))}"
    return [f"{text}. {advice}"]


# Verdicts


VerdictStatus = Literal[
    "unchanged",
    "improved",
    "pass (proven)",
    "pass",
    "inconclusive",
    "regressed",
    "not comparable",
    "error",
]
EXIT: dict[VerdictStatus, ExitCode] = {
    "error": ExitCode.INTERNAL,
    "not comparable": ExitCode.BASELINE,
    "regressed": ExitCode.REGRESSION,
}
"""Exit code of each failing status, the most severe first."""


class Verdict(Frozen):
    """The verdict on one change: of a row or column, under a rule or under none.

    Changes and limits use the unit of the rule's limit: a share of the baseline's value
    (unit "%"), percentage points as a share (unit "pp"), or a difference (unit "").

    Attributes:
        rule: the rule as the user wrote it; in a comparison the metric.
        metric: its metric in full, e.g. `bounds.exact:each`.
        name: the row or column, e.g. `layer 3 head 1`; empty if there is only one.
        group: the group of samples; empty: all.
        status: the verdict.
        old: the baseline's value on the shared samples.
        new: the current value on the shared samples.
        paired: the tested change, sample by sample: the median of the samples' changes
            (`median`, `each`), else the change of the two values.
        low: lower limit of the paired change, for this row or column alone, at 1 - alpha.
        high: upper limit of the paired change, likewise; of a comparison at 95 %.
        unit: unit of change, paired, low and high.
        p: p-value of "no worse", for this row or column alone.
        p_adjusted: the same over all rules and rows together.
        change_status: whether there is a change at all, for this row or column alone and
            independent of the rule, in the words of `compare`; None without a test.
        lost: number of samples that changed from yes to no, for shares.
        gained: number of samples that changed from no to yes, for shares.
        mcnemar: exact two-sided p-value of "lost and gained are equally likely".
        samples: number of pairs behind the verdict, or of the samples of a group; 0 if unknown.
        samples_needed: approximate number of samples that would settle an inconclusive change, or
            prove a limit where --strict asks for it.
        reason: why the rule was not judged.
        remark: what else a reader of the figures must know.
    """

    rule: str
    metric: str
    status: VerdictStatus
    name: str = ""
    group: str = ""
    old: Float | None = None
    new: Float | None = None
    paired: Float | None = None
    low: Float | None = None
    high: Float | None = None
    unit: str = ""
    p: Float | None = None
    p_adjusted: Float | None = None
    change_status: VerdictStatus | None = None
    lost: int | None = None
    gained: int | None = None
    mcnemar: Float | None = None
    samples: int = 0
    samples_needed: int | None = None
    reason: str = ""
    remark: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def change(self) -> Float | None:
        """Return the change of the two values; None for an absolute limit."""
        if self.old is None or self.new is None:
            return None
        if self.new == self.old:
            return 0.0
        if self.unit != "%":
            return self.new - self.old
        if self.old == 0:
            return math.copysign(math.inf, self.new)
        return self.new / self.old - 1

    @property
    def proven(self) -> bool:
        """Say whether the verdict leaves no doubt that the rule holds, as --strict asks."""
        tested = self.low is not None
        return self.status != "inconclusive" and not (self.status == "pass" and tested)

    @property
    def row(self) -> str:
        """Return the row or column, and the group of samples."""
        if not self.group:
            return self.name
        return f"{self.name} group {self.group}".strip()

    @property
    def line(self) -> str:
        """Return the verdict as one line, with what would settle an inconclusive change."""
        where = f" {self.row}" if self.row else ""
        text = f"{self.status}: {self.rule}{where}: {self.reason or self.figures}"
        return "; ".join(filter(None, (text, self.remark, self.advice)))

    @property
    def advice(self) -> str:
        """Return what would settle an inconclusive change or prove a limit; else nothing."""
        if not self.samples_needed:
            return ""
        of_group = " of the group" if self.group else ""
        needed = f"about {self.samples_needed} samples{of_group} would settle it"
        return f"{needed}, and this run has {self.samples}"

    @property
    def sentence(self) -> str:
        """Return the change in words: `robust accuracy 64.8 % -> 51.6 %`."""
        column = self.metric.partition("@")[0].partition(":")[0]
        measure, _, name = column.rpartition(".")
        words = find_words(measure, name) or self.metric
        stat = self.metric.rpartition(":")[2]
        if stat in ("p95", "max") and words != self.metric:
            words = f"{words}, {stat},"
        trial = TrialKey.parse(self.name)
        where = trial.ball if trial else self.name
        if self.group:
            where = f"{where}, group {self.group}".removeprefix(", ")
        subject = f"{words} ({where})" if where else words
        new, old = (_write_figure(value, self.unit) for value in (self.new, self.old))
        if self.old is None:
            return f"{subject} {new} breaks the limit of {self.rule}"
        return f"{subject} {old} -> {new}"

    @property
    def proof(self) -> str:
        """Return what is proven of a regression: `proven: at least 1.9 points lower`."""
        if self.low is None or self.high is None:
            return ""
        end = min(self.low, self.high, key=abs)
        if self.change_status in ("improved", "inconclusive"):
            return f"proven: less than {self.rule} asks"
        if not math.isfinite(end) or self.change_status != "regressed":
            return "proven"
        size = abs(100 * end if self.unit else end)
        unit = {"%": " %", "pp": " points", "": ""}[self.unit]
        way = "higher" if end > 0 else "lower"
        return f"proven: at least {math.floor(10 * size + ROUNDING) / 10:g}{unit} {way}"

    @property
    def figures(self) -> str:
        """Return the values, their change, and the tested change."""
        texts = self.texts
        if not texts["baseline"]:
            of_group = f" (n = {self.samples})" if self.samples else ""
            return texts["current"] + of_group
        values = f"{texts['baseline']} -> {texts['current']}"
        change = texts["change"]
        if self.low is not None:
            if texts["paired"] != change:
                change += f"; paired {texts['paired']}"
            limits = texts["limits"]
            change += f", limits {limits}" if " to " in limits else f", {limits}"
            change += f", n = {self.samples}"
            # Beside a verdict that leaves open whether there is a change at all.
            if self.change_status in {"regressed", "improved"} - {self.status}:
                change += f"; the change alone: {self.change_status}"
        elif self.status in ("pass", "improved", "regressed"):
            change += ", without a test"
        return f"{values} ({change})"

    @property
    def texts(self) -> dict[str, str]:
        """Return the printed parts of the verdict, by kind; empty if absent."""
        limits = ""
        if self.low is not None:
            limits = f"{amount(self.low, self.unit)} to {amount(self.high, self.unit)}"
            if self.high == math.inf and self.low in (-1.0, -math.inf):
                limits = "no finite limits"
        return {
            "baseline": "" if self.old is None else f"{self.old:.4g}",
            "current": "" if self.new is None else f"{self.new:.4g}",
            "change": amount(self.change, self.unit),
            "paired": amount(self.paired, self.unit),
            "limits": limits,
            "samples": str(self.samples or ""),
        }


ROUNDING = 0.01
"""Share of a tenth by which a figure of six digits may miss it."""
LISTED = 4
"""Number of changes that the answer of a gate names."""


class Judgement(Frozen):
    """Everything a gate decided.

    Attributes:
        current: the judged model.
        baseline: the model of the baseline.
        alpha: the chance of flagging a checkpoint that is no worse.
        strict: whether verdicts that are not proven fail.
        verdicts: one per rule and row, in the order of the rules.
        notes: differences that permit the comparison, and dropped rules.
        warnings: warnings of the current report, which affect its figures.
        predictions: how the predictions moved; None if a report has none.
        baseline_file: path of the baseline as given; empty if unknown.
    """

    current: str
    baseline: str
    alpha: float
    strict: bool
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    predictions: Movement | None = None
    baseline_file: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """Return the exit code of the gravest status among the verdicts."""
        codes = {self._code(verdict) for verdict in self.verdicts}
        order = (*EXIT.values(), ExitCode.NOT_PROVEN)
        return int(next((code for code in order if code in codes), ExitCode.OK))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> str:
        """Return the outcome in a word or two: pass, worse, not proven, not comparable, error."""
        if self.exit_code == ExitCode.REGRESSION:
            return "worse"
        if self.exit_code in (ExitCode.INTERNAL, ExitCode.BASELINE):
            return self._list_gravest()[0].status
        open_ones = any(verdict.status == "inconclusive" for verdict in self.verdicts)
        return "not proven" if open_ones or self.exit_code else "pass"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason(self) -> str:
        """Return the answer in a sentence: what is worse, or not proven, or the counts."""
        gravest = self._list_gravest()
        if self.outcome == "pass":
            return f"pass: {self.counts}"
        if self.outcome not in ("worse", "not proven"):
            more = f" (and {len(gravest) - 1} more)" if len(gravest) > 1 else ""
            return gravest[0].line + more
        shown = []
        for verdict in gravest[:LISTED]:
            detail = verdict.proof if self.outcome == "worse" else verdict.advice
            shown.append(f"{verdict.sentence} ({detail})" if detail else verdict.sentence)
        more = f", and {len(gravest) - LISTED} more" if len(gravest) > LISTED else ""
        return f"{self.outcome}: {', '.join(shown)}{more}"

    @property
    def counts(self) -> str:
        """Return how many verdicts have each status."""
        counts = Counter(verdict.status for verdict in self.verdicts)
        return ", ".join(f"{number} {status}" for status, number in counts.items())

    @property
    def summary(self) -> str:
        """Return the outcome with the counts, and with the samples that would settle it."""
        needed = [v.samples_needed for v in self.verdicts if v.samples_needed]
        text = f"{self.outcome}: {self.counts}"
        if self.outcome == "not proven" and needed:
            text += f"; about {max(needed)} samples would settle it"
        return text

    def _list_gravest(self) -> list[Verdict]:
        """Return the verdicts behind the outcome."""
        bad = [verdict for verdict in self.verdicts if self._code(verdict) == self.exit_code]
        open_ones = [verdict for verdict in self.verdicts if verdict.status == "inconclusive"]
        return bad if self.exit_code else open_ones

    def fails(self, verdict: Verdict) -> bool:
        """Say whether a verdict fails the gate."""
        return self._code(verdict) is not ExitCode.OK

    def _code(self, verdict: Verdict) -> ExitCode:
        if self.strict and not verdict.proven:
            return ExitCode.NOT_PROVEN
        return EXIT.get(verdict.status, ExitCode.OK)


def _write_figure(value: float | None, unit: str) -> str:
    """Write a figure for a sentence: a share in percent, anything else with four digits."""
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if unit == "pp" else f"{value:.4g}"


def amount(value: float | None, unit: str) -> str:
    """Write a change with its sign: +5%, -2pp, +0.1."""
    if value is None:
        return ""
    value += 0.0  # -0.0 becomes 0.0
    return f"{100 * value:+.3g}{unit}" if unit and math.isfinite(value) else f"{value:+.3g}"
