"""A form where a model expects a tensor: what it asks of it, and changes in place."""

import operator

import pytest
import torch
from torch import nn

from lipaudit.wings.certificates.form import NoRuleError
from lipaudit.wings.certificates.prove import ball, run

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


def test_a_traced_graph(points, excess):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    traced = torch.fx.symbolic_trace(model)
    x = _x()
    e, inputs = points(x, 50)
    form = run(traced, x)
    assert excess(form, e, model.double()(inputs)) <= 1e-13
