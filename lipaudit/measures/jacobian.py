"""The measure `jacobian`: the exact norm of the whole model's Jacobian, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lipaudit.data.batch import Batch, find_first
from lipaudit.errors import InputError, UsageError
from lipaudit.measures import tokens
from lipaudit.measures.measure import (
    Measure,
    Part,
    Values,
    distinct,
    lower_estimates,
    moved,
    notes,
    number_or_none,
    repeat_notes,
    sample_ids,
    seed_of,
)
from lipaudit.measures.positions import (
    ALWAYS,
    columns_of,
    join_ragged,
    over_positions,
    remarks,
    spread,
)
from lipaudit.models.attention.residual import Residual, compute_residual_norms, find_residuals
from lipaudit.models.attention.routing import Routing
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.derivative.endpoints import find_places, make_sample_function, resolve_target
from lipaudit.models.derivative.linearize import Linearization, linearize
from lipaudit.models.derivative.model_norms import Margins, compute_jacobian_norms, compute_margins
from lipaudit.models.net import Net
from lipaudit.models.requirements import require_padding_is_ignored
from lipaudit.settings import JACOBIAN_TABLE
from lipaudit.settings.jacobian import JacobianOptions, Target
from lipaudit.tables import Array, Note, Row, Section
from lipaudit.tables.columns import Cell

OF_BLOCKS = ("norm", "within", "products", "converged")
CONVERGENCE = {"converged": "norms of the model", "block_converged": "norms of blocks"}


def measure(net: Net, batches: Iterable[Batch], options: JacobianOptions) -> Iterator[Part]:
    """Yield the norms, margins and first-order radii of every sample."""
    around: _Around | None = None
    routing = Routing()
    for batch in batches:
        require_padding_is_ignored(net, batch)
        with routing.watching(net.module):
            values, facts = _of_batch(net, batch, options)
        if options.per_layer:
            around = around or _residuals(net, find_first(batches, batch))
            values |= _residual_values(net, batch, around.residuals, options)
            facts["blocks"] = [residual.module for residual in around.residuals]
        blocks = () if around is None else around.notes
        yield Part(batch.ids, values, facts, blocks + routing.notes())


Measured = tuple[dict[str, Values], dict[str, Any]]
"""Figures per sample, and the names of the Jacobian's input and output."""


def _of_batch(net: Net, batch: Batch, options: JacobianOptions) -> Measured:
    """Return the figures of the samples of a batch; nothing if no text has the requested position.

    The array `outside` marks samples that were left out.
    """
    end = resolve_target(net, batch, options.target)
    columns = columns_of(net, batch, end)
    if columns is None:
        return _of_model(net, batch, options, end, None)
    if end.where == "all":
        return _by_position(net, batch, options, end)
    inside = (columns[:, 0] >= 0).nonzero()[:, 0]
    if len(inside) == len(batch):
        return _of_model(net, batch, options, end, columns[:, 0])
    there = (columns[:, 0] >= 0).cpu().numpy()
    values: dict[str, Values] = {name: np.zeros(0, kind) for name, kind in ALWAYS.items()}
    facts: dict[str, Any] = {"from": "embeddings", "to": end.text, "method": ""}
    if len(inside):
        values, facts = _of_model(net, batch.rows(inside), options, end, columns[inside, 0])
    return {n: spread(v, there) for n, v in values.items()} | {"outside": ~there}, facts


def _by_position(net: Net, batch: Batch, options: JacobianOptions, end: Target) -> Measured:
    """Return the norms at every position of every text, and the largest norm of each text."""
    columns = find_places(batch, end.where)
    pairs = (columns >= 0).nonzero()
    each: list[dict[str, Values]] = []
    facts: dict[str, Any] = {}
    for some in torch.split(pairs, len(batch)):
        sample, slot = some.unbind(1)
        values, facts = _of_model(net, batch.rows(sample), options, end, columns[sample, slot])
        each.append(values)
        moved(len(batch) * len(some) / len(pairs))
    joined = {name: np.concatenate([values[name] for values in each]) for name in ALWAYS}
    facts.pop("gradients", None)
    return over_positions(joined, (columns >= 0).cpu().numpy()), facts


