"""The samples of a run: their batch and identities, how they are drawn, and their labels."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.errors import InputError, join_few, list_first
from lipaudit.tables import Note, Notes

if TYPE_CHECKING:
    from lipaudit.data.hub import Commit
    from lipaudit.models.net import Net

T = TypeVar("T")
SampleKind = Literal["image", "tokens", "text"]
TaskKind = Literal["continuation", "choices", "labels"]
# Returns the token ids of a text, cut to a number of tokens.
Tokenize = Callable[[str, int], list[int]]

SHORT = 64  # tokens of a short sample


@dataclass(frozen=True)
class Batch:
    """Samples in the form that a `Net` takes.

    Attributes:
        x: images (batch, channels, height, width) in [0, 1], float tokens (batch, tokens, width),
            or token ids (batch, tokens).
        y: labels (batch,), -1 where unknown, or None when the data have none at all.
        ids: one stable identity per sample (see `sample_ids`).
        mask: for text, True at real tokens (batch, tokens); None when nothing is padded.
        start: index of the first sample among the samples of the run.
        texts: the characters of each text, or of the two texts of a pair, if known.
        limit: number of tokens after which texts are cut; 0 without texts.
        continuations: what a language model scores behind each text, if the texts are prompts.
    """

    x: Tensor
    y: Tensor | None
    ids: tuple[str, ...]
    mask: Tensor | None = None
    start: int = 0
    texts: tuple[tuple[str, ...], ...] = ()
    limit: int = 0
    continuations: tuple[tuple[str, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_short(self) -> bool:
        """Return whether samples are small: at most 64 tokens, or images of 128 x 128 pixels."""
        tokens = self.x.shape[1]
        if self.x.ndim > 3:
            tokens = self.x[0, 0].numel() // 256  # patches of 16 x 16, the usual size
        return tokens <= SHORT

    def __getitem__(self, index: slice) -> Batch:
        """Return the samples of a slice, as a batch."""
        first, _stop, _step = index.indices(len(self))
        rows = torch.arange(len(self))[index]
        return replace(self.rows(rows), start=self.start + first)

    def rows(self, index: Tensor) -> Batch:
        """Return the samples at these positions, as a batch."""
        positions = index.tolist()

        def select(values: Sequence[T]) -> tuple[T, ...]:
            """Return the values at these positions; empty if the batch has no such values."""
            return tuple(values[i] for i in positions) if values else ()

        y = None
        if self.y is not None:
            y = self.y[index]
        return replace(
            self.rows_without_ids(index),
            y=y,
            ids=select(self.ids),
            texts=select(self.texts),
            limit=self.limit,
            continuations=select(self.continuations),
        )

    def rows_without_ids(self, index: Tensor) -> Batch:
        """Return the samples at these positions with x and mask only, for a forward pass.

        Selecting ids, which are Python objects, would copy the index from the GPU to the CPU.
        """
        mask = None
        if self.mask is not None:
            mask = self.mask[index]
        return Batch(self.x[index], y=None, ids=(), mask=mask)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Return the samples on a device; floating-point samples also take the dtype."""
        x_dtype = self.x.dtype
        if self.x.is_floating_point():
            x_dtype = dtype
        y = self.y
        if y is not None:
            y = y.to(device)
        mask = self.mask
        if mask is not None:
            mask = mask.to(device)
        return replace(self, x=self.x.to(device, x_dtype), y=y, mask=mask)

    def split(self, size: int) -> Iterator[Batch]:
        """Split into batches of at most `size` samples, in order, without superfluous padding."""
        for start in range(0, len(self), size):
            yield self[start : start + size].trim()

    def by_length(self, size: int) -> Iterator[Batch]:
        """Split into batches of at most `size` samples of equal length, without padding.

        Batches are in the order of their first samples, not of their lengths: so the first few
        batches represent all samples.
        """
        if self.mask is None:
            yield from self.split(size)
            return
        rows_by_length: dict[int, list[int]] = {}
        for row, length in enumerate(self.mask.sum(1).tolist()):
            rows_by_length.setdefault(length, []).append(row)
        rows_of_batches: list[list[int]] = []
        for rows in rows_by_length.values():
            rows_of_batches += (rows[i : i + size] for i in range(0, len(rows), size))
        for rows in sorted(rows_of_batches):  # in the order of the first sample of each batch
            batch = self.rows(torch.tensor(rows)).trim()
            mask = batch.mask
            # All texts have the same length, so usually no mask is needed. The mask stays if a
            # text has padding between its tokens.
            if mask is not None and mask.all():
                mask = None
            yield replace(batch, start=self.start + rows[0], mask=mask)

    def trim(self) -> Batch:
        """Return the same samples without trailing columns that are padding in every sample."""
        if self.mask is None or self.mask[:, -1].any():
            return self
        used_columns = self.mask.any(0).nonzero()
        length = int(used_columns.max()) + 1
        return replace(self, x=self.x[:, :length], mask=self.mask[:, :length])


