"""One pass of a survey: find every layer, its output projection and module, and loops of calls.

With a compressed key (x -> latent -> norm -> key) or a shared bottleneck, q, k and v read three
tensors, each a token-wise function of an earlier one. `find_inner_maps` finds their common input,
and a second pass does not cut the graph at the maps in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.models import graph
from lipaudit.models.attention import calls, capture
from lipaudit.models.attention.analysis import analyse, find_output_map
from lipaudit.models.attention.calls import (
    TOKENS,
    Address,
    AttentionCall,
    Explicit,
    Fused,
    Loop,
    Origin,
)
from lipaudit.models.attention.numeric import linearize_module
from lipaudit.models.attention.trace import Frame, Tracer
from lipaudit.models.attention.uses import line_of_code
from lipaudit.models.requirements import agree
from lipaudit.models.sources.weight_files import HALF


def find_inner_maps(origins: Iterable[Origin]) -> frozenset[Address]:
    """Return the linear maps to leave uncut so that all of `origins` read one tensor.

    The nearest such tensor counts. Empty if there is none, or if they already read one tensor.
    """
    by_address = {origin.address: origin.way for origin in origins if origin.linear}
    # For each origin: the tensors behind it, the nearest first, with the maps to leave uncut.
    ways = [dict(way) for way in by_address.values()]
    for mark in ways[0] if ways else ():
        if all(mark in way for way in ways):
            return frozenset().union(*(way[mark] for way in ways))
    return frozenset()


class Reads(NamedTuple):
    """Which rows (tokens) and columns are read of the outputs of linear maps."""

    rows: set[tuple[Address, int]]
    columns: set[tuple[Address, int]]


@dataclass
class Surveyed:
    """A layer, and data for the rest of the pass.

    Attributes:
        site: its site.
        parts: q, k and v of both samples.
        first: those of the first sample; nothing if a window holds both samples.
        origins: the origins of q, k and v; with their linear maps only if all are linear maps of
            one head, as these keep their inputs in memory.
        reads: for q, k and v, the rows and columns of each linear map that they read.
        form: properties of the logits that all calls of a loop share.
        projected: whether a linear map of its output was seen.
    """

    site: capture.Site
    parts: tuple[Tensor, ...]
    first: tuple[Tensor, ...]
    origins: Sequence[Sequence[Origin]]
    reads: tuple[Reads, ...]
    form: tuple[object, ...]
    projected: bool = False

    def refuse(self, reason: str) -> None:
        """Set the layer to have no closed form and no norms."""
        self.site = replace(self.site, structure=None, reason=reason, inputs=())


class Surveyor(Tracer):
    """Analyses the attention calls of a pass over two samples.

    Attributes:
        batch: the two samples.
        uncut: linear maps that another pass should not cut at, to read more layers.
        scores: products of keys and a constant, which are logits: queries that all samples share.
        layers: the layers so far.

    Args:
        batch: the two samples.
        inner_maps: linear maps at which this pass does not cut the graph.
        loops: attention calls that form one layer.
    """

    def __init__(
        self, batch: Batch, inner_maps: frozenset[Address], loops: Sequence[Loop]
    ) -> None:
        super().__init__(inner_maps=inner_maps, loops=loops)
        self.batch = batch
        self.uncut: set[Address] = set()
        self.scores: set[Address] = set()
        self.layers: dict[Address, Surveyed] = {}
        # For each module: whether a call changes with the second sample, of all its calls.
        self._moved: dict[str, set[bool]] = {}

    def adopt(self, deeper: Surveyor) -> None:
        """Take over the layers that another pass, with fewer cuts, could read."""
        for address, layer in deeper.layers.items():
            before = self.layers.get(address)
            if before is None or before.site.closed_form or not layer.site.closed_form:
                continue
            inner = deeper.inner_maps - self.inner_maps
            layer.site = replace(layer.site, index=before.site.index, inner=inner)
            self.layers[address] = layer

    def notice_scores(self, logits: Tensor, inputs: Sequence[Tensor]) -> None:
        """Note products of tokens and a constant that are the logits of a softmax over tokens."""
        # A cotangent that is 1 in one row of the logits.
        query = torch.zeros_like(logits)
        query[..., logits.shape[-2] // 2, :] = 1.0
        for leaf in inputs:
            origin = self.origins.by_leaf.get(leaf)
            if origin is None or origin.linear is None or origin.address not in self.products:
                continue
            # A row of the logits is a column of the product: one query, and all tokens.
            source = graph.Probed(logits, (leaf,), origin.linear.outputs)
            is_read = source.pull(query) != 0
            columns = is_read.any(0).sum()
            rows = is_read.any(1).sum()
            if columns == 1 and rows > len(self.batch):
                self.scores.add(origin.address)

    def on_attention(self, call: AttentionCall, address: Address) -> None:
        """Analyse a call; if its map has other axes, leave it to `Uses`, which names it."""
        if not _has_axes_of_queries(call):
            return
        tensors = (call.q, call.k, call.v)
        origins = []  # of q, of k and of v
        for t in tensors:
            origins.append([leaf.origin for leaf in call.origins.leaves(t)])
        all_origins = [origin for part in origins for origin in part]
        analysis = analyse(call, self.batch)
        structure = analysis.structure
        arranged = call.arrange(analysis.layout, len(self.batch))
        loop = self.loops.get(address)
        addresses = (address,) if loop is None else loop.addresses
        scope = _find_scope(self.place.frames, call)
        site = capture.Site(
            index=len(self.layers),
            module=self._name_module(addresses),
            heads=arranged.q.shape[1],
            kinds=analysis.kinds,
            structure=structure,
            reason=analysis.reason,
            address=address,
            layout=analysis.layout,
            sources=frozenset(origin.address for origin in all_origins),
            explicit=isinstance(call.form, Explicit),
            scope=scope.name,
            inputs=tuple(scope.inputs),
            arguments=tuple(scope.name_inputs()),
            direct=structure is not None and _reads_inputs(scope, origins, structure),
            line=line_of_code(),
            loop=loop,
            learned=not origins[0] and _is_shared(arranged.q.detach()),
        )
        if structure is None:
            self.uncut |= find_inner_maps(all_origins)
            site = self._require_runnable(site, call, arranged)
        # Linear maps are needed to join calls of one head each; they keep their inputs in memory.
        are_linear = all(part and all(origin.linear for origin in part) for part in origins)
        if site.heads > 1 or not are_linear:
            for part in origins:
                part[:] = [replace(origin, linear=None) for origin in part]
        parts = (arranged.q.detach(), arranged.k.detach(), arranged.v.detach())
        self.layers[address] = Surveyed(
            site=site,
            parts=parts,
            first=tuple(t[: len(t) // 2] for t in parts),
            origins=origins,
            reads=tuple(_find_reads(call, t) for t in tensors),
            form=self._describe_form(call),
        )

    def _name_module(self, addresses: Sequence[Address]) -> str:
        """Return the path of the innermost module that makes all these calls."""
        for frame in reversed(self.place.frames):
            if all(frame.holds(address.module) for address in addresses):
                return frame.name
        raise AssertionError("the model itself makes every call")

    def _describe_form(self, call: AttentionCall) -> tuple[object, ...]:
        """Return the properties that calls of one loop share; () if this call can be in none."""
        if call.q.ndim not in (3, 4) or len(call.q) != len(self.batch):
            return ()
        form = call.form
        if isinstance(form, Fused):
            return call.q.ndim, form.scale, form.mask is None, form.causal
        return call.q.ndim, form.logits.shape[-1]

    def _require_runnable(
        self, site: capture.Site, call: AttentionCall, arranged: AttentionCall
    ) -> capture.Site:
        """Return the site of a call without closed form: without inputs if its module fails."""
        heads, tokens = arranged.q.shape[1:3]
        if call.output.dtype in HALF:
            return replace(site, inputs=())
        # The number of heads of a text model follows its number of tokens: without a closed
        # form, nothing else distinguishes the two axes.
        is_text = self.batch.x.ndim == 2
        if is_text and heads == self.batch.x.shape[1] != tokens:
            result: object = "its heads and tokens cannot be distinguished"
        else:
            layer = capture.make_layer(site, call, self.batch, self.place.frames)
            result = linearize_module(layer)
        if not isinstance(result, str):  # a linearisation, not an obstacle
            return site
        reason = f"{site.reason}; its norms cannot be computed numerically either: {result}"
        return replace(site, reason=reason, inputs=())

    def remember(self, linear: calls.Linear, result: Tensor) -> None:
        """If a linear map is the first that reads a layer's output, read W_O from it.

        A closed form is refused if W_O mixes what it takes for heads like tokens.
        """
        super().remember(linear, result)
        outputs = {leaf.origin.address: leaf.tensor for leaf in self.origins.leaves(linear.x)}
        layers = [self.layers[address] for address in outputs if address in self.layers]
        # The input must come from one layer alone; in a loop, from all its calls.
        if not layers or set(outputs) != set(layers[0].site.addresses):
            return
        layer = layers[0]
        site = layer.site

        def as_rows(*parts: Tensor) -> Tensor:
            """Convert the model's O, of each call of a loop, to (tokens, heads * d_v)."""
            if site.loop is None:
                t = parts[0]
            else:
                t = site.loop.cat(parts)
            t = site.layout.arrange(t, 2)
            return t.transpose(1, 2).flatten(2).flatten(0, 1)

        if layer.projected:  # the first linear map counts
            return
        layer.projected = True
        parts = tuple(outputs[address] for address in site.addresses)
        if site.structure is not None:
            source = graph.Probed(linear.inputs[None, None], parts, as_rows)
            structure = replace(site.structure, out=find_output_map(linear, source))
            layer.site = replace(site, structure=structure)
        if site.layout.queries != TOKENS:
            source = graph.Probed(linear.inputs, parts, as_rows)
            if _reads_as_tokens(source, site.heads):
                layer.refuse("its queries are heads by their maps, and tokens by W_O")

    def compare(self, call: AttentionCall, address: Address) -> None:
        """Check, in a pass with another second sample, that rows of the first stay the same."""
        layer = self.layers.get(address)
        if layer is None:
            return
        arranged = call.arrange(layer.site.layout, 2)
        parts = arranged.q, arranged.k, arranged.v
        if layer.site.sources:  # a call of constants changes with no sample
            # Note whether anything changes: a call of the first sample alone does not. Exactly, as
            # kernels round alike in two passes over batches of one size.
            has_moved = not all(map(torch.equal, layer.parts, parts))
            self._moved.setdefault(layer.site.module, set()).add(has_moved)
        if not len(layer.first[0]):  # no row is of the first sample alone
            return
        for before, t in zip(layer.first, parts, strict=True):
            if not agree(before, t[: len(before)], each=1):
                layer.refuse("its rows cannot be attributed to samples")

    def leave_loops(self) -> None:
        """Leave out modules that attend to one sample after the other.

        The companion of a sample changes only some of their calls.
        """
        loop_modules = {module for module, moved in self._moved.items() if len(moved) > 1}
        for layer in self.layers.values():
            if len(layer.first[0]) == 0:
                loop_modules.add(layer.site.module)
        others = [layer for layer in self.layers.values() if layer.site.module not in loop_modules]
        for index, layer in enumerate(others):
            layer.site = replace(layer.site, index=index)
        self.layers = {layer.site.address: layer for layer in others}

    def find_loops(self) -> list[Loop]:
        """Find calls that are heads, or chunks of the queries, of one attention."""
        loops: list[Loop] = []
        in_loops: set[Address] = set()
        # Calls with the same maps first: they may be chunks of queries (axis 2) or heads (axis 1).
        # Calls with maps of their own are heads only: nothing says that their queries are other
        # tokens.
        axes_by_test = {_share_maps: (1, 2), _share_values: (1,)}
        for are_alike, axes in axes_by_test.items():
            for group in self._group(are_alike):
                axis = _find_loop_axis(group)
                addresses = tuple(layer.site.address for layer in group)
                if axis is not None and axis in axes and in_loops.isdisjoint(addresses):
                    loops.append(Loop(addresses, axis))
                    in_loops.update(addresses)
        return loops

    def _group(self, are_alike: Callable[[Surveyed, Surveyed], bool]) -> list[list[Surveyed]]:
        """Return groups of two or more layers that are alike."""
        groups: list[list[Surveyed]] = []
        for layer in self.layers.values():
            for group in groups:
                if are_alike(group[0], layer):
                    group.append(layer)
                    break
            else:
                groups.append([layer])
        return [group for group in groups if len(group) > 1]

    def mark_parts(self) -> None:
        """Mark layers that are parts of one attention and could not be joined.

        The norm of a part of the queries is not the norm of a head.
        """
        for group in [*self._group(_share_input), *self._group(_share_maps)]:
            partners = tuple(layer.site.index for layer in group)
            for layer in group:
                layer.site = replace(layer.site, partners=partners)
                if _has_part_of_queries(layer, group):
                    layer.refuse("its queries are computed in several parts")


