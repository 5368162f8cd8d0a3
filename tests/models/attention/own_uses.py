"""Own modules that differ in how P is used, in their axes, loops and in what autograd sees."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    WIDTH,
    Layer,
    affine,
    attend,
    join,
    own,
    own_heads,
    qkv,
    softmax,
    split,
)
from tests.models.attention.own_weights import SMALL, add, of_small, parameter, sdpa


def layers(*heads: Any) -> Any:
    """Return the truth of several uses."""
    return lambda a: tuple(Layer(lambda x, f=f: f(a, x)) for f in heads)


def p_of(a: Any, x: Tensor) -> Tensor:
    """Return P of the usual attention, from the weights."""
    q, k = affine(a.q, x), affine(a.k, x)
    return softmax(q @ k.mT / 2)


OTHER = add(v2=lambda: nn.Linear(WIDTH, WIDTH))


@own(
    "P used on two values",
    "read+left",
    truth=layers(attend, lambda a, x: attend(a, x, v=affine(a.v2, x))),
    build=OTHER,
)
def two_values(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    p = (q @ k.mT).softmax(-1)
    return a.o(join(p @ v)) + join(p @ split(a.v2(x)))


@own_heads(
    "P used twice in a row",
    "read+left",
    truth=layers(attend, lambda a, x: p_of(a, x) @ attend(a, x)),
)
def two_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return p @ (p @ v)


@own_heads(
    "the square of P",
    "numerical",
    heads=lambda a, x: p_of(a, x) @ attend(a, x),
)
def square(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return (p @ p) @ v


@own_heads(
    "an output divided by the norm of its row of P",
    "read+left",
    truth=layers(attend, lambda a, x: attend(a, x) / p_of(a, x).norm(dim=-1, keepdim=True)),
)
def normed_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return p @ v / p.norm(dim=-1, keepdim=True)


@own_heads(
    "an output times the largest entry of its row of P",
    "read+left",
    truth=layers(attend, lambda a, x: attend(a, x) * p_of(a, x).amax(-1, keepdim=True)),
)
def sure_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return p.amax(-1, keepdim=True) * (p @ v)


@own_heads("a running softmax over blocks of keys (flash attention)", "left")
def running(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    top, total, o = q.new_full((*q.shape[:-1], 1), -torch.inf), 0.0, torch.zeros_like(q)
    for keys, values in zip(k.split(2, -2), v.split(2, -2), strict=True):
        s = q @ keys.mT
        higher = torch.maximum(top, s.amax(-1, keepdim=True))
        e, kept = (s - higher).exp(), (top - higher).exp()
        total, o, top = total * kept + e.sum(-1, keepdim=True), o * kept + e @ values, higher
    return o / total


@own_heads("a decay by distance in place of the softmax (retention)", "left")
def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(TOKENS)
    decay = (0.9 ** (i[:, None] - i)).tril().to(q)
    return (q @ k.mT * decay) @ v


@own_heads("a softmax over the queries, normalised over the keys (slots)", "left")
def slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-2) + 1e-8
    return p / p.sum(-1, keepdim=True) @ v


@own_heads("logits by vecdot", "left")
def vecdot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.linalg.vecdot(q[..., :, None, :], k[..., None, :, :])
    return s.softmax(-1) @ v


@own("a causal bias of torch.nn.attention", "refused")
def causal_bias(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    bias = causal_lower_right(TOKENS, TOKENS)
    return a.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


@own(
    "queries that share keys by enable_gqa",
    heads=lambda a, x: attend(
        a,
        x,
        k=affine(a.k, x)[:1].expand(HEADS, -1, -1),
        v=affine(a.v, x)[:1].expand(HEADS, -1, -1),
    ),
)
def grouped(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)))


def _turn(t: Tensor) -> Tensor:
    """Turn pairs of channels as complex numbers, by an angle for each position."""
    angle = torch.arange(t.shape[-2], dtype=t.dtype)[:, None] * t.new_tensor([1.0, 0.3])
    pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


@own(
    "rotary positions by complex numbers",
    heads=lambda a, x: attend(a, x, q=_turn(affine(a.q, x)), k=_turn(affine(a.k, x))),
)
def complex_rotary(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(_turn(q), _turn(k), v)))


@own(
    "keys of a convolution over the tokens",
    "numerical",
    heads=lambda a, x: attend(a, x, k=affine(a.k, a.mix(x.mT[None])[0].mT)),
    build=add(mix=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)),
)
def mixed_keys(a: Any, x: Tensor) -> Tensor:
    return sdpa(a, a.q(x), a.k(a.mix(x.mT).mT), a.v(x))


@own(
    "P used again by the next layer",
    "read+left",
    build=OTHER,
    truth=layers(
        attend,
        lambda a, x: p_of(a, x) @ affine(a.v2, x + join(attend(a, x)) @ a.o.weight.T + a.o.bias),
    ),
)
def next_layer(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    p = (q @ k.mT).softmax(-1)
    x = x + a.o(join(p @ v))
    return x + join(p @ split(a.v2(x)))


@own_heads(
    "two softmaxes of one product",
    "read+left",
    truth=layers(attend, lambda a, x: attend(a, x, change=lambda s: 2 * s)),
)
def two_softmaxes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    return s.softmax(-1) @ v + (2 * s).softmax(-1) @ v


@own(
    "the difference of two maps",
    "numerical",
    build=add(q2=lambda: nn.Linear(WIDTH, WIDTH)),
    heads=lambda a, x: attend(a, x) - 0.5 * attend(a, x, q=affine(a.q2, x)),
)
def difference(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    p = (q @ k.mT).softmax(-1) - 0.5 * (split(a.q2(x)) @ k.mT / 2).softmax(-1)
    return a.o(join(p @ v))


@own_heads("a product whose result is unused")
def unused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (k @ q.mT).softmax(-1)
    return (q @ k.mT).softmax(-1) @ v


@own("a map that is kept and not used")
def kept(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    a.seen = (q @ k.mT).softmax(-1)
    return a.o(join(F.scaled_dot_product_attention(q, k, v, scale=1.0)))


@own_heads(
    "P averaged over the heads",
    "numerical",
    heads=lambda a, x: p_of(a, x).mean(0) @ affine(a.v, x),
)
def averaged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).mean(1, keepdim=True) @ v


@own_heads("values less what P makes of them")
def less_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v - (q @ k.mT).softmax(-1) @ v


# --- axes


def middle(a: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of (batch, tokens, heads, width)."""
    q, k, v = (m(x).unflatten(-1, (HEADS, -1)) for m in (a.q, a.k, a.v))
    return q / 2, k, v


