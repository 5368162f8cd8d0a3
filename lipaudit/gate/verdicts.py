"""Verdicts on the rules of the gate, and the judgement that they add up to.

All printed lines and the exit code come from verdicts.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from pydantic import computed_field

from lipaudit.errors import ExitCode, join_few
from lipaudit.gate.rules import find_words
from lipaudit.gate.statistics import Movement
from lipaudit.tables.columns import Float, Frozen
from lipaudit.tables.formats import join_texts
from lipaudit.tables.trials import TrialKey

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


NO_LIMITS = "too few samples"


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
        high: upper limit of the paired change, likewise; of a comparison at 95%.
        unit: unit of change, paired, low and high.
        p: p-value of "no worse", for this row or column alone.
        p_adjusted: the same over all rules and rows together.
        change_status: whether there is a change at all, for this row or column alone and
            independent of the rule, in the words of `compare`; None without a test.
        lost: number of samples that changed from yes to no, for shares.
        gained: number of samples that changed from no to yes, for shares.
        mcnemar: exact two-sided p-value of "lost and gained are equally likely".
        samples: number of pairs behind the verdict, or of the samples of a group; 0 if unknown.
        samples_needed: approximate number of samples that would prove that a figure became worse
            at all, or a limit where --strict asks for it. Of a comparison: that it changed.
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
        if self.old == 0:  # relative to 0, every change is infinite
            return math.copysign(math.inf, self.new)
        return self.new / self.old - 1

    @property
    def proven(self) -> bool:
        """Return whether --strict accepts the status: not inconclusive, and no unproven `pass`."""
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
        """Return the verdict as one line, with what would prove an inconclusive change."""
        subject = f"{self.rule} {self.row}".rstrip()
        text = f"{self.status}: {subject}: {self.reason or self.figures}"
        return "; ".join(filter(None, (text, self.remark, self.advice)))

    @property
    def advice(self) -> str:
        """Return how many samples would prove the verdict, in words; "" if this is unknown.

        Such as `about 300 samples would prove the limit, and this run has 64`.
        """
        if not self.samples_needed:
            return ""
        samples = "samples"
        if self.group:
            samples = "samples of the group"
        # --strict wants a proof that the change is within the limit of the rule.
        proof = "the limit"
        if self.status == "inconclusive":
            proof = "that it became worse at all"
        needed = f"about {self.samples_needed} {samples} would prove {proof}"
        return f"{needed}, and this run has {self.samples}"

    @property
    def subject(self) -> str:
        """Return what changed, in words: `robust accuracy (linf 4/255)`, `Jacobian norm (p95)`."""
        where = [self.name]
        trial = TrialKey.parse(self.name)
        if trial is not None:  # an attack in a ball: only the ball is named
            where = [trial.ball]
        if self.group:
            where.append(f"group {self.group}")
        stat = self.metric.rpartition(":")[2]
        if stat in ("p95", "max"):
            where.append(stat)
        words = find_words(self.metric)
        named = join_texts(where)
        if not named:
            return words
        return f"{words} ({named})"

    @property
    def values(self) -> str:
        """Return both figures: `64.8% -> 51.6%`."""
        return f"{self.texts['baseline']} -> {self.texts['current']}"

    @property
    def sentence(self) -> str:
        """Return the change in words: `robust accuracy 64.8% -> 51.6%`."""
        if self.old is None:
            return f"{self.subject} {self.texts['current']} breaks the limit of {self.rule}"
        return f"{self.subject} {self.values}"

    @property
    def proof(self) -> str:
        """Return what is proven of a regression, for example `proven: at least 1.9 points lower`.

        The size is the confidence limit of the change that is nearest to 0. It is left out if this
        limit is infinite, or if the confidence limits of this figure alone contain 0. A rule that
        demands an improvement may be broken by a figure that is not worse at all: the text is then
        `proven: less than RULE asks`.
        """
        if self.low is None or self.high is None:
            return ""
        # `change_status` says whether the figure changed at all, whatever the rule asks.
        if self.change_status in ("improved", "inconclusive"):
            return f"proven: less than {self.rule} asks"
        nearest_to_zero = min(self.low, self.high, key=abs)
        if self.change_status != "regressed" or not math.isfinite(nearest_to_zero):
            return "proven"  # without a size
        size = abs(nearest_to_zero)
        if self.unit:  # a fraction becomes percent or points
            size = 100 * size
        unit = {"%": "%", "pp": " points", "": ""}[self.unit]
        way = "higher" if nearest_to_zero > 0 else "lower"
        # Rounded down to one decimal, or below 0.1 to two digits, so that "at least" stays true.
        # ROUNDING makes up for the rounding error of a size that is just below a decimal.
        decimals = 1
        if size < 0.1:
            decimals = 1 - math.floor(math.log10(size))
        factor = 10**decimals
        return f"proven: at least {math.floor(factor * size + ROUNDING) / factor:.15g}{unit} {way}"

    @property
    def figures(self) -> str:
        """Return the values, their change, and the tested change.

        Such as `2.1 -> 2.4 (+14.3%; paired +12.1%, limits +5% to +19%, n = 64)`. The paired change
        is that of single samples, such as their median change.
        """
        texts = self.texts
        if self.old is None:  # an absolute limit: there is no change
            if self.samples:
                return f"{texts['current']} (n = {self.samples})"
            return texts["current"]
        change = texts["change"]
        if self.low is not None:  # the change was tested
            if texts["paired"] != change:
                change += f"; paired {texts['paired']}"
            limits = texts["limits"]
            if limits != NO_LIMITS:
                limits = f"limits {limits}"
            change += f", {limits}, n = {self.samples}"
            # A status such as `pass` does not say whether the figure changed at all: add this,
            # unless the status is the same word.
            if self.change_status in {"regressed", "improved"} - {self.status}:
                change += f"; the change alone: {self.change_status}"
        elif self.status in ("pass", "improved", "regressed"):
            change += ", without a test"
        return f"{self.values} ({change})"

    @property
    def texts(self) -> dict[str, str]:
        """Return the printed parts of the verdict, by kind; empty if absent."""
        limits = ""
        if self.low is not None:
            limits = (
                f"{format_change(self.low, self.unit)} to {format_change(self.high, self.unit)}"
            )
            # The lowest possible change is -100% (-1) or -inf: such limits exclude nothing.
            if self.high == math.inf and self.low in (-1.0, -math.inf):
                limits = NO_LIMITS
        return {
            "baseline": _write_figure(self.old, self.unit),
            "current": _write_figure(self.new, self.unit),
            "change": format_change(self.change, self.unit),
            "paired": format_change(self.paired, self.unit),
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
        codes = {self._find_exit_code(verdict) for verdict in self.verdicts}
        # EXIT has the exit code of each failing status, the gravest status first.
        gravest_first = (*EXIT.values(), ExitCode.NOT_PROVEN)
        return int(next((code for code in gravest_first if code in codes), ExitCode.OK))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def outcome(self) -> str:
        """Return the outcome in a word or two: pass, worse, not proven, not comparable, error."""
        if self.exit_code == ExitCode.REGRESSION:
            return "worse"
        # The verdicts that fail the gate; if none does, the inconclusive ones.
        gravest = self._list_gravest()
        # The status of all these verdicts is "error" for INTERNAL, "not comparable" for BASELINE.
        if self.exit_code in (ExitCode.INTERNAL, ExitCode.BASELINE):
            return gravest[0].status
        return "not proven" if gravest else "pass"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason(self) -> str:
        """Return the answer of the gate in a sentence.

        The counts of statuses for a pass, the first verdict for reports that cannot be compared,
        else the figures that are worse or not proven.
        """
        gravest = self._list_gravest()
        if self.outcome == "pass":
            return f"pass: {self.counts}"
        if self.outcome not in ("worse", "not proven"):
            if len(gravest) == 1:
                return gravest[0].line
            return f"{gravest[0].line} (and {len(gravest) - 1} more)"
        shown = []
        for verdict in gravest:
            text = verdict.sentence
            if self.outcome == "worse":
                detail = verdict.proof
            else:  # not proven: the change of single samples, the limit, and what would prove it
                # The limit of a rule follows its `<=` or `>=`.
                limit = f"limit {verdict.rule.rpartition('=')[2].strip()}"
                detail = join_texts((verdict.texts["paired"], limit, verdict.advice))
            if detail:
                text += f" ({detail})"
            shown.append(text)
        return f"{self.outcome}: {join_few(shown, LISTED)}"

    @property
    def counts(self) -> str:
        """Return how many verdicts have each status."""
        counts = Counter(verdict.status for verdict in self.verdicts)
        return ", ".join(f"{number} {status}" for status, number in counts.items())

    @property
    def summary(self) -> str:
        """Return the outcome with the counts, and how many samples would prove open verdicts."""
        text = f"{self.outcome}: {self.counts}"
        needed = max((verdict.samples_needed or 0 for verdict in self.verdicts), default=0)
        if self.outcome == "not proven" and needed:
            text += f"; about {needed} samples would prove it"
        return text

    def _list_gravest(self) -> list[Verdict]:
        """Return the verdicts that cause the exit code; if none fails, the inconclusive ones."""
        if self.exit_code:  # not 0: the gate fails
            return [
                verdict
                for verdict in self.verdicts
                if self._find_exit_code(verdict) == self.exit_code
            ]
        return [verdict for verdict in self.verdicts if verdict.status == "inconclusive"]

    def fails(self, verdict: Verdict) -> bool:
        """Say whether a verdict fails the gate."""
        return self._find_exit_code(verdict) is not ExitCode.OK

    def _find_exit_code(self, verdict: Verdict) -> ExitCode:
        if self.strict and not verdict.proven:
            return ExitCode.NOT_PROVEN
        return EXIT.get(verdict.status, ExitCode.OK)


def _write_figure(value: float | None, unit: str) -> str:
    """Write a figure for a sentence: a share in percent, anything else with four digits."""
    if value is None:
        return ""
    return f"{100 * value:.1f}%" if unit == "pp" else f"{value:.4g}"


def format_change(value: float | None, unit: str) -> str:
    """Write a change with its sign: +5%, -2pp, +0.1."""
    if value is None:
        return ""
    value += 0.0  # -0.0 becomes 0.0
    if unit and math.isfinite(value):
        return f"{100 * value:+.3g}{unit}"
    return f"{value:+.3g}"
