"""First-order changes of a norm against the norm itself: dense autograd, finite differences."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from lipaudit.data.batch import Batch
from lipaudit.errors import InputError
from lipaudit.models.derivative.endpoints import sample_function
from lipaudit.models.derivative.linearize import linearize
from lipaudit.models.derivative.model_norms import jacobian_norms
from lipaudit.models.derivative.sensitivity import (
    SingularPairs,
    norm_slopes,
    singular_pairs,
)
from lipaudit.models.sources.assembly import assemble
from lipaudit.models.sources.spec import LoadOptions, ModelSpec
from lipaudit.models.swap import Exchange


def random_maps(samples, outputs, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(samples, outputs, inputs, generator=generator, dtype=torch.float64)
    return a, linearize(
        lambda z, index: (a[index] @ z[:, :, None])[:, :, 0],
        torch.zeros(samples, inputs, dtype=a.dtype),
    )


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 30), (5, 30), (30, 5), (20, 30), (30, 20), (24, 24)]
)
def test_pairs_are_those_of_the_dense_matrix(outputs, inputs):
    a, linear = random_maps(4, outputs, inputs)
    pairs = singular_pairs(linear, seeds=range(4))
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    product = (pairs.u[:, None] @ a @ pairs.v[:, :, None]).flatten()
    torch.testing.assert_close(product, s[:, 0], rtol=1e-6, atol=0)
    sign = (pairs.u * u[:, :, 0]).sum(1).sign()[:, None]
    torch.testing.assert_close(pairs.u * sign, u[:, :, 0], rtol=0, atol=3e-3)
    torch.testing.assert_close(pairs.v * sign, vh[:, 0], rtol=0, atol=3e-3)
    second = s[:, 1] if s.shape[1] > 1 else torch.zeros(4).double()
    torch.testing.assert_close(pairs.gap, 1 - second / s[:, 0], rtol=0, atol=0.01)


def test_a_double_singular_value_has_no_gap():
    a = torch.diag(torch.tensor([3.0, 3.0] + 28 * [1.0], dtype=torch.float64))[None]
    linear = linearize(lambda z, _: (a @ z[:, :, None])[:, :, 0], torch.zeros(1, 30).double())
    assert float(singular_pairs(linear).gap) == pytest.approx(0, abs=1e-9)


def pixels_to_logits(module, x):
    """The norm at one sample, by a dense Jacobian that is differentiable in the weights."""
    jacobian = torch.autograd.functional.jacobian(
        lambda z: module(z[None])[0], x, create_graph=True
    )
    return torch.linalg.matrix_norm(jacobian.flatten(1), 2)


def slopes_of(net, batch, exchange, start=None):
    at = sample_function(net, batch, start=start, target=None)
    pairs = singular_pairs(linearize(at.f, at.x), seeds=range(len(batch)))
    return norm_slopes(net, batch, at, pairs, exchange.moves())


def stepped(module, *, seed=0, size=0.1):
    """A copy one random step away."""
    other, generator = deepcopy(module), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in other.parameters():
            t += size * t.abs() * torch.randn(t.shape, generator=generator, dtype=t.dtype)
    return other


def test_against_the_gradient_of_a_dense_norm(zoo):
    """An independent truth: autograd through the singular values of the whole Jacobian."""
    net, _, batch = zoo("torch-encoder", "float64")
    exchange = Exchange(net.module, stepped(net.module))
    slopes = slopes_of(net, batch, exchange)
    moves = exchange.moves()
    assert slopes.shape == (len(exchange.names), len(batch))
    leaves = [leaf.requires_grad_() for move in moves for leaf, _ in move]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for i, x in enumerate(batch.x):
            norm = pixels_to_logits(net.module, x)
            gradients = torch.autograd.grad(norm, leaves, allow_unused=True)
            own = {
                id(leaf): 0.0 if g is None else g
                for leaf, g in zip(leaves, gradients, strict=True)
            }
            truth = torch.stack([sum((own[id(t)] * step).sum() for t, step in m) for m in moves])
            torch.testing.assert_close(slopes[:, i], truth, rtol=1e-8, atol=1e-10)
    for leaf in leaves:
        leaf.requires_grad_(False)


class Convolved(nn.Module):
    """A batch norm with statistics of its own, before attention of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
        self.rms, self.head = nn.RMSNorm(8), nn.Linear(8, 20)

    def forward(self, x):
        tokens = self.norm(self.stem(x)).flatten(2).mT
        return self.head(self.rms(self.block(tokens)).flatten(1).unflatten(1, (4, 8)).mean(1))