@own("heads in a middle axis, the map of (b, h, n, m)")
def einsum_heads(a: Any, x: Tensor) -> Tensor:
    q, k, v = middle(a, x)
    p = torch.einsum("bnhd,bmhd->bhnm", q, k).softmax(-1)
    return a.o(torch.einsum("bhnm,bmhd->bnhd", p, v).flatten(2))


@own("heads in a middle axis, the map of (b, n, h, m)")
def einsum_middle(a: Any, x: Tensor) -> Tensor:
    q, k, v = middle(a, x)
    p = torch.einsum("bnhd,bmhd->bnhm", q, k).softmax(-1)
    return a.o(torch.einsum("bnhm,bmhd->bnhd", p, v).flatten(2))


@own_heads("heads in a middle axis, moved there before the softmax and back behind it")
def moved_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).transpose(1, 2).contiguous().softmax(-1).transpose(1, 2).flatten(0, 1)
    o = torch.bmm(p, v.flatten(0, 1))
    return o.unflatten(0, (len(q), HEADS))


@own("tokens in the first axis, the map of (n, m, b, h)")
def einsum_tokens(a: Any, x: Tensor) -> Tensor:
    q, k, v = middle(a, x.transpose(0, 1))
    p = torch.einsum("ibhd,jbhd->ijbh", q, k).permute(2, 3, 0, 1).softmax(-1)
    return a.o(join(torch.einsum("bhij,jbhd->bhid", p, v)))


@own_heads("the transposed product, v^T P^T")
def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ (q @ k.mT).softmax(dim=-1).mT).mT


@own("heads in the last axis, the map of (b, n, m, h)", "left")
def einsum_last(a: Any, x: Tensor) -> Tensor:
    q, k, v = middle(a, x)
    p = torch.einsum("bnhd,bmhd->bnmh", q, k).softmax(2)
    return a.o(torch.einsum("bnmh,bmhd->bnhd", p, v).flatten(2))


