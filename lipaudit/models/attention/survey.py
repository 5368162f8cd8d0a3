"""Find out once what each attention layer of a model is, and check it before any number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Any

from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.models.attention import checks
from lipaudit.models.attention.analysis import analyse, output_map
from lipaudit.models.attention.capture import observe, run
from lipaudit.models.attention.numeric import obstacle
from lipaudit.models.attention.observe.events import AttentionCall, Explicit
from lipaudit.models.attention.observe.layouts import arrange
from lipaudit.models.attention.observe.linears import Linear
from lipaudit.models.attention.observe.trace import Address, Frame, Tracer, origins, undisturbed
from lipaudit.models.attention.project.chains import Chains
from lipaudit.models.attention.project.probes import Source
from lipaudit.models.attention.sites import Site, Structure
from lipaudit.models.attention.to_heads import canonical
from lipaudit.models.generic import generic
from lipaudit.models.graph import root
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.sources.files import few


def survey(net: Net, batch: Batch) -> tuple[Site, ...]:
    """Analyse every attention layer of a model, and check that the analysis can be trusted.

    What a layer is, is decided at two generic points near a sample (see `generic`), never by the
    data: of a black image everything looks affine. Before anything is returned: two passes give
    the same output, a sample does not depend on its companion, observing the model does not
    change its output, and in every closed-form layer J^T u agrees to 1e-4 with autograd through
    the model's own attention, for one random u. A layer that fails, or that cannot be read, has
    no closed form and says why.

    Raises:
        InputError: no attention was seen, or some that cannot be read, or the model is
            randomised, mixes samples or changes when it is observed.
        EvaluationError: its output is not finite.
    """
    net, pair, other = generic(net, batch)
    with undisturbed(net.module), exact_arithmetic(net.device):
        output = checks.fixed_output(net, pair)
        checks.require_isolation(net, pair, other, output)
        surveyor = _Surveyor(pair)
        passed_over = surveyor.observe(net, output)
        if not surveyor.found:
            raise _no_attention(net, passed_over)
        if surveyor.inner:
            deeper = _Surveyor(pair, uncut=frozenset(surveyor.inner))
            deeper.observe(net, output)
            surveyor.adopt(deeper)
        run(net, other, Tracer(surveyor.compare))
    return tuple(found.site for found in surveyor.found.values())


def _no_attention(net: Net, passed_over: Mapping[str, str]) -> InputError:
    places = (
        f"{what}, first in {module or 'the model itself'}"
        for what, module in sorted(passed_over.items())
    )
    seen = f" (only {'; '.join(places)})" if passed_over else ""
    return InputError(
        f"no attention was seen in {net.info.architecture}: neither scaled_dot_product_attention "
        f"nor a softmax over q k^T was called{seen}",
        "flash and flex attention kernels, torch.compile and TorchScript cannot be observed: load "
        "the model uncompiled with attn_implementation='sdpa' or 'eager'; linear attention has no "
        "softmax, and convolutional networks have no attention; lipaudit jacobian and lipaudit "
        "attack need none",
    )


def _chunked(net: Net, modules: Sequence[str]) -> InputError:
    """Some layers would be left out without a word, or read as what they are not."""
    return InputError(
        f"{net.info.architecture} lays its attention out anew between the softmax and the values, "
        f"in chunks or sliding windows ({few(list(dict.fromkeys(modules)))}): its heads cannot be "
        "read",
        "`lipaudit jacobian` needs no heads",
    )


@dataclass
class _Found:
    """A layer, and what is needed to go on with it."""

    site: Site
    first: tuple[Tensor, ...]  # q, k, v of the first sample
    transposed: bool
    projected: bool = False

    def as_rows(self, t: Tensor) -> Tensor:
        """Bring the model's O to (tokens, heads * d_v)."""
        o = arrange(self.site.layout, t.mT if self.transposed else t, 2)
        return o.transpose(1, 2).flatten(2).flatten(0, 1)


