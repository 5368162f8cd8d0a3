"""The precision of a run: of its arithmetic, and of weights that are stored in another one.

A held module keeps its parameters as stored (in half precision, on the CPU, in a mapped file).
`parameters()` returns the stored tensors. `module.weight` returns a copy in the precision and on
the device of the run, converted ("lifted") when a layer reads it and freed after use. While the
model runs, `parameters()` returns such copies, too, because some models read their own dtype and
device.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from mmap import mmap
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

# Devices that have their own random state.
SEEDED = ("cuda", "xpu")


def _repair_gradient(normalise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a normalisation with a right gradient.

    On a CPU, torch 2.14 computes a wrong one if a single sample gets it with the channels last and
    with strides such as (6, 1, 24, 6): behind `x.flatten(2).transpose(1, 2)` of a patch embedding.
    """

    def compute(*args: Any) -> Tensor:
        output = normalise(*args)
        if output.requires_grad and len(output) == 1 and output.device.type == "cpu":
            output.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return output

    return compute


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the tensors' own precision with gradients: no TF32, autocast or inference mode.

    Compiled code runs as plain Python, and `nn.TransformerEncoder` without its fast path: kernels
    cannot be observed. Compiled code may be wrapped or compiled in place, whole or in part. The
    fast path is also another function, which torch takes only without gradients: it sets the
    outputs at padded tokens to 0.

    All settings are restored. TF32 would leave three digits of a spectral norm. A model may still
    change settings itself, for example by `torch.backends.cudnn.flags()`: it is measured as it is.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled: the import takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        mha: Any = torch.backends.mha
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        for name in ("batch_norm", "instance_norm"):
            repaired = _repair_gradient(getattr(torch, name))
            stack.enter_context(patch.object(torch, name, repaired))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        # torch 2.9 has a setting per operation beside the two older ones, and refuses to read an
        # older one if they contradict each other. So all are set to the same value here, and
        # each is read while nothing contradicts it.
        backends: Any = torch.backends
        cudnn, onednn = backends.cudnn, backends.mkldnn
        operations: list[Any] = []  # with a precision setting, from general to single ones
        if hasattr(cudnn, "conv"):
            operations = [backends, cudnn, onednn, backends.cuda.matmul, onednn.matmul]
            operations += [part for each in (cudnn, onednn) for part in (each.conv, each.rnn)]
        for part in operations:  # general ones first: the dependent ones then read as "none"
            stack.callback(setattr, part, "fp32_precision", part.fp32_precision)
            part.fp32_precision = "none"
        try:
            allowed = cudnn.allow_tf32
        except RuntimeError:  # only True contradicts settings that are all "none"
            allowed = True
        stack.callback(setattr, cudnn, "allow_tf32", allowed)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        cudnn.allow_tf32 = False
        for part in operations:
            part.fp32_precision = "ieee"
        yield


_CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}


class Widening(TorchFunctionMode):
    """Run a float64 model without its casts to lower precisions.

    Many models cast to float32 for norms, rotary positions or softmax, in any precision: that
    would leave seven of sixteen digits.

    Attributes:
        halves: the half precisions that the model would have used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.halves: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with float64 in place of what it asks for."""
        kwargs = kwargs or {}
        for each in (_CASTS.get(func), *args, *kwargs.values()):
            if each is torch.half or each is torch.bfloat16:
                self.halves.add(each)
        if func in _CASTS:
            return Tensor.double(*args, **kwargs)
        if func is not Tensor.view:  # a view of the bits
            args = [_widen(value) for value in args]
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widen(value: Any) -> Any:
    """Return float64 for a dtype that a model casts to; everything else as it is."""
    if isinstance(value, torch.dtype) and value in _CASTS.values():
        return torch.float64
    return value


