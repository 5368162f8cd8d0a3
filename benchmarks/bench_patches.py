"""Patches of digits: attacks and certificates beside every pixel value, tried one by one.

First the demo, under one and under two pixels of any of 17 grey levels. Then small transformers
that are trained here against one patch of 1x1 and of 2x2 pixels (seconds), with certificates.
"""

from __future__ import annotations

import argparse
from itertools import combinations, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipaudit
from benchmarks.shared.timing import timed
from lipaudit import ModelSpec
from lipaudit.attacks.balls import select_places
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.net import LoadOptions, Net
from lipaudit.models.sources.loader import borrow, load_net
from lipaudit.tables.trials import TrialKey, parse_radius

LEVELS, FINE, PIXELS, CHUNK = 17, 65, 64, 2**14
"""Grey levels of digits, and those tried against certificates; pixels; images at a time."""


class PatchViT(nn.Module):
    """One block of attention and ReLUs over 16 patches of 2x2 pixels, and their mean."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 10)."""
        x = self.patch_embed(x).flatten(2).mT + self.positions
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head((x + self.down(F.relu(self.up(x)))).mean(1))


def train(epochs: int, size: int, tries: int = 4) -> ModelSpec:
    """Train on digits with one patch of random black and white, the worst of some random ones."""
    torch.manual_seed(0)
    model, draw = PatchViT(), torch.Generator().manual_seed(0)
    with borrow(ModelSpec(PatchViT(), (1, 8, 8)), LoadOptions(), None) as net:
        batch = load_data("demo:train", net, DataOptions(samples=1437)).batch
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.02)
    steps = epochs * -(-len(batch) // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(batch), generator=draw).split(128):
            x, y = batch.x[rows], batch.y[rows]
            many = x.repeat_interleave(tries, 0)
            places = torch.randint((8 // size) ** 2, (len(many), 1), generator=draw)
            values = torch.rand(many.shape, generator=draw).round()
            many = torch.where(select_places(places, many, (size, size)), values, many)
            with torch.no_grad():
                loss = F.cross_entropy(model(many), y.repeat_interleave(tries), reduction="none")
            worst = torch.arange(len(x)) * tries + loss.view(-1, tries).argmax(1)
            optimizer.zero_grad()
            F.cross_entropy(model(many[worst]), y).backward()
            optimizer.step()
            schedule.step()
    return ModelSpec(model.eval(), (1, 8, 8))


@torch.no_grad()
def survive(net: Net, samples: int, pixels: int, levels: int) -> tuple[tuple[str, ...], list[int]]:
    """Try every choice of pixels with every grey level; return ids and who survives all."""
    batch = load_data("demo", net, DataOptions(samples=samples)).batch
    values = torch.tensor([*product(torch.linspace(0, 1, levels).tolist(), repeat=pixels)])
    places = [*combinations(range(PIXELS), pixels)]
    some, stands = max(1, CHUNK // len(values)), []
    for x, y in zip(batch.x, batch.y, strict=True):
        right = int(net.forward(x[None], batch).argmax()) == int(y)
        for first in range(0, len(places), some) if right else ():
            chosen = torch.tensor(places[first : first + some])
            each = x.flatten().repeat(len(chosen), len(values), 1)
            at = chosen[:, None].expand(-1, len(values), -1)
            each.scatter_(2, at, values.expand(len(chosen), -1, -1))
            if not (net.forward(each.view(-1, *x.shape), batch).argmax(1) == y).all():
                right = False
                break
        stands.append(int(right))
    return batch.ids, stands


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--only", choices=("demo", "trained"))


def run(asked: argparse.Namespace) -> None:
    """Print survivors of every value, of the attack, and those that are certified."""
    count = asked.samples
    if asked.only != "trained":
        for pixels in (1, 2):
            key = TrialKey("patch", "patch", parse_radius(str(pixels)))
            report = lipaudit.measure(
                "demo", "attack", eps=f"{pixels}patches", patch_size=1, samples=count
            )
            attacked = report.section("attack").samples[key.column("robust")]
            ids, stands = survive(load_net("demo"), count, pixels, LEVELS)
            assert ids == report.section("attack").samples["ids"]
            print(
                f"demo, {pixels} of 64 pixels, {count} digits: {sum(stands)} survive all "
                f"{LEVELS} grey levels, {sum(attacked)} the attack",
                flush=True,
            )
    if asked.only == "demo":
        return
    for size in (1, 2):
        seconds, spec = timed(lambda size=size: train(asked.epochs, size))
        print(f"trained against a patch of {size}x{size} in {seconds:.0f} CPU s", flush=True)
        seconds, report = timed(
            lambda spec=spec, size=size: lipaudit.measure(
                spec, "certify", data="demo", eps="1patch", patch_size=size, samples=count
            )
        )
        section = report.section("certify")
        (row,), known = section.rows, section.samples
        verdicts = known["verdict@patch,1"]
        print(
            f"1 patch of {size}x{size} pixels, {count} digits: clean {row.clean:.1%}, "
            f"robust {row.robust:.1%}, certified {row.certified:.1%}, places proven "
            f"{row.places or 0:.1%}, {row.nodes} parts, {seconds / count:.1f} CPU s a digit"
        )
        with borrow(spec, LoadOptions(), None) as net:
            if size == 1:
                ids, stands = survive(net, count, 1, FINE)
                assert ids == known["ids"]
                print(f"  {sum(stands)} digits survive all {FINE} grey levels of all pixels")
            else:
                stands = search(net, count)
            lost = sum(v == "certified" and not s for v, s in zip(verdicts, stands, strict=True))
            print(f"  certified and yet broken by the search: {lost}", flush=True)


@torch.no_grad()
def search(net: Net, samples: int, tries: int = 1000) -> list[int]:
    """Try corners and random values in every 2x2 patch; return who survives all."""
    batch, stands = load_data("demo", net, DataOptions(samples=samples)).batch, []
    draw = torch.Generator().manual_seed(0)
    corners = torch.tensor([*product((0.0, 1.0), repeat=4)]).view(-1, 1, 2, 2)
    for x, y in zip(batch.x, batch.y, strict=True):
        values = torch.cat([corners, torch.rand(tries, 1, 2, 2, generator=draw)])
        filled = [
            torch.where(select_places(torch.tensor([[place]]), x[None], (2, 2)), v, x)
            for place in range(16)
            for v in [values.repeat(1, 1, 4, 4)]
        ]
        stands.append(int((net.forward(torch.cat(filled), batch).argmax(1) == y).all()))
    return stands
