"""Own modules that differ in how q, k and v come about."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    USUAL,
    WIDTH,
    Layer,
    add,
    affine,
    apply,
    attend,
    attend_packed,
    join,
    linear,
    own,
    own_heads,
    parameter,
    qkv,
    sdpa,
    softmax,
    split,
)

Part = Callable[[Any, Tensor], Tensor]


def each(make):
    """Return what makes a part for each of q, k and v."""

    def build():
        parts = {n: make() for n in "qkv"}
        return (
            nn.ModuleDict(parts) if isinstance(parts["q"], nn.Module) else nn.ParameterDict(parts)
        )

    return build


def own_maps(cases, part, build=lambda _: None):
    """Register modules by how each of q, k and v, of this name, is made; `part` is the truth."""

    def heads(a, x):
        return attend(a, x, **{n: split(part(a, x, n)) for n in "qkv"})

    for what, make in cases.items():
        own(what, heads=heads, build=build)(
            lambda a, x, make=make: sdpa(a, *(make(a, x, n) for n in "qkv"))
        )


def own_parts(cases, outcome="read", build=lambda _: None):
    """Register the usual attention with other functions of the module and x for q, k or v."""
    for what, parts in cases.items():

        def forward(a, x, parts=parts):
            made = (parts.get(n, lambda a, x, n=n: getattr(a, n)(x))(a, x) for n in "qkv")
            return sdpa(a, *made)

        def heads(a, x, parts=parts):
            return attend(a, x, **{n: split(part(a, x)) for n, part in parts.items()})

        own(what, outcome, heads=heads, build=build)(forward)


def weight(a, n):
    """Return the weight of q, k or v."""
    return getattr(a, n).weight


def standardise(w):
    return (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)


own(USUAL)(lambda a, x: sdpa(a, a.q(x), a.k(x), a.v(x)))
own(
    "one linear layer for q, k and v",
    build=add(qkv=linear(WIDTH, 3 * WIDTH)),
    heads=lambda a, x: attend_packed(a, x, apply(a.qkv, x)),
)(lambda a, x: sdpa(a, *a.qkv(x).chunk(3, -1)))
own_maps(
    {
        "weights as matrices": lambda a, x, n: x @ weight(a, n).T,
        "weights times 1": lambda a, x, n: x @ (weight(a, n).T * 1),
        "weights on the left of the tokens": lambda a, x, n: (weight(a, n) @ x.mT).mT,
        "weights on the left in einsum": lambda a, x, n: torch.einsum(
            "ed,bnd->bne", weight(a, n), x
        ),
        "tensordot": lambda a, x, n: torch.tensordot(x, weight(a, n), ([2], [1])),
    },
    lambda a, x, n: x @ weight(a, n).T,
)
own_maps(
    {"standardised weights": lambda a, x, n: F.linear(x, standardise(weight(a, n)))},
    lambda a, x, n: x @ standardise(weight(a, n)).T,
)
own_maps(
    {
        "addmm over all tokens": lambda a, x, n: torch.addmm(
            getattr(a, n).bias, x.flatten(0, 1), weight(a, n).T
        ).view_as(x),
        "addmm over all tokens, with the bias as a row": lambda a, x, n: torch.addmm(
            getattr(a, n).bias[None], x.flatten(0, 1), weight(a, n).T
        ).view_as(x),
    },
    lambda a, x, n: apply(getattr(a, n), x),
)
own_maps(
    {
        "linear layers whose bias is one number": lambda a, x, n: F.linear(
            x, weight(a, n), getattr(a, n).bias[:1]
        )
    },
    lambda a, x, n: x @ weight(a, n).T + getattr(a, n).bias[:1],
)
own_parts(
    {
        "queries by addmm, with a vector of each position": {
            "q": lambda a, x: torch.addmm(
                a.positions.repeat(x.numel() // a.positions.numel(), 1),
                x.flatten(0, -2),
                a.q.weight.T,
            ).view_as(x)
        }
    },
    "numerical",
    add(positions=parameter(TOKENS, WIDTH)),
)
for kind in ("weight_norm", "spectral_norm"):
    own(
        f"weights under {kind}",
        build=lambda a, kind=kind: [getattr(parametrizations, kind)(m) for m in (a.q, a.k, a.v)],
    )(lambda a, x: sdpa(a, a.q(x), a.k(x), a.v(x)))

for what, make in {
    "einsum with parameters of three axes": lambda x, w: torch.einsum("bnc,hcd->bhnd", x, w),
    "a batched product with parameters of three axes": lambda x, w: x[:, None] @ w,
}.items():
    own(
        what,
        build=add(w=each(parameter(HEADS, WIDTH, 4))),
        heads=lambda a, x: attend(a, x, **{n: x @ w for n, w in a.w.items()}),
    )(
        lambda a, x, make=make: a.o(
            join(F.scaled_dot_product_attention(*(make(x, a.w[n]) for n in "qkv")))
        )
    )

LORA = add(up=each(parameter(WIDTH, 2)), down=each(parameter(WIDTH, 2)))
own_maps(
    {
        "LoRA merged in forward": lambda a, x, n: F.linear(
            x, weight(a, n) + a.up[n] @ a.down[n].T, getattr(a, n).bias
        ),
        "LoRA beside the weights": lambda a, x, n: getattr(a, n)(x) + x @ a.down[n] @ a.up[n].T,
    },
    lambda a, x, n: apply(getattr(a, n), x) + x @ a.down[n] @ a.up[n].T,
    LORA,
)
own_maps(
    {
        "weights of low rank, multiplied out": lambda a, x, n: x @ (a.down[n] @ a.up[n].T),
        "two linear layers in a row for each of q, k and v": (
            lambda a, x, n: x @ a.down[n] @ a.up[n].T
        ),
    },
    lambda a, x, n: x @ a.down[n] @ a.up[n].T,
    LORA,
)


def itself(_, x):
    return x


own_parts({"q and k of one map": {"k": lambda a, x: a.q(x)}})
own_parts(
    {
        "values that are the input": {"v": itself},
        "queries, keys and values that are the input": dict.fromkeys("qkv", itself),
        "keys and values that are the input": {"k": itself, "v": itself},
        "queries and keys that are the input": {"q": itself, "k": itself},
        "queries in another order": {"q": lambda a, x: a.q(x).flip(-2)},
        "flipped keys": {n: lambda a, x, n=n: getattr(a, n)(x).flip(-2) for n in "kv"},
        "queries that are the input times a vector": {"q": lambda a, x: x * a.gain},
        "queries and keys that are the input times vectors, values that are the input": {
            "q": lambda a, x: x * a.gain,
            "k": lambda a, x: x * a.other,
            "v": itself,
        },
        "keys of a 1x1 convolution with a stride and padding": {"k": lambda a, x: a.conv(x.mT).mT},
    },
    "numerical",
    add(
        gain=parameter(WIDTH),
        other=parameter(WIDTH),
        conv=lambda: nn.Conv1d(WIDTH, WIDTH, 1, stride=2, padding=2),  # as many as tokens
    ),
)
own_parts(
    {"fixed projections in buffers": {"q": lambda a, x: x @ a.fixed}},
    build=lambda a: a.register_buffer("fixed", torch.randn(WIDTH, WIDTH)),
)
own_parts(
    {
        "weights made by a small network of an embedding": {
            "q": lambda a, x: x @ a.net(a.code).view(WIDTH, WIDTH)
        },
        "values times a gate": {"v": lambda a, x: a.v(x) * a.gate(x).sigmoid()},
    },
    build=add(code=parameter(4), net=linear(4, WIDTH * WIDTH), gate=linear()),
)


@own("k and v of one map", heads=lambda a, x: attend(a, x, v=affine(a.k, x)))
def tied_values(a, x):
    k = a.k(x)
    return sdpa(a, a.q(x), k, k)


own(
    "1x1 convolutions",
    build=add(conv=each(lambda: nn.Conv1d(WIDTH, WIDTH, 1))),
    heads=lambda a, x: attend(
        a, x, **{n: split(x @ c.weight[:, :, 0].T + c.bias) for n, c in a.conv.items()}
    ),
)(lambda a, x: sdpa(a, *(c(x.mT).mT for c in a.conv.values())))
own(
    "convolutions of groups, over a map, and with padding by its name",
    build=add(
        groups=lambda: nn.Conv2d(WIDTH, WIDTH, 1, groups=HEADS),
        named=lambda: nn.Conv1d(WIDTH, WIDTH, 1, padding="same"),
    ),
    heads=lambda a, x: attend(
        a,
        x,
        q=split(x @ torch.block_diag(*a.groups.weight.flatten(1).chunk(HEADS)).T + a.groups.bias),
        k=split(x @ a.named.weight[:, :, 0].T + a.named.bias),
    ),
)(lambda a, x: sdpa(a, a.groups(x.mT[..., None])[..., 0].mT, a.named(x.mT).mT, a.v(x)))


@own(
    "positions added in the module",
    build=add(position=parameter(TOKENS, WIDTH)),
    heads=lambda a, x: attend(a, x + a.position),
)
def positions(a, x):
    x = x + a.position
    return sdpa(a, a.q(x), a.k(x), a.v(x))


NORM = add(norm=lambda: nn.LayerNorm(WIDTH))


@own(
    "a LayerNorm in the module",
    build=NORM,
    truth=lambda a: (Layer(lambda x: attend(a, x), a.norm),),
)
def normed(a, x):
    x = a.norm(x)
    return sdpa(a, a.q(x), a.k(x), a.v(x))


def of_normed(a, x, **parts):
    """Return the heads whose queries and keys read normed tokens."""
    return attend(a, x, q=affine(a.q, a.norm(x)), k=affine(a.k, a.norm(x)), **parts)


@own("a LayerNorm before q and k alone", "numerical", build=NORM, heads=of_normed)
def normed_keys(a, x):
    y = a.norm(x)
    return sdpa(a, a.q(y), a.k(y), a.v(x))


@own(
    "values that are the input, q and k behind a LayerNorm",
    "numerical",
    build=NORM,
    heads=lambda a, x: of_normed(a, x, v=split(x)),
)
def normed_identity(a, x):
    y = a.norm(x)
    return sdpa(a, a.q(y), a.k(y), x)


@own(
    "rolled keys",
    "numerical",
    heads=lambda a, x: attend(a, x, k=affine(a.k, x.roll(1, 0)), v=affine(a.v, x.roll(1, 0))),
)
def rolled(a, x):
    y = x.roll(1, 1)
    return sdpa(a, a.q(x), a.k(y), a.v(y))


def unit(t):
    return t / t.square().mean(-1, keepdim=True).sqrt()


def rotate(t):
    angle = torch.arange(TOKENS, dtype=t.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=t.dtype)
    a, b = t.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def turn(t):
    """Turn pairs of channels as complex numbers, by an angle for each position."""
    angle = torch.arange(t.shape[-2], dtype=t.dtype)[:, None] * t.new_tensor([1.0, 0.3])
    pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


for what, move in {
    "a norm of each query and key": unit,
    "rotary positions": rotate,
    "rotary positions by complex numbers": turn,
}.items():
    own_heads(
        {what: lambda q, k, v, f=move: F.scaled_dot_product_attention(f(2 * q), f(k), v)},
        heads=lambda a, x, f=move: attend(a, x, q=f(affine(a.q, x)), k=f(affine(a.k, x))),
    )


@own("the output times a gate", build=add(gate=linear()))
def gated_output(a, x):
    o = F.scaled_dot_product_attention(*(split(m(x)) for m in (a.q, a.k, a.v)))
    return a.o(join(o) * a.gate(x).sigmoid())


@own(
    "one head of keys for all",
    build=add(kv=linear()),
    heads=lambda a, x: attend(a, x, k=apply(a.kv, x)[:, :4], v=apply(a.kv, x)[:, 4:]),
)
def one_key(a, x):
    k, v = a.kv(x)[:, None].chunk(2, -1)
    q = split(a.q(x))
    return a.o(join(F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))))


@own(
    "values of another width",
    build=add(wide=linear(WIDTH, 12), back=linear(12, WIDTH)),
    heads=lambda a, x: attend(a, x, v=affine(a.wide, x)),
)
def wide_values(a, x):
    o = F.scaled_dot_product_attention(split(a.q(x)), split(a.k(x)), split(a.wide(x)))
    return a.back(join(o))


@own(
    "a temperature per head that is learned",
    build=add(log=parameter(HEADS, 1, 1)),
    heads=lambda a, x: attend(a, x, change=lambda logits: logits * a.log.exp()),
)
def temperature(a, x):
    q, k, v = qkv(a, x)
    return a.o(join(((q @ k.mT) * a.log.exp()).softmax(-1) @ v))


@own(
    "a temperature made of the input",
    "numerical",
    build=add(heat=linear(WIDTH, 1)),
    heads=lambda a, x: attend(a, x, change=lambda logits: logits * apply(a.heat, x).exp()),
)
def heated(a, x):
    q, k, v = qkv(a, x)
    return a.o(join(((q @ k.mT) * a.heat(x).exp()[:, None]).softmax(-1) @ v))


def apart(first, other=itself):
    """Return the truth where queries read other tokens than keys: in x, or in both apart."""

    def truth(a):
        def heads(z):
            n = len(first(a, torch.zeros(TOKENS, WIDTH)))
            return attend(a, z[n:], q=affine(a.q, z[:n]))

        def both(x):
            return torch.cat([first(a, x), other(a, x)])

        return (Layer(lambda x: heads(both(x)), apart=Layer(heads, both)),)

    return truth


own("queries of the first token alone", truth=apart(lambda _, x: x[:1]))(
    lambda a, x: x + sdpa(a, a.q(x[:, :1]), a.k(x), a.v(x))
)
own(
    "queries of one half of the tokens, keys of the other",
    truth=apart(lambda _, x: x[:2], lambda _, x: x[2:]),
)(lambda a, x: x + sdpa(a, a.q(x[:, :2]), a.k(x[:, 2:]), a.v(x[:, 2:])).mean(1, keepdim=True))
LATENT = add(latent=parameter(3, WIDTH))


@own("learned queries", build=LATENT, heads=lambda a, x: attend(a, x, q=affine(a.q, a.latent)))
def learned_queries(a, x):
    q = a.q(a.latent).expand(len(x), -1, -1)
    return x + sdpa(a, q, a.k(x), a.v(x)).mean(1, keepdim=True)


def share_queries(scores):
    """Return a layer of one head whose learned queries have no axis of samples."""

    def forward(a, x):
        p = (scores(a.latent, a.k(x)) / 3).softmax(-1)
        return x + a.o(p @ a.v(x)).mean(1, keepdim=True)

    return forward


def attend_latent(a, x):
    """Return O of one head with learned queries."""
    return attend_once(a.latent.to(x) / 3, apply(a.k, x), apply(a.v, x))[None]


def attend_once(q, k, v):
    return softmax(q @ k.mT) @ v


def attend_shared_key(a, x):
    """Return O of heads that share the first half of the keys and values."""
    q = affine(a.q, x) / 2
    k, v = (apply(m, x)[:, : q.shape[-1]] for m in (a.k, a.v))
    return torch.stack([attend_once(each, k, v) for each in q])


def by_one_key(attend_all):
    """Return a layer of heads that share one key."""

    def forward(a, x):
        q = a.q(x).unflatten(-1, (HEADS, -1)) / 2
        k, v = (m(x)[..., : q.shape[-1]] for m in (a.k, a.v))
        return a.o(attend_all(q, k, v).flatten(2))

    return forward


def fold_queries(q, k, v):
    return ((q.flatten(1, 2) @ k.mT).softmax(-1) @ v).view_as(q)


def fold_heads(q, k, v):
    turned = q.transpose(1, 2)
    o = (turned.flatten(1, 2) @ k.mT).softmax(-1) @ v
    return o.view_as(turned).transpose(1, 2)


def share_by_einsum(q, k, v):
    p = torch.einsum("bihd,bjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bjd->bihd", p, v)


def share_keys_first(q, k, v):
    p = torch.einsum("bjd,bihd->bhij", k, q).softmax(-1)
    return torch.einsum("bjd,bhij->bihd", v, p)


for what, scores in {
    "a product": lambda q, k: q @ k.mT,
    "a product with a map of them": lambda q, k: (q @ torch.eye(WIDTH).to(q)) @ k.mT,
    "einsum": lambda q, k: torch.einsum("qd,bnd->bqn", q, k),
    "einsum, keys first": lambda q, k: torch.einsum("bnd,qd->bqn", k, q),
    "the transpose of keys times queries": lambda q, k: (k @ q.mT).mT,
}.items():
    what = f"learned queries that all samples share, by {what}"
    own(what, build=LATENT, heads=attend_latent)(share_queries(scores))

for what, attend_all in {
    "heads in the axis of the queries, (b, n h, d)": fold_queries,
    "heads in the axis of the queries, (b, h n, d)": fold_heads,
    "einsum": share_by_einsum,
    "einsum, keys first": share_keys_first,
}.items():
    own(f"one head of keys for all, by {what}", heads=attend_shared_key)(by_one_key(attend_all))


@own(
    "two queries of each token by maps of their own, one key",
    "named",
    heads=attend_shared_key,
)
def two_queries(a, x):
    q = a.q(x).unflatten(-1, (HEADS, -1)).flatten(1, 2)
    k, v = (m(x)[..., : q.shape[-1]] for m in (a.k, a.v))
    o = (q @ k.mT).softmax(-1) @ v
    return x + F.linear(o, a.o.weight[:, : o.shape[-1]]).mean(1, keepdim=True)


@own(
    "learned tokens beside those that keys and values are made of",
    build=LATENT,
    truth=apart(itself, lambda a, x: torch.cat([a.latent.to(x), x])),
)
def memory_tokens(a, x):
    both = torch.cat([a.latent.expand(len(x), -1, -1), x], 1)
    return sdpa(a, a.q(x), a.k(both), a.v(both))


def attend_with_memory(a, x, keys, values):
    """Return O of every head where keys and values, (heads, memory, width), are beside its own."""
    q, k, v = (affine(m, x) for m in (a.q, a.k, a.v))
    return attend(a, x, q=q, k=torch.cat([k, keys], 1), v=torch.cat([v, values], 1))


@own(
    "learned keys and values joined behind the maps",
    "numerical",
    build=add(key=parameter(3, WIDTH), value=parameter(3, WIDTH)),
    heads=lambda a, x: attend_with_memory(a, x, split(a.key), split(a.value)),
)
def memory_keys(a, x):
    k = torch.cat([a.k(x), a.key.expand(len(x), -1, -1)], 1)
    v = torch.cat([a.v(x), a.value.expand(len(x), -1, -1)], 1)
    return sdpa(a, a.q(x), k, v)


def attend_with_options(a, x):
    """Return O of every head of nn.MultiheadAttention with a key more."""
    q, k, v = map(split, (x @ a.mha.in_proj_weight.T + a.mha.in_proj_bias).chunk(3, -1))
    zero = x.new_zeros(1, WIDTH)
    key = zero if a.mha.bias_k is None else a.mha.bias_k[0]
    value = zero if a.mha.bias_v is None else a.mha.bias_v[0]
    k = torch.cat([k, split(key)], 1)
    return attend(a, x, q=q, k=k, v=torch.cat([v, split(value)], 1))


attention_of_library = partial(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)


for option in ("add_bias_kv", "add_zero_attn"):
    own(
        f"nn.MultiheadAttention with {option}",
        "numerical",
        build=add(mha=partial(attention_of_library, **{option: True})),
        heads=attend_with_options,
    )(lambda a, x: a.mha(x, x, x, need_weights=False)[0])


@own(
    "registers joined to the tokens",
    build=LATENT,
    truth=lambda a: (Layer(lambda x: attend(a, x), lambda x: torch.cat([a.latent, x])),),
)
def registers(a, x):
    both = torch.cat([a.latent.expand(len(x), -1, -1), x], 1)
    return sdpa(a, a.q(both), a.k(both), a.v(both))[:, 3:]


class Products(nn.Module):
    """Attention to q, k and v that are given to it."""

    def forward(self, q, k, v):
        return join(F.scaled_dot_product_attention(split(q), split(k), split(v)))


class Core(Products):
    """Attention of a tensor to itself, without maps."""

    def forward(self, x):
        return super().forward(x, x, x)


class Keys(Products):
    """Attention whose values are its input."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return super().forward(self.q(x), self.k(x), x)


own(
    "a map, and another module that attends to its output",
    "read+elsewhere",
    build=add(core=Core),
    heads=lambda a, x: attend(a, x, **dict.fromkeys("qkv", affine(a.q, x))),
)(lambda a, x: a.o(a.core(a.q(x))))
own(
    "a map, and another module with maps for queries and keys alone",
    "read+elsewhere",
    build=add(core=Keys),
    heads=lambda a, x: attend(
        a,
        x,
        q=affine(a.core.q, apply(a.q, x)),
        k=affine(a.core.k, apply(a.q, x)),
        v=affine(a.q, x),
    ),
)(lambda a, x: a.o(a.core(a.q(x))))
own(
    "another module for the products, values that are the input",
    "numerical+elsewhere",
    build=add(core=Products),
    heads=lambda a, x: attend(a, x, v=split(x)),
)(lambda a, x: a.o(a.core(a.q(x), a.k(x), x)))
