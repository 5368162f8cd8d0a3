"""Operations that rearrange, join or replace entries: exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify.error_blocks import ErrorBlock, move_stack
from lipaudit.certify.form import REARRANGEMENTS, Form, NoRuleError, Quotient
from lipaudit.certify.rounding import DOUBLE
from lipaudit.certify.rules.affine import as_constant, broadcast, shape_of, stack_sum
from lipaudit.certify.symbols import Sizes


def make_move(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of a function of tensors, or of a method by name.

    The function only rearranges or copies entries, and may add zeros.
    """

    def rule(x: Form, *args: Any, **kwargs: Any) -> Any:
        x = x if isinstance(function, str) else x.whole()

        def move(t: Tensor) -> Any:
            called = getattr(Tensor, function) if isinstance(function, str) else function
            return called(t, *args, **kwargs)

        if x.waits:
            forms = (broadcast(form, x.shape) for form in vars(x.waits).values())
            moved = [rule(form, *args, **kwargs) for form in forms]
            if isinstance(moved[0], Form):
                return Form.from_quotient(Quotient(*moved))
            return tuple(Form.from_quotient(Quotient(*one)) for one in zip(*moved, strict=True))
        dense = move_stack(move, x.dense)
        per_block = [block.move(move) for block in x.blocks]
        low_high = x.__dict__.get("quadratic_range", ())
        # Sizes move with the entries: taking them anew would cost a pass over all coefficients.
        known = (x.centre, x.slack, *vars(x.sizes).values(), *low_high)
        parts = dense, *(move(each) for each in known)
        if isinstance(dense, Tensor):
            return _rebuild(x, [each for (each,) in per_block], *parts)
        return tuple(
            _rebuild(x, [block[i] for block in per_block], *each)
            for i, each in enumerate(zip(*parts, strict=True))
        )

    return rule


def _rebuild(
    x: Form, blocks: list[ErrorBlock], dense: Tensor, centre: Tensor, *known: Tensor
) -> Form:
    form = Form(centre, dense, known[0], x.symbols, blocks=blocks)
    form.sizes = Sizes(*known[1:4])  # taken once, before it is split
    if known[4:]:
        form.quadratic_range = known[4], known[5]
    return form


def cat(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Concatenate forms and constants; an empty one counts as absent, as in torch."""
    tensors = [each for each in tensors if each.shape != (0,)]
    like = next(each for each in tensors if isinstance(each, Form))
    forms = [each if isinstance(each, Form) else lift(each, like) for each in tensors]
    rows, axis = max(len(form.generators) for form in forms), dim % like.ndim
    stacks = [
        F.pad(form.generators, (*[0, 0] * form.ndim, 0, rows - len(form.generators)))
        for form in forms
    ]
    centre, slack = (
        torch.cat([getattr(form, part) for form in forms], axis) for part in ("centre", "slack")
    )
    return Form(centre, torch.cat(stacks, axis + 1), slack, like.symbols)


def stack(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Stack forms and constants along a new axis."""
    return cat([each.unsqueeze(dim) for each in tensors], dim)


def masked_fill(input: Form, mask: Tensor, value: Any) -> Form:
    """Put a constant into some entries."""
    mask = mask.bool()
    input = broadcast(input, mask.shape)
    keep = ~mask
    dense, blocks = input.map_rows(lambda t: t * keep)
    centre = input.centre.masked_fill(mask, float(value))
    return Form(centre, dense, input.slack * keep, input.symbols, blocks=blocks)


MOVES = (*REARRANGEMENTS, "index_select", "roll", "flip", "repeat")
"""Tensor methods that rearrange entries."""


def lift(value: Any, like: Form) -> Form:
    """Return a constant as a form."""
    centre = as_constant(value, like).to(DOUBLE)
    rows = like.dense.new_zeros(like.symbols.first_error, *centre.shape)
    return Form(centre, rows, torch.zeros_like(centre), like.symbols)


def make_moving(like: Any, *constants: Any) -> tuple[Any, ...]:
    """Return constants that are multiplied with each other, the first as a form.

    Their product then has slack for its rounding. If one of them is a form, they are returned as
    they are.
    """
    first, *others = constants
    if not isinstance(like, Form) or any(isinstance(each, Form) for each in constants):
        return constants
    return (lift(first, like), *others)


def where(condition: Tensor, input: Any, other: Any) -> Form:
    """Return entries of one where the condition (a constant) holds, else of the other."""
    if isinstance(condition, Form):
        raise NoRuleError("where with a condition that depends on the input")
    like = input if isinstance(input, Form) else other
    one, two = (each if isinstance(each, Form) else lift(each, like) for each in (input, other))
    shape = shape_of(condition.shape, one.shape, two.shape)
    one, two = broadcast(one, shape), broadcast(two, shape)
    generators = stack_sum(one.generators * condition, two.generators * ~condition)
    slack = torch.where(condition, one.slack, two.slack)
    return Form(torch.where(condition, one.centre, two.centre), generators, slack, one.symbols)


def pad(input: Form, pad: Any, mode: str = "constant", value: float | int | None = None) -> Form:  # noqa: A002
    """Add entries at the ends of axes: constants, or copies."""
    if mode != "constant":
        return make_move(F.pad)(input, tuple(pad), mode)

    def wide(t: Tensor, filling: float = 0.0) -> Tensor:
        return F.pad(t, tuple(pad), value=filling)

    centre = wide(input.centre, float(value or 0.0))
    return Form(centre, wide(input.generators), wide(input.slack), input.symbols)


def unfold(input: Form, *args: Any, **kwargs: Any) -> Form:
    """Return patches as columns (F.unfold, called by keyword), or windows of an axis."""
    rule = make_move(F.unfold if "stride" in kwargs else "unfold")
    return rule(input, *args, **kwargs)


def make_constant(name: str) -> Callable[..., Tensor]:
    """Return the rule of a method that creates a constant tensor like another."""

    def rule(input: Form, *args: Any, **kwargs: Any) -> Tensor:
        like = torch.empty(1, dtype=input.dtype, device=input.device).expand(input.shape)
        make = getattr(torch, name, None) or getattr(Tensor, name)
        return make(like, *args, **kwargs)

    return rule
