"""Exact norms of a whole model's Jacobian per sample, and margins from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.errors import EvaluationError, UsageError
from lipaudit.models.graph import draw_positive
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
    of x. `products` counts the products of a vector with J or J^T.

    Attributes:
        method: dense (all rows or columns), rows (one at a time) or lanczos.
        left: leading left singular vectors, (batch, vectors, outputs), of any length, on the
            device of x; None unless requested.
        tied: which vectors of `left` have a singular value equal to the largest one up to tol,
            (batch, vectors).
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
        slope: ||grad(f_y - f_j)||_q for the runner-up j, q dual to the attack's norm.
        radius: min_j (f_y - f_j) / ||grad(f_y - f_j)||_q over all j != y; if not `complete`, a
            lower limit of this minimum.
        closest: the examined class j with the smallest quotient.
        rivals: number of examined classes j.
        complete: whether no class that was not examined can have a smaller quotient.
        direction: grad(f_y - f_j) for the runner-up, (batch, inputs), of any length, on the device
            of x.
    """

    margin: Tensor
    slope: Tensor
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
    """Return the operator norm of every sample's Jacobian J.

    The norm `2` is the largest singular value of J. If J has at most `DENSE` rows or columns, the
    value is computed from the whole matrix. Otherwise the Lanczos process runs in the smaller of
    the spaces of inputs and outputs. The norm `inf` is max_i sum_j |J_ij|, by one J^T u for each
    output. Results do not depend on the batch.

    Args:
        linear: the map, linearised at the samples; its graph may be dropped to save memory.
        norm: which operator norm.
        seeds: seeds of the start vectors, one per sample; None: the same vector for all.
        directions: whether to return the leading right singular vectors for `2`, too. This may
            take one more product.
        left: whether to return the leading left singular vectors for `2`, too: all that have the
            largest singular value up to `tol`. Lanczos compares only the two largest values found,
            and finds a value once even if several vectors have this value. So vectors may be
            missing.
        tol: estimated relative accuracy of lanczos (as in `spectral_norms`).
        max_steps: largest number of lanczos steps per sample.
        within: how far `upper` may be above the norm, relatively (as in `spectral_norms`).

    Raises:
        UsageError: `inf` with more than `MOST_ROWS` outputs.
        EvaluationError: a derivative is not finite.
    """
    smaller_side = min(linear.inputs, linear.outputs)
    if norm == "inf":
        return _compute_largest_row_sum(linear)
    if smaller_side <= DENSE:
        return _decompose_dense(linear, directions=directions, left=left, tol=tol)
    if seeds is None:
        seeds = [0] * len(linear)
    # One seed for each sample, so that the norm of a sample does not depend on other samples.
    # Lanczos runs in the smaller space, where vectors are shorter and the process ends sooner: on
    # J J^T in the space of outputs, or on J^T J in the space of inputs.
    start = random_starts(seeds, smaller_side).to(linear.x.device, torch.float64)

    def make_products(index: Tensor) -> Products:
        """Return the function u -> J J^T u or J^T J u for the samples that have not converged.

        `index` has the numbers of these samples.
        """
        if len(index) == len(linear):
            return make_gram_products(linear)
        linear.release()  # free the graph of all samples before building a graph of some
        return make_gram_products(linear.select(index.to(linear.x.device)))

    lanczos = spectral_norms(
        make_products,
        start,
        vectors=directions or left,
        second=left,
        tol=tol,
        max_steps=max_steps,
        within=within,
    )
    # The norms are of the whole J, so all outputs are checked (ones).
    require_range(linear, lanczos.norm, torch.ones_like(linear.output))
    products = 2 * lanczos.products  # J J^T u takes a product with J^T and a product with J
    norms = JacobianNorms(lanczos.norm, lanczos.upper, products, lanczos.converged)
    if directions:
        norms = replace(norms, vector=_find_direction(linear, lanczos))
    if left:
        return _add_left(norms, *_find_left_vectors(linear, lanczos), tol)
    return norms


