"""Who is told what happens while a job runs; everything told is in the report, too."""

from __future__ import annotations

from lipaudit.results import Note


class Observer:
    """Is told of progress and remarks, and does nothing; a command line draws them."""

    def note(self, note: Note) -> None:
        """A remark arises."""

    def begins(self, measure: str, samples: int) -> None:
        """A measure begins, with so many samples before it."""

    def advances(self, measure: str, samples: int) -> None:
        """So many more samples are measured."""

    def moves(self, measure: str, samples: float) -> None:
        """So many samples' worth of those that `advances` will tell of next are measured."""

    def fails(self, measure: str, error: Exception) -> None:
        """A measure has failed; the others go on."""

    def ends(self, measure: str) -> None:
        """A measure has ended."""
