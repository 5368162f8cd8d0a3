"""What JaSMin and adversarial training do to a vision transformer on real images, over seeds.

A ViT of 60,730 parameters is trained on Fashion-MNIST (`--data`: the folder of its IDX files, of
Debian's package dataset-fashion-mnist), from scratch and on from ordinary training, and measured:
attention, norms, accuracy under attack, the smallest adversarial radius of each image. Each piece
of work leaves a file under RESULTS and is not done twice, so a study that was cut goes on where it
was; --page only prints the tables of docs/studies/fashion.md, of what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.shared.study import Pair, cells, heading, nearest, rho, scatter, sections
from lipaudit.data.arrays import load_arrays
from lipaudit.data.batch import Batch, identify_samples
from lipaudit.measures.attack_options import AttackOptions
from lipaudit.measures.attention import AttentionOptions
from lipaudit.measures.bounds import BoundsOptions
from lipaudit.measures.jacobian import JacobianOptions
from lipaudit.models.net import LoadOptions, ModelSpec, Net
from lipaudit.models.sources.loader import assemble
from lipaudit.tables.trials import parse_radius
from lipaudit.wings.certificates.options import CertifyOptions
from lipaudit.wings.training.loop import train
from lipaudit.wings.training.recipe import Recipe

SIDE, CLASSES = 28, 10
SIZE = {"patch_size": 7, "embed_dim": 48, "depth": 3, "num_heads": 4, "mlp_ratio": 2}
SCRATCH = Recipe(
    epochs=8,
    batch_size=128,
    optimizer="adamw",
    lr=2e-3,
    weight_decay=0.05,
    schedule="onecycle",
    mixup=0.0,
    cutmix=0.0,
)
ON = {"epochs": 4, "lr": 5e-4, "schedule": "cosine"}
JASMIN = {"penalty": "jasmin", "weight": 1e-2}
EPS = ("0.02", "0.05")
LATE = {"standard": 1, "certify": 2}
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "k = 0": JASMIN,
    "k = 10": JASMIN | {"k": 10},
    "adversarial": {"adversarial": "pgd", "eps": parse_radius("0.05"), "steps": 2},
    "none, on": ON,
    "k = 0, on": ON | JASMIN,
    "k = 10, on": ON | JASMIN | {"k": 10},
}
"""What is changed in the recipe; those named "on" begin where "none" of their seed ended."""
SCRATCH_RUNS = ("none", "k = 0", "k = 10", "adversarial")
"""Whose images are looked at one by one."""

RANKED = 16
"""Images that a rank correlation takes, at least."""

Figures = dict[str, Any]


class Piece(NamedTuple):
    """Some images measured on one trained model."""

    stage: str
    run: str
    seed: int
    start: int = 0
    stop: int = 0

    @property
    def file(self) -> str:
        run = self.run.replace(" = ", "").replace(", ", "-")
        return f"{self.seed}-{run}-{self.stage}-{self.start}.json"


@cache
def images(data: Path, part: str, count: int) -> Batch:
    """The first images of a part of the data, with their labels."""
    x, y = load_arrays(data / f"{part}-images-idx3-ubyte.gz")
    assert y is not None
    x, y = x[:count, None] / 255, y[:count].long()
    return Batch(x, y, identify_samples(list(x), y.tolist()))


def untrained(seed: int) -> Net:
    """A model with random weights."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = VisionTransformer(img_size=SIDE, in_chans=1, num_classes=CLASSES, **SIZE)
    spec = ModelSpec(module, (1, SIDE, SIDE), mean=(0.286,), std=(0.353,))
    return assemble(spec, LoadOptions(), name="fashion", source="random")


def trained(asked: argparse.Namespace, run: str, seed: int) -> Net:
    """The model of a run: read, or trained and kept."""
    net = untrained(seed)
    stored = (asked.results / Piece("weights", run, seed).file).with_suffix(".safetensors")
    if not stored.exists():
        if run.endswith(", on"):
            net = trained(asked, "none", seed)
        recipe = SCRATCH.model_copy(update={"seed": seed, **RUNS[run]})
        for epoch in train(net, images(asked.data, "train", asked.train), recipe):
            print(f"{run}, seed {seed}: epoch {epoch.number}, loss {epoch.loss:.3f}", flush=True)
        save_file(net.module.state_dict(), stored.with_suffix(".part"))
        stored.with_suffix(".part").rename(stored)
    net.module.load_state_dict(load_file(stored))
    return net


def attention(net: Net, batch: Batch) -> Figures:
    """Medians over the heads."""
    rows = sections("attention", AttentionOptions(), net, batch)[0].rows
    names = ("g1", "softmax_norm", "entropy")
    return {name: statistics.median(getattr(row, name) for row in rows) for name in names}


