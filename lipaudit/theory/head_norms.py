"""The spectral norms of attention heads and layers at a point, and how far rounding moves them.

With c_ij = P_ij (v_j - o_i) and T_i = sum_j c_ij k_j^T, block (i, j) of dO / dX (d_v x D) is

    J_ij = P_ij Phi^v_j + s c_ij (q_i^T Phi^k_j) + delta_ij s T_i Phi^q_i

(Yudin et al., arXiv 2507.07814, eq. 12, for any token-wise projections). Where the logits are any
S_ij(q_i, k_j) with dS_ij = <a_ij, dq_i> + <b_ij, dk_j>, b_ij stands for s q_i and a_ij for s k_j.
A sink has dS = 0 and the value 0: it drops out, with P its part on the keys. Only
`products.dense_jacobian` forms J.

For any u, ||J^T u|| / ||u|| <= ||J||, with equality at the leading vector, near which it is flat:
an error of e in u costs e^2. So one product in double precision with the vector of an iteration in
single gives the norm to nearly the digits of double, and never above it: no proven bound can lie
below. Where the two precisions do not agree, the logits are too large for single precision to tell
P, and the whole iteration is made again.

Rounding. A norm and its bounds are computed from the same q, k, v and P, in float64. Rounding in
the forward pass changes both alike (`forward_error`), so it cannot explain a bound below its norm.
Only `bound_error` can: the rounding of the products with J, and of bounds.

J is a sum of three parts: J^T u has the cotangents sum_i P_ij u_i of v_j, sum_i <u_i, c_ij> s q_i
of k_j and sum_j <u_i, c_ij> s k_j of q_i, each sent on through the Jacobian Phi of its token. Let
gamma bound the relative error of a sum of as many terms as all sums of one product have together.
In exact arithmetic, with ||W||_F for ||Phi||, the parts are

    T(c) = ||P|| ||W_V||_F + max_i s ||q_i|| (sum_ij ||c_ij||^2)^1/2 ||W_K||_F
           + max_j s ||k_j|| max_i sum_j ||c_ij|| ||W_Q||_F

at most in norm; sums of products are off by gamma times that. c_ij itself is off by gamma times
d_ij = 2 P_ij max ||v||, for v_j - o_i may cancel, and in the largest entry of a row, at key a, by
gamma times 2 (1 - P_ia) max ||v||: see `anchor_outputs`. Without a sink, v stands less its mean
under P here and in the norms (`mean_value`). So J^T u is off by at most

    E = gamma (T(c) + T(d)) ||u||,

and ||J^T u||^2, computed with the Gram matrices W^T W, by gamma (T(c) + E)^2 more. A norm is too
large by at most E + (E^2 + gamma (T(c) + E)^2) / (2 ||J||). Bounds are raised by their own
rounding (`head_bounds`), but not by the error E of the blocks of J that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from lipaudit.theory import LAYER_WITHIN, attend, products
from lipaudit.theory.heads import Heads, Pairs, local_map, projections, unit_values
from lipaudit.theory.spectral import Norms, divide_by_powers, random_starts, spectral_norms

if TYPE_CHECKING:
    from lipaudit.theory.heads import PerHead

SINGLE_ERROR = 1e-5
"""Relative error of a norm in single precision, if it resolves P; measured: at most 3e-6."""
_PLAIN = "donot_use_mm_for_euclid_dist"
"""Products would cost distances half of their digits."""


@dataclass(frozen=True)
class LayerNorms:
    """Exact Jacobian norms of all heads of a layer together, one per batch row.

    Attributes:
        concat: norms of the heads side by side; None if not requested.
        out: norms of sum_h O_h W_O,h; None if the layer's output does not have this form.
    """

    concat: Norms | None
    out: Norms | None


def head_norms(heads: Heads, *, seeds: Sequence[int], **accuracy: Any) -> Norms:
    """Return ||J|| of every head at every batch row, shape (batch, heads).

    J is with respect to X, or to (X_q, X_kv) together if the heads read two inputs. Domain: at X;
    any constant mask or position bias, any token-wise projections.

    Args:
        heads: the heads of one layer.
        seeds: one per sample. The start vectors of a sample depend on its seed alone, so the
            results do not depend on the batch.
        accuracy: `tol`, `max_steps` and `within` of `spectral_norms`.

    Raises:
        EvaluationError: a product is not finite.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2)[None]
    >>> head_norms(affine_heads(x, eye, eye, 2 * eye), seeds=[0]).norm.round(decimals=4)
    tensor([[2.]], dtype=torch.float64)
    """
    parts = []
    for group in _split_problems(heads):
        # J is proportional to the values: solve for values of size one, multiply by their size.
        unit, size = unit_values(group)
        norms = _compute_norms(group, unit, products.head_products, seeds, accuracy)
        parts.append(norms.times(size.repeat(len(group.q))))
    shape = heads.q.shape[:2]
    return Norms.join(parts, lambda tensors: torch.cat(tensors).view(shape))


def layer_norms(
    heads: Heads, *, seeds: Sequence[int], concat: bool = True, **accuracy: Any
) -> LayerNorms:
    """Return the norms of all heads together, one per batch row; arguments as `head_norms`.

    `concat` is the norm of the Jacobian of the heads side by side, before W_O. `out` is the norm
    of the Jacobian of sum_h O_h W_O,h; None if the layer has no W_O. With concat=False, the norm
    before W_O is computed only if there is no W_O. The proven relative error `within` is
    `LAYER_WITHIN` by default.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2).expand(2, 2, 2)
    >>> layer_norms(affine_heads(x, eye, eye, eye), seeds=[0]).concat.norm
    tensor([1.4142], dtype=torch.float64)
    """
    accuracy = {"within": LAYER_WITHIN} | accuracy
    before = []
    after = []
    for group in _split_rows(heads):
        # J is proportional to the values. Solve for values of size one, with each head's output
        # multiplied by its size: `size` has one number per head.
        unit, size = unit_values(group)
        if concat or heads.out is None:  # heads side by side: each output times its gain
            largest = size.amax()
            linearize = partial(products.layer_products, out=None, gains=size / largest)
            norms = _compute_norms(group, unit, linearize, seeds, accuracy)
            before.append(norms.times(float(largest)))
        if heads.out is not None:  # after W_O: the size of a head is a factor of its W_O
            sizes = size.to(heads.out.device)
            out = heads.out.double() * sizes[:, None, None]
            out, exponent = divide_by_powers(out)  # W_O of size one, times 2^exponent
            # The sizes are in W_O: of these gains `layer_products` reads only how many there are.
            linearize = partial(products.layer_products, out=out, gains=size)
            norms = _compute_norms(group, unit, linearize, seeds, accuracy)
            after.append(norms.times(2.0 ** int(exponent)))
    return LayerNorms(
        concat=Norms.join(before, torch.cat) if before else None,
        out=Norms.join(after, torch.cat) if after else None,
    )


def _split_rows(heads: Heads) -> list[Heads]:
    """Split a layer into parts that are solved one after another, each with all heads together.

    The only part is the whole layer if its attention maps P fit into memory. Otherwise every batch
    row is a part.
    """
    if heads.fits_memory:
        return [heads]
    return [heads.row(b) for b in range(len(heads.q))]


def _split_problems(heads: Heads) -> list[Heads]:
    """Split a layer into parts that are solved one after another, for norms of single heads.

    The only part is the whole layer if its attention maps P fit into memory: one product then
    serves all heads and batch rows. Otherwise every head on every batch row is a part, and the
    rows of P are computed in chunks.
    """
    if heads.fits_memory:
        return [heads]
    problems: list[Heads] = []
    for row in _split_rows(heads):
        problems += [row.pick(slice(h, h + 1)) for h in range(heads.q.shape[1])]
    return problems


def _compute_norms(
    heads: Heads,
    unit: Heads,
    linearize: Callable[[Heads], products.HeadProducts | products.LayerProducts],
    seeds: Sequence[int],
    accuracy: Mapping[str, Any],
) -> Norms:
    """Return the Jacobian norms of `unit` by the Lanczos iteration of `spectral_norms`.

    No norm is above the true one, apart from rounding in float64. After an iteration in single
    precision, the norm is computed again in double from the last vector. If the two norms
    disagree, the whole iteration is repeated in double.

    Args:
        heads: the heads, in the precision of the iteration.
        unit: the same with values of size one.
        linearize: returns the products with J J^T of heads like `unit`, one problem per head and
            batch row, or per batch row for all heads together.
        seeds: one per sample.
        accuracy: `tol`, `max_steps` and `within` of `spectral_norms`.
    """
    # 1. The iteration, in the precision of the heads.
    problems = linearize(unit)
    # A vector for each problem, near the leading left singular vector of J if P hardly changes.
    guess = problems.guess()
    start = _draw_starts(heads, seeds, like=guess)
    norms = spectral_norms(problems.select, start, guess=guess, vectors=True, **accuracy)
    if start.dtype == torch.float64:
        return replace(norms, vector=None)
    # 2. The norm ||J^T u|| / ||u|| in double, with the leading vector u of the iteration. Errors
    # of single precision in u cannot raise this norm, and hardly lower it: no u gives more than
    # ||J||, and at an angle e from the true vector ||J^T u||^2 >= (1 - e^2) ||J||^2.
    # Values of size one in float64 are computed as for the bounds: both then use the same numbers.
    double, _ = unit_values(heads.to(torch.float64))
    problems = linearize(double)
    assert norms.vector is not None
    vector = norms.vector.double()
    length = vector_norm(vector, dim=1).clamp_min(1e-300)
    norm = (problems.pulled_norm(vector) / length).cpu()
    # 3. The whole iteration in double, for problems whose two norms differ by more than
    # SINGLE_ERROR. With large logits, P and the leading vector differ between the precisions.
    difference = (norms.norm - norm).abs()
    again = (difference > SINGLE_ERROR * norm).nonzero()[:, 0]  # indices of problems
    upper = torch.maximum(norms.upper, norm)
    norms = replace(norms, norm=norm, upper=upper, vector=None)
    if len(again):
        rows = again.to(start.device)
        start = start[rows].double()
        guess = guess[rows].double()
        # `problems.select(again)` has the products of these problems only, of which
        # `spectral_norms` selects in turn those that have not converged.
        repeats = spectral_norms(problems.select(again).select, start, guess=guess, **accuracy)
        norms.norm[again] = repeats.norm
        norms.upper[again] = repeats.upper
        norms.converged[again] = repeats.converged
        norms.products[again] += repeats.products
    return norms


def _draw_starts(heads: Heads, seeds: Sequence[int], like: Tensor) -> Tensor:
    """Return random start vectors in the shape of `like`, one per problem, (problems, n channels).

    A start vector depends on the seed of its sample alone, and is zero at padded queries.
    """
    start = random_starts(seeds, like.shape[1]).to(heads.q)
    start = start[heads.sample]  # (batch rows, n channels)
    if heads.valid is not None:
        rows = start.view(len(start), heads.q.shape[2], -1)  # (batch rows, n, channels)
        rows = rows * heads.valid[..., None]
        start = rows.flatten(1)
    return start.repeat_interleave(len(like) // len(start), 0)  # the same for all heads of a row


def splitting_gain(
    heads: Heads, exact: PerHead, *, seeds: Sequence[int], tol: float = 1e-3
) -> PerHead:
    """Return the factor by which ||J|| grows if every token is duplicated; NaN: not converged.

    If every token is repeated m >= 2 times, ||J|| becomes max(||J||, max_i s ||T_i Phi^q_i||) for
    every m (closed form of mass splitting, Castin et al., arXiv 2312.14820). s T_i Phi^q_i (d_v x
    D) is how token i moves its output o_i through its query alone: T_i = sum_j P_ij (v_j - o_i)
    k_j^T, Phi^q_i = dq_i / dx_i, and s is the scale of the logits.

    Domain: at X; attention without a causal mask and without a sink (a constant logit beside those
    of the keys, whose probability would fall with more keys). The copies share the token's
    position.

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
        # J = [J_q J_kv] for two inputs, and the blocks s T_i Phi^q_i are J_q: ||J|| is no smaller.
        return torch.ones_like(exact)
    # Both norms are proportional to the values. Values of size one keep all numbers in range, and
    # the gain stays the same.
    heads, size = unit_values(heads)
    exact = exact / size
    # If all copies of a token move alike, the norm is ||J||. If the moves of the copies sum to 0,
    # the changes of keys and values cancel in every output. Only each copy's query moves its own
    # output, by s T_i Phi^q_i: these are the blocks of J with constant keys and values. This J is
    # block-diagonal, so its norm is the largest norm of a block.
    # A problem is one head on one batch row. The parts have equally many problems, by batch row
    # and then by head, in the order of `exact`.
    parts = _split_problems(heads)
    exact_parts = exact.flatten().chunk(len(parts))
    block_norms = []
    for part, exact_part in zip(parts, exact_parts, strict=True):
        constant = part.with_same_map(to_k=None, to_v=None)
        problems = products.head_products(constant)
        # Start vectors in the shape of the outputs of all problems, (problems, n dv).
        start = _draw_starts(part, seeds, like=problems.attend.o.flatten(1))
        norms = spectral_norms(problems.select, start, tol=tol)
        # A norm that has not converged is good enough if its upper limit is below ||J||: the gain
        # is then 1 in any case.
        is_certain = norms.converged | (norms.upper <= exact_part)
        block_norms.append(torch.where(is_certain, norms.norm, torch.nan))
    largest = torch.cat(block_norms).view_as(exact)
    return torch.where(largest <= exact, 1.0, largest / exact)


