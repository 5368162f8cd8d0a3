"""Which heads carry the sensitivity of a model, and what do penalties and pruning make of it?

It trains small models on digits from several seeds, plain, with penalties on attention and on
adversarial examples, and measures their shares. Of the plain ones it then freezes heads: those of
the largest share, the steepest ones, and random ones. It goes on where RESULTS.jsonl ends, and
prints the tables of docs/studies/shares.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.shared.demos import RECIPES, STANDARD, load_shipped, train_demo
from benchmarks.shared.study import cells, heading, sections
from lipaudit.data.batch import Batch
from lipaudit.measures.attack_options import AttackOptions
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.net import Net

EPOCHS = 20
VARIANTS = {
    "plain": STANDARD,
    "JaSMin": RECIPES["jasmin"],
    "Specformer": STANDARD.model_copy(update={"penalty": "specformer", "weight": 1e-3}),
    "adversarial": RECIPES["robust"],
}
"""The recipes of the demos, shorter; adversarial training goes on from the plain model."""
EPS = ("0.05", "0.1")
# Images of the shares and norms, of the norms of heads, and of the attack.
MEASURED, STEEP, ATTACKED = 96, 8, 180
# Heads frozen together, the first of each order.
FROZEN = (1, 2, 4)


def count_attacked(net: Net, batch: Batch) -> dict[str, float]:
    """Return the accuracy under PGD, and without."""
    rows = sections("attack", AttackOptions(attack="pgd", eps=EPS), net, batch)[0].rows
    values = {f"PGD {row.eps_text}": row.robust for row in rows if row.attack != "worst"}
    return {"clean": rows[0].clean, **values}


def measure(net: Net, held_out: Batch) -> dict[str, float]:
    """Measure one trained model."""
    some = held_out[:MEASURED]
    jacobian, shares, _paths = sections("jacobian", JacobianOptions(shares=True), net, some)
    values = {"norm": jacobian.rows[0].median}
    for name in ("patterns", "attention", "mlps"):
        values[name] = float(np.median(np.array(shares.samples[name], dtype=float)))
    carried = np.array(shares.samples["patterns"]) * np.array(jacobian.samples["norm"])
    values["norm through patterns"] = float(np.median(carried))
    return values | count_attacked(net, held_out[:ATTACKED])


@contextmanager
def freezing(net: Net, heads: Sequence[tuple[int, int]], means: Tensor | None) -> Iterator[None]:
    """Hold the outputs of heads constant: at their value at each image, or at their mean."""
    with ExitStack() as stack:
        for layer, block in enumerate(net.module.blocks):
            chosen = [head for at, head in heads if at == layer]

            def hold(
                _module: nn.Module,
                args: tuple[Tensor],
                layer: int = layer,
                chosen: Sequence[int] = tuple(chosen),
            ) -> tuple[Tensor]:
                parts = [*args[0].chunk(4, -1)]
                for head in chosen:
                    constant = parts[head].detach()
                    if means is not None:
                        constant = means[layer].chunk(4, -1)[head].expand_as(constant)
                    parts[head] = constant
                return (torch.cat(parts, -1),)

            stack.enter_context(block.attn.proj.register_forward_pre_hook(hold))
        yield


def find_means(net: Net, batch: Batch) -> Tensor:
    """Return the mean output of each head at each token, (layers, 1, tokens, width)."""
    seen: list[Tensor] = []
    with ExitStack() as stack, torch.no_grad():
        for block in net.module.blocks:
            hook = block.attn.proj.register_forward_pre_hook(
                lambda _module, args: seen.append(args[0].mean(0, keepdim=True))
            )
            stack.enter_context(hook)
        net.output(batch)
    return torch.stack(seen)


def list_orders(net: Net, held_out: Batch, seed: int) -> dict[str, list[tuple[int, int]]]:
    """Return the heads in three orders."""
    _, shares, _ = sections("jacobian", JacobianOptions(shares=True), net, held_out[:MEASURED])
    bounds = sections("bounds", BoundsOptions(), net, held_out[:STEEP])[0]
    largest = sorted(shares.rows, key=lambda row: -row.share)
    steepest = sorted(bounds.rows, key=lambda row: -row.exact)
    drawn = np.random.default_rng(seed).permutation(len(largest))
    every = [(row.layer, row.head) for row in bounds.rows]
    return {
        "largest share": [(row.layer, row.head) for row in largest],
        "steepest": [(row.layer, row.head) for row in steepest],
        "random": [every[i] for i in drawn],
    }


def prune(net: Net, held_out: Batch, means: Tensor, seed: int) -> dict[str, dict[str, float]]:
    """Freeze heads in three orders: the norm with values held, then of the pruned model."""
    some = held_out[:MEASURED]
    found: dict[str, dict[str, float]] = {}
    for order, heads in list_orders(net, held_out, seed).items():
        for count in FROZEN:
            with freezing(net, heads[:count], None):
                held = sections("jacobian", JacobianOptions(), net, some)[0].rows[0].median
            with freezing(net, heads[:count], means):
                pruned = sections("jacobian", JacobianOptions(), net, some)[0].rows[0].median
                attacked = count_attacked(net, held_out[:ATTACKED])
            found[f"{order}, {count}"] = {"norm, held": held, "norm": pruned, **attacked}
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)


def run(asked: argparse.Namespace) -> None:
    """Train and measure what is missing, then print the tables."""
    asked.results.touch()
    done: dict[tuple[str, int], dict[str, float]] = {}
    for line in map(json.loads, asked.results.read_text().splitlines()):
        done[line["name"], line["seed"]] = line["figures"]

    def keep(name: str, seed: int, figures: dict[str, float]) -> None:
        done[name, seed] = figures
        with asked.results.open("a") as file:
            file.write(json.dumps({"name": name, "seed": seed, "figures": figures}) + "\n")

    held_out, images = load_shipped("test"), load_shipped("train")
    for seed in range(asked.seeds):
        if all((name, seed) in done for name in VARIANTS):
            continue
        plain: Net | None = None
        for name, recipe in VARIANTS.items():
            recipe = recipe.model_copy(update={"seed": seed, "epochs": asked.epochs})
            *_, (net, _) = train_demo(recipe, plain if name == "adversarial" else None)
            keep(name, seed, measure(net, held_out))
            if name == "plain":
                plain = net
                for order, figures in prune(net, held_out, find_means(net, images), seed).items():
                    keep(order, seed, figures)
    print_tables(done, range(asked.seeds))


def print_tables(done: dict[tuple[str, int], dict[str, float]], seeds: range) -> None:
    """Print means over seeds: changes of recipes against the plain one, and pruned models."""

    def read(name: str) -> Callable[[str], list[float]]:
        return lambda figure: [done[name, seed][figure] for seed in seeds]

    figures = list(done["plain", 0])
    print("\n".join(heading(*VARIANTS)))
    for figure in figures:
        share = not figure.startswith("norm")
        values = [read(name)(figure) for name in VARIANTS]
        print(f"| {figure} | " + " | ".join(cells(values, share)) + " |")
    orders = [name for name, seed in done if seed == 0 and name not in VARIANTS]
    print()
    print("\n".join(heading(*done[orders[0], 0])))
    for order in orders:
        means = {figure: statistics.mean(read(order)(figure)) for figure in done[order, 0]}
        texts = [
            f"{value:.3g}" if figure.startswith("norm") else f"{100 * value:.1f}%"
            for figure, value in means.items()
        ]
        print(f"| {order} | " + " | ".join(texts) + " |")
