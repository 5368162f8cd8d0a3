"""Exact norms beside a power iteration that stops on an absolute change.

The reference is power iteration on J J^T from a random start: it stops when sigma^2, 0 at first,
changes by less than 1e-3, or after 1000 products. Both are compared with norms converged to 1e-9,
in float64, over all heads of the model and 4 samples. gpt2 has random weights; further lines
multiply W_V, and so every norm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.shared.models import loaded
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import ModelSpec, Net
from lipaudit.models.sources.loader import LoadOptions, assemble
from lipaudit.theory.head_norms import head_norms
from lipaudit.theory.heads import Heads
from lipaudit.theory.products import head_products
from lipaudit.theory.spectral import random_starts

STOP, MOST = 1e-3, 1000


def gpt2() -> Net:
    """Build a GPT-2 with the library's random weights: 6 layers of 6 heads, width 384."""
    from transformers import AutoModel, GPT2Config

    config = GPT2Config(n_embd=384, n_layer=6, n_head=6, vocab_size=1000)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModel.from_config(config)
    spec = ModelSpec(
        module,
        (config.n_positions,),
        kind="text",
        classifier=False,
        vocabulary=config.vocab_size,
        call=lambda x, mask: module(x, attention_mask=mask),
        read=lambda out: out.last_hidden_state,
    )
    return assemble(spec, LoadOptions(), name="gpt2", source="random")


MODELS: dict[str, Callable[[], Net]] = {
    "demo": lambda: loaded("demo"),
    "minilm": lambda: loaded("minilm"),
    "gpt2": gpt2,
}
Found = tuple[Tensor, Tensor]


def reference(heads: Heads, seeds: list[int]) -> Found:
    """Return sigma_1 and the products spent, of every head, by power iteration."""
    products = head_products(heads)
    batch, count, n, dv = *heads.q.shape[:3], heads.v.shape[3]
    u = random_starts(seeds, n * dv).repeat_interleave(count, 0)
    u = torch.nn.functional.normalize(u, dim=1)
    square = u.new_zeros(batch * count)
    spent = torch.zeros(batch * count, dtype=torch.int64)
    running = torch.ones_like(spent, dtype=torch.bool)
    for _ in range(MOST):
        image = products(u)
        fresh = (image * u).sum(1)
        spent += running
        still = running & ((fresh - square).abs() >= STOP)
        square = torch.where(running, fresh, square)
        u, running = torch.nn.functional.normalize(image, dim=1), still
        if not running.any():
            break
    return square.sqrt().view(batch, count), spent.view(batch, count)


def ours(heads: Heads, seeds: list[int], tol: float) -> Found:
    """Return sigma_1 and the products spent, of every head, by the Lanczos process."""
    norms = head_norms(heads, seeds=seeds, tol=tol, max_steps=3000)
    return norms.norm, norms.products


def scaled(heads: Heads, factor: float) -> Heads:
    """Return heads whose values are multiplied by a factor."""
    assert heads.to_v is not None
    to_v = replace(heads.to_v, weight=factor * heads.to_v.weight)
    return replace(heads, v=factor * heads.v, to_v=to_v)


def compare(heads: Heads, seeds: list[int]) -> dict[str, Found]:
    """Return the relative error and the cost of both methods, per head and sample."""
    truth = ours(heads, seeds, 1e-9)[0]
    methods = {"power iteration": reference(heads, seeds), "lipaudit": ours(heads, seeds, 1e-4)}
    return {name: (1 - norm / truth, spent) for name, (norm, spent) in methods.items()}


def in_double(layer: Layer) -> Heads:
    """Return a layer as the measure has it."""
    return layer.heads().to(torch.float64)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--tokens", type=int, default=64)


def run(asked: argparse.Namespace) -> None:
    """Print one line per model, scale and method."""
    for name in asked.models:
        net = MODELS[name]()
        batch = load_data(None, net, DataOptions(samples=4, max_tokens=asked.tokens)).batch
        layers = capture(net, survey(net, batch).sites, batch, in_double)
        for factor in (1.0, 0.1, 10.0):
            found = [compare(scaled(heads, factor), list(range(4))) for heads in layers]
            for method in found[0]:
                error, spent = (
                    torch.cat([layer[method][i].flatten().double() for layer in found])
                    for i in (0, 1)
                )
                print(
                    f"{name:8s} W_V x {factor:<5g} {method:16s} error {error.median():8.1e} "
                    f"(largest {error.max():8.1e}), products {spent.median():4.0f} "
                    f"(most {spent.max():4.0f})"
                )
