"""Unmodified models of timm and transformers, small, with weights that hide nothing."""

import functools
import math

import pytest
import torch

from benchmarks.reference import loaded, timm_models, transformers_models
from benchmarks.reference.cases import Case
from benchmarks.reference.certificates import outcome_of
from benchmarks.relu_vit import images, margins_of, pgd, trained
from lipaudit.certify.branch import decide
from lipaudit.certify.prove import ball, margins, run

TIMM = ("vit", "deit3", "beit", "eva02", "swin", "convnext", "mlp_mixer", "resnet", "vit-relpos")
TRANSFORMERS = ("bert", "distilbert", "roberta", "gpt2", "llama", "qwen2", "bart", "deberta-v2")


@pytest.mark.parametrize("name", TIMM)
def test_vision_models_run_as_they_are(name):
    assert outcome_of(Case("timm", name))[0] == "runs"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_text_models_run_as_they_are(name):
    assert outcome_of(Case("transformers", name))[0] == "runs"


def _loaders(folder):
    config = transformers_models.small_config("bert")
    return [
        loaded.timm_loader(timm_models.TIMM["vit"]),
        loaded.transformers_loader(config, folder),
    ]


def test_what_is_certified_is_what_attacks_see(tmp_path):
    """Pixels before normalisation, embeddings with the mask of their text; the model's dtype."""
    for loader in _loaders(tmp_path):
        net = loader(loaded.NARROW)
        loaded.perturb(net.module, 0.5)
        sample = loaded.batch_for(net)[1:]
        start = ball(net.point(sample), 0.0, settle=math.inf)
        assert start.dtype is torch.float32
        form = run(functools.partial(net.forward, batch=sample), start, module=net.module)
        output = net.output(sample)
        off = (form.centre - output).abs().amax() / output.abs().amax()
        assert off < 1e-5


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
