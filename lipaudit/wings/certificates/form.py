"""A tensor as a function of the input; forms run through an unmodified model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lipaudit.errors import EvaluationError, InputError
from lipaudit.wings.certificates.error_blocks import ErrorBlock
from lipaudit.wings.certificates.rounding import DOUBLE, bound_rounding, cast_up, round_up, tiny
from lipaudit.wings.certificates.symbols import Interval, PartRadii, Symbols

PARTS = ("centre", "dense", "blocks", "slack")
"""Attributes that a pending quotient does not have yet."""

METADATA = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "size",
        "dim",
        "ndimension",
        "len",
        "numel",
        "nelement",
        "stride",
        "is_contiguous",
        "storage_offset",
        "element_size",
        "itemsize",
        "nbytes",
        "hash",
        "names",
        "requires_grad",
        "grad",
        "grad_fn",
        "is_leaf",
        "is_cpu",
        "is_cuda",
        "is_mps",
        "is_xpu",
        "is_meta",
        "is_mkldnn",
        "is_sparse",
        "is_nested",
        "is_quantized",
        "is_floating_point",
        "is_complex",
        "get_device",
        "is_sparse_csr",
        "is_inference",
        "is_same_size",
    )
)
"""Attributes of a tensor that do not depend on its values."""

REARRANGEMENTS = (
    "transpose",
    "swapaxes",
    "swapdims",
    "permute",
    "movedim",
    "squeeze",
    "unsqueeze",
    "reshape",
    "flatten",
    "unflatten",
    "unbind",
    "chunk",
    "split",
    "tensor_split",
    "narrow",
    "select",
)
"""Tensor methods that rearrange entries without copying them."""

VIEWS = frozenset(
    (
        *REARRANGEMENTS,
        "view",
        "getitem",
        "expand",
        "expand_as",
        "T",
        "mT",
        "data",
        "real",
        "broadcast_to",
        "view_as",
        "reshape_as",
        "unfold",
        "type",
        "contiguous",
        "to",
        "float",
        "double",
        "type_as",
        "detach",
        "dropout",
    )
)
"""Operations whose result may share memory with their argument."""


Coefficients = tuple[Tensor, list[ErrorBlock]]
"""Coefficients of a form: the dense stack (symbols, *shape), and blocks, which are sparse."""


def find_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, operator, method or attribute of tensors."""
    name = function.__name__
    # Reading x.shape calls `__get__` of an object, `__self__`, whose name is "shape".
    if name == "__get__":
        return str(function.__self__.__name__)  # type: ignore[attr-defined]
    if name == "__set__":
        return f"assignment to {function.__self__.__name__}"  # type: ignore[attr-defined]
    # x.__add__ is named "add". __float__ keeps its underscores: float(x) reads the number of a
    # tensor and has no rule, but x.float() is a cast and has one.
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
        """Write the message; an empty `module` means that the path of the module is unknown."""
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


def require_finite(*bounds: Tensor) -> None:
    """Raise `UnboundedError` if an entry of some bounds is infinite or NaN."""
    if not all(bound.isfinite().all() for bound in bounds):
        raise UnboundedError


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
        """Return the quotient with `move`, a rearrangement of entries, applied to each form."""
        return Quotient(*(move(each) for each in vars(self).values()))


class Memory:
    """Shared by a tensor and its views: the number of writes."""

    writes = 0


