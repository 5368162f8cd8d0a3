"""Read the attention of any transformer: one pass over the unmodified model, layer by layer.

`survey` (in `lipaudit.models.attention.survey`) analyses each layer once. `capture` then runs the
model on a batch and passes each layer to a function while the model runs, so that only the tensors
of one layer are in memory. The first half of this file turns an attention call into `Heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, InputError, StructureError
from lipaudit.models.attention import projections
from lipaudit.models.attention.calls import (
    Address,
    AttentionCall,
    AxisLayout,
    Fused,
    Loop,
)
from lipaudit.models.attention.logits import read_position_terms, read_product
from lipaudit.models.attention.projections import NotClosedForm, Projected, ProjectionForm
from lipaudit.models.attention.trace import Frame, Tracer, fork_random, run
from lipaudit.models.graph import make_identity
from lipaudit.models.net import Net
from lipaudit.models.precision import WeightReference, exact_arithmetic, read_weight
from lipaudit.models.requirements import AGREES
from lipaudit.theory.head_norms import forward_error
from lipaudit.theory.heads import Heads
from lipaudit.theory.products import sketched_vjp_x
from lipaudit.theory.pullback import pull_back


def add_inputs(
    structure: Structure,
    attention: Heads,
    call: AttentionCall,
    batch: Batch,
    relative: Tensor | None,
) -> tuple[Heads, dict[str, Projected]]:
    """Add X, the maps from X to q, k and v, position vectors and W_O to the heads of a layer.

    X is the input of the layer: the tokens that the linear maps of q, k and v read.

    Args:
        structure: how q, k and v of the layer are computed, from its survey.
        attention: q, k, v and the logits of the layer, from `read_product`.
        call: the attention call of the layer, with canonical axes.
        batch: the samples.
        relative: the logits with their autograd graph, from `read_product`, if the model adds
            terms of positions that depend on q or k (relative positions). None if the model adds
            no such terms.

    Returns:
        The heads. And the projections (maps from X) by the names "q", "k" and "v". "q" is missing
        if the queries are constants, the same for every sample.

    Raises:
        NotClosedForm: the call does not have this structure.
    """
    parts = _project(structure, call, batch)
    x_kv = parts["k"].x  # keys and values always read the same tensor
    windows, heads, queries, _ = call.q.shape
    if "q" in parts:
        x = parts["q"].x
        to_q = parts["q"].projection
    else:  # constant queries: nothing reads their X, so zeros of the right shape will do
        x = x_kv.new_zeros(windows, queries, x_kv.shape[2])
        to_q = None
    layer = replace(
        attention,
        x=x,
        # None: queries, keys and values read one x (`joint`; never with constant queries).
        x_kv=None if structure.joint else x_kv,
        to_q=to_q,
        to_k=parts["k"].projection,
        to_v=parts["v"].projection,
        out=None if structure.out is None else structure.out.split_heads(heads),
    )
    if relative is not None:  # position vectors, from the logits and the projections
        layer = replace(layer, pairs=read_position_terms(layer, relative, parts))
    return layer, parts


def _project(structure: Structure, call: AttentionCall, batch: Batch) -> dict[str, Projected]:
    """Return the maps from the input X of a layer to its q, k and v, by the names "q", "k", "v".

    "q" is missing if the queries are constants. X is 0 at padded tokens.

    Args:
        structure: how q, k and v are computed, from the survey of the layer.
        call: the attention call of the layer, with canonical axes.
        batch: the samples.

    Raises:
        NotClosedForm: the call does not have this structure.
    """
    parts = {}
    for name in "qkv":
        form: ProjectionForm | None = getattr(structure, name)
        if form is None:  # the queries are constants
            continue
        t: Tensor = getattr(call, name)
        part = projections.project(form, t, call.origins.find_leaves(t), len(batch))
        # Set padded tokens to 0: bounds contain norms of X, and should not count padding. If the
        # layer reads more or fewer tokens than the text has (pooled tokens, another encoder), the
        # mask cannot say which are padding. Then all count, and the bounds are only larger.
        if batch.mask is not None and batch.mask.shape[1] == part.index.length:
            is_real = part.index.pick(batch.mask)  # (windows, tokens)
            part = replace(part, x=part.x * is_real[..., None])
        parts[name] = part
    return parts


Result = TypeVar("Result")


@dataclass(frozen=True)
class Layer:
    """One attention layer on a batch; valid only while the model runs it.

    Attributes:
        site: the layer's site.
        call: the attention call of the model, with its axes in order.
        batch: the samples.
        attention: heads that give P for every kind of layer, without X and projections. If the
            model writes its softmax out, q, k and v are empty and `bias` holds the logits.
        frame: the module call that contains the layer (`site.scope`); None if unknown.
        numbers: numbers of the layer's attention calls within this module call.
    """

    site: Site
    call: AttentionCall
    batch: Batch
    attention: Heads
    frame: Frame | None
    numbers: Sequence[int]

    @property
    def samples(self) -> int:
        """Return the number of samples in the batch."""
        return len(self.batch)

    @property
    def output(self) -> Tensor:
        """Return O of every head, (windows, heads, tokens, d_v)."""
        return self.call.output.detach()

    def heads(self) -> Heads:
        """Return the layer with X and its projections, for the closed form of its site.

        Raises:
            InputError: the layer has no closed form.
            StructureError: the layer differs from its survey, or its closed form differs from
                autograd for a random vector on these samples.
        """
        site = self.site
        structure = site.structure
        if structure is None:  # only measures of plug-ins call this for such a layer
            text = f"layer {site.index} ({site.module}) has no closed form: {site.reason}"
            raise InputError(text, "Leave it out with --layers.")
        try:
            with torch.enable_grad():
                # `attention` has q, k, v and the logits. `relative` is the logits with their graph
                # if relative positions make them depend on q or k beyond q k^T, else None.
                attention, relative = read_product(self.call, self.batch, structure.q)
                # `parts`: the maps from X to q, k and v, by the names "q", "k" and "v".
                heads, parts = add_inputs(structure, attention, self.call, self.batch, relative)
                if not matches_autograd(heads, parts, self.call):
                    raise NotClosedForm("has a closed form that disagrees with autograd")
                return heads
        except NotClosedForm as obstacle:
            raise StructureError(site.index, site.module, obstacle.reason) from obstacle


def capture(
    net: Net,
    sites: Sequence[Site],
    batch: Batch,
    reduce: Callable[[Layer], Result],
    *,
    layers: Collection[int] | None = None,
    projections: bool = True,
) -> list[Result]:
    """Run the unmodified model on a batch and reduce its attention layers in call order.

    The pass ends after the last requested layer.

    Args:
        net: the model.
        sites: all its layers, from `survey`: a layer is identified by its number within its
            module.
        batch: the samples.
        reduce: function of a layer; tensors that its result does not keep are freed before the
            next layer.
        layers: indices of the layers to reduce; None for all.
        projections: whether `reduce` calls `Layer.heads`; the pass is cheaper if it does not.

    Returns:
        The results, one per layer.

    Raises:
        EvaluationError: a selected layer did not run.
    """
    # Requested layers that have not run yet. A layer that the model skips stays in here.
    pending = {site.address: site for site in sites if layers is None or site.index in layers}
    # Cut the graph at the linear maps behind q, k and v of the layers whose projections are read.
    # Do so for every written-out softmax, too: the tracer recognises it by a graph from q or k.
    cut_at = frozenset[Address]()
    for site in sites:
        if site.explicit or (projections and site.address in pending):
            cut_at |= site.sources
    results = list[Result]()

    def reduce_layer(call: AttentionCall, address: Address) -> None:
        """Append the result of a requested layer, while the model runs it; end after the last."""
        site = pending.pop(address, None)
        if site is None:  # not requested
            return
        with torch.no_grad():
            results.append(reduce(make_layer(site, call, batch, tracer.call_stack.frames)))
        if not pending:
            raise _AllRead

    tracer = Tracer(reduce_layer, cut_at=cut_at, loops=(site.loop for site in sites))
    with suppress(_AllRead), fork_random(net), exact_arithmetic(net.device):
        run(net, batch, tracer)
    for site in pending.values():  # report the first layer that did not run
        raise EvaluationError(
            f"attention layer {site.index} ({site.module}) was not used for this batch",
            "The model chooses its layers by the data. Leave this layer out with --layers.",
        )
    return results


class _AllRead(Exception):
    """Ends a pass: the rest of the model, with its logits over all tokens, is not needed."""


def make_layer(site: Site, call: AttentionCall, batch: Batch, frames: Sequence[Frame]) -> Layer:
    """Return a layer at its attention call, while the model runs.

    Args:
        site: the layer, from the survey.
        call: its call, with the axes of the model.
        batch: the samples.
        frames: the module calls in progress.

    Raises:
        InputError: the call has another number of heads than in the survey.
    """
    with torch.enable_grad():  # `Layer.heads` walks the graph of these tensors
        call = call.arrange(site.layout, len(batch))
    # Heads that give P for any kind of layer: `_fuse` makes the logits a mask, and q k^T = 0. The
    # form of q, if known, tells which queries are padding.
    form_of_q = site.structure.q if site.structure else None
    attention, _ = read_product(_fuse(call), batch, form_of_q)
    heads = attention.q.shape[1]
    if heads != site.heads:  # the survey took an axis of tokens for heads
        raise InputError(
            f"attention layer {site.index} ({site.module}) has {heads} heads on "
            f"this batch and had {site.heads} when the model was loaded, so heads and tokens "
            "cannot be distinguished",
            "Leave it out with --layers, or use lipaudit jacobian or lipaudit attack, which need "
            "no heads.",
        )
    # Find the call of the module that holds the layer, and the numbers of the layer's attention
    # calls in this module call. With these, the module can run again alone, for numerical norms.
    frame = next((frame for frame in reversed(frames) if frame.name == site.scope), None)
    calls = [] if frame is None else frame.attentions
    numbers = [calls.index(address) for address in site.addresses if address in calls]
    return Layer(site, call, batch, attention, frame, numbers)


def _fuse(call: AttentionCall) -> AttentionCall:
    """Return a call of torch's fused attention with the same P; a fused call as it is.

    For a written-out softmax, the logits are the mask of the result, and q k^T = 0: q, k and v
    have width 0. Logits of any kind can be read in this form.
    """
    if isinstance(call.form, Fused):
        return call
    logits = call.form.logits.detach()  # (windows, heads, queries, keys)
    q = logits[..., :0]
    k = logits.mT[..., :0]
    return replace(call, q=q, k=k, v=k, form=Fused(scale=0.0, mask=logits, causal=False))


ONE_INPUT = "one input"
APART = "queries apart"
KEYS = "keys and values"
MODULE_INPUT = "module input"
"""Inputs with respect to which a norm can be computed; the last one always works."""


@dataclass(frozen=True)
class OutputMap:
    """W_O, if the layer's output is sum_h O_h W_O,h.

    Attributes:
        reference: weight of the output projection, (channels in, channels out), or a reference to
            the weight (`precision.refer_to_weight`).
        order: for each channel of the concatenated heads, the row of the weight that it meets.
        gain: factor of each channel before the projection.
    """

    reference: Tensor | WeightReference
    order: Tensor
    gain: Tensor

    def split_heads(self, heads: int) -> Tensor:
        """Return W_O of each head, (heads, d_v, channels out)."""
        # The rows of the weight in the order of the heads' channels, times the factor of each.
        weight = read_weight(self.reference)[self.order] * self.gain[:, None]
        return torch.unflatten(weight, 0, (heads, -1))


@dataclass(frozen=True)
class Structure:
    """The origins of the tensors of a closed-form layer.

    Attributes:
        q, k, v: how each is computed from the input; None for queries that are constants.
        joint: whether q reads the same tokens as k and v.
        out: the output projection, if there is a plain one.
    """

    q: ProjectionForm | None
    k: ProjectionForm
    v: ProjectionForm
    joint: bool
    out: OutputMap | None


@dataclass(frozen=True)
class Site:
    """One attention layer of a model.

    Attributes:
        index: its number, in call order.
        module: path of the innermost module that computes it.
        heads: number of heads.
        kinds: kinds of q, k and v as functions of the layer's input: affine, rotation, linear-pos,
            local, cross-head, constant, or the obstacle to a closed form.
        structure: the origins of its tensors; None without a closed form.
        reason: why there is no closed form; None if there is one.
        address: address of its attention call in the forward pass.
        layout: the axes of its q, k and v.
        sources: the ops at which the graph must be cut to read it.
        explicit: whether the model writes its softmax out.
        scope: path of the innermost module that holds the layer and its projections.
        inputs: arguments of that module that depend on the model's input; empty if the Jacobian
            cannot be computed numerically.
        arguments: names of `inputs` in the module's code; one tensor given twice has one name.
        direct: whether the projections read these arguments directly: the norm with respect to the
            projections' inputs is then the module's.
        line: the line of code that computes it, `file:line`.
        loop: its attention calls, if the model computes heads, or chunks of queries, one by one;
            `address` is the last one.
        learned: whether its queries are the same for all samples.
        inner: further linear maps between the input and q, k and v.
        partners: numbers of all layers that share its maps of q and k; empty if none do.
    """

    index: int
    module: str
    heads: int
    kinds: tuple[str, ...]
    structure: Structure | None
    reason: str | None
    address: Address
    layout: AxisLayout
    sources: frozenset[Address]
    explicit: bool
    scope: str
    inputs: tuple[int | str, ...]
    arguments: tuple[str, ...]
    direct: bool
    line: str
    loop: Loop | None
    learned: bool
    inner: frozenset[Address] = frozenset()
    partners: tuple[int, ...] = ()

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Return the addresses of the layer's attention calls in the forward pass."""
        if self.loop is None:
            return (self.address,)
        return self.loop.addresses

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a tensor of the layer, such as its output, from the tensors of its calls."""
        if self.loop is None:  # a single call
            return parts[0]
        return self.loop.join_tensors(parts)

    @property
    def closed_form(self) -> bool:
        """Return whether the Jacobian has the closed form of the theory."""
        return self.structure is not None

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the modules whose input is X: the modules of the linear maps of q, k and v.

        Without a closed form, X is the input of the module that holds the layer.
        """
        if not self.closed_form:
            return (self.scope,)
        return tuple(sorted({source.module for source in self.sources}))

    @property
    def input(self) -> str:
        """Return the name of the input with respect to which the layer's norm is computed.

        With a closed form: "one input" for self-attention, "queries apart" if the queries have
        another input than the keys and values, "keys and values" if the queries are constants.
        """
        if self.structure is None:  # no closed form
            return self.module_input
        if self.structure.q is None:  # queries are constants
            return KEYS
        return ONE_INPUT if self.structure.joint else APART

    @property
    def module_input(self) -> str:
        """Return the name of the module's inputs, for norms by differentiating the module.

        For example "module input (query = key, value)".
        """
        if not self.inputs:  # the module cannot run alone: there is no norm
            return MODULE_INPUT
        return f"{MODULE_INPUT} ({', '.join(self.arguments)})"


