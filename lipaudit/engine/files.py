"""Files that are written completely or not at all, and the finished parts of a run among them.

Each part is a file of its own, so that an interrupted run can continue. Imports neither torch
nor numpy: commands that read reports write files, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import shutil
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lipaudit.errors import EvaluationError, UsageError, is_out_of_memory
from lipaudit.measures.base import Part
from lipaudit.tables import Note

# Days after which parts of an interrupted run are deleted.
KEPT_DAYS = 30


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: under another name, then rename it.

    A link stays a link: the file that it points to is written.

    Raises:
        EvaluationError: the file cannot be written.
    """
    temporary = None
    target = _follow_links(path)
    try:
        # In the same folder: a rename is atomic only within one file system.
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        temporary.chmod(ordinary_mode())
        temporary.replace(target)
    except OSError as error:
        raise EvaluationError(
            f"cannot write {path}: {error.strerror}", "Free disk space, or choose another place."
        ) from None
    finally:
        if temporary is not None:  # still there if the disk is full, or the run was stopped
            temporary.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the measurement.

    Raises:
        UsageError: the path is a folder, or its folder is missing or not writable.
    """
    folder = _follow_links(path).parent
    text = f"cannot write {path}:"
    if path.is_dir():
        raise UsageError(f"{text} it is a folder", "Give a file in that folder.")
    if not folder.is_dir():
        raise UsageError(
            f"{text} there is no folder {path.parent}",
            f"Create it: mkdir {shlex.quote(str(path.parent))}",
        )
    if not os.access(folder, os.W_OK):
        raise UsageError(
            f"{text} the folder {path.parent} cannot be written to", "Choose a writable folder."
        )


def require_folder(path: Path) -> None:
    """Refuse a directory that can be neither written to nor created.

    Raises:
        UsageError: the path is a file, or its parent is not writable.
    """
    nearest = _follow_links(path)  # the directory, or the nearest one above it that exists
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    text = f"cannot write to {path}"
    if not nearest.is_dir():
        raise UsageError(f"{text}: {nearest} is a file", "Give a directory.")
    if not os.access(nearest, os.W_OK):
        raise UsageError(text, "Choose a directory that you can write to.")


def _follow_links(path: Path) -> Path:
    """Return the path that links lead to; of links in a circle, the first one."""
    # Before Python 3.13 `Path.resolve` raises an error on a circle.
    return Path(os.path.realpath(path))


def ordinary_mode() -> int:
    """Return the permissions of a file that `open` creates: temporary files are private."""
    # The mask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


class Journal:
    """The finished parts of one measure on one list of samples, one file each.

    Two equal runs at the same time write equal files; each deletes only its own at its end.

    Args:
        facts: everything that determines the numbers; a run with the same facts finds the parts.
        home: folder that the user gave for the parts; None: a folder in the user's cache, so that
            the same command finds it from any working directory.
        keeps: whether parts are stored.

    Attributes:
        folder: folder of the parts.
        paths: files that this run read or wrote.
        refusal: why parts could not be stored; empty if they could.
    """

    def __init__(
        self, facts: Mapping[str, Any], home: Path | None = None, *, keeps: bool = True
    ) -> None:
        # A journal stores the results (parts) of one measure on the disk. A later run continues
        # from these results if it has the same `facts`: everything that determines the numbers.
        self.measure = str(facts.get("measure"))
        self.in_cache = home is None  # only the cache is cleared, not a folder that the user gave
        if home is None:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            home = cache / "lipaudit" / "journal"
        self.folder = home / name_folder(facts)  # a hash of the facts; created with the first part
        self.keeps = keeps  # whether parts are stored
        self.refusal = ""  # the reason if a part could not be stored
        self.paths: set[Path] = set()  # files that this run has read or written

    def read_parts(self, ids: Sequence[str]) -> list[Part]:
        """Return the parts of an earlier run on these samples, ordered by their first samples.

        Their files are added to `paths`, the files that are deleted when the run is complete.
        """
        if not self.keeps:  # this journal stores nothing
            return []
        parts = read_parts(self.folder, ids)  # the function of this module: parts by file
        self.paths |= parts.keys()
        return list(parts.values())

    def keep(self, part: Part) -> None:
        """Store a part, the result on some samples, so that an interrupted run can be continued.

        In the cache, a full disk does not end the run: `refusal` gets the reason.

        Raises:
            EvaluationError: a part cannot be stored in the folder that the user gave.
        """
        if not self.keeps:
            return
        path = self.folder / f"{part.ids[0]}.npz"
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                if self.in_cache:  # not in a folder that the user gave
                    _delete_old(self.folder.parent)
            self.paths.add(path)  # first: a signal may end the run right after the file is written
            write(path, encode_part(part, self.measure))
        except (OSError, EvaluationError) as error:  # facts of plug-ins may not be JSON values
            self.paths.discard(path)
            self.refusal = str(error)
            if not self.in_cache:
                raise EvaluationError(
                    f"a part of {self.measure} cannot be stored: {error}",
                    "Free disk space, or give another folder with --parts.",
                ) from None

    def clear(self) -> None:
        """Delete the parts that this run read or wrote, except in a folder that the user gave."""
        if not self.in_cache:
            return
        for path in self.paths:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # another run has parts here, or nothing was stored
            self.folder.rmdir()


def name_folder(facts: Mapping[str, Any]) -> str:
    """Return the name of the folder of a measure's parts, a hash of all that determines them."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_parts(folder: Path, ids: Sequence[str]) -> dict[Path, Part]:
    """Return the parts in a folder by their files, in the order of their first samples.

    A part is the result of a measure on some samples, and has a file of its own. Damaged files,
    and files with other samples than `ids`, are left out.
    """
    position = {name: i for i, name in enumerate(ids)}
    parts = {}
    missing = set(ids)
    for path in sorted(folder.glob("*.npz")):
        with suppress(OSError, ValueError):
            part = decode_part(path.read_bytes())
            # A file is named by its first sample. If parts overlap, the first file counts.
            if part.ids[:1] == (path.stem,) and missing.issuperset(part.ids):
                parts[path] = part
                missing.difference_update(part.ids)
    return dict(sorted(parts.items(), key=lambda item: position[item[0].stem]))


