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
        """Return how much each symbol (an unknown) occurs in the inputs of all ReLUs, (columns,).

        It is the norm of the symbol's column of coefficients. Each ReLU has Lagrange multipliers.
        A change of the multipliers changes the coefficient of the symbol in a bound about in
        proportion to this norm.
        """
        norms = vector_norm(self.relus.slopes, dim=0)
        # Above 0, because other quantities are divided by the norms.
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
        """Return the symbols at which c . symbols is smallest, (b, columns).

        Symbols are unknowns, and the coefficients c (b, columns) are b linear functions of them.
        """
        # Over [-1, 1] the minimum is at -sign(c). This holds for all symbols of errors.
        best = -coefficients.sign()
        of_inputs = -coefficients[:, : self.inputs]  # where they are largest, c is smallest
        if self.symbols.norm == "l2":  # over the unit ball: -c / ||c||
            size = vector_norm(of_inputs, dim=1, keepdim=True)
            best[:, : self.inputs] = of_inputs / size.clamp_min(tiny(coefficients.dtype))
        elif self.symbols.norm == "words":
            best[:, : self.inputs] = self.symbols.find_best_words(of_inputs.mT).mT
        return best

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
    """Return margins, and the ReLUs they depend on, as rows of coefficients for branch and bound.

    Branch and bound splits the ball by the signs of ReLU inputs. Each margin, and each input of a
    ReLU whose sign is unknown on the ball, is an affine function of symbols (unknowns): a row. The
    symbols of the input and those of the ReLUs always get a column, and others as long as there
    is room. All symbols without a column become a radius per row.

    Args:
        margins: a form of one axis, logit of the label minus every other logit.
        numbers: largest number of coefficients in all rows and columns.
    """
    symbols = margins.symbols
    calls = _list_needed_relus(margins)  # the ReLUs of each call of ReLU in the model
    relu_symbols = torch.cat([call.numbers for call in calls])
    always = torch.cat([torch.arange(symbols.inputs, device=margins.device), relu_symbols])
    # Each has centre (rows,), generators (symbols, rows) and slack (rows,).
    forms: list[Form | ReluCall] = [margins, *calls]
    row_count = sum(len(form.centre) for form in forms)
    room = numbers // row_count - len(always)  # a column has a coefficient in every row
    has_column = _choose_columns(symbols, forms, always, max(room, 0))
    margin_rows, *relu_rows = (_make_rows(symbols, form, has_column) for form in forms)
    column_of_symbol = has_column.cumsum(0) - 1  # for symbols that have a column
    # The depth of a ReLU is the number of its call: 0 for the first one in the model.
    depths = [torch.full_like(call.numbers, depth) for depth, call in enumerate(calls)]
    return Problem(
        margins=margin_rows,
        # The ReLUs of all calls one after the other: centre, slopes and spread are concatenated.
        relus=SymbolRows(*map(torch.cat, zip(*relu_rows, strict=True))),
        slope=torch.cat([call.slope for call in calls]),
        offset=torch.cat([call.offset for call in calls]),
        columns=column_of_symbol[relu_symbols],
        depth=torch.cat(depths),
        inputs=symbols.inputs,
        symbols=symbols,
    )


def _list_needed_relus(margins: Form) -> list[ReluCall]:
    """Return the ReLUs of unknown sign that margins depend on, directly or through other ReLUs.

    Not needed is, for example, a ReLU of a token that the last attention does not read. The output
    of a ReLU of unknown sign has a symbol of its own (an unknown in [-1, 1]): what depends on this
    output has a nonzero coefficient of the symbol.

    Returns:
        The needed ReLUs of each call of ReLU in the model, in the order of the calls.
    """
    symbols = margins.symbols
    # (symbols,): whether the margins, or a needed ReLU, depend on a symbol. Coefficients
    # (`generators`) are (symbols, rows), without the symbols that were created later.
    is_used = torch.zeros(symbols.count, dtype=torch.bool, device=margins.device)
    is_used[: len(margins.generators)] = (margins.generators != 0).any(1)
    calls = []
    # From the last call to the first, because a ReLU can only be used by later ones.
    for call in reversed(symbols.relu_calls):
        needed = call.select(is_used[call.numbers])
        is_used[: len(needed.generators)] |= (needed.generators != 0).any(1)
        calls.append(needed)
    return calls[::-1]


