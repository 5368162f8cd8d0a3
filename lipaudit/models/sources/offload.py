"""Placement of weights: on one device, or on several, CPU and disk, by Accelerate or by a file.

Accelerate plans the placement and moves samples from device to device. Weights on the disk, or on
the CPU beside a GPU, stay there (see `models.precision`) and are converted whenever they are read,
also outside the forward pass of their own module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit import errors
from lipaudit.errors import EvaluationError, InputError, UsageError, explain_failure, join_few
from lipaudit.models.net import Call, LoadOptions
from lipaudit.models.precision import DEFERRED, convert_on_read, lift_parameters, name_dtypes
from lipaudit.models.sources.weight_files import describe_misfit, note_half_precision, read_json
from lipaudit.tables import Note, Notes

# Plans of Accelerate; today both give the same result.
PLANNED = ("auto", "balanced")
DISK = "disk"
CPU = "cpu"
LISTS = (nn.ModuleList, nn.Sequential)


def place_weights(
    module: nn.Module, call: Call, options: LoadOptions
) -> tuple[Call, Mapping[str, str], Notes]:
    """Put the weights of a model on its devices, in the precision of the run.

    Without --device-map, all weights go to one device. With a map, they go to several devices or
    the disk. In both cases the weights are converted now, or (--weights stored) each time a layer
    reads them.

    Args:
        module: the model.
        call: runs the model on (x, mask).
        options: the device or the device map, the dtype, and whether weights stay as stored.

    Returns:
        The call of the placed model, the places of `--device-map`, and notes on the weights.

    Raises:
        InputError: Accelerate is not installed, or the map does not fit the model.
        UsageError: this machine has no such device, or two options choose a device.
        EvaluationError: the disk is full.
    """
    run_dtype: torch.dtype = getattr(torch, options.dtype)
    # Half-precision arithmetic is too coarse for norms. So weights that stay as stored are
    # converted to the dtype of the run whenever a layer reads them (`convert_on_read`).
    dtype = None  # dtype of the parameters in memory; None: as stored
    notes: Notes = ()
    if options.weights != "stored":
        dtype = run_dtype
        notes = note_half_precision(p.dtype for p in module.parameters())
    # Without a map, all weights go to one device.
    if options.device_map is None:
        # Not `module.to`: transformers overrides it, and refuses models that were quantised.
        nn.Module.to(module, find_device(options.device))
        if dtype is None:
            narrow = convert_on_read(module, run_dtype)  # dtypes narrower than that of the run
            # `lift_parameters` lets the model see converted weights while it runs.
            return lift_parameters(call), {}, (_note_stored(narrow, options.dtype),)
        # Not `to(dtype)`, which drops the imaginary parts of complex constants.
        convert = nn.Module.double if dtype == torch.float64 else nn.Module.float
        convert(module)
        return call, {}, notes
    if options.device != "auto":
        raise UsageError(
            f"--device {options.device} and --device-map both choose the device of the model",
            "Leave --device out.",
        )
    # With a map, weights go to several devices or the disk.
    placement = plan_placement(module, options.device_map, dtype)
    placement.move(module, dtype)
    notes += (placement.note(module),)
    call = placement.connect(module, call)  # tensors travel between the devices
    # Weights on the CPU or the disk may stay as stored even if `dtype` is given.
    narrow = convert_on_read(module, run_dtype, placement.find_compute_device)
    if dtype is None:
        notes += (_note_stored(narrow, options.dtype),)
    return lift_parameters(call), placement.places, notes


def _note_stored(narrow: set[torch.dtype], dtype: str) -> Note:
    """Return the note on weights that stay as stored.

    Args:
        narrow: the stored dtypes that are narrower than the dtype of the run.
        dtype: dtype of the run.
    """
    if not narrow:
        return Note.info(
            "stored-weights",
            f"no weights are stored in less than {dtype}, so --weights stored has no effect",
        )
    # `DEFERRED` marks quantised weights, which are dequantised when a layer reads them.
    names = name_dtypes(narrow - {DEFERRED})
    if DEFERRED in narrow:
        names.append("quantised form")
    return Note.info(
        "stored-weights",
        f"weights stay in {join_few(names)}, as stored, and are converted to {dtype} one layer at "
        "a time. The results are those of exactly these weights",
    )


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

    def find_compute_device(self, path: str) -> torch.device:
        """Return the device on which a module computes.

        A module computes on the device of its weights. If the weights are on the CPU or the disk,
        the module computes on `main`: an accelerator if there is one.
        """
        device = self.devices.get(self.place(path), self.main)  # `main` for the disk
        if device.type == CPU:
            return self.main
        return device

    def move(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Put every parameter in its place: a device, or the disk.

        There are three cases:
        1. The place is a device: the parameter is copied there.
        2. The place is the disk: the parameter is written to a temporary file, and the file is
           mapped into memory.
        3. The place is the disk, and safetensors has already mapped the parameter from the model's
           own file: it stays as it is.

        The temporary folder is deleted at the end. On Linux and macOS a mapped file stays readable
        until nothing maps it, although its name is gone. Windows does not delete a mapped file,
        and this error is ignored.

        Args:
            module: the model.
            dtype: dtype of parameters on computing devices; None: as stored. Integers, parameters
                of the disk, and parameters on a CPU beside a GPU keep the stored dtype.

        Raises:
            EvaluationError: the disk is full.
        """
        # All names of each parameter: tied weights have several, and stay tied.
        names_by_id: dict[int, list[str]] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            names_by_id.setdefault(id(p), []).append(name)
        with TemporaryDirectory(prefix="lipaudit-", ignore_cleanup_errors=True) as folder:
            for number, names in enumerate(names_by_id.values()):
                # No other variable may keep the old values: the next weights need this memory.
                values = module.get_parameter(names[0]).data
                place = self.place(names[0])
                # Case 1: a device.
                if place != DISK:
                    device = self.devices[place]
                    # Weights on the CPU beside a GPU are converted each time the GPU reads them.
                    is_read_elsewhere = device.type == CPU and self.main != device
                    new_dtype = values.dtype
                    if dtype is not None and values.is_floating_point() and not is_read_elsewhere:
                        new_dtype = dtype
                    values = values.to(device, new_dtype)
                # Case 2: the values are in memory. In case 3 nothing is done. The cases differ in
                # the storage: torch cannot resize that of a mapped file.
                elif values.device.type != CPU or values.untyped_storage().resizable():
                    values = _map_weight(values, Path(folder, str(number)))
                parameter = nn.Parameter(values, requires_grad=False)
                for name in names:
                    part, _, key = name.rpartition(".")
                    module.get_submodule(part)._parameters[key] = parameter

    def connect(self, module: nn.Module, call: Call) -> Call:
        """Return the call of a model whose modules compute on different devices.

        Weights stay where `move` put them, and tensors travel. A hook before each module sends the
        inputs to the device of the module. A hook after the module sends the output to the device
        of the enclosing module, for example for a residual sum. The output of an element of a list
        is not sent back: the hook before the next element fetches it.

        Args:
            module: the model, whose modules get the hooks.
            call: runs the model on (x, mask).

        Returns:
            The call, with its result on the device of the samples.
        """
        # Modules with weights on the CPU or the disk compute on `main`. If there is no further
        # device, every module computes on `main`, and no tensor has to travel.
        if {self.main, torch.device(CPU)}.issuperset(self.devices.values()):
            return call
        # Moves all tensors in nested tuples, lists and dictionaries.
        from accelerate.utils import send_to_device

        def send_inputs(device: torch.device, _module: Any, args: Any, kwargs: Any) -> Any:
            return send_to_device((args, kwargs), device)

        def send_output(device: torch.device, _module: Any, _args: Any, output: Any) -> Any:
            return send_to_device(output, device)

        for path, part in module.named_modules():
            device = self.find_compute_device(path)
            part.register_forward_pre_hook(partial(send_inputs, device), with_kwargs=True)
            parent = path.rpartition(".")[0]
            parent_device = self.find_compute_device(parent)
            is_in_list = isinstance(module.get_submodule(parent), LISTS)
            if parent_device != device and not is_in_list:
                part.register_forward_hook(partial(send_output, parent_device))
        return lambda *args: send_to_device(call(*args), self.main)

    def note(self, module: nn.Module) -> Note:
        """Return the note on how many weights each place has."""
        sizes = Counter[str]()
        for name, p in module.named_parameters():
            sizes[self.place(name)] += p.numel()
        counts = ", ".join(f"{size:,} on {place}" for place, size in sizes.items())
        return Note.info("device-map", f"weights are distributed (--device-map): {counts}")


