"""The measure `jacobian`: the exact norm of the whole model's Jacobian, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lipaudit.data.batch import Batch
from lipaudit.measures.measure import (
    Measure,
    Part,
    Values,
    joined,
    lower_estimates,
    notes,
    number,
    sample_ids,
    seed_of,
)
from lipaudit.models.attention.blocks import Block, attention_blocks, block_norms
from lipaudit.models.attention.checks import require_padding_is_ignored
from lipaudit.models.attention.survey import survey
from lipaudit.models.derivative.endpoints import sample_map
from lipaudit.models.derivative.linearize import Linearization, linearize
from lipaudit.models.derivative.model_norms import Margins, jacobian_norms, margins
from lipaudit.models.net import Net
from lipaudit.results import Array, JacobianRow, Note, Section
from lipaudit.settings.jacobian import JacobianOptions

OF_BLOCKS = ("norm", "within", "products", "converged")
CONVERGED = {"converged": "norms of the model", "block_converged": "norms of blocks"}


def run(net: Net, batches: Iterable[Batch], options: JacobianOptions) -> Iterator[Part]:
    """Yield the norms, margins and first-order radii of every sample."""
    blocks: Blocks | None = None
    for batch in batches:
        require_padding_is_ignored(net, batch)
        at = sample_map(net, batch, start=options.start, target=options.target)
        linear = linearize(at.f, at.x)
        found = jacobian_norms(
            linear,
            norm=options.norm,
            seeds=[seed_of(i, options.seed) for i in batch.ids],
            **options.accuracy,
        )
        decision = _decision(linear, batch, options, found.upper) if at.target == "logits" else {}
        values = {
            "norm": found.norm.double().numpy(),
            "upper": found.upper.double().numpy(),
            "within": found.within.double().numpy(),
            "products": found.products.numpy(),
            "converged": found.converged.numpy(),
            **decision,
        }
        facts: dict[str, Any] = {"from": at.start, "to": at.target, "method": found.method}
        if options.per_layer:
            blocks = blocks or _blocks(net, batch)
            values |= _block_values(net, batch, blocks.found, options)
            facts["blocks"] = [block.module for block in blocks.found]
        yield Part(batch.ids, values, facts, () if blocks is None else blocks.notes)


class Blocks(NamedTuple):
    """The blocks of a model, and what is said of layers without one."""

    found: tuple[Block, ...]
    notes: tuple[Note, ...]


def _blocks(net: Net, batch: Batch) -> Blocks:
    sites = survey(net, batch)
    around = attention_blocks(net, batch, sites)
    alone = [str(s.index) for s, block in zip(sites, around, strict=True) if block is None]
    text = f"attention layers {', '.join(alone)} have no block: nothing leads past them"
    remarks = (Note(level="info", code="no-block", text=text),) if alone else ()
    return Blocks(tuple(dict.fromkeys(b for b in around if b is not None)), remarks)


def _block_values(
    net: Net, batch: Batch, blocks: Sequence[Block], options: JacobianOptions
) -> dict[str, Values]:
    """Norms of the blocks, what is proven of them and what they cost, (samples, blocks)."""
    seeds = [seed_of(i, options.seed) for i in batch.ids]
    each = block_norms(net, batch, blocks, seeds=seeds, **options.accuracy)
    found = [norms for _, norms in each]
    if not found:
        return {}
    return {
        f"block_{name}": torch.stack([getattr(norms, name) for norms in found], 1).numpy()
        for name in OF_BLOCKS
    } | {"block_lanczos": np.array([[n.method == "lanczos" for n in found]] * len(batch))}


def _decision(
    linear: Linearization, batch: Batch, options: JacobianOptions, upper: torch.Tensor
) -> dict[str, Values]:
    """Margins per sample; without labels, those of the predicted class."""
    if linear.output.ndim != 2 or linear.output.shape[1] < 2:
        return {}
    predicted = linear.output.argmax(1)
    y = predicted if batch.y is None else batch.y
    how: dict[str, Any] = {"norm": options.norm, "upper": upper, "rivals": options.rivals}
    found: Margins = margins(linear, y, **how)
    right = (y < 0) | (predicted == y)
    radius = found.radius.masked_fill(~right.cpu(), torch.nan)
    decision = {"margin": found.margin.numpy(), "radius_first_order": radius.numpy()}
    decision |= {"rivals": found.rivals.numpy(), "complete": found.complete.numpy()}
    known = batch.y is not None and bool((batch.y >= 0).any())
    return decision | ({"correct": right.cpu().numpy()} if known else {})


def summarise(parts: Sequence[Part], options: JacobianOptions) -> list[Section]:
    """Make the section `jacobian`: one row, and a column per quantity and sample."""
    facts, found = parts[0].facts, {name: joined(parts, name) for name in parts[0].values}
    whole = {name: values for name, values in found.items() if not name.startswith("block_")}
    columns = {name: _cells(name, values) for name, values in whole.items() if name != "within"}
    ends = {"from_": facts["from"], "to": facts["to"], "method": facts["method"]}
    rows = [_row(options, whole, ends)]
    for i, module in enumerate(facts.get("blocks", ())):
        method = "lanczos" if found["block_lanczos"][0, i] else "dense"
        ends = {"from_": "block input", "to": "block output", "module": module, "method": method}
        mine = {name: found[f"block_{name}"][:, i] for name in OF_BLOCKS}
        rows.append(_row(options, mine, ends))
    blocks = {"per_layer": Array.of(found["block_norm"].T)} if "block_norm" in found else {}
    return [
        Section(
            measure="jacobian",
            settings=options.model_dump(),
            rows=tuple(rows),
            samples={"ids": sample_ids(parts), **columns},
            arrays=blocks,
            notes=notes(parts) + _remarks(found),
        )
    ]


def _row(
    options: JacobianOptions, found: Mapping[str, Values], ends: Mapping[str, str]
) -> JacobianRow:
    """Reduce the norms of one map over the samples."""
    norm = found["norm"].astype(float)
    return JacobianRow(
        **ends,
        norm=options.norm,
        samples=len(norm),
        mean=float(norm.mean()),
        median=float(np.median(norm)),
        p95=float(np.quantile(norm, 0.95)),
        max=float(norm.max()),
        tol=options.tol,
        within=float(found["within"].max()),
        products=float(found["products"].mean()),
        converged=int(found["converged"].sum()),
    )


def _cells(name: str, values: Values) -> tuple[bool | int | float | None, ...]:
    """Return plain values; NaN is None where it says "not given", and itself in a norm."""
    if values.dtype.kind == "f" and name not in ("norm", "upper"):
        return tuple(number(v) for v in values)
    return tuple(values.tolist())


def _remarks(found: Mapping[str, Values]) -> tuple[Note, ...]:
    within = [found[name] for name in ("within", "block_within") if name in found]
    remarks = [*lower_estimates(max(np.nanmax(each, initial=0.0) for each in within))]
    if "radius_first_order" in found:
        text = "radius_first_order is a first-order estimate at a point, never a certificate"
        remarks.append(Note(level="info", code="indicative", text=text))
        remarks += _rivals(found)
    missed = {name: int((~found[name]).sum()) for name in CONVERGED if name in found}
    for name, count in missed.items():
        if count:
            text = f"{count} {CONVERGED[name]} did not converge to tol: they are lower estimates"
            remarks.append(Note(level="warning", code="not-converged", text=text))
    undefined = int(np.isnan(found["norm"]).sum())
    if undefined:
        text = f"the norms of {undefined} samples are not numbers: the model overflows there"
        remarks.append(Note(level="warning", code="not-finite", text=text))
    return tuple(remarks)


def _rivals(found: Mapping[str, Values]) -> tuple[Note, ...]:
    """Say of how many radii a class that was not looked at may be the nearest."""
    open_ = ~found["complete"]
    if not open_.any():
        return ()
    text = (
        f"{int(open_.sum())} first-order radii are lower limits: the nearest class may be none of "
        f"the {int(found['rivals'][open_].max())} looked at. Raise --rivals."
    )
    return (Note(level="warning", code="radius-incomplete", text=text),)


JACOBIAN = Measure(run, summarise, JacobianOptions, batch=16)
