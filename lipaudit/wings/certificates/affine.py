"""Affine operations: the same operation on every row of coefficients, without its constant.

y = W x + b of x = c + g . e +- s is (W c + b) + (W g) . e +- |W| s, and all but s is computed with
rounding: `Form.bound_input_error` is what W sees of that, so that |W| times it is the slack of y.
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
    PartRadii,
    gamma,
    join_blocks,
    move_stack,
    round_up,
    tiny,
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
    """Return op(x, *weights) + constant; op is linear in x and in the weights.

    y = W x + b of x = c + sum g_i e_i +- s is (W c + b) + sum (W g_i) e_i +- |W| s.

    Args:
        x: the form; its slack is in symbols already if the map mixes its entries.
        op: takes a stack (symbols, *shape).
        weights: weights as stored, or with a number of roundings.
        roundings: roundings of an entry of the result: terms of its sum, and those of its weights.
        constant: constant to add, as stored.
        bound: op with |W| in place of W, if weights do not hold the signs.
        within: the entries that op mixes: none, rows of the last axis, or all.
    """
    if within == "rows":
        x = x.split_by_row()
    elif within == "all":
        x = x.make_dense()
    symbols = x.symbols
    if bound is None:
        bound = op
    # W c, in float64 with the weights as stored.
    exact = [weight.detach().to(DOUBLE) for weight in weights]
    centre = op(x.centre[None], *exact)[0]
    # W g_i, in the dtype of the coefficients.
    rounded = [weight.detach().to(symbols.dtype) for weight in weights]
    dense, blocks = x.map_coefficients(lambda t: op(t, *rounded))
    # |W| s, where s also covers the rounding of W c and W g_i.
    sizes = [weight.abs() for weight in exact]
    error = x.bound_input_error(roundings)
    slack = round_up(bound(error[None], *sizes)[0], roundings)
    slack = slack + x.count * roundings * tiny(symbols.dtype)
    if constant is not None:
        constant = constant.detach().to(DOUBLE)
        # s covers the rounding of W c, but not that of W c + b.
        size = constant.abs() + bound(x.centre.abs()[None], *sizes)[0]
        rounding = gamma(4, DOUBLE) * size
        slack = round_up(slack + rounding.nan_to_num(posinf=0.0))
        centre = centre + constant
    return Form(centre, dense, slack, symbols, blocks=blocks)


def same(x: Form, *targets: Any, **options: Any) -> Form:
    """Return a copy for a cast to floating point: the real value does not change.

    Some casts copy and some do not, so a write to either form makes the other stale.
    """
    require_real(*targets, *options.values())
    return x.copy()


def require_real(*targets: Any) -> None:
    """Refuse casts to other types than floating point; targets are arguments of a cast."""
    for target in targets:
        dtype = target.dtype if isinstance(target, Tensor) else target
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            continue
        # Also bool, int and "torch.LongTensor"; other arguments, such as a device, are no types.
        if isinstance(dtype, torch.dtype | type) or "Tensor" in str(dtype):
            raise NoRuleError(f"a cast to {dtype}")


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return the input: dropout does nothing in eval mode."""
    if training and p > 0:
        raise NoRuleError("dropout that is on (call eval() first)")
    return x


def neg(x: Form) -> Form:
    """-x."""
    dense, blocks = x.map_coefficients(torch.neg)
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
    quotient = form.pending_quotient
    if quotient and broadcast_shapes(form.shape, constant.shape) == form.shape:
        total = add(quotient.constant, constant)
        return Form.from_quotient(replace(quotient, constant=total))
    form = broadcast(form, constant.shape)
    centre = form.centre + constant
    size = centre.abs()
    if alpha != 1:  # the product with alpha was rounded, too
        size = size + constant.abs()
    rounding = gamma(1, DOUBLE) * size
    slack = round_up(form.slack + rounding.nan_to_num(posinf=0.0))
    result = Form(centre, form.dense, slack, form.symbols, blocks=form.blocks)
    result.radii = form.radii
    return result


