"""Norms and bounds of the heads of a layer, beside each other, for the measure `bounds`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.measures.base import Facts
from lipaudit.measures.bound_tables import IN_BALLS, INGREDIENTS, NUMERICAL, OF_LAYERS
from lipaudit.measures.layers import Reduced, max_windows, require_bounds_hold
from lipaudit.models.attention.capture import APART, Layer, Site
from lipaudit.models.attention.numeric import compute_numeric_norms
from lipaudit.tables.trials import Radius
from lipaudit.theory import POLICY, ascent, head_bounds, head_norms, matrix_norms
from lipaudit.theory.bounds.record import load_bounds
from lipaudit.theory.heads import Heads
from lipaudit.theory.spectral import Norms

if TYPE_CHECKING:
    from lipaudit.measures.bounds import BoundsOptions


def has_bounds(site: Site, options: BoundsOptions) -> bool:
    """Say whether a layer gets norms and bounds in closed form, with respect to --input.

    The closed form differentiates with respect to the input of the projections of q, k and v. With
    --input module it can be used only if the projections read the arguments of the module directly
    (`Site.direct`).
    """
    return site.closed_form and (options.input == "projections" or site.direct)


def describe_layers(sites: Sequence[Site], options: BoundsOptions) -> Facts:
    """Return the facts of layers that are equal for all samples, for tables and notes.

    Returns:
        Lists with an item per head: `kinds` (affine, rotation, numerical...), `inputs` and
        `module_inputs` (names of X), `reasons` (why there is no closed form). A list with an item
        per layer: `layers`. A list of some layers: `apart`, whose queries read another input than
        keys and values, so that the norm varies both independently; a note advises --input module.
        With --input module this list is empty: such a layer has no closed form then.
    """
    names = ("kinds", "inputs", "module_inputs", "reasons", "layers", "apart")
    facts: Facts = {name: [] for name in names}
    for site in sites:
        is_closed_form = has_bounds(site, options)
        # How q, k and v depend on the input (affine, rotation...), named once if they are alike.
        kinds = site.kinds if is_closed_form else (NUMERICAL,)
        if len(set(kinds)) == 1:
            kinds = kinds[:1]
        input_name = site.input if options.input == "projections" else site.module_input
        facts["kinds"] += ["/".join(kinds)] * site.heads
        facts["inputs"] += [input_name] * site.heads
        facts["module_inputs"] += [site.module_input] * site.heads
        facts["reasons"] += [site.reason or ""] * site.heads
        facts["layers"].append((site.index, site.module))
        # `direct`: the projections read the arguments of the module as they are. Then the norm
        # with --input module is the same, and the layer needs no note.
        if is_closed_form and site.input == APART and not site.direct:
            facts["apart"].append(site.index)
    return facts


def measure_layer(layer: Layer, options: BoundsOptions, out_norms: dict[int, float]) -> Reduced:
    """Return all norms and bounds of a layer and its heads, and check that every bound holds.

    They are (samples, heads), (samples, 1) for the layer as a whole, or (samples, heads, radii) in
    balls. NaN means not computed.

    Args:
        layer: the layer, on some samples.
        options: the options.
        out_norms: a cache of ||W_O|| by the index of the layer; this function fills it.
    """
    site = layer.site
    ids = layer.batch.ids
    seeds = options.list_seeds(ids)
    is_closed_form = has_bounds(site, options)
    if is_closed_form:
        heads = layer.heads()
        values = _measure_closed_form(heads, site.index, seeds, options, out_norms)
    else:  # only norms, by differentiating the module; NaN if the module cannot be run alone
        heads = layer.attention
        values = _read_norms(compute_numeric_norms(layer, seeds=seeds, **options.accuracy))
    queries = heads.q.shape[2]
    keys = heads.k.shape[2]
    per_head = torch.ones_like(values["exact"])  # (samples, heads)
    values = {
        **_list_missing(per_head, len(options.radius)),
        **values,
        # Facts of the whole layer are stored for each head, so that all arrays have one shape.
        "tokens": per_head * keys,
        # Whether ||P|| is only an upper limit, because the map has too many entries for a proof.
        "limited": per_head * (is_closed_form and queries * keys > POLICY.map_limit),
        "numerical": per_head * (not is_closed_form),
        "forward_error": max_windows(head_norms.forward_error(heads).cpu(), heads.sample),
    }
    if is_closed_form:
        in_balls = {}
        if options.radius:
            in_balls = {name: values[stored] for name, stored in IN_BALLS.items()}
        require_bounds_hold(site, ids, values, heads, balls=in_balls, radii=options.radius)
    return values


def _measure_closed_form(
    heads: Heads,
    index: int,
    seeds: Sequence[int],
    options: BoundsOptions,
    out_norms: dict[int, float],
) -> Reduced:
    """Return the norms and bounds of heads and their layer on each sample, in closed form.

    Args:
        heads: the heads of the layer.
        index: the index of the layer.
        seeds: seed of the start vectors of each sample.
        options: the options.
        out_norms: a cache of ||W_O|| by the index of the layer; this function fills it.
    """
    figures = _measure_heads(heads, seeds, options)
    # A sample may have several rows of the batch (windows): the largest figure counts.
    values = {name: max_windows(f.cpu(), heads.sample) for name, f in figures.items()}
    if heads.out is None:  # without a plain output projection, no bounds of the layer
        return values
    if index not in out_norms:
        weight = heads.out.double().flatten(0, 1)
        out_norms[index] = float(matrix_norms.spectral_norm(weight))
    return values | _bound_layer(values, out_norms[index])


def _list_missing(per_head: Tensor, radii: int) -> Reduced:
    """Return NaN for every figure that some layers lack, so that all layers have the same ones.

    A layer replaces the figures that it has.

    Args:
        per_head: any figure of heads, (samples, heads); it gives the shape.
        radii: number of radii of the balls.
    """
    of_heads = torch.full_like(per_head, torch.nan)  # (samples, heads)
    missing = dict.fromkeys((*load_bounds(), *INGREDIENTS, "splitting_gain"), of_heads)
    of_layer = of_heads[:, :1]  # (samples, 1)
    missing |= dict.fromkeys((*OF_LAYERS, "out_norm"), of_layer)
    missing["layer_missed"] = torch.zeros_like(of_layer)  # the number of norms not converged
    if radii:
        of_balls = of_heads.double()[..., None].expand(-1, -1, radii)  # (samples, heads, radii)
        missing |= dict.fromkeys(IN_BALLS.values(), of_balls)
    return missing


def _bound_layer(values: Reduced, out_norm: float) -> Reduced:
    """Return bounds of the whole layer, (samples, 1), from the bounds of its heads and ||W_O||.

    With the Jacobian J_h of head h, and the rows W_O,h of W_O for this head:

        ||sum_h J_h W_O,h|| <= ||W_O|| ||[J_1 ... J_H]|| <= ||W_O|| sqrt(sum_h ||J_h||^2)
                            <= ||W_O|| sum_h ||J_h||

    Args:
        values: bounds of the heads, (samples, heads).
        out_norm: ||W_O||.
    """
    w_o = torch.full_like(values["layer_exact_out"], out_norm)
    root_of_squares = values["sharp"].square().sum(1, keepdim=True).sqrt()
    bounds = {"out_norm": w_o, "layer_sharp_rss": w_o * root_of_squares}
    for name in ("sharp", "theorem3"):
        bounds[f"layer_{name}_sum"] = w_o * values[name].sum(1, keepdim=True)
    return bounds


def _measure_heads(heads: Heads, seeds: Sequence[int], options: BoundsOptions) -> Reduced:
    """Return norms and bounds in closed form, of each head and of the layer.

    Args:
        heads: the heads of a layer.
        seeds: seed of the start vectors of each sample.
        options: which norms to compute, and how accurately.
    """
    exact = head_norms.head_norms(heads, seeds=seeds, **options.accuracy)
    figures = head_bounds.head_bounds(heads) | _read_norms(exact)
    # The gain of splitting: the factor by which the norm grows if every token is duplicated. There
    # is no closed form under a causal mask, where copies see different keys, nor with a sink (a
    # constant logit beside those of the keys), whose share of the attention falls.
    if options.splitting and not heads.is_causal() and heads.sink is None:
        figures["splitting_gain"] = head_norms.splitting_gain(heads, exact.norm, seeds=seeds)
    # Norms of the layer: of the concatenated heads before W_O (with --concat, or if there is no
    # W_O), and after W_O (if there is one).
    accuracy = options.accuracy | {"within": options.layer_within}
    together = head_norms.layer_norms(heads, seeds=seeds, concat=options.concat, **accuracy)
    within = []  # proven relative errors of these norms
    missed = []  # 1 where a norm did not converge
    for name, norms in (("layer_exact", together.concat), ("layer_exact_out", together.out)):
        if norms is not None:
            of_layer = _read_norms(norms)
            figures[name] = of_layer["exact"][:, None]
            within.append(of_layer["within"])
            missed.append(of_layer["missed"])
    # Of both norms together: the larger error, and how many did not converge.
    figures["layer_within"] = torch.stack(within, 1).amax(1, keepdim=True)
    figures["layer_missed"] = torch.stack(missed, 1).sum(1, keepdim=True)
    in_balls = _measure_balls(
        heads, exact=exact.norm, sharp=figures["sharp"], seeds=seeds, radii=options.radius
    )
    return figures | in_balls


def _measure_balls(
    heads: Heads, exact: Tensor, sharp: Tensor, seeds: Sequence[int], radii: Sequence[Radius]
) -> Reduced:
    """Return norms and bounds in balls around X, (batch, heads, radii); nothing without radii.

    Args:
        heads: the heads of a layer.
        exact: norms at X, (batch, heads).
        sharp: the bound `sharp` at X, (batch, heads).
        seeds: seed of the start of the search of each sample.
        radii: radii of the balls.
    """
    balls = []  # the figures of each ball, by name
    for radius in radii:
        r = float(radius)
        # The largest norm that a search finds in the ball. The centre X is in the ball, too: so it
        # is at least the norm at X. NaN stays NaN.
        norm = ascent.ball_norm(heads, r, seeds=seeds)
        norm = torch.where(norm.isnan(), norm, norm.maximum(exact.to(norm)))
        ball = {"ball_norm": norm, "ball_sharp": head_bounds.ball_sharp(heads, r, sharp=sharp)}
        balls.append(head_bounds.ball_size_bounds(heads, r) | ball)
    if not balls:
        return {}
    # Stored as at_r_NAME, since some figures of balls have the same NAME as figures at X.
    return {
        stored: torch.stack([ball[name] for ball in balls], -1)
        for name, stored in IN_BALLS.items()
    }


def _read_norms(norms: Norms) -> Reduced:
    """Return norms as columns. `missed` marks norms that did not converge; NaN means no norm."""
    missed = (~norms.converged & ~norms.norm.isnan()).to(norms.norm)
    return {"exact": norms.norm, "upper": norms.upper, "within": norms.within, "missed": missed}
