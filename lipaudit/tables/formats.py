"""Texts of single values: numbers with their unit, intervals, labels, names of samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lipaudit.errors import visible

if TYPE_CHECKING:
    from lipaudit.tables.columns import Column
    from lipaudit.tables.report import Report

MISSING = "–"
# Formats of counts, names and truth values, which have no status or domain.
UNMEASURED = ("d", "s", "")
# Number of characters of a sample's id that are shown.
CHARACTERS = 12
# Number of characters of a text shown after its place.
LETTERS = 40
DOMAINS = {
    "at X": "at the measured samples",
    "ball": "in the ball",
    "all inputs, every ||x_i|| <= R": "for any input with tokens of no larger norm than measured",
    "all inputs, every ||x_i|| <= R + r": "for any input with tokens of norms at most r larger "
    "than measured",
    "||X' - X||_F <= r": "within the distance r of the measured samples",
    "the weights": "of the weights",
}
"""Where a figure holds, in words, by the domain of its column."""
STATUSES = {"exact": "computed"}
"""Words of pages for a status: `exact` may be too low by the error of the solver."""
BRIEF_DOMAINS = {"all inputs, every ||x_i|| <= R": "for all inputs as short"}
"""The same for a cell, where the words of `DOMAINS` have no room."""


def format_value(value: Any, column: Column) -> str:
    """Format a value as its column defines, with the unit."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return visible(value)
    unit = column.unit
    if unit not in ("", "×"):
        unit = f" {unit}"
    return format_significant(value, column.format) + unit


def format_count(number: int, noun: str = "sample") -> str:
    """Write a number and its noun in the right form: 1 sample, 2 samples."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def format_limits(low: float, high: float, column: Column) -> str:
    """Format an interval, with the unit only after the second number: 43.5 to 79.5%."""
    first = format_value(low, column)
    last = format_value(high, column)
    return f"{first.removesuffix('%')} to {last}"


def format_number(value: float, spec: str) -> str:
    """Format a number by a format specification; exponents are short (1.2e3, not 1.2e+03)."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    # Counts may be floats in arrays and medians: 12.0 becomes 12; 12.5 stays.
    if spec != "d":
        written = format(value, spec)
    elif value == int(value):
        written = format(int(value), spec)
    else:
        written = format(value, "g")
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].strip("+") + m[2], written)


def format_significant(value: float, spec: str = ".3g") -> str:
    """Format a number with trailing zeros, so that all have equally many digits: 1.20, 9.00e3."""
    if spec.endswith("g"):
        # The flag # keeps trailing zeros. It also keeps a final point, as in "130.": the last
        # line removes it.
        digits = spec.removeprefix("+")
        sign = spec.removesuffix(digits)
        spec = f"{sign}#{digits}"
    return re.sub(r"\.(?=e|$)", "", format_number(value, spec))


def write_math(label: str) -> str:
    """Write norms and inequalities with mathematical signs."""
    return label.replace("||", "‖").replace("<=", "≤").replace(">=", "≥")


def describe_domain(column: Column, *, brief: bool = False) -> str:
    """Return in words for which inputs a figure holds; `brief` for a cell of a table."""
    if brief and column.domain in BRIEF_DOMAINS:
        return BRIEF_DOMAINS[column.domain]
    return DOMAINS.get(column.domain) or write_math(f"for {column.domain}")


def describe_standing(column: Column) -> str:
    """Return status and domain of a column: `certified, in the ball`.

    Columns of names, counts and truth values have neither: the result is empty.
    """
    if column.format in UNMEASURED or not column.domain:
        return ""
    status = STATUSES.get(column.status, column.status)
    return f"{status}, {describe_domain(column)}"


def join_texts(texts: Iterable[str]) -> str:
    """Join the texts that are not empty by commas."""
    return ", ".join(filter(None, texts))


def describe_places(report: Report) -> dict[str, str]:
    """Return the place of each sample in the data; of a text, also its first letters.

    For example, `row 3`, or `row 3 "a very good film"` with the text in quotes.
    """
    places = {}
    for name, place in report.places.items():
        text = report.texts.get(name)
        if text is not None:
            place += f' "{text[:LETTERS]}"'
        places[name] = place
    return places


def name_sample(sample: str, places: Mapping[str, str]) -> str:
    """Name a sample by the beginning of its id and its place."""
    return join_texts([sample[:CHARACTERS], places.get(sample, "")])
