"""Own modules that differ in what they make of q k^T."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    WIDTH,
    HeadMap,
    affine,
    attend,
    join,
    own,
    own_heads,
    qkv,
    softmax,
    split,
)
from tests.models.attention.own_weights import add, parameter


def shared(a: Any, x: Tensor, share: HeadMap) -> Tensor:
    """Make P of q k^T as `share` does, weight the values with it, and project."""
    q, k, v = qkv(a, x)
    return a.o(join(share(q @ k.mT) @ v))


def of(**how: Any) -> Any:
    """Return the truth of the usual attention with another change or share."""
    return lambda a, x: attend(a, x, **how)


@own("softmax as a module", build=add(soft=lambda: nn.Softmax(-1)))
def softmax_module(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, a.soft)


@own_heads("exp times values, divided behind", "left")
def divided_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


@own_heads("softmax over keys that lie in axis -2", "left")
def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT).softmax(-2).mT @ v


@own(
    "softmax over the heads",
    "left",
    heads=of(share=lambda s: softmax(s.movedim(0, -1)).movedim(-1, 0)),
)
def over_heads(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: s.softmax(1))


def _shifted(s: Tensor) -> Tensor:
    e = (s - s.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True)


def _sinkhorn(s: Tensor) -> Tensor:
    e = s.exp()
    for _ in range(2):
        e = e / e.sum(-1, keepdim=True)
        e = e / e.sum(-2, keepdim=True)
    return e


def _sparsemax(s: Tensor) -> Tensor:
    ordered = s.sort(-1, descending=True).values
    count = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    support = (1 + count * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (s - tau).clamp_min(0)


def _by_sum(e: Tensor, more: float = 0.0) -> Tensor:
    return e / (e.sum(-1, keepdim=True) + more)


def _lower(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-2:], dtype=s.dtype).tril()


def _later(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)


def _far(s: Tensor) -> Tensor:
    i = torch.arange(s.shape[-1])
    return (i[:, None] - i).abs()


def _straight_through(s: Tensor) -> Tensor:
    hot = F.one_hot(s.argmax(-1), s.shape[-1]).to(s)
    return hot - s.softmax(-1).detach() + s.softmax(-1)


def _mixed(s: Tensor) -> Tensor:
    weight = torch.tensor([[0.8, 0.3], [-0.2, 0.9]], dtype=torch.float64)
    return torch.einsum("gh,...hij->...gij", weight, s)


Shares = dict[str, dict[str, tuple[str, HeadMap]]]
"""Outcome -> name -> what it is, and what it makes of the logits."""
SOFTMAX: Shares = {  # the usual one, written in other ways
    "read": {
        "plain_softmax": ("softmax", lambda s: s.softmax(-1)),
        "softmax_typed": (
            "softmax in another type",
            lambda s: F.softmax(s, -1, dtype=torch.float64),
        ),
        "by_sum": ("exp divided by its sum", lambda s: s.exp() / s.exp().sum(-1, keepdim=True)),
        "by_functions": (
            "torch.exp, divided by torch.sum with torch.div",
            lambda s: torch.div(torch.exp(s), torch.sum(torch.exp(s), dim=-1).unsqueeze(-1)),
        ),
        "by_sum_shifted": ("exp divided by its sum, the largest logit taken off", _shifted),
    },
    "left": {
        "by_logsumexp": (
            "exp of logits less their logsumexp",
            lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
        ),
        "by_log_softmax": ("exp of log_softmax", lambda s: s.log_softmax(-1).exp()),
        "by_normalize": (
            "exp normalised by F.normalize",
            lambda s: F.normalize(s.exp(), p=1, dim=-1),
        ),
        "by_einsum": (
            "exp by einsum with the reciprocal of its sum",
            lambda s: torch.einsum("bhij,bhi->bhij", s.exp(), 1 / s.exp().sum(-1)),
        ),
    },
}
OTHER: Shares = {
    "left": {
        "softmax_one": ("softmax with 1 added to the sum", lambda s: _by_sum(s.exp(), 1)),
        "over_queries": ("softmax over the queries", lambda s: s.softmax(-2)),
        "sigmoid": ("sigmoid attention", torch.sigmoid),
        "relu_attention": ("ReLU attention", lambda s: s.relu() / TOKENS),
        "raw_logits": ("logits as they are", lambda s: s / TOKENS),
        "sparsemax": ("sparsemax", _sparsemax),
        "causal_product": (
            "a causal mask multiplied in behind exp",
            lambda s: _by_sum(s.exp() * _lower(s)),
        ),
        "straight_through": ("one-hot rows, straight through", _straight_through),
    },
    "numerical": {
        "sinkhorn": ("rows and columns normalised in turn (Sinkhorn)", _sinkhorn),
        "squared": ("softmax, squared", lambda s: s.softmax(-1).square()),
        "twice": ("softmax of a softmax", lambda s: s.softmax(-1).softmax(-1)),
        "renormalised": (
            "softmax, masked and normalised again",
            lambda s: _by_sum(s.softmax(-1) * _lower(s)),
        ),
        "plus_identity": (
            "softmax plus the identity",
            lambda s: s.softmax(-1) + torch.eye(s.shape[-1], dtype=s.dtype),
        ),
        "scaled_map": ("softmax times a number", lambda s: 0.5 * s.softmax(-1)),
        "talking": ("heads mixed behind the softmax", lambda s: _mixed(s.softmax(-1))),
        "talking_before": ("heads mixed before the softmax", lambda s: _mixed(s).softmax(-1)),
        "relu_logits": (
            "ReLU of the logits before the softmax",
            lambda s: s.relu().softmax(-1),
        ),
        "clamped": ("clamped logits", lambda s: s.clamp(-0.5, 0.5).softmax(-1)),
        "centred": (
            "logits less their mean over the keys",
            lambda s: (s - s.mean(-1, keepdim=True)).softmax(-1),
        ),
        "convolved": (
            "logits smoothed over neighbouring keys",
            lambda s: (s + 0.3 * s.roll(1, -1)).softmax(-1),
        ),
        "symmetric": ("logits plus their transpose", lambda s: (s + s.mT).softmax(-1)),
    },
    "read": {
        "dropped": ("dropout, off", lambda s: F.dropout(s.softmax(-1), 0.5, training=False)),
        "capped": ("a soft cap of the logits", lambda s: (2 * torch.tanh(s / 2)).softmax(-1)),
        "absolute": ("absolute logits", lambda s: s.abs().softmax(-1)),
        "log_one": ("softmax of log(1 + e^l)", lambda s: F.softplus(s).softmax(-1)),
        "cubed": ("softmax of cubed logits", lambda s: (s**3).softmax(-1)),
        "causal_filled": (
            "a causal mask by masked_fill",
            lambda s: s.masked_fill(_later(s), -torch.inf).softmax(-1),
        ),
        "causal_added": (
            "a causal mask that is added",
            lambda s: (s + torch.full(s.shape[-2:], -torch.inf, dtype=s.dtype).triu(1)).softmax(
                -1
            ),
        ),
        "causal_where": (
            "a causal mask by where, -1e9",
            lambda s: torch.where(~_later(s), s, -1e9).softmax(-1),
        ),
        "windowed": (
            "a window of three tokens",
            lambda s: s.masked_fill(_far(s) > 1, -torch.inf).softmax(-1),
        ),
        "distances": ("a bias by distance", lambda s: (s - 0.3 * _far(s).to(s)).softmax(-1)),
        "masked_rows": (
            "a fully masked row and nan_to_num",
            lambda s: (
                s.masked_fill(torch.arange(TOKENS)[:, None] == 2, -torch.inf)
                .softmax(-1)
                .nan_to_num(0.0)
            ),
        ),
        "top_two": (
            "the two largest logits of each row, others masked",
            lambda s: s.masked_fill(s < s.topk(2, -1).values[..., -1:], -torch.inf).softmax(-1),
        ),
    },
}


def own_shares(shares: Shares, truth: Callable[[HeadMap], Any]) -> None:
    """Register a module for each way to make P of the logits."""
    for outcome, named in shares.items():
        for name, (what, share) in named.items():

            def forward(a: Any, x: Tensor, share: HeadMap = share) -> Tensor:
                return shared(a, x, share)

            forward.__name__ = name
            derivative = name != "straight_through"
            own(what, outcome, heads=truth(share), derivative=derivative)(forward)


own_shares(SOFTMAX, lambda _: attend)
own_shares(OTHER, lambda share: of(share=share))


@own("a mask for the fused attention")
def fused_mask(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    mask = torch.ones(TOKENS, TOKENS).bool()
    return a.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


@own(
    "causal fused attention",
    heads=of(change=lambda s: s.masked_fill(_later(s), -torch.inf)),
)
def fused_causal(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@own("a scale of one's own for the fused attention", heads=of(change=lambda s: s * 2 * 0.3))
def fused_scale(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(q, k, v, scale=0.3)))


BIAS = add(bias=parameter(HEADS, TOKENS, TOKENS))


@own(
    "a learned bias of the logits",
    build=BIAS,
    heads=lambda a, x: attend(a, x, change=lambda s: s + a.bias),
)
def learned_bias(a: Any, x: Tensor) -> Tensor:
    return shared(a, x, lambda s: (s + a.bias).softmax(-1))


RELATIVE = add(relative=parameter(2 * TOKENS - 1, 4))
_DISTANCE = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS) + TOKENS - 1


def of_relative(a: Any, x: Tensor) -> Tensor:
    bias = torch.einsum("hid,ijd->hij", affine(a.q, x), a.relative[_DISTANCE])
    return attend(a, x, change=lambda s: s + bias / 2)


@own("queries that meet relative positions", build=RELATIVE, heads=of_relative)
def relative(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    bias = torch.einsum("bhid,ijd->bhij", q, a.relative[_DISTANCE])
    return a.o(join((q @ k.mT + bias).softmax(-1) @ v))


def _cosine(a: Any, x: Tensor) -> Tensor:
    q, k = (F.normalize(affine(m, x), dim=-1) for m in (a.q, a.k))
    return attend(a, x, q=q * 4, k=k)


@own("cosines of queries and keys", heads=_cosine)
def cosine(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return a.o(join((2 * s).softmax(-1) @ v))


def _distances(q: Tensor, k: Tensor) -> Tensor:
    return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def of_distances(a: Any, x: Tensor) -> Tensor:
    return softmax(_distances(affine(a.q, x), affine(a.k, x))) @ affine(a.v, x)


@own("distances of queries and keys (L2 attention)", "left", heads=of_distances)
def euclidean(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(_distances(q, k).softmax(-1) @ v))


@own("distances by cdist", "left", heads=of_distances)
def by_cdist(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join((-torch.cdist(q, k).square()).softmax(-1) @ v))


def _added(a: Any, q: Tensor, k: Tensor) -> Tensor:
    return (q[..., :, None, :] + k[..., None, :, :]).tanh() @ a.score


@own(
    "additive attention (Bahdanau)",
    "left",
    build=add(score=parameter(4)),
    heads=lambda a, x: softmax(_added(a, affine(a.q, x), affine(a.k, x))) @ affine(a.v, x),
)
def additive(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(_added(a, q, k).softmax(-1) @ v))


def _feature(t: Tensor) -> Tensor:
    return F.elu(t) + 1


def _by_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _feature(q) @ _feature(k).mT
    return s / s.sum(-1, keepdim=True) @ v


@own(
    "linear attention",
    "left",
    heads=lambda a, x: _by_features(*(affine(m, x) for m in (a.q, a.k, a.v))),
)
def linear_attention(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    q, k = _feature(q), _feature(k)
    return a.o(join(q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])))


def turn_packed(a: Any, x: Tensor) -> Tensor:
    """Return the heads of one sample whose packed channels are turned."""
    d = WIDTH // HEADS
    y = (x @ a.packed.weight.T + a.packed.bias).reshape(len(x), 3, HEADS, d) @ a.turn.T
    q, k, v = y.permute(1, 2, 0, 3)
    return softmax(q @ k.mT / d**0.5) @ v


@own(
    "packed projections, then one matrix on the left of all their columns",
    build=add(
        packed=lambda: nn.Linear(WIDTH, 3 * WIDTH),
        turn=lambda: nn.Parameter(torch.randn(WIDTH // HEADS, WIDTH // HEADS)),
    ),
    heads=turn_packed,
)
def turned_from_the_left(a: Any, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    columns = a.packed(x).reshape(-1, WIDTH // HEADS).t()
    q, k, v = (a.turn @ columns).t().reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v)
    return a.o(o.transpose(1, 2).flatten(2))
