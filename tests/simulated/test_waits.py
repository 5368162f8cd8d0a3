"""The host waits for an accelerator where it must decide something, and not once a step."""

import pytest
import torch

import lipaudit
from benchmarks.shared.demos import load_shipped
from lipaudit.models.graph import take
from lipaudit.models.linearize import linearize
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import load_net
from lipaudit.theory.spectral import random_starts, spectral_norms
from lipaudit.wings.training.loop import train
from lipaudit.wings.training.recipe import Recipe
from tests.simulated.conftest import MODELS, samples
from tests.simulated.device import Waits

pytestmark = pytest.mark.simulated


def test_lanczos_waits_once_a_step(simulated):
    matrix = torch.diag(torch.linspace(0.9, 1.0, 60)).to(simulated)
    start = random_starts([0, 1], 60).float().to(simulated)

    def waits(steps: int) -> int:
        with Waits() as counted:
            norms = spectral_norms(lambda _: lambda u: u @ matrix, start, tol=0.0, max_steps=steps)
        assert norms.products.tolist() == [steps, steps]
        return counted.total

    assert waits(20) - waits(10) == 10


def test_products_with_a_jacobian_do_not_wait(simulated):
    x = torch.randn(3, 8).to(simulated)
    linear = linearize(lambda z, _: z.tanh().square(), x)
    linear.outer(x)
    with Waits() as counted:
        for _ in range(3):
            linear.vjp(linear.jvp(linear.outer(x)))
    assert counted.total == 0, counted


def test_an_index_does_not_wait(simulated):
    t, index = torch.randn(9, 4).to(simulated), torch.arange(2, 6).view(2, 2).to(simulated)
    with Waits() as counted:
        assert take(t, index, 0).shape == (2, 2, 4)
        assert take(t.T, index, 1).shape == (4, 2, 2)
    assert counted.total == 0, counted


@pytest.mark.parametrize(
    "options", [{}, {"penalty": "jasmin", "k": 2}, {"penalty": "specformer"}], ids=str
)
def test_a_step_of_training_waits_for_its_samples_alone(simulated, options):
    def waits(batches: int, epochs: int) -> int:
        net = load_net("demo", LoadOptions(device=simulated))
        recipe = Recipe(epochs=epochs, batch_size=4, lr=1e-3, flip=False, **options)
        with Waits() as counted:
            list(train(net, load_shipped("train")[: 4 * batches], recipe))
        return counted.total

    assert waits(8, 1) - waits(4, 1) == 2 * 4  # x and y of each batch
    # Beside those of its four batches: the losses, and whether the weights are finite.
    assert waits(4, 2) - waits(4, 1) == 2 * 4 + 2


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_pgd_does_not_wait(simulated, model):
    norm = {"norm": "linf", "eps": "8/255"} if model == "demo" else {"norm": "l2", "eps": "0.5"}

    def waits(steps: int) -> int:
        options = {**samples(model), **norm, "attack": "pgd", "steps": steps}
        with Waits() as counted:
            lipaudit.measure(MODELS[model](), "attack", device=simulated, **options)
        return counted.total

    # What transformers asks of a mask in every pass of this decoder is its own.
    assert waits(9) - waits(4) == (5 if model == "llama" else 0)
