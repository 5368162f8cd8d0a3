"""The chapter of a section: tables, maps and histograms of its columns, and drawings of its own.

Sections of one measure come by report: a single report has the name "", several have the names
of their models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from lipaudit.measures import layouts
from lipaudit.report import blocks, cells
from lipaudit.report.blocks import EXTREME, Block, Cells, Curve, Paragraph, Table, make_table
from lipaudit.report.opening import SEED, format_setting
from lipaudit.tables import Column, Display, Note, Row, Section
from lipaudit.tables.columns import (
    find_bounds,
    finite,
    group_values,
    log10_ratio,
    naming,
    order,
    wilson,
)
from lipaudit.tables.report import Drawing
from lipaudit.tables.trials import WORST, find_layer, is_repeat

Sections = Mapping[str, Section]
FIT = 20
"""Tables with at most this many rows are shown completely."""
TOP = 10
"""Number of rows shown of longer tables."""


def name_chapter(section: Section) -> str:
    """Return the heading of a section: of its declaration if installed, else of the report."""
    layout = layouts().get(section.measure)
    return (layout.title if layout else section.title) or section.measure


def find_display(section: Section) -> Display:
    """Return what the chapter of a section shows; without a declaration all of its columns."""
    layout = layouts().get(section.measure)
    if layout and layout.display:
        return layout.display
    columns, samples = section.columns, section.sample_columns
    of_heads = all(n in columns and columns[n].needed for n in ("layer", "head"))
    maps = tuple(name for name, column in columns.items() if of_heads and column.better)
    counted = tuple(n for n, column in samples.items() if column.format not in cells.UNMEASURED)
    return Display(about="", maps=maps, histograms=counted)


def show_section(section: Section, shown: Collection[Note] = ()) -> tuple[Block, ...]:
    """Return the blocks of a section: its tables and pictures, settings and notes.

    Args:
        section: the section; a failed one shows its reason.
        shown: notes that the page already shows.
    """
    parts = tuple(show_sections({"": section}))
    if section.failure is not None:
        return parts
    # A switch that is on is shown by its name; what is off or unset is left out. A part of a
    # measure has the settings of the measure, which are above.
    listed = "; ".join(
        name if value is True else f"{name} {format_setting(value)}"
        for name, value in ({} if "." in section.measure else section.settings).items()
        if name != SEED and value is not False and value not in (None, [], ())
    )
    about = find_display(section).about
    return (
        *([Paragraph(about)] if about else []),
        *parts,
        *([Paragraph(f"Settings: {listed}.")] if listed else []),
        *blocks.list_notes(note for note in section.notes if note not in shown),
    )


def show_sections(sections: Sections) -> Iterator[Block]:
    """Yield the tables and pictures of one measure; first the failures."""
    failed = {label: s.failure for label, s in sections.items() if s.failure}
    for label, failure in failed.items():
        start = f"{label}: FAILED" if label else "FAILED"
        yield Paragraph(f"{start}: {failure.reason}. {failure.advice}".strip())
    measured = {k: s for k, s in sections.items() if s.rows or len(s.samples) > 1}
    if not measured:
        if not failed:
            yield Paragraph("No results: nothing was measured.")
        return
    first = next(iter(measured.values()))
    display = find_display(first)
    for name in display.maps:
        yield from map_column(measured, name)
    yield from tabulate(measured, display.columns, display.by)
    for name in display.drawings:
        yield from DRAWINGS[name](measured)
    for name in display.histograms:
        yield from count_samples(measured, name)
    if display.columns and "" in measured and first.rows:
        # Folded, with every column that is not empty.
        rows, columns = first.rows, first.columns.items()
        shown = {n: c for n, c in columns if any(row.get(n) != "" for row in rows)}
        lines = [{name: row.get(name) for name in shown} for row in rows]
        keys = 2 if list(shown)[:2] == ["layer", "head"] else 1
        yield make_table(blocks.ALL_COLUMNS, lines, shown, keys=keys, folded=True)


# Tables, maps and histograms of columns


def tabulate(sections: Sections, names: Sequence[str] = (), by: str = "") -> Iterator[Table]:
    """Tabulate rows; rows of several reports with equal keys are adjacent.

    Limits (NAME_low, NAME_high) are shown in brackets. Columns without values are left out.

    Args:
        sections: the sections by report.
        names: columns; bounds follow. By default all columns.
        by: a column; of many rows, those with its largest values are shown.
    """
    columns, rows = find_columns(sections), list[Row]()
    for label, section in sections.items():
        group = read_rows({label: section})
        ranked = sorted(group, key=lambda row: -order(row[by])) if by else group
        rows += ranked[:TOP] if by and len(ranked) > FIT else ranked
    limits = {f"{name}{end}" for name in columns for end in ("_low", "_high")}
    # `head` names the layer, too.
    implied = {"layer", "module"} if "head" in columns else set()
    every = [name for name in columns if name not in limits | implied]
    bounds = [name for name in every if columns[name].formula and name not in names]
    shown = {}
    # A report of another version may lack a column.
    for name in filter(columns.__contains__, [*names, *bounds] if names else every):
        # A column of texts or truth values that says the usual of every row is left out.
        usual = columns[name].default if columns[name].format in ("s", "") else None
        if {row.get(name) for row in rows} - {"", None, usual}:
            shown[name] = columns[name]
    keys = naming(shown) if shown else []
    groups = group_values((tuple(row.get(name) for name in keys), row) for row in rows)
    rows = [row for group in groups.values() for row in group]
    if "" not in sections:  # the model follows the keys
        pairs = list(shown.items())
        pairs.insert(len(keys), ("model", cells.HEADINGS["model"]))
        keys, shown = [*keys, "model"], dict(pairs)
    lines = tuple(
        tuple(
            cells.format_with_limits(row.get(n), row.get(f"{n}_low"), row.get(f"{n}_high"), column)
            for n, column in shown.items()
        )
        for row in rows
    )
    strong = {i for i, row in enumerate(rows) if row.get("attack") == WORST}
    if rows:
        yield Table("", tuple(shown.values()), lines, len(keys), strong)


# Maps of heads, histograms of samples


def map_heads(
    title: str,
    values: Mapping[tuple[int, int], float | None],
    column: Column,
    centre: float | None = None,
) -> blocks.Heatmap:
    """Arrange values by layer and head."""
    layers, heads = (sorted({key[i] for key in values}) for i in (0, 1))
    matrix = tuple(tuple(values.get((i, j)) for j in heads) for i in layers)
    names = tuple(map(str, layers)), tuple(map(str, heads))
    return blocks.Heatmap(title, matrix, *names, column, centre=centre)


def map_column(sections: Sections, name: str) -> Iterator[blocks.Heatmap]:
    """Map a column over layers and heads, of each report."""
    for label, section in sections.items():
        column = section.columns.get(name, cells.HEADINGS["value"])
        values = {(row.layer, row.head): row.get(name) for row in section.rows}
        if any(value is not None for value in values.values()):
            title = cells.write_math(f"{column.label} of every head: {column.meaning.rstrip('.')}")
            yield map_heads(f"{label}: {title}" if label else title, values, column)


def count_samples(sections: Sections, name: str) -> Iterator[blocks.Histogram]:
    """Collect the values of a per-sample column, unless they are all equal."""
    known = {k: finite(s.samples[name]) for k, s in sections.items() if name in s.samples}
    values = {k or "samples": tuple(v for v in vs if abs(v) < EXTREME) for k, vs in known.items()}
    if len({value for known in values.values() for value in known}) > 1:
        column = next(iter(sections.values())).sample_column(name)
        yield blocks.Histogram(f"{cells.write_math(column.label)} per sample", column, values)


# Rows, named by head, by radius and by model


def find_columns(sections: Sections) -> dict[str, Column]:
    """Return the columns of all sections; `head` reads LAYER.HEAD and comes first."""
    columns = {name: c for section in sections.values() for name, c in section.columns.items()}
    head = {"head": cells.HEADINGS["head"]} if "head" in columns else {}
    return head | columns | head


def read_rows(sections: Sections) -> list[Row]:
    """Return the rows of all reports; `head` is LAYER.HEAD, `model` the label of the report."""
    rows = []
    for label, section in sections.items():
        for row in section.rows:
            names: dict[str, Any] = {"model": label}
            if "head" in section.columns:  # without a head the layer, without a layer the model
                layer = f"layer {row.layer}" if row.head is None else f"{row.layer}.{row.head}"
                names["head"] = "model" if row.layer is None else layer
            if "eps_text" in section.columns:  # early reports store the number alone
                names["eps_text"] = row.trial.radius.text
            rows.append(row.replace(**names))
    return rows


# Bounds beside exact norms


def list_tightness(sections: Sections) -> Iterator[Table]:
    """List how many times each bound is above the exact norm, in every model."""
    rows: list[Cells] = []
    for bound, column in find_bounds(find_columns(sections)).items():
        for model, section in sections.items():
            known = finite(log10_ratio(each, bound) for each in section.rows)
            row: Cells = {"bound": column.label, "status": column.status}
            # With several models, the model replaces the domain, so that a row fits a terminal.
            row |= {"model": model} if model else {"holds": cells.write_math(column.domain)}
            row |= {"heads": len(known), "median": None, "largest": None}
            for name, reduce in (("median", median), ("largest", max)) if known else ():
                power = reduce(known)  # a ratio above 10^308 is no float
                row[name] = 10**power if power < 300 else f"1e{power:.0f}×"
            rows.append(row)
    if rows:
        yield make_table("Tightness over all heads: bound / exact", rows)


def scatter_bounds(sections: Sections) -> Iterator[Curve]:
    """Plot every bound of every head over its exact norm: no point may be below y = x."""
    columns, rows, series = find_columns(sections), read_rows(sections), list[blocks.Series]()
    for bound, column in find_bounds(columns).items():
        points = [(row.exact, row.get(bound), f"head {row.head} {row.model}") for row in rows]
        # Logarithmic axes show positive numbers only.
        known = [p for p in points if len(finite(p[:2])) == 2 and min(p[:2]) > 0]
        if known:
            exact, bounds, names = zip(*known, strict=True)
            series.append(blocks.Series(column.label, exact, bounds, names=names))
    if series:
        ends = tuple(reduce(x for s in series for x in s.x) for reduce in (min, max))
        series.append(blocks.Series("y = x", ends, ends, guide=True))
        limit = replace(cells.HEADINGS["bound"], format=".3g", status="bound")
        title = "Upper bounds over the exact norm, per head"
        yield Curve(title, columns["exact"], limit, tuple(series), log=True, joined=False)


# Curves of attacks and lengths


LINES = 5
"""Largest number of heads or layers in one chart, spread evenly."""


def make_series(label: str, rows: Iterable[Row], x: str, y: str) -> blocks.Series:
    """Return a line through the rows that have both columns, with the limits of y."""
    known = sorted((r for r in rows if len(finite((r[x], r[y]))) == 2), key=lambda r: r[x])
    across, up = (tuple(float(row[name]) for row in known) for name in (x, y))
    low, high = (tuple(row.get(f"{y}_{end}") for row in known) for end in ("low", "high"))
    return blocks.Series(label, across, up, low, high)


def draw_accuracies(sections: Sections) -> Iterator[Curve]:
    """Draw accuracy over the radius: a line per attack, or one per report."""
    columns, rows = find_columns(sections), read_rows(sections)
    if "" not in sections:
        rows = [row for row in rows if row.attack == WORST] or rows
    accuracy = replace(columns["robust"], label="accuracy")
    for norm, group in group_values((str(row.norm), row) for row in rows).items():
        lines = group_values((str(row.model or row.attack), row) for row in group).items()
        # No attack counts as a ball of radius 0.
        starts = {name: Row({"eps": 0.0, "robust": line[0].clean}) for name, line in lines}
        series = [make_series(k, [*line, starts[k]], "eps", "robust") for k, line in lines]
        shown = tuple(each for each in series if len(each.x) > 1)
        ticks = {"0": 0.0} | {row.eps_text: row.eps for row in group}
        if shown:
            title = f"Accuracy under attack, {norm}"
            yield Curve(title, columns["eps"], accuracy, shown, ticks=ticks)


def list_classes(sections: Sections) -> Iterator[Table]:
    """List the accuracy of every class, without attack and in the worst case of each ball."""
    for model, section in sections.items():
        samples: Mapping[str, Any] = section.samples
        if "label" not in samples or "loss" in samples:  # scored texts have no classes
            continue
        balls = [row.trial for row in section.rows if row.attack == WORST]
        flags = {"clean": "correct", **{key.ball: key.column("robust") for key in balls}}
        columns = {name: replace(section.columns["robust"], label=name) for name in flags}
        columns |= {name: section.columns[name] for name in ("clean", "samples")}
        columns["class"] = Column.text("class", "Name of the class, or its number.")
        known = zip(samples["label"], section.ids, range(len(section.ids)), strict=True)
        groups = group_values((label, i) for label, name, i in known if not is_repeat(name))
        rows: list[Cells] = []
        for label, places in sorted(groups.items()):
            n, name = len(places), section.classes.get(label, str(label))
            line: Cells = {"class": name, "samples": n}
            for ball, column in flags.items():
                k = sum(samples[column][i] for i in places)
                line[ball] = cells.format_with_limits(k / n, *wilson(k, n), columns[ball])
            rows.append(line)
        title = f"{model}: " * bool(model) + "Accuracy of every class"
        yield make_table(title, rows, columns, folded=True)


def draw_lengths(sections: Sections) -> Iterator[Curve]:
    """Draw norms over the length n beside n^(1/4) and n^(1/2), by mode; over R in mode radius."""
    columns = find_columns(sections)
    rows = (row for row in read_rows(sections) if order(row.norm) > 0)
    for mode, group in group_values((row["mode"], row) for row in rows).items():
        x = "radius" if mode == "radius" else "n"
        # A line has a radius R unless the data define it, or a length n.
        fixed = {"real": "", "radius": "n"}.get(mode, "radius")
        lines: dict[str, list[Row]] = {}
        for row in group:
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
                series.append(blocks.Series(f"n^{text}", (start, end), (first, last), guide=True))
        if series:
            title = f"Norms over {'R' if x == 'radius' else 'the length'}, mode {mode}"
            yield Curve(title, columns[x], columns["norm"], tuple(series), log=True)


def draw_depth(sections: Sections) -> Iterator[Curve]:
    """Draw norms from the outputs of blocks (`layer:5`) over the number of the layer."""
    series, depth = list[blocks.Series](), Column.count("attention layer", "")
    for label, section in sections.items():
        named = ((find_layer(row.get("from")), row) for row in section.rows)
        rows = [row.replace(layer=layer) for layer, row in named if layer is not None]
        # Encoder and decoder are two curves, by the path of their modules before the number.
        stacks = group_values((re.split(r"\d*\.\d+", row["module"])[0], row) for row in rows)
        if any(len(group) < 2 for group in stacks.values()):
            stacks = {"": rows} if len(rows) > 1 else {}
        for stack, name in product(stacks, ("mean", "p95")):
            words = (label, stack if len(stacks) > 1 else "", name)
            series.append(make_series(" ".join(filter(None, words)), stacks[stack], "layer", name))
    if series := [each for each in series if each.x]:
        norm = next(iter(sections.values())).sample_column("norm")
        yield Curve("Norm from the output of each block", depth, norm, tuple(series))


# Attention maps, and what they lie over


def draw_attention(sections: Sections) -> Iterator[blocks.Heatmap | blocks.Passage]:
    """Draw the attention map (map@HEAD) of each report that has one, and what receives it."""
    maps = (
        (label, section, name.removeprefix("map@"), array)
        for label, section in sections.items()
        for name, array in section.arrays.items()
        if name.startswith("map@") and array.data
    )
    for label, section, head, array in maps:
        values, sample = array.numpy(), section.attended.get(f"map@{head}")
        lead = f"{label}: " if label else ""
        of = f"head {head}, {f'sample {sample.sample[:12]}' if sample else 'first sample'}"
        # Long maps are stored as means of square blocks; the last block may be narrower.
        tokens = max(section.arrays[f"map_tokens@{head}"].numpy())
        block = -(-int(tokens) // max(array.shape))
        means = f", means of {block} x {block} tokens" if block > 1 else ""
        places = (tuple(str(block * i) for i in range(size)) for size in array.shape)
        rows, columns = (sample.tokens, sample.tokens) if sample else places
        title, matrix = f"{lead}Attention map of {of}{means}", tuple(map(tuple, values.tolist()))
        yield blocks.Heatmap(title, matrix, rows, columns, cells.HEADINGS["P"], square=True)
        if sample:
            title = f"{lead}Attention received, mean over queries, {of}"
            received = tuple(map(float, values.mean(0)))
            yield blocks.Passage(title, sample.tokens, received, cells.HEADINGS["mean P"])


DRAWINGS: dict[Drawing, Callable[[Sections], Iterable[Block]]] = {
    "tightness": list_tightness,
    "bounds": scatter_bounds,
    "attention": draw_attention,
    "accuracies": draw_accuracies,
    "classes": list_classes,
    "lengths": draw_lengths,
    "depth": draw_depth,
}
"""What a section may show besides the tables, maps and histograms of its columns, by name."""
