"""Formats of single values, labels, and domains."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from lipaudit.errors import visible
from lipaudit.tables import Column

MISSING = "–"
# Unicode superscripts, which need no markup; only LaTeX writes them in its own way.
MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡ"
# Formats of counts, names and truth values, which have no status or domain.
UNMEASURED = ("d", "s", "")
STATUS = {
    "certified": "Proven for every input of its domain; it says nothing about others.",
    "exact": "Computed at the samples X; it says nothing about other inputs. A norm may be "
    "slightly too low, see within.",
    "bound": "Proven upper bound, at the samples X only; it says nothing about other inputs.",
    "estimate": "A statistical estimate: it can be too high or too low.",
    "empirical": "What the attacks achieved: a stronger attack may achieve more. It is never a "
    "guarantee.",
}
"""How far a figure is proven, and what it does not say."""


def format_value(value: Any, column: Column) -> str:
    """Format a value as its column defines, with the unit."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return visible(value)
    unit = column.unit if column.unit in ("", "×") else f" {column.unit}"
    return format_significant(value, column.format) + unit


def format_with_limits(value: Any, low: float | None, high: float | None, column: Column) -> Any:
    """Format a figure with limits: 62.5% (43.5 to 79.5%); without limits the figure alone."""
    if value is None or low is None or high is None:
        return value
    return f"{format_value(value, column)} ({format_limits(low, high, column)})"


def format_limits(low: float, high: float, column: Column) -> str:
    """Format the ends of an interval, with the unit once: 43.5 to 79.5%."""
    first, last = format_value(low, column), format_value(high, column)
    return f"{first.removesuffix('%')} to {last}"


def format_number(value: float, spec: str) -> str:
    """Format a number; exponents have no padding (1.2e3, not 1.2e+03)."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    # Counts may be floats in arrays and medians: 12.0 becomes 12; 12.5 stays.
    whole = spec == "d" and value == int(value)
    written = format(int(value), spec) if whole else format(value, spec if spec != "d" else "g")
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].strip("+") + m[2], written)


def format_significant(value: float, spec: str = ".3g") -> str:
    """Keep trailing zeros, so that a column shows equally many digits: 1.20, 130, 9.00e3."""
    if spec.endswith("g"):
        sign = "+" * spec.startswith("+")
        # The flag # keeps trailing zeros, and a final point, which is removed below.
        spec = f"{sign}#{spec.removeprefix(sign)}"
    written = format_number(value, spec)
    return re.sub(r"\.(?=e|$)", "", written)


def write_math(label: str) -> str:
    """Write norms and inequalities with mathematical signs."""
    return label.replace("||", "‖").replace("<=", "≤").replace(">=", "≥")


def describe_standing(column: Column) -> str:
    """Return status and domain of a column: `bound at X`; empty for names and counts."""
    if column.format in UNMEASURED or not column.domain:
        return ""
    where = {"at X": "at X", "ball": "in the ball"}.get(column.domain, f"for {column.domain}")
    return write_math(f"{column.status} {where}")


def list_footnotes(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Return a mark for each column, and a note for each mark.

    Names and counts have no mark. If all columns have the same status and domain, they share one
    note.
    """
    stand = [describe_standing(column) for column in columns]
    groups = list(dict.fromkeys(s for s in stand if s))
    if len(groups) < 2:
        return [""] * len(stand), groups
    mark = dict(zip(groups, MARKS, strict=False))
    return [mark.get(s, "") for s in stand], [f"{mark[g]} {g}" for g in groups]
