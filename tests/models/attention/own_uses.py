"""Own modules that differ in how P is used, in their axes, loops and in what autograd sees."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    WIDTH,
    Layer,
    add,
    affine,
    apply,
    attend,
    attend_packed,
    join,
    later,
    linear,
    own,
    own_heads,
    parameter,
    qkv,
    sdpa,
    softmax,
    split,
)


def layers(*heads):
    """Return the truth of several uses."""
    return lambda a: tuple(Layer(lambda x, f=f: f(a, x)) for f in heads)


def of_p(use):
    """Return the truth that O is this of P and the values, from the weights."""

    def heads(a, x):
        p = softmax(affine(a.q, x) @ affine(a.k, x).mT / 2)
        return use(p, affine(a.v, x))

    return heads


def of_others(a, x):
    return attend(a, x, v=affine(a.v2, x))


def of_masked(mask):
    """Return the truth that these of the logits are masked."""
    return lambda a, x: attend(a, x, change=lambda s: s.masked_fill(mask(s), -torch.inf))


OTHER = add(v2=linear())
attention = F.scaled_dot_product_attention


@own("P used on two values", "read+left", truth=layers(attend, of_others), build=OTHER)
def two_values(a, x):
    q, k, v = qkv(a, x)
    p = (q @ k.mT).softmax(-1)
    return a.o(join(p @ v)) + join(p @ split(a.v2(x)))


def use_p(use):
    """Return attention that makes this of P and the values."""
    return lambda q, k, v: use((q @ k.mT).softmax(-1), v)


for what, use in {
    "P used twice in a row": lambda p, v: p @ (p @ v),
    "an output divided by the norm of its row of P": lambda p, v: (
        p @ v / p.norm(dim=-1, keepdim=True)
    ),
    "an output times the largest entry of its row of P": lambda p, v: (
        p.amax(-1, keepdim=True) * (p @ v)
    ),
}.items():
    own_heads({what: use_p(use)}, "read+left", truth=layers(attend, of_p(use)))


def halve_in_place(p, v):
    p = p.clone()
    p *= 0.5
    return p @ v


for what, use in {
    "the square of P": lambda p, v: (p @ p) @ v,
    "P averaged over the heads": lambda p, v: p.mean(-3, keepdim=True) @ v,
    "P written to in place": halve_in_place,
}.items():
    own_heads({what: use_p(use)}, "numerical", heads=of_p(use))
own_heads(
    {
        "values less what P makes of them": use_p(lambda p, v: v - p @ v),
        "the transposed product, v^T P^T": use_p(lambda p, v: (v.mT @ p.mT).mT),
    }
)


def run_on(q, k, v):
    top, total, o = q.new_full((*q.shape[:-1], 1), -torch.inf), 0.0, torch.zeros_like(q)
    for keys, values in zip(k.split(2, -2), v.split(2, -2), strict=True):
        s = q @ keys.mT
        higher = torch.maximum(top, s.amax(-1, keepdim=True))
        e, kept = (s - higher).exp(), (top - higher).exp()
        total, o, top = total * kept + e.sum(-1, keepdim=True), o * kept + e @ values, higher
    return o / total


def decay(q, k, v):
    i = torch.arange(TOKENS)
    return (q @ k.mT * (0.9 ** (i[:, None] - i)).tril().to(q)) @ v


def share_slots(q, k, v):
    p = (q @ k.mT).softmax(-2) + 1e-8
    return p / p.sum(-1, keepdim=True) @ v


def script(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def trace(*qkv):
    inputs = tuple(t.detach() for t in qkv)
    return torch.jit.trace(script, inputs, check_trace=False)(*qkv)


def products(q, k):
    return q[..., :, None, :] * k[..., None, :, :]


own_heads(
    {
        "a running softmax over blocks of keys (flash attention)": run_on,
        "a decay by distance in place of the softmax (retention)": decay,
        "a softmax over the queries, normalised over the keys (slots)": share_slots,
        "logits by vecdot": lambda q, k, v: (
            torch.linalg.vecdot(q[..., :, None, :], k[..., None, :, :]).softmax(-1) @ v
        ),
        "logits by a sum of products": lambda q, k, v: products(q, k).sum(-1).softmax(-1) @ v,
        "values weighted by a sum of products": use_p(
            lambda p, v: (p[..., None] * v[..., None, :, :]).sum(-2)
        ),
        "torch.func.vmap over the heads": torch.func.vmap(use_p(torch.matmul), 1, 1),
        "a function under torch.jit.trace": trace,
    },
    "left",
)
own_heads(
    {
        "a causal bias of torch.nn.attention": lambda q, k, v: attention(
            q, k, v, attn_mask=causal_lower_right(TOKENS, TOKENS)
        )
    },
    "refused",
)
own_heads(
    {
        "queries that share keys by enable_gqa": lambda q, k, v: attention(
            q, k[:, :1], v[:, :1], enable_gqa=True, scale=1.0
        )
    },
    heads=lambda a, x: attend(a, x, k=affine(a.k, x)[:1], v=affine(a.v, x)[:1]),
)


@own(
    "keys of a convolution over the tokens",
    "numerical",
    heads=lambda a, x: attend(a, x, k=affine(a.k, a.mix(x.mT[None])[0].mT)),
    build=add(mix=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)),
)
def mixed_keys(a, x):
    return sdpa(a, a.q(x), a.k(a.mix(x.mT).mT), a.v(x))


def of_next(a, x):
    return of_p(lambda p, _: p @ affine(a.v2, x + apply(a.o, join(attend(a, x)))))(a, x)


@own("P used again by the next layer", "read+left", build=OTHER, truth=layers(attend, of_next))
def next_layer(a, x):
    q, k, v = qkv(a, x)
    p = (q @ k.mT).softmax(-1)
    x = x + a.o(join(p @ v))
    return x + join(p @ split(a.v2(x)))


def share_twice(q, k, v):
    s = q @ k.mT
    return s.softmax(-1) @ v + (2 * s).softmax(-1) @ v


own_heads(
    {"two softmaxes of one product": share_twice},
    "read+left",
    truth=layers(attend, lambda a, x: attend(a, x, change=lambda s: 2 * s)),
)


@own(
    "the difference of two maps",
    "numerical",
    build=add(q2=linear()),
    heads=lambda a, x: attend(a, x) - 0.5 * attend(a, x, q=affine(a.q2, x)),
)
def difference(a, x):
    q, k, v = qkv(a, x)
    p = (q @ k.mT).softmax(-1) - 0.5 * (split(a.q2(x)) @ k.mT / 2).softmax(-1)
    return a.o(join(p @ v))


def use_one(q, k, v):
    (k @ q.mT).softmax(-1)
    return (q @ k.mT).softmax(-1) @ v


own_heads({"a product whose result is unused": use_one})


@own("a map that is kept and not used")
def kept(a, x):
    q, k, v = qkv(a, x)
    a.seen = (q @ k.mT).softmax(-1)
    return a.o(join(attention(q, k, v, scale=1.0)))


# --- axes


def own_axes(cases, outcome="read"):
    """Register modules by what they make of q (scaled), k and v, (batch, tokens, heads, width)."""
    for what, function in cases.items():
        own_heads(
            {what: lambda *qkv, f=function: f(*(t.transpose(1, 2) for t in qkv)).transpose(1, 2)},
            outcome,
        )


def by_einsum(logits, outputs, axis=-1):
    def attend(q, k, v):
        return torch.einsum(outputs, torch.einsum(logits, q, k).softmax(axis), v)

    return attend


own_axes(
    {
        f"heads in a middle axis, the map of ({', '.join(p)})": by_einsum(
            f"bnhd,bmhd->{p}", f"{p},bmhd->bnhd"
        )
        for p in ("bhnm", "bnhm")
    }
)
last = by_einsum("bnhd,bmhd->bnmh", "bnmh,bmhd->bnhd", 2)
own_axes({"heads in the last axis, the map of (b, n, m, h)": last}, "left")


def move_heads(q, k, v):
    p = (q @ k.mT).transpose(1, 2).contiguous().softmax(-1).transpose(1, 2).flatten(0, 1)
    return torch.bmm(p, v.flatten(0, 1)).unflatten(0, (len(q), HEADS))


def fold(logits):
    """Return attention with batch and heads in one axis, whose logits are these."""

    def attend(*qkv):
        q, k, v = (t.flatten(0, 1) for t in qkv)
        return torch.bmm(logits(q, k.mT).softmax(-1), v).unflatten(0, qkv[0].shape[:2])

    return attend


own_heads(
    {
        "heads in a middle axis, moved there before the softmax and back behind it": move_heads,
        "batch and heads in one axis": fold(torch.bmm),
        "baddbmm for the logits": fold(
            lambda q, k: torch.baddbmm(torch.zeros(1, dtype=q.dtype), q, k)
        ),
        "baddbmm for the logits, its arguments by name": fold(
            lambda q, k: torch.baddbmm(input=q.new_zeros(1), batch1=q, batch2=k)
        ),
    }
)
own_heads(
    {
        "baddbmm_ for the logits, into zeros": fold(
            lambda q, k: q.new_zeros(*q.shape[:2], k.shape[2]).baddbmm_(q, k)
        )
    },
    "left",
)


@own("tokens in the first axis, the map of (n, m, b, h)")
def tokens_first(a, x):
    q, k, v = (m(x.transpose(0, 1)).unflatten(-1, (HEADS, -1)) for m in (a.q, a.k, a.v))
    p = torch.einsum("ibhd,jbhd->ijbh", q / 2, k).permute(2, 3, 0, 1).softmax(-1)
    return a.o(join(torch.einsum("bhij,jbhd->bhid", p, v)))


@own("tokens before the batch")
def batch_second(a, x):
    return sdpa(a, *(m(x.transpose(0, 1)).transpose(0, 1) for m in (a.q, a.k, a.v)))


@own(
    "one linear layer for every head, as in tutorials",
    "numerical",
    build=add(**{f"s{n}": linear(4, 4) for n in "qkv"}),
    heads=lambda a, x: attend(
        a, x, **{n: apply(m, split(x)) for n, m in (("q", a.sq), ("k", a.sk), ("v", a.sv))}
    ),
)
def tutorial(a, x):
    z = x.unflatten(-1, (HEADS, -1))
    o = by_einsum("bnhd,bmhd->bhnm", "bhnm,bmhd->bnhd")(a.sq(z) / 2, a.sk(z), a.sv(z))
    return a.o(o.flatten(2))


@own(
    "attention over the channels (XCA)",
    "numerical",
    heads=lambda a, x: (softmax(affine(a.q, x).mT @ affine(a.k, x)) @ affine(a.v, x).mT).mT,
)
def over_channels(a, x):
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(((q.mT @ k).softmax(-1) @ v.mT).mT))


# --- chunks and loops


def mask_rows(q, k, v):
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    o = [
        attention(part, k, v, attn_mask=rows, scale=1.0)
        for part, rows in zip(q.split(3, -2), mask.split(3), strict=True)
    ]
    return torch.cat(o, -2)


own_heads(
    {
        "chunks of queries": lambda q, k, v: torch.cat(
            [(part @ k.mT).softmax(-1) @ v for part in q.split(3, -2)], -2
        ),
        "chunks of queries, fused": lambda q, k, v: torch.cat(
            [attention(part, k, v, scale=1.0) for part in q.split(3, -2)], -2
        ),
        "a loop over the queries": lambda q, k, v: torch.cat(
            [(q[:, :, i : i + 1] @ k.mT).softmax(-1) @ v for i in range(TOKENS)], -2
        ),
    }
)
own_heads({"chunks of queries, each with the mask of its rows": mask_rows}, heads=of_masked(later))


@own("a loop over the heads")
def head_loop(a, x):
    q, k, v = qkv(a, x)
    o = [(q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(HEADS)]
    return a.o(torch.cat(o, -1))


@own("a loop over the heads, fused")
def fused_head_loop(a, x):
    parts = zip(*(t.unbind(1) for t in qkv(a, x)), strict=True)
    return a.o(torch.cat([attention(*part, scale=1.0) for part in parts], -1))


@own(
    "a loop over the heads, which share one key",
    build=add(one=linear(WIDTH, 4)),
    heads=lambda a, x: attend(a, x, k=apply(a.one, x)),
)
def shared_key_loop(a, x):
    q, _, v = qkv(a, x)
    k = a.one(x)
    o = [(q[:, h] @ k.mT).softmax(-1) @ v[:, h] for h in range(HEADS)]
    return a.o(torch.cat(o, -1))


@own(
    "two fused calls with the same queries and keys",
    "read in parts",
    build=OTHER,
    truth=layers(attend, of_others),
)
def fused_values(a, x):
    q, k, v = qkv(a, x)
    o = [attention(q, k, each, scale=1.0) for each in (v, split(a.v2(x)))]
    return a.o(join(o[0] + o[1]))


@own("chunks of tokens whose queries are made one after the other", "numerical")
def token_chunks(a, x):
    k, v = split(a.k(x)), split(a.v(x))
    o = [attention(split(a.q(part)), k, v) for part in x.split(3, 1)]
    return a.o(join(torch.cat(o, -2)))


def attend_written(a, x):
    q, k, v = qkv(a, x)
    return a.o(join((q @ k.mT).softmax(-1) @ v))


own("the map as the transpose of k q^T")(
    lambda a, x: (lambda q, k, v: a.o(join((k @ q.mT).mT.softmax(-1) @ v)))(*qkv(a, x))
)


@own(
    "logits padded for a key of ones",
    "numerical",
    heads=lambda a, x: attend(a, x, share=lambda s: softmax(F.pad(s, (1, 0))), v=pad_values(a, x)),
)
def padded_logits(a, x):
    q, k, v = qkv(a, x)
    p = F.pad(q @ k.mT, (1, 0)).softmax(-1)
    return a.o(join(p @ F.pad(v, (0, 0, 1, 0), value=1.0)))


def pad_values(a, x):
    return F.pad(affine(a.v, x), (0, 0, 1, 0), value=1.0)


@own("values of two axes in einsum")
def values_of_two_axes(a, x):
    q, k, v = qkv(a, x)
    p = (q @ k.mT).softmax(-1)
    o = torch.einsum("bhij,bhjcd->bhicd", p, v.unflatten(-1, (2, 2)))
    return a.o(join(o.flatten(-2)))


own("a loop over the samples", "left")(
    lambda a, x: torch.stack([attend_written(a, one) for one in x])
)
own("a loop over the samples, batches of one", "left")(
    lambda a, x: torch.cat([sdpa(a, a.q(one), a.k(one), a.v(one)) for one in x.split(1)])
)
own("torch.func.vmap over the samples", "left")(
    lambda a, x: torch.func.vmap(lambda one: attend_written(a, one))(x)
)
own("gradient checkpointing", "named")(
    lambda a, x: checkpoint(lambda z: attend_written(a, z), x, use_reentrant=False)
)


def windows(a, x, *cuts):
    ends = (*cuts, TOKENS)
    tokens = (x[:, start:end] for start, end in zip((0, *cuts), ends, strict=True))
    parts = [attention(*(split(m(z)) for m in (a.q, a.k, a.v))) for z in tokens]
    return a.o(join(torch.cat(parts, 2)))


of_windows = layers(lambda a, x: attend(a, x[:3]), lambda a, x: attend(a, x[3:]))
own("windows of tokens", truth=of_windows)(lambda a, x: windows(a, x, 3))
own("windows of tokens, of which one is empty", truth=of_windows)(
    lambda a, x: windows(a, x, 3, TOKENS)
)


def gather(q, k, v):
    top, index = (q @ k.mT).topk(2, -1)
    rows = v[:, :, None].expand(*q.shape[:3], TOKENS, 4)
    rows = rows.gather(3, index[..., None].expand(*index.shape, 4))
    return (top.softmax(-1)[..., None, :] @ rows)[..., 0, :]


own_heads(
    {"the two largest keys gathered": gather},
    "left",
    heads=of_masked(lambda s: s < s.topk(2, -1).values[..., -1:]),
)


# --- library modules


def call_function(a, x):
    z, m = x.transpose(0, 1), a.mha
    out, _ = F.multi_head_attention_forward(
        z, z, z, WIDTH, HEADS, m.in_proj_weight, m.in_proj_bias, None, None, False, 0.0,
        m.out_proj.weight, m.out_proj.bias, training=False, need_weights=False,
    )  # fmt: skip
    return out.transpose(0, 1)


for what, forward in {
    "nn.MultiheadAttention": lambda a, x: a.mha(x, x, x, need_weights=False)[0],
    "nn.MultiheadAttention that returns its weights": (
        lambda a, x: a.mha(x, x, x, need_weights=True)[0]
    ),
    "F.multi_head_attention_forward": call_function,
}.items():
    own(
        what,
        build=add(mha=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
        heads=lambda a, x: attend_packed(a, x, x @ a.mha.in_proj_weight.T + a.mha.in_proj_bias),
    )(forward)


@own(
    "one module called twice",
    truth=lambda a: (
        Layer(lambda x: attend(a, x)),
        Layer(lambda x: attend(a, x), lambda x: x + apply(a.o, join(attend(a, x)))),
    ),
)
def called_twice(a, x):
    for _ in range(2):
        x = x + sdpa(a, a.q(x), a.k(x), a.v(x))
    return x


# --- no attention


def own_nothing(what, **parts):
    return own(what, "none", truth=lambda _: (), build=add(**parts))


@own_nothing("pooling by a softmax of scores", score=linear(WIDTH, 1))
def pooling(a, x):
    return x + (a.score(x).softmax(1) * a.v(x)).sum(1, keepdim=True)


@own_nothing("a router of experts", router=linear(WIDTH, 2))
def router(a, x):
    share = a.router(x).softmax(-1)
    return share[..., :1] * a.v(x).relu() + share[..., 1:] * a.o(x).tanh()


@own_nothing(
    "a memory of learned keys and values", keys=parameter(6, WIDTH), values=parameter(6, WIDTH)
)
def memory(a, x):
    return (a.q(x) @ a.keys.T).softmax(-1) @ a.values


@own_nothing(
    "external attention: two linear layers and a softmax over the tokens",
    mk=linear(WIDTH, 6, bias=False),
    mv=linear(6, WIDTH, bias=False),
)
def external(a, x):
    p = a.mk(x).softmax(1)
    return a.mv(p / p.sum(2, keepdim=True))


# --- what autograd sees


class OwnBackward(torch.autograd.Function):
    """A function with a backward pass: what it makes of input, output and gradient."""

    @staticmethod
    def forward(ctx, x, function, gradient):
        y = function(x)
        ctx.save_for_backward(x, y)
        ctx.gradient = gradient
        return y

    @staticmethod
    def backward(ctx, g):
        return ctx.gradient(*ctx.saved_tensors, g), None, None


def round_through(x):
    return OwnBackward.apply(x, lambda x: (8 * x).round() / 8, lambda _x, _y, g: g)


def halve_slope(x):
    return OwnBackward.apply(x, torch.sin, lambda x, _y, g: g * x.cos() / 2)


def share(s):
    """Return a softmax with a backward pass that is right."""
    return OwnBackward.apply(
        s, lambda s: s.softmax(-1), lambda _s, p, g: p * (g - (g * p).sum(-1, keepdim=True))
    )


def map_without_grad(q, k, v):
    with torch.no_grad():
        p = (q @ k.mT).softmax(-1)
    return p @ v


own_heads(
    {
        "P detached": use_p(lambda p, v: p.detach() @ v),
        "P under no_grad": map_without_grad,
        "values detached": use_p(lambda p, v: p @ v.detach()),
    },
    "left",
    derivative=False,
)
own_heads(
    {"keys detached": lambda q, k, v: (q @ k.detach().mT).softmax(-1) @ v},
    "autograd",
    derivative=False,
)
own_heads(
    {"values rounded, straight through": use_p(lambda p, v: p @ round_through(v))},
    "autograd",
    derivative=False,
    heads=lambda a, x: attend(a, x, v=(8 * affine(a.v, x)).round() / 8),
)
own_heads({"a softmax with a backward pass of its own": lambda q, k, v: share(q @ k.mT) @ v})


@own("all under no_grad but the residual", "named", derivative=False)
def without_grad(a, x):
    with torch.no_grad():
        return sdpa(a, a.q(x), a.k(x), a.v(x))


@own("a wrong backward pass behind the attention", derivative=False)
def wrong_behind(a, x):
    return halve_slope(sdpa(a, a.q(x), a.k(x), a.v(x)))


@own("rounding behind the attention, straight through by detach", derivative=False)
def rounded_behind(a, x):
    y = sdpa(a, a.q(x), a.k(x), a.v(x))
    return y + (y.round() - y).detach()


def mask_in_place(q, k, v):
    s = q @ k.mT
    s += torch.zeros(TOKENS, TOKENS, dtype=s.dtype)
    return s.softmax(-1) @ v


own_heads({"a mask written in place": mask_in_place})
own_heads(
    {"logits scaled in place": lambda q, k, v: (q @ k.mT).mul_(0.5).softmax(-1) @ v},
    heads=lambda a, x: attend(a, x, change=lambda s: s / 2),
)


own_heads({"P rounded to half precision": use_p(lambda p, v: p.bfloat16().to(v) @ v)})


@own("tokens written to behind their maps", "numerical")
def tokens_in_place(a, x):
    x = x.clone()
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    x *= 0.01
    return a.o(join(F.scaled_dot_product_attention(q, k, v)))


@own("tokens in a buffer, of which another part is written to behind their maps")
def buffer_in_place(a, x):
    buffer = torch.cat([x, torch.zeros_like(x[:, :1])], 1)
    x = buffer[:, :-1]
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    buffer[:, -1] = 1.0
    return a.o(join(F.scaled_dot_product_attention(q, k, v)))


@own("q scaled in place")
def queries_in_place(a, x):
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    q *= 0.5
    return a.o(join((q @ k.mT).softmax(-1) @ v))
