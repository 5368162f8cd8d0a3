"""Swap the layers that differ between two checkpoints one by one, and see what the norm does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import torch

from lipaudit.data.batch import Batch
from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Job
from lipaudit.errors import EvaluationError, InputError
from lipaudit.gate.attribution import SMALL_GAP, Attribution, attribution
from lipaudit.gate.statistics import Values
from lipaudit.measures.measure import seed_of
from lipaudit.models.derivative.endpoints import sample_function
from lipaudit.models.derivative.linearize import AGREEMENT, linearize
from lipaudit.models.derivative.model_norms import jacobian_norms
from lipaudit.models.derivative.sensitivity import norm_slopes, singular_pairs
from lipaudit.models.net import Net
from lipaudit.models.precision import eager, exact_arithmetic
from lipaudit.models.sources.weights import few
from lipaudit.models.swap import OTHERWISE, Exchange, LayerChange
from lipaudit.results import Note
from lipaudit.settings import JacobianOptions
from lipaudit.settings.jacobian import Grouping

NAME = "attribution"


def attribute(
    job: Job, other: Net, *, grouping: Grouping = "layer", observer: Observer | None = None
) -> Attribution:
    """Attribute the change of the norm from the model of a job to another one to layers.

    The model is as it was when this returns.

    Args:
        job: the old model, the samples, and the options of its Jacobian norm.
        other: the new model, of the same architecture.
        grouping: what is swapped at a time.
        observer: is told what it will cost, and of the progress.

    Raises:
        InputError: the two differ in more than their weights, or in nothing.
    """
    observer = observer or Observer()
    for note in job.notes:
        observer.note(note)
    with eager(), exact_arithmetic(job.net.device):
        exchange = Exchange(job.net.module, other.module, grouping)
        if not exchange.layers:
            raise InputError(
                "the two models have the same weights: no change is to be explained",
                "Name two checkpoints that differ.",
            )
        return _Swaps(job, other, exchange, observer).attribution()


class _Swaps:
    """The norms that an attribution is made of."""

    def __init__(self, job: Job, other: Net, exchange: Exchange, observer: Observer) -> None:
        self.job, self.other, self.exchange, self.observer = job, other, exchange, observer
        self.options = cast("JacobianOptions", job.request.measures["jacobian"])
        self.batch = job.samples.batch[: job.counts["jacobian"]]
        self.notes: dict[str, Note] = {}
        self.ends = ("", "")

    def attribution(self) -> Attribution:
        """Measure, and sum up."""
        net = self.job.net
        self.observer.note(self._outline())
        self.observer.begins(NAME, len(self.batch))
        parts = []
        for part in self.job.batches("jacobian"):
            parts.append(self._of_batch(part.to(net.device, net.dtype)))
            self.observer.advances(NAME, len(part))
        self.observer.ends(NAME)
        known = [name for name in parts[0] if all(name in part for part in parts)]
        norms = {name: np.concatenate([p[name] for p in parts], -1) for name in known}
        self._remark_on_gaps(norms)
        ends = {
            "old": net.info.spec,
            "new": self.other.info.spec,
            "start": self.ends[0],
            "target": self.ends[1],
            "samples": self.batch.ids,
            "same": self.exchange.same,
        }
        layers = [_facts(layer) for layer in self.exchange.layers]
        return attribution(ends, layers, norms, notes=(*self._ties(), *self.notes.values()))

    def _outline(self) -> Note:
        """Say how many norms are computed."""
        layers, same = len(self.exchange.layers), self.exchange.same
        text = (
            f"{layers} of {layers + same} layers differ: {2 * layers + 2} norms of "
            f"{len(self.batch)} samples; --groups block or fewer --samples make it less"
        )
        return Note(level="info", code="swaps", text=text)

    def _of_batch(self, batch: Batch) -> dict[str, Values]:
        """Return all norms of a batch, and their first-order changes where there are any."""
        every = self.exchange.names
        held = [(), every, *((name,) for name in every)]
        held += [tuple(n for n in every if n != name) for name in every]
        norms = []
        for i, names in enumerate(held):
            with self.exchange.holding(names), self._named(names):
                if names == every:
                    self._require_output(batch)
                norms.append(self._norms(batch))
            self.observer.moves(NAME, len(batch) * (i + 1) / (len(held) + 2))
        old, new, *others = norms
        count = len(every)
        values = {
            "old": old,
            "new": new,
            "swapped": np.array(others[:count]),
            "undone": np.array(others[count:]),
        }
        for end, names, norm in (("old", (), old), ("new", every, new)):
            with self.exchange.holding(names):
                values |= self._slopes(batch, end, norm)
        return values

    @contextmanager
    def _named(self, names: Sequence[str]) -> Iterator[None]:
        """Say of a fault which layers were swapped: neither model need have it."""
        try:
            yield
        except EvaluationError as error:
            which = f"with {few(names)} of {self.other.info.spec}" if names else "as it is"
            message = f"{self.job.net.info.spec} {which}: {error.message}"
            raise EvaluationError(message, error.advice) from error

    def _norms(self, batch: Batch) -> Values:
        at = sample_function(
            self.job.net, batch, start=self.options.start, target=self.options.target
        )
        self.ends = (at.start, at.target)
        seeds = [seed_of(i, self.options.seed) for i in batch.ids]
        norms = jacobian_norms(linearize(at.f, at.x), seeds=seeds, **self.options.accuracy)
        missed = int((~norms.converged).sum())
        if missed:
            text = "some norms did not converge to tol: they are lower estimates"
            self._remark("warning", "not-converged", text)
        return norms.norm.double().numpy()

    def _slopes(self, batch: Batch, end: str, norm: Values) -> dict[str, Values]:
        """Return the first-order changes from one end, over the norm there, and the gaps."""
        net, options = self.job.net, self.options
        at = sample_function(net, batch, start=options.start, target=options.target)
        seeds = [seed_of(i, options.seed) for i in batch.ids]
        try:
            linear = linearize(at.f, at.x)
            pairs = singular_pairs(linear, seeds=seeds, max_steps=options.max_steps)
            linear.release()
            slopes = norm_slopes(net, batch, at, pairs, self.exchange.moves())
        except InputError as error:
            self._remark("warning", "not-linearised", f"{error.message}: swaps alone are given")
            return {}
        with np.errstate(divide="ignore", invalid="ignore"):
            return {f"linear_{end}": slopes.numpy() / norm, f"gap_{end}": pairs.gap.numpy()}

    def _require_output(self, batch: Batch) -> None:
        """Refuse two models that are not the same function of their weights.

        Raises:
            InputError: with all weights of the new model the old one is another function.
        """
        with torch.no_grad():
            ours, theirs = (net.output(batch) for net in (self.job.net, self.other))
        alike = ours.shape == theirs.shape
        if not alike or (ours - theirs).abs().max() > AGREEMENT * theirs.abs().max():
            raise InputError(
                f"{self.job.net.info.spec} with all weights of {self.other.info.spec} is not that "
                "model: they differ in more than weights (heads, activation, normalisation)",
                OTHERWISE,
            )

    def _ties(self) -> Iterator[Note]:
        for first, *others in self.exchange.tied:
            text = f"{first} is {', '.join(others)} as well: it is swapped once, as the former"
            yield Note(level="info", code="tied", text=text)

    def _remark_on_gaps(self, norms: dict[str, Values]) -> None:
        gaps = np.array([norms.pop(n) for n in ("gap_old", "gap_new") if n in norms])
        small = int((gaps < SMALL_GAP).any(0).sum()) if gaps.size else 0
        if small:
            text = (
                f"in {small} of {gaps.shape[1]} samples the two largest singular values are less "
                f"than {SMALL_GAP:.0%} apart: what is linearised there holds for small steps only"
            )
            self._remark("warning", "small-gap", text)

    def _remark(self, level: Any, code: str, text: str) -> None:
        self.notes[code] = Note(level=level, code=code, text=text)


def _facts(layer: LayerChange) -> dict[str, Any]:
    known = asdict(layer)
    return {"layer": known["name"], "entries": known["entries"], "moved": known["moved"]}
