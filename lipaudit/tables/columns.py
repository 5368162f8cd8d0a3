"""Columns, rows and arrays, figures read from them, and columns that measures share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate, islice, takewhile
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from lipaudit.errors import LipauditError
from lipaudit.tables.trials import TrialKey, parse_radius

if TYPE_CHECKING:
    import numpy as np

Group = TypeVar("Group")
T = TypeVar("T")
Status = Literal["certified", "exact", "bound", "estimate", "empirical"]
Better = Literal["lower", "higher"]
Statistic = Literal["median", "mean", "p95", "max"]
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]}
_CELL = {"anyOf": [*_NUMBER["anyOf"], {"type": ["boolean", "integer", "string", "null"]}]}


# Allowed values of `Column.format`. No width: a damaged file must not fill the memory.
_FORMAT = r"^(|s|d|[-+]?(\.\d{1,2})?[efg%])$"


def _revive(value: Any) -> Any:
    """Return NaN and infinities for the strings that represent them."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    return value


Float = Annotated[float, BeforeValidator(_revive), WithJsonSchema(_NUMBER)]
Cell = Annotated[bool | int | float | str | None, BeforeValidator(_revive), WithJsonSchema(_CELL)]


class Frozen(pydantic.BaseModel):
    """Base of everything in a report: immutable, closed, with NaN and infinities as strings."""

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="strings",
        populate_by_name=True,
        defer_build=True,  # a command does not pay for what it does not use
    )


@dataclass(frozen=True)
class Reduction:
    """How the cell of a row is computed from samples.

    Attributes:
        stat: the statistic over the samples.
        values: name of the array, (rows, samples), from which it can be computed for a subset, or
            of the per-sample column (of the only row, or of the row's attack).
        per: name of an array that divides the values, sample by sample; empty for none.
        weights: name of an array of weights for the mean; if it is empty or not stored, all
            weights are equal.
    """

    stat: Statistic
    values: str
    per: str = ""
    weights: str = ""


def reduce_values(stat: str, values: Any, axis: int | None = None) -> Any:
    """Return a statistic (median, mean, p95 or max) along an axis or of all values.

    The result is NaN if a value is NaN.
    """
    import numpy as np

    if stat == "p95":
        quantile = partial(np.quantile, values, 0.95, axis=axis)
        if np.isfinite(values).all():
            return quantile()
        # Between two equal values there is nothing to interpolate: inf - inf would be NaN.
        low = quantile(method="lower")
        with np.errstate(invalid="ignore"):
            return np.where(low == quantile(method="higher"), low, quantile())[()]
    return getattr(np, stat)(values, axis=axis)


@dataclass(frozen=True)
class Column:
    """The description of a column.

    Attributes:
        label: heading of the column.
        meaning: one sentence, for `lipaudit explain` and tooltips.
        unit: printed behind numbers; empty for a pure number.
        format: a Python format specification of a number; "d" for whole numbers, "s" for text,
            empty for truth values.
        better: better direction, which the gate needs; None without one.
        domain: where the figure holds ("at X", "all inputs of norm <= R"); empty for figures
            without a claim (a cost, a tolerance).
        status: certified (holds on its whole domain) | exact (computed at X) | bound
            (proven upper bound, at X only) | estimate | empirical.
        formula: the formula of a bound, in the symbols of `SYMBOLS`.
        reading: how to read a figure that is easily misread; one paragraph per line.
        reduction: how it is computed from samples; None if a report cannot repeat that.
        default: default cell; a cell may be null only if the default is.
        needed: whether every row must have a cell that is not null.
        least: smallest possible value.
        signed: whether values may have either sign, so that changes are differences, not ratios.
    """

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")
    label: str
    meaning: str
    unit: str = ""
    format: Annotated[str, Field(pattern=_FORMAT)] = ".3g"
    better: Better | None = None
    domain: str = "at X"
    status: Status = "exact"
    formula: str = ""
    reading: str = ""
    reduction: Reduction | None = None
    default: bool | int | float | str | None = None
    needed: bool = False
    least: float | None = None
    signed: bool = False

    @classmethod
    def text(cls, label: str, meaning: str, *, default: str = "", **how: Any) -> Column:
        """Return a column of text, which may name a row."""
        return cls(label, meaning, format="s", default=default, **how)

    @classmethod
    def count(cls, label: str, meaning: str, *, default: int = 0, **how: Any) -> Column:
        """Return a column of whole numbers, which count something."""
        return cls(label, meaning, format="d", default=default, **how)

    @classmethod
    def share(cls, label: str, meaning: str, **how: Any) -> Column:
        """Return a column of shares, which are usually better higher."""
        return replace(cls(label, meaning, format=".1%", better="higher"), **how)

    @classmethod
    def norm(
        cls, label: str, meaning: str, values: str, stat: Statistic = "median", **how: Any
    ) -> Column:
        """Return a column of norms; each cell is a statistic of the samples' norms.

        Args:
            label: heading of the column.
            meaning: one sentence.
            values: name of the array, or of the per-sample column, with the norms of the samples.
            stat: the statistic.
            how: other attributes of the column.
        """
        return cls(label, meaning, better="lower", reduction=Reduction(stat, values), **how)

    def read(self, name: str, value: Any) -> Any:
        """Return a value from JSON as a cell of this column.

        The strings for NaN and infinities become floats, and whole numbers in a column of floats
        become floats.

        Args:
            name: name of the column, for messages.
            value: the value.

        Raises:
            ValueError: the value does not fit the column.
        """
        if value is None:
            # Only a cell whose default is None may be empty.
            if self.needed or self.default is not None:
                raise ValueError(f"{name} is missing")
            return None
        # The type of the cells: texts, counts, truth values, or else numbers.
        kind: Any = {"s": str, "d": int, "": bool}.get(self.format, float)
        if kind is float:
            value = _revive(value)  # JSON has no NaN, so NaN is written as a string
            if type(value) is int:
                value = float(value)
        # In Python True is an int, but it is not a valid count.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name} is {value!r}, not of type {kind.__name__}")
        if self.least is not None and value < self.least:
            raise ValueError(f"{name} is {value}, below {self.least:g}")
        return value


