"""Spectral norms of many Jacobians at once: the Lanczos process on A = J J^T.

T = U^T A U is the tridiagonal matrix of the steps, theta_1 >= ... >= theta_k its eigenvalues (the
Ritz values), beta_j what couples step j to the next one, u the start, |u| = 1. Only ratios to
theta_1 are squared or multiplied, so nothing depends on the scale of A.

The limit that holds. The basis vectors are p_j(A) u for the orthonormal polynomials of u, and

    p_k(t) = det(t - T) / (beta_1 ... beta_k).

With v_1 the leading eigenvector, <u_{k+1}, v_1> = p_k(lambda_1) <u, v_1> is at most 1 in size, so
|p_k(lambda_1)| <= 1 / |<u, v_1>|. A random start has |<u, v_1>| >= delta with probability 1 - eta,
and p_k grows above theta_1: with that probability lambda_1 is at most the t with
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

Only products A u = J (J^T u) are needed, in the space of outputs. Vectors live in the precision of
the products, fully reorthogonalised; the small tridiagonal algebra is float64 on the CPU. Powers
of two keep A near one, so that norms of any size are computed alike.

A norm is always a lower estimate. A problem ends when the estimate of its error is at most `tol`
and what can be proven, that with probability 1 - ETA the truth is at most `upper`, is at most
`within` above it; or once `tol` itself is proven. Both are derived above (`kato_temple` and
`probabilistic_limit`), and why the first is no proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from lipaudit.errors import EvaluationError
from lipaudit.theory import POLICY, TOL, WITHIN, Policy

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def shift_exponent(
    t: Float[Tensor, "*shape"], exponent: Int[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """Return t 2^exponent, exact if t can hold it: in two steps, as 2^exponent may overflow.

    >>> shift_exponent(torch.tensor([3.0, 2.0**-140]), torch.tensor([1, 139]))
    tensor([6.0000, 0.5000])
    """
    exponents = exponent.cpu().numpy()
    half = exponents // 2
    for part in (half, exponents - half):
        # By NumPy: `torch.ldexp` computes its power in float32.
        power = torch.as_tensor(np.ldexp(1.0, part))
        t = t * power.to(t)
    return t


def take_size(t: Tensor, *axes: int) -> tuple[Tensor, Tensor]:
    """Divide by the power of two next to the largest entry along some axes; of all without axes.

    Returns:
        The quotient, and the exponents, (others,) on the CPU; 0 for 0.

    >>> take_size(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), 1)[1]
    tensor([2, 0], dtype=torch.int32)
    """
    largest = t.abs().amax(axes, keepdim=True)
    exponents = torch.frexp(largest.cpu()).exponent
    return shift_exponent(t, -exponents), exponents.flatten()


_STEPS = 11  # to ||P||
_LONG_STEPS = 60  # of maps whose Gram matrix is not formed


def spectral_norm(a: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch"]:
    """Return the largest singular value of each matrix, from the smaller of its two Gram matrices.

    Examples:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    if a.shape[-2] <= a.shape[-1]:
        gram = a @ a.mT
    else:
        gram = a.mT @ a
    largest = torch.linalg.eigvalsh(gram)[..., -1]
    return largest.clamp_min(0.0).sqrt()


def product_values(
    a: Float[Tensor, "*batch n d"], b: Float[Tensor, "*batch m d"] | None = None
) -> Float[Tensor, "*batch r"]:
    """Return the singular values of each A B^T, or A, but zeros that its size d implies.

    With A = Q R and B = P S they are those of R S^T, because the columns of Q and P are
    orthonormal.

    Examples:
        >>> product_values(torch.tensor([[3.0], [4.0]]), torch.tensor([[2.0]]))
        tensor([10.])
    """
    core = torch.linalg.qr(a, mode="r").R
    if b is not None:
        core = core @ torch.linalg.qr(b, mode="r").R.mT
    return torch.linalg.svdvals(core)


