"""The measure `scaling`: how norms grow with the sequence length and the radius.

On data, it runs the measures `bounds` and `jacobian` on the same samples, cut to growing lengths.
The worst case (`measures.growth`) needs only the weights of a head and the radius of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.measures import bounds, jacobian
from lipaudit.measures.by_layer import HeadName
from lipaudit.measures.growth import (
    AGREED,
    WorstCase,
    any_size,
    bound_exponents,
    cut,
    fit_of,
    groups,
    points,
    require_lengths,
    with_fit,
    with_searches,
    worst_case,
)
from lipaudit.measures.measure import (
    Measure,
    Part,
    Values,
    join_parts,
    lower_estimates,
    notes,
    reduce_known,
)
from lipaudit.models.net import Net
from lipaudit.settings import FITS_TABLE, SCALING_TABLE
from lipaudit.settings.bounds import BoundsOptions
from lipaudit.settings.jacobian import JacobianOptions
from lipaudit.settings.scaling import ScalingOptions
from lipaudit.tables import Note, Row, Section
from lipaudit.theory.bounds.catalogue import load_bounds
from lipaudit.theory.growth.ascent import SEARCHES
from lipaudit.theory.growth.worst_tokens import PowerLaw

FOLLOWED = tuple(name for name, bound in load_bounds().items() if bound.scaling)
OF_HEADS = ("exact", "radius", "tokens", *FOLLOWED)
OF_LAYERS = ("layer_exact", "layer_out", "out_norm")


def measure(net: Net, batches: Iterable[Batch], options: ScalingOptions) -> Iterator[Part]:
    """Yield norms and bounds of every sample at every length; the facts hold the worst case."""
    with any_size(net) as resized:
        remarks = _note_resizing() if resized and "real" in options.modes else ()
        case: WorstCase | None = None
        for batch in batches:
            if case is None:
                if "real" in options.modes and net.kind != "text":
                    require_lengths(net, batch, options.lengths)
                # The worst case belongs to the first sample of the run: it is measured only there.
                first = batch.start == 0
                case = worst_case(net, _first(net, batch), options) if first else WorstCase()
                remarks += case.notes()
            worst = {"rows": [*case.rows]}
            values, facts, more = _on_data(net, batch, options)
            yield Part(batch.ids, values, worst | facts, remarks + more)


def _note_resizing() -> tuple[Note, ...]:
    text = (
        "the model has one image size. For other sizes its position embeddings are "
        "interpolated (dynamic_img_size=true)"
    )
    return (Note(level="info", code="interpolated", text=text),)


def _first(net: Net, batch: Batch) -> Batch:
    """Return the first sample without padding."""
    one = batch[:1]
    return one if one.mask is None else cut(net, one, int(one.mask.sum()))[0]


Cut = tuple[int, Batch, torch.Tensor]
"""Index of a length, the samples at that length, and their indices in the batch."""


def _on_data(
    net: Net, batch: Batch, options: ScalingOptions
) -> tuple[dict[str, Values], dict[str, Any], tuple[Note, ...]]:
    """Return arrays (samples, lengths, heads or layers); NaN if a sample is too short."""
    if "real" not in options.modes:
        return {}, {}, ()
    cuts = _cuts(net, batch, options.lengths)
    how: dict[str, Any] = {"seed": options.seed, "tol": options.tol}
    of_heads = BoundsOptions(layers=options.layers, **how)
    parts = list(bounds.measure(net, (c for _, c, _ in cuts), of_heads))
    at_lengths = [{n: part.values[n] for n in (*OF_HEADS, *OF_LAYERS)} for part in parts]
    facts = dict(parts[0].facts)
    missed = sum(int(part.values["missed"].sum()) for part in parts)
    within = [part.values[name] for part in parts for name in ("within", "layer_within")]
    of_model = JacobianOptions(rivals=1, **how)  # the radius is not needed here
    whole = jacobian.measure(net, (c for _, c, _ in cuts), of_model)
    for values, part in zip(at_lengths, whole, strict=True):
        values["model"] = part.values["norm"][:, None]
        missed += int((~part.values["converged"]).sum())
        within.append(part.values["within"])
        facts["model"] = f"{part.facts['from']} to {part.facts['to']}"
    arrays = _scatter(cuts, at_lengths, (len(batch), len(options.lengths)))
    # Layers without a norm have NaN.
    most = np.nanmax(np.concatenate([each.flatten() for each in within]), initial=0.0)
    facts |= {"within": float(most), "kind": net.kind}
    return arrays, facts, notes(parts) + _note_unconverged(missed)


def _cuts(net: Net, batch: Batch, lengths: Sequence[int]) -> list[Cut]:
    """Cut the samples to every length, the longest first: the model may be surveyed there.

    Raises:
        InputError: no sample reaches the shortest length.
    """
    cuts = [(i, *cut(net, batch, n)) for i, n in reversed([*enumerate(lengths)])]
    kept = [(i, part, which) for i, part, which in cuts if len(part)]
    if not kept:
        raise InputError(
            f"the samples {', '.join(batch.ids)} have fewer than {lengths[0]} tokens",
            "Start --lengths lower, or give longer texts.",
        )
    return kept


def _scatter(
    cuts: Sequence[Cut], at_lengths: Sequence[Mapping[str, Values]], shape: tuple[int, int]
) -> dict[str, Values]:
    """Put the values at each length into arrays over all samples and lengths."""
    arrays = {n: np.full((*shape, v.shape[1]), np.nan) for n, v in at_lengths[0].items()}
    for (i, _, which), values in zip(cuts, at_lengths, strict=True):
        for name, array in arrays.items():
            array[which.numpy(), i] = values[name]
    return arrays


def _note_unconverged(count: int) -> tuple[Note, ...]:
    text = f"{count} norms did not converge to tol, so they may be too low"
    return (Note(level="warning", code="not-converged", text=text),) if count else ()


@dataclass(frozen=True)
class NormCurve:
    """A norm over samples and lengths with its columns: arrays (samples, lengths)."""

    name: dict[str, Any]
    n: Values
    norm: Values
    radius: Values
    bounds: Mapping[str, Values] = field(default_factory=dict)


def summarise(parts: Sequence[Part], options: ScalingOptions) -> list[Section]:
    """Make the sections `scaling` and `scaling.fit`."""
    values = {name: join_parts(parts, name) for name in parts[0].values}
    within = max(part.facts.get("within", 0.0) for part in parts)
    facts = {**parts[0].facts, "within": within}
    rows, fits = [], []
    for curve in _curves(values, facts, options) if values else ():
        law, fit = fit_of(curve.name, curve.n, curve.norm, curve.radius)
        rows += list(_rows(curve, law))
        fits.append(fit.replace(**bound_exponents(curve.n, curve.bounds)))
    apart = []
    for name, group in groups([SCALING_TABLE.row(**cells) for cells in facts["rows"]]):
        law, fit = fit_of(name, *points(group))
        rows += [with_fit(row, law) for row in group]
        if fit.exponent is None:
            continue
        kept = with_searches(fit, group) if name["mode"] == "ascent" else fit
        fits += [] if kept is None else [kept]
        apart += [group] if kept is None else []
    sections = [
        SCALING_TABLE.section(
            settings=options.model_dump(),
            rows=tuple(rows),
            notes=notes(parts) + _remarks(rows, facts, options) + _of_searches(rows, apart),
        ),
        FITS_TABLE.section(rows=tuple(fits)),
    ]
    return [section for section in sections if section.rows or section.measure == "scaling"]


def _curves(
    values: dict[str, Values], facts: Mapping[str, Any], options: ScalingOptions
) -> Iterator[NormCurve]:
    """Yield the layers, the chosen heads and the model, on data."""
    names = facts["heads"]
    layer_of = np.array([head.layer for head in names])
    wanted = set(options.heads or ())
    picked = [i for i, h in enumerate(names) if wanted & {"all", f"{h.layer}.{h.head}"}]
    for i, (layer, module) in enumerate(facts["layers"]):
        yield _layer_curve(layer, module, i, np.flatnonzero(layer_of == layer), values)
    yield from (_head_curve(names[i], i, values) for i in picked)
    model = values["model"][:, :, 0]
    n = np.nanmax(values["tokens"], 2, initial=0)
    yield NormCurve({"mode": "real"}, n, model, np.full_like(model, np.nan))


def _layer_curve(
    layer: int, module: str, index: int, heads: Values, values: dict[str, Values]
) -> NormCurve:
    """Return the norms of a layer after W_O if it has one, else of its heads side by side."""
    out, concat = values["layer_out"][:, :, index], values["layer_exact"][:, :, index]
    has_out = ~np.isnan(out)
    factor = np.where(has_out, values["out_norm"][:, :, index], 1.0)
    bounds = {name: factor * np.sqrt((values[name][:, :, heads] ** 2).sum(2)) for name in FOLLOWED}
    return NormCurve(
        {"mode": "real", "layer": layer, "module": module},
        values["tokens"][:, :, heads[0]],
        np.where(has_out, out, concat),
        values["radius"][:, :, heads[0]],
        bounds,
    )


def _head_curve(head: HeadName, index: int, values: dict[str, Values]) -> NormCurve:
    at = {name: array[:, :, index] for name, array in values.items() if name in OF_HEADS}
    bounds = {name: at[name] for name in FOLLOWED}
    name = {"mode": "real", **head._asdict()}
    return NormCurve(name, at["tokens"], at["exact"], at["radius"], bounds)


def _rows(curve: NormCurve, law: PowerLaw) -> Iterator[Row]:
    """Reduce a curve over the samples: a row per length that some sample reaches."""
    for i in range(curve.n.shape[1]):
        norms = curve.norm[:, i][~np.isnan(curve.norm[:, i])]
        if not len(norms):
            continue
        row = SCALING_TABLE.row(
            **curve.name,
            n=int(np.nanmax(curve.n[:, i])),
            radius=reduce_known(curve.radius[:, i], np.mean),
            norm=float(np.median(norms)),
            norm_low=float(norms.min()),
            norm_high=float(norms.max()),
            **{f"bound_{k}": reduce_known(v[:, i], np.median) for k, v in curve.bounds.items()},
        )
        yield with_fit(row, law)


def _remarks(
    rows: Sequence[Row], facts: Mapping[str, Any], options: ScalingOptions
) -> tuple[Note, ...]:
    """Note what the rows refer to, and which lengths the samples do not reach."""
    real = [row for row in rows if row.mode == "real"]
    if not real:
        return ()
    image, windows = facts["kind"] == "image", ""
    if facts["kind"] == "text":
        windows = (
            "; the windows of a text start at the same places for every n, so standard "
            "errors may be too small"
        )
    text = f"layers are measured after W_O where they have one, the model from {facts['model']}"
    remarks = [
        Note(level="info", code="what-is-measured", text=text + windows),
        *lower_estimates(facts["within"]),
    ]
    reached = len({row.n for row in real})
    if reached < len(options.lengths):
        why = "several lengths give the same number of patches" if image else "samples are shorter"
        text = f"{reached} of {len(options.lengths)} lengths were measured: {why}"
        remarks.append(Note(level="warning", code="fewer-lengths", text=text))
    return tuple(remarks)


def _of_searches(rows: Sequence[Row], apart: Sequence[Sequence[Row]]) -> tuple[Note, ...]:
    """Note what the norms of a search are, and which searches disagree."""
    if not any(row.mode == "ascent" for row in rows):
        return ()
    text = (
        f"norms of mode ascent are the largest of {SEARCHES} independent searches: exact at "
        "the tokens found, but larger norms may exist. low and high show how far repeated "
        "searches differ"
    )
    remarks = [Note(level="info", code="searched", text=text)]
    if apart:
        who = ", ".join(f"head {g[0].layer}.{g[0].head} at R = {g[0].radius:.3g}" for g in apart)
        text = (
            f"no exponent for the ascent of {who}: independent searches differ by more than "
            f"{100 * (AGREED - 1):.2g} %"
        )
        remarks.append(Note(level="warning", code="searches-apart", text=text))
    return tuple(remarks)


MEASURE = Measure(measure, summarise, batch=4)
