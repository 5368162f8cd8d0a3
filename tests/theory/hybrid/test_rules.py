"""Every rule of hybrids against the operation itself, at points of the box in float64."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lipaudit.theory.hybrid.bound import box, worst_logits
from lipaudit.theory.hybrid.tensor import Hybrid
from lipaudit.theory.relaxation.refusals import NoRuleError

BATCH, TOKENS, WIDTH = 2, 4, 6


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


W, B = numbers(5, WIDTH, seed=1), numbers(5, seed=2)
KERNEL, SCALE = numbers(4, 3, 2, 2, seed=3), numbers(WIDTH, seed=4)
NORM = nn.BatchNorm1d(TOKENS).double().eval()
NORM.running_mean, NORM.running_var = numbers(TOKENS, seed=5), 0.5 + numbers(TOKENS).square()


def heads(x):
    return (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (x, 1.5 * x + 0.2, 2 * x - 1))


def eager(x):
    q, k, v = heads(x)
    return F.dropout((q @ k.transpose(-2, -1) / 3**0.5).softmax(dim=-1), 0.1, training=False) @ v


OPERATIONS = {
    "linear": lambda x: F.linear(x, W, B),
    "matmul": lambda x: (x @ W.T, numbers(3, TOKENS) @ x)[1] @ W.T,
    "conv2d": lambda x: F.conv2d(x.reshape(-1, 3, 4, 2), KERNEL, B[:4], (2, 1), (1, 0)),
    "batch_norm": NORM,
    "scalars": lambda x: 2 - (x * 3 - 1) / 7,
    "tensors": lambda x: -(x - SCALE) * SCALE + x[:, :1],
    "cat": lambda x: torch.cat([numbers(1, 2, WIDTH).expand(len(x), -1, -1), x], 1),
    "mean": lambda x: x.mean(1, keepdim=True) + x.mean((1, 2)).unsqueeze(-1).unsqueeze(-1),
    "chunks": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1).permute(0, 2, 1),
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), SCALE, SCALE + 1, 1e-6),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), SCALE, 1e-6),
    "product": lambda x: (x + 1) * (2 - x),
    "products": lambda x: x @ (x + 1).mT,
    "softmax": lambda x: (3 * x).softmax(-1),
    "attention": lambda x: F.scaled_dot_product_attention(*heads(x)),
    "eager": eager,
}


def points(x, count):
    """Corners of the box and points inside, as symbols e (count, n) and as inputs."""
    n = len(x.generators)
    e = numbers(count, n, seed=count).sign()
    e[::2] *= torch.rand(len(e[::2]), n, generator=torch.Generator().manual_seed(0)).double()
    return e, x.centre + torch.einsum("kn,n...->k...", e, x.generators)


@pytest.mark.parametrize("eps", [1e-3, 0.1, 3.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_lie_where_a_hybrid_says(name, eps):
    f, x = OPERATIONS[name], box(numbers(BATCH, TOKENS, WIDTH, seed=7), eps)
    out = f(x)
    e, inputs = points(x, 200)
    truth = torch.stack([f(each) for each in inputs])
    off = truth - out.centre - torch.einsum("kn,n...->k...", e, out.generators)
    assert isinstance(out, Hybrid)
    assert out.shape == truth.shape[1:]
    # float64 with sums of 24 terms; what a box may leave out is far more.
    assert (off.abs() - out.radius).max() < 1e-10 * (1 + truth.abs().max())
    low, high = out.ends
    assert (out.spread - out.generators.abs().sum(0)).abs().max() < 1e-10
    assert torch.maximum(low - truth, truth - high).max() < 1e-9


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_does_not_move_stays_a_point(name):
    f, x = OPERATIONS[name], numbers(BATCH, TOKENS, WIDTH, seed=8)
    out = f(box(x, 0.0))
    torch.testing.assert_close(out.centre, f(x), rtol=1e-9, atol=1e-9)
    assert out.reach.max() < 1e-9


def test_normalised_rows_and_attention_never_leave_what_they_can_reach():
    x = box(numbers(BATCH, TOKENS, WIDTH), 100.0)
    assert F.layer_norm(x, (WIDTH,)).ends[1].max() <= math.sqrt(WIDTH - 1)
    value = box(numbers(BATCH, TOKENS, WIDTH), 1.0)
    out = (100 * value @ value.mT).softmax(-1) @ value
    assert (out.ends[1] <= value.ends[1].amax(1, keepdim=True) + 1e-9).all()


class Toy(nn.Module):
    """An encoder block and a head."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(TOKENS * WIDTH, 3)

    def forward(self, x):
        return self.head((x + self.block(x)).flatten(1))


def toy():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy().double()


def test_worst_logits_are_no_less_than_those_of_any_input():
    model, label = toy(), torch.tensor([0, 2])
    x = box(numbers(BATCH, TOKENS, WIDTH), 0.05, (-1.0, 1.0))
    worst = worst_logits(model, x, label, module=model)
    _, inputs = points(x, 500)
    logits = torch.stack([model(each) for each in inputs])
    ahead = logits - logits[:, [0, 1], label][..., None]
    assert inputs.abs().max() <= 1 + 1e-12
    assert (worst[[0, 1], label] == 0).all()
    assert (ahead.amax(0) <= worst + 1e-12).all()
    # The linear part and a small box: no more than twice what corners reach.
    middle = model(x.centre)
    middle = middle - middle[[0, 1], label][:, None]
    other = worst != 0
    assert ((worst - middle)[other] < 3 * (ahead.amax(0) - middle)[other]).all()


def test_gradients_are_those_of_finite_differences():
    model, label = toy(), torch.tensor([0, 2])
    x = numbers(BATCH, TOKENS, WIDTH)

    def loss() -> Tensor:
        return F.cross_entropy(worst_logits(model, box(x, 0.05), label, module=model), label)

    loss().backward()
    weight, step = model.block[0].weight, 1e-6
    for place in ((0, 0), (3, 2), (5, 5)):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[place] += sign * step
                values.append(loss().item())
                weight[place] -= sign * step
        slope = (values[0] - values[1]) / (2 * step)
        assert weight.grad[place].item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


REFUSED = {
    "cumsum": lambda x: x.cumsum(1),
    "dropout that is on": lambda x: F.dropout(x, 0.5, training=True),
    "batch_norm with statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "rdiv": lambda x: 1 / x,
    "division by": lambda x: x / (x + 9),
    "masks": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "mean over the batch": lambda x: x.mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_without_a_rule_is_named_with_its_module(name):
    class Refused(nn.Module):
        def forward(self, x):
            return REFUSED[name](x)

    model = nn.Sequential(nn.ReLU(), Refused())
    inputs = box(numbers(BATCH, TOKENS, WIDTH), 0.1)
    with pytest.raises(NoRuleError, match=rf"{name}.* \(in 1\)"):
        worst_logits(model, inputs, torch.zeros(BATCH, dtype=torch.long), module=model)
