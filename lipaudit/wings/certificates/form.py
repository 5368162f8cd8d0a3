"""A tensor as a function of the input; forms run through an unmodified model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lipaudit.errors import EvaluationError, InputError
from lipaudit.wings.certificates.symbols import (
    DOUBLE,
    ErrorBlock,
    PartRadii,
    Symbols,
    cast_up,
    gamma,
    round_up,
    tiny,
)

PARTS = ("centre", "dense", "blocks", "slack")
"""Attributes that a pending quotient does not have yet."""

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
"""Attributes of a tensor that do not depend on its values."""

REARRANGEMENTS = (
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "squeeze", "unsqueeze"),
    *("reshape", "flatten", "unflatten", "unbind", "chunk", "split", "tensor_split"),
    *("narrow", "select"),
)
"""Tensor methods that rearrange entries without copying them."""

VIEWS = frozenset(
    (
        *(*REARRANGEMENTS, "view", "getitem", "expand", "expand_as", "T", "mT", "data", "real"),
        *("broadcast_to", "view_as", "reshape_as", "unfold", "type"),
        *("contiguous", "to", "float", "double", "type_as", "detach", "dropout"),
    )
)
"""Operations whose result may share memory with their argument."""


def find_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, operator, method or attribute of tensors."""
    name = function.__name__
    if name == "__get__":
        return str(function.__self__.__name__)  # type: ignore[attr-defined]
    if name == "__set__":
        return f"assignment to {function.__self__.__name__}"  # type: ignore[attr-defined]
    # Not of __float__: float(x) reads the number of a tensor, x.float() casts it.
    if name.startswith("__") and name != "__float__":
        return name[2:-2]
    return name


class NoRuleError(InputError):
    """The model uses an operation that has no rule for forms.

    Args:
        operation: its name, and what is not supported.
        module: path of the module that uses it, if known.
    """

    def __init__(self, operation: str, module: str = "") -> None:
        where = ""
        if module:
            where = f" (in {module})"
        super().__init__(
            f"no certificate for this model: no rule for the operation {operation}{where}",
            "Certificates support the operations of common transformers. Use `lipaudit "
            "attack`, which works on any model.",
        )
        self.operation = operation
        self.module = module


class UnboundedError(EvaluationError):
    """The bounds overflowed: the ball is too large."""

    def __init__(self) -> None:
        super().__init__("the bounds overflowed: the ball is too large for this model")


@dataclass(frozen=True)
class Quotient:
    """numerator / root + constant with one root per row: a normalisation followed by weights.

    The product is postponed until an operation other than weights and rearrangements: after
    weights w, the error of the product of numerator d and inverse is r |sum_k w_k d_k|, far less
    than r sum_k |w_k| |d_k|.

    Attributes:
        numerator, constant: forms of one shape, or of one that broadcasts to it.
        inverse, square: 1 / root > 0 and root^2; forms whose entries are equal in every row.
    """

    numerator: Form
    inverse: Form
    square: Form
    constant: Form

    def move(self, move: Callable[[Form], Form]) -> Quotient:
        """Return the quotient with rearranged entries."""
        return Quotient(*(move(each) for each in vars(self).values()))


class Memory:
    """Shared by a tensor and its views: the number of writes."""

    writes = 0


