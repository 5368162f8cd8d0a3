"""Facts on model, data and run, the missing parts, and the notes on all figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lipaudit.tables import Note, Report
from lipaudit.tables.summary import list_shared_notes, summary

CHARACTERS = 12
"""Number of characters of a sample's id that are shown."""
LETTERS = 40
"""Number of characters of a text shown after its place."""
LISTED = 6
"""Number of differing words listed when similar notes are merged."""


def list_facts(report: Report) -> tuple[tuple[str, str], ...]:
    """Return facts on model, data and run, by name."""
    run, model, data = report.run, report.run.model, report.run.data
    commits = [
        (f"{name} commit", f"{source.commit[:12]} ({source.revision})")
        for name, source in (("model", model), ("data", data))
        if source.commit
    ]
    part = f", {report.shard.name}" if report.shard else ""
    return (
        ("model", f"{model.spec} ({model.source}, {model.architecture})"),
        ("weights", f"{model.parameters:,} parameters, sha256 {model.weights_sha256[:16]}"),
        ("data", f"{data.spec}, {data.samples} samples, suite {data.suite_id[:16]}"),
        *commits,
        ("run", f"{run.device}, {run.dtype}, seed {run.seed}, {run.created}"),
        ("command", run.command),
        ("status", f"{report.status}{part}"),
        *([("reason", run.reason)] if run.reason else []),
    )


def describe_gaps(report: Report) -> str:
    """Describe what is missing from a report; empty if it is complete."""
    lacks = []
    if report.shard is not None:
        lacks.append(
            f"this is {report.shard.name}, with some of the samples. Join the shards with "
            "lipaudit merge."
        )
    if report.failures:
        failed = "; ".join(f"{name} failed: {f.reason}" for name, f in report.failures.items())
        lacks.append(f"{failed}. The other measures are complete.")
    if report.unmeasured:
        left = ", ".join(f"{name} ({count})" for name, count in report.unmeasured.items())
        lacks.append(f"the time limit ended the run before some samples were measured: {left}.")
    elif report.status != "complete" and not report.failures:
        lacks.append("the run was cut short.")
    return " ".join(lacks)


# Samples


def find_places(report: Report) -> dict[str, str]:
    """Return the place of each sample in the data, with the beginning of a text."""
    texts = report.found("text")
    begins = {name: f' "{text[:LETTERS]}"' for name, text in texts.items()}
    return {name: place + begins.get(name, "") for name, place in report.found("place").items()}


def name_sample(sample: str, places: Mapping[str, str]) -> str:
    """Name a sample by the beginning of its id and its place."""
    return ", ".join(filter(None, (sample[:CHARACTERS], places.get(sample))))


# Notes


def list_top_notes(report: Report) -> list[Note]:
    """Return the notes that all measures share; for a report of one measure, its warnings."""
    measures = [s for s in report.sections if "." not in s.measure]
    return [n for n in list_shared_notes(report) if n.level == "warning" or len(measures) > 1]


def list_leading_notes(report: Report) -> tuple[Note, ...]:
    """Return every warning, then the notes that all measures share."""
    return merge_notes([*summary(report).warnings, *list_top_notes(report)])


def merge_notes(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Merge notes that differ in one word into one, with these words side by side.

    >>> texts = ("no castin for 12 heads", "no hu for 12 heads", "12 heads are numerical")
    >>> [n.text for n in merge_notes(Note(level="info", code="head", text=t) for t in texts)]
    ['no castin, hu for 12 heads', '12 heads are numerical']
    """
    groups: list[list[Note]] = []
    for note in dict.fromkeys(notes):
        group = next((g for g in groups if _find_difference([*g, note]) is not None), None)
        if group is None:
            groups.append(group := [])
        group.append(note)
    merged = []
    for first, *others in groups:
        texts = [note.text.split(" ") for note in (first, *others)]
        place = _find_difference([first, *others])
        if place is not None:
            each = [words[place] for words in texts]
            # A sign behind the words, such as a colon, is written once, behind the last word.
            plain = [word.rstrip(",:;") for word in each]
            more = f", ... ({len(each)} in all)" if len(each) > LISTED else ""
            texts[0][place] = ", ".join(plain[:LISTED]) + more + each[-1].removeprefix(plain[-1])
        merged.append(first.model_copy(update={"text": " ".join(texts[0])}))
    return tuple(merged)


def _find_difference(notes: Sequence[Note]) -> int | None:
    """Return the one word that differs; None if more differs."""
    texts = [note.text.split(" ") for note in notes]
    if len({(note.level, note.code, len(t)) for note, t in zip(notes, texts, strict=True)}) > 1:
        return None
    places = [i for i, words in enumerate(zip(*texts, strict=True)) if len(set(words)) > 1]
    return places[0] if len(places) == 1 else None
