"""The derivative of a whole model at a batch of points: J v and J^T u from one forward pass.

The model runs unmodified, with operations that cannot be differentiated twice replaced or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from lipaudit.errors import (
    EvaluationError,
    InputError,
    LipauditError,
    UsageError,
    first_line,
    is_machine_error,
)
from lipaudit.models.graph import leaves, make_identity
from lipaudit.models.precision import (
    WeightReference,
    Widening,
    exact_arithmetic,
    refer_to_weight,
)
from lipaudit.models.requirements import AGREES, REPEAT, agree
from lipaudit.theory.pullback import pull_back, pull_back_rows


def _refuse_dropout(probability: float) -> Tensor:
    """Refuse active dropout. Otherwise return NotImplemented: torch's own function then runs."""
    if probability > 0:
        raise InputError(
            f"dropout is on (p = {probability:g}), so forward passes differ",
            "Call F.dropout with training=self.training, or set the probability to 0.",
        )
    return NotImplemented


class _StoredProduct(torch.autograd.Function):
    """x W^T as in nn.Linear, or x W if `is_transposed`, with W converted again for every product.

    A graph that stores W would keep a converted copy of every weight: 28 GB for a 7B model in
    bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, reference: WeightReference, is_transposed: bool) -> Tensor:
        """Return x W^T, or x W if `is_transposed`, with W read from a reference.

        W is (out, in), as in nn.Linear. The layer itself needs x W^T of its input x. Its backward
        pass needs u W of a cotangent u. The graph keeps the reference, not W.
        """
        ctx.reference = reference
        ctx.is_transposed = is_transposed
        weight = reference.convert()  # freed after this product
        if is_transposed:
            return x @ weight
        return x @ weight.mT

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, None]:
        # The gradient of x W^T for a cotangent u is u W. This product is a `_StoredProduct` again,
        # so that the gradient can be differentiated, too. None: no gradients of the other two
        # arguments.
        return _StoredProduct.apply(u, ctx.reference, not ctx.is_transposed), None, None


def _run_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replace F.linear, so that the graph does not store a converted copy of the weight.

    NotImplemented if the weight was not converted from another dtype or device: torch's own
    F.linear then runs.
    """
    reference = refer_to_weight(weight)
    if isinstance(reference, Tensor):  # not converted
        return NotImplemented
    # x W^T: False says that W is not transposed (`apply` takes no keywords).
    product = _StoredProduct.apply(input, reference, False)
    if bias is None:
        return product
    return product + bias


def _mixes_samples(input: Tensor) -> bool:
    """Say whether statistics of a tensor over its first axis would mix samples.

    They do not in two cases:
    1. The tensor is made from parameters only: a model standardises a weight.
    2. It is a single row, (1, batch * channels, ...), as in F.instance_norm: each sample has
       channels of its own. (Other single rows may mix samples: `linearize` runs a sample beside
       other samples, and refuses the model if its output changes.)
    """
    tensors, _ = leaves(input)  # from which autograd's graph has made the input
    depends_on_samples = not all(isinstance(leaf, nn.Parameter) for leaf in tensors)
    return len(input) > 1 and depends_on_samples


