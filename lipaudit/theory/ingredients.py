"""What the bounds of attention heads share: P, centred keys and values, weights, tokens.

What is returned is raised by its rounding error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.linalg import matrix_norm, vector_norm

from lipaudit.theory import Policy
from lipaudit.theory.attend import logit_gradients
from lipaudit.theory.heads import (
    Heads,
    Projection,
    are_affine_everywhere,
    factor,
    local_map,
    narrow_jacobians,
    projections,
    select_tokens,
)
from lipaudit.theory.matrix_norms import gram_root, map_norm, spectral_norm
from lipaudit.theory.softmax import row_maxima

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lipaudit.theory.heads import PerHead

    Maps = Float[Tensor, "batch heads n m"]
    OfRows = Float[Tensor, "batch heads n 1"]
    Norm = Float[Tensor, " heads"]

T = TypeVar("T")


@dataclass(frozen=True)
class Centred:
    """Keys and values less their mean over the keys that are seen; unseen keys are zero rows.

    With a sink neither has its mean taken off: see `Ingredients.centred`.

    Attributes:
        p: P.
        seen: 1 for keys that some query can see, else 0.
        k, v, o: centred keys and values, and the outputs P V.
        s: scale of the logits.
    """

    p: Maps
    seen: Float[Tensor, "batch heads m 1"]
    k: Float[Tensor, "batch heads m d"]
    v: Float[Tensor, "batch heads m dv"]
    o: Float[Tensor, "batch heads n dv"]
    s: Float[Tensor, "batch heads 1 1"]

    def pick(self, mask: Bool[Tensor, "batch heads"]) -> Centred:
        """Return the heads that are True in the mask, as batch rows of one head each."""
        tensors = (self.p, self.seen, self.k, self.v, self.o, self.s)
        return Centred(*(tensor[mask][:, None] for tensor in tensors))

    @cached_property
    def o2(self) -> OfRows:
        """||o_i||^2."""
        return self.o.square().sum(-1, keepdim=True)

    @cached_property
    def v2(self) -> Float[Tensor, "batch heads m 1"]:
        """||v_j||^2."""
        return self.v.square().sum(-1, keepdim=True)

    @cached_property
    def gram(self) -> Float[Tensor, "batch heads m m"]:
        """<v_j, v_l>."""
        return self.v @ self.v.mT

    @cached_property
    def w2(self) -> Maps:
        """||v_j - o_i||^2, raised by more than its rounding error."""
        return squared_distances(self.o, self.v, self.o2, self.v2)


def squared_distances(
    a: Float[Tensor, "*batch n d"],
    b: Float[Tensor, "*batch m d"],
    a2: Float[Tensor, "*batch n 1"],
    b2: Float[Tensor, "*batch m 1"],
) -> Float[Tensor, "*batch n m"]:
    """Return ||a_i - b_j||^2 for all i and j, raised by its rounding error.

    The formula is ||a_i||^2 - 2 <a_i, b_j> + ||b_j||^2; a2 and b2 are the squared lengths of the
    rows.
    """
    # Rounding errors in units of (||a||^2 + ||b||^2) eps / 2, where 2 ||a|| ||b|| is at most
    # ||a||^2 + ||b||^2: the product costs d, the squares a2 and b2 cost d, the two sums 4, the
    # factors `up` 2. `up` adds 2 d + 32 units, see `rounding`.
    up = 1 + rounding(a)
    inner = (-2 * a) @ b.mT
    return inner.add_(up * a2).add_(up * b2.mT)


def rounding(rows: Float[Tensor, "*batch n d"]) -> float:
    """Return an upper limit of the rounding error of <x, y>, relative to ||x|| ||y||.

    x and y are vectors of d channels, like `rows`. With u = eps / 2 the error of <x, y> is at most
    d u / (1 - d u) in any order of the sum (Higham, Accuracy and Stability of Numerical
    Algorithms, 3.1). The result is 2 d u + 32 u: the surplus covers further operations of the
    callers on <x, y>.
    """
    return (rows.shape[-1] + 16) * torch.finfo(rows.dtype).eps


@dataclass(frozen=True)
class Weights:
    """Norms of the weights of affine heads, and small matrices that replace the weights.

    Tokens have D channels, q and k have d. Norms and inner products of vectors W_K q or W_Q k (D
    channels) are computed from q and k times the matrices below (d channels). Published bounds
    (hu, castin, mean_field, theorem3, appendix_c) use the norms `q`, `k`, `v`, `a`; ours, `sharp`
    and `ball_sharp`, use the matrices and `value`.

    Attributes:
        q, k, v, a: ||W_Q||, ||W_K||, ||W_V|| and ||W_Q W_K^T||, where W is [W; b^T] with a bias.
        value: ||W_V|| without the bias.
        to_u: q to_u has the norms and inner products of W_K q.
        to_a: W_K^T W_V, so q to_a is W_V^T W_K q.
        to_z: k to_z has the inner products of W_Q k, slightly raised.
        to_inside: q to_inside is X^T W_K q for a basis X of the range of W_Q: how far a token acts
            through its key in the directions in which it acts through its query.
        shared: upper limit of ||W_V^T X||, the same for the value.
        left: rounding error of X: a number e with ||(W_Q - X R) y|| <= e ||R y|| for every y.
    """

    q: Norm
    k: Norm
    v: Norm
    a: Norm
    value: Norm
    to_u: Float[Tensor, "heads d r"]
    to_a: Float[Tensor, "heads d dv"]
    to_z: Float[Tensor, "heads d d"]
    to_inside: Float[Tensor, "heads d e"]
    shared: Norm
    left: Norm


class Tokens:
    """What all heads of a layer share, without padding; with any bias, X is [X 1].

    Attributes:
        count: N, (batch, 1) as all but `centred`.
        radius: R = max_i ||x_i||.
        longest: max_i ||x_i||, of the rows of [X 1] with a bias.
        frobenius: ||X||_F.
        centred: the tokens less their mean, (batch, n, D).
    """

    def __init__(self, heads: Heads) -> None:
        """Compute norms of the tokens X that enter a layer, and X less its mean.

        With a bias the published bounds hold for the tokens [X 1], whose norms are used then.
        Padded tokens are zero rows of X, and stay zero.
        """
        x = heads.x
        valid = x.new_ones(x.shape[:2])  # 1 for tokens, 0 for padding
        if heads.valid is not None:
            valid = heads.valid.to(x)
        valid = valid[..., None]
        self.count = valid.sum(-2)  # N
        count = self.count[..., None].clamp_min(1.0)
        mean = x.sum(1, keepdim=True) / count
        self.centred = valid * (x - mean)
        self.radius = vector_norm(x, dim=-1).amax(-1, keepdim=True)
        # X, or [X 1] if any projection has a bias.
        self._x = x
        for projection in (heads.to_q, heads.to_k, heads.to_v):
            if projection is not None and projection.bias is not None:
                self._x = torch.cat([x, valid], -1)
        lengths = vector_norm(self._x, dim=-1)
        self.longest = lengths.amax(-1, keepdim=True)
        self.frobenius = vector_norm(lengths, dim=-1, keepdim=True)

    @cached_property
    def norm(self) -> Float[Tensor, "batch 1"]:
        """||X||."""
        return spectral_norm(self._x)[:, None]


def value_norms(heads: Heads) -> Float[Tensor, "#batch heads #m"]:
    """Return ||dv_j / dx_j|| of every key token j, or one for all tokens if v = x W_V + b."""
    _, _, to_v = projections(heads)
    return spectral_norm(narrow_jacobians(to_v))


class Ingredients:
    """Quantities that several bounds of some heads of a layer share, computed on first use.

    Attributes:
        heads: in float64, W_V of each of about size one.
        tokens: what all heads of the layer share.
        affine: whether the bounds for affine self-attention apply: see `are_affine_everywhere`.
    """

    def __init__(self, heads: Heads, tokens: Tokens) -> None:
        """Hold what bounds are computed from: some heads of a layer, and the layer's tokens."""
        self.heads = heads
        self.tokens = tokens
        # Self-attention, q, k and v all affine in the tokens: what most published bounds need.
        self.affine = are_affine_everywhere(heads)
        # Results of `once`, by function.
        self._computed: dict[Callable[..., Any], Any] = {}

    def once(self, compute: Callable[[Ingredients], T]) -> T:
        """Return compute(self), which several bounds may share: it is computed once and stored."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        value: T = self._computed[compute]
        return value

    @cached_property
    def weights(self) -> Weights:
        """Norms of the weights W_Q, W_K, W_V of affine heads, and small products of the weights.

        Bounds need norms and inner products of the vectors W_K q_i and W_Q k_j (gradients of
        logits), which are as long as tokens (D channels). They follow from the short q_i and k_j
        (d channels) and small matrices:

        * q `to_u` has the norms and inner products of W_K q;
        * k `to_z` those of W_Q k, or slightly larger ones;
        * q `to_a` is W_V^T W_K q;
        * q `to_inside` is X^T W_K q, where X is a basis of the range of W_Q, the directions in
          which a token moves its query. `shared` is an upper limit of ||W_V^T X||, and `left`
          the rounding error of X.
        """
        to_q, to_k, to_v = projections(self.heads)
        # [W; b^T] of each: with a bias the published bounds hold for the tokens [X 1].
        q = _append_bias(to_q)
        k = _append_bias(to_k)
        v = _append_bias(to_v)
        value = spectral_norm(to_v.weight)
        root = gram_root(to_q.weight)  # R with R^T R >= W_Q^T W_Q, (heads, d, d)
        basis, left = _find_range(to_q.weight, root)  # X, and its rounding error
        if self.heads.x_kv is not None:
            # Queries read another input than keys and values: no direction is shared. `gram_bound`
            # then uses neither `to_inside` nor `shared`.
            basis = torch.zeros_like(to_k.weight[..., :1])
        return Weights(
            q=spectral_norm(q),
            k=spectral_norm(k),
            v=spectral_norm(v),
            # ||W_Q W_K^T|| = ||W_Q R^T|| for every R with R^T R = W_K^T W_K, and at most that for
            # the larger R^T R of `gram_root`.
            a=spectral_norm(q @ gram_root(k).mT),
            value=value,
            # Exact, not `gram_root`, which is an upper limit: bounds on balls divide by ||W_K q||.
            to_u=factor(to_k)[:, 0].mT,
            to_a=to_k.weight.mT @ to_v.weight,
            # An upper limit is enough: `query_term` grows with the Gram matrix of W_Q.
            to_z=root.mT,
            to_inside=to_k.weight.mT @ basis,
            # The rounding error of X changes ||W_V^T X|| by at most `left` ||W_V||.
            shared=spectral_norm(basis.mT @ to_v.weight) + left * value,
            left=torch.full_like(value, left),
        )

    @cached_property
    def centred(self) -> Centred:
        """P, and the keys, values and outputs less the mean key and the mean value.

        Smaller keys and values have smaller rounding errors. A constant added to all k or all v
        changes no derivative, because rows of P sum to 1. With a sink (a constant logit that takes
        a share of the probability) they do not, and no mean is subtracted.
        """
        heads = self.heads
        p = heads.attention()
        # Keys that some query can see. P > 0 would not do: P may be 0 at X and positive elsewhere
        # in a ball around X.
        visible = heads.visible(0, p.shape[2]).any(-2)
        visible = visible.expand(*p.shape[:2], -1)
        seen = visible.to(p)[..., None]  # (batch, heads, m, 1)
        k = heads.k
        v = heads.v
        if heads.sink is None:
            count = seen.sum(-2, keepdim=True).clamp_min(1.0)
            share = seen / count
            mean_key = (share * k).sum(-2, keepdim=True)
            mean_value = (share * v).sum(-2, keepdim=True)
            k = k - mean_key
            v = v - mean_value
        v = seen * v
        scale = heads.scale.expand(p.shape[:2])[..., None, None]
        return Centred(p=p, seen=seen, k=seen * k, v=v, o=p @ v, s=scale)

    @cached_property
    def p_norm(self) -> PerHead:
        """||P||."""
        return map_norm(self.centred.p, policy=self.heads.policy)

    @cached_property
    def _row_maxima(self) -> Tensor:
        """Return max_i g_1(P_i) and max_i ||M(P_i)|| over the rows of P, (2, batch, heads).

        M(p) = diag(p) - p p^T is the Jacobian of softmax, and g_1(p) an upper limit of its norm.
        """
        # With a sink (a constant logit beside those of the keys), its probability is the last
        # entry of a row. M of the keys alone is a submatrix of M with the sink, so its norm is no
        # larger.
        p = self.heads.attention(whole=True)
        maxima = []
        for start, stop in self.heads.row_blocks():
            maxima.append(torch.stack(row_maxima(p[:, :, start:stop])))
        return torch.stack(maxima).amax(0)

    @property
    def g1_max(self) -> PerHead:
        """max_i g_1(P_i)."""
        return self._row_maxima[0]

    @property
    def softmax_norm_max(self) -> PerHead:
        """max_i ||M(P_i)||."""
        return self._row_maxima[1]

    @property
    def nothing(self) -> PerHead:
        """NaN, for a bound that cannot be given."""
        return self.heads.q.new_full(self.heads.q.shape[:2], torch.nan)

    @property
    def a_norm(self) -> PerHead:
        """||A||, A = s W_Q W_K^T."""
        return self.heads.scale.abs() * self.weights.a

    def reach(self, r: float) -> PerHead:
        """Return ||A|| (R + r)^2, which no logit of tokens of norm R + r exceeds."""
        return self.a_norm * (self.tokens.longest + r).square()


def _find_range(weight: Tensor, root: Tensor) -> tuple[Tensor, float]:
    """Return a basis X of the range of W, with W = X R and ||X|| <= 1, and its rounding error.

    The error is a number e with ||(W - X R) y|| <= e ||R y|| for every y.

    Args:
        weight: W, (heads, D, d).
        root: R, upper triangular, from `gram_root`.
    """
    basis = torch.linalg.solve_triangular(root, weight, upper=True, left=False)  # X = W R^-1
    # In floating point a row x of X solves x (R + dR) = w with |dR| <= d u |R|, u = eps / 2
    # (Higham, Accuracy and Stability, Theorem 8.5). So
    #     ||(W - X R) y|| <= d u ||X||_F ||R||_F ||y||   with ||X||_F <= d^1/2.
    # ||R||_F is little above ||W||_F: eps in place of u covers this. So the left side is at most
    # d^(3/2) eps ||W||_F ||y||. `gram_root` adds 2 (D + d) eps ||W||_F^2 to the diagonal of the
    # Gram matrix, of which rounding takes less than half. So with `added` = (D + d) eps,
    # ||R y||^2 >= `added` ||W||_F^2 ||y||^2, and ||W||_F ||y|| <= ||R y|| / `added`^1/2.
    wide, narrow = weight.shape[-2:]  # D, d
    eps = torch.finfo(basis.dtype).eps
    added = (wide + narrow) * eps
    return basis, narrow**1.5 * eps / added**0.5


def _append_bias(projection: Projection) -> Tensor:
    """Return [W; b^T], or W without a bias."""
    if projection.bias is None:
        return projection.weight
    return torch.cat([projection.weight, projection.bias[:, None]], 1)


def compute_theorem3_factors(ingredients: Ingredients) -> tuple[Tensor, Tensor]:
    """Return the factors of ||P|| and of max_i ||M(P_i)|| in `theorem3` for heads of every kind.

    The factors are

        max_j ||Phi^v_j||   and   ||V_c|| (max_j ||H_j Phi^k_j|| + max_i ||G_i Phi^q_i||).

    The Phi are the Jacobians of the projections at each token, and V_c has the values less their
    mean. G_i has a row for each key j: the gradient of logit ij in q_i. H_j has a row for each
    query i: the gradient of logit ij in k_j. For logits s q k^T every G_i is s K_c, the keys less
    their mean, and every H_j is s Q.
    """
    heads = ingredients.heads
    centred = ingredients.centred
    to_q, to_k, _ = projections(heads)
    # Which queries and keys count: padded queries have P_i = 0, and some keys no query can see.
    queries = centred.p.sum(-1) > 0
    keys = centred.seen[..., 0] > 0
    value_norm = (value_norms(heads) * keys).amax(-1)
    if heads.pairs is None:  # logits s q k^T
        q = heads.q * queries[..., None]
        through_keys = _largest_image(q, to_k, keys, heads.policy)
        through_queries = _largest_image(centred.k, to_q, queries, heads.policy)
        logit_norm = heads.scale.abs() * (through_keys + through_queries)
    else:
        through_queries = _largest_gradient(ingredients, "q", to_q, queries)
        through_keys = _largest_gradient(ingredients, "k", to_k, keys)
        logit_norm = through_queries + through_keys
    return value_norm, spectral_norm(centred.v) * logit_norm


def _largest_gradient(
    ingredients: Ingredients, name: Literal["q", "k"], projection: Projection, used: Tensor
) -> Tensor:
    """Return max_i ||G_i Phi_i||: how much the logits of a token change if this token moves.

    For name q, the logits of token i are those of query i with every key. The rows of G_i are
    their gradients in q_i, and Phi_i = dq_i / dx_i. For name k, they are the logits of key i with
    every query. The rows of G_i are their gradients in k_i, and Phi_i = dk_i / dx_i.

    Args:
        ingredients: the heads, and P.
        name: q or k.
        projection: the projection from the tokens to q (or to k).
        used: which tokens count, (batch, heads, tokens).
    """
    heads = ingredients.heads
    p = ingredients.centred.p  # (batch, heads, tokens, partners)
    if name == "k":
        p = p.mT
    norms = torch.zeros_like(p[..., 0])
    # Phi_i, d x D, narrowed to at most d columns: ||G_i Phi_i|| stays the same.
    phi = narrow_jacobians(projection)
    # Numbers in G_i and G_i Phi_i of one token.
    partners = p[:, :, 0].numel()
    per_token = 2 * partners * heads.q.shape[-1]
    for tokens in heads.policy.chunks(p.shape[2], per_token):
        # Where P_ij = 0 the logit ij does not count.
        seen = p[:, :, tokens] > 0
        rows = logit_gradients(heads, name, tokens)
        rows = seen[..., None] * rows  # G_i of these tokens, (batch, heads, tokens, partners, d)
        norms[..., tokens] = spectral_norm(rows @ select_tokens(phi, tokens))
    return (norms * used).amax(-1)


def sum_spread(
    p: Float[Tensor, "*batch n m"], gram: Float[Tensor, "*batch m m"], c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fourth power of the Schatten-4 norm of X^T M(P_i) for every row P_i.

    M(p) = diag(p) - p p^T is the Jacobian of softmax, X has the rows x_j. The Schatten-4 norm is
    an upper limit of the spectral norm, and needs products with the Gram matrix of X only.

    Column j of X^T M(P_i) is P_ij (x_j - m), m = sum_l P_il x_l. The power is the sum of the
    squared inner products of all pairs of columns. With w_j = P_ij^2, g_jl = <x_j, x_l> and
    c_j = <x_j, m> - ||m||^2 / 2 it is

        sum_jl w_j w_l (g_jl - c_j - c_l)^2 = A - 4 B + 2 W C + 2 R^2,
        A = sum_jl w_j w_l g_jl^2,   B = sum_jl w_j w_l c_j g_jl,
        C = sum_j w_j c_j^2,   R = sum_j w_j c_j,   W = sum_j w_j.

    Args:
        p: the rows P_i.
        gram: g.
        c: c_j for each row; overwritten.

    Returns:
        The power; A + 2 W C; and W. The absolute values of the terms of the power add up to at
        most 3 (A + 2 W C), because B^2 <= A W C and R^2 <= W C.
    """
    w = p.square()
    wc = w * c
    # In-place products save memory: every factor has the size of P.
    a = (w @ gram.square()).mul_(w).sum(-1)  # A
    b = (w @ gram).mul_(wc).sum(-1)  # B
    cc = c.mul_(wc).sum(-1)  # C
    r = wc.sum(-1)  # R
    total = w.sum(-1)  # W
    # A - 4 B + 2 W C + 2 R^2
    power = a - 4 * b + 2 * total * cc + 2 * r.square()
    terms = a + 2 * total * cc
    return power, terms, total


