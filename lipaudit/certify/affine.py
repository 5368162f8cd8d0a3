"""Affine operations: the same operation on every row of coefficients, without its constant.

y = W x + b of x = c + g . e +- s is (W c + b) + (W g) . e +- |W| s, and all but s is computed with
rounding: `Form.uncertain` is what W sees of that, so that |W| times it is the slack of y.
Moving data about rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify.form import REARRANGEMENTS, Form, NoRuleError, Quotient
from lipaudit.certify.symbols import DOUBLE, Sizes, gamma, join_blocks, move_stack, tiny, up

Linear = Callable[..., Tensor]


def linear_map(
    x: Form,
    op: Linear,
    *weights: Tensor,
    roundings: int,
    constant: Tensor | None = None,
    bound: Linear | None = None,
    within: Literal["entries", "rows", "all"] = "all",
) -> Form:
    """Return op(x, *weights) + constant, op linear in both and with a leading axis for the rows.

    Args:
        x: the form; settled before, if the map mixes its entries.
        op: takes a stack (rows, *shape).
        weights: weights as stored, or with a number of roundings.
        roundings: roundings of an entry of the result: terms of its sum, and those of its weights.
        constant: constant to add, as stored.
        bound: op on absolute values, if that differs from op itself.
        within: the entries that op mixes: none, rows of the last axis, or all.
    """
    if within != "entries":
        x = x.by_row() if within == "rows" else x.whole()
    symbols, bound = x.symbols, bound or op
    # The centre runs in float64 with the weights as stored; coefficients in their own dtype.
    exact = [weight.detach().to(DOUBLE) for weight in weights]
    sizes = [weight.abs() for weight in exact]
    centre = op(x.centre[None], *exact)[0]
    rounded = [weight.detach().to(symbols.dtype) for weight in weights]
    dense, blocks = x.map_rows(lambda t: op(t, *rounded))
    slack = up(bound(x.uncertain(roundings)[None], *sizes)[0], roundings)
    slack = slack + x.count * roundings * tiny(symbols.dtype)
    if constant is not None:
        constant = constant.detach().to(DOUBLE)
        # |W c| <= |W| |c| has had its rounding above, that of the sum is another one of each.
        still = gamma(4, DOUBLE) * (constant.abs() + bound(x.centre.abs()[None], *sizes)[0])
        slack = up(slack + still.nan_to_num(posinf=0.0))
        centre = centre + constant
    return Form(centre, dense, slack, symbols, blocks=blocks)


def same(x: Form, *targets: Any, **named: Any) -> Form:
    """The rule of casts to floating point: the real value does not change.

    Some casts copy and some do not, so a write to either form makes the other stale.
    """
    require_real(*targets, *named.values())
    return x.copy()


def require_real(*targets: Any) -> None:
    """Refuse casts to other types than floating point."""
    for target in targets:
        dtype = target.dtype if isinstance(target, Tensor) else target
        real = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if not real and (isinstance(dtype, torch.dtype | type) or "Tensor" in str(dtype)):
            raise NoRuleError(f"a cast to {dtype}")


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return the input: dropout does nothing in eval mode."""
    if training and p > 0:
        raise NoRuleError("dropout that is on (call eval() first)")
    return x


def neg(x: Form) -> Form:
    """-x."""
    dense, blocks = x.map_rows(torch.neg)
    return Form(-x.centre, dense, x.slack, x.symbols, blocks=blocks)


def add(x: Any, y: Any, *, alpha: float | int = 1) -> Form:
    """Return x + alpha y: of two forms, or of a form and a constant."""
    if alpha != 1:
        y = y * alpha if isinstance(y, Form) else as_constant(y, x).to(DOUBLE) * alpha
    if isinstance(x, Form) and isinstance(y, Form):
        x, y = broadcast(x, y.shape), broadcast(y, x.shape)
        align(x, y)
        centre, slack = x.centre + y.centre, up(x.slack + y.slack)
        dense, blocks = stack_sum(x.dense, y.dense), join_blocks(x.blocks, y.blocks, torch.add)
        total = Form(centre, dense, slack, x.symbols, blocks=blocks)
        # The sum of each coefficient is rounded once: `uncertain` adds that to the slack.
        total.slack = total.uncertain(0)
        return total
    form, constant = (x, y) if isinstance(x, Form) else (y, x)
    constant = as_constant(constant, form).to(DOUBLE)
    parts = form.waits
    if parts and shape_of(form.shape, constant.shape) == form.shape:
        return Form.from_quotient(replace(parts, constant=add(parts.constant, constant)))
    form = broadcast(form, constant.shape)
    centre = form.centre + constant
    rounded = centre.abs() + (constant.abs() if alpha != 1 else 0)
    slack = up(form.slack + (gamma(1, DOUBLE) * rounded).nan_to_num(posinf=0.0))
    total = Form(centre, form.dense, slack, form.symbols, blocks=form.blocks)
    total.sizes = form.sizes
    return total


