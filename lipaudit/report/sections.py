"""The chapter of a section: tables, maps and histograms of its columns, and drawings of its own.

Sections of one measure come by report: a single report has the name "", several have the names
of their models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from lipaudit.errors import UsageError
from lipaudit.measures import layouts, load_measures
from lipaudit.report import blocks
from lipaudit.report.blocks import EXTREME, Block, Heatmap, Histogram, Paragraph, Table, list_notes
from lipaudit.report.cells import HEADINGS, UNMEASURED, format_significant, write_math
from lipaudit.report.opening import SEED, format_setting
from lipaudit.report.pictures import draw_declared
from lipaudit.report.rows import (
    Sections,
    add_model,
    find_closest_bounds,
    map_heads,
    tabulate,
)
from lipaudit.tables import Display, Note, Section
from lipaudit.tables.columns import finite, list_ratios


def name_chapter(section: Section) -> str:
    """Return the heading of a section: from the installed measure, else from the report."""
    layout = layouts().get(section.measure)
    title = layout.title if layout else section.title
    return title or section.measure


def find_display(section: Section) -> Display:
    """Return what the chapter of a section shows.

    The measure of the section says so. For a measure that is not installed or says nothing, the
    chapter shows all columns, maps of the heads and histograms of the samples.
    """
    layout = layouts().get(section.measure)  # its columns, main figures and display
    if layout and layout.display:
        return layout.display
    columns = section.columns
    samples = section.sample_columns
    required = {name for name, column in columns.items() if column.needed}
    maps: list[str] = []
    if {"layer", "head"} <= required:  # every row is a head: draw all columns with better values
        maps = [name for name, column in columns.items() if column.better]
    measured = [n for n, column in samples.items() if column.format not in UNMEASURED]
    return Display(about="", maps=tuple(maps), histograms=tuple(measured))


def show_section(section: Section, shown: Collection[Note] = ()) -> list[Block]:
    """Return the blocks of a section: its tables and pictures, settings and notes.

    Args:
        section: the section; a failed one shows its reason.
        shown: notes at the top of the page, which are left out here. So are all warnings.
    """
    parts = [*show_sections({"": section})]
    if section.failure is not None:
        return parts
    result: list[Block] = []
    about = find_display(section).about
    if about:
        result.append(Paragraph(about))
    result += parts
    settings = list_settings(section)
    if settings:
        result.append(Paragraph(f"Settings: {'; '.join(settings)}."))
    notes = [note for note in section.notes if note.level != "warning" and note not in shown]
    result += list_notes(notes)
    return result


def show_brief(section: Section) -> Iterator[Block]:
    """Yield the tables of a section for one screen, and a sentence on the closest bounds.

    A failed section shows only the reason of the failure.
    """
    if section.failure is not None:
        yield from show_section(section)
        return
    display = find_display(section)
    sections = {"": section}  # a single report has no name
    for table in tabulate(sections, display.columns, display.by):
        yield replace(table, cut=True)  # a terminal leaves out columns that do not fit
    closeness = describe_closeness(section)
    if closeness:
        yield Paragraph(closeness)
    if "attention" in display.drawings:  # a map exists only if the user asked for it
        yield from draw_declared("attention", sections)


def describe_closeness(section: Section) -> str:
    """Say how close the closest bounds are to the norm; empty without bounds."""
    columns = section.columns
    if "exact" not in columns:
        return ""
    sentences = []
    # log10(bound / norm) of each head, by bound
    logarithms = list_ratios(columns, section.rows)
    # The closest bound for each status: one that is certified on a whole domain, and one that
    # holds at the samples only.
    for name in find_closest_bounds(columns, section.rows).values():
        ratios = [10**logarithm for logarithm in logarithms[name]]
        middle = format_significant(median(ratios))  # over the heads, in both sentences
        label = write_math(columns[name].label)
        spread = f"at most {format_significant(max(ratios))}"
        if columns[name].status == "certified":
            lead = "The closest certified bound"
        else:
            lead = "The closest bound"
            spread = f"median of {len(ratios)} heads, {spread}"
        sentences.append(f"{lead}, {label}, is {middle} times ‖J‖ ({spread}).")
    return " ".join(sentences)


def list_settings(section: Section) -> list[str]:
    """Return the settings of a section as texts, such as `steps 20`.

    A switch that is on is listed by name. Settings that are off, unset or without an effect are
    left out.
    """
    # The chapter of `jacobian` lists the settings for its parts, such as `jacobian.shares`, too.
    if "." in section.measure:
        return []
    settings = []
    idle = _find_idle_settings(section)
    for name, value in section.settings.items():
        if name == SEED or name in idle or value is False or value in (None, [], ()):
            continue
        if value is True:
            settings.append(name)
        else:
            settings.append(f"{name} {format_setting(value)}")
    return settings


def _find_idle_settings(section: Section) -> set[str]:
    """Return the names of settings that a page leaves out.

    These are settings without an effect, such as the steps of an attack that did not run, and
    rarely changed settings that have their default.
    """
    measure = load_measures().get(section.measure)
    if measure is None:  # the plug-in of this measure is not installed
        return set()
    try:
        options = measure.options.parse(section.settings)
    except UsageError:  # another version wrote these settings
        return set()
    # An option has an effect if it needs no other option, or if that option has the needed value.
    idle = set()
    for each in options.options().values():
        is_rare_default = each.rare and section.settings.get(each.name) == each.default
        if is_rare_default or (each.need and not each.need.holds(options)):
            idle.add(each.name)
    return idle


def show_sections(sections: Sections) -> Iterator[Block]:
    """Yield the failures, maps, tables, drawings and histograms of one measure, in this order.

    Args:
        sections: the section of one report (named ""), or of several by the names of their models.
    """
    failures = [*_show_failures(sections)]
    yield from failures
    # Sections with rows, or with more than the ids of the samples.
    measured = {n: each for n, each in sections.items() if each.rows or len(each.samples) > 1}
    if not measured:
        if not failures:
            yield Paragraph("No results: nothing was measured.")
        return
    first = next(iter(measured.values()))
    display = find_display(first)
    for name in display.maps:
        yield from map_column(measured, name)
    tables = list(tabulate(measured, display.columns, display.by))
    yield from tables
    for name in display.drawings:
        yield from draw_declared(name, measured)
    for name in display.histograms:
        yield from count_samples(measured, name)
    # A single report also gets the columns that the table above leaves out.
    if display.columns and "" in measured and first.rows:
        yield from _tabulate_all(first, tables)


def _show_failures(sections: Sections) -> Iterator[Paragraph]:
    """Yield the reason and advice of each section that failed, with the name of its report."""
    for label, section in sections.items():
        failure = section.failure
        if failure:
            text = f"FAILED: {failure.reason}. {failure.advice}"
            yield Paragraph(add_model(label, text).strip())


def _tabulate_all(section: Section, tables: Sequence[Table]) -> Iterator[Table]:
    """Yield a folded table with all columns of a section, except columns of empty texts.

    Nothing is yielded if a table above has as many columns and rows already.

    Args:
        section: the section.
        tables: the tables above, with the columns that the measure chose.
    """
    rows = section.rows
    described = section.columns.items()
    columns = {n: column for n, column in described if any(row.get(n) != "" for row in rows)}
    if tables and len(tables[0].columns) == len(columns) and len(tables[0].rows) == len(rows):
        return
    values = [[*map(row.get, columns)] for row in rows]
    keys = 2 if list(columns)[:2] == ["layer", "head"] else 1  # columns that name a row
    yield Table(blocks.ALL_COLUMNS, [*columns.values()], values, keys=keys, folded=True)


# Maps of heads, histograms of samples


def map_column(sections: Sections, name: str) -> Iterator[Heatmap]:
    """Yield a map of a column over layers and heads for each report that has values."""
    for label, section in sections.items():
        column = section.columns.get(name, HEADINGS["value"])
        titles = find_display(section).titles  # of maps and histograms, by column
        values = {(row.layer, row.head): row.get(name) for row in section.rows}
        if any(value is not None for value in values.values()):
            title = titles.get(name, f"{column.label} of each head")
            yield map_heads(add_model(label, write_math(title)), values, column)


def count_samples(sections: Sections, name: str) -> Iterator[Histogram]:
    """Yield one histogram of a per-sample column for all reports, unless all values are equal."""
    values = {}  # by the name of the report
    for label, section in sections.items():
        if name in section.samples:
            numbers = finite(section.samples[name])
            # matplotlib overflows at larger values.
            values[label or "samples"] = [v for v in numbers if abs(v) < EXTREME]
    distinct = set(chain.from_iterable(values.values()))
    if len(distinct) > 1:
        first = next(iter(sections.values()))
        column = first.sample_column(name)
        title = find_display(first).titles.get(name, f"{column.label} of each sample")
        yield Histogram(write_math(title), x=column, values=values)
