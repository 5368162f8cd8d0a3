"""The fast gradient sign method: one step to the edge of the ball."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.attacks.balls import Ball, project, steepest
from lipaudit.attacks.oracle import Classifier, logits_and_gradient
from lipaudit.attacks.turn import Turn


@torch.no_grad()
def fgsm(
    f: Classifier, x: Float[Tensor, " batch *sample"], y: Int[Tensor, " batch"], ball: Ball
) -> Float[Tensor, " batch *sample"]:
    """Step from x by eps along the gradient of the cross-entropy, and project.

    x_adv = x + eps sign(g) for linf and x + eps g / ||g||_2 for l2, cut to the box. Optimal for a
    linear classifier of two classes; a weak attack otherwise. Goodfellow et al., 2015
    (arXiv 1412.6572).

    Args:
        f: x -> logits (batch, classes).
        x: samples, inside the box of the ball.
        y: labels.
        ball: norm, eps, box and mask.
    """
    _, gradient = logits_and_gradient(f, x, y)
    return project(x + ball.eps * steepest(gradient, ball), x, ball)


def fgsm_turn(f: Classifier, x: Tensor, y: Tensor, ball: Ball, _turn: Turn) -> Tensor:
    """Run `fgsm` as one of a plan's attacks; nothing about it is random."""
    return fgsm(f, x, y, ball)
