"""From a `ModelSpec` to a `Net`: check, freeze, move, hash, and run one sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lipaudit.data.images import resize
from lipaudit.data.samples import remark, warning
from lipaudit.errors import (
    InputError,
    LipauditError,
    UsageError,
    first_line,
    of_machine,
)
from lipaudit.models.net import LoadOptions, ModelSpec, Net
from lipaudit.models.precision import devices, eager, hold, lifting, precision
from lipaudit.models.sources.offload import Placement, find_device, plan_placement
from lipaudit.models.sources.weights import (
    few,
    hash_weights,
    note_half_precision,
    require_finite_weights,
)
from lipaudit.tables import Note

Call = Callable[[Tensor, Tensor | None], Any]

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PROBE_TEXT, PROBE_TOKENS = "a blank sample", 8


def assemble(spec: ModelSpec, options: LoadOptions, *, name: str, source: str) -> Net:
    """Make a model ready to be measured.

    Put the module in eval mode, freeze its parameters, and move it to the requested device and
    dtype. One blank sample runs through it, so a model that cannot run is refused here.

    Raises:
        InputError: weights are not finite, or the model cannot run on a blank sample.
        UsageError: a normalisation that does not fit the images, an unknown dtype or device.
    """
    module = unwrap(spec.module)
    require_values(module, name)
    if options.dtype not in DTYPES:
        known = f"Use one of {', '.join(DTYPES)}."
        raise UsageError(f"dtype {options.dtype!r} is not supported", known)
    stored, dtype = options.weights == "stored", DTYPES[options.dtype]
    placement = None
    if options.device_map is not None:
        if options.device != "auto":
            raise UsageError(
                f"--device {options.device} and --device-map both choose the device of the model",
                "Leave --device out.",
            )
        placement = plan_placement(module, options.device_map, None if stored else dtype)
    # Half-precision arithmetic is too coarse for norms. Placed weights are converted on their way.
    notes = () if stored else note_half_precision(p.dtype for p in module.parameters())
    if notes and placement is None:
        module = module.float()
    require_finite_weights(module, name)
    # Before conversion to the dtype of the run: the hash identifies the checkpoint.
    digest = hash_weights(module)
    module.eval().requires_grad_(False)
    spec = replace(spec, module=module)
    call, preprocess = _add_preprocessing(spec, options)
    call, placed = _place_weights(module, call, options, placement)

    def read(result: Any) -> Tensor:
        output = (spec.read or find_main_output)(result)
        return output[:, None] if output.ndim == 1 else output  # a number per sample is a row

    result, output, entry = _probe(spec, call, read)
    notes += placed
    several = isinstance(result, tuple | list) and not hasattr(result, "logits")
    others = [tuple(t.shape[1:]) for t in result[1:] if isinstance(t, Tensor)] if several else []
    if others and spec.read is None:
        text = (
            "the model returns several tensors: the first is measured, of shape "
            f"{tuple(output.shape[1:])} per sample, not the others ({few(others)}). To choose, "
            "write a py: factory that returns ModelSpec(..., read=lambda result: TENSOR)"
        )
        notes += (warning("first-output", text),)
    classes = output.shape[1] if spec.classifier and output.ndim == 2 else None
    if spec.labels is not None and classes not in (None, len(spec.labels)):
        raise InputError(
            f"{len(spec.labels)} labels ({few(spec.labels)}) for {classes} outputs",
            "Check num_classes and the labels of the model's configuration. Two classes need two "
            "logits: torch.cat([0 * z, z], 1).",
        )
    described = {each.name: getattr(spec, each.name) for each in fields(ModelSpec)}
    if spec.kind == "image":
        described |= {"box": spec.box or (0.0, 1.0)}
        described |= {"prepare": spec.prepare or partial(resize, shape=spec.input_shape)}
    assembled: dict[str, Any] = described | {
        "call": call,
        "read": read,
        "entry": spec.entry or entry,
        "architecture": spec.architecture or type(module).__name__,
        "preprocess": preprocess,
        "notes": spec.notes + notes + (() if spec.commit is None else (spec.commit.note,)),
    }
    return Net(
        **assembled,
        name=name,
        source=source,
        parameters=sum(p.numel() for p in module.parameters()),
        weights_sha256=digest,
        classes=None if classes == 1 else classes,  # a single output is a regression
        device_map={} if placement is None else placement.places,
    )


def unwrap(module: Any) -> Any:
    """Return the module that `torch.compile` wraps: same function, same weights."""
    return getattr(module, "_orig_mod", module)


def find_main_output(result: Any) -> Tensor:
    """Find the output tensor in the result of a model: itself, its logits, or its first item.

    Raises:
        InputError: the result holds no tensor.
    """
    if isinstance(result, Mapping) and "logits" in result:
        result = result["logits"]
    elif hasattr(result, "logits"):
        result = result.logits
    elif isinstance(result, (tuple, list)) and result:
        result = result[0]
    if not isinstance(result, Tensor):
        raise InputError(
            f"the model returned {type(result).__name__}, not a tensor or an output with logits",
            "Write a py: factory that returns ModelSpec(..., read=lambda result: TENSOR).",
        )
    return result


def require_values(module: nn.Module, name: str) -> None:
    """Refuse TorchScript modules and modules with tensors without values.

    Raises:
        InputError: TorchScript, the meta device, or a lazy module that never ran.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{name} is TorchScript, whose modules cannot be read", "Give the original module."
        )
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise InputError(
                f"{path} of {name} has no values",
                "Load the weights first (run a lazy module once).",
            )


