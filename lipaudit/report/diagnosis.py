"""What stands out in a report."""

from __future__ import annotations

from dataclasses import dataclass

from lipaudit.results import Report


@dataclass(frozen=True)
class Finding:
    """One sentence, and the row that it comes from."""

    text: str
    source: str


def diagnosis(report: Report) -> list[Finding]:
    """Return what stands out."""
    return []
