"""The softmax Jacobian M(p) = diag(p) - p p^T of one row p of an attention map.

p_(1) >= p_(2) >= ... is the sorted row, p_(n+1) = 0. Every function takes rows over the last axis
(any leading dimensions), wants float64, and takes a row of zeros (a padded query) as M = 0.
1 - p_(k) is always the sum of the other entries: near one-hot rows the difference has no digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.errors import UsageError

LEFT_OUT, UNIFORM, INTERMEDIATE, CATEGORICAL = -1, 0, 1, 2
SHARES = {"uniform": UNIFORM, "intermediate": INTERMEDIATE, "categorical": CATEGORICAL}
_MIN_SUPPORT = 3  # g_1 of two visible keys tells nothing of how attention is spread
_SECULAR_STEPS = 4
_SECULAR_CLOSE = 1e-7


def g(p: Float[Tensor, "*rows n"], k: int = 1) -> Float[Tensor, "*rows"]:
    """Return g_k(p) = p_(k) (1 - p_(k) + p_(k+1)), [Y25] Definition 1.

    sigma_k(M) <= g_k <= p_(k) and sigma_{k-1}(M) >= p_(k) ([Y25] Theorem 4); g_1 >= ||M||, and
    g_1 <= 1/2. Differentiable almost everywhere.

    Args:
        p: rows of probabilities.
        k: 1 <= k; rows with fewer than k entries have g_k = 0.

    Example:
        >>> g(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.5, 0.25]]))
        tensor([0.5000, 0.0000, 0.3750])
    """
    if k < 1:
        raise UsageError(f"g_k is defined for k >= 1, not k = {k}")
    if k > p.shape[-1]:
        return p.new_zeros(p.shape[:-1])
    top, index = p.topk(min(k + 1, p.shape[-1]), -1)
    others = p.scatter(-1, index[..., k - 1 : k], 0.0).sum(-1)
    following = top[..., k] if k < p.shape[-1] else 0.0
    return top[..., k - 1] * (others + following)


def softmax_norm(p: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Return ||M(p)|| (spectral), exact to 5e-13 relative, in O(n) per row.

    ||M|| is the root in [p_(2), g_1] of the secular equation sum_j p_j / (p_j - lambda) = 0.
    Each step keeps the pole p_(1) and replaces the other terms by c + b / (lambda - p_(2)), which
    lies above them and touches them at the current lambda: starting at g_1 the iterates fall to
    the root and never pass it. Ties p_(1) = p_(2) give p_(1), one-hot rows 0.

    Example:
        >>> p = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
        >>> softmax_norm(p)
        tensor([0.3344, 0.0000], dtype=torch.float64)
    """
    return _secular_root(_top(p))


