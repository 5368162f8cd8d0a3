"""From a `ModelSpec` to a `Net`: check, freeze, move, hash, and run one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
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
from lipaudit.models.lifting import devices, hold, lifting, precision
from lipaudit.models.net import ModelInfo, Net, Reading
from lipaudit.models.precision import eager
from lipaudit.models.sources.offload import Placement, find_device, plan_placement
from lipaudit.models.sources.spec import LoadOptions, ModelSpec
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
MASKED = 100.0
"""Distance of a masked class below the lowest other logit; its probability is at most e^-100."""


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
        names = ", ".join(DTYPES)
        raise UsageError(f"dtype {options.dtype!r} is not supported", f"Use one of {names}.")
    placement = _plan_placement(module, options)
    notes: tuple[Note, ...] = ()
    if options.weights != "stored":  # half-precision arithmetic is too coarse for norms
        notes = note_half_precision(p.dtype for p in module.parameters())
        if notes and placement is None:  # else weights are converted on their way to the device
            module = module.float()
    require_finite_weights(module, name)
    # Before conversion to the dtype of the run: the hash identifies the checkpoint.
    digest = hash_weights(module)
    module.eval().requires_grad_(False)
    spec = replace(spec, module=module)
    call, preprocess = _add_preprocessing(spec, options)
    call, more = _place_weights(module, call, options, placement)
    notes += more

    def read(result: Any) -> Tensor:
        output = (spec.read or find_main_output)(result)
        return output[:, None] if output.ndim == 1 else output  # a number per sample is a row

    result, output, entry = _probe(spec, call, read)
    classify, more = _classify(spec, output)
    notes += more + (_note_others(result, output) if spec.read is None else ())
    info = ModelInfo(
        spec=name,
        source=source,
        architecture=spec.architecture or type(module).__name__,
        parameters=sum(p.numel() for p in module.parameters()),
        weights_sha256=digest,
        preprocess=preprocess,
        labels=spec.labels,
        notes=spec.notes + notes + (() if spec.commit is None else (spec.commit.note,)),
        commit=spec.commit,
        device_map={} if placement is None else placement.places,
    )
    image = spec.kind == "image"
    reading: dict[str, Any] = {each.name: getattr(spec, each.name) for each in fields(Reading)}
    reading["entry"] = spec.entry or entry
    if image and spec.prepare is None:
        shape = spec.input_shape  # not the whole spec, which would keep the module alive
        reading["prepare"] = lambda picture: resize(picture, shape)
    return Net(
        info=info,
        module=module,
        call=call,
        read=lambda result: classify(read(result)),
        sample_shape=spec.input_shape,
        box=spec.box or ((0.0, 1.0) if image else None),
        classes=_count_classes(spec, classify(output)),
        **reading,
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


def _note_others(result: Any, output: Tensor) -> tuple[Note, ...]:
    """Note which of several output tensors is measured."""
    several = isinstance(result, tuple | list) and not hasattr(result, "logits")
    others = [t for t in result[1:] if isinstance(t, Tensor)] if several else []
    if not others:
        return ()
    text = (
        "the model returns several tensors: the first is measured, of shape "
        f"{tuple(output.shape[1:])} per sample, not the others "
        f"({few([str(tuple(t.shape[1:])) for t in others])}). To choose, write a py: factory "
        "that returns ModelSpec(..., read=lambda result: TENSOR)"
    )
    return (warning("first-output", text),)


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


def _plan_placement(module: nn.Module, options: LoadOptions) -> Placement | None:
    """Return the placement of the weights over devices, if the options request one."""
    if options.device_map is None:
        return None
    if options.device != "auto":
        raise UsageError(
            f"--device {options.device} and --device-map both choose the device of the model",
            "Leave --device out.",
        )
    dtype = None if options.weights == "stored" else DTYPES[options.dtype]
    return plan_placement(module, options.device_map, dtype)


def _place_weights(
    module: nn.Module, call: Call, options: LoadOptions, placement: Placement | None
) -> tuple[Call, tuple[Note, ...]]:
    """Put the weights on their devices in their precision, and note what is stored."""
    dtype, stored = DTYPES[options.dtype], options.weights == "stored"
    if placement is None:
        module.to(find_device(options.device))
        if not stored:
            module.to(dtype)
            return call, ()
        return lifting(call), (_note_storage(hold(module, dtype), dtype),)
    placement.place_weights(module, None if stored else dtype)
    kinds = hold(module, dtype, placement.computes_at)
    notes = (placement.note(module), *((_note_storage(kinds, dtype),) if stored else ()))
    return lifting(placement.connect(module, call)), notes


def _note_storage(kinds: tuple[torch.dtype, ...], dtype: torch.dtype) -> Note:
    """Note which function is measured if weights stay in the stored precision."""
    to = str(dtype).removeprefix("torch.")
    text = (
        f"weights stay in {few([str(k).removeprefix('torch.') for k in kinds])}, as stored, "
        f"and are converted to {to} one layer at a time. The results are those of exactly "
        "these weights"
        if kinds
        else f"no weights are stored in less than {to}, so --weights stored has no effect"
    )
    return remark("stored-weights", text)


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
    mean = _spread_channels("mean", options.mean or spec.mean or (0.0,), channels)
    std = _spread_channels("std", options.std or spec.std or (1.0,), channels)
    if not all(s > 0 for s in std):
        raise UsageError(
            f"std {std} must be positive", "Give a positive std: pixels are divided by it."
        )
    facts |= {"mean": list(mean), "std": list(std), "size": list(spec.input_shape)}

    @cache
    def constants(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        with torch.inference_mode(False):  # the tensors may become part of a graph later
            return [torch.tensor(v, device=device, dtype=dtype) for v in (mean, std)]

    def normalise(x: Tensor, mask: Tensor | None) -> Any:
        shift, scale = (t[:, None, None] for t in constants(x.device, x.dtype))
        return call((x - shift) / scale, mask)

    return normalise, facts


def _spread_channels(name: str, values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise UsageError(
            f"{name} has {len(values)} values, but the model takes {channels} channels",
            f"Give --{name} one value, or {channels} separated by commas.",
        )
    return tuple(values) if len(values) == channels else tuple(values) * channels


def _probe(
    spec: ModelSpec, call: Call, read: Callable[[Any], Tensor]
) -> tuple[Any, Tensor, nn.Module | None]:
    """Run one blank sample; return the result, its output tensor and the embedding module."""
    module = spec.module
    x = _make_blank(spec, torch.empty(0, device=next(devices(module)), dtype=precision(module)))
    try:
        with eager(), torch.no_grad(), _watch_entries(module, spec.kind, x) as entries:
            result = call(x, None)
            output = read(result)
    except Exception as error:  # the model's own code may raise anything
        if isinstance(error, LipauditError) or of_machine(error):
            raise
        check = "--input-size and --model-kwargs" if spec.kind == "image" else "--model-kwargs"
        raise InputError(
            f"{type(module).__name__} cannot be run on one sample of {spec.kind} of shape "
            f"{spec.input_shape} ({type(error).__name__}: {first_line(error)})",
            f"Check {check}. If the model needs other arguments, write a py: factory that "
            "returns a ModelSpec with its own `call`.",
        ) from error
    dtype = str(output.dtype).removeprefix("torch.")
    if not output.is_floating_point():
        raise InputError(
            f"the model returns {dtype}, which has no gradient",
            "Let the model return its scores (logits), not a decision.",
        )
    if output.dtype in (torch.bfloat16, torch.float16) and x.dtype == torch.float32:
        raise InputError(
            f"the model returns {dtype} in a run in float32",
            "Switch autocast off in the model's code, or use --dtype float64, which overrides it.",
        )
    if not bool((torch.isfinite(output) | _find_masked(output)).all()):
        raise InputError(
            "the model's output on a blank sample is not finite", "Check the weights."
        )
    return result, output, entries[0] if entries else None


def _find_masked(output: Tensor) -> Tensor:
    """Return which classes are masked: logits of minus infinity beside finite ones."""
    some = output.isfinite().any(-1, keepdim=True)
    return output.isneginf() & some & (output.ndim == 2)


def _classify(
    spec: ModelSpec, output: Tensor
) -> tuple[Callable[[Tensor], Tensor], tuple[Note, ...]]:
    """Return a function that turns an output into finite logits of at least two classes.

    One logit z of two labels becomes (0, z). A masked class gets a finite logit far below the
    others, so that its probability is 0. A note says so.
    """
    if spec.classifier and spec.labels and len(spec.labels) == 2 and output.numel() == 1:
        text = f"one logit is read as two classes: {spec.labels[1]!r} if it is positive"
        return _add_zero_logit, (remark("one-logit", text),)
    masked = _find_masked(output).flatten()
    if not bool(masked.any()):
        return lambda logits: logits, ()

    def finite(logits: Tensor) -> Tensor:
        hidden = logits.isneginf() & masked.to(logits.device)
        lowest = logits.detach().masked_fill(hidden, torch.inf).amin(1, keepdim=True)
        return torch.where(hidden, lowest - MASKED, logits)

    names = few([str(each) for each in masked.nonzero().flatten().tolist()])
    text = f"masked classes (logit minus infinity): {names}"
    return finite, (remark("masked-classes", text),)


def _add_zero_logit(output: Tensor) -> Tensor:
    logit = output.reshape(-1, 1)
    return torch.cat([torch.zeros_like(logit), logit], 1)


def _make_blank(spec: ModelSpec, like: Tensor) -> Tensor:
    if spec.kind == "text":
        most = min(PROBE_TOKENS, *spec.input_shape)
        ids = spec.tokenize(PROBE_TEXT, most) if spec.tokenize else [1] * most
        ids = ids if spec.end_id is None or spec.tokenize else [*ids[1:], spec.end_id]
        return torch.tensor([ids], device=like.device)
    middle = 0.5 if spec.kind == "image" else 0.0
    # Grey pixels, and zeros for floats: inputs that every model should accept.
    return torch.full((1, *spec.input_shape), middle, device=like.device, dtype=like.dtype)


@contextmanager
def _watch_entries(module: nn.Module, kind: str, x: Tensor) -> Iterator[list[nn.Module]]:
    """Collect the embedding modules that run inside the block, in order."""
    entries: list[nn.Module] = []

    def watch(candidate: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if kind == "image" or (args and isinstance(args[0], Tensor) and args[0].shape == x.shape):
            entries.append(candidate)

    def is_entry(name: str, part: nn.Module) -> bool:
        if kind == "image":
            return "PatchEmbed" in type(part).__name__ or "patch_embed" in name.rpartition(".")[2]
        return kind == "text" and isinstance(part, nn.Embedding)

    parts = [part for name, part in module.named_modules() if is_entry(name, part)]
    hooks = [part.register_forward_hook(watch) for part in parts]
    try:
        yield entries
    finally:
        for hook in hooks:
            hook.remove()


def _count_classes(spec: ModelSpec, output: Tensor) -> int | None:
    """Count the classes of a classifier; a single output is a regression."""
    classes = output.shape[1] if spec.classifier and output.ndim == 2 else None
    if spec.labels is not None and classes is not None and len(spec.labels) != classes:
        raise InputError(
            f"{len(spec.labels)} labels ({few(spec.labels)}) for {classes} outputs",
            "Check num_classes and the labels of the model's configuration.",
        )
    return None if classes == 1 else classes
