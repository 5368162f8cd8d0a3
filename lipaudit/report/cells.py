"""Cells of tables: values with limits, how far they are proven, and columns of pages."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from lipaudit.tables import Column
from lipaudit.tables.formats import MISSING as MISSING
from lipaudit.tables.formats import UNMEASURED as UNMEASURED
from lipaudit.tables.formats import describe_domain as describe_domain
from lipaudit.tables.formats import describe_standing as describe_standing
from lipaudit.tables.formats import format_limits as format_limits
from lipaudit.tables.formats import format_number as format_number
from lipaudit.tables.formats import format_significant as format_significant
from lipaudit.tables.formats import format_value as format_value
from lipaudit.tables.formats import write_math as write_math

# Unicode superscripts, which need no markup; only LaTeX writes them in its own way.
MARKS = "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡ"


@cache
def read_words() -> dict[str, Any]:
    """Return the words of pages and their meanings: the tables of words.toml."""
    file = files("lipaudit.report").joinpath("words.toml")
    return tomllib.loads(file.read_text("utf-8"))


STATUS: Mapping[str, str] = read_words()["status"]
"""How far a figure is proven, and what it does not say."""


def format_with_limits(value: Any, low: float | None, high: float | None, column: Column) -> Any:
    """Format a figure with its confidence limits: 62.5% (43.5 to 79.5%).

    Without limits, return the figure unchanged. If only the upper limit is known, the figure is
    itself an upper limit: ≤ 62.5%. A robust accuracy is an upper limit if some attacks did not
    run.
    """
    if value is None or high is None:
        return value
    if low is None:
        return f"≤ {format_value(value, column)}"
    return f"{format_value(value, column)} ({format_limits(low, high, column)})"


def list_footnotes(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Return a footnote mark for each column, and the footnote of each mark.

    A footnote says how far the figures of a column are proven (status), and at which inputs
    (domain). Names and counts have no footnote. If all other columns share one footnote, no column
    needs a mark.
    """
    texts = [describe_standing(column) for column in columns]
    distinct = [text for text in dict.fromkeys(texts) if text]
    if len(distinct) < 2:
        return [""] * len(texts), distinct
    mark_of = dict(zip(distinct, MARKS, strict=False))  # there are more marks than footnotes
    notes = [f"{mark} {text}" for text, mark in mark_of.items()]
    return [mark_of.get(text, "") for text in texts], notes


# Columns of pages


HEADINGS = {label: Column(label, **how) for label, how in read_words()["headings"].items()}
"""Columns of the sections that a page makes: comparisons, rankings, verdicts, samples."""


def pick_columns(*headings: str, **others: str) -> dict[str, Column]:
    """Return columns of pages: by their headings, others by the names of their cells."""
    names = dict(zip(headings, headings, strict=True)) | others
    return {name: HEADINGS[heading] for name, heading in names.items()}
