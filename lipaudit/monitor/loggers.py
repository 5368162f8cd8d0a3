"""Loggers: programs that receive the figures of a training in addition to the reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lipaudit.errors import UsageError, suggestion
from lipaudit.tables import Report
from lipaudit.tables.figures import finite
from lipaudit.tables.summary import summary

Logger = Callable[[dict[str, float], int], object]
"""Called with figures by name, and their step."""

PREFIX = "lipaudit/"


def loggers(wanted: str | Logger | Iterable[str | Logger], folder: Path) -> list[Logger]:
    """Return functions that log figures.

    Args:
        wanted: names in `LOGGERS`, or functions.
        folder: folder of loggers that write files.

    Raises:
        UsageError: a name is unknown, or a package is not installed.
    """
    found: list[Logger] = []
    for each in [wanted] if isinstance(wanted, str) or callable(wanted) else wanted:
        if callable(each):
            found.append(each)
            continue
        if each not in LOGGERS:
            raise UsageError(f"there is no logger {each!r}", suggestion(each, LOGGERS))
        try:
            found.append(LOGGERS[each](folder))
        except ImportError as error:
            raise UsageError(
                f"the logger {each} cannot be imported ({error})",
                f"Install it: pip install 'lipaudit[{each}]'",
            ) from error
    return found


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


def _tensorboard(folder: Path) -> Logger:
    """Write event files below the folder; all sessions share one directory."""
    writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(folder / "tensorboard")

    def log(figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _mlflow(_folder: Path) -> Logger:
    """Log to the active run; MLflow starts one if there is none."""
    mlflow: Any = import_module("mlflow")
    return lambda figures, step: mlflow.log_metrics(dict(figures), step=step)


def _wandb(_folder: Path) -> Logger:
    """Log to the open run over our own step: the run's step may be larger, and never decreases."""
    wandb: Any = import_module("wandb")
    if wandb.run is None:
        raise UsageError("no W&B run is active", "Call wandb.init() before the training.")
    axis = f"{PREFIX}step"
    wandb.run.define_metric(axis)
    wandb.run.define_metric(f"{PREFIX}*", step_metric=axis)
    return lambda figures, step: wandb.run.log({**figures, axis: step})


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""Functions that create a logger for a folder."""
