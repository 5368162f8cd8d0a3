"""One pass of a survey: find every layer, with its output projection and its module.

With a compressed key (x -> latent -> norm -> key) or a shared bottleneck, q, k and v read three
tensors, each a token-wise function of an earlier one. `find_inner_maps` finds their common input,
and a second pass does not cut the graph at the maps in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.models import graph
from lipaudit.models.attention import calls, capture
from lipaudit.models.attention.analysis import Analysis, analyse, find_output_map
from lipaudit.models.attention.calls import (
    TOKENS,
    Address,
    AttentionCall,
    Explicit,
    Fused,
    Loop,
    Origin,
)
from lipaudit.models.attention.loops import Reads, Surveyed
from lipaudit.models.attention.numeric import linearize_module
from lipaudit.models.attention.scope import find_scope
from lipaudit.models.attention.trace import Frame, Tracer
from lipaudit.models.attention.uses import line_of_code
from lipaudit.models.precision import HALF
from lipaudit.models.requirements import agree


def find_inner_maps(origins: Iterable[Origin]) -> frozenset[Address]:
    """Return the linear maps to leave uncut, so that q, k and v become functions of one tensor.

    A pass cuts the autograd graph at linear maps. If the graph stays whole at some of them, q, k
    and v are functions of an earlier tensor. The nearest tensor that all three have in common is
    chosen. The result is empty if there is no such tensor, or if no map need be left uncut.

    Example: k = norm(x A) B is made from a latent, and v = x C. The map B reads norm(x A), and C
    reads x. If B is left uncut, k starts at the map A. So both k and v start at maps of x: the
    result is {B}.

    In the code, `by_map` has for each of these maps the tensors behind it, the nearest first, and
    for each tensor the maps to leave uncut so that q, k or v starts there:

        {B: {norm(x A): (), x: (B,)}, C: {x: ()}}

    Args:
        origins: the linear maps behind q, k and v.
    """
    # Tensors are given by objects that identify them (`graph.root`). Origins that are no linear
    # map, such as the model's input, have no map to leave uncut.
    by_map = {origin.address: dict(origin.ancestors) for origin in origins if origin.linear}
    # A common tensor is also an ancestor of the first map: try the ancestors of this map in turn.
    for tensor in next(iter(by_map.values()), ()):
        if all(tensor in ancestors for ancestors in by_map.values()):
            return frozenset().union(*(ancestors[tensor] for ancestors in by_map.values()))
    return frozenset()


class Surveyor(Tracer):
    """Analyses the attention calls of a forward pass over two samples.

    Attributes:
        batch: the two samples.
        next_uncut: linear maps that another pass should leave uncut, to read more layers.
        scores: products of keys and learned queries (constants). They look like linear maps of the
            keys, but are logits.
        layers: the layers so far.

    Args:
        batch: the two samples.
        uncut_maps: linear maps at which this pass does not cut the graph.
        loops: attention calls that form one layer.
    """

    def __init__(
        self, batch: Batch, uncut_maps: frozenset[Address], loops: Sequence[Loop]
    ) -> None:
        super().__init__(uncut_maps=uncut_maps, loops=loops)
        self.batch = batch
        # A pass cuts the autograd graph at linear maps: q, k and v start at the last maps before
        # them. These are the maps at which a further pass should not cut, to read more layers.
        self.next_uncut: set[Address] = set()
        # Products of keys with learned queries: they look like linear maps, but are logits.
        self.scores: set[Address] = set()
        self.layers: dict[Address, Surveyed] = {}
        # For each module: True if q, k or v of some call change when the second sample is replaced
        # by another one, False if they stay equal in some call. Both, if the module attends to one
        # sample after the other: `leave_loops` then removes its calls.
        self._changes: dict[str, set[bool]] = {}

    def adopt(self, deeper: Surveyor) -> None:
        """Take over the layers that have a closed form only in a second pass, `deeper`.

        An example is a compressed key, k = norm(x A) B. A pass cuts the autograd graph at linear
        maps: it takes their outputs for leaves, and q, k and v for functions of the nearest ones.
        A closed form of the layer's Jacobian requires that these maps read one tensor, but B reads
        norm(x A). The second pass does not cut at B, so that k is a function of x A, and A reads x
        as the maps of q and v do.

        Args:
            deeper: the surveyor of the second pass, after this pass.
        """
        for address, layer in deeper.layers.items():
            before = self.layers.get(address)
            # Take a layer only if this pass found no closed form for it, and the second one did.
            if before is None or before.site.closed_form or not layer.site.closed_form:
                continue
            # The maps that only the second pass left uncut, such as B.
            inner = deeper.uncut_maps - self.uncut_maps
            layer.site = replace(layer.site, index=before.site.index, inner=inner)
            self.layers[address] = layer

    def notice_scores(self, logits: Tensor, inputs: Sequence[Tensor]) -> None:
        """Note a product of keys and learned queries, in the logits of a softmax without q k^T.

        Learned queries are constants. So the product was taken for a linear map of the keys, and
        the graph was cut there: its output is a leaf.

        Args:
            logits: the argument of the softmax.
            inputs: the leaves that it depends on.
        """
        one_row = graph.mark_row(logits)  # a cotangent of the logits of one query
        for leaf in inputs:
            origin = self.origins.by_leaf.get(leaf)
            if origin is None or origin.linear is None or origin.address not in self.products:
                continue
            # If the output of the map, (tokens, columns), is keys times queries, one row of the
            # logits depends on one column (its query) at all tokens. For any other map, the row
            # depends on several columns, or on one token of each sample.
            source = graph.Probed(logits, (leaf,), origin.linear.outputs)
            is_read = source.pull(one_row) != 0  # (tokens of all samples, columns)
            columns = is_read.any(0).sum()
            tokens = is_read.any(1).sum()
            if columns == 1 and tokens > len(self.batch):
                self.scores.add(origin.address)

    def on_attention(self, call: AttentionCall, address: Address) -> None:
        """Analyse an attention call as a layer of the model, and note it in `layers`."""
        if not _has_axes_of_queries(call):  # no layer; the survey warns of it, counted by `Uses`
            return
        if not call.q.numel() or not call.k.numel():  # an empty window, without queries or keys
            return
        tensors = (call.q, call.k, call.v)
        # The linear maps behind q, behind k and behind v.
        origins = [[leaf.origin for leaf in call.origins.find_leaves(t)] for t in tensors]
        analysis = analyse(call, self.batch)
        arranged = call.arrange(analysis.layout, len(self.batch))
        # q, k and v, (windows, heads, tokens, width). The first half of the windows belongs to the
        # first of two samples: it is empty if a single window holds both samples. `compare` and
        # `leave_loops` read it, after a pass with another second sample.
        parts = (arranged.q.detach(), arranged.k.detach(), arranged.v.detach())
        of_first_sample = tuple(t[: len(t) // 2] for t in parts)
        site = self._make_site(call, address, analysis, origins, parts[0])
        if site.structure is None:  # a pass that cuts at none of these maps may find a closed form
            self.next_uncut |= find_inner_maps(chain(*origins))
            site = self._require_runnable(site, call)
        _free_maps(origins, site.heads)
        self.layers[address] = Surveyed(
            site=site,
            parts=parts,
            first=of_first_sample,
            origins=origins,
            reads=tuple(_find_reads(call, t) for t in tensors),
            form=self._describe_form(call),
        )

    def _make_site(
        self,
        call: AttentionCall,
        address: Address,
        analysis: Analysis,
        origins: Sequence[Sequence[Origin]],
        q: Tensor,
    ) -> capture.Site:
        """Return the site of an attention call, while the model runs it.

        Args:
            call: the call.
            address: its module and its number there, which identify the call in every pass.
            analysis: its axes and its closed form, if any.
            origins: the linear maps behind q, k and v.
            q: the queries, (windows, heads, tokens, width).
        """
        structure = analysis.structure
        loop = self.loops.get(address)  # the calls that form one layer, if the model makes several
        addresses = (address,) if loop is None else loop.addresses
        # The innermost module call that contains the attention and its projections.
        scope = find_scope(self.call_stack.frames, call)
        return capture.Site(
            index=len(self.layers),
            module=self._name_module(addresses),
            heads=q.shape[1],
            kinds=analysis.kinds,
            structure=structure,
            reason=analysis.reason,
            address=address,
            layout=analysis.layout,
            sources=frozenset(origin.address for origin in chain(*origins)),
            explicit=isinstance(call.form, Explicit),
            scope=scope.name,
            inputs=tuple(scope.inputs),
            arguments=tuple(scope.name_inputs()),
            direct=structure is not None and _reads_inputs(scope, origins, structure),
            line=line_of_code(),
            loop=loop,
            learned=not origins[0] and _is_shared(q),  # no linear map, and the same in all samples
        )

    def _name_module(self, addresses: Sequence[Address]) -> str:
        """Return the path of the innermost module that contains all these calls."""
        for frame in reversed(self.call_stack.frames):
            if all(frame.holds(address.module) for address in addresses):
                return frame.name
        raise AssertionError("the model itself makes every call")

    def _describe_form(self, call: AttentionCall) -> tuple[object, ...]:
        """Return properties of the logits that all calls of a loop over heads have in common.

        They are compared, to find the calls that form one layer. Empty if this call cannot be a
        part of a loop.
        """
        # In a loop, q is (samples, tokens, width) or (samples, heads, tokens, width).
        if call.q.ndim not in (3, 4) or len(call.q) != len(self.batch):
            return ()
        form = call.form
        if isinstance(form, Fused):
            return call.q.ndim, form.scale, form.mask is None, form.causal
        return call.q.ndim, form.logits.shape[-1]

    def _require_runnable(self, site: capture.Site, call: AttentionCall) -> capture.Site:
        """Return a layer without closed form, without inputs if no numerical norm is possible.

        Numerical norms need a module that can run again on its own, and be differentiated. If it
        cannot, the layer gets no inputs, so that no norm is computed, and the obstacle is added to
        its reason. In half precision no layer gets inputs, and the reason stays as it is.

        Args:
            site: the layer.
            call: its attention call.
        """
        if call.output.dtype in HALF:  # too coarse for norms
            return replace(site, inputs=())
        layer = capture.make_layer(site, call, self.batch, self.call_stack.frames)
        if self._may_confuse_heads(layer.call.q):
            obstacle = "its heads and tokens cannot be distinguished"
        else:
            result = linearize_module(layer)  # the linearisation, or a text that says why not
            if not isinstance(result, str):
                return site
            obstacle = result
        reason = f"{site.reason}; its norms cannot be computed numerically either: {obstacle}"
        return replace(site, reason=reason, inputs=())

    def _may_confuse_heads(self, q: Tensor) -> bool:
        """Say whether the axis of heads of q may hold the tokens of a text instead.

        So it is if the heads are as many as the tokens of the text, and the axis of tokens has
        another size: q of (samples, tokens, heads, width) was taken for (samples, heads, tokens,
        width). The caller asks only for layers without a closed form of the Jacobian. A closed
        form, checked with autograd, shows which axis is which. Without it, only sizes are known.

        Args:
            q: the queries, (windows, heads, tokens, width), by the layout of the layer.
        """
        x = self.batch.x
        _, heads, tokens, _ = q.shape
        # Texts are (samples, length).
        return x.ndim == 2 and heads == x.shape[1] != tokens

    def remember(self, linear: calls.Linear, result: Tensor) -> None:
        """Find the layer whose output a linear map reads, and take the map as the layer's W_O.

        Only the first linear map behind a layer counts. The tracer calls this after each linear
        map of the model.

        Args:
            linear: the map.
            result: the output of the map.
        """
        super().remember(linear, result)
        # The attention outputs (leaves of the cut graph) that the map's input depends on.
        outputs = {leaf.origin.address: leaf.tensor for leaf in self.origins.find_leaves(linear.x)}
        layers = [self.layers[address] for address in outputs if address in self.layers]
        # The input must come from one layer alone. If several calls in a loop make up this layer,
        # the input must come from all of them.
        if not layers or set(outputs) != set(layers[0].site.addresses):
            return
        layer = layers[0]
        if not layer.has_projection:
            layer.has_projection = True
            outputs_in_order = tuple(outputs[address] for address in layer.site.addresses)
            _read_output_map(layer, linear, outputs_in_order)

    def compare(self, call: AttentionCall, address: Address) -> None:
        """Refuse the layer of a call if q, k or v of the first sample depend on the second one.

        The tracer calls this in a further pass, over the same first sample and another second
        sample.

        Args:
            call: an attention call of that pass.
            address: its module and its number there, which identify the call in every pass.
        """
        layer = self.layers.get(address)
        if layer is None:
            return
        arranged = call.arrange(layer.site.layout, samples=2)
        # q, k and v of both samples in this pass; `layer.parts` has those of the earlier pass.
        parts = arranged.q, arranged.k, arranged.v
        if layer.site.sources:  # q, k and v are not all constants, equal for all samples
            # Note for `leave_loops` whether q, k or v changed. Exact equality works, as both
            # batches have the same size and rounding.
            has_changed = not all(map(torch.equal, layer.parts, parts))
            self._changes.setdefault(layer.site.module, set()).add(has_changed)
        # `layer.first` has q, k and v of the first sample from the earlier pass. They must be the
        # same in this pass. They are empty if one window holds both samples.
        if not len(layer.first[0]):
            return
        for before, t in zip(layer.first, parts, strict=True):
            if not agree(before, t[: len(before)], each=1):
                layer.refuse("its rows cannot be attributed to samples")

    def leave_loops(self) -> None:
        """Remove the layers of modules that attend to one sample after the other, in a loop.

        The number of their attention calls depends on the batch, so the calls are no layers. Two
        passes have shown them: both with the same first sample, and with different second ones.
        """
        # `_changes` has True for a module if q, k or v of some call differed in the second pass,
        # and False if they stayed equal in some call. Both: the samples have separate calls.
        loop_modules = {module for module, changes in self._changes.items() if len(changes) > 1}
        for layer in self.layers.values():
            # `first` has q, k and v of the first half of the windows. It is empty if the call has
            # a single window, of one sample.
            if not len(layer.first[0]):
                loop_modules.add(layer.site.module)
        kept = [layer for layer in self.layers.values() if layer.site.module not in loop_modules]
        for index, layer in enumerate(kept):
            layer.site = replace(layer.site, index=index)
        self.layers = {layer.site.address: layer for layer in kept}


def _free_maps(origins: Sequence[list[Origin]], heads: int) -> None:
    """Remove the linear maps from the origins of q, k and v, to free the inputs of these maps.

    The maps stay if a loop over heads may contain the call, because `find_loops` compares them:
    this needs a call of one head, and linear maps behind each of q, k and v.

    Args:
        origins: the origins of q, of k and of v: three lists, changed in place.
        heads: number of heads of the call.
    """
    are_linear = all(part and all(origin.linear for origin in part) for part in origins)
    if heads == 1 and are_linear:
        return
    for part in origins:
        part[:] = [replace(origin, linear=None) for origin in part]


def _has_axes_of_queries(call: AttentionCall) -> bool:
    """Say whether the logits, (..., queries, keys), have a row for each query of q."""
    if not isinstance(call.form, Explicit):  # torch's fused attention always has such logits
        return True
    rows = call.form.logits.shape[:-1]
    queries = call.q.shape[:-1]
    # Logits of (samples * heads, queries, keys) fit to q of (samples, heads, queries, width), and
    # the reverse.
    joins_axes = len(rows) != len(queries) and rows.numel() == queries.numel()
    return rows == queries or joins_axes


def _is_shared(q: Tensor) -> bool:
    """Say whether both samples have the same queries, which are then learned constants."""
    first, *other = q.chunk(2)
    return len(other) == 1 and torch.equal(first, other[0])


def _read_output_map(layer: Surveyed, linear: calls.Linear, outputs: tuple[Tensor, ...]) -> None:
    """Note a linear map as W_O of a layer in its closed form, or refuse the layer by this map.

    Args:
        layer: the layer.
        linear: the first linear map that reads the layer's output O.
        outputs: O with the axes of the model: one tensor, or one for each call of a loop.
    """
    site = layer.site

    def as_rows(*outputs: Tensor) -> Tensor:
        """Convert O to one row per token, (tokens of both samples, heads * d_v)."""
        t = site.layout.arrange(site.join(outputs), samples=2)  # (windows, heads, tokens, d_v)
        return t.transpose(1, 2).flatten(2).flatten(0, 1)

    if site.structure is not None:
        # The input of the map, (1, 1, tokens, channels), as a function of O.
        source = graph.Probed(linear.inputs[None, None], outputs, as_rows)
        structure = replace(site.structure, out=find_output_map(linear, source))
        layer.site = replace(site, structure=structure)
    # If the layout divides the axis of queries into heads and tokens, W_O must agree. Refuse the
    # layer if W_O treats these heads as tokens, by reading the same channel of several heads.
    if site.layout.queries != TOKENS:
        source = graph.Probed(linear.inputs, outputs, as_rows)
        if _reads_as_tokens(source, site.heads):
            layer.refuse("its queries are heads by their maps, and tokens by W_O")


def _reads_as_tokens(source: graph.Probed, heads: int) -> bool:
    """Say whether W_O reads the heads of a layer as if they were tokens.

    This is so if the first channel of the input of W_O comes from one channel of several heads.

    Args:
        source: the input of W_O, (rows, channels), as a function of the heads' outputs.
        heads: number of heads.
    """
    first_channel = torch.zeros_like(source.t)
    first_channel[:, 0] = 1.0
    pulled = source.pull(first_channel)  # (tokens of both samples, heads * channels of a head)
    is_read = (pulled != 0).any(0)
    is_read = is_read.view(heads, -1)  # (heads, channels of a head)
    read_heads = is_read.any(1).sum()
    read_channels = is_read.any(0).sum()
    return bool(read_heads > 1 and read_channels == 1)


def _reads_inputs(
    scope: Frame, origins: Sequence[Sequence[Origin]], structure: capture.Structure
) -> bool:
    """Say whether the linear maps of q and k read arguments of a module call directly.

    If they do, a norm with respect to the maps' inputs is also a norm with respect to the module's
    inputs. If q and k have different inputs (cross-attention), the module must get these inputs as
    different arguments.

    Args:
        scope: the module call.
        origins: the linear maps behind q, k and v.
        structure: how q, k and v are computed.
    """
    arguments = {id(graph.root(value)) for value in scope.inputs.values()}
    tensors_read = [id(origin.root) for part in origins[:2] for origin in part]
    # Both lists hold the ids of roots. The root of a tensor is an object that all views of the
    # tensor share: a map may read a reshaped argument.
    # `joint`: q and k read the same tokens (self-attention).
    inputs_fit = structure.joint or len(set(tensors_read)) == len(tensors_read)
    return inputs_fit and arguments.issuperset(tensors_read)


def _find_reads(call: AttentionCall, t: Tensor) -> Reads:
    """Return the rows and columns, of the outputs of linear maps, that q, k or v depends on."""
    reads = Reads(set(), set())
    for leaf, origin in call.origins.find_leaves(t):
        if origin.linear is None:
            continue
        # A gradient in the shape of the map's output, (tokens of all samples, columns): nonzero
        # exactly at the entries that t depends on.
        is_read = graph.Probed(t, (leaf,), origin.linear.outputs).read != 0
        for row in is_read.any(1).nonzero()[:, 0].tolist():
            reads.rows.add((origin.address, row))
        for column in is_read.any(0).nonzero()[:, 0].tolist():
            reads.columns.add((origin.address, column))
    return reads
