"""The samples that two reports share: matched by their ids, or by their places in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from lipaudit.errors import BaselineError
from lipaudit.tables import Report, Section, trials

Record = TypeVar("Record", Report, Section)
ALL_BUT_FEW = 0.95
"""Share of the baseline's samples that the gate needs, so that hard samples cannot be left out."""


def find_shared(
    measure: str, ids: Sequence[str], known: Sequence[str], least: float
) -> tuple[list[int], list[int]]:
    """Return the indices of shared samples in both lists; repeats of a sample count once.

    Args:
        measure: the measure, for messages.
        ids: ids of the samples of the current report.
        known: ids of the samples of the baseline.
        least: share of the baseline's samples that has to be shared.

    Returns:
        The indices in `ids`, and the indices of the same samples in `known`, both in the order of
        `known`.

    Raises:
        BaselineError: no sample is shared, or too few are.
    """
    indices = {name: i for i, name in enumerate(ids)}
    # A repeated sample must count once: otherwise confidence limits would be too narrow. Each
    # repeat has an id of its own. Without the repeats of the baseline, those of the current report
    # have no counterpart.
    distinct = [(i, name) for i, name in enumerate(known) if not trials.is_repeat(name)]
    new = []
    old = []
    for i, name in distinct:
        if name in indices:
            new.append(indices[name])
            old.append(i)
    if not old or len(old) < least * len(distinct):
        text = (
            f"{measure}: only {len(old)} of the baseline's {len(distinct)} samples are in the "
            "current report"
        )
        if least:
            text += f" ({100 * least:g}% are needed)"
        raise BaselineError(text)
    return new, old


def match_samples(
    reports: Sequence[Report], names: Sequence[str]
) -> tuple[list[Report], dict[str, str]]:
    """Give the samples of every report the ids of the first report, if they are the same inputs.

    An id is a hash of a preprocessed sample: with another image size, tokenizer or order of
    classes, the same input has another id. Two inputs are the same if they have the same place in
    the same data; the beginnings of texts must be equal, too.

    Args:
        reports: the reports.
        names: names of the reports.

    Returns:
        The reports with the new ids, and a note for each report that was matched by places, by the
        name of the report.
    """
    matched = [reports[0]]
    notes = {}
    for name, report in zip(names[1:], reports[1:], strict=True):
        ids = _map_ids(report, reports[0])
        if ids:
            notes[name] = (
                f"{name} reads the samples in another form than {names[0]}, so samples are "
                f"paired by their place in {report.run.data.spec}"
            )
            sections = tuple(_rename_ids(section, ids) for section in report.sections)
            report = _rename_ids(report.model_copy(update={"sections": sections}), ids)
        matched.append(report)
    return matched, notes


def _map_ids(report: Report, first: Report) -> dict[str, str]:
    """Return, by id in a report, the id of the same sample in the first report.

    An id is a hash of a preprocessed sample: two models may preprocess one image or text in two
    ways. Then samples are matched by their place in the data (a file, a line of a table). Empty if
    the reports have common ids and need no matching, or if a place may have another sample now.
    """
    places = report.places  # by id
    old_places = first.places
    if places.keys() & old_places.keys():  # common ids
        return {}
    if not _may_differ_in_form(report, first):
        return {}
    old_ids = {place: name for name, place in old_places.items()}  # ids of the first report
    ids = {name: old_ids[place] for name, place in places.items() if place in old_ids}
    # No two samples have the same place, and the larger report has every place of the smaller one.
    complete = len(old_ids) == len(old_places) and len(ids) >= min(len(places), len(old_places))
    texts = report.texts
    old_texts = first.texts
    same_texts = all(texts.get(name) == old_texts.get(old_id) for name, old_id in ids.items())
    return ids if complete and same_texts else {}


def _may_differ_in_form(report: Report, first: Report) -> bool:
    """Return whether two reports may be of the same data, preprocessed in two ways.

    If the ids of the same data differ, either preprocessing differs or the data changed. It may be
    preprocessing if its settings differ, if the samples are texts (tokenizers differ), or if both
    reports are from one audit.
    """
    new = report.run
    old = first.run
    if (new.data.spec, new.data.commit) != (old.data.spec, old.data.commit):
        return False
    # A command lists its models, so two reports with equal commands come from one audit.
    same_command = new.command.replace(" --resume", "") == old.command.replace(" --resume", "")
    return new.preprocess != old.preprocess or bool(report.texts) or same_command


def _rename_ids(record: Record, names: Mapping[str, str]) -> Record:
    """Return a report or a section with other ids in its per-sample columns."""
    samples = dict(record.samples)
    if "ids" in samples:
        samples["ids"] = tuple(names.get(str(name), name) for name in samples["ids"])
    return record.model_copy(update={"samples": samples})
