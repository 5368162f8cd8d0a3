"""The attacked function in pieces that fit the device, its passes counted; and steps along it.

Gradients are with respect to x only: `param.grad` never changes. FGSM takes one step to the edge
of the ball, PGD many small ones; within patches, PGD fills places of an image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.attacks.balls import (
    Ball,
    add_axes,
    project,
    select_places,
    steepest,
    sum_patches,
)
from lipaudit.attacks.kinds import Attack
from lipaudit.errors import EvaluationError
from lipaudit.theory.pullback import pull_back

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from lipaudit.attacks.balls import Labels, Logits, PerSample, Samples

# Step of coordinates with a NaN gradient, as a share of the sample's largest value: far above
# rounding in float32 (2^-24), and too small for most models to turn.
NUDGE = 2.0**-12
# Replaces an infinite slope: larger than all others, but its square does not overflow in sums.
STEEP = 1e15
# x -> logits (batch, classes), or an object that holds them as `.logits`.
Classifier = Callable[[Tensor], Any]


@dataclass(frozen=True)
class ByRow:
    """A model that needs to know which samples it gets (their token ids and padding).

    Attributes:
        f: (z, rows) -> logits, with rows the positions of the samples in their chunk.
    """

    f: Callable[[Tensor, Tensor], Any]


@dataclass
class Meter:
    """Counts samples passed forward and backward.

    Forward passes repeated to save memory do not count, so the figures do not depend on the device
    batch size.

    Attributes:
        forwards: samples passed forward.
        backwards: samples passed backward.
        nonfinite: number of gradients that were not finite, as a tensor, so that the host does
            not wait.
        began: start of the count, in seconds of `time.perf_counter`.
        replaces_nan: whether NaN gradients are replaced by those at a nearby point. This waits for
            the device, so attacks switch it on after the first NaN.
        check: called before every pass; it raises to end an attack whose time is over.
    """

    forwards: int = 0
    backwards: int = 0
    nonfinite: int | Tensor = 0
    replaces_nan: bool = False
    began: float = field(default_factory=time.perf_counter)
    check: Callable[[], None] = lambda: None

    def pass_forward(self, samples: int) -> None:
        """Count samples that are about to pass forward."""
        self.check()
        self.forwards += samples

    def read(self) -> dict[str, Any]:
        """Return the counts and the time so far, as fields of an outcome."""
        return {
            "seconds": time.perf_counter() - self.began,
            "forwards": self.forwards,
            "backwards": self.backwards,
            "nonfinite": int(self.nonfinite),
        }

    def make_finite(self, gradient: Tensor, near: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a gradient made finite, and count the samples where it was not.

        Infinity becomes a large number. NaN becomes 0. With `replaces_nan` it becomes the gradient
        at a nearby point instead: the entries of the sample with NaN are moved slightly.

        Args:
            gradient: gradient of some samples.
            near: a function: direction -> gradient after a small step along this direction.
        """
        self.backwards += len(gradient)
        finite = gradient.isfinite().flatten(1).all(1)
        self.nonfinite = self.nonfinite + (~finite).sum()
        # Move the entries with NaN up; if the gradient is still NaN, move them down.
        signs = (1, -1) if self.replaces_nan else ()
        for sign in signs:
            is_nan = gradient.isnan()
            if not is_nan.any():
                break
            self.forwards += len(gradient)
            self.backwards += len(gradient)
            moved = near(sign * is_nan.to(gradient))
            gradient = torch.where(is_nan, moved, gradient)
        return gradient.nan_to_num(0.0, STEEP, -STEEP)


