"""Attention layers for the measures: read one by one, and checked: no bound is below a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.data.batch import Batch, find_first
from lipaudit.errors import EvaluationError, StructureError, UsageError, few
from lipaudit.measures.base import Part, Values
from lipaudit.models.attention.capture import Layer, Site, capture, list_blocks_without_attention
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.net import Net
from lipaudit.models.sources.weight_files import HALF
from lipaudit.tables import Note
from lipaudit.tables.columns import group_values
from lipaudit.tables.trials import Radius
from lipaudit.theory.bounds.record import Bound, load_bounds
from lipaudit.theory.bounds.sharp import SHARP
from lipaudit.theory.head_norms import ball_error, bound_error
from lipaudit.theory.heads import Heads

Facts = dict[str, Any]
# Values of one layer: axis 0 is the sample, axis 1 the head.
Reduced = dict[str, Tensor]


def choose_layers(sites: Sequence[Site], layers: Sequence[int] | None) -> tuple[Site, ...]:
    """Return the layers that the options name, by default all.

    Raises:
        UsageError: a layer does not exist.
    """
    surplus = [layer for layer in layers or () if layer >= len(sites)]
    if surplus:
        text = f"there is no attention layer {surplus[0]}: the model has {len(sites)}"
        raise UsageError(text, f"Give layers from 0 to {len(sites) - 1}.")
    return tuple(site for site in sites if layers is None or site.index in layers)


def by_layer(
    net: Net,
    batches: Iterable[Batch],
    reduce: Callable[[Layer], Reduced],
    *,
    layers: Sequence[int] | None,
    projections: bool = True,
    describe: Callable[[Sequence[Site]], Facts] = lambda _sites: {},
) -> Iterator[Part]:
    """Yield a Part per batch: every layer reduced, joined along the heads; see `capture`.

    If a layer differs from its survey on a sample, that sample is reduced without the closed form,
    and a note says so. The other samples of the batch keep the closed form.

    Args:
        net: the model.
        batches: the samples.
        reduce: function of a layer, while the model is in the middle of its forward pass.
        layers: indices of the layers to read; None for all.
        projections: whether `reduce` calls `Layer.heads`.
        describe: facts of the layers that do not depend on the sample, besides `heads`: the layer,
            number and module of each head.
    """
    sites: tuple[Site, ...] = ()
    for batch in batches:
        if not sites:
            sites = find_layers(net, find_first(batches, batch))
            selected = choose_layers(sites, layers)
            remarks = tuple(_note_layers(net, sites, selected))
        names = [(s.index, head, s.module) for s in selected for head in range(s.heads)]
        pieces = list[Reduced]()
        changes = list[Note]()
        queue = [(batch, sites)]
        while queue:
            piece, known = queue.pop(0)
            try:
                each = capture(net, known, piece, reduce, layers=layers, projections=projections)
            except StructureError as error:
                if len(piece) > 1:  # find the samples on which the layer changes
                    queue[:0] = [(one, known) for one in piece.split(1)]
                    continue
                text = (
                    f"layer {error.layer} ({error.module}): {error.reason} on some samples. It "
                    "has no closed form there, so it gets no bounds on any sample"
                )
                changes.append(Note.warn("structure-changed", text))
                # Again, without the closed form of this layer; another layer may change, too.
                open_form = replace(known[error.layer], structure=None, reason=error.reason)
                known = (*known[: error.layer], open_form, *known[error.layer + 1 :])
                queue.insert(0, (piece, known))
                continue
            pieces.append(_join_heads(each))
        joined = {}
        for name in pieces[0]:
            joined[name] = _join_samples([p[name] for p in pieces])
        # numpy has no bfloat16, and a sum of halves would be a number of 3 digits.
        values = {}
        for n, v in joined.items():
            values[n] = (v.float() if v.dtype in HALF else v).numpy()
        facts = {"heads": names} | describe(selected)
        yield Part(batch.ids, values, facts, remarks + tuple(changes))


def _join_heads(layers: Sequence[Reduced]) -> Reduced:
    """Join the arrays of layers along the heads; those with one name belong together."""
    by_name: dict[str, list[Tensor]] = {}
    for layer in layers:
        for name, values in layer.items():
            by_name.setdefault(name, []).append(values.cpu())
    return {name: torch.cat(each, 1) for name, each in by_name.items()}


def _join_samples(pieces: Sequence[Tensor]) -> Tensor:
    """Join arrays along the samples; shorter ones (of shorter texts) are padded with NaN."""
    longest = torch.tensor([piece.shape[1:] for piece in pieces]).amax(0).tolist()
    joined = []
    for piece in pieces:
        padding = []
        for size, length in zip(piece.shape[:0:-1], reversed(longest), strict=True):
            padding += [0, length - size]
        joined.append(F.pad(piece, padding, value=torch.nan) if any(padding) else piece)
    return torch.cat(joined)


def _note_layers(net: Net, sites: tuple[Site, ...], selected: Sequence[Site]) -> Iterator[Note]:
    """Note what a reader must know of the selected layers, and which attention is left out."""
    reasons = group_values((site.reason, site) for site in selected if site.reason is not None)
    inputs: dict[tuple[bool, str], list[Site]] = {}
    for site in selected:
        measured = site.closed_form or site.inputs
        within = ""
        if site.module:
            within = f"{site.module}."
        inside = all(f"{name}.".startswith(within) for name in site.reads)
        # X is named if it is not the first input of the attention module.
        if measured and not (inside and (not site.inner or not site.closed_form)):
            what = few([name or "the model" for name in site.reads])
            inputs.setdefault((inside, what), []).append(site)

    def name_module(site: Site) -> str:
        return site.module or "the model itself"

    def name_layers(alike: Sequence[Site]) -> str:
        plural = "s" * (len(alike) > 1)
        return f"layer{plural} {', '.join(str(s.index) for s in alike)} ({name_module(alike[0])})"

    for reason, alike in reasons.items():
        yield Note.warn("no-closed-form", f"no closed form for {name_layers(alike)}: {reason}")
    for (inside, what), alike in inputs.items():
        text = (
            f"{name_layers(alike)}: X is the input of {what}, {'in' if inside else 'out'}side the "
            "module that computes the attention"
        )
        if inside:
            text += ". Other maps or normalisations come between them"
        note = Note.info if inside else Note.warn
        yield note("input-elsewhere", text)
    for partners, site in {site.partners: site for site in selected if site.partners}.items():
        where = f"{name_module(site)}, {site.line}"
        text = (
            f"layers {few([str(index) for index in partners])} ({where}) are separate calls on "
            "the same input. They may be parts of one attention; each table row is one call"
        )
        yield Note.warn("in-parts", text)
    yield from note_unread(net, sites)
    blocks = list_blocks_without_attention(net.module, sites) if net.kind == "text" else ()
    if blocks:
        kinds = [f"{path}: {type(net.module.get_submodule(path)).__name__}" for path in blocks]
        text = (
            f"no softmax over q k^T was seen in these blocks, so they have no heads "
            f"({few(kinds)}). `lipaudit jacobian` covers them, whatever they compute"
        )
        yield Note.info("no-attention", text)


def note_unread(net: Net, sites: tuple[Site, ...]) -> tuple[Note, ...]:
    """Note which modules have attention that no layer covers; layer numbers skip them."""
    modules = next((known.unread for known in net.surveys if known.sites is sites), ())
    if not modules:
        return ()
    text = (
        f"not recognised as attention, and not measured ({few(modules)}): values are multiplied "
        "by a product of activations. Attention does so whose weights are no plain softmax over "
        "keys, or are used twice, detached, or computed per sample. State spaces (Mamba-2) and "
        "linear attention do, too. Layer numbers skip it"
    )
    return (Note.warn("attention-unread", text),)


def sum_windows(values: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Add up the batch rows (windows) of each sample."""
    return values.new_zeros(samples, *values.shape[1:]).index_add_(0, sample, values)


