"""How far certificates reach: certified radius over the smallest adversarial one that was found.

Prints of each model and norm the median over samples at order 2, and the CPU seconds of a sample,
attacks and all.
"""

from __future__ import annotations

import argparse

import lipaudit
from benchmarks.shared.timing import timed

TOLERANCE = 0.05
"""Relative width at which the searches for radii end."""


def radii(model: str, norm: str, samples: int) -> str:
    """Search for both radii of every sample."""
    seconds, report = timed(
        lambda: lipaudit.measure(
            model, "certify", samples=samples, radius=True, order="2", norm=norm, tol=TOLERANCE
        )
    )
    (row,) = report.section("certify.radius").rows
    return (
        f"{model:12s} {norm:5s} ratio {row.ratio or 0:.3f}, certified {row.radius or 0:.4f} "
        f"(medians of {row.samples}), {seconds / samples:.0f} CPU s a sample"
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=["demo"])
    parser.add_argument("--samples", type=int, default=32)


def run(asked: argparse.Namespace) -> None:
    """Print one line for each model and norm."""
    for model in asked.models:
        for norm in ("linf", "l2"):
            print(radii(model, norm, asked.samples), flush=True)
