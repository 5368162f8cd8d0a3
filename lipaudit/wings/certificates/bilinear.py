"""Products of two forms: x y = c_x c_y + c_x dy + c_y dx + dx dy.

What is off beside the first three terms is dx dy and slack. With dx = L_x + R_x, L linear in the
input, order 2 puts L_x L_y into the quadratic part; what is left are L_x R_y, R_x L_y and R_x R_y.
Each is bounded by the product of the radii, summed over what is contracted, or by that of the
lengths of the contracted vectors (Cauchy-Schwarz, `bound_lengths`), whichever is less: where many
errors add up, entries of a vector are not at their largest all at once. At order 2, c_x and c_y
are the shifted centres of the forms, about which the R reach least. Where the rest is a share of
what moves, products of entries (of a normalisation's numerator, often mostly errors, and its
inverse) are polarised (`remainders`).

Rows of an attention map sum to one, so that P V = P (V - k) + k for any constant k of each row and
channel. For their mean k = sum_j p_j v_j what scales a whole row of P, such as the error of its
logarithm, acts on nothing at all; what an entry is off by acts on v_j - k. (The median of the v_j,
weighted by the errors of the entries, knows nothing of the row.)

The error of an attention weight moves all channels of a value alike (`_add_product_symbols`). A
symbol for each channel forgets that, and weights behind attention mix many channels: their sizes
add up. The largest products get a symbol, as many as there is room for, the others are slack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lipaudit.wings.certificates import affine, rearrangements
from lipaudit.wings.certificates.affine import sum_row
from lipaudit.wings.certificates.curves import RECIPROCAL, relax
from lipaudit.wings.certificates.error_blocks import ErrorBlock, join_blocks
from lipaudit.wings.certificates.form import Coefficients, Form, NoRuleError
from lipaudit.wings.certificates.remainders import Bilinear, Remainder, bound_remainder
from lipaudit.wings.certificates.rounding import DOUBLE, bound_rounding, cast_up, round_up, tiny
from lipaudit.wings.certificates.symbols import Symbols

_WORTHWHILE_SHARE = 0.02
"""Share of a product that its remainder must have to be bounded by polarisation, which takes as
long as the product itself."""

_MOST_COEFFICIENTS = 2**24
"""Largest number of coefficients of new symbols in a tensor of the values of an attention."""

FactorPairs = Sequence[tuple[Tensor, Tensor]]
"""One or two pairs of radii of attention weights, (*b, queries, keys), and of coefficients of
values, (symbols, *b, keys, channels): products of both may get a symbol."""


def matmul(x: Any, y: Any) -> Form:
    """Return the form of x @ y, where one or both factors are forms; axes as in torch.matmul.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1].
    """
    if x.ndim == 1:
        row: Any = matmul(x[None], y)
        return row.squeeze(-1 if y.ndim == 1 else -2)
    if y.ndim == 1:
        column: Any = matmul(x, y[:, None])
        return column.squeeze(-1)
    batch_shape = rearrangements.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x = x.expand(*batch_shape, *x.shape[-2:])
    y = y.expand(*batch_shape, *y.shape[-2:])
    if isinstance(x, Form) and isinstance(y, Form):
        return _multiply_matrix_forms(x, y)
    # One factor is a constant, so the product is a linear map of the other. Errors with a symbol,
    # unlike slack, can cancel in a sum: so slack becomes symbols first. (Of two forms,
    # `_multiply_matrix_forms` decides which gets them.) An entry of the product has a rounding for
    # each term of its sum, and one for the cast of the constant.
    roundings = x.shape[-1] + 1
    if isinstance(x, Form):
        return affine.linear_map(x.symbolize_slack(), torch.matmul, y, roundings=roundings)
    return affine.linear_map(y.symbolize_slack(), lambda t, w: w @ t, x, roundings=roundings)


def _multiply_matrix_forms(x: Form, y: Form) -> Form:
    """Return the form of x @ y for two forms, (*b, i, k) and (*b, k, j).

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. If x has attention weights (a softmax), their rows sum to one. Then
    x @ y is bounded more tightly, as x @ (y - mean) + mean with the mean value of each row.
    """
    # Slack of an entry adds up in absolute value. As a symbol it keeps its sign and can cancel. At
    # order 1 symbols for the slack of y cost more than they gain.
    x = x.symbolize_slack()
    if x.symbols.order == 2:
        y = y.symbolize_slack()
    product = None
    # Only a softmax stores the ranges of its entries in `weights`.
    if x.weights and x.symbols.order == 1:
        product = _average_values(x, y)  # None if it does not pay off
    if product is None:
        product = _multiply_forms(x, y, torch.matmul)
    if not x.weights:
        return product
    # From x @ y to x @ (y - mean) + mean. The mean is not product.centre, which may also contain
    # the middle of the range of the product of both deviations (`Remainder.shift`).
    return _shift_values(product, x, constant=x.centre @ y.centre)


def mul(x: Any, y: Any) -> Form:
    """Return the form of x y, entry by entry, where one or both factors are forms.

    A form bounds a tensor for all inputs of a ball: centre + coefficients . symbols +- slack, with
    unknown symbols in [-1, 1]. If a factor is a constant, the other factor is scaled. The product
    of two forms contains products of symbols: they are kept as coefficients (order 2) or bounded.
    """
    if not isinstance(x, Form):
        return affine.scale(y, x)
    if not isinstance(y, Form):
        return affine.scale(x, y)
    x = rearrangements.broadcast(x, y.shape)
    y = rearrangements.broadcast(y, x.shape)
    return _multiply_forms(x, y, torch.mul)


def div(x: Any, y: Any) -> Form:
    """Return x / y; a form y must be positive on the whole ball."""
    if isinstance(y, Form):
        return mul(x, relax(y, RECIPROCAL, positive=True))
    constant = rearrangements.as_constant(y, x).to(DOUBLE)
    # 1 / y is rounded once more than y itself.
    return affine.scale(x, constant.reciprocal(), roundings=2)


def _multiply_forms(x: Form, y: Form, f: Bilinear) -> Form:
    """Return the form of f(x, y) for two forms x and y; f is torch.matmul or torch.mul.

    A form is centre + linear part + quadratic part + errors +- slack. The quadratic part (order 2
    only) has products of two input symbols. With x = c_x + dx and y = c_y + dy,
    f(x, y) = f(c_x, c_y) + f(dx, c_y) + f(c_x, dy) + f(dx, dy).
    c_x and c_y are the shifted centres, c = centre + centre_shift, where centre_shift is the
    middle of the range of the quadratic part.
    The second and third term are linear in the symbols of x and y. Of the last term, order 2 keeps
    the product of the linear parts as coefficients. The rest is bounded by an interval: the middle
    `remainder.shift` goes into the centre, and `remainder.radius` into the slack.
    """
    symbols = x.symbols
    # f(dx, c_y) + f(c_x, dy)
    if f is torch.matmul:
        dense, blocks = _multiply_matrices(x, y)
    else:
        dense, blocks = _multiply_entries(x, y)
    # The size of all terms but f(c_x, c_y), for rounding, and to judge how large f(dx, dy) is.
    x_size = x.shifted_centre.abs()
    y_size = y.shifted_centre.abs()
    x_radius = round_up(x.radius)
    y_radius = round_up(y.radius)
    radius = f(x_radius, y_size + y_radius) + f(x_size, y_radius)
    # f(dx, dy)
    remainder = _bound_deviations(x, y, f, radius)
    if symbols.order == 2:
        _add_linear_product(dense, x, y, f, remainder.is_product_kept)
    # The slack of each factor times the centre of the other, and the rest of f(dx, dy).
    slack = f(x.slack, y_size) + f(x_size, y.slack) + remainder.radius
    slack = _add_rounding(slack, x, y, f, radius, remainder.shift)
    # The centre of the result is its value with all symbols 0. Then x and y are at their centres,
    # so dx = -centre_shift, and c_x c_y + dx c_y + c_x dy is the following difference.
    centre = f(x.centre, y.centre) - f(x.centre_shift, y.centre_shift)
    blocks = [*blocks, *remainder.blocks]
    return Form(centre + remainder.shift, dense, slack, symbols, blocks=blocks)


def _bound_deviations(x: Form, y: Form, f: Bilinear, radius: Tensor) -> Remainder:
    """Bound f(dx, dy), where x = c_x + dx and y = c_y + dy are forms around shifted centres.

    At order 2 the product of the linear parts is left out where the caller keeps it as
    coefficients: in the entries of `Remainder.is_product_kept`, or in all if that is None.
    The bound is new symbols if they pay off (attention weights times values), else an interval.

    Args:
        x: a form, centre + coefficients . symbols +- slack.
        y: a form.
        f: torch.matmul or torch.mul.
        radius: a bound of each entry of f(x, y) - f(c_x, c_y).
    """
    # f(dx, dy) is worth a slower bound only if its entries have a sum above this.
    worthwhile = _WORTHWHILE_SHARE * radius.sum()
    if f is torch.matmul and x.symbols.order == 2 and x.weights:
        product_symbols = _add_rest_symbols(x, y, worthwhile)
        if product_symbols is not None:
            block, slack = product_symbols
            return Remainder(
                shift=torch.zeros_like(slack), radius=slack, is_product_kept=None, blocks=(block,)
            )
    return bound_remainder(x, y, f, worthwhile)


def _add_linear_product(
    dense: Tensor, x: Form, y: Form, f: Bilinear, is_product_kept: Tensor | None
) -> None:
    """Add f(L_x, L_y) to coefficients in place, for the linear parts L of two forms; order 2.

    Args:
        dense: (symbols, *shape), coefficients; symbols include products of two input symbols.
        x: a form, centre + coefficients . symbols +- slack.
        y: a form.
        f: torch.matmul or torch.mul.
        is_product_kept: a mask of the entries of x whose product is added; None for all.
    """
    if not len(x.dense) or not len(y.dense):  # a constant, without coefficients
        return
    n = x.symbols.inputs
    x_linear = x.dense[:n]
    if is_product_kept is not None:
        x_linear = x_linear * is_product_kept
    multiply = _multiply_stacks if f is torch.matmul else f
    x.symbols.add_products(dense, x_linear, y.dense[:n], multiply)


def _add_rounding(
    slack: Tensor, x: Form, y: Form, f: Bilinear, radius: Tensor, shift: Tensor
) -> Tensor:
    """Return the slack of f(x, y) plus bounds of all rounding errors of its computation.

    Args:
        slack: (*shape).
        x: a form, centre + coefficients . symbols +- slack.
        y: a form.
        f: torch.matmul or torch.mul.
        radius: (*shape), a bound of f(x, y) - f(c_x, c_y) around the shifted centres c.
        shift: what is added to the centre.
    """
    symbols = x.symbols
    dtype = symbols.dtype
    terms = 1  # of the sum in each entry
    if f is torch.matmul:
        terms = x.shape[-1]
    x_size = x.shifted_centre.abs()
    y_size = y.shifted_centre.abs()
    # A coefficient is a sum of two products, f(dx, c_y) + f(c_x, dy), of `terms` terms each: a
    # rounding per term, in the dtype of the coefficients. Order 2 adds the product of the linear
    # parts, with as many terms: it counts double. 8 leaves room for the casts of the centres and
    # the sum of both products. The centre has one product, in float64, and 4 leaves room.
    of_coefficients = bound_rounding((2 * terms + 8) * symbols.order, dtype) * radius
    slack = slack + (of_coefficients + bound_rounding(terms + 4, DOUBLE) * f(x_size, y_size))
    # Underflow: a product with a coefficient may be off by the smallest normal number, and a
    # coefficient by as much, which the product multiplies by an entry of a centre: `sizes` is
    # above each of them. (The cast of a centre, too: no radius is below this number, so that the
    # bound of dx dy covers its product with a coefficient.) There are at most 8 products for each
    # symbol and term. The result has as many symbols as the factor with more; at order 2 also all
    # symbols of the input and of their products, `first_error` in number.
    count = max(x.symbol_count, y.symbol_count, symbols.first_error)
    sizes = 1 + x_size.sum() + y_size.sum()
    slack = slack + 8 * count * terms * tiny(dtype) * sizes
    slack = slack + bound_rounding(4, DOUBLE) * shift.abs()  # of the sum of centre and shift
    # The slack itself is rounded, too: sums of `terms` terms, and fewer than 16 single steps.
    return round_up(slack, roundings=terms + 16)


def _multiply_matrices(x: Form, y: Form) -> Coefficients:
    """Return the coefficients of dx @ c_y + c_x @ dy: dense (symbols, *shape), and blocks.

    The forms are x = c_x + dx and y = c_y + dy, around shifted centres. A form has a dense stack
    of coefficients, one row per symbol. Blocks store further coefficients of errors sparsely.
    """
    x_centre = x.shifted_centre.to(x.symbols.dtype)
    y_centre = y.shifted_centre.to(x.symbols.dtype)
    # The next three steps change in place how the forms are stored, and not what they bound.
    # c_x @ dy mixes rows of y: so all blocks of y become dense.
    y.make_dense()
    # Blocks of x with errors that became dense in y become dense, too.
    affine.align_blocks(x, y)
    # dx @ c_y mixes only entries of the same row: all other blocks of x stay sparse, rewritten so
    # that each symbol acts in one row (`split_by_row`).
    of_dx, blocks = x.split_by_row().map_coefficients(lambda t: _stack_times(t, y_centre))
    of_dy = _times_stack(x_centre, y.dense)
    # Row i of a stack belongs to symbol i. A form has no rows for symbols that were created after
    # it: the shorter stack is added to the first rows of the longer one.
    longer, shorter = sorted(
        (of_dx, of_dy), key=len, reverse=True
    )  # equal lengths: of_dx is longer
    longer[: len(shorter)] += shorter
    return longer, blocks


def _multiply_entries(x: Form, y: Form) -> Coefficients:
    """Return the coefficients of dx c_y + c_x dy, entry by entry: dense, and blocks.

    The forms are x = c_x + dx and y = c_y + dy. Their shifted centres c are the centre plus the
    middle of the range of the quadratic part. A form has a dense stack of coefficients, one row
    per symbol. Blocks store further coefficients of errors sparsely.
    """
    x_centre = x.shifted_centre.to(x.symbols.dtype)
    y_centre = y.shifted_centre.to(x.symbols.dtype)
    # In place: errors that are dense in one form become dense in the other, too. This changes how
    # a form is stored, and not what it bounds.
    affine.align_blocks(x, y)
    x_blocks = [block.map_coefficients(lambda t: t * y_centre) for block in x.blocks]
    y_blocks = [block.map_coefficients(lambda t: t * x_centre) for block in y.blocks]
    # The blocks are done; now the dense coefficients. Row i belongs to symbol i, and the form that
    # was made first has fewer rows. The forms swap their names if needed, so that x has more rows:
    # those of y are added to its first rows.
    if len(x.dense) < len(y.dense):
        x, y = y, x
        x_centre, y_centre = y_centre, x_centre
    dense = x.dense * y_centre
    dense[: len(y.dense)].addcmul_(y.dense, x_centre)
    return dense, join_blocks(x_blocks, y_blocks, torch.add)


def _average_values(x: Form, y: Form) -> Form | None:
    """Return x @ y for attention weights x and values y at order 1; None if it does not pay off.

    Let c be the centre of y, and m and r the middle and half the width of the range of x:
    x y = m y + (x - m) c + (x - m) (y - c).
    The first two terms are linear in one form. The last is a sum of r_ij g_sj times an unknown in
    [-1, 1]: the product of (x_ij - m_ij) / r_ij and the symbol e_s of y - c = sum_s g_s e_s. The
    largest r_ij g_sj get a new symbol for this unknown, in all channels of row i. The others
    become slack.
    """
    keys = x.shape[-1]
    low, high = x.range()
    m = (low + high) / 2
    r = round_up(torch.maximum(high - m, m - low))
    # A bound of |(x - m) (y - c)|. If its entries have a sum below `worthwhile`, a small share of
    # the product, new symbols do not pay off, and `product_symbols` is None.
    radius = round_up(r @ y.radius, roundings=keys)
    worthwhile = _WORTHWHILE_SHARE * (m @ y.centre.abs()).sum()
    product_symbols = _add_product_symbols(
        x.symbols, pairs=[(r, y.make_dense().dense)], radius=radius, worthwhile=worthwhile
    )
    if product_symbols is None:
        return None
    # (x - m) (y - c) is in block +- slack: new symbols, and all products without a symbol.
    block, slack = product_symbols
    # m y and (x - m) c. Roundings: one per key, and one for the cast of m or c. m y mixes rows of
    # y, and (x - m) c only entries of the same row of x: its errors may stay sparse.
    of_values = affine.linear_map(y, lambda t, w: w @ t, m, roundings=keys + 1)
    of_weights = affine.linear_map(
        affine.sub(x, m), torch.matmul, y.centre, roundings=keys + 1, mixes="rows"
    )
    total = affine.add(of_values, of_weights)
    blocks = (*total.blocks, block)
    slack = round_up(total.slack + slack)
    return Form(total.centre, total.dense, slack, x.symbols, blocks=blocks)


def _add_rest_symbols(x: Form, y: Form, worthwhile: Tensor) -> tuple[ErrorBlock, Tensor] | None:
    """Return a block of new symbols, and slack, that bound dx @ dy - L_x @ L_y; for order 2.

    x are attention weights and y values. x = c_x + dx with dx = L_x + R_x, where L_x is linear in
    the input symbols and R_x is the rest; likewise y. In y the rest is R_y = E_y + Q_y: the errors
    E_y, which have symbols, and the quadratic part with the slack, Q_y. So what is to bound is

        dx @ dy - L_x @ L_y = R_x @ L_y + dx @ E_y + dx @ Q_y.

    The caller has coefficients for L_x @ L_y. New symbols are for products of a radius and a
    coefficient, in the first two terms. dx @ Q_y has no coefficients: it is slack.

    Args:
        x: the form of the attention weights.
        y: the form of the values.
        worthwhile: if the bounds of all entries have a smaller sum, new symbols do not pay off,
            and the result is None. It is also None if there is no room for them.
    """
    symbols = x.symbols
    x_radius = round_up(x.radii.linear + x.rest_radius)  # of dx
    y_linear = y.dense[: symbols.inputs]
    y_errors = y.dense[symbols.first_error :]
    # R_x @ L_y and dx @ E_y.
    pairs = [(x.rest_radius, y_linear), (x_radius, y_errors)]
    # The radius of all three terms, R_x @ L_y and dx @ (E_y + Q_y): what gets no symbol is slack.
    radius = x.rest_radius @ y.radii.linear + x_radius @ y.rest_radius
    radius = round_up(radius, roundings=x.shape[-1])  # sums over the keys
    return _add_product_symbols(symbols, pairs, radius, worthwhile)


def _add_product_symbols(
    symbols: Symbols, pairs: FactorPairs, radius: Tensor, worthwhile: Tensor
) -> tuple[ErrorBlock, Tensor] | None:
    """Return new symbols for the largest products r_ij g_sj, and slack for all other products.

    r_ij is the radius of an attention weight, and g_sjd is the coefficient of symbol s in channel
    d of the value of key j. A new symbol moves all channels of row i together. As slack, errors of
    the channels would be independent, and a later weight matrix would add up their sizes.
    Return None if new symbols do not pay off.

    Args:
        symbols: the symbols (unknowns in [-1, 1]) of the pass.
        pairs: one or two pairs of radii r, (*b, i, j), and coefficients g, (symbols, *b, j, d).
        radius: (*b, i, d), an upper bound of the sum of all products and of any other error.
        worthwhile: symbols pay off only if the sum of `radius` is larger than this.
    """
    dtype = symbols.dtype
    # A layer gives every row of the result one new symbol.
    layers = _count_product_symbols(symbols, pairs, radius, worthwhile)
    if not layers:
        return None
    products = _choose_products(pairs, layers)
    block = symbols.add_row_errors(products.reshape(layers, *radius.shape))
    radius_of_block = block.coefficients.to(DOUBLE).abs().sum(0)
    slack = (radius - radius_of_block).clamp_min(0.0)  # of the products without a symbol
    # Rounding, as a share of the whole radius. In the dtype of the coefficients: the cast of r and
    # the product with g. In float64: the sum over the layers and the difference. 8 leaves room.
    # Last: underflow of the products.
    rounding = bound_rounding(8, dtype) + bound_rounding(layers + 8, DOUBLE)
    return block, slack + rounding * radius + 4 * layers * tiny(dtype)


def _count_product_symbols(
    symbols: Symbols, pairs: FactorPairs, radius: Tensor, worthwhile: Tensor
) -> int:
    """Return how many symbols each row of a product gets; 0 if symbols do not pay off.

    Symbols pay off if enough of them fit into memory, and the sum of all products is above
    `worthwhile`. They do not in a pass with few symbols (`many_symbols` is False), nor for balls
    other than boxes: there the coordinates of the input cannot all be largest at once, which new
    symbols in [-1, 1] would ignore.

    Args:
        symbols: the symbols (unknowns in [-1, 1]) of the pass.
        pairs: one or two pairs of radii of attention weights, (*b, i, j), and coefficients of the
            values, (symbols, *b, j, d), for queries i, keys j and channels d. A product of a
            radius and a coefficient may get a symbol.
        radius: (*b, i, d), an upper bound of the sum of all products and of any other error.
        worthwhile: symbols pay off only if the sum of `radius` is larger than this.
    """
    queries, keys = pairs[0][0].shape[-2:]
    width = radius.shape[-1]
    heads = radius.shape[:-2].numel()
    # One symbol per row means heads x queries symbols in all. Each may later have a coefficient in
    # every entry of the values of an attention: heads x keys x width.
    room = _MOST_COEFFICIENTS // (heads * queries * heads * keys * width)
    products = keys * sum(len(coefficients) for _, coefficients in pairs)  # of a row
    count = min(room, products)
    # Slack is one unknown per channel of a row. So symbols pay off only if a row can have more of
    # them than channels. The sum is inf or NaN if bounds overflowed.
    pays_off = worthwhile < radius.sum() < math.inf
    if symbols.norm != "linf" or count <= width or not pays_off:
        return 0
    # If symbols were skipped, `bound_margins` may run again with many symbols. Order 2 always adds
    # them: in comparison with the products of input symbols they are few.
    if symbols.order == 1 and not symbols.many_symbols:
        symbols.skipped_symbols = True
        return 0
    return count


def _choose_products(pairs: FactorPairs, layers: int) -> Tensor:
    """Return the `layers` largest products r_ij g_sj of each row i, (layers, heads, i, d).

    In O = P V, an error of weight P_ij, at most r_ij, is multiplied by symbol s of value j, with
    the coefficient g_sj. The caller gives each of these products an error symbol of its own. All
    other products become slack.

    Args:
        pairs: one or two pairs of radii r, (*b, i, j), of the weights of keys j, and coefficients
            g, (symbols, *b, j, d), of their values; *b are the heads. Two pairs are two sums over
            the same keys: r is then the radius of another part of P_ij, and g has other symbols.
        layers: number of products.
    """
    # A product of the first pair has the number s * keys + j, for symbol s and key j. Numbers of
    # the second pair follow. Example with 3 keys, and 2 symbols in the first pair: number 4 is
    # symbol 1 and key 1 of the first pair, and number 8 is symbol 0 and key 2 of the second pair.
    sizes = []
    radii = []
    stacks = []
    for radius, coefficients in pairs:
        # The new first axis is there for tensors without a batch *b, which have one head.
        r = cast_up(radius, coefficients.dtype)[None].flatten(0, -3)  # (heads, i, j)
        g = coefficients.movedim(0, -3)[None].flatten(0, -4)  # (heads, symbols, j, d)
        # The size of a product is a sum over channels, r_ij sum_d |g_sjd|: (heads, i, symbols, j).
        sizes.append(torch.einsum("bsj,bij->bisj", g.abs().sum(-1), r))
        radii.append(r)
        stacks.append(g)
    sizes_of_row = torch.cat(sizes, 2).flatten(2)  # (heads, i, products)
    numbers = sizes_of_row.topk(layers, sorted=False).indices  # (heads, i, layers)
    # g of each chosen product: the row with its number, (heads, i, layers, d).
    rows = torch.cat(stacks, 1).flatten(1, 2)  # (heads, products, d)
    g = rows.take_along_dim(numbers.flatten(1)[..., None], 1).view(*numbers.shape, -1)
    # r of each chosen product: column j = number % keys of the radii of its pair. The radii of two
    # pairs are put side by side, (heads, i, 2 keys): the second pair begins at column `keys`.
    symbols, keys, _ = stacks[0].shape[1:]
    is_of_second_pair = numbers >= symbols * keys
    column = numbers % keys + keys * is_of_second_pair
    r = torch.cat(radii, -1).gather(-1, column)  # (heads, i, layers)
    products = r[..., None] * g
    return products.movedim(-2, 0)


def _multiply_stacks(x: Tensor, y: Tensor) -> Tensor:
    """Return the matrix products of two stacks (n, *b, i, k) and (n, *b, k, j), where one n is 1.

    The single matrix of one stack is multiplied with every matrix of the other stack.
    """
    if len(y) == 1:
        return _stack_times(x, y[0])
    return _times_stack(x[0], y)


def _stack_times(stack: Tensor, y: Tensor) -> Tensor:
    """Return stack (symbols, *b, i, k) @ y (*b, k, j), as (symbols, *b, i, j).

    One matmul with symbols and i as one axis is faster than a matmul per symbol.
    """
    tall = stack.movedim(0, -3)  # (*b, symbols, i, k)
    product = tall.flatten(-3, -2) @ y  # (*b, symbols i, j)
    return torch.unflatten(product, -2, tall.shape[-3:-1]).movedim(-3, 0)


def _times_stack(x: Tensor, stack: Tensor) -> Tensor:
    """Return x (*b, i, k) @ stack (symbols, *b, k, j), as (symbols, *b, i, j).

    One matmul with symbols and j as one axis is faster than a matmul per symbol.
    """
    wide = stack.movedim(0, -2)  # (*b, k, symbols, j)
    product = x @ wide.flatten(-2)  # (*b, i, symbols j)
    return torch.unflatten(product, -1, wide.shape[-2:]).movedim(-2, 0)


def _shift_values(product: Form, x: Form, constant: Tensor) -> Form:
    """Return the form of P (V - constant) + constant, which equals P V: rows of P sum to one.

    In this way errors of P act on V - constant, which is smaller than V, and the bounds are
    tighter. In the form of P V nothing is computed again: (1 - sum_k P_k) constant is added to it.
    This is zero for the true P, but not for the form of P, which has errors.

    Args:
        product: the form of P V, (*b, i, d); its coefficients are changed in place.
        x: the form of the attention weights P, (*b, i, k).
        constant: (*b, i, d), about the mean of V in each row.
    """
    dtype = product.symbols.dtype
    keys = x.shape[-1]
    # Any constant is valid. So it is rounded first, and its float64 copy is the same number.
    rounded = constant.to(dtype)
    exact = rounded.to(DOUBLE)
    # Coefficients: subtract those of (sum_k P_k) constant.
    row_sums, block_sums = x.map_coefficients(sum_row)
    product.dense[: len(row_sums)] -= row_sums * rounded
    removed = [block.map_coefficients(lambda t: -t * rounded) for block in block_sums]
    blocks = join_blocks(product.blocks, removed, torch.add)
    total = sum_row(x.centre)
    centre = product.centre + (1 - total) * exact
    # Slack: the slack of P times the constant, and then four kinds of rounding.
    magnitude = exact.abs()
    slack = product.slack + sum_row(x.slack) * magnitude
    # 1. Of a coefficient, in its dtype: the sum over keys, the product and the difference are
    # fewer than keys + 4 roundings of `radius`. (The difference also rounds the old coefficient.
    # The slack of the product covers this: it counts one rounding more than the product has.)
    radius = sum_row(x.symbol_radius) * magnitude
    slack = slack + bound_rounding(keys + 4, dtype) * radius
    # 2. Of the centre, in float64: the sum over keys and three steps, of numbers of at most
    # `size`; the count keys + 8 leaves room.
    size = (1 + sum_row(x.centre.abs())) * magnitude + product.centre.abs()
    slack = slack + bound_rounding(keys + 8, DOUBLE) * size
    # 3. Underflow of every product and sum.
    slack = slack + 2 * x.symbol_count * keys * tiny(dtype) * (1 + magnitude)
    # 4. Of the slack itself: sums over keys, and fewer than 8 single steps.
    slack = round_up(slack, roundings=keys + 8)
    return Form(centre, product.dense, slack, product.symbols, blocks=blocks)


def einsum(equation: str, *operands: Any) -> Any:
    """Return torch.einsum of two operands, computed as one batched matmul.

    Axes of the equation are in the batch, summed (contracted), rows, or columns. In
    "bid,bjd->bij", b is the batch, d is contracted, i are the rows and j the columns. Equations
    with "...", repeated axes, or without "->" are refused.
    """
    if isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    x_axes, y_axes, result_axes = _read_equation(equation, len(operands))
    # Axes that only one operand has, and not the result, are summed first. The rest is a matmul.
    x, x_axes = _sum_out(operands[0], x_axes, y_axes + result_axes, other=operands[1])
    y, y_axes = _sum_out(operands[1], y_axes, x_axes + result_axes, other=x)
    x_sizes = dict(zip(x_axes, x.shape, strict=True))
    y_sizes = dict(zip(y_axes, y.shape, strict=True))
    sizes = x_sizes | y_sizes
    # An axis of size 1 is broadcast to the size of the other operand.
    for axis, size in x_sizes.items():
        sizes[axis] = max(size, sizes[axis])
    shared = [axis for axis in x_axes if axis in y_axes]
    batch = [axis for axis in shared if axis in result_axes]
    contracted = [axis for axis in shared if axis not in result_axes]
    if any(x_sizes[axis] != y_sizes[axis] for axis in contracted):  # matmul broadcasts no sums
        raise NoRuleError(f"einsum of {equation} that broadcasts an axis of its sums")
    rows = [axis for axis in x_axes if axis not in y_axes]
    columns = [axis for axis in y_axes if axis not in x_axes]
    left = _fold_axes(x, x_axes, batch, rows, contracted)
    right = _fold_axes(y, y_axes, batch, contracted, columns)
    product = left @ right
    order = batch + rows + columns
    product = product.reshape([sizes[axis] for axis in order])
    return product.permute([order.index(axis) for axis in result_axes])


def _read_equation(equation: str, operands: int) -> tuple[str, str, str]:
    """Return the letters of x, y and the result: "ij, jk -> ik" gives "ij", "jk" and "ik".

    Refused are other numbers of operands than two, equations without "->", repeated axes (also
    "...", which repeats a dot), and a result with an axis that no operand has.
    """
    inputs, arrow, result_axes = equation.replace(" ", "").partition("->")
    x_axes, comma, y_axes = inputs.partition(",")
    is_complete = bool(arrow and comma) and operands == 2
    has_no_repeats = all(len(set(axes)) == len(axes) for axes in (x_axes, y_axes, result_axes))
    if not is_complete or not has_no_repeats or set(result_axes) - set(x_axes + y_axes):
        raise NoRuleError(f"einsum of {equation}")
    return x_axes, y_axes, result_axes


def _sum_out(t: Any, axes: str, others: str, other: Any) -> tuple[Any, str]:
    """Sum over the axes whose letters are not in `others`; return the result and its letters.

    If t is a constant, the other operand is a form. The sum is rounded: so t is made a form, whose
    slack covers the rounding.
    """
    summed = [i for i, axis in enumerate(axes) if axis not in others]
    if not summed:
        return t, axes
    (t,) = rearrangements.lift_first_constant(other, t)
    return t.sum(summed), "".join(axis for axis in axes if axis in others)


def _fold_axes(t: Any, axes: str, batch: list[str], rows: list[str], columns: list[str]) -> Any:
    """Return a tensor as matrices (*batch, rows, columns), for a matmul.

    Args:
        t: a tensor or form.
        axes: the letters of its axes in an einsum equation.
        batch: letters of the axes of the batch, which stay as they are.
        rows: letters of the axes that become the rows, as one axis.
        columns: letters of the axes that become the columns, as one axis.
    """
    t = t.permute([axes.index(axis) for axis in (*batch, *rows, *columns)])
    first_column = len(batch) + len(rows)
    batch_shape = t.shape[: len(batch)]
    row_count = t.shape[len(batch) : first_column].numel()
    return t.reshape(*batch_shape, row_count, t.shape[first_column:].numel())


def addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float | int = 1, alpha: float | int = 1
) -> Form:
    """Return the form of beta input + alpha mat1 @ mat2; at least one argument is a form."""
    # If both matrices are constants, one becomes a form: its slack covers the product's rounding.
    mat1, mat2 = rearrangements.lift_first_constant(input, mat1, mat2)
    product = mat1 @ mat2
    if alpha != 1:
        product = product * alpha
    return affine.add(product, input, alpha=beta)  # covers the rounding of beta times a constant
