"""The samples of a report: the worst ones, and all figures of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lipaudit.errors import InputError, UsageError, suggestion
from lipaudit.report.blocks import (
    Block,
    Chapter,
    Document,
    Gallery,
    Item,
    Paragraph,
    Passage,
    Table,
)
from lipaudit.report.cells import (
    UNMEASURED,
    format_limits,
    format_significant,
    format_value,
    write_math,
)
from lipaudit.report.page.chapters import find_plan
from lipaudit.report.page.facts import (
    CHARACTERS,
    describe_gaps,
    find_places,
    list_facts,
    list_leading_notes,
    name_sample,
)
from lipaudit.tables import Column, Report
from lipaudit.tables.figures import finite, middle, order, wilson
from lipaudit.tables.report import Example
from lipaudit.tables.samples import FLAGS, is_repeat
from lipaudit.tables.trials import TrialKey, parse_column
from lipaudit.tables.worst import SHOWN as MOST
from lipaudit.tables.worst import broken, worst

SAMPLE = Column(label="sample", meaning="Sample id.", format="s")
PLACE = Column(label="place", meaning="Where the sample is found in the data.", format="s")


def add_places(table: Table, places: Mapping[str, str]) -> Table:
    """Shorten the ids of the column `SAMPLE`, and write the place of each sample beside it."""
    at = table.columns.index(SAMPLE)
    found = any(row[at] in places for row in table.rows)
    rows = tuple(
        (*r[:at], r[at][:CHARACTERS], *([places.get(r[at])] if found else []), *r[at + 1 :])
        for r in table.rows
    )
    columns = (*table.columns[: at + 1], *([PLACE] if found else []), *table.columns[at + 1 :])
    return replace(table, columns=columns, rows=rows)


# Per-sample figures


CLASSES = ("label", "predicted")
"""Per-sample columns that contain a class number."""
SHARES = ("certified", "correct", "robust")
"""Yes-or-no columns whose mean is an accuracy."""


@dataclass(frozen=True)
class Figure:
    """A per-sample column of a section: its format, and its values by sample id."""

    section: str
    name: str
    column: Column
    values: Mapping[str, Any]
    classes: Mapping[int, str]

    @property
    def label(self) -> str:
        """Return its heading, with its trial or ball."""
        trial, label = parse_column(self.name)[1], write_math(self.column.label)
        return label if trial is None else f"{label}, {trial}"

    @property
    def numbers(self) -> list[float]:
        """Return the values of distinct samples, as the gate and a comparison count them."""
        return finite(value for name, value in self.values.items() if not is_repeat(name))

    @property
    def flag(self) -> bool:
        """Return whether its values are truth values."""
        return parse_column(self.name)[0] in FLAGS

    def rank(self, sample: str) -> str:
        """Return the rank of a sample, the worst first; None without a better direction."""
        if self.column.better is None or self.flag or not finite([self.values[sample]]):
            return ""
        # Larger is worse if lower is better.
        sign = 1 if self.column.better == "lower" else -1
        own = sign * order(self.values[sample])
        worse = sum(sign * value > own for value in self.numbers)
        return f"{worse + 1} of {len(self.numbers)}"

    def name_class(self, number: Any) -> str:
        """Return the number of a class, and its name if there is one."""
        name = self.classes.get(number, "") if isinstance(number, int) else ""
        shown = format_value(number, self.column)
        return f"{shown} ({name})" if name not in ("", shown) else shown

    def cells(self, sample: str) -> tuple[str, ...]:
        """Return the label, the value of a sample, the typical value, and its rank."""
        value, known = self.values[sample], self.numbers
        if self.flag:
            said = format_value(None if value is None else bool(value), self.column)
            return self.label, said, self._share(known), ""
        if self.name in CLASSES:
            return self.label, self.name_class(value), "", ""
        counted = self.column.format in UNMEASURED
        typical = "" if counted else format_value(middle(known), self.column)
        return self.label, format_value(value, self.column), typical, self.rank(sample)

    def _share(self, known: list[float]) -> str:
        """Format a share, with limits if it is an accuracy."""
        if not known:
            return ""
        share = f"{sum(known) / len(known):.1%} yes"
        if parse_column(self.name)[0] not in SHARES:
            return share
        ends = wilson(int(sum(known)), len(known))
        return f"{share}, {format_limits(*ends, Column('', '', format='.1%'))}"


def list_figures(report: Report) -> list[Figure]:
    """Return the per-sample columns of all sections."""
    return [
        Figure(
            s.measure,
            name,
            s.sample_column(name),
            dict(zip(s.ids, values, strict=True)),
            s.classes,
        )
        for s in report.sections
        for name, values in s.samples.items()
        if name != "ids"
    ]


# Choosing a sample


def choose_sample(report: Report, said: str) -> str:
    """Return the id of a sample from its id, its first characters, or its place.

    Raises:
        InputError: the report has no samples.
        UsageError: no sample has this name, or several have.
    """
    require_samples(report)
    every, at = list_known(report), report.found("place")
    ways: tuple[Callable[[str], bool], ...] = (
        lambda i: i == said,
        # The number of a place, or the name of a file: 7 of "index 7", 7.png of "cat/7.png".
        lambda i: (
            i in at
            and said in (at[i], at[i].partition(",")[0].replace("/", " ").rpartition(" ")[2])
        ),
        lambda i: i.startswith(said),
    )
    named = next(filter(None, ([i for i in every if way(i)] for way in ways)), [])
    if len(named) == 1:
        return named[0]
    if not named:
        names = [*(i[:CHARACTERS] for i in every), *at.values()]
        advice = (
            "Give its id or its place in the data. `lipaudit inspect REPORT` lists the "
            "worst samples."
        )
        raise UsageError(f"the report has no sample {said!r}", suggestion(said, names, advice))
    some = ", ".join(f"{i[:CHARACTERS]} ({at[i]})" if i in at else i for i in named[:MOST])
    raise UsageError(f"{said!r} is {len(named)} samples", f"There are: {some}.")


def list_known(report: Report) -> list[str]:
    """Return the ids of all samples that were measured or have a place."""
    measured = (i for section in report.sections for i in section.ids)
    return list(dict.fromkeys([*measured, *report.found("place")]))


def has_ranking(report: Report) -> bool:
    """Say whether a report can rank its samples."""
    return any(f.name == "norm" for f in list_figures(report)) or bool(broken(report))


def require_samples(report: Report) -> None:
    """Refuse a report that has no samples.

    Raises:
        InputError: the hint has a command that records samples.
    """
    if not any(section.ids for section in report.sections):
        raise InputError(
            "the report has no results for single samples",
            "Use a report of bounds, jacobian, attack, certify or audit.",
        )


# Pictures and tokens


DRAWN = "The html format has the pictures, and what attacks made of them."
SHADES = {
    "margin": Column(
        label="share of the gradient", meaning="Of the margin, per token.", format=".1%"
    ),
    "direction": Column(
        label="share of the steepest direction",
        meaning="Along which the output changes most, per token.",
        format=".1%",
        status="estimate",
    ),
}
"""Meaning of a token's shade, by the output of the Jacobian."""


