"""The record of an upper bound: all that lipaudit says of it, and the function that computes it.

Columns of tables and JSON, `lipaudit explain`, notes, the page, gate rules, and what is computed
and checked derive from it. `explain` and `gate` read records without torch: the file of a bound
imports torch, and whatever needs it, inside its functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from lipaudit.tables import Column, Reduction
from lipaudit.tables.columns import HEAD_NORMS, Better
from lipaudit.tables.plugins import collect

if TYPE_CHECKING:
    from torch import Tensor

    from lipaudit.theory.ingredients import Ingredients


AT_X = "at X"
EVERYWHERE = "all inputs, every ||x_i|| <= R"
BALL = "||X' - X||_F <= r"
AFFINE_ONLY = "needs self-attention with affine projections, logits s q k^T and no sink"
AFFINE_PLAIN = (
    "needs self-attention with affine or constant projections, logits s q k^T and no sink"
)
SYMBOLS = (
    "X tokens, N of them. R = max_i ||x_i||. P attention map, P_i a row. M(p) = diag(p) - p p^T. "
    "A = s W_Q W_K^T with s the scale of the logits. With biases X is [X 1] and W is [W; b^T]. "
    "Phi^q_i = dq_i / dx_i, Phi^k_j and Phi^v_j likewise. G_i and H_j are the gradients of the "
    "logits in q_i and k_j, and V_c the values less their mean."
)
"""The symbols of the formulas."""
# A name becomes a column, a key in JSON and, with log10_ or bound_ before it, other columns.
_NAME = re.compile(r"(?!log10_|bound_)[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An upper bound of the norm of a head's Jacobian.

    Attributes:
        name: of its column, in JSON and in gate rules.
        label: what is printed above the column.
        meaning: of the column, one sentence.
        formula: in the symbols of `SYMBOLS`.
        source: paper and theorem.
        explanation: what it says, one or two sentences for a reader of the report.
        compute: the formula: (batch, heads) on the device of the heads, NaN where it cannot be
            given. `ingredients.heads` are of every kind, in float64, W_V of each scaled to size
            one (J is homogeneous in it), and of a large layer some heads at a time. Padding must
            not change the values: see `Heads`.
        domain: where it holds: `AT_X`, or a set of inputs in words.
        null: why it cannot be given for some heads: a verb phrase, "needs affine projections".
        better: the direction of improvement, which `compare` needs; None leaves it out there.
        log10_label: label of a second column that holds its logarithm, for a bound that may
            overflow; empty for no such column.
        scaling: whether `lipaudit scaling` follows it over the length as well.
        stored: whether a report has it for every sample, in an array of its name.
        place: of our own bounds in tables and pictures: usually the tightest first.

    Raises:
        ValueError: the name is not of this form.
    """

    name: str
    label: str
    meaning: str
    formula: str
    source: str
    explanation: str
    compute: Callable[[Ingredients], Tensor]
    domain: str = AT_X
    null: str = ""
    better: Better | None = None
    log10_label: str = ""
    scaling: bool = False
    stored: bool = False
    place: int = 50

    def __post_init__(self) -> None:
        # The name becomes a column and a key in JSON.
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not a valid name of a bound: use letters, digits and _"
            )

    @property
    def status(self) -> Literal["bound", "certified"]:
        """`bound` for an upper bound of the norm at X, which says nothing of other inputs.

        `certified` for a Lipschitz constant on a set of inputs.
        """
        return "bound" if self.domain == AT_X else "certified"

    @property
    def remedy(self) -> str:
        """What to do if the bound is below the exact norm: tell the authors of its function."""
        place = f"{self.compute.__module__}:{self.compute.__qualname__}"
        return (
            f"This is a bug in {place}. Report it to its authors with the model, the data and "
            "this line."
        )

    def column(self) -> Column:
        """Return the description of the bound's column in tables and reports."""
        paragraphs = [f"Source: {self.source}.", self.explanation]
        if self.null:
            paragraphs.append(f"Not computed for every head: it {self.null}.")
        return Column(
            label=self.label,
            meaning=self.meaning,
            better=self.better,
            domain=self.domain,
            status=self.status,
            formula=self.formula,
            reading="\n".join(paragraphs),
            reduction=Reduction("median", self.name) if self.stored else None,
        )

    def columns(self) -> dict[str, Column]:
        """Return the bound's columns in the section `bounds`: the bound, and maybe its log10."""
        columns = {self.name: self.column()}
        if self.log10_label:
            columns[f"log10_{self.name}"] = Column(
                label=self.log10_label,
                meaning=f"log10 of {self.name}, for values that overflow.",
                domain=self.domain,
                status=self.status,
            )
        return columns

    def growth_columns(self) -> dict[str, Column]:
        """Return the bound's column in the section `scaling`, by its name in this section.

        The cells are medians over windows of the data, so the column has no reduction of its own.
        """
        meaning = f"{self.name}, median over the windows."
        column = replace(self.column(), meaning=meaning, better=None, reduction=None)
        return {f"bound_{self.name}": column}

    def exponent_columns(self) -> dict[str, Column]:
        """Return the column of the bound's growth exponent in the section `scaling.fit`."""
        meaning = f"The exponent of the bound {self.name}."
        column = Column(label=self.label, meaning=meaning, status="estimate")
        return {f"{self.name}_exponent": column}


@cache
def load_bounds() -> Mapping[str, Bound]:
    """Return the record of every bound by its name: ours by `Bound.place`, then those of plug-ins.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    # The files of this folder: `castin.py` has its record under the name `CASTIN`. Imported on
    # first use, because they import this module.
    folder = str(Path(__file__).parent)
    records = []
    for file in iter_modules([folder]):
        if file.name != "record":
            module = import_module(f"{__package__}.{file.name}")
            records.append(getattr(module, file.name.upper()))
    records.sort(key=lambda bound: bound.place)
    ours = {bound.name: bound for bound in records}
    # Names of columns that no plug-in may use.
    taken = set(HEAD_NORMS)
    for bound in records:
        taken.update(bound.columns())
    return MappingProxyType(ours | collect(Bound, "bounds", taken))
