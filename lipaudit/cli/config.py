"""The configuration file: defaults for shared options, from lipaudit.toml or pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lipaudit.errors import UsageError

SUBTABLES = frozenset({"gate"})


def read(path: Path | None) -> dict[str, Any]:
    """Return the whole configuration, from `path` or from the file in the working directory.

    Raises:
        UsageError: `path` is missing, a file is not valid TOML, or a table has a plain value.
    """
    usual = (Path(name) for name in ("lipaudit.toml", "pyproject.toml"))
    path = path or next(filter(Path.is_file, usual), None)
    if path is None:
        return {}
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        advice = ""
        # tomllib gives the line only in the text of its error.
        if found := re.search(r"at line (\d+)", str(error)):
            line = text.split("\n")[int(found[1]) - 1].strip()
            advice = f'Line {found[1]} is {line!r}; put text in quotes: key = "value".'
        raise UsageError(f"cannot read the configuration {path}: {error}", advice) from None
    tools = _read_table(document, "tool", path)
    # lipaudit.toml does not need the table [tool.lipaudit] of pyproject.toml.
    own = {} if path.name == "pyproject.toml" else document
    values = _read_table(tools, "lipaudit", path) if "lipaudit" in tools else own
    for name in SUBTABLES:
        _read_table(values, name, path)
    return dict(values)


def _read_table(values: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{name!r} in {path} is {table!r}, not a table", f"Write [{name}].")
    return table