def make_gallery(report: Report, names: Sequence[str]) -> list[Gallery]:
    """Show samples that are pictures, their adversarial examples, and the difference."""
    section = report.section("attack")
    examples = section.examples if section else {}
    items = tuple(_make_item(report, name, examples[name]) for name in names if name in examples)
    text = DRAWN if any(item.pictures for item in items) else ""
    return [Gallery(text, items)] if items else []


def list_passages(report: Report, names: Sequence[str]) -> list[Passage]:
    """Show the tokens of samples with their shares of the gradient."""
    section, places = report.section("jacobian"), report.found("place")
    found = [(name, section.gradients.get(name)) for name in names] if section else []
    folded = len(names) > 1
    return [
        Passage(name_sample(i, places), g.tokens, g.shares, SHADES[g.of], g.left_out, folded)
        for i, g in found
        if g is not None
    ]


def _make_item(report: Report, sample: str, example: Example) -> Item:
    trial = TrialKey.parse(example.trial)
    (true, said), before, after = example.classes, example.before, example.after
    by = "" if trial is None else f" by {trial.attack}, {trial.ball}"
    pictures = (
        ("sample", example.image),
        ("adversarial", example.adversarial),
        (f"difference × {format_significant(example.times, '.2g')}", example.difference),
    )
    became = [f'the text became "{example.text}"'] if example.text else []
    return Item(
        title=name_sample(sample, report.found("place")),
        pictures=tuple(pair for pair in pictures if pair[1]),
        lines=(
            f"true class {true}: score {before[0]:.0%} became {after[0]:.0%}",
            f"taken for {said}: score {before[1]:.0%} became {after[1]:.0%}{by}",
            *became,
        ),
    )


# The worst samples, and the page of one


SHOWN = (
    ("certify", "radius"),
    ("jacobian", "norm"),
    ("jacobian", "loss"),
    ("jacobian", "margin"),
    ("jacobian", "radius_first_order"),
)
"""Columns of the table of worst samples, by section."""
RANKED = {
    "norm": "largest ||J||",
    "radius": "smallest certified radius",
}
"""Order of samples broken in equally many balls: by the first of these columns in the report."""
BROKEN = Column(
    label="broken",
    meaning="Smallest radius, for each norm, at which an attack broke it.",
    format="s",
)
FIGURES = (
    Column(label="figure", meaning="A figure of the sample.", format="s"),
    Column(label="value", meaning="Value of the sample.", format=""),
    Column(
        label="all",
        meaning="Median over all distinct samples, or the share of yes with 95 % limits.",
        format="",
    ),
    Column(label="from the worst", meaning="Rank among all samples, the worst first.", format=""),
)


