"""Chapters of heads: exact norms beside their upper bounds, and distributions of attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from lipaudit.report.blocks import Block, Passage, Table, make_table
from lipaudit.report.cells import write_math
from lipaudit.report.page.common import (
    CHARACTERS,
    HEAD,
    compare_spread,
    find_values,
    map_heads,
    name_head,
    pair_points,
    pick_top,
    stack_rows,
    tabulate,
    tabulate_all,
)
from lipaudit.report.pictures import Curve, Density, Histogram, Scatter, Series
from lipaudit.results import Array, Column, Row, Section
from lipaudit.results.bounds import ranked
from lipaudit.results.figures import finite, log10_ratio, middle
from lipaudit.results.report import Attended, rows_of

# Norms and bounds


TOP = 10
CERTIFIED = ("ball_sharp", "mean_field", "castin", "hu")
"""Constants on balls, usually the smallest first."""


def view_bounds(section: Section) -> Iterator[Block]:
    """Map the exact norms, list the most amplifying heads, and judge each bound."""
    rows = rows_of(section)
    if not rows:
        return
    exact = section.columns["exact"]
    yield map_heads("Exact ‖J‖ of every head", find_values(section, "exact"), exact)
    yield _tabulate_steepest(section, rows)
    yield _tabulate_tightness(section, rows)
    yield from _plot_bounds(section, rows)
    yield tabulate_all(section)


def view_balls(section: Section) -> Iterator[Block]:
    """Compare the norms found on balls with the certified constants, radius by radius."""
    rows = rows_of(section)
    columns = section.columns
    radii = sorted({row.r for row in rows})
    groups = [[row for row in rows if row.r == r] for r in radii]

    def divide(above: str, below: str) -> list[list[float]]:
        # With infinite ones: a median of the others would look better than the bounds are.
        pairs = [[(row[above], row[below]) for row in g] for g in groups]
        return [[a / b for a, b in group if a is not None and b] for group in pairs]

    sharp = divide("ball_sharp", "ball_norm")
    shown = [
        (columns["r"], radii),
        (Column("heads", "Heads with a constant.", format="d"), map(len, sharp)),
        (
            _as_multiple(columns["ball_norm"]),
            [middle(finite(gains)) for gains in divide("ball_norm", "exact")],
        ),
    ]
    for name in CERTIFIED:
        medians = [median(each) if each else None for each in divide(name, "ball_norm")]
        shown.append((_as_multiple(columns[name]), medians))
    worst = replace(_as_multiple(columns["ball_sharp"]), label="ball sharp, largest")
    shown.append((worst, [max(each, default=None) for each in sharp]))
    title = "Norm found as a multiple of exact; constants as multiples of the norm found"
    yield make_table(title, shown)
    yield tabulate_all(section)


def compare_bounds(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare the distributions of norms and bounds over the heads of several models."""
    bounds = (bound.name for bound in ranked() if bound.better)
    yield from compare_spread(
        sections, ("exact", *bounds, "sharp_ratio_max", "p_norm", "splitting_gain")
    )


