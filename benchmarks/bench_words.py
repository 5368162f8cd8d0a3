"""Certificates of near words beside attacks and exhaustive replacement, on a small transformer.

Texts are of 12 topics with 51 words each, whose embeddings are near each other as those of trained
models are: the 50 near words of a word are its topic. Two layers are trained here (seconds).
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
from lipaudit.attacks.rewriting import list_substitutes
from lipaudit.data.batch import Batch, identify_samples
from lipaudit.measures.texts import make_reader, read_texts
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import borrow

TOPICS, SIZE, LENGTH, WIDTH = 12, 51, 6, 16
CHUNK = 2**13
"""Texts that are evaluated at a time."""


class Layer(nn.Module):
    """Attention and an MLP, normalised before."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.behind(x))))


class Topics(nn.Module):
    """Two layers over word embeddings, and their mean: does a text speak well of its subject?"""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOPICS * SIZE, WIDTH)
        centres = torch.randn(TOPICS, 1, WIDTH)
        near = centres + spread * torch.randn(TOPICS, SIZE, WIDTH)
        self.embed.weight = nn.Parameter(near.flatten(0, 1), requires_grad=False)
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map token ids (batch, tokens) to logits (batch, 2); texts have one length."""
        return self.head(self.layers(self.embed(ids)).mean(1))


def write_texts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return texts of random words; the label is whether the worth of their topics is positive."""
    draw = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (count, LENGTH), generator=draw)
    worth = (topics.double() - (TOPICS - 1) / 2).sum(1)
    return topics * SIZE + torch.randint(SIZE, topics.shape, generator=draw), (worth > 0).long()


def train(spread: float, steps: int) -> ModelSpec:
    """Train on random texts."""
    torch.manual_seed(0)
    model = Topics(spread)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        ids, y = write_texts(128, step + 1)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), y).backward()
        optimizer.step()
    return ModelSpec(model.eval(), (LENGTH,), kind="text", vocabulary=TOPICS * SIZE, pad_id=0)


@torch.no_grad()
def survive(spec: ModelSpec, ids: Tensor, label: int, k: int) -> bool:
    """Try all replacements of k words by near ones."""
    with borrow(spec, LoadOptions(), None) as net:
        reader = make_reader(net)
        (draft,) = read_texts(reader, Batch(ids[None], None, ("0",)), characters=False).drafts
        each: dict[int, list[int]] = {}
        for word, changed in list_substitutes(reader, draft, 1) or []:
            each.setdefault(word, []).append(changed[word])
        for words in combinations(each, min(k, len(each))):
            values = torch.tensor([*product(*(each[word] for word in words))])
            for part in values.split(CHUNK):
                texts = ids.repeat(len(part), 1)
                texts[:, list(words)] = part
                if (net.output(Batch(texts, None, ())).argmax(1) != label).any():
                    return False
    return True


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--spreads", type=float, nargs="*", default=[0.02, 0.05, 0.1])
    parser.add_argument("--exhaustive", type=int, default=2, help="words that are all tried")
    parser.add_argument("--steps", type=int, default=300)


def run(asked: argparse.Namespace) -> None:
    """Print shares of texts that are robust, certified, and that survive every replacement."""
    for spread in asked.spreads:
        seconds, spec = timed(lambda spread=spread: train(spread, asked.steps))
        data = write_texts(asked.samples, 0)
        took, report = timed(
            lambda spec=spec, data=data: lipaudit.measure(
                spec,
                "certify",
                data=data,
                samples=asked.samples,
                eps=f"1word,2words,{LENGTH}words",
            )
        )
        section = report.section("certify")
        print(f"spread {spread}: trained in {seconds:.0f} CPU s, certificates {took:.0f} CPU s")
        for row in section.rows:
            k = int(row.eps)
            line = f"  {k} of {LENGTH} words: clean {row.clean:.1%}, robust {row.robust:.1%}, "
            line += f"certified {row.certified:.1%}"
            known = section.samples
            rows = zip(known["ids"], known[f"verdict@words,{k}"], strict=True)
            if k <= asked.exhaustive:
                own = dict(
                    zip(
                        identify_samples([*data[0]], data[1].tolist()),
                        zip(*data, strict=True),
                        strict=True,
                    )
                )
                told = [(*own[name], verdict) for name, verdict in rows]
                stands = [v != "wrong" and survive(spec, x, int(y), k) for x, y, v in told]
                lost = sum(
                    v == "certified" and not s for s, (_, _, v) in zip(stands, told, strict=True)
                )
                line += f", survive every replacement {sum(stands) / len(told):.1%}"
                line += f", certified and yet broken {lost}"
            print(line, flush=True)
