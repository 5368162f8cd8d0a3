"""The checkpoints of a directory, in the order of their steps, measured one by one."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lipaudit.data.loading import Samples
from lipaudit.engine.execute import execute
from lipaudit.engine.observer import Observer
from lipaudit.engine.prepare import Request, prepare
from lipaudit.errors import UsageError, as_user_meets, bug
from lipaudit.models.sources.weights import OF_TRAINING, SUFFIXES, weight_files
from lipaudit.monitor.diary import Diary, now
from lipaudit.results.history import Point

CONFIGS = ("config.json", "adapter_config.json")
STEP = re.compile(r"(?:step|iter(?:ation)?|checkpoint|ckpt)s?[-_=]?(\d+)")
EPOCH = re.compile(r"epochs?[-_=]?(\d+)")
LAST = re.compile(r"(?<![\d.])(\d+)(?:-v\d+)?$")
"""A number at the end of a name is its step; not that of an accuracy (0.91)."""
SHARD = re.compile(r"-\d+-of-\d+$")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that says by its name when it was written.

    Attributes:
        name: of its file or directory.
        model: what is loaded: the directory, or a file of weights.
        step: of the training; its epoch where the name has no step.
        epoch: of the training, where that is known.
        state: size and time of change of what is loaded.
    """

    name: str
    model: Path
    step: int
    epoch: float | None
    state: str


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a directory in the order of their steps.

    Of several of one step that is the one which was changed last.
    """
    known = [each for path in folder.iterdir() for each in _checkpoint(path)]
    known.sort(key=lambda each: (each.step, int(each.state.rpartition(":")[2])))
    return list({each.step: each for each in known}.values())


def when(name: str) -> tuple[int, float | None] | None:
    """Read step and epoch from the name of a checkpoint; None where it has neither.

    >>> when("checkpoint-100"), when("epoch=3-step=600.ckpt"), when("epoch_3.pt")
    ((100, None), (600, 3.0), (3, 3.0))
    >>> when("model_0200.safetensors"), when("best.ckpt"), when("acc=0.91.pt")
    ((200, None), None, None)
    """
    stem = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name).lower()
    if SHARD.search(stem) or stem.startswith(OF_TRAINING):
        return None
    passed = EPOCH.search(stem)
    epoch = float(passed[1]) if passed else None
    said = STEP.search(stem) or passed or LAST.search(stem)
    return (int(said[1]), epoch) if said else None


def _checkpoint(path: Path) -> Iterator[Checkpoint]:
    said = when(path.name)
    if said is None or path.name.startswith("."):
        return
    files, model = [path], path
    if path.is_dir():
        names = [each.name for each in path.iterdir()]
        configs = [name for name in CONFIGS if name in names]
        files = [path / name for name in (*configs, *weight_files(names))]
        if len(files) == len(configs):
            return  # no weights yet
        model = path if configs else files[0]
    elif path.suffix not in SUFFIXES:
        return
    stats = [each.stat() for each in files]
    state = f"{sum(s.st_size for s in stats)}:{max(s.st_mtime_ns for s in stats)}"
    step, epoch = said
    yield Checkpoint(path.name, model, step, _epoch(path) or epoch, state)


def _epoch(path: Path) -> float | None:
    """Read the epoch that the Trainer of transformers keeps beside a checkpoint."""
    try:
        return float(json.loads((path / "trainer_state.json").read_text())["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Directory:
    """The checkpoints of a directory and the history of those that were measured.

    Args:
        folder: the directory.
        request: what is measured of each; its model is filled in.
        diary: the history.
        tries: how often one that cannot be read is tried before it counts as failed: it may not
            be written to its end.
    """

    def __init__(self, folder: Path, request: Request, diary: Diary, *, tries: int = 1) -> None:
        self.folder, self.request, self.diary, self.tries = folder, request, diary, tries
        self.samples: Samples | None = None
        self.failed: dict[str, Exception] = {}
        self._tried: Counter[tuple[str, str]] = Counter()

    def pending(self) -> list[Checkpoint]:
        """Return those that are new, changed or not yet given up, in the order of their steps."""
        points = self.diary.history.points
        done = {(point.checkpoint, point.state) for point in points if point.report}
        done |= {key for key, times in self._tried.items() if times >= self.tries}
        return [c for c in checkpoints(self.folder) if (c.name, c.state) not in done]

    def measure(self, checkpoint: Checkpoint, observer: Observer) -> Point | None:
        """Measure a checkpoint; None where it could not be, and may not be given up.

        Raises:
            UsageError: the command makes no sense, whatever the checkpoint.
        """
        key, start = (checkpoint.name, checkpoint.state), time.monotonic()
        known = {n: getattr(checkpoint, n) for n in ("step", "epoch", "state")}
        known["checkpoint"] = checkpoint.name
        self._tried[key] += 1
        try:
            request = replace(self.request, model=str(checkpoint.model))
            job = prepare(request, samples=self.samples)
            self.diary.require_suite(job.samples.suite_id)
            self.samples = job.samples
            report = execute(job, observer)
        except UsageError:
            raise
        except Exception as error:
            self.failed[checkpoint.name] = error
            return self._failed(error, known) if self._tried[key] >= self.tries else None
        self.failed.pop(checkpoint.name, None)
        seconds = round(time.monotonic() - start, 3)
        return self.diary.keep(report, seconds=seconds, **known)

    def _failed(self, error: Exception, known: dict[str, Any]) -> Point:
        reason = (as_user_meets(error) or bug(error)).message
        failures = dict.fromkeys(self.request.measures, reason)
        point = Point(time=now(), seconds=0.0, failures=failures, **known)
        self.diary.add(point)
        return point
