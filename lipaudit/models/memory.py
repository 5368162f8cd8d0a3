"""Memory: bytes of tensors during a run, of this process, and free on a device."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lipaudit.models.precision import EagerMode

LARGE = 10**9
"""Sizes from this number of bytes on are shown in GB."""


CGROUP = "sys/fs/cgroup"
"""Folder of control groups (version 2), which limit the memory of containers."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that a measure needs beyond the loaded model: fixed, and per sample."""

    fixed: int
    sample: int

    def of(self, samples: int) -> int:
        """Return the bytes for a number of samples at a time."""
        return self.fixed + samples * self.sample


class Held(EagerMode):
    """Counts the bytes of live tensors made by operations while it is active.

    Temporary memory inside an operation and memory outside torch are not counted.

    Args:
        module: a module; its parameters are not counted.

    Attributes:
        most: the largest number of bytes at a time.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        tensors = (*module.parameters(), *module.buffers())
        self._known = {t.untyped_storage().data_ptr() for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            place = 0 if storage is None else storage.data_ptr()
            if storage is not None and place and place not in self._known:
                self._known.add(place)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._free, place, storage.nbytes())
        return out

    def _free(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._now -= size


def format_size(count: int) -> str:
    """Format a number of bytes.

    >>> format_size(1_260_000_000), format_size(45_300_000)
    ('1.3 GB', '45 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= LARGE else f"{count / 1e6:.0f} MB"


def read_used_memory(device: torch.device) -> int | None:
    """Return the bytes that this process uses on a device; None if unknown.

    On a CPU this is the whole memory of the process, with libraries and weights.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def find_free_memory(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate on a device; None if unknown.

    On a CPU, limits of control groups (containers) count, too.

    Args:
        device: the device.
        root: root folder of the system's files.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    lines = _read(root / "proc/meminfo").splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    # Inside a container its own group is the root, whatever the path says.
    path, mount = (
        Path(_read(root / "proc/self/cgroup").strip().removeprefix("0::/")),
        root / CGROUP,
    )
    for group in (mount / path, *(mount / parent for parent in path.parents)):
        allowed, used = (_read(group / f"memory.{name}").strip() for name in ("max", "current"))
        if allowed.isdigit() and used.isdigit():
            rows = _read(group / "memory.stat").splitlines()
            # File caches are freed if memory is short.
            cached = (int(row.split()[1]) for row in rows if row.startswith("inactive_file "))
            free.append(max(0, int(allowed) - int(used) + next(cached, 0)))
    return min(free, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except OSError:
        return ""
