"""Which samples are taken, how their labels are matched, and how they become a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.data.batch import Batch, Origin, sample_ids
from lipaudit.data.hub import Commit
from lipaudit.data.intake import DataOptions, Intake, Task, warning
from lipaudit.errors import InputError
from lipaudit.results import Note

T = TypeVar("T")
SHOWN = 5
"""Classes that a message names."""


class LabelError(InputError):
    """The labels of the data are not classes of the model; `name` is the first of them."""

    def __init__(self, message: str, advice: str = "", *, name: str = "") -> None:
        super().__init__(message, advice)
        self.name = name


@dataclass(frozen=True)
class Drawn:
    """The samples a source gave, one tensor each, before padding.

    Attributes:
        x: samples as the model takes them; token ids of their own length for text.
        y: labels as the model numbers its classes, or None.
        notes: what must be said of them.
        commit: the state of a repository of the Hub that they were read from.
        origins: where each of them is found; empty of samples that are made up.
        task: what they ask, where they are prompts with continuations to be scored.
        texts: the text of each, or the two of a pair; empty where they are no texts.
        limit: the tokens after which texts are cut; 0 where they are no texts.
    """

    x: Sequence[Tensor]
    y: Sequence[int] | None = None
    notes: tuple[Note, ...] = field(default=())
    commit: Commit | None = None
    origins: Sequence[Origin] = ()
    task: Task | None = None
    texts: Sequence[str | tuple[str, str]] = ()
    limit: int = 0


def picks(total: int, samples: int, seed: int) -> list[int]:
    """Draw without replacement; a larger number of samples only adds to a smaller one."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[:samples].tolist()


def draw(
    total: int, options: DataOptions, read: Callable[[int], T], *, what: str
) -> tuple[list[tuple[int, T]], tuple[Note, ...]]:
    """Read as many samples as are asked for, in the order of `picks`, each with its position.

    With `skip_bad`, the next ones take the place of those that cannot be read.

    Raises:
        InputError: one cannot be read; with `skip_bad`, none can.
    """
    drawn: list[tuple[int, T]] = []
    faults: list[str] = []
    for i in picks(total, total, options.seed):
        if len(drawn) == options.samples:
            break
        try:
            drawn.append((i, read(i)))
        except InputError as error:
            if not options.skip_bad:
                raise
            faults.append(error.message)
    if not drawn:
        raise InputError(f"none of {total} {what} can be read ({faults[0]})", "Check the data.")
    return drawn, left_out(faults, what)


def left_out(faults: Sequence[str], what: str) -> tuple[Note, ...]:
    """Say how many samples were left out for their faults, and the first of those."""
    if not faults:
        return ()
    text = f"{what} that cannot be read were left out: {len(faults)} (the first: {faults[0]})"
    return (warning("skipped-bad", text),)


def to_batch(drawn: Drawn, net: Intake) -> Batch:
    """Put samples together, texts padded to the longest; ids do not depend on the padding."""
    ids = sample_ids(drawn.x, drawn.y)
    y = None if drawn.y is None else torch.as_tensor(drawn.y)
    if net.kind != "text":
        return Batch(torch.stack(list(drawn.x)), y, ids)
    x = pad_sequence(list(drawn.x), batch_first=True, padding_value=net.pad_id)
    lengths = torch.as_tensor([len(tokens) for tokens in drawn.x])
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    texts = tuple((text,) if isinstance(text, str) else text for text in drawn.texts)
    padded = None if bool(mask.all()) else mask
    return Batch(x, y, ids, padded, texts=texts, limit=drawn.limit)


