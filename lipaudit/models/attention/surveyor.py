"""One pass of a survey: every attention call analysed, its output projection and module found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.models.attention.agreement import agree
from lipaudit.models.attention.analysis import HALF, analyse, output_map
from lipaudit.models.attention.capture import layer_at
from lipaudit.models.attention.numeric import obstacle
from lipaudit.models.attention.observe.calls import AttentionCall, Explicit
from lipaudit.models.attention.observe.layouts import arrange
from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.attention.observe.origins import Address, Origins
from lipaudit.models.attention.observe.trace import Frame, Place, Tracer
from lipaudit.models.attention.observe.uses import line_of_code
from lipaudit.models.attention.project.chains import Chains
from lipaudit.models.attention.project.probes import Probed
from lipaudit.models.attention.sites import Site, Structure
from lipaudit.models.attention.to_heads import canonical
from lipaudit.models.graph import root


@dataclass
class Surveyed:
    """A layer, and what is needed to go on with it.

    Attributes:
        site: what is known of it.
        first: q, k and v of the first sample.
        transposed: whether its output keeps tokens last.
        maps: the modules and tensors that made q, and the ops that made k.
        sizes: what tells its q, k and v from others.
        projected: whether a linear map of its output has been met.
    """

    site: Site
    first: tuple[Tensor, ...]
    transposed: bool
    maps: tuple[frozenset[object], frozenset[object]]
    sizes: tuple[float, ...]
    projected: bool = False

    def as_rows(self, t: Tensor) -> Tensor:
        """Bring the model's O to (tokens, heads * d_v)."""
        o = arrange(self.site.layout, t.mT if self.transposed else t, 2)
        return o.transpose(1, 2).flatten(2).flatten(0, 1)

    def open(self, reason: str) -> None:
        """Leave the layer without a closed form and without norms."""
        self.site = replace(self.site, structure=None, reason=reason, inputs=())


