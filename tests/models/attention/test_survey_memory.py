"""A survey keeps what it reads of some layers, not of all: deep models have many."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lipaudit.models.attention.survey import survey
from lipaudit.models.attention.surveyor import Surveyor
from tests.models.attention.test_survey import TOKENS, WIDTH, net_and_batch

WIDE = 256 * WIDTH
WIDEST = 4 * TOKENS * WIDE
"""Bytes of the tokens of a sample inside an MLP."""


class Block(nn.Module):
    """Attention and a wide gated MLP, both added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, WIDE), nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Alive(TorchDispatchMode):
    """The bytes of wide results that somebody holds; weights are none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            if storage.nbytes() >= WIDEST and storage.data_ptr() not in self.weights:
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def bytes(self) -> int:
        self.storages = {s: n for s, n in self.storages.items() if not s.expired()}
        return sum(self.storages.values())


def counting(method, alive, bytes_seen):
    def counted(*args):
        method(*args)
        bytes_seen.append(alive.bytes())

    return counted


def surveyed(depth, monkeypatch):
    """Return the layers, and what is alive at each of them in both passes, and afterwards."""
    torch.manual_seed(0)
    net, batch = net_and_batch(nn.Sequential(*(Block() for _ in range(depth))))
    seen = {"attention": [], "compare": []}
    with Alive(net.module) as alive, monkeypatch.context() as patched:
        for name, bytes_seen in seen.items():
            patched.setattr(Surveyor, name, counting(getattr(Surveyor, name), alive, bytes_seen))
        gc.disable()  # what waits for it is kept
        try:
            sites = survey(net, batch)
            return sites, seen, alive.bytes()
        finally:
            gc.enable()


def test_a_layer_leaves_none_of_its_wide_tensors_behind(monkeypatch):
    sites, seen, after = surveyed(6, monkeypatch)
    assert all(site.closed_form for site in sites)
    for passed in seen.values():
        assert passed[-1] == passed[3]
    assert after == 0


class Beforehand(nn.Module):
    """Keys and values of all layers are made, and meet in a sum, before the first layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kv = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.q, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        pairs = [kv(x) for kv in self.kv]
        x = x + self.mix(pairs[0] + pairs[1] + pairs[2])
        for pair in pairs:
            tensors = self.q(x), *pair.chunk(2, 2)
            heads = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in tensors)
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_keys_that_were_made_beforehand_are_known_in_every_layer(layer):
    assert survey(*net_and_batch(Beforehand()))[layer].closed_form
