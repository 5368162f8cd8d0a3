"""Heads: how their attention rows are distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lipaudit.report.blocks import Block, Density, Histogram
from lipaudit.report.views.common import (
    every_row,
    heatmap,
    largest,
    spread,
    table,
    typed,
)
from lipaudit.results import AttentionRow, Column, Section

TOP = 10
FRAGILE = (
    "head",
    "intermediate",
    "uniform",
    "categorical",
    "g1",
    "g1_max",
    "softmax_norm",
    "g1_ratio",
    "support",
)
SINKS = 5
SUNK = ("head", "sink_max", "sink_token", "sink_first", "entropy_normalized")
COUNT = Column(label="rows", meaning="Attention rows.", format="d")


def view(section: Section) -> Iterator[Block]:
    """Map the fragile regime and g1, list the most fragile heads and the strongest sinks."""
    rows = typed(section, AttentionRow)
    if not rows:
        return
    columns = section.columns()
    yield heatmap(
        "Share of rows in the intermediate (fragile) regime",
        rows,
        lambda row: row.intermediate,
        columns["intermediate"].model_copy(update={"format": ".0%"}),
    )
    g1 = columns["g1"].model_copy(update={"format": ".3f"})
    yield heatmap("g1, mean over rows", rows, lambda row: row.g1, g1)
    fragile = largest(rows, "intermediate", TOP)
    yield table("Most intermediate heads", section, fragile, FRAGILE)
    yield table("Strongest sinks", section, largest(rows, "sink_max", SINKS), SUNK)
    yield from _pictures(section)
    yield every_row(section)


def compare(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare how the statistics are distributed over heads."""
    yield from spread(sections, ("g1", "intermediate", "gk_ratio", "softmax_norm", "entropy"))


def _pictures(section: Section) -> Iterator[Block]:
    arrays = section.arrays
    if "g1_ratio_hist" in arrays and "g1_ratio_edges" in arrays:
        counts = arrays["g1_ratio_hist"].numpy().sum(axis=0)
        last = max((i for i, count in enumerate(counts, 1) if count), default=len(counts))
        edges = tuple(map(float, arrays["g1_ratio_edges"].numpy()[: last + 1]))
        rows = {"rows": tuple(map(float, counts[:last]))}
        yield Histogram(
            "g1 over the exact ‖M‖, all rows", section.columns()["g1_ratio"], edges, rows
        )
    if "p1p2_hist" in arrays and "p1p2_edges" in arrays:
        yield _joint(section)
    if "map" in arrays and arrays["map"].data:
        yield _map(section)


def _joint(section: Section) -> Density:
    import numpy as np

    # edges are common to both axes, or a row for each
    edges = np.atleast_2d(section.arrays["p1p2_edges"].numpy())
    p1, p2 = ((float(axis[0]), float(axis[-1])) for axis in (edges[0], edges[-1]))
    counts = section.arrays["p1p2_hist"].numpy().T  # the array's first axis is p(1)
    columns = section.columns()
    return Density(
        "Largest and second largest entry of a row, all rows",
        columns["top1"],
        columns["top2"],
        tuple(map(tuple, counts.tolist())),
        p1,
        p2,
        COUNT,
    )


def _map(section: Section) -> Density:
    values = section.arrays["map"].numpy()
    queries, keys = values.shape
    return Density(
        title=f"Attention map of head {section.settings.get('map', '?')}",
        x=Column(label="key", meaning="Position of the key.", format="d"),
        y=Column(label="query", meaning="Position of the query.", format="d"),
        values=tuple(map(tuple, values.tolist())),
        x_range=(-0.5, keys - 0.5),
        y_range=(-0.5, queries - 0.5),
        value=Column(label="P", meaning="Attention probability."),
        down=True,
    )
