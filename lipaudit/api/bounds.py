"""The bounds of one attention layer on bare tensors: `lipaudit.bounds.sharp(x, wq, wk, wv)`.

Every bound of the catalogue is a function here, under its name and with the same arguments:
`sharp`, `theorem3`, `theorem3_g1`, `appendix_c`, `castin`, `mean_field`, `hu`, and those that
plug-ins add. `exact` is the norm that they bound.

    >>> import torch, lipaudit
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> eye = torch.eye(2)
    >>> norm, bound = exact(x, eye, eye, eye), lipaudit.bounds.sharp(x, eye, eye, eye)
    >>> bool(norm <= bound)
    True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipaudit.errors import UsageError
from lipaudit.results.bounds import catalogue
from lipaudit.theory.bounds.head_bounds import head_bounds
from lipaudit.theory.exact.head_norms import head_norms
from lipaudit.theory.heads import Heads, Projection


def heads(
    x: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    *,
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
) -> Heads:
    """Return softmax(s X W_Q (X W_K)^T + mask) X W_V as the theory takes it, in float64.

    Args:
        x: tokens X, (tokens, D) or (batch, tokens, D).
        wq: W_Q, (D, d) or (heads, D, d).
        wk: W_K, of the same shape.
        wv: W_V, (D, d_v) or (heads, D, d_v).
        biases: of q, k and v, each (d,) or (heads, d), or None.
        scale: s; 1 / sqrt(d) if None.
        causal: whether no query sees later keys.
        mask: added to the logits, broadcastable to (batch, heads, tokens, tokens).

    Raises:
        UsageError: shapes that do not fit.
    """
    x = (x if x.ndim == 3 else x[None]).to(torch.float64)
    maps = [_projection(w, b) for w, b in zip((wq, wk, wv), biases, strict=True)]
    for projection in maps:
        if projection.weight.shape[:2] != (len(maps[0].weight), x.shape[-1]):
            raise UsageError(
                f"weights {tuple(projection.weight.shape)} do not fit tokens {tuple(x.shape)}",
                "W_Q, W_K and W_V are (D, d) or (heads, D, d), tokens (batch, tokens, D).",
            )
    q, k, v = (_applied(x, projection) for projection in maps)
    size = q.shape[-1] ** -0.5 if scale is None else scale
    return Heads(
        x=x,
        x_kv=None,
        q=q,
        k=k,
        v=v,
        scale=x.new_full((1, 1), size),
        bias=None if mask is None else _four(mask).to(torch.float64),
        causal=causal,
        valid=None,
        to_q=maps[0],
        to_k=maps[1],
        to_v=maps[2],
        out=None,
        sample=torch.arange(len(x), device=x.device),
    )


def exact(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, **how: Any) -> Tensor:
    """Return ||J||, the spectral norm of each head's Jacobian at x, to 1e-6.

    Arguments are those of `heads`; the shape is (batch, heads), less an axis for each that the
    tokens and the weights came without.
    """
    layer = heads(x, wq, wk, wv, **how)
    norms = head_norms(layer, seeds=range(len(layer.x)), tol=1e-6, within=1e-6)
    return _shaped(norms.norm, x, wq)


def every(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, **how: Any) -> dict[str, Tensor]:
    """Return every bound of the catalogue by its name; NaN where one cannot be given.

    Arguments and shapes are those of `exact`.
    """
    bounds = head_bounds(heads(x, wq, wk, wv, **how))
    return {name: _shaped(bounds[name], x, wq) for name in catalogue()}


def __getattr__(name: str) -> Callable[..., Tensor]:
    bound = catalogue().get(name)
    if bound is None:
        raise AttributeError(f"there is no bound {name!r}; there are {', '.join(catalogue())}")
    function = partial(_one, name)
    function.__doc__ = f"{bound.formula}\n\n{bound.explanation} ({bound.source}; {bound.domain})"
    return function


def __dir__() -> list[str]:
    return ["every", "exact", "heads", *catalogue()]


def _one(name: str, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, **how: Any) -> Tensor:
    return every(x, wq, wk, wv, **how)[name]


def _projection(weight: Tensor, bias: Tensor | None) -> Projection:
    per_head = (weight if weight.ndim == 3 else weight[None]).to(torch.float64)
    added = None if bias is None else (bias if bias.ndim == 2 else bias[None]).to(torch.float64)
    return Projection(weight=per_head, bias=added, local=None, kind="affine")


def _applied(x: Tensor, projection: Projection) -> Tensor:
    image = x[:, None] @ projection.weight
    return image if projection.bias is None else image + projection.bias[:, None]


def _four(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _shaped(values: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    values = values if weight.ndim == 3 else values[:, 0]
    return values if x.ndim == 3 else values[0]
