"""The symbols of forms, and how far a form can move.

e_1 .. e_n are the coordinates of the input, in the unit ball of its norm. At order 2 their
products e_i e_j, i <= j, follow. Then come errors in [-1, 1], one for each approximation of an
operation. A stack of coefficients has one row per symbol, (rows, *shape), in that order. Missing
rows at the end are zero, so that older forms need not grow.

Coefficients of errors that each act within one row of a tensor.

The error of a row-wise operation in row t does not affect other rows until attention mixes them. A
stack (rows, *shape) of its coefficients would be zero except in one row each. An `ErrorBlock`
folds the stack: its r-th layer holds one symbol for every group of entries. Row-wise operations
act on layers as on a stack.

Floating point with errors on the safe side only.

The model of an operation is fl(a o b) = (a o b)(1 + d) + t with |d| <= u, the unit roundoff, and
|t| <= the smallest normal number, so that a device may flush subnormal numbers to zero. A sum of n
products in any order is off by gamma_n = n u / (1 - n u) of the sum of their sizes (Higham,
Accuracy and Stability, 3.1 and 3.5): what conventional matrix products keep in their own
precision (without TF32, and not those of Strassen).

torch's exp, log, erf, tanh and square root in float64 are assumed to be within `LIBRARY` units in
the last place; tests check this against mpmath.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


LIBRARY = 8
"""Assumed error of library functions in float64, in units in the last place."""

DOUBLE = torch.float64


def gamma(n: int, dtype: torch.dtype) -> float:
    """Return n u / (1 - n u), raised by its own rounding.

    >>> gamma(1, torch.float64) > 2.0**-53
    True
    """
    share = n * torch.finfo(dtype).eps / 2
    if share >= 1:
        return float("inf")
    return share / (1 - share) * (1 + 2.0**-50)


def tiny(dtype: torch.dtype) -> float:
    """Return the largest loss of one operation by underflow: the smallest normal number."""
    return torch.finfo(dtype).tiny


def up(x: Float[Tensor, "*shape"], roundings: int = 8) -> Float[Tensor, "*shape"]:
    """Raise numbers >= 0, computed in float64 from numbers >= 0, above their true values.

    Sums, products, quotients and roots of numbers >= 0 keep their relative accuracy, so
    `roundings` of them in a row change the result by at most a share gamma.

    >>> up(torch.tensor(0.1, dtype=torch.float64) * 3) > 0.3
    tensor(True)
    """
    raised = 1 + 2 * gamma(roundings + 2, DOUBLE)
    return x * raised + 2.0**-1000


def cast_up(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Cast numbers >= 0 to `dtype` without making any smaller.

    >>> cast_up(torch.tensor(0.1, dtype=torch.float64), torch.float32).double() >= 0.1
    tensor(True)
    """
    cast = x.to(dtype)
    above = torch.nextafter(cast, torch.full_like(cast, torch.inf))
    return torch.where(cast.to(x) < x, above, cast)


def summed_up(total: Float[Tensor, "*shape"], terms: int) -> Float[Tensor, "*shape"]:
    """Raise float64 sums of `terms` numbers >= 0 above their true values."""
    dtype = total.dtype
    raised = 1 + gamma(terms + 1, dtype)
    return up(total.to(DOUBLE)) * raised + terms * tiny(dtype)


