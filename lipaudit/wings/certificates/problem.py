"""The margins of a pass and the ReLUs they depend on, as rows of coefficients.

Branch and bound (`branch`) evaluates all of it many times: only the symbols that matter get a
column, and the others become a radius per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.symbols import DOUBLE, Symbols, Unit, tiny, up

if TYPE_CHECKING:
    from jaxtyping import Float


NUMBERS = 2**26
"""Largest number of coefficients kept for a problem (0.5 GB). Further symbols are merged into a
radius per row."""

FEW = 256
"""Smallest number of columns that a face keeps."""


class Rows(NamedTuple):
    """Affine functions of the symbols that are kept: rows of coefficients.

    Attributes:
        centre: (r,).
        slopes: (r, columns).
        spread: (r,), the radius of all else.
    """

    centre: Tensor
    slopes: Tensor
    spread: Tensor

    @property
    def size(self) -> Tensor:
        """Return the sum of the sizes in each row."""
        return self.centre.abs() + self.spread + self.slopes.abs().sum(1)


@dataclass(frozen=True)
class Problem:
    """Margins and the ReLUs they depend on, over the symbols of the input and the ReLUs.

    Attributes:
        margins, units: rows of the margins and of the ReLUs.
        slope, offset: a and m of every ReLU.
        columns: column of every ReLU's symbol.
        depth: number of the ReLU call it belongs to.
        inputs: number of columns of the input.
        symbols: the symbols of the pass, for the norm of the ball.
    """

    margins: Rows
    units: Rows
    slope: Tensor
    offset: Tensor
    columns: Tensor
    depth: Tensor
    inputs: int
    symbols: Symbols

    @cached_property
    def reach(self) -> Tensor:
        """Return how much multipliers change each symbol's coefficient, up to a common factor."""
        sizes = torch.linalg.vector_norm(self.units.slopes, dim=0)
        return sizes.clamp_min(tiny(sizes.dtype))

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the sums of the sizes in each row: of the margins and of the ReLUs."""
        return self.margins.size, self.units.size + 2 * self.offset

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the problem in another precision, for the search only."""
        return replace(
            self,
            margins=Rows(*(part.to(dtype) for part in self.margins)),
            units=Rows(*(part.to(dtype) for part in self.units)),
            slope=self.slope.to(dtype),
            offset=self.offset.to(dtype),
        )


def problem_of(margins: Form, numbers: int = NUMBERS) -> Problem:
    """Return the problem whose margins are a form of one axis, in float64.

    ReLUs that no margin depends on, even through other ReLUs, are left out, such as those of
    tokens that the last attention does not read.

    Args:
        margins: the form.
        numbers: largest number of coefficients; further symbols become a radius per row.
    """
    symbols = margins.symbols
    units, numbers_of_units, depths = _read_units(margins)
    # The rows of the margins, then those of each call's ReLUs.
    rows = [(margins.centre, margins.generators, margins.slack)]
    rows += [(unit.centre, unit.generators, unit.slack) for unit in units]
    row_count = sum(len(centre) for centre, _, _ in rows)
    always = torch.cat([torch.arange(symbols.n, device=margins.device), numbers_of_units])
    # A column costs one number for every row.
    room = numbers // row_count - len(always)
    kept = _choose_columns(symbols, [g for _, g, _ in rows], always, max(room, 0))
    parts = []
    for centre, g, slack in rows:
        present = kept[: len(g)]
        low, high = symbols.quadratic_range(g)
        errors = symbols.sizes(g * ~present[:, None]).errors
        spread = up(errors + torch.maximum(-low, high) + slack)
        missing = int(kept.sum()) - int(present.sum())
        slopes = F.pad(g[present].mT.to(DOUBLE), (0, missing))
        parts.append(Rows(centre, slopes, spread))
    return Problem(
        margins=parts[0],
        units=Rows(*(torch.cat(each) for each in zip(*parts[1:], strict=True))),
        slope=torch.cat([unit.slope for unit in units]),
        offset=torch.cat([unit.offset for unit in units]),
        columns=(kept.cumsum(0) - 1)[numbers_of_units],
        depth=depths,
        inputs=symbols.n,
        symbols=symbols,
    )


