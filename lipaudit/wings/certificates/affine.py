"""Affine operations: the same operation on every row of coefficients, without its constant.

y = W x + b of x = c + g . e +- s is (W c + b) + (W g) . e +- |W| s, and all but s is computed with
rounding: `Form.bound_input_error` is what W sees of that, so that |W| times it is the slack of y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates.error_blocks import join_blocks
from lipaudit.wings.certificates.form import Form, NoRuleError, Quotient
from lipaudit.wings.certificates.rearrangements import (
    as_constant,
    broadcast,
    broadcast_shapes,
    masked_fill,
)
from lipaudit.wings.certificates.rounding import DOUBLE, bound_rounding, round_up, tiny

Linear = Callable[..., Tensor]


def linear_map(
    x: Form,
    op: Linear,
    *weights: Tensor,
    roundings: int,
    constant: Tensor | None = None,
    absolute_op: Linear | None = None,
    mixes: Literal["nothing", "rows", "all"] = "all",
) -> Form:
    """Return the form op(x, *weights) + constant; op is linear in x and in the weights.

    A form is x = c + sum g_i e_i +- s, with centre c, coefficients g_i of the symbols e_i, and
    slack s, the radius of a further error. Then W x + b = (W c + b) + sum (W g_i) e_i +- |W| s.

    Args:
        x: the form. If the map mixes entries, call `symbolize_slack` before: bounds are tighter.
        op: takes a stack (symbols, *shape) and the weights.
        weights: the weights; they may have been rounded before.
        roundings: number of roundings of an entry of the result: the terms of its sum, plus the
            roundings of a weight.
        constant: constant to add, as stored.
        absolute_op: op with |W| in place of W. The default is op with |weights|, which is correct
            unless op itself has a minus sign, such as t - mean(t).
        mixes: which entries of x one entry of the result depends on: "nothing" for the same entry
            alone, "rows" for entries of the same row of the last axis, or "all".
    """
    # Blocks store error coefficients sparsely. op may only mix entries with the same symbols.
    if mixes == "rows":
        x = x.split_by_row()
    elif mixes == "all":
        x = x.make_dense()
    symbols = x.symbols
    if absolute_op is None:
        absolute_op = op
    # W c, in float64 with the weights as stored. For `op` the centre is a stack of one row.
    exact = [weight.detach().to(DOUBLE) for weight in weights]
    centre = op(x.centre[None], *exact)[0]
    # W g_i, in the dtype of the coefficients.
    rounded = [weight.detach().to(symbols.dtype) for weight in weights]
    dense, blocks = x.map_coefficients(lambda t: op(t, *rounded))
    # The slack of the result bounds four errors. First, |W| times `error`: the slack of x, and
    # the rounding of W c and W g_i, which is a share of |W| |x|. Second, the rounding of this
    # product itself (`round_up`).
    sizes = [weight.abs() for weight in exact]
    error = x.bound_input_error(roundings)
    slack = round_up(absolute_op(error[None], *sizes)[0], roundings=roundings)
    # Third, underflow: of each product of a weight and a coefficient, and of the cast of a weight,
    # which is then multiplied by coefficients.
    underflow = tiny(symbols.dtype) * (x.symbol_count + x.symbol_radius.sum())
    slack = slack + roundings * underflow
    if constant is not None:
        constant = constant.detach().to(DOUBLE)
        # Fourth, the sum W c + b: one rounding (4 leaves room). An infinite constant (a mask) is
        # added exactly.
        size = constant.abs() + absolute_op(x.centre.abs()[None], *sizes)[0]
        rounding = bound_rounding(4, DOUBLE) * size
        slack = round_up(slack + rounding.nan_to_num(posinf=0.0))
        centre = centre + constant
    return Form(centre, dense, slack, symbols, blocks=blocks)


def cast_form(x: Tensor, *targets: Any, **options: Any) -> Tensor:
    """Return the result of a cast of a form, such as x.float(): the same real numbers.

    A cast of torch copies, or returns the same memory. `Form` counts all casts as views of the
    same memory: after a write to one of the two forms, the use of the other is refused.
    """
    require_floating_point(*targets, *options.values())
    if not isinstance(x, Form):
        # A constant, as in constant.type_as(form). Its dtype decides what is computed with it
        # later: sums of uint8 wrap around.
        return x.to(targets[0].dtype)
    return x.copy()


def require_floating_point(*targets: Any) -> None:
    """Raise `NoRuleError` unless a cast is to a floating-point dtype of torch.

    So x.to(torch.half) passes, and x.to(torch.long) raises. A type of Python raises as well, even
    `float`, and so does the name of a class of tensors. Arguments that are no types are ignored.

    Args:
        targets: the arguments of the cast, such as a dtype, a tensor of this dtype, or a device.
    """
    for target in targets:
        dtype = target.dtype if isinstance(target, Tensor) else target
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            continue
        # Any other type: torch.long, bool, float, or "torch.LongTensor".
        if isinstance(dtype, torch.dtype | type) or "Tensor" in str(dtype):
            raise NoRuleError(f"a cast to {dtype}")


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return the input: dropout does nothing in eval mode."""
    if training and p > 0:
        raise NoRuleError("dropout that is on (call eval() first)")
    return x


