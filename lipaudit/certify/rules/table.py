"""The table of rules: what every supported operation of torch does to forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F

from lipaudit.certify.rules import affine, bilinear, mixing, moves, norms, pieces, smooth, sums
from lipaudit.certify.rules.moves import make_constant, make_move
from lipaudit.certify.rules.smooth import make_unary

OF_THE_SAME_NAME: tuple[Callable[..., Any], ...] = (
    *(affine.add, affine.sub, affine.neg, affine.expand, affine.linear, affine.batch_norm),
    *(affine.dropout, bilinear.matmul, bilinear.mul, bilinear.div),
    *(moves.cat, moves.stack, moves.where, moves.masked_fill, moves.pad),
    *(moves.unfold, sums.einsum, sums.addmm),
    *(mixing.softmax, mixing.log_softmax, mixing.logsumexp),
    *(mixing.scaled_dot_product_attention, mixing.multi_head_attention_forward),
    *(norms.layer_norm, norms.rms_norm, norms.group_norm),
    *(norms.vector_norm, norms.normalize),
    *(pieces.relu, pieces.leaky_relu, pieces.prelu, pieces.hardsigmoid, pieces.hardswish),
    *(pieces.maximum, pieces.minimum, pieces.clamp, pieces.amax, pieces.amin),
    pieces.max_pool2d,
    *(smooth.gelu, smooth.silu, smooth.elu, smooth.softplus, smooth.glu),
    smooth.square,
)
"""Rules of the operations that have their name."""

RULES: dict[str, Callable[..., Any]] = {
    **{rule.__name__: rule for rule in OF_THE_SAME_NAME},
    # Affine operations.
    **dict.fromkeys(("to", "float", "double", "type", "type_as"), affine.same),
    **dict.fromkeys(("contiguous", "detach", "data"), affine.same),
    "clone": lambda input, *, memory_format=None: input.copy(),
    "negative": affine.neg,
    "radd": affine.add,
    "rsub": lambda x, other, *, alpha=1: affine.sub(other, x, alpha=alpha),
    "broadcast_to": affine.expand,
    "expand_as": lambda x, other: affine.expand(x, *other.shape),
    **dict.fromkeys(("conv1d", "conv2d"), affine.convolve),
    "sum": affine.reduce_axes,
    "mean": partial(affine.reduce_axes, mean=True),
    "baddbmm": lambda input, batch1, batch2, **how: sums.addmm(input, batch1, batch2, **how),
    "avg_pool1d": sums.make_pooling(F.avg_pool1d, 1),
    "avg_pool2d": sums.make_pooling(F.avg_pool2d, 2),
    "adaptive_avg_pool1d": sums.make_pooling(F.adaptive_avg_pool1d, 1),
    "adaptive_avg_pool2d": sums.make_pooling(F.adaptive_avg_pool2d, 2),
    # Entries elsewhere, and new tensors.
    **{name: make_move(name) for name in moves.MOVES},
    **{name: make_move(name) for name in ("gather", "take_along_dim", "repeat_interleave")},
    "view": make_move("reshape"),
    **dict.fromkeys(("view_as", "reshape_as"), lambda x, other: x.reshape(other.shape)),
    "T": lambda x: x.permute(*range(x.ndim)[::-1]),
    "mT": lambda x: x.transpose(-1, -2),
    "iter": lambda x: iter(x.unbind(0)),
    "getitem": make_move("__getitem__"),
    "concat": moves.cat,
    **{name: make_constant(name) for name in ("zeros_like", "ones_like", "full_like")},
    **{name: make_constant(name) for name in ("new_zeros", "new_ones", "new_full", "new_tensor")},
    # Products.
    "bmm": bilinear.matmul,
    "rmatmul": lambda x, other: bilinear.matmul(other, x),
    **dict.fromkeys(("multiply", "rmul"), bilinear.mul),
    **dict.fromkeys(("divide", "true_divide", "truediv"), bilinear.div),
    "rdiv": lambda x, other: bilinear.div(other, x),
    # Norms and moments.
    "linalg_vector_norm": norms.vector_norm,
    "var": sums.variance,
    "std": lambda *args, **how: smooth.relax(
        sums.variance(*args, **how), smooth.SQRT, positive=True
    ),
    "norm": lambda input, p="fro", dim=None, keepdim=False, dtype=None: norms.vector_norm(
        input, p, dim, keepdim
    ),
    # Functions of each entry, and extremes.
    "exp": make_unary(smooth.EXP),
    "tanh": make_unary(smooth.TANH),
    "sigmoid": make_unary(smooth.SIGMOID),
    "erf": make_unary(smooth.ERF),
    "sin": make_unary(smooth.SIN),
    "cos": make_unary(smooth.COS),
    "log": make_unary(smooth.LOG, positive=True),
    "mish": lambda input, inplace=False: smooth.relax(input, smooth.MISH),
    "abs": lambda input: pieces.leaky_relu(input, -1.0),
    "clip": pieces.clamp,
    "clamp_min": lambda input, min: pieces.clamp(input, min),
    "clamp_max": lambda input, max: pieces.clamp(input, None, max),
    "relu6": lambda input, inplace=False: pieces.clamp(input, 0.0, 6.0),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: pieces.clamp(
        input, min_val, max_val
    ),
    "max": pieces.make_extreme(pieces.maximum, pieces.amax),
    "min": pieces.make_extreme(pieces.minimum, pieces.amin),
    "rsqrt": make_unary(smooth.RSQRT, positive=True),
    "sqrt": make_unary(smooth.SQRT, positive=True),
    "reciprocal": make_unary(smooth.RECIPROCAL, positive=True),
    "pow": smooth.raise_power,
}
"""Rules of all supported operations, by name."""
