"""Attention layers for the measures: read one by one, and checked: no bound is below a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.data.batch import Batch, get_first_of_run
from lipaudit.errors import EvaluationError, StructureError, UsageError, join_few
from lipaudit.measures.base import Arrays, Facts, Part, Values
from lipaudit.models.attention.capture import Layer, Site, capture, list_blocks_without_attention
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.net import Net
from lipaudit.models.precision import HALF
from lipaudit.tables import Note, Notes
from lipaudit.tables.columns import group_values
from lipaudit.tables.trials import Radius
from lipaudit.theory.bounds.record import Bound, load_bounds
from lipaudit.theory.bounds.sharp import SHARP
from lipaudit.theory.head_norms import ball_error, bound_error
from lipaudit.theory.heads import Heads

# Values of one layer: axis 0 is the sample, axis 1 the head.
Reduced = dict[str, Tensor]


def choose_layers(sites: Sequence[Site], layers: Sequence[int] | None) -> tuple[Site, ...]:
    """Return the layers that the options name, by default all.

    Raises:
        UsageError: a layer does not exist.
    """
    if layers is None:
        return tuple(sites)
    for layer in layers:
        if layer >= len(sites):
            raise UsageError(
                f"there is no attention layer {layer}: the model has {len(sites)}",
                f"Give layers from 0 to {len(sites) - 1}.",
            )
    return tuple(site for site in sites if site.index in layers)


def by_layer(
    net: Net,
    batches: Iterable[Batch],
    reduce: Callable[[Layer], Reduced],
    *,
    layers: Sequence[int] | None,
    projections: bool = True,
    describe: Callable[[Sequence[Site]], Facts] = lambda _sites: {},
) -> Iterator[Part]:
    """Yield a Part per batch: the figures of every layer, concatenated along the heads.

    The survey, a run on the first sample, finds the layers and which of them have a closed form.
    If a layer differs from the survey on a later sample, `reduce` gets this sample without the
    closed form, and a note says so. All other samples of the batch keep the closed form.

    Args:
        net: the model.
        batches: the samples.
        reduce: returns the figures of a layer. It is called while the model is in the middle of
            its forward pass (see `capture`), so that the tensors of one layer are in memory.
        layers: indices of the layers to read; None for all.
        projections: whether `reduce` calls `Layer.heads`.
        describe: facts of the layers that do not depend on the sample, besides `heads`: the layer,
            number and module of each head.
    """
    sites: Sequence[Site] = ()
    read = partial(capture, net, reduce=reduce, layers=layers, projections=projections)
    for batch in batches:
        if not sites:
            # In a run of several processes, `batch` may not be the first one of the run: all
            # processes have to find the layers on the same sample.
            sites = find_layers(net, get_first_of_run(batches, batch))
            selected = choose_layers(sites, layers)
            notes = tuple(_note_layers(net, sites, selected))
        # One piece: the whole batch. If a layer differs between samples: a piece per sample.
        pieces, changes = _read_pieces(read, sites, batch)
        values = {}
        for name in pieces[0]:
            joined = _join_samples([piece[name] for piece in pieces])
            # numpy has no bfloat16, and sums over samples in 16 bits would have 3 digits.
            if joined.dtype in HALF:
                joined = joined.float()
            values[name] = joined.numpy()
        facts = {"heads": list_heads(selected)} | describe(selected)
        yield Part(batch.ids, values, facts, notes + changes)


def list_heads(sites: Sequence[Site]) -> list[tuple[int, int, str]]:
    """Return layer, number and module of every head of some layers."""
    return [(site.index, head, site.module) for site in sites for head in range(site.heads)]


def _read_pieces(
    read: Callable[..., Sequence[Reduced]], sites: Sequence[Site], batch: Batch
) -> tuple[list[Reduced], Notes]:
    """Return the figures of a batch, in one piece or in one piece per sample, and notes.

    A survey of the first sample of the run found the structure of every layer, and whether its
    Jacobian has a closed form. On other samples the structure may differ, and `read` then raises
    `StructureError`. In three steps:

    * the whole batch is read as one piece;
    * if a layer differs, the batch is split, and every sample is read as a piece of its own;
    * if a layer differs on a single sample, the sample is read again, this layer without its
      closed form, and a note says so.

    The figures of all layers of a piece are concatenated along the heads.

    Args:
        read: (layers, samples) -> the figures of each layer.
        sites: the layers, as surveyed.
        batch: the samples.
    """
    pieces = []
    notes: list[Note] = []
    # What is still to be read, in order: samples, and the layers with the structure that they are
    # assumed to have on these samples.
    queue = [(batch, sites)]
    while queue:
        samples, known = queue.pop(0)
        try:
            of_layers = read(known, samples)
        except StructureError as error:
            if len(samples) > 1:  # the layer may differ on some of the samples only
                queue[:0] = [(sample, known) for sample in samples.split(1)]
                continue
            text = (
                f"layer {error.layer} ({error.module}): {error.reason} on some samples. It "
                "has no closed form there, so it gets no bounds on any sample"
            )
            notes.append(Note.warn("structure-changed", text))
            # Read the sample again, without the closed form of this layer. If another layer
            # differs as well, the next error removes its closed form, too.
            numerical = replace(known[error.layer], structure=None, reason=error.reason)
            known = (*known[: error.layer], numerical, *known[error.layer + 1 :])
            queue.insert(0, (samples, known))
            continue
        pieces.append(_join_heads(of_layers))
    return pieces, tuple(notes)


def _join_heads(layers: Sequence[Reduced]) -> Reduced:
    """Concatenate the arrays of one name of all layers along axis 1, the heads."""
    arrays = group_values((name, array.cpu()) for layer in layers for name, array in layer.items())
    return {name: torch.cat(of_layers, 1) for name, of_layers in arrays.items()}


def _join_samples(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate arrays along the samples; arrays of shorter texts are padded with NaN."""
    shapes = torch.tensor([piece.shape[1:] for piece in pieces])  # without the samples
    missing = shapes.amax(0) - shapes  # entries to add on each axis, (pieces, axes)
    padded = []
    for piece, lengths in zip(pieces, missing.tolist(), strict=True):
        if any(lengths):
            # `F.pad` takes two numbers for each axis, before and behind, the last axis first.
            padding = [n for length in reversed(lengths) for n in (0, length)]
            piece = F.pad(piece, padding, value=torch.nan)
        padded.append(piece)
    return torch.cat(padded)


