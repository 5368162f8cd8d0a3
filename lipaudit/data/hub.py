"""Data sets of the Hugging Face Hub, or saved by the `datasets` library: `hf:NAME[SPLIT]`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lipaudit.data.drawing import Drawn, picks
from lipaudit.data.intake import DataOptions, Intake, remark
from lipaudit.data.text import LABELS, from_rows, label_numbers
from lipaudit.errors import InputError

IMAGES = ("image", "img", "pixel_values", "picture")
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
    table = _open(match["name"], match["split"] or DEFAULT_SPLIT)
    rows = [table[i] for i in picks(len(table), options.samples, options.seed)]
    if not rows:
        raise InputError(f"hf:{reference} is empty", "Choose another split.")
    if net.kind == "text":
        return from_rows(_named(rows, table), net, options, origin=f"hf:{reference}")
    return _images(_named(rows, table), net, options, f"hf:{reference}")


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
            f"the data set {name} [{split}] cannot be had ({type(error).__name__}: {error})",
            "Check name, split and network; a directory written by save_to_disk works offline.",
        ) from error


def _named(rows: list[dict[str, Any]], table: Any) -> list[dict[str, Any]]:
    """Put class names in place of the data set's own numbers for them."""
    named = {k: f.names for k, f in table.features.items() if hasattr(f, "names")}
    return [{k: named[k][v] if k in named else v for k, v in row.items()} for row in rows]


def _images(rows: list[dict[str, Any]], net: Intake, options: DataOptions, origin: str) -> Drawn:
    image = next((k for k in IMAGES if k in rows[0]), None)
    if image is None or net.prepare is None:
        raise InputError(
            f"{origin} has no image column (columns: {', '.join(rows[0])})",
            f"It should be one of {', '.join(IMAGES)}; the model takes {net.kind}.",
        )
    x = [net.prepare(row[image]) for row in rows]
    label = options.label_column or next((k for k in LABELS if k in rows[0]), None)
    if label is None or label not in rows[0]:
        return Drawn(x)
    if net.classes is None:
        return Drawn(x, None, (remark("labels-unused", "labels unused: the model has none"),))
    y, notes = label_numbers([row[label] for row in rows], net, origin=origin)
    return Drawn(x, y, notes)
