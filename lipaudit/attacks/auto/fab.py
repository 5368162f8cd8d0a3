"""FAB: steps onto the boundary of one other class, as close to the sample as they get."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lipaudit.attacks.auto.cube import (
    CLOSE,
    Cube,
    close_margins,
    column,
    in_unit_cube,
    seed,
    targets,
)
from lipaudit.attacks.turn import Turn

_TOWARDS_SAMPLE = 0.1
"""Largest share of a step that goes from the sample, not from where the row is."""
_BEYOND = 1.05
"""How far a step goes, in distances to the boundary."""
_BACK = 0.9
"""What is left of a perturbation that crossed the boundary: the next step starts there."""


@in_unit_cube
def fab_targeted(cube: Cube, turn: Turn) -> Tensor:
    """Look for the nearest adversarial example: one outside the ball is none."""
    steps, target, z = turn.attack.steps, targets(cube, turn), _starts(cube, turn)
    here, row, stretch = cube, torch.arange(len(z), device=z.device), max(steps // 10, 1)
    nearest, least = cube.x.clone(), torch.full_like(cube.y, torch.inf, dtype=z.dtype)
    checked, kept = least.clone(), close_margins(cube, turn).isinf()
    for step in range(steps):
        z, wrong = _crossed(here, z, target[row])
        length = here.lengths(z - here.x).flatten()
        closer = wrong & (length < least[row])
        nearest[row[closer]], least[row[closer]] = z[closer], length[closer]
        z = torch.where(column(wrong, z), here.x + (z - here.x) * _BACK, z)
        if (step + 1) % stretch == 0:
            now, then = least[row], checked[row]
            stay = ~turn.hopeless(now - cube.eps, then - now, (steps - step - 1) / stretch)
            stay |= kept[row] | (now <= (1 + CLOSE) * cube.eps)
            if not bool(stay.any()):
                break
            row, z, checked = row[stay], z[stay], least.clone()
            here = replace(cube, x=cube.x[row], y=cube.y[row])
    return torch.where(column(least <= cube.eps, nearest), nearest, cube.x)


def _crossed(cube: Cube, z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Step to the boundary and beyond; tell which rows are misclassified there."""
    _, rise, slope = cube.ascend(z, _difference, cube.y, target)
    z = _step(cube, z, rise, slope)
    return z, cube.f(z).argmax(1) != cube.y


def _difference(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return (logits.gather(1, target[:, None]) - logits.gather(1, y[:, None]))[:, 0]


def _starts(cube: Cube, turn: Turn) -> Tensor:
    """Return the samples for a first start, random points at half the radius for the others."""
    points = []
    for each, x in zip(turn.each(), cube.x.chunk(turn.copies), strict=True):
        draw = torch.Generator().manual_seed(seed(each))
        if each.restart == 0:
            points.append(x)
            continue
        noise = torch.rand if cube.norm == "linf" else torch.randn
        t = noise(x.shape, generator=draw, dtype=torch.float32).to(x.device)
        t = 2 * t - 1 if cube.norm == "linf" else t
        points.append((x + cube.eps * t / cube.lengths(t) * 0.5).clamp(0.0, 1.0))
    return torch.cat(points)


def _step(cube: Cube, z: Tensor, rise: Tensor, slope: Tensor) -> Tensor:
    """Cross the boundary of the model's linearisation, from where a row is and from its sample."""
    gap = rise[:, None] + (slope * (cube.x - z)).flatten(1).sum(1, keepdim=True)
    from_z, from_x = (
        onto(point, slope, value, cube.norm) for point, value in ((z, rise), (cube.x, gap[:, 0]))
    )
    far_z, far_x = (cube.lengths(d).clamp_min(1e-8) for d in (from_z, from_x))
    share = (far_z / (far_z + far_x)).clamp_max(_TOWARDS_SAMPLE)
    moved = (z + _BEYOND * from_z) * (1 - share) + (cube.x + from_x * _BEYOND) * share
    return moved.clamp(0.0, 1.0)


def onto(point: Tensor, slope: Tensor, value: Tensor, norm: str) -> Tensor:
    """Return the least step, in the norm, from a point of [0, 1]^n to where its value is 0.

    The value is linear, v + <w, d>. With r_i the room in the direction that lowers |v|, the step
    is min(t s_i, r_i), with speed s = 1 (linf) or |w| (l2) where w is not 0, and t such that
    sum |w_i| min(t s_i, r_i) = |v|; all the room where that is too little. The sum is concave and
    piecewise linear in t, so Newton from t = 0 rises to the solution in finitely many steps.
    """
    w, p = slope.flatten(1), point.flatten(1)
    down = torch.where(value >= 0, 1.0, -1.0).to(w)[:, None] * w.sign()
    room = torch.where(down > 0, p, 1.0 - p)
    weight = w.abs()
    speed = (weight > 0).to(w) if norm == "linf" else weight
    goal, time = value.abs()[:, None], torch.zeros_like(w[:, :1])
    while True:
        moving = time * speed < room
        rate = (weight * speed * moving).sum(1, keepdim=True)
        gone = (weight * room * ~moving).sum(1, keepdim=True)
        later = torch.where(rate > 0, (goal - gone) / rate, torch.inf).maximum(time)
        if not bool((later > time).any()):
            break
        time = later
    step = -down * torch.minimum(time * speed, room)
    return step.nan_to_num(0.0).reshape(point.shape)