def _find_direction(linear: Linearization, lanczos: Norms) -> Tensor:
    """Return the leading right singular vector v of J, (samples, inputs), of any length.

    Args:
        linear: the map with the Jacobian J.
        lanczos: the result of Lanczos on J^T J, if J has more outputs than inputs: its vector is
            v. Else the result of Lanczos on J J^T: its vector is a left singular vector u.
    """
    assert lanczos.vector is not None
    if linear.outputs > linear.inputs:
        return lanczos.vector
    # u is the left singular vector, and J^T u = sigma v.
    return linear.vjp(lanczos.vector.view(linear.output.shape)).flatten(1)


def _find_left_vectors(linear: Linearization, lanczos: Norms) -> tuple[Tensor, Tensor]:
    """Return left singular vectors u of J for the two largest singular values, and their squares.

    Args:
        linear: the map with the Jacobian J.
        lanczos: the result of Lanczos with the two largest values. Its vectors are right singular
            vectors v if J has more outputs than inputs, else left ones.

    Returns:
        The vectors, (samples, 2, outputs), of any length, and the squared values, (samples, 2).
    """
    # Lanczos ran with `second=True`, so both vectors are there.
    assert lanczos.second is not None
    vectors = [t for t in (lanczos.vector, lanczos.second_vector) if t is not None]
    if linear.outputs > linear.inputs:  # these are v, and u = J v
        vectors = [linear.jvp(v.view(linear.x.shape).to(linear.x)).flatten(1) for v in vectors]
    squares = torch.stack([lanczos.norm, lanczos.second], 1).square()
    return torch.stack(vectors, 1), squares


def _compute_largest_row_sum(linear: Linearization) -> JacobianNorms:
    """Return max_i sum_j |J_ij| of every sample: the norm of J from l_inf to l_inf."""
    m = linear.outputs
    if m > MOST_ROWS:
        raise UsageError(
            f"the inf norm of {m} outputs takes {m} backward passes per sample",
            f"Use --norm 2, or an output of at most {MOST_ROWS} entries.",
        )
    sums = [_compute_rows(linear, i).abs().sum(1, dtype=torch.float64) for i in range(m)]
    return _make_exact(linear, torch.stack(sums, 1).amax(1), products=m, method="rows")


def _decompose_dense(
    linear: Linearization, *, directions: bool, left: bool, tol: float
) -> JacobianNorms:
    """Return the largest singular value of whole Jacobians, and the requested singular vectors.

    The vectors may have any length.

    Args:
        linear: the map, with Jacobian J; it has at most `DENSE` inputs or at most `DENSE` outputs.
        directions: whether to return the leading right singular vector of each sample.
        left: whether to return the left singular vectors of the largest singular value.
        tol: a singular value counts as equal to the largest one up to this relative distance.
    """
    few_outputs = linear.outputs <= linear.inputs
    # M = J or J^T, whichever has fewer rows: (batch, short side, long side).
    matrix = linear.rows if few_outputs else linear.columns
    # M M^T, at most 16 x 16. Singular values are roots of the eigenvalues of M M^T. In float64
    # they keep all digits of float32.
    grams = []
    for m in matrix:  # one sample at a time: all in float64 would double the memory
        wide = m.to(torch.float64)
        grams.append(wide @ wide.T)
    gram = torch.stack(grams)
    require_finite(gram)
    # `eigh`, below, also returns these values, but they may differ in the last digit. So norms
    # come from `eigvalsh`, whether vectors are requested or not.
    largest = torch.linalg.eigvalsh(gram)[:, -1]
    sigma = largest.clamp_min(0).sqrt()
    products = matrix.shape[1]  # each row of M took one product with J or J^T
    norms = _make_exact(linear, sigma, products, method="dense")
    if not (directions or left):
        return norms
    squares, vectors = torch.linalg.eigh(gram)  # in rising order: reversed below
    # Rows are the left singular vectors of M, the largest singular value first. If M = J, they are
    # left singular vectors u of J. If M = J^T, they are right singular vectors v of J.
    short = vectors.mT.flip(1).to(matrix)
    if directions:
        right = short[:, 0]  # v
        if few_outputs:
            right = (short[:, :1] @ matrix)[:, 0]  # J^T u = sigma v, not normalised
        norms = replace(norms, vector=right)
    if not left:
        return norms
    if not few_outputs:
        short = short @ matrix  # J v = sigma u, not normalised
    return _add_left(norms, short, squares.flip(1), tol)


