"""Read linear maps: sums over products of entries of two tensors, by any function of torch.

A model applies W by a linear layer, a product of matrices, einsum, tensordot or a 1x1 convolution.
`READERS` reads the arguments of each as a `Contraction`, whose axes have letters as in einsum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lipaudit.models.attention import calls
from lipaudit.models.attention.calls import Linear, TorchFunction
from lipaudit.models.graph import Past, leaves, mark_row, vjp

LARGEST = 2**24
"""Largest number of entries of a block matrix."""


class Contraction(NamedTuple):
    """A sum over products of entries of two tensors, with a letter for each axis.

    x W of two axes each is x "ab", weight "bc", out "ac": b is summed over.

    Attributes:
        x, x_letters: one factor and the letters of its axes.
        weight, weight_letters: the other factor, which may be a weight, and its letters.
        out: letters of the result.
        bias: added along the axes of the weight, or None.
        is_linear_layer: whether the op is used for linear maps only (F.linear, addmm, a
            convolution), and never for a product of two activations.
    """

    x: Tensor
    x_letters: str
    weight: Tensor
    weight_letters: str
    out: str
    bias: Tensor | None = None
    is_linear_layer: bool = False

    @property
    def width(self) -> int:
        """Return the number of entries of x in one sum: the channels that the map reads."""
        # The axes of x that are summed over: both factors have them, the result has not.
        width = 1
        for letter, size in zip(self.x_letters, self.x.shape, strict=True):
            if letter in self.weight_letters and letter not in self.out:
                width *= size
        return width

    def read_both_ways(self) -> Iterator[tuple[str, Contraction]]:
        """Yield the product of two factors A B with B as the weight, then with A as the weight.

        A model may write a linear map as x W or as W x. `self` reads the product as x W: the left
        factor A is `x`, and the right factor B is `weight`. The second contraction swaps these
        roles. There is no second one for an op that only applies linear maps, such as F.linear, or
        for a batched product. The caller takes the first whose weight does not depend on the
        sample.

        Each contraction comes with the side of the weight (`calls.RIGHT` or `calls.LEFT`). The
        side is a part of the address that identifies the linear map.
        """
        yield calls.RIGHT, self
        # In a batched product, some axis belongs to both factors and to the result. A constant
        # left factor is then taken for learned queries of attention, not for a weight.
        batch = set(self.x_letters) & set(self.weight_letters) & set(self.out)
        if not self.is_linear_layer and not batch:
            yield calls.LEFT, self.swap()

    def swap(self) -> Contraction:
        """Return the same product with its two factors, `x` and `weight`, exchanged."""
        return self._replace(
            x=self.weight,
            x_letters=self.weight_letters,
            weight=self.x,
            weight_letters=self.x_letters,
        )

    def read(self) -> Linear | None:
        """Return the product as a linear map y = x W with a matrix W; None if nothing is summed.

        In "ab,bc->ac" the rows of x are along a, the channels of x along b, and the columns of W
        along c. In "abc,bcd->abd", with a product for each index of b, W is block-diagonal: it has
        a block for each index of b. None also if such a matrix is too large.
        """
        # If W is constant along b, "abc,bcd->abd" becomes "abc,cd->abd": b holds more rows of x,
        # and W is a single block.
        x, x_letters, weight, w_letters, out, *_ = self._drop_constant_axes()
        # Sort the letters by the tensors that have them. In "abc,bcd->abd": rows a, blocks b (all
        # three tensors have it), summed c (the result has it not), columns d.
        rows = [a for a in out if a not in w_letters]
        blocks = [a for a in out if a in x_letters and a in w_letters]
        summed = [a for a in x_letters if a in w_letters and a not in out]
        columns = [a for a in out if a not in x_letters]
        if not summed:  # an entry-wise or outer product
            return None
        x = x.permute([x_letters.index(a) for a in rows + blocks + summed])
        x = x.flatten(len(rows))  # (*rows, channels in)
        weight = weight.permute([w_letters.index(a) for a in blocks + summed + columns])
        matrix = _make_matrix(weight, blocks=len(blocks), summed=len(summed))
        if matrix is None:
            return None
        # The axes of the result y, in the order (*rows, *blocks, *columns).
        order = [out.index(a) for a in rows + blocks + columns]

        def arrange(y: Tensor) -> Tensor:
            """Return the result y of the op with axes (*rows, channels out)."""
            return y.permute(order).flatten(len(rows))

        return Linear(x, matrix, self.bias, arrange)

    def _drop_constant_axes(self) -> Contraction:
        """Return the same product, without axes along which one factor only repeats itself.

        If all matrices W_b in "abc,bcd->abd" are equal, the result is the product "abc,cd->abd".
        If x is equal along b, the result is "ac,bcd->abd". The other factor always keeps the axis,
        so the result of the product has it, too.
        """
        x, x_letters, weight, weight_letters, out, *_ = self
        for letter in {*x_letters} & {*weight_letters} & {*out}:  # axes of the batch
            weight_axis = weight_letters.index(letter)
            x_axis = x_letters.index(letter)
            if _is_constant_along(weight, weight_axis):
                weight = weight.select(weight_axis, 0)
                weight_letters = weight_letters.replace(letter, "")
            elif _is_constant_along(x, x_axis):
                x = x.select(x_axis, 0)
                x_letters = x_letters.replace(letter, "")
        return self._replace(
            x=x, x_letters=x_letters, weight=weight, weight_letters=weight_letters
        )


def _make_matrix(weight: Tensor, blocks: int, summed: int) -> Tensor | None:
    """Return a weight as a matrix, (channels in, channels out); None if it is too large.

    Args:
        weight: (*blocks, *channels in, *channels out). The matrix is block-diagonal if there are
            several blocks.
        blocks: number of axes of blocks.
        summed: number of axes of channels in.
    """
    first_column = blocks + summed
    count = math.prod(weight.shape[:blocks])  # number of blocks
    height = math.prod(weight.shape[blocks:first_column])
    width = math.prod(weight.shape[first_column:])
    parts = weight.reshape(count, height, width)
    if not blocks:
        return parts[0]
    if count * weight.numel() > LARGEST:  # over 64 MiB
        return None
    matrix: Tensor = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
    return matrix


def _is_constant_along(t: Tensor, axis: int) -> bool:
    """Say whether a tensor is constant along an axis: of size 1, or expanded (stride 0)."""
    return t.shape[axis] == 1 or t.stride(axis) == 0


def _read_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Contraction | None:
    """Read the arguments of F.linear as "ab..y,zy->ab..z", y channels in, z channels out."""
    rows = ascii_lowercase[: input.ndim - 1]
    if weight.ndim < 2:  # a vector: the result has no channels
        return None
    if bias is not None:
        if bias.shape[:-1].numel() > 1:  # a bias of its own for each row
            return None
        bias = bias.flatten().expand(len(weight))  # one number may serve all channels
    return Contraction(input, f"{rows}y", weight, "zy", f"{rows}z", bias, is_linear_layer=True)


def _read_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **scaling: Any) -> Contraction | None:
    """Read the arguments of torch.addmm, input + mat1 mat2: a linear layer with its bias first.

    None if the call has the factors alpha or beta: no linear layer has them.
    """
    if scaling:
        return None
    return _read_linear(mat1, mat2.t(), input)


def _read_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: str | int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Contraction | None:
    """Read the arguments of a 1x1 convolution, a linear map of the channels of each pixel.

    As an einsum it is "xyab..,zy->xzab..", with samples x, channels in y, channels out z, and a, b
    for the pixels. None for any other convolution, because it mixes pixels.
    """
    is_pointwise = math.prod(weight.shape[2:]) == 1 and input.ndim == weight.ndim
    reads_all_pixels = np.equal(stride, 1).all()
    # The texts "same" and "valid" mean no padding for a 1x1 kernel.
    is_padded = not isinstance(padding, str) and np.any(padding)
    if is_padded or not (is_pointwise and reads_all_pixels):
        return None
    weight = weight.flatten(1)
    pixels = ascii_lowercase[: input.ndim - 2]
    if groups > 1:  # each group of channels has a block of W
        weight = torch.block_diag(*weight.chunk(groups))  # type: ignore[no-untyped-call]
    return Contraction(
        input, f"xy{pixels}", weight, "zy", f"xz{pixels}", bias, is_linear_layer=True
    )


def _read_matmul(*operands: Any, **kwargs: Any) -> Contraction | None:
    """Read the arguments of a (batched) matrix product as "ab..xy,ab..yz->ab..xz"."""
    if len(operands) != 2 or kwargs:  # with `out=`, say
        return None
    a, b = operands
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.ndim, b.ndim) < 2:
        return None
    axes = max(a.ndim, b.ndim) - 2
    leading = ascii_lowercase[:axes]
    # The factor with fewer leading axes lacks the first ones, as in broadcasting: "abxy,yz->abxz".
    leading_of_a = leading[axes + 2 - a.ndim :]
    leading_of_b = leading[axes + 2 - b.ndim :]
    return Contraction(a, f"{leading_of_a}xy", b, f"{leading_of_b}yz", f"{leading}xz")


def _read_tensordot(a: Tensor, b: Tensor, dims: Any = 2, **kwargs: Any) -> Contraction:
    """Read the arguments of torch.tensordot: for three axes each and dims=2, "abc,bcf->af".

    `dims` are the axes of a and of b that are summed over, in pairs, or the number of such axes.
    """
    if isinstance(dims, int):  # the last axes of a, and the first ones of b
        dims = range(a.ndim - dims, a.ndim), range(dims)
    a_letters = ascii_lowercase[: a.ndim]
    b_letters = list(ascii_lowercase[a.ndim :][: b.ndim])
    for i, j in zip(*dims, strict=True):
        b_letters[j] = a_letters[i]
    out = sorted({*a_letters} ^ {*b_letters})  # the axes of one factor, first those of a
    return Contraction(a, a_letters, b, "".join(b_letters), "".join(out))


def read_einsum(equation: Any, *operands: Any) -> Contraction | None:
    """Read an einsum of two tensors, such as "ab,bc->ac".

    None for other numbers of operands, an equation without "->" or with an ellipsis, a diagonal
    ("aa,ab->b"), or a sum over an axis of one operand only.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):  # all operands in a list
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str):
        return None
    letters, arrow, out = equation.replace(" ", "").partition("->")
    first, comma, second = letters.partition(",")
    if not arrow or not comma or "," in second or "." in equation:
        return None
    first_axes = set(first)
    second_axes = set(second)
    has_diagonal = len(first_axes) < len(first) or len(second_axes) < len(second)
    summed_alone = (first_axes ^ second_axes) - set(out)  # axes of one operand only
    if has_diagonal or summed_alone:
        return None
    return Contraction(operands[0], first, operands[1], second, out)


