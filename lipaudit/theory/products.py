"""Products with the Jacobian of an attention layer, starts for Lanczos, and the Jacobian itself.

A cotangent u of O is pulled back to the rows q, k, v, from there through each token-wise
projection to x; tangents are pushed the other way. One product with J J^T costs about one
attention forward. In a single head the width D leaves it: J J^T = J_qkv (I kron W^T W) J_qkv^T
with W = [W_Q W_K W_V].

The logits have dS_ij = <a_ij, dq_i> + <b_ij, dk_j> with a_ij = f_ij s k_j + r_ij and
b_ij = f_ij s q_i + t_ij (see `Pairs`). The softmax depends on S only: every formula of the theory
holds with a_ij in place of s k_j and b_ij in place of s q_i, except where all keys are shifted by
a constant. With a slope, such a shift changes a_ij by more than a constant of the row.

With c_ij = P_ij (v_j - o_i), dO_i = sum_j P_ij dv_j + sum_j dS_ij c_ij. If P_i is nearly one-hot
at key a, v_a - o_i cancels, and its rounding error is multiplied by gradients of logits of any
size. So c_ia is computed from the other keys: see `anchor_outputs`. Where all v_j nearly agree,
every v_j - o_i cancels: so the values stand less their mean, see `mean_value`.

Without the derivative of P, J is P kron W_V^T: P mixes the tokens, W_V the channels. Its leading
left singular vector is J's own where attention is weak, and often near it elsewhere. For a single
head that vector is a Kronecker product. For all heads together it is sought among the images of
b kron y, for one b that all maps together send far: y is then the leading singular vector of a
matrix as small as W_V, with or without W_O behind it, and a step towards it costs little beside a
product with J.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.heads import Heads, Pairs, local_map, projections, rows_in_reach
from lipaudit.theory.spectral import random_starts, spectral_norms

_DEAD = 1e-30
"""Heads with smaller gradients are zero: float32 ends at 1e-38."""
_TOKEN_STEPS = 4
"""Power steps to the tokens of a guess: the first singular value of a map is well separated."""
_CHANNEL_STEPS = 12
"""Lanczos steps to its channels: singular values of weights are close together."""


def logit_gradients(
    heads: Heads, name: Literal["q", "k"], chunk: slice
) -> Float[Tensor, "batch heads chunk partners d"]:
    """Return a_ij = dS_ij / dq_i of some queries i, by query; or b_ij = dS_ij / dk_j, by key."""
    pairs = heads.pairs or Pairs()
    rows, partners, more = heads.q, heads.k, pairs.with_q
    slope = None if pairs.slope is None else pairs.slope[..., None]
    if name == "k":
        rows, partners = partners, rows
        more = None if pairs.with_k is None else pairs.with_k.transpose(2, 3)
        slope = None if slope is None else slope.transpose(2, 3)
    gradients = heads.scale[..., None, None, None] * partners[:, :, None]
    gradients = gradients if slope is None else slope[:, :, chunk] * gradients
    gradients = gradients if more is None else gradients + more[:, :, chunk]
    return gradients.expand(-1, -1, len(range(rows.shape[2])[chunk]), -1, -1)


class Anchored(NamedTuple):
    """The outputs of some queries, and the contribution of the largest entry of each row of P.

    Attributes:
        o: o_i, (..., n, d_v).
        key: a, the key with the largest entry of P_i, (..., n, 1).
        gap: v_a - o_i, (..., n, d_v).
        c: c_ia = P_ia (v_a - o_i), (..., n, d_v).
        share: 1 - P_ia, (..., n, 1).
    """

    o: Tensor
    key: Tensor
    gap: Tensor
    c: Tensor
    share: Tensor


def mean_value(
    p: Float[Tensor, "*batch n m"], v: Float[Tensor, "*batch m dv"]
) -> Float[Tensor, "*batch 1 dv"]:
    """Return z, the mean of the values under P, for c_ij = P_ij ((v_j - z) - (o_i - z)).

    Without a sink, where a row of P sums to 1 or is 0, c_ij is the same for every z. But the
    rounding error of v_j - o_i is a share of the length of the values: with z taken off, a share
    of how far they lie apart. The gradients of logits that multiply it may be of any size.

    Args:
        p: P, or some of its rows: any z will do.
        v: values.

    >>> v = torch.full((1, 3, 2), 1e6, dtype=torch.float64)
    >>> v[0, 0] - mean_value(torch.full((1, 3, 3), 1 / 3, dtype=torch.float64), v)[0, 0]
    tensor([0., 0.], dtype=torch.float64)
    """
    weights = p.sum(-2, keepdim=True)
    return (weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)) @ v


def anchor_outputs(p: Tensor, v: Tensor, sink: Tensor | None = None) -> Anchored:
    """Return o_i and c_ia, with nearly full precision however close to one-hot P_i is.

    v_a - o_i = (1 - P_ia) v_a - sum_{j != a} P_ij v_j, where 1 - P_ia is the sum of the others.

    Args:
        p: P, (..., n, m).
        v: values, (..., m, d_v).
        sink: the share of a sink in each row, (..., n, 1), or None.
    """
    largest, key = p.max(-1, keepdim=True)
    others = p.scatter(-1, key, 0.0)
    images, share = others @ v, others.sum(-1, keepdim=True)
    share = share if sink is None else share + sink
    value = v.gather(-2, key.expand(*key.shape[:-1], v.shape[-1]))
    gap = share * value - images
    o = images.addcmul_(largest, value)
    return Anchored(o, key, gap, largest * gap, share)


def anchor_blocks(
    blocks: Iterable[tuple[Tensor, slice, slice]], v: Tensor, sink: Tensor | None
) -> Anchored:
    """Return `anchor_outputs` of all queries, given some rows of P, queries and keys at a time."""
    parts = []
    for p, i, keys in blocks:
        rows = anchor_outputs(p, v[..., keys, :], None if sink is None else sink[..., i, :])
        parts.append(rows._replace(key=rows.key + (keys.start or 0)))
    return Anchored(*(torch.cat(rows, -2) for rows in zip(*parts, strict=True)))


class InputSide(NamedTuple):
    """The projections that read one input, side by side: W = [W_Q W_K W_V] or a part of it.

    Attributes:
        source: x | x_kv.
        names: of the projections: q, k, v.
        widths: number of channels of each in x W.
        weight: W, (heads, D, sum of the widths).
    """

    source: str
    names: list[str]
    widths: list[int]
    weight: Tensor


def _map_rows(heads: Heads, kept: Tensor | None) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield rows of P, (problems, queries, keys), which queries and keys; P is 0 elsewhere."""
    if kept is not None:
        yield kept, slice(None), slice(None)
        return
    for start, stop in heads.row_blocks():
        p, keys = rows_in_reach(heads, start, stop)
        yield p.flatten(0, 1), slice(start, stop), keys


