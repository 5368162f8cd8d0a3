"""Training penalties: JaSMin on attention maps, Specformer's on projection weights.

[Y25] Yudin et al., Pay Attention to Attention Distribution, arXiv 2507.07814. [H24] Hu et al.,
Specformer, ECCV 2024, as [Y25] states it. Everything is differentiable almost everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lipaudit.theory.softmax import PerRow

EPS = 1e-6
"""Smallest argument of the logarithms: a one-hot row has g_1 = 0."""

Reduction = Literal["max", "mean"]


def jasmin(
    attention: Float[Tensor, "batch heads queries keys"],
    *,
    k: int = 0,
    reduction: Reduction = "max",
    mask: Bool[Tensor, "batch queries"] | None = None,
) -> Float[Tensor, ""]:
    """Return the JaSMin penalty of one layer ([Y25] section 5).

    A map's penalty is the largest (or mean) row penalty: log g_1(P_i) for k = 0,
    log g_1(P_i)/g_k(P_i) for k > 1. g_k = p_(k) (1 - p_(k) + p_(k+1)) with the k-th largest entry
    p_(k) of the row; g_1 bounds the norm of the softmax Jacobian. A layer's penalty is summed over
    heads and averaged over the batch, a model's is the sum over its layers. For k > 1 a row has
    penalty 0 exactly where its k + 1 largest entries are equal, and log(k/(k-1)) where k entries
    are equal and the others are 0.

    Args:
        attention: maps P; rows sum to one.
        k: 0, or more than 1.
        reduction: over the rows of a map.
        mask: rows that count (no padding). Rows of zeros never count. For k > 1, rows with at most
            k keys do not count: the first rows of a causal map would always be the maximum.

    Examples:
        >>> uniform = torch.full((1, 2, 8, 8), 1 / 8)
        >>> jasmin(uniform), jasmin(uniform, k=4).abs() < 1e-4
        (tensor(-4.1589), tensor(True))
    """
    values, is_counted = jasmin_rows(attention, k)
    if mask is not None:
        is_counted = is_counted & mask[:, None]
    penalties = reduce_rows(values, is_counted, reduction)
    return penalties.sum() / len(attention)


def jasmin_rows(p: Float[Tensor, "*rows keys"], k: int) -> tuple[PerRow, Bool[Tensor, "*rows"]]:
    """Return the JaSMin penalty of each row (at least in float32), and whether the row counts.

    The penalty is log g_1 for k = 0 and log g_1 / g_k for k > 1, from the k + 1 largest entries. A
    row counts if it has more than k entries above 0.

    Raises:
        ValueError: k is 1 or negative.

    Examples:
        >>> jasmin_rows(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]), 0)
        (tensor([ -0.6931, -13.8155]), tensor([ True, False]))
    """
    if p.dtype in (torch.float16, torch.bfloat16):  # too few digits for 1 - p_(1)
        p = p.float()
    count = count_entries(p.shape[-1], k)
    return jasmin_of_largest(p.topk(count).values, k)


def count_entries(keys: int, k: int) -> int:
    """Return the number of largest entries of a row on which the JaSMin penalty depends.

    g_k needs the k + 1 largest, g_1 two.

    Examples:
        >>> count_entries(200, 0), count_entries(200, 10), count_entries(7, 10)
        (2, 11, 7)
    """
    return min(keys, max(2, k + 1))


def jasmin_of_largest(
    top: Float[Tensor, "*rows largest"], k: int
) -> tuple[PerRow, Bool[Tensor, "*rows"]]:
    """Return the JaSMin penalty of each row, and whether it counts: as `jasmin_rows`.

    Args:
        top: the k + 1 largest entries of each row, at least 2, in descending order; fewer if the
            row has fewer.
        k: 0 for log g_1, or more than 1 for log g_1 / g_k.

    Raises:
        ValueError: k is 1 or negative.

    Examples:
        >>> jasmin_of_largest(torch.tensor([[0.5, 0.5]]), 0)
        (tensor([-0.6931]), tensor([True]))
    """
    if k == 1 or k < 0:
        raise ValueError(f"k is 0 or more than 1, not {k}")
    missing = max(2, k + 1) - top.shape[-1]
    top = F.pad(top, (0, max(0, missing)))  # entries beyond the last key are 0
    # The paper adds EPS to g_k, and has no limit for log g_1, which is -inf in a one-hot row: ours
    # is log EPS.
    penalty = _g(top, 1).clamp_min(EPS).log()
    if k:
        penalty = penalty - (_g(top, k) + EPS).log()
    # A row counts if its (k + 1)-th largest entry is above 0.
    return penalty, top[..., k].detach() > 0


def _g(top: Tensor, k: int) -> Tensor:
    """Return g_k = p_(k) (1 - p_(k) + p_(k+1)) of each row from its k + 1 largest entries."""
    # The rounding error of 1 - p_(k) is negligible beside EPS.
    kth = top[..., k - 1]
    following = top[..., k]
    return kth * (1 - kth + following)


def reduce_rows(
    values: Float[Tensor, "*maps rows"],
    is_counted: Bool[Tensor, "*maps rows"],
    reduction: Reduction,
) -> Float[Tensor, "*maps"]:
    """Return the largest or the mean value of the rows that count; 0 without any.

    Examples:
        >>> reduce_rows(torch.tensor([1.0, 3.0]), torch.tensor([True, False]), "mean")
        tensor(1.)
    """
    if reduction == "mean":
        total = values.where(is_counted, 0.0).sum(-1)
        return total / is_counted.sum(-1).clamp_min(1)
    largest = values.where(is_counted, -torch.inf).amax(-1)
    return largest.where(is_counted.any(-1), 0.0)


def specformer(
    weight: Float[Tensor, "heads D d"], vector: Float[Tensor, "heads d"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "heads d"]]:
    """Return the sum of the squared spectral norms of the weights W_h of one projection ([H24]).

    Each is ||W_h v||^2 with the vector v of a power iteration. v is kept from step to step of the
    training and follows the weights, so one power step is enough. The gradient is that of the
    squared norm at v.

    Args:
        weight: W of each head: its columns of the projection.
        vector: the current vectors of the iteration; random at first.

    Returns:
        The sum, and the vectors for the next call.

    Examples:
        >>> vector = torch.ones(1, 2)
        >>> for _ in range(20):
        ...     value, vector = specformer(torch.diag(torch.tensor([3.0, 1.0]))[None], vector)
        >>> value
        tensor(9.)
    """
    v = vector[..., None]
    with torch.no_grad():  # one power step, without a gradient
        v = F.normalize(weight.mT @ (weight @ v), dim=-2)
    # sum_h ||W_h v_h||^2
    return (weight @ v).square().sum(), v[..., 0]