def _read_units(margins: Form) -> tuple[list[Unit], Tensor, Tensor]:
    """Return the ReLUs of each call that margins depend on, their symbols and their calls."""
    symbols = margins.symbols
    read = torch.zeros(symbols.count, dtype=torch.bool, device=margins.device)
    read[: len(margins.generators)] = (margins.generators != 0).any(1)
    units = []
    numbers = []
    depths = []
    # Backwards: a ReLU counts if what is already kept depends on its error symbol.
    for depth, unit in reversed(list(enumerate(symbols.units))):
        born = unit.first + torch.arange(len(unit.slope), device=margins.device)
        chosen = read[born]
        generators = unit.generators[:, chosen]
        read[: len(generators)] |= (generators != 0).any(1)
        part = Unit(
            centre=unit.centre[chosen],
            generators=generators,
            slack=unit.slack[chosen],
            slope=unit.slope[chosen],
            offset=unit.offset[chosen],
            first=unit.first,
        )
        units.append(part)
        numbers.append(born[chosen])
        depths.append(torch.full_like(born[chosen], depth))
    return units[::-1], torch.cat(numbers[::-1]), torch.cat(depths[::-1])


def _choose_columns(
    symbols: Symbols, stacks: Sequence[Tensor], always: Tensor, room: int
) -> Tensor:
    """Return which symbols get columns: some always, and the largest other errors, as many as fit.

    The products of the input's symbols are bounded together.
    """
    sizes = torch.zeros(symbols.count, dtype=DOUBLE, device=always.device)
    for g in stacks:
        sizes[: len(g)] += g.abs().sum(1)
    sizes[symbols.n : symbols.first_error] = 0
    sizes[always] = 0
    others = min(room, int((sizes > 0).sum()))
    kept = torch.zeros(symbols.count, dtype=torch.bool, device=always.device)
    kept[always] = True
    kept[sizes.topk(others).indices] = True
    return kept


def restrict_to_face(
    problem: Problem, t: Float[Tensor, "b columns"], share: float, few: int = FEW
) -> Problem:
    """Return the problem on a face of the box, for a search near multipliers of coefficients t.

    A symbol whose coefficient keeps its sign sits at the same end all the time: it is put there,
    and its column becomes part of the constants. Those that stay are the share with the smallest
    coefficients against the sizes of their columns, and all of ReLUs. The minimum on a face is no
    less than that on the box: what is claimed is evaluated without.
    """
    low = t.amin(0)
    high = t.amax(0)
    # firm > 0 where the coefficient has one sign at all given multipliers, by its distance from
    # 0. Symbols of an L2 ball and of ReLUs always stay.
    firm = torch.maximum(low, -high) / problem.reach
    inputs = 0 if problem.symbols.norm == "linf" else problem.inputs
    firm[:inputs] = -torch.inf
    firm[problem.columns] = -torch.inf
    always = inputs + len(problem.columns)
    loose = int((firm <= 0).sum())
    most = max(always + few, loose + int(share * len(firm)))
    most = min(most, len(firm))
    kept = torch.zeros_like(firm, dtype=torch.bool)
    kept[firm.topk(most, largest=False).indices] = True
    end = torch.where(kept, 0.0, (low + high).sign())
    return replace(
        problem,
        margins=_fix_columns(problem.margins, end, kept),
        units=_fix_columns(problem.units, end, kept),
        columns=(kept.cumsum(0) - 1)[problem.columns],
        inputs=int(kept[: problem.inputs].sum()),
    )


def _fix_columns(rows: Rows, end: Tensor, kept: Tensor) -> Rows:
    """Return rows over the kept columns, the others being at an end."""
    return Rows(rows.centre - rows.slopes @ end, rows.slopes[:, kept], rows.spread)
