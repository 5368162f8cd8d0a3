"""The worst case of chosen heads: how large their norm can get, and how near searches come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lipaudit.data.batch import Batch
from lipaudit.errors import StructureError, UsageError
from lipaudit.measures.by_layer import chosen
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.survey import surveyed
from lipaudit.models.net import Net
from lipaudit.results import Note
from lipaudit.theory.bounds.centred import are_affine
from lipaudit.theory.exact.head_norms import head_norms, splitting_gain
from lipaudit.theory.growth.ascent import Steepest, largest_shift, steepest_tokens
from lipaudit.theory.growth.worst_tokens import (
    Adversary,
    adversary,
    duplicated_norm,
    mean_field_norm,
    relocated,
)
from lipaudit.theory.heads import Heads

if TYPE_CHECKING:
    from lipaudit.settings.scaling import ScalingOptions

SEARCHED = 64
"""Most tokens of a masked search, which has no closed form of copies."""
REPEATS = 1e-3
"""How well searches that end at the same tokens repeat, at least."""
RADII = 12
BUDGET = 0.01
"""Move of the attacks that split tokens or do not, as a share of ||X||_F."""

NO_BIAS = 1e-4
"""A bias up to this is what rounding leaves of the logits of a model that adds none."""

Cells = dict[str, Any]
"""A row as plain values, by column."""


@dataclass(frozen=True)
class WorstHead:
    """One head with its worst-case tokens.

    Attributes:
        name: layer, head and module, as rows have them.
        head: the head in float64, at the tokens of the first sample.
        worst: its worst-case tokens.
        own: R of the layer, at the first sample.
        masks: whether later keys are masked, each in turn.
        options: of the measure.
    """

    name: Cells
    head: Heads
    worst: Adversary
    own: float
    masks: tuple[bool, ...]
    options: ScalingOptions

    def radii(self) -> tuple[float, ...]:
        """Return the layer's own R and another: if not given, where n_max is amid the lengths."""
        if self.options.radius is not None:
            return self.own, self.options.radius
        lengths = self.options.lengths
        small = self.worst.radius(math.sqrt(lengths[0] * lengths[-1]))
        return (self.own, small) if small < self.own else (self.own,)

    def norm(self, n: int, radius: float, *, masked: bool) -> float:
        """Return ||J|| at n worst-case tokens."""
        if masked:
            at = relocated(self.head, self.worst.tokens(n, radius), causal=True)
            return float(head_norms(at, seeds=[self.options.seed], tol=self.options.tol).norm)
        at = relocated(self.head, self.worst.points(radius), causal=False)
        return float(duplicated_norm(at, at.x.new_tensor([1.0, n - 1.0])))

    def row(self, mode: str, n: int, radius: float, *, masked: bool, **more: Any) -> Cells:
        """Return a row of `scaling`."""
        where = {"n": n, "radius": radius, "n_max": self.worst.n_max(radius)}
        return self.name | {"mode": mode, "masked": masked} | where | more

    @property
    def seed(self) -> int:
        """Where the randomness of this head starts."""
        own = 1000 * self.name["layer"] + self.name["head"]
        return int(self.options.seed * 10**6 + own)