def row_maxima(
    p: Float[Tensor, "*maps n m"],
) -> tuple[Float[Tensor, "*maps"], Float[Tensor, "*maps"]]:
    """Return max_i g_1(P_i) and max_i ||M(P_i)|| over the rows of each map.

    The secular equation is solved only for rows whose g_1 reaches every row's p_(2) and
    p_(1) (1 - p_(1)), which ||M|| cannot fall under: a few rows of each map.

    Example:
        >>> row_maxima(torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.5, 0.0]], dtype=torch.float64))
        (tensor(0.5000, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    top = _top(p)
    g1 = top.g1
    lower = torch.maximum(top.second, top.first * top.others).amax(-1, keepdim=True)
    left, norm = g1 >= lower, g1.clone()
    norm[left] = _secular_root(_Top(*(value[left] for value in top)))
    return g1.amax(-1), norm.masked_fill(~left, 0.0).amax(-1)


def entropy(p: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows"]:
    """Return -sum_j p_j log p_j, in nats; exp of it is the effective support of the row.

    Example:
        >>> entropy(torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])).exp()
        tensor(4.)
    """
    return torch.special.entr(p).sum(-1)


def support(p: Float[Tensor, "*rows n"]) -> Int[Tensor, "*rows"]:
    """Return how many entries are not zero: the keys that the query can see (i + 1 if causal)."""
    return p.count_nonzero(-1)


def regimes(p: Float[Tensor, "*rows n"], gamma: float = 0.1) -> Int[Tensor, "*rows"]:
    """Return the regime of each row: UNIFORM, INTERMEDIATE, CATEGORICAL, or LEFT_OUT.

    A row is intermediate, the fragile kind, iff g_1 > max(gamma, 2 / support); otherwise the side
    of 1/2 on which p_(1) lies names it ([Y25] eq. 10). Rows with fewer than 3 keys are left out:
    a uniform row over m keys has g_1 = 1/m, so short rows would all look fragile.

    Args:
        p: rows of probabilities.
        gamma: threshold of g_1, 0 < gamma < 1/4.

    Raises:
        UsageError: gamma is outside (0, 1/4), where the two other regimes would overlap.

    Example:
        >>> regimes(torch.eye(4) * 0.96 + 0.01).unique() == CATEGORICAL
        tensor([True])
    """
    return _regimes(_top(p), support(p), gamma)


def row_statistics(
    p: Float[Tensor, "*rows n"], *, k: int = 10, gamma: float = 0.1
) -> dict[str, Float[Tensor, "*rows"]]:
    """Return what is known of each row, NaN where it does not count.

    p_(1), p_(2), g_1, ||M||, g_1/||M||, g_1/g_k, the entropy, that of a uniform row as its unit,
    exp of it (the effective support), and 0 or 1 for each regime. A row of zeros (a padded query)
    counts nowhere; rows with ||M|| = 0 have no ratio, rows with at most k keys no g_1/g_k, rows
    with one key no normalised entropy, rows with fewer than 3 no regime.

    Args:
        p: rows of probabilities.
        k: the k of g_1/g_k, > 1.
        gamma: threshold of the regimes, 0 < gamma < 1/4.

    Example:
        >>> uniform = torch.full((1, 20), 0.05, dtype=torch.float64)
        >>> {name: float(row_statistics(uniform)[name]) for name in ("g1", "gk_ratio", "uniform")}
        {'g1': 0.05, 'gk_ratio': 1.0, 'uniform': 1.0}
    """
    keys, top, spread = support(p), _top(p, k), entropy(p)
    norm, kind = _secular_root(top), _regimes(top, keys, gamma)
    found = {
        "top1": top.first,
        "top2": top.second,
        "g1": top.g1,
        "softmax_norm": norm,
        "g1_ratio": _where(norm > 0, top.g1 / norm),
        "gk_ratio": _where(keys > k, top.g1 / top.gk),
        "entropy": spread,
        "entropy_normalized": _where(keys > 1, spread / keys.to(p.dtype).log()),
        "support": spread.exp(),
    }
    for name, code in SHARES.items():
        found[name] = _where(kind != LEFT_OUT, (kind == code).to(p.dtype))
    return {name: _where(keys > 0, value) for name, value in found.items()}


def _where(counts: Tensor, value: Tensor) -> Tensor:
    return value.masked_fill(~counts, torch.nan)


def _regimes(top: _Top, keys: Tensor, gamma: float) -> Tensor:
    if not 0 < gamma < 0.25:
        raise UsageError(f"gamma must lie between 0 and 1/4, not {gamma}", "the default is 0.1")
    kind = torch.where(top.first > 0.5, CATEGORICAL, UNIFORM)
    kind[top.g1 > (2 / keys).clamp_min(gamma)] = INTERMEDIATE
    kind[keys < _MIN_SUPPORT] = LEFT_OUT
    return kind


class _Top(NamedTuple):
    """The entries of each row that count: what the secular equation and the ratios need."""

    first: Tensor
    second: Tensor
    kth: Tensor
    following: Tensor  # p_(k+1)
    others: Tensor  # 1 - p_(1)
    rest: Tensor  # the row without p_(1)

    @property
    def g1(self) -> Tensor:
        return self.first * (self.others + self.second)

    @property
    def gk(self) -> Tensor:
        """g_k for k > 1, where p_(k) <= 1/2: its difference from 1 keeps its digits."""
        return self.kth * (self.first + self.others - self.kth + self.following)


def _top(p: Tensor, k: int = 1) -> _Top:
    p = p if p.shape[-1] > k else F.pad(p, (0, k + 1 - p.shape[-1]))
    values, index = p.topk(k + 1, -1)
    rest = p.scatter(-1, index[..., :1], 0.0)
    first, second, kth, following = (values[..., i] for i in (0, 1, k - 1, k))
    return _Top(first, second, kth, following, rest.sum(-1), rest)


def _secular_root(top: _Top) -> Tensor:
    """Solve the secular equation in rho = (lambda - p_(2)) / (p_(1) - p_(2)), from g_1 down."""
    gap = top.first - top.second
    rest = top.rest / top.second[..., None]  # in units of p_(2): tails of 1e-300 stay in range
    below = 1.0 - rest
    rho = top.others
    for _ in range(_SECULAR_STEPS):
        start = rho
        rho = _secular_step(rest, below, top.first / gap, rho * gap / top.second, rho)
        if not (start - rho > _SECULAR_CLOSE * rho).any():  # the error falls by its square
            break
    return torch.where(gap * top.others > 0, top.second + rho * gap, top.second)


def _secular_step(rest: Tensor, below: Tensor, pole: Tensor, shift: Tensor, rho: Tensor) -> Tensor:
    """Return the positive root of c rho'^2 + (pole + b rho - c) rho' - b rho = 0."""
    inverse = (below + shift[..., None]).reciprocal_()
    terms = rest * inverse
    total = terms.sum(-1)
    b = terms.mul_(inverse).sum(-1) * shift
    c = total - b
    middle = pole + b * rho - c
    spread = (middle.square() + 4 * c * b * rho).sqrt()
    return torch.where(middle > 0, 2 * b * rho / (middle + spread), (spread - middle) / (2 * c))
