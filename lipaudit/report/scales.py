"""One scale of colours for each unit on a page, and one colour for each model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from lipaudit.report.blocks import (
    Block,
    Chapter,
    Curve,
    Heatmap,
    Histogram,
    Scale,
    Series,
    compute_scale,
)
from lipaudit.tables.columns import group_values


def harmonise(chapters: Iterable[Chapter], models: Sequence[str] = ()) -> list[Chapter]:
    """Return the chapters with maps of one unit on one scale, and each model in one colour.

    Args:
        chapters: the chapters.
        models: labels of the models, if the page shows several.
    """
    chapters = list(chapters)
    # The maps of layers and heads by their unit. Square maps (of attention) each keep their scale.
    contents = chain.from_iterable(chapter.blocks for chapter in chapters)
    maps = [block for block in contents if isinstance(block, Heatmap) and not block.is_attention]
    units = group_values((_name_unit(block), block) for block in maps)
    scales = {unit: _pool_scale(group) for unit, group in units.items()}
    colours = {name: index for index, name in enumerate(models)}
    result = []
    for chapter in chapters:
        coloured = [_colour_block(block, scales, colours) for block in chapter.blocks]
        result.append(replace(chapter, blocks=coloured))
    return result


def _name_unit(block: Heatmap) -> str:
    """Return a key for the scale of a map: maps with equal keys share a scale of colours.

    These are all maps of shares, all maps of changes in the same unit, and all maps of the same
    figure.
    """
    column = block.column
    if block.centre is not None:  # a map of changes
        # A column without a unit has a format that tells units apart: `+.1%` or `+.3g`.
        return f"change in {column.unit or column.format[-1]}"
    if column.format.endswith("%"):
        return "share"
    return f"{column.label} {column.unit}"


def _pool_scale(group: Sequence[Heatmap]) -> Scale:
    """Return one scale of colours for the values of several maps; shares begin at 0."""
    # The scale of one map with the rows of all maps.
    rows = chain.from_iterable(block.values for block in group)
    scale = compute_scale(replace(group[0], values=[*rows], scale=None))
    # Some maps had a scale before, which must fit into the new one.
    scales = [scale, *(block.scale for block in group if block.scale is not None)]
    low = min(each.low for each in scales)
    high = max(each.high for each in scales)
    if _name_unit(group[0]) == "share":
        low = min(low, 0.0)
    return Scale(low, high, log=scale.log)


def _colour_block(block: Block, scales: Mapping[str, Scale], colours: Mapping[str, int]) -> Block:
    """Return a map with the scale of its unit, or a chart with the colours of its models.

    Args:
        block: a block of a page; a block that is neither map nor chart is returned unchanged.
        scales: the scale of colours of each unit.
        colours: the index of the colour of each model.
    """
    if isinstance(block, Heatmap) and not block.is_attention:
        return replace(block, scale=scales[_name_unit(block)])
    if isinstance(block, Histogram):
        shown = {name: index for name, index in colours.items() if name in block.values}
        return replace(block, colours=shown)
    if isinstance(block, Curve):
        return replace(block, series=[_colour_series(each, colours) for each in block.series])
    return block


def _colour_series(series: Series, colours: Mapping[str, int]) -> Series:
    """Return a series of points in the colour of its model; unchanged if it is of no model.

    Args:
        series: the series; its label begins with the name of its model.
        colours: the index of the colour of each model.
    """
    # The longest name first: `demo int4:32 mean` is a series of `demo int4:32`, not of `demo`.
    for name in sorted(colours, key=len, reverse=True):
        if series.label == name or series.label.startswith(f"{name} "):
            return replace(series, colour=colours[name])
    return series
