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

from lipaudit.wings.certificates.form import REARRANGEMENTS, Form, NoRuleError, Quotient
from lipaudit.wings.certificates.symbols import (
    DOUBLE,
    Sizes,
    gamma,
    join_blocks,
    move_stack,
    tiny,
    up,
)

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
    if within == "rows":
        x = x.by_row()
    elif within == "all":
        x = x.whole()
    symbols = x.symbols
    if bound is None:
        bound = op
    # The centre runs in float64 with the weights as stored; coefficients in their own dtype.
    exact = [weight.detach().to(DOUBLE) for weight in weights]
    centre = op(x.centre[None], *exact)[0]
    rounded = [weight.detach().to(symbols.dtype) for weight in weights]
    dense, blocks = x.map_rows(lambda t: op(t, *rounded))
    # |W| times what W sees of slack and rounding.
    sizes = [weight.abs() for weight in exact]
    uncertain = x.uncertain(roundings)
    slack = up(bound(uncertain[None], *sizes)[0], roundings)
    slack = slack + x.count * roundings * tiny(symbols.dtype)
    if constant is not None:
        constant = constant.detach().to(DOUBLE)
        # |W c| <= |W| |c| has had its rounding above, that of the sum is another one of each.
        size = constant.abs() + bound(x.centre.abs()[None], *sizes)[0]
        still = gamma(4, DOUBLE) * size
        slack = up(slack + still.nan_to_num(posinf=0.0))
        centre = centre + constant
    return Form(centre, dense, slack, symbols, blocks=blocks)


def same(x: Form, *targets: Any, **options: Any) -> Form:
    """The rule of casts to floating point: the real value does not change.

    Some casts copy and some do not, so a write to either form makes the other stale.
    """
    require_real(*targets, *options.values())
    return x.copy()


def require_real(*targets: Any) -> None:
    """Refuse casts to other types than floating point."""
    for target in targets:
        dtype = target.dtype if isinstance(target, Tensor) else target
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            continue
        if isinstance(dtype, torch.dtype | type) or "Tensor" in str(dtype):
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
        if not isinstance(y, Form):
            y = as_constant(y, x).to(DOUBLE)
        y = y * alpha
    if isinstance(x, Form) and isinstance(y, Form):
        return _add_forms(x, y)
    if isinstance(x, Form):
        form = x
        constant = as_constant(y, x)
    else:
        form = y
        constant = as_constant(x, y)
    constant = constant.to(DOUBLE)
    parts = form.waits
    if parts and shape_of(form.shape, constant.shape) == form.shape:
        return Form.from_quotient(replace(parts, constant=add(parts.constant, constant)))
    form = broadcast(form, constant.shape)
    centre = form.centre + constant
    rounded = centre.abs()
    if alpha != 1:  # the product with alpha was rounded, too
        rounded = rounded + constant.abs()
    loss = gamma(1, DOUBLE) * rounded
    slack = up(form.slack + loss.nan_to_num(posinf=0.0))
    total = Form(centre, form.dense, slack, form.symbols, blocks=form.blocks)
    total.sizes = form.sizes
    return total


def _add_forms(x: Form, y: Form) -> Form:
    x = broadcast(x, y.shape)
    y = broadcast(y, x.shape)
    align(x, y)
    centre = x.centre + y.centre
    slack = up(x.slack + y.slack)
    dense = stack_sum(x.dense, y.dense)
    blocks = join_blocks(x.blocks, y.blocks, torch.add)
    total = Form(centre, dense, slack, x.symbols, blocks=blocks)
    # The sum of each coefficient is rounded once: `uncertain` adds that to the slack.
    total.slack = total.uncertain(0)
    return total


def sub(x: Any, y: Any, *, alpha: float | int = 1) -> Form:
    """Return x - alpha y."""
    if isinstance(y, Form):
        return add(x, neg(y), alpha=alpha)
    # As floats: minus an unsigned whole number would wrap around.
    return add(x, -as_constant(y, x), alpha=alpha)


def stack_sum(x: Tensor, y: Tensor) -> Tensor:
    """Add two stacks, the shorter of which goes on with zeros."""
    if len(x) < len(y):
        x, y = y, x
    if not len(y):
        return x
    total = torch.empty_like(x)
    torch.add(x[: len(y)], y, out=total[: len(y)])
    total[len(y) :] = x[len(y) :]
    return total


def align(x: Form, y: Form) -> None:
    """Dissolve blocks of errors that both forms have but that cannot be added layer by layer."""
    x_blocks = {block.key: block for block in x.blocks}
    for block in y.blocks:
        shared = x_blocks.get(block.key)
        if shared is not None and not block.like(shared):
            x.whole()
            break
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
    if x.shape == shape:
        return x
    if x.centre.numel() < shape.numel():
        # One error acts on all copies: as slack each copy would have its own.
        x = x.settle()
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
        numerator = scale(parts.numerator, weight, roundings=roundings)
        constant = scale(parts.constant, weight, roundings=roundings)
        return Form.from_quotient(replace(parts, numerator=numerator, constant=constant))
    x = broadcast(x, weight.shape)
    return linear_map(x, torch.mul, weight, roundings=roundings + 1, within="entries")


