"""A tensor as a function of the input: what runs through an unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipaudit.theory.relaxation import names
from lipaudit.theory.relaxation.blocks import Block
from lipaudit.theory.relaxation.refusals import NoRuleError, rule_of
from lipaudit.theory.relaxation.rounding import DOUBLE, cast_up, gamma, outward, tiny, up
from lipaudit.theory.relaxation.symbols import Sizes, Symbols


@dataclass(frozen=True)
class Quotient:
    """numerator / root + constant, one root a row: what a normalisation and weights make.

    It waits to be multiplied out until something else than weights and moves comes: behind weights
    w what the product of the numerator d and the inverse is off by is r |sum_k w_k d_k|, far less
    than r sum_k |w_k| |d_k|.

    Attributes:
        numerator, constant: forms of one shape, or of one that broadcasts to it.
        inverse, square: 1 / root > 0 and root^2; forms whose entries are equal in every row.
    """

    numerator: Form
    inverse: Form
    square: Form
    constant: Form

    def moved(self, move: Callable[[Form], Form]) -> Quotient:
        """The same with entries moved about."""
        return Quotient(*(move(each) for each in vars(self).values()))

    def product(self) -> Form:
        """Return it multiplied out."""
        rules = self.numerator.symbols.rules
        form: Form = rules["add"](rules["mul"](self.numerator, self.inverse), self.constant)
        return form


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
        dense: (rows, *shape), the coefficients, in the dtype of the symbols.
        slack: (*shape), float64, >= 0: what rounding and operations since the last symbols left.
        symbols: that the rows stand for.
        blocks: coefficients beside the dense ones, of errors that act in one row each.
        simplex: entries are >= 0 and sum to one along the last axis, whatever the input.
    """

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Form], centre: Tensor, dense: Tensor, slack: Tensor, symbols: Symbols, **_: Any
    ) -> Form:
        shell: Form = Tensor._make_wrapper_subclass(
            cls, centre.shape, dtype=symbols.shown, device=centre.device
        )
        return shell

    def __init__(
        self,
        centre: Tensor,
        dense: Tensor,
        slack: Tensor,
        symbols: Symbols,
        *,
        blocks: Sequence[Block] = (),
        simplex: bool = False,
    ) -> None:
        self.centre, self.dense, self.slack = centre, dense, slack
        self.blocks, self.symbols, self.simplex = tuple(blocks), symbols, simplex
        self.quotient: Quotient | None = None
        self.memory, self.seen = Memory(), 0
        self.origin: tuple[Form, Any] | None = None

    @classmethod
    def waiting(cls, quotient: Quotient) -> Form:
        """Return a quotient that is multiplied out where its numbers are asked for."""
        like = quotient.numerator
        form = cls.__new__(cls, like.centre, like.dense, like.slack, like.symbols)
        form.symbols, form.simplex, form.quotient = like.symbols, False, quotient
        form.memory, form.seen, form.origin = Memory(), 0, None
        return form

    @property
    def waits(self) -> Quotient | None:
        """The quotient that it is, if that is not multiplied out."""
        return None if "dense" in self.__dict__ else self.quotient

    def __getattr__(self, name: str) -> Any:
        """End the waiting."""
        if name not in names.PARTS or self.__dict__.get("quotient") is None:
            raise AttributeError(name)
        product = self.__dict__["quotient"].product()
        self.__dict__.update({part: product.__dict__[part] for part in names.PARTS})
        return self.__dict__[name]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Form({tuple(self.shape)}, {self.count} rows)"

    @property
    def count(self) -> int:
        """How many symbols it may depend on: they are numbered below that."""
        return max(len(self.dense), *(block.end for block in self.blocks), 0)

    @property
    def generators(self) -> Tensor:
        """All coefficients, (rows, *shape); ends what blocks save."""
        if self.blocks:
            stack = self.dense.new_empty(self.count, *self.shape)
            stack[: len(self.dense)] = self.dense
            stack[len(self.dense) :] = 0
            for block in self.blocks:
                block.add_to(stack)
                self.symbols.dissolved.add(block.key)
            self.dense, self.blocks = stack, ()
        return self.dense

    def whole(self) -> Form:
        """Dissolve the blocks, in place."""
        return self if self.generators is self.dense else self

    def by_row(self) -> Form:
        """Let every block act in rows of the last axis, in place; dissolve them if one cannot."""
        blocks = [block.by_row() for block in self.blocks]
        if any(block is None for block in blocks):
            return self.whole()
        self.blocks = tuple(block for block in blocks if block is not None)
        return self

    def mapped(self, op: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Block]]:
        """Apply an operation by entries, or by rows after `by_row`, to all coefficients."""
        return op(self.dense), [block.mapped(op) for block in self.blocks]

    def columns(self, mask: Tensor) -> Tensor:
        """Return the coefficients of the entries of a mask, (rows, entries)."""
        stack = self.dense.new_zeros(self.count, int(mask.sum()))
        stack[: len(self.dense)] = self.dense[:, mask]
        for block in self.blocks:
            block.columns(mask).add_to(stack)
        return stack

    @cached_property
    def sizes(self) -> Sizes:
        """How far the parts of the generators move."""
        return self.symbols.sizes(self.dense, self.blocks)

    @property
    def mass(self) -> Tensor:
        """A radius of all but the slack, however the coefficients' signs change; float64."""
        return self.sizes.mass

    @cached_property
    def quadratic_range(self) -> tuple[Tensor, Tensor]:
        """The range of the quadratic part."""
        return self.symbols.quadratic_range(self.dense)

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

    @property
    def stale(self) -> bool:
        """Whether it was changed in place by another name."""
        return self.seen != self.memory.writes

    def copy(self) -> Form:
        """Return the same in memory of its own."""
        form = self.__new__(Form, self, self, self, self.symbols)
        form.__dict__.update(self.__dict__)
        form.memory, form.seen, form.origin = Memory(), 0, None
        return form

    def hold(self, result: Form) -> None:
        """Take the numbers of a result that was written here, in the memory as it is now."""
        memory, origin = self.memory, self.origin
        self.__dict__.clear()
        self.__dict__.update(result.__dict__)
        self.memory, self.seen, self.origin = memory, memory.writes, origin

    def uncertain(self, roundings: int) -> Tensor:
        """Return by how much entries are off, seen by a map with weights of so many roundings.

        Slack, and the roundings of a sum of products over the generators, over the centre, and
        for coefficients that a device may take for zero.
        """
        dtype = self.symbols.dtype
        lost = self.count * tiny(dtype)
        moving = gamma(roundings + 1, dtype) * self.mass
        still = (gamma(roundings + 2, DOUBLE) * self.centre.abs()).nan_to_num(posinf=0.0)
        return up(self.slack + moving + still + lost)

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
        errors = up(self.sizes.errors + radius)
        self.sizes = Sizes(self.sizes.linear, self.sizes.quadratic, errors)
        self.blocks = (*self.blocks, self.symbols.birth(radius))
        self.slack = self.slack * ~large
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
        name, kwargs = names.name_of(func), dict(kwargs or {})
        if name in names.METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        forms = forms_of((args, kwargs))
        if any(form.stale or form.symbols is not forms[0].symbols for form in forms):
            raise NoRuleError(f"{name} of what was changed in place by another name or pass")
        writes = name == "setitem" or name.endswith("_") or kwargs.get("inplace")
        name = name.removesuffix("_")
        result = _ruled(forms[0].symbols, func, name, args, kwargs)
        if writes:
            return _written(name, args[0], result)
        copied = name not in names.VIEWS or (name == "getitem" and not names.takes_a_view(args[1]))
        for view in () if copied else forms_of(result):
            view.memory, view.seen = forms[0].memory, forms[0].seen
            if name == "getitem":
                view.origin = forms[0], args[1]
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse what did not come by `__torch_function__`: there are no numbers here."""
        raise NoRuleError(str(func))


def forms_of(values: Any) -> list[Form]:
    """The forms among arguments, in their order."""
    if isinstance(values, Form):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [form for value in values for form in forms_of(value)]


def _ruled(symbols: Symbols, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    rule = rule_of(symbols.rules, name, args, kwargs)
    if symbols.trial is not None:
        return symbols.trial(func, name, args, kwargs)
    if symbols.plan is None:
        return rule(*args, **kwargs)
    call, symbols.plan = symbols.plan, None  # not for the calls that rules make
    try:
        return call(name, rule, args, kwargs)
    finally:
        symbols.plan = call


def _written(name: str, target: Any, result: Form) -> Form:
    """Put a result where its first argument was, and into what that is a part of by an index.

    What else lies there is out of date.
    """
    if not isinstance(target, Form) or result.shape != target.shape:
        raise NoRuleError(f"{name} into a constant or another shape")
    if result is target:
        return target
    if name in names.VIEWS:  # of what it is called by, not of what lies in the memory
        raise NoRuleError(f"{name} in place")
    before = target.memory.writes
    target.memory.writes += 1
    target.hold(result)
    part = target
    while part.origin is not None and part.origin[0].seen == before:
        whole, index = part.origin
        whole.hold(_ruled(whole.symbols, Tensor.__setitem__, "setitem", (whole, index, part), {}))
        part = whole
    return target
