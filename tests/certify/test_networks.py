"""Whole networks: margins against points, corners and attacks; text with moving tokens."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.reference import loaded, timm_models, transformers_models
from benchmarks.reference.cases import Case
from benchmarks.reference.certificates import outcome_of
from lipaudit.certify.prove import ball, margins, run

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
    """Two blocks on embedded patches, class token or mean."""

    def __init__(self, dim=12, *, batch_norm, activation, token, fused):
        super().__init__()
        norm = TokenNorm if batch_norm else nn.LayerNorm
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, dim)) if token else None
        self.position = nn.Parameter(0.1 * torch.randn(1, 4 + token, dim))
        self.activation = activation
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
        return self.head(x.mean(1) if self.token is None else x[:, 0])


NETWORKS = {
    "batch-norm-relu": {"batch_norm": True, "activation": F.relu, "token": False, "fused": False},
    "layer-norm-gelu": {"batch_norm": False, "activation": F.gelu, "token": True, "fused": True},
    "layer-norm-silu": {"batch_norm": False, "activation": F.silu, "token": False, "fused": False},
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
    moves = form.generators[: form.symbols.n].double().sum(0)
    best = _difference(model(inputs), label).amin(0)
    for j in range(CLASSES - 1):
        at = inputs[_difference(model(inputs), label)[:, j].argmin()][None]
        for _ in range(10):
            at = at.detach().requires_grad_()
            (slope,) = torch.autograd.grad(_difference(model(at), label)[0, j], at)
            if form.symbols.norm == "linf":
                at = form.centre - moves * slope.sign()
            else:
                slope = slope * (moves > 0)
                at = form.centre - moves.amax() * slope / torch.linalg.vector_norm(slope)
            best = torch.minimum(best, _difference(model(at), label)[0].detach())
    return best


@pytest.mark.parametrize(
    ("name", "norm", "order", "dtype"),
    [
        ("batch-norm-relu", "linf", 1, torch.float64),
        ("batch-norm-relu", "l2", 2, torch.float32),
        ("layer-norm-gelu", "linf", 2, torch.float64),
        ("layer-norm-gelu", "l2", 1, torch.float64),
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
    for eps in (1e-7, 5e-3) if norm == "linf" else (1e-7, 2e-2):
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

    def logits():
        return run(lambda t: head(last(F.gelu(into(t)))[:, 0]), start)

    product = logits().reshape(-1)
    product.range()  # multiplies it out
    product.quotient = None
    plain = margins(product, 1)
    start = ball(x, 0.05, norm=norm, order=order, dtype=dtype)
    form = margins(logits(), 1)
    e, inputs = points(start, 400)
    model.double()
    hidden = F.gelu(into(inputs))[:, 0]
    root = (hidden.var(-1, correction=0) + last.eps).sqrt()
    truth = _difference(head(last(hidden)), 1)
    assert excess(plain, e, truth) <= 1e-12
    times_root = not torch.allclose(form.centre, plain.centre, rtol=1e-9)
    assert excess(form, e, truth * (root[:, None] if times_root else 1)) <= 1e-12
    shares = [(each.range()[0] / each.centre.abs()).amin() for each in (form, plain)]
    assert shares[0] > shares[1] if times_root else torch.isclose(*shares, rtol=1e-9)
    assert times_root or order == 2


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


TIMM = ("vit", "deit3", "beit", "eva02", "swin", "convnext", "mlp_mixer", "resnet", "vit-relpos")
TRANSFORMERS = ("bert", "distilbert", "roberta", "gpt2", "llama", "qwen2", "bart", "deberta-v2")


@pytest.mark.parametrize("name", TIMM)
def test_vision_models_run_as_they_are(name):
    assert outcome_of(Case("timm", name))[0] == "runs"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_text_models_run_as_they_are(name):
    assert outcome_of(Case("transformers", name))[0] == "runs"


def _loaders(folder):
    config = transformers_models.small_config("bert")
    return [
        loaded.timm_loader(timm_models.TIMM["vit"]),
        loaded.transformers_loader(config, folder),
    ]


def test_what_is_certified_is_what_attacks_see(tmp_path):
    """Pixels before normalisation, embeddings with the mask of their text; the model's dtype."""
    for loader in _loaders(tmp_path):
        net = loader(loaded.NARROW)
        loaded.perturb(net.module, 0.5)
        sample = loaded.batch_for(net)[1:]
        start = ball(net.point(sample), 0.0, settle=math.inf)
        assert start.dtype is torch.float32
        form = run(functools.partial(net.forward, batch=sample), start, module=net.module)
        output = net.output(sample)
        off = (form.centre - output).abs().amax() / output.abs().amax()
        assert off < 1e-5
