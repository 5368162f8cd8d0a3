"""The topics of `lipaudit explain`: one for every name on pages, in tables and in JSON."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lipaudit.settings import Settings

PIECES = re.compile(r"[@:,;=]+")
LIMIT = re.compile(r"(?:<=|>=).*")
NUMBER = re.compile(r"\s*\(?\b\d[\d./]*\)?")
"""Pattern of numbers in headings (row counts, heads, radii)."""


@dataclass(frozen=True)
class Topic:
    """The explanation of one name.

    Attributes:
        group: heading in the index; empty: not in the index.
        name: name in the index.
        title: title of the explanation.
        meaning: the meaning.
        details: further paragraphs: how to read it, what it does not say, its formula.
        words: other names.
    """

    group: str
    name: str
    title: str
    meaning: str
    details: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name that finds the topic."""
        return (self.name, self.title, *self.words)


FORMULA = "Formula: "
"""Beginning of a paragraph with a formula."""


@cache
def list_topics() -> tuple[Topic, ...]:
    """Return all topics, in the order of the index."""
    from lipaudit.report import words
    from lipaudit.report.cells import STATUS

    groups: dict[str, Mapping[str, str]] = {
        "How far a figure is proven": STATUS,
        "Norms of attacks": words.NORMS,
        "Verdicts of certificates": words.CERTIFICATES,
        "Statistics of rules": words.STATISTICS,
        "Verdicts of the gate": words.VERDICTS,
        "Words of pages": {k: column.meaning for k, column in words.HEADINGS.items()}
        | dict(words.WORDS),
        "Names in the JSON": words.FIELDS,
    }
    return (
        *_list_measures(),
        *_list_columns(),
        *_list_attacks(),
        *(
            Topic(group, name, name, meaning)
            for group, meanings in groups.items()
            for name, meaning in meanings.items()
        ),
    )


def find_topics(text: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics of a printed name; [] if it has none.

    Compound names (`jacobian.norm:median <= +5%`, `robust@pgd,linf,2/255`) give a topic for each
    part, except radii and other values.
    """
    from lipaudit.report.cells import STATUS

    name = LIMIT.sub("", text).strip() or text
    # A name may contain signs (g1/||M||): try the whole before its parts.
    whole = _find_named(text, known) or _find_named(name, known)
    if whole:
        return whole
    first, *more = [piece.strip() for piece in PIECES.split(name)]
    bare = NUMBER.sub("", first)
    start = _find_named(bare, known) if more or bare != first else []
    rest = (t for piece in more for t in _find_named(piece, known) if t.name == t.title)
    if start:
        return list(dict.fromkeys([*start, *rest]))
    # A status and a domain in the form of footnotes: `exact at X`.
    status, _, domain = name.partition(" ")
    pair = [_find_named(status, known), _find_named(domain, known)]
    return [*pair[0], *pair[1]] if status in STATUS and all(pair) else []


def _find_named(name: str, known: Sequence[Topic]) -> list[Topic]:
    for spelled in (str, strip_name):
        near = [t for t in known if spelled(name) in map(spelled, t.names)]
        if near:
            near.sort(key=lambda topic: (topic.title != name, not topic.group))
            return [topic for topic in near if topic.group] or near
    return []


@cache
def strip_name(name: str) -> str:
    """Return a name without marks, case, spaces, hyphens and mathematical signs."""
    from lipaudit.report.cells import MARKS, write_math

    return re.sub(rf"[\s_\-]|^--|[{MARKS}]$", "", write_math(name)).lower()


def _list_measures() -> Iterator[Topic]:
    from lipaudit.measures import layouts, load_measures, option_types

    group = "Measures and sections"
    for name in load_measures():
        first, *others = (inspect.getdoc(option_types()[name]) or "").split("\n\n")
        texts = (p.replace("\n", " ") for p in others if not p.startswith("[dim]"))
        details = (" ".join(texts),) if others else ()
        yield Topic(group, name, name, first.replace("\n", " "), details)
    for section, layout in layouts().items():
        title = layout.title or section
        about = (layout.display.about,) if layout.display else ()
        yield Topic(group, section, section, title, about, (title,))


def _list_columns() -> Iterator[Topic]:
    """Yield every column, by row and then by sample; bounds are separate."""
    from lipaudit.measures import layouts
    from lipaudit.report.cells import STATUS, UNMEASURED

    columns = [
        *((name, "", layout.columns) for name, layout in layouts().items()),
        *((name, " (per sample)", layout.sample_columns) for name, layout in layouts().items()),
    ]
    for section, of, known in columns:
        for name, column in known.items():
            bound = section == "bounds" and not of and column.formula
            better = f"{column.better.capitalize()} is better." if column.better else ""
            reading = " ".join(filter(None, (*column.reading.splitlines(), better)))
            details = [f"How to read it: {reading}"] if reading else []
            if column.domain and column.format not in UNMEASURED:
                where = {"at X": "", "ball": "In the ball. "}.get(column.domain)
                where = f"Domain: {column.domain}. " if where is None else where
                details.append(f"What it does not say: {where}{STATUS[column.status]}")
            details += [f"{FORMULA}{column.formula}"] if column.formula else []
            group, full = "Bounds" if bound else f"Columns of {section}", f"{section}.{name}"
            words = full, section, column.label
            yield Topic(group, name, full + of, column.meaning, tuple(details), words)


def _list_attacks() -> Iterator[Topic]:
    from lipaudit.attacks.kinds import RESERVED, attack_kinds
    from lipaudit.report.words import ATTACKS

    for name, kind in attack_kinds().items():
        meaning = ATTACKS.get(name, f"An attack of the package {kind.package}.")
        yield Topic("Attacks", name, name, meaning, (f"Norms: {', '.join(kind.norms)}.",))
    for name in sorted(RESERVED):
        yield Topic("Attacks", name, name, ATTACKS[name])


def list_options(groups: Mapping[str, type[Settings]]) -> Iterator[Topic]:
    """Yield the options of groups, by command, and the words that they accept."""
    for owner, group in groups.items():
        # Help texts list values as `  NAME   what it is`.
        help_text = inspect.getdoc(group) or ""
        values = dict(re.findall(r"^  (\w+) {2,}(\S.*)$", help_text, re.MULTILINE))
        for option in group.options().values():
            flag = option.flags[0]
            default = f" Default: {option.shown}." if option.shown else ""
            title = f"{flag} of {owner}"
            words = (flag, *option.flags[1:], option.name)
            meaning = option.help + default
            yield Topic("Options", flag.removeprefix("--"), title, meaning, words=words)
            for value in option.values():
                meaning = values.get(value, option.help)
                yield Topic("", value, f"{value}, a value of {title}", meaning)
