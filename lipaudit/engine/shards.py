"""Shards of a run, and the merged report, which equals the report of a single process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lipaudit.engine.journal import pack_parts, unpack_parts
from lipaudit.engine.prepare import Job
from lipaudit.engine.provenance import make_report
from lipaudit.errors import InputError
from lipaudit.measures import MeasureOptions, Part, layouts, load_measures, option_types
from lipaudit.measures.measure import in_order, sample_ids
from lipaudit.tables import Note, Report, Section
from lipaudit.tables.report import Shard
from lipaudit.tables.summary import steepest

OWN = frozenset({"command", "created", "device", "device_map"})
"""Fields in which shards of one run may differ (devices must be of one kind)."""


def make_shard(job: Job, measured: Mapping[str, Sequence[Part]]) -> Shard:
    """Return the data of a shard for `merge`, if a job measures some of the samples."""
    number, of = job.request.run.shard or (1, 1)
    return Shard(
        number=number,
        of=of,
        ids=job.samples.batch.ids,
        counts=dict(job.counts),
        notes=job.notes,
        options={name: o.unkept() for name, o in job.request.measures.items()},
        parts={name: pack_parts(parts) for name, parts in measured.items()},
    )


def summarise(
    name: str,
    parts: Sequence[Part],
    options: MeasureOptions,
    notes: tuple[Note, ...],
    unmeasured: int,
) -> list[Section]:
    """Return the sections of a measure.

    Args:
        name: name of the measure.
        parts: its parts, in the order of the samples.
        options: its options.
        notes: notes on loading, which come first.
        unmeasured: number of samples that a time limit left out.
    """
    if not parts:
        settings = options.model_dump()
        return [layouts()[name].section(settings=settings, notes=notes, unmeasured=unmeasured)]
    first, *others = load_measures()[name].summarise(parts, options)
    changes = {"notes": notes + first.notes, "unmeasured": unmeasured}
    return [first.model_copy(update=changes), *others]


def merge(reports: Sequence[Report], *, command: str = "lipaudit.merge()") -> Report:
    """Merge the reports of all shards of a run into one, for `lipaudit merge`.

    The result equals the report of a single process, to the last digit if the shards ran on a CPU;
    times are sums. A measure that failed in one shard has failed.

    Args:
        reports: reports of the shards, in any order.
        command: the command that the report records.

    Raises:
        InputError: the shards do not belong together, or one is missing, repeated or damaged.
    """
    whole = sorted(reports, key=lambda report: _require_shard(report).number)
    _require_complete([_require_shard(report) for report in whole])
    first, *others = whole
    conditions = dict(_list_conditions(first))
    for other in others:
        pairs = conditions, dict(_list_conditions(other))
        changes = []
        for name in dict.fromkeys([*pairs[0], *pairs[1]]):
            one, two = (str(pair.get(name, "not given")) for pair in pairs)
            if pairs[0].get(name) != pairs[1].get(name) or one != two:
                shown = (each if len(each) <= 20 else f"{each[:16]}..." for each in (one, two))
                changes.append(f"{name} {' and '.join(shown)}")
        if changes:
            numbers = " and ".join(f"{_require_shard(each).number}" for each in (first, other))
            raise InputError(
                f"shards {numbers} are not from the same run: {'; '.join(changes)}",
                "Measure both with the same command and software; only --shard may differ.",
            )
    devices = ", ".join(dict.fromkeys(report.run.device for report in whole))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    own = {"command": command, "created": created, "device": devices}
    sections: list[Section] = []
    for name in _list_measures(first):
        sections += _merge_sections(name, whole, sections)
    return make_report(first.run.model_copy(update=own), sections, first.samples)


def _require_shard(report: Report) -> Shard:
    if report.shard is None:
        raise InputError(
            f"the report of {report.run.model.spec} written by {report.run.command!r} is not a "
            "shard",
            "Give reports of commands with --shard.",
        )
    return report.shard


def _require_complete(shards: Sequence[Shard]) -> None:
    """Refuse a missing or repeated shard.

    Raises:
        InputError: the message gives its number.
    """
    if not shards:
        raise InputError("no reports were given to merge", "Give the reports of all shards.")
    sizes = sorted({shard.of for shard in shards})
    if len(sizes) > 1:
        raise InputError(
            f"these shards come from runs of {' and of '.join(map(str, sizes))} shards",
            "Merge the shards of one run only.",
        )
    count = Counter(shard.number for shard in shards)
    if twice := ", ".join(f"{n}" for n in sorted(count) if count[n] > 1):
        raise InputError(f"shard {twice} of {sizes[0]} was given twice", "Name each shard once.")
    if missing := [n for n in range(1, sizes[0] + 1) if not count[n]]:
        raise InputError(
            f"shard {', '.join(map(str, missing))} of {sizes[0]} is missing",
            f"Measure it: run the same command with --shard {missing[0]}/{sizes[0]}.",
        )


def _list_conditions(report: Report) -> Iterator[tuple[str, Any]]:
    """Yield everything that determines the numbers, by name."""
    shard, run = _require_shard(report), report.run.model_dump(mode="json")
    # GPUs of one kind may differ by name; a CPU and a GPU may not be mixed.
    yield "device", report.run.device.split(" ")[0]
    yield from _flatten({name: value for name, value in run.items() if name not in OWN})
    yield "samples", shard.ids
    yield from ((f"samples of {name}", count) for name, count in shard.counts.items())
    for name in _list_measures(report):
        yield from ((f"{name} {key}", value) for key, value in _list_settings(report, name))


def _list_settings(report: Report, measure: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a measure as JSON: settings of its section, and others."""
    section = report.section(measure)
    settings = {} if section is None else section.settings
    both = settings | _require_shard(report).options.get(measure, {})
    yield from json.loads(json.dumps(both, default=str)).items()