def forward_error(heads: Heads) -> PerHead:
    """Estimate the relative change of ||J|| by the rounding of q and k in the model.

    The rows q_i, k_j and the bias B_ij of the logits have relative errors of about eps. The logits
    of query i are at most l_i = max_j (s ||q_i|| ||k_j|| + |B_ij|) and change by up to
    d_i = 2 eps l_i. Every P_ij, and every P_ij (v_j - o_i) in J, then changes by a factor of up to
    exp(2 d_i). This is an estimate: the errors of the model's own sums are not known.

    Args:
        heads: the heads of one layer, of any kind, in the precision of the model.

    Returns:
        At most 1, the largest over the queries.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0], [4.0, 3.0]]]), torch.eye(2)[None]
    >>> forward_error(affine_heads(x, eye, eye, eye)).log10().round()
    tensor([[-5.]])
    """
    eps = torch.finfo(heads.q.dtype).eps
    # l_i = max_j s ||q_i|| ||k_j|| + max_j |B_ij|, (batch, heads, n)
    queries = vector_norm(heads.q, dim=-1)
    longest_key = vector_norm(heads.k, dim=-1).amax(-1, keepdim=True)
    logits = heads.scale.abs()[..., None] * queries * longest_key
    if heads.bias is not None and heads.bias.dtype != torch.bool:  # a mask moves no logit
        largest = []
        for start, stop in heads.row_blocks():
            # Entries that are masks count as 0, also where they are -inf.
            bias = heads.bias_rows(start, stop).nan_to_num(0.0).abs()
            visible_bias = bias * heads.visible(start, stop)
            largest.append(visible_bias.amax(-1))
        logits = logits + torch.cat(largest, -1)
    moves = 2 * eps * logits  # d_i
    if heads.valid is not None:
        moves = moves * heads.valid[:, None]
    return torch.expm1(2 * moves.amax(-1)).clamp_max(1.0)  # exp(2 d) - 1


