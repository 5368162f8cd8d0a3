"""The measure `bounds`: Lipschitz bounds of every head beside its exact Jacobian norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lipaudit.measures import base
from lipaudit.measures.base import Arrays, AuditRole, Columns, Measure, NormOptions, Part, Values
from lipaudit.measures.bound_tables import (
    BALLS_TABLE,
    BOUNDS_TABLE,
    CERTIFIED,
    IN_BALLS,
    INGREDIENTS,
    LAYERS_TABLE,
    NUMERICAL,
    OF_LAYERS,
)
from lipaudit.settings.option import Need, option
from lipaudit.settings.value_types import Balls, Layers
from lipaudit.tables import Note, Row, Section
from lipaudit.theory import LAYER_WITHIN, POLICY
from lipaudit.theory import WITHIN as PROVEN_WITHIN
from lipaudit.theory.bounds.record import AFFINE_PLAIN, load_bounds

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net


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

    older_defaults: ClassVar[Mapping[str, Any]] = {
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


# Ratio of bound to norm found above which the bound is not informative.
LOOSE = 10


# Columns with the largest value over the samples, like those that end in _max.
MAXIMA = ("within", "forward_error")
# Columns of heads besides the bounds.
OF_HEADS = ("exact", "upper", "within", "splitting_gain", "forward_error")
# Relative effect of rounding on a norm above which a warning is given.
NOTABLE = 1e-4


def measure(net: Net, batches: Iterable[Batch], options: BoundsOptions) -> Iterator[Part]:
    """Yield the norms and bounds of every head, per sample."""
    from lipaudit.measures.layer_bounds import describe_layers, measure_layer
    from lipaudit.measures.layers import by_layer

    # `out_norms`: a cache of ||W_O|| of each layer, which is the same for all batches.
    reduce = partial(measure_layer, options=options, out_norms={})
    describe = partial(describe_layers, options=options)
    return by_layer(net, batches, reduce, layers=options.layers, describe=describe)


def summarise(parts: Sequence[Part], options: BoundsOptions) -> list[Section]:
    """Make the sections `bounds`, `bounds.layers` and, with radii, `bounds.ball`.

    Rows are heads, layers, or heads at a radius. A cell is a median or maximum over the samples.
    """
    # Arrays (samples, heads or layers, ...). A head may lack its closed form on some samples: then
    # its bounds become NaN on all samples.
    measured = _remove_bounds(base.join_arrays(parts), parts[0].facts)
    sections = [
        _make_head_section(parts, measured, options),
        _make_layer_section(parts, measured, options),
    ]
    if options.radius:
        sections.append(_make_ball_section(parts, measured, options))
    return sections


def _make_head_section(parts: Sequence[Part], measured: Arrays, options: BoundsOptions) -> Section:
    """Make the section `bounds`: a row per head, with its norm and the bounds on it.

    `measured` has the arrays of all samples, (samples, heads or layers, ...).
    """
    import numpy as np

    from lipaudit.measures.layers import note_rounding

    facts = parts[0].facts
    rows = _make_head_rows(facts, base.select_unique(parts, measured))
    exact = measured["exact"]
    bounds = {}
    arrays = {"exact": exact}  # in the report, (samples, heads)
    for name, bound in load_bounds().items():
        bounds[name] = measured[name]
        if bound.stored:
            arrays[name] = measured[name]
    notes = [*_write_notes(parts, measured, options)]
    places = _name_heads(facts["heads"])
    notes += note_rounding(places, base.sample_ids(parts), exact, bounds)
    # The largest norm of a head on each sample; `fmax` skips NaN.
    largest = {"exact_max": np.fmax.reduce(exact, 1).tolist()}
    return base.make_section(
        BOUNDS_TABLE, parts, options, rows, notes, samples=largest, arrays=arrays
    )


def _make_head_rows(facts: Mapping[str, Any], measured: Arrays) -> tuple[Row, ...]:
    """Return the row of each head: its norm and bounds, and how the norm was computed.

    Args:
        facts: the facts of `describe_layers`, and layer, number and module of each head.
        measured: arrays of all distinct samples, (samples, heads or layers, ...).
    """
    import numpy as np

    # Heads without a closed form on some sample: their norms there are numerical, computed by
    # differentiating the module.
    without_form: Values = np.asarray(measured["numerical"].any(0))
    return base.make_rows(
        BOUNDS_TABLE,
        facts["heads"],
        **_reduce_heads(measured),
        kind=_add_numerical(facts["kinds"], [NUMERICAL] * len(without_form), without_form),
        input=_add_numerical(facts["inputs"], facts["module_inputs"], without_form),
        tokens=measured["tokens"].max(0).astype(int),
        converged=~measured["missed"].any(0),
    )


def _reduce_heads(measured: Arrays) -> Columns:
    """Return the cells of norms and bounds of each head: statistics over the samples.

    `measured` has the arrays of all distinct samples, (samples, heads or layers, ...).
    """
    import numpy as np

    exact = measured["exact"]
    # How many times the bound `sharp` exceeds the norm; a norm of 0 has no ratio.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(exact > 0, measured["sharp"] / exact, np.nan)
    # All bounds, the figures that bounds are made of (such as ||P||), and the norm with its error.
    columns = {name: measured[name] for name in (*load_bounds(), *INGREDIENTS, *OF_HEADS)}
    cells = _reduce_columns(columns | {"exact_max": exact, "sharp_ratio_max": ratio})
    for name, bound in load_bounds().items():
        if bound.log10_label:  # a bound that may be huge has its logarithm beside it
            medians = cells[name]  # None: not computed
            cells[f"log10_{name}"] = [float(np.log10(m)) if m else None for m in medians]
    return cells


def _remove_bounds(measured: Arrays, facts: Mapping[str, Any]) -> Arrays:
    """Return the figures with NaN for the bounds of heads that had no closed form on some sample.

    The structure of such a head depends on the data. So no bound for all inputs holds, and
    medians of bounds and norms would be over different samples.

    Args:
        measured: arrays of all samples, (samples, heads or layers, ...). `numerical` says whether
            a head's norm was computed by differentiating the module, without the closed form.
        facts: the layer of each head, and the layers.
    """
    import numpy as np

    # Masks of the heads without a closed form, and of the layers with such a head.
    heads_without_form: Values = np.asarray(measured["numerical"].any(0))
    layer_of_head = np.array([layer for layer, _, _ in facts["heads"]])
    layers_without_form = np.array(
        [heads_without_form[layer_of_head == layer].any() for layer, _ in facts["layers"]]
    )
    # Figures by name, with the heads or layers at which they become NaN. `load_bounds` has the
    # names of all bounds of heads, plug-ins included.
    masks = dict.fromkeys(load_bounds(), heads_without_form)
    masks |= dict.fromkeys(
        ("layer_sharp_sum", "layer_sharp_rss", "layer_theorem3_sum"), layers_without_form
    )
    for name in IN_BALLS.values():
        if name in measured:
            masks[name] = heads_without_form[:, None]  # (heads, 1): at every radius
    figures = dict(measured)
    for name, mask in masks.items():
        figures[name] = np.where(mask, np.nan, figures[name])
    return figures


def _add_numerical(
    texts: Sequence[str], numerical: Sequence[str], without_form: Values
) -> list[str]:
    """Return the cells of one of the columns `kind` and `input`, a text per head.

    Without a closed form on some sample, the norm was computed there by differentiating the module
    (a numerical norm). Then the text names both ways: the kind "affine" becomes "affine,
    numerical", the input "one input" becomes "one input, module input (x)".

    Args:
        texts: the cell of each head if its norm has a closed form on all samples.
        numerical: what is added for each head if its norm is numerical on some sample.
        without_form: whether the norm of a head is numerical on some sample.
    """
    texts_of_heads = []
    for text, other, is_numerical in zip(texts, numerical, without_form, strict=True):
        if is_numerical and text != other:
            text = f"{text}, {other}"
        texts_of_heads.append(text)
    return texts_of_heads


def _name_heads(heads: Iterable[tuple[int, int, str]]) -> list[str]:
    """Return the names of heads in messages."""
    return [f"head {layer}.{head} ({module})" for layer, head, module in heads]


def _reduce_columns(columns: Arrays) -> Columns:
    """Return the cells of each column from its array, (samples, rows): medians, or maxima.

    Maxima are the columns in MAXIMA, and all columns with a name that ends in _max.
    """
    import numpy as np

    cells = {}
    for name, values in columns.items():
        # The name of a bound may end in _max, too: its cells are medians.
        is_maximum = name in MAXIMA or (name.endswith("_max") and name not in load_bounds())
        statistic = np.max if is_maximum else np.median
        cells[name] = base.reduce_columns(values, statistic)
    return cells


def _make_layer_section(
    parts: Sequence[Part], measured: Arrays, options: BoundsOptions
) -> Section:
    """Make the section `bounds.layers`: a row per layer, with norms of all its heads together.

    `measured` has the arrays of all samples, (samples, heads or layers, ...).
    """
    import numpy as np

    from lipaudit.measures.layers import note_rounding

    layers = parts[0].facts["layers"]
    index, module = zip(*layers, strict=True)
    columns = {name.removeprefix("layer_"): measured[name] for name in OF_LAYERS}
    cells = _reduce_columns(base.select_unique(parts, columns))
    rows = base.make_rows(LAYERS_TABLE, layer=index, module=module, **cells)
    concat = columns["exact"]  # norms before W_O
    out = columns["exact_out"]  # norms after W_O
    notes: list[Note] = []
    if (~np.isnan(out) & np.isnan(concat)).any():
        text = "norms before W_O were not computed; add --concat to get them"
        notes.append(Note.info("left-out", text))
    places = [f"layer {layer} ({module})" for layer, module in layers]
    rss = {"sharp_rss": columns["sharp_rss"]}
    notes += note_rounding(places, base.sample_ids(parts), out, rss)
    arrays = {}
    for name in ("exact", "exact_out"):
        if not np.isnan(columns[name]).all():
            arrays[name] = columns[name]
    return base.make_section(LAYERS_TABLE, parts, options, rows, notes, arrays=arrays)


def _write_notes(
    parts: Sequence[Part], measured: Arrays, options: BoundsOptions
) -> Iterator[Note]:
    """Note what is missing, what did not converge, and which norms vary two inputs independently.

    Args:
        parts: the parts.
        measured: arrays of all samples, (samples, heads or layers, ...).
        options: the options.
    """
    import numpy as np

    yield from base.notes(parts)
    yield from base.note_repeats(parts)
    facts = parts[0].facts
    yield from base.note_lower_estimates(float(np.nanmax(measured["within"], initial=0.0)))
    # ||P|| of a large map is not proven to be exact: a proof would take more memory than the map.
    if measured["limited"].any():
        yield Note.info(
            "long-maps",
            f"||P|| of maps with more than {POLICY.map_limit:,} entries is an upper limit, "
            "possibly a loose one. Bounds that use it still hold",
        )
    if facts["apart"]:
        yield Note.info(
            "inputs-apart",
            f"layers {', '.join(map(str, facts['apart']))}: queries and keys/values read "
            "different inputs, and the norms vary both independently. For norms with respect to "
            "the module's input, use --input module",
        )
    yield from base.note_missed(int(measured["missed"].sum()), "head norms")
    yield from base.note_missed(int(measured["layer_missed"].sum()), "layer norms")
    yield from _note_forward_error(measured["forward_error"].max(0))
    yield from _note_missing_bounds(measured, facts["reasons"], options)


def _note_forward_error(error: Values) -> Iterator[Note]:
    """Warn of heads whose norm may be wrong because the forward pass rounded large logits.

    Args:
        error: estimated relative effect of rounding on the norm of each head, (heads,).
    """
    is_large = error > NOTABLE
    if is_large.any():
        yield Note.warn(
            "forward-error",
            f"the logits of {int(is_large.sum())} heads are large for their precision. "
            "Rounding in the forward pass may have changed their norms by up to "
            f"{error.max():.1g} (an estimate). If the model runs in float32, use --dtype float64",
        )


def _note_missing_bounds(
    measured: Arrays, reasons: Sequence[str], options: BoundsOptions
) -> Iterator[Note]:
    """Note how many heads have no value of a bound on any sample, by the cause.

    Args:
        measured: arrays of all samples, (samples, heads or layers, ...).
        reasons: for each head, why it has no closed form on the first sample; "" if it has one.
        options: the options.
    """
    import numpy as np

    causes = _explain_missing(reasons, measured["numerical"], options)
    for name, bound in load_bounds().items():
        # The number of heads without a value on any sample, by cause.
        counts = Counter(
            cause or bound.null or "no value on any sample"
            for values, cause in zip(measured[name].T, causes, strict=True)
            if np.isnan(values).all()
        )
        for cause, count in counts.items():
            yield Note.info("no-bound", f"{name} was not computed for {count} heads: {cause}")


def _explain_missing(
    reasons: Sequence[str], numerical: Values, options: BoundsOptions
) -> list[str]:
    """Return for each head why it has no bounds from the closed form; "" for heads with bounds.

    Args:
        reasons: for each head, why it has no closed form on the first sample; "" if it has one.
        numerical: whether its norm was computed by differentiating the module, without the closed
            form, (samples, heads).
        options: the options.
    """
    causes = []
    for reason, flags in zip(reasons, numerical.T, strict=True):
        cause = ""
        if reason:
            cause = f"no closed form ({reason})"
        elif flags.all() and options.input == "module":
            cause = "bounds the norm with respect to the projections' input, not the module's"
        elif flags.all():
            cause = "no closed form on any sample"
        elif flags.any():
            cause = "no closed form on some samples"
        causes.append(cause)
    return causes


def _make_ball_section(parts: Sequence[Part], measured: Arrays, options: BoundsOptions) -> Section:
    """Make the section `bounds.ball`: a row per head and radius, with bounds on a ball around X.

    `measured` has the arrays of all samples, (samples, heads or layers, ...).
    """
    import numpy as np

    from lipaudit.measures.layers import note_rounding

    ids = base.sample_ids(parts)
    heads = parts[0].facts["heads"]
    # Arrays (samples, heads, radii) become (samples, rows): all radii of a head, then the next.
    columns = {name: measured[key].reshape(len(ids), -1) for name, key in IN_BALLS.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = columns["ball_sharp"] / columns["ball_norm"]
    ratio[~np.isfinite(ratio)] = np.nan
    exact = measured["exact"].repeat(len(options.radius), 1)  # the same at every radius
    reduced = columns | {"exact": exact, "ball_ratio_max": ratio}
    rows = base.make_rows(
        BALLS_TABLE,
        [head for head in heads for _ in options.radius],
        r=[float(radius) for _ in heads for radius in options.radius],
        **_reduce_columns(base.select_unique(parts, reduced)),
    )
    names = _name_heads(heads)
    places = [f"{name} at r = {radius.text}" for name in names for radius in options.radius]
    limits = {name: columns[name] for name in CERTIFIED}
    arrays = {name: columns[name] for name in ("ball_norm", "ball_sharp")}
    notes = [*_note_balls(rows, options)]
    notes += note_rounding(places, ids, columns["ball_norm"], limits, norm="norm found")
    return base.make_section(BALLS_TABLE, parts, options, rows, notes, arrays=arrays)


def _note_balls(rows: Sequence[Row], options: BoundsOptions) -> Iterator[Note]:
    """Note how many heads have no bound in balls, and at which radii the bound is loose.

    The rows have every head at every radius.
    """
    missing = sum(row.ball_sharp is None for row in rows) // len(options.radius)
    if missing:
        yield Note.info(
            "no-bound", f"ball_sharp was not computed for {missing} heads: it {AFFINE_PLAIN}"
        )
    for radius in options.radius:
        ratios = []
        for row in rows:
            if row.r == float(radius) and row.ball_norm and row.ball_sharp is not None:
                ratios.append(row.ball_sharp / row.ball_norm)
        if ratios and median(ratios) > LOOSE:
            yield Note.info(
                "loose-ball",
                f"at r = {radius.text} ball_sharp is {median(ratios):.3g} times the norm found "
                "(median over heads), so it is not informative. Use smaller radii",
            )


BOUNDS = Measure(
    "bounds",
    (BOUNDS_TABLE, LAYERS_TABLE, BALLS_TABLE),
    BoundsOptions,
    measure,
    summarise,
    batch=4,
    short_batch=16,  # on few tokens, calls of torch take longer than their arithmetic
    place=10,
    audit=AuditRole(samples={"quick": 8, "usual": 16, "full": 32}),
)
