"""Parts of the measure `scaling`: lengths of samples, power laws, the worst case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, StructureError, UsageError, of_machine
from lipaudit.measures.by_layer import choose_layers
from lipaudit.measures.measure import Values, number_or_none
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.net import Net
from lipaudit.settings import FITS_TABLE
from lipaudit.tables import Note, Row
from lipaudit.theory.bounds.ingredients import are_affine
from lipaudit.theory.exact.head_norms import head_norms
from lipaudit.theory.growth.ascent import Steepest, steepest_tokens
from lipaudit.theory.growth.worst_tokens import (
    Adversary,
    PowerLaw,
    adversary,
    duplicated_norm,
    mean_field_norm,
    move_heads,
    power_law,
)
from lipaudit.theory.heads import Heads

if TYPE_CHECKING:
    from lipaudit.settings.scaling import ScalingOptions

WELL_UNDER = 10
"""The sqrt n law is fitted for n up to n_max divided by this."""

AGREED = 1.02
"""If repeated searches differ by more than this factor, no exponent is fitted."""


def groups(rows: Sequence[Row]) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """Yield the rows of each head, mode, mask and (for chosen radii) radius, in order."""
    keys = ("mode", "layer", "head", "masked", "radius")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        name = {key: row[key] for key in keys}
        if row.mode == "radius":  # here the radius varies
            name["radius"] = None
        groups.setdefault(tuple(name.values()), []).append(row)
    for key, group in groups.items():
        yield dict(zip(keys, key, strict=True)), group


def points(rows: Sequence[Row]) -> tuple[Values, Values, Values]:
    """Return n, norm and R of the rows where a power law is expected."""
    kept = [row for row in rows if _in_law(row)]
    columns = [[row[name] for row in kept] for name in ("n", "norm", "radius")]
    n, norm, radius = np.array(columns, dtype=np.float64)
    return n, norm, radius


def _in_law(row: Row) -> bool:
    return row.mode != "adversarial" or row.n * WELL_UNDER <= (row.n_max or 0)


def fit_of(
    name: Mapping[str, Any], n: Values, norm: Values, radius: Values
) -> tuple[PowerLaw, Row]:
    """Fit the norms against n alone, and against n and R together."""
    kept = np.isfinite(norm) & (norm > 0)
    lengths, norms, radii = (torch.from_numpy(values[kept]) for values in (n, norm, radius))
    alone = power_law(lengths, norms)
    known = bool(radii.isfinite().all())
    joint = power_law(lengths, norms, radii) if known else PowerLaw(*[math.nan] * 6)
    row = FITS_TABLE.row(
        **{key: value for key, value in name.items() if key != "module"},
        **{n: number_or_none(getattr(alone, n)) for n in ("exponent", "exponent_se", "r2")},
        joint_exponent=number_or_none(joint.exponent),
        joint_exponent_se=number_or_none(joint.exponent_se),
        radius_exponent=number_or_none(joint.radius_exponent),
        radius_exponent_se=number_or_none(joint.radius_exponent_se),
    )
    return alone, row


def with_searches(fit: Row, rows: Sequence[Row]) -> Row | None:
    """Widen the standard error of an ascent by its searches; None if the searches disagree."""
    above = np.array([(row.norm_high or math.nan) / (row.norm or math.nan) for row in rows])
    if not (above <= AGREED).all():
        return None
    if fit.exponent_se is None:
        return fit
    logs = np.log([row.n for row in rows])
    shares = (logs - logs.mean()) / ((logs - logs.mean()) ** 2).sum()
    reach = float(np.abs(shares) @ np.log(above))  # if every search errs the worst way
    return fit.replace(exponent_se=math.hypot(fit.exponent_se, reach))


def bound_exponents(n: Values, bounds: Mapping[str, Values]) -> dict[str, float | None]:
    """Return the exponent of every bound, as columns of the fit."""
    return {
        f"{name}_exponent": fit_of({}, n, bound, np.full_like(bound, np.nan))[1].exponent
        for name, bound in bounds.items()
    }


def with_fit(row: Row, law: PowerLaw) -> Row:
    """Return a row with the norm of the fit, if a power law is expected there."""
    if math.isnan(law.exponent) or row.mode == "ascent" or not _in_law(row):
        return row
    return row.replace(fitted=law.constant * row.n**law.exponent)


def cut(net: Net, batch: Batch, n: int) -> tuple[Batch, Tensor]:
    """Return the samples that reach n tokens, cut to n tokens, and their indices.

    Text keeps its closing special tokens; images are resized to as many patches as fit into n.

    Raises:
        InputError: the patches of an image model are unknown.
    """
    if net.kind == "image":
        side = math.isqrt(n) * _patch(net)
        x = F.interpolate(batch.x, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
        return Batch(x, None, batch.ids), torch.arange(len(batch))
    size = batch.x.shape[1]
    lengths = torch.full((len(batch),), size) if batch.mask is None else batch.mask.sum(1).cpu()
    which = (lengths >= n).nonzero()[:, 0]
    closing = _closing(net)
    ends = lengths[which, None] - closing + torch.arange(closing)
    places = torch.cat([torch.arange(n - closing).expand(len(which), -1), ends], 1)
    part = batch.rows(which)
    places = places.to(part.x.device)
    x = part.x[torch.arange(len(which))[:, None], places]
    return Batch(x, None, part.ids), which


def require_lengths(net: Net, batch: Batch, lengths: Sequence[int]) -> None:
    """Require that the model takes sequences of other lengths than its own.

    Raises:
        InputError: the model takes one length only.
    """
    try:
        with torch.no_grad():
            net.output(cut(net, batch[:1], lengths[0])[0])
    except (AssertionError, ValueError, RuntimeError) as error:
        if of_machine(error):
            raise
        modules = net.module.modules()
        dynamic = any(hasattr(module, "dynamic_img_size") for module in modules)
        advice = (
            "Add --model-kwargs dynamic_img_size=true"
            if dynamic
            else "Leave out the modes that use data: --mode adversarial,radius,ascent"
        )
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{net.info.architecture} does not take {lengths[0]} tokens ({reason})", advice + "."
        ) from error


@contextmanager
def any_size(net: Net) -> Iterator[bool]:
    """Let vision transformers of timm take images of every size inside the block.

    Position embeddings are interpolated, as with timm's option dynamic_img_size; at the model's
    own size they are unchanged. Yields whether the model had to be changed.
    """
    changes = [change for module in net.module.modules() for change in _dynamic(module)]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield bool(changes)
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _dynamic(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the attributes that dynamic_img_size changes; rotary positions cannot change."""
    embed: Any = getattr(module, "patch_embed", None)
    fixed = getattr(module, "dynamic_img_size", None) is False
    if not fixed or not hasattr(embed, "output_fmt") or getattr(module, "rope", None) is not None:
        return
    yield module, "dynamic_img_size", True
    yield embed, "strict_img_size", False
    yield embed, "flatten", False
    yield embed, "output_fmt", type(embed.output_fmt)("NHWC")


