"""Own modules that differ in what they make of q k^T."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    WIDTH,
    add,
    affine,
    apply,
    attend,
    join,
    later,
    linear,
    own,
    own_heads,
    parameter,
    qkv,
    softmax,
    split,
)


def of(**how):
    """Return the truth of the usual attention with another change or share."""
    return lambda a, x: attend(a, x, **how)


def own_shares(shares, outcome="read", **how):
    """Register modules by what P they make of the logits."""
    for what, share in shares.items():
        truth = {"heads": of(share=share)} | how
        own_heads({what: lambda q, k, v, f=share: f(q @ k.mT) @ v}, outcome, **truth)


def divide_behind(q, k, v):
    e = (q @ k.mT).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


def shift(s):
    e = (s - s.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True)


def sinkhorn(s):
    e = s.exp()
    for _ in range(2):
        e = e / e.sum(-1, keepdim=True)
        e = e / e.sum(-2, keepdim=True)
    return e


def sparsemax(s):
    ordered = s.sort(-1, descending=True).values
    count = torch.arange(1, s.shape[-1] + 1, dtype=s.dtype)
    support = (1 + count * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (s - tau).clamp_min(0)


def by_sum(e, more=0.0):
    return e / (e.sum(-1, keepdim=True) + more)


def lower(s):
    return torch.ones(s.shape[-2:], dtype=s.dtype).tril()


def fill(s, masked):
    return s.masked_fill(masked, -torch.inf)


def far(s):
    i = torch.arange(s.shape[-1])
    return (i[:, None] - i).abs()


def pass_through(s):
    hot = F.one_hot(s.argmax(-1), s.shape[-1]).to(s)
    return hot - s.softmax(-1).detach() + s.softmax(-1)


def mix(s):
    weight = torch.tensor([[0.8, 0.3], [-0.2, 0.9]], dtype=torch.float64)
    return torch.einsum("gh,...hij->...gij", weight, s)


def top_two(s):
    return fill(s, s < s.topk(2, -1).values[..., -1:])


# --- the usual softmax, written in other ways

own("softmax as a module", build=add(soft=lambda: nn.Softmax(-1)))(
    lambda a, x: (lambda q, k, v: a.o(join(a.soft(q @ k.mT) @ v)))(*qkv(a, x))
)
own_shares(
    {
        "softmax": lambda s: s.softmax(-1),
        "softmax over an axis by the name that NumPy has for it": lambda s: s.softmax(axis=-1),
        "softmax in another type": lambda s: F.softmax(s, -1, dtype=torch.float64),
        "exp divided by its sum": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
        "torch.exp, divided by torch.sum with torch.div": lambda s: torch.div(
            torch.exp(s), torch.sum(torch.exp(s), dim=-1).unsqueeze(-1)
        ),
        "exp divided by its sum, the largest logit taken off": shift,
    },
    heads=attend,
)
own_shares(
    {
        "exp of logits less their logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
        "exp of log_softmax": lambda s: s.log_softmax(-1).exp(),
        "exp normalised by F.normalize": lambda s: F.normalize(s.exp(), p=1, dim=-1),
        "exp by einsum with the reciprocal of its sum": lambda s: torch.einsum(
            "bhij,bhi->bhij", s.exp(), 1 / s.exp().sum(-1)
        ),
    },
    "left",
    heads=attend,
)
own_heads(
    {
        "exp times values, divided behind": divide_behind,
        "softmax over keys that lie in axis -2": lambda q, k, v: (k @ q.mT).softmax(-2).mT @ v,
    },
    "left",
)

# --- other maps

own_heads(
    {"softmax over the heads": lambda q, k, v: (q @ k.mT).softmax(1) @ v},
    "left",
    heads=of(share=lambda s: softmax(s.movedim(0, -1)).movedim(-1, 0)),
)
own_shares(
    {
        "softmax with 1 added to the sum": lambda s: by_sum(s.exp(), 1),
        "softmax over the queries": lambda s: s.softmax(-2),
        "sigmoid attention": torch.sigmoid,
        "ReLU attention": lambda s: s.relu() / TOKENS,
        "logits as they are": lambda s: s / TOKENS,
        "sparsemax": sparsemax,
        "a causal mask multiplied in behind exp": lambda s: by_sum(s.exp() * lower(s)),
    },
    "left",
)
own_shares({"one-hot rows, straight through": pass_through}, "left", derivative=False)
own_shares(
    {
        "rows and columns normalised in turn (Sinkhorn)": sinkhorn,
        "softmax, squared": lambda s: s.softmax(-1).square(),
        "softmax of a softmax": lambda s: s.softmax(-1).softmax(-1),
        "softmax, masked and normalised again": lambda s: by_sum(s.softmax(-1) * lower(s)),
        "softmax plus the identity": lambda s: s.softmax(-1) + torch.eye(TOKENS, dtype=s.dtype),
        "softmax times a number": lambda s: 0.5 * s.softmax(-1),
        "heads mixed behind the softmax": lambda s: mix(s.softmax(-1)),
        "heads mixed before the softmax": lambda s: mix(s).softmax(-1),
        "ReLU of the logits before the softmax": lambda s: s.relu().softmax(-1),
        "clamped logits": lambda s: s.clamp(-0.5, 0.5).softmax(-1),
        "logits less their mean over the keys": lambda s: (s - s.mean(-1, keepdim=True)).softmax(
            -1
        ),
        "logits smoothed over neighbouring keys": lambda s: (s + 0.3 * s.roll(1, -1)).softmax(-1),
        "logits plus their transpose": lambda s: (s + s.mT).softmax(-1),
    },
    "numerical",
)
own_shares(
    {
        "dropout, off": lambda s: F.dropout(s.softmax(-1), 0.5, training=False),
        "a soft cap of the logits": lambda s: (2 * torch.tanh(s / 2)).softmax(-1),
        "absolute logits": lambda s: s.abs().softmax(-1),
        "softmax of log(1 + e^l)": lambda s: F.softplus(s).softmax(-1),
        "softmax of cubed logits": lambda s: (s**3).softmax(-1),
        "a causal mask by masked_fill": lambda s: fill(s, later(s)).softmax(-1),
        "a causal mask that is added": lambda s: (
            s + torch.full(s.shape[-2:], -torch.inf, dtype=s.dtype).triu(1)
        ).softmax(-1),
        "a causal mask by where, -1e9": lambda s: torch.where(~later(s), s, -1e9).softmax(-1),
        "a window of three tokens": lambda s: fill(s, far(s) > 1).softmax(-1),
        "a bias by distance": lambda s: (s - 0.3 * far(s).to(s)).softmax(-1),
        "a fully masked row and nan_to_num": lambda s: (
            fill(s, torch.arange(TOKENS)[:, None] == 2).softmax(-1).nan_to_num(0.0)
        ),
        "the two largest logits of each row, others masked": lambda s: top_two(s).softmax(-1),
    }
)

# --- masks, biases and scales

attention = F.scaled_dot_product_attention
own_heads(
    {
        "a mask for the fused attention": lambda q, k, v: attention(
            q, k, v, attn_mask=torch.ones(TOKENS, TOKENS).bool(), scale=1.0
        )
    }
)
own_heads(
    {"causal fused attention": lambda q, k, v: attention(q, k, v, is_causal=True, scale=1.0)},
    heads=of(change=lambda s: fill(s, later(s))),
)
own_heads(
    {"a scale of one's own for the fused attention": lambda *qkv: attention(*qkv, scale=0.3)},
    heads=of(change=lambda s: 0.3 * s),
)


@own(
    "a learned bias of the logits",
    build=add(bias=parameter(HEADS, TOKENS, TOKENS)),
    heads=lambda a, x: attend(a, x, change=lambda s: s + a.bias),
)
def learned_bias(a, x):
    q, k, v = qkv(a, x)
    return a.o(join((q @ k.mT + a.bias).softmax(-1) @ v))


DISTANCE = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS) + TOKENS - 1


def of_relative(a, x):
    bias = torch.einsum("hid,ijd->hij", affine(a.q, x), a.relative[DISTANCE])
    return attend(a, x, change=lambda s: s + bias / 2)


@own(
    "queries that meet relative positions",
    build=add(relative=parameter(2 * TOKENS - 1, 4)),
    heads=of_relative,
)
def relative(a, x):
    q, k, v = qkv(a, x)
    bias = torch.einsum("bhid,ijd->bhij", q, a.relative[DISTANCE])
    return a.o(join((q @ k.mT + bias).softmax(-1) @ v))


def of_cosines(a, x):
    q, k = (F.normalize(affine(m, x), dim=-1) for m in (a.q, a.k))
    return attend(a, x, q=q * 4, k=k)


own_heads(
    {
        "cosines of queries and keys": lambda q, k, v: (
            (2 * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT)).softmax(-1) @ v
        )
    },
    heads=of_cosines,
)

# --- no product of queries and keys


def distances(q, k):
    return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


own_heads(
    {
        "distances of queries and keys (L2 attention)": lambda q, k, v: (
            distances(2 * q, k).softmax(-1) @ v
        ),
        "distances by cdist": lambda q, k, v: (-torch.cdist(2 * q, k).square()).softmax(-1) @ v,
    },
    "left",
    heads=lambda a, x: softmax(distances(affine(a.q, x), affine(a.k, x))) @ affine(a.v, x),
)


def add_up(a, q, k):
    return (q[..., :, None, :] + k[..., None, :, :]).tanh() @ a.score


@own(
    "additive attention (Bahdanau)",
    "left",
    build=add(score=parameter(4)),
    heads=lambda a, x: softmax(add_up(a, affine(a.q, x), affine(a.k, x))) @ affine(a.v, x),
)
def additive(a, x):
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(add_up(a, q, k).softmax(-1) @ v))


def feature(t):
    return F.elu(t) + 1


def of_features(a, x):
    s = feature(affine(a.q, x)) @ feature(affine(a.k, x)).mT
    return s / s.sum(-1, keepdim=True) @ affine(a.v, x)


@own("linear attention", "left", heads=of_features)
def linear_attention(a, x):
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    q, k = feature(q), feature(k)
    return a.o(join(q @ (k.mT @ v) / (q @ k.sum(-2)[..., None])))


def of_turned(a, x):
    q, k, v = apply(a.packed, x).reshape(len(x), 3, HEADS, -1).permute(1, 2, 0, 3) @ a.turn.T
    return attend(a, x, q=q, k=k, v=v)


@own(
    "packed projections, then one matrix on the left of all their columns",
    build=add(
        packed=linear(WIDTH, 3 * WIDTH),
        turn=lambda: nn.Parameter(torch.randn(WIDTH // HEADS, WIDTH // HEADS)),
    ),
    heads=of_turned,
)
def turned_from_the_left(a, x):
    b, n, _ = x.shape
    columns = a.packed(x).reshape(-1, WIDTH // HEADS).t()
    q, k, v = (a.turn @ columns).t().reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    return a.o(join(attention(q, k, v)))
