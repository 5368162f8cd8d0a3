"""The command `explain`: what a number means, where it holds, and what it does not mean."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from lipaudit.cli.app import command
from lipaudit.cli.options import Lines, Plain, completed
from lipaudit.cli.tools import LEARN
from lipaudit.cli.topics import Topic, explained, known_names, topics
from lipaudit.errors import UsageError, suggestion

WIDEST = 100


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

    text = " ".join(name or ())
    entries = explained(text) if text else topics()
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