def class_indices(
    names: Sequence[str], net: Intake, *, order: bool = True
) -> tuple[dict[str, int], tuple[Note, ...]]:
    """Match the class names of a data set with the model's classes.

    By name first, whatever its case: one of several names separated by commas, or an alias (an
    ImageNet synset). Where no name is known, as numbers of classes. Else in their order, where the
    counts agree; a warning then lists the whole map.

    Args:
        names: every class of the data set, in the data set's order (folders: sorted).
        net: the model.
        order: match numbers that are no classes by their order, too.

    Raises:
        LabelError: nothing works: an accuracy on such labels would mean nothing. Its `name` is the
            first class that the model does not have.
    """
    known = _known_names(net)
    index = {name: known.get(_plain(name), known.get(str(_number(name)))) for name in names}
    if None not in index.values():
        return {name: i for name, i in index.items() if i is not None}, ()
    if not any(i is not None for i in index.values()):
        numbers = {name: number for name in names if (number := _number(name)) is not None}
        if len(numbers) == len(names) and (
            not order or set(numbers.values()) <= set(range(net.classes or 0))
        ):
            _require_numbers(numbers, net)
            return numbers, ()
        if net.classes == len(names):
            by_order = {name: i for i, name in enumerate(_sort_names(names))}
            return by_order, (warning("labels-by-order", _order_text(by_order, net)),)
    stranger = next(name for name, i in index.items() if i is None)
    has = "no class names" if not known else "no class of that name"
    own = f" ({_some(net.info.labels)})" if net.info.labels else ""
    raise LabelError(
        f"the data have a class {stranger!r}; the model has {has}, and {net.classes} classes{own} "
        f"for the data's {len(names)} ({_some(names)})",
        "Rename the classes to the model's, or give as many as the model has, in its order; "
        "`lipaudit train --classes` trains a new classifier.",
        name=stranger,
    )


def class_numbers(
    values: Sequence[Any], net: Intake, places: Sequence[str], *, origin: str
) -> tuple[list[int], tuple[Note, ...]]:
    """Return labels as the model's class numbers, from class names or numbers.

    Args:
        values: the labels of the whole data set, so that its classes are known.
        net: the model.
        places: where each label is, for messages: `line 7`.
        origin: the data set, for messages.

    Raises:
        LabelError: a label is no class; the message says where it is.
    """
    names = [str(value).strip() for value in values]
    try:
        index, notes = class_indices(sorted(set(names)), net, order=False)
    except LabelError as error:
        place = places[names.index(error.name)]
        raise LabelError(f"{origin}: {place}: {error.message}", error.advice) from None
    return [index[name] for name in names], notes


def _number(name: str) -> int | None:
    """Read a class number; a share like 0.7 is none, and must not become class 0."""
    head, _, decimals = name.partition(".")
    if name in ("True", "False"):
        return int(name == "True")
    whole = head.removeprefix("-").isdecimal() and not decimals.strip("0")
    return int(head) if whole else None


def _sort_names(names: Sequence[str]) -> Sequence[str]:
    """Return names in the data set's order, but numbers by their size: 2.0 before 10.0."""
    try:
        return sorted(names, key=float)
    except ValueError:
        return names


def require_labels(y: Sequence[int], net: Intake, *, origin: str) -> None:
    """Refuse labels that are no class of the model.

    Raises:
        LabelError: with the first such label.
    """
    try:
        _require_numbers({str(label): label for label in y}, net)
    except LabelError as error:
        raise LabelError(f"{origin}: {error.message}", error.advice) from None


def _require_numbers(numbers: Mapping[str, int], net: Intake) -> None:
    classes = net.classes
    wrong = [name for name, i in numbers.items() if classes and not 0 <= i < classes]
    if classes and wrong:
        raise LabelError(
            f"label {wrong[0]} is none of the model's {classes} classes (0 to {classes - 1})",
            "Labels count from 0, in the order of the model's outputs.",
            name=wrong[0],
        )


def _some(names: Sequence[str]) -> str:
    """Name the first of some classes.

    >>> _some("abcdefg")
    "'a', 'b', 'c', 'd', 'e', ..."
    """
    return ", ".join([*map(repr, names[:SHOWN]), *(["..."] if len(names) > SHOWN else [])])


def _known_names(net: Intake) -> dict[str, int]:
    names = {_plain(alias): i for alias, i in net.aliases.items()}
    if net.info.labels is None:  # transformers calls classes so that have no names
        names |= {f"label {i}": i for i in range(net.classes or 0)}
    for i, label in enumerate(net.info.labels or ()):
        for name in (*label.split(","), label):
            names.setdefault(_plain(name), i)
    return names


def _plain(name: str) -> str:
    return name.strip().replace("_", " ").casefold()


def _order_text(order: dict[str, int], net: Intake) -> str:
    labels = net.info.labels
    shown = (
        f"{name!r} is class {i}" + (f" ({labels[i]!r})" if labels else "")
        for name, i in order.items()
    )
    return f"class names were matched by their order alone: {', '.join(shown)}"