Factors = tuple[Tensor, Tensor, list[str]]
"""Two factors a and b as matrices, and the letters of the axes of a b."""


def arrange_factors(contraction: Contraction, *, is_logits: bool) -> Factors | None:
    """Return the factors a and b of an einsum as matrices, and the letters of their product a b.

    Example: "bnhd,bmhd->bhnm" is q k^T. The result is q as (b, h, n, d), k as (b, h, d, m), and
    the letters bhnm of the product. The letters are sorted by the factors that have them (the
    comments give the letters for "bnhd,bmd->bhnm", where all heads share their keys):

        rows      n: the queries; only a has them
        columns   m: the keys in q k^T, or the channels in P v; only b has them
        summed    d: both factors have it, and the result has not
        batch     b, h: all other letters of the result

    None if the einsum is no matrix product.

    Args:
        contraction: the einsum.
        is_logits: whether it may be q k^T; otherwise it may be P v.

    Returns:
        a, (*batch, row, sum); b, (*batch, sum, *columns); the letters of (*batch, row, *columns).
    """
    out = contraction.out
    # Letters of the result that only one factor has. Let b be the factor with the last one, the
    # keys of q k^T or the channels of P v.
    shared = {*contraction.x_letters} & {*contraction.weight_letters}  # b, d
    single = [c for c in out if c not in shared]  # h, n, m: so k, with m, is b
    if single and single[-1] in contraction.x_letters:
        contraction = contraction.swap()
    a, a_letters, b, b_letters, *_ = contraction
    # If heads share their keys, heads are also letters of a alone: h in q k^T "bnhd,bmd->bhnm" and
    # in P v "bhnm,bmd->bnhd". The queries n come after h in the logits and in P: these are the
    # result of q k^T, and the factor a of P v.
    order = single if is_logits else a_letters
    rows = [c for c in order if c in a_letters and c in single]  # h, n
    columns = [c for c in single if c in b_letters]  # m
    summed = [c for c in a_letters if c in shared and c not in out]  # d
    if not rows or not columns or len(summed) != 1:
        return None
    rows = rows[-1:]  # n, the queries: any letter before them, such as h, becomes a batch axis
    if is_logits:  # keys have one axis; channels of values may have several
        columns = columns[-1:]
    batch = [c for c in out if c not in rows + columns]  # b, h
    a = _align(a, a_letters, batch + rows + summed)
    b = _align(b, b_letters, batch + summed + columns)
    return a, b, batch + rows + columns


