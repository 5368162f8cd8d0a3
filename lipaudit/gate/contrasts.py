"""What a rule contrasts: two values for each row or column, and the evidence of a change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from lipaudit.errors import BaselineError, EvaluationError, UsageError
from lipaudit.gate.comparable import (
    REPEAT,
    find_fault,
    has_other_starts,
    has_same_weights,
    require_same_protocol,
)
from lipaudit.gate.pairing import (
    ALL_BUT_FEW,
    RuleValues,
    align_sections,
    is_mean,
    keep_known,
    read,
    spell_radii_as,
)
from lipaudit.gate.rules import BINARY, Rule
from lipaudit.gate.statistics import (
    DIGITS,
    LEAST,
    STATISTICS,
    Evidence,
    Values,
    compute_changes,
    judge_by_bootstrap,
    judge_mean,
    judge_median,
    judge_share,
)
from lipaudit.tables import Report, Section

TOLERANCE = 1e-4
"""Relative accuracy of the norms where their section asks for none: less is no change."""
MOVED = 3
"""How many samples are named that changed most."""
ROUNDING = 1e-6
"""Of a difference of large figures (a margin), as a share of the largest."""


@dataclass(frozen=True)
class Contrast:
    """What one rule finds for one row or column.

    Attributes:
        name: the row or column; empty where there is only one.
        old: the baseline's value, None where the rule needs none.
        new: the current value.
        samples: how many samples the values rest on.
        evidence: of the change; None where the values are compared as they are.
        changes: the paired change for the worse of each sample, which the evidence rests on; None
            where the values are compared as they are.
        moved: the samples that changed most for the worse, the worst first; few of them.
        same: whether weights and values are the baseline's, to the accuracy at which they were
            measured, and the rule asks for no improvement. Of an attack that began elsewhere the
            weights alone decide.
    """

    name: str
    old: float | None
    new: float
    samples: int
    evidence: Evidence | None = None
    changes: Values | None = field(default=None, compare=False, repr=False)
    moved: tuple[str, ...] = ()
    same: bool = False

    @property
    def tested(self) -> Evidence | None:
        """The evidence of a change; None where values are compared as they are, or are equal."""
        return None if self.same else self.evidence


def contrast_values(
    rule: Rule, current: Report, baseline: Report, least: float = ALL_BUT_FEW
) -> list[Contrast]:
    """Return the contrasts of a rule over the shared samples, in the order of the baseline.

    Args:
        rule: what is compared.
        current: the report that is judged.
        baseline: the report it is compared with.
        least: the share of the baseline's samples that has to be shared.

    Raises:
        EvaluationError: when the current report is not finished, finite and converged.
        BaselineError: when the two reports are not comparable.
        UsageError: when the rule matches nothing or makes no sense for its metric.
    """
    new, old = current.section(rule.measure), baseline.section(rule.measure)
    if new is None and old is None:
        raise UsageError(f"{rule.text!r} matches nothing: there is no section {rule.measure}")
    if new is None:
        raise BaselineError(f"the current report has no section {rule.measure}", REPEAT)
    if current.shard is not None:
        raise BaselineError(find_fault(current, new), "Merge it with the others first.")
    if not least and old is not None:
        new, old = keep_known(rule, new, old)
    reading = read_trusted(rule, current, new)
    if rule.limit.kind == "absolute":
        return [Contrast(n, None, value, len(reading.ids)) for n, value in reading.points.items()]
    if old is None:
        raise BaselineError(f"the baseline has no section {rule.measure}", "Save a new baseline.")
    try:
        read_trusted(rule, baseline, old)
    except EvaluationError as error:
        raise BaselineError(f"baseline: {error.message}", "Save a new baseline.") from None
    require_same_protocol(current, baseline, new, old)
    restarted = has_other_starts(new, old) and rule.column not in ("clean", "correct")
    new, old = align_sections(rule, new, old, least)
    same = compute_margin(rule) >= 0 and has_same_weights(current, baseline)
    before = read(rule, old)
    after = spell_radii_as(read(rule, new), before)
    changes = _contrast_rows_or_samples(rule, after, before, _read_accuracy(new))
    return [replace(c, same=same and (c.same or restarted)) for c in changes]


def read_trusted(rule: Rule, report: Report, section: Section) -> RuleValues:
    """Read the values of a rule from a report's section, or refuse them.

    Raises:
        EvaluationError: when they are not finished, finite and converged.
        UsageError: when the rule matches nothing.
    """
    if reason := find_fault(report, section):
        raise EvaluationError(reason, "Let the run finish, or loosen --tol.")
    reading = read(rule, section)
    for name, point in reading.points.items():
        values = reading.pairs.get(name, np.array([point]))
        bad = int((~np.isfinite(values)).sum()) or int(not math.isfinite(point))
        if bad:
            where = f" ({name})" if name else ""
            count = "1 value is" if bad == 1 else f"{bad} values are"
            raise EvaluationError(
                f"{rule.metric}{where}: {count} not finite",
                "A model that yields NaN or infinity cannot be judged.",
            )
    return reading


def compute_margin(rule: Rule) -> float:
    """Return the largest change for the worse that a rule allows, as `Evidence` measures it."""
    limit = float(rule.limit.value)
    value = math.log1p(limit) if rule.limit.kind == "relative" else limit
    return round(rule.worse * value, DIGITS)


def express_change(rule: Rule, worse: float) -> float:
    """Return a change as it is printed: new over old less 1, or new less old."""
    value = rule.worse * worse
    with np.errstate(over="ignore"):
        return float(np.expm1(value)) if rule.limit.kind == "relative" else value


def compare_to_limit(rule: Rule, new: float, old: float | None) -> int:
    """Compare a value with its limit: 1 breaks it, 0 meets it exactly, -1 keeps it.

    In exact decimals of 12 digits, so that 73 % is never below 73 %.
    """
    bound = rule.limit.value
    if old is not None and rule.limit.kind == "relative":
        bound = _to_decimal(float(_to_decimal(old) * (1 + bound)))
    elif old is not None and rule.limit.kind == "difference":
        bound = _to_decimal(float(_to_decimal(old) + bound))
    over = rule.worse * (_to_decimal(new) - bound)
    return (over > 0) - (over < 0)


def _to_decimal(value: float) -> Fraction:
    return Fraction(format(value, f".{DIGITS}g"))


def _contrast_rows_or_samples(
    rule: Rule, new: RuleValues, old: RuleValues, tol: float
) -> list[Contrast]:
    missing = [name for name in old.names if name not in new.names]
    if not (rule.per_sample or rule.stat == "each"):
        missing += [name for name in new.names if name not in old.names]
    if missing:
        which = "; ".join(missing[:8]) + ("; ..." if len(missing) > 8 else "")
        raise BaselineError(f"{rule.metric}: only one of the reports has {which}", REPEAT)
    return [
        _contrast_samples(rule, name, old, new, tol)
        if name in new.pairs and name in old.pairs
        else _contrast_rows(rule, name, old, new, tol)
        for name in old.points
    ]


def _contrast_samples(
    rule: Rule, name: str, old: RuleValues, new: RuleValues, tol: float
) -> Contrast:
    statistic = STATISTICS["median" if rule.stat == "each" else rule.stat]
    before, now = old.pairs[name], new.pairs[name]
    first, last = float(statistic(before)), float(statistic(now))
    if rule.stat == "each" and is_mean(rule):
        first, last = old.points[name], new.points[name]
    return Contrast(
        name,
        old=first,
        new=last,
        samples=before.size,
        evidence=_test_change(rule, before, now),
        changes=_compute_change(rule, before, now),
        moved=_find_moved(rule, before, now, old.ids),
        same=_is_same(rule, before, now, tol),
    )


def _find_moved(rule: Rule, old: Values, new: Values, ids: tuple[str, ...]) -> tuple[str, ...]:
    """Name the samples that changed most for the worse; none where the values are of no sample."""
    worse = _compute_change(rule, old, new)
    first = np.argsort(-worse, kind="stable")[:MOVED] if worse.size == len(ids) else ()
    return tuple(ids[i] for i in first if worse[i] > 0)


def _contrast_rows(
    rule: Rule, name: str, old: RuleValues, new: RuleValues, tol: float
) -> Contrast:
    """Compare the median over rows: that of each sample, where the samples behind are kept.

    A row with a sample that either report has no figure of counts for nothing.
    """
    point = _contrast_points(rule, name, old, new, tol)
    both = [(line, new.pairs[row]) for row, line in old.pairs.items() if row in new.pairs]
    known = [lines for lines in both if np.isfinite(lines).all()]
    if not known:
        return point
    before, now = (np.median(np.stack(lines), axis=0) for lines in zip(*known, strict=True))
    _require_positive(rule, np.append(before, now))
    changes = _compute_change(rule, before, now)
    return replace(
        point,
        samples=changes.size,
        evidence=judge_mean(changes),
        changes=changes,
        moved=_find_moved(rule, before, now, old.ids),
    )


def _contrast_points(
    rule: Rule, name: str, old: RuleValues, new: RuleValues, tol: float
) -> Contrast:
    """Compare two values as they are: the suite itself is the contract."""
    before, now = old.points[name], new.points[name]
    values = np.array([before]), np.array([now])
    _require_positive(rule, np.append(*values))
    return Contrast(name, before, now, len(new.ids), same=_is_same(rule, *values, tol))


def _read_accuracy(section: Section) -> float:
    """Return the relative accuracy of the norms of a section."""
    tol = section.settings.get("tol")
    return max(TOLERANCE, tol) if isinstance(tol, float) else TOLERANCE


def _is_same(rule: Rule, old: Values, new: Values, tol: float) -> bool:
    """Tell whether values are equal to the accuracy at which they were measured."""
    if rule.column in BINARY and rule.per_sample:
        return bool(np.array_equal(old, new))
    scale = float(np.abs(old).max(initial=0.0))
    return bool(np.isclose(new, old, rtol=tol, atol=ROUNDING * scale).all())


def _test_change(rule: Rule, old: Values, new: Values) -> Evidence:
    relative = rule.limit.kind == "relative"
    if rule.stat == "mean" and np.isin((old, new), (0, 1)).all():
        if relative:
            raise UsageError(f"{rule.text!r}: a share changes in points", "Write -2pp, not -2%.")
        worse = rule.worse * (new - old)
        return judge_share(int((worse > 0).sum()), int((worse < 0).sum()), old.size)
    if rule.stat == "max":
        raise UsageError(
            f"{rule.text!r}: how far a maximum changes by chance is not known",
            "Give `max` an absolute limit, or judge p95.",
        )
    _require_positive(rule, np.append(old, new))
    if rule.stat in ("median", "each"):
        judged = judge_median if rule.stat == "median" else judge_mean
        return judged(_compute_change(rule, old, new))
    statistic = STATISTICS[rule.stat]
    return judge_by_bootstrap(
        old,
        new,
        lambda a, b: _compute_change(rule, statistic(a, axis=1), statistic(b, axis=1)),
        LEAST[rule.stat],
    )


def _compute_change(rule: Rule, old: Values, new: Values) -> Values:
    """Return changes for the worse: logarithms of ratios for a relative limit."""
    return rule.worse * compute_changes(old, new, relative=rule.limit.kind == "relative")


def _require_positive(rule: Rule, values: Values) -> None:
    if rule.limit.kind == "relative" and (values < 0).any():
        raise UsageError(
            f"{rule.text!r}: {rule.measure}.{rule.column} takes negative values, a relative "
            "change of them means nothing",
            "Give an absolute change, such as >= -0.1.",
        )