@dataclass
class _Surveyor:
    """Analyses the attention calls of a pass over two samples."""

    batch: Batch
    uncut: frozenset[Address] = frozenset()
    inner: set[Address] = field(default_factory=set)  # what a second pass should not cut
    chains: Chains = field(default_factory=Chains)
    frames: list[Frame] = field(default_factory=list)
    found: dict[Address, _Found] = field(default_factory=dict)

    def observe(self, net: Net, output: Tensor) -> Mapping[str, str]:
        """Run the model; return what looked like attention and is not."""
        tracer = Tracer(self.attention, self.linear, inner=self.uncut)
        self.frames = tracer.place.frames
        checks.require_same(run(net, self.batch, tracer), output)
        if tracer.chunked:
            raise _chunked(net, tracer.chunked)
        return tracer.passed_over

    def adopt(self, deeper: _Surveyor) -> None:
        """Take over the layers that another pass, cut at fewer linear maps, could read."""
        for address, again in deeper.found.items():
            mine = self.found.get(address)
            if mine is not None and not mine.site.closed_form and again.site.closed_form:
                again.site = replace(again.site, index=mine.site.index, inner=deeper.uncut)
                self.found[address] = again

    def attention(self, call: AttentionCall, address: Address) -> None:
        """Analyse a call."""
        analysis, scope = analyse(call, self.batch), _scope(call, self.frames)
        site = Site(
            index=len(self.found),
            module=address.module,
            heads=canonical(call, analysis.layout, 2).q.shape[1],
            kinds=analysis.kinds,
            reason=analysis.reason,
            address=address,
            layout=analysis.layout,
            structure=analysis.structure,
            sources=frozenset(o.address for t in (call.q, call.k, call.v) for _, o in origins(t)),
            explicit=isinstance(call.form, Explicit),
            scope=scope.name,
            inputs=tuple(key for key, _ in _inputs(scope)),
            direct=_direct(analysis.structure, call, scope),
        )
        if not site.closed_form:
            made = [origin for t in (call.q, call.k, call.v) for _, origin in origins(t)]
            self.inner |= self.chains.inner(made)
            site = self._with_obstacle(site, call)
            if _tokens_as_heads(site, call, self.batch):
                reason = f"{site.reason}; nor can its heads be told from its tokens"
                site = replace(site, reason=reason, inputs=())
        self.found[address] = _Found(site, _first_sample(call, site), call.transposed)

    def linear(self, linear: Linear, address: Address) -> None:
        """See whether a linear map is the output projection of a layer."""
        made = origins(linear.x)
        self.chains.note(address, linear, [origin for _, origin in made])
        if len(made) != 1 or made[0][1].address not in self.found:
            return
        leaf, origin = made[0]
        found = self.found[origin.address]
        if found.site.structure is not None and not found.projected:
            source = Source(linear.inputs[None, None], leaf, found.as_rows)
            structure = replace(found.site.structure, out=output_map(linear, source))
            found.site = replace(found.site, structure=structure)
        found.projected = True

    def compare(self, call: AttentionCall, address: Address) -> None:
        """Check in a second pass that a layer's rows belong to the samples they are given to."""
        found = self.found[address]
        pairs = zip(found.first, _first_sample(call, found.site), strict=True)
        if not all(checks.agree(a, b, each=1) for a, b in pairs):
            reason = "its rows cannot be attributed to samples"
            found.site = replace(found.site, structure=None, reason=reason, inputs=())

    def _with_obstacle(self, site: Site, call: AttentionCall) -> Site:
        """Try whether the layer can be differentiated numerically."""
        why = obstacle(observe(site, call, self.batch, self.frames))
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


def _first_sample(call: AttentionCall, site: Site) -> tuple[Tensor, ...]:
    arranged = canonical(call, site.layout, 2)
    parts = (arranged.q, arranged.k, arranged.v)
    return tuple(t[: len(t) // 2].detach() for t in parts)


def _scope(call: AttentionCall, frames: Sequence[Frame]) -> Frame:
    """Return the innermost module call that holds an attention call and its projections."""
    made = [origin for t in (call.q, call.k, call.v) for _, origin in origins(t)]
    names = [frames[-1].name] + [o.address.module for o in made if o.linear is not None]
    shared = commonprefix([name.split(".") for name in names])
    inside = (f for f in reversed(frames) if f.name.split(".") == shared[: f.name.count(".") + 1])
    return next(inside, frames[0])


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
    read = [origin.root for t in (call.q, call.k) for _, origin in origins(t)]
    apart = structure.joint or len({id(one) for one in read}) == len(read)
    return apart and all(any(one is other for other in given) for one in read)