@dataclass(frozen=True)
class Oracle:
    """f at given rows of a chunk, evaluated in pieces of at most `batch_size` samples.

    It is differentiable in its argument only: even `loss.backward()` never changes `param.grad`.
    Its gradients are always finite (see `Meter.make_finite`). With several pieces, the gradient
    repeats their forward passes, so memory holds the graph of one piece.

    Attributes:
        f: the model.
        rows: positions in the chunk of the samples to evaluate.
        batch_size: the device batch size.
        meter: counts the passes.
    """

    f: Classifier | ByRow
    rows: Int[Tensor, " rows"]
    batch_size: int
    meter: Meter = field(default_factory=Meter)

    def __call__(self, z: Float[Tensor, " rows *sample"]) -> Logits:
        """Return the logits at z, which has one point for each entry of `rows`.

        The logits are differentiable if z is. The caller may change the tensor in place.
        """
        self.meter.pass_forward(len(z))
        if torch.is_grad_enabled() and z.requires_grad:
            return _InPieces.apply(z, self)
        with torch.no_grad():
            return self.evaluate_in_pieces(z)

    def evaluate_in_pieces(self, z: Tensor) -> Tensor:
        """Return the logits at z, computed in pieces of at most `batch_size` samples."""
        pieces = list_pieces(len(z), self.batch_size)
        return torch.cat([self.evaluate_piece(z[chunk], chunk.start) for chunk in pieces])

    def pull_in_pieces(self, z: Tensor, grad_output: Tensor) -> Tensor:
        """Return J^T grad_output, with the Jacobian J of the logits at z, computed in pieces.

        The graph of one piece is in memory at a time.
        """
        gradients = []
        for chunk in list_pieces(len(z), self.batch_size):
            graph = _record_graph(self, z[chunk], chunk.start)
            gradients.append(pull(graph, grad_output[chunk]))
        return torch.cat(gradients)

    def evaluate_piece(self, z: Tensor, start: int) -> Tensor:
        """Return the logits of a piece of the samples, which begins at sample `start`."""
        if isinstance(self.f, ByRow):  # the model also needs to know which samples these are
            rows = self.rows[start : start + len(z)]
            return logits_of(self.f.f(z, rows))
        return logits_of(self.f(z))


class _InPieces(torch.autograd.Function):
    """The logits of an oracle, with a gradient in z that is computed piece by piece."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, oracle: Oracle) -> Tensor:
        """Return the logits at z. If z is a single piece, its graph is stored for `backward`."""
        ctx.oracle = oracle
        ctx.z = z.detach()
        # Graphs of several pieces would not fit into memory: the backward pass repeats them.
        if len(z) > oracle.batch_size:
            ctx.graph = None
            return oracle.evaluate_in_pieces(ctx.z)
        ctx.graph = _record_graph(oracle, ctx.z, start=0)
        _, logits = ctx.graph
        return logits.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return J^T grad_output, made finite, with the Jacobian J of the logits in z.

        The second result is the gradient of the argument `oracle`, which has none.
        """
        oracle = ctx.oracle
        z = ctx.z

        def pull_near(direction: Tensor) -> Tensor:
            """Return J^T grad_output at a point near z: a small step along a direction.

            The step is a share NUDGE of the largest value of each sample.
            """
            largest = z.flatten(1).abs().amax(1)
            size = torch.where(largest > 0, largest, 1.0)
            moved = z + direction * NUDGE * add_axes(size, z)
            return oracle.pull_in_pieces(moved, grad_output)

        graph = ctx.graph
        ctx.graph = None  # frees its memory
        if graph is None:
            gradient = oracle.pull_in_pieces(z, grad_output)
        else:
            gradient = pull(graph, grad_output)
        return oracle.meter.make_finite(gradient, pull_near), None


def list_pieces(samples: int, size: int) -> list[slice]:
    """Return the slices that cut samples into pieces of at most some size."""
    return [slice(start, start + size) for start in range(0, samples, size)]


