"""Find attention calls that are parts of one attention: heads, or chunks of queries, in a loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipaudit.models.attention import capture
from lipaudit.models.attention.calls import Address, Loop, Origin


class Reads(NamedTuple):
    """The rows (tokens) and columns of the outputs of linear maps that a tensor depends on."""

    rows: set[tuple[Address, int]]
    columns: set[tuple[Address, int]]


@dataclass
class Surveyed:
    """An attention call of the pass that finds the layers, with data to compare it to the others.

    The pass runs two samples.

    Attributes:
        site: where the call is, and how it is read.
        parts: q, k and v of both samples, (windows, heads, tokens, width).
        first: q, k and v of the first sample; empty tensors if a window holds both samples.
        origins: the linear maps behind q, k and v. Their tensors take memory, and are stored only
            if the call has one head and may be a part of a loop.
        reads: for q, k and v, the rows and columns of each linear map that they read.
        form: properties of the logits that all calls of a loop share.
        has_projection: whether a linear map of its output was seen.
    """

    site: capture.Site
    parts: tuple[Tensor, ...]
    first: tuple[Tensor, ...]
    origins: Sequence[Sequence[Origin]]
    reads: tuple[Reads, ...]
    form: tuple[object, ...]
    has_projection: bool = False

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes of q, k and v of the first sample."""
        return tuple(t.shape for t in self.first)

    @property
    def tokens(self) -> list[list[int]]:
        """Return the tokens that q, k and v read, as row numbers of their linear maps' outputs.

        The maps themselves are left out: each head of a layer may have maps of its own.
        """
        return [sorted(number for _, number in reads.rows) for reads in self.reads]

    def refuse(self, reason: str) -> None:
        """Give up the closed form and all norms of the layer, for a reason."""
        self.site = replace(self.site, structure=None, reason=reason, inputs=())


def find_loops(layers: Collection[Surveyed]) -> list[Loop]:
    """Find calls that compute one head, or one chunk of the queries, of the same attention.

    The calls of such a loop are then joined and measured as one layer.
    """
    loops: list[Loop] = []
    in_loops: set[Address] = set()
    # Two calls may belong to one loop if they pass one of two tests. They are then joined along
    # axis 1 (each call is a head) or axis 2 (each call is a chunk of the queries). Calls with the
    # same linear maps may be either. Calls with other maps of the same tokens can only be heads.
    axes_by_test = {_share_maps: (1, 2), _read_same_tokens: (1,)}
    for are_alike, allowed_axes in axes_by_test.items():
        for group in _group(layers, are_alike):
            axis = _find_loop_axis(group)
            addresses = tuple(layer.site.address for layer in group)
            if axis in allowed_axes and in_loops.isdisjoint(addresses):
                loops.append(Loop(addresses, axis))
                in_loops.update(addresses)
    return loops


def note_partners(layers: Collection[Surveyed]) -> None:
    """Note for each layer its partners: all layers that are parts of the same attention.

    These are calls of a loop over heads or queries that `find_loops` could not join. A layer with
    only a part of the queries is refused, because its norm is not the norm of a head.
    """
    # `_share_input` finds calls by one line of code, such as heads with maps of their own.
    # `_share_maps` finds calls of the same maps, such as chunks of queries. If both find a group
    # for a layer, the group of `_share_maps` counts.
    for group in [*_group(layers, _share_input), *_group(layers, _share_maps)]:
        partners = tuple(layer.site.index for layer in group)
        for layer in group:
            layer.site = replace(layer.site, partners=partners)
            if _has_part_of_queries(layer, group):
                layer.refuse("its queries are computed in several parts")


def _group(
    layers: Collection[Surveyed], are_alike: Callable[[Surveyed, Surveyed], bool]
) -> list[list[Surveyed]]:
    """Return groups of two or more layers that are alike, by a test of two layers.

    A layer joins the first group whose first layer passes the test with it.
    """
    groups: list[list[Surveyed]] = []
    for layer in layers:
        for group in groups:
            if are_alike(group[0], layer):
                group.append(layer)
                break
        else:
            groups.append([layer])
    return [group for group in groups if len(group) > 1]


def _has_part_of_queries(layer: Surveyed, group: Sequence[Surveyed]) -> bool:
    """Say whether a layer has only a part of the queries of an attention.

    This is so if another layer of the group has other queries for the same keys.

    Args:
        layer: a layer of the group.
        group: layers that may be parts of one attention.
    """
    q, k, _ = layer.parts
    if q.shape[2] >= k.shape[2]:  # as many queries as keys: all of them
        return False
    for other in group:
        other_q, other_k, _ = other.parts
        if torch.equal(other_k, k) and not torch.equal(other_q, q):
            return True
    return False