def sub(x: Any, y: Any, *, alpha: float | int = 1) -> Form:
    """Return x - alpha y."""
    # As floats: minus an unsigned whole number would wrap around.
    return add(x, neg(y) if isinstance(y, Form) else -as_constant(y, x), alpha=alpha)


def stack_sum(x: Tensor, y: Tensor) -> Tensor:
    """Add two stacks, the shorter of which goes on with zeros."""
    long, short = (x, y) if len(x) >= len(y) else (y, x)
    if not len(short):
        return long
    total = torch.empty_like(long)
    torch.add(long[: len(short)], short, out=total[: len(short)])
    total[len(short) :] = long[len(short) :]
    return total


def align(x: Form, y: Form) -> None:
    """Dissolve blocks of errors that both forms have but that cannot be added layer by layer."""
    known = {block.key: block for block in x.blocks}
    if any(b.key in known and not b.like(known[b.key]) for b in y.blocks):
        x.whole()
    for _ in range(2):  # dissolving one may remove a block of the other
        for form in (x, y):
            if any(block.key in form.symbols.dissolved for block in form.blocks):
                form.whole()


def shape_of(*shapes: Sequence[int]) -> torch.Size:
    """Return the broadcast shape; torch's own function loads a computer algebra system."""
    return torch.Size(np.broadcast_shapes(*(tuple(shape) for shape in shapes)))


def broadcast(x: Form, other: Sequence[int]) -> Form:
    """Return a form of the common shape; the slack of a repeated entry becomes a symbol."""
    shape = shape_of(x.shape, other)
    if tuple(x.shape) == tuple(shape):
        return x
    # One error acts on all copies: as slack each copy would have its own.
    x = x.settle() if x.centre.numel() < torch.Size(shape).numel() else x

    x.quadratic_range  # noqa: B018 - computed once, before it is repeated
    return cast("Form", rearrange(x, lambda t: t.expand(shape)))


def expand(x: Any, *shape: Any) -> Any:
    """Return the expanded form, like Tensor.expand."""
    if not isinstance(x, Form):
        return x.expand(*shape)
    return broadcast(x, torch.empty(()).expand(x.shape).expand(*shape).shape)


def scale(x: Form, weight: Any, *, roundings: int = 1) -> Form:
    """Return x times a constant, entry by entry."""
    weight = as_constant(weight, x)
    parts = x.waits
    if parts and shape_of(x.shape, weight.shape) == x.shape:
        numerator, constant = (
            scale(each, weight, roundings=roundings) for each in (parts.numerator, parts.constant)
        )
        return Form.from_quotient(replace(parts, numerator=numerator, constant=constant))
    x = broadcast(x, weight.shape)
    return linear_map(x, torch.mul, weight, roundings=roundings + 1, within="entries")


def as_constant(value: Any, x: Form) -> Tensor:
    """Return numbers of a program as a tensor that holds them exactly."""
    if isinstance(value, Tensor) and value.is_complex():
        raise NoRuleError("complex numbers")
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(x.device)
    return torch.as_tensor(value, dtype=DOUBLE, device=x.device)


def linear(input: Form, weight: Tensor, bias: Tensor | None = None) -> Form:
    """Return weights times the last axis; a quotient stays postponed."""

    def op(t: Tensor, w: Tensor) -> Tensor:
        return t @ w.mT

    roundings, parts = weight.shape[-1] + 1, input.waits
    # With one root per row weights act on the numerator alone.
    if parts is None or not (is_row(parts.inverse) and is_row(parts.square)):
        x = input.settle()
        return linear_map(x, op, weight, roundings=roundings, constant=bias, within="rows")
    # One entry per row of the inverse suffices.
    inverse, square = (cast("Form", each[..., :1]) for each in (parts.inverse, parts.square))
    x, constant = parts.numerator.settle(), linear(parts.constant, weight, bias)
    numerator = linear_map(x, op, weight, roundings=roundings, within="rows")
    return Form.from_quotient(Quotient(numerator, inverse, square, constant))


def is_row(x: Form) -> bool:
    """Return whether the entries of a row are one number in memory."""
    held = (x.centre, x.dense, x.slack, *(t for b in x.blocks for t in (b.rows, b.group)))
    return x.shape[-1] == 1 or all(each.stride(-1) == 0 for each in held)


