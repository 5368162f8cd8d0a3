"""How a column reads, what a row is, and how a section is laid out."""

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
    """Read back the strings that stand for NaN and the infinities."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


Float = Annotated[float, BeforeValidator(_revive), WithJsonSchema(_NUMBER)]
Cell = Annotated[bool | int | float | str | None, BeforeValidator(_revive), WithJsonSchema(_CELL)]


class Frozen(BaseModel):
    """Base of everything in a report: immutable, closed, NaN and infinities written as strings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="strings",
        populate_by_name=True,
        defer_build=True,  # what a command does not need costs it nothing
    )


@dataclass(frozen=True)
class Reduction:
    """How the cell of a row is computed from its samples, so that a subset of them can be reduced.

    Samples without a value (NaN) are left out.

    Attributes:
        stat: over the samples.
        values: the array, (rows, samples), that is reduced; or the per-sample column, which is
            then that of the only row, or of the row's attack.
        per: an array to divide the values by, sample by sample; empty for none.
        weights: an array with the weight of each sample in the mean; where it is not stored, or
            empty, all weights are equal.
    """

    stat: Literal["median", "mean", "p95", "max"]
    values: str
    per: str = ""
    weights: str = ""

    @property
    def arrays(self) -> frozenset[str]:
        """The names of the arrays that it reads."""
        return frozenset({self.values, self.per, self.weights} - {""})


@dataclass(frozen=True)
class Column:
    """How a column reads.

    Attributes:
        label: what is printed above it.
        meaning: one sentence, for `lipaudit explain` and tool tips.
        unit: printed behind numbers; empty for a pure number.
        format: a Python format specification of a number; "d" for whole numbers, "s" for text,
            empty for yes and no.
        better: the direction of improvement, which the gate needs; None where there is none.
        domain: where the figure holds ("at X", "all inputs of norm <= R"); empty where it claims
            nothing (a cost, a tolerance).
        status: certified (holds on its whole domain) | exact (computed at X) | bound
            (proven upper bound, at X only) | estimate | empirical.
        formula: what is computed, in the symbols of `SYMBOLS`; of bounds.
        reading: how to read a figure that is easily misread; a paragraph a line.
        reduction: how it is computed from the samples; None where a report cannot repeat that.
        default: the cell of a row that does not give one; a cell may be null only if this is.
        needed: whether every row has to give it, and not null.
        least: the smallest value it can have.
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
        """Return a cell of this column, with NaN and infinities in place of their names.

        Raises:
            ValueError: the column takes no such value.
        """
        if value is None:
            if self.needed or self.default is not None:
                raise ValueError(f"{name} is missing")
            return None
        kind: Any = {"s": str, "d": int, "": bool}.get(self.format, float)
        # JSON has no NaN: it is written as a string, which only a column of numbers reads back.
        value = _revive(value) if kind is float else value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        # True is an int in Python, and no count.
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
    """Return the columns that name a row: the leading ones, of text or whole numbers.

    The columns of a section start with what a row is of; measured values follow. The first
    column always names.

    >>> layer, text, norm = (Column(label="", meaning="", format=f) for f in ("d", "s", ".3g"))
    >>> naming({"layer": layer, "module": text, "norm": norm, "tokens": layer})
    ['layer', 'module']
    """
    names = list(columns)
    measured = (i for i, name in enumerate(names) if columns[name].format not in ("d", "s"))
    return names[: max(next(measured, len(names)), 1)]


class Row(Mapping[str, Any]):
    """One line of a section: its cells by column name, `row.exact` or `row["exact"]`.

    A column whose name is a keyword of Python has an underscore behind it: `row.from_`.
    """

    __slots__ = ("_cells",)

    def __init__(self, cells: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_cells", dict(cells))

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

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a row is immutable: use replace()")

    def __repr__(self) -> str:
        return f"Row({self._cells})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (self._cells,)

    def replace(self, **cells: Any) -> Row:
        """Return the row with other cells."""
        return Row(self._cells | cells)

    @property
    def key(self) -> TrialKey | None:
        """The attack or the ball of the row, by which per-sample columns are named, too.

        A report that does not say how the radius was typed has it rounded.
        """
        if not {"norm", "eps"} <= self._cells.keys():
            return None
        radius = parse_radius(self.get("eps_text") or f"{self.eps:.4g}")
        return TrialKey(self.get("attack", ""), self.norm, radius)

    @property
    def trial(self) -> TrialKey:
        """The key of a row that is of an attack or a ball."""
        assert self.key is not None
        return self.key


def make_row(columns: Mapping[str, Column], cells: Mapping[str, Any]) -> Row:
    """Return the row of these cells; a cell that is not given is the default of its column.

    Raises:
        ValueError: a cell is missing, of the wrong type or of no column.
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
        # Six digits: norms are computed to 1e-4 by default, and the JSON is half as long.
        return cls(shape=values.shape, data=tuple(float(f"{v:.6g}") for v in values.ravel()))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the array, in float64 (null is NaN)."""
        import numpy as np

        return np.array(self.data, dtype=np.float64).reshape(self.shape)


def _write_column(column: Column) -> dict[str, Any]:
    """Return what a column says, without what every column says if it is not told."""
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
