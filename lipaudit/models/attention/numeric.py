"""Exact norms of parts of a model by differentiation: of layers without closed form, of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from lipaudit.data.batch import Batch
from lipaudit.errors import EvaluationError, first_line, is_machine_error
from lipaudit.models.attention import trace
from lipaudit.models.attention.calls import Address, AttentionCall
from lipaudit.models.attention.capture import Layer, Site
from lipaudit.models.attention.events import AttentionMode
from lipaudit.models.graph import leaves
from lipaudit.models.linearize import Function, Linearization, linearize
from lipaudit.models.model_norms import JacobianNorms, compute_jacobian_norms, require_range
from lipaudit.models.net import Net, watch_modules
from lipaudit.models.precision import exact_arithmetic, widen_casts
from lipaudit.models.requirements import AGREES, agree
from lipaudit.theory.spectral import Norms, random_starts, spectral_norms


def compute_numeric_norms(layer: Layer, *, seeds: Sequence[int], **accuracy: Any) -> Norms:
    """Return ||J|| of every head of a layer, (samples, heads), by differentiating its module.

    J is the Jacobian of the head's output O_h with respect to all inputs of the innermost module
    that contains the attention and its projections. This module runs again.

    Args:
        layer: a layer, while the model runs it; the result is NaN if its module cannot run alone.
        seeds: seeds of the start vectors, one per sample.
        accuracy: `tol`, `max_steps` and `within` of `spectral_norms`.
    """
    linear = linearize_module(layer)
    if isinstance(linear, str):  # a text: the module cannot run alone
        nan = torch.full((layer.samples, layer.site.heads), torch.nan, dtype=torch.float64)
        is_known = nan.isfinite()  # False for every head: 0 products, not converged
        return Norms(norm=nan, upper=nan.clone(), products=is_known.long(), converged=is_known)
    one_head = layer.output[:, 0]  # (windows, tokens, d_v)
    size = one_head.numel() // layer.samples
    start = random_starts(seeds, size).to(one_head.device)  # (samples, numbers of one head)
    start = _zero_padding(start.view_as(one_head), layer).reshape_as(start)
    heads = range(layer.site.heads)
    by_head = [_compute_head_norms(layer, head, linear, start, **accuracy) for head in heads]
    return Norms.join(by_head, partial(torch.stack, dim=1))


def _compute_head_norms(
    layer: Layer, head: int, linear: Linearization, start: Tensor, **accuracy: Any
) -> Norms:
    """Return ||J_h|| at every sample, where J_h is the Jacobian of the output O_h of head h.

    Args:
        layer: the layer, while the model runs it.
        head: the number h of the head.
        linear: the module, linearised from all its inputs to O of all heads.
        start: start vector of the solver for each sample, (samples, numbers of one head).
        accuracy: `tol`, `max_steps` and `within` of `spectral_norms`.
    """

    def embed(u: Tensor) -> Tensor:
        """Return a cotangent of all heads' O that is u in this head and 0 in the others.

        It is one vector of all samples, (1, numbers), as the linearised module expects.
        """
        cotangent = torch.zeros_like(layer.output)
        rows = u.reshape_as(cotangent[:, head])
        cotangent[:, head] = _zero_padding(rows, layer)
        return cotangent.flatten()[None]

    def multiply(u: Tensor) -> Tensor:
        """Return J_h J_h^T u at every sample, for a cotangent u of this head's output.

        They are the rows of this head in J J^T w, where J is the Jacobian of all heads, and w is u
        in this head and 0 in the others.
        """
        product = linear.outer(embed(u)).view_as(layer.output)  # J J^T w
        rows = _zero_padding(product[:, head], layer)
        return rows.reshape_as(u)

    # All samples share one graph, because the module runs as a whole. So converged samples cannot
    # be left out: with `rebuild` above 1, the solver never asks for fewer samples.
    norms = spectral_norms(lambda _: multiply, start, rebuild=2.0, **accuracy)
    # Refuse norms so small that their digits are lost (underflow), unless J_h is 0. It may be 0 at
    # one sample (a black image) and not at others, so ask for each sample: ones at its outputs of
    # this head select its rows of J.
    for number, norm in enumerate(norms.norm):
        ones = torch.zeros_like(start)
        ones[number] = 1.0
        require_range(linear, norm[None], embed(ones))
    return norms


def linearize_module(layer: Layer) -> Linearization | str:
    """Linearise the module of a layer, or return a text that says why it cannot run on its own."""
    reason = "its module cannot be run alone"
    # Some attention calls of a loop may lie outside of the module.
    has_outside_calls = len(layer.numbers) < len(layer.site.addresses)
    # Samples may have different numbers of windows.
    is_uneven = len(layer.output) % layer.samples
    if not layer.site.inputs or layer.frame is None or has_outside_calls or is_uneven:
        return reason
    if not layer.output.isfinite().all():
        return "its output is not finite"
    try:
        linear = _linearize_layer(layer)
        # A trial product: an op without a derivative fails only in the backward pass.
        linear.outer(torch.ones_like(linear.output))
    except Exception as error:  # the model's own code may raise anything when run again
        if is_machine_error(error):
            raise
        return first_line(error) or reason
    return linear


class _Output(Exception):
    """Carries the output of the layer out of its module, so that the rest need not run."""


def _linearize_layer(layer: Layer) -> Linearization:
    """Linearise a layer's output O with respect to all inputs of its module.

    The module runs alone. All inputs of all samples are one vector, (1, numbers), and so is O.

    Raises:
        EvaluationError: the module gives another O than within the model.
    """
    frame = layer.frame
    assert frame is not None
    # The inputs by identity: a tensor that the module gets twice (queries and keys) is one input.
    arguments = [frame.arguments[key] for key in layer.site.inputs]
    inputs: list[Tensor] = list({id(t): t for t in arguments}.values())
    # One vector of all samples, because the module may keep samples in any axis.
    z = torch.cat([t.detach().flatten() for t in inputs])[None]

    def compute_output(z: Tensor, _index: Tensor) -> Tensor:
        """Return the layer's O if the entries of z replace the module's inputs.

        z and O are one vector of all samples, (1, numbers).
        """
        parts = torch.split(z[0], [t.numel() for t in inputs])
        # By the identity of the tensor that is replaced.
        replacements = {id(t): part.view_as(t) for t, part in zip(inputs, parts, strict=True)}
        output = _run_alone(layer, lambda: _run_again(frame, replacements))
        return output.flatten()[None]

    linear = Linearization(compute_output, z, index=z.new_zeros(1, dtype=torch.long))
    again = linear.output[0].view_as(layer.output)
    if not agree(layer.output, again, tolerance=AGREES, each=1):
        raise EvaluationError(
            f"{layer.site.scope} gives a different result when it is run alone",
            "It keeps state between calls. Leave its layers out with --layers.",
        )
    return linear


def _run_again(frame: trace.Frame, replacements: Mapping[int, Tensor]) -> Any:
    """Repeat a call of a module with other tensors in place of arguments, by their `id`."""
    args = [replacements.get(id(value), value) for value in frame.args]
    kwargs = {k: replacements.get(id(value), value) for k, value in frame.kwargs.items()}
    return frame.module(*args, **kwargs)


def _run_alone(layer: Layer, run_module: Callable[[], object]) -> Tensor:
    """Run the module of a layer up to the layer's last attention call, and return the layer's O.

    Args:
        layer: the layer.
        run_module: runs the module.

    Raises:
        EvaluationError: the module makes fewer attention calls.
    """
    site = layer.site
    calls: list[AttentionCall] = []

    def on_attention(call: AttentionCall, _address: Address) -> None:
        """End the run by an exception that carries O, at the layer's last attention call."""
        calls.append(call)
        # `numbers`: which attention calls of the module are the layer's, from 0.
        if len(calls) > layer.numbers[-1]:
            joined = call
            # A layer may be computed by a loop of several calls, such as one for each head.
            if site.loop is not None:
                joined = site.loop.join([calls[i] for i in layer.numbers])
            raise _Output(joined.arrange(site.layout, layer.samples).output)

    try:
        with AttentionMode(on_attention):
            run_module()
    except _Output as end:
        output: Tensor = end.args[0]
        return output
    raise EvaluationError(f"{site.scope} computes no attention when it is run alone")