def _delete_old(home: Path) -> None:
    """Delete the folders of runs that were interrupted long ago."""
    for folder in home.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)


def encode_part(part: Part, measure: str) -> bytes:
    """Return a part as the content of an .npz file: its arrays, and a `header` with JSON.

    A part is the result of a measure on some samples.

    Raises:
        EvaluationError: a fact of the measure is no JSON value, and no number or array of numpy.
    """
    import numpy as np

    facts = {}
    for name, fact in part.facts.items():
        try:
            facts[name] = json.loads(json.dumps(fact, default=_convert_numpy))
        except (TypeError, ValueError) as error:
            raise EvaluationError(
                f"the fact {name!r} of the measure {measure} is no JSON value: {error}",
                "Use numbers, texts, lists and dictionaries of texts as facts of a Part.",
            ) from error
    header = {
        "ids": part.ids,
        "names": [*part.values],
        "facts": facts,
        "notes": [note.model_dump() for note in part.notes],
        "complete": part.complete,
    }
    encoded_header = np.frombuffer(json.dumps(header).encode(), np.uint8)
    file = io.BytesIO()
    # Arrays are named 0, 1, ...: names of a measure may be no file names, or arguments of savez.
    arrays: dict[str, Any] = {f"{i}": array for i, array in enumerate(part.values.values())}
    np.savez_compressed(file, header=encoded_header, **arrays)
    return file.getvalue()


def _convert_numpy(value: Any) -> Any:
    """Return a number or array of numpy as plain numbers; json calls this for unknown values.

    Raises:
        TypeError: the value is of another type.
    """
    import numpy as np

    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"it holds a value of type {type(value).__name__}")


def decode_part(content: bytes) -> Part:
    """Return the part in the content of a file that `encode_part` made.

    Raises:
        ValueError: the content is damaged, or of another kind.
    """
    import numpy as np

    try:
        # numpy checks the checksums of the arrays that it reads, not of the whole file.
        if zipfile.ZipFile(io.BytesIO(content)).testzip() is not None:
            raise ValueError("a checksum is wrong")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            values = {name: arrays[f"{i}"] for i, name in enumerate(header["names"])}
            remarks = tuple(Note(**note) for note in header["notes"])
            ids = tuple(header["ids"])
            return Part(
                ids, values, facts=header["facts"], notes=remarks, complete=header["complete"]
            )
    except Exception as error:  # zip, zlib, numpy and json have their own exceptions
        if is_out_of_memory(error):
            raise
        raise ValueError(f"damaged parts ({error})") from error
