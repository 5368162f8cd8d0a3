"""The command `explain`: what a number means, where it holds, and what it does not mean."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from lipaudit.cli.app import app, command
from lipaudit.cli.options import Lines, Output, Plain, Terminal, completed
from lipaudit.cli.tools import LEARN
from lipaudit.errors import UsageError, suggestion

if TYPE_CHECKING:
    from lipaudit.report.topics import Topic

WIDEST = 100


@cache
def known() -> tuple[Topic, ...]:
    """Return everything that can be explained: results, options and commands."""
    from lipaudit.cli.remeasure import Swapping
    from lipaudit.report.topics import option_topics, topics
    from lipaudit.settings import Recipe, RunOptions, Settings, option_types

    groups: dict[str, type[Settings]] = {**option_types(), "train": Recipe, "compare": Swapping}
    groups |= {"every measure": RunOptions, "every command": Output, "most commands": Terminal}
    return (*topics(), *option_topics(groups), *_commands(typer.main.get_command(app)))


def known_names() -> list[str]:
    """Return every name that can be explained."""
    return list(dict.fromkeys(name for topic in known() for name in topic.names))


def _commands(command: object, path: str = "") -> Iterator[Topic]:
    from lipaudit.report.topics import Topic

    for name, each in getattr(command, "commands", {}).items():
        full = f"{path} {name}".strip()
        short = (each.help or "").partition("\n")[0]
        yield Topic("Commands", full, f"lipaudit {full}", short)
        yield from _commands(each, full)


@command("explain", panel=LEARN)
def explain(
    output: Lines,
    terminal: Plain,
    name: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]",
            autocompletion=completed(known_names),
            help="For example bounds, theorem 3, g1, pgd; without it, every name by topic.",
        ),
    ] = None,
) -> None:
    """What a number means, where it holds, and what it does not mean.

    NAME is anything that a page, a table, a note or a JSON file says: a bound, a column or its
    heading, a section, an attack, a verdict, a rule of the gate, the code of a note, an option.

    [dim]Examples:[/]
      [cyan]lipaudit explain theorem 3[/]
      [cyan]lipaudit explain jacobian.norm:median[/]
    """
    from lipaudit.cli.emit import emit
    from lipaudit.report.topics import explained

    text = " ".join(name or ())
    entries = explained(text, known()) if text else known()
    if not entries:
        advice = suggestion(text, known_names(), "lipaudit explain lists every name.")
        raise UsageError(f"nothing is called {text!r}", advice)
    lines = list(_pages(entries) if text else _index(entries))
    record = [asdict(topic) for topic in entries]
    emit({"lines": lambda: lines, "record": lambda: record}, output)


def _pages(entries: Sequence[Topic]) -> Iterator[str]:
    """Yield the lines that explain topics."""
    from lipaudit.results.bounds import SYMBOLS

    for number, topic in enumerate(entries):
        yield from [""] if number else []
        yield from _wrapped(f"{topic.title}: {topic.meaning}", "", "  ")
        for paragraph in topic.details:
            yield from _wrapped(paragraph, "  ", "  ")
    if any(topic.formula for topic in entries):
        yield ""
        yield from _wrapped(SYMBOLS)


def _index(entries: Sequence[Topic]) -> Iterator[str]:
    """Yield the names under their topics."""
    groups: dict[str, dict[str, None]] = {}
    for topic in entries:
        groups.setdefault(topic.group, {})[topic.name] = None
    yield from _wrapped("lipaudit explain NAME explains one of these, or a heading of a page.")
    for group, names in groups.items():
        if group:
            yield from ("", group)
            yield from _wrapped(", ".join(names), "  ", "  ")


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    width = min(shutil.get_terminal_size().columns, WIDEST)
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
