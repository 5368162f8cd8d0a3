"""timm models: files and directories are loaded completely, and fed as timm would."""

import pickle

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from lipaudit.data.batch import Batch
from lipaudit.errors import UsageError
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.hub import hub as hub
from tests.models.sources.cases import Payload, refused

KWARGS = {"img_size": 32, "depth": 1, "num_classes": 3}
ARCH = {"arch": "timm:test_vit", "model_kwargs": {"img_size": 32, "depth": 1}}


@pytest.fixture(scope="module")
def model():
    """A small timm model with random weights."""
    torch.manual_seed(0)
    return timm.create_model("test_vit", **KWARGS).eval()


@pytest.fixture
def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def logits(net, x):
    return net.output(Batch(x, None, tuple("ab")))


def normalised(x):
    return (x - 0.5) / 0.5


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".ckpt"])
def test_a_file_of_weights(tmp_path, model, weights, suffix):
    path = tmp_path / f"w{suffix}"
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    net = load_net(str(path), LoadOptions(**ARCH))
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(logits(net, x), model(normalised(x)))
    assert (net.classes, net.input_shape, net.source) == (3, (3, 32, 32), "file")
    assert [n.code for n in net.notes] == ["default-normalisation"]
    assert net.entry is net.module.patch_embed


def test_mean_and_std_silence_the_note_on_normalisation(tmp_path, weights):
    save_file(weights, tmp_path / "w.safetensors")
    options = LoadOptions(**ARCH, mean=(0.2,), std=(0.3,))
    assert load_net(str(tmp_path / "w.safetensors"), options).notes == ()


def test_a_training_checkpoint_gives_its_average_and_says_so(tmp_path, model, weights):
    worse = {k: torch.zeros_like(v) for k, v in weights.items()}
    ema = {f"module.{k}": v for k, v in weights.items()}
    torch.save({"state_dict": worse, "state_dict_ema": ema, "epoch": 3}, tmp_path / "c.pth")
    net = load_net(str(tmp_path / "c.pth"), LoadOptions(**ARCH))
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(logits(net, x), model(normalised(x)))
    assert "state_dict_ema" in net.notes[0].text


def test_half_precision_weights_are_noted(tmp_path, weights):
    save_file({k: v.to(torch.bfloat16) for k, v in weights.items()}, tmp_path / "w.safetensors")
    net = load_net(str(tmp_path / "w.safetensors"), LoadOptions(**ARCH))
    assert net.dtype == torch.float32
    assert "bfloat16" in net.notes[0].text


def test_weights_of_another_size_go_through_timms_own_conversion(tmp_path, weights):
    save_file(weights, tmp_path / "w.safetensors")
    net = load_net(
        str(tmp_path / "w.safetensors"),
        LoadOptions(arch="timm:test_vit", model_kwargs={"img_size": 64, "depth": 1}),
    )
    assert net.input_shape == (3, 64, 64)
    assert "converted" in [n.code for n in net.notes]


def test_a_directory_in_timms_format(tmp_path, model):
    from timm.models import save_for_hf

    save_for_hf(model, str(tmp_path), model_args=KWARGS, safe_serialization=True)
    net = load_net(str(tmp_path))
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(logits(net, x), model(normalised(x)))
    assert (net.source, net.notes) == ("timm", ())


def test_random_weights_are_asked_for_said_loudly_and_always_the_same():
    options = LoadOptions(model_kwargs={"pretrained": False, "depth": 1})
    net, twin = (load_net("timm:test_vit", options) for _ in range(2))
    assert net.weights_sha256 == twin.weights_sha256
    assert [(n.level, n.code) for n in net.notes] == [("warning", "random-weights")]


def test_imagenet_models_know_their_classes():
    net = load_net("timm:test_vit", LoadOptions(model_kwargs={"pretrained": False, "depth": 1}))
    assert net.labels[0].startswith("tench")
    assert net.aliases["n01440764"] == 0


