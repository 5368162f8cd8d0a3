"""What k Lanczos steps say of lambda_1, the largest eigenvalue of a symmetric A >= 0.

T = U^T A U is the tridiagonal matrix of the steps, theta_1 >= ... >= theta_k its eigenvalues (the
Ritz values), beta_j what couples step j to the next one, u the start, |u| = 1. Only ratios to
theta_1 are squared or multiplied, so nothing depends on the scale of A.

The limit that holds. The basis vectors are p_j(A) u for the orthonormal polynomials of u, and

    p_k(t) = det(t - T) / (beta_1 ... beta_k).

With v_1 the leading eigenvector, <u_{k+1}, v_1> = p_k(lambda_1) <u, v_1> is at most 1 in size, so
|p_k(lambda_1)| <= 1 / |<u, v_1>|. A random start has |<u, v_1>| >= delta with probability 1 - eta
(`log_delta`), and p_k grows above theta_1: with that probability lambda_1 is at most the t with
p_k(t) = 1 / delta. The event is one of the start alone: the limit holds at every step at once, so
a stop rule may look at all of them (Van Dorsselaer et al., Theorem 3.1).

What the estimate misses. Kato-Temple takes the gap to theta_2 for the gap below lambda_1. Two
eigenvalues closer together than the residual share one Ritz value theta_1, between them, and
theta_2 is the third one: the error is then up to their distance, whatever the estimate says. No
rule that stops early mends it: where v_1 has weight 1 / p_k(t) or less in the start, k steps look
the same with and without lambda_1 = t. A proof to tol costs ln((1 + limit) / tol) / ln(rho) more
steps than one to a wider limit, rho being the growth of p_k per step (1.4 to 2.4 times as many at
1e-4 and 1e-6 on the heads and models of the benchmarks); a second start or a block of b costs b
times as many vectors and saves only the eta in delta, which is the smaller part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_delta(size: Tensor, eta: float) -> Tensor:
    """Log of delta with P(|<u, v>| >= delta) >= 1 - eta for u uniform on the sphere, v fixed.

    For size >= 3 the density of <u, v> is at most Gamma(n/2) / (sqrt(pi) Gamma((n-1)/2)).
    """
    half = size.double() / 2
    # P(|<u, v>| < delta) <= 2 delta density = eta.
    density = torch.lgamma(half) - torch.lgamma(half - 0.5) - 0.5 * math.log(math.pi)
    return math.log(eta / 2) - density


def below(ritz: Tensor, level: Tensor, factor: float) -> Tensor:
    """Whether lambda_1 <= factor theta_1 with the start's probability: p_k there is 1 / delta.

    Args:
        ritz: eigenvalues of T, ascending.
        level: log of beta_1 ... beta_k / delta.
        factor: above 1.
    """
    # det(t - T) = prod_i (t - theta_i) at t = factor theta_1; p_k increases beyond theta_1.
    return (factor * ritz[:, -1:] - ritz).log().sum(1) >= level


def probabilistic_limit(ritz: Tensor, level: Tensor) -> Tensor:
    """Solve log det(t - T) = level for t above theta_1 and return t.

    Newton's method in y = log(t - theta_1), where the left side is convex and increasing: started
    to the right it only descends, so every iterate is a limit too.
    """
    top = ritz[:, -1].clamp_min(0.0)
    gaps = (ritz[:, -1:] - ritz[:, :-1]).log()
    # f(y) = y + sum_i log(e^y + gap_i) lies above k y and above y + sum_i log gap_i: where either
    # reaches the level, f is not below it. f is convex, so Newton's steps from there stay above.
    y = torch.minimum(level / ritz.shape[1], level - gaps.sum(1))
    for _ in range(60):
        value = y + torch.logaddexp(y[:, None], gaps).sum(1)
        slope = 1 + torch.sigmoid(y[:, None] - gaps).sum(1)
        step = (value - level).clamp_min(0.0) / slope
        y = y - step
        if not (step > 1e-5).any():  # what is left is of the order of its square
            break
    return top + y.exp()


def kato_temple(ritz: Tensor, shorter: Tensor, beta: Tensor) -> Tensor:
    """Estimate lambda_1 / theta_1 - 1: |A x - theta_1 x|^2 over the gap to theta_2.

    Args:
        ritz: eigenvalues of T, ascending.
        shorter: those one step earlier.
        beta: what couples the newest basis vector to T.

    Source: Kato, J. Phys. Soc. Japan 4, 1949.
    """
    top = ritz[:, -1:].clamp_min(torch.finfo(ritz.dtype).tiny)
    gaps = ((top - ritz[:, :-1]) / top).clamp_min(1e-300)
    # The squared last entry of T's top eigenvector, in terms of the interlacing eigenvalues.
    last = (((top - shorter) / top).clamp_min(0.0) / gaps).prod(1)
    residual = (beta / top[:, 0]).square() * last
    # |lambda - theta_1| <= |r| for some eigenvalue lambda; <= |r|^2 / gap where the gap holds.
    if ritz.shape[1] == 1:
        return residual.sqrt()
    return torch.minimum(residual.sqrt(), residual / gaps[:, -1])
