"""Shards of a run: what each process has measured, and one report of all of them.

A shard is a run that is interrupted on purpose. Its parts lie in the folder of `--parts`, beside a
file that describes the run. So a merge is a resumed run with nothing left to measure, and needs
neither the model nor the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, field_validator

from lipaudit import __version__
from lipaudit.engine.files import name_folder, read_parts, write
from lipaudit.engine.results import (
    describe_run,
    identify,
    in_order,
    list_origins,
    make_failed,
    make_report,
    summarise,
)
from lipaudit.errors import InputError, UsageError
from lipaudit.measures import load_measures
from lipaudit.measures.base import MeasureOptions, Part, sample_ids, select_complete
from lipaudit.schema import to_json_values
from lipaudit.tables import Notes, Report, Run
from lipaudit.tables.columns import Cell, Frozen
from lipaudit.tables.report import Failure, require_aligned

if TYPE_CHECKING:
    from lipaudit.engine.prepare import Job

# Fields in which shards of one run may differ (devices must be of one kind).
MAY_DIFFER = {"command", "created", "device", "device_map"}
# Names of the files that describe shards.
FILES = "shard-*-of-*.json"
# Number of missing samples that an error names.
NAMED = 3
# How to get parts that can be merged.
ADVICE = "Measure with --shard i/n --parts FOLDER, then: lipaudit merge FOLDER."


class MeasurePlan(Frozen):
    """What a run measures by one measure.

    Attributes:
        samples: number of samples, from the first.
        options: all options that can be typed, and the settings of the section.
        folder: name of the folder of the parts.
    """

    samples: int = Field(ge=1)
    options: dict[str, Any]
    folder: str = Field(pattern="^[0-9a-f]+$")


class Shard(Frozen):
    """One process of a run: which batches it measures, and how far it came.

    Attributes:
        number: its number, from 1.
        of: number of shards.
        batch_size: the requested batch size: with another one, shards overlap.
        run: the origin of the numbers.
        ids: ids of all samples of the run, in order.
        places: places of the samples in the data, as in a report.
        measures: what all shards measure, by measure.
        notes: notes on loading, which precede the notes of a measure.
        is_finished: whether the process came to its end.
        left_out: optional measures that turned out to be impossible.
        failures: the measures that failed, with the reasons.
        remainder: ids of the samples that a time limit left out, by measure.
    """

    number: int = Field(ge=1)
    of: int = Field(ge=1)
    batch_size: int | None
    run: Run
    ids: tuple[str, ...]
    places: dict[str, tuple[Cell, ...]]
    measures: dict[str, MeasurePlan]
    notes: Notes = ()
    is_finished: bool = False
    left_out: tuple[str, ...] = ()
    failures: dict[str, Failure] = {}
    remainder: dict[str, tuple[str, ...]] = {}

    _check_lengths = field_validator("places")(require_aligned)

    @property
    def name(self) -> str:
        """Return the shard as it is typed: `2/4`."""
        return f"{self.number}/{self.of}"

    @property
    def file(self) -> str:
        """Return the name of the file that describes the shard."""
        return f"shard-{self.number}-of-{self.of}.json"

    @property
    def is_complete(self) -> bool:
        """Say whether no measure failed and no sample was left out."""
        return not self.failures and not self.remainder

    @property
    def unmeasured(self) -> dict[str, int]:
        """Return the numbers of samples that a time limit left out, by measure."""
        return {name: len(ids) for name, ids in self.remainder.items()}


def describe_shard(job: Job) -> Shard:
    """Describe the shard of a job before the measurement; a whole run is shard 1 of 1.

    `merge` compares these facts to accept only shards of the same run.
    """
    number, of = job.request.run.shard or (1, 1)
    measures = {}
    for name, options in job.request.measures.items():
        # Options that a report does not save, such as files to write, are also needed to merge.
        saved = options.model_dump()
        measures[name] = MeasurePlan(
            samples=job.counts[name],
            options=to_json_values(saved | options.list_unsaved()),
            folder=name_folder(identify(job, name, options)),
        )
    return Shard(
        number=number,
        of=of,
        batch_size=job.request.run.batch_size,
        run=describe_run(job),
        ids=job.samples.batch.ids,
        places=list_origins(job.samples),
        measures=measures,
        notes=job.notes,
    )


def save_shard(shard: Shard, folder: Path) -> None:
    """Write the description of a shard into the folder of its parts.

    Raises:
        UsageError: the folder has parts of another run.
        EvaluationError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # One shard in the folder is enough: the others were compared with it.
    for path in islice(folder.glob(FILES), 1):
        differing = _list_differences(shard, _read_shard(path))
        if differing:
            raise UsageError(
                f"{folder} has parts of another run, which differs in {', '.join(differing)}",
                "Give each run its own --parts FOLDER.",
            )
    write(folder / shard.file, shard.model_dump_json().encode())


