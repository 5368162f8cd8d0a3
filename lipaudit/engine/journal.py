"""The finished parts of a run on disk, one file each: what a stopped run had finished is kept."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lipaudit.attacks.sanity import Checks
from lipaudit.engine.files import write
from lipaudit.errors import EvaluationError, out_of_memory
from lipaudit.measures.by_layer import HeadName
from lipaudit.measures.measure import Part
from lipaudit.tables import Note

KEPT_DAYS = 30
"""Days after which parts of an interrupted run are deleted."""

MAKERS: dict[str, Callable[..., Any]] = {
    "tuple": lambda *values: values,
    "dict": lambda *pairs: dict(pairs),
    "HeadName": HeadName,
    "Checks": Checks,
    "Note": lambda level, code, text: Note(level=level, code=code, text=text),
}
"""Types that facts of a part may contain besides lists, arrays and plain values."""


class Journal:
    """The finished parts of one measure on one list of samples: a file of arrays each.

    Two equal runs at once write equal files, and each deletes only its own at its end.

    Args:
        facts: everything that decides the numbers; another run with the same facts finds them.
        root: where journals are kept; the user's cache directory when None.
        keeps: whether anything is kept.

    Attributes:
        folder: where the parts are.
        refusal: why parts could not be kept; empty where they are.
    """

    def __init__(
        self, facts: Mapping[str, Any], root: Path | None = None, *, keeps: bool = True
    ) -> None:
        text = json.dumps(facts, sort_keys=True, default=str)
        self.folder = (root or _find_cache()) / hashlib.sha256(text.encode()).hexdigest()[:32]
        self.keeps, self.refusal = keeps, ""
        self._own: set[Path] = set()

    def parts(self, ids: Sequence[str]) -> list[Part]:
        """Return what an earlier run finished of these samples, in the order of their first ones.

        A file that is damaged, or of other samples, is left out.
        """
        place = {name: i for i, name in enumerate(ids)}
        finished: list[Part] = []
        left = {*ids}
        for path in sorted(self.folder.glob("*.npz")) if self.keeps else ():
            with suppress(OSError, ValueError):
                part = decode_part(path.read_bytes())
                # A file is named by its first sample; of parts that overlap the first one counts.
                if part.ids[:1] == (path.stem,) and left.issuperset(part.ids):
                    finished.append(part)
                    left.difference_update(part.ids)
                    self._own.add(path)
        return sorted(finished, key=lambda part: place[part.ids[0]])

    def record(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Yield the parts, each once it is kept.

        A full disk does not end the run: `refusal` says so.
        """
        for part in parts:
            if self.keeps:
                try:
                    self._keep(part)
                except (
                    OSError,
                    EvaluationError,
                    TypeError,
                ) as error:  # a plug-in may give any fact
                    self.refusal = str(error)
            yield part

    def clear(self) -> None:
        """Delete the parts that this run read or wrote."""
        for path in self._own:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # another run has parts there, or nothing was kept
            self.folder.rmdir()

    def _keep(self, part: Part) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            _delete_old(self.folder.parent)
        path = self.folder / f"{part.ids[0]}.npz"
        write(path, encode_part(part))
        self._own.add(path)


def encode_part(part: Part) -> bytes:
    """Write a part as an .npz file: its arrays, and all else as JSON in the array `header`."""
    arrays: list[np.ndarray[Any, Any]] = []
    header = {
        "ids": part.ids,
        "values": _pack(dict(part.values), arrays),
        "facts": _pack(dict(part.facts), arrays),
        "notes": _pack(list(part.notes), arrays),
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    file = io.BytesIO()
    named: dict[str, Any] = {f"{i}": array for i, array in enumerate(arrays)}
    np.savez_compressed(file, header=text, **named)
    return file.getvalue()


def decode_part(content: bytes) -> Part:
    """Read what `encode_part` wrote.

    Raises:
        ValueError: it is damaged, or something else.
    """
    try:
        # numpy checks the sums of the arrays that it reads, not those of the whole file.
        if zipfile.ZipFile(io.BytesIO(content)).testzip() is not None:
            raise ValueError("a checksum is wrong")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            known = {name: _unpack(header[name], arrays) for name in ("values", "facts", "notes")}
            return Part(
                tuple(header["ids"]), known["values"], known["facts"], tuple(known["notes"])
            )
    except Exception as error:  # zip, zlib, numpy and json have exceptions of their own
        if out_of_memory(error):
            raise
        raise ValueError(f"damaged parts ({error})") from error


def pack_parts(parts: Sequence[Part]) -> str:
    """Write parts as text, for the report of a shard."""
    return " ".join(base64.b64encode(encode_part(part)).decode() for part in parts)


def unpack_parts(text: str) -> list[Part]:
    """Read what `pack_parts` wrote.

    Raises:
        ValueError: it is damaged, or something else.
    """
    return [decode_part(base64.b64decode(part, validate=True)) for part in text.split(" ") if part]


def _pack(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Return a value as JSON, its arrays by their number."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_pack(each, arrays) for each in value]
    # As pairs: keys of JSON are text, and those of facts may be numbers.
    if isinstance(value, dict):
        return {"dict": [_pack([*pair], arrays) for pair in value.items()]}
    if isinstance(value, tuple):
        name = type(value).__name__
        name = name if name in MAKERS else "tuple"
        return {name: [_pack(each, arrays) for each in value]}
    if isinstance(value, Note):
        return {"Note": [value.level, value.code, value.text]}
    if is_dataclass(value):
        return {
            type(value).__name__: [_pack(getattr(value, f.name), arrays) for f in fields(value)]
        }
    return value


def _unpack(value: Any, arrays: Mapping[str, Any]) -> Any:
    """Return what `_pack` made JSON of."""
    if isinstance(value, list):
        return [_unpack(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, inner),) = value.items()
    return arrays[f"{inner}"] if name == "array" else MAKERS[name](*_unpack(inner, arrays))


def _find_cache() -> Path:
    # In the user's cache: the same command finds it from another folder, too.
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "lipaudit" / "journal"


def _delete_old(root: Path) -> None:
    for folder in root.iterdir():
        with suppress(OSError):
            if folder.is_dir() and time.time() - folder.stat().st_mtime > KEPT_DAYS * 86400:
                shutil.rmtree(folder, ignore_errors=True)
