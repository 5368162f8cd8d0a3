"""Labels: the classes of data as classes of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lipaudit.data.samples import warning
from lipaudit.errors import InputError
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

SHOWN = 5
"""Number of classes listed in a message."""


class LabelError(InputError):
    """Labels of the data that are not classes of the model; `name` is the first one."""

    def __init__(self, message: str, advice: str = "", *, name: str = "") -> None:
        super().__init__(message, advice)
        self.name = name


def match_classes(
    names: Sequence[str], net: Net, *, order: bool = True
) -> tuple[dict[str, int], tuple[Note, ...]]:
    """Match the class names of a data set with the model's classes.

    First by name, ignoring case: one of several names separated by commas, or an alias (an
    ImageNet synset). If no name is known, as class numbers. Else by order, if the counts agree; a
    warning then lists the whole map.

    Args:
        names: every class of the data set, in the data set's order (folders: sorted).
        net: the model.
        order: whether numbers that are not classes may be matched by order, too.

    Raises:
        LabelError: no match, so an accuracy would be meaningless; `name` is the first unknown
            class.
    """
    known = {_normalise(alias): i for alias, i in net.aliases.items()}
    if net.labels is None:  # the placeholder names of transformers
        known |= {f"label {i}": i for i in range(net.classes or 0)}
    for i, label in enumerate(net.labels or ()):
        for name in (*label.split(","), label):
            known.setdefault(_normalise(name), i)
    index = {
        name: known.get(_normalise(name), known.get(str(_read_number(name)))) for name in names
    }
    if None not in index.values():
        return {name: i for name, i in index.items() if i is not None}, ()
    # Numbers and order only if no name is known: a partial match is a mistake.
    if not any(i is not None for i in index.values()):
        numbers = {name: number for name in names if (number := _read_number(name)) is not None}
        if len(numbers) == len(names) and (
            not order or set(numbers.values()) <= set(range(net.classes or 0))
        ):
            require_labels(numbers, net)
            return numbers, ()
        # As many names as classes: match by order as a last resort, with a warning.
        if net.classes == len(names):
            try:  # in the data set's order, but numbers by size: 2.0 before 10.0
                order_of = {name: i for i, name in enumerate(sorted(names, key=float))}
            except ValueError:
                order_of = {name: i for i, name in enumerate(names)}
            labels = net.labels
            text = "class names were matched only by their order: " + ", ".join(
                f"{name!r} is class {i}" + (f" ({labels[i]!r})" if labels else "")
                for name, i in order_of.items()
            )
            return order_of, (warning("labels-by-order", text),)
    stranger = next(name for name, i in index.items() if i is None)
    has = "no class names" if not known else "no class of that name"
    listed = f" ({_list_first(net.labels)})" if net.labels else ""
    raise LabelError(
        f"the data have the class {stranger!r}, but the model has {has}, and {net.classes} "
        f"classes{listed} for the data's {len(names)} ({_list_first(names)})",
        "Rename the classes to the model's names, or give exactly as many classes as the "
        "model, in its order. To train a new classifier, use `lipaudit train --classes`.",
        name=stranger,
    )


def match_labels(
    values: Sequence[Any],
    net: Net,
    places: Sequence[str],
    origin: str,
    classes: Sequence[str] | None = None,
) -> tuple[list[int], tuple[Note, ...]]:
    """Return the model's class numbers for labels that are class names or numbers.

    Args:
        values: labels of the whole data set.
        net: the model.
        places: where each label is, for messages: `line 7`.
        origin: the data set, for messages.
        classes: the data set's class names, if the labels are their numbers; None: the labels
            define the classes.

    Raises:
        LabelError: a label is not a class; the message gives its place.
    """
    if classes is not None and min(values, default=0) >= 0:
        index, notes = match_classes(classes, net)
        return [index[classes[value]] for value in values], notes
    names = [str(value).strip() for value in values]
    try:
        # Labels of rows that are numbers are never matched by order.
        index, notes = match_classes(sorted(set(names)), net, order=False)
    except LabelError as error:
        place = places[names.index(error.name)]
        raise LabelError(f"{origin}: {place}: {error.message}", error.advice) from None
    return [index[name] for name in names], notes


def _read_number(name: str) -> int | None:
    """Read a class number; a share like 0.7 is not one, and must not become class 0."""
    head, _, decimals = name.partition(".")
    if name in ("True", "False"):
        return int(name == "True")
    whole = head.removeprefix("-").isdecimal() and not decimals.strip("0")
    return int(head) if whole else None


def require_labels(numbers: Mapping[str, int], net: Net, origin: str = "") -> None:
    """Refuse labels that are not class numbers of the model.

    Raises:
        LabelError: the message names the first such label.
    """
    classes = net.classes
    for name, i in numbers.items():
        if classes and not 0 <= i < classes:
            raise LabelError(
                f"{origin}label {name} is not one of the model's {classes} classes (0 to "
                f"{classes - 1})",
                "Number the labels from 0, in the order of the model's outputs.",
                name=name,
            )


def _list_first(names: Sequence[str]) -> str:
    """List the first of some class names.

    >>> _list_first("abcdefg")
    "'a', 'b', 'c', 'd', 'e', ..."
    """
    return ", ".join([*map(repr, names[:SHOWN]), *(["..."] if len(names) > SHOWN else [])])


def _normalise(name: str) -> str:
    return name.strip().replace("_", " ").casefold()
