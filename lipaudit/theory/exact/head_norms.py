"""The exact Jacobian of attention heads at a point, and its spectral norms.

With c_ij = P_ij (v_j - o_i) and T_i = sum_j c_ij k_j^T, block (i, j) of dO / dX (d_v x D) is

    J_ij = P_ij Phi^v_j + s c_ij (q_i^T Phi^k_j) + delta_ij s T_i Phi^q_i

(Yudin et al., arXiv 2507.07814, eq. 12, for any token-wise projections). Where the logits are any
S_ij(q_i, k_j) with dS_ij = <a_ij, dq_i> + <b_ij, dk_j>, b_ij stands for s q_i and a_ij for s k_j.
A sink has dS = 0 and the value 0: it drops out, with P its part on the keys. Only
`dense_jacobian` forms J.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.exact.attend import anchor_outputs, key_gradients, mean_value, query_gradients
from lipaudit.theory.exact.products import (
    OutputProducts,
    head_guess,
    head_products,
    layer_guess,
    layer_products,
)
from lipaudit.theory.heads import Heads
from lipaudit.theory.policy import LAYER_WITHIN, TOL, WITHIN
from lipaudit.theory.scale import scale_values, unit_matrices, unit_values
from lipaudit.theory.spectral.lanczos import (
    Norms,
    Solve,
    norms_in_double,
    random_starts,
    spectral_norms,
)

_SCREEN = 6  # products after which most heads are known to gain nothing from splitting tokens


@dataclass(frozen=True)
class LayerNorms:
    """Exact Jacobian norms of all heads of a layer together, one per batch row.

    Attributes:
        concat: norms of the heads side by side; None if not requested.
        out: norms of sum_h O_h W_O,h; None if the layer's output does not have this form.
    """

    concat: Norms | None
    out: Norms | None


def head_norms(
    heads: Heads,
    *,
    seeds: Sequence[int],
    tol: float = TOL,
    max_steps: int = 300,
    within: float = WITHIN,
) -> Norms:
    """Return ||J|| of every head at every batch row, shape (batch, heads).

    J is with respect to X, or to (X_q, X_kv) together if the heads read two inputs. Domain: at X;
    any constant mask or position bias, any token-wise projections.

    Args:
        heads: the heads of one layer.
        seeds: one per sample; start vectors, and so results, depend on nothing else.
        tol: relative accuracy of the norms, estimated.
        max_steps: largest number of steps per head; after it `converged` is False.
        within: proven relative error: how far `upper` may be above a norm.

    Raises:
        EvaluationError: a product is not finite.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2)[None]
    >>> head_norms(affine_heads(x, eye, eye, 2 * eye), seeds=[0]).norm.round(decimals=4)
    tensor([[2.]], dtype=torch.float64)
    """
    solve = partial(spectral_norms, tol=tol, max_steps=max_steps, within=within)
    parts = [_head_norms(some, seeds, solve) for some in _kept_together(heads)]
    return _join_norms(parts, heads.q.shape[:2])


def _head_norms(heads: Heads, seeds: Sequence[int], solve: Solve) -> Norms:
    """Solve all problems at once; a problem is one head on one batch row."""
    unit, size = unit_values(heads)
    batch, count = heads.q.shape[:2]
    start = _starts(heads, seeds, heads.v.shape[3]).repeat_interleave(count, 0)
    products = head_products(unit)
    guess = head_guess(products)
    # The rescaled values are computed in float64, as for the bounds.
    families = products.select, lambda: head_products(unit_values(heads.to(torch.float64))[0])
    return norms_in_double(solve, families, start, guess).times(size.repeat(batch))


def _join_norms(parts: Sequence[Norms], shape: tuple[int, ...]) -> Norms:
    """Return the norms of the problems of several groups."""
    names = ("norm", "upper", "products", "converged")
    return Norms(*(torch.cat([getattr(p, name) for p in parts]).view(shape) for name in names))


def _kept_together(heads: Heads) -> list[Heads]:
    """Split a layer with longer maps than are kept into single problems."""
    if len(heads.row_blocks()) == 1:
        return [heads]
    rows = (heads.row(b) for b in range(heads.q.shape[0]))
    return [row.pick(slice(h, h + 1)) for row in rows for h in range(heads.q.shape[1])]


def layer_norms(
    heads: Heads,
    *,
    seeds: Sequence[int],
    tol: float = TOL,
    max_steps: int = 300,
    within: float = LAYER_WITHIN,
    concat: bool = True,
) -> LayerNorms:
    """Return the norms of all heads together, one per batch row; arguments as `head_norms`.

    Without `concat`, the norm before W_O is left out if there is one after it.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2).expand(2, 2, 2)
    >>> layer_norms(affine_heads(x, eye, eye, eye), seeds=[0]).concat.norm
    tensor([1.4142], dtype=torch.float64)
    """
    solve = partial(spectral_norms, tol=tol, max_steps=max_steps, within=within)
    together = len(heads.row_blocks()) == 1
    parts = [heads] if together else [heads.row(b) for b in range(heads.q.shape[0])]
    side_by_side = concat or heads.out is None
    each = [_layer_norms(some, seeds, solve, concat=side_by_side) for some in parts]
    before = [norms.concat for norms in each if norms.concat is not None]
    after = [norms.out for norms in each if norms.out is not None]
    rows = (len(heads.q),)
    return LayerNorms(*(_join_norms(norms, rows) if norms else None for norms in (before, after)))


def _layer_norms(heads: Heads, seeds: Sequence[int], solve: Solve, *, concat: bool) -> LayerNorms:
    """Solve all batch rows at once."""
    unit, size = unit_values(heads)

    def norms(gains: Tensor, weight: Tensor | None) -> Norms:
        """Return the norms of the heads with a gain each, side by side or behind W_O."""

        def family(part: Heads) -> OutputProducts:
            wo = None if weight is None else weight.to(part.v)
            return OutputProducts(layer_products(scale_values(part, gains)), wo)

        single = family(unit)
        start = _starts(heads, seeds, single.channels)
        families = single.select, lambda: family(unit_values(heads.to(torch.float64))[0])
        return norms_in_double(solve, families, start, layer_guess(single))

    before = after = None
    if concat:
        # All values have size about one: scale each head back, relative to the largest.
        before = norms(size / size.amax(), None).times(size.amax())
    if heads.out is not None:
        wo, length = unit_matrices(heads.out.double() * size.to(heads.out.device)[:, None, None])
        after = norms(torch.ones_like(size), wo).times(length)
    return LayerNorms(concat=before, out=after)


def splitting_gain(
    heads: Heads,
    exact: Float[Tensor, "batch heads"],
    *,
    seeds: Sequence[int],
    tol: float = 1e-3,
) -> Float[Tensor, "batch heads"]:
    """Return how much duplicating every token raises ||J||; NaN if it did not converge.

    With every token repeated m >= 2 times, ||J|| becomes max(||J||, max_i s ||T_i Phi^q_i||) for
    every m (closed form of mass splitting, Castin et al., arXiv 2312.14820). Domain: at X,
    attention that is not causal and has no sink, whose share would fall; the copies share the
    token's position.

    Args:
        heads: the heads of one layer.
        exact: ||J||, from `head_norms`.
        seeds: one per sample.
        tol: relative accuracy of the second norm.

    Raises:
        ValueError: the attention is causal: copies of a token do not see the same keys; or it
            has a sink.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), torch.eye(2)[None]
    >>> heads = affine_heads(x, eye, eye, eye)
    >>> splitting_gain(heads, head_norms(heads, seeds=[0]).norm, seeds=[0])
    tensor([[1.]], dtype=torch.float64)
    """
    if heads.is_causal() or heads.sink is not None:
        raise ValueError("splitting_gain needs attention without a causal mask or a sink")
    if heads.x_kv is not None:
        return torch.ones_like(exact)  # J J^T is the blocks' R R^T plus the part of X_kv
    heads, size = unit_values(heads)
    exact = exact / size
    # Directions in which all copies of a token move alike give ||J||. Those that sum to 0 over the
    # copies change no key's or value's total: what is left of row i is s T_i Phi^q_i.
    parts = _kept_together(heads)
    limits = exact.flatten().chunk(len(parts))
    blocks = [_largest_block(*each, seeds, tol) for each in zip(parts, limits, strict=True)]
    largest = torch.cat(blocks).view_as(exact)
    return torch.where(largest <= exact, 1.0, largest / exact)


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


def _largest_block(heads: Heads, exact: Tensor, seeds: Sequence[int], tol: float) -> Tensor:
    """Return max_i s ||T_i Phi^q_i|| of every problem; a lower bound if it is below `exact`.

    With constant keys and values J is block diagonal, and these are its blocks.
    """
    products = head_products(heads.with_same_map(to_k=None, to_v=None))
    start = _starts(heads, seeds, heads.v.shape[3]).repeat_interleave(heads.q.shape[1], 0)
    first = spectral_norms(products.select, start, tol=tol, max_steps=_SCREEN)
    # A limit below ||J|| ends it: the gain is then 1, for any value of the block norm.
    left = (~first.converged & (first.upper > exact)).nonzero()[:, 0]
    if not len(left):
        return first.norm
    more = spectral_norms(lambda index: products.select(left[index]), start[left], tol=tol)
    return first.norm.index_put((left,), torch.where(more.converged, more.norm, torch.nan))


def _starts(heads: Heads, seeds: Sequence[int], channels: int) -> Tensor:
    """Return one start per batch row, (batch, n channels), zero at padded queries."""
    n = heads.q.shape[2]
    start = random_starts(seeds, n * channels).to(heads.q)[heads.sample]
    if heads.valid is None:
        return start
    return (start.view(-1, n, channels) * heads.valid[..., None]).flatten(1)
