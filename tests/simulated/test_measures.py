"""What is measured on an accelerator is what is measured on the CPU, and nothing mixes devices."""

import dataclasses
from typing import Any

import pytest
import torch

import lipaudit
from benchmarks.shared.demos import load_shipped
from lipaudit.models.net import LoadOptions
from lipaudit.models.sources.loader import assemble, load_net
from lipaudit.wings.training.loop import train
from lipaudit.wings.training.recipe import Recipe
from tests.commands import find_differences
from tests.simulated.conftest import MODELS, samples

pytestmark = pytest.mark.simulated

AUTO = "custom:apgd-ce,apgd-t,fab-t,square"
SCALING = {"lengths": "4:8:log2", "layers": "0", "mode": "real,adversarial,radius"}
MEASURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bounds": ("bounds", {}),
    "attention": ("attention", {}),
    "jacobian": ("jacobian", {}),
    "jacobian-rows": ("jacobian", {"norm": "inf"}),
    "jacobian-features": ("jacobian", {"to": "tokens"}),
    "by-layer": ("jacobian", {"per_layer": True}),
    "fgsm-pgd": ("attack", {"attack": "fgsm,pgd", "eps": "8/255", "steps": 5}),
    "auto": ("attack", {"attack": AUTO, "eps": "8/255", "queries": 20, "steps": 5}),
    "words": ("attack", {"attack": "words", "eps": "1,2", "queries": 20}),
    "scaling": ("scaling", SCALING),
}
EVERYWHERE = [name for name in MEASURES if MEASURES[name][0] != "attack"]
CASES = [(model, name) for model in MODELS for name in EVERYWHERE]
CASES += [("demo", "fgsm-pgd"), ("demo", "auto"), ("bert", "fgsm-pgd"), ("llama", "fgsm-pgd")]
CASES += [("bert", "words"), ("llama", "words")]


def same(here: Any, there: Any) -> list[str]:
    """Where two reports differ by more than the rounding of float32, times aside."""
    return find_differences(here, there, rel=1e-4, abs=1e-6)


def compare_devices(model: str, name: str, device: str) -> list[str]:
    """Measure a model on the CPU and on a device; return where the reports differ."""
    measure, options = MEASURES[name]
    if name == "fgsm-pgd" and model != "demo":
        options = options | {"norm": "token-l2", "eps": "0.5"}
    here, there = (
        lipaudit.measure(MODELS[model](), measure, device=where, **samples(model), **options)
        for where in ("cpu", device)
    )
    assert there.run.device.startswith(device)
    assert here.sections[0].rows
    return same(*([s.model_dump(mode="json") for s in each.sections] for each in (here, there)))


@pytest.mark.parametrize(("model", "name"), CASES)
def test_an_accelerator_gives_the_figures_of_the_cpu(simulated, model, name):
    assert compare_devices(model, name, simulated) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"penalty": "jasmin", "k": 2}, {"penalty": "specformer"}, {"adversarial": "pgd"}],
    ids=["plain", "jasmin", "specformer", "pgd"],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_on_an_accelerator_is_training_on_the_cpu(simulated, options, optimizer):
    recipe = Recipe(epochs=2, batch_size=16, optimizer=optimizer, lr=1e-3, **options)
    data = load_shipped("train")[:40]

    def epochs(where):
        net = load_net("demo", LoadOptions(device=where))
        return list(train(net, data, recipe, held_out=data)), net.module.state_dict()

    (here, weights), (there, moved) = epochs("cpu"), epochs(simulated)
    assert moved[next(iter(moved))].device.type == simulated
    for a, b in zip(here, there, strict=True):
        a, b = (dataclasses.replace(epoch, state={}) for epoch in (a, b))
        assert not same(dataclasses.asdict(a), dataclasses.asdict(b))
    # Adam divides a gradient by its size: rounding, where it is 0, becomes a step.
    for name, tensor in weights.items() if optimizer == "sgd" else ():
        torch.testing.assert_close(moved[name].cpu(), tensor, rtol=1e-3, atol=1e-5)


def test_training_of_a_text_model_on_an_accelerator(simulated):
    from lipaudit.data.batch import Batch, identify_samples

    ids, labels = samples("bert", 8)["data"]
    data = Batch(ids, labels, identify_samples(ids, labels), ids != 0)
    recipe = Recipe(epochs=1, batch_size=4, lr=1e-3, penalty="jasmin")

    def loss(where):
        net = assemble(MODELS["bert"](), LoadOptions(device=where), name="bert", source="py")
        net.module.config.hidden_dropout_prob = 0
        for module in net.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # its random numbers are the device's own
        return next(iter(train(net, data, recipe))).loss

    assert loss(simulated) == pytest.approx(loss("cpu"), rel=1e-4)
