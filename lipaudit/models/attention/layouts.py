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
from typing import NamedTuple

import torch
from torch import Tensor

from lipaudit.errors import of_machine
from lipaudit.models.attention.calls import TOKENS, AttentionCall, AxisLayout, Factor, Leaf, Role
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


def guess_layouts(q: Tensor, samples: int) -> tuple[AxisLayout, ...]:
    """Return the layouts that q has in most models, most likely first."""
    windows = [WINDOWS] * (q.ndim - 4)
    guesses = _BY_AXES.get(q.ndim, ((SAMPLES, *windows, HEADS),))
    # An axis of samples and heads would be a multiple of the samples.
    if q.ndim == 3 and q.shape[0] % samples:
        guesses = ((SAMPLES,),)
    return tuple(AxisLayout(axes) for axes in guesses)


def find_layouts(call: AttentionCall, samples: int) -> tuple[AxisLayout, ...]:
    """Return the layouts that a call can have; several if samples and windows look alike.

    Empty if its linear maps do not show them.

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
    return tuple(AxisLayout(axes, queries) for axes in _choose_samples(leading, samples))


@dataclass
class _Moved:
    """Which vectors of q, k or v, (..., tokens), move with the outputs of linear maps behind it.

    Boolean patterns. Linear maps with the same weight count as one, except in `rows`.

    Attributes:
        maps: for each map, the vectors that any of its channels moves.
        columns: for each map, those that one channel moves.
        rows: for each map, those that one of its tokens moves.
    """

    maps: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


def _move_inputs(t: Tensor, leaves: Sequence[Leaf]) -> _Moved:
    """Move one channel, and one token, of every linear map behind q, k or v."""
    moved = _Moved()
    weights: list[Tensor | None] = []  # of each map in `moved.maps`
    moved_columns: list[int] = []  # which channel of it is moved
    for leaf, origin in leaves:
        linear = origin.linear
        if linear is None and leaf.ndim < 3:  # no tokens
            continue
        as_rows = _join_tokens if linear is None else linear.outputs
        source = Probed(t, (leaf,), as_rows)
        is_read = source.read != 0  # of the map's output, (rows, columns)
        tokens = is_read.any(1).nonzero()
        if not len(tokens):
            continue
        middle = int(tokens[len(tokens) // 2])
        moved.rows.append(_find_moved(source, row=middle))
        whole = _find_moved(source)
        weight = None if linear is None else linear.weight
        index = _find_weight(weights, weight)
        if index is None:
            column = int(is_read.any(0).nonzero()[0])
            weights.append(weight)
            moved_columns.append(column)
            moved.maps.append(whole)
            moved.columns.append(_find_moved(source, column=column))
        else:
            # The same weights for other tokens: windows that the model has projected one by one.
            column = moved_columns[index]
            moved.maps[index] = moved.maps[index] | whole
            moved.columns[index] = moved.columns[index] | _find_moved(source, column=column)
    return moved


def _find_weight(weights: Sequence[Tensor | None], weight: Tensor | None) -> int | None:
    """Return the index of an equal weight, or None."""
    for i, other in enumerate(weights):
        if other is not None and weight is not None and torch.equal(other, weight):
            return i
    return None


def _join_tokens(y: Tensor) -> Tensor:
    """Return y, (..., channels), with one token per row."""
    return y.flatten(0, -2)


def _find_moved(source: Probed, *, row: int | None = None, column: int | None = None) -> Tensor:
    """Return which vectors of t move with a row or column of y; with all of it by default."""
    rows = slice(None) if row is None else row
    columns = slice(None) if column is None else column
    move = torch.zeros_like(source.read)
    # From a half to one and a half: sums of such numbers are never 0.
    generator = torch.Generator(move.device).manual_seed(0)
    noise = torch.rand(move.shape, generator=generator, dtype=move.dtype, device=move.device)
    move[rows, columns] = noise[rows, columns] + 0.5
    # The change of t, (..., tokens, width), for this change of y.
    return (source.push(move) != 0).any(-1)


def _find_factors(moved: Mapping[str, _Moved], axis: int, size: int) -> tuple[Factor, ...]:
    """Return the factors of a leading axis; samples count as windows so far.

    See the table at the top of this file: a factor holds heads if a channel moves one place of it,
    windows if a token of the keys does, and further queries if only a token of the queries does.

    Args:
        moved: which vectors of q, k and v move with their inputs.
        axis: number of the axis.
        size: its size.
    """
    columns = [pattern for part in moved.values() for pattern in part.columns]
    keys = moved["k"].rows
    values = moved["v"].rows
    patterns = {"columns": columns, "queries": moved["q"].rows, "keys": [*keys, *values]}
    has_keys = bool(keys and values)
    # Queries of several maps (experts) may be of one token.
    has_one_map = len(moved["q"].maps) == 1
    factors: list[Factor] = []
    for count, single in _split_axis(size, axis, patterns):
        # `single`: what moves one place of this factor.
        role: Role = "window"
        if "columns" in single:
            role = "head"
        elif has_keys and "keys" not in single and size > 1:
            # The same keys for all: other queries, or heads that read the same channels.
            role = "head"
            if "queries" in single and has_one_map:
                role = "token"
        factors.append(Factor(role, count))
    return tuple(factors)


def _find_query_factors(moved: Mapping[str, _Moved], size: int) -> tuple[Factor, ...]:
    """Return the factors of the axis of queries: it may hold heads that share their keys."""
    # Where one channel moves only some of the keys or values, this axis holds no tokens, but
    # channels or heads: it is not divided.
    for name in "kv":
        for one, whole in zip(moved[name].columns, moved[name].maps, strict=True):
            if not torch.equal(one, whole):
                return TOKENS
    # Maps of which one channel moves only some of the places: those of one head.
    heads = []
    for one, whole in zip(moved["q"].columns, moved["q"].maps, strict=True):
        if not torch.equal(_project_to_axis(one, -1), _project_to_axis(whole, -1)):
            heads.append(one)
    if not heads:
        return TOKENS
    factors = []
    for count, single in _split_axis(size, -1, {"columns": heads}):
        factors.append(Factor("head" if single else "token", count))
    return _free_sizes(factors, "token")


def _project_to_axis(pattern: Tensor, axis: int) -> Tensor:
    """Return at which places of an axis a pattern has any entry, (size,)."""
    return pattern.movedim(axis, 0).flatten(1).any(1)


class _Span(NamedTuple):
    """A factor of an axis: from its stride to its stride times its size."""

    start: int
    end: int


def _split_axis(
    size: int, axis: int, patterns_by_kind: Mapping[str, Sequence[Tensor]]
) -> list[tuple[int, set[str]]]:
    """Factor an axis, so that each pattern has one place, or all, of every factor.

    Args:
        size: its size.
        axis: its number in the patterns.
        patterns_by_kind: patterns of entries that move together, by what moves them.

    Returns:
        The size of each factor, outermost first, and the kinds of patterns with one place of it.
    """
    spans: dict[str, set[_Span]] = {}
    edges = {1, size}
    for kind, patterns in patterns_by_kind.items():
        spans[kind] = set()
        for pattern in patterns:
            spans[kind].update(_find_spans(_project_to_axis(pattern, axis)))
        for span in spans[kind]:
            edges.update(span)
    # Neighbouring edges bound a factor: 1, 3, 12 in an axis of (4 heads, 3 windows).
    steps = [_Span(*edge_pair) for edge_pair in pairwise(sorted(edges))]
    if any(step.end % step.start for step in steps):  # spans overlap: one factor of all kinds
        return [(size, {kind for kind in spans if spans[kind]})]
    factors: list[tuple[int, set[str]]] = []
    for step in reversed(steps):
        single = set()
        for kind in spans:
            if any(span.start <= step.start and step.end <= span.end for span in spans[kind]):
                single.add(kind)
        factors.append((step.end // step.start, single))
    return factors or [(size, set())]


def _find_spans(is_moved: Tensor) -> list[_Span]:
    """Return the factors of an axis at which the moved entries have one place, innermost first.

    In an axis of (samples, 4 heads, 3 windows), the entries of a head have one place of 4 at a
    stride of 3: [(3, 12)]. Entries that have no such places, as tokens of windows that overlap,
    are in the axis as a whole.

    Args:
        is_moved: which places of the axis move.
    """
    spans: list[_Span] = []
    stride = 1
    remaining = is_moved
    while not remaining.all():
        # The largest block size such that blocks move as a whole or not at all: inner factors of
        # which all places move.
        block = 1
        for n in _list_divisors(len(remaining)):
            blocks = remaining.view(-1, n)
            if (blocks == blocks[:, :1]).all():
                block = n
        remaining = remaining[::block]
        # The largest factor of which one place moves.
        count = 1
        for n in _list_divisors(len(remaining)):
            moved_places = remaining.view(-1, n).any(0)
            if int(moved_places.sum()) == 1:
                count = n
        if count == 1:
            return [_Span(1, len(is_moved))]
        stride *= block
        spans.append(_Span(stride, stride * count))
        stride *= count
        remaining = remaining.view(-1, count).any(1)
    return spans


def _list_divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _choose_samples(
    leading: Sequence[tuple[Factor, ...]], samples: int
) -> Iterator[tuple[tuple[Factor, ...], ...]]:
    """Yield the leading axes with one factor of windows divided into samples and windows.

    Every factor that can hold the samples is tried, outermost first, in both orders.
    """
    for number, axis in enumerate(leading):
        for place, factor in enumerate(axis):
            if factor.role != "window" or factor.size % samples:
                continue
            windows = Factor("window", factor.size // samples)
            orders = [[Factor("sample"), windows], [windows, Factor("sample")]]
            if windows.size == 1:
                orders = [[Factor("sample")]]
            for order in orders:
                axes = [list(factors) for factors in leading]
                axes[number][place : place + 1] = order
                yield tuple(_free_sizes(factors, "window") for factors in axes)


def _free_sizes(factors: Sequence[Factor], role: Role) -> tuple[Factor, ...]:
    """Let the size of the first factor with this role, or with tokens, follow the data."""
    result = list(factors)
    for i, factor in enumerate(factors):
        if factor.role in (role, "token"):
            result[i] = Factor(factor.role)
            break
    return tuple(result)