@own(
    "one linear layer for every head, as in tutorials",
    "numerical",
    build=SMALL,
    heads=of_small,
)
def tutorial(a: Any, x: Tensor) -> Tensor:
    z = x.unflatten(-1, (HEADS, -1))
    q, k, v = a.sq(z), a.sk(z), a.sv(z)
    p = torch.einsum("bnhd,bmhd->bhnm", q / 2, k).softmax(-1)
    return a.o(torch.einsum("bhnm,bmhd->bnhd", p, v).flatten(2))


@own("batch and heads in one axis")
def flat_heads(a: Any, x: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in qkv(a, x))
    o = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
    return a.o(join(o.unflatten(0, (len(x), HEADS))))


@own("baddbmm for the logits")
def by_baddbmm(a: Any, x: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in qkv(a, x))
    s = torch.baddbmm(torch.zeros(1, dtype=q.dtype), q, k.mT)
    return a.o(join(torch.bmm(s.softmax(-1), v).unflatten(0, (len(x), HEADS))))


@own("tokens before the batch")
def tokens_first(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x.transpose(0, 1)).transpose(0, 1)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(q, k, v)))


@own_heads("logits by a sum of products", "left")
def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q[..., :, None, :] * k[..., None, :, :]).sum(-1)
    return s.softmax(-1) @ v


@own_heads("values weighted by a sum of products", "left")
def summed_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return (p[..., None] * v[..., None, :, :]).sum(-2)


@own(
    "attention over the channels (XCA)",
    heads=lambda a, x: (softmax(affine(a.q, x).mT @ affine(a.k, x)) @ affine(a.v, x).mT).mT,
    outcome="numerical",
)
def over_channels(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(((q.mT @ k).softmax(-1) @ v.mT).mT))


# --- chunks and loops


def _later(s: Tensor) -> Tensor:
    return torch.ones_like(s, dtype=torch.bool).triu(1)


def causal(a: Any, x: Tensor) -> Tensor:
    """Four heads of causal attention."""
    q, k, v = (split(x @ m.weight.T + m.bias, 4) for m in (a.q, a.k, a.v))
    s = q @ k.mT / 2**0.5
    return softmax(s.masked_fill(_later(s), -torch.inf)) @ v


@own_heads("chunks of queries")
def query_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = [(part @ k.mT).softmax(-1) @ v for part in q.split(3, -2)]
    return torch.cat(o, -2)


@own_heads("chunks of queries, fused")
def fused_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = [F.scaled_dot_product_attention(part, k, v, scale=1.0) for part in q.split(3, -2)]
    return torch.cat(o, -2)


@own_heads("a loop over the queries")
def query_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = [(q[:, :, i : i + 1] @ k.mT).softmax(-1) @ v for i in range(TOKENS)]
    return torch.cat(o, -2)


