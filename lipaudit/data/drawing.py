"""Which samples are taken, how their labels are matched, and how they become a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.data.batch import Batch, Origin, sample_ids
from lipaudit.data.hub.commit import Commit
from lipaudit.data.intake import DataOptions, Intake, Task, remark, warning
from lipaudit.errors import InputError
from lipaudit.results import Note

T = TypeVar("T")
SHOWN = 5
"""Classes that a message names."""


class LabelError(InputError):
    """The labels of the data are not classes of the model."""


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
    """

    x: Sequence[Tensor]
    y: Sequence[int] | None = None
    notes: tuple[Note, ...] = field(default=())
    commit: Commit | None = None
    origins: Sequence[Origin] = ()
    task: Task | None = None


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
    return Batch(x, y, ids, None if bool(mask.all()) else mask)


def class_indices(names: Sequence[str], net: Intake) -> tuple[dict[str, int], tuple[Note, ...]]:
    """Match the class names of a data set with the model's classes.

    By name, whatever its case, one of several names separated by commas, or an alias (an ImageNet
    synset); else in their order, where the counts agree, which a note tells.

    Args:
        names: every class of the data set, in the data set's order (folders: sorted).
        net: the model.

    Raises:
        LabelError: neither works: an accuracy on such labels would mean nothing.
    """
    known = _known_names(net)
    if all(_plain(name) in known for name in names):
        return {name: known[_plain(name)] for name in names}, ()
    if net.classes == len(names):
        order = {name: i for i, name in enumerate(names)}
        return order, (remark("labels-by-order", _order_text(order, net)),)
    stranger = next(name for name in names if _plain(name) not in known)
    has = "no class names" if not known else "no class of that name"
    own = f" ({_some(net.info.labels)})" if net.info.labels else ""
    raise LabelError(
        f"the data have a class {stranger!r}; the model has {has}, and {net.classes} classes{own} "
        f"for the data's {len(names)} ({_some(names)})",
        "Rename the classes to the model's, or give as many as the model has, in its order; "
        "`lipaudit train --classes` trains a new classifier.",
    )


def require_labels(y: Sequence[int], net: Intake, *, origin: str) -> None:
    """Refuse labels that are no class of the model.

    Raises:
        LabelError: with the first such label.
    """
    classes = net.classes
    if classes is None:
        return
    wrong = next((i for i, label in enumerate(y) if not 0 <= label < classes), None)
    if wrong is not None:
        raise LabelError(
            f"{origin}: label {y[wrong]} is none of the model's {classes} classes "
            f"(0 to {classes - 1})",
            "Labels count from 0, in the order of the model's outputs.",
        )


def _some(names: Sequence[str]) -> str:
    """Name the first of some classes.

    >>> _some("abcdefg")
    "'a', 'b', 'c', 'd', 'e', ..."
    """
    return ", ".join([*map(repr, names[:SHOWN]), *(["..."] if len(names) > SHOWN else [])])


def _known_names(net: Intake) -> dict[str, int]:
    names = {_plain(alias): i for alias, i in net.aliases.items()}
    for i, label in enumerate(net.info.labels or ()):
        for name in (*label.split(","), label):
            names.setdefault(_plain(name), i)
    return names


def _plain(name: str) -> str:
    return name.strip().replace("_", " ").casefold()


def _order_text(order: dict[str, int], net: Intake) -> str:
    first = next(iter(order))
    shown = f" ({net.info.labels[0]!r})" if net.info.labels else ""
    return f"class names were matched by their order: {first!r} is class 0{shown}, and so on"