def _note_layers(net: Net, sites: Sequence[Site], selected: Sequence[Site]) -> Iterator[Note]:
    """Note what a reader must know of the selected layers, and which attention is left out.

    Args:
        net: the model.
        sites: all attention layers.
        selected: the measured ones.
    """
    reasons = group_values((site.reason, site) for site in selected if site.reason is not None)
    for reason, layers in reasons.items():
        yield Note.warn("no-closed-form", f"no closed form for {_name_layers(layers)}: {reason}")
    yield from _note_inputs(selected)
    # One note for each group of layers that share their linear maps of q and k (`partners`).
    calls = {site.partners: site for site in selected if site.partners}
    for partners, site in calls.items():
        yield Note.warn(
            "in-parts",
            f"layers {join_few(partners)} ({_name_module(site)}, "
            f"{site.line}) are separate calls on the same input. They may be parts of one "
            "attention; each table row is one call",
        )
    yield from note_unread(net, sites)
    blocks = list_blocks_without_attention(net.module, sites) if net.kind == "text" else ()
    if blocks:
        kinds = [f"{path}: {type(net.module.get_submodule(path)).__name__}" for path in blocks]
        yield Note.info(
            "no-attention",
            f"no softmax over q k^T was seen in these blocks, so they have no heads "
            f"({join_few(kinds)}). `lipaudit jacobian` covers them, whatever they compute",
        )


