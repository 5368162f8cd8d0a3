"""The options of the command line itself, and the file that gives options defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lipaudit.cli.config import SUBTABLES, read
from lipaudit.errors import UsageError, suggestion
from lipaudit.settings import RunOptions, Settings, option
from lipaudit.settings.option import Option

OUTPUT = "Output"
BY_MEASURE = {"samples": "by measure"}
"""Default shown if a command runs several measures."""
CONFIG = "A TOML file in place of lipaudit.toml and pyproject.toml."
"""Help of --config."""


def model_names() -> tuple[str, ...]:
    """Return what a MODEL argument may be, but for paths; those of timm are read in its source."""
    from lipaudit.models.sources.names import SOURCES, demo_names, timm_names

    others = (f"{source}:" for source in SOURCES if source not in ("demo", "timm"))
    return (*demo_names(), *others, *(f"timm:{name}" for name in timm_names()))


def complete_words(
    values: Callable[[], Iterable[str]], *, commas: bool = False
) -> Callable[[str], list[str]]:
    """Return what a shell asks for the words of a parameter; typer keeps those that fit.

    Args:
        values: returns all words.
        commas: whether words may stand before it, separated by commas.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",") if commas else ("", "", "")
        return [before + comma + value for value in values()]

    return complete


def _declare_model() -> Any:
    """Return how a MODEL is typed."""
    return typer.Argument(
        metavar="MODEL",
        autocompletion=complete_words(model_names),
        help="demo, timm:NAME, hf:ORG/NAME, a folder, a file, py:FILE:FACTORY.",
    )


ModelArgument = Annotated[str, _declare_model()]
ModelsArgument = Annotated[list[str], _declare_model()]


def list_formats() -> tuple[str, ...]:
    """Return the name of every format."""
    from lipaudit.report import RENDERERS

    return tuple(RENDERERS)


def format_option(
    help: str, usual: str, values: Callable[[], Iterable[str]] = list_formats
) -> Any:
    """Declare --format of a command: what stdout gets."""
    return option(None, help, "--format", "-f", panel=OUTPUT, usual=usual, values=values)


class Output(Settings):
    """Where a result goes."""

    format: str | None = format_option(
        "Format of stdout: table, brief, json, csv, html...", usual="table"
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
        """Refuse a metric to rank by that there is not, or that has nothing to rank.

        Raises:
            UsageError: it is so.
        """
        if self.rank_by is None:
            return
        from lipaudit.gate.ranking import ORDER, make_rule

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
    """Return what the configuration file says of the shared options, by the option's name.

    Raises:
        UsageError: for a key that is no option.
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
    """Return a group of options: what was typed, else what is configured, else the defaults.

    Raises:
        UsageError: for a value that an option does not take, whether it counts or not.
    """
    said = {name: value for name, value in typed.items() if value is not None}
    names = group.options()
    own = {n: _convert_value(n, value, names[n]) for n, value in defaults.items() if n in names}
    # Checked apart from what is typed: the error names the key of the file, and a wrong line is
    # refused even where the command line overrules it.
    if own:
        group.checked(own, spelled=_spell_key)
    typed_here = {name: value for name, value in said.items() if name in names}
    return group.checked(own | typed_here, configured=own.keys() - typed_here.keys())


def _convert_value(name: str, value: Any, option: Option) -> Any:
    """Return a value of the file as a command line would have given it.

    Raises:
        UsageError: true or false where it says nothing, or the like.
    """
    if isinstance(value, bool) != (option.kind is bool):
        wanted = "true or false" if option.kind is bool else "a value"
        raise UsageError(f"{_spell_key(name)} is {value!r}: it takes {wanted}")
    # One file may stand without a list: output = "page.md".
    return (value,) if option.repeats and isinstance(value, str) else value


def _spell_key(name: str) -> str:
    """Name an option as the configuration file does."""
    return f"{name.replace('_', '-')} in the lipaudit configuration"
