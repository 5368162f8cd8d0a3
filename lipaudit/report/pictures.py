"""Pictures and tables that a section declares by name, besides those of its columns."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean, median
from typing import Any

from lipaudit.measures.attention_rows import CLASSES
from lipaudit.report.blocks import (
    Block,
    Cells,
    Curve,
    Heatmap,
    Paragraph,
    Passage,
    Scale,
    Series,
    Stack,
    Table,
)
from lipaudit.report.cells import HEADINGS, describe_domain, format_with_limits, pick_columns
from lipaudit.report.rows import (
    Sections,
    add_model,
    find_columns,
    map_heads,
    read_rows,
    tabulate_rows,
)
from lipaudit.tables import Array, Column, Row, Section
from lipaudit.tables.columns import find_bounds, finite, group_values, limit_robust, log10_ratio
from lipaudit.tables.plugins import collect, load_object, make_package_error
from lipaudit.tables.report import Attended
from lipaudit.tables.trials import WORST, find_layer, is_repeat

VISIBLE = 0.005
"""Smaller parts of a bar are not drawn."""
FAR = 1000
"""Bounds of which every value is so many times above the largest norm are not drawn: beside
them, all other points would lie on one line."""


# Bounds beside norms


def draw_bounds(sections: Sections) -> Iterator[Curve | Table]:
    """Plot every bound of every head over the norm of the head.

    The table of the picture lists how many times each bound is above the norm, for every model.
    """
    columns = find_columns(sections)
    rows = read_rows(sections)
    series = []  # for each bound, the points (norm, bound) of all heads
    far = []  # labels of bounds that are too large to be drawn
    lines = []  # of the table
    for bound, column in find_bounds(columns).items():
        points = _list_points(column.label, bound, rows)
        if points.x and min(points.y) > FAR * max(points.x):
            far.append(column.label)
        elif points.x:
            series.append(points)
        for model, section in sections.items():
            lines.append(_measure_tightness(bound, column, model, section))
    if not lines:
        return
    title = "How many times ‖J‖ is each bound?"
    names = ("bound", "status", "model", "holds", "heads", "median", "largest")
    (table,) = tabulate_rows(pick_columns(*names), lines, title, folded=bool(series))
    if series:
        yield _plot_bounds(series, far, norm=columns["exact"], table=table)
    else:
        yield table


def _plot_bounds(
    series: Sequence[Series], far: Sequence[str], norm: Column, table: Table
) -> Curve:
    """Return the plot of bounds over norms, with the line y = x that no valid bound is below.

    Args:
        series: for each bound, the points (norm, bound) of all heads.
        far: labels of bounds that are too large to be drawn.
        norm: the column of the norms.
        table: the table of the plot.
    """
    norms = list(chain.from_iterable(points.x for points in series))
    ends = (min(norms), max(norms))
    lines = [*series, Series("y = x", x=ends, y=ends, guide=True)]
    limit = replace(HEADINGS["bound"], format=".3g", status="bound")
    title = "How far is each bound above ‖J‖?"
    if far:
        title += f" Not drawn, over {FAR} times the largest norm: {', '.join(far)}"
    return Curve(title, x=norm, y=limit, series=lines, log=True, joined=False, table=table)


def _list_points(label: str, bound: str, rows: Sequence[Row]) -> Series:
    """Return a point for each head: its norm and a bound."""
    exact = []
    bounds = []
    names = []
    for row in rows:
        point = finite((row.exact, row.get(bound)))
        # Logarithmic axes show positive numbers only.
        if len(point) == 2 and min(point) > 0:
            exact.append(point[0])
            bounds.append(point[1])
            names.append(f"head {row.head} {row.model}".rstrip())
    return Series(label, x=exact, y=bounds, names=names)


def _measure_tightness(bound: str, column: Column, model: str, section: Section) -> Cells:
    """Return a table row: how many times a bound is above the norm, median and maximum.

    Args:
        bound: name of the column of the bound.
        column: the description of this column.
        model: name of the model, if several are shown; else empty.
        section: the section with a row for each head of the model.
    """
    # Logarithms to base 10, because a bound may be too large for a float.
    ratios = finite(log10_ratio(row, bound) for row in section.rows)
    line: Cells = {"bound": column.label, "status": column.status}
    if model:
        # The domain (the inputs at which a bound holds) gives way to the model: a row has to fit a
        # terminal.
        line["model"] = model
    else:
        line["holds"] = describe_domain(column, brief=True)
    line |= {"heads": len(ratios), "median": None, "largest": None}
    if ratios:
        line["median"] = _write_power(median(ratios))
        line["largest"] = _write_power(max(ratios))
    return line


def _write_power(exponent: float) -> float | str:
    """Return 10^exponent, how many times a bound is above a norm; as `1e400×` if it is too large.

    Floats end at 1.8e308.
    """
    if exponent < 300:
        return 10**exponent
    return f"1e{exponent:.0f}×"


# Curves of attacks


def make_series(label: str, rows: Iterable[Row], x: str, y: str) -> Series:
    """Return a line of a picture: column y over column x, with the confidence limits of y.

    Args:
        label: name of the line.
        rows: the rows; rows without a finite value in both columns are left out.
        x: name of the column along the horizontal axis.
        y: name of the column along the vertical axis.
    """
    points = [row for row in rows if len(finite((row[x], row[y]))) == 2]
    points.sort(key=lambda row: row[x])
    return Series(
        label,
        x=[float(row[x]) for row in points],
        y=[float(row[y]) for row in points],
        low=[row.get(f"{y}_low") for row in points],
        high=[row.get(f"{y}_high") for row in points],
    )


def draw_accuracies(sections: Sections) -> Iterator[Curve]:
    """Draw the accuracy over the radius, in one picture for each norm.

    One report gets a line for each attack. Several reports get one line each: the accuracy under
    all attacks together.
    """
    columns = find_columns(sections)
    rows = read_rows(sections)
    if "" not in sections:  # several reports: rows of all attacks together, if there are any
        rows = [row for row in rows if row.attack == WORST] or rows
    accuracy = replace(columns["robust"], label="accuracy")
    for norm, of_norm in group_values((str(row.norm), row) for row in rows).items():
        if len({row.eps for row in of_norm}) < 2:  # a single radius makes no line
            continue
        # The rows of each line, by the name of the model or of the attack.
        lines = group_values((str(row.model or row.attack), row) for row in of_norm)
        # The rows of all attacks together (WORST) repeat the figures of a single attack.
        if len(lines) == 2:
            lines.pop(WORST, None)
        series = []
        for name, line in lines.items():
            # The line begins at radius 0, with the accuracy without attack.
            start = Row({"eps": 0.0, "robust": line[0].clean})
            curve = make_series(name, [start, *line], x="eps", y="robust")
            if len(curve.x) > 1:
                series.append(curve)
        if series:
            title = f"How many samples survive attacks, {norm}"
            ticks = {"0": 0.0} | {row.eps_text: row.eps for row in of_norm}
            radius = replace(columns["eps"], unit=norm)
            yield Curve(title, x=radius, y=accuracy, series=series, ticks=ticks)


def list_classes(sections: Sections) -> Iterator[Table]:
    """List the accuracy of every class, without attack and under all attacks in each ball.

    Args:
        sections: the section of attacks of one report (named "") or of several models.
    """
    for model, section in sections.items():
        samples: Mapping[str, Any] = section.samples
        # Without labels there are no classes. A model that scores texts has a loss in their place.
        if "label" not in samples or "loss" in samples:
            continue
        # By the title of a column, "clean" or a ball: the per-sample flags whose mean it shows.
        flags = _list_flags(section)
        columns = {
            "class": Column.text("class", "Name of the class, or its number."),
            "samples": section.columns["samples"],
            "clean": section.columns["clean"],
        }
        for ball in flags:  # `clean` has its column already
            columns.setdefault(ball, replace(section.columns["robust"], label=ball))
        # The indices of the samples of each class; repeated samples are left out.
        distinct = (i for i, sample in enumerate(section.ids) if not is_repeat(sample))
        classes = group_values((samples["label"][i], i) for i in distinct)
        lines = []
        for label, members in sorted(classes.items()):
            line = {"class": section.classes.get(label, str(label)), "samples": len(members)}
            for ball, name in flags.items():
                line[ball] = _count_robust([samples[name][i] for i in members], columns[ball])
            lines.append(line)
        title = add_model(model, "How accurate is each class?")
        yield from tabulate_rows(columns, lines, title, folded=True)


def _list_flags(section: Section) -> dict[str, str]:
    """Return the per-sample column of flags (1 and 0) behind each column of the table of classes.

    By the title of the column in the table: `clean` has the flags `correct`; a ball, such as `linf
    2/255`, has `robust@worst,linf,2/255`, whether no attack in this ball broke the sample.
    """
    flags = {"clean": "correct"}
    for row in section.rows:
        if row.attack == WORST:
            flags[row.trial.ball] = row.trial.column("robust")
    return flags


def _count_robust(flags: Sequence[float | None], column: Column) -> str:
    """Return the share of samples that are not broken, with its limits: see `limit_robust`."""
    text: str = format_with_limits(*limit_robust(flags), column)
    return text


def draw_depth(sections: Sections) -> Iterator[Curve]:
    """Draw the norm from the output of each block to the model's output, over the layers.

    Args:
        sections: the Jacobian section of one report (named "") or of several models. Its rows from
            `layer:5` and the like have the mean and 95th percentile over the samples.
    """
    series = []
    for label, section in sections.items():
        rows = []
        for row in section.rows:
            layer = find_layer(row.get("from"))  # 5 of `layer:5`; None for other inputs
            if layer is not None:
                rows.append(row.replace(layer=layer))
        if len(rows) < 2:
            continue
        # Encoder and decoder get a curve each. The module path up to the layer number tells them
        # apart: `encoder.layers` and `decoder.layers`. A number in front of the layer number is
        # cut, too: the stages `stage1.0` and `stage2.0` are one stack, `stage`.
        stacks = group_values((re.split(r"\d*\.\d+", row["module"])[0], row) for row in rows)
        # A path that occurs once is no stack of layers, so paths do not tell stacks apart here:
        # all rows are then one curve.
        if len(stacks) == 1 or min(map(len, stacks.values())) < 2:
            stacks = {"": rows}
        for stack, group in stacks.items():
            for name in ("mean", "p95"):
                title = " ".join(filter(None, (label, stack, name)))
                curve = make_series(title, group, x="layer", y=name)
                if curve.x:
                    series.append(curve)
    if series:
        depth = Column.count("attention layer", "")
        norm = next(iter(sections.values())).sample_column("norm")
        title = "How much a change after each block can still grow"
        yield Curve(title, x=depth, y=norm, series=series)


def draw_paths(sections: Sections) -> Iterator[Stack]:
    """Draw a bar for every step of the model: how much sensitivity passes through each part.

    A step is the attention, the MLP, or both in parallel. The parts of a step are attention maps
    (pattern), values, the MLP and the skip connection. The height of a part is its mean share over
    the samples: means of the parts add up to 1, medians would not.
    """
    # The array of each part (its share, by row and sample), and the name of the part.
    names = {"pattern": "pattern", "value": "value", "mlp": "MLP", "rest": "skip"}
    title = "Through which parts the sensitivity passes, step by step (means)"
    for label, section in sections.items():
        # Without the rows of whole blocks, which join the steps of a block.
        steps = {i: row for i, row in enumerate(section.rows) if row.part != "block"}
        if not steps or not section.arrays.keys() >= names.keys():
            continue
        parts = {}
        for name, word in names.items():
            shares = section.arrays[name].numpy()  # (rows, samples)
            parts[word] = [fmean(finite(shares[i].tolist()) or [0.0]) for i in steps]
        # What passes through no part above, such as a gate beside the heads.
        remainders = [1 - sum(shares) for shares in zip(*parts.values(), strict=True)]
        if max(map(abs, remainders)) > VISIBLE:
            parts["other"] = remainders
        places = [f"{row.layer} {row.part}" for row in steps.values()]
        column = replace(section.columns["share"], label="share")
        yield Stack(add_model(label, title), places=places, y=column, parts=parts)


def compare_steepness(bounds: Section | None, shares: Section) -> Iterator[Heatmap]:
    """Map the norms of heads and their shares beside each other, on one scale.

    Each value is divided by the largest value of the map, so the scale ends at 1. The scale starts
    at 0, or at the smallest value below 0: a share is negative if the contribution of a head
    cancels contributions of other heads. A head with a large norm may contribute little to the
    model's sensitivity: the two maps show such heads. No maps without heads that have both
    figures, or without a positive norm and a positive share.

    Args:
        bounds: the section with the norms; None if they were not measured.
        shares: the section with the share of each head in the sensitivity of the model.
    """
    if bounds is None or "exact" not in bounds.columns:
        return
    column = Column("of the largest", "Value of the head over the largest one.", format=".0%")
    norms = {(row.layer, row.head): row.exact for row in bounds.rows}
    carried = {(row.layer, row.head): row.share for row in shares.rows}
    heads = [head for head in norms if head in carried]
    if not heads:
        return
    titles = {
        "How steep is each head? Norm ‖J‖, of the largest": norms,
        "How much does each head carry? Share, of the largest": carried,
    }
    maps = []
    low = 0.0  # start of the scale of both maps
    for title, figures in titles.items():
        largest = max(finite(figures.values()), default=0.0)
        if largest <= 0:
            return
        values = {}
        for head in heads:
            figure = figures[head]
            values[head] = None if figure is None else figure / largest
        low = min([low, *finite(values.values())])  # a share may be negative
        maps.append(map_heads(title, values, column))
    for heatmap in maps:
        yield replace(heatmap, scale=Scale(low, high=1.0, log=False))


# Attention maps, and what they lie over


def draw_attention(sections: Sections) -> Iterator[Heatmap | Passage]:
    """Draw each stored attention map (array `map@HEAD`), and the attention that tokens receive."""
    for label, section in sections.items():
        for name, array in section.arrays.items():
            if name.startswith("map@") and array.data:
                head = name.removeprefix("map@")
                attended = section.attended.get(name)  # the text, if the map is of one
                yield _draw_map(label, section, head, attended)
                if attended:
                    yield _shade_received(label, array, head, attended)


def _draw_map(label: str, section: Section, head: str, attended: Attended | None) -> Heatmap:
    """Return the attention map of a head: a cell for each query and key, or for blocks of them.

    Args:
        label: name of the model, if several are shown.
        section: the section with the map.
        head: LAYER.HEAD.
        attended: the text of the map; None for an image, whose tokens are numbered.
    """
    values = section.arrays[f"map@{head}"].numpy()  # (queries, keys)
    # The map of many tokens is stored as means over square blocks: an entry is the mean over
    # `block` queries and `block` keys. The last block may be narrower.
    queries, keys = section.arrays[f"map_tokens@{head}"].numpy()
    block = math.ceil(int(max(queries, keys)) / max(values.shape))
    if attended:
        where = f"sample {attended.sample[:12]}"
        rows = columns = attended.tokens
    else:
        where = "first sample"
        # The number of the first token of each block.
        rows, columns = (tuple(str(block * i) for i in range(size)) for size in values.shape)
    title = f"Attention map of head {head}, {where}"
    if block > 1:
        title += f", means of {block} x {block} tokens"
    return Heatmap(
        add_model(label, title),
        values.tolist(),
        rows=rows,
        columns=columns,
        column=HEADINGS["P"],
        axes=("query", "key"),
        is_attention=True,
    )


def _shade_received(label: str, array: Array, head: str, attended: Attended) -> Passage:
    """Return a text whose tokens are shaded by the attention that they receive from a head.

    Args:
        label: name of the model, if several are shown.
        array: the attention map of the head, (queries, keys).
        head: LAYER.HEAD.
        attended: the id and the tokens of the text.
    """
    received = array.numpy().mean(0).tolist()  # over the queries
    title = (
        f"How much attention each token receives from head {head} (mean), "
        f"sample {attended.sample[:12]}"
    )
    title = add_model(label, title)
    column = HEADINGS["mean P"]
    return Passage(title, tokens=attended.tokens, shares=received, column=column)


def draw_rows(sections: Sections) -> Iterator[Heatmap]:
    """Draw, for each layer, how many attention rows have a small or large statistic.

    The first statistic of an attention row p is the sum of the two largest entries, p(1) + p(2).
    The second is the bound g1 divided by the norm of the softmax Jacobian M = diag(p) - p p^T.
    The columns of a map are ranges of the statistic (classes): CLASSES has their lower ends.
    """
    # By the name of the array: the statistic, and the title of its map.
    statistics = {
        "top_two": ("p(1) + p(2)", "How much of a row do its two largest entries hold?"),
        "tightness": ("g1/||M||", "How close is the bound g1, row by row?"),
    }
    for label, section in sections.items():
        layers = list(dict.fromkeys(str(row.layer) for row in section.rows))
        for name, (statistic, title) in statistics.items():
            if f"{name}@layers" not in section.arrays:
                continue
            shares = section.arrays[f"{name}@layers"].numpy()  # (layers, classes)
            yield Heatmap(
                add_model(label, title),
                shares.tolist(),
                rows=layers,
                columns=[f"{lower:.3g}" for lower in CLASSES[name]],
                column=HEADINGS["rows"],
                axes=("layer", f"{statistic} from"),
            )


DRAWINGS: dict[str, Callable[[Sections], Iterable[Block]]] = {
    "tightness": draw_bounds,
    "attention": draw_attention,
    "rows": draw_rows,
    "accuracies": draw_accuracies,
    "classes": list_classes,
    "depth": draw_depth,
    "paths": draw_paths,
}
"""What a section may show besides the tables, maps and histograms of its columns, by name."""


def draw_declared(name: str, sections: Sections) -> Iterator[Block]:
    """Yield the pictures and tables of a drawing that a section names.

    The drawing is ours (DRAWINGS) or the function of a plug-in. If the plug-in fails, the page
    shows the reason in place of the picture.
    """
    if name in DRAWINGS:
        yield from DRAWINGS[name](sections)
        return
    place = collect(str, "drawings")[name]
    drawing = load_object(place)
    try:
        yield from drawing(sections)
    except Exception as error:
        fault = make_package_error(place, "failed", error)
        yield Paragraph(f"No picture: {fault.message}. {fault.advice}")
