"""Spectral norms of many Jacobians at once: the Lanczos process on A = J J^T.

Only products A u = J (J^T u) are needed, in the space of outputs. Vectors live in the precision of
the products, fully reorthogonalised; the small tridiagonal algebra is float64 on the CPU. A
problem ends when the Kato-Temple estimate puts the largest Ritz value within `tol`, and the
probabilistic limit says that nothing above (1 + guard) times the norm was missed: Kato-Temple
alone can settle on the second singular value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lipaudit.errors import EvaluationError

Products = Callable[[Tensor], Tensor]
"""u -> A u for every problem, (problems, size) to (problems, size)."""

Select = Callable[[Tensor], Products]
"""Indices of problems -> the products of these problems."""

ETA = 1e-3
"""Probability, over the random start, that a norm exceeds its `upper`."""

_BLOCK = 8  # basis vectors per allocation: memory grows with the steps that are taken


@dataclass(frozen=True)
class Norms:
    """Spectral norms, one per problem, float64 on the CPU.

    Attributes:
        norm: root of the largest Ritz value: never above the truth, beyond rounding.
        upper: the truth is at most this with probability 1 - ETA; `norm` itself where the Krylov
            space was exhausted.
        products: products A u that were spent.
        converged: whether the stop rule was met.
    """

    norm: Float[Tensor, "*problems"]
    upper: Float[Tensor, "*problems"]
    products: Int[Tensor, "*problems"]
    converged: Bool[Tensor, "*problems"]

    def map(self, change: Callable[[Tensor], Tensor]) -> Norms:
        """Return the same norms with every tensor passed through `change`."""
        return Norms(
            change(self.norm), change(self.upper), change(self.products), change(self.converged)
        )


def random_starts(seeds: Sequence[int], size: int) -> Float[Tensor, "problems size"]:
    """Draw one float64 Gaussian start vector per seed, whatever else is in the batch.

    The vector of a seed is the beginning of its longer ones, so padding a sample changes nothing.

    >>> torch.equal(random_starts([7], 3)[0], random_starts([5, 7], 20)[1, :3])
    True
    """
    drawn = -(-size // 16) * 16  # randn fills blocks of 16 and draws a partial one differently
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack(
        [torch.randn(drawn, generator=g, dtype=torch.float64)[:size] for g in generators]
    )


def spectral_norms(
    select: Select,
    start: Float[Tensor, "problems size"],
    *,
    tol: float = 1e-4,
    max_steps: int = 300,
    guard: float = 0.05,
    rebuild: float = 0.5,
) -> Norms:
    """Return the largest singular value of J for every problem, from products with A = J J^T.

    The result of a problem depends on its own start vector, not on what it is batched with.

    Args:
        select: gives the products of a set of problems; asked for all of them first, and again
            for those still running when enough others are done.
        start: Gaussian vectors (`random_starts`) in the precision and on the device of the
            products, exactly zero on coordinates where A is known to vanish (padding).
        tol: relative accuracy of the norm.
        max_steps: most products per problem; a problem that needs more has `converged` False.
        guard: how far the probabilistic limit may lie above the norm, relatively.
        rebuild: share of finished problems at which `select` is asked again.

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
    running, found = _begin(start), _blank(len(start))
    products = select(running.index)
    for _ in range(max_steps):
        running.advance(products(running.last))
        fresh = running.settled(tol, guard) & ~running.done
        _record(found, running, fresh)
        found.converged[running.index[fresh]] = True
        running.done |= fresh
        if running.done.all():
            return found
        if running.done.double().mean() >= rebuild:
            running.keep(~running.done)
            products = select(running.index)
    _record(found, running, ~running.done)
    return found


