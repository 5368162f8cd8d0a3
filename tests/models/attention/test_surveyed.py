"""A model is surveyed once, again only where layers may be others, and keeps little of them."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lipaudit.data.batch import Batch
from lipaudit.measures import attention, bounds, jacobian
from lipaudit.models.attention import survey as surveys
from lipaudit.models.attention.survey import find_layers, survey
from lipaudit.models.attention.surveyor import Surveyor
from lipaudit.models.net import Net
from tests.models.attention.test_survey import TOKENS, WIDTH, net_and_batch
from tests.nets import draw, own_batch, own_net


class Branching(nn.Module):
    """Two heads; what becomes of longer samples is up to the subclass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.gain = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def queries(self, q, x):
        return q

    def heads(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(self.queries(q, x), k, v)

    def attend(self, x):
        return self.out(self.gain * self.heads(x).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x)


class MixingShort(Branching):
    """Short samples have no closed form: a query depends on several tokens."""

    def queries(self, q, x):
        return q.cumsum(2) if q.shape[2] < 7 else q


class OtherShort(Branching):
    """Short samples have their queries from another linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def queries(self, q, x):
        return self.other(x).unflatten(2, (2, -1)).transpose(1, 2) if q.shape[2] < 7 else q


class MixingLong(Branching):
    """Long samples have no closed form."""

    def queries(self, q, x):
        return q.cumsum(2) if q.shape[2] >= 7 else q


class TwiceShort(Branching):
    """Short samples meet another attention call."""

    def forward(self, x):
        return self.attend(self.attend(x)) if x.shape[1] < 7 else self.attend(x)


def net_of(module: nn.Module) -> Net:
    return own_net(module, (9, WIDTH), "float64", classifier=False)


def batch_of(tokens: int, samples: int = 4) -> Batch:
    return own_batch(draw(tokens, samples, tokens, WIDTH, dtype=torch.float64))


@pytest.fixture
def count(monkeypatch) -> list[int]:
    """Lengths of the samples on which a model was surveyed."""
    lengths, real = [], surveys.make_survey

    def counted(net, batch):
        lengths.append(batch.x.shape[1])
        return real(net, batch)

    monkeypatch.setattr(surveys, "make_survey", counted)
    return lengths


def test_measures_after_the_first_run_a_model_once_per_batch():
    """Nothing but the pass that is measured: no survey, whatever the batch."""
    net, batch, forwards = net_of(Branching()), batch_of(9), []
    net.module.register_forward_pre_hook(lambda *_: forwards.append(1))  # some end early
    list(attention.measure(net, [batch], attention.AttentionOptions()))
    assert len(forwards) > 1
    forwards.clear()
    list(bounds.measure(net, batch.split(2), bounds.BoundsOptions()))
    assert len(forwards) == 2


def test_residuals_need_no_survey_of_their_own(count):
    net, options = net_of(Branching()), jacobian.JacobianOptions(per_layer=True)
    find_layers(net, batch_of(9))
    list(jacobian.measure(net, [batch_of(9)], options))
    assert count == [9]


def test_a_survey_serves_every_length_of_closed_layers(count):
    net = net_of(Branching())
    assert (
        find_layers(net, batch_of(9))
        is find_layers(net, batch_of(5))
        is find_layers(net, batch_of(7))
    )
    assert count == [9]


@pytest.mark.parametrize("model", [MixingLong, TwiceShort])
def test_other_lengths_are_surveyed_where_layers_may_be_others(model, count):
    """A closed form that was not found at 9 tokens, or a call; each length once."""
    net = net_of(model())
    long, short = find_layers(net, batch_of(9)), find_layers(net, batch_of(5))
    assert [site.closed_form for site in long] == [model is TwiceShort]
    assert [site.closed_form for site in short] == [True] * (2 if model is TwiceShort else 1)
    assert find_layers(net, batch_of(9)) is long
    assert find_layers(net, batch_of(5)) is short
    assert count == [9, 5]


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.detach().mul_(2.0),
        lambda p: p.data.mul_(2.0),
        lambda p: setattr(p, "data", 2.0 * p.data),
    ],
    ids=["in place", "past autograd", "anew"],
)
def test_written_weights_are_surveyed_again(write):
    """What scales the heads on their way to W_O is part of the survey, and of no later check."""
    net, batch = net_of(Branching()), batch_of(9)
    (before,) = find_layers(net, batch)
    write(net.module.gain)
    (after,) = find_layers(net, batch)
    torch.testing.assert_close(after.structure.out.gain, 2.0 * before.structure.out.gain)


def test_a_changed_copy_of_a_net_is_another_model(count):
    net = net_of(Branching())
    find_layers(net, batch_of(9))
    find_layers(replace(net, read=lambda y: -net.read(y)), batch_of(9))
    assert count == [9, 9]


@pytest.mark.parametrize("model", [MixingShort, OtherShort])
def test_reading_notices_a_closed_form_that_is_gone(model):
    """Surveyed at 9 tokens and read at 5: numerical norms, and no bound there."""
    net, options = net_of(model()), bounds.BoundsOptions(tol=1e-9)
    find_layers(net, batch_of(9))
    batch = batch_of(5, samples=2)
    (part,) = bounds.measure(net, [batch], options)
    assert {note.code for note in part.notes} == {"structure-changed"}
    assert part.values["numerical"].all()
    for x, norms in zip(batch.x, part.values["exact"], strict=True):
        dense = torch.autograd.functional.jacobian(net.module.heads, x[None])
        dense = dense[0].flatten(3).flatten(1, 2)
        want = torch.linalg.matrix_norm(dense, 2)
        torch.testing.assert_close(torch.as_tensor(norms), want, rtol=1e-6, atol=0.0)


class Faint(Branching):
    """Samples move queries, keys and values by a millionth of what all samples share."""

    def forward(self, x):
        return self.attend(10 + 1e-6 * x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_that_samples_hardly_move_is_read(dtype):
    net = own_net(Faint(), (5, WIDTH), dtype)
    x = torch.rand(1, 5, WIDTH, dtype=net.dtype, generator=torch.Generator().manual_seed(0))
    (site,) = find_layers(net, own_batch(x))
    assert site.heads == 2


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
