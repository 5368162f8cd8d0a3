"""Linear programs in the symbols: the margins, the ReLUs they depend on, and what they share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lipaudit.theory.relaxation.form import Form
from lipaudit.theory.relaxation.rounding import DOUBLE, up
from lipaudit.theory.relaxation.symbols import Norm, Symbols

_NUMBERS = 2**26
"""Coefficients that a problem keeps at most: symbols beyond are a radius of each row. 0.5 GB."""

_FEW = 256
"""Columns that a face keeps at least."""


@dataclass(frozen=True)
class Rows:
    """Affine functions of the symbols that are kept: rows of coefficients.

    Attributes:
        centre: (r,).
        slopes: (r, columns).
        spread: (r,), the radius of all else.
    """

    centre: Tensor
    slopes: Tensor
    spread: Tensor


@dataclass(frozen=True)
class Problem:
    """Margins and the ReLUs that they depend on, over the input's and the ReLUs' symbols.

    Attributes:
        margins, units: their rows.
        slope, offset: a and m of every ReLU.
        columns: of every ReLU's symbol.
        depth: from which call of a ReLU it is.
        inputs: how many columns the input has.
        norm: of the ball.
    """

    margins: Rows
    units: Rows
    slope: Tensor
    offset: Tensor
    columns: Tensor
    depth: Tensor
    inputs: int
    norm: Norm

    @cached_property
    def reach(self) -> Tensor:
        """How far multipliers move the coefficient of each symbol, up to a common factor."""
        sizes = torch.linalg.vector_norm(self.units.slopes, dim=0)
        return sizes.clamp_min(torch.finfo(sizes.dtype).tiny)

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the problem in another precision: to search, not to claim."""

        def cast(rows: Rows) -> Rows:
            return Rows(*(getattr(rows, field.name).to(dtype) for field in fields(rows)))

        return replace(
            self,
            margins=cast(self.margins),
            units=cast(self.units),
            slope=self.slope.to(dtype),
            offset=self.offset.to(dtype),
        )


def problem_of(margins: Form) -> Problem:
    """Return the problem whose margins are a form of one axis, in float64.

    ReLUs that no margin depends on, through whatever others, are left out: those of tokens that
    the last attention no longer reads, say.
    """
    symbols, units = margins.symbols, margins.symbols.units
    births = [u.first + torch.arange(len(u.slope), device=margins.device) for u in units]
    used = _used(margins, births)
    count = max([len(margins.generators), *(len(u.generators) for u in units)])
    rows = [(margins.centre, margins.generators, margins.slack)]
    rows += [
        (u.centre[own], u.generators[:, own], u.slack[own])
        for u, own in zip(units, used, strict=True)
    ]
    own = torch.cat([birth[mask] for birth, mask in zip(births, used, strict=True)])
    kept = _columns(rows, max([count, *(own + 1).tolist()]), own, symbols)
    first, *others = (_rows(*each, kept, symbols) for each in rows)

    def joined(name: str) -> Tensor:
        parts = zip(units, used, strict=True)
        return torch.cat([getattr(u, name)[mask].to(DOUBLE) for u, mask in parts])

    return Problem(
        margins=first,
        units=Rows(
            *(torch.cat(each) for each in zip(*(vars(r).values() for r in others), strict=True))
        ),
        slope=joined("slope"),
        offset=joined("offset"),
        columns=(kept.cumsum(0) - 1)[own],
        depth=torch.cat(
            [torch.full_like(b[m], i) for i, (b, m) in enumerate(zip(births, used, strict=True))]
        ),
        inputs=symbols.n,
        norm=symbols.norm,
    )


def _used(margins: Form, births: list[Tensor]) -> list[Tensor]:
    """Which ReLUs of every call a margin depends on."""
    reached = (margins.generators != 0).any(1)
    used = []
    for unit, birth in reversed(list(zip(margins.symbols.units, births, strict=True))):
        own = F.pad(reached, (0, max(0, int(birth[-1]) + 1 - len(reached))))[birth]
        more = (unit.generators[:, own] != 0).any(1)
        size = max(len(reached), len(more))
        reached = F.pad(reached, (0, size - len(reached))) | F.pad(more, (0, size - len(more)))
        used.append(own)
    return used[::-1]


def _columns(
    rows: list[tuple[Tensor, Tensor, Tensor]], count: int, own: Tensor, symbols: Symbols
) -> Tensor:
    """Which symbols keep a column: input, ReLUs, and of the others the largest, as many as fit."""
    size = torch.zeros(count, dtype=DOUBLE, device=own.device)
    for _, g, _ in rows:
        size[: len(g)] += g.abs().sum(1)
    size[symbols.n : symbols.first_error] = 0  # products are bounded together
    always = torch.cat([torch.arange(symbols.n, device=own.device), own])
    size[always] = 0
    room = _NUMBERS // sum(g.shape[1] for _, g, _ in rows) - len(always)
    most = min(max(room, 0), int((size > 0).sum()))
    kept = torch.zeros(count, dtype=torch.bool, device=own.device)
    kept[always] = True
    kept[size.topk(most).indices] = True
    return kept


def _rows(c: Tensor, g: Tensor, slack: Tensor, kept: Tensor, symbols: Symbols) -> Rows:
    other = g * ~kept[: len(g), None]
    low, high = symbols.quadratic_range(g)
    spread = up(symbols.sizes(other).errors + torch.maximum(-low, high) + slack)
    slopes = g.new_zeros(g.shape[1], int(kept.sum()), dtype=DOUBLE)
    present = g[kept[: len(g)]].mT.to(DOUBLE)
    slopes[:, : present.shape[1]] = present
    return Rows(c.to(DOUBLE), slopes, spread)


def faced(problem: Problem, t: Float[Tensor, "b columns"], share: float) -> Problem:
    """Return the problem on a face of the box, for a search near multipliers of coefficients t.

    A symbol whose coefficient keeps its sign sits at the same end all the time: it is put there,
    and its column becomes part of the constants. Those that stay are the share with the smallest
    coefficients against the sizes of their columns, and all of ReLUs. The minimum on a face is no
    less than that on the box: what is claimed is evaluated without.
    """
    low, high = t.amin(0), t.amax(0)
    firm = torch.maximum(low, -high) / problem.reach
    inputs = 0 if problem.norm == "linf" else problem.inputs
    firm[:inputs] = -torch.inf
    firm[problem.columns] = -torch.inf
    always = inputs + len(problem.columns)
    loose = int((firm <= 0).sum())
    most = min(len(firm), max(always + _FEW, loose + int(share * len(firm))))
    kept = torch.zeros_like(firm, dtype=torch.bool)
    kept[firm.topk(most, largest=False).indices] = True
    end = torch.where(kept, 0.0, (low + high).sign())

    def cut(rows: Rows) -> Rows:
        return Rows(rows.centre - rows.slopes @ end, rows.slopes[:, kept], rows.spread)

    return replace(
        problem,
        margins=cut(problem.margins),
        units=cut(problem.units),
        columns=(kept.cumsum(0) - 1)[problem.columns],
        inputs=int(kept[: problem.inputs].sum()),
    )
