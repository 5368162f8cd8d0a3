"""Attention layers of every kind we support, hostile heads, and their Jacobians by autograd.

Nothing here uses the package beyond its containers: `Layer.output` is a plain softmax
attention written out anew, so `Layer.jacobian` is an independent truth.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipaudit.theory import Policy
from lipaudit.theory.heads import Heads, Pairs, Projection, affine_heads

HEADS = 2

# Every way in which small layers are bounded: exact block norms, the formula.
POLICIES = (Policy(), Policy(dense_entries=0))

# What differs from plain affine attention; see `Options`.
CASES: dict[str, dict[str, Any]] = {
    "affine": {},
    "biases": {"biases": True},
    "causal": {"causal": True, "biases": True},
    "position-bias": {"position_bias": True},
    "padding": {"padded": True, "biases": True},
    "padding-causal": {"padded": True, "causal": True},
    "rotary": {"qk": "rotation", "biases": True},
    "qk-norm": {"qk": "local", "biases": True},
    "all-norm": {"qk": "local", "values": "local"},
    "cross-head": {"qk": "cross-head"},
    "cross-attention": {"keys": 7, "biases": True},
    "cross-attention-norm": {"keys": 4, "qk": "local"},
    "learned-query": {"keys": 7, "learned_query": True},
    "learned-query-same-length": {"learned_query": True},
    "wide-values": {"dv": 5},
    "narrow-values": {"dv": 2, "qk": "rotation"},
    "grouped": {"grouped": True, "causal": True, "qk": "rotation"},
    "windows": {"windows": 2, "position_bias": True},
    "one-token": {"n": 1},
    "softcap": {"cap": 1.5, "biases": True},
    "softcap-rotary": {"cap": 2.0, "qk": "rotation", "causal": True, "grouped": True},
    "softcap-padding": {"cap": 1.0, "padded": True, "position_bias": True},
    "relative": {"relative": "qk", "biases": True},
    "relative-queries": {"relative": "q", "windows": 2},
    "relative-padding": {"relative": "qk", "padded": True, "causal": True},
    "relative-own": {"relative": "qk", "own_positions": True, "qk": "local"},
    "relative-cross-attention": {"relative": "qk", "keys": 7},
    "relative-softcap": {"relative": "k", "cap": 1.5, "values": "local"},
    "sink": {"sink": True, "biases": True},
    "sink-rotary": {"sink": True, "qk": "rotation", "causal": True, "biases": True},
    "sink-padding": {"sink": True, "padded": True, "qk": "local", "values": "local"},
    "sink-softcap": {"sink": True, "cap": 1.0, "keys": 3, "biases": True},
}


@dataclass(frozen=True)
class Options:
    """How one random layer is built; `keys` is the length of another key/value input."""

    n: int = 5
    width: int = 8
    d: int = 3
    dv: int = 3
    samples: int = 2
    windows: int = 1
    keys: int | None = None
    biases: bool = False
    causal: bool = False
    position_bias: bool = False
    padded: bool = False
    qk: str = "affine"
    values: str = "affine"
    learned_query: bool = False
    grouped: bool = False
    cap: float | None = None
    relative: str = ""  # what meets relative positions: q, k or both
    own_positions: bool = False  # other positions in every batch row
    sink: bool = False
    twins: bool = False  # the first two tokens are the same
    value_gain: float = 1.0  # for the rows v, their bias and W_V


RowMap = Callable[[int, Tensor], Tensor]  # (head, rows of x W + b) -> rows that enter attention


@dataclass(frozen=True)
class Logits:
    """c tanh(s q k^T / c) + s (q_i . r_ij + k_j . t_ij), without the mask or bias."""

    scale: float
    cap: float | None
    r: Tensor | None
    t: Tensor | None

    def __call__(self, b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        logits = self.scale * q @ k.T
        logits = logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
        for rows, more, sums in ((q, self.r, "id,ijd->ij"), (k, self.t, "jd,ijd->ij")):
            if more is not None:
                logits = logits + self.scale * torch.einsum(sums, rows, more[b % len(more), h])
        return logits


@dataclass(frozen=True)
class Layer:
    """Random heads and the maps from x W + b to the rows that enter the product."""

    heads: Heads
    maps: dict[str, RowMap]
    logits: Logits | None = None  # with `bias` as what is added to them
    bias: Tensor | None = None

    def output(self, b: int, h: int, x: Tensor, x_kv: Tensor) -> Tensor:
        """Plain softmax attention of head h on batch row b, as a function of its inputs."""
        heads = self.heads
        rows = {"q": heads.q[b, h], "k": heads.k[b, h], "v": heads.v[b, h]}
        for name, source in (("q", x), ("k", x_kv), ("v", x_kv)):
            projection = getattr(heads, f"to_{name}")
            if projection is not None:
                rows[name] = self.maps[name](h, _linear(projection, h, source))
        return self._weights(b, h, rows["q"], rows["k"]) @ rows["v"]

    def jacobian(self) -> Tensor:
        """Dense Jacobians, (batch, heads, n dv, n D) or (..., n D + m Dkv) with another input."""
        batch, heads = self.heads.q.shape[:2]
        pairs = [self._dense(b, h) for b in range(batch) for h in range(heads)]
        return torch.stack(pairs).unflatten(0, (batch, heads))

    def layer_jacobian(self, *, out: bool) -> Tensor:
        """Dense Jacobian of the concatenated heads, or of sum_h O_h W_O,h, per batch row."""
        heads = self.heads
        batch, count, n, dv = heads.v.shape[0], *heads.q.shape[1:3], heads.v.shape[3]
        each = self.jacobian().reshape(batch, count, n, dv, -1)
        if not out:
            return each.reshape(batch, count * n * dv, -1)
        return torch.einsum("bhndx,hde->bnex", each, heads.out).flatten(1, 2)

    def _weights(self, b: int, h: int, q: Tensor, k: Tensor) -> Tensor:
        heads, n, m = self.heads, len(q), len(k)
        if self.logits is None:
            logits = q @ k.T * heads.scale.expand(*heads.q.shape[:2])[b, h]
        else:
            logits = self.logits(b, h, q, k)
        bias = heads.bias if self.logits is None else self.bias
        if bias is not None:
            logits = logits + bias.expand(*heads.q.shape[:2], n, m)[b, h]
        if heads.causal:
            logits = logits.masked_fill(torch.arange(m) > torch.arange(n)[:, None], -torch.inf)
        if heads.valid is not None:
            logits = logits[heads.valid[b]]
        largest = logits.detach().amax(1, keepdim=True)
        weights = (logits - largest).exp()
        total = weights.sum(1, keepdim=True)
        if heads.sink is not None:
            total = total + (heads.sink[0, h] - largest).exp()
        weights = weights / total
        if heads.valid is None:
            return weights
        return weights.new_zeros(n, m).index_put((heads.valid[b],), weights)

    def _dense(self, b: int, h: int) -> Tensor:
        x, x_kv = self.heads.x[b], self.heads.x_kv
        parts = torch.autograd.functional.jacobian(
            lambda *inputs: self.output(b, h, inputs[0], inputs[-1]),
            (x,) if x_kv is None else (x, x_kv[b]),
            vectorize=True,
        )
        size = self.heads.q.shape[2] * self.heads.v.shape[3]
        return torch.cat([part.reshape(size, -1) for part in parts], 1)


def random_layer(name: str, *, seed: int = 0, gain: float = 1.5, **options) -> Layer:
    """Build a random float64 layer; any field of `Options` may be overridden.

    `gain` multiplies W_Q, W_K, W_V.
    """
    o = Options(**(CASES[name] | options))
    gen = torch.Generator().manual_seed(seed)
    x, x_kv, valid, bias = _inputs(o, gen)
    source = x if x_kv is None else x_kv
    q, to_q, map_q = _projection(o.qk, o.d, x, gen, o, gain)
    k, to_k, map_k = _projection(o.qk, o.d, source, gen, o, gain)
    v, to_v, map_v = _projection(o.values, o.dv, source, gen, o, gain)
    v, to_v, map_v = _scaled(o.value_gain, v, to_v, map_v)
    heads = Heads(
        x=x,
        x_kv=x_kv,
        q=q,
        k=k,
        v=v,
        scale=torch.full((1, 1), o.d**-0.5, dtype=torch.float64),
        bias=bias,
        causal=o.causal,
        valid=valid,
        to_q=None if o.learned_query else to_q,
        to_k=to_k,
        to_v=to_v,
        out=_randn(gen, HEADS, o.dv, o.width) / (HEADS * o.dv) ** 0.5,
        sample=torch.arange(o.samples).repeat_interleave(o.windows),
    )
    if o.sink:
        heads = replace(heads, sink=_randn(gen, 1, HEADS, 1))
    layer = Layer(heads, {"q": map_q, "k": map_k, "v": map_v})
    return _with_logits(layer, o, gen) if o.cap or o.relative else layer


def _with_logits(layer: Layer, o: Options, gen: torch.Generator) -> Layer:
    """Give random heads other logits, with their derivatives by hand."""
    heads, scale = layer.heads, o.d**-0.5
    (batch, _, n, d), m = heads.q.shape, heads.k.shape[2]
    sets = batch if o.own_positions else 1
    r, t = (_randn(gen, sets, HEADS, n, m, d) if c in o.relative else None for c in "qk")
    logits = Logits(scale, o.cap, r, t)
    pairs = [(b, h) for b in range(batch) for h in range(HEADS)]
    at_x = torch.stack([logits(b, h, heads.q[b, h], heads.k[b, h]) for b, h in pairs])
    at_x = at_x.view(batch, HEADS, n, m) + (0 if heads.bias is None else heads.bias)
    slope = None
    if o.cap is not None:
        slope = 1 - torch.tanh(scale * heads.q @ heads.k.mT / o.cap).square()
    terms = (None if term is None else scale * term for term in (r, t))
    made = replace(heads, bias=at_x, pairs=Pairs(slope, *terms))
    return Layer(made, layer.maps, logits, heads.bias)


def _inputs(
    o: Options, gen: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    batch, m = o.samples * o.windows, o.n if o.keys is None else o.keys
    x = _randn(gen, batch, o.n, o.width)
    if o.twins:
        x[:, 1] = x[:, 0]
    x_kv = None if o.keys is None else _randn(gen, batch, m, o.width + 1)
    bias = _randn(gen, 1, HEADS, o.n, m) if o.position_bias else None
    if not o.padded:
        return x, x_kv, None, bias
    lengths = torch.arange(o.n, o.n - batch, -1).clamp_min(1)
    valid = torch.arange(o.n) < lengths[:, None]
    masked = torch.zeros(batch, 1, 1, o.n, dtype=torch.float64)
    return x * valid[..., None], x_kv, valid, masked.masked_fill(~valid[:, None, None], -torch.inf)


def _projection(
    kind: str, d: int, x: Tensor, gen: torch.Generator, o: Options, gain: float
) -> tuple[Tensor, Projection, RowMap]:
    """Random rows (batch, heads, tokens, d), their projection and the map behind the linear."""
    width, e = x.shape[-1], HEADS * d if kind == "cross-head" else d
    own = 1 if o.grouped or kind == "cross-head" else HEADS
    weight = (gain * _randn(gen, own, width, e) / width**0.5).repeat(HEADS // own, 1, 1)
    bias = _randn(gen, own, e).repeat(HEADS // own, 1) if o.biases else None
    row_map = _row_map(kind, d, x.shape[1], gen)
    projection = Projection(weight=weight, bias=bias, local=None, kind=kind)
    y = torch.stack([_linear(projection, h, x) for h in range(HEADS)], 1)
    pairs = [(h, y[b, h]) for b in range(len(x)) for h in range(HEADS)]
    rows = torch.stack([row_map(*pair) for pair in pairs]).unflatten(0, y.shape[:2])
    if kind != "affine":
        local = torch.stack([_token_jacobian(row_map, *pair) for pair in pairs])
        projection = replace(projection, local=local.unflatten(0, y.shape[:2]))
    return rows, projection, row_map


def _scaled(
    by: float, rows: Tensor, projection: Projection, row_map: RowMap
) -> tuple[Tensor, Projection, RowMap]:
    if projection.local is not None:
        local = by * projection.local
        return by * rows, replace(projection, local=local), lambda h, y: by * row_map(h, y)
    bias = None if projection.bias is None else by * projection.bias
    return by * rows, replace(projection, weight=by * projection.weight, bias=bias), row_map


def _row_map(kind: str, d: int, tokens: int, gen: torch.Generator) -> RowMap:
    if kind == "affine":
        return lambda _h, y: y
    if kind == "rotation":
        turn = torch.linalg.qr(_randn(gen, tokens, d, d)).Q
        return lambda _h, y: torch.einsum("nde,ne->nd", turn.to(y.dtype), y)
    gain = 1 + 0.3 * _randn(gen, 1)

    def norm(h: int, y: Tensor) -> Tensor:
        scaled = gain.to(y.dtype) * y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled[..., h * d : (h + 1) * d] if kind == "cross-head" else scaled

    return norm


def _token_jacobian(row_map: RowMap, h: int, y: Tensor) -> Tensor:
    """d rows_i / d y_i of every token, (tokens, d, e)."""
    full = torch.autograd.functional.jacobian(lambda z: row_map(h, z), y, vectorize=True)
    return torch.stack([full[i, :, i] for i in range(len(y))])


def _linear(projection: Projection, h: int, x: Tensor) -> Tensor:
    y = x @ projection.weight[h]
    return y if projection.bias is None else y + projection.bias[h]


def _randn(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


# Hostile heads: tokens that are constant, doubled, clustered, zero, tiny or huge; uniform, one-hot
# and tied rows; values that vanish, have clustered singular values or any scale; masks.

N, WIDTH, D = 6, 5, 3  # of hostile heads


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


TOKENS = {
    "random": lambda x: x,
    "constant": lambda x: x[:, :1].expand(-1, N, -1),
    "doubled": lambda x: x[:, torch.arange(N) // 2],
    "tripled": lambda x: x[:, torch.arange(N) % 2],
    "clustered": lambda x: x[:, torch.arange(N) // 3] + 1e-9 * x,
    "zero": lambda x: 0 * x,
    "one-zero": lambda x: x * (torch.arange(N) > 0)[:, None],
    "tiny": lambda x: 1e-8 * x,
    "huge": lambda x: 1e2 * x,
    "one-huge": lambda x: x * torch.where(torch.arange(N) == 2, 1e2, 1.0)[:, None],
}
VALUES = {
    "random": lambda w: w,
    "zero": lambda w: 0 * w,
    "orthogonal": lambda w: torch.linalg.qr(w).Q,
    "rank-one": lambda w: w[..., :1] @ w[:, :1],
    "small": lambda w: 1e-25 * w,
    "large": lambda w: 1e25 * w,
    "one-small": lambda w: w * torch.tensor([1.0, 1e-25])[:, None, None],
}
_WINDOWS = torch.arange(N) // 3 == (torch.arange(N) // 3)[:, None]
MASKS = {
    "none": None,
    "causal": torch.full((N, N), -torch.inf, dtype=torch.float64).triu(1),
    "window": torch.where(_WINDOWS, 0.0, -torch.inf),
    "own": torch.where(torch.eye(N, dtype=torch.bool), 0.0, -torch.inf),
    "swin": torch.where(_WINDOWS, 0.0, -100.0),
    "bias": 3 * randn(99, N, N),
}


def affine_layer(heads: Heads) -> Layer:
    """Return affine heads with what autograd needs."""
    return Layer(heads, dict.fromkeys("qkv", lambda _h, y: y))


def truth(heads: Heads) -> Tensor:
    """||J|| of every affine head, (batch, heads)."""
    return dense_norms(affine_layer(heads).jacobian())


def dense_norms(j: Tensor) -> Tensor:
    largest = j.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    return largest[..., 0, 0] * torch.linalg.matrix_norm(j / largest, 2)


def corner(seed: int, tokens: str, values: str, mask: str, *, gain: float, biases: bool) -> Heads:
    """Two heads on two samples, float64 tensors with entries that single precision has."""
    x = TOKENS[tokens](randn(seed, 2, N, WIDTH)).float().double()
    wq, wk, wv = (randn(seed + i, HEADS, WIDTH, D) / WIDTH**0.5 for i in (1, 2, 3))
    wq, wv = gain * wq, VALUES[values](wv).float().double()
    heads = affine_heads(x, wq, wk, wv)
    if biases:
        bias = {"q": randn(seed + 4, HEADS, D), "k": randn(seed + 5, HEADS, D)}
        bias["v"] = wv.abs().amax((1, 2))[:, None] * randn(seed + 6, HEADS, D).float().double()
        heads = with_biases(heads, bias)
    return heads if MASKS[mask] is None else replace(heads, bias=MASKS[mask][None, None])


def with_biases(heads: Heads, biases: dict[str, Tensor]) -> Heads:
    """Add biases (heads, d) to some of the maps to q, k and v of affine heads."""
    maps = {f"to_{n}": replace(getattr(heads, f"to_{n}"), bias=b) for n, b in biases.items()}
    rows = {n: getattr(heads, n) + b[:, None] for n, b in biases.items()}
    return replace(heads, **maps, **rows)


def without_padding(heads: Heads, b: int, length: int) -> Heads:
    """Return one batch row of padded heads without its padding, as a sample of its own."""
    row = heads.row(b)
    short = {name: getattr(row, name)[:, :, :length] for name in "qkv"}
    sample = torch.zeros(1, dtype=torch.long)
    return replace(row, x=row.x[:, :length], **short, bias=None, valid=None, sample=sample)


def growing_head(
    seed: int, n: int = 4, width: int = 6, d: int = 3, dv: int = 3, *, gain=1.5, biased: str = "q"
) -> Heads:
    """Return one affine head, with biases of some maps."""
    gen = torch.Generator().manual_seed(seed)
    weights = [gain * _randn(gen, 1, width, e) / width**0.5 for e in (d, d, dv)]
    heads = affine_heads(_randn(gen, 1, n, width), *weights)
    sizes = zip("qkv", (d, d, dv), strict=True)
    return with_biases(heads, {name: _randn(gen, 1, e) for name, e in sizes if name in biased})