def per_sample(values: Tensor, sample: Tensor) -> Tensor:
    """Return the largest value over the batch rows (windows) of each sample, in order.

    The Jacobian of a windowed layer is block diagonal, so its norm is the largest norm of a block.

    >>> per_sample(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0, 0, 1]))
    tensor([5., 2.])
    """
    windows = sample.cpu().bincount().tolist()
    return torch.stack([rows.amax(0) for rows in torch.split(values, windows)])


def require_bounds_hold(
    site: Site,
    ids: Sequence[str],
    values: Mapping[str, Tensor],
    heads: Heads,
    balls: Mapping[str, Tensor],
    radii: Sequence[Radius],
) -> None:
    """Stop the run if a bound of a head, a layer or a ball is below the exact norm.

    This checks plug-in bounds, too. A difference that rounding explains passes;
    `below_by_rounding` finds it again in the figures.

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
    exact = values["exact"]

    @cache
    def slack(r: float = 0.0) -> Tensor:
        """Return what rounding may do to a bound of each head, in the ball of radius r."""
        double = heads.to(torch.float64)
        error = bound_error(double, exact[heads.sample.cpu()])
        if r:
            error = error + ball_error(double, r)
        return per_sample(error.cpu(), heads.sample)

    def layer_slack() -> Tensor:
        """W_O is linear: an error of a head grows by ||W_O||, and its product has one more."""
        out = heads.out
        assert out is not None
        eps = torch.finfo(torch.float64).eps
        share = 2 * (out.shape[2] + 16) * out.shape[0] * out.shape[1] * eps
        errors = slack().square().sum(1, keepdim=True).sqrt()
        return values["out_norm"] * errors + share * values["layer_sharp_rss"]

    of_layer = values["layer_sharp_rss"], values["layer_exact_out"]
    known = load_bounds()
    claims: list[tuple[str, Tensor, Tensor, Callable[[], Tensor], Bound]] = [
        *((name, values[name], exact, slack, record) for name, record in known.items()),
        ("sharp_rss", *of_layer, layer_slack, SHARP),
    ]
    for name, constants in balls.items():
        for k, radius in enumerate(radii):
            pair = constants[..., k], balls["ball_norm"][..., k]
            at_r = partial(slack, float(radius))
            claims.append((f"{name} at r = {radius.text}", *pair, at_r, SHARP))
    for name, bound, norm, excuse, record in claims:
        if not (bound < norm).any():  # nearly always; rounding is estimated only otherwise
            continue
        below = (bound < norm - excuse().nan_to_num(0.0)).nonzero()
        if not len(below):
            continue
        sample, head = below[0].tolist()
        of_head = bound.shape[1] == site.heads
        if of_head:
            where = f"head {site.index}.{head}"
        else:
            where = f"layer {site.index}"
        raise EvaluationError(
            f"{name} of {where} ({site.module}) is {float(bound[sample, head]):.9g} on sample "
            f"{ids[sample]}, below the exact norm {float(norm[sample, head]):.9g}. One of them "
            "is wrong: do not rely on any number of this run",
            record.remedy,
        )


def below_by_rounding(
    places: Sequence[str],
    ids: Sequence[str],
    exact: Values,
    bounds: Mapping[str, Values],
    norm: str = "exact norm",
) -> tuple[Note, ...]:
    """Name the bound furthest below its norm, in a run that passed the guard.

    Args:
        places: heads, layers, or heads at radii.
        ids: ids of the samples.
        exact: the norms, (samples, places).
        bounds: arrays (samples, places), by the name of the bound.
        norm: the name of the norm in the message.
    """
    with np.errstate(invalid="ignore"):  # NaN is never below
        below = {name: np.where(b < exact, 1 - b / exact, 0) for name, b in bounds.items()}
    count = sum(int((shares > 0).sum()) for shares in below.values())
    if not count:
        return ()
    name = max(below, key=lambda each: float(below[each].max()))
    sample, index = (int(i) for i in np.unravel_index(below[name].argmax(), exact.shape))
    where = sample, index
    text = (
        f"{count} bounds are below the {norm} by no more than rounding can explain. At most "
        f"by {below[name][where]:.1g} of it: {name} of {places[index]} is "
        f"{bounds[name][where]:.12g} on sample {ids[sample]}, the {norm} {exact[where]:.12g}"
    )
    return (Note.info("within-rounding", text),)
