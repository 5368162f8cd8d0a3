"""One pass of a survey: analyse every attention call, with its output projection and module.

With a compressed key (x -> latent -> norm -> key) or a shared bottleneck, q, k and v read three
tensors, each a token-wise function of an earlier one. `find_inner_maps` finds their common input,
and a second pass does not cut the graph at the maps in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import first_line, of_machine
from lipaudit.models import graph
from lipaudit.models.attention import calls, capture, projections
from lipaudit.models.attention.calls import (
    TOKENS,
    Address,
    AttentionCall,
    AxisLayout,
    Explicit,
    Fused,
    Loop,
    Origin,
)
from lipaudit.models.attention.layouts import find_layouts, guess_layouts
from lipaudit.models.attention.logits import read_product
from lipaudit.models.attention.numeric import linearize_module
from lipaudit.models.attention.projections import NotClosedForm, ProjectionForm
from lipaudit.models.attention.trace import Frame, Tracer
from lipaudit.models.attention.uses import line_of_code
from lipaudit.models.precision import keep
from lipaudit.models.requirements import agree
from lipaudit.models.sources.weights import HALF
from lipaudit.theory.head_norms import forward_error


def find_inner_maps(origins: Iterable[Origin]) -> frozenset[Address]:
    """Return the linear maps to leave uncut so that all of `origins` read one tensor.

    The nearest such tensor counts. Empty if there is none, or if they already read one tensor.
    """
    way_of = {origin.address: origin.way for origin in origins if origin.linear}
    ways = list(way_of.values())
    for mark, _ in ways[0] if ways else ():
        passed = []
        for way in ways:
            passed.append([maps for other, maps in way if other is mark])
        if all(passed):
            return frozenset(address for maps in passed for address in maps[0])
    return frozenset()


_Analysis = tuple[AxisLayout, tuple[str, ...], capture.Structure | None, str | None]
"""AxisLayout, kinds, structure and reason of a call (see `Site`)."""


def analyse(call: AttentionCall, batch: Batch) -> _Analysis:
    """Analyse a call in the first layout with a closed form, else in the likeliest."""
    usual = guess_layouts(call.q, len(batch))
    if call.output.dtype in HALF:
        kind = str(call.output.dtype).removeprefix("torch.")
        reason = f"it is computed in {kind}; switch autocast off, or use --dtype float64"
        return usual[0], ("rounded",) * 3, None, reason
    found = _try_layouts(usual, call, batch)
    if found[2] is not None:
        return found
    # In a wrong layout there is no closed form: tokens of windows would be mixed.
    others = find_layouts(call, len(batch))
    if others:
        return _try_layouts(others, call, batch)
    return found


def _try_layouts(layouts: Sequence[AxisLayout], call: AttentionCall, batch: Batch) -> _Analysis:
    """Return the analysis of the first layout with a closed form, else that of the first one."""
    tried: list[_Analysis] = []
    for layout in layouts:
        kinds: list[str] = []
        try:
            structure = _read_layout(call.arrange(layout, len(batch)), batch, kinds)
        except NotClosedForm as obstacle:
            tried.append((layout, tuple(kinds), None, obstacle.reason))
        except RuntimeError as error:
            if of_machine(error):
                raise
            # The graph comes from the model: a write in place, an op without a derivative. In any
            # such case we cannot vouch for a closed form of this layer; other layers may have one.
            reason = f"its graph cannot be differentiated: {first_line(error)}"
            tried.append((layout, ("unread",) * 3, None, reason))
        else:
            return layout, tuple(kinds), structure, None
    return tried[0]


def _read_layout(call: AttentionCall, batch: Batch, kinds: list[str]) -> capture.Structure:
    """Return the structure of a call with canonical axes, and fill in the kinds of q, k and v.

    Raises:
        NotClosedForm: there is no closed form.
        RuntimeError: its graph cannot be differentiated.
    """
    forms: list[ProjectionForm | None] = []
    problems = []
    tensors = (call.q, call.k, call.v)
    leaves = [*map(call.origins.leaves, tensors)]
    for name, t, behind in zip("qkv", tensors, leaves, strict=True):
        try:
            form = projections.decode(t, behind, len(batch))
            forms.append(form)
            kinds.append("constant" if form is None else form.kind)
        except NotClosedForm as obstacle:
            problems.append(f"{name} {obstacle.reason}")
            kinds.append(obstacle.kind)
    # `Linear(d, d)` on (B, N, H, d), common in tutorials, looks like N windows of H tokens.
    divided = any(leaf.origin.divided for behind in leaves for leaf in behind)
    if divided and (problems or len(call.q) != len(batch)):
        kinds[:] = ["shared"] * 3
        raise NotClosedForm("one linear map is applied to each head separately")
    try:
        attention, relative = read_product(call, batch, None)
    except NotClosedForm as obstacle:
        problems.append(obstacle.reason)
    if problems:
        raise NotClosedForm("; ".join(problems))
    q, k, v = forms
    if k is None or v is None:
        raise NotClosedForm("its keys or values are constants, or have no gradient")
    # All that one part reads is the same: its first linear map stands for it.
    of_k, of_v = (behind[0].origin for behind in leaves[1:])
    if not (of_k.reads_same(of_v) and k.index.is_same(v.index)):
        raise NotClosedForm("its keys and values read different inputs")
    joint = False
    if q is not None:
        of_q = leaves[0][0].origin
        joint = of_q.reads_same(of_k) and q.index.is_same(k.index)
        if not joint and _is_reordered(q.index.read(of_q), k.index.read(of_k)):
            raise NotClosedForm("its keys are the tokens of its queries in another order")
    structure = capture.Structure(q, k, v, joint, out=None)
    heads, parts = capture.add_inputs(structure, attention, call, batch, relative)
    if forward_error(heads).amax() > capture.HOPELESS:
        raise NotClosedForm(
            f"its logits are so large that {call.q.dtype} cannot resolve its attention map; "
            "use --dtype float64"
        )
    if not capture.matches_autograd(heads, parts, call):
        raise NotClosedForm("its closed form disagrees with autograd")
    return structure


def _is_reordered(one: Tensor, other: Tensor) -> bool:
    """Say whether queries and keys read the same tokens in another order, at a generic point.

    Rolled or flipped keys are not a second input: norms would be those of cross-attention.
    """
    if one.shape != other.shape or torch.equal(one, other):
        return False
    tokens = torch.unique(one, dim=0)
    other_tokens = torch.unique(other, dim=0)
    return torch.equal(tokens, other_tokens)


def find_output_map(linear: calls.Linear, source: graph.Probed) -> capture.OutputMap | None:
    """Return W_O if a linear map reads the concatenated heads, only permuted and scaled.

    Args:
        linear: a linear map behind the attention.
        source: its input as a function of the attention's output.
    """
    rows, width = source.as_rows(*source.leaves).shape
    columns = torch.arange(width, device=source.t.device)[None]
    try:
        index = projections.find_token_rows(source)
    except NotClosedForm:
        return None
    plain = index.numel() == rows and graph.is_affine(source.t)
    affine = None
    if plain:
        affine = graph.find_affine_map(source, index, columns)
    if affine is None:
        return None
    # Each channel of the input must be one channel of the heads: a permutation times factors.
    mix = affine[0][0]
    order = mix.abs().argmax(0)
    gain = mix.gather(0, order[None])[0]
    one_each = bool(((mix != 0).sum(0) == 1).all())
    if not one_each or int(order.bincount().amax()) > 1:
        return None
    return capture.OutputMap(keep(linear.weight), order, gain)


_Reads = tuple[set[tuple[Address, int]], set[tuple[Address, int]]]
"""The rows (tokens) and the columns that are read of the outputs of linear maps."""


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
    reads: tuple[_Reads, ...]
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
        self._moved: dict[str, set[bool]] = {}  # by the companion of a sample

    def adopt(self, deeper: Surveyor) -> None:
        """Take over the layers that another pass, with fewer cuts, could read."""
        for address, again in deeper.layers.items():
            before = self.layers.get(address)
            if before is None or before.site.closed_form or not again.site.closed_form:
                continue
            inner = deeper.inner_maps - self.inner_maps
            again.site = replace(again.site, index=before.site.index, inner=inner)
            self.layers[address] = again

    def notice_scores(self, logits: Tensor, inputs: Sequence[Tensor]) -> None:
        """Note products of tokens and a constant that a softmax over the tokens takes."""
        query = torch.zeros_like(logits)
        query[..., logits.shape[-2] // 2, :] = 1.0
        for leaf in inputs:
            origin = self.origins.by_leaf.get(leaf)
            if origin is None or origin.linear is None or origin.address not in self.products:
                continue
            # A row of the logits is a column of the product: one query, and all tokens.
            source = graph.Probed(logits, (leaf,), origin.linear.outputs)
            read = source.pull(query) != 0
            columns = read.any(0).sum()
            rows = read.any(1).sum()
            if columns == 1 and rows > len(self.batch):
                self.scores.add(origin.address)

    def on_attention(self, call: AttentionCall, address: Address) -> None:
        """Analyse a call; if its map has other axes, leave it to `Uses`, which names it."""
        if not _has_axes_of_queries(call):
            return
        tensors = (call.q, call.k, call.v)
        origins = []
        for t in tensors:
            origins.append([leaf.origin for leaf in call.origins.leaves(t)])
        every = [origin for part in origins for origin in part]
        layout, kinds, structure, reason = analyse(call, self.batch)
        arranged = call.arrange(layout, len(self.batch))
        loop = self.loops.get(address)
        addresses = (address,) if loop is None else loop.addresses
        scope = _find_scope(self.place.frames, call)
        direct = False
        if structure is not None:
            # The projections read the inputs of the module, each side its own.
            given = {id(graph.root(value)) for value in scope.inputs.values()}
            read = [id(origin.root) for part in origins[:2] for origin in part]
            apart = structure.joint or len(set(read)) == len(read)
            direct = apart and given.issuperset(read)
        site = capture.Site(
            index=len(self.layers),
            module=self._name_module(addresses),
            heads=arranged.q.shape[1],
            kinds=kinds,
            structure=structure,
            reason=reason,
            address=address,
            layout=layout,
            sources=frozenset(origin.address for origin in every),
            explicit=isinstance(call.form, Explicit),
            scope=scope.name,
            inputs=tuple(scope.inputs),
            arguments=tuple(scope.name_inputs()),
            direct=direct,
            line=line_of_code(),
            loop=loop,
            learned=not origins[0] and _is_shared(arranged.q.detach()),
        )
        if structure is None:
            self.uncut |= find_inner_maps(every)
            site = self._require_runnable(site, call, arranged)
        linear = all(part and all(origin.linear for origin in part) for part in origins)
        if site.heads > 1 or not linear:
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
        """Return what calls of one loop have in common; nothing if it can be no part of one."""
        if call.q.ndim not in (3, 4) or len(call.q) != len(self.batch):
            return ()
        form = call.form
        if isinstance(form, Fused):
            return call.q.ndim, form.scale, form.mask is None, form.causal
        return call.q.ndim, form.logits.shape[-1]

    def _require_runnable(
        self, site: capture.Site, call: AttentionCall, arranged: AttentionCall
    ) -> capture.Site:
        """Return the site of a call without closed form; without inputs if its module fails."""
        heads, tokens = arranged.q.shape[1:3]
        if call.output.dtype in HALF:
            return replace(site, inputs=())
        # The number of heads of a text model follows its number of tokens: without a closed
        # form, nothing else distinguishes the two axes.
        is_text = self.batch.x.ndim == 2
        if is_text and heads == self.batch.x.shape[1] != tokens:
            why: object = "its heads and tokens cannot be distinguished"
        else:
            layer = capture.make_layer(site, call, self.batch, self.place.frames)
            why = linearize_module(layer)
        if not isinstance(why, str):
            return site
        reason = f"{site.reason}; its norms cannot be computed numerically either: {why}"
        return replace(site, reason=reason, inputs=())

    def remember(self, linear: calls.Linear, result: Tensor) -> None:
        """Check also whether a linear map is the output projection of a layer."""
        super().remember(linear, result)
        behind = self.origins.leaves(linear.x)
        outputs = {leaf.origin.address: leaf.tensor for leaf in behind}
        layers = [self.layers[address] for address in outputs if address in self.layers]
        layer = layers[0] if layers else None
        # In a loop, the joined output of all calls is projected.
        if layer is None or set(outputs) != set(layer.site.addresses):
            return
        site = layer.site

        def as_rows(*parts: Tensor) -> Tensor:
            """Convert the model's O, of each call of a loop, to (tokens, heads * d_v)."""
            if site.loop is None:
                t = parts[0]
            else:
                t = site.loop.cat(parts)
            t = site.layout.arrange(t, 2)
            return t.transpose(1, 2).flatten(2).flatten(0, 1)

        if site.structure is not None and not layer.projected:
            parts = tuple(outputs[a] for a in site.addresses)
            source = graph.Probed(linear.inputs[None, None], parts, as_rows)
            structure = replace(site.structure, out=find_output_map(linear, source))
            layer.site = replace(site, structure=structure)
        if site.layout.queries != TOKENS and not layer.projected:
            source = graph.Probed(linear.inputs, tuple(outputs.values()), as_rows)
            if _reads_as_tokens(source, site.heads):
                layer.refuse("its queries are heads by their maps, and tokens by W_O")
        layer.projected = True

    def compare(self, call: AttentionCall, address: Address) -> None:
        """Check in a second pass that a layer's rows belong to their samples."""
        layer = self.layers.get(address)
        if layer is None:
            return
        arranged = call.arrange(layer.site.layout, 2)
        parts = arranged.q, arranged.k, arranged.v
        if layer.site.sources:  # a call of constants changes with no sample
            # A row with both samples changes with one of them, maybe by less than any tolerance.
            # Exactly: kernels round alike in two passes over batches of one size.
            moved = not all(map(torch.equal, layer.parts, parts))
            self._moved.setdefault(layer.site.module, set()).add(moved)
        if not len(layer.first[0]):
            return
        for before, t in zip(layer.first, parts, strict=True):
            if not agree(before, t[: len(before)], each=1):
                layer.refuse("its rows cannot be attributed to samples")

    def leave_loops(self) -> None:
        """Leave out modules that attend to one sample after the other.

        The companion of a sample changes only some of their calls.
        """
        alone = {module for module, moved in self._moved.items() if len(moved) > 1}
        for layer in self.layers.values():
            if len(layer.first[0]) == 0:
                alone.add(layer.site.module)
        kept = [layer for layer in self.layers.values() if layer.site.module not in alone]
        for index, layer in enumerate(kept):
            layer.site = replace(layer.site, index=index)
        self.layers = {layer.site.address: layer for layer in kept}

    def find_loops(self) -> list[Loop]:
        """Find calls that are heads, or chunks of the queries, of one attention."""
        loops: list[Loop] = []
        # Chunks of a head first: they may be like those of a head with maps of its own. Calls with
        # maps of their own are heads only: nothing says that their queries are other tokens.
        axes_of_groups = {_share_maps: (1, 2), _share_values: (1,)}
        for alike, axes in axes_of_groups.items():
            for group in self._group(alike):
                axis = _find_loop_axis(group)
                addresses = tuple(g.site.address for g in group)
                known = {address for loop in loops for address in loop.addresses}
                if axis is not None and axis in axes and known.isdisjoint(addresses):
                    loops.append(Loop(addresses, axis))
        return loops

    def _group(self, alike: Callable[[Surveyed, Surveyed], bool]) -> list[list[Surveyed]]:
        """Return the layers that are alike; those that are alike to no other are left out."""
        groups: list[list[Surveyed]] = []
        for layer in self.layers.values():
            for group in groups:
                if alike(group[0], layer):
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
    wanted = call.q.shape[:-1]
    folded = len(rows) != len(wanted) and rows.numel() == wanted.numel()
    return rows == wanted or folded


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
    unit = torch.zeros_like(source.t)
    unit[:, 0] = 1.0
    columns = (source.pull(unit) != 0).any(0)
    columns = columns.view(heads, -1)
    read_heads = columns.any(1).sum()
    read_channels = columns.any(0).sum()
    return bool(read_heads > 1 and read_channels == 1)


