"""What studies over seeds share: measures of some images, paired changes, rank correlations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit
from scipy.stats import spearmanr
from torch import Tensor

from lipaudit.attacks.oracle import logits_and_gradient
from lipaudit.data.batch import Batch
from lipaudit.measures import load_measures
from lipaudit.measures.base import MeasureOptions
from lipaudit.models.net import Net
from lipaudit.tables import Section

RESAMPLED = 500
FEWEST = 8
"""Smallest number of pairs for a rank correlation."""
LEAST, MOST, ROUNDS, STEPS = 1e-3, 0.3, 8, 20
"""Between what radii the smallest adversarial one is searched for, how often, with what steps."""
Pair = tuple[np.ndarray, np.ndarray]
"""A value and a radius of every image, from one seed; NaN where it has no radius."""


def sections(name: str, options: MeasureOptions, net: Net, batch: Batch) -> list[Section]:
    """Run a measure on some samples."""
    measure = load_measures()[name]
    parts = list(measure.compute(net, batch.split(measure.batch), options))
    return measure.summarise(parts, options)


class Change(NamedTuple):
    """The mean of changes paired by seed, and how far its 95% limits are (t)."""

    mean: float
    half: float


def change(values: Sequence[float]) -> Change:
    """One seed has no limits: NaN."""
    count, half = len(values), math.nan
    if count > 1:
        half = float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1)) / math.sqrt(count)
    return Change(float(np.mean(values)), half)


def mean_rho(pairs: Sequence[Pair], rows: np.ndarray) -> float:
    """Spearman's rho over those of some images that have a radius, the mean over seeds."""
    each = []
    for values, radius in pairs:
        there = rows[np.isfinite(radius[rows])]
        # With fewer pairs or equal values, a correlation says nothing.
        varied = len(there) >= FEWEST and np.ptp(values[there]) > 0 and np.ptp(radius[there]) > 0
        rho = spearmanr(values[there], radius[there]).statistic if varied else math.nan
        each.append(float(rho))
    return float(np.mean(each))


def rho_limits(pairs: Sequence[Pair]) -> tuple[float, float]:
    """95% limits of `mean_rho` by a bootstrap over the images, which all seeds share."""
    count, draw = len(pairs[0][0]), np.random.default_rng(0)
    drawn = [mean_rho(pairs, draw.integers(count, size=count)) for _ in range(RESAMPLED)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def rho(pairs: Sequence[Pair]) -> str:
    """The mean over the seeds, with its limits."""
    low, high = rho_limits(pairs)
    return f"{mean_rho(pairs, np.arange(len(pairs[0][0]))):+.2f} ({low:+.2f} to {high:+.2f})"


def heading(*names: str) -> Iterator[str]:
    """The first two lines of a table of figures."""
    yield "| | " + " | ".join(names) + " |"
    yield "|---" + "|--:" * len(names) + "|"


def cells(values: Sequence[Sequence[float]], share: bool) -> Iterator[str]:
    """The mean of the first over seeds, then changes; shares in per cent and points."""
    first = statistics.mean(values[0])
    yield f"{100 * first:.1f}%" if share else f"{first:.3g}"
    factor, form, unit = (100, ".1f", " pp") if share else (1, ".2g", "")
    for other in values[1:]:
        mean, half = change([b - a for a, b in zip(values[0], other, strict=True)])
        limits = "" if math.isnan(half) else f" ± {factor * half:{form}}"
        yield f"{factor * mean:+{form}}{limits}{unit}"


def nearest(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The smallest L-inf radius at which PGD breaks each image, searched on a logarithmic scale.

    The nearest broken iterate counts; `MOST` where none was. An upper estimate of the smallest.
    """
    low, high = (torch.full((len(x),), end) for end in (LEAST, MOST))
    for _ in range(ROUNDS):
        middle, z = (low * high).sqrt(), x
        eps = middle.view(-1, 1, 1, 1)
        for step in range(STEPS + 1):
            logits, slope = logits_and_gradient(f, z, y)
            away = (z - x).abs().flatten(1).amax(1)
            broken = (logits.argmax(1) != y) & (step > 0)
            high = torch.where(broken, torch.minimum(high, away), high)
            z = (x + (z + 2.5 * eps / STEPS * slope.sign() - x).clamp(-eps, eps)).clamp(0, 1)
        low = torch.where(high <= middle * (1 + 1e-5), torch.minimum(low, high), middle)
    return high


def scatter(file: Path, clouds: Mapping[tuple[str, str], Pair]) -> None:
    """Draw the smallest radius of every image over something else that is known of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2 + len(clouds)), layout="constrained")
    panels = figure.subplots(len(clouds) // 2, 2, sharey="row").ravel()
    for axes, ((run, label), (values, radius)) in zip(panels, clouds.items(), strict=True):
        axes.scatter(values, radius, s=8, alpha=0.6, linewidths=0)
        axes.set(title=run, xlabel=label, xscale="log", yscale="log")
    figure.supylabel("smallest radius found")
    figure.savefig(file, metadata={"Date": None})
