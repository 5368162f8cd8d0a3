"""The parts of a run on disk, one by one: what a killed run had finished is kept."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pickle
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from lipaudit.engine.files import write
from lipaudit.errors import EvaluationError
from lipaudit.measures.measure import Part

try:
    import fcntl
except ImportError:  # Windows: two equal runs at once would share a journal there
    fcntl = None  # type: ignore[assignment]

KEPT_DAYS, MOST_RUNS, MOST_BYTES = 30, 50, 2 << 30
"""Interrupted runs that nobody went on with are forgotten after so many days; of the others the
latest are kept, so many and so much in all."""

_PLAIN = {
    ("lipaudit.measures.measure", "Part"),
    ("lipaudit.measures.by_layer", "HeadName"),
    ("lipaudit.attacks.sanity", "Checks"),
    ("lipaudit.results.report", "Note"),
}
_DAMAGE = (EOFError, ValueError, AttributeError, pickle.UnpicklingError)
"""What reading a damaged or foreign file raises."""
_ARRAYS = {"_frombuffer", "_reconstruct", "ndarray", "dtype", "scalar"}


class Journal:
    """The finished parts of one measure on one list of samples, for one run at a time.

    To be entered: where another run holds the same journal, or there is no cache directory, this
    one is empty and keeps nothing.

    Args:
        facts: everything that decides the numbers; another run with the same facts finds them.
        root: where journals are kept; the user's cache directory when None.

    Attributes:
        folder: where the parts are.
        keeps: whether they are kept; a process that measures with another, which has the lock,
            may say so without entering.
        refusal: why not, or not all of them; empty where they are.
    """

    def __init__(self, facts: Mapping[str, Any], root: Path | None = None) -> None:
        text = json.dumps(facts, sort_keys=True, default=str)
        self.folder = (root or _cache()) / hashlib.sha256(text.encode()).hexdigest()[:32]
        self.keeps, self.refusal = False, ""
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        path = self.folder.with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
        except OSError as error:
            self.refusal = f"{path.parent}: {error.strerror}"
        else:
            self.refusal = "" if self._lock else "another process measures the same"
        self.keeps = self._lock is not None
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            if not self.folder.exists():
                _unlink(self.folder.with_suffix(".lock"))
            self._lock.close()

    def paths(self) -> list[Path]:
        """Return the files of the parts, in no order."""
        return sorted(self.folder.glob("*.part")) if self.keeps else []

    def parts(self, ids: Sequence[str]) -> list[Part]:
        """Return what an earlier run finished of these samples, in their order.

        A file that does not fit is left out.
        """
        place = {name: i for i, name in enumerate(ids)}
        finished: list[Part] = []
        for path in self.paths():
            with suppress(OSError, *_DAMAGE):
                part, start = _read(path), place.get(path.stem, len(ids))
                if part.ids == tuple(ids[start : start + len(part.ids)]):
                    finished.append(part)
        return sorted(finished, key=lambda part: place[part.ids[0]])

    def recorded(self, parts: Iterable[Part], *, after: int = 0) -> Iterator[Part]:
        """Yield the parts, each once it is kept beside the first `after`.

        A full disk does not end the run: `refusal` says so.
        """
        for number, part in enumerate(parts, after):
            if self.keeps:
                try:
                    self._keep(part, first=number == 0)
                except (OSError, EvaluationError) as error:
                    self.refusal = str(error)
            yield part

    def begin(self) -> None:
        """Forget the parts, and of other runs those that are too many or too old."""
        if self.keeps:
            self.clear()
            with suppress(OSError):  # a full disk, or what another run forgets at the same time
                self.folder.mkdir(exist_ok=True, parents=True)
                _prune(self.folder.parent)

    def _keep(self, part: Part, *, first: bool) -> None:
        if first:
            self.begin()
        self.folder.mkdir(exist_ok=True, parents=True)
        write(self.folder / f"{part.ids[0]}.part", _sealed(pickle.dumps(part, protocol=5)))

    def clear(self) -> None:
        """Forget the parts."""
        if self.keeps:
            shutil.rmtree(self.folder, ignore_errors=True)


def packed(parts: Sequence[Part]) -> str:
    """Write parts as text: what a report of a shard carries."""
    return base64.b64encode(zlib.compress(pickle.dumps(list(parts), protocol=5))).decode()


def unpacked(text: str) -> list[Part]:
    """Read what `packed` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        parts = _Plain(io.BytesIO(zlib.decompress(base64.b64decode(text)))).load()
    except (*_DAMAGE, zlib.error) as error:
        raise ValueError(f"damaged parts ({error})") from error
    if not (isinstance(parts, list) and all(isinstance(part, Part) for part in parts)):
        raise ValueError("no parts")
    return parts


def _locked(path: Path) -> IO[str] | None:
    """Open a file that no other process holds; the system lets go of it when this one ends.

    Raises:
        OSError: it cannot be written.
    """
    file = path.open("a")
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                raise FileNotFoundError(path)  # whoever held it took it away
    except OSError:
        file.close()
        return None
    return file


def _unlink(path: Path) -> None:
    with suppress(OSError):  # Windows: a file that is open stays
        path.unlink()


def _sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def _read(path: Path) -> Part:
    # A disk that fails may change a byte: of a number that would go unseen.
    whole = path.read_bytes()
    content = whole[hashlib.sha256().digest_size :]
    if whole != _sealed(content):
        raise pickle.UnpicklingError(f"{path} is damaged")
    part = _Plain(io.BytesIO(content)).load()
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


def _prune(root: Path) -> None:
    """Forget runs that are old, too many or too large in all, but none that is in use."""
    folders = [path for path in root.iterdir() if path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for rank, folder in enumerate(folders):
        total += sum(path.stat().st_size for path in folder.iterdir())
        age = time.time() - folder.stat().st_mtime
        # Without locks nobody can tell what is in use, but by its age.
        many = fcntl is not None and (rank >= MOST_RUNS or total > MOST_BYTES)
        if many or age > KEPT_DAYS * 86400:
            _forget(folder)
    for lock in root.glob("*.lock"):
        if not lock.with_suffix("").exists():
            _forget(lock.with_suffix(""))


def _forget(folder: Path) -> None:
    with suppress(OSError):  # it belongs to somebody else
        if (lock := _locked(folder.with_suffix(".lock"))) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            _unlink(folder.with_suffix(".lock"))
            lock.close()
