"""What reading data needs to know of a model, and what it gives back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from PIL.Image import Image
from torch import Tensor

from lipaudit.data.batch import Batch, Origin
from lipaudit.data.hub import Commit
from lipaudit.results import Note


class Info(Protocol):
    """The part of a model's description that data are read by."""

    @property
    def source(self) -> str:
        """Where the model came from; "demo" has data of its own."""

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Class names by index."""


class Intake(Protocol):
    """What a model takes (a `Net` is one)."""

    @property
    def info(self) -> Info:
        """What is known of the model."""

    @property
    def kind(self) -> str:
        """image, tokens or text."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample; for text (most tokens,)."""

    @property
    def box(self) -> tuple[float, float] | None:
        """Smallest and largest value of a sample."""

    @property
    def classes(self) -> int | None:
        """Number of classes of a classifier."""

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids."""

    @property
    def tokenize(self) -> Callable[[str, int], list[int]] | None:
        """Text -> token ids, cut to a number of tokens."""

    @property
    def tokenize_pair(self) -> Callable[[str, str, int], list[int]] | None:
        """Two texts -> token ids of both, cut to a number of tokens."""

    @property
    def pad_id(self) -> int:
        """The id that fills shorter samples."""

    @property
    def unknown_id(self) -> int | None:
        """The id of whatever the vocabulary does not have."""

    @property
    def end_id(self) -> int | None:
        """The id that every text must end with, where the model needs one."""

    @property
    def prepare(self) -> Callable[[Image], Tensor] | None:
        """PIL image -> pixels in [0, 1] of the sample's shape."""

    @property
    def aliases(self) -> Mapping[str, int]:
        """Further names of classes."""


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
        spec: the DATA argument they came from.
        batch: the samples; text is padded to the longest of them.
        notes: what must be said of them: how labels were matched, texts that were cut.
        commit: the state of a repository of the Hub that they were read from.
        origins: where each of them is found, in the order of the batch; empty where none is.
        task: what they ask, where they are prompts with continuations to be scored.
    """

    spec: str
    batch: Batch
    notes: tuple[Note, ...] = ()
    commit: Commit | None = None
    origins: tuple[Origin, ...] = ()
    task: Task | None = None

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