def _place_weights(
    module: nn.Module, call: Call, options: LoadOptions, placement: Placement | None
) -> tuple[Call, tuple[Note, ...]]:
    """Put the weights on their devices in their precision, and note what is stored."""
    dtype, stored = DTYPES[options.dtype], options.weights == "stored"
    notes: tuple[Note, ...] = ()
    if placement is not None:
        placement.place_weights(module, None if stored else dtype)
        notes = (placement.note(module),)
        call = placement.connect(module, call)
    else:
        module.to(find_device(options.device))
        if not stored:
            module.to(dtype)
            return call, ()
    kinds = hold(module, dtype, None if placement is None else placement.computes_at)
    if stored:
        text = (
            f"weights stay in {few([str(k).removeprefix('torch.') for k in kinds])}, as stored, "
            f"and are converted to {options.dtype} one layer at a time. The results are those of "
            "exactly these weights"
            if kinds
            else f"no weights are stored in less than {options.dtype}, so --weights stored has no "
            "effect"
        )
        notes += (remark("stored-weights", text),)
    return lifting(call), notes


def _add_preprocessing(spec: ModelSpec, options: LoadOptions) -> tuple[Call, dict[str, Any]]:
    """Return a function that preprocesses samples and runs the model, and facts about it."""
    given = {"--mean": options.mean, "--std": options.std, "--input-size": options.input_size}
    named = [name for name, value in given.items() if value is not None]
    if named and spec.kind != "image":
        raise UsageError(
            f"{few(named)} was given, but the model takes {spec.kind}", "Leave it out."
        )
    module, facts = spec.module, dict(spec.preprocess)
    call = spec.call or (lambda x, mask: module(x) if mask is None else module(x, mask))
    if spec.kind == "tokens":  # a copy, because the module may write to it
        return (lambda x, mask: call(x.clone(), mask)), facts
    if spec.kind != "image":
        return call, facts
    channels = spec.input_shape[0]
    mean, std = options.mean or spec.mean or (0.0,), options.std or spec.std or (1.0,)
    for key, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels) or (key == "std" and min(values) <= 0):
            raise UsageError(
                f"{key} {values} does not fit {channels} channels, or is not positive",
                f"Give --{key} one value, or {channels} separated by commas. Pixels are divided "
                "by std, which must be positive.",
            )
    mean, std = (tuple(v) * (channels if len(v) == 1 else 1) for v in (mean, std))
    facts |= {"mean": list(mean), "std": list(std), "size": list(spec.input_shape)}

    @cache
    def constants(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        with torch.inference_mode(False):  # the tensors may become part of a graph later
            return [torch.tensor(v, device=device, dtype=dtype) for v in (mean, std)]

    def normalise(x: Tensor, mask: Tensor | None) -> Any:
        shift, scale = (t[:, None, None] for t in constants(x.device, x.dtype))
        return call((x - shift) / scale, mask)

    return normalise, facts


def _probe(
    spec: ModelSpec, call: Call, read: Callable[[Any], Tensor]
) -> tuple[Any, Tensor, nn.Module | None]:
    """Run one blank sample; return the result, its output tensor and the embedding module."""
    module, device, image = spec.module, next(devices(spec.module)), spec.kind == "image"
    if spec.kind == "text":
        most = min(PROBE_TOKENS, *spec.input_shape)
        ids = spec.tokenize(PROBE_TEXT, most) if spec.tokenize else [1] * most
        ids = ids if spec.end_id is None or spec.tokenize else [*ids[1:], spec.end_id]
        x = torch.tensor([ids], device=device)
    else:
        # Grey pixels, and zeros for floats: inputs that every model should accept.
        grey = 0.5 if image else 0.0
        x = torch.full((1, *spec.input_shape), grey, device=device, dtype=precision(module))
    entries: list[nn.Module] = []

    def watch(part: nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        if image or (args and isinstance(args[0], Tensor) and args[0].shape == x.shape):
            entries.append(part)

    try:
        with ExitStack() as hooks:
            for path, part in module.named_modules():
                name, kind = path.rpartition(".")[2], type(part).__name__
                patches = image and ("PatchEmbed" in kind or "patch_embed" in name)
                if patches or (spec.kind == "text" and isinstance(part, nn.Embedding)):
                    hooks.callback(part.register_forward_hook(watch).remove)
            with eager(), torch.no_grad():
                result = call(x, None)
                output = read(result)
    except Exception as error:  # the model's own code may raise anything
        if isinstance(error, LipauditError) or of_machine(error):
            raise
        check = "--input-size and --model-kwargs" if image else "--model-kwargs"
        raise InputError(
            f"{type(module).__name__} cannot be run on one sample of {spec.kind} of shape "
            f"{spec.input_shape} ({type(error).__name__}: {first_line(error)})",
            f"Check {check}. If the model needs other arguments, write a py: factory that "
            "returns a ModelSpec with its own `call`.",
        ) from error
    halved = output.dtype in (torch.bfloat16, torch.float16) and x.dtype == torch.float32
    if halved or not output.is_floating_point():
        raise InputError(
            f"the model returns {str(output.dtype).removeprefix('torch.')} in a run in float32",
            "Let the model return its scores (logits), not a decision, which has no gradient. "
            "Switch autocast off in its code, or use --dtype float64, which overrides it.",
        )
    if not bool(output.isfinite().all()):
        raise InputError(
            "the model's output on a blank sample is not finite",
            "Check the weights. A masked class needs a finite logit.",
        )
    return result, output, entries[0] if entries else None