def _find_loop_axis(group: Sequence[Surveyed]) -> int | None:
    """Return the axis along which calls are parts of one attention: 1 for heads, 2 for queries.

    None if they are not. Axes are (windows, heads, queries, width).
    """
    # Properties of the logits: scale, mask and so on. Empty if a call cannot be part of a loop.
    form = group[0].form
    if not form or not _are_same([layer.form for layer in group]):
        return None
    if _are_heads(group):
        return 1
    # The causal mask of torch's fused attention starts at the first query of the call, so later
    # chunks of a sequence would get a wrong mask. `Surveyor._describe_form` puts `causal` last in
    # the form of a fused call, and the number of keys last in that of a written-out softmax. A
    # number is never `is True`.
    is_causal = form[-1] is True
    if _are_chunks(group) and not is_causal:
        return 2
    return None


def _are_heads(group: Sequence[Surveyed]) -> bool:
    """Say whether calls compute different heads of one attention.

    All calls must have the same shapes and read the same tokens. Each call must read other columns
    of the linear maps behind q, k and v than all other calls do. Calls of one head each may share
    keys and values, or queries, as in grouped-query attention.
    """
    shapes = [layer.shapes for layer in group]
    if not _are_same(shapes) or not _are_same([layer.tokens for layer in group]):
        return False
    # For q, for k and for v: whether no two calls read the same columns.
    columns = [[layer.reads[part].columns for layer in group] for part in range(3)]
    differs = [*map(_are_disjoint, columns)]
    q_shape = shapes[0][0]  # of the first call, (windows, heads, tokens, width)
    if q_shape[:2] == (1, 1):  # one head: other queries or other keys are enough
        return differs[0] or differs[1]
    # Of calls of several heads, q, k and v must all differ. If two calls of two heads shared the
    # keys k0 and k1, the joined keys would be k0, k1, k0, k1. But shared keys are read as those of
    # grouped-query attention, which repeats each key in succession: k0, k0, k1, k1.
    return all(differs)


def _are_chunks(group: Sequence[Surveyed]) -> bool:
    """Say whether calls compute different queries of one attention, with the same keys and values.

    The calls must have the same windows, heads and width. Their numbers of queries may differ.
    """
    # `shapes` has the shapes of q, k and v, each (windows, heads, tokens, width).
    shapes = {(q[:2], q[3]) for q, _, _ in (layer.shapes for layer in group)}
    # `reads` has an item for q, for k and for v: which tokens (`rows`) and channels of linear maps
    # it reads. Chunks have different tokens of q, and the same of k and v.
    queries = [layer.reads[0].rows for layer in group]
    keys_and_values = [layer.reads[1:] for layer in group]
    return len(shapes) == 1 and _are_disjoint(queries) and _are_same(keys_and_values)


def _are_same(values: Sequence[Any]) -> bool:
    """Say whether all values are equal."""
    return all(value == values[0] for value in values)


def _are_disjoint(sets: Sequence[set[tuple[Address, int]]]) -> bool:
    """Say whether no two of the sets have an element in common."""
    return len(set().union(*sets)) == sum(map(len, sets))


def _share_maps(a: Surveyed, b: Surveyed) -> bool:
    """Say whether two calls have the same linear maps of keys, and of queries.

    Such calls may be chunks of the queries of one attention. A model may run the map of the
    queries once for each chunk. So only its module and the tensor that it reads (`root`) count,
    not the number of the run in its address.
    """
    of_layers = []
    for layer in (a, b):
        q, k, _ = layer.origins
        query_maps = {(o.address.module, o.address.op, o.root) for o in q}
        key_maps = {origin.address for origin in k}
        of_layers.append((query_maps, key_maps))
    first, second = of_layers
    return first == second and all(first)  # and neither set is empty


def _share_input(a: Surveyed, b: Surveyed) -> bool:
    """Say whether one line of code makes two attention calls whose queries read the same tensor.

    If the queries are constant, such as learned ones, the tensor that the keys read counts, and
    the module that makes the calls. False for calls of several heads.
    """
    tensors = _list_tensors(a)
    return a.site.line == b.site.line and bool(tensors) and tensors == _list_tensors(b)


def _list_tensors(layer: Surveyed) -> set[object]:
    """Return the tensors that the linear maps of the queries read; of the keys if there are none.

    Those of the keys come with the module that calls the attention. Empty for a call of several
    heads.
    """
    queries, keys, _ = layer.origins
    if not queries and layer.parts[0].shape[1] == 1:  # constant queries, of one head
        # Two modules with learned queries of their own may well read one tensor.
        module = layer.site.address.module
        return {(origin.root, module) for origin in keys}
    # To save memory, the survey keeps no linear maps of calls of several heads.
    return {origin.root for origin in queries if origin.linear}


def _read_same_tokens(a: Surveyed, b: Surveyed) -> bool:
    """Say whether two calls may be heads of one layer that have linear maps of their own.

    A model may compute such heads in a loop. The calls then have equal shapes and an equal form of
    the logits, and their maps read the same tokens of one tensor.
    """
    if not a.form or a.form != b.form or a.shapes != b.shapes:
        return False
    for x, y in zip(a.origins, b.origins, strict=True):
        if len(x) != len(y) or not all(map(Origin.reads_same, x, y)):
            return False
    return True