def merge(*folders: Path | str, command: str = "lipaudit.merge()") -> Report:
    """Make the report of a run from the parts of its shards, for `lipaudit merge`.

    A shard is a share of the samples, and a part is a stored result on some of them.

    The report equals the report of a single process, to the last digit if the shards ran on a CPU;
    times are sums. A measure that failed in a shard counts as failed if samples are missing. Files
    of options such as `--save-adv` are written, too.

    Args:
        folders: folders of `--parts`: one that all shards share, or one of each.
        command: the command that the report records.

    Raises:
        InputError: samples are missing, the shards are of several runs, or a file is damaged.
    """
    paths = [Path(folder) for folder in folders]
    shards = _read_shards(paths)
    _require_one_run(shards)
    first = shards[0]  # all shards have the same run, measures and sample ids
    if first.run.lipaudit != __version__:
        raise InputError(
            f"the parts were written by lipaudit {first.run.lipaudit}, and this is {__version__}",
            "Merge them with the version that wrote them.",
        )
    parts = {}
    for name, plan in first.measures.items():
        _require_files_here(_read_options(name, plan))
        by_first_sample: dict[str, Part] = {}  # parts by the id of their first sample
        for path in paths:
            missing = _list_missing(first.ids[: plan.samples], [*by_first_sample.values()])
            for part in read_parts(path / plan.folder, missing).values():
                by_first_sample[part.ids[0]] = part  # replaces an incomplete part
        parts[name] = [*by_first_sample.values()]
    _require_whole(shards, parts)
    return join_shards(shards, parts, command)


def join_shards(
    shards: Sequence[Shard], parts: Mapping[str, Sequence[Part]], command: str
) -> Report:
    """Make the report of a run from all of its shards and the parts of each measure.

    Args:
        shards: the shards, in any order.
        parts: the parts (results on some samples) by measure; each sample is in one at most.
        command: the command that the report records.

    Raises:
        InputError: the shards are of several runs.
    """
    _require_one_run(shards)
    first = shards[0]
    left_out = {name for shard in shards for name in shard.left_out}
    notes = tuple(dict.fromkeys(note for shard in shards for note in shard.notes))
    sections = []
    for name, plan in first.measures.items():
        if name in left_out:  # an optional measure that the model does not allow
            continue
        options = _read_options(name, plan)
        ids = first.ids[: plan.samples]
        missing = _list_missing(ids, parts[name])
        failures = [shard.failures[name] for shard in shards if name in shard.failures]
        # If all samples have results in spite of a failure, the measure has figures.
        if missing and failures:
            sections.append(make_failed(name, options, failures[0], notes))
        else:
            sections += summarise(name, in_order(parts[name], ids), options, notes, len(missing))
    return make_report(_join_runs(shards, command), sections, first.places)


def _join_runs(shards: Sequence[Shard], command: str) -> Run:
    """Return the run of the first shard with a new command, the time now and all devices."""
    return shards[0].run.model_copy(
        update={
            "command": command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": ", ".join(dict.fromkeys(shard.run.device for shard in shards)),
        }
    )


def _read_shards(folders: Sequence[Path]) -> list[Shard]:
    """Read the descriptions of all shards in some folders.

    Raises:
        InputError: there is no folder, a folder has no shard, or a file is damaged.
    """
    shards: list[Shard] = []
    for path in folders:
        if not path.is_dir():
            raise InputError(f"{path} is no folder of parts", ADVICE)
        in_folder = [_read_shard(file) for file in path.glob(FILES)]
        if not in_folder:
            raise InputError(f"{path} has no parts of a run", ADVICE)
        shards += sorted(in_folder, key=lambda shard: (shard.of, shard.number))
    if not shards:
        raise InputError("no folder of parts is given", ADVICE)
    return shards


def _read_shard(path: Path) -> Shard:
    """Read the description of a shard.

    Raises:
        InputError: the file is damaged.
    """
    try:
        return Shard.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = getattr(error, "strerror", None) or "it does not describe a shard"
        raise InputError(
            f"cannot read {path}: {reason}",
            "Copy the file again, or delete it and measure the shard again.",
        ) from None


