"""A batch of samples, and the identity of each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Samples in the form a `Net` takes.

    Attributes:
        x: images (batch, channels, height, width) in [0, 1], float tokens (batch, tokens, width),
            or token ids (batch, tokens).
        y: labels (batch,), -1 where unknown, or None when the data have none at all.
        ids: one stable identity per sample (see `sample_ids`).
        mask: for text, True at real tokens (batch, tokens); None when nothing is padded.
        start: the place of the first of them among the samples of the run.
        texts: for text that was read as characters, each sample's text, or the two of a pair.
        limit: the tokens after which such texts are cut; 0 where none are.
    """

    x: Tensor
    y: Tensor | None
    ids: tuple[str, ...]
    mask: Tensor | None = None
    start: int = 0
    texts: tuple[tuple[str, ...], ...] = ()
    limit: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: slice) -> Batch:
        """Return the samples of a slice, as a batch."""
        y = None if self.y is None else self.y[index]
        mask = None if self.mask is None else self.mask[index]
        start = self.start + index.indices(len(self))[0]
        texts = self.texts[index]
        return Batch(self.x[index], y, self.ids[index], mask, start, texts, self.limit)

    def rows(self, index: Tensor) -> Batch:
        """Return the samples at these positions, as a batch."""
        y = None if self.y is None else self.y[index]
        mask = None if self.mask is None else self.mask[index]
        at = index.tolist()
        ids = tuple(self.ids[i] for i in at)
        texts = tuple(self.texts[i] for i in at) if self.texts else ()
        return Batch(self.x[index], y, ids, mask, texts=texts, limit=self.limit)

    def without_ids(self, index: Tensor) -> Batch:
        """Return the samples at these positions without ids: the host need not know which."""
        mask = None if self.mask is None else self.mask[index]
        return Batch(self.x[index], None, (), mask)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Move to a device; floating-point samples also take the dtype."""
        x = self.x.to(device, dtype if self.x.is_floating_point() else None)
        y = None if self.y is None else self.y.to(device)
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, x=x, y=y, mask=mask)

    def split(self, size: int) -> Iterator[Batch]:
        """Cut into batches of at most `size` samples, in order, without needless padding."""
        for start in range(0, len(self), size):
            yield self[start : start + size].trim()

    def by_length(self, size: int) -> Iterator[Batch]:
        """Cut into batches of at most `size` samples of one length: nothing is padded.

        They come in the order of their first samples, so that the first few are a fair draw.
        """
        if self.mask is None:
            yield from self.split(size)
            return
        lengths = self.mask.sum(1).tolist()
        # Sorting is stable: of one length the order of the samples stays.
        order = sorted(range(len(self)), key=lengths.__getitem__)
        alike = [[*run] for _, run in groupby(order, key=lengths.__getitem__)]
        for rows in sorted(run[i : i + size] for run in alike for i in range(0, len(run), size)):
            part = replace(self.rows(torch.tensor(rows)), start=self.start + rows[0]).trim()
            padded = part.mask is not None and not part.mask.all()
            yield part if padded else replace(part, mask=None)

    def trim(self) -> Batch:
        """Return the same samples without the last columns, where all of them are padded."""
        if self.mask is None or bool(self.mask[:, -1].any()):
            return self
        length = int(self.mask.any(0).nonzero().max()) + 1
        return replace(self, x=self.x[:, :length], mask=self.mask[:, :length])


@dataclass(frozen=True)
class Share:
    """The batches of a run that are measured here: all of them, what is left of them, or some.

    Attributes:
        first: the first batch of the run, measured here or not: what holds for all samples is
            learnt from it, so that it is the same wherever they are measured.
        batches: those that are measured here.
    """

    first: Batch
    batches: Iterable[Batch]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are measured here."""
        return iter(self.batches)


def find_first(batches: Iterable[Batch], met: Batch) -> Batch:
    """Return the first batch of a run; that which is met first, where no share says it."""
    return batches.first if isinstance(batches, Share) else met


@dataclass(frozen=True)
class Origin:
    """Where a sample is found.

    Attributes:
        place: within the data: a file of a folder, a line of a table, an index of an array.
        text: of a text, its beginning.
    """

    place: str
    text: str = ""


def identify_samples(x: Sequence[Tensor], y: Sequence[int] | None) -> tuple[str, ...]:
    """Identify each sample by the sha256 of its preprocessed tensor and label.

    A repeat gets a running number, so ids are unique and do not depend on the batch size.
    """
    seen: dict[str, int] = {}
    return tuple(
        _unique(_digest(sample, None if y is None else y[i]), seen) for i, sample in enumerate(x)
    )


def _digest(sample: Tensor, label: int | None) -> str:
    array = sample.detach().cpu().contiguous().numpy()
    # Equal bytes of another shape or label are another sample.
    head = f"{array.dtype}{array.shape}{label}".encode()
    return hashlib.sha256(head + array.tobytes()).hexdigest()[:16]


def _unique(digest: str, seen: dict[str, int]) -> str:
    seen[digest] = seen.get(digest, 0) + 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
