"""Whole models as people write them: types, shapes and writes that no library has."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipaudit
from lipaudit.engine.results import in_order
from lipaudit.errors import InputError
from lipaudit.measures import attention, bounds, jacobian
from lipaudit.measures.base import join_parts
from lipaudit.models.attention.survey import survey
from tests.models.attention.tiny import HEADS, WIDTH, Tiny, norms
from tests.nets import own_batch, own_net

TOKENS = 5


class Plain(Tiny):
    """Attention, a residual, a mean and a head; `run` changes one thing."""

    def __init__(self, run=lambda m, x: m.logits(x), **how) -> None:
        super().__init__(**how)
        self.head, self.run = nn.Linear(WIDTH, 3), run

    def attention(self, x):
        return super().forward(x)

    def logits(self, x, attention=attention):
        return self.head((x + attention(self, x)).mean(1))

    def forward(self, x):
        return self.run(self, x)


def cast(function):
    """Return a function that runs under autocast."""

    def run(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*given)

    return run


def attend_half(q, k, v):
    """Attend in bfloat16 inside a model in float32."""
    return F.scaled_dot_product_attention(*(t.bfloat16() for t in (q, k, v))).to(q)


half = partial(Plain, attend=attend_half)
autocast = partial(Plain, lambda m, x: m.logits(x, lambda m, x: cast(m.attention)(x).to(x)))
autocast_whole = partial(Plain, cast(lambda m, x: m.logits(x)))
# One number per sample, without an axis; a model that scales its input in place.
number = partial(Plain, lambda m, x: m.logits(x)[:, 0])
written = partial(Plain, lambda m, x: m.logits(x.mul_(2)))
# Hidden states before the logits; units that are off at every sample, in front of the attention.
several = partial(Plain, lambda m, x: (x + m.attention(x), m.logits(x)))
dead = partial(Plain, read=lambda m, x: [(x - 100).relu() + m.head.weight[:1]] * 3)


def samples() -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def measured(module: nn.Module, measure: str, dtype: str = "float32"):
    report = lipaudit.measure(module.eval(), measure, data=samples(), dtype=dtype, tol=1e-8)
    return report.section(measure)


@pytest.mark.parametrize("kind", [half, autocast])
def test_attention_in_half_precision_has_no_figures_and_is_named(kind):
    section = measured(kind(), "bounds")
    assert [row.exact for row in section.rows] == [None] * HEADS
    notes = [note for note in section.notes if note.code == "no-closed-form"]
    assert ["computed in bfloat16" in note.text for note in notes] == [True]


def test_autocast_is_overridden_in_float64():
    rows, plain = (measured(kind(), "bounds", "float64").rows for kind in (autocast, Plain))
    for row, want in zip(rows, plain, strict=True):
        assert row.exact == pytest.approx(want.exact, rel=1e-9)


@pytest.mark.parametrize("measure", ["bounds", "jacobian"])
def test_output_in_half_precision_is_refused(measure):
    with pytest.raises(InputError, match="returns bfloat16 in a run in float32"):
        measured(autocast_whole(), measure)


def test_jacobian_under_autocast_is_refused():
    with pytest.raises(InputError, match="half precision under autocast") as caught:
        measured(autocast(), "jacobian")
    assert "--dtype float64" in caught.value.advice


def test_jacobian_of_attention_in_half_precision_is_rounded_and_says_so():
    section, plain = (measured(kind(), "jacobian") for kind in (half, Plain))
    assert section.rows[0].max == pytest.approx(plain.rows[0].max, rel=0.02)
    codes = {note.code for note in section.notes}
    assert "half-precision-parts" in codes
    assert "no-derivative" not in codes


@pytest.mark.parametrize("kind", [number, written])
def test_norm_of_the_model_is_that_of_a_dense_jacobian(kind):
    truth = kind().double()
    (row,) = measured(kind(), "jacobian", "float64").rows

    def output(x):
        return truth(x.clone()[None])[0].flatten()

    dense = [torch.autograd.functional.jacobian(output, x) for x in samples().double()]
    true = [float(torch.linalg.matrix_norm(j.flatten(1), 2)) for j in dense]
    assert row.max == pytest.approx(max(true), rel=1e-7)


def test_input_that_a_model_writes_to_is_read_and_kept():
    twice, before = Plain(), samples()
    rows = measured(written(), "bounds", "float64").rows
    want = lipaudit.measure(twice.eval(), "bounds", data=2 * before, dtype="float64", tol=1e-8)
    for row, true in zip(rows, want.section("bounds").rows, strict=True):
        assert row.exact == pytest.approx(true.exact, rel=1e-7)


def test_first_of_several_outputs_is_said():
    codes = {note.code for note in measured(several(), "jacobian").notes}
    assert "first-output" in codes
    assert "first-output" not in {note.code for note in measured(Plain(), "jacobian").notes}


def test_attention_that_no_sample_moves_is_no_loop_over_samples():
    """Its norm is that in X, which no sample moves."""
    module = dead().double()
    x = module.head.weight[:1].detach().expand(TOKENS, WIDTH)
    true = norms(lambda z: module.attended(z, z, z, z), x)
    rows = measured(dead(), "bounds", "float64").rows
    assert [row.exact for row in rows] == pytest.approx(true.tolist(), rel=1e-7)


class TokensFirst(nn.Module):
    """The parts of each token attend to each other, (batch, tokens, parts, width), by one map."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(8, 3)

    def forward(self, ids, mask=None):
        x = self.table(ids).unflatten(-1, (2, 4))
        q, k, v = (t(x) for t in (self.q, self.k, self.v))
        p = torch.softmax(q @ k.transpose(-1, -2), -1)
        return self.out((p @ v).flatten(2).mean(1))


