"""The worst case of chosen heads: how large their norm can get, and how near searches come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lipaudit.data.batch import Batch
from lipaudit.errors import StructureError, UsageError
from lipaudit.measures.by_layer import chosen
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.sites import Site
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import Net
from lipaudit.results import Note
from lipaudit.theory.bounds.centred import is_affine
from lipaudit.theory.exact.head_norms import head_norms, splitting_gain
from lipaudit.theory.growth.ascent import largest_shift, steepest_tokens
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
"""Most tokens of a search by gradients."""
STARTS = 4
RADII = 12
BUDGET = 0.01
"""Move of the attacks that split tokens or do not, as a share of ||X||_F."""

ROUNDING = 1e-4
"""A bias up to this is what rounding leaves of the logits of a model that adds none."""

Cells = dict[str, Any]
"""A row as plain values, by column."""


@dataclass(frozen=True)
class Case:
    """One head with its worst-case tokens.

    Attributes:
        name: layer, head and module, as rows have them.
        head: the head in float64, at the tokens of the first sample.
        found: its worst-case tokens.
        own: R of the layer, at the first sample.
        masks: whether later keys are masked, each in turn.
        options: of the measure.
    """

    name: Cells
    head: Heads
    found: Adversary
    own: float
    masks: tuple[bool, ...]
    options: ScalingOptions

    def radii(self) -> tuple[float, ...]:
        """Return the layer's own R and another: if not given, where n_max is amid the lengths."""
        if self.options.radius is not None:
            return self.own, self.options.radius
        lengths = self.options.lengths
        small = self.found.radius(math.sqrt(lengths[0] * lengths[-1]))
        return (self.own, small) if small < self.own else (self.own,)

    def norm(self, n: int, radius: float, *, masked: bool) -> float:
        """Return ||J|| at n worst-case tokens."""
        if masked:
            at = relocated(self.head, self.found.tokens(n, radius), causal=True)
            return float(head_norms(at, seeds=[self.options.seed], tol=self.options.tol).norm)
        at = relocated(self.head, self.found.points(radius), causal=False)
        return float(duplicated_norm(at, at.x.new_tensor([1.0, n - 1.0])))

    def row(self, mode: str, n: int, radius: float, *, masked: bool, **more: Any) -> Cells:
        """Return a row of `scaling`."""
        where = {"n": n, "radius": radius, "n_max": self.found.n_max(radius)}
        return self.name | {"mode": mode, "masked": masked} | where | more

    def generator(self) -> torch.Generator:
        """Return the randomness of this head."""
        own = 1000 * self.name["layer"] + self.name["head"]
        return torch.Generator().manual_seed(self.options.seed * 10**6 + own)


def worst_case(
    net: Net, sample: Batch, options: ScalingOptions
) -> tuple[list[Cells], list[Cells], tuple[Note, ...]]:
    """Return the rows of `scaling`, those of `scaling.split`, and which heads have no worst case.

    Args:
        net: the model.
        sample: one sample: it says where R is.
        options: which heads, lengths and modes.

    Raises:
        UsageError: a layer or head does not exist.
    """
    every = survey(net, sample)
    sites = chosen(every, options.layers)
    _require_heads(sites, options)
    if set(options.modes) == {"real"}:
        return [], [], ()
    rows: list[Cells] = []
    splits: list[Cells] = []
    missing: dict[str, list[str]] = {}

    def visit(layer: Layer) -> None:
        for name, case in _cases(layer, options):
            if isinstance(case, str):
                missing.setdefault(case, []).append(name)
                continue
            rows.extend(
                row for name in MODES if name in options.modes for row in MODES[name](case)
            )
            if "split" in options.modes and False in case.masks:
                splits.append(_split(case))

    capture(net, every, sample, visit, layers={site.index for site in sites})
    notes = tuple(
        Note(level="info", code="no-worst-case", text=f"{', '.join(who)}: no worst case, {why}")
        for why, who in missing.items()
    )
    return rows, splits, notes


def _require_heads(sites: Sequence[Site], options: ScalingOptions) -> None:
    known = {f"{site.index}.{head}" for site in sites for head in range(site.heads)}
    surplus = set(options.heads or ()) - known - {"all"}
    if surplus:
        raise UsageError(
            f"there is no head {min(surplus)}", "Heads are LAYER.HEAD, counted from 0, or all."
        )


