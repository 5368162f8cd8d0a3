"""The summary of a report: the figures that sections declare as their first ones, and warnings.

A scorecard, a ranking, the answer of a page and the default rules of the gate come from these
declarations: nothing else names the columns of a measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lipaudit.tables.columns import (
    ACCURACY,
    Column,
    Row,
    finite,
    group_values,
    list_keys,
    wilson,
)
from lipaudit.tables.formats import format_count, format_limits, format_value, join_texts
from lipaudit.tables.report import Layout, Note, Report, Section
from lipaudit.tables.trials import WHOLE, WORST, TrialKey, is_repeat, parse_radius
from lipaudit.tables.weakest import find_contradictions

# Largest number of attacks that a sentence names.
FEW = 3
# The place of figures that name none: behind all others.
LAST = 100


def read_rows(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield a figure of the summary for every row of a section.

    Figures of several rows need different names. `read_row` names rows of a ball by the ball.
    Other rows are named by their leading columns, such as layer and head. The row of layer 3 and
    head 5 becomes the figure "norm, 3 5" with the metric `bounds.exact@layer=3,head=5`.

    Args:
        headline: the column of the figure, and how it is shown.
        section: the section.
        report: unused; other functions for `Headline.read` need the report.
    """
    for row in section.rows:
        names = {}  # replace the texts of `read_row`; empty: they stay
        # `row.key` is the ball of a row; rows of heads, layers and the like have none.
        if len(section.rows) > 1 and row.key is None:
            keys = {name: row[name] for name in list_keys(section.columns)}
            words = [format_value(key, section.columns[name]) for name, key in keys.items()]
            selector = ",".join(f"{name}={key}" for name, key in keys.items())
            names["figure"] = f"{headline.label}, {' '.join(words)}"
            names["metric"] = f"{section.measure}.{headline.column}@{selector}"
        for figure in read_row(headline, section, row):
            yield figure.replace(**names)


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A figure of a section that comes first: on a scorecard, in a ranking, in a gate.

    Attributes:
        name: its name in JSON and for loggers. If several sections have figures of one name (and
            one ball), the one with the first place counts.
        column: its column, as rules of the gate name it.
        label: its name on a scorecard, before the ball; empty: it is on none.
        words: its name in a sentence of the gate; empty: the label.
        meaning: one sentence, for `lipaudit explain`; empty: the meaning of the column.
        place: its place on scorecards, in rankings and among default rules. Figures with the same
            tens are sorted by their balls.
        read: yields rows of the summary, by `row`; by default one for each row of the section.
        sentence: what the answer of a page says, with {value}, {ball} and {text} (limits and
            samples); of several balls the last with a positive value.
        rule: the default rule of the gate; empty for none.
        ranks: whether models are ranked by it.
        labelled: whether only labelled samples have it.
        over_heads: how figures of heads become one, in comparisons as on the scorecard.
    """

    name: str
    column: str
    label: str = ""
    words: str = ""
    meaning: str = ""
    place: int = LAST
    read: Callable[[Headline, Section, Report], Iterable[Row]] = read_rows
    sentence: str = ""
    rule: str = ""
    ranks: bool = False
    labelled: bool = False
    over_heads: Literal["median", "mean"] = "median"

    def row(
        self,
        section: Section,
        value: Any,
        column: Column | None = None,
        *,
        trial: TrialKey | None = None,
        limits: tuple[float, float] | None = None,
        text: str = "",
        **cells: Any,
    ) -> Row:
        """Return the figure as a row of the summary.

        The metric of a row is written as rules of the gate write it: `attack.robust@linf,4/255`
        for the column `robust` of the section `attack` in a ball. The figure is of all attacks in
        this ball together, so the metric names none of them.

        Args:
            section: the section of the figure.
            value: the value of the figure.
            column: the description of the figure; by default that of the section's column.
            trial: the ball of the figure.
            limits: 95% limits of the value; they begin the text.
            text: the samples or heads of the figure in words.
            cells: further cells of the row, or replacements of the cells below.
        """
        if column is None:
            column = section.columns.get(self.column) or section.sample_column(self.column)
        # Unit, format and the like of the column.
        row: dict[str, Any] = {name: getattr(column, name) or "" for name in DESCRIPTION}
        row |= {
            "name": self.name,
            "metric": f"{section.measure}.{self.column}",
            "figure": self.label,
            "value": value,
            "samples": len(section.ids),
            "text": text,
        }
        if limits is not None:
            row["low"], row["high"] = limits
            row["text"] = join_texts([f"95% CI {format_limits(*limits, column)}", text])
        ball = ""
        if trial is not None:
            ball = trial.ball
            row |= {"norm": trial.norm, "radius": trial.radius.text, "ball": ball}
            row["metric"] += f"@{replace(trial, attack='')}"
            row["figure"] += f", {ball}"
        if self.sentence:
            row["sentence"] = self.sentence.format(value=value, ball=ball, text=row["text"])
        return SUMMARY.row(**(row | cells))


def describe_texts(**meanings: str) -> dict[str, Column]:
    """Return a column of text for each name, with its meaning."""
    return {name: Column.text(name, meaning) for name, meaning in meanings.items()}


UPPER_LIMIT = "at most: not all attacks ran"
"""What follows a figure that has an upper limit alone."""
DESCRIPTION = ("meaning", "unit", "format", "better", "domain", "status")
"""What a row of the summary repeats of the column of its figure."""
SUMMARY = Layout(
    name="summary",
    title="Scorecard",
    fixed={
        "name": Column.text("name", "The name of the figure.", needed=True),
        **describe_texts(
            metric="Its section and column, as rules of the gate name them.",
            figure="Its name on a scorecard.",
            norm="Norm of its ball.",
            radius="Radius of its ball, as typed.",
            ball="Its ball in words.",
        ),
        "value": Column("value", "The figure.", domain=""),
        "low": Column("low", "Lower 95% limit.", domain=""),
        "high": Column("high", "Upper 95% limit.", domain=""),
        "samples": Column.count("samples", "Number of samples."),
        **describe_texts(
            text="Its limits, samples or heads in words.",
            sentence="The figure in the answer of a page.",
            meaning="The meaning of the figure.",
            unit="Unit of the figure.",
            format="Format of the figure, as Python specifies it.",
            better="Its better direction; empty: it has none.",
            domain="Where the figure holds.",
            status="How far the figure is proven.",
        ),
    },
)


def describe_figure(row: Row) -> Column:
    """Return the column that describes a figure of the summary: label, unit, format, domain."""
    # The attributes of the figure's column that a row of the summary repeats.
    attributes = {name: row[name] for name in DESCRIPTION}
    # Rows write "" for a column without a better direction, columns None.
    attributes["better"] = row.better or None
    return Column(label=row.figure, **attributes)


def find_figures(summary: Section, name: str) -> list[Row]:
    """Return the rows of a summary with this name: one row, or one for each ball."""
    return [row for row in summary.rows if row.name == name]


def find_section(row: Row) -> str:
    """Return the section of a figure: `attack` of the metric `attack.robust@linf,2/255`."""
    metric, _, _ = row.metric.partition("@")
    section, _, _ = metric.rpartition(".")
    return section


def summarise(report: Report, layouts: Mapping[str, Layout]) -> Section:
    """Return the summary of a report: a row for each figure, and the warnings as notes.

    Args:
        report: the report.
        layouts: the layouts of sections, which declare the figures.
    """
    figures = []  # each after its sort key
    for section in report.sections:
        layout = layouts.get(section.measure)
        if layout is None:
            continue
        for headline in layout.headlines:
            if not headline.label:
                continue
            for row in headline.read(headline, section, report):
                radius = float(parse_radius(row.radius or "0"))
                # Figures whose places have the same tens, such as 20 and 21, are sorted by balls:
                # all figures of one ball come together.
                order = (headline.place // 10, row.norm, radius, headline.place)
                figures.append((order, row))
    figures.sort(key=lambda pair: pair[0])
    # Several sections may have a figure with the same name and ball, such as clean accuracy: only
    # the first is used. Figures without a ball (no norm) count as equal if their labels are equal.
    distinct = {}
    for (_, _, radius, _), row in figures:
        key = (row.name, row.norm or row.figure, radius)
        if key not in distinct:
            distinct[key] = row
    rows = (*distinct.values(), *report.figures)
    return SUMMARY.section(rows=rows, notes=tuple(list_warnings(report)))


# How sections with rows of attacks, balls or flags are read


def read_row(headline: Headline, section: Section, row: Row, *remarks: str) -> Iterator[Row]:
    """Yield the figure of a section's row as a row of the summary; nothing if its cell is empty.

    Args:
        headline: the column of the figure, and how it is shown.
        section: the section of the row.
        row: the row.
        remarks: texts that follow the limits; by default the number of samples.
    """
    name = headline.column
    if row[name] is None:
        return
    limits = None
    low = row.get(f"{name}_low")
    high = row.get(f"{name}_high")
    samples = row.get("samples") or len(section.ids)
    remarks = remarks or (format_count(samples),)
    if low is not None and high is not None:
        limits = low, high
    elif high is not None:  # an upper limit alone: not all attacks ran
        remarks = (UPPER_LIMIT, *remarks)
    text = join_texts(remarks)
    # `limits` are both or none; `high` may be an upper limit alone.
    yield headline.row(
        section,
        value=row[name],
        trial=row.key,
        limits=limits,
        text=text,
        samples=samples,
        high=high,
    )


def read_worst(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the accuracy under all attacks together for every ball, the smallest ball first.

    A remark names the attacks, or says that they are the same as in the ball before.

    Args:
        headline: the column of the figure, and how it is shown.
        section: the section of attacks; a row of all attacks together has the attack WORST.
        report: the report, which says whether the inputs are images or embeddings.
    """
    balls = group_values(((row.norm, row.trial.radius.value), row) for row in section.rows)
    before: list[str] = []  # the attacks of the last ball with a figure
    for _, group in sorted(balls.items()):
        attacks = [row.attack for row in group if row.attack != WORST]
        rows = [row for row in group if row.attack == WORST]
        if not rows and len(group) == 1:  # a single attack is the worst one
            rows = group
        remarks = attacks
        if len(attacks) > 1:
            remarks = [f"worst of {', '.join(attacks)}"]
            if attacks == before:
                remarks = ["same attacks"]
        for row in rows:
            for figure in read_row(headline, section, row, *remarks):
                yield describe_survivors(figure, attacks, report)
            before = attacks


