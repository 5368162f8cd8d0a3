"""What attacks cost: passes per sample, bare passes, through lipaudit and with the package alone.

    python -m benchmarks attacks demo:robust --samples 16
    python -m benchmarks attacks vit_tiny --samples 2 --eps 0.00001 --scale 50
    python -m benchmarks attacks demo:robust --verdicts --eps 0.08,0.14
    python -m benchmarks attacks demo:robust --against COMMIT      # lipaudit alone, no package

The same draws on both sides: our chunk seeds the package, sample by sample the same starts. Each
figure is CPU time of one thread, medians of interleaved repeats. `floor` is that of as many bare
calls of the model, forward and backward, in batches as large as ours. `--scale` divides steps and
queries, for models on which a whole run takes hours: all costs but the first point's are
proportional to them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import Tensor

from benchmarks.shared.demos import load_shipped
from benchmarks.shared.models import TIMM, loaded
from benchmarks.shared.rounds import Round, Subject
from benchmarks.shared.timing import cpu_seconds, timed
from lipaudit.attacks.evaluate import Chunk, evaluate_chunk
from lipaudit.attacks.kinds import CHUNK, Attack, Trial, read_plan
from lipaudit.tables.trials import parse_radius

PRESET = "standard"
MUTE = logging.Logger("pyautoattack", logging.CRITICAL)


@dataclass
class Model:
    """A classifier that counts its calls: by batch size, forward alone or with a gradient."""

    spec: str
    calls: Counter[tuple[int, bool]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.net = loaded(self.spec)

    def __call__(self, x: Tensor) -> Tensor:
        self.calls[len(x), torch.is_grad_enabled() and x.requires_grad] += 1
        return self.net.read(self.net.call(x, None))

    def samples(self, size: int) -> tuple[Tensor, Tensor]:
        """Return samples and the classes that the model gives them, or their own labels."""
        if self.spec not in TIMM:
            data = load_shipped("test")[:size]
            return data.x, data.y
        x = torch.rand(size, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            return x, self(x).argmax(1)

    def bare(self, calls: Counter[tuple[int, bool]], x: Tensor) -> float:
        """Return the CPU time of so many calls of such sizes: of each a few are timed."""
        total = 0.0
        for (size, gradient), number in calls.items():
            z = x[torch.arange(size) % len(x)]
            times = [cpu_seconds(lambda z=z, g=gradient: self._pass(z, g)) for _ in range(4)]
            total += number * statistics.median(times[1:])
        return total

    def _pass(self, z: Tensor, gradient: bool) -> None:
        with torch.set_grad_enabled(gradient):
            leaf = z.detach().requires_grad_(gradient)
            logits = self.net.read(self.net.call(leaf, None))
            if gradient:
                torch.autograd.grad(logits.sum(), leaf)


def package(f: Model, x: Tensor, y: Tensor, attacks: Sequence[Attack], how: dict) -> Tensor:
    """Run the package's attacks, each on the samples that still stand; return which do."""
    with torch.no_grad():
        stands = f(x).argmax(1) == y
    for attack in attacks:
        runs = {
            "apgd-ce": lambda a: APGDAttack(f, n_iter=a.steps, logger=MUTE, **how),
            "apgd-t": lambda a: APGDAttack_targeted(f, n_iter=a.steps, logger=MUTE, **how),
            "fab-t": lambda a: FABAttack_PT(f, n_iter=a.steps, targeted=True, **how),
            "square": lambda a: SquareAttack(f, n_queries=a.queries, resc_schedule=False, **how),
        }
        rows = stands.nonzero()[:, 0]
        if len(rows) == 0:
            break
        with torch.no_grad():
            z = runs[attack.name](attack).perturb(x[rows].clone(), y[rows].clone())
            stands[rows] = f(z).argmax(1) == y[rows]
    return stands


def of_package(norm: str, eps: str) -> dict[str, object]:
    """A ball in the package's words."""
    return {"norm": {"linf": "Linf", "l2": "L2"}[norm], "eps": float(eps), "device": "cpu"}


def ours(f: Model, x: Tensor, y: Tensor, trial: Trial) -> Tensor:
    """Run our attacks; return which samples stand."""
    ends = []
    for number, (some, labels) in enumerate(zip(x.split(CHUNK), y.split(CHUNK), strict=True)):
        *_, last = evaluate_chunk(f, Chunk(number, some, labels), [trial])
        ends.append(last.robust)
    return torch.cat(ends)