class WorstCase(NamedTuple):
    """The worst case of some heads.

    Attributes:
        rows: of `scaling`.
        splits: rows of `scaling.split`.
        missing: names of heads or layers without a worst case, each with the reason.
    """

    rows: tuple[Cells, ...] = ()
    splits: tuple[Cells, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()

    def notes(self) -> tuple[Note, ...]:
        """Say which heads have no worst case: one note per reason."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.missing:
            reasons.setdefault(why, []).append(name)
        return tuple(
            Note(
                level="info", code="no-worst-case", text=f"{', '.join(who)}: no worst case, {why}"
            )
            for why, who in reasons.items()
        )


def worst_case(net: Net, sample: Batch, options: ScalingOptions) -> WorstCase:
    """Return the worst case of the chosen heads of a model.

    Args:
        net: the model.
        sample: one sample: it says where R is.
        options: which heads, lengths and modes.

    Raises:
        UsageError: a layer or head does not exist.
    """
    every = surveyed(net, sample)
    sites = chosen(every, options.layers)
    _require_heads(sites, options)
    if set(options.modes) == {"real"}:
        return WorstCase()
    of_layer = partial(_of_layer, options=options)
    layers = capture(net, every, sample, of_layer, layers={site.index for site in sites})
    return _joined([head for heads in layers for head in heads])


def _joined(each: Sequence[WorstCase]) -> WorstCase:
    columns = zip(*each, strict=True)
    return WorstCase(*(tuple(chain.from_iterable(column)) for column in columns))


def _of_layer(layer: Layer, options: ScalingOptions) -> list[WorstCase]:
    """Return the worst case of each chosen head of a layer, while the model is in it."""
    return [_of_head(name, head) for name, head in _worst_heads(layer, options)]


def _of_head(name: str, head: WorstHead | str) -> WorstCase:
    """Measure the modes of a head; of one that is only a reason, keep the reason."""
    if isinstance(head, str):
        return WorstCase(missing=((name, head),))
    rows = (row for mode in MODES if mode in head.options.modes for row in MODES[mode](head))
    split = "split" in head.options.modes and False in head.masks
    return WorstCase(tuple(rows), (_split(head),) if split else ())


def _require_heads(sites: Sequence[Site], options: ScalingOptions) -> None:
    known = {f"{site.index}.{head}" for site in sites for head in range(site.heads)}
    surplus = set(options.heads or ()) - known - {"all"}
    if surplus:
        raise UsageError(
            f"there is no head {min(surplus)}", "Heads are LAYER.HEAD, counted from 0, or all."
        )


def _worst_heads(layer: Layer, options: ScalingOptions) -> Iterator[tuple[str, WorstHead | str]]:
    """Yield the chosen heads of a layer, or why they have no worst case."""
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
    """Return why the construction does not apply to a layer."""
    if heads.x_kv is not None or not are_affine(heads) or heads.to_k is None or heads.to_v is None:
        return "it is for self-attention with affine projections"
    p = heads.attention()
    bias = heads.bias_rows(0, heads.q.shape[2]).expand_as(p)
    if float(bias[p > 0].abs().max()) > NO_BIAS:
        return "it knows no position bias"
    return None


def _chosen_heads(heads: Heads, site: Site, options: ScalingOptions) -> list[int]:
    """Return the heads asked for; by default the most amplifying one at the sample."""
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
    """From n_max = 3 to where it is n^2, evenly in R^2: norms grow until n_max reaches n."""
    n = head.options.lengths[-1]
    first, last = head.worst.radius(3.0), min(head.own, head.worst.radius(n**2.0))
    squares = torch.linspace(first**2, last**2, RADII if first < last else 1)
    for radius in squares.double().sqrt().tolist():
        for masked in head.masks:
            top = None if masked else mean_field_norm(head.head, head.worst, radius)[0]
            norm = head.norm(n, radius, masked=masked)
            yield head.row("radius", n, radius, masked=masked, norm=norm, mean_field=top)


def _ascent(head: WorstHead) -> Iterator[Cells]:
    """The best of independent searches."""
    for masked in head.masks:
        most = SEARCHED if masked else math.inf
        lengths = [n for n in head.options.lengths if n <= most]
        for radius in head.radii():
            ends = steepest_tokens(head.head, radius, lengths, seed=head.seed, causal=masked)
            for n, end in zip(lengths, ends, strict=True):
                yield head.row("ascent", n, radius, masked=masked, **_interval(end))


def _interval(end: Steepest) -> Cells:
    """The best norm, and where repeated searches end: as far above it as these end below."""
    worst, best = float(end.norm.min()), float(end.norm.max())
    apart = (best / worst if worst else 1.0) * (1 + REPEATS)
    return {"norm": best, "norm_low": best / apart, "norm_high": best * apart}


MODES: dict[str, Callable[[WorstHead], Iterator[Cells]]] = {
    "adversarial": _adversarial,
    "radius": _radius,
    "ascent": _ascent,
}
"""Rows of a head by mode; the other modes are measured on data."""


def _split(head: WorstHead) -> Cells:
    """Compare an attack that moves tokens with one that duplicates each of them first."""
    x = head.head.x[:, :SEARCHED]
    at, budget = relocated(head.head, x, causal=False), BUDGET * float(x.norm())
    seeds = [head.options.seed]
    exact = head_norms(at, seeds=seeds, tol=head.options.tol).norm
    moved, split = (
        largest_shift(at, tokens, budget, generator=torch.Generator().manual_seed(head.seed))
        for tokens in (x, x.repeat_interleave(2, 1))
    )
    return head.name | {
        "n": x.shape[1],
        "budget": budget,
        "norm": float(exact),
        "gain": float(splitting_gain(at, exact, seeds=seeds)),
        "moved": float(moved),
        "split": float(torch.maximum(moved, split)),  # copies may also move alike
    }
