"""What models of transformers take: towers, sounds, ends of texts, odd configurations."""

import json
import re

import pytest
import torch
from torch.autograd.functional import jacobian

from lipaudit.data.batch import Batch
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.models.attention.survey import find_layers, list_unread, survey
from lipaudit.models.endpoints import make_sample_function
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.text_models import mean_pooling
from tests.models.sources.cases import refused

transformers = pytest.importorskip("transformers")

WIDE = LoadOptions(dtype="float64", device="cpu")
TEXT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 24,
}  # fmt: skip
BART = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "max_position_embeddings": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "num_labels": 3,
}  # fmt: skip
FUNNEL = {
    "vocab_size": 40, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2,
    "d_head": 8, "d_inner": 24, "num_labels": 3,
}  # fmt: skip
MOBILE = TEXT | {
    "embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16, "num_labels": 3,
}  # fmt: skip
WAVE = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_kernel": (400, 4), "conv_stride": (320, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_labels": 3, "classifier_proj_size": 8,
}  # fmt: skip
SEEN = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip


def saved(path, kind, config, **edits):
    """Save a random model of a class of transformers, with some settings edited in the file."""
    torch.manual_seed(0)
    module = getattr(transformers, kind)(config).eval()
    module.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | edits))
    return module.double()


def config_of(kind, **settings):
    return getattr(transformers, f"{kind}Config")(**settings)


def clip(**settings):
    return config_of(
        "CLIP",
        text_config=TEXT | {"bos_token_id": 1, "eos_token_id": 39, "pad_token_id": 0},
        vision_config=SEEN,
        projection_dim=8,
        **settings,
    )


def tokens(length=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(3, 39, (2, length), generator=generator)
    x[:, -1] = 2
    return Batch(x, None, ("a", "b"))


def drawn(net, samples=2):
    options = DataOptions(samples=samples, max_tokens=8)
    return load_data("random", net, options).batch.to(net.device, net.dtype)


def norms(net, batch):
    mapped = make_sample_function(net, batch, start=None, target=None)
    return compute_jacobian_norms(linearize(mapped.f, mapped.x)).norm


def dense_norms(f, x):
    """Norms of the Jacobian of f by autograd, one output and one sample at a time."""
    found = [jacobian(lambda z: f(z[None])[0], sample).flatten(1) for sample in x]
    return torch.stack([torch.linalg.matrix_norm(j, 2) for j in found])


@pytest.mark.parametrize(("kind", "settings"), [("Funnel", FUNNEL), ("MobileBert", MOBILE)])
def test_a_configuration_need_not_have_every_special_id(tmp_path, kind, settings):
    module = saved(tmp_path, f"{kind}ForSequenceClassification", config_of(kind, **settings))
    net, batch = load_net(str(tmp_path), WIDE), tokens()
    batch.x[0, 0] = net.pad_id  # transformers then asks for the ids of the beginning and the end
    torch.testing.assert_close(net.output(batch), module(input_ids=batch.x).logits)
    assert survey(net, batch).sites


def test_a_recurrent_model_without_attention_is_refused_and_has_a_jacobian(tmp_path):
    settings = {k: v for k, v in TEXT.items() if "heads" not in k and "position" not in k}
    config = config_of("Rwkv", **settings | {"num_hidden_layers": 2}, attention_hidden_size=16)
    module = saved(tmp_path, "RwkvModel", config)
    net, batch = load_net(str(tmp_path), WIDE), tokens()
    with pytest.raises(InputError, match="no attention was found in RwkvModel"):
        survey(net, batch)
    z = module.get_input_embeddings()(batch.x).detach()

    def features(z):
        return module(inputs_embeds=z, use_cache=False).last_hidden_state.mean(1)

    torch.testing.assert_close(norms(net, batch), dense_norms(features, z), rtol=1e-6, atol=0)


def test_labels_that_are_null_are_no_labels(tmp_path):
    config = config_of(
        "Pvt", hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2,
        num_attention_heads=[1, 2], patch_sizes=[4, 2], strides=[4, 2], mlp_ratios=[2, 2],
        sequence_reduction_ratios=[2, 1], image_size=16, num_labels=3,
    )  # fmt: skip
    saved(tmp_path, "PvtForImageClassification", config, id2label=None, label2id=None)
    net = load_net(str(tmp_path), WIDE)
    assert (net.labels, net.input_shape) == (None, (3, 16, 16))


HASHED = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"num_hash_buckets": 8}


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("Canine", HASHED, "CanineModel has no embedding table"),
        ("Vilt", TEXT | {"image_size": 8, "patch_size": 4}, "ViltModel cannot be run on one"),
        ("Vilt", TEXT | {"image_size": 8, "patch_size": 4}, "pixel_values"),
    ],
)
def test_what_takes_neither_text_nor_images_alone_is_refused(tmp_path, kind, settings, says):
    saved(tmp_path, f"{kind}Model", config_of(kind, **settings))
    text = refused(tmp_path)
    assert says in text
    assert "input-size" not in text


