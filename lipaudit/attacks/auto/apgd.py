"""APGD: projected gradient steps whose size is halved where they no longer help."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.attacks.auto.cube import (
    Cube,
    Loss,
    close_margins,
    column,
    in_unit_cube,
    starts,
    targets,
)
from lipaudit.attacks.oracle import margins
from lipaudit.attacks.turn import Turn

CLEAR = 2.0**-10
"""A sample leaves once it is misclassified by this share of its largest logit: other rounding,
on another device or in another batch, then judges it alike."""
_KEPT = 0.75
"""Share of a step's own direction; the rest is that of the step before. Also the share of steps
that must rise lest the step size be halved."""


@in_unit_cube
def apgd(cube: Cube, turn: Turn) -> Tensor:
    """Climb the cross-entropy (apgd-ce) or the untargeted DLR loss (apgd-dlr)."""
    loss = _cross_entropy if turn.attack.name == "apgd-ce" else _dlr
    return _climb(cube, turn, loss, cube.y)


@in_unit_cube
def apgd_targeted(cube: Cube, turn: Turn) -> Tensor:
    """Climb the targeted DLR loss, against the class of the turn's rank."""
    return _climb(cube, turn, _dlr_targeted, targets(cube, turn))


def _cross_entropy(logits: Tensor, y: Tensor, _target: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def _dlr(logits: Tensor, y: Tensor, _target: Tensor) -> Tensor:
    """-(z_y - max_{j != y} z_j) / (z_(1) - z_(3)), of the logits in falling order."""
    top, which = logits.topk(3, dim=1)
    first = (which[:, 0] == y).to(logits)
    own = logits.gather(1, y[:, None])[:, 0]
    rise = own - top[:, 1] * first - top[:, 0] * (1.0 - first)
    return -rise / (top[:, 0] - top[:, 2] + 1e-12)


def _dlr_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """-(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2)."""
    top = logits.topk(4, dim=1)[0]
    rise = logits.gather(1, y[:, None]) - logits.gather(1, target[:, None])
    return -rise[:, 0] / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)


class _Paths(NamedTuple):
    """Where each row is, and what it must remember: of `margin` the smallest."""

    row: Tensor
    x: Tensor
    y: Tensor
    target: Tensor
    z: Tensor
    before: Tensor
    gradient: Tensor
    loss: Tensor
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    end: Tensor
    broken: Tensor
    clear: Tensor
    margin: Tensor
    close: Tensor
    given: Tensor
    step: Tensor
    rises: Tensor
    halved: Tensor
    checked_loss: Tensor

    def at(self, rows: Tensor) -> _Paths:
        """Return the paths of some of the rows."""
        return _Paths(*(tensor[rows] for tensor in self))


def _climb(cube: Cube, turn: Turn, loss: Loss, target: Tensor) -> Tensor:
    """Take the steps; return each row's last adversarial point, else its point of highest loss."""
    steps = turn.attack.steps
    begin = starts(turn).clamp(0.0, 1.0)
    paths = _begin(cube, begin, loss, target, close_margins(cube, turn))
    ends = paths.z.clone()
    period = until_check = max(int(0.22 * steps), 1)
    for step in range(steps):
        paths = _leave(paths, ends, turn.copies)
        if len(paths.row) == 0:
            return ends
        moved = _moved(cube, paths, 1.0 if step == 0 else _KEPT)
        paths = _judged(cube, paths, moved, loss, last=step + 1 == steps)
        until_check -= 1
        if until_check == 0:
            hopeless = turn.hopeless(*_progress(paths, loss), (steps - step - 1) / period)
            far = paths.margin > paths.close
            paths = _checked(paths._replace(given=hopeless & far), period)
            period = max(period - max(int(0.03 * steps), 1), int(0.06 * steps), 1)
            until_check = period
    _stop(paths, ends)
    return ends


def _begin(cube: Cube, z: Tensor, loss: Loss, target: Tensor, close: Tensor) -> _Paths:
    logits, values, gradient = cube.ascend(z, loss, cube.y, target)
    broken, clear, margin = _wrong(logits, cube.y)
    return _Paths(
        row=torch.arange(len(z), device=z.device),
        x=cube.x,
        y=cube.y,
        target=target,
        z=z,
        before=z,
        gradient=gradient,
        loss=torch.zeros_like(values),  # so that the first step rises where its loss is positive
        best=z,
        best_gradient=gradient,
        best_loss=values,
        end=z,
        broken=broken,
        clear=clear,
        margin=margin,
        close=close,
        given=torch.zeros_like(broken),
        step=column(torch.full_like(values, 2.0 * cube.eps), z),
        rises=torch.zeros_like(values),
        halved=torch.ones_like(broken),
        checked_loss=values,
    )


