"""Whole networks: margins against points, corners and attacks; passes that skip unread rows."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.reference import loaded, timm_models, transformers_models
from benchmarks.reference.cases import Case
from benchmarks.reference.certificates import outcome_of
from lipaudit.wings.certificates.error_blocks import create_errors
from lipaudit.wings.certificates.prove import ball, margins, run

CLASSES = 4


class Attention(nn.Module):
    """Multi-head attention, fused or written out."""

    def __init__(self, dim, heads, *, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (p.view(p.shape[0], p.shape[1], self.heads, -1).transpose(1, 2) for p in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(*x.shape))


class TokenNorm(nn.BatchNorm1d):
    """Batch statistics of every channel of tokens."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Transformer(nn.Module):
    """Two blocks on embedded patches; the mean, or with a class token the logits of one token."""

    def __init__(self, dim=12, *, batch_norm, activation, fused, read=None):
        super().__init__()
        norm, token = TokenNorm if batch_norm else nn.LayerNorm, read is not None
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, dim)) if token else None
        self.position = nn.Parameter(0.1 * torch.randn(1, 4 + token, dim))
        self.activation, self.read = activation, read
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                (norm(dim), Attention(dim, 2, fused=fused), norm(dim))
                + (nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim))
            )
            for _ in range(2)
        )
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.position
        for first, attention, second, up, down in self.blocks:
            x = x + attention(first(x))
            x = x + down(self.activation(up(second(x))))
        return self.head(x.mean(1) if self.token is None else x[:, self.read])


NETWORKS = {
    "batch-norm-relu": {"batch_norm": True, "activation": F.relu, "fused": False},
    "batch-norm-last": {"batch_norm": True, "activation": F.relu, "fused": False, "read": -1},
    "layer-norm-gelu": {"batch_norm": False, "activation": F.gelu, "fused": True, "read": 0},
    "layer-norm-silu": {"batch_norm": False, "activation": F.silu, "fused": False},
}


def _network(name, seed=0):
    torch.manual_seed(seed)
    model = Transformer(**NETWORKS[name])
    with torch.no_grad():
        model.train()(torch.rand(64, 3, 8, 8))
    return model.eval().requires_grad_(requires_grad=False)


def _difference(logits, label):
    others = [j for j in range(CLASSES) if j != label]
    return logits[:, [label]] - logits[:, others]


def _attacked(model, x, label, points, form):
    """The smallest margins of points of the ball, then of steps down from the worst of them."""
    e, inputs = points(form, 200)
    moves = form.generators[: form.symbols.inputs].double().sum(0)
    found = _difference(model(inputs), label)
    best, at = found.amin(0), inputs[found.argmin(0)]
    for _ in range(10):
        at = at.detach().requires_grad_()
        (slope,) = torch.autograd.grad(_difference(model(at), label).trace(), at)
        if form.symbols.norm == "linf":
            at = form.centre - moves * slope.sign()
        else:
            slope = slope * (moves > 0)
            sizes = torch.linalg.vector_norm(slope, dim=(1, 2, 3), keepdim=True)
            at = form.centre - moves.amax() * slope / sizes
        best = torch.minimum(best, _difference(model(at), label).detach().amin(0))
    return best


@pytest.mark.parametrize(
    ("name", "norm", "order", "dtype"),
    [
        ("batch-norm-relu", "linf", 1, torch.float64),
        ("batch-norm-relu", "l2", 2, torch.float32),
        ("layer-norm-gelu", "linf", 2, torch.float64),
        ("layer-norm-gelu", "l2", 1, torch.float64),
        ("batch-norm-relu", "linf", 1, torch.float32),
        ("layer-norm-gelu", "linf", 1, torch.float32),
        ("layer-norm-silu", "linf", 1, torch.float32),
        ("layer-norm-silu", "l2", 2, torch.float64),
    ],
)
def test_no_margin_is_above_what_an_attack_reaches(name, norm, order, dtype, points):
    model = _network(name)
    exact = _network(name).double()
    x = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    label = int(model(x).argmax())
    moving = torch.zeros(1, 3, 8, 8, dtype=torch.bool)
    moving[:, : 3 if order == 1 else 1, :, 2:4] = True
    tiny = [1e-7] if dtype is torch.float32 else []  # where it is rounding that costs most
    for eps in (5e-3 if norm == "linf" else 2e-2, *tiny):
        start = ball(x, eps, norm=norm, order=order, box=(0.0, 1.0), moving=moving, dtype=dtype)
        low, high = margins(run(model, start), label).range()
        best = _attacked(exact, x, label, points, start)
        assert (low <= best).all()
        at_centre = _difference(exact(start.centre), label)[0]
        assert ((low <= at_centre) & (at_centre <= high)).all()
        # Of use: float32 costs a thousandth, and certificates exist.
        assert (low > at_centre - 1.0).all()
        if eps == 1e-7:
            assert (at_centre - low).amax() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("l2", 1), ("linf", 2), ("l2", 2)])
