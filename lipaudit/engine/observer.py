"""Who is told what happens while a job runs; everything told is in the report, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lipaudit.results import Note

if TYPE_CHECKING:
    from lipaudit.measures.measure import Part
    from lipaudit.settings import MeasureOptions


class Observer:
    """Is told of progress and remarks, and does nothing; a command line draws them."""

    def note(self, note: Note) -> None:
        """A remark arises."""

    def begins(self, measure: str, samples: int) -> None:
        """A measure begins, with so many samples before it."""

    def advances(self, measure: str, samples: int) -> None:
        """So many more samples are measured."""

    def ends(self, measure: str, parts: Sequence[Part], options: MeasureOptions) -> None:
        """A measure has ended: the parts that are about to be summarised."""
