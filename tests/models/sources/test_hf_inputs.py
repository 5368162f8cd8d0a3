"""What models of transformers take: towers, sounds, ends of texts, odd configurations."""

import re

import pytest
import torch
from torch.autograd.functional import jacobian

from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import InputError, UsageError
from lipaudit.models.attention.survey import find_layers, survey
from lipaudit.models.endpoints import make_sample_function
from lipaudit.models.linearize import linearize
from lipaudit.models.model_norms import compute_jacobian_norms
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.transformer_outputs import mean_pooling
from tests.models.sources.cases import BART, PIXELS, SMALL, T5, build, configure, numbered, refused

WIDE = LoadOptions(dtype="float64", device="cpu")
TEXT = SMALL | {"vocab_size": 40, "max_position_embeddings": 24}
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


def saved(path, kind, settings, **edits):
    """Save a random model of a class of transformers, with some settings edited in the file."""
    module = build(kind, **settings)
    module.save_pretrained(path)
    configure(path, **edits)
    return module.double()


CLIP = {
    "text_config": TEXT | {"bos_token_id": 1, "eos_token_id": 39, "pad_token_id": 0},
    "vision_config": PIXELS, "projection_dim": 8,
}  # fmt: skip


def tokens(length=6):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(3, 39, (2, length), generator=generator)
    x[:, -1] = 2
    return numbered(x)


def norms(net, batch):
    mapped = make_sample_function(net, batch, start=None, target=None)
    return compute_jacobian_norms(linearize(mapped.f, mapped.x)).norm


def dense_norms(f, x):
    """Norms of the Jacobian of f by autograd, one output and one sample at a time."""
    found = [jacobian(lambda z: f(z[None])[0], sample).flatten(1) for sample in x]
    return torch.stack([torch.linalg.matrix_norm(j, 2) for j in found])


def test_a_recurrent_model_without_attention_is_refused_and_has_a_jacobian(tmp_path):
    settings = {k: v for k, v in TEXT.items() if "heads" not in k and "position" not in k}
    settings |= {"num_hidden_layers": 2, "attention_hidden_size": 16}
    module = saved(tmp_path, "RwkvModel", settings)
    net, batch = load_net(str(tmp_path), WIDE), tokens()
    with pytest.raises(InputError, match="no attention was found in RwkvModel"):
        survey(net, batch)
    z = module.get_input_embeddings()(batch.x).detach()

    def features(z):
        return module(inputs_embeds=z, use_cache=False).last_hidden_state.mean(1)

    torch.testing.assert_close(norms(net, batch), dense_norms(features, z), rtol=1e-6, atol=0)


def test_labels_that_are_null_are_no_labels(tmp_path):
    settings = {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "image_size": 16,
        "num_attention_heads": [1, 2], "patch_sizes": [4, 2], "strides": [4, 2], "num_labels": 3,
        "mlp_ratios": [2, 2], "sequence_reduction_ratios": [2, 1],
    }  # fmt: skip
    saved(tmp_path, "PvtForImageClassification", settings, id2label=None, label2id=None)
    net = load_net(str(tmp_path), WIDE)
    assert (net.labels, net.input_shape) == (None, (3, 16, 16))


HASHED = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"num_hash_buckets": 8}


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("Canine", HASHED, "CanineModel has no embedding table"),
        ("Vilt", TEXT | PIXELS, r"ViltModel cannot be run on a sample .*pixel_values"),
    ],
)
def test_what_takes_neither_text_nor_images_alone_is_refused(tmp_path, kind, settings, says):
    saved(tmp_path, f"{kind}Model", settings)
    text = refused(tmp_path)
    assert re.search(says, text)
    assert "input-size" not in text


def encoded(module, x):
    return module.get_encoder()(x).last_hidden_state.mean(1)


def pooled(module, x):
    return module(input_ids=x).last_hidden_state.mean(1)


def seen(module, x):
    return module.vit(pixel_values=x).last_hidden_state.mean(1)


def projected(module, x):
    return module.visual_projection(module.vision_model(pixel_values=x).pooler_output)


def projected_text(module, x):
    return module.text_projection(module.text_model(input_ids=x).last_hidden_state[:, -1])


def classified(module, x):
    return module(x).logits


SHORT = {k: v for k, v in BART.items() if k != "max_position_embeddings"}
SPECTRUM = PIXELS | {
    "max_length": 12, "num_mel_bins": 8, "frequency_stride": 4, "time_stride": 4, "num_labels": 3,
}  # fmt: skip
BANDS = {"num_mel_bins": 4, "max_source_positions": 5, "max_target_positions": 8}
BEHIND = TEXT | {"pad_token_id": 1}
# Class, settings, tower, output by the model's own code, classes, shape of a sample, layers.
FED = [
    # configurations without every special id
    ("FunnelForSequenceClassification", FUNNEL, None, classified, 3, None, None),
    ("MobileBertForSequenceClassification", MOBILE, None, classified, 3, (24,), None),
    # a class that no auto class knows
    ("SiglipTextModel", BEHIND, None, pooled, None, (24,), 1),
    # positions behind the padding id are not counted
    ("RobertaModel", BEHIND, None, pooled, None, (22,), 1),
    # an encoder that was saved alone, and a mask token
    ("T5EncoderModel", T5, None, pooled, None, None, 1),
    ("ViTForMaskedImageModeling", PIXELS, None, seen, None, (3, 8, 8), 1),
    # an encoder and its decoder, and attention between them
    ("BartForSequenceClassification", BART, None, classified, 3, (24,), 3),
    ("Wav2Vec2ForSequenceClassification", WAVE, None, classified, 3, (16_000,), 1),
    ("HubertForSequenceClassification", WAVE, None, classified, 3, (16_000,), 1),
    ("WavLMForSequenceClassification", WAVE, None, classified, 3, (16_000,), 1),
    ("ASTForAudioClassification", SPECTRUM, None, classified, 3, (12, 8), 1),
    ("WhisperModel", SHORT | BANDS, None, encoded, None, (4, 10), 1),
    ("CLIPForImageClassification", CLIP | {"num_labels": 3}, None, classified, 3, (3, 8, 8), 1),
    ("CLIPModel", CLIP, "image", projected, None, (3, 8, 8), 1),
    ("CLIPModel", CLIP, "text", projected_text, None, (24,), 1),
]


