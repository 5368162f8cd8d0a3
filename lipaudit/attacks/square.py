"""Square (Andriushchenko et al., as AutoAttack runs it): random squares, no gradients.

The search in L-inf balls is ours and never evaluates the same query twice. The search in L2 balls
is the package's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pyautoattack.square import SquareAttack
from torch import Tensor

from lipaudit.attacks.autoattack import Cube, close_margins, draw_seed, in_unit_cube
from lipaudit.attacks.oracle import Turn, margins
from lipaudit.attacks.plan import CHUNK

_SHARE = 0.8
"""Share of the image that the first squares cover."""
_SCHEDULE = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""The share is halved after each of these numbers of queries."""
_AHEAD = 32
"""Queries of one sample that are evaluated together."""
_FIRST_CHECK = 125
"""Number of queries before the first check of progress; the interval doubles each time."""
_PATIENT = 8
"""After this many queries without progress, one more query is evaluated in advance at a time."""


@in_unit_cube
def square(cube: Cube, turn: Turn) -> Tensor:
    """Search with samples reshaped to images."""
    shape = cube.x.shape
    rows, columns = (1, *shape[1:])[-2:]
    images = cube.x.reshape(shape[0], -1, rows, columns)

    def logits(u: Tensor) -> Tensor:
        return cube.f(u[..., :rows, :columns].reshape(len(u), *shape[1:]))

    if cube.norm == "l2":
        return _run_package(logits, images, cube, turn)[..., :rows, :columns].reshape(shape)
    return _SquareSearch(logits, images, cube, turn).run().reshape(shape)


class _Queries(NamedTuple):
    """The change of each query: a square at (top, left), by 2 eps times a sign.

    Attributes:
        side: side length, (queries,).
        top: first row, (queries,).
        left: first column, (queries,).
        sign: sign per channel, (queries, channels).
        code: number of the change, (queries,); -1 if a repeat is unlikely.
    """

    side: Tensor
    top: Tensor
    left: Tensor
    sign: Tensor
    code: Tensor


def _draw_queries(images: Tensor, queries: int, draw: torch.Generator) -> _Queries:
    """Draw all queries at once: the same numbers as the package draws one by one."""
    channels, high, wide = images.shape[1:]
    numbers = torch.rand(queries, 2 + channels, generator=draw, dtype=torch.float32)
    side = torch.tensor([_side(i, channels, high, wide) for i in range(queries)])
    top, left = (((size - side) * numbers[:, i]).long() for i, size in enumerate((high, wide)))
    sign = torch.sign(2 * numbers[:, 2:] - 1)
    places = (high - side).clamp_min(1) * (wide - side).clamp_min(1)
    digits = 2.0 ** torch.arange(channels, dtype=torch.float64).clamp_max(30)
    signs = ((sign > 0).double() @ digits).long()
    code = (top * (wide - side).clamp_min(1) + left) * 2**channels + signs
    counted = (places * 2.0**channels <= queries) & (sign != 0).all(1)
    codes = 0
    for size in sorted(set(side.tolist())):
        same = (side == size) & counted
        code[same] += codes
        codes += int(places[same].amax()) * 2**channels if bool(same.any()) else 0
    drawn = _Queries(side, top, left, sign, torch.where(counted, code, -1))
    return _Queries(*(tensor.to(images.device) for tensor in drawn))


def _side(query: int, channels: int, high: int, wide: int) -> int:
    share = _SHARE / 2 ** sum(query > end for end in _SCHEDULE)
    side = round(math.sqrt(share * (channels * high * wide) / channels))
    return min(max(side, 1), high, wide)


