"""ReLU vision transformers with BatchNorm on 32 x 32 colour images, trained to be certified.

Of the kind that verification competitions use: patches of 8 or 16, a class token, width 48, three
heads, trained on projected gradient steps and a share of interval bounds. Everything follows from
seeds. One is trained where FILE does not hold its weights yet (a few minutes of one core). Printed
is what of its test images is certified by the pass, by the lines of ReLUs and by branching, and
in which time; images that projected gradients break are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared.timing import cpu_clock
from lipaudit.certify.branch import decide
from lipaudit.certify.prove import ball, margins
from lipaudit.certify.prove import run as passed

CLASSES = 10
SIDE = 32


@dataclass(frozen=True)
class Interval:
    """Everything within `radius` of `centre`, entry by entry."""

    centre: Tensor
    radius: Tensor

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.centre + other.centre, self.radius + other.radius)

    def linear(self, layer: nn.Linear) -> Interval:
        return Interval(layer(self.centre), F.linear(self.radius, layer.weight.abs()))

    def patches(self, layer: nn.Conv2d) -> Interval:
        spread = F.conv2d(self.radius, layer.weight.abs(), stride=layer.stride)
        return Interval(*(t.flatten(2).mT for t in (layer(self.centre), spread)))

    def norm(self, layer: TokenNorm) -> Interval:
        gain = layer.weight * (layer.running_var + layer.eps).rsqrt()
        centre = (self.centre - layer.running_mean) * gain + layer.bias
        return Interval(centre, self.radius * gain.abs())

    def relu(self) -> Interval:
        low, high = F.relu(self.centre - self.radius), F.relu(self.centre + self.radius)
        return Interval((low + high) / 2, (high - low) / 2)

    def __matmul__(self, other: Interval) -> Interval:
        radius = self.centre.abs() @ other.radius
        radius = radius + self.radius @ (other.centre.abs() + other.radius)
        return Interval(self.centre @ other.centre, radius)

    def softmax(self) -> Interval:
        """p_j grows with its own logit and falls with the others."""
        top = (self.centre + self.radius).amax(-1, keepdim=True).detach()
        low, high = ((self.centre + sign * self.radius - top).exp() for sign in (-1, 1))
        others = (t.sum(-1, keepdim=True) - t for t in (high, low))
        least, largest = (
            own / (own + rest.clamp_min(1e-9))
            for own, rest in zip((low, high), others, strict=True)
        )
        return Interval((largest + least) / 2, (largest - least) / 2)

    def heads(self, heads: int) -> Interval:
        return Interval(*(_heads(t, heads) for t in (self.centre, self.radius)))


def _heads(t: Tensor, heads: int) -> Tensor:
    return t.view(*t.shape[:2], heads, -1).transpose(1, 2)


class TokenNorm(nn.BatchNorm1d):
    """Statistics of every channel, over tokens and images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """Attention and ReLU MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = TokenNorm(width), TokenNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        for flat in (self.query, self.key):
            nn.init.normal_(flat.weight, std=0.05)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (_heads(each(y), self.heads) for each in (self.query, self.key, self.value))
        mixed = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(*x.shape))
        return x + self.down(F.relu(self.up(self.second(x))))

    def bounds(self, x: Interval) -> Interval:
        """The same of intervals."""
        y = x.norm(self.first)
        q, k, v = (y.linear(each).heads(self.heads) for each in (self.query, self.key, self.value))
        scale = q.centre.shape[-1] ** -0.5
        q = Interval(q.centre * scale, q.radius * scale)
        mixed = (q @ Interval(k.centre.mT, k.radius.mT)).softmax() @ v
        flat = (t.transpose(1, 2).reshape(*x.centre.shape) for t in (mixed.centre, mixed.radius))
        x = x + Interval(*flat).linear(self.out)
        return x + x.norm(self.second).linear(self.up).relu().linear(self.down)


class ReluViT(nn.Module):
    """Logits of images in [0, 1]."""

    def __init__(
        self, *, layers: int = 3, patch: int = 8, width: int = 48, heads: int = 3
    ) -> None:
        super().__init__()
        tokens = (SIDE // patch) ** 2 + 1
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch((x - 0.5) / 0.25).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])

    def bounds(self, x: Tensor, eps: float) -> Interval:
        """Logits of all images within eps."""
        patches = Interval((x - 0.5) / 0.25, torch.full_like(x, eps / 0.25)).patches(self.patch)
        token = self.token.expand(len(x), -1, -1)
        z = Interval(
            torch.cat([token, patches.centre], 1) + self.position,
            torch.cat([torch.zeros_like(token), patches.radius], 1),
        )
        for block in self.blocks:
            z = block.bounds(z)
        return Interval(z.centre[:, 0], z.radius[:, 0]).linear(self.head)


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tinted, moved patterns of ten classes, faint before clutter of the same kind."""
    fixed = torch.Generator().manual_seed(0)
    patterns = _smooth(torch.randn(CLASSES, 1, 12, 12, generator=fixed), 48)
    draw = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw)

    y = torch.randint(CLASSES, (count,), generator=draw)
    rows = (6 + 4 * some(count)).int().tolist()
    columns = (6 + 4 * some(count)).int().tolist()
    moved = torch.stack(
        [
            patterns[label, :, i : i + SIDE, j : j + SIDE]
            for label, i, j in zip(y.tolist(), rows, columns, strict=True)
        ]
    )
    tint = 0.4 + some(count, 3, 1, 1)
    clutter = _smooth(torch.randn(count, 3, 8, 8, generator=draw), SIDE)
    grain = torch.randn(count, 3, SIDE, SIDE, generator=draw)
    strength = 0.02 + 0.06 * some(count, 1, 1, 1)
    light = 0.5 + 0.2 * (some(count, 3, 1, 1) - 0.5)
    return (light + strength * tint * moved + 0.06 * clutter + 0.02 * grain).clamp(0, 1), y


