"""timm models: files and directories are loaded completely, and fed as timm would."""

import pickle

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models import save_for_hf

from lipaudit.errors import UsageError
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.hub import hub as hub
from tests.models.sources.cases import Payload, cut, numbered, refused

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


def normalised(x):
    return (x - 0.5) / 0.5


def store(weights, path):
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    return path


def assert_same(net, model):
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(net.output(numbered(x)), model(normalised(x)))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".ckpt"])
def test_a_file_of_weights(tmp_path, model, weights, suffix):
    net = load_net(str(store(weights, tmp_path / f"w{suffix}")), LoadOptions(**ARCH))
    assert_same(net, model)
    assert (net.classes, net.input_shape, net.source) == (3, (3, 32, 32), "file")
    assert [n.code for n in net.notes] == ["default-normalisation"]
    assert net.entry is net.module.patch_embed


def test_a_training_checkpoint_gives_its_average_and_says_so(tmp_path, model, weights):
    worse = {k: torch.zeros_like(v) for k, v in weights.items()}
    ema = {f"module.{k}": v for k, v in weights.items()}
    kept = {"state_dict": worse, "state_dict_ema": ema, "epoch": 3}
    net = load_net(str(store(kept, tmp_path / "c.pth")), LoadOptions(**ARCH))
    assert_same(net, model)
    assert "state_dict_ema" in net.notes[0].text


@pytest.mark.parametrize(
    ("dtype", "options", "codes"),
    [
        (torch.float32, {"mean": (0.2,), "std": (0.3,)}, []),
        (torch.bfloat16, {}, ["half-precision", "default-normalisation"]),
        (torch.float32, {"model_kwargs": {"img_size": 64, "depth": 1}}, ["converted", "default-"]),
    ],
)
def test_notes_on_a_file_of_weights(tmp_path, weights, dtype, options, codes):
    """Weights of another size go through timm's own conversion."""
    path = store({k: v.to(dtype) for k, v in weights.items()}, tmp_path / "w.safetensors")
    net = load_net(str(path), LoadOptions(**ARCH | options))
    assert net.dtype == torch.float32
    side = net.preprocess["size"][1]
    assert (net.input_shape, side) == ((3, side, side), 64 if "converted" in codes else 32)
    for note, code in zip(net.notes, codes, strict=True):
        assert note.code.startswith(code)
        assert code != "half-precision" or "bfloat16" in note.text


def test_a_directory_in_timms_format(tmp_path, model):
    save_for_hf(model, str(tmp_path), model_args=KWARGS, safe_serialization=True)
    net = load_net(str(tmp_path))
    assert_same(net, model)
    assert (net.source, net.notes) == ("timm", ())
    (tmp_path / "model.safetensors").unlink()
    assert "no unique weights file" in refused(tmp_path)


RANDOM = LoadOptions(model_kwargs={"pretrained": False, "depth": 1}, offline=True)


def test_random_weights_are_asked_for_said_loudly_and_always_the_same(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    net, twin = (load_net("timm:test_vit", RANDOM) for _ in range(2))
    assert constants.HF_HUB_OFFLINE is False  # --offline is for the one call
    assert net.weights_sha256 == twin.weights_sha256
    assert [(n.level, n.code) for n in net.notes] == [("warning", "random-weights")]
    # ImageNet's classes are known, and images are resized as timm does
    assert net.labels[0].startswith("tench")
    assert net.aliases["n01440764"] == 0
    picture = Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 40).convert("RGB")
    config = timm.data.resolve_model_data_config(net.module)
    whole = timm.data.create_transform(**config, is_training=False)
    torch.testing.assert_close(normalised(net.prepare(picture)), whole(picture))


def test_pretrained_weights_without_a_network_name_the_file(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    text = refused("timm:vit_base_patch16_224", offline=True)
    assert "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k" in text
    assert "--arch timm:vit_base_patch16_224" in text
    assert "pretrained=false" in text


def test_fused_attention_is_chosen_and_the_setting_restored():
    from timm.layers import set_fused_attn, use_fused_attn

    set_fused_attn(True)
    kwargs = {
        "pretrained": False, "img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1),
        "embed_dim": 24,
    }  # fmt: skip
    net = load_net("timm:swin_tiny_patch4_window7_224", LoadOptions(model_kwargs=kwargs))
    assert all(m.fused_attn for m in net.module.modules() if hasattr(m, "fused_attn"))
    assert (use_fused_attn(), use_fused_attn(experimental=True)) == (True, False)


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
    assert message in refused(store(weights, tmp_path / "w.safetensors"), **ARCH)


NOT_COMPLETE, UNSAFE = "not a complete", "it was not opened | Opening it could run code"


def test_files_that_are_damaged_or_hold_code_are_refused(tmp_path, model, weights, capsys):
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Payload()))
    for name, content in (
        ("half.pt", weights), ("half.safetensors", weights), ("empty.pt", {"epoch": 3}),
        ("zip.pt", {"state_dict": Payload()}), ("module.pt", model),
    ):  # fmt: skip
        store(content, tmp_path / name)
    cut(tmp_path / "half.pt")
    cut(tmp_path / "half.safetensors")
    said = {"half.pt": NOT_COMPLETE, "half.safetensors": NOT_COMPLETE, "empty.pt": "no named"}
    said |= dict.fromkeys(("raw.pt", "zip.pt", "module.pt"), UNSAFE)
    for name, text in said.items():
        for how in (ARCH, {}):
            assert text in refused(tmp_path / name, **how)
    assert "this code ran" not in capsys.readouterr().out


def test_wrong_names_and_arguments_of_architectures(tmp_path, weights):
    path = store(weights, tmp_path / "w.safetensors")
    assert "timm has no model" in refused(path, arch="timm:vit_gigantic")
    assert "Add --arch" in refused(path, UsageError)
    (tmp_path / "config.json").write_text("{}")
    assert f"Give its folder {tmp_path}" in refused(path, UsageError)
    assert "Did you mean" in refused("timm:test_vitt")
    assert "--model-kwargs" in refused(
        "timm:test_vit", UsageError, model_kwargs={"pretrained": False, "no_such": 1}
    )


def test_a_head_of_another_size_would_be_random(hub, tmp_path, weights):
    weights |= {"head.weight": torch.zeros(1000, 64), "head.bias": torch.zeros(1000)}
    stored = store(weights, tmp_path / "model.safetensors").read_bytes()
    hub.add("timm/test_vit.r160_in1k", {"model.safetensors": stored})
    kwargs = {"img_size": 32, "depth": 1}
    assert load_net("timm:test_vit", LoadOptions(model_kwargs=kwargs)).classes == 1000
    text = refused("timm:test_vit", UsageError, model_kwargs=kwargs | {"num_classes": 3})
    assert "random" in text


@pytest.mark.parametrize(
    ("name", "kwargs", "shape"),
    [
        ("test_vit", {"img_size": 32, "depth": 1, "in_chans": 1}, (1, 32, 32)),
        ("vit_tiny_r_s16_p8_224", {"img_size": 32, "depth": 1, "in_chans": 1}, (1, 32, 32)),
        ("volo_d1_224", {"img_size": 64, "in_chans": 1}, (1, 64, 64)),
        ("gcvit_xxtiny", {"img_size": 64, "num_classes": 3}, (3, 64, 64)),
    ],
)
def test_channels_and_size_are_those_of_the_model(name, kwargs, shape):
    options = LoadOptions(model_kwargs=kwargs | {"pretrained": False}, mean=(0.5,), std=(0.5,))
    assert load_net(f"timm:{name}", options).input_shape == shape
