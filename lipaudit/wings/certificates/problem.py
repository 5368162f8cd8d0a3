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
from torch.linalg import vector_norm

from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.rounding import DOUBLE, round_up, tiny
from lipaudit.wings.certificates.symbols import ReluCall, Symbols

if TYPE_CHECKING:
    from jaxtyping import Float


NUMBERS = 2**26
"""Largest number of coefficients kept for a problem (0.5 GB). Further symbols are merged into a
radius per row."""

FEW = 256
"""Smallest number of columns that a face keeps."""


class SymbolRows(NamedTuple):
    """Affine functions of the symbols e, unknowns in [-1, 1]: rows centre + slopes @ e +- spread.

    Attributes:
        centre: (rows,).
        slopes: (rows, columns), the coefficients of symbols that have a column.
        spread: (rows,), the radius of all other symbols and of slack.
    """

    centre: Tensor
    slopes: Tensor
    spread: Tensor

    @property
    def magnitude(self) -> Tensor:
        """Return the sum of the absolute values in each row."""
        return self.centre.abs() + self.spread + self.slopes.abs().sum(1)


@dataclass(frozen=True)
class Problem:
    """Margins and the ReLUs they depend on, as affine functions of the symbols.

    Attributes:
        margins: rows of the margins.
        relus: rows of the input z of every ReLU.
        slope, offset: a and m of every ReLU, whose output is a z + m (1 + eps).
        columns: column of every ReLU's symbol eps.
        depth: number of the ReLU call it belongs to.
        inputs: number of columns of the input.
        symbols: the symbols of the pass, for the norm of the ball.
    """

    margins: SymbolRows
    relus: SymbolRows
    slope: Tensor
    offset: Tensor
    columns: Tensor
    depth: Tensor
    inputs: int
    symbols: Symbols

    @cached_property
    def column_norms(self) -> Tensor:
        """Return the norm of each column of the coefficients of all ReLU inputs, (columns,).

        A column belongs to a symbol, an unknown in [-1, 1]. A change of the multipliers changes
        the coefficient of the symbol in a bound about in proportion to this norm.
        """
        norms = vector_norm(self.relus.slopes, dim=0)
        return norms.clamp_min(tiny(norms.dtype))

    @cached_property
    def margin_magnitude(self) -> Tensor:
        """Return the sum of absolute values in each margin's row, which bounds its rounding."""
        return self.margins.magnitude

    @cached_property
    def relu_magnitude(self) -> Tensor:
        """Return the sum of the absolute values that a multiplier 1 of each ReLU adds to a row."""
        return self.relus.magnitude + 2 * self.offset

    def find_minimum(self, coefficients: Tensor) -> Tensor:
        """Return e (b, columns) such that coefficients . symbols is smallest at the symbols -e.

        Symbols are unknowns. For symbols in [-1, 1], such as errors, e is the sign of the
        coefficient. For the input symbols of an L2 ball, e is the unit vector along the
        coefficients. For a ball of replaced words, `find_best_words` finds the minimum.
        """
        symbols = self.symbols
        e = coefficients.sign()
        of_inputs = coefficients[:, : self.inputs]
        if symbols.norm == "l2":
            size = vector_norm(of_inputs, dim=1, keepdim=True)
            e[:, : self.inputs] = of_inputs / size.clamp_min(tiny(coefficients.dtype))
        elif symbols.norm == "words":
            # Symbols that make -coefficients . symbols largest make coefficients . symbols least.
            least = symbols.find_best_words(-of_inputs.mT).mT
            e[:, : self.inputs] = -least
        return e

    def to(self, dtype: torch.dtype) -> Problem:
        """Return the problem in another precision, for the search: proofs need float64."""
        return replace(
            self,
            margins=SymbolRows(*(part.to(dtype) for part in self.margins)),
            relus=SymbolRows(*(part.to(dtype) for part in self.relus)),
            slope=self.slope.to(dtype),
            offset=self.offset.to(dtype),
        )


