"""The derivative of attention O = P V with respect to what enters the projections.

A cotangent u of O is pulled back to the rows q, k, v, from there through each token-wise
projection; tangents are pushed the other way.

The logits have dS_ij = <a_ij, dq_i> + <b_ij, dk_j> with a_ij = f_ij s k_j + r_ij and
b_ij = f_ij s q_i + t_ij (see `Pairs`). The softmax depends on S only: every formula of the theory
holds with a_ij in place of s k_j and b_ij in place of s q_i, except where all keys are shifted by
a constant. With a slope, such a shift changes a_ij by more than a constant of the row.

With c_ij = P_ij (v_j - o_i), dO_i = sum_j P_ij dv_j + sum_j dS_ij c_ij. If P_i is nearly one-hot
at key a, v_a - o_i cancels, and its rounding error is multiplied by gradients of logits of any
size. So c_ia is computed from the other keys: see `anchor_outputs`. Where all v_j nearly agree,
every v_j - o_i cancels: so the values stand less their mean, see `mean_value`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from lipaudit.theory.heads import Heads, Pairs, rows_in_reach

if TYPE_CHECKING:
    from jaxtyping import Float


def logit_gradients(
    heads: Heads, name: Literal["q", "k"], chunk: slice
) -> Float[Tensor, "batch heads chunk partners d"]:
    """Return the gradients of the logits S_ij in some queries q_i, or in some keys k_j.

    For logits s <q_i, k_j> they are s k_j and s q_i, s the scale.

    Args:
        heads: the heads of one layer.
        name: q for a_ij = dS_ij / dq_i, by query and key; k for b_ij = dS_ij / dk_j, by key and
            query.
        chunk: which queries (keys).
    """
    # In general a_ij = f_ij s k_j + r_ij and b_ij = f_ij s q_i + t_ij: f is the slope of a soft
    # cap, r and t come from relative positions. `Pairs` holds them.
    pairs = heads.pairs or Pairs()
    slope = pairs.slope  # f
    if name == "q":
        tokens = heads.q
        partners = heads.k
        added = pairs.with_q  # r
    else:
        tokens = heads.k
        partners = heads.q
        added = pairs.with_k  # t
        # f and t are stored by query and key: here the keys come first.
        if added is not None:
            added = added.transpose(2, 3)
        if slope is not None:
            slope = slope.mT
    scale = heads.scale[..., None, None, None]
    gradients = scale * partners[:, :, None]  # (batch, heads, 1, partners, d)
    if slope is not None:
        gradients = slope[:, :, chunk, :, None] * gradients
    if added is not None:
        gradients = gradients + added[:, :, chunk]
    # Plain logits s q k^T have the same gradients for all tokens of the chunk: one copy serves.
    count = len(range(tokens.shape[2])[chunk])
    return gradients.expand(-1, -1, count, -1, -1)


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
    """Return z, the mean of the values v_j, weighted by the column sums of the attention map P.

    Callers replace v_j by v_j - z. The differences v_j - o_i from the outputs o_i = sum_j P_ij v_j
    then stay the same if rows of P sum to 1 (no sink). Their rounding errors are relative to the
    length of the values. Centred values are about as long as the distances between values, so the
    rounding errors become smaller.

    Args:
        p: P, or some of its rows, for another weighted mean.
        v: values.

    >>> v = torch.full((1, 3, 2), 1e6, dtype=torch.float64)
    >>> v[0, 0] - mean_value(torch.full((1, 3, 3), 1 / 3, dtype=torch.float64), v)[0, 0]
    tensor([0., 0.], dtype=torch.float64)
    """
    weights = p.sum(-2, keepdim=True)
    total = weights.sum(-1, keepdim=True)
    total = total.clamp_min(torch.finfo(p.dtype).tiny)
    return (weights / total) @ v


def anchor_outputs(p: Tensor, v: Tensor, sink: Tensor | None) -> Anchored:
    """Return the outputs o_i = sum_j P_ij v_j, and c_ia = P_ia (v_a - o_i) for a single key a.

    a, the anchor of query i, is the key with the largest entry of row P_i. If P_i is nearly
    one-hot, o_i is close to v_a, and a plain v_a - o_i would have few correct digits. Without
    cancellation the difference is (1 - P_ia) v_a - sum_{j != a} P_ij v_j, where 1 - P_ia is the
    sum of all other entries.

    Args:
        p: P, (..., n, m).
        v: values, (..., m, d_v).
        sink: the probability that each query gives to a sink, (..., n, 1), or None.
    """
    largest, key = p.max(-1, keepdim=True)  # P_ia and a, (..., n, 1)
    others = p.scatter(-1, key, 0.0)  # P_ij of the keys j != a
    images = others @ v
    share = others.sum(-1, keepdim=True)  # 1 - P_ia
    if sink is not None:
        share = share + sink
    index = key.expand(*key.shape[:-1], v.shape[-1])  # a, for every channel
    value = v.gather(-2, index)  # v_a, (..., n, d_v)
    gap = share * value - images  # v_a - o_i
    o = images.addcmul_(largest, value)  # o_i = sum_{j != a} P_ij v_j + P_ia v_a
    return Anchored(o=o, key=key, gap=gap, c=largest * gap, share=share)


def weighted_differences(
    p: Float[Tensor, "batch heads n m"],
    v: Float[Tensor, "batch heads m dv"],
    rows: Anchored,
    queries: slice = slice(None),
) -> Float[Tensor, "batch heads queries m dv"]:
    """Return c_ij = P_ij (v_j - o_i) of some queries i and all keys j.

    `rows` has the outputs o_i. For the key with the largest P_ij of each query, it also has c_ij
    computed without cancellation.
    """
    c = v[:, :, None] - rows.o[:, :, queries, None]  # (batch, heads, queries, m, dv)
    c = p[:, :, queries, :, None] * c
    # At this key, replace all channels by the accurate ones.
    key = rows.key[:, :, queries, :, None]
    key = key.expand(-1, -1, -1, -1, v.shape[-1])
    return c.scatter_(3, key, rows.c[:, :, queries, None])


class MapRows(NamedTuple):
    """Some rows of P: those of a chunk of queries, on all keys that they can see.

    Attributes:
        p: P of these queries and keys; P is 0 on the other keys.
        queries: which queries.
        keys: which keys.
    """

    p: Tensor
    queries: slice
    keys: slice

    @property
    def first_key(self) -> int:
        """Return the index of the first of these keys among all keys."""
        return self.keys.start or 0


def anchor_blocks(blocks: Iterable[MapRows], v: Tensor, sink: Tensor | None) -> Anchored:
    """Return what `anchor_outputs` returns, for all queries, from blocks of rows of P.

    Args:
        blocks: all rows of P, in order; each block may have only the keys that it can see.
        v: values, (..., m, d_v).
        sink: the probability that each query gives to a sink, (..., n, 1), or None.

    Returns:
        Of every query i: the output o_i = (P V)_i; its anchor, the key a with the largest P_ia
        (`key`); v_a - o_i (`gap`), P_ia (v_a - o_i) (`c`) and 1 - P_ia (`share`), computed
        without cancellation.
    """
    parts = []
    for block in blocks:
        sink_rows = None
        if sink is not None:
            sink_rows = sink[..., block.queries, :]
        rows = anchor_outputs(block.p, v[..., block.keys, :], sink_rows)
        # Keys of the block are counted from its first key: count them from the first of all.
        parts.append(rows._replace(key=rows.key + block.first_key))
    # One tensor for each field of `Anchored`, joined along the queries.
    return Anchored._make(torch.cat(tensors, -2) for tensors in zip(*parts, strict=True))


class ProjectionGroup(NamedTuple):
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


def map_rows(heads: Heads, p: Tensor | None) -> Iterator[MapRows]:
    """Yield all rows of the attention map P, some queries at a time, (problems, queries, keys).

    Args:
        heads: the heads; a problem is one head on one batch row.
        p: the stored P, yielded as one block. None if P is too large to be stored: its rows are
            then computed here, block by block.
    """
    if p is not None:
        yield MapRows(p, queries=slice(None), keys=slice(None))
        return
    for start, stop in heads.row_blocks():
        rows, keys = rows_in_reach(heads, start, stop)
        yield MapRows(rows.flatten(0, 1), queries=slice(start, stop), keys=keys)


class PairTerms(NamedTuple):
    """The terms r_ij by query, or t_ij by key, of the gradients of logits (see `Pairs`).

    Attributes:
        vectors: the distinct sets of terms, (sets, tokens, partners, d).
        sets: index of the set of each problem: batch rows and heads may share one.
    """

    vectors: Tensor
    sets: Tensor


@dataclass(frozen=True)
class Attend:
    """The derivative of O = P V with respect to x W of every input.

    A problem is one head on one batch row; tensors are (problems, tokens, channels).

    Attributes:
        heads: the heads of the problems.
        p: P; None if a sample's maps exceed the limit. Each use then computes rows again.
        q, k: queries and keys times s.
        v, o: values (without a sink: less their mean) and their outputs.
        key, c: a, the key with the largest P_ia, (problems, n, 1), and c_ia.
        slope: f of the logits, (problems, n, m), or None.
        extra: r by query (`q`) and t by key (`k`), where the logits have them.
        local: G of the projections that are not affine, (problems or 1, tokens, d, e).
        groups: the projections, one group for each input.
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
    extra: dict[str, PairTerms]
    local: dict[str, Tensor]
    groups: list[ProjectionGroup]

    def pull(self, u: Tensor) -> list[Tensor]:
        """Backpropagate a gradient u in O = P V: return the gradients in x W of every input x.

        x W is [q k v] before rotary position or qk-norm. With two inputs, x W is q for the first
        and [k v] for the second. Constant queries, keys or values are left out.
        """
        # The gradients in q, k and v by name; a constant has none.
        total = {}
        for group in self.groups:
            for name in group.names:
                total[name] = torch.zeros_like(getattr(self, name))
        for block in map_rows(self.heads, self.p):
            # A block of P: `queries` and `keys` are the slices of its rows and columns.
            u_rows = u[:, block.queries]
            ds = self._pull_softmax(u_rows, block)  # the gradient in the logits
            self._pull_logits(ds, block, total)
            if "v" in total:  # sum_i P_ij u_i, for query i and key j
                total["v"][:, block.keys].baddbmm_(block.p.mT, u_rows)
        # Back through the Jacobian G of a rotary position or qk-norm at each token.
        for name, g in self.local.items():
            total[name] = torch.einsum("pnd,pnde->pne", total[name], g)
        pulled = []
        for group in self.groups:
            by_name = [total[name] for name in group.names]
            pulled.append(torch.cat(by_name, -1))
        return pulled

    def _pull_softmax(self, u: Tensor, block: MapRows) -> Tensor:
        """Return the gradient in the logits S of a block, (problems, queries, keys).

        It is sum_c u_ic dO_ic / dS_ij = P_ij (<u_i, v_j> - <u_i, o_i>) for o_i = sum_j P_ij v_j.
        At the key a with the largest P_ia it is <u_i, c_ia>: c_ia = P_ia (v_a - o_i) is stored,
        computed without cancellation.

        Args:
            u: gradients in the outputs of the queries of the block.
            block: some rows of P.
        """
        p, queries, keys = block
        inner = (u * self.o[:, queries]).sum(-1, keepdim=True)
        ds = u @ self.v[:, keys].mT
        ds.sub_(inner).mul_(p)
        ds_anchor = (u * self.c[:, queries]).sum(-1, keepdim=True)
        return ds.scatter_(-1, self._find_anchors(block), ds_anchor)

    def _pull_logits(self, ds: Tensor, block: MapRows, total: dict[str, Tensor]) -> None:
        """Add to `total` the gradients in q and k, given the gradient ds in the logits of a block.

        For query i and key j, the gradient of the logit is f_ij s k_j + r_ij in q_i, and
        f_ij s q_i + t_ij in k_j. s is the scale of the logits. f is the slope of a soft cap (1
        without a cap). r and t come from relative positions (0 without them).

        Args:
            ds: gradients in the logits, (problems, queries, keys).
            block: the queries and keys.
            total: gradients so far, by the names q and k; a constant has none.
        """
        _, queries, keys = block
        # `self.q` and `self.k` are q and k times s. `self.slope` is f, `extra` has r and t. The
        # slices `rows` of the totals are views: gradients are added in place.
        scaled = ds  # ds_ij f_ij
        if self.slope is not None:
            scaled = ds * self.slope
        if "q" in total:  # sum_j ds_ij (f_ij s k_j + r_ij)
            rows = total["q"][:, queries]
            rows.baddbmm_(scaled, self.k[:, keys])
            if "q" in self.extra:
                rows += _multiply_by_terms(ds, self.extra["q"])
        if "k" in total:  # sum_i ds_ij (f_ij s q_i + t_ij)
            rows = total["k"][:, keys]
            rows.baddbmm_(scaled.mT, self.q[:, queries])
            if "k" in self.extra:
                rows += _multiply_by_terms(ds.mT, self.extra["k"])

    def push(self, changes: list[Tensor]) -> Tensor:
        """Return the change dO of O = P V for changes of x W of every input x (forward mode).

        x W is [q k v] before rotary position or qk-norm. With two inputs, x W is q for the first
        and [k v] for the second. Constant queries, keys or values are left out.

        Args:
            changes: for each input, the change of its x W, (problems, tokens, width of W).
        """
        tangents: dict[str, Tensor] = {}  # dq, dk and dv by name
        for group, change in zip(self.groups, changes, strict=True):
            parts = torch.split(change, group.widths, -1)
            tangents |= zip(group.names, parts, strict=True)
        # Through the Jacobian G of a rotary position or qk-norm at each token.
        for name, g in self.local.items():
            tangents[name] = torch.einsum("pne,pnde->pnd", tangents[name], g)
        # For query i and key j, with the change dS of the logits and c_ij = P_ij (v_j - o_i):
        #     dO_i = sum_j P_ij dv_j + sum_j dS_ij c_ij.
        outputs = []
        for block in map_rows(self.heads, self.p):
            p, queries, keys = block
            # The first sum.
            if "v" in tangents:
                out = p @ tangents["v"][:, keys]
            else:
                out = torch.zeros_like(self.o[:, queries])
            # The second sum is added to `out`, in place.
            ds = self._push_logits(tangents, queries, keys)
            if ds is not None:
                self._push_softmax(ds, block, out)
            outputs.append(out)
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs, 1)

    def _push_softmax(self, ds: Tensor, block: MapRows, out: Tensor) -> None:
        """Add sum_j dS_ij c_ij to the rows dO_i of `out`, for a change dS of logits of a block.

        c_ij = P_ij (v_j - o_i). Let a be the key with the largest P_ia. With dp_ij = P_ij dS_ij,
        the keys j != a add sum_j dp_ij v_j - (sum_j dp_ij) o_i. Key a adds dS_ia c_ia: c_ia is
        stored, computed without cancellation.

        Args:
            ds: dS, (problems, queries, keys); it is overwritten.
            block: some rows of P.
            out: the rows dO_i of the queries of the block.
        """
        p, queries, keys = block
        anchors = self._find_anchors(block)  # a of each query
        ds_anchor = ds.gather(-1, anchors)
        dp = ds.mul_(p).scatter_(-1, anchors, 0.0)
        total = dp.sum(-1, keepdim=True)
        out.baddbmm_(dp, self.v[:, keys])
        out.addcmul_(total, self.o[:, queries], value=-1)
        out.addcmul_(ds_anchor, self.c[:, queries])

    def _find_anchors(self, block: MapRows) -> Tensor:
        """Return the key with the largest P_ia of each query, counted from the block's first."""
        return self.key[:, block.queries] - block.first_key

    def _push_logits(
        self, tangents: dict[str, Tensor], queries: slice, keys: slice
    ) -> Tensor | None:
        """Return the change dS of the logits of some queries and keys, given dq and dk by name.

        None if q and k do not depend on the tokens.
        """
        # For query i and key j
        #     dS_ij = f_ij (<s k_j, dq_i> + <s q_i, dk_j>) + <r_ij, dq_i> + <t_ij, dk_j>.
        # `self.k` and `self.q` include the scale s, `slope` is f of a soft cap, `extra` has r and
        # t of relative positions.
        ds = None
        if "q" in tangents:
            dq = tangents["q"][:, queries]
            ds = dq @ self.k[:, keys].mT  # (problems, queries, keys)
        if "k" in tangents:
            q = self.q[:, queries]
            dk = tangents["k"][:, keys].mT
            if ds is None:
                ds = q @ dk
            else:
                ds.baddbmm_(q, dk)
        if ds is None:
            return None
        if self.slope is not None:
            ds = ds * self.slope
        # Heads with `extra` have P in one block, so the slices contain all queries and keys, as
        # the terms r and t do.
        for name, terms in self.extra.items():
            if name in tangents:
                # `terms.vectors` is (sets, queries, keys, d) with the vectors r_ij, or
                # (sets, keys, queries, d) with t_ij. Row i of `added` is dq_i times the d x keys
                # matrix with the columns r_ij: the numbers <r_ij, dq_i>.
                columns = terms._replace(vectors=terms.vectors.mT)
                added = _multiply_by_terms(tangents[name], columns)
                if name == "k":  # <t_ij, dk_j>, by key and query
                    added = added.mT
                ds = ds + added
        return ds

    @property
    def value_weight(self) -> Tensor | None:
        """Return W_V, (heads, D, d_v); None if v is constant or not an affine map of its token."""
        # `local` has the Jacobian of what follows W_V, such as a norm: v is then not affine.
        if not self.groups or "v" in self.local:
            return None
        group = self.groups[-1]  # the input of the keys and values; W_V is the last part of its W
        if "v" not in group.names:  # v is constant: no group has a projection to it
            return None
        return group.weight[..., -self.v.shape[2] :]

    def select(self, index: Tensor | slice) -> Attend:
        """Return the derivative for some problems, each one head on one batch row.

        The solver drops problems that have converged, so that products cost less.
        """
        # A layer whose P is too large to be stored has been split into parts with one norm each.
        # Such a part is solved as a whole, and nothing is selected from it.
        assert self.p is not None
        changes = {}
        for name in ("p", "q", "k", "v", "o", "key", "c", "slope"):
            of_problems = getattr(self, name)
            if of_problems is not None:
                changes[name] = of_problems[index]
        extra = {}
        for name, terms in self.extra.items():
            extra[name] = terms._replace(sets=terms.sets[index])
        local = {}
        for name, g in self.local.items():
            local[name] = g if len(g) == 1 else g[index]  # length 1: all problems share this G
        return replace(self, extra=extra, local=local, **changes)


