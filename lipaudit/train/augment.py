"""Changes of a batch of images before a training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def translated(x: Tensor, pixels: int, rng: torch.Generator) -> Tensor:
    """Move each image by up to so many pixels in each direction, zeros coming in."""
    padded = F.pad(x, (pixels, pixels, pixels, pixels))
    windows = padded.unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    dy, dx = torch.randint(2 * pixels + 1, (2, len(x)), generator=rng)
    return windows[torch.arange(len(x)), :, dy, dx]


def flipped(x: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror each image with probability one half."""
    mirror = torch.rand(len(x), generator=rng) < 0.5
    return torch.where(mirror.to(x.device)[:, None, None, None], x.flip(-1), x)


def mixing(mixup: float, cutmix: float, classes: int) -> Mix:
    """Return timm's MixUp and CutMix of a batch with its labels; they draw from numpy's state.

    Labels become shares of the classes. Samples are mixed in pairs: in a batch of odd size the
    last one stays whole.
    """
    if not mixup and not cutmix:
        return lambda x, y: (x, y)
    from timm.data import Mixup

    mix = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=classes)

    def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        pairs = len(x) // 2 * 2
        whole = F.one_hot(y[pairs:], classes).to(x.dtype)
        if not pairs:
            return x, whole
        images, shares = mix(x[:pairs].clone(), y[:pairs])
        return torch.cat([images, x[pairs:]]), torch.cat([shares, whole])

    return mixed
