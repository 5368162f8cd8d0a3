"""Worst-case tokens of a head, the growth of its norm with the number of tokens, and fits.

[C24] Castin, Ablin, Peyré, How Smooth Is Attention?, arXiv 2312.14820. The tokens are c_i R u with
u an eigenvector of s W_K W_Q^T: its norm grows like sqrt n while n is well below n_max, peaks
around n_max and falls like n^(-1/2). All functions take one head (`Heads.pick`) of affine
self-attention, in float64, and apply its projections to other tokens than those of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipaudit.theory.heads import Heads, Projection, are_affine_everywhere, projections
from lipaudit.theory.matrix_norms import spectral_norm
from lipaudit.theory.products import dense_jacobian

if TYPE_CHECKING:
    from jaxtyping import Float

    from lipaudit.theory.heads import PerHead


@dataclass(frozen=True)
class Adversary:
    """Two directed points: token 1 is `lead` R u, all others are `follow` R u.

    Attributes:
        u: unit eigenvector of s W_K W_Q^T.
        eigenvalue: its eigenvalue.
        lead: 1 where the eigenvalue is positive, else -1.
        follow: 1/2 where the eigenvalue is positive, else 1.
        tilt: what the bias of the queries adds to log n_max, per radius; the sign of u is the
            one that makes it positive. 0 without a bias.
    """

    u: Float[Tensor, " D"]
    eigenvalue: float
    lead: float
    follow: float
    tilt: float

    @property
    def gamma(self) -> float:
        """Return gamma in n_max = 1 + exp(2 R^2 gamma), the length at which a head's norm peaks.

        R is the norm of the worst-case tokens. For the eigenvalue lambda of s W_K W_Q^T, gamma is
        lambda / 8 if lambda > 0, else -lambda (Castin, Ablin and Peyré, 2024).
        """
        if self.eigenvalue > 0:
            return self.eigenvalue / 8
        return -self.eigenvalue

    def gap(self, radius: float) -> float:
        """Return how far a follower's logit of token 1 is above its logits of all other tokens.

        The worst-case tokens are token 1, lead R u, and its followers: copies of f R u, with an
        eigenvector u of s W_K W_Q^T. The query of a follower prefers the key of token 1 by the gap
        2 gamma R^2 + tilt R.
        """
        # A follower has the logit s <W_Q^T f R u, W_K^T x> = lambda f R <u, x> of a token x. From
        # x = f R u to x = lead R u it rises by lambda R^2 f (lead - f): lambda R^2 / 4 for
        # (lead, f) = (1, 1/2), and -2 lambda R^2 for (-1, 1). Both are 2 gamma R^2. The bias of
        # the queries adds tilt R.
        return 2 * radius**2 * self.gamma + self.tilt * radius

    def n_max(self, radius: float) -> float:
        """Return n_max = 1 + e^gap: the norm at n tokens grows like sqrt n for n well below n_max.

        Of n tokens of norm up to `radius`, n - 1 are equal. Their logit of token 1 exceeds the
        other logits by the gap, so they give token 1 the weight e^gap / (e^gap + n - 1): one half
        for n = n_max.
        """
        gap = self.gap(radius)
        if gap < 700:  # exp overflows above 709
            return 1 + math.exp(gap)
        return math.inf

    def radius(self, n_max: float) -> float:
        """Return the radius R at which `n_max` has a given value above 2: its inverse function."""
        # a R^2 + tilt R = log(n_max - 1) with a = 2 gamma, solved for R > 0. The usual form of the
        # root, (root of the discriminant - tilt) / (2 a), loses all digits for a small a.
        a = 2 * self.gamma
        gap = math.log(n_max - 1)
        discriminant = self.tilt**2 + 4 * a * gap
        return 2 * gap / (math.sqrt(discriminant) + self.tilt)

    def points(self, radius: float) -> Float[Tensor, "1 2 D"]:
        """Return the two distinct worst-case tokens of norm at most `radius`.

        Both are on the line of the unit vector u, at the shares `lead` and `follow` of the radius.
        """
        leader = self.lead * radius * self.u
        follower = self.follow * radius * self.u
        return torch.stack([leader, follower])[None]

    def tokens(self, n: int, radius: float) -> Float[Tensor, "1 n D"]:
        """Return all n tokens, the first point once and the second n - 1 times."""
        point_of_token = torch.arange(n).clamp_max(1)
        return self.points(radius)[:, point_of_token]


def adversary(heads: Heads) -> Adversary | None:
    """Return the worst-case tokens of one head ([C24]); None if no eigenvalue is real.

    lambda_max and lambda_min are the largest and the smallest real eigenvalue of s W_K W_Q^T, with
    the scale s of the logits. If lambda_max > -8 lambda_min, the tokens are R (u, u/2, ..., u/2)
    with the eigenvector u of lambda_max, else R (-u, u, ..., u) with the eigenvector u of
    lambda_min. R is the norm of the longest token.

    >>> from lipaudit.theory.heads import affine_heads
    >>> eye = torch.eye(2, dtype=torch.float64)[None]
    >>> worst = adversary(affine_heads(eye[:, :1], eye, -eye, eye))
    >>> worst.lead, round(worst.gamma, 4), round(worst.n_max(1.0), 4)
    (-1.0, 0.7071, 5.1133)
    """
    to_q, to_k, _ = affine_projections(heads)
    # If z is an eigenvector of s W_Q^T W_K (d x d), W_K z is an eigenvector of s W_K W_Q^T (D x D)
    # with the same eigenvalue. The small matrix is cheaper.
    scale = heads.scale.flatten()[0]
    wq = to_q.weight[0]
    wk = to_k.weight[0]
    values, vectors = torch.linalg.eig(scale * (wq.mT @ wk))
    real = torch.where(values.imag == 0, values.real, 0.0)  # complex eigenvalues count as 0
    # Token 1 is lead R u, and every other token is follow R u.
    index, lead, follow = _choose_eigenvalue(real)
    eigenvalue = float(real[index])
    if eigenvalue == 0:  # no real eigenvalue, or only 0
        return None
    u = wk @ vectors[:, index].real
    u = u / torch.linalg.vector_norm(u)
    # The bias b of the queries adds s <b, W_K^T x> to the logits of a token x. The tilt is the
    # difference of this between token 1 and the other tokens, divided by R.
    tilt = 0.0
    if to_q.bias is not None:
        slope = scale * (to_q.bias[0] @ (wk.mT @ u))
        tilt = (lead - follow) * float(slope)
    if tilt < 0:  # -u is an eigenvector as well, and -u has a positive tilt
        u = -u
    return Adversary(u, eigenvalue, lead, follow, abs(tilt))


def _choose_eigenvalue(real: Float[Tensor, " d"]) -> tuple[int, float, float]:
    """Return the index of the eigenvalue with the larger gamma, and the factors of its tokens.

    With the eigenvector u and the radius R, token 1 is lead R u, and every other token is
    follow R u. Up to about exp(2 gamma R^2) tokens, the norm of the head grows with their number:
    2 gamma R^2 = lambda R^2 follow (lead - follow) is how far a query of the other tokens prefers
    the key of token 1, for the eigenvalue lambda. The largest eigenvalue has (lead, follow) =
    (1, 1/2) and gamma = lambda_max / 8, the smallest one (-1, 1) and gamma = -lambda_min.

    Args:
        real: the real eigenvalues.

    Returns:
        The index, lead and follow.
    """
    if real.max() > -8 * real.min():
        return int(real.argmax()), 1.0, 0.5
    return int(real.argmin()), -1.0, 1.0


def move_heads(
    heads: Heads, x: Float[Tensor, "batch n D"], *, causal: bool | None = None
) -> Heads:
    """Return affine heads at other tokens, without padding or position bias.

    Args:
        heads: heads of affine self-attention, one row or more.
        x: the new tokens; their graph is kept.
        causal: whether later keys are masked; None: as before.

    Raises:
        ValueError: a projection is not affine.
    """
    if causal is None:
        causal = heads.causal
    outputs = []  # q, k and v, (batch, heads, n, d)
    for projection in affine_projections(heads):
        output = x[:, None] @ projection.weight
        if projection.bias is not None:
            output = output + projection.bias[:, None]
        outputs.append(output)
    q, k, v = outputs
    # Bias, padding (`valid`) and sample numbers are those of the old tokens: they are replaced.
    # The scale of affine heads is the same for all samples.
    return replace(
        heads,
        x=x,
        q=q,
        k=k,
        v=v,
        scale=heads.scale[:1],
        bias=None,
        valid=None,
        causal=causal,
        sample=torch.arange(len(x), device=x.device),
    )


def weighted_norm(heads: Heads, weights: Float[Tensor, " n"]) -> PerHead:
    """Return ||J|| if token i stands for w_i copies that change together.

    In the softmax, w_j copies of a key are a bias log w_j of its logits. Lengths of inputs and
    outputs are (sum_i w_i ||x_i||^2)^1/2. Only ratios of the weights matter: they are the shares
    of the tokens in a distribution, and the result is its mean-field norm ([C24]). The Jacobian is
    formed, so there should be few distinct tokens. It holds at X, for unmasked affine heads.

    Args:
        heads: the heads at the distinct tokens.
        weights: w_i.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.ones(1, 1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[None]
    >>> weighted_norm(affine_heads(x, eye, eye, 3 * eye), torch.tensor([7.0], dtype=torch.float64))
    tensor([[3.]], dtype=torch.float64)
    """
    # sum_i w_i ||x_i||^2 = ||W^1/2 x||^2: the norm is that of W^1/2 J W^-1/2.
    root = weights.sqrt()
    bias = weights.log()[None, None, None]  # (sample, head, query, key): one for each key
    jacobian = dense_jacobian(replace(heads, bias=bias))
    # The same root for all channels of a token: rows of J are outputs, columns inputs.
    outputs = root.repeat_interleave(heads.v.shape[3])[:, None]
    inputs = root.repeat_interleave(heads.x.shape[2])
    return spectral_norm(outputs * jacobian / inputs)


def duplicated_norm(heads: Heads, counts: Float[Tensor, " n"]) -> PerHead:
    """Return ||J|| of the long sequence in which token i is repeated counts_i >= 1 times.

    Only the distinct tokens are computed. Any change of the long sequence is the sum of a change
    in which all copies of a token change alike, and one in which the changes of the copies of each
    token sum to 0. J maps the two kinds to orthogonal outputs, so ||J|| is the larger one of its
    norms on both (our result). It holds for unmasked affine heads.

    >>> from lipaudit.theory.heads import affine_heads
    >>> x, eye = torch.ones(1, 1, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)[None]
    >>> duplicated_norm(affine_heads(x, eye, eye, eye), torch.tensor([5.0], dtype=torch.float64))
    tensor([[1.]], dtype=torch.float64)
    """
    alike = weighted_norm(heads, counts)
    # If the changes of copies sum to 0, those of their keys and values cancel in every output.
    # Each copy then changes its own output alone, through its query: J is block diagonal.
    bias = counts.log()[None, None, None]  # (sample, head, query, key): counts_j equal keys
    blocks = dense_jacobian(replace(heads, bias=bias, to_k=None, to_v=None))
    # A token without a second copy has no such change: the rows of its outputs become 0.
    is_repeated = (counts > 1).repeat_interleave(heads.v.shape[3])
    cancelling = spectral_norm(blocks * is_repeated[:, None])
    return torch.maximum(alike, cancelling)


def mean_field_norm(heads: Heads, worst: Adversary, radius: float) -> tuple[float, float]:
    """Return the largest ||J|| at two worst-case points, the second repeated any number of times.

    It is the maximum of `weighted_norm` over the weights (1, m), for log m within 6 of log n_max.
    n_max is the number of tokens at which the second token gives half of its attention to the
    first one. The maximum grows like R^2 e^{c R^2} with the radius R.

    Args:
        heads: one head.
        worst: its worst-case tokens.
        radius: R.

    Returns:
        The largest norm, and its m.
    """
    from scipy.optimize import minimize_scalar  # the import takes a fifth of a second

    moved = move_heads(heads, worst.points(radius), causal=False)

    def measure_norm(log_m: float) -> float:
        """Return the norm with the weights (1, m)."""
        weights = moved.x.new_tensor([1.0, math.exp(log_m)])
        return float(weighted_norm(moved, weights))

    centre = min(worst.gap(radius), 600.0)  # log(n_max - 1); e^600 is near the largest float
    # The norm may have several peaks over log m. A grid finds the highest peak, and a search
    # around this grid point finds the maximum.
    grid = [centre + 0.5 * i for i in range(-12, 13)]
    highest = max(grid, key=measure_norm)
    top = minimize_scalar(
        lambda log_m: -measure_norm(log_m),
        bounds=(highest - 0.5, highest + 0.5),
        method="bounded",
        options={"xatol": 1e-3},  # the norm is flat near its maximum: a relative error of 1e-6
    )
    return -float(top.fun), math.exp(top.x)


@dataclass(frozen=True)
class PowerLaw:
    """A least-squares fit norm = c n^a; NaN where the points do not determine it.

    The standard error takes the residuals for independent and of equal size.
    """

    constant: float
    exponent: float
    exponent_se: float
    r2: float


def power_law(n: Float[Tensor, " points"], norm: Float[Tensor, " points"]) -> PowerLaw:
    """Fit norm = c n^a by least squares in the logarithms.

    Args:
        n: lengths.
        norm: norms; all positive.

    >>> n = torch.tensor([8.0, 16.0, 32.0, 64.0], dtype=torch.float64)
    >>> fit = power_law(n, 3 * n.sqrt())
    >>> round(fit.constant, 6), round(fit.exponent, 6), round(fit.exponent_se, 6)
    (3.0, 0.5, 0.0)
    """
    x = n.double().log().cpu()
    y = norm.double().log().cpu()
    dx = x - x.mean()
    dy = y - y.mean()
    size = float(dx.square().sum())
    if len(y) < 2 or not size > 1e-12 * len(y):  # a slope needs two different lengths
        return PowerLaw(math.nan, math.nan, math.nan, math.nan)
    slope = float(dx @ dy) / size
    residual = float((dy - slope * dx).square().sum())
    total = float(dy.square().sum())
    standard_error = math.nan
    if len(y) > 2:  # a line through two points has no residual, so no standard error
        variance = residual / (len(y) - 2)
        standard_error = math.sqrt(variance / size)
    r2 = math.nan
    if total > 0:
        r2 = 1 - residual / total
    intercept = y.mean() - slope * x.mean()
    return PowerLaw(float(intercept.exp()), slope, standard_error, r2)


def affine_projections(heads: Heads) -> tuple[Projection, Projection, Projection]:
    """Return the maps to queries, keys and values.

    Raises:
        ValueError: the heads are not affine self-attention with plain logits.
    """
    if not are_affine_everywhere(heads):
        raise ValueError("worst-case tokens need affine self-attention with plain logits")
    return projections(heads)