def describe_survivors(figure: Row, attacks: Sequence[str], report: Report) -> Row:
    """Return an accuracy under attacks with a sentence for the answer of a page.

    The sentence has no full stop, because the page adds how many samples were broken.
    """
    scale = ""
    if figure.norm not in WHOLE:
        # Only images have a mean.
        is_image = "mean" in report.run.preprocess
        scale = " of the pixel range 0 to 1" if is_image else " in the space of embeddings"
    attackers = f"all {len(attacks)} attacks"
    if len(attacks) <= FEW:
        attackers = ", ".join(attacks)
    sentence = f"{figure.value:.1%} survive {attackers} at {figure.ball}{scale}"
    # The attacks `words`, `characters` and `patch` have the name of their norm, and change what is
    # there: the ball, such as "2 words", says everything. The attack `suffix` adds tokens.
    if attackers == figure.norm and attackers != "suffix":
        sentence = f"{figure.value:.1%} survive attacks that change {figure.ball}"
    if figure.low is None and figure.high is not None:  # an upper limit alone: not all attacks ran
        sentence = f"At most {sentence}"
    elif figure.low is not None:
        limits, _, _ = figure.text.partition(", ")  # the text begins with the limits
        sentence += f" ({limits})"
    return figure.replace(sentence=sentence)


