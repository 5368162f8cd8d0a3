"""The pages of one report, of several side by side, and of samples: the worst, or one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lipaudit.errors import InputError, UsageError, suggestion
from lipaudit.report import blocks, cells, opening
from lipaudit.report.blocks import Block, Card, Cells, Chapter, Document, Paragraph
from lipaudit.report.markup import HTML
from lipaudit.report.opening import CHARACTERS, find_places, name_sample
from lipaudit.report.sections import find_display, name_chapter, show_section, show_sections
from lipaudit.tables import Column, Note, Report, Section, model_labels
from lipaudit.tables.columns import finite, group_values, middle, wilson
from lipaudit.tables.summary import SHOWN as MOST
from lipaudit.tables.summary import broken, worst
from lipaudit.tables.trials import FLAGS, TrialKey, is_repeat, parse_column

MORE = "--details prints all sections; lipaudit explain WORD says what a word means."
WORDS = Chapter(
    "words",
    "What do the words mean?",
    (
        Card(tuple(cells.STATUS.items())),
        Paragraph("lipaudit explain WORD explains any word of this page."),
    ),
    folded=True,
)
"""The end of every page."""
SHORT = ("model", "data", "run", "reason")
"""Facts on one screen."""


def make_page(report: Report, *, short: bool = False) -> Document:
    """Return the page of a report.

    Args:
        report: the report.
        short: for one screen: the answer, warnings and the scorecard. The page of a single
            measure is short enough.
    """
    notes = opening.list_top_notes(report)
    if short and sum("." not in section.measure for section in report.sections) > 1:
        return _shorten(report, notes, MORE)
    facts = opening.list_facts(report).items()
    answer, gaps = opening.write_answer(report), opening.describe_gaps(report)
    chapters = [opening.open_page(answer, gaps, facts, notes), *opening.show_scorecard(report)]
    if steps := tuple(opening.suggest_steps(report)):
        chapters.append(Chapter("next-steps", "What to do next", (blocks.Points(steps),)))
    warnings = [n for s in report.sections for n in s.notes if n.level == "warning"]
    # The top of the page shows these notes.
    chapters += list_chapters([report], [*opening.list_common_notes(report), *warnings])
    if broken(report) or any("norm" in s.samples and s.ids for s in report.sections):
        title = "Which samples are the least robust?"
        chapters.append(Chapter("worst-samples", title, show_worst(report)))
    return Document(f"lipaudit: {report.run.label}", (*chapters, WORDS))


def list_chapters(reports: Sequence[Report], shown: Sequence[Note] = ()) -> Iterator[Chapter]:
    """Yield the chapters of sections, with notes that the page does not show yet."""
    names = model_labels(reports) if len(reports) > 1 else [""]
    measures = dict.fromkeys(s.measure for report in reports for s in report.sections)
    for number, measure in enumerate(measures):
        pairs = ((k, r.section(measure)) for k, r in zip(names, reports, strict=True))
        sections = {name: section for name, section in pairs if section is not None}
        first = next(iter(sections.values()))
        parts = show_section(first, shown) if "" in sections else tuple(show_sections(sections))
        folded = number > 0 and find_display(first).folded
        yield Chapter(measure, name_chapter(first), parts, folded)


def make_card(report: Report) -> Document:
    """Return the page of `print(report)`: the model and the scorecard."""
    warnings = sum(note.level == "warning" for note in opening.list_top_notes(report))
    whole = "lipaudit.render(report, 'table') has all sections."
    return _shorten(report, (), f"Warnings: {warnings}. {whole}" if warnings else whole)


def _shorten(report: Report, notes: Iterable[Note], more: str) -> Document:
    facts = opening.list_facts(report)
    facts["run"] = f"{facts['status']}; {facts['run']}"
    short = ((name, facts[name]) for name in SHORT if name in facts)
    answer, gaps = opening.write_answer(report), opening.describe_gaps(report)
    start, end = opening.open_page(answer, gaps, short, notes), Chapter("", "", (Paragraph(more),))
    title = f"lipaudit: {report.run.label}"
    return Document(title, (start, *opening.show_scorecard(report), end))


# Several reports


def make_pages(
    reports: Sequence[Report], lead: Sequence[Chapter], *, short: bool = False
) -> Document:
    """Return the page of several reports side by side, after the leading chapters.

    Args:
        reports: the reports.
        lead: the chapters that come first.
        short: for one screen: without sections.
    """
    title, chapters = f"lipaudit: {len(reports)} models side by side", [*lead]
    if short:
        return Document(title, (*chapters, Chapter("", "", (Paragraph(MORE),))))
    chapters += list_chapters(reports)
    # The facts that differ are beside each other.
    facts = list(map(opening.list_facts, reports))
    keys = dict.fromkeys(name for each in facts for name in each)
    differing = [key for key in keys if len({each.get(key) for each in facts}) > 1]
    columns = {i: Column(name, "", format="s") for i, name in enumerate(model_labels(reports))}
    audited: list[Cells] = [
        {"fact": key} | {i: each.get(key) for i, each in enumerate(facts)} for key in differing
    ]
    if audited:
        table = blocks.make_table("", audited, columns)
        chapters.append(Chapter("models", "What was audited?", (table,)))
    return Document(title, (*chapters, WORDS))


def open_several(reports: Sequence[Report], answer: str, *, short: bool) -> Chapter:
    """Return the opening of a page of several reports: what they lack, share and warn of."""
    lacks = zip(model_labels(reports), map(opening.describe_gaps, reports), strict=True)
    gaps = (f"{name}: {gap}" for name, gap in lacks if gap)
    facts = [opening.list_facts(report).items() for report in reports]
    common = [fact for fact in facts[0] if all(fact in each for each in facts)]
    common = [fact for fact in common if fact[0] in SHORT or not short]
    outcome = Paragraph(answer, "answer") if answer else None
    return opening.open_page(outcome, " ".join(gaps), common, list_warnings(reports))


def list_warnings(reports: Sequence[Report]) -> list[Note]:
    """Return the warnings of several reports, each once, with the names unless all have it."""
    owners = group_values(
        (note, name)
        for name, report in zip(model_labels(reports), reports, strict=True)
        for note in opening.list_top_notes(report)
        if note.level == "warning"
    )
    leads = {n: "" if len(who) == len(reports) else ", ".join(who) for n, who in owners.items()}
    return [note.add_lead(lead) for note, lead in leads.items()]


# Samples


def list_names(samples: Sequence[str], places: Mapping[str, str]) -> list[Cells]:
    """Return the cells that name samples: the beginning of each id, and places if any is known."""
    placed = any(sample in places for sample in samples)
    place = {sample: {"place": places.get(sample)} if placed else {} for sample in samples}
    return [{"sample": sample[:CHARACTERS], **place[sample]} for sample in samples]


# Per-sample figures


CLASSES = ("label", "predicted")
"""Per-sample columns that contain a class number."""
SHARES = ("certified", "correct", "robust")
"""Yes-or-no columns whose mean is an accuracy."""
SHARE = Column("", "", format=".1%")


@dataclass(frozen=True)
class SampleColumn:
    """A per-sample column of a section: its format, and its values by sample id."""

    section: Section
    name: str
    column: Column
    values: Mapping[str, Any]

    def describe(self, sample: str) -> Cells:
        """Return the cells of a sample: the value, the typical value, and its rank."""
        (kind, trial), value, column = parse_column(self.name), self.values[sample], self.column
        # The gate and a comparison count distinct samples, too.
        known = finite(v for name, v in self.values.items() if not is_repeat(name))
        shown, typical, rank = cells.format_value(value, column), "", ""
        if kind in FLAGS:
            shown = cells.format_value(None if value is None else bool(value), column)
            typical = f"{sum(known) / len(known):.1%} yes" if known else ""
            if known and kind in SHARES:
                limits = cells.format_limits(*wilson(int(sum(known)), len(known)), SHARE)
                typical += f", {limits}"
        elif self.name in CLASSES:
            name = self.section.classes.get(value, "") if isinstance(value, int) else ""
            shown += f" ({name})" if name not in ("", shown) else ""
        elif column.format not in cells.UNMEASURED:
            typical = cells.format_value(middle(known), column)
        if column.better and kind not in FLAGS and finite([value]):
            # The worst comes first: larger is worse if lower is better.
            sign = 1 if column.better == "lower" else -1
            worse = sum(sign * other > sign * value for other in known)
            rank = f"{worse + 1} of {len(known)}"
        label = cells.write_math(column.label) + (f", {trial}" if trial else "")
        return {"figure": label, "value": shown, "all": typical, "from the worst": rank}


def list_columns(report: Report) -> list[SampleColumn]:
    """Return the per-sample columns of all sections."""
    return [
        SampleColumn(s, name, s.sample_column(name), dict(zip(s.ids, v, strict=True)))
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
    every, at = list_known(report), report.places
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
        advice = "`lipaudit inspect REPORT` lists the worst samples with their places."
        raise UsageError(f"the report has no sample {text!r}", suggestion(text, names, advice))
    some = ", ".join(f"{i[:CHARACTERS]} ({at[i]})" if i in at else i for i in named[:MOST])
    raise UsageError(f"{text!r} is {len(named)} samples", f"There are: {some}.")


def list_known(report: Report) -> list[str]:
    """Return the ids of all samples that were measured or have a place.

    Raises:
        InputError: no sample was measured; the hint has a command that records samples.
    """
    measured = [i for section in report.sections for i in section.ids]
    if not measured:
        text = "the report has no results for single samples"
        raise InputError(text, "Use a report of bounds, jacobian, attack, certify or audit.")
    return list(dict.fromkeys([*measured, *report.places]))


# Pictures and tokens


DRAWN = f"The {HTML} format has the pictures, and what attacks made of them."
SHADES = {"margin": "share of the gradient", "direction": "share of the steepest direction"}
"""Meaning of a token's shade, by the output of the Jacobian."""


