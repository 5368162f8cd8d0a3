"""Samples of a table of the `datasets` library: `hf:NAME[SPLIT]`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PIL.Image import Image
from torch import Tensor

from lipaudit.data.batch import Origin
from lipaudit.data.continuations import read_continuations
from lipaudit.data.hub import hub_access, open_split, parse_reference
from lipaudit.data.images import refuse_images, to_box
from lipaudit.data.samples import DataOptions, Drawn, draw_indices, match_classes, match_labels
from lipaudit.data.tables import Row, check_row, choose_label_column, choose_text_columns
from lipaudit.data.text import draw_texts, require_sound
from lipaudit.errors import InputError
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

IMAGES = ("image", "img", "picture")


def read_dataset(reference: str, net: Net, options: DataOptions) -> Drawn:
    """Read `NAME[/CONFIGURATION][[SPLIT]][@REVISION]`; a directory is a name too.

    Of a repository of the Hub only the split is downloaded, `test` where none is named. Labels
    that the data set names are matched by name.

    Raises:
        InputError: `datasets` is not installed, or has no such data set, split or column.
    """
    origin = f"hf:{reference}"
    with hub_access(offline=options.offline):
        table, commit = open_split(parse_reference(reference), offline=options.offline)
    if not len(table):
        raise InputError(f"{origin} is empty", "Choose another split.")
    columns: list[str] = table.column_names
    label = choose_label_column(columns, options, origin=origin)
    classes = None if label is None else getattr(table.features[label], "names", None)
    if options.scored and net.kind == "text":
        rows = [Row(f"index {i}", values) for i, values in enumerate(table)]
        drawn = read_continuations(rows, net, options, origin=origin, classes=classes)
        return replace(drawn, commit=commit)
    if net.kind == "text":
        text = choose_text_columns(columns, options, origin=origin)

        def row_at(i: int) -> Row:
            return check_row(Row(f"index {i}", table[i]), text)

        order, drawn = draw_texts(len(table), row_at, text, net, options, origin=origin)
    else:
        order = draw_indices(len(table), options.samples, options.seed)
        places = [Origin(f"index {i}") for i in order]
        drawn = Drawn(_read_pictures(table, order, net, origin), origins=places)
    if label is None or net.classes is None:
        return replace(drawn, commit=commit)
    y, notes = _match_labels(label, list(table[label]), classes, net, origin)
    return replace(drawn, y=[y[i] for i in order], notes=drawn.notes + notes, commit=commit)


def _read_pictures(table: Any, order: list[int], net: Net, origin: str) -> list[Tensor]:
    image = next((k for k in IMAGES if k in table.column_names), None)
    with refuse_images(origin):
        rows = table[order][image] if image is not None else []
    if net.prepare is None or not rows or not isinstance(rows[0], Image):
        raise InputError(
            f"{origin} has no column of images (columns: {', '.join(table.column_names)})",
            f"It should be named {' or '.join(IMAGES)}; the model takes {net.kind}.",
        )
    with refuse_images(origin):
        return [to_box(net.prepare(picture), net.box) for picture in rows]


def _match_labels(
    label: str, values: list[Any], names: list[str] | None, net: Net, origin: str
) -> tuple[list[int], tuple[Note, ...]]:
    """Return the labels of the whole table as class numbers of the model."""
    places = [f"index {i}" for i in range(len(values))]
    for place, value in zip(places, values, strict=True):
        require_sound(check_row(Row(place, {label: value}), (), label), origin)
    if names is None or min(values) < 0:
        return match_labels(values, net, places, origin=origin)
    index, notes = match_classes(names, net)
    return [index[names[v]] for v in values], notes
