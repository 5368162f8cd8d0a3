"""What a power iteration returns that takes a layer's output for the tangent.

`torch.func.jvp(f, (x,), (u,))` returns the pair (f(x), J u). The published code of *How Smooth Is
Attention?* (60da456) takes its first entry. Its iteration v = f(x), u = J^T v / ||J^T v|| is then
the same in every step and returns sqrt(||J^T f(x)||), whatever u is. This script computes that
figure and ||J|| of the same attention layers, and the exponents of both over the length of a text.

    python -m benchmarks study_output alice29.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp

from benchmarks.shared.models import minilm

Map = Callable[[Tensor], Tensor]
LENGTHS = (8, 16, 32, 64, 128)
TOL = 1e-5
"""Relative change of the norm at which the iteration stops."""
MOST = 300


def jacobian_norm(f: Map, x: Tensor) -> float:
    """Return ||J|| of f at x, by power iteration on J^T J."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    _, pull = vjp(f, x)
    norm = 0.0
    for _ in range(MOST):
        u = u / u.norm()
        _, image = jvp(f, (x,), (u,))
        last, norm = norm, float(image.norm())
        if abs(norm - last) <= TOL * norm:
            break
        (u,) = pull(image)
    return norm


def output_figure(f: Map, x: Tensor) -> float:
    """Return sqrt(||J^T f(x)||)."""
    output, pull = vjp(f, x)
    (row,) = pull(output)
    return float(row.norm()) ** 0.5


def exponent(lengths: list[float], values: list[float]) -> float:
    """Return a of the least squares fit log value = a log length + c."""
    x = torch.tensor(lengths, dtype=torch.float64).log()
    y = torch.tensor(values, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


class Attention(nn.Module):
    """The attention of one layer, with its own mask, up to W_O and without a residual."""

    def __init__(self, inner: nn.Module, output: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.output = output
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x, attention_mask=self.mask)[0]
        if self.output is None:
            return result
        return self.output(result)


def bert_layers(model: nn.Module) -> list[Attention]:
    """Return the attention of every layer of a BERT."""
    layers = [layer.attention for layer in model.encoder.layer]
    return [Attention(layer.self, layer.output.dense) for layer in layers]


def gpt2_layers(model: nn.Module) -> list[Attention]:
    """Return the attention of every layer of a GPT-2, of its normalised input."""
    return [Attention(block.attn) for block in model.h]


def record_inputs(model: nn.Module, layers: list[Attention], ids: Tensor) -> list[Tensor]:
    """Return what every layer's attention reads for these tokens, (1, n, d); keep its mask."""
    inputs: list[Tensor] = []
    hooks = []
    for layer in layers:

        def note(_: nn.Module, args: Any, kwargs: Any, layer: Attention = layer) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])
            layer.mask = kwargs.get("attention_mask")

        hooks.append(layer.inner.register_forward_pre_hook(note, with_kwargs=True))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return inputs


def load_models() -> Iterator[tuple[str, nn.Module, list[Attention]]]:
    """Yield MiniLM, and a BERT and a GPT-2 of its size with the library's random weights."""
    from transformers import AutoModel, BertConfig, BertModel, GPT2Config, GPT2Model

    sizes = {"vocab_size": 30522, "attn_implementation": "eager"}
    trained = AutoModel.from_pretrained(minilm(), attn_implementation="eager")
    yield "MiniLM", trained, bert_layers(trained)
    torch.manual_seed(0)
    bert = BertModel(
        BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=6,
            intermediate_size=1536,
            **sizes,
        )
    )
    yield "random BERT", bert, bert_layers(bert)
    torch.manual_seed(0)
    gpt2 = GPT2Model(
        GPT2Config(n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0, **sizes)
    )
    yield "random GPT-2", gpt2, gpt2_layers(gpt2)


def show_affine() -> None:
    """Print both figures of an affine map, whose norm is that of its matrix."""
    torch.manual_seed(0)
    affine = nn.Linear(6, 6).double().requires_grad_(False)
    x = torch.randn(6, dtype=torch.float64)
    largest = float(torch.linalg.matrix_norm(affine.weight, 2))
    print(
        f"affine map: ||W|| {largest:.3f}, power iteration {jacobian_norm(affine, x):.3f}, "
        f"sqrt(||J^T f(x)||) {output_figure(affine, x):.3f}\n"
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", type=Path, help="a plain text")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--only", help="one of the models, such as 'random GPT-2'")


def run(asked: argparse.Namespace) -> None:
    """Print the exponents of both figures of every layer, medians over windows of the text."""
    from transformers import AutoTokenizer

    show_affine()
    tokens = AutoTokenizer.from_pretrained(minilm())(
        asked.text.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False
    ).input_ids
    step = len(tokens) // asked.windows
    print("| model | figure | " + " | ".join(f"layer {i}" for i in range(6)) + " |")
    print("|---|---|" + "--:|" * 6)
    for name, model, layers in load_models():
        if asked.only not in (None, name):
            continue
        model.double().eval().requires_grad_(False)
        medians: dict[str, list[list[float]]] = {"norm": [], "output": []}
        for length in LENGTHS:
            norms = []
            outputs = []
            for window in range(asked.windows):
                ids = torch.tensor([tokens[window * step : window * step + length]])
                pairs = list(zip(layers, record_inputs(model, layers, ids), strict=True))
                norms.append([jacobian_norm(f, x) for f, x in pairs])
                outputs.append([output_figure(f, x) for f, x in pairs])
            for figure, rows in (("norm", norms), ("output", outputs)):
                of_windows = torch.tensor(rows, dtype=torch.float64)
                medians[figure].append(of_windows.median(0).values.tolist())
        for figure, label in (("norm", "||J||"), ("output", "sqrt(||J^T f(X)||)")):
            by_layer = zip(*medians[figure], strict=True)
            cells = [f"{exponent(list(LENGTHS), list(values)):.2f}" for values in by_layer]
            print(f"| {name} | {label} | " + " | ".join(cells) + " |", flush=True)
