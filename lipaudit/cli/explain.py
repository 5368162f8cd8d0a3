"""The command `explain`: what a number means, where it holds, and what it does not mean."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.tools import LEARN
from lipaudit.errors import UsageError

if TYPE_CHECKING:
    from lipaudit.results import Column


@command("explain", panel=LEARN)
def explain(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="For example bounds, bounds.sharp, g1.")
    ],
) -> None:
    """What a number means, where it holds, and what it does not mean.

    NAME is a bound, a column, a section, SECTION.COLUMN, or an option without its dashes.

    [dim]Examples:[/]
      [cyan]lipaudit explain sharp[/]
      [cyan]lipaudit explain jacobian.norm[/]
    """
    columns = _columns()
    parts = {key: (key, *key.rpartition(".")[::2]) for key in columns}
    named = [key for key, (whole, section, own) in parts.items() if name in (whole, section, own)]
    options = list(_options(name))
    if not named and not options:
        names = sorted({key.rpartition(".")[2] for key in columns} | set(columns))
        near = difflib.get_close_matches(name, names, 3)
        advice = f"Did you mean {' or '.join(near)}?" if near else "Try: lipaudit explain bounds"
        raise UsageError(f"nothing is called {name!r}", advice)
    entries = ["\n".join(_entry(key, columns[key])) for key in named]
    typer.echo("\n\n".join([*entries, *options]))
    if any(columns[key].formula for key in named):
        typer.echo("\n" + "\n".join(textwrap.wrap(_symbols(), 80)))


def _columns() -> dict[str, Column]:
    """Return every column, by row and by sample, as `section.column`."""
    from lipaudit.results import measures, row_types

    kinds = {section: row.columns() for section, row in row_types().items()}
    both = [*kinds.items(), *((name, record.samples) for name, record in measures().items())]
    return {f"{section}.{name}": c for section, columns in both for name, c in columns.items()}


def _options(name: str) -> Iterator[str]:
    """Describe the options of that name, by the command that has them."""
    from lipaudit.settings import Recipe, RunOptions, Settings, option_types

    groups: dict[str, type[Settings]] = {**option_types(), "train": Recipe}
    for owner, group in (groups | {"every measure": RunOptions}).items():
        for option in group.options().values():
            if name in (option.name, option.flags[0].removeprefix("--")):
                default = f" Default: {option.shown}." if option.shown else ""
                yield f"{option.flags[0]} of {owner}: {option.help}{default}"


def _symbols() -> str:
    from lipaudit.results.bounds import SYMBOLS

    return SYMBOLS


def _entry(key: str, column: Column) -> Iterator[str]:
    from lipaudit.report.cells import STATUS, UNMEASURED

    yield f"{key}: {column.meaning}"
    for paragraph in (column.formula, *column.reading.splitlines()):
        yield from _indented(paragraph)
    if column.domain and column.format not in UNMEASURED:
        where = "" if column.domain == "at X" else f": {column.domain}"
        yield from _indented(f"{column.status.capitalize()}: {STATUS[column.status]}{where}.")
    if column.better:
        yield f"  {column.better.capitalize()} is better."


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent="  ", subsequent_indent="  ")