def test_margins_behind_a_normalisation(norm, order, dtype, points, excess):
    """They are those times the root of the variance, of the same signs; and say more."""
    torch.manual_seed(4)
    into, head, last = nn.Linear(6, 8), nn.Linear(8, CLASSES), nn.LayerNorm(8)
    torch.nn.init.normal_(last.weight)
    torch.nn.init.normal_(last.bias)
    model = nn.Sequential(into, nn.GELU(), last, head).requires_grad_(requires_grad=False)
    x = torch.randn(1, 3, 6)
    start = ball(x, 0.05, norm=norm, order=order, dtype=dtype)
    logits = run(lambda t: head(last(F.gelu(into(t)))[:, 0]), start).reshape(-1)
    form = margins(logits, 1)
    logits.range()  # multiplies it out
    logits.quotient = None
    plain = margins(logits, 1)
    e, inputs = points(start, 400)
    model.double()
    hidden = F.gelu(into(inputs))[:, 0]
    root = (hidden.var(-1, correction=0) + last.eps).sqrt()
    truth = _difference(head(last(hidden)), 1)
    assert excess(plain, e, truth) <= 1e-12
    times_root = not torch.allclose(form.centre, plain.centre, rtol=1e-9)
    assert excess(form, e, truth * (root[:, None] if times_root else 1)) <= 1e-12
    shares = [(each.range()[0] / each.centre.abs()).amin() for each in (form, plain)]
    assert shares[0] > shares[1] if times_root else torch.isclose(*shares, rtol=1e-6)
    assert times_root or order == 2


def test_margins_behind_a_normalisation_without_a_bias(points):
    """The constant of the quotient then depends on no symbol at all."""
    start, weight = ball(X[:, :1], 0.05, order=2), WEIGHT[:3]
    model = lambda t: F.linear(F.rms_norm(t, (DIM,), None, 1e-6)[:, 0], weight.to(t.dtype))  # noqa: E731
    low, _ = margins(run(model, start).reshape(-1), 1).range()
    logits = model(points(start, 400)[1])
    assert ((logits[:, [1]] - logits[:, [0, 2]] > 0) | (low <= 0)).all()


def test_margins_behind_roots_of_their_own():
    """A class a token: what is larger before its division may be smaller behind it."""
    x = torch.tensor([[[1.0, 0.0, 0.0, 0.0], [40.0, 0.0, 0.0, 10.0]]])
    weight, bias = torch.eye(4)[:1], torch.tensor([0.5])

    def logits(t):
        return F.linear(F.layer_norm(t, (4,)), weight.to(t.dtype), bias.to(t.dtype)).squeeze(-1)

    low, high = margins(run(logits, ball(x, 1e-6)), 1).range()
    first, second = logits(x.double())[0]
    assert low <= second - first <= high < 0


def test_a_product_that_waits_for_weights_is_closer_and_holds(points, excess):
    """What a normalisation leaves pending ends as slack wherever no weights follow."""
    torch.manual_seed(5)
    first, second = nn.Linear(6, 16), nn.Linear(16, 5)
    for order in (1, 2):
        start = ball(torch.randn(1, 3, 6), 0.1, order=order)
        e, inputs = points(start, 300)

        def normed(t, first=first):
            return F.layer_norm(F.linear(t, first.weight.to(t.dtype)), (16,))

        waiting = run(lambda t: F.linear(normed(t)[:, 1:], second.weight.to(t.dtype)), start)
        ended = run(lambda t: F.linear(0 - (0 - normed(t)[:, 1:]), second.weight), start)
        truth = F.linear(normed(inputs)[:, 1:], second.weight.double())
        for form in (waiting, ended):
            assert excess(form, e, truth) <= 1e-12
        widths = [(form.range()[1] - form.range()[0]).sum() for form in (waiting, ended)]
        assert widths[0] < 0.99 * widths[1]


TIMM = ("vit", "beit", "eva02", "swin", "convnext", "mlp_mixer", "resnet", "vit-relpos")
TRANSFORMERS = ("bert", "gpt2", "llama", "bart", "deberta-v2")
MODELS = [Case("timm", name) for name in TIMM]
MODELS += [Case("transformers", name) for name in TRANSFORMERS]


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_models_run_as_they_are(case):
    assert outcome_of(case)[0] == "runs"