class Form(Tensor):
    """A tensor x(e) = centre + sum of coefficients times symbols + an error within +- slack.

    For a model it is a tensor with shape, device and dtype, without numbers: functions of torch,
    methods and operators use the rules of its symbols. A write replaces its content; earlier views
    are then refused, not wrong. The first axis is the batch of the model; a form represents one
    sample.

    Args:
        centre: (*shape), float64.
        dense: (symbols, *shape), the coefficients, in the dtype of the symbols.
        slack: (*shape), float64, >= 0: errors of rounding and operations since the last symbols.
        symbols: the symbols of the rows.
        blocks: coefficients beside the dense ones, of errors that act in one row each.
        weights: of entries that are >= 0 and sum to one along the last axis, whatever the input:
            the ends of a range that they stay in, beside what the coefficients say.
    """

    memory: Memory
    seen: int

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Form], centre: Tensor, dense: Tensor, slack: Tensor, symbols: Symbols, **_: Any
    ) -> Form:
        shell: Form = Tensor._make_wrapper_subclass(
            cls, centre.shape, dtype=symbols.model_dtype, device=centre.device
        )
        shell.memory = Memory()
        shell.seen = 0
        return shell

    def __init__(
        self,
        centre: Tensor,
        dense: Tensor,
        slack: Tensor,
        symbols: Symbols,
        *,
        blocks: Sequence[ErrorBlock] = (),
        weights: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.centre = centre
        self.dense = dense
        self.slack = slack
        self.symbols = symbols
        self.blocks = tuple(blocks)
        self.weights = weights
        self.quotient: Quotient | None = None

    @classmethod
    def from_quotient(cls, quotient: Quotient) -> Form:
        """Return a form for a quotient, which is multiplied out on first use of its numbers."""
        like = quotient.numerator
        form = cls.__new__(cls, like.centre, like.dense, like.slack, like.symbols)
        form.symbols = like.symbols
        form.weights = None
        form.quotient = quotient
        return form

    @property
    def pending_quotient(self) -> Quotient | None:
        """Return the quotient that this form is, as long as it is not multiplied out."""
        if "dense" in self.__dict__:
            return None
        return self.quotient

    def __getattr__(self, name: str) -> Any:
        """Multiply out the pending quotient when its centre or coefficients are first read.

        Python calls this for attributes that do not exist yet.
        """
        quotient: Quotient | None = self.__dict__.get("quotient")
        if name not in PARTS or quotient is None:
            raise AttributeError(name)
        rules = quotient.numerator.symbols.rules
        product = rules["mul"](quotient.numerator, quotient.inverse)
        product = rules["add"](product, quotient.constant)
        self.__dict__.update({part: product.__dict__[part] for part in PARTS})
        return self.__dict__[name]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Form({tuple(self.shape)}, {self.count} rows)"

    @property
    def count(self) -> int:
        """Return the number of symbols that it may depend on: those with smaller numbers."""
        return max(len(self.dense), *(block.end for block in self.blocks), 0)

    @property
    def generators(self) -> Tensor:
        """Return all coefficients as a dense stack (symbols, *shape); blocks become part of it."""
        if self.blocks:
            stack = self.dense.new_empty(self.count, *self.shape)
            stack[: len(self.dense)] = self.dense
            # new_empty and two writes: zeroing all rows first would touch memory twice.
            stack[len(self.dense) :] = 0
            for block in self.blocks:
                block.add_to(stack)
                self.symbols.dense_keys.add(block.key)
            self.dense = stack
            self.blocks = ()
        return self.dense

    def make_dense(self) -> Form:
        """Turn the blocks into dense rows, in place."""
        self.generators  # noqa: B018 - reading it does so
        return self

    def split_by_row(self) -> Form:
        """Let every block act in rows of the last axis, in place, or make all dense."""
        blocks = []
        for block in self.blocks:
            by_row = block.split_by_row()
            if by_row is None:
                return self.make_dense()
            blocks.append(by_row)
        self.blocks = tuple(blocks)
        return self

    def map_coefficients(self, op: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[ErrorBlock]]:
        """Return dense coefficients and blocks after an operation on each entry.

        After `split_by_row` the operation may also mix the entries of a row of the last axis.
        """
        return op(self.dense), [block.map_coefficients(op) for block in self.blocks]

    def select_entries(self, mask: Tensor) -> Tensor:
        """Return the coefficients (symbols, entries) where a mask (*shape) holds."""
        stack = self.dense.new_zeros(self.count, int(mask.sum()))
        stack[: len(self.dense)] = self.dense[:, mask]
        for block in self.blocks:
            block.select_entries(mask).add_to(stack)
        return stack

    @cached_property
    def radii(self) -> PartRadii:
        """Return how far each part (linear, quadratic, errors) can move the entries."""
        return self.symbols.bound_parts(self.dense, self.blocks)

    @property
    def symbol_radius(self) -> Tensor:
        """Return how far all symbols together can move the entries, without slack; float64."""
        return self.radii.total

    @cached_property
    def quadratic_range(self) -> tuple[Tensor, Tensor]:
        """Return the range of the quadratic part."""
        return self.symbols.quadratic_range(self.dense)

    @property
    def nonlinear_radius(self) -> Tensor:
        """Return how far all but the linear part moves the entries, with slack; float64."""
        low, high = self.quadratic_range
        quadratic = torch.maximum(-low, high)
        return round_up(quadratic + self.radii.errors + self.slack)

    @property
    def shifted_centre(self) -> Tensor:
        """Return the centre plus the middle of the quadratic part's range (0 at order 1)."""
        low, high = self.quadratic_range
        return self.centre + (low + high) / 2

    @property
    def centre_shift(self) -> Tensor:
        """Return the shifted centre minus the centre: 0 at order 1."""
        return self.shifted_centre - self.centre

    @property
    def rest_radius(self) -> Tensor:
        """Return how far all but the linear part moves the entries from the shifted centre."""
        low, high = self.quadratic_range
        shift = self.centre_shift
        quadratic = torch.maximum(high - shift, shift - low)
        return round_up(quadratic + self.radii.errors + self.slack)

    def range(self) -> tuple[Tensor, Tensor]:
        """Return the ends of a range that holds every value, (*shape) each, float64."""
        # The linear and the quadratic part share symbols, but their ranges add up to a valid one.
        symbols = self.symbols
        radii = self.radii
        if symbols.norm == "words":  # symbols are in [0, 1], so the two ends differ
            linear = self.dense[: symbols.n]
            low = -symbols.maximise_over_words(-linear)
            high = symbols.maximise_over_words(linear)
            radius = round_up(radii.errors + self.slack)
        else:
            low, high = self.quadratic_range
            radius = round_up(radii.linear + radii.errors + self.slack)
        # The rounding of a few float64 sums of terms that are no larger than this size.
        size = self.centre.abs() + radius + high - low
        rounding = round_up(gamma(16, DOUBLE) * size)
        low = self.centre - radius + low - rounding
        high = self.centre + radius + high + rounding
        if self.weights is None:
            return low, high
        low_weight, high_weight = self.weights
        return torch.maximum(low, low_weight), torch.minimum(high, high_weight)

    @property
    def stale(self) -> bool:
        """Return whether another view of its memory was written to since this one was made."""
        return self.seen != self.memory.writes

    def copy(self) -> Form:
        """Return a copy in separate memory."""
        form = self.__new__(Form, self, self, self, self.symbols)
        form.__dict__ = self.__dict__ | form.__dict__
        return form

    def hold(self, result: Form) -> None:
        """Take over the content of a result that is written into this form."""
        memory = self.memory
        # Cached radii and ranges belong to the old content: they go with it.
        self.__dict__.clear()
        self.__dict__.update(result.__dict__)
        self.memory = memory
        self.seen = memory.writes

    def bound_input_error(self, roundings: int) -> Tensor:
        """Return s >= 0 such that |W| s is the slack of the form W x.

        s is the slack of x, and the rounding of W times the coefficients and the centre, if each
        entry of W x takes so many roundings.
        """
        dtype = self.symbols.dtype
        of_symbols = gamma(roundings + 1, dtype) * self.symbol_radius
        of_centre = (gamma(roundings + 2, DOUBLE) * self.centre.abs()).nan_to_num(posinf=0.0)
        # A device may take tiny coefficients for zero.
        underflow = self.count * tiny(dtype)
        return round_up(self.slack + of_symbols + of_centre + underflow)

    def symbolize_slack(self) -> Form:
        """Turn slack into error symbols, in place, where it is a share of the entry's radius.

        Slack that is mixed by weights adds up in absolute value, symbols keep their signs. Where
        slack is small against the largest radius of the row, it stays: symbols cost time.
        """
        largest = self.symbol_radius + self.slack
        if self.ndim:
            largest = largest.amax(-1, keepdim=True)
        is_large = self.slack > self.symbols.slack_share * largest
        if not is_large.any():
            return self
        # A symbol may be larger than the slack that it replaces, never smaller.
        radius = cast_up(self.slack * is_large, self.symbols.dtype)
        errors = round_up(self.radii.errors + radius)
        self.radii = PartRadii(self.radii.linear, self.radii.quadratic, errors)
        self.blocks = (*self.blocks, self.symbols.add_errors(radius))
        self.slack = self.slack * ~is_large
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply the rule of a torch function; torch calls this in place of the function."""
        name = find_name(func)
        kwargs = dict(kwargs or {})
        if name in METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        forms = list_forms((args, kwargs))
        # Forms of two passes, or a view of what was overwritten, have no common meaning.
        first = forms[0]
        if any(form.stale or form.symbols is not first.symbols for form in forms):
            raise NoRuleError(f"{name} of a tensor that was changed in place elsewhere")
        is_in_place = name.endswith("_") or kwargs.get("inplace")
        name = name.removesuffix("_")
        result = _apply_rule(first.symbols, func, name, args, kwargs)
        if is_in_place:
            return _write_back(name, args[0], result)
        if name in VIEWS:
            # A later write to the result or to the argument makes the other one stale.
            for view in list_forms(result):
                view.memory = first.memory
                view.seen = first.seen
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse calls that bypass `__torch_function__`: a form has no numbers."""
        raise NoRuleError(str(func))


def list_forms(values: Any) -> list[Form]:
    """Return the forms among arguments, in order."""
    return [value for value in tree_leaves(values) if isinstance(value, Form)]


def _apply_rule(symbols: Symbols, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the rule's result for an operation, or the result of `symbols.intercept`."""
    rule = symbols.rules.get(name)
    if rule is None:
        raise NoRuleError(name)
    try:
        inspect.signature(rule).bind(*args, **kwargs)
    except TypeError:
        raise NoRuleError(f"{name} with these arguments") from None
    if symbols.intercept is None:
        return rule(*args, **kwargs)
    intercept = symbols.intercept
    symbols.intercept = None  # not for the calls that rules make
    try:
        return intercept(func, name, rule, args, kwargs)
    finally:
        symbols.intercept = intercept


def _write_back(name: str, target: Any, result: Form) -> Form:
    """Write the result of an operation in place into its first argument; other views are stale."""
    if not isinstance(target, Form) or result.shape != target.shape:
        raise NoRuleError(f"{name} into a constant or another shape")
    if result is target:
        return target
    if name in VIEWS:  # a view of another shape would need the memory to change its shape
        raise NoRuleError(f"{name} in place")
    target.memory.writes += 1
    target.hold(result)
    return target
