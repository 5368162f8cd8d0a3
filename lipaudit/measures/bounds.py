"""The measure `bounds`: Lipschitz bounds of every head beside its exact Jacobian norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.measures.balls import COLUMNS, ball_section, on_balls
from lipaudit.measures.by_layer import Facts, HeadName, Reduced, by_layer, head_names, per_sample
from lipaudit.measures.guard import (
    below_by_rounding,
    name_head,
    require_balls_hold,
    require_bounds_hold,
)
from lipaudit.measures.measure import (
    Measure,
    Part,
    Values,
    join_parts,
    lower_estimates,
    notes,
    reduce_known,
    sample_ids,
    seed_of,
)
from lipaudit.models.attention.capture import Layer
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.models.attention.sites import APART, MODULE_INPUT, Site
from lipaudit.models.net import Net
from lipaudit.settings import BOUNDS_TABLE, LAYERS_TABLE
from lipaudit.settings.bounds import BoundsOptions
from lipaudit.tables import Array, Note, Row, Section
from lipaudit.theory.bounds.catalogue import load_bounds
from lipaudit.theory.bounds.head_bounds import head_bounds
from lipaudit.theory.bounds.ingredients import KnownWeights, Weights
from lipaudit.theory.condition import forward_error
from lipaudit.theory.exact.head_norms import head_norms, layer_norms, splitting_gain
from lipaudit.theory.heads import Heads
from lipaudit.theory.policy import POLICY
from lipaudit.theory.spectral.lanczos import Norms
from lipaudit.theory.spectral.upper import spectral_norm

INGREDIENTS = ("p_norm", "x_norm", "radius", "softmax_norm_max")
NOTABLE = 1e-4
"""Relative effect of rounding on a norm above which a warning is given."""
NUMERICAL = "numerical"
"""The kind of heads without a closed form."""


def measure(net: Net, batches: Iterable[Batch], options: BoundsOptions) -> Iterator[Part]:
    """Yield the norms and bounds of every head, per sample."""
    yield from by_layer(net, batches, _NormsAndBounds(options), layers=options.layers)


class _NormsAndBounds:
    """Compute norms and bounds of a layer's heads; keep what depends on weights alone."""

    def __init__(self, options: BoundsOptions) -> None:
        self.options = options
        self._weights = KnownWeights()
        self._out_norms: dict[int, float] = {}

    def reduce(self, layer: Layer) -> Reduced:
        """Return all figures of a layer, per (sample, head) or (sample, 1)."""
        options, site, ids = self.options, layer.site, layer.batch.ids
        seeds = [seed_of(sample, options.seed) for sample in ids]
        if not _has_bounds(site, options):
            return _numeric(layer, seeds, options)
        heads = layer.heads()
        values = _closed_form(heads, seeds, options, self._weights.of(site.index, heads))
        values["out_norm"] = torch.full_like(values["layer_exact"], self._out_norm(site, heads))
        require_bounds_hold(site, ids, values, heads)
        require_balls_hold(site, ids, values, options.radius, heads)
        return values

    def facts(self, sites: Sequence[Site]) -> Facts:
        """Return the names and kinds of the heads."""
        return _facts(sites, self.options)

    def _out_norm(self, site: Site, heads: Heads) -> float:
        """Return ||W_O||, NaN without an output projection."""
        if heads.out is not None and site.index not in self._out_norms:
            norm = spectral_norm(heads.out.double().flatten(0, 1))
            self._out_norms[site.index] = float(norm)
        return self._out_norms.get(site.index, torch.nan)


def _has_bounds(site: Site, options: BoundsOptions) -> bool:
    """Say whether the closed form gives the norm that the options ask for."""
    return site.closed_form and (options.input == "projections" or site.direct)


def _facts(sites: Sequence[Site], options: BoundsOptions) -> Facts:
    closed = [site for site in sites if _has_bounds(site, options)]
    return {
        "heads": head_names(sites),
        "kinds": [_kind(site, options) for site in sites for _ in range(site.heads)],
        "inputs": [
            site.input if options.input == "projections" else MODULE_INPUT
            for site in sites
            for _ in range(site.heads)
        ],
        "layers": [(site.index, site.module) for site in sites],
        "apart": [site.index for site in closed if site.input == APART and not site.direct],
    }