def deploy(
    run: Callable[[Tensor, Tensor | None], Tensor], device: torch.device, name: str
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return a model's forward pass as it runs under `torch.autocast`.

    The switch acts inside of `exact_arithmetic`, too. Modules that cast themselves or switch
    autocast off do so as in the plain model.

    Args:
        run: the forward pass: (samples, mask) -> output.
        device: the device of the model.
        name: dtype of autocast: bfloat16 or float16.

    Returns:
        The forward pass; its output, usually of that dtype, is returned in float32.
    """
    dtype = getattr(torch, name)

    def run_deployed(x: Tensor, mask: Tensor | None) -> Tensor:
        with torch.autocast(device.type, dtype=dtype):
            output = run(x, mask)
        return output.float()

    return run_deployed


def widen_half(values: Tensor) -> Tensor:
    """Return values in at least float32: sums of many rounded terms would lose digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def can_autocast(device: torch.device, name: str) -> bool:
    """Say whether torch rounds products on a device under autocast; older versions only warn."""
    dtype = getattr(torch, name)
    ones = torch.ones(2, 2, device=device)
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")
        with torch.autocast(device.type, dtype=dtype):
            product = ones @ ones
        return product.dtype == dtype
    return False


def borrow_gradient(values: Tensor, exact: Tensor) -> Tensor:
    """Return values whose gradient is that of another computation of the same quantity.

    Args:
        values: of rounded arithmetic, without a graph.
        exact: the same quantity of exact arithmetic, with its graph.
    """
    return _BorrowedGradient.apply(values, exact)


class _BorrowedGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, values: Tensor, _exact: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_ctx: Any, above: Tensor) -> tuple[None, Tensor]:
        return None, above


def name_dtypes(dtypes: Iterable[torch.dtype]) -> list[str]:
    """Return the names of dtypes, without their module, in order."""
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


@contextmanager
def seed_device(seed: int, device: torch.device) -> Iterator[None]:
    """Seed numpy, the CPU and one device inside the block, and restore their random states.

    Other devices are not used: reading the state of a GPU takes memory, which may be missing.
    """
    seeded = [device] if device.type in SEEDED else []
    kind = device.type if seeded else "cuda"
    with torch.random.fork_rng(seeded, device_type=kind), ExitStack() as undo:
        undo.callback(np.random.set_state, np.random.get_state())
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        for each in seeded:
            accelerator = torch.get_device_module(each)
            with accelerator.device(each):
                accelerator.manual_seed(seed)
        yield


# Copies with at least this many entries get separate memory pages.
LARGE = 2**16

# Converted copy of each stored weight in use; tied weights share one copy.
_lifted: MutableMapping[Tensor, TensorWeakRef] = WeakTensorKeyDictionary()
# Stored weight of each converted copy.
_stored: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
# Function that computes the values of each deferred weight.
_deferred: MutableMapping[Tensor, Callable[[], Tensor]] = WeakTensorKeyDictionary()
# The dtype of deferred weights: narrower than that of any run, so they are converted on reading.
DEFERRED = torch.float8_e5m2


def defer(compute: Callable[[], Tensor], shape: torch.Size) -> nn.Parameter:
    """Return a parameter without memory; `hold` has its values computed whenever it is read."""
    # NaN, so that nothing can take the placeholder for values.
    weight = nn.Parameter(torch.tensor(torch.nan).to(DEFERRED).expand(shape), requires_grad=False)
    _deferred[weight] = compute
    return weight


def compute_values(stored: Tensor) -> Tensor:
    """Return the values of a stored weight, which may be deferred."""
    compute = _deferred.get(stored)
    if compute is None:
        return stored
    return compute()


@dataclass(frozen=True)
class Kept:
    """A weight, or a view of one, that is converted again whenever it is read.

    Attributes:
        stored: the stored weight.
        dtype: dtype of the copy.
        device: device of the copy.
        view: size, stride and offset of the view in the copy.
    """

    stored: Tensor
    dtype: torch.dtype
    device: torch.device
    view: tuple[torch.Size, tuple[int, ...], int]

    @property
    def shape(self) -> torch.Size:
        """Return the size, without a conversion."""
        return self.view[0]

    def convert(self) -> Tensor:
        """Return the converted weight or view."""
        copy = _lift(self.stored, self.dtype, self.device)
        return copy.detach().as_strided(*self.view)


def keep(weight: Tensor) -> Tensor | Kept:
    """Return a reference to a weight for use beyond its layer; it never keeps the copy alive."""
    whole = weight
    if weight._base is not None:
        whole = weight._base
    stored = _stored.get(whole)
    if stored is None:
        return weight.detach()
    view = weight.shape, weight.stride(), int(weight.storage_offset())
    return Kept(stored, weight.dtype, weight.device, view)


def read(kept: Tensor | Kept) -> Tensor:
    """Return the weight behind a reference made by `keep`."""
    if isinstance(kept, Tensor):
        return kept
    return kept.convert()


