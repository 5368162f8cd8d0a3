"""The symbols of forms, and how far a form can move.

e_1 .. e_n are the coordinates of the input, in the unit ball of its norm. At order 2 their
products e_i e_j, i <= j, follow. Then come errors in [-1, 1], one for each approximation of an
operation. A stack of coefficients has one row per symbol, (rows, *shape), in that order. Missing
rows at the end are zero, so that older forms need not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.linalg import vector_norm

from lipaudit.wings.certificates.error_blocks import ErrorBlock, create_errors
from lipaudit.wings.certificates.rounding import (
    DOUBLE,
    bound_norms,
    bound_rounding,
    round_up,
    round_up_sum,
    tiny,
)

if TYPE_CHECKING:
    from jaxtyping import Float

    from lipaudit.wings.certificates.rounding import AnyShape

Norm = Literal["linf", "l2", "words"]

Interval = tuple[Tensor, Tensor]
"""The least and the largest value of every entry, (*shape) each."""

SLACK_SHARE = 5e-5
"""If the slack exceeds this share of a radius, it becomes symbols before an operation mixes it."""

_CHUNK_VALUES = 2**18
"""Number of values summed at once: 1 MB in single precision."""

_SHIFT = 0.25
"""Share of its Frobenius norm that is added to a quadratic form to tell its ends apart."""

_SQUARINGS = 2
"""Number of squarings of a quadratic form when its norm is bounded through a power of it."""


@dataclass(frozen=True)
class PartRadii:
    """How far every entry of a form can move from its centre, by part; float64, never too small.

    All have the shape of the form.

    Attributes:
        linear: the largest value of the part linear in the input.
        quadratic: the largest value of the quadratic part, whatever the signs of coefficients.
        errors: the largest value of the errors' part.
    """

    linear: Tensor
    quadratic: Tensor
    errors: Tensor

    @property
    def total(self) -> AnyShape:
        """Return the sum of all parts."""
        return self.linear + self.quadratic + self.errors


@dataclass
class ReluCall:
    """The ReLUs of one call whose input z may have both signs: h = a z + m (1 + eps).

    eps is an unknown in [-1, 1], the error symbol of a ReLU.

    Attributes:
        centre, generators, slack: of the forms z, (k,), (rows, k) and (k,).
        slope, offset: a and m, (k,).
        numbers: number of the symbol eps of each ReLU, (k,).
    """

    centre: Tensor
    generators: Tensor
    slack: Tensor
    slope: Tensor
    offset: Tensor
    numbers: Tensor

    def select(self, mask: Tensor) -> ReluCall:
        """Return the ReLUs where a mask (k,) is True."""
        return ReluCall(*(values[..., mask] for values in vars(self).values()))


class Symbols:
    """The unknowns of the forms of one pass over one ball, and its ReLUs for branching.

    Symbols are the coordinates e_i of the input in the unit ball, at order 2 also their products
    e_i e_j, and then errors in [-1, 1], one for each approximation of an operation.

    Attributes:
        dense_keys: the blocks that became rows in some form.
        intercept: is called in place of the rule of every call of the model (`demand`).
        first_error: number of the first error symbol, behind those of the input.
        count: number of symbols so far.
        relu_calls: the ReLUs of unknown sign, call by call, for branch and bound.
        many_symbols: whether a pass may add many symbols where they make it tighter (`bilinear`).
        skipped_symbols: whether a rule left out symbols because `many_symbols` is False.
    """

    intercept: Callable[..., Any] | None = None

    def __init__(
        self,
        inputs: int,
        norm: Norm,
        *,
        order: int,
        dtype: torch.dtype,
        rules: Mapping[str, Callable[..., Any]],
        model_dtype: torch.dtype = DOUBLE,
        slack_share: float = SLACK_SHARE,
        groups: Sequence[int] = (),
        max_words: int = 1,
    ) -> None:
        """Number the symbols of the input: e_i, and at order 2 also the products e_i e_j.

        Error symbols are added later, during the pass through the model.

        Args:
            inputs: dimension of the input: the number of symbols e_i.
            norm: norm of the ball.
            order: 1 for affine forms, 2 for quadratic ones.
            dtype: dtype of the coefficients; centres and slack are always float64.
            rules: for each operation, by name, the function that computes with forms.
            model_dtype: dtype of the tensors that the model sees.
            slack_share: slack above this share of a radius becomes symbols. This changes tightness
                and size of forms, never validity.
            groups: for the norm words, the number of coordinates in each group. A group is a word,
                with a coordinate for each replacement. Its coordinates are >= 0, and their sum is
                at most 1.
            max_words: for the norm words, the number of groups that may be nonzero at once.
        """
        self.inputs = inputs
        self.norm = norm
        self.order = order
        self.dtype = dtype
        self.rules = rules
        self.model_dtype = model_dtype
        self.slack_share = slack_share
        self.groups = groups
        self.max_words = max_words
        # i and j of each product e_i e_j, i <= j, which has a row of coefficients at order 2.
        self.pairs = torch.empty(2, 0, dtype=torch.long)
        if order == 2:
            self.pairs = torch.triu_indices(inputs, inputs)
        # Order of the rows of coefficients: symbols e_i, then products, then errors.
        self.first_error = inputs + self.pairs.shape[1]
        # The state of a pass through the model: no error symbols yet. Rules may add many of them,
        # which makes bounds tighter and the pass slower.
        self.restart(many_symbols=True)

    def restart(self, *, many_symbols: bool) -> None:
        """Forget all error symbols (unknown errors in [-1, 1]), for another pass over the ball.

        With `many_symbols`, rules may add optional symbols: bounds are tighter, and the pass is
        slower.
        """
        self.many_symbols = many_symbols
        self.skipped_symbols = False
        self.count = self.first_error  # the symbols of the input stay
        self.relu_calls: list[ReluCall] = []  # ReLUs of unknown sign
        # Coefficients of errors are stored sparsely, in blocks. The keys of the blocks that became
        # dense in some form: other forms must follow before a sum.
        self.dense_keys: set[int] = set()

    def bound_parts(self, coefficients: Tensor, blocks: Sequence[ErrorBlock] = ()) -> PartRadii:
        """Bound the change of each entry by the input e, by products e_i e_j, and by errors.

        On the L2 ball |sum g_i e_i| <= ||g||_2, and |sum q_ij e_i e_j| <= ||q||_2, because the
        products e_i e_j of a unit vector have norm <= 1. On boxes both are bounded by 1-norms.

        Args:
            coefficients: (symbols, *shape), first of inputs, then of products, then of errors.
            blocks: further coefficients of errors, stored sparsely.
        """
        linear, quadratic, errors = coefficients.tensor_split((self.inputs, self.first_error))
        # Every error symbol is in [-1, 1], whatever the norm of the input.
        error_radius = _sum_absolute(errors)
        for block in blocks:
            error_radius = round_up(error_radius + _sum_absolute(block.coefficients))
        if self.norm == "l2":
            return PartRadii(_root_sum_squares(linear), _root_sum_squares(quadratic), error_radius)
        if self.norm == "words":
            linear_radius = self.maximise_over_words(linear.abs())
        else:
            linear_radius = _sum_absolute(linear)
        return PartRadii(linear_radius, _sum_absolute(quadratic), error_radius)

    def maximise_over_words(self, linear: Tensor) -> AnyShape:
        """Return the largest value >= 0 of linear functions if at most `max_words` words change.

        The functions are of a text, in which words may be replaced by near words. `linear`
        (n, *shape) has a coefficient for each of n replacements of words: what it adds to each
        function. A changed word is a convex combination of its replacements, so it adds at most
        its largest coefficient. The result is (*shape), in float64.
        """
        if not len(linear):  # a constant
            return linear.new_zeros(linear.shape[1:], dtype=DOUBLE)
        _, largest_of_words = self._split_words(linear)
        count = min(self.max_words, len(largest_of_words))
        return round_up_sum(largest_of_words.topk(count, 0).values.sum(0), count)

    def find_best_words(self, linear: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        """Return the replacements at which linear functions are largest; `max_words` words change.

        `linear` (n, m) has a coefficient for each of n replacements of words in a text, for each
        of m functions. The result (n, m) is 1 for the best replacement of each of the best words,
        else 0. With these, the functions have the values of `maximise_over_words`.
        """
        # For each word, its replacements, and its gain: the largest coefficient, but at least 0.
        groups, gains = self._split_words(linear)  # (replacements, m) each, and (words, m)
        count = min(self.max_words, len(gains))
        best_words = gains.topk(count, 0).indices
        is_best = torch.zeros_like(gains).scatter_(0, best_words, 1.0)
        # A word with the gain 0 is not replaced. All other gains are positive, with the sign 1.
        is_best = is_best * gains.sign()
        symbols = []
        for group, is_best_word in zip(groups, is_best, strict=True):
            best_replacement = F.one_hot(group.argmax(0), len(group)).mT  # (replacements, m)
            symbols.append(best_replacement * is_best_word)
        return torch.cat(symbols)

    def _split_words(self, linear: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """Return the coefficients of the replacements of each word, and the gain of each word.

        The gain is the largest coefficient of a replacement, and at least 0: if all replacements
        lower the value, the word is not replaced.
        """
        groups = linear.split([*self.groups])  # type: ignore[no-untyped-call]
        largest = torch.stack([group.amax(0) for group in groups])
        return groups, largest.clamp_min(0)

    def quadratic_range(self, coefficients: Tensor) -> Interval:
        """Return bounds of the least and the largest value of the quadratic part e^T Q e.

        `coefficients` (symbols, *shape) has those of the products e_i e_j, i <= j: the entries of
        a matrix Q for each entry of a form (*shape). A first bound uses eigenvalues of Q. On a
        box, a second bound is the sum of the ranges of all terms, with e_i^2 in [0, 1] and e_i e_j
        in [-1, 1]. The tighter of the two bounds is returned.
        """
        q = coefficients[self.inputs : self.first_error]  # (pairs, *shape)
        if not len(q):
            zero = q.new_zeros(q.shape[1:], dtype=DOUBLE)
            return zero, zero
        # Upper bounds of the largest value, and of minus the least value.
        high, minus_low = self._bound_by_eigenvalues(q.reshape(len(q), -1)).view(2, *q.shape[1:])
        if self.norm == "l2":
            return -minus_low, high
        # The second bound, on the box: q e_i e_j is at most |q|, and q e_i^2 at most max(q, 0).
        i, j = self.pairs.to(q.device)
        is_square = i == j
        mixed = _sum_absolute(q[~is_square])
        squares = q[is_square]
        high = torch.minimum(mixed + _sum_absolute(squares.clamp_min(0)), high)
        minus_low = torch.minimum(mixed + _sum_absolute(squares.clamp_max(0)), minus_low)
        return -minus_low, high

    def _bound_by_eigenvalues(self, q: Tensor) -> Tensor:
        """Return upper bounds of max e^T Q e and of -min e^T Q e over the unit ball, (2, count).

        `q` (pairs, count) has the coefficients of the products e_i e_j, i <= j, of each of `count`
        matrices Q.
        """
        i, j = self.pairs.to(q.device)
        bounds = []
        # A few matrices at a time, so that they stay in the cache.
        chunk = max(1, _CHUNK_VALUES // self.inputs**2)
        for part in q.split(chunk, 1):  # type: ignore[no-untyped-call]
            upper = part.new_zeros(part.shape[1], self.inputs, self.inputs)
            upper[:, i, j] = part.mT
            # Q is symmetric: e_i e_j with i < j fills two entries with half of its coefficient.
            bounds.append(self._bound_quadratic((upper + upper.mT) / 2))
        return torch.cat(bounds, 1)

    def _bound_quadratic(self, q: Float[Tensor, "b n n"]) -> Float[Tensor, "2 b"]:
        """Return upper bounds of max e^T Q e and of -min e^T Q e over the unit ball, (2, b).

        On the L2 ball the maximum is the largest eigenvalue of Q, or 0 if that is negative. A box
        is scaled to a ball of radius sqrt(sum w_i^2), with weights w_i (`_scale_to_ball`).

        `bound_norms` bounds the largest absolute value of an eigenvalue. To bound the largest
        eigenvalue, Q is shifted: it is at most ||Q + m I|| - m for any m > 0.

        Args:
            q: (b, n, n), symmetric matrices Q, with a row and a column for each input e_i.
        """
        dtype = q.dtype
        sum_of_weights = q.new_ones(len(q), dtype=DOUBLE)
        if self.norm != "l2":
            q, sum_of_weights = _scale_to_ball(q)
        # The largest eigenvalues of Q and -Q are at most ||Q + m I|| - m and ||m I - Q|| - m.
        m = vector_norm(q.flatten(1), dim=1) * _SHIFT
        shift = torch.eye(self.inputs, dtype=dtype, device=q.device) * m[:, None, None]
        m = m.to(DOUBLE)
        norms = bound_norms(torch.cat((q + shift, shift - q)), squarings=_SQUARINGS).view(2, -1)
        largest = (norms - m).clamp_min(0)
        # The rounding of Q / (w_i w_j) and of the shift is a share of the Frobenius norm of Q. m
        # is _SHIFT times this norm, also rounded, so the norm counts twice. Any weights w_i > 0
        # are valid; they are at least tiny^(1/4). So an entry of Q that underflows, by less than
        # tiny, is multiplied by at most 1 / (w_i w_j) <= tiny^(-1/2).
        norm = 2 * m / _SHIFT
        rounding = bound_rounding(8 + self.inputs, dtype) * norm + self.inputs * tiny(dtype) ** 0.5
        return round_up((largest + rounding) * sum_of_weights)

    def sum_products(
        self, x: Float[Tensor, "n *rows k"], y: Float[Tensor, "n *rows k"]
    ) -> Float[Tensor, "pairs *rows 1"]:
        """Return the coefficients of e_i e_j, i <= j, in sum_k (sum_i x_ik e_i) (sum_j y_jk e_j).

        e are the n coordinates of the input. x and y are (n, *rows, k), and the result is
        (pairs, *rows, 1). e_i e_j and e_j e_i are the same product, so their coefficients
        x_i . y_j and x_j . y_i are added.
        """
        matrix = torch.einsum("i...k,j...k->ij...", x, y)  # x_i . y_j, (n, n, *rows)
        i, j = self.pairs.to(x.device)  # all pairs i <= j
        is_square = (i == j).view(-1, *[1] * (matrix.ndim - 2))  # (pairs, 1, ...)
        total = torch.where(is_square, matrix[i, j], matrix[i, j] + matrix[j, i])
        return total[..., None]

    def add_products(
        self,
        stack: Tensor,
        x: Tensor,
        y: Tensor,
        multiply: Callable[..., Tensor],
    ) -> None:
        """Add the product of sum_i x_i e_i and sum_j y_j e_j to a stack of coefficients, in place.

        e are the coordinates of the input. The square e_i^2 gets the coefficient x_i y_i, and
        e_i e_j with i < j gets x_i y_j + x_j y_i.

        Args:
            stack: (symbols, *shape), coefficients of the product.
            x: (inputs, *shape), the coefficients x_i.
            y: (inputs, *shape), the coefficients y_j.
            multiply: the product of two stacks, entry by entry or as matrices. One of the stacks
                may have a single row.
        """
        # `rows` is a view of the stack: the rows of e_i e_i, e_i e_(i+1), ..., e_i e_(n-1).
        for i, rows in enumerate(self._split_products(stack)):
            rows += multiply(x[i : i + 1], y[i:])
            rows[1:] += multiply(x[i + 1 :], y[i : i + 1])

    def add_squares(self, stack: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add weight (sum_i x_i e_i)^2, entry by entry, to a stack of coefficients, in place.

        e are the coordinates of the input, x is (inputs, *shape), and the stack has a row for each
        symbol, (symbols, *shape). The square e_i^2 gets the coefficient weight x_i^2, and e_i e_j
        with i < j gets 2 weight x_i x_j.
        """
        double = 2 * weight * x
        # `rows` is a view of the stack: the rows of e_i e_i, e_i e_(i+1), ..., e_i e_(n-1).
        for i, rows in enumerate(self._split_products(stack)):
            # The square is counted once: half of the double.
            rows[0].addcmul_(double[i], x[i], value=0.5)
            rows[1:].addcmul_(double[i], x[i + 1 :])

    def _split_products(self, stack: Tensor) -> Sequence[Tensor]:
        """Return, for each i, the rows of e_i e_i, e_i e_(i+1), ..., e_i e_(n-1), as views."""
        products = stack[self.inputs : self.first_error]
        return products.split([*range(self.inputs, 0, -1)])  # type: ignore[no-untyped-call]

    def add_errors(self, radius: AnyShape) -> ErrorBlock:
        """Return a block with a new error symbol for every entry with a positive radius."""
        first = self.count
        self.count += int((radius > 0).sum())
        return create_errors(radius, first, self.dtype)

    def add_row_errors(self, coefficients: Tensor) -> ErrorBlock:
        """Return new error symbols that each act on all entries of one row of the last axis.

        There is one symbol for each layer of the coefficients (layers, *shape) and each row.
        """
        first = self.count  # number of the first new symbol
        layers, *lead, width = coefficients.shape
        rows = torch.Size(lead).numel()
        self.count += layers * rows
        numbers = torch.arange(first, self.count, device=coefficients.device).view(layers, rows)
        # Every row is one group.
        group = torch.arange(rows, device=coefficients.device).view(*lead, 1)
        return ErrorBlock(coefficients, group.expand(*lead, width), numbers, key=first)


