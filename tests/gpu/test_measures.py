"""What is measured on a CUDA card is what is measured on the CPU: `pytest -m gpu -n 0`."""

from __future__ import annotations

import pytest
import torch

from lipaudit.theory.spectral import random_starts, spectral_norms
from tests.simulated.test_measures import CASES, compare_devices

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def card() -> str:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA card")
    return "cuda"


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_card_gives_the_figures_of_the_cpu(card, model, name):
    assert compare_devices(model, name, card) == []


def test_a_step_of_lanczos_on_a_card_waits_once(card):
    matrix = torch.diag(torch.linspace(0.9, 1.0, 60)).to(card)
    start = random_starts([0, 1], 60).float().to(card)

    def copies(steps: int) -> int:
        with torch.profiler.profile() as profile:
            spectral_norms(lambda _: lambda u: u @ matrix, start, tol=0.0, max_steps=steps)
        return sum(e.count for e in profile.key_averages() if e.key == "cudaStreamSynchronize")

    assert copies(20) - copies(10) == 10
