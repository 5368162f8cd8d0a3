"""Derivatives of logits that are more than s <q_i, k_j> plus a constant, pair by pair.

dS_ij = <a_ij, dq_i> + <b_ij, dk_j> with a_ij = f_ij s k_j + r_ij and b_ij = f_ij s q_i + t_ij (see
`Pairs`). The softmax only asks for dS: every formula of the theory holds with a_ij in place of
s k_j and b_ij in place of s q_i, except where it moves all keys by a constant. With a slope that
changes a_ij by more than a constant of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.theory.heads import Heads


def key_gradients(heads: Heads, queries: slice) -> Float[Tensor, "batch heads rows m d"]:
    """Return a_ij = dS_ij / dq_i of some queries i and all keys j."""
    s = heads.scale[..., None, None, None]
    slope, extra = _terms(heads, "with_q")
    a = s * heads.k[:, :, None]
    a = a if slope is None else slope[:, :, queries, :, None] * a
    if extra is not None:
        return a + extra[:, :, queries]
    return a.expand(-1, -1, len(range(heads.q.shape[2])[queries]), -1, -1)


def query_gradients(heads: Heads, keys: slice) -> Float[Tensor, "batch heads columns n d"]:
    """Return b_ij = dS_ij / dk_j of some keys j and all queries i, by key."""
    s = heads.scale[..., None, None, None]
    slope, extra = _terms(heads, "with_k")
    b = s * heads.q[:, :, None]
    b = b if slope is None else slope[..., keys].mT[..., None] * b
    if extra is not None:
        return b + extra[:, :, :, keys].transpose(2, 3)
    return b.expand(-1, -1, len(range(heads.k.shape[2])[keys]), -1, -1)


def largest_gradients(heads: Heads) -> tuple[Float[Tensor, "batch heads"], ...]:
    """Return limits of ||b_ij|| and ||a_ij||, the gradients in keys and in queries."""
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
        with_q: the different r, by query, or None.
        with_k: the different t, by key, or None.
        sets: which r and t each problem has.
    """

    slope: Float[Tensor, "problems n m"] | None
    with_q: Float[Tensor, "#sets n m d"] | None
    with_k: Float[Tensor, "#sets m n d"] | None
    sets: tuple[Int[Tensor, " problems"], Int[Tensor, " problems"]]

    def scaled(self, ds: Tensor) -> Tensor:
        """Return f_ij ds_ij."""
        return ds if self.slope is None else ds * self.slope

    def pull(self, ds: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return sum_j ds_ij r_ij and sum_i ds_ij t_ij, (problems, tokens, d); None for 0."""
        return (
            _each(self.with_q, self.sets[0], ds, _summed),
            _each(self.with_k, self.sets[1], ds.mT, _summed),
        )

    def push(self, dq: Tensor | None, dk: Tensor | None) -> list[Tensor]:
        """Return <r_ij, dq_i> and <t_ij, dk_j>, (problems, n, m), where they are not 0."""
        r = None if dq is None else _each(self.with_q, self.sets[0], dq, _images)
        t = None if dk is None else _each(self.with_k, self.sets[1], dk, _images)
        return ([] if r is None else [r]) + ([] if t is None else [t.mT])

    def select(self, index: Tensor | slice) -> PairProducts:
        """Return those of some problems."""
        slope = None if self.slope is None else self.slope[index]
        return replace(self, slope=slope, sets=(self.sets[0][index], self.sets[1][index]))


def pair_products(heads: Heads) -> PairProducts | None:
    """Return the products of every head on every batch row; None for plain logits."""
    pairs, shape = heads.pairs, heads.q.shape[:2]
    if pairs is None:
        return None
    slope = pairs.slope
    if slope is not None:
        slope = slope.expand(*shape, -1, -1).flatten(0, 1)
    r, t = pairs.with_q, pairs.with_k
    sets = _sets(r, shape, heads.q.device), _sets(t, shape, heads.q.device)
    with_k = None if t is None else t.transpose(2, 3).flatten(0, 1)
    return PairProducts(slope, None if r is None else r.flatten(0, 1), with_k, sets)


def _sets(term: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """Number the pairs (row, head) of a term, and expand the numbers as the term would be."""
    own = torch.Size((1, 1)) if term is None else term.shape[:2]
    number = torch.arange(own.numel(), device=device).view(own)
    return number.expand(shape).flatten()


def _summed(ds: Tensor, vectors: Tensor) -> Tensor:
    """sum_j ds_ij x_ij of several problems with the same vectors: one product per token i."""
    return (ds.transpose(0, 1) @ vectors).transpose(0, 1)


def _images(tangents: Tensor, vectors: Tensor) -> Tensor:
    """<x_ij, y_i> of several problems with the same vectors."""
    return (tangents.transpose(0, 1) @ vectors.mT).transpose(0, 1)


def _each(
    vectors: Tensor | None, sets: Tensor, rows: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor | None:
    """Apply a product to the problems of each set at once: no vectors are copied."""
    if vectors is None:
        return None
    used = sorted(set(sets.tolist()))
    if len(used) == 1:
        return product(rows, vectors[used[0]])
    parts = [(sets == i).nonzero()[:, 0] for i in used]
    products = [product(rows[part], vectors[i]) for part, i in zip(parts, used, strict=True)]
    return torch.cat(products)[torch.cat(parts).argsort()]
