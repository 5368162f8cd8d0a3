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

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from lipaudit.errors import EvaluationError
from lipaudit.theory import TOL, WITHIN

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    PerProblem = Float[Tensor, "*problems"]
    Vectors = Float[Tensor, "problems size"]


def shift_exponent(
    t: Float[Tensor, "*shape"], exponent: Int[Tensor, "*#shape"]
) -> Float[Tensor, "*shape"]:
    """Return t 2^exponent, exact unless the result overflows or underflows.

    t is multiplied by two powers with half of the exponent each, because 2^exponent may overflow.

    >>> shift_exponent(torch.tensor([3.0, 2.0**-140]), torch.tensor([1, 139]))
    tensor([6.0000, 0.5000])
    """
    half = exponent // 2
    for part in (half, exponent - half):
        power = part.double().exp2()  # `torch.ldexp` computes its power in float32
        t = t * power.to(t)
    return t


def divide_by_powers(t: Tensor, *axes: int) -> tuple[Tensor, Tensor]:
    """Divide a tensor by powers of two such that its largest entries are about one.

    For (batch, heads, n, d) and the axes 0, 2, 3, each head is divided by a power of its own.

    Args:
        t: the tensor.
        axes: the axes that share one power; all axes if none are given.

    Returns:
        The quotient, and the exponents of the powers, one for each index of the other axes, flat,
        on the CPU. The exponent of zeros is 0.

    >>> divide_by_powers(torch.tensor([[3.0, 1.0], [0.0, 0.0]]), 1)[1]
    tensor([2, 0], dtype=torch.int32)
    """
    largest = t.abs().amax(axes, keepdim=True)
    exponents = torch.frexp(largest.cpu()).exponent
    return shift_exponent(t, -exponents), exponents.flatten()


def probabilistic_limit(ritz: Tensor, level: Tensor) -> Tensor:
    """Return an upper limit t of the largest eigenvalue of A, from k Lanczos steps on A.

    The limit holds with probability 1 - ETA over the start vector. T is the tridiagonal matrix of
    the Lanczos steps, theta_1 its largest eigenvalue. t > theta_1 solves log det(t - T) = level.
    The solver is Newton's method in y = log(t - theta_1), where the left side is convex and
    increasing: from a start above the solution y only falls, so every iterate is a limit too.
    With gap_i = theta_1 - theta_i, i > 1, the left side is y + sum_i log(e^y + gap_i).

    Args:
        ritz: eigenvalues theta of T, ascending, (problems, k).
        level: log(beta_1 ... beta_k / delta) of each problem: beta are the entries beside the
            diagonal of T, and the start has a component of at least delta along the leading
            eigenvector, with this probability.
    """
    top = ritz[:, -1].clamp_min(0.0)  # theta_1
    log_gaps = (ritz[:, -1:] - ritz[:, :-1]).log()
    # The start. The left side is at least k y, and at least y + sum_i log gap_i. The smallest y
    # at which one of these equals the level is not below the solution.
    k = ritz.shape[1]
    y = torch.minimum(level / k, level - log_gaps.sum(1))
    for _ in range(60):
        column = y[:, None]
        value = y + torch.logaddexp(column, log_gaps).sum(1)
        slope = 1 + torch.sigmoid(column - log_gaps).sum(1)
        step = (value - level).clamp_min(0.0) / slope
        y = y - step
        if not (step > 1e-5).any():  # the next step would be about the square of this one
            break
    return top + y.exp()


