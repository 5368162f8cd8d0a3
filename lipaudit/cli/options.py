"""Options of the command line itself, and the file with defaults."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lipaudit.cli.streams import say
from lipaudit.errors import UsageError, suggestion
from lipaudit.settings import RunOptions
from lipaudit.settings.option import Settings, option

OUTPUT = "Output"
BY_MEASURE = {"samples": "by measure"}
"""Default shown if a command runs several measures."""
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A TOML file in place of lipaudit.toml and pyproject.toml.",
        rich_help_panel="Run",
    ),
]
MODEL: Any = typer.Argument(
    metavar="MODEL", help="demo, timm:NAME, hf:ORG/NAME, a folder, a file, py:FILE:FACTORY."
)
ModelArgument = Annotated[str, MODEL]


class Output(Settings):
    """Where a result goes."""

    format: str | None = option(
        None,
        "Format of stdout, such as table, json, csv, markdown or html.",
        "--format",
        "-f",
        panel=OUTPUT,
    )
    output: tuple[Path, ...] = option(
        (),
        "Also write FILE: .json, .csv, .md, .tex, .html, .xml or .txt.",
        "--output",
        "-o",
        panel=OUTPUT,
    )


class Extent(Settings):
    """How much of a report stdout gets."""

    details: bool = option(False, "Print all sections, not only the scorecard.", panel=OUTPUT)


class Several(Extent):
    """How much of reports stdout gets, and what several of them are ranked by."""

    rank_by: str | None = option(
        None,
        "Rank several models by METRIC, such as jacobian.norm:p95. `order` keeps the given order.",
        panel=OUTPUT,
        usual="accuracy under attack, else certified, else the median norm",
    )

    def require_several(self, count: int) -> None:
        """Refuse an unknown metric for the ranking, or a metric without anything to rank.

        Raises:
            UsageError: the metric is unknown, or there is nothing to rank.
        """
        if self.rank_by is None:
            return
        from lipaudit.gate.comparison import ORDER, make_rule

        if self.rank_by != ORDER:
            make_rule(self.rank_by)
        if count < 2:
            raise UsageError("--rank-by needs several models, and one was given", "Leave it out.")


class Terminal(Settings):
    """The messages on stderr."""

    quiet: bool = option(False, "Print no progress and no notes.", "--quiet", "-q", panel=OUTPUT)
    verbose: bool = option(False, "Print tracebacks and details.", "--verbose", "-v", panel=OUTPUT)

    def tell(self, text: str) -> None:
        """Print lines on stderr, unless the command is quiet."""
        if not self.quiet:
            say(text)


Group = TypeVar("Group", bound=Settings)


def read_config(path: Path | None) -> dict[str, Any]:
    """Return the configuration, from `path` or from the file in the working directory.

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
    # lipaudit.toml does not need the table [tool.lipaudit] of pyproject.toml.
    table = document.get("tool", {})
    inner = isinstance(table, dict) and "lipaudit" in table
    values = table["lipaudit"] if inner else {} if path.name == "pyproject.toml" else document
    if not isinstance(values, dict) or not isinstance(values.get("gate", {}), dict):
        raise UsageError(
            f"tool.lipaudit and gate in {path} must be tables", "Write [tool.lipaudit] or [gate]."
        )
    return values


def read_defaults(path: Path | None) -> dict[str, Any]:
    """Return the options of every run that the configuration sets, by name.

    Raises:
        UsageError: a key is not an option, or its value has the wrong type or is invalid, even if
            the command line overrides it.
    """
    known = {name.replace("_", "-"): each for name, each in RunOptions.options().items()}
    values = {}
    for key, value in read_config(path).items():
        if key == "gate":
            continue
        if key not in known:
            advice = suggestion(key, sorted(known))
            raise UsageError(f"unknown key {key!r} in the lipaudit configuration", advice)
        # pydantic would take true as a number.
        if isinstance(value, bool) != (known[key].kind is bool):
            wanted = "true or false" if known[key].kind is bool else "a value"
            raise UsageError(f"{key} in the lipaudit configuration is {value!r}: give {wanted}")
        values[known[key].name] = value
    if values:
        spelling = "{} in the lipaudit configuration".format
        RunOptions.parse(values, spelled=lambda name: spelling(name.replace("_", "-")))
    return values


def resolve_group(
    group: type[Group], typed: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Group:
    """Return a group of options: typed values, else configured ones, else defaults.

    Raises:
        UsageError: an option does not accept its value.
    """
    given = {name: typed[name] for name in group.options() if typed.get(name) is not None}
    return group.parse({**defaults, **given}, configured=defaults.keys() - given.keys())
