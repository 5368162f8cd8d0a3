"""Every rule against the operation itself, at points of the ball in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lipaudit.wings.certificates.form import NoRuleError, UnboundedError
from lipaudit.wings.certificates.prove import ball, run
from tests.wings.certificates.operations import OPERATIONS, TOKENS, WIDTH, image, weights

DTYPES = (torch.float32, torch.float64)
LARGE = [("linf", 1, 0.2, 0), ("linf", 2, 0.2, 1), ("l2", 1, 0.2, 1), ("l2", 2, 0.2, 0)]
SMALL = [("linf", 1, 1e-6, 0), ("linf", 2, 1e-6, 1), ("l2", 2, 1e-6, 1), ("l2", 1, 1e-6, 0)]
"""Norm, order, radius and dtype; for every second rule the dtypes are swapped.

Each rule meets all large balls, and of the small ones both norms, orders and dtypes once.
"""


NEVER_SMALL = ("softplus-jumps", "alpha-rounded")  # a jump, and rounding of a large constant


@pytest.mark.parametrize(("place", "name"), [*enumerate(OPERATIONS)])
def test_no_point_of_the_ball_leaves_a_form(place, name, points, excess):
    """What a rule says is also of use: errors vanish beside the linear part of a small ball.

    Changes in place reach every name.
    """
    operation = OPERATIONS[name]
    for norm, order, eps, at in LARGE + SMALL[place // 2 % 2 :: 2]:
        dtype, small = DTYPES[(place + at) % 2], eps < 0.2
        x = ball(weights(1, TOKENS, WIDTH, seed=9), eps, norm=norm, order=order, dtype=dtype)
        e, inputs = points(x, 400)  # forms take nearly all of the time
        truth = operation(inputs)
        # The rules alone, and the pass that skips what a trial says is not read.
        form = operation(x) if small else run(operation, x)
        assert form.shape[1:] == truth.shape[1:]
        off, about = excess(form, e, truth), (norm, order, eps, dtype)
        assert off <= 1e-13 * truth.abs().amax(), about
        if small and name not in NEVER_SMALL:
            assert form.nonlinear_radius.sum() <= 5e-5 * form.radii.linear.sum(), about


@pytest.mark.parametrize(
    "function",
    [
        *("softmax-axis", "group_norm", "layer_norm-axes", "grouped-queries", "heads"),
        "masked_fill-names",
        lambda x: torch.softmax(x.flatten(1), dim=0),
        lambda x: F.max_pool2d(image(x), 2, 1)[:, 0],
    ],
)
def test_what_mixes_rows_is_read_in_all_of_them(function, points, excess):
    """A pass computes rows that are read: these need the others, or a part of a mask."""
    function = OPERATIONS.get(function, function)
    x = ball(weights(1, TOKENS, WIDTH, seed=9), 0.1)
    e, inputs = points(x, 60)
    form = run(lambda t: function(t)[:, 0], x)
    truth = torch.cat([function(each[None])[:, 0] for each in inputs])
    assert excess(form, e, truth) <= 1e-13


class Mixed(nn.Module):
    """Layers of torch whose fused paths a form must not take."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, "gelu", batch_first=True), 1
        )
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, x):
        x = self.encoder(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


def test_encoder_layers_of_torch(points, excess):
    torch.manual_seed(0)
    model = Mixed().eval()
    for order in (1, 2):
        x = ball(weights(1, TOKENS, WIDTH, seed=9), 0.01, norm="l2", order=order)
        form = run(model.float(), x)
        e, inputs = points(x, 60)
        with torch.no_grad():
            assert excess(form, e, model.double()(inputs)) <= 1e-13


def test_symbols_keep_what_slack_forgets():
    """y - y of an operation with an error is zero in symbols, twice the error in slack."""
    x = ball(weights(1, TOKENS, WIDTH), 0.1, slack_share=0.0)
    form = F.gelu(x)
    loose = (form - form).symbol_radius + (form - form).slack
    form.symbolize_slack()
    tight = (form - form).symbol_radius + (form - form).slack
    assert loose.amax() > 1e-3
    assert tight.amax() < 1e-12


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_order_two_is_closer(norm):
    balls = (ball(weights(1, TOKENS, WIDTH), 0.05, norm=norm, order=order) for order in (1, 2))
    first, second = (run(OPERATIONS["layer_norm"], x).range() for x in balls)
    assert (second[1] - second[0]).sum() < (first[1] - first[0]).sum()


def test_an_operation_without_a_rule_is_named_with_its_module():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Softshrink()))
    with pytest.raises(NoRuleError, match=r"operation softshrink \(in 1\.0\)"):
        run(model, ball(weights(1, TOKENS, WIDTH), 0.1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: nn.BatchNorm1d(TOKENS).train()(x),
        lambda x: torch.cdist(x, x),
        lambda x: F.rms_norm(x, (TOKENS, WIDTH)),
        lambda x: x**0.3,
        lambda x: x ** float("inf"),
        lambda x: x**1e300,
        lambda x: torch.add(x, x, out=torch.empty(1)),
        lambda x: x.cumprod(1),
        torch.sort,
        lambda x: torch.where(torch.eye(WIDTH)[:4] > 0, x, x).masked_fill(x > 0, 0.0),
        lambda x: x ** weights(WIDTH),
        lambda x: torch.einsum("bii->bi", x[:, :, :4]),
        lambda x: torch.einsum("...ik,...jk->...ij", x, x),
        lambda x: torch.einsum("bik,bjk,bjl->bil", x, x, x),
        lambda x: torch.einsum("bij,bjk->bik", x[..., :1], x),  # j, which is summed, is broadcast
        lambda x: F.linear(x, x[0]),  # weights that depend on the input
        lambda x: F.conv1d(weights(1, TOKENS, 8), x),
        lambda x: x.clone().copy_(2 * x),
        lambda x: F.max_pool2d(image(x), 2, return_indices=True),
        lambda x: F.max_pool2d(image(x)[0], 2),
        lambda x: F.max_pool2d(image(x)[:, :, :1, :1], 2, 1, 1, 2),  # windows of padding
        lambda x: x.topk(2),
        lambda x: x.argmax(-1),
        lambda x: x + x.max(1, keepdim=True)[1],
        lambda x: x[0, x[0].min(1).indices],
        lambda x: torch.linalg.vector_norm(x, 3),
        lambda x: torch.logsumexp(x, (1, 2)),
        lambda x: x[..., :1].var(-1),
        lambda x: x.std(-1, correction=WIDTH + 1),
        lambda x: F.normalize(x, 1),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        lambda x: nn.MultiheadAttention(WIDTH, 2, dropout=0.1)(x, x, x),
        # What would take its numbers.
        lambda x: x.to(torch.long),
        lambda x: x.type_as(torch.arange(2)),
        lambda x: x.type(torch.LongTensor),
        lambda x: x.type("torch.LongTensor"),
        lambda x: x.to(int),
        lambda x: x.sum(-1, dtype=torch.long),
        lambda x: F.conv2d(x, torch.ones(2, 1, 2, 2)),
        lambda x: x * torch.tensor(1 + 2j),
        lambda x: x.numpy(),
        lambda x: x > 0,
        lambda x: bool(x.sum() > 0),
        lambda x: float(x.sum()),
        lambda x: torch.ops.aten.native_layer_norm(x, [WIDTH], None, None, 1e-5),
    ],
)
def test_what_is_not_known_is_refused(function):
    with pytest.raises(NoRuleError, match="no rule for the operation"):
        run(function, ball(weights(1, TOKENS, WIDTH), 0.1))