@pytest.fixture
def convolved():
    torch.manual_seed(0)
    module = Convolved()
    module.norm.running_mean.normal_()
    module.norm.running_var.uniform_(0.5, 2)
    spec = ModelSpec(module, (3, 8, 8))
    net = assemble(spec, LoadOptions(dtype="float64", device="cpu"), name="own", source="test")
    return net, None, Batch(torch.rand(2, 3, 8, 8).double(), None, ("0", "1"))


def central_differences(net, batch, exchange, start, h=1e-5):
    """The same derivative from norms of the model a little way forth and back."""
    rows = []
    for move in exchange.moves():
        held = [(leaf, leaf.data) for leaf, _ in move]
        ends = []
        for side in (h, -h):
            for leaf, step in move:
                leaf.data = leaf.data + side * step
            at = sample_function(net, batch, start=start, target=None)
            linear = linearize(at.f, at.x)
            ends.append(jacobian_norms(linear, tol=1e-11, seeds=range(len(batch))).norm)
            for leaf, value in held:
                leaf.data = value
        rows.append((ends[0] - ends[1]) / (2 * h))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("timm-vit", None),
        ("timm-vit", "embeddings"),
        ("timm-qk-norm", None),
        ("bert", None),
        ("gpt2", None),
        ("llama", None),
        ("convolved", None),
    ],
)
def test_against_finite_differences(name, start, request):
    """Embeddings of text go along with their table, a tied head with both of its uses."""
    zoo = request.getfixturevalue("zoo") if name != "convolved" else None
    net, _, batch = zoo(name, "float64") if zoo else request.getfixturevalue("convolved")
    exchange = Exchange(net.module, stepped(net.module), "block")
    slopes = slopes_of(net, batch, exchange, start)
    truth = central_differences(net, batch, exchange, start)
    scale = truth.abs().max()
    torch.testing.assert_close(slopes, truth, rtol=1e-3, atol=float(2e-4 * scale))
    assert (slopes.abs().amax(1) > 1e-6 * scale).sum() >= len(slopes) - 1


def test_statistics_of_a_batch_norm_are_differentiated_as_well(convolved):
    net, _, batch = convolved
    other = deepcopy(net.module)
    other.norm.running_var *= 1.3
    other.norm.running_mean += 0.2
    exchange = Exchange(net.module, other)
    slopes = slopes_of(net, batch, exchange)
    truth = central_differences(net, batch, exchange, None)
    torch.testing.assert_close(slopes, truth, rtol=1e-3, atol=0)


def test_weights_are_as_they_were(zoo):
    net, _, batch = zoo("timm-vit")
    exchange = Exchange(net.module, stepped(net.module))
    slopes_of(net, batch, exchange)
    assert not any(p.requires_grad for p in net.module.parameters())
    assert all(p.grad is None for p in net.module.parameters())


class Once(torch.autograd.Function):
    """An operation whose backward pass has no derivative, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u):
        return 2 * ctx.saved_tensors[0] * u


def test_an_operation_without_a_second_derivative_is_named():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return Once.apply(self.head(x))

    spec = ModelSpec(Model(), (2, 5), kind="tokens")
    net = assemble(spec, LoadOptions(device="cpu"), name="once", source="test")
    batch = Batch(torch.rand(1, 2, 5), None, ("0",))
    at = sample_function(net, batch, start=None, target=None)
    jacobian = torch.autograd.functional.jacobian(lambda z: net.module(z)[0], at.x)[:, :, 0]
    u, _, vh = torch.linalg.svd(jacobian.reshape(6, 10))
    pairs = SingularPairs(u[None, :, 0].view(1, 2, 3), vh[0].view(1, 2, 5), torch.ones(1))
    move = [(net.module.head.weight, torch.ones(3, 5))]
    with pytest.raises(InputError, match="differentiated in the weights"):
        norm_slopes(net, batch, at, pairs, [move])
