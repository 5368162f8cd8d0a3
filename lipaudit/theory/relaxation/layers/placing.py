"""Entries put elsewhere, beside constants or over others; and constants of a form's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.theory.relaxation.form import Form
from lipaudit.theory.relaxation.operations.affine import as_constant, broadcast, same, shape_of
from lipaudit.theory.relaxation.operations.moves import moved
from lipaudit.theory.relaxation.refusals import NoRuleError
from lipaudit.theory.relaxation.rounding import DOUBLE


def lifted(value: Any, like: Form) -> Form:
    """Return a constant as a form."""
    centre = as_constant(value, like).to(DOUBLE)
    rows = like.dense.new_zeros(like.symbols.first_error, *centre.shape)
    return Form(centre, rows, torch.zeros_like(centre), like.symbols)


def moving(like: Any, *constants: Any) -> tuple[Any, ...]:
    """Return constants that one operation multiplies with each other, the first of them a form.

    Their product then has slack for its rounding. Where one of them is a form, as they are.
    """
    first, *others = constants
    if not isinstance(like, Form) or any(isinstance(each, Form) for each in constants):
        return constants
    return (lifted(first, like), *others)


def where(condition: Tensor, input: Any, other: Any) -> Form:
    """Entries of the one where the condition, a constant, holds, else of the other."""
    if isinstance(condition, Form):
        raise NoRuleError("where with a condition on what moves")
    like = input if isinstance(input, Form) else other
    one, two = (each if isinstance(each, Form) else lifted(each, like) for each in (input, other))
    shape = shape_of(condition.shape, one.shape, two.shape)
    one, two = broadcast(one, shape), broadcast(two, shape)
    generators = _joined(one.generators * condition, two.generators * ~condition)
    slack = torch.where(condition, one.slack, two.slack)
    return Form(torch.where(condition, one.centre, two.centre), generators, slack, one.symbols)


def _joined(one: Tensor, two: Tensor) -> Tensor:
    long, short = (one, two) if len(one) >= len(two) else (two, one)
    long = long.clone()
    long[: len(short)] += short
    return long


def setitem(input: Any, index: Any, value: Any) -> Form:
    """Return the form with other entries at an index."""
    if not isinstance(input, Form):
        raise NoRuleError("setitem into a constant")
    value = value if isinstance(value, Form) else lifted(value, input)
    at = torch.arange(input.numel(), device=input.device).view(input.shape)[index]
    part = broadcast(value, at.shape)
    count, at = max(len(input.generators), len(part.generators)), at.flatten()

    def written(whole: Tensor, rows: Tensor, length: int) -> Tensor:
        flat = whole.new_zeros(length, input.numel())
        flat[: len(whole)] = whole.reshape(len(whole), input.numel())
        flat[:, at] = 0
        flat[: len(rows), at] = rows.reshape(len(rows), len(at))
        return flat.view(length, *input.shape)

    centre, slack = (
        written(whole[None], its[None], 1)[0]
        for whole, its in ((input.centre, part.centre), (input.slack, part.slack))
    )
    generators = written(input.generators, part.generators, count)
    return Form(centre, generators, slack, input.symbols)


def pad(input: Form, pad: Any, mode: str = "constant", value: float | int | None = None) -> Form:  # noqa: A002
    """More entries at the ends of axes: constants, or copies."""
    if mode != "constant":
        return moved(F.pad)(input, tuple(pad), mode)

    def wide(t: Tensor, filling: float = 0.0) -> Tensor:
        return F.pad(t, tuple(pad), value=filling)

    centre = wide(input.centre, float(value or 0.0))
    return Form(centre, wide(input.generators), wide(input.slack), input.symbols)


def triangle(name: str) -> Callable[..., Form]:
    """Return the rule of tril or triu."""

    def rule(input: Form, diagonal: int = 0) -> Form:
        ones = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device)
        return where(getattr(ones, name)(diagonal), input, 0.0)

    return rule


def unfold(input: Form, *args: Any, **kwargs: Any) -> Form:
    """Patches as columns (F.unfold, which torch calls with names), or windows of an axis."""
    rule = moved(F.unfold if "stride" in kwargs else "unfold")
    return rule(input, *args, **kwargs)


def _constants(name: str) -> Callable[..., Tensor]:
    """Return the rule of a method that makes a constant tensor like another."""

    def rule(input: Form, *args: Any, **kwargs: Any) -> Tensor:
        like = torch.empty(1, dtype=input.dtype, device=input.device).expand(input.shape)
        make = getattr(torch, name, None) or getattr(Tensor, name)
        return make(like, *args, **kwargs)

    return rule


def _empty(input: Form, *size: Any, **options: Any) -> Form:
    """Return what has no numbers yet: a form, for some will be written to."""
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return lifted(torch.full(tuple(shape or input.shape), torch.nan, dtype=DOUBLE), input)


RULES: dict[str, Callable[..., Any]] = {
    "where": where,
    "setitem": setitem,
    "copy": lambda input, other, non_blocking=False: setitem(input, ..., other),
    "pad": pad,
    "tril": triangle("tril"),
    "triu": triangle("triu"),
    **{name: moved(name) for name in ("gather", "take_along_dim", "repeat_interleave")},
    "unfold": unfold,
    "view_as": lambda input, other: moved("reshape")(input, other.shape),
    "reshape_as": lambda input, other: moved("reshape")(input, other.shape),
    "type": same,
    **{name: _constants(name) for name in ("zeros_like", "ones_like", "full_like")},
    **{name: _constants(name) for name in ("new_zeros", "new_ones", "new_full", "new_tensor")},
    **dict.fromkeys(("new_empty", "empty_like"), _empty),
}
"""What putting entries elsewhere does to forms."""
