"""A batch of samples, and the identity of each."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor


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
        start, limit = self.start + index.indices(len(self))[0], self.limit
        picked, ids, texts = self.without_ids(index), self.ids[index], self.texts[index]
        return replace(picked, y=y, ids=ids, start=start, texts=texts, limit=limit)

    def rows(self, index: Tensor) -> Batch:
        """Return the samples at these positions, as a batch."""
        y, at = None if self.y is None else self.y[index], index.tolist()
        ids = tuple(self.ids[i] for i in at)
        texts = tuple(self.texts[i] for i in at) if self.texts else ()
        return replace(self.without_ids(index), y=y, ids=ids, texts=texts, limit=self.limit)

    def without_ids(self, index: Tensor | slice) -> Batch:
        """Return the samples at these positions without ids: no transfer to the host is needed."""
        mask = None if self.mask is None else self.mask[index]
        return Batch(self.x[index], None, (), mask)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Move to a device; floating-point samples also take the dtype."""
        x = self.x.to(device, dtype if self.x.is_floating_point() else None)
        y = None if self.y is None else self.y.to(device)
        mask = None if self.mask is None else self.mask.to(device)
        return replace(self, x=x, y=y, mask=mask)

    def split(self, size: int) -> Iterator[Batch]:
        """Split into batches of at most `size` samples, in order, without superfluous padding."""
        for start in range(0, len(self), size):
            yield self[start : start + size].trim()

    def by_length(self, size: int) -> Iterator[Batch]:
        """Split into batches of at most `size` samples of equal length, without padding.

        Batches are ordered by their first samples, so the first few are a fair sample.
        """
        if self.mask is None:
            yield from self.split(size)
            return
        lengths = self.mask.sum(1).tolist()
        # Sorting is stable: samples of one length keep their order.
        order = sorted(range(len(self)), key=lengths.__getitem__)
        alike = [[*run] for _, run in groupby(order, key=lengths.__getitem__)]
        for rows in sorted(run[i : i + size] for run in alike for i in range(0, len(run), size)):
            part = replace(self.rows(torch.tensor(rows)), start=self.start + rows[0]).trim()
            padded = part.mask is not None and not part.mask.all()
            yield part if padded else replace(part, mask=None)

    def trim(self) -> Batch:
        """Return the same samples without trailing columns that are padding in every sample."""
        if self.mask is None or bool(self.mask[:, -1].any()):
            return self
        length = int(self.mask.any(0).nonzero().max()) + 1
        return replace(self, x=self.x[:, :length], mask=self.mask[:, :length])


@dataclass(frozen=True)
class Share:
    """The batches of a run that this process measures: all, the unfinished ones, or a shard.

    Attributes:
        first: the first batch of the run, measured here or not. Facts about all samples come from
            it, so that every process has the same.
        batches: the batches that this process measures.
    """

    first: Batch
    batches: Iterable[Batch]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that this process measures."""
        return iter(self.batches)


def find_first(batches: Iterable[Batch], met: Batch) -> Batch:
    """Return the first batch of a run: of the `Share`, else the first one that is yielded."""
    return batches.first if isinstance(batches, Share) else met


@dataclass(frozen=True)
class SampleOrigin:
    """The place of a sample in the data.

    Attributes:
        place: a file of a folder, a line of a table, or an index of an array.
        text: the beginning of a text.
    """

    place: str
    text: str = ""


def identify_samples(x: Sequence[Tensor], y: Sequence[int] | None) -> tuple[str, ...]:
    """Identify each sample by the sha256 of its preprocessed tensor and label.

    Repeated samples get a running number, so ids are unique and do not depend on the batch size.
    """
    seen: Counter[str] = Counter()
    ids = []
    for i, sample in enumerate(x):
        array = sample.detach().cpu().contiguous().numpy()
        # Equal bytes with another shape or label are another sample.
        head = f"{array.dtype}{array.shape}{None if y is None else y[i]}".encode()
        digest = hashlib.sha256(head + array.tobytes()).hexdigest()[:16]
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return tuple(ids)
