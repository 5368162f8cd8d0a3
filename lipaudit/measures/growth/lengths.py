"""Sequences of growing length out of the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError, of_machine
from lipaudit.models.net import Net


def cut(net: Net, batch: Batch, n: int) -> tuple[Batch, Tensor]:
    """Return the samples that reach n tokens, cut to n tokens, and which they are.

    Text keeps its closing special tokens; images are resized to as many patches as fit into n.

    Raises:
        InputError: the patches of an image model are unknown.
    """
    if net.kind == "image":
        side = math.isqrt(n) * _patch(net)
        x = F.interpolate(batch.x, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
        return Batch(x, None, batch.ids), torch.arange(len(batch))
    size = batch.x.shape[1]
    lengths = torch.full((len(batch),), size) if batch.mask is None else batch.mask.sum(1).cpu()
    which = (lengths >= n).nonzero()[:, 0]
    closing = _closing(net)
    ends = lengths[which, None] - closing + torch.arange(closing)
    places = torch.cat([torch.arange(n - closing).expand(len(which), -1), ends], 1)
    part = batch.rows(which)
    places = places.to(part.x.device)
    x = part.x[torch.arange(len(which))[:, None], places]
    return Batch(x, None, part.ids), which


def require_lengths(net: Net, batch: Batch, lengths: Sequence[int]) -> None:
    """Make sure that the model takes other lengths than its own.

    Raises:
        InputError: it does not.
    """
    try:
        with torch.no_grad():
            net.output(cut(net, batch[:1], lengths[0])[0])
    except (AssertionError, ValueError, RuntimeError) as error:
        if of_machine(error):
            raise
        modules = net.module.modules()
        dynamic = any(hasattr(module, "dynamic_img_size") for module in modules)
        advice = (
            "Add --model-kwargs dynamic_img_size=true"
            if dynamic
            else "Leave out what is measured on data: --mode adversarial,radius,ascent"
        )
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{net.info.architecture} does not take {lengths[0]} tokens ({reason})", advice + "."
        ) from error


@contextmanager
def any_size(net: Net) -> Iterator[bool]:
    """Let vision transformers of timm take every size while it lasts; say whether it had to.

    As their option dynamic_img_size does: position embeddings are interpolated, and stay what
    they are at the size of the model.
    """
    changes = [change for module in net.module.modules() for change in _dynamic(module)]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield bool(changes)
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _dynamic(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield what dynamic_img_size changes; rotary positions are fixed when they are made."""
    embed: Any = getattr(module, "patch_embed", None)
    fixed = getattr(module, "dynamic_img_size", None) is False
    if not fixed or not hasattr(embed, "output_fmt") or getattr(module, "rope", None) is not None:
        return
    yield module, "dynamic_img_size", True
    yield embed, "strict_img_size", False
    yield embed, "flatten", False
    yield embed, "output_fmt", type(embed.output_fmt)("NHWC")


def _patch(net: Net) -> int:
    """Return the side of a patch in pixels."""
    modules = () if net.entry is None else net.entry.modules()
    for module in modules:
        if isinstance(module, nn.Conv2d):
            return int(module.stride[0])
    raise InputError(
        f"the patch size of {net.info.architecture} was not found",
        "Name its patch embedding in a py: factory: ModelSpec(..., entry=MODULE).",
    )


def _closing(net: Net) -> int:
    """Count the special tokens that the tokenizer sets after every text."""
    if net.tokenize is None:
        return 0
    one, other = (net.tokenize(text, 64)[::-1] for text in ("one", "other words"))
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
