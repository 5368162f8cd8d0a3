"""Own modules that differ in how q, k and v come about."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models.attention.own_modules import (
    HEADS,
    TOKENS,
    WIDTH,
    Layer,
    affine,
    attend,
    join,
    own,
    qkv,
    split,
)


def sdpa(a: Any, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Attend to q, k and v of (batch, tokens, width), and project."""
    o = F.scaled_dot_product_attention(split(q), split(k), split(v), **how)
    return a.o(join(o))


def add(**parts: Any) -> Any:
    """Return what adds parts, made by functions, to a module."""

    def build(a: Any) -> None:
        for name, make in parts.items():
            setattr(a, name, make())

    return build


def parameter(*shape: int) -> Any:
    """Return what makes a parameter."""
    return lambda: nn.Parameter(torch.randn(*shape) / WIDTH**0.5)


@own("linear layers, fused attention")
def usual(a: Any, x: Tensor) -> Tensor:
    return sdpa(a, a.q(x), a.k(x), a.v(x))


def own_parts(
    name: str, what: str, outcome: str = "read", build: Any = lambda _: None, **parts: Any
) -> None:
    """Register the usual attention with other functions of the module and x for q, k or v."""

    def forward(a: Any, x: Tensor) -> Tensor:
        return sdpa(a, *(parts.get(n, lambda a, x, n=n: getattr(a, n)(x))(a, x) for n in "qkv"))

    def heads(a: Any, x: Tensor) -> Tensor:
        return attend(a, x, **{n: split(part(a, x)) for n, part in parts.items()})

    forward.__name__ = name
    own(what, outcome, heads=heads, build=build)(forward)


def own_map(name: str, what: str, part: Any, change: Any = lambda w: w) -> None:
    """Register q, k and v without biases: how each is made of x and a layer, and its weight."""

    def forward(a: Any, x: Tensor) -> Tensor:
        return sdpa(a, *(part(x, m) for m in (a.q, a.k, a.v)))

    forward.__name__ = name
    own(what, heads=lambda a, x: _plain(a, x, change))(forward)


FUSED = add(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))


def of_fused(a: Any, x: Tensor) -> Tensor:
    parts = (x @ a.qkv.weight.T + a.qkv.bias).chunk(3, -1)
    return attend(a, x, **dict(zip("qkv", map(split, parts), strict=True)))


@own("one linear layer for q, k and v", build=FUSED, heads=of_fused)
def fused(a: Any, x: Tensor) -> Tensor:
    return sdpa(a, *a.qkv(x).chunk(3, -1))


def _plain(a: Any, x: Tensor, change: Any = lambda w: w, **parts: Tensor) -> Tensor:
    """The usual attention without biases, its weights changed."""
    own = {n: split(x @ change(getattr(a, n).weight).T) for n in "qkv" if n not in parts}
    return attend(a, x, **own, **parts)


own_map("matrices", "weights as matrices", lambda x, m: x @ m.weight.T)
own_map("times_one", "weights times 1", lambda x, m: x @ (m.weight.T * 1))


HEADED = add(**{f"w{n}": parameter(HEADS, WIDTH, 4) for n in "qkv"})


def of_headed(a: Any, x: Tensor) -> Tensor:
    return attend(a, x, q=x @ a.wq, k=x @ a.wk, v=x @ a.wv)


@own("einsum with parameters of three axes", build=HEADED, heads=of_headed)
def einsum_parameters(a: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.einsum("bnc,hcd->bhnd", x, w) for w in (a.wq, a.wk, a.wv))
    return a.o(join(F.scaled_dot_product_attention(q, k, v)))


@own(
    "a batched product with parameters of three axes",
    build=HEADED,
    heads=of_headed,
)
def matmul_parameters(a: Any, x: Tensor) -> Tensor:
    q, k, v = (x[:, None] @ w for w in (a.wq, a.wk, a.wv))
    return a.o(join(F.scaled_dot_product_attention(q, k, v)))


def parametrized(make: Any) -> Any:
    def build(a: Any) -> None:
        for m in (a.q, a.k, a.v):
            make(m)

    return build


