"""Shares of the parts of a network in one direction of its Jacobian, by two passes a sample.

Let u be a direction of the output, v = J^T u / |J^T u| and sigma = <u, J v>. A tensor O between
input and output has the share

    share(O) = < (df/dO)^T u, (dO/dx) v > / sigma.

Held constant, O leaves the Jacobian J_-O = J - (df/dO)(dO/dx), because a path of the chain rule
either passes O or does not. So u^T J_-O v = sigma (1 - share(O)), and for |u| = 1 the norm
||J_-O|| is at least that. With the leading left singular vector as u, sigma is ||J||.

For the output O = P V of a head dO = dP V + P dV: its share is the sum of the shares of P, the
pattern, and of V, the values.

The backward pass from u keeps (df/dO)^T u of all parts at once. It is linear in each of them, and
the derivative of < J^T u, v > with respect to (df/dO)^T u is (dO/dx) v: one more backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten

from lipaudit.errors import EvaluationError
from lipaudit.models.attention.calls import (
    TOKENS,
    Address,
    AttentionCall,
    Explicit,
    make_additive,
)
from lipaudit.models.attention.capture import Site
from lipaudit.models.attention.events import AttentionMode
from lipaudit.models.attention.trace import CallStack, Frame
from lipaudit.models.linearize import Function, evaluate, explain_errors
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.requirements import AGREES, agree
from lipaudit.models.streams import find_additions, find_blocks, find_place
from lipaudit.tables.columns import group_values
from lipaudit.theory.pullback import pull_back

Multiply = Callable[..., Tensor]
# Why a layer has no share at all: all its paths are of other inputs.
NO_PATH = "it does not depend on the input of the Jacobian"


class Step(NamedTuple):
    """A part of the network that, with all that passes around it, has a share of 1.

    Attributes:
        part: attention, MLP, attention and MLP (in parallel), or block.
        layer: the attention layer inside, or the last one before it; -1 before the first one.
        module: path of the module that computes it; empty if unknown.
        first: index of its residual addition, of a block that of the first one; -1: none.
        last: index of the last residual addition of a block.
    """

    part: str
    layer: int
    module: str
    first: int = -1
    last: int = -1


@dataclass(frozen=True)
class Shares:
    """Shares of one batch, float64 on the CPU.

    Attributes:
        heads: share, pattern and value of the heads of all layers, (samples, heads, 3); NaN where
            a layer could not be cut, in the last two where its pattern could not be read.
        steps: the steps, in the order of execution.
        paths: share, pattern, value and MLP of every step, (samples, steps, 4); NaN where there
            is none.
        totals: shares of all attention, all patterns and all MLPs together, (samples, 3): of the
            paths that pass at least one of them.
        missing: layers without shares, and why.
        whole: layers without pattern and value.
    """

    heads: Tensor
    steps: tuple[Step, ...]
    paths: Tensor
    totals: Tensor
    missing: dict[int, str] = field(default_factory=dict)
    whole: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Attention:
    """The places of O = P V of one attention call in the graph; None: they could not be read."""

    output: GradientEdge | None
    pattern: GradientEdge | None = None
    value: GradientEdge | None = None


class _Recorder(AttentionMode):
    """Keeps every attention call of a forward pass, with P, V and O as parts of the graph.

    Attributes:
        place: position of the pass.
        calls: the calls by address.
        modules: the module that computed a node, with its number of parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = CallStack(on_leave=self._name_node)
        self.calls: dict[Address, _Attention] = {}
        self.modules: dict[Node, tuple[int, str]] = {}

    def complete(self, call: AttentionCall) -> tuple[None, Address, Tensor]:
        """Put P V in place of the model's output: a fused op has no P in the graph."""
        address = self.place.address("attention")
        output, *parts = _attend(call) or (call.output,)
        # A node of its own, which holds where the model writes into its output.
        output = output.view_as(output)
        edges = []
        for t in (output, *parts):
            edges.append(get_gradient_edge(t) if t.requires_grad else None)
        self.calls[address] = _Attention(*edges)
        return None, address, output

    def _name_node(self, frame: Frame, output: Any) -> None:
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, Tensor)]
        node = None
        if tensors:
            node = tensors[0].grad_fn
        if node is None:
            return
        # Of modules with one output the largest names it, not a dropout behind it.
        size = sum(1 for _ in frame.module.parameters())
        if size > self.modules.get(node, (0, ""))[0]:
            self.modules[node] = size, frame.name


