"""A tensor as a function of the input: what runs through an unmodified model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
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


class Memory:
    """What a tensor and its views have in common: how often it was written to."""

    writes = 0


class Form(Tensor):
    """A tensor x(e) = centre + sum of coefficients times symbols + something within +- slack.

    To a model it is a tensor of its shape, device and dtype, without numbers: functions of torch,
    methods and operators go by the rules of its symbols. An operation that writes into it
    replaces what it holds; views that were taken of it before are then refused, not wrong. The
    first axis of the shape is the batch of the model; forms stand for one sample.

    Args:
        centre: (*shape), float64.
        generators: (rows, *shape), the coefficients, in the dtype of the symbols.
        slack: (*shape), float64, >= 0: what rounding and operations since the last symbols left.
        symbols: that the rows stand for.
        simplex: entries are >= 0 and sum to one along the last axis, whatever the input.
    """

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Form],
        centre: Tensor,
        generators: Tensor,
        slack: Tensor,
        symbols: Symbols,
        *,
        simplex: bool = False,
    ) -> Form:
        shell: Form = Tensor._make_wrapper_subclass(
            cls, centre.shape, dtype=symbols.shown, device=centre.device
        )
        return shell

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
        self.memory, self.seen = Memory(), 0

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Form({tuple(self.shape)}, {len(self.generators)} rows)"

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

    def copy(self) -> Form:
        """Return the same in memory of its own."""
        form = Form(self.centre, self.generators, self._slack, self.symbols)
        form.__dict__.update(self.__dict__)
        form.memory, form.seen = Memory(), 0
        return form

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

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply the rule of a function of torch."""
        name, kwargs = _name(func), dict(kwargs or {})
        if name in METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        forms = _forms((args, kwargs))
        if any(form.seen != form.memory.writes for form in forms):
            raise NoRuleError(f"{name} of what was changed in place by another name")
        writes = name == "setitem" or name.endswith("_") or kwargs.get("inplace")
        name = name.removesuffix("_")
        result = _ruled(forms[0].symbols, name, args, kwargs)
        if writes:
            return _written(name, args[0], result)
        for view in _forms(result) if name in VIEWS else ():
            view.memory, view.seen = forms[0].memory, forms[0].seen
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what did not come by `__torch_function__`: there are no numbers here."""
        raise NoRuleError(str(func))


METADATA = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "size", "dim", "ndimension", "len"),
        *("numel", "nelement", "stride", "is_contiguous", "storage_offset", "element_size"),
        *("itemsize", "nbytes", "hash", "names", "requires_grad", "grad", "grad_fn", "is_leaf"),
        *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_meta", "is_mkldnn", "is_sparse"),
        *("is_nested", "is_quantized", "is_floating_point", "is_complex", "get_device"),
        *("is_sparse_csr", "is_inference", "is_same_size"),
    )
)
"""What a tensor says of itself without its numbers."""

VIEWS = frozenset(
    (
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "squeeze", "unsqueeze"),
        *("reshape", "view", "flatten", "unflatten", "unbind", "chunk", "split", "tensor_split"),
        *("narrow", "select", "getitem", "expand", "expand_as", "T", "mT", "data", "real"),
        *("contiguous", "to", "float", "double", "type_as", "detach", "dropout"),
    )
)
"""Operations whose result may lie in the memory of their argument."""


def _name(func: Callable[..., Any]) -> str:
    """The name of a function, operator, method or attribute of tensors."""
    name = func.__name__
    if name in ("__get__", "__set__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        return attribute if name == "__get__" else f"assignment to {attribute}"
    # float(x) takes the number of a tensor, x.float() casts it.
    return name[2:-2] if name.startswith("__") and name != "__float__" else name


def _forms(values: Any) -> list[Form]:
    """The forms among arguments, in their order."""
    if isinstance(values, Form):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [form for value in values for form in _forms(value)]


def _ruled(symbols: Symbols, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    rule = symbols.rules.get(name)
    if rule is None:
        raise NoRuleError(name)
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:
        raise NoRuleError(f"{name} with these arguments") from None
    return rule(*args, **kwargs)


def _written(name: str, target: Any, result: Form) -> Form:
    """Put a result where its first argument was; what else lies there is out of date."""
    if not isinstance(target, Form) or result.shape != target.shape:
        raise NoRuleError(f"{name} into a constant or another shape")
    if result is not target:
        memory = target.memory
        memory.writes += 1
        target.__dict__.clear()
        target.__dict__.update(result.__dict__)
        target.memory, target.seen = memory, memory.writes
    return target