@dataclass(frozen=True)
class Attend:
    """The derivative of O = P V with respect to x W of every input.

    A problem is one head on one batch row; tensors are (problems, tokens, channels).

    Attributes:
        heads: the heads of the problems.
        p: P; None if a sample's maps exceed the limit. Each use then computes rows again.
        q, k: queries and keys times s.
        v, o: values, without a sink less their mean, and their outputs.
        key, c: a, the key with the largest P_ia, (problems, n, 1), and c_ia.
        slope: f of the logits, (problems, n, m), or None.
        extra: the distinct r by query (`q`) and t by key (`k`), and which of them is that of each
            problem: rows and heads may share one.
        local: G of the projections that are not affine, (problems or 1, tokens, d, e).
        sides: the projections.
    """

    heads: Heads
    p: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    key: Tensor
    c: Tensor
    slope: Tensor | None
    extra: dict[str, tuple[Tensor, Tensor]]
    local: dict[str, Tensor]
    sides: list[InputSide]

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return the cotangent of x W of every input for the cotangent u of O."""
        # sum_j P_ij <u_i, v_j> = <u_i, o_i>: the softmax needs no sum over the keys.
        inner, largest = ((u * rows).sum(-1, keepdim=True) for rows in (self.o, self.c))
        names = [name for side in self.sides for name in side.names]
        total = {name: torch.zeros_like(getattr(self, name)) for name in names}
        for p, i, j in _map_rows(self.heads, self.p):
            some = u[:, i]
            ds = (some @ self.v[:, j].mT).sub_(inner[:, i]).mul_(p)
            ds.scatter_(-1, self.key[:, i] - (j.start or 0), largest[:, i])
            plain = ds if self.slope is None else ds * self.slope
            for name in names:
                if name == "q":
                    rows = plain @ self.k[:, j]
                else:
                    rows = plain.mT @ self.q[:, i] if name == "k" else p.mT @ some
                if name in self.extra:  # sum_j ds_ij r_ij, sum_i ds_ij t_ij
                    rows = rows + _times_sets(ds if name == "q" else ds.mT, *self.extra[name])
                total[name][:, i if name == "q" else j] += rows
        for name, g in self.local.items():
            total[name] = torch.einsum("pnd,pnde->pne", total[name], g)
        return [torch.cat([total[name] for name in side.names], -1) for side in self.sides]

    def push(self, inputs: list[Tensor]) -> Tensor:
        """Return the tangent of O for the tangents of x W of every input."""
        tangents: dict[str, Tensor] = {}
        for side, y in zip(self.sides, inputs, strict=True):
            tangents |= zip(side.names, torch.split(y, side.widths, -1), strict=True)
        for name, g in self.local.items():
            tangents[name] = torch.einsum("pne,pnde->pnd", tangents[name], g)
        parts = []
        for p, i, j in _map_rows(self.heads, self.p):
            o, dp = self.o[:, i], None
            out = p @ tangents["v"][:, j] if "v" in tangents else torch.zeros_like(o)
            if "q" in tangents:
                dp = tangents["q"][:, i] @ self.k[:, j].mT
            if "k" in tangents:
                q, dk = self.q[:, i], tangents["k"][:, j].mT
                dp = q @ dk if dp is None else dp.baddbmm_(q, dk)
            if dp is not None:
                dp = dp if self.slope is None else dp * self.slope
                for name, (vectors, sets) in self.extra.items():
                    if name in tangents:  # <r_ij, dq_i>, <t_ij, dk_j>
                        more = _times_sets(tangents[name], vectors.mT, sets)
                        dp = dp + (more if name == "q" else more.mT)
                # dO = P dV + sum_j P_ij dS_ij (v_j - o_i), c_ia apart and the others by row sums.
                key = self.key[:, i] - (j.start or 0)
                largest = dp.gather(-1, key)
                dp.mul_(p).scatter_(-1, key, 0.0)
                out.baddbmm_(dp, self.v[:, j])
                out.addcmul_(dp.sum(-1, keepdim=True), o, value=-1)
                out.addcmul_(largest, self.c[:, i])
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @property
    def value_weight(self) -> Tensor | None:
        """Return W_V, (heads, D, d_v); None if v is constant or not an affine map of its token."""
        side = self.sides[-1] if self.sides else None
        if side is None or "v" not in side.names or "v" in self.local:
            return None
        return side.weight[..., -self.v.shape[2] :]

    def select(self, index: Tensor | slice) -> Attend:
        """Return the derivative for some problems; maps must be kept."""
        assert self.p is not None
        names = ("p", "q", "k", "v", "o", "key", "c", "slope")
        rows = {n: t[index] for n in names if (t := getattr(self, n)) is not None}
        extra = {n: (vectors, sets[index]) for n, (vectors, sets) in self.extra.items()}
        local = {n: g if len(g) == 1 else g[index] for n, g in self.local.items()}
        return replace(self, extra=extra, local=local, **rows)


def _times_sets(rows: Tensor, vectors: Tensor, sets: Tensor) -> Tensor:
    """Return rows_i X_i, (problems, tokens, c), where each set of problems has its own X_i."""
    # One product for each set and token, without copying X.
    used = sorted(set(sets.tolist()))
    parts = [(sets == i).nonzero()[:, 0] for i in used]
    some = [rows] if len(used) == 1 else [rows[part] for part in parts]
    each = [
        (x.transpose(0, 1) @ vectors[i]).transpose(0, 1) for x, i in zip(some, used, strict=True)
    ]
    return each[0] if len(used) == 1 else torch.cat(each)[torch.cat(parts).argsort()]


def linearize_attention(heads: Heads) -> Attend:
    """Linearise O = P V for every head on every batch row.

    Logits that are not plain take as much memory as P, so such heads keep P at any length.
    """
    pairs, shape, sink = heads.pairs, heads.q.shape[:2], heads.sink_share()
    short = len(heads.row_blocks()) == 1 or pairs is not None
    p = heads.attention().flatten(0, 1) if short else None
    scale = heads.scale[..., None, None]
    q, k, v = (t.flatten(0, 1) for t in (scale * heads.q, scale * heads.k, heads.v))
    if sink is None:  # else P_i sums to less than 1, and o_i would change by less than v_j
        some, _, keys = next(_map_rows(heads, p))
        v = v - mean_value(some, v[:, keys])
    sink = None if sink is None else sink.flatten(0, 1)
    rows, extra, slope = anchor_blocks(_map_rows(heads, p), v, sink), {}, None
    if pairs is not None:
        slope = None if pairs.slope is None else pairs.slope.expand(*shape, -1, -1).flatten(0, 1)
        for name, term in (("q", pairs.with_q), ("k", pairs.with_k)):
            if term is not None:
                vectors = (term if name == "q" else term.transpose(2, 3)).flatten(0, 1)
                number = torch.arange(len(vectors), device=q.device).view(term.shape[:2])
                extra[name] = vectors, number.expand(shape).flatten()
    groups = {"x": "qkv"} if heads.x_kv is None else {"x": "q", "x_kv": "kv"}
    sides, local = [], {}
    for source, letters in groups.items():
        used = {name: to for name in letters if (to := getattr(heads, f"to_{name}")) is not None}
        for name, to in used.items():
            if (g := to.local) is not None:  # one G for all problems, or one each
                shared = g.shape[:2] == (1, 1)
                local[name] = g[0] if shared else g.expand(*shape, -1, -1, -1).flatten(0, 1)
        if used:
            weights = [to.weight for to in used.values()]
            widths = [weight.shape[2] for weight in weights]
            sides.append(InputSide(source, list(used), widths, torch.cat(weights, 2)))
    return Attend(heads, p, q, k, v, rows.o, rows.key, rows.c, slope, extra, local, sides)


@dataclass(frozen=True)
class HeadProducts:
    """J J^T u of single heads, u -> A u, (problems, n dv).

    Attributes:
        attend: the derivative of the outputs.
        grams: W^T W of each input, (problems, e, e).
    """

    attend: Attend
    grams: list[Tensor]

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every problem."""
        # J = J_qkv (I kron W^T): J J^T u = J_qkv (I kron W^T W) J_qkv^T u, an e x e Gram per head.
        pairs = zip(self.attend.pull(u.view_as(self.attend.o)), self.grams, strict=True)
        return self.attend.push([y @ gram for y, gram in pairs]).flatten(1)

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every problem, (J_qkv^T u)^T (I kron W^T W) (J_qkv^T u)."""
        pairs = zip(self.attend.pull(u.view_as(self.attend.o)), self.grams, strict=True)
        squares = [(y * (y @ gram)).sum((1, 2)) for y, gram in pairs]
        return sum(squares, u.new_zeros(len(u))).sqrt()  # without a projection J is 0

    def select(self, index: Tensor) -> HeadProducts:
        """Return the products of these problems alone."""
        if len(index) == len(self.attend.q):
            return self
        index = index.to(self.attend.q.device)
        return HeadProducts(self.attend.select(index), [gram[index] for gram in self.grams])

    def guess(self) -> Tensor:
        """Return the leading left vector of P kron W_V^T, (problems, n dv), or 0."""
        attend, weight = self.attend, self.attend.value_weight
        if weight is None:
            return torch.zeros_like(attend.o).flatten(1)
        # The norm and left vector of a Kronecker product are those of its factors.
        tokens = _token_images(attend, attend.v.new_ones(1))
        values, vectors = torch.linalg.eigh(weight.mT @ weight)
        channels = values[:, -1:].clamp_min(0.0).sqrt() * vectors[..., -1]
        return (tokens.mT * channels.repeat(len(tokens) // len(channels), 1)[:, None]).flatten(1)


@dataclass(frozen=True)
class LayerProducts:
    """J J^T u of all heads together: of sum_h O_h W_O,h, or of the heads side by side.

    Attributes:
        attend: the derivative of the outputs of all heads; a problem here is one batch row.
        weights: W of each input, the heads side by side, (D, heads e).
        out: W_O, (heads, d_v, D_out); None for heads side by side.
        gains: of each head, where they are side by side.
    """

    attend: Attend
    weights: list[Tensor]
    out: Tensor | None
    gains: Tensor

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every problem, (rows, n channels)."""
        count, pushed = len(self.gains), []
        for x, weight in zip(self.pull(u), self.weights, strict=True):
            y = (x @ weight).view(*x.shape[:2], count, -1)
            pushed.append(y.transpose(1, 2).flatten(0, 1))
        o = self.attend.push(pushed)
        o = o.view(len(u), count, *o.shape[1:]).transpose(1, 2)
        if self.out is None:
            return (self.gains[:, None] * o).flatten(1)
        return (o.flatten(2) @ self.out.flatten(0, 1)).flatten(1)

    def pull(self, u: Tensor) -> list[Tensor]:
        """J^T u for every input, (rows, tokens, D)."""
        (n, dv), count = self.attend.o.shape[1:], len(self.gains)
        if self.out is not None:
            u = u.view(len(u), n, -1) @ self.out.flatten(0, 1).mT
        u = u.reshape(len(u), n, count, dv)
        u = self.gains[:, None] * u if self.out is None else u
        parts = self.attend.pull(u.transpose(1, 2).flatten(0, 1))
        rows = [y.view(len(u), count, *y.shape[1:]).transpose(1, 2).flatten(2) for y in parts]
        return [y @ weight.mT for y, weight in zip(rows, self.weights, strict=True)]

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every problem."""
        squares = (x.square().sum((1, 2)) for x in self.pull(u))
        return sum(squares, u.new_zeros(len(u))).sqrt()

    def select(self, rows: Tensor) -> LayerProducts:
        """Return the products of these batch rows alone."""
        count = len(self.gains)
        if len(rows) * count == len(self.attend.q):
            return self
        index = (rows[:, None] * count + torch.arange(count)).flatten()
        return replace(self, attend=self.attend.select(index.to(self.attend.q.device)))

    def guess(self) -> Tensor:
        """Return the image under all values of the b kron y that they stretch most, or 0."""
        attend, out, weight = self.attend, self.out, self.attend.value_weight
        count, (problems, n, dv) = len(self.gains), attend.o.shape
        if weight is None:
            channels = count * dv if out is None else out.shape[2]
            return attend.o.new_zeros(problems // count, n * channels)
        # b by ||W_O||_F^2 of each head; a_h = P_h b are its images, `inner` all <a_h, a_g>.
        sizes = attend.v.new_ones(count) if out is None else out.square().sum((1, 2))
        a = _token_images(attend, sizes).view(-1, count, n)
        weight = self.gains[:, None, None] * weight if out is None else weight
        flat, inner = weight.transpose(0, 1).flatten(1), a @ a.mT

        def products(y: Tensor) -> Tensor:
            # t = W_V^T y goes to sum_h a_h kron W_O,h^T t_h; this is what returns of that to each.
            t = (y @ flat).view(-1, count, dv)
            if out is None:
                t = inner.diagonal(0, 1, 2)[..., None] * t
            else:
                t = torch.einsum("bho,hdo->bhd", inner @ torch.einsum("bhd,hdo->bho", t, out), out)
            return t.flatten(1) @ flat.mT

        start = random_starts([0], len(flat)).to(flat).expand(len(inner), -1)
        rule = {"tol": 1e-3, "max_steps": _CHANNEL_STEPS, "within": math.inf, "rebuild": 2.0}
        y = spectral_norms(lambda _: products, start, vectors=True, **rule).vector  # type: ignore[arg-type]
        assert y is not None
        t = (y @ flat).view(-1, count, dv)
        if out is None:
            return (a.mT[..., None] * t[:, None]).flatten(1)
        return (a.mT @ torch.einsum("bhd,hdo->bho", t, out)).flatten(1)


def head_products(heads: Heads) -> HeadProducts:
    """Linearise every head of a layer separately."""
    attend = linearize_attention(heads)
    grams = [(side.weight.mT @ side.weight).repeat(len(heads.q), 1, 1) for side in attend.sides]
    return HeadProducts(attend, grams)


def layer_products(
    heads: Heads, out: Float[Tensor, "heads dv Dout"] | None, gains: Float[Tensor, " heads"]
) -> LayerProducts:
    """Linearise a layer with all heads together; `out` and `gains` as in `LayerProducts`."""
    attend = linearize_attention(heads)
    weights = [side.weight.transpose(0, 1).flatten(1) for side in attend.sides]
    out = None if out is None else out.to(heads.v)
    return LayerProducts(attend, weights, out, gains.to(heads.v))


def _token_images(attend: Attend, sizes: Tensor) -> Tensor:
    """P b of every problem, (problems, 1, n), for one b a row, shared by as many heads as sizes.

    Power steps on sum_h size_h P_h^T P_h are enough for a guess.
    """
    count, (problems, n, _) = len(sizes), attend.q.shape
    images = attend.v.new_ones(problems, 1, n)
    for _ in range(_TOKEN_STEPS):
        back = attend.v.new_zeros(problems, 1, attend.k.shape[1])
        for p, i, j in _map_rows(attend.heads, attend.p):
            back[..., j] += images[..., i] @ p
        total = (sizes[:, None] * back.view(-1, count, back.shape[2])).sum(1, keepdim=True)
        b = normalize(total, dim=-1).repeat_interleave(count, 0)
        rows = _map_rows(attend.heads, attend.p)
        images = torch.cat([b[..., j] @ p.mT for p, _, j in rows], 2)
    return images


def sketched_vjp_x(
    heads: Heads,
    u: Float[Tensor, "batch heads n dv"],
    size: Float[Tensor, "batch heads"],
    sketches: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return u, scaled, and R^T J^T u for X_q (`x`) and X_kv (`x_kv`), if the heads read them.

    Args:
        heads: the heads of one layer.
        u: a cotangent of O; each head and row is scaled such that ||R^T J^T u|| is `size`.
        size: the norm for each head and row.
        sketches: R, directions in the channels of each input, (D, r).

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2)[None]
    >>> heads, size = affine_heads(x, eye, eye, 2 * eye), torch.full((1, 1), 8.0**0.5)
    >>> sketched_vjp_x(heads, torch.ones(1, 1, 1, 2), size, {"x": torch.eye(2)})[1]
    {'x': tensor([[[2., 2.]]])}
    """
    attend, pulled = linearize_attention(heads), {}
    for side, y in zip(attend.sides, attend.pull(u.flatten(0, 1)), strict=True):
        # Into few directions at once: no head is pulled back to all channels.
        few = side.weight.mT @ sketches[side.source]
        pulled[side.source] = y.view(*size.shape, *y.shape[1:]) @ few
    squares = sum((z.square().sum((2, 3)) for z in pulled.values()), torch.zeros_like(size))
    factor = size / squares.sqrt().clamp_min(_DEAD)
    rows = {name: torch.einsum("bhnr,bh->bnr", z, factor) for name, z in pulled.items()}
    return u * factor[..., None, None], rows


