"""Folders of adapters: merged as peft merges them, or refused with what to do."""

import json
import sys

import pytest
import torch
import transformers

import lipaudit
from lipaudit.errors import InputError
from lipaudit.models.sources.loader import load_net

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def base(tmp_path):
    """A folder with a tiny language model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=20, intermediate_size=24, **SIZES)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def save_adapter(folder, module, config):
    """Write an adapter with random weights, and return the model with it, as peft runs it."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(module, config)
        for name, weight in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                torch.nn.init.normal_(weight, std=0.3)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


@torch.no_grad()
@pytest.mark.parametrize("relative", [True, False])
def test_the_merged_model_is_that_of_peft(base, tmp_path, relative):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"])
    module = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain = module(torch.arange(6)[None]).logits[:, -1]
    wrapped = save_adapter(tmp_path / "adapter", module, config)
    file = tmp_path / "adapter/adapter_config.json"
    settings = json.loads(file.read_text())
    settings["base_model_name_or_path"] = "../base" if relative else str(base)
    file.write_text(json.dumps(settings))
    net = load_net(str(tmp_path / "adapter"))
    ids = torch.arange(6)[None]
    wanted = wrapped(ids).logits[:, -1]
    found = net.read(net.call(ids, None))
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, plain, rtol=1e-2)
    assert "merged into its base model" in net.notes[0].text
    # It is the base's architecture: heads are read as before.
    merged = tmp_path / "merged"
    wrapped.merge_and_unload().save_pretrained(merged)
    ours, theirs = (
        lipaudit.measure(str(folder), "bounds", data="random", samples=2)
        for folder in (tmp_path / "adapter", merged)
    )
    columns = [report.section("bounds").rows for report in (ours, theirs)]
    assert [row.exact for row in columns[0]] == pytest.approx(
        [row.exact for row in columns[1]], rel=1e-4
    )
    assert columns[0]


@torch.no_grad()
def test_a_classifier_that_the_adapter_saved_is_loaded_with_it(tmp_path):
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=20, intermediate_size=24, **SIZES)
        transformers.BertModel(config).save_pretrained(tmp_path / "base")
    module = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=3
    )
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    wrapped = save_adapter(tmp_path / "adapter", module, config)
    net = load_net(str(tmp_path / "adapter"))
    ids = torch.arange(6)[None]
    assert net.classes == 3
    assert torch.allclose(net.read(net.call(ids, None)), wrapped(ids).logits, atol=1e-6)
    assert "new-classifier" not in {note.code for note in net.notes}


def test_an_adapter_of_another_model_is_refused(base, tmp_path):
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(vocab_size=20, intermediate_size=32, **SIZES)
    other = transformers.LlamaForCausalLM(config)
    save_adapter(tmp_path / "adapter", other, peft.LoraConfig(r=2, target_modules=["up_proj"]))
    file = tmp_path / "adapter/adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    with pytest.raises(InputError, match="does not fit LlamaForCausalLM: .*of another shape"):
        load_net(str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("settings", "installed", "message"),
    [
        ({}, True, "names no base model"),
        ({"base_model_name_or_path": "."}, True, "adapter_model.safetensors"),
        ({"base_model_name_or_path": "base"}, False, "needs the library `peft`"),
    ],
)
def test_what_is_missing_is_said(tmp_path, monkeypatch, settings, installed, message):
    if not installed:
        monkeypatch.setitem(sys.modules, "peft", None)
    elif settings:
        pytest.importorskip("peft")
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=message) as refused:
        load_net(str(tmp_path))
    assert installed or "pip install peft" in refused.value.advice