@dataclass(frozen=True)
class ErrorBlock:
    """Coefficients of errors, several symbols per layer.

    Attributes:
        rows: (layers, *shape).
        group: (*shape), the group of each entry.
        numbers: (layers, groups), the symbol of a layer at a group, -1 for none (zeros there).
        key: number of the first symbol, the same in all forms that share these errors.
    """

    rows: Tensor
    group: Tensor
    numbers: Tensor
    key: int

    @property
    def end(self) -> int:
        """One more than the largest number."""
        if not self.numbers.numel():
            return 0
        return int(self.numbers.max()) + 1

    def map_rows(self, op: Callable[[Tensor], Tensor]) -> ErrorBlock:
        """Apply an operation to the rows of the last axis, or to entries."""
        rows = op(self.rows)
        if rows.shape == self.rows.shape:
            return replace(self, rows=rows)
        group = self.group[..., :1].expand(rows.shape[1:])
        return replace(self, rows=rows, group=group)

    def move(self, move: Callable[[Tensor], Any]) -> list[ErrorBlock]:
        """Rearrange entries; the operation may have several results."""
        stacks = move_stack(move, self.rows)
        groups = move(self.group)
        if isinstance(groups, Tensor):
            return [replace(self, rows=stacks, group=groups)]
        blocks = []
        for rows, group in zip(stacks, groups, strict=True):
            blocks.append(replace(self, rows=rows, group=group))
        return blocks

    def like(self, other: ErrorBlock) -> bool:
        """Say whether layers of both can be added."""
        same_groups = torch.equal(self.group, other.group)
        return same_groups and torch.equal(self.numbers, other.numbers)

    def by_row(self) -> ErrorBlock | None:
        """Return the block with one group per row of the last axis; None if symbols span rows."""
        if bool((self.group == self.group[..., :1]).all()):
            return self
        # Several groups share a row: give each a layer of its own. That works if all rows have
        # equally many groups, and no group reaches over two rows.
        shape = self.group.shape
        groups = self.group.reshape(-1, shape[-1])
        groups_by_row = [torch.unique(row) for row in groups]
        if len({len(row) for row in groups_by_row}) > 1:
            return None
        distinct = torch.stack(groups_by_row)  # (rows, m)
        if len(torch.unique(distinct)) < distinct.numel():
            return None
        row_count, m = distinct.shape
        # The place of every entry's group among those of its row: the number of its layer.
        is_group = groups[..., None] == distinct[:, None]
        place = is_group.long().argmax(-1).view(shape)
        layer = torch.arange(m, device=groups.device)
        layer = layer.view(-1, *[1] * place.ndim)
        in_layer = (place == layer)[:, None]  # (m, 1, *shape)
        rows = (self.rows * in_layer).flatten(0, 1)
        numbers = self.numbers[:, distinct].permute(2, 0, 1)
        group = torch.arange(row_count, device=groups.device)
        group = group.view(*shape[:-1], 1).expand(shape)
        return replace(self, rows=rows, group=group, numbers=numbers.flatten(0, 1))

    def add_to(self, stack: Tensor) -> None:
        """Add the block to a stack (rows, *shape) with a row for every symbol."""
        numbers = self.numbers[:, self.group.flatten()]  # (layers, entries)
        entries = numbers.shape[1]
        flat = stack.view(len(stack), entries)
        rows = self.rows.reshape(len(self.rows), entries)
        # Entries without a symbol (-1) are zero: adding them to row 0 changes nothing.
        flat.scatter_add_(0, numbers.clamp_min(0), rows)

    def columns(self, mask: Tensor) -> ErrorBlock:
        """Return the entries of a mask, along one axis."""
        return replace(self, rows=self.rows[:, mask], group=self.group[mask])


def join_blocks(
    x: Sequence[ErrorBlock], y: Sequence[ErrorBlock], both: Callable[[Tensor, Tensor], Tensor]
) -> list[ErrorBlock]:
    """Return the blocks of two aligned forms; `both` combines the blocks that they share."""
    joined = {block.key: block for block in x}
    for block in y:
        shared = joined.get(block.key)
        if shared is None:
            joined[block.key] = block
        else:
            joined[block.key] = replace(shared, rows=both(shared.rows, block.rows))
    return list(joined.values())


def move_stack(move: Callable[[Tensor], Any], rows: Tensor) -> Any:
    """Apply a rearrangement of entries to all rows of a stack."""
    if len(rows):
        return torch.vmap(move)(rows)
    # vmap takes no empty stack: the shapes of the results come from one row.
    one = move(rows.new_empty(rows.shape[1:]))
    if isinstance(one, Tensor):
        return one[None][:0]
    return tuple(each[None][:0] for each in one)


def create_errors(radius: Tensor, first: int, dtype: torch.dtype) -> ErrorBlock:
    """Return a separate error symbol for every entry of positive radius, numbered in order.

    Its group is the entry's row along the last axis.
    """
    device = radius.device
    shape = radius.shape
    width = 1
    if radius.ndim:
        width = shape[-1]
    radius = radius.reshape(-1, width)
    positive = radius > 0
    row, column = positive.nonzero(as_tuple=True)
    # The r-th positive entry of a row goes to layer r: as many layers as the fullest row needs.
    layer = (positive.cumsum(1) - 1)[row, column]
    layers = 0
    if len(row):
        layers = int(positive.sum(1).max())
    rows = torch.zeros(layers, *radius.shape, dtype=dtype, device=device)
    rows[layer, row, column] = radius[row, column].to(dtype)
    numbers = torch.full((layers, len(radius)), -1, device=device)
    numbers[layer, row] = first + torch.arange(len(row), device=device)
    group = torch.arange(len(radius), device=device)
    group = group[:, None].expand(radius.shape)
    return ErrorBlock(rows.view(layers, *shape), group.reshape(shape), numbers, first)