def find_device(name: str, advice: str = "Use --device auto or cpu.") -> torch.device:
    """Resolve a device; "auto" is the CUDA device if there is one, else the CPU.

    Args:
        name: the device.
        advice: the hint if it cannot be used.

    Raises:
        UsageError: this machine has no such device, or the device has no float64.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else CPU
        return torch.device(name)
    if name == CPU:  # always there
        return torch.device(CPU)
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()  # the meta device holds no values
        torch.empty(1, device=device, dtype=torch.float64)  # mps has none
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        if errors.is_out_of_memory(error):  # the device exists, and is full
            raise
        raise UsageError(
            f"device {name!r} is not available on this machine, or has no float64",
            f"{advice} Bounds and statistics need float64.",
        ) from error
    return device


def plan_placement(module: nn.Module, device_map: str, dtype: torch.dtype | None) -> Placement:
    """Return the placement of the weights of a model.

    Args:
        module: the loaded model.
        device_map: auto, balanced, or a JSON file of module names and devices.
        dtype: dtype of converted weights; None: no conversion.

    Raises:
        InputError: Accelerate is not installed, or the file does not fit the model.
        UsageError: this machine has no such device.
    """
    advice = "pip install 'lipaudit[accelerate]'"
    with explain_failure("--device-map needs the library `accelerate`", advice, ImportError):
        import accelerate  # noqa: F401
    if device_map in PLANNED:
        plan = _plan_by_accelerate(module, dtype)
    else:
        plan = _read_device_map(module, device_map)
    kind = _find_accelerator()
    places = {}
    devices = {}
    advice = f"Choose another --device-map than {device_map}."
    for name, place in plan.items():
        device_name = str(place)
        # Accelerate names an accelerator by its number, and a file may do so, too: 0 is cuda:0.
        if isinstance(place, int):
            device_name = f"{kind}:{place}"
        places[name] = device_name
        if device_name != DISK and device_name not in devices:
            device = find_device(device_name, advice)
            # "cuda" means the current one of several devices. The device of a tensor has its
            # number, such as cuda:0.
            devices[device_name] = torch.empty(0, device=device).device
    first_parameter, _ = next(module.named_parameters())
    embedding = first_parameter.rpartition(".")[0]
    return Placement(places, devices, _choose_main(devices, _look_up(places, embedding)))


def _find_accelerator() -> str:
    """Return the kind of the accelerator of this machine, such as "cuda" (also without any)."""
    # Count accelerators first: a torch built for CUDA names CUDA also on machines without a GPU.
    if torch.accelerator.device_count():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator:
            return accelerator.type
    return "cuda"


def _choose_main(devices: Mapping[str, torch.device], first: str) -> torch.device:
    """Return the device on which samples start.

    It is that of the first parameter, the embedding. If this is on the CPU or the disk, samples
    start on the first accelerator; without one, on the CPU.

    Args:
        devices: the devices of a model's weights by name.
        first: the name of the place of the first parameter; the disk has no device.
    """
    for name in (first, *devices):
        if name in devices and devices[name].type != CPU:
            return devices[name]
    return torch.device(CPU)


def _plan_by_accelerate(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return Accelerate's distribution of a model over the free memory: places by module name.

    Args:
        module: the model.
        dtype: dtype to which the weights will be converted, and so their size; None: as stored.
    """
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    # Class names of the modules that stay on one device as a whole.
    blocks = getattr(module, "_no_split_modules", None) or _name_blocks(module)
    dtypes = None
    if dtype is not None:
        floating = [name for name, p in module.named_parameters() if p.is_floating_point()]
        dtypes = dict.fromkeys(floating, dtype)
    rules = {"no_split_module_classes": sorted(blocks), "special_dtypes": dtypes}
    memory = get_balanced_memory(module, **rules)
    return dict(infer_auto_device_map(module, max_memory=memory, **rules))