def _has_axes_of_queries(call: AttentionCall) -> bool:
    """Say whether the logits have one row per window, head and query."""
    if not isinstance(call.form, Explicit):
        return True
    rows = call.form.logits.shape[:-1]
    query_axes = call.q.shape[:-1]
    is_folded = len(rows) != len(query_axes) and rows.numel() == query_axes.numel()
    return rows == query_axes or is_folded


def _has_part_of_queries(layer: Surveyed, group: Sequence[Surveyed]) -> bool:
    """Say whether a call of a group has other queries than one with the same keys."""
    q, k, _ = layer.parts
    if q.shape[2] >= k.shape[2]:
        return False
    for other in group:
        other_q, other_k, _ = other.parts
        if torch.equal(other_k, k) and not torch.equal(other_q, q):
            return True
    return False


def _is_shared(q: Tensor) -> bool:
    """Say whether two samples have the same queries."""
    first, *other = q.chunk(2)
    return len(other) == 1 and torch.equal(first, other[0])


def _reads_as_tokens(source: graph.Probed, heads: int) -> bool:
    """Say whether a channel of the next map's input holds one channel of several heads."""
    first_channel = torch.zeros_like(source.t)
    first_channel[:, 0] = 1.0
    is_read = (source.pull(first_channel) != 0).any(0)
    is_read = is_read.view(heads, -1)  # (heads, channels of a head)
    read_heads = is_read.any(1).sum()
    read_channels = is_read.any(0).sum()
    return bool(read_heads > 1 and read_channels == 1)


