"""Facts on model, data and run, the missing parts, and the notes on all figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lipaudit.report.blocks import Block, Card, Chapter, Paragraph, list_notes
from lipaudit.tables import Note, Report
from lipaudit.tables.summary import list_shared_notes, summary

CHARACTERS = 12
"""Number of characters of a sample's id that are shown."""
LETTERS = 40
"""Number of characters of a text shown after its place."""


def list_facts(report: Report) -> dict[str, str]:
    """Return facts on model, data and run, by name."""
    run, model, data = report.run, report.run.model, report.run.data
    commits = (
        f"{name} {source.commit[:12]} ({source.revision})"
        for name, source in (("model", model), ("data", data))
        if source.commit
    )
    facts = {
        "model": f"{model.spec} ({model.source}, {model.architecture})",
        "weights": f"{model.parameters:,} parameters, sha256 {model.weights_sha256[:16]}",
        "data": f"{data.spec}, {data.samples} samples, suite {data.suite_id[:16]}",
        "commit": ", ".join(commits),
        "preprocessing": "; ".join(f"{k} {format_setting(v)}" for k, v in run.preprocess.items()),
        "run": f"{run.device}, {run.dtype}, seed {run.seed}, {run.created}",
        "versions": ", ".join(
            f"{k} {v}" for k, v in ({"lipaudit": run.lipaudit} | run.versions).items()
        ),
        "command": run.command,
        "status": ", ".join([report.status, *([report.shard.name] if report.shard else [])]),
        "reason": run.reason,
    }
    return {name: text for name, text in facts.items() if text}


def format_setting(value: Any) -> str:
    """Write a setting; lists without brackets."""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


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


def list_top_notes(report: Report) -> list[Note]:
    """Return every warning, then the notes that all measures share."""
    common = list_common_notes(report)
    return [*summary(report).warnings, *(note for note in common if note.level != "warning")]


def list_common_notes(report: Report) -> list[Note]:
    """Return the notes that all measures share; of a single measure, its warnings."""
    measures = [s for s in report.sections if "." not in s.measure]
    return [n for n in list_shared_notes(report) if n.level == "warning" or len(measures) > 1]


def open_page(
    answer: Paragraph | None, gaps: str, facts: Iterable[tuple[str, str]], notes: Iterable[Note]
) -> Chapter:
    """Return the opening of a page: the answer, what is missing, facts, warnings and notes."""
    blocks: list[Block] = [answer] if answer else []
    blocks += [Paragraph(f"Partial: {gaps}", "broken")] if gaps else []
    rows = tuple(facts)
    return Chapter("", "", (*blocks, *([Card(rows)] if rows else []), *list_notes(notes)))


def find_places(report: Report) -> dict[str, str]:
    """Return the place of each sample in the data, with the beginning of a text."""
    texts = report.found("text")
    begins = {name: f' "{text[:LETTERS]}"' for name, text in texts.items()}
    return {name: place + begins.get(name, "") for name, place in report.found("place").items()}


def name_sample(sample: str, places: Mapping[str, str]) -> str:
    """Name a sample by the beginning of its id and its place."""
    return ", ".join(filter(None, (sample[:CHARACTERS], places.get(sample))))