@dataclass
class Surveyor:
    """Analyses the attention calls of a pass over two samples.

    Attributes:
        batch: these.
        uncut: linear maps at which the pass does not cut the graph.
        sparing: whether the pass forgets what the maps of the residual stream read.
        inner: those at which another pass should not, so that more layers can be read.
        forgot: whether a layer needed what was forgotten.
        layers: the layers so far.
        unread: the modules, with a line of code, where attention is none of these.
        place: where the pass is.
        origins: what made the leaves of its graph.
    """

    batch: Batch
    uncut: frozenset[Address] = frozenset()
    sparing: bool = True
    inner: set[Address] = field(default_factory=set)
    forgot: bool = False
    layers: dict[Address, Surveyed] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    origins: Origins = field(default_factory=Origins)
    _chains: Chains = field(default_factory=Chains)
    _moved: dict[str, set[bool]] = field(default_factory=dict)  # by the companion of a sample

    @property
    def sites(self) -> tuple[Site, ...]:
        """The layers as they are known by now."""
        return tuple(layer.site for layer in self.layers.values())

    def tracer(self) -> Tracer:
        """Return what observes attention and linear maps for this pass."""
        return Tracer(
            self.attention,
            self.linear,
            inner=self.uncut,
            sparing=self.sparing,
            place=self.place,
            origins=self.origins,
        )

    def adopt(self, deeper: Surveyor) -> None:
        """Take over the layers that another pass, cut at fewer linear maps, could read."""
        for address, again in deeper.layers.items():
            before = self.layers.get(address)
            if before is None or before.site.closed_form or not again.site.closed_form:
                continue
            again.site = replace(again.site, index=before.site.index, inner=deeper.uncut)
            self.layers[address] = again

    def attention(self, call: AttentionCall, address: Address) -> None:
        """Analyse a call."""
        site = self._site(call, address)
        if not site.closed_form:
            made_by = [origin for _, origin in call.origins.leaves(call.q, call.k, call.v)]
            self.forgot |= _reads_forgotten(call)
            self.inner |= self._chains.inner(made_by)
            site = self._with_obstacle(site, call)
            if _tokens_as_heads(site, call, self.batch):
                reason = f"{site.reason}; nor can its heads be told from its tokens"
                site = replace(site, reason=reason, inputs=())
        first = _first_sample(call, site)
        self.layers[address] = Surveyed(site, first, call.transposed, _maps(call), _sizes(call))

    def _site(self, call: AttentionCall, address: Address) -> Site:
        frames = self.place.frames
        analysis, scope = analyse(call, self.batch), _scope(call, frames)
        return Site(
            index=len(self.layers),
            module=address.module,
            heads=canonical(call, analysis.layout, 2).q.shape[1],
            kinds=analysis.kinds,
            reason=analysis.reason,
            address=address,
            layout=analysis.layout,
            structure=analysis.structure,
            sources=frozenset(o.address for _, o in call.origins.leaves(call.q, call.k, call.v)),
            explicit=isinstance(call.form, Explicit),
            scope=scope.name,
            inputs=tuple(key for key, _ in _inputs(scope)),
            direct=_direct(analysis.structure, call, scope),
            line=line_of_code(),
        )

    def linear(self, linear: Linear, address: Address) -> None:
        """See whether a linear map is the output projection of a layer."""
        leaves = self.origins.leaves(linear.x)
        self._chains.note(address, linear, [origin for _, origin in leaves])
        if len(leaves) != 1 or leaves[0].origin.address not in self.layers:
            return
        layer = self.layers[leaves[0].origin.address]
        if layer.site.structure is not None and not layer.projected:
            source = Probed(linear.inputs[None, None], leaves[0].tensor, layer.as_rows)
            structure = replace(layer.site.structure, out=output_map(linear, source))
            layer.site = replace(layer.site, structure=structure)
        layer.projected = True

    def compare(self, call: AttentionCall, address: Address) -> None:
        """Check in a second pass that a layer's rows belong to the samples they are given to."""
        layer = self.layers.get(address)
        if layer is None:
            return
        if layer.site.sources:
            # What holds both samples changes with one of them, maybe less than any tolerance.
            moved = layer.sizes != _sizes(call)
            self._moved.setdefault(address.module, set()).add(moved)
        if len(layer.first[0]) == 0:
            return
        pairs = zip(layer.first, _first_sample(call, layer.site), strict=True)
        if not all(agree(a, b, each=1) for a, b in pairs):
            layer.open("its rows cannot be attributed to samples")

    def leave_loops(self) -> None:
        """Leave out the modules that attend to one sample after the other.

        The companion of a sample moves some of their calls, and not the others.
        """
        alone = {module for module, moved in self._moved.items() if len(moved) > 1}
        alone |= {each.site.module for each in self.layers.values() if len(each.first[0]) == 0}
        kept = [layer for layer in self.layers.values() if layer.site.module not in alone]
        for index, layer in enumerate(kept):
            layer.site = replace(layer.site, index=index)
        self.layers = {layer.site.address: layer for layer in kept}

    def join(self) -> None:
        """Find the layers that are heads or chunks of one attention.

        What reads a part of the queries has norms that are none of a head.
        """
        groups: dict[tuple[frozenset[object], frozenset[object]], list[Surveyed]] = {}
        for layer in self.layers.values():
            if all(layer.maps):
                groups.setdefault(layer.maps, []).append(layer)
        for group in groups.values():
            for layer in group if len(group) > 1 else ():
                layer.site = replace(layer.site, partners=tuple(g.site.index for g in group))
                if layer.first[0].shape[2] < layer.first[1].shape[2] and any(
                    g.sizes[0] != layer.sizes[0] and g.sizes[1] == layer.sizes[1] for g in group
                ):
                    layer.open("its queries are a part of those that meet its keys")

    def _with_obstacle(self, site: Site, call: AttentionCall) -> Site:
        """Try whether the layer can be differentiated numerically."""
        if call.output.dtype in HALF:
            reason = f"{site.reason}: switch autocast off, or use --dtype float64"
            return replace(site, reason=reason, inputs=())
        why = obstacle(layer_at(site, call, self.batch, self.place.frames))
        if why is None:
            return site
        reason = f"{site.reason}; nor can its norms be computed numerically: {why}"
        return replace(site, reason=reason, inputs=())


