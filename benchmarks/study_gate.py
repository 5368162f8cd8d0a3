"""What the gate says of pairs of checkpoints, beside what 1,000 fresh samples say.

    python -m benchmarks study_gate

trains ten small vision transformers on 541 of scikit-learn's digits, judges nine against the
first with the default rules on 256 others, and measures all on the remaining 1,000. Run by hand;
its table is that of docs/theory/gate.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import lipaudit
from benchmarks.shared.demos import STANDARD, make_demo
from lipaudit.data.batch import Batch, identify_samples
from lipaudit.gate import compare, judge
from lipaudit.models.net import Net
from lipaudit.tables import Report
from lipaudit.tables.trials import parse_radius
from lipaudit.wings.training.loop import train

TRAINED, JUDGED, FRESH = 541, 256, 1000
PLAN = {"jacobian": {}, "attack": {"attack": "pgd", "eps": "0.05", "steps": 10}}
Data = tuple[np.ndarray, np.ndarray]

# How each checkpoint differs from the first, which is trained for 60 epochs with seed 0. Noise is
# added to the first; adversarial training goes on from it.
PAIRS: dict[str, dict[str, Any]] = {
    "20 adversarial epochs more, linf 0.05": {
        "epochs": 20,
        "lr": 2e-3,
        "adversarial": "pgd",
        "eps": parse_radius("0.05"),
    },
    "another seed": {"seed": 1},
    "half as long": {"seed": 2, "epochs": 30},
    "50% of the data": {"seed": 3, "share": 0.5},
    "70% of the data": {"seed": 4, "share": 0.7},
    "10% of noise in the weights": {"noise": 0.1},
    "2% of noise in the weights": {"noise": 0.02},
    "85% of the data": {"seed": 5, "share": 0.85},
    "a third seed": {"seed": 6},
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--judged", type=int, default=JUDGED, help="samples of the gate")


def run(asked: argparse.Namespace) -> None:
    """Train, judge and print the table."""
    x, y = load_digits()
    order = np.random.default_rng(0).permutation(len(y))
    parts = np.split(order, [TRAINED, TRAINED + JUDGED])
    learnt, judged, fresh = ((x[part], y[part]) for part in parts)
    judged = judged[0][: asked.judged], judged[1][: asked.judged]
    first = fit(learnt)
    before = audit(first, judged)
    truth = rate(first, fresh)
    print("the first on fresh samples: clean {:.1%}, robust {:.1%}\n".format(*truth))
    print("| checkpoint | clean, fresh | robust, fresh | exit code | the gate | compare |")
    print("|---|--:|--:|--:|---|---|")
    for name, how in PAIRS.items():
        net = change_model(first, learnt, **how)
        after = audit(net, judged)
        judgement = judge(after, before)
        found = compare([before, after]).pairs[0].verdicts
        worse = [verdict.metric for verdict in found if verdict.status == "regressed"]
        changes = (
            f"{100 * (new - old):+.1f}" for new, old in zip(rate(net, fresh), truth, strict=True)
        )
        cells = (name, *changes, judgement.exit_code, judgement.reason, ", ".join(worse) or "none")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def load_digits() -> Data:
    """Return all of scikit-learn's digits, pixels in [0, 1]."""
    from sklearn.datasets import load_digits as load

    data = load()
    images = np.round(data.images[:, None] / 16 * 255) / 255
    return images.astype(np.float32), data.target.astype(np.int64)


def change_model(first: Net, data: Data, *, noise: float = 0.0, **how: Any) -> Net:
    """Return another checkpoint: the first with noise or more training, or one from scratch."""
    if not noise:
        return fit(data, start=first if "adversarial" in how else None, **how)
    net = copy_model(first)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in net.module.parameters():
            draw = torch.randn(weight.shape, generator=generator)
            weight += noise * weight.std(correction=0) * draw
    return net


def copy_model(net: Net) -> Net:
    """Return another model with the same weights."""
    copy = make_demo(0)
    copy.module.load_state_dict(net.module.state_dict())
    return copy


def fit(
    data: Data, *, start: Net | None = None, seed: int = 0, share: float = 1.0, **recipe: Any
) -> Net:
    """Train a checkpoint on a share of the data, from scratch or on from another one."""
    x, y = (torch.from_numpy(part[: round(share * len(part))]) for part in data)
    batch = Batch(x, y, identify_samples(list(x), y.tolist()))
    known = STANDARD.model_copy(update={"seed": seed, **recipe})
    net = copy_model(start) if start else make_demo(seed)
    for _ in train(net, batch, known):
        pass
    return net


def audit(net: Net, data: Data, plan: dict[str, Any] = PLAN) -> Report:
    """Measure a checkpoint."""
    spec = lipaudit.ModelSpec(net.module.eval(), (1, 8, 8), mean=(0.5,), std=(0.5,))
    return lipaudit.audit(spec, plan, data=data, samples=len(data[1]))


def rate(net: Net, data: Data) -> tuple[float, float]:
    """Return clean and robust accuracy."""
    section = audit(net, data, {"attack": PLAN["attack"]}).section("attack")
    assert section is not None
    columns = ("correct", "robust@worst,linf,0.05")
    clean, robust = (float(np.mean(section.samples[name])) for name in columns)
    return clean, robust
