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
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_native_multi_head",
    "flex_attention",
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
        # The marks of tensors by the address of their memory: bits that say whether a tensor
        # depends on the sample, and whether it is a product such as q k^T (`_compute_marks`). The
        # weak reference keeps torch from giving this address to other memory.
        self._marks: dict[int, tuple[StorageWeakRef, int]] = {}

    def list_unread(self, modules: Iterable[str]) -> list[str]:
        """Return the modules that use more attention than their known layers, with lines of code.

        Args:
            modules: the module of each known attention layer, once for each layer.
        """
        layers = Counter(modules)
        return [
            f"{module or 'the model itself'} at {self.lines[module]}"
            for module, count in self.counts.items()
            if count > layers[module]
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op of torch, and mark its result by how it depends on the sample.

        Marks are bits of one number, 0 for a constant. One bit says that a tensor depends on the
        sample, another one that it is a pair: a product of two such tensors, like q k^T.
        """
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        marks_of_args = [self._find_marks(t) for t in tensors]
        # The result does not depend on the sample if no argument does, or if the op reads only the
        # shape of its arguments (zeros_like, new_ones, empty).
        if not any(marks_of_args) or name.endswith("_like") or name.startswith(_NEW):
            return out
        name = name.rstrip("_")  # in place: `add_` counts as `add`
        marks = self._compute_marks(name, args, marks_of_args, out)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                # Indices and boolean masks depend on the sample, but are no pairs.
                is_number = t.is_floating_point() or t.is_complex()
                self.mark(t, marks if is_number else _SAMPLE)
        return out

    def _compute_marks(
        self, name: str, args: tuple[Any, ...], marks_of_args: list[int], out: Any
    ) -> int:
        """Return the marks of the result of an op, and count the op if it is a use of attention.

        At least one argument depends on the sample, and so does the result. Marks are bits of one
        number, 0 for a constant:

            _SAMPLE  the tensor depends on the sample
            _OUTER   its entries are of all pairs of entries of two tensors, like q_i + k_j
            _PAIR    it is a product of two tensors, like q k^T, or a function of it, like P

        Args:
            name: the op.
            args: its arguments.
            marks_of_args: the marks of the tensors among the arguments.
            out: its result.
        """
        if name.startswith(_FUSED):
            if all(marks_of_args[:3]):  # q, k and v depend on the sample
                return self._count_use()
            return _SAMPLE
        if name in _PRODUCTS:
            first = _PRODUCTS[name]  # 0, or 1 if a sum comes first, as in addmm(input, a, b)
            left, right = args[first : first + 2]
            return self._mark_product(left, right, out)
        if name in _ENTRYWISE and len(marks_of_args) == 2 and all(marks_of_args):
            return self._mark_entrywise(name, args, marks_of_args, out)
        # Any other op: the result has the marks of all arguments. Of gather and the like, only the
        # first tensor counts, not the index.
        counted = marks_of_args[:1] if name in _CHOICES else marks_of_args
        marks = _SAMPLE
        for marks_of_arg in counted:
            marks |= marks_of_arg
        if name in _SOFTMAXES and marks & _OUTER:  # additive attention, softmax(q_i + k_j)
            marks |= _PAIR
        return marks

    def _mark_entrywise(
        self, name: str, args: tuple[Any, ...], marks_of_args: list[int], out: Any
    ) -> int:
        """Return the marks of an entry-wise sum or product of two tensors, and count uses.

        Both tensors depend on the sample, and so does the result. Marks are bits of one number.
        _SAMPLE: the tensor depends on the sample. _PAIR: it is a product of two tensors, like
        q k^T, or a function of it, like P. _OUTER: its entries are of all pairs of entries of two
        tensors, like q_i + k_j. The result of a use of attention has the mark _SAMPLE alone.

        Args:
            name: mul, add, sub or div.
            args: the two tensors.
            marks_of_args: the marks of both.
            out: the result.
        """
        left, right = args[:2]
        left_marks, right_marks = marks_of_args
        marks = left_marks | right_marks
        # Broadcasting to more entries than either tensor has: all pairs of their entries.
        if out.numel() > max(left.numel(), right.numel()):
            # A product with a pair is P_ij v_j, which the model sums over the keys j later.
            if marks & _PAIR and name == "mul":
                return self._count_use()
            return marks | _OUTER  # such as q_i + k_j
        left_pair = left_marks & _PAIR
        right_pair = right_marks & _PAIR
        # Both are pairs, such as q k^T + q r^T, or none is, such as x + y.
        if left_pair == right_pair:
            return marks
        pair = left if left_pair else right
        # The pair has one number for each row of the other tensor: an attention weight for each
        # value vector, P_i v_i.
        if pair.shape[-1:] == (1,) and out.shape[-1:] != (1,):
            return self._count_use()
        if name == "add":  # a residual stream, to which the pair is added: x + f(P)
            return _SAMPLE
        # A function of the pair, such as P times a gate. A difference counts as one, too: at worst
        # a use is counted that is none.
        return marks

    def _mark_product(self, left: Any, right: Any, out: Any) -> int:
        """Return the marks of a matrix product, and count it if it is a use of attention, P v.

        A "pair" is a product of two tensors that depend on the sample, like q k^T, or a function
        of it, like P. At least one factor depends on the sample. The four cases are

            a constant times any      a linear map; the result is no pair
            no pair times no pair     q k^T: a pair
            a pair times a pair       P P: a pair
            a pair times no pair      P v: a use of attention, unless v has a single channel

        Marks are bits of one number, 0 for a constant. _SAMPLE: the tensor depends on the sample.
        _OUTER: it has an entry for each pair of tokens, like q_i + k_j. _PAIR: it is a pair.
        """
        left_marks = self._find_marks(left)
        right_marks = self._find_marks(right)
        if not (left_marks and right_marks):
            # One factor is a constant (a weight): a linear map.
            marks = _SAMPLE
            # A map to one column (or a matrix times a vector) gives one number for each pair of
            # tokens, as in additive attention, w tanh(q_i + k_j): keep _OUTER. A map to several
            # columns makes new features.
            if out.ndim < 2 or out.shape[-1] == 1:
                marks |= (left_marks | right_marks) & _OUTER
            return marks
        left_pair = left_marks & _PAIR
        right_pair = right_marks & _PAIR
        if left_pair == right_pair:  # q k^T, or a product of two pairs
            return _SAMPLE | _PAIR
        # The size of the axis of channels of v: the last axis in P v, and the last but one in
        # v^T P^T. With a single channel, the factor holds no values, and the result is a pair.
        channels = left.shape[-2:-1] if right_pair else right.shape[-1:]
        if channels == (1,):
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
        """Mark a tensor and all views of its memory: marks are stored by the memory's address.

        Marks are bits of one number. If t is only a part of its memory, the earlier marks of this
        memory stay, and the new ones are added.
        """
        if t.layout == torch.strided:
            storage = t.untyped_storage()
            is_whole = t.numel() * t.element_size() == storage.nbytes()
            earlier_marks = 0 if is_whole else self._find_marks(t)
            # The reference prevents reuse of the address, without keeping the memory.
            self._marks[storage._cdata] = (_reference(storage), earlier_marks | marks)


_reference: Callable[[Any], StorageWeakRef] = StorageWeakRef


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
