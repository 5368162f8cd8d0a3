"""The pages of one report, of several side by side, and of samples: the worst, or one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lipaudit.errors import InputError, UsageError, suggestion
from lipaudit.measures import list_headlines, summarise
from lipaudit.report.blocks import (
    Block,
    Card,
    Cells,
    Chapter,
    Document,
    Gallery,
    Heatmap,
    Item,
    Paragraph,
    Passage,
    Table,
    list_notes,
    list_steps,
)
from lipaudit.report.cells import (
    HEADINGS,
    MISSING,
    STATUS,
    UNMEASURED,
    format_limits,
    format_significant,
    format_value,
    pick_columns,
    write_math,
)
from lipaudit.report.groups import show_groups
from lipaudit.report.markup import HTML
from lipaudit.report.opening import (
    describe_gaps,
    list_common_notes,
    list_facts,
    list_top_notes,
    open_page,
    show_scorecard,
    suggest_steps,
    write_answer,
)
from lipaudit.report.pictures import compare_steepness
from lipaudit.report.reference import compare_with_known
from lipaudit.report.rows import tabulate_rows
from lipaudit.report.scales import harmonise
from lipaudit.report.sections import (
    find_display,
    name_chapter,
    show_brief,
    show_section,
    show_sections,
)
from lipaudit.tables import Column, Note, Report, Section, model_labels, summary
from lipaudit.tables.columns import finite, group_values, limit_robust, middle, wilson
from lipaudit.tables.columns import order as order_values
from lipaudit.tables.formats import (
    CHARACTERS,
    STATUSES,
    describe_places,
    format_count,
    name_sample,
)
from lipaudit.tables.report import Example
from lipaudit.tables.trials import FLAGS, TrialKey, is_repeat, parse_column
from lipaudit.tables.weakest import SHOWN as MOST
from lipaudit.tables.weakest import can_rank, find_broken, find_worst

MORE = "--details prints all sections; lipaudit explain WORD says what a word means."
END = Chapter(name="", title="", blocks=(Paragraph(MORE),))
"""The end of a page for one screen."""
WORDS = Chapter(
    "words",
    "What do the words mean?",
    (
        Card([(STATUSES.get(name, name), text) for name, text in STATUS.items()]),
        Paragraph("lipaudit explain WORD explains any word of this page."),
    ),
    folded=True,
)
"""The end of every other page."""
SHORT = ("model", "data", "run", "reason")
"""Facts on one screen."""
LAST = 1000
"""The place of a chapter without a figure on the scorecard."""
OF_SAMPLE = pick_columns("figure", "value", "all", "from the worst")
"""The columns of the figures of one sample."""


def make_page(report: Report, *, short: bool = False) -> Document:
    """Return the page of a report.

    Args:
        report: the report.
        short: whether the page has to fit one screen. A report of several measures then has the
            answer, warnings and the scorecard; a report of one measure has its tables.
    """
    notes = list_top_notes(report)
    measures = report.main_sections
    if short and len(measures) > 1:
        return _shorten(report, notes=notes, more=MORE)
    if short and measures:
        return _make_brief(report, measures[0])
    facts = list_facts(report).items()
    figures = summarise(report)
    chapters = [_open_report(report, figures, facts, notes), *show_scorecard(figures)]
    chapters += list_steps(suggest_steps(report, figures))
    chapters += compare_with_known(report, figures)
    # The top of the page shows these notes, so the chapters leave them out.
    chapters += harmonise(list_chapters([report], shown=list_common_notes(report)))
    groups = show_groups(report)
    if groups:
        chapters.append(Chapter("groups", "Which groups fare worse?", groups))
    # Samples are ranked by the balls in which they are broken, then by their norms.
    if find_broken(report) or any("norm" in s.samples and s.ids for s in report.sections):
        title = "Which samples are the least robust?"
        chapters.append(Chapter("worst-samples", title, show_worst(report)))
    return Document(f"lipaudit: {report.run.label}", (*chapters, WORDS))


def _open_report(
    report: Report, figures: Section, facts: Iterable[tuple[str, str]], notes: Iterable[Note]
) -> Chapter:
    """Return the beginning of the page of a report: the answer, what is missing, facts, notes.

    Args:
        report: the report.
        figures: the main figures of the report, from which the answer is written.
        facts: names and texts of facts on model, data and run.
        notes: warnings, and notes that concern all figures.
    """
    answer = write_answer(figures)
    return open_page(answer=answer, gaps=describe_gaps(report), facts=facts, notes=notes)


def list_chapters(reports: Sequence[Report], shown: Sequence[Note] = ()) -> Iterator[Chapter]:
    """Yield a chapter for each measure, with one report or several reports side by side.

    The chapters stand in the order of the scorecard: what attacks break comes before heads.

    Args:
        reports: the reports.
        shown: notes that the page already shows; the chapters leave these notes out.
    """
    several = len(reports) > 1
    names = model_labels(reports) if several else [""]  # a single report has no name
    # The sections by measure, then by the name of the report.
    measures: dict[str, dict[str, Section]] = {}
    for name, report in zip(names, reports, strict=True):
        for section in report.sections:
            measures.setdefault(section.measure, {})[name] = section
    for position, measure in enumerate(_sort_measures(measures)):
        sections = measures[measure]
        first = next(iter(sections.values()))
        if several:
            parts = [*show_sections(sections)]
        elif measure == "jacobian.shares":  # may also show the norms, which `bounds` has
            parts = _show_shares(first, bounds=reports[0].section("bounds"), shown=shown)
        else:
            parts = show_section(first, shown)
        folded = position > 0 and find_display(first).folded  # the first chapter is never folded
        yield Chapter(measure, name_chapter(first), parts, folded=folded)


def _sort_measures(names: Iterable[str]) -> list[str]:
    """Return names of measures in the order of their figures on the scorecard.

    The first figure (headline) of a measure decides. A part of a measure, `jacobian.shares`, has
    the place of the measure, `jacobian`. Measures without a figure come last.
    """
    places = dict[str, int]()
    for measure, headline in list_headlines():
        places.setdefault(measure, headline.place)  # the first headline of the measure
    return sorted(names, key=lambda name: places.get(name.partition(".")[0], LAST))


def _show_shares(shares: Section, bounds: Section | None, shown: Sequence[Note]) -> list[Block]:
    """Return the blocks of a section with the share of each head in the model's sensitivity.

    If the exact norms of the heads are known, too, two maps on one scale (norms and shares)
    replace the map of the shares. They come after the first block.

    Args:
        shares: the section `jacobian.shares`.
        bounds: the section with the exact norms; None if they were not measured.
        shown: notes to leave out.
    """
    parts = show_section(shares, shown)
    maps = [*compare_steepness(bounds, shares)]
    if not maps:
        return parts
    others = [part for part in parts if not isinstance(part, Heatmap)]
    return [*others[:1], *maps, *others[1:]]


def _make_brief(report: Report, main: Section) -> Document:
    """Return the page of a report of a single measure for one screen: tables and warnings.

    Args:
        report: the report.
        main: the section of the measure. All other sections are parts of this measure.
    """
    # The page begins with what is missing, even if there are no tables.
    start = open_page(gaps=describe_gaps(report))
    chapters = [start]
    for section in report.sections:
        if section is main:  # the title of the page is the heading of its tables
            chapters[0] = replace(start, blocks=(*start.blocks, *show_brief(section)))
        elif find_display(section).brief:
            tables = [*show_brief(section)]
            if tables:
                chapters.append(Chapter(section.measure, name_chapter(section), tables))
    data = report.run.data
    title = (
        f"{name_chapter(main)} {report.run.label} on {format_count(data.samples)} of {data.spec}"
    )
    notes = list_notes(summary.list_warnings(report))
    if notes:
        chapters.append(Chapter(name="", title="", blocks=notes))
    return Document(title, (*chapters, END))


def make_card(report: Report) -> Document:
    """Return the page of `print(report)`: the model and the scorecard."""
    warnings = list(summary.list_warnings(report))
    more = "lipaudit.render(report, 'table') has all sections."
    if warnings:
        more = f"Warnings: {len(warnings)}. {more}"
    return _shorten(report, notes=(), more=more)


def _shorten(report: Report, notes: Iterable[Note], more: str) -> Document:
    """Return the page of a report for one screen: the answer, few facts and the scorecard.

    Args:
        report: the report.
        notes: notes to show at the top.
        more: the last line, which says where all sections are.
    """
    facts = list_facts(report)
    facts["run"] = f"{facts['status']}; {facts['run']}"
    few = [(name, facts[name]) for name in SHORT if name in facts]
    figures = summarise(report)
    start = _open_report(report, figures, few, notes)
    end = Chapter(name="", title="", blocks=(Paragraph(more),))
    title = f"lipaudit: {report.run.label}"
    return Document(title, (start, *show_scorecard(figures), end))


# Several reports


def make_pages(
    reports: Sequence[Report], lead: Sequence[Chapter], *, short: bool = False
) -> Document:
    """Return the page of several reports side by side.

    Args:
        reports: the reports.
        lead: the chapters at the top of the page.
        short: whether the page has to fit one screen; it then has only the chapters of `lead`.
    """
    title = f"lipaudit: {len(reports)} models side by side"
    chapters = [*lead]
    if short:
        return Document(title, (*chapters, END))
    chapters += list_chapters(reports)
    names = model_labels(reports)
    # A table of the facts that differ between reports, with a column for each report.
    facts = [list_facts(report) for report in reports]
    rows = []
    for fact in dict.fromkeys(chain.from_iterable(facts)):
        texts = [each.get(fact, MISSING) for each in facts]
        if len(set(texts)) > 1:
            rows.append({"fact": fact} | dict(zip(names, texts, strict=True)))
    columns = pick_columns("fact")
    for name in names:
        columns[name] = Column(name, meaning="", format="s")
    tables = tabulate_rows(columns, rows)
    if tables:
        chapters.append(Chapter("models", "What was audited?", tables))
    return Document(title, (*harmonise(chapters, names), WORDS), models=names)


def open_several(reports: Sequence[Report], answer: str, *, short: bool) -> Chapter:
    """Return the beginning of a page of several reports.

    It has the answer, what is missing from each report, the facts that all reports share, and
    their warnings.

    Args:
        reports: the reports.
        answer: the answer of the page; empty for none.
        short: whether the page has to fit one screen; the opening then has few facts.
    """
    gaps = []
    for name, report in zip(model_labels(reports), reports, strict=True):
        gap = describe_gaps(report)
        if gap:
            gaps.append(f"{name}: {gap}")
    facts = [list_facts(report).items() for report in reports]
    common = [fact for fact in facts[0] if all(fact in each for each in facts)]
    if short:
        common = [(name, text) for name, text in common if name in SHORT]
    outcome = Paragraph(answer, tone="answer") if answer else None
    return open_page(
        answer=outcome, gaps=" ".join(gaps), facts=common, notes=list_warnings(reports)
    )


def list_warnings(reports: Sequence[Report]) -> list[Note]:
    """Return the warnings of several reports, each once.

    A warning that only some reports have begins with the names of these reports.
    """
    named = zip(model_labels(reports), reports, strict=True)
    pairs = ((note, name) for name, report in named for note in summary.list_warnings(report))
    warnings = []
    for note, names in group_values(pairs).items():
        if len(names) < len(reports):
            note = note.add_lead(", ".join(names))
        warnings.append(note)
    return warnings


# Samples


def list_names(samples: Sequence[str], places: Mapping[str, str]) -> list[Cells]:
    """Return the cells that name samples: the beginning of each id, and its place if known."""
    return [{"sample": sample[:CHARACTERS], "place": places.get(sample)} for sample in samples]


# Per-sample figures


CLASSES = ("label", "predicted")
"""Per-sample columns that contain a class number."""
SHARES = ("certified", "correct")
"""Yes-or-no columns whose mean is an accuracy."""
SHARE = Column("", meaning="", format=".1%")


@dataclass(frozen=True)
class SampleColumn:
    """A per-sample column of a section: its format, and its values by sample id."""

    section: Section
    name: str
    column: Column
    values: Mapping[str, Any]

    def describe(self, sample: str) -> Cells:
        """Return the table row of a sample: its value, the value over all samples, its rank.

        Over all samples, yes-or-no values have a share and measured values a median. The rank is
        such as "3 of 64", where 1 is the worst sample.
        """
        kind, trial = parse_column(self.name)  # `robust` and the attack of `robust@pgd,linf,0.1`
        value = self.values[sample]
        column = self.column
        # A sample that occurs several times in the data counts once, as in the gate.
        distinct = [v for name, v in self.values.items() if not is_repeat(name)]
        numbers = finite(distinct)
        text, typical = self._describe_value(kind, value, numbers)
        if kind == "robust" and distinct:  # also samples on which not all attacks ran
            typical = _describe_robust(distinct)
        rank = ""
        if column.better and kind not in FLAGS and finite([value]):
            rank = _rank_from_worst(value, numbers, column.better)
        label = write_math(column.label)
        if trial:
            label += f", {trial}"
        return {"figure": label, "value": text, "all": typical, "from the worst": rank}

    def _describe_value(self, kind: str, value: Any, numbers: Sequence[float]) -> tuple[str, str]:
        """Return the value of a sample as a text, and the typical value of all samples, if any.

        Args:
            kind: name of the column without an attack and its ball, such as `robust`.
            value: the value of the sample.
            numbers: the known values of all samples.
        """
        column = self.column
        text = format_value(value, column)
        if kind in FLAGS:  # yes-or-no values, stored as 1 and 0
            if value is not None:
                text = format_value(bool(value), column)
            return text, _describe_flags(kind, numbers)
        if self.name in CLASSES:  # the number of a class, such as 3: `3 (cat)`
            name = self.section.classes.get(value, text)
            if name not in ("", text):
                text += f" ({name})"
            return text, ""
        if column.format in UNMEASURED:  # a count or a name
            return text, ""
        return text, format_value(middle(numbers), column)


def _rank_from_worst(value: float, values: Sequence[float], better: str) -> str:
    """Return the rank of a value among all values, such as "3 of 64"; the worst value has rank 1.

    `better` is "lower" or "higher": which values are better.
    """
    # Multiplied by this sign, larger values are worse.
    sign = 1 if better == "lower" else -1
    worse = sum(sign * other > sign * value for other in values)
    return f"{worse + 1} of {len(values)}"


def _describe_flags(kind: str, flags: Sequence[float]) -> str:
    """Return the share of 1 (yes) among flags of 1 and 0: "62.5% yes"; empty without flags.

    If the kind is an accuracy, such as `correct`, 95% limits follow.
    """
    if not flags:
        return ""
    count = int(sum(flags))
    share = f"{count / len(flags):.1%} yes"
    if kind not in SHARES:
        return share
    low, high = wilson(count, len(flags))
    return f"{share}, {format_limits(low, high, SHARE)}"


def _describe_robust(flags: Sequence[float | None]) -> str:
    """Return the share of samples that no attack broke, with its limits: see `limit_robust`.

    For example: "62.5% yes, 43.5 to 79.5%", or "≤ 62.5% yes" if attacks are missing.
    """
    share, low, high = limit_robust(flags)
    if low is None:
        return f"≤ {share:.1%} yes"
    return f"{share:.1%} yes, {format_limits(low, high, SHARE)}"


def list_columns(report: Report) -> list[SampleColumn]:
    """Return the per-sample columns of all sections, with their values by the id of the sample."""
    columns = []
    for section in report.sections:
        for name, column in section.samples.items():
            if name != "ids":
                values = dict(zip(section.ids, column, strict=True))
                columns.append(
                    SampleColumn(
                        section=section,
                        name=name,
                        column=section.sample_column(name),
                        values=values,
                    )
                )
    return columns


# Choosing a sample


def choose_sample(report: Report, text: str) -> str:
    """Return the id of the sample that a text names.

    The text is an id, the first characters of an id, or the place of the sample in the data.

    Raises:
        InputError: the report has no samples.
        UsageError: no sample has this name, or several have.
    """
    ids = list_sample_ids(report)
    places = report.places
    matches = _match_samples(ids, places, text)
    if len(matches) == 1:
        return matches[0]
    if not matches:
        names = [*(i[:CHARACTERS] for i in ids), *places.values()]
        advice = "`lipaudit inspect REPORT` lists the worst samples with their places."
        raise UsageError(f"the report has no sample {text!r}", suggestion(text, names, advice))
    some = [name_sample(sample, places) for sample in matches[:MOST]]
    raise UsageError(f"{text!r} is {len(matches)} samples", f"There are: {'; '.join(some)}.")


def _match_samples(ids: Sequence[str], places: Mapping[str, str], text: str) -> list[str]:
    """Return the ids of the samples that a text names.

    The text is read as an id, then as a place in the data, then as the first characters of ids.
    The last word of a place is enough: 7 for "index 7", 7.png for "cat/7.png". `ids` has the
    ids of all samples, `places` the place in the data for each id.
    """
    if text in ids:
        return [text]
    matches = []
    for sample in ids:
        place = places.get(sample, "")
        # Without remarks after a comma; folders become words.
        words = place.partition(",")[0].replace("/", " ")
        last_word = words.rpartition(" ")[2]
        if text in (place, last_word):
            matches.append(sample)
    return matches or [sample for sample in ids if sample.startswith(text)]


def list_sample_ids(report: Report) -> list[str]:
    """Return the ids of all samples that were measured or have a place.

    Raises:
        InputError: no sample was measured. The error names the measures that record samples.
    """
    measured = [i for section in report.sections for i in section.ids]
    if not measured:
        text = "the report has no results for single samples"
        raise InputError(text, "Use a report of bounds, jacobian, attack or audit.")
    return list(dict.fromkeys([*measured, *report.places]))


# Pictures and tokens


DRAWN = f"The {HTML} format has the pictures, and what attacks made of them."
SHADES = {"margin": "share of the gradient", "direction": "share of the steepest direction"}
"""Meaning of a token's shade, by the output of the Jacobian."""


