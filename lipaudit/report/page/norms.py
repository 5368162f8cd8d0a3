"""Chapters of norms: over the samples, and over the length of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lipaudit.report.blocks import Block, Paragraph, Table, make_table
from lipaudit.report.page.common import (
    FIT,
    SAMPLE,
    count_values,
    stack_rows,
    tabulate,
    tabulate_all,
)
from lipaudit.report.pictures import Curve, Series
from lipaudit.results import FITS_TABLE, JACOBIAN_TABLE, Column, Row, Section
from lipaudit.results.figures import finite, order
from lipaudit.results.report import rows_of

TOP = 5
QUANTILES = (
    "from",
    "to",
    "module",
    "norm",
    "mean",
    "median",
    "p95",
    "max",
    "within",
    "samples",
    "converged",
)
SHOWN = (
    "norm",
    "upper",
    "norm_median",
    "position",
    "loss",
    "margin",
    "radius_first_order",
    "complete",
    "correct",
    "converged",
)


def view_jacobian(section: Section) -> Iterator[Block]:
    """Tabulate the quantiles, draw the histogram, list the most sensitive samples."""
    rows = rows_of(section)
    names = [n for n in QUANTILES if n != "module" or any(row.module for row in rows)]
    yield tabulate("Quantiles over samples", section, rows, names)
    if "norm" in section.samples:
        norm = section.sample_column("norm")
        yield from count_values("‖J‖ per sample", norm, {"samples": section.samples["norm"]})
        yield _tabulate_sensitive(section)
    if "positions" in section.arrays:
        yield _tabulate_positions(section)
    yield tabulate_all(section)


def compare_jacobian(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the quantiles side by side and overlay the histograms."""
    keys = ("from", "to", "module", "norm")
    yield stack_rows(sections, ("samples", "mean", "median", "p95", "max"), keys)
    norms = {k: s.samples["norm"] for k, s in sections.items() if "norm" in s.samples}
    if norms:
        column = next(iter(sections.values())).sample_column("norm")
        yield from count_values("‖J‖ per sample", column, norms)


def _tabulate_sensitive(section: Section) -> Table:
    samples = section.samples
    names = [name for name in SHOWN if name in samples]
    norms = samples["norm"]
    shown = len(norms) if len(norms) <= FIT else TOP
    ranked = sorted(range(len(norms)), key=lambda i: -order(norms[i]))[:shown]
    cells = ((section.sample_column(n), [samples[n][i] for i in ranked]) for n in names)
    ids = SAMPLE, [section.ids[i] for i in ranked]
    return make_table("Most sensitive samples", [ids, *cells])


def _tabulate_positions(section: Section) -> Table:
    """List the positions with the largest norms over the texts that have them."""
    at_each = [
        (i, [v for v in norms if finite([v])])
        for i, norms in enumerate(section.arrays["positions"].numpy().T.tolist())
    ]
    of = JACOBIAN_TABLE.columns
    known = [(i, len(v), median(v), max(v)) for i, v in at_each if v]
    shown = known if len(known) <= FIT else sorted(known, key=lambda row: -row[3])[:TOP]
    columns = (section.sample_column("position"), of["samples"], of["median"], of["max"])
    return Table(title="Norms by position", columns=columns, rows=tuple(shown))


# Norms over the length of the sequence


MOST = 5
"""Most layers or heads in one picture, spread evenly."""
TITLES = {
    "real": "On data: norms over the length, with c n^a",
    "split": "On data, every token duplicated",
    "adversarial": "At worst-case tokens",
    "ascent": "At the best tokens of an ascent",
}
WHERE = Column(label="of", meaning="A head, a layer or the model.", format="s")


def view_scaling(section: Section) -> Iterator[Block]:
    """Draw norms over the length, with fits and slopes, and over the radius; list every row."""
    rows = [row for row in rows_of(section) if order(row.norm) > 0]
    by_mode = _group_rows(rows, lambda row: row.mode)
    if "real" in by_mode:
        yield _tabulate_lengths(section, by_mode["real"])
    for mode, title in TITLES.items():
        yield from _draw_lengths(section, by_mode.get(mode, []), title)
    yield from _draw_radii(section, by_mode.get("radius", []))
    yield tabulate_all(section)


def view_fits(section: Section) -> Iterator[Block]:
    """Tabulate the exponents, of norms and bounds, and those of the joint fit."""
    rows = rows_of(section)
    yield Paragraph(
        "norm = c n^a; [C24] finds a near 1/4 on text, and 1/2 is the worst case. Standard "
        "errors take residuals for independent."
    )
    alone = ("exponent", "exponent_se", "r2")
    bounds = [name for name in section.columns if name not in FITS_TABLE.own]
    yield _tabulate_fits(section, rows, "Exponent of n, and that of the bounds", (*alone, *bounds))
    joint = [row for row in rows if row.joint_exponent is not None]
    names = [name for name in section.columns if "joint" in name or name.startswith("radius")]
    if joint:
        yield _tabulate_fits(section, joint, "Exponents of n and R fitted together", names)


