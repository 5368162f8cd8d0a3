"""Every rule against the operation itself, at points of the ball in float64."""

import functools
import importlib
import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lipaudit.certify.form import NoRuleError, UnboundedError
from lipaudit.certify.prove import ball, run

TOKENS, WIDTH = 4, 6


def _weights(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


W, B = _weights(5, WIDTH, seed=1), _weights(5, seed=2)
KERNEL = _weights(4, 3, 2, 2, seed=3)
SCALE, SQUARE = _weights(WIDTH, seed=4), _weights(WIDTH, WIDTH, seed=5)
PLACES = torch.tensor([2, 0, 0])
NORM = nn.BatchNorm1d(TOKENS, dtype=torch.float64).eval()
NORM.running_mean, NORM.running_var = _weights(TOKENS, seed=5), 0.5 + _weights(TOKENS).square()
NORM.requires_grad_(requires_grad=False).weight.data = _weights(TOKENS, seed=6)
MASK = torch.tensor([True, True, False, True])
FAR = torch.finfo(torch.float32).min


def _heads(x):
    return (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (x, 1.5 * x + 0.2, 2 * x - 1))


def _attention(x, **options):
    return F.scaled_dot_product_attention(*_heads(x), **options)


def _eager(x):
    q, k, v = _heads(x)
    logits = q @ k.transpose(-2, -1) / 3**0.5
    logits = logits + torch.zeros(TOKENS).masked_fill(~MASK, FAR)
    return F.dropout(logits.softmax(dim=-1), 0.1, training=False) @ v


def _image(x):
    """Three channels of 4 x 2 pixels."""
    return x.reshape(-1, 3, 4, 2)


def _grouped(x):
    q, k, v = _heads(x)
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def _constant_queries(x):
    _, k, v = _heads(x)
    q = _weights(2, 3, 3).expand(len(x), -1, -1, -1)
    return F.scaled_dot_product_attention(q, k, v)


def _multi_head(x, **options):
    t = x.transpose(0, 1)
    into, bias, out, last = (
        _weights(*shape, seed=7) / 3 for shape in ((18, 6), (18,), (6, 6), (6,))
    )
    result, p = F.multi_head_attention_forward(
        t, t, t, 6, 2, into, bias, None, None, False, 0.0, out, last, training=False, **options
    )
    return torch.cat([result.transpose(0, 1), p @ x], -1)


def _einops(x):
    einops = importlib.import_module("einops")
    layers = importlib.import_module("einops.layers.torch")
    y = layers.Rearrange("b t (h d) -> b h t d", h=2)(x)
    y = einops.rearrange(y, "b h t d -> b t (h d)")
    y = y + einops.repeat(x[:, 0], "b d -> b t d", t=4)
    return einops.reduce(y, "b t d -> b d", "mean") + einops.einsum(x, x, "b t d, b t d -> b d")


def _shortcut_in_place(x):
    y = x * 2
    kept = y
    y += x
    return y * kept  # both names have what was added


def _relu_in_place(x):
    y = x * 2
    F.relu(y, inplace=True)
    return y + x


def _after_a_norm(x):
    """What a normalisation leaves pending is of its input as it was."""
    y = 2 * x
    normed = F.rms_norm(y, (WIDTH,), None, 1e-6)
    y += normed
    return F.linear(normed, torch.ones(3, WIDTH).to(x.dtype)) + y.mean((1, 2), keepdim=True)


def _copy_first(x):
    y = x * 2
    kept = y.clone()
    y += 1
    return y * kept


OPERATIONS = {
    "linear": lambda x: F.linear(x, W, B),
    "matmul-right": lambda x: x @ W.T,
    "matmul-left": lambda x: _weights(3, TOKENS) @ x,
    "conv2d": lambda x: F.conv2d(x.reshape(-1, 3, 4, 2), KERNEL, stride=(2, 1), padding=(1, 0)),
    "conv2d-lists": lambda x: F.conv2d(x.reshape(-1, 3, 4, 2), KERNEL, stride=[2, 1], padding=[1]),
    "conv2d-groups": lambda x: F.conv2d(x.reshape(-1, 6, 2, 2), KERNEL[:, :3], groups=2),
    "batch_norm": NORM,
    "scalars": lambda x: 2 - (x * 3 - 1) / 7,
    "tensors": lambda x: (x - SCALE) * SCALE / (1 + SCALE.square()),
    "alpha": lambda x: torch.add(x, x[:, :1], alpha=3),
    "negative": lambda x: 3 - x.mT.mT,
    "residual": lambda x: x + F.linear(x, W[:1]),
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum((1, 2), keepdim=True),
    "cat": lambda x: torch.cat([SCALE.expand(len(x), 1, -1), x], 1),
    "stack": lambda x: torch.stack([x[:, 0], x[:, 1]], 2),
    "index": lambda x: x[:, 1:, ::2],
    "moves": lambda x: x.transpose(1, 2).reshape(len(x), 2, 3, TOKENS).permute(0, 3, 1, 2),
    "chunk": lambda x: x.chunk(2, -1)[1] - x.split(3, dim=-1)[0],
    "unbind": lambda x: functools.reduce(torch.sub, x.unbind(1)),
    "masked_fill": lambda x: x.masked_fill(MASK[:, None], 2.0),
    "masked_fill-names": lambda x: torch.tanh(x.masked_fill(mask=MASK[:, None], value=0.5)),
    "gelu": lambda x: F.gelu(3 * x),
    "gelu-tanh": lambda x: F.gelu(3 * x, approximate="tanh"),
    "silu": lambda x: F.silu(3 * x),
    "relu": lambda x: F.relu(x),
    "tanh": lambda x: torch.tanh(2 * x),
    "sigmoid": lambda x: x.sigmoid(),
    "exp": lambda x: torch.exp(x),
    "square": lambda x: x**2,
    "roots": lambda x: torch.rsqrt(x.pow(2) + 0.5) + (x.square() + 1).sqrt(),
    "quotient": lambda x: x / (1 + x**2),
    "product": lambda x: x * x.flip(1),
    "gate": lambda x: F.silu(x) * (x @ _weights(WIDTH, WIDTH)),
    "broadcast-product": lambda x: x * x[..., :1],
    "forms-matmul": lambda x: x @ x.transpose(-1, -2),
    "softmax": lambda x: (3 * x).softmax(-1),
    "attention": _attention,
    "attention-causal": functools.partial(_attention, is_causal=True),
    "attention-mask": functools.partial(_attention, attn_mask=MASK.expand(TOKENS, TOKENS)),
    "attention-eager": _eager,
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), SCALE, SCALE),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), SCALE, 1e-6),
    "mlp": lambda x: F.linear(F.gelu(F.linear(x, W)), W.mT) + x,
    "abs": lambda x: x.abs(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "prelu": lambda x: F.prelu(x, SCALE[:TOKENS]),
    "maximum": lambda x: torch.maximum(x, x.flip(1)) + torch.minimum(x, SCALE),
    "clamp": lambda x: x.clamp(-0.3, 0.4) + x.clip(min=0.1) + x.clamp_min(0) - x.clamp_max(0.2),
    "relu6": lambda x: F.relu6(9 * x) + F.hardtanh(x),
    "hardswish": lambda x: F.hardswish(3 * x) + F.hardsigmoid(3 * x),
    "amax": lambda x: x.amax(1) - x.min(1).values + x.max(1)[0],
    "max-axes": lambda x: x.amax((1, 2), keepdim=True),
    "log": lambda x: torch.log(1 + x * x),
    "sine": lambda x: torch.sin(2 * x) + torch.cos(x),
    "mish": lambda x: F.mish(2 * x),
    "softplus": lambda x: F.softplus(3 * x, 2.0),
    "softplus-jumps": lambda x: F.softplus(3 * x, 2, 1) + F.softplus(3 * x, 2, 4.0),
    "elu": lambda x: F.elu(2 * x) + F.elu(x, 0.7),
    "logsumexp": lambda x: (
        torch.logsumexp(3 * x, 1, keepdim=True) + torch.logsumexp(x, -1)[..., None]
    ),
    "conv1d-same": lambda x: F.conv1d(x, _weights(TOKENS, 2, 2), padding="same", groups=2),
    "conv2d-same": lambda x: F.conv2d(_image(x), _weights(2, 3, 3, 2), padding="same"),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "std": lambda x: x.std(-1),
    "norms": lambda x: torch.cat([x.norm(dim=-1), torch.linalg.vector_norm(x, dim=-1)], -1),
    "max_pool2d": lambda x: F.max_pool2d(_image(x), (3, 2), (2, 1), (1, 0)),
    "erf": lambda x: torch.erf(x),
    "powers": lambda x: x**3 + x.pow(4) - x**1,
    "log_softmax": lambda x: (3 * x).log_softmax(-1),
    "softmax-axis": lambda x: (3 * x).softmax(1),
    "einsum": lambda x: torch.einsum("bik,bjk->bij", x, 2 * x + 1),
    "einsum-sums": lambda x: torch.einsum("bikl,jk->bji", x[:, :, None], SQUARE[:2, :1]),
    "matmul-broadcast": lambda x: x[:, None] @ _weights(2, WIDTH, 3),
    "matmul-forms-broadcast": lambda x: x[:, None] @ torch.stack([x, 2 * x], 1).mT,
    "matmul-vector": lambda x: x @ SCALE,
    "vectors": lambda x: torch.stack([t[0] @ t[1] + t[1] @ SCALE for t in x]),
    "addmm": lambda x: torch.stack([torch.addmm(SCALE, t, SQUARE, beta=2, alpha=0.5) for t in x]),
    "baddbmm": lambda x: torch.baddbmm(
        x[:, :1], batch1=x, batch2=x.new_ones(len(x), 6, 6), beta=0.3
    ),
    "conv1d": lambda x: F.conv1d(x, _weights(2, TOKENS, 3), padding=1, stride=2),
    "avg_pool2d": lambda x: F.avg_pool2d(_image(x), 3, 2, 1),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(_image(x), (3, 1)),
    "var": lambda x: x.var(-1, unbiased=False, keepdim=True) + x.var(1, keepdim=True),
    "all-axes": lambda x: torch.stack([t.var(True) + t.sum(()) + t.mean(dim=[]).sum() for t in x]),
    "empty": lambda x: torch.cat([x[:, :0] * x[:, :0], x], 1),
    "glu": lambda x: F.glu(x) + F.glu(x.mT, 1).mT[..., :3],
    "where-uint8": lambda x: torch.where(MASK[:, None].byte(), x, SCALE),
    "where": lambda x: (
        torch.where(MASK[:, None], x, SCALE) + torch.where(MASK[:, None], 0.0, x * x)
    ),
    "pad": lambda x: F.pad(x, (1, 0, 0, 2), value=0.5),
    "reflection": lambda x: F.pad(_image(x), (1, 0, 2, 1), mode="reflect").flatten(1),
    "max-padded": lambda x: F.max_pool2d(F.pad(_image(x), (1, 1), value=-torch.inf), 2, 1),
    "gather": lambda x: (
        x.gather(1, PLACES[None, :, None].expand(len(x), -1, WIDTH)) + x[:, PLACES]
    ),
    "repeats": lambda x: x.repeat_interleave(2, 1).roll(1, 2).broadcast_to(len(x), 8, 6),
    "unfold": lambda x: F.unfold(_image(x), (2, 2), padding=1).mT @ _weights(12, 2),
    "windows": lambda x: x.unfold(1, 3, 1),
    "like": lambda x: x + torch.ones_like(x) - x.new_zeros(WIDTH) * 2,
    "layer_norm-axes": lambda x: F.layer_norm(x, (TOKENS, WIDTH), SQUARE[:4]),
    "group_norm": lambda x: F.group_norm(x, 2, SCALE[:4], SCALE[:4]),
    "normalize": lambda x: F.normalize(x, dim=-1) + F.normalize(x, dim=1),
    "grouped-queries": _grouped,
    "constant-queries": _constant_queries,
    "einops": _einops,
    "number-first": lambda x: 2 - x + (2 + x) * 3,
    "tensor-first": lambda x: torch.ones(WIDTH) - x,
    "alpha-rounded": lambda x: (
        torch.add(x, torch.full((WIDTH,), 16777213.0).to(x.dtype), alpha=0.1) / 1e6
    ),
    "alpha-sub": lambda x: torch.sub(torch.ones(WIDTH), x, alpha=0.1),
    "quotients-first": lambda x: 2 / (x * x + 1) + torch.ones(WIDTH) / (1 + x * x),
    "constant-left": lambda x: torch.ones(2, TOKENS).to(x.dtype) @ x,
    "transposed": lambda x: torch.stack([each.T for each in x]),
    "in-place-chain": lambda x: x.clone().add_(1).mul_(x).neg_(),
    "in-place-sub": lambda x: operator.isub(x * 1, 2 * x),
    "in-place-div": lambda x: operator.itruediv(x * 1, 4),
    "in-place-curves": lambda x: F.silu(F.relu(x * 1, inplace=True), inplace=True),
    "in-place-mask": lambda x: (x + 1).masked_fill_(torch.tensor([True, *[False] * 5]), 0.0),
    "in-place-names": _shortcut_in_place,
    "in-place-relu": _relu_in_place,
    "in-place-norm": _after_a_norm,
    "in-place-copy": _copy_first,
    "heads": _multi_head,
    "heads-mask": lambda x: _multi_head(x, attn_mask=torch.ones(4, 4, dtype=torch.bool).triu(1)),
    "heads-bias": lambda x: _multi_head(
        x, attn_mask=SQUARE[:4, :4], key_padding_mask=~MASK.expand(len(x), -1)
    ),
}


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
        x = ball(_weights(1, TOKENS, WIDTH, seed=9), eps, norm=norm, order=order, dtype=dtype)
        e, inputs = points(x, 400)  # forms take nearly all of the time
        truth = operation(inputs)
        # The rules alone, and the pass that skips what a trial says is not read.
        form = operation(x) if small else run(operation, x)
        assert form.shape[1:] == truth.shape[1:]
        off, about = excess(form, e, truth), (norm, order, eps, dtype)
        assert off <= 1e-13 * truth.abs().amax(), about
        if small and name not in NEVER_SMALL:
            assert form.nonlinear.sum() <= 5e-5 * form.sizes.linear.sum(), about