def test_a_class_that_no_auto_class_knows_is_loaded_as_it_is_named(tmp_path):
    module = saved(tmp_path, "SiglipTextModel", config_of("SiglipText", **TEXT, pad_token_id=1))
    net, batch = load_net(str(tmp_path), WIDE), tokens()
    expected = module(input_ids=batch.x).last_hidden_state.mean(1)
    torch.testing.assert_close(net.output(batch), expected)


def test_random_texts_end_where_the_model_reads_them(tmp_path):
    module = saved(tmp_path, "BartForSequenceClassification", config_of("Bart", **BART))
    net = load_net(str(tmp_path), WIDE)
    batch = drawn(net, 16)
    assert ((batch.x == 2).sum(1) == 1).all()
    assert (batch.x[:, -1] == 2).all()
    torch.testing.assert_close(net.output(batch), module(input_ids=batch.x).logits)
    assert len(survey(net, batch).sites) == 3


def encoded(module, x):
    return module.get_encoder()(x).last_hidden_state.mean(1)


def projected(module, x):
    return module.visual_projection(module.vision_model(pixel_values=x).pooler_output)


def classified(module, x):
    return module(x).logits


FED = {
    **{
        f"{kind}ForSequenceClassification": (lambda k=kind: config_of(k, **WAVE), (16_000,), 3)
        for kind in ("Wav2Vec2", "Hubert", "WavLM")
    },
    "ASTForAudioClassification": (
        lambda: config_of(
            "AST", **{k: v for k, v in SEEN.items() if k != "image_size"}, max_length=12,
            num_mel_bins=8, frequency_stride=4, time_stride=4, num_labels=3,
        ),
        (12, 8), 3,
    ),
    "WhisperModel": (
        lambda: config_of(
            "Whisper", **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
            num_mel_bins=4, max_source_positions=5, max_target_positions=8,
        ),
        (4, 10), None,
    ),
    "CLIPForImageClassification": (lambda: clip(num_labels=3), (3, 8, 8), 3),
    "CLIPModel": (clip, (3, 8, 8), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", FED)
def test_sounds_and_images_are_fed_as_the_model_s_own_code_takes_them(tmp_path, kind):
    config, shape, classes = FED[kind]
    module = saved(tmp_path, kind, config())
    tower = "image" if kind == "CLIPModel" else None
    net = load_net(str(tmp_path), LoadOptions(dtype="float64", device="cpu", tower=tower))
    batch = drawn(net)
    truth = {"WhisperModel": encoded, "CLIPModel": projected}.get(kind, classified)
    assert (net.input_shape, net.classes) == (shape, classes)
    assert net.kind == ("image" if len(shape) == 3 else "tokens")
    torch.testing.assert_close(net.output(batch), truth(module, batch.x))
    true = dense_norms(lambda x: truth(module, x), batch.x)
    torch.testing.assert_close(norms(net, batch), true, rtol=1e-6, atol=0)
    assert len(survey(net, batch).sites) == 1


def test_a_model_with_two_towers_says_what_to_type(tmp_path):
    saved(tmp_path, "CLIPModel", clip())
    text = refused(tmp_path, UsageError)
    assert "CLIPModel has an image tower" in text
    assert text.endswith("| Add --tower image or --tower text.")
    assert "no tower 'sound'" in refused(tmp_path, UsageError, tower="sound")


def test_the_tower_of_text_reads_the_end(tmp_path):
    module = saved(tmp_path, "CLIPModel", clip())
    net = load_net(str(tmp_path), LoadOptions(tower="text", dtype="float64"))
    batch = drawn(net)
    last = module.text_model(input_ids=batch.x).last_hidden_state[:, -1]
    torch.testing.assert_close(net.output(batch), module.text_projection(last))
    assert (net.kind, net.input_shape, net.end_id) == ("text", (24,), 39)
    assert len(survey(net, batch).sites) == 1


@pytest.mark.parametrize("kind", ["LongformerForSequenceClassification", "LEDModel"])
def test_sliding_windows_are_named_beside_other_attention_and_have_a_jacobian(tmp_path, kind):
    if kind == "LEDModel":
        bart = {k: v for k, v in BART.items() if k != "max_position_embeddings"}
        windows = {"max_encoder_position_embeddings": 24, "max_decoder_position_embeddings": 24}
        config = config_of("LED", **bart, **windows, attention_window=[4])
    else:
        config = config_of("Longformer", **TEXT, attention_window=[4], num_labels=3)
    saved(tmp_path, kind, config)
    net, batch = load_net(str(tmp_path), WIDE), tokens(8)
    # What is read is Longformer's global attention, and the decoder of LED.
    (module,) = list_unread(net, find_layers(net, batch))
    assert re.match(r".*0\.(self_?attn|attention\.self)", module)
    true = dense_norms_of_text(net, batch)
    torch.testing.assert_close(norms(net, batch), true, rtol=1e-6, atol=0)


def dense_norms_of_text(net, batch):
    """Norms from the embeddings, through the model's own code, row by row."""
    found = []
    for i in range(len(batch)):
        one = batch[i : i + 1]
        z = net.point(one).requires_grad_()
        out = net.forward(z, one).flatten()
        rows = [torch.autograd.grad(o, z, retain_graph=True)[0].flatten() for o in out]
        found.append(torch.linalg.matrix_norm(torch.stack(rows), 2))
    return torch.stack(found)


def test_a_backward_pass_that_the_model_forbids_is_no_bug_of_ours(tmp_path):
    config = config_of(
        "Reformer", vocab_size=40, attn_layers=["local"], hidden_size=16, num_attention_heads=2,
        attention_head_size=8, feed_forward_size=24, local_attn_chunk_length=4,
        axial_pos_shape=[4, 6], axial_pos_embds_dim=[8, 8], max_position_embeddings=24,
        is_decoder=False, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    saved(tmp_path, "ReformerModel", config)
    net, batch = load_net(str(tmp_path), WIDE), tokens(8)
    with pytest.raises(InputError, match="cannot be linearised"):
        norms(net, batch)


def test_a_constant_with_gradients_is_not_where_attention_comes_from(tmp_path):
    config = config_of("Mra", **TEXT, block_per_row=1, num_labels=3)
    saved(tmp_path, "MraForSequenceClassification", config)
    with pytest.raises(InputError, match="no attention was found"):
        survey(load_net(str(tmp_path)), tokens(16))


def test_a_model_that_joins_the_samples_of_a_batch_is_refused(tmp_path):
    settings = SEEN | {"head_dim": 8}
    saved(tmp_path, "PixtralVisionModel", config_of("PixtralVision", **settings))
    net = load_net(str(tmp_path))
    with pytest.raises(InputError, match=r"2 samples give an output of shape \(1, 16\)"):
        survey(net, drawn(net))


class Result:
    def __init__(self, hidden):
        self.last_hidden_state = hidden


def test_feature_maps_are_averaged_over_space_wherever_their_channels_are():
    hidden = torch.rand(2, 5, 3, 3)
    expected = hidden.mean((2, 3))
    torch.testing.assert_close(mean_pooling(Result(hidden), None), expected)
    torch.testing.assert_close(mean_pooling(Result(hidden.movedim(1, 3)), None), expected)


def test_features_that_cannot_be_read_are_refused():
    with pytest.raises(InputError, match="object has no last hidden state"):
        mean_pooling(object(), None)
    with pytest.raises(InputError, match="3 tokens for texts of 6"):
        mean_pooling(Result(torch.rand(2, 3, 4)), torch.ones(2, 6, dtype=torch.bool))
