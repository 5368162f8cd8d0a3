"""The group of each sample: of a column of their table, or its class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lipaudit.data import tables
from lipaudit.data.batch import Samples
from lipaudit.data.tables import SampleTable
from lipaudit.data.texts import is_empty
from lipaudit.errors import InputError
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

# Word of --group-column for the classes, unless a table has a column of that name.
CLASSES = "classes"


def group_by_column(samples: Samples, table: SampleTable, name: str) -> Samples:
    """Return samples with the groups that a column of their table gives.

    A sample with an empty cell belongs to no group; a note counts them.

    Args:
        samples: samples that were drawn from the table.
        table: the table.
        name: the column.

    Raises:
        InputError: the table has no such column, the column is empty, or a cell is not a single
            value.
    """
    tables.require_column(name, table)
    values = table.read_column(name)
    names = table.classes.get(name)  # class names, if the column has class numbers
    row_of_place = {place: row for row, place in enumerate(table.places)}
    groups = []
    for origin in samples.origins:
        place = origin.place
        if place not in row_of_place:  # the place of a sample may end in its id: "line 7, id 31"
            place, _, _ = place.partition(", id ")
        value = values[row_of_place[place]]
        if isinstance(value, (list, tuple, dict, bytes)):
            kind = type(value).__name__
            raise InputError(
                f"{table.origin}: {place} has a {kind} in {name!r}, and a group is one value",
                "Choose a column of texts or numbers.",
            )
        groups.append(_write_group(value, names))
    return _set_groups(samples, groups, f"{table.origin}: the column {name!r}")


def group_by_class(samples: Samples, net: Net, name: str) -> Samples:
    """Return samples whose groups are their classes.

    Args:
        samples: samples without a table, or whose table has no column of that name.
        net: the model, which names the classes.
        name: the value of --group-column; only `classes` is accepted here.

    Raises:
        InputError: the value is not `classes`, or no sample has a label.
    """
    if name != CLASSES:
        raise InputError(
            f"{samples.spec} has no columns, so --group-column {name} names none",
            "Give --group-column classes, or a table (.csv, .jsonl, .parquet).",
        )
    names = net.labels or ()
    if samples.task is not None:
        names = samples.task.classes
    labels: list[int] = []
    if samples.batch.y is not None:
        labels = samples.batch.y.tolist()
    groups = []
    for label in labels:
        if label < 0:  # unknown
            groups.append("")
        elif label < len(names):
            groups.append(names[label])
        else:
            groups.append(str(label))
    return _set_groups(samples, groups, f"{samples.spec}: the list of labels")


def _write_group(value: Any, names: Sequence[str] | None) -> str:
    """Return the name of the group in a cell, without line breaks; "" for an empty cell.

    Args:
        value: the cell.
        names: class names, if the column has class numbers; these become names.
    """
    if is_empty(value):
        return ""
    if names is not None and isinstance(value, int) and 0 <= value < len(names):
        value = names[value]
    return " ".join(str(value).split())


def _set_groups(samples: Samples, groups: Sequence[str], what: str) -> Samples:
    """Return samples with their groups, and a note on samples without a group.

    Args:
        samples: the samples.
        groups: the group of each sample; "" for a sample without a group.
        what: the source of the groups, for messages.
    """
    if not any(groups):
        raise InputError(f"{what} is empty", "Choose another column with --group-column.")
    origins = []
    for origin, group in zip(samples.origins, groups, strict=True):
        origins.append(replace(origin, group=group))
    notes = samples.notes
    lacking = sum(not group for group in groups)
    if lacking:
        text = f"{lacking} of {len(groups)} samples belong to no group: {what} is empty for them"
        notes += (Note.warn("no-group", text),)
    return replace(samples, origins=tuple(origins), notes=notes)