def _reads_inputs(
    scope: Frame, origins: Sequence[Sequence[Origin]], structure: capture.Structure
) -> bool:
    """Say whether the projections of q and k read arguments of a module call directly.

    With two inputs, q and k must read different arguments.
    """
    arguments = {id(graph.root(value)) for value in scope.inputs.values()}
    sources = [id(origin.root) for part in origins[:2] for origin in part]
    are_apart = structure.joint or len(set(sources)) == len(sources)
    return are_apart and arguments.issuperset(sources)


def _find_reads(call: AttentionCall, t: Tensor) -> Reads:
    """Return the rows and columns of the linear maps that q, k or v depends on."""
    reads = Reads(set(), set())
    for leaf, origin in call.origins.leaves(t):
        if origin.linear is None:
            continue
        is_read = graph.Probed(t, (leaf,), origin.linear.outputs).read != 0
        for row in is_read.any(1).nonzero()[:, 0].tolist():
            reads.rows.add((origin.address, row))
        for column in is_read.any(0).nonzero()[:, 0].tolist():
            reads.columns.add((origin.address, column))
    return reads


def _find_loop_axis(group: Sequence[Surveyed]) -> int | None:
    """Return the axis along which calls are parts of one attention: 1 for heads, 2 for queries."""
    form = group[0].form
    if not form or any(layer.form != form for layer in group):
        return None
    shapes = []
    for layer in group:
        shapes.append([t.shape for t in layer.first])
    # What each call reads: lists of calls, for q, for k and for v.
    rows = []
    columns = []
    for i in range(3):
        rows.append([layer.reads[i].rows for layer in group])
        columns.append([layer.reads[i].columns for layer in group])
    # Heads read columns of their own.
    own_q, own_k, own_v = map(_are_disjoint, columns)
    are_heads = own_q and own_k and own_v
    # Calls of one head each may share keys; heads of several calls that share keys would repeat
    # them in another order than groups do.
    if all(q[:2] == (1, 1) for q, _, _ in shapes):
        are_heads = own_q or own_k
    # Heads read the same tokens, by index: each head may have linear maps of its own.
    tokens = []
    for part in rows:
        tokens.append([sorted(i for _, i in reads) for reads in part])
    if are_heads and _are_same(shapes) and all(map(_are_same, tokens)):
        return 1
    # Chunks of queries read rows of their own, and share keys and values.
    share_keys = all(map(_are_same, rows[1:] + columns[1:]))
    query_shapes = {(q[:2], q[3]) for q, _, _ in shapes}  # but for the number of queries
    is_causal = form[-1] is True  # counts along the queries of each call
    if share_keys and _are_disjoint(rows[0]) and len(query_shapes) == 1 and not is_causal:
        return 2
    return None


