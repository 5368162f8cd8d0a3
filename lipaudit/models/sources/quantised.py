"""Quantised weights: rounded on loading by `--quantize`, or stored so by a library.

Weights of torchao and bitsandbytes are dequantised here, in a model from any source; files of GPTQ
and AWQ, too, without the library that wrote them. Transformers dequantises those of other methods
while it loads a directory.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.errors import InputError, UsageError, explain_failure, few, suggestion
from lipaudit.models.precision import defer
from lipaudit.models.sources.weights import HALF, list_weight_files, read_weights
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
    half = 2 ** (bits - 1)
    fixed, listed = _find_fixed(module), [*_list_weights(module)]
    weights = {id(p): (name, p, turned) for name, p, turned in listed if id(p) not in fixed}
    left = [name.removesuffix(".weight") for name, p, _ in listed if id(p) in fixed]
    if not weights:
        raise InputError(
            f"--quantize {how}: {type(module).__name__} has no linear layer to round"
            + f" but its output ({few(left)})" * bool(left),
            "Leave --quantize out: it rounds nn.Linear, except embeddings and the output layer.",
        )
    widths = {name: p.shape[0 if turned else 1] for name, p, turned in weights.values()}
    odd = [name for name, width in widths.items() if group and width % group]
    if odd:
        raise UsageError(
            f"--quantize {how}: groups of {group} do not divide the "
            f"{widths[odd[0]] if odd else 0} inputs of {few(odd, 1)}",
            f"Use a divisor of {math.gcd(*widths.values())}, which divides all layers, or "
            "leave the "
            "group out.",
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
        f"the nearest int{bits} value, with one scale per {per}; "
        + (f"linear layers left as they are: {few(left)}" if left else "no linear layer is left")
    )


def _list_weights(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the weights of linear layers: name, parameter, and whether inputs are its rows."""
    for path, part in module.named_modules():
        turned = type(part).__name__ == "Conv1D"  # of transformers: a linear layer, transposed
        names = ("weight",) if turned or isinstance(part, nn.Linear) else ()
        for name in PACKED if isinstance(part, nn.MultiheadAttention) else names:
            p = part._parameters.get(name)
            if p is not None and p.ndim == 2:
                yield f"{path}.{name}".lstrip("."), p, turned


