"""The symbols of forms, and how far a form can move.

e_1 .. e_n are the coordinates of the input, in the unit ball of its norm. At order 2 their
products e_i e_j, i <= j, follow. Then come errors in [-1, 1], one for each approximation of an
operation. A stack of coefficients has one row per symbol, (rows, *shape), in that order. Missing
rows at the end are zero, so that older forms need not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.certify.error_blocks import ErrorBlock, create_errors
from lipaudit.certify.rounding import DOUBLE, cast_up, gamma, summed_up, tiny, up

Norm = Literal["linf", "l2"]

SETTLE = 5e-5
"""If the slack exceeds this share of a radius, it becomes symbols before an operation mixes it."""

_AT_ONCE = 2**18
"""Number of values summed at once: 1 MB in single precision."""

_SQUARINGS = 2
"""Number of squarings of a quadratic form when its norm is bounded through a power of it."""


@dataclass(frozen=True)
class Sizes:
    """How far every entry of a stack can move, by part; float64, never too small.

    Attributes:
        linear: the largest value of the part linear in the input.
        quadratic: no less than that of the quadratic part, whatever the signs.
        errors: the largest value of the errors' part.
    """

    linear: Float[Tensor, "*shape"]
    quadratic: Float[Tensor, "*shape"]
    errors: Float[Tensor, "*shape"]

    @property
    def mass(self) -> Float[Tensor, "*shape"]:
        """Return the sum of all parts, valid for any signs of the coefficients."""
        return self.linear + self.quadratic + self.errors


@dataclass
class Unit:
    """The ReLUs of one call with unknown sign: h = a z + m (1 + eps).

    Attributes:
        centre, generators, slack: of the forms z, (k,), (rows, k) and (k,).
        slope, offset: a and m.
        first: number of the symbol of the first; the others follow.
    """

    centre: Tensor
    generators: Tensor
    slack: Tensor
    slope: Tensor
    offset: Tensor
    first: int


class Symbols:
    """The symbols of one pass over one ball, and its ReLUs for branching.

    Args:
        n: dimension of the input.
        norm: norm of the ball.
        order: 1 for affine forms, 2 for quadratic ones.
        dtype: of the coefficients; centres and slack are float64 in any case.
        rules: what every operation does to forms, by name.
        shown: dtype that the model sees.
        settle: see `SETTLE`; affects tightness and size of forms, never validity.

    Attributes:
        dissolved: the blocks that became rows in some form.
        trial: runs a call of the model in place of its rule.
        plan: applies the rule of a call of which only a part is read.
    """

    trial: Callable[..., Any] | None = None
    plan: Callable[..., Any] | None = None

    def __init__(
        self,
        n: int,
        norm: Norm,
        *,
        order: int,
        dtype: torch.dtype,
        rules: Mapping[str, Callable[..., Any]],
        shown: torch.dtype = DOUBLE,
        settle: float = SETTLE,
    ) -> None:
        self.n, self.norm, self.order, self.dtype = n, norm, order, dtype
        self.rules, self.shown, self.settle = rules, shown, settle
        self.pairs = (
            torch.triu_indices(n, n) if order == 2 else torch.empty(2, 0, dtype=torch.long)
        )
        self.first_error = self.count = n + self.pairs.shape[1]
        self.units: list[Unit] = []
        self.dissolved: set[int] = set()

    def sizes(self, g: Float[Tensor, "rows ..."], blocks: Sequence[ErrorBlock] = ()) -> Sizes:
        """Return how far every entry of a stack can move.

        On the L2 ball |sum g_i e_i| <= ||g||_2, and |sum q_ij e_i e_j| <= ||q||_2 for the products
        of a unit vector's entries are a vector of norm <= 1; elsewhere 1-norms.
        """
        linear, quadratic, errors = g.tensor_split((self.n, self.first_error))
        moved = _one_norm(errors)
        for block in blocks:
            moved = up(moved + _one_norm(block.rows))
        if self.norm == "linf":
            return Sizes(_one_norm(linear), _one_norm(quadratic), moved)
        # Errors stay in a box, whatever the norm of the input: only these two have 2-norms.
        linear, quadratic = (
            up(_sum_rows(rows, torch.square).sqrt()) for rows in (linear, quadratic)
        )
        return Sizes(linear, quadratic, moved)

    def quadratic_range(
        self, g: Float[Tensor, "rows ..."]
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """Return the least and the largest value of the quadratic part, outwards.

        e^T Q e lies in [-r, r] with r = ||Q|| |e|^2, |e|^2 <= 1 or n; on the box also between the
        sums of its coefficients' own ends, e_i^2 in [0, 1] and e_i e_j in [-1, 1].
        """
        q = g[self.n : self.first_error]
        if not len(q):
            zero = torch.zeros(g.shape[1:], dtype=DOUBLE, device=g.device)
            return zero, zero
        squares = (self.pairs[0] == self.pairs[1]).to(q.device)
        # Of a pair, each of its two entries of the matrix has half of the coefficient.
        halves, parts = torch.where(squares, 1.0, 0.5).to(q)[:, None], []
        # A few entries at a time, so that they stay in the cache.
        some = max(1, _AT_ONCE // self.n**2)
        for part in q.reshape(len(q), -1).split(some, 1):  # type: ignore[no-untyped-call]
            full = (part * halves).mT.contiguous().index_select(1, self._full.to(q.device))
            parts.append(bound_norms(full.view(-1, self.n, self.n), _SQUARINGS))
        radius = torch.cat(parts).view(q.shape[1:])
        if self.norm == "l2":
            return -radius, radius
        mixed, diagonal = _one_norm(q[~squares]), q[squares]
        high = torch.minimum(mixed + _one_norm(diagonal.clamp_min(0)), self.n * radius)
        low = torch.minimum(mixed + _one_norm(diagonal.clamp_max(0)), self.n * radius)
        return -low, high

    def pack(self, form: Float[Tensor, "n n ..."]) -> Float[Tensor, "rows ..."]:
        """Return the coefficients of e_i e_j, i <= j, of sum_ij form_ij e_i e_j."""
        i, j = self.pairs.to(form.device)
        return torch.where(
            (i == j).view(-1, *[1] * (form.ndim - 2)), form[i, j], form[i, j] + form[j, i]
        )

    def add_products(
        self, rows: Float[Tensor, "rows ..."], x: Tensor, y: Tensor, f: Callable[..., Tensor]
    ) -> None:
        """Add sum_ij f(x_i, y_j) e_i e_j of two linear parts to a stack, in place."""
        first = self.n
        for i in range(self.n):
            part = rows[first : first + self.n - i]
            part += f(x[i : i + 1], y[i:])
            part[1:] += f(x[i + 1 :], y[i : i + 1])
            first += self.n - i

    def add_squares(self, rows: Float[Tensor, "rows ..."], x: Tensor, weight: Tensor) -> None:
        """Add weight (sum_i x_i e_i)^2, entry by entry, to a stack: in half of the products."""
        first, double = self.n, 2 * weight * x
        for i in range(self.n):
            rows[first].addcmul_(double[i], x[i], value=0.5)
            rows[first + 1 : first + self.n - i].addcmul_(double[i], x[i + 1 :])
            first += self.n - i

    def birth(self, radius: Float[Tensor, "*shape"]) -> ErrorBlock:
        """Add an error symbol of the given radius to every entry with a positive radius."""
        first = self.count
        self.count += int((radius > 0).sum())
        return create_errors(radius, first, self.dtype)

    @cached_property
    def _full(self) -> Tensor:
        """Return the index among the pairs of each entry of a symmetric matrix, (n^2,)."""
        places = torch.zeros(self.n, self.n, dtype=torch.long)
        i, j = self.pairs
        places[i, j] = places[j, i] = torch.arange(len(i))
        return places.flatten()


def bound_norms(matrices: Float[Tensor, "b n n"], squarings: int) -> Float[Tensor, " b"]:
    """Bound ||Q|| <= ||Q^k||_F^(1/k) of symmetric matrices, k = 2^squarings; float64.

    Q is divided by about its norm first. That of a power is raised by what rounding can take:
    (A + E)^2 - A^2 = A E + E A + E^2, and a product itself is off by gamma ||A||_F^2.
    """
    n, dtype = matrices.shape[-1], matrices.dtype
    small = n * n * tiny(dtype)
    size = _norm(matrices.flatten(1))
    # Divided by about its norm, no power of Q overflows or underflows.
    scale = cast_up(size, dtype).clamp_min(tiny(dtype) ** 0.5)
    power = matrices / scale[:, None, None]
    size = up(size / scale.to(DOUBLE))
    error = gamma(4, dtype) * size + small
    for _ in range(squarings):
        error = (2 * error + gamma(n + 8, dtype) * size) * size + error.square() + small
        error, power = up(error), torch.bmm(power, power)
        size = _norm(power.flatten(1))
    root = up(size + error, 8) ** (0.5**squarings) * scale.to(DOUBLE)
    return up(root, 64) + small


def _one_norm(g: Tensor) -> Tensor:
    return _sum_rows(g, torch.abs)


def _norm(rows: Tensor) -> Tensor:
    """Return upper bounds of the 2-norms of rows; squares may underflow to zero."""
    terms, dtype = rows.shape[1], rows.dtype
    size = torch.linalg.vector_norm(rows, dim=1).to(DOUBLE) * (1 + gamma(terms + 8, dtype))
    return up(size + (terms * tiny(dtype)) ** 0.5)


def _sum_rows(g: Tensor, size: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum absolute values over rows, a few at a time: faster in cache, and with less rounding."""
    some = max(1, _AT_ONCE // max(1, g[:1].numel()))
    total = torch.zeros(g.shape[1:], dtype=g.dtype, device=g.device)
    for part in g.split(some):  # type: ignore[no-untyped-call]
        total += size(part).sum(0)
    return summed_up(total, min(some, len(g)) + len(g) // some + 4)