def make_problem(margins: Form, numbers: int = NUMBERS) -> Problem:
    """Return the problem of branch and bound over the signs of ReLUs, in float64.

    A row is an affine function of the symbols: a margin, or the input of a ReLU whose sign is
    unknown on the ball. The symbols of the input and of these ReLUs get a column of coefficients.
    Other symbols get a column as long as there is room. The remaining symbols become a radius per
    row. A ReLU is left out if no margin depends on it, even through other ReLUs: for example a
    ReLU of a token that the last attention does not read.

    Args:
        margins: a form of one axis, logit of the label minus every other logit.
        numbers: largest number of coefficients.
    """
    symbols = margins.symbols
    calls = _list_needed_relus(margins)
    numbers_of_relus = torch.cat([call.numbers for call in calls])  # of their error symbols
    # The margins, then the inputs of the ReLUs of each call.
    forms = [(margins.centre, margins.generators, margins.slack)]
    forms += [(call.centre, call.generators, call.slack) for call in calls]
    row_count = sum(len(centre) for centre, _, _ in forms)
    # Symbols that get a column in any case: those of the input and of the ReLUs.
    always = torch.cat([torch.arange(symbols.inputs, device=margins.device), numbers_of_relus])
    # Number of further columns, each of which has a coefficient in every row.
    room = numbers // row_count - len(always)
    stacks = [generators for _, generators, _ in forms]
    has_column = _choose_columns(symbols, stacks, always, max(room, 0))
    of_margins, *of_calls = (_make_rows(symbols, *form, has_column) for form in forms)
    column_of_symbol = has_column.cumsum(0) - 1
    depths = [torch.full_like(call.numbers, depth) for depth, call in enumerate(calls)]
    return Problem(
        margins=of_margins,
        relus=SymbolRows(*map(torch.cat, zip(*of_calls, strict=True))),
        slope=torch.cat([call.slope for call in calls]),
        offset=torch.cat([call.offset for call in calls]),
        columns=column_of_symbol[numbers_of_relus],
        depth=torch.cat(depths),
        inputs=symbols.inputs,
        symbols=symbols,
    )


def _list_needed_relus(margins: Form) -> list[ReluCall]:
    """Return the ReLUs of unknown sign that margins depend on, directly or through other ReLUs.

    The output of such a ReLU has an error symbol (an unknown in [-1, 1]) of its own. A margin or
    ReLU that depends on this output has a nonzero coefficient of the symbol. The ReLUs are in the
    order of the calls of the model.
    """
    symbols = margins.symbols
    is_read = torch.zeros(symbols.count, dtype=torch.bool, device=margins.device)
    is_read[: len(margins.generators)] = (margins.generators != 0).any(1)
    calls = []
    # Backwards: `is_read` marks the symbols on which margins or ReLUs found so far depend.
    for call in reversed(symbols.relu_calls):
        needed = call.select(is_read[call.numbers])
        is_read[: len(needed.generators)] |= (needed.generators != 0).any(1)
        calls.append(needed)
    return calls[::-1]


def _make_rows(
    symbols: Symbols, centre: Tensor, generators: Tensor, slack: Tensor, has_column: Tensor
) -> SymbolRows:
    """Return the entries of a form as rows centre + slopes @ (symbols with a column) +- spread.

    Args:
        symbols: the symbols (unknowns in [-1, 1]) of the pass.
        centre: (rows,), an entry for each row.
        generators: (symbols, rows), the coefficients.
        slack: (rows,), the radius of a further error.
        has_column: (all symbols,), True for symbols that get a column.
    """
    # A form has no coefficients of symbols created after it: their columns are zeros.
    present = has_column[: len(generators)]
    missing = int(has_column.sum()) - int(present.sum())
    slopes = F.pad(generators[present].mT.to(DOUBLE), (0, missing))
    # The radius of everything without a column: quadratic part, other errors, and slack.
    low, high = symbols.quadratic_range(generators)
    errors = symbols.bound_parts(generators * ~present[:, None]).errors
    spread = round_up(errors + torch.maximum(-low, high) + slack)
    return SymbolRows(centre, slopes, spread)


