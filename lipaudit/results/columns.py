"""How a column reads, and what every row is made of."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)

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
        frozen=True, extra="forbid", ser_json_inf_nan="strings", populate_by_name=True
    )


class Column(Frozen):
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
    """

    label: str
    meaning: str
    unit: str = ""
    format: str = ".3g"
    better: Better | None = None
    domain: str = "at X"
    status: Status = "exact"


def column(
    label: str, meaning: str, default: Any = None, *, alias: str | None = None, **how: Any
) -> Any:
    """Declare a column of a row type: a pydantic field that carries its `Column`."""
    extra = Column(label=label, meaning=meaning, **how).model_dump()
    return Field(default=default, description=meaning, json_schema_extra=extra, alias=alias)


class Row(Frozen):
    """One line of a section; subclasses say which columns a measure has."""

    section: ClassVar[str]

    @classmethod
    def columns(cls) -> dict[str, Column]:
        """Return the columns of this row type in the order they are printed."""
        return {
            field.alias or name: Column.model_validate(field.json_schema_extra)
            for name, field in cls.model_fields.items()
        }

    def cells(self) -> dict[str, Any]:
        """Return the values by column name."""
        return self.model_dump(by_alias=True)
