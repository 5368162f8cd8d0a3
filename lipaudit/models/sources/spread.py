"""Weights over several devices, the CPU and the disk: as Accelerate or a file says.

Accelerate plans what lies where and moves samples from device to device. Weights that lie where
nothing is computed (on the disk; on the CPU beside a GPU) are held there, see `models.lifting`,
and lifted where they are read: not only within the forward pass of their own module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from lipaudit.data.intake import remark
from lipaudit.errors import EvaluationError, InputError, UsageError, suggestion
from lipaudit.models.sources.weights import few
from lipaudit.results import Note
from lipaudit.schema import read_json

PLANNED = ("auto", "balanced")
"""What Accelerate plans; today it makes no difference between the two."""
DISK, CPU = "disk", "cpu"
LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Spread:
    """Where the weights of a model lie and where each of its parts computes.

    Attributes:
        places: a device, or disk, by the name of a module or tensor; "" is the whole model.
        devices: the device of each such word but disk.
        main: where samples go, and where is computed what lies where nothing is.
        mapped: the parameters that are views of a file as they were loaded.
    """

    places: Mapping[str, str]
    devices: Mapping[str, torch.device]
    main: torch.device
    mapped: frozenset[str]

    @cached_property
    def computing(self) -> set[torch.device]:
        """The devices that compute: the CPU only where there is no other."""
        return {self.main, *(d for d in self.devices.values() if d.type != CPU)}

    def place(self, name: str) -> str:
        """Return where a module or tensor lies: as the nearest module around it that is named."""
        return str(_around(self.places, name) or self.main)

    def runs(self, path: str) -> torch.device:
        """Return where a module computes."""
        place = self.devices.get(self.place(path), self.main)
        return place if place in self.computing else self.main

    def lay(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Put every parameter where it is to lie.

        Args:
            module: the model.
            dtype: what those become that lie where they are read; None: as they are stored.

        Raises:
            EvaluationError: the disk is full.
        """
        with TemporaryDirectory(prefix="lipaudit-", ignore_cleanup_errors=True) as folder:
            for number, (name, users) in enumerate(_users(module)):
                part, own = users[0]
                values = self._laid(
                    name, part.get_parameter(own), dtype, Path(folder, str(number))
                )
                laid = nn.Parameter(values, requires_grad=False)
                for part, own in users:
                    part._parameters[own] = laid

    def _laid(self, name: str, p: Tensor, dtype: torch.dtype | None, file: Path) -> Tensor:
        place = self.place(name)
        if place == DISK:
            return p.data if name in self.mapped else _map_weight(p.data, file)
        device = self.devices[place]
        converted = p.is_floating_point() and device in self.computing
        return p.data.to(device, dtype if converted else None)

    def connect(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """Let samples follow the parts of a model to their devices, and come back from there.

        What a part gives comes back to the module around it; what an element of a list gives, to
        that which takes it next.
        """
        if len(self.computing) == 1:
            return call
        from accelerate.utils import send_to_device

        for path, part in module.named_modules():
            around, own = path.rpartition(".")[0], self.runs(path)
            part.register_forward_pre_hook(_follow(own), with_kwargs=True)
            listed = isinstance(module.get_submodule(around), LISTS)
            if not listed and self.runs(around) != own:
                part.register_forward_hook(_return(self.runs(around)))
        return lambda *args: send_to_device(call(*args), self.main)

    def note(self, module: nn.Module) -> Note:
        """Say what lies where."""
        sizes = Counter[str]()
        for name, p in module.named_parameters():
            sizes[self.place(name)] += p.numel()
        lie = ", ".join(f"{size:,} on {place}" for place, size in sizes.items())
        return remark("device-map", f"weights are spread (--device-map): {lie}")


def plan(
    module: nn.Module,
    wanted: str,
    dtype: torch.dtype | None,
    device: Callable[[str], torch.device],
) -> Spread:
    """Return where the weights of a model are to lie.

    Args:
        module: the model, as it was loaded.
        wanted: auto, balanced, or a JSON file of module names and devices.
        dtype: what weights are converted to; None: nothing.
        device: resolves the name of a device.

    Raises:
        InputError: Accelerate is not installed, or the file does not fit the model.
        UsageError: this machine has no such device.
    """
    _require_accelerate()
    found = _plan_devices(module, dtype) if wanted in PLANNED else _read_device_map(module, wanted)
    places = {name: _word(place) for name, place in found.items()}
    try:
        words = [word for word in dict.fromkeys(places.values()) if word != DISK]
        # As tensors name it: cuda is one of several.
        devices = {word: torch.empty(0, device=device(word)).device for word in words}
    except UsageError as error:
        raise UsageError(error.message, f"Change --device-map {wanted}.") from error
    owner = next(module.named_parameters())[0].rpartition(".")[0]
    first = [_around(places, owner), *words]
    computing = [devices[w] for w in first if w in devices and devices[w].type != CPU]
    main = (computing or [torch.device(CPU)])[0]
    return Spread(places, devices, main, frozenset(_views(module)))


def _views(module: nn.Module) -> Iterator[str]:
    """Yield the parameters whose memory is not torch's own: safetensors are mapped when loaded.

    To be asked before anything takes a weight as an array, which lends its memory out as well.
    """
    for name, p in module.named_parameters():
        if p.device.type == CPU and not p.untyped_storage().resizable():
            yield name


def _around(places: Mapping[str, Any], name: str) -> Any:
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places.get(name)


def _require_accelerate() -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise InputError(
            "--device-map spreads weights by the library `accelerate`, which is not installed",
            "pip install 'lipaudit[accelerate]'",
        ) from error


def _plan_devices(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Any]:
    """Let Accelerate spread a model over the memory that is free."""
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    floating = [name for name, p in module.named_parameters() if p.is_floating_point()]
    kinds = None if dtype is None else dict.fromkeys(floating, dtype)
    how: dict[str, Any] = {"no_split_module_classes": _whole(module), "special_dtypes": kinds}
    memory = get_balanced_memory(module, **how)
    return dict(infer_auto_device_map(module, max_memory=memory, **how))


def _whole(module: nn.Module) -> list[str]:
    """Return the classes of blocks: a residual connection within one cannot be cut."""
    named = getattr(module, "_no_split_modules", None)
    return sorted(named or {type(block).__name__ for block in _blocks(module)})


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of lists of modules that have parts of their own."""
    for parent in module.modules():
        for child in parent.children() if isinstance(parent, LISTS) else ():
            if not isinstance(child, LISTS) and next(child.children(), None) is not None:
                yield child


def _read_device_map(module: nn.Module, wanted: str) -> dict[str, Any]:
    """Read the map of a file.

    Raises:
        UsageError: there is no such file.
        InputError: it does not fit the model.
    """
    path = Path(wanted)
    if not path.is_file():
        raise UsageError(
            f"--device-map {wanted} is neither {' nor '.join(PLANNED)}, and no file",
            'Write a JSON file of modules and devices: {"blocks.0": "cuda:0", "": "disk"}.',
        )
    content = read_json(path)
    words = content.values() if isinstance(content, dict) else ()
    if not words or not all(isinstance(w, str) or type(w) is int for w in words):
        raise InputError(f"{path} is no map of modules to devices", 'For example {"": "disk"}.')
    tensors = [name for name, _ in module.named_parameters()]
    names = {*tensors, *(name for name, _ in (*module.named_modules(), *module.named_buffers()))}
    for name in content.keys() - names:
        advice = suggestion(name, sorted(names), f"Its parts are: {few(_parts(module))}.")
        raise InputError(f"{path} places {name!r}, and the model has no such module", advice)
    if left := [name for name in tensors if _around(content, name) is None]:
        raise InputError(f"{path} leaves out {few(left)}", 'Add "": "cpu", or another device.')
    return dict(content)


def _parts(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()]


def _word(place: Any) -> str:
    """Name a device: Accelerate numbers those of the accelerator."""
    if isinstance(place, int):
        there = torch.accelerator.is_available()  # older torch raises when it is asked for none
        accelerator = torch.accelerator.current_accelerator() if there else None
        return f"{accelerator.type if accelerator else 'cuda'}:{place}"
    return str(place)


def _users(module: nn.Module) -> list[tuple[str, list[tuple[nn.Module, str]]]]:
    """Return the name of every parameter, and which modules have it under which name."""
    users: dict[int, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for path, part in module.named_modules():
        for own, p in part._parameters.items():
            if p is not None:
                _, known = users.setdefault(id(p), (f"{path}.{own}".lstrip("."), []))
                known.append((part, own))
    return list(users.values())


def _map_weight(values: Tensor, path: Path) -> Tensor:
    """Write a weight to a file, and return it as it is mapped from there.

    What is mapped takes no memory that the system could not have back. The file has no name any
    more once its folder is left, and is gone with the process.
    """
    try:
        whole = values.cpu().contiguous().view(-1)
        path.write_bytes(whole.view(torch.uint8).numpy().data)
    except OSError as error:
        raise EvaluationError(
            f"weights cannot be put on the disk in {path.parent} ({error.strerror})",
            "Set TMPDIR to a folder with more room.",
        ) from error
    mapped = torch.from_file(str(path), shared=False, size=values.numel(), dtype=values.dtype)
    return mapped.view(values.shape)


def _follow(device: torch.device) -> Callable[..., Any]:
    from accelerate.utils import send_to_device

    return lambda _module, args, kwargs: send_to_device((args, kwargs), device)


def _return(device: torch.device) -> Callable[..., Any]:
    from accelerate.utils import send_to_device

    return lambda _module, _args, output: send_to_device(output, device)
