"""The output contract: what a report holds, one row type per measure, and how each column reads.

Everything a renderer or the gate must know about a column (label, unit, format, which direction is
better, the domain on which the figure holds and how far it is proven) stands here, once, beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

Status = Literal["certified", "exact", "estimate", "empirical"]
Better = Literal["lower", "higher"]
NON_FINITE = {"enum": ["NaN", "Infinity", "-Infinity"]}
Float = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, NON_FINITE]})]


def column(
    label: str,
    meaning: str,
    *,
    unit: str = "",
    fmt: str = ".3g",
    better: Better | None = None,
    domain: str = "at X",
    status: Status = "exact",
) -> Any:
    """Describe a column: what is printed above it, behind it and in `lipaudit explain`."""
    extra = {"label": label, "unit": unit, "format": fmt, "better": better}
    extra |= {"domain": domain, "status": status}
    return Field(description=meaning, json_schema_extra=extra)


class Frozen(BaseModel):
    """Base of everything in a report: immutable, closed, NaN and infinities written as strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Row(Frozen):
    """One line of a section; subclasses say which columns a measure has."""

    section: ClassVar[str]


class Note(Frozen):
    """A remark that belongs to the numbers: shown with them, never dropped."""

    level: Literal["info", "warning"]
    code: str
    text: str


class Array(Frozen):
    """A dense array, flattened in C order; floats are rounded to 6 significant digits."""

    shape: tuple[int, ...]
    data: tuple[Float | None, ...]