def _zero_padding(rows: Tensor, layer: Layer) -> Tensor:
    """Set the rows of padded queries to zero, as they are not outputs: (windows, queries, d)."""
    valid = layer.attention.valid
    if valid is None:
        return rows
    return rows * valid[..., None]


class Residual(NamedTuple):
    """A call of a module that adds the result of its attention to its own input.

    Attributes:
        module: path of the module.
        call: number of the call in a forward pass (layers may share a module).
        input: position of the input among all arguments, with containers flattened.
        output: position of the output among all results, with containers flattened.
        by_sample: whether input and output have a row per sample, not per token or window.
        shared: arguments that all samples share, such as positions: the position and the number of
            rows of each tensor that has as many rows for two samples as for one.
    """

    module: str
    call: int
    input: int
    output: int
    by_sample: bool
    shared: frozenset[tuple[int, int]]


ResidualsByCall = dict[tuple[str, int], Residual]
"""Residual blocks by module and number of its call."""


def find_residuals(
    net: Net, batch: Batch, sites: Sequence[Site], *, entire: bool = False
) -> tuple[Residual | None, ...]:
    """Find the residual block of each attention layer: the smallest module with a skip path.

    The graph of the pass is cut at every linear map and every attention. The output of a module
    then depends on its input only if a skip path goes around these operations. In a pre-norm model
    the block holds attention and MLP; in BERT it holds the attention with its LayerNorm.

    Args:
        net: the model.
        batch: its first sample is run, alone and as two equal samples.
        sites: the attention layers.
        entire: return the largest module with a skip path and no other attention layer (in BERT
            the block with the MLP, too). If there is none, return the smallest with a skip path.

    Returns:
        One residual block per site, preferably with a row per sample; None if no module around
        the layer has a skip path.
    """
    by_call: ResidualsByCall = {}
    frames_around: dict[Address, list[trace.Frame]] = {}  # module calls around an attention call

    def note_frames(call_stack: trace.CallStack, _call: AttentionCall, address: Address) -> None:
        """Note the module calls in progress at an attention call, innermost first."""
        frames_around[address] = call_stack.frames[::-1]

    # The tracer cuts the graph at linear maps and attention by default. At the end of each module
    # call, `_note_residual` looks for a path from the output back to the input, and fills
    # `by_call`. At each attention, `note_frames` fills `frames_around`.
    # Run with one sample and with two. If the first axis of an output is as long as the number of
    # samples in both passes, the output has a row per sample; in one pass it may be chance.
    for samples in (1, 2):
        call_stack = trace.CallStack(on_leave=partial(_note_residual, by_call, samples))
        with trace.fork_random(net):
            first = batch[:1].trim()
            copies = first.rows(torch.zeros(samples, dtype=torch.long))
            tracer = trace.Tracer(partial(note_frames, call_stack), call_stack=call_stack)
            trace.run(net, copies, tracer)

    return tuple(
        _choose_residual(site, frames_around.get(site.address, []), by_call, entire=entire)
        for site in sites
    )


