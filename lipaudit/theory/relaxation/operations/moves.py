"""Operations that move entries about, put them side by side or replace them: exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipaudit.theory.relaxation.blocks import Block, stacked
from lipaudit.theory.relaxation.form import Form, Quotient
from lipaudit.theory.relaxation.operations.affine import broadcast
from lipaudit.theory.relaxation.rounding import DOUBLE
from lipaudit.theory.relaxation.symbols import Sizes


def moved(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of a function of tensors, or a method by its name.

    It only moves entries about or copies them; a function may put zeros beside them.
    """

    def rule(x: Form, *args: Any, **kwargs: Any) -> Any:
        x = x if isinstance(function, str) else x.whole()

        def move(t: Tensor) -> Any:
            called = getattr(Tensor, function) if isinstance(function, str) else function
            return called(t, *args, **kwargs)

        if x.waits:
            return _moved_quotient(x.waits, lambda form: rule(form, *args, **kwargs))
        dense = stacked(move, x.dense)
        per_block = [block.moved(move) for block in x.blocks]
        low_high = x.__dict__.get("quadratic_range", ())
        known = (x.centre, x.slack, *vars(x.sizes).values(), *low_high)
        parts = dense, *(move(each) for each in known)
        if isinstance(dense, Tensor):
            return _moved(x, [each for (each,) in per_block], *parts)
        return tuple(
            _moved(x, [block[i] for block in per_block], *each)
            for i, each in enumerate(zip(*parts, strict=True))
        )

    return rule


def _moved(x: Form, blocks: list[Block], dense: Tensor, centre: Tensor, *known: Tensor) -> Form:
    form = Form(centre, dense, known[0], x.symbols, blocks=blocks)
    form.sizes = Sizes(*known[1:4])  # taken once, before it is cut up
    if known[4:]:
        form.quadratic_range = known[4], known[5]
    return form


def _moved_quotient(quotient: Quotient, rule: Callable[[Form], Any]) -> Any:
    parts: Any = quotient.moved(lambda form: rule(broadcast(form, quotient.numerator.shape)))
    if isinstance(parts.numerator, Form):
        return Form.waiting(parts)
    each = zip(*vars(parts).values(), strict=True)
    return tuple(Form.waiting(Quotient(*one)) for one in each)


def cat(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Put forms and constants side by side; one without entries is nothing, as torch has it."""
    tensors = [each for each in tensors if each.shape != (0,)]
    forms = [each for each in tensors if isinstance(each, Form)]
    symbols, rows = forms[0].symbols, max(len(form.generators) for form in forms)
    axis = dim % forms[0].ndim
    shape = list(forms[0].shape)
    shape[axis] = sum(each.shape[axis] for each in tensors)
    device = forms[0].device
    centre = torch.cat(
        [e.centre if isinstance(e, Form) else e.detach().to(DOUBLE) for e in tensors], axis
    )
    slack = torch.zeros(shape, dtype=DOUBLE, device=device)
    generators = torch.zeros(rows, *shape, dtype=symbols.dtype, device=device)
    start = 0
    for each in tensors:
        if isinstance(each, Form):
            slack.narrow(axis, start, each.shape[axis]).copy_(each.slack)
            part = generators[: len(each.generators)].narrow(axis + 1, start, each.shape[axis])
            part.copy_(each.generators)
        start += each.shape[axis]
    return Form(centre, generators, slack, symbols)


def stack(tensors: Sequence[Any], dim: int = 0) -> Form:
    """Put forms and constants side by side along a new axis."""
    return cat([each.unsqueeze(dim) for each in tensors], dim)


def masked_fill(input: Form, mask: Tensor, value: Any) -> Form:
    """A constant in some entries."""
    mask = mask.bool()
    input = broadcast(input, mask.shape)
    keep = ~mask
    dense, blocks = input.mapped(lambda t: t * keep)
    centre = input.centre.masked_fill(mask, float(value))
    return Form(centre, dense, input.slack * keep, input.symbols, blocks=blocks)


MOVES = (
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "squeeze", "unsqueeze"),
    *("reshape", "flatten", "unflatten", "unbind", "chunk", "split", "tensor_split"),
    *("narrow", "select", "index_select", "roll", "flip", "repeat"),
)
"""Methods of tensors that move entries about."""

RULES: dict[str, Callable[..., Any]] = {
    **{name: moved(name) for name in MOVES},
    "view": moved("reshape"),
    "T": lambda x: x.permute(*range(x.ndim)[::-1]),
    "mT": lambda x: x.transpose(-1, -2),
    "iter": lambda x: iter(x.unbind(0)),
    "getitem": moved("__getitem__"),
    "cat": cat,
    "concat": cat,
    "stack": stack,
    "masked_fill": masked_fill,
}
"""What moves do to forms."""
