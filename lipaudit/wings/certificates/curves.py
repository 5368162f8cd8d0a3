"""Smooth functions entry by entry: a parabola plus a bounded remainder.

On a range [l, u] around m every f(x) is f0 + a (x - c) + b (x - c)^2 + d(x) for any a and b; c is
the shifted centre of the form, about which the rest R of x - c = L + R reaches least. d is
evaluated at `GRID_POINTS` points. Between two of them, h apart, d'' is at most s = sup |f'' - 2b|,
and d leaves its chord by at most h^2 s / 8: so all d lie between the least and the largest at
these points, widened by that.

Order 1: b = 0 and a is the slope of the chord, best for a function that bends one way. Order 2:
with w = (u - l) / 2, the best b for powers up to the fourth is the second difference (f(u) - 2
f(m) + f(l)) / 2 w^2 (x^4 is w^2 x^2 - w^4/8 +- w^4/8), and the best slope there is f'(m) + 3/4
(chord - f'(m)) (x^3 is 3/4 w^2 x +- w^3/4). With L linear in the input and |R| <= rest, b L^2 goes
into the quadratic part and b (2 L R + R^2) stays within b [-2 lin rest, 2 lin rest + rest^2].
Where that is wider than order 1 is, b is 0.

All of this is float64. a and b are rounded first to what multiplies the generators, d is what
they leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates.affine import add, scale
from lipaudit.wings.certificates.form import Form, NoRuleError, UnboundedError, require_finite
from lipaudit.wings.certificates.rounding import (
    DOUBLE,
    LIBRARY_ULPS,
    bound_rounding,
    round_up,
    tiny,
)
from lipaudit.wings.certificates.symbols import Interval

GRID_POINTS = 65

Function = Callable[[Tensor], Tensor]

DerivativeBound = Callable[[Tensor, Tensor], Tensor]
"""Takes the ends l, u of ranges and returns a bound of |f''| or |f'''| on [l, u]."""


@dataclass(frozen=True)
class SmoothFunction:
    """A function of one real number, with bounds of its second and third derivatives.

    Attributes:
        value: f.
        second, third: no less than sup |f''| and sup |f'''| on [l, u].
        offset: terms of f's formula, |x| or 1, that its rounding is relative to beside |f|.
    """

    value: Function
    second: DerivativeBound
    third: DerivativeBound
    offset: Function = torch.zeros_like

    def find_derivatives(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return f'(x) and f''(x), (*shape) each, by autograd.

        The derivatives only choose the parabola next to f, so their rounding does not matter.
        Gradients are enabled here, because the model may run in no-grad or inference mode.
        """
        with torch.inference_mode(mode=False), torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.value(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x)
        return slope.detach(), bend


def relax(
    z: Form,
    f: SmoothFunction,
    *,
    known_range: tuple[float, float] | Interval = (-math.inf, math.inf),
    positive: bool = False,
) -> Form:
    """Return a form of f(z), entry by entry: a parabola in z plus a bounded difference.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. At order 1 the parabola is a line, because forms have no products
    of symbols. The difference of f and the parabola is bounded at grid points and between them.
    The middle of its range is added to the centre, and the radius to the slack.

    Args:
        z: the argument, a form.
        f: the function.
        known_range: bounds of the argument that are known in addition to the range of the form.
        positive: whether f is only defined for numbers > 0.

    Raises:
        UnboundedError: the range of z is not finite, or not in the domain of f.
    """
    low, high = z.range()
    low = low.clamp(*known_range)
    high = high.clamp(*known_range)
    require_finite(low, high)
    if positive and not (low > 0).all():
        raise UnboundedError
    slope, bend = f.find_derivatives((low + high) / 2)
    parabola = _choose_parabola(z, f, low, high, slope, bend)
    require_finite(*parabola)
    # The parabola is around c, the centre of z plus the middle of the range of its quadratic part.
    least, largest = _bound_at_points(z.shifted_centre, f, low, high, parabola)
    widening = _bound_between_points(f, low, high, bend, parabola)
    least = least - widening
    largest = largest + widening
    # The difference is in [least, largest] = offset +- radius.
    offset = (least + largest) / 2
    radius = round_up(torch.maximum(largest - offset, offset - least))
    return _apply_parabola(z, parabola, offset, radius)