def _note_residual(
    by_call: ResidualsByCall, samples: int, frame: trace.Frame, output: Any
) -> None:
    """Add a module call to `by_call`, at its end, if it is a residual block.

    A block has a row per sample (`by_sample`) if it has one in this and every earlier pass. Its
    samples share an argument (`shared`) that has as many rows in this as in every earlier pass.

    Args:
        by_call: the residual blocks so far, of this pass and of earlier ones.
        samples: number of samples in this pass.
        frame: the module call.
        output: its output, with its graph.
    """
    residual = _find_skip_path(frame, output, samples)
    if residual is not None:
        key = residual.module, residual.call
        of_earlier_pass = by_call.get(key, residual)
        by_sample = residual.by_sample and of_earlier_pass.by_sample
        shared = residual.shared & of_earlier_pass.shared
        by_call[key] = residual._replace(by_sample=by_sample, shared=shared)


def _find_skip_path(frame: trace.Frame, output: Any, samples: int) -> Residual | None:
    """Return a module call as a residual block if its output has a skip path from its input.

    Args:
        frame: the module call.
        output: its output, a tensor or tensors in containers, with its graph.
        samples: number of samples in the batch.
    """
    # The first tensors that depend on the model's input.
    first_input = _find_first_dependent((frame.args, frame.kwargs))
    first_output = _find_first_dependent(output)
    if first_input is None or first_output is None:
        return None
    i, x = first_input  # the tensor x is number i of all arguments
    j, y = first_output
    if x.shape != y.shape or x.grad_fn is None:
        return None
    # The graph is cut at linear maps and attention. So a walk back from y meets x only by a path
    # around them: a skip path.
    _, meetings = leaves(y, {x.grad_fn})
    if not meetings:
        return None
    arguments, _ = tree_flatten((frame.args, frame.kwargs))
    # All tensors, as far as this pass can tell.
    shared = frozenset(
        (n, len(t)) for n, t in enumerate(arguments) if isinstance(t, Tensor) and t.ndim
    )
    by_sample = y.shape[:1] == (samples,)
    return Residual(frame.name, frame.number, i, j, by_sample, shared)


