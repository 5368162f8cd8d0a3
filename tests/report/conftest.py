"""A stored report with every section, nulls, NaN, infinities, notes and a hostile model name."""

from pathlib import Path

import pytest

from lipaudit import schema
from lipaudit.measures import layouts
from lipaudit.report import of_reports, render
from lipaudit.tables import Report, Section

STORED = Path(__file__).parent / "goldens/report.json"
"""3 layers of 4 heads, 24 samples; see `bounds`: a norm is NaN, one was not measured."""


def make_report() -> Report:
    return schema.load(STORED)


def keep(report: Report, *sections: Section) -> Report:
    """The report with these sections and no others."""
    return report.model_copy(update={"sections": sections})


def swap(report: Report, section: Section) -> Report:
    """The report with a section in place of the one of its measure."""
    same = section.measure
    return keep(report, *(section if s.measure == same else s for s in report.sections))


def rename(report: Report, **changes: str) -> Report:
    """The report of a model of another name, source or hash."""
    model = report.run.model.model_copy(update=changes)
    return report.model_copy(update={"run": report.run.model_copy(update={"model": model})})


def show(*reports):
    """The page of a report, or of several side by side."""
    return of_reports(*reports).page()


def find_chapter(page, name):
    """The chapter of a page by its name."""
    return next(chapter for chapter in page.chapters if chapter.name == name)


def make_other() -> Report:
    """A second model: the same sections, other numbers in two of them."""
    other, halve = (
        make_report(),
        {"bounds": ("exact", "sharp"), "attention": ("g1", "intermediate")},
    )
    for measure, names in halve.items():
        section = other.section(measure)
        halved = ({n: row[n] and row[n] / 2 for n in names} for row in section.rows)
        rows = (row.replace(**each) for row, each in zip(section.rows, halved, strict=True))
        other = swap(other, section.model_copy(update={"rows": tuple(rows)}))
    return rename(other, spec="demo:robust")


@pytest.fixture(scope="session")
def report() -> Report:
    return make_report()


@pytest.fixture(scope="session")
def other() -> Report:
    return make_other()


@pytest.fixture(scope="session")
def page(report) -> str:
    """The HTML page of one report."""
    return render(report, "html").decode()


@pytest.fixture(scope="session")
def blank_report(report) -> Report:
    """One row per section with nothing in it but what names the row."""
    names = {"layer": 0, "head": 0, "r": 0.1, "n": 8, "attack": "pgd", "norm": "linf", "eps": 0.1}
    names |= {"corruption": "fog", "module": "blocks.0", "step": 0}
    rows = (
        (kind, kind.row(**{n: names[n] for n, column in kind.columns.items() if column.needed}))
        for kind in layouts().values()
    )
    return keep(report, *(kind.section(rows=(row,)) for kind, row in rows))