def _read_options(name: str, plan: MeasurePlan) -> MeasureOptions:
    """Return the options with which a measure ran.

    Raises:
        InputError: the measure is not installed, or refuses the options.
    """
    if name not in load_measures():
        raise InputError(f"there is no measure {name!r}", "Install the plug-in that brings it.")
    try:
        return load_measures()[name].options.parse(plan.options)
    except UsageError as error:
        raise InputError(f"the options of {name} are damaged: {error.message}") from None


def _require_files_here(options: MeasureOptions) -> None:
    """Refuse output files outside of the working directory.

    The parts may come from a stranger, and must not overwrite arbitrary files.

    Args:
        options: options that were read from the folder of parts; some name files to write.

    Raises:
        InputError: an option names a file that is elsewhere.
    """
    for path in options.files:
        if not path.resolve().is_relative_to(Path.cwd()):
            raise InputError(
                f"the run writes {path}, which is not below the working directory",
                "Merge in a folder above that file, or run the command without --shard.",
            )


def _list_missing(ids: Sequence[str], parts: Sequence[Part]) -> list[str]:
    """Return the samples that are in no complete part."""
    measured = {*sample_ids(select_complete(parts))}
    return [name for name in ids if name not in measured]


def _require_one_run(shards: Sequence[Shard]) -> None:
    """Refuse shards that are not from the same run; the error names the differences.

    Raises:
        InputError: two shards differ.
    """
    first, *others = shards
    for other in others:
        differing = _list_differences(first, other)
        if differing:
            raise InputError(
                f"shards {first.name} and {other.name} are not from the same run: they differ in "
                f"{', '.join(differing)}",
                "Measure both with the same command and software; only --shard may differ.",
            )


def _list_differences(one: Shard, other: Shard) -> list[str]:
    """Return the names of the conditions (see `_list_conditions`) in which two shards differ."""
    of_one = _list_conditions(one)
    of_other = _list_conditions(other)
    return [name for name in of_one | of_other if of_one.get(name) != of_other.get(name)]


def _list_conditions(shard: Shard) -> dict[str, Any]:
    """Return everything that determines the numbers, by name: options, versions, samples, ..."""
    run = shard.run.model_dump(mode="json", exclude=MAY_DIFFER)
    # Only the kind of device counts: shards may run on different GPUs, but not on CPU and GPU.
    run["device"] = shard.run.device.split(" ")[0]
    run["batch_size"] = shard.batch_size
    run["samples"] = shard.ids
    return run | shard.measures


def _require_whole(shards: Sequence[Shard], parts: Mapping[str, Sequence[Part]]) -> None:
    """Refuse to merge while samples are missing for which no shard gives a reason.

    Reasons are the time limit, a failure, or a measure that the model does not allow.

    Args:
        shards: the shards.
        parts: their results by measure.

    Raises:
        InputError: samples are missing; the advice has the command that measures them.
    """
    first = shards[0]
    unfinished = _list_unfinished(shards)
    for name, plan in first.measures.items():
        explained = set[str]()  # samples that a shard left out for a reason
        for shard in shards:
            explained |= {*shard.remainder.get(name, ())}
            if name in shard.failures or name in shard.left_out:
                explained.update(shard.ids)
        ids = first.ids[: plan.samples]
        missing = _list_missing(ids, parts[name])
        lost = [sample for sample in missing if sample not in explained]
        if not lost:
            continue
        examples = ", ".join(lost[:NAMED])
        text = f"{len(lost)} of {len(ids)} samples of {name} are missing, such as {examples}"
        if unfinished:
            text += f"; shards not finished: {', '.join(unfinished)}"
        raise InputError(text, _advise_missing(first.run.command, unfinished))


def _list_unfinished(shards: Sequence[Shard]) -> list[str]:
    """Return the names, such as `2/4`, of the shards that have not begun or not finished."""
    finished = {shard.name for shard in shards if shard.is_finished}
    count = shards[0].of
    names = [f"{number}/{count}" for number in range(1, count + 1)]
    return [name for name in names if name not in finished]


def _advise_missing(command: str, unfinished: Sequence[str]) -> str:
    """Return how to measure missing samples: the first unfinished shard, or all that are left.

    Args:
        command: a command that measured a shard; or a call from Python, without --shard.
        unfinished: the shards that have not finished.
    """
    which = "all samples"
    shard_option = ""
    if unfinished:
        which = f"shard {unfinished[0]}"
        shard_option = f" --shard {unfinished[0]}"
    # The command for the missing shard, or without --shard; a call from Python has no --shard.
    changed, count = re.subn(r" --shard[ =]\S+", shard_option, command)
    if count:
        return f"Measure them: {changed}"
    return f"Measure {which} with the same options and the same parts."
