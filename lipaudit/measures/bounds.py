"""The measure `bounds`: Lipschitz bounds of every head beside its exact Jacobian norm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lipaudit.measures import base
from lipaudit.measures.base import AuditRole, Measure, NormOptions, Part, Values
from lipaudit.settings.option import Balls, Layers, Need, option
from lipaudit.tables import Column, Display, Layout, Note, Reduction, Report, Row, Section
from lipaudit.tables.columns import (
    HEAD,
    HEAD_NORMS,
    NEAR,
    NORM_OF,
    WITHIN_COLUMN,
    find_bounds,
    finite,
    largest,
    log10_ratio,
)
from lipaudit.tables.formats import format_significant, format_value
from lipaudit.tables.summary import Headline, count_measured
from lipaudit.theory import LAYER_WITHIN, POLICY
from lipaudit.theory import WITHIN as PROVEN_WITHIN
from lipaudit.theory.bounds.record import AFFINE_PLAIN, BALL, load_bounds

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.measures.layers import Facts, Reduced
    from lipaudit.models.attention.capture import Layer, Site
    from lipaudit.models.net import Net
    from lipaudit.theory.heads import Heads
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

    reads_layers: ClassVar[bool] = True

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
        rare=True,
    )
    concat: bool = option(
        False,
        "Also compute norms of each layer's concatenated heads, before W_O.",
        rare=True,
    )
    splitting: bool = option(
        False,
        "Also compute how much the norm of each head grows if tokens are duplicated.",
        rare=True,
    )
    layer_within: float = option(
        LAYER_WITHIN,
        "Proven relative accuracy of layer norms (probability 99.9%).",
        gt=0,
        allow_inf_nan=False,
        rare=True,
    )


def _list_bounds() -> dict[str, Column]:
    """Return the columns of every bound, those of the logarithms last."""
    pairs = [pair for bound in load_bounds().values() for pair in bound.columns().items()]
    return dict(sorted(pairs, key=lambda pair: pair[0].startswith("log10_")))


# Number of heads that the scorecard lists.
STEEPEST = 3
RATIO = Column(label="bound / exact", meaning="1 is tight.", unit="×", domain="")


def read_steepest(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the norm of the steepest head, with the next ones in the text."""
    norms = finite(row.exact for row in section.rows)
    if not norms:
        return
    known = [row for row in section.rows if finite([row.exact])]
    first, *others = largest(known, "exact", STEEPEST)
    text = f"head {first.layer}.{first.head}"
    shares = report.section("jacobian.shares")
    for row in shares.rows if shares else ():
        if (row.layer, row.head) == (first.layer, first.head) and finite([row.share]):
            text += f" (share {row.share:.1%})"
    if others:
        listed = [f"{row.layer}.{row.head} ({format_significant(row.exact)})" for row in others]
        text += f"; next {', '.join(listed)}; median {format_significant(median(norms))}"
    text += count_measured(section, report)
    norm = format_significant(first.exact)
    sentence = f"The steepest head is layer {first.layer}, head {first.head} (‖J‖ {norm})."
    yield headline.row(section, first.exact, text=text, sentence=sentence)


