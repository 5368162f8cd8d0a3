"""A trained ReLU vision transformer: what is certified stands against attacks."""

import pytest
import torch

from benchmarks.relu_vit import images, margins_of, pgd, trained
from lipaudit.certify.branch import decide
from lipaudit.certify.prove import ball, margins, run


@pytest.fixture(scope="module")
def model():
    return trained(layers=2, patch=16, width=12, share=0.02, count=800, epochs=3)


def test_certificates_of_a_trained_model_stand(model):
    x, y = images(40, 5)
    right = (model(x).argmax(1) == y).nonzero()[:4, 0]
    assert len(right) == 4
    x, y = x[right], y[right]
    broken, certified = [], []
    for eps in (0.5 / 255, 3 / 255):
        with torch.enable_grad():
            attacked = pgd(model, x, y, eps, steps=10)
        margin = margins_of(model(attacked), y)
        for i in range(len(x)):
            out = margins(run(model, ball(x[i : i + 1], eps, box=(0.0, 1.0))), int(y[i]))
            verdict = decide(out, nodes=100)
            assert verdict.bound <= margin[i] + 1e-4
            assert not (verdict.certified and margin[i] <= 0)
            broken.append(bool(margin[i] <= 0))
            certified.append(verdict.certified)
    assert any(broken)
    assert any(certified)
