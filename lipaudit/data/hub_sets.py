"""Samples of a table of the `datasets` library: `hf:NAME[SPLIT]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PIL.Image import Image
from torch import Tensor

from lipaudit.data.batch import SampleOrigin
from lipaudit.data.continuations import read_continuations
from lipaudit.data.hub import hub_access, open_split, parse_reference
from lipaudit.data.images import refuse_images, to_box
from lipaudit.data.samples import (
    DataOptions,
    Samples,
    draw_indices,
    make_samples,
    match_classes,
    match_labels,
)
from lipaudit.data.tables import TableRow, check_row, choose_label_column, choose_text_columns
from lipaudit.data.text import draw_texts, require_sound
from lipaudit.errors import InputError
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

IMAGES = ("image", "img", "picture")


def read_dataset(reference: str, net: Net, options: DataOptions) -> Samples:
    """Read `NAME[/CONFIGURATION][[SPLIT]][@REVISION]`; a directory is a name, too.

    From a repository of the Hub, only the split is downloaded, by default `test`. Labels with
    names are matched by name.

    Raises:
        InputError: `datasets` is not installed, or the data set, split or column does not exist.
    """
    origin = f"hf:{reference}"
    with hub_access(offline=options.offline):
        table, commit = open_split(parse_reference(reference), offline=options.offline)
    if not len(table):
        raise InputError(f"{origin} is empty", "Choose another split.")
    columns: list[str] = table.column_names
    label = choose_label_column(columns, options, origin=origin)
    names = None if label is None else getattr(table.features[label], "names", None)
    if options.scored and net.kind == "text":
        rows = list(_Rows(table))
        samples = read_continuations(rows, net, options, origin=origin, classes=names)
        return replace(samples, commit=commit)
    labels: list[int] | None = None
    notes: tuple[Note, ...] = ()
    if label is not None and net.classes is not None:
        values, places = list(table[label]), [f"index {i}" for i in range(len(table))]
        for place, value in zip(places, values, strict=True):
            require_sound(check_row(TableRow(place, {label: value}), (), label), origin)
        if names is None or min(values) < 0:
            labels, notes = match_labels(values, net, places, origin=origin)
        else:
            index, notes = match_classes(names, net)
            labels = [index[names[v]] for v in values]
    if net.kind == "text":
        text = choose_text_columns(columns, options, origin=origin)
        samples = draw_texts(_Rows(table), text, labels, net, options, origin=origin)
    else:
        order = draw_indices(len(table), options.samples, options.seed)
        y = None if labels is None else [labels[i] for i in order]
        spots = [SampleOrigin(f"index {i}") for i in order]
        samples = make_samples(_read_pictures(table, order, net, origin), net, y, origins=spots)
    return replace(samples, notes=samples.notes + notes, commit=commit)


class _Rows(Sequence[TableRow]):
    """The rows of a data set, each read on first use."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: Any) -> Any:
        return TableRow(f"index {i}", self.table[i])


def _read_pictures(table: Any, order: list[int], net: Net, origin: str) -> list[Tensor]:
    image = next((k for k in IMAGES if k in table.column_names), None)
    with refuse_images(origin):
        rows = table[order][image] if image is not None else []
        if net.prepare is None or not rows or not isinstance(rows[0], Image):
            raise InputError(
                f"{origin} has no column of images (columns: {', '.join(table.column_names)})",
                f"Name it {' or '.join(IMAGES)}; the model takes {net.kind}.",
            )
        return [to_box(net.prepare(picture), net.box) for picture in rows]
