"""Cost of the measures of heads in plain no-grad forwards of the same samples, one thread.

A round is one run each of the measures `bounds` and `attention` as a command makes it, with all
weights and surveys new; what their functions take is told apart by watching them. Every figure but
that of the survey includes reading the model (`capture`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from benchmarks.shared.models import MODELS, batch_of, loaded
from benchmarks.shared.profile import Profile
from benchmarks.shared.rounds import Round, Subject
from benchmarks.shared.timing import cpu_clock, least

PROOF = "proof of the closed forms on all samples, and in the survey"
READING = "reading the model (`capture`)"
SURVEY = "`survey`, once per model"
STATISTICS = "attention statistics"
EXACT = "exact norms of all heads"
LAYERS = "exact norms of all layers"
BOUNDS = "all bounds"
OTHER = "other parts of a layer"
FUNCTIONS = {
    SURVEY: ("find_layers", "survey", "make_survey"),
    READING: ("capture", "Layer.heads"),
    PROOF: ("matches_autograd",),
    EXACT: ("head_norms",),
    LAYERS: ("layer_norms",),
    BOUNDS: ("head_bounds",),
    STATISTICS: ("layer_statistics",),
    OTHER: ("measure_layer", "_measure_layer", "_measure_numerically"),
}
"""What a quantity is made of, by the names of functions, at whatever commit."""
PARTS = (EXACT, LAYERS, BOUNDS)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64, help="of texts")


def subjects(asked: argparse.Namespace) -> dict[str, Subject]:
    return {
        f"{name}, {asked.samples} samples": partial(one_round, name, asked)
        for name in asked.models
    }


@cache
def warm() -> None:
    """Import what measures import when they are first run, and let it prepare itself."""
    measured("demo", 1, 64)


def one_round(name: str, asked: argparse.Namespace) -> Round:
    """Measure everything once."""
    warm()
    return measured(name, asked.samples, asked.max_tokens)


def measured(name: str, samples: int, max_tokens: int) -> Round:
    """Load a model and run both measures on it."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # nothing is known of the model
        net = loaded(name)
        batch = batch_of(net, samples, max_tokens)
        with torch.no_grad():
            net.output(batch)
            forward = least(lambda: net.output(batch))
        bounds, spent, values = profiled("bounds", net, batch)
        _, statistics, _ = profiled("attention", net, batch)
    proof = spent.get(PROOF, 0.0)
    seconds = {READING: spent[READING], PROOF: proof}
    seconds |= {part: spent[part] + spent[READING] + proof for part in PARTS if part in spent}
    seconds |= {STATISTICS: statistics[STATISTICS] + statistics[READING]}
    if SURVEY in spent:
        seconds[SURVEY] = spent[SURVEY]
    seconds["`bounds` as a whole, but for the survey"] = bounds - spent.get(SURVEY, 0.0)
    missing = {part: "no function of its name" for part in PARTS if part not in seconds}
    return Round(forward, seconds, figures=figures(values), problems=missing)


def profiled(
    measure: str, net: Any, batch: Any, clock: Callable[[], float] = cpu_clock
) -> tuple[float, dict[str, float], Any]:
    """Run a measure: seconds in all, by function, and the arrays of its only part."""
    from lipaudit.measures import load_measures
    from lipaudit.measures.attention import AttentionOptions
    from lipaudit.measures.bounds import BoundsOptions

    asked = {"bounds": BoundsOptions, "attention": AttentionOptions}[measure]()
    run = partial(load_measures()[measure].compute, net, list(batch.split(len(batch))), asked)
    profile = Profile(FUNCTIONS, clock)
    with profile.watching():
        start = clock()
        (part,) = run()
        seconds = clock() - start
    return seconds, dict(profile.seconds), part.values


def figures(values: Any) -> dict[str, list[float]]:
    """Exact norms, and every bound with what it bounds."""
    from lipaudit.measures.bounds import load_bounds  # type: ignore[attr-defined]  # of any commit

    exact = {"exact norms of heads": "exact", "exact norms of layers before W_O": "layer_exact"}
    exact["exact norms of layers after W_O"] = "layer_exact_out"
    kept = {label: values[name] for label, name in exact.items() if name in values}
    kept |= {f"bound {name} of exact norms of heads": values[name] for name in load_bounds()}
    return {label: array.flatten().tolist() for label, array in kept.items()}
