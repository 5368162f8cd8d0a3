"""Options of the command line itself, and the file with defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lipaudit.cli.config import SUBTABLES, read
from lipaudit.cli.streams import say
from lipaudit.errors import UsageError, suggestion
from lipaudit.settings import RunOptions, Settings, option

OUTPUT = "Output"
BY_MEASURE = {"samples": "by measure"}
"""Default shown if a command runs several measures."""
CONFIG = "A TOML file in place of lipaudit.toml and pyproject.toml."
"""Help of --config."""


def model_names() -> tuple[str, ...]:
    """Return the possible MODEL arguments except paths; timm's names come from its source."""
    from lipaudit.models.sources.names import SOURCES, demo_names, timm_names

    others = (f"{source}:" for source in SOURCES if source not in ("demo", "timm"))
    return (*demo_names(), *others, *(f"timm:{name}" for name in timm_names()))


def complete_words(
    values: Callable[[], Iterable[str]], *, commas: bool = False
) -> Callable[[str], list[str]]:
    """Return a completion function for a parameter; typer keeps the matching words.

    Args:
        values: returns all words.
        commas: whether several words may be given, separated by commas.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",") if commas else ("", "", "")
        return [before + comma + value for value in values()]

    return complete


def _declare_model() -> Any:
    return typer.Argument(
        metavar="MODEL",
        autocompletion=complete_words(model_names),
        help="demo, timm:NAME, hf:ORG/NAME, a folder, a file, py:FILE:FACTORY.",
    )


ModelArgument = Annotated[str, _declare_model()]
ModelsArgument = Annotated[list[str], _declare_model()]


def list_formats() -> tuple[str, ...]:
    """Return the names of all formats."""
    from lipaudit.report import RENDERERS

    return tuple(RENDERERS)


def format_option(
    help: str, usual: str, values: Callable[[], Iterable[str]] = list_formats
) -> Any:
    """Declare the option --format of a command."""
    return option(None, help, "--format", "-f", panel=OUTPUT, usual=usual, values=values)


class Output(Settings):
    """Where a result goes."""

    format: str | None = format_option(
        "Format of stdout: table, json, csv, html...", usual="table"
    )
    output: tuple[Path, ...] = option(
        (),
        "Also write FILE: .json, .csv, .md, .tex, .html or .txt.",
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
        from lipaudit.gate.standings import ORDER, make_rule

        if self.rank_by != ORDER:
            make_rule(self.rank_by)
        if count < 2:
            raise UsageError(
                "--rank-by needs several models, and only one was given", "Leave it out."
            )


class Shown(Output):
    """Where a result goes that the configuration file has no say in: it is no report of a run."""


class Lines(Shown):
    """Where a result goes that is lines of text, or data."""

    format: str | None = format_option(
        "Format of stdout: text or json.", usual="text", values=lambda: ("text", "json")
    )
    output: tuple[Path, ...] = option(
        (), "Also write FILE (.txt, .json); repeatable.", "--output", "-o", panel=OUTPUT
    )


class Plain(Settings):
    """What is said on stderr."""

    quiet: bool = option(False, "Print no progress and no notes.", "--quiet", "-q", panel=OUTPUT)
    verbose: bool = option(False, "Print tracebacks and details.", "--verbose", "-v", panel=OUTPUT)

    def tell(self, text: str) -> None:
        """Print lines on stderr, unless the command is quiet."""
        if not self.quiet:
            say(text)


class Terminal(Plain):
    """What is said on stderr, and where defaults come from."""

    config: Path | None = option(None, CONFIG, panel="Run")


CONFIGURABLE: dict[str, str] = {
    name.replace("_", "-"): name
    for group in (RunOptions, Output, Terminal)
    for name in group.options()
    if name not in ("config", "verbose")
}
"""Keys of `[tool.lipaudit]`, and the option for which each sets a default."""

Group = TypeVar("Group", bound=Settings)


def read_config(path: Path | None) -> dict[str, Any]:
    """Return the shared options set in the configuration file, by name.

    Raises:
        UsageError: a key is not an option.
    """
    values = {key: value for key, value in read(path).items() if key not in SUBTABLES}
    for key in values:
        if key not in CONFIGURABLE:
            advice = suggestion(key, sorted(CONFIGURABLE))
            raise UsageError(f"unknown key {key!r} in the lipaudit configuration", advice)
    return {CONFIGURABLE[key]: value for key, value in values.items()}


def resolve_group(
    group: type[Group], typed: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Group:
    """Return a group of options: typed values, else configured ones, else defaults.

    Raises:
        UsageError: an option does not accept its value, even if another value overrides it, or a
            value of the configuration has the wrong type, such as true for a number.
    """
    options, configured = group.options(), dict[str, Any]()
    for name, value in defaults.items():
        if (known := options.get(name)) is None:
            continue
        if isinstance(value, bool) != (known.kind is bool):
            wanted = "true or false" if known.kind is bool else "a value"
            raise UsageError(f"{_spell_key(name)} is {value!r}: it takes {wanted}")
        # One file needs no list: output = "page.md".
        configured[name] = (value,) if known.repeats and isinstance(value, str) else value
    # Checked separately from typed values: the error names the key of the file, and an invalid
    # value is refused even if the command line overrides it.
    if configured:
        group.checked(configured, spelled=_spell_key)
    said = {name: typed[name] for name in options if typed.get(name) is not None}
    return group.checked(configured | said, configured=configured.keys() - said.keys())


def _spell_key(name: str) -> str:
    """Return the key of an option in the configuration file."""
    return f"{name.replace('_', '-')} in the lipaudit configuration"
