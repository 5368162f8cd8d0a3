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
from dataclasses import dataclass, replace

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

    def times(self, factor: Tensor | float) -> Norms:
        """Return the norms of the same problems times a factor, one or one for each."""
        return replace(self, norm=self.norm * factor, upper=self.upper * factor)

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
    guess: Float[Tensor, "problems size"] | None = None,
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
        guess: vectors that may be near the singular vectors, added to the start vectors at the
            same length; or zeros. A norm close to the second one is then rarely missed, and the
            probabilistic limit stays what it is: a shift of a symmetric unimodal density puts no
            more of it near zero.
        tol: relative accuracy of the norm.
        max_steps: most products per problem; a problem that needs more has `converged` False.
        guard: how far the probabilistic limit may lie above the norm, relatively.
        rebuild: share of finished problems at which `select` is asked again; above 1 never.

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
    running, found = _begin(start, guess), _blank(len(start))
    products = select(running.index)
    for _ in range(max_steps):
        running.advance(products(running.last))
        fresh = running.settled(tol, guard) & ~running.done
        if not fresh.any():
            continue
        _record(found, running, fresh)
        found.converged[running.index[fresh]] = True
        running.done |= fresh
        if running.done.all():
            return found
        if int(running.done.sum()) >= rebuild * len(running.done):
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
    t: Tensor  # T = U^T A U, tridiagonal, lower triangle; on the CPU, float64
    beta: Tensor  # what couples the newest basis vector to T
    level: Tensor  # log of beta_1 ... beta_k / delta, see `_log_delta`
    ritz: Tensor  # eigenvalues of T, ascending
    shorter: Tensor  # eigenvalues of T one step earlier

    @property
    def steps(self) -> int:
        return self.t.shape[1]

    @property
    def last(self) -> Tensor:
        """The newest basis vector."""
        return self._vector(self.steps).squeeze(1)

    def advance(self, product: Tensor) -> None:
        """Extend basis and T, given A times the newest basis vector."""
        w, last = product.unsqueeze(1), self._vector(self.steps)
        alpha = (w * last).sum(2, keepdim=True)
        w = torch.addcmul(w, alpha, last, value=-1)
        if self.steps:
            # The recurrence first: the sweep below then removes rounding only, and one suffices.
            before = self._vector(self.steps - 1)
            w.addcmul_(self.beta.to(w)[:, None, None], before, value=-1)
        for i, block in enumerate(self.blocks):
            filled = block[:, : self.steps + 1 - _BLOCK * i]
            w.baddbmm_(w @ filled.mT, filled, alpha=-1)
        beta = torch.linalg.vector_norm(w, dim=2, keepdim=True)
        self._couple(torch.cat([alpha, beta], 2)[:, 0].to("cpu", torch.float64))
        if self.steps % _BLOCK == 0:
            self.blocks.append(w.new_zeros(len(w), _BLOCK, w.shape[2]))
        tiny = torch.finfo(w.dtype).tiny
        torch.div(w, beta.clamp_min(tiny), out=self._vector(self.steps))

    def settled(self, tol: float, guard: float) -> Tensor:
        """Which problems meet the stop rule."""
        top = self.ritz[:, -1:]
        margin = ((1 + tol) ** 2 - 1) * top[:, 0]
        close = _kato_temple(self.ritz, self.shorter, self.beta) <= margin
        if not close.any():
            return self.exhausted()
        seen = ((1 + guard) ** 2 * top - self.ritz).log().sum(1) >= self.level
        return (close & seen) | self.exhausted()

    def norm(self) -> Tensor:
        """The estimate of sigma_1."""
        return self.ritz[:, -1].clamp_min(0.0).sqrt()

    def exhausted(self) -> Tensor:
        """Where the Krylov space is invariant: T has every eigenvalue that the start can see."""
        return (self.beta == 0) | (self.size <= self.steps)

    def keep(self, mask: Tensor) -> None:
        """Drop the other problems."""
        self.blocks = [block[mask] for block in self.blocks]
        for name in ("index", "size", "done", "t", "beta", "level", "ritz", "shorter"):
            setattr(self, name, getattr(self, name)[mask])

    def _couple(self, entries: Tensor) -> None:
        """Append a row (alpha, next beta) to T."""
        if not entries.isfinite().all():
            bad = self.index[~entries.isfinite().all(1)]
            raise EvaluationError(
                f"The Jacobian product of problem {int(bad[0])} is not finite "
                f"at step {self.steps + 1}.",
                "Look for infinite weights or activations, or compute in float64.",
            )
        self.t = torch.nn.functional.pad(self.t, (0, 1, 0, 1))
        self.t[:, -1, -1] = entries[:, 0]
        if self.steps > 1:
            self.t[:, -1, -2] = self.beta
        self.beta = entries[:, 1]
        self.level = self.level + self.beta.log()
        self.shorter, self.ritz = self.ritz, torch.linalg.eigvalsh(self.t)

    def _vector(self, k: int) -> Tensor:
        return self.blocks[k // _BLOCK][:, k % _BLOCK, None]


def _begin(start: Tensor, guess: Tensor | None) -> _Running:
    count, size = start.shape
    dimension = start.ne(0).sum(1).cpu()
    block, length = start.new_zeros(count, _BLOCK, size), torch.ones(count, dtype=torch.float64)
    block[:, 0] = _normalized(start)
    if guess is not None:
        mixed = block[:, 0] + _normalized(guess)
        length = torch.linalg.vector_norm(mixed, dim=1).to("cpu", torch.float64)
        block[:, 0] = _normalized(mixed)
    empty = torch.zeros(count, 0, dtype=torch.float64)
    return _Running(
        index=torch.arange(count),
        size=dimension,
        done=torch.zeros(count, dtype=torch.bool),
        blocks=[block],
        t=empty[:, :, None].expand(-1, -1, 0),
        beta=empty.sum(1),
        level=length.log() - _log_delta(dimension),
        ritz=empty,
        shorter=empty,
    )


def _normalized(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=1, eps=torch.finfo(vectors.dtype).tiny)


def _log_delta(size: Tensor) -> Tensor:
    """Log of delta with P(|<u, v>| >= delta) >= 1 - ETA for u uniform on the sphere, v fixed.

    For size >= 3 the density of <u, v> is at most Gamma(n/2) / (sqrt(pi) Gamma((n-1)/2)).
    """
    half = size.double() / 2
    density = torch.lgamma(half) - torch.lgamma(half - 0.5) - 0.5 * math.log(math.pi)
    return math.log(ETA / 2) - density


def _blank(count: int) -> Norms:
    numbers, steps = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    return Norms(numbers, numbers.clone(), steps, torch.zeros(count, dtype=torch.bool))


def _record(found: Norms, running: _Running, mask: Tensor) -> None:
    which, norm = running.index[mask], running.norm()[mask]
    limit = _probabilistic_limit(running.ritz[mask], running.level[mask])
    found.norm[which] = norm
    found.upper[which] = torch.where(running.exhausted()[mask], norm, limit)
    found.products[which] = running.steps


def _kato_temple(ritz: Tensor, shorter: Tensor, beta: Tensor) -> Tensor:
    """Estimate lambda_1 - theta_1; `shorter` are the Ritz values one step earlier."""
    top = ritz[:, -1:]
    gaps = (top - ritz[:, :-1]).clamp_min(1e-300)
    # The squared last entry of T's top eigenvector, in terms of the interlacing eigenvalues.
    residual = beta.square() * ((top - shorter).clamp_min(0.0) / gaps).prod(1)
    if ritz.shape[1] == 1:
        return residual.sqrt()
    return torch.minimum(residual.sqrt(), residual / gaps[:, -1])


def _probabilistic_limit(ritz: Tensor, level: Tensor) -> Tensor:
    """Solve log det(t - T) = level for t above theta_1 and return sqrt(t).

    Newton's method in y = log(t - theta_1), where the left side is convex and increasing: started
    to the right it only descends, so every iterate is a limit too.
    """
    top = ritz[:, -1].clamp_min(0.0)
    gaps = (ritz[:, -1:] - ritz[:, :-1]).log()
    y = torch.minimum(level / ritz.shape[1], level - gaps.sum(1))
    for _ in range(60):
        value = y + torch.logaddexp(y[:, None], gaps).sum(1)
        slope = 1 + torch.sigmoid(y[:, None] - gaps).sum(1)
        step = (value - level).clamp_min(0.0) / slope
        y = y - step
        if not (step * y.exp() > 1e-6 * top).any():
            break
    return (top + y.exp()).sqrt()