def _attend(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return O = P V of a call with P and V of its own; None if the model's output differs."""
    form = call.form
    if isinstance(form, Explicit):
        p = form.weights
    else:
        logits = form.scale * (call.q @ call.k.mT)
        if form.causal:
            every = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device)
            logits = logits + make_additive(every.tril(), logits.dtype)
        if form.mask is not None:
            logits = logits + make_additive(form.mask, logits.dtype)
        # Of a row without a visible key, the fused op returns 0.
        empty = logits.isneginf().all(-1, keepdim=True)
        p = torch.softmax(logits.masked_fill(empty, 0.0), -1)
        p = p.masked_fill(empty, 0.0)
    if p.shape[:-1] != call.output.shape[:-1] or p.shape[-1] != call.v.shape[-2]:
        return None
    # The model may read its P and V elsewhere, too: these are read here alone.
    p = p.view_as(p).to(call.v.dtype)
    v = call.v.view_as(call.v)
    output = p @ v
    same = output.shape == call.output.shape and agree(call.output, output, AGREES)
    if same:
        return (output, p, v)
    return None


def compute_shares(
    net: Net,
    sites: Sequence[Site],
    f: Function,
    x: Tensor,
    directions: Tensor,
    tied: Tensor,
) -> Shares:
    """Return the shares of heads, layers and blocks at every sample.

    Args:
        net: the model.
        sites: its attention layers.
        f: the map from x to the output, as in `linearize`.
        x: the samples, (samples, *in).
        directions: the u of each sample, (samples, directions, outputs), of any length.
        tied: which directions count, (samples, directions): of several, shares are averaged.

    Raises:
        InputError: the model cannot be differentiated twice.
        EvaluationError: the pass with recorded attention gives another output.
    """
    index = torch.arange(len(x), device=x.device)
    recorder = _Recorder()

    def run(z: Tensor, rows: Tensor) -> Tensor:
        with recorder.place.following(net.module), recorder:
            return f(z, rows)

    with exact_arithmetic(x.device), explain_errors():
        # First, as a model that keeps state may write into what the graph has stored.
        with torch.no_grad():
            plain = evaluate(f, x.detach(), index)
        leaf = x.detach().clone().requires_grad_()
        output = evaluate(run, leaf, index)
        if not agree(plain, output.detach(), AGREES):
            raise EvaluationError(
                "the output of the model changes when its attention is recorded",
                "Leave out --shares, and try --dtype float64.",
            )
        graph = _Graph(sites, recorder, output)
        if len(x) > 1 and not graph.is_by_sample(len(x)):
            # The axis of the samples is unknown: of one sample, all entries are its own.
            del graph, output, leaf
            return _measure_alone(net, sites, f, x, directions, tied)
        of_heads = []
        of_paths = []
        of_totals = []
        for i in range(directions.shape[1]):
            u = directions[:, i].view_as(output)
            heads, paths, totals = graph.measure(leaf, u, tied[:, i])
            of_heads.append(heads)
            of_paths.append(paths)
            of_totals.append(totals)
    count = tied.sum(1).cpu().double()
    return Shares(
        heads=_average(of_heads, count),
        steps=graph.steps,
        paths=_average(of_paths, count),
        totals=_average(of_totals, count),
        missing=graph.missing,
        whole=graph.whole,
    )


def _average(parts: Sequence[Tensor], count: Tensor) -> Tensor:
    """Return the mean over directions, of which those that do not count are 0; NaN stays."""
    first = parts[0]
    count = count.view(-1, *[1] * (first.ndim - 1))
    mean = torch.stack([*parts]).nansum(0) / count
    return mean.masked_fill(first.isnan(), torch.nan)