class _SquareSearch:
    """The search in an L-inf ball; all rows share the queries, each at its own pace.

    A row skips queries with a known outcome: those that change nothing, and those rejected since
    its last move. Rows that seldom move evaluate several queries at a time; after a move, the
    later ones are evaluated again.
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, cube: Cube, turn: Turn) -> None:
        size, channels, high, wide = x.shape
        draw = torch.Generator().manual_seed(draw_seed(turn))
        stripes = torch.rand(size, channels, 1, wide, generator=draw, dtype=torch.float32)
        self.queries = _draw_queries(x, turn.attack.queries, draw)
        self.f, self.y, self.eps, self.turn = f, cube.y, cube.eps, turn
        self.low, self.high = (x - cube.eps).clamp_min(0.0), (x + cube.eps).clamp_max(1.0)
        self.best = (x + cube.eps * torch.sign(2 * stripes - 1).to(x.device)).clamp(0.0, 1.0)
        self.margin = margins(f(self.best), cube.y)
        self.close = close_margins(cube, turn)
        if turn.closest is not None:  # success here means that gradients mislead
            self.close = torch.maximum(self.close, turn.closest.to(self.close))
        self.room = x.new_zeros((2, channels, size, high + 1, wide + 1), dtype=torch.int32)
        self.next, self.moved = (torch.zeros_like(cube.y) for _ in range(2))
        self.check = torch.full_like(cube.y, _FIRST_CHECK)
        self.checked = torch.full_like(self.margin, torch.inf)
        codes = int(self.queries.code.amax()) + 1
        self.refused = torch.zeros(size, max(codes, 1), dtype=torch.bool, device=x.device)
        self._measure(torch.arange(size, device=x.device))

    def _measure(self, rows: Tensor) -> None:
        """Count, in every corner rectangle, the entries that either sign would change."""
        best = self.best[rows]
        for i, sign in enumerate((-1.0, 1.0)):
            changes = self._change(rows, sign) != best
            sums = changes.cumsum(-1, dtype=torch.int32).cumsum(-2, dtype=torch.int32)
            self.room[i, :, rows, 1:, 1:] = sums.movedim(1, 0)

    def _change(self, rows: Tensor, sign: float | Tensor) -> Tensor:
        moved = self.best[rows] + 2.0 * self.eps * sign
        return torch.minimum(torch.maximum(moved, self.low[rows]), self.high[rows])

    def run(self) -> Tensor:
        """Evaluate the queries of every surviving row, and return the points reached."""
        total = len(self.queries.side)
        while True:
            rows = ((self.margin > 0) & (self.next < total)).nonzero()[:, 0]
            if len(rows) == 0:
                return self.best
            ahead = self.next[rows, None] + torch.arange(_AHEAD, device=rows.device)
            unknown = (ahead < total) & ~self._find_known(rows, ahead.clamp_max(total - 1))
            most = 1 + (self.next - self.moved)[rows] // _PATIENT
            most = most.clamp_max(max(CHUNK // len(rows), 1))[:, None]
            asked = unknown & (unknown.cumsum(1) <= most)
            every = (asked == unknown).all(1)
            last = torch.where(asked, ahead, -1).amax(1)
            self.next[rows] = torch.where(every, ahead[:, -1], last) + 1
            which, place = asked.nonzero(as_tuple=True)
            if len(which):
                self._judge(rows[which], ahead[which, place])
            # Rows that moved too little while their queries doubled are given up.
            due, doublings = self.next >= self.check, (total / self.check).log2()
            progress = self.checked - self.margin
            given = due & self.turn.hopeless(self.margin, progress, doublings)
            given &= self.margin > self.close
            self.checked = torch.where(due, self.margin, self.checked)
            self.check = torch.where(due, 2 * self.check, self.check)
            self.next = torch.where(given, total, self.next)

    def _find_known(self, rows: Tensor, ahead: Tensor) -> Tensor:
        """Return which queries (rows, _AHEAD) change nothing, or were rejected before."""
        q = self.queries
        code = q.code[ahead]
        refused = (code >= 0) & self.refused[rows[:, None], code.clamp_min(0)]
        sign = (q.sign[ahead] > 0).long()
        channel = torch.arange(q.sign.shape[1], device=code.device)
        top, left, side = (t[ahead][..., None] for t in (q.top, q.left, q.side))

        def room(i: Tensor, j: Tensor) -> Tensor:
            return self.room[sign, channel, rows[:, None, None], i, j]

        low, right = top + side, left + side
        entries = room(low, right) - room(top, right) - room(low, left) + room(top, left)
        return refused | (entries.sum(-1) == 0)

    def _judge(self, rows: Tensor, asked: Tensor) -> None:
        """Evaluate queries, each row's in order, and apply its first one that helps."""
        q, (high, wide) = self.queries, self.best.shape[-2:]
        place = torch.arange(max(high, wide), device=rows.device)
        top, left, side = (t[asked][:, None] for t in (q.top, q.left, q.side))
        across = (place[:high] >= top) & (place[:high] < top + side)
        along = (place[:wide] >= left) & (place[:wide] < left + side)
        square = (across[:, :, None] & along[:, None, :])[:, None]
        moved = self._change(rows, q.sign[asked][:, :, None, None])
        z = torch.where(square, moved, self.best[rows])
        margin = margins(self.f(z), self.y[rows])
        helps = (margin < self.margin[rows]) | (margin <= 0)
        order = torch.arange(len(rows), device=rows.device)
        first = torch.full_like(self.next, len(rows))
        first.scatter_reduce_(0, rows, torch.where(helps, order, len(rows)), "amin")
        refused = (order < first[rows]) & (q.code[asked] >= 0)
        self.refused[rows[refused], q.code[asked][refused]] = True
        moving = (first < len(rows)).nonzero()[:, 0]
        if len(moving):
            step = first[moving]
            self.best[moving], self.margin[moving] = z[step], margin[step]
            self.next[moving] = self.moved[moving] = asked[step] + 1
            self.refused[moving] = False
            self._measure(moving)


def _run_package(f: Callable[[Tensor], Tensor], images: Tensor, cube: Cube, turn: Turn) -> Tensor:
    """Search an L2 ball with the package, on images large enough for its grid."""
    rows, columns = images.shape[-2:]
    high, wide = find_canvas(rows, columns)
    padded = F.pad(images, (0, wide - columns, 0, high - rows), value=0.5)
    attack = SquareAttack(
        f,
        norm="L2",
        n_queries=turn.attack.queries,
        eps=cube.eps,
        resc_schedule=False,
        device=cube.x.device,
    )
    attack.init_hyperparam(padded)
    # The package draws from the global CPU generator; its state and the default dtype come back.
    dtype, number = torch.get_default_dtype(), draw_seed(turn)
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_default_dtype(torch.float32)
            torch.default_generator.manual_seed(number)
            _, best = attack.attack_single_run(padded, cube.y)
        finally:
            torch.set_default_dtype(dtype)
    found: Tensor = best
    return found


def find_canvas(rows: int, columns: int) -> tuple[int, int]:
    """Return the smallest image size, at least this large, for the package's L2 starting grid.

    It tiles with squares of side s = rows // 5 from an offset, and fails on 4 x 4, 14 x 14 or
    14 x 28, where the last tile crosses the edge.
    """
    while not _fits_grid(rows, rows):
        rows += 1
    while not _fits_grid(rows, columns):
        columns += 1
    return rows, columns


def _fits_grid(rows: int, length: int) -> bool:
    side = rows // 5
    offset = (rows - 5 * side) // 2
    return side == 1 or (side > 1 and offset + length // side * side <= length)
