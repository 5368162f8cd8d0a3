"""Cells of tables: values with limits, how far they are proven, and columns of pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
STATUS = {
    "certified": "Proven for every input of its domain, of a smoothed classifier with probability "
    "1 - alpha each; it says nothing about others.",
    "exact": "Computed at the samples X; it says nothing about other inputs. A norm may be "
    "slightly too low, see within.",
    "bound": "Proven upper bound, at the samples X only; it says nothing about other inputs.",
    "estimate": "A statistical estimate: it can be too high or too low.",
    "empirical": "What the attacks achieved: a stronger attack may achieve more. It is never a "
    "guarantee.",
}
"""How far a figure is proven, and what it does not say."""


def format_with_limits(value: Any, low: float | None, high: float | None, column: Column) -> Any:
    """Format a figure with limits: 62.5% (43.5 to 79.5%); without limits return it as it is.

    If only the upper limit is known, the figure is an upper limit itself: ≤ 62.5%. Such is a
    robust accuracy if some attacks did not run.
    """
    if value is None or high is None:
        return value
    if low is None:
        return f"≤ {format_value(value, column)}"
    return f"{format_value(value, column)} ({format_limits(low, high, column)})"


def list_footnotes(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Return a mark for each column, and a note for each mark.

    Names and counts have no mark. If all columns have the same status and domain, they share one
    note.
    """
    texts = [describe_standing(column) for column in columns]
    distinct = [text for text in dict.fromkeys(texts) if text]
    if len(distinct) < 2:
        return [""] * len(texts), distinct
    marks = dict(zip(distinct, MARKS, strict=False))
    notes = [f"{mark} {text}" for text, mark in marks.items()]
    return [marks.get(text, "") for text in texts], notes


# Columns of pages


HEADINGS: Mapping[str, Column] = {
    column.label: column
    for column in (
        Column.text("head", "LAYER.HEAD, a layer or the model. Both are counted from 0."),
        Column.text("model", "The checkpoint, as given for MODEL."),
        Column.text("fact", "What a report says of its model, data and run."),
        Column.text("figure", "A column of a section, with the attack or radius where needed."),
        Column.text("for comparison", "The same figure of known models, on their own data."),
        # samples
        Column.text("sample", "A sample by the first characters of its id, a hash of its values."),
        Column.text("place", "Where a sample is: file of a folder, line of a table, or index."),
        Column.text("broken", "Smallest radius, for each norm, at which an attack broke it."),
        Column("value", "The value for the sample on this page.", format=""),
        Column("all", "Median over all samples, or the share of yes.", format=""),
        Column("from the worst", "Rank of a sample among all; 1 is the worst.", format=""),
        # bounds
        Column.text("bound", "An upper bound on a norm, by its name; in a chart its value."),
        Column.text("status", "How far a figure is proven. Of a report: complete or partial."),
        Column.text("holds", "Where a bound holds: at the samples X, or on a set of inputs."),
        Column.count("heads", "Number of heads with a finite value."),
        Column("median", "Median of bound / exact over the heads.", unit="×", domain=""),
        Column("largest", "Largest bound / exact over the heads.", unit="×", domain=""),
        # attention maps
        Column("P", "The attention map: a row per query, a column per key, rows adding up to 1."),
        Column("mean P", "The attention that a key receives: mean over the queries."),
        Column("rows", "Share of the attention rows of a layer.", format=".0%"),
        Column(
            "share of the gradient",
            "||grad_t m||^2 / sum_s ||grad_s m||^2 of token t, for the gradient of the margin "
            "m = f_y - max_(j != y) f_j. A small change of a token with a large share changes "
            "the decision most. It does not explain the decision.",
            format=".1%",
        ),
        Column(
            "share of the steepest direction",
            "||v_t||^2 of token t, where the output changes most along the unit change v. "
            "v converges later than the norm.",
            format=".1%",
            status="estimate",
        ),
        # comparisons and the gate
        Column.text("metric", "What a rule judges: a column and a statistic."),
        Column.text("rule", "A check of the gate: METRIC[@SELECTOR][:STATISTIC] OP LIMIT."),
        Column.text("row", "The row of a section that a rule judges: a head, an attack."),
        Column.text("verdict", "Such as pass or regressed: see `lipaudit explain regressed`."),
        Column("old", "Value of the first report, on the shared samples.", format=""),
        Column("new", "Value of the report compared with the first.", format=""),
        Column("baseline", "Value of the report to compare with.", format=""),
        Column("current", "Value of the judged report, on the shared samples.", format=""),
        Column.text("change", "New against old: relative (%), in points (pp) or a difference."),
        Column.text("paired", "The tested change: median over samples, for heads geometric mean."),
        Column.text("limits", "Interval of the paired change, for each row alone, at 1 - alpha."),
        Column.text("95% limits", "Interval of the paired change, for each figure alone."),
        Column.count("samples", "Number of shared samples."),
        Column.text("group", "A group of samples: --group-column names the column."),
        Column("p (groups)", "p-value of: no change, for all groups.", format=".2g", domain=""),
        Column.text("predictions", "How the prediction of a sample moved between two reports."),
        Column.text("share", "Of predictions: share of the samples that both reports have."),
        Column.text("outcome", "Of a ranking: best, behind the best or not distinguishable."),
        Column.count("lost", "Samples that were right, robust or certified and no longer are."),
        Column.count("gained", "Samples that are right, robust or certified and were not."),
        Column("McNemar", "Exact p-value of: as many lost as gained.", format=".2g", domain=""),
        Column.text("became", "The sample's result in the first and in the other report."),
        Column("p (Holm)", "p-value of: no change, for all heads.", format=".2g", domain=""),
        Column("stands", "Whether the change is proven, corrected over all heads.", format=""),
        # several models
        Column.count("rank", "1 for the best model and all not distinguishable from it."),
        Column("difference", "Paired, from the best model, with corrected limits.", domain=""),
    )
}
"""Columns of the sections that a page makes: comparisons, rankings, verdicts, samples."""


def pick_columns(*headings: str, **others: str) -> dict[str, Column]:
    """Return columns of pages: by their headings, others by the names of their cells."""
    names = dict(zip(headings, headings, strict=True)) | others
    return {name: HEADINGS[heading] for name, heading in names.items()}
