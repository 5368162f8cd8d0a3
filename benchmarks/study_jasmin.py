"""Does JaSMin make a vision transformer more robust? Several seeds, paired with the baseline.

It goes on where RESULTS.jsonl ends, and prints the table of docs/studies/jasmin.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.shared.demos import STANDARD, load_shipped, train_demo
from benchmarks.shared.study import change, sections
from lipaudit.measures.attack_options import AttackOptions
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.net import Net

VARIANTS = {
    "baseline": {},
    "jasmin k=0 mean 1e-2": {"penalty": "jasmin", "weight": 1e-2},
    "jasmin k=10 mean 1e-2": {"penalty": "jasmin", "k": 10, "weight": 1e-2},
}
EPS = ("0.05", "0.1")
RECIPE = STANDARD.model_copy(update={"epochs": 40})


def figures(net: Net, accuracy: float) -> dict[str, float]:
    """Measure one trained model."""
    held_out = load_shipped("test")
    attention = sections("attention", AttentionOptions(), net, held_out)[0].rows
    jacobian = sections("jacobian", JacobianOptions(), net, held_out)[0].rows[0]
    values = {
        "g1": statistics.median(row.g1 for row in attention),
        "softmax norm": statistics.median(row.softmax_norm for row in attention),
        "Jacobian norm": jacobian.median,
        "clean": accuracy,
    }
    options = AttackOptions(attack="fgsm,pgd,quick", eps=EPS)
    for row in sections("attack", options, net, held_out)[0].rows:
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
        for name, update in VARIANTS.items():
            if (name, seed) not in done:
                *_, (net, last) = train_demo(RECIPE.model_copy(update={"seed": seed, **update}))
                done[name, seed] = figures(net, last.accuracy)
                line = {"variant": name, "seed": seed, "figures": done[name, seed]}
                with asked.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    table(done, range(asked.seeds))


def table(done: dict[tuple[str, int], dict[str, float]], seeds: range) -> None:
    """Print means, and paired changes against the baseline with 95% intervals (t)."""
    names = list(done["baseline", 0])
    print("| | " + " | ".join(VARIANTS) + " |")
    print("|---" * (len(VARIANTS) + 1) + "|")
    for name in names:
        base = [done["baseline", s][name] for s in seeds]
        cells = [f"{statistics.mean(base):.3f}"]
        for variant in list(VARIANTS)[1:]:
            pairs = zip(seeds, base, strict=True)
            mean, half = change([done[variant, s][name] - b for s, b in pairs])
            cells.append(f"{mean:+.3f} ± {half:.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |")
