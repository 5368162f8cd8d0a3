"""The softmax Jacobian M(p) = diag(p) - p p^T of one row p of an attention map.

p_(1) >= p_(2) >= ... is the sorted row, p_(n+1) = 0. Every function takes rows over the last axis
(any leading dimensions), expects float64, and treats a row of zeros (a padded query) as M = 0. 1 -
p_(k) is always computed as the sum of the other entries: for nearly one-hot rows the difference
would have no correct digits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.theory import SHORT_ROW

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    PerRow = Float[Tensor, "*rows"]

LEFT_OUT = -1
UNIFORM = 0
INTERMEDIATE = 1
CATEGORICAL = 2
SHARES = {"uniform": UNIFORM, "intermediate": INTERMEDIATE, "categorical": CATEGORICAL}
_SECULAR_STEPS = 8  # three are enough from g_1, nearly always


def row_maxima(
    p: Float[Tensor, "*maps n m"],
) -> tuple[Float[Tensor, "*maps"], Float[Tensor, "*maps"]]:
    """Return max_i g_1(P_i) and max_i ||M(P_i)|| over the rows P_i of each attention map.

    M(p) = diag(p) - p p^T is the Jacobian of softmax. g_1(p) = p_(1) (1 - p_(1) + p_(2)) >= ||M||
    needs the two largest entries only. If a map has a NaN, both maxima are NaN.

    Examples:
        >>> row_maxima(torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0]], dtype=torch.float64))
        (tensor(0.5000, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    rows = _sort_rows(p)
    norms = _secular_root(rows)  # ||M(P_i)||
    return rows.g1.amax(-1), norms.amax(-1)


def entropy(p: Float[Tensor, "*rows n"]) -> PerRow:
    """Return -sum_j p_j log p_j, in nats; exp of it is the effective support of the row.

    Examples:
        >>> entropy(torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])).exp()
        tensor(4.)
    """
    tiny = torch.finfo(p.dtype).tiny
    # p log p is 0 for p = 0: with log 0 = -inf it would be NaN. torch.special.entr does the same,
    # nearly three times slower.
    terms = p.clamp_min(tiny).log_().mul_(p)
    return 0.0 - terms.sum(-1)  # 0, not -0, for a row with one entry


class RowProfile(NamedTuple):
    """Figures of each row, from which its statistics follow.

    Attributes:
        first, second: p_(1) and p_(2).
        g1: g_1.
        gk: g_k.
        following: p_(k+1).
        norm: ||M||.
        entropy: in nats.
        keys: how many the query can see.
    """

    first: PerRow
    second: PerRow
    g1: PerRow
    gk: PerRow
    following: PerRow
    norm: PerRow
    entropy: PerRow
    keys: Int[Tensor, "*rows"]


def profile_rows(
    p: Float[Tensor, "*rows n"], k: int = 10, *, keys: Int[Tensor, "*rows"] | None = None
) -> RowProfile:
    """Return the figures of each row of an attention map that `row_statistics` needs.

    The figures are p_(1), p_(2), g_1, g_k, p_(k+1), ||M||, the entropy and the number of keys.
    p_(k) is the k-th largest entry of a row p, g_k = p_(k) (1 - p_(k) + p_(k+1)), and
    M = diag(p) - p p^T is the Jacobian of softmax.

    Args:
        p: rows of probabilities.
        k: the k of g_k, >= 1.
        keys: number of keys that each query can see. By default it is the number of entries above
            0: too few if an entry has underflowed.

    Examples:
        >>> profile_rows(torch.tensor([[0.5, 0.25, 0.25]]), k=2).gk
        tensor([0.2500])
    """
    rows = _sort_rows(p, k)  # ascending: the k-th largest entry is the k-th from the end
    kth = rows.p[..., -k]
    following = rows.p[..., -k - 1]
    if keys is None:
        keys = p.count_nonzero(-1)
    gk = rows.g1
    if k > 1:
        # 1 - p_(k) as the sum of the row less p_(k), which is at most 1/2: no digits cancel.
        gk = _g(kth, rows.first + rows.others - kth, following)
    return RowProfile(
        first=rows.first,
        second=rows.second,
        g1=rows.g1,
        gk=gk,
        following=following,
        norm=_secular_root(rows),
        entropy=entropy(p),
        keys=keys,
    )


def row_statistics(profile: RowProfile, *, gamma: float = 0.1) -> dict[str, Tensor]:
    """Return the statistics of each row of an attention map; NaN where a row has none.

    The statistics are p_(1), p_(2), g_1, ||M||, g_1/||M||, g_1/g_k, the entropy, the entropy over
    that of a uniform row, exp(entropy) (the effective support), and 0 or 1 for each regime. p_(k)
    is the k-th largest entry, g_k = p_(k) (1 - p_(k) + p_(k+1)), and M = diag(p) - p p^T.

    A row of n keys is intermediate (fragile) if g_1 > max(gamma, 2 / n): a uniform row has
    g_1 = 1 / n, and no row near it is fragile. Other rows are categorical if p_(1) > 1/2, else
    uniform.

    A row of zeros (a padded query) has no statistics. Rows with ||M|| = 0 have no g_1/||M||, rows
    with at most k entries no g_1/g_k, rows with one key no normalised entropy, and rows with at
    most 8 keys no regime.

    Args:
        profile: profile of the rows, for some k > 1.
        gamma: threshold of the regimes, 0 < gamma < 1/4.

    Examples:
        >>> uniform = profile_rows(torch.full((1, 20), 0.05, dtype=torch.float64))
        >>> {name: float(row_statistics(uniform)[name]) for name in ("g1", "gk_ratio", "uniform")}
        {'g1': 0.05, 'gk_ratio': 1.0, 'uniform': 1.0}
    """
    keys = profile.keys
    g1 = profile.g1
    # The number of each row's regime: the codes of `SHARES`, or LEFT_OUT for no regime.
    regime = torch.where(profile.first > 0.5, CATEGORICAL, UNIFORM)
    threshold = (2 / keys).clamp_min(gamma)
    regime[g1 > threshold] = INTERMEDIATE
    # With few keys, 6 or fewer, a row with g_1 <= 2 / n may have p_(1) = 1/2: it is neither near
    # uniform nor near one-hot. SHORT_ROW, 8, leaves room.
    regime[keys <= SHORT_ROW] = LEFT_OUT
    statistics = {
        "top1": profile.first,
        "top2": profile.second,
        "g1": g1,
        "softmax_norm": profile.norm,
        "g1_ratio": _where(profile.norm > 0, g1 / profile.norm),
        # p_(k+1) is 0 in a row with at most k entries.
        "gk_ratio": _where(profile.following > 0, g1 / profile.gk),
        "entropy": profile.entropy,
        "entropy_normalized": _where(keys > 1, profile.entropy / keys.to(g1).log()),
        "support": profile.entropy.exp(),
    }
    for name, code in SHARES.items():
        is_in_regime = (regime == code).to(g1)
        statistics[name] = _where(regime != LEFT_OUT, is_in_regime)
    return {name: _where(keys > 0, value) for name, value in statistics.items()}


def _where(counts: Tensor, value: Tensor) -> Tensor:
    """Return the values of the rows that count, NaN elsewhere."""
    return value.masked_fill(~counts, torch.nan)


def _g(kth: Tensor, others: Tensor, following: Tensor) -> Tensor:
    """Return g_k = p_(k) (1 - p_(k) + p_(k+1)) of rows with the k-th largest entry p_(k).

    g_k bounds the k-th singular value of the softmax Jacobian ([Y25] Definition 1, Theorem 4).

    Args:
        kth: p_(k).
        others: 1 - p_(k), summed from the other entries.
        following: p_(k+1).
    """
    # g_k >= p_(k+1), with equality if p_(k) = p_(k+1). Rounding may take the product below it.
    return torch.maximum(kth * (others + following), following)


class _Ordered(NamedTuple):
    """Rows in ascending order."""

    p: Tensor
    first: Tensor  # p_(1)
    second: Tensor
    others: Tensor  # 1 - p_(1)
    g1: Tensor


def _sort_rows(p: Tensor, k: int = 1) -> _Ordered:
    """Sort rows in ascending order; return them with p_(1), p_(2), 1 - p_(1) and g_1.

    Rows are padded with zeros to k + 1 entries: the (k + 1)-th largest is 0 where there is none.
    """
    if p.shape[-1] <= k:
        p = F.pad(p, (0, k + 1 - p.shape[-1]))
    if p.device.type == "cpu":  # NumPy's vectorised sort takes a fifth of topk's time
        ascending = np.sort(p.detach().numpy(), axis=-1)
        p = torch.from_numpy(ascending)
    else:
        p = p.sort(-1).values
    first = p[..., -1]
    second = p[..., -2]
    others = p[..., :-1].sum(-1)
    g1 = _g(first, others, second)
    return _Ordered(p=p, first=first, second=second, others=others, g1=g1)


def _secular_root(rows: _Ordered) -> Tensor:
    """Return ||M(p)|| of each row, M = diag(p) - p p^T, to 5e-13 relative, in O(n) per row.

    ||M|| is the largest eigenvalue lambda of M, a root of its characteristic equation
    sum_j p_j / (p_j - lambda) = 0 between p_(2) and the upper bound g_1. It is computed as
    p_(2) + t, where `_step_secular` improves t step by step. The start is lambda = g_1, where
    t = (1 - p_(1)) (p_(1) - p_(2)).
    """
    gap = rows.first - rows.second
    start = rows.others * gap
    t = start
    for _ in range(_SECULAR_STEPS):
        before = t
        t = _step_secular(rows, gap, t)
        if not ((before - t).abs_() > 1e-6 * t).any():  # the next step squares the error
            break
    # start = 0: p_(1) = p_(2), and ||M|| = p_(2); or a one-hot row, and ||M|| = p_(2) = 0.
    norm = torch.where(start > 0, rows.second + t, rows.second)
    return torch.minimum(norm, rows.g1)  # ||M|| <= g_1, which rounding of the sum may exceed


def _step_secular(rows: _Ordered, gap: Tensor, t: Tensor) -> Tensor:
    """Improve t, where lambda = p_(2) + t is the largest eigenvalue of M = diag(p) - p p^T.

    lambda solves the characteristic equation sum_j p_j / (p_j - lambda) = 0. With
    r_j(t) = p_j / (lambda - p_j) the equation is sum_{j>1} r_j(t) = p_(1) / (gap - t), where j = 1
    is the largest entry.

    The left side has a pole at t = 0, near which Newton's method converges slowly. So one step
    replaces the left side by a function with this pole, c + b / t'. For
    b = t^2 sum_j r_j (1 + r_j) / lambda this has the same value and slope at t' = t, and is larger
    elsewhere. The better solution t' is the root of (c + b / t') (gap - t') = p_(1).

    Args:
        rows: the rows p, each in ascending order: p_(1), the largest entry, is last.
        gap: p_(1) - p_(2) of each row.
        t: the solution so far, one number per row.
    """
    tail = rows.p[..., :-1]  # all entries but p_(1)
    # lambda - p_j = t + p_(2) - p_j
    r = rows.second[..., None] - tail
    r += t[..., None]
    torch.div(tail, r, out=r)
    total = r.sum(-1)
    # b / t = t sum_j r_j (1 + r_j) / lambda, where sum_j r_j (1 + r_j) = ||r||^2 + sum_j r_j, and
    # c = sum_j r_j - b / t.
    b_over_t = torch.linalg.vector_norm(r, dim=-1).square_().add_(total)
    b_over_t.mul_(t / (rows.second + t))
    c = total - b_over_t
    b = b_over_t * t
    # (c + b / t') (gap - t') = p_(1) is c t'^2 + 2 half t' - b gap = 0 with
    # 2 half = p_(1) + b - c gap. Its positive root is b gap / (half + (half^2 + b gap c)^1/2).
    twice_half = rows.first + b
    half = twice_half.addcmul_(c, gap, value=-1).mul_(0.5)
    b_gap = b * gap
    root = half.square().addcmul_(b_gap, c).sqrt_()
    return b_gap / root.add_(half)