def _choose_columns(
    symbols: Symbols, stacks: Sequence[Tensor], always: Tensor, room: int
) -> Tensor:
    """Return a mask of the symbols that get a column of coefficients in a `Problem`.

    The symbols in `always` get a column, and so do the `room` error symbols with the largest
    coefficients over all rows. Products of two input symbols (order 2) get none: the quadratic
    part of a row is bounded as a whole.

    Args:
        symbols: the symbols of the pass.
        stacks: coefficients (symbols, rows) of all rows.
        always: indices of the symbols that always get a column: of the input and of ReLUs.
        room: largest number of other columns.
    """
    sizes = always.new_zeros(symbols.count, dtype=DOUBLE)
    for stack in stacks:
        sizes[: len(stack)] += stack.abs().sum(1)
    sizes[symbols.inputs : symbols.first_error] = 0  # products of input symbols
    sizes[always] = 0
    others = min(room, int((sizes > 0).sum()))
    has_column = always.new_zeros(symbols.count, dtype=torch.bool)
    has_column[always] = True
    has_column[sizes.topk(others).indices] = True
    return has_column


def restrict_to_face(
    problem: Problem, coefficients: Float[Tensor, "b columns"], share: float, few: int = FEW
) -> Problem:
    """Return a problem with fewer columns, in which most symbols are fixed at -1 or 1 (a face).

    A bound is the minimum of an affine function over symbols in [-1, 1], the box. While a
    coefficient keeps its sign, the minimum is at the same end of [-1, 1]: the symbol is fixed
    there, and its column is added to the constants. The minimum on a face may be larger than on
    the box. So only the search uses a face, and proofs are evaluated on the box.

    Args:
        problem: the problem on the box.
        coefficients: of the symbols, one row for each part of the ball, at the multipliers from
            which the search starts.
        share: share of all columns that stay in addition to columns whose coefficient has
            different signs in different parts.
        few: smallest number of columns that stay in addition to the columns of ReLUs.
    """
    low = coefficients.amin(0)
    high = coefficients.amax(0)
    # Distance of a coefficient from a change of sign, relative to how much multipliers change it;
    # <= 0 if its sign differs between parts.
    distance = torch.maximum(low, -high) / problem.column_norms
    # Symbols of ReLUs always stay. Symbols of the input stay unless each is in [-1, 1] (linf).
    inputs = 0 if problem.symbols.norm == "linf" else problem.inputs
    distance[:inputs] = -torch.inf
    distance[problem.columns] = -torch.inf
    always = inputs + len(problem.columns)
    doubtful = int((distance <= 0).sum())
    count = max(always + few, doubtful + int(share * len(distance)))
    count = min(count, len(distance))
    stays = torch.zeros_like(distance, dtype=torch.bool)
    stays[distance.topk(count, largest=False).indices] = True
    # A fixed symbol is at -end, where its coefficient times the symbol is smallest.
    end = torch.where(stays, 0.0, (low + high).sign())
    new_column = stays.cumsum(0) - 1
    return replace(
        problem,
        margins=_fix_columns(problem.margins, end, stays),
        relus=_fix_columns(problem.relus, end, stays),
        columns=new_column[problem.columns],
        inputs=int(stays[: problem.inputs].sum()),
    )


def _fix_columns(rows: SymbolRows, end: Tensor, stays: Tensor) -> SymbolRows:
    """Return rows of coefficients with the columns in `stays`; other symbols are fixed at -end."""
    return SymbolRows(rows.centre - rows.slopes @ end, rows.slopes[:, stays], rows.spread)
