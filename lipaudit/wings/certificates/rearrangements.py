"""Rearrangements of entries: broadcast, reshaped, concatenated and padded forms; constants.

Moving entries rounds nothing. A constant becomes a form with coefficients of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates.error_blocks import Rearrangement, move_stack
from lipaudit.wings.certificates.form import REARRANGEMENTS, Form, NoRuleError, Quotient
from lipaudit.wings.certificates.rounding import DOUBLE
from lipaudit.wings.certificates.symbols import PartRadii


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """Return the broadcast shape by numpy: torch's function is slow, as it imports sympy."""
    return torch.Size(np.broadcast_shapes(*(tuple(shape) for shape in shapes)))


def broadcast(x: Form, other: Sequence[int]) -> Form:
    """Return a form broadcast to the common shape of itself and `other`.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. Slack of repeated entries becomes symbols.
    """
    shape = broadcast_shapes(x.shape, other)
    if x.shape == shape:
        return x
    if x.centre.numel() < shape.numel():
        # Entries are repeated, which is more than new axes of size 1. All copies of an entry have
        # the same error. A symbol keeps this fact. As slack, their errors would be independent.
        x = x.symbolize_slack()
    # Reading this property caches it, and `rearrange` moves cached ranges along. Otherwise it
    # would be computed again for every copy of an entry.
    x.quadratic_range  # noqa: B018
    return cast("Form", rearrange(x, lambda t: t.expand(shape)))


def expand(x: Any, *shape: Any) -> Any:
    """Return a tensor or a form, expanded to a shape like Tensor.expand."""
    if not isinstance(x, Form):
        return x.expand(*shape)
    # A size of -1 keeps the old size: torch computes the new shape on a tensor without memory.
    expanded = torch.empty(()).expand(x.shape).expand(*shape)
    return broadcast(x, expanded.shape)


def as_constant(value: Any, x: Form) -> Tensor:
    """Return a number or a constant tensor of a model as a tensor that holds it exactly."""
    if not isinstance(value, Tensor):
        return torch.as_tensor(value, dtype=DOUBLE, device=x.device)
    if value.is_complex():
        raise NoRuleError("complex numbers")
    if value.is_floating_point():
        return value.detach().to(x.device)
    return value.to(x.device, DOUBLE)


def make_rearrangement(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of a function of tensors, or of a method by name, that moves entries.

    The function may also repeat entries and add zeros. The rule computes the function on forms:
    centre, slack, and every row of coefficients are moved in the same way.
    """
    if not isinstance(function, str):
        # A function such as F.pad may add entries. Sparse coefficients (blocks) cannot follow,
        # because every entry of a block is in a group: make them dense.
        return lambda x, *args, **kwargs: rearrange(
            x.make_dense(), lambda t: function(t, *args, **kwargs)
        )
    # A method only moves or repeats entries, and the groups of a block move along.
    method = getattr(Tensor, function)

    def move(x: Form, *args: Any, **kwargs: Any) -> Any:
        """Apply `method`, a method of tensors such as transpose or chunk, to a form.

        A pending quotient, numerator * inverse + constant with inverse = 1 / root, is a product
        that is not computed yet. It stays pending: the method is applied to each of its forms
        (numerator, inverse, constant, and root^2, the `square`).
        """
        quotient = x.pending_quotient
        if quotient is None:
            return rearrange(x, lambda t: method(t, *args, **kwargs))
        parts = []
        for part in vars(quotient).values():
            parts.append(move(broadcast(part, x.shape), *args, **kwargs))
        return _join_quotients(parts)

    return move


def _join_quotients(parts: list[Any]) -> Any:
    """Return the pending quotient of four forms: numerator, inverse, square and constant.

    If each of the four is a tuple of forms (the results of chunk), return a tuple of quotients.
    """
    if isinstance(parts[0], Form):
        return Form.from_quotient(Quotient(*parts))
    quotients = zip(*parts, strict=True)
    return tuple(Form.from_quotient(Quotient(*forms)) for forms in quotients)


def rearrange(x: Form, move: Callable[[Tensor], Any]) -> Any:
    """Return the form with its entries rearranged by `move`, a function of tensors (*shape).

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. Centre and slack have the shape of the tensor, (*shape), and are
    moved directly. The coefficients `x.dense`, (symbols, *shape), have one more axis in front:
    `move_stack` moves the row of each symbol.

    The result is a tuple of forms if `move` returns several tensors, such as chunk.
    """
    if isinstance(move(x.centre), Tensor):
        (form,) = _rearrange_all(x, lambda t: (move(t),))
        return form
    return tuple(_rearrange_all(x, move))


def _rearrange_all(x: Form, move: Rearrangement) -> list[Form]:
    """Return a form for each result of `move`, which rearranges entries of tensors (*shape).

    A form is centre + coefficients . symbols +- slack: centre, coefficients and slack are all
    rearranged in the same way.
    """
    centres = move(x.centre)
    slacks = move(x.slack)
    # Radii and ranges of entries are moved, too: this is cheaper than to compute them again from
    # all coefficients.
    linear = move(x.radii.linear)
    quadratic = move(x.radii.quadratic)
    errors = move(x.radii.errors)
    # `quadratic_range` is a cached property: it is in `__dict__` only if it was computed already.
    range_ends = [move(end) for end in x.__dict__.get("quadratic_range", ())]
    blocks = [block.rearrange(move) for block in x.blocks]
    forms = []
    for i, dense in enumerate(move_stack(move, x.dense)):  # (symbols, *new shape)
        form_blocks = [block[i] for block in blocks]
        form = Form(centres[i], dense, slacks[i], x.symbols, blocks=form_blocks)
        form.radii = PartRadii(linear[i], quadratic[i], errors[i])
        if range_ends:
            low, high = range_ends
            form.quadratic_range = low[i], high[i]
        forms.append(form)
    return forms


def cat(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Concatenate forms and constants along an axis, like torch.cat.

    Centres (*shape), coefficients (symbols, *shape) and slacks (*shape) of the forms are
    concatenated. As in torch, tensors of shape (0,) are ignored.
    """
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)]
    first_form = next(tensor for tensor in tensors if isinstance(tensor, Form))
    forms = []
    for tensor in tensors:
        if not isinstance(tensor, Form):
            tensor = lift_constant(tensor, first_form)
        forms.append(tensor)
    rows = max(len(form.generators) for form in forms)
    stacks = []
    for form in forms:
        # A form has no rows for symbols that were created after it: they get zeros. F.pad takes
        # pairs for the last axis first: (0, 0) for all but axis 0, the symbols.
        missing = rows - len(form.generators)
        stacks.append(F.pad(form.generators, (*[0, 0] * form.ndim, 0, missing)))
    axis = dim % first_form.ndim
    centre = torch.cat([form.centre for form in forms], axis)
    slack = torch.cat([form.slack for form in forms], axis)
    # Coefficients have the axis of symbols in front.
    return Form(centre, torch.cat(stacks, axis + 1), slack, first_form.symbols)