def _patch(net: Net) -> int:
    """Return the side of a patch in pixels."""
    modules = () if net.entry is None else net.entry.modules()
    for module in modules:
        if isinstance(module, nn.Conv2d):
            return int(module.stride[0])
    raise InputError(
        f"the patch size of {net.info.architecture} was not found",
        "Write a py: factory that names its patch embedding: ModelSpec(..., entry=MODULE).",
    )


def _closing(net: Net) -> int:
    """Count the special tokens that the tokenizer puts behind every text."""
    if net.tokenize is None:
        return 0
    one, other = (net.tokenize(text, 64)[::-1] for text in ("one", "other words"))
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)


SEARCHED = 64
"""Largest number of tokens of a masked search, which has no closed form for copies."""
REPEATS = 1e-3
"""Smallest relative difference assumed between searches that end at the same tokens."""
RADII = 12

NO_BIAS = 1e-4
"""A bias up to this size counts as rounding error of a model without bias."""

Cells = dict[str, Any]
"""A row as plain values, by column."""


@dataclass(frozen=True)
class WorstHead:
    """One head with its worst-case tokens.

    Attributes:
        name: layer, head and module, as in a row.
        head: the head in float64, at the tokens of the first sample.
        worst: its worst-case tokens.
        own: R of the layer at the first sample.
        masks: the masks to measure: True hides later keys.
        options: the options of the measure.
    """

    name: Cells
    head: Heads
    worst: Adversary
    own: float
    masks: tuple[bool, ...]
    options: ScalingOptions

    def radii(self) -> tuple[float, ...]:
        """Return the layer's own R and another, by default with n_max amid the lengths."""
        if self.options.radius is not None:
            return self.own, self.options.radius
        lengths = self.options.lengths
        small = self.worst.radius(math.sqrt(lengths[0] * lengths[-1]))
        return (self.own, small) if small < self.own else (self.own,)

    def norm(self, n: int, radius: float, *, masked: bool) -> float:
        """Return ||J|| at n worst-case tokens."""
        if masked:
            at = move_heads(self.head, self.worst.tokens(n, radius), causal=True)
            return float(head_norms(at, seeds=[self.options.seed], tol=self.options.tol).norm)
        at = move_heads(self.head, self.worst.points(radius), causal=False)
        return float(duplicated_norm(at, at.x.new_tensor([1.0, n - 1.0])))

    def row(self, mode: str, n: int, radius: float, *, masked: bool, **more: Any) -> Cells:
        """Return a row of `scaling` at one length and radius."""
        where = {"n": n, "radius": radius, "n_max": self.worst.n_max(radius)}
        return self.name | {"mode": mode, "masked": masked} | where | more

    @property
    def seed(self) -> int:
        """Return the seed of this head's searches."""
        own = 1000 * self.name["layer"] + self.name["head"]
        return int(self.options.seed * 10**6 + own)


