"""The figures of a report for loggers, which draw the course of a training."""

from __future__ import annotations

import re
from collections.abc import Callable

from lipaudit.tables import Report
from lipaudit.tables.columns import finite
from lipaudit.tables.summary import summary

Logger = Callable[[dict[str, float], int], object]
"""Called with figures by name, and their step: `mlflow.log_metrics` is one."""

PREFIX = "lipaudit/"


def collect_figures(report: Report) -> dict[str, float]:
    """Return the figures of a report for loggers, under names that every logger accepts.

    Figures that are not finite are left out.
    """
    summed, figures = summary(report), dict[str, float]()
    for each in summed.accuracy:
        ball = re.sub(r"[^A-Za-z0-9.]+", "_", f"{each.norm} {each.eps}")
        figures[f"{each.kind}_accuracy" + (f"/{ball}" if each.norm else "")] = each.share
    if summed.norms:
        of = ("median", "p95", "max")
        figures |= {f"jacobian_norm/{name}": getattr(summed.norms, name) for name in of}
    if summed.heads:
        figures["heads/steepest"] = summed.heads.steepest[0].exact
        figures["heads/median"] = summed.heads.median
    if summed.fragile:
        figures["fragile_rows"] = summed.fragile.share
    return {PREFIX + name: value for name, value in figures.items() if finite([value])}
