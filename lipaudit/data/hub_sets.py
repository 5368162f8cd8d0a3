"""Samples of a table of the `datasets` library: `hf:NAME[SPLIT]`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from PIL.Image import Image
from torch import Tensor

from lipaudit.data.batch import Origin
from lipaudit.data.continuations import read_continuations
from lipaudit.data.drawing import Drawn, class_indices, class_numbers, picks
from lipaudit.data.hub import Commit, hub_access, open_split, parse_reference
from lipaudit.data.images import refuse_images, to_box
from lipaudit.data.intake import DataOptions, Intake
from lipaudit.data.tables import Row, complete, label_column, text_columns
from lipaudit.data.text import Text, beginning, most_tokens, row_text, sound_rows, tokenize
from lipaudit.errors import InputError
from lipaudit.results import Note

IMAGES = ("image", "img", "picture")


def read_dataset(reference: str, net: Intake, options: DataOptions) -> Drawn:
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
    if options.scored and net.kind == "text":
        return _continuations(table, net, options, origin, commit)
    order = picks(len(table), options.samples, options.seed)
    texts: list[Text] = []
    if net.kind == "text":
        columns = text_columns(table.column_names, options, origin=origin)
        rows = [complete(Row(f"index {i}", table[i]), columns) for i in order]
        sound, faulty = sound_rows(rows, options, origin)
        order = [i for i, row in zip(order, rows, strict=True) if not row.fault]
        texts = [row_text(row.values, columns) for row in sound]
        x, notes = tokenize(texts, net, options, [row.place for row in sound], origin=origin)
        notes = faulty + notes
    else:
        x, notes = _pictures(table, order, net, origin), ()
    y, more = _labels(table, net, options, origin)
    labels = None if y is None else [y[i] for i in order]
    said = [beginning(text) for text in texts] or [""] * len(order)
    origins = [Origin(f"index {i}", text) for i, text in zip(order, said, strict=True)]
    limit = most_tokens(net, options)[0] if texts else 0
    return Drawn(x, labels, notes + more, commit, origins, texts=texts, limit=limit)


def _continuations(
    table: Any, net: Intake, options: DataOptions, origin: str, commit: Commit | None
) -> Drawn:
    rows = [Row(f"index {i}", values) for i, values in enumerate(table)]
    column = label_column(table.column_names, options, origin=origin)
    names = None if column is None else getattr(table.features[column], "names", None)
    drawn = read_continuations(rows, net, options, origin=origin, classes=names)
    return replace(drawn, commit=commit)


def _pictures(table: Any, order: list[int], net: Intake, origin: str) -> list[Tensor]:
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


def _labels(
    table: Any, net: Intake, options: DataOptions, origin: str
) -> tuple[list[int] | None, tuple[Note, ...]]:
    """Return the labels of the whole table as class numbers of the model."""
    column = label_column(table.column_names, options, origin=origin)
    if column is None or net.classes is None:
        return None, ()
    values, names = list(table[column]), getattr(table.features[column], "names", None)
    rows = [complete(Row(f"index {i}", {column: v}), (), column) for i, v in enumerate(values)]
    sound_rows(rows, replace(options, skip_bad=False), origin)
    if names is None or min(values) < 0:
        return class_numbers(values, net, [row.place for row in rows], origin=origin)
    index, notes = class_indices(names, net)
    return [index[names[v]] for v in values], notes