def compare_layers(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the layers of several models side by side."""
    yield stack_rows(sections, ("exact", "exact_out", "sharp_rss", "sharp_sum"), ("layer",))


def compare_balls(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the norms found on balls and the constants of several models side by side."""
    yield stack_rows(sections, ("ball_norm", "ball_sharp"), ("layer", "head", "r"))


def _tabulate_steepest(section: Section, rows: list[Row]) -> Table:
    columns = section.columns
    rows = pick_top(rows, "exact", TOP)
    names = [bound.name for bound in ranked()]
    shown: list[tuple[Column, list[Any]]] = [(HEAD, [name_head(row) for row in rows])]
    if any(row.input not in ("", "one input") for row in rows):
        shown.append((columns["input"], [row.input for row in rows]))
    shown.append((columns["exact"], [row.exact for row in rows]))
    for name in names:
        multiples = [_compute_multiple(log10_ratio(row, name)) for row in rows]
        if any(multiple is not None for multiple in multiples):
            shown.append((_as_multiple(columns[name]), multiples))
    return make_table("Most amplifying heads; each bound as a multiple of exact", shown)


def _tabulate_tightness(section: Section, rows: list[Row]) -> Table:
    columns = section.columns
    lines = []
    for bound in ranked():
        ratios = [log10_ratio(row, bound.name) for row in rows]
        column = columns[bound.name]
        domain = write_math(column.domain)
        known = finite(ratios)
        worst = _compute_multiple(max(known)) if known else None
        typical = _compute_multiple(middle(ratios))
        lines.append((column.label, column.status, domain, len(known), typical, worst))
    shown = (
        Column(label="bound", meaning="Name of the bound.", format="s"),
        Column(label="status", meaning="How far it is proven.", format="s"),
        Column(label="holds", meaning="Where it holds.", format="s"),
        Column(label="heads", meaning="Heads with this bound.", format="d"),
        Column(label="median", meaning="Of bound / exact; 1 is tight.", unit="×", domain=""),
        Column(label="largest", meaning="Of bound / exact.", unit="×", domain=""),
    )
    title = "Tightness over all heads: bound / exact, medians over samples"
    return Table(title, shown, tuple(lines))


def _plot_bounds(section: Section, rows: list[Row]) -> Iterator[Block]:
    exact, names = [row.exact for row in rows], [f"head {name_head(row)}" for row in rows]
    series: list[Series] = []
    for bound in ranked():
        series += pair_points(bound.label, exact, [row[bound.name] for row in rows], names)
    if series:
        limit = Column(label="bound", meaning="Upper bound.", status="bound")
        title = "Upper bounds over the exact norm, per head"
        yield Scatter(title, section.columns["exact"], limit, tuple(series))


def _as_multiple(column: Column) -> Column:
    return replace(column, unit="×")


def _compute_multiple(logarithm: float | None) -> float | str | None:
    if logarithm is None:
        return None
    return 10**logarithm if logarithm < 300 else f"1e{logarithm:.0f}×"


# Distributions of attention


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


def view_attention(section: Section) -> Iterator[Block]:
    """Map the fragile regime and g1, list the most fragile heads and the strongest sinks."""
    rows = rows_of(section)
    if not rows:
        return
    columns = section.columns
    for title, name in (
        ("Share of rows in the intermediate (fragile) regime", "intermediate"),
        ("g1, mean over rows", "g1"),
    ):
        yield map_heads(title, find_values(section, name), columns[name])
    fragile = pick_top(rows, "intermediate", TOP)
    yield tabulate("Most intermediate heads", section, fragile, FRAGILE)
    yield tabulate("Strongest sinks", section, pick_top(rows, "sink_max", SINKS), SUNK)
    yield from _draw_all(section)
    yield tabulate_all(section)


def compare_attention(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare the distributions of statistics over heads and rows, and show the maps."""
    yield from compare_spread(
        sections, ("g1", "intermediate", "gk_ratio", "softmax_norm", "entropy")
    )
    yield from _count_ratios(sections)
    yield from _draw_joints(sections)
    for label, section in sections.items():
        yield from (replace(b, title=f"{label}: {b.title}") for b in draw_attention(section))


def _draw_all(section: Section) -> Iterator[Block]:
    yield from _count_ratios({"rows": section})
    yield from _draw_joints({"": section})
    yield from draw_attention(section)


def _count_ratios(sections: Mapping[str, Section]) -> Iterator[Histogram]:
    """Count g_1 / ||M|| over all rows, reports with equal bins in one picture."""
    arrays = {k: s.arrays for k, s in sections.items() if s.arrays.keys() >= {RATIO, RATIO_EDGES}}
    column = next(iter(sections.values())).columns["g1_ratio"]
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


def _draw_joints(sections: Mapping[str, Section]) -> Iterator[Density]:
    for label, section in sections.items():
        if section.arrays.keys() >= {"p1p2_hist", "p1p2_edges"}:
            block = _draw_joint(section)
            yield replace(block, title=f"{label}: {block.title}" if label else block.title)


def _draw_joint(section: Section) -> Density:
    import numpy as np

    # edges are common to both axes, or a row for each
    edges = np.atleast_2d(section.arrays["p1p2_edges"].numpy())
    p1, p2 = ((float(axis[0]), float(axis[-1])) for axis in (edges[0], edges[-1]))
    counts = section.arrays["p1p2_hist"].numpy().T  # the array's first axis is p(1)
    columns = section.columns
    return Density(
        "Largest and second largest entry of a row, all rows",
        columns["top1"],
        columns["top2"],
        tuple(map(tuple, counts.tolist())),
        p1,
        p2,
        COUNT,
    )


def draw_attention(section: Section) -> Iterator[Density | Curve | Passage]:
    """Show the attention map that was kept (map@HEAD), or the row (row@HEAD,QUERY)."""
    for name, array in section.arrays.items():
        kind, _, which = name.partition("@")
        whose = section.attended.get(name)
        if kind == "map" and array.data:
            yield _draw_map(which, array, section.arrays[f"map_tokens@{which}"], whose)
            if whose is not None:
                yield from _draw_received(which, array, whose)
        elif kind == "row":
            keys = tuple(map(float, range(len(array.data))))
            series = Series(f"head {which.partition(',')[0]}", keys, tuple(array.numpy()))
            head, _, query = which.partition(",")
            norm, g1 = section.arrays[f"row_norms@{which}"].numpy()
            title = f"Query {query} of head {head}, mean over samples: "
            yield Curve(f"{title}‖M‖ = {norm:.3f}, g1 = {g1:.3f}", KEY, WEIGHT, (series,))
        elif kind == "first_row" and whose is not None:
            head, _, query = which.partition(",")
            title = f"query {_name_token(int(query), whose)}, head {head}, {_name_sample(whose)}"
            yield _lay_over(f"Attention of {title}", array.data, whose, WEIGHT)


def _draw_received(head: str, array: Array, whose: Attended) -> Iterator[Density | Passage]:
    """Lay a map over its sample: the mean of its rows, and that of the token for the class."""
    values = array.numpy()
    title = f"head {head}, {_name_sample(whose)}"
    yield _lay_over(
        f"Attention received, mean over queries, {title}", values.mean(0), whose, RECEIVED
    )
    if whose.grid != (0, 0) and whose.tokens[0] == CLS:
        yield _lay_over(f"Attention of query {CLS}, {title}", values[0], whose, WEIGHT)


def _lay_over(
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


def _name_sample(whose: Attended) -> str:
    return f"sample {whose.sample[:CHARACTERS]}"


def _name_token(token: int, whose: Attended) -> str:
    """Name a token by its position, and as it is written."""
    return f"{token} ({whose.tokens[token]})" if token < len(whose.tokens) else str(token)


def _draw_map(head: str, array: Array, tokens: Array, whose: Attended | None) -> Density:
    queries, keys = tokens.numpy().tolist()
    block = -(-int(max(queries, keys)) // max(array.shape))
    blocks = f", means of {block} x {block} tokens" if block > 1 else ""
    return Density(
        title=f"Attention map of head {head}, {_name_sample(whose) if whose else FIRST}{blocks}",
        x=KEY,
        y=Column(label="query", meaning="Position of the query.", format="d"),
        values=tuple(map(tuple, array.numpy().tolist())),
        x_range=(-0.5, keys - 0.5),
        y_range=(-0.5, queries - 0.5),
        value=WEIGHT,
        down=True,
        names=whose.tokens if whose else (),
    )
