"""Samples of a run: which are drawn, how their labels are matched, and how they become a batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.data.batch import Batch, Origin, identify_samples
from lipaudit.data.hub import Commit
from lipaudit.errors import InputError, LipauditError, first_line, out_of_memory
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

T = TypeVar("T")
SHOWN = 5
"""Number of classes listed in a message."""
DEFLATED = 1032
"""Largest number of bytes to which one byte of a deflated file can unpack."""


@dataclass(frozen=True)
class DataOptions:
    """What the user says about the data beyond their name.

    Attributes:
        samples: how many to take.
        seed: which ones: they are drawn without replacement from a stream of this seed.
        max_tokens: longest text, in tokens with the special ones.
        text_column: column of a table that holds the text, or two of pairs with a comma between;
            by default the first usual name.
        label_column: column that holds the labels; by default the first usual name.
        offline: never open a connection; only what is on this machine.
        skip_bad: leave out samples that cannot be read, with a note, where they would be refused.
        scored: read prompts with what a language model is to score behind them.
    """

    samples: int = 32
    seed: int = 0
    max_tokens: int = 128
    text_column: str | None = None
    label_column: str | None = None
    offline: bool = False
    skip_bad: bool = False
    scored: bool = False


@dataclass(frozen=True)
class Task:
    """What a language model is asked by scoring continuations.

    Attributes:
        kind: how likely a continuation is; which of several choices; which label.
        classes: what the classes are called: a continuation and its rival, letters, labels.
    """

    kind: Literal["continuation", "choices", "labels"]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Samples:
    """All the samples of one run.

    Attributes:
        batch: the samples; text is padded to the longest of them.
        notes: what must be said of them: how labels were matched, texts that were cut.
        commit: the state of a repository of the Hub that they were read from.
        origins: where each of them is found, in the order of the batch; empty where none is.
        task: what they ask, where they are prompts with continuations to be scored.
        spec: the DATA argument they came from.
    """

    batch: Batch
    notes: tuple[Note, ...] = ()
    commit: Commit | None = None
    origins: tuple[Origin, ...] = ()
    task: Task | None = None
    spec: str = ""

    @property
    def suite_id(self) -> str:
        """Identity of the set of samples, whatever their order."""
        return hashlib.sha256("\n".join(sorted(self.batch.ids)).encode()).hexdigest()[:16]


def remark(code: str, text: str) -> Note:
    """Make a note that informs."""
    return Note(level="info", code=code, text=text)


def warning(code: str, text: str) -> Note:
    """Make a note that warns."""
    return Note(level="warning", code=code, text=text)


def draw_indices(total: int, samples: int, seed: int) -> list[int]:
    """Draw without replacement; a larger number of samples only adds to a smaller one."""
    # Always the whole permutation: n + 1 samples are n and one more.
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
    for i in draw_indices(total, total, options.seed):
        if len(drawn) == options.samples:
            break
        try:
            drawn.append((i, read(i)))
        except InputError as error:
            if not options.skip_bad:
                raise
            faults.append(error.message)
    if not drawn:
        raise InputError(f"none of {total} {what} can be read ({faults[0]})", "Check the files.")
    return drawn, note_left_out(faults, what)


def note_left_out(faults: Sequence[str], what: str) -> tuple[Note, ...]:
    """Say how many samples were left out for their faults, and the first of those."""
    if not faults:
        return ()
    text = f"unreadable {what} were left out: {len(faults)} (the first: {faults[0]})"
    return (warning("skipped-bad", text),)


def make_samples(
    x: Sequence[Tensor],
    net: Net,
    y: Sequence[int] | None = None,
    *,
    texts: Sequence[str | tuple[str, str]] = (),
    limit: int = 0,
    origins: Sequence[Origin] = (),
    notes: tuple[Note, ...] = (),
    task: Task | None = None,
) -> Samples:
    """Put samples together, texts padded to the longest; ids do not depend on the padding.

    Args:
        x: samples as the model takes them; token ids of their own length for text.
        net: the model.
        y: labels as the model numbers its classes, or None.
        texts: the text of each, or the two of a pair; empty where they are no texts.
        limit: the tokens after which texts are cut; 0 where they are no texts.
        origins: where each of them is found; empty of samples that are made up.
        notes: what must be said of them.
        task: what they ask, where they are prompts with continuations to be scored.
    """
    ids, labels = identify_samples(x, y), None if y is None else torch.as_tensor(y)
    if net.kind != "text":
        batch = Batch(torch.stack(list(x)), labels, ids)
        return Samples(batch, notes, None, tuple(origins), task)
    padded = pad_sequence(list(x), batch_first=True, padding_value=net.pad_id)
    mask = torch.arange(padded.shape[1]) < torch.as_tensor([len(row) for row in x])[:, None]
    written = tuple((text,) if isinstance(text, str) else text for text in texts)
    # Without a mask models take their faster path.
    needed = None if bool(mask.all()) else mask
    batch = Batch(padded, labels, ids, needed, texts=written, limit=limit)
    return Samples(batch, notes, None, tuple(origins), task)


class LabelError(InputError):
    """The labels of the data are not classes of the model; `name` is the first of them."""

    def __init__(self, message: str, advice: str = "", *, name: str = "") -> None:
        super().__init__(message, advice)
        self.name = name


def match_classes(
    names: Sequence[str], net: Net, *, order: bool = True
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
    known = _list_known_names(net)
    index = {
        name: known.get(_normalise(name), known.get(str(_read_number(name)))) for name in names
    }
    if None not in index.values():
        return {name: i for name, i in index.items() if i is not None}, ()
    # Numbers and order only where no name is known: half a match is a mistake.
    if not any(i is not None for i in index.values()):
        numbers = {name: number for name in names if (number := _read_number(name)) is not None}
        if len(numbers) == len(names) and (
            not order or set(numbers.values()) <= set(range(net.classes or 0))
        ):
            require_labels(numbers, net)
            return numbers, ()
        # As many names as classes: the order is the last resort, and is said.
        if net.classes == len(names):
            order_of = {name: i for i, name in enumerate(_sort_names(names))}
            labels = net.info.labels
            text = "class names were matched only by their order: " + ", ".join(
                f"{name!r} is class {i}" + (f" ({labels[i]!r})" if labels else "")
                for name, i in order_of.items()
            )
            return order_of, (warning("labels-by-order", text),)
    stranger = next(name for name, i in index.items() if i is None)
    has = "no class names" if not known else "no class of that name"
    listed = f" ({_list_first(net.info.labels)})" if net.info.labels else ""
    raise LabelError(
        f"the data have the class {stranger!r}, but the model has {has}, and {net.classes} "
        f"classes{listed} for the data's {len(names)} ({_list_first(names)})",
        "Rename the classes to the model's names, or give exactly as many classes as the "
        "model, in its order. To train a new classifier, use `lipaudit train --classes`.",
        name=stranger,
    )


def match_labels(
    values: Sequence[Any], net: Net, places: Sequence[str], *, origin: str
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
        # Labels of rows are never numbered by their order where they are numbers.
        index, notes = match_classes(sorted(set(names)), net, order=False)
    except LabelError as error:
        place = places[names.index(error.name)]
        raise LabelError(f"{origin}: {place}: {error.message}", error.advice) from None
    return [index[name] for name in names], notes


def _read_number(name: str) -> int | None:
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


def require_labels(numbers: Mapping[str, int], net: Net, origin: str = "") -> None:
    """Refuse labels, by how they are written, that are no class of the model.

    Raises:
        LabelError: with the first such label.
    """
    classes = net.classes
    wrong = [name for name, i in numbers.items() if classes and not 0 <= i < classes]
    if classes and wrong:
        raise LabelError(
            f"{origin}label {wrong[0]} is not one of the model's {classes} classes (0 to "
            f"{classes - 1})",
            "Number the labels from 0, in the order of the model's outputs.",
            name=wrong[0],
        )


def _list_first(names: Sequence[str]) -> str:
    """Name the first of some classes.

    >>> _list_first("abcdefg")
    "'a', 'b', 'c', 'd', 'e', ..."
    """
    return ", ".join([*map(repr, names[:SHOWN]), *(["..."] if len(names) > SHOWN else [])])


def _list_known_names(net: Net) -> dict[str, int]:
    names = {_normalise(alias): i for alias, i in net.aliases.items()}
    if net.info.labels is None:  # transformers calls classes so that have no names
        names |= {f"label {i}": i for i in range(net.classes or 0)}
    for i, label in enumerate(net.info.labels or ()):
        for name in (*label.split(","), label):
            names.setdefault(_normalise(name), i)
    return names


def _normalise(name: str) -> str:
    return name.strip().replace("_", " ").casefold()


# Damaged and hostile files: one error for each, and sizes are checked before memory is taken.


@contextmanager
def refuse_damage(name: object, kind: str, advice: str) -> Iterator[None]:
    """Turn whatever a library raises at a damaged file into one error.

    Args:
        name: the file, for the message.
        kind: what it should be: `.npz file`, `image`.
        advice: what to do about it.

    Raises:
        InputError: the block raised an exception that is not lipaudit's.
    """
    try:
        yield
    except LipauditError:
        raise
    except Exception as error:  # every format's library has exceptions of its own
        reason = first_line(error) or type(error).__name__
        reason = "it needs more memory than is available" if out_of_memory(error) else reason
        raise InputError(f"{name} is not a readable {kind} ({reason})", advice) from error


def check_size(shape: Sequence[int], width: int, most: int) -> int:
    """Return the bytes of an array whose header gives its shape.

    Args:
        shape: as the header claims it.
        width: bytes of a number.
        most: bytes that the file can hold.

    Raises:
        ValueError: the array cannot be in the file.
    """
    size = math.prod(map(int, shape)) * width
    if min(shape, default=0) < 0 or size > most:
        sizes = " x ".join(map(str, shape))
        raise ValueError(
            f"its header declares {sizes} values, but the file can contain at most {most} bytes"
        )
    return size
