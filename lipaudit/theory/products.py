"""Products with the Jacobian of an attention layer without forming it, and starts for Lanczos.

A cotangent u of O is pulled back to the rows q, k, v, from there through each token-wise
projection to x; tangents are pushed the other way. One product with J J^T costs about one
attention forward. In a single head the width D leaves it: J J^T = J_qkv (I kron W^T W) J_qkv^T
with W = [W_Q W_K W_V].

Without the derivative of P, J is P kron W_V^T: P mixes the tokens, W_V the channels. Its leading
left singular vector is J's own where attention is weak, and often near it elsewhere. For a single
head that vector is a Kronecker product. For all heads together it is sought among the images of
b kron y, for one b that all maps together send far: y is then the leading singular vector of a
matrix as small as W_V, with or without W_O behind it, and a step towards it costs little beside a
product with J.

The derivative of O = P V with respect to the rows q, k and v, and to each logit.

dS_ij = <a_ij, dq_i> + <b_ij, dk_j> with a_ij = f_ij s k_j + r_ij and b_ij = f_ij s q_i + t_ij (see
`Pairs`). The softmax depends on S only: every formula of the theory holds with a_ij in place of s
k_j and b_ij in place of s q_i, except where all keys are shifted by a constant. With a slope, such
a shift changes a_ij by more than a constant of the row.

With c_ij = P_ij (v_j - o_i), dO_i = sum_j P_ij dv_j + sum_j dS_ij c_ij. If P_i is nearly one-hot
at key a, v_a - o_i cancels, and its rounding error is multiplied by gradients of logits of any
size. So c_ia is computed from the other keys: see `anchor_outputs`. Where all v_j nearly agree,
every v_j - o_i cancels: so the values stand less their mean, see `mean_value`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from lipaudit.theory.heads import Heads, Pairs, rows_in_reach
from lipaudit.theory.policy import cut
from lipaudit.theory.spectral import Products, random_starts, spectral_norms


def key_gradients(heads: Heads, queries: slice) -> Float[Tensor, "batch heads rows m d"]:
    """Return a_ij = dS_ij / dq_i for some queries i and all keys j."""
    s = heads.scale[..., None, None, None]
    slope, extra = _terms(heads, "with_q")
    a = s * heads.k[:, :, None]
    a = a if slope is None else slope[:, :, queries, :, None] * a
    if extra is not None:
        return a + extra[:, :, queries]
    return a.expand(-1, -1, len(range(heads.q.shape[2])[queries]), -1, -1)


def query_gradients(heads: Heads, keys: slice) -> Float[Tensor, "batch heads columns n d"]:
    """Return b_ij = dS_ij / dk_j for some keys j and all queries i, by key."""
    s = heads.scale[..., None, None, None]
    slope, extra = _terms(heads, "with_k")
    b = s * heads.q[:, :, None]
    b = b if slope is None else slope[..., keys].mT[..., None] * b
    if extra is not None:
        return b + extra[:, :, :, keys].transpose(2, 3)
    return b.expand(-1, -1, len(range(heads.k.shape[2])[keys]), -1, -1)


def largest_gradients(heads: Heads) -> tuple[Float[Tensor, "batch heads"], ...]:
    """Return upper limits of ||b_ij|| and ||a_ij||, the gradients in keys and queries."""
    limits = []
    for rows, name in ((heads.q, "with_k"), (heads.k, "with_q")):
        slope, extra = _terms(heads, name)
        limit = heads.scale.abs() * torch.linalg.vector_norm(rows, dim=-1).amax(-1)
        limit = limit if slope is None else limit * slope.abs().amax((-2, -1))
        if extra is not None:
            limit = limit + torch.linalg.vector_norm(extra, dim=-1).amax((-2, -1))
        limits.append(limit)
    return tuple(limits)


def _terms(heads: Heads, name: str) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if heads.pairs is None else (heads.pairs.slope, getattr(heads.pairs, name))


@dataclass(frozen=True)
class PairProducts:
    """Products with f, r and t of many problems; a problem is one head on one batch row.

    Attributes:
        slope: f of each problem, or None.
        with_q: the distinct r, by query, or None.
        with_k: the distinct t, by key, or None.
        sets: indices of the r and t of each problem.
    """

    slope: Float[Tensor, "problems n m"] | None
    with_q: Float[Tensor, "#sets n m d"] | None
    with_k: Float[Tensor, "#sets m n d"] | None
    sets: tuple[Int[Tensor, " problems"], Int[Tensor, " problems"]]

    def scale_logits(self, ds: Tensor) -> Tensor:
        """Return f_ij ds_ij."""
        return ds if self.slope is None else ds * self.slope

    def pull(self, ds: Tensor) -> dict[str, Tensor]:
        """Return sum_j ds_ij r_ij (`q`) and sum_i ds_ij t_ij (`k`), where they are not 0."""
        rows = {}
        if self.with_q is not None:
            rows["q"] = _times_sets(ds, self.with_q, self.sets[0])
        if self.with_k is not None:
            rows["k"] = _times_sets(ds.mT, self.with_k, self.sets[1])
        return rows

    def push(self, ds: Tensor, tangents: dict[str, Tensor]) -> Tensor:
        """Return f_ij ds_ij + <r_ij, dq_i> + <t_ij, dk_j>, (problems, n, m)."""
        ds = self.scale_logits(ds)
        if "q" in tangents and self.with_q is not None:
            ds = ds + _times_sets(tangents["q"], self.with_q.mT, self.sets[0])
        if "k" in tangents and self.with_k is not None:
            ds = ds + _times_sets(tangents["k"], self.with_k.mT, self.sets[1]).mT
        return ds

    def select(self, index: Tensor | slice) -> PairProducts:
        """Return the products of some problems."""
        slope = None if self.slope is None else self.slope[index]
        return replace(self, slope=slope, sets=(self.sets[0][index], self.sets[1][index]))


def pair_products(pairs: Pairs, q: Float[Tensor, "batch heads n d"]) -> PairProducts:
    """Return the products of every head on every batch row."""
    shape, terms, sets = q.shape[:2], [], []
    for term in (pairs.with_q, None if pairs.with_k is None else pairs.with_k.transpose(2, 3)):
        # The number of each problem's term: rows and heads may share one.
        sizes = torch.Size((1, 1)) if term is None else term.shape[:2]
        number = torch.arange(sizes.numel(), device=q.device).view(sizes)
        sets.append(number.expand(shape).flatten())
        terms.append(None if term is None else term.flatten(0, 1))
    slope = None if pairs.slope is None else pairs.slope.expand(*shape, -1, -1).flatten(0, 1)
    return PairProducts(slope, terms[0], terms[1], (sets[0], sets[1]))


def _times_sets(rows: Tensor, vectors: Tensor, sets: Tensor) -> Tensor:
    """Return rows_i X_i, (problems, tokens, c), where each set of problems has its own X_i.

    One product for each set and token, without copying X.
    """
    used = sorted(set(sets.tolist()))
    parts = [(sets == i).nonzero()[:, 0] for i in used]
    some = [rows] if len(used) == 1 else [rows[part] for part in parts]
    each = [
        (x.transpose(0, 1) @ vectors[i]).transpose(0, 1) for x, i in zip(some, used, strict=True)
    ]
    return each[0] if len(used) == 1 else torch.cat(each)[torch.cat(parts).argsort()]


EVERY = slice(None)


class MapRows(NamedTuple):
    """Some rows of P, (problems, queries, keys); it is zero on the other keys."""

    p: Tensor
    queries: slice
    keys: slice


@dataclass(frozen=True)
class Maps:
    """The maps P of many problems; a problem is one head on one batch row.

    Attributes:
        heads: the heads of the maps.
        kept: P of each problem; None if a sample's maps exceed the limit: each use then computes
            them again, in chunks of rows.
    """

    heads: Heads
    kept: Tensor | None

    def __iter__(self) -> Iterator[MapRows]:
        """Yield all rows."""
        if self.kept is not None:
            yield MapRows(self.kept, EVERY, EVERY)
            return
        for start, stop in self.heads.row_blocks():
            p, keys = rows_in_reach(self.heads, start, stop)
            yield MapRows(p.flatten(0, 1), slice(start, stop), keys)

    def left(self, rows: Tensor) -> Tensor:
        """Return R P, (problems, r, m), for R of (problems, r, n)."""
        if self.kept is not None:
            return rows @ self.kept
        total = rows.new_zeros(*rows.shape[:2], self.heads.k.shape[2])
        for p, queries, keys in self:
            total[..., keys] += rows[..., queries] @ p
        return total

    def right(self, rows: Tensor) -> Tensor:
        """Return R P^T, (problems, r, n), for R of (problems, r, m)."""
        if self.kept is not None:
            return rows @ self.kept.mT
        return torch.cat([rows[..., keys] @ p.mT for p, _, keys in self], 2)

    def select(self, index: Tensor | slice) -> Maps:
        """Return the maps of some problems; maps that are not kept can only return all."""
        assert self.kept is not None
        return Maps(self.heads, self.kept[index])


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


def join_rows(blocks: Sequence[Anchored]) -> Anchored:
    """Return the outputs of several blocks of queries as one."""
    if len(blocks) == 1:
        return blocks[0]
    return Anchored(*(torch.cat(rows, -2) for rows in zip(*blocks, strict=True)))


@dataclass(frozen=True)
class Attend:
    """The derivative of O = P V with respect to q, k, v; tensors (problems, tokens, channels)."""

    maps: Maps
    q: Tensor  # times s
    k: Tensor  # times s
    v: Tensor  # less their mean, without a sink
    o: Tensor  # of these values
    key: Tensor  # a, the key with the largest P_ia, (problems, n, 1)
    c: Tensor  # c_ia
    pairs: PairProducts | None = None

    def pull(self, u: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Return cotangents of the named rows for the cotangent u of O."""
        # sum_j P_ij <u_i, v_j> = <u_i, o_i>: the softmax needs no sum over the keys.
        inner = (u * self.o).sum(-1, keepdim=True)
        if self.maps.kept is not None:
            return self._pull_rows(next(iter(self.maps)), u, inner, names)
        total = {name: torch.zeros_like(getattr(self, name)) for name in names}
        for block in self.maps:
            for name, rows in self._pull_rows(block, u, inner, names).items():
                total[name][:, block.queries if name == "q" else block.keys] += rows
        return total

    def _pull_rows(
        self, block: MapRows, u: Tensor, inner: Tensor, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Add the contribution of some rows of P to the cotangents."""
        p, i, j = block
        u, key = u[:, i], self._key(block)
        ds = (u @ self.v[:, j].mT).sub_(inner[:, i]).mul_(p)
        ds.scatter_(-1, key, (u * self.c[:, i]).sum(-1, keepdim=True))
        plain = ds if self.pairs is None else self.pairs.scale_logits(ds)
        rules = {
            "q": lambda: plain @ self.k[:, j],
            "k": lambda: plain.mT @ self.q[:, i],
            "v": lambda: p.mT @ u,
        }
        rows = {name: rules[name]() for name in names}
        if self.pairs is not None:
            more = self.pairs.pull(ds).items()
            rows |= {name: rows[name] + r for name, r in more if name in rows}
        return rows

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return the tangent of O for tangents of the named rows; other rows are constant."""
        rows = [self._push_rows(block, tangents) for block in self.maps]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def _push_rows(self, block: MapRows, tangents: dict[str, Tensor]) -> Tensor:
        p, i, j = block
        pairs = [(tangents["q"][:, i], self.k[:, j])] if "q" in tangents else []
        pairs += [(self.q[:, i], tangents["k"][:, j])] if "k" in tangents else []
        o = self.o[:, i]
        out = p @ tangents["v"][:, j] if "v" in tangents else torch.zeros_like(o)
        if not pairs:
            return out
        (left, right), *others = pairs
        dp = left @ right.mT
        for left, right in others:
            dp.baddbmm_(left, right.mT)
        if self.pairs is not None:
            dp = self.pairs.push(dp, tangents)
        key = self._key(block)
        largest = dp.gather(-1, key)
        dp.mul_(p).scatter_(-1, key, 0.0)
        # dO = P dV + sum_j P_ij dS_ij (v_j - o_i), with c_ia apart and the others by row sums.
        out.baddbmm_(dp, self.v[:, j])
        out.addcmul_(dp.sum(-1, keepdim=True), o, value=-1)
        return out.addcmul_(largest, self.c[:, i])

    def _key(self, block: MapRows) -> Tensor:
        """Return the column of each row's largest entry in a block."""
        return self.key[:, block.queries] - (block.keys.start or 0)

    def select(self, index: Tensor | slice) -> Attend:
        """Return the derivative for some problems."""
        names = ("q", "k", "v", "o", "key", "c")
        rows = {name: getattr(self, name)[index] for name in names}
        pairs = None if self.pairs is None else self.pairs.select(index)
        return Attend(self.maps.select(index), pairs=pairs, **rows)


def derivative(heads: Heads) -> Attend:
    """Linearise O = P V for every head on every batch row.

    Logits that are not plain take as much memory as P, so such heads keep P at any length.
    """
    short = len(heads.row_blocks()) == 1 or heads.pairs is not None
    p = heads.attention().flatten(0, 1) if short else None
    maps, scale = Maps(heads, p), heads.scale[..., None, None]
    q, k, v = (t.flatten(0, 1) for t in (scale * heads.q, scale * heads.k, heads.v))
    sink = heads.sink_share()
    if sink is None:  # else P_i sums to less than 1, and o_i would change by less than v_j
        first = next(iter(maps))
        v = v - mean_value(first.p, v[:, first.keys])
    blocks = []
    for block in maps:
        share = None if sink is None else sink.flatten(0, 1)[:, block.queries]
        rows = anchor_outputs(block.p, v[:, block.keys], share)
        blocks.append(rows._replace(key=rows.key + (block.keys.start or 0)))
    rows = join_rows(blocks)
    pairs = None if heads.pairs is None else pair_products(heads.pairs, heads.q)
    return Attend(maps, q, k, v, rows.o, rows.key, rows.c, pairs)


_DEAD = 1e-30  # heads with smaller gradients are zero: float32 ends at 1e-38


@dataclass(frozen=True)
class _InputSide:
    """The projections that read one input, side by side: W = [W_Q W_K W_V] or a part of it."""

    source: str  # x | x_kv
    local: dict[str, Tensor | None]  # G of each, (problems or 1, tokens, d, e)
    widths: list[int]  # e of each
    weight: Tensor  # W, (heads, D, sum of e)

    def pull(self, rows: dict[str, Tensor]) -> Tensor:
        """Return cotangents of x W, side by side."""
        parts = [
            rows[name] if g is None else torch.einsum("pnd,pnde->pne", rows[name], g)
            for name, g in self.local.items()
        ]
        return torch.cat(parts, -1)

    def push(self, y: Tensor) -> dict[str, Tensor]:
        """Return tangents of the rows from those of x W."""
        parts = zip(self.local.items(), torch.split(y, self.widths, -1), strict=True)
        return {
            name: part if g is None else torch.einsum("pne,pnde->pnd", part, g)
            for (name, g), part in parts
        }

    def select(self, index: Tensor | slice) -> _InputSide:
        local = {n: g if g is None or len(g) == 1 else g[index] for n, g in self.local.items()}
        return replace(self, local=local)


@dataclass(frozen=True)
class HeadProducts:
    """J J^T u of single heads; a problem is one head on one batch row."""

    attend: Attend
    sides: list[_InputSide]
    grams: list[Tensor]  # W^T W of each side, (problems, e, e)

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every problem, (problems, n dv)."""
        # J = J_qkv (I kron W^T): J J^T u = J_qkv (I kron W^T W) J_qkv^T u, an e x e Gram per head.
        images = []
        for part, pulled in self._pull_parts(u):
            tangents: dict[str, Tensor] = {}
            for side, y, gram in zip(part.sides, pulled, part.grams, strict=True):
                tangents |= side.push(y @ gram)
            images.append(part.attend.push(tangents).flatten(1))
        return images[0] if len(images) == 1 else torch.cat(images)

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every problem, (J_qkv^T u)^T (I kron W^T W) (J_qkv^T u)."""
        norms = []
        for part, pulled in self._pull_parts(u):
            pairs = zip(pulled, part.grams, strict=True)
            squares = [(y * (y @ gram)).sum((1, 2)) for y, gram in pairs]
            norms.append(torch.stack(squares).sum(0).sqrt())
        return torch.cat(norms)

    def _pull_parts(self, u: Tensor) -> Iterator[tuple[HeadProducts, list[Tensor]]]:
        """Yield J_qkv^T u by sides, for a few problems at a time that fit a core's cache."""
        parts = self._parts or [self]
        for part, some in zip(parts, torch.split(u, len(parts[0].attend.q)), strict=True):
            rows = part.attend.pull(some.view_as(part.attend.o), _names(part.sides))
            yield part, [side.pull(rows) for side in part.sides]

    def select(self, index: Tensor) -> HeadProducts:
        """Return the products of these problems alone."""
        if len(index) == len(self.attend.q):
            return self
        return self._some(index.to(self.attend.q.device))

    def _some(self, index: Tensor | slice) -> HeadProducts:
        sides = [side.select(index) for side in self.sides]
        grams = [gram[index] for gram in self.grams]
        return HeadProducts(self.attend.select(index), sides, grams)

    @cached_property
    def _parts(self) -> list[HeadProducts]:
        attend, (count, n, d) = self.attend, self.attend.q.shape
        cache = attend.maps.heads.policy.cache_entries
        whole = attend.maps.kept is None or attend.pairs is not None
        if whole or attend.q.device.type != "cpu":
            return []
        parts = cut(count, 2 * n * attend.k.shape[1] + 12 * n * d, cache)
        # A list that holds the object would keep it alive.
        return [self._some(part) for part in parts] if len(parts) > 1 else []


@dataclass(frozen=True)
class LayerProducts:
    """J J^T u of all heads together; a problem is one batch row, u is (tokens, heads, d_v)."""

    attend: Attend
    sides: list[_InputSide]
    weights: list[Tensor]  # W of each side, the heads side by side: (D, heads e)
    heads: int

    def __call__(self, u: Tensor) -> Tensor:
        """Return J J^T u of every problem, (rows, n heads dv)."""
        n, dv = self.attend.o.shape[1:]
        split = u.view(-1, n, self.heads, dv).transpose(1, 2)
        return self.push(self.pull(split)).transpose(1, 2).flatten(1)

    def pull(self, u: Tensor) -> list[Tensor]:
        """J^T u for the input of each side, (rows, tokens, D); u is (rows, heads, tokens, d_v)."""
        rows = self.attend.pull(u.flatten(0, 1), _names(self.sides))
        return [
            self._split(side.pull(rows)).transpose(1, 2).flatten(2) @ weight.mT
            for side, weight in zip(self.sides, self.weights, strict=True)
        ]

    def pull_scaled(
        self, u: Tensor, size: Tensor, sketches: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return R^T J^T u of each input, with u scaled such that ||R^T J^T u|| = size.

        In each head and row; the factors, (rows, heads), come first. R, of each input, is a few
        directions of its channels: no head is pulled back to all.
        """
        rows = self.attend.pull(u.flatten(0, 1), _names(self.sides))
        each = {
            side.source: self._split(side.pull(rows)) @ (side.weight.mT @ sketches[side.source])
            for side in self.sides
        }
        squares = torch.stack([z.square().sum((2, 3)) for z in each.values()]).sum(0)
        factor = size / squares.sqrt().clamp_min(_DEAD)
        return factor, {name: torch.einsum("bhnr,bh->bnr", z, factor) for name, z in each.items()}

    def push(self, inputs: list[Tensor]) -> Tensor:
        """Return J x for a tangent x of each input: the adjoint of `pull`."""
        tangents: dict[str, Tensor] = {}
        for side, weight, x in zip(self.sides, self.weights, inputs, strict=True):
            y = (x @ weight).view(*x.shape[:2], self.heads, -1)
            tangents |= side.push(y.transpose(1, 2).flatten(0, 1))
        return self._split(self.attend.push(tangents))

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T u|| of every problem, u as in a call."""
        n, dv = self.attend.o.shape[1:]
        inputs = self.pull(u.view(-1, n, self.heads, dv).transpose(1, 2))
        return torch.stack([x.square().sum((1, 2)) for x in inputs]).sum(0).sqrt()

    def select(self, rows: Tensor) -> LayerProducts:
        """Return the products of these batch rows alone."""
        if len(rows) * self.heads == len(self.attend.q):
            return self
        index = (rows[:, None] * self.heads + torch.arange(self.heads)).flatten()
        index = index.to(self.attend.q.device)
        sides = [side.select(index) for side in self.sides]
        return replace(self, attend=self.attend.select(index), sides=sides)

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.heads, *rows.shape[1:])


@dataclass(frozen=True)
class OutputProducts:
    """A layer's output: sum_h O_h W_O,h, or its heads side by side."""

    layer: LayerProducts
    weight: Tensor | None  # W_O, (heads, d_v, D_out); None for heads side by side

    @property
    def channels(self) -> int:
        """Return the number of channels of one token's output."""
        if self.weight is None:
            return self.layer.heads * self.layer.attend.v.shape[2]
        return self.weight.shape[2]

    @property
    def sizes(self) -> Tensor:
        """Return ||W_O||_F^2 of each head, (heads,); 1 for heads side by side."""
        if self.weight is None:
            return self.layer.attend.v.new_ones(self.layer.heads)
        return self.weight.square().sum((1, 2))

    def __call__(self, u: Tensor) -> Tensor:
        """Return W_O^T A W_O u token by token, for A on the heads side by side."""
        after = self.layer(self._pull_output(u))
        if self.weight is None:
            return after
        flat = self.weight.flatten(0, 1)
        return (after.view(len(u), -1, len(flat)) @ flat).flatten(1)

    def pulled_norm(self, u: Tensor) -> Tensor:
        """Return ||J^T W_O u|| of every problem."""
        return self.layer.pulled_norm(self._pull_output(u))

    def image(self, t: Tensor, tokens: Tensor) -> Tensor:
        """Return sum_h a_h kron W_O,h^T t_h: t is (rows, heads, d_v), a (rows, heads, n)."""
        if self.weight is None:
            return (tokens.mT[..., None] * t[:, None]).flatten(1)
        return (tokens.mT @ torch.einsum("bhd,hdo->bho", t, self.weight)).flatten(1)

    def pull_image(self, t: Tensor, inner: Tensor) -> Tensor:
        """Return the part of that image that returns to each t, given all <a_h, a_g>."""
        if self.weight is None:
            return inner.diagonal(0, 1, 2)[..., None] * t
        after = inner @ torch.einsum("bhd,hdo->bho", t, self.weight)
        return torch.einsum("bho,hdo->bhd", after, self.weight)

    def select(self, rows: Tensor) -> OutputProducts:
        """Return the products of these batch rows alone."""
        return replace(self, layer=self.layer.select(rows))

    def _pull_output(self, u: Tensor) -> Tensor:
        if self.weight is None:
            return u
        return (u.view(len(u), -1, self.channels) @ self.weight.flatten(0, 1).mT).flatten(1)


def head_products(heads: Heads) -> HeadProducts:
    """Linearise every head of a layer separately."""
    sides, batch = _sides(heads), len(heads.q)
    grams = [(side.weight.mT @ side.weight).repeat(batch, 1, 1) for side in sides]
    return HeadProducts(derivative(heads), sides, grams)


def layer_products(heads: Heads) -> LayerProducts:
    """Linearise a layer with all heads together."""
    sides = _sides(heads)
    weights = [side.weight.transpose(0, 1).flatten(1) for side in sides]
    return LayerProducts(derivative(heads), sides, weights, heads.q.shape[1])


def value_weight(products: HeadProducts | LayerProducts) -> Tensor | None:
    """Return W_V, (heads, D, d_v); None if v is constant or not an affine map of its token."""
    side, channels = products.sides[-1], products.attend.v.shape[2]
    affine = "v" in side.local and side.local["v"] is None
    return side.weight[..., -channels:] if affine else None


def _names(sides: list[_InputSide]) -> list[str]:
    return [name for side in sides for name in side.local]


def _sides(heads: Heads) -> list[_InputSide]:
    projections = {"q": heads.to_q, "k": heads.to_k, "v": heads.to_v}
    groups = {"x": ("q", "k", "v")} if heads.x_kv is None else {"x": ("q",), "x_kv": ("k", "v")}
    sides = []
    for source, names in groups.items():
        used = {name: m for name in names if (m := projections[name]) is not None}
        weights = [projection.weight for projection in used.values()]
        local: dict[str, Tensor | None] = {}
        for name, projection in used.items():
            g = projection.local
            if g is not None:  # one G for all problems, or one each
                shared = g.shape[:2] == (1, 1)
                g = g[0] if shared else g.expand(*heads.q.shape[:2], -1, -1, -1).flatten(0, 1)
            local[name] = g
        if used:
            widths = [weight.shape[2] for weight in weights]
            sides.append(_InputSide(source, local, widths, torch.cat(weights, 2)))
    return sides


_TOKEN_STEPS = 4  # power steps: the first singular value of a map is well separated
_CHANNEL_STEPS = 12  # Lanczos steps: singular values of weights are close together


def head_guess(products: HeadProducts) -> Tensor:
    """Return the leading left vector of P kron W_V^T of every problem, (problems, n dv), or 0."""
    attend, weight = products.attend, value_weight(products)
    if weight is None:
        return torch.zeros_like(attend.o).flatten(1)
    # The norm and left vector of a Kronecker product are those of its factors.
    tokens = _token_images(attend, attend.v.new_ones(1))
    values, vectors = torch.linalg.eigh(weight.mT @ weight)
    channels = values[:, -1:].clamp_min(0.0).sqrt() * vectors[..., -1]
    return (tokens.mT * channels.repeat(len(tokens) // len(channels), 1)[:, None]).flatten(1)


def layer_guess(family: OutputProducts) -> Tensor:
    """Return the image under all values of the b kron y that they stretch most, per row, or 0."""
    layer, weight = family.layer, value_weight(family.layer)
    heads, (count, n, dv) = layer.heads, layer.attend.o.shape
    if weight is None:
        return layer.attend.o.new_zeros(count // heads, n * family.channels)
    tokens = _token_images(layer.attend, family.sizes).view(-1, heads, n)
    flat, inner = weight.transpose(0, 1).flatten(1), tokens @ tokens.mT

    def select(index: Tensor) -> Products:
        some = inner[index.to(inner.device)]
        return lambda y: (
            family.pull_image((y @ flat).view(-1, heads, dv), some).flatten(1) @ flat.mT
        )

    start = random_starts([0], len(flat)).to(flat).expand(len(inner), -1)
    few = partial(spectral_norms, tol=1e-3, max_steps=_CHANNEL_STEPS, within=math.inf)
    y = few(select, start, vectors=True).vector
    assert y is not None
    return family.image((y @ flat).view(-1, heads, dv), tokens)


def _token_images(attend: Attend, sizes: Tensor) -> Tensor:
    """P b of every problem, (problems, 1, n), for one b a row, shared by as many heads as sizes.

    Power steps on sum_h size_h P_h^T P_h are enough for a guess.
    """
    heads = len(sizes)
    rows = attend.v.new_ones(len(attend.q), 1, attend.q.shape[1])
    for _ in range(_TOKEN_STEPS):
        back = attend.maps.left(rows).view(-1, heads, attend.k.shape[1])
        b = normalize((sizes[:, None] * back).sum(1, keepdim=True), dim=-1)
        rows = attend.maps.right(b.repeat_interleave(heads, 0))
    return rows


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
    # Phi^q, Phi^k, Phi^v, each (#batch, heads, tokens, d, D); zero for a constant.
    phi = []
    source = heads.x if heads.x_kv is None else heads.x_kv
    for to, y, x in (
        (heads.to_q, heads.q, heads.x),
        (heads.to_k, heads.k, source),
        (heads.to_v, heads.v, source),
    ):
        if to is None:
            phi.append(y.new_zeros(*y.shape, x.shape[2]))
        elif to.local is None:
            phi.append(to.weight.mT[None, :, None].expand(1, -1, y.shape[2], -1, -1))
        else:
            phi.append(to.local @ to.weight.mT[:, None])
    over_keys = torch.einsum("bhij,bhjax->bhiajx", p, phi[2])
    u = torch.einsum("bhjid,bhjdx->bhijx", query_gradients(heads, slice(None)), phi[1])
    over_keys += torch.einsum("bhija,bhijx->bhiajx", c, u)
    t = torch.einsum("bhija,bhijd->bhiad", c, key_gradients(heads, slice(None)))
    diagonal = torch.einsum("bhiad,bhidx->bhaxi", t, phi[0])
    over_queries = torch.diag_embed(diagonal).permute(0, 1, 4, 2, 5, 3)
    if heads.x_kv is None:
        return (over_keys + over_queries).flatten(4).flatten(2, 3)
    return torch.cat([over_queries.flatten(4), over_keys.flatten(4)], 4).flatten(2, 3)


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
    factor, pulled = layer_products(heads).pull_scaled(u, size, sketches)
    return u * factor[..., None, None], pulled