def _of_model(
    net: Net,
    batch: Batch,
    options: JacobianOptions,
    end: Target,
    place: torch.Tensor | None,
) -> Measured:
    """Return norms and margins of the model per sample, and the names of input and output."""
    at = make_sample_function(net, batch, start=options.start, target=end.text, place=place)
    linear = linearize(at.f, at.x)
    every = end.where == "all"
    decides = end.what == "logits" and not every and linear.output.ndim == 2
    decides = decides and linear.output.shape[1] > 1
    norms = compute_jacobian_norms(
        linear,
        norm=options.norm,
        seeds=[seed_of(i, options.seed) for i in batch.ids],
        directions=net.kind != "image" and options.norm == "2" and not (decides or every),
        **options.accuracy,
    )
    values = {name: getattr(norms, name).numpy().astype(kind) for name, kind in ALWAYS.items()}
    facts: dict[str, Any] = {"from": at.start, "to": at.target, "method": norms.method}
    if end.what == "loss":
        values["loss"] = linear.output[:, 0].double().cpu().numpy()
        facts["unlabelled"] = _count_unlabelled(net, batch)
    steepest = norms.direction
    if decides:
        labels = batch.y if net.classes is not None else None
        decision, steepest = _decision(linear, labels, options, norms.upper)
        values |= decision
    if steepest is not None and net.kind != "image":
        gradient, of = steepest.view_as(linear.x), "margin" if decides else "direction"
        facts["gradients"] = tokens.gradients(net, batch, gradient, of)
    return values, facts


def _count_unlabelled(net: Net, batch: Batch) -> int:
    """Count the samples without a label, for which the predicted class is used."""
    if net.classes is None:
        return 0
    return len(batch) if batch.y is None else int((batch.y < 0).sum())


class _Around(NamedTuple):
    """The residual blocks around the layers of a model, and notes on layers without one."""

    residuals: tuple[Residual, ...]
    notes: tuple[Note, ...]


def _residuals(net: Net, batch: Batch) -> _Around:
    sites = find_layers(net, batch)
    around = find_residuals(net, batch, sites)
    alone = [str(s.index) for s, one in zip(sites, around, strict=True) if one is None]
    text = f"attention layers {', '.join(alone)} have no block: they have no residual connection"
    remarks = (Note(level="info", code="no-block", text=text),) if alone else ()
    return _Around(tuple(dict.fromkeys(one for one in around if one is not None)), remarks)


def _residual_values(
    net: Net, batch: Batch, around: Sequence[Residual], options: JacobianOptions
) -> dict[str, Values]:
    """Return norms of residual blocks, their proven error and cost, (samples, blocks)."""
    seeds = [seed_of(i, options.seed) for i in batch.ids]
    each = compute_residual_norms(net, batch, around, seeds=seeds, **options.accuracy)
    norms = [one for _, one in each]
    if not norms:
        return {}
    return {
        f"block_{name}": torch.stack([getattr(one, name) for one in norms], 1).numpy()
        for name in OF_BLOCKS
    } | {"block_lanczos": np.array([[one.method == "lanczos" for one in norms]] * len(batch))}


def _decision(
    linear: Linearization,
    labels: torch.Tensor | None,
    options: JacobianOptions,
    upper: torch.Tensor,
) -> tuple[dict[str, Values], torch.Tensor]:
    """Return margins and their gradients per sample; without labels, for the predicted class."""
    predicted = linear.output.argmax(1)
    y = predicted if labels is None else labels
    how: dict[str, Any] = {"norm": options.norm, "upper": upper, "rivals": options.rivals}
    first_order: Margins = compute_margins(linear, y, **how)
    right = (y < 0) | (predicted == y)
    decision = {
        "margin": first_order.margin.numpy(),
        "radius_first_order": first_order.radius.masked_fill(~right.cpu(), torch.nan).numpy(),
        "rivals": first_order.rivals.numpy(),
        "complete": first_order.complete.numpy(),
    }
    known = labels is not None and bool((labels >= 0).any())
    correct = {"correct": right.cpu().numpy()} if known else {}
    return decision | correct, first_order.direction


def summarise(parts: Sequence[Part], options: JacobianOptions) -> list[Section]:
    """Make the section `jacobian`: one row, and a column per quantity and sample."""
    facts = next((part.facts for part in parts if part.facts.get("method")), parts[0].facts)
    names = dict.fromkeys(name for part in parts for name in part.values)
    arrays = {name: join_ragged(parts, name) for name in names}
    outside = arrays.pop("outside", np.zeros(len(sample_ids(parts)), bool))
    positions = arrays.pop("positions", None)
    whole = {name: values for name, values in arrays.items() if not name.startswith("block_")}
    columns = {n: _cells(n, values, outside) for n, values in whole.items() if n != "within"}
    ends = {"from_": facts["from"], "to": facts["to"], "method": facts["method"]}
    once = distinct(parts)  # a repeated sample counts once, as in every comparison
    counted = once & ~outside
    rows = [_row(options, {name: values[counted] for name, values in whole.items()}, ends)]
    for i, module in enumerate(facts.get("blocks", ())):
        method = "lanczos" if arrays["block_lanczos"][0, i] else "dense"
        ends = {"from_": "block input", "to": "block output", "module": module, "method": method}
        block = {name: arrays[f"block_{name}"][once, i] for name in OF_BLOCKS}
        rows.append(_row(options, block, ends))
    kept = {} if positions is None else {"positions": Array.of(positions)}
    if "block_norm" in arrays:
        kept["norm"] = Array.of(np.vstack([arrays["norm"], arrays["block_norm"].T]))
    return [
        JACOBIAN_TABLE.section(
            settings=options.model_dump(),
            rows=tuple(rows),
            samples={"ids": sample_ids(parts), **columns},
            arrays=kept,
            notes=notes(parts)
            + remarks(str(facts["to"]), parts, outside)
            + _remarks(arrays, outside)
            + repeat_notes(parts),
            gradients={n: g for part in parts for n, g in part.facts.get("gradients", {}).items()},
        )
    ]


