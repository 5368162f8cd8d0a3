"""How norms grow with the sequence length and the radius."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from lipaudit.report.blocks import Block, Curve, Paragraph, Series, Table
from lipaudit.report.page.views.common import every_row, stacked
from lipaudit.results import Column, ScalingFitRow, ScalingRow, Section
from lipaudit.results.figures import order, typed

MOST = 5
"""Most layers or heads in one picture, spread evenly."""
TITLES = {
    "real": "On data: norms over the length, with c n^a",
    "split": "On data, every token duplicated",
    "adversarial": "At worst-case tokens",
    "ascent": "At the best tokens of an ascent",
}
WHERE = Column(label="of", meaning="A head, a layer or the model.", format="s")


def view(section: Section) -> Iterator[Block]:
    """Draw norms over the length, with fits and slopes, and over the radius; list every row."""
    rows = [row for row in typed(section, ScalingRow) if order(row.norm) > 0]
    by_mode = _grouped(rows, lambda row: row.mode)
    if "real" in by_mode:
        yield _over_lengths(section, by_mode["real"])
    for mode, title in TITLES.items():
        yield from _lengths(section, by_mode.get(mode, []), title)
    yield from _radii(section, by_mode.get("radius", []))
    yield every_row(section)


def fit_view(section: Section) -> Iterator[Block]:
    """Tabulate the exponents, of norms and bounds, and those of the joint fit."""
    rows = typed(section, ScalingFitRow)
    yield Paragraph(
        "norm = c n^a; [C24] finds a near 1/4 on text, and 1/2 is the worst case. Standard "
        "errors take residuals for independent."
    )
    alone = ("exponent", "exponent_se", "r2")
    bounds = ScalingFitRow.declared()
    yield _fits(section, rows, "Exponent of n, and that of the bounds", (*alone, *bounds))
    joint = [row for row in rows if row.joint_exponent is not None]
    names = [name for name in section.columns() if "joint" in name or name.startswith("radius")]
    if joint:
        yield _fits(section, joint, "Exponents of n and R fitted together", names)


def side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Overlay the curves of several models."""
    yield stacked(
        sections, ("radius", "norm", "norm_low", "norm_high"), ("mode", "layer", "head", "n")
    )
    yield from _curve(sections)


def fit_side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the exponents side by side."""
    names = ("radius", "exponent", "exponent_se", "radius_exponent", "r2")
    yield stacked(sections, names, ("mode", "layer", "head"))


def where(layer: int | None, head: int | None) -> str:
    """Name what was measured: a head, a layer or the model."""
    if layer is None:
        return "model"
    return f"layer {layer}" if head is None else f"head {layer}.{head}"


def _fits(
    section: Section, rows: Sequence[ScalingFitRow], title: str, names: Sequence[str]
) -> Table:
    columns = section.columns()
    return Table(
        title,
        (WHERE, columns["mode"], *(columns[name] for name in names)),
        tuple(
            (_at_radius(row), _mode(row), *(getattr(row, name) for name in names)) for row in rows
        ),
        keys=2,
    )


def _over_lengths(section: Section, rows: Sequence[ScalingRow]) -> Table:
    """Lay the norms out: what was measured down, lengths across."""
    columns = section.columns()
    lengths = sorted({row.n for row in rows})
    norms = {(where(row.layer, row.head), row.n): row.norm for row in rows}
    radii = {where(row.layer, row.head): row.radius for row in rows}
    across = [replace(columns["norm"], label=f"n={n}") for n in lengths]
    return Table(
        "On data: norms, medians over the windows",
        (WHERE, columns["radius"], *across),
        tuple((name, radii[name], *(norms.get((name, n)) for n in lengths)) for name in radii),
    )


def _lengths(section: Section, rows: Sequence[ScalingRow], title: str) -> Iterator[Block]:
    """Draw norms over n beside the slopes of n^(1/4) and n^(1/2)."""
    groups = _spread(_grouped(rows, _name))
    series = [_series(name, group) for name, group in groups.items()]
    if series:
        ends = min(s.x[0] for s in series), max(s.x[-1] for s in series)
        guides = [
            Series(f"n^{label}", ends, (series[0].y[0], series[0].y[0] * slope), guide=True)
            for label, slope in (
                ("1/4", (ends[1] / ends[0]) ** 0.25),
                ("1/2", (ends[1] / ends[0]) ** 0.5),
            )
        ]
        columns = section.columns()
        yield Curve(title, columns["n"], columns["norm"], (*series, *guides), log=True)


def _radii(section: Section, rows: Sequence[ScalingRow]) -> Iterator[Block]:
    """Draw norms over R at one length, and the largest over all multiplicities."""
    series = []
    for name, group in _spread(_grouped(rows, _head), 3).items():
        x = tuple(order(row.radius) for row in group)
        series.append(Series(f"{name}, n = {group[0].n}", x, tuple(order(r.norm) for r in group)))
        if group[0].mean_field is not None:
            plateau = tuple(order(row.mean_field) for row in group)
            series.append(Series(f"{name}, mean field", x, plateau))
    if series:
        columns = section.columns()
        title = "Worst-case tokens over the radius: R^2 exp(c R^2) until n_max reaches n"
        yield Curve(title, columns["radius"], columns["norm"], tuple(series), log=True)


Groups = dict[str, list[ScalingRow]]


def _grouped(rows: Sequence[ScalingRow], name: Callable[[ScalingRow], str]) -> Groups:
    groups: Groups = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups


def _spread(groups: Groups, most: int = MOST) -> Groups:
    """Keep the first, the last and some evenly between."""
    names = list(groups)
    if len(names) > most:
        names = [names[round(i * (len(names) - 1) / (most - 1))] for i in range(most)]
    return {name: groups[name] for name in names}


def _name(row: ScalingRow) -> str:
    """Name a line over n: on data R comes with the sample, else it is chosen."""
    chosen = row.mode in ("adversarial", "ascent") and row.radius is not None
    return _head(row) + (f", R = {row.radius:.3g}" if chosen else "")


def _at_radius(row: ScalingFitRow) -> str:
    """Name what was fitted: heads at several radii have a fit for each."""
    radius = "" if row.radius is None else f", R = {row.radius:.3g}"
    return where(row.layer, row.head) + radius


def _head(row: ScalingRow) -> str:
    return where(row.layer, row.head) + (", masked" if row.masked else "")


def _mode(row: ScalingRow | ScalingFitRow) -> str:
    return f"{row.mode}, masked" if row.masked else row.mode


def _curve(sections: Mapping[str, Section]) -> Iterator[Block]:
    groups: dict[str, list[ScalingRow]] = {}
    for label, section in sections.items():
        for row in typed(section, ScalingRow):
            name = " ".join(filter(None, (label, row.mode, where(row.layer, row.head))))
            if order(row.norm) > 0:
                groups.setdefault(name, []).append(row)
    series = tuple(_series(name, rows) for name, rows in groups.items())
    if series:
        columns = next(iter(sections.values())).columns()
        title = "Jacobian norm over the sequence length"
        yield Curve(title, columns["n"], columns["norm"], series, log=True)


def _series(label: str, rows: list[ScalingRow]) -> Series:
    rows = sorted(rows, key=lambda row: row.n)
    return Series(
        label,
        tuple(float(row.n) for row in rows),
        tuple(float(row.norm or 0) for row in rows),
        tuple(row.norm_low for row in rows),
        tuple(row.norm_high for row in rows),
        tuple(row.fitted for row in rows) if any(row.fitted for row in rows) else (),
    )
