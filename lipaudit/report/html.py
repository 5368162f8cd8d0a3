"""A page as one HTML file: it loads nothing, prints, fits a phone, and works without scripts.

Its own script is a file beside the style; the page permits only the script with this hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
from typing import Any

from lipaudit.errors import visible
from lipaudit.report import blocks
from lipaudit.report.charts import draw_svg

NAME = "html"


def render(page: blocks.Document) -> bytes:
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
        "drawn": lambda block: Markup(draw_svg(block)),  # drawn here, with escaped texts
        "laid": blocks.lay_out,
        "numbers": lambda block: [list(map(_write_number, row)) for row in block.rows],
        "tokens": blocks.shade_tokens,
        "legend": blocks.explain_shades,
    }
    # The page permits only the script with this hash, so a name cannot smuggle in another.
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.get_template("report.html").render(page=page, script=script, digest=digest)
    return visible(text, keep="\n\t").encode()


def _write_number(value: Any) -> str:
    """Return the number to sort a cell by, also where texts are equal; empty for texts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return ""
    return f"{value:.6g}".replace("inf", "Infinity")  # as scripts spell it
