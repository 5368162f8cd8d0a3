"""Random hostile networks: does any point of a ball leave what its certificate says?

Every network is drawn from its seed: up to four layers out of all operations with a rule, with
gains from 1e-3 to 1e3, masks of three kinds, degenerate normalisations, ties, saturated softmax
and dead ReLUs; a read-out and a head of three classes; an L-inf or L2 ball of any order, dtype
and radius. All corners, random points and PGD on each output and margin, all in float64, try
to leave the range of the logits, the polynomial of the symbols or the verdict. What does is
printed with the smallest network that still does it: `check(Case(...))` repeats it.

--words draws balls of words in place of these: a few tokens, near embeddings of each, and how many
of them are replaced at once. All replacements, and points between them, try to leave the bounds.

--planted trains vision transformers with a known counterexample in some balls, where PGD misses
it, and asks `certify` for these balls. See `benchmarks.shared.planted`.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.shared import planted
from benchmarks.shared.balls import draw_symbols, excess, inputs_at
from benchmarks.shared.hostile import MAKERS, Draw, Layer, fit
from lipaudit.wings.certificates.branch import prove_positive
from lipaudit.wings.certificates.form import Form, UnboundedError, find_name
from lipaudit.wings.certificates.prove import RULES, ball, hull, margins
from lipaudit.wings.certificates.prove import run as passed
from tests.wings.certificates.operations import OPERATIONS, TOKENS, WIDTH

CLASSES, MOST_CORNERS, NODES = 3, 8, 40
"""Number of classes; entries of a box with exhaustive corners; parts of a ball in branching."""
POINTS, STEPS = 60, 12
"""Random points of a ball; steps of PGD from each start, of which each objective has three."""
RADII = (0.0, 1e-9, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 3.0, 1e3)
UNREACHABLE = {"radd", "rmul", "truediv", "iter", "vector_norm"}
"""Rules whose names no call of this torch has (x + y of any order is `add`)."""


@dataclass(frozen=True)
class Case:
    """A network and a ball; `parts` are the layers that are kept of those of its seed."""

    seed: int
    parts: tuple[int, ...] = (0, 1, 2, 3)
    moving: int = 6
    eps: float | None = None
    words: bool = False

    def near(self) -> tuple[Tensor, list[Tensor], int]:
        """Return tokens, near embeddings of the first ones, and how many change: all are drawn."""
        d, shape = Draw(self.seed, 59), self.shape
        scale, kind = d.pick(1.0, 1.0, 1e-2, 30.0), d.pick(torch.float32, torch.float64)
        spread = d.pick(*RADII[:-1]) * scale if self.eps is None else self.eps
        x = ((d(1, *shape) + 0.5) * scale).to(kind)
        count = min(d.pick(1, 2, 3, 4), self.moving, shape[0])
        near = [x[0, i] + (spread * d(d.pick(1, 2, 4), shape[1])).to(kind) for i in range(count)]
        return x, near, d.pick(1, 2, count)

    def replace_words(self) -> tuple[Tensor, Tensor]:
        """Return the symbols (texts, n) and the inputs of all replacements of so many tokens."""
        x, near, most = self.near()
        texts, symbols, empty = [], [], torch.zeros(sum(map(len, near)), dtype=torch.float64)
        for chosen in itertools.product(*(range(-1, len(each)) for each in near)):
            if sum(word >= 0 for word in chosen) <= most:
                text, e, first = x[0].clone(), empty.clone(), 0
                for token, word in enumerate(chosen):
                    if word >= 0:
                        text[token], e[first + word] = near[token][word], 1.0
                    first += len(near[token])
                texts.append(text.double())
                symbols.append(e)
        return torch.stack(symbols), torch.stack(texts)

    def ball(self) -> Form:
        """Return the form of the ball: its norm, order, dtypes and radius are drawn."""
        if self.words:
            x, near, most = self.near()
            moves = torch.zeros(sum(map(len, near)), *x.shape, dtype=torch.float64)
            for i, each in enumerate(near):
                first = sum(map(len, near[:i]))
                moves[first : first + len(each), 0, i] = each.double() - x[0, i].double()
            dtype = Draw(self.seed, 58).pick(torch.float32, torch.float64)
            return hull(x, moves, [*map(len, near)], most, dtype=dtype)
        d, shape = Draw(self.seed, 60), self.shape
        x, scale = d(1, *shape) + 0.5, d.pick(1.0, 1.0, 1e-2, 30.0)
        x = x.mul(2).round() / 2 if d.happens(0.3) else x  # ties
        x = x[:, :1].expand(1, *shape) if d.happens(0.2) else x
        places = torch.randperm(x.numel(), generator=d.generator)[: d.pick(1, 2, self.moving)]
        moving = torch.zeros(x.numel(), dtype=torch.bool).index_fill(0, places, True)
        eps = d.pick(*RADII) * scale if self.eps is None else self.eps
        return ball(
            (x * scale).to(d.pick(torch.float32, torch.float64)),
            eps,
            norm=d.pick("linf", "l2"),
            order=d.pick(1, 2),
            box=d.pick(None, (-scale, scale)),
            moving=moving.view(1, *shape),
            dtype=d.pick(torch.float32, torch.float64),
        )

    @property
    def shape(self) -> tuple[int, int]:
        d = Draw(self.seed, 61)
        return d.pick((TOKENS, WIDTH), (d.pick(1, 2, 3, 5), d.pick(1, 2, 4, 7)))

    def layers(self) -> Iterator[tuple[str, Layer]]:
        """Yield the layers that are kept, each from (samples, tokens, width) to the same shape."""
        shape = self.shape
        tables = [MAKERS, OPERATIONS] if shape == (TOKENS, WIDTH) else [MAKERS]
        for part in self.parts:
            d = Draw(self.seed, part)
            if part == 0 or d.happens(0.4):
                name = d.pick(*d.pick(*tables))
                layer = MAKERS[name](d, *shape) if name in MAKERS else OPERATIONS[name]
                yield name, fit(d, layer, shape)

    def network(self) -> Layer:
        d, layers = Draw(self.seed, 62), [layer for _, layer in self.layers()]
        read = d.pick("first", "last", "mean", "norm", "all")
        head = d.linear(self.shape[1] * (self.shape[0] if read == "all" else 1), CLASSES)
        choose: Mapping[str, Layer] = {
            "first": lambda x: x[:, 0],
            "last": lambda x: x[:, -1],
            "mean": lambda x: x.mean(1),
            "norm": lambda x: F.layer_norm(x, x.shape[-1:], None, None, 1e-5)[:, 0],
            "all": lambda x: x.flatten(1),
        }

        def network(x: Any) -> Any:
            for layer in layers:
                x = layer(x)
            return head(choose[read](x))

        return network


class Watch(TorchFunctionMode):
    """Records the names of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, _t: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(find_name(func).removesuffix("_"))
        return func(*args, **(kwargs or {}))