def bound_token_spread(p: Maps, tokens: Float[Tensor, "batch m D"]) -> PerHead:
    """Bound max_i ||X^T M(P_i)|| over the rows of P, M(p) = diag(p) - p p^T.

    The bound is the Schatten-4 norm, from three products with the Gram matrix g for all rows
    (`sum_spread`). On trained heads the bound is within 1% of the spectral norm.

    Args:
        p: attention maps P.
        tokens: the tokens X, less their mean.
    """
    gram = tokens @ tokens.mT
    # Divide g by its largest entry. Nothing overflows then, and one number bounds the error of c.
    largest = gram.diagonal(0, -2, -1).amax(-1)
    largest = largest.clamp_min(torch.finfo(gram.dtype).tiny)
    gram = gram / largest[:, None, None]
    flat = p.flatten(1, 2)  # the rows of all heads
    # c_j = <x_j, m> - ||m||^2 / 2 with m = sum_l P_il x_l is (P g)_ij - (P g P^T)_ii / 2.
    c = flat @ gram
    c -= 0.5 * (flat * c).sum(-1, keepdim=True)
    power, terms, total = sum_spread(flat, gram, c)
    # Double sums over N terms have relative errors of at most e / 2 = (2 N + 32) u, u = the unit
    # roundoff. The absolute values in the power add up to at most 3 `terms`. So the error of the
    # power is below 3 e `terms`, and the error of c is below e / 2.
    e = 2 * rounding(p)
    # The root of the power is the norm of D (g - c 1^T - 1 c^T) D, D^2 = diag(w), w_j = P_ij^2.
    # Errors of c change it by at most 2 (e / 2) `total`, where `total` is the sum of the w_j. An
    # error h of g, a sum over channels, changes g by h and each c by 3 h / 2: in all by 4 h.
    h = rounding(tokens)
    root = (power + 3 * e * terms).clamp_min(0.0).sqrt()
    # 1 + e: rounding of this line and of the root
    square = (1 + e) * (root + (e + 4 * h) * total)
    square = square.view(p.shape[:3]).amax(-1) * largest[:, None]
    return square.sqrt()