@pytest.mark.filterwarnings("ignore:.*torch.jit:")
def test_functions_of_torchscript_are_refused():
    scripted = torch.jit.trace(lambda x: x.relu() * 2, torch.ones(1))
    with pytest.raises(NoRuleError, match=r"no rule for the operation torch\.jit\.script"):
        run(lambda x: scripted(x) + x, ball(weights(1, TOKENS, WIDTH), 0.1))


@pytest.mark.parametrize(("function", "centre"), [(F.softplus, -1e3), (F.mish, 1e3)])
def test_curves_far_from_zero_have_bounds(function, centre):
    """There autograd has no second derivative."""
    x = torch.full((1, 2), centre, dtype=torch.float64)
    low, high = run(function, ball(x, 0.5)).range()
    for inside in (-0.5, 0.0, 0.5):
        truth = function(x + inside)
        assert ((low <= truth) & (truth <= high)).all()
    assert (high - low <= 1.01).all()


def test_a_mean_over_windows_keeps_its_slack_where_the_divisor_is_negative():
    x = F.gelu(ball(weights(1, 1, 4, 4), 0.1, slack_share=1e9))  # slack stays slack
    positive, negative = (F.avg_pool2d(x, 2, divisor_override=n).slack for n in (3, -3))
    assert (positive > 1e-4).all()
    torch.testing.assert_close(negative, positive)


@pytest.mark.parametrize(
    ("function", "centre", "eps"),
    [
        (lambda x: torch.exp(1e3 * x), weights(1, TOKENS, WIDTH), 1.0),
        (torch.rsqrt, torch.ones(1, 2), 1.5),
        (torch.log, torch.zeros(1, 2), 0.5),
        (functools.partial(F.normalize, dim=-1), torch.zeros(1, 2), 0.5),
    ],
)
def test_a_ball_without_an_end_says_so(function, centre, eps):
    with pytest.raises(UnboundedError):
        run(function, ball(centre, eps))