@own("a loop over the heads")
def head_loop(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    o = [(q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(HEADS)]
    return a.o(torch.cat(o, -1))


@own("a loop over the heads, fused")
def fused_head_loop(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    parts = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
    return a.o(torch.cat([F.scaled_dot_product_attention(*part, scale=1.0) for part in parts], -1))


@own(
    "a loop over the heads, which share one key",
    build=add(one=lambda: nn.Linear(WIDTH, 4)),
    heads=lambda a, x: attend(a, x, k=x @ a.one.weight.T + a.one.bias),
)
def shared_key_loop(a: Any, x: Tensor) -> Tensor:
    q, _, v = qkv(a, x)
    k = a.one(x)
    o = [(q[:, h] @ k.mT).softmax(-1) @ v[:, h] for h in range(HEADS)]
    return a.o(torch.cat(o, -1))


@own_heads(
    "chunks of queries, each with the mask of its rows",
    heads=lambda a, x: attend(a, x, change=lambda s: s.masked_fill(_later(s), -torch.inf)),
)
def masked_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    o = [
        F.scaled_dot_product_attention(part, k, v, attn_mask=rows, scale=1.0)
        for part, rows in zip(q.split(3, -2), mask.split(3), strict=True)
    ]
    return torch.cat(o, -2)


@own(
    "two fused calls with the same queries and keys",
    "read in parts",
    build=OTHER,
    truth=layers(attend, lambda a, x: attend(a, x, v=affine(a.v2, x))),
)
def fused_values(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    o = [F.scaled_dot_product_attention(q, k, each, scale=1.0) for each in (v, split(a.v2(x)))]
    return a.o(join(o[0] + o[1]))


@own("chunks of tokens whose queries are made one after the other", "numerical")
def token_chunks(a: Any, x: Tensor) -> Tensor:
    k, v = split(a.k(x)), split(a.v(x))
    o = [F.scaled_dot_product_attention(split(a.q(part)), k, v) for part in x.split(3, 1)]
    return a.o(join(torch.cat(o, -2)))


@own("a loop over the samples", "left")
def sample_loop(a: Any, x: Tensor) -> Tensor:
    out = []
    for one in x:
        q, k, v = qkv(a, one)
        out.append(a.o(join((q @ k.mT).softmax(-1) @ v)))
    return torch.stack(out)


@own("a loop over the samples, batches of one", "left")
def sample_batches(a: Any, x: Tensor) -> Tensor:
    return torch.cat([sdpa(a, a.q(one), a.k(one), a.v(one)) for one in x.split(1)])


@own("torch.func.vmap over the samples", "left")
def mapped(a: Any, x: Tensor) -> Tensor:
    def one(x: Tensor) -> Tensor:
        q, k, v = qkv(a, x)
        return a.o(join((q @ k.mT).softmax(-1) @ v))

    return torch.func.vmap(one)(x)


@own("torch.func.vmap over the heads", "left")
def mapped_heads(a: Any, x: Tensor) -> Tensor:
    one = torch.func.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, 1, 1)
    return a.o(join(one(*qkv(a, x))))


def _scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


@own("a function under torch.jit.trace", "left")
def traced(a: Any, x: Tensor) -> Tensor:
    parts = qkv(a, x)
    function = torch.jit.trace(_scripted, tuple(t.detach() for t in parts), check_trace=False)
    return a.o(join(function(*parts)))


@own("gradient checkpointing", "named")
def checkpointed(a: Any, x: Tensor) -> Tensor:
    def one(x: Tensor) -> Tensor:
        q, k, v = qkv(a, x)
        return a.o(join((q @ k.mT).softmax(-1) @ v))

    return checkpoint(one, x, use_reentrant=False)


@own(
    "windows of tokens", truth=layers(lambda a, x: attend(a, x[:3]), lambda a, x: attend(a, x[3:]))
)
def windows(a: Any, x: Tensor) -> Tensor:
    parts = [
        F.scaled_dot_product_attention(*(split(m(z)) for m in (a.q, a.k, a.v)))
        for z in (x[:, :3], x[:, 3:])
    ]
    return a.o(join(torch.cat(parts, 2)))


@own_heads(
    "the two largest keys gathered",
    "left",
    heads=lambda a, x: attend(
        a, x, change=lambda s: s.masked_fill(s < s.topk(2, -1).values[..., -1:], -torch.inf)
    ),
)
def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    top, index = (q @ k.mT).topk(2, -1)
    rows = (
        v[:, :, None]
        .expand(*q.shape[:3], TOKENS, 4)
        .gather(3, index[..., None].expand(*index.shape, 4))
    )
    return (top.softmax(-1)[..., None, :] @ rows)[..., 0, :]


# --- library modules


def of_library(a: Any, x: Tensor) -> Tensor:
    parts = (x @ a.mha.in_proj_weight.T + a.mha.in_proj_bias).chunk(3, -1)
    return attend(a, x, **dict(zip("qkv", map(split, parts), strict=True)))


MHA = add(mha=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))


@own("nn.MultiheadAttention", build=MHA, heads=of_library)
def library(a: Any, x: Tensor) -> Tensor:
    return a.mha(x, x, x, need_weights=False)[0]


@own("nn.MultiheadAttention that returns its weights", build=MHA, heads=of_library)
def library_weights(a: Any, x: Tensor) -> Tensor:
    return a.mha(x, x, x, need_weights=True)[0]


@own("F.multi_head_attention_forward", build=MHA, heads=of_library)
def library_function(a: Any, x: Tensor) -> Tensor:
    z, m = x.transpose(0, 1), a.mha
    out, _ = F.multi_head_attention_forward(
        z, z, z, WIDTH, HEADS, m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0,
        m.out_proj.weight, m.out_proj.bias, training=False, need_weights=False,
    )  # fmt: skip
    return out.transpose(0, 1)


@own(
    "one module called twice",
    truth=lambda a: (
        Layer(lambda x: attend(a, x)),
        Layer(lambda x: attend(a, x), lambda x: x + join(attend(a, x)) @ a.o.weight.T + a.o.bias),
    ),
)
def called_twice(a: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + sdpa(a, a.q(x), a.k(x), a.v(x))
    return x


# --- no attention


def nothing(_: Any) -> tuple[Layer, ...]:
    return ()


@own(
    "pooling by a softmax of scores",
    "none",
    truth=nothing,
    build=add(score=lambda: nn.Linear(WIDTH, 1)),
)
def pooling(a: Any, x: Tensor) -> Tensor:
    return x + (a.score(x).softmax(1) * a.v(x)).sum(1, keepdim=True)


@own("a router of experts", "none", truth=nothing, build=add(router=lambda: nn.Linear(WIDTH, 2)))
def router(a: Any, x: Tensor) -> Tensor:
    share = a.router(x).softmax(-1)
    return share[..., :1] * a.v(x).relu() + share[..., 1:] * a.o(x).tanh()


@own(
    "a memory of learned keys and values",
    "none",
    truth=nothing,
    build=add(keys=parameter(6, WIDTH), values=parameter(6, WIDTH)),
)
def memory(a: Any, x: Tensor) -> Tensor:
    return (a.q(x) @ a.keys.T).softmax(-1) @ a.values


@own(
    "external attention: two linear layers and a softmax over the tokens",
    "none",
    truth=nothing,
    build=add(
        mk=lambda: nn.Linear(WIDTH, 6, bias=False), mv=lambda: nn.Linear(6, WIDTH, bias=False)
    ),
)
def external(a: Any, x: Tensor) -> Tensor:
    p = a.mk(x).softmax(1)
    return a.mv(p / p.sum(2, keepdim=True))


# --- what autograd sees


@own_heads("P detached", "left", derivative=False)
def detached_map(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).detach() @ v


@own_heads("P under no_grad", "left", derivative=False)
def map_without_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        p = (q @ k.mT).softmax(-1)
    return p @ v


@own_heads("values detached", "left", derivative=False)
def detached_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v.detach()


@own_heads("keys detached", "autograd", derivative=False)
def detached_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.detach().mT).softmax(-1) @ v


@own(
    "all under no_grad but the residual",
    "named",
    derivative=False,
)
def without_grad(a: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return sdpa(a, a.q(x), a.k(x), a.v(x))


class Rounded(torch.autograd.Function):
    """Rounds, and passes gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@own_heads(
    "values rounded, straight through",
    "autograd",
    derivative=False,
    heads=lambda a, x: attend(a, x, v=(8 * affine(a.v, x)).round() / 8),
)
def rounded_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ Rounded.apply(v)


class Halved(torch.autograd.Function):
    """The sine, with half of its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos() / 2


@own("a wrong backward pass behind the attention", "read", derivative=False)
def wrong_behind(a: Any, x: Tensor) -> Tensor:
    return Halved.apply(sdpa(a, a.q(x), a.k(x), a.v(x)))


@own(
    "rounding behind the attention, straight through by detach",
    "read",
    derivative=False,
)
def rounded_behind(a: Any, x: Tensor) -> Tensor:
    y = sdpa(a, a.q(x), a.k(x), a.v(x))
    return y + (y.round() - y).detach()


class Softmax(torch.autograd.Function):
    """A softmax with a backward pass of its own, which is right."""

    @staticmethod
    def forward(ctx: Any, s: Tensor) -> Tensor:
        p = s.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return p * (g - (g * p).sum(-1, keepdim=True))


@own_heads("a softmax with a backward pass of its own")
def own_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Softmax.apply(q @ k.mT) @ v


@own_heads("a mask written in place")
def masked_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s += torch.zeros(TOKENS, TOKENS, dtype=s.dtype)
    return s.softmax(-1) @ v


@own_heads("logits scaled in place", heads=lambda a, x: attend(a, x, change=lambda s: s / 2))
def scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    s.mul_(0.5)
    return s.softmax(-1) @ v


@own("q scaled in place")
def queries_in_place(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    q *= 0.5
    return a.o(join((q @ k.mT).softmax(-1) @ v))


@own_heads("P written to in place", "numerical", heads=lambda a, x: 0.5 * attend(a, x))
def map_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1).clone()
    p *= 0.5
    return p @ v
