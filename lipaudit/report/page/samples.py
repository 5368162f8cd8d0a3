"""The samples of a report: the worst ones, and all figures of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    make_table,
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
from lipaudit.tables.figures import finite, middle, wilson
from lipaudit.tables.trials import FLAGS, TrialKey, is_repeat, parse_column
from lipaudit.tables.worst import SHOWN as MOST
from lipaudit.tables.worst import broken, worst

SAMPLE = Column(label="sample", meaning="Sample id.", format="s")
PLACE = Column(label="place", meaning="Where the sample is found in the data.", format="s")


def list_names(ids: Sequence[str], places: Mapping[str, str]) -> list[tuple[Column, list[Any]]]:
    """Return the columns that name samples in a table: the beginning of each id, and its place."""
    names: list[tuple[Column, list[Any]]] = [(SAMPLE, [name[:CHARACTERS] for name in ids])]
    found = any(name in places for name in ids)
    return [*names, (PLACE, [places.get(name) for name in ids])] if found else names


# Per-sample figures


CLASSES = ("label", "predicted")
"""Per-sample columns that contain a class number."""
SHARES = ("certified", "correct", "robust")
"""Yes-or-no columns whose mean is an accuracy."""
SHARE = Column("", "", format=".1%")


@dataclass(frozen=True)
class Figure:
    """A per-sample column of a section: its format, and its values by sample id."""

    section: str
    name: str
    column: Column
    values: Mapping[str, Any]
    classes: Mapping[int, str]

    def describe(self, sample: str) -> tuple[str, ...]:
        """Return the label, the value of a sample, the typical value, and its rank."""
        (kind, trial), value, column = parse_column(self.name), self.values[sample], self.column
        # The gate and a comparison count distinct samples, too.
        known = finite(v for name, v in self.values.items() if not is_repeat(name))
        shown, typical, rank = format_value(value, column), "", ""
        if kind in FLAGS:
            shown = format_value(None if value is None else bool(value), column)
            typical = f"{sum(known) / len(known):.1%} yes" if known else ""
            if known and kind in SHARES:
                limits = format_limits(*wilson(int(sum(known)), len(known)), SHARE)
                typical += f", {limits}"
        elif self.name in CLASSES:
            name = self.classes.get(value, "") if isinstance(value, int) else ""
            shown += f" ({name})" if name not in ("", shown) else ""
        elif column.format not in UNMEASURED:
            typical = format_value(middle(known), column)
        if column.better and kind not in FLAGS and finite([value]):
            # The worst comes first: larger is worse if lower is better.
            sign = 1 if column.better == "lower" else -1
            worse = sum(sign * other > sign * value for other in known)
            rank = f"{worse + 1} of {len(known)}"
        label = write_math(column.label)
        return f"{label}, {trial}" if trial else label, shown, typical, rank


def list_figures(report: Report) -> list[Figure]:
    """Return the per-sample columns of all sections."""
    return [
        Figure(s.measure, name, s.sample_column(name), dict(zip(s.ids, v, strict=True)), s.classes)
        for s in report.sections
        for name, v in s.samples.items()
        if name != "ids"
    ]


# Choosing a sample


def choose_sample(report: Report, text: str) -> str:
    """Return the id of a sample from its id, its first characters, or its place.

    Raises:
        InputError: the report has no samples.
        UsageError: no sample has this name, or several have.
    """
    require_samples(report)
    every, at = list_known(report), report.found("place")
    ways: tuple[Callable[[str], bool], ...] = (
        lambda i: i == text,
        # The number of a place, or the name of a file: 7 of "index 7", 7.png of "cat/7.png".
        lambda i: (
            i in at
            and text in (at[i], at[i].partition(",")[0].replace("/", " ").rpartition(" ")[2])
        ),
        lambda i: i.startswith(text),
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
        raise UsageError(f"the report has no sample {text!r}", suggestion(text, names, advice))
    some = ", ".join(f"{i[:CHARACTERS]} ({at[i]})" if i in at else i for i in named[:MOST])
    raise UsageError(f"{text!r} is {len(named)} samples", f"There are: {some}.")


def list_known(report: Report) -> list[str]:
    """Return the ids of all samples that were measured or have a place."""
    measured = (i for section in report.sections for i in section.ids)
    return list(dict.fromkeys([*measured, *report.found("place")]))


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
    section, places, items = report.section("attack"), report.found("place"), []
    examples = section.examples if section else {}
    for name, example in ((name, examples[name]) for name in names if name in examples):
        trial = TrialKey.parse(example.trial)
        (true, predicted), before, after = example.classes, example.before, example.after
        by = "" if trial is None else f" by {trial.attack}, {trial.ball}"
        pictures = (
            ("sample", example.image),
            ("adversarial", example.adversarial),
            (f"difference × {format_significant(example.times, '.2g')}", example.difference),
        )
        lines = [
            f"true class {true}: score {before[0]:.0%} became {after[0]:.0%}",
            f"taken for {predicted}: score {before[1]:.0%} became {after[1]:.0%}{by}",
        ]
        lines += [f'the text became "{example.text}"'] if example.text else []
        kept = tuple(pair for pair in pictures if pair[1])
        items.append(Item(name_sample(name, places), kept, tuple(lines)))
    text = DRAWN if any(item.pictures for item in items) else ""
    return [Gallery(text, tuple(items))] if items else []


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


def show_worst(report: Report) -> tuple[Block, ...]:
    """Return the blocks of the worst samples: a table, and pictures or tokens where kept."""
    names, balls, smallest = worst(report), broken(report), []
    for name in names:
        fallen = sorted(balls.get(name, ()), key=lambda ball: -ball.radius.value)
        # The largest radii come first, so the last entry of each norm remains.
        smallest.append(", ".join({ball.norm: ball.ball for ball in fallen}.values()) or None)
    figures = [f for f in list_figures(report) if (f.section, f.name) in SHOWN]
    cells = [
        *list_names(names, find_places(report)),
        (BROKEN, smallest),
        *((figure.column, [figure.values.get(name) for name in names]) for figure in figures),
    ]
    # The order: by balls in which attacks broke a sample, then by the first figure of `RANKED`.
    columns = {column for section in report.sections for column in section.samples}
    by = ["samples broken in most balls"] if balls else []
    by += [text for column, text in RANKED.items() if column in columns][:1]
    last = "; misclassified samples are last" if "correct" in columns else ""
    order = write_math(f"Sorted by: {', then '.join(by)}{last}.")
    passages = list_passages(report, names)
    about = f"Their tokens with the largest {passages[0].column.label}:" if passages else ""
    return (
        *([Paragraph(order)] if by else []),
        make_table("The worst samples", cells),
        *make_gallery(report, names),
        *([Paragraph(about)] if about else []),
        *passages,
    )


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


def inspect_sample(report: Report, sample: str) -> Document:
    """Return a page of all figures of a sample, each beside the typical value of all samples."""
    chapters = []
    for section in report.sections:
        figures = [f for f in list_figures(report) if f.section == section.measure]
        rows = [f.describe(sample) for f in figures if f.values.get(sample, "") != ""]
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


def record_sample(report: Report, sample: str) -> dict[str, Any]:
    """Return the figures of a sample as plain values."""
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
        for f in list_figures(report)
        if sample in f.values
    ]
    return {"id": sample, **found, "figures": figures, **kept}
