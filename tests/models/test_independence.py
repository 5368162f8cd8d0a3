"""Models without a Jacobian per sample are refused, and the others hardly pay for the check."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lipaudit
from lipaudit.errors import EvaluationError, InputError
from lipaudit.models.linearize import LinearMode, linearize
from lipaudit.models.model_norms import compute_jacobian_norms
from tests.nets import Calls


def checkpointed(*, use_reentrant):
    parts = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    return Calls(lambda body, x: checkpoint(body, x, use_reentrant=use_reentrant), parts)


def noisy(x):
    return x + torch.randn_like(x)


def chosen(x):
    return x.sin() + 1e-2 * torch.where(x > 0, x, 0).sum(0)


UNSUITABLE = {
    "dropout": (nn.Dropout(0.5).train(), InputError, "dropout is on"),
    "attention dropout": (
        lambda x: nn.MultiheadAttention(4, 2, 0.9, batch_first=True)(x, x, x)[0],
        InputError,
        "one forward pass to the next",
    ),
    "dropout of a fused attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        InputError,
        "dropout is on",
    ),
    "dropout of an encoder": (
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
        InputError,
        "dropout is on",
    ),
    "noise": (noisy, InputError, "one forward pass to the next"),
    "batch statistics": (nn.BatchNorm1d(3).train(), InputError, "uses batch statistics"),
    "neighbour": (lambda x: x + 1e-2 * x.roll(1, 0).tanh(), InputError, "depends on another"),
    # As a model that takes its batch for a sequence, each part of which sees those before it.
    "batch as a sequence": (lambda x: x.cumsum(0), InputError, "depends on another"),
    "backwards": (lambda x: x.flip(0).cumsum(0).flip(0), InputError, "depends on another"),
    "next": (lambda x: x.sin() + 1e-2 * x.roll(-1, 0), InputError, "depends on another"),
    "chosen neighbour": (chosen, InputError, "depends on another"),
    "largest of the batch": (lambda x: x / x.abs().amax(), InputError, "depends on another"),
    "mean of the batch": (lambda x: x - x.mean(0), InputError, "depends on another"),
    "checkpoint": (checkpointed(use_reentrant=False), InputError, "gradient checkpointing"),
    "reentrant checkpoint": (checkpointed(use_reentrant=True), InputError, "checkpoint"),
    "constant": (torch.ones_like, InputError, "cannot be linearised"),
    "not finite": (lambda x: x / 0, EvaluationError, "not finite"),
    "no batch": (lambda x: x.sum(), InputError, "output of shape"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs")  # what re-entrant checkpoints say
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("f", "error", "message"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_unsuitable_models_are_refused(f, error, message, samples):
    torch.manual_seed(0)
    with pytest.raises(error, match=message):
        compute_jacobian_norms(linearize(lambda z, _: f(z), torch.randn(samples, 3, 4)))


@pytest.mark.parametrize("f", [torch.tanh, lambda z: F.scaled_dot_product_attention(z, z, z)])
def test_the_check_takes_three_forward_passes_of_one_sample(f):
    sizes = []

    def run(z, index):
        sizes.append((len(index), torch.is_grad_enabled()))
        return f(z)

    for samples in (1, 5):
        linearize(run, torch.randn(samples, 3, 4)).outer(torch.randn(samples, 3, 4))
        assert sizes == [(3, False), (samples, True)]
        sizes.clear()


def test_statistics_of_the_batch_stay_what_they_were():
    norm = nn.BatchNorm1d(3).train()
    with pytest.raises(InputError, match="uses batch statistics"):
        linearize(lambda z, _: norm(z), torch.randn(1, 3, 4))
    assert norm.running_mean.tolist() == [0, 0, 0]


def test_a_model_that_checks_its_numbers_is_measured():
    def f(z):
        assert z.abs().max() <= 1
        return z.sin()

    linearize(lambda z, _: f(z), torch.linspace(-1, 1, 12).view(3, 4))


def test_a_wrong_mask_is_noticed():
    """An f that forgets `index` gives samples another mask where it is run on a part."""
    scale = torch.tensor([1.0, 2.0, 3.0])[:, None]
    with pytest.raises(InputError, match="depends on another"):
        linearize(lambda z, _: z * scale[: len(z)], torch.randn(3, 4))


X = {"x": torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)), "y": [0, 1, 2]}


def hide(part, x):
    with torch.no_grad():
        hidden = part(x)
    return hidden + 0.1 * x


def add_rounded(x):
    return x + ((255 * x).round() / 255 - x).detach()


def surround(gap):
    """Return ReLUs whose kinks are all around the samples, at about a distance."""
    flat = X["x"].flatten(1)
    first = nn.Linear(flat.shape[1], 300)
    side = (torch.rand(300) - 0.5).sign() * (0.3 + torch.rand(300))
    with torch.no_grad():
        first.bias.copy_(gap * side - (first.weight * flat[torch.arange(300) % 3]).sum(1))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU())


HONEST = {
    "kinks nearby": lambda: surround(3e-4),
    "kinks everywhere": lambda: surround(1e-6),
    "relu and maxima": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
    "gelu": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.BatchNorm2d(8)),
    "constant": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Threshold(1e9, 0.5)),
    "huge": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(1e-6), nn.Softplus(1e4)),
}
DISHONEST = {
    "rounded input, straight through": lambda: nn.Sequential(
        Calls(add_rounded), nn.Conv2d(3, 8, 3)
    ),
    "kinks everywhere, straight through": lambda: nn.Sequential(
        surround(1e-5), Calls(add_rounded)
    ),
    "a part under no_grad": lambda: Calls(hide, nn.Conv2d(3, 3, 3, padding=1)),
}


def codes(build):
    torch.manual_seed(0)
    model = nn.Sequential(build(), nn.Flatten(), nn.LazyLinear(3))
    model(X["x"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    report = lipaudit.audit(model, measures=["jacobian"], data=(X["x"], X["y"]), samples=3)
    after = model.state_dict()
    assert all(after[name].dtype == t.dtype and after[name].equal(t) for name, t in before.items())
    return {note.code for section in report.sections for note in section.notes}


@pytest.mark.parametrize("name", [*HONEST, *DISHONEST])
def test_a_gradient_that_is_no_derivative_is_warned_of(name):
    assert ("no-derivative" in codes((HONEST | DISHONEST)[name])) == (name in DISHONEST)


def add_noise(model, x):
    return model(x) + 0.1 * torch.randn(4)


def test_a_random_model_without_attention_is_named_and_never_certified():
    net = Calls(add_noise, nn.Sequential(nn.Flatten(), nn.Linear(192, 4)))
    options = {"data": (X["x"], X["y"]), "samples": 2, "eps": "1/255"}
    report = lipaudit.audit(net, measures=["attack"], attack="fgsm", **options)
    codes = {note.code for section in report.sections for note in section.notes}
    assert "random-model" in codes
    assert "no-derivative" not in codes
    with pytest.raises(InputError, match="the model is random"):
        lipaudit.audit(net, measures=["certify"], **options)


# --- the mode in which a model is run to be differentiated


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
def test_the_gradient_of_a_batch_norm_is_right_for_one_sample_too(samples, affine):
    """torch's own is wrong for a batch of one under a transposed cotangent."""
    norm = nn.BatchNorm2d(8, affine=affine).eval().double()
    norm.running_mean.copy_(torch.randn(8))
    norm.running_var.copy_(torch.rand(8) + 0.5)
    if affine:
        norm.weight.data.copy_(torch.randn(8))
        norm.bias.data.copy_(torch.randn(8))
    x = torch.randn(samples, 8, 2, 2, dtype=torch.float64, requires_grad=True)
    u = torch.randn(samples, 4, 8, dtype=torch.float64)
    with LinearMode(widen=False):
        y = norm(x)
    torch.testing.assert_close(y, norm(x))
    (gradient,) = torch.autograd.grad(y.flatten(2).transpose(1, 2), x, u)
    gain = (norm.running_var + norm.eps).rsqrt() * (norm.weight if affine else 1)
    want = (u * gain).transpose(1, 2).reshape(x.shape)
    torch.testing.assert_close(gradient, want)


def test_only_float64_runs_are_widened():
    x = torch.ones(3, dtype=torch.float64) / 3
    with LinearMode(widen=True):
        wide = [x.float(), x.to(torch.float32), torch.zeros(1, dtype=torch.float32)]
    with LinearMode(widen=False):
        narrow = x.float()
    assert {t.dtype for t in wide} == {torch.float64}
    assert narrow.dtype == torch.float32
