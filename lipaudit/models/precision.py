"""The precision of a run: of its arithmetic, and of weights that are stored in another one.

After `convert_on_read`, a module keeps its parameters as stored (in half precision, on the CPU, in
a mapped file), and `parameters()` returns these. `module.weight` returns a copy in the precision
and on the device of the run, converted when a layer reads it and freed after use. While the model
runs, `parameters()` returns such copies, too, because some models read their own dtype and device.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from mmap import mmap
from threading import Lock
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

HALF = {torch.float16, torch.bfloat16}
# Devices that have their own random state.
SEEDED = ("cuda", "xpu")


def _repair_gradient(normalise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return batch or instance normalisation whose gradient is right on a CPU, too.

    For a single sample on a CPU, torch 2.14 computes a wrong gradient if the incoming gradient has
    its channels last in memory, as behind `x.flatten(2).transpose(1, 2)` in a patch embedding. A
    contiguous incoming gradient is safe.

    Args:
        normalise: `torch.batch_norm` or `torch.instance_norm`.
    """

    def compute(*args: Any) -> Tensor:
        """Normalise. A hook makes the gradient contiguous where torch computes it wrongly."""
        output = normalise(*args)
        # torch's error: a single sample on a CPU, whose incoming gradient has channels last.
        if output.requires_grad and len(output) == 1 and output.device.type == "cpu":
            output.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return output

    return compute


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute in the tensors' own precision, with gradients: no TF32, autocast or inference mode.

    Compiled code runs as plain Python, and `nn.TransformerEncoder` without its fast path, because
    compiled code and the fast path hide their operations. The fast path also computes another
    function: it sets outputs at padded tokens to 0, and torch takes it only without gradients.

    All settings are restored at the end of the block. With TF32, only three digits of a spectral
    norm would be right. A model may still change settings itself, for example by
    `torch.backends.cudnn.flags()`: the model is measured with its own settings.
    """
    with ExitStack() as stack:
        stack.enter_context(_PROCESS.change_settings())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


@dataclass
class _Process:
    """The settings of torch that all threads of the process share.

    Blocks of several threads may overlap: the first one changes the settings, and the last one
    restores them.

    Attributes:
        lock: held while the settings change.
        blocks: number of blocks that need the changed settings now.
        changes: restores the settings when it is closed.
        forces_eager: whether compiled code runs as plain Python now.
    """

    lock: Lock = field(default_factory=Lock)
    blocks: int = 0
    changes: ExitStack = field(default_factory=ExitStack)
    forces_eager: bool = False

    @contextmanager
    def change_settings(self) -> Iterator[None]:
        """Change the settings for a block, for which `exact_arithmetic` says why."""
        with self.lock, ExitStack() as stack:
            if self.blocks == 0:
                _change_settings(stack)
            # `torch._dynamo` is torch's compiler. If nothing has imported it, no code is compiled,
            # and importing it here would take a second. It may be imported while another block
            # runs, so that each block looks for it.
            if not self.forces_eager and "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.forces_eager = True
            self.changes.enter_context(stack.pop_all())
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if self.blocks == 0:
                    self.forces_eager = False
                    self.changes.close()


_PROCESS = _Process()


def _change_settings(stack: ExitStack) -> None:
    """Change the settings that every run has, until the stack ends.

    `_Process.change_settings` sets the one of torch's compiler, if the process has loaded it.
    """
    mha = torch.backends.mha
    stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
    mha.set_fastpath_enabled(False)
    # On a CPU, torch's gradient of both functions is wrong for a single sample if the incoming
    # gradient has its channels last in memory.
    for name in ("batch_norm", "instance_norm"):
        repaired = _repair_gradient(getattr(torch, name))
        stack.enter_context(patch.object(torch, name, repaired))
    _switch_tf32_off(stack)


def _switch_tf32_off(stack: ExitStack) -> None:
    """Switch TF32 off, so that float32 products are computed in float32, until the stack ends.

    torch has two generations of settings. The older ones are `cudnn.allow_tf32` and
    `torch.set_float32_matmul_precision`. Since torch 2.9, each backend and operation also has a
    newer setting, `fp32_precision`. Writing an older setting is always allowed, and also writes
    newer ones. Reading an older setting raises an error if it says "TF32" and the newer ones do
    not, or the other way round. So the settings change in three steps:

    1. The newer settings become "none" (no value).
    2. The older ones are read and switched off.
    3. The newer ones become "ieee" (plain float32).

    The stack restores first the older settings, and then the newer ones.
    """
    backends: Any = torch.backends
    cudnn, onednn = backends.cudnn, backends.mkldnn
    settings = []  # objects with `fp32_precision`: backends before their operations
    if hasattr(cudnn, "conv"):  # torch 2.9 and later
        settings = [backends, cudnn, onednn, backends.cuda.matmul, onednn.matmul]
        settings += [cudnn.conv, cudnn.rnn, onednn.conv, onednn.rnn]
    # Step 1. An operation without a value of its own returns the value of its backend. Once the
    # backend is "none", the operation returns its own value, so that the stack restores only that.
    for setting in settings:
        stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
        setting.fp32_precision = "none"
    # Step 2.
    try:
        allow_tf32 = cudnn.allow_tf32
    except RuntimeError:
        # The older setting contradicts the newer ones. These are "none", which counts as "no
        # TF32", so the older setting is True.
        allow_tf32 = True
    stack.callback(setattr, cudnn, "allow_tf32", allow_tf32)
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    # Step 3.
    for setting in settings:
        setting.fp32_precision = "ieee"


_CASTS = {Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16}
"""Methods that cast a tensor, and the dtype of their result."""


class Widening(TorchFunctionMode):
    """Run a float64 model without its casts to lower precisions.

    Many models cast norms, rotary positions or softmax to float32, whatever the dtype of their
    weights. In a float64 model this would leave seven of sixteen digits.

    Attributes:
        halves: the half precisions that the model would have used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.halves: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with float64 in place of the lower precisions it asks for.

        Lower precisions come from a method such as `x.half()`, or from an argument such as
        `x.to(torch.half)`. Half precisions among them are recorded.
        """
        kwargs = kwargs or {}
        # The dtype of a cast is that of its method, or one of the arguments.
        for dtype in (_CASTS.get(func), *args, *kwargs.values()):
            if dtype is torch.half or dtype is torch.bfloat16:
                self.halves.add(dtype)
        if func in _CASTS:
            return Tensor.double(*args, **kwargs)
        if func is not Tensor.view:  # `view(dtype)` reads the same bits and casts nothing
            args = [_widen(value) for value in args]
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def widen_casts(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Leave out a model's own casts to lower precision inside the block, in a float64 run."""
    return Widening() if dtype == torch.float64 else nullcontext()