def _multiply_by_terms(rows: Tensor, terms: PairTerms) -> Tensor:
    """Return the products rows_i R_i of every problem and token i, (problems, tokens, c).

    A problem is one head on one batch row. Heads often share their matrices R_i: a set is the R_i
    of all tokens, stored once for all problems that share it.

    Args:
        rows: one vector per problem and token, (problems, tokens, r).
        terms: the sets `vectors`, (sets, tokens, r, c), and `sets`, the set of each problem.
    """
    images = rows.new_empty(*rows.shape[:2], terms.vectors.shape[-1])
    # All problems of a set at once, so that R_i is not copied for every problem.
    for index in set(terms.sets.tolist()):
        problems = (terms.sets == index).nonzero()[:, 0]
        # Tokens come first in the product: (tokens, problems, r) @ (tokens, r, c).
        products = rows[problems].transpose(0, 1) @ terms.vectors[index]
        images[problems] = products.transpose(0, 1)
    return images


def linearize_attention(heads: Heads) -> Attend:
    """Return the derivative of O = P V for every head on every batch row.

    P is stored if it fits into memory; otherwise its rows are computed whenever they are needed.
    """
    # If the heads hold gradients of logits for each pair of tokens (`pairs`), these take as much
    # memory as P. P is then stored too, whatever its size.
    p = None
    if heads.fits_memory or heads.pairs is not None:
        p = heads.attention().flatten(0, 1)
    scale = heads.scale[..., None, None]
    v = heads.v.flatten(0, 1)
    sink = heads.sink_share()
    if sink is None:
        # Rows of P sum to 1, so v_j - o_i stays the same if the values are centred, and the
        # rounding error becomes smaller. Any weighted mean of the values serves. The first block
        # of P gives the weights. With a sink (a constant logit beside those of the keys) the rows
        # sum to less than 1, so v is not centred.
        block = next(map_rows(heads, p))
        v = v - mean_value(block.p, v[:, block.keys])
    else:
        sink = sink.flatten(0, 1)
    # The outputs o_i; and of each query the key a with the largest P_ia (`key`), and
    # c_ia = P_ia (v_a - o_i) for this key, without cancellation.
    rows = anchor_blocks(map_rows(heads, p), v, sink)
    slope, extra = _flatten_pairs(heads)
    return Attend(
        heads=heads,
        p=p,
        q=(scale * heads.q).flatten(0, 1),
        k=(scale * heads.k).flatten(0, 1),
        v=v,
        o=rows.o,
        key=rows.key,
        c=rows.c,
        slope=slope,
        extra=extra,
        local=_flatten_local_maps(heads),
        groups=_join_projections(heads),
    )