def _run_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Replace F.batch_norm: use running statistics, and refuse statistics of the batch.

    1. With `training`, the input is normalised by its own statistics. This is refused if they mix
       samples, or if there are running statistics: the model was left in training mode.
    2. With `training` but without mixed samples, and in evaluation without running statistics, the
       result is NotImplemented: torch's own function then runs.
    3. With running statistics, batch normalisation is an affine map, computed here by products and
       sums. torch's own backward pass on a CPU (at least up to 2.15) gives wrong gradients for a
       batch of one if the cotangent is a transposed view, as in every model that turns channels
       into tokens.
    """
    if training and (running_mean is not None or _mixes_samples(input)):
        raise InputError(
            "a BatchNorm layer uses batch statistics, so samples depend on each other",
            "Give the BatchNorm running statistics (track_running_stats=True).",
        )
    if training or running_mean is None or running_var is None:
        return NotImplemented
    # (x - mean) gain + shift, with gain = weight / sqrt(var + eps)
    gain = (running_var + eps).rsqrt()
    if weight is not None:
        gain = gain * weight
    channels = (-1, *[1] * (input.ndim - 2))  # the shape (channels, 1, ...), to broadcast
    centred = (input - running_mean.view(channels)) * gain.view(channels)
    shift = 0.0 if bias is None else bias.view(channels)
    return centred + shift


_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _run_linear,
    F.scaled_dot_product_attention: (
        lambda query, key, value, attn_mask=None, dropout_p=0.0, *_, **__: _refuse_dropout(
            dropout_p
        )
    ),
    F.dropout: (
        lambda input, p=0.5, training=True, inplace=False: _refuse_dropout(p if training else 0.0)
    ),
    F.batch_norm: _run_batch_norm,
}
"""Replacements of torch functions; NotImplemented means that torch's own function runs."""


class LinearMode(Widening):
    """Run a model so that it can be differentiated twice, and refuse a model that is no function.

    Dropout, batch statistics and autocast are refused. Outputs change by rounding only.

    Args:
        widen: in a float64 run: skip casts to float32 inside the model. Many models compute norms,
            rotary positions or softmax in float32, which would leave seven of sixteen digits.

    Raises:
        InputError: inside the block, if the model uses dropout, batch statistics or autocast.
    """

    def __init__(self, *, widen: bool) -> None:
        super().__init__()
        self.widen = widen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch that the model calls, or its replacement if there is one.

        In a float64 run (`widen`), casts to lower precisions are skipped.
        """
        kwargs = kwargs or {}
        is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if is_autocast and not self.widen:  # autocast does not round float64
            raise InputError(
                "the model rounds to half precision under autocast", "Use --dtype float64."
            )
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            result = replacement(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self.widen:  # the base class `Widening` runs the function without its casts
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs)


def evaluate(f: Function, leaf: Tensor, index: Tensor) -> Tensor:
    """Return f(leaf, index), computed with operations that can be differentiated twice.

    Args:
        f: the map, usually a model.
        leaf: the inputs, as a leaf of the graph.
        index: for each row of `leaf`, the sample of the batch to which it belongs.
    """
    # The backward pass of fused attention has no derivative. The backend MATH computes attention
    # by plain operations.
    sdpa = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    # Gradient checkpointing runs parts of the model again in the backward pass, outside of
    # `LinearMode`. It uses hooks on saved tensors: with these disabled, it raises an error.
    hooks = torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTING)
    # `LinearMode` replaces linear layers and batch normalisation, and refuses dropout and
    # autocast. In a run in float64, it also skips the model's own casts to float32, which would
    # cost digits.
    with sdpa, hooks, LinearMode(widen=leaf.dtype == torch.float64):
        return f(leaf.clone(), index)  # a copy, because f may change it in place


_CHECKPOINTING = "gradient checkpointing is on"
_CAUSES = (
    "checkpoint",
    "does not require grad",
    "not have been used in the graph",
    "is not implemented",
    "double backward",
)
"""Parts of autograd's messages on a model that it cannot differentiate, or not twice."""


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn autograd's errors on a model that it cannot differentiate into errors with advice."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        # `_CAUSES` are parts of autograd's messages. An assertion comes from a backward pass that
        # the model's authors have written.
        is_known = isinstance(error, AssertionError) or any(part in str(error) for part in _CAUSES)
        if is_machine_error(error) or not is_known:
            raise
        raise InputError(
            f"the model cannot be linearised: {first_line(error)}",
            "Its output must depend on its input. Switch gradient checkpointing off "
            "(gradient_checkpointing_disable()), and load it uncompiled, with "
            "attn_implementation='eager'.",
        ) from error