def _add_left(norms: JacobianNorms, left: Tensor, squares: Tensor, tol: float) -> JacobianNorms:
    """Return the norms with the left singular vectors of the largest singular value.

    A vector is "tied" in a sample if its singular value equals the largest one up to `tol`.
    Vectors that are tied in no sample are left out.

    Args:
        norms: the norms.
        left: left singular vectors, (samples, vectors, outputs), the largest first.
        squares: their squared singular values, (samples, vectors).
        tol: largest relative distance of tied values.
    """
    sigma = squares.clamp_min(0).sqrt().cpu()
    largest = sigma[:, :1]
    relative = torch.where(largest > 0, sigma / largest, 0.0)
    tied = relative >= 1 - tol
    tied[:, 0] = True  # also where all values are 0
    count = int(tied.sum(1).max())
    # The gap between the two largest values, relative to the largest one. If there is a single
    # value, the second one counts as 0: padding adds a column of zeros.
    second = F.pad(relative, (0, 1))[:, 1]
    gap = 1 - second.double()
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

    To first order, a sample x of class y reaches class j at the distance
    (f_y - f_j) / ||grad(f_y - f_j)||_q, with logits f and the norm q dual to the attack's norm.
    The radius is the smallest such distance over j.

    Classes j are examined in the order of f_y - f_j, until no later class can be nearer. The
    gradient is J^T (e_y - e_j), with the Jacobian J of f and basis vectors e. Its norm is at most
    G = sqrt(2) ||J|| for q = 2, and G = ||J^T e_y||_1 + max_i ||J^T e_i||_1 for q = 1. So the
    distance of class j is at least (f_y - f_j) / G.

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
    order, gaps = _sort_rivals(logits, y)
    count = order.shape[1]  # number of classes to examine
    if rivals is not None and linear.outputs > DENSE:
        count = min(count, rivals)
    dual = 1 if norm == "inf" else 2  # q
    of_label = _compute_rows(linear, y)  # J^T e_y
    steepest = _limit_slopes(of_label, upper, dual)  # G
    # f_y - f_j on the CPU. An infinite gap follows the last class. `order` stays on the device.
    gaps = F.pad(gaps.cpu().double(), (0, 1), value=torch.inf)
    classes = order.cpu()
    radius = torch.full_like(gaps[:, 0], torch.inf)  # the distance of the nearest class so far
    closest = classes[:, 0].clone()
    examined = torch.zeros_like(closest)
    complete = torch.zeros_like(closest, dtype=torch.bool)
    for i in range(count):  # examine class i of `order` for every sample
        gradient = of_label - _compute_rows(linear, order[:, i])  # J^T (e_y - e_j)
        slope = _measure(gradient, dual)  # its norm
        if i == 0:  # the runner-up
            direction = gradient
            first_slope = slope
        distance = (gaps[:, i] / slope).where(gaps[:, i] != 0, 0)  # 0 / 0 counts as 0
        nearer = ~complete & (distance < radius)
        radius = distance.where(nearer, radius)
        closest = classes[:, i].where(nearer, closest)
        examined += ~complete
        # A sample is complete if no later class can be nearer. Gaps rise, so no later class is
        # nearer than next_gap / G. This needs next_gap >= 0: the gap is negative if the sample is
        # misclassified. An infinite next gap means that no class is left.
        next_gap = gaps[:, i + 1]
        complete |= (next_gap >= 0) & (next_gap >= radius * steepest) | next_gap.isinf()
        if complete.all():
            break
    # If a sample is not complete, return a lower limit of its radius. Classes that were not
    # examined are at least next_gap / G away, with the `next_gap` of the last round. For a
    # negative gap there is no such bound: -inf.
    unexamined = (next_gap / steepest).where(next_gap >= 0, -torch.inf)
    limit = torch.where(complete, radius, torch.minimum(radius, unexamined))
    return Margins(
        margin=gaps[:, 0],
        slope=first_slope,
        radius=limit,
        closest=closest,
        rivals=examined,
        complete=complete,
        direction=direction,
    )