def _flatten_pairs(heads: Heads) -> tuple[Tensor | None, dict[str, PairTerms]]:
    """Return the fields `slope` and `extra` of `Attend`, for logits other than s q k^T (`Pairs`).

    For query i and key j, the gradient of the logit is f_ij s k_j + r_ij in q_i, and
    f_ij s q_i + t_ij in k_j. `slope` is f, (problems, n, m), or None where it is 1. `extra` has r
    by the name q and t by the name k, without those that are 0.

    A problem is one head on one batch row. Batch rows or heads may share their r (or t): the n x m
    vectors of a head are a set, each set is stored once, and every problem has the index of its
    set.
    """
    shape = heads.q.shape[:2]
    pairs = heads.pairs or Pairs()
    slope = pairs.slope
    if slope is not None:
        slope = slope.expand(*shape, -1, -1).flatten(0, 1)
    terms = {}
    if pairs.with_q is not None:
        terms["q"] = pairs.with_q
    if pairs.with_k is not None:
        # (batch, heads, queries, keys, d): keys come first, as gradients in k are sums by key.
        terms["k"] = pairs.with_k.transpose(2, 3)
    extra = {}
    for name, term in terms.items():
        vectors = term.flatten(0, 1)  # (sets, tokens, partners, d)
        # Number the sets, then expand the numbers to all problems: along an axis of `term` with
        # length 1, all batch rows (or heads) share a set. If 2 batch rows share the terms of 3
        # heads, the problems have the sets 0, 1, 2, 0, 1, 2.
        index = torch.arange(len(vectors), device=term.device)
        index = index.view(term.shape[:2]).expand(shape)
        extra[name] = PairTerms(vectors, index.flatten())
    return slope, extra


