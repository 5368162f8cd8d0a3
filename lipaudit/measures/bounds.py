"""The measure `bounds`: Lipschitz bounds of every head beside its exact Jacobian norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lipaudit.measures.base import (
    Measure,
    NormOptions,
    Part,
    Values,
    join_parts,
    lower_estimates,
    notes,
    reduce_columns,
    sample_ids,
    seed_of,
)
from lipaudit.settings.option import Balls, Layers, Need, option
from lipaudit.tables import Array, Note, Row, Section
from lipaudit.tables.columns import (
    HEAD,
    HEAD_NORMS,
    NEAR,
    WITHIN_COLUMN,
    Column,
    Reduction,
    norm_of,
)
from lipaudit.tables.report import Display, Layout
from lipaudit.tables.trials import Radius
from lipaudit.theory.bounds.record import AFFINE_PLAIN, BALL, load_bounds
from lipaudit.theory.policy import LAYER_WITHIN, POLICY
from lipaudit.theory.policy import WITHIN as PROVEN_WITHIN

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.data.batch import Batch
    from lipaudit.measures.layers import Facts, Reduced
    from lipaudit.models.attention.capture import Layer, Site
    from lipaudit.models.net import Net
    from lipaudit.theory.heads import Heads
    from lipaudit.theory.ingredients import KnownWeights, Weights
    from lipaudit.theory.spectral import Norms


class BoundsOptions(NormOptions):
    """Lipschitz bounds of every attention head beside its exact Jacobian norm.

    For each head: the exact norm ||J|| of its Jacobian on each sample, and upper bounds. These
    are the bounds of Hu 2024, Castin 2024 and Yudin 2025, and lipaudit's own, far tighter one
    (sharp).

    --radius also covers the ball of that radius around the tokens X of a layer. Every head gets
    a certified Lipschitz constant there, and the largest norm that gradient ascent finds.

    --input module computes the norms with respect to the input of the surrounding module:
    numerically, and without bounds.

    Examples:
      lipaudit bounds demo
      lipaudit bounds demo --radius 0.01,0.03,0.1
      lipaudit bounds timm:vit_base_patch16_224 --data photos/ --samples 16
      lipaudit bounds ./my-bert --data reviews.csv --layers 0,5-7 -o bounds.json
    """

    reads_heads: ClassVar[bool] = True

    once: ClassVar[Mapping[str, Any]] = {
        "concat": True,
        "layer_within": PROVEN_WITHIN,
        "splitting": True,
    }

    radius: Balls = option(
        (),
        "Also bound the norms within distance r of the tokens (||X' - X||_F <= r): 0.03 or "
        "0.01,0.03.",
        need=Need("--input projections", lambda options: options.input == "projections"),
    )
    layers: Layers = option(None, "Measure only these attention layers, e.g. 0,5-7.")
    input: Literal["projections", "module"] = option(
        "projections",
        "Input of the norms: what the projections read, or the input of the "
        "whole attention module.",
    )
    concat: bool = option(
        False, "Also compute norms of each layer's concatenated heads, before W_O."
    )
    splitting: bool = option(
        False, "Also compute how much the norm of each head grows if tokens are duplicated."
    )
    layer_within: float = option(
        LAYER_WITHIN,
        "Proven relative accuracy of layer norms (probability 99.9 %).",
        gt=0,
        allow_inf_nan=False,
    )

    @property
    def layer_accuracy(self) -> dict[str, Any]:
        """What the solver is asked for where a norm is that of a layer."""
        return self.accuracy | {"within": self.layer_within}


def _list_bounds() -> dict[str, Column]:
    """Return the columns of every bound, those of the logarithms last."""
    pairs = [pair for bound in load_bounds().values() for pair in bound.columns().items()]
    return dict(sorted(pairs, key=lambda pair: pair[0].startswith("log10_")))


BOUNDS_TABLE = Layout(
    name="bounds",
    title="Which heads amplify a small change most?",
    display=Display(
        about="Exact norm ‖J‖ of each head: how much a small change of the head's own input can "
        "grow in its output (median over the samples). Later layers may shrink it again.",
        columns=("head", "input", "exact", "exact_max"),
        by="exact",
        maps=("exact",),
        drawings=("tightness", "bounds"),
        folded=False,
    ),
    sample_columns={
        "exact_max": Column("largest head", "Largest head norm of the sample.", better="lower")
    },
    fixed=HEAD_NORMS,
    behind="exact_max",
    declared=_list_bounds,
)


LAYERS_TABLE = Layout(
    name="bounds.layers",
    title="How much do whole layers amplify?",
    display=Display(about="The same norm for all heads of a layer together."),
    fixed={
        "layer": HEAD["layer"],
        "module": HEAD["module"],
        "exact": Column(
            "exact",
            "Norm with the heads concatenated, before W_O (--concat).",
            better="lower",
            reading=norm_of("the layer's input", "the outputs of its heads"),
            reduction=Reduction("median", "exact"),
        ),
        "exact_out": Column(
            "with W_O",
            "Norm after the output projection.",
            better="lower",
            reduction=Reduction("median", "exact_out"),
        ),
        "within": WITHIN_COLUMN,
        "sharp_sum": Column(
            "||W_O|| sum", "||W_O|| times the sum of the heads' sharp bounds.", status="bound"
        ),
        "sharp_rss": Column(
            "||W_O|| rss", "||W_O|| times the root of the sum of squares of sharp.", status="bound"
        ),
        "theorem3_sum": Column(
            "theorem 3 sum",
            "||W_O|| times the sum of the heads' Theorem 3 bounds.",
            status="bound",
        ),
    },
)


BALLS_TABLE = Layout(
    name="bounds.ball",
    title="How large can the norm of a head get near the samples?",
    display=Display(
        about="Within a ball of radius r around a sample's tokens: the largest norm that a search "
        "found, and proven upper bounds."
    ),
    fixed={
        **HEAD,
        "r": Column(
            "r", "Radius: ||X' - X||_F over all tokens of a sample.", domain="", needed=True
        ),
        "exact": Column("exact", "||J|| at X.", reading=NEAR),
        "ball_norm": Column(
            "norm found",
            "Largest ||J|| that gradient ascent finds in the ball.",
            better="lower",
            domain=BALL,
            status="empirical",
            reading=NEAR,
            reduction=Reduction("median", "ball_norm"),
        ),
        "ball_sharp": Column(
            "ball sharp",
            "Upper bound on ||J|| everywhere in the ball (lipaudit's own).",
            better="lower",
            domain=BALL,
            status="certified",
            formula="sharp + integral_0^r C(rho) d rho, C(rho) >= ||D^2 O[F, F]||_F, ||F||_F = 1",
            reading="Source: ours.\nThe norm at X, and what the second derivative can add to "
            "it on the way to any X' in the ball.\nWhy it exceeds the norm found is "
            "unknown: the bound may be loose, or the search missed a worse "
            f"point.\nNot computed for every head: it {AFFINE_PLAIN}.",
            reduction=Reduction("median", "ball_sharp"),
        ),
        "ball_ratio_max": Column(
            "sharp/found",
            "Largest ball sharp / norm found over samples.",
            domain=BALL,
            status="empirical",
            reduction=Reduction("max", "ball_sharp", per="ball_norm"),
        ),
        "castin": Column(
            "castin at R+r",
            "The bound castin for tokens of norm up to R + r.",
            domain="all inputs, every ||x_i|| <= R + r",
            status="certified",
        ),
        "mean_field": Column(
            "mean field at R+r",
            "The bound mean_field for tokens of norm up to R + r.",
            domain="all inputs, every ||x_i|| <= R + r",
            status="certified",
        ),
        "hu": Column(
            "hu at r", "The bound of Hu et al. 2024 on the ball.", domain=BALL, status="certified"
        ),
    },
)


# Columns of balls that bound `ball_norm`.
CERTIFIED = ("ball_sharp", "castin", "mean_field", "hu")
COLUMNS = ("ball_norm", *CERTIFIED)
# Ratio of bound to norm found above which the bound is not informative.
LOOSE = 10


INGREDIENTS = ("p_norm", "x_norm", "radius", "softmax_norm_max")
# Columns of heads besides the bounds.
OF_HEADS = ("exact", "upper", "within", "splitting_gain", "forward_error")
# Columns with the largest value over the samples; the others have the median.
MAXIMA = ("exact_max", "sharp_ratio_max", "softmax_norm_max", "within", "forward_error")
# Relative effect of rounding on a norm above which a warning is given.
NOTABLE = 1e-4
# The kind of heads without a closed form.
NUMERICAL = "numerical"


def measure(net: Net, batches: Iterable[Batch], options: BoundsOptions) -> Iterator[Part]:
    """Yield the norms and bounds of every head, per sample."""
    from lipaudit.measures.layers import by_layer
    from lipaudit.theory.ingredients import KnownWeights

    # What depends on weights alone is computed once for each layer.
    known: dict[str, Any] = {"weights": KnownWeights(), "out_norms": {}}
    reduce = partial(_measure_layer, options=options, **known)
    describe = partial(_describe_layers, options=options)
    yield from by_layer(net, batches, reduce, layers=options.layers, describe=describe)


def _has_bounds(site: Site, options: BoundsOptions) -> bool:
    """Say whether the closed form gives the norm that the options ask for."""
    return site.closed_form and (options.input == "projections" or site.direct)


def _describe_layers(sites: Sequence[Site], options: BoundsOptions) -> Facts:
    """Describe layers by what does not depend on the sample."""
    from lipaudit.models.attention.capture import APART, MODULE_INPUT

    facts: Facts = {"kinds": [], "inputs": [], "layers": [], "apart": []}
    for site in sites:
        closed = _has_bounds(site, options)
        kinds = site.kinds if closed else (NUMERICAL,)
        kind = kinds[0] if len(set(kinds)) == 1 else "/".join(kinds)
        read = site.input if options.input == "projections" else MODULE_INPUT
        facts["kinds"] += [kind] * site.heads
        facts["inputs"] += [read] * site.heads
        facts["layers"].append((site.index, site.module))
        if closed and site.input == APART and not site.direct:
            facts["apart"].append(site.index)
    return facts


def _measure_layer(
    layer: Layer, options: BoundsOptions, weights: KnownWeights, out_norms: dict[int, float]
) -> Reduced:
    """Return all figures of a layer, per (sample, head) or (sample, 1); NaN: not computed."""
    import torch

    from lipaudit.measures.layers import per_sample, require_bounds_hold
    from lipaudit.theory.head_bounds import head_bounds
    from lipaudit.theory.head_norms import forward_error, head_norms, layer_norms, splitting_gain
    from lipaudit.theory.spectral import spectral_norm

    site, ids = layer.site, layer.batch.ids
    seeds = [seed_of(sample, options.seed) for sample in ids]
    if not _has_bounds(site, options):
        return _measure_numerically(layer, seeds, options)
    heads = layer.heads()
    known = weights.of(site.index, heads)
    exact = head_norms(heads, seeds=seeds, **options.accuracy)
    reduced = head_bounds(heads, weights=known) | _read_norms(exact)
    nothing = torch.full_like(exact.norm, torch.nan)
    reduced["splitting_gain"] = nothing
    if options.splitting and not heads.is_causal() and heads.sink is None:
        reduced["splitting_gain"] = splitting_gain(heads, exact.norm, seeds=seeds)
    together = layer_norms(heads, seeds=seeds, concat=options.concat, **options.layer_accuracy)
    for name, norms in (("layer_exact", together.concat), ("layer_out", together.out)):
        reduced[name] = nothing[:, :1] if norms is None else norms.norm[:, None]
    computed = [_read_norms(n) for n in (together.concat, together.out) if n is not None]
    reduced["layer_within"] = torch.stack([n["within"] for n in computed]).amax(0)[:, None]
    reduced["layer_missed"] = torch.stack([n["missed"] for n in computed]).sum(0)[:, None]
    if site.index not in out_norms:  # ||W_O||, NaN without an output projection
        out = heads.out
        norm = torch.nan if out is None else spectral_norm(out.double().flatten(0, 1))
        out_norms[site.index] = float(norm)
    reduced["out_norm"] = torch.full_like(reduced["layer_out"], out_norms[site.index])
    if options.radius:
        reduced |= measure_balls(heads, seeds, options.radius, known, reduced)
    queries, keys = heads.q.shape[2], heads.k.shape[2]
    reduced["tokens"] = torch.full_like(exact.norm, keys)
    reduced["limited"] = torch.full_like(exact.norm, queries * keys > POLICY.map_limit)
    reduced["numerical"] = torch.zeros_like(exact.norm)
    reduced["forward_error"] = forward_error(heads)
    sample = heads.sample.cpu()
    values = {name: per_sample(each.cpu(), sample) for name, each in reduced.items()}
    require_bounds_hold(site, ids, values, heads)
    require_balls_hold(site, ids, values, options.radius, heads)
    return values


def _read_norms(norms: Norms) -> Reduced:
    """Return norms as columns; a norm that was not computed (NaN) is not missed."""
    missed = (~norms.converged & ~norms.norm.isnan()).to(norms.norm.dtype)
    return {"exact": norms.norm, "upper": norms.upper, "within": norms.within, "missed": missed}


def _measure_numerically(layer: Layer, seeds: Sequence[int], options: BoundsOptions) -> Reduced:
    """Return the exact norms of a layer without a closed form, by automatic differentiation.

    NaN if the survey found a closed form and the module cannot run on its own.
    """
    import torch

    from lipaudit.measures.layers import per_sample
    from lipaudit.models.attention.numeric import compute_numeric_norms
    from lipaudit.theory.head_norms import forward_error

    reduced = _read_norms(compute_numeric_norms(layer, seeds=seeds, **options.accuracy))
    open_head = torch.full_like(reduced["exact"], torch.nan)
    reduced |= dict.fromkeys((*load_bounds(), *INGREDIENTS, "g1_max", "splitting_gain"), open_head)
    open_layer = open_head[:, :1]
    reduced |= dict.fromkeys(("layer_exact", "layer_out", "layer_within", "out_norm"), open_layer)
    reduced["layer_missed"] = torch.zeros_like(open_layer)
    open_balls = open_head.double()[..., None].expand(-1, -1, len(options.radius))
    reduced |= {f"at_r_{name}": open_balls for name in COLUMNS if options.radius}
    attention = layer.attention
    reduced["tokens"] = torch.full_like(open_head, attention.k.shape[2])
    reduced["limited"] = torch.zeros_like(open_head)
    reduced["numerical"] = torch.ones_like(open_head)
    reduced["forward_error"] = per_sample(forward_error(attention).cpu(), attention.sample.cpu())
    return reduced


def summarise(parts: Sequence[Part], options: BoundsOptions) -> list[Section]:
    """Make the sections `bounds`, `bounds.layers` and, with radii, `bounds.ball`."""
    import numpy as np

    from lipaudit.measures.layers import below_by_rounding, name_head

    facts = parts[0].facts
    measured = {name: join_parts(parts, name) for name in parts[0].values}
    # Where a head lost its closed form on some sample, its structure depends on the data. So no
    # bound for all inputs holds, and medians of bounds and norms would be over different samples.
    lost = measured["numerical"].any(0)
    measured |= {name: np.where(lost, np.nan, measured[name]) for name in load_bounds()}
    ids = sample_ids(parts)
    samples = {"ids": ids, "exact_max": tuple(np.fmax.reduce(measured["exact"], 1).tolist())}
    stored = [bound.name for bound in load_bounds().values() if bound.stored]
    arrays = {name: Array.of(measured[name].T) for name in ("exact", *stored)}
    of_heads = BOUNDS_TABLE.section(
        settings=options.model_dump(),
        rows=tuple(_make_rows(facts, measured)),
        samples=samples,
        arrays=arrays,
        notes=notes(parts)
        + _write_notes(measured, facts["apart"], options)
        + below_by_rounding(
            [name_head(head) for head in facts["heads"]],
            ids,
            measured["exact"],
            {name: measured[name] for name in load_bounds()},
        ),
    )
    sections = [of_heads, _make_layer_section(facts, measured, options, ids)]
    if options.radius:
        sections.append(make_ball_section(facts, measured, options, ids))
    return sections


def _make_rows(facts: Mapping[str, Any], measured: Mapping[str, Values]) -> Iterator[Row]:
    """Yield a row per head: medians over the samples, and maxima of the columns named so."""
    import numpy as np

    from lipaudit.models.attention.capture import MODULE_INPUT

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(measured["exact"] > 0, measured["sharp"] / measured["exact"], np.nan)
    columns = {n: measured[n] for n in (*load_bounds(), *INGREDIENTS, *OF_HEADS)}
    columns |= {"exact_max": measured["exact"], "sharp_ratio_max": ratio}
    # Heads that lost their closed form on some samples.
    changed = np.asarray(measured["numerical"].any(0))
    each = zip(facts["heads"], facts["kinds"], facts["inputs"], strict=True)
    for i, (head, kind, input) in enumerate(each):
        cells = reduce_columns({name: values[:, i] for name, values in columns.items()}, MAXIMA)
        # A bound that may overflow has its logarithm beside it.
        for name in (name for name, bound in load_bounds().items() if bound.log10_label):
            cells[f"log10_{name}"] = float(np.log10(m)) if (m := cells[name]) else None
        yield BOUNDS_TABLE.row(
            **head._asdict(),
            **cells,
            kind=f"{kind}, {NUMERICAL}" if kind != NUMERICAL and changed[i] else kind,
            input=f"{input}, {MODULE_INPUT}" if input != MODULE_INPUT and changed[i] else input,
            tokens=int(measured["tokens"][:, i].max()),
            converged=not measured["missed"][:, i].any(),
        )


def _make_layer_section(
    facts: Mapping[str, Any],
    measured: dict[str, Values],
    options: BoundsOptions,
    ids: tuple[str, ...],
) -> Section:
    import numpy as np

    from lipaudit.measures.layers import below_by_rounding

    layer_of = np.array([head.layer for head in facts["heads"]])
    rows, limits = [], np.full_like(measured["layer_out"], np.nan)
    for i, (layer, module) in enumerate(facts["layers"]):
        heads = layer_of == layer
        sharp, theorem3 = measured["sharp"][:, heads], measured["theorem3"][:, heads]
        # ||sum_h J_h W_O,h|| is at most ||W_O|| times the norm of the heads side by side, which is
        # at most the root of the sum of their squares (rss), and that at most the sum.
        factor = measured["out_norm"][:, i]
        limits[:, i] = factor * np.sqrt((sharp**2).sum(1))
        columns = {
            "exact": measured["layer_exact"][:, i],
            "exact_out": measured["layer_out"][:, i],
            "within": measured["layer_within"][:, i],
            "sharp_sum": factor * sharp.sum(1),
            "sharp_rss": limits[:, i],
            "theorem3_sum": factor * theorem3.sum(1),
        }
        cells = reduce_columns(columns, MAXIMA)
        rows.append(LAYERS_TABLE.row(layer=layer, module=module, **cells))
    out, concat = measured["layer_out"], measured["layer_exact"]
    left_out: tuple[Note, ...] = ()
    if (~np.isnan(out) & np.isnan(concat)).any():
        text = "norms before W_O were not computed; add --concat to get them"
        left_out = (Note.info("left-out", text),)
    kept = {"exact": concat, "exact_out": out}
    return LAYERS_TABLE.section(
        settings=options.model_dump(),
        rows=tuple(rows),
        samples={"ids": ids},
        arrays={name: Array.of(v.T) for name, v in kept.items() if not np.isnan(v).all()},
        notes=left_out
        + below_by_rounding(
            [f"layer {layer} ({module})" for layer, module in facts["layers"]],
            ids,
            out,
            {"sharp_rss": limits},
        ),
    )


def _write_notes(
    measured: dict[str, Values], apart: Sequence[int], options: BoundsOptions
) -> tuple[Note, ...]:
    """Note what is missing, what did not converge, and which norms have another input."""
    import numpy as np

    remarks = [*lower_estimates(float(np.nanmax(measured["within"], initial=0.0)))]
    if measured["limited"].any():  # a proof would take more memory than the map
        text = (
            f"||P|| of maps with more than {POLICY.map_limit:,} entries is an upper limit, "
            "possibly a loose one. Bounds that use it still hold"
        )
        remarks.append(Note.info("long-maps", text))
    if apart:
        text = (
            f"layers {', '.join(map(str, apart))}: queries and keys/values read different "
            "inputs, and the norms vary both independently. For norms with respect to the "
            "module's input, use --input module"
        )
        remarks.append(Note.info("inputs-apart", text))
    for name, what in (("missed", "head"), ("layer_missed", "layer")):
        missed = int(measured[name].sum())
        if missed:
            text = f"{missed} {what} norms did not converge to tol, so they may be too low"
            remarks.append(Note.warn("not-converged", text))
    lost = measured["forward_error"].max(0)
    if (lost > NOTABLE).any():
        text = (
            f"the logits of {int((lost > NOTABLE).sum())} heads are large for their precision. "
            "Rounding in the forward pass may have changed their norms by up to "
            f"{lost.max():.1g} (an estimate). For higher accuracy, use --dtype float64"
        )
        remarks.append(Note.warn("forward-error", text))
    for name, bound in load_bounds().items():
        absent = np.isnan(measured[name]).all(0)
        elsewhere = absent & measured["numerical"].all(0) & (options.input == "module")
        for heads, why in (
            (absent & ~elsewhere, bound.null or "has no closed form"),
            (
                elsewhere,
                "bounds the norm with respect to the projections' input, not the module's",
            ),
        ):
            if heads.any():
                text = f"{name} was not computed for {heads.sum()} heads: {why}"
                remarks.append(Note.info("no-bound", text))
    return tuple(remarks)


def measure_balls(
    heads: Heads,
    seeds: Sequence[int],
    radii: Sequence[Radius],
    weights: Weights | None,
    reduced: Reduced,
) -> Reduced:
    """Return the columns of balls per batch row, head and radius; names begin with "at_r".

    Args:
        heads: the heads of one layer.
        seeds: one seed per sample.
        radii: radii of the balls, at least one.
        weights: norms that depend on the weights alone, if known.
        reduced: `exact` and `sharp` of the heads at X.
    """
    import torch

    from lipaudit.theory.ascent import ball_norm
    from lipaudit.theory.ball import ball_sharp, ball_size_bounds

    parts = []
    for r in map(float, radii):
        norm = ball_norm(heads, r, seeds=seeds)
        bounds = ball_size_bounds(heads, r, weights=weights) | {
            "ball_norm": torch.where(norm.isnan(), norm, norm.maximum(reduced["exact"].to(norm))),
            "ball_sharp": ball_sharp(heads, r, sharp=reduced["sharp"], weights=weights),
        }
        parts.append(bounds)
    return {f"at_r_{name}": torch.stack([part[name] for part in parts], -1) for name in COLUMNS}


def require_balls_hold(
    site: Site,
    ids: Sequence[str],
    values: Mapping[str, Tensor],
    radii: Sequence[Radius],
    heads: Heads,
) -> None:
    """Stop the run if a constant of a head on a ball is below a norm found in that ball.

    Args:
        site: the layer.
        ids: ids of the samples.
        values: `exact` and the columns of `measure_balls`, (samples, heads, radii).
        radii: radii of the balls.
        heads: the heads behind the values.

    Raises:
        EvaluationError: a constant is below a norm; the message names head and constant.
    """
    import torch

    from lipaudit.measures.layers import per_sample, require_bound
    from lipaudit.theory.bounds.sharp import SHARP
    from lipaudit.theory.head_norms import ball_error, bound_error

    def slack(r: float) -> Tensor:
        double = heads.to(torch.float64)
        error = ball_error(double, r) + bound_error(double, values["exact"][heads.sample.cpu()])
        return per_sample(error.cpu(), heads.sample)

    for name in CERTIFIED:
        for k, radius in enumerate(radii):
            found, bound = (values[f"at_r_{each}"][..., k] for each in ("ball_norm", name))
            text, excuse = f"{name} at r = {radius.text}", partial(slack, float(radius))
            require_bound(text, bound, found, site, ids, advice=SHARP.remedy, slack=excuse)


def make_ball_section(
    facts: Mapping[str, Any],
    measured: Mapping[str, Values],
    options: BoundsOptions,
    ids: tuple[str, ...],
) -> Section:
    """Make the section `bounds.ball`: a row per head and radius."""
    import numpy as np

    from lipaudit.measures.layers import below_by_rounding, name_head

    lost = np.any(measured["numerical"], axis=0, keepdims=True)[..., None]
    columns = {name: np.where(lost, np.nan, measured[f"at_r_{name}"]) for name in COLUMNS}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = columns["ball_sharp"] / columns["ball_norm"]
    ratio[~np.isfinite(ratio)] = np.nan
    rows = []
    for i, head in enumerate(facts["heads"]):
        for k, radius in enumerate(options.radius):
            found = {name: values[:, i, k] for name, values in columns.items()}
            found |= {"exact": measured["exact"][:, i], "ball_ratio_max": ratio[:, i, k]}
            cells = reduce_columns(found, ("ball_ratio_max",))
            rows.append(BALLS_TABLE.row(**head._asdict(), r=float(radius), **cells))
    kept = ("ball_norm", "ball_sharp")
    found = {name: measured[f"at_r_{name}"].reshape(len(ids), -1) for name in COLUMNS}
    places = [
        f"{name_head(head)} at r = {radius.text}"
        for head in facts["heads"]
        for radius in options.radius
    ]
    return BALLS_TABLE.section(
        settings=options.model_dump(),
        rows=tuple(rows),
        samples={"ids": ids},
        arrays={name: Array.of(columns[name].reshape(len(ids), -1).T) for name in kept},
        notes=_note_balls(rows, options)
        + below_by_rounding(places, ids, found.pop("ball_norm"), found, "norm found"),
    )


def _note_balls(rows: Sequence[Row], options: BoundsOptions) -> tuple[Note, ...]:
    import numpy as np

    remarks = []
    open_heads = sum(row.ball_sharp is None for row in rows) // len(options.radius)
    if open_heads:
        text = f"ball_sharp was not computed for {open_heads} heads: it {AFFINE_PLAIN}"
        remarks.append(Note.info("no-bound", text))
    for radius in options.radius:
        shares = [
            row.ball_sharp / row.ball_norm
            for row in rows
            if row.r == float(radius) and row.ball_norm and row.ball_sharp is not None
        ]
        if shares and (middle := float(np.median(shares))) > LOOSE:
            text = (
                f"at r = {radius.text} ball_sharp is {middle:.3g} times the norm found "
                "(median over heads), so it is not informative. Use smaller radii"
            )
            remarks.append(Note.info("loose-ball", text))
    return tuple(remarks)


BOUNDS = Measure(
    "bounds", (BOUNDS_TABLE, LAYERS_TABLE, BALLS_TABLE), BoundsOptions, measure, summarise, batch=4
)