def _find_fixed(module: Any) -> set[int]:
    """Return the ids of the parameters of embeddings and of the output that the model names."""
    outputs = [getattr(module, get)() for get in HEADS if hasattr(module, get)]
    outputs = [p for each in outputs for p in (each if isinstance(each, tuple) else [each])]
    outputs += [part for part in module.modules() if isinstance(part, nn.Embedding)]
    fixed = {id(p) for part in outputs if part is not None for p in part.parameters()}
    # Of a model without a task, `base_model` is the model itself, and nothing is behind it.
    base = getattr(module, getattr(module, "base_model_prefix", ""), module)
    return fixed | {id(p) for p in module.parameters()} - {id(p) for p in base.parameters()}


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
    layouts = LAYOUTS.get(method, ("",))
    layout = str(stored.get("checkpoint_format") or stored.get("version") or layouts[0]).lower()
    odd = f" in the layout {layout}" * (method in LAYOUTS and layout not in layouts)
    groups = stored.get("config_groups") or {}
    schemes = [*groups.values()] if isinstance(groups, dict) else [groups]
    if not all(isinstance(each, dict) for each in schemes):  # {"FP8": [layers]}
        odd = " with schemes that config.json only names"
    # Transformers reads all layers by one of them.
    elif any(each.get("weights") != schemes[0].get("weights") for each in schemes):
        odd = " with schemes that differ between layers"
    if stored.get("transform_config"):  # weights are rotated, and expect rotated activations
        odd = " with rotated activations"
    if odd or method not in LIBRARIES:
        raise InputError(
            f"{path} is quantised by {method}{odd}, which lipaudit cannot dequantise",
            ("" if odd else suggestion(method, LIBRARIES) + " ")
            + "Give a dequantised copy, or the float checkpoint with --quantize.",
        )
    library = LIBRARIES[method]
    text = f"{path} is quantised by {method}, and its library is not installed"
    if library and find_spec(library) is None:
        raise InputError(text, f"Run pip install {library.replace('_', '-')}.")
    if kinds and kinds <= FLOATS:
        del config.quantization_config
        text = "but all weights are stored as floats: none is quantised"
        return "", (Note.warn("not-quantised", f"config.json names {method}, {text}"),), None
    if method in LAYOUTS:
        del config.quantization_config
        text, state = read_codes(path, layout if method == "gptq" else method, later=later)
        return text, (), state
    if method in ("torchao", "bitsandbytes"):
        return "", (), None  # by `dequantise`
    stored["dequantize"] = True
    return f"weights stored as {method} were dequantised by transformers on loading", (), None


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
        return replace(self, compute=lambda: self.compute().T.contiguous(), shape=self.shape[::-1])

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
    kinds, count = Counter[str](), 0
    for layer in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        names = {part: f"{layer}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        parts = {part: state.pop(name) for part, name in names.items() if name in state}
        with explain_failure(
            f"{layer} of {path} cannot be dequantised as {layout}",
            "Copy or download it again, or give a dequantised copy.",
        ):
            groups = {*range(len(parts["scales"]))}
            if "g_idx" in parts and not groups.issuperset(parts["g_idx"].tolist()):
                raise ValueError("g_idx names a group without a scale")
            # Without values: shapes that do not fit are found before the model is built.
            blank = {part: value.to("meta") for part, value in parts.items()}
            shape = dequantise_codes(layout, **blank).shape
        kinds[f"{layout} int{32 * parts['qweight'].numel() // shape.numel()}"] += 1
        compute = partial(dequantise_codes, layout, **parts)
        state[f"{layer}.weight"] = Codes(compute, shape, later and ".experts." not in layer)
        count += shape.numel()
    return _describe(kinds, count / sum(v.shape.numel() for v in state.values())), state


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
    if bits not in ((4,) if layout == "awq" else (2, 3, 4, 8)):
        raise ValueError(f"{bits} bits")
    if layout == "awq":
        words = (_unpack(each, bits).view(len(each), -1, 8) for each in (qweight, qzeros))
        codes, zeros = (each[:, :, PLACES].flatten(1) for each in words)
    else:
        # Version 1 stores zero - 1: subtracted from whole words, unless values cross their ends.
        one, whole = layout == "gptq", 32 % bits == 0
        zeros = _unpack(qzeros + (2**32 - 1) // (2**bits - 1) * (one and whole), bits)
        zeros = (zeros + (one and not whole)) & (2**bits - 1)
        codes = _unpack(qweight.T, bits).T
    if g_idx is None:
        g_idx = torch.arange(len(scales), device=codes.device)
        g_idx = g_idx.repeat_interleave(len(codes) // len(scales))
    # Checked, as other shapes may broadcast to a weight.
    if codes.shape != (*g_idx.shape, scales.shape[1]) or zeros.shape != scales.shape:
        sizes = (tuple(each.shape) for each in (codes, g_idx, zeros, scales))
        raise ValueError("codes {} with groups {}, zeros {} and scales {} differ".format(*sizes))
    kind, group = scales.dtype, g_idx.long()
    return ((codes.to(kind) - zeros.to(kind)[group]) * scales[group]).T.contiguous()


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers that follow each other, `bits` wide, in rows of int32."""
    if words.dtype != torch.int32:
        raise ValueError(f"packed in {words.dtype}")
    width = math.gcd(bits, 8)  # of pieces that lie in one byte
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=words.device)
    pieces = words.contiguous().view(torch.uint8)[:, :, None] >> shifts & (2**width - 1)
    pieces = pieces.reshape(len(words), -1, bits // width) << shifts[: bits // width]
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
    kinds, weights = Counter[str](), dict[int, nn.Parameter]()
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
                weight = defer(compute, values.shape) if later else nn.Parameter(values, False)
                weights[id(p)] = weight
            if library == "torchao":
                part._parameters[name] = weights[id(p)]
                continue
            # A linear layer of bitsandbytes has a forward pass of its own.
            linear: Any = nn.Linear(part.in_features, part.out_features, device="meta")
            linear.weight, linear.bias = weights[id(p)], part.bias
            owner, _, key = path.rpartition(".")
            parts[owner]._modules = {**parts[owner]._modules, key: linear}
    if not kinds:
        return ""
    count = sum(weight.numel() for weight in weights.values())
    return _describe(kinds, count / sum(p.numel() for p in module.parameters()))


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
        scales = part.state.SCB if p.SCB is None else p.SCB
        return partial(functional.int8_vectorwise_dequant, p.data, scales), "int8"
    if getattr(p, "act_pre_scale", None) is not None:
        raise ValueError("its layer also scales activations (SmoothQuant, AWQ)")
    return p.dequantize, kind