def bound_error(heads: Heads, norm: PerHead) -> PerHead:
    """Return how far a correct bound may be below ||J|| because of rounding in both.

    A product J^T u with ||u|| = 1 is off by at most

        E = gamma (T(c) + T(d)),

    and so is the bound. gamma is the relative error of the sums in the product. T(c) is an upper
    limit of ||J||, computed from c_ij = P_ij (v_j - o_i). gamma T(d) covers the digits lost in the
    differences v_j - o_i: T(d) is the formula of T(c) with other numbers d_ij (`_bound_parts`).

    The norm is the root of ||J^T u||^2, computed from Gram matrices of weights, with an error of
    at most R = gamma (T(c) + E)^2 more. With sqrt(a^2 + b) <= a + b / (2 a) it is at most

        ((||J|| + E)^2 + R)^1/2 = (||J||^2 + 2 ||J|| E + E^2 + R)^1/2
                               <= ||J|| + E + (E^2 + R) / (2 ||J||).

    Args:
        heads: the heads of one layer, in the precision in which both were computed.
        norm: ||J|| of each head.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.tensor([[[3.0, 4.0], [4.0, 3.0]]]).double(), torch.eye(2).double()[None]
    >>> bound_error(affine_heads(x, eye, eye, eye), torch.ones(1, 1)).log10().round()
    tensor([[-12.]], dtype=torch.float64)
    """
    gamma = _sum_error(heads)
    t_c, t_d = _bound_parts(heads)
    if not heads.fits_memory:  # P is not stored: norm and bound compute it in other orders
        gamma = gamma + forward_error(heads)
    error = gamma * (t_c + t_d)  # E
    square = error.square() + gamma * (t_c + error).square()  # E^2 + R
    twice_norm = (2 * norm).clamp_min(torch.finfo(norm.dtype).tiny)
    # The error E of the bound, and that of the norm, E + (E^2 + R) / (2 ||J||).
    return 2 * error + square / twice_norm


