"""The measure `jacobian`: the exact norm of the whole model's Jacobian, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from lipaudit.data.batch import Batch
from lipaudit.measures.base import (
    Measure,
    Options,
    Part,
    Values,
    joined,
    notes,
    number,
    sample_ids,
    seed_of,
)
from lipaudit.models.jacobian import Margins, jacobian_norms, margins
from lipaudit.models.linearize import Linearization, linearize
from lipaudit.models.maps import From, To, sample_map
from lipaudit.models.net import Net
from lipaudit.results import JacobianRow, Note, Section


class JacobianOptions(Options):
    """Options of `lipaudit jacobian`.

    Attributes:
        start: pixels or embeddings; None is the attacked space.
        target: logits, probabilities, features or tokens; None is logits, or features of a model
            without a head.
        norm: 2 (spectral) or inf (largest l_1 norm of a row, from l_inf to l_inf).
        tol: relative tolerance of the norms.
        max_steps: most Lanczos steps per sample.
    """

    start: From | None = None
    target: To | None = None
    norm: Literal["2", "inf"] = "2"
    tol: float = 1e-4
    max_steps: int = 300


def run(net: Net, batches: Iterable[Batch], options: JacobianOptions) -> Iterator[Part]:
    """Yield the norms, margins and first-order radii of every sample."""
    for batch in batches:
        at = sample_map(net, batch, start=options.start, target=options.target)
        linear = linearize(at.f, at.x)
        decision = _decision(linear, batch, options) if at.target == "logits" else {}
        found = jacobian_norms(
            linear,
            norm=options.norm,
            tol=options.tol,
            max_steps=options.max_steps,
            seeds=[seed_of(i, options.seed) for i in batch.ids],
        )
        values = {
            "norm": found.norm.double().numpy(),
            "upper": found.upper.double().numpy(),
            "products": found.products.numpy(),
            "converged": found.converged.numpy(),
            **decision,
        }
        facts = {"from": at.start, "to": at.target, "method": found.method}
        yield Part(batch.ids, values, facts)


def _decision(linear: Linearization, batch: Batch, options: JacobianOptions) -> dict[str, Values]:
    """Margins per sample; without labels, those of the predicted class."""
    if linear.output.ndim != 2 or linear.output.shape[1] < 2:
        return {}
    predicted = linear.output.argmax(1)
    y = predicted if batch.y is None else batch.y
    found: Margins = margins(linear, y, norm=options.norm)
    right = (y < 0) | (predicted == y)
    radius = found.radius.masked_fill(~right.cpu(), torch.nan)
    decision = {"margin": found.margin.double().numpy()}
    decision["radius_first_order"] = radius.double().numpy()
    known = batch.y is not None and bool((batch.y >= 0).any())
    return decision | ({"correct": right.cpu().numpy()} if known else {})


def summarise(parts: Sequence[Part], options: JacobianOptions) -> list[Section]:
    """Make the section `jacobian`: one row, and a column per quantity and sample."""
    norm, converged = joined(parts, "norm"), joined(parts, "converged")
    row = JacobianRow(
        from_=parts[0].facts["from"],
        to=parts[0].facts["to"],
        norm=options.norm,
        samples=len(norm),
        mean=float(norm.mean()),
        median=float(np.median(norm)),
        p95=float(np.quantile(norm, 0.95)),
        max=float(norm.max()),
        method=parts[0].facts["method"],
        tol=options.tol,
        products=float(joined(parts, "products").mean()),
        converged=int(converged.sum()),
    )
    columns = {name: _cells(joined(parts, name)) for name in parts[0].values}
    return [
        Section(
            measure="jacobian",
            settings=options.model_dump(),
            rows=(row,),
            samples={"ids": sample_ids(parts), **columns},
            notes=notes(parts) + _remarks(parts, converged),
        )
    ]


def _cells(values: Values) -> tuple[bool | int | float | None, ...]:
    """Return plain values, None for NaN."""
    if values.dtype.kind == "f":
        return tuple(number(v) for v in values)
    return tuple(values.tolist())


def _remarks(parts: Sequence[Part], converged: Values) -> tuple[Note, ...]:
    found = []
    if "radius_first_order" in parts[0].values:
        text = "radius_first_order is a first-order estimate at a point, never a certificate"
        found.append(Note(level="info", code="indicative", text=text))
    missed = int((~converged).sum())
    if missed:
        text = f"{missed} samples did not converge to tol: their norms are lower estimates"
        found.append(Note(level="warning", code="not-converged", text=text))
    return tuple(found)


JACOBIAN = Measure(run, summarise, JacobianOptions, samples=64, batch=16)