def show_samples(report: Report, names: Sequence[str]) -> list[Block]:
    """Show pictures, adversarial examples and shaded tokens of the samples with these ids."""
    return [*_show_examples(report, names), *_shade_texts(report, names)]


def _show_examples(report: Report, names: Sequence[str]) -> Iterator[Block]:
    """Yield a gallery of samples before and after an attack: of these ids, those with examples."""
    attack = report.section("attack")
    examples = attack.examples if attack else {}
    items = []
    for name in names:
        if name in examples:
            items.append(show_example(name_sample(name, report.places), examples[name]))
    if items:
        # Formats without pictures print where the pictures are.
        text = DRAWN if any(item.pictures for item in items) else ""
        yield Gallery(text, items)


def _shade_texts(report: Report, names: Sequence[str]) -> Iterator[Block]:
    """Yield the texts whose gradient is stored, each token shaded by its share of the gradient."""
    jacobian = report.section("jacobian")
    gradients = jacobian.gradients if jacobian else {}
    shaded = [name for name in names if name in gradients]
    several = len(names) > 1
    for number, name in enumerate(shaded):
        gradient = gradients[name]
        # `of`: the gradient of the margin, or the direction in which the output changes most, for
        # all texts of the report.
        column = HEADINGS[SHADES[gradient.of]]
        if several and number == 0:  # "their": of the samples in the table above
            yield Paragraph(f"Their tokens with the largest {column.label}:")
        yield Passage(
            title=name_sample(name, report.places),
            tokens=gradient.tokens,
            shares=gradient.shares,
            column=column,
            left_out=gradient.left_out,
            folded=several,
        )


