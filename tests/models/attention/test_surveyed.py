"""A model is surveyed once, again only where layers may be others, and keeps little of them."""

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lipaudit.data.batch import Batch
from lipaudit.measures import attention, bounds, jacobian
from lipaudit.models.attention import survey as surveys
from lipaudit.models.attention.survey import find_layers, survey
from lipaudit.models.net import Net
from tests.models.attention.tiny import WIDTH, Tiny, norms
from tests.nets import draw, own_batch, own_net


class Gain(nn.Linear):
    """W_O behind a factor of each channel."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(self.gain * x)


def branching(queries=lambda _m, q, _x: q, **parts) -> Tiny:
    """Return a module in which queries may depend on the length of the sample."""
    return Tiny(change=lambda m, x, q, k, v: (queries(m, q, x), k, v), out=Gain, **parts)


def mixing_short() -> Tiny:
    """Short samples have no closed form: a query depends on several tokens."""
    return branching(lambda _m, q, _x: q.cumsum(2) if q.shape[2] < 7 else q)


def mixing_long() -> Tiny:
    """Long samples have no closed form."""
    return branching(lambda _m, q, _x: q.cumsum(2) if q.shape[2] >= 7 else q)


def other_short() -> Tiny:
    """Short samples have their queries from another linear map."""

    def queries(m, q, x):
        return m.other(x).unflatten(2, (2, -1)).transpose(1, 2) if q.shape[2] < 7 else q

    return branching(queries, other=lambda: nn.Linear(WIDTH, WIDTH))


class TwiceShort(Tiny):
    """Short samples meet another attention call."""

    def forward(self, x):
        return super().forward(super().forward(x) if x.shape[1] < 7 else x)


def net_of(module: nn.Module) -> Net:
    return own_net(module, (9, WIDTH), "float64", classifier=False)


def batch_of(tokens: int, samples: int = 4) -> Batch:
    return own_batch(draw(tokens, samples, tokens, WIDTH, dtype=torch.float64))


@pytest.fixture
def count(monkeypatch) -> list[int]:
    """Lengths of the samples on which a model was surveyed."""
    lengths, real = [], surveys.survey

    def counted(net, batch):
        lengths.append(batch.x.shape[1])
        return real(net, batch)

    monkeypatch.setattr(surveys, "survey", counted)
    return lengths


def test_measures_after_the_first_run_a_model_once_per_batch():
    """Nothing but the pass that is measured: no survey, whatever the batch."""
    net, batch, forwards = net_of(branching()), batch_of(9), []
    net.module.register_forward_pre_hook(lambda *_: forwards.append(1))  # some end early
    list(attention.measure(net, [batch], attention.AttentionOptions()))
    assert len(forwards) > 1
    forwards.clear()
    list(bounds.measure(net, batch.split(2), bounds.BoundsOptions()))
    assert len(forwards) == 2


def test_residuals_need_no_survey_of_their_own(count):
    net, options = net_of(branching()), jacobian.JacobianOptions(per_layer=True)
    find_layers(net, batch_of(9))
    list(jacobian.measure(net, [batch_of(9)], options))
    assert count == [9]


def test_a_survey_serves_every_length_of_closed_layers(count):
    net = net_of(branching())
    assert (
        find_layers(net, batch_of(9))
        is find_layers(net, batch_of(5))
        is find_layers(net, batch_of(7))
    )
    assert count == [9]


@pytest.mark.parametrize("model", [mixing_long, TwiceShort])
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
    net, batch = net_of(branching()), batch_of(9)
    (before,) = find_layers(net, batch)
    write(net.module.out.gain)
    (after,) = find_layers(net, batch)
    torch.testing.assert_close(after.structure.out.gain, 2.0 * before.structure.out.gain)


def test_a_changed_copy_of_a_net_is_another_model(count):
    net = net_of(branching())
    find_layers(net, batch_of(9))
    find_layers(replace(net, read=lambda y: -net.read(y)), batch_of(9))
    assert count == [9, 9]


@pytest.mark.parametrize("model", [mixing_short, other_short])
def test_reading_notices_a_closed_form_that_is_gone(model):
    """Surveyed at 9 tokens and read at 5: numerical norms, and no bound there."""
    net, options = net_of(model()), bounds.BoundsOptions(tol=1e-9)
    find_layers(net, batch_of(9))
    batch = batch_of(5, samples=2)
    (part,) = bounds.measure(net, [batch], options)
    assert {note.code for note in part.notes} == {"structure-changed"}
    assert part.values["numerical"].all()
    want = torch.stack([norms(net.module.heads, x) for x in batch.x])
    torch.testing.assert_close(torch.as_tensor(part.values["exact"]), want, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_attention_that_samples_hardly_move_is_read(dtype):
    """Samples move queries, keys and values by a millionth of what all samples share."""
    faint = Tiny(read=lambda _m, x: [10 + 1e-6 * x] * 3)
    net = own_net(faint, (5, WIDTH), dtype)
    x = torch.rand(1, 5, WIDTH, dtype=net.dtype, generator=torch.Generator().manual_seed(0))
    (site,) = find_layers(net, own_batch(x))
    assert site.heads == 2


def test_a_survey_leaves_no_tensor_of_a_pass_behind():
    """Nor does any wait for the garbage collector."""
    net, made = net_of(nn.Sequential(*(branching() for _ in range(3)))), []
    for part in net.module.modules():
        part.register_forward_hook(
            lambda _part, _x, y: made.append(StorageWeakRef(y.untyped_storage()))
        )
    gc.disable()
    try:
        known = survey(net, batch_of(9))
        assert [site.closed_form for site in known.sites] == [True] * 3
        assert made
        assert all(storage.expired() for storage in made)
    finally:
        gc.enable()


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


def test_keys_that_were_made_beforehand_are_known_in_every_layer():
    sites = find_layers(net_of(Beforehand()), batch_of(9))
    assert [site.closed_form for site in sites] == [True] * 3
