"""Data sets of the Hugging Face Hub, or saved by the `datasets` library: `hf:NAME[SPLIT]`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor

from lipaudit.data.drawing import Drawn, class_indices, picks
from lipaudit.data.intake import DataOptions, Intake
from lipaudit.data.text import class_numbers, label_column, text_column, tokenized
from lipaudit.errors import InputError
from lipaudit.results import Note

IMAGES = ("image", "img", "picture")
DEFAULT_SPLIT = "test"


def read_dataset(reference: str, net: Intake, options: DataOptions) -> Drawn:
    """Read `NAME` or `NAME[SPLIT]`; a directory written by `save_to_disk` is a name too.

    Labels that the data set names are matched by name.

    Raises:
        InputError: `datasets` is not installed, or has no such data set, split or column.
    """
    match = re.fullmatch(r"(?P<name>[^\[\]]+)(\[(?P<split>[^\]]+)\])?", reference)
    if match is None:
        raise InputError(f"hf:{reference} names no data set", "Write hf:ORG/NAME[SPLIT].")
    origin = f"hf:{reference}"
    with hub_access(offline=options.offline):
        table = _open(match["name"], match["split"] or DEFAULT_SPLIT)
    if not len(table):
        raise InputError(f"{origin} is empty", "Choose another split.")
    order = picks(len(table), options.samples, options.seed)
    if net.kind == "text":
        column = text_column(table.column_names, options, origin=origin)
        x, notes = tokenized(table[order][column], net, options, origin=origin)
    else:
        x, notes = _pictures(table, order, net, origin), ()
    y, more = _labels(table, net, options, origin)
    return Drawn(x, None if y is None else [y[i] for i in order], notes + more)


@contextmanager
def hub_access(*, offline: bool) -> Iterator[None]:
    """Forbid connections to the Hub, where asked to, while the block runs."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _open(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "hf: data need the library `datasets`, which is not installed",
            "pip install 'lipaudit[datasets]'",
        ) from error
    try:
        if (Path(name) / "state.json").is_file():
            return datasets.load_from_disk(name)
        if (Path(name) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(name)[split]
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # every HTTP library has exceptions of its own
        raise InputError(
            f"the data set {name} [{split}] cannot be had "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            "Check name, split and network; a directory written by save_to_disk works offline.",
        ) from error


def _pictures(table: Any, order: list[int], net: Intake, origin: str) -> list[Tensor]:
    image = next((k for k in IMAGES if k in table.column_names), None)
    rows = table[order][image] if image is not None else []
    if net.prepare is None or not rows or not isinstance(rows[0], Image):
        raise InputError(
            f"{origin} has no column of images (columns: {', '.join(table.column_names)})",
            f"It should be named {' or '.join(IMAGES)}; the model takes {net.kind}.",
        )
    return [net.prepare(picture) for picture in rows]


def _labels(
    table: Any, net: Intake, options: DataOptions, origin: str
) -> tuple[list[int] | None, tuple[Note, ...]]:
    """Return the labels of the whole table as class numbers of the model."""
    column = label_column(table.column_names, options, origin=origin)
    if column is None or net.classes is None:
        return None, ()
    values, names = list(table[column]), getattr(table.features[column], "names", None)
    if names is None or min(values) < 0:
        return class_numbers(values, net, origin=origin)
    index, notes = class_indices(names, net)
    return [index[names[v]] for v in values], notes