class WorstCase(NamedTuple):
    """The worst case of the chosen heads.

    Attributes:
        rows: rows of the section `scaling`.
        missing: the reason for each head or layer without a worst case.
    """

    rows: tuple[Cells, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()

    def notes(self) -> tuple[Note, ...]:
        """Note which heads have no worst case, one note per reason."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.missing:
            reasons.setdefault(why, []).append(name)
        return tuple(
            Note(
                level="info",
                code="no-worst-case",
                text=f"{', '.join(who)}: no worst case was computed, {why}",
            )
            for why, who in reasons.items()
        )


def worst_case(net: Net, sample: Batch, options: ScalingOptions) -> WorstCase:
    """Return the worst case of the chosen heads of a model.

    Args:
        net: the model.
        sample: one sample, which defines R.
        options: which heads, lengths and modes.

    Raises:
        UsageError: a layer or head does not exist.
    """
    every = find_layers(net, sample)
    sites = choose_layers(every, options.layers)
    _require_heads(sites, options)
    if set(options.modes) == {"real"}:
        return WorstCase()

    def measure_layer(layer: Layer) -> list[tuple[str, list[Cells] | str]]:
        """Return the rows of each chosen head, or the reason why it has none."""
        heads = _worst_heads(layer, options)
        return [(name, h if isinstance(h, str) else _measure_modes(h)) for name, h in heads]

    layers = capture(net, every, sample, measure_layer, layers={site.index for site in sites})
    each = list(chain.from_iterable(layers))
    return WorstCase(
        tuple(row for _, rows in each if not isinstance(rows, str) for row in rows),
        tuple((name, why) for name, why in each if isinstance(why, str)),
    )


def _measure_modes(head: WorstHead) -> list[Cells]:
    return [row for mode in MODES if mode in head.options.modes for row in MODES[mode](head)]


def _require_heads(sites: Sequence[Site], options: ScalingOptions) -> None:
    known = {f"{site.index}.{head}" for site in sites for head in range(site.heads)}
    surplus = set(options.heads or ()) - known - {"all"}
    if surplus:
        raise UsageError(
            f"there is no head {min(surplus)}", "Give heads as LAYER.HEAD, counted from 0, or all."
        )


def _worst_heads(layer: Layer, options: ScalingOptions) -> Iterator[tuple[str, WorstHead | str]]:
    """Yield the chosen heads of a layer, or the reason why they have no worst case."""
    site = layer.site
    heads = _fit_heads(layer)
    if isinstance(heads, str):
        yield f"layer {site.index}", heads
        return
    own = float(torch.linalg.vector_norm(heads.x, dim=-1).max())
    masks = {"none": (False,), "causal": (True,), "both": (False, True)}
    for h in _chosen_heads(heads, site, options):
        head, name = heads.pick(slice(h, h + 1)), f"head {site.index}.{h}"
        worst = adversary(head)
        if worst is None:
            yield name, "no real eigenvalue"
            continue
        where = {"layer": site.index, "head": h, "module": site.module}
        mask = masks.get(options.mask, (heads.is_causal(),))
        yield name, WorstHead(where, head, worst, own, mask, options)


def _fit_heads(layer: Layer) -> Heads | str:
    """Return the heads of a layer in float64, or why the construction does not apply to it."""
    if layer.site.reason is not None:
        return layer.site.reason
    try:
        heads = layer.heads().row(0).to(torch.float64)
    except StructureError as error:
        return error.reason
    return _unfit(heads) or heads


def _unfit(heads: Heads) -> str | None:
    """Return the reason why the construction does not apply to a layer."""
    if heads.x_kv is not None or not are_affine(heads) or heads.to_k is None or heads.to_v is None:
        return "it needs self-attention with affine projections"
    p = heads.attention()
    bias = heads.bias_rows(0, heads.q.shape[2]).expand_as(p)
    if float(bias[p > 0].abs().max()) > NO_BIAS:
        return "it does not support a position bias"
    return None


def _chosen_heads(heads: Heads, site: Site, options: ScalingOptions) -> list[int]:
    """Return the chosen heads; by default the one with the largest norm at the sample."""
    if options.heads is None:
        return [int(head_norms(heads, seeds=[options.seed], tol=1e-2).norm[0].argmax())]
    wanted = set(options.heads)
    return [h for h in range(site.heads) if wanted & {"all", f"{site.index}.{h}"}]


def _adversarial(head: WorstHead) -> Iterator[Cells]:
    for masked in head.masks:
        for radius in head.radii():
            top = None if masked else mean_field_norm(head.head, head.worst, radius)[0]
            for n in head.options.lengths:
                norm = head.norm(n, radius, masked=masked)
                yield head.row("adversarial", n, radius, masked=masked, norm=norm, mean_field=top)


def _radius(head: WorstHead) -> Iterator[Cells]:
    """Return radii from n_max = 3 to n_max = n^2, evenly in R^2: norms grow until n_max = n."""
    n = head.options.lengths[-1]
    first, last = head.worst.radius(3.0), min(head.own, head.worst.radius(n**2.0))
    squares = torch.linspace(first**2, last**2, RADII if first < last else 1)
    for radius in squares.double().sqrt().tolist():
        for masked in head.masks:
            top = None if masked else mean_field_norm(head.head, head.worst, radius)[0]
            norm = head.norm(n, radius, masked=masked)
            yield head.row("radius", n, radius, masked=masked, norm=norm, mean_field=top)


def _ascent(head: WorstHead) -> Iterator[Cells]:
    """Run independent searches and keep the best one."""
    for masked in head.masks:
        most = SEARCHED if masked else math.inf
        lengths = [n for n in head.options.lengths if n <= most]
        for radius in head.radii():
            ends = steepest_tokens(head.head, radius, lengths, seed=head.seed, causal=masked)
            for n, end in zip(lengths, ends, strict=True):
                yield head.row("ascent", n, radius, masked=masked, **_interval(end))


def _interval(end: Steepest) -> Cells:
    """Return the best norm, and an upper end as far above it as the worst search is below it."""
    worst, best = float(end.norm.min()), float(end.norm.max())
    apart = (best / worst if worst else 1.0) * (1 + REPEATS)
    return {"norm": best, "norm_low": best / apart, "norm_high": best * apart}


MODES: dict[str, Callable[[WorstHead], Iterator[Cells]]] = {
    "adversarial": _adversarial,
    "radius": _radius,
    "ascent": _ascent,
}
"""Rows of a head by mode; the mode real is measured on data."""
