"""A new classifier on trained weights: only the head is random, and the model is read back."""

import pytest
import timm
import torch

from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.saving import save_net
from tests.models.sources.cases import PIXELS, SMALL, build, refused, vit

SIZES = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 24}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "pad_token_id": 0}


def assert_read_back(net, folder, options):
    x = torch.rand(2, 3, 8, 8) if net.kind == "image" else torch.randint(1, 32, (2, 7))
    assert save_net(net, folder, options)
    again = load_net(str(folder))
    assert again.classes == net.classes
    assert not any(note.code == "new-classifier" for note in again.notes)
    torch.testing.assert_close(again.read(again.call(x, None)), net.read(net.call(x, None)))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("ViTForImageClassification", PIXELS),  # with another number of classes
        ("ViTModel", PIXELS),
        ("BertModel", SMALL),
        ("BertForMaskedLM", SMALL),
        ("GPT2LMHeadModel", GPT),
    ],
)
def test_transformers(kind, config, tmp_path):
    trained = build(kind, **config)
    trained.save_pretrained(tmp_path / "trained")
    options = LoadOptions(classes=5)
    net, again = (load_net(str(tmp_path / "trained"), options) for _ in range(2))
    assert (net.classes, net.labels) == (5, None)
    assert "new-classifier" in {note.code for note in net.notes}
    theirs = getattr(trained, trained.base_model_prefix, trained).state_dict()
    ours = net.module.base_model.state_dict()
    kept = [key for key in ours if "pooler" not in key]
    assert len(kept) > 15
    assert all(torch.equal(ours[key], theirs[key]) for key in kept)
    assert again.weights_sha256 == net.weights_sha256
    assert_read_back(net, tmp_path / "saved", options)


def test_a_missing_layer_is_refused_all_the_same(tmp_path):
    build("BertModel", **SMALL).save_pretrained(tmp_path)
    text = refused(tmp_path, classes=5, model_kwargs={"num_hidden_layers": 2})
    assert "encoder.layer.1" in text
    assert "missing" in text


def test_as_many_classes_as_before_keep_their_head(tmp_path):
    vit(id2label={0: "cat", 1: "dog", 2: "owl"}).save_pretrained(tmp_path)
    same = [load_net(str(tmp_path), LoadOptions(classes=n)) for n in (3, None)]
    assert same[0].weights_sha256 == same[1].weights_sha256
    assert same[0].labels == ("cat", "dog", "owl")


@pytest.mark.parametrize("classes", [3, 1000])
@pytest.mark.parametrize("form", ["directory", "file"])
def test_timm(tmp_path, form, classes):
    module = timm.create_model("vit_tiny_patch16_224", num_classes=7, **SIZES)
    if form == "file":
        source, how = tmp_path / "weights.pt", {"arch": "timm:vit_tiny_patch16_224"}
        torch.save(module.state_dict(), source)
        how["model_kwargs"] = SIZES
    else:
        source, how = tmp_path / "first", {}
        random = LoadOptions(model_kwargs=SIZES | {"num_classes": 7, "pretrained": False})
        first = load_net("timm:vit_tiny_patch16_224", random)
        module = first.module
        assert save_net(first, source, random)
    options = LoadOptions(classes=classes, **how)
    net = load_net(str(source), options)
    assert (net.classes, net.labels) == (classes, None)
    pairs = zip(net.module.named_parameters(), module.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        assert name.startswith("head.") or torch.equal(ours, theirs)
    assert_read_back(net, tmp_path / "saved", options)
