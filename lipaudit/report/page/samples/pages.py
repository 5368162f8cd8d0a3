"""The worst samples of a report as a page, and one of them with all that is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lipaudit.report.blocks import Block, Chapter, Document, Paragraph, Table
from lipaudit.report.cells import pretty
from lipaudit.report.page.facts import facts
from lipaudit.report.page.remarks import lack, leading
from lipaudit.report.page.samples.choice import known, require_samples
from lipaudit.report.page.samples.figures import CLASSES, Figure, figures
from lipaudit.report.page.samples.pictures import gallery, passages
from lipaudit.report.page.views.common import CHARACTERS, SAMPLE, places, with_places
from lipaudit.results import Column, Report, Section
from lipaudit.results.samples import is_repeat
from lipaudit.results.summary import Accuracy, summary
from lipaudit.results.trials import TrialKey, parse_radius
from lipaudit.results.worst import broken, worst

SHOWN = (
    ("certify", "radius"),
    ("jacobian", "norm"),
    ("jacobian", "margin"),
    ("jacobian", "radius_first_order"),
)
"""Per-sample columns, by section, that stand beside the worst samples."""
RANKED = {
    "norm": "those with the largest ||J||",
    "radius": "those of which the smallest balls are certified",
}
"""What comes first of samples that are broken in equally many balls, by the first column of these
that there is."""
BROKEN = Column(
    label="broken", meaning="Smallest ball of each norm in which an attack broke it.", format="s"
)
FIGURES = (
    Column(label="figure", meaning="What is known of the sample.", format="s"),
    Column(label="value", meaning="Of the sample.", format=""),
    Column(label="all", meaning="Of all samples: the median, or the share of yes.", format=""),
    Column(label="from the worst", meaning="Its place among all, the worst first.", format=""),
)


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
    return with_places(table, places(report))


def shown(report: Report) -> tuple[Block, ...]:
    """Return what is shown of the worst samples: a table, pictures or tokens where kept."""
    names = worst(report)
    order, written = _order(report), passages(report, names)
    about = [f"Their tokens with the largest {written[0].column.label}:"] if written else []
    return (
        *([Paragraph(order)] if order else []),
        worst_table(report),
        *gallery(report, names),
        *map(Paragraph, about),
        *written,
    )


def _order(report: Report) -> str:
    """Say how many samples are broken, and which come first; nothing where that is not known."""
    accuracy, fallen = summary(report).accuracy, broken(report)
    clean = next((each for each in accuracy if each.kind == "clean"), None)
    said = []
    right = round(clean.share * clean.samples) if clean else 0
    wrong = clean.samples - right if clean else 0
    tried = [each for each in accuracy if each.kind == "attacked"]
    if clean and tried:
        last = f"; wrong without, and last: {wrong}" * (wrong > 0)
        counts = [f"{_count(fallen, each)} in {each.ball}" for each in tried]
        said.append(f"Of the {right} right samples attacks broke {', '.join(counts)}{last}.")
    elif wrong:
        said.append(f"Wrong, and last: {wrong}.")
    first = ["those broken in most balls"] if fallen else []
    first += [text for column, text in RANKED.items() if _has(report, column)][:1]
    if first:
        said.append(f"First stand {', then '.join(first)}.")
    return pretty(" ".join(said))


def _count(fallen: Mapping[str, set[TrialKey]], tried: Accuracy) -> int:
    """Count the distinct samples that are broken in a ball, as its row counts them."""
    ball = TrialKey("", tried.norm, parse_radius(tried.eps))
    return sum(ball in balls for name, balls in fallen.items() if not is_repeat(name))


def _has(report: Report, column: str) -> bool:
    return any(column in section.samples for section in report.sections)


def overview(report: Report, name: str) -> Document:
    """Lay out the worst samples of a report, with what to type to see one."""
    require_samples(report)
    more = f"lipaudit inspect {name} SAMPLE shows one of {len(known(report))}: its id or place."
    chapter = Chapter("worst", "Samples", (*shown(report), Paragraph(more)))
    return Document(
        title=f"lipaudit: samples of {report.run.model.spec}",
        facts=tuple(fact for fact in facts(report) if fact[0] in ("model", "data")),
        findings=(),
        chapters=(chapter,),
        partial=lack(report),
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
        partial=lack(report),
        notes=leading(report),
    )


def record(report: Report, sample: str) -> dict[str, Any]:
    """Return the same as plain values."""
    of = [figure for figure in figures(report) if sample in figure.values]
    found = {name: report.found(name).get(sample, "") for name in ("place", "text")}
    kept = {
        kind: one.model_dump(mode="json", exclude={"image", "adversarial", "difference"})
        for section in report.sections
        for kind, each in (("example", section.examples), ("gradient", section.gradients))
        if (one := each.get(sample)) is not None
    }
    return {"id": sample, **found, "figures": [_figure(f, sample) for f in of], **kept}


def _figure(figure: Figure, sample: str) -> dict[str, Any]:
    value = figure.values[sample]
    said = {"measure": figure.section, "name": figure.name, "value": value}
    return said | ({"class": figure.classes.get(value)} if figure.name in CLASSES else {})


def _title(section: Section) -> str:
    kind = type(section.rows[0]) if section.rows else None
    return (kind.title if kind else "") or section.measure


def _smallest(balls: Iterable[TrialKey]) -> list[str]:
    """Name the smallest ball of each norm."""
    ranked = sorted(balls, key=lambda ball: -ball.radius.value)
    return [ball.ball for ball in {ball.norm: ball for ball in ranked}.values()]
