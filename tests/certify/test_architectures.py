"""Unmodified models of timm and transformers, small, with weights that hide nothing."""

import functools
import math

import pytest
import torch

from benchmarks.reference import loaded, timm_models, transformers_models
from benchmarks.reference.cases import Case
from benchmarks.reference.certificates import outcome_of
from lipaudit.certify.prove import ball, run

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
        loaded.timm_loader(timm_models.TIMM["botnet"]),  # by a py: factory
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
