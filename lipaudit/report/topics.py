"""What can be explained: a topic for everything that pages, tables, notes and JSON say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lipaudit.results import Column
    from lipaudit.settings import Settings

PIECES = re.compile(r"[@:,;=]+")
LIMIT = re.compile(r"(?:<=|>=).*")
NUMBER = re.compile(r"\s*\(?\b\d[\d./]*\)?")
"""How many rows a heading counts, which head it is about, or how large a ball is."""


@dataclass(frozen=True)
class Topic:
    """One thing that has a name.

    Attributes:
        group: the heading of the index under which it stands; empty: not in the index.
        name: in the index.
        title: in its explanation.
        meaning: one sentence.
        details: paragraphs that follow it.
        words: what else it goes by.
        formula: whether it needs the symbols of formulas.
    """

    group: str
    name: str
    title: str
    meaning: str
    details: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    formula: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All that it goes by."""
        return (self.name, self.title, *self.words)


@cache
def list_topics() -> tuple[Topic, ...]:
    """Return everything that a result says, in the order of the index."""
    return (
        *_list_measures(),
        *_list_columns(),
        *_list_statuses(),
        *_list_attacks(),
        *_list_verdicts(),
        *_list_glossary(),
    )


def find_topics(text: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics of a name as it is printed, [] where it is none.

    What is put together of several names (`jacobian.norm:median <= +5%`, `robust@pgd,linf,2/255`)
    is explained name by name; radii and other values explain themselves.
    """
    name = LIMIT.sub("", text).strip() or text
    whole = _find_named(text, known) or _find_named(name, known)
    if whole:
        return whole
    first, *more = [piece.strip() for piece in PIECES.split(name)]
    bare = NUMBER.sub("", first)
    start = _find_named(bare, known) if more or bare != first else []
    rest = (t for piece in more for t in _find_named(piece, known) if t.name == t.title)
    return list(dict.fromkeys([*start, *rest])) if start else _find_provenance(name, known)


def _find_provenance(name: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics of a status and a domain as footnotes print them: `exact at X`."""
    status, _, domain = name.partition(" ")
    pair = [_find_named(status, known), _find_named(domain, known)]
    of_status = any(topic in pair[0] for topic in _list_statuses())
    return [topic for topics in pair for topic in topics] if of_status and all(pair) else []


def _find_named(name: str, known: Sequence[Topic]) -> list[Topic]:
    for spelled in (str, strip_name):
        near = [t for t in known if spelled(name) in map(spelled, t.names)]
        if near:
            near.sort(key=lambda topic: (topic.title != name, not topic.group))
            return [topic for topic in near if topic.group] or near
    return []


@cache
def strip_name(name: str) -> str:
    """Return a name without what printing adds: marks, case, spaces, hyphens, mathematics."""
    from lipaudit.report.cells import MARKS, write_math

    return re.sub(rf"[\s_\-]|^--|[{MARKS}]$", "", write_math(name)).lower()


def _list_measures() -> Iterator[Topic]:
    from lipaudit.results import layouts, measures
    from lipaudit.settings import option_types

    for name in measures():
        first, *rest = (inspect.getdoc(option_types()[name]) or "").split("\n\n")
        said = tuple(p.replace("\n", " ") for p in rest if not p.startswith("[dim]"))
        yield Topic("Measures and sections", name, name, first.replace("\n", " "), said)
    for section, layout in layouts().items():
        title = layout.title or section
        yield Topic("Measures and sections", section, section, f"A table: {title}.", (), (title,))


def _list_columns() -> Iterator[Topic]:
    """Yield every column, by row and by sample; bounds apart from the rest."""
    from lipaudit.results import layouts
    from lipaudit.results.bounds import catalogue

    for section, layout in layouts().items():
        for name, column in layout.columns.items():
            bound = section == "bounds" and name in catalogue()
            group = "Bounds" if bound else f"Columns of {section}"
            yield _make_column_topic(group, section, name, column)
    for section, layout in layouts().items():
        for name, column in layout.samples.items():
            yield _make_column_topic(
                f"Columns of {section}", section, name, column, " (per sample)"
            )


def _make_column_topic(group: str, section: str, name: str, column: Column, of: str = "") -> Topic:
    from lipaudit.report.cells import STATUS, UNMEASURED

    full = f"{section}.{name}"
    details = [column.formula, *column.reading.splitlines()]
    if column.domain and column.format not in UNMEASURED:
        where = "" if column.domain == "at X" else f": {column.domain}"
        details.append(f"{column.status.capitalize()}: {STATUS[column.status]}{where}.")
    if column.better:
        details.append(f"{column.better.capitalize()} is better.")
    return Topic(
        group,
        name,
        full + of,
        column.meaning,
        tuple(filter(None, details)),
        (full, section, column.label),
        formula=bool(column.formula),
    )


def _list_statuses() -> Iterator[Topic]:
    from lipaudit.report.cells import STATUS

    for name, meaning in STATUS.items():
        yield Topic(
            "How far a figure is proven", name, name, f"{meaning[0].upper()}{meaning[1:]}."
        )


def _list_attacks() -> Iterator[Topic]:
    from lipaudit.attacks.kinds import RESERVED, attack_kinds
    from lipaudit.report.glossary import ATTACKS

    for name, kind in attack_kinds().items():
        meaning = ATTACKS.get(name, f"An attack of the package {kind.package}.")
        yield Topic("Attacks", name, name, meaning, (f"Norms: {', '.join(kind.norms)}.",))
    yield from _list_meanings("Attacks", {name: ATTACKS[name] for name in sorted(RESERVED)})


def _list_verdicts() -> Iterator[Topic]:
    from typing import get_args

    from lipaudit.gate.rules import STATS
    from lipaudit.gate.verdicts import VerdictStatus
    from lipaudit.report.glossary import CERTIFICATES, NORMS, STATISTICS, VERDICTS
    from lipaudit.results.trials import Norm

    yield from _list_meanings("Norms of attacks", {name: NORMS[name] for name in get_args(Norm)})
    yield from _list_meanings("Verdicts of certificates", CERTIFICATES)
    yield from _list_meanings("Statistics of rules", {name: STATISTICS[name] for name in STATS})
    verdicts = {name: VERDICTS[name] for name in get_args(VerdictStatus)}
    yield from _list_meanings("Verdicts of the gate", verdicts)


def _list_glossary() -> Iterator[Topic]:
    from lipaudit.report.glossary import FIELDS, HEADINGS, NOTES, WORDS

    yield from _list_meanings("Words of pages", WORDS)
    yield from _list_meanings("Headings of pages", HEADINGS)
    yield from _list_meanings("Names in the JSON", FIELDS)
    yield from _list_meanings("Notes, by their code", NOTES)


def _list_meanings(group: str, meanings: Mapping[str, str]) -> Iterator[Topic]:
    for name, meaning in meanings.items():
        yield Topic(group, name, name, meaning)


def list_options(groups: Mapping[str, type[Settings]]) -> Iterator[Topic]:
    """Yield the options of groups, by the command that has them, and the words that they take."""
    for owner, group in groups.items():
        said = _values(inspect.getdoc(group) or "")
        for option in group.options().values():
            flag = option.flags[0]
            default = f" Default: {option.shown}." if option.shown else ""
            title = f"{flag} of {owner}"
            words = (flag, *option.flags[1:], option.name)
            bare = flag.removeprefix("--")
            yield Topic("Options", bare, title, option.help + default, (), words)
            for value in option.values():
                meaning = said.get(value, option.help)
                yield Topic("", value, f"{value}, a value of {title}", meaning)


def _values(text: str) -> dict[str, str]:
    """Read the lists `  NAME   what it is` of a help text."""
    return dict(re.findall(r"^  (\w+) {2,}(\S.*)$", text, re.MULTILINE))
