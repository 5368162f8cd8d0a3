"""The decision of the gate: all printed lines and the exit code come from these objects."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from pydantic import computed_field

from lipaudit.errors import ExitCode
from lipaudit.tables.columns import Float, Frozen

VerdictStatus = Literal[
    "unchanged",
    "improved",
    "pass",
    "pass (not proven)",
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
UNPROVEN: frozenset[VerdictStatus] = frozenset({"inconclusive", "pass (not proven)"})
"""Statuses that fail under --strict."""


class Verdict(Frozen):
    """The verdict on one change: of a row or column, under a rule or under none.

    Changes and limits use the unit of the rule's limit: a share of the baseline's value
    (unit "%"), percentage points as a share (unit "pp"), or a difference (unit "").

    Attributes:
        rule: the rule as the user wrote it; in a comparison the metric.
        metric: its metric in full, e.g. `bounds.exact:each`.
        name: the row or column, e.g. `layer 3 head 1`; empty if there is only one.
        status: the verdict.
        old: the baseline's value on the shared samples.
        new: the current value on the shared samples.
        paired: the tested change, sample by sample: the median of the samples' changes
            (`median`), their geometric mean (`each`), else the change of the two values.
        low: lower limit of the paired change at one-sided confidence 1 - level.
        high: upper limit of the paired change at one-sided confidence 1 - level.
        unit: unit of change, paired, low, high and detectable.
        p: p-value of "the rule holds".
        p_adjusted: the same after Holm's correction over all rules.
        level: level of the test, and of low and high.
        change_status: whether there is a change at all, independent of the rule, in the words of
            `compare`; None without a test.
        change_low: lower 95 % limit of the paired change alone, as in `compare`.
        change_high: upper 95 % limit, as in `compare`.
        lost: number of samples that changed from yes to no, for shares.
        gained: number of samples that changed from no to yes, for shares.
        mcnemar: exact two-sided p-value of "lost and gained are equally likely", for information.
        samples: number of pairs behind the verdict; 0 without a test.
        detectable: smallest paired change that this run would have called a regression; infinite
            if the samples are too few for any, None if unknown.
        moved: the samples that changed most for the worse, at most three, the worst first.
        samples_needed: approximate number of samples that would settle an inconclusive change.
        reason: why the rule was not judged.
    """

    rule: str
    metric: str
    status: VerdictStatus
    name: str = ""
    old: Float | None = None
    new: Float | None = None
    paired: Float | None = None
    low: Float | None = None
    high: Float | None = None
    unit: str = ""
    p: Float | None = None
    p_adjusted: Float | None = None
    level: Float | None = None
    change_status: VerdictStatus | None = None
    change_low: Float | None = None
    change_high: Float | None = None
    lost: int | None = None
    gained: int | None = None
    mcnemar: Float | None = None
    samples: int = 0
    detectable: Float | None = None
    moved: tuple[str, ...] = ()
    samples_needed: int | None = None
    reason: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def change(self) -> Float | None:
        """Return the change of the two values; None for an absolute limit."""
        if self.old is None or self.new is None:
            return None
        if self.unit != "%" or self.new == self.old:
            return self.new - self.old
        return self.new / self.old - 1 if self.old else math.copysign(math.inf, self.new)

    @property
    def line(self) -> str:
        """Return the verdict as one line, with what would settle an inconclusive change."""
        where = f" {self.name}" if self.name else ""
        parts = [f"{self.status}: {self.rule}{where}: {self.reason or self.figures}"]
        if self.detectable is not None:
            few, least = math.isinf(self.detectable), amount(self.detectable, self.unit)
            parts.append(
                "too few samples to detect any change" if few else f"detectable from {least}"
            )
        if self.samples_needed:
            edge = amount(self.low if ">=" in self.rule else self.high, self.unit)
            parts.append(
                f"about {self.samples_needed} samples would decide it (this run has "
                f"{self.samples}), or a limit beyond {edge}"
            )
        return "; ".join(parts)

    @property
    def figures(self) -> str:
        """Return the values, their change, and the tested change."""
        texts = self.texts
        if not texts["baseline"]:
            return texts["current"]
        values, change = f"{texts['baseline']} -> {texts['current']}", texts["change"]
        if self.low is not None:
            paired = f"paired {texts['paired']}"
            change += f"; {paired}" if texts["paired"] != change else ""
            change += f", limits {texts['limits']}, n = {self.samples}"
            # Beside a verdict that leaves open whether there is a change at all.
            if self.change_status in {"regressed", "improved"} - {self.status}:
                ends = (amount(end, self.unit) for end in (self.change_low, self.change_high))
                word = f"{self.change_status}, 95 % limits {' to '.join(ends)}"
                change += f"; the change alone: {word}"
        return f"{values} ({change})"

    @property
    def texts(self) -> dict[str, str]:
        """Return the printed parts of the verdict, by kind; empty if absent."""
        ends = (amount(self.low, self.unit), amount(self.high, self.unit))
        return {
            "baseline": "" if self.old is None else f"{self.old:.4g}",
            "current": "" if self.new is None else f"{self.new:.4g}",
            "change": amount(self.change, self.unit),
            "paired": amount(self.paired, self.unit),
            "limits": "" if self.low is None else f"{ends[0]} to {ends[1]}",
            "samples": str(self.samples or ""),
        }


class Judgement(Frozen):
    """Everything a gate decided.

    Attributes:
        current: the judged model.
        baseline: the model of the baseline.
        alpha: the chance of flagging any rule that holds.
        strict: whether verdicts that are not proven fail.
        verdicts: one per rule and row, in the order of the rules.
        notes: differences that permit the comparison, dropped rules, and the clean accuracy,
            which never fails.
        warnings: warnings of the current report, which affect its figures.
        places: places in the data of the samples named by verdicts, by id.
        baseline_file: path of the baseline as given; empty if unknown.
    """

    current: str
    baseline: str
    alpha: float
    strict: bool
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    places: dict[str, str] = {}
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
    def reason(self) -> str:
        """Return the outcome as one line."""
        bad = [verdict for verdict in self.verdicts if self.fails(verdict)]
        if not bad:
            counts = Counter(verdict.status for verdict in self.verdicts)
            return f"pass: {', '.join(f'{number} {status}' for status, number in counts.items())}"
        gravest = [verdict for verdict in bad if self._code(verdict) == self.exit_code]
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return gravest[0].line + more

    def fails(self, verdict: Verdict) -> bool:
        """Say whether a verdict fails the gate."""
        return self._code(verdict) is not ExitCode.OK

    def _code(self, verdict: Verdict) -> ExitCode:
        if self.strict and verdict.status in UNPROVEN:
            return ExitCode.NOT_PROVEN
        return EXIT.get(verdict.status, ExitCode.OK)


def amount(value: float | None, unit: str) -> str:
    """Write a change with its sign: +5%, -2pp, +0.1."""
    if value is None:
        return ""
    value += 0.0  # -0.0 becomes 0.0
    if unit and math.isfinite(value):
        return f"{100 * value:+.3g}{unit}"
    return f"{value:+.3g}"