def _note_inputs(sites: Sequence[Site]) -> Iterator[Note]:
    """Note layers whose norms refer to another input X than the input of the attention module.

    X may be inside the module, behind another map or a normalisation, or outside of the module.
    """
    # Pairs (key, layer): layers with the same key share a note. The key is whether all modules
    # that read X are inside the attention module, and the names of these modules.
    readings = []
    for site in sites:
        prefix = f"{site.module}." if site.module else ""
        are_inside = all(f"{name}.".startswith(prefix) for name in site.reads)
        has_norms = site.closed_form or site.inputs
        # A closed form differentiates from X, the input of the linear maps of q, k and v. `inner`:
        # further maps inside the module, which the input of the module passes before X. Without a
        # closed form, the module itself is differentiated, so X is its input.
        is_module_input = are_inside and not (site.inner and site.closed_form)
        if has_norms and not is_module_input:
            readers = join_few([name or "the model" for name in site.reads])
            readings.append(((are_inside, readers), site))
    for (are_inside, readers), group in group_values(readings).items():
        text = f"{_name_layers(group)}: X is the input of {readers}, "
        if are_inside:
            text += (
                "inside the module that computes the attention. Other maps or normalisations "
                "come between them"
            )
            yield Note.info("input-elsewhere", text)
        else:
            text += "outside the module that computes the attention"
            yield Note.warn("input-elsewhere", text)


def _name_module(site: Site) -> str:
    """Return the name of the module of a layer."""
    return site.module or "the model itself"


def _name_layers(sites: Sequence[Site]) -> str:
    """Return layers as text: their numbers, and the module of the first one."""
    plural = "s" * (len(sites) > 1)
    numbers = ", ".join(str(site.index) for site in sites)
    return f"layer{plural} {numbers} ({_name_module(sites[0])})"


def note_unread(net: Net, sites: Sequence[Site]) -> Iterator[Note]:
    """Note which modules have attention that no layer covers; layer numbers skip them."""
    # A survey is the search for the attention layers of a model. A model may have several surveys.
    # Take the one that returned this very tuple of layers (`sites`): it also lists such modules.
    modules = next((survey.unread for survey in net.surveys if survey.sites is sites), ())
    if modules:
        yield Note.warn(
            "attention-unread",
            f"not recognised as attention, and not measured ({join_few(modules)}): values are "
            "multiplied by a product of activations. Attention does so whose weights are no plain "
            "softmax over keys, or are used twice, detached, or computed per sample. State spaces "
            "(Mamba-2) and linear attention do, too. Layer numbers skip it",
        )