def show_samples(report: Report, names: Sequence[str]) -> list[Block]:
    """Show samples that were kept: pictures and adversarial examples, and shaded tokens."""
    attack, jacobian = map(report.section, ("attack", "jacobian"))
    items, shown, places = list[blocks.Item](), list[Block](), report.places
    examples = attack.examples if attack else {}
    for name, example in ((name, examples[name]) for name in names if name in examples):
        trial = TrialKey.parse(example.trial)
        (true, predicted), before, after = example.classes, example.before, example.after
        by = "" if trial is None else f" by {trial.attack}, {trial.ball}"
        pictures = (
            ("sample", example.image),
            ("adversarial", example.adversarial),
            (f"difference × {cells.format_significant(example.times, '.2g')}", example.difference),
        )
        lines = [
            f"true class {true}: score {before[0]:.0%} became {after[0]:.0%}",
            f"taken for {predicted}: score {before[1]:.0%} became {after[1]:.0%}{by}",
        ]
        lines += [f'the text became "{example.text}"'] if example.text else []
        kept = tuple(pair for pair in pictures if pair[1])
        items.append(blocks.Item(name_sample(name, places), kept, tuple(lines)))
    if items:
        text = DRAWN if any(item.pictures for item in items) else ""
        shown.append(blocks.Gallery(text, tuple(items)))
    gradients = jacobian.gradients if jacobian else {}
    several, shaded = len(names) > 1, [name for name in names if name in gradients]
    for gradient, name in ((gradients[name], name) for name in shaded):
        column = cells.HEADINGS[SHADES[gradient.of]]
        if several and name == shaded[0]:
            shown.append(Paragraph(f"Their tokens with the largest {column.label}:"))
        texts = name_sample(name, places), gradient.tokens, gradient.shares
        shown.append(blocks.Passage(*texts, column, gradient.left_out, folded=several))
    return shown


