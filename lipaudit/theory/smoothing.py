"""What votes under Gaussian noise certify: randomised smoothing.

Source: Cohen, Rosenfeld and Kolter, *Certified Adversarial Robustness via Randomized Smoothing*,
arXiv 1902.02918, ICML 2019, theorem 1 and the function CERTIFY.

The smoothed classifier g gives x the class that f gives most often to x + N(0, sigma^2 I). If f
gives that class with probability at least p > 1/2, then g gives it to every input that is nearer
to x than R = sigma Phi^-1(p) in L2. The reason: p(x) = P(f(x + noise) = class) makes Phi^-1(p(x))
a function of Lipschitz constant 1 / sigma, and the class has a majority while p > 1/2.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from scipy.special import betaincinv, ndtri


def limit_share(
    votes: Int[np.ndarray, " samples"], copies: int, alpha: float
) -> Float[np.ndarray, " samples"]:
    """Return the lower limit of each class's probability (Clopper and Pearson, 1934).

    It is the p with P(B >= votes) = alpha for B ~ Binomial(copies, p): the alpha-quantile of
    Beta(votes, copies - votes + 1). The true probability is at least p with probability 1 - alpha.

    Args:
        votes: how many noisy copies got the class; the class was chosen without them.
        copies: number of noisy copies.
        alpha: probability that the limit is too high.

    >>> limit_share(np.array([0, 100]), 100, 0.001).round(4)
    array([0.    , 0.9333])
    """
    # Without votes the quantile is of no distribution, and the limit is 0.
    limit = betaincinv(np.maximum(votes, 1), copies - votes + 1, alpha)
    return np.where(votes > 0, limit, 0.0)


def certify_radius(
    share: Float[np.ndarray, " samples"], sigma: float
) -> Float[np.ndarray, " samples"]:
    """Return the L2 radius sigma Phi^-1(p) in which the class is certified; 0 if p <= 1/2.

    Args:
        share: lower limit p of the class's probability under noise.
        sigma: standard deviation of the noise.
    """
    return np.maximum(sigma * ndtri(share), 0.0)