def list_keys(columns: Mapping[str, Column]) -> list[str]:
    """Return the columns that name a row: the leading columns of text or whole numbers.

    Measured values follow these columns. The first column names a row in any case.

    >>> layer, text, norm = (Column(label="", meaning="", format=f) for f in ("d", "s", ".3g"))
    >>> list_keys({"layer": layer, "module": text, "norm": norm, "tokens": layer})
    ['layer', 'module']
    """
    keys = []
    for name, column in columns.items():
        if column.format not in ("d", "s"):
            break
        keys.append(name)
    return keys or list(columns)[:1]


def find_bounds(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of upper bounds of the norm in `exact`: those that state a formula."""
    return {name: column for name, column in columns.items() if column.formula}


class Row(dict[str, Any]):
    """One line of a section: its cells by column name, `row.exact` or `row["exact"]`.

    If the name of a column is a Python keyword, an underscore follows it: `row.from_`.
    """

    def __getattr__(self, name: str) -> Any:
        """Return the cell of a column: `row.exact`; `row.from_` for the column `from`.

        A keyword of Python, such as `from`, cannot be an attribute.
        """
        column = name.removesuffix("_")
        # Python itself asks for names such as `__deepcopy__`, which are no columns.
        if name.startswith("_") or column not in self:
            raise AttributeError(f"the row has no column {name!r}")
        return self[column]

    def replace(self, **cells: Any) -> Row:
        """Return the row with some cells replaced."""
        return Row({**self, **cells})

    @property
    def key(self) -> TrialKey | None:
        """Return the attack and ball of the row: the key that also names per-sample columns.

        None if the row has no ball. If a report has no `eps_text`, the radius as typed, the number
        `eps` is rounded.
        """
        if not {"norm", "eps"} <= self.keys():
            return None
        radius = parse_radius(self.get("eps_text") or f"{self.eps:.4g}")
        return TrialKey(attack=self.get("attack", ""), norm=self.norm, radius=radius)

    @property
    def trial(self) -> TrialKey:
        """Return the attack and ball of a row that has them (see `key`)."""
        assert self.key is not None
        return self.key


def make_row(columns: Mapping[str, Column], cells: Mapping[str, Any]) -> Row:
    """Return the row of these cells; missing cells get the default of their column.

    Raises:
        ValueError: a required cell is missing, or a cell has the wrong type or no column.
    """
    unknown = sorted(cells.keys() - columns.keys())
    if unknown:
        raise ValueError(f"a row has no column {unknown[0]!r}")
    row = Row()
    for name, column in columns.items():
        default = None if column.needed else column.default
        row[name] = column.read(name, cells.get(name, default))
    try:
        _ = row.key  # raises if the radius of the row cannot be read
    except LipauditError as error:
        raise ValueError(error.message) from None
    return row


class Array(Frozen):
    """A dense array in C order; floats are rounded to 6 significant digits."""

    shape: tuple[int, ...]
    data: tuple[Float | None, ...] = Field(repr=False)

    @pydantic.model_validator(mode="after")
    def _complete(self) -> Array:
        if len(self.data) != math.prod(self.shape):
            raise ValueError(f"{len(self.data)} values do not fill the shape {self.shape}")
        return self

    @classmethod
    def of(cls, values: np.ndarray[Any, Any]) -> Array:
        """Store a numpy array."""
        # Six digits: norms are exact to 1e-4 by default, and the JSON is half as long.
        return cls(shape=values.shape, data=tuple(float(f"{v:.6g}") for v in values.ravel()))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the array in float64 (null becomes NaN)."""
        import numpy as np

        return np.array(self.data, dtype=np.float64).reshape(self.shape)


@cache
def _adapt_column() -> pydantic.TypeAdapter[Column]:
    return pydantic.TypeAdapter(Column)


# Only the fields of a column that differ from the defaults are written.
write_column = PlainSerializer(lambda c: _adapt_column().dump_python(c, exclude_defaults=True))
Columns = dict[str, Annotated[Column, write_column]]
Rows = tuple[
    Annotated[
        Row,
        pydantic.PlainValidator(lambda row: row),
        PlainSerializer(dict, return_type=dict[str, Cell]),
        WithJsonSchema({"type": "object", "additionalProperties": _CELL}),
    ],
    ...,
]


# The 97.5% quantile of the normal distribution.
Z95 = 1.959963984540054


def finite(values: Iterable[Any]) -> list[float]:
    """Return the finite numbers among some values, as floats."""
    return [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]


def middle(values: Iterable[Any]) -> float | None:
    """Return the median of the finite numbers among some values; None without finite numbers."""
    numbers = finite(values)
    if numbers:
        return median(numbers)
    return None


def group_values(pairs: Iterable[tuple[Group, T]]) -> dict[Group, list[T]]:
    """Collect the values of each group, in the order of the pairs.

    >>> group_values([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[Group, list[T]] = {}
    for name, value in pairs:
        groups.setdefault(name, []).append(value)
    return groups


def order(value: Any) -> float:
    """Return a number to sort by: missing values and NaN are -inf, last in descending order."""
    if isinstance(value, int | float) and value == value:  # NaN is not equal to itself
        return float(value)
    return -math.inf


def largest(rows: Iterable[Row], name: str, count: int) -> list[Row]:
    """Return the rows with the largest values of a column, largest first."""
    return sorted(rows, key=lambda row: -order(row[name]))[:count]


def log10_ratio(row: Row, bound: str) -> float | None:
    """Return log10(bound / exact norm) of a head; None if bound or norm is missing or 0.

    Args:
        row: the row of the head.
        bound: name of the column of the bound. If the bound is too large for a float, the row has
            its logarithm in the column `log10_NAME`.
    """
    logarithm = None
    values = finite([row.get(bound)])
    if not values:  # too large for a float, or missing
        logarithm = row.get(f"log10_{bound}")
    elif values[0] > 0:
        logarithm = math.log10(values[0])
    known = finite([logarithm, row.exact])
    if len(known) == 2 and known[1] > 0:
        return known[0] - math.log10(known[1])
    return None


def list_ratios(columns: Mapping[str, Column], rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return, by the name of each bound, log10(bound / exact norm) of all heads that have both.

    The closest bound comes first: its median over the heads is the smallest. A bound without
    heads is left out.
    """
    bounds = find_bounds(columns)
    ratios = {name: finite(log10_ratio(row, name) for row in rows) for name in bounds}
    medians = [(median(values), name) for name, values in ratios.items() if values]
    return {name: ratios[name] for _, name in sorted(medians)}


def median_limits(values: Iterable[Any]) -> tuple[float, float] | None:
    """Return limits of the median with at least 95% confidence, for every distribution.

    The limits are the k-th smallest and the k-th largest value, as in a sign test. None if there
    are too few values.

    >>> median_limits(range(5)), median_limits(range(6)), median_limits(range(20))
    (None, (0.0, 5.0), (5.0, 14.0))
    """
    numbers = sorted(finite(values))
    # The median is beyond each of the two limits with a probability of at most 2.5%.
    k = sign_test_place(len(numbers), level=0.025)
    if k:
        return (numbers[k - 1], numbers[-k])
    return None


def sign_test_place(count: int, level: float) -> int:
    """Return the largest k with P(B <= k - 1) <= level, for B ~ Binomial(count, 1/2).

    The k-th smallest and the k-th largest value are limits of the median, each with confidence 1 -
    level. 0 means too few values.

    >>> [sign_test_place(count, 0.025) for count in (5, 6, 20, 255)]
    [0, 1, 6, 112]
    """
    # In exact integers: the condition is C(count, 0) + ... + C(count, k - 1) <= level 2^count.
    most = int(Fraction(level) * 2**count)
    sums = accumulate(_list_binomials(count))
    k = sum(1 for _ in takewhile(lambda total: total <= most, sums))
    return min(k, count // 2)  # beyond the middle, the two limits would change places


def sum_binomial(most: int, count: int) -> float:
    """Return P(B <= most) for B ~ Binomial(count, 1/2)."""
    # Without scipy: its import takes half as long as a whole `report` or `gate`.
    if most >= 0:
        return sum(islice(_list_binomials(count), most + 1)) / 2**count
    return 0.0


def _list_binomials(count: int) -> Iterator[int]:
    """Yield the binomial coefficients C(count, k) for k = 0, 1, ... as exact integers."""
    # C(n, k + 1) = C(n, k) (n - k) / (k + 1), without a remainder
    return accumulate(range(count), lambda term, k: term * (count - k) // (k + 1), initial=1)


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return the 95% limits of a proportion with this number of successes among n (Wilson, 1927).

    For values between 0 and 1, these are also limits of the mean: among all values with the same
    mean, 0s and 1s have the largest variance.

    >>> tuple(round(limit, 4) for limit in wilson(5, 10))
    (0.2366, 0.7634)
    """
    share = successes / n
    z2 = Z95**2
    # The interval solves |p - share| = z sqrt(p (1 - p) / n) for p, so a share of 0 has a width.
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def limit_robust(flags: Sequence[float | None]) -> tuple[float, float | None, float]:
    """Return the share of samples that no attack broke, with its 95% limits (Wilson).

    A sample counts as robust, too, if some attacks did not run on it before a time limit and the
    others did not break it. The share is then an upper limit: it has no lower limit.

    Args:
        flags: for each sample 0 if an attack broke it and 1 if none did; None or NaN if none did
            so far, and not all attacks ran.

    >>> limit_robust([0, 1, None, None])
    (0.75, None, 0.75)
    """
    robust = sum(flag != 0 for flag in flags)  # None and NaN are not 0
    share = robust / len(flags)
    if len(finite(flags)) < len(flags):
        return share, None, share
    return share, *wilson(robust, len(flags))


PROVEN = "Proven relative error of the norm (probability 99.9%; largest over the samples)"

STOPPED = "Whether the estimated error is at most tol and the proven error within its limit"

WITHIN = (
    "The true norm is at most this share higher than the value shown (probability 99.9% "
    "over the random start vector). The iteration approaches the norm from below and stops "
    "at an estimated error of tol. That estimate can fail if many singular values are close "
    "to the largest. For a smaller proven error use --within; at the size of tol it costs "
    "1.4 to 2.4 times as much. 0: the norm was computed without randomness."
)

CONVERGED = (
    "yes: the estimated error is at most tol, and the proven error at most --within. no: the "
    "norm may be far too low; see upper for a proven limit."
)

UPPER = (
    "The norm is at most this value with probability 1 - eta over the random start vector. "
    "Bounds without randomness are those of `lipaudit bounds`."
)

NORM = (
    "The largest factor by which a very small change of the input can grow in the output. It "
    "does not say how far away the nearest adversarial example is: see radius_first_order "
    "for a hint and run `lipaudit attack`. The solver approaches it from below: see within."
)

NEAR = (
    "Three values: the norm at X, the largest norm that a search found near X, and a proven "
    "upper bound near X. The true maximum is between the last two."
)

ROBUST = (
    "The true robust accuracy is at most this: a stronger attack may break more samples. "
    "Compare only values with the same attack, radius and samples."
)

CERTIFIED = (
    "The true robust accuracy on these samples is at least this: no attack can break a "
    "certified sample. Samples without a certificate may be robust or not. The truth is "
    "between this and the accuracy under attack.\nThe proof holds for exact arithmetic with "
    "the stored weights. A float32 program adds rounding errors, which matter if a margin is "
    "that small."
)

# How to read the norm of a Jacobian at the samples, from an input to an output.
NORM_OF = (
    "The largest factor by which a very small change of {} can grow in {}. A large change may "
    "grow more. The solver approaches the norm from below: see within."
)


WITHIN_COLUMN = Column("within", f"{PROVEN}.", status="estimate", format=".2g", reading=WITHIN)

HEAD = {
    "layer": Column.count("layer", "Attention layer, in the order of execution.", needed=True),
    "head": Column.count("head", "Head within the layer.", needed=True),
    "module": Column.text("module", "Module that computes the attention."),
}

HEAD_NORMS = {
    **HEAD,
    "kind": Column.text(
        "kind", "How queries, keys and values are computed from X (affine, local or numerical)."
    ),
    "input": Column.text(
        "input",
        "Input of the norms and bounds.",
        default="one input",
        reading="one input: queries, keys and values read the same X. queries apart: queries read "
        "another input than keys and values, and both vary independently. If both come from one "
        "tensor (spatial reduction, class attention), the norm with respect to that tensor can be "
        "larger or smaller. keys and values: only their input varies; the queries are constant. "
        "module input (x, y): the arguments x and y of the innermost module around the layer "
        "together, with numerical norms. "
        "`lipaudit bounds --input module` computes every norm that way.",
    ),
    "tokens": Column.count("tokens", "Tokens of the longest sample."),
    "exact": Column.norm(
        "||J||",
        "||J||, the norm of the head's Jacobian.",
        "exact",
        reading=NORM_OF.format("the layer's input", "the head's output"),
    ),
    "exact_max": Column.norm("max ||J||", "Largest ||J|| over the samples.", "exact", "max"),
    "sharp_ratio_max": Column(
        "sharp/||J||",
        "Largest sharp / ||J|| over samples.",
        reduction=Reduction("max", "sharp", per="exact"),
    ),
    "p_norm": Column("||P||", "Spectral norm of the attention matrix."),
    "x_norm": Column("||X||", "Spectral norm of the layer's input."),
    "radius": Column("R", "max_i ||x_i|| of the layer's input."),
    "softmax_norm_max": Column(
        "max ||M||", "Largest norm ||diag(p) - p p^T|| over the attention rows p."
    ),
    "splitting_gain": Column(
        "splitting",
        "Factor by which ||J|| grows if tokens are duplicated (--splitting).",
        reading="An attack that may insert copies of tokens gains up to this factor on the "
        "head. 1: duplicating tokens does not help.",
    ),
    "upper": Column(
        "upper", "Probabilistic upper limit of ||J|| (eta 1e-3).", status="estimate", reading=UPPER
    ),
    "within": WITHIN_COLUMN,
    "forward_error": Column(
        "rounding",
        "Relative error of ||J|| that rounding in the forward pass may cause.",
        status="estimate",
        format=".2g",
        reading="Estimated effect of rounding on ||J||, largest over the samples. It matters "
        "if attention logits are in the thousands: float32 then does not resolve the "
        "attention map. Use --dtype float64 to remove it.",
    ),
    "converged": Column(
        "converged", f"{STOPPED}: every sample.", reading=CONVERGED, format="", default=True
    ),
}


def limit_columns(name: str) -> dict[str, Column]:
    """Return the columns of the 95% limits of a share: NAME_low and NAME_high."""
    meaning = "95% confidence limit (Wilson)."
    return {
        f"{name}_{end}": Column(end, meaning, format=".1%", status="estimate")
        for end in ("low", "high")
    }


# Columns of a ball: radius as typed, and accuracies with and without attack.
ACCURACY = {
    "eps_text": Column.text(
        "eps", "The radius as typed: of pixels from 0 to 1, of embeddings, or a number of changes."
    ),
    "samples": Column.count("samples", "Number of samples."),
    "clean": Column.share(
        "clean",
        "Accuracy without attack.",
        status="empirical",
        reduction=Reduction("mean", "correct"),
    ),
    "robust": Column.share(
        "robust",
        "Accuracy under attack.",
        status="empirical",
        domain="ball",
        reading=ROBUST,
        reduction=Reduction("mean", "robust"),
    ),
    **limit_columns("robust"),
}

CERTIFIED_SHARE = Column.share(
    "certified",
    "Share of samples that are proven to be classified correctly on their whole ball.",
    status="certified",
    domain="ball",
    reading=CERTIFIED,
    reduction=Reduction("mean", "certified"),
)
# Per-sample columns shared by attacks and certificates.
OUTCOMES = {
    "label": Column("label", "True class; empty: unknown.", format="d"),
    "predicted": Column("predicted", "Predicted class.", format="d"),
    "correct": Column("correct", "Whether the prediction is right.", format="d"),
    "robust": Column(
        "robust",
        "Whether the sample stayed correct under the attack.",
        better="higher",
        domain="ball",
        status="empirical",
        format="d",
        reading=ROBUST,
    ),
}
