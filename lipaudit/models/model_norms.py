"""Exact norms of a whole model's Jacobian per sample, and margins from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lipaudit.errors import EvaluationError, UsageError
from lipaudit.models.linearize import Linearization, require_finite
from lipaudit.theory import TOL, WITHIN
from lipaudit.theory.spectral import Norms, Products, random_starts, spectral_norms

OutputNorm = Literal["2", "inf"]
Method = Literal["dense", "lanczos", "rows"]

# Up to this many rows or columns, the whole Jacobian is cheaper than an iteration.
DENSE = 16

# Largest output for --norm inf, whose Jacobian rows are computed one by one.
MOST_ROWS = 1024


# Smallest norms whose digits survive: the numbers of float32 end at 1e-38, squares in float64 at
# 1e-308.
SMALLEST = {torch.float32: 1e-30, torch.float64: 1e-140}


@dataclass(frozen=True)
class JacobianNorms(Norms):
    """Norm of the Jacobian per sample; by lanczos never above the true norm, apart from rounding.

    `vector` is the v with the largest |J v| / |v|, (batch, inputs), of any length, on the device
    of x; `products` counts those with J or its transpose.

    Attributes:
        method: dense (all rows or columns), rows (one at a time) or lanczos.
        left: leading left singular vectors, (batch, vectors, outputs), of any length, on the
            device of x; None unless requested.
        tied: which of them belong to the largest singular value to tol, (batch, vectors).
        gap: relative distance of the two largest singular values, (batch,).
    """

    method: Method = "lanczos"
    left: Tensor | None = None
    tied: Tensor | None = None
    gap: Tensor | None = None


@dataclass(frozen=True)
class Margins:
    """First-order figures of the decision at each sample, on the CPU: estimates, no certificates.

    Attributes:
        margin: m = f_y - max_{j != y} f_j; negative if the sample is misclassified.
        gradient: ||grad(f_y - f_j)||_q for the runner-up j, q dual to the attack's norm.
        radius: min_j (f_y - f_j) / ||grad(f_y - f_j)||_q over all j != y; if not `complete`, a
            lower limit of it.
        closest: the examined class j with the smallest value.
        rivals: number of examined classes j.
        complete: whether no other class can be nearer.
        direction: grad(f_y - f_j) for the runner-up, (batch, inputs), of any length, on the device
            of x.
    """

    margin: Tensor
    gradient: Tensor
    radius: Tensor
    closest: Tensor
    rivals: Tensor
    complete: Tensor
    direction: Tensor


def compute_jacobian_norms(
    linear: Linearization,
    *,
    norm: OutputNorm = "2",
    seeds: Sequence[int] | None = None,
    directions: bool = False,
    left: bool = False,
    tol: float = TOL,
    max_steps: int = 300,
    within: float = WITHIN,
) -> JacobianNorms:
    """Return the operator norm of every sample's Jacobian.

    `2`: sigma_1(J), from the dense Jacobian if one side is at most `DENSE`, else by the Lanczos
    process in the smaller of the two spaces. `inf`: max_i sum_j |J_ij|, from l_inf to l_inf, by
    one J^T u per output. Results do not depend on the batch.

    Args:
        linear: the map, linearised at the samples; its graph may be dropped to save memory.
        norm: which operator norm.
        seeds: seeds of the start vectors, one per sample; None: the same vector for all.
        directions: whether to return the leading right singular vectors for `2`, too, which may
            take one more product.
        left: whether to return the left ones: dense all that are tied, by lanczos the first two
            at most, because equal values show as one.
        tol: relative accuracy of lanczos, estimated; see `spectral_norms`, also of the next two.
        max_steps: largest number of its steps per sample.
        within: how far `upper` may be above the norm, relatively.

    Raises:
        UsageError: `inf` with more than `MOST_ROWS` outputs.
        EvaluationError: a derivative is not finite.
    """
    m = linear.outputs
    few_outputs = m <= linear.inputs
    if norm == "inf":
        return _compute_largest_row_sum(linear)
    if min(linear.inputs, m) <= DENSE:
        return _decompose_dense(linear, directions=directions, left=left, tol=tol)
    # In the smaller space vectors are shorter, and a Krylov space is exhausted sooner.
    if seeds is None:
        seeds = [0] * len(linear)
    # One seed a sample: its norm does not depend on which others share the batch.
    start = random_starts(seeds, min(m, linear.inputs))
    start = start.to(linear.x.device, torch.float64)

    def select(index: Tensor) -> Products:
        if len(index) == len(linear):
            return make_gram_products(linear)
        linear.release()
        return make_gram_products(linear.select(index.to(linear.x.device)))

    found = spectral_norms(
        select,
        start,
        vectors=directions or left,
        second=left,
        tol=tol,
        max_steps=max_steps,
        within=within,
    )
    require_range(linear, found.norm, torch.ones_like(linear.output))
    spent = 2 * found.products  # J^T u is a by-product of A u = J J^T u
    vector = found.vector
    if directions and vector is not None and few_outputs:  # take it to the inputs
        vector = linear.vjp(vector.view(linear.output.shape)).flatten(1)
    right = vector if directions else None
    norms = JacobianNorms(found.norm, found.upper, spent, found.converged, right)
    if found.second is None:
        return norms
    pair = [each for each in (found.vector, found.second_vector) if each is not None]
    if not few_outputs:
        pair = [linear.jvp(v.view(linear.x.shape).to(linear.x)).flatten(1) for v in pair]
    squares = torch.stack([found.norm, found.second], 1).square()
    return _add_left(norms, torch.stack(pair, 1), squares, tol)


def _compute_largest_row_sum(linear: Linearization) -> JacobianNorms:
    """Return max_i sum_j |J_ij|."""
    m = linear.outputs
    if m > MOST_ROWS:
        raise UsageError(
            f"the inf norm of {m} outputs takes {m} backward passes per sample",
            f"Use --norm 2, or an output of at most {MOST_ROWS} entries.",
        )
    sums = []
    for i in range(m):
        row = linear.rows[:, i] if m <= DENSE else linear.row(i)
        sums.append(row.abs().sum(1, dtype=torch.float64))
    largest = torch.stack(sums, 1).amax(1)
    return _make_exact(linear, largest, m, "rows")


def _decompose_dense(
    linear: Linearization, *, directions: bool, left: bool, tol: float
) -> JacobianNorms:
    """Return sigma_1(J) of Jacobians with a short side, and the requested singular vectors."""
    few_outputs = linear.outputs <= linear.inputs
    dense = linear.rows if few_outputs else linear.columns  # J or J^T: the short side first
    # J J^T or J^T J, at most 16 x 16; in float64 the root of its values loses no digit of float32.
    grams = []
    for j in dense:  # one sample at a time: all in float64 would double the memory
        wide = j.to(torch.float64)
        grams.append(wide @ wide.T)
    gram = torch.stack(grams)
    require_finite(gram)
    largest = torch.linalg.eigvalsh(gram)[:, -1]
    sigma = largest.clamp_min(0).sqrt()
    exact = _make_exact(linear, sigma, dense.shape[1], "dense")
    if not (directions or left):
        return exact
    values, vectors = torch.linalg.eigh(gram)
    short = vectors.mT.flip(1).to(dense)  # singular vectors of the short side, the largest first
    if directions:
        right = short[:, 0]
        if few_outputs:
            right = (short[:, :1] @ dense)[:, 0]  # J^T u
        exact = replace(exact, vector=right)
    if not left:
        return exact
    if not few_outputs:
        short = short @ dense  # J v
    return _add_left(exact, short, values.flip(1), tol)


def _add_left(norms: JacobianNorms, left: Tensor, squares: Tensor, tol: float) -> JacobianNorms:
    """Return the norms with the left vectors of the squared singular values, largest first.

    Vectors that are tied in no sample are left out.
    """
    values = squares.clamp_min(0).sqrt().cpu()
    first = values[:, :1]
    relative = torch.where(first > 0, values / first, 0.0)
    tied = relative >= 1 - tol
    tied[:, 0] = True
    count = int(tied.sum(1).max())
    if relative.shape[1] > 1:
        following = relative[:, 1]
    else:
        following = torch.zeros(len(relative))
    gap = 1 - following.double()
    return replace(norms, left=left[:, :count], tied=tied[:, :count], gap=gap)


def compute_margins(
    linear: Linearization,
    y: Tensor,
    *,
    norm: OutputNorm = "inf",
    upper: Tensor | None = None,
    rivals: int | None = None,
) -> Margins:
    """Return margins, their gradients and the first-order radius of every sample.

    Other classes j are examined in the order of f_y - f_j, until none of the rest can be nearer:
    ||J^T (e_y - e_j)||_q is at most G = sqrt(2) ||J|| for q = 2, and
    G = ||J^T e_y||_1 + max_i ||J^T e_i||_1 for q = 1, so their radii are at least (f_y - f_j) / G.

    Args:
        linear: the map to logits (batch, classes), linearised at the samples.
        y: class of each sample, (batch,); negative: the predicted class.
        norm: norm of the attack: gradients are measured in the dual norm (l_1 for inf).
        upper: upper limit of the same norm of J, from `compute_jacobian_norms`; None: unknown.
        rivals: number of other classes to examine, if there are more than `DENSE`; None: all.

    Raises:
        UsageError: the output is not (batch, classes) with at least two classes.
    """
    logits = linear.output
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise UsageError(f"margins need logits (batch, classes), not {tuple(logits.shape)}")
    y = torch.where(y < 0, logits.argmax(1), y.to(logits.device))
    of_class = y[:, None]
    # The other classes, the closest first: the class itself is last.
    order = logits.scatter(1, of_class, -torch.inf).argsort(1, descending=True)
    order = order[:, :-1]
    gaps = logits.gather(1, of_class) - logits.gather(1, order)
    gaps = gaps.cpu().double()
    if upper is None:
        upper = torch.full((len(y),), torch.inf)
    known = linear.outputs <= DENSE
    each = torch.arange(len(y), device=y.device)
    row: Callable[[Tensor], Tensor] = (lambda j: linear.rows[each, j]) if known else linear.row
    count = gaps.shape[1]
    if rivals is not None and not known:
        count = min(count, rivals)
    true = row(y)
    dual = 1 if norm == "inf" else 2

    def measure(gradients: Tensor) -> Tensor:
        return torch.linalg.vector_norm(gradients, dual, -1, dtype=torch.float64).cpu()

    if dual == 2:
        most = 2**0.5 * upper.cpu().double()
    else:
        most = upper.cpu().double() + measure(true)
    # Gaps and classes are on the CPU, the order is on the device of the gradients.
    radius = torch.full_like(gaps[:, 0], torch.inf)
    classes = order.cpu()
    closest = classes[:, 0].clone()
    examined = torch.zeros_like(classes[:, 0])
    complete = torch.zeros_like(closest, dtype=torch.bool)
    for i in range(count):
        gradient = true - row(order[:, i])
        slope = measure(gradient)
        if i == 0:
            first = gradient
            steepness = slope
        here = (gaps[:, i] / slope).where(gaps[:, i] != 0, 0)
        nearer = ~complete & (here < radius)
        radius = here.where(nearer, radius)
        closest = classes[:, i].where(nearer, closest)
        examined += ~complete
        # Gaps only grow: a class that is not nearer at the largest slope ends the search.
        if i + 1 < gaps.shape[1]:
            later = gaps[:, i + 1]
        else:
            later = torch.full_like(radius, torch.inf)
        complete |= (later >= 0) & (later >= radius * most) | later.isinf()
        if complete.all():
            break
    others = (later / most).where(later >= 0, -torch.inf)
    # What was not examined is no nearer than its gap over the largest slope.
    limit = torch.where(complete, radius, torch.minimum(radius, others))
    return Margins(gaps[:, 0], steepness, limit, closest, examined, complete, first)


def _make_exact(
    linear: Linearization, norm: Tensor, products: int, method: Method
) -> JacobianNorms:
    require_finite(norm)
    norm = norm.cpu().double()
    require_range(linear, norm, torch.ones_like(linear.output))
    spent = torch.full((len(linear),), products)
    converged = torch.ones_like(spent, dtype=torch.bool)
    return JacobianNorms(norm, norm, spent, converged, method=method)


def require_range(linear: Linearization, norm: Tensor, units: Tensor) -> None:
    """Raise EvaluationError if derivatives are so small that the precision loses their digits.

    Args:
        linear: the map.
        norm: norms of its parts.
        units: ones in the outputs of these parts, and zeros elsewhere.
    """
    small = norm < SMALLEST[linear.x.dtype]
    if small.any():
        # A power of two changes no digit: what underflows shows at a larger u; 0 stays 0.
        pulled = linear.vjp(units * 2.0**100).flatten(1)
        lost = (small & pulled.any(1).cpu()).any()
        if lost:
            raise EvaluationError(
                f"the derivative is too small for {linear.x.dtype}", "Use --dtype float64."
            )


def make_gram_products(linear: Linearization) -> Products:
    """Return the products with J J^T or J^T J, whichever is smaller, on flat vectors."""
    few_outputs = linear.outputs <= linear.inputs
    product: Products = linear.outer if few_outputs else linear.inner
    shape = (linear.output if few_outputs else linear.x).shape

    def apply(u: Tensor) -> Tensor:
        return product(u.view(shape)).flatten(1)

    return apply