def _find_reads(call: AttentionCall, t: Tensor) -> _Reads:
    """Return the rows and columns of the linear maps that q, k or v depends on."""
    rows: set[tuple[Address, int]] = set()
    columns: set[tuple[Address, int]] = set()
    for leaf, origin in call.origins.leaves(t):
        if origin.linear is None:
            continue
        read = graph.Probed(t, (leaf,), origin.linear.outputs).read != 0
        for row in read.any(1).nonzero()[:, 0].tolist():
            rows.add((origin.address, row))
        for column in read.any(0).nonzero()[:, 0].tolist():
            columns.add((origin.address, column))
    return rows, columns


def _find_loop_axis(group: Sequence[Surveyed]) -> int | None:
    """Return the axis along which calls are parts of one attention: 1 for heads, 2 for queries."""
    form = group[0].form
    if not form or any(layer.form != form for layer in group):
        return None
    shapes = []
    for layer in group:
        shapes.append([t.shape for t in layer.first])
    # Of q, k and v: what each call reads.
    rows = []
    columns = []
    for i in range(3):
        rows.append([layer.reads[i][0] for layer in group])
        columns.append([layer.reads[i][1] for layer in group])
    # Heads read columns of their own; chunks of queries read rows of their own.
    own_q, own_k, own_v = map(_are_apart, columns)
    # Heads of several calls that share keys would repeat them in another order than groups do.
    single = all(shape[0][:2] == (1, 1) for shape in shapes)
    whole = own_q and own_k and own_v
    if single:
        whole = own_q or own_k
    # Indices of tokens, not the linear maps that make them: each head may have maps of its own.
    tokens = []
    for part in rows:
        tokens.append([sorted(i for _, i in each) for each in part])
    if whole and _are_same(shapes) and all(map(_are_same, tokens)):
        return 1
    shared = all(map(_are_same, rows[1:] + columns[1:]))
    widths = {(q[:2], q[3]) for q, _, _ in shapes}
    causal = form[-1] is True
    if shared and _are_apart(rows[0]) and len(widths) == 1 and not causal:
        return 2
    return None