def _flatten_local_maps(heads: Heads) -> dict[str, Tensor]:
    """Return the field `local` of `Attend`: the Jacobian G of a rotary position or qk-norm.

    The dictionary has G under the names q, k and v; an affine projection has no entry. G is
    stored for each problem (a head on a batch row), or once if all problems share it.
    """
    local = {}
    readers = {"q": heads.to_q, "k": heads.to_k, "v": heads.to_v}
    for name, projection in readers.items():
        if projection is None or projection.local is None:
            continue
        g = projection.local  # (#batch, #heads, tokens, d, e)
        if g.shape[:2] == (1, 1):
            local[name] = g[0]
        else:
            g = g.expand(*heads.q.shape[:2], -1, -1, -1)
            local[name] = g.flatten(0, 1)
    return local


def _join_projections(heads: Heads) -> list[ProjectionGroup]:
    """Return for each input the weights of its projections side by side, as [W_Q W_K W_V].

    q, k or v that does not depend on the tokens has no projection and is left out.
    """
    keys_and_values = {"k": heads.to_k, "v": heads.to_v}
    groups = {"x": {"q": heads.to_q}}
    if heads.x_kv is None:
        groups["x"] |= keys_and_values
    else:
        groups["x_kv"] = keys_and_values
    joined_groups = []
    for source, readers in groups.items():
        weights = {name: to.weight for name, to in readers.items() if to is not None}
        if weights:
            widths = [weight.shape[2] for weight in weights.values()]
            joined = torch.cat([*weights.values()], 2)
            group = ProjectionGroup(source, names=[*weights], widths=widths, weight=joined)
            joined_groups.append(group)
    return joined_groups
