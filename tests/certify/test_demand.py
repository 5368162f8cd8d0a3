"""Passes that compute only what is read, and errors folded into blocks: the same, for less."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lipaudit.certify import prove
from lipaudit.certify.prove import ball, margins, run
from lipaudit.certify.symbols import create_errors

DIM, TOKENS, HEADS = 6, 5, 2


class Encoder(nn.Module):
    """Two blocks; the logits are those of one token."""

    def __init__(self, token=0, *, fused=True):
        super().__init__()
        self.token, self.fused = token, fused
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(2))
        self.into = nn.ModuleList(nn.Linear(DIM, 2 * DIM) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(2))
        self.shift = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, 3)

    def forward(self, x):
        for i in range(2):
            q, k, v = (
                self.qkv[i](self.norms[2 * i](x))
                .unflatten(-1, (3, HEADS, -1))
                .permute(2, 0, 3, 1, 4)
            )
            if self.fused:
                mixed = F.scaled_dot_product_attention(q, k, v)
            else:
                mixed = (q @ k.mT / 2).softmax(-1) @ v
            x = x + mixed.transpose(1, 2).flatten(2)
            x = x + self.out[i](F.gelu(self.into[i](self.norms[2 * i + 1](x))))
        x = self.shift(x.transpose(1, 2)).transpose(1, 2).contiguous()
        return self.head(x[:, self.token])


def _encoder(token=0, *, fused=True):
    torch.manual_seed(0)
    return Encoder(token, fused=fused).eval().requires_grad_(requires_grad=False)


X = torch.randn(1, TOKENS, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(("token", "fused"), [(0, True), (-1, False)])
def test_rows_that_nothing_reads_are_not_computed(token, fused, order, monkeypatch):
    model, ranges, births = _encoder(token, fused=fused), [], []
    for planned in (True, False):
        if not planned:
            monkeypatch.setattr(prove, "plan", lambda *_: None)
        x = ball(X, 0.01, order=order, settle=0.0)
        ranges.append(margins(run(model, x), 1).range())
        births.append(x.symbols.count)
    for one, other in zip(*ranges, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert births[0] < 0.9 * births[1]


def test_a_mask_may_have_a_name(points, excess):
    mask = torch.arange(TOKENS)[:, None] % 2 == 1

    def model(x):
        return torch.tanh(x.masked_fill(mask=mask, value=0.5))[:, 2]

    x = ball(X, 0.1)
    e, inputs = points(x, 20)
    assert excess(run(model, x), e, model(inputs)) <= 1e-13


def test_a_row_that_the_trial_did_not_show_proves_nothing():
    model = _encoder()
    model.head.register_forward_pre_hook(
        lambda *_: setattr(model, "token", (model.token + 1) % TOKENS)
    )
    low, high = margins(run(model, ball(X, 0.01)), 1).range()
    assert low.isnan().all()
    assert high.isnan().all()


class Fickle(nn.Module):
    """It calls another function every second time."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x += 1
        return (torch.tanh(x) if self.calls % 2 else F.gelu(x))[:, 0]


def test_a_model_that_deviates_from_its_trial_is_run_whole(points, excess):
    x = ball(X, 0.1)
    e, inputs = points(x, 50)
    truth = torch.tanh(inputs[:, 0] + 1)
    assert excess(run(Fickle(), x), e, truth) <= 1e-13


def _blocks_at_work(x):
    """Errors of rows through what keeps rows apart, heads merged, and shared branches."""
    y = F.gelu(F.linear(x, WEIGHT.to(x.dtype)))
    z = F.gelu(F.linear(y, WEIGHT.to(x.dtype)))
    z = z - 0.5 * y.mean(-1, keepdim=True) + y * z[..., :1]
    heads = torch.tanh(z.unflatten(-1, (HEADS, -1)).transpose(1, 2))
    merged = torch.tanh(heads * 2).transpose(1, 2).flatten(2)
    return y + F.linear(merged, WEIGHT.to(x.dtype)) * z


WEIGHT = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(2)) / DIM**0.5


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_blocks_say_what_rows_say(norm, order, points, excess, monkeypatch):
    x = ball(X, 0.1, norm=norm, order=order)
    e, inputs = points(x, 100)
    folded = run(_blocks_at_work, x)
    assert folded.blocks
    assert excess(folded, e, _blocks_at_work(inputs)) <= 1e-13
    settle = type(x).settle
    monkeypatch.setattr(type(x), "settle", lambda form: settle(form).whole())
    plain = run(_blocks_at_work, ball(X, 0.1, norm=norm, order=order))
    assert not plain.blocks
    for one, other in zip(folded.range(), plain.range(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_block_with_one_group_a_row_has_the_same_coefficients():
    radius = torch.rand(1, HEADS, TOKENS, 3, dtype=torch.float64)
    radius[0, 1, 2] = 0
    block = create_errors(radius, 7, torch.float64)
    (merged,) = block.move(lambda t: t.transpose(1, 2).flatten(2))
    by_row = merged.by_row()
    assert by_row is not None
    assert (by_row.group == by_row.group[..., :1]).all()
    stacks = [torch.zeros(by_row.end, 1, TOKENS, 3 * HEADS).double() for _ in range(2)]
    for each, stack in zip((merged, by_row), stacks, strict=True):
        each.add_to(stack)
    torch.testing.assert_close(*stacks, rtol=0, atol=0)
    torch.testing.assert_close(stacks[0].sum(0), radius.transpose(1, 2).flatten(2))
    (across,) = merged.move(lambda t: t.transpose(1, 2))
    assert across.by_row() is None
