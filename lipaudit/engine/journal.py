"""The parts of a run on disk, one by one: what a killed run had finished is kept."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from lipaudit.engine.files import write
from lipaudit.errors import EvaluationError
from lipaudit.measures.measure import Part, sample_ids

try:
    import fcntl
except ImportError:  # Windows: two equal runs at once would share a journal there
    fcntl = None  # type: ignore[assignment]

KEPT_DAYS = 30
"""An interrupted run that nobody went on with is forgotten after so long."""

_PLAIN = {
    ("lipaudit.measures.measure", "Part"),
    ("lipaudit.measures.by_layer", "HeadName"),
    ("lipaudit.attacks.sanity", "Checks"),
    ("lipaudit.results.report", "Note"),
}
_ARRAYS = {"_frombuffer", "_reconstruct", "ndarray", "dtype", "scalar"}


class Journal:
    """The finished parts of one measure on one list of samples, for one run at a time.

    To be entered: where another run holds the same journal, or there is no cache directory, this
    one is empty and keeps nothing.

    Args:
        facts: everything that decides the numbers; another run with the same facts finds them.
        root: where journals are kept; the user's cache directory when None.
    """

    def __init__(self, facts: Mapping[str, Any], root: Path | None = None) -> None:
        text = json.dumps(facts, sort_keys=True, default=str)
        self.folder = (root or _cache()) / hashlib.sha256(text.encode()).hexdigest()[:32]
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        self._lock = _locked(self.folder.with_suffix(".lock"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def paths(self) -> list[Path]:
        """Return the files of the parts, in order."""
        return [] if self._lock is None else sorted(self.folder.glob("*.part"))

    def parts(self, ids: Sequence[str]) -> list[Part]:
        """Return what an earlier run finished of these samples, up to a file that does not fit."""
        finished: list[Part] = []
        with suppress(OSError, EOFError, ValueError, AttributeError, pickle.UnpicklingError):
            for path in self.paths():
                part, done = _read(path), len(sample_ids(finished))
                if part.ids != tuple(ids[done : done + len(part.ids)]):
                    break
                finished.append(part)
        return finished

    def recorded(self, parts: Iterable[Part], *, after: int = 0) -> Iterator[Part]:
        """Yield the parts, each once it is kept behind the first `after`."""
        for number, part in enumerate(parts, after):
            if self._lock is not None:
                with suppress(OSError, EvaluationError):  # a full disk does not end the run
                    self._keep(number, part)
            yield part

    def _keep(self, number: int, part: Part) -> None:
        if number == 0:
            self.clear()
            _forget_old(self.folder.parent)
        self.folder.mkdir(exist_ok=True)
        write(self.folder / f"{number:06}.part", pickle.dumps(part, protocol=5))

    def clear(self) -> None:
        """Forget the parts."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _locked(path: Path) -> IO[str] | None:
    """Open a file that no other process holds; the system lets go of it when this one ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def _read(path: Path) -> Part:
    part = _Plain(io.BytesIO(path.read_bytes())).load()
    if not isinstance(part, Part):
        raise pickle.UnpicklingError(f"{path} holds no part")
    return part


class _Plain(pickle.Unpickler):
    """Reads parts and nothing else: a file in a cache must not be able to run code."""

    def find_class(self, module: str, name: str) -> Any:
        arrays = module.partition(".")[0] == "numpy" and name in _ARRAYS
        if arrays or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a journal")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "lipaudit" / "journal"


def _forget_old(root: Path) -> None:
    for path in root.glob("*"):
        if time.time() - path.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
