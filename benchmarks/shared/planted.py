"""Counterexamples planted in training, where attacks miss them.

The recipe of SoundnessBench (Zhou et al., 2024, arXiv:2412.03154) for small vision transformers on
digits. A point on the boundary of a sample's ball gets another class, by a hinge. What PGD found
there in the last steps, and points in nearly the same direction, keep the class of the sample with
a margin. Other samples, the controls, are trained alike without a plant, in larger balls. A
verifier that certifies none of them would pass whatever it did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lipaudit
from benchmarks.shared.demos import load_shipped
from lipaudit.attacks.balls import Ball, check_inside, project, random_start, steepest
from lipaudit.attacks.oracle import pgd

CLASSES, SIDE, PATCH, WIDTH, HEADS = 2, 8, 4, 32, 2
"""Zeros and ones of the digits, pixels of a side and of a patch, sizes of the model."""
PLANTS, CONTROLS = 2, 6
RATE, RESTARTS, PACES, WINDOW, NEAR = 5e-3, 16, 10, 5, 32
"""Learning rate; starts and steps of PGD at planted samples; steps of training whose examples are
kept; points near to a plant in every step."""
CLOSEST = 0.8
"""Largest cosine between a plant and the points near to it that keep the class."""
ROOM = 3
"""Radius in which controls keep their class, in radii of the balls."""
MARGIN, DEPTH, PUSH = 0.5, 0.03, 4.0
"""Margin of what keeps its class; that of the plant; weight of the plant's hinge."""


@dataclass(frozen=True)
class Recipe:
    """A kind of network, a ball, and the weight decay that keeps the network easy to bound."""

    kind: Literal["relu", "gelu"]
    norm: Literal["linf", "l2"]
    eps: float
    decay: float

    @property
    def ball(self) -> Ball:
        return Ball(self.norm, self.eps)


RECIPES = (
    Recipe("relu", "linf", 0.05, 0.3),
    Recipe("relu", "l2", 0.4, 0.2),
    Recipe("gelu", "linf", 0.03, 0.2),
    Recipe("gelu", "l2", 0.25, 0.2),
)


