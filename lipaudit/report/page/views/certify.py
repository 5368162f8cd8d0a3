"""Whole model: between which accuracies the truth lies, and how far from each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lipaudit.report.blocks import Block, Scatter, Series, Shares, Table
from lipaudit.report.page.views.common import MODEL, every_row, interval, points
from lipaudit.results import CertifyRow, Column, Section
from lipaudit.results.figures import typed

NAMES = ("norm", "eps_text", "samples", "clean", "robust", "certified")
AXES = ("radius_adversarial", "radius")
VERDICTS = ("certified", "undecided", "broken", "wrong")
SHARE = Column(
    label="share of samples",
    meaning="How many samples have a verdict.",
    format=".1%",
    domain="",
)


def view(section: Section) -> Iterator[Block]:
    """Tabulate the brackets and draw them; set radii beside each other, sample by sample."""
    rows, columns = typed(section, CertifyRow), section.columns()
    if rows:
        names = [n for n in NAMES if any(getattr(row, n) is not None for row in rows)]
        yield Table(
            title="Robust accuracy: certified from below, attacked from above",
            columns=(*(columns[n] for n in names), _interval(columns), columns["undecided"]),
            rows=tuple((*_start(row, names), row.undecided) for row in rows),
            keys=2,
        )
        yield from _bars({"": section})
    yield from _radii({"samples": section})
    if rows:
        yield every_row(section)


def side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Compare the brackets at every radius, and the radii of the samples."""
    columns = next(iter(sections.values())).columns()
    lines = [(row, label) for label, s in sections.items() for row in typed(s, CertifyRow)]
    lines.sort(key=lambda line: (line[0].norm, line[0].eps))
    if lines:
        yield Table(
            title="Robust accuracy: certified from below, attacked from above",
            columns=(
                *(columns[n] for n in NAMES[:2]),
                MODEL,
                *(columns[n] for n in NAMES[2:]),
                _interval(columns),
            ),
            rows=tuple((*_start(row)[:2], label, *_start(row)[2:]) for row, label in lines),
            keys=3,
        )
        yield from _bars(sections)
    yield from _radii(sections)


def radius_view(section: Section) -> Iterator[Block]:
    """Tabulate the medians."""
    yield every_row(section, folded=False)


def _start(row: CertifyRow, names: Sequence[str] = NAMES) -> tuple[object, ...]:
    bracket = interval(row.certified_low, row.robust_high) or None
    return (*(getattr(row, name) for name in names), bracket)


def _interval(columns: Mapping[str, Column]) -> Column:
    return replace(columns["certified_low"], label="95 % bracket", format="s")


def _bars(sections: Mapping[str, Section]) -> Iterator[Shares]:
    """Cut a bar for every ball by the verdicts of its samples."""
    counts: dict[str, Counter[str]] = {}
    for label, section in sections.items():
        for row in typed(section, CertifyRow):
            name = f"{row.norm} {row.key.radius.text} {label}".strip()
            verdicts = section.samples.get(row.key.column("verdict"), ())
            if verdicts:
                counts[name] = Counter(map(str, verdicts))
    if counts:
        parts = {
            verdict: tuple(each[verdict] / each.total() for each in counts.values())
            for verdict in VERDICTS
        }
        yield Shares("What is certified, and what is left open", SHARE, tuple(counts), parts)


def _radii(sections: Mapping[str, Section]) -> Iterator[Scatter]:
    """Set the certified radius of each sample over its adversarial one."""
    series: list[Series] = []
    for label, section in sections.items():
        if section.samples.keys() >= {*AXES}:
            x, y = (section.samples[name] for name in AXES)
            series += points(label, x, y, section.ids)
    if series:
        section = next(iter(sections.values()))
        title = "Certified over adversarial radius, sample by sample"
        x_axis, y_axis = map(section.sample_column, AXES)
        yield Scatter(title, x_axis, y_axis, tuple(series))
