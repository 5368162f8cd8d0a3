"""The derivative of O = P V with respect to the rows q, k and v, and to each logit.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.theory.heads import Heads, Pairs, rows_in_reach


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
