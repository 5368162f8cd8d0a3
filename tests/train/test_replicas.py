"""Training by two processes: losses and weights of every epoch are those of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.models.net import Net
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.spec import LoadOptions, ModelSpec
from lipaudit.results.trials import parse_radius
from lipaudit.settings import Recipe
from lipaudit.train import train
from lipaudit.train.demos import shipped, untrained
from lipaudit.train.replicas import Replica
from tests import processes

SGD = Recipe(epochs=2, batch_size=33, lr=0.05, shift=1)
ADAM = SGD.model_copy(update={"optimizer": "adamw", "lr": 2e-3, "clip": 1.0, "batch_size": 20})
JASMIN = {"penalty": "jasmin", "k": 3, "weight": 0.05}


class Dropping(nn.Module):
    """Attention between dropouts of many shapes, on 8x8 images; one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1)
        self.drop = nn.Dropout(0.2)
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        rows = self.drop(self.read(x[:, 0])).transpose(0, 1)
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        return self.head(self.drop(rows.transpose(0, 1)).mean(1))


def own(make: Callable[[], nn.Module | ModelSpec]) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = make()
    spec = made if isinstance(made, ModelSpec) else ModelSpec(made, (1, 8, 8))
    return assemble(spec, LoadOptions(), name="toy", source="py")


def images(count: int) -> Batch:
    return shipped("train")[:count]


def texts(count: int) -> Batch:
    rng = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (count,), generator=rng)
    mask = torch.arange(8) < lengths[:, None]
    x = torch.randint(5, 60, (count, 8), generator=rng) * mask
    return Batch(x, torch.randint(5, (count,), generator=rng), tuple(map(str, range(count))), mask)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


class Reading(nn.Module):
    """A classifier of texts, some of which are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids, mask=None):
        x = self.words(ids)
        padded = None if mask is None else ~mask
        x = x + self.attention(x, x, x, key_padding_mask=padded, need_weights=False)[0]
        return self.head(x[:, 0])


def reading() -> ModelSpec:
    return ModelSpec(Reading(), (8,), kind="text", vocabulary=60)


CASES: dict[str, tuple[Callable[[], Net], Batch, Recipe, dict[str, object]]] = {
    "odd batches, mixed": (lambda: untrained(0), images(100), SGD, JASMIN),
    "specformer": (lambda: untrained(0), images(65), ADAM, {"penalty": "specformer"}),
    "certified": (
        lambda: own(linear),
        images(45),
        ADAM,
        {"penalty": "certified", "eps": parse_radius("0.02"), "weight": 1.0},
    ),
    "adversarial": (
        lambda: untrained(0),
        images(30),
        SGD,
        {"adversarial": "pgd", "eps": parse_radius("0.1")},
    ),
    "dropout": (lambda: own(Dropping), images(50), SGD, JASMIN | {"reduction": "max"}),
    "one sample a batch": (lambda: own(Dropping), images(5), ADAM, JASMIN | {"batch_size": 1}),
    "padded texts": (lambda: own(reading), texts(31), ADAM, JASMIN | {"k": 0}),
}
"""Models, data, recipes: with last batches that are odd, or smaller than the processes."""


def trained(name: str, replica: Replica) -> dict[str, np.ndarray]:
    """What a training gives: the figures of its epochs, and the weights."""
    make, data, recipe, changes = CASES[name]
    net = make()
    net.module.double()
    recipe = recipe.model_copy(update=changes)
    epochs = list(train(net, data, recipe, held_out=data[:21], replica=replica))
    figures = [[e.loss, e.penalty or 0.0, e.accuracy, e.lr] for e in epochs]
    weights = {n: t.numpy() for n, t in net.module.state_dict().items()}
    return {"figures": np.array(figures)} | weights


def main(rank: int, size: int, port: int, folder: Path) -> None:
    """What each of the processes does."""
    store = torch.distributed.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for number, name in enumerate(CASES):
        np.savez(folder / f"{number}-{rank}.npz", **trained(name, Replica(rank, size)))
    torch.distributed.barrier()


def together(size: int, folder: Path) -> Path:
    port = int(processes.free_port())
    ranks = [processes.forked(main, rank, size, port, folder) for rank in range(size)]
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0] * size
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return together(2, tmp_path_factory.mktemp("pair"))


def require_alike(folder: Path, size: int, name: str) -> None:
    alone, number = trained(name, Replica()), list(CASES).index(name)
    copies = [np.load(folder / f"{number}-{rank}.npz") for rank in range(size)]
    for key, values in alone.items():
        assert np.isfinite(values).all()
        np.testing.assert_allclose(copies[0][key], values, rtol=1e-12, atol=1e-12, err_msg=key)
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy[key], copies[0][key], err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_take_the_steps_of_one(pair, name):
    require_alike(pair, 2, name)


@pytest.mark.parametrize(("size", "whole"), [(1, 5), (2, 5), (3, 2), (4, 1)])
def test_parts_are_a_batch(size, whole):
    parts = [Replica(rank, size).part(whole) for rank in range(size)]
    counted = [i for part in parts for i in range(whole)[part.rows][: part.samples]]
    assert counted == list(range(whole))
    assert all(len(range(whole)[part.rows]) for part in parts)
    assert sum(part.factor for part in parts) / size == pytest.approx(1)


def test_a_model_that_is_a_function_of_its_batch_is_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert Replica().synchronised(module, len) is len
    with pytest.raises(UsageError, match=r"1 \(BatchNorm1d\) normalises over the batch"):
        Replica(0, 2).synchronised(module, len)


@pytest.mark.parametrize("draw", [torch.rand, lambda shape: torch.ones(shape).bernoulli_(0.5)])
def test_what_is_drawn_for_samples_is_drawn_for_all(draw):
    def drawn(replica: Replica) -> torch.Tensor:
        part = replica.part(5)
        with torch.random.fork_rng(), replica.drawing(part):
            torch.manual_seed(0)
            return draw((part.rows.stop - part.rows.start, 1, 3))

    parts = [drawn(Replica(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(parts), drawn(Replica()))


@pytest.mark.slow(seconds=12)
def test_three_processes_do_too(tmp_path):
    together(3, tmp_path)
    for name in CASES:
        require_alike(tmp_path, 3, name)