class Form(Tensor):
    """A tensor x(e) = centre + sum of coefficients times symbols + an error within +- slack.

    Symbols are the unknowns: the coordinates of the input in the unit ball, at order 2 also their
    products, and errors of operations in [-1, 1]. So one form holds a tensor of the model for all
    inputs of the ball. For a model it is a tensor with shape, device and dtype, without numbers:
    functions of torch, methods and operators use the rules of its symbols. A write replaces its
    content; earlier views are then refused, not wrong. The first axis is the batch of the model; a
    form represents one sample.
    """

    memory: Memory
    seen_writes: int
    # Only of attention weights, entries >= 0 that sum to one along the last axis: a lower and an
    # upper bound of each entry, often tighter than `range`.
    weights: Interval | None = None

    @staticmethod
    def __new__(
        cls: type[Form], centre: Tensor, dense: Tensor, slack: Tensor, symbols: Symbols, **_: Any
    ) -> Form:
        """Create the tensor; Python then calls `__init__`, which stores its content."""
        return _make_shell(centre, symbols)

    def __init__(
        self,
        centre: Tensor,
        dense: Tensor,
        slack: Tensor,
        symbols: Symbols,
        *,
        blocks: Sequence[ErrorBlock] = (),
    ) -> None:
        """Store the tensor centre + coefficients . symbols +- slack.

        Args:
            centre: (*shape), float64.
            dense: (symbols, *shape), the coefficients, in the dtype of the symbols.
            slack: (*shape), float64, >= 0: the radius of all errors that have no symbol.
            symbols: the symbols of the pass; row i of `dense` has the coefficients of symbol i.
            blocks: further coefficients, stored sparsely, of error symbols that act on one group
                of entries each.
        """
        self.centre = centre
        self.dense = dense
        self.slack = slack
        self.symbols = symbols
        self.blocks = tuple(blocks)
        self.quotient: Quotient | None = None

    @classmethod
    def from_quotient(cls, quotient: Quotient) -> Form:
        """Return a form for a quotient: numerator x inverse + constant, computed on first use.

        The form has no centre, coefficients and slack yet. `__getattr__` computes them when one of
        them is first read.
        """
        symbols = quotient.numerator.symbols
        form = _make_shell(quotient.numerator, symbols)
        form.symbols = symbols
        form.quotient = quotient
        return form

    @property
    def pending_quotient(self) -> Quotient | None:
        """Return the quotient of this form if its product is not computed yet, else None."""
        if "dense" in self.__dict__:  # the product was computed: coefficients exist
            return None
        return self.quotient

    def __getattr__(self, name: str) -> Any:
        """Compute a pending quotient when the centre or the coefficients are first read.

        Python calls this method for attributes that do not exist yet. A normalisation is kept as
        numerator x inverse + constant until its numbers are needed: a linear layer that follows
        gets tighter bounds from the quotient than from the product.
        """
        quotient = self.__dict__.get("quotient")
        # PARTS are the attributes that a pending quotient lacks: centre, coefficients and slack.
        if name not in PARTS or quotient is None:
            raise AttributeError(name)
        rules = quotient.numerator.symbols.rules
        product = rules["mul"](quotient.numerator, quotient.inverse)
        product = rules["add"](product, quotient.constant)
        self.__dict__.update({part: product.__dict__[part] for part in PARTS})
        return self.__dict__[name]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Form({tuple(self.shape)}, {self.symbol_count} rows)"

    @property
    def symbol_count(self) -> int:
        """Return n such that the form has coefficients only of symbols 0 to n - 1."""
        return max(len(self.dense), *(block.end for block in self.blocks), 0)

    @property
    def generators(self) -> Tensor:
        """Return all coefficients as a dense stack (symbols, *shape).

        Blocks store coefficients of error symbols sparsely. They are written into the stack, and
        the form has no blocks afterwards.
        """
        return self.make_dense().dense

    def make_dense(self) -> Form:
        """Write all coefficients into the dense stack (symbols, *shape), in place.

        Blocks store coefficients of error symbols sparsely; afterwards the form has no blocks.
        """
        if not self.blocks:
            return self
        stack = self.dense.new_empty(self.symbol_count, *self.shape)
        stack[: len(self.dense)] = self.dense
        # Only rows that are not copied are set to zero: memory is written once.
        stack[len(self.dense) :] = 0
        for block in self.blocks:
            block.add_to(stack)
            # Another form with this block must become dense, too, before both are added.
            self.symbols.dense_keys.add(block.key)
        self.dense = stack
        self.blocks = ()
        return self

    def split_by_row(self) -> Form:
        """Rewrite the blocks so that each symbol acts in one row of the last axis, in place.

        Blocks store coefficients of error symbols sparsely: an entry has coefficients for the
        symbols of its group only. After the rewrite, every row is one group. So an operation that
        mixes the entries of a row, such as a product with weights, can be applied to blocks and to
        dense coefficients alike. If a block cannot be rewritten, all coefficients become dense.
        """
        blocks = []
        for block in self.blocks:
            by_row = block.split_by_row()
            if by_row is None:
                return self.make_dense()
            blocks.append(by_row)
        self.blocks = tuple(blocks)
        return self

    def map_coefficients(self, op: Callable[[Tensor], Tensor]) -> Coefficients:
        """Return dense coefficients and blocks after a linear operation on each entry.

        Blocks store coefficients of error symbols sparsely. After `split_by_row` the operation may
        also mix entries of the same row of the last axis.
        """
        return op(self.dense), [block.map_coefficients(op) for block in self.blocks]

    def select_entries(self, mask: Tensor) -> Tensor:
        """Return the coefficients (symbols, entries) of entries where a mask (*shape) is True."""
        stack = self.dense.new_zeros(self.symbol_count, int(mask.sum()))
        stack[: len(self.dense)] = self.dense[:, mask]
        # Blocks store coefficients of errors sparsely: add them to the rows of these symbols.
        for block in self.blocks:
            block.select_entries(mask).add_to(stack)
        return stack

    @cached_property
    def radii(self) -> PartRadii:
        """Return bounds of the parts (linear, quadratic, errors) of each entry, (*shape) each."""
        return self.symbols.bound_parts(self.dense, self.blocks)

    @property
    def symbol_radius(self) -> Tensor:
        """Return a bound of the change of each entry by all symbols, without slack; float64."""
        return self.radii.total

    @property
    def radius(self) -> Tensor:
        """Return how far each entry can move from the centre: by all symbols, and the slack.

        The sum is in float64, and is not rounded up.
        """
        return self.symbol_radius + self.slack

    @cached_property
    def quadratic_range(self) -> Interval:
        """Return the least and the largest value of the quadratic part; zeros at order 1."""
        return self.symbols.quadratic_range(self.dense)

    @property
    def nonlinear_radius(self) -> Tensor:
        """Return a bound of quadratic part + errors +- slack of each entry, (*shape); float64.

        A form is centre + linear part + quadratic part + errors +- slack. The linear and the
        quadratic part depend on the coordinates of the input.
        """
        low, high = self.quadratic_range
        quadratic = torch.maximum(-low, high)
        return round_up(quadratic + self.radii.errors + self.slack)

    @property
    def shifted_centre(self) -> Tensor:
        """Return the centre plus the middle of the range of the quadratic part.

        The quadratic part is in [low, high], which is not symmetric. Relative to this middle the
        part is within +-(high - low) / 2, a smaller radius. At order 1 the middle is 0.
        """
        low, high = self.quadratic_range
        return self.centre + (low + high) / 2

    @property
    def centre_shift(self) -> Tensor:
        """Return the shifted centre minus the centre: 0 at order 1."""
        return self.shifted_centre - self.centre

    @property
    def rest_radius(self) -> Tensor:
        """Return a bound of the nonlinear part of each entry around the shifted centre, (*shape).

        The nonlinear part is quadratic part + errors +- slack. The shifted centre is the centre
        plus the middle of the range of the quadratic part.
        """
        low, high = self.quadratic_range
        shift = self.centre_shift
        quadratic = torch.maximum(high - shift, shift - low)
        return round_up(quadratic + self.radii.errors + self.slack)

    def range(self) -> Interval:
        """Return a lower and an upper bound of every entry on the ball, (*shape) each, float64.

        A form is centre + linear part + quadratic part + errors +- slack. The bounds of the parts
        are added. One part is in an interval [low, high] that is not symmetric: the quadratic
        part, or in a ball of texts the linear part. All other parts together are in
        [-radius, radius].
        """
        symbols = self.symbols
        radii = self.radii
        if symbols.norm == "words":
            # The ball holds texts in which a few words are replaced. Its symbols are in [0, 1],
            # one for each replacement of a word, so the linear part is not symmetric. There is no
            # quadratic part.
            linear = self.dense[: symbols.inputs]
            low = -symbols.maximise_over_words(-linear)
            high = symbols.maximise_over_words(linear)
            radius = round_up(radii.errors + self.slack)
        else:  # the linear part is symmetric; the quadratic part is 0 at order 1
            low, high = self.quadratic_range
            radius = round_up(radii.linear + radii.errors + self.slack)
        # Rounding: fewer than 16 float64 sums, of terms that are no larger than `size`.
        size = self.centre.abs() + radius + high - low
        rounding = round_up(bound_rounding(16, DOUBLE) * size)
        low = self.centre - radius + low - rounding
        high = self.centre + radius + high + rounding
        if self.weights is None:
            return low, high
        # Attention weights have a second range, often tighter. Both are valid, so is the
        # intersection.
        low_weight, high_weight = self.weights
        return torch.maximum(low, low_weight), torch.minimum(high, high_weight)

    @property
    def is_stale(self) -> bool:
        """Return whether another view of the same memory was written to after this view was made.

        In torch such a write also changes this view. A form does not follow the write, so its
        content is old, and the use of a stale form is refused.
        """
        return self.seen_writes != self.memory.writes

    def copy(self) -> Form:
        """Return a copy in separate memory: a write to one does not make the other stale."""
        form = _make_shell(self, self.symbols)
        # The shell has a memory of its own. It stays: of equal keys, `|` takes the right value.
        form.__dict__ = self.__dict__ | form.__dict__
        return form

    def with_bounds(self, centre: Tensor, slack: Tensor) -> Form:
        """Return a form with the same coefficients, and another centre and slack."""
        form = Form(centre, self.dense, slack, self.symbols, blocks=self.blocks)
        form.radii = self.radii  # cached: they depend on the coefficients alone
        return form

    def take_content_of(self, result: Form) -> None:
        """Replace the content of this form by the content of a result, for a write in place.

        The object `memory` of this form stays. Its views share this object, which counts the
        writes. A form is up to date if its `seen_writes` equals this count. The caller has already
        counted this write, so all views are out of date, and only this form takes the new count.
        """
        memory = self.memory
        # Cached radii and ranges belong to the old content: they are removed, too.
        self.__dict__.clear()
        self.__dict__.update(result.__dict__)
        self.memory = memory
        self.seen_writes = memory.writes

    def bound_input_error(self, roundings: int) -> Tensor:
        """Return s >= 0, (*shape), such that |W| s bounds the error of W x, as it is computed.

        x is this form, centre + coefficients . symbols +- slack, and W is any linear map. W x has
        two kinds of errors: |W| times the slack of x, and the rounding of W centre and of
        W coefficients. Relative to |W| |x|, the rounding is bounded by the number of roundings.

        Args:
            roundings: number of roundings of an entry of W x: the terms of its sum, plus the
                roundings of the entries of W.
        """
        dtype = self.symbols.dtype
        # One more rounding: x itself may be a sum that was rounded once (then `roundings` is 0).
        # The centre counts two more, which leaves room.
        of_symbols = bound_rounding(roundings + 1, dtype) * self.symbol_radius
        # Only the score of a masked key has an infinite centre, and it has no rounding error.
        of_centre = (bound_rounding(roundings + 2, DOUBLE) * self.centre.abs()).nan_to_num(
            posinf=0.0
        )
        # A device may take tiny coefficients for zero.
        underflow = self.symbol_count * tiny(dtype)
        return round_up(self.slack + of_symbols + of_centre + underflow)

    def symbolize_slack(self) -> Form:
        """Turn slack into error symbols, in place, at entries with a large slack.

        Slack and an error symbol both bound an unknown error of one entry. If weights mix entries,
        slack adds up in absolute value. A symbol keeps its sign, so its coefficients can cancel
        later. But symbols cost time: small slack, relative to the largest radius in its row, stays
        slack.
        """
        largest = self.radius
        if largest.numel():
            largest = largest.amax(-1, keepdim=True)
        is_large = self.slack > self.symbols.slack_share * largest
        if not is_large.any():
            return self
        # A symbol may be larger than the slack that it replaces, never smaller.
        radius = cast_up(self.slack * is_large, self.symbols.dtype)
        # `radii` is cached: the radii of the linear part, the quadratic part and the errors. The
        # new symbols are errors; the other two parts stay.
        errors = round_up(self.radii.errors + radius)
        self.radii = replace(self.radii, errors=errors)
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
        # For torch, a form is itself a tensor of this shape, dtype and device, without numbers:
        # such attributes are read from it.
        if name in METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        forms = list_forms((args, kwargs))
        # Symbol i of one pass has nothing to do with symbol i of another pass. A stale view has
        # old content. Both are refused.
        first = forms[0]
        if any(form.is_stale or form.symbols is not first.symbols for form in forms):
            raise NoRuleError(
                f"{name} of a tensor that was changed in place elsewhere, or is of another pass"
            )
        # add_ uses the rule of add, and the result is written into the first argument.
        is_in_place = name.endswith("_") or kwargs.get("inplace")
        name = name.removesuffix("_")
        result = _apply_rule(first.symbols, func, name, args, kwargs)
        if is_in_place:
            return _write_back(name, args[0], result)
        if name in VIEWS:
            # A later write to the result or to the argument makes the other one stale.
            for view in list_forms(result):
                view.memory = first.memory
                view.seen_writes = first.seen_writes
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse calls that bypass `__torch_function__`: a form has no numbers."""
        raise NoRuleError(str(func))


def _make_shell(like: Tensor, symbols: Symbols) -> Form:
    """Return a form without content: a tensor with the shape and device of `like`.

    A form is a tensor without numbers, so that torch accepts it in place of a tensor of the model.
    Attributes such as the centre and the coefficients are set by the caller.
    """
    shell = Tensor._make_wrapper_subclass(
        Form, like.shape, dtype=symbols.model_dtype, device=like.device
    )
    # `memory` counts writes, and views share it. `seen_writes` is the count when a view was made:
    # if they differ later, the view has old content.
    shell.memory = Memory()
    shell.seen_writes = 0
    return shell


def list_forms(values: Any) -> list[Form]:
    """Return the forms among arguments, in order."""
    return [value for value in tree_leaves(values) if isinstance(value, Form)]


def _apply_rule(symbols: Symbols, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on forms, by its rule.

    If `symbols.intercept` is set, this function is called in place of the rule. A trial run uses
    it to record every call, and a later pass to leave out entries that no result reads (`demand`).
    """
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
    symbols.intercept = None  # operations inside a rule must not be intercepted, too
    try:
        return intercept(func, name, rule, args, kwargs)
    finally:
        symbols.intercept = intercept


def _write_back(name: str, target: Any, result: Form) -> Form:
    """Write the result of an operation in place, such as add_, into `target`.

    `target` is the first argument of the operation. Other views of the same memory still have the
    old content: they become stale, and their use is refused.
    """
    if not isinstance(target, Form) or result.shape != target.shape:
        raise NoRuleError(f"{name} into a constant or another shape")
    if result is target:  # such as dropout_ in eval mode, which changes nothing
        return target
    if name in VIEWS:  # transpose_ and others would change how the same memory is viewed
        raise NoRuleError(f"{name} in place")
    target.memory.writes += 1
    target.take_content_of(result)
    return target
