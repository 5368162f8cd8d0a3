"""What the steps of a training are: their batches, optimizer and learning rates."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from lipaudit.settings.recipe import Recipe


def batched(order: Tensor, size: int) -> list[Tensor]:
    """Cut into batches; a sample left over, a batch without variance, joins the last of them."""
    *full, last = torch.split(order, size)
    if len(last) > 1 or size == 1 or not full:
        return [*full, last]
    return [*full[:-1], torch.cat([full[-1], last])]


def optimizer_of(module: nn.Module, recipe: Recipe) -> Optimizer:
    """Return what takes the steps."""
    weights, decay = module.parameters(), recipe.weight_decay
    if recipe.optimizer == "adamw":
        return AdamW(weights, lr=recipe.lr, weight_decay=decay)
    return SGD(weights, lr=recipe.lr, momentum=recipe.momentum, weight_decay=decay)


def schedule_of(optimizer: Optimizer, recipe: Recipe, steps: int) -> LRScheduler:
    """Return what changes the learning rate in so many steps."""
    if recipe.schedule == "onecycle":
        return OneCycleLR(optimizer, recipe.lr, total_steps=steps)
    return CosineAnnealingLR(optimizer, steps)
