"""Figures of known models, which say whether a figure is large.

`python -m benchmarks yardstick` measures them. The file `reference.json` is the one source of
pages and of docs/reference.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from lipaudit.report import cells
from lipaudit.report.blocks import Cells, Chapter, Paragraph
from lipaudit.report.rows import tabulate_rows
from lipaudit.tables import Report, Section
from lipaudit.tables.formats import join_texts
from lipaudit.tables.summary import describe_figure

FILE = "reference.json"
COMPARED = {
    "attacked_accuracy": "robust accuracy",
    "jacobian_norm": "model sensitivity, median ||J||",
    "steepest_head": "steepest attention head, ||J||",
}
"""Figures of the summary that pages compare, with their names in the file.

They tell demo:robust from demo. The other figures of the file differ by less than 10%.
"""
ABOUT = (
    "Each model on its own data (docs/reference.md). Only figures that differ between demo:robust "
    "(78.1% robust at linf 0.1) and demo (7.8%) are compared. Sensitivity via attention maps, the "
    "median head, fragile rows and bound / ‖J‖ are nearly the same in both."
)


@cache
def list_known() -> tuple[Mapping[str, Any], ...]:
    """Return the known models, each with its name, its kind, its data and its figures."""
    text = files("lipaudit.report").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


def compare_with_known(report: Report, summary: Section) -> Iterator[Chapter]:
    """Yield a chapter with a table of the figures of a report and of known models, if any.

    A known model has a row if it has one of the figures under equal conditions (`where`): in the
    same ball of attacks, or from the same input to the same output.

    Args:
        report: the report.
        summary: its main figures.
    """
    columns = cells.pick_columns("model")
    own: Cells = {"model": report.run.model.spec}
    others: dict[str, Cells] = {}
    for row in summary.rows:
        label = COMPARED.get(row.name)
        where = row.ball
        if row.name == "jacobian_norm":
            where = row.text.partition(",")[0]  # the input and the output: `pixels to logits`
        for model in list_known():
            name = model["name"]
            figure = model["figures"].get(label)
            # No comparison with itself.
            if figure and figure["where"] == where and name != own["model"]:
                others.setdefault(name, {"model": name})[row.metric] = figure["value"]
                own[row.metric] = row.value
                heading = join_texts([label or "", where])
                columns[row.metric] = replace(describe_figure(row), label=heading, domain="")
    if others:
        tables = tabulate_rows(columns, [own, *others.values()], strong={0})
        yield Chapter("reference", "Is that much?", (*tables, Paragraph(ABOUT)))
