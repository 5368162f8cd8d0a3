"""A page as one HTML file: it loads nothing, prints, fits a phone, and works without scripts.

Its own script is a file beside the style; the page permits only the script with this hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
from typing import Any

from lipaudit.errors import visible
from lipaudit.report import cells
from lipaudit.report.blocks import (
    Block,
    Document,
    Table,
    explain_shades,
    lay_out,
    shade_tokens,
)
from lipaudit.report.charts import draw_svg
from lipaudit.report.pictures import Picture
from lipaudit.tables import Column

MOST_ROWS = 1200
"""Largest number of rows of a folded table, so that a page stays under 2 MB."""


def render(page: Document) -> bytes:
    """Write a page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("lipaudit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": visible,
        "heading": lambda label: cells.write_math(visible(label)),
        "drawn": lambda block: Markup(draw_svg(block)),  # drawn here, with escaped texts
        "tabulated": _tabulate,
        "scored": lay_out,
        "tokens": shade_tokens,
        "legend": explain_shades,
    }
    # The page permits only the script with this hash, so a name cannot smuggle in another.
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("report.html")
    text = template.render(page=page, kind=name_kind, script=script, digest=digest)
    return visible(text, keep="\n\t").encode()


def name_kind(block: Block) -> str:
    """Return the template's name of a block."""
    return "picture" if isinstance(block, Picture) else type(block).__name__.lower()


def _tabulate(block: Table) -> dict[str, Any]:
    """Return a table's texts for the template."""
    marks, notes = cells.list_footnotes(block.columns)
    heads = list(zip(block.columns, marks, strict=True))
    rows = [
        (index in block.strong, [_cell(v, c) for v, c in zip(row, block.columns, strict=True)])
        for index, row in enumerate(block.rows[:MOST_ROWS])
    ]
    if len(block.rows) > MOST_ROWS:
        notes = [*notes, f"The first {MOST_ROWS} of {len(block.rows)} rows; the JSON has all."]
    return {"heads": heads, "rows": rows, "notes": notes}


def _cell(value: Any, column: Column) -> tuple[str, str]:
    """Return the text of a cell, and the number to sort by if the text does not show it."""
    shown = cells.format_value(value, column)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return shown, ""
    if math.isinf(value):
        return shown, "Infinity" if value > 0 else "-Infinity"
    # Cells of equal text (1.00) still sort by value.
    exact = f"{value:.6g}"
    return shown, "" if exact == shown else exact
