"""The history of a training on disk: a line per point, each kept before the next begins."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lipaudit import __version__, schema
from lipaudit.engine.files import require_folder, write
from lipaudit.engine.prepare import Request
from lipaudit.errors import EvaluationError, UsageError
from lipaudit.report import of_history, render
from lipaudit.results import Report
from lipaudit.results.history import History, Point, measured

FILE, PAGE, REPORTS = "history.jsonl", "history.html", "reports"
ANOTHER = "Measure as before, or name another folder."
DECIDE = ("data", "measures", "options")
"""What two measurements must share to be points of one history."""


def now() -> str:
    """Return the time as reports write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def opening(request: Request, model: str, data: str) -> History:
    """Return the history of a request, without points.

    Args:
        request: what is measured at every step.
        model: what is watched.
        data: where its samples come from.
    """
    run = request.run
    decided = {"seed": run.seed, "dtype": run.dtype, "samples": run.samples}
    return History(
        lipaudit=__version__,
        created=now(),
        model=model,
        data=data,
        measures={
            name: options.model_dump(mode="json", exclude={"seed"})
            for name, options in request.measures.items()
        },
        options=decided | run.reading(),
    )


class Diary:
    """A history that points are added to; its file is made with the first of them.

    Args:
        folder: where it is kept.
        opening: what all points share.

    Raises:
        UsageError: the folder holds a history that was measured in another way.
        InputError: what it holds is damaged.
        EvaluationError: it cannot be written.
    """

    def __init__(self, folder: Path, opening: History) -> None:
        require_folder(folder)
        self.folder, self.history = folder, opening
        self.path, self.page = folder / FILE, folder / PAGE
        if self.path.exists():
            self.history = schema.load_history(self.path)
            _require_same(self.history, opening, folder)

    def require_suite(self, suite: str) -> None:
        """Refuse samples that are not those of the points so far.

        Raises:
            UsageError: they are others.
        """
        before = {point.suite for point in self.history.points if point.suite}
        if before - {suite}:
            other = f"suite {before.pop()}, not {suite}"
            raise UsageError(f"{self.folder} holds a history of other samples: {other}", ANOTHER)

    def add(self, point: Point) -> None:
        """Add a point behind the others."""
        try:
            if not self.path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                opening = self.history.model_dump_json(by_alias=True, exclude={"points"})
                write(self.path, _line(opening))
            self._drop_unfinished()
            with self.path.open("ab") as file:
                file.write(_line(point.model_dump_json(exclude_defaults=True)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EvaluationError(f"cannot write {self.path}: {error.strerror}") from None
        self.history = self.history.with_points([point])

    def keep(self, report: Report, **known: Any) -> Point:
        """Add the point of a report, and keep the report beside.

        Args:
            report: what was measured.
            known: what it does not say of itself: the step, at least.
        """
        name = f"{REPORTS}/step-{known['step']}.json"
        (self.folder / REPORTS).mkdir(parents=True, exist_ok=True)
        write(self.folder / name, schema.dumps(report).encode())
        point = measured(report, report=name, **known)
        self.add(point)
        return point

    def draw(self) -> None:
        """Draw the page of the history, beside it."""
        write(self.page, render(of_history(self.history), "html"))

    def _drop_unfinished(self) -> None:
        """Cut a line off that was not finished: another would be joined to it."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)


def _line(text: str) -> bytes:
    return text.encode() + b"\n"


def _require_same(before: History, wanted: History, folder: Path) -> None:
    for name in DECIDE:
        old, new = getattr(before, name), getattr(wanted, name)
        if old != new:
            raise UsageError(
                f"{folder} holds a history of other {name}: {_difference(old, new)}",
                ANOTHER,
            )


def _difference(old: Any, new: Any) -> str:
    """Name the first thing in which two values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
        return f"{key} {_difference(old.get(key), new.get(key))}"
    return f"{_said(old)}, not {_said(new)}"


def _said(value: Any) -> str:
    """Say a setting; of a measure that has several only that it is measured."""
    return "unset" if value is None else "measured" if isinstance(value, dict) else str(value)