def _add_forms(x: Form, y: Form) -> Form:
    """Return x + y: coefficients of the same symbol add up, slack adds in absolute value."""
    x = broadcast(x, y.shape)
    y = broadcast(y, x.shape)
    align_blocks(x, y)
    centre = x.centre + y.centre
    slack = round_up(x.slack + y.slack)
    dense = add_stacks(x.dense, y.dense)
    blocks = join_blocks(x.blocks, y.blocks, torch.add)
    total = Form(centre, dense, slack, x.symbols, blocks=blocks)
    # The sums of centres and of coefficients are rounded once.
    total.slack = total.bound_input_error(0)
    return total


def sub(x: Any, y: Any, *, alpha: float | int = 1) -> Form:
    """Return x - alpha y."""
    if isinstance(y, Form):
        return add(x, neg(y), alpha=alpha)
    # As floats: minus an unsigned whole number would wrap around.
    return add(x, -as_constant(y, x), alpha=alpha)


def add_stacks(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of two stacks (symbols, *shape); missing rows of the shorter one are zero."""
    if len(x) < len(y):
        x, y = y, x
    if not len(y):
        return x
    total = torch.empty_like(x)
    torch.add(x[: len(y)], y, out=total[: len(y)])
    total[len(y) :] = x[len(y) :]
    return total


def align_blocks(x: Form, y: Form) -> None:
    """Store the errors that both forms have alike, in place: in equal layers, or dense.

    Only then can coefficients of the same symbol be added.
    """
    x_blocks = {block.key: block for block in x.blocks}
    for block in y.blocks:
        shared = x_blocks.get(block.key)
        if shared is not None and not block.has_layers_of(shared):
            x.make_dense()
            break
    # A block of one form that is dense in the other. Making one form dense may add to the errors
    # that are dense: hence twice.
    for _ in range(2):
        for form in (x, y):
            if any(block.key in form.symbols.dense_keys for block in form.blocks):
                form.make_dense()


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """Return the broadcast shape; torch's own function loads a computer algebra system."""
    return torch.Size(np.broadcast_shapes(*(tuple(shape) for shape in shapes)))


def broadcast(x: Form, other: Sequence[int]) -> Form:
    """Return the form in the common shape; slack of repeated entries becomes symbols."""
    shape = broadcast_shapes(x.shape, other)
    if x.shape == shape:
        return x
    if x.centre.numel() < shape.numel():
        # One error acts on all copies: as slack each copy would have its own.
        x = x.symbolize_slack()
    x.quadratic_range  # noqa: B018 - computed and cached once, before it is repeated
    return cast("Form", rearrange(x, lambda t: t.expand(shape)))


def expand(x: Any, *shape: Any) -> Any:
    """Return the expanded form, like Tensor.expand."""
    if not isinstance(x, Form):
        return x.expand(*shape)
    # torch finds the new shape (-1 keeps a size) on a tensor without memory.
    expanded = torch.empty(()).expand(x.shape).expand(*shape)
    return broadcast(x, expanded.shape)


def scale(x: Form, weight: Any, *, roundings: int = 1) -> Form:
    """Return x times a constant, entry by entry; `roundings` is how often weights were rounded."""
    weight = as_constant(weight, x)
    quotient = x.pending_quotient
    if quotient and broadcast_shapes(x.shape, weight.shape) == x.shape:
        numerator = scale(quotient.numerator, weight, roundings=roundings)
        constant = scale(quotient.constant, weight, roundings=roundings)
        return Form.from_quotient(replace(quotient, numerator=numerator, constant=constant))
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
    """Return weights times the last axis plus bias; a pending quotient stays pending."""

    def op(t: Tensor, w: Tensor) -> Tensor:
        return t @ w.mT

    roundings = weight.shape[-1] + 1
    quotient = input.pending_quotient
    # With one root per row weights act on the numerator alone: W (n / root) = (W n) / root.
    if quotient is None or not is_row(quotient.inverse) or not is_row(quotient.square):
        x = input.symbolize_slack()
        return linear_map(x, op, weight, roundings=roundings, constant=bias, within="rows")
    # One entry per row of the inverse suffices.
    inverse = cast("Form", quotient.inverse[..., :1])
    square = cast("Form", quotient.square[..., :1])
    x = quotient.numerator.symbolize_slack()
    constant = linear(quotient.constant, weight, bias)
    numerator = linear_map(x, op, weight, roundings=roundings, within="rows")
    return Form.from_quotient(Quotient(numerator, inverse, square, constant))


def is_row(x: Form) -> bool:
    """Return whether each row of the last axis is one number that is repeated without memory."""
    if x.shape[-1] == 1:
        return True
    tensors = [x.centre, x.dense, x.slack]
    for block in x.blocks:
        tensors += [block.coefficients, block.group]
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
    """Return a convolution over one or two axes, with options as in torch."""
    if input.ndim != weight.ndim:
        raise NoRuleError("a convolution without a batch axis")
    if weight.ndim == 3:  # over one axis: as one over two, the first of size one
        if not isinstance(padding, str):
            padding = (0, as_pair(padding)[1])
        stride = (1, as_pair(stride)[1])
        dilation = (1, as_pair(dilation)[1])
        image: Any = input.unsqueeze(-2)
        result = convolve(image, weight.unsqueeze(-2), bias, stride, padding, dilation, groups)
        return cast("Form", result.squeeze(-2))
    dilations = as_pair(dilation)
    pads = (0, 0)
    x: Any = input
    if padding == "same":
        rows = dilations[0] * (weight.shape[-2] - 1)
        columns = dilations[1] * (weight.shape[-1] - 1)
        x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    elif not isinstance(padding, str):
        pads = as_pair(padding)

    def convolve_stack(stack: Tensor, w: Tensor) -> Tensor:
        """Convolve every image of a stack (symbols, batch, channels, height, width)."""
        images = stack.flatten(0, 1)
        if any(pads):
            images = F.pad(images, (pads[1], pads[1], pads[0], pads[0]))
        out = _multiply_patches(images, w, as_pair(stride), dilations, groups)
        return torch.unflatten(out, 0, stack.shape[:2])

    constant = None
    if bias is not None:
        constant = bias.view(-1, 1, 1)
    x = x.symbolize_slack()
    roundings = weight[0].numel() + 1
    return linear_map(x, convolve_stack, weight, roundings=roundings, constant=constant)


def _multiply_patches(
    images: Tensor, w: Tensor, strides: tuple[int, int], dilations: tuple[int, int], groups: int
) -> Tensor:
    """Return a convolution as products of patches and kernels.

    One sum of products for each entry: the library's own algorithms may round differently.
    """
    height, width = w.shape[-2:]
    patches = images.unfold(2, dilations[0] * (height - 1) + 1, strides[0])
    patches = patches.unfold(3, dilations[1] * (width - 1) + 1, strides[1])
    patches = patches[..., :: dilations[0], :: dilations[1]]
    patches = torch.unflatten(patches, 1, (groups, -1))
    kernels = torch.unflatten(w, 0, (groups, -1))
    # r images, g groups, c input and o output channels, h x w places, i x j entries of a kernel.
    out = torch.einsum("rgchwij,gocij->rgohw", patches, kernels)
    return out.flatten(1, 2)


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
    """Return the sum or the mean over axes; numpy's name `axis` works, too."""
    require_real(dtype)
    axes = read_axes(axis if dim is None else dim, input.ndim)
    count = torch.Size(input.shape[axis] for axis in axes).numel()

    def reduce_stack(stack: Tensor) -> Tensor:
        """Sum or average over the axes of a stack (symbols, *shape)."""
        total = stack
        if axes:
            total = stack.sum([axis + 1 for axis in axes], keepdim=keepdim)
        if mean:
            return total / count
        return total

    return linear_map(input.symbolize_slack(), reduce_stack, roundings=count + 1)


def make_pooling(average: Callable[..., Tensor], axes: int) -> Callable[..., Form]:
    """Return the rule of a function that averages over windows of the last `axes` axes."""

    def pool(input: Form, *args: Any, **kwargs: Any) -> Form:
        """Average over windows of a form; arguments as in torch."""
        if input.ndim != axes + 2:
            raise NoRuleError("a mean over windows of one sample without a batch axis")

        def pool_stack(stack: Tensor) -> Tensor:
            """Average a stack (symbols, batch, channels, ...); symbols count as batch."""
            means = average(stack.flatten(0, 1), *args, **kwargs)
            return torch.unflatten(means, 0, stack.shape[:2])

        # A window has no more entries than the axes; its sum is divided once.
        terms = input.shape[-axes:].numel()
        return linear_map(input.symbolize_slack(), pool_stack, roundings=terms + 2)

    return pool


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


def make_rearrangement(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of a function of tensors, or of a method by name, that moves entries.

    The function may also repeat entries and add zeros.
    """
    if not isinstance(function, str):
        return lambda x, *args, **kwargs: rearrange(
            x.make_dense(), lambda t: function(t, *args, **kwargs)
        )
    method = getattr(Tensor, function)

    def move(x: Form, *args: Any, **kwargs: Any) -> Any:
        """Apply the method to a form; to the four parts of a pending quotient, which stays so."""
        quotient = x.pending_quotient
        if quotient is None:
            return rearrange(x, lambda t: method(t, *args, **kwargs))
        moved = []
        for part in vars(quotient).values():
            moved.append(move(broadcast(part, x.shape), *args, **kwargs))
        if isinstance(moved[0], Form):
            return Form.from_quotient(Quotient(*moved))
        # The method has several results, such as those of chunk.
        results = zip(*moved, strict=True)
        return tuple(Form.from_quotient(Quotient(*parts)) for parts in results)

    return move


def rearrange(x: Form, move: Callable[[Tensor], Any]) -> Any:
    """Return the form with rearranged entries, or a tuple where `move` has several results."""
    stacks = move_stack(move, x.dense)
    if isinstance(stacks, Tensor):
        (form,) = _rearrange_all(x, lambda t: (move(t),), (stacks,))
        return form
    return tuple(_rearrange_all(x, move, stacks))


def _rearrange_all(
    x: Form, move: Callable[[Tensor], Sequence[Tensor]], stacks: Sequence[Tensor]
) -> list[Form]:
    """Return a form for each result of `move`; `stacks` are its results on the coefficients."""
    centres = move(x.centre)
    slacks = move(x.slack)
    # Cached radii and ranges move with the entries: computing them anew takes all coefficients.
    linear = move(x.radii.linear)
    quadratic = move(x.radii.quadratic)
    errors = move(x.radii.errors)
    range_ends = [move(end) for end in x.__dict__.get("quadratic_range", ())]
    blocks = [block.rearrange(move) for block in x.blocks]
    forms = []
    for i, dense in enumerate(stacks):
        form_blocks = [block[i] for block in blocks]
        form = Form(centres[i], dense, slacks[i], x.symbols, blocks=form_blocks)
        form.radii = PartRadii(linear[i], quadratic[i], errors[i])
        if range_ends:
            low, high = range_ends
            form.quadratic_range = low[i], high[i]
        forms.append(form)
    return forms


def cat(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Concatenate forms and constants; an empty one counts as absent, as in torch."""
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)]
    first_form = next(tensor for tensor in tensors if isinstance(tensor, Form))
    forms = []
    for tensor in tensors:
        if not isinstance(tensor, Form):
            tensor = lift(tensor, first_form)
        forms.append(tensor)
    rows = max(len(form.generators) for form in forms)
    stacks = []
    for form in forms:
        # Zeros for symbols that are younger than the form.
        missing = rows - len(form.generators)
        stacks.append(F.pad(form.generators, (*[0, 0] * form.ndim, 0, missing)))
    axis = dim % first_form.ndim
    centre = torch.cat([form.centre for form in forms], axis)
    slack = torch.cat([form.slack for form in forms], axis)
    return Form(centre, torch.cat(stacks, axis + 1), slack, first_form.symbols)


