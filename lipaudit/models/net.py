"""A model for all measures: a function from a point of the attacked space to the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lipaudit.attacks.oracle import ByRow, Classifier
from lipaudit.data.batch import Batch
from lipaudit.models.lifting import devices, precision
from lipaudit.models.spec import ModelSpec
from lipaudit.tables.trials import Norm

OWN = "module"
"""Source of a module object that has no MODEL name."""
NO_DECISION = "no-decision"
"""Code of the note on a model without a class decision, such as a multi-label model."""
NEEDED = "this needs an embedding table, and a fast tokenizer beside config.json"
"""Why attacks cannot change the texts of a model (see `Net.changes`)."""


@dataclass(frozen=True, kw_only=True)
class Net(ModelSpec):
    """An unmodified model, the functions that call it, and the facts about it for the report.

    The attacked space is pixels in [0, 1] for images (normalisation happens inside), the tensor
    itself for float tokens, and the output of the token embedding for text. The module is in eval
    mode, and its parameters are frozen.

    Attributes: those of `ModelSpec`, and
        name: the MODEL argument as typed.
        source: source of the model: demo, timm, hf, file or py; or `OWN`.
        call: runs the module on (x, mask); for images it normalises first.
        read: returns the output tensor from the result of `call`: (batch, classes) logits or
            (batch, ...) features.
        parameters: number of parameters.
        weights_sha256: hash over the sorted (name, dtype, shape, bytes) of the state dict.
        classes: number of classes of a classifier, else None.
        device_map: placement of the weights by module name, if requested.
        scored: the kind of its classes if they are scored continuations, else empty. A sample is
            then a prompt with continuations, packed by `data.continuations.pack`, and only the
            prompt can change.
        surveys: results of `attention.survey.find_layers` on this model; a changed copy starts
            without any.
    """

    name: str
    source: str
    call: Callable[[Tensor, Tensor | None], Any]
    read: Callable[[Any], Tensor]
    parameters: int
    weights_sha256: str
    classes: int | None
    device_map: Mapping[str, str] = field(default_factory=dict)
    scored: Literal["", "continuation", "choices", "labels"] = ""
    surveys: list[Any] = field(init=False, default_factory=list, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Return the device of samples: the one on which the model reads its first parameter."""
        return next(devices(self.module))

    @property
    def dtype(self) -> torch.dtype:
        """Return the floating-point dtype in which the model reads its parameters."""
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
        """Return why the model has no accuracy."""
        said = next((note.text for note in self.notes if note.code == NO_DECISION), "")
        return said.partition(":")[0] or f"{self.architecture} has no class scores"

    def output(self, batch: Batch) -> Tensor:
        """Run the model on a batch: logits or features, (batch, ...)."""
        return self.read(self.call(batch.x, batch.mask))

    def point(self, batch: Batch) -> Tensor:
        """Return the point of each sample in the attacked space (detached)."""
        if self.kind != "text":
            return batch.x.detach()
        return self.embedding(batch)

    def free(self, batch: Batch) -> Tensor | None:
        """Return which positions of its samples may change, (batch, tokens); None: all."""
        if not self.scored:
            return batch.mask if self.kind == "text" else None
        prompt = batch.x < (self.vocabulary or 0)
        return prompt if batch.mask is None else prompt & batch.mask

    def forward(self, z: Tensor, batch: Batch) -> Tensor:
        """Run from the attacked space: z replaces the samples of `batch`, whose mask is kept.

        Of texts it replaces the first output of `entry`: positions and masks stay correct.
        """
        if self.kind != "text":
            return self.read(self.call(z, batch.mask))
        with self.replace_embedding(z):
            return self.read(self.call(batch.x, batch.mask))

    def make_classifier(self, batch: Batch) -> Classifier | ByRow:
        """Return `forward` as a function for attacks."""
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
        # A copy: some models scale their embeddings in place.
        with self._watch_entry(lambda out: seen.append(out.clone())):
            self.call(batch.x, batch.mask)
        return seen[0]

    def replace_embedding(self, z: Tensor) -> RemovableHandle:
        """Replace the first output of `entry` by z; the handle ends this, as a context."""
        pending = [z.clone()]
        return self._watch_entry(lambda out: pending.pop() if pending else out)

    def _watch_entry(self, change: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Pass each output of `entry` through `change` (None keeps it)."""
        if self.entry is None:
            raise ValueError("this model has no known embedding module")
        return self.entry.register_forward_hook(lambda _module, _args, out: change(out))
