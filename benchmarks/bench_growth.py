"""How cost and memory grow with tokens, width, heads, layers, samples and classes, one at a time.

    python -m benchmarks growth results.jsonl tokens heads      # measures what is missing there
    python -m benchmarks growth results.jsonl --draw docs       # tables, and pictures in docs

The models are vision transformers of timm with random weights, patches of 4 x 4 and no class
token, on random images. Each measure of each model is a process: CPU seconds of one thread (median
of three where a run is short), and what it adds at its peak to a process that holds the model.
Exponents are least squares of logarithms over all sizes, with 95% intervals (t).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import stdtrit

from benchmarks.bench_heads import (
    BOUNDS,
    EXACT,
    LAYERS,
    READING,
    STATISTICS,
    SURVEY,
    profiled,
)
from benchmarks.shared.drawing import curves, standalone
from benchmarks.shared.models import RANDOM, batch_of
from benchmarks.shared.timing import cpu_seconds, least, resident, short, spread
from lipaudit.measures import load_measures
from lipaudit.measures.attack_options import AttackOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.report.blocks import Series

Sizes = dict[str, int]
SMALL = {"tokens": 256, "width": 128, "heads": 4, "layers": 2, "samples": 2, "classes": 10}
ONE_HEAD = SMALL | {"width": 32, "heads": 1, "layers": 1, "samples": 1}
AXES: dict[str, tuple[Sizes, Sequence[int]]] = {
    "tokens": (ONE_HEAD, (64, 128, 256, 512, 1024, 2048, 4096, 8192)),
    "width": (SMALL, (64, 128, 256, 512)),
    "heads": (SMALL, (1, 2, 4, 8, 16)),
    "layers": (SMALL, (1, 2, 4, 8)),
    "samples": (SMALL, (1, 2, 4, 8, 16)),
    "classes": (SMALL, (10, 32, 100, 316, 1000, 10_000)),
}
"""What grows, from which model, through which sizes."""
FORWARD = "a plain forward"
NORM = "whole-model norm"
STEP = "a step of PGD"
SHORT = 3.0
"""CPU seconds below which a run is made three times."""
Point = dict[str, Any]
Seconds = dict[str, float]


def model_of(sizes: Sizes) -> Any:
    """A vision transformer of these sizes."""
    high = 2 ** (int(math.log2(sizes["tokens"])) // 2)
    kind = {"img_size": (4 * high, 4 * sizes["tokens"] // high), "patch_size": 4}
    kind |= {"embed_dim": sizes["width"], "num_heads": sizes["heads"], "depth": sizes["layers"]}
    kind |= {"num_classes": sizes["classes"], "class_token": False, "global_pool": "avg"}
    torch.manual_seed(0)
    return load_net("timm:vit_tiny_patch16_224", LoadOptions(model_kwargs=RANDOM | kind))


def point(sizes: Sizes, measure: str) -> Point:
    """Measure one model: CPU seconds by quantity, and the MB that are added."""
    net = model_of(sizes)
    batch = batch_of(net, sizes["samples"])
    with torch.no_grad():
        batch = replace(batch, y=net.forward(net.point(batch), batch).argmax(1))
        forward = least(lambda: net.output(batch))
    before = resident("VmRSS")
    costs = COSTS[measure]
    rounds = [costs(net, batch)]
    if sum(rounds[0].values()) < SHORT:
        rounds += [costs(net, batch), costs(net, batch)]
    seconds = {name: spread(each[name] for each in rounds).median for name in rounds[0]}
    return {"seconds": {FORWARD: forward} | seconds, "memory": resident("VmHWM") - before}


def of_heads(net: Any, batch: Any) -> Seconds:
    """One run of `bounds`; reading the model is a part of every quantity but the survey."""
    net.surveys.clear()
    _, spent, _ = profiled("bounds", net, batch)
    parts = (EXACT, LAYERS, BOUNDS)
    return {SURVEY: spent[SURVEY]} | {part: spent[part] + spent[READING] for part in parts}


def of_statistics(net: Any, batch: Any) -> Seconds:
    """One run of `attention`, but for the survey."""
    _, spent, _ = profiled("attention", net, batch)
    return {STATISTICS: spent[STATISTICS] + spent[READING]}


def of_model(net: Any, batch: Any) -> Seconds:
    """One run of `jacobian`."""
    return {NORM: cost("jacobian", net, batch, JacobianOptions())}


def of_attack(net: Any, batch: Any) -> Seconds:
    """A step, by two lengths of an attack that no sample falls to."""
    few, many = (
        cost("attack", net, batch, AttackOptions(attack="pgd", eps="1e-7", steps=steps))
        for steps in (1, 6)
    )
    return {STEP: (many - few) / 5}


def cost(measure: str, net: Any, batch: Any, asked: Any) -> float:
    """CPU seconds of a measure."""
    return cpu_seconds(lambda: list(load_measures()[measure].compute(net, [batch], asked)))


COSTS: dict[str, Callable[[Any, Any], Seconds]] = {
    "bounds": of_heads,
    "attention": of_statistics,
    "jacobian": of_model,
    "attack": of_attack,
}
"""What each measure tells."""


def elsewhere(sizes: Sizes, measure: str) -> Point:
    """Return `point` of a process of its own, forked from this one, which has imported all."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(point(sizes, measure)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(f"{measure} of {sizes} failed") from None
    finally:
        process.join()


def read(path: Path) -> list[Point]:
    """What has been measured."""
    path.touch()
    return [json.loads(line) for line in path.read_text().splitlines()]