def as_constant(value: Any, x: Form) -> Tensor:
    """Return numbers of a program as a tensor that holds them exactly."""
    if not isinstance(value, Tensor):
        return torch.as_tensor(value, dtype=DOUBLE, device=x.device)
    if value.is_complex():
        raise NoRuleError("complex numbers")
    if value.is_floating_point():
        return value.detach().to(x.device)
    return value.to(x.device, DOUBLE)


def linear(input: Form, weight: Tensor, bias: Tensor | None = None) -> Form:
    """Return weights times the last axis; a quotient stays postponed."""

    def op(t: Tensor, w: Tensor) -> Tensor:
        return t @ w.mT

    roundings = weight.shape[-1] + 1
    parts = input.waits
    # With one root per row weights act on the numerator alone.
    if parts is None or not is_row(parts.inverse) or not is_row(parts.square):
        x = input.settle()
        return linear_map(x, op, weight, roundings=roundings, constant=bias, within="rows")
    # One entry per row of the inverse suffices.
    inverse = cast("Form", parts.inverse[..., :1])
    square = cast("Form", parts.square[..., :1])
    x = parts.numerator.settle()
    constant = linear(parts.constant, weight, bias)
    numerator = linear_map(x, op, weight, roundings=roundings, within="rows")
    return Form.from_quotient(Quotient(numerator, inverse, square, constant))


def is_row(x: Form) -> bool:
    """Return whether the entries of a row are one number in memory."""
    if x.shape[-1] == 1:
        return True
    tensors = [x.centre, x.dense, x.slack]
    for block in x.blocks:
        tensors += [block.rows, block.group]
    return all(tensor.stride(-1) == 0 for tensor in tensors)


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
        if not isinstance(padding, str):
            padding = (0, as_pair(padding)[1])
        stride = (1, as_pair(stride)[1])
        dilation = (1, as_pair(dilation)[1])
        wide: Any = input.unsqueeze(-2)
        wide = convolve(wide, weight.unsqueeze(-2), bias, stride, padding, dilation, groups)
        return cast("Form", wide.squeeze(-2))
    gaps = as_pair(dilation)
    steps = as_pair(stride)
    x: Any = input
    if padding == "same":
        rows = gaps[0] * (weight.shape[-2] - 1)
        columns = gaps[1] * (weight.shape[-1] - 1)
        x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    if isinstance(padding, str):
        pads = (0, 0)
    else:
        pads = as_pair(padding)

    def op(t: Tensor, w: Tensor) -> Tensor:
        images = t.flatten(0, 1)
        if any(pads):
            images = F.pad(images, (pads[1], pads[1], pads[0], pads[0]))
        height, width = w.shape[-2:]
        windows = images.unfold(2, gaps[0] * (height - 1) + 1, steps[0])
        windows = windows.unfold(3, gaps[1] * (width - 1) + 1, steps[1])
        windows = windows[..., :: gaps[0], :: gaps[1]]
        windows = torch.unflatten(windows, 1, (groups, -1))
        kernels = torch.unflatten(w, 0, (groups, -1))
        out = torch.einsum("rgchwij,gocij->rgohw", windows, kernels)
        return torch.unflatten(out.flatten(1, 2), 0, t.shape[:2])

    constant = None
    if bias is not None:
        constant = bias.view(-1, 1, 1)
    roundings = weight[0].numel() + 1
    return linear_map(x.settle(), op, weight, roundings=roundings, constant=constant)


def as_pair(value: Any) -> tuple[int, int]:
    """Return an option of two axes as one number per axis."""
    if isinstance(value, int):
        return value, value
    return value[0], value[-1]


def read_axes(dim: Any, ndim: int) -> list[int]:
    """Return the axes that an option names, counted from the first: without any, all."""
    if isinstance(dim, int):
        return [dim % ndim]
    return [axis % ndim for axis in dim or range(ndim)]


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
    axes = read_axes(axis if dim is None else dim, input.ndim)
    count = torch.Size(input.shape[axis] for axis in axes).numel()
    behind = [axis + 1 for axis in axes]  # the rows of a stack come first

    def op(t: Tensor) -> Tensor:
        total = t
        if behind:
            total = t.sum(behind, keepdim=keepdim)
        if mean:
            return total / count
        return total

    return linear_map(input.settle(), op, roundings=count + 1)


def make_pooling(mean: Callable[..., Tensor], axes: int) -> Callable[..., Form]:
    """Return the rule of a function that averages over windows of the last axes."""

    def rule(input: Form, *args: Any, **kwargs: Any) -> Form:
        if input.ndim != axes + 2:
            raise NoRuleError("a mean over windows of one sample without a batch axis")

        def op(t: Tensor) -> Tensor:
            means = mean(t.flatten(0, 1), *args, **kwargs)
            return torch.unflatten(means, 0, t.shape[:2])

        # A window has no more entries than the axes; its sum is divided once.
        terms = input.shape[-axes:].numel()
        return linear_map(input.settle(), op, roundings=terms + 2)

    return rule


