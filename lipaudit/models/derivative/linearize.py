"""The derivative of a whole model at a batch of points: J v and J^T u from one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from lipaudit.errors import EvaluationError, InputError, UsageError, of_machine
from lipaudit.models.derivative.linear_mode import evaluate, explain_errors
from lipaudit.models.derivative.trail import Trail
from lipaudit.models.precision import exact_arithmetic
from lipaudit.models.requirements import AGREES, agree
from lipaudit.theory.scale import times_power

Function = Callable[[Tensor, Tensor], Tensor]
"""f(x, index) -> y: row i of x and y belongs to sample index[i] of the batch, whose mask applies.
"""

Product = Callable[[Tensor], Tensor]

TOGETHER = 2**20
"""Entries of the Jacobian formed at a time: in a small model most of the cost of a backward pass
is the overhead of its operations."""

_ROOM = {torch.float32: 100, torch.float64: 800}
"""Power of two by which a vector can be scaled without loss."""


class Linearization:
    """J v and J^T u of f at every sample of x together, in units of 2^exponent.

    The graph of one forward pass is kept; a product costs about one more pass. J^T u is a backward
    pass. J v is the derivative of J^T u with respect to u: two backward passes replace forward
    mode, which fused attention lacks.

    All products are with 2^-exponent J. The exponents are 0 until `fit` or the first `outer`,
    `inner`, `rows` or `columns` finds derivatives so far from one that products of two would
    underflow or overflow. The scaling is exact: it is applied to the input vector as far as its
    precision allows, and the rest to the result. In float32 this covers norms from about 1e-60 to
    1e38, unless a value inside the model is out of range.

    Attributes:
        f: the map.
        x: the points, (batch, *in).
        index: indices of the rows in the first batch, (batch,).
        output: f(x), (batch, *out).
        exponent: per sample, (batch,), on the CPU.
    """

    def __init__(self, f: Function, x: Tensor, index: Tensor) -> None:
        self.f, self.x, self.index = f, x.detach(), index
        self.exponent = torch.zeros(len(x), dtype=torch.int64)
        self._fitted = False
        self._transposed: tuple[Tensor, Tensor] | None = None
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
        return self._in_units(lambda u: self._compute_gradient(value, leaf, u), u)

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v per sample: (batch, *in) -> (batch, *out)."""
        if self._transposed is None:
            self._transposed = self._transpose(torch.zeros_like(self.output))
        u, pullback = self._transposed
        return self._in_units(lambda v: self._compute_gradient(pullback, u, v), v)

    def outer(self, u: Tensor) -> Tensor:
        """Return J J^T u per sample, (batch, *out) -> (batch, *out)."""
        first = partial(self._in_units, self._begin) if self._transposed is None else self.vjp
        return self.jvp(self.sized(first, u))

    def inner(self, v: Tensor) -> Tensor:
        """Return J^T J v per sample, (batch, *in) -> (batch, *in)."""
        return self.vjp(self.sized(self.jvp, v))

    def fit(self) -> None:
        """Choose the exponents by one product, unless they are chosen already."""
        if not self._fitted:
            self.sized(self.vjp, _draw_noise(self.output))

    def reset(self) -> None:
        """Reset the exponents, because products with other vectors may differ in size."""
        self.exponent, self._fitted = torch.zeros_like(self.exponent), False

    @cached_property
    def rows(self) -> Tensor:
        """Return the dense Jacobian, (batch, outputs, inputs), by one J^T u per output."""
        units = torch.eye(self.outputs, dtype=self.output.dtype, device=self.output.device)
        units = units.view(-1, 1, *self.output.shape[1:]).expand(-1, *self.output.shape)
        parts = torch.split(units, max(1, TOGETHER // self.x.numel()))

        def dense(_: Tensor) -> Tensor:
            return torch.cat([self._pull_rows(part) for part in parts]).flatten(2).transpose(0, 1)

        return self.sized(dense, torch.ones_like(self.output))

    @cached_property
    def columns(self) -> Tensor:
        """Return the dense transpose, (batch, inputs, outputs), by one J v per input."""

        def dense(_: Tensor) -> Tensor:
            units = (_make_unit(self.x, i) for i in range(self.inputs))
            return torch.stack([self.jvp(v).flatten(1) for v in units], 1)

        return self.sized(dense, torch.ones_like(self.x))

    def row(self, i: int | Tensor) -> Tensor:
        """Return row i, or row i[b] of sample b, of the Jacobian: (batch, inputs)."""
        return self.vjp(_make_unit(self.output, i)).flatten(1)

    def select(self, index: Tensor) -> Linearization:
        """Linearise again at some of the samples, so that the others cost nothing."""
        part = Linearization(self.f, self.x[index], self.index[index])
        part.exponent, part._fitted = self.exponent[index.cpu()], self._fitted
        return part

    def release(self) -> None:
        """Free the graph; the next product builds it again."""
        self.__dict__.pop("_graph", None)
        self._transposed = None

    @cached_property
    def _graph(self) -> tuple[Tensor, Tensor]:
        """Return a leaf at x, and f of it."""
        with exact_arithmetic(self.x.device), explain_errors():
            leaf = self.x.clone().requires_grad_()
            return leaf, evaluate(self.f, leaf, self.index)

    def _transpose(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return a leaf at u, and J^T u of it."""
        leaf, value = self._graph
        with exact_arithmetic(self.x.device), explain_errors():
            u = u.detach().clone().requires_grad_()
            (pullback,) = torch.autograd.grad(value, leaf, u, create_graph=True)
        return u, pullback

    def _begin(self, u: Tensor) -> Tensor:
        """Return J^T u; its graph also serves J."""
        self._transposed = self._transpose(u)
        return self._transposed[1].detach()

    def sized(self, product: Product, z: Tensor) -> Tensor:
        """Return product(z), after choosing exponents that give it the size of z."""
        image, room = product(z), _ROOM[z.dtype]
        for _ in range(0 if self._fitted else 3):  # the first result may be 0 or infinite
            sizes = [t.flatten(1).abs().amax(1) for t in (image, z)]
            size, given = torch.stack(sizes).to("cpu", torch.float64)
            # The powers of two by which each sample's result is out of range; 0 if it is not.
            gain = (size.log2() - given.log2()).round()
            gain = gain.where(size > 0, -room).where(size.isfinite(), room).where(given > 0, 0)
            change = gain.where(gain.abs() > room // 4, 0).long()
            if not change.any():
                break
            self.exponent += change
            image = product(z)
        if not self._fitted:
            self.exponent[image.flatten(1).eq(0).all(1).cpu()] = 0
        self._fitted = True
        return image

    def _in_units(self, product: Product, z: Tensor) -> Tensor:
        """Return product(z), times 2^-exponent."""
        if not self.exponent.any():
            return product(z)
        room = _ROOM[z.dtype]
        before = (-self.exponent).clamp(-room, room)
        return times_power(product(times_power(z, before)), -self.exponent - before)

    def _pull_rows(self, u: Tensor) -> Tensor:
        """Return J^T u of several u, in one backward pass if all operations can be mapped over."""
        if len(u) > 1:
            leaf, value = self._graph

            def pull(u: Tensor) -> Tensor:
                (rows,) = torch.autograd.grad(value, leaf, u, True, is_grads_batched=True)
                return rows.transpose(0, 1)

            spread = lambda u: pull(u.transpose(0, 1))  # noqa: E731
            try:
                with exact_arithmetic(self.x.device):
                    return self._in_units(spread, u.transpose(0, 1)).transpose(0, 1)
            except (RuntimeError, AssertionError) as error:  # an operation that cannot be mapped
                if of_machine(error):
                    raise
        return torch.stack([self.vjp(each) for each in u])

    def _compute_gradient(self, of: Tensor, leaf: Tensor, cotangent: Tensor) -> Tensor:
        with exact_arithmetic(self.x.device), explain_errors():
            (gradient,) = torch.autograd.grad(of, leaf, cotangent, retain_graph=True)
        return gradient


def _make_unit(like: Tensor, i: int | Tensor) -> Tensor:
    """Basis vector i, or i[b] for sample b, of the space of `like`."""
    flat = torch.zeros_like(like).flatten(1)
    flat[torch.arange(len(like), device=like.device), i] = 1
    return flat.view_as(like)


def linearize(f: Function, x: Tensor) -> Linearization:
    """Linearise f at every sample of x, and check that samples are independent.

    The model runs on the last sample between two samples of NaN. Results computed from NaN are
    NaN; so if the output equals that of the full batch, it does not depend on the neighbours. This
    costs three forward passes of one sample. If it differs, if an operation is random or may hide
    a NaN, and on an accelerator, where NaN may end the process, derivatives decide: the output of
    one of two samples may not have a gradient with respect to the other. This costs about eight
    passes of one sample.

    Args:
        f: f(x, index) -> y, (batch, *in) -> (batch, *out), on any rows `index` of the batch.
        x: the points, (batch, *in), float32 or float64.

    Raises:
        UsageError: x has another dtype.
        InputError: dropout or batch statistics are in use, samples depend on each other, gradient
            checkpointing is on, or an operation cannot be differentiated.
        EvaluationError: the output is not finite, or differs from one call to the next.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise UsageError(f"cannot linearise in {x.dtype}", "Use float32 or float64.")
    pair = None if x.device.type == "cpu" else _check_outputs(f, x)
    whole = Linearization(f, x, torch.arange(len(x), device=x.device))
    _require_samples(whole)
    if pair is None and not _stands_alone(whole):
        pair = _check_outputs(f, x)
    if pair is not None:
        beside = whole.output[[0, len(x) - 1]]
        _require_equal(beside, pair, "depends on which samples are beside it")
    return whole


def _stands_alone(whole: Linearization) -> bool:
    """Return whether the last sample's output is the same between two samples of NaN."""
    # Between two others: attention over the batch, causal or not, would see one of them.
    rows = torch.tensor([0, len(whole) - 1, 0])
    beside, value, trail = whole.x[rows], whole._graph[1], Trail()
    beside[::2] = torch.nan
    if not value.requires_grad:
        return False
    try:
        with exact_arithmetic(whole.x.device), torch.no_grad(), trail:
            plain = whole.f(beside.clone(), whole.index[rows])
    except Exception as error:  # a model may check its numbers, and raise anything
        if of_machine(error):
            raise
        return False
    finally:
        if trail.restore():
            whole.release()  # its graph stores what was written into it
    if trail.lost or plain.shape != (len(rows), *value.shape[1:]):
        return False
    return agree(plain[1:2], whole.output[-1:], AGREES)


def _check_outputs(f: Function, x: Tensor) -> Tensor:
    """Return f of two samples, after checking that the outputs are independent."""
    index = torch.tensor([0, len(x) - 1], device=x.device)
    x = x[index]
    pair = Linearization(f, x, index)
    _require_samples(pair)
    gradient = pair.sized(pair.vjp, _draw_one(0, pair.output))
    pair.exponent[1] = pair.exponent[0]
    back = pair.vjp(_draw_one(1, pair.output))
    leak = torch.maximum(gradient[1].abs().max(), back[0].abs().max())
    if leak != 0:  # the only wait of the host
        require_finite(leak)
        raise InputError(
            f"the output of one sample depends on another one (gradient up to {leak:.1e})",
            "Use a model that treats the samples of a batch independently.",
        )
    with exact_arithmetic(x.device), torch.no_grad():
        plain = f(x[:1].clone(), index[:1])
    _require_equal(pair.output[:1], plain, "differs from one forward pass to the next")
    return pair.output


def _draw_one(sample: int, output: Tensor) -> Tensor:
    """Return a random vector for one sample, and 0 for the others."""
    u = torch.zeros_like(output)
    u[sample] = _draw_noise(output)[sample]
    return u


def _draw_noise(output: Tensor) -> Tensor:
    """Return the same random vector for every sample."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(output[0].shape, generator=generator).to(output)
    return noise.expand_as(output).clone()


def _require_samples(at: Linearization) -> None:
    if at.output.shape[:1] != at.x.shape[:1]:
        raise InputError(f"{len(at)} samples give an output of shape {tuple(at.output.shape)}")
    require_finite(at.output)


def require_finite(values: Tensor) -> None:
    """Raise EvaluationError if an output or a derivative is not finite."""
    if not values.isfinite().all():
        raise EvaluationError(
            "the model's output or its derivative is not finite",
            "Check the weights and the inputs' range, or try --dtype float64.",
        )


def _require_equal(output: Tensor, reference: Tensor, what: str) -> None:
    if not agree(reference, output, AGREES):
        gap = (output - reference).abs().max()
        raise InputError(
            f"the model's output {what} (by up to {gap:.1e})",
            "Call model.eval(), and switch off dropout, noise, random token selection and "
            "autocast. For parts in half precision, use --dtype float64.",
        )