def ball_error(heads: Heads, r: float) -> PerHead:
    """Return how much rounding may raise a norm that autograd finds within r of X.

    The error is E = gamma (T(c) + T(d)), as in `bound_error`. gamma is the relative error of the
    sums in a product with J. T(c) bounds ||J|| by the parts through values, keys and queries,

        T(c) = ||P|| ||Phi^v|| + max ||b|| (sum_ij ||c_ij||^2)^1/2 ||Phi^k||
               + max ||a|| max_i sum_j ||c_ij|| ||Phi^q||,   c_ij = P_ij (v_j - o_i),

    with the gradients b_ij = s q_i and a_ij = s k_j of the logits. T(d) is the same formula with
    d_ij, where gamma d_ij bounds the rounding error of c_ij by cancellation in v_j - o_i.

    P differs from point to point within r, so T(c) and T(d) are bounded for every P. ||c_ij|| and
    d_ij are at most 2 P_ij max ||v||, where v is less its mean under P at X. Rows of P sum to 1
    and ||P||_F^2 <= N, so both are at most the T below, in which sum_j ||c_ij|| is replaced by
    2 max ||v||, and (sum_ij ||c_ij||^2)^1/2 by 2 N^1/2 max ||v||.
    """
    phi_q, phi_k, phi_v = _bound_projections(heads)
    in_keys, in_queries = _largest_gradients(heads)  # max ||s q_i||, max ||s k_j||
    centred = heads.v - attend.mean_value(heads.attention(), heads.v)
    longest_value = _longest(centred)
    # Within r no row moves by more than r ||Phi||.
    s = heads.scale.abs()
    in_keys = in_keys + r * s * phi_q
    in_queries = in_queries + r * s * phi_k
    longest_value = longest_value + r * phi_v
    # T = N^1/2 ||Phi^v||
    #     + 2 max ||v|| (N^1/2 max ||s q_i|| ||Phi^k|| + max ||s k_j|| ||Phi^q||)
    root_n = heads.q.shape[2] ** 0.5
    by_logits = root_n * in_keys * phi_k + in_queries * phi_q
    t = root_n * phi_v + 2 * longest_value * by_logits
    # E = gamma (T(c) + T(d)) <= 2 gamma T
    return 2 * _sum_error(heads) * t


