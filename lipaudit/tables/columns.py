"""Columns, rows, and the layout of a section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from lipaudit.errors import LipauditError
from lipaudit.tables.trials import TrialKey, parse_radius

if TYPE_CHECKING:
    import numpy as np

Status = Literal["certified", "exact", "bound", "estimate", "empirical"]
Better = Literal["lower", "higher"]
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]}
_CELL = {"anyOf": [*_NUMBER["anyOf"], {"type": "integer"}, {"type": "string"}, {"type": "null"}]}


_FORMAT = r"^(|s|d|[-+]?(\.\d{1,2})?[efg%])$"
"""Allowed values of `Column.format`. No width: a damaged file must not fill the memory."""


def _revive(value: Any) -> Any:
    """Return NaN and infinities for the strings that represent them."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


Float = Annotated[float, BeforeValidator(_revive), WithJsonSchema(_NUMBER)]
Cell = Annotated[bool | int | float | str | None, BeforeValidator(_revive), WithJsonSchema(_CELL)]


class Frozen(BaseModel):
    """Base of everything in a report: immutable, closed, with NaN and infinities as strings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="strings",
        populate_by_name=True,
        defer_build=True,  # a command does not pay for what it does not use
    )


@dataclass(frozen=True)
class Reduction:
    """How the cell of a row is computed from samples, so that it can be computed for a subset.

    Samples without a value (NaN) are left out.

    Attributes:
        stat: the statistic over the samples.
        values: name of the array, (rows, samples), or of the per-sample column (of the only row,
            or of the row's attack).
        per: name of an array that divides the values, sample by sample; empty for none.
        weights: name of an array of weights for the mean; if it is empty or not stored, all
            weights are equal.
    """

    stat: Literal["median", "mean", "p95", "max"]
    values: str
    per: str = ""
    weights: str = ""

    @property
    def arrays(self) -> frozenset[str]:
        """Return the names of the arrays that the reduction reads."""
        return frozenset({self.values, self.per, self.weights} - {""})


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
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
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

    def read(self, name: str, value: Any) -> Any:
        """Return a cell of this column, with strings for NaN and infinities converted.

        Raises:
            ValueError: the value does not fit the column.
        """
        if value is None:
            if self.needed or self.default is not None:
                raise ValueError(f"{name} is missing")
            return None
        kind: Any = {"s": str, "d": int, "": bool}.get(self.format, float)
        # JSON has no NaN: it is written as a string, which only columns of numbers convert back.
        value = _revive(value) if kind is float else value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        # True is an int in Python, but not a count.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{name} is {value!r}, not of type {kind.__name__}")
        if self.least is not None and value < self.least:
            raise ValueError(f"{name} is {value}, below {self.least:g}")
        return value


def text_column(label: str, meaning: str, default: str = "", **how: Any) -> Column:
    """Declare a column of text."""
    return Column(label, meaning, format="s", default=default, **how)


def count_column(label: str, meaning: str, default: int = 0, **how: Any) -> Column:
    """Declare a column of whole numbers that are never null."""
    return Column(label, meaning, format="d", default=default, **how)


def naming(columns: Mapping[str, Column]) -> list[str]:
    """Return the columns that name a row: the leading columns of text or whole numbers.

    A section begins with the columns that name a row; measured values follow. The first column
    always names.

    >>> layer, text, norm = (Column(label="", meaning="", format=f) for f in ("d", "s", ".3g"))
    >>> naming({"layer": layer, "module": text, "norm": norm, "tokens": layer})
    ['layer', 'module']
    """
    names = list(columns)
    measured = (i for i, name in enumerate(names) if columns[name].format not in ("d", "s"))
    return names[: max(next(measured, len(names)), 1)]


def find_bounds(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns of upper bounds of the norm in `exact`: those that state a formula."""
    return {name: column for name, column in columns.items() if column.formula}


class Row(Mapping[str, Any]):
    """One line of a section: its cells by column name, `row.exact` or `row["exact"]`.

    If the name of a column is a Python keyword, an underscore follows it: `row.from_`.
    """

    __slots__ = ("_cells",)

    def __init__(self, cells: Mapping[str, Any]) -> None:
        self._cells = dict(cells)

    def __getitem__(self, name: str) -> Any:
        return self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (column := name.removesuffix("_")) not in self._cells:
            raise AttributeError(f"the row has no column {name!r}")
        return self._cells[column]

    def __repr__(self) -> str:
        return f"Row({self._cells})"

    def replace(self, **cells: Any) -> Row:
        """Return the row with some cells replaced."""
        return Row(self._cells | cells)

    @property
    def key(self) -> TrialKey | None:
        """Return the attack or ball of the row, which also names per-sample columns.

        If a report lacks the typed radius, the radius is rounded.
        """
        if not {"norm", "eps"} <= self._cells.keys():
            return None
        radius = parse_radius(self.get("eps_text") or f"{self.eps:.4g}")
        return TrialKey(self.get("attack", ""), self.norm, radius)

    @property
    def trial(self) -> TrialKey:
        """Return the key of a row of an attack or a ball."""
        assert self.key is not None
        return self.key


def make_row(columns: Mapping[str, Column], cells: Mapping[str, Any]) -> Row:
    """Return the row of these cells; missing cells get the default of their column.

    Raises:
        ValueError: a cell is missing, has the wrong type or no column.
    """
    if strange := sorted(cells.keys() - columns.keys()):
        raise ValueError(f"a row has no column {strange[0]!r}")
    given = {n: cells.get(n, None if c.needed else c.default) for n, c in columns.items()}
    row = Row({name: columns[name].read(name, cell) for name, cell in given.items()})
    try:
        _ = row.key
    except LipauditError as error:
        raise ValueError(error.message) from None
    return row


class Array(Frozen):
    """A dense array in C order; floats are rounded to 6 significant digits."""

    shape: tuple[int, ...]
    data: tuple[Float | None, ...] = Field(repr=False)

    @model_validator(mode="after")
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


def _write_column(column: Column) -> dict[str, Any]:
    """Return the fields of a column that differ from the defaults."""
    plain = asdict(Column("", ""))
    given = {n: v for n, v in asdict(column).items() if v != plain[n] or n in ("label", "meaning")}
    if column.reduction:
        given["reduction"] = {n: v for n, v in given["reduction"].items() if v}
    return given


Columns = dict[str, Annotated[Column, PlainSerializer(_write_column)]]
Rows = tuple[
    Annotated[
        Row,
        PlainValidator(lambda row: row),
        PlainSerializer(dict, return_type=dict[str, Cell]),
        WithJsonSchema({"type": "object", "additionalProperties": _CELL}),
    ],
    ...,
]
