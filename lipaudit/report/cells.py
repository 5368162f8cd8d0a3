"""How one value, one label and one domain are written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from lipaudit.errors import visible
from lipaudit.tables import Column

MISSING = "–"
# Superscripts of Unicode, which no format has to mark up; LaTeX writes them as such.
MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡ"
# Formats of counts, names and yes or no: read off, so no status or domain belongs to them.
UNMEASURED = ("d", "s", "")
STATUS = {
    "certified": "Proven for every input of its domain",
    "exact": "Computed at the samples X; a norm may be slightly too low, see within",
    "bound": "Proven upper bound, at the samples X only",
    "estimate": "A statistical estimate",
    "empirical": "What the attacks achieved",
}
"""How far a figure is proven."""
LIMITS = {
    "certified": "It says nothing outside that domain.",
    "exact": "It says nothing about other inputs.",
    "bound": "It says nothing about other inputs.",
    "estimate": "It can be too high or too low.",
    "empirical": "A stronger attack may achieve more: it is never a guarantee.",
}
"""Limits of each status."""


def format_value(value: Any, column: Column) -> str:
    """Write a value in its column's format, with its unit behind it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return show_controls(value)
    unit = column.unit if column.unit in ("", "×") else f" {column.unit}"
    return format_significant(value, column.format) + unit


def format_with_limits(value: Any, low: float | None, high: float | None, column: Column) -> Any:
    """Write the limits behind a figure: 62.5% (43.5 to 79.5%); a figure without stays as it is."""
    if value is None or low is None or high is None:
        return value
    return f"{format_value(value, column)} ({format_limits(low, high, column)})"


def format_limits(low: float, high: float, column: Column) -> str:
    """Write the ends of an interval, with the unit once: 43.5 to 79.5%."""
    first, last = format_value(low, column), format_value(high, column)
    return f"{first.removesuffix('%')} to {last}"


def format_number(value: float, spec: str) -> str:
    """Write a number; exponents without padding (1.2e3, not 1.2e+03)."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    # Counts may have become floats in arrays and medians: 12.0 is written 12, 12.5 as it is.
    whole = spec == "d" and value == int(value)
    written = format(int(value), spec) if whole else format(value, spec if spec != "d" else "g")
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].strip("+") + m[2], written)


def format_significant(value: float, spec: str = ".3g") -> str:
    """Keep trailing zeros, so that a column shows equally many digits: 1.20, 130, 9.00e3."""
    if spec.endswith("g"):
        sign = "+" * spec.startswith("+")
        # The flag # keeps trailing zeros, and a point at the end, which is taken off below.
        spec = f"{sign}#{spec.removeprefix(sign)}"
    written = format_number(value, spec)
    return re.sub(r"\.(?=e|$)", "", written)


def show_controls(value: str) -> str:
    """Show control characters (terminal escapes in a model's name) instead of obeying them."""
    return visible(value)


def write_math(label: str) -> str:
    """Write norms and inequalities as mathematics does."""
    return label.replace("||", "‖").replace("<=", "≤").replace(">=", "≥")


def describe_standing(column: Column) -> str:
    """Say how far a column is proven, and where: `bound at X`; names and counts are not proven."""
    if column.format in UNMEASURED or not column.domain:
        return ""
    where = {"at X": "at X", "ball": "in the ball"}.get(column.domain, f"for {column.domain}")
    return write_math(f"{column.status} {where}")


def list_footnotes(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Return a mark for each column, and a note for each mark.

    Names and counts carry none; where all columns stand alike, one note speaks for all.
    """
    stand = [describe_standing(column) for column in columns]
    groups = list(dict.fromkeys(s for s in stand if s))
    if len(groups) < 2:
        return [""] * len(stand), groups
    mark = dict(zip(groups, MARKS, strict=False))
    return [mark.get(s, "") for s in stand], [f"{mark[g]} {g}" for g in groups]
