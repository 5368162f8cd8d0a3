"""Quantised weights, as libraries store them: dequantised on loading, or when a layer reads them.

Weights of torchao and bitsandbytes are dequantised here, in a model from any source. Files of GPTQ
and AWQ are dequantised here, too, without the library that wrote them. Transformers dequantises
weights of other methods while it loads a directory.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipaudit.errors import InputError, explain_failure, suggestion
from lipaudit.models.precision import defer
from lipaudit.models.sources.rounding import list_linear_weights
from lipaudit.models.sources.weight_files import list_weight_files, read_weights
from lipaudit.tables import Note, Notes

# The library that each method of a transformers checkpoint needs to be dequantised, if any.
LIBRARIES = {
    "torchao": "torchao", "bitsandbytes": "bitsandbytes", "gptq": "", "awq": "",
    "compressed-tensors": "compressed_tensors", "fp8": "", "mxfp8": "", "mxfp4": "",
}  # fmt: skip
# The layouts of files that `read_codes` reads; the first one is the default.
LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
# Places of eight values in the 32 bits of AWQ, which interleaves them.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# Number formats of safetensors that no quantiser stores its codes in.
FLOATS = {"F64", "F32", "F16", "BF16"}


class Dequantising(NamedTuple):
    """How a checkpoint of transformers is dequantised on loading.

    Attributes:
        text: a description; empty if no weight is quantised, or `dequantise` will describe them.
        state: all weights by name, if transformers cannot read the files; else None.
        notes: notes for the report.
    """

    text: str = ""
    state: dict[str, Any] | None = None
    notes: Notes = ()


def plan_dequantising(config: Any, path: Path, formats: Set[str], *, later: bool) -> Dequantising:
    """Decide how a checkpoint of transformers is dequantised, and prepare this.

    - A float checkpoint is not dequantised: the result is empty.
    - GPTQ and AWQ are dequantised by `read_codes`: the result has their weights.
    - torchao and bitsandbytes are dequantised after loading, by `dequantise`: the result is empty.
    - All other methods are dequantised by transformers itself: the result only describes this.

    Args:
        config: the configuration of the model; its `quantization_config` is removed, or changed so
            that transformers dequantises.
        path: the model's directory.
        formats: number formats of the weights, as safetensors spells them; empty if unknown.
        later: whether GPTQ and AWQ weights are dequantised each time a layer reads them.

    Raises:
        InputError: the method cannot be dequantised, or its library is not installed.
    """
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return Dequantising()
    method = str(settings.get("quant_method") or "bitsandbytes")  # old files name no method
    # GPTQ and AWQ store their files in several layouts.
    layout = ""
    if method in LAYOUTS:
        layout = str(
            settings.get("checkpoint_format") or settings.get("version") or LAYOUTS[method][0]
        ).lower()
    _require_known_method(method, layout, settings, path)
    # If all tensors of the files are floats, there are no codes: config.json is wrong.
    if formats and formats <= FLOATS:
        del config.quantization_config
        text = "but all weights are stored as floats: none is quantised"
        note = Note.warn("not-quantised", f"config.json names {method}, {text}")
        return Dequantising(notes=(note,))
    if method in LAYOUTS:
        del config.quantization_config  # transformers then loads float weights: those of `state`
        if method == "awq":  # it has a single supported layout
            layout = method
        text, state = read_codes(path, layout, later=later)
        return Dequantising(text, state)
    if method in ("torchao", "bitsandbytes"):
        return Dequantising()
    settings["dequantize"] = True  # transformers reads this
    return Dequantising(f"weights stored as {method} were dequantised by transformers on loading")


def _require_known_method(
    method: str, layout: str, settings: Mapping[str, Any], path: Path
) -> None:
    """Refuse a checkpoint that cannot be dequantised, or whose library is not installed.

    Args:
        method: the method of quantisation.
        layout: the layout of its files; empty for methods with a single one.
        settings: the quantisation in config.json.
        path: the directory, for messages.

    Raises:
        InputError: the checkpoint cannot be dequantised here.
    """
    obstacle = _find_obstacle(settings)  # such as " with rotated activations"
    if not obstacle and method in LAYOUTS and layout not in LAYOUTS[method]:
        obstacle = f" in the layout {layout}"
    if obstacle or method not in LIBRARIES:
        advice = "Give a dequantised copy, or the float checkpoint with --quantize."
        if not obstacle:
            advice = f"{suggestion(method, LIBRARIES)} {advice}"
        raise InputError(
            f"{path} is quantised by {method}{obstacle}, which lipaudit cannot dequantise", advice
        )
    library = LIBRARIES[method]
    if library and find_spec(library) is None:
        raise InputError(
            f"{path} is quantised by {method}, and its library is not installed",
            f"Run pip install {library.replace('_', '-')}.",
        )


def _find_obstacle(settings: Mapping[str, Any]) -> str:
    """Return why weights cannot be dequantised, to follow the method's name; empty if they can.

    For example " with rotated activations", in "quantised by METHOD with rotated activations".

    Args:
        settings: the quantisation in config.json.
    """
    if settings.get("transform_config"):  # weights are rotated, and expect rotated activations
        return " with rotated activations"
    groups = settings.get("config_groups") or {}
    schemes = [groups]
    if isinstance(groups, dict):
        schemes = [*groups.values()]
    # A scheme may be a name with its layers, {"FP8": [layers]}, without the number of bits.
    if not all(isinstance(scheme, dict) for scheme in schemes):
        return " with schemes that config.json only names"
    # Transformers would dequantise all layers by one scheme, and so give wrong values for layers
    # of the other schemes.
    if any(scheme.get("weights") != schemes[0].get("weights") for scheme in schemes):
        return " with schemes that differ between layers"
    return ""


@dataclass(frozen=True)
class Codes:
    """A quantised weight, which transformers reads as it reads a slice of a safetensors file.

    Attributes:
        compute: returns the float values.
        shape: the shape of the values.
        later: whether the model gets a weight whose values are computed when a layer reads it.
    """

    compute: Callable[[], Tensor]
    shape: torch.Size
    later: bool

    def transpose(self) -> Codes:
        """Return this quantised weight transposed, still without computing its values."""

        def compute() -> Tensor:
            return self.compute().T.contiguous()

        return replace(self, compute=compute, shape=self.shape[::-1])

    def __getitem__(self, key: Any) -> Tensor:
        """Return the float weight of this quantised one, as transformers reads it: `codes[...]`.

        Transformers takes this object for a slice of a safetensors file, and asks for all of it.
        If `later`, the result is a placeholder without values: these are computed whenever a layer
        reads the weight.
        """
        if not self.later:
            return self.compute()
        weight = defer(self.compute, self.shape)
        # While loading, transformers calls `to` on it, to convert values that are not there yet.
        weight.__dict__["to"] = lambda *_, **__: weight
        return weight


def read_codes(path: Path, layout: str, *, later: bool) -> tuple[str, dict[str, Any]]:
    """Read a checkpoint of GPTQ or AWQ, without dequantising its layers yet.

    Args:
        path: the directory.
        layout: gptq, gptq_v2 or awq.
        later: whether values are computed each time a layer reads its weight, to save memory.
            Experts are dequantised on loading all the same: transformers then merges them.

    Returns:
        A description for the report, and all weights by name: tensors, or `Codes` if a weight is
        quantised.

    Raises:
        InputError: a file is damaged, or the tensors of a layer do not fit.
    """
    state: dict[str, Any] = {}
    for file in list_weight_files(each.name for each in path.iterdir()):
        if not file.endswith(".json"):  # no index of sharded files
            weights, _notes = read_weights(path / file)
            state |= weights
    formats = Counter[str]()  # number of weights of each number format
    count = 0  # entries of quantised weights
    # A quantised layer has a `qweight`. Its names are listed first, because the loop changes
    # `state`.
    for layer in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        # The tensors of the layer become arguments of `dequantise_codes`, and leave the state.
        parts: dict[str, Tensor] = {}
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            name = f"{layer}.{part}"
            if name in state:
                parts[part] = state.pop(name)
        with explain_failure(
            f"{layer} of {path} cannot be dequantised as {layout}",
            "Copy or download it again, or give a dequantised copy.",
        ):
            shape = _find_shape(layout, parts)  # also checks the tensors, before loading
        # `qweight` packs its codes into words of 32 bits.
        bits = 32 * parts["qweight"].numel() // shape.numel()
        formats[f"{layout} int{bits}"] += 1
        compute = partial(dequantise_codes, layout, **parts)
        state[f"{layer}.weight"] = Codes(compute, shape, later and ".experts." not in layer)
        count += shape.numel()
    share = count / sum(v.shape.numel() for v in state.values())
    return _describe_quantised(formats, share), state


def _find_shape(layout: str, parts: Mapping[str, Tensor]) -> torch.Size:
    """Return the shape of the weight that the tensors of a quantised layer give.

    Args:
        layout: gptq, gptq_v2 or awq.
        parts: the other arguments of `dequantise_codes`, by name.

    Raises:
        Exception: the tensors do not fit one another.
    """
    groups = range(len(parts["scales"]))
    if "g_idx" in parts and not set(parts["g_idx"].tolist()).issubset(groups):
        raise ValueError("g_idx names a group without a scale")
    # Dequantise on the meta device, without values.
    blank = {part: value.to("meta") for part, value in parts.items()}
    return dequantise_codes(layout, **blank).shape


def transpose_codes(module: Any, state: dict[str, Any]) -> None:
    """Transpose the quantised weights of `Conv1D` layers, whose weights are (inputs, outputs).

    The file and the model may disagree on the prefix of the base model (`transformer.` in GPT-2).
    So names are compared without this prefix.

    Args:
        module: the model, on the meta device: only its layers matter.
        state: the stored weights by name. A quantised weight is a `Codes`; those of such layers
            are replaced.
    """
    base = f"{module.base_model_prefix}."
    layers = {w.name.removeprefix(base) for w in list_linear_weights(module) if w.is_transposed}
    for name, codes in state.items():
        if isinstance(codes, Codes) and name.removeprefix(base) in layers:
            state[name] = codes.transpose()


def dequantise_codes(
    layout: str, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None
) -> Tensor:
    """Return the float weight of a linear layer that GPTQ or AWQ has quantised.

    Both formats store a weight as an unsigned integer, its code, and pack several codes into one
    int32 word. The inputs of the layer form groups. Each pair of a group and an output has a scale
    and a zero point, also an integer: weight = (code - zero) * scale. The weight has the dtype of
    the scales, and equals the weight in gptqmodel and autoawq bit for bit.

    Args:
        layout: gptq (zero points are stored as zero - 1), gptq_v2 (stored as they are) or awq.
        qweight: packed codes. GPTQ packs along the inputs: (inputs * bits / 32, outputs). AWQ
            packs along the outputs: (inputs, outputs * bits / 32).
        qzeros: packed zero points, (groups, outputs * bits / 32).
        scales: (groups, outputs).
        g_idx: group of each input, (inputs,); None: equal groups of consecutive inputs.

    Returns:
        The weight, (outputs, inputs).

    Raises:
        ValueError: another number of bits, or shapes do not fit.
    """
    # Number of bits of a code. A row of `qzeros` has one zero point of as many bits per output.
    bits = 32 * qzeros.shape[1] // scales.shape[1]
    known_bits = {4} if layout == "awq" else {2, 3, 4, 8}
    if bits not in known_bits:
        raise ValueError(f"{bits} bits")
    if layout == "awq":
        codes = _unpack_by_places(qweight)
        zeros = _unpack_by_places(qzeros)
    else:
        codes = _unpack(qweight.T, bits).T  # `_unpack` unpacks along rows
        zeros = _unpack(qzeros, bits)
    if layout == "gptq":
        zeros = _add_one(qzeros, zeros, bits)
    if g_idx is None:
        g_idx = torch.arange(len(scales), device=codes.device)
        g_idx = g_idx.repeat_interleave(len(codes) // len(scales))
    # codes: (inputs, outputs), zeros: (groups, outputs). Wrong shapes could broadcast silently.
    if codes.shape != (*g_idx.shape, scales.shape[1]) or zeros.shape != scales.shape:
        raise ValueError(
            f"codes {tuple(codes.shape)} with groups {tuple(g_idx.shape)}, zeros "
            f"{tuple(zeros.shape)} and scales {tuple(scales.shape)} differ"
        )
    dtype = scales.dtype
    group = g_idx.long()  # the row of `zeros` and `scales` for each input
    values = (codes.to(dtype) - zeros.to(dtype)[group]) * scales[group]
    return values.T.contiguous()


def _add_one(words: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return the zero points of GPTQ's first version, which stores zero - 1.

    This repeats what GPTQ's kernels do, bit for bit. They add 1 to all values of a packed word at
    once, so that the largest value overflows into the next value. Values of 3 bits may cross the
    ends of words. For them, the kernels add 1 to each value, and the largest wraps around to 0.

    Args:
        words: the packed zero points, (groups, words), int32.
        zeros: the same, unpacked, (groups, outputs).
        bits: number of bits of a value.
    """
    largest = 2**bits - 1
    if 32 % bits:  # 3 bits
        return (zeros + 1) & largest
    # A word with 1 in each value: 0x11111111 = 0xFFFFFFFF / 0xF for 4 bits.
    ones = (2**32 - 1) // largest
    return _unpack(words + ones, bits)


