"""Samples of several reports under one name each, where each model saw them in its own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lipaudit.results import Report


def matched(reports: Sequence[Report]) -> list[Report]:
    """Name the samples of every report as the first does, where they are the same inputs.

    An id is of a sample as its model takes it: another size of image, another tokenizer or
    another order of classes gives the same input another id. Inputs are the same where they stand
    at the same place of the same data, and begin alike where they are texts.
    """
    first, *others = reports
    return [first, *(_renamed(report, other_names(report, first)) for report in others)]


def other_names(report: Report, first: Report) -> dict[str, str]:
    """Return what the first report calls the samples of another; empty where ids are alike."""
    here, there = report.found("place"), first.found("place")
    known = {place: name for name, place in there.items()}
    if set(here) & set(there) or len(known) < len(there) or not _comparable(report, first):
        return {}
    names = {name: known[place] for name, place in here.items() if place in known}
    if len(names) < min(len(here), len(there)):
        return {}
    texts, begun = report.found("text"), first.found("text")
    alike = all(texts.get(name) == begun.get(old) for name, old in names.items())
    return names if alike else {}


def _comparable(report: Report, first: Report) -> bool:
    """Tell whether other ids may be of the same inputs: else the data have changed."""
    new, old = report.run, first.run
    same_data = (new.data.spec, new.data.commit) == (old.data.spec, old.data.commit)
    seen_otherwise = new.preprocess != old.preprocess or bool(report.found("text"))
    # A command names its models: that of two reports is of one audit of both.
    return same_data and (seen_otherwise or new.command == old.command)


def _renamed(report: Report, names: Mapping[str, str]) -> Report:
    if not names:
        return report
    sections = tuple(
        section.model_copy(update={"samples": _called(section.samples, names)})
        for section in report.sections
    )
    samples = _called(report.samples, names)
    return report.model_copy(update={"sections": sections, "samples": samples})


def _called(columns: dict[str, tuple[Any, ...]], names: Mapping[str, str]) -> dict[str, Any]:
    ids = tuple(names.get(str(name), name) for name in columns.get("ids", ()))
    return columns | ({"ids": ids} if ids else {})