def _record_graph(oracle: Oracle, z: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Run the model on a piece of the samples with gradient; return the input leaf and the logits.

    Args:
        oracle: the model.
        z: the points of the piece.
        start: the first sample of the piece.
    """
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        return leaf, oracle.evaluate_piece(leaf, start)


def pull(graph: tuple[Tensor, Tensor], grad_output: Tensor) -> Tensor:
    """Return J^T grad_output, with J the Jacobian of a graph (leaf, output).

    The result is 0 if the output does not depend on the leaf.
    """
    leaf, output = graph
    if not output.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,) = pull_back(output, leaf, grad_output, materialize_grads=True)
    return gradient


def logits_of(output: Any) -> Logits:
    """Return the logits in the output of a model: a tensor, `.logits`, or a tuple's first item.

    Raises:
        EvaluationError: the output holds no tensor (batch, classes).
    """
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple):
        logits = logits[0]
    if isinstance(logits, Tensor) and logits.ndim == 2:
        return logits
    output_form = type(logits).__name__
    if isinstance(logits, Tensor):
        output_form = str(tuple(logits.shape))
    raise EvaluationError(
        f"the model returns {output_form}, but an attack needs logits of shape (batch, classes)",
        "Attack a classifier that returns one row of class scores per sample.",
    )


def logits_and_gradient(f: Classifier, x: Samples, y: Labels) -> tuple[Logits, Samples]:
    """Return the logits at x, and the gradient with respect to x of each sample's cross-entropy.

    Too many samples for one pass run in pieces, each forward and then backward. (One call of an
    `Oracle` on all samples would repeat the forward passes for the gradient.)
    """
    if isinstance(f, Oracle) and len(x) > f.batch_size:
        logits_of_pieces = []
        gradients = []
        for chunk in list_pieces(len(x), f.batch_size):
            piece = replace(f, rows=f.rows[chunk])  # `rows`: which samples the model gets
            logits, gradient = logits_and_gradient(piece, x[chunk], y[chunk])
            logits_of_pieces.append(logits)
            gradients.append(gradient)
        return torch.cat(logits_of_pieces), torch.cat(gradients)
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        logits = logits_of(f(leaf))
        # With a sum, the gradient at a sample does not depend on the size of the batch.
        loss = F.cross_entropy(logits, y, reduction="sum")
    return logits.detach(), pull((leaf, loss), torch.ones_like(loss))


def margins(logits: Logits, y: Labels) -> PerSample:
    """Return the margin of label y, f_y - max_{j != y} f_j, for logits f.

    The margin is negative exactly if another class has a larger logit than the label.
    """
    label = y[:, None]
    of_label = logits.gather(1, label)[:, 0]
    others = logits.scatter(1, label, -torch.inf)  # without the label's own logit
    return of_label - others.amax(1)


@dataclass(frozen=True)
class Turn:
    """One run of an attack: one start per row, and for targeted attacks one target per row.

    Attributes:
        attack: the attack and its settings.
        generator: source of the run's random numbers, on the CPU.
        start: draws a random point in the ball of each row.
        rows: position in the chunk of each row's sample; a targeted attack may get several rows of
            a sample, with different targets.
        target: the class to aim at in each row; the runner-up unless the attack is targeted.
        restart: number of earlier starts of these rows.
        saved: examples of another model for the whole chunk, (samples, examples, ...).
        check: raises if the time of the attack is over; f calls it before every pass.
    """

    attack: Attack
    generator: torch.Generator
    start: Callable[[], Tensor]
    rows: Int[Tensor, " rows"]
    target: Int[Tensor, " rows"]
    restart: int = 0
    saved: Tensor | None = None
    check: Callable[[], None] = lambda: None


# (f, x, y, ball, turn) -> x_adv, as `AttackKind` describes it.
AttackFunction = Callable[[Classifier, Tensor, Tensor, Ball, Turn], Tensor]


@torch.no_grad()
def fgsm(
    f: Classifier,
    x: Samples,
    y: Labels,
    ball: Ball,
    _turn: Turn | None = None,
) -> Samples:
    """Step from x by eps along the gradient of the cross-entropy, and project.

    x_adv = x + eps sign(g) for linf and x + eps g / ||g||_2 for l2, cut to the box. Optimal for a
    linear classifier of two classes; a weak attack otherwise. Goodfellow et al., 2015
    (arXiv 1412.6572).

    Args:
        f: x -> logits (batch, classes).
        x: samples, inside the box of the ball.
        y: labels.
        ball: norm, eps, box and mask.
        _turn: not used: all attacks of a plan are called with it.
    """
    _, gradient = logits_and_gradient(f, x, y)
    return project(x + ball.eps * steepest(gradient, ball), x, ball)


@torch.no_grad()
def pgd(
    f: Classifier,
    x: Samples,
    y: Labels,
    ball: Ball,
    *,
    start: Samples,
    steps: int,
    step_size: float | None = None,
) -> Samples:
    """Increase the cross-entropy from `start`; return the iterate closest to success.

    A step is z <- project(z + step_size d), with d the steepest direction of the norm. In l1 only
    the entry with the largest slope moves, among entries that the box does not stop (SLIDE of
    Tramer and Boneh, 2019, arXiv 1904.13000). Closest to success means the smallest margin
    f_y - max_{j != y} f_j over all steps + 1 iterates, so a sample misclassified at some iterate
    is returned misclassified. The function is deterministic: for a restart, draw a start with
    `random_start` and call the function again. Madry et al., 2018 (arXiv 1706.06083).

    Args:
        f: x -> logits (batch, classes).
        x: samples, inside the box of the ball.
        y: labels.
        ball: norm, eps, box and mask.
        start: first iterates, inside the ball (for example x).
        steps: number of steps; steps + 1 forward and steps backward passes.
        step_size: length of a step in the norm of the ball; None: 2.5 eps / steps, with which a
            path can reach any point of the ball and return.
    """
    if step_size is None:
        step_size = 2.5 * ball.eps / steps
    z = start
    best = start
    lowest = x.new_full((len(x),), torch.inf)
    for _ in range(steps):
        logits, gradient = logits_and_gradient(f, z, y)
        best, lowest = choose_closer(z, margins(logits, y), best, lowest)
        if ball.norm == "l1" and ball.box is not None:
            # A step moves only the entry with the largest slope. An entry at an edge of the box
            # with a slope outwards could not move, and the step would be lost: exclude it.
            low, high = ball.box
            is_stuck = torch.where(gradient > 0, z >= high, z <= low)
            gradient = gradient.masked_fill(is_stuck, 0.0)
        z = project(z + step_size * steepest(gradient, ball), x, ball)
    best, _ = choose_closer(z, margins(logits_of(f(z)), y), best, lowest)  # the last iterate
    return best


def pgd_turn(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
    """Run `pgd` as an attack of a plan: from a random start, with the usual step."""
    start = turn.start()
    return pgd(f, x, y, ball, start=start, steps=turn.attack.steps)


def choose_closer(
    z: Tensor, margin: Tensor, best: Tensor, lowest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return for each sample the point with the smaller margin, and the smaller margin.

    Args:
        z: new points, one per sample.
        margin: the margins at z, (samples,).
        best: the points with the smallest margins so far.
        lowest: the margins at `best`.
    """
    is_lower = margin < lowest
    best = torch.where(add_axes(is_lower, z), z, best)
    lowest = torch.where(is_lower, margin, lowest)
    return best, lowest


# Patches: any values inside k patches of an image's grid, and nothing else changes.
#
# Brown et al., *Adversarial Patch* (arXiv 1712.09665), per image and on the grid that the model
# itself reads, as Fu et al. attack vision transformers (*Patch-Fool*, arXiv 2203.08392). The
# places are ranked by the gradient; each start takes the next choice of k ranks, and PGD fills the
# places. With k = 1, as many starts as places try every place.


def fill_patches(
    f: Classifier,
    x: Samples,
    y: Labels,
    ball: Ball,
    turn: Turn,
) -> Samples:
    """Fill k patches of each image with values that increase the cross-entropy.

    A place is a patch of the grid of the image. Places are ranked by how much the loss can grow to
    first order: the maximum of the sum of g * (z - x) over the pixels of the place, with the
    gradient g of the loss and new pixel values z in the box. Each start fills the places of k
    other ranks: the first start those of ranks 0 to k - 1, which promise most.

    Args:
        f: x -> logits (batch, classes).
        x: images, inside the box of the ball, (batch, channels, height, width).
        y: labels.
        ball: at most eps patches of size `patch`, and the box.
        turn: the number of this start, its random values, and the number of steps.
    """
    assert ball.patch is not None
    low, high = ball.box or (0.0, 1.0)
    _, gradient = logits_and_gradient(f, x, y)
    # The linear gain of each pixel is largest at an end of the box.
    pixel_gain = torch.maximum(gradient * (low - x), gradient * (high - x))
    gain = sum_patches(pixel_gain, ball.patch)
    choices = choose_ranks(gain.shape[1], int(ball.eps), turn.attack.restarts)
    ranks = choices[turn.restart % len(choices)]
    best_first = gain.argsort(1, descending=True)  # the places of each image by rank
    places = best_first[:, list(ranks)]
    inside = select_places(places, x, ball.patch)
    # PGD in a cube as wide as the box: inside the patches every value can be reached.
    cube = Ball("linf", eps=high - low, box=ball.box, mask=inside)
    start = torch.where(inside, turn.start(), x)
    return pgd(f, x, y, cube, start=start, steps=turn.attack.steps)


def choose_ranks(places: int, k: int, starts: int) -> list[tuple[int, ...]]:
    """Return k patches of an image for each start, as ranks: rank 0 is the most promising patch.

    Choices with the smallest sum of ranks come first.

    >>> choose_ranks(16, 2, 3)
    [(0, 1), (0, 2), (1, 2)]
    """
    # Choose among the first `pool` ranks: the smallest number with a choice for every start.
    pool = k
    while pool < places and math.comb(pool, k) < starts:
        pool += 1
    choices = sorted(combinations(range(pool), k), key=sum)
    return choices[:starts]
