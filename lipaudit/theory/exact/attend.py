"""The derivative of O = P V in the rows q, k and v, with P kept or met again block by block.

With c_ij = P_ij (v_j - o_i), dO_i = sum_j P_ij dv_j + sum_j dS_ij c_ij. Where P_i is nearly
one-hot at key a, v_a - o_i cancels, and its rounding error meets gradients of the logits of any
size. So c_ia is computed from the other keys: see `anchored`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.exact.pairs import PairProducts, pair_products
from lipaudit.theory.heads import Heads
from lipaudit.theory.reach import rows_in_reach

EVERY = slice(None)


class Block(NamedTuple):
    """Some rows of P, (problems, queries, keys); it is zero on the other keys."""

    p: Tensor
    queries: slice
    keys: slice


@dataclass(frozen=True)
class Maps:
    """The maps P of many problems; a problem is one head on one batch row.

    Attributes:
        heads: whose maps these are.
        kept: P of each problem; None where a sample has more of it than is kept: then each
            reading computes it again, some rows at a time.
    """

    heads: Heads
    kept: Tensor | None

    def __iter__(self) -> Iterator[Block]:
        """Yield all rows."""
        if self.kept is not None:
            yield Block(self.kept, EVERY, EVERY)
            return
        for start, stop in self.heads.row_blocks():
            p, keys = rows_in_reach(self.heads, start, stop)
            yield Block(p.flatten(0, 1), slice(start, stop), keys)

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
        """Return those of some problems; of maps that are not kept only all."""
        assert self.kept is not None
        return Maps(self.heads, self.kept[index])


class Anchored(NamedTuple):
    """The outputs of some queries, and what their largest entry of P contributes to a change.

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


def anchored(p: Tensor, v: Tensor, sink: Tensor | None = None) -> Anchored:
    """Return o_i and c_ia, the latter to nearly all digits however close to one-hot P_i is.

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


def joined_rows(blocks: Sequence[Anchored]) -> Anchored:
    """Return those of some blocks of queries as one."""
    if len(blocks) == 1:
        return blocks[0]
    return Anchored(*(torch.cat(rows, -2) for rows in zip(*blocks, strict=True)))


def deviations(heads: Heads) -> Float[Tensor, "batch heads n m dv"]:
    """Return c_ij = P_ij (v_j - o_i) of all pairs: for small cases."""
    p, v = heads.attention(), heads.v
    rows = anchored(p, v, heads.sink_share())
    c = p[..., None] * (v[:, :, None] - rows.o[:, :, :, None])
    index = rows.key[..., None].expand(*rows.key.shape, v.shape[-1])
    return c.scatter(3, index, rows.c[:, :, :, None])


@dataclass(frozen=True)
class Attend:
    """Derivative of O = P V in the rows q, k, v; all tensors (problems, tokens, channels)."""

    maps: Maps
    q: Tensor  # times s
    k: Tensor  # times s
    v: Tensor
    o: Tensor
    key: Tensor  # a, the key with the largest P_ia, (problems, n, 1)
    c: Tensor  # c_ia
    pairs: PairProducts | None = None

    def pull(self, u: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Cotangents of the named rows under the cotangent u of O."""
        # sum_j P_ij <u_i, v_j> = <u_i, o_i>: the softmax needs no sum over the keys.
        inner = (u * self.o).sum(-1, keepdim=True)
        if self.maps.kept is not None:
            return self._pulled(next(iter(self.maps)), u, inner, names)
        total = {name: torch.zeros_like(getattr(self, name)) for name in names}
        for block in self.maps:
            for name, rows in self._pulled(block, u, inner, names).items():
                total[name][:, block.queries if name == "q" else block.keys] += rows
        return total

    def _pulled(
        self, block: Block, u: Tensor, inner: Tensor, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """What some rows of P add to the cotangents, where they do."""
        p, i, j = block
        u, key = u[:, i], self._key(block)
        ds = (u @ self.v[:, j].mT).sub_(inner[:, i]).mul_(p)
        ds.scatter_(-1, key, (u * self.c[:, i]).sum(-1, keepdim=True))
        plain = ds if self.pairs is None else self.pairs.scaled(ds)
        rules = {
            "q": lambda: plain @ self.k[:, j],
            "k": lambda: plain.mT @ self.q[:, i],
            "v": lambda: p.mT @ u,
        }
        rows = {name: rules[name]() for name in names}
        if self.pairs is not None:
            more = zip("qk", self.pairs.pull(ds), strict=True)
            rows |= {name: rows[name] + r for name, r in more if r is not None and name in rows}
        return rows

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Tangent of O under tangents of the rows; rows that are not named stand still."""
        return _joined([self._pushed(block, tangents) for block in self.maps])

    def _pushed(self, block: Block, tangents: dict[str, Tensor]) -> Tensor:
        """The tangent of some rows of O."""
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
            more = self.pairs.push(tangents.get("q"), tangents.get("k"))
            dp = sum(more, start=self.pairs.scaled(dp))
        key = self._key(block)
        largest = dp.gather(-1, key)
        dp.mul_(p).scatter_(-1, key, 0.0)
        # dO = P dV + sum_j P_ij dS_ij (v_j - o_i), with c_ia apart and the others by row sums.
        out.baddbmm_(dp, self.v[:, j])
        out.addcmul_(dp.sum(-1, keepdim=True), o, value=-1)
        return out.addcmul_(largest, self.c[:, i])

    def _key(self, block: Block) -> Tensor:
        """Return the column of each row's largest entry in a block."""
        return self.key[:, block.queries] - (block.keys.start or 0)

    def select(self, index: Tensor | slice) -> Attend:
        """Return that of some problems."""
        names = ("q", "k", "v", "o", "key", "c")
        rows = {name: getattr(self, name)[index] for name in names}
        pairs = None if self.pairs is None else self.pairs.select(index)
        return Attend(self.maps.select(index), pairs=pairs, **rows)


def derivative(heads: Heads) -> Attend:
    """Linearise O = P V of every head on every batch row.

    Logits that are not plain are themselves as large as P: of such heads P is kept at any length.
    """
    short = len(heads.row_blocks()) == 1 or heads.pairs is not None
    p = heads.attention().flatten(0, 1) if short else None
    maps, scale = Maps(heads, p), heads.scale[..., None, None]
    q, k, v = (t.flatten(0, 1) for t in (scale * heads.q, scale * heads.k, heads.v))
    sink = heads.sink_share()
    sink = None if sink is None else sink.flatten(0, 1)
    rows = joined_rows([_anchored_block(block, v, sink) for block in maps])
    return Attend(maps, q, k, v, rows.o, rows.key, rows.c, pair_products(heads))


def _anchored_block(block: Block, v: Tensor, sink: Tensor | None) -> Anchored:
    sink = None if sink is None else sink[:, block.queries]
    rows = anchored(block.p, v[:, block.keys], sink)
    return rows._replace(key=rows.key + (block.keys.start or 0))


def _joined(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)
