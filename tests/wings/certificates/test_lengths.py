"""Lengths of vectors against corners, directions and spheres; what they make closer."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lipaudit.wings.certificates.bilinear import matmul, mul
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.prove import ball, run
from lipaudit.wings.certificates.vector_lengths import bound_lengths

N, K, VECTORS, ERRORS = 3, 4, 5, 6


def _form(norm, dtype, seed=0, scale=1.0):
    """A form with random rows of every kind: vectors of K along the middle axis."""
    symbols = ball(torch.zeros(1, N), 1.0, norm=norm, order=2, dtype=dtype).symbols
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(symbols.first_error + ERRORS, 2, K, VECTORS, generator=generator)
    rows = (scale * rows).to(dtype)
    slack = 0.1 * scale * torch.rand(2, K, VECTORS, generator=generator, dtype=torch.float64)
    return Form(torch.zeros_like(slack), rows, slack, symbols)


def _corners(n):
    return torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * n)


def _inputs(norm):
    e = torch.randn(4000, N, generator=torch.Generator().manual_seed(1)).double()
    if norm == "l2":
        return F.normalize(e, dim=1)
    return torch.cat([_corners(N), e.clamp(-1, 1)])


def _longest(form, weight, axis, norm):
    """The largest lengths of both parts over points, corners of errors and of slack."""
    n, first = form.symbols.inputs, form.symbols.first_error
    g, e = form.generators.double(), _inputs(norm)
    i, j = form.symbols.pairs
    linear = torch.einsum("bn,n...->b...", e, g[:n]) * weight
    quadratic = torch.einsum("bn,n...->b...", e[:, i] * e[:, j], g[n:first])
    errors = torch.einsum("bn,n...->b...", _corners(ERRORS), g[first:])
    of_errors = (errors.abs() + form.slack) * weight  # corners of either sign
    ends = [torch.linalg.vector_norm(t, dim=axis + 1).amax(0) for t in (linear, of_errors)]
    return ends[0], torch.linalg.vector_norm(quadratic * weight, dim=axis + 1).amax(0), ends[1]


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_no_vector_is_longer_and_the_bound_is_near(norm, dtype, axis, scale):
    form = _form(norm, dtype, seed=axis, scale=scale)
    weight = torch.rand(form.shape, generator=torch.Generator().manual_seed(2)).double()
    linear, quadratic, errors = _longest(form, weight, axis, norm)
    long, rest = (each.squeeze(axis) for each in bound_lengths(form, axis, weight))
    slack = torch.linalg.vector_norm(weight * form.slack, dim=axis)
    assert (long >= linear).all()
    assert (rest >= torch.maximum(quadratic, errors - slack)).all()
    assert (long <= (1.5 if norm == "linf" else 1.1) * linear).all()
    assert (rest <= 2.2 * (quadratic + errors)).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_no_vector_is_longer_where_squares_underflow(norm):
    form = _form(norm, torch.float64)
    rows = 1e-170 * form.generators
    form = Form(form.centre, rows, 1e-170 * form.slack, form.symbols)
    for bound, each in zip(bound_lengths(form, 1), (rows[:N], rows[N:]), strict=True):
        assert (bound.squeeze(1) >= each.abs().amax((0, 2))).all()  # the size of an entry


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_lengths_around_another_point(norm):
    """Far from the form, about its distance; at its centre, as without a point."""
    form = _form(norm, torch.float64)
    far = torch.full_like(form.centre, 1e3)
    _, rest = bound_lengths(form, 1, around=far)
    distance = torch.linalg.vector_norm(far, dim=1, keepdim=True)
    assert (rest >= distance).all()
    assert (rest <= 1.1 * distance).all()
    assert torch.equal(bound_lengths(form, 1, around=0 * far)[1], bound_lengths(form, 1)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_one_direction_and_a_ball_are_exact(dtype):
    """Neither the shares of many rows, nor the power that bounds a norm, cost much there."""
    symbols = ball(torch.zeros(1, N), 1.0, norm="l2", dtype=dtype).symbols
    line = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)).to(dtype)
    along = torch.linspace(0.01, 3, 700).to(dtype)[:, None] * line
    form = Form(
        torch.zeros(50).double(),
        torch.cat([2 * torch.eye(N, 50).to(dtype), along]),
        torch.zeros(50).double(),
        symbols,
    )
    long, rest = bound_lengths(form, -1)
    exact = torch.linalg.vector_norm(along.double().sum(0))
    assert 2 <= long < 2 * 1.1
    assert exact <= rest < exact * (1.01 if dtype is torch.float32 else 1 + 1e-9)


def test_many_errors_are_not_all_large_at_once():
    """Rows that point everywhere: about sqrt(2 / pi K) of what their radii add up to."""
    symbols = ball(torch.zeros(1, 1), 1.0, norm="linf").symbols
    rows = torch.randn(4001, 64, generator=torch.Generator().manual_seed(4)).double()
    rows[0] = 0
    form = Form(torch.zeros(64).double(), rows, torch.zeros(64).double(), symbols)
    _, rest = bound_lengths(form, -1)
    signs = (rows[1:] @ rows[1:].mT @ rows[1:].sign()[:, 0]).sign()
    assert torch.linalg.vector_norm(signs @ rows[1:]) <= rest
    assert rest < 0.25 * torch.linalg.vector_norm(form.nonlinear_radius)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_symbols_of_rows_and_across_them(dtype):
    """Blocks count as the stack that they fold, along rows and across them."""
    x = ball(torch.rand(1, 5, 3).double(), 0.3, norm="linf", order=2, dtype=dtype)
    form = run(lambda t: F.gelu(t), x).symbolize_slack()
    assert form.blocks
    stack = form.copy().make_dense()
    for axis in (-1, -2):
        for one, other in zip(
            bound_lengths(form.copy(), axis), bound_lengths(stack, axis), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("move", [0.01, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("weight", [-6.0, 0.0, 3.0])
def test_the_logarithm_of_a_sum_of_exponentials(order, move, weight, points, excess):
    """One key moves: the third moment then attains its bound where its weight is small."""
    centre = torch.tensor([[weight, 0.0, 0.0]])
    x = ball(centre, move, order=order, moving=torch.tensor([[True, False, False]]))
    form = x.log_softmax(-1)
    e, inputs = points(x, 50)
    assert excess(form, e, inputs.log_softmax(-1)) <= 1e-12
    if order == 2:
        share = centre.softmax(-1)[0, 0].double()
        square = share * (1 - share) * move**2
        assert (form.slack < square * torch.tensor(move).double().exp()).all()


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("gap", [1.0, 800.0])  # one below e^-709 has an inverse that overflows
@pytest.mark.parametrize("move", [0.5, 3.0, 100.0])
def test_weights_of_two_keys_end_where_the_difference_of_their_scores_does(move, gap, norm, order):
    """Scores (gap + e, -e) and one that is hidden: the weight is the sigmoid of gap + 2 e."""
    x = ball(torch.zeros(1, 1), move, norm=norm, order=order)
    scores = x * torch.tensor([1.0, -1.0, 0.0]) + torch.tensor([gap, 0.0, -math.inf])
    low, high = scores.softmax(-1).range()
    centre = torch.tensor([gap, -gap])
    for end, exact, sign in ((low, centre - 2 * move, -1), (high, centre + 2 * move, 1)):
        exact = torch.cat([exact.double().sigmoid(), torch.zeros(1).double()])
        assert (sign * (end[0] - exact) >= 0).all()
        torch.testing.assert_close(end[0], exact, rtol=1e-6, atol=1e-280)
    assert (high > 0).all()  # as every weight is, even those that float64 cannot tell from 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("move", [0.1, 1.0, 10.0])
def test_no_weight_leaves_the_ends_of_its_range(move, norm, dtype, points):
    turn = torch.randn(N, 6, generator=torch.Generator().manual_seed(7))
    x = ball(torch.zeros(1, N), move, norm=norm, order=1, dtype=dtype)
    low, high = run(lambda z: (z @ turn).softmax(-1), x).range()
    _, inputs = points(x, 2000)
    weights = (inputs @ turn.double()).softmax(-1)
    assert (low <= weights.amin(0)).all()
    assert (high >= weights.amax(0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_products_know_the_symbols_that_both_factors_share(norm, dtype, points, excess):
    """Of entries e_i: e_i^2 lies in [0, 1], and on the L2 ball |e_i e_j| <= 1/2."""
    x = ball(torch.zeros(1, N, 1), 1.0, norm=norm, order=1, dtype=dtype)
    product = run(lambda z: z @ z.mT, x)
    e, inputs = points(x, 400)
    assert excess(product, e, inputs @ inputs.mT) <= 1e-13
    low, high = (end[0] for end in product.range())
    most = torch.full((N, N), 0.5 if norm == "l2" else 1.0).double()
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(high, most.fill_diagonal_(1.0), **close)
    torch.testing.assert_close(low, -most.fill_diagonal_(0.0), **close)


@pytest.mark.parametrize("slack_share", [0.0, math.inf], ids=["block", "slack"])
@pytest.mark.parametrize("first", [0, 2], ids=["input", "error"])
@pytest.mark.parametrize("swap", [False, True])
def test_every_kind_of_symbol_counts_in_full_in_a_product(first, slack_share, swap):
    """d = (a + b) / 2 and d + c: the ends are d (d + c) = 2 at a = b = c, and ab/4 r_-^2 = 1/2."""
    symbols = ball(torch.zeros(1, 2), 1.0, slack_share=slack_share).symbols
    symbols.add_errors(torch.ones(2))
    none, shared = torch.zeros(1, 1).double(), torch.zeros(4, 1, 1).double()
    shared[first : first + 2] = 0.5
    pair = [Form(none, shared, none + slack, symbols) for slack in (1.0, 0.0)]
    low, high = matmul(*(pair[::-1] if swap else pair)).range()
    assert 2 <= high < 2 + 1e-9
    assert -0.5 - 1e-9 < low <= -0.5


@pytest.mark.parametrize("slack_share", [0.0, math.inf], ids=["block", "slack"])
def test_the_mean_of_the_values_is_subtracted_where_weights_are_off(slack_share):
    """The centre sums to 17 / 16, a row to 1: weights (0.25, 0.75) are at an end of the range."""
    symbols = ball(torch.zeros(1, 1), 1.0, slack_share=slack_share).symbols
    p, off = torch.tensor([[0.3125, 0.75]]).double(), torch.tensor([[0.0625, 0.0]]).double()
    weights = Form(p, torch.zeros(1, 1, 2).double(), off, symbols)
    weights.weights = (p - p, p / p)
    values = torch.tensor([[0.0], [1.0]]).double()
    still = Form(values, torch.zeros(1, 2, 1).double(), 0 * values, symbols)
    low, high = matmul(weights, still).range()
    assert 0.75 <= high < 0.75 + 1e-9
    assert 0.65625 - 1e-9 < low <= 0.65625


@pytest.mark.parametrize("order", [1, 2])
def test_what_scales_a_whole_row_of_weights_is_not_seen_behind_attention(order):
    """The row sums to one, so an error p eps of it is none; of those of its entries, the slack."""
    symbols = ball(torch.zeros(1, 1), 1.0, order=order).symbols
    p, off = torch.tensor([[0.25, 0.75]]).double(), 1e-3
    scaled = torch.zeros(symbols.first_error + 1, 1, 2, dtype=torch.float64)
    scaled[-1] = 0.1 * p
    symbols.add_errors(torch.ones(1))
    weights = Form(p, scaled, torch.full_like(p, off), symbols)
    weights.weights = (p - p, p / p)
    values = torch.tensor([[0.0], [1.0]]).double()
    still = Form(values, torch.zeros(symbols.first_error, 2, 1).double(), 0 * values, symbols)
    low, high = matmul(weights, still).range()
    least = off * (values - 0.75).abs().sum()
    torch.testing.assert_close((high - low) / 2, least.view(1, 1), rtol=1e-9, atol=0)


def _pair(norm, dtype, seed, shapes):
    """Two forms of the same symbols with random rows of every kind; squares mostly positive."""
    symbols = ball(
        torch.zeros(1, N), 1.0, norm=norm, order=2, dtype=dtype, slack_share=math.inf
    ).symbols
    symbols.add_errors(torch.ones(ERRORS))
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        rows = torch.randn(symbols.first_error + ERRORS, *shape, generator=generator)
        rows[N : symbols.first_error] += 1
        centre, slack = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
        return Form(centre, rows.to(dtype), 0.1 * slack, symbols)

    return [draw(shape) for shape in shapes]


def _at(form, e, errors):
    """The values without slack of a form of many points, (points, *shape)."""
    i, j = form.symbols.pairs
    symbols = torch.cat([e, e[:, i] * e[:, j], errors], 1)
    return form.centre + torch.einsum("bs,s...->b...", symbols, form.generators.double())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    ("plain", "shapes"),
    [
        (torch.matmul, [(2, 3, K), (2, K, 2)]),
        (torch.mul, [(2, K), (2, K)]),
        (lambda x, y: torch.square(x) + y, [(2, K), (2, K)]),
        (lambda x, y: F.gelu(x) + y, [(2, K), (2, K)]),
    ],
    ids=["matmul", "mul", "square", "gelu"],
)
def test_no_function_at_order_two_leaves_its_form(plain, shapes, norm, dtype, seed):
    """All corners of errors at points of the ball, slack of either sign."""
    x, y = _pair(norm, dtype, seed, shapes)
    form, e, errors = plain(x, y), _inputs(norm)[::40], _corners(ERRORS)
    e, errors = e.repeat_interleave(len(errors), 0), errors.repeat(len(e), 1)
    signs = torch.randn(len(e), 2, generator=torch.Generator().manual_seed(seed)).sign()
    factors = (
        _at(z, e, errors) + sign.view(-1, *[1] * z.ndim) * z.slack
        for z, sign in zip((x, y), signs.mT.double(), strict=True)
    )
    assert ((plain(*factors) - _at(form, e, errors)).abs() <= form.slack).all()


LINEAR, SQUARE, ERROR = 0, 1, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    ("product", "x", "y", "ends"),
    [
        # Several places of a sum: their sizes add up.
        (matmul, {ERROR: [1, -2]}, {LINEAR: [2, -1]}, (-4, 4)),
        # Entries: eps^2, -2 eps^2, e eps and 2 e^2 eps.
        (mul, {ERROR: [1]}, {ERROR: [1]}, (0, 1)),
        (mul, {ERROR: [1]}, {ERROR: [-2]}, (-2, 0)),
        (mul, {LINEAR: [1]}, {ERROR: [1]}, (-1, 1)),
        (mul, {SQUARE: [2]}, {ERROR: [1]}, (-2, 2)),
    ],
)
def test_products_at_order_two_that_are_known(product, x, y, ends, norm, dtype):
    """Of forms in one input e and one error eps, centre 0."""
    symbols = ball(torch.zeros(1, 1), 1.0, norm=norm, order=2, dtype=dtype).symbols
    symbols.add_errors(torch.ones(1))

    def make(rows, shape):
        stack = torch.zeros(3, *shape, dtype=dtype)
        for place, row in rows.items():
            stack[place] = torch.tensor(row).view(shape)
        return Form(torch.zeros(shape).double(), stack, torch.zeros(shape).double(), symbols)

    places = len(next(iter(x.values())))
    low, high = product(make(x, (1, places)), make(y, (places, 1))).range()
    near = 1e-4 if dtype is torch.float32 else 1e-9
    assert ends[0] - near <= float(low) <= ends[0]
    assert ends[1] <= float(high) <= ends[1] + near


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("eps", [0.03, 0.3, 3.0])
def test_attention_over_few_and_many_symbols(norm, dtype, order, eps, points, excess):
    x = torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(0))
    form = ball(x, eps / order**2, norm=norm, order=order, dtype=dtype)
    e, inputs = points(form, 400)
    for waves in (1.0, 8.0):  # weights that hardly move, and that move from 0 to 1
        # Channels that move alike: their difference sees what rows of values share.
        both = torch.tensor([[1.0, 1.0, 0.5], [0.5, 0.6, -1.0]])
        turn = torch.tensor([[1.0], [-1.0], [0.2]])

        def attend(z, waves=waves, both=both, turn=turn):
            return (
                (waves * z @ z.mT).softmax(-1) @ (z.tanh() @ both.to(z.dtype)) @ turn.to(z.dtype)
            )

        assert excess(run(attend, form.copy()), e, attend(inputs)) <= 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("moved", ["slack", "input"])
def test_what_weights_are_off_by_moves_all_channels_of_a_value(moved, order, dtype):
    """Weights 0.5 -+ 0.1 of values (e_j, e_j, -e_j): 0.6 (e_1 + e_2) at most, sums of all e_j.

    Slack of weights and values of the input, or weights of the input and values of errors.
    """
    symbols = ball(torch.zeros(1, 2), 1.0, order=order, dtype=dtype).symbols
    symbols.add_errors(torch.ones(2))
    half, off = torch.full((1, 2), 0.5).double(), torch.full((1, 2), 0.1).double()
    move = torch.zeros(symbols.inputs, 1, 2, dtype=dtype)
    if moved == "input":
        move[:, 0] = 0.1 * torch.eye(2)
    weights = Form(half, move, off * (moved == "slack"), symbols)
    weights.weights = (0 * half, 2 * half)
    rows = torch.zeros(symbols.count, 2, 3)
    first = 0 if moved == "slack" else symbols.first_error
    rows[first : first + 2] = torch.eye(2)[..., None] * torch.tensor([1.0, 1.0, -1.0])
    none = torch.zeros(2, 3).double()
    out = matmul(weights, Form(none, rows.to(dtype), none, symbols))
    assert torch.allclose(out.range()[1], torch.tensor(1.2).double(), rtol=0, atol=1e-5)
    for signs, most in (((1.0, -1.0, 0.0), 0.0), ((1.0, 1.0, 1.0), 1.2), ((1.0, 0.0, 1.0), 0.0)):
        low, high = (out @ torch.tensor(signs)[:, None].to(dtype)).range()
        assert most <= high < most + 1e-5
        assert -most - 1e-5 < low <= -most