def tabulate_worst(report: Report) -> Table:
    """Tabulate the worst samples."""
    balls = broken(report)
    kept = [f for f in list_figures(report) if (f.section, f.name) in SHOWN]
    rows = []
    for sample in worst(report):
        fallen = sorted(balls.get(sample, ()), key=lambda ball: -ball.radius.value)
        smallest = {
            ball.norm: ball.ball for ball in fallen
        }  # the largest radii come first: the last entry of each norm remains
        figures = (figure.values.get(sample) for figure in kept)
        rows.append((sample, ", ".join(smallest.values()) or None, *figures))
    columns = (SAMPLE, BROKEN, *(f.column for f in kept))
    table = Table("The worst samples", columns, tuple(rows))
    return add_places(table, find_places(report))


def show_worst(report: Report) -> tuple[Block, ...]:
    """Return the blocks of the worst samples: a table, and pictures or tokens where kept."""
    names = worst(report)
    order, written = _describe_order(report), list_passages(report, names)
    about = [f"Their tokens with the largest {written[0].column.label}:"] if written else []
    return (
        *([Paragraph(order)] if order else []),
        tabulate_worst(report),
        *make_gallery(report, names),
        *map(Paragraph, about),
        *written,
    )


def _describe_order(report: Report) -> str:
    """Say which samples come first; empty if no figure ranks them."""
    columns = {name for section in report.sections for name in section.samples}
    first = ["samples broken in most balls"] if broken(report) else []
    first += [text for column, text in RANKED.items() if column in columns][:1]
    last = "; misclassified samples are last" if "correct" in columns else ""
    return write_math(f"Sorted by: {', then '.join(first)}{last}.") if first else ""


def make_overview(report: Report, name: str) -> Document:
    """Return a page of the worst samples, with the command that shows one."""
    require_samples(report)
    count = len(list_known(report))
    more = Paragraph(
        f"For one of the {count}, use lipaudit inspect {name} SAMPLE (its id or place)."
    )
    blocks = (*show_worst(report), more)
    chapter = Chapter("worst-samples", "Which samples are the least robust?", blocks)
    return _make_document(report, "samples", {}, [chapter])


def _make_document(
    report: Report, what: str, facts: Mapping[str, str], chapters: Sequence[Chapter]
) -> Document:
    known = {name: text for name, text in list_facts(report) if name in ("model", "data")}
    return Document(
        title=f"lipaudit: {what} of {report.run.model.spec}",
        facts=(*facts.items(), *known.items()),
        findings=(),
        chapters=tuple(chapters),
        partial=describe_gaps(report),
        notes=list_leading_notes(report),
    )


def inspect_sample(report: Report, sample: str) -> Document:
    """Return a page of all figures of a sample, each beside the typical value of all samples."""
    chapters = []
    for section in report.sections:
        figures = [f for f in list_figures(report) if f.section == section.measure]
        rows = [f.cells(sample) for f in figures if f.values.get(sample, "") != ""]
        if rows:
            table = Table("", FIGURES, tuple(rows))
            title = find_plan(section.measure, section.title).question
            chapters.append(Chapter(section.measure, title, (table,)))
    kept: tuple[Block, ...] = (*make_gallery(report, [sample]), *list_passages(report, [sample]))
    if kept:
        chapters.append(Chapter("pictures", "What does the sample look like?", kept))
    facts = {"sample": sample}
    facts |= {k: found[sample] for k in ("place", "text") if sample in (found := report.found(k))}
    return _make_document(report, f"sample {sample[:CHARACTERS]}", facts, chapters)


def record_sample(report: Report, sample: str) -> dict[str, Any]:
    """Return the figures of a sample as plain values."""
    of = [figure for figure in list_figures(report) if sample in figure.values]
    found = {name: report.found(name).get(sample, "") for name in ("place", "text")}
    kept = {
        kind: one.model_dump(mode="json", exclude={"image", "adversarial", "difference"})
        for section in report.sections
        for kind, each in (("example", section.examples), ("gradient", section.gradients))
        if (one := each.get(sample)) is not None
    }
    figures = [
        {"measure": f.section, "name": f.name, "value": f.values[sample]}
        | ({"class": f.classes.get(f.values[sample])} if f.name in CLASSES else {})
        for f in of
    ]
    return {"id": sample, **found, "figures": figures, **kept}