def show_example(title: str, example: Example) -> Item:
    """Show a sample before and after an attack: class scores, the changed text, and pictures."""
    # The names of the true class and of the class predicted after the attack. `before` and `after`
    # have the scores of these two classes.
    true, predicted = example.classes
    before = example.before
    after = example.after
    by = ""
    trial = TrialKey.parse(example.trial)
    if trial is not None:
        by = f" by {trial.attack}, {trial.ball}"
    lines = [
        f"true class {true}: score {before[0]:.0%} became {after[0]:.0%}",
        f"taken for {predicted}: score {before[1]:.0%} became {after[1]:.0%}{by}",
    ]
    if example.text:
        lines.append(f'the text became "{example.text}"')
    times = format_significant(example.times, ".2g")
    pictures = {
        "sample": example.image,
        "adversarial": example.adversarial,
        f"difference × {times}": example.difference,
    }
    kept = [(caption, picture) for caption, picture in pictures.items() if picture]
    return Item(title, pictures=kept, lines=lines)


# The worst samples, and the page of one


def show_worst(report: Report) -> tuple[Block, ...]:
    """Return a table of the worst samples, and their pictures or tokens if the report has any.

    If nothing ranks the samples of a report, these are its first samples.
    """
    names = find_worst(report)
    balls = find_broken(report)  # for each sample, the balls in which an attack succeeded
    rows = list_names(names, describe_places(report))
    columns = pick_columns("sample", "place", "broken")
    # The per-sample figures that a measure declares for the table of the worst samples.
    figures = {}
    for figure in list_columns(report):
        if figure.name in find_display(figure.section).worst:
            key = f"{figure.section.measure}.{figure.name}"
            figures[key] = figure
            columns[key] = figure.column
    for row, name in zip(rows, names, strict=True):
        # The smallest ball of each norm: a dict keeps the last ball, so large radii come first.
        broken = sorted(balls.get(name, ()), key=lambda ball: -ball.radius.value)
        smallest = {ball.norm: ball.ball for ball in broken}
        row["broken"] = ", ".join(smallest.values()) or MISSING
        for key, figure in figures.items():
            row[key] = figure.values.get(name)
    title = "The worst samples: most often broken first, then the largest Jacobian norm"
    if not can_rank(report):
        title = "The first samples: no figure of this report ranks them"
    return (*tabulate_rows(columns, rows, title), *show_samples(report, names))


