"""Whole model: how the Jacobian norms of the samples are distributed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from lipaudit.report.blocks import Block, Table
from lipaudit.report.page.views.common import FIT, SAMPLE, every_row, histogram, stacked, table
from lipaudit.results import JacobianRow, Section
from lipaudit.results.figures import finite, order, typed

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


def view(section: Section) -> Iterator[Block]:
    """Tabulate the quantiles, draw the histogram, list the most sensitive samples."""
    rows = typed(section, JacobianRow)
    names = [n for n in QUANTILES if n != "module" or any(row.module for row in rows)]
    yield table("Quantiles over samples", section, rows, names)
    if "norm" in section.samples:
        norm = section.sample_column("norm")
        yield from histogram("‖J‖ per sample", norm, {"samples": section.samples["norm"]})
        yield _sensitive(section)
    if "positions" in section.arrays:
        yield _positions(section)
    yield every_row(section)


def side_by_side(sections: Mapping[str, Section]) -> Iterator[Block]:
    """Set the quantiles side by side and overlay the histograms."""
    keys = ("from", "to", "module", "norm")
    yield stacked(sections, ("samples", "mean", "median", "p95", "max"), keys)
    norms = {k: s.samples["norm"] for k, s in sections.items() if "norm" in s.samples}
    if norms:
        column = next(iter(sections.values())).sample_column("norm")
        yield from histogram("‖J‖ per sample", column, norms)


def _sensitive(section: Section) -> Table:
    samples = section.samples
    names = [name for name in SHOWN if name in samples]
    norms = samples["norm"]
    shown = len(norms) if len(norms) <= FIT else TOP
    ranked = sorted(range(len(norms)), key=lambda i: -order(norms[i]))[:shown]
    return Table(
        title="Most sensitive samples",
        columns=(SAMPLE, *(section.sample_column(name) for name in names)),
        rows=tuple((section.ids[i], *(samples[n][i] for n in names)) for i in ranked),
    )


def _positions(section: Section) -> Table:
    """List the positions with the largest norms over the texts that have them."""
    at_each = [
        (i, [v for v in norms if finite([v])])
        for i, norms in enumerate(section.arrays["positions"].numpy().T.tolist())
    ]
    of = JacobianRow.columns()
    known = [(i, len(v), median(v), max(v)) for i, v in at_each if v]
    shown = known if len(known) <= FIT else sorted(known, key=lambda row: -row[3])[:TOP]
    columns = (section.sample_column("position"), of["samples"], of["median"], of["max"])
    return Table(title="Norms by position", columns=columns, rows=tuple(shown))