def _bound_between_points(
    f: SmoothFunction, low: Tensor, high: Tensor, bend: Tensor, parabola: Parabola
) -> Tensor:
    """Return how far d = f - parabola can leave its chord between grid points: h^2 / 8 sup |d''|.

    d is evaluated at grid points with distance h on [low, high] (`_bound_at_points`). The result
    extends these bounds to all points in between. The parabola is a (x - c) + b (x - c)^2, so
    d'' = f'' - 2 b. It is bounded in two ways: by sup |f''| + 2 |b|, and from the middle m of the
    range, where f''(m) is `bend`, by |d''(m)| + sup |f'''| |x - m|.
    """
    sup_second = f.second(low, high)
    # |d''(m)|. f''(m) by autograd may be off by a share of itself, or, where its terms cancel, of
    # sup |f''|: 2^-30 of both leaves room.
    at_middle = (bend - 2 * parabola.b).abs() * (1 + 2.0**-30) + 2.0**-30 * sup_second
    # |x - m| is at most half the width; 0.51 is 1/2 rounded up.
    from_middle = at_middle + f.third(low, high) * (high - low) * 0.51
    # fmin skips NaN: autograd has no f''(m) for softplus below -710 and mish above 710.
    bend_bound = torch.fmin(sup_second + 2 * parabola.b.abs(), from_middle)
    # Grid points are rounded, so two of them may be more than h apart. A point is computed with
    # two or three roundings of numbers of at most the larger end: 8 are enough for both points.
    rounding = bound_rounding(8, DOUBLE) * torch.maximum(low.abs(), high.abs())
    h = round_up((high - low) / (GRID_POINTS - 1) + rounding)
    return round_up(h.square() / 8 * bend_bound)


class Parabola(NamedTuple):
    """a (z - c) + b (z - c)^2 of every entry of a form z with the shifted centre c; float64."""

    a: Tensor
    b: Tensor