def _row(options: JacobianOptions, values: Mapping[str, Values], ends: Mapping[str, str]) -> Row:
    """Reduce the norms of one map over the samples."""
    norm = values["norm"].astype(float)
    if not len(norm):  # the texts of a shard may all be too short
        return JACOBIAN_TABLE.row(**ends, norm=options.norm, samples=0, tol=options.tol)
    return JACOBIAN_TABLE.row(
        **ends,
        norm=options.norm,
        samples=len(norm),
        mean=float(norm.mean()),
        median=float(np.median(norm)),
        p95=float(np.quantile(norm, 0.95)),
        max=float(norm.max()),
        tol=options.tol,
        within=float(values["within"].max()),
        products=float(values["products"].mean()),
        converged=int(values["converged"].sum()),
    )


def _cells(name: str, values: Values, outside: Values) -> tuple[Cell, ...]:
    """Return plain values. None means not computed; the NaN of a failed norm stays NaN."""
    known: list[Any] = values.tolist()
    if values.dtype.kind == "f" and name not in ("norm", "upper"):
        known = [number_or_none(v) for v in known]
    # Samples without a norm do not count as not converged.
    empty = outside & (name != "converged")
    return tuple(None if left else v for v, left in zip(known, empty, strict=True))


def _remarks(arrays: Mapping[str, Values], outside: Values) -> tuple[Note, ...]:
    within = [arrays[name] for name in ("within", "block_within") if name in arrays]
    remarks = [*lower_estimates(max(np.nanmax(each, initial=0.0) for each in within))]
    if "radius_first_order" in arrays:
        text = "radius_first_order is a first-order estimate at each sample, not a certificate"
        remarks.append(Note(level="info", code="indicative", text=text))
        remarks += _rivals(arrays)
    missed = {
        name: int((~arrays[name] & ~np.isnan(arrays[name.replace("converged", "norm")])).sum())
        for name in CONVERGENCE
        if name in arrays
    }
    for name, count in missed.items():
        if count:
            text = f"{count} {CONVERGENCE[name]} did not converge to tol, so they may be too low"
            remarks.append(Note(level="warning", code="not-converged", text=text))
    undefined = int(np.isnan(arrays["norm"][~outside]).sum())
    if undefined:
        text = f"the norms of {undefined} samples are NaN: the model overflows on them"
        remarks.append(Note(level="warning", code="not-finite", text=text))
    return tuple(remarks)


def _rivals(arrays: Mapping[str, Values]) -> tuple[Note, ...]:
    """Note for how many radii a class that was not examined may be the nearest."""
    open_ = ~arrays["complete"]
    if not open_.any():
        return ()
    text = (
        f"{int(open_.sum())} first-order radii are lower limits: the nearest class may not be "
        f"among the {int(arrays['rivals'][open_].max())} classes considered. Raise --rivals"
    )
    return (Note(level="warning", code="radius-incomplete", text=text),)


def _check(net: Net, batch: Batch, options: JacobianOptions) -> None:
    """Refuse an output that the model lacks, `--per-layer` of several texts, or no text."""
    if net.scored and options.per_layer:
        raise UsageError(
            "--per-layer does not work with --score: every continuation of a prompt has its "
            "own hidden states",
            "Leave out --per-layer or --score.",
        )
    batch = batch.to(net.device, net.dtype)
    end = resolve_target(net, batch, options.target)
    columns = columns_of(net, batch, end)
    if columns is not None and not bool((columns >= 0).any()):
        longest = int(find_places(batch, "all").shape[1])
        raise InputError(
            f"no text is long enough for --to {end.text}: the longest has {longest} tokens",
            "Give an existing position (counted from 0, or from the end: -1), or longer texts.",
        )


MEASURE = Measure(measure, summarise, batch=16, check=_check)
