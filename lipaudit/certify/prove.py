"""A pass over a ball of inputs: its rules, its start, and the margins at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lipaudit.certify.demand import DeviationError, plan
from lipaudit.certify.form import Form, NoRuleError, forms_of
from lipaudit.certify.rounding import DOUBLE, cast_up, gamma, up
from lipaudit.certify.rules.affine import add, broadcast, is_row, linear_map
from lipaudit.certify.rules.bilinear import mul
from lipaudit.certify.rules.smooth import SQRT, relax
from lipaudit.certify.rules.table import RULES
from lipaudit.certify.symbols import SETTLE, Norm, Symbols
from lipaudit.errors import UsageError


def ball(
    x: Float[Tensor, "1 ..."],
    eps: float,
    *,
    norm: Norm = "linf",
    order: int = 1,
    box: tuple[float, float] | None = None,
    moving: Tensor | None = None,
    dtype: torch.dtype = DOUBLE,
    settle: float = SETTLE,
) -> Form:
    """Return the form of all inputs within `eps` of x.

    Args:
        x: one input, or its token embeddings.
        eps: radius.
        norm: norm of the ball.
        order: 1 for affine forms, 2 for quadratic ones.
        box: range of valid inputs; the L-inf ball is intersected with it.
        moving: (*shape), mask of the entries that may change, by default all.
        dtype: dtype of the coefficients; every dtype gives proven bounds.
        settle: see `symbols.SETTLE`.

    Raises:
        UsageError: eps is negative, or the order is not 1 or 2.
    """
    if not eps >= 0 or order not in (1, 2):
        raise UsageError(f"no ball of radius {eps} at order {order}")
    shown, x = x.dtype, x.detach().to(DOUBLE)
    low, high = x - up(torch.full_like(x, eps)), x + up(torch.full_like(x, eps))
    if box is not None and norm == "linf":
        low, high = low.clamp(*box), high.clamp(*box)
    # The box cuts the L-inf ball to a smaller box: its own centre needs the smaller radius.
    centre = (low + high) / 2 if norm == "linf" else x
    radius = torch.maximum(high - centre, centre - low)
    # The centre is rounded: the radius covers what that moved.
    radius = radius + gamma(4, DOUBLE) * (x.abs() + radius)
    where = torch.ones_like(x, dtype=torch.bool) if moving is None else moving.expand_as(x)
    places = where.flatten().nonzero()[:, 0]
    symbols = Symbols(
        len(places), norm, order=order, dtype=dtype, rules=RULES, shown=shown, settle=settle
    )
    rows = torch.zeros(symbols.first_error, x.numel(), dtype=dtype, device=x.device)
    rows[torch.arange(len(places)), places] = cast_up(radius, dtype).flatten()[places]
    centre = torch.where(where, centre, x)
    return Form(centre, rows.view(-1, *x.shape), torch.zeros_like(centre), symbols)


@torch.no_grad()
def run(model: Callable[[Any], Any], x: Form, *, module: nn.Module | None = None) -> Any:
    """Run a model on a form; refuse an operation without a rule, and name its module.

    Args:
        model: the function to run.
        x: the form.
        module: the module that defines the paths, if it is not the model itself.

    Raises:
        NoRuleError: the model uses an operation that is not on the list.
    """
    whole = model if module is None else module
    try:
        with name_paths(whole):
            x.symbols.plan = plan(model, x)
        try:
            with name_paths(whole):
                result = model(x.copy())
        except DeviationError:
            x.symbols.plan = None
            with name_paths(whole):
                result = model(x)
    finally:
        x.symbols.plan = None
    if any(form.stale or form.symbols is not x.symbols for form in forms_of(result)):
        raise NoRuleError("a result that was changed in place elsewhere")
    return result


@contextmanager
def name_paths(whole: Any) -> Iterator[None]:
    """Add the path of the module to a `NoRuleError`."""
    paths: list[str] = []
    hooks = []

    def leave(*_: Any) -> None:
        paths.pop()

    for path, part in whole.named_modules() if isinstance(whole, nn.Module) else ():
        hooks.append(part.register_forward_pre_hook(lambda *_, path=path: paths.append(path)))
        hooks.append(part.register_forward_hook(leave))
    try:
        yield
    except NoRuleError as error:
        where = (paths[-1] or type(whole).__name__) if paths else ""
        raise NoRuleError(error.operation, where) from error
    finally:
        for hook in hooks:
            hook.remove()


def margins(logits: Form, label: int) -> Form:
    """Return logit_label - logit_j for every other class j, (classes - 1,), or an equivalent.

    Behind a normalisation the logits are n / root + constant. If all have one root and it is
    tighter, the result is root (n / root + constant): it has the same signs, without the quotient.
    """
    flat: Any = logits.reshape(-1)
    plain = _differences(flat, label)
    if logits.quotient is None:
        return plain
    whole = logits.shape
    parts = logits.quotient.move(lambda form: cast("Form", broadcast(form, whole).reshape(-1)))
    if not is_row(parts.square):
        return plain
    root = relax(cast("Form", parts.square[:1]), SQRT, positive=True)
    constant = mul(_differences(parts.constant, label), broadcast(root, plain.shape))
    # Both forms have the signs of the margins; the one that proves the larger share is taken.
    times = add(_differences(parts.numerator, label), constant)
    return times if _share(times) > _share(plain) else plain


def _differences(logits: Form, label: int) -> Form:
    classes = logits.shape[-1]
    identity = torch.eye(classes, dtype=DOUBLE, device=logits.device)
    others = torch.arange(classes, device=logits.device) != label
    difference = (identity[label] - identity)[others]
    return linear_map(logits, lambda t, w: t @ w.mT, difference, roundings=2)


def _share(margins: Form) -> float:
    """Return the proven share of the margins at the centre."""
    return float((margins.range()[0] / margins.centre.abs()).nan_to_num(nan=-torch.inf).amin())