def _kind(site: Site, options: BoundsOptions) -> str:
    kinds = site.kinds if _has_bounds(site, options) else (NUMERICAL,)
    return kinds[0] if len(set(kinds)) == 1 else "/".join(kinds)


def _closed_form(
    heads: Heads, seeds: Sequence[int], options: BoundsOptions, weights: Weights | None
) -> Reduced:
    """Return all figures of a layer with a closed form, per (sample, head) or (sample, 1)."""
    exact = head_norms(heads, seeds=seeds, **options.accuracy)
    reduced = head_bounds(heads, weights=weights)
    gain = torch.full_like(exact.norm, torch.nan)
    if options.splitting and not heads.is_causal() and heads.sink is None:
        gain = splitting_gain(heads, exact.norm, seeds=seeds)
    reduced["splitting_gain"] = gain
    reduced |= _norms(exact) | _of_layers(heads, seeds, options)
    reduced |= on_balls(heads, seeds, options, weights, reduced)
    queries, keys = heads.q.shape[2], heads.k.shape[2]
    reduced["tokens"] = torch.full_like(exact.norm, keys)
    reduced["limited"] = torch.full_like(exact.norm, queries * keys > POLICY.map_limit)
    reduced["numerical"] = torch.zeros_like(exact.norm)
    reduced["forward_error"] = forward_error(heads)
    sample = heads.sample.cpu()
    return {name: per_sample(values.cpu(), sample) for name, values in reduced.items()}


def _of_layers(heads: Heads, seeds: Sequence[int], options: BoundsOptions) -> Reduced:
    """Return the norms of all heads together, per (sample, 1); NaN if not computed."""
    together = layer_norms(heads, seeds=seeds, concat=options.concat, **options.layer_accuracy)
    taken = {"layer_exact": together.concat, "layer_out": together.out}
    norms = [each for each in taken.values() if each is not None]
    nothing = torch.full_like(norms[0].norm, torch.nan)
    reduced = {name: nothing if each is None else each.norm for name, each in taken.items()}
    reduced["layer_within"] = torch.stack([each.within for each in norms]).amax(0)
    reduced["layer_missed"] = torch.stack([_mark_unconverged(each) for each in norms]).sum(0)
    return {name: values[:, None] for name, values in reduced.items()}


def _norms(exact: Norms) -> Reduced:
    reduced = {"exact": exact.norm, "upper": exact.upper, "within": exact.within}
    return reduced | {"missed": _mark_unconverged(exact)}


def _mark_unconverged(norms: Norms) -> Tensor:
    return (~norms.converged & ~norms.norm.isnan()).to(norms.norm.dtype)


def _numeric(layer: Layer, seeds: Sequence[int], options: BoundsOptions) -> Reduced:
    """Return the exact norms of a layer without a closed form, by automatic differentiation.

    NaN if the survey found a closed form and the module cannot run on its own.
    """
    reduced = _norms(compute_numeric_norms(layer, seeds=seeds, **options.accuracy))
    open_head = torch.full_like(reduced["exact"], torch.nan)
    reduced |= dict.fromkeys((*load_bounds(), *INGREDIENTS, "g1_max", "splitting_gain"), open_head)
    open_layer = open_head[:, :1]
    reduced |= dict.fromkeys(("layer_exact", "layer_out", "layer_within", "out_norm"), open_layer)
    reduced["layer_missed"] = torch.zeros_like(open_layer)
    open_balls = open_head.double()[..., None].expand(-1, -1, len(options.radius))
    reduced |= {f"at_r_{name}": open_balls for name in COLUMNS if options.radius}
    reduced["tokens"] = torch.full_like(open_head, layer.attention.k.shape[2])
    reduced["limited"] = torch.zeros_like(open_head)
    reduced["numerical"] = torch.ones_like(open_head)
    attention = layer.attention
    reduced["forward_error"] = per_sample(forward_error(attention).cpu(), attention.sample.cpu())
    return reduced