def _widen(value: Any) -> Any:
    """Return float64 if the argument is a lower dtype, else the argument as it is."""
    if isinstance(value, torch.dtype) and value in _CASTS.values():
        return torch.float64
    return value


# A forward pass: (samples, mask) -> output.
Forward = Callable[[Tensor, Tensor | None], Tensor]


def deploy(run: Forward, device: torch.device, name: str) -> Forward:
    """Return a model's forward pass as it runs under `torch.autocast`.

    `exact_arithmetic` switches autocast off; the returned pass switches autocast on again, also
    inside of `exact_arithmetic`. Modules that cast or switch autocast off themselves still do so.

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
    """Return values in float32 if they are in half precision, in which sums would lose digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def can_autocast(device: torch.device, name: str) -> bool:
    """Say whether torch supports autocast to a dtype on a device, by a product of matrices.

    Without this support, older versions of torch only warn, and compute in float32.

    Args:
        device: the device.
        name: the dtype: bfloat16 or float16.
    """
    dtype = getattr(torch, name)
    ones = torch.ones(2, 2, device=device)
    with warnings.catch_warnings(action="ignore"), suppress(RuntimeError):
        with torch.autocast(device.type, dtype=dtype):
            product = ones @ ones
        return product.dtype == dtype
    return False  # torch has raised an error


def borrow_gradient(values: Tensor, exact: Tensor) -> Tensor:
    """Return the values of one computation of a quantity, with the gradient of another one.

    Args:
        values: the quantity in rounded arithmetic, without a graph.
        exact: the same quantity in exact arithmetic, with its graph.
    """
    return _BorrowedGradient.apply(values, exact)


class _BorrowedGradient(torch.autograd.Function):
    """(values, exact) -> values, with the gradient of `exact`."""

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
    accelerators = [device] if device.type in SEEDED else []  # besides the CPU
    kind = device.type if accelerators else "cuda"  # `fork_rng` wants a type, also for no device
    with torch.random.fork_rng(accelerators, device_type=kind), ExitStack() as undo:
        undo.callback(np.random.set_state, np.random.get_state())
        np.random.seed(seed % 2**32)  # numpy takes 32 bits
        torch.default_generator.manual_seed(seed)
        for accelerator in accelerators:
            backend = torch.get_device_module(accelerator)
            with backend.device(accelerator):
                backend.manual_seed(seed)
        yield


# Copies with at least this many entries get separate memory pages.
LARGE = 2**16