@pytest.mark.parametrize(
    "function",
    [
        *("softmax-axis", "group_norm", "layer_norm-axes", "grouped-queries", "heads"),
        "masked_fill-names",
        lambda x: torch.softmax(x.flatten(1), dim=0),
        lambda x: F.max_pool2d(_image(x), 2, 1)[:, 0],
    ],
)
def test_what_mixes_rows_is_read_in_all_of_them(function, points, excess):
    """A pass computes rows that are read: these need the others, or a part of a mask."""
    function = OPERATIONS.get(function, function)
    x = ball(_weights(1, TOKENS, WIDTH, seed=9), 0.1)
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
        x = ball(_weights(1, TOKENS, WIDTH, seed=9), 0.01, norm="l2", order=order)
        form = run(model.float(), x)
        e, inputs = points(x, 60)
        with torch.no_grad():
            assert excess(form, e, model.double()(inputs)) <= 1e-13


def test_symbols_keep_what_slack_forgets():
    """y - y of an operation with an error is zero in symbols, twice the error in slack."""
    x = ball(_weights(1, TOKENS, WIDTH), 0.1, settle=0.0)
    form = F.gelu(x)
    loose = (form - form).mass + (form - form).slack
    form.settle()
    tight = (form - form).mass + (form - form).slack
    assert loose.amax() > 1e-3
    assert tight.amax() < 1e-12


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_order_two_is_closer(norm):
    balls = (ball(_weights(1, TOKENS, WIDTH), 0.05, norm=norm, order=order) for order in (1, 2))
    first, second = (run(OPERATIONS["layer_norm"], x).range() for x in balls)
    assert (second[1] - second[0]).sum() < (first[1] - first[0]).sum()