class Block(nn.Module):
    """A pre-norm block: without normalisation and with ReLU, or with LayerNorm and GELU."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norms = (nn.LayerNorm(WIDTH) if kind == "gelu" else nn.Identity() for _ in range(2))
        self.norms, self.curve = nn.ModuleList(norms), getattr(F, kind)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        mixed = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.curve(self.up(self.norms[1](x))))


class PlantedViT(nn.Module):
    """One block on four patches, and their mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(0.1 * torch.randn(1, (SIDE // PATCH) ** 2, WIDTH))
        self.block, self.head = Block(kind), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 2)."""
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.block(tokens).mean(1))


def gap(logits: Tensor, y: Tensor) -> Tensor:
    """Return by how much the logit of y is above the other one."""
    return logits.gather(1, y[:, None])[:, 0] - logits.gather(1, 1 - y[:, None])[:, 0]


@dataclass(frozen=True)
class Planted:
    """A trained model; the first samples have a plant in their ball, the others have none."""

    recipe: Recipe
    model: nn.Module
    x: Tensor
    y: Tensor
    plants: Tensor

    def holds(self) -> Tensor:
        """Return which samples are right and have a plant of another class in their ball."""
        inside = check_inside(self.plants, self.x[:PLANTS], self.recipe.ball, "plant")
        with torch.no_grad():
            right = gap(self.model(self.x[:PLANTS]), self.y[:PLANTS]) > 0
            return right & (gap(self.model(inside), self.y[:PLANTS]) < 0)

    def verdicts(self, order: int, nodes: int) -> list[str]:
        """Return what `certify` says of every sample; FGSM leaves most plants to the proof."""
        report = lipaudit.measure(
            self.model, "certify", data=(self.x, self.y), input_shape=(1, SIDE, SIDE),
            samples=len(self.x), norm=self.recipe.norm, eps=f"{self.recipe.eps}",
            order=f"{order}", nodes=nodes, attack="fgsm",
        )  # fmt: skip
        (verdicts,) = (v for k, v in report.section("certify").samples.items() if "verdict" in k)
        return [str(each) for each in verdicts]

    def missed(self) -> list[bool]:
        """Return which samples PGD, as `lipaudit attack` runs it, does not break."""
        report = lipaudit.measure(
            self.model, "attack", data=(self.x, self.y), input_shape=(1, SIDE, SIDE),
            samples=len(self.x), norm=self.recipe.norm, eps=f"{self.recipe.eps}", attack="pgd",
        )  # fmt: skip
        (flags,) = (v for k, v in report.section("attack").samples.items() if "robust@pgd" in k)
        return [bool(each) for each in flags]


def train_planted(recipe: Recipe, seed: int = 0, steps: int = 1500) -> Planted:
    """Train a model with plants, from scratch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _train(recipe, steps, torch.Generator().manual_seed(seed))


def _train(recipe: Recipe, steps: int, random: torch.Generator) -> Planted:
    data, ball, model = load_shipped("train"), recipe.ball, PlantedViT(recipe.kind)
    few = (data.y < CLASSES).nonzero()[: PLANTS + CONTROLS, 0]
    x, y = 0.1 + 0.8 * data.x[few], data.y[few]
    at, label = x[:PLANTS], y[:PLANTS]
    direction = steepest(torch.randn(at.shape, generator=random), ball)
    plants = project(at + recipe.eps * direction, at, ball)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=recipe.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    wide = replace(ball, eps=ROOM * ball.eps)
    window: list[tuple[Tensor, Tensor]] = []

    def found(rows: slice, ball: Ball, restarts: int, paces: int) -> Tensor:
        z, classes = x[rows].repeat(restarts, 1, 1, 1), y[rows].repeat(restarts)
        return pgd(model, z, classes, ball, start=random_start(z, ball, random), steps=paces) - z

    def near() -> Tensor:
        d = F.normalize(direction.flatten(1)).view_as(at).repeat(NEAR, 1, 1, 1)
        cosine = CLOSEST * torch.rand(len(d), 1, 1, 1, generator=random)
        noise = F.normalize(torch.randn(d.shape, generator=random).flatten(1)).view_as(d)
        return recipe.eps * steepest(cosine * d + (1 - cosine**2).sqrt() * noise, ball)

    for step in range(steps):
        ramp = min(1.0, step / (0.3 * steps))  # balls, and the plants, grow
        news = (
            found(slice(PLANTS), ball, RESTARTS, PACES),
            found(slice(PLANTS, None), wide, 2, PACES // 2),
        )
        window = [*window, news][-WINDOW:]
        groups = [
            torch.cat([torch.zeros_like(at), *(each for each, _ in window), near()]),
            torch.cat([torch.zeros_like(x[PLANTS:]), *(each for _, each in window)]),
        ]
        loss = torch.zeros(())
        for rows, moves in zip((slice(PLANTS), slice(PLANTS, None)), groups, strict=True):
            count = len(moves) // len(x[rows])
            logits = model(x[rows].repeat(count, 1, 1, 1) + ramp * moves)
            loss = loss + F.relu(MARGIN - gap(logits, y[rows].repeat(count))).mean()
        loss = loss + PUSH * ramp * F.relu(DEPTH + gap(model(plants), label)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    return Planted(recipe, model.eval().requires_grad_(requires_grad=False), x, y, plants)


HEADER = (
    "| network | ball | order | planted | PGD misses | certified | controls | certified |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Count:
    """A row of the table: balls with a plant, those that PGD misses and that are certified."""

    plants: int
    missed: int
    wrong: int
    controls: int
    certified: int


def examine(planted: Planted, orders: Sequence[int], nodes: int) -> Iterator[Count]:
    """Print a row for each order of the forms, and yield it."""
    holds, missed = planted.holds().tolist(), planted.missed()
    for order in orders:
        proven = [verdict == "certified" for verdict in planted.verdicts(order, nodes)]
        count = Count(
            sum(holds),
            sum(a and b for a, b in zip(holds, missed, strict=False)),
            sum(a and b for a, b in zip(holds, proven, strict=False)),
            len(proven) - PLANTS,
            sum(proven[PLANTS:]),
        )
        ball = f"{planted.recipe.norm} {planted.recipe.eps:g}"
        cells = [planted.recipe.kind, ball, order, *astuple(count)]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        yield count


def fails(counts: Sequence[Count]) -> bool:
    """Say whether a ball with a plant is certified, or whether none could have been."""
    found, able = (sum(getattr(c, name) for c in counts) for name in ("missed", "certified"))
    return any(c.wrong for c in counts) or not (found and able)


def save_planted(planted: Planted, path: Path) -> None:
    """Write a model with its samples and plants."""
    tensors = {name: getattr(planted, name).contiguous() for name in ("x", "y", "plants")}
    recipe = {"recipe": json.dumps(asdict(planted.recipe))}
    save_file(planted.model.state_dict(prefix="model.") | tensors, path, recipe)


def load_planted(path: Path) -> Planted:
    """Read what `save_planted` wrote."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        recipe = Recipe(**json.loads(file.metadata()["recipe"]))
    samples = [tensors.pop(name) for name in ("x", "y", "plants")]
    model = PlantedViT(recipe.kind)
    model.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
    return Planted(recipe, model.eval().requires_grad_(requires_grad=False), *samples)