for _name, _what, _make in (
    ("weight_norm", "weights under weight_norm", parametrizations.weight_norm),
    ("spectral_norm", "weights under spectral_norm", parametrizations.spectral_norm),
):

    def _usual(a: Any, x: Tensor) -> Tensor:
        return sdpa(a, a.q(x), a.k(x), a.v(x))

    _usual.__name__ = _name
    own(_what, build=parametrized(_make))(_usual)


LORA = add(**{f"{m}{n}": parameter(8, 2) for n in "qkv" for m in ("up", "down")})


def of_lora(a: Any, x: Tensor) -> Tensor:
    own = {n: (getattr(a, f"up{n}"), getattr(a, f"down{n}")) for n in "qkv"}
    return attend(
        a, x, **{n: affine(getattr(a, n), x) + split(x @ d @ u.T) for n, (u, d) in own.items()}
    )


@own("LoRA merged in forward", build=LORA, heads=of_lora)
def lora_merged(a: Any, x: Tensor) -> Tensor:
    def weight(n: str) -> Tensor:
        return getattr(a, n).weight + getattr(a, f"up{n}") @ getattr(a, f"down{n}").T

    return sdpa(a, *(F.linear(x, weight(n), getattr(a, n).bias) for n in "qkv"))


@own("LoRA beside the weights", build=LORA, heads=of_lora)
def lora_beside(a: Any, x: Tensor) -> Tensor:
    def part(n: str) -> Tensor:
        return getattr(a, n)(x) + x @ getattr(a, f"down{n}") @ getattr(a, f"up{n}").T

    return sdpa(a, *map(part, "qkv"))


def of_low_rank(a: Any, x: Tensor) -> Tensor:
    ranks = {n: x @ getattr(a, f"down{n}") @ getattr(a, f"up{n}").T for n in "qkv"}
    return attend(a, x, **{n: split(t) for n, t in ranks.items()})


@own("weights of low rank, multiplied out", build=LORA, heads=of_low_rank)
def low_rank(a: Any, x: Tensor) -> Tensor:
    return sdpa(a, *(x @ (getattr(a, f"down{n}") @ getattr(a, f"up{n}").T) for n in "qkv"))


@own("two linear layers in a row for each of q, k and v", build=LORA, heads=of_low_rank)
def two_maps(a: Any, x: Tensor) -> Tensor:
    return sdpa(a, *(x @ getattr(a, f"down{n}") @ getattr(a, f"up{n}").T for n in "qkv"))


def _standardised(w: Tensor) -> Tensor:
    return (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True)


own_map(
    "standardised",
    "standardised weights",
    lambda x, m: F.linear(x, _standardised(m.weight)),
    _standardised,
)
own_map("on_the_left", "weights on the left of the tokens", lambda x, m: (m.weight @ x.mT).mT)
own_map(
    "einsum_left",
    "weights on the left in einsum",
    lambda x, m: torch.einsum("ed,bnd->bne", m.weight, x),
)
own_map("tensordot", "tensordot", lambda x, m: torch.tensordot(x, m.weight, ([2], [1])))


def _itself(_: Any, x: Tensor) -> Tensor:
    return x


own_parts("identity_values", "values that are the input", "numerical", v=_itself)
own_parts(
    "identity_all",
    "queries, keys and values that are the input",
    "numerical",
    **dict.fromkeys("qkv", _itself),
)


own_parts("identity_keys", "keys and values that are the input", "numerical", k=_itself, v=_itself)
own_parts(
    "identity_queries", "queries and keys that are the input", "numerical", q=_itself, k=_itself
)
own_parts("tied_keys", "q and k of one map", k=lambda a, x: a.q(x))


@own("k and v of one map", heads=lambda a, x: attend(a, x, v=affine(a.k, x)))
def tied_values(a: Any, x: Tensor) -> Tensor:
    k = a.k(x)
    return sdpa(a, a.q(x), k, k)


GAINS = add(gain=parameter(WIDTH), other=parameter(WIDTH))
own_parts(
    "diagonal_queries",
    "queries that are the input times a vector",
    "numerical",
    GAINS,
    q=lambda a, x: x * a.gain,
)
own_parts(
    "diagonal_all",
    "queries and keys that are the input times vectors, values that are the input",
    "numerical",
    GAINS,
    q=lambda a, x: x * a.gain,
    k=lambda a, x: x * a.other,
    v=_itself,
)


