"""Which notes stand where: what spoils figures above them, what is alike in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lipaudit.results import Note, Report
from lipaudit.results.summary import shared, summary

LISTED = 6
"""How many of the words in which notes differ are written out."""


def lack(report: Report) -> str:
    """Say what a report lacks; nothing where it is complete."""
    lacks = []
    if report.shard is not None:
        lacks.append(
            f"this is {report.shard.name}: its figures are of some of the samples. lipaudit merge "
            "makes one report of all."
        )
    if report.failures:
        failed = "; ".join(f"{name} failed: {f.reason}" for name, f in report.failures.items())
        lacks.append(f"{failed}. What follows is the rest.")
    if report.unmeasured:
        left = ", ".join(f"{name} ({count})" for name, count in report.unmeasured.items())
        lacks.append(
            f"the time limit ended the run, and samples are left: of {left}. Figures are of those "
            "that were measured."
        )
    elif report.status != "complete" and not report.failures:
        lacks.append("the run was cut short; what follows is incomplete.")
    return " ".join(lacks)


def of_all(report: Report) -> list[Note]:
    """Return what stands above the figures and is not repeated: what every measure says.

    Of a report of one measure these are its warnings.
    """
    measures = [s for s in report.sections if "." not in s.measure]
    return [n for n in shared(report) if n.level == "warning" or len(measures) > 1]


def leading(report: Report) -> tuple[Note, ...]:
    """Return what is to be known before any figure: every warning, then what all measures say."""
    warned = [
        Note(level="warning", code=w.code, text=f"{w.measure}: {w.text}" if w.measure else w.text)
        for w in summary(report).warnings
    ]
    return merged([*warned, *of_all(report)])


def merged(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Write notes that differ in one word as one, with these words side by side.

    >>> texts = ("no castin for 12 heads", "no hu for 12 heads", "12 heads are numerical")
    >>> [n.text for n in merged(Note(level="info", code="head", text=t) for t in texts)]
    ['no castin, hu for 12 heads', '12 heads are numerical']
    """
    groups: list[list[Note]] = []
    for note in dict.fromkeys(notes):
        group = next((g for g in groups if _differing([*g, note]) is not None), None)
        if group is None:
            groups.append(group := [])
        group.append(note)
    return tuple(map(_as_one, groups))


def _differing(notes: Sequence[Note]) -> int | None:
    """Return which word alone differs; None where the notes are not alike."""
    texts = [note.text.split(" ") for note in notes]
    if len({(note.level, note.code, len(t)) for note, t in zip(notes, texts, strict=True)}) > 1:
        return None
    places = [i for i, words in enumerate(zip(*texts, strict=True)) if len(set(words)) > 1]
    return places[0] if len(places) == 1 else None


def _as_one(notes: Sequence[Note]) -> Note:
    place = _differing(notes)
    if place is None:
        return notes[0]
    words = notes[0].text.split(" ")
    each = [note.text.split(" ")[place] for note in notes]
    plain = [word.rstrip(",:;") for word in each]
    listed = ", ".join(plain[:LISTED])
    more = f", ... ({len(each)} in all)" if len(each) > LISTED else ""
    words[place] = listed + more + each[-1].removeprefix(plain[-1])
    return notes[0].model_copy(update={"text": " ".join(words)})
