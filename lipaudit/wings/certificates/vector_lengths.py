"""Lengths of vectors of a form: bounds of their 2-norms over the whole ball.

Every entry of a vector can be at its largest, but not all at once: many errors together make a
zonotope that is about as wide in every direction. For its rows h_r, any numbers s_r > 0 and any
unit vector u, Cauchy and Schwarz give for |eps_r| <= 1

    u . sum h_r eps_r <= sqrt(sum (u . h_r)^2 / s_r) sqrt(sum s_r eps_r^2)

so that ||sum h_r eps_r||^2 <= ||sum h_r h_r^T / s_r|| sum s_r. With s_r = ||h_r|| that is exact
for one direction, and (pi / 2 at most) close for many rows that point everywhere. The input of an
L2 ball and the products of its entries have sum e_r^2 <= 1: there all s_r and their sum are 1.
Words move a vector by at most the sum of the k longest moves, one of each word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.rounding import (
    DOUBLE,
    bound_norms,
    bound_rounding,
    cast_up,
    round_up,
    tiny,
)

_ROWS = 512
"""Number of rows summed in their own precision before they are added in double precision."""

_SQUARINGS = 4
"""Number of squarings of a matrix when its norm is bounded through a power of it."""


class Lengths(NamedTuple):
    """Upper bounds of the 2-norms of vectors; the axis of the vectors has length 1.

    Attributes:
        linear: of the part that is linear in the input.
        rest: of all else.
    """

    linear: Tensor
    rest: Tensor


def bound_lengths(
    x: Form, axis: int, weight: Tensor | None = None, around: Tensor | None = None
) -> Lengths:
    """Bound the 2-norms of the vectors of a form along an axis, over all inputs of the ball.

    A form bounds a tensor: centre + linear part + quadratic part + errors +- slack, where the
    linear and the quadratic part depend on the input symbols. The bounds are of ||w L||_2 for the
    linear part L, and of ||w R||_2 for all else: R = (quadratic part - around) + errors +- slack.

    Args:
        x: a form. Its coefficients may be stored in blocks, each for a group of entries. If a
            group has only a part of a vector, the blocks become dense coefficients (in place).
        axis: axis of the vectors.
        weight: w >= 0, (*shape), by default 1.
        around: (*shape), about the middle of the range of the quadratic part; by default 0. The
            caller adds it to the centre.
    """
    axis = axis % x.ndim
    # In a block, all entries of a vector must be in one group: the group of the first entry.
    for block in x.blocks:
        group_of_vector = block.group.narrow(axis, 0, 1)
        if bool((block.group != group_of_vector).any()):
            x.make_dense()
            break
    # Each part takes the smaller of two bounds: by the coefficients of the symbols, and by the
    # length of the vector of radii of its entries.
    linear, quadratic, errors = _bound_by_symbols(x, axis, weight)
    linear = torch.minimum(linear, _bound_norm(x.radii.linear, axis, weight))
    errors = torch.minimum(errors, _bound_norm(x.radii.errors, axis, weight))
    low, high = x.quadratic_range
    if around is None:
        around = torch.zeros_like(low)
    # By symbols: ||quadratic part - around|| <= ||quadratic part|| + ||around||.
    quadratic = quadratic + _bound_norm(around, axis, weight)
    # By entries: the quadratic part is in [low, high], that is, within +-reach of `around`.
    reach = torch.maximum(high - around, around - low)
    quadratic = torch.minimum(quadratic, _bound_norm(reach, axis, weight))
    slack = _bound_norm(x.slack, axis, weight)
    return Lengths(linear, round_up(quadratic + errors + slack))


def _bound_by_symbols(x: Form, axis: int, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Bound the 2-norms of the linear part, the quadratic part and the errors of vectors.

    The bounds are by the coefficients of the symbols (unknowns), whose signs matter: in a vector,
    the entries are not all largest at the same values of the symbols. Slack is left out.

    Args:
        x: a form, centre + coefficients . symbols +- slack.
        axis: axis of the vectors.
        weight: factor of each entry, (*shape); None for 1.
    """
    symbols = x.symbols
    n = symbols.inputs
    first_error = symbols.first_error
    # On an L2 ball the input symbols and their products are vectors of norm <= 1; on a box, and
    # for errors, every symbol is in [-1, 1].
    is_unit = symbols.norm == "l2"
    linear = _bound_combination([x.dense[:n]], axis, weight, unit=is_unit)
    quadratic = _bound_combination([x.dense[n:first_error]], axis, weight, unit=is_unit)
    error_stacks = [x.dense[first_error:], *(block.coefficients for block in x.blocks)]
    errors = _bound_combination(error_stacks, axis, weight, unit=False)
    if symbols.norm == "words":
        # A symbol is a replacement of a word, which moves a vector by the column of coefficients.
        # The move of a few words is no longer than the sum of their longest moves.
        lengths_of_moves = _bound_norm(x.dense[:n].to(DOUBLE), axis + 1, weight)
        linear = torch.minimum(linear, symbols.maximise_over_words(lengths_of_moves))
    return linear, quadratic, errors


def _bound_norm(entries: Tensor, axis: int, weight: Tensor | None) -> Tensor:
    """Return upper bounds of the 2-norms along an axis of entries times `weight` (None for 1)."""
    if weight is not None:
        entries = entries * weight
    terms = entries.shape[axis]
    norm = entries.square().sum(axis, keepdim=True).sqrt()
    # The second term: squares may underflow to zero.
    return round_up(norm, roundings=terms + 8) + (terms * tiny(DOUBLE)) ** 0.5