Norm = Literal["linf", "l2", "words"]

SETTLE = 5e-5
"""If the slack exceeds this share of a radius, it becomes symbols before an operation mixes it."""

_AT_ONCE = 2**18
"""Number of values summed at once: 1 MB in single precision."""

_SHIFT = 0.25
"""Share of its Frobenius norm that is added to a quadratic form to tell its ends apart."""

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
        groups: for the norm words, the number of coordinates in each group of the input: they are
            in [0, 1] and add up to at most 1.
        most: number of groups that may differ from 0 at once, for the norm words.

    Attributes:
        dissolved: the blocks that became rows in some form.
        intercept: takes the calls of the model in place of their rules (`demand`).
        rich: whether a pass may add many symbols where they make it tighter (`bilinear`).
        spared: whether some were left out because it may not.
    """

    intercept: Callable[..., Any] | None = None

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
        groups: Sequence[int] = (),
        most: int = 1,
    ) -> None:
        self.n = n
        self.norm = norm
        self.order = order
        self.dtype = dtype
        self.rules = rules
        self.shown = shown
        self.settle = settle
        self.groups = groups
        self.most = most
        self.pairs = torch.empty(2, 0, dtype=torch.long)
        if order == 2:
            self.pairs = torch.triu_indices(n, n)
        self.first_error = n + self.pairs.shape[1]
        self.restart(rich=True)

    def restart(self, *, rich: bool) -> None:
        """Forget all errors, for another pass over the ball."""
        self.rich = rich
        self.spared = False
        self.count = self.first_error
        self.units: list[Unit] = []
        self.dissolved: set[int] = set()

    def sizes(self, g: Float[Tensor, "rows ..."], blocks: Sequence[ErrorBlock] = ()) -> Sizes:
        """Return how far every entry of a stack can move.

        On the L2 ball |sum g_i e_i| <= ||g||_2, and |sum q_ij e_i e_j| <= ||q||_2 for the products
        of a unit vector's entries are a vector of norm <= 1; elsewhere 1-norms.
        """
        linear, quadratic, errors = g.tensor_split((self.n, self.first_error))
        # Errors stay in a box, whatever the norm of the input.
        error_size = _one_norm(errors)
        for block in blocks:
            error_size = up(error_size + _one_norm(block.rows))
        if self.norm == "l2":
            return Sizes(_two_norm(linear), _two_norm(quadratic), error_size)
        if self.norm == "words":
            return Sizes(self.sum_groups(linear.abs()), _one_norm(quadratic), error_size)
        return Sizes(_one_norm(linear), _one_norm(quadratic), error_size)

    def sum_groups(self, g: Float[Tensor, "n ..."]) -> Float[Tensor, "*shape"]:
        """Return the largest value of a linear part, or 0, if only `most` groups move.

        A group moves to a convex combination of its coordinates' ends and 0, so that it adds no
        more than its largest coefficient, and all no more than the `most` largest of these.
        """
        if not len(g):  # a constant
            return torch.zeros(g.shape[1:], dtype=DOUBLE, device=g.device)
        _, largest = self._split_groups(g)
        most = min(self.most, len(largest))
        return summed_up(largest.topk(most, 0).values.sum(0), most)

    def find_ends(self, g: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Return the words, as 0 or 1, at which linear parts are as large as `sum_groups` says."""
        groups, largest = self._split_groups(g)
        most = min(self.most, len(largest))
        moving = largest.topk(most, 0).indices
        moves = torch.zeros_like(largest).scatter_(0, moving, 1.0) * largest.sign()
        ends = []
        for rows, move in zip(groups, moves, strict=True):
            word = F.one_hot(rows.argmax(0), len(rows)).mT
            ends.append(word * move)
        return torch.cat(ends)

    def _split_groups(self, g: Float[Tensor, "n ..."]) -> tuple[Sequence[Tensor], Tensor]:
        """Return the coefficients of each group, and the largest of each that is positive or 0."""
        groups = g.split([*self.groups])  # type: ignore[no-untyped-call]
        largest = torch.stack([rows.amax(0) for rows in groups])
        return groups, largest.clamp_min(0)

    def quadratic_range(
        self, g: Float[Tensor, "rows ..."]
    ) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """Return the least and the largest value of the quadratic part, outwards.

        For any w_i > 0, e^T Q e is at most the largest eigenvalue of Q_ij / (w_i w_j), if
        positive, times sum w_i^2 e_i^2. On the box w_i^2 are row sums of |Q|: no eigenvalue is
        then above 1, so that the bound is no worse than the sum of |Q|, which is exact for a
        square. For any m > 0 that eigenvalue is at most ||Q + m|| - m. The sum of the
        coefficients' own ends, e_i^2 in [0, 1] and e_i e_j in [-1, 1], is valid as well.
        """
        q = g[self.n : self.first_error]
        if not len(q):
            zero = torch.zeros(g.shape[1:], dtype=DOUBLE, device=g.device)
            return zero, zero
        squares = (self.pairs[0] == self.pairs[1]).to(q.device)
        # Of a pair, each of its two entries of the matrix has half of the coefficient.
        halves = torch.where(squares, 1.0, 0.5).to(q)[:, None]
        places = self._full.to(q.device)
        ends = []
        # A few entries at a time, so that they stay in the cache.
        some = max(1, _AT_ONCE // self.n**2)
        for part in q.reshape(len(q), -1).split(some, 1):  # type: ignore[no-untyped-call]
            halved = (part * halves).mT.contiguous()
            matrices = halved.index_select(1, places).view(-1, self.n, self.n)
            ends.append(self._bound_ends(matrices))
        high, low = torch.cat(ends, 1).view(2, *q.shape[1:])
        if self.norm == "l2":
            return -low, high
        # e_i^2 lies in [0, 1], and e_i e_j in [-1, 1].
        mixed = _one_norm(q[~squares])
        diagonal = q[squares]
        high = torch.minimum(mixed + _one_norm(diagonal.clamp_min(0)), high)
        low = torch.minimum(mixed + _one_norm(diagonal.clamp_max(0)), low)
        return -low, high

    def _bound_ends(self, q: Float[Tensor, "b n n"]) -> Float[Tensor, "2 b"]:
        """Bound the largest and minus the least value of e^T Q e, from above."""
        dtype = q.dtype
        total = torch.ones(len(q), dtype=DOUBLE, device=q.device)
        if self.norm != "l2":
            # Q_ij / (w_i w_j), and total = sum w_i^2.
            gain = q.abs().sum(2).clamp_min(tiny(dtype) ** 0.5).rsqrt()
            q = q * gain[:, :, None] * gain[:, None, :]
            weights = gain.to(DOUBLE).square().reciprocal()
            total = up(weights.sum(1), self.n + 8)
        # The largest eigenvalues of Q and -Q are at most ||Q + m|| - m and ||m - Q|| - m.
        m = torch.linalg.vector_norm(q.flatten(1), dim=1) * _SHIFT
        shift = torch.eye(self.n, dtype=dtype, device=q.device) * m[:, None, None]
        m = m.to(DOUBLE)
        norms = bound_norms(torch.cat((q + shift, shift - q)), _SQUARINGS).view(2, -1)
        largest = (norms - m).clamp_min(0)
        # What gains and shifts are rounded by is a share of the Frobenius norm, m / _SHIFT.
        lost = gamma(8 + self.n, dtype) * 8 * m + self.n * tiny(dtype) ** 0.5
        return up((largest + lost) * total)

    def pack(self, form: Float[Tensor, "n n ..."]) -> Float[Tensor, "rows ..."]:
        """Return the coefficients of e_i e_j, i <= j, of sum_ij form_ij e_i e_j."""
        i, j = self.pairs.to(form.device)
        squares = (i == j).view(-1, *[1] * (form.ndim - 2))
        return torch.where(squares, form[i, j], form[i, j] + form[j, i])

    def add_products(
        self, rows: Float[Tensor, "rows ..."], x: Tensor, y: Tensor, f: Callable[..., Tensor]
    ) -> None:
        """Add sum_ij f(x_i, y_j) e_i e_j of two linear parts to a stack, in place."""
        first = self.n
        for i in range(self.n):
            count = self.n - i
            part = rows[first : first + count]
            part += f(x[i : i + 1], y[i:])
            part[1:] += f(x[i + 1 :], y[i : i + 1])
            first += count

    def add_squares(self, rows: Float[Tensor, "rows ..."], x: Tensor, weight: Tensor) -> None:
        """Add weight (sum_i x_i e_i)^2, entry by entry, to a stack: in half of the products."""
        first = self.n
        double = 2 * weight * x
        for i in range(self.n):
            count = self.n - i
            part = rows[first : first + count]
            part[0].addcmul_(double[i], x[i], value=0.5)
            part[1:].addcmul_(double[i], x[i + 1 :])
            first += count

    def birth(self, radius: Float[Tensor, "*shape"]) -> ErrorBlock:
        """Add an error symbol of the given radius to every entry with a positive radius."""
        first = self.count
        self.count += int((radius > 0).sum())
        return create_errors(radius, first, self.dtype)

    def birth_shared(self, rows: Float[Tensor, "layers ..."]) -> ErrorBlock:
        """Add a symbol for every row of the last axis of a stack, which acts on all of the row."""
        first = self.count
        layers, *lead, width = rows.shape
        groups = torch.Size(lead).numel()
        self.count += layers * groups
        numbers = torch.arange(first, self.count, device=rows.device).view(layers, groups)
        group = torch.arange(groups, device=rows.device).view(*lead, 1)
        return ErrorBlock(rows, group.expand(*lead, width), numbers, first)

    @cached_property
    def _full(self) -> Tensor:
        """Return the index among the pairs of each entry of a symmetric matrix, (n^2,)."""
        i, j = self.pairs
        numbers = torch.arange(len(i))
        places = torch.zeros(self.n, self.n, dtype=torch.long)
        places[i, j] = numbers
        places[j, i] = numbers
        return places.flatten()


def bound_norms(matrices: Float[Tensor, "b n n"], squarings: int) -> Float[Tensor, " b"]:
    """Bound ||Q|| <= ||Q^k||_F^(1/k) of symmetric matrices, k = 2^squarings; float64.

    Q is divided by about its norm first. That of a power is raised by what rounding can take:
    (A + E)^2 - A^2 = A E + E A + E^2, and a product itself is off by gamma ||A||_F^2.
    """
    n = matrices.shape[-1]
    dtype = matrices.dtype
    small = n * n * tiny(dtype)
    size = _norm(matrices.flatten(1))
    # Divided by about its norm, no power of Q overflows or underflows.
    divisor = cast_up(size, dtype).clamp_min(tiny(dtype) ** 0.5)
    power = matrices / divisor[:, None, None]
    size = up(size / divisor.to(DOUBLE))
    error = gamma(4, dtype) * size + small
    for _ in range(squarings):
        # ||A E + E A + E^2||, and the rounding of A A.
        error = (2 * error + gamma(n + 8, dtype) * size) * size + error.square() + small
        error = up(error)
        power = torch.bmm(power, power)
        size = _norm(power.flatten(1))
    root = up(size + error, 8) ** (0.5**squarings)
    return up(root * divisor.to(DOUBLE), 64) + small


def _one_norm(g: Tensor) -> Tensor:
    return _sum_rows(g, torch.abs)


def _two_norm(g: Tensor) -> Tensor:
    return up(_sum_rows(g, torch.square).sqrt())


def _norm(rows: Tensor) -> Tensor:
    """Return upper bounds of the 2-norms of rows; squares may underflow to zero."""
    terms = rows.shape[1]
    dtype = rows.dtype
    size = torch.linalg.vector_norm(rows, dim=1).to(DOUBLE)
    size = size * (1 + gamma(terms + 8, dtype))
    return up(size + (terms * tiny(dtype)) ** 0.5)


def _sum_rows(g: Tensor, size: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum absolute values over rows, a few at a time: faster in cache, and with less rounding."""
    entries = max(1, g.shape[1:].numel())
    some = max(1, _AT_ONCE // entries)
    total = torch.zeros(g.shape[1:], dtype=g.dtype, device=g.device)
    for part in g.split(some):  # type: ignore[no-untyped-call]
        total += size(part).sum(0)
    return summed_up(total, min(some, len(g)) + len(g) // some + 4)