@pytest.mark.parametrize(
    ("kind", "settings", "tower", "truth", "classes", "shape", "layers"),
    FED,
    ids=[f"{case[0]} {case[2] or ''}" for case in FED],
)
def test_every_model_is_fed_as_its_own_code_takes_it(
    tmp_path, kind, settings, tower, truth, classes, shape, layers
):
    module = saved(tmp_path, kind, settings)
    net = load_net(str(tmp_path), LoadOptions(dtype="float64", device="cpu", tower=tower))
    options = DataOptions(samples=4 if net.kind == "text" else 2, max_tokens=8)
    batch = load_data("random", net, options).batch.to(net.device, net.dtype)
    assert (net.input_shape, net.classes) == (shape or net.input_shape, classes)
    if net.kind == "text":
        if net.end_id is not None:  # random texts end where the model reads them
            assert ((batch.x == net.end_id).sum(1) == 1).all()
            assert (batch.x[:, -1] == net.end_id).all()
        elif shape is not None:
            assert net.output(numbered(torch.full((1, *shape), 5))).isfinite().all()
        batch.x[0, 0] = net.pad_id or 0  # transformers then asks for the ids of beginning and end
    else:
        assert net.kind == ("image" if len(shape) == 3 else "tokens")
        true = dense_norms(lambda x: truth(module, x), batch.x)
        torch.testing.assert_close(norms(net, batch), true, rtol=1e-6, atol=0)
    torch.testing.assert_close(net.output(batch), truth(module, batch.x))
    assert "Masked" not in kind or "mask_token" in net.notes[0].text
    sites = survey(net, batch).sites
    assert len(sites) == (layers or len(sites)) > 0


def test_a_model_with_two_towers_says_what_to_type(tmp_path):
    saved(tmp_path, "CLIPModel", CLIP)
    text = refused(tmp_path, UsageError)
    assert "CLIPModel has an image tower" in text
    assert "| Add --tower image, --tower text, or --classes" in text
    assert "no tower 'sound'" in refused(tmp_path, UsageError, tower="sound")


@pytest.mark.parametrize("kind", ["LongformerForSequenceClassification", "LEDModel"])
def test_sliding_windows_are_named_beside_other_attention_and_have_a_jacobian(tmp_path, kind):
    windows = {"max_encoder_position_embeddings": 24, "max_decoder_position_embeddings": 24}
    settings = SHORT | windows if kind == "LEDModel" else TEXT | {"num_labels": 3}
    saved(tmp_path, kind, settings | {"attention_window": [4]})
    net, batch = load_net(str(tmp_path), WIDE), tokens(8)
    # What is read is Longformer's global attention, and the decoder of LED.
    find_layers(net, batch)
    (module,) = net.surveys[-1].unread
    assert re.match(r".*0\.(self_?attn|attention\.self)", module)
    for i in range(len(batch)):
        one = batch[i : i + 1]
        true = dense_norms(lambda z, one=one: net.forward(z, one), net.point(one))
        torch.testing.assert_close(norms(net, one), true, rtol=1e-6, atol=0)


def test_a_backward_pass_that_the_model_forbids_is_no_bug_of_ours(tmp_path):
    settings = {
        "attn_layers": ["local"], "attention_head_size": 8, "feed_forward_size": 24,
        "local_attn_chunk_length": 4, "axial_pos_shape": [4, 6], "axial_pos_embds_dim": [8, 8],
        "is_decoder": False, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    sizes = {k: v for k, v in TEXT.items() if k not in ("num_hidden_layers", "intermediate_size")}
    saved(tmp_path, "ReformerModel", sizes | settings)
    net, batch = load_net(str(tmp_path), WIDE), tokens(8)
    with pytest.raises(InputError, match="cannot be linearised"):
        norms(net, batch)


def test_a_constant_with_gradients_is_not_where_attention_comes_from(tmp_path):
    saved(tmp_path, "MraForSequenceClassification", TEXT | {"block_per_row": 1, "num_labels": 3})
    with pytest.raises(InputError, match="no attention was found"):
        survey(load_net(str(tmp_path)), tokens(16))


def test_a_model_that_joins_the_samples_of_a_batch_is_refused(tmp_path):
    saved(tmp_path, "PixtralVisionModel", PIXELS | {"head_dim": 8})
    net = load_net(str(tmp_path))
    with pytest.raises(InputError, match=r"2 samples give an output of shape \(1, 16\)"):
        survey(net, load_data("random", net, DataOptions(samples=2)).batch)


class Result:
    def __init__(self, hidden):
        self.last_hidden_state = hidden


def test_feature_maps_are_averaged_over_space_wherever_their_channels_are():
    hidden = torch.rand(2, 5, 3, 3)
    for placed in (hidden, hidden.movedim(1, 3)):
        torch.testing.assert_close(mean_pooling(Result(placed), None), hidden.mean((2, 3)))


def test_features_that_cannot_be_read_are_refused():
    with pytest.raises(InputError, match="object has no last hidden state"):
        mean_pooling(object(), None)
    with pytest.raises(InputError, match="3 tokens for texts of 6"):
        mean_pooling(Result(torch.rand(2, 3, 4)), torch.ones(2, 6, dtype=torch.bool))