def _are_same(values: Sequence[Any]) -> bool:
    """Say whether all values are equal."""
    return all(value == values[0] for value in values)


def _are_disjoint(sets: Sequence[set[tuple[Address, int]]]) -> bool:
    """Say whether no two of the sets have an element in common."""
    return len(set().union(*sets)) == sum(map(len, sets))


def _share_maps(a: Surveyed, b: Surveyed) -> bool:
    """Say whether two calls share the modules of their q, and the maps of their k."""
    modules = []
    maps = []
    for layer in (a, b):
        q, k, _ = layer.origins
        modules.append({(o.address.module, o.address.op, o.root) for o in q})
        maps.append({origin.address for origin in k})
    has_maps = bool(modules[0] and maps[0])
    return has_maps and modules[0] == modules[1] and maps[0] == maps[1]


def _share_input(a: Surveyed, b: Surveyed) -> bool:
    """Say whether one line of code makes two calls, of one head each, of the same tensor."""
    roots = []
    for layer in (a, b):
        roots.append({o.root for o in layer.origins[0] if o.linear})
    return a.site.line == b.site.line and bool(roots[0]) and roots[0] == roots[1]


def _share_values(a: Surveyed, b: Surveyed) -> bool:
    """Say whether two calls may be heads that a loop computes by maps of their own."""
    shapes = [t.shape for t in a.first]
    other_shapes = [t.shape for t in b.first]
    if not a.form or a.form != b.form or shapes != other_shapes:
        return False
    for x, y in zip(a.origins, b.origins, strict=True):
        if len(x) != len(y) or not all(map(Origin.reads_same, x, y)):
            return False
    return True


