"""Count the places where a model weights values by products of activations, in any code.

`events` reads attention by the functions that a model calls. The mode below finds the rest: it
follows torch's ops, below autograd, `vmap`, TorchScript and `no_grad`.

    s = q k^T    a product of two tensors that depend on the sample: a "pair"
    o = f(s) v   a product of a function of a pair with a third tensor: a "use" of attention
    o * g(s)     a third tensor, scaled by a smaller function of a pair: a use

The result of a linear map of a pair is no pair. Fused attention is a use. Sums and products of all
pairs of entries, q_i + k_j, become a pair by a softmax.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Marks of a tensor, bits of one number. It depends on the sample.
_SAMPLE = 1
# Its entries are of all pairs of entries of two tensors, like q_i + k_j.
_OUTER = 2
# It is a "pair": a product of two tensors that depend on the sample, like q k^T, or a function of
# such a product.
_PAIR = 4
# Ops that multiply two tensors: the position of the first tensor among the arguments of the op.
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "convolution": 0, "_cdist_forward": 0}
_PRODUCTS |= {"addmm": 1, "baddbmm": 1, "addmv": 1}
_ENTRYWISE = {"mul", "add", "sub", "div"}
_SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax"}
_CHOICES = {"gather", "index", "index_select", "embedding", "take"}
_FUSED = (
    *("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    *("_native_multi_head", "flex_attention"),
)
_NEW = ("new_", "empty")
_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, Path(__file__).parents[1]))
_EINSUMS = {"einops", "einx"}
"""Packages that rearrange axes: the line of a model is the one that calls them."""


class Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, count the uses of attention (values weighted by q k^T) in each module.

    Args:
        where: returns the name of the running module.

    Attributes:
        counts: number of uses in each module.
        lines: the line of code of the first use, `file:line`.
    """

    supports_higher_order_operators = True  # flex_attention is one

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping this mode for compilers: the import takes 2 s of CPU time."""
        return False

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()  # uses of attention by module
        self.lines: dict[str, str] = {}  # the line of code of the first use, by module
        self._where = where  # returns the name of the running module
        # The marks of tensors by the address of their memory. The weak reference keeps torch from
        # giving this address to other memory.
        self._marks: dict[int, tuple[StorageWeakRef, int]] = {}

    def beyond(self, modules: Iterable[str]) -> list[str]:
        """Return the modules, with lines of code, that use more attention than the known layers.

        Args:
            modules: the module of each known attention layer.
        """
        layers = Counter(modules)
        return [
            f"{module or 'the model itself'} at {self.lines[module]}"
            for module, count in self.counts.items()
            if count > layers[module]
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of torch, and mark its result by how it depends on the sample.

        The marks are bits: depends on the sample; is a pair, such as q k^T (see `_mark_product`).
        """
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        given = [self._find_marks(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        # Nothing depends on the sample, or only the shape of the result does.
        if not any(given) or name.endswith("_like") or name.startswith(_NEW):
            return out
        if name in _IN_PLACE:
            name = name.rstrip("_")
        marks = self._compute_marks(name, args, given, out)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                # Indices and boolean masks depend on the sample, but are no pairs.
                is_number = t.is_floating_point() or t.is_complex()
                self.mark(t, marks if is_number else _SAMPLE)
        return out

    def _compute_marks(self, name: str, args: tuple[Any, ...], given: list[int], out: Any) -> int:
        """Return the marks of the result of an op, and count the op if it is a use of attention.

        Marks: _SAMPLE depends on the sample; _OUTER, like q_i + k_j, on all pairs of entries of
        two tensors; _PAIR is a product of two tensors, like q k^T, or a function of it.

        Args:
            name: the op.
            args: its arguments.
            given: the marks of its tensors.
            out: its result.
        """
        if name.startswith(_FUSED):
            if all(given[:3]):  # q, k and v depend on the sample
                return self._count_use()
            return _SAMPLE
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name] :][:2]
            return self._mark_product(left, right, out)
        if name in _ENTRYWISE and len(given) == 2 and all(given):
            return self._mark_entrywise(name, args, given, out)
        counted = given[:1] if name in _CHOICES else given  # an index does not count
        marks = _SAMPLE
        for each in counted:
            marks |= each
        if name in _SOFTMAXES and marks & _OUTER:  # additive attention
            marks |= _PAIR
        return marks

    def _mark_entrywise(self, name: str, args: tuple[Any, ...], given: list[int], out: Any) -> int:
        """Return the marks of an entry-wise sum or product of two tensors, and count uses.

        Both tensors depend on the sample. Arguments are those of `_compute_marks`.
        """
        left, right = args[:2]
        marks = given[0] | given[1]
        # Broadcasting: each entry of the result depends on a pair of entries of two tensors.
        if out.numel() > max(left.numel(), right.numel()):
            # Weights times values, before a sum over the keys.
            if marks & _PAIR and name == "mul":
                return self._count_use()
            return marks | _OUTER
        if not (given[0] ^ given[1]) & _PAIR:  # both tensors are pairs, or none
            return marks
        pair = left if given[0] & _PAIR else right
        # Each row of the other tensor is scaled by one number of the pair: a value that attention
        # weights.
        if pair.shape[-1:] == (1,) and out.shape[-1:] != (1,):
            return self._count_use()
        if name == "add":  # a residual stream, to which the pair is added
            return _SAMPLE
        return marks

    def _mark_product(self, left: Any, right: Any, out: Any) -> int:
        """Return the marks of a matrix product, and count it if it weights values by a pair.

        A product of two tensors that depend on the sample is a pair (q k^T); a product of a pair
        with a third one is a use of attention (P v). A product of two pairs, or of two tensors
        that are no pairs, is a pair.

        Marks are bits. _SAMPLE: the tensor depends on the sample. _OUTER: it has an entry for each
        pair of tokens, as the sum q_i + k_j has. _PAIR: it is a pair, as above.
        """
        of_left = self._find_marks(left)
        of_right = self._find_marks(right)
        if not (of_left and of_right):
            # One factor is a weight: a linear map, whose result is no pair.
            marks = _SAMPLE
            # A map to one column scores each entry, as in additive attention w tanh(q_i + k_j).
            if out.ndim == 1 or out.shape[-1] == 1:
                marks |= (of_left | of_right) & _OUTER
            return marks
        one_is_pair = (of_left ^ of_right) & _PAIR  # exactly one
        # If one is a pair: the axis of the other factor that the product keeps, the channels of
        # the values. With a single channel, this factor holds no values, and the result is a pair.
        channels = left.shape[-2:-1] if of_right & _PAIR else right.shape[-1:]
        if tuple(channels) == (1,) or not one_is_pair:
            return _SAMPLE | _PAIR
        return self._count_use()

    def _count_use(self) -> int:
        """Count a use of attention in the running module, and return the marks of its result."""
        module = self._where()
        self.counts[module] += 1
        if module not in self.lines:
            self.lines[module] = line_of_code()
        return _SAMPLE

    def _find_marks(self, t: object) -> int:
        if not isinstance(t, Tensor) or t.layout != torch.strided:
            return 0
        return self._marks.get(t.untyped_storage()._cdata, (None, 0))[1]

    def mark(self, t: Tensor, marks: int = _SAMPLE) -> None:
        """Mark a tensor and all views of its memory.

        If t is only a part of its memory, the marks of the whole memory stay, and marks are added.
        """
        if t.layout == torch.strided:
            storage = t.untyped_storage()
            entire = t.numel() * t.element_size() == storage.nbytes()
            before = 0 if entire else self._find_marks(t)
            # The reference prevents reuse of the address, without keeping the memory.
            self._marks[storage._cdata] = (_reference(storage), before | marks)


_reference: Callable[[Any], StorageWeakRef] = StorageWeakRef
_IN_PLACE = {f"{name}_" for name in _ENTRYWISE}


def line_of_code() -> str:
    """Return the line of code of the model that called torch, `file:line`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_library(frame: FrameType) -> bool:
    """Say whether a line is code of torch, lipaudit or a package for axes, not of the model."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return frame.f_code.co_filename.startswith(_LIBRARIES) or package in _EINSUMS