def _list_measures(report: Report) -> list[str]:
    return [section.measure for section in report.sections if "." not in section.measure]


def _flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{above}{name} ")
        else:
            yield f"{above}{name}", value


def _merge_sections(
    measure: str, reports: Sequence[Report], before: Sequence[Section]
) -> list[Section]:
    """Return the sections of a measure over all samples, or its first failure."""
    failed = [s for r in reports if (s := r.section(measure)) is not None and s.failure]
    if failed:
        return failed[:1]
    first = _require_shard(reports[0])
    notes, ids = [*first.notes], first.ids[: first.counts[measure]]
    left = sum(report.unmeasured.get(measure, 0) for report in reports)
    parts = _collect_parts(measure, reports, ids, left)
    options = option_types()[measure].checked(dict(_list_settings(reports[0], measure)))
    # Shards store maps of several heads: the map of the head with the largest norm is drawn.
    maps = parts[0].facts.get("maps") if parts else None
    heads = steepest(before, 1) if maps else ()
    if maps and heads and heads[0] in maps:
        options = options.draw_steepest(heads, some=False)
    elif heads:
        text = (
            f"no shard has the attention map of head {heads[0]}: draw it with lipaudit attention "
            f"MODEL --map {heads[0]}"
        )
        notes.append(Note(level="info", code="no-map", text=text))
    if left:
        text = f"the time limit ended {measure} after {len(ids) - left} of {len(ids)} samples"
        notes.append(Note(level="warning", code="cut-short", text=text))
    return summarise(measure, parts, options, tuple(notes), left)


def _collect_parts(
    measure: str, reports: Sequence[Report], ids: Sequence[str], left: int
) -> list[Part]:
    """Return the parts of all shards in the order of the samples; some samples may be missing.

    Raises:
        InputError: parts are damaged, or batched differently.
    """
    parts: list[Part] = []
    for report in reports:
        shard = _require_shard(report)
        try:
            parts += unpack_parts(shard.parts[measure])
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{measure} of shard {shard.number} of {shard.of} cannot be read: {error}",
                "Copy the file again, or measure the shard again.",
            ) from error
    names = sample_ids(parts)
    # With another batch size a shard has other batches: samples are then repeated or missing.
    doubled = len({*names}) < len(names)
    if doubled or not {*names} <= {*ids} or len(names) + left != len(ids):
        raise InputError(
            f"the shards of {measure} do not contain each sample exactly once: their batch "
            "sizes differ",
            "Measure all of them with the same --batch-size.",
        )
    return in_order(parts, ids)
