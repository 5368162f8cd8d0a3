"""The topics of `lipaudit explain`: one for every name on pages, in tables and in JSON.

Most topics are columns, measures and options, which describe themselves. words.toml explains the
other words.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from lipaudit.attacks.kinds import RESERVED, attack_kinds
from lipaudit.gate.rules import find_words
from lipaudit.measures import find_column, layouts, list_headlines, load_measures
from lipaudit.report.cells import HEADINGS, MARKS, STATUS, UNMEASURED, read_words, write_math
from lipaudit.settings.option import Settings
from lipaudit.tables import Column
from lipaudit.tables.plugins import load_wings

PIECES = re.compile(r"[@:,;=]+")
LIMIT = re.compile(r"(?:<=|>=).*")
ARGUMENTS = re.compile(r"(?<=module input) \(.*\)$")
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
SOURCE = "Source: "
"""Beginning of the line of a bound that names its source."""
DOMAINS = {"at X": "", "ball": "In the ball. "}
"""Sentences on where a figure holds; at X, the sentence on its status says it."""


@cache
def list_topics() -> tuple[Topic, ...]:
    """Return all topics, in the order of the index."""
    return (
        *_list_measures(),
        *_list_columns(),
        *_list_attacks(),
        *_list_headlines(),
        *_list_words(),
    )


def find_topics(text: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics that explain a name from a page, a table or a file; [] if none does.

    Compound names (`jacobian.norm:median <= +5%`, `robust@pgd,linf,2/255`) give a topic for each
    part, except radii and other values.

    Args:
        text: the name.
        known: all topics.
    """
    # Without the limit of a rule (<= +5%), and without the arguments in `module input (x, y)`.
    name = ARGUMENTS.sub("", LIMIT.sub("", text)).strip() or text
    # A name may contain signs (g1/||M||): try the whole before its parts.
    return (
        _find_named(text, known)
        or _find_named(name, known)
        or _find_parts(name, known)
        or _find_footnote(name, known)
    )