def convolve(
    input: Form,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Form:
    """Return a convolution as a product with patches: the library's may round differently."""
    if input.ndim != weight.ndim:
        raise NoRuleError("a convolution without a batch axis")
    if weight.ndim == 3:  # over one axis: as one over two, the first of size one
        stride, dilation = ((1, as_pair(v)[1]) for v in (stride, dilation))
        padding = padding if isinstance(padding, str) else (0, as_pair(padding)[1])
        wide = cast("Form", input.unsqueeze(-2))
        wide = convolve(wide, weight.unsqueeze(-2), bias, stride, padding, dilation, groups)
        return cast("Form", wide.squeeze(-2))
    gaps, steps = as_pair(dilation), as_pair(stride)
    x: Any = input
    if isinstance(padding, str):
        room = [gap * (size - 1) for gap, size in zip(gaps, weight.shape[-2:], strict=True)]
        ends = [(r // 2, r - r // 2) if padding == "same" else (0, 0) for r in room]
        x, padding = F.pad(x, (*ends[1], *ends[0])), 0
    pads = as_pair(padding)

    def op(t: Tensor, w: Tensor) -> Tensor:
        windows = t.flatten(0, 1)
        if any(pads):
            windows = F.pad(windows, (pads[1], pads[1], pads[0], pads[0]))
        for axis in (0, 1):
            windows = windows.unfold(
                axis + 2, gaps[axis] * (w.shape[axis - 2] - 1) + 1, steps[axis]
            )
        windows = torch.unflatten(windows[..., :: gaps[0], :: gaps[1]], 1, (groups, -1))
        kernels = torch.unflatten(w, 0, (groups, -1))
        out = torch.einsum("rgchwij,gocij->rgohw", windows, kernels)
        return torch.unflatten(out.flatten(1, 2), 0, t.shape[:2])

    constant = None if bias is None else bias.view(-1, 1, 1)
    terms = weight[0].numel()
    return linear_map(x.settle(), op, weight, roundings=terms + 1, constant=constant)


def as_pair(value: Any) -> tuple[int, int]:
    """Return an option of two axes as one number per axis."""
    values = (value, value) if isinstance(value, int) else (*value, *value)
    return values[0], values[1]


def reduce_axes(
    input: Form,
    dim: Any = None,
    keepdim: bool = False,
    *,
    axis: Any = None,
    dtype: Any = None,
    mean: bool = False,
) -> Form:
    """Return the sum or the mean over axes; numpy's name of axes works, too."""
    require_real(dtype)
    dim = axis if dim is None else dim
    axes = [dim] if isinstance(dim, int) else dim or range(input.ndim)  # no axes are all of them
    axes = [axis % input.ndim for axis in axes]
    count = torch.Size(input.shape[axis] for axis in axes).numel()
    behind = [axis + 1 for axis in axes]

    def op(t: Tensor) -> Tensor:
        total = t.sum(behind, keepdim=keepdim) if behind else t
        return total / count if mean else total

    return linear_map(input.settle(), op, roundings=count + 1)


def make_pooling(mean: Callable[..., Tensor], axes: int) -> Callable[..., Form]:
    """Return the rule of a function that averages over windows of the last axes."""

    def rule(input: Form, *args: Any, **kwargs: Any) -> Form:
        if input.ndim != axes + 2:
            raise NoRuleError("a mean over windows of one sample without a batch axis")

        def op(t: Tensor) -> Tensor:
            return torch.unflatten(mean(t.flatten(0, 1), *args, **kwargs), 0, t.shape[:2])

        # A window has no more entries than the axes; its sum is divided once.
        terms = input.shape[-axes:].numel()
        return linear_map(input.settle(), op, roundings=terms + 2)

    return rule


def variance(
    input: Form, dim: Any = None, unbiased: bool = True, keepdim: bool = False, **options: Any
) -> Form:
    """Return the sum of squares around the mean, divided by n - correction."""
    if isinstance(dim, bool):  # x.var(unbiased) of all entries
        dim, unbiased = None, dim
    correction = options.get("correction")
    correction = int(unbiased) if correction is None else correction
    centred: Any = input - reduce_axes(input, dim, True, mean=True)
    total = reduce_axes(centred.square(), dim, keepdim)
    freedom = input.numel() // total.numel() - correction
    if freedom <= 0:  # torch divides by zero
        raise NoRuleError("a variance that is not a number: n <= correction")
    return scale(total, 1 / freedom, roundings=2)


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
        return rearrange(x, move)

    return rule


def rearrange(x: Form, move: Callable[[Tensor], Any]) -> Any:
    """Return the form with rearranged entries, or a tuple where `move` has several results."""
    dense, blocks = move_stack(move, x.dense), [block.move(move) for block in x.blocks]
    # Sizes move with the entries: taking them anew would cost a pass over all coefficients.
    known = (x.centre, x.slack, *vars(x.sizes).values(), *x.__dict__.get("quadratic_range", ()))
    parts = (dense, *(move(each) for each in known))
    forms = []
    for i, part in enumerate([parts] if isinstance(dense, Tensor) else zip(*parts, strict=True)):
        rows, centre, slack, *sizes = part
        form = Form(centre, rows, slack, x.symbols, blocks=[block[i] for block in blocks])
        form.sizes = Sizes(*sizes[:3])
        if sizes[3:]:
            form.quadratic_range = sizes[3], sizes[4]
        forms.append(form)
    return forms[0] if isinstance(dense, Tensor) else tuple(forms)


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
    condition = condition.bool()  # of uint8, too, as in old causal masks
    like = input if isinstance(input, Form) else other

    def keep(value: Any, mask: Tensor) -> Any:
        if isinstance(value, Form):
            return masked_fill(value, ~mask, 0.0)
        return torch.where(mask, as_constant(value, like), 0.0)

    return add(keep(input, condition), keep(other, ~condition))


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
