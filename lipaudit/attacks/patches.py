"""Patch attacks: any values inside k patches of an image's grid, and nothing else changes.

Brown et al., *Adversarial Patch* (arXiv 1712.09665), per image and on the grid that the model
itself reads, as Fu et al. attack vision transformers (*Patch-Fool*, arXiv 2203.08392). The places
are ranked by the gradient; each start takes the next choice of k ranks, and PGD fills the places.
With k = 1, as many starts as places try every place.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lipaudit.attacks.balls import Ball, select_places, sum_patches
from lipaudit.attacks.oracle import Classifier, Turn, logits_and_gradient, pgd


def fill_patches(
    f: Classifier,
    x: Float[Tensor, "batch channels height width"],
    y: Int[Tensor, " batch"],
    ball: Ball,
    turn: Turn,
) -> Float[Tensor, "batch channels height width"]:
    """Fill k patches of each image with values that increase the cross-entropy.

    A place is ranked by its first-order gain: the largest sum of g * (z - x) over values z of its
    pixels in the box.

    Args:
        f: x -> logits (batch, classes).
        x: images, inside the box of the ball.
        y: labels.
        ball: at most eps patches of size `patch`, and the box.
        turn: the number of this start, its random values, and the number of steps.
    """
    assert ball.patch is not None
    low, high = ball.box or (0.0, 1.0)
    _, gradient = logits_and_gradient(f, x, y)
    gain = sum_patches(torch.maximum(gradient * (low - x), gradient * (high - x)), ball.patch)
    ranks = choose_ranks(gain.shape[1], int(ball.eps), turn.attack.restarts)
    chosen = gain.argsort(1, descending=True)[:, list(ranks[turn.restart % len(ranks)])]
    inside = select_places(chosen, x, ball.patch)
    cube = Ball("linf", high - low, ball.box, inside)
    start = torch.where(inside, turn.start(), x)
    return pgd(f, x, y, cube, start=start, steps=turn.attack.steps)


def choose_ranks(places: int, k: int, starts: int) -> list[tuple[int, ...]]:
    """Return the choices of k ranks for a number of starts: those of the smallest sum first.

    >>> choose_ranks(16, 2, 3)
    [(0, 1), (0, 2), (1, 2)]
    """
    # The fewest best places with enough choices.
    pool = next((m for m in range(k, places) if math.comb(m, k) >= starts), places)
    return sorted(combinations(range(pool), k), key=sum)[:starts]
