"""Norms that single precision has found, met again in double.

For any u, ||J^T u|| / ||u|| <= ||J||, with equality at the leading vector, near which it is flat:
an error of e in u costs e^2. So one product in double precision with the vector of an iteration in
single gives the norm to nearly the digits of double, and never above it: no proven bound can lie
below. Where the two precisions do not agree, the logits are too large for single precision to tell
P, and the whole iteration is made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.spectral.lanczos import Norms, Products, Select

SINGLE_ERROR = 1e-5
"""What single precision may lack of a norm where it can tell P; measured: at most 3e-6."""

Solve = Callable[..., Norms]
"""`spectral_norms` with its stop rule: takes select, start, guess and vectors."""


class Family(Protocol):
    """The Jacobians of some problems."""

    def select(self, index: Tensor) -> Products:
        """Return u -> J J^T u of these problems."""

    def pulled_norm(self, u: Float[Tensor, "problems size"]) -> Float[Tensor, " problems"]:
        """Return ||J^T u|| of every problem."""


def norms_in_double(
    solve: Solve,
    families: tuple[Select, Callable[[], Family]],
    start: Float[Tensor, "problems size"],
    guess: Float[Tensor, "problems size"],
) -> Norms:
    """Return norms that are never above the truth, beyond the rounding of double precision.

    Args:
        solve: finds norms and vectors from products, a start and a guess.
        families: the products in the precision of `start`; makes the same problems in double.
        start: as `spectral_norms` takes it.
        guess: likewise.
    """
    select, double = families
    norms = solve(select, start, guess=guess, vectors=True)
    if start.dtype == torch.float64:
        return replace(norms, vector=None)
    family, vector = double(), norms.vector
    assert vector is not None
    # At an angle e from the leading vector ||J^T u||^2 >= cos^2 e ||J||^2 >= (1 - e^2) ||J||^2.
    # No u gives more than ||J||: what single precision left in the vector cannot raise the norm.
    length = torch.linalg.vector_norm(vector.double(), dim=1).clamp_min(1e-300)
    single, norm = norms.norm, (family.pulled_norm(vector.double()) / length).cpu()
    norms = replace(norms, norm=norm, upper=torch.maximum(norms.upper, norm), vector=None)
    # P of large logits differs between the precisions, and so does the leading vector.
    again = ((single - norm).abs() > SINGLE_ERROR * norm).nonzero()[:, 0]
    if not len(again):
        return norms
    start, guess = (rows[again.to(rows.device)].double() for rows in (start, guess))
    rest = solve(lambda index: family.select(again[index]), start, guess=guess)
    return norms.updated(again, rest)
