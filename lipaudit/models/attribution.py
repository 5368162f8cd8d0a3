"""Attribute the norm of a model's Jacobian to parts of the network, by two passes a sample.

The share of a part is how much of the norm its paths carry, along one direction. Let u be a
direction of the output, v = J^T u / |J^T u| and sigma = <u, J v>. A tensor O between input and
output has the share

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from lipaudit.errors import EvaluationError
from lipaudit.models.attention.calls import TOKENS
from lipaudit.models.attention.capture import Site
from lipaudit.models.linearize import Function, evaluate, explain_errors
from lipaudit.models.net import Net
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.recorder import AttentionEdges, Recorder
from lipaudit.models.requirements import AGREES, agree
from lipaudit.models.streams import Addition, find_additions, find_blocks, get_order
from lipaudit.tables.columns import group_values
from lipaudit.theory.pullback import pull_back

# Why a layer has no share at all.
NO_PATH = "it does not depend on the input of the Jacobian"


class Step(NamedTuple):
    """A part of the network; its share and the share of all paths around it add up to 1.

    Attributes:
        part: attention, MLP, attention and MLP (in parallel), or block.
        layer: the attention layer inside the part, or the last attention layer before it; -1
            before the first attention layer.
        module: path of the module that computes the part; empty if unknown.
        first: index of the part's residual addition, or of the first one of a block; -1: none.
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
        heads: share, pattern and value of the heads of all layers, (samples, heads, 3). All three
            are NaN if the layer's attention is unknown, and the last two if only its pattern is.
        steps: the steps, in the order of execution.
        paths: share, pattern, value and MLP of every step, (samples, steps, 4); NaN if a step has
            no such part.
        totals: shares of all attention, all patterns and all MLPs together, (samples, 3): of the
            paths that pass at least one of them.
        missing: layers without shares, and why.
        unsplit: layers without pattern and value.
    """

    heads: Tensor
    steps: tuple[Step, ...]
    paths: Tensor
    totals: Tensor
    missing: dict[int, str]
    unsplit: tuple[int, ...]


def compute_shares(
    net: Net,
    sites: Sequence[Site],
    f: Function,
    x: Tensor,
    directions: Tensor,
    tied: Tensor,
) -> Shares:
    """Return the shares of heads, layers and blocks in the Jacobian of f at every sample.

    Let J be the Jacobian of f, u an output direction, v = J^T u / |J^T u| and sigma = <u, J v>.
    The share of a part O is < (df/dO)^T u, (dO/dx) v > / sigma. It is the fraction of sigma that
    the paths through O carry.

    All samples run in one pass if their rows can be told apart in it, and else one by one.

    Args:
        net: the model.
        sites: its attention layers.
        f: the map from x to the output, as in `linearize`.
        x: the samples, (samples, *in).
        directions: the u of each sample, (samples, directions, outputs), of any length.
        tied: which directions count, (samples, directions). Shares are averaged over these
            directions, which are usually singular vectors of equal singular values.

    Raises:
        InputError: the model cannot be differentiated twice.
        EvaluationError: the pass with recorded attention gives another output.
    """
    with exact_arithmetic(x.device), explain_errors():
        graph = _record_graph(net, sites, f, x)  # of the model's pass, with all parts O
        if len(x) > 1 and not graph.has_samples_first(len(x)):
            # Some tensor does not have a row per sample, and its entries cannot be attributed to
            # samples. So samples run one at a time, after the memory of this graph is freed.
            del graph
            return _compute_one_by_one(net, sites, f, x, directions, tied)
        pairs = zip(directions.unbind(1), tied.unbind(1), strict=True)
        by_direction = [graph.measure(u, counts) for u, counts in pairs]
    count = tied.sum(1).cpu().double()  # how many directions count for each sample
    # Each kind of shares (heads, paths, totals) along all directions.
    kinds = zip(*by_direction, strict=True)
    heads, paths, totals = (_average(shares, count) for shares in kinds)
    return Shares(heads, graph.steps, paths, totals, graph.missing, graph.unsplit)


def _record_graph(net: Net, sites: Sequence[Site], f: Function, x: Tensor) -> _Graph:
    """Run f at the samples x, and return its autograd graph with the parts that get shares.

    Parts are attention outputs, attention maps, MLPs and the like. A share is the fraction of the
    derivative of f in a direction that runs through a part.

    Args:
        net: the model.
        sites: its attention layers.
        f: the map from x to the output, as in `linearize`.
        x: the samples, (samples, *in).

    Raises:
        EvaluationError: the output differs from a pass that is not recorded.
    """
    index = torch.arange(len(x), device=x.device)
    # The pass without a graph runs first: a model that keeps state between passes would otherwise
    # write into tensors of the graph.
    with torch.no_grad():
        plain_output = evaluate(f, x.detach(), index)
    leaf = x.detach().clone().requires_grad_()
    recorder = Recorder()

    def run_recorded(z: Tensor, rows: Tensor) -> Tensor:
        with recorder.call_stack.following(net.module), recorder:
            return f(z, rows)

    output = evaluate(run_recorded, leaf, index)
    if not agree(plain_output, output.detach(), tolerance=AGREES):
        raise EvaluationError(
            "the output of the model changes when its attention is recorded",
            "Leave out --shares, and try --dtype float64.",
        )
    return _Graph(sites, recorder, leaf, output)


def _average(shares: Sequence[Tensor], count: Tensor) -> Tensor:
    """Return the mean shares of each sample over the directions that count for this sample.

    Args:
        shares: for each direction, (samples, ...). They are 0 if the direction does not count for
            a sample, and NaN if unknown; then the mean is NaN, too.
        count: how many directions count for each sample, (samples,).
    """
    # Whether a share is unknown depends on the part of the network, not on the direction. So the
    # first direction tells, which counts for every sample. In a further direction that does not
    # count, 0 / 0 may be NaN, too (if J^T u = 0), and `nansum` skips it.
    first = shares[0]
    count = count.view(-1, *[1] * (first.ndim - 1))  # (samples, 1, ...)
    mean = torch.stack([*shares]).nansum(0) / count
    return mean.masked_fill(first.isnan(), torch.nan)


def _compute_one_by_one(
    net: Net, sites: Sequence[Site], f: Function, x: Tensor, directions: Tensor, tied: Tensor
) -> Shares:
    """Return the shares of a batch like `compute_shares`, by one forward pass for each sample."""
    shares = []
    for i in range(len(x)):
        # The default value binds i of this round. Index 0 stands for sample i.
        def f_of_sample(z: Tensor, index: Tensor, i: int = i) -> Tensor:
            return f(z, index + i)

        one = slice(i, i + 1)
        shares.append(compute_shares(net, sites, f_of_sample, x[one], directions[one], tied[one]))
    return join_shares(shares)


def join_shares(parts: Sequence[Shares]) -> Shares:
    """Return the shares of several batches of the same steps as one."""
    return replace(
        parts[0],
        heads=torch.cat([part.heads for part in parts]),
        paths=torch.cat([part.paths for part in parts]),
        totals=torch.cat([part.totals for part in parts]),
    )


class _DirectionShares(NamedTuple):
    """Shares along one direction, float64 on the CPU, as in `Shares`.

    Attributes:
        heads: (samples, heads, 3).
        paths: (samples, steps, 4).
        totals: (samples, 3).
    """

    heads: Tensor
    paths: Tensor
    totals: Tensor


class _Graph:
    """The autograd graph of a recorded pass, with the edges of all parts O that have shares.

    Parts are the output, P and V of attention layers, and sums and branches of residual additions.

    Attributes:
        leaf: the samples, as the leaf of the graph.
        output: the output of the pass.
        layers: the attention calls of every layer that was found in the graph.
        steps: the steps of the network: attention, MLPs and blocks.
        missing: layers that were not found, and why.
        unsplit: layers without known P and V.
    """

    def __init__(
        self, sites: Sequence[Site], recorder: Recorder, leaf: Tensor, output: Tensor
    ) -> None:
        """Find all parts of a model in the graph of `output`, and hook their gradients.

        A part is a tensor inside the network that has a share: O, P or V of an attention call
        O = P V, or a residual sum or its branch. The order of the steps below matters: attention
        calls (`_find_layer`), then additions, which may contain them, then the list of steps
        (`_list_steps`), then the hooks.

        Args:
            sites: the attention layers of the model.
            recorder: what was recorded in the forward pass.
            leaf: the samples, as the leaf of the graph.
            output: the output of the pass.
        """
        self.sites = sites
        self.leaf = leaf
        self.output = output
        self.missing: dict[int, str] = {}
        self.layers: dict[int, list[AttentionEdges]] = {}
        for site in sites:
            self._find_layer(site, recorder)
        # The layer of each node that computed an attention output.
        self._layer_of: dict[Node, int] = {}
        unsplit = []  # the layer of each call whose P and V are unknown
        for index, calls in self.layers.items():
            for call in calls:
                if call.output is not None:
                    self._layer_of[call.output.node] = index
                if call.value is None:
                    unsplit.append(index)
        self.unsplit = tuple(dict.fromkeys(unsplit))
        self._additions = find_additions(output, self._layer_of.keys())
        self._list_steps(recorder)
        # (df/dO)^T u of every part O of the latest backward pass, by node and number of output.
        self._gradients: dict[tuple[Node, int], Tensor] = {}
        # Parts whose gradients are set to 0: they are held constant.
        self._blocked: set[tuple[Node, int]] = set()
        self._hook_parts()

    def _hook_parts(self) -> None:
        """Let backward passes record the gradients of all parts (`_record_gradients`).

        A part is a tensor inside the network: the output, P or V of an attention call, or the sum
        or a branch of a residual addition.
        """
        edges: list[GradientEdge | None] = []  # of the parts; None: unknown
        for call in chain(*self.layers.values()):
            edges += [call.output, call.pattern, call.value]
        for addition in self._additions:
            edges += [addition.sum, *addition.branches]
        # A node may compute several parts, as outputs with numbers: it gets one hook for all.
        numbers = group_values((edge.node, edge.output_nr) for edge in edges if edge is not None)
        for node, outputs in numbers.items():
            node.register_prehook(partial(self._record_gradients, node, frozenset(outputs)))

    def _find_layer(self, site: Site, recorder: Recorder) -> None:
        """Find the attention calls of a layer in the recorded pass, or note why they are missing.

        Calls have the addresses of the survey, unless the module takes another path in this pass.
        """
        module = site.address.module
        recorded = {address for address in recorder.calls if address.module == module}
        # Of all layers, because a module may have several.
        surveyed = {*chain(*(other.addresses for other in self.sites))}
        # If the module makes a call that the survey does not have, or leaves out a call of this
        # layer, none of its calls can be identified as this layer.
        if not recorded <= surveyed or not recorded.issuperset(site.addresses):
            self.missing[site.index] = "its attention is not found in a pass with gradients"
            return
        calls = [recorder.calls[address] for address in site.addresses]
        if any(call.output is None for call in calls):  # the output of a call has no gradient
            self.missing[site.index] = NO_PATH
            return
        self.layers[site.index] = calls

    def _list_steps(self, recorder: Recorder) -> None:
        """List the steps of the network in `self.steps`, in the order of execution.

        They are the residual additions (of attention or an MLP), the blocks of several additions
        (in a transformer block, of attention and of an MLP), and attention layers that lie in no
        addition. `get_order` returns the position of a graph node in the order of execution. A
        step is sorted by its last node.
        """
        modules = {site.index: site.module for site in self.sites}
        attention_nodes = sorted(self._layer_of, key=get_order)
        steps: list[tuple[int, Step]] = []  # with the order of their last node
        added_layers: set[int] = set()  # layers inside an addition
        starts = []  # indices of additions of attention, each of which begins a block
        # First kind of steps: the additions. `first` and `last` of a step are indices of
        # `self._additions`. An MLP gets the layer of the last attention before it.
        for i, addition in enumerate(self._additions):
            layers = [self._layer_of[node] for node in attention_nodes if addition.holds(node)]
            part, layer = self._describe_addition(addition, layers)
            if layers:
                module = modules[layer]
                starts.append(i)
                added_layers.update(layers)
            else:
                module = recorder.find_module(addition)
            steps.append((get_order(addition.sum.node), Step(part, layer, module, first=i)))
        # Second kind: blocks, each from its first addition to the last one before the next block.
        for first, last in find_blocks(self._additions, starts):
            order = get_order(self._additions[last].sum.node)
            # The first steps of the list are those of the additions, one for each.
            _, step = steps[first]
            steps.append((order, Step("block", step.layer, module="", first=first, last=last)))
        # Third kind: attention outside of all additions.
        for node in attention_nodes:
            layer = self._layer_of[node]
            if layer not in added_layers:  # the layer lies in no addition
                added_layers.add(layer)
                steps.append((get_order(node), Step("attention", layer, modules[layer])))
        self.steps = tuple(step for _, step in sorted(steps, key=lambda pair: pair[0]))

    def _describe_addition(self, addition: Addition, layers: Sequence[int]) -> tuple[str, int]:
        """Return the `part` and the `layer` of the step that an addition x + F(x) + G(x) makes.

        Args:
            addition: the addition.
            layers: the attention layers in its branches F and G, in the order of execution.
        """
        if layers:  # the last one names the step, if there are several
            # A branch without attention is an MLP in parallel.
            part = "attention and MLP" if self._find_mlps(addition) else "attention"
            return part, layers[-1]
        # An MLP, listed with the last attention layer before it (-1: none).
        before = [n for n in self._layer_of if get_order(n) < get_order(addition.sum.node)]
        last_node = max(before, key=get_order, default=None)
        return "MLP", -1 if last_node is None else self._layer_of[last_node]

    def _find_mlps(self, addition: Addition) -> list[GradientEdge]:
        """Return the branches of a residual addition that compute no attention, so an MLP."""
        branches = zip(addition.branches, addition.inside, strict=True)
        return [edge for edge, inside in branches if self._layer_of.keys().isdisjoint(inside)]

    def has_samples_first(self, samples: int) -> bool:
        """Say whether all sums and branches of additions have the samples along their first axis.

        This is certain if the first axis, and no other axis, is as long as the number of samples.
        """
        edges = [edge for each in self._additions for edge in (each.sum, *each.branches)]
        shapes = map(_find_shape, edges)
        return all(shape[0] == samples and samples not in shape[1:] for shape in shapes)

    def _record_gradients(
        self, node: Node, outputs: Collection[int], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Record the gradients (df/dO)^T u of parts O, or set them to 0: a hook of autograd.

        Autograd gives both operands of a sum the same gradient tensor. Each operand's gradient is
        recorded as a new view, so that `measure` can differentiate with respect to it alone.

        Args:
            node: the graph node that computed the parts.
            outputs: which of its outputs are parts.
            gradients: the gradients of all its outputs, from the backward pass.

        Returns:
            The gradients with which the backward pass goes on.
        """
        passed = list(gradients)
        for number in outputs:
            gradient = passed[number]
            if gradient is None:
                continue
            if (node, number) in self._blocked:
                passed[number] = torch.zeros_like(gradient)
            else:
                view = gradient.view_as(gradient)
                self._gradients[node, number] = view
                passed[number] = view
        return tuple(passed)

    def measure(self, u: Tensor, counts: Tensor) -> _DirectionShares:
        """Return the shares of all parts O along one output direction u of each sample.

        The model's output is f(x), with the Jacobian J. With v = J^T u, the share of a part O is
        < (df/dO)^T u, (dO/dx) v > / |v|^2.

        Args:
            u: the direction of each sample, with the entries of the output.
            counts: whether u counts at each sample, (samples,); if not, its shares are 0.
        """
        # u requires a gradient, so that every (df/dO)^T u has a graph. For a part O after the last
        # nonlinearity, (df/dO)^T u depends on u alone.
        # At samples at which u does not count, u is 0: J^T u might be nothing but rounding errors,
        # which `_require_transpose` would take for a wrong derivative.
        u = u.detach() * counts.to(u.device)[:, None]
        u = u.to(self.output.dtype).view_as(self.output).requires_grad_()
        self._gradients.clear()
        pulled = pull_back(self.output, self.leaf, u, create_graph=True)[0]  # J^T u
        v = pulled.detach()  # not normalised: shares are divided by |v|^2 below
        gradients = dict(self._gradients)  # (df/dO)^T u of each O, recorded by hooks in this pass
        # The derivative of < J^T u, v > with respect to u is J v. Its derivative with respect to
        # (df/dO)^T u is (dO/dx) v. One more backward pass gives both for all parts.
        image, *tangents = pull_back(
            pulled, [u, *gradients.values()], v, retain_graph=True, allow_unused=True
        )
        products = _Products(gradients, dict(zip(gradients, tangents, strict=True)), self.leaf)
        square = _sum_samples(v.double().square())
        _require_transpose(u, image, square)
        # All shares are unscaled (times |v|^2) until the end.
        by_layer = {site.index: self._sum_heads(site, products) for site in self.sites}
        heads = torch.cat([*by_layer.values()], 1)
        paths = torch.stack([self._sum_step(step, by_layer, products) for step in self.steps], 1)
        # Three kinds of parts: attention, P, and MLPs. Paths through at least one part of a kind
        # are all paths, minus the paths that go around all parts of this kind.
        through = [square - self._pull_around(edges, u, v) for edges in self._list_kinds()]
        totals = torch.stack(through, 1)
        # 1 / |v|^2, or 0 at samples at which u does not count. NaN if it does not count and v = 0:
        # `_average` skips it.
        scale = counts.cpu().double() / square
        scale = scale.view(-1, 1, 1)
        return _DirectionShares(heads * scale, paths * scale, totals * scale[:, 0])

    def _list_kinds(self) -> list[list[GradientEdge | None]]:
        """Return the edges of all attention outputs, all patterns P and all MLPs: three lists.

        A list contains None if an edge is unknown.
        """
        calls = [*chain(*self.layers.values())]
        outputs = [call.output for call in calls]
        patterns = [call.pattern for call in calls]
        # `missing` has a reason for each layer without shares. A layer with the reason `NO_PATH`
        # does not depend on the input, and has a share of 0. Any other reason: it is unknown.
        if set(self.missing.values()) - {NO_PATH}:
            outputs = [None]
            patterns = [None]
        return [outputs, patterns, [*chain(*map(self._find_mlps, self._additions))]]

    def _pull_around(self, edges: Sequence[GradientEdge | None], u: Tensor, v: Tensor) -> Tensor:
        """Return <u, J' v> of each sample, where J' is the Jacobian of paths around some parts.

        The parts are held constant: no gradient passes them. NaN if a part is unknown.

        Args:
            edges: the parts.
            u: an output direction for each sample.
            v: an input direction for each sample.
        """
        if None in edges:
            return torch.full((len(self.leaf),), torch.nan, dtype=torch.float64)
        # `_record_gradients` sets the gradients of blocked parts to 0.
        self._blocked = {(edge.node, edge.output_nr) for edge in edges if edge is not None}
        pulled = pull_back(self.output, self.leaf, u.detach(), retain_graph=True)[0]
        self._blocked = set()
        return _sum_samples((pulled * v).double())

    def _sum_heads(self, site: Site, products: _Products) -> Tensor:
        """Return the unscaled shares of each head's output O, pattern P and values V.

        The unscaled share of a tensor T is < (df/dT)^T u, (dT/dx) v >: the sum of `products` over
        all its entries. The result is (samples, heads, 3); NaN if unknown.
        """
        samples = len(products.leaf)
        sums = torch.full((samples, site.heads, 3), torch.nan, dtype=torch.float64)
        calls = self.layers.get(site.index, [])
        for i, name in enumerate(("output", "pattern", "value")):
            edges = [getattr(call, name) for call in calls]
            if not edges or None in edges:  # unknown: NaN
                continue
            # Sum over the last axis: the channels of a token in O and V, the keys of a query in P.
            of_calls = [products.multiply(edge).sum(-1, keepdim=True) for edge in edges]
            # `layout` says which of samples, windows (groups of tokens that attend to each other),
            # heads and tokens lie along each axis of the model's tensors. If heads and tokens lie
            # along the axis of queries, all heads read one V: there is no sum per head.
            if name == "value" and site.layout.queries != TOKENS:
                self.missing[site.index] = "its heads share their values"
                break
            # (windows of all samples, heads, tokens, 1)
            of_tokens = site.layout.arrange(site.join(of_calls), samples)
            of_windows = of_tokens.sum((-2, -1))  # (windows of all samples, heads)
            if of_windows.shape[1] != site.heads or len(of_windows) % samples:
                self.missing[site.index] = "its heads and samples cannot be distinguished"
                break
            of_windows = of_windows.reshape(samples, -1, site.heads)
            sums[:, :, i] = of_windows.sum(1).cpu()
        return sums

    def _sum_step(self, step: Step, heads: Mapping[int, Tensor], products: _Products) -> Tensor:
        """Return the unscaled shares of a step of the network, such as a residual addition.

        The unscaled share of a tensor T is < (df/dT)^T u, (dT/dx) v >, one number per sample.

        Args:
            step: the step.
            heads: for each layer, the shares of each head's output, P and V, (samples, heads, 3).
            products: gives the share of any tensor.

        Returns:
            (samples, 4): the whole step, all P in it, all V in it, and all MLPs in it. NaN if the
            step has no such part, or if it is unknown.
        """
        sums = torch.full((len(products.leaf), 4), torch.nan, dtype=torch.float64)
        if step.first < 0:  # an attention layer that lies in no residual addition
            # The sum over its heads gives the first three columns: the output, P and V.
            sums[:, :3] = heads[step.layer].sum(1)
            return sums
        if step.part == "block":
            sums[:, 0] = self._sum_block(step, products)
            return sums
        addition = self._additions[step.first]
        sums[:, 0] = torch.stack([products.sum(edge) for edge in addition.branches]).sum(0)
        # P and V of the layers in the branches. A layer computed in several calls has several
        # nodes, and counts once.
        layers = {layer: None for node, layer in self._layer_of.items() if addition.holds(node)}
        if layers:
            of_heads = torch.cat([heads[layer] for layer in layers], 1)  # (samples, heads, 3)
            sums[:, 1:3] = of_heads[:, :, 1:].sum(1)
        mlps = [products.sum(edge) for edge in self._find_mlps(addition)]
        if mlps:
            sums[:, 3] = torch.stack(mlps).sum(0)
        return sums

    def _sum_block(self, block: Step, products: _Products) -> Tensor:
        """Return the unscaled share of a block of residual additions without its skip, (samples,).

        A block has the output y = x + F_1 + F_2 + ..., where the term x is the skip. Let dT be the
        change of a tensor T for a change v of the input. The share of y is < (df/dy)^T u, dy >.
        Of it, < (df/dy)^T u, dx > goes through the skip. The rest is the share of the block.
        """
        first = self._additions[block.first]  # y_1 = x + F_1
        y = self._additions[block.last].sum
        # The graph has no tensor that is x alone, so dx = dy_1 - dF_1:
        # < (df/dy)^T u, dx > = < (df/dy)^T u, dy_1 > - < (df/dy)^T u, dF_1 >.
        skip = products.sum(y, moving=first.sum)
        for edge in first.branches:
            skip -= products.sum(y, moving=edge)
        # The share of y is not always 1: in a model of two towers, paths may go around the block
        # and its skip.
        return products.sum(y) - skip