def kato_temple(ritz: Tensor, shorter: Tensor, beta: Tensor) -> Tensor:
    """Estimate the relative error of theta_1, the largest eigenvalue of A from Lanczos steps.

    With the residual r = A x - theta_1 x of the leading Ritz vector x, |x| = 1, the error is about
    |r|^2 over the gap to the next eigenvalue. x is not computed: |r| = beta |s|, where s is the
    last entry of the leading eigenvector of T, and s follows from eigenvalues.

    Args:
        ritz: eigenvalues theta_k <= ... <= theta_1 of the tridiagonal matrix T of the Lanczos
            steps.
        shorter: eigenvalues mu of T one step earlier.
        beta: the newest entry beside the diagonal.

    Source: Kato, J. Phys. Soc. Japan 4, 1949.
    """
    # All in units of theta_1.
    tiny = torch.finfo(ritz.dtype).tiny
    top = ritz[:, -1:].clamp_min(tiny)  # theta_1
    gaps = (top - ritz[:, :-1]) / top
    gaps = gaps.clamp_min(1e-300)
    # s^2 = prod_i (theta_1 - mu_i) / prod_{i > 1} (theta_1 - theta_i)
    distances = (top - shorter) / top
    distances = distances.clamp_min(0.0)
    last_square = (distances / gaps).prod(1)
    residual_square = (beta / top[:, 0]).square() * last_square  # |r|^2 = beta^2 s^2
    # |lambda - theta_1| <= |r| for some eigenvalue lambda of A, and <= |r|^2 / gap if no other
    # eigenvalue of A is within the gap. After one step no gap is known.
    if ritz.shape[1] == 1:
        return residual_square.sqrt()
    return torch.minimum(residual_square.sqrt(), residual_square / gaps[:, -1])


Products = Callable[[Tensor], Tensor]
"""u -> A u for every problem, (problems, size) to (problems, size)."""

Select = Callable[[Tensor], Products]
"""Indices of problems -> the products of these problems."""

ETA = 1e-3
"""Probability, over the random start vector, that a norm exceeds its `upper`."""

_ROOM = 100  # a vector of size one times 2^100 or 2^-100 is in range, in any precision
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

    norm: PerProblem
    upper: PerProblem
    products: Int[Tensor, "*problems"]
    converged: Bool[Tensor, "*problems"]
    vector: Vectors | None = None
    second: PerProblem | None = None
    second_vector: Vectors | None = None

    @classmethod
    def join(cls, parts: Sequence[Norms], join: Callable[[list[Tensor]], Tensor]) -> Norms:
        """Return the norms of several groups of problems as one record, without vectors.

        `join` joins the tensors of an attribute, as `torch.cat` does.
        """
        joined = {}
        for name in ("norm", "upper", "products", "converged"):
            joined[name] = join([getattr(part, name) for part in parts])
        return Norms(**joined)

    def times(self, factor: Tensor | float) -> Norms:
        """Return the norms times a factor, one or one per problem."""
        return replace(self, norm=self.norm * factor, upper=self.upper * factor)

    @property
    def within(self) -> PerProblem:
        """Return the proven relative error: upper / norm - 1, with probability 1 - ETA."""
        error = self.upper / self.norm - 1
        return torch.where(self.upper == self.norm, 0.0, error)


def random_starts(seeds: Sequence[int], size: int) -> Vectors:
    """Draw a float64 Gaussian start vector for each seed, (problems, size), whatever the batch.

    Shorter vectors of a seed are beginnings of longer ones, so padding a sample changes nothing.

    >>> torch.equal(random_starts([7], 3)[0], random_starts([5, 7], 20)[1, :3])
    True
    """
    # randn fills blocks of 16, and draws a partial block differently: only full ones are drawn.
    blocks = math.ceil(size / 16)
    starts = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        vector = torch.randn(16 * blocks, generator=generator, dtype=torch.float64)
        starts.append(vector[:size])
    return torch.stack(starts)