def _choose_residual(
    site: Site,
    frames: Sequence[trace.Frame],
    by_call: ResidualsByCall,
    *,
    entire: bool,
) -> Residual | None:
    """Return the residual block of a layer: the smallest residual block around the layer.

    Blocks with a row per sample are preferred. None if no module around the layer is a residual
    block.

    Args:
        site: the layer.
        frames: the module calls around the layer, innermost first.
        by_call: all module calls that are residual blocks.
        entire: whether to prefer the largest block that holds no other attention.
    """
    residuals: list[Residual] = []  # from the smallest to the largest
    without_others: list[Residual] = []  # blocks that hold no attention of other layers
    for frame in frames:
        residual = by_call.get((frame.name, frame.number))
        if residual is None:
            continue
        residuals.append(residual)
        if set(frame.attentions) <= set(site.addresses):
            without_others.append(residual)
    if entire:  # blocks without other attention come first, the largest one before the others
        residuals = [*reversed(without_others), *residuals]
    # The first block with a row per sample (False sorts before True), or else the first block.
    return min(residuals, key=lambda residual: not residual.by_sample, default=None)


def record_outputs(
    net: Net, residuals: Sequence[Residual], f: Function
) -> tuple[Function, dict[Residual, Tensor]]:
    """Return f as a function that records the outputs of residual blocks, and the record.

    The record is a dict with the outputs of the latest call of f. The outputs are parts of the
    autograd graph of f, so f can be differentiated with respect to them.
    """
    outputs: dict[Residual, Tensor] = {}

    def record(residual: Residual, output: Tensor) -> Tensor:
        outputs[residual] = output
        return output.clone()  # the model may write into the clone

    def run(z: Tensor, index: Tensor) -> Tensor:
        with _change_outputs(net, residuals, record):
            return f(z, index)

    return run, outputs


def start_after(net: Net, residual: Residual, f: Function, x: Tensor) -> Function:
    """Return the map from the output of a residual block to the output f(x, index) of the model.

    Args:
        net: the model.
        residual: the block.
        f: the map from the model's input.
        x: the samples, at which the model runs up to the block.
    """

    def run(z: Tensor, index: Tensor) -> Tensor:
        # z replaces the output of the block. The block's own output is computed and dropped.
        with _change_outputs(net, [residual], lambda *_: z):
            return f(x[index], index)

    return run