def list_blocks_without_attention(module: nn.Module, sites: Sequence[Site]) -> tuple[str, ...]:
    """Return the paths of blocks without attention in a stack where other blocks have attention.

    A stack is an `nn.ModuleList` of blocks that is not inside another one.

    Args:
        module: the model.
        sites: its attention layers.
    """
    # Compare modules by identity: an attention module that several blocks share has several paths.
    attention_modules = {id(module.get_submodule(site.module)) for site in sites}

    def has_attention(block: nn.Module) -> bool:
        return any(id(part) in attention_modules for part in block.modules())

    stacks = {n: part for n, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    without = []
    for name, stack in stacks.items():
        is_inside_other = any(name.startswith(f"{outer}.") for outer in stacks)
        if is_inside_other or not has_attention(stack):
            continue
        without += [f"{name}.{i}" for i, block in enumerate(stack) if not has_attention(block)]
    return tuple(without)


HOPELESS = 0.1
"""If rounding changes J by more than this, the closed form cannot be checked against autograd."""
SKETCH = 16  # number of directions in an input's channels in which gradients are compared


def matches_autograd(heads: Heads, parts: Mapping[str, Projected], call: AttentionCall) -> bool:
    """Say whether the closed form of J^T u equals autograd's on a batch, for one random u.

    J is the Jacobian of all heads' outputs O with respect to the layer's input: x, or x of queries
    and x_kv of keys and values. Of each gradient G = J^T u, (tokens, channels), only the product
    G R with a few random directions R of the channels is compared (`_draw_sketch` draws R, the
    same for both sides). This costs one backward pass through the attention, and about as much
    again for the closed form.

    Args:
        heads: the layer in closed form.
        parts: how its q, k and v are computed from its input, by name; constants are missing.
        call: its attention call, with canonical axes and its graph.
    """
    u, closed_form = _pull_closed_form(heads, parts, _draw_cotangent(heads, call.output))
    u = u.to(call.output)
    queries = [parts["q"]] if "q" in parts else []
    keys_and_values = [parts["k"], parts["v"]]
    # Projections that read one input: all of them in self-attention, or if one linear map serves
    # both queries and keys.
    groups = [queries, keys_and_values]
    if heads.x_kv is None or not queries or _share_leaf(queries, keys_and_values):
        groups = [queries + keys_and_values]
    differences = []
    for group in groups:
        # G R by autograd, minus (below) G R by the closed form of the same input. It has a row for
        # each token that the model's linear maps read: (tokens of all samples, directions).
        difference = _pull_to_inputs(group, call, u)
        for part, gradient in closed_form:
            if any(part is other for other in group):  # both are of one input
                # The closed form has a row for each token in each window of the attention.
                # Several of them may read one token, the row `rows` of the input.
                samples = len(difference) // part.index.length
                rows = part.index.rows(samples).flatten()
                gradient = gradient.flatten(0, 1).to(difference)
                difference = difference.index_add(0, rows, gradient, alpha=-1)
        differences.append(torch.linalg.vector_norm(difference))
    # u is scaled such that G of each head and window has norm 1: this difference is relative.
    return bool(torch.stack(differences).norm() <= AGREES)


def _pull_closed_form(
    heads: Heads, parts: Mapping[str, Projected], u: Tensor
) -> tuple[Tensor, list[tuple[Projected, Tensor]]]:
    """Return the scaled u, and the gradients J^T u by the closed form, in random directions R.

    J is the Jacobian of all heads' outputs O with respect to a layer's input. The caller compares
    the sum over heads and windows with autograd, once, and must see an error in any of them. So u
    is scaled such that the gradient of each head and window has norm 1: an error of 1% of a head
    with tiny gradients is then as large as one of any other head. (Random errors of several heads
    add up, and do not cancel.)

    Args:
        heads: the layer in closed form.
        parts: how its q, k and v are computed from its input, by name.
        u: a cotangent of O.

    Returns:
        The scaled u. And for each input, x of queries and x_kv of keys and values, the first
        projection that reads it, and the gradient times R, (windows, tokens, directions).
    """
    sketches = {"x": _draw_sketch(heads.x), "x_kv": _draw_sketch(parts["k"].x)}
    # The norm that the gradient of each head is scaled to: 1 without rounding errors. With a large
    # relative rounding error e it is smaller: then the absolute error, e size = e / (1 + e /
    # AGREES), stays below AGREES, the tolerance of the comparison.
    size = 1 / (1 + forward_error(heads).to(u) / AGREES)
    u, pulled = sketched_vjp_x(heads, u, size, sketches)
    # The projections of q read x; those of k read x_kv.
    readers = {"x": "q", "x_kv": "k"}
    return u, [(parts[readers[name]], gradient) for name, gradient in pulled.items()]


def _draw_cotangent(heads: Heads, output: Tensor) -> Tensor:
    """Return a random cotangent of O, (windows, heads, tokens, d_v); 0 at padded queries.

    It is the same in every run: whether a layer has a closed form must not be a matter of chance.
    """
    generator = torch.Generator(output.device).manual_seed(0)
    u = torch.randn(output.shape, generator=generator, dtype=heads.q.dtype, device=output.device)
    if heads.valid is None:
        return u
    return u * heads.valid[:, None, :, None]


def _share_leaf(one: Sequence[Projected], other: Sequence[Projected]) -> bool:
    """Say whether a projection of each group is computed from the output of one linear map."""
    leaves = {id(leaf.tensor) for part in one for leaf in part.leaves}
    return any(id(leaf.tensor) in leaves for part in other for leaf in part.leaves)


def _pull_to_inputs(group: Sequence[Projected], call: AttentionCall, u: Tensor) -> Tensor:
    """Return G R: autograd's gradient G of <O, u> in a layer's input X, times random directions R.

    The caller compares G with the gradient from a closed form, and needs only the norm of the
    difference. Products with a few random directions R of the channels give this norm to some per
    cent, and cost less than the whole gradients.

    Args:
        group: the projections (of q, k, v) that read this input.
        call: the attention call, with its output O.
        u: a cotangent of O.

    Returns:
        (tokens of the input, directions).
    """
    # The outputs Y of the linear maps, each a leaf of the graph. A leaf that two projections read
    # counts once. Every leaf has a linear map: the condition is for the type checker.
    leaves = {id(leaf.tensor): leaf for part in group for leaf in part.leaves}.values()
    linears = [leaf.origin.linear for leaf in leaves if leaf.origin.linear is not None]
    outputs = [leaf.tensor for leaf in leaves]
    gradients = pull_back(call.output, outputs, u, retain_graph=True, materialize_grads=True)
    sketch = _draw_sketch(group[0].x)  # R, (channels, directions)
    # For Y = X W, the gradient H in Y is H W^T in X. So G R = sum_maps H W^T R, where the product
    # W^T R comes first, because it has few columns.
    products = []
    for linear, gradient in zip(linears, gradients, strict=True):
        mapped_sketch = linear.weight.T @ sketch
        rows = linear.outputs(gradient)  # H with one token per row
        products.append(rows @ mapped_sketch)
    return torch.stack(products).sum(0)


def _draw_sketch(x: Tensor) -> Tensor:
    """Return random directions R of the channels of x, (channels, directions).

    For the gradient g of a token, E ||R^T g||^2 = ||g||^2. So the sum of ||R^T g||^2 over all
    tokens gives the squared norm of the whole gradient to some per cent.
    """
    width = x.shape[-1]
    if width <= SKETCH:  # few channels: R is the identity, which compares each channel
        return make_identity(width, x)
    generator = torch.Generator(x.device).manual_seed(width)
    noise = torch.randn(width, SKETCH, generator=generator, dtype=x.dtype, device=x.device)
    return noise / SKETCH**0.5
