"""Attention as pictures: maps and rows laid over their sample, and histograms of all rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from lipaudit.report.blocks import Passage
from lipaudit.report.page.views import Sections, find_columns
from lipaudit.report.pictures import Curve, Density, Histogram, Series
from lipaudit.tables import Array, Column, Section
from lipaudit.tables.report import Attended

COUNT = Column(label="rows", meaning="Attention rows.", format="d")
KEY = Column(label="key", meaning="Position of the key.", format="d")
QUERY = Column(label="query", meaning="Position of the query.", format="d")
WEIGHT = Column(label="P", meaning="Attention probability.")
RECEIVED = Column(label="mean P", meaning="Attention that a key receives, mean over queries.")
CLS = "CLS"
"""Label of a vision transformer's class token."""


def count_ratios(sections: Sections) -> Iterator[Histogram]:
    """Return histograms of g1 / ||M|| over all rows; reports with equal bins share a picture."""
    names = {"g1_ratio_hist", "g1_ratio_edges"}
    arrays = {k: s.arrays for k, s in sections.items() if s.arrays.keys() >= names}
    for edges in dict.fromkeys(each["g1_ratio_edges"].data for each in arrays.values()):
        counts = {
            label or "rows": each["g1_ratio_hist"].numpy().sum(axis=0).tolist()
            for label, each in arrays.items()
            if each["g1_ratio_edges"].data == edges
        }
        used = [i for group in counts.values() for i, count in enumerate(group, 1) if count]
        last = max(used, default=len(edges) - 1)  # empty bins at the end are not drawn
        ends = tuple(edge or 0.0 for edge in edges[: last + 1])
        shown = {label: tuple(group[:last]) for label, group in counts.items()}
        column = find_columns(sections)["g1_ratio"]
        yield Histogram("g1 over the exact ‖M‖, all rows", column, ends, shown)


def draw_joints(sections: Sections) -> Iterator[Density]:
    """Draw the joint histogram of the two largest entries of a row."""
    import numpy as np

    for label, section in sections.items():
        if not section.arrays.keys() >= {"p1p2_hist", "p1p2_edges"}:
            continue
        # edges are shared by both axes, or a row for each
        edges = np.atleast_2d(section.arrays["p1p2_edges"].numpy())
        p1, p2 = ((float(axis[0]), float(axis[-1])) for axis in (edges[0], edges[-1]))
        counts = section.arrays["p1p2_hist"].numpy().T  # the array's first axis is p(1)
        columns = section.columns
        title = "Largest and second largest entry of a row, all rows"
        yield Density(
            f"{label}: {title}" if label else title,
            columns["top1"],
            columns["top2"],
            tuple(map(tuple, counts.tolist())),
            p1,
            p2,
            COUNT,
        )


def draw_attention(sections: Sections) -> Iterator[Density | Curve | Passage]:
    """Draw the attention map (map@HEAD) or row (row@HEAD,QUERY) of each report that has one."""
    for label, section in sections.items():
        for name, array in section.arrays.items():
            for block in _draw_array(name, array, section):
                yield replace(block, title=f"{label}: {block.title}") if label else block


def _draw_array(name: str, array: Array, section: Section) -> Iterator[Density | Curve | Passage]:
    kind, _, which = name.partition("@")
    head, _, query = which.partition(",")
    whose = section.attended.get(name)
    of = f"head {head}, sample {whose.sample[:12]}" if whose else f"head {head}, first sample"
    if kind == "map" and array.data:
        values = array.numpy()
        queries, keys = section.arrays[f"map_tokens@{which}"].numpy().tolist()
        # Long maps are stored as means of square blocks; the last block may be narrower.
        block = -(-int(max(queries, keys)) // max(array.shape))
        means = f", means of {block} x {block} tokens" if block > 1 else ""
        yield Density(
            title=f"Attention map of {of}{means}",
            x=KEY,
            y=QUERY,
            values=tuple(map(tuple, values.tolist())),
            x_range=(-0.5, keys - 0.5),
            y_range=(-0.5, queries - 0.5),
            value=WEIGHT,
            down=True,
            names=whose.tokens if whose else (),
        )
        if whose:
            title = f"Attention received, mean over queries, {of}"
            yield _lay_over(title, values.mean(0), whose, RECEIVED)
        if whose and whose.grid != (0, 0) and whose.tokens[0] == CLS:
            yield _lay_over(f"Attention of query {CLS}, {of}", values[0], whose, WEIGHT)
    elif kind == "row":
        norm, g1 = section.arrays[f"row_norms@{which}"].numpy()
        figures = f"‖M‖ = {norm:.3f}, g1 = {g1:.3f}"
        keys = tuple(map(float, range(len(array.data))))
        line = Series(f"head {head}", keys, tuple(array.numpy()))
        title = f"Query {query} of head {head}, mean over samples: {figures}"
        yield Curve(title, KEY, WEIGHT, (line,))
    elif kind == "first_row" and whose:
        at = int(query)
        token = f" ({whose.tokens[at]})" if at < len(whose.tokens) else ""
        yield _lay_over(f"Attention of query {at}{token}, {of}", array.data, whose, WEIGHT)


def _lay_over(
    title: str, values: Iterable[float | None], whose: Attended, column: Column
) -> Density | Passage:
    """Overlay values of tokens on a text, or values of patches on a picture."""
    known = tuple(value or 0.0 for value in values)[: len(whose.tokens)]
    rows, columns = whose.grid
    if not rows * columns:
        return Passage(title, whose.tokens, known, column)
    patches = known[whose.first :][: rows * columns]
    # The class token and registers are not patches: a picture cannot show their values.
    outside = sum(known) - sum(patches)
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