def neg(x: Form) -> Form:
    """Return the form of -x."""
    dense, blocks = x.map_coefficients(torch.neg)
    return Form(-x.centre, dense, x.slack, x.symbols, blocks=blocks)


def add(x: Any, y: Any, *, alpha: float | int = 1) -> Form:
    """Return the form of x + alpha y, where one or both of x and y are forms.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1].
    """
    if alpha != 1:
        if not isinstance(y, Form):
            y = as_constant(y, x).to(DOUBLE)
        y = y * alpha
    if not isinstance(y, Form):
        return _add_constant(x, y, is_rounded=alpha != 1)
    if not isinstance(x, Form):
        return _add_constant(y, x)
    return _add_forms(x, y)


def _add_constant(form: Form, value: Any, *, is_rounded: bool = False) -> Form:
    """Return the form of x + value, where x is a form: centre + coefficients . symbols +- slack.

    The constant is added to the centre, and the slack covers the rounding of this sum. If the
    constant is the rounded product of two numbers (`is_rounded`), the slack covers that, too.
    """
    constant = as_constant(value, form).to(DOUBLE)
    # A normalisation that is not multiplied out yet, numerator / root + constant, stays so, unless
    # the constant has more axes or entries than the form.
    quotient = form.pending_quotient
    if quotient and broadcast_shapes(form.shape, constant.shape) == form.shape:
        total = _add_constant(quotient.constant, constant, is_rounded=is_rounded)
        return Form.from_quotient(replace(quotient, constant=total))
    form = broadcast(form, constant.shape)
    centre = form.centre + constant
    size = centre.abs()
    if is_rounded:
        size = size + constant.abs()
    rounding = bound_rounding(1, DOUBLE) * size
    slack = round_up(form.slack + rounding.nan_to_num(posinf=0.0))  # a mask of -inf is exact
    return form.with_bounds(centre, slack)


def _add_forms(x: Form, y: Form) -> Form:
    """Return the sum of two forms: centres, coefficients of the same symbol, and slacks are added.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1].
    """
    x = broadcast(x, y.shape)
    y = broadcast(y, x.shape)
    align_blocks(x, y)
    dense = add_stacks(x.dense, y.dense)
    blocks = join_blocks(x.blocks, y.blocks, torch.add)
    slack = round_up(x.slack + y.slack)
    total = Form(x.centre + y.centre, dense, slack, x.symbols, blocks=blocks)
    # The sums of centres and coefficients were rounded once, which `bound_input_error` includes:
    # 0 further roundings.
    total.slack = total.bound_input_error(roundings=0)
    return total


def sub(x: Any, y: Any, *, alpha: float | int = 1) -> Form:
    """Return the form of x - alpha y, where one or both of x and y are forms."""
    if isinstance(y, Form):
        return add(x, neg(y), alpha=alpha)
    # `as_constant` makes y a float: the negative of an unsigned integer would wrap around.
    return add(x, -as_constant(y, x), alpha=alpha)