def test_what_is_certified_is_what_attacks_see(tmp_path):
    """Pixels before normalisation, embeddings with the mask of their text; the model's dtype."""
    bert = loaded.transformers_loader(transformers_models.small_config("bert"), tmp_path)
    for loader in (loaded.timm_loader(timm_models.TIMM["vit"]), bert):
        net = loader(loaded.NARROW)
        loaded.perturb(net.module, 0.5)
        sample = loaded.batch_for(net)[-1:]
        point, output = net.point(sample), net.output(sample)
        moving = torch.arange(point.numel()).view(point.shape) < 4
        start = ball(point, 0.0, moving=moving, slack_share=math.inf)
        assert start.dtype is torch.float32
        form = run(functools.partial(net.forward, batch=sample), start, module=net.module)
        assert (form.centre - output).abs().amax() < 1e-5 * output.abs().amax()


DIM, TOKENS, HEADS = 6, 5, 2
X = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(1))
PIXELS = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
SOME = torch.arange(192).view(1, 3, 8, 8) < 12


@pytest.mark.parametrize(("name", "order"), [("layer-norm-gelu", 2), ("batch-norm-last", 1)])
def test_rows_that_nothing_reads_are_not_computed(name, order):
    model, ranges, births = _network(name), [], []
    for call in (run, lambda model, x: model(x)):  # the rules alone compute all rows
        x = ball(PIXELS, 0.001, order=order, slack_share=0.0, moving=SOME)
        ranges.append(margins(call(model, x), 1).range())
        births.append(x.symbols.count)
    for one, other in zip(*ranges, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert births[0] < 0.8 * births[1]


def test_a_row_that_the_trial_did_not_show_proves_nothing():
    model = _network("layer-norm-gelu")
    model.head.register_forward_pre_hook(lambda *_: setattr(model, "read", model.read + 1))
    low, high = margins(run(model, ball(PIXELS, 0.001, moving=SOME)), 1).range()
    assert low.isnan().all()
    assert high.isnan().all()


def test_a_model_that_deviates_from_its_trial_is_run_whole(points, excess):
    x, calls = ball(X, 0.1), itertools.count()

    def fickle(x):
        """Call another function every second time."""
        x += 1
        return (F.gelu(x) if next(calls) % 2 else torch.tanh(x))[:, 0]

    e, inputs = points(x, 50)
    truth = torch.tanh(inputs[:, 0] + 1)
    assert excess(run(fickle, x), e, truth) <= 1e-13


def _blocks_at_work(x):
    """Errors of rows through what keeps rows apart, heads merged, and shared branches."""
    y = F.gelu(F.linear(x, WEIGHT.to(x.dtype)))
    z = F.gelu(F.linear(y, WEIGHT.to(x.dtype)))
    z = z - 0.5 * y.mean(-1, keepdim=True) + y * z[..., :1]
    heads = torch.tanh(z.unflatten(-1, (HEADS, -1)).transpose(1, 2))
    merged = torch.tanh(heads * 2).transpose(1, 2).flatten(2)
    return y + F.linear(merged, WEIGHT.to(x.dtype)) * z


WEIGHT = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(2)) / DIM**0.5


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_blocks_say_what_rows_say(norm, order, points, excess, monkeypatch):
    x = ball(X, 0.1, norm=norm, order=order)
    e, inputs = points(x, 100)
    folded = run(_blocks_at_work, x)
    assert folded.blocks
    assert excess(folded, e, _blocks_at_work(inputs)) <= 1e-13
    symbolize = type(x).symbolize_slack
    monkeypatch.setattr(type(x), "symbolize_slack", lambda form: symbolize(form).make_dense())
    plain = run(_blocks_at_work, ball(X, 0.1, norm=norm, order=order))
    assert not plain.blocks
    for one, other in zip(folded.range(), plain.range(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_block_with_one_group_a_row_has_the_same_coefficients():
    radius = torch.rand(1, HEADS, TOKENS, 3, dtype=torch.float64)
    radius[0, 1, 2] = 0
    block = create_errors(radius, 7, torch.float64)
    (merged,) = block.rearrange(lambda t: (t.transpose(1, 2).flatten(2),))
    by_row = merged.split_by_row()
    assert by_row is not None
    assert (by_row.group == by_row.group[..., :1]).all()
    stacks = [torch.zeros(by_row.end, 1, TOKENS, 3 * HEADS).double() for _ in range(2)]
    for each, stack in zip((merged, by_row), stacks, strict=True):
        each.add_to(stack)
    torch.testing.assert_close(*stacks, rtol=0, atol=0)
    torch.testing.assert_close(stacks[0].sum(0), radius.transpose(1, 2).flatten(2))
    (across,) = merged.rearrange(lambda t: (t.transpose(1, 2),))
    assert across.split_by_row() is None
