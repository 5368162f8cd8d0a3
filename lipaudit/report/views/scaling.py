"""How norms grow with the sequence length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lipaudit.report.blocks import Block, Curve, Series
from lipaudit.report.views.common import every_row, order, stacked, typed
from lipaudit.results import ScalingRow, Section


def view(section: Section) -> Iterator[Block]:
    """Tabulate the norms and draw them over the length."""
    yield every_row(section, folded=False)
    yield from _curve({"": section})


def compare(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Overlay the curves of several models."""
    yield stacked(
        sections, ("radius", "norm", "norm_low", "norm_high"), ("mode", "layer", "head", "n")
    )
    yield from _curve(sections)


def compare_fit(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the exponents side by side."""
    names = ("exponent", "exponent_se", "radius_exponent", "r2")
    yield stacked(sections, names, ("mode", "layer", "head"))


def where(layer: int | None, head: int | None) -> str:
    """Name what was measured: a head, a layer or the model."""
    if layer is None:
        return "model"
    return f"layer {layer}" if head is None else f"head {layer}.{head}"


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
    )