@dataclass(frozen=True)
class ProcessBatches:
    """The batches of a run that this process measures: all, the unfinished ones, or a shard.

    Attributes:
        first: the first samples of the run, measured here or not. Facts about all samples come
            from them, so that every process has the same.
        batches: the batches that this process measures.
        unfinished: incomplete parts of an interrupted run, by the id of their first sample.
    """

    first: Batch
    batches: Iterable[Batch]
    unfinished: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that this process measures."""
        return iter(self.batches)


def get_first_of_run(batches: Iterable[Batch], first_here: Batch) -> Batch:
    """Return the first samples of a run, even if another process measures them.

    Facts about all samples, such as the attention layers, are found on these: so all processes of
    a run have equal facts. `batches` is not iterated: an engine stores the first samples on it.

    Args:
        batches: the batches that this process measures.
        first_here: the first of these batches. It is returned if `batches` are plain batches, as
            in a call from Python.
    """
    if isinstance(batches, ProcessBatches):
        return batches.first
    return first_here


def find_unfinished(batches: Iterable[Batch]) -> Mapping[str, Any] | None:
    """Return the incomplete results of an interrupted run, by the id of their first sample.

    None if the caller of the measure does not store incomplete results.
    """
    if isinstance(batches, ProcessBatches):
        return batches.unfinished
    return None


@dataclass(frozen=True)
class SampleOrigin:
    """The place of a sample in the data.

    Attributes:
        place: a file of a folder, a line of a table, or an index of an array.
        text: the beginning of a text.
        group: its group (--group-column); empty: none.
    """

    place: str
    text: str = ""
    group: str = ""


def identify_samples(x: Sequence[Tensor], y: Sequence[int] | None) -> tuple[str, ...]:
    """Identify each sample by the sha256 of its preprocessed tensor and label.

    Repeated samples get a running number, so ids are unique and do not depend on the batch size.
    """
    seen = Counter[str]()
    ids = []
    labels = [None] * len(x) if y is None else y
    for sample, label in zip(x, labels, strict=True):
        array = sample.detach().cpu().contiguous().numpy()
        # Shape and label are hashed, too: equal bytes with another label are another sample.
        head = f"{array.dtype}{array.shape}{label}".encode()
        contents = head + array.tobytes()
        digest = hashlib.sha256(contents).hexdigest()[:16]
        seen[digest] += 1
        number = seen[digest]
        if number == 1:
            ids.append(digest)
        else:
            ids.append(f"{digest}-{number}")
    return tuple(ids)


@dataclass(frozen=True)
class DataOptions:
    """The user's options for the data.

    Attributes:
        samples: number of samples.
        seed: seed of the random draw, without replacement.
        max_tokens: largest number of tokens of a text, with special tokens.
        text_column: table column of the texts, or two columns with a comma between; by default the
            first usual name.
        label_column: table column of the labels; by default the first usual name.
        group_column: table column of the groups of samples, or `classes`.
        offline: never open a connection; only what is on this machine.
        skip_bad: leave out samples that cannot be read, with a note, instead of an error.
        scored: read prompts with continuations for a language model to score.
    """

    samples: int = 32
    seed: int = 0
    max_tokens: int = 128
    text_column: str | None = None
    label_column: str | None = None
    group_column: str | None = None
    offline: bool = False
    skip_bad: bool = False
    scored: bool = False


@dataclass(frozen=True)
class Task:
    """The question that a language model answers by scoring continuations.

    Attributes:
        kind: one continuation, several choices, or labels.
        classes: names of the classes: a continuation and its rival, letters, or labels.
    """

    kind: TaskKind
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Samples:
    """All the samples of one run.

    Attributes:
        batch: the samples; texts are padded to the longest one.
        notes: notes on the data: how labels were matched, texts that were cut.
        commit: the commit of a repository of the Hub.
        origins: the place of each sample in the data, in the order of the batch; empty if unknown.
        task: the question, for prompts with continuations.
        spec: the DATA argument.
        steps: what was done to the first sample, in order.
    """

    batch: Batch
    notes: Notes = ()
    commit: Commit | None = None
    origins: tuple[SampleOrigin, ...] = ()
    task: Task | None = None
    spec: str = ""
    steps: Sequence[str] = ()

    @property
    def suite_id(self) -> str:
        """Return the identity of the set of samples, independent of their order."""
        listed = "\n".join(sorted(self.batch.ids))
        return hashlib.sha256(listed.encode()).hexdigest()[:16]


def draw_indices(total: int, samples: int, seed: int) -> list[int]:
    """Draw indices without replacement; a larger draw contains every smaller one."""
    # All indices are permuted in any case: so a draw of n + 1 samples contains the draw of n.
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=generator)
    return order[:samples].tolist()


def make_batch(x: Sequence[Tensor], net: Net, y: Sequence[int] | None = None) -> Batch:
    """Join samples to a batch; texts are padded, and the ids do not depend on the padding.

    Args:
        x: samples in the form that the model takes; for texts, token ids of any length.
        net: the model.
        y: class numbers of the model, or None.
    """
    ids = identify_samples(x, y)
    labels = None
    if y is not None:
        labels = torch.as_tensor(y)
    samples = list(x)
    if net.kind != "text":
        return Batch(torch.stack(samples), labels, ids)
    padded = pad_sequence(samples, batch_first=True, padding_value=net.pad_id or 0)
    lengths = torch.as_tensor([len(tokens) for tokens in samples])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    if mask.all():
        # Models are faster without a mask.
        return Batch(padded, labels, ids)
    return Batch(padded, labels, ids, mask)


# Number of classes listed in a message.
LISTED = 5


# By name of the data, a number: its class of the model, or the number that the name reads as. None
# if there is none.
_Matches = dict[str, int | None]


class LabelError(InputError):
    """Labels of the data that are not classes of the model."""


def require_classes(
    numbers: Sequence[int | None], names: Sequence[object], places: Sequence[str], net: Net
) -> list[int]:
    """Return class numbers after a check that the model has all of these classes.

    Args:
        numbers: the class number of each label; None if no class matches the label.
        names: the labels as written in the data.
        places: the place of each label in the data, for messages.
        net: the model.

    Raises:
        LabelError: a label is not a class of the model; the message gives its place.
    """
    classes = range(net.classes or 0)
    found = []
    for number, name, place in zip(numbers, names, places, strict=True):
        if number is None or number not in classes:
            raise LabelError(
                f"{place}: the class {name!r} is not one of the model's {net.classes} classes "
                f"({_list_classes(net)})",
                "Rename the classes to the model's names or numbers (from 0), or give exactly as "
                "many classes, in its order. To train a new classifier, use "
                "`lipaudit train --classes`.",
            )
        found.append(number)
    return found


def _list_classes(net: Net) -> str:
    """Return the names of the first classes, or the range of their numbers."""
    if not net.labels:
        return f"0 to {(net.classes or 1) - 1}"
    return ", ".join(list_first(list(map(repr, net.labels)), LISTED))


def match_labels(
    values: Sequence[Any], net: Net, places: Sequence[str], classes: Sequence[str] | None = None
) -> tuple[list[int], Notes]:
    """Return the model's class numbers for labels that are class names or numbers.

    Three ways are tried. First, labels are matched with the names of the classes, ignoring case. A
    class may have several names, separated by commas, and aliases (ImageNet synsets). If no name
    matches, labels are read as class numbers. If they are not class numbers and there are as many
    different labels as classes, they are matched by order, with a warning that lists the classes.

    Args:
        values: labels of the whole data set.
        net: the model.
        places: the place of each label in the data, for messages: `FILE: line 7`.
        classes: class names of the data set, if the labels are numbers of these classes; None if
            the labels themselves are names or numbers of the model's classes.

    Raises:
        LabelError: a label is not a class; the message gives its place.
    """
    # `words`: the label of each sample as text. `names`: the different labels.
    if classes is None or min(values, default=0) < 0:
        # -1 marks a sample without a label. It stays in `words`, and `require_classes` refuses it.
        words = [str(value).strip() for value in values]
        names = sorted(set(words))
        are_typed = True  # somebody wrote these labels, as numbers or names
    else:
        words = [classes[value] for value in values]
        names = list(classes)
        are_typed = False
    numbers = {name: _read_number(name) for name in names}  # None: the name is no number
    # The class of each name. It may be None or a number that is no class of the model:
    # `require_classes`, at the end, refuses a sample with such a label.
    class_of = _match_names(numbers, net)
    notes = _note_shared_names(names, net)
    # Numbers and order are tried only if no name matches: to match some labels by name and others
    # by order would be a guess.
    if all(number is None for number in class_of.values()):
        are_classes = set(numbers.values()) <= set(range(net.classes or 0))
        are_numbers = None not in numbers.values()
        # Typed numbers are taken as they are, even if one of them is no class: to match them by
        # order would hide this error.
        if are_classes or (are_typed and are_numbers):
            class_of = numbers
        elif net.classes == len(names):
            class_of, notes = _match_by_order(names, net)
    classes_of_samples = [class_of[word] for word in words]
    return require_classes(classes_of_samples, names=words, places=places, net=net), notes


def _match_by_order(names: Sequence[str], net: Net) -> tuple[_Matches, Notes]:
    """Return the place of each name in order as its class, and a warning that lists them."""
    ordered = names
    # Names that are all numbers are sorted by size: 2.0 < 10.0.
    with suppress(ValueError):
        ordered = sorted(names, key=float)
    lines = []
    for i, name in enumerate(ordered):
        line = f"{name!r} is class {i}"
        if net.labels:
            line += f" ({net.labels[i]!r})"
        lines.append(line)
    lead = "class names were matched only by their order (--class-names names another): "
    note = Note.warn("labels-by-order", lead + ", ".join(lines))
    return {name: i for i, name in enumerate(ordered)}, (note,)


def _match_names(numbers: _Matches, net: Net) -> _Matches:
    """Return the model's class of each name of the data; None if the model has no such name.

    Args:
        numbers: the names in the data, each with its number, such as 7 for "7.0", or None.
        net: the model.
    """
    exact = dict[str, int]()  # "Neg" and "neg" may be two classes
    classes = {_normalise(alias): i for alias, i in net.aliases.items()}
    if net.labels is None:  # transformers calls unnamed classes LABEL_0, LABEL_1, ...
        for i in range(net.classes or 0):
            classes[f"label {i}"] = i
    # "tench, Tinca tinca" is matched as a whole, and by either of the two names. Whole labels come
    # first: "cardigan" is another class than "Cardigan, Cardigan Welsh corgi".
    labels = net.labels or ()
    for i, label in enumerate(labels):
        exact.setdefault(label, i)
        classes.setdefault(_normalise(label), i)
    for i, label in enumerate(labels):
        for name in label.split(","):
            classes.setdefault(_normalise(name), i)
    matches = {}
    for name, number in numbers.items():
        # By its text, else by its number: "7.0" in the data is the class named "7".
        by_number = classes.get(str(number))
        by_text = classes.get(_normalise(name), by_number)
        matches[name] = exact.get(name, by_text)
    return matches


def _note_shared_names(names: Sequence[str], net: Net) -> Notes:
    """Warn of names in the data that are the name of several classes: the first class is taken."""
    labels = net.labels or ()
    counts = Counter(map(_normalise, labels))
    shared = [name for name in names if counts[_normalise(name)] > 1 and labels.count(name) != 1]
    if not shared:
        return ()
    text = (
        f"several classes of the model are called {join_few(shared)}: the first one is taken. "
        "Write class numbers, or give --class-names"
    )
    return (Note.warn("labels-shared", text),)


def _read_number(name: str) -> int | None:
    """Return the class number in a name, such as 7 for "7.0"; None for "0.7" or words."""
    if name in ("True", "False"):  # values of a column of booleans
        return int(name == "True")
    whole, _, decimals = name.partition(".")
    is_number = whole.removeprefix("-").isdecimal()
    if is_number and not decimals.strip("0"):
        return int(whole)
    return None


def _normalise(name: str) -> str:
    """Return a name in lower case with spaces for underscores, to compare names."""
    return name.strip().replace("_", " ").casefold()