def _tokens_as_heads(site: Site, call: AttentionCall, batch: Batch) -> bool:
    """Say whether the heads of a text model's layer are as many as its tokens, which are not.

    Without a closed form nothing else proves which of the axes is which.
    """
    heads, tokens = canonical(call, site.layout, len(batch)).q.shape[1:3]
    return batch.x.ndim == 2 and heads == batch.x.shape[1] != tokens


def _reads_forgotten(call: AttentionCall) -> bool:
    """Say whether q, k or v is a function of one linear map, which was forgotten."""
    behind = (call.origins.leaves(t) for t in (call.q, call.k, call.v))
    return any(len(each) == 1 and each[0].origin.forgotten for each in behind)


def _first_sample(call: AttentionCall, site: Site) -> tuple[Tensor, ...]:
    arranged = canonical(call, site.layout, 2)
    parts = (arranged.q, arranged.k, arranged.v)
    return tuple(t[: len(t) // 2].detach() for t in parts)


def _maps(call: AttentionCall) -> tuple[frozenset[object], frozenset[object]]:
    queries = [origin for _, origin in call.origins.leaves(call.q)]
    keys = [origin for _, origin in call.origins.leaves(call.k)]
    made = frozenset((o.address.module, o.address.op, o.root) for o in queries)
    return made, frozenset(origin.address for origin in keys)


def _sizes(call: AttentionCall) -> tuple[float, ...]:
    return tuple(float(t.detach().double().norm()) for t in (call.q, call.k, call.v))


def _scope(call: AttentionCall, frames: Sequence[Frame]) -> Frame:
    """Return the innermost module call that holds an attention call and its projections.

    All else that q, k, v and the logits are made of has to enter it as an argument.
    """
    return next((frame for frame in reversed(frames) if _holds(frame, call)), frames[0])


def _holds(frame: Frame, call: AttentionCall) -> bool:
    behind = [(root(t), call.origins.leaves(t)) for t in (call.q, call.k, call.v)]
    made_by = [origin for _, leaves in behind for _, origin in leaves]
    maps = [origin for origin in made_by if origin.is_map]
    # Values that are the input of the keys' map were made by no map of this layer.
    projections = [
        leaves[0].origin
        for mark, leaves in behind
        if len(leaves) == 1 and leaves[0].origin.is_map and all(o.root is not mark for o in maps)
    ]
    if not all(frame.holds(origin.address.module) for origin in projections):
        return False
    held = any(frame.holds(origin.address.module) for origin in maps)
    given = [value for _, value in _inputs(frame)]
    # What is given q, k and v one by one holds no map of theirs, and is no module of attention.
    if made_by and not held and call.origins.met(call.q, call.k, call.v, given=given) != 1:
        return False
    made = [call.q, call.k, call.v]
    made += [call.form.logits] if isinstance(call.form, Explicit) else []
    beside = call.origins.beside(made, given)
    return all(frame.holds(origin.address.module) for origin in beside)


def _inputs(frame: Frame) -> Iterator[tuple[int | str, Tensor]]:
    given: list[tuple[int | str, Any]] = [*enumerate(frame.args), *frame.kwargs.items()]
    for key, value in given:
        if isinstance(value, Tensor) and value.requires_grad:
            yield key, value


def _direct(structure: Structure | None, call: AttentionCall, frame: Frame) -> bool:
    """Say whether the projections read the inputs of a module, each side its own."""
    if structure is None:
        return False
    given = [root(value) for _, value in _inputs(frame)]
    read = [origin.root for _, origin in call.origins.leaves(call.q, call.k)]
    apart = structure.joint or len({id(one) for one in read}) == len(read)
    return apart and all(any(one is other for other in given) for one in read)
