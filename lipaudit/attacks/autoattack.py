"""The attacks of AutoAttack (Croce & Hein, arXiv 2003.01690), run by the package pyautoattack.

APGD takes projected gradient steps and halves their size when they stop helping. FAB steps onto
the boundary of one other class, as close to the sample as possible. Square changes random squares
and needs no gradient. In l1 balls APGD first searches larger balls (Croce & Hein, *Mind the box*,
arXiv 2103.01208). The package searches in [0, 1]; `UnitCube` shows it the model there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from pyautoattack.autopgd_base import APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from lipaudit.attacks.balls import Ball, Box, distance
from lipaudit.attacks.oracle import Classifier, Turn, logits_of, margins

NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}
LOSSES = {"apgd-ce": "ce", "apgd-dlr": "dlr", "apgd-t": "dlr-targeted"}
# The package warns of zero gradients, which `evaluate` counts and notes once for all attacks.
MUTE = logging.Logger("pyautoattack", logging.CRITICAL)
# A sample is clearly broken, and not attacked any more, once another logit exceeds that of its
# label by this share of the largest absolute logit: rounding on another device or in another batch
# then does not change the verdict.
CLEAR = 2.0**-10
# Largest number of pixels of images whose logits Square caches: on small images squares repeat.
REPEATING = 1024
# Rounding of the l1 norm of a point on its sphere, as a share of the radius.
SPHERE = 1e-5


class _AllBrokenError(Exception):
    """No sample is left to attack."""


def _choose_box(x: Tensor, eps: float) -> Box:
    """Return the ends (low, high) of a box for embeddings, which have none.

    It is so wide that clipping points within eps of x to the box changes nothing. Its ends are
    powers of two, so that dividing by its width is exact.
    """
    largest = float(x.abs().amax()) + 2 * eps
    high = 2.0 ** math.ceil(math.log2(largest))
    return -high, high


class UnitCube:
    """The model on samples mapped to [0, 1], with float32 logits, as the package calls it.

    It stores a point that broke each row. A sample that is clearly broken is not evaluated again:
    its logits are 0 from then on. The package treats rows apart, so this changes no other row.

    A targeted attack gets several rows of one sample, with different target classes.

    Attributes:
        centres: the samples in the cube, around which the package searches, (rows, ...).
        eps: the radius in the cube.
        reach: largest distance from a sample at which a point may break it.
        may_leave: whether the attack evaluates points beyond `reach`.
        adversarial: the last point that broke each row, else the sample, (rows, ...).
        broken: whether each row was broken, (rows,).
        clearly_broken: whether each sample of the chunk is clearly broken in one of its rows: its
            label loses by the share CLEAR of the largest logit, (samples,).
    """

    def __init__(self, f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> None:
        """Map samples and radius to the cube [0, 1]^n, in which the package pyautoattack searches.

        Args:
            f: x -> logits.
            x: the samples to attack, one per row; a targeted attack gets a row per target class.
            y: labels of the rows.
            ball: norm, radius and box.
            turn: settings and random numbers of this run of the attack, and the sample of each
                row.
        """
        low, high = ball.box or _choose_box(x, ball.eps)
        self.low = low
        self.width = high - low
        self.f = f
        self.x = x
        self.y = y
        self.ball = ball
        self.turn = turn
        self.centres = self._map_to_cube(x)
        self.eps = ball.eps / self.width
        # The largest distance at which a misclassified point counts as an adversarial example.
        self.reach = self.eps
        if ball.norm == "l1":
            # Points that an attack projects onto the l1 sphere are outside by rounding.
            self.reach = self.eps * (1 + SPHERE)
        # FAB, and in l1 balls APGD (which begins in balls of 3 and 2 times the radius), also
        # evaluate points outside of the ball, which must not count.
        self.may_leave = turn.attack.name == "fab-t" or ball.norm == "l1"
        self.adversarial = self.centres.clone()
        self.broken = torch.zeros_like(y, dtype=torch.bool)
        # By sample, not by row: a sample that is clearly broken in one of its rows needs no
        # further search in its other rows (of other target classes).
        count = int(turn.rows.max()) + 1
        self.clearly_broken = x.new_zeros(count, dtype=torch.bool)

    def _map_to_cube(self, z: Tensor) -> Tensor:
        return ((z - self.low) / self.width).contiguous()

    def evaluate(self, u: Tensor) -> Tensor:
        """Return the logits at some points of the cube."""
        z = self.low + self.width * u.to(self.x.dtype)
        return logits_of(self.f(z)).float()

    def __call__(self, u: Tensor) -> Tensor:
        """Return the logits of a point per row, (rows, classes): this is the package's model.

        The package (pyautoattack) searches in the cube [0, 1]^n. A row is a sample, or with
        several target classes one of its copies. The call also records which rows are broken
        (misclassified inside the ball), and by which points. A sample is clearly broken if its
        label loses by more than the share CLEAR of the largest logit, which rounding could not
        change: its rows are not evaluated any more, and get logits of 0.

        Args:
            u: points of the cube, (rows, ...).

        Raises:
            _AllBrokenError: every sample is clearly broken.
        """
        sample_of_row = self.turn.rows  # (rows,): `clearly_broken` is per sample
        is_open = ~self.clearly_broken[sample_of_row]
        rows = is_open.nonzero()[:, 0]
        if not len(rows):
            raise _AllBrokenError
        logits = self.evaluate(u[rows])  # of the model at the points mapped back from the cube
        y = self.y[rows]
        points = u[rows].detach()
        scores = logits.detach()
        is_broken = scores.argmax(1) != y
        # FAB, and APGD in l1, also evaluate points outside of the ball: only nearer ones count.
        if self.may_leave:
            lengths = distance(points, self.centres[rows], self.ball.norm)
            is_broken &= lengths <= self.reach
        # Clearly broken: rounding could not make the label win again.
        rounding = CLEAR * scores.abs().amax(1)
        is_clear = is_broken & (margins(scores, y) < -rounding)
        broken = rows[is_broken]
        self.adversarial[broken] = points[is_broken].to(self.adversarial)
        self.broken[broken] = True
        self.clearly_broken[sample_of_row[rows[is_clear]]] = True
        # (all rows, classes). `index_copy` is differentiable, so the package gets gradients.
        all_logits = logits.new_zeros(len(u), logits.shape[1])
        return all_logits.index_copy(0, rows, logits)

    @contextmanager
    def isolate_package(self) -> Iterator[Tensor]:
        """Isolate a run of the package pyautoattack: `with cube.isolate_package() as start: ...`.

        `start` has random starting points in the cube, one per row. Inside the block, torch's
        global generator has a seed of this run, and the default dtype is float32. Both are
        restored after the block. The block ends early, without an error, once every sample is
        clearly broken.
        """
        # The package draws from torch's global generator, and creates tensors of default dtype.
        dtype = torch.get_default_dtype()
        seed = int(torch.randint(2**62, (1,), generator=self.turn.generator))
        start = self._map_to_cube(self.turn.start())
        with torch.random.fork_rng(devices=[]):
            try:
                torch.set_default_dtype(torch.float32)
                torch.default_generator.manual_seed(seed)
                yield start
            except _AllBrokenError:
                pass
            finally:
                torch.set_default_dtype(dtype)

    def map_from_cube(self, u: Tensor) -> Tensor:
        """Return points of the cube in the attacked space."""
        moved = (u - self.centres).to(self.x.dtype)
        return self.x + self.width * moved


@torch.no_grad()
def apgd(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
    """Run APGD: projected gradient ascent on a loss, with adaptive step size.

    The loss is the cross-entropy, the difference of logits ratio (DLR), or DLR against a target
    class. Returns for each row the last misclassified point, else the point with the highest loss.

    Args:
        f: x -> logits.
        x: samples, one per row.
        y: labels.
        ball: norm, radius and box.
        turn: settings, random starts and target classes of this run.
    """
    # The package pyautoattack searches in the cube [0, 1]^n. `cube` maps samples, radius and
    # results, and records which rows are broken (misclassified inside the ball).
    cube = UnitCube(f, x, y, ball, turn)
    # This class of the package can run all three losses.
    attack = APGDAttack_targeted(
        cube, turn.attack.steps, NORMS[ball.norm], eps=cube.eps, device=x.device, logger=MUTE
    )
    attack.loss = LOSSES[turn.attack.name]
    attack.y_target = turn.target
    attack.init_hyperparam(cube.centres)
    steps = turn.attack.steps
    with cube.isolate_package() as start:
        # In l1 the package first searches balls of 3 and 2 times the radius, with 3/10 of the
        # steps in each ball. The package draws the start itself.
        if ball.norm == "l1":
            early = 3 * steps // 10
            radii = [3 * cube.eps, 2 * cube.eps, cube.eps]
            steps_of_radii = [early, early, steps - 2 * early]
            best, *_ = attack.decr_eps_pgd(cube.centres, y, radii, steps_of_radii)
        else:
            best, *_ = attack.attack_single_run(cube.centres, y, x_init=start)
        # `best` has the points with the highest loss.
        cube.adversarial[~cube.broken] = best[~cube.broken]
    return cube.map_from_cube(cube.adversarial)


@torch.no_grad()
def fab(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
    """Run FAB: step onto the decision boundary of the target class, as near to x as possible.

    Returns for each row the last misclassified point inside the ball, else the sample itself. The
    package pyautoattack computes in float32.

    Args:
        f: x -> logits.
        x: samples, one per row.
        y: labels.
        ball: norm, radius and box.
        turn: settings, random start and target classes of this run.
    """
    # Samples and radius mapped to the cube [0, 1]^n, in which the package searches.
    cube = UnitCube(f, x, y, ball, turn)
    attack = FABAttack_PT(
        cube, NORMS[ball.norm], n_iter=turn.attack.steps, eps=cube.eps, device=x.device
    )
    # The package aims at the class of one rank in all rows. Here each row has its own target.
    attack.get_diff_logits_grads_batch = partial(
        attack.get_diff_logits_grads_batch_targeted, la_target=turn.target
    )
    with cube.isolate_package():
        # Called with labels, the package would skip rows that are misclassified already.
        attack.attack_single_run(cube.centres, use_rand_start=turn.restart > 0)
    # The attack and the function above refer to each other: this cycle would keep the samples in
    # memory.
    del attack.get_diff_logits_grads_batch
    return cube.map_from_cube(cube.adversarial)


@torch.no_grad()
def square(f: Classifier, x: Tensor, y: Tensor, ball: Ball, turn: Turn) -> Tensor:
    """Run Square: random search that changes squares of pixels, without gradients.

    Samples that are no images are reshaped to images.

    Args:
        f: x -> logits.
        x: samples, one per row.
        y: labels.
        ball: norm, radius and box.
        turn: settings and random numbers of this run.
    """
    # Samples and radius mapped to the cube [0, 1]^n, in which the package pyautoattack searches.
    cube = UnitCube(f, x, y, ball, turn)
    # The last two axes of a sample; a sample with one axis is an image of one row.
    rows, columns = (1, *x.shape[1:])[-2:]
    images = cube.centres.reshape(len(x), -1, rows, columns)  # (batch, channels, rows, columns)
    height = rows
    if ball.norm != "linf":  # in other norms the package fails on some sizes: add grey rows
        height = find_height(rows, columns)
    images = F.pad(images, (0, 0, 0, height - rows), value=0.5)
    logits_of_image: dict[bytes, Tensor] = {}  # a cache, by the image's bytes

    def evaluate(u: Tensor) -> Tensor:
        """Return the logits of images (batch, channels, height, columns).

        Only the first `rows` rows of an image are the sample: `find_height` may have asked for
        more rows, because the package fails on some heights.
        """
        # Raises after the time limit. The model checks it as well, but is not called for points
        # whose logits are known.
        turn.check()
        points = u[..., :rows, :].reshape(len(u), *x.shape[1:])  # without padding
        return _evaluate_once(cube, points, logits_of_image)

    attack = SquareAttack(
        evaluate,
        norm=NORMS[ball.norm],
        n_queries=turn.attack.queries,
        eps=cube.eps,
        resc_schedule=False,  # as AutoAttack: sizes of squares do not depend on the queries
        device=x.device,
    )
    attack.init_hyperparam(images)
    with cube.isolate_package():
        _, images = attack.attack_single_run(images, y)  # number of queries, and points
    return cube.map_from_cube(images[..., :rows, :].reshape(x.shape))


def _evaluate_once(cube: UnitCube, points: Tensor, logits_of_image: dict[bytes, Tensor]) -> Tensor:
    """Return the logits of images; a small image that was evaluated before is not evaluated again.

    Args:
        cube: the model on the cube.
        points: the images, as points of the cube.
        logits_of_image: logits by the bytes of the image; those of new images are added.
    """
    if not len(points):  # the package asks for no image when all margins are exactly 0
        return points.new_zeros(0, 1)
    if points[0].numel() > REPEATING:  # in large images, squares hardly ever repeat
        return cube.evaluate(points)
    keys = [point.tobytes() for point in points.cpu().numpy()]
    unknown = {key: i for i, key in enumerate(keys) if key not in logits_of_image}
    if unknown:
        logits = cube.evaluate(points[list(unknown.values())])
        logits_of_image.update(zip(unknown, logits, strict=True))
    return torch.stack([logits_of_image[key] for key in keys])


def find_height(rows: int, columns: int) -> int:
    """Return the height to which an image must be padded for Square in L2 and L1.

    The package covers the image with squares of side rows // 5, from an offset of (rows % 5) // 2
    in both directions. It fails where the last square crosses the edge, as on 14 x 14 or 14 x 28,
    and where the side is 0, as on 4 x 4. Such heights are rounded up to a multiple of 5, which has
    no offset. Squares of side 1 never cross the edge: they are inside of the image or, by the
    offset, wholly outside, where the package changes nothing.
    """
    side, spare = divmod(rows, 5)
    offset = spare // 2
    fits = side >= 1
    if side > 1:
        for size in (rows, columns):
            whole_squares = size // side * side
            fits = fits and offset + whole_squares <= size
    if fits:
        return rows
    missing = -rows % 5
    return rows + missing
