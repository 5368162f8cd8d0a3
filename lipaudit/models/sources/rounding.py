"""Weights that `--quantize` rounds on loading, as weight-only quantisers do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipaudit.errors import InputError, UsageError, join_few
from lipaudit.models.precision import HALF
from lipaudit.settings.value_types import read_quantization

# Packed weights of nn.MultiheadAttention.
PACKED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# Methods of transformers and timm that return the output layer, or a tuple of several.
HEADS = ("get_output_embeddings", "get_classifier")


class LinearWeight(NamedTuple):
    """The weight of a linear layer.

    Attributes:
        name: its name in the model.
        parameter: the weight.
        is_transposed: whether the weight is (inputs, outputs), not (outputs, inputs).
    """

    name: str
    parameter: Tensor
    is_transposed: bool


def round_weights(module: nn.Module, how: str) -> str:
    """Round the weights of linear layers in place, as weight-only quantisers do.

    The weights w of an output channel, or of a group of its inputs, share the scale
    s = max|w| / (2^(bits-1) - 1/2). A weight w becomes s round(w / s), where the integer
    round(w / s) is clamped to the 2^bits integers from -2^(bits-1) on. This is the symmetric round
    to nearest of torchao (`IntxWeightOnlyConfig`), without calibration, bit for bit.

    Not rounded: convolutions, norms, biases, embeddings, output layers (see `_find_fixed`), and
    all weights tied to these. A model that names no output layer has every linear layer rounded.

    Args:
        module: the model, with finite weights; weights in half precision become float32.
        how: number format and group, as `--quantize` takes them.

    Returns:
        A description for the report.

    Raises:
        UsageError: the group does not divide the inputs of a layer.
        InputError: there is no linear layer to round.
    """
    bits, group = read_quantization(how)
    weights, unchanged = _choose_weights(module, how)
    if group:
        _require_whole_groups(weights, group, how)
    for weight in weights:  # one at a time: a copy of all weights would double the memory
        weight.parameter.data = _round_weight(weight, bits, group)
    count = sum(weight.parameter.numel() for weight in weights)
    share = count / sum(p.numel() for p in module.parameters())
    unit = "output channel"
    if group:
        unit = f"group of {group} inputs"
    others = "no linear layer is left"
    if unchanged:
        others = f"linear layers left as they are: {join_few(unchanged)}"
    return (
        f"weights of {len(weights)} linear layers ({share:.0%} of the parameters) rounded to "
        f"the nearest int{bits} value, with one scale per {unit}; {others}"
    )


def _choose_weights(module: nn.Module, how: str) -> tuple[list[LinearWeight], list[str]]:
    """Return the weights to round, tied ones once, and the names of linear layers that stay.

    Args:
        module: the model.
        how: the argument of --quantize, for the message.

    Raises:
        InputError: there is no weight to round.
    """
    fixed = _find_fixed(module)  # ids of the parameters that are not rounded
    weights = {}
    unchanged = []
    for weight in list_linear_weights(module):
        if id(weight.parameter) in fixed:
            unchanged.append(weight.name.removesuffix(".weight"))
        else:
            weights[id(weight.parameter)] = weight
    if not weights:
        text = f"--quantize {how}: {type(module).__name__} has no linear layer to round"
        if unchanged:
            text += f" but its output ({join_few(unchanged)})"
        raise InputError(
            text,
            "Leave --quantize out: it rounds nn.Linear, except embeddings and the output layer.",
        )
    return [*weights.values()], unchanged


def _round_weight(weight: LinearWeight, bits: int, group: int) -> Tensor:
    """Return the values of a weight, rounded, in its own shape.

    Args:
        weight: the weight.
        bits: number of bits of a rounded value.
        group: number of inputs that share a scale; 0: all inputs of an output channel.
    """
    w = weight.parameter.data
    if w.dtype in HALF:
        w = w.float()
    if weight.is_transposed:
        w = w.T
    groups = w.reshape(-1, group or w.shape[1])
    rounded = _round_rows(groups, bits).reshape(w.shape)
    if weight.is_transposed:
        return rounded.T.contiguous()
    return rounded


def _require_whole_groups(weights: Iterable[LinearWeight], group: int, how: str) -> None:
    """Refuse a size of groups that does not divide the number of inputs of every layer.

    Args:
        weights: the weights to round.
        group: number of inputs that share a scale.
        how: the argument of --quantize, for the message.

    Raises:
        UsageError: the size does not divide the inputs of a layer; the message names the layer.
    """
    inputs = {name: p.shape[0 if is_transposed else 1] for name, p, is_transposed in weights}
    undivided = [name for name, count in inputs.items() if count % group]
    if undivided:
        raise UsageError(
            f"--quantize {how}: groups of {group} do not divide the {inputs[undivided[0]]} "
            f"inputs of {join_few(undivided, most=1)}",
            f"Use a divisor of {math.gcd(*inputs.values())}, which divides all layers, or leave "
            "the group out.",
        )


def _round_rows(rows: Tensor, bits: int) -> Tensor:
    """Return rows rounded to multiples of a scale per row, by integer factors of `bits` bits."""
    half = 2 ** (bits - 1)  # the factors are -half to half - 1
    # The largest entry of a row becomes half - 0.5, in the middle of the limits half and half - 1.
    scale = rows.abs().amax(1, keepdim=True) / (half - 0.5)
    # The smallest scale of torchao. It avoids a division by 0: rows of zeros stay zeros.
    scale = scale.clamp(min=torch.finfo(torch.float32).eps)
    # Times 1 / scale, as in torchao: a division could round to another integer.
    codes = (rows * (1.0 / scale)).round().clamp(-half, half - 1)
    # `round` may give -0.0, and integers have no -0: adding 0 makes it +0.0, as in torchao.
    return (codes + 0.0) * scale


def list_linear_weights(module: nn.Module) -> Iterator[LinearWeight]:
    """Yield the weights of linear layers, also of the projections of nn.MultiheadAttention."""
    for path, part in module.named_modules():
        # The linear layer of GPT-2 in transformers, whose weight is (inputs, outputs).
        is_transposed = type(part).__name__ == "Conv1D"
        names: tuple[str, ...] = ()  # of weights of linear maps in this module
        if isinstance(part, nn.MultiheadAttention):
            names = PACKED  # `in_proj_weight` or `q_proj_weight`, ...
        elif is_transposed or isinstance(part, nn.Linear):
            names = ("weight",)
        for name in names:
            p = part._parameters.get(name)
            if p is not None and p.ndim == 2:
                yield LinearWeight(f"{path}.{name}".lstrip("."), p, is_transposed)


def _find_fixed(module: Any) -> set[int]:
    """Return the ids of the parameters that rounding leaves as they are.

    These belong to embeddings, to the output layers that `get_classifier` (timm) and
    `get_output_embeddings` (transformers) return, and to all modules of a transformers model
    outside of its `base_model`, such as the layers of a classifier.
    """
    # Modules whose parameters are not rounded. An output layer may be None: the model has none.
    parts = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    for get in HEADS:
        if not hasattr(module, get):
            continue
        output = getattr(module, get)()
        if isinstance(output, tuple):  # several heads
            parts += output
        else:
            parts.append(output)
    # The base model of a transformers model, such as `model.bert`. A model without a head is its
    # own base model, and so is a model of another library: no parameter is outside of it.
    prefix = getattr(module, "base_model_prefix", "")
    base = getattr(module, prefix, module)
    fixed = set(map(id, module.parameters()))
    fixed.difference_update(map(id, base.parameters()))
    for part in parts:
        if part is not None:
            fixed.update(map(id, part.parameters()))
    return fixed
