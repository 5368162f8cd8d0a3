"""The attacks of AutoAttack (Croce & Hein, arXiv 2003.01690), as pyautoattack runs them.

APGD takes projected gradient steps and halves their size when they stop helping. FAB steps onto
the boundary of one other class, as close to the sample as possible. Square is in `square`.

The loops are ours: the same steps from the same random draws, so the same samples survive, without
passes whose outcome is known. A sample leaves an attack once it is broken, turns may share a
batch, and the last step needs no gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.attacks.balls import Ball
from lipaudit.attacks.oracle import (
    AttackFunction,
    Classifier,
    Oracle,
    Turn,
    logits_of,
    margins,
    pull,
)
from lipaudit.tables.trials import Norm

CLOSE = 0.1
"""lean gives up a sample only if its remaining distance to success is more than this share of the
whole."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits, labels, target classes) -> the loss of each row."""


@dataclass(frozen=True)
class Cube:
    """Samples in [0, 1], for a model with float32 logits.

    Attributes:
        f: the model on the unit cube.
        x: the samples, repeated for each turn that runs in the batch.
        y: their labels.
        norm: linf or l2.
        eps: the radius.
        size: largest number of rows of f at once when a gradient is computed.
    """

    f: Callable[[Tensor], Tensor]
    x: Tensor
    y: Tensor
    norm: Norm
    eps: float
    size: int

    def ascend(
        self, z: Tensor, loss: Loss, y: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, losses and the gradient of each row's loss, computed in pieces."""
        parts = []
        for i in range(0, len(z), self.size):
            cut = slice(i, i + self.size)
            with torch.enable_grad():
                leaf = z[cut].detach().requires_grad_()
                logits = self.f(leaf)
                values = loss(logits, y[cut], target[cut])
                total = values.sum()
            gradient = pull((leaf, total), torch.ones_like(total))
            parts.append((logits.detach(), values.detach(), gradient))
        logits, values, gradient = (torch.cat(part) for part in zip(*parts, strict=True))
        return logits, values, gradient

    def lengths(self, delta: Tensor) -> Tensor:
        """Return the norm of each row, shaped for broadcasting."""
        flat = delta.flatten(1)
        length = flat.abs().amax(1) if self.norm == "linf" else (flat**2).sum(1).sqrt()
        return column(length, delta)


_Run = Callable[[Cube, Turn], Tensor]


def in_unit_cube(run: _Run) -> AttackFunction:
    """Adapt an attack on samples in [0, 1] to samples of any box.

    Samples of another box are mapped to [0, 1]; embeddings (box None) get a margin on both sides,
    so that clipping never acts. The attack returns, for each sample, an adversarial example or
    else the best point of the run (x itself for FAB), inside the ball up to rounding.
    """

    @functools.wraps(run)
    @torch.no_grad()
    def attack(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
        if ball.box is not None:
            low, width = ball.box[0], ball.box[1] - ball.box[0]
        else:  # a power of two with a margin
            reach = 2.0 ** math.ceil(math.log2(float(x.abs().amax()) + 2 * ball.eps))
            low, width = -reach, 2 * reach

        def logits(u: Tensor) -> Tensor:
            return logits_of(f(low + width * u.to(x.dtype))).float()

        def unit(z: Tensor) -> Tensor:
            return ((z - low) / width).contiguous()

        size = f.batch_size if isinstance(f, Oracle) else len(x)
        cube = Cube(logits, unit(x), y, ball.norm, ball.eps / width, size)
        best = run(cube, replace(turn, start=lambda: unit(turn.start())))
        return x + width * (best - cube.x).to(x.dtype)

    return attack


def select_targets(cube: Cube, turn: Turn) -> Tensor:
    """Return the target class of each row: the class of the turn's rank on the clean sample."""
    order = _clean_logits(cube, turn).sort(dim=1)[1]
    return torch.cat([order[:, -each.target] for each in turn.each()])


def close_margins(cube: Cube, turn: Turn) -> Tensor:
    """Return the margin below which a row is not given up; infinite if it was reached before.

    All turns of a sample count: on the way to one class an attack may reach another.
    """
    if math.isinf(turn.attack.hope):
        return torch.full_like(cube.y, torch.inf, dtype=torch.float32)
    whole = margins(_clean_logits(cube, turn), cube.y[: len(cube.y) // turn.copies])
    before = whole if turn.closest is None else turn.closest
    close = CLOSE * whole
    return torch.where(before <= close, torch.inf, close).float().repeat(turn.copies)


def _clean_logits(cube: Cube, turn: Turn) -> Tensor:
    """Return the logits of the samples, once each."""
    return cube.f(cube.x[: len(cube.x) // turn.copies]) if turn.logits is None else turn.logits


def draw_seed(turn: Turn) -> int:
    """Draw the seed of one turn."""
    return int(torch.randint(2**62, (1,), generator=turn.generator))


def column(values: Tensor, x: Tensor) -> Tensor:
    """Reshape a value per row for broadcasting over samples."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


CLEAR = 2.0**-10
"""A sample leaves once it is misclassified by this share of its largest logit: rounding on another
device or in another batch then does not change the verdict."""
_KEPT = 0.75
"""Weight of a step's own direction; the rest is the direction of the step before. Also the share
of steps that must rise, or the step size is halved."""


@in_unit_cube
def apgd(cube: Cube, turn: Turn) -> Tensor:
    """Maximise the cross-entropy (apgd-ce) or the untargeted DLR loss (apgd-dlr)."""
    loss = _cross_entropy if turn.attack.name == "apgd-ce" else _dlr
    return _climb(cube, turn, loss, cube.y)


@in_unit_cube
def apgd_targeted(cube: Cube, turn: Turn) -> Tensor:
    """Maximise the targeted DLR loss against the class of the turn's rank."""
    return _climb(cube, turn, _dlr_targeted, select_targets(cube, turn))


def _cross_entropy(logits: Tensor, y: Tensor, _target: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def _dlr(logits: Tensor, y: Tensor, _target: Tensor) -> Tensor:
    """Return -(z_y - max_{j != y} z_j) / (z_(1) - z_(3)), with the logits z sorted downwards."""
    top, which = logits.topk(3, dim=1)
    first = (which[:, 0] == y).to(logits)
    own = logits.gather(1, y[:, None])[:, 0]
    rise = own - top[:, 1] * first - top[:, 0] * (1.0 - first)
    return -rise / (top[:, 0] - top[:, 2] + 1e-12)


def _dlr_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return -(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2), with the logits z sorted downwards."""
    top = logits.topk(4, dim=1)[0]
    rise = logits.gather(1, y[:, None]) - logits.gather(1, target[:, None])
    return -rise[:, 0] / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)


class _Paths(NamedTuple):
    """The state of each row: its points, their gradients and losses, and its step size.

    Attributes:
        row: number of the row in the batch.
        z, gradient, loss: the point.
        before: the point before.
        best, best_gradient, best_loss: the point of the highest loss.
        end, broken: the last misclassified point, if there is any.
        margin: smallest margin.
        step: step size.
        rises: number of steps since the last check that raised the loss.
        halved, checked_loss: whether the last check halved the step, and the highest loss then.
    """

    row: Tensor
    z: Tensor
    gradient: Tensor
    loss: Tensor
    before: Tensor
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    end: Tensor
    broken: Tensor
    margin: Tensor
    step: Tensor
    rises: Tensor
    halved: Tensor
    checked_loss: Tensor


def _climb(cube: Cube, turn: Turn, loss: Loss, target: Tensor) -> Tensor:
    """Run the steps; return each row's last adversarial point, else its point of highest loss."""
    steps, starts = turn.attack.steps, []
    for each in turn.each():
        draw_seed(each)  # the package draws one before every start
        starts.append(each.start())
    z, x, y, close = torch.cat(starts).clamp(0.0, 1.0), cube.x, cube.y, close_margins(cube, turn)
    logits, values, gradient = cube.ascend(z, loss, y, target)
    broken, clear, margin = _find_wrong(logits, y)
    paths = _Paths(
        row=torch.arange(len(z), device=z.device),
        z=z,
        gradient=gradient,
        loss=torch.zeros_like(values),  # so that the first step rises where its loss is positive
        before=z,
        best=z,
        best_gradient=gradient,
        best_loss=values,
        end=z,
        broken=broken,
        margin=margin,
        step=column(torch.full_like(values, 2.0 * cube.eps), z),
        rises=torch.zeros_like(values),
        halved=torch.ones_like(broken),
        checked_loss=values,
    )
    ends, samples, given = z.clone(), len(z) // turn.copies, torch.zeros_like(broken)
    period = until_check = max(int(0.22 * steps), 1)
    for step in range(steps):
        # Rows that are given up leave, and all rows of samples that are broken for sure.
        if bool((clear | given).any()):
            gone = torch.zeros(samples, dtype=torch.bool, device=z.device)
            gone[paths.row[clear] % samples] = True
            stay = ~(gone[paths.row % samples] | given)
            _store_ends(paths, ends)
            paths = _Paths(*(tensor[stay] for tensor in paths))
            x, y, target, close = x[stay], y[stay], target[stay], close[stay]
        if len(paths.row) == 0:
            return ends
        z = _move(cube, paths, x, 1.0 if step == 0 else _KEPT)
        if step + 1 == steps:  # the last step needs no gradient
            logits, gradient = cube.f(z), paths.gradient
            values = loss(logits, y, target)
        else:
            logits, values, gradient = cube.ascend(z, loss, y, target)
        wrong, clear, margin = _find_wrong(logits, y)
        paths = _record(paths, z, gradient, values, wrong, margin)
        given = torch.zeros_like(wrong)
        until_check -= 1
        if until_check == 0:
            hopeless = turn.hopeless(*_measure_progress(paths, loss), (steps - step - 1) / period)
            given = hopeless & (paths.margin > close)
            paths = _halve_steps(paths, period)
            period = max(period - max(int(0.03 * steps), 1), int(0.06 * steps), 1)
            until_check = period
    _store_ends(paths, ends)
    return ends


def _find_wrong(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows are misclassified, which of them beyond rounding, and the margins."""
    margin = margins(logits, y)
    return logits.argmax(1) != y, margin < -CLEAR * logits.abs().amax(1), margin


def _move(cube: Cube, paths: _Paths, x: Tensor, share: float) -> Tensor:
    """Step along the gradient plus a share of the step before, inside the ball."""
    z, gradient = paths.z, paths.gradient
    carried = (z - paths.before) * (1 - share)
    if cube.norm == "linf":
        low, high = (x - cube.eps).clamp_min(0.0), (x + cube.eps).clamp_max(1.0)
        stepped = (z + paths.step * gradient.sign()).clamp(low, high)
        return (z + (stepped - z) * share + carried).clamp(low, high)
    stepped = _project(cube, z + paths.step * _normalise(cube, gradient), x)
    return _project(cube, z + (stepped - z) * share + carried, x)


def _normalise(cube: Cube, delta: Tensor) -> Tensor:
    return delta / (cube.lengths(delta) + 1e-12)


def _project(cube: Cube, z: Tensor, x: Tensor) -> Tensor:
    delta = z - x
    return (x + _normalise(cube, delta) * cube.lengths(delta).clamp_max(cube.eps)).clamp(0.0, 1.0)


def _record(
    paths: _Paths, z: Tensor, gradient: Tensor, loss: Tensor, wrong: Tensor, margin: Tensor
) -> _Paths:
    """Move the rows to z."""
    better = loss > paths.best_loss
    column_of_better = column(better, z)
    return paths._replace(
        z=z,
        gradient=gradient,
        loss=loss,
        before=paths.z,
        best=torch.where(column_of_better, z, paths.best),
        best_gradient=torch.where(column_of_better, gradient, paths.best_gradient),
        best_loss=torch.where(better, loss, paths.best_loss),
        end=torch.where(column(wrong, z), z, paths.end),
        broken=paths.broken | wrong,
        margin=torch.minimum(margin, paths.margin),
        rises=paths.rises + (loss > paths.loss),
    )


def _halve_steps(paths: _Paths, period: int) -> _Paths:
    """Halve the step of rows that rose too seldom, and return them to their best point."""
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


def _measure_progress(paths: _Paths, loss: Loss) -> tuple[Tensor, Tensor]:
    """Return the remaining distance to misclassification, and how much it shrank.

    Both DLR losses are positive for misclassified rows. So is log(e^loss - 1) of the
    cross-entropy: the log-sum-exp of the other logits minus the logit of the label.
    """
    now, then = paths.best_loss, paths.checked_loss
    if loss is _cross_entropy:
        now, then = now.double().expm1().log(), then.double().expm1().log()
    return -now, now - then


def _store_ends(paths: _Paths, ends: Tensor) -> None:
    ends[paths.row] = torch.where(column(paths.broken, ends), paths.end, paths.best)


_TOWARDS_SAMPLE = 0.1
"""Largest weight of the step that starts at the original sample (the rest starts at the current
point)."""
_BEYOND = 1.05
"""Step length, as a multiple of the distance to the decision boundary."""
_BACK = 0.9
"""Factor by which a perturbation is shrunk after it crossed the boundary, before the next step."""


@in_unit_cube
def fab_targeted(cube: Cube, turn: Turn) -> Tensor:
    """Search the nearest adversarial example; examples outside the ball do not count."""
    steps, target, z = turn.attack.steps, select_targets(cube, turn), _draw_fab_starts(cube, turn)
    here, row, stretch = cube, torch.arange(len(z), device=z.device), max(steps // 10, 1)
    nearest, least = cube.x.clone(), torch.full_like(cube.y, torch.inf, dtype=z.dtype)
    checked, kept = least.clone(), close_margins(cube, turn).isinf()
    for step in range(steps):
        _, rise, slope = here.ascend(z, _compare_logits, here.y, target[row])
        z = _step(here, z, rise, slope)
        wrong = here.f(z).argmax(1) != here.y
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


def _compare_logits(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return (logits.gather(1, target[:, None]) - logits.gather(1, y[:, None]))[:, 0]


def _draw_fab_starts(cube: Cube, turn: Turn) -> Tensor:
    """Return the samples for a first start, random points at half the radius for further ones."""
    points = []
    for each, x in zip(turn.each(), cube.x.chunk(turn.copies), strict=True):
        draw = torch.Generator().manual_seed(draw_seed(each))
        if each.restart == 0:
            points.append(x)
            continue
        noise = torch.rand if cube.norm == "linf" else torch.randn
        t = noise(x.shape, generator=draw, dtype=torch.float32).to(x.device)
        t = 2 * t - 1 if cube.norm == "linf" else t
        points.append((x + cube.eps * t / cube.lengths(t) * 0.5).clamp(0.0, 1.0))
    return torch.cat(points)


def _step(cube: Cube, z: Tensor, rise: Tensor, slope: Tensor) -> Tensor:
    """Step across the boundary of the linearised model, from the current point and the sample."""
    gap = rise[:, None] + (slope * (cube.x - z)).flatten(1).sum(1, keepdim=True)
    from_z, from_x = (
        step_onto(point, slope, value, cube.norm)
        for point, value in ((z, rise), (cube.x, gap[:, 0]))
    )
    far_z, far_x = (cube.lengths(d).clamp_min(1e-8) for d in (from_z, from_x))
    share = (far_z / (far_z + far_x)).clamp_max(_TOWARDS_SAMPLE)
    moved = (z + _BEYOND * from_z) * (1 - share) + (cube.x + from_x * _BEYOND) * share
    return moved.clamp(0.0, 1.0)


def step_onto(point: Tensor, slope: Tensor, value: Tensor, norm: str) -> Tensor:
    """Return the smallest step, in the norm, from a point of [0, 1]^n to the zero of its value.

    The value of a step d is v + <w, d>. Let r_i be the room of coordinate i in the direction that
    lowers |v|. The step is min(t s_i, r_i) with speed s_i = 1 (linf) or |w_i| (l2) for w_i != 0,
    and with t such that sum |w_i| min(t s_i, r_i) = |v|; if no t suffices, the step is r. The sum
    is concave and piecewise linear in t, so Newton's method from t = 0 rises to the solution in
    finitely many steps.
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
