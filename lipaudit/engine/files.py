"""Files that are written completely or not at all; imports no torch."""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

from lipaudit.errors import EvaluationError, UsageError, refuse


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: under another name, then rename it.

    Raises:
        EvaluationError: the file cannot be written.
    """
    temporary = None
    try:
        # In the same folder: a rename is atomic only within one file system.
        with tempfile.NamedTemporaryFile(dir=path.resolve().parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        temporary.chmod(ordinary_mode())
        temporary.replace(path)
    except OSError as error:
        text = f"cannot write {path}: {error.strerror}"
        raise EvaluationError(text, "Free disk space, or choose another place.") from None
    finally:
        if temporary is not None:  # still there if the disk is full, or the run was stopped
            temporary.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the measurement.

    Raises:
        UsageError: the path is a folder, or its folder is missing or not writable.
    """
    folder = path.resolve().parent
    text = f"cannot write {path}:"
    refuse(path.is_dir(), f"{text} it is a folder", "Give a file in that folder.", UsageError)
    advice = f"Create it: mkdir {shlex.quote(str(path.parent))}"
    refuse(not folder.is_dir(), f"{text} there is no folder {path.parent}", advice, UsageError)
    text = f"{text} the folder {path.parent} cannot be written to"
    refuse(not os.access(folder, os.W_OK), text, "Choose a writable folder.", UsageError)


def require_folder(path: Path) -> None:
    """Refuse a directory that can be neither written to nor created.

    Raises:
        UsageError: the path is a file, or its parent is not writable.
    """
    there = path.resolve()
    while not there.exists() and there != there.parent:
        there = there.parent
    text = f"cannot write to {path}"
    refuse(not there.is_dir(), f"{text}: {there} is a file", "Give a directory.", UsageError)
    advice = "Choose a writable directory, for example with --run-dir."
    refuse(not os.access(there, os.W_OK), text, advice, UsageError)


def ordinary_mode() -> int:
    """Return the permissions of an ordinary new file; temporary files are private."""
    # The mask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
