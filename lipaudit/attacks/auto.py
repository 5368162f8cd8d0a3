"""The attacks of AutoAttack (Croce & Hein, arXiv 2003.01690), from the package pyautoattack.

Only the single runs of the package's attack classes are used. Its own loop, checks and state files
crash below ten classes, reseed every generator, call `sys.settrace`, and cannot be resumed. Here
each run gets the samples that still stand, and what the package takes for granted: float32 values
in [0, 1], a seeded CPU generator, images for Square.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from lipaudit.attacks.balls import Ball, distance
from lipaudit.attacks.oracle import Classifier, logits_of
from lipaudit.attacks.turn import AttackFunction, Turn

_NAMES = {"linf": "Linf", "l2": "L2"}
_MUTE = logging.Logger("pyautoattack", logging.CRITICAL)


@dataclass(frozen=True)
class _Cube:
    """The problem as the package wants it: float32 samples and logits, values in [0, 1]."""

    f: Callable[[Tensor], Tensor]
    x: Tensor
    y: Tensor
    norm: str
    eps: float


_Run = Callable[[_Cube, Turn, Callable[[], Tensor]], Tensor]


def _in_unit_cube(run: _Run) -> AttackFunction:
    """Make an attack on float32 samples in [0, 1] one on any samples.

    Samples of another box are mapped there, embeddings (box None) with room to spare on both
    sides, so that the package's clipping never binds. The attack returns, for each sample, an
    adversarial example or else the best point the run came to (x itself for FAB), inside the ball
    up to 32-bit rounding.
    """

    @functools.wraps(run)
    @torch.no_grad()
    def attack(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
        low, width = _range(x, ball)

        def logits(u: Tensor) -> Tensor:
            return logits_of(f(low + width * u.to(x.dtype))).float()

        def unit(z: Tensor) -> Tensor:
            return ((z - low) / width).float().contiguous()

        cube = _Cube(logits, unit(x), y, _NAMES[ball.norm], ball.eps / width)
        with _package_state(turn.generator):
            best = run(cube, turn, lambda: unit(turn.start()))
        return x + width * (best - cube.x).to(x.dtype)

    return attack


def _range(x: Tensor, ball: Ball) -> tuple[float, float]:
    """Lowest value and width of the box; for an embedding space, a power of two that has room."""
    if ball.box is not None:
        return ball.box[0], ball.box[1] - ball.box[0]
    reach = 2.0 ** math.ceil(math.log2(float(x.abs().amax()) + 2 * ball.eps))
    return -reach, 2 * reach


@contextmanager
def _package_state(generator: torch.Generator) -> Iterator[None]:
    """Seed the global CPU generator, the package's only source, and give it back as it was."""
    seed = int(torch.randint(2**62, (1,), generator=generator))
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_default_dtype(torch.float32)
            torch.default_generator.manual_seed(seed)
            yield
        finally:
            torch.set_default_dtype(dtype)


@_in_unit_cube
def apgd(cube: _Cube, turn: Turn, start: Callable[[], Tensor]) -> Tensor:
    """APGD on the cross-entropy (apgd-ce) or on the untargeted DLR loss (apgd-dlr)."""
    attack = APGDAttack(
        cube.f,
        n_iter=turn.attack.steps,
        norm=cube.norm,
        eps=cube.eps,
        loss=turn.attack.name.removeprefix("apgd-"),
        device=cube.x.device,
        logger=_MUTE,
    )
    return _climb(attack, cube, start())


@_in_unit_cube
def apgd_targeted(cube: _Cube, turn: Turn, start: Callable[[], Tensor]) -> Tensor:
    """APGD on the targeted DLR loss, against the class of the turn's rank."""
    attack = APGDAttack_targeted(
        cube.f,
        n_iter=turn.attack.steps,
        norm=cube.norm,
        eps=cube.eps,
        device=cube.x.device,
        logger=_MUTE,
    )
    attack.y_target = cube.f(cube.x).sort(dim=1)[1][:, -turn.target]
    return _climb(attack, cube, start())


def _climb(attack: APGDAttack, cube: _Cube, start: Tensor) -> Tensor:
    attack.init_hyperparam(cube.x)
    highest, robust, _, adversarial = attack.attack_single_run(cube.x, cube.y, x_init=start)
    return torch.where(_column(robust, cube.x), highest, adversarial)


@_in_unit_cube
def fab_targeted(cube: _Cube, turn: Turn, _start: Callable[[], Tensor]) -> Tensor:
    """FAB looks for the nearest adversarial example: one outside the ball is none."""
    attack = FABAttack_PT(
        cube.f, norm=cube.norm, n_iter=turn.attack.steps, eps=cube.eps, device=cube.x.device
    )
    attack.target_class = turn.target
    nearest = attack.attack_single_run(
        cube.x, cube.y, use_rand_start=turn.restart > 0, is_targeted=True
    )
    inside = distance(nearest, cube.x, "linf" if cube.norm == "Linf" else "l2") <= cube.eps
    return torch.where(_column(inside, cube.x), nearest, cube.x)


@_in_unit_cube
def square(cube: _Cube, turn: Turn, _start: Callable[[], Tensor]) -> Tensor:
    """Square, a random search that sees no gradient, on samples laid out as images."""
    shape = cube.x.shape
    rows, columns = (1, *shape[1:])[-2:]
    images = cube.x.reshape(shape[0], -1, rows, columns)
    high, wide = _canvas(rows, columns) if cube.norm == "L2" else (rows, columns)

    def logits(u: Tensor) -> Tensor:
        return cube.f(u[..., :rows, :columns].reshape(len(u), *shape[1:]))

    attack = SquareAttack(
        logits,
        norm=cube.norm,
        n_queries=turn.attack.queries,
        eps=cube.eps,
        resc_schedule=False,
        device=cube.x.device,
    )
    padded = F.pad(images, (0, wide - columns, 0, high - rows), value=0.5)
    attack.init_hyperparam(padded)
    _, best = attack.attack_single_run(padded, cube.y)
    return best[..., :rows, :columns].reshape(shape)


def _canvas(rows: int, columns: int) -> tuple[int, int]:
    """Smallest image, at least this large, on which the package can lay its L2 starting grid.

    It tiles with squares of side s = rows // 5 from an offset, and fails on 4 x 4, 14 x 14 or
    14 x 28, where the last tile crosses the edge.
    """
    while not _tiles(rows, rows):
        rows += 1
    while not _tiles(rows, columns):
        columns += 1
    return rows, columns


def _tiles(rows: int, length: int) -> bool:
    side = rows // 5
    offset = (rows - 5 * side) // 2
    return side == 1 or (side > 1 and offset + length // side * side <= length)


def _column(flags: Tensor, x: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (x.ndim - 1))