# Converted copy of each stored weight in use; tied weights share one copy.
_copies: MutableMapping[Tensor, TensorWeakRef] = WeakTensorKeyDictionary()
# Stored weight of each converted copy.
_originals: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
# Function that computes the values of each deferred weight.
_deferred: MutableMapping[Tensor, Callable[[], Tensor]] = WeakTensorKeyDictionary()
# The dtype of deferred weights: narrower than that of any run, so they are converted on reading.
DEFERRED = torch.float8_e5m2


def defer(compute: Callable[[], Tensor], shape: torch.Size) -> nn.Parameter:
    """Return a placeholder for a weight, which takes no memory.

    `convert_on_read` must prepare the module that gets the placeholder. The values are then
    computed whenever a layer reads the weight.

    Args:
        compute: returns the values.
        shape: their shape.
    """
    # A single NaN, expanded to the shape of the weight. Code that takes the placeholder for values
    # by mistake gets NaN. `DEFERRED` is its dtype, which marks placeholders.
    nan = torch.tensor(torch.nan).to(DEFERRED)
    weight = nn.Parameter(nan.expand(shape), requires_grad=False)
    _deferred[weight] = compute
    return weight


def compute_values(stored: Tensor) -> Tensor:
    """Return the values of a stored weight; compute them if the weight is deferred (`defer`)."""
    compute = _deferred.get(stored)
    if compute is None:
        return stored
    return compute()


@dataclass(frozen=True)
class WeightReference:
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
        copy = _convert(self.stored, self.dtype, self.device)
        return copy.detach().as_strided(*self.view)


def refer_to_weight(weight: Tensor) -> Tensor | WeightReference:
    """Return a reference to a converted weight that does not keep the converted copy in memory.

    The reference holds the stored weight, and converts it again on request. A weight that was not
    converted is returned itself.

    Args:
        weight: a weight as a layer reads it, or a view of one.
    """
    whole = weight
    if weight._base is not None:  # a view
        whole = weight._base
    stored = _originals.get(whole)  # the stored weight from which `whole` was converted
    if stored is None:
        return weight.detach()
    view = weight.shape, weight.stride(), int(weight.storage_offset())
    return WeightReference(stored, weight.dtype, weight.device, view)


def read_weight(reference: Tensor | WeightReference) -> Tensor:
    """Return the weight behind a reference made by `refer_to_weight`."""
    if isinstance(reference, Tensor):
        return reference
    return reference.convert()


def convert_on_read(
    module: nn.Module, dtype: torch.dtype, place: Callable[[str], torch.device] | None = None
) -> set[torch.dtype]:
    """Keep the parameters of a module as stored, and convert each when it is read.

    Buffers, and parameters wider than `dtype`, are converted at once; buffers are also moved.

    Args:
        module: the model.
        dtype: dtype of the copies.
        place: returns the device of a module path; None: the device of its tensors.

    Returns:
        The stored dtypes that need conversion.
    """
    for path, part in module.named_modules():
        device = None
        if place is not None:
            device = place(path)
        # Recurrent layers do not look their weights up in the table that converts them (below).
        # So convert these weights now.
        if isinstance(part, nn.RNNBase):
            part.to(device=device, dtype=dtype)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                buffer_dtype = dtype if buffer.is_floating_point() else buffer.dtype
                part._buffers[name] = buffer.to(device, buffer_dtype)
        parameters = [p for p in part._parameters.values() if p is not None]
        for p in parameters:
            if p.is_floating_point() and not _is_narrower(p, dtype):
                p.data = p.data.to(dtype)
        if any(_needs_conversion(p, dtype, device) for p in parameters):
            # From now on `module.weight` looks the weight up in this table. The table converts it.
            part.__dict__["_parameters"] = _Parameters(part._parameters, dtype, device)
    return {p.dtype for p in module.parameters() if _is_narrower(p, dtype)}