def _choose_parabola(
    z: Form, f: SmoothFunction, low: Tensor, high: Tensor, slope: Tensor, bend: Tensor
) -> Parabola:
    """Return the parabola a (z - c) + b (z - c)^2 that is close to f on [low, high].

    Any a and b are valid, because the difference from f is bounded afterwards. m is the middle
    of the range, w half its width, and chord the slope between its ends.
    Order 1: a = chord and b = 0. Order 2: b = (f(u) - 2 f(m) + f(l)) / (2 w^2), and the slope at m
    is f'(m) + 3/4 (chord - f'(m)). This is best for a cubic: around m, w^3 T_3(t / w) / 4 =
    t^3 - 3/4 w^2 t is the smallest t^3 minus a line on [-w, w], and t^3 has the slope 0 at m and
    the chord w^2. a and b are rounded to the dtype of the coefficients that they multiply, so that
    the difference is taken from the parabola that is really used.

    Args:
        z: the argument, with the shifted centre c.
        f: the function.
        low: l, the lower end of the range of z.
        high: u, its upper end.
        slope: f'(m).
        bend: f''(m).
    """
    dtype = z.symbols.dtype
    c = z.shifted_centre
    m = (low + high) / 2
    w = (high - low) / 2
    at_low = f.value(low)
    at_high = f.value(high)
    # In a narrow range, the difference of f at the ends is only rounding: take f'(m).
    is_wide = w > 1e-6 * m.abs() + 1e-12
    chord = torch.where(is_wide, (at_high - at_low) / (2 * w), slope)
    if z.symbols.order == 1:
        a = round_to(chord, dtype)
        return Parabola(a, torch.zeros_like(a))
    # A second difference cancels more digits, so the limit of the width is larger.
    second_difference = (at_high - 2 * f.value(m) + at_low) / (2 * w.square())
    is_wide = w > 1e-4 * m.abs() + 1e-6
    b = torch.where(is_wide, second_difference, bend / 2) * is_worth_squaring(z)
    # The slope at m is 3/4 of the way from f'(m) to the chord; without a square it is the chord.
    share = torch.where(b == 0, 1.0, 0.75)
    a = slope + share * (chord - slope)
    # So far a is the slope of the parabola at m. The formula a (z - c) + b (z - c)^2 needs the
    # slope at c.
    a = a - 2 * b * (m - c)
    return Parabola(round_to(a, dtype), round_to(b, dtype))


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 numbers rounded to the precision of another dtype."""
    return x.to(dtype).to(DOUBLE)


def _bound_at_points(
    c: Tensor, f: SmoothFunction, low: Tensor, high: Tensor, parabola: Parabola
) -> Interval:
    """Return bounds of the least and largest f(x) - a (x - c) - b (x - c)^2 at grid points.

    The points are spread evenly on [low, high]; the bounds include the rounding of each value.
    """
    least = torch.full_like(low, torch.inf)
    largest = torch.full_like(low, -torch.inf)
    # One grid point at a time: 65 tensors at once would not fit into the cache.
    for share in torch.linspace(0, 1, GRID_POINTS, dtype=DOUBLE).tolist():
        x = high  # the last point exactly
        if share < 1:
            x = torch.lerp(low, high, share).clamp(low, high)
        value = f.value(x)
        step = x - c
        linear = parabola.a * step
        square = parabola.b * step.square()
        d = value - linear - square
        # Rounding is a share of the sizes of all terms. f itself may be computed from terms that
        # are larger than its value (`offset`). The error of torch's functions is at most
        # LIBRARY_ULPS units in the last place, two roundings each. Twice as many leave room for
        # the products and differences.
        size = value.abs() + linear.abs() + square.abs() + f.offset(x).abs()
        rounding = bound_rounding(4 * LIBRARY_ULPS, DOUBLE) * size
        least = torch.minimum(least, d - rounding)
        largest = torch.maximum(largest, d + rounding)
    return least, largest


def _apply_parabola(z: Form, parabola: Parabola, offset: Tensor, radius: Tensor) -> Form:
    """Return the form a (z - c) + b (z - c)^2 + offset +- radius.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. Only at order 2 it has coefficients of products of two input
    symbols, and only then b is not 0.

    Args:
        z: a form; c is its centre plus the middle of the range of its quadratic part.
        parabola: a and b of each entry, (*shape).
        offset: (*shape).
        radius: (*shape), a bound of any further error.
    """
    a, b = parabola
    symbols = z.symbols
    dtype = symbols.dtype
    slope = a.abs()
    # a t, for each coefficient t of z. The product is rounded once; two roundings leave room.
    dense, blocks = z.map_coefficients(lambda t: t * a.to(dtype))
    slack = slope * z.slack + bound_rounding(2, dtype) * slope * z.symbol_radius
    slack = radius + slack + z.symbol_count * tiny(dtype)
    if symbols.order == 2:
        # The square. z - c = L + R with L linear in the input: b L^2 becomes coefficients.
        symbols.add_squares(dense, z.dense[: symbols.inputs], b.to(dtype))
        # The rest of the square, b (2 L R + R^2), lies in b [-cross, cross + square]. That is
        # b square / 2 +- |b| (cross + square / 2).
        cross, square = bound_square_rest(z.radii.linear, z.rest_radius)
        shift = a * z.centre_shift  # coefficients are around the centre of z, not around c
        offset = offset + b * square / 2 - shift
        slack = slack + b.abs() * (cross + square / 2)
        # And four roundings. Of the offset: a few float64 products and sums; 8 leaves room.
        slack = slack + bound_rounding(8, DOUBLE) * (offset.abs() + shift.abs())
        # Of the coefficients of b L^2: a few products and a sum; 8 leaves room.
        slack = slack + bound_rounding(8, dtype) * b.abs() * z.radii.linear.square()
        # Of the sums of b L^2 and a times the quadratic coefficients of z: the latter's share.
        slack = slack + bound_rounding(1, dtype) * slope * z.radii.quadratic
        # Underflow: fewer than four times for each coefficient of an input symbol or product.
        slack = slack + 4 * symbols.first_error * tiny(dtype) * (1 + b.abs())
    return Form(offset, dense, round_up(slack, roundings=16), symbols, blocks=blocks)


def is_worth_squaring(z: Form) -> Tensor:
    """Return a mask of entries for which L^2 is worth keeping as coefficients, at order 2.

    z = c + L + R, with L linear in the input. The error radius of (z - c)^2 is then
    2 |L| |R| + R^2 / 2. Without coefficients it is (|L| + |R|)^2 / 2, which is larger if
    |L| > 2 |R|.
    """
    return z.radii.linear > 2 * z.rest_radius


def bound_square_rest(linear: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of the cross term |2 L R| and of R^2, for |L| <= linear and |R| <= rest.

    With them, (L + R)^2 - L^2 = 2 L R + R^2 lies in [-cross, cross + square].
    """
    return round_up(2 * linear * rest), round_up(rest.square())