def _sum_absolute(coefficients: Tensor) -> Tensor:
    """Return upper bounds of sum_i |g_i| over the symbols, axis 0."""
    return _sum_over_symbols(coefficients, torch.abs)


def _root_sum_squares(coefficients: Tensor) -> Tensor:
    """Return upper bounds of sqrt(sum_i g_i^2) over the symbols, axis 0."""
    return round_up(_sum_over_symbols(coefficients, torch.square).sqrt())


def _scale_to_ball(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q'_ij = Q_ij / (w_i w_j), (b, n, n), and sum w_i^2, (b,), to bound e^T Q e on a box.

    With f_i = w_i e_i for any w_i > 0, e^T Q e = f^T Q' f. On the box e_i^2 <= 1, so ||f||^2 is at
    most sum w_i^2: the maximum is at most the largest eigenvalue of Q', if positive, times
    sum w_i^2. With w_i^2 = sum_j |Q_ij| no eigenvalue is above 1: the bound is at most
    sum |Q_ij|, and it is exact for the square of a coordinate.
    """
    inverse = q.abs().sum(2).clamp_min(tiny(q.dtype) ** 0.5).rsqrt()  # 1 / w_i
    scaled = q * inverse[:, :, None] * inverse[:, None, :]
    squared_weights = inverse.to(DOUBLE).square().reciprocal()
    # The sum has a rounding per input; 8 leaves room for the single steps.
    return scaled, round_up(squared_weights.sum(1), roundings=q.shape[1] + 8)


def _sum_over_symbols(coefficients: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return upper bounds of sum_i function(g_i) over the symbols, axis 0; function is >= 0.

    A few symbols at a time: faster in cache, and with less rounding.
    """
    entries = max(1, coefficients.shape[1:].numel())
    chunk = max(1, _CHUNK_VALUES // entries)
    total = coefficients.new_zeros(coefficients.shape[1:])
    for part in coefficients.split(chunk):  # type: ignore[no-untyped-call]
        total += function(part).sum(0)
    symbols = len(coefficients)
    # Number of roundings of a sum: within a chunk, plus the additions of chunks, plus a few.
    bound = round_up_sum(total, min(chunk, symbols) + symbols // chunk + 4)
    # Every term may have underflowed: there are more terms than roundings.
    return bound + symbols * tiny(coefficients.dtype)
