"""Two simulated accelerators: "simulated:0" and "simulated:1", over the memory of the CPU.

Their tensors are no CPU tensors: an operation that mixes devices raises, as CUDA does, a
generator must be the device's own, and autograd runs backward in another thread. The CPU's kernels
compute (attention is written out), so that what a measure finds is what it finds on the CPU, to
rounding. It can run out of memory, and do without float64. Not simulated: TF32, fused attention,
time.
"""

import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lipaudit

NAME = "simulated"
PACKAGE = Path(lipaudit.__file__).parent


@cache
def start() -> Any:
    """Compile the device, the first time in about a minute, and tell torch of it.

    Raises:
        RuntimeError, ImportError: this machine has no compiler, or no ninja.
    """
    from torch.utils.cpp_extension import load

    source = str(Path(__file__).with_name("device.cpp"))
    extension = load("lipaudit_simulated", [source], extra_cflags=["-O1", "-w"])
    torch.utils.rename_privateuse1_backend(NAME)
    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 2,
        current_device=extension.current,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda device=None: extension.random().get_state(),
        set_rng_state=lambda state, device=None: extension.random().set_state(state),
        manual_seed=lambda seed: extension.random().manual_seed(seed),
        manual_seed_all=lambda seed: extension.random().manual_seed(seed),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
    )
    torch._register_device_module(NAME, module)
    extension.start(*_mixing())
    torch.utils.generate_methods_for_privateuse1_backend()
    return extension


def _mixing() -> tuple[list[str], list[str]]:
    """The operations that CUDA lets mix devices: those entry by entry, and those that index."""
    import torchgen
    import yaml

    functions = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.safe_load(functions.read_text())
    loose = [e["func"].partition("(")[0] for e in entries if e.get("device_check") == "NoCheck"]
    index = ["index.Tensor", "index.Tensor_out", "index_put", "index_put_", "_index_put_impl_"]
    return [f"aten::{name}" for name in loose], [f"aten::{name}" for name in index]


@contextmanager
def memory(limit: int) -> Iterator[None]:
    """Give the device this many bytes beyond those that are in use."""
    extension = start()
    extension.limit(extension.used() + limit)
    try:
        yield
    finally:
        extension.limit(0)


@contextmanager
def no_float64() -> Iterator[None]:
    """Let the device do without float64, as Apple's does."""
    extension = start()
    extension.allow_float64(False)
    try:
        yield
    finally:
        extension.allow_float64(True)


WAITING = {
    name: kind
    for kind, names in {
        "number": "_local_scalar_dense is_nonzero item equal",
        "shape": "nonzero masked_select _unique2 unique_dim unique_consecutive repeat_interleave",
        "success": "_linalg_eigh linalg_eigh linalg_eigvalsh _linalg_svd linalg_svd "
        "linalg_svdvals linalg_cholesky linalg_inv",
    }.items()
    for name in names.split()
}
"""Operations whose result the host needs before it goes on: what it needs of it."""


class Waits(TorchDispatchMode):
    """Count where the host would wait for a real device: it may do nothing else meanwhile.

    Attributes:
        counts: (kind, caller in lipaudit as "file function:line") -> how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        kind = _waits(func, given, args, result)
        if kind:
            self.counts[kind, _caller()] += 1
        return result

    @property
    def total(self) -> int:
        return self.counts.total()

    def at(self, file: str) -> int:
        """Those of a file, named by the end of its path within the package."""
        return sum(n for (_, caller), n in self.counts.items() if caller.split()[0].endswith(file))

    def __str__(self) -> str:
        lines = [f"{n:6} {kind:8} {caller}" for (kind, caller), n in self.counts.most_common()]
        return "\n".join([f"{self.total:6} waits", *lines])


def _waits(func: Any, given: list[Tensor], args: tuple[Any, ...], result: Any) -> str | None:
    name = func._schema.name.removeprefix("aten::")
    if name in ("_to_copy", "to", "copy_", "_copy_from"):
        source, target = (given[1], given[0]) if name == "copy_" else (given[0], result)
        crossed = {source.device.type, target.device.type} == {"cpu", NAME}
        return ("to host" if target.device.type == "cpu" else "from host") if crossed else None
    if not any(t.device.type == NAME for t in given):
        return None
    if name == "lift_fresh":  # torch.tensor of numbers
        return "from host"
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        indices = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
        if any(t.dtype in (torch.bool, torch.uint8) and t.device.type == NAME for t in indices):
            return "shape"
        return "from host" if any(t.device.type == "cpu" and t.ndim for t in indices) else None
    return WAITING.get(name)


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and frame.f_code.co_name != "__torch_function__":
            return f"{path.relative_to(PACKAGE)} {frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