def summarise(parts: Sequence[Part], options: BoundsOptions) -> list[Section]:
    """Make the sections `bounds`, `bounds.layers` and, with radii, `bounds.ball`."""
    facts = parts[0].facts
    measured = _drop_bounds({name: join_parts(parts, name) for name in parts[0].values})
    heads = list(zip(facts["heads"], facts["kinds"], facts["inputs"], strict=True))
    per_head = {n: v for n, v in measured.items() if v.ndim == 2 and v.shape[1] == len(heads)}
    rows = tuple(
        _row(*labels, {name: values[:, i] for name, values in per_head.items()})
        for i, labels in enumerate(heads)
    )
    ids = sample_ids(parts)
    samples = {"ids": ids, "exact_max": tuple(np.fmax.reduce(measured["exact"], 1).tolist())}
    stored = [bound.name for bound in load_bounds().values() if bound.stored]
    arrays = {name: Array.of(measured[name].T) for name in ("exact", *stored)}
    of_heads = BOUNDS_TABLE.section(
        settings=options.model_dump(),
        rows=rows,
        samples=samples,
        arrays=arrays,
        notes=notes(parts)
        + _remarks(measured, facts["apart"], options)
        + below_by_rounding(
            [name_head(head) for head in facts["heads"]],
            ids,
            measured["exact"],
            {name: measured[name] for name in load_bounds()},
        ),
    )
    sections = [of_heads, _layer_section(facts, measured, options, ids)]
    if options.radius:
        sections.append(ball_section(facts, measured, options, ids))
        found = {name: measured[f"at_r_{name}"].reshape(len(ids), -1) for name in COLUMNS}
        places = [
            f"{name_head(head)} at r = {radius.text}"
            for head in facts["heads"]
            for radius in options.radius
        ]
        norms = found.pop("ball_norm")
        rounded = below_by_rounding(places, ids, norms, found, "norm found")
        sections[-1] = sections[-1].model_copy(update={"notes": sections[-1].notes + rounded})
    return sections


def _drop_bounds(measured: dict[str, Values]) -> dict[str, Values]:
    """Remove the bounds of heads that lost their closed form on some sample.

    Their structure depends on the data. So no bound for all inputs holds, and medians of
    bounds and norms would be over different samples.
    """
    lost = measured["numerical"].any(0)
    return measured | {name: np.where(lost, np.nan, measured[name]) for name in load_bounds()}


def _row(head: HeadName, kind: str, input: str, measured: dict[str, Values]) -> Row:
    """Reduce one head over the samples: medians, and maxima for columns named so."""
    medians = {
        name: reduce_known(measured[name], np.median) for name in (*load_bounds(), *INGREDIENTS)
    }
    medians["softmax_norm_max"] = reduce_known(measured["softmax_norm_max"], np.max)
    overflowing = [name for name, bound in load_bounds().items() if bound.log10_label]
    logs = {f"log10_{name}": _log10(medians[name]) for name in overflowing}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(measured["exact"] > 0, measured["sharp"] / measured["exact"], np.nan)
    return BOUNDS_TABLE.row(
        **head._asdict(),
        kind=_and(kind, NUMERICAL, measured["numerical"]),
        input=_and(input, MODULE_INPUT, measured["numerical"]),
        tokens=int(measured["tokens"].max()),
        exact=reduce_known(measured["exact"], np.median),
        exact_max=reduce_known(measured["exact"], np.max),
        **medians,
        **logs,
        sharp_ratio_max=reduce_known(ratio, np.max),
        splitting_gain=reduce_known(measured["splitting_gain"], np.median),
        upper=reduce_known(measured["upper"], np.median),
        within=reduce_known(measured["within"], np.max),
        forward_error=reduce_known(measured["forward_error"], np.max),
        converged=not measured["missed"].any(),
    )


def _and(label: str, other: str, numerical: Values) -> str:
    """Join the kind of a head with its kind on the samples where its structure changed."""
    return f"{label}, {other}" if label != other and numerical.any() else label