def stack(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Stack forms and constants along a new axis."""
    return cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def masked_fill(input: Form, mask: Tensor, value: Any) -> Form:
    """Put a constant into the entries where a mask holds: no symbol or slack moves them."""
    mask = mask.bool()
    unchanged = ~mask
    input = broadcast(input, mask.shape)
    centre = input.centre.masked_fill(mask, float(value))
    dense, blocks = input.map_coefficients(lambda t: t * unchanged)
    return Form(centre, dense, input.slack * unchanged, input.symbols, blocks=blocks)


MOVES = (*REARRANGEMENTS, "index_select", "roll", "flip", "repeat")
"""Tensor methods that rearrange entries."""


def lift(value: Any, like: Form) -> Form:
    """Return a constant as a form of the same symbols as `like`, with coefficients of zero."""
    centre = as_constant(value, like).to(DOUBLE)
    rows = like.dense.new_zeros(like.symbols.first_error, *centre.shape)
    return Form(centre, rows, torch.zeros_like(centre), like.symbols)


def lift_first(like: Any, *constants: Any) -> tuple[Any, ...]:
    """Return constants that are multiplied with each other, the first as a form.

    Their product then has slack for its rounding. If one of them is a form, they are returned as
    they are.
    """
    if not isinstance(like, Form) or any(isinstance(value, Form) for value in constants):
        return constants
    return (lift(constants[0], like), *constants[1:])


def where(condition: Tensor, input: Any, other: Any) -> Form:
    """Return entries of `input` where the condition (a constant) holds, else of `other`."""
    if isinstance(condition, Form):
        raise NoRuleError("where with a condition that depends on the input")
    condition = condition.bool()  # of uint8, too, as in old causal masks
    form = input if isinstance(input, Form) else other

    def zero_outside(value: Any, mask: Tensor) -> Any:
        if isinstance(value, Form):
            return masked_fill(value, ~mask, 0.0)
        return torch.where(mask, as_constant(value, form), 0.0)

    return add(zero_outside(input, condition), zero_outside(other, ~condition))


def pad(input: Form, pad: Any, mode: str = "constant", value: float | int | None = None) -> Form:  # noqa: A002
    """Add entries at the ends of axes: constants, or copies."""
    pad = tuple(pad)
    if mode != "constant":
        return make_rearrangement(F.pad)(input, pad, mode)
    centre = F.pad(input.centre, pad, value=float(value or 0.0))
    generators = F.pad(input.generators, pad)
    return Form(centre, generators, F.pad(input.slack, pad), input.symbols)


def unfold(input: Form, *args: Any, **kwargs: Any) -> Form:
    """Return patches as columns (F.unfold, called by keyword), or windows of an axis."""
    rule = make_rearrangement(F.unfold if "stride" in kwargs else "unfold")
    return rule(input, *args, **kwargs)


def make_constant(name: str) -> Callable[..., Tensor]:
    """Return the rule of a function, such as zeros_like, that creates a constant tensor."""

    def create(input: Form, *args: Any, **kwargs: Any) -> Tensor:
        """Call torch's function with a plain tensor of the form's shape, dtype and device."""
        like = torch.empty(1, dtype=input.dtype, device=input.device).expand(input.shape)
        function = getattr(torch, name, None) or getattr(Tensor, name)
        return function(like, *args, **kwargs)

    return create