def variance(
    input: Form, dim: Any = None, unbiased: bool = True, keepdim: bool = False, **options: Any
) -> Form:
    """Return the sum of squares around the mean, divided by n - correction."""
    if isinstance(dim, bool):  # x.var(unbiased) of all entries
        unbiased = dim
        dim = None
    correction = options.get("correction")
    if correction is None:
        correction = int(unbiased)
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
    if not isinstance(function, str):
        return lambda x, *args, **kwargs: rearrange(
            x.whole(), lambda t: function(t, *args, **kwargs)
        )
    method = getattr(Tensor, function)

    def rule(x: Form, *args: Any, **kwargs: Any) -> Any:
        parts = x.waits
        if parts is None:
            return rearrange(x, lambda t: method(t, *args, **kwargs))
        wide = [broadcast(part, x.shape) for part in vars(parts).values()]
        moved = [rule(part, *args, **kwargs) for part in wide]
        if isinstance(moved[0], Form):
            return Form.from_quotient(Quotient(*moved))
        return tuple(Form.from_quotient(Quotient(*each)) for each in zip(*moved, strict=True))

    return rule


def rearrange(x: Form, move: Callable[[Tensor], Any]) -> Any:
    """Return the form with rearranged entries, or a tuple where `move` has several results."""
    stacks = move_stack(move, x.dense)
    if isinstance(stacks, Tensor):
        (form,) = _rearrange(x, lambda t: (move(t),), (stacks,))
        return form
    return tuple(_rearrange(x, move, stacks))


def _rearrange(
    x: Form, move: Callable[[Tensor], Sequence[Tensor]], stacks: Sequence[Tensor]
) -> list[Form]:
    """Return a form for every stack; `move` has as many results."""
    centres = move(x.centre)
    slacks = move(x.slack)
    # Sizes move with the entries: taking them anew would cost a pass over all coefficients.
    linear = move(x.sizes.linear)
    quadratic = move(x.sizes.quadratic)
    errors = move(x.sizes.errors)
    ends = [move(end) for end in x.__dict__.get("quadratic_range", ())]
    blocks = [block.move(move) for block in x.blocks]
    forms = []
    for i, dense in enumerate(stacks):
        parts = [block[i] for block in blocks]
        form = Form(centres[i], dense, slacks[i], x.symbols, blocks=parts)
        form.sizes = Sizes(linear[i], quadratic[i], errors[i])
        if ends:
            form.quadratic_range = ends[0][i], ends[1][i]
        forms.append(form)
    return forms


def cat(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Concatenate forms and constants; an empty one counts as absent, as in torch."""
    tensors = [each for each in tensors if each.shape != (0,)]
    like = next(each for each in tensors if isinstance(each, Form))
    forms = []
    for each in tensors:
        forms.append(each if isinstance(each, Form) else lift(each, like))
    rows = max(len(form.generators) for form in forms)
    stacks = []
    for form in forms:
        missing = rows - len(form.generators)
        stacks.append(F.pad(form.generators, (*[0, 0] * form.ndim, 0, missing)))
    axis = dim % like.ndim
    centre = torch.cat([form.centre for form in forms], axis)
    slack = torch.cat([form.slack for form in forms], axis)
    return Form(centre, torch.cat(stacks, axis + 1), slack, like.symbols)


def stack(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Stack forms and constants along a new axis."""
    return cat([each.unsqueeze(dim) for each in tensors], dim)


def masked_fill(input: Form, mask: Tensor, value: Any) -> Form:
    """Put a constant into some entries."""
    mask = mask.bool()
    keep = ~mask
    input = broadcast(input, mask.shape)
    centre = input.centre.masked_fill(mask, float(value))
    dense, blocks = input.map_rows(lambda t: t * keep)
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
    if not isinstance(like, Form) or any(isinstance(each, Form) for each in constants):
        return constants
    return (lift(constants[0], like), *constants[1:])


def where(condition: Tensor, input: Any, other: Any) -> Form:
    """Return entries of one where the condition (a constant) holds, else of the other."""
    if isinstance(condition, Form):
        raise NoRuleError("where with a condition that depends on the input")
    condition = condition.bool()  # of uint8, too, as in old causal masks
    like = input if isinstance(input, Form) else other

    def select(value: Any, mask: Tensor) -> Any:
        """Return the value where the mask holds, else 0."""
        if isinstance(value, Form):
            return masked_fill(value, ~mask, 0.0)
        return torch.where(mask, as_constant(value, like), 0.0)

    return add(select(input, condition), select(other, ~condition))


def pad(input: Form, pad: Any, mode: str = "constant", value: float | int | None = None) -> Form:  # noqa: A002
    """Add entries at the ends of axes: constants, or copies."""
    pad = tuple(pad)
    if mode != "constant":
        return make_move(F.pad)(input, pad, mode)
    centre = F.pad(input.centre, pad, value=float(value or 0.0))
    generators = F.pad(input.generators, pad)
    return Form(centre, generators, F.pad(input.slack, pad), input.symbols)


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
