"""Steps along the gradient: FGSM (one step to the edge of the ball) and PGD (many small ones)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.attacks.balls import Ball, project, steepest
from lipaudit.attacks.oracle import Classifier, Turn, logits_and_gradient, logits_of, margins


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
    """Run `fgsm` as an attack of a plan; it is not random."""
    return fgsm(f, x, y, ball)


@torch.no_grad()
def pgd(
    f: Classifier,
    x: Float[Tensor, " batch *sample"],
    y: Int[Tensor, " batch"],
    ball: Ball,
    *,
    start: Float[Tensor, " batch *sample"],
    steps: int,
    step_size: float,
) -> Float[Tensor, " batch *sample"]:
    """Increase the cross-entropy from `start`; return the iterate closest to success.

    z <- project(z + step_size d), with d the steepest direction of the norm. Closest to success
    means the smallest margin f_y - max_{j != y} f_j over all steps + 1 iterates, so a sample
    misclassified at some iterate is returned misclassified. The function is deterministic: for a
    restart, draw a start with `random_start` and call it again. Madry et al., 2018 (arXiv
    1706.06083).

    Args:
        f: x -> logits (batch, classes).
        x: samples, inside the box of the ball.
        y: labels.
        ball: norm, eps, box and mask.
        start: first iterates, inside the ball (for example x).
        steps: number of steps; steps + 1 forward and steps backward passes.
        step_size: length of a step in the norm of the ball (see `usual_step`).
    """
    z, best, lowest = start, start, x.new_full((len(x),), torch.inf)
    for _ in range(steps):
        logits, gradient = logits_and_gradient(f, z, y)
        best, lowest = _closer(z, margins(logits, y), best, lowest)
        z = project(z + step_size * steepest(gradient, ball), x, ball)
    return _closer(z, margins(logits_of(f(z)), y), best, lowest)[0]


def pgd_turn(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
    """Run `pgd` as an attack of a plan: from a random start, with the usual step."""
    steps = turn.attack.steps
    size = usual_step(ball.eps, steps)
    return pgd(f, x, y, ball, start=turn.start(), steps=steps, step_size=size)


def usual_step(eps: float, steps: int) -> float:
    """Return 2.5 eps / steps, with which a path can reach any point of the ball and return."""
    return 2.5 * eps / steps


def _closer(z: Tensor, margin: Tensor, best: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    gain = margin < lowest
    keep = gain.reshape(-1, *[1] * (z.ndim - 1))
    return torch.where(keep, z, best), torch.where(gain, margin, lowest)