def test_an_operation_without_a_rule_is_named_with_its_module():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Softshrink()))
    with pytest.raises(NoRuleError, match=r"operation softshrink \(in 1\.0\)"):
        run(model, ball(_weights(1, TOKENS, WIDTH), 0.1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: nn.BatchNorm1d(TOKENS).train()(x),
        lambda x: torch.cdist(x, x),
        lambda x: F.rms_norm(x, (TOKENS, WIDTH)),
        lambda x: x**0.3,
        lambda x: torch.add(x, x, out=torch.empty(1)),
        lambda x: x.cumprod(1),
        torch.sort,
        lambda x: torch.where(torch.eye(WIDTH)[:4] > 0, x, x).masked_fill(x > 0, 0.0),
        lambda x: x ** _weights(WIDTH),
        lambda x: torch.einsum("bii->bi", x[:, :, :4]),
        lambda x: torch.einsum("...ik,...jk->...ij", x, x),
        lambda x: torch.einsum("bik,bjk,bjl->bil", x, x, x),
        lambda x: x.clone().copy_(2 * x),
        lambda x: F.max_pool2d(_image(x), 2, return_indices=True),
        lambda x: F.max_pool2d(_image(x)[0], 2),
        lambda x: x.topk(2),
        lambda x: x.argmax(-1),
        lambda x: torch.linalg.vector_norm(x, 3),
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
        run(function, ball(_weights(1, TOKENS, WIDTH), 0.1))


@pytest.mark.parametrize(
    ("function", "centre", "eps"),
    [
        (lambda x: torch.exp(1e3 * x), _weights(1, TOKENS, WIDTH), 1.0),
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
    x = ball(_weights(1, TOKENS, WIDTH), 0.1, norm="l2", moving=moving)
    low, high = x.range()
    assert x.symbols.n == WIDTH
    assert ((high - low)[0, 1] > 0.19).all()
    assert ((high - low)[0, [0, 2, 3]] < 1e-12).all()


@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("linf", 2), ("l2", 1), ("l2", 2)])
@pytest.mark.parametrize("tokens", [1, 2])
def test_variances_of_balls_much_larger_than_their_centre(norm, order, tokens, points, excess):
    """All of the mean square is then that of what moves."""
    centre = 0.01 * _weights(1, tokens, 2, seed=11)
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
    rows = torch.cat([torch.zeros(n, q.shape[-1]), symbols.pack(q).float()]).to(dtype)
    low, high = symbols.quadratic_range(rows)
    packed = symbols.pack(q).float().double()
    i, j = symbols.pairs
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
    assert (high[50:100] < 3 * largest[50:100]).all()


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
