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
from lipaudit.models.precision import DEFERRED, convert_on_read, lift_parameters, name_dtypes
from lipaudit.models.sources.weight_files import describe_misfit, note_half_precision, read_json
from lipaudit.tables import Note

# Plans of Accelerate; today both give the same result.
PLANNED = ("auto", "balanced")
DISK = "disk"
CPU = "cpu"
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
    dtype = None
    notes: tuple[Note, ...] = ()
    if options.weights != "stored":
        dtype = run
        notes = note_half_precision(p.dtype for p in module.parameters())
    computes_at: Callable[[str], torch.device] | None = None
    places: Mapping[str, str] = {}
    if options.device_map is None:
        # Models of transformers override these methods, and refuse where they were quantised.
        nn.Module.to(module, find_device(options.device))
        if dtype is not None:
            # Not `to`, which drops the imaginary parts of complex constants.
            convert = nn.Module.double if dtype == torch.float64 else nn.Module.float
            convert(module)
            return call, places, notes
    else:
        if options.device != "auto":
            raise UsageError(
                f"--device {options.device} and --device-map both choose the device of the model",
                "Leave --device out.",
            )
        placement = plan_placement(module, options.device_map, dtype)
        placement.move(module, dtype)
        notes += (placement.note(module),)
        call = placement.connect(module, call)
        computes_at = placement.computes_at
        places = placement.places
    kinds = convert_on_read(module, run, computes_at)
    if dtype is None:
        notes += (_note_stored(kinds, options.dtype),)
    return lift_parameters(call), places, notes


def _note_stored(kinds: set[torch.dtype], dtype: str) -> Note:
    """Note that weights stay as stored."""
    text = f"no weights are stored in less than {dtype}, so --weights stored has no effect"
    if kinds:
        stored = name_dtypes(kinds - {DEFERRED})
        if DEFERRED in kinds:
            stored.append("quantised form")
        text = (
            f"weights stay in {few(stored)}, as stored, and are converted to {dtype} one layer at "
            "a time. The results are those of exactly these weights"
        )
    return Note.info("stored-weights", text)


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
        if place.type == CPU:
            return self.main
        return place

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
                values = module.get_parameter(known[0]).data
                place = self.place(known[0])
                if place != DISK:
                    device = self.devices[place]
                    # Weights on the CPU beside a GPU are converted whenever they are read.
                    waits = device.type == CPU and self.main != device
                    kind = values.dtype
                    if dtype is not None and values.is_floating_point() and not waits:
                        kind = dtype
                    values = values.to(device, kind)
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
        if {self.main, torch.device(CPU)}.issuperset(self.devices.values()):
            return call
        from accelerate.utils import send_to_device

        def send_inputs(device: torch.device, _module: Any, args: Any, kwargs: Any) -> Any:
            return send_to_device((args, kwargs), device)

        def send_output(device: torch.device, _module: Any, _args: Any, output: Any) -> Any:
            return send_to_device(output, device)

        for path, part in module.named_modules():
            place = self.computes_at(path)
            part.register_forward_pre_hook(partial(send_inputs, place), with_kwargs=True)
            around = path.rpartition(".")[0]
            back = self.computes_at(around)
            listed = isinstance(module.get_submodule(around), LISTS)
            if back != place and not listed:
                part.register_forward_hook(partial(send_output, back))
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
        name = "cuda" if torch.cuda.is_available() else CPU
        return torch.device(name)
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
        given = _spread(module, dtype)
    else:
        given = _read_device_map(module, wanted)
    # Accelerate numbers accelerators, and a file may do so, too.
    kind = "cuda"
    if torch.accelerator.device_count():  # a build for CUDA names it on every machine
        accelerator = torch.accelerator.current_accelerator()
        if accelerator:
            kind = accelerator.type
    places: dict[str, str] = {}
    devices: dict[str, torch.device] = {}
    advice = f"Choose another --device-map than {wanted}."
    for name, place in given.items():
        word = str(place)
        if isinstance(place, int):
            word = f"{kind}:{place}"
        places[name] = word
        if word != DISK and word not in devices:
            device = find_device(word, advice)
            # The device of a tensor: "cuda" means one of several.
            devices[word] = torch.empty(0, device=device).device
    # Samples start on the device of the first parameter, the embedding.
    owner = next(module.named_parameters())[0].rpartition(".")[0]
    main = torch.device(CPU)
    for word in (_look_up(places, owner), *devices):
        if word in devices and devices[word].type != CPU:
            main = devices[word]
            break
    return Placement(places, devices, main)


def _spread(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Have Accelerate distribute a model over the free memory, whole blocks at a time."""
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    whole = getattr(module, "_no_split_modules", None) or _name_blocks(module)
    dtypes = None
    if dtype is not None:
        floating = [name for name, p in module.named_parameters() if p.is_floating_point()]
        dtypes = dict.fromkeys(floating, dtype)
    how: dict[str, Any] = {"no_split_module_classes": sorted(whole), "special_dtypes": dtypes}
    memory = get_balanced_memory(module, **how)
    return dict(infer_auto_device_map(module, max_memory=memory, **how))


def _name_blocks(module: nn.Module) -> set[str]:
    """Return the classes of the elements of lists that have parts themselves."""
    blocks: set[str] = set()
    for parent in module.modules():
        if not isinstance(parent, LISTS):
            continue
        for child in parent.children():
            if not isinstance(child, LISTS) and next(child.children(), None) is not None:
                blocks.add(type(child).__name__)
    return blocks


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
    content = {}
    if path.is_file():
        content = read_json(path)
    words = content.values() if isinstance(content, dict) else ()
    if not words or not all(isinstance(w, str) or type(w) is int for w in words):
        raise UsageError(
            f"--device-map {wanted} is neither auto nor balanced, nor a file that maps modules to "
            "devices",
            'Write a JSON file of modules and devices: {"blocks.0": "cuda:0", "": "disk"}.',
        )
    tensors = [name for name, _ in module.named_parameters()]
    unknown = content.keys() - set(tensors)
    unknown -= dict(module.named_modules()).keys()
    unknown -= dict(module.named_buffers()).keys()
    missing = [name for name in tensors if _look_up(content, name) is None]
    if unknown or missing:
        parts = few([part for part, _ in module.named_children()])
        raise InputError(
            f"{path} does not fit the model: {describe_misfit(missing, sorted(unknown), ())}",
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
    count = values.numel()
    mapped = torch.from_file(str(path), shared=False, size=count, dtype=values.dtype)
    return mapped.view(values.shape)
