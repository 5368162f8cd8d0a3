"""The bounds of one attention layer on bare tensors: `lipaudit.bounds.sharp(x, wq, wk, wv)`.

Every bound of the catalogue is a function here, under its name and with the same arguments:
`sharp`, `theorem3`, `theorem3_g1`, `appendix_c`, `castin`, `mean_field`, `hu`, and those that
plug-ins add. `exact` is the norm that they bound. `ball_sharp` and `ball_norm` take a radius as
well: what no norm in that ball around X exceeds, and the largest that was found there.

    >>> import torch, lipaudit
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> eye = torch.eye(2)
    >>> norm, bound = exact(x, eye, eye, eye), lipaudit.bounds.sharp(x, eye, eye, eye)
    >>> bool(norm <= bound)
    True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lipaudit.errors import EvaluationError, UsageError
from lipaudit.results.bounds import catalogue
from lipaudit.theory.bounds import ball
from lipaudit.theory.bounds.head_bounds import head_bounds
from lipaudit.theory.exact.head_norms import head_norms
from lipaudit.theory.growth import nearby
from lipaudit.theory.heads import Heads, affine_heads


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
    weights = [_per_head(weight, 3) for weight in (wq, wk, wv)]
    for weight in weights:
        if weight.shape[:2] != (len(weights[0]), x.shape[-1]):
            raise UsageError(
                f"weights {tuple(weight.shape)} do not fit tokens {tuple(x.shape)}",
                "W_Q, W_K and W_V are (D, d) or (heads, D, d), tokens (batch, tokens, D).",
            )
    layer = affine_heads(x, *weights)
    for name, bias in zip("qkv", biases, strict=True):
        layer = layer if bias is None else _biased(layer, name, _per_head(bias, 2))
    return replace(
        layer,
        scale=layer.scale if scale is None else x.new_full((1, 1), scale),
        bias=None if mask is None else _four(mask).to(torch.float64),
        causal=causal,
    )


def exact(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, **how: Any) -> Tensor:
    """Return ||J||, the spectral norm of each head's Jacobian at x, to 1e-6.

    Arguments are those of `heads`; the shape is (batch, heads), less an axis for each that the
    tokens and the weights came without.

    Raises:
        UsageError: shapes that do not fit.
        EvaluationError: a norm did not converge.
    """
    layer = heads(x, wq, wk, wv, **how)
    norms = head_norms(layer, seeds=range(len(layer.x)), tol=1e-6, within=1e-6)
    if not norms.converged.all():
        raise EvaluationError(
            f"{int((~norms.converged).sum())} norms did not converge to 1e-6",
            "lipaudit.theory.exact.head_norms takes other accuracies, and says what is proven.",
        )
    return _shaped(norms.norm, x, wq)


def every(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, **how: Any) -> dict[str, Tensor]:
    """Return every bound of the catalogue by its name; NaN where one cannot be given.

    Arguments and shapes are those of `exact`.
    """
    bounds = head_bounds(heads(x, wq, wk, wv, **how))
    return {name: _shaped(bounds[name], x, wq) for name in catalogue()}


def ball_sharp(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, r: float, **how: Any) -> Tensor:
    """Return a Lipschitz constant on all X' with ||X' - X||_F <= r, certified; `sharp` at r = 0.

    Other arguments and shapes are those of `exact`.

    Raises:
        UsageError: shapes that do not fit, or a negative radius.
    """
    return _shaped(ball.ball_sharp(heads(x, wq, wk, wv, **how), r), x, wq)


def ball_norm(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, r: float, **how: Any) -> Tensor:
    """Return the largest ||J|| found at X' with ||X' - X||_F <= r; arguments as `ball_sharp`."""
    layer = heads(x, wq, wk, wv, **how)
    return _shaped(nearby.ball_norm(layer, r, seeds=range(len(layer.x))), x, wq)


def __getattr__(name: str) -> Callable[..., Tensor]:
    bound = catalogue().get(name)
    if bound is None:
        raise AttributeError(f"there is no bound {name!r}; there are {', '.join(catalogue())}")
    function = partial(_one, name)
    function.__doc__ = f"{bound.formula}\n\n{bound.explanation} ({bound.source}; {bound.domain})"
    return function


def __dir__() -> list[str]:
    return ["ball_norm", "ball_sharp", "every", "exact", "heads", *catalogue()]


def _one(name: str, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, **how: Any) -> Tensor:
    return every(x, wq, wk, wv, **how)[name]


def _per_head(t: Tensor, ndim: int) -> Tensor:
    return (t if t.ndim == ndim else t[None]).to(torch.float64)


def _biased(layer: Heads, name: str, bias: Tensor) -> Heads:
    tokens, to = getattr(layer, name), getattr(layer, f"to_{name}")
    bias = bias.expand(tokens.shape[1], -1)  # one for all heads is one for each
    changes: dict[str, Any] = {
        name: tokens + bias[:, None],
        f"to_{name}": replace(to, bias=bias),
    }
    return replace(layer, **changes)


def _four(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _shaped(values: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    values = values if weight.ndim == 3 else values[:, 0]
    return values if x.ndim == 3 else values[0]
