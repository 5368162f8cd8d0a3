"""Drawings of single sections: bounds beside norms, curves of attacks and lengths, attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import median

from lipaudit.report.blocks import Block, Passage, Table, make_table
from lipaudit.report.cells import write_math
from lipaudit.report.page.rows import TOP, Sections, find_columns, group_rows, read_all
from lipaudit.report.pictures import Curve, Heatmap, Series
from lipaudit.report.words import HEADINGS
from lipaudit.tables import Array, Column, Row, Section
from lipaudit.tables.columns import find_bounds
from lipaudit.tables.figures import finite, log10_ratio, order
from lipaudit.tables.report import Attended
from lipaudit.tables.trials import WORST

# Bounds beside exact norms


def format_ratio(logarithm: float) -> float | str:
    """Return 10 to a power as a cell; text if it is too large for a number."""
    return 10**logarithm if logarithm < 300 else f"1e{logarithm:.0f}×"


def list_tightness(sections: Sections) -> Iterator[Table]:
    """List how many times each bound is above the exact norm, in every model."""
    several, lines = "" not in sections, []
    for name, column in find_bounds(find_columns(sections)).items():
        for model, section in sections.items():
            known = finite(log10_ratio(row, name) for row in section.rows)
            ends = [format_ratio(reduce(known)) if known else None for reduce in (median, max)]
            # With several models, the model replaces the domain, so that a row fits a terminal.
            place = model if several else write_math(column.domain)
            lines.append((column.label, column.status, place, len(known), *ends))
    names = ("bound", "status", "model" if several else "holds", "heads", "median", "largest")
    if lines:
        cells = zip(names, zip(*lines, strict=True), strict=True)
        yield make_table("Tightness over all heads: bound / exact", cells)


def scatter_bounds(sections: Sections) -> Iterator[Curve]:
    """Plot every bound of every head over its exact norm: no point may be below y = x."""
    columns, rows, series = find_columns(sections), read_all(sections), list[Series]()
    for bound, column in find_bounds(columns).items():
        points = [(row.exact, row.get(bound), f"head {row.head} {row.model}") for row in rows]
        # Logarithmic axes show positive numbers only.
        known = [p for p in points if len(finite(p[:2])) == 2 and min(p[:2]) > 0]
        if known:
            exact, bounds, names = zip(*known, strict=True)
            series.append(Series(column.label, exact, bounds, names=names))
    if series:
        ends = tuple(reduce(x for s in series for x in s.x) for reduce in (min, max))
        series.append(Series("y = x", ends, ends, guide=True))
        limit = replace(HEADINGS["bound"], format=".3g", status="bound")
        title = "Upper bounds over the exact norm, per head"
        yield Curve(title, columns["exact"], limit, tuple(series), log=True, joined=False)


# Curves of attacks and lengths


LINES = 5
"""Largest number of heads or layers in one chart, spread evenly."""


def make_series(label: str, rows: Iterable[Row], x: str, y: str) -> Series:
    """Return a line through the rows that have both columns, with the limits of y."""
    known = sorted((r for r in rows if len(finite((r[x], r[y]))) == 2), key=lambda r: r[x])
    across, up = (tuple(float(row[name]) for row in known) for name in (x, y))
    low, high = (tuple(row.get(f"{y}_{end}") for row in known) for end in ("low", "high"))
    return Series(label, across, up, low, high)


def draw_accuracies(sections: Sections) -> Iterator[Curve]:
    """Draw accuracy over the radius: a line per attack, or one per report."""
    columns, rows = find_columns(sections), read_all(sections)
    if "" not in sections:
        rows = [row for row in rows if row.attack == WORST] or rows
    accuracy = replace(columns["robust"], label="accuracy")
    for norm, group in group_rows(rows, lambda row: str(row.norm)).items():
        lines = group_rows(group, lambda row: str(row.model or row.attack)).items()
        # No attack counts as a ball of radius 0.
        starts = {name: Row({"eps": 0.0, "robust": line[0].clean}) for name, line in lines}
        series = [make_series(k, [*line, starts[k]], "eps", "robust") for k, line in lines]
        shown = tuple(each for each in series if len(each.x) > 1)
        ticks = {"0": 0.0} | {row.eps_text: row.eps for row in group}
        if shown:
            title = f"Accuracy under attack, {norm}"
            yield Curve(title, columns["eps"], accuracy, shown, ticks=ticks)


def draw_lengths(sections: Sections) -> Iterator[Curve]:
    """Draw norms over the length n beside n^(1/4) and n^(1/2), by mode; over R in mode radius."""
    columns = find_columns(sections)
    rows = [row for row in read_all(sections) if order(row.norm) > 0]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        x = "radius" if mode == "radius" else "n"
        # A line has a radius R unless the data define it, or a length n.
        fixed = {"real": "", "radius": "n"}.get(mode, "radius")
        lines: dict[str, list[Row]] = {}
        for row in (row for row in rows if row["mode"] == mode):
            name = f"{row.model} {row.head}{', masked' * bool(row.masked)}".strip()
            if fixed and row[fixed] is not None:
                name += f", {'R' if fixed == 'radius' else 'n'} = {row[fixed]:.3g}"
            lines.setdefault(name, []).append(row)
        names = list(lines)
        if len(names) > LINES:
            names = [names[round(i * (len(names) - 1) / (LINES - 1))] for i in range(LINES)]
        series = [make_series(name, lines[name], x, "norm") for name in names]
        if series and x == "n":
            start, end = min(s.x[0] for s in series), max(s.x[-1] for s in series)
            first = series[0].y[0]
            for text, power in (("1/4", 0.25), ("1/2", 0.5)):
                last = first * (end / start) ** power
                series.append(Series(f"n^{text}", (start, end), (first, last), guide=True))
        if series:
            title = f"Norms over {'R' if x == 'radius' else 'the length'}, mode {mode}"
            yield Curve(title, columns[x], columns["norm"], tuple(series), log=True)


def list_positions(sections: Sections) -> Iterator[Table]:
    """List the positions of a text with the largest norms, over the texts that have them."""
    for section in sections.values():
        if "positions" in section.arrays:
            norms = map(finite, section.arrays["positions"].numpy().T.tolist())
            known = [(i, len(v), median(v), max(v)) for i, v in enumerate(norms) if v]
            names = (section.columns[name] for name in ("samples", "median", "max"))
            columns = section.sample_column("position"), *names
            rows = tuple(sorted(known, key=lambda row: -row[3])[:TOP])
            yield Table("Positions with the largest norms", columns, rows)


# Attention maps, and what they lie over


def draw_attention(sections: Sections) -> Iterator[Heatmap | Passage]:
    """Draw the attention map (map@HEAD) of each report that has one, and what receives it."""
    for label, section in sections.items():
        for name, array in section.arrays.items():
            kind, _, head = name.partition("@")
            for block in _draw_map(head, array, section) if kind == "map" and array.data else ():
                yield replace(block, title=f"{label}: {block.title}") if label else block


def _draw_map(head: str, array: Array, section: Section) -> Iterator[Heatmap | Passage]:
    values, whose = array.numpy(), section.attended.get(f"map@{head}")
    of = f"head {head}, sample {whose.sample[:12]}" if whose else f"head {head}, first sample"
    # Long maps are stored as means of square blocks; the last block may be narrower.
    tokens = max(section.arrays[f"map_tokens@{head}"].numpy())
    block = -(-int(tokens) // max(array.shape))
    means = f", means of {block} x {block} tokens" if block > 1 else ""
    names = (tuple(str(block * i) for i in range(size)) for size in array.shape)
    rows, columns = (whose.tokens, whose.tokens) if whose else names
    title, axes = f"Attention map of {of}{means}", ("query", "key")
    matrix = tuple(map(tuple, values.tolist()))
    yield Heatmap(title, matrix, rows, columns, HEADINGS["P"], axes, square=True)
    if whose:
        title = f"Attention received, mean over queries, {of}"
        yield _lay_over(title, values.mean(0), whose, HEADINGS["mean P"])


def _lay_over(
    title: str, values: Iterable[float | None], whose: Attended, column: Column
) -> Heatmap | Passage:
    """Overlay values of tokens on a text, or values of patches on a picture."""
    known = tuple(value or 0.0 for value in values)[: len(whose.tokens)]
    height, width = whose.grid
    if not height * width:
        return Passage(title, whose.tokens, known, column)
    patches = known[whose.first :][: height * width]
    # The class token and registers are not patches: a picture cannot show their values.
    outside = sum(known) - sum(patches)
    return Heatmap(
        title=f"{title} ({outside:.0%} on other tokens)" if whose.first else title,
        values=tuple(patches[i * width : (i + 1) * width] for i in range(height)),
        rows=tuple(map(str, range(height))),
        columns=tuple(map(str, range(width))),
        column=column,
        axes=("row", "column"),
        square=True,
        image=whose.image,
    )


DRAWINGS: dict[str, tuple[Callable[[Sections], Iterable[Block]], ...]] = {
    "bounds": (list_tightness, scatter_bounds),
    "attention": (draw_attention,),
    "jacobian": (list_positions,),
    "attack": (draw_accuracies,),
    "scaling": (draw_lengths,),
}
"""What a section shows besides the tables, maps and histograms of its columns."""