def gram_root(a: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch m m"]:
    """Return R with ||R y|| >= ||A y||, equal but for rounding: a Cholesky factor of A^T A.

    Examples:
        >>> gram_root(torch.tensor([[3.0], [4.0]]))
        tensor([[5.0000]])
    """
    gram = a.mT @ a
    diagonal = gram.diagonal(0, -2, -1)
    trace = diagonal.sum(-1, keepdim=True)
    # R^T R = G + shift + error. In units of u trace(G): forming G costs n, Cholesky m + 1 (Higham,
    # Theorem 10.3: |error| <= gamma_{m+1} |R|^T |R|); the shift is 4 (n + m).
    n, m = a.shape[-2:]
    info = torch.finfo(a.dtype)
    shift = 2 * (n + m) * info.eps * trace + info.tiny
    diagonal.add_(shift)
    return torch.linalg.cholesky_ex(gram, upper=True).L


def positive_vector(b: Float[Tensor, "*batch n m"], steps: int) -> Float[Tensor, "*batch 1 m"]:
    """Return u > 0 near the leading singular vector of matrices with entries >= 0."""
    u = b.new_ones(*b.shape[:-2], 1, b.shape[-1])
    for _ in range(steps):
        before = u
        u = u @ b.mT @ b
        u = u / u.amax(-1, keepdim=True)
        u = u.nan_to_num(1.0).clamp_min(1e-30)  # hold up what decays
        # An accelerator would wait for the answer longer than the steps take.
        if u.device.type == "cpu":
            change = (u - before).abs().amax()
            if float(change) < 1e-6:
                break
    return u


def nonnegative_norm(
    b: Float[Tensor, "*batch n m"],
    steps: int = 10,
    *,
    u: Float[Tensor, "*batch 1 m"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Return an upper bound of the spectral norm of matrices with entries >= 0.

    ||B||^2 <= max_j (B^T B u)_j / u_j for every u > 0 (Collatz-Wielandt); u comes from `steps`
    power steps, so the bound falls towards ||B|| and never below it: 0.3% above it after 10
    steps on attention maps, rarely 1%. It is raised by its rounding error.

    Args:
        b: the matrices.
        steps: number of power steps.
        u: the vectors, if they are known.

    Examples:
        >>> nonnegative_norm(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        tensor(3.0000)
    """
    if u is None:
        # Any u > 0 will do: rounding of the steps, in single precision, costs sharpness alone.
        u = positive_vector(b.float(), steps).to(b)
    # No sum cancels: B u is off by m u, the second product by n u more, relatively; the root
    # halves it. product_rounding is four times that.
    image = (u @ b.mT) @ b
    square = (image / u).amax((-2, -1))
    return square.sqrt() * (1 + product_rounding(b))


def product_rounding(b: Tensor) -> float:
    """Return more than twice the relative rounding error of products with a matrix >= 0."""
    n, m = b.shape[-2:]
    return (n + m + 16) * torch.finfo(b.dtype).eps


def map_norm(
    p: Float[Tensor, "*batch n m"], tol: float = 1e-6, *, policy: Policy = POLICY
) -> Float[Tensor, "*batch"]:
    """Return ||P|| of attention maps, never too small and too large by at most `tol`, relatively.

    The certificate of `nonnegative_norm` is compared with ||P u|| / ||u||. If they differ by more
    than `tol`, as on one map in ten of a trained model, the norm is that of the eigenvalues. Maps
    with more than `policy.map_limit` entries instead get more steps and the first certificate:
    never too small, but maybe less tight.

    Examples:
        >>> map_norm(torch.full((4, 4), 0.25, dtype=torch.float64))
        tensor(1., dtype=torch.float64)
    """
    long = p.shape[-2] * p.shape[-1] > policy.map_limit
    steps = _LONG_STEPS if long else _STEPS
    u = positive_vector(p.float(), steps).to(p)
    u = u @ p.mT @ p  # a last step removes errors of single precision
    u = u / vector_norm(u, dim=-1, keepdim=True)
    u = u.nan_to_num(1.0).clamp_min(1e-30)
    image = u @ p.mT
    square = ((image @ p) / u).amax((-2, -1))
    norm = square.sqrt()
    lower = torch.linalg.matrix_norm(image)
    apart = norm > (1 + tol) * lower
    if apart.any() and not long:
        norm[apart] = spectral_norm(p[apart])
    return norm


def probabilistic_limit(ritz: Tensor, level: Tensor) -> Tensor:
    """Return the t above theta_1 with log det(t - T) = level.

    Newton's method in y = log(t - theta_1), where the left side is convex and increasing: started
    to the right it only descends, so every iterate is a limit too.
    """
    top = ritz[:, -1].clamp_min(0.0)
    gaps = (ritz[:, -1:] - ritz[:, :-1]).log()
    # f(y) = y + sum_i log(e^y + gap_i) lies above k y and above y + sum_i log gap_i: where either
    # reaches the level, f is not below it. f is convex, so Newton's steps from there stay above.
    k = ritz.shape[1]
    y = torch.minimum(level / k, level - gaps.sum(1))
    for _ in range(60):
        column = y[:, None]
        value = y + torch.logaddexp(column, gaps).sum(1)
        slope = 1 + torch.sigmoid(column - gaps).sum(1)
        step = (value - level).clamp_min(0.0) / slope
        y = y - step
        if not (step > 1e-5).any():  # what is left is of the order of its square
            break
    return top + y.exp()


def kato_temple(ritz: Tensor, shorter: Tensor, beta: Tensor) -> Tensor:
    """Estimate lambda_1 / theta_1 - 1: |A x - theta_1 x|^2 over the gap to theta_2.

    Args:
        ritz: eigenvalues of T, ascending.
        shorter: eigenvalues of T one step earlier.
        beta: coupling of the newest basis vector to T.

    Source: Kato, J. Phys. Soc. Japan 4, 1949.
    """
    tiny = torch.finfo(ritz.dtype).tiny
    top = ritz[:, -1:].clamp_min(tiny)
    gaps = (top - ritz[:, :-1]) / top
    gaps = gaps.clamp_min(1e-300)
    # The squared last entry of T's top eigenvector, in terms of the interlacing eigenvalues.
    distances = (top - shorter) / top
    distances = distances.clamp_min(0.0)
    last = (distances / gaps).prod(1)
    residual = (beta / top[:, 0]).square() * last
    # |lambda - theta_1| <= |r| for some eigenvalue lambda; <= |r|^2 / gap where the gap holds.
    if ritz.shape[1] == 1:
        return residual.sqrt()
    return torch.minimum(residual.sqrt(), residual / gaps[:, -1])


Products = Callable[[Tensor], Tensor]
"""u -> A u for every problem, (problems, size) to (problems, size)."""

Select = Callable[[Tensor], Products]
"""Indices of problems -> the products of these problems."""

ETA = 1e-3
"""Probability, over the random start vector, that a norm exceeds its `upper`."""

_ROOM = 100  # a power of two by which a vector may be scaled, in any precision
_GROWTH = 8  # basis vectors per allocation: memory grows with the steps that are taken


@dataclass(frozen=True)
class Norms:
    """Spectral norms, one per problem, float64 on the CPU.

    Attributes:
        norm: root of the largest Ritz value: never above the true norm, apart from rounding.
        upper: upper limit of the true norm with probability 1 - ETA over the start, for every
            matrix; equal to `norm` if the Krylov space is exhausted.
        products: number of products A u.
        converged: whether the stop rule holds: `upper` is at most (1 + within) norm, and either
            the error is estimated at most tol or `upper` is at most (1 + tol) norm. The estimate
            is no proof: if singular values are close to the first one, the true norm may be
            anywhere between `norm` and `upper`.
        vector: the u with the largest |J^T u| / |u|, in the precision of the products; None unless
            requested.
        second: root of the second Ritz value; 0 if there is one alone. None unless requested.
        second_vector: its u.
    """

    norm: Float[Tensor, "*problems"]
    upper: Float[Tensor, "*problems"]
    products: Int[Tensor, "*problems"]
    converged: Bool[Tensor, "*problems"]
    vector: Float[Tensor, "problems size"] | None = None
    second: Float[Tensor, "*problems"] | None = None
    second_vector: Float[Tensor, "problems size"] | None = None

    @classmethod
    def join(cls, parts: Sequence[Norms], join: Callable[[list[Tensor]], Tensor]) -> Norms:
        """Return the norms of several groups as one, without vectors."""
        return Norms(
            norm=join([part.norm for part in parts]),
            upper=join([part.upper for part in parts]),
            products=join([part.products for part in parts]),
            converged=join([part.converged for part in parts]),
        )

    def times(self, factor: Tensor | float) -> Norms:
        """Return the norms times a factor, one or one per problem."""
        return replace(self, norm=self.norm * factor, upper=self.upper * factor)

    @property
    def within(self) -> Float[Tensor, "*problems"]:
        """Return the proven relative error: upper / norm - 1, with probability 1 - ETA."""
        error = self.upper / self.norm - 1
        return torch.where(self.upper == self.norm, 0.0, error)


def random_starts(seeds: Sequence[int], size: int) -> Float[Tensor, "problems size"]:
    """Draw one float64 Gaussian start vector per seed, independent of the batch.

    Shorter vectors of a seed are beginnings of longer ones, so padding a sample changes nothing.

    >>> torch.equal(random_starts([7], 3)[0], random_starts([5, 7], 20)[1, :3])
    True
    """
    blocks = math.ceil(size / 16)  # randn fills blocks of 16, and draws a partial one differently
    starts = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        vector = torch.randn(16 * blocks, generator=generator, dtype=torch.float64)
        starts.append(vector[:size])
    return torch.stack(starts)


def spectral_norms(
    select: Select,
    start: Float[Tensor, "problems size"],
    *,
    guess: Float[Tensor, "problems size"] | None = None,
    tol: float = TOL,
    max_steps: int = 300,
    within: float = WITHIN,
    rebuild: float = 0.5,
    vectors: bool = False,
    second: bool = False,
) -> Norms:
    """Return the largest singular value of J for every problem, from products with A = J J^T.

    The result of a problem depends on its start vector, not on its batch.

    Args:
        select: returns the products of a set of problems; called for all first, and again for the
            remaining ones when enough others are finished.
        start: Gaussian vectors (`random_starts`) in the precision and on the device of the
            products, exactly zero on coordinates where A is known to vanish (padding).
        guess: vectors that may be near the singular vectors, added to the start vectors at the
            same length; or zeros. Then the leading value is rarely missed, and the probabilistic
            limit still holds: a shift of a symmetric unimodal density puts no more of it near
            zero.
        tol: relative accuracy of the norm, estimated.
        max_steps: largest number of steps per problem; a problem that needs more has `converged`
            False.
        within: how far `upper` may be above the norm, relatively; if it equals `tol`, tol is
            proven, for 1.4 to 2.4 times the products.
        rebuild: share of finished problems at which `select` is called again; above 1: never.
        vectors: whether to return the leading vectors, too.
        second: whether to return the second Ritz values and vectors with them. They converge
            later than the first, and values that are equal to the last bit show as one.

    Raises:
        EvaluationError: a product is not finite.

    References:
        Kato, On the upper and lower bounds of eigenvalues, J. Phys. Soc. Japan 4, 1949.
        Van Dorsselaer, Hochstenbach, van der Vorst, Computing probabilistic bounds for extreme
        eigenvalues of symmetric matrices with the Lanczos method, SIMAX 22, 2000, Theorem 3.1.

    >>> matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    >>> norms = spectral_norms(lambda _: lambda u: u @ matrix @ matrix.T, random_starts([0], 3))
    >>> norms.norm, norms.products
    (tensor([3.], dtype=torch.float64), tensor([3]))
    """
    zeros = torch.zeros(len(start), dtype=torch.float64)
    norms = Norms(
        norm=zeros,
        upper=zeros.clone(),
        products=zeros.long(),
        converged=zeros.bool(),
        vector=torch.zeros_like(start) if vectors else None,
        second=zeros.clone() if second else None,
        second_vector=torch.zeros_like(start) if second else None,
    )
    running = _Krylov(start, guess)
    products = select(running.index)
    for _ in range(max_steps):
        running.advance(running.image(products))
        fresh = running.has_settled(tol, within) & ~running.done
        if not fresh.any():
            continue
        running.record(norms, fresh)
        norms.converged[running.index[fresh]] = True
        running.done |= fresh
        if running.done.all():
            return norms
        if int(running.done.sum()) >= rebuild * len(running.done):
            running.keep(~running.done)
            products = select(running.index)
    running.record(norms, ~running.done)
    return norms


class _Krylov:
    """The running problems: one row each in every tensor.

    Attributes:
        index: indices among the caller's problems.
        size: dimension of the space.
        done: which problems have ended.
        exhausted: where the Krylov space is invariant: T has all eigenvalues of the start.
        steps: number of products so far.
        basis: the orthonormal basis U, blocks of (problems, _GROWTH, size).
        t: T = U^T A U, tridiagonal, lower triangle; on the CPU, float64.
        beta: coupling of the newest basis vector to T.
        coupling: beta once more, (problems, 1, 1), in the precision and place of the basis.
        level: log of beta_1 ... beta_k / delta.
        ritz: eigenvalues of T, ascending.
        shorter: eigenvalues of T one step earlier.
        exponent: A stands for the caller's times 2^exponent, which is even.
        repeated: number of products that were computed again because of their size.
    """

    def __init__(self, start: Tensor, guess: Tensor | None) -> None:
        count, size = start.shape
        live = start.ne(0).sum(1)
        # By the power of two first: squares may underflow.
        u = F.normalize(take_size(start, 1)[0], dim=1)
        length = torch.ones(count).double()
        # <u, v> = (<g, v> + <h, v>) / |g + h|: P(|<g, v> + c| < delta) is largest for c = 0
        # (Anderson, symmetric unimodal density), so delta / |g + h| holds as delta did.
        if guess is not None:
            # In one dimension every vector is exact, and the sum of two opposite ones is zero.
            unit = F.normalize(take_size(guess, 1)[0], dim=1)
            mixed = u + unit * (live > 1)[:, None]
            length = vector_norm(mixed, dim=1).to("cpu", torch.float64)
            u = F.normalize(take_size(mixed, 1)[0], dim=1)
        block = start.new_zeros(count, _GROWTH, size)
        block[:, 0] = u
        self.basis = [block]
        self.coupling = block.new_zeros(count, 1, 1)
        self.index = torch.arange(count)
        self.size = live.cpu()
        self.steps = 0
        self.done = torch.zeros(count, dtype=torch.bool)
        self.exhausted = torch.zeros_like(self.done)
        self.t = torch.zeros(count, 0, 0, dtype=torch.float64)
        self.beta = torch.zeros(count, dtype=torch.float64)
        self.ritz = torch.zeros(count, 0, dtype=torch.float64)
        self.shorter = self.ritz
        # P(|<u, v>| < delta) <= 2 delta density = ETA for u uniform on the sphere, v fixed. For
        # size >= 3 the density is at most Gamma(n/2) / (sqrt(pi) Gamma((n-1)/2)).
        half = self.size.double() / 2
        log_quotient = torch.lgamma(half) - torch.lgamma(half - 0.5)
        log_density = log_quotient - 0.5 * math.log(math.pi)
        log_delta = math.log(ETA / 2) - log_density
        # Growing by log beta_k with every step: p_k(t) = 1 / delta is log det(t - T) = level.
        self.level = length.log() - log_delta
        self.exponent = torch.zeros(count, dtype=torch.int64)
        self.repeated = torch.zeros(count, dtype=torch.int64)

    def image(self, products: Products) -> Tensor:
        """Return A times the newest basis vector; at first, scale A to about the size of one."""
        last = self._vector(self.steps).squeeze(1)
        image = self._apply(products, last)
        if self.steps:
            return image
        size = image.abs().amax(1).to("cpu", torch.float64)
        change = _choose_exponents(size)
        far = change.abs() > _ROOM // 2
        if far.any():
            # It overflowed, or lost digits to underflow: once more, with A scaled.
            self.exponent += change.where(far, 0)
            self.repeated += far
            image = self._apply(products, last)
            size = image.abs().amax(1).to("cpu", torch.float64)
            change = _choose_exponents(size)
            # A u = 0 has no scale.
            self.exponent[size == 0] = 0
            change[size == 0] = 0
        self.exponent += change
        return shift_exponent(image, change[:, None])

    def _apply(self, products: Products, u: Tensor) -> Tensor:
        """Return A u, with A scaled by the exponents."""
        if not self.exponent.any():
            return products(u)
        # What a vector cannot carry of the scale of A goes to its image.
        before = self.exponent.clamp(-_ROOM, _ROOM)
        after = self.exponent - before
        image = products(shift_exponent(u, before[:, None]))
        return shift_exponent(image, after[:, None])

    def advance(self, product: Tensor) -> None:
        """Extend basis and T, given A times the newest basis vector."""
        w = product.unsqueeze(1)
        last = self._vector(self.steps)
        alpha = (w * last).sum(2, keepdim=True)
        w = torch.addcmul(w, alpha, last, value=-1)
        if self.steps:
            # The recurrence first: the sweep below then removes rounding only, and one suffices.
            before = self._vector(self.steps - 1)
            w.addcmul_(self.coupling, before, value=-1)
        for i, block in enumerate(self.basis):
            count = self.steps + 1 - _GROWTH * i
            filled = block[:, :count]
            w.baddbmm_(w @ filled.mT, filled, alpha=-1)
        self.coupling = vector_norm(w, dim=2, keepdim=True)
        entries = torch.cat([alpha, self.coupling], 2)
        entries = entries[:, 0].to("cpu", torch.float64)
        finite = entries.isfinite().all(1)
        self.steps += 1
        if not finite.all():
            problem = int(self.index[~finite][0])
            raise EvaluationError(
                f"The Jacobian product of problem {problem} is not finite at step {self.steps}.",
                "Look for infinite weights or activations, or compute in float64.",
            )
        # T grows by a row and a column: alpha, beside it what coupled this step to the last.
        self.t = F.pad(self.t, (0, 1, 0, 1))
        self.t[:, -1, -1] = entries[:, 0]
        if self.steps > 1:
            self.t[:, -1, -2] = self.beta
        self.beta = entries[:, 1]
        self.exhausted = (self.beta == 0) | (self.size <= self.steps)
        self.level = self.level + self.beta.log()
        self.shorter = self.ritz
        self.ritz = torch.linalg.eigvalsh(self.t)
        if self.steps % _GROWTH == 0:
            block = w.new_zeros(len(w), _GROWTH, w.shape[2])
            self.basis.append(block)
        length = self.coupling.clamp_min(torch.finfo(w.dtype).tiny)
        torch.div(w, length, out=self._vector(self.steps))

    def has_settled(self, tol: float, within: float) -> Tensor:
        """Return which problems fulfil the stop rule."""
        estimate = kato_temple(self.ritz, self.shorter, self.beta)
        accurate = estimate <= (1 + tol) ** 2 - 1
        accurate |= self.proves(tol)
        reached = self.proves(within)
        return (reached & accurate) | self.exhausted

    def proves(self, share: float) -> Tensor:
        """Return where the norm is at most 1 + share times the Ritz value's root."""
        # lambda_1 <= t with the start's probability where p_k(t) >= 1 / delta, and p_k increases
        # beyond theta_1: det(t - T) = prod_i (t - theta_i) at t = (1 + share)^2 theta_1.
        t = (1 + share) ** 2 * self.ritz[:, -1:]
        log_det = (t - self.ritz).log().sum(1)
        return log_det >= self.level

    def record(self, norms: Norms, mask: Tensor) -> None:
        """Write what is known of some problems into the norms of all."""
        which = self.index[mask]
        ritz = self.ritz[mask]
        top = ritz[:, -1].clamp_min(0.0)
        limit = probabilistic_limit(ritz, self.level[mask])
        limit = torch.where(self.exhausted[mask], top, limit)
        half_exponent = -self.exponent[mask] // 2
        norms.norm[which] = shift_exponent(top.sqrt(), half_exponent)
        norms.upper[which] = shift_exponent(limit.sqrt(), half_exponent)
        norms.products[which] = self.steps + self.repeated[mask]
        if norms.vector is None or not len(which):
            return
        # Ritz vectors: U times the eigenvectors of T.
        eigenvectors = torch.linalg.eigh(self.t[mask]).eigenvectors
        norms.vector[which] = self._combine(mask, eigenvectors[:, :, -1])
        if norms.second is not None and norms.second_vector is not None and self.steps > 1:
            second = ritz[:, -2].clamp_min(0.0).sqrt()
            norms.second[which] = shift_exponent(second, half_exponent)
            norms.second_vector[which] = self._combine(mask, eigenvectors[:, :, -2])

    def _combine(self, mask: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of the basis vectors of some problems, with one weight per step."""
        weights = weights.to(self.basis[0])
        rows = mask.nonzero()[:, 0].to(weights.device)
        total = torch.zeros_like(self.basis[0][rows, :1])
        parts = torch.split(weights, _GROWTH, 1)
        for part, block in zip(parts, self.basis, strict=False):
            count = part.shape[1]
            total.baddbmm_(part[:, None], block[rows, :count])
        return total.squeeze(1)

    def keep(self, mask: Tensor) -> None:
        """Remove the other problems."""
        rows = mask.nonzero()[:, 0].to(self.coupling.device)
        self.basis = [block[rows] for block in self.basis]
        self.coupling = self.coupling[rows]
        for name in vars(self).keys() - {"basis", "coupling", "steps"}:
            setattr(self, name, getattr(self, name)[mask])

    def _vector(self, k: int) -> Tensor:
        return self.basis[k // _GROWTH][:, k % _GROWTH, None]


def _choose_exponents(size: Tensor) -> Tensor:
    """Return even exponents that bring numbers to about one; 0 for those within 2^+-20 of it."""
    half = (size.log2() / 2).round()
    change = -2 * half.clamp(-450, 450)
    change = change.where(size > 0, _ROOM)
    change = change.where(size.isfinite(), -_ROOM)
    return change.where(change.abs() > 20, 0).long()
