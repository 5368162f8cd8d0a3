"""The chapter of a section: tables, maps and histograms of its columns, and drawings of its own.

Sections of one measure come by report: a single report has the name "", several have the names
of their models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
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
VISIBLE = 0.005
"""Smaller parts of a bar are not drawn."""


def name_chapter(section: Section) -> str:
    """Return the heading of a section: of its declaration if installed, else of the report."""
    layout = layouts().get(section.measure)
    title = layout.title if layout else section.title
    return title or section.measure


def find_display(section: Section) -> Display:
    """Return what the chapter of a section shows; without a declaration all of its columns."""
    layout = layouts().get(section.measure)
    if layout and layout.display:
        return layout.display
    columns = section.columns
    samples = section.sample_columns
    required = {name for name, column in columns.items() if column.needed}
    maps: list[str] = []
    if {"layer", "head"} <= required:
        maps = [name for name, column in columns.items() if column.better]
    counted = [n for n, column in samples.items() if column.format not in cells.UNMEASURED]
    return Display(about="", maps=tuple(maps), histograms=tuple(counted))


def show_section(section: Section, shown: Collection[Note] = ()) -> tuple[Block, ...]:
    """Return the blocks of a section: its tables and pictures, settings and notes.

    Args:
        section: the section; a failed one shows its reason.
        shown: notes that the page already shows.
    """
    parts = tuple(show_sections({"": section}))
    if section.failure is not None:
        return parts
    result: list[Block] = []
    about = find_display(section).about
    if about:
        result.append(Paragraph(about))
    result += parts
    settings = list_settings(section)
    if settings:
        result.append(Paragraph(f"Settings: {'; '.join(settings)}."))
    result += blocks.list_notes(note for note in section.notes if note not in shown)
    return tuple(result)


def list_settings(section: Section) -> list[str]:
    """Return the settings of a section: a switch that is on by its name, without what is unset."""
    if "." in section.measure:  # a part of a measure has its settings, which are above
        return []
    settings = []
    for name, value in section.settings.items():
        if name == SEED or value is False or value in (None, [], ()):
            continue
        if value is True:
            settings.append(name)
        else:
            settings.append(f"{name} {format_setting(value)}")
    return settings


def add_model(label: str, title: str) -> str:
    """Return a title with the name of its report before it, if there are several."""
    if not label:
        return title
    return f"{label}: {title}"


def show_sections(sections: Sections) -> Iterator[Block]:
    """Yield the tables and pictures of one measure; first the failures."""
    measured = {}
    failed = False
    for label, section in sections.items():
        failure = section.failure
        if failure:
            failed = True
            text = f"FAILED: {failure.reason}. {failure.advice}"
            yield Paragraph(add_model(label, text).strip())
        if section.rows or len(section.samples) > 1:
            measured[label] = section
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
    rows = _select_rows(sections, by)
    shown = _choose_columns(find_columns(sections), rows, names)
    keys = naming(shown) if shown else []
    rows = _gather_rows(rows, keys)
    if "" not in sections:  # the model follows the keys
        pairs = list(shown.items())
        pairs.insert(len(keys), ("model", cells.HEADINGS["model"]))
        shown = dict(pairs)
        keys = [*keys, "model"]
    lines = []
    for row in rows:
        line = []
        for name, column in shown.items():
            low = row.get(f"{name}_low")
            high = row.get(f"{name}_high")
            line.append(cells.format_with_limits(row.get(name), low, high, column))
        lines.append(tuple(line))
    strong = {i for i, row in enumerate(rows) if row.get("attack") == WORST}
    if rows:
        yield Table("", tuple(shown.values()), tuple(lines), len(keys), strong)


def _select_rows(sections: Sections, by: str) -> list[Row]:
    """Return the rows of all reports; of many rows, the first by a column."""
    rows: list[Row] = []
    for label, section in sections.items():
        group = read_rows({label: section})
        if by:
            group.sort(key=lambda row: -order(row[by]))
            if len(group) > FIT:
                group = group[:TOP]
        rows += group
    return rows


def _choose_columns(
    columns: Mapping[str, Column], rows: Sequence[Row], names: Sequence[str]
) -> dict[str, Column]:
    """Return the columns of a table: `names` and bounds, or all; none without values."""
    hidden = set()
    for name in columns:  # limits are shown beside their value
        hidden |= {f"{name}_low", f"{name}_high"}
    if "head" in columns:  # `head` names the layer, too
        hidden |= {"layer", "module"}
    every = [name for name in columns if name not in hidden]
    wanted = every
    if names:
        bounds = [name for name in every if columns[name].formula and name not in names]
        wanted = [*names, *bounds]
    shown = {}
    for name in wanted:
        if name not in columns:  # in a report of another version
            continue
        column = columns[name]
        # A column of texts or truth values that says the usual of every row is left out.
        empty: set[Any] = {"", None}
        if column.format in ("s", ""):
            empty.add(column.default)
        values = {row.get(name) for row in rows}
        if values - empty:
            shown[name] = column
    return shown


def _gather_rows(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return the rows with those of equal keys beside each other."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in keys)
        groups.setdefault(key, []).append(row)
    return list(chain.from_iterable(groups.values()))


# Maps of heads, histograms of samples


def map_heads(
    title: str,
    values: Mapping[tuple[int, int], float | None],
    column: Column,
    centre: float | None = None,
) -> blocks.Heatmap:
    """Arrange values by layer and head."""
    layers = sorted({layer for layer, _ in values})
    heads = sorted({head for _, head in values})
    matrix = []
    for layer in layers:
        matrix.append(tuple(values.get((layer, head)) for head in heads))
    rows = tuple(map(str, layers))
    columns = tuple(map(str, heads))
    return blocks.Heatmap(title, tuple(matrix), rows, columns, column, centre=centre)


def map_column(sections: Sections, name: str) -> Iterator[blocks.Heatmap]:
    """Map a column over layers and heads, of each report."""
    for label, section in sections.items():
        column = section.columns.get(name, cells.HEADINGS["value"])
        values = {(row.layer, row.head): row.get(name) for row in section.rows}
        if any(value is not None for value in values.values()):
            title = cells.write_math(f"{column.label} of every head: {column.meaning.rstrip('.')}")
            yield map_heads(add_model(label, title), values, column)


def count_samples(sections: Sections, name: str) -> Iterator[blocks.Histogram]:
    """Collect the values of a per-sample column, unless they are all equal."""
    values = {}
    for label, section in sections.items():
        if name in section.samples:
            known = finite(section.samples[name])
            values[label or "samples"] = tuple(v for v in known if abs(v) < EXTREME)
    distinct = set(chain.from_iterable(values.values()))
    if len(distinct) > 1:
        column = next(iter(sections.values())).sample_column(name)
        yield blocks.Histogram(f"{cells.write_math(column.label)} per sample", column, values)


# Rows, named by head, by radius and by model


def find_columns(sections: Sections) -> dict[str, Column]:
    """Return the columns of all sections; `head` reads LAYER.HEAD and comes first."""
    columns: dict[str, Column] = {}
    for section in sections.values():
        columns |= section.columns
    if "head" not in columns:
        return columns
    head = {"head": cells.HEADINGS["head"]}
    return head | columns | head


def read_rows(sections: Sections) -> list[Row]:
    """Return the rows of all reports; `head` is LAYER.HEAD, `model` the label of the report."""
    rows = []
    for label, section in sections.items():
        for row in section.rows:
            names: dict[str, Any] = {"model": label}
            if "head" in section.columns:
                names["head"] = name_head(row)
            if "eps_text" in section.columns:  # early reports store the number alone
                names["eps_text"] = row.trial.radius.text
            rows.append(row.replace(**names))
    return rows


def name_head(row: Row) -> str:
    """Return LAYER.HEAD; without a head the layer, without a layer the model."""
    if row.layer is None:
        return "model"
    if row.head is None:
        return f"layer {row.layer}"
    return f"{row.layer}.{row.head}"


# Bounds beside exact norms


def list_tightness(sections: Sections) -> Iterator[Table]:
    """List how many times each bound is above the exact norm, in every model."""
    rows: list[Cells] = []
    for bound, column in find_bounds(find_columns(sections)).items():
        for model, section in sections.items():
            ratios = finite(log10_ratio(row, bound) for row in section.rows)
            line: Cells = {"bound": column.label, "status": column.status}
            if model:
                # The model replaces the domain, so that a row fits a terminal.
                line["model"] = model
            else:
                line["holds"] = cells.write_math(column.domain)
            line |= {"heads": len(ratios), "median": None, "largest": None}
            if ratios:
                line["median"] = _write_power(median(ratios))
                line["largest"] = _write_power(max(ratios))
            rows.append(line)
    if rows:
        yield make_table("Tightness over all heads: bound / exact", rows)


def _write_power(exponent: float) -> float | str:
    """Return 10^exponent: as a text if no float is as large."""
    if exponent < 300:
        return 10**exponent
    return f"1e{exponent:.0f}×"


def scatter_bounds(sections: Sections) -> Iterator[Curve]:
    """Plot every bound of every head over its exact norm: no point may be below y = x."""
    columns = find_columns(sections)
    rows = read_rows(sections)
    series: list[blocks.Series] = []
    for bound, column in find_bounds(columns).items():
        exact = []
        bounds = []
        names = []
        for row in rows:
            point = finite((row.exact, row.get(bound)))
            # Logarithmic axes show positive numbers only.
            if len(point) == 2 and min(point) > 0:
                exact.append(point[0])
                bounds.append(point[1])
                names.append(f"head {row.head} {row.model}")
        if exact:
            points = blocks.Series(column.label, tuple(exact), tuple(bounds), names=tuple(names))
            series.append(points)
    if series:
        norms = list(chain.from_iterable(each.x for each in series))
        ends = (min(norms), max(norms))
        series.append(blocks.Series("y = x", ends, ends, guide=True))
        limit = replace(cells.HEADINGS["bound"], format=".3g", status="bound")
        title = "Upper bounds over the exact norm, per head"
        yield Curve(title, columns["exact"], limit, tuple(series), log=True, joined=False)


# Curves of attacks and lengths


LINES = 5
"""Largest number of heads or layers in one chart, spread evenly."""


def make_series(label: str, rows: Iterable[Row], x: str, y: str) -> blocks.Series:
    """Return a line through the rows that have both columns, with the limits of y."""
    known = [row for row in rows if len(finite((row[x], row[y]))) == 2]
    known.sort(key=lambda row: row[x])
    return blocks.Series(
        label,
        x=tuple(float(row[x]) for row in known),
        y=tuple(float(row[y]) for row in known),
        low=tuple(row.get(f"{y}_low") for row in known),
        high=tuple(row.get(f"{y}_high") for row in known),
    )


def draw_accuracies(sections: Sections) -> Iterator[Curve]:
    """Draw accuracy over the radius: a line per attack, or one per report."""
    columns = find_columns(sections)
    rows = read_rows(sections)
    if "" not in sections:
        rows = [row for row in rows if row.attack == WORST] or rows
    accuracy = replace(columns["robust"], label="accuracy")
    for norm, group in group_values((str(row.norm), row) for row in rows).items():
        series = []
        lines = group_values((str(row.model or row.attack), row) for row in group)
        for name, line in lines.items():
            # No attack counts as a ball of radius 0.
            start = Row({"eps": 0.0, "robust": line[0].clean})
            curve = make_series(name, [*line, start], "eps", "robust")
            if len(curve.x) > 1:
                series.append(curve)
        if series:
            title = f"Accuracy under attack, {norm}"
            ticks = {"0": 0.0} | {row.eps_text: row.eps for row in group}
            yield Curve(title, columns["eps"], accuracy, tuple(series), ticks=ticks)


def list_classes(sections: Sections) -> Iterator[Table]:
    """List the accuracy of every class, without attack and in the worst case of each ball."""
    for model, section in sections.items():
        samples: Mapping[str, Any] = section.samples
        if "label" not in samples or "loss" in samples:  # scored texts have no classes
            continue
        # The per-sample column of each ball, and of no attack.
        flags = {"clean": "correct"}
        for row in section.rows:
            if row.attack == WORST:
                flags[row.trial.ball] = row.trial.column("robust")
        columns = {name: replace(section.columns["robust"], label=name) for name in flags}
        columns["clean"] = section.columns["clean"]
        columns["samples"] = section.columns["samples"]
        columns["class"] = Column.text("class", "Name of the class, or its number.")
        places: dict[Any, list[int]] = {}
        for i, sample in enumerate(section.ids):
            if not is_repeat(sample):
                places.setdefault(samples["label"][i], []).append(i)
        lines: list[Cells] = []
        for label, members in sorted(places.items()):
            n = len(members)
            line: Cells = {"class": section.classes.get(label, str(label)), "samples": n}
            for ball, column in flags.items():
                k = sum(samples[column][i] for i in members)
                low, high = wilson(k, n)
                line[ball] = cells.format_with_limits(k / n, low, high, columns[ball])
            lines.append(line)
        title = add_model(model, "Accuracy of every class")
        yield make_table(title, lines, columns, folded=True)


def draw_lengths(sections: Sections) -> Iterator[Curve]:
    """Draw norms over the length n beside n^(1/4) and n^(1/2), by mode; over R in mode radius."""
    columns = find_columns(sections)
    rows = [row for row in read_rows(sections) if order(row.norm) > 0]
    for mode, group in group_values((row["mode"], row) for row in rows).items():
        x = "radius" if mode == "radius" else "n"
        lines = group_values((_name_line(row, mode), row) for row in group)
        names = list(lines)
        if len(names) > LINES:
            step = (len(names) - 1) / (LINES - 1)
            names = [names[round(i * step)] for i in range(LINES)]
        series = [make_series(name, lines[name], x, "norm") for name in names]
        if not series:
            continue
        if x == "n":
            start = min(each.x[0] for each in series)
            end = max(each.x[-1] for each in series)
            first = series[0].y[0]
            for text, power in (("n^1/4", 0.25), ("n^1/2", 0.5)):
                last = first * (end / start) ** power
                series.append(blocks.Series(text, (start, end), (first, last), guide=True))
        axis = "R" if x == "radius" else "the length"
        title = f"Norms over {axis}, mode {mode}"
        yield Curve(title, columns[x], columns["norm"], tuple(series), log=True)


def _name_line(row: Row, mode: str) -> str:
    """Name a line of norms by its model, its head and what is fixed along it."""
    name = f"{row.model} {row.head}"
    if row.masked:
        name += ", masked"
    name = name.strip()
    if mode == "radius":
        if row.n is not None:
            name += f", n = {row.n:.3g}"
    elif mode != "real" and row.radius is not None:  # real data define the radius
        name += f", R = {row.radius:.3g}"
    return name


def draw_depth(sections: Sections) -> Iterator[Curve]:
    """Draw norms from the outputs of blocks (`layer:5`) over the number of the layer."""
    series: list[blocks.Series] = []
    for label, section in sections.items():
        rows = []
        for row in section.rows:
            layer = find_layer(row.get("from"))
            if layer is not None:
                rows.append(row.replace(layer=layer))
        # Encoder and decoder are two curves, by the path of their modules before the number.
        stacks = group_values((re.split(r"\d*\.\d+", row["module"])[0], row) for row in rows)
        if any(len(group) < 2 for group in stacks.values()):
            stacks = {"": rows} if len(rows) > 1 else {}
        for stack, group in stacks.items():
            words = [label, stack] if len(stacks) > 1 else [label]
            for name in ("mean", "p95"):
                title = " ".join(filter(None, [*words, name]))
                curve = make_series(title, group, "layer", name)
                if curve.x:
                    series.append(curve)
    if series:
        depth = Column.count("attention layer", "")
        norm = next(iter(sections.values())).sample_column("norm")
        yield Curve("Norm from the output of each block", depth, norm, tuple(series))


def draw_paths(sections: Sections) -> Iterator[blocks.Stack]:
    """Stack the mean shares of every step: they add up to 1, as medians do not."""
    names = {"pattern": "pattern", "value": "value", "mlp": "MLP", "rest": "skip"}
    for label, section in sections.items():
        arrays = {name: section.arrays[name].numpy() for name in names if name in section.arrays}
        steps = [i for i, row in enumerate(section.rows) if row.part != "block"]
        if len(arrays) < len(names) or not steps:
            continue
        parts: dict[str, tuple[float, ...]] = {}
        total = [0.0] * len(steps)
        for name, array in arrays.items():
            known = array[steps]
            means = [float(row[row == row].mean()) if (row == row).any() else 0.0 for row in known]
            total = [each + mean for each, mean in zip(total, means, strict=True)]
            parts[names[name]] = tuple(means)
        others = tuple(1 - each for each in total)
        if any(abs(other) > VISIBLE for other in others):  # such as a gate beside the heads
            parts["other"] = others
        places = tuple(f"{section.rows[i].layer} {section.rows[i].part}" for i in steps)
        title = "Where the sensitivity passes, step by step (means)"
        column = replace(section.columns["share"], label="share")
        yield blocks.Stack(f"{label}: {title}" if label else title, places, column, parts)


def compare_steepness(bounds: Section | None, shares: Section) -> Iterator[blocks.Heatmap]:
    """Map exact norms and shares of heads on one scale: of the largest head of each."""
    if bounds is None or "exact" not in bounds.columns:
        return
    column = Column("of the largest", "Value of the head over the largest one.", format=".0%")
    steep = {(row.layer, row.head): row.exact for row in bounds.rows}
    carried = {(row.layer, row.head): row.share for row in shares.rows}
    found = []
    for known in (steep, carried):
        most = max(finite(known.values()), default=0.0)
        both = [key for key in known if key in steep and key in carried and most > 0]
        values = {key: None if known[key] is None else known[key] / most for key in both}
        found.append(values)
    if not all(found):
        return
    low = min(0.0, *finite(value for values in found for value in values.values()))
    titles = ("How steep is every head? Exact norm", "How much does it carry? Share")
    for title, values in zip(titles, found, strict=True):
        yield replace(map_heads(f"{title}, of the largest", values, column), ends=(low, 1.0))


# Attention maps, and what they lie over


def draw_attention(sections: Sections) -> Iterator[blocks.Heatmap | blocks.Passage]:
    """Draw the attention map (map@HEAD) of each report that has one, and what receives it."""
    for label, section in sections.items():
        for name, array in section.arrays.items():
            if name.startswith("map@") and array.data:
                head = name.removeprefix("map@")
                yield from _draw_map(label, section, head)


def _draw_map(
    label: str, section: Section, head: str
) -> Iterator[blocks.Heatmap | blocks.Passage]:
    values = section.arrays[f"map@{head}"].numpy()
    sample = section.attended.get(f"map@{head}")
    where = "first sample"
    if sample:
        where = f"sample {sample.sample[:12]}"
    # Long maps are stored as means of square blocks; the last block may be narrower.
    tokens = max(section.arrays[f"map_tokens@{head}"].numpy())
    block = math.ceil(int(tokens) / max(values.shape))
    title = f"Attention map of head {head}, {where}"
    if block > 1:
        title += f", means of {block} x {block} tokens"
    if sample:
        rows = sample.tokens
        columns = sample.tokens
    else:
        rows = tuple(str(block * i) for i in range(values.shape[0]))
        columns = tuple(str(block * i) for i in range(values.shape[1]))
    matrix = tuple(map(tuple, values.tolist()))
    column = cells.HEADINGS["P"]
    yield blocks.Heatmap(add_model(label, title), matrix, rows, columns, column, square=True)
    if sample:
        title = f"Attention received, mean over queries, head {head}, {where}"
        received = tuple(map(float, values.mean(0)))
        column = cells.HEADINGS["mean P"]
        yield blocks.Passage(add_model(label, title), sample.tokens, received, column)


DRAWINGS: dict[Drawing, Callable[[Sections], Iterable[Block]]] = {
    "tightness": list_tightness,
    "bounds": scatter_bounds,
    "attention": draw_attention,
    "accuracies": draw_accuracies,
    "classes": list_classes,
    "lengths": draw_lengths,
    "depth": draw_depth,
    "paths": draw_paths,
}
"""What a section may show besides the tables, maps and histograms of its columns, by name."""
