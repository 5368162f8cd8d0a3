"""A new classifier on trained weights: only the head is random, and the model is read back."""

import pytest
import timm
import torch
import transformers

from lipaudit.errors import InputError
from lipaudit.models.sources.loader import LoadOptions, load_net, save_net

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = transformers.BertConfig(**SMALL, vocab_size=32, intermediate_size=24)
VIT = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, intermediate_size=24)
GPT = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, pad_token_id=0)
HF = {
    "another-count": (transformers.ViTForImageClassification, VIT),
    "images-without-head": (transformers.ViTModel, VIT),
    "text-without-head": (transformers.BertModel, BERT),
    "masked-language": (transformers.BertForMaskedLM, BERT),
    "language": (transformers.GPT2LMHeadModel, GPT),
}


def samples(net):
    return torch.rand(2, 3, 8, 8) if net.kind == "image" else torch.randint(1, 32, (2, 7))


def assert_read_back(net, folder, options):
    assert save_net(net, folder, options)
    again, x = load_net(str(folder)), samples(net)
    assert again.classes == net.classes
    assert not any(note.code == "new-classifier" for note in again.notes)
    torch.testing.assert_close(again.read(again.call(x, None)), net.read(net.call(x, None)))


@pytest.mark.parametrize("name", HF)
def test_transformers(name, tmp_path):
    build, config = HF[name]
    trained = build(config)
    trained.save_pretrained(tmp_path / "trained")
    options = LoadOptions(classes=5)
    net = load_net(str(tmp_path / "trained"), options)
    assert net.classes == 5
    assert net.labels is None
    assert "new-classifier" in {note.code for note in net.notes}
    theirs = getattr(trained, trained.base_model_prefix, trained).state_dict()
    ours = net.module.base_model.state_dict()
    kept = [key for key in ours if "pooler" not in key]
    assert len(kept) > 20
    assert all(torch.equal(ours[key], theirs[key]) for key in kept)
    again = load_net(str(tmp_path / "trained"), options)
    assert again.weights_sha256 == net.weights_sha256
    assert_read_back(net, tmp_path / "saved", options)


def test_a_missing_layer_is_refused_all_the_same(tmp_path):
    transformers.BertModel(BERT).save_pretrained(tmp_path)
    deeper = LoadOptions(classes=5, model_kwargs={"num_hidden_layers": 3})
    with pytest.raises(InputError, match=r"encoder\.layer\.2.* missing"):
        load_net(str(tmp_path), deeper)


def test_as_many_classes_as_before_keep_their_head(tmp_path):
    labels = {0: "cat", 1: "dog", 2: "owl"}
    config = transformers.ViTConfig(**VIT.to_dict() | {"id2label": labels})
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    same = [load_net(str(tmp_path), LoadOptions(classes=n)) for n in (3, None)]
    assert same[0].weights_sha256 == same[1].weights_sha256
    assert same[0].labels == ("cat", "dog", "owl")


def test_timm(tmp_path):
    kwargs = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 24, "num_classes": 7}
    options = LoadOptions(model_kwargs=kwargs | {"pretrained": False})
    first = load_net("timm:vit_tiny_patch16_224", options)
    assert save_net(first, tmp_path / "first", options)
    for n, source in ((3, tmp_path / "first"), (1000, tmp_path / "first")):
        net = load_net(str(source), LoadOptions(classes=n))
        assert net.classes == n
        assert net.labels is None
        for (name, ours), theirs in zip(
            net.module.named_parameters(), first.module.parameters(), strict=True
        ):
            assert name.startswith("head.") or torch.equal(ours, theirs)
        assert_read_back(net, tmp_path / f"saved-{n}", LoadOptions(classes=n))


def test_a_file_of_weights(tmp_path):
    kwargs = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 24}
    module = timm.create_model("vit_tiny_patch16_224", num_classes=7, **kwargs)
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    options = LoadOptions(arch="timm:vit_tiny_patch16_224", model_kwargs=kwargs, classes=4)
    net = load_net(str(tmp_path / "weights.pt"), options)
    assert net.classes == 4
    assert torch.equal(net.module.cls_token, module.cls_token)
    assert_read_back(net, tmp_path / "saved", options)