def net_and_batch(tokens: int):
    torch.manual_seed(0)
    net = own_net(TokensFirst(), (32,), kind="text", vocabulary=30)
    ids = torch.randint(0, 30, (2, tokens), generator=torch.Generator().manual_seed(1))
    return net, own_batch(ids)


def test_the_survey_says_that_heads_cannot_be_told_from_tokens():
    (site,) = survey(*net_and_batch(16)).sites
    assert not site.closed_form
    assert "heads and tokens cannot be distinguished" in site.reason
    assert not site.inputs


@pytest.mark.parametrize(
    ("run", "options"),
    [(bounds.measure, bounds.BoundsOptions()), (attention.measure, attention.AttentionOptions())],
)
def test_another_length_is_refused(run, options):
    net, batch = net_and_batch(12)
    with pytest.raises(InputError, match="heads and tokens cannot be distinguished"):
        list(run(net, [batch], options))


# --- from the embedding on


class InPlace(nn.Module):
    """A model that scales its embeddings in place, as CTRL and GIT do; padding is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.out = nn.Linear(6, 3, bias=False)

    def forward(self, ids, mask=None):
        x = self.table(ids)
        x *= 5.0
        weight = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
        total = (torch.tanh(x) * weight[..., None]).sum(1)
        return self.out(total / weight.sum(1, keepdim=True))


def test_a_model_that_writes_into_its_embeddings_is_measured_where_it_is():
    torch.manual_seed(0)
    net = own_net(InPlace().double(), (4,), "float64", kind="text", vocabulary=20)
    batch = own_batch(torch.tensor([[3, 7, 1, 4], [2, 2, 9, 5]]))
    table = net.module.table.weight
    z = net.embedding(batch)
    assert torch.equal(z, table[batch.x])
    assert torch.equal(net.forward(z, batch), net.output(batch))
    assert torch.equal(z, table[batch.x])

    def plain(z):
        return net.module.out(torch.tanh(5.0 * z).mean(0))

    (part,) = jacobian.measure(net, [batch], jacobian.JacobianOptions())
    dense = torch.stack([torch.autograd.functional.jacobian(plain, one).flatten(1) for one in z])
    want = torch.linalg.matrix_norm(dense, 2)
    torch.testing.assert_close(torch.from_numpy(part.values["norm"]), want, rtol=1e-6, atol=0)


def test_writing_into_embeddings_is_not_taken_for_reading_padding():
    torch.manual_seed(0)
    net = own_net(InPlace(), (4,), kind="text", vocabulary=20)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    batch = own_batch(torch.tensor([[3, 7, 0, 0], [2, 2, 9, 4]]), mask)
    together, alone = (
        join_parts(in_order(list(parts), batch.ids), "norm")
        for parts in (
            jacobian.measure(net, [batch], jacobian.JacobianOptions()),
            jacobian.measure(net, batch.split(1), jacobian.JacobianOptions()),
        )
    )
    assert together == pytest.approx(alone, rel=1e-4)