def _measure_alone(
    net: Net, sites: Sequence[Site], f: Function, x: Tensor, directions: Tensor, tied: Tensor
) -> Shares:
    """Return the shares of a batch, measured sample by sample."""
    each: list[Shares] = []
    for i in range(len(x)):

        def of_one(z: Tensor, rows: Tensor, i: int = i) -> Tensor:
            return f(z, rows + i)

        rows = slice(i, i + 1)
        each.append(compute_shares(net, sites, of_one, x[rows], directions[rows], tied[rows]))
    return join_shares(each)


def join_shares(parts: Sequence[Shares]) -> Shares:
    """Return the shares of several batches of the same steps as one."""
    return replace(
        parts[0],
        heads=torch.cat([part.heads for part in parts]),
        paths=torch.cat([part.paths for part in parts]),
        totals=torch.cat([part.totals for part in parts]),
    )


class _Graph:
    """The graph of a recorded pass, and the parts at which it is cut.

    Attributes:
        layers: the calls of every layer that could be cut.
        steps: the steps.
        missing: layers that could not be cut, and why.
        whole: layers without pattern and value.
    """

    def __init__(self, sites: Sequence[Site], recorder: _Recorder, output: Tensor) -> None:
        self.sites = sites
        self.output = output
        self.missing: dict[int, str] = {}
        self.layers: dict[int, list[_Attention]] = {}
        for site in sites:
            self._find_layer(site, recorder)
        whole: list[int] = []
        self._outputs: dict[Node, int] = {}
        for index, parts in self.layers.items():
            if any(part.value is None for part in parts):
                whole.append(index)
            for part in parts:
                if part.output is not None:
                    self._outputs[part.output.node] = index
        self.whole = tuple(whole)
        self._additions = find_additions(output, self._outputs.keys())
        self._describe(recorder)
        edges: list[GradientEdge | None] = []
        for parts in self.layers.values():
            for part in parts:
                edges += [part.output, part.pattern, part.value]
        for addition in self._additions:
            edges += [addition.sum, *addition.branches]
        self._gradients: dict[tuple[Node, int], Tensor] = {}
        self._blocked: set[tuple[Node, int]] = set()
        numbers = group_values((edge.node, edge.output_nr) for edge in edges if edge is not None)
        for node, wanted in numbers.items():
            node.register_prehook(partial(self._keep, node, frozenset(wanted)))

    def _find_layer(self, site: Site, recorder: _Recorder) -> None:
        """Find the calls of a layer; they have the addresses of the survey."""
        module = site.address.module
        known = {address for address in recorder.calls if address.module == module}
        surveyed = set()
        for each in self.sites:
            for a in each.addresses:
                if a.module == module:
                    surveyed.add(a)
        if not surveyed >= known or not known >= {*site.addresses}:
            self.missing[site.index] = "its attention is not found in a pass with gradients"
            return
        parts = [recorder.calls[address] for address in site.addresses]
        if any(part.output is None for part in parts):
            self.missing[site.index] = NO_PATH
            return
        self.layers[site.index] = parts

    def _describe(self, recorder: _Recorder) -> None:
        """List the steps: every addition, every block, and layers without an addition."""
        modules = {site.index: site.module for site in self.sites}
        order = sorted(self._outputs, key=find_place)
        steps: list[tuple[int, Step]] = []
        held: set[int] = set()
        starts: set[int] = set()
        for i, addition in enumerate(self._additions):
            place = find_place(addition.sum.node)
            layer = -1  # the last one before the addition
            for node in order:
                if find_place(node) < place:
                    layer = self._outputs[node]
            inside = [self._outputs[node] for node in order if addition.holds(node)]
            plain = [part for part in addition.inside if self._outputs.keys().isdisjoint(part)]
            if inside:
                kind = "attention and MLP" if plain else "attention"
                starts.add(i)
                held.update(inside)
                steps.append((place, Step(kind, inside[-1], modules[inside[-1]], i)))
                continue
            module = ""
            for edge in addition.branches:
                if edge.node in recorder.modules:
                    _, module = recorder.modules[edge.node]
                    break
            steps.append((place, Step("MLP", layer, module, i)))
        for first, last in find_blocks(self._additions, starts):
            layer = next(step.layer for _, step in steps if step.first == first)
            place = find_place(self._additions[last].sum.node)
            steps.append((place, Step("block", layer, "", first, last)))
        for node in order:
            index = self._outputs[node]
            if index not in held:
                held.add(index)
                steps.append((find_place(node), Step("attention", index, modules[index])))
        self.steps = tuple(step for _, step in sorted(steps, key=lambda pair: pair[0]))

    def is_by_sample(self, samples: int) -> bool:
        """Say whether the first axis, and no other one, can be that of the samples."""
        edges = [edge for each in self._additions for edge in (each.sum, *each.branches)]
        shapes = [_find_shape(edge) for edge in edges]
        return all(shape[0] == samples and samples not in shape[1:] for shape in shapes)

    def _keep(
        self, node: Node, numbers: Collection[int], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Keep (df/dO)^T u on its way into a node, as a variable that nothing else reads.

        The two operands of a sum get one and the same gradient: without a copy, the derivative
        with respect to one would be that to both.
        """
        apart = list(gradients)
        for number in numbers:
            gradient = apart[number]
            if gradient is None:
                continue
            if (node, number) in self._blocked:
                apart[number] = torch.zeros_like(gradient)
                continue
            apart[number] = self._gradients[node, number] = gradient.view_as(gradient)
        return tuple(apart)

    def measure(self, leaf: Tensor, u: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return shares of heads, (samples, heads, 3), of steps, (samples, steps, 4), and totals.

        Totals are (samples, 3). Samples that do not count have shares of 0, besides NaN.
        """
        samples = len(leaf)
        # u needs a gradient: behind the last nonlinearity, (df/dO)^T u depends on nothing else.
        u = u.detach().to(self.output.dtype, copy=True).requires_grad_()
        self._gradients.clear()
        pulled = pull_back(self.output, leaf, u, create_graph=True)[0]
        v = pulled.detach()
        gradients = dict(self._gradients)
        of_u, *images = pull_back(
            pulled, [u, *gradients.values()], v, retain_graph=True, allow_unused=True
        )
        tangents = dict(zip(gradients, images, strict=True))
        square = _sum_samples(v.double().square())
        _require_transpose(u, of_u, square)

        def multiply(edge: GradientEdge, other: GradientEdge | None = None) -> Tensor:
            """Return (df/dO)^T u (dO/dx) v, entry by entry; O' of another edge moves, if given."""
            source = edge if other is None else other
            gradient = gradients.get((edge.node, edge.output_nr))
            tangent = tangents.get((source.node, source.output_nr))
            if gradient is None or tangent is None:
                return torch.zeros(_find_shape(edge), dtype=torch.float64, device=leaf.device)
            return (gradient.detach() * tangent).double()

        heads = {site.index: self._sum_heads(site, multiply, samples) for site in self.sites}
        steps = self._sum_steps(heads, multiply, samples)
        # < u, J v > = |v|^2, as v is J^T u.
        scale = counted.cpu().double() / square
        scale = scale.view(-1, 1, 1)
        through = []
        for edges in self._list_kinds():
            through.append(square - self._pull_around(edges, leaf, u, v))
        of_heads = torch.cat([*heads.values()], 1)
        totals = torch.stack(through, 1)
        return of_heads * scale, steps * scale, totals * scale[:, 0]

    def _list_kinds(self) -> list[list[GradientEdge | None]]:
        """Return the edges of all attention, all patterns and all MLPs; None if unknown."""
        calls_of_layers = [part for parts in self.layers.values() for part in parts]
        kinds = [
            [part.output for part in calls_of_layers],
            [part.pattern for part in calls_of_layers],
        ]
        if set(self.missing.values()) - {NO_PATH}:
            kinds = [[None], [None]]
        plain = []
        for addition in self._additions:
            for edge, inside in zip(addition.branches, addition.inside, strict=True):
                if self._outputs.keys().isdisjoint(inside):
                    plain.append(edge)
        return [*kinds, [*plain]]

    def _pull_around(
        self, edges: Sequence[GradientEdge | None], leaf: Tensor, u: Tensor, v: Tensor
    ) -> Tensor:
        """Return < J_-O^T u, v > with several parts constant: no gradient passes them."""
        if None in edges:
            return torch.full((len(leaf),), torch.nan, dtype=torch.float64)
        self._blocked = {(edge.node, edge.output_nr) for edge in edges if edge is not None}
        pulled = pull_back(self.output, leaf, u.detach(), retain_graph=True)[0]
        self._blocked = set()
        return _sum_samples((pulled * v).double())

    def _sum_heads(self, site: Site, multiply: Multiply, samples: int) -> Tensor:
        """Return the sums of `multiply` over each head's output, pattern and value.

        Shape (samples, heads, 3); NaN if unknown.
        """
        sums = torch.full((samples, site.heads, 3), torch.nan, dtype=torch.float64)
        parts = self.layers.get(site.index, [])
        for i, name in enumerate(("output", "pattern", "value")):
            edges = [getattr(part, name) for part in parts]
            if not edges or None in edges:
                continue
            # A sum over the columns leaves a row for each token.
            rows = [multiply(edge).sum(-1, keepdim=True) for edge in edges]
            if site.loop is None:
                whole = rows[0]
            else:
                whole = site.loop.cat(rows)
            # If queries of several heads are folded into the tokens, their values are one tensor.
            if name == "value" and site.layout.queries != TOKENS:
                self.missing[site.index] = "its heads share their values"
                break
            arranged = site.layout.arrange(whole, samples)
            of_windows = arranged.sum((-2, -1))
            if of_windows.shape[1] != site.heads or len(of_windows) % samples:
                self.missing[site.index] = "its heads and samples cannot be distinguished"
                break
            of_windows = of_windows.reshape(samples, -1, site.heads)
            sums[:, :, i] = of_windows.sum(1).cpu()
        return sums

    def _sum_steps(self, heads: Mapping[int, Tensor], multiply: Multiply, samples: int) -> Tensor:
        """Return the products of the steps, (samples, steps, 4); NaN where there is none."""

        def add(products: Tensor) -> Tensor:
            return products.reshape(samples, -1).sum(1).cpu()

        sums = torch.full((samples, len(self.steps), 4), torch.nan, dtype=torch.float64)
        for i, step in enumerate(self.steps):
            if step.first < 0:
                sums[:, i, :3] = heads[step.layer].sum(1)
                continue
            addition = self._additions[step.first]
            terms = [add(multiply(edge)) for edge in addition.branches]
            if step.part == "block":
                # dx of the first addition is dy - dF; the last sum contains it as it is.
                end = self._additions[step.last].sum
                around = add(multiply(end, addition.sum))
                for edge in addition.branches:
                    around -= add(multiply(end, edge))
                # Other paths may pass neither the block nor its skip, as those of a second tower.
                sums[:, i, 0] = add(multiply(end)) - around
                continue
            sums[:, i, 0] = torch.stack(terms).sum(0)
            inside = [index for node, index in self._outputs.items() if addition.holds(node)]
            if inside:
                of_heads = torch.cat([heads[index] for index in dict.fromkeys(inside)], 1)
                sums[:, i, 1:3] = of_heads[:, :, 1:].sum(1)
            plain = []
            for term, part in zip(terms, addition.inside, strict=True):
                if self._outputs.keys().isdisjoint(part):
                    plain.append(term)
            if plain:
                sums[:, i, 3] = torch.stack(plain).sum(0)
        return sums


def _sum_samples(products: Tensor) -> Tensor:
    """Return the sum over the entries of every sample."""
    return products.flatten(1).sum(1).cpu()


def _require_transpose(u: Tensor, image: Tensor | None, square: Tensor) -> None:
    """Check < u, J v > = |v|^2 for v = J^T u: a break in the second graph would lose paths.

    Raises:
        EvaluationError: an operation of the model has a first derivative alone.
    """
    product = torch.zeros_like(square)
    if image is not None:
        product = _sum_samples((u.detach() * image).double())
    if not torch.allclose(product, square, rtol=10 * AGREES, atol=0):
        raise EvaluationError(
            "an operation of the model has a derivative that cannot be differentiated again",
            "Leave out --shares, or write its backward pass in differentiable operations.",
        )


def _find_shape(edge: GradientEdge) -> torch.Size:
    """Return the shape of the tensor at an edge of a graph."""
    metadata: Any = edge.node._input_metadata[edge.output_nr]
    return torch.Size(metadata.shape)
