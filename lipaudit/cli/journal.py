"""The parts of a run on disk, one by one: what a killed run had finished is kept."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lipaudit.cli.emit import write
from lipaudit.errors import EvaluationError
from lipaudit.measures.base import Part

KEPT_DAYS = 30
"""An interrupted run that nobody went on with is forgotten after so long."""

_PLAIN = {
    ("lipaudit.measures.base", "Part"),
    ("lipaudit.measures.layers", "HeadName"),
    ("lipaudit.attacks.sanity", "Checks"),
    ("lipaudit.results.report", "Note"),
}
_ARRAYS = {"_frombuffer", "_reconstruct", "ndarray", "dtype", "scalar"}


class Journal:
    """The finished parts of one measure on one list of samples.

    Args:
        facts: everything that decides the numbers; another run with the same facts finds them.
        root: where journals are kept; the user's cache directory when None.
    """

    def __init__(self, facts: Mapping[str, Any], root: Path | None = None) -> None:
        text = json.dumps(facts, sort_keys=True, default=str)
        self.folder = (root or _cache()) / hashlib.sha256(text.encode()).hexdigest()[:32]

    def parts(self) -> list[Part]:
        """Return what an earlier run finished, in order, up to a damaged file."""
        found: list[Part] = []
        with suppress(OSError, EOFError, ValueError, AttributeError, pickle.UnpicklingError):
            found.extend(_read(path) for path in sorted(self.folder.glob("*.part")))
        return found

    def recorded(self, parts: Iterable[Part], *, after: int = 0) -> Iterator[Part]:
        """Yield the parts, each once it is kept behind the first `after`."""
        for number, part in enumerate(parts, after):
            with suppress(
                OSError, EvaluationError
            ):  # without a cache the run goes on all the same
                if number == 0:
                    self.clear()
                    _forget_old(self.folder.parent)
                self.folder.mkdir(parents=True, exist_ok=True)
                write(self.folder / f"{number:06}.part", pickle.dumps(part, protocol=5))
            yield part

    def clear(self) -> None:
        """Forget the parts."""
        shutil.rmtree(self.folder, ignore_errors=True)


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
    for folder in root.glob("*"):
        if time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400:
            shutil.rmtree(folder, ignore_errors=True)