def spectral_norms(
    select: Select,
    start: Vectors,
    *,
    guess: Vectors | None = None,
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
            unfinished problems when enough problems are finished.
        start: Gaussian vectors (`random_starts`) in the precision and on the device of the
            products, exactly zero on coordinates where A is known to vanish (padding).
        guess: vectors that may be near the leading singular vectors, or zeros. They are added to
            the start vectors at the same length. The leading value is then rarely missed, and the
            probabilistic limit still holds: shifting a symmetric unimodal density makes values
            near zero no more probable.
        tol: relative accuracy of the norm, estimated.
        max_steps: largest number of steps per problem; a problem that needs more has `converged`
            False.
        within: how far the upper limit `upper` may be above the norm, relatively. With
            within = tol the accuracy tol is proven, for 1.4 to 2.4 times the products.
        rebuild: share of finished problems at which `select` is called again; above 1: never.
        vectors: whether to return the leading vectors, too.
        second: whether to return the second Ritz values and vectors, too; needs `vectors`. They
            converge later than the first. A value that occurs twice is found only once.

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
    norms = _reserve_norms(start, vectors=vectors, second=second)
    running = _Krylov(start, guess)
    products = select(running.index)
    for _ in range(max_steps):
        running.advance(running.multiply_newest(products))
        newly_done = running.has_converged(tol, within) & ~running.done
        if not newly_done.any():
            continue
        running.record(norms, newly_done)
        norms.converged[running.index[newly_done]] = True
        running.done |= newly_done
        if running.done.all():
            return norms
        # Products of finished problems cost time. Drop these problems once their share is large
        # enough to pay for a new `select`.
        if running.done.sum() >= rebuild * len(running.done):
            running.keep(~running.done)
            products = select(running.index)
    running.record(norms, ~running.done)
    return norms


def _reserve_norms(start: Tensor, *, vectors: bool, second: bool) -> Norms:
    """Return the record of all problems, with zeros that are replaced as problems are finished.

    The arguments are those of `spectral_norms`.
    """
    zeros = torch.zeros(len(start), dtype=torch.float64)
    return Norms(
        norm=zeros,
        upper=zeros.clone(),
        products=zeros.long(),
        converged=zeros.bool(),
        vector=torch.zeros_like(start) if vectors else None,
        second=zeros.clone() if second else None,
        second_vector=torch.zeros_like(start) if second else None,
    )


class _Krylov:
    """The state of the Lanczos process, one row per running problem in every tensor.

    Attributes:
        index: indices among the caller's problems.
        size: dimension of the space.
        done: which problems have ended.
        exhausted: where the Krylov space cannot grow: A maps it to itself, or it has all
            dimensions. The eigenvalues of T are then exact.
        steps: number of products so far.
        basis: the orthonormal basis U, blocks of (problems, _GROWTH, size).
        t: T = U^T A U, tridiagonal, lower triangle; on the CPU, float64.
        beta: coupling of the newest basis vector to T.
        coupling: beta once more, (problems, 1, 1), in the precision and place of the basis.
        level: log of beta_1 ... beta_k / delta.
        ritz: eigenvalues of T, ascending.
        shorter: eigenvalues of T one step earlier.
        exponent: the process runs on A = J J^T times 2^exponent; even.
        repeated: number of products that were computed again because of their size.
    """

    def __init__(self, start: Tensor, guess: Tensor | None) -> None:
        """Begin the Lanczos process with a unit vector u for each problem, (problems, size).

        u is the normalised start vector, or the normalised sum of start and guess, each of length
        one. The process builds an orthonormal basis U, whose first vector is u, and the small
        matrix T = U^T A U, without entries so far.
        """
        count, size = start.shape
        live = start.ne(0).sum(1)  # dimension of each space, without padding
        # Divide by a power of two before normalising: the squares of tiny entries may underflow.
        scaled, _ = divide_by_powers(start, 1)
        u = F.normalize(scaled, dim=1)
        length = torch.ones(count).double()
        if guess is not None:
            # No guess is added in one or two dimensions. Start and guess may cancel there, and the
            # limit would not hold: the density of <g, v> in `_add_guess` grows towards 1 and -1.
            u, length = _add_guess(u, guess * (live > 2)[:, None])
        self.index = torch.arange(count)  # all problems run at first
        self.size = live.cpu()
        self.steps = 0
        self.done = torch.zeros(count, dtype=torch.bool)
        self.exhausted = torch.zeros_like(self.done)
        # The first block of the basis; u is its first vector.
        block = start.new_zeros(count, _GROWTH, size)
        block[:, 0] = u
        self.basis = [block]
        # T, its eigenvalues (`ritz`) and those one step earlier (`shorter`). `beta` couples the
        # newest basis vector to T; `coupling` is the same number on the device of the basis.
        self.t = torch.zeros(count, 0, 0, dtype=torch.float64)
        self.ritz = self.t.new_zeros(count, 0)
        self.shorter = self.ritz
        self.beta = torch.zeros_like(length)
        self.coupling = block.new_zeros(count, 1, 1)
        # log(1 / delta'), where u has a component of at least delta' along the leading vector with
        # probability 1 - ETA. Without a guess, delta' is the delta of a random start. With a guess
        # h, u = (g + h) / `length` and delta' = delta / `length`: see `_add_guess`. Each step adds
        # its log beta_k: see `probabilistic_limit`.
        self.level = length.log() - _compute_log_delta(self.size)
        # A is multiplied by 2^exponent, chosen in the first step. `repeated` counts products that
        # are computed again for this.
        self.exponent = torch.zeros_like(self.index)
        self.repeated = torch.zeros_like(self.index)

    def multiply_newest(self, products: Products) -> Tensor:
        """Return A times the newest basis vector u; the first step scales A to about size one.

        A is scaled by a power of two, so that products neither overflow nor underflow.
        """
        newest = self._vector(self.steps).squeeze(1)
        image = self._multiply_scaled(products, newest)
        if self.steps:
            return image
        # The first step decides by which power of two A is scaled: 2^change brings the largest
        # entry of the image (`size`) to about one; 2^-100 or 2^100 is tried if A u has overflowed
        # or is 0.
        size, change = _choose_exponents(image)
        is_far = change.abs() > _ROOM // 2
        if is_far.any():
            # A u is so large or small that it may have overflowed, or lost digits to underflow:
            # compute A u again, with A scaled.
            self.exponent += change.where(is_far, 0)
            self.repeated += is_far
            image = self._multiply_scaled(products, newest)
            size, change = _choose_exponents(image)
            # A u = 0 even so: there is nothing to scale.
            self.exponent[size == 0] = 0
            change[size == 0] = 0
        self.exponent += change
        return shift_exponent(image, change[:, None])

    def _multiply_scaled(self, products: Products, u: Tensor) -> Tensor:
        """Return 2^exponent A u for every problem, with the problem's own exponent.

        A = J J^T may be very large or small. The exponents make products of about size one.

        Args:
            products: returns A u for every problem.
            u: one vector per problem, (problems, size).
        """
        if not self.exponent.any():
            return products(u)
        # 2^exponent may be out of range: multiply u by a part of the power that keeps u in range,
        # and A u by the remaining part.
        before = self.exponent.clamp(-_ROOM, _ROOM)
        after = self.exponent - before
        image = products(shift_exponent(u, before[:, None]))
        return shift_exponent(image, after[:, None])

    def advance(self, product: Tensor) -> None:
        """Extend basis and T by one Lanczos step, given A times the newest basis vector.

        w = A u_k - alpha_k u_k - beta_{k-1} u_{k-1}, made orthogonal to all earlier vectors;
        beta_k = |w| and u_{k+1} = w / beta_k.
        """
        alpha, w = self._orthogonalise(product)
        self.coupling = vector_norm(w, dim=2, keepdim=True)  # beta_k
        entries = torch.cat([alpha, self.coupling], 2)  # both in one transfer to the CPU
        entries = entries[:, 0].to("cpu", torch.float64)
        is_finite = entries.isfinite().all(1)
        self.steps += 1
        if not is_finite.all():
            problem = int(self.index[~is_finite][0])
            raise EvaluationError(
                f"The Jacobian product of problem {problem} is not finite at step {self.steps}.",
                "Look for infinite weights or activations, or compute in float64.",
            )
        self._extend_t(*entries.unbind(1))
        if self.steps % _GROWTH == 0:  # the last block of the basis is full
            block = w.new_zeros(len(w), _GROWTH, w.shape[2])
            self.basis.append(block)
        length = self.coupling.clamp_min(torch.finfo(w.dtype).tiny)
        torch.div(w, length, out=self._vector(self.steps))

    def _orthogonalise(self, product: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha_k = <A u_k, u_k>, and A u_k made orthogonal to all basis vectors.

        Args:
            product: A u_k, A times the newest basis vector, (problems, size).
        """
        w = product.unsqueeze(1)  # (problems, 1, size)
        last = self._vector(self.steps)
        alpha = (w * last).sum(2, keepdim=True)
        w = torch.addcmul(w, alpha, last, value=-1)
        if self.steps:
            # Subtract beta_{k-1} u_{k-1} first (`coupling` is beta_{k-1}). The loop over all basis
            # vectors below then removes rounding errors only, so one pass is enough.
            before = self._vector(self.steps - 1)
            w.addcmul_(self.coupling, before, value=-1)
        # The basis is stored in blocks of _GROWTH vectors; the last block may not be full.
        for i, block in enumerate(self.basis):
            remaining = self.steps + 1 - _GROWTH * i  # number of vectors without earlier blocks
            vectors = block[:, :remaining]
            w.baddbmm_(w @ vectors.mT, vectors, alpha=-1)
        return alpha, w

    def _extend_t(self, alpha: Tensor, beta: Tensor) -> None:
        """Add a row and a column to T: alpha_k on the diagonal, and beta_{k-1} beside it.

        beta_k couples the next basis vector to T. It is 0 if the Krylov space is exhausted.
        """
        self.t = F.pad(self.t, (0, 1, 0, 1))
        self.t[:, -1, -1] = alpha
        if self.steps > 1:
            self.t[:, -1, -2] = self.beta
        self.beta = beta
        self.exhausted = (beta == 0) | (self.size <= self.steps)
        self.level = self.level + beta.log()  # for `probabilistic_limit`
        self.shorter = self.ritz  # for `kato_temple`
        self.ritz = torch.linalg.eigvalsh(self.t)

    def has_converged(self, tol: float, within: float) -> Tensor:
        """Return which problems have converged.

        The norm must be proven to `within`, and accurate to `tol` by an estimate or a proof. Where
        the Krylov space is `exhausted` (it cannot grow), the norm is exact.
        """
        is_proven = self.proves(within)
        if not is_proven.any():  # the first steps, where an estimate cannot end any problem
            return self.exhausted
        # Eigenvalues of A = J J^T are squares of norms: a relative error tol of a norm is an error
        # of (1 + tol)^2 - 1 of the eigenvalue.
        # `ritz` are the eigenvalues of T, `shorter` those of T one step earlier. Both, and `beta`,
        # give the residual of the leading one.
        estimate = kato_temple(self.ritz, self.shorter, self.beta)
        is_accurate = estimate <= (1 + tol) ** 2 - 1
        is_accurate |= self.proves(tol)
        return (is_proven & is_accurate) | self.exhausted

    def proves(self, share: float) -> Tensor:
        """Return where the norm is proven to be at most 1 + share times the estimate.

        The proof has the probability 1 - ETA.
        """
        # The largest eigenvalue of A is estimated by the largest Ritz value theta_1. It is at most
        # t if log det(t - T) = sum_i log(t - theta_i) reaches the level: `probabilistic_limit`.
        t = (1 + share) ** 2 * self.ritz[:, -1:]
        log_det = (t - self.ritz).log().sum(1)
        return log_det >= self.level

    def record(self, norms: Norms, mask: Tensor) -> None:
        """Write the results so far of some problems into the record of all.

        Args:
            norms: the record of all problems of the caller.
            mask: which of the running problems to write.
        """
        problems = self.index[mask]
        ritz = self.ritz[mask]  # estimates of the eigenvalues of A, ascending
        top = ritz[:, -1].clamp_min(0.0)
        limit = probabilistic_limit(ritz, self.level[mask])
        # In an exhausted space the eigenvalues are exact.
        limit = torch.where(self.exhausted[mask], top, limit)
        # Norms are roots of eigenvalues of A, which is scaled by 2^exponent. Exponents are even.
        half_exponent = -self.exponent[mask] // 2
        norms.norm[problems] = shift_exponent(top.sqrt(), half_exponent)
        norms.upper[problems] = shift_exponent(limit.sqrt(), half_exponent)
        # `repeated` products were computed twice, to scale A.
        norms.products[problems] = self.steps + self.repeated[mask]
        if norms.vector is None or not len(problems):
            return
        # Ritz vectors: U times the eigenvectors of T.
        eigenvectors = torch.linalg.eigh(self.t[mask]).eigenvectors
        norms.vector[problems] = self._sum_basis(mask, eigenvectors[:, :, -1])
        if norms.second is not None and norms.second_vector is not None and self.steps > 1:
            second = ritz[:, -2].clamp_min(0.0).sqrt()
            norms.second[problems] = shift_exponent(second, half_exponent)
            norms.second_vector[problems] = self._sum_basis(mask, eigenvectors[:, :, -2])

    def _sum_basis(self, mask: Tensor, weights: Tensor) -> Tensor:
        """Return the sum U w of the basis vectors with weights w, (problems, size).

        Args:
            mask: which of the running problems.
            weights: w of these problems, (problems, steps).
        """
        weights = weights.to(self.basis[0])
        rows = mask.nonzero()[:, 0].to(weights.device)
        total = torch.zeros_like(self.basis[0][rows, :1])
        # The basis is stored in blocks of _GROWTH vectors. A new block may have no weight yet.
        parts = torch.split(weights, _GROWTH, 1)
        for part, block in zip(parts, self.basis, strict=False):
            count = part.shape[1]
            total.baddbmm_(part[:, None], block[rows, :count])
        return total.squeeze(1)

    def keep(self, mask: Tensor) -> None:
        """Keep only the problems that are True in the mask, and drop the state of the others."""
        rows = mask.nonzero()[:, 0].to(self.coupling.device)
        self.basis = [block[rows] for block in self.basis]
        self.coupling = self.coupling[rows]
        # All other attributes but `steps` are tensors on the CPU, one row per problem.
        for name in vars(self).keys() - {"basis", "coupling", "steps"}:
            setattr(self, name, getattr(self, name)[mask])

    def _vector(self, k: int) -> Tensor:
        """Return basis vector k of every problem, (problems, 1, size), a view."""
        return self.basis[k // _GROWTH][:, k % _GROWTH, None]


def _add_guess(g: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g + h) / |g + h| and |g + h|, for a random start g and a guess h of length one.

    Proven limits need a start with a component of at least delta along the leading vector v, with
    probability 1 - ETA. If |<g, v>| >= delta holds with this probability, the component of
    (g + h) / |g + h| is at least delta / |g + h| with it. For this component is
    |<g, v> + c| / |g + h| with c = <h, v>, and P(|<g, v> + c| < delta) is largest for c = 0
    (Anderson): the density of <g, v> is symmetric and, in 3 or more dimensions, does not rise
    from 0 on.

    Args:
        g: random vectors, uniform on the unit sphere, (problems, size).
        guess: vectors in the direction of h; where one is 0, so is h.
    """
    # Divided by powers of two first, one for each vector (axis 1): the squares of tiny entries may
    # underflow.
    scaled_guess, _ = divide_by_powers(guess, 1)
    total = g + F.normalize(scaled_guess, dim=1)  # g + h
    length = vector_norm(total, dim=1).to("cpu", torch.float64)
    scaled, _ = divide_by_powers(total, 1)
    return F.normalize(scaled, dim=1), length


def _compute_log_delta(size: Tensor) -> Tensor:
    """Return log delta with P(|<u, v>| < delta) <= ETA, for u uniform on the sphere and v fixed.

    A random start u has a component of at least delta along the leading vector v, except with
    probability ETA. P is at most 2 delta times the largest density of <u, v>, which for n >= 3
    dimensions is Gamma(n/2) / (sqrt(pi) Gamma((n-1)/2)). So delta = ETA / 2 / density. For n = 2
    this is the density at 0, and P is larger than ETA by less than 1e-6 of it.

    Args:
        size: dimension n of each space.
    """
    half = size.double() / 2
    log_quotient = torch.lgamma(half) - torch.lgamma(half - 0.5)
    log_density = log_quotient - 0.5 * math.log(math.pi)
    return math.log(ETA / 2) - log_density


def _choose_exponents(image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry of each row, and an even exponent e: 2^e brings it to about one.

    e is 0 for entries between 2^-20 and 2^20, which need no scaling.

    Args:
        image: the products A u of the first step, (problems, size).
    """
    size = image.abs().amax(1).to("cpu", torch.float64)
    # e is even: a norm is the root of a scaled eigenvalue, and the root of 2^e must be exact.
    half = (size.log2() / 2).round()
    exponent = -2 * half.clamp(-450, 450)  # 2^900 is in the range of float64
    # Where a number underflowed to 0, or overflowed, the factor is unknown: try 2^100, or 2^-100.
    exponent = exponent.where(size > 0, _ROOM)
    exponent = exponent.where(size.isfinite(), -_ROOM)
    return size, exponent.where(exponent.abs() > 20, 0).long()