def _find_scope(frames: Sequence[Frame], call: AttentionCall) -> Frame:
    """Return the innermost module call that contains an attention and its projections.

    Everything else that q, k, v and the logits depend on must enter it as an argument.
    """
    origins = [leaf.origin for leaf in call.origins.leaves(call.q, call.k, call.v)]
    maps = [origin for origin in origins if origin.linear]
    modules = _list_projection_modules(call, maps)
    for frame in reversed(frames):
        if all(map(frame.holds, modules)) and _is_complete(frame, call, origins):
            return frame
    return frames[0]


def _is_complete(frame: Frame, call: AttentionCall, origins: Sequence[Origin]) -> bool:
    """Say whether an attention depends on a module call's inputs, and its own parts, only.

    Args:
        frame: the module call.
        call: the attention.
        origins: the origins of its q, k and v.
    """
    # Walk back from q, k and v to the inputs of the module call.
    inputs = [*frame.inputs.values()]
    stop = [t.grad_fn for t in inputs if t.grad_fn is not None]
    walks = [graph.leaves(t, stop) for t in (call.q, call.k, call.v)]
    # A module that gets q, k and v one by one contains none of their maps, so it is not the
    # attention module.
    has_map = any(frame.holds(origin.address.module) for origin in origins if origin.linear)
    stops_met = {node for _, hits in walks for node in hits}
    if origins and not has_map and len(stops_met) != 1:
        return False
    if isinstance(call.form, Explicit):
        walks.append(graph.leaves(call.form.logits, stop))
    # All other leaves must be made inside of the module.
    input_ids = {id(t) for t in inputs}
    others = [t for leaves, _ in walks for t in leaves if id(t) not in input_ids]
    other_origins = [call.origins.by_leaf.get(t) for t in others]
    return all(frame.holds(o.address.module) for o in other_origins if o is not None)


def _list_projection_modules(call: AttentionCall, maps: Sequence[Origin]) -> list[str]:
    """Return the modules of the linear maps whose outputs alone q, k or v is made from.

    Not of values that such a map reads: they come from no map of this layer.
    """
    modules = []
    for t in (call.q, call.k, call.v):
        leaves = call.origins.leaves(t)
        is_input = any(origin.root is graph.root(t) for origin in maps)
        if len(leaves) == 1 and leaves[0].origin.linear and not is_input:
            modules.append(leaves[0].origin.address.module)
    return modules