CONVS = add(**{f"c{n}": lambda: nn.Conv1d(WIDTH, WIDTH, 1) for n in "qkv"})


@own(
    "1x1 convolutions",
    build=CONVS,
    heads=lambda a, x: attend(
        a,
        x,
        **{
            n: split(x @ c.weight[:, :, 0].T + c.bias)
            for n, c in zip("qkv", (a.cq, a.ck, a.cv), strict=True)
        },
    ),
)
def convolutions(a: Any, x: Tensor) -> Tensor:
    return sdpa(a, *(c(x.mT).mT for c in (a.cq, a.ck, a.cv)))


def _in_blocks(weight: Tensor) -> Tensor:
    return torch.block_diag(*weight.flatten(1).chunk(HEADS))


@own(
    "convolutions of groups, over a map, and with padding by its name",
    build=add(
        groups=lambda: nn.Conv2d(WIDTH, WIDTH, 1, groups=HEADS),
        named=lambda: nn.Conv1d(WIDTH, WIDTH, 1, padding="same"),
    ),
    heads=lambda a, x: attend(
        a,
        x,
        q=split(x @ _in_blocks(a.groups.weight).T + a.groups.bias),
        k=split(x @ a.named.weight[:, :, 0].T + a.named.bias),
    ),
)
def grouped_convolutions(a: Any, x: Tensor) -> Tensor:
    return sdpa(a, a.groups(x.mT[..., None])[..., 0].mT, a.named(x.mT).mT, a.v(x))


own_parts(
    "spread_convolutions",
    "keys of a 1x1 convolution with a stride and padding",
    "numerical",
    add(conv=lambda: nn.Conv1d(WIDTH, WIDTH, 1, stride=2, padding=2)),  # as many as tokens
    k=lambda a, x: a.conv(x.mT).mT,
)


@own("addmm over all tokens")
def addmm(a: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    return sdpa(a, *(torch.addmm(m.bias, rows, m.weight.T).view_as(x) for m in (a.q, a.k, a.v)))


own_parts(
    "buffers",
    "fixed projections in buffers",
    build=lambda a: a.register_buffer("fixed", torch.randn(WIDTH, WIDTH)),
    q=lambda a, x: x @ a.fixed,
)
own_parts(
    "hypernetwork",
    "weights made by a small network of an embedding",
    build=add(code=parameter(4), net=lambda: nn.Linear(4, WIDTH * WIDTH)),
    q=lambda a, x: x @ a.net(a.code).view(WIDTH, WIDTH),
)
POSITIONS = add(position=parameter(TOKENS, WIDTH))


@own(
    "positions added in the module", build=POSITIONS, heads=lambda a, x: attend(a, x + a.position)
)
def positions(a: Any, x: Tensor) -> Tensor:
    x = x + a.position
    return sdpa(a, a.q(x), a.k(x), a.v(x))


NORM = add(norm=lambda: nn.LayerNorm(WIDTH))


@own(
    "a LayerNorm in the module",
    build=NORM,
    truth=lambda a: (Layer(lambda x: attend(a, x), a.norm),),
)
def normed(a: Any, x: Tensor) -> Tensor:
    x = a.norm(x)
    return sdpa(a, a.q(x), a.k(x), a.v(x))


@own(
    "a LayerNorm before q and k alone",
    "numerical",
    build=NORM,
    heads=lambda a, x: attend(a, x, q=affine(a.q, a.norm(x)), k=affine(a.k, a.norm(x))),
)
def normed_keys(a: Any, x: Tensor) -> Tensor:
    y = a.norm(x)
    return sdpa(a, a.q(y), a.k(y), a.v(x))


@own(
    "values that are the input, q and k behind a LayerNorm",
    "numerical",
    build=NORM,
    heads=lambda a, x: attend(
        a, x, q=affine(a.q, a.norm(x)), k=affine(a.k, a.norm(x)), v=split(x)
    ),
)
def normed_identity(a: Any, x: Tensor) -> Tensor:
    y = a.norm(x)
    return sdpa(a, a.q(y), a.k(y), x)


def _unit(t: Tensor) -> Tensor:
    return t / t.square().mean(-1, keepdim=True).sqrt()


@own(
    "a norm of each query and key",
    heads=lambda a, x: attend(a, x, q=_unit(affine(a.q, x)), k=_unit(affine(a.k, x))),
)
def normed_queries(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    return a.o(join(F.scaled_dot_product_attention(_unit(q), _unit(k), v)))


def _rotated(t: Tensor) -> Tensor:
    angle = torch.arange(TOKENS, dtype=t.dtype)[:, None] * torch.tensor([1.0, 0.3], dtype=t.dtype)
    a, b = t.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@own(
    "rotary positions",
    heads=lambda a, x: attend(a, x, q=_rotated(affine(a.q, x)), k=_rotated(affine(a.k, x))),
)
def rotary(a: Any, x: Tensor) -> Tensor:
    q, k, v = (split(m(x)) for m in (a.q, a.k, a.v))
    return a.o(join(F.scaled_dot_product_attention(_rotated(q), _rotated(k), v)))


GATE = add(gate=lambda: nn.Linear(WIDTH, WIDTH))


own_parts(
    "gated_values",
    "values times a gate",
    build=GATE,
    v=lambda a, x: a.v(x) * a.gate(x).sigmoid(),
)


@own("the output times a gate", build=GATE)
def gated_output(a: Any, x: Tensor) -> Tensor:
    o = F.scaled_dot_product_attention(*(split(m(x)) for m in (a.q, a.k, a.v)))
    return a.o(join(o) * a.gate(x).sigmoid())


@own(
    "one head of keys for all",
    build=add(kv=lambda: nn.Linear(WIDTH, 8)),
    heads=lambda a, x: attend(
        a, x, k=(x @ a.kv.weight.T + a.kv.bias)[:, :4], v=(x @ a.kv.weight.T + a.kv.bias)[:, 4:]
    ),
)
def one_key(a: Any, x: Tensor) -> Tensor:
    k, v = a.kv(x)[:, None].chunk(2, -1)
    q = split(a.q(x))
    return a.o(join(F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))))


