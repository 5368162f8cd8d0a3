"""The record of each upper bound: everything that any place says of it, said once.

Columns of tables and JSON, their status and domain, `lipaudit explain`, notes, tables and pictures
of the page, gate rules, and what is computed and checked derive from here; no torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal

from lipaudit.tables.columns import Better, Column, Reduction
from lipaudit.tables.common import HEAD_NORMS
from lipaudit.tables.plugins import entries

GROUP = "lipaudit.bounds"
AT_X = "at X"
EVERYWHERE = "all inputs, every ||x_i|| <= R"
BALL = "||X' - X||_F <= r"
SYMBOLS = (
    "X tokens, N of them. R = max_i ||x_i||. P attention map, P_i a row. M(p) = diag(p) - p p^T. "
    "A = s W_Q W_K^T with s the scale of the logits. With biases X is [X 1] and W is [W; b^T]."
)
"""The symbols of the formulas."""
# A name becomes a column, a key in JSON and, with log10_ or bound_ before it, other columns.
_NAME = re.compile(r"(?!log10_|bound_)[a-z][a-z0-9_]*")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


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
        domain: where it holds: `AT_X`, or a set of inputs in words.
        status: "bound" for an upper bound of the norm at X, which says nothing of other inputs;
            "certified" for a Lipschitz constant on a set of inputs.
        null: why it cannot be given for some heads: a verb phrase, "needs affine projections".
        better: the direction of improvement, which `compare` needs; None leaves it out there.
        unit: printed behind the numbers.
        format: a Python format specification.
        rank: its place in the tables and pictures of the page, usually the tightest first.
        log10_label: label of a second column that holds its logarithm, for a bound that may
            overflow; empty for no such column.
        scaling: whether `lipaudit scaling` follows it over the length as well.
        stored: whether a report has it for every sample, in an array of its name.
        function: "module:function" of a bound that is computed by itself, imported when it is
            first computed: `(heads: Heads) -> Tensor`, (batch, heads), NaN where it cannot be
            given; see `lipaudit.theory.bounds.head_bounds`. Empty for those that share their
            ingredients, all of which `head_bounds` computes.

    Raises:
        ValueError: name or function are not of this form, or domain and status contradict.
    """

    name: str
    label: str
    meaning: str
    formula: str
    source: str
    explanation: str
    domain: str = AT_X
    status: Literal["bound", "certified"] = "bound"
    null: str = ""
    better: Better | None = None
    unit: str = ""
    format: str = ".3g"
    rank: int = 100
    log10_label: str = ""
    scaling: bool = False
    stored: bool = False
    function: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not a valid name of a bound: use letters, digits and _"
            )
        if self.function and not _FUNCTION.fullmatch(self.function):
            raise ValueError(f"the function {self.function!r} is not MODULE:FUNCTION")
        if (self.status == "certified") == (self.domain == AT_X):
            raise ValueError(f"{self.status} contradicts the domain {self.domain!r}")

    def column(self) -> Column:
        """Return how its column reads."""
        paragraphs = [f"Source: {self.source}.", self.explanation]
        if self.null:
            paragraphs.append(f"Not computed for every head: it {self.null}.")
        return Column(
            label=self.label,
            meaning=self.meaning,
            unit=self.unit,
            format=self.format,
            better=self.better,
            domain=self.domain,
            status=self.status,
            formula=self.formula,
            reading="\n".join(paragraphs),
            reduction=Reduction("median", self.name) if self.stored else None,
        )

    def columns(self) -> dict[str, Column]:
        """Return its columns in the section `bounds`, the logarithm last."""
        columns = {self.name: self.column()}
        if self.log10_label:
            columns[f"log10_{self.name}"] = Column(
                label=self.log10_label,
                meaning=f"log10 of {self.name}, for values that overflow.",
                domain=self.domain,
                status=self.status,
            )
        return columns

    def over_lengths(self) -> dict[str, Column]:
        """Return its column in the section `scaling`."""
        meaning = f"{self.name}, median over the windows."
        column = replace(self.column(), meaning=meaning, better=None, reduction=None)
        return {f"bound_{self.name}": column}

    def exponent(self) -> dict[str, Column]:
        """Return the column of its exponent in the section `scaling.fit`."""
        meaning = f"The exponent of the bound {self.name}."
        column = Column(label=self.label, meaning=meaning, status="estimate")
        return {f"{self.name}_exponent": column}


AFFINE_ONLY = "needs self-attention with affine projections, logits s q k^T and no sink"
AFFINE_PLAIN = (
    "needs self-attention with affine or constant projections, logits s q k^T and no sink"
)

