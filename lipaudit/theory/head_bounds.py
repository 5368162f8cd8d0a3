"""Upper bounds of the Jacobian norm of attention heads: ours, and those of plug-ins.

`ball_sharp` (ours) is a certified Lipschitz constant of a head on a ball around X. On the way from
X to X', ||X' - X||_F <= r, the Jacobian J of O grows by the second derivative:

    ||J(X')|| <= ||J(X)|| + integral_0^r C(rho) d rho,
    C(rho) = max ||D^2 O(X'')[F, F]||_F over ||X'' - X||_F <= rho and ||F||_F = 1,

for <g, D^2 O[E, F]> is a symmetric form in E and F whatever g is, and largest where E = F. C grows
with rho: the integral is at most a sum over panels, each with C at its end.

With f_j the rows of F, P_i as weights of means and covariances over the keys, and

    sigma_ij = <z_j, f_i> + <u_i, f_j>,    u_i = s W_K q_i,    z_j = s W_Q k_j,    A = s W_Q W_K^T,

the changes of the logits, row i of D^2 O[F, F] is

    2 Cov_i(sigma_i, W_V^T f) + E_i[(sigma_i - E_i sigma_i)^2 (v - o_i)] + 2 Cov_i(f_i^T A f, v).

All of it is bounded by the squares x_j = ||f_j||^2, which add up to 1: row i by (H x)_i with a
matrix H >= 0. ||H x|| is convex in x, so it is largest where one x_j is 1: at a column of H.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.linalg import vector_norm

from lipaudit.errors import EvaluationError, LipauditError, UsageError, is_machine_error
from lipaudit.theory.block_norms import affine_rows
from lipaudit.theory.bounds.castin import castin
from lipaudit.theory.bounds.hu import hu
from lipaudit.theory.bounds.mean_field import mean_field
from lipaudit.theory.bounds.record import Bound, load_bounds
from lipaudit.theory.bounds.sharp import SHARP
from lipaudit.theory.heads import Heads, are_affine, factor, projections, unit_values
from lipaudit.theory.ingredients import Ingredients, Tokens, squared_distances
from lipaudit.theory.matrix_norms import spectral_norm

if TYPE_CHECKING:
    from jaxtyping import Bool

    from lipaudit.theory.block_norms import OfHeads
    from lipaudit.theory.heads import PerHead
    from lipaudit.theory.ingredients import Maps, OfRows

    Flags = Bool[Tensor, "batch heads n 1"]

ROUNDING = 1e-12
"""Every bound is raised by this share: more than float64 rounding takes from it.