def find_dtype(module: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of a module's parameters, as the module reads them."""
    for part in module.modules():
        # After `convert_on_read`, the table of parameters has the dtype of the converted copies.
        if isinstance(part._parameters, _Parameters):
            return part._parameters.dtype
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def list_devices(module: nn.Module) -> Iterator[torch.device]:
    """Yield the device of each parameter of a module, as the module reads it."""
    for part in module.modules():
        table = part._parameters
        # After `convert_on_read`, the table gives copies of the weights, maybe on another device.
        device_of_copies = None
        if isinstance(table, _Parameters):
            device_of_copies = table.device
        for p in dict.values(table):  # as stored: `table.values()` may convert them
            if p is not None:
                yield device_of_copies or p.device


def has_converted_weights(module: nn.Module) -> bool:
    """Say whether weights are converted on reading: stored weights have no gradient."""
    return any(isinstance(part._parameters, _Parameters) for part in module.modules())


def lift_parameters(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's call, during which `parameters()` gives converted copies of the weights.

    The model is one that `convert_on_read` has prepared: otherwise `parameters()` gives the stored
    weights. The model's own code may read the dtype or device of its parameters. It must then find
    those of the run.
    """

    def run(*args: Any) -> Any:
        """Call the model. Until the call ends, `parameters()` gives converted weights."""
        # A count, because a call may contain another one. Above 0, copies are given.
        _Parameters.running += 1
        try:
            return call(*args)
        finally:
            _Parameters.running -= 1

    return run


class _Parameters(dict[str, Any]):
    """The parameters of one module by name: stored, and converted on reading.

    A module reads `module.weight` by `__getitem__`; `parameters()` uses `items` and `values`.
    """

    running = 0
    """Number of running model calls, of all modules."""

    def __init__(
        self, parameters: dict[str, Any], dtype: torch.dtype, device: torch.device | None
    ) -> None:
        """Keep stored parameters by name, to be converted whenever they are read.

        `dtype` and `device` are those of the converted copies; no device: that of the parameter.
        """
        super().__init__(parameters)
        self.dtype = dtype
        self.device = device

    def __getitem__(self, name: str) -> Any:
        return self._convert(super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a stored weight of this table, which gives converted copies to its readers.

        Code may read a converted copy and write it back, as in `m.weight = m.weight`. Then the
        stored weight from which the copy was made is set, not the copy.
        """
        if value is not None:
            value = _originals.get(value, value)
        super().__setitem__(name, value)

    def items(self) -> Any:
        """Return the names and weights of this table: converted while a model runs, else stored.

        `Module.named_parameters` uses this method.
        """
        parameters = super().items()
        if not self.running:
            return parameters
        return ((name, self._convert(p)) for name, p in parameters)

    def values(self) -> Any:
        """Return the weights of this table: converted while a model runs, else as stored."""
        parameters = super().values()
        if not self.running:
            return parameters
        return (self._convert(p) for p in parameters)

    def _convert(self, stored: Any) -> Any:
        if stored is None:  # such as the bias of a layer without one
            return None
        return _convert(stored, self.dtype, self.device)


def _convert(stored: Tensor, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """Return a stored weight in the dtype and on the device of the run.

    If a converted copy is in use at the moment, it is shared. If no conversion is needed, the
    stored weight itself is returned.

    Args:
        stored: the weight.
        dtype: dtype of the copy, if the weight is stored in a narrower dtype.
        device: device of the copy; None: the device of the weight.
    """
    if not _needs_conversion(stored, dtype, device):
        return stored
    copy_dtype = stored.dtype
    if _is_narrower(stored, dtype):
        copy_dtype = dtype
    copy_device = device or stored.device
    # `_copies` refers to the last copy of each stored weight, without keeping it in memory. The
    # copy may have been made for another dtype or device.
    weak_reference = _copies.get(stored)
    copy = None
    if weak_reference is not None:
        copy = weak_reference()  # None if it has been freed
    if copy is None or (copy.dtype, copy.device) != (copy_dtype, copy_device):
        # Not in inference mode: such a copy could never be saved for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            values = compute_values(stored)
            memory = _allocate(values, copy_dtype, copy_device)
            copy = nn.Parameter(memory.copy_(values), requires_grad=False)
        _copies[stored] = TensorWeakRef(copy)
        _originals[copy] = stored
    return copy


def _allocate(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an empty tensor whose memory goes back to the system when the tensor is freed.

    The C library keeps a freed block if longer-lived blocks surround it. Copies of weights in its
    memory would make the process grow to several times the size of the model.

    Args:
        like: a tensor of the same shape.
        dtype: dtype of the result.
        device: device of the result.
    """
    count = like.numel()
    # torch's own memory will do on a GPU, and for small or strided tensors.
    if device.type != "cpu" or count < LARGE or not like.is_contiguous():
        return torch.empty_like(like, dtype=dtype, device=device)
    # Anonymous pages go back to the system as soon as the last view of them is freed.
    return torch.frombuffer(mmap(-1, count * dtype.itemsize), dtype=dtype).view(like.shape)


def _needs_conversion(p: Tensor, dtype: torch.dtype, device: torch.device | None) -> bool:
    """Say whether a parameter is narrower than `dtype`, or on another device than `device`."""
    return _is_narrower(p, dtype) or device not in (None, p.device)


def _is_narrower(p: Tensor, dtype: torch.dtype) -> bool:
    return p.is_floating_point() and torch.finfo(p.dtype).bits < torch.finfo(dtype).bits
