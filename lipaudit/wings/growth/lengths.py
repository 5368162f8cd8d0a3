"""Parts of the measure `scaling`: samples cut to lengths, and the worst case of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, StructureError, UsageError, first_line, is_machine_error
from lipaudit.measures.layers import choose_layers
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.survey import find_layers
from lipaudit.models.net import Net
from lipaudit.tables import Note, Notes
from lipaudit.tables.columns import group_values
from lipaudit.theory.head_norms import head_norms
from lipaudit.theory.heads import Heads, are_affine_everywhere
from lipaudit.wings.growth import worst_tokens
from lipaudit.wings.growth.searches import steepest_tokens

if TYPE_CHECKING:
    from lipaudit.wings.growth.scaling import ScalingOptions

# Largest number of tokens of a masked search, which has no closed form for copies.
SEARCHED = 64
# Smallest relative difference assumed between searches that end at the same tokens.
REPEATS = 1e-3
# Number of radii of the mode radius.
RADII = 12
# A bias up to this size counts as rounding error of a model without bias.
NO_BIAS = 1e-4

# A row as plain values, by column.
Cells = dict[str, Any]


def cut_samples(net: Net, batch: Batch, n: int) -> tuple[Batch, Tensor]:
    """Return the samples with at least n tokens, cut to n tokens, and their indices in the batch.

    Text keeps its closing special tokens. Images are resized to a square of at most n patches.

    Args:
        net: the model.
        batch: samples.
        n: number of tokens.

    Raises:
        InputError: the patches of an image model are unknown.
    """
    if net.kind == "image":
        side = math.isqrt(n) * _find_patch(net)
        x = F.interpolate(batch.x, (side, side), mode="bicubic", antialias=True)
        # Bicubic resizing may leave [0, 1].
        return Batch(x.clamp(0, 1), y=None, ids=batch.ids), torch.arange(len(batch))
    if batch.mask is None:
        lengths = torch.full((len(batch),), batch.x.shape[1])
    else:
        lengths = batch.mask.sum(1).cpu()
    index = (lengths >= n).nonzero()[:, 0]
    # The positions to keep, (samples, n): first the beginning of the text, then its last tokens,
    # the closing special tokens.
    closing = _count_closing(net)
    starts = torch.arange(n - closing).expand(len(index), -1)
    ends = lengths[index, None] - closing + torch.arange(closing)
    samples = batch.rows(index)
    positions = torch.cat([starts, ends], 1).to(samples.x.device)
    rows = torch.arange(len(index))[:, None]
    return Batch(samples.x[rows, positions], y=None, ids=samples.ids), index


def _find_patch(net: Net) -> int:
    """Return the side of the patches of an image model in pixels.

    Raises:
        InputError: the patch embedding (`net.entry`) has no convolution.
    """
    if net.entry is not None:
        for module in net.entry.modules():
            if isinstance(module, nn.Conv2d):  # its stride is the side of a patch
                return int(module.stride[0])
    raise InputError(
        f"the patch size of {net.architecture} was not found",
        "Write a py: factory that names its patch embedding: ModelSpec(..., entry=MODULE).",
    )


def _count_closing(net: Net) -> int:
    """Return the number of special tokens that the tokenizer puts behind every text."""
    if net.tokenize is None:
        return 0
    # Tokenize two different texts, with at most 64 tokens each. Last tokens that both texts share
    # are special tokens.
    first = net.tokenize("one", 64)
    second = net.tokenize("other words", 64)
    pairs = zip(reversed(first), reversed(second), strict=False)
    for count, (token, other) in enumerate(pairs):
        if token != other:
            return count
    return 0


def require_lengths(net: Net, batch: Batch, lengths: Sequence[int]) -> None:
    """Run the model on one sample of the first length, before anything is measured.

    Args:
        net: the model.
        batch: samples.
        lengths: the numbers of tokens to measure.

    Raises:
        InputError: the model takes sequences of one length only.
    """
    try:
        with torch.no_grad():
            shortened, _ = cut_samples(net, batch[:1], lengths[0])
            net.output(shortened)
    except (AssertionError, ValueError, RuntimeError) as error:
        # Out of memory or a device error: nothing to do with the length.
        if is_machine_error(error):
            raise
        advice = "Leave out the modes that use data: --mode adversarial,radius,ascent."
        # An image model of timm can be loaded to take any size.
        if any(hasattr(module, "dynamic_img_size") for module in net.module.modules()):
            advice = "Add --model-kwargs dynamic_img_size=true."
        reason = first_line(error) or type(error).__name__
        text = f"{net.architecture} does not take {lengths[0]} tokens ({reason})"
        raise InputError(text, advice) from error


@dataclass(frozen=True)
class WorstHead:
    """One head with its worst-case tokens.

    Attributes:
        name: layer, head and module, as in a row.
        head: the head in float64, at the tokens of the first sample.
        worst: its worst-case tokens.
        layer_radius: R of the layer at the first sample.
        masks: the masks to measure: True hides later keys.
        options: the options of the measure.
    """

    name: Cells
    head: Heads
    worst: worst_tokens.Adversary
    layer_radius: float
    masks: tuple[bool, ...]
    options: ScalingOptions

    def rows(self) -> Iterator[Cells]:
        """Yield the rows of a head in the report, for every mode but `real`, which needs data.

        Each row has the largest norm found for a number of tokens n within a radius R. The modes
        adversarial and radius construct worst-case tokens, at many lengths or at many radii. The
        mode ascent searches for tokens, at many lengths.
        """
        for mode in ("adversarial", "radius", "ascent"):
            if mode not in self.options.modes:
                continue
            measure = self._search_norms if mode == "ascent" else self._measure_worst
            if mode == "radius":  # many radii, at the largest length
                radii = self._spread_radii()
                lengths = self.options.lengths[-1:]
            else:
                radii = self._choose_radii()
                lengths = self.options.lengths
            for masked, radius in product(self.masks, radii):
                # The number of tokens up to which norms at this radius grow like sqrt n.
                n_max = self.worst.n_max(radius)
                cells: Cells = {"mode": mode, "masked": masked, "radius": radius, "n_max": n_max}
                for n, norms in measure(radius, lengths, masked=masked):
                    yield self.name | cells | {"n": n} | norms

    def _choose_radii(self) -> list[float]:
        """Return the radii of the worst-case tokens: the layer's R = max_i ||x_i||, and a second.

        The second radius is the one that the user gave. By default, the second is a smaller radius
        at which norms first rise and then fall over the measured lengths; it is left out if the
        layer's radius is smaller still.
        """
        if self.options.radius is not None:
            return [self.layer_radius, self.options.radius]
        # Norms at radius R rise until about n_max(R) tokens, and then fall. Choose the radius with
        # n_max in the middle of the lengths.
        lengths = self.options.lengths
        smaller = self.worst.radius(n_max=math.sqrt(lengths[0] * lengths[-1]))
        if smaller < self.layer_radius:
            return [self.layer_radius, smaller]
        return [self.layer_radius]

    def _spread_radii(self) -> list[float]:
        """Return radii R at which to measure norms of n tokens, for the largest length n.

        They are ascending. R is the norm of the longest token. Norms at n tokens grow fast with R
        as long as n_max(R) < n, and slowly beyond. n_max is the length at which norms peak, and
        log n_max is about linear in R^2. So the radii are evenly spaced in R^2, from n_max = 3 to
        n_max = n^2: half of them in the fast growth.
        """
        # `worst.radius` is the inverse of n_max(R). n_max is 2 at R = 0: the first R is above 0.
        first = self.worst.radius(n_max=3.0)
        last = self.worst.radius(n_max=self.options.lengths[-1] ** 2.0)
        last = min(self.layer_radius, last)  # no token of the layer is longer
        count = RADII if first < last else 1  # 1: the first radius alone
        squares = torch.linspace(first**2, last**2, count)
        radii: list[float] = squares.double().sqrt().tolist()
        return radii

    def _measure_worst(
        self, radius: float, lengths: Sequence[int], *, masked: bool
    ) -> Iterator[tuple[int, Cells]]:
        """Yield each length n and ||J|| at n worst-case tokens of norm at most `radius`.

        The n tokens are one token and n - 1 copies of a second token. Without a mask, ||J|| has a
        closed form in the two distinct tokens and their numbers of copies. `mean_field` is then
        the largest norm for any number of copies. Behind a causal mask, copies of a token see
        different keys: the norm is computed at all n tokens, and `mean_field` is None.
        """
        if masked:
            for n in lengths:
                tokens = self.worst.tokens(n, radius)  # all n tokens, with the copies
                moved = worst_tokens.move_heads(self.head, tokens, causal=True)
                norms = head_norms(moved, seeds=[self.options.seed], tol=self.options.tol)
                yield n, {"norm": float(norms.norm), "mean_field": None}
            return
        points = self.worst.points(radius)  # the two distinct tokens
        moved = worst_tokens.move_heads(self.head, points, causal=False)
        limit, _ = worst_tokens.mean_field_norm(self.head, self.worst, radius)
        for n in lengths:
            copies = moved.x.new_tensor([1.0, n - 1.0])  # of the first and of the second token
            norm = worst_tokens.duplicated_norm(moved, copies)
            yield n, {"norm": float(norm), "mean_field": limit}

    def _search_norms(
        self, radius: float, lengths: Sequence[int], *, masked: bool
    ) -> Iterator[tuple[int, Cells]]:
        """Yield each length n and the largest ||J|| that independent searches find, with a range.

        The range is [largest / spread, largest * spread]. The spread is how many times the largest
        result of the searches exceeds the smallest one.
        """
        # A different seed for every layer and head (of fewer than 1000 heads).
        seed = int(self.options.seed * 10**6 + 1000 * self.name["layer"] + self.name["head"])
        if masked:  # copies have no closed form here, so searches over many tokens are too slow
            lengths = [n for n in lengths if n <= SEARCHED]
        ends = steepest_tokens(self.head, radius, lengths, seed=seed, causal=masked)
        for n, end in zip(lengths, ends, strict=True):
            smallest = float(end.norm.min())  # over the searches
            largest = float(end.norm.max())
            # The spread is slightly raised: searches that agree do not prove that no norm is
            # larger.
            spread = 1 + REPEATS
            if largest:  # norms of 0 agree
                spread *= largest / smallest if smallest else math.inf
            yield n, {"norm": largest, "norm_low": largest / spread, "norm_high": largest * spread}


def worst_case(net: Net, sample: Batch, options: ScalingOptions) -> tuple[list[Cells], Notes]:
    """Return rows of `scaling` for the worst case of the chosen heads, and notes on failures.

    The rows have Jacobian norms at tokens that are constructed or searched for a large norm.

    Args:
        net: the model.
        sample: one sample, which defines R.
        options: which heads, lengths and modes.

    Raises:
        UsageError: a layer or head does not exist.
    """
    sites = find_layers(net, sample)
    chosen = choose_layers(sites, options.layers)
    # Requested heads that no chosen layer has.
    unknown = set(options.heads or ()) - {"all"}
    for site in chosen:
        unknown -= {f"{site.index}.{head}" for head in range(site.heads)}
    if unknown:
        advice = "Give heads as LAYER.HEAD, counted from 0, or all."
        raise UsageError(f"there is no head {min(unknown)}", advice)
    if set(options.modes) == {"real"}:  # norms on data only: no worst case was requested
        return [], ()
    measure = partial(_measure_layer, options=options)
    cases = capture(net, sites, sample, measure, layers={site.index for site in chosen})
    rows = [row for case in cases for row in case.rows]
    # Pairs of the reason why there are no rows, and the head or layer.
    reasons = [pair for case in cases for pair in case.reasons]
    notes = []
    for reason, names in group_values(reasons).items():
        text = f"{', '.join(names)}: no worst case was computed, {reason}"
        notes.append(Note.info("no-worst-case", text))
    return rows, tuple(notes)


class LayerCase(NamedTuple):
    """The worst case of the chosen heads of a layer.

    Attributes:
        rows: the rows of its heads.
        reasons: why some have no rows: pairs of the reason and the head or the layer.
    """

    rows: list[Cells]
    reasons: list[tuple[str, str]]


def _measure_layer(layer: Layer, options: ScalingOptions) -> LayerCase:
    """Return the rows of the worst case of the chosen heads of a layer.

    Heads or layers without a worst case have a reason in place of rows.
    """
    index = layer.site.index
    heads = _read_suitable_heads(layer)
    if isinstance(heads, str):  # the reason why the worst case of this layer is unknown
        return LayerCase(rows=[], reasons=[(heads, f"layer {index}")])
    case = LayerCase(rows=[], reasons=[])
    radius = float(torch.linalg.vector_norm(heads.x, dim=-1).max())  # R = max_i ||x_i||
    # Whether later keys are masked; "both" measures both cases. The option `own`, the mask of the
    # model, is not in the table: it is the default of `get`.
    masks = {"none": (False,), "causal": (True,), "both": (False, True)}
    mask = masks.get(options.mask, (heads.is_causal(),))
    for number in _choose_heads(layer, heads, options):
        head = heads.pick(slice(number, number + 1))
        worst = worst_tokens.adversary(head)
        if worst is None:  # the construction needs a real eigenvalue of W_K W_Q^T
            case.reasons.append(("no real eigenvalue", f"head {index}.{number}"))
            continue
        name = {"layer": index, "head": number, "module": layer.site.module}
        case.rows.extend(WorstHead(name, head, worst, radius, mask, options).rows())
    return case


def _choose_heads(layer: Layer, heads: Heads, options: ScalingOptions) -> list[int]:
    """Return the numbers of the requested heads; by default the one with the largest norm."""
    if options.heads is None:
        # 1 % is accurate enough to choose a head.
        norms = head_norms(heads, seeds=[options.seed], tol=1e-2).norm
        return [int(norms[0].argmax())]
    numbers = range(layer.site.heads)
    if "all" in options.heads:
        return list(numbers)
    return [number for number in numbers if f"{layer.site.index}.{number}" in options.heads]


def _read_suitable_heads(layer: Layer) -> Heads | str:
    """Return the heads of a layer at the first sample, or why they have no worst-case tokens.

    Worst-case tokens are constructed for self-attention with affine projections and without a
    position bias. The heads are in float64.
    """
    if layer.site.reason is not None:  # why the heads have no closed form
        return layer.site.reason
    try:
        heads = layer.heads().row(0).to(torch.float64)
    except StructureError as error:
        return error.reason
    if not are_affine_everywhere(heads):
        return "it needs self-attention with affine projections"
    # Where P > 0, a key is not masked: the bias of its logit must be 0, apart from rounding.
    p = heads.attention()
    bias = heads.bias_rows(start=0, stop=heads.q.shape[2]).expand_as(p)
    if float(bias[p > 0].abs().max()) > NO_BIAS:
        return "it does not support a position bias"
    return heads