def _wrong(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tell which rows are misclassified, which of them whatever the rounding, and the margins."""
    margin = margins(logits, y)
    return logits.argmax(1) != y, margin < -CLEAR * logits.abs().amax(1), margin


def _moved(cube: Cube, paths: _Paths, share: float) -> Tensor:
    """Step along the gradient, and on in the direction of the step before, inside the ball."""
    x, z, gradient = paths.x, paths.z, paths.gradient
    carried = (z - paths.before) * (1 - share)
    if cube.norm == "linf":
        low, high = (x - cube.eps).clamp_min(0.0), (x + cube.eps).clamp_max(1.0)
        stepped = (z + paths.step * gradient.sign()).clamp(low, high)
        return (z + (stepped - z) * share + carried).clamp(low, high)
    stepped = _into(cube, z + paths.step * _unit(cube, gradient), x)
    return _into(cube, z + (stepped - z) * share + carried, x)


def _unit(cube: Cube, delta: Tensor) -> Tensor:
    return delta / (cube.lengths(delta) + 1e-12)


def _into(cube: Cube, z: Tensor, x: Tensor) -> Tensor:
    delta = z - x
    return (x + _unit(cube, delta) * cube.lengths(delta).clamp_max(cube.eps)).clamp(0.0, 1.0)


def _judged(cube: Cube, paths: _Paths, z: Tensor, loss: Loss, *, last: bool) -> _Paths:
    """Take the rows to z; the last step needs no gradient."""
    if last:
        logits, gradient = cube.f(z), paths.gradient
        values = loss(logits, paths.y, paths.target)
    else:
        logits, values, gradient = cube.ascend(z, loss, paths.y, paths.target)
    wrong, clear, margin = _wrong(logits, paths.y)
    better = values > paths.best_loss
    column_of_better = column(better, z)
    return paths._replace(
        z=z,
        before=paths.z,
        gradient=gradient,
        loss=values,
        best=torch.where(column_of_better, z, paths.best),
        best_gradient=torch.where(column_of_better, gradient, paths.best_gradient),
        best_loss=torch.where(better, values, paths.best_loss),
        end=torch.where(column(wrong, z), z, paths.end),
        broken=paths.broken | wrong,
        clear=clear,
        margin=torch.minimum(margin, paths.margin),
        rises=paths.rises + (values > paths.loss),
    )


def _checked(paths: _Paths, period: int) -> _Paths:
    """Halve the step of rows that rose too seldom or not at all, and take them back."""
    stuck = ~paths.halved & (paths.checked_loss >= paths.best_loss)
    halved = (paths.rises <= period * _KEPT) | stuck
    back = column(halved, paths.z)
    return paths._replace(
        z=torch.where(back, paths.best, paths.z),
        gradient=torch.where(back, paths.best_gradient, paths.gradient),
        step=torch.where(back, paths.step / 2.0, paths.step),
        rises=torch.zeros_like(paths.rises),
        halved=halved,
        checked_loss=paths.best_loss,
    )


def _progress(paths: _Paths, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return what is missing until a row may be misclassified, and by how much that shrank.

    Both losses of DLR are positive where it is; so is log(e^loss - 1) of the cross-entropy, the
    log-sum-exp of the other logits less the own one, which moves with the logits.
    """
    now, then = paths.best_loss, paths.checked_loss
    if loss is _cross_entropy:
        now, then = now.double().expm1().log(), then.double().expm1().log()
    return -now, now - then


def _leave(paths: _Paths, ends: Tensor, copies: int) -> _Paths:
    """Let rows go that are given up, and all rows of samples that are broken for sure."""
    out = paths.clear | paths.given
    if not bool(out.any()):
        return paths
    samples = len(ends) // copies
    gone = torch.zeros(samples, dtype=torch.bool, device=ends.device)
    gone[paths.row[paths.clear] % samples] = True
    leaving = gone[paths.row % samples] | paths.given
    _stop(paths.at(leaving), ends)
    return paths.at(~leaving)


def _stop(paths: _Paths, ends: Tensor) -> None:
    ends[paths.row] = torch.where(column(paths.broken, ends), paths.end, paths.best)