def _bound_combination(
    stacks: list[Tensor], axis: int, weight: Tensor | None, *, unit: bool
) -> Tensor:
    """Bound the 2-norm of sum_r w h_r eps_r over all symbols |eps_r| <= 1, or with norm <= 1.

    The vector h_r has the coefficients of symbol r. By Cauchy-Schwarz, for any s_r > 0,
    ||sum h_r eps_r||^2 <= ||sum h_r h_r^T / s_r|| sum s_r eps_r^2. For |eps_r| <= 1 the last sum
    is at most sum s_r; s_r = ||h_r|| is taken. For symbols with sum eps_r^2 <= 1 (`unit`) all s_r
    are 1, and the last sum is at most 1. The norm of the matrix is bounded through a power of it:
    the more _SQUARINGS, the tighter.

    Args:
        stacks: coefficients (symbols, *shape); the vectors h_r lie along `axis` of the shape.
        axis: axis of the vectors, without that of the symbols.
        weight: w >= 0, (*shape); None for 1.
        unit: whether the symbols are a vector of norm <= 1; otherwise each is in [-1, 1].
    """
    dtype = stacks[0].dtype
    rows = sum(len(stack) for stack in stacks)
    shape = list(stacks[0].shape[1:])
    k = shape[axis]
    shape[axis] = 1
    gram, sum_of_s = _sum_outer_products(stacks, axis, weight, unit=unit)
    # Rounding and underflow of gram = sum_r h_r h_r^T / s_r, as a share of its trace. This is the
    # trace of the computed gram, raised by the rounding of a part of the sum (see below).
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    trace = round_up(diagonal.sum(-1), roundings=k) * (1 + 2 * bound_rounding(_ROWS + 16, dtype))
    underflow = rows * k * tiny(dtype)
    # gram is summed in parts of _ROWS symbols: at most _ROWS roundings in a part, and then one per
    # part. Of the parts, rows // _ROWS may be full, and one per stack is not full. 32 leaves room
    # for single steps such as the division by s_r.
    roundings = _ROWS + rows // _ROWS + len(stacks) + 32
    error = bound_rounding(roundings, dtype) * trace + underflow
    # sqrt(||gram||) sqrt(sum s_r). Rounding may make gram asymmetric: the mean with its transpose
    # is symmetric.
    gram_norm = bound_norms((gram + gram.mT) / 2, _SQUARINGS)
    root = round_up((gram_norm + error).sqrt()) + underflow
    length = round_up(root * round_up(sum_of_s, roundings=rows).sqrt()) + underflow
    return length.view(shape)


def _sum_outer_products(
    stacks: list[Tensor], axis: int, weight: Tensor | None, *, unit: bool
) -> tuple[Tensor, Tensor]:
    """Return sum_r h_r h_r^T / s_r, (count, k, k), and sum_r s_r, (count,), in float64.

    h_r is a vector of k coefficients of symbol r, times the weight; a symbol has `count` vectors.
    The caller bounds ||sum_r h_r eps_r|| over all symbols eps_r, for which any s_r > 0 are valid.
    Here s_r = ||h_r||, which is exact if all h_r have the same direction. With `unit` all s_r are
    1, and 1 is returned in place of their sum.

    Args:
        stacks: coefficients (symbols, *shape); the vectors h_r lie along `axis` of the shape.
        axis: axis of the vectors, without that of the symbols.
        weight: w >= 0, (*shape); None for 1.
        unit: whether the symbols are a vector of norm <= 1; otherwise each is in [-1, 1].
    """
    dtype = stacks[0].dtype
    shape = stacks[0].shape[1:]
    k = shape[axis]
    count = shape.numel() // k
    if weight is not None:
        weight = cast_up(weight.to(DOUBLE), dtype).clamp_min(tiny(dtype))

    gram = stacks[0].new_zeros(count, k, k, dtype=DOUBLE)
    sum_of_s = gram.new_full((count,), float(unit))
    for vectors in _list_vectors(stacks, axis, weight):  # h_r, (count, symbols, k)
        # h_r h_r^T / s_r is the outer product of h_r / sqrt(s_r) with itself.
        if not unit:
            s = vector_norm(vectors, dim=-1, keepdim=True)
            s = s.clamp_min(tiny(dtype))
            sum_of_s += s.to(DOUBLE).sum((1, 2))
            vectors = vectors / s.sqrt()
        gram += (vectors.mT @ vectors).to(DOUBLE)
    return gram, sum_of_s


def _list_vectors(stacks: list[Tensor], axis: int, weight: Tensor | None) -> Iterator[Tensor]:
    """Yield the vectors along an axis of coefficients times a weight, (count, symbols, k) each.

    At most _ROWS symbols at a time; a symbol has `count` vectors with k entries.

    Args:
        stacks: coefficients (symbols, *shape).
        axis: axis of the vectors, without that of the symbols.
        weight: (*shape); None for 1.
    """
    for stack in stacks:
        for part in stack.split(_ROWS):  # type: ignore[no-untyped-call]
            if weight is not None:
                part = part * weight
            vectors = part.movedim(axis + 1, -1)
            # The new axis is there for vectors without further axes, (symbols, k).
            yield vectors[:, None].flatten(1, -2).transpose(0, 1)
