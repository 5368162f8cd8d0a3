"""Spectral norms that are never too small: exact, or proven from above by a certificate."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.policy import POLICY, Policy

SQUARINGS = 3
"""Number of squarings of a Gram matrix to separate its leading eigenvector."""

SEPARATE = 0.95
"""Largest ratio of the other eigenvalues to the leading one after that."""

_LONG_STEPS = 60  # of maps whose Gram matrix is not formed
_STILL = 3e-4  # an entry of a unit vector that moves less has settled

_PRODUCTS = {"cpu": "mkldnn", "cuda": "cuda"}
"""The parts of `torch.backends` that say how devices round products."""


def spectral_norm(a: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch"]:
    """Return the largest singular value of each matrix, from the smaller of its two Gram matrices.

    Examples:
        >>> spectral_norm(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
        tensor(5.)
    """
    gram = a @ a.mT if a.shape[-2] <= a.shape[-1] else a.mT @ a
    return _largest_eigenvalue(gram).sqrt()


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


def gram_norm(
    gram: Float[Tensor, "*batch n n"], tol: float = 1e-6, *, policy: Policy = POLICY
) -> Float[Tensor, "*batch"]:
    """Return ||A|| from G = A A^T, too large by at most `tol`, relatively.

    With u nearly the leading eigenvector, rho = <u, G u>, r = ||G u / rho - u|| and q ||G|| no
    less than the norm of G across u, ||G|| <= rho (1/2 + (1/4 + r^2 / (1 - q))^1/2).
    A power of G gives both u and q, several times cheaper than the eigenvalues, which are
    computed only of small matrices and where this does not reach `tol`.

    Examples:
        >>> gram_norm(torch.tensor([[9.0, 12.0], [12.0, 16.0]], dtype=torch.float64))
        tensor(5., dtype=torch.float64)
    """
    if gram.shape[-1] < policy.single_keys:
        return _largest_eigenvalue(gram).sqrt()
    flat = gram.reshape(-1, *gram.shape[-2:])
    # In the basis (u, across u) G is [[rho, rho r], [rho r, C]] with ||C|| <= q lambda for its
    # norm lambda: (lambda - rho)(lambda - q lambda) <= rho^2 r^2. Hence lambda^2 - rho lambda -
    # rho^2 r^2 / (1 - q) <= 0, of which the limit is the larger root.
    u, q = _leading(flat)
    image = torch.bmm(u, flat)
    rho = (image * u).sum(-1, keepdim=True)
    r2 = (image / rho - u).square().sum((1, 2))
    square = rho[:, 0, 0] * (0.5 + (0.25 + r2 / (1 - q)).sqrt())
    apart = ~(square <= (1 + 2 * tol) * rho[:, 0, 0])
    if apart.any():
        square[apart] = _largest_eigenvalue(flat[apart])
    # rho is off by at most n u <|u|, |G| |u|> <= n u ||G||_F and 2 n u rho. 1 + rounding raises
    # the square by (8 n + 64) u, enough while ||G||_F <= 4 lambda; beyond it grows with that.
    share = torch.linalg.vector_norm(flat / square[:, None, None], dim=(1, 2)).nan_to_num(0.0)
    raised = square.sqrt() * (1 + _rounding(gram) * (share / 4).clamp_min(1.0))
    return raised.view(gram.shape[:-2])


def _largest_eigenvalue(gram: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0.0)


def _leading(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return a unit vector u (b, 1, n) and q: G is at most q ||G|| on the complement of u.

    By Jensen's inequality <v, G v>^m <= <v, G^m v> for a unit vector v, which across u is at most
    the Frobenius norm of G^m there; and ||G^m|| >= <u, G^m u>. `error` follows the rounding of
    the powers.
    """
    largest, longest = gram.diagonal(0, -2, -1).max(-1)
    power = gram / largest[:, None, None]
    power = power.float() if keeps_single(gram.device) else power
    rounding = _rounding(power)
    u = power.take_along_dim(longest[:, None, None], 1)
    size = torch.linalg.vector_norm(power, dim=(1, 2))
    error = rounding * size
    root = 1.0
    for _ in range(SQUARINGS):
        # (A + E)^2 - A^2 = A E + E A + E^2, and the product itself rounds by at most
        # rounding ||A||_F^2; ||.||_F is submultiplicative.
        root *= 0.5
        error = (2 * error + rounding * size) * size + error.square()
        power = torch.bmm(power, power)
        size = torch.linalg.vector_norm(power, dim=(1, 2))
        for _ in range(12):
            before, u = u, torch.bmm(torch.bmm(torch.bmm(u, power), power), power)
            u = u / torch.linalg.vector_norm(u, dim=-1, keepdim=True)
            if not ((u - before).abs() > _STILL).any():
                break
        image = torch.bmm(u, power)
        along = (image * u).sum((1, 2))
        # ||(1 - u u^T) A (1 - u u^T)||_F^2 = ||A||_F^2 - 2 ||A u||^2 + <u, A u>^2, each of which
        # is at most ||A||_F^2 and rounds by at most `rounding` of that.
        across = (1 + 4 * rounding) * size.square() + along.square()
        across = (across - 2 * image.square().sum((1, 2))).clamp_min(0.0).sqrt()
        # q^m = ||A across u|| / ||A||, the first at most, the second at least. NaN where it fails.
        share = (across + error) / (along - error)
        if not (share > SEPARATE).any():
            break
    u = u.to(gram)
    q = share.to(gram).clamp_max(1.0) ** root
    return u / torch.linalg.vector_norm(u, dim=-1, keepdim=True), q


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
    # halves it. _rounding is four times that.
    square = (((u @ b.mT) @ b) / u).amax((-2, -1))
    return square.sqrt() * (1 + _rounding(b)), u


def _rounding(b: Tensor) -> float:
    """Return more than the relative rounding error of products with a non-negative matrix."""
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
    than `tol`, as on one map in ten of a trained model, another certificate proves the norm. Maps
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
        norm[apart] = gram_norm(p[apart].mT @ p[apart], tol, policy=policy)
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
