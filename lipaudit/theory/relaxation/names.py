"""What functions, methods and attributes of tensors are to a form, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PARTS = ("centre", "dense", "blocks", "slack")
"""Attributes of a form that a quotient does not have while it waits."""

METADATA = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "size", "dim", "ndimension", "len"),
        *("numel", "nelement", "stride", "is_contiguous", "storage_offset", "element_size"),
        *("itemsize", "nbytes", "hash", "names", "requires_grad", "grad", "grad_fn", "is_leaf"),
        *("is_cpu", "is_cuda", "is_mps", "is_xpu", "is_meta", "is_mkldnn", "is_sparse"),
        *("is_nested", "is_quantized", "is_floating_point", "is_complex", "get_device"),
        *("is_sparse_csr", "is_inference", "is_same_size"),
    )
)
"""What a tensor says of itself without its numbers."""

VIEWS = frozenset(
    (
        *("transpose", "swapaxes", "swapdims", "permute", "movedim", "squeeze", "unsqueeze"),
        *("reshape", "view", "flatten", "unflatten", "unbind", "chunk", "split", "tensor_split"),
        *("narrow", "select", "getitem", "expand", "expand_as", "T", "mT", "data", "real"),
        "broadcast_to",
        *("view_as", "reshape_as", "unfold", "type"),
        *("contiguous", "to", "float", "double", "type_as", "detach", "dropout"),
    )
)
"""Operations whose result may lie in the memory of their argument."""


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, operator, method or attribute of tensors."""
    name = func.__name__
    if name in ("__get__", "__set__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        return attribute if name == "__get__" else f"assignment to {attribute}"
    # float(x) takes the number of a tensor, x.float() casts it.
    return name[2:-2] if name.startswith("__") and name != "__float__" else name


def takes_a_view(index: Any) -> bool:
    """Say whether what an index takes stays where it is; tensors and lists of places copy.

    A tensor without axes is a number.
    """
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(part, list) or getattr(part, "ndim", 0) for part in parts)
