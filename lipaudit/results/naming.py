"""Which columns say what a row is of."""

from __future__ import annotations

from collections.abc import Mapping

from lipaudit.results.columns import Column


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