@dataclass
class _Running:
    """The problems the products cover at present: one row each in every tensor."""

    index: Tensor  # which of the caller's problems
    size: Tensor  # dimension of the space A acts on
    done: Tensor
    blocks: list[Tensor]  # the orthonormal basis U, (problems, _BLOCK, size) each
    alpha: Tensor  # (problems, steps): diagonal of T = U^T A U
    beta: Tensor  # (problems, steps): its off-diagonal; the last entry couples to `last`
    ritz: Tensor  # eigenvalues of T, ascending
    shorter: Tensor  # eigenvalues of T one step earlier

    @property
    def steps(self) -> int:
        return self.alpha.shape[1]

    @property
    def last(self) -> Tensor:
        """The newest basis vector."""
        return self._vector(self.steps)

    def advance(self, product: Tensor) -> None:
        """Extend basis and T, given A times the newest basis vector."""
        alpha = (product * self.last).sum(1, keepdim=True)
        w = torch.addcmul(product, alpha, self.last, value=-1)
        if self.steps:
            # The recurrence first: the sweep below then removes rounding only, and one suffices.
            w.addcmul_(self.beta[:, -1:].to(w), self._vector(self.steps - 1), value=-1)
        for block in self._filled():
            w.unsqueeze(1).baddbmm_((block @ w.unsqueeze(2)).mT, block, alpha=-1)
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        self._couple(torch.cat([alpha, beta], 1).to("cpu", torch.float64))
        self._append(w / beta.clamp_min(torch.finfo(w.dtype).tiny))

    def settled(self, tol: float, guard: float) -> Tensor:
        """Which problems meet the stop rule."""
        norm = self.norm()
        error = _kato_temple(self.ritz, self.shorter, self.beta[:, -1])
        close = (norm.square() + error).sqrt() - norm <= tol * norm
        inside = ((1 + guard) * norm).square()[:, None] - self.ritz
        seen = inside.log().sum(1) >= self.log_threshold()
        return close & seen | self.exhausted()

    def norm(self) -> Tensor:
        """The estimate of sigma_1."""
        return self.ritz[:, -1].clamp_min(0.0).sqrt()

    def exhausted(self) -> Tensor:
        """Where the Krylov space is invariant: T has every eigenvalue that the start can see."""
        return (self.steps >= self.size) | (self.beta[:, -1] == 0)

    def log_threshold(self) -> Tensor:
        """Log of beta_1 ... beta_k / delta: the probabilistic limit is where det(t - T) meets it.

        |<u, v_1>| >= delta with probability 1 - ETA for u uniform on the sphere, because the
        density of <u, v_1> is at most Gamma(n/2) / (sqrt(pi) Gamma((n-1)/2)).
        """
        half = self.size.double() / 2
        density = torch.lgamma(half) - torch.lgamma(half - 0.5) - 0.5 * math.log(math.pi)
        return math.log(2 / ETA) + density + self.beta.log().sum(1)

    def keep(self, mask: Tensor) -> None:
        """Drop the other problems."""
        self.blocks = [block[mask] for block in self.blocks]
        for name in ("index", "size", "done", "alpha", "beta", "ritz", "shorter"):
            setattr(self, name, getattr(self, name)[mask])

    def _couple(self, entries: Tensor) -> None:
        """Append (alpha, beta) to T."""
        bad = self.index[~entries.isfinite().all(1)]
        if len(bad):
            raise EvaluationError(
                f"The Jacobian product of problem {int(bad[0])} is not finite "
                f"at step {self.steps + 1}.",
                "Look for infinite weights or activations, or compute in float64.",
            )
        self.alpha = torch.cat([self.alpha, entries[:, :1]], 1)
        t = torch.diag_embed(self.alpha)
        t.diagonal(-1, 1, 2).copy_(self.beta)  # eigvalsh reads the lower triangle only
        self.shorter, self.ritz = self.ritz, torch.linalg.eigvalsh(t)
        self.beta = torch.cat([self.beta, entries[:, 1:]], 1)

    def _append(self, vector: Tensor) -> None:
        if self.steps % _BLOCK == 0:
            self.blocks.append(vector.new_zeros(len(vector), _BLOCK, vector.shape[1]))
        self._vector(self.steps).copy_(vector)

    def _vector(self, k: int) -> Tensor:
        return self.blocks[k // _BLOCK][:, k % _BLOCK]

    def _filled(self) -> list[Tensor]:
        counts = [self.steps + 1 - _BLOCK * i for i in range(len(self.blocks))]
        return [block[:, :count] for block, count in zip(self.blocks, counts, strict=True)]


def _begin(start: Tensor) -> _Running:
    block = start.new_zeros(len(start), _BLOCK, start.shape[1])
    tiny = torch.finfo(start.dtype).tiny
    block[:, 0] = start / torch.linalg.vector_norm(start, dim=1, keepdim=True).clamp_min(tiny)
    empty = torch.zeros(len(start), 0, dtype=torch.float64)
    return _Running(
        index=torch.arange(len(start)),
        size=start.ne(0).sum(1).cpu(),
        done=torch.zeros(len(start), dtype=torch.bool),
        blocks=[block],
        alpha=empty,
        beta=empty,
        ritz=empty,
        shorter=empty,
    )


def _blank(count: int) -> Norms:
    numbers, steps = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    return Norms(numbers, numbers.clone(), steps, torch.zeros(count, dtype=torch.bool))


def _record(found: Norms, running: _Running, mask: Tensor) -> None:
    if not mask.any():
        return
    which, norm = running.index[mask], running.norm()[mask]
    limit = _probabilistic_limit(running.ritz[mask], running.log_threshold()[mask])
    found.norm[which] = norm
    found.upper[which] = torch.where(running.exhausted()[mask], norm, limit)
    found.products[which] = running.steps


def _kato_temple(ritz: Tensor, shorter: Tensor, beta: Tensor) -> Tensor:
    """Estimate lambda_1 - theta_1; `shorter` are the Ritz values one step earlier."""
    gaps = (ritz[:, -1:] - ritz[:, :-1]).clamp_min(1e-300)
    # The squared last entry of T's top eigenvector, in terms of the interlacing eigenvalues.
    weight = ((ritz[:, -1:] - shorter).clamp_min(0.0) / gaps).prod(1)
    residual = beta * weight.sqrt()
    if not gaps.shape[1]:
        return residual
    return torch.minimum(residual, residual.square() / gaps[:, -1])


def _probabilistic_limit(ritz: Tensor, log_threshold: Tensor) -> Tensor:
    """Solve log det(t - T) = log_threshold for t above theta_1 and return sqrt(t).

    Newton's method in y = log(t - theta_1), where the left side is convex and increasing: started
    to the right it only descends, so every iterate is a limit too.
    """
    gaps = (ritz[:, -1:] - ritz[:, :-1]).log()
    y = torch.minimum(log_threshold / ritz.shape[1], log_threshold - gaps.sum(1))
    for _ in range(60):
        value = y + torch.logaddexp(y[:, None], gaps).sum(1)
        slope = 1 + torch.sigmoid(y[:, None] - gaps).sum(1)
        down = (value - log_threshold).clamp_min(0.0) / slope
        y = y - down
        if not (down > 1e-12).any():
            break
    return (ritz[:, -1].clamp_min(0.0) + y.exp()).sqrt()
