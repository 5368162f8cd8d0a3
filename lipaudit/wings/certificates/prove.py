"""A pass over a ball of inputs: its rules, its start, and the margins at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.errors import UsageError, is_machine_error
from lipaudit.wings.certificates import (
    affine,
    bilinear,
    curves,
    mixing,
    normalisations,
    piecewise,
    rearrangements,
)
from lipaudit.wings.certificates.affine import add, has_constant_rows, linear_map
from lipaudit.wings.certificates.bilinear import mul
from lipaudit.wings.certificates.curves import SQRT, make_unary, relax
from lipaudit.wings.certificates.demand import DeviationError, plan_calls
from lipaudit.wings.certificates.form import Form, NoRuleError, list_forms
from lipaudit.wings.certificates.rearrangements import broadcast, make_constant, make_rearrangement
from lipaudit.wings.certificates.rounding import DOUBLE, bound_rounding, cast_up, round_up
from lipaudit.wings.certificates.symbols import SLACK_SHARE, Norm, Symbols

if TYPE_CHECKING:
    from jaxtyping import Float


OF_THE_SAME_NAME: tuple[Callable[..., Any], ...] = (
    affine.add,
    affine.sub,
    affine.neg,
    affine.linear,
    affine.dropout,
    affine.where,
    bilinear.matmul,
    bilinear.mul,
    bilinear.div,
    bilinear.einsum,
    bilinear.addmm,
    rearrangements.expand,
    rearrangements.cat,
    rearrangements.stack,
    rearrangements.masked_fill,
    rearrangements.pad,
    rearrangements.unfold,
    mixing.softmax,
    mixing.log_softmax,
    mixing.logsumexp,
    mixing.scaled_dot_product_attention,
    mixing.multi_head_attention_forward,
    normalisations.layer_norm,
    normalisations.rms_norm,
    normalisations.batch_norm,
    normalisations.group_norm,
    normalisations.vector_norm,
    normalisations.normalize,
    piecewise.relu,
    piecewise.leaky_relu,
    piecewise.prelu,
    piecewise.hardsigmoid,
    piecewise.hardswish,
    piecewise.clamp,
    piecewise.max_pool2d,
    piecewise.maximum,
    piecewise.minimum,
    piecewise.amax,
    piecewise.amin,
    curves.gelu,
    curves.silu,
    curves.elu,
    curves.softplus,
    curves.glu,
    curves.square,
)
"""Rules of the operations that have their name."""

RULES: dict[str, Callable[..., Any]] = {
    **{rule.__name__: rule for rule in OF_THE_SAME_NAME},
    # Affine operations.
    **dict.fromkeys(
        ("to", "float", "double", "type", "type_as", "contiguous", "detach", "data"),
        affine.cast_form,
    ),
    "clone": lambda input, *, memory_format=None: input.copy(),
    "negative": affine.neg,
    "radd": affine.add,
    "rsub": lambda x, other, *, alpha=1: affine.sub(other, x, alpha=alpha),
    "broadcast_to": rearrangements.expand,
    "expand_as": lambda x, other: rearrangements.expand(x, *other.shape),
    **dict.fromkeys(("conv1d", "conv2d"), affine.convolve),
    "sum": affine.reduce_axes,
    "mean": partial(affine.reduce_axes, mean=True),
    "baddbmm": lambda input, batch1, batch2, **how: bilinear.addmm(input, batch1, batch2, **how),
    "avg_pool1d": affine.make_pooling(F.avg_pool1d, 1),
    "avg_pool2d": affine.make_pooling(F.avg_pool2d, 2),
    "adaptive_avg_pool1d": affine.make_pooling(F.adaptive_avg_pool1d, 1),
    "adaptive_avg_pool2d": affine.make_pooling(F.adaptive_avg_pool2d, 2),
    # Entries elsewhere, and new tensors.
    **{
        name: make_rearrangement(name)
        for name in (*rearrangements.MOVE_METHODS, "gather", "take_along_dim", "repeat_interleave")
    },
    "view": make_rearrangement("reshape"),
    **dict.fromkeys(("view_as", "reshape_as"), lambda x, other: x.reshape(other.shape)),
    "T": lambda x: x.permute(*range(x.ndim)[::-1]),
    "mT": lambda x: x.transpose(-1, -2),
    "iter": lambda x: iter(x.unbind(0)),
    "getitem": make_rearrangement("__getitem__"),
    "concat": rearrangements.cat,
    **{name: make_constant(name) for name in rearrangements.CONSTANT_MAKERS},
    # Products.
    "bmm": bilinear.matmul,
    "rmatmul": lambda x, other: bilinear.matmul(other, x),
    **dict.fromkeys(("multiply", "rmul"), bilinear.mul),
    **dict.fromkeys(("divide", "true_divide", "truediv"), bilinear.div),
    "rdiv": lambda x, other: bilinear.div(other, x),
    # Norms and moments.
    "linalg_vector_norm": normalisations.vector_norm,
    "var": affine.variance,
    "std": lambda *args, **how: curves.relax(
        affine.variance(*args, **how), curves.SQRT, positive=True
    ),
    "norm": lambda input, p="fro", dim=None, keepdim=False, dtype=None: normalisations.vector_norm(
        input, p, dim, keepdim
    ),
    # Functions of each entry, and extremes.
    "exp": make_unary(curves.EXP),
    "tanh": make_unary(curves.TANH),
    "sigmoid": make_unary(curves.SIGMOID),
    "erf": make_unary(curves.ERF),
    "sin": make_unary(curves.SIN),
    "cos": make_unary(curves.COS),
    "log": make_unary(curves.LOG, positive=True),
    "mish": lambda input, inplace=False: curves.relax(input, curves.MISH),
    "abs": lambda input: piecewise.leaky_relu(input, -1.0),
    "clip": piecewise.clamp,
    "clamp_min": lambda input, min: piecewise.clamp(input, min),
    "clamp_max": lambda input, max: piecewise.clamp(input, None, max),
    "relu6": lambda input, inplace=False: piecewise.clamp(input, 0.0, 6.0),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: piecewise.clamp(
        input, min_val, max_val
    ),
    "max": piecewise.make_extreme(piecewise.maximum, piecewise.amax),
    "min": piecewise.make_extreme(piecewise.minimum, piecewise.amin),
    "rsqrt": make_unary(curves.RSQRT, positive=True),
    "sqrt": make_unary(curves.SQRT, positive=True),
    "reciprocal": make_unary(curves.RECIPROCAL, positive=True),
    "pow": curves.raise_power,
}
"""Rules of all supported operations, by name."""


def ball(
    x: Float[Tensor, "1 ..."],
    eps: float | Tensor,
    *,
    norm: Norm = "linf",
    order: int = 1,
    box: tuple[float, float] | None = None,
    moving: Tensor | None = None,
    dtype: torch.dtype = DOUBLE,
    slack_share: float = SLACK_SHARE,
) -> Form:
    """Return the form of all inputs within `eps` of x, on which a model can run.

    A form is centre + coefficients . symbols: here one symbol (an unknown) for each entry that may
    change, with the radius as its coefficient. All symbols together are in the unit ball.

    Args:
        x: one input, or its token embeddings.
        eps: radius of the ball. A tensor gives each entry a radius, for an L-inf ball only.
        norm: norm of the ball.
        order: 1 for affine forms, 2 for quadratic ones.
        box: range of valid inputs; the L-inf ball is intersected with it.
        moving: (*shape), mask of the entries that may change, by default all.
        dtype: dtype of the coefficients. Rounding is always added to the bounds, so they are
            proven with every dtype. A narrow dtype saves memory and gives looser bounds.
        slack_share: see `symbols.SLACK_SHARE`.

    Raises:
        UsageError: eps is negative, or the order is not 1 or 2.
    """
    model_dtype = x.dtype
    x = x.detach().to(DOUBLE)
    reach = torch.as_tensor(eps, dtype=DOUBLE, device=x.device).expand_as(x)
    if not (reach >= 0).all() or order not in (1, 2):
        raise UsageError(f"no ball of radius {eps} at order {order}")
    centre, radius = _find_centre(x, reach, norm, box)
    if moving is None:
        moving = torch.ones_like(x, dtype=torch.bool)
    moving = moving.expand_as(x)
    # Flat index of each entry that may change. The i-th of these entries gets symbol i.
    positions = moving.flatten().nonzero()[:, 0]
    n = len(positions)
    symbols = Symbols(
        inputs=n,
        norm=norm,
        order=order,
        dtype=dtype,
        rules=RULES,
        model_dtype=model_dtype,
        slack_share=slack_share,
    )
    # Row i has the coefficients of symbol i: the radius at the symbol's own entry, else 0. At
    # order 2 further rows, of the products of symbols, are 0.
    rows = x.new_zeros(symbols.first_error, x.numel(), dtype=dtype)
    rows[torch.arange(n), positions] = cast_up(radius, dtype).flatten()[positions]
    centre = torch.where(moving, centre, x)
    return Form(
        centre,
        rows.view(-1, *x.shape),
        slack=torch.zeros_like(centre),
        symbols=symbols,
    )


def _find_centre(
    x: Tensor, reach: Tensor, norm: Norm, box: tuple[float, float] | None
) -> tuple[Tensor, Tensor]:
    """Return centre and radius of each entry of a ball around x, (*shape) each.

    An L-inf ball is a box of inputs, and the range of valid inputs (`box`) may cut it to a smaller
    box. Around the centre of the smaller box the radius is smaller than around x.

    Args:
        x: (*shape), float64.
        reach: radius of each entry before the cut.
        norm: norm of the ball.
        box: range of valid inputs.
    """
    low = x - round_up(reach)
    high = x + round_up(reach)
    centre = x
    if norm == "linf":
        if box is not None:
            low = low.clamp(*box)
            high = high.clamp(*box)
        centre = (low + high) / 2
    radius = torch.maximum(high - centre, centre - low)
    # low, high, centre and radius are rounded, at most four times in a row: enlarge the radius.
    return centre, radius + bound_rounding(4, DOUBLE) * (x.abs() + radius)


def hull(
    x: Float[Tensor, "1 ..."],
    moves: Float[Tensor, "n 1 ..."],
    groups: Sequence[int],
    max_words: int,
    *,
    dtype: torch.dtype = DOUBLE,
) -> Form:
    """Return a form of all texts in which at most `max_words` words are replaced by near words.

    A move is the change of the embeddings x by one replacement of one word. The moves of the same
    word are a group. The form also covers convex combinations of the replacements of each word.

    Args:
        x: one input, the embeddings of a text.
        moves: change of x by each replacement, float64.
        groups: number of moves in each group, in order; moves of two groups add up.
        max_words: largest number of words that are replaced at once.
        dtype: dtype of the coefficients; bounds are proven with every dtype.
    """
    symbols = Symbols(
        inputs=len(moves),  # one symbol for each move: how much of it is made
        norm="words",
        order=1,
        dtype=dtype,
        rules=RULES,
        model_dtype=x.dtype,
        groups=groups,
        max_words=max_words,
    )
    rows = moves.to(dtype)  # coefficients, a row for each symbol
    x = x.detach().to(DOUBLE)
    # The slack of a form is the radius of a further error. Here it covers the rounding of a move:
    # of its cast to `dtype`, and of its computation as a difference of embeddings. The latter is
    # one rounding; three more cover the operations of these two lines.
    cast_error = (moves - rows.to(DOUBLE)).abs()
    rounding = cast_error + bound_rounding(4, DOUBLE) * (moves.abs() + x.abs())
    # At most `max_words` moves are made at once, each with at most the largest rounding.
    return Form(x, rows, slack=round_up(max_words * rounding.amax(0)), symbols=symbols)


@torch.no_grad()
def run(model: Callable[[Any], Any], x: Form, *, module: nn.Module | None = None) -> Any:
    """Run a model on a form, that is, on all inputs of a ball at once; return its output forms.

    A trial run on plain numbers finds which entries of each call the result needs, such as the
    entries of the class token. The pass on forms does not compute the other entries.

    Args:
        model: the function to run.
        x: the form.
        module: the module whose submodule paths are named in errors; by default the model.

    Raises:
        NoRuleError: the model uses an operation that is not on the list.
    """
    root = model if module is None else module
    try:
        # Each run of the model has its own `name_paths`: a run that fails leaves a stack of paths
        # behind.
        with name_paths(root):
            plan = plan_calls(model, x)
        # The plan, unless it is None, is called in place of the rule of each torch function, and
        # leaves out entries that are not needed.
        x.symbols.intercept = plan
        try:
            with name_paths(root):
                result = model(x.copy())
        except DeviationError:
            # The model calls other functions than in the trial: compute all entries.
            x.symbols.intercept = None
            with name_paths(root):
                result = model(x)
    finally:
        x.symbols.intercept = None
    # A form that another call changed in place has lost its value; a form of another pass has
    # other unknowns.
    if any(form.is_stale or form.symbols is not x.symbols for form in list_forms(result)):
        raise NoRuleError("a result that was changed in place elsewhere")
    return result


def bound_margins(
    model: Callable[[Any], Any], x: Form, label: int, *, module: nn.Module | None = None
) -> Form:
    """Return bounds (a form) of the margins on a ball: logit of the label minus every other logit.

    A fast pass through the model comes first. If it does not prove that all margins are positive,
    a slow pass with tighter bounds follows.

    Args:
        model: a classifier.
        x: the form of its inputs, a ball.
        label: the class to prove.
        module: as for `run`.
    """
    # Symbols are unknowns. The fast pass has no optional symbols for errors of products: it adds
    # the size of these errors to the slack of the bounds.
    x.symbols.restart(many_symbols=False)
    bounds = margins(run(model, x.copy(), module=module), label)
    # If no symbol was left out, a second pass would give the same bounds. `range` has the lower
    # bounds first; NaN proves nothing, so `not ... > 0` is not `... <= 0`. The choice must not
    # depend on a time limit: stored proofs refer to the symbols of the last pass.
    if x.symbols.skipped_symbols and not bounds.range()[0].min() > 0:
        x.symbols.restart(many_symbols=True)
        bounds = margins(run(model, x, module=module), label)
    return bounds


@contextmanager
def name_paths(root: Any) -> Iterator[None]:
    """Name the module that was running in every `NoRuleError` that the block raises.

    Hooks before and after every forward keep a stack of the paths of running modules of `root`.
    The innermost path is added to the error.
    """
    running: list[str] = []  # paths of modules, innermost last
    hooks = []

    def leave(*_: Any) -> None:
        running.pop()  # a hook must return None

    modules = root.named_modules() if isinstance(root, nn.Module) else ()
    for path, module in modules:
        name = path or type(root).__name__
        # `name=name` keeps the name of this module: `name` itself changes with the loop.
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    except (NoRuleError, RuntimeError) as error:
        if isinstance(error, NoRuleError):
            operation = error.operation
        elif "TorchScript interpreter" not in str(error) or is_machine_error(error):
            raise
        else:  # operations of TorchScript bypass the rules
            operation = "torch.jit.script"
        innermost = ""
        if running:
            innermost = running[-1]
        raise NoRuleError(operation, innermost) from error
    finally:
        for hook in hooks:
            hook.remove()


def margins(logits: Form, label: int) -> Form:
    """Return a form with the sign of the margin logit_label - logit_j for every other class j.

    It has the margins, or the margins times a common positive factor if their bounds are tighter.
    The factor exists if the model ends in a normalisation and a linear layer. Its logits are then
    numerator / root + constant, with the root of the variance for all classes. The margin times
    the root has no quotient: numerator_label - numerator_j + root (constant_label - constant_j).
    """
    flat: Any = logits.reshape(-1)
    plain = _subtract_logits(flat, label)
    if logits.quotient is None:  # no normalisation
        return plain
    # The forms of the quotient, all with an entry for each class.
    shape = logits.shape
    parts = logits.quotient.move(lambda form: cast("Form", broadcast(form, shape).reshape(-1)))
    if not has_constant_rows(parts.square):  # root^2 is not the same for all classes
        return plain
    # The root of all classes, from the first entry of root^2.
    root = relax(cast("Form", parts.square[:1]), SQRT, positive=True)
    constant = mul(_subtract_logits(parts.constant, label), broadcast(root, plain.shape))
    times_root = add(_subtract_logits(parts.numerator, label), constant)
    if _find_proven_share(times_root) > _find_proven_share(plain):
        return times_root
    return plain


def _subtract_logits(logits: Form, label: int) -> Form:
    """Return the form of logit_label - logit_j for every other class j, (classes - 1,)."""
    classes = logits.shape[-1]
    # The matrix of this linear map has the rows e_label - e_j, with unit vectors e.
    identity = torch.eye(classes, dtype=DOUBLE, device=logits.device)
    is_other = torch.arange(classes, device=logits.device) != label
    differences = (identity[label] - identity)[is_other]
    # Each margin is a sum of two terms that are not zero, so it has at most two roundings.
    return linear_map(logits, F.linear, differences, roundings=2)


def _find_proven_share(margins: Form) -> float:
    """Return the smallest ratio of the proven minimum of a margin to the margin at the centre.

    A ratio nearer to 1 means tighter bounds. The ratio does not depend on the scale of the form.
    """
    low, _ = margins.range()
    shares = low / margins.centre.abs()
    return float(shares.nan_to_num(nan=-torch.inf).amin())
