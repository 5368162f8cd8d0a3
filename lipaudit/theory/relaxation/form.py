"""A tensor as a function of the input: what runs through an unmodified model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipaudit.errors import EvaluationError, InputError
from lipaudit.theory.relaxation.rounding import DOUBLE, cast_up, gamma, outward, tiny, up
from lipaudit.theory.relaxation.symbols import Sizes, Symbols


class NoRuleError(InputError):
    """The model uses an operation that nothing is known of on forms.

    Args:
        operation: its name, with what about it is not supported.
        module: path of the module that uses it, where known.
    """

    def __init__(self, operation: str, module: str = "") -> None:
        where = f" (in {module})" if module else ""
        super().__init__(
            f"no certificate for this model: no rule for the operation {operation}{where}",
            "certificates know the operations of common transformers; attacks work on any model",
        )
        self.operation, self.module = operation, module


class UnboundedError(EvaluationError):
    """A range left the numbers: the ball is too large to say anything of it."""

    def __init__(self) -> None:
        super().__init__("a range is not finite: the ball is too large for this model")


@dataclass(frozen=True)
class Pending:
    """A product with one factor a row that is known to be small, and is not bounded yet.

    A row of entries d_k times a number |t| <= r is off by r |d_k| in each; behind weights w by
    r |sum_k w_k d_k|, far less than r sum_k |w_k| |d_k|. So it waits for the weights.

    Attributes:
        moving: a form that moves by d.
        root, constant: the row is moving / root + constant with root > 0, which has the same signs
            as moving + constant root; of the shape of moving.
        by_linear: bounds what multiplies the part of d that is linear in the input; of d's shape.
        by_rest: what multiplies the others.
    """

    moving: Form
    root: Form
    constant: Form
    by_linear: Tensor
    by_rest: Tensor

    def radius(self) -> Tensor:
        """What entries are off by if it waits no longer."""
        linear = self.by_linear * self.moving.sizes.linear
        return up(linear + self.by_rest * self.moving.rest)

    def moved(self, move: Callable[[Any], Any]) -> Pending:
        """The same with entries moved about."""
        return Pending(
            *(move(each) for each in (self.moving, self.root, self.constant)),
            *(move(each) for each in (self.by_linear, self.by_rest)),
        )


class Form:
    """A tensor x(e) = centre + sum of coefficients times symbols + something within +- slack.

    It answers to torch's functions and to a tensor's methods by the rules of its symbols. The
    first axis of the shape is the batch of the model; forms stand for one sample.

    Args:
        centre: (*shape), float64.
        generators: (rows, *shape), the coefficients, in the dtype of the symbols.
        slack: (*shape), float64, >= 0: what rounding and operations since the last symbols left.
        symbols: that the rows stand for.
        simplex: entries are >= 0 and sum to one along the last axis, whatever the input.
    """

    def __init__(
        self,
        centre: Tensor,
        generators: Tensor,
        slack: Tensor,
        symbols: Symbols,
        *,
        simplex: bool = False,
    ) -> None:
        self.centre, self.generators, self._slack = centre, generators, slack
        self.symbols, self.simplex = symbols, simplex
        self.pending: Pending | None = None
        self.quotient: Pending | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.centre.shape

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self.centre.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the coefficients."""
        return self.symbols.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.centre.device

    @cached_property
    def sizes(self) -> Sizes:
        """How far the parts of the generators move."""
        return self.symbols.sizes(self.generators)

    @property
    def mass(self) -> Tensor:
        """A radius of all but the slack, however the coefficients' signs change; float64."""
        return self.sizes.mass

    @cached_property
    def quadratic_range(self) -> tuple[Tensor, Tensor]:
        """The range of the quadratic part."""
        return self.symbols.quadratic_range(self.generators)

    @property
    def rest(self) -> Tensor:
        """A radius of all that is not linear in the input, slack and all; float64."""
        low, high = self.quadratic_range
        return up(torch.maximum(-low, high) + self.sizes.errors + self.slack)

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the ends of a range that holds every value, (*shape) each, float64."""
        sizes, (low, high) = self.sizes, self.quadratic_range
        radius = up(sizes.linear + sizes.errors + self.slack)
        size = self.centre.abs() + radius + high - low
        return outward(self.centre - radius + low, self.centre + radius + high, size)

    def uncertain(self, roundings: int) -> Tensor:
        """Return by how much entries are off, seen by a map with weights of so many roundings.

        Slack, and the roundings of a sum of products over the generators, over the centre, and
        for coefficients that a device may take for zero.
        """
        rows, dtype = len(self.generators), self.symbols.dtype
        lost = rows * tiny(dtype)
        moving = gamma(roundings + 1, dtype) * self.mass
        still = (gamma(roundings + 2, DOUBLE) * self.centre.abs()).nan_to_num(posinf=0.0)
        return up(self.slack + moving + still + lost)

    @property
    def slack(self) -> Tensor:
        """What rounding and operations since the last symbols left; ends what is pending."""
        if self.pending is not None:
            self._slack, self.pending = up(self._slack + self.pending.radius()), None
        return self._slack

    @slack.setter
    def slack(self, slack: Tensor) -> None:
        self._slack = slack

    def parted(self) -> tuple[Form, Pending | None]:
        """Return the form without what is pending, settled in place, and that apart."""
        pending, self.pending = self.pending, None
        self.settle()
        alone = Form(self.centre, self.generators, self.slack, self.symbols)
        alone.sizes = self.sizes
        self.pending = pending
        return alone, pending

    def settle(self) -> Form:
        """Turn slack into symbols, in place, where it is a share of what the entry moves.

        Slack that is mixed by weights adds up in size, symbols keep their signs. Entries whose
        slack is small against the largest radius of their row, the last axis, keep theirs.
        """
        radius = self.mass + self.slack
        limit = self.symbols.settle * (radius.amax(-1, keepdim=True) if self.ndim else radius)
        large = self.slack > limit
        if not large.any():
            return self
        radius = cast_up(self.slack * large, self.symbols.dtype)
        rows, first = self.symbols.birth(radius)
        room = first + len(rows)
        generators = self.generators.new_zeros(room, *self.shape)
        generators[: len(self.generators)] = self.generators
        generators[first:] = rows
        sizes = Sizes(self.sizes.linear, self.sizes.quadratic, up(self.sizes.errors + radius))
        self.generators, self.slack, self.sizes = generators, self.slack * ~large, sizes
        return self

    def size(self, *axis: int) -> Any:
        """As of a tensor."""
        return self.centre.size(*axis)

    def dim(self) -> int:
        """As of a tensor."""
        return self.centre.ndim

    def numel(self) -> int:
        """As of a tensor."""
        return self.centre.numel()

    def __len__(self) -> int:
        return len(self.centre)

    def __iter__(self) -> Iterator[Form]:
        return iter(self.unbind(0))

    def __add__(self, other: Any) -> Any:
        return self._apply("add", (self, other), {})

    def __radd__(self, other: Any) -> Any:
        return self._apply("add", (other, self), {})

    def __sub__(self, other: Any) -> Any:
        return self._apply("sub", (self, other), {})

    def __rsub__(self, other: Any) -> Any:
        return self._apply("sub", (other, self), {})

    def __mul__(self, other: Any) -> Any:
        return self._apply("mul", (self, other), {})

    def __rmul__(self, other: Any) -> Any:
        return self._apply("mul", (other, self), {})

    def __truediv__(self, other: Any) -> Any:
        return self._apply("div", (self, other), {})

    def __rtruediv__(self, other: Any) -> Any:
        return self._apply("div", (other, self), {})

    def __matmul__(self, other: Any) -> Any:
        return self._apply("matmul", (self, other), {})

    def __rmatmul__(self, other: Any) -> Any:
        return self._apply("matmul", (other, self), {})

    def __pow__(self, exponent: Any) -> Any:
        return self._apply("pow", (self, exponent), {})

    def __neg__(self) -> Any:
        return self._apply("neg", (self,), {})

    def __getitem__(self, index: Any) -> Any:
        return self._apply("getitem", (self, index), {})

    def __getattr__(self, name: str) -> Any:
        """A method of a tensor, by its rule."""
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        if name in ("T", "mT", "H", "mH"):
            if name == "mT":
                return self.transpose(-1, -2)
            raise NoRuleError(name)
        return lambda *args, **kwargs: self._apply(name, (self, *args), kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply the rule of a function of torch."""
        form = _first_form(args)
        name = func.__name__
        name = name[2:-2] if name.startswith("__") else name
        return form._apply(name, args, kwargs or {})

    def _apply(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        rule = self.symbols.rules.get(name)
        if rule is None:
            raise NoRuleError(name)
        try:
            inspect.signature(rule).bind(*args, **kwargs)
        except TypeError:
            raise NoRuleError(f"{name} with these arguments") from None
        return rule(*args, **kwargs)


def _first_form(args: Any) -> Form:
    for arg in args:
        if isinstance(arg, Form):
            return arg
        if isinstance(arg, list | tuple):
            for item in arg:
                if isinstance(item, Form):
                    return item
    raise NoRuleError("of unknown arguments")
