"""Norms at the positions of texts: missing positions, and one figure for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lipaudit.data.batch import Batch
from lipaudit.measures.measure import Part, Values
from lipaudit.models.derivative.endpoints import find_places
from lipaudit.models.net import Net
from lipaudit.settings.jacobian import Target
from lipaudit.tables import Note

ALWAYS = {"norm": float, "upper": float, "within": float, "products": int, "converged": bool}
"""Columns that accompany every norm, with their types."""


def columns_of(net: Net, batch: Batch, end: Target) -> Tensor | None:
    """Return the columns of each text's position, (samples, 1 or more); None without positions.

    A text has a loss from its second token on.
    """
    if end.what == "loss" and net.classes is None:
        return find_places(batch, "1")
    return find_places(batch, end.where) if end.where else None


def spread(values: Values, where: Values) -> Values:
    """Put values at the given places, and neutral values (NaN, 0, converged) elsewhere."""
    spread = _blank((*where.shape, *values.shape[1:]), values.dtype)
    spread[where] = values
    return spread


def _blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Values:
    return np.full(shape, {"f": np.nan, "b": True}.get(dtype.kind, 0), dtype)


def over_positions(each: Mapping[str, Values], inside: Values) -> dict[str, Values]:
    """Return the norms at all positions, and the largest norm of each text.

    Args:
        each: the columns of `ALWAYS` at every position, text by text.
        inside: mask of the positions that each text has, (texts, positions).
    """
    of = {name: spread(values, inside) for name, values in each.items()}
    top = {name: np.where(inside, of[name], -np.inf) for name in ("norm", "upper", "within")}
    both = zip(of["norm"], inside, strict=True)
    return {name: values.max(1) for name, values in top.items()} | {
        "products": of["products"].sum(1),
        "converged": of["converged"].all(1),
        "norm_median": np.array([np.median(row[own]) for row, own in both]),
        "position": top["norm"].argmax(1),
        "positions": of["norm"],
    }


def join_ragged(parts: Sequence[Part], name: str) -> Values:
    """Join one array of all parts; arrays with a column per token are padded."""
    known = [part.values[name] for part in parts if name in part.values]
    sizes = max(values.shape[1:] for values in known)
    whole = _blank((sum(len(part.ids) for part in parts), *sizes), known[0].dtype)
    if name == "outside":
        whole[:] = False
    start = 0
    for part in parts:
        if (values := part.values.get(name)) is not None:
            whole[(slice(start, start + len(values)), *map(slice, values.shape[1:]))] = values
        start += len(part.ids)
    return whole


def remarks(end: str, parts: Sequence[Part], outside: Values) -> tuple[Note, ...]:
    """Note what the figures refer to, if the name of the output leaves that open."""
    said = []
    if left := int(outside.sum()):
        text = f"{left} of {len(outside)} texts are too short for {end}, so they have no norm"
        said.append(Note(level="warning", code="too-short", text=text))
    if end.endswith(":all"):
        text = (
            "the norm of a text is the largest over its positions (column position). The "
            "JSON has all of them in the array positions"
        )
        said.append(Note(level="info", code="by-position", text=text))
    if guessed := sum(part.facts.get("unlabelled", 0) for part in parts):
        text = f"the loss of {guessed} samples without a label uses the predicted class"
        said.append(Note(level="info", code="loss-of-predicted", text=text))
    return tuple(said)
