"""Which notes stand where: what spoils figures above them, what is alike in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lipaudit.results import Note, Report, Section

LISTED = 6
"""How many of the words in which notes differ are written out."""


def of_all(report: Report) -> list[Note]:
    """Return what is said of every measure: of the model and the data, not of some figures.

    Warnings come first. Of a report of one measure these are all there are.
    """
    if not report.sections:
        return []
    first, *others = [s for s in report.sections if "." not in s.measure] or report.sections
    shared = [note for note in first.notes if all(note in section.notes for section in others)]
    return [note for note in shared if note.level == "warning"] + [
        note for note in shared if note.level != "warning" and others
    ]


def warnings(sections: Iterable[Section]) -> list[Note]:
    """Return the distinct warnings of some sections."""
    notes = (note for section in sections for note in section.notes)
    return list(dict.fromkeys(note for note in notes if note.level == "warning"))


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