def _cases(layer: Layer, options: ScalingOptions) -> Iterator[tuple[str, Case | str]]:
    """Yield the chosen heads of a layer, or why they have no worst case."""
    site = layer.site
    reason = site.reason
    heads = None
    try:
        heads = layer.heads().row(0).to(torch.float64) if reason is None else None
    except StructureError as error:
        reason = error.reason
    if heads is not None:
        reason = _unfit(heads)
    if heads is None or reason is not None:
        yield f"layer {site.index}", str(reason)
        return
    own = float(torch.linalg.vector_norm(heads.x, dim=-1).max())
    masks = {"none": (False,), "causal": (True,), "both": (False, True)}
    for h in _chosen_heads(heads, site, options):
        head, name = heads.pick(slice(h, h + 1)), f"head {site.index}.{h}"
        found = adversary(head)
        if found is None:
            yield name, "no real eigenvalue"
            continue
        where = {"layer": site.index, "head": h, "module": site.module}
        mask = masks.get(options.mask, (heads.is_causal(),))
        yield name, Case(where, head, found, own, mask, options)


def _unfit(heads: Heads) -> str | None:
    """Return why the construction does not apply to a layer."""
    if heads.x_kv is not None or not is_affine(heads) or heads.to_k is None or heads.to_v is None:
        return "it is for self-attention with affine projections"
    p = heads.attention()
    if heads.bias is not None and float(heads.bias.expand_as(p)[p > 0].abs().max()) > ROUNDING:
        return "it knows no position bias"
    return None


def _chosen_heads(heads: Heads, site: Site, options: ScalingOptions) -> list[int]:
    """Return the heads asked for; by default the most amplifying one at the sample."""
    if options.heads is None:
        return [int(head_norms(heads, seeds=[options.seed], tol=1e-2).norm[0].argmax())]
    wanted = set(options.heads)
    return [h for h in range(site.heads) if wanted & {"all", f"{site.index}.{h}"}]


def _adversarial(case: Case) -> Iterator[Cells]:
    for masked in case.masks:
        for radius in case.radii():
            top = None if masked else mean_field_norm(case.head, case.found, radius)[0]
            for n in case.options.lengths:
                norm = case.norm(n, radius, masked=masked)
                yield case.row("adversarial", n, radius, masked=masked, norm=norm, mean_field=top)


def _radius(case: Case) -> Iterator[Cells]:
    """From n_max = 3 to where it is n^2, evenly in R^2: norms grow until n_max reaches n."""
    n = case.options.lengths[-1]
    first, last = case.found.radius(3.0), min(case.own, case.found.radius(n**2.0))
    squares = torch.linspace(first**2, last**2, RADII if first < last else 1)
    for radius in squares.double().sqrt().tolist():
        for masked in case.masks:
            top = None if masked else mean_field_norm(case.head, case.found, radius)[0]
            norm = case.norm(n, radius, masked=masked)
            yield case.row("radius", n, radius, masked=masked, norm=norm, mean_field=top)


def _ascent(case: Case) -> Iterator[Cells]:
    """The best of several random starts on the sphere of the radius."""
    width, generator = case.head.x.shape[2], case.generator()
    for masked in case.masks:
        for radius in case.radii():
            for n in [n for n in case.options.lengths if n <= SEARCHED]:
                start = torch.randn(STARTS, n, width, generator=generator, dtype=torch.float64)
                start = radius * torch.nn.functional.normalize(start, dim=-1).to(case.head.x)
                x = steepest_tokens(case.head, start, radius, causal=masked)
                at = relocated(case.head, x, causal=masked)
                seeds = [case.options.seed] * STARTS
                norms = head_norms(at, seeds=seeds, tol=case.options.tol).norm
                low, high = float(norms.min()), float(norms.max())
                ends = {"norm_low": low, "norm_high": high}
                yield case.row("ascent", n, radius, masked=masked, norm=high, **ends)


MODES: dict[str, Callable[[Case], Iterator[Cells]]] = {
    "adversarial": _adversarial,
    "radius": _radius,
    "ascent": _ascent,
}
"""Rows of a head by mode; the other modes are measured on data."""


def _split(case: Case) -> Cells:
    """Compare an attack that moves tokens with one that duplicates each of them first."""
    x = case.head.x[:, :SEARCHED]
    at, budget = relocated(case.head, x, causal=False), BUDGET * float(x.norm())
    seeds = [case.options.seed]
    exact = head_norms(at, seeds=seeds, tol=case.options.tol).norm
    moved, split = (
        largest_shift(at, tokens, budget, generator=case.generator())
        for tokens in (x, x.repeat_interleave(2, 1))
    )
    return case.name | {
        "n": x.shape[1],
        "budget": budget,
        "norm": float(exact),
        "gain": float(splitting_gain(at, exact, seeds=seeds)),
        "moved": float(moved),
        "split": float(torch.maximum(moved, split)),  # copies may also move alike
    }
