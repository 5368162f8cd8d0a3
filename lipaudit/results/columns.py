"""How a column reads, and what every row is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from lipaudit.results.trials import TrialKey

if TYPE_CHECKING:
    import numpy as np

Status = Literal["certified", "exact", "bound", "estimate", "empirical"]
Better = Literal["lower", "higher"]
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBER = {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]}
_CELL = {"anyOf": [*_NUMBER["anyOf"], {"type": "integer"}, {"type": "string"}, {"type": "null"}]}


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
class Column:
    """How a column reads.

    Attributes:
        label: what is printed above it.
        meaning: one sentence, for `lipaudit explain` and tool tips.
        unit: printed behind numbers; empty for a pure number.
        format: a Python format specification.
        better: the direction of improvement, which the gate needs; None where there is none.
        domain: where the figure holds ("at X", "all inputs of norm <= R"); empty where it claims
            nothing (a cost, a tolerance).
        status: certified (holds on its whole domain) | exact (computed at X) | bound
            (proven upper bound, at X only) | estimate | empirical.
        formula: what is computed, in the symbols of `SYMBOLS`; of bounds.
        reading: how to read a figure that is easily misread; a paragraph a line.
    """

    label: str
    meaning: str
    unit: str = ""
    format: str = ".3g"
    better: Better | None = None
    domain: str = "at X"
    status: Status = "exact"
    formula: str = ""
    reading: str = ""


def column(
    label: str,
    meaning: str,
    default: Any = None,
    *,
    alias: str | None = None,
    least: int | None = None,
    **how: Any,
) -> Any:
    """Declare a column of a row type: a pydantic field that carries its `Column`.

    Args:
        label: its heading.
        meaning: one line.
        default: of the field.
        alias: its name in a report, where that is no name of Python's.
        least: the smallest value it can have.
        how: further attributes of `Column`.
    """
    extra = asdict(Column(label=label, meaning=meaning, **how))
    return Field(
        default=default, description=meaning, json_schema_extra=extra, alias=alias, ge=least
    )


def wilson_limit(label: str) -> Any:
    """Declare an end of the interval of a share."""
    return column(label, "Wilson 95 % limit.", format=".1%", status="estimate")


def naming(columns: Mapping[str, Column]) -> list[str]:
    """Return the columns that name a row: the leading ones, of text or whole numbers.

    A row type lists what a row is of before what was measured there, so that a type which nobody
    here has heard of says so too. The first column always names.

    >>> layer, text, norm = (Column(label="", meaning="", format=f) for f in ("d", "s", ".3g"))
    >>> naming({"layer": layer, "module": text, "norm": norm, "tokens": layer})
    ['layer', 'module']
    """
    names = list(columns)
    measured = (i for i, name in enumerate(names) if columns[name].format not in ("d", "s"))
    return names[: max(next(measured, len(names)), 1)]


class Row(Frozen):
    """One line of a section; subclasses say which columns a measure has.

    Attributes:
        section: the name of the section that such rows make up.
        title: its heading on a page; empty: its name.
    """

    section: ClassVar[str]
    title: ClassVar[str] = ""

    @classmethod
    def columns(cls) -> dict[str, Column]:
        """Return the columns of this row type in the order they are printed."""
        return {
            field.alias or name: Column(**cast("dict[str, Any]", field.json_schema_extra))
            for name, field in cls.model_fields.items()
        }

    @property
    def key(self) -> TrialKey | None:
        """The attack or the ball that it is of, by which per-sample columns are named, too."""
        return None

    def cells(self) -> dict[str, Any]:
        """Return the values by column name."""
        return self.model_dump(by_alias=True)


class OpenRow(Row):
    """A row with columns of numbers beside those of its type: one for every declared bound.

    A number without a declaration is kept and written back: it is of a plug-in that is not
    installed here. A declared one that is missing is None.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Float | None] = Field(init=False)
    behind: ClassVar[str]
    """The column of this type behind which the declared ones are printed."""

    @classmethod
    def declared(cls) -> dict[str, Column]:
        """Return the columns that are declared elsewhere, in the order they are printed."""
        raise NotImplementedError

    @classmethod
    def columns(cls) -> dict[str, Column]:
        """Return the columns of this row type in the order they are printed."""
        return _inserted(super().columns(), cls.behind, cls.declared())

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        # In a union of row types rows of the other types are tried too.
        return dict.fromkeys(cls.declared()) | values if isinstance(values, dict) else values

    @model_serializer(mode="wrap")
    def _in_order(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = write(self)
        return {name: values[name] for name in self.columns() if name in values} | values

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """List the declared columns among the properties."""
        schema = handler.resolve_ref_schema(handler(core))
        number = {"anyOf": [*_NUMBER["anyOf"], {"type": "null"}], "default": None}
        properties = {
            name: number | {"title": name, "description": column.meaning} | asdict(column)
            for name, column in cls.declared().items()
        }
        schema["properties"] = _inserted(schema["properties"], cls.behind, properties)
        return schema


def _inserted(columns: dict[str, Any], behind: str, more: dict[str, Any]) -> dict[str, Any]:
    """Put more columns behind one of those that are there."""
    items = list(columns.items())
    at = list(columns).index(behind) + 1
    return dict([*items[:at], *more.items(), *items[at:]])


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
        return cls(shape=values.shape, data=tuple(float(f"{v:.6g}") for v in values.ravel()))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the array, in float64 (null is NaN)."""
        import numpy as np

        return np.array(self.data, dtype=np.float64).reshape(self.shape)
