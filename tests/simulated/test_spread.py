"""A model whose weights lie on two accelerators, the CPU and the disk: nothing mixes devices."""

import json
from typing import Any

import pytest
import torch
import transformers

import lipaudit
from lipaudit.errors import UsageError
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.commands import read_sections
from tests.nets import TEXT
from tests.simulated.conftest import MODELS, samples
from tests.simulated.test_measures import MEASURES, SCALING

pytestmark = pytest.mark.simulated

FIRST, SECOND = "simulated:0", "simulated:1"
PLACES: dict[str, dict[str, str]] = {
    "demo": {"": SECOND, "patch_embed": FIRST, "blocks.1": FIRST, "blocks.2.mlp": "disk"},
    "bert": {"": FIRST, "bert.encoder.layer.1": SECOND, "bert.encoder.layer.0.output": "disk"},
    "llama": {"": FIRST, "model.layers.0.mlp": SECOND, "model.layers.1": "cpu", "score": SECOND},
}
TOKENS = {"norm": "token-l2", "eps": "0.5"}
NAMES = ["bounds", "attention", "jacobian", "jacobian-rows", "by-layer", "fgsm-pgd", "scaling"]
CASES = [(model, name) for model in PLACES for name in NAMES] + [("bert", "words")]


@pytest.fixture
def spread(simulated, tmp_path):
    """Write a model and the map of where its weights are to lie: what measures take of both."""

    def write(model: str) -> tuple[str, dict[str, Any]]:
        (tmp_path / "map.json").write_text(json.dumps(PLACES[model]))
        name = model
        if model != "demo":
            name = str(tmp_path / model)
            MODELS[model]().module.save_pretrained(name)
        return name, {"device_map": str(tmp_path / "map.json")}

    return write


@pytest.mark.parametrize(("model", "name"), CASES)
def test_two_accelerators_and_the_disk_give_the_figures_of_one(spread, model, name):
    measure, options = MEASURES[name]
    options = options | (SCALING | {"mode": "real,radius"} if name == "scaling" else {})
    options = options | (TOKENS if name == "fgsm-pgd" and model != "demo" else {})
    path, places = spread(model)
    here, there = (
        read_sections(lipaudit.measure(path, measure, **samples(model), **options, **where))
        for where in ({"device": FIRST}, places)
    )
    for section in (*here, *there):
        section["notes"] = [n for n in section["notes"] if n["code"] != "device-map"]
    assert here == there


@pytest.mark.parametrize("target", ["loss", "hidden", "logits:1"])
def test_positions_of_texts_are_read_on_any_of_two_accelerators(simulated, tmp_path, target):
    config = transformers.LlamaConfig(**TEXT)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    places = {"": FIRST, "model.layers.1": SECOND, "lm_head": SECOND}
    (tmp_path / "map.json").write_text(json.dumps(places))
    how = {"samples": 2, "max_tokens": 6, "target": target}
    here, there = (
        lipaudit.measure(str(tmp_path), "jacobian", **how, **where).sections[0].samples
        for where in ({"device": FIRST}, {"device_map": str(tmp_path / "map.json")})
    )
    assert here == there


def test_weights_are_read_where_they_are_computed_with(spread):
    path, places = spread("llama")
    net = load_net(path, LoadOptions(**places))
    first, second = net.module.model.layers
    held = second.mlp.up_proj
    assert next(held.parameters()).device.type == "cpu"
    assert held.weight.device == net.device == torch.device(FIRST)
    assert first.mlp.up_proj.weight.device == torch.device(SECOND)
    assert net.weights_sha256 == load_net(path).weights_sha256


def test_accelerate_fills_both_accelerators_before_the_cpu(spread, monkeypatch):
    path, _ = spread("llama")
    parts = load_net(path).module.model
    table, block = (_bytes(part) for part in (parts.embed_tokens, parts.layers[0]))
    room = {0: table + block * 3 // 2, 1: block * 6 // 5, "cpu": 9 * block}
    monkeypatch.setattr("accelerate.utils.get_balanced_memory", lambda *_, **__: dict(room))
    net = load_net(path, LoadOptions(device_map="balanced"))
    places = net.device_map
    assert list(dict.fromkeys(places.values())) == [FIRST, SECOND, "cpu"]
    assert not [name for name in places if "layers" in name and name.count(".") > 2]  # no cut
    assert lipaudit.measure(path, "attention", **samples("llama"), device_map="balanced")


def _bytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def test_a_certificate_is_of_one_device(spread):
    path, places = spread("demo")
    with pytest.raises(UsageError, match="computed on one device"):
        lipaudit.measure(path, "certify", samples=1, eps="1e-4", **places)