def _layer_section(
    facts: Mapping[str, Any],
    measured: dict[str, Values],
    options: BoundsOptions,
    ids: tuple[str, ...],
) -> Section:
    layer_of = np.array([head.layer for head in facts["heads"]])
    rows, limits = [], np.full_like(measured["layer_out"], np.nan)
    for i, (layer, module) in enumerate(facts["layers"]):
        heads = layer_of == layer
        sharp, theorem3 = measured["sharp"][:, heads], measured["theorem3"][:, heads]
        out = measured["out_norm"][:, i]
        limits[:, i] = out * np.sqrt((sharp**2).sum(1))
        rows.append(
            LAYERS_TABLE.row(
                layer=layer,
                module=module,
                exact=reduce_known(measured["layer_exact"][:, i], np.median),
                exact_out=reduce_known(measured["layer_out"][:, i], np.median),
                within=reduce_known(measured["layer_within"][:, i], np.max),
                sharp_sum=reduce_known(out * sharp.sum(1), np.median),
                sharp_rss=reduce_known(limits[:, i], np.median),
                theorem3_sum=reduce_known(out * theorem3.sum(1), np.median),
            )
        )
    kept = {"exact": measured["layer_exact"], "exact_out": measured["layer_out"]}
    return LAYERS_TABLE.section(
        settings=options.model_dump(),
        rows=tuple(rows),
        samples={"ids": ids},
        arrays={name: Array.of(v.T) for name, v in kept.items() if not np.isnan(v).all()},
        notes=_before_out(measured)
        + below_by_rounding(
            [f"layer {layer} ({module})" for layer, module in facts["layers"]],
            ids,
            measured["layer_out"],
            {"sharp_rss": limits},
        ),
    )


def _before_out(measured: dict[str, Values]) -> tuple[Note, ...]:
    """Say that norms before W_O were not computed."""
    text = "norms before W_O were not computed; add --concat to get them"
    out, concat = measured["layer_out"], measured["layer_exact"]
    left = (~np.isnan(out) & np.isnan(concat)).any()
    return (Note(level="info", code="left-out", text=text),) if left else ()


def _log10(value: float | None) -> float | None:
    return None if value is None or value <= 0 else float(np.log10(value))


def _remarks(
    measured: dict[str, Values], apart: Sequence[int], options: BoundsOptions
) -> tuple[Note, ...]:
    """Note what is missing, what did not converge, and which norms have another input."""
    remarks = [*lower_estimates(float(np.nanmax(measured["within"], initial=0.0)))]
    remarks += _long_maps(measured["limited"])
    if apart:
        text = (
            f"layers {', '.join(map(str, apart))}: queries and keys/values read different "
            "inputs, and the norms vary both independently. For norms with respect to the "
            "module's input, use --input module"
        )
        remarks.append(Note(level="info", code="inputs-apart", text=text))
    for name, what in (("missed", "head"), ("layer_missed", "layer")):
        missed = int(measured[name].sum())
        if missed:
            text = f"{missed} {what} norms did not converge to tol, so they may be too low"
            remarks.append(Note(level="warning", code="not-converged", text=text))
    lost = measured["forward_error"].max(0)
    if (lost > NOTABLE).any():
        text = (
            f"the logits of {int((lost > NOTABLE).sum())} heads are large for their precision. "
            "Rounding in the forward pass may have changed their norms by up to "
            f"{lost.max():.1g} (an estimate). For higher accuracy, use --dtype float64"
        )
        remarks.append(Note(level="warning", code="forward-error", text=text))
    for name, bound in load_bounds().items():
        absent = np.isnan(measured[name]).all(0)
        elsewhere = absent & measured["numerical"].all(0) & (options.input == "module")
        for heads, why in (
            (absent & ~elsewhere, bound.null or "has no closed form"),
            (
                elsewhere,
                ("bounds the norm with respect to the projections' input, not the module's"),
            ),
        ):
            if heads.any():
                text = f"{name} was not computed for {heads.sum()} heads: {why}"
                remarks.append(Note(level="info", code="no-bound", text=text))
    return tuple(remarks)


def _long_maps(limited: Values) -> tuple[Note, ...]:
    """Note that ||P|| is an upper limit if its proof would take more memory than the map."""
    text = (
        f"||P|| of maps with more than {POLICY.map_limit:,} entries is an upper limit, "
        "possibly a loose one. Bounds that use it still hold"
    )
    return (Note(level="info", code="long-maps", text=text),) if limited.any() else ()


MEASURE = Measure(measure, summarise, batch=4)