# The worst samples, and the page of one


def show_worst(report: Report) -> tuple[Block, ...]:
    """Return the blocks of the worst samples: a table, and pictures or tokens where kept."""
    names, balls = worst(report), broken(report)
    rows = list_names(names, find_places(report))
    shown = {section.measure: find_display(section) for section in report.sections}
    known = [f for f in list_columns(report) if f.name in shown[f.section.measure].worst]
    figures = {(figure.section.measure, figure.name): figure for figure in known}
    for row, name in zip(rows, names, strict=True):
        fallen = sorted(balls.get(name, ()), key=lambda ball: -ball.radius.value)
        # The largest radii come first, so the last entry of each norm remains.
        smallest = ", ".join({ball.norm: ball.ball for ball in fallen}.values()) or None
        row |= {"broken": smallest} | {key: f.values.get(name) for key, f in figures.items()}
    columns = {key: figure.column for key, figure in figures.items()}
    table = blocks.make_table("The worst samples, the least robust first", rows, columns)
    return table, *show_samples(report, names)


def inspect_samples(report: Report, name: str, sample: str | None) -> Document:
    """Return a page of all figures of a sample, each beside the typical value of all samples.

    Args:
        report: the report.
        name: name of the report in hints.
        sample: id of the sample; None for the worst samples.
    """
    chapters, facts, what = list[Chapter](), dict[str, str](), "samples"
    if sample is None:
        count = len(list_known(report))
        more = f"For one of the {count}, use lipaudit inspect {name} SAMPLE (its id or place)."
        parts = (*show_worst(report), Paragraph(more))
        chapters = [Chapter("worst-samples", "Which samples are the least robust?", parts)]
    else:
        for section in report.sections:
            figures = [f for f in list_columns(report) if f.section is section]
            rows = [f.describe(sample) for f in figures if f.values.get(sample, "") != ""]
            if rows:
                table = blocks.make_table("", rows)
                chapters.append(Chapter(section.measure, name_chapter(section), (table,)))
        if pictures := show_samples(report, [sample]):
            chapters.append(Chapter("pictures", "What does the sample look like?", pictures))
        origin = {"place": report.places.get(sample), "text": report.texts.get(sample)}
        facts = {"sample": sample} | {name: text for name, text in origin.items() if text}
        what = f"sample {sample[:CHARACTERS]}"
    known = opening.list_facts(report)
    facts |= {name: known[name] for name in ("model", "data")}
    gaps, notes = opening.describe_gaps(report), opening.list_top_notes(report)
    start = opening.open_page(None, gaps, facts.items(), notes)
    return Document(f"lipaudit: {what} of {report.run.model.spec}", (start, *chapters))


def record_sample(report: Report, sample: str) -> dict[str, Any]:
    """Return the figures of a sample as plain values."""
    places, texts = (known.get(sample, "") for known in (report.places, report.texts))
    kept = {
        kind: one.model_dump(mode="json", exclude={"image", "adversarial", "difference"})
        for section in report.sections
        for kind, each in (("example", section.examples), ("gradient", section.gradients))
        if (one := each.get(sample)) is not None
    }
    figures = [
        {"measure": f.section.measure, "name": f.name, "value": f.values[sample]}
        | ({"class": f.section.classes.get(f.values[sample])} if f.name in CLASSES else {})
        for f in list_columns(report)
        if sample in f.values
    ]
    return {"id": sample, "place": places, "text": texts, "figures": figures, **kept}