def _find_parts(name: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics of the parts of a name such as `robust@pgd,linf,2/255`, or `layer 3`.

    The result is empty if the first part, without numbers, names no topic.
    """
    # The parts between signs such as @ and :.
    first, *others = map(str.strip, PIECES.split(name))
    topics = _find_named(NUMBER.sub("", first), known)
    if topics:
        for part in others:
            # Later parts count only if they name a topic in full, so that name and title are
            # equal: a short name that several columns share would not say which one is meant.
            topics += [t for t in _find_named(part, known) if t.name == t.title]
    return list(dict.fromkeys(topics))


def _find_footnote(name: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics of a footnote: of a status and a domain, such as `exact at X`."""
    status, _, domain = name.partition(" ")
    domains = _find_named(domain, known)
    if status not in STATUS or not domains:
        return []
    return _find_named(status, known) + domains


def _find_named(name: str, known: Sequence[Topic]) -> list[Topic]:
    """Return the topics with this name, those with the name as title first.

    If no topic has exactly this name, names are compared without case, spaces and signs.
    """
    topics = [topic for topic in known if name in topic.names]
    if not topics:
        plain = strip_name(name)
        topics = [topic for topic in known if plain in map(strip_name, topic.names)]
    # Values of options have no group: they count only if no other topic has the name.
    topics = [topic for topic in topics if topic.group] or topics
    return sorted(topics, key=lambda topic: topic.title != name)


@cache
def strip_name(name: str) -> str:
    """Return a name without marks, case, spaces, hyphens and mathematical signs."""
    text = write_math(name).lower()
    return re.sub(rf"[\s_\-]|[{MARKS}]$", "", text)


def _list_measures() -> Iterator[Topic]:
    """Yield a topic for each measure, with the text of its help, then for each section."""
    group = "Measures and sections"
    for name, measure in load_measures().items():
        text = inspect.getdoc(measure.options) or ""
        # Paragraphs with indented lines are examples and lists, which are left out.
        paragraphs = [each.replace("\n", " ") for each in text.split("\n\n") if "\n " not in each]
        meaning, *more = paragraphs
        details = (" ".join(more),) if more else ()
        yield Topic(group=group, name=name, title=name, meaning=meaning, details=details)
    for section, layout in layouts().items():
        title = layout.title or section
        details = (layout.display.about,) if layout.display else ()
        yield Topic(
            group=group,
            name=section,
            title=section,
            meaning=title,
            details=details,
            words=(title,),
        )


def _list_columns() -> Iterator[Topic]:
    """Yield a topic for every column of rows, then of samples; bounds have their own group."""
    for section, layout in layouts().items():
        for name, column in layout.columns.items():
            group = f"Columns of {section}"
            if section == "bounds" and column.formula:
                group = "Bounds"
            yield _describe_column(group, section, name, column)
    for section, layout in layouts().items():
        for name, column in layout.sample_columns.items():
            topic = _describe_column(f"Columns of {section}", section, name, column)
            yield replace(topic, title=f"{topic.title} (per sample)")


def _describe_column(group: str, section: str, name: str, column: Column) -> Topic:
    """Return the topic of a column: how to read it, what it does not say, and its formula.

    Args:
        group: heading of the topic in the index.
        section: name of the section that has the column.
        name: name of the column.
        column: its description.
    """
    full = f"{section}.{name}"
    return Topic(
        group=group,
        name=name,
        title=full,
        meaning=column.meaning,
        details=tuple(_list_details(column)),
        words=(full, section, column.label, find_words(full)),
    )


def _list_details(column: Column) -> list[str]:
    """Return paragraphs on a column: how to read it, what it does not say, formula, sources.

    The text `reading` of the column has lines on how to read it, and for a bound lines with its
    sources.
    """
    lines = column.reading.splitlines()
    sources = [line for line in lines if line.startswith(SOURCE)]
    reading = [line for line in lines if line not in sources]
    if column.better:
        reading.append(f"{column.better.capitalize()} is better.")
    details = []
    if reading:
        details.append(f"How to read it: {' '.join(reading)}")
    if column.domain and column.format not in UNMEASURED:
        where = DOMAINS.get(column.domain, f"Domain: {column.domain}. ")
        details.append(f"What it does not say: {where}{STATUS[column.status]}")
    if column.formula:
        details.append(f"{FORMULA}{column.formula}")
    return details + sources


def _list_attacks() -> Iterator[Topic]:
    """Yield the attacks with their norms, then the presets."""
    group = "Attacks"
    known = read_words()["attacks"]
    for name, kind in attack_kinds().items():
        meaning = known.get(name, f"An attack of the package {kind.package}.")
        norms = f"Norms: {', '.join(kind.norms)}."
        yield Topic(group=group, name=name, title=name, meaning=meaning, details=(norms,))
    for name in sorted(RESERVED):  # words of --attack that name several attacks, or none
        yield Topic(group=group, name=name, title=name, meaning=known[name])


def _list_headlines() -> Iterator[Topic]:
    """Yield a topic for each figure of a scorecard: what its label means.

    A headline describes a main figure of a section. Its label is the name of the figure on a
    scorecard; a headline without a label is on no scorecard. Headlines of several sections may
    have the same label: the topic is then about the first of them, in the order of scorecards.
    """
    labels = set()  # the labels that have a topic already
    for section, headline in list_headlines():
        label = headline.label
        if label and label not in labels:
            labels.add(label)
            meaning = headline.meaning or find_column(f"{section}.{headline.column}").meaning
            # Other names that find the topic: the label up to a comma (`steepest attention head`
            # of `steepest attention head, ‖J‖`), and the name of the figure in JSON.
            words = (label.partition(",")[0], headline.name)
            # The label is both the name of the topic in the index, and its title.
            yield Topic(
                group="Figures of scorecards",
                name=label,
                title=label,
                meaning=meaning,
                words=words,
            )


def _list_words() -> Iterator[Topic]:
    """Yield the words that no other topic explains; words of wings (plug-ins) come last."""
    headings = {label: column.meaning for label, column in HEADINGS.items()}
    # Each glossary has groups of words, and each group the meaning of every word.
    glossaries = [
        {"How far a figure is proven": STATUS, "Words of pages": headings},
        read_words()["words"],
        *(wing.topics for wing in load_wings().values()),
    ]
    for glossary in glossaries:
        for group, meanings in glossary.items():
            for word, meaning in meanings.items():
                yield Topic(group=group, name=word, title=word, meaning=meaning)


def list_options(groups: Mapping[str, type[Settings]]) -> Iterator[Topic]:
    """Yield the options of groups, by command, and the words that they accept."""
    for owner, group in groups.items():
        # Help texts list values as `  NAME   what it is`.
        help_text = inspect.getdoc(group) or ""
        values = dict(re.findall(r"^  (\w+) {2,}(\S.*)$", help_text, re.MULTILINE))
        for option in group.options().values():
            flag = option.flags[0]
            title = f"{flag} of {owner}"
            words = (*option.flags, option.name)
            meaning = option.help
            if option.shown:
                meaning += f" Default: {option.shown}."
            yield Topic(
                group="Options",
                name=flag.removeprefix("--"),
                title=title,
                meaning=meaning,
                words=words,
            )
            for value in option.values():
                meaning = values.get(value, option.help)
                # The group is empty: values are not in the index.
                yield Topic(
                    group="", name=value, title=f"{value}, a value of {title}", meaning=meaning
                )