def jacobian(net: Net, batch: Batch) -> Figures:
    """Norms, margins and first-order radii of every image, from pixels to logits."""
    spectral, largest = (
        sections("jacobian", JacobianOptions(norm=norm), net, batch)[0].samples
        for norm in ("2", "inf")
    )
    kept = {name: list(spectral[name]) for name in ("norm", "margin", "correct")}
    radius = largest["radius_first_order"]
    return kept | {"radius": [math.nan if r is None else r for r in radius]}


def heads(net: Net, batch: Batch) -> Figures:
    """Exact norms of heads and layers for every image; medians of norms and of sharp."""
    section, layers = sections("bounds", BoundsOptions(), net, batch)
    medians = {
        name: statistics.median(getattr(row, name) for row in section.rows)
        for name in ("exact", "sharp")
    }
    each = layers.arrays["exact_out"].numpy()
    return medians | {
        "head": list(section.samples["exact_max"]),
        **{f"layer {i}": norms.tolist() for i, norms in enumerate(each)},
    }


def radii(net: Net, batch: Batch) -> Figures:
    """The smallest adversarial radius that was found; NaN where it is wrong without an attack."""
    f = net.make_classifier(batch)
    with torch.no_grad():
        wrong = f(batch.x).argmax(1) != batch.y
    return {"smallest": nearest(f, batch.x, batch.y).masked_fill(wrong, math.nan).tolist()}


def attacked(preset: str, eps: Sequence[str]) -> Callable[[Net, Batch], Figures]:
    """What a preset of attacks leaves standing, image by image."""

    def figures(net: Net, batch: Batch) -> Figures:
        options = AttackOptions(attack=preset, eps=eps)
        samples = sections("attack", options, net, batch)[0].samples
        robust = {f"{preset}, {e}": list(samples[f"robust@{preset},linf,{e}"]) for e in eps}
        return {"clean": list(samples["correct"])} | robust

    return figures


def certified(net: Net, batch: Batch) -> Figures:
    """The largest certified radius of every image, without branching."""
    options = CertifyOptions(radius=True, order="1", nodes=1, tol=0.25, norm="linf")
    samples = sections("certify", options, net, batch)[0].samples
    return {"certified": [math.nan if r is None else r for r in samples["radius"]]}


MEASURED: dict[str, Callable[[Net, Batch], Figures]] = {
    "attention": attention,
    "jacobian": jacobian,
    "radii": radii,
    "heads": heads,
    "quick": attacked("quick", EPS),
    "standard": attacked("standard", EPS[1:]),
    "certify": certified,
}


def plan(asked: argparse.Namespace) -> list[Piece]:
    """All pieces: first the first images of every seed, then more, then what takes longest."""
    stages: dict[str, tuple[Sequence[str], int, int]] = {
        "attention": (tuple(RUNS), asked.read, asked.read),
        "jacobian": (tuple(RUNS), asked.read, asked.read),
        "radii": (SCRATCH_RUNS, asked.read, asked.read),
        "heads": (SCRATCH_RUNS, asked.read, asked.read),
        "quick": (tuple(RUNS), asked.test, 256),
        "standard": (tuple(RUNS), asked.standard, 128),
        "certify": (SCRATCH_RUNS, asked.certified, 4),
    }
    pieces = [
        Piece(stage, name, seed, start, min(start + size, count))
        for stage, (runs, count, size) in stages.items()
        for start in range(0, count, max(size, 1))
        for seed in range(asked.seeds)
        for name in runs
    ]
    return sorted(pieces, key=lambda p: (LATE.get(p.stage, 0), p.start, p.seed))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train", type=int, default=10_000, help="images to train on")
    parser.add_argument("--test", type=int, default=1000, help="images that `quick` attacks")
    parser.add_argument("--standard", type=int, default=1000, help="that `standard` attacks")
    parser.add_argument("--read", type=int, default=192, help="images whose norms are taken")
    parser.add_argument("--certified", type=int, default=16, help="images to certify radii of")
    parser.add_argument("--picture", type=Path, help="draw images of the first seed (.svg)")
    parser.add_argument("--page", action="store_true", help="print the tables of what is there")


def run(asked: argparse.Namespace) -> None:
    """Do what is missing, then print the tables."""
    asked.results.mkdir(parents=True, exist_ok=True)
    test = max(asked.test, asked.standard, asked.read, asked.certified)
    for piece in () if asked.page else plan(asked):
        file = asked.results / piece.file
        if not file.exists():
            net = trained(asked, piece.run, piece.seed)
            figures = MEASURED[piece.stage](
                net, images(asked.data, "t10k", test)[piece.start : piece.stop]
            )
            file.with_suffix(".part").write_text(json.dumps(figures))
            file.with_suffix(".part").rename(file)
            print(piece.file, flush=True)
    print("\n".join(page(asked)))
    if asked.picture:
        scatter(asked.picture, dict(clouds(pooled(asked), 0)))