def stack(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Stack forms and constants along a new axis."""
    return cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def masked_fill(input: Form, mask: Tensor, value: Any) -> Form:
    """Return a form with the constant `value` in the entries where a mask is True.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. The masked entries get the centre `value`, and their coefficients
    and slack are 0.
    """
    mask = mask.bool()
    unchanged = ~mask
    input = broadcast(input, mask.shape)
    centre = input.centre.masked_fill(mask, float(value))
    dense, blocks = input.map_coefficients(lambda t: t * unchanged)
    return Form(centre, dense, input.slack * unchanged, input.symbols, blocks=blocks)


MOVE_METHODS = (*REARRANGEMENTS, "index_select", "roll", "flip", "repeat")
"""Tensor methods that rearrange entries."""


def lift_constant(value: Any, like: Form) -> Form:
    """Return a constant as a form: it is the centre, and coefficients and slack are zero.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack.
    """
    centre = as_constant(value, like).to(DOUBLE)
    # Rows of zeros for the symbols of the input, into which rules write coefficients of products.
    rows = like.dense.new_zeros(like.symbols.first_error, *centre.shape)
    return Form(centre, rows, torch.zeros_like(centre), like.symbols)


def lift_first_constant(like: Any, *constants: Any) -> tuple[Any, ...]:
    """Return the factors of a product; if all factors are constants, the first becomes a form.

    A product of two constants has a rounding error. Only a form has slack for this error.

    Args:
        like: the form that the product is combined with later; if `like` is not a form, the
            factors are returned unchanged.
        constants: the factors; if one of them is a form, all are returned unchanged.
    """
    if not isinstance(like, Form) or any(isinstance(value, Form) for value in constants):
        return constants
    return (lift_constant(constants[0], like), *constants[1:])


def pad(input: Form, pad: Any, mode: str = "constant", value: float | int | None = None) -> Form:  # noqa: A002
    """Add entries at the ends of axes of a form, like F.pad: constants, or copies of entries.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1].
    """
    pad = tuple(pad)
    if mode != "constant":
        return make_rearrangement(F.pad)(input, pad, mode)
    # New entries are constants: their coefficients and slack are 0.
    centre = F.pad(input.centre, pad, value=float(value or 0.0))
    generators = F.pad(input.generators, pad)
    return Form(centre, generators, F.pad(input.slack, pad), input.symbols)


def unfold(input: Form, *args: Any, **kwargs: Any) -> Form:
    """Return patches as columns (F.unfold), or windows of an axis (Tensor.unfold).

    Both functions have the name "unfold". F.unfold is recognised by its keyword `stride`.
    """
    rule = make_rearrangement(F.unfold if "stride" in kwargs else "unfold")
    return rule(input, *args, **kwargs)


CONSTANT_MAKERS = (
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_tensor",
)
"""Functions of a tensor whose result does not depend on its values."""


def make_constant(name: str) -> Callable[..., Tensor]:
    """Return the rule of a function, such as zeros_like, that creates a constant tensor.

    The rule takes a form in place of the tensor argument.
    """

    def create(input: Form, *args: Any, **kwargs: Any) -> Tensor:
        """Call the function `name` with a plain tensor of the form's shape, dtype and device.

        It is a function of torch, such as zeros_like, or a method of tensors. The plain tensor is
        a single number that is expanded to the shape, so it takes no memory.
        """
        like = torch.empty(1, dtype=input.dtype, device=input.device).expand(input.shape)
        function = getattr(torch, name, None) or getattr(Tensor, name)
        return function(like, *args, **kwargs)

    return create
