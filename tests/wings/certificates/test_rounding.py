"""Rounding against exact arithmetic: nothing that floats do leaves the slack."""

from fractions import Fraction
from itertools import product

import mpmath
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lipaudit.wings.certificates import curves
from lipaudit.wings.certificates.affine import linear
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.onnx_operators import OPERATORS
from lipaudit.wings.certificates.prove import ball, run
from lipaudit.wings.certificates.rounding import (
    LIBRARY_ULPS,
    bound_rounding,
    cast_up,
    round_up_sum,
)
from lipaudit.wings.certificates.symbols import Symbols

DTYPES = [torch.float32, torch.float64]


def _exact(t: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in t.double().flatten().tolist()]


def _value(form: Form, corner: list[int], place: int) -> Fraction:
    """What the form says of an entry at a corner of its symbols, without slack."""
    centre = Fraction(form.centre.flatten()[place].item())
    return centre + sum(
        s * g for s, g in zip(corner, _exact(form.generators.flatten(1)[:, place]), strict=False)
    )


def _wild(*shape: int, seed: int) -> Tensor:
    """Numbers over twelve orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (
        12 * torch.rand(shape, generator=generator) - 6
    )


def _cancelling(rows: int, n: int, seed: int) -> Tensor:
    """Weights whose products with equal inputs cancel nearly all."""
    weight = _wild(rows, n, seed=seed)
    weight[:, n // 2 :] = -weight[:, : n // 2] * (1 + 2.0**-22)
    return weight


@pytest.mark.parametrize("dtype", DTYPES, ids=["single", "double"])
@pytest.mark.parametrize("seed", range(4))
def test_chains_of_affine_maps_in_rational_arithmetic(dtype, seed):
    """Two maps that cancel, a residual and a scale, at the corners, to the last digit."""
    first, second = _cancelling(6, 8, seed), _wild(6, 6, seed=seed + 50)
    bias, x = _wild(6, seed=seed + 10), 1 + _wild(1, 8, seed=seed + 20).abs() * 1e-6
    start = ball(x, 1e-3, dtype=dtype, slack_share=1e9)  # slack stays slack
    once = linear(start, first, bias)
    form = (linear(once, second) + once) * 0.1
    tenth = Fraction(0.1)
    generator = torch.Generator().manual_seed(seed)
    for corner in (2 * torch.randint(2, (10, 8), generator=generator) - 1).tolist():
        point = [_value(start, corner, place) for place in range(8)]
        hidden = [
            sum(w * v for w, v in zip(_exact(row), point, strict=True)) + b
            for row, b in zip(first, _exact(bias), strict=True)
        ]
        for place, row in enumerate(second):
            truth = sum(w * v for w, v in zip(_exact(row), hidden, strict=True))
            truth = (truth + hidden[place]) * tenth
            off = abs(truth - _value(form, corner, place))
            assert off <= Fraction(form.slack.flatten()[place].item())


ROUNDS = torch.tensor([[1.0, 2.0**-24, 2.0**-24]])
"""Single precision, in which the sum is 1."""


@pytest.mark.parametrize(
    ("function", "truth"),
    [
        (lambda x: torch.addmm(ROUNDS[:, :1], x, x, beta=0.1), 1 + Fraction(0.1)),
        (lambda x: OPERATORS["Gemm"](x, x, ROUNDS[:, :1], beta=0.1), 1 + Fraction(0.1)),
        (lambda x: torch.einsum("bi,ij->b", x, ROUNDS), 1 + Fraction(2.0**-23)),
        (lambda x: torch.einsum("ij,bi->bi", ROUNDS, x), 1 + Fraction(2.0**-23)),
    ],
)
def test_constants_that_one_call_combines_are_not_rounded_as_the_model_does(function, truth):
    """A ball of one point, 1: only rounding is off."""
    form = run(function, ball(torch.ones(1, 1), 0.0))
    off = abs(Fraction(form.centre.item()) - truth)
    assert off <= Fraction(form.slack.item())
    assert form.slack.item() <= 1e-14


def test_weights_that_are_0_in_single_precision_are_in_the_slack():
    """Coefficients have this precision, and one of 2^120 times the weight is 2^-32."""
    x = ball(torch.zeros(1, 1), 2.0**120, dtype=torch.float32)
    _, high = linear(x, torch.tensor([[2.0**-152]], dtype=torch.float64)).range()
    assert high.item() >= 2.0**-32


@pytest.mark.parametrize(("norm", "size"), [("linf", 5e-39), ("l2", 1e-19)])
def test_radii_on_a_device_that_flushes_small_numbers_to_zero(norm, size):
    """Coefficients of boxes, and squares of coefficients, below 2^-126."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        symbols = Symbols(4096, norm, order=1, dtype=torch.float32, rules={})
        radius = symbols.bound_parts(torch.full((4096, 512), size)).linear.amin().item()
    finally:
        torch.set_flush_denormal(False)
    assert radius >= size * (4096 if norm == "linf" else 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=["single", "double"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_attention_and_norms_in_high_precision(dtype, order, scale):
    """A token-mixing block on a ball so small that rounding is all that is off."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 3, 4, generator=generator) * scale
    weight = torch.randn(4, 4, generator=generator) / scale
    start = ball(x, 1e-12 * scale, order=order, dtype=dtype)

    def block(t):
        y = F.layer_norm(t, (4,), None, None, 1e-5 * scale**2)
        y = F.gelu((y @ y.transpose(-1, -2)).softmax(-1) @ F.linear(t, weight))
        return F.silu(y) * torch.tanh(y) + torch.sigmoid(y)

    low, high = run(block, start).range()
    with mpmath.workdps(50):
        truth = _block(
            mpmath.matrix(x[0].double().tolist()), mpmath.matrix(weight.tolist()), scale
        )
        for i in range(3):
            for j in range(4):
                assert mpmath.mpf(low[0, i, j].item()) <= truth[i][j]
                assert truth[i][j] <= mpmath.mpf(high[0, i, j].item())
    assert (high - low).amax() < 1e-3


def _block(x, weight, scale):
    rows = []
    for i in range(3):
        mean = sum(x[i, :]) / 4
        var = sum((v - mean) ** 2 for v in x[i, :]) / 4
        root = mpmath.sqrt(var + mpmath.mpf(1e-5 * scale**2))
        rows.append([(v - mean) / root for v in x[i, :]])
    normed, values, out = mpmath.matrix(rows), x * weight.T, []
    for i in range(3):
        p = (normed[i, :] * normed.T).apply(mpmath.exp)
        out.append([_activations(m / sum(p)) for m in p * values])
    return out


def _activations(m):
    y = m * mpmath.ncdf(m)
    sigmoid = 1 / (1 + mpmath.exp(-y))
    return y * sigmoid * mpmath.tanh(y) + sigmoid


def _tanh_gelu(x):
    inner = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x / 2 * (1 + mpmath.tanh(inner))


SMOOTH = {
    "gelu": (curves.GELU, lambda x: x * mpmath.ncdf(x)),
    "tanh-gelu": (curves.TANH_GELU, _tanh_gelu),
    "silu": (curves.SILU, lambda x: x / (1 + mpmath.exp(-x))),
    "tanh": (curves.TANH, mpmath.tanh),
    "sigmoid": (curves.SIGMOID, lambda x: 1 / (1 + mpmath.exp(-x))),
    "exp": (curves.EXP, mpmath.exp),
    "rsqrt": (curves.RSQRT, lambda x: 1 / mpmath.sqrt(x)),
    "sqrt": (curves.SQRT, mpmath.sqrt),
    "reciprocal": (curves.RECIPROCAL, lambda x: 1 / x),
    "erf": (curves.ERF, mpmath.erf),
    "softplus": (curves.SOFTPLUS, lambda x: mpmath.log1p(mpmath.exp(x))),
    "mish": (curves.MISH, lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x)))),
    "elu": (curves.ELU, lambda x: x if x > 0 else mpmath.expm1(x)),
    "log": (curves.LOG, mpmath.log),
    "sin": (curves.SIN, mpmath.sin),
    "cos": (curves.COS, mpmath.cos),
    "cube": (curves.make_monomial(3), lambda x: x**3),
    "seventh": (curves.make_monomial(7), lambda x: x**7),
}
POSITIVE = ("rsqrt", "sqrt", "reciprocal", "log")


def _arguments(name: str) -> Tensor:
    x = torch.cat([torch.linspace(-12, 12, 60), _wild(40, seed=1).clamp(-30, 30)]).double()
    return x.abs() + 1e-9 if name in POSITIVE else x


@pytest.mark.parametrize("name", SMOOTH)
def test_functions_of_the_library_and_their_derivatives_are_as_close_as_assumed(name):
    f, exact = SMOOTH[name]
    x = _arguments(name)
    allowed = (
        2
        * LIBRARY_ULPS
        * bound_rounding(1, torch.float64)
        * (f.value(x).abs() + f.offset(x).abs())
    )
    with mpmath.workdps(40):
        for value, point, off in zip(*(t.tolist() for t in (f.value(x), x, allowed)), strict=True):
            assert abs(mpmath.mpf(value) - exact(mpmath.mpf(point))) <= off
        for middle in (0.8, 2.5, 6.0) if name in POSITIVE else (-3.0, 0.0, 0.9):
            low, high = torch.tensor([[middle - 0.5], [middle + 0.5]], dtype=torch.float64)
            limits = {2: f.second(low, high).item(), 3: f.third(low, high).item()}
            for step, (order, limit) in product(range(-20, 21), limits.items()):
                x = mpmath.mpf(middle + step / 40)
                assert abs(mpmath.diff(exact, x, order)) <= limit * (1 + 1e-12)


def test_helpers_err_upwards():
    values = torch.rand(1000, dtype=torch.float64)
    assert (cast_up(values, torch.float32).double() >= values).all()
    single = torch.rand(1000, 20)
    total = round_up_sum(single.sum(0), 1000)
    exact = [sum(_exact(single[:, column])) for column in range(20)]
    assert all(Fraction(t) >= e for t, e in zip(total.tolist(), exact, strict=True))
    assert (total / single.double().sum(0) < 1 + 1e-4).all()