@own(
    "values of another width",
    build=add(wide=lambda: nn.Linear(WIDTH, 12), back=lambda: nn.Linear(12, WIDTH)),
    heads=lambda a, x: attend(a, x, v=affine(a.wide, x)),
)
def wide_values(a: Any, x: Tensor) -> Tensor:
    o = F.scaled_dot_product_attention(split(a.q(x)), split(a.k(x)), split(a.wide(x)))
    return a.back(join(o))


@own(
    "a temperature per head that is learned",
    build=add(log=parameter(HEADS, 1, 1)),
    heads=lambda a, x: attend(a, x, change=lambda logits: logits * a.log.exp()),
)
def temperature(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    return a.o(join(((q @ k.mT) * a.log.exp()).softmax(-1) @ v))


@own(
    "a temperature made of the input",
    "numerical",
    build=add(heat=lambda: nn.Linear(WIDTH, 1)),
    heads=lambda a, x: attend(
        a, x, change=lambda logits: logits * (x @ a.heat.weight.T + a.heat.bias).exp()
    ),
)
def heated(a: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(a, x)
    return a.o(join(((q @ k.mT) * a.heat(x).exp()[:, None]).softmax(-1) @ v))


def apart(first: Any, other: Any = lambda _, x: x) -> Any:
    """Return the truth where queries read other tokens than keys: in x, or in both apart."""

    def truth(a: Any) -> tuple[Layer]:
        def heads(z: Tensor) -> Tensor:
            n = len(first(a, torch.zeros(TOKENS, WIDTH)))
            q, y = affine(a.q, z[:n]), z[n:]
            return attend(a, y, q=q)

        def both(x: Tensor) -> Tensor:
            return torch.cat([first(a, x), other(a, x)])

        return (Layer(lambda x: heads(both(x)), apart=Layer(heads, both)),)

    return truth


@own("queries of the first token alone", truth=apart(lambda _, x: x[:1]))
def class_attention(a: Any, x: Tensor) -> Tensor:
    return x + sdpa(a, a.q(x[:, :1]), a.k(x), a.v(x))


LATENT = add(latent=parameter(3, WIDTH))


@own("learned queries", build=LATENT, heads=lambda a, x: attend(a, x, q=affine(a.q, a.latent)))
def learned_queries(a: Any, x: Tensor) -> Tensor:
    q = a.q(a.latent).expand(len(x), -1, -1)
    return x + sdpa(a, q, a.k(x), a.v(x)).mean(1, keepdim=True)


@own(
    "learned keys and values beside those of the tokens",
    build=LATENT,
    truth=apart(lambda _, x: x, lambda a, x: torch.cat([a.latent.to(x), x])),
)
def memory_tokens(a: Any, x: Tensor) -> Tensor:
    both = torch.cat([a.latent.expand(len(x), -1, -1), x], 1)
    return sdpa(a, a.q(x), a.k(both), a.v(both))


@own(
    "registers joined to the tokens",
    build=LATENT,
    truth=lambda a: (Layer(lambda x: attend(a, x), lambda x: torch.cat([a.latent, x])),),
)
def registers(a: Any, x: Tensor) -> Tensor:
    both = torch.cat([a.latent.expand(len(x), -1, -1), x], 1)
    return sdpa(a, a.q(both), a.k(both), a.v(both))[:, 3:]


@own(
    "queries of one half of the tokens, keys of the other",
    truth=apart(lambda _, x: x[:2], lambda _, x: x[2:]),
)
def cross(a: Any, x: Tensor) -> Tensor:
    y, z = x[:, :2], x[:, 2:]
    return x + sdpa(a, a.q(y), a.k(z), a.v(z)).mean(1, keepdim=True)


@own(
    "rolled keys",
    "numerical",
    heads=lambda a, x: attend(a, x, k=affine(a.k, x.roll(1, 0)), v=affine(a.v, x.roll(1, 0))),
)
def rolled(a: Any, x: Tensor) -> Tensor:
    y = x.roll(1, 1)
    return sdpa(a, a.q(x), a.k(y), a.v(y))


own_parts(
    "flipped",
    "flipped keys",
    "numerical",
    k=lambda a, x: a.k(x).flip(-2),
    v=lambda a, x: a.v(x).flip(-2),
)
own_parts(
    "flipped_queries", "queries in another order", "numerical", q=lambda a, x: a.q(x).flip(-2)
)


class Core(nn.Module):
    """Attention of a tensor to itself, without maps."""

    def forward(self, x: Tensor) -> Tensor:
        return join(F.scaled_dot_product_attention(split(x), split(x), split(x)))


def of_core(a: Any, x: Tensor) -> Tensor:
    y = affine(a.q, x)
    return attend(a, x, q=y, k=y, v=y)


@own(
    "a map, and another module that attends to its output",
    "read+elsewhere",
    build=add(core=Core),
    heads=of_core,
)
def mapped_outside(a: Any, x: Tensor) -> Tensor:
    return a.o(a.core(a.q(x)))


@own(
    "a map, and another module with maps for queries and keys alone",
    "read+elsewhere",
    build=add(inner=lambda: Keys()),
    heads=lambda a, x: attend(
        a,
        x,
        **{n: affine(m, affine_rows(a.q, x)) for n, m in (("q", a.inner.q), ("k", a.inner.k))},
        v=affine(a.q, x),
    ),
)
def values_outside(a: Any, x: Tensor) -> Tensor:
    return a.o(a.inner(a.q(x)))


def affine_rows(map_: Any, x: Tensor) -> Tensor:
    """Return x W^T + b."""
    return x @ map_.weight.T + map_.bias


class Keys(nn.Module):
    """Attention whose values are its input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return join(F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(x)))


SMALL = add(**{f"s{n}": lambda: nn.Linear(4, 4) for n in "qkv"})


def of_small(a: Any, x: Tensor) -> Tensor:
    maps = {"q": a.sq, "k": a.sk, "v": a.sv}
    return attend(a, x, **{n: split(x) @ m.weight.T + m.bias for n, m in maps.items()})


class Products(nn.Module):
    """Attention to q, k and v that are given to it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return join(F.scaled_dot_product_attention(split(q), split(k), split(v)))


@own(
    "another module for the products, values that are the input",
    "numerical+elsewhere",
    build=add(core=Products),
    heads=lambda a, x: attend(a, x, v=split(x)),
)
def products_outside(a: Any, x: Tensor) -> Tensor:
    return a.o(a.core(a.q(x), a.k(x), x))