class _Products(NamedTuple):
    """The products (df/dO)^T u (dO/dx) v of parts O, along a direction u with v = J^T u.

    Their sum over all entries of O is |v|^2 times the share of O.

    Attributes:
        gradients: (df/dO)^T u, by the graph node of O and its number among the node's outputs.
        tangents: (dO/dx) v, likewise; None if O does not depend on the input.
        leaf: the samples.
    """

    gradients: Mapping[tuple[Node, int], Tensor]
    tangents: Mapping[tuple[Node, int], Tensor | None]
    leaf: Tensor

    def multiply(self, edge: GradientEdge, moving: GradientEdge | None = None) -> Tensor:
        """Return the gradient at a tensor O times the tangent at O', entry by entry.

        O is the tensor at `edge`, with the gradient (df/dO)^T u of the model's output f, for an
        output direction u. O' is the tensor at `moving` (None: O itself), with the tangent
        (dO'/dx) v, for an input direction v. The result has the shape of O. It is zero if f does
        not depend on O, or if O' does not depend on the input x.
        """
        source = edge if moving is None else moving
        gradient = self.gradients.get((edge.node, edge.output_nr))
        tangent = self.tangents.get((source.node, source.output_nr))
        if gradient is None or tangent is None:
            return self.leaf.new_zeros(_find_shape(edge), dtype=torch.float64)
        return (gradient.detach() * tangent).double()

    def sum(self, edge: GradientEdge, moving: GradientEdge | None = None) -> Tensor:
        """Return the sum of `multiply` over the entries of each sample, (samples,)."""
        products = self.multiply(edge, moving)
        return _sum_samples(products.reshape(len(self.leaf), -1))