def _align(t: Tensor, letters: str, wanted: Sequence[str]) -> Tensor:
    """Return t with its axes in another order, and axes of size 1 for letters that it lacks.

    Args:
        t: the tensor.
        letters: the letter of each of its axes, as in einsum.
        wanted: the letters of the axes of the result.
    """
    order = [letters.index(letter) for letter in wanted if letter in letters]
    t = t.permute(order)
    for axis, letter in enumerate(wanted):
        if letter not in letters:
            t = t.unsqueeze(axis)
    return t


def maps_logits(linear: Linear, product: GradientEdge, past: Past) -> bool:
    """Say whether a linear map acts on logits: on the heads, or on the keys, of one query.

    In talking heads, a linear map mixes the logits of all heads. The softmax after the map then
    belongs to the attention with the product q k^T. Any other map after a product belongs to a
    later layer: linear attention and state spaces also end in a product, and the next layer reads
    the product.

    The map acts on vectors, the rows of its input (`linear.inputs`). The test counts the heads,
    queries and keys of q k^T that one input vector depends on. With a single head, the map of a
    later layer can pass the test, too. This has no effect as long as the walk back from a later
    softmax ends at its own product q k^T, which is nearer.

    Args:
        linear: the linear map.
        product: the product q k^T, (..., heads, queries, keys), by its edge in the graph. Or P,
            the softmax of such a product, with the same axes.
        past: for each leaf at which the graph is cut, the products before the cut. A leaf is the
            output of an earlier op, from which a new graph starts.
    """
    # How many heads, queries and keys of q k^T one input vector of the map depends on, such as
    # [8, 1, 1] for a map that mixes 8 heads.
    counts = _count_dependencies(linear, product)
    if counts:
        *heads, queries, keys = counts
        # An input vector has one query, and the heads of one key or the keys of one head.
        return queries == 1 and (keys == 1 or max(heads) == 1)
    # No path leads from the map back to q k^T. An earlier map of the logits may have cut the
    # graph, such as the first of two maps in talking heads. The output of this earlier map is a
    # leaf, and `past` lists q k^T for it. Which axis of the leaf holds heads, queries or keys is
    # unknown. This map acts on logits, too, if an input vector depends on entries along one axis
    # of the leaf.
    ends, _ = leaves(linear.x)
    for leaf in ends:
        if product.node in past.get(leaf, ()):
            counts_of_leaf = _count_dependencies(linear, leaf)
            if sum(count > 1 for count in counts_of_leaf) <= 1:
                return True
    return False


def _count_dependencies(linear: Linear, source: Tensor | GradientEdge) -> list[int]:
    """Count the indices, along each axis of `source`, that one input vector of a map depends on.

    An input vector is a row of `linear.inputs`; the middle one is taken. If `source` has the axes
    (heads, queries, keys), the result [8, 1, 1] says: all 8 heads, of one query and one key. The
    result is empty if the vector depends on no entry of `source`.

    Args:
        linear: the map.
        source: a tensor, or the edge of a tensor in the autograd graph.
    """
    # A gradient in the shape of `source`: nonzero at the entries that the middle row depends on.
    pulled = vjp(linear.inputs, source, mark_row(linear.inputs))
    if pulled is None:
        return []
    return [indices.unique().numel() for indices in pulled.nonzero().T]


READERS: dict[TorchFunction, Callable[..., Contraction | None]] = {
    F.linear: _read_linear,
    torch.addmm: _read_addmm,
    torch.tensordot: _read_tensordot,
    torch.einsum: read_einsum,
    **dict.fromkeys((F.conv1d, F.conv2d, torch.conv1d, torch.conv2d), _read_conv),
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm)
        + (Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
        _read_matmul,
    ),
}