OWN: Mapping[str, Bound] = MappingProxyType(
    {
        bound.name: bound
        for bound in (
            Bound(
                name="sharp",
                label="sharp",
                meaning="lipaudit's own bound, from the norms of the Jacobian's blocks.",
                formula="min(theorem3, ||B||^(1/2)), B_il >= ||sum_j J_ij J_lj^T|| with the "
                "blocks of J; of large heads that are not affine min(theorem3, ||B||), "
                "B_ij >= ||J_ij||",
                source="ours",
                explanation="Combines bounds on the norms of the blocks of J J^T. Usually "
                "within a factor of two of the exact norm.",
                better="lower",
                rank=0,
                scaling=True,
                stored=True,
            ),
            Bound(
                name="theorem3",
                label="theorem 3",
                meaning="Yudin et al. 2025, Theorem 3, exact ||M(P_i)||.",
                formula="||W_V|| (||P|| + 2 ||X||^2 ||A|| max_i ||M(P_i)||)",
                source="Yudin et al. 2025 Theorem 3; a general form of ours where heads are not "
                "affine",
                explanation="Multiplies the sensitivity of the softmax by the norms of "
                "tokens and weights.",
                rank=2,
                scaling=True,
            ),
            Bound(
                name="theorem3_g1",
                label="theorem 3 g1",
                meaning="Theorem 3 with g1(P_i) for ||M(P_i)||.",
                formula="theorem3 with g_1(P_i) for ||M(P_i)||",
                source="Yudin et al. 2025 equation 7",
                explanation="theorem3, computed from the two largest entries of each "
                "attention row.",
                rank=3,
            ),
            Bound(
                name="appendix_c",
                label="appendix C",
                meaning="Yudin et al. 2025, Appendix C.",
                formula="||W_V|| (||P|| + 2 max_i ||X^T M(P_i)|| ||X|| ||A||)",
                source="Yudin et al. 2025 Appendix C",
                explanation="theorem3 that counts only the tokens to which a row attends.",
                null=AFFINE_ONLY,
                rank=1,
            ),
            Bound(
                name="castin",
                label="castin",
                meaning="Castin et al. 2024.",
                formula="sqrt(3) ||W_V|| (||A||^2 R^4 (4N+1) + N)^(1/2)",
                source="Castin et al. 2024, as Yudin et al. 2025 Theorem 2",
                explanation="Upper bound on the Lipschitz constant over all sequences of N "
                "tokens with norm at most R. Mask and position bias stay fixed.",
                domain=EVERYWHERE,
                status="certified",
                null=AFFINE_ONLY,
                rank=4,
                log10_label="log10 castin",
                scaling=True,
            ),
            Bound(
                name="mean_field",
                label="mean field",
                meaning="lipaudit's form of the mean-field bound.",
                formula="||W_V|| ((1 + a) min(e^a, sqrt N) + a), a = ||A|| R^2; sqrt N alone if "
                "masked",
                source="ours, after the mean-field bound of Castin et al. 2024",
                explanation="Upper bound on the Lipschitz constant over the same inputs as "
                "castin. It does not grow without limit as tokens are added.",
                domain=EVERYWHERE,
                status="certified",
                null=AFFINE_ONLY,
                rank=5,
                log10_label="log10 m. f.",
            ),
            # Published as a Lipschitz constant on the ball ||X' - X||_F <= r. It is given for
            # r = 0, where the ball is X alone: what is printed bounds the norm at X and is
            # neither a constant on a set of inputs nor certified on one.
            Bound(
                name="hu",
                label="hu",
                meaning="Hu et al. 2024 at r = 0.",
                formula="N(N+1) ||X||_F^2 (||W_V|| ||W_Q|| ||W_K|| + ||W_V||)",
                source="Hu et al. 2024, as Yudin et al. 2025 Theorem 1, at r = 0",
                explanation="Uses only norms of weights and tokens. Published for a ball of "
                "radius r around X; here r = 0, so it holds at X only.",
                null=f"{AFFINE_ONLY}, and N(N+1) ||X||_F^2 >= sqrt N",
                rank=6,
                log10_label="log10 hu",
            ),
        )
    }
)
"""lipaudit's own bounds, in the order of their columns."""


@cache
def catalogue() -> Mapping[str, Bound]:
    """Return the record of every bound by its name: ours, then those of plug-ins.

    Raises:
        UsageError: a plug-in cannot be used; the message names its package.
    """
    taken = {*OWN, *(name for bound in OWN.values() for name in bound.columns())}
    taken |= HEAD_NORMS.keys()
    return MappingProxyType({**OWN, **entries(GROUP, Bound, taken, check=_fault)})


def ranked() -> list[Bound]:
    """Return every bound in the order of tables and pictures."""
    return sorted(catalogue().values(), key=lambda bound: bound.rank)


def remedy(bound: Bound) -> str:
    """Say what to do about a bound that is wrong: tell us, or the authors of the plug-in."""
    if bound.name in OWN:
        return (
            "This is a bug in lipaudit. Please report it with the model, the data and this line."
        )
    return (
        f"This is a bug in the plug-in {bound.function}. Report it to its authors, or "
        "uninstall it."
    )


def _fault(bound: Bound) -> str:
    return "" if bound.function else "names no function that computes it"
