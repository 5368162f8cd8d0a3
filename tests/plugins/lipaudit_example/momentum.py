"""MI-FGSM: the sign of a running mean of gradients (Dong et al., 2018, arXiv 1710.06081)."""

import torch

from lipaudit.attacks.balls import project
from lipaudit.attacks.oracle import logits_and_gradient

DECAY = 1.0


def mi_fgsm(f, x, y, ball, turn):
    """Step by eps / steps along sign(g), g <- DECAY g + grad / ||grad||_1, from x."""
    z, mean = x, torch.zeros_like(x)
    for _ in range(turn.attack.steps):
        _, gradient = logits_and_gradient(f, z, y)
        length = gradient.abs().sum(tuple(range(1, x.ndim)), keepdim=True)
        mean = DECAY * mean + gradient / length.clamp_min(1e-30)
        z = project(z + ball.eps / turn.attack.steps * ball.free(mean).sign(), x, ball)
    return z