It is 9000 u. A bound is a product of a few norms, each from sums of n = N, D or d terms: off by
n u at worst, which this covers for small layers, and by about n^1/2 u otherwise.
"""

PANELS = 8
"""Number of panels of the integral over the radius; more would tighten the bound by a few %."""

BALANCES = (0.5, 1.0, 2.0)
"""Weights tried between a query's move and its keys' moves; the best one of a head is used."""


@torch.inference_mode()
def head_bounds(heads: Heads, *, bounds: Iterable[Bound] | None = None) -> dict[str, PerHead]:
    """Return the bounds of every head, and the quantities that they are computed from, in float64.

    The quantities are `p_norm` ||P||, `softmax_norm_max` max_i ||M(P_i)|| over the rows of P with
    M(p) = diag(p) - p p^T, `x_norm` the spectral norm of X (of [X 1] if a projection has a bias),
    and `radius` R = max_i ||x_i||. A bound that does not apply to a head is NaN: bounds in
    `AFFINE_ONLY` apply to affine self-attention only, and hu not to very small tokens.

    Args:
        heads: all heads of a layer, any kind, any precision.
        bounds: records of those that are computed; by default all.

    Raises:
        EvaluationError: tokens, queries, keys or values are not finite; or the function of a bound
            fails, or returns anything but floats of shape (batch, heads).

    Examples:
        >>> from lipaudit.theory.heads import affine_heads
        >>> eye, x = torch.eye(2)[None], torch.tensor([[[3.0, 4.0]]])
        >>> head_bounds(affine_heads(x, eye, eye, eye))["sharp"]
        tensor([[1.0000]], dtype=torch.float64)
    """
    if bounds is None:
        bounds = load_bounds().values()
    records = list(bounds)
    if len(heads.q) > 1 and not heads.fits_memory:
        # Attention maps too large to be stored for all batch rows: one row at a time.
        rows = []
        for b in range(len(heads.q)):
            rows.append(head_bounds(heads.row(b), bounds=records))
        return _concatenate(rows, axis=0)
    heads = heads.to(torch.float64)
    _require_finite(heads)
    tokens = Tokens(heads)
    # J is proportional to the values. Bounds are computed for values of about size one, so that
    # nothing overflows, and multiplied by `size` at the end.
    heads, size = unit_values(heads)
    parts = []
    for group in split_heads(heads):
        parts.append(_compute_group(Ingredients(group, tokens), records))
    whole = _concatenate(parts, axis=1)
    size = size.to(heads.v.device)
    for bound in records:
        whole[bound.name] = whole[bound.name] * size
    return whole


def _require_finite(heads: Heads) -> None:
    """Refuse heads whose tokens, queries, keys or values are not finite.

    Raises:
        EvaluationError: an entry is infinite or NaN.
    """
    for name in ("x", "q", "k", "v"):
        # A sum with an infinite or NaN entry is not finite: no mask of all entries is needed.
        if not getattr(heads, name).sum().isfinite():
            raise EvaluationError(
                f"The attention layer has infinite or undefined {name} entries.",
                "Look for overflow in the model: run it in float32 or float64.",
            )


def _compute_group(ingredients: Ingredients, bounds: Iterable[Bound]) -> dict[str, Tensor]:
    """Return the bounds of some heads, and the quantities that they are computed from, by name.

    Raises:
        EvaluationError: P has an undefined entry, or the function of a bound fails.
    """
    p_norm = ingredients.p_norm
    if not p_norm.isfinite().all():
        raise EvaluationError(
            "The attention map has undefined entries.",
            "Look for NaN or inf in the mask, the position bias or the scale of the logits.",
        )
    terms = {
        "p_norm": p_norm,
        "softmax_norm_max": ingredients.softmax_norm_max,
        "x_norm": ingredients.tokens.norm.expand_as(p_norm),
        "radius": ingredients.tokens.radius.expand_as(p_norm),
    }
    for bound in bounds:  # raised by more than the rounding errors of float64
        terms[bound.name] = _compute(bound, ingredients) * (1 + ROUNDING)
    return terms


def _concatenate(parts: list[dict[str, Tensor]], axis: int) -> dict[str, Tensor]:
    """Join the tensors of each name along the batch rows (0) or the heads (1)."""
    whole = {}
    for name in parts[0]:
        whole[name] = torch.cat([part[name] for part in parts], axis)
    return whole


def split_heads(heads: Heads) -> Iterator[Heads]:
    """Yield groups of the heads of a layer, so that computations on a group fit into memory.

    The largest tensor of a group has about `map_entries` numbers.
    """
    batch, count, n, d = heads.q.shape
    m, dv = heads.v.shape[2:]
    # The largest temporary of one head on one batch row is P, n x m.
    entries = n * m
    # Affine heads have one Jacobian dq/dx for all tokens, and one dv/dx. In all other heads, for
    # example with a rotary position or qk-norm, every token has Jacobians of its own: the largest
    # temporaries are d x d for each query, and d_v x d for each key (values times keys).
    if not are_affine(heads):
        entries = max(n * m, n * d * d, m * d * dv)
    policy = heads.policy
    for index in policy.chunks(count, batch * entries, policy.map_entries):
        yield heads.pick(index)


def _compute(bound: Bound, ingredients: Ingredients) -> Tensor:
    """Return the values of a bound, (batch, heads), in float64.

    Raises:
        EvaluationError: the function of the bound fails, or does not return floats of shape
            (batch, heads).
    """
    try:
        values = ingredients.once(bound.compute)
        _require_floats(values, ingredients.heads.q.shape[:2])
    except Exception as error:
        # Errors of memory or device are not the bound's fault and stay as they are. An OSError is
        # about a file that the function of the bound opens.
        machine = is_machine_error(error) and not isinstance(error, OSError)
        if isinstance(error, LipauditError) or machine:
            raise
        reason = f"{type(error).__name__}: {error}"
        raise EvaluationError(f"the bound {bound.name} failed: {reason}", bound.remedy) from error
    return values.to(torch.float64)


def _require_floats(values: object, shape: torch.Size) -> None:
    """Refuse a result of a bound that is not a tensor of floats in the expected shape."""
    returned: object = type(values).__name__
    if isinstance(values, Tensor):
        if values.shape == shape and values.is_floating_point():
            return
        returned = tuple(values.shape)
    raise TypeError(f"returned {returned}, not floats of shape {tuple(shape)} (batch, heads)")


@torch.inference_mode()
def ball_sharp(heads: Heads, r: float, *, sharp: PerHead | None = None) -> PerHead:
    """Return a Lipschitz constant of every head on the ball ||X' - X||_F <= r.

    The constant holds with any mask or position bias that does not depend on X. At r = 0 it equals
    `sharp`, our bound at X. It grows linearly with r at first, and like a power of r once the
    logits move by 1 and more.

    Args:
        heads: self-attention with affine (or constant) projections; all other heads give NaN.
        r: radius, in the Frobenius norm over all tokens of a sample (of a window).
        sharp: the bound at X; computed if None.

    Raises:
        UsageError: r is negative or NaN.
    """
    require_radius(r)
    if heads.x_kv is not None or not are_affine(heads):  # the bound is not proven for them
        return heads.q.new_full(heads.q.shape[:2], torch.nan, dtype=torch.float64)
    heads = heads.to(torch.float64)
    if sharp is None:
        sharp = head_bounds(heads, bounds=[SHARP])["sharp"]
    if r == 0:
        return sharp
    # ||J(X')|| <= ||J(X)|| + growth. The growth is computed for values of size one, and is
    # proportional to their size.
    unit, size = unit_values(heads)
    parts = [bound_growth(group, r) for group in split_heads(unit)]
    growth = torch.cat(parts, 1)
    return sharp + (1 + ROUNDING) * size.to(growth) * growth


def require_radius(r: float) -> None:
    """Refuse a radius that is negative or NaN.

    Raises:
        UsageError: it is.
    """
    if not r >= 0:
        raise UsageError(f"the radius of a ball must be 0 or more: {r}")


def bound_growth(heads: Heads, r: float) -> Tensor:
    """Bound the growth of ||J|| on the ball of radius r around X, (batch, heads).

    The growth is at most the integral of C(rho) for rho from 0 to r, where C(rho) is the largest
    second derivative of the head's output on the ball of radius rho. The integral is bounded by a
    sum over `PANELS` equal intervals of rho.
    """
    point = read_point(heads)
    curvatures = []
    for panel in range(PANELS):
        # C grows with the radius, so its value at the end of a panel bounds it on the panel.
        end = r * (panel + 1) / PANELS
        curvatures.append(bound_curvature(point, bound_moves(point, end)))
    integral = r / PANELS * torch.stack(curvatures).sum(0)
    # Where a number overflowed, inf - inf or 0 inf may have made a NaN: there is no bound.
    return integral.nan_to_num(nan=torch.inf, posinf=torch.inf)


@torch.inference_mode()
def ball_size_bounds(heads: Heads, r: float) -> dict[str, PerHead]:
    """Return hu, castin and mean_field on the ball ||X' - X||_F <= r.

    castin and mean_field hold for all inputs with every ||x_i|| <= R + r, R = max_i ||x_i|| at X.
    All three are NaN for heads that are not affine self-attention (`AFFINE_ONLY`). hu is NaN also
    if N (N + 1) (||X||_F + r)^2 < sqrt N for N tokens.

    Args:
        heads: all heads of a layer, any kind.
        r: radius, as in `ball_sharp`.
    """
    # The bounds are proportional to the values V = X W_V. So they are computed for values divided
    # by `size` (about one), and multiplied by it: nothing overflows on the way. 1 + ROUNDING is
    # more than the relative rounding error of this float64 computation.
    heads, size = unit_values(heads.to(torch.float64))
    ingredients = Ingredients(heads, Tokens(heads))
    size = (1 + ROUNDING) * size.to(heads.v.device)
    return {bound.__name__: bound(ingredients, r) * size for bound in (hu, castin, mean_field)}


@dataclass(frozen=True)
class BallPoint:
    """What is known at X, the centre of all balls, and which of two limits each row uses.

    Logit ij has the gradient z_j = s W_Q k_j in token i and u_i = s W_K q_i in token j, and
    A = s W_Q W_K^T. E_i is the mean over the keys j with the weights P_ij.
    """

    p: Maps  # 0 where masked, at least the smallest number elsewhere
    z: Maps  # ||z_j - E_i z||
    w: Maps  # ||v_j - o_i||, 0 where masked
    u: OfRows  # ||u_i||
    wv: OfHeads  # ||W_V||
    a: OfHeads  # ||A||
    # `bound_moves`: within rho of X, log P_ij grows by at most slope rho + bend ||A|| rho^2.
    slope: Maps
    bend: Maps
    # `bound_moves`: variances are bounded with h = 2 P (1 - P) where True, else with h = P.
    one_hot: Flags
    # `_bound_weighted_variance`: bounded by `bound_weights` where True, else with the largest w.
    uneven: Flags


def read_point(heads: Heads) -> BallPoint:
    """Return the quantities at X from which `bound_moves` derives limits on every ball around X.

    E_i is the mean over the keys j with the weights P_ij of the attention map. Logit ij has the
    gradient z_j = s W_Q k_j in token i and u_i = s W_K q_i in token j. The quantities are P, the
    deviations ||z_j - E_i z|| and ||v_j - o_i||, the norms ||u_i||, ||W_V|| and
    ||A|| = ||s W_Q W_K^T||, the growth of log P_ij (`slope`, `bend`), and which of two limits each
    row uses for a variance (`one_hot`) and for a weighted variance (`uneven`).
    """
    ingredients = Ingredients(heads, Tokens(heads))
    centred = ingredients.centred
    rows = affine_rows(ingredients)
    visible = heads.visible(0, centred.p.shape[2])
    # P is needed as an upper limit. An entry that underflowed to 0 is replaced by the smallest
    # positive number; masked entries stay 0 on every ball.
    tiny = torch.finfo(centred.p.dtype).tiny
    p = centred.p.clamp_min(tiny) * visible
    # z: ||z_j - E_i z||, how fast logit ij changes against its row's mean if token i moves.
    z = _distances(p @ rows.z, rows.z)
    # w: ||v_j - o_i||, how far output i moves if P_ij changes.
    w = centred.w2.sqrt() * visible
    # a: ||A||, which bounds how fast z_j and u_i change if a token moves. Computed as
    # |s| ||R_Q R_K^T|| with the small square matrices R^T R = W^T W.
    to_q, to_k, _ = projections(heads)
    a = spectral_norm(factor(to_q) @ factor(to_k).mT)
    a = centred.s.abs() * a[..., None]
    # On the ball of radius rho, log P_ij grows by at most slope rho + bend ||A|| rho^2.
    slope, bend = _log_growth(p, z, rows.u)
    one_hot, uneven = _choose_limits(p, w)
    return BallPoint(
        p=p,
        z=z,
        w=w,
        u=rows.u,
        wv=rows.wv,
        a=a,
        slope=slope,
        bend=bend,
        one_hot=one_hot,
        uneven=uneven,
    )


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ||a_i - b_j|| of all pairs of rows, (batch, heads, rows of a, rows of b)."""
    a2 = a.square().sum(-1, keepdim=True)
    b2 = b.square().sum(-1, keepdim=True)
    return squared_distances(a, b, a2, b2).sqrt()


