"""Find which axes of an attention call hold its samples, windows, heads and tokens.

A model may keep them in any order, and several in one axis: (b, h, n, d), (b * h * w, n, d),
(b, n * h, d). Sizes do not show which is which; the projections do. A head reads channels of its
own, and a window reads tokens of its own with the weights that all windows share. So one channel
and two tokens of each linear map behind q, k and v are changed, one at a time. The entries of the
call that change with them show the factors of each axis:

    a channel changes one index of a factor     heads
    a token of the keys does                    windows, or samples
    a token of the queries alone does           further queries of the same keys
    neither does                                heads that share all channels: a norm of all heads
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lipaudit.errors import is_machine_error
from lipaudit.models.attention.calls import TOKENS, AttentionCall, AxisLayout, Factor, Leaf, Role
from lipaudit.models.graph import Probed, draw_positive

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
    """Return the layouts that q, (..., tokens, width), has in most models, most likely first.

    A layout says whether samples, windows or heads lie along each leading axis of q.
    """
    # With more axes than in the table: windows along all axes between samples and heads.
    windows = [WINDOWS] * (q.ndim - 4)
    guesses = _BY_AXES.get(q.ndim, ((SAMPLES, *windows, HEADS),))
    # The size of an axis of samples and heads would be a multiple of the number of samples. If it
    # is not, the axis holds no heads: for example the single sample (1, tokens, width) of a model
    # that attends to its samples in a loop. `analyse` finds no closed form with such a layout.
    if q.ndim == 3 and q.shape[0] % samples:
        guesses = ((SAMPLES,),)
    return tuple(AxisLayout(axes) for axes in guesses)


def find_layouts(call: AttentionCall, samples: int) -> tuple[AxisLayout, ...]:
    """Return the layouts (axes of samples, windows, heads, tokens) that a call can have.

    The linear maps behind q, k and v show them: a head reads some channels of a map, a window some
    of its tokens. There are several layouts if windows may be samples, and none if the maps do not
    show heads and windows.

    Args:
        call: the call, with the axes of the model.
        samples: number of samples in the batch.
    """
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    # The outputs of the linear maps that each of q, k and v is computed from.
    leaves = {name: call.origins.find_leaves(t) for name, t in tensors.items()}
    # A map may be applied to each head's part of a token, (batch, tokens, heads, d). Its rows look
    # like tokens of windows, so that heads would be taken for windows: give up.
    if any(leaf.origin.reads_token_parts for behind in leaves.values() for leaf in behind):
        return ()
    try:
        # Which vectors of q, k and v change with a channel or a token of these maps' outputs.
        changes = {name: _find_changes(t, leaves[name]) for name, t in tensors.items()}
        # Each leading axis is a product of samples, windows and heads: an axis of size 24 may be
        # 2 samples x 3 windows x 4 heads. Samples and windows are one factor at first.
        axes = enumerate(call.q.shape[:-2])
        leading = [_find_factors(changes, axis, size) for axis, size in axes]
        queries = _find_query_factors(changes, call.q.shape[-2])
    except RuntimeError as error:  # an op of the model has no second derivative
        if is_machine_error(error):
            raise
        return ()
    return tuple(AxisLayout(each, queries) for each in _choose_samples(leading, samples))


@dataclass
class _Changes:
    """Which vectors of q, k or v change if outputs of the linear maps behind this tensor change.

    All attributes but `known` hold patterns: boolean masks of the vectors, (..., tokens), True for
    those that change. Linear maps with the same weight count as one map, except in `rows`.

    Attributes:
        maps: for each map, the vectors that change with its whole output.
        columns: for each map, the vectors that change with one channel of its output.
        rows: for two tokens of each map's output, the vectors that change with this token.
        known: for each map, its weight (None for an input without a linear map), and the channel
            that changes in `columns`.
    """

    maps: list[Tensor] = field(default_factory=list)
    columns: list[Tensor] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    known: list[tuple[Tensor | None, int]] = field(default_factory=list)

    def add_map(self, source: Probed, weight: Tensor | None, channel: int) -> None:
        """Add a map to `maps`, `columns` and `known`, or join it to one with the same weight.

        Args:
            source: q, k or v as a function of the map's output.
            weight: the weight of the map, if it is a linear map.
            channel: the channel of the output that changes in `columns`. It is not used if the
                weight is known: all calls of one map must change the same channel.
        """
        for i, (other, known_channel) in enumerate(self.known):
            if other is not None and weight is not None and torch.equal(other, weight):
                # The same weight again, for other tokens: the model projects windows one by one.
                # Join the patterns of all calls to the patterns of a single map.
                self.maps[i] |= _find_changed(source)
                self.columns[i] |= _find_changed(source, column=known_channel)
                return
        self.known.append((weight, channel))
        self.maps.append(_find_changed(source))
        self.columns.append(_find_changed(source, column=channel))


def _find_changes(t: Tensor, leaves: Sequence[Leaf]) -> _Changes:
    """Find which vectors of t change with each linear map that t is computed from.

    The result holds boolean masks of the vectors of t, (..., tokens), True for those that change.
    For each map there is one in `maps` (the whole output of the map changes), one in `columns`
    (one channel of the output changes), and two in `rows` (one token of the output changes).

    Args:
        t: q, k or v, (..., tokens, width).
        leaves: the outputs of these maps.
    """
    changes = _Changes()
    for leaf, origin in leaves:
        linear = origin.linear
        if linear is None and leaf.ndim < 3:  # an input of the model without an axis of tokens
            continue
        # The function that reshapes the map's output, or a gradient of it, to (tokens, channels).
        as_rows = _join_tokens if linear is None else linear.outputs
        source = Probed(t, (leaf,), as_rows)  # t as a function of the map's output
        is_read = source.read != 0  # entries of this output that t depends on, (tokens, channels)
        tokens = is_read.any(1).nonzero()
        if not len(tokens):
            continue
        # Two tokens, because windows may share some of their keys and have others of their own.
        for token in (tokens[len(tokens) // 2], tokens[-1]):
            changes.rows.append(_find_changed(source, row=int(token)))
        weight = None if linear is None else linear.weight
        first_channel = is_read.any(0).nonzero()[0]
        changes.add_map(source, weight, int(first_channel))  # fills `maps` and `columns`
    return changes


def _join_tokens(y: Tensor) -> Tensor:
    """Return y, (..., channels), with one token per row."""
    return y.flatten(0, -2)


def _find_changed(source: Probed, *, row: int | None = None, column: int | None = None) -> Tensor:
    """Return which vectors of t = t(y) change if a token or a channel of y changes.

    Here t is q, k or v, and y the output of a linear map. The result is boolean, (..., tokens):
    True where the derivative of the vector along the change of y is not 0.

    Args:
        source: the function y -> t, with t (..., tokens, width) and y (rows, columns).
        row: the only row (token) of y that changes. None: all rows change.
        column: the only column (channel) of y that changes. None: all columns change.
    """
    rows = slice(None) if row is None else row
    columns = slice(None) if column is None else column
    change = torch.zeros_like(source.read)  # `source.read` has the shape of y
    # Changes are random, because the model may normalise y (as a LayerNorm does on the way to q):
    # an equal change of all channels would cancel. They lie between 0.5 and 1.5, because a sum of
    # positive changes is not 0.
    change[rows, columns] = draw_positive(change)[rows, columns]
    change_of_t = source.push(change)  # the product of the Jacobian dt/dy with the change of y
    return (change_of_t != 0).any(-1)


def _find_factors(changes: Mapping[str, _Changes], axis: int, size: int) -> tuple[Factor, ...]:
    """Return the factors of a leading axis, such as windows and heads, outermost first.

    A change of one channel or one token reaches a single index of a factor, or all indices. The
    factor holds, by the first case that applies,

        heads     if one channel of a linear map reaches a single index: each head reads its own
        windows   if one token of the keys or values does: each window has its own keys; or if no
                  linear map is behind keys or values, which could show it; or if the axis has one
                  index now, as other inputs may have more windows, but not more heads
        tokens    if one token of the queries does (and one linear map makes all queries: of
                  several, as of experts, each makes some): more queries of the same keys
        heads     otherwise: heads that share their keys

    Samples count as windows here; `_choose_samples` finds them.

    Args:
        changes: for q, k and v, which of their vectors change with a channel or token of a map.
        axis: number of the axis in these patterns.
        size: size of the axis.
    """
    columns = [pattern for part in changes.values() for pattern in part.columns]
    keys = changes["k"].rows
    values = changes["v"].rows
    patterns = {"columns": columns, "queries": changes["q"].rows, "keys": [*keys, *values]}
    has_keys = bool(keys and values)
    has_one_map = len(changes["q"].maps) == 1
    factors: list[Factor] = []
    # `single`: the kinds of changes ("columns", "queries", "keys") that reach a single index.
    for count, single in _split_axis(size, axis, patterns):
        role: Role = "head"
        if "columns" not in single:
            if "keys" in single or not has_keys or size <= 1:
                role = "window"
            elif "queries" in single and has_one_map:
                role = "token"
        factors.append(Factor(role, count))
    return tuple(factors)


def _find_query_factors(changes: Mapping[str, _Changes], size: int) -> tuple[Factor, ...]:
    """Return the factors of the axis of queries, outermost first: tokens, or tokens and heads.

    Some models of multi-query attention put heads into this axis, (b, n * h, d). All heads then
    share their keys. With 3 tokens and 2 heads, one channel of the map of q changes the queries of
    one head, 101010: the factors are (tokens of size 0, 2 heads). Size 0 is open (`Factor`),
    because other batches have other numbers of tokens.

    Args:
        changes: for q, k and v, which of their vectors change with a channel or token of a map.
        size: number of queries.
    """
    # If one channel of a map changes fewer keys or values than the whole map does, each head has
    # its own keys or values. Then no heads can lie along the axis of queries.
    for name in "kv":
        if not all(map(torch.equal, changes[name].columns, changes[name].maps)):
            return TOKENS
    # If one channel of a map changes fewer queries than the whole map does, it changes the queries
    # of one head (101010 in the example; the whole map changes 111111).
    patterns_of_heads = []
    for by_channel, by_map in zip(changes["q"].columns, changes["q"].maps, strict=True):
        if not torch.equal(_project_to_axis(by_channel, -1), _project_to_axis(by_map, -1)):
            patterns_of_heads.append(by_channel)
    if not patterns_of_heads:
        return TOKENS
    # A factor holds heads if one channel changes a single index of it, and tokens otherwise. In
    # the example, the parts are 3 (all of its indices change) and 2 (only index 0 changes).
    parts = _split_axis(size, -1, {"columns": patterns_of_heads})
    factors = [Factor("head" if single else "token", count) for count, single in parts]
    return _free_sizes(factors, "token")


def _project_to_axis(pattern: Tensor, axis: int) -> Tensor:
    """Return at which indices of an axis a boolean pattern has any True, (size of the axis,)."""
    return pattern.movedim(axis, 0).flatten(1).any(1)


class _Span(NamedTuple):
    """A factor of an axis: from its stride to its stride times its size."""

    start: int
    end: int

    def is_within(self, other: _Span) -> bool:
        """Say whether another span covers this one."""
        return other.start <= self.start and self.end <= other.end


def _split_axis(
    size: int, axis: int, patterns_by_kind: Mapping[str, Sequence[Tensor]]
) -> list[tuple[int, set[str]]]:
    """Divide an axis into factors, such as 12 into (4 heads, 3 windows).

    A pattern marks the entries that change together, such as the entries of one head. It has one
    index of each factor, or all of them. In the example, the entries 3, 4 and 5 are those of head
    1: they have one index of the factor 4, and all indices of the factor 3.

    A factor is given by its span (stride, stride * size). The windows, at neighbouring entries,
    have the span (1, 3), and the heads have the span (3, 12), which starts where the other ends.
    `_find_spans` returns for each pattern the spans of which it has a single index: (3, 12) for
    the pattern of head 1, 000111000000. The ends of all spans together divide the axis.

    Args:
        size: the size of the axis.
        axis: its number in the patterns.
        patterns_by_kind: the boolean patterns, by what changes the entries: "columns" (a channel
            of a map), "queries" or "keys" (a token).

    Returns:
        For each factor, outermost first: its size, and the kinds of patterns of which some pattern
        has a single index of the factor.
    """
    spans: dict[str, set[_Span]] = {}  # by kind: the factors of which a pattern has a single index
    strides = {1, size}  # the starts and ends of all spans
    for kind, patterns in patterns_by_kind.items():
        projected = [_project_to_axis(pattern, axis) for pattern in patterns]
        spans[kind] = {*chain(*map(_find_spans, projected))}
        strides.update(*spans[kind])
    # Neighbouring strides are the span of a factor: 1, 3, 12 give (1, 3) and (3, 12).
    divided = [_Span(*neighbours) for neighbours in pairwise(sorted(strides))]
    # If a stride is no multiple of the one before, the patterns contradict each other: no division
    # of the axis has all these strides. The whole axis is then one factor.
    if any(factor.end % factor.start for factor in divided):
        return [(size, {kind for kind in spans if spans[kind]})]
    factors: list[tuple[int, set[str]]] = []
    for factor in reversed(divided):
        # A pattern with a single index of a span has one of each factor within the span. (Another
        # kind of pattern may divide the span into several factors.)
        single = {kind for kind in spans if any(map(factor.is_within, spans[kind]))}
        factors.append((factor.end // factor.start, single))
    return factors or [(size, set())]  # no factor: an axis of size 1


def _find_spans(is_marked: Tensor) -> list[_Span]:
    """Return the factors of an axis of which the marked entries have only one index.

    Example: an axis of size 24 holds (2 samples, 4 heads, 3 windows), and the entries of head 0
    are marked, 3 of every 12: 111000000000111000000000. They have one index of the factor 4, and
    all indices of the factors 2 and 3. Neighbouring heads are 3 entries apart, so the result is
    [_Span(3, 12)]: from the stride of the heads to their stride times their number.

    Args:
        is_marked: which entries of the axis are marked, (size,).

    Returns:
        The factors, innermost first. The whole axis if the marks have no such structure, for
        example if windows overlap.
    """
    spans: list[_Span] = []
    stride = 1
    remaining = is_marked  # the marks along the factors that are not found yet
    while not remaining.all():
        # Skip inner factors of which all indices are marked: they make blocks of equal marks, of
        # size 3 in the example. Keep one mark of each block: 10001000.
        block = _find_block(remaining)
        remaining = remaining[::block]
        # The next factor has only one marked index: 4 in the example.
        count = _find_period(remaining)
        if count == 1:  # no such factor: the marks have no structure
            return [_Span(1, len(is_marked))]
        stride *= block
        spans.append(_Span(stride, stride * count))
        stride *= count
        remaining = remaining.view(-1, count).any(1)  # 11 in the example: all are marked
    return spans


def _find_block(marks: Tensor) -> int:
    """Return the largest size of blocks into which marks divide such that each has equal marks.

    Example: 111000000111 -> 3.
    """
    block = 1
    for n in _list_divisors(len(marks)):
        blocks = marks.view(-1, n)
        if (blocks == blocks[:, :1]).all():
            block = n
    return block


def _find_period(marks: Tensor) -> int:
    """Return the largest size of blocks into which marks divide such that all mark one index.

    Example: 10001000 -> 4, as each block of 4 marks nothing but index 0. 1 without such blocks.
    """
    period = 1
    for n in _list_divisors(len(marks)):
        marked_indices = marks.view(-1, n).any(0)
        if marked_indices.sum() == 1:
            period = n
    return period


def _list_divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _choose_samples(
    leading: Sequence[tuple[Factor, ...]], samples: int
) -> Iterator[tuple[tuple[Factor, ...], ...]]:
    """Yield each way to find the samples in the leading axes.

    So far samples and windows are one factor, called windows: both read tokens of their own.
    Every such factor whose size is a multiple of the number of samples is tried, outermost first:
    as (samples, windows) and as (windows, samples).

    With 2 samples and q of shape (8, 3, tokens, width), `leading` may be ((8 windows), (3 heads)).
    The two results have the first axis as (samples, 4 windows) and as (4 windows, samples). Other
    batches may have other numbers of windows, for example of larger images. So the 4 becomes 0,
    an open size, which then follows from the size of the axis (`_free_sizes`).

    Args:
        leading: the factors of each leading axis, as the linear maps behind q, k and v show them.
        samples: number of samples in the batch.
    """
    for number, axis in enumerate(leading):
        for position, factor in enumerate(axis):
            if factor.role != "window" or factor.size % samples:
                continue
            windows = Factor("window", factor.size // samples)
            # A factor of samples needs no size: on each batch, the number of samples is known.
            orders = [[Factor("sample"), windows], [windows, Factor("sample")]]
            if windows.size == 1:
                orders = [[Factor("sample")]]
            for order in orders:
                axes = [list(factors) for factors in leading]
                axes[number][position : position + 1] = order  # in place of the windows
                yield tuple(_free_sizes(factors, "window") for factors in axes)


def _free_sizes(factors: Sequence[Factor], role: Role) -> tuple[Factor, ...]:
    """Return the factors of one axis, with the size of one factor left open (0).

    The numbers of tokens and windows vary with the length of a text or the size of an image. On
    each batch, the open size follows from the size of the axis. Only the first factor that holds
    tokens, or has the given role, is left open: (2 heads, 8 tokens) becomes (2 heads, 0 tokens).
    """
    result = list(factors)
    for i, factor in enumerate(factors):
        if factor.role in (role, "token"):
            result[i] = Factor(factor.role)  # size 0
            break
    return tuple(result)
