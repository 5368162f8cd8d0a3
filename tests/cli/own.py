"""Models of one's own: `py:tests.cli.own:FACTORY` on the command line."""

import gc
import weakref
from dataclasses import replace

import torch
from torch import nn

from lipaudit import ModelSpec
from lipaudit.models.sources.timm import load_demo
from tests.measures.cases import Bag


class Conv(nn.Module):
    def __init__(self, channels=3, classes=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.patch, self.head = nn.Conv2d(channels, 6, 4, 4), nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.patch(x).flatten(2).mean(2).tanh())


class Dense(nn.Module):
    def __init__(self, other=None):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head, self.other = nn.Linear(12, 6), nn.Linear(6, 3), other

    def forward(self, x):
        h = torch.relu(self.up(x.flatten(1)))
        return self.head(h if self.other is None else self.other(h))


class Sorting(nn.Module):
    def forward(self, h):
        return h.sort(-1).values


class Attention(nn.Module):
    """Two heads, whose logits have a closed form, or are gated, or make a map without softmax.

    A number is added to the divisor of the softmax.
    """

    def __init__(self, kind):
        super().__init__()
        self.qkv, self.kind = nn.Linear(8, 24), kind

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT
        if self.kind == "gated":
            logits = logits * x.mean((1, 2))[:, None, None, None]
        if self.kind == "sigmoid":
            p = logits.sigmoid() + 1e-3
            p = p / p.sum(-1, keepdim=True)
        elif isinstance(self.kind, float):
            e = logits.exp()
            p = e / (e.sum(-1, keepdim=True) + self.kind)
        else:
            p = logits.softmax(-1)
        return x + (p @ v).transpose(1, 2).flatten(2)


def image(channels=3, prints=False):
    module = Conv(channels)
    if prints:
        module.register_forward_hook(lambda *_: print("loud"))
    return module


def ids():
    return nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 2))


def animals(side=8, first="cat", second="dog", seed=0):
    return ModelSpec(Conv(3, 2, seed), (3, side, side), labels=(first, second))


def large():
    return animals(16, seed=1)


def turned():
    return animals(8, "dog", "cat")


def words(size=3, vocabulary=40):
    def cut(text, most):
        starts = range(0, len(text), size)
        return [1 + sum(map(ord, text[i : i + size])) % (vocabulary - 1) for i in starts][:most]

    return ModelSpec(Bag(vocabulary), (32,), kind="text", vocabulary=vocabulary, tokenize=cut)


class Unmasked(Bag):
    def forward(self, ids):
        return super().forward(ids)


def unmasked():
    return replace(words(), module=Unmasked(40))


def letters():
    return words(1, 30)


def dense():
    return ModelSpec(Dense(), (1, 3, 4), classifier=True)


def sorting():
    return ModelSpec(Dense(Sorting()), (1, 3, 4), classifier=True)


def attention(kind):
    layers = nn.Sequential(Attention(kind), Attention("plain"))
    return ModelSpec(layers, (5, 8), kind="tokens", classifier=False)


def convolution():
    layers = nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return ModelSpec(nn.Sequential(*layers), (1, 8, 8))


def module():
    print("people's factories print")
    return load_demo("standard").module


def outside():
    return torch.compile(module())


def in_place():
    model = module()
    model.compile()
    return model


def inside():
    model = module()
    model.blocks[0] = torch.compile(model.blocks[0])
    model.register_forward_hook(lambda *_: print("and their models, too"))
    return model


def traced():
    return torch.jit.trace(module(), torch.zeros(1, 1, 8, 8))


def full():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")


MADE = []
"""Every module that `tracked` has made, and how many of the earlier ones were alive then."""


def tracked():
    gc.collect()
    alive = sum(made() is not None for made, _ in MADE)
    model = module()
    MADE.append((weakref.ref(model), alive))
    return ModelSpec(model, (1, 8, 8))


one = two = three = tracked
