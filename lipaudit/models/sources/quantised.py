"""Quantised weights: rounded on loading by `--quantize`, or stored so by a library.

Weights of torchao and bitsandbytes are dequantised here, in a model from any source; files of GPTQ
and AWQ, too, without the library that wrote them. Transformers dequantises those of other methods
while it loads a directory.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.errors import InputError, UsageError, explain_failure, few, suggestion
from lipaudit.models.precision import defer
from lipaudit.models.sources.weight_files import HALF, list_weight_files, read_weights
from lipaudit.settings.option import read_quantization
from lipaudit.tables import Note

# The library that each method of a transformers checkpoint needs to be dequantised.
LIBRARIES = {
    "torchao": "torchao", "bitsandbytes": "bitsandbytes", "gptq": "", "awq": "",
    "compressed-tensors": "compressed_tensors", "fp8": "", "mxfp8": "", "mxfp4": "",
}  # fmt: skip
# The layouts of files that `read_codes` reads; the first one is the default.
LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
# Places of eight values in the 32 bits of AWQ.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# Number formats of safetensors that no quantiser stores its codes in.
FLOATS = {"F64", "F32", "F16", "BF16"}
# Packed weights of nn.MultiheadAttention.
PACKED = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# Methods of transformers and timm that return the output layer, or a tuple of several.
HEADS = ("get_output_embeddings", "get_classifier")
# The weight of a linear layer: name, parameter, and whether inputs are its rows.
Linear = tuple[str, Tensor, bool]


def round_weights(module: nn.Module, how: str) -> str:
    """Round the weights of linear layers in place, as weight-only quantisers do; describe it.

    Each output channel, or each group of its inputs, has the scale s = max|w| / (2^(bits-1) - 1/2)
    and becomes s round(w / s), clamped to the 2^bits integers around 0. This is the symmetric
    round to nearest of torchao (`IntxWeightOnlyConfig`), without calibration, bit for bit.
    Embeddings keep their values, and so does what the model's library calls its output:
    `get_classifier` of timm, `get_output_embeddings` of transformers and what it puts behind
    `base_model`, with all weights tied to these. A model that names no output has every linear
    layer rounded, the last one, too. Convolutions, norms and biases are not rounded.

    Args:
        module: the model, with finite weights; those in half precision become float32.
        how: number format and group, as `--quantize` takes them.

    Raises:
        UsageError: the group does not divide the inputs of a layer.
        InputError: there is no linear layer to round.
    """
    bits, group = read_quantization(how)
    fixed = _find_fixed(module)
    weights: dict[int, Linear] = {}
    left: list[str] = []
    for name, p, turned in _list_weights(module):
        if id(p) in fixed:
            left.append(name.removesuffix(".weight"))
        else:
            weights[id(p)] = name, p, turned
    if not weights:
        text = f"--quantize {how}: {type(module).__name__} has no linear layer to round"
        if left:
            text += f" but its output ({few(left)})"
        raise InputError(
            text,
            "Leave --quantize out: it rounds nn.Linear, except embeddings and the output layer.",
        )
    if group:
        _require_whole_groups(weights.values(), group, how)

    count = 0
    for _, p, turned in weights.values():
        # One layer at a time: a copy of all would double the memory.
        w = p.data
        if w.dtype in HALF:
            w = w.float()
        if turned:
            w = w.T
        groups = w.reshape(-1, group or w.shape[1])
        rounded = _round_rows(groups, bits).reshape(w.shape)
        if turned:
            rounded = rounded.T.contiguous()
        p.data = rounded
        count += p.numel()

    share = count / sum(p.numel() for p in module.parameters())
    per = "output channel"
    if group:
        per = f"group of {group} inputs"
    rest = "no linear layer is left"
    if left:
        rest = f"linear layers left as they are: {few(left)}"
    return (
        f"weights of {len(weights)} linear layers ({share:.0%} of the parameters) rounded to "
        f"the nearest int{bits} value, with one scale per {per}; {rest}"
    )


def _require_whole_groups(weights: Iterable[Linear], group: int, how: str) -> None:
    """Refuse groups that do not divide the inputs of all layers.

    Raises:
        UsageError: they do not; the message names the first such layer.
    """
    widths: dict[str, int] = {}
    odd: list[str] = []
    for name, p, turned in weights:
        axis = 0 if turned else 1
        width = p.shape[axis]
        widths[name] = width
        if width % group:
            odd.append(name)
    if odd:
        raise UsageError(
            f"--quantize {how}: groups of {group} do not divide the {widths[odd[0]]} inputs of "
            f"{few(odd, 1)}",
            f"Use a divisor of {math.gcd(*widths.values())}, which divides all layers, or leave "
            "the group out.",
        )


def _round_rows(rows: Tensor, bits: int) -> Tensor:
    """Round each row to integers of a number of bits, times the scale of the row."""
    half = 2 ** (bits - 1)
    scale = rows.abs().amax(1, keepdim=True) / (half - 0.5)
    # The smallest scale of torchao: rows of zeros stay zeros.
    scale = scale.clamp(min=torch.finfo(torch.float32).eps)
    codes = (rows * (1.0 / scale)).round().clamp(-half, half - 1)
    # Integers have no -0, whose bits would differ: adding 0 makes it 0.
    return (codes + 0.0) * scale


def _list_weights(module: nn.Module) -> Iterator[Linear]:
    """Yield the weights of linear layers: name, parameter, and whether inputs are its rows."""
    for path, part in module.named_modules():
        turned = type(part).__name__ == "Conv1D"  # of transformers: a linear layer, transposed
        names: tuple[str, ...] = ()
        if isinstance(part, nn.MultiheadAttention):
            names = PACKED
        elif turned or isinstance(part, nn.Linear):
            names = ("weight",)
        for name in names:
            p = part._parameters.get(name)
            if p is not None and p.ndim == 2:
                yield f"{path}.{name}".lstrip("."), p, turned


def _find_fixed(module: Any) -> set[int]:
    """Return the ids of the parameters of embeddings and of the output that the model names."""
    parts: list[Any] = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    for get in HEADS:
        if not hasattr(module, get):
            continue
        output = getattr(module, get)()
        if isinstance(output, tuple):
            parts += output
        else:
            parts.append(output)
    # Of a model without a task, `base_model` is the model itself, and nothing is behind it.
    base = getattr(module, getattr(module, "base_model_prefix", ""), module)
    fixed = set(map(id, module.parameters()))
    fixed.difference_update(map(id, base.parameters()))
    for part in parts:
        if part is not None:
            fixed.update(map(id, part.parameters()))
    return fixed


def plan_dequantising(
    config: Any, path: Path, kinds: Set[str], *, later: bool
) -> tuple[str, tuple[Note, ...], dict[str, Any] | None]:
    """Have a checkpoint dequantised on loading, where that is possible; describe it then.

    Args:
        config: the configuration of the model, which is changed.
        path: its directory.
        kinds: number formats of its weights, as safetensors spells them; empty if unknown.
        later: see `read_codes`.

    Returns:
        What is dequantised; notes; and all weights, where transformers cannot read the files.

    Raises:
        InputError: the method cannot be dequantised, or its library is not installed.
    """
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return "", (), None
    method = str(stored.get("quant_method") or "bitsandbytes")  # old files lack it
    layout = ""
    odd = _find_odd_scheme(stored)
    if method in LAYOUTS:
        layouts = LAYOUTS[method]
        named = stored.get("checkpoint_format") or stored.get("version") or layouts[0]
        layout = str(named).lower()
        if layout not in layouts and not odd:
            odd = f" in the layout {layout}"
    if odd or method not in LIBRARIES:
        advice = "Give a dequantised copy, or the float checkpoint with --quantize."
        if not odd:
            advice = f"{suggestion(method, LIBRARIES)} {advice}"
        raise InputError(
            f"{path} is quantised by {method}{odd}, which lipaudit cannot dequantise", advice
        )
    library = LIBRARIES[method]
    if library and find_spec(library) is None:
        raise InputError(
            f"{path} is quantised by {method}, and its library is not installed",
            f"Run pip install {library.replace('_', '-')}.",
        )
    if kinds and kinds <= FLOATS:
        del config.quantization_config
        text = "but all weights are stored as floats: none is quantised"
        note = Note.warn("not-quantised", f"config.json names {method}, {text}")
        return "", (note,), None
    if method in LAYOUTS:
        del config.quantization_config
        if method == "awq":
            layout = method
        text, state = read_codes(path, layout, later=later)
        return text, (), state
    if method in ("torchao", "bitsandbytes"):
        return "", (), None  # by `dequantise`
    stored["dequantize"] = True
    return f"weights stored as {method} were dequantised by transformers on loading", (), None


def _find_odd_scheme(stored: Mapping[str, Any]) -> str:
    """Return what of a quantisation cannot be undone by any method; empty if nothing."""
    if stored.get("transform_config"):  # weights are rotated, and expect rotated activations
        return " with rotated activations"
    groups = stored.get("config_groups") or {}
    schemes = [groups]
    if isinstance(groups, dict):
        schemes = [*groups.values()]
    if not all(isinstance(each, dict) for each in schemes):  # {"FP8": [layers]}
        return " with schemes that config.json only names"
    # Transformers reads all layers by one of them.
    if any(each.get("weights") != schemes[0].get("weights") for each in schemes):
        return " with schemes that differ between layers"
    return ""


@dataclass(frozen=True)
class Codes:
    """A quantised weight, which transformers reads as it reads a slice of a safetensors file.

    Attributes:
        compute: returns the values.
        shape: their shape.
        later: whether the model gets a weight whose values are computed when a layer reads it.
    """

    compute: Callable[[], Tensor]
    shape: torch.Size
    later: bool

    def turn(self) -> Codes:
        """Return the weight transposed."""

        def compute() -> Tensor:
            return self.compute().T.contiguous()

        return replace(self, compute=compute, shape=self.shape[::-1])

    def __getitem__(self, key: Any) -> Tensor:
        if not self.later:
            return self.compute()
        weight = defer(self.compute, self.shape)
        weight.__dict__["to"] = lambda *_, **__: weight  # converted, it would need memory
        return weight


def read_codes(path: Path, layout: str, *, later: bool) -> tuple[str, dict[str, Any]]:
    """Read a checkpoint of GPTQ or AWQ, to be dequantised a layer at a time; describe it.

    Args:
        path: the directory.
        layout: a layout of GPTQ, or awq.
        later: whether their values are computed when a layer reads them (see `precision.defer`),
            except those of experts, which transformers merges on loading.

    Returns:
        The description, and all weights by name: tensors, and `Codes` in place of quantised ones.

    Raises:
        InputError: a file is damaged, or the tensors of a layer do not fit.
    """
    state: dict[str, Any] = {}
    for file in list_weight_files(each.name for each in path.iterdir()):
        if not file.endswith(".json"):
            state |= read_weights(path / file)[0]
    kinds = Counter[str]()
    count = 0
    for layer in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        parts: dict[str, Tensor] = {}
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            name = f"{layer}.{part}"
            if name in state:
                parts[part] = state.pop(name)
        with explain_failure(
            f"{layer} of {path} cannot be dequantised as {layout}",
            "Copy or download it again, or give a dequantised copy.",
        ):
            groups = range(len(parts["scales"]))
            if "g_idx" in parts and not set(parts["g_idx"].tolist()).issubset(groups):
                raise ValueError("g_idx names a group without a scale")
            # Without values: shapes that do not fit are found before the model is built.
            blank = {part: value.to("meta") for part, value in parts.items()}
            shape = dequantise_codes(layout, **blank).shape
        bits = 32 * parts["qweight"].numel() // shape.numel()
        kinds[f"{layout} int{bits}"] += 1
        compute = partial(dequantise_codes, layout, **parts)
        waits = later and ".experts." not in layer
        state[f"{layer}.weight"] = Codes(compute, shape, waits)
        count += shape.numel()
    share = count / sum(v.shape.numel() for v in state.values())
    return _describe(kinds, share), state


def turn_codes(module: Any, state: dict[str, Any]) -> None:
    """Transpose quantised weights of the layers `Conv1D` of a model, which has or lacks a head."""
    base = f"{module.base_model_prefix}."
    layers = {name.removeprefix(base) for name, _, turned in _list_weights(module) if turned}
    for name, codes in state.items():
        if isinstance(codes, Codes) and name.removeprefix(base) in layers:
            state[name] = codes.turn()


def dequantise_codes(
    layout: str, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None
) -> Tensor:
    """Return (code - zero) scale of a layer of GPTQ or AWQ, in the precision of the scales.

    These are the values of gptqmodel and autoawq, bit for bit.

    Args:
        layout: a layout of GPTQ, or awq.
        qweight: packed codes, (inputs bits / 32, outputs); of AWQ, (inputs, outputs bits / 32).
        qzeros: packed zeros, (groups, outputs bits / 32).
        scales: (groups, outputs).
        g_idx: group of each input; None: in order.

    Returns:
        The weight, (outputs, inputs).

    Raises:
        ValueError: another number of bits, or shapes do not fit.
    """
    bits = 32 * qzeros.shape[1] // scales.shape[1]
    if layout == "awq":
        known = {4}
    else:
        known = {2, 3, 4, 8}
    if bits not in known:
        raise ValueError(f"{bits} bits")
    if layout == "awq":
        codes = _unpack_by_places(qweight)
        zeros = _unpack_by_places(qzeros)
    else:
        codes = _unpack(qweight.T, bits).T
        largest = 2**bits - 1
        if layout != "gptq":
            zeros = _unpack(qzeros, bits)
        # Version 1 stores zero - 1: 1 is added in whole words, unless values cross their ends.
        elif 32 % bits == 0:
            ones = (2**32 - 1) // largest
            zeros = _unpack(qzeros + ones, bits)
        else:
            zeros = _unpack(qzeros, bits) + 1
        zeros &= largest
    if g_idx is None:
        g_idx = torch.arange(len(scales), device=codes.device)
        g_idx = g_idx.repeat_interleave(len(codes) // len(scales))
    # Checked, as other shapes may broadcast to a weight.
    if codes.shape != (*g_idx.shape, scales.shape[1]) or zeros.shape != scales.shape:
        sizes = (tuple(each.shape) for each in (codes, g_idx, zeros, scales))
        raise ValueError("codes {} with groups {}, zeros {} and scales {} differ".format(*sizes))
    kind = scales.dtype
    group = g_idx.long()
    # (code - zero) scale, (inputs, outputs)
    values = (codes.to(kind) - zeros.to(kind)[group]) * scales[group]
    return values.T.contiguous()


def _unpack_by_places(words: Tensor) -> Tensor:
    """Return the 4-bit integers in words of AWQ, in order."""
    eights = _unpack(words, 4).view(len(words), -1, 8)
    return eights[:, :, PLACES].flatten(1)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers that follow each other, `bits` wide, in rows of int32."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed in {words.dtype}")
    width = math.gcd(bits, 8)  # of pieces that lie in one byte
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=words.device)
    count = bits // width  # of pieces in one value
    octets = words.contiguous().view(torch.uint8)
    pieces = (octets[:, :, None] >> shifts) & (2**width - 1)
    pieces = pieces.reshape(len(words), -1, count) << shifts[:count]
    return pieces.sum(2, dtype=torch.uint8)


def dequantise(module: nn.Module, *, later: bool) -> str:
    """Replace quantised weights of torchao and bitsandbytes by their float values; describe them.

    The values are those of the library's own function, bit for bit.

    Args:
        module: the model; its tables of parameters and modules are changed, no tensor is.
        later: whether values are computed when a layer reads them (see `precision.defer`).

    Raises:
        InputError: the library cannot dequantise a weight.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    kinds = Counter[str]()
    weights: dict[int, nn.Parameter] = {}
    part: Any
    for path, part in parts.items():
        for name, p in [*part._parameters.items()]:
            library = type(p).__module__.partition(".")[0]
            if library not in ("torchao", "bitsandbytes"):
                continue
            if id(p) not in weights:  # tied weights stay tied
                with explain_failure(
                    f"{path}.{name} cannot be dequantised by {library}",
                    "Try where its kernels run, or give a dequantised copy.",
                ):
                    compute, kind = _find_values(part, p)
                    values = compute()
                kinds[f"{library} {kind}"] += 1
                if later:
                    weights[id(p)] = defer(compute, values.shape)
                else:
                    weights[id(p)] = nn.Parameter(values, False)
            weight = weights[id(p)]
            if library == "torchao":
                part._parameters[name] = weight
                continue
            # A linear layer of bitsandbytes has a forward pass of its own.
            linear: Any = nn.Linear(part.in_features, part.out_features, device="meta")
            linear.weight = weight
            linear.bias = part.bias
            owner, _, key = path.rpartition(".")
            around = parts[owner]
            around._modules = {**around._modules, key: linear}
    if not kinds:
        return ""
    count = sum(weight.numel() for weight in weights.values())
    share = count / sum(p.numel() for p in module.parameters())
    return _describe(kinds, share)


def _describe(kinds: Mapping[str, int], share: float) -> str:
    stored = ", ".join(f"{n} as {kind}" for kind, n in kinds.items())
    return f"weights stored quantised ({stored}; {share:.0%} of the parameters) were dequantised"


def _find_values(part: Any, p: Any) -> tuple[Callable[[], Tensor], str]:
    """Return a function that dequantises a weight, and the name of its format."""
    kind = type(p).__name__
    if kind in ("Params4bit", "Int8Params"):
        # Not imported: who has its weights has loaded the library, which is no dependency.
        functional = sys.modules["bitsandbytes.functional"]
        if type(part).__name__ not in ("Linear4bit", "Linear8bitLt"):
            raise ValueError(f"{kind} in {type(part).__name__}, which is not linear")
        if kind == "Params4bit":
            state = p.quant_state
            return partial(functional.dequantize_4bit, p.data, state), state.quant_type
        scales = p.SCB
        if scales is None:
            scales = part.state.SCB
        return partial(functional.int8_vectorwise_dequant, p.data, scales), "int8"
    if getattr(p, "act_pre_scale", None) is not None:
        raise ValueError("its layer also scales activations (SmoothQuant, AWQ)")
    return p.dequantize, kind
