"""A model is surveyed once, again only where layers may be others, and keeps little of them."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lipaudit.data.batch import Batch
from lipaudit.measures import attention, bounds, jacobian
from lipaudit.models.attention.numeric import find_residuals
from lipaudit.models.attention.survey import find_layers, survey
from lipaudit.models.net import Net
from tests.models.attention.tiny import WIDTH, Tiny, norms, tiny_net
from tests.nets import Calls, draw, own_batch, own_net


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


def other_queries(m, q, x):
    """Make queries of short samples by another linear map."""
    return m.other(x).unflatten(2, (2, -1)).transpose(1, 2) if q.shape[2] < 7 else q


# Short or long samples have no closed form: a query depends on several tokens.
mixing_short = partial(branching, lambda _m, q, _x: q.cumsum(2) if q.shape[2] < 7 else q)
mixing_long = partial(branching, lambda _m, q, _x: q.cumsum(2) if q.shape[2] >= 7 else q)
other_short = partial(branching, other_queries, other=lambda: nn.Linear(WIDTH, WIDTH))


class TwiceShort(Tiny):
    """Short samples meet another attention call."""

    def forward(self, x):
        return super().forward(super().forward(x) if x.shape[1] < 7 else x)


def net_of(module: nn.Module) -> Net:
    return tiny_net(module, 9)


def batch_of(tokens: int, samples: int = 4) -> Batch:
    return own_batch(draw(tokens, samples, tokens, WIDTH, dtype=torch.float64))


def count_passes(net: Net) -> list[int]:
    """Return a list that gets the length of the samples of every forward pass."""
    passes: list[int] = []
    net.module.register_forward_pre_hook(lambda _m, args: passes.append(args[0].shape[1]))
    return passes


SURVEY = 3
"""Forward passes of a survey."""


def test_measures_after_the_first_run_a_model_once_per_batch():
    """Nothing but the pass that is measured: no survey, whatever the batch."""
    net, batch = net_of(branching()), batch_of(9)
    passes = count_passes(net)
    list(attention.measure(net, [batch], attention.AttentionOptions()))
    assert len(passes) == SURVEY + 1
    list(bounds.measure(net, batch.split(2), bounds.BoundsOptions()))
    assert len(passes) == SURVEY + 3


def test_residuals_need_no_survey_of_their_own():
    net, options = net_of(branching()), jacobian.JacobianOptions(per_layer=True)
    passes = count_passes(net)
    spent = []
    for _ in range(2):
        list(jacobian.measure(net, [batch_of(9)], options))
        spent.append(len(passes) - sum(spent))
    assert spent[0] == spent[1] + SURVEY
    before = len(passes)
    find_residuals(net, batch_of(9), find_layers(net, batch_of(9)))
    assert len(passes) == before + 2  # one sample alone, and beside itself


def test_a_survey_serves_every_length_of_closed_layers():
    net = net_of(branching())
    passes = count_passes(net)
    first, *others = [find_layers(net, batch_of(length)) for length in (9, 5, 7)]
    assert all(other is first for other in others)
    assert passes == [9] * SURVEY + [5, 7]  # whose calls are counted


@pytest.mark.parametrize("model", [mixing_long, TwiceShort])
def test_other_lengths_are_surveyed_where_layers_may_be_others(model):
    """A closed form that was not found at 9 tokens, or a call; each length once."""
    net = net_of(model())
    passes = count_passes(net)
    long, short = find_layers(net, batch_of(9)), find_layers(net, batch_of(5))
    assert [site.closed_form for site in long] == [model is TwiceShort]
    assert [site.closed_form for site in short] == [True] * (2 if model is TwiceShort else 1)
    assert set(passes) == {9, 5}
    spent = len(passes)
    assert find_layers(net, batch_of(9)) is long
    assert find_layers(net, batch_of(5)) is short
    assert len(passes) < spent + SURVEY


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


def test_a_changed_copy_of_a_net_is_another_model():
    net = net_of(branching())
    passes = count_passes(net)
    for each in (net, replace(net, read=lambda y: -net.read(y))):
        find_layers(each, batch_of(9))
    assert passes == [9] * 2 * SURVEY


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


def test_keys_that_were_made_beforehand_are_known_in_every_layer():
    def run(q, mix, first, second, third, x):
        pairs = [kv(x) for kv in (first, second, third)]
        x = x + mix(pairs[0] + pairs[1] + pairs[2])  # where all of them meet
        for pair in pairs:
            heads = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in (q(x), *pair.chunk(2, 2)))
            x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x

    torch.manual_seed(0)
    widths = [(WIDTH, WIDTH), (2 * WIDTH, WIDTH), *[(WIDTH, 2 * WIDTH)] * 3]
    module = Calls(run, *(nn.Linear(*width) for width in widths))
    sites = find_layers(net_of(module), batch_of(9))
    assert [site.closed_form for site in sites] == [True] * 3
