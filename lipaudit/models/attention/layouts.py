"""Find which axes of an attention call hold its samples, windows, heads and tokens.

A model may keep them in any order, and several in one axis: (b, h, n, d), (b * h * w, n, d),
(b, n * h, d). Sizes do not show which is which; the projections do. A head reads channels of its
own, and a window reads tokens of its own with the weights that all windows share. So one channel
and one token of each linear map behind q, k and v are moved, and the entries of the call that move
with them are factored:

    a channel moves one entry along a factor    heads
    a token of the keys does                    windows, or samples
    a token of the queries alone does           further queries of the same keys
    neither does                                heads that share all channels: a norm of all heads
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lipaudit.errors import of_machine
from lipaudit.models.attention.calls import TOKENS, AttentionCall, Factor, Layout, Leaf, Role
from lipaudit.models.graph import Probed

SAMPLES = (Factor("sample"),)
WINDOWS = (Factor("window"),)
HEADS = (Factor("head"),)
_BY_AXES = {
    2: ((),),
    3: ((SAMPLES + HEADS,), (HEADS + SAMPLES,), (SAMPLES,)),
    4: ((SAMPLES, HEADS), (SAMPLES, WINDOWS)),
    5: ((SAMPLES, HEADS, WINDOWS), (SAMPLES, WINDOWS, HEADS)),
}
"""The usual leading axes, most likely first, for calls that show nothing."""


def guess_layouts(q: Tensor, samples: int) -> tuple[Layout, ...]:
    """Return the layouts that q has in most models, most likely first."""
    windows = [WINDOWS] * (q.ndim - 4)
    guesses = _BY_AXES.get(q.ndim, ((SAMPLES, *windows, HEADS),))
    # Heads and samples in one axis: its size is a multiple of the samples.
    if q.ndim == 3 and q.shape[0] % samples:
        guesses = ((SAMPLES,),)
    return tuple(Layout(axes) for axes in guesses)


def find_layouts(call: AttentionCall, samples: int) -> tuple[Layout, ...]:
    """Return the layouts that a call can have; several if samples and windows look alike.

    None if its maps do not show them.

    Args:
        call: the call, with the axes of the model.
        samples: number of samples in the batch.
    """
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    leaves = {name: call.origins.leaves(t) for name, t in tensors.items()}
    # A map that all heads share reads a part of a token, which looks like a token of a window.
    if any(leaf.origin.divided for behind in leaves.values() for leaf in behind):
        return ()
    try:
        moved = {name: _move_inputs(t, leaves[name]) for name, t in tensors.items()}
        leading = []
        for axis, size in enumerate(call.q.shape[:-2]):
            leading.append(_find_factors(moved, axis, size))
        queries = _find_query_factors(moved, call.q.shape[-2])
    except RuntimeError as error:  # an op of the model has no second derivative
        if of_machine(error):
            raise
        return ()
    return tuple(Layout(axes, queries) for axes in _choose_samples(leading, samples))


@dataclass
class _Moved:
    """The vectors of q, k or v, (..., tokens), that move with its inputs.

    Attributes:
        maps: each set of linear maps with one weight: the entries that any of its channels moves.
        columns: those that one channel moves.
        rows: for each linear map, those that one of its tokens moves.
    """

    maps: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


def _move_inputs(t: Tensor, leaves: Sequence[Leaf]) -> _Moved:
    """Move one channel, and one token, of every linear map behind q, k or v."""
    moved = _Moved()
    weights: list[tuple[Tensor | None, int]] = []  # with the channel that is moved
    for leaf, origin in leaves:
        linear = origin.linear
        if linear is None and leaf.ndim < 3:  # no tokens
            continue
        as_rows = _join_tokens if linear is None else linear.outputs
        source = Probed(t, (leaf,), as_rows)
        read = source.read != 0
        tokens = read.any(1).nonzero()
        if not len(tokens):
            continue
        middle = int(tokens[len(tokens) // 2])
        moved.rows.append(_find_moved(source, row=middle))
        whole = _find_moved(source)
        weight = None if linear is None else linear.weight
        number = None
        for i, (known, _) in enumerate(weights):
            # The same weights for other tokens: windows that the model has projected one by one.
            if known is not None and weight is not None and torch.equal(known, weight):
                number = i
                break
        if number is None:
            column = int(read.any(0).nonzero()[0])
            weights.append((weight, column))
            moved.maps.append(whole)
            moved.columns.append(_find_moved(source, column=column))
        else:
            column = weights[number][1]
            moved.maps[number] = moved.maps[number] | whole
            moved.columns[number] = moved.columns[number] | _find_moved(source, column=column)
    return moved


def _join_tokens(y: Tensor) -> Tensor:
    return y.flatten(0, -2)


def _find_moved(source: Probed, *, row: int | None = None, column: int | None = None) -> Tensor:
    """Return which vectors of t move with a row or column of y; with all of it by default."""
    rows = slice(None) if row is None else row
    columns = slice(None) if column is None else column
    move = torch.zeros_like(source.read)
    # A half to one and a half: a sum of such numbers is never 0.
    generator = torch.Generator(move.device).manual_seed(0)
    noise = torch.rand(move.shape, generator=generator, dtype=move.dtype, device=move.device)
    move[rows, columns] = noise[rows, columns] + 0.5
    return (source.push(move) != 0).any(-1)


def _find_factors(moved: Mapping[str, _Moved], axis: int, size: int) -> tuple[Factor, ...]:
    """Return the factors of a leading axis; samples count as windows so far."""
    columns = [pattern for each in moved.values() for pattern in each.columns]
    keys = moved["k"].rows
    values = moved["v"].rows
    shown = {"columns": columns, "queries": moved["q"].rows, "keys": [*keys, *values]}
    known = bool(keys and values)
    # Queries of several maps (experts) may be of one token.
    one_map = len(moved["q"].maps) == 1
    factors: list[Factor] = []
    for count, kinds in _split_axis(size, axis, shown):
        role: Role = "window"
        if "columns" in kinds:
            role = "head"
        elif known and "keys" not in kinds and size > 1:
            # The same keys for all: other queries, or heads that read the same channels.
            role = "head"
            if "queries" in kinds and one_map:
                role = "token"
        factors.append(Factor(role, count))
    return tuple(factors)


def _find_query_factors(moved: Mapping[str, _Moved], size: int) -> tuple[Factor, ...]:
    """Return the factors of the axis of queries: heads may be in it that share their keys."""
    # Where channels move some of the keys, attention is over channels, or over heads.
    for name in "kv":
        for one, whole in zip(moved[name].columns, moved[name].maps, strict=True):
            if not torch.equal(one, whole):
                return TOKENS
    pairs = zip(moved["q"].columns, moved["q"].maps, strict=True)
    heads = []
    for one, whole in pairs:
        if not torch.equal(_profile(one, -1), _profile(whole, -1)):
            heads.append(one)
    if not heads:
        return TOKENS
    parts = _split_axis(size, -1, {"columns": heads})
    factors = []
    for count, kinds in parts:
        factors.append(Factor("head" if kinds else "token", count))
    return _free_sizes(factors, "token")


def _profile(pattern: Tensor, axis: int) -> Tensor:
    """Return which places of an axis a pattern has entries in."""
    return pattern.movedim(axis, 0).flatten(1).any(1)


def _split_axis(
    size: int, axis: int, shown: Mapping[str, Sequence[Tensor]]
) -> list[tuple[int, set[str]]]:
    """Factor an axis, so that each pattern has one place, or all, of every factor.

    Args:
        size: its size.
        axis: its number in the patterns.
        shown: patterns of entries that move together, by what moves them.

    Returns:
        The size of each factor, outermost first, and which patterns have one place of it.
    """
    spans: list[tuple[str, int, int]] = []
    edges = {1, size}
    for kind, patterns in shown.items():
        for pattern in patterns:
            for start, end in _find_spans(_profile(pattern, axis)):
                spans.append((kind, start, end))
                edges |= {start, end}
    steps = [*pairwise(sorted(edges))]
    if any(high % low for low, high in steps):  # they overlap
        return [(size, {kind for kind, _, _ in spans})]
    parts: list[tuple[int, set[str]]] = []
    for low, high in reversed(steps):
        kinds = {kind for kind, start, end in spans if start <= low and high <= end}
        parts.append((high // low, kinds))
    return parts or [(size, set())]


def _find_spans(profile: Tensor) -> list[tuple[int, int]]:
    """Return (stride, stride * size) of the factors of an axis in which entries have one place.

    In an axis of (samples, 4 heads, 3 windows), the entries of a head have one place of 4 at a
    stride of 3: [(3, 12)]. Entries that have no such places, as tokens of windows that overlap,
    are in the axis as a whole.
    """
    spans: list[tuple[int, int]] = []
    stride = 1
    rest = profile
    while not rest.all():
        run = 1  # the longest block that all entries lie in from its start to its end
        for n in _list_divisors(len(rest)):
            blocks = rest.view(-1, n)
            if (blocks == blocks[:, :1]).all():
                run = n
        rest = rest[::run]
        count = 1  # the most places of which the entries have one
        for n in _list_divisors(len(rest)):
            places = rest.view(-1, n).any(0)
            if int(places.sum()) == 1:
                count = n
        if count == 1:
            return [(1, len(profile))]
        stride *= run
        spans.append((stride, stride * count))
        stride *= count
        rest = rest.view(-1, count).any(1)
    return spans


def _list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _choose_samples(
    leading: Sequence[tuple[Factor, ...]], samples: int
) -> Iterator[tuple[tuple[Factor, ...], ...]]:
    """Yield the leading axes with a part of the windows named samples, outermost first."""
    for number, axis in enumerate(leading):
        for place, factor in enumerate(axis):
            if factor.role != "window" or factor.size % samples:
                continue
            windows = Factor("window", factor.size // samples)
            orders = [[Factor("sample"), windows], [windows, Factor("sample")]]
            if windows.size == 1:
                orders = [[Factor("sample")]]
            for order in orders:
                axes = [list(each) for each in leading]
                axes[number][place : place + 1] = order
                yield tuple(_free_sizes(each, "window") for each in axes)


def _free_sizes(factors: Sequence[Factor], role: Role) -> tuple[Factor, ...]:
    """Return factors of which the first one that holds windows, or tokens, follows the data."""
    freed = list(factors)
    for i, factor in enumerate(factors):
        if factor.role in (role, "token"):
            freed[i] = Factor(factor.role)
            break
    return tuple(freed)