def read_tightest(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield how many times the tightest bound exceeds the exact norm (median over heads).

    The text also has the tightest certified bound, which holds for other inputs, too.
    """
    ratios: dict[str, list[float]] = {}
    for name in find_bounds(section.columns):
        logs = finite(log10_ratio(row, name) for row in section.rows)
        if logs:
            ratios[name] = logs
    if not ratios:
        return
    best, *others = sorted(ratios, key=lambda name: median(ratios[name]))
    logs = ratios[best]
    text = f"of exact, {len(logs)} heads, largest {_write_ratio(max(logs))}"
    for name in (best, *others):
        if section.columns[name].status == "certified":
            certified = f"{section.columns[name].label} {_write_ratio(median(ratios[name]))}"
            text += f"; certified: {certified}"
            break
    label = f"{headline.label}, {section.columns[best].label}"
    value = raise_ten(median(logs))
    metric = f"{section.measure}.{best}/exact"
    yield headline.row(section, value, RATIO, figure=label, metric=metric, text=text)


def _write_ratio(exponent: float) -> str:
    """Write how many times a bound is the exact norm, from the logarithm to base 10."""
    return format_value(raise_ten(exponent), RATIO)


def raise_ten(exponent: float) -> float:
    """Return 10^exponent; infinity from 1e308, near the largest float."""
    if exponent < 308:
        return float(10**exponent)
    return math.inf


BOUNDS_TABLE = Layout(
    name="bounds",
    title="Which heads amplify a small change most?",
    headlines=(
        Headline(
            name="steepest_head",
            column="exact",
            label="steepest attention head, ‖J‖",
            words="head norm",
            meaning="The head with the largest exact norm ||J|| (sample median).",
            place=60,
            read=read_steepest,
            rule="bounds.exact:each <= +20%",
        ),
        Headline(
            name="tightest_bound",
            column="exact",
            label="tightest bound",
            meaning="The bound closest to the exact norm: bound / exact at the median head.",
            place=80,
            read=read_tightest,
        ),
    ),
    display=Display(
        about="Exact norm ‖J‖ of each head: how much a small change of the head's own input can "
        "grow in its output (median over the samples). Later layers may shrink it again.",
        columns=("head", "input", "exact", "exact_max"),
        by="exact",
        maps=("exact",),
        titles={"exact": "How much each head amplifies (norm ‖J‖)"},
        drawings=("tightness",),
        folded=False,
    ),
    sample_columns={
        "exact_max": Column("largest head", "Largest head norm of the sample.", better="lower")
    },
    fixed=HEAD_NORMS,
    behind="exact_max",
    declared=_list_bounds,
)


_limit = partial(Column, status="bound")
LAYERS_TABLE = Layout(
    name="bounds.layers",
    title="How much do whole layers amplify?",
    display=Display(about="The same norm for all heads of a layer together.", brief=False),
    fixed={
        "layer": HEAD["layer"],
        "module": HEAD["module"],
        "exact": Column.norm(
            "exact",
            "Norm with the heads concatenated, before W_O (--concat).",
            "exact",
            reading=NORM_OF.format("the layer's input", "the outputs of its heads"),
        ),
        "exact_out": Column.norm("with W_O", "Norm after the output projection.", "exact_out"),
        "within": WITHIN_COLUMN,
        "sharp_sum": _limit("||W_O|| sum", "||W_O|| times the sum of the heads' sharp bounds."),
        "sharp_rss": _limit(
            "||W_O|| rss", "||W_O|| times the root of the sum of squares of sharp."
        ),
        "theorem3_sum": _limit(
            "theorem 3 sum", "||W_O|| times the sum of the heads' Theorem 3 bounds."
        ),
    },
)


# Bounds for all inputs whose tokens are short: they hold in the ball without a search.
_column_of_tokens = partial(
    Column, domain="all inputs, every ||x_i|| <= R + r", status="certified"
)

BALLS_TABLE = Layout(
    name="bounds.ball",
    title="How large can the norm of a head get near the samples?",
    display=Display(
        about="Within a ball of radius r around a sample's tokens: the largest norm that a search "
        "found, and proven upper bounds.",
        folded=False,
    ),
    fixed={
        **HEAD,
        "r": Column(
            "r", "Radius: ||X' - X||_F over all tokens of a sample.", domain="", needed=True
        ),
        "exact": Column("exact", "||J|| at X.", reading=NEAR),
        "ball_norm": Column.norm(
            "norm found",
            "Largest ||J|| that gradient ascent finds in the ball.",
            "ball_norm",
            domain=BALL,
            status="empirical",
            reading=NEAR,
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
        "castin": _column_of_tokens(
            "castin at R+r", "The bound castin for tokens of norm up to R + r."
        ),
        "mean_field": _column_of_tokens(
            "mean field at R+r", "The bound mean_field for tokens of norm up to R + r."
        ),
        "hu": Column(
            "hu at r", "The bound of Hu et al. 2024 on the ball.", domain=BALL, status="certified"
        ),
    },
)


# Columns of balls that bound `ball_norm`.
CERTIFIED = ("ball_sharp", "castin", "mean_field", "hu")
# The arrays of the columns of balls: some columns of heads have the same names.
IN_BALLS = {name: f"at_r_{name}" for name in ("ball_norm", *CERTIFIED)}
# Ratio of bound to norm found above which the bound is not informative.
LOOSE = 10


# Columns with the largest value over the samples, like those that end in _max.
MAXIMA = ("within", "forward_error")
# Figures of heads that bounds are made of, at X.
INGREDIENTS = ("p_norm", "x_norm", "radius", "softmax_norm_max")
# Columns of heads besides the bounds.
OF_HEADS = ("exact", "upper", "within", "splitting_gain", "forward_error")
# Values of layers: the columns of their table, with a prefix.
OF_LAYERS = tuple(f"layer_{name}" for name in LAYERS_TABLE.fixed if name not in HEAD)
# Relative effect of rounding on a norm above which a warning is given.
NOTABLE = 1e-4
# The kind of heads without a closed form.
NUMERICAL = "numerical"


def measure(net: Net, batches: Iterable[Batch], options: BoundsOptions) -> Iterator[Part]:
    """Yield the norms and bounds of every head, per sample."""
    from lipaudit.measures import layers

    reduce = partial(_measure_layer, options=options, out_norms={})
    describe = partial(_describe_layers, options=options)
    return layers.by_layer(net, batches, reduce, layers=options.layers, describe=describe)


def _has_bounds(site: Site, options: BoundsOptions) -> bool:
    """Say whether the closed form gives the norm that the options ask for."""
    return site.closed_form and (options.input == "projections" or site.direct)


def _describe_layers(sites: Sequence[Site], options: BoundsOptions) -> Facts:
    """Describe layers by what does not depend on the sample."""
    from lipaudit.models.attention.capture import APART

    names = ("kinds", "inputs", "module_inputs", "reasons", "layers", "apart")
    facts: Facts = {name: [] for name in names}
    for site in sites:
        closed = _has_bounds(site, options)
        if closed:
            kinds = site.kinds
        else:
            kinds = (NUMERICAL,)
        if len(set(kinds)) == 1:
            kind = kinds[0]
        else:
            kind = "/".join(kinds)
        read = site.input if options.input == "projections" else site.module_input
        facts["kinds"] += [kind] * site.heads
        facts["inputs"] += [read] * site.heads
        facts["module_inputs"] += [site.module_input] * site.heads
        facts["reasons"] += [site.reason or ""] * site.heads
        facts["layers"].append((site.index, site.module))
        if closed and site.input == APART and not site.direct:
            facts["apart"].append(site.index)
    return facts


def _measure_layer(layer: Layer, options: BoundsOptions, out_norms: dict[int, float]) -> Reduced:
    """Return all figures of a layer, per (sample, head) or (sample, 1); NaN: not computed."""
    import torch

    from lipaudit.measures.layers import per_sample, require_bounds_hold
    from lipaudit.models.attention.numeric import compute_numeric_norms
    from lipaudit.theory.head_norms import forward_error
    from lipaudit.theory.matrix_norms import spectral_norm

    site = layer.site
    ids = layer.batch.ids
    seeds = [base.seed_of(sample, options.seed) for sample in ids]
    closed = _has_bounds(site, options)
    if closed:
        heads = layer.heads()
        computed = _measure_heads(heads, seeds, options)
        values = {name: per_sample(each.cpu(), heads.sample) for name, each in computed.items()}
        if heads.out is not None:
            if site.index not in out_norms:  # ||W_O||
                out_norms[site.index] = float(spectral_norm(heads.out.double().flatten(0, 1)))
            norm = torch.full_like(values["layer_exact_out"], out_norms[site.index])
            # ||sum_h J_h W_O,h|| is at most ||W_O|| times the norm of the heads side by side: at
            # most the root of the sum of their squares (rss), and that is at most the sum.
            rss = values["sharp"].square().sum(1, keepdim=True).sqrt()
            values |= {"out_norm": norm, "layer_sharp_rss": norm * rss}
            for name in ("sharp", "theorem3"):
                values[f"layer_{name}_sum"] = norm * values[name].sum(1, keepdim=True)
    else:  # NaN if the survey found a closed form and the module cannot run on its own
        heads = layer.attention
        values = _read_norms(compute_numeric_norms(layer, seeds=seeds, **options.accuracy))
    nothing = torch.full_like(values["exact"], torch.nan)
    balls = nothing.double()[..., None].expand(-1, -1, len(options.radius))
    queries = heads.q.shape[2]
    keys = heads.k.shape[2]
    values = {
        **dict.fromkeys((*load_bounds(), *INGREDIENTS, "splitting_gain"), nothing),
        **dict.fromkeys((*OF_LAYERS, "out_norm"), nothing[:, :1]),
        "layer_missed": torch.zeros_like(nothing[:, :1]),
        **dict.fromkeys(IN_BALLS.values() if options.radius else (), balls),
        **values,
        "tokens": torch.full_like(nothing, keys),
        "limited": torch.full_like(nothing, closed and queries * keys > POLICY.map_limit),
        "numerical": torch.full_like(nothing, not closed),
        "forward_error": per_sample(forward_error(heads).cpu(), heads.sample),
    }
    if closed:
        at_r = {name: values[of] for name, of in IN_BALLS.items() if options.radius}
        require_bounds_hold(site, ids, values, heads, at_r, options.radius)
    return values


def _measure_heads(heads: Heads, seeds: Sequence[int], options: BoundsOptions) -> Reduced:
    """Return norms and bounds in closed form, per batch row and head, or per row and layer."""
    import torch

    from lipaudit.theory.ascent import ball_norm
    from lipaudit.theory.head_bounds import ball_sharp, ball_size_bounds, head_bounds
    from lipaudit.theory.head_norms import head_norms, layer_norms, splitting_gain

    exact = head_norms(heads, seeds=seeds, **options.accuracy)
    reduced = head_bounds(heads) | _read_norms(exact)
    if options.splitting and not heads.is_causal() and heads.sink is None:
        reduced["splitting_gain"] = splitting_gain(heads, exact.norm, seeds=seeds)
    how = options.accuracy | {"within": options.layer_within, "concat": options.concat}
    together = layer_norms(heads, seeds=seeds, **how)
    named = {"layer_exact": together.concat, "layer_exact_out": together.out}
    norms = {name: _read_norms(each) for name, each in named.items() if each is not None}
    reduced |= {name: each["exact"][:, None] for name, each in norms.items()}
    within, missed = ([n[each] for n in norms.values()] for each in ("within", "missed"))
    reduced["layer_within"] = torch.stack(within, 1).amax(1, keepdim=True)
    reduced["layer_missed"] = torch.stack(missed, 1).sum(1, keepdim=True)
    balls = []
    for r in map(float, options.radius):
        # X is in the ball: what the search finds is never below the norm there.
        norm = ball_norm(heads, r, seeds=seeds)
        found = torch.where(norm.isnan(), norm, norm.maximum(exact.norm.to(norm)))
        sharp = ball_sharp(heads, r, sharp=reduced["sharp"])
        ball = ball_size_bounds(heads, r)
        balls.append(ball | {"ball_norm": found, "ball_sharp": sharp})
    for name, of in IN_BALLS.items() if balls else ():
        reduced[of] = torch.stack([ball[name] for ball in balls], -1)
    return reduced


def _read_norms(norms: Norms) -> Reduced:
    """Return norms as columns; a norm that was not computed (NaN) is not missed."""
    missed = (~norms.converged & ~norms.norm.isnan()).to(norms.norm.dtype)
    return {"exact": norms.norm, "upper": norms.upper, "within": norms.within, "missed": missed}


def summarise(parts: Sequence[Part], options: BoundsOptions) -> list[Section]:
    """Make the sections `bounds`, `bounds.layers` and, with radii, `bounds.ball`."""
    import numpy as np

    from lipaudit.measures.layers import below_by_rounding

    facts = parts[0].facts
    ids = base.sample_ids(parts)
    measured = base.join_arrays(parts)
    # Where a head lost its closed form on some sample, its structure depends on the data. So no
    # bound for all inputs holds, and medians of bounds and norms would be over different samples.
    lost = np.asarray(measured["numerical"].any(0))
    layer_of = np.array([layer for layer, _, _ in facts["heads"]])
    lost_layers = np.array([lost[layer_of == layer].any() for layer, _ in facts["layers"]])
    for names, where in (
        (load_bounds(), lost),
        (("layer_sharp_sum", "layer_sharp_rss", "layer_theorem3_sum"), lost_layers),
        (IN_BALLS.values() if options.radius else (), lost[:, None]),
    ):
        measured |= {name: np.where(where, np.nan, measured[name]) for name in names}
    exact = measured["exact"]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(exact > 0, measured["sharp"] / exact, np.nan)
    columns = {name: measured[name] for name in (*load_bounds(), *INGREDIENTS, *OF_HEADS)}
    cells = _reduce_columns(columns | {"exact_max": exact, "sharp_ratio_max": ratio})
    # A bound that may overflow has its logarithm beside it.
    for name in (name for name, bound in load_bounds().items() if bound.log10_label):
        cells[f"log10_{name}"] = [float(np.log10(m)) if m else None for m in cells[name]]
    # A head that lost its closed form on some samples has a second kind and input there.
    marked = {}
    numerical = [NUMERICAL] * len(lost)
    for name, others in (("kind", numerical), ("input", facts["module_inputs"])):
        pairs = zip(facts[f"{name}s"], others, lost, strict=True)
        marked[name] = [f"{v}, {o}" if gone and v != o else v for v, o, gone in pairs]
    rows = base.make_rows(
        BOUNDS_TABLE,
        facts["heads"],
        **cells,
        **marked,
        tokens=measured["tokens"].max(0).astype(int),
        converged=~measured["missed"].any(0),
    )
    stored = [bound.name for bound in load_bounds().values() if bound.stored]
    limits = {name: measured[name] for name in load_bounds()}
    notes = [*_write_notes(parts, measured, options)]
    notes += below_by_rounding(_name_heads(facts["heads"]), ids, exact, limits)
    largest = {"exact_max": np.fmax.reduce(exact, 1).tolist()}
    arrays = {name: measured[name] for name in ("exact", *stored)}
    of_heads = base.make_section(
        BOUNDS_TABLE, parts, options, rows, notes, samples=largest, arrays=arrays
    )
    balls = []
    if options.radius:
        balls = [_make_ball_section(parts, measured, options)]
    return [of_heads, _make_layer_section(parts, measured, options), *balls]


def _name_heads(heads: Iterable[tuple[int, int, str]]) -> list[str]:
    """Return the names of heads in messages."""
    return [f"head {layer}.{head} ({module})" for layer, head, module in heads]


def _reduce_columns(columns: Mapping[str, Values]) -> dict[str, list[float | None]]:
    """Return the cells of each column, from arrays (samples, rows): medians, or the largest."""
    import numpy as np

    cells = {}
    for name, values in columns.items():
        largest = name in MAXIMA or (name.endswith("_max") and name not in load_bounds())
        statistic = np.max if largest else np.median
        cells[name] = [base.reduce_known(row, statistic) for row in values.T]
    return cells


def _make_layer_section(
    parts: Sequence[Part], measured: Mapping[str, Values], options: BoundsOptions
) -> Section:
    """Make the section `bounds.layers`: a row per layer."""
    import numpy as np

    from lipaudit.measures.layers import below_by_rounding

    ids = base.sample_ids(parts)
    layers = parts[0].facts["layers"]
    index, module = zip(*layers, strict=True)
    columns = {name.removeprefix("layer_"): measured[name] for name in OF_LAYERS}
    out = columns["exact_out"]
    concat = columns["exact"]
    left_out: tuple[Note, ...] = ()
    if (~np.isnan(out) & np.isnan(concat)).any():
        text = "norms before W_O were not computed; add --concat to get them"
        left_out = (Note.info("left-out", text),)
    places = [f"layer {layer} ({module})" for layer, module in layers]
    kept = {"exact": concat, "exact_out": out}
    arrays = {name: v for name, v in kept.items() if not np.isnan(v).all()}
    rows = base.make_rows(LAYERS_TABLE, layer=index, module=module, **_reduce_columns(columns))
    rss = {"sharp_rss": columns["sharp_rss"]}
    notes = left_out + below_by_rounding(places, ids, out, rss)
    return base.make_section(LAYERS_TABLE, parts, options, rows, notes, arrays=arrays)


def _write_notes(
    parts: Sequence[Part], measured: Mapping[str, Values], options: BoundsOptions
) -> Iterator[Note]:
    """Note what is missing, what did not converge, and which norms have another input."""
    import numpy as np

    yield from base.notes(parts)
    facts = parts[0].facts
    yield from base.lower_estimates(float(np.nanmax(measured["within"], initial=0.0)))
    if measured["limited"].any():  # a proof would take more memory than the map
        text = (
            f"||P|| of maps with more than {POLICY.map_limit:,} entries is an upper limit, "
            "possibly a loose one. Bounds that use it still hold"
        )
        yield Note.info("long-maps", text)
    if facts["apart"]:
        text = (
            f"layers {', '.join(map(str, facts['apart']))}: queries and keys/values read "
            "different inputs, and the norms vary both independently. For norms with respect to "
            "the module's input, use --input module"
        )
        yield Note.info("inputs-apart", text)
    for name, what in (("missed", "head"), ("layer_missed", "layer")):
        yield from base.note_missed(int(measured[name].sum()), f"{what} norms")
    error = measured["forward_error"].max(0)
    if (error > NOTABLE).any():
        text = (
            f"the logits of {int((error > NOTABLE).sum())} heads are large for their precision. "
            "Rounding in the forward pass may have changed their norms by up to "
            f"{error.max():.1g} (an estimate). For higher accuracy, use --dtype float64"
        )
        yield Note.warn("forward-error", text)
    always = np.asarray(measured["numerical"].all(0))
    ever = np.asarray(measured["numerical"].any(0))
    of_module = "bounds the norm with respect to the projections' input, not the module's"
    causes = []  # of each head; empty: that of the bound itself
    for reason, numerical, partly in zip(facts["reasons"], always, ever, strict=True):
        cause = f"no closed form on {'any sample' if numerical else 'some samples'}" * bool(partly)
        cause = of_module if numerical and options.input == "module" else cause
        causes.append(f"no closed form ({reason})" if reason else cause)
    for name, bound in load_bounds().items():
        pairs = zip(np.asarray(np.isnan(measured[name]).all(0)), causes, strict=True)
        counts = Counter(
            why or bound.null or "no value on any sample" for absent, why in pairs if absent
        )
        for why, count in counts.items():
            text = f"{name} was not computed for {count} heads: {why}"
            yield Note.info("no-bound", text)


def _make_ball_section(
    parts: Sequence[Part], measured: Mapping[str, Values], options: BoundsOptions
) -> Section:
    """Make the section `bounds.ball`: a row per head and radius."""
    import numpy as np

    from lipaudit.measures.layers import below_by_rounding

    ids = base.sample_ids(parts)
    names = parts[0].facts["heads"]
    # Arrays (samples, heads, radii) become (samples, rows).
    columns = {name: measured[of].reshape(len(ids), -1) for name, of in IN_BALLS.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = columns["ball_sharp"] / columns["ball_norm"]
    ratio[~np.isfinite(ratio)] = np.nan
    more = {"exact": measured["exact"].repeat(len(options.radius), 1), "ball_ratio_max": ratio}
    rows = base.make_rows(
        BALLS_TABLE,
        [name for name in names for _ in options.radius],
        r=[float(radius) for _ in names for radius in options.radius],
        **_reduce_columns(columns | more),
    )
    heads = _name_heads(names)
    places = [f"{head} at r = {radius.text}" for head in heads for radius in options.radius]
    limits = {name: columns[name] for name in CERTIFIED}
    arrays = {name: columns[name] for name in ("ball_norm", "ball_sharp")}
    notes = [*_note_balls(rows, options)]
    notes += below_by_rounding(places, ids, columns["ball_norm"], limits, "norm found")
    return base.make_section(BALLS_TABLE, parts, options, rows, notes, arrays=arrays)


def _note_balls(rows: Sequence[Row], options: BoundsOptions) -> Iterator[Note]:
    import numpy as np

    absent = sum(row.ball_sharp is None for row in rows) // len(options.radius)
    if absent:
        text = f"ball_sharp was not computed for {absent} heads: it {AFFINE_PLAIN}"
        yield Note.info("no-bound", text)
    for radius in options.radius:
        known = [row for row in rows if row.r == float(radius) and row.ball_norm]
        shares = [row.ball_sharp / row.ball_norm for row in known if row.ball_sharp is not None]
        if shares and (middle := float(np.median(shares))) > LOOSE:
            text = (
                f"at r = {radius.text} ball_sharp is {middle:.3g} times the norm found "
                "(median over heads), so it is not informative. Use smaller radii"
            )
            yield Note.info("loose-ball", text)


BOUNDS = Measure(
    "bounds",
    (BOUNDS_TABLE, LAYERS_TABLE, BALLS_TABLE),
    BoundsOptions,
    measure,
    summarise,
    batch=4,
    place=10,
    audit=AuditRole(samples={"quick": 8, "usual": 16, "full": 32}),
)