def _are_same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _are_apart(reads: Sequence[set[tuple[Address, int]]]) -> bool:
    return len(set().union(*reads)) == sum(map(len, reads))


def _share_maps(a: Surveyed, b: Surveyed) -> bool:
    """Say whether two calls share the modules of their q, and the maps of their k."""
    modules = []
    maps = []
    for layer in (a, b):
        q, k, _ = layer.origins
        modules.append({(o.address.module, o.address.op, o.root) for o in q})
        maps.append({origin.address for origin in k})
    known = bool(modules[0] and maps[0])
    return known and modules[0] == modules[1] and maps[0] == maps[1]


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
    tensors = call.q, call.k, call.v
    behind = [(graph.root(t), call.origins.leaves(t)) for t in tensors]
    made_by = [origin for _, leaves in behind for _, origin in leaves]
    maps = [origin for origin in made_by if origin.linear]
    # Values that are the input of the keys' map come from no map of this layer.
    projections = []
    for mark, leaves in behind:
        if len(leaves) == 1 and leaves[0].origin.linear and all(o.root is not mark for o in maps):
            projections.append(leaves[0].origin.address.module)
    for frame in reversed(frames):
        if not all(map(frame.holds, projections)):
            continue
        given = [*frame.inputs.values()]
        stop = [t.grad_fn for t in given if t.grad_fn is not None]
        walks = [graph.leaves(t, stop) for t in tensors]
        # A module that gets q, k and v one by one contains none of their maps, so it is not the
        # attention module.
        held = any(frame.holds(origin.address.module) for origin in maps)
        if made_by and not held and len({node for _, met in walks for node in met}) != 1:
            continue
        if isinstance(call.form, Explicit):
            walks.append(graph.leaves(call.form.logits, stop))
        known = {id(t) for t in given}
        ends = [t for leaves, _ in walks for t in leaves if id(t) not in known]
        beside = [call.origins.by_leaf.get(t) for t in ends]
        if all(frame.holds(origin.address.module) for origin in beside if origin is not None):
            return frame
    return frames[0]