def sum_windows(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Add up the values of the windows of each sample.

    Args:
        values: (windows of all samples, ...); a layer without windows has one per sample.
        sample: index of the sample of each window.
        samples: number of samples.
    """
    return values.new_zeros(samples, *values.shape[1:]).index_add_(0, sample, values)


def max_windows(values: Tensor, sample: Tensor) -> Tensor:
    """Return the largest value over the windows of each sample, (samples, ...).

    A layer that attends within windows has a row of the batch per window. Its Jacobian is block
    diagonal, so its norm is the largest norm of a block. `sample` is the sample of each window, in
    ascending order.

    >>> max_windows(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0, 0, 1]))
    tensor([5., 2.])
    """
    windows = sample.cpu().bincount()
    if len(windows) == len(values):  # one window per sample
        return values
    return torch.stack([rows.amax(0) for rows in torch.split(values, windows.tolist())])


class Claim(NamedTuple):
    """The claim that a bound is nowhere below a norm.

    Attributes:
        name: the name of the bound.
        bound: its values, (samples, heads) or (samples, 1).
        norm: the norms, in the same shape.
        rounding: returns by how much rounding may lower the bound.
        record: the bound, with what to do if it is wrong.
    """

    name: str
    bound: Tensor
    norm: Tensor
    rounding: Callable[[], Tensor]
    record: Bound


def require_bounds_hold(
    site: Site,
    ids: Sequence[str],
    values: Reduced,
    heads: Heads,
    balls: Reduced,
    radii: Sequence[Radius],
) -> None:
    """Stop the run if a bound of a head, a layer or a ball is below the exact norm.

    Such a bound, or the norm, is wrong. This checks plug-in bounds, too. A difference that
    rounding explains passes; `note_rounding` notes it in the report.

    Args:
        site: the layer.
        ids: ids of the samples.
        values: `exact` and all bounds, (samples, heads); `layer_exact_out`, `layer_sharp_rss` and
            `out_norm`, (samples, 1). NaN means not computed.
        heads: the heads behind the values.
        balls: the norms `ball_norm` found in balls, and all bounds of them, (samples, heads,
            radii).
        radii: radii of the balls.

    Raises:
        EvaluationError: a bound is below a norm; the message names bound, head and sample.
    """
    for name, bound, norm, compute_rounding, record in _list_claims(values, heads, balls, radii):
        # The errors of rounding are computed only if a bound is below its norm, which is rare.
        if not (bound < norm).any():
            continue
        below = (bound < norm - compute_rounding().nan_to_num(0.0)).nonzero()
        if not len(below):
            continue
        sample, head = below[0].tolist()  # the first one
        where = f"layer {site.index}"
        if bound.shape[1] == site.heads:  # a column per head: it is no bound of the layer
            where = f"head {site.index}.{head}"
        raise EvaluationError(
            f"{name} of {where} ({site.module}) is {float(bound[sample, head]):.9g} on sample "
            f"{ids[sample]}, below the exact norm {float(norm[sample, head]):.9g}. One of them "
            "is wrong: do not rely on any number of this run",
            record.remedy,
        )


def _list_claims(
    values: Reduced,
    heads: Heads,
    balls: Reduced,
    radii: Sequence[Radius],
) -> Iterator[Claim]:
    """Yield every claim "a norm is at most its bound" of a layer, to be checked.

    The claims are on its heads, on the layer as a whole, and on its heads in balls around X. Each
    claim has a function that returns by how much rounding may lower the bound.

    Args:
        values: `exact` and the bounds at X, as in `require_bounds_hold`.
        heads: the heads behind the values.
        balls: by name, the bounds in balls, and the largest norm that a search found there,
            `ball_norm`: (samples, heads, radii).
        radii: radii of the balls.
    """
    exact = values["exact"]  # norms of heads at X, (samples, heads)
    # Cached, because all bounds of heads at one radius share it.
    compute_rounding = cache(partial(_bound_head_rounding, heads, exact))
    # Bounds of heads at X.
    for name, record in load_bounds().items():
        bound = values[name]
        yield Claim(name, bound, norm=exact, rounding=compute_rounding, record=record)
    # The bounds of the layer and of balls follow from the bound `sharp` of heads: its record says
    # what to do if one of them is wrong. rss: ||W_O|| times the root of the sum of squares.
    yield Claim(
        "sharp_rss",
        bound=values["layer_sharp_rss"],
        norm=values["layer_exact_out"],
        rounding=lambda: _bound_layer_rounding(values, heads, compute_rounding()),
        record=SHARP,
    )
    # Bounds of heads in balls. `ball_norm` comes as a bound, too, which is never below itself.
    for name, bounds in balls.items():
        for i, radius in enumerate(radii):
            yield Claim(
                f"{name} at r = {radius.text}",
                bound=bounds[..., i],
                norm=balls["ball_norm"][..., i],
                rounding=partial(compute_rounding, float(radius)),
                record=SHARP,
            )


def _bound_head_rounding(heads: Heads, exact: Tensor, radius: float = 0.0) -> Tensor:
    """Return by how much rounding may lower a bound of each head, (samples, heads).

    Args:
        heads: the heads; a sample may have several rows, one per window (Swin).
        exact: the norms of the heads, (samples, heads).
        radius: radius of the ball around X in which the bound holds; 0: it holds at X.
    """
    double = heads.to(torch.float64)
    # `heads.sample` is the sample of each window.
    error = bound_error(double, exact[heads.sample.cpu()])
    if radius:
        error = error + ball_error(double, radius)
    return max_windows(error.cpu(), heads.sample)


def _bound_layer_rounding(values: Reduced, heads: Heads, errors: Tensor) -> Tensor:
    """Return by how much rounding may lower the bound of a layer, (samples, 1).

    The bound is ||W_O|| sqrt(sum_h b_h^2), where b_h is the bound of head h. Let e_h be the
    rounding of b_h. Then the rounding is ||W_O|| sqrt(sum_h e_h^2), plus the rounding of the
    products with W_O.

    Args:
        values: ||W_O|| (`out_norm`) and the bound (`layer_sharp_rss`), (samples, 1).
        heads: the heads, with W_O.
        errors: the rounding e_h of the bound of each head, (samples, heads).
    """
    assert heads.out is not None
    count, d_v, d_out = heads.out.shape  # W_O of each of the H heads
    eps = torch.finfo(torch.float64).eps
    # Errors relative to the bound, in units of H d_v d_out eps / 2. `relative` is
    # 4 (1 + 16 / d_out) units. At most 2.5 of them are needed for
    # * 1/2 by ||W_O||, the root of the largest eigenvalue of the smaller Gram matrix of W_O.
    #   Each entry is a sum of max(H d_v, d_out) products. So the Gram matrix is off by
    #   max(H d_v, d_out) eps / 2 ||W_O||_F^2, with ||W_O||_F^2 <= min(H d_v, d_out) ||W_O||^2;
    # * 1 by products with W_O in the norm, and 1 by those with W_O^T: sums of H d_v or d_out
    #   terms with errors of at most (H d_v or d_out) eps / 2 ||W_O||_F.
    # The rest, at least 1.5 units, covers the solver of the eigenvalue. If d_out is small, the 16
    # added to d_out covers single operations and the sum over the heads, too.
    relative = 2 * (d_out + 16) * count * d_v * eps
    error = errors.square().sum(1, keepdim=True).sqrt()
    return values["out_norm"] * error + relative * values["layer_sharp_rss"]


def note_rounding(
    places: Sequence[str],
    ids: Sequence[str],
    exact: Values,
    bounds: Arrays,
    norm: str = "exact norm",
) -> Iterator[Note]:
    """Note how many bounds are slightly below their norm, and the bound that is furthest below.

    The run passed `require_bounds_hold`, so rounding errors explain all these differences.

    Args:
        places: names of what the columns belong to: heads, layers, or heads at radii.
        ids: ids of the samples.
        exact: the norms, (samples, places).
        bounds: arrays (samples, places), by the name of the bound.
        norm: the name of the norm in the message.
    """
    with np.errstate(invalid="ignore"):  # NaN is never below
        # How far each bound is below the norm, as a share of the norm; 0 for bounds above it.
        gaps = {name: np.where(b < exact, 1 - b / exact, 0) for name, b in bounds.items()}
    count = sum(int((gap > 0).sum()) for gap in gaps.values())
    if not count:
        return
    # The bound with the largest gap, and the sample and place of this gap.
    name = max(gaps, key=lambda name: float(gaps[name].max()))
    sample, place = np.unravel_index(gaps[name].argmax(), exact.shape)
    yield Note.info(
        "within-rounding",
        f"{count} bounds are below the {norm} by no more than rounding can explain. At most "
        f"by {gaps[name][sample, place]:.1g} of it: {name} of {places[int(place)]} is "
        f"{bounds[name][sample, place]:.12g} on sample {ids[int(sample)]}, the {norm} "
        f"{exact[sample, place]:.12g}",
    )
