"""The axes of q, k and v as models have them, and as (windows, heads, tokens, width)."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import Tensor

from lipaudit.models.attention.observe.calls import AttentionCall

LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "batch heads tokens": lambda t, _: t,
    "batch windows tokens": lambda t, _: t.flatten(0, 1).unsqueeze(1),
    "batch heads windows tokens": lambda t, _: t.transpose(1, 2).flatten(0, 1),
    "batch windows heads tokens": lambda t, _: t.flatten(0, 1),
    "batch tokens": lambda t, _: t.unsqueeze(1),
    "batch*heads tokens": lambda t, samples: t.reshape(samples, -1, *t.shape[1:]),
    "heads*batch tokens": lambda t, samples: t.reshape(-1, samples, *t.shape[1:]).transpose(0, 1),
    "windows windows heads tokens": lambda t, _: t.flatten(0, -4),
}
"""From the axes of q, k, v as a model has them to (windows, heads, tokens, width)."""

_BY_AXES = {
    3: ("batch*heads tokens", "heads*batch tokens", "batch tokens"),
    4: ("batch heads tokens", "batch windows tokens"),
    5: ("batch heads windows tokens", "batch windows heads tokens"),
}


_FOLDED = re.compile(r"windows\*(\d+)heads tokens")
"""Windows of a sample, then heads, in one axis: how many heads is part of the name."""


def arrange(layout: str, t: Tensor, samples: int) -> Tensor:
    """Bring a tensor from the axes a model has to (windows, heads, tokens, width)."""
    if folded := _FOLDED.fullmatch(layout):
        return t.reshape(-1, int(folded[1]), *t.shape[1:])
    return LAYOUTS[layout](t, samples)


def layouts(call: AttentionCall, samples: int) -> tuple[str, ...]:
    """Return the layouts that q could have, most likely first."""
    t = call.q
    names = _BY_AXES.get(t.ndim, ("windows windows heads tokens",))
    heads = _folded_heads(call, samples) if t.ndim == 3 else 0
    folded = (f"windows*{heads}heads tokens",) if heads else ()
    plain = (name for name in names if "*" not in name or t.shape[0] % samples == 0)
    return (*plain, *folded)


def _folded_heads(call: AttentionCall, samples: int) -> int:
    """Return how many heads q has if its first axis holds several windows of a sample; else 0."""
    t = call.q
    linears = [o.linear for _, o in call.origins.leaves(t) if o.linear is not None]
    tokens = sum(len(linear.inputs) for linear in linears)
    windows = tokens // t.shape[1]
    if len(linears) != 1 or windows <= samples or windows * t.shape[1] != tokens:
        return 0
    return 0 if windows % samples or t.shape[0] % windows else t.shape[0] // windows
