"""A model as every measure sees it: from a point of the attacked space to its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from PIL.Image import Image
from torch import Tensor, nn

from lipaudit.attacks.oracle import ByRow, Classifier
from lipaudit.attacks.text import Lexicon
from lipaudit.data.batch import Batch
from lipaudit.data.hub import Commit
from lipaudit.models.lifting import devices, precision
from lipaudit.tables import Note
from lipaudit.tables.trials import Norm

Kind = Literal["image", "tokens", "text"]
OWN = "module"
"""Source of a module object that has no MODEL name."""
NO_DECISION = "no-decision"
"""Code of the note on a model without a class decision, such as a multi-label model."""


@dataclass(frozen=True)
class ModelInfo:
    """What a report says about the model: plain values only.

    Attributes:
        spec: the MODEL argument as the user typed it.
        source: which rule resolved it: demo, timm, hf, file or py; or `OWN`.
        architecture: the architecture's name.
        parameters: number of parameters.
        weights_sha256: hash over the sorted (name, dtype, shape, bytes) of the state dict.
        preprocess: mean, std, size, interpolation: what stands between pixels and the network.
        labels: class names by index, where the checkpoint knows them.
        notes: remarks on loading (converted from half precision, say), for the report.
        commit: the state of a repository of the Hub that it was read from.
        device_map: where the weights of its modules lie, by name, where that was asked for.
    """

    spec: str
    source: str
    architecture: str
    parameters: int
    weights_sha256: str
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    notes: tuple[Note, ...] = ()
    commit: Commit | None = None
    device_map: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NextToken:
    """How a causal language model scores the next token, at every position of a text.

    Attributes:
        head: the linear map from the last hidden states, (batch, tokens, width), to the
            vocabulary; the model may do more behind it, entry by entry.
        read: the logits, (batch, tokens, vocabulary), of what `call` returns.
    """

    head: nn.Module
    read: Callable[[Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How samples become what a model takes: what a `ModelSpec` says and a `Net` keeps.

    Attributes: see `ModelSpec`.
    """

    kind: Kind = "image"
    entry: nn.Module | None = None
    vocabulary: int | None = None
    next_token: NextToken | None = None
    tokenize: Callable[[str, int], list[int]] | None = None
    tokenize_pair: Callable[[str, str, int], list[int]] | None = None
    pad_id: int = 0
    end_id: int | None = None
    unknown_id: int | None = None
    lexicon: Callable[[], Lexicon] | None = None
    next_logits: Callable[[Tensor, int], Tensor] | None = None
    prepare: Callable[[Image], Tensor] | None = None
    aliases: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Net(Reading):
    """An unmodified model and how to call it.

    The attacked space is pixels in [0, 1] for images (normalisation happens inside), the tensor
    itself for float tokens, and the output of the token embedding for text.

    Attributes:
        info: what the report says of the model.
        module: the model itself, in eval mode, parameters frozen.
        call: runs the module on (x, mask) and returns what `read` takes; for images it normalises
            first.
        read: the output tensor, (batch, classes) logits or (batch, ...) features, of that result.
        sample_shape: shape of one sample of x; for text (max_tokens,).
        box: the smallest and largest value of the attacked space, or None.
        classes: number of classes of a classifier, else None.
        scored: what its classes are where they are continuations that it scores, else nothing: a
            sample is then a prompt with what follows, packed by `data.continuations.packed`, and
            only the prompt can be moved.
        surveys: results of `attention.survey.find_layers` on this model; of a changed copy anew.
    """

    info: ModelInfo
    module: nn.Module
    call: Callable[[Tensor, Tensor | None], Any]
    read: Callable[[Any], Tensor]
    sample_shape: tuple[int, ...]
    box: tuple[float, float] | None
    classes: int | None
    scored: Literal["", "continuation", "choices", "labels"] = ""
    surveys: list[Any] = field(init=False, default_factory=list, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Where samples go: where the model reads its first parameter."""
        return next(devices(self.module))

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type in which the model reads its parameters."""
        return precision(self.module)

    @property
    def changes(self) -> tuple[Norm, ...]:
        """What attacks can change of its texts: words (near ones need a table), characters."""
        table = getattr(self.entry, "weight", None)
        if self.kind != "text" or not isinstance(table, Tensor) or table.ndim != 2:
            return ()
        if self.lexicon is not None:
            return ("words", "characters")
        return () if self.tokenize is not None else ("words",)

    @property
    def lacks_classes(self) -> str:
        """What keeps it from having an accuracy."""
        said = next((note.text for note in self.info.notes if note.code == NO_DECISION), "")
        return said.partition(":")[0] or f"{self.info.architecture} has no class scores"

    @property
    def why_unchanged(self) -> str:
        """What keeps attacks from changing its texts."""
        if self.tokenize is None:
            return "it has no tokenizer (put its files beside config.json)"
        if self.lexicon is None:
            return (
                "its tokenizer does not give the characters of each token (use a fast "
                "tokenizer of transformers)"
            )
        return "it has no embedding table, which the search for similar words needs"

    def output(self, batch: Batch) -> Tensor:
        """Run the model on a batch: logits or features, (batch, ...)."""
        return self.read(self.call(batch.x, batch.mask))

    def point(self, batch: Batch) -> Tensor:
        """Return where each sample lies in the attacked space (detached)."""
        if self.kind != "text":
            return batch.x.detach()
        return self.embedding(batch)

    def free(self, batch: Batch) -> Tensor | None:
        """Return which positions of its samples may move, (batch, tokens); None: all."""
        if not self.scored:
            return batch.mask if self.kind == "text" else None
        prompt = batch.x < (self.vocabulary or 0)
        return prompt if batch.mask is None else prompt & batch.mask

    def forward(self, z: Tensor, batch: Batch) -> Tensor:
        """Run from the attacked space: z replaces the samples of `batch` (its mask is kept)."""
        if self.kind != "text":
            return self.read(self.call(z, batch.mask))
        return self.from_embedding(z, batch)

    def classifier(self, batch: Batch) -> Classifier | ByRow:
        """Return the function of `forward` as attacks take it."""
        if self.kind == "text":
            return ByRow(lambda z, rows: self.forward(z, batch.without_ids(rows)))
        return lambda z: self.forward(z, batch)

    def embedding(self, batch: Batch) -> Tensor:
        """Return the output of `entry` on a batch (detached)."""
        with torch.no_grad():
            return self.embed(batch)

    def embed(self, batch: Batch) -> Tensor:
        """Return the output of `entry` on a batch, as a function of its weights."""
        seen: list[Tensor] = []
        # A copy: some models scale their embeddings in place, and would do so to what is kept.
        with _on_output(self._entry(), lambda out: seen.append(out.clone())):
            self.call(batch.x, batch.mask)
        return seen[0]

    def from_embedding(self, z: Tensor, batch: Batch) -> Tensor:
        """Run with the first output of `entry` replaced by z: positions and masks stay right."""
        with self.replace_embedding(z):
            return self.read(self.call(batch.x, batch.mask))

    @contextmanager
    def replace_embedding(self, z: Tensor) -> Iterator[None]:
        """Replace the first output of `entry` by z while the block runs the model."""
        pending = [z.clone()]
        with _on_output(self._entry(), lambda out: pending.pop() if pending else out):
            yield

    def _entry(self) -> nn.Module:
        if self.entry is None:
            raise ValueError("this model has no known embedding module")
        return self.entry


@contextmanager
def _on_output(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Pass each output of `module` through `change` (None leaves it) while the block runs."""
    handle = module.register_forward_hook(lambda _m, _args, out: change(out))
    try:
        yield
    finally:
        handle.remove()
