"""Attention of many heads: the fused operations, taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.certify.form import Form, NoRuleError
from lipaudit.certify.rules.moves import lift, moving


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float | int = 0.0,
    is_causal: bool = False,
    scale: float | int | None = None,
    enable_gqa: bool = False,
) -> Form:
    """softmax(scale q k^T + mask) v; with grouped queries, heads of k and v are repeated."""
    if dropout_p > 0:
        raise NoRuleError("scaled_dot_product_attention with dropout")
    if enable_gqa:
        key, value = (
            t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value)
        )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        size = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(size, dtype=torch.bool, device=value.device).tril()
    query, key = moving(value, query, key)
    # A constant is multiplied by what moves first: its own product would be rounded.
    scores: Any = (query * scale) @ key.mT if isinstance(query, Form) else query @ key.mT * scale
    result: Form = mask_scores(scores, attn_mask).softmax(-1) @ value
    return result


def mask_scores(logits: Any, mask: Tensor | None) -> Any:
    """Put a mask on scores: a boolean one says what is seen, numbers are added."""
    if mask is None:
        return logits
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else logits + mask


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float | int,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """nn.MultiheadAttention: in and out projections around attention; (L, batch, E) or (L, E)."""
    odd = (bias_k, bias_v, static_k, static_v)
    if (training and dropout_p > 0) or add_zero_attn or any(each is not None for each in odd):
        raise NoRuleError("multi_head_attention_forward with dropout or further keys")
    batched = query.ndim == 3
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = weights if use_separate_proj_weight else in_proj_weight.chunk(3)  # type: ignore[union-attr]
    biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    like = next(t for t in (query, key, value) if isinstance(t, Form))
    query, key, value = (t if isinstance(t, Form) else lift(t, like) for t in (query, key, value))
    q, k, v = (
        _split(F.linear(t, w, b), num_heads, batched=batched)
        for t, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    logits = (q @ k.mT) * q.shape[-1] ** -0.5
    for mask in (_by_head(attn_mask, num_heads), _by_key(key_padding_mask)):
        logits = mask_scores(logits, mask)
    p: Any = logits.softmax(-1)
    mixed: Any = (p @ v).permute(2, 0, 1, 3).flatten(2)
    out = F.linear(mixed if batched else mixed[:, 0], out_proj_weight, out_proj_bias)
    shown: Any = p.mean(1) if average_attn_weights else p
    return out, (shown if batched else shown[0]) if need_weights else None


def _split(t: Any, heads: int, *, batched: bool) -> Any:
    """(L, batch, E) to (batch, heads, L, E / heads)."""
    t = t if batched else t[:, None]
    return t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _by_head(mask: Tensor | None, heads: int) -> Tensor | None:
    """A mask (L, S), or (batch heads, L, S), for scores; a boolean one hides where it is True."""
    if mask is None:
        return None
    mask = mask if mask.ndim == 2 else mask.unflatten(0, (-1, heads))  # type: ignore[no-untyped-call]
    return ~mask if mask.dtype is torch.bool else mask


def _by_key(mask: Tensor | None) -> Tensor | None:
    """A mask of keys, (batch, S) or (S), for scores."""
    if mask is None:
        return None
    mask = mask.view(-1, 1, 1, mask.shape[-1])
    return ~mask if mask.dtype is torch.bool else mask


RULES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head_attention,
}
"""What attention of many heads does to forms."""
