"""Quantised weights: rounded on loading by `--quantize`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lipaudit.errors import InputError, UsageError, refuse
from lipaudit.models.sources.weights import HALF, few
from lipaudit.settings.option import read_quantization

# Packed weights of nn.MultiheadAttention.
PACKED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# Methods of transformers and timm that return the layer behind the last hidden states.
HEADS = ("get_output_embeddings", "get_classifier")


def round_weights(module: nn.Module, how: str) -> str:
    """Round the weights of linear layers in place, as weight-only quantisers do; describe it.

    Each output channel, or each group of its inputs, has the scale s = max|w| / (2^(bits-1) - 1/2)
    and becomes s round(w / s), clamped to the 2^bits integers around 0. This is the symmetric
    round to nearest of torchao (`IntxWeightOnlyConfig`), without calibration, bit for bit.
    Embeddings, weights tied to them, and the output layer keep their values, as with
    the quantisers of transformers; convolutions, norms and biases, too.

    Args:
        module: the model, with finite weights; those in half precision become float32.
        how: number format and group, as `--quantize` takes them.

    Raises:
        UsageError: the group does not divide the inputs of a layer.
        InputError: there is no linear layer to round.
    """
    bits, group = read_quantization(how)
    half = 2 ** (bits - 1)
    weights = {id(p): (name, p, turned) for name, p, turned in _list_weights(module)}
    refuse(
        not weights,
        f"--quantize {how}: {type(module).__name__} has no linear layer to round",
        "Leave --quantize out: it rounds nn.Linear, except the output layer.",
        InputError,
    )
    widths = {name: p.shape[0 if turned else 1] for name, p, turned in weights.values()}
    odd = [name for name, width in widths.items() if group and width % group]
    refuse(
        odd,
        f"--quantize {how}: groups of {group} do not divide the {widths[odd[0]] if odd else 0} "
        f"inputs of {few(odd, 1)}",
        f"Use a divisor of {math.gcd(*widths.values())}, which divides all layers, or leave the "
        "group out.",
        UsageError,
    )
    for _, p, turned in weights.values():
        # One layer at a time: a copy of all would double the memory.
        w = p.data.float() if p.dtype in HALF else p.data
        rows = (w.T if turned else w).reshape(-1, group or w.shape[0 if turned else 1])
        # The smallest scale of torchao: rows of zeros stay zeros.
        scale = rows.abs().amax(1, keepdim=True) / (half - 0.5)
        scale = scale.clamp(min=torch.finfo(torch.float32).eps)
        # Integers have no -0, whose bits would differ: adding 0 makes it 0.
        rounded = ((rows * (1.0 / scale)).round().clamp(-half, half - 1) + 0.0) * scale
        p.data = rounded.reshape(w.T.shape).T.contiguous() if turned else rounded.reshape(w.shape)
    count = sum(p.numel() for _, p, _ in weights.values())
    share = count / sum(p.numel() for p in module.parameters())
    per = f"group of {group} inputs" if group else "output channel"
    return (
        f"weights of {len(weights)} linear layers ({share:.0%} of the parameters) rounded to "
        f"the nearest int{bits} value, with one scale per {per}"
    )


def _list_weights(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the weights that are rounded: name, parameter, and whether inputs are its rows."""
    parts = dict(module.named_modules())
    tables = {id(part.weight) for part in parts.values() if isinstance(part, nn.Embedding)}
    last = [name for name, _ in module.named_parameters()][-1]
    outputs = [parts[last.rpartition(".")[0]]]
    outputs += [getattr(module, get)() for get in HEADS if hasattr(module, get)]
    for path, part in parts.items():
        if part in outputs:
            continue
        turned = type(part).__name__ == "Conv1D"  # of transformers: a linear layer, transposed
        names = ("weight",) if turned or isinstance(part, nn.Linear) else ()
        for name in PACKED if isinstance(part, nn.MultiheadAttention) else names:
            p = part._parameters.get(name)
            if p is not None and p.ndim == 2 and id(p) not in tables:
                yield f"{path}.{name}".lstrip("."), p, turned
