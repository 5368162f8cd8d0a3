"""The samples of a report: which are the worst, and all that is known of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
)
from lipaudit.report.cells import UNMEASURED, pretty, significant, text
from lipaudit.report.page.facts import facts
from lipaudit.report.page.remarks import leading
from lipaudit.report.page.views.common import CHARACTERS, SAMPLE, located, places
from lipaudit.results import Column, Report, Section
from lipaudit.results.figures import finite, middle, order
from lipaudit.results.report import Example
from lipaudit.results.samples import FLAGS
from lipaudit.results.trials import TrialKey, parse_column
from lipaudit.results.worst import SHOWN as MOST
from lipaudit.results.worst import broken, ids, worst

SHOWN = (
    ("certify", "radius"),
    ("jacobian", "norm"),
    ("jacobian", "margin"),
    ("jacobian", "radius_first_order"),
)
"""Per-sample columns, by section, that stand beside the worst samples."""
DRAWN = (
    "Pictures of them and of what attacks made of them: in the html format, or of one, "
    "lipaudit inspect REPORT SAMPLE in a terminal with colours or with -o sample.png."
)
BROKEN = Column(
    label="broken", meaning="Smallest ball of each norm in which an attack broke it.", format="s"
)
SHARES = {
    "margin": Column(
        label="share of the gradient",
        meaning="Of the margin's gradient: ||grad_t m||^2 / sum_s ||grad_s m||^2 over tokens s, "
        "m = f_y - max_(j != y) f_j.",
        format=".1%",
    ),
    "direction": Column(
        label="share of the steepest direction",
        meaning="||v_t||^2 of the unit vector v along which the output changes most.",
        format=".1%",
        status="estimate",
    ),
}
"""What the shade of a token says, by what was differentiated."""
FIGURES = (
    Column(label="figure", meaning="What is known of the sample.", format="s"),
    Column(label="value", meaning="Of the sample.", format=""),
    Column(label="all", meaning="Of all samples: the median, or the share of yes.", format=""),
    Column(label="from the worst", meaning="Its place among all, the worst first.", format=""),
)


@dataclass(frozen=True)
class Figure:
    """A per-sample column of a section: how it reads, and its values by sample id."""

    section: str
    name: str
    column: Column
    values: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its heading, and the trial or ball that it is of."""
        trial, label = parse_column(self.name)[1], pretty(self.column.label)
        return label if trial is None else f"{label}, {trial}"

    @property
    def flag(self) -> bool:
        """Whether it says yes or no."""
        return parse_column(self.name)[0] in FLAGS

    def rank(self, sample: str) -> str:
        """Return the place of a sample among all, the worst first; nothing where none is."""
        if self.column.better is None or self.flag or not finite([self.values[sample]]):
            return ""
        sign = 1 if self.column.better == "lower" else -1
        own = sign * order(self.values[sample])
        worse = sum(sign * value > own for value in finite(self.values.values()))
        return f"{worse + 1} of {len(finite(self.values.values()))}"

    def cells(self, sample: str) -> tuple[str, ...]:
        """Return what a table says of it for one sample, beside all."""
        value, known = self.values[sample], finite(self.values.values())
        if self.flag:
            share = f"{sum(known) / len(known):.0%} yes" if known else ""
            return self.label, text(None if value is None else bool(value), self.column), share, ""
        typical = "" if self.column.format in UNMEASURED else text(middle(known), self.column)
        return self.label, text(value, self.column), typical, self.rank(sample)


def figures(report: Report) -> list[Figure]:
    """Return the per-sample columns of all sections."""
    return [
        Figure(s.measure, name, s.sample_column(name), dict(zip(ids(s), values, strict=True)))
        for s in report.sections
        for name, values in s.samples.items()
        if name != "ids" and ids(s)
    ]


def worst_table(report: Report) -> Table:
    """Tabulate the worst samples."""
    balls = broken(report)
    kept = [f for f in figures(report) if (f.section, f.name) in SHOWN]
    rows = tuple(
        (
            sample,
            ", ".join(_smallest(balls.get(sample, ()))) or None,
            *(figure.values.get(sample) for figure in kept),
        )
        for sample in worst(report)
    )
    table = Table("The worst samples", (SAMPLE, BROKEN, *(f.column for f in kept)), rows)
    named = located(table, places(report))
    assert isinstance(named, Table)
    return named


def gallery(report: Report, names: Sequence[str]) -> list[Gallery]:
    """Draw samples that are pictures, what attacks made of them, and the difference."""
    section = report.section("attack")
    drawn = section.examples if section else {}
    items = tuple(_item(report, name, drawn[name]) for name in names if name in drawn)
    return [Gallery(DRAWN, items, folded=len(names) > 1)] if items else []


def passages(report: Report, names: Sequence[str]) -> list[Passage]:
    """Show the tokens of samples, with how the gradient is shared out among them."""
    section = report.section("jacobian")
    kept = section.gradients if section else {}
    return [
        Passage(
            _named(report, name),
            kept[name].tokens,
            kept[name].shares,
            SHARES[kept[name].of],
            kept[name].left_out,
            folded=len(names) > 1,
        )
        for name in names
        if name in kept
    ]


def _named(report: Report, sample: str) -> str:
    """Return the beginning of the id of a sample, and where it is found."""
    return ", ".join(filter(None, (sample[:CHARACTERS], report.found("place").get(sample))))