def hold(
    module: nn.Module, dtype: torch.dtype, place: Callable[[str], torch.device] | None = None
) -> set[torch.dtype]:
    """Keep the parameters of a module as stored, and convert each when it is read.

    Buffers, and parameters wider than `dtype`, are converted at once; buffers are also moved.

    Args:
        module: the model.
        dtype: dtype of the copies.
        place: returns the device of a module path; None: the device of its tensors.

    Returns:
        the stored dtypes that need conversion.
    """
    for path, part in module.named_modules():
        device = None
        if place is not None:
            device = place(path)
        if isinstance(part, nn.RNNBase):  # it passes its weights to torch without reading them
            part.to(device=device, dtype=dtype)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                kind = dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = buffer.to(device, kind)
        parameters = [p for p in part._parameters.values() if p is not None]
        for p in parameters:
            if p.is_floating_point() and not _narrower(p, dtype):
                p.data = p.data.to(dtype)
        if any(_lifts(p, dtype, device) for p in parameters):
            part.__dict__["_parameters"] = _Parameters(part._parameters, dtype, device)
    return {p.dtype for p in module.parameters() if _narrower(p, dtype)}


def precision(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's parameters as the module reads them."""
    for part in module.modules():
        if isinstance(part._parameters, _Parameters):
            return part._parameters.dtype
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def devices(module: nn.Module) -> Iterator[torch.device]:
    """Yield the devices on which the parts of a module read their parameters, in order."""
    for part in module.modules():
        table = part._parameters
        given = None
        if isinstance(table, _Parameters):
            given = table.device
        for p in dict.values(table):
            if p is not None:
                yield given or p.device


def has_lifted_weights(module: nn.Module) -> bool:
    """Say whether weights are converted on reading: stored weights have no gradient."""
    return any(isinstance(part._parameters, _Parameters) for part in module.modules())


def lifting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a held model in which `parameters()` returns converted weights."""

    def run(*args: Any) -> Any:
        _Parameters.running += 1
        try:
            return call(*args)
        finally:
            _Parameters.running -= 1

    return run


class _Parameters(dict[str, Any]):
    """The parameters of one module by name: stored, and converted on reading."""

    running = 0
    """Number of running model calls."""

    def __init__(
        self, parameters: dict[str, Any], dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__(parameters)
        self.dtype = dtype
        self.device = device

    def __getitem__(self, name: str) -> Any:
        return self._convert(super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set the stored weight; setting the copy that was read changes nothing."""
        if value is not None:
            value = _stored.get(value, value)
        super().__setitem__(name, value)

    def items(self) -> Any:
        parameters = super().items()
        if not self.running:
            return parameters
        return ((name, self._convert(p)) for name, p in parameters)

    def values(self) -> Any:
        parameters = super().values()
        if not self.running:
            return parameters
        return (self._convert(p) for p in parameters)

    def _convert(self, stored: Any) -> Any:
        if stored is None:
            return None
        return _lift(stored, self.dtype, self.device)


def _lift(stored: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return the converted copy of a stored weight; an existing copy is reused."""
    if not _lifts(stored, dtype, device):
        return stored
    kind = stored.dtype
    if _narrower(stored, dtype):
        kind = dtype
    place = device or stored.device
    known = _lifted.get(stored)
    copy = None
    if known is not None:
        copy = known()
    if copy is None or (copy.dtype, copy.device) != (kind, place):
        # A copy made in inference mode could never be saved for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            values = compute_values(stored)
            room = _room(values, kind, place)
            copy = nn.Parameter(room.copy_(values), requires_grad=False)
        _lifted[stored] = TensorWeakRef(copy)
        _stored[copy] = stored
    return copy


def _room(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a copy that the system gets back when the copy is freed.

    The C library does not return blocks of megabytes that lie between longer-lived ones: the heap
    would grow to several times the model.
    """
    count = like.numel()
    if device.type != "cpu" or count < LARGE or not like.is_contiguous():
        return torch.empty_like(like, dtype=dtype, device=device)
    # Anonymous pages go back to the system as soon as the last view of them is freed.
    pages = mmap(-1, count * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(like.shape)


def _lifts(p: Tensor, dtype: torch.dtype, device: torch.device | None) -> bool:
    return _narrower(p, dtype) or device not in (None, p.device)


def _narrower(p: Tensor, dtype: torch.dtype) -> bool:
    return p.is_floating_point() and torch.finfo(p.dtype).bits < torch.finfo(dtype).bits