def _constant(value: float) -> DerivativeBound:
    """Return a function of the ends (low, high) of a range that is always `value`.

    `SmoothFunction` needs such functions as bounds of its second and third derivative.
    """
    return lambda low, high: torch.full_like(low, value)


# The suprema of |f''| and |f'''|: of gelu at 0 and 0.792, of tanh at 0.658 and 0, of sigmoid at
# 1.317 and 0, of silu at 0 and 1.032, of erf at 0.707 and 0, of softplus
# those of the sigmoid's first two derivatives, of mish at -0.088 and 0.716; those of exp, of the
# logarithm and of powers at an end.
# Tested on a grid with mpmath.
GELU = SmoothFunction(F.gelu, _constant(0.7979), _constant(0.7789), torch.abs)
TANH_GELU = SmoothFunction(
    partial(F.gelu, approximate="tanh"), _constant(0.7979), _constant(0.7768), torch.abs
)
SILU = SmoothFunction(F.silu, _constant(0.5), _constant(0.3083), torch.abs)
TANH = SmoothFunction(torch.tanh, _constant(0.7699), _constant(2.0))
SIGMOID = SmoothFunction(torch.sigmoid, _constant(0.0963), _constant(0.125))
EXP = SmoothFunction(
    torch.exp, lambda low, high: round_up(high.exp()), lambda low, high: round_up(high.exp())
)


def _make_power(value: Function, p: float, factor: float) -> SmoothFunction:
    """Return a power x^p or the logarithm on x > 0, with bounds of its derivatives on a range.

    The bounds are for functions with |f''(x)| = factor x^(p - 2) and p < 1, so that
    |f'''(x)| = factor (2 - p) x^(p - 3). A power has factor = |p (p - 1)|; the logarithm has p = 0
    and factor = 1.

    Args:
        value: the function f.
        p: the exponent.
        factor: the factor of |f''|.
    """
    return SmoothFunction(
        value,
        # |f''| and |f'''| fall with x: on [low, high] they are largest at low. Of 32 roundings,
        # 2 LIBRARY_ULPS = 16 are for the power of torch; products have one each.
        second=lambda low, high: round_up(factor * low ** (p - 2), roundings=32),
        third=lambda low, high: round_up(factor * (2 - p) * low ** (p - 3), roundings=32),
    )


RSQRT = _make_power(torch.rsqrt, p=-0.5, factor=0.75)
SQRT = _make_power(torch.sqrt, p=0.5, factor=0.25)
RECIPROCAL = _make_power(torch.reciprocal, p=-1.0, factor=2.0)
LOG = _make_power(torch.log, p=0.0, factor=1.0)


def gelu(input: Form, *, approximate: str = "none") -> Form:
    """Return x times the normal distribution function of x, or torch's approximation by tanh."""
    return relax(input, TANH_GELU if approximate == "tanh" else GELU)


def silu(input: Form, inplace: bool = False) -> Form:
    """Return x sigmoid(x)."""
    return relax(input, SILU)


def square(input: Form) -> Form:
    """Return x^2 = c^2 + 2 c (x - c) + (x - c)^2 as a form.

    A form is centre + linear part + quadratic part + errors +- slack. c is the shifted centre of
    x: the centre plus the middle of the range of the quadratic part. At order 2 (x - c)^2 becomes
    coefficients. At order 1 it is in [0, reach^2] with reach >= |x - c|.
    """
    symbols = input.symbols
    c = input.shifted_centre
    a = round_to(2 * c, symbols.dtype)
    reach = round_up(input.radius)
    if symbols.order == 2:
        b = torch.ones_like(c)
        offset = c.square()
        radius = torch.zeros_like(c)
    else:  # (x - c)^2 lies in [0, reach^2]
        b = torch.zeros_like(c)
        offset = c.square() + reach.square() / 2
        radius = round_up(reach.square() / 2)
    # a is 2 c, rounded to the dtype of coefficients: a (x - c) has an error of |2 c - a| |x - c|.
    # `reach` is around the centre of x, and c is shifted from the centre.
    rounding = (2 * c - a).abs() * (reach + input.centre_shift.abs())
    # The offset is rounded, too: two squares and their sum, fewer than 4 roundings.
    rounding = rounding + bound_rounding(4, DOUBLE) * (offset.abs() + c.square())
    return _apply_parabola(input, Parabola(a, b), offset, round_up(radius + rounding))


