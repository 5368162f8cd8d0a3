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

from lipaudit.report.blocks import Cells, Chapter, Paragraph
from lipaudit.report.cells import pick_columns
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
    "Each model on its own data. Figures that hardly differ between a robust and an ordinary "
    "model of the same architecture are left out: docs/reference.md has them."
)


@cache
def list_known_models() -> tuple[Mapping[str, Any], ...]:
    """Return the known models, each with its name, its kind, its data and its figures."""
    text = files("lipaudit.report").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(json.loads(text)["models"])


def compare_with_known(report: Report, summary: Section) -> Iterator[Chapter]:
    """Yield a chapter that compares the figures of a report with those of known models.

    The first row of its table is the model of the report. A known model has a row if it has one of
    the figures under equal conditions: in the same ball of attacks, or from the same input to the
    same output. Models of images and of texts are not compared. Without rows there is no chapter.

    Args:
        report: the report.
        summary: the main figures of the report.
    """
    columns = pick_columns("model")
    audited: Cells = {"model": report.run.model.spec}  # the row of the report
    known: dict[str, Cells] = {}  # the rows of known models
    models = _list_comparable(report)
    for row in summary.rows:
        label = COMPARED.get(row.name, "")
        condition = row.ball
        if row.name == "jacobian_norm":
            condition = row.text.partition(",")[0]  # the input and the output: `pixels to logits`
        for model in models:
            figure = model["figures"].get(label)
            if figure and figure["where"] == condition:  # both models get a cell in this column
                name = model["name"]
                known.setdefault(name, {"model": name})[row.metric] = figure["value"]
                audited[row.metric] = row.value
                # No domain, hence no footnote "at the measured samples": each row of the table is
                # of other samples.
                columns[row.metric] = replace(
                    describe_figure(row), label=join_texts([label, condition]), domain=""
                )
    if known:
        tables = tabulate_rows(columns, [audited, *known.values()], strong={0})
        yield Chapter("reference", "Is that much?", (*tables, Paragraph(ABOUT)))


def _list_comparable(report: Report) -> list[Mapping[str, Any]]:
    """Return the known models that take images or texts like the model of a report, without it."""
    run = report.run
    has_images = "mean" in run.preprocess  # only images have a mean
    return [
        model
        for model in list_known_models()
        if model["images"] == has_images and model["name"] != run.model.spec
    ]
