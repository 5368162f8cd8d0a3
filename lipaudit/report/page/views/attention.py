"""Heads: how their attention rows are distributed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lipaudit.report.blocks import Block, Curve, Density, Histogram, Passage, Series
from lipaudit.report.page.views.common import (
    CHARACTERS,
    every_row,
    heatmap,
    spread,
    table,
    top,
)
from lipaudit.results import Array, AttentionRow, Column, Section
from lipaudit.results.figures import typed
from lipaudit.results.report import Attended

if TYPE_CHECKING:
    pass

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
RATIO, RATIO_EDGES = "g1_ratio_hist", "g1_ratio_edges"
COUNT = Column(label="rows", meaning="Attention rows.", format="d")
KEY = Column(label="key", meaning="Position of the key.", format="d")
WEIGHT = Column(label="P", meaning="Attention probability.")
RECEIVED = Column(label="mean P", meaning="Attention that a key receives, mean over queries.")
CLS = "CLS"
"""How the token for the class is written, of pictures."""
FIRST = "first sample"


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
        columns["intermediate"],
    )
    yield heatmap("g1, mean over rows", rows, lambda row: row.g1, columns["g1"])
    fragile = top(rows, "intermediate", TOP)
    yield table("Most intermediate heads", section, fragile, FRAGILE)
    yield table("Strongest sinks", section, top(rows, "sink_max", SINKS), SUNK)
    yield from _pictures(section)
    yield every_row(section)


def side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare how the statistics are distributed over heads and over rows, and what was drawn."""
    yield from spread(sections, ("g1", "intermediate", "gk_ratio", "softmax_norm", "entropy"))
    yield from _ratios(sections)
    yield from _joints(sections)
    for label, section in sections.items():
        yield from (replace(b, title=f"{label}: {b.title}") for b in drawn(section))


def _pictures(section: Section) -> Iterator[Block]:
    yield from _ratios({"rows": section})
    yield from _joints({"": section})
    yield from drawn(section)


def _ratios(sections: Mapping[str, Section]) -> Iterator[Histogram]:
    """Count g_1 / ||M|| over all rows, reports with equal bins in one picture."""
    arrays = {k: s.arrays for k, s in sections.items() if s.arrays.keys() >= {RATIO, RATIO_EDGES}}
    column = next(iter(sections.values())).columns()["g1_ratio"]
    for edges in dict.fromkeys(kept[RATIO_EDGES].data for kept in arrays.values()):
        counts = {
            label: kept[RATIO].numpy().sum(axis=0).tolist()
            for label, kept in arrays.items()
            if kept[RATIO_EDGES].data == edges
        }
        used = [i for group in counts.values() for i, count in enumerate(group, 1) if count]
        last = max(used, default=len(edges) - 1)
        shown = {label: tuple(group[:last]) for label, group in counts.items()}
        ends = tuple(edge or 0.0 for edge in edges[: last + 1])
        yield Histogram("g1 over the exact ‖M‖, all rows", column, ends, shown)


def _joints(sections: Mapping[str, Section]) -> Iterator[Density]:
    for label, section in sections.items():
        if section.arrays.keys() >= {"p1p2_hist", "p1p2_edges"}:
            block = _joint(section)
            yield replace(block, title=f"{label}: {block.title}" if label else block.title)


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


def drawn(section: Section) -> Iterator[Density | Curve | Passage]:
    """Show the attention map that was kept (map@HEAD), or the row (row@HEAD,QUERY)."""
    for name, array in section.arrays.items():
        kind, _, which = name.partition("@")
        whose = section.attended.get(name)
        if kind == "map" and array.data:
            yield _map(which, array, section.arrays[f"map_tokens@{which}"], whose)
            if whose is not None:
                yield from _received(which, array, whose)
        elif kind == "row":
            keys = tuple(map(float, range(len(array.data))))
            series = Series(f"head {which.partition(',')[0]}", keys, tuple(array.numpy()))
            yield Curve(_row_title(which, section), KEY, WEIGHT, (series,))
        elif kind == "first_row" and whose is not None:
            head, _, query = which.partition(",")
            title = f"query {_called(int(query), whose)}, head {head}, {_sample(whose)}"
            yield _over(f"Attention of {title}", array.data, whose, WEIGHT)


def _received(head: str, array: Array, whose: Attended) -> Iterator[Density | Passage]:
    """Lay a map over its sample: the mean of its rows, and that of the token for the class."""
    values = array.numpy()
    title = f"head {head}, {_sample(whose)}"
    yield _over(f"Attention received, mean over queries, {title}", values.mean(0), whose, RECEIVED)
    if whose.grid != (0, 0) and whose.tokens[0] == CLS:
        yield _over(f"Attention of query {CLS}, {title}", values[0], whose, WEIGHT)


def _over(
    title: str, values: Iterable[float | None], whose: Attended, column: Column
) -> Density | Passage:
    """Lay values of tokens over a text, or over a picture those of its patches."""
    known = tuple(value or 0.0 for value in values)[: len(whose.tokens)]
    rows, columns = whose.grid
    if not rows * columns:
        return Passage(title, whose.tokens, known, column)
    patches = known[whose.first :]
    outside = sum(known) - sum(patches[: rows * columns])
    return Density(
        title=f"{title} ({outside:.0%} on other tokens)" if whose.first else title,
        x=Column(label="column", meaning="Of patches, from the left.", format="d"),
        y=Column(label="row", meaning="Of patches, from the top.", format="d"),
        values=tuple(patches[i * columns : (i + 1) * columns] for i in range(rows)),
        x_range=(-0.5, columns - 0.5),
        y_range=(-0.5, rows - 0.5),
        value=column,
        down=True,
        image=whose.image,
    )


def _sample(whose: Attended) -> str:
    return f"sample {whose.sample[:CHARACTERS]}"


def _called(token: int, whose: Attended) -> str:
    """Name a token by its position, and as it is written."""
    return f"{token} ({whose.tokens[token]})" if token < len(whose.tokens) else str(token)


def _map(head: str, array: Array, tokens: Array, whose: Attended | None) -> Density:
    queries, keys = tokens.numpy().tolist()
    block = -(-int(max(queries, keys)) // max(array.shape))
    blocks = f", means of {block} x {block} tokens" if block > 1 else ""
    return Density(
        title=f"Attention map of head {head}, {_sample(whose) if whose else FIRST}{blocks}",
        x=KEY,
        y=Column(label="query", meaning="Position of the query.", format="d"),
        values=tuple(map(tuple, array.numpy().tolist())),
        x_range=(-0.5, keys - 0.5),
        y_range=(-0.5, queries - 0.5),
        value=WEIGHT,
        down=True,
        names=whose.tokens if whose else (),
    )


def _row_title(which: str, section: Section) -> str:
    head, _, query = which.partition(",")
    norm, g1 = section.arrays[f"row_norms@{which}"].numpy()
    return f"Query {query} of head {head}, mean over samples: ‖M‖ = {norm:.3f}, g1 = {g1:.3f}"