def compare_scaling(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Overlay the curves of several models."""
    yield stack_rows(
        sections, ("radius", "norm", "norm_low", "norm_high"), ("mode", "layer", "head", "n")
    )
    yield from _draw_all(sections)


def compare_fits(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the exponents side by side."""
    names = ("radius", "exponent", "exponent_se", "radius_exponent", "r2")
    yield stack_rows(sections, names, ("mode", "layer", "head"))


def name_measured(layer: int | None, head: int | None) -> str:
    """Name what was measured: a head, a layer or the model."""
    if layer is None:
        return "model"
    return f"layer {layer}" if head is None else f"head {layer}.{head}"


def _tabulate_fits(
    section: Section, rows: Sequence[Row], title: str, names: Sequence[str]
) -> Table:
    columns = section.columns
    cells = ((columns[name], [row[name] for row in rows]) for name in names)
    where = WHERE, [_name_fit(row) for row in rows]
    mode = columns["mode"], [_format_mode(row) for row in rows]
    return make_table(title, [where, mode, *cells], keys=2)


def _tabulate_lengths(section: Section, rows: Sequence[Row]) -> Table:
    """Tabulate the norms: a row for each head or layer, a column for each length."""
    columns = section.columns
    lengths = sorted({row.n for row in rows})
    norms = {(name_measured(row.layer, row.head), row.n): row.norm for row in rows}
    radii = {name_measured(row.layer, row.head): row.radius for row in rows}
    shown: list[tuple[Column, list[Any]]] = [
        (WHERE, list(radii)),
        (columns["radius"], list(radii.values())),
    ]
    for n in lengths:
        column = replace(columns["norm"], label=f"n={n}")
        shown.append((column, [norms.get((name, n)) for name in radii]))
    return make_table("On data: norms, medians over the windows", shown)


def _draw_lengths(section: Section, rows: Sequence[Row], title: str) -> Iterator[Block]:
    """Draw norms over n beside the slopes of n^(1/4) and n^(1/2)."""
    groups = _thin_out(_group_rows(rows, _name_line))
    series = [_draw_line(name, group) for name, group in groups.items()]
    if series:
        ends = min(s.x[0] for s in series), max(s.x[-1] for s in series)
        guides = [
            Series(f"n^{label}", ends, (series[0].y[0], series[0].y[0] * slope), guide=True)
            for label, slope in (
                ("1/4", (ends[1] / ends[0]) ** 0.25),
                ("1/2", (ends[1] / ends[0]) ** 0.5),
            )
        ]
        columns = section.columns
        yield Curve(title, columns["n"], columns["norm"], (*series, *guides), log=True)


def _draw_radii(section: Section, rows: Sequence[Row]) -> Iterator[Block]:
    """Draw norms over R at one length, and the largest over all multiplicities."""
    series = []
    for name, group in _thin_out(_group_rows(rows, _name_masked), 3).items():
        x = tuple(order(row.radius) for row in group)
        series.append(Series(f"{name}, n = {group[0].n}", x, tuple(order(r.norm) for r in group)))
        if group[0].mean_field is not None:
            plateau = tuple(order(row.mean_field) for row in group)
            series.append(Series(f"{name}, mean field", x, plateau))
    if series:
        columns = section.columns
        title = "Worst-case tokens over the radius: R^2 exp(c R^2) until n_max reaches n"
        yield Curve(title, columns["radius"], columns["norm"], tuple(series), log=True)


Groups = dict[str, list[Row]]


def _group_rows(rows: Sequence[Row], name: Callable[[Row], str]) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def _thin_out(groups: Groups, most: int = MOST) -> Groups:
    """Keep the first, the last and some evenly between."""
    names = list(groups)
    if len(names) > most:
        names = [names[round(i * (len(names) - 1) / (most - 1))] for i in range(most)]
    return {name: groups[name] for name in names}


def _name_line(row: Row) -> str:
    """Name a line over n, with its radius R unless the data set it."""
    chosen = row.mode in ("adversarial", "ascent") and row.radius is not None
    return _name_masked(row) + (f", R = {row.radius:.3g}" if chosen else "")


def _name_fit(row: Row) -> str:
    """Name a fit, with its radius if there is one for each radius."""
    radius = "" if row.radius is None else f", R = {row.radius:.3g}"
    return name_measured(row.layer, row.head) + radius


def _name_masked(row: Row) -> str:
    return name_measured(row.layer, row.head) + (", masked" if row.masked else "")


def _format_mode(row: Row | Row) -> str:
    return f"{row.mode}, masked" if row.masked else row.mode


def _draw_all(sections: Mapping[str, Section]) -> Iterator[Block]:
    groups: dict[str, list[Row]] = {}
    for label, section in sections.items():
        for row in rows_of(section):
            name = " ".join(filter(None, (label, row.mode, name_measured(row.layer, row.head))))
            if order(row.norm) > 0:
                groups.setdefault(name, []).append(row)
    series = tuple(_draw_line(name, rows) for name, rows in groups.items())
    if series:
        columns = next(iter(sections.values())).columns
        title = "Jacobian norm over the sequence length"
        yield Curve(title, columns["n"], columns["norm"], series, log=True)


def _draw_line(label: str, rows: list[Row]) -> Series:
    rows = sorted(rows, key=lambda row: row.n)
    return Series(
        label,
        tuple(float(row.n) for row in rows),
        tuple(float(row.norm or 0) for row in rows),
        tuple(row.norm_low for row in rows),
        tuple(row.norm_high for row in rows),
        tuple(row.fitted for row in rows) if any(row.fitted for row in rows) else (),
    )