def missing(known: Sequence[Point], axes: Sequence[str]) -> Iterator[Point]:
    """Yield what has not been measured."""
    done = {(each["axis"], each["size"], each["measure"]) for each in known}
    for axis in axes:
        for size in AXES[axis][1]:
            for measure in COSTS:
                if (axis, size, measure) not in done:
                    yield {"axis": axis, "size": size, "measure": measure}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, help="a file of lines, which is continued")
    parser.add_argument("axes", nargs="*", default=list(AXES), help=", ".join(AXES))
    parser.add_argument("--most", type=int, default=10**9, help="largest size to measure")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="write pictures there")


def run(asked: argparse.Namespace) -> None:
    """Measure what is missing, or tabulate and draw what there is."""
    known = read(asked.results)
    if asked.draw:
        print("\n".join(page(known)))
        draw(known, asked.draw)
        return
    for measure in COSTS:
        point(ONE_HEAD | {"tokens": 16}, measure)  # imports what it takes
    for each in missing(known, asked.axes):
        if each["size"] <= asked.most:
            sizes = AXES[each["axis"]][0] | {each["axis"]: each["size"]}
            line = json.dumps(each | elsewhere(sizes, each["measure"]))
            with asked.results.open("a") as file:
                file.write(f"{line}\n")
            print(line, flush=True)


class Growth(NamedTuple):
    """A figure over sizes, which ascend."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def exponent(self) -> tuple[float, float]:
        """Of y = c x^a by least squares of logarithms: a, and half its 95% interval (t)."""
        x, y = np.log(self.sizes), np.log(self.values)
        across, up = x - x.mean(), y - y.mean()
        slope = float(across @ up / (across @ across))
        left, freedom = up - slope * across, len(x) - 2
        error = math.sqrt(float(left @ left) / freedom / float(across @ across))
        return slope, float(stdtrit(freedom, 0.975)) * error

    @property
    def last(self) -> float:
        """The exponent between the two largest sizes."""
        (a, b), (c, d) = self.sizes[-2:], self.values[-2:]
        return math.log(d / c) / math.log(b / a)


def growths(points: Sequence[Point], axis: str) -> dict[str, Growth]:
    """CPU seconds of every quantity along an axis."""
    own = sorted((p for p in points if p["axis"] == axis), key=lambda p: p["size"])
    lines: dict[str, dict[float, float]] = {}
    for p in own:
        for name, seconds in p["seconds"].items():
            line = lines.setdefault(name, {})
            line[p["size"]] = min(seconds, line.get(p["size"], math.inf))
    return {name: Growth(tuple(line), tuple(line.values())) for name, line in lines.items()}


def memories(points: Sequence[Point], axis: str) -> dict[str, Growth]:
    """MB that every measure adds, along an axis."""
    own = sorted((p for p in points if p["axis"] == axis), key=lambda p: p["size"])
    told = {measure: [p for p in own if p["measure"] == measure] for measure in COSTS}
    return {
        f"`{measure}`": Growth(tuple(p["size"] for p in each), tuple(p["memory"] for p in each))
        for measure, each in told.items()
        if each
    }


def fitted(points: Sequence[Point]) -> list[str]:
    """The axes with enough sizes for an exponent and its interval; tokens must be one of them."""
    sizes = {axis: {p["size"] for p in points if p["axis"] == axis} for axis in AXES}
    axes = [axis for axis, known in sizes.items() if len(known) > 2]
    if "tokens" not in axes:
        raise SystemExit("nothing to draw yet: measure three numbers of tokens or more")
    return axes


def page(points: Sequence[Point]) -> Iterator[str]:
    """Write tables as Markdown: exponents along all axes, and figures along tokens."""
    axes = fitted(points)
    for title, of in (("CPU seconds", growths), ("memory", memories)):
        yield f"| exponent of {title} in | {' | '.join(axes)} |"
        yield f"|---|{'--:|' * len(axes)}"
        lines = {axis: of(points, axis) for axis in axes}
        for name in lines[axes[0]]:
            cells = ("{:.2f} ± {:.2f}".format(*lines[axis][name].exponent) for axis in axes)
            yield f"| {name} | {' | '.join(cells)} |"
        yield ""
    yield from figures(growths(points, "tokens"), "CPU seconds")
    yield from figures(memories(points, "tokens"), "MB")


def figures(lines: dict[str, Growth], unit: str) -> Iterator[str]:
    """A table of figures along tokens, every second size."""
    sizes = next(iter(lines.values())).sizes
    shown = range(len(sizes) - 1, -1, -2)[::-1]
    heads = [f"{sizes[i]:,}" for i in shown]
    yield f"| {unit} at | {' | '.join(heads)} | exponent between the last two sizes |"
    yield f"|---|{'--:|' * (len(heads) + 1)}"
    for name, growth in lines.items():
        cells = [short(growth.values[i]) for i in shown]
        yield f"| {name} | {' | '.join(cells)} | {growth.last:.2f} |"
    yield ""


SHOWN = {
    BOUNDS: "bounds",
    LAYERS: "layers",
    EXACT: "heads",
    NORM: "whole model",
    STATISTICS: "statistics",
    STEP: "step of PGD",
    FORWARD: "forward",
} | {f"`{measure}`": measure for measure in COSTS}
"""What pictures show, by short names."""


def draw(points: Sequence[Point], folder: Path) -> None:
    """Write the pictures along tokens."""
    for name, lines, unit in (
        ("growth-cost", growths(points, "tokens"), "CPU seconds"),
        ("growth-memory", memories(points, "tokens"), "MB that are added"),
    ):
        series = (Series(SHOWN[n], *growth) for n, growth in lines.items() if n in SHOWN)
        block = curves(f"{unit} over tokens", "tokens", unit, tuple(series))
        (folder / f"{name}.svg").write_text(standalone(block))