def attacked(case: Case, start: Form, f: Layer, label: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield points e of the ball and the outputs there: corners, random points, paths of PGD."""
    n, linf = start.symbols.inputs, start.symbols.norm == "linf"
    random = Draw(n).generator
    if case.words:
        e, texts = case.replace_words()
        yield e, f(texts)
        # Points between some of them.
        share = torch.rand(POINTS, len(e), generator=random, dtype=e.dtype).pow(8)
        share = share / share.sum(1, keepdim=True)
        yield share @ e, f((share @ texts.flatten(1)).view(-1, *texts.shape[1:]))
        return
    e = draw_symbols(start, POINTS, random)
    if linf and n <= MOST_CORNERS:
        ends = itertools.product((-1.0, 1.0), repeat=n)
        e = torch.cat([e, torch.tensor(list(ends), dtype=e.dtype)])
    yield e, f(inputs_at(start, e))
    # Each logit up and down, and each margin down.
    goals = torch.cat([torch.eye(CLASSES), -torch.eye(CLASSES)])
    goals = torch.cat([goals, torch.eye(CLASSES) - torch.eye(CLASSES)[label]]).double()
    e, goals = e[: 3 * len(goals)], goals.repeat(3, 1)
    for step in range(STEPS):
        e = e.detach().requires_grad_()
        y = f(inputs_at(start, e))
        yield e.detach(), y.detach()
        try:
            (slope,) = torch.autograd.grad((y * goals).sum(), e)
        except RuntimeError:  # of changes in place, and of what detach keeps from its input
            slope = torch.randn(e.shape, generator=random, dtype=e.dtype)
        e, slope = e.detach(), slope.nan_to_num()
        pace = 0.7**step
        if linf:
            e = (e + pace * slope.sign()).clamp(-1, 1)
        else:
            e = e + pace * F.normalize(slope)
            e = e / torch.linalg.vector_norm(e, dim=1, keepdim=True).clamp_min(1)


def check(case: Case) -> tuple[str, str]:
    """Return what became of a case: "bounds", "certified", "unbounded", or "VIOLATION" and why."""
    start, f = case.ball(), case.network()
    truth = f(start.centre)
    label = int(truth.argmax())
    try:
        out = passed(f, start)
        logits = out.reshape(-1)
        low, high = logits.range()
        gaps = margins(passed(f, start).reshape(-1), label)
        certified = prove_positive(gaps, nodes=NODES).certified
    except UnboundedError:
        return "unbounded", ""
    if not (torch.isfinite(low) & torch.isfinite(high)).all():
        return "unbounded", ""
    least = gaps.range()[0]
    others = [j for j in range(CLASSES) if j != label]
    for e, y in attacked(case, start, f, label):
        room = 1e-12 * (1 + y.abs().amax())
        if not torch.isfinite(y).all():
            return "VIOLATION", "an output is not finite"
        if (off := excess(logits, e, y)) > room:
            return "VIOLATION", f"a logit by {off:.2g}"
        gap = (y[:, [label]] - y[:, others]).amin(0)
        if (((least > 0) | certified) & (gap < -room)).any():
            return "VIOLATION", f"a margin of {gap.min():.2g} is certified"
    return "certified" if certified else "bounds", ""


def shrink(case: Case) -> Case:
    """Return a smaller case that still fails: fewer layers, moving entries, and a smaller ball."""
    smaller = [
        replace(case, parts=tuple(p for p in case.parts if p != part)) for part in case.parts
    ]
    smaller += [replace(case, moving=n) for n in range(1, case.moving)]
    smaller += [replace(case, eps=eps) for eps in RADII if case.eps is None or eps < case.eps]
    for each in smaller:
        if check(each)[0] == "VIOLATION":
            return shrink(each)
    return case


def uncovered() -> set[str]:
    """Return the rules that no network calls."""
    with Watch() as watch:
        for seed in range(150):
            case = Case(seed)
            case.network()(torch.randn(1, *case.shape, dtype=torch.float64))
        for operation in OPERATIONS.values():
            operation(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64))
    return set(RULES) - watch.names - UNREACHABLE


def sweep_planted(seed: int, save: Path | None) -> None:
    """Print what is certified of balls with and without a plant; exit with 1 if it fails."""
    print(planted.HEADER)
    counts: list[planted.Count] = []
    for recipe in planted.RECIPES:
        network = planted.train_planted(recipe, seed)
        if save:
            planted.save_planted(network, save / f"{recipe.kind}-{recipe.norm}.safetensors")
        counts += planted.examine(network, (1, 2), nodes=200)
    raise SystemExit(planted.fails(counts))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("count", nargs="?", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first network")
    parser.add_argument("--words", action="store_true", help="draw balls of words")
    parser.add_argument("--planted", action="store_true", help="train networks with plants")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write networks with plants")


def run(asked: argparse.Namespace) -> None:
    """Print violations, and how many networks had bounds; exit with 1 after a violation."""
    if asked.planted:
        sweep_planted(asked.seed, asked.save)
    if asked.count < 1:
        raise SystemExit("COUNT must be at least 1")
    warnings.simplefilter("ignore")
    began, kinds, layers = time.monotonic(), Counter[str](), Counter[str]()
    for seed in range(asked.seed, asked.seed + asked.count):
        case = Case(seed, words=asked.words)
        kind, why = check(case)
        kinds[kind] += 1
        if kind == "VIOLATION":
            least = shrink(case)
            names = [name for name, _ in least.layers()]
            print(f"seed {seed}: {why}: check({least}), layers {names}", flush=True)
        layers.update(name for name, _ in case.layers() if kind in ("bounds", "certified"))
    if missing := uncovered():
        print(f"rules that no network draws: {sorted(missing)}")
    print(
        f"{asked.count} networks in {time.monotonic() - began:.0f} s: {kinds['certified']} "
        f"certified, {kinds['bounds']} with bounds only, {kinds['unbounded']} without bounds; "
        f"{kinds['VIOLATION']} violations; {len(RULES.keys() - missing - UNREACHABLE)} "
        f"of {len(RULES)} rules are called, {len(UNREACHABLE)} by no call of this torch"
    )
    raise SystemExit(1 if kinds["VIOLATION"] or missing else 0)