def _change_outputs(
    net: Net, residuals: Sequence[Residual], change: Callable[[Residual, Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Replace the output of each residual block by `change(block, output)`, for one pass."""
    by_call = {(residual.module, residual.call): residual for residual in residuals}
    counts = Counter[str]()  # of calls so far, by module

    def change_output(name: str, _args: object, output: Any) -> Any:
        """Return the output of a module call, changed if the call is one of the blocks.

        `by_call` has the blocks by module and number of the call; `counts` has the calls so far.
        """
        block = by_call.get((name, counts[name]))
        counts[name] += 1
        if block is None:
            return output
        # A module may return several tensors: `block.output` is the index of the block's own.
        values, spec = tree_flatten(output)
        values[block.output] = change(block, values[block.output])
        return tree_unflatten(values, spec)

    parts = {residual.module: net.module.get_submodule(residual.module) for residual in residuals}
    return watch_modules(parts.items(), change_output)


def compute_residual_norms(
    net: Net, batch: Batch, residuals: Sequence[Residual], **how: Any
) -> Iterator[tuple[Residual, JacobianNorms]]:
    """Yield ||d output / d input|| of each residual block per sample, at its inputs in the model.

    Padded tokens count neither as input nor as output.

    Args:
        net: the model.
        batch: the samples.
        residuals: from `find_residuals`.
        how: seeds and accuracy, see `compute_jacobian_norms`.

    Raises:
        InputError, EvaluationError: as in `linearize`.
    """
    by_call = {(residual.module, residual.call): residual for residual in residuals}
    # The module of each block, and the arguments of its call.
    calls: dict[Residual, tuple[nn.Module, list[Any], TreeSpec]] = {}

    def copy_arguments(frame: trace.Frame) -> None:
        """Copy the arguments of a residual block's call, before the call can change them."""
        residual = by_call.get((frame.name, frame.number))
        if residual is not None:
            copies = tree_map_only(Tensor, Tensor.clone, (frame.args, frame.kwargs))
            # The module, a flat list of its arguments, and their structure.
            calls[residual] = frame.module, *tree_flatten(copies)

    # Run the model once, to record the arguments. Then run each block alone.
    watched = trace.CallStack(on_enter=copy_arguments).following(net.module)
    wide = widen_casts(net.dtype)  # as when a block runs alone
    with trace.fork_random(net), exact_arithmetic(net.device), torch.no_grad(), watched, wide:
        net.output(batch)
    for residual in dict.fromkeys(residuals):  # layers may share a block: each block once
        with trace.fork_random(net):
            # No variable holds the linearisation: its graph is freed before the next block.
            norms = compute_jacobian_norms(
                _linearize_residual(residual, *calls.pop(residual), batch.mask), **how
            )
        yield residual, norms


def _linearize_residual(
    residual: Residual,
    module: nn.Module,
    arguments: list[Any],
    spec: TreeSpec,
    mask: Tensor | None,
) -> Linearization:
    """Linearise a recorded call of a residual block, from its input to its output, per sample.

    Outputs at padded tokens are set to 0.

    Args:
        residual: the block.
        module: its module.
        arguments: all arguments of the call, with containers flattened.
        spec: their structure.
        mask: real tokens of the batch.
    """
    x = arguments[residual.input]

    def run(z: Tensor, index: Tensor) -> Tensor:
        """Return the module's output at inputs z, whose row i belongs to sample index[i]."""
        shared = dict(residual.shared)
        values = []
        for number, value in enumerate(arguments):
            # Select the rows of the samples: one of each, or one for each of its heads (ALiBi).
            # Samples share other arguments, such as positions: these may happen to have as many
            # rows as there are samples.
            is_tensor = isinstance(value, Tensor) and value.ndim
            if is_tensor and number not in shared and len(value) % len(x) == 0:
                value = value.unflatten(0, (len(x), -1))[index].flatten(0, 1)
            values.append(value)
        values[residual.input] = z
        args, kwargs = tree_unflatten(values, spec)
        results, _ = tree_flatten(module(*args, **kwargs))
        output: Tensor = results[residual.output]
        if mask is None or x.shape[:2] != mask.shape:  # no padding, or x has no axis of tokens
            return output
        return output * mask[index, :, None]

    return linearize(run, x)


def _find_first_dependent(values: Any) -> tuple[int, Tensor] | None:
    """Return the first tensor in nested containers that depends on the model's input.

    The first item of the result is the tensor's position among the flattened values. While the
    model runs, a tensor requires gradients if and only if it depends on the input.
    """
    for i, value in enumerate(tree_flatten(values)[0]):
        if isinstance(value, Tensor) and value.requires_grad:
            return i, value
    return None