def trial_of(name: str, eps: str, norm: str, scale: int) -> Trial:
    """Return a preset, its steps and queries divided."""
    (trial,) = read_plan(name, norm=norm, radii=[parse_radius(eps)])
    cut = (replace(a, steps=a.steps // scale, queries=a.queries // scale) for a in trial.attacks)
    return replace(trial, attacks=tuple(cut))


def passes(calls: Counter[tuple[int, bool]], gradient: bool) -> int:
    """Count samples passed forward, those with or those without a gradient."""
    return sum(size * n for (size, g), n in calls.items() if g == gradient)


def costs(spec: str, asked: argparse.Namespace, eps: str) -> None:
    """Print a line per attack and per preset: passes per sample, times, ratios."""
    f, x, y = warm(spec, asked.samples, asked.norm)
    how = of_package(asked.norm, eps)
    whole = trial_of(PRESET, eps, asked.norm, asked.scale)
    attacks = () if asked.whole else whole.attacks
    parts = [(attack.name, replace(whole, attacks=(attack,))) for attack in attacks]
    for name, trial in [*parts, (PRESET, whole)]:
        times: dict[str, list[float]] = {"package": [], "ours": [], "floor": []}
        for _ in range(asked.repeats):
            runs = {
                "package": lambda t=trial: package(f, x, y, t.attacks, how),
                "ours": lambda t=trial: ours(f, x, y, t),
            }
            counts = {}
            for kind, run in runs.items():
                f.calls.clear()
                times[kind].append(cpu_seconds(run))
                counts[kind] = Counter(f.calls)
            times["floor"].append(f.bare(counts["ours"], x))
        took = {kind: statistics.median(values) for kind, values in times.items()}
        each = ", ".join(
            f"{kind} {passes(c, False) / len(x):.0f} + {passes(c, True) / len(x):.0f}"
            for kind, c in counts.items()
        )
        print(
            f"{name:9s} passes a sample (forward + with gradient): {each}; "
            f"package {took['package']:.2f} s, ours {took['ours']:.2f} s, "
            f"floor {took['floor']:.2f} s; ours / floor {took['ours'] / took['floor']:.2f}, "
            f"ours / package {took['ours'] / took['package']:.2f}",
            flush=True,
        )


def verdicts(spec: str, asked: argparse.Namespace, eps: str) -> None:
    """Print how many samples stand, and how many verdicts differ from the package's."""
    f, x, y = warm(spec, asked.samples, asked.norm)
    trial = trial_of(PRESET, eps, asked.norm, asked.scale)
    theirs = package(f, x, y, trial.attacks, of_package(asked.norm, eps))
    stands = ours(f, x, y, trial)
    more, fewer = int((stands & ~theirs).sum()), int((theirs & ~stands).sum())
    print(
        f"{spec} {asked.norm} {eps}, {len(x)} samples: package {int(theirs.sum())} stand; "
        f"lipaudit {int(stands.sum())} (+{more}, -{fewer})",
        flush=True,
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=["demo:robust"])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--eps", default="0.08", help="one, or several by commas")
    parser.add_argument("--norm", default="linf", choices=["linf", "l2"])
    parser.add_argument("--scale", type=int, default=1, help="divide steps and queries by it")
    parser.add_argument("--whole", action="store_true", help="the preset alone, no single attack")
    parser.add_argument("--verdicts", action="store_true", help="which samples stand, no times")


def subjects(asked: argparse.Namespace) -> dict[str, Subject]:
    """Our presets, beside those of a commit."""
    return {
        f"{spec}, {PRESET}, {asked.norm} {eps}, {asked.samples} samples": partial(
            one_round, spec, PRESET, eps, asked
        )
        for spec in asked.models
        for eps in asked.eps.split(",")
    }


def one_round(spec: str, name: str, eps: str, asked: argparse.Namespace) -> Round:
    """Attack the samples, and count their passes."""
    f, x, y = warm(spec, asked.samples, asked.norm)
    trial = trial_of(name, eps, asked.norm, asked.scale)
    f.calls.clear()
    seconds, stands = timed(lambda: ours(f, x, y, trial))
    plain = {"CPU (s)": seconds, "samples that stand": float(stands.sum())}
    plain["passes a sample, forward"] = passes(f.calls, False) / len(x)
    plain["passes a sample, with a gradient"] = passes(f.calls, True) / len(x)
    return Round(plain=plain)


@cache
def warm(spec: str, size: int, norm: str) -> tuple[Model, Tensor, Tensor]:
    """A model and its samples, when what is imported and made once has been."""
    f = Model(spec)
    x, y = f.samples(size)
    ours(f, x, y, trial_of("standard", "1e-3", norm, 50))
    return f, x, y


def run(asked: argparse.Namespace) -> None:
    """Print what is asked for, model by model."""
    torch.set_num_threads(1)
    for spec in asked.models:
        for eps in asked.eps.split(","):
            (verdicts if asked.verdicts else costs)(spec, asked, eps)
