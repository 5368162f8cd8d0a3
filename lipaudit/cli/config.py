"""`[tool.lipaudit]` of pyproject.toml, or lipaudit.toml: defaults for the shared options."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from lipaudit.errors import UsageError

SUBTABLES = frozenset({"gate"})


def read(path: Path | None) -> dict[str, Any]:
    """Return the whole configuration: of `path`, or of the file in the working directory.

    Raises:
        UsageError: when `path` is missing or a file is not valid TOML.
    """
    if path is not None:
        return _load(path)
    own = Path("lipaudit.toml")
    project = Path("pyproject.toml")
    if own.is_file():
        return _load(own)
    return _load(project) if project.is_file() else {}


def table(path: Path | None, *, known: frozenset[str]) -> dict[str, Any]:
    """Return the defaults of the shared options.

    Raises:
        UsageError: for a key that is no option.
    """
    values = {k: v for k, v in read(path).items() if k not in SUBTABLES}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            advice = (
                f"Did you mean {near[0]!r}?"
                if near
                else f"Known keys: {', '.join(sorted(known))}."
            )
            raise UsageError(f"unknown key {key!r} in the lipaudit configuration", advice)
    return values


def _load(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the configuration {path}: {error}") from None
    if path.name == "pyproject.toml":
        return dict(document.get("tool", {}).get("lipaudit", {}))
    return dict(document.get("tool", {}).get("lipaudit", document))