def _sum_error(heads: Heads) -> Tensor:
    """Return an upper limit gamma of the relative error of all sums in a product with J.

    gamma is more than t u / (1 - t u), where t is the number of terms in all sums together and
    u = eps / 2 the unit roundoff.
    """
    n, d = heads.q.shape[2:]
    m, dv = heads.v.shape[2:]
    width = heads.x.shape[-1]
    # Sums over queries (n), keys (m), channels of tokens (`width`), and channels of q, k and v in
    # products with weights and in inner products (3 d + 2 dv); 16 for all other operations.
    terms = n + m + width + 3 * d + 2 * dv + 16
    return heads.scale.new_tensor(terms * torch.finfo(heads.q.dtype).eps)


def _bound_parts(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return T(c) >= ||J||, and T(d) for the rounding error of J by cancellation, (batch, heads).

    T(c) is the sum of the parts of J through values, keys and queries:

        T(c) = ||P|| ||Phi^v|| + max ||b|| (sum_ij ||c_ij||^2)^1/2 ||Phi^k||
               + max ||a|| max_i sum_j ||c_ij|| ||Phi^q||.

    The Phi are the Jacobians of the projections, b and a the gradients of the logits in keys and
    queries, and c_ij = P_ij (v_j - o_i). T(d) is the same formula with numbers d_ij in place of
    ||c_ij||: gamma d_ij bounds the rounding error of c_ij (`_bound_differences`), where gamma is
    the relative error of sums. Nothing cancels in the part through values: it is not needed in
    T(d), which it only makes larger.
    """
    phi_q, phi_k, phi_v = _bound_projections(heads)
    in_keys, in_queries = _largest_gradients(heads)
    column_sums = torch.zeros_like(heads.k[..., 0])  # sum_i P_ij, (batch, heads, m)
    # sum_ij ||c_ij||^2 and max_i sum_j ||c_ij||, with index 0 for c and index 1 for d.
    squares = heads.q.new_zeros(2, *heads.q.shape[:2])  # (2, batch, heads)
    largest_row_sum = torch.zeros_like(squares)
    for p, c, d in _list_differences(heads):
        column_sums += p.sum(-2)
        for which, norms in enumerate((c, d)):
            squares[which] += norms.square().sum((-2, -1))
            row_sums = norms.sum(-1)
            largest_row_sum[which] = torch.maximum(largest_row_sum[which], row_sums.amax(-1))
    # ||P||^2 <= (largest sum of a row, 1) (largest sum of a column). The part through values,
    # (batch, heads), is the same in T(c) and T(d); the other parts are (2, batch, heads).
    by_values = column_sums.amax(-1).sqrt() * phi_v
    by_keys = in_keys * squares.sqrt() * phi_k
    by_queries = in_queries * largest_row_sum * phi_q
    t_c, t_d = by_values + by_keys + by_queries
    return t_c, t_d


def _list_differences(heads: Heads) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (P, ||c||, d) for some queries at a time, each (batch, heads, rows, m).

    c_ij is P_ij (v_j - o_i), and d_ij bounds its rounding error: see `_bound_differences`.
    """
    v = heads.v
    sink = heads.sink_share()  # probability of a constant logit beside those of the keys, or None
    for start, stop in heads.row_blocks():
        p = heads.rows(start, stop)
        if sink is None:
            sink_rows = None
            # Once, from the first rows of P: values less their mean, so that v_j - o_i cancels
            # less. Rows of P sum to 1, so v_j - o_i stays the same.
            if start == 0:
                v = v - attend.mean_value(p, v)
        else:
            sink_rows = sink[:, :, start:stop]
        # The outputs o_i = (P v)_i. At the key with the largest P_ij of each row, also
        # P_ij (v_j - o_i) without cancellation.
        rows = attend.anchor_outputs(p, v, sink_rows)
        yield p, *_bound_differences(p, v, rows)


def _bound_differences(p: Tensor, v: Tensor, rows: attend.Anchored) -> tuple[Tensor, Tensor]:
    """Return ||c_ij|| for c_ij = P_ij (v_j - o_i), and d_ij, both (batch, heads, rows, m).

    gamma d_ij bounds the rounding error of c_ij, where gamma is the relative error of sums:

    * In general the terms of c_ij are P_ij v_j and P_ij o_i, so d_ij = 2 P_ij max ||v||.
    * At the key a with the largest P_ia, c_ia is computed without cancellation, as P_ia times
      (1 - P_ia) v_a - sum_{j != a} P_ij v_j. Both terms are at most (1 - P_ia) max ||v|| long, so
      d_ia = 2 (1 - P_ia) max ||v||.

    Args:
        p: some rows of P.
        v: the values.
        rows: the outputs o_i, the key a of each row, c_ia, and 1 - P_ia (`share`).
    """
    # ||v_j - o_i|| from differences: a formula with inner products would lose half of the digits.
    c = p * torch.cdist(rows.o, v, compute_mode=_PLAIN)
    accurate = vector_norm(rows.c, dim=-1, keepdim=True)  # ||c_ia||
    c = c.scatter(-1, rows.key, accurate)
    weights = p.scatter(-1, rows.key, rows.share)  # P_ij, but 1 - P_ia at key a
    longest = _longest(v)[..., None, None]
    return c, 2 * longest * weights


def _bound_projections(heads: Heads) -> list[Tensor]:
    """Return upper limits of ||Phi||_F for the queries, keys and values of each head.

    Phi_i = G_i W^T is the Jacobian of a projection at token i: G_i (`local_map`) is that of what
    follows the weight W, such as a rotary position or qk-norm, or the identity.
    """
    limits = []
    for projection in projections(heads):
        # ||Phi_i||_F = ||G_i W^T||_F <= ||G_i||_F ||W||_F
        local = matrix_norm(local_map(projection)).amax(-1)
        limits.append(local * matrix_norm(projection.weight))
    return limits


def _longest(rows: Tensor) -> PerHead:
    """Return the length of the longest of the rows, (batch, heads, n, d), of each head."""
    return vector_norm(rows, dim=-1).amax(-1)


def _largest_gradients(heads: Heads) -> tuple[Tensor, Tensor]:
    """Return upper limits of the gradients of logits in keys, ||b_ij||, and in queries, ||a_ij||.

    For logits s q k^T the gradients are b_ij = s q_i and a_ij = s k_j.
    """
    pairs = heads.pairs or Pairs()
    # In general b_ij = f_ij s q_i + t_ij, a_ij = f_ij s k_j + r_ij with the slope f of a soft cap
    # and the terms t, r of relative positions: their norms are added.
    in_keys = heads.scale.abs() * _longest(heads.q)
    in_queries = heads.scale.abs() * _longest(heads.k)
    if pairs.slope is not None:
        steepest = pairs.slope.abs().amax((-2, -1))
        in_keys = in_keys * steepest
        in_queries = in_queries * steepest
    if pairs.with_k is not None:
        t = vector_norm(pairs.with_k, dim=-1)
        in_keys = in_keys + t.amax((-2, -1))
    if pairs.with_q is not None:
        r = vector_norm(pairs.with_q, dim=-1)
        in_queries = in_queries + r.amax((-2, -1))
    return in_keys, in_queries