def _unpack_by_places(words: Tensor) -> Tensor:
    """Return the 4-bit integers in words of AWQ, in order: a word stores them interleaved."""
    eights = _unpack(words, bits=4).view(len(words), -1, 8)
    return eights[:, :, PLACES].flatten(1)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers that are packed in rows of int32 words.

    Bytes are cut into pieces, and pieces are joined to values. For 2, 4 or 8 bits, a piece is a
    whole value. A value of 3 bits may cross the end of a byte, so a piece is then one bit.

    Args:
        words: (rows, words), int32.
        bits: number of bits of a value.

    Returns:
        (rows, 32 * words / bits), uint8.
    """
    if words.dtype != torch.int32:
        raise ValueError(f"packed in {words.dtype}")
    width = math.gcd(bits, 8)  # bits of a piece
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=words.device)
    octets = words.contiguous().view(torch.uint8)
    pieces = (octets[:, :, None] >> shifts) & (2**width - 1)  # (rows, bytes, pieces of a byte)
    pieces_per_value = bits // width
    by_value = pieces.reshape(len(words), -1, pieces_per_value)
    # Shift each piece to its bits of the value. The sum of the pieces is then the value.
    in_place = by_value << shifts[:pieces_per_value]
    return in_place.sum(2, dtype=torch.uint8)


def dequantise(module: nn.Module, *, later: bool) -> str:
    """Replace quantised weights of torchao and bitsandbytes by their float values.

    The library's own function computes the values.

    Args:
        module: the model. Its tables of parameters and modules are changed, but no tensor.
        later: whether values are computed each time a layer reads its weight, to save memory.

    Returns:
        A description for the report; empty if no weight is quantised.

    Raises:
        InputError: the library cannot dequantise a weight.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    formats = Counter[str]()  # number of weights of each number format
    weights = {}  # float weights by the id of the quantised weight
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
                    compute, number_format = _find_values(part, p)
                    values = compute()  # also if `later`, for its shape, and to raise errors now
                formats[f"{library} {number_format}"] += 1
                if later:
                    weights[id(p)] = defer(compute, values.shape)
                else:
                    weights[id(p)] = nn.Parameter(values, requires_grad=False)
            weight = weights[id(p)]
            if library == "torchao":
                part._parameters[name] = weight
            else:  # a layer of bitsandbytes multiplies its codes itself, so it is replaced
                parent, _, key = path.rpartition(".")
                _replace_layer(parts[parent], key, part, weight)
    if not formats:
        return ""
    count = sum(weight.numel() for weight in weights.values())
    share = count / sum(p.numel() for p in module.parameters())
    return _describe_quantised(formats, share)


