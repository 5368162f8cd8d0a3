"""A form where a model expects a tensor: what it asks of it, and changes in place."""

import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lipaudit.certify.form import NoRuleError
from lipaudit.certify.prove import ball, run

TOKENS, WIDTH = 4, 6


def _x(**options):
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(9))
    return ball(x, 0.1, **options)


def test_a_model_takes_it_for_a_tensor():
    x = _x()
    assert isinstance(x, torch.Tensor)
    assert torch.is_tensor(x)
    assert torch.is_floating_point(x)
    batch, tokens, width = x.shape
    assert (batch, tokens, width) == x.size() == (1, TOKENS, WIDTH)
    assert (x.dtype, x.device.type, x.dim(), x.numel()) == (torch.float32, "cpu", 3, 24)
    assert not x.requires_grad
    assert not x.is_cuda
    assert len(x) == 1
    assert [part.shape for part in x[0]] == [(WIDTH,)] * TOKENS
    assert "Form" in repr(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2 + x,
        lambda x: 2 - x,
        lambda x: torch.ones(WIDTH) - x,
        lambda x: torch.add(x, torch.full((WIDTH,), 16777213.0).to(x.dtype), alpha=0.1) / 1e6,
        lambda x: torch.sub(torch.ones(WIDTH), x, alpha=0.1),
        lambda x: 2 / (x * x + 1),
        lambda x: torch.ones(WIDTH) / (1 + x * x),
        lambda x: torch.ones(2, TOKENS).to(x.dtype) @ x,
        lambda x: x[0].T[None],
        lambda x: x.clone().add_(1).mul_(x).neg_(),
        lambda x: operator.isub(x * 1, 2 * x),
        lambda x: operator.itruediv(x * 1, 4),
        lambda x: F.silu(F.relu(x * 1, inplace=True), inplace=True),
        lambda x: (x + 1).masked_fill_(torch.tensor([True, *[False] * 5]), 0.0),
    ],
)
def test_operators(function, points, excess):
    x = _x(norm="l2")
    e, inputs = points(x, 50)
    truth = torch.cat([function(each[None]) for each in inputs])
    assert excess(run(function, x.copy()), e, truth) <= 1e-13


def _shortcut_in_place(x):
    y = x * 2
    kept = y
    y += x
    return y * kept  # both names have what was added


def _relu_in_place(x):
    y = x * 2
    F.relu(y, inplace=True)
    return y + x


def _after_a_norm(x):
    """What a normalisation leaves pending is of its input as it was."""
    y = 2 * x
    normed = F.rms_norm(y, (WIDTH,), None, 1e-6)
    y += normed
    return F.linear(normed, torch.ones(3, WIDTH).to(x.dtype)) + y.mean()


def _copy_first(x):
    y = x * 2
    kept = y.clone()
    y += 1
    return y * kept


@pytest.mark.parametrize(
    "function", [_shortcut_in_place, _relu_in_place, _after_a_norm, _copy_first]
)
@pytest.mark.parametrize("order", [1, 2])
def test_changes_in_place_reach_every_name(function, order, points, excess):
    x = _x(order=order)
    e, inputs = points(x, 100)
    truth = torch.cat([function(each[None]) for each in inputs])
    assert excess(run(function, x), e, truth) <= 1e-13


# A second name of y or of a part of it, what is done to either, and what is read then.
ALIASES = {
    "view": (lambda y: y[:, 0], lambda y, other: y.add_(1), lambda y, other: other * 2),
    "base": (lambda y: y.view(1, -1), lambda y, other: other.add_(1), lambda y, other: y * 2),
    "part": (lambda y: y[:, 0], lambda y, other: y[:, 1].add_(1), lambda y, other: other * 2),
    "result": (lambda y: y.unbind(1), lambda y, other: other[0].add_(1), lambda y, other: y),
    "places": (
        lambda y: y[:, [0, 2]],
        lambda y, other: other.add_(1),
        lambda y, other: torch.cat([y, other], 1),
    ),
    "slice": (
        lambda y: y[:, 0],
        lambda y, other: operator.setitem(y, (slice(None), 1), y[:, 1] + other),
        lambda y, other: y,
    ),
    "item": (
        lambda y: y,
        lambda y, other: operator.setitem(y, (slice(None), 1), 0),
        lambda y, other: y,
    ),
    "turned": (
        lambda y: y[0, :, :4],
        lambda y, other: other.transpose_(0, 1),
        lambda y, other: y * 2,
    ),
    # No trial tells of these two, for the types.
    "copy": (
        lambda y: (y @ torch.ones(WIDTH, 2).double()).transpose(1, 2),
        lambda y, other: other.contiguous().add_(1),
        lambda y, other: other * 2,
    ),
    "cast": (
        lambda y: y @ torch.ones(WIDTH, 2).double(),
        lambda y, other: other.float().add_(1),
        lambda y, other: other * 2,
    ),
    "constant": (
        lambda y: torch.zeros(y.shape),
        lambda y, other: other.add_(y),
        lambda y, other: other,
    ),
}


@pytest.mark.parametrize("name", ALIASES)
def test_what_a_change_in_place_leaves_behind_is_refused(name):
    take, change, read = ALIASES[name]

    def model(x):
        y = x * 2
        other = take(y)
        change(y, other)
        return read(y, other)

    with pytest.raises(NoRuleError, match="in place|into a constant|setitem"):
        run(model, _x())


class _Keeper(nn.Module):
    kept = None

    def forward(self, x):
        self.kept = x * 2 if self.kept is None else self.kept
        return self.kept - x


def test_what_another_pass_left_is_refused():
    with pytest.raises(NoRuleError, match="that was changed in place elsewhere"):
        run(_Keeper(), _x())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.long),
        lambda x: x.type_as(torch.arange(2)),
        lambda x: x.type(torch.LongTensor),
        lambda x: x.type("torch.LongTensor"),
        lambda x: x.to(int),
        lambda x: x.sum(-1, dtype=torch.long),
        lambda x: F.conv2d(x, torch.ones(2, 1, 2, 2)),
        lambda x: x * torch.tensor(1 + 2j),
        lambda x: x.numpy(),
        lambda x: x > 0,
        lambda x: bool(x.sum() > 0),
        lambda x: float(x.sum()),
        lambda x: torch.ops.aten.native_layer_norm(x, [WIDTH], None, None, 1e-5),
    ],
)
def test_what_would_take_its_numbers_is_refused(function):
    with pytest.raises(NoRuleError, match="no rule for the operation"):
        run(function, _x())


def test_a_traced_graph(points, excess):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    traced = torch.fx.symbolic_trace(model)
    x = _x()
    e, inputs = points(x, 50)
    form = run(traced, x)
    assert excess(form, e, model.double()(inputs)) <= 1e-13