def _compute_rows(linear: Linearization, i: Tensor | int) -> Tensor:
    """Return J^T e_i of one output per sample, a row of its Jacobian, (samples, inputs).

    Args:
        linear: the map.
        i: the index of the output: one for all samples, or one for each, (samples,).
    """
    if linear.outputs <= DENSE:  # few outputs: all rows, computed at once
        samples = torch.arange(len(linear), device=linear.x.device)
        return linear.rows[samples, i]
    return linear.row(i)


def _measure(gradients: Tensor, dual: int) -> Tensor:
    """Return the l_1 or l_2 norm of each sample's gradient, on the CPU."""
    return torch.linalg.vector_norm(gradients, dual, -1, dtype=torch.float64).cpu()


def _limit_slopes(of_label: Tensor, upper: Tensor | None, dual: int) -> Tensor:
    """Return G of each sample: an upper bound of ||J^T (e_y - e_j)|| over all classes j.

    Args:
        of_label: J^T e_y of each sample, for its class y.
        upper: upper limit of a norm of the Jacobian J; None: unknown, so G is infinite. For
            gradients in l_2, the spectral norm. For l_1, max_j ||J^T e_j||_1.
        dual: the norm of gradients, 1 or 2.
    """
    if upper is None:
        return torch.full((len(of_label),), torch.inf)
    upper = upper.cpu().double()
    if dual == 2:
        return 2**0.5 * upper  # ||J|| ||e_y - e_j||_2
    return upper + _measure(of_label, dual)  # max_j ||J^T e_j||_1 + ||J^T e_y||_1


def _sort_rivals(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the other classes j != y of each sample, nearest first, and their gaps f_y - f_j.

    Both are (samples, classes - 1). The smallest gap comes first.

    Args:
        logits: f, (samples, classes).
        y: the class of each sample.
    """
    of_class = y[:, None]
    # The logit of class y becomes -inf, so that y comes last in the order, and is cut off.
    order = logits.scatter(1, of_class, -torch.inf).argsort(1, descending=True)
    order = order[:, :-1]
    return order, logits.gather(1, of_class) - logits.gather(1, order)


def _make_exact(
    linear: Linearization, norm: Tensor, products: int, method: Method
) -> JacobianNorms:
    """Return norms that are exact up to rounding as `JacobianNorms`: the upper limit is the norm.

    Args:
        linear: the map.
        norm: the norm of each sample.
        products: number of products with J or J^T for each sample.
        method: how the norms were computed.
    """
    require_finite(norm)
    norm = norm.cpu().double()
    # Refuse norms so small that their digits were lost. They are norms of the whole J, so all
    # outputs are examined (ones).
    require_range(linear, norm, torch.ones_like(linear.output))
    counts = torch.full((len(linear),), products)
    converged = torch.ones_like(counts, dtype=torch.bool)
    return JacobianNorms(norm, norm, counts, converged, method=method)


def require_range(linear: Linearization, norm: Tensor, units: Tensor) -> None:
    """Raise EvaluationError if derivatives are so small that their digits are lost (underflow).

    Args:
        linear: the map with the Jacobian J.
        norm: the norms to check, of all of J or of the rows of some outputs.
        units: ones at these outputs, and zeros at all other outputs.
    """
    small = norm < SMALLEST[linear.x.dtype]
    if small.any():
        # A small norm is right if J is 0. Decide this by J^T u with a large random u. (J^T u of
        # equal entries is 0 for centred outputs, too.) If J^T u has nonzero entries, J is not 0,
        # and the smallness of J has cost digits.
        pulled = linear.vjp(units * draw_positive(units) * 2.0**100).flatten(1)
        has_entries = pulled.any(1).cpu()
        if (small & has_entries).any():
            raise EvaluationError(
                f"the derivative is too small for {linear.x.dtype}", "Use --dtype float64."
            )


def make_gram_products(linear: Linearization) -> Products:
    """Return the function u -> J J^T u if J has fewer outputs than inputs, else u -> J^T J u.

    u is flat: (batch, outputs) for J J^T, or (batch, inputs) for J^T J.
    """
    few_outputs = linear.outputs <= linear.inputs
    # `outer` returns J J^T u, and `inner` returns J^T J u.
    product = linear.outer if few_outputs else linear.inner
    shape = (linear.output if few_outputs else linear.x).shape

    def apply(u: Tensor) -> Tensor:
        return product(u.view(shape)).flatten(1)

    return apply
