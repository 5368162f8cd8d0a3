"""Does JaSMin make a vision transformer more robust? Several seeds, paired with the baseline.

It goes on where RESULTS.jsonl ends, and prints the table of docs/studies/jasmin.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from scipy.special import stdtrit

from lipaudit.measures import MEASURES
from lipaudit.models.net import Net
from lipaudit.results import Section
from lipaudit.settings import AttackOptions, AttentionOptions, JacobianOptions, MeasureOptions
from lipaudit.train.demos import STANDARD, shipped, trained

VARIANTS = {
    "baseline": {},
    "jasmin k=0 mean 1e-2": {"penalty": "jasmin", "weight": 1e-2},
    "jasmin k=10 mean 1e-2": {"penalty": "jasmin", "k": 10, "weight": 1e-2},
}
EPS = ("0.05", "0.1")
RECIPE = STANDARD.model_copy(update={"epochs": 40})


def section(name: str, options: MeasureOptions, net: Net) -> Section:
    """Run a measure on the held-out digits."""
    measure = MEASURES[name]
    parts = list(measure.parts(net, shipped("test").split(measure.batch), options))
    return measure.summarise(parts, options)[0]


def figures(net: Net, accuracy: float) -> dict[str, float]:
    """Measure one trained model."""
    attention = section("attention", AttentionOptions(), net).rows
    jacobian = section("jacobian", JacobianOptions(), net).rows[0]
    values = {
        "g1": statistics.median(row.g1 for row in attention),
        "softmax norm": statistics.median(row.softmax_norm for row in attention),
        "Jacobian norm": jacobian.median,
        "clean": accuracy,
    }
    options = AttackOptions(attack="fgsm,pgd,quick", eps=EPS)
    for row in section("attack", options, net).rows:
        if row.attack != "worst":
            values[f"{row.attack} {row.eps_text}"] = row.robust
    return values


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, default=5)


def run(asked: argparse.Namespace) -> None:
    """Train what is missing, then print the table."""
    asked.results.touch()
    done = {
        (r["variant"], r["seed"]): r["figures"]
        for r in map(json.loads, asked.results.read_text().splitlines())
    }
    for seed in range(asked.seeds):
        for name, change in VARIANTS.items():
            if (name, seed) not in done:
                *_, (net, last) = trained(RECIPE.model_copy(update={"seed": seed, **change}))
                done[name, seed] = figures(net, last.accuracy)
                line = {"variant": name, "seed": seed, "figures": done[name, seed]}
                with asked.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    table(done, range(asked.seeds))


def table(done: dict[tuple[str, int], dict[str, float]], seeds: range) -> None:
    """Print means, and paired changes against the baseline with 95 % intervals (t)."""
    names = list(done["baseline", 0])
    t = float(stdtrit(len(seeds) - 1, 0.975))
    print("| | " + " | ".join(VARIANTS) + " |")
    print("|---" * (len(VARIANTS) + 1) + "|")
    for name in names:
        base = [done["baseline", s][name] for s in seeds]
        cells = [f"{statistics.mean(base):.3f}"]
        for variant in list(VARIANTS)[1:]:
            change = [done[variant, s][name] - b for s, b in zip(seeds, base, strict=True)]
            half = t * statistics.stdev(change) / math.sqrt(len(seeds))
            cells.append(f"{statistics.mean(change):+.3f} ± {half:.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |")