def inspect_samples(report: Report, name: str, sample: str | None) -> Document:
    """Return a page of all figures of a sample, each beside the typical value of all samples.

    Args:
        report: the report.
        name: name of the report in hints.
        sample: id of the sample; None for the worst samples.
    """
    facts = {}
    if sample is None:
        subject = "samples"
        count = len(list_sample_ids(report))
        hint = f"For one of the {count}, use lipaudit inspect {name} SAMPLE (its id or place)."
        parts = (*show_worst(report), Paragraph(hint))
        title = "Which samples were measured?"
        if can_rank(report):
            title = "Which samples are the least robust?"
        chapters = [Chapter("worst-samples", title, parts)]
    else:
        subject = f"sample {sample[:CHARACTERS]}"
        chapters = [*_list_sample_chapters(report, sample)]
        facts["sample"] = sample
        # What the report has on samples, by the id of the sample.
        described = {"place": report.places, "group": report.groups, "text": report.texts}
        facts |= {fact: texts[sample] for fact, texts in described.items() if sample in texts}
    of_run = list_facts(report)
    facts["model"] = of_run["model"]
    facts["data"] = of_run["data"]
    gaps = describe_gaps(report)
    notes = list_top_notes(report)
    start = open_page(gaps=gaps, facts=facts.items(), notes=notes)
    return Document(f"lipaudit: {subject} of {report.run.model.spec}", (start, *chapters))