def _replace_layer(parent: Any, key: str, layer: Any, weight: nn.Parameter) -> None:
    """Replace a linear layer of a module by an nn.Linear with another weight and the same bias.

    Args:
        parent: the module.
        key: the name of the layer in it.
        layer: the layer.
        weight: the weight of the new layer.
    """
    linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
    linear.weight = weight
    linear.bias = layer.bias
    # A new table of submodules, so that `loader.restore` can put the old one back.
    parent._modules = {**parent._modules, key: linear}


def _describe_quantised(formats: Mapping[str, int], share: float) -> str:
    """Describe dequantised weights for the report.

    Args:
        formats: number of weights of each format.
        share: their fraction of all parameters of the model.
    """
    counts = ", ".join(f"{count} as {name}" for name, count in formats.items())
    return f"weights stored quantised ({counts}; {share:.0%} of the parameters) were dequantised"


def _find_values(part: Any, p: Any) -> tuple[Callable[[], Tensor], str]:
    """Return a function that dequantises a weight, and the name of its format.

    Args:
        part: the layer.
        p: its weight, of torchao or bitsandbytes.

    Raises:
        ValueError: the layer is not linear, or also scales its inputs.
    """
    kind = type(p).__name__
    if kind in ("Params4bit", "Int8Params"):
        # lipaudit does not depend on bitsandbytes, so it is not imported here. A model with such
        # weights has imported it already.
        functional = sys.modules["bitsandbytes.functional"]
        if type(part).__name__ not in ("Linear4bit", "Linear8bitLt"):
            raise ValueError(f"{kind} in {type(part).__name__}, which is not linear")
        if kind == "Params4bit":
            state = p.quant_state
            return partial(functional.dequantize_4bit, p.data, state), state.quant_type
        scales = p.SCB  # one per row
        if scales is None:  # the first forward pass moves the scales to the state of the layer
            scales = part.state.SCB
        return partial(functional.int8_vectorwise_dequant, p.data, scales), "int8"
    if getattr(p, "act_pre_scale", None) is not None:
        raise ValueError("its layer also scales activations (SmoothQuant, AWQ)")
    return p.dequantize, kind
