"""A head with giant numbers must not hide what another head does, nor a dead one what it does."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lipaudit.models import graph
from lipaudit.models.attention.capture import (
    add_inputs,
    capture,
    matches_autograd,
    read_product,
)
from lipaudit.models.attention.survey import survey
from lipaudit.models.graph import Probed
from lipaudit.models.requirements import agree
from lipaudit.theory.head_norms import head_norms
from tests.nets import draw, own_batch, own_net

TOKENS, WIDTH = 6, 8
GIANT = 1e3
"""How many times larger the logits of the first of two heads are."""


class Model(nn.Module):
    """Two heads in float32, the first one with giant logits; subclasses spoil the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.position = torch.randn(TOKENS, TOKENS)
        for linear in (self.to_q, self.to_k):
            linear.weight.data *= 2
            linear.weight.data[:4] *= GIANT**0.5

    def project(self, x):
        parts = (self.to_q(x), self.to_k(x), self.to_v(x))
        return [t.unflatten(2, (2, -1)).transpose(1, 2) for t in parts]

    def logits(self, q, k):
        return q @ k.mT

    def forward(self, x):
        q, k, v = self.project(x)
        return (self.logits(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


def second(change: torch.Tensor) -> torch.Tensor:
    """Put something into the second of two heads, (1, 2, ...)."""
    return torch.stack([torch.zeros_like(change), change])[None]


class Biased(Model):
    """A position bias that is rounding beside the logits of the other head."""

    def logits(self, q, k):
        return q @ k.mT + second(5e-3 * self.position)


class Shifted(Model):
    """Queries that are shifted by position, by little beside the other head's queries."""

    def project(self, x):
        q, k, v = super().project(x)
        return q + second(1e-3 * self.position[:, :4]), k, v


class Leaking(Model):
    """Logits that take a small share of the other head's."""

    def logits(self, q, k):
        logits = q @ k.mT
        return torch.cat([logits[:, :1], logits[:, 1:] + 1e-7 * logits[:, :1]], 1)


class Capped(Model):
    """Logits that are cut off where no ordinary sample takes them."""

    def logits(self, q, k):
        return (q @ k.mT).clamp(max=1e8)


class Floored(Model):
    """Logits that are kept above the end of float32, as masks need it: nothing is cut off."""

    def logits(self, q, k):
        end = torch.tensor(torch.finfo(q.dtype).min)
        return torch.max((q @ k.mT).clamp(min=float(end)), end)


def surveyed(model: nn.Module):
    net = own_net(model, (TOKENS, WIDTH), classifier=False)
    batch = own_batch(draw(1, 1, TOKENS, WIDTH))
    return net, survey(net, batch).sites[0], batch


def test_small_bias_beside_giant_logits_is_kept():
    """With logits still larger, and a bias of 0.1, the norm was 13 % off without it."""
    model = Biased()
    net, site, batch = surveyed(model)
    found = capture(net, (site,), batch, lambda layer: layer.heads())
    torch.testing.assert_close(found[0].bias[0, 1], 5e-3 * model.position, rtol=0.0, atol=1e-5)
    norm = head_norms(found[0], seeds=[0], tol=1e-8).norm[0, 1]
    model.double()
    dense = torch.autograd.functional.jacobian(lambda x: model(x)[0, :, 4:], batch.x.double())
    want = torch.linalg.matrix_norm(dense.flatten(2).flatten(0, 1), 2)
    torch.testing.assert_close(norm, want, rtol=1e-5, atol=0.0)


def test_bias_of_rounding_is_none():
    class Zero(Model):
        def logits(self, q, k):
            return (q @ k.mT) / 3 + second(0 * self.position)

    net, site, batch = surveyed(Zero())
    found = capture(net, (site,), batch, lambda layer: layer.heads().bias)
    assert found[0] is None or not found[0][0, 1].any()


@pytest.mark.parametrize(
    ("model", "kinds", "reason"),
    [
        (Shifted, ("local", "affine", "affine"), None),
        (Leaking, ("affine", "affine", "affine"), "its logits mix heads or keys"),
    ],
)
def test_one_head_hides_nothing_of_another(model, kinds, reason):
    _, site, _ = surveyed(model())
    assert site.kinds == kinds
    assert (site.reason is None) == (reason is None)
    assert reason is None or reason in site.reason


@pytest.mark.parametrize(("model", "plain"), [(Capped, False), (Floored, True)])
def test_logits_that_a_sample_may_take_to_a_cut_off_are_not_plain(model, plain):
    """Bounds for all inputs are not given for them."""
    net, site, batch = surveyed(model())
    found = capture(net, (site,), batch, lambda layer: layer.heads().pairs)
    assert (found[0] is None) == plain


def dead_model() -> Model:
    model = Model()
    for linear in (model.to_q, model.to_k, model.to_v):
        linear.weight.data[4:] *= 1e-15
        linear.bias.data[4:] *= 1e-15
    return model


def test_dead_heads_are_read_like_the_others():
    _, site, _ = surveyed(dead_model())
    assert site.closed_form
    assert site.kinds == ("affine", "affine", "affine")


@pytest.mark.parametrize(
    ("name", "head", "factor"),
    [("to_q", 1, 1.001), ("to_k", 1, 1.001), ("to_v", 0, 1.1), ("to_v", 1, 1.001)],
)
def test_a_wrong_weight_of_any_head_fails_the_comparison_with_autograd(name, head, factor):
    """Off by a little in one head, beside another that is 1e15 times larger, or smaller."""
    net, site, batch = surveyed(dead_model() if name == "to_v" else Model())

    def compare(layer):
        with torch.enable_grad():
            plain, relative = read_product(layer.call, batch, site.structure.q)
            heads, parts = add_inputs(site.structure, plain, layer.call, batch, relative)
            weight = getattr(heads, name).weight.clone()
            weight[head] *= factor
            wrong = replace(heads, **{name: replace(getattr(heads, name), weight=weight)})
            return [matches_autograd(each, parts, layer.call) for each in (heads, wrong)]

    assert capture(net, (site,), batch, compare) == [[True, False]]


def test_agreement_is_judged_slice_by_slice():
    a = torch.tensor([[1e4, 1.0]])
    b = a + torch.tensor([[0.0, 1e-3]])
    assert agree(a, b)
    assert agree(a, b, each=0)
    assert not agree(a, b, each=1)


def test_an_affine_map_is_judged_head_by_head():
    """Heads of very different sizes; the small one has an offset that depends on the position."""
    y = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scale = torch.tensor([1e4, 1.0])[None, :, None, None]
    t = y.view(3, 4, 2, 4).transpose(1, 2) * scale
    rows, columns = torch.arange(12).view(3, 4), torch.arange(8).view(2, 4)
    source = Probed(t, (y,), lambda t: t)
    assert graph.find_affine_map(source, rows, columns) is not None
    shift = torch.tensor([0.0, 1e-2])[None, :, None, None] * torch.arange(4.0)[:, None]
    shifted = Probed(t + shift, (y,), lambda t: t)
    assert graph.find_affine_map(shifted, rows, columns) is None
    identity = torch.eye(4).expand(3, 2, 4, 4, 4) * scale[..., None]
    assert graph.is_linear(source, identity, rows, columns)
    assert not graph.is_linear(shifted, identity, rows, columns)


HEADS = 12


def probed(columns: torch.Tensor) -> Probed:
    """Heads of two channels, each with its columns of y, in both tokens of one window."""
    y = torch.randn(2, 2 * HEADS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return Probed((y[:, columns] * 1e-12).transpose(0, 1)[None], (y,), lambda t: t)


def heads_of(source: Probed) -> torch.Tensor | None:
    return graph.label_fed(source, torch.arange(HEADS).view(1, HEADS, 1, 1), rows=False)


def test_every_column_has_the_head_that_it_feeds():
    columns = torch.randperm(2 * HEADS, generator=torch.Generator().manual_seed(1))
    labels = heads_of(probed(columns.view(HEADS, 2)))
    assert labels[columns].tolist() == [h for h in range(HEADS) for _ in range(2)]


@pytest.mark.parametrize("pair", [(0, 11), (3, 4), (7, 8)])
def test_a_column_that_feeds_two_heads_is_noticed(pair):
    columns = torch.arange(2 * HEADS).view(HEADS, 2).clone()
    columns[pair[1], 0] = columns[pair[0], 0]
    assert heads_of(probed(columns)) is None


def test_a_column_that_feeds_nothing_has_no_head():
    columns = torch.arange(2 * HEADS).view(HEADS, 2).clone()
    columns[5, 1] = columns[5, 0]
    assert heads_of(probed(columns))[11] == -1