def dense_jacobian(heads: Heads) -> Float[Tensor, "batch heads outputs inputs"]:
    """Return J of every head as a matrix, (n dv) x (n D), or x (n D + m Dkv) with two inputs.

    Memory for batch x heads x n x m x dv x D numbers: for small cases.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2)[None]
    >>> dense_jacobian(affine_heads(x, eye, eye, 2 * eye))
    tensor([[[[2., 0.],
              [0., 2.]]]])
    """
    # J_ij = P_ij Phi^v_j + c_ij (b_ij^T Phi^k_j) + delta_ij T_i Phi^q_i, term by term; b and a are
    # s q and s k where the logits are plain, and dP_ij = P_ij (dS_ij - sum_l P_il dS_il) gives c.
    p, v = heads.attention(), heads.v
    v = v - mean_value(p, v) if heads.sink is None else v
    rows = anchor_outputs(p, v, heads.sink_share())
    c = p[..., None] * (v[:, :, None] - rows.o[:, :, :, None])
    anchors = rows.key[..., None].expand(*rows.key.shape, v.shape[-1])
    c = c.scatter(3, anchors, rows.c[:, :, :, None])
    # Phi^q, Phi^k, Phi^v, each (#batch, heads, #tokens, d, D); zero for a constant.
    phi = [local_map(to) @ to.weight.mT[:, None] for to in projections(heads)]
    over_keys = torch.einsum("bhij,bhjax->bhiajx", p, phi[2])
    u = torch.einsum("bhjid,bhjdx->bhijx", logit_gradients(heads, "k", slice(None)), phi[1])
    over_keys += torch.einsum("bhija,bhijx->bhiajx", c, u)
    t = torch.einsum("bhija,bhijd->bhiad", c, logit_gradients(heads, "q", slice(None)))
    diagonal = torch.einsum("bhiad,bhidx->bhaxi", t, phi[0])
    over_queries = torch.diag_embed(diagonal).permute(0, 1, 4, 2, 5, 3)
    if heads.x_kv is None:
        return (over_keys + over_queries).flatten(4).flatten(2, 3)
    return torch.cat([over_queries.flatten(4), over_keys.flatten(4)], 4).flatten(2, 3)