Function = Callable[[Tensor, Tensor], Tensor]
"""f(x, index) -> y: row i of x and y belongs to sample index[i] of the batch, whose mask applies.
"""

Product = Callable[[Tensor], Tensor]

TOGETHER = 2**20
"""Entries of the Jacobian formed at a time: in a small model most of the cost of a backward pass
is the overhead of its operations."""


class Linearization:
    """The Jacobian J of f at every sample of x, as products J v and J^T u for all samples at once.

    The graph of one forward pass is kept; a product costs about one more pass. J^T u is a backward
    pass. J v is the derivative of J^T u with respect to u, so two backward passes replace forward
    mode, which fused attention does not support.

    Attributes:
        f: the map.
        x: the points, (batch, *in).
        index: for each row of x, the sample of the whole batch to which it belongs, (batch,).
        output: f(x), (batch, *out).
    """

    def __init__(
        self, f: Function, x: Tensor, index: Tensor, graph: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Run the forward pass f(x), unless `graph` has the leaf x and f(x) of an earlier pass."""
        self.f = f
        self.x = x.detach()
        self.index = index
        # `_graph` is a cached property that runs the forward pass when it is first read. Setting
        # it stands for a pass that has run.
        if graph is not None:
            self._graph = graph
        # A cotangent u, and J^T u with its graph as a function of u, which `jvp` differentiates.
        # None until `_compute_vjp_graph` has run.
        self._vjp_graph: tuple[Tensor, Tensor] | None = None
        self.output = self._graph[1].detach()

    def __len__(self) -> int:
        return len(self.x)

    @property
    def inputs(self) -> int:
        """Return the number of entries of one sample's input."""
        return self.x[0].numel()

    @property
    def outputs(self) -> int:
        """Return the number of entries of one sample's output."""
        return self.output[0].numel()

    def vjp(self, u: Tensor) -> Tensor:
        """Return J^T u per sample: (batch, *out) -> (batch, *in)."""
        leaf, value = self._graph
        return self._compute_gradient(value, leaf, u)

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v per sample: (batch, *in) -> (batch, *out)."""
        # J^T u is linear in u. So the gradient of <J^T u, v> with respect to u is J v, whatever u.
        if self._vjp_graph is None:
            self._compute_vjp_graph(torch.zeros_like(self.output))
        assert self._vjp_graph is not None
        u, pullback = self._vjp_graph
        return self._compute_gradient(pullback, u, v)

    def outer(self, u: Tensor) -> Tensor:
        """Return J J^T u per sample in float64, (batch, *out) -> (batch, *out)."""
        # `jvp` differentiates J^T u in u, and so needs the graph of this pass for any one u. The
        # first J^T u is computed with its graph, which `jvp` then finds: this saves a pass.
        pull = self._compute_vjp_graph if self._vjp_graph is None else self.vjp
        # `_apply_unit` scales J^T u to unit size before the second product, and back after it.
        return _apply_unit(self.jvp, pull(u))

    def inner(self, v: Tensor) -> Tensor:
        """Return J^T J v per sample in float64, (batch, *in) -> (batch, *in)."""
        return _apply_unit(self.vjp, self.jvp(v))

    @cached_property
    def rows(self) -> Tensor:
        """Return the dense Jacobian, (batch, outputs, inputs): row i is J^T e_i."""
        # Basis vectors e_i of the output, the same for each sample: (outputs, batch, *out).
        units = make_identity(self.outputs, self.output)
        units = units.view(-1, 1, *self.output.shape[1:])
        units = units.expand(-1, *self.output.shape)
        # In parts of as many rows as have about `TOGETHER` entries, to bound the memory.
        parts = torch.split(units, max(1, TOGETHER // self.x.numel()))
        rows = torch.cat([self._pull_rows(part) for part in parts])  # (outputs, batch, *in)
        return rows.flatten(2).transpose(0, 1)

    @cached_property
    def columns(self) -> Tensor:
        """Return the dense transpose, (batch, inputs, outputs), by one J v per input."""
        units = (_make_unit(self.x, i) for i in range(self.inputs))
        return torch.stack([self.jvp(v).flatten(1) for v in units], 1)

    def row(self, i: int | Tensor) -> Tensor:
        """Return row i, or row i[b] of sample b, of the Jacobian: (batch, inputs)."""
        return self.vjp(_make_unit(self.output, i)).flatten(1)

    def select(self, index: Tensor) -> Linearization:
        """Linearise again at some of the samples, so that other samples cost nothing any more."""
        return Linearization(self.f, self.x[index], self.index[index])

    def start_at(self, f: Function, inner: Tensor) -> Linearization:
        """Return the linearisation of the output in a tensor inside of the forward pass.

        No pass runs: the result shares the graph of this linearisation.

        Args:
            f: the map (inner, index) -> output, in case the graph has to be built again.
            inner: the tensor, (batch, *in), as a part of the graph.
        """
        # `_graph` is the input and the output of the pass that has run. In the graph of the
        # result, the inner tensor takes the place of the input.
        return Linearization(f, inner, self.index, graph=(inner, self._graph[1]))

    def find_paths(self, inner: Tensor) -> tuple[bool, bool]:
        """Find the paths in the graph from the input x to the output that pass an inner tensor.

        Returns:
            Whether the output depends on the inner tensor. And whether the output also depends on
            x by paths around the inner tensor.
        """
        leaf, value = self._graph
        stop = set()  # the walk back from the output stops at the inner tensor
        if inner.grad_fn is not None:
            stop.add(inner.grad_fn)
        reached_leaves, reached_stops = leaves(value, stop)
        return bool(reached_stops), any(reached is leaf for reached in reached_leaves)

    def release(self) -> None:
        """Free the graph; the next product builds it again."""
        self.__dict__.pop("_graph", None)
        self._vjp_graph = None

    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor]:
        """Return a leaf with the values of x, and f of this leaf: the graph of a forward pass."""
        with exact_arithmetic(self.x.device), explain_errors():
            leaf = self.x.clone().requires_grad_()
            return leaf, evaluate(self.f, leaf, self.index)

    def _compute_vjp_graph(self, u: Tensor) -> Tensor:
        """Return J^T u, and keep its graph as a function of u: `jvp` differentiates it in u."""
        leaf, value = self._graph
        with exact_arithmetic(self.x.device), explain_errors():
            u = u.detach().to(value.dtype, copy=True).requires_grad_()
            (pullback,) = pull_back(value, leaf, u, create_graph=True)
        self._vjp_graph = u, pullback
        return pullback.detach()

    def _pull_rows(self, u: Tensor) -> Tensor:
        """Return J^T u for several u: (cotangents, batch, *out) -> (cotangents, batch, *in).

        All u take one backward pass under vmap. If an operation does not support vmap, each u
        takes a pass of its own.
        """
        if len(u) > 1:
            leaf, value = self._graph
            try:
                with exact_arithmetic(self.x.device):
                    return pull_back_rows(value, leaf, u)
            except (RuntimeError, AssertionError) as error:  # usually an operation without vmap
                if is_machine_error(error):
                    raise
        return torch.stack([self.vjp(cotangent) for cotangent in u])

    def _compute_gradient(self, value: Tensor, leaf: Tensor, cotangent: Tensor) -> Tensor:
        """Return the gradient of <value, cotangent> with respect to a leaf."""
        with exact_arithmetic(self.x.device), explain_errors():
            return pull_back(value, leaf, cotangent.to(value.dtype), retain_graph=True)[0]


def _apply_unit(product: Product, z: Tensor) -> Tensor:
    """Return product(z) in float64, for a linear function `product` such as v -> J v.

    The function is applied to a scaled vector: |z| product(z / |z|), where |z| is the largest
    entry of a sample. Without scaling, J J^T u would leave the range of float32 if the norm of J
    is beyond 1e19 or below 1e-19.
    """
    flat = z.flatten(1)
    size = flat.abs().amax(1, keepdim=True)  # |z| of each sample, (batch, 1)
    size = size.where(size != 0, 1.0)  # z = 0 needs no scaling
    unit = (flat / size).view_as(z)
    image = product(unit).double()
    return (image.flatten(1) * size.double()).view_as(image)


def _make_unit(like: Tensor, i: int | Tensor) -> Tensor:
    """Return basis vector i, or i[b] for sample b, of the space of `like`, (batch, *)."""
    flat = torch.zeros_like(like).flatten(1)
    flat[torch.arange(len(like), device=like.device), i] = 1
    return flat.view_as(like)


def linearize(f: Function, x: Tensor) -> Linearization:
    """Linearise f at every sample of x, and check that samples are independent.

    For the check, the last sample runs again between two samples of random entries. If its output
    differs from its output in the full batch, the output depends on other samples, or on chance.
    The check costs three forward passes of one sample.

    Args:
        f: f(x, index) -> y, (batch, *in) -> (batch, *out), on any rows `index` of the batch.
        x: the points, (batch, *in), float32 or float64.

    Raises:
        UsageError: x has another dtype.
        InputError: the model is random or uses batch statistics, samples depend on each other,
            gradient checkpointing is on, or an operation cannot be differentiated.
        EvaluationError: the output is not finite.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise UsageError(f"cannot linearise in {x.dtype}", "Use float32 or float64.")
    index = torch.arange(len(x), device=x.device)
    # This runs before the linearisation: a model that keeps state between passes would otherwise
    # write into tensors of the graph.
    beside_others = _run_beside_others(f, x)
    linear = Linearization(f, x, index)
    require_finite(linear.output)
    if agree(linear.output[-1:], beside_others, AGREES):
        return linear
    # The outputs differ. A second pass over the same batch shows whether the model is random.
    with exact_arithmetic(x.device), torch.no_grad():
        again = evaluate(f, x, index)
    if not agree(linear.output, again, AGREES):
        raise InputError("the model's output differs from one forward pass to the next", REPEAT)
    raise InputError(
        "the output of one sample depends on another one of its batch",
        "Use a model that treats the samples of a batch independently.",
    )


def _run_beside_others(f: Function, x: Tensor) -> Tensor:
    """Return f of the last sample, (1, *out), in a batch between two samples of random entries.

    If the model mixes samples, this output differs from the output in the real batch.
    """
    # A batch of three: random, the last sample, random. A random sample before and one after,
    # because a model that is causal over the batch reads only the samples before. `index` says
    # which sample each row belongs to (for its mask): random rows take the mask of sample 0.
    index = torch.tensor([0, len(x) - 1, 0], device=x.device)
    low = x.amin()
    high = x.amax()
    span = (high - low).where(high > low, 1.0)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand((2, *x.shape[1:]), generator=generator, dtype=x.dtype).to(x.device)
    batch = x[index]
    others = batch[::2]  # a view of the first and the third row, to write random entries into
    # Entries from low - span to high + span, beyond the range of x. A model may divide by the
    # largest entry of the batch: only larger entries show this.
    others[:] = low - span + 3 * span * noise
    with exact_arithmetic(x.device), torch.no_grad():
        try:
            output = evaluate(f, batch, index)
        except Exception as error:  # a model may refuse such entries, and raise anything
            if isinstance(error, LipauditError) or is_machine_error(error):
                raise
            others[:] = low + span * noise  # from low to high
            output = evaluate(f, batch, index)
    if output.shape[:1] != index.shape:
        raise InputError(f"{len(index)} samples give an output of shape {tuple(output.shape)}")
    return output[1:2]


def require_finite(values: Tensor) -> None:
    """Raise EvaluationError if an output or a derivative is not finite."""
    if not values.isfinite().all():
        raise EvaluationError(
            "the model's output or its derivative is not finite",
            "Check the weights and the inputs' range, or try --dtype float64.",
        )