Pooled = Mapping[tuple[str, str, int], Figures]
"""What is there by stage, run and seed, of the images that every run of a stage has."""


def pooled(asked: argparse.Namespace) -> Pooled:
    """Read what is there."""
    pieces = plan(asked)
    there = {
        p: json.loads(f.read_text()) for p in pieces if (f := asked.results / p.file).exists()
    }
    lacking = {(p.stage, p.start) for p in pieces if p not in there}
    joined: dict[tuple[str, str, int], Figures] = {}
    for piece, figures in there.items():
        if (piece.stage, piece.start) not in lacking:
            kept = joined.setdefault(piece[:3], {})
            for name, value in figures.items():
                kept[name] = kept.get(name, []) + value if isinstance(value, list) else value
    return joined


def page(asked: argparse.Namespace) -> Iterator[str]:
    """The tables."""
    there, seeds = pooled(asked), range(asked.seeds)
    yield from changes(there, SCRATCH_RUNS, seeds)
    yield from changes(there, list(RUNS)[4:], seeds)
    yield from correlations(there, seeds)


SUMMARIES: dict[str, tuple[str, str, Callable[[Sequence[float]], float] | None]] = {
    "g1": ("attention", "g1", None),
    "softmax norm": ("attention", "softmax_norm", None),
    "entropy (nats)": ("attention", "entropy", None),
    "head norm": ("heads", "exact", None),
    "`sharp` of heads": ("heads", "sharp", None),
    "Jacobian norm": ("jacobian", "norm", np.nanmedian),
    "first-order radius": ("jacobian", "radius", np.nanmedian),
    "smallest radius found": ("radii", "smallest", np.nanmedian),
    "certified radius": ("certify", "certified", np.nanmedian),
    "clean accuracy": ("quick", "clean", np.mean),
    **{f"`quick`, {eps}": ("quick", f"quick, {eps}", np.mean) for eps in EPS},
    f"`standard`, {EPS[1]}": ("standard", f"standard, {EPS[1]}", np.mean),
}


def changes(there: Pooled, runs: Sequence[str], seeds: range) -> Iterator[str]:
    """Means of the first run, and how the others differ, paired by seed, with 95% limits (t)."""
    yield from heading("images", runs[0], *(f"{name}: change" for name in runs[1:]))
    for label, (stage, name, over) in SUMMARIES.items():
        if all((stage, run, seed) in there for run, seed in product(runs, seeds)):
            each = [[there[stage, run, seed][name] for seed in seeds] for run in runs]
            values = [[v if over is None else float(over(v)) for v in run] for run in each]
            count = "" if over is None else len(each[0][0])
            share = over is np.mean
            yield f"| {label} | {count} | " + " | ".join(cells(values, share)) + " |"
    yield ""


def readings(there: Pooled, run: str, seed: int) -> dict[str, Pair]:
    """What might predict the smallest adversarial radius of each image, and that radius."""
    norms, layers = there["jacobian", run, seed], there["heads", run, seed]
    values = {"largest head norm": layers["head"]}
    values |= {f"{name}, with W_O": layers[name] for name in layers if name.startswith("layer ")}
    values |= {"model's Jacobian norm": norms["norm"], "margin": norms["margin"]}
    values |= {"first-order radius": norms["radius"]}
    certificates = there.get(("certify", run, seed), {"certified": []})["certified"]
    if len(certificates) >= RANKED:
        values |= {"certified radius": certificates}
    smallest = np.array(there["radii", run, seed]["smallest"])
    return {name: (np.array(v, float), smallest[: len(v)]) for name, v in values.items()}


def correlations(there: Pooled, seeds: range) -> Iterator[str]:
    """How what is known of an image goes with its smallest adversarial radius."""
    stages = ("jacobian", "radii", "heads")
    if not all(each in there for each in product(stages, SCRATCH_RUNS, seeds)):
        return
    yield from heading("images", *SCRATCH_RUNS)
    each = {run: [readings(there, run, seed) for seed in seeds] for run in SCRATCH_RUNS}
    for label, (values, _) in each[SCRATCH_RUNS[0]][0].items():
        rhos = (rho([pairs[label] for pairs in each[run]]) for run in SCRATCH_RUNS)
        yield f"| {label} | {len(values)} | " + " | ".join(rhos) + " |"
    yield ""


def clouds(there: Pooled, seed: int) -> Iterator[tuple[tuple[str, str], Pair]]:
    """What warns of an image and what does not, without and with adversarial training."""
    for run, label in product(
        ("none", "adversarial"), ("largest head norm", "first-order radius")
    ):
        yield (run, label), readings(there, run, seed)[label]
