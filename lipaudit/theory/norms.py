"""Spectral norms that are never too small: exact, or proven from above by a certificate."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def spectral_norm(a: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch"]:
    """Return the largest singular value of each matrix, from the smaller of its Gram matrices.

    Example:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    gram = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt()


def gram_norm(gram: Float[Tensor, "*batch n n"], tol: float = 1e-6) -> Float[Tensor, "*batch"]:
    """Return ||A||, at most `tol` relatively too large, given A A^T; for large matrices.

    Power steps guess it, a Cholesky factorisation proves the guess: several times cheaper than
    the eigenvalues, which are computed only where the proof fails.

    Example:
        >>> gram_norm(torch.tensor([[9.0, 12.0], [12.0, 16.0]], dtype=torch.float64))
        tensor(5.0000, dtype=torch.float64)
    """
    largest, longest = gram.diagonal(0, -2, -1).max(-1, keepdim=True)
    single = (gram / largest[..., None]).float()
    u = single.take_along_dim(longest[..., None], -2)
    for _ in range(6):
        u = torch.nn.functional.normalize(u @ single @ single @ single @ single, dim=-1)
    return _proven(gram, u.to(gram), tol)


def nonnegative_norm(b: Float[Tensor, "*batch n m"], steps: int = 10) -> Float[Tensor, "*batch"]:
    """Return an upper bound of the spectral norm of matrices with entries >= 0.

    ||B||^2 <= max_j (B^T B u)_j / u_j for every u > 0 (Collatz-Wielandt); u comes from `steps`
    power steps, so the bound falls towards ||B|| and never below it: 0.3 % above it after 10
    steps on attention maps, rarely 1 %.

    Example:
        >>> nonnegative_norm(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        tensor(3.)
    """
    u = _positive_steps(b, steps)
    return ((u @ b.mT @ b) / u).amax((-2, -1)).sqrt()


def map_norm(p: Float[Tensor, "*batch n m"], tol: float = 1e-6) -> Float[Tensor, "*batch"]:
    """Return ||P|| of attention maps, never too small and at most `tol` relatively too large.

    The certificate of `nonnegative_norm` is compared with ||P u|| / ||u||; where the two do not
    meet, as on one map in ten of a trained model, another one proves the norm.

    Example:
        >>> map_norm(torch.full((4, 4), 0.25, dtype=torch.float64))
        tensor(1., dtype=torch.float64)
    """
    u = _positive_steps(p, 11) @ p.mT @ p  # a last step wipes out single precision
    u = (u / torch.linalg.vector_norm(u, dim=-1, keepdim=True)).nan_to_num(1.0).clamp_min(1e-30)
    image = u @ p.mT
    norm = ((image @ p) / u).amax((-2, -1)).sqrt()
    apart = norm > (1 + tol) * torch.linalg.matrix_norm(image)
    if apart.any():
        norm[apart] = _proven(p[apart].mT @ p[apart], u[apart], tol)
    return norm


def _proven(gram: Tensor, u: Tensor, tol: float) -> Tensor:
    """Return the root of the largest eigenvalue, given nearly its eigenvector.

    Its Rayleigh quotient raised by `tol` is an upper bound where lambda I - G has a Cholesky
    factor; raising it twice covers the rounding of the factorisation.
    """
    rayleigh = ((u @ gram) * u).sum((-2, -1)) / u.square().sum((-2, -1))
    shifted = -gram
    shifted.diagonal(0, -2, -1).add_((1 + tol) * rayleigh[..., None])
    failed = torch.linalg.cholesky_ex(shifted).info != 0
    square = (1 + 2 * tol) * rayleigh
    square[failed] = torch.linalg.eigvalsh(gram[failed])[..., -1].clamp_min(0.0)
    return square.sqrt()


def _positive_steps(b: Tensor, steps: int) -> Tensor:
    """Return u > 0 near the leading singular vector: (..., 1, m)."""
    # Any u > 0 will do: single precision for the steps, and hold up what decays to nothing.
    single = b.float()
    u = single.new_ones(*b.shape[:-2], 1, b.shape[-1])
    for _ in range(steps):
        before, u = u, u @ single.mT @ single
        u = (u / u.amax(-1, keepdim=True)).nan_to_num(1.0).clamp_min(1e-30)
        if float((u - before).abs().amax()) < 1e-6:
            break
    return u.to(b)