def add_stacks(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of two stacks of coefficients, (symbols, *shape) each.

    A form has no rows for symbols that were created later: missing rows count as zero.
    """
    if len(x) < len(y):
        x, y = y, x  # x is the longer stack
    if not len(y):
        return x
    total = torch.empty_like(x)
    torch.add(x[: len(y)], y, out=total[: len(y)])
    total[len(y) :] = x[len(y) :]
    return total


def align_blocks(x: Form, y: Form) -> None:
    """Prepare two forms for a sum: store the errors of both in the same way, in place.

    A form stores the coefficients of an error dense, in a row of its stack, or sparse, in a block
    (layers of coefficients; blocks of the same errors have the same key). Coefficients of an error
    can be added if both are dense, or both are in blocks with equal layers. Otherwise they become
    dense in both forms. An example is x + f(x): both terms have the errors of x, and f may have
    changed how they are stored.
    """
    x_blocks = {block.key: block for block in x.blocks}
    for block in y.blocks:
        shared = x_blocks.get(block.key)
        if shared is not None and not block.has_layers_of(shared):
            x.make_dense()  # the loop below then makes y dense: the key is in `dense_keys`
            break
    # `dense_keys` has the key of every block that became dense in some form: forms with this block
    # must follow. `make_dense` makes all blocks of a form dense, and adds their keys: so one form
    # may make the other one follow. Example: x has block A, y has A and B, and B was dense before.
    # In the first round x stays, and y becomes dense; in the second round x follows because of A.
    for _ in range(2):
        for form in (x, y):
            if any(block.key in form.symbols.dense_keys for block in form.blocks):
                form.make_dense()


def scale(x: Form, weight: Any, *, roundings: int = 1) -> Form:
    """Return a form times a constant, entry by entry.

    Args:
        x: a form, centre + coefficients . symbols +- slack.
        weight: the constant.
        roundings: number of roundings of the constant: one for the cast to the dtype of the
            coefficients, plus those that it had before.
    """
    require_constant(weight)
    weight = as_constant(weight, x)
    # A normalisation that is not multiplied out yet, numerator / root + constant, stays so, unless
    # the weight has more axes or entries than the form.
    quotient = x.pending_quotient
    if quotient and broadcast_shapes(x.shape, weight.shape) == x.shape:
        numerator = scale(quotient.numerator, weight, roundings=roundings)
        constant = scale(quotient.constant, weight, roundings=roundings)
        return Form.from_quotient(replace(quotient, numerator=numerator, constant=constant))
    x = broadcast(x, weight.shape)
    return linear_map(x, torch.mul, weight, roundings=roundings + 1, mixes="nothing")


def linear(input: Form, weight: Tensor, bias: Tensor | None = None) -> Form:
    """Return the form of input @ weight^T + bias, for an input that is a form.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. A normalisation is a pending quotient, numerator / root + constant,
    whose numbers are computed later. For such an input the weights are applied to the numerator
    and to the constant, and the result is a pending quotient again: the bounds are tighter in this
    way. A quotient stores the root as two forms, `inverse` = 1 / root and `square` = root^2. (The
    sign of numerator + root constant can be proven without the division: `prove.margins`.)
    """
    require_constant(weight, bias)
    if weight.ndim == 1:  # torch then leaves out the axis of the results
        column: Any = linear(input, weight[None], bias)
        return column.squeeze(-1)
    roundings = weight.shape[-1] + 1  # one per term of a sum, and one for the cast of a weight
    quotient = input.pending_quotient
    # W (n / root) = (W n) / root holds only if all entries of a row have the same root: both forms
    # of it have constant rows. Otherwise the numbers of the quotient are computed, and the weights
    # are applied to them.
    if (
        quotient is None
        or not has_constant_rows(quotient.inverse)
        or not has_constant_rows(quotient.square)
    ):
        x = input.symbolize_slack()  # errors of symbols can cancel in a sum, slack cannot
        return linear_map(x, F.linear, weight, roundings=roundings, constant=bias, mixes="rows")
    # The result has rows of another width: a single entry of the root per row is broadcast.
    inverse = cast("Form", quotient.inverse[..., :1])
    square = cast("Form", quotient.square[..., :1])
    x = quotient.numerator.symbolize_slack()
    constant = linear(quotient.constant, weight, bias)
    numerator = linear_map(x, F.linear, weight, roundings=roundings, mixes="rows")
    return Form.from_quotient(Quotient(numerator, inverse, square, constant))


def require_constant(*weights: Any) -> None:
    """Raise `NoRuleError` if a weight of an affine map is a form: if it depends on the input."""
    if any(isinstance(weight, Form) for weight in weights):
        raise NoRuleError("an affine map with weights or a bias that depend on the input")


def has_constant_rows(x: Form) -> bool:
    """Return whether all entries of each row of a form are the same stored number.

    A row is along the last axis. Its entries are one number if there is only one, or if the axis
    was expanded (stride 0) in all tensors of the form.
    """
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
    """Return the convolution of a form over one or two axes, with options as in torch.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. A convolution is a linear map: it applies to the centre and to all
    coefficients.
    """
    require_constant(weight, bias)
    if input.ndim != weight.ndim:
        raise NoRuleError("a convolution without a batch axis")
    # Over one axis: the same convolution of images with a single row.
    if weight.ndim == 3:
        if not isinstance(padding, str):
            padding = (0, as_pair(padding)[1])
        image: Any = input.unsqueeze(-2)
        result = convolve(image, weight.unsqueeze(-2), bias, stride, padding, dilation, groups)
        return cast("Form", result.squeeze(-2))
    pads = _find_padding(weight, padding, as_pair(dilation))

    def convolve_stack(stack: Tensor, w: Tensor) -> Tensor:
        """Convolve every image of a stack (symbols, batch, channels, height, width)."""
        images = stack.flatten(0, 1)
        if any(pads):
            images = F.pad(images, pads)
        out = _multiply_patches(images, w, as_pair(stride), as_pair(dilation), groups)
        return torch.unflatten(out, 0, stack.shape[:2])

    constant = None
    if bias is not None:
        constant = bias.view(-1, 1, 1)
    x = input.symbolize_slack()  # the map mixes entries: symbols can cancel, slack cannot
    # An entry is a sum over one kernel: one rounding per weight, and one for the cast of a weight.
    roundings = weight[0].numel() + 1
    return linear_map(x, convolve_stack, weight, roundings=roundings, constant=constant)


def _find_padding(weight: Tensor, padding: Any, dilations: tuple[int, int]) -> tuple[int, ...]:
    """Return how many zeros a convolution adds to an image: (left, right, top, bottom).

    Args:
        weight: (out channels, channels, height, width).
        padding: as in torch: a number, a number per axis, "valid" (none), or "same" (as many as
            keep the size of the image).
        dilations: step between the pixels of a window, per axis.
    """
    if padding == "valid":
        padding = 0
    if padding != "same":
        rows, columns = as_pair(padding)
        return columns, columns, rows, rows
    # An odd number of rows or columns has the extra one at the end, as in torch.
    rows = dilations[0] * (weight.shape[-2] - 1)
    columns = dilations[1] * (weight.shape[-1] - 1)
    return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2


def _multiply_patches(
    images: Tensor, w: Tensor, strides: tuple[int, int], dilations: tuple[int, int], groups: int
) -> Tensor:
    """Return a convolution as products of patches and kernels.

    In this way every entry is a plain sum of products, and its rounding error has a known bound.
    The convolutions of libraries may use other algorithms (Winograd, FFT) without this bound.

    Args:
        images: (images, channels, height, width), padded already.
        w: (out channels, channels / groups, height, width).
        strides: step between windows, per axis.
        dilations: step between the pixels of a window, per axis.
        groups: number of groups of channels.
    """
    height, width = w.shape[-2:]
    # (images, channels, h, w, ...): a window for each position h x w, of all its pixels. With a
    # dilation, a kernel sees only every n-th of them.
    patches = images.unfold(2, dilations[0] * (height - 1) + 1, strides[0])
    patches = patches.unfold(3, dilations[1] * (width - 1) + 1, strides[1])
    patches = patches[..., :: dilations[0], :: dilations[1]]
    patches = torch.unflatten(patches, 1, (groups, -1))
    kernels = torch.unflatten(w, 0, (groups, -1))
    # r images, g groups, c input and o output channels, i x j entries of a kernel.
    out = torch.einsum("rgchwij,gocij->rgohw", patches, kernels)
    return out.flatten(1, 2)


def as_pair(value: Any) -> tuple[int, int]:
    """Return an option of windows (int, or a sequence of one or two) as a number per axis."""
    if isinstance(value, int):
        return value, value
    return value[0], value[-1]


def read_axes(dim: Any, ndim: int) -> list[int]:
    """Return the axes of torch's option `dim` as numbers >= 0; None or () means all axes."""
    if isinstance(dim, int):
        return [dim % ndim]
    return [axis % ndim for axis in dim or range(ndim)]


def sum_row(t: Tensor) -> Tensor:
    """Return the sum over the last axis, as an axis of size 1."""
    return t.sum(-1, keepdim=True)


def reduce_axes(
    input: Form,
    dim: Any = None,
    keepdim: bool = False,
    *,
    axis: Any = None,
    dtype: Any = None,
    mean: bool = False,
) -> Form:
    """Return the sum or the mean of a form over axes; numpy's name `axis` works, too.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack. A
    sum is a linear map: it is applied to the centre and to all coefficients.
    """
    require_floating_point(dtype)
    axes = read_axes(axis if dim is None else dim, input.ndim)
    count = torch.Size(input.shape[axis] for axis in axes).numel()

    def reduce_stack(stack: Tensor) -> Tensor:
        """Sum or average over the axes of a stack (symbols, *shape)."""
        total = stack
        if axes:
            # Axis 0 of the stack are the symbols.
            total = stack.sum([axis + 1 for axis in axes], keepdim=keepdim)
        if mean:
            return total / count
        return total

    # Roundings: one per term of the sum, and one for the division of a mean.
    return linear_map(input.symbolize_slack(), reduce_stack, roundings=count + 1)


def make_pooling(average: Callable[..., Tensor], axes: int) -> Callable[..., Form]:
    """Return the rule of a torch function that averages over windows of the last `axes` axes.

    The rule computes the function on forms in place of tensors.
    """

    def pool(input: Form, *args: Any, **kwargs: Any) -> Form:
        """Average over windows of a form; arguments as in torch.

        A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack,
        with unknown symbols in [-1, 1]. A mean is linear: it is applied to the centre and to the
        coefficients of each symbol.
        """
        if input.ndim != axes + 2:
            raise NoRuleError("a mean over windows of one sample without a batch axis")

        def pool_stack(stack: Tensor) -> Tensor:
            """Average a stack (symbols, batch, channels, ...); symbols count as batch."""
            means = average(stack.flatten(0, 1), *args, **kwargs)
            return torch.unflatten(means, 0, stack.shape[:2])

        # A window has at most as many entries as these axes. So an entry of the result has at most
        # one rounding per term of the sum, and two for the factor 1 / n and its product.
        terms = input.shape[-axes:].numel()
        # A mean mixes entries. Slack would add up in absolute value, and windows that overlap
        # would no longer share an error. Symbols keep the sign, and their coefficients can cancel.
        return linear_map(
            input.symbolize_slack(),
            pool_stack,
            roundings=terms + 2,
            absolute_op=lambda t: pool_stack(t).abs(),  # `divisor_override` may be negative
        )

    return pool


def variance(
    input: Form,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Form:
    """Return the variance over axes: the sum of squares around the mean over n - correction."""
    if isinstance(dim, bool):  # x.var(unbiased) of all entries
        unbiased = dim
        dim = None
    if correction is None:
        correction = int(unbiased)
    centred: Any = input - reduce_axes(input, dim, keepdim=True, mean=True)
    total = reduce_axes(centred.square(), dim, keepdim)
    freedom = input.numel() // total.numel() - correction
    if freedom <= 0:  # torch divides by zero
        raise NoRuleError("a variance that is not a number: n <= correction")
    # Roundings of 1 / freedom: the division, and the cast to the dtype of coefficients.
    return scale(total, 1 / freedom, roundings=2)


def where(condition: Tensor, input: Any, other: Any) -> Form:
    """Return the form with the entries of `input` where `condition` is True, else of `other`.

    At least one of `input` and `other` is a form. The other one may be a constant.
    """
    if isinstance(condition, Form):
        raise NoRuleError("where with a condition that depends on the input")
    condition = condition.bool()  # old causal masks are uint8
    form = input if isinstance(input, Form) else other

    def zero_outside(value: Any, mask: Tensor) -> Any:
        """Return the value where the mask is True, else 0."""
        if isinstance(value, Form):
            return masked_fill(value, ~mask, 0.0)
        return torch.where(mask, as_constant(value, form), 0.0)

    return add(zero_outside(input, condition), zero_outside(other, ~condition))
