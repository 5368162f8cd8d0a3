"""Share that is certified of ReLU/BatchNorm vision transformers trained against PGD.

    python -m benchmarks proofs --repeats 1 --against COMMIT

The networks have the shape of those of the verification competition (3 x 32 x 32, BatchNorm and
ReLU), two layers and 5 tokens of 16 x 16 pixels, or with --large three layers and 17 tokens. The
images are scikit-learn's digits, enlarged and coloured, with a contrast at which PGD with the
radius below breaks a part of them. Weights are trained on first use (one to three minutes of CPU a
seed) and stay in a temporary folder. Every image that PGD does not break is then proven within
--seconds of CPU, so that the share does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.bench_certify import ReluViT
from benchmarks.shared.demos import load_shipped
from benchmarks.shared.rounds import Round, Subject
from benchmarks.shared.timing import cpu_clock, timed
from lipaudit.wings.certificates import branch
from lipaudit.wings.certificates import prove as proofs
from lipaudit.wings.certificates.form import Form
from lipaudit.wings.certificates.prove import ball

CONTRAST, MIXED, NOISE = 0.4, 0.6, 0.02
"""Of the digits; the largest share of a second digit over each; the deviation of the noise on
every pixel. Pixels are in [0, 1]."""
EPOCHS, BATCH, RATE, ATTACK_STEPS = 24, 64, 2e-3, 3
CHECK_STEPS, STARTS = 40, 3
"""Steps and starts of PGD on the test images."""


class Scaled(nn.Module):
    """A network behind a fixed normalisation of its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        return self.model((x - 0.5) / 0.25)


def draw_images(part: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return coloured digits of 3 x 32 x 32 pixels and their labels."""
    batch, draw = load_shipped(part), torch.Generator().manual_seed(seed)
    x, count = F.interpolate(batch.x, size=32, mode="bilinear") - 0.5, len(batch.x)
    share = MIXED * torch.rand(count, 1, 1, 1, generator=draw)
    x = torch.lerp(x, x[torch.randperm(count, generator=draw)], share)
    colour = 0.75 + 0.5 * torch.rand(count, 3, 1, 1, generator=draw)
    noise = NOISE * torch.randn(count, 3, 32, 32, generator=draw)
    return (0.5 + CONTRAST * colour * x + noise).clamp(0, 1), batch.y


def attack(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int) -> Tensor:
    """Return the last iterate of PGD from a random point of the L-inf ball."""
    z = x + eps * (2 * torch.rand_like(x) - 1)
    for _ in range(steps):
        z = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(z), y), z)
        z = (x + (z + 2.5 * eps / steps * slope.sign() - x).clamp(-eps, eps)).clamp(0, 1)
    return z.detach()


def train(seed: int, large: bool, eps: float) -> nn.Module:
    """Train a network against PGD, with a radius that rises for half of the epochs."""
    torch.manual_seed(seed)
    model = Scaled(ReluViT() if large else ReluViT(depth=2, patch=16))
    x, y = draw_images("train", seed)
    steps = EPOCHS * -(-len(x) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.05)
    pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for epoch in range(EPOCHS):
        radius = eps * min(1.0, 2 * epoch / EPOCHS)
        for part in torch.randperm(len(x)).split(BATCH):
            model.eval()
            z = attack(model, x[part], y[part], radius, ATTACK_STEPS)
            model.train()
            loss = F.cross_entropy(model(z), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace.step()
    return model


def load(seed: int, large: bool, eps: float) -> nn.Module:
    """Return the network of a seed, trained on first use."""
    name = f"{'large' if large else 'small'}-{255 * eps:g}-{seed}.pt"
    path = Path(tempfile.gettempdir()) / "lipaudit-proofs" / name
    model = Scaled(ReluViT() if large else ReluViT(depth=2, patch=16))
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        torch.save(train(seed, large, eps).state_dict(), path)
    model.load_state_dict(torch.load(path))
    return model.eval().requires_grad_(requires_grad=False)


def survivors(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Say which images PGD does not break."""
    stands = model(x).argmax(1) == y
    for _ in range(STARTS):
        stands &= model(attack(model, x, y, eps, CHECK_STEPS)).argmax(1) == y
    return stands


def bound(model: nn.Module, form: Form, y: int) -> Form:
    """Return the margins of an image; code of the time before passes came in two has one."""
    if hasattr(proofs, "bound_margins"):
        return proofs.bound_margins(model, form, y)
    return proofs.margins(proofs.run(model, form), y)


def prove(model: nn.Module, x: Tensor, y: int, eps: float, limits: dict[str, float]) -> dict:
    """Return the outcome for one image and CPU seconds, those of the pass and all."""
    form = ball(x, eps, box=(0.0, 1.0), dtype=torch.float32)
    first, out = timed(lambda: bound(model, form, y))
    left = limits | {"seconds": max(0.0, limits["seconds"] - first)}
    second, verdict = timed(lambda: branch.prove_positive(out, **left))
    return {
        "certified": verdict.certified,
        "nodes": verdict.nodes,
        "alone": bool(out.range()[0].min() > 0),
        "margin": float(out.range()[0].min() / out.centre.min()),
        "pass": first,
        "whole": first + second,
    }


def measure(asked: argparse.Namespace, seed: int) -> Round:
    """Train or load a network, attack it and prove what survives."""
    torch.manual_seed(seed)
    model = load(seed, asked.large, asked.train / 255)
    x, y = (t[: asked.samples] for t in draw_images("test", seed))
    plain = {"clean (%)": 100 * float((model(x).argmax(1) == y).double().mean())}
    # A limit in CPU seconds: the search asks the time of this clock.
    branch.time = SimpleNamespace(monotonic=cpu_clock)  # type: ignore[attr-defined]
    for k in asked.eps:
        eps, where = k / 255, f"at {k:g}/255"
        stands = survivors(model, x, y, eps)
        limits = {"seconds": asked.seconds, "nodes": asked.nodes}
        each = [prove(model, x[i : i + 1], int(y[i]), eps, limits) for i in stands.nonzero()[:, 0]]
        total = len(x)
        plain |= {
            f"not broken by PGD {where} (%)": 100 * len(each) / total,
            f"certified {where} (%)": 100 * sum(r["certified"] for r in each) / total,
            f"certified by the pass alone {where} (%)": 100
            * sum(r["alone"] for r in each)
            / total,
        }
        for name, text in (
            ("margin", "least margin of the pass over that of the centre"),
            ("nodes", "parts of the ball"),
            ("pass", "CPU s of the pass"),
            ("whole", "CPU s a sample"),
        ):
            plain[f"{text} {where}"] = statistics.fmean(float(r[name]) for r in each)
    return Round(plain=plain)


def subjects(asked: argparse.Namespace) -> dict[str, Subject]:
    """Return a round for every seed."""
    return {f"seed {seed}": partial(measure, asked, seed) for seed in asked.seeds}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--eps", type=float, nargs="+", default=[1.0], help="over 255")
    parser.add_argument(
        "--train", type=float, default=4.0, help="radius of the training, over 255"
    )
    parser.add_argument("--large", action="store_true", help="three layers, 17 tokens")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds for a sample")
    parser.add_argument("--nodes", type=int, default=10**9)
