"""Adapters of peft: merged, they give what peft itself gives, or they are refused."""

import json
import shutil
import sys

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.models.sources.loading import LoadOptions, load_net
from tests.hub import files_of
from tests.hub import hub as hub
from tests.models.sources.cases import BATCH, IDS, MASK, bert, gpt2, refused, save, vit

PLAIN = {"r": 2, "lora_alpha": 400, "init_lora_weights": False}


@pytest.fixture(scope="module", autouse=True)
def _without_threads():
    torch.set_num_threads(1)


def adapted(module, base, folder, **settings):
    """Save an adapter of random weights, on a base that is saved already."""
    torch.manual_seed(1)
    module.config._name_or_path = module.name_or_path = str(base)
    model = peft.get_peft_model(module, peft.LoraConfig(**PLAIN | settings)).eval()
    model.save_pretrained(folder)
    return model


def texts(tmp_path, **settings):
    save(bert(), tmp_path / "base")
    settings = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]} | settings
    return adapted(bert(), tmp_path / "base", tmp_path / "adapter", **settings)


def assert_same(net, batch, expected, base):
    """As peft gives it, and not as the base model alone does."""
    with torch.no_grad():
        torch.testing.assert_close(net.output(batch), expected)
    assert not any("lora" in name for name, _ in net.module.named_modules())
    assert not torch.allclose(base.output(batch), expected, atol=1e-3)


def test_a_text_classifier(tmp_path):
    model = texts(tmp_path)
    net = load_net(str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK.long()).logits
    assert_same(net, BATCH, expected, load_net(str(tmp_path / "base")))
    assert [n.code for n in net.notes] == ["adapter"]
    assert str(tmp_path / "base") in net.notes[0].text
    assert (net.source, net.classes, net.tokenize is None) == ("hf", 3, False)


def test_a_classifier_that_came_with_the_adapter(tmp_path):
    """The base model has features only: the adapter brings the head, of 5 classes."""
    save(bert().bert, tmp_path / "base")
    module = bert(num_labels=5)
    module.bert.load_state_dict(bert().bert.state_dict())
    model = adapted(module, tmp_path / "base", tmp_path / "a", task_type="SEQ_CLS",
                    target_modules=["query", "dense"], use_dora=True)  # fmt: skip
    net = load_net(str(tmp_path / "a"))
    with torch.no_grad():
        expected = model(input_ids=IDS, attention_mask=MASK.long()).logits
        torch.testing.assert_close(net.output(BATCH), expected)
    assert net.classes == 5
    assert [n.code for n in net.notes] == ["adapter"]


def test_a_causal_language_model(tmp_path):
    save(gpt2(), tmp_path / "base", tokenizer=False)
    model = adapted(gpt2(), tmp_path / "base", tmp_path / "a", task_type="CAUSAL_LM",
                    target_modules=["c_attn"], fan_in_fan_out=True)  # fmt: skip
    net, batch = load_net(str(tmp_path / "a")), Batch(IDS[:1], None, ("a",))
    base = load_net(str(tmp_path / "base"))
    with torch.no_grad():
        logits = model(input_ids=IDS[:1]).logits
    expected = base.read((transformers.modeling_outputs.CausalLMOutput(logits=logits), None))
    assert_same(net, batch, expected, base)


def test_an_image_classifier(tmp_path):
    save(vit(), tmp_path / "base", tokenizer=False)
    names = [n for n, m in vit().named_modules() if isinstance(m, torch.nn.Linear)][:2]
    model = adapted(vit(), tmp_path / "base", tmp_path / "a",
                    target_modules=names, modules_to_save=["classifier"])  # fmt: skip
    net, x = load_net(str(tmp_path / "a")), torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(pixel_values=x).logits
    assert_same(net, Batch(x, None, ("a", "b")), expected, load_net(str(tmp_path / "base")))


def test_an_adapter_and_its_base_on_the_hub(hub, tmp_path):
    texts(tmp_path)
    settings = tmp_path / "adapter" / "adapter_config.json"
    facts = json.loads(settings.read_text()) | {"base_model_name_or_path": "org/base"}
    settings.write_text(json.dumps(facts))
    base = hub.add("org/base", files_of(tmp_path / "base") | {"pytorch_model.bin": b""})
    sha = hub.add("org/adapter", files_of(tmp_path / "adapter") | {"optimizer.pt": b""})
    net = load_net("hf:org/adapter")
    assert net.commit.sha == sha
    assert f"org/base at commit {base[:12]}" in net.notes[0].text
    assert [n.code for n in net.notes] == ["adapter", "hub-commit"]
    assert not {"pytorch_model.bin", "optimizer.pt"} & set(hub.downloads())
    offline = load_net("hf:org/adapter", LoadOptions(offline=True))
    assert [n.code for n in offline.notes] == ["adapter", "hub-cache", "hub-cache"]
    assert offline.weights_sha256 == net.weights_sha256
    hub.repositories["org/base"].gated = True
    shutil.rmtree(tmp_path / "hub-cache")
    assert "the model org/base is gated" in refused("hf:org/adapter")


def test_random_weights_leave_the_adapter_out(tmp_path):
    texts(tmp_path)
    net = load_net(str(tmp_path / "adapter"), LoadOptions(model_kwargs={"pretrained": False}))
    assert "random-weights" in [n.code for n in net.notes]


def test_what_the_adapter_leaves_random_is_refused(tmp_path):
    save(bert().bert, tmp_path / "base")
    adapted(bert(), tmp_path / "base", tmp_path / "a", task_type="SEQ_CLS",
            target_modules=["query"])  # fmt: skip
    path = tmp_path / "a" / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({k: v for k, v in weights.items() if not k.endswith("classifier.bias")}, path)
    text = refused(tmp_path / "a")
    assert "weights for classifier.bias" in text
    assert "modules_to_save" in text


def test_adapters_that_do_not_fit(tmp_path):
    texts(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    first = sorted(k for k in weights if "lora_A" in k)[0]
    save_file({k: v for k, v in weights.items() if k != first}, path)
    assert "does not fit BertForSequenceClassification" in refused(tmp_path / "adapter")
    save_file(weights | {"base_model.model.other.lora_A.weight": torch.ones(2, 2)}, path)
    assert "other.lora_A" in refused(tmp_path / "adapter")
    path.write_bytes(b"damaged")
    assert "cannot be read" in refused(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "base")
    assert f"was trained on {tmp_path / 'base'}, which was not found" in refused(
        tmp_path / "adapter"
    )
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "names no base model" in refused(tmp_path / "adapter")


def test_what_cannot_be_merged_is_refused(tmp_path):
    save(bert(), tmp_path / "base")
    module = bert()
    module.config._name_or_path = module.name_or_path = str(tmp_path / "base")
    settings = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    peft.get_peft_model(module, settings).save_pretrained(tmp_path / "a")
    text = refused(tmp_path / "a")
    assert "PROMPT_TUNING cannot be merged" in text


def test_classes_are_those_of_the_adapter(tmp_path):
    texts(tmp_path)
    assert load_net(str(tmp_path / "adapter"), LoadOptions(classes=3)).classes == 3
    assert "brings its own classes" in refused(tmp_path / "adapter", UsageError, classes=4)


def test_without_peft_the_command_is_named(tmp_path, monkeypatch):
    texts(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    text = refused(tmp_path / "adapter")
    assert "holds an adapter" in text
    assert "pip install 'lipaudit[peft]'" in text
