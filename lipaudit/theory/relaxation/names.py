"""What functions, methods and attributes of tensors are to a form, by name."""

from __future__ import annotations

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
        *("contiguous", "to", "float", "double", "type_as", "detach", "dropout"),
    )
)
"""Operations whose result may lie in the memory of their argument."""
