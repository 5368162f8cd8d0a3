"""Placement of weights: on one device, or on several, CPU and disk, by Accelerate or by a file.

Accelerate plans the placement and moves samples from device to device. Weights on the disk, or on
the CPU beside a GPU, stay there (see `models.precision`) and are converted whenever they are read,
also outside the forward pass of their own module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit import errors
from lipaudit.errors import EvaluationError, InputError, UsageError, explain_failure, few
from lipaudit.models.net import LoadOptions
from lipaudit.models.precision import DEFERRED, hold, lifting, name_dtypes
from lipaudit.models.sources.weights import describe_misfit, note_half_precision, read_json
from lipaudit.tables import Note

# Plans of Accelerate; today both give the same result.
PLANNED = ("auto", "balanced")
DISK, CPU = "disk", "cpu"
LISTS = (nn.ModuleList, nn.Sequential)


def place_weights(
    module: nn.Module, call: Callable[..., Any], options: LoadOptions
) -> tuple[Callable[..., Any], Mapping[str, str], tuple[Note, ...]]:
    """Put the weights of a model on its devices, in the precision of the run.

    Args:
        module: the model.
        call: runs the model.
        options: the device or the device map, the dtype, and whether weights stay as stored.

    Returns:
        a call of the placed model, the places of `--device-map`, and notes on the weights.

    Raises:
        InputError: Accelerate is not installed, or the map does not fit the model.
        UsageError: this machine has no such device, or two options choose it.
        EvaluationError: the disk is full.
    """
    run = {"float32": torch.float32, "float64": torch.float64}[options.dtype]
    # Half-precision arithmetic is too coarse for norms: stored weights are converted when read.
    dtype = None if options.weights == "stored" else run
    notes = () if dtype is None else note_half_precision(p.dtype for p in module.parameters())
    if options.device_map is None:
        placement = None
        # Models of transformers override these methods, and refuse where they were quantised.
        nn.Module.to(module, find_device(options.device))
        if dtype is not None:
            # Not `to`, which drops the imaginary parts of complex constants.
            convert = nn.Module.double if dtype == torch.float64 else nn.Module.float
            convert(module)
            return call, {}, notes
    else:
        text = f"--device {options.device} and --device-map both choose the device of the model"
        if options.device != "auto":
            raise UsageError(text, "Leave --device out.")
        placement = plan_placement(module, options.device_map, dtype)
        placement.move(module, dtype)
        notes += (placement.note(module),)
        call = placement.connect(module, call)
    kinds = hold(module, run, None if placement is None else placement.computes_at)
    if dtype is None:
        stored = name_dtypes(kinds - {DEFERRED}) + ["quantised form"] * (DEFERRED in kinds)
        text = (
            f"weights stay in {few(stored)}, as stored, and are converted to {options.dtype} one "
            "layer at a time. The results are those of exactly these weights"
            if kinds
            else f"no weights are stored in less than {options.dtype}, so --weights stored has no "
            "effect"
        )
        notes += (Note.info("stored-weights", text),)
    return lifting(call), {} if placement is None else placement.places, notes


@dataclass(frozen=True)
class Placement:
    """The place of each weight, and the device on which each part of a model computes.

    Attributes:
        places: device or disk, by the name of a module or tensor; "" is the whole model.
        devices: the device behind each name of a device.
        main: the device of samples, and of modules whose weights are on the CPU or the disk.
    """

    places: Mapping[str, str]
    devices: Mapping[str, torch.device]
    main: torch.device

    def place(self, name: str) -> str:
        """Return the place of a module or tensor."""
        return str(_look_up(self.places, name) or self.main)

    def computes_at(self, path: str) -> torch.device:
        """Return the device on which a module computes: the CPU only if there is no other."""
        place = self.devices.get(self.place(path), self.main)
        return self.main if place.type == CPU else place

    def move(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Put every parameter in its place.

        Args:
            module: the model.
            dtype: dtype of parameters on computing devices; None: as stored.

        Raises:
            EvaluationError: the disk is full.
        """
        # All names of each parameter: tied weights have several.
        names: dict[int, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        with TemporaryDirectory(prefix="lipaudit-", ignore_cleanup_errors=True) as folder:
            for number, known in enumerate(names.values()):
                # Nothing else keeps the old values: the next weights need their memory.
                values, place = module.get_parameter(known[0]).data, self.place(known[0])
                if place != DISK:
                    device = self.devices[place]
                    computing = self.main if device.type == CPU else device
                    converted = values.is_floating_point() and device == computing
                    values = values.to(device, dtype if converted else None)
                # Mapped safetensors need no other file: torch does not own their memory.
                elif values.device.type != CPU or values.untyped_storage().resizable():
                    values = _map_weight(values, Path(folder, str(number)))
                placed = nn.Parameter(values, requires_grad=False)
                for name in known:
                    part, _, key = name.rpartition(".")
                    module.get_submodule(part)._parameters[key] = placed

    def connect(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """Move samples to the device of each part of a model, and the outputs back.

        The output of a part returns to the device of the enclosing module; the output of an
        element of a list goes to the next element.
        """
        if all(device in (self.main, torch.device(CPU)) for device in self.devices.values()):
            return call
        from accelerate.utils import send_to_device

        def send_inputs(device: torch.device, _module: Any, args: Any, kwargs: Any) -> Any:
            return send_to_device((args, kwargs), device)

        def send_output(device: torch.device, _module: Any, _args: Any, output: Any) -> Any:
            return send_to_device(output, device)

        for path, part in module.named_modules():
            around, place = path.rpartition(".")[0], self.computes_at(path)
            part.register_forward_pre_hook(partial(send_inputs, place), with_kwargs=True)
            listed = isinstance(module.get_submodule(around), LISTS)
            if not listed and self.computes_at(around) != place:
                part.register_forward_hook(partial(send_output, self.computes_at(around)))
        return lambda *args: send_to_device(call(*args), self.main)

    def note(self, module: nn.Module) -> Note:
        """Note the placement."""
        sizes = Counter[str]()
        for name, p in module.named_parameters():
            sizes[self.place(name)] += p.numel()
        lie = ", ".join(f"{size:,} on {place}" for place, size in sizes.items())
        return Note.info("device-map", f"weights are distributed (--device-map): {lie}")


def find_device(name: str, advice: str = "Use --device auto or cpu.") -> torch.device:
    """Resolve a device; "auto" is the CUDA device if there is one, else the CPU.

    Args:
        name: the device.
        advice: the hint if it cannot be used.

    Raises:
        UsageError: this machine has no such device, or it has no float64.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(name)
        torch.empty(1, device=wanted).item()  # the meta device holds no values
        torch.empty(1, device=wanted, dtype=torch.float64)  # mps has none
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        if errors.out_of_memory(error):
            raise
        raise UsageError(
            f"device {name!r} is not available on this machine, or has no float64",
            f"{advice} Bounds and statistics need float64.",
        ) from error
    return wanted


def plan_placement(module: nn.Module, wanted: str, dtype: torch.dtype | None) -> Placement:
    """Return the placement of the weights of a model.

    Args:
        module: the loaded model.
        wanted: auto, balanced, or a JSON file of module names and devices.
        dtype: dtype of converted weights; None: no conversion.

    Raises:
        InputError: Accelerate is not installed, or the file does not fit the model.
        UsageError: this machine has no such device.
    """
    advice = "pip install 'lipaudit[accelerate]'"
    with explain_failure("--device-map needs the library `accelerate`", advice, ImportError):
        import accelerate  # noqa: F401
    if wanted in PLANNED:
        from accelerate.utils import get_balanced_memory, infer_auto_device_map

        # Accelerate distributes the model over the free memory, whole blocks at a time.
        blocks = {
            type(child).__name__
            for parent in module.modules()
            for child in (parent.children() if isinstance(parent, LISTS) else ())
            if not isinstance(child, LISTS) and next(child.children(), None) is not None
        }
        floating = [name for name, p in module.named_parameters() if p.is_floating_point()]
        whole = getattr(module, "_no_split_modules", None) or blocks
        how: dict[str, Any] = {"no_split_module_classes": sorted(whole)}
        how["special_dtypes"] = None if dtype is None else dict.fromkeys(floating, dtype)
        memory = get_balanced_memory(module, **how)
        given = dict(infer_auto_device_map(module, max_memory=memory, **how))
    else:
        given = _read_device_map(module, wanted)
    # Accelerate numbers accelerators, and a file may do so, too.
    there = torch.accelerator.device_count()  # a build for CUDA names it on every machine
    accelerator = torch.accelerator.current_accelerator() if there else None
    kind = accelerator.type if accelerator else "cuda"
    places = {k: f"{kind}:{v}" if isinstance(v, int) else str(v) for k, v in given.items()}
    words = [word for word in dict.fromkeys(places.values()) if word != DISK]
    advice = f"Choose another --device-map than {wanted}."
    # The device of a tensor: "cuda" means one of several.
    devices = {word: torch.empty(0, device=find_device(word, advice)).device for word in words}
    # Samples start on the device of the first parameter, the embedding.
    owner = next(module.named_parameters())[0].rpartition(".")[0]
    first = [_look_up(places, owner), *words]
    computing = [devices[w] for w in first if w in devices and devices[w].type != CPU]
    return Placement(places, devices, (computing or [torch.device(CPU)])[0])


def _look_up(places: Mapping[str, Any], name: str) -> Any:
    """Return the place of a module or tensor: its own, or its nearest enclosing module's."""
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places.get(name)


def _read_device_map(module: nn.Module, wanted: str) -> dict[str, Any]:
    """Read a device map from a file.

    Raises:
        UsageError: there is no such file, or it holds no map.
        InputError: the map does not fit the model.
    """
    path = Path(wanted)
    content = read_json(path) if path.is_file() else {}
    words = content.values() if isinstance(content, dict) else ()
    if not words or not all(isinstance(w, str) or type(w) is int for w in words):
        raise UsageError(
            f"--device-map {wanted} is neither auto nor balanced, nor a file that maps modules to "
            "devices",
            'Write a JSON file of modules and devices: {"blocks.0": "cuda:0", "": "disk"}.',
        )
    tensors = [name for name, _ in module.named_parameters()]
    names = {*tensors, *(name for name, _ in (*module.named_modules(), *module.named_buffers()))}
    unknown = sorted(content.keys() - names)
    missing = [name for name in tensors if _look_up(content, name) is None]
    if unknown or missing:
        parts = few([part for part, _ in module.named_children()])
        raise InputError(
            f"{path} does not fit the model: {describe_misfit(missing, unknown, ())}",
            f'Its modules are: {parts}. Add "": "cpu", or another device, for all others.',
        )
    return dict(content)


def _map_weight(values: Tensor, path: Path) -> Tensor:
    """Write a weight to a file, and return a tensor that maps the file.

    The system can reclaim mapped memory. The file is deleted when its folder is closed; its
    content stays until the process ends.
    """
    try:
        whole = values.cpu().contiguous().view(-1)
        path.write_bytes(whole.view(torch.uint8).numpy().data)
    except OSError as error:
        raise EvaluationError(
            f"weights cannot be written to disk in {path.parent} ({error.strerror})",
            "Set TMPDIR to a folder with more room.",
        ) from error
    mapped = torch.from_file(str(path), shared=False, size=values.numel(), dtype=values.dtype)
    return mapped.view(values.shape)
