"""Whole models as people write them: types, shapes and writes that no library has."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lipaudit
from lipaudit.errors import InputError
from lipaudit.measures import attention, bounds
from lipaudit.models.attention.survey import survey
from tests.models.attention.tiny import HEADS, WIDTH, Tiny, norms
from tests.nets import own_batch, own_net

TOKENS = 5


class Plain(Tiny):
    """Attention, a residual, a mean and a head; subclasses change one thing."""

    def __init__(self, **how) -> None:
        super().__init__(**how)
        self.head = nn.Linear(WIDTH, 3)

    def attention(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.head((x + self.attention(x)).mean(1))


def half() -> Plain:
    """Return attention in bfloat16 inside a model in float32."""
    attend = F.scaled_dot_product_attention
    return Plain(attend=lambda q, k, v: attend(*(t.bfloat16() for t in (q, k, v))).to(q))


class Autocast(Plain):
    def attention(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().attention(x).to(x)


class AutocastWhole(Plain):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Number(Plain):
    """One number per sample, without an axis."""

    def forward(self, x):
        return super().forward(x)[:, 0]


class Written(Plain):
    """Scales its input in place."""

    def forward(self, x):
        x *= 2
        return super().forward(x)


class Several(Plain):
    """Returns hidden states before its logits."""

    def forward(self, x):
        hidden = x + self.attention(x)
        return hidden, self.head(hidden.mean(1))


class Dead(Plain):
    """Attention behind units that are off at every sample, as in a collapsed network."""

    def attention(self, x):
        return super().attention((x - 100).relu() + self.head.weight[:1])


def samples() -> torch.Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def measured(module: nn.Module, measure: str, dtype: str = "float32"):
    report = lipaudit.measure(module.eval(), measure, data=samples(), dtype=dtype, tol=1e-8)
    return report.section(measure)


@pytest.mark.parametrize("kind", [half, Autocast])
def test_attention_in_half_precision_has_no_figures_and_is_named(kind):
    section = measured(kind(), "bounds")
    assert [row.exact for row in section.rows] == [None] * HEADS
    notes = [note for note in section.notes if note.code == "no-closed-form"]
    assert ["computed in bfloat16" in note.text for note in notes] == [True]


def test_autocast_is_overridden_in_float64():
    rows, plain = (measured(kind(), "bounds", "float64").rows for kind in (Autocast, Plain))
    for row, want in zip(rows, plain, strict=True):
        assert row.exact == pytest.approx(want.exact, rel=1e-9)


@pytest.mark.parametrize("measure", ["bounds", "jacobian"])
def test_output_in_half_precision_is_refused(measure):
    with pytest.raises(InputError, match="returns bfloat16 in a run in float32"):
        measured(AutocastWhole(), measure)


def test_jacobian_under_autocast_is_refused():
    with pytest.raises(InputError, match="half precision under autocast") as caught:
        measured(Autocast(), "jacobian")
    assert "--dtype float64" in caught.value.advice


def test_jacobian_of_attention_in_half_precision_is_rounded_and_says_so():
    section, plain = (measured(kind(), "jacobian") for kind in (half, Plain))
    assert section.rows[0].max == pytest.approx(plain.rows[0].max, rel=0.02)
    codes = {note.code for note in section.notes}
    assert "half-precision-parts" in codes
    assert "no-derivative" not in codes


@pytest.mark.parametrize("kind", [Number, Written])
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
    rows = measured(Written(), "bounds", "float64").rows
    want = lipaudit.measure(twice.eval(), "bounds", data=2 * before, dtype="float64", tol=1e-8)
    for row, true in zip(rows, want.section("bounds").rows, strict=True):
        assert row.exact == pytest.approx(true.exact, rel=1e-7)


def test_first_of_several_outputs_is_said():
    codes = {note.code for note in measured(Several(), "jacobian").notes}
    assert "first-output" in codes
    assert "first-output" not in {note.code for note in measured(Plain(), "jacobian").notes}


def test_attention_that_no_sample_moves_is_no_loop_over_samples():
    """Its norm is that in X, which no sample moves."""
    module = Dead().double()
    true = norms(module.heads, module.head.weight[:1].detach().expand(TOKENS, WIDTH))
    rows = measured(Dead(), "bounds", "float64").rows
    assert [row.exact for row in rows] == pytest.approx(true.tolist(), rel=1e-7)


class TokensFirst(nn.Module):
    """Every token attends to 3 memories of its own: (batch, tokens, 1, width) queries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.q, self.k, self.v = (nn.Linear(8, n * 8) for n in (1, 3, 3))
        self.out = nn.Linear(8, 3)

    def forward(self, ids, mask=None):
        x = self.table(ids)
        q, k, v = (
            t(x).unflatten(-1, (-1, 8)) * torch.tanh(x)[:, :, None]
            for t in (self.q, self.k, self.v)
        )
        p = torch.softmax(q @ k.transpose(-1, -2), -1)
        return self.out((p @ v).squeeze(2).mean(1))


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
