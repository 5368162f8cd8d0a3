"""Samples of a run: drawing them, matching their labels, and making a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lipaudit.data.batch import Batch, SampleOrigin, identify_samples
from lipaudit.data.hub import Commit
from lipaudit.errors import InputError, LipauditError, first_line, out_of_memory
from lipaudit.tables import Note

if TYPE_CHECKING:
    from lipaudit.models.net import Net

T = TypeVar("T")


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
        offline: never open a connection; only what is on this machine.
        skip_bad: leave out samples that cannot be read, with a note, instead of an error.
        scored: read prompts with continuations for a language model to score.
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
    """The question that a language model answers by scoring continuations.

    Attributes:
        kind: one continuation, several choices, or labels.
        classes: names of the classes: a continuation and its rival, letters, or labels.
    """

    kind: Literal["continuation", "choices", "labels"]
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
    """

    batch: Batch
    notes: tuple[Note, ...] = ()
    commit: Commit | None = None
    origins: tuple[SampleOrigin, ...] = ()
    task: Task | None = None
    spec: str = ""

    @property
    def suite_id(self) -> str:
        """Return the identity of the set of samples, independent of their order."""
        return hashlib.sha256("\n".join(sorted(self.batch.ids)).encode()).hexdigest()[:16]


def remark(code: str, text: str) -> Note:
    """Return a note of level info."""
    return Note(level="info", code=code, text=text)


def warning(code: str, text: str) -> Note:
    """Return a note of level warning."""
    return Note(level="warning", code=code, text=text)


def draw_indices(total: int, samples: int, seed: int) -> list[int]:
    """Draw indices without replacement; a larger draw contains every smaller one."""
    # Always permute all: then n + 1 samples are n samples and one more.
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[:samples].tolist()


def draw(
    total: int, options: DataOptions, read: Callable[[int], T], *, what: str
) -> tuple[list[tuple[int, T]], tuple[Note, ...]]:
    """Read the requested number of samples in random order, each with its position.

    With `skip_bad`, unreadable samples are replaced by the next ones.

    Raises:
        InputError: a sample cannot be read; with `skip_bad`, no sample can.
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
    """Note how many samples were left out for their faults, and the first of them."""
    if not faults:
        return ()
    text = f"unreadable {what} were left out: {len(faults)} (the first: {faults[0]})"
    return (warning("skipped-bad", text),)


def make_samples(
    x: Sequence[Tensor],
    net: Net,
    y: Sequence[int] | None = None,
    *,
    texts: Sequence[tuple[str, ...]] = (),
    limit: int = 0,
    origins: Sequence[SampleOrigin] = (),
    notes: tuple[Note, ...] = (),
    task: Task | None = None,
) -> Samples:
    """Make the samples of a run; texts are padded, and ids do not depend on the padding.

    Args:
        x: samples in the form that the model takes; for texts, token ids of any length.
        net: the model.
        y: class numbers of the model, or None.
        texts: the text or pair of texts of each sample; empty for other data.
        limit: number of tokens after which texts are cut; 0 for other data.
        origins: the place of each sample in the data; empty for random samples.
        notes: notes on the data.
        task: the question, for prompts with continuations.
    """
    ids, labels = identify_samples(x, y), None if y is None else torch.as_tensor(y)
    if net.kind != "text":
        batch = Batch(torch.stack(list(x)), labels, ids)
    else:
        padded = pad_sequence(list(x), batch_first=True, padding_value=net.pad_id)
        mask = torch.arange(padded.shape[1]) < torch.as_tensor([len(row) for row in x])[:, None]
        # Without a mask, models take their faster path.
        needed = None if bool(mask.all()) else mask
        batch = Batch(padded, labels, ids, needed, texts=tuple(texts), limit=limit)
    return Samples(batch, notes, None, tuple(origins), task)


@contextmanager
def refuse_damage(name: object, kind: str, advice: str) -> Iterator[None]:
    """Turn any exception of a library on a damaged file into one error.

    Args:
        name: the file.
        kind: the expected kind of file: `.npz file`, `image`.
        advice: the hint of the error.

    Raises:
        InputError: the block raised an exception that is not lipaudit's.
    """
    try:
        yield
    except LipauditError:
        raise
    except Exception as error:  # every format's library has its own exceptions
        reason = first_line(error) or type(error).__name__
        reason = "it needs more memory than is available" if out_of_memory(error) else reason
        raise InputError(f"{name} is not a readable {kind} ({reason})", advice) from error