def _largest_image(rows: Tensor, projection: Projection, used: Tensor, policy: Policy) -> Tensor:
    """Return max_i ||rows Phi_i|| over tokens i, where Phi_i is a projection's Jacobian at i.

    The result is the root of max_i ||E_i||, E_i = (rows Phi_i)(rows Phi_i)^T. Only those E_i that
    may have the largest norm get an eigenvalue decomposition, which is slow.

    Args:
        rows: the same matrix for all tokens, (batch, heads, n, d).
        projection: the projection.
        used: which tokens count, (batch, heads, tokens).
        policy: chunk sizes.
    """
    # With the QR decomposition rows = Q T, ||T Phi|| = ||rows Phi||, and T is at most d x d.
    triangle = torch.linalg.qr(rows, mode="r").R
    triangle = triangle[:, :, None]  # (batch, heads, 1, d, d): the same for all tokens
    # Phi_i = G_i W^T with the Jacobian G_i (`local`) of a rotary position or qk-norm. R^T, with
    # R^T R = W^T W, has fewer columns than W^T and gives the same norms.
    local = local_map(projection)
    weight = factor(projection).mT
    batch, heads, _, d = rows.shape
    entries = batch * heads * d * weight.shape[-1]
    parts = []
    for i in policy.chunks(local.shape[2], entries):
        images = triangle @ local[:, :, i] @ weight
        if projection.local is not None:  # one image per token; tokens that do not count become 0
            images = images * used[..., i, None, None]
        # ||E^2||_F / ||E||_F <= ||E|| <= ||E^2||_F^(1/2)
        e = images @ images.mT
        square = matrix_norm(e @ e)  # ||E^2||_F
        lower = (square / matrix_norm(e)).nan_to_num(0.0)  # E = 0: 0 / 0 becomes 0
        # A token whose upper limit is below the largest lower limit cannot have the maximum. 1e-9
        # is more than the rounding errors of both limits.
        lower = lower.amax(-1, keepdim=True)
        norm = square.sqrt()  # upper limits, replaced by ||E|| where this may be the maximum
        may_be_largest = norm >= lower * (1 - 1e-9)
        eigenvalues = torch.linalg.eigvalsh(e[may_be_largest])
        norm[may_be_largest] = eigenvalues[..., -1].clamp_min(0.0)
        parts.append(norm.amax(-1))
    return torch.stack(parts).amax(0).sqrt()
