"""The checkpoints of a folder, measured one by one in the order of their steps."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from lipaudit import schema
from lipaudit.data.loading import Samples
from lipaudit.engine.execute import Observer, execute
from lipaudit.engine.files import require_folder, write
from lipaudit.engine.prepare import Request, prepare
from lipaudit.models.sources.weights import BESIDE, SUFFIXES, list_weight_files
from lipaudit.report import of_reports, render
from lipaudit.tables import Report

CONFIG = "config.json"
STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt)s?[-_=]?(\d+)")
EPOCH = re.compile(r"epochs?[-_=]?(\d+)")
# Pattern of the step at the end of a name; it does not match decimals such as an accuracy
# (0.91).
LAST = re.compile(r"(?<![\d.])(\d+)(?:-v\d+)?$")
SHARD = re.compile(r"-\d+-of-\d+$")
PAGE = "report.html"
# Options of a run that do not change results.
FREE = {"resume", "device", "batch_size", "offline", "time_limit"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose name has a step.

    Attributes:
        name: name of its file or directory.
        model: what to load: the directory, or a file of weights.
        step: step of the training, or the epoch if the name has no step.
        changed: time of the last change, in nanoseconds.
    """

    name: str
    model: Path
    step: int
    changed: int


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder in the order of their steps.

    If several have the same step, the newest counts.
    """
    known: list[Checkpoint] = []
    for path in folder.iterdir():
        step = read_step(path.name)
        if step is None or path.name.startswith("."):
            continue
        files, model = [path], path
        if path.is_dir():
            names = [each.name for each in path.iterdir()]
            weights = list_weight_files(names)
            if not weights:
                continue  # no weights yet
            files = [path / name for name in (*weights, CONFIG) if name in names]
            model = path if CONFIG in names else files[0]
        elif path.suffix not in SUFFIXES:
            continue
        changed = max(each.stat().st_mtime_ns for each in files)
        known.append(Checkpoint(path.name, model, step, changed))
    # Of several with one step the newest comes last, and stays in the dictionary.
    known.sort(key=lambda each: (each.step, each.changed))
    return list({each.step: each for each in known}.values())


def read_step(name: str) -> int | None:
    """Read the step, else the epoch, from the name of a checkpoint; None without either.

    >>> read_step("checkpoint-100"), read_step("epoch=3-step=600.ckpt"), read_step("epoch_3.pt")
    (100, 600, 3)
    >>> read_step("model_0200.safetensors"), read_step("best.ckpt"), read_step("acc=0.91.pt")
    (200, None, None)
    """
    stem = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name).lower()
    if SHARD.search(stem) or BESIDE.match(stem):
        return None
    number = STEP.search(stem) or EPOCH.search(stem) or LAST.search(stem)
    return int(number[1]) if number else None


class StepReports:
    """The reports of the steps of one training, in a folder.

    Args:
        folder: folder of the reports; created with the first one.
        suffix: suffix of their names, if the folder holds other reports as well.

    Raises:
        UsageError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, suffix: str = "") -> None:
        require_folder(folder)
        self.folder, self.suffix = folder, suffix

    def path(self, step: int) -> Path:
        """Return the path of a step's report."""
        return self.folder / f"step-{step:07}{self.suffix}.json"

    def write(self, step: int, report: Report) -> None:
        """Write the report of a step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.path(step), schema.dumps(report).encode())

    def load(self, last: int | None = None) -> list[Report]:
        """Return the reports in the order of their steps, up to the last requested step.

        Raises:
            InputError: a report is damaged.
        """
        named = re.compile(rf"step-(\d+){self.suffix}\.json")
        names = [path.name for path in self.folder.glob("step-*.json")]
        steps = sorted(int(match[1]) for name in names if (match := named.fullmatch(name)))
        return [schema.load(self.path(step)) for step in steps if last is None or step <= last]

    def draw(self, reports: list[Report]) -> Path:
        """Write a page with the reports side by side; return its path."""
        page = self.folder / PAGE
        write(page, render(of_reports(*reports, by="order"), "html"))
        return page


class CheckpointFolder:
    """The checkpoints of a folder, and the reports of the measured ones.

    The names of reports depend on the options: with other options every checkpoint is measured
    again.

    Args:
        folder: folder of the checkpoints.
        request: the request for each checkpoint; its model is filled in.
        to: folder of the reports.
    """

    def __init__(self, folder: Path, request: Request, to: Path) -> None:
        self.folder, self.request = folder, request
        measures = {name: options.model_dump() for name, options in request.measures.items()}
        asked = repr((request.run.model_dump(exclude=FREE), measures, dict(request.counts)))
        self.reports = StepReports(to, f"-{hashlib.sha256(asked.encode()).hexdigest()[:8]}")
        self.samples: Samples | None = None

    def list_pending(self) -> list[Checkpoint]:
        """Return the checkpoints that are new or changed, in order."""
        paths = {each: self.reports.path(each.step) for each in checkpoints(self.folder)}
        times = {each: path.stat().st_mtime_ns for each, path in paths.items() if path.exists()}
        return [each for each in paths if times.get(each, 0) <= each.changed]

    def measure(self, checkpoint: Checkpoint, observer: Observer) -> None:
        """Measure a checkpoint on the samples of the others, and write its report.

        Raises:
            LipauditError: it could not be measured.
        """
        job = prepare(replace(self.request, model=str(checkpoint.model)), samples=self.samples)
        self.samples = job.samples
        self.reports.write(checkpoint.step, execute(job, observer))