def _sum_samples(products: Tensor) -> Tensor:
    """Return the sum over all entries of each sample, (samples,), on the CPU."""
    return products.flatten(1).sum(1).cpu()


def _require_transpose(u: Tensor, image: Tensor | None, square: Tensor) -> None:
    """Check that < u, J v > = |v|^2 for v = J^T u, as it must be for the transpose of J.

    J v comes from a second derivative. If an operation of the model has no second derivative,
    autograd may leave out the paths through this operation, and shares would be wrong.

    Args:
        u: the direction of each sample.
        image: J v; None if autograd finds that J^T u does not depend on u.
        square: |v|^2 of each sample.

    Raises:
        EvaluationError: an operation of the model has a first derivative alone.
    """
    product = torch.zeros_like(square)
    if image is not None:
        product = _sum_samples((u.detach() * image).double())
    # 1e-3: more than rounding, and far less than a path that is left out.
    if not torch.allclose(product, square, rtol=10 * AGREES, atol=0):
        raise EvaluationError(
            "an operation of the model has a derivative that cannot be differentiated again",
            "Leave out --shares, or write its backward pass in differentiable operations.",
        )


def _find_shape(edge: GradientEdge) -> torch.Size:
    """Return the shape of the tensor at an edge of an autograd graph."""
    metadata: Any = edge.node._input_metadata[edge.output_nr]
    return torch.Size(metadata.shape)
