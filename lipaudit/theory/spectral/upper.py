"""Spectral norms that are never too small: exact, or proven from above by a certificate."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.policy import POLICY, Policy

_LONG_STEPS = 60  # of maps whose Gram matrix is not formed

_PRODUCTS = {"cpu": "mkldnn", "cuda": "cuda"}
"""The parts of `torch.backends` that say how devices round products."""


def spectral_norm(a: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch"]:
    """Return the largest singular value of each matrix, from the smaller of its two Gram matrices.

    Examples:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    gram = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0).sqrt()


def gram_root(a: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch m m"]:
    """Return R with ||R y|| >= ||A y||, equal but for rounding: a Cholesky factor of A^T A.

    Examples:
        >>> gram_root(torch.tensor([[3.0], [4.0]]))
        tensor([[5.0000]])
    """
    gram = a.mT @ a
    trace = gram.diagonal(0, -2, -1).sum(-1, keepdim=True)
    # R^T R = G + shift + error. In units of u trace(G): forming G costs n, Cholesky m + 1 (Higham,
    # Theorem 10.3: |error| <= gamma_{m+1} |R|^T |R|); the shift is 4 (n + m).
    info = torch.finfo(a.dtype)
    gram.diagonal(0, -2, -1).add_(2 * sum(a.shape[-2:]) * info.eps * trace + info.tiny)
    return torch.linalg.cholesky_ex(gram, upper=True).L


def nonnegative_norm(b: Float[Tensor, "*batch n m"], steps: int = 10) -> Float[Tensor, "*batch"]:
    """Return an upper bound of the spectral norm of matrices with entries >= 0.

    ||B||^2 <= max_j (B^T B u)_j / u_j for every u > 0 (Collatz-Wielandt); u comes from `steps`
    power steps, so the bound falls towards ||B|| and never below it: 0.3 % above it after 10
    steps on attention maps, rarely 1 %. It is raised by its rounding error.

    Examples:
        >>> nonnegative_norm(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        tensor(3.0000)
    """
    return nonnegative_pair(b, steps)[0]


def nonnegative_pair(
    b: Float[Tensor, "*batch n m"], steps: int = 10
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch 1 m"]]:
    """Return the bound of `nonnegative_norm`, and the row vector u > 0 that proves it.

    Examples:
        >>> nonnegative_pair(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))[1]
        tensor([[1., 1.]])
    """
    u = _positive_steps(b.float(), steps).to(b)
    # Any u > 0 will do: rounding of the steps, in single precision, costs sharpness alone.
    # No sum cancels: B u is off by m u, the second product by n u more, relatively; the root
    # halves it. product_rounding is four times that.
    square = (((u @ b.mT) @ b) / u).amax((-2, -1))
    return square.sqrt() * (1 + product_rounding(b)), u


def product_rounding(b: Tensor) -> float:
    """Return more than twice the relative rounding error of products with a matrix >= 0."""
    return (sum(b.shape[-2:]) + 16) * torch.finfo(b.dtype).eps


def map_norm(
    p: Float[Tensor, "*batch n m"],
    tol: float = 1e-6,
    single: Float[Tensor, "*batch n m"] | None = None,
    *,
    policy: Policy = POLICY,
) -> Float[Tensor, "*batch"]:
    """Return ||P|| of attention maps, never too small and too large by at most `tol`, relatively.

    The certificate of `nonnegative_norm` is compared with ||P u|| / ||u||. If they differ by more
    than `tol`, as on one map in ten of a trained model, the norm is that of the eigenvalues. Maps
    with more than `policy.map_limit` entries instead get more steps and the first certificate:
    never too small, but maybe less tight. `single` is P in single precision, if the caller has it.

    Examples:
        >>> map_norm(torch.full((4, 4), 0.25, dtype=torch.float64))
        tensor(1., dtype=torch.float64)
    """
    long = p.shape[-2] * p.shape[-1] > policy.map_limit
    steps = _LONG_STEPS if long else 11
    u = _positive_steps(p.float() if single is None else single, steps).to(p)
    u = u @ p.mT @ p  # a last step removes errors of single precision
    u = (u / torch.linalg.vector_norm(u, dim=-1, keepdim=True)).nan_to_num(1.0).clamp_min(1e-30)
    image = u @ p.mT
    norm = ((image @ p) / u).amax((-2, -1)).sqrt()
    apart = norm > (1 + tol) * torch.linalg.matrix_norm(image)
    if apart.any() and not long:
        norm[apart] = spectral_norm(p[apart])
    return norm


def single_pays(maps: Float[Tensor, "*batch n m"], policy: Policy = POLICY) -> bool:
    """Return whether the maps are large, and single-precision products keep all digits here."""
    return maps.shape[-1] >= policy.single_keys and keeps_single(maps.device)


def keeps_single(device: torch.device) -> bool:
    """Return whether single-precision products keep all digits, and are cheaper, on this device.

    The rounding limits hold for sums in any order, on GPUs and CPUs.
    """
    backend = _PRODUCTS.get(device.type)
    if backend is None or torch.is_autocast_enabled(device.type):
        return False
    matmul = getattr(getattr(torch.backends, backend), "matmul", None)
    precision = getattr(matmul, "fp32_precision", None)
    if precision is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return precision in ("none", "ieee")


def _positive_steps(b: Tensor, steps: int) -> Tensor:
    """Return u > 0 near the leading singular vector: (..., 1, m). Any u > 0 will do."""
    u = b.new_ones(*b.shape[:-2], 1, b.shape[-1])
    for _ in range(steps):
        before, u = u, u @ b.mT @ b
        u = (u / u.amax(-1, keepdim=True)).nan_to_num(1.0).clamp_min(1e-30)  # hold up what decays
        # An accelerator would wait for the answer longer than the steps take.
        if u.device.type == "cpu" and float((u - before).abs().amax()) < 1e-6:
            break
    return u