def _item(report: Report, sample: str, example: Example) -> Item:
    trial = TrialKey.parse(example.trial)
    (true, said), before, after = example.classes, example.before, example.after
    by = "" if trial is None else f" by {trial.attack}, {trial.ball}"
    return Item(
        title=_named(report, sample),
        pictures=(
            ("sample", example.image),
            ("adversarial", example.adversarial),
            (f"difference × {significant(example.times, '.2g')}", example.difference),
        ),
        lines=(
            f"true class {true}: score {before[0]:.0%} became {after[0]:.0%}",
            f"taken for {said}: score {before[1]:.0%} became {after[1]:.0%}{by}",
        ),
    )


def shown(report: Report) -> tuple[Block, ...]:
    """Return what is shown of the worst samples: a table, pictures or tokens where kept."""
    names = worst(report)
    written = passages(report, names)
    about = [f"Their tokens with the largest {written[0].column.label}:"] if written else []
    return (
        worst_table(report),
        *gallery(report, names),
        *map(Paragraph, about),
        *written,
    )


def overview(report: Report, name: str) -> Document:
    """Lay out the worst samples of a report, with what to type to see one."""
    _require_samples(report)
    more = f"lipaudit inspect {name} SAMPLE shows one of {len(_known(report))}: its id or place."
    chapter = Chapter("worst", "Samples", (*shown(report), Paragraph(more)))
    return Document(
        title=f"lipaudit: samples of {report.run.model.spec}",
        facts=tuple(fact for fact in facts(report) if fact[0] in ("model", "data")),
        findings=(),
        chapters=(chapter,),
        notes=leading(report),
    )


def inspected(report: Report, sample: str) -> Document:
    """Lay out all that a report says of a sample, beside what it says of all of them."""
    chapters = []
    for section in report.sections:
        of = [f for f in figures(report) if f.section == section.measure and sample in f.values]
        if of:
            rows = tuple(figure.cells(sample) for figure in of if figure.values[sample] != "")
            chapters.append(Chapter(section.measure, _title(section), (Table("", FIGURES, rows),)))
    drawn = (
        Chapter("pictures", "Pictures", tuple(gallery(report, [sample]))),
        Chapter("tokens", "Tokens", tuple(passages(report, [sample]))),
    )
    chapters += [chapter for chapter in drawn if chapter.blocks]
    found = {"place": report.found("place"), "text": report.found("text")}
    said = ((name, known[sample]) for name, known in found.items() if sample in known)
    return Document(
        title=f"lipaudit: sample {sample[:CHARACTERS]} of {report.run.model.spec}",
        facts=(("sample", sample), *said, *facts(report)[:1], ("data", report.run.data.spec)),
        findings=(),
        chapters=tuple(chapters),
        notes=leading(report),
    )


def portrait(report: Report, sample: str) -> Item | Passage:
    """Return what shows a sample: its pictures, or its tokens.

    Raises:
        InputError: the report keeps neither of it.
    """
    shown: list[Item | Passage] = []
    shown += [item for block in gallery(report, [sample]) for item in block.items]
    shown += passages(report, [sample])
    if shown:
        return shown[0]
    advice = (
        "A report keeps, of the ten worst samples, pictures of those that an attack broke and the "
        "tokens of texts that jacobian measured: lipaudit inspect REPORT names them."
    )
    raise InputError(f"the report keeps no picture of sample {sample[:CHARACTERS]}", advice)


def record(report: Report, sample: str) -> dict[str, Any]:
    """Return the same as plain values."""
    of = [figure for figure in figures(report) if sample in figure.values]
    found = {name: report.found(name).get(sample, "") for name in ("place", "text")}
    return {"id": sample, **found} | {
        "figures": [{"measure": f.section, "name": f.name, "value": f.values[sample]} for f in of]
    }


def chosen(report: Report, said: str) -> str:
    """Return the id of a sample that is named by it, by its first characters or by its place.

    Raises:
        InputError: the report has no samples.
        UsageError: none is named so, or several.
    """
    _require_samples(report)
    known, at = _known(report), report.found("place")
    ways: tuple[Callable[[str], bool], ...] = (
        lambda i: i == said,
        lambda i: i in at and said in (at[i], _last(at[i])),
        lambda i: i.startswith(said),
    )
    named = next(filter(None, ([i for i in known if way(i)] for way in ways)), [])
    if len(named) == 1:
        return named[0]
    if not named:
        names = [*(i[:CHARACTERS] for i in known), *at.values()]
        advice = "Name one by its id or place; lipaudit inspect REPORT lists the worst."
        raise UsageError(f"the report has no sample {said!r}", suggestion(said, names, advice))
    some = ", ".join(f"{i[:CHARACTERS]} ({at[i]})" if i in at else i for i in named[:MOST])
    raise UsageError(f"{said!r} is {len(named)} samples", f"There are: {some}.")


def _last(place: str) -> str:
    """Return the number of a place, or the name of its file."""
    return place.partition(",")[0].replace("/", " ").rpartition(" ")[2]


def _title(section: Section) -> str:
    kind = type(section.rows[0]) if section.rows else None
    return (kind.title if kind else "") or section.measure


def _known(report: Report) -> list[str]:
    """Return every sample of which something is known."""
    measured = (i for section in report.sections for i in ids(section))
    return list(dict.fromkeys([*measured, *report.found("place")]))


def ranked(report: Report) -> bool:
    """Tell whether a report knows which of its samples are the worst."""
    return any(f.name == "norm" for f in figures(report)) or bool(broken(report))


def _require_samples(report: Report) -> None:
    if not any(map(ids, report.sections)):
        raise InputError(
            "the report says nothing of single samples",
            "bounds, jacobian, attack and certify do: lipaudit audit MODEL has most of them.",
        )


def _smallest(balls: Iterable[TrialKey]) -> list[str]:
    """Name the smallest ball of each norm."""
    ranked = sorted(balls, key=lambda ball: -ball.radius.value)
    return [ball.ball for ball in {ball.norm: ball for ball in ranked}.values()]
