"""Report as JSON: the file itself."""

from __future__ import annotations

from lipaudit import schema
from lipaudit.errors import UsageError
from lipaudit.results import Report


def render(*reports: Report) -> bytes:
    """Write one report as strict JSON.

    Raises:
        UsageError: for several reports, which have no common file.
    """
    if len(reports) != 1:
        raise UsageError(
            f"{len(reports)} reports do not fit one JSON file",
            "lipaudit compare A.json B.json -f json writes what changed; table, markdown and html "
            "set reports side by side.",
        )
    return schema.dumps(reports[0]).encode()