def _list_sample_chapters(report: Report, sample: str) -> Iterator[Chapter]:
    """Yield the figures of a sample, in a chapter for each section, then its pictures."""
    for section in report.sections:
        figures = [f for f in list_columns(report) if f.section is section]
        # Without figures that the section has not for this sample, and without empty texts.
        rows = [f.describe(sample) for f in figures if f.values.get(sample, "") != ""]
        if rows:
            tables = tabulate_rows(OF_SAMPLE, rows) + list_carriers(section, sample)
            yield Chapter(section.measure, name_chapter(section), tables)
    pictures = show_samples(report, [sample])
    if pictures:
        yield Chapter("pictures", "What does the sample look like?", pictures)


def list_carriers(section: Section, sample: str) -> list[Table]:
    """Return a table of the heads with the largest shares of the model's sensitivity on a sample.

    Each share has two parts: through the attention map (`pattern`) and through the values
    (`value`). Without measured shares there is no table.
    """
    names: list[str] = [n for n in ("share", "pattern", "value") if n in section.arrays]
    if section.measure != "jacobian.shares" or not names:
        return []
    place = section.ids.index(sample)  # column of the arrays, which are (heads, samples)
    values = {name: section.arrays[name].numpy()[:, place].tolist() for name in names}
    columns = pick_columns("head")
    columns |= {name: section.columns[name] for name in names}
    columns["all"] = replace(section.columns["share"], label="share, all")
    rows = []
    for i, row in enumerate(section.rows):
        of_sample = {name: values[name][i] for name in names}
        rows.append({**row, **of_sample, "all": row.share})
    rows.sort(key=lambda row: -order_values(row["share"]))
    return tabulate_rows(columns, rows[:MOST], "Heads that carry this sample")


def record_sample(report: Report, sample: str) -> dict[str, Any]:
    """Return the figures of a sample as plain values, for JSON."""
    record: dict[str, Any] = {
        "id": sample,
        "place": report.places.get(sample, ""),
        "group": report.groups.get(sample, ""),
        "text": report.texts.get(sample, ""),
        "figures": [],
    }
    for figure in list_columns(report):
        if sample in figure.values:
            section = figure.section
            value = figure.values[sample]
            entry = {"measure": section.measure, "name": figure.name, "value": value}
            if figure.name in CLASSES:
                entry["class"] = section.classes.get(value)
            record["figures"].append(entry)
    # An adversarial example and the gradient, if they are stored, without pictures.
    pictures = {"image", "adversarial", "difference"}
    for section in report.sections:
        for kind, stored in (("example", section.examples), ("gradient", section.gradients)):
            if sample in stored:
                record[kind] = stored[sample].model_dump(mode="json", exclude=pictures)
    return record