def _make_rows(symbols: Symbols, form: Form | ReluCall, has_column: Tensor) -> SymbolRows:
    """Return the entries of a form as rows centre + slopes @ (symbols with a column) +- spread.

    Args:
        symbols: the symbols (unknowns) of the pass through the model.
        form: centre (rows,), coefficients of the symbols (symbols, rows), and slack (rows,), the
            radius of a further error.
        has_column: (all symbols,), True for symbols that get a column of `slopes`.
    """
    generators = form.generators
    # The coefficients end with the last symbol that existed when the form was made. Symbols that
    # were created later get columns of zeros.
    has_own_column = has_column[: len(generators)]
    later = int(has_column.sum()) - int(has_own_column.sum())
    slopes = F.pad(generators[has_own_column].mT.to(DOUBLE), (0, later))
    # The radius of everything without a column: quadratic part, other errors, and slack. Symbols
    # of the input always have a column, and their products (order 2, the quadratic part) never.
    low, high = symbols.quadratic_range(generators)
    errors = symbols.bound_parts(generators * ~has_own_column[:, None]).errors
    spread = round_up(errors + torch.maximum(-low, high) + form.slack)
    return SymbolRows(form.centre, slopes, spread)


def _choose_columns(
    symbols: Symbols, forms: Sequence[Form | ReluCall], always: Tensor, room: int
) -> Tensor:
    """Return a mask of the symbols that get a column of coefficients in a `Problem`.

    The symbols in `always` get a column, and so do the `room` error symbols with the largest
    coefficients over all rows. Products of two input symbols (order 2) get none: the quadratic
    part of a row is bounded as a whole.

    Args:
        symbols: the symbols of the pass.
        forms: all rows; each form has coefficients (symbols, rows), its generators.
        always: indices of the symbols that always get a column: of the input and of ReLUs.
        room: largest number of other columns.
    """
    # The sum of the absolute coefficients of each symbol. A form lacks symbols that were created
    # later.
    sizes = always.new_zeros(symbols.count, dtype=DOUBLE)
    for form in forms:
        sizes[: len(form.generators)] += form.generators.abs().sum(1)
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
    """Return a problem with fewer symbols for a search: the others are fixed at -1 or 1 (a face).

    A bound is the minimum of an affine function over symbols (unknowns) in [-1, 1]. The minimum is
    at one end for each symbol, which depends on the sign of its coefficient. Symbols whose
    coefficient is far from a change of sign during the search are fixed at this end. A bound may
    be too large if a sign changes after all, so proofs use the problem with all symbols.

    Args:
        problem: the problem with all symbols.
        coefficients: coefficients of the symbols at the start of the search, a row for each part
            of the ball.
        share: share of all columns that stay in addition to columns whose coefficient has
            different signs in different parts.
        few: smallest number of columns that stay in addition to the columns that always stay.
    """
    low = coefficients.amin(0)
    high = coefficients.amax(0)
    # How far a coefficient is from a change of sign, relative to how fast the multipliers of the
    # search change it. If the coefficient is positive in all parts of the ball, it is `low` away
    # from 0; if it is negative in all parts, -high. Not positive if its sign differs.
    distance = torch.maximum(low, -high) / problem.column_norms
    # Symbols of ReLUs always stay: the constraints of the search are about them. So do symbols of
    # the input, unless each of them is in [-1, 1] whatever the others are (linf).
    inputs = 0 if problem.symbols.norm == "linf" else problem.inputs
    distance[:inputs] = -torch.inf
    distance[problem.columns] = -torch.inf
    always = inputs + len(problem.columns)
    # Columns of unclear sign stay (those that always stay are among them), and a share of all
    # columns, nearest to a change of sign first. At least `few` stay beside those that always do.
    unclear = int((distance <= 0).sum())
    count = max(always + few, unclear + int(share * len(distance)))
    count = min(count, len(distance))
    stays = torch.zeros_like(distance, dtype=torch.bool)
    stays[distance.topk(count, largest=False).indices] = True
    # Fix a symbol at -1 if its coefficient is positive in all parts, else at 1. Symbols that stay
    # count as 0 here.
    fixed = torch.where(stays, 0.0, -(low + high).sign())
    new_column = stays.cumsum(0) - 1  # for columns that stay
    return replace(
        problem,
        margins=_fix_columns(problem.margins, fixed, stays),
        relus=_fix_columns(problem.relus, fixed, stays),
        columns=new_column[problem.columns],
        inputs=int(stays[: problem.inputs].sum()),
    )


def _fix_columns(rows: SymbolRows, fixed: Tensor, stays: Tensor) -> SymbolRows:
    """Return rows with the columns in `stays`; other symbols have the values `fixed` (columns,).

    `fixed` is 0 for symbols that stay.
    """
    return SymbolRows(rows.centre + rows.slopes @ fixed, rows.slopes[:, stays], rows.spread)