def read_clean(headline: Headline, section: Section, report: Report) -> Iterator[Row]:
    """Yield the share of samples that are right without attack; repeated samples count once."""
    flags = finite(list_unrepeated(section, headline.column))
    if not flags:
        return
    right = sum(flag > 0 for flag in flags)
    count = len(flags)
    text = format_count(count)
    limits = wilson(right, count)
    column = ACCURACY["clean"]
    yield headline.row(
        section, value=right / count, column=column, limits=limits, text=text, samples=count
    )


def declare_clean(place: int, rule: str = "") -> Headline:
    """Return the headline (main figure) of a measure's accuracy without attack.

    Args:
        place: its place on scorecards and in rankings.
        rule: the default rule of the gate; empty for none.
    """
    return Headline(
        name="clean_accuracy",
        column="correct",
        label="clean accuracy",
        meaning="Share of samples right without attack. CI: 95% (Wilson 1927).",
        place=place,
        read=read_clean,
        sentence="Clean accuracy {value:.1%} ({text}).",
        rule=rule,
        labelled=True,
    )


# The same accuracy in the rows of balls, for sentences of the gate.
CLEAN_OF_BALLS = Headline(name="clean_accuracy", column="clean", words="clean accuracy")


def count_measured(section: Section, report: Report) -> str:
    """Return a remark with the number of samples if a measure took fewer than the report has."""
    count = len(section.ids)
    if 0 < count < report.run.data.samples:
        return f"; at {format_count(count)}"
    return ""


def list_unrepeated(section: Section, name: str) -> Iterator[Any]:
    """Yield the cells of a per-sample column without repeated samples."""
    cells = section.samples.get(name, ())
    for sample, cell in zip(section.ids, cells, strict=False):
        if not is_repeat(sample):
            yield cell


# Warnings


def list_shared_notes(report: Report) -> list[Note]:
    """Return the notes that all measures of a report share: they concern the model or the data."""
    if not report.sections:
        return []
    first, *others = report.main_sections or report.sections
    shared = list(first.notes)
    for section in others:
        shared = [note for note in shared if note in section.notes]
    return shared


def list_warnings(report: Report) -> Iterator[Note]:
    """Yield the warnings of a report: contradictions, then shared ones, then those of a measure.

    Warnings that not all measures share begin with the name of their measure.
    """
    contradictions = find_contradictions(report)
    # A sample is certified and broken in the same ball: an attack or a proof is wrong.
    if contradictions:
        sample, ball, trial = contradictions[0]
        by = ""
        if trial.attack:
            by = f" by {trial.attack}"
        yield Note.warn(
            code="contradiction",
            text=f"a contradiction: sample {sample} is certified in {ball.ball} and was broken"
            f"{by} in {trial.ball} (such samples: {len(contradictions)}). One of the two is "
            "wrong: try --dtype float64, and report this as a bug in lipaudit",
        )
    # The text in front of each note: nothing for shared notes, else the name of the first measure
    # that has the note.
    leads: dict[Note, str] = dict.fromkeys(list_shared_notes(report), "")
    for section in report.sections:
        for note in section.notes:
            leads.setdefault(note, section.measure)
    for note, lead in leads.items():
        if note.level == "warning":
            yield note.add_lead(lead)