def test_pretrained_weights_without_a_network_name_the_file(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    text = refused("timm:vit_base_patch16_224", offline=True)
    assert "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k" in text
    assert "--arch timm:vit_base_patch16_224" in text
    assert "pretrained=false" in text


def test_offline_is_for_the_one_call(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    load_net("timm:test_vit", LoadOptions(model_kwargs={"pretrained": False}, offline=True))
    assert constants.HF_HUB_OFFLINE is False


def test_fused_attention_is_chosen_and_the_setting_restored():
    from timm.layers import set_fused_attn, use_fused_attn

    set_fused_attn(True)
    kwargs = {"pretrained": False, "img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1)}
    net = load_net("timm:swin_tiny_patch4_window7_224", LoadOptions(model_kwargs=kwargs))
    assert all(m.fused_attn for m in net.module.modules() if hasattr(m, "fused_attn"))
    assert (use_fused_attn(), use_fused_attn(experimental=True)) == (True, False)


def test_images_are_resized_as_timm_does():
    net = load_net("timm:test_vit", LoadOptions(model_kwargs={"pretrained": False, "depth": 1}))
    picture = Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 40).convert("RGB")
    config = timm.data.resolve_model_data_config(net.module)
    whole = timm.data.create_transform(**config, is_training=False)
    torch.testing.assert_close(normalised(net.prepare(picture)), whole(picture))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w.pop("head.bias"), "head.bias missing"),
        (lambda w: w.update(extra=torch.ones(2)), "extra surplus"),
        (lambda w: w.update({"norm.bias": torch.ones(3)}), "norm.bias (3,) for (64,) of another"),
        (lambda w: w["norm.bias"].fill_(float("nan")), "not finite: norm.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, weights, damage, message):
    damage(weights)
    save_file(weights, tmp_path / "w.safetensors")
    assert message in refused(tmp_path / "w.safetensors", **ARCH)


def test_a_truncated_file_is_refused(tmp_path, weights):
    for name, save in (("w.safetensors", save_file), ("w.pt", torch.save)):
        save(weights, tmp_path / name)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        assert "not a complete" in refused(tmp_path / name, **ARCH)


def test_a_pickle_with_code_is_not_opened(tmp_path, model, capsys):
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Payload()))
    torch.save({"state_dict": Payload()}, tmp_path / "zip.pt")
    torch.save(model, tmp_path / "module.pt")
    for name in ("raw.pt", "zip.pt", "module.pt"):
        text = refused(tmp_path / name, **ARCH)
        assert "it was not opened" in text
        assert "Opening it could run code" in text
    assert "this code ran" not in capsys.readouterr().out


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "w.pt")
    assert "holds no named tensors" in refused(tmp_path / "w.pt", **ARCH)


def test_a_directory_needs_one_file_of_weights(tmp_path, model):
    from timm.models import save_for_hf

    save_for_hf(model, str(tmp_path), model_args=KWARGS, safe_serialization=True)
    (tmp_path / "model.safetensors").unlink()
    assert "no unique weights file" in refused(tmp_path)


def test_wrong_names_and_arguments_of_architectures(tmp_path, weights):
    save_file(weights, tmp_path / "w.safetensors")
    path = tmp_path / "w.safetensors"
    assert "timm has no model" in refused(path, arch="timm:vit_gigantic")
    assert "Did you mean" in refused("timm:test_vitt")
    assert "--model-kwargs" in refused(
        "timm:test_vit", UsageError, model_kwargs={"pretrained": False, "no_such": 1}
    )


def test_a_head_of_another_size_would_be_random(hub, tmp_path, weights):
    save_file(_imagenet(weights), tmp_path / "model.safetensors")
    stored = (tmp_path / "model.safetensors").read_bytes()
    hub.add("timm/test_vit.r160_in1k", {"model.safetensors": stored})
    kwargs = {"img_size": 32, "depth": 1}
    assert load_net("timm:test_vit", LoadOptions(model_kwargs=kwargs)).classes == 1000
    text = refused("timm:test_vit", UsageError, model_kwargs=kwargs | {"num_classes": 3})
    assert "random" in text


def _imagenet(weights):
    head = {"head.weight": torch.zeros(1000, 64), "head.bias": torch.zeros(1000)}
    return dict(weights) | head


@pytest.mark.parametrize(("name", "channels"), [("test_vit", 1), ("vit_tiny_r_s16_p8_224", 1)])
def test_channels_are_those_of_the_model(name, channels):
    kwargs = {"pretrained": False, "img_size": 32, "depth": 1, "in_chans": channels}
    net = load_net(f"timm:{name}", LoadOptions(model_kwargs=kwargs, mean=(0.5,), std=(0.5,)))
    assert net.input_shape == (channels, 32, 32)


def test_a_size_that_was_asked_for_is_that_of_the_samples():
    kwargs = {"pretrained": False, "img_size": 64, "num_classes": 3}
    net = load_net("timm:gcvit_xxtiny", LoadOptions(model_kwargs=kwargs))
    assert net.input_shape == (3, 64, 64)