def make_unary(f: SmoothFunction, *, positive: bool = False) -> Callable[[Form], Form]:
    """Return the rule of a smooth function f: a function that takes and returns a form.

    `positive` says that f is only defined for numbers > 0.
    """
    return lambda input: relax(input, f, positive=positive)


ERF = SmoothFunction(torch.erf, _constant(0.9679), _constant(2.2568))


SOFTPLUS = SmoothFunction(
    lambda x: torch.logaddexp(x, torch.zeros_like(x)), _constant(0.25), _constant(0.0963)
)
MISH = SmoothFunction(F.mish, _constant(0.6443), _constant(0.5885), torch.abs)
# The second derivative of ELU jumps at 0: its third one has no bound.
ELU = SmoothFunction(F.elu, _constant(1.0), _constant(1e300), torch.ones_like)
SIN = SmoothFunction(torch.sin, _constant(1.0), _constant(1.0))
COS = SmoothFunction(torch.cos, _constant(1.0), _constant(1.0))


def make_monomial(n: int) -> SmoothFunction:
    """Return the function x^n, n > 2, with bounds of its second and third derivative."""

    def make_bound(k: int) -> DerivativeBound:
        """Return a function that bounds the k-th derivative of x^n on a range, for k <= n."""
        factor = float(math.perm(n, k))  # n (n - 1) ... (n - k + 1)

        def bound(low: Tensor, high: Tensor) -> Tensor:
            """Return a bound of |n (n - 1) ... (n - k + 1) x^(n - k)| on [low, high]; k <= n."""
            # |x| is largest at an end of the range. The power as repeated products, and the
            # factor, have at most n roundings: 2 n + 8 leave room for the power of torch.
            largest = torch.maximum(low.abs(), high.abs())
            return round_up(factor * largest ** (n - k), roundings=2 * n + 8)

        return bound

    return SmoothFunction(lambda x: x**n, second=make_bound(2), third=make_bound(3))


def raise_power(input: Any, exponent: Any) -> Form:
    """Return input ** exponent: whole exponents >= 1; of positive inputs also 1/2, -1/2, -1."""
    if not isinstance(input, Form) or not isinstance(exponent, int | float):
        raise NoRuleError("pow with an exponent for every entry")
    if exponent == 1:
        return input.copy()
    if exponent == 2:
        return square(input)
    # Below 1e15 the derivatives and the rounding of a power have finite bounds.
    if 2 < exponent < 1e15 and exponent == int(exponent):
        return relax(input, make_monomial(int(exponent)))
    functions = {0.5: SQRT, -0.5: RSQRT, -1: RECIPROCAL}
    if exponent not in functions:
        raise NoRuleError(f"pow with exponent {exponent}")
    return relax(input, functions[exponent], positive=True)


def softplus(input: Form, beta: float | int = 1, threshold: float | int = 20) -> Form:
    """Return the form of log(1 + e^(beta x)) / beta, or of x if beta x is above the threshold.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack.
    """
    z = scale(input, float(beta))
    result = relax(z, SOFTPLUS)
    # Above the threshold torch returns z, which is log(1 + e^z) to within e^-threshold. exp has
    # at most 2 LIBRARY_ULPS = 16 roundings; 32 leave room.
    error = round_up(torch.exp(torch.tensor(-float(threshold), dtype=DOUBLE)), roundings=32)
    _, high = z.range()
    result.slack = round_up(result.slack + error * (high > threshold))
    if beta == 1:
        return result
    return scale(result, 1 / beta, roundings=2)  # 1 / beta is rounded once more than beta


def elu(input: Form, alpha: float | int = 1.0, inplace: bool = False) -> Form:
    """Return x where x > 0, else alpha (e^x - 1)."""
    if alpha == 1:  # the only alpha for which the slope does not jump at 0
        return relax(input, ELU)
    # relu(x) + alpha (exp(min(x, 0)) - 1).
    below = relax(cast("Form", input.clamp(None, 0.0)), EXP)
    return add(F.relu(input), scale(add(below, -1.0), alpha))


def glu(input: Form, dim: int = -1) -> Form:
    """Return the first half of an axis times the sigmoid of the second."""
    first, second = input.chunk(2, dim)
    return cast("Form", first * relax(cast("Form", second), SIGMOID))
