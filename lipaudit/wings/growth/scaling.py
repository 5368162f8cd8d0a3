"""The measure `scaling`: how norms grow with the sequence length and the radius.

On data, it runs the measures `bounds` and `jacobian` on the same samples, cut to growing lengths.
The worst case (`lengths.worst_case`) needs only a head's weights and the radius of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from lipaudit.errors import InputError
from lipaudit.measures import base, bounds, jacobian
from lipaudit.measures.base import (
    Arrays,
    Facts,
    Measure,
    MeasureOptions,
    NormOptions,
    Part,
    Values,
)
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.settings.option import Need, option, repeat_option
from lipaudit.settings.value_types import Layers, Lengths, Names, read_list
from lipaudit.tables import Note, Notes, Row, Section
from lipaudit.tables.columns import group_values
from lipaudit.wings.growth.scaling_tables import FITS_TABLE, SCALING_TABLE, list_bounds

if TYPE_CHECKING:
    from lipaudit.data.batch import Batch
    from lipaudit.models.net import Net
    from lipaudit.wings.growth.lengths import Cells
    from lipaudit.wings.growth.worst_tokens import PowerLaw


ScalingMode = Literal["real", "adversarial", "radius", "ascent"]


# Worst cases have a radius and a mask of their own; data have those of the model.
WORST = Need("a --mode other than real", lambda o: {*o.modes} != {"real"})


ScalingModes = Annotated[tuple[ScalingMode, ...], read_list]


class ScalingOptions(MeasureOptions):
    """How the norms of attention layers and of the model grow with the number of tokens.

    Modes:
      real         your samples at growing lengths: text cut, images resized.
      adversarial  worst-case tokens: the norm grows like sqrt n up to n_max.
      radius       the same tokens at growing radius.
      ascent       the largest norm that searches find within the radius.

    Examples:
      lipaudit scaling demo
      lipaudit scaling ./my-bert --data book.txt --lengths 8:512:log7 -n 8
      lipaudit scaling ./my-bert --mode adversarial --heads 0.8,5.11
      lipaudit scaling timm:vit_tiny_patch16_224 --model-kwargs dynamic_img_size=1
    """

    samples: ClassVar[int] = 4

    lengths: Lengths = option("8:256:log8", "Tokens, FIRST:LAST:logCOUNT.")
    modes: ScalingModes = option(
        "real,adversarial,radius,ascent",
        "real, adversarial, radius, ascent (comma-separated).",
        "--mode",
        min_length=1,
    )
    layers: Layers = option(None, "Measure only these attention layers, e.g. 0,5-7.")
    heads: Names = option(
        None,
        "Heads of the worst-case modes: 0.8,5.11 or all. Default: the head with the "
        "largest norm of each layer.",
        rare=True,
    )
    radius: Annotated[float, Field(gt=0, le=1e6)] | None = option(
        None,
        "Also search the worst tokens of at most this norm, besides the norm that the layer has.",
        need=WORST,
    )
    mask: Literal["own", "none", "causal", "both"] = option(
        "own",
        "Mask of the worst case: own (the model's), none, causal or both.",
        need=WORST,
        rare=True,
    )
    tol: float = repeat_option(NormOptions, "tol", rare=True)

    @property
    def tokens(self) -> int | None:
        """Return the number of tokens to which texts are read; None: the model's default.

        Mode real cuts the samples to every length, so texts must reach the longest one. The other
        modes need the tokens of the first sample only as a measure of their norm.
        """
        if "real" in self.modes:
            return max(self.lengths)
        return None


# What is kept of the measure bounds, per head and per layer.
OF_HEADS = ("exact", "radius", "tokens")
OF_LAYERS = ("layer_exact", "layer_exact_out", "out_norm")
# The sqrt n law is fitted for n up to n_max divided by this.
WELL_UNDER = 10
# If repeated searches differ by more than this factor, no exponent is fitted.
AGREED = 1.02


def measure(net: Net, batches: Iterable[Batch], options: ScalingOptions) -> Iterator[Part]:
    """Yield a part of the measurement for every batch of samples.

    A part has the norms and bounds of every sample at every length (mode real). Its facts have the
    rows of the worst case of the heads (other modes), which needs the first sample only.
    """
    from lipaudit.wings.growth.lengths import cut_samples, require_lengths, worst_case

    worst_rows: list[Cells] = []
    worst_notes: Notes = ()
    for number, batch in enumerate(batches):
        # Texts of any length fit; other models may take one size only.
        if number == 0 and "real" in options.modes and net.kind != "text":
            require_lengths(net, batch, options.lengths)
        if batch.start == 0:  # the batch with the first sample of the run
            first = batch[:1]
            if first.mask is not None:  # without padding
                first, _ = cut_samples(net, first, int(first.mask.sum()))
            worst_rows, worst_notes = worst_case(net, first, options)
        part = Part(batch.ids, values={})
        if "real" in options.modes:
            part = _measure_lengths(net, batch, options)
        facts = {"rows": list(worst_rows), **part.facts}
        yield replace(part, facts=facts, notes=(*worst_notes, *part.notes))


def _measure_lengths(net: Net, batch: Batch, options: ScalingOptions) -> Part:
    """Measure a batch of samples, cut to each length, with the measures `bounds` and `jacobian`.

    The part has arrays (samples, lengths, columns) by name, NaN where a sample is too short. The
    columns of an array are heads or layers; the norm of the whole model has one column.

    Raises:
        InputError: no sample reaches the shortest length.
    """
    import numpy as np

    # The samples cut to each length, and where the norms of a cut belong in the arrays: a pair of
    # the indices of its samples, and the index of its length.
    cuts, places = _cut_to_lengths(net, batch, options.lengths)
    solver: dict[str, Any] = {"seed": options.seed, "tol": options.tol}
    # Lists of parts, one for each cut. The jacobian also estimates a radius for some rival
    # classes, at least 1: the fewest, because the radius is not read here.
    of_heads = list(bounds.measure(net, cuts, BoundsOptions(layers=options.layers, **solver)))
    of_model = list(jacobian.measure(net, cuts, JacobianOptions(rivals=1, **solver)))
    arrays: Arrays = {}
    for place, heads, model in zip(places, of_heads, of_model, strict=True):
        for name, values in _read_norms(heads, model):
            shape = (len(batch), len(options.lengths), values.shape[1])
            array = arrays.setdefault(name, np.full(shape, np.nan))  # made at the first cut
            array[place] = values
    # The largest proven relative error of a norm. Layers without a norm have NaN.
    errors = [
        base.join_parts(of_heads, "within"),
        base.join_parts(of_heads, "layer_within"),
        base.join_parts(of_model, "within"),
    ]
    facts = {
        **of_heads[0].facts,
        "model": f"{of_model[0].facts['from']} to {of_model[0].facts['to']}",
        "kind": net.kind,
        "within": max(float(np.nanmax(values, initial=0.0)) for values in errors),
    }
    missed = int(base.join_parts(of_heads, "missed").sum())  # norms that did not converge
    missed += int((~base.join_parts(of_model, "converged")).sum())
    return Part(batch.ids, arrays, facts, (*base.notes(of_heads), *base.note_missed(missed)))


def _read_norms(heads: Part, model: Part) -> Iterator[tuple[str, Values]]:
    """Yield the norms and bounds of one batch by name, (samples, columns).

    `heads` is its part of the measure `bounds`, and `model` its part of the measure `jacobian`.
    """
    for name in (*OF_HEADS, *list_bounds(), *OF_LAYERS):
        yield name, heads.values[name]
    yield "model", model.values["norm"][:, None]


def _cut_to_lengths(
    net: Net, batch: Batch, lengths: Sequence[int]
) -> tuple[list[Batch], list[tuple[Values, int]]]:
    """Return the samples cut to each length, and where each cut belongs in (samples, lengths).

    A cut to `lengths[i]` has only the samples that are long enough. Its place is the pair of their
    indices in the batch and i: `array[place]` are the entries of these samples at this length.

    Raises:
        InputError: no sample reaches the shortest length.
    """
    from lipaudit.wings.growth.lengths import cut_samples

    cuts = []
    places = []
    # The longest first: the measures look for attention layers in the first batch that they get.
    for i in reversed(range(len(lengths))):
        shortened, samples = cut_samples(net, batch, lengths[i])
        if len(shortened):
            cuts.append(shortened)
            places.append((samples.numpy(), i))
    if not cuts:
        raise InputError(
            f"the samples {', '.join(batch.ids)} have fewer than {lengths[0]} tokens",
            "Start --lengths lower, or give longer texts.",
        )
    return cuts, places


@dataclass(frozen=True)
class NormCurve:
    """The norm of a head, a layer or the model over the lengths.

    Attributes:
        cells: mode, layer, head and module, as cells of a row.
        n: numbers of tokens, (samples, lengths); NaN: the sample is too short.
        norm: norms, in the same shape.
        radius: R, in the same shape.
        bounds: bounds by name, in the same shape.
    """

    cells: Cells
    n: Values
    norm: Values
    radius: Values
    bounds: Arrays = field(default_factory=dict)


def summarise(parts: Sequence[Part], options: ScalingOptions) -> list[Section]:
    """Return the sections `scaling` (norms over the length) and `scaling.fit` (growth exponents).

    Args:
        parts: all that `measure` yields.
        options: options of the measure.
    """
    values = base.join_arrays(parts)
    # `within` is the largest proven relative error of the norms on data, by part.
    facts = {**parts[0].facts, "within": max(part.facts.get("within", 0.0) for part in parts)}
    rows: list[Row] = []
    fits: list[Row] = []
    repeats: Iterable[Note] = ()
    if values:  # on data
        values = base.select_unique(parts, values)
        repeats = base.note_repeats(parts)
        values, facts["shorter"] = _keep_longest(values)  # number of samples left out
        for curve in _make_curves(values, facts, options):
            curve_rows, fit_row = _fit_curve(curve)
            rows += curve_rows
            fits.append(fit_row)
    worst_rows = [SCALING_TABLE.row(**cells) for cells in facts["rows"]]
    fitted_rows, worst_fits, disagreeing = _fit_worst_cases(worst_rows)
    rows += fitted_rows
    fits += worst_fits
    notes = [
        *base.notes(parts),
        *repeats,
        *_note_data(rows, facts, options),
        *_note_searches(rows, disagreeing),
    ]
    scaling = SCALING_TABLE.section(settings=options.model_dump(), rows=tuple(rows), notes=notes)
    if not fits:
        return [scaling]
    return [scaling, FITS_TABLE.section(rows=tuple(fits))]


def _fit_worst_cases(worst_rows: Iterable[Row]) -> tuple[list[Row], list[Row], list[list[Row]]]:
    """Fit norm = c n^a to the worst cases: a fit for all lengths of a mode, head, mask and radius.

    `worst_rows` are the norms at worst-case tokens, a row for each length.

    Returns:
        These rows with the value of their fit; the rows of the fits; and the groups of rows of
        mode ascent whose searches differ too much for a fit.
    """
    rows: list[Row] = []
    fits: list[Row] = []
    disagreeing: list[list[Row]] = []
    groups = group_values((_identify_fit(row), row) for row in worst_rows)
    for group in groups.values():
        law, fit_row = _fit_group(group)
        rows += [_add_fit(row, law) for row in group]
        if fit_row.exponent is None:  # too few lengths for a fit
            continue
        if group[0].mode == "ascent":
            # Searches are at random: how far they differ is part of the error of the exponent, and
            # there is no exponent if they differ too much.
            widened = _widen_error(fit_row, group)
            if widened is None:
                disagreeing.append(group)
                continue
            fit_row = widened
        fits.append(fit_row)
    return rows, fits, disagreeing


def _fit_curve(curve: NormCurve) -> tuple[list[Row], Row]:
    """Fit the power law c n^a to norms on data, and to each of their bounds.

    Returns:
        A row of the section `scaling` for each length; the row of the section `scaling.fit`, which
        has the exponent of the norms and those of the bounds.
    """
    law, fit_row = _fit_law(curve.cells, curve.n, curve.norm)
    exponents = {}
    for name, bound in curve.bounds.items():
        _, bound_row = _fit_law({}, curve.n, bound)  # no cells: only its exponent is used
        exponents[f"{name}_exponent"] = bound_row.exponent
    return list(_make_rows(curve, law)), fit_row.replace(**exponents)


# Rows of worst cases that agree in these have one fit.
OF_FIT = ("mode", "layer", "head", "masked", "radius")


def _identify_fit(row: Row) -> tuple[Any, ...]:
    """Return the values that rows of one fit share: mode, layer, head, mask and radius.

    In mode radius the radius varies within a fit, so it is None.
    """
    values = [row[name] for name in OF_FIT]
    if row.mode == "radius":
        values[-1] = None  # the radius
    return tuple(values)


def _fit_group(group: Sequence[Row]) -> tuple[PowerLaw, Row]:
    """Fit norm = c n^a to those rows of a group for which theory expects a power law.

    All rows of the group share mode, layer, head, mask and radius (`_identify_fit`).

    Returns:
        The fit, and its row in the section `scaling.fit`.
    """
    import numpy as np

    fitted = [row for row in group if _expects_power_law(row)]
    lengths = np.array([row.n for row in fitted], dtype=np.float64)
    norms = np.array([row.norm for row in fitted], dtype=np.float64)
    # Cells of the row of the fit, by column.
    cells = dict(zip(OF_FIT, _identify_fit(group[0]), strict=True))
    return _fit_law(cells, lengths, norms)


def _keep_longest(values: Arrays) -> tuple[Arrays, int]:
    """Return the arrays of the samples that reach the largest measured length.

    So the growth is fitted through the same samples at every length. The number of samples left
    out is returned as well.
    """
    import numpy as np

    is_short: Any = np.isnan(values["tokens"]).all(2)  # (samples, lengths)
    longest = np.flatnonzero(~is_short.all(0))[-1]  # index of the last length with a sample
    is_long = ~is_short[:, longest]
    return {name: array[is_long] for name, array in values.items()}, int((~is_long).sum())


def _make_curves(values: Arrays, facts: Facts, options: ScalingOptions) -> Iterator[NormCurve]:
    """Yield the norms over the length on data: of each layer, the requested heads and the model.

    Args:
        values: arrays by name, (samples, lengths, heads or layers).
        facts: facts of the run, with the names of heads and layers in the order of the arrays.
        options: options of the measure.
    """
    import numpy as np

    names = facts["heads"]  # (layer, head, module) of each head
    layer_of_head = np.array([layer for layer, _, _ in names])
    # From here on (heads or layers, samples, lengths).
    values = {name: np.moveaxis(array, 2, 0) for name, array in values.items()}
    for i, (layer, module) in enumerate(facts["layers"]):
        heads = np.flatnonzero(layer_of_head == layer)
        cells = {"mode": "real", "layer": layer, "module": module}
        yield _make_layer_curve(cells, values, i, heads)
    requested = set(options.heads or ())
    for i, (layer, head, module) in enumerate(names):
        if requested & {"all", f"{layer}.{head}"}:
            yield NormCurve(
                {"mode": "real", "layer": layer, "head": head, "module": module},
                n=values["tokens"][i],
                norm=values["exact"][i],
                radius=values["radius"][i],
                bounds={name: values[name][i] for name in list_bounds()},
            )
    # The whole model: norms of its only column, and numbers of tokens from any measured head.
    model = values["model"][0]
    n = np.nanmax(values["tokens"], 0, initial=0)
    yield NormCurve(cells={"mode": "real"}, n=n, norm=model, radius=np.full_like(model, np.nan))


def _make_layer_curve(cells: Cells, values: Arrays, layer: int, heads: Values) -> NormCurve:
    """Return the norms of a layer over the length, after W_O if it has one.

    Otherwise they are the norms of its heads side by side.

    Args:
        cells: mode, layer and module, as cells of a row.
        values: arrays by name, (heads or layers, samples, lengths).
        layer: index of the layer in these arrays.
        heads: indices of its heads.
    """
    import numpy as np

    after_out = values["layer_exact_out"][layer]
    has_out = ~np.isnan(after_out)
    out_norm = np.where(has_out, values["out_norm"][layer], 1.0)
    # ||W_O|| (sum_h b_h^2)^1/2 bounds the norm of the layer, with the bounds b_h of its heads.
    bounds = {
        bound: out_norm * np.sqrt((values[bound][heads] ** 2).sum(0)) for bound in list_bounds()
    }
    return NormCurve(
        cells,
        n=values["tokens"][heads[0]],
        norm=np.where(has_out, after_out, values["layer_exact"][layer]),
        radius=values["radius"][heads[0]],
        bounds=bounds,
    )


def _make_rows(curve: NormCurve, law: PowerLaw) -> Iterator[Row]:
    """Yield a row of the section `scaling` for each length: medians over the samples.

    The radius alone is a mean, as its column says. At a length all samples have the same number of
    tokens n. Lengths that no sample reaches have no row.

    Args:
        curve: norms and bounds of a head, a layer or the model, by sample and length.
        law: the fit norm = c n^a, whose value is a cell of the row.
    """
    import numpy as np

    for i in range(curve.n.shape[1]):  # samples that are too short have NaN
        norms = curve.norm[:, i]
        norms = norms[~np.isnan(norms)]
        if not len(norms):
            continue
        medians = {
            f"bound_{name}": base.reduce_known(values[:, i], np.median)
            for name, values in curve.bounds.items()
        }
        row = SCALING_TABLE.row(
            **curve.cells,
            n=int(np.nanmax(curve.n[:, i])),
            radius=base.reduce_known(curve.radius[:, i], np.mean),
            norm=float(np.median(norms)),
            norm_low=float(norms.min()),
            norm_high=float(norms.max()),
            **medians,
        )
        yield _add_fit(row, law)


def _expects_power_law(row: Row) -> bool:
    """Return whether the norm of a row should follow a power law norm = c n^a in the length n.

    Norms at adversarial tokens grow like sqrt n only while n is well below n_max, at which they
    peak. Rows of other modes always count.
    """
    if row.mode != "adversarial":
        return True
    return row.n * WELL_UNDER <= (row.n_max or 0)


def _add_fit(row: Row, law: PowerLaw) -> Row:
    """Return a row with the value of the fit c n^a in its cell `fitted`.

    The cell stays empty without a fit, for searches, and where no power law is expected.
    """
    if math.isnan(law.exponent) or row.mode == "ascent" or not _expects_power_law(row):
        return row
    return row.replace(fitted=law.constant * row.n**law.exponent)


def _fit_law(description: Cells, n: Values, norm: Values) -> tuple[PowerLaw, Row]:
    """Fit norm = c n^a; return the fit, and its row in the section `scaling.fit`.

    Args:
        description: cells that say what was measured, such as layer, head and mode.
        n: numbers of tokens.
        norm: norms, in the same shape; NaN (the sample is too short: n is NaN, too), infinite
            norms and norms of 0 are left out.
    """
    import numpy as np
    import torch

    from lipaudit.wings.growth.worst_tokens import power_law

    known = np.isfinite(norm) & (norm > 0)  # the fit is one of logarithms
    law = power_law(torch.from_numpy(n[known]), torch.from_numpy(norm[known]))
    cells = {key: value for key, value in description.items() if key != "module"}
    for key in ("exponent", "exponent_se", "r2"):
        value = getattr(law, key)
        if not math.isnan(value):
            cells[key] = value
    return law, FITS_TABLE.row(**cells)


def _widen_error(fit: Row, rows: Sequence[Row]) -> Row | None:
    """Return a fit whose standard error also covers how far the searches of each length differ.

    None if the searches for some length disagree by more than the factor AGREED.

    Args:
        fit: the row of the fit.
        rows: the rows of mode ascent that were fitted, one per length.
    """
    import numpy as np

    # How many times larger than the best search the norm may be, by its range. A missing norm is
    # NaN, and counts as disagreement.
    errors = np.array([(row.norm_high or math.nan) / (row.norm or math.nan) for row in rows])
    if not (errors <= AGREED).all():
        return None
    if fit.exponent_se is None:
        return fit
    # The exponent is sum_i w_i log norm_i: the slope of a least-squares line.
    logs = np.log([row.n for row in rows])
    centred = logs - logs.mean()
    weights = centred / (centred**2).sum()
    largest = float(np.abs(weights) @ np.log(errors))  # if every search errs the worst way
    return fit.replace(exponent_se=math.hypot(fit.exponent_se, largest))


def _note_data(rows: Sequence[Row], facts: Facts, options: ScalingOptions) -> Iterator[Note]:
    """Yield notes on the norms on data: what was measured, how exactly, and what was left out.

    Args:
        rows: all rows of the section `scaling`.
        facts: facts of the run.
        options: options of the measure.
    """
    lengths = {row.n for row in rows if row.mode == "real"}
    if not lengths:
        return
    text = f"layers are measured after W_O where they have one, the model from {facts['model']}"
    if facts["kind"] == "text":
        text += (
            "; the windows of a text start at the same places for every n, so standard errors "
            "may be too small"
        )
    yield Note.info("what-is-measured", text)
    yield from base.note_lower_estimates(facts["within"])
    yield from _note_left_out(lengths, facts, options)


def _note_left_out(lengths: set[int], facts: Facts, options: ScalingOptions) -> Iterator[Note]:
    """Warn of texts and of lengths of --lengths that were left out.

    Args:
        lengths: the measured numbers of tokens.
        facts: facts of the run; `shorter` is the number of texts that were left out.
        options: options of the measure.
    """
    shorter = facts["shorter"]
    if shorter:
        text = (
            f"{shorter} texts have fewer than {max(lengths)} tokens and were left out: every "
            "length is measured on the same texts. End --lengths lower to keep them"
        )
        yield Note.warn("shorter-windows", text)
    if len(lengths) < len(options.lengths):
        reason = "samples are shorter"
        if facts["kind"] == "image":
            reason = "several lengths give the same number of patches"
        text = f"{len(lengths)} of {len(options.lengths)} lengths were measured: {reason}"
        yield Note.warn("fewer-lengths", text)


def _note_searches(rows: Sequence[Row], disagreeing: Sequence[Sequence[Row]]) -> Iterator[Note]:
    """Yield notes on what searches mean, and on those that disagree.

    Args:
        rows: all rows of the section `scaling`.
        disagreeing: groups of rows whose searches differ too much for a fit.
    """
    from lipaudit.wings.growth.searches import SEARCHES

    if any(row.mode == "ascent" for row in rows):
        text = (
            f"norms of mode ascent are the largest of {SEARCHES} independent searches: exact at "
            "the tokens found, but larger norms may exist. low and high show how far repeated "
            "searches differ"
        )
        yield Note.info("searched", text)
    if disagreeing:
        heads = [
            f"head {first.layer}.{first.head} at R = {first.radius:.3g}"
            for first, *_ in disagreeing
        ]
        text = (
            f"no exponent for the ascent of {', '.join(heads)}: independent searches differ by "
            f"more than {100 * (AGREED - 1):.2g}%"
        )
        yield Note.warn("searches-apart", text)


SCALING = Measure(
    "scaling", (SCALING_TABLE, FITS_TABLE), ScalingOptions, measure, summarise, batch=4, place=48
)
