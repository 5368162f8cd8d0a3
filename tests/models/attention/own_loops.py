"""Own modules whose heads are computed in a Python loop, each by maps of its own."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    WIDTH,
    Layer,
    add,
    affine,
    apply,
    attend,
    later,
    own,
    parameter,
    softmax,
)

D = WIDTH // HEADS
Map = Callable[[Tensor], Tensor]
attention = F.scaled_dot_product_attention


def parts(*maps, change=lambda s: s / D**0.5):
    """Return the truth of heads with these maps for q, k and v of one sample."""

    def heads(x):
        return torch.stack([softmax(change(q(x) @ k(x).mT)) @ v(x) for q, k, v in maps])

    return heads


def matrices(w):
    """Return the maps x W of a stack of three matrices."""
    q, k, v = (lambda x, m=m: x @ m for m in w)
    return q, k, v


def linears(*modules):
    """Return the maps of three linear layers."""
    q, k, v = (partial(apply, m) for m in modules)
    return q, k, v


def one_layer(maps, **how):
    """Return the truth that these are heads of one layer."""
    return lambda a: (Layer(parts(*maps(a), **how)),)


def a_layer_each(maps, **how):
    """Return the truth that each of these is a layer."""
    return lambda a: tuple(Layer(parts(each, **how)) for each in maps(a))


class Head(nn.Module):
    """One head as tutorials have it."""

    def __init__(self, *, causal=False, width=D, out=False):
        super().__init__()
        self.key = nn.Linear(WIDTH, width)
        self.query = nn.Linear(WIDTH, width)
        self.value = nn.Linear(WIDTH, width)
        self.register_buffer("tril", torch.tril(torch.ones(9, 9)))
        self.dropout = nn.Dropout(0.2)
        self.causal = causal
        self.out = nn.Linear(width, WIDTH) if out else None

    def forward(self, x):
        _, n, _ = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * D**-0.5
        if self.causal:
            wei = wei.masked_fill(self.tril[:n, :n] == 0, float("-inf"))
        o = self.dropout(F.softmax(wei, dim=-1)) @ self.value(x)
        return o if self.out is None else self.out(o)


class MultiHead(nn.Module):
    """A list of heads."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([Head(causal=True) for _ in range(HEADS)])
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class Looped(nn.Module):
    """A loop over the heads of packed projections."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = zip(*(t.split(D, -1) for t in self.qkv(x).chunk(3, -1)), strict=True)
        return self.proj(torch.cat([attention(*qkv) for qkv in heads], -1))


def split_maps(qkv):
    """Return the maps of the heads of packed projections."""
    rows = [slice(i * D, (i + 1) * D) for i in range(3 * HEADS)]
    maps = [lambda x, r=r: x @ qkv.weight[r].T + qkv.bias[r] for r in rows]
    return [(maps[h], maps[HEADS + h], maps[2 * HEADS + h]) for h in range(HEADS)]


def modules(a):
    return [linears(h.query, h.key, h.value) for h in a.heads]


def causal(s):
    return (s / D**0.5).masked_fill(later(s), -torch.inf)


def listed(**how):
    return add(heads=lambda: nn.ModuleList(Head(**how) for _ in range(HEADS)))


def lists(**sizes):
    """Add lists of linear layers to D channels: how many, by name."""

    def build(a):
        for name, count in sizes.items():
            setattr(a, name, nn.ModuleList(nn.Linear(WIDTH, D) for _ in range(count)))

    return build


def weights(*shape):
    """Add the weights of q, k and v of each head."""
    return add(w=lambda: nn.ParameterList(nn.Parameter(torch.randn(*shape)) for _ in range(HEADS)))


def join_modules(a, x):
    return a.o(torch.cat([head(x) for head in a.heads], -1))


own(
    "a loop over a ParameterList: three matrices per head",
    build=weights(3, WIDTH, D),
    truth=one_layer(lambda a: map(matrices, a.w)),
)(lambda a, x: a.o(torch.cat([attention(*(x @ part for part in w)) for w in a.w], -1)))
own("a module per head (nanoGPT's Head), side by side", build=listed(), truth=one_layer(modules))(
    join_modules
)
own(
    "nanoGPT's MultiHeadAttention of causal heads",
    build=add(sa=MultiHead),
    truth=one_layer(lambda a: modules(a.sa), change=causal),
)(lambda a, x: a.sa(x))
own(
    "two modules side by side, each a loop over heads of its own",
    build=add(first=Looped, second=Looped),
    truth=lambda a: tuple(Layer(parts(*split_maps(m.qkv))) for m in (a.first, a.second)),
)(lambda a, x: a.first(x) + a.second(x))
own(
    "heads of different widths, a module each",
    "read in parts",
    build=add(heads=lambda: nn.ModuleList(Head(width=w) for w in (3, 5))),
    truth=a_layer_each(modules),
)(join_modules)
own(
    "a module per head, with an output map of its own; their sum",
    build=listed(out=True),
    truth=one_layer(modules),
)(lambda a, x: sum(head(x) for head in a.heads))


@own(
    "a module per head, each a loop over chunks of its queries",
    "read in parts",
    build=listed(),
    truth=a_layer_each(modules),
)
def heads_in_chunks(a, x):
    o = []
    for head in a.heads:
        k, v = head.key(x), head.value(x)
        chunks = [attention(q, k, v) for q in head.query(x).split(3, 1)]
        o.append(torch.cat(chunks, 1))
    return a.o(torch.cat(o, -1))


def make_lists(a):
    lists(qs=4, ks=4, vs=4)(a)
    a.os = nn.ModuleList(nn.Linear(D, WIDTH) for _ in range(4))


@own(
    "lists of linear layers for q, k and v, and for the output",
    build=make_lists,
    truth=one_layer(
        lambda a: [linears(*each) for each in zip(a.qs, a.ks, a.vs, strict=True)], change=causal
    ),
)
def listed_maps(a, x):
    out = torch.zeros_like(x)
    for q, k, v, o in zip(a.qs, a.ks, a.vs, a.os, strict=True):
        out = out + o(attention(q(x), k(x), v(x), is_causal=True))
    return out


@own(
    "linear layers per head, stacked before one attention",
    build=lists(qs=HEADS, ks=HEADS, vs=HEADS),
    truth=one_layer(lambda a: [linears(*each) for each in zip(a.qs, a.ks, a.vs, strict=True)]),
)
def listed_stack(a, x):
    q, k, v = (torch.stack([m(x) for m in each], 1) for each in (a.qs, a.ks, a.vs))
    return a.o(attention(q, k, v).transpose(1, 2).flatten(2))


@own(
    "a linear layer per query head, one key and value for all",
    build=lists(qs=HEADS, ks=1, vs=1),
    truth=one_layer(lambda a: [linears(q, a.ks[0], a.vs[0]) for q in a.qs]),
)
def listed_queries(a, x):
    k, v = a.ks[0](x), a.vs[0](x)
    return a.o(torch.cat([attention(q(x), k, v) for q in a.qs], -1))


@own(
    "a linear layer per key head, one query for all",
    build=lists(qs=1, ks=HEADS, vs=HEADS),
    truth=one_layer(lambda a: [linears(a.qs[0], k, v) for k, v in zip(a.ks, a.vs, strict=True)]),
)
def listed_keys(a, x):
    q = a.qs[0](x)
    o = [attention(q, k(x), v(x)) for k, v in zip(a.ks, a.vs, strict=True)]
    return a.o(torch.cat(o, -1))


@own(
    "a loop over grouped heads, whose keys are computed again for each",
    build=lists(qs=4, ks=2, vs=2),
    truth=one_layer(lambda a: [linears(a.qs[h], a.ks[h // 2], a.vs[h // 2]) for h in range(4)]),
)
def listed_groups(a, x):
    o = [attention(a.qs[h](x), a.ks[h // 2](x), a.vs[h // 2](x)) for h in range(4)]
    return a.o(torch.cat(o[:2], -1) + torch.cat(o[2:], -1))


def split_joint(m):
    """Return the maps of one layer for q, k and v."""
    return [lambda x, i=i: apply(m, x)[..., i * D : (i + 1) * D] for i in range(3)]


@own(
    "a linear layer per head for q, k and v together",
    build=add(qkv=lambda: nn.ModuleList(nn.Linear(WIDTH, 3 * D) for _ in range(HEADS))),
    truth=one_layer(lambda a: map(split_joint, a.qkv)),
)
def listed_joint(a, x):
    o = []
    for m in a.qkv:
        q, k, v = m(x).chunk(3, -1)
        o.append((q @ k.mT / D**0.5).softmax(-1) @ v)
    return a.o(torch.cat(o, -1))


# --- heads that cannot be joined


@own(
    "a loop over heads of different temperatures, fused",
    "read in parts",
    build=weights(3, WIDTH, D),
    truth=lambda a: tuple(
        Layer(parts(matrices(w), change=partial(torch.mul, i + 0.5))) for i, w in enumerate(a.w)
    ),
)
def warm_loop(a, x):
    o = [attention(*(x @ part for part in w), scale=i + 0.5) for i, w in enumerate(a.w)]
    return a.o(torch.cat(o, -1))


@own(
    "a loop over the heads of learned queries",
    "read in parts",
    build=add(latent=parameter(3, WIDTH)),
    truth=lambda a: tuple(
        Layer(lambda x, h=h: attend(a, x, q=affine(a.q, a.latent))[h, None]) for h in range(HEADS)
    ),
)
def latent_loop(a, x):
    q = a.q(a.latent).expand(len(x), -1, -1)
    split = zip(*(t.chunk(HEADS, -1) for t in (q, a.k(x), a.v(x))), strict=True)
    o = [attention(*head) for head in split]
    return x + a.o(torch.cat(o, -1)).mean(1, keepdim=True)


@own(
    "heads that read a part of the channels each, by maps of their own",
    "read in parts",
    build=weights(3, D, D),
    truth=lambda a: tuple(
        Layer(parts(matrices(w)), before=lambda x, i=i: x[..., i * D : (i + 1) * D])
        for i, w in enumerate(a.w)
    ),
)
def part_loop(a, x):
    o = [
        attention(*(z @ part for part in w)) for w, z in zip(a.w, x.chunk(HEADS, -1), strict=True)
    ]
    return a.o(torch.cat(o, -1))


@own(
    "a loop over windows of tokens, one head",
    "read in parts",
    truth=lambda a: tuple(
        Layer(
            parts(linears(a.q, a.k, a.v), change=lambda s: s / WIDTH**0.5),
            before=lambda x, i=i: x[i : i + 2],
        )
        for i in (0, 2)
    ),
)
def window_loop(a, x):
    o = [attention(*(m(x[:, i : i + 2]) for m in (a.q, a.k, a.v))) for i in (0, 2)]
    return a.o(F.pad(torch.cat(o, 1), (0, 0, 0, TOKENS - 4)))