def _name_blocks(module: nn.Module) -> set[str]:
    """Return the class names of the blocks of a model, which are not split between devices.

    A block is an element of a ModuleList or Sequential, and has submodules itself.
    """
    blocks = set()
    for parent in module.modules():
        if not isinstance(parent, LISTS):
            continue
        for child in parent.children():
            if not isinstance(child, LISTS) and next(child.children(), None) is not None:
                blocks.add(type(child).__name__)
    return blocks


def _look_up(places: Mapping[str, Any], name: str) -> Any:
    """Return the place of a module or tensor, or of its nearest enclosing module that has one.

    For `blocks.0.norm`, the names `blocks.0.norm`, `blocks.0`, `blocks` and "" are looked up.
    """
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places.get(name)


def _read_device_map(module: nn.Module, file: str) -> dict[str, Any]:
    """Return the device map of a file: device, number of an accelerator, or disk, by module.

    Raises:
        UsageError: there is no such file, or it holds no map.
        InputError: the map does not fit the model.
    """
    path = Path(file)
    content = {}
    if path.is_file():
        content = read_json(path)
    places = content.values() if isinstance(content, dict) else ()
    if not places or not all(isinstance(p, str) or type(p) is int for p in places):
        raise UsageError(
            f"--device-map {file} is neither auto nor balanced, nor a file that maps modules to "
            "devices",
            'Write a JSON file of modules and devices: {"blocks.0": "cuda:0", "": "disk"}.',
        )
    tensors = [name for name, _ in module.named_parameters()]
    unknown = content.keys() - set(tensors)
    unknown -= dict(module.named_modules()).keys()
    unknown -= dict(module.named_buffers()).keys()
    missing = [name for name in tensors if _look_up(content, name) is None]
    if unknown or missing:
        parts = join_few([part for part, _ in module.named_children()])
        misfit = describe_misfit(missing, surplus=sorted(unknown), shapes=())
        raise InputError(
            f"{path} does not fit the model: {misfit}",
            f'Its modules are: {parts}. Add "": "cpu", or another device, for all others.',
        )
    return dict(content)


def _map_weight(values: Tensor, path: Path) -> Tensor:
    """Write a weight to a file, and return a tensor that maps the file.

    The system can drop mapped memory and read the file again. The caller deletes the folder of the
    file; the content stays on the disk as long as the tensor maps the file.
    """
    try:
        flat = values.cpu().contiguous().view(-1)
        path.write_bytes(flat.view(torch.uint8).numpy().data)
    except OSError as error:
        raise EvaluationError(
            f"weights cannot be written to disk in {path.parent} ({error.strerror})",
            "Set TMPDIR to a folder with more room.",
        ) from error
    mapped = torch.from_file(str(path), shared=False, size=values.numel(), dtype=values.dtype)
    return mapped.view(values.shape)