def _smooth(noise: Tensor, side: int) -> Tensor:
    field = F.interpolate(noise, size=(side, side), mode="bicubic", align_corners=False)
    return field / field.std(dim=(-2, -1), keepdim=True)


def pgd(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, *, steps: int, restarts: int = 1
) -> Tensor:
    """The worst images that projected gradient steps find, by the margin."""
    best, worst = x, torch.full((len(x),), torch.inf)
    for _ in range(restarts):
        v = (x + eps * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
        for step in range(steps + 1):
            v.requires_grad_(True)
            margin = margins_of(model(v), y)
            (slope,) = torch.autograd.grad(margin.sum(), v)
            v, margin = v.detach(), margin.detach()
            lower = margin < worst
            best = torch.where(lower.view(-1, 1, 1, 1), v, best)
            worst = torch.minimum(margin, worst)
            pace = eps * (0.6 if step < steps / 2 else 0.15)
            v = torch.minimum(torch.maximum(v - pace * slope.sign(), x - eps), x + eps).clamp(0, 1)
    return best


def margins_of(logits: Tensor, y: Tensor) -> Tensor:
    """The logit of the label less the largest other."""
    others = logits.scatter(1, y[:, None], -torch.inf)
    return logits.gather(1, y[:, None])[:, 0] - others.amax(1)


def trained(
    *,
    layers: int = 3,
    patch: int = 8,
    width: int = 48,
    eps: float = 1 / 255,
    share: float = 0.25,
    count: int = 10_000,
    epochs: int = 5,
    seed: int = 0,
) -> ReluViT:
    """Return a model trained on attacked images and `share` of the loss of interval bounds."""
    torch.manual_seed(seed)
    model = ReluViT(layers=layers, patch=patch, width=width)
    x, y = images(count, seed + 1)
    batch = 100
    total = epochs * (count // batch)
    slow = [p for b in model.blocks for p in (*b.query.parameters(), *b.key.parameters())]
    rest = [p for p in model.parameters() if all(p is not each for each in slow)]
    groups = [{"params": rest}, {"params": slow}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-3, 2e-5], total)
    for step in range(total):
        if step % (count // batch) == 0:
            order = torch.randperm(count)
        own = order[step % (count // batch) * batch :][:batch]
        now = eps * min(1.0, 2 * step / total)
        part = share * min(1.0, 2 * step / total) ** 2
        model.eval()
        attacked = pgd(model, x[own], y[own], now, steps=1)
        model.train()
        loss = F.cross_entropy(model(attacked), y[own])
        if part:
            out = model.bounds(x[own], now)
            target = F.one_hot(y[own], CLASSES)
            worst = out.centre + out.radius * (1 - 2 * target)
            loss = loss + part * F.cross_entropy(worst, y[own]).log1p()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def stages(model: ReluViT, *, eps: float, samples: int, seconds: float) -> Iterator[str]:
    """Yield what settles each test image that stands, and a summary."""
    x, y = images(1000, 999)
    right = (model(x).argmax(1) == y).nonzero()[:, 0]
    attacked = pgd(model, x[right], y[right], eps, steps=20, restarts=3)
    standing = right[margins_of(model(attacked), y[right]) > 0]
    yield f"accuracy {len(right) / len(x):.3f}, under attack {len(standing) / len(x):.3f}"
    counts = dict.fromkeys(("pass", "root", "branching", "open"), 0)
    for i in standing[:samples].tolist():
        began, cpu = time.monotonic(), cpu_clock()
        form = ball(x[i : i + 1], eps, box=(0.0, 1.0), dtype=torch.float32)
        out = margins(passed(model, form), int(y[i]))
        middle = cpu_clock() - cpu
        left = seconds - (time.monotonic() - began)
        verdict = decide(out, nodes=10**9, seconds=left)
        stage = "branching" if verdict.certified else "open"
        stage = "root" if verdict.root_bound > 0 else stage
        stage = "pass" if verdict.pass_bound > 0 else stage
        counts[stage] += 1
        yield (
            f"{i:4d} {stage:10s} pass {verdict.pass_bound:8.4f}  root {verdict.root_bound:8.4f}"
            f"  {verdict.nodes:6d} nodes  {verdict.units:4d} ReLUs  pass {middle:5.1f} s of CPU,"
            f" in all {cpu_clock() - cpu:5.1f} s"
        )
    yield ", ".join(f"{stage} {count}" for stage, count in counts.items())


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--patch", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--eps", type=float, default=0.8, help="in 1/255")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0)


def run(asked: argparse.Namespace) -> None:
    """Print the stages of one model."""
    kind = {"layers": asked.layers, "patch": asked.patch}
    if not asked.file.exists():
        torch.save(trained(**kind, share=asked.share).state_dict(), asked.file)
    model = ReluViT(**kind).eval().requires_grad_(requires_grad=False)
    model.load_state_dict(torch.load(asked.file))
    eps = asked.eps / 255
    for line in stages(model, eps=eps, samples=asked.samples, seconds=asked.seconds):
        print(line, flush=True)