def test_the_box_cuts_the_ball_and_only_some_tokens_move():
    low, high = ball(torch.tensor([[0.0, 0.5, 1.0]]), 0.2, box=(0.0, 1.0)).range()
    for end, truth in ((low, [[0.0, 0.3, 0.8]]), (high, [[0.2, 0.7, 1.0]])):
        torch.testing.assert_close(end, torch.tensor(truth).double(), rtol=0, atol=1e-7)
    assert (low <= torch.tensor([[0.0, 0.3, 0.8]]).double()).all()
    moving = torch.tensor([False, True, False, False])[None, :, None]
    x = ball(weights(1, TOKENS, WIDTH), 0.1, norm="l2", moving=moving)
    low, high = x.range()
    assert x.symbols.inputs == WIDTH
    assert ((high - low)[0, 1] > 0.19).all()
    assert ((high - low)[0, [0, 2, 3]] < 1e-12).all()


@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("linf", 2), ("l2", 1), ("l2", 2)])
@pytest.mark.parametrize("tokens", [1, 2])
def test_variances_of_balls_much_larger_than_their_centre(norm, order, tokens, points, excess):
    """All of the mean square is then that of what moves."""
    centre = 0.01 * weights(1, tokens, 2, seed=11)
    x = ball(centre, 1.0, norm=norm, order=order)
    e, inputs = points(x, 300)
    square = run(lambda t: (t * t).mean(-1), x)
    assert excess(square, e, inputs.square().mean(-1)) <= 1e-13
    low, high = run(lambda t: F.rms_norm(t, (2,), None, 1e-2), x).range()
    truth = F.rms_norm(inputs, (2,), None, 1e-2)
    assert ((low <= truth) & (truth <= high)).all()
    square = run(lambda t: F.rms_norm(t, (2,), None, 1e-2), x).quotient.square
    assert excess(square, e, inputs.square().mean(-1, keepdim=True) + 1e-2) <= 1e-13


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
def test_quadratic_parts_against_all_corners_and_eigenvalues(norm, dtype):
    n = 8
    symbols = ball(torch.zeros(1, n), 1.0, norm=norm, order=2, dtype=dtype).symbols
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(n, n, 50, generator=generator, dtype=torch.float64)
    one_sided = spread[:, None, 0] * spread[None, :, 0]  # of rank one: the bounds are sharp
    q = torch.cat([spread, one_sided, -one_sided], -1)
    i, j = symbols.pairs
    packed = torch.where((i == j)[:, None], q[i, j], q[i, j] + q[j, i]).float().double()
    rows = torch.cat([torch.zeros(n, q.shape[-1]), packed]).to(dtype)
    low, high = symbols.quadratic_range(rows)
    form = torch.zeros(n, n, q.shape[-1], dtype=torch.float64)
    form[i, j] += packed / 2
    form[j, i] += packed / 2
    if norm == "l2":
        values = torch.linalg.eigvalsh(form.permute(2, 0, 1))
        least, largest = values[:, 0], values[:, -1]
    else:
        corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * n)
        values = torch.einsum("ci,ijk,cj->ck", corners, form, corners)
        least, largest = values.amin(0), values.amax(0)
    assert (low <= least + 1e-12).all()
    assert (largest - 1e-12 <= high).all()
    assert (high[50:100] < 1.1 * largest[50:100]).all()
    assert (low[50:100] > -0.6 * largest[50:100]).all()
    assert ((high - low) < (1.4 if norm == "l2" else 2) * (largest - least))[:50].all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("mixing", [[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, -1.0]]])
def test_mean_squares_of_what_errors_add_to(mixing, norm, points, excess):
    """Errors of the same sign as the linear part: the most that the square can be off by."""
    x = ball(torch.zeros(1, 2), 1.0, norm=norm, order=2)
    y = F.linear(x, torch.tensor(mixing))
    y.slack = torch.tensor([[0.3, 0.1]]).double()
    e, inputs = points(x, 100)
    moved = inputs @ torch.tensor(mixing).double().mT
    truth = (moved + moved.sign() * y.slack).square().mean(-1, keepdim=True)
    square = F.rms_norm(y, (2,), None, 1e-2).quotient.square
    assert excess(square, e, truth + 1e-2) <= 1e-13


@pytest.mark.parametrize("normalise", [lambda x: x, lambda x: F.layer_norm(x, (WIDTH,))])
def test_the_rounding_of_alpha_times_a_constant_is_in_the_slack(normalise):
    """x + alpha c rounds twice, x + c once: also where the form is a normalisation, kept apart."""
    x = normalise(ball(weights(1, TOKENS, WIDTH, seed=9), 0.1))
    constant = torch.full((WIDTH,), 2.0**60, dtype=torch.float64)
    once = torch.add(x, 0.1 * constant).slack
    twice = torch.add(x, constant, alpha=0.1).slack
    product = 0.1 * 2.0**60
    assert (twice - once >= product * torch.finfo(torch.float64).eps / 2).all()