def _choose_limits(p: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Choose for every query between two limits of a variance, and of a weighted variance.

    Take any vectors f_j and their mean E_i f = sum_j P_ij f_j. All limits are sums
    sum_j h_ij ||f_j||^2 with some h >= 0:

    * the variance sum_j P_ij ||f_j - E_i f||^2: either h = P or h = 2 P (1 - P);
    * the weighted variance sum_j P_ij w_ij ||f_j - E_i f||^2: either the h of the variance times
      max_j w_ij (`even`), or the h of `bound_weights`, which keeps every w_ij (`uneven`).

    Both limits hold always. Each query uses the one that is sharper at X by a simple measure, on
    all balls: one choice for all radii, so that limits grow with the radius.

    Args:
        p: P at X.
        w: the weights w_ij = ||v_j - o_i||.

    Returns:
        Where h = 2 P (1 - P) is used (`one_hot`: it is sharper in rows that are nearly one-hot),
        and where `uneven` is used; both (batch, heads, n, 1).
    """
    # Of the variance, `bound_moves` reads max_j h_ij first of all: the smaller one is sharper.
    twice = 2 * p * _sum_others(p)
    largest = p.amax(-1, keepdim=True)
    one_hot = twice.amax(-1, keepdim=True) < largest
    even = torch.where(one_hot, twice, p) * w.amax(-1, keepdim=True)
    uneven, _ = bound_weights(centre=p, p=p, w=w)
    # Of the weighted variance, `bound_curvature` reads every h_ij: the shorter row is sharper.
    is_shorter = vector_norm(uneven, dim=-1) < vector_norm(even, dim=-1)
    return one_hot, is_shorter[..., None]


def _log_growth(p: Tensor, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return a (`slope`) and b (`bend`), which bound how fast each P_ij can grow around X.

    On a ball of radius rho, log P_ij grows by at most a_ij rho + b_ij ||A|| rho^2 with
    A = s W_Q W_K^T.

    Symbols: token l moves by e_l, and sum_l ||e_l||^2 <= rho^2. Logit ij has the gradient
    z_j = s W_Q k_j in token i, and u_i = s W_K q_i in token j. E_i is the mean over the keys with
    the weights P_i. For a fixed pair ij, c_l = delta_jl - P_il. The proof:

    * exp is convex. So log P_ij grows by at most the change of logit ij less the mean change of
      the logits of row i. This difference has a linear and a quadratic part in the moves.
    * The linear part is <z_j - E_i z, e_i> + <u_i, sum_l c_l e_l>. The coefficients are c_l u_i
      for e_l, l != i, and z_j - E_i z + c_i u_i for e_i. So it is at most a_ij rho with
      a_ij^2 = ||z_j - E_i z||^2 + ||u_i||^2 sum_l c_l^2 + 2 ||z_j - E_i z|| ||u_i|| |c_i|.
    * The quadratic part is e_i^T A sum_l c_l e_l. With h^2 = sum_{l != i} c_l^2 it is at most
      ||A|| (|c_i| ||e_i||^2 + h ||e_i|| (rho^2 - ||e_i||^2)^1/2) <= b_ij ||A|| rho^2, where b_ij
      is the largest value of |c_i| x^2 + h x y for x^2 + y^2 = 1: the largest eigenvalue of
      [[|c_i|, h / 2], [h / 2, 0]].

    Args:
        p: P, (batch, heads, n, m).
        z: ||z_j - E_i z||, in the same shape.
        u: ||u_i||, (batch, heads, n, 1).

    Returns:
        a and b, (batch, heads, n, m).
    """
    others = _sum_others(p)  # 1 - P_ij
    # |c_i| is P_ii for every key j != i, and 1 - P_ii for j = i, (batch, heads, n, m).
    is_diagonal = torch.eye(p.shape[-1], dtype=torch.bool, device=p.device)
    diagonal = p.diagonal(0, -2, -1)[..., None]
    c_i = torch.where(is_diagonal, others, diagonal)
    # sum_l c_l^2 = (1 - P_ij)^2 + sum_{l != j} P_il^2
    square = others.square() + _sum_others(p.square())
    slope = z.square() + u.square() * square + 2 * z * u * c_i
    slope = slope.sqrt()
    # The eigenvalue is (|c_i| + (c_i^2 + h^2)^1/2) / 2, where c_i^2 + h^2 = sum_l c_l^2.
    bend = 0.5 * (c_i + square.sqrt())
    return slope, bend


def _sum_others(p: Tensor) -> Tensor:
    """Return sum_{l != j} P_il, without cancellation."""
    eye = torch.eye(p.shape[-1]).to(p)
    return p @ (1 - eye)


@dataclass(frozen=True)
class BallLimits:
    """Upper limits on the ball of radius rho."""

    p: Tensor  # P_ij
    spread: Tensor  # h with sum_j P_ij ||f_j - E_i f||^2 <= sum_j h_ij ||f_j||^2
    u: Tensor  # ||u_i||
    z: Tensor  # (E_i ||z - E_i z||^2)^1/2
    v: Tensor  # (E_i ||v - o_i||^2)^1/2
    shift: Tensor  # how far v_j - o_i moves


def bound_moves(point: BallPoint, rho: float) -> BallLimits:
    """Return upper limits that hold for all tokens within rho of X: of P, gradients and values.

    Logit ij has the gradient z_j = s W_Q k_j in token i, and u_i = s W_K q_i in token j. Token j
    moves by f_j, and sum_j ||f_j||^2 <= rho^2. E_i, deviations and covariances are those over the
    keys with the weights P_i.

    Args:
        point: norms and deviations at X: `u` is ||u_i||, `z` is ||z_j - E_i z||, `w` is
            ||v_j - o_i||, `wv` is ||W_V||, `a` is ||s W_Q W_K^T||. `slope` and `bend` say how fast
            log P grows, `one_hot` which of two limits of a variance a row uses.
        rho: radius of the ball.
    """
    # P_ij <= 1 grows by a factor of at most exp(slope_ij rho + bend_ij ||A|| rho^2): see
    # `_log_growth`.
    bend = point.bend * point.a
    log_p = point.p.log() + point.slope * rho + bend * (rho * rho)
    p = log_p.clamp_max(0.0).exp()
    # The variance of the moves, sum_j P_ij ||f_j - E_i f||^2, is at most
    # sum_j spread_ij ||f_j||^2 for two choices of `spread`: P, as a variance is at most the mean
    # square; and 2 P (1 - P), as the variance equals sum_{j < l} P_ij P_il ||f_j - f_l||^2.
    others = _sum_others(p).clamp_max(1.0)
    spread = torch.where(point.one_hot, 2 * p * others, p)
    # The moves f_j have a deviation of at most rho `widest`.
    widest = spread.amax(-1, keepdim=True).sqrt()
    u = point.u + rho * point.a  # ||u_i||
    # Deviations of the z_j and the v_j. Those around the means at X are no smaller than those
    # around the true means. The moves add at most rho `widest` times ||A||, or ||W_V||.
    z = _deviation(p, point.z) + rho * point.a * widest
    v = _deviation(p, point.w) + rho * point.wv * widest
    # v_j - o_i moves by at most rho ||W_V|| through v_j, and through o_i by rho times the length
    # of its derivative in a direction f of length one, which `output` bounds:
    #     sum_j P_ij W_V^T f_j + Cov_i(sigma_i, v),   sigma_ij the change of logit ij.
    # The sum is at most ||W_V|| (max_j P_ij)^1/2 long. The covariance is at most the deviation of
    # sigma_i, z + u `widest`, times that of the values, v.
    largest = p.amax(-1, keepdim=True)
    output = point.wv * largest.sqrt() + (z + u * widest) * v
    shift = rho * (point.wv + output)
    return BallLimits(p=p, spread=spread, u=u, z=z, v=v, shift=shift)


def bound_curvature(point: BallPoint, on: BallLimits) -> PerHead:
    """Bound the largest second derivative of the output O on a ball, given upper limits there.

    Tokens move by f_j with squares x_j = ||f_j||^2 that sum to 1. The variance of the f_j under
    row i of P is at most y_i = sum_j spread_ij x_j. The second derivative of output i has three
    terms. With A = s W_Q W_K^T and the change sigma_ij of logit ij, whose standard deviation is at
    most z x_i^1/2 + u y_i^1/2, they are at most

        2 Cov_i(sigma_i, W_V^T f):  2 ||W_V|| (z x_i^1/2 + u y_i^1/2) y_i^1/2,
        E_i (sigma_i - E_i sigma_i)^2 (v - o_i):  (z^2 x_i + 2 z u (x_i y_i)^1/2) max ||v_j - o_i||
            + u^2 times the variance of the f_j with the weights ||v_j - o_i||,
        2 Cov_i(f_i^T A f, v):  2 ||A|| (x_i y_i)^1/2 times the deviation of the v_j.

    Their sum is at most sum_j columns_ij x_j + diagonal_i x_i + 2 mixed_i (x_i y_i)^1/2. With
    2 (x_i y_i)^1/2 <= t x_i + y_i / t it is at most (H x)_i for a matrix H. As the x_j sum to 1,
    ||H x|| is at most the length of the longest column of H.

    Args:
        point: quantities at the centre X: `w` is ||v_j - o_i||, (batch, heads, n, m); `wv` is
            ||W_V||, `a` is ||A||, (batch, heads, 1, 1).
        on: upper limits on the ball: `spread`, (batch, heads, n, m); for each query, (batch,
            heads, n, 1), the deviations `z` and `v` of the z_j = s W_Q k_j and of the values,
            `u` of ||s W_K q_i||, and `shift`, how far v_j - o_i moves.
    """
    longest = point.w.amax(-1, keepdim=True) + on.shift  # max ||v_j - o_i|| on the whole ball
    # The coefficient of 2 (x_i y_i)^1/2, from all three terms, (batch, heads, n, 1).
    mixed = point.wv * on.z + longest * on.z * on.u + point.a * on.v
    # The coefficient of x_i, from the second term, (batch, heads, n, 1).
    diagonal = longest * on.z.square()
    # The coefficients of x_j from y_i = sum_j spread_ij x_j, in the first and the second term,
    # (batch, heads, n, m). In the second one, the weights ||v_j - o_i|| are at most w_ij, their
    # values at X, plus `shift`: first the part with `shift`, then the part with w_ij.
    columns = 2 * point.wv * on.u + on.shift * on.u.square()
    columns = columns * on.spread
    columns = columns + on.u.square() * _bound_weighted_variance(point, on)
    limits = []
    for t in BALANCES:  # every t > 0 gives a limit: the smallest one counts
        # 2 mixed (x_i y_i)^1/2 <= mixed (t x_i + y_i / t), y_i = sum_j spread_ij x_j. So
        # H = columns + mixed spread / t, with diagonal + t mixed added to its diagonal.
        h = columns + mixed / t * on.spread
        on_diagonal = diagonal + t * mixed
        h.diagonal(0, -2, -1).add_(on_diagonal[..., 0])
        lengths = vector_norm(h, dim=-2)  # of the columns
        limits.append(lengths.amax(-1))
    return torch.stack(limits).amin(0)


def _deviation(p: Tensor, lengths: Tensor) -> Tensor:
    """Return (sum_j P_ij lengths_ij^2)^1/2, a standard deviation under P_i, (..., n, 1)."""
    variance = (p * lengths.square()).sum(-1, keepdim=True)
    return variance.sqrt()


def _bound_weighted_variance(point: BallPoint, on: BallLimits) -> Tensor:
    """Return h, (batch, heads, n, m), that bounds a weighted variance by sum_j h_ij ||f_j||^2.

    The variance is sum_j P_ij w_ij ||f_j - E_i f||^2 of any vectors f_j, with their mean
    E_i f = sum_j P_ij f_j. P is the attention map anywhere on a ball around X, and the weights
    w_ij = ||v_j - o_i|| are those at X. There are two limits: `even` is that of the variance
    without weights (`spread`) times the largest w_ij of the row; `uneven` keeps each w_ij
    (`bound_weights`). Each row uses the one that is sharper at X.

    Args:
        point: P, w, and which rows use `uneven`.
        on: upper limits of P on the ball, and `spread`, all (batch, heads, n, m).
    """
    even = on.spread * point.w.amax(-1, keepdim=True)
    uneven, holds = bound_weights(centre=point.p, p=on.p, w=point.w)
    # On a large ball the formula of `uneven` may not hold: `even` is the limit. But a limit must
    # not fall as the radius grows, and on a smaller ball `uneven` may be above this `even`. So the
    # larger of both is used. Where the formula does not hold, `uneven` is p (w + |d|), its value
    # at D = m / 2: no less than on smaller balls.
    uneven = torch.where(holds, uneven, torch.maximum(uneven, even))
    return torch.where(point.uneven, uneven, even)


def bound_weights(centre: Tensor, p: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers h_ij that bound a weighted variance, and in which rows i they are valid.

    The weighted variance of any vectors f_j is sum_j P_ij w_ij ||f_j - E_i f||^2, where
    E_i f = sum_j P_ij f_j is their mean. It is at most sum_j h_ij ||f_j||^2 for every P <= p with
    rows that sum to 1. The formula:

        m_i  = sum_j centre_ij w_ij           the mean weight at the centre
        d_ij = w_ij - m_i,   D_i = sum_j p_ij |d_ij|
        h_ij = p_ij (w_ij + |d_ij| D_i / (m_i - D_i)),   valid where D_i <= m_i / 2.

    Args:
        centre: P at the centre of the ball.
        p: upper limits of P on the ball.
        w: the weights, >= 0.
    """
    # Proof for one coordinate t of f, with E for means over P_i. As w = m + d,
    #     E w (t - E t)^2 = E w t^2 - 2 E t E w t + E w (E t)^2
    #                     = E w t^2 - 2 E t E d t - (m - E d) (E t)^2
    #                    <= E w t^2 + (E d t)^2 / (m - E d),     the largest value over E t.
    # (E d t)^2 <= E |d| E |d| t^2 by Cauchy-Schwarz, and E d <= E |d| <= D.
    mean = (centre * w).sum(-1, keepdim=True)  # m
    distance = (w - mean).abs()  # |d|
    total = (p * distance).sum(-1, keepdim=True)  # D
    holds = 2 * total <= mean
    share = torch.where(holds, total / (mean - total), 1.0)
    return p * (w + distance * share), holds
