"""Which source a MODEL argument names, what the `Net` promises, and what is refused."""

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import lipaudit.models.sources.timm as demo
from lipaudit.cli.app import app
from lipaudit.data.batch import Batch
from lipaudit.data.images import list_forms
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import ExitCode, InputError, UsageError
from lipaudit.models.sources.loader import LoadOptions, ModelSpec, assemble, load_net
from lipaudit.models.sources.own import describe
from tests.models.sources.cases import refused

PLAIN = """
import torch
from torch import nn
from lipaudit.models.net import ModelSpec

class Scaled(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.head = nn.Linear(12, classes)
    def forward(self, x):
        return self.head(x.flatten(1))

def plain(): return Scaled()
def many(classes): return Scaled(classes)
def half(): return Scaled().half()
def nothing(): return {"weights": 1}
def empty(): return nn.Flatten()
def failing(): raise RuntimeError("no such licence")
def described():
    return ModelSpec(Scaled(), (3, 2, 2), mean=(.5,), std=(.25,), labels=tuple("abcd"))
def sequence(): return ModelSpec(nn.Linear(5, 2), (3, 5), kind="tokens", classifier=False)
def odd(): return ModelSpec(Scaled(), (3, 2, 2), labels=("a",))
def nan():
    module = Scaled()
    module.head.bias.data[1] = float("nan")
    return module
"""

SIZE = {"input_size": (3, 2, 2)}


@pytest.fixture
def source(tmp_path):
    """A file of factories."""
    path = tmp_path / "factories.py"
    path.write_text(PLAIN)
    return path


@pytest.mark.parametrize("name", sorted(demo.DEMOS))
def test_a_demo_is_as_good_as_its_file_says(name):
    from importlib.resources import files

    from safetensors import safe_open

    path = files("lipaudit.models") / f"assets/demo_{name}.safetensors"
    net = load_net(f"demo:{name}")
    batch = load_data("demo", net, DataOptions(samples=360)).batch
    with safe_open(str(path), "pt") as stored:
        said = stored.metadata()["held_out_accuracy"]
    assert f"{(net.output(batch).argmax(1) == batch.y).double().mean():.4f}" == said
    assert float(said) > 0.95


def test_timm_loads_the_demo_and_agrees():
    timm_vit = pytest.importorskip("timm.models.vision_transformer").VisionTransformer
    from importlib.resources import files

    twin = timm_vit(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=48, depth=3, num_heads=4,
        mlp_ratio=2,
    ).eval()  # fmt: skip
    twin.load_state_dict(
        load_file(str(files("lipaudit.models") / "assets/demo_standard.safetensors")), strict=True
    )
    net = load_net("demo")
    batch = load_data("demo", net, DataOptions(samples=16)).batch
    with torch.no_grad():
        expected = twin((batch.x - 0.5) / 0.5)
    torch.testing.assert_close(net.output(batch), expected)


def test_demo_assets_stay_small_and_credit_their_data():
    from importlib.resources import files

    total = 0
    for name in demo.DEMOS:
        total += len((files("lipaudit.models") / f"assets/demo_{name}.safetensors").read_bytes())
    for part in ("train", "test"):
        images = files("lipaudit.data") / f"assets/digits_{part}.npz"
        total += len(images.read_bytes())
        with np.load(str(images)) as archive:
            assert archive["x"].dtype == np.uint8
            assert "Alpaydin" in str(archive["credit"])
    assert total < 1_000_000


def test_the_held_out_digits_are_those_of_scikit_learn():
    pytest.importorskip("sklearn")
    from benchmarks.shared.demos import load_sklearn_digits

    train_x, train_y, test_x, test_y = load_sklearn_digits()
    for name, x, y in (("demo", test_x, test_y), ("demo:train", train_x, train_y)):
        batch = load_data(name, load_net("demo"), DataOptions(samples=len(x))).batch
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        assert torch.equal(batch.x, x[order])
        assert torch.equal(batch.y, y[order])


def test_loading_leaves_the_callers_state_alone(source):
    torch.manual_seed(7)
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    load_net(f"py:{source}:described")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype


def test_a_net_is_frozen_in_eval_mode_and_hashed_by_content(source):
    net, twin = (load_net(f"py:{source}:described") for _ in range(2))
    assert not net.module.training
    assert not any(p.requires_grad for p in net.module.parameters())
    assert net.weights_sha256 == twin.weights_sha256
    assert net.weights_sha256 != load_net("demo").weights_sha256
    assert net.parameters == 12 * 4 + 4


def test_normalisation_happens_inside(source):
    net = load_net(f"py:{source}:described")
    x = torch.rand(2, 3, 2, 2)
    expected = net.module((x - 0.5) / 0.25)
    torch.testing.assert_close(net.output(Batch(x, None, ("a", "b"))), expected)
    assert (net.box, net.classes, net.labels) == ((0.0, 1.0), 4, tuple("abcd"))


def test_mean_and_std_override_what_the_source_says(source):
    options = LoadOptions(mean=(0.1, 0.2, 0.3), std=(2.0,))
    net = load_net(f"py:{source}:described", options)
    x = torch.rand(1, 3, 2, 2)
    expected = net.module((x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / 2)
    torch.testing.assert_close(net.output(Batch(x, None, ("a",))), expected)
    assert net.preprocess["mean"] == [0.1, 0.2, 0.3]


def test_half_precision_is_converted_and_noted(source):
    net = load_net(f"py:{source}:half", LoadOptions(input_size=(3, 2, 2)))
    assert net.dtype == torch.float32
    assert [n.code for n in net.notes] == ["half-precision"]
    assert "float16" in net.notes[0].text


def test_a_plain_module_takes_the_input_size_that_is_given(source):
    net = load_net(f"py:{source}:many", LoadOptions(input_size=(2,), model_kwargs={"classes": 7}))
    assert net.input_shape == (3, 2, 2)
    assert net.classes == 7


def test_a_model_of_float_tokens(source):
    net = load_net(f"py:{source}:sequence")
    batch = load_data("random", net, DataOptions(samples=2)).batch
    assert net.output(batch).shape == (2, 3, 2)
    assert (net.classes, net.box) == (None, None)


def test_a_factory_in_an_importable_module():
    net = load_net("py:lipaudit.models.sources.timm:load_demo")
    assert net.weights_sha256 == load_net("demo").weights_sha256


@pytest.mark.parametrize(
    ("spec", "options", "kind", "message"),
    [
        ("py:{file}:missing", {}, InputError, "has no 'missing'"),
        ("py:{file}:failing", SIZE, InputError, "no such licence"),
        ("py:{file}:nothing", SIZE, InputError, "returned dict"),
        ("py:{file}:nan", SIZE, InputError, "not finite: head.bias"),
        ("py:{file}:empty", SIZE, InputError, "has no parameters"),
        ("py:{file}:many", SIZE, InputError, "missing 1 required positional argument"),
        ("py:{file}:odd", {}, InputError, "1 labels (a) for 4 outputs"),
        ("py:{file}.none.py:build", {}, InputError, "FileNotFoundError"),
        ("py:no.such.module:build", {}, InputError, "ModuleNotFoundError"),
        ("py:build", {}, UsageError, "has no factory name"),
        ("py:{file}:plain", {}, UsageError, "--input-size"),
        ("py:{file}:plain", {"input_size": (5, 5)}, InputError, "cannot be run on one sample"),
        ("py:{file}:plain", {"input_size": (1, 2, 3, 4)}, UsageError, "is not a shape"),
        ("py:{file}:sequence", {"std": (1.0,)}, UsageError, "takes tokens"),
        ("no-such-model", {}, InputError, "no model"),
        ("demoo", {}, InputError, "no model"),
        ("", {}, InputError, "no model"),
        ("vit_base_patch_16_224", {}, InputError, "vit_base_patch16_224"),
        ("demo:fancy", {}, InputError, "standard"),
        ("hf:nobody/nothing", {"offline": True}, InputError, "hf download"),
        ("hf:a/b/c", {}, InputError, "hf:ORG/NAME"),
        ("./weights.safetensors", {}, InputError, "no such file or directory"),
        ("standard", {}, InputError, "Did you mean demo:standard"),
        ("org/tiny", {}, InputError, "Did you mean hf:org/tiny"),
        ("bert-base-uncased", {}, InputError, "Did you mean hf:bert-base-uncased"),
        ("deit_tiny_patch16_22", {}, InputError, "Did you mean timm:deit_tiny_patch16_224"),
        ("timm:timm/vit_tiny", {}, InputError, "Did you mean hf:timm/vit_tiny"),
        ("{file}:plain", {}, InputError, "Did you mean py:{file}:plain"),
        ("{file}", {}, InputError, "py:{file}:FUNCTION"),
        ("demo", {"arch": "timm:test_vit"}, UsageError, "demo does not take --arch"),
        ("demo", {"model_kwargs": {"num_classes": 3}}, UsageError, "from the baseline"),
        ("demo", {"tower": "image"}, UsageError, "demo does not take --tower"),
        ("demo", {"weights": "stored"}, UsageError, "demo does not take --weights"),
        ("demo", {"classes": 5}, UsageError, "demo does not take --classes"),
        ("demo", {"device": "cuda:99"}, UsageError, "not available"),
        ("demo", {"mean": (0.1, 0.2, 0.3)}, UsageError, "1 channels"),
        ("demo", {"std": (0.0,)}, UsageError, "must be positive"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(source, spec, options, kind, message):
    assert message.format(file=source) in refused(spec.format(file=source), kind, **options)


def test_a_file_of_weights_needs_an_architecture(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors")
    assert "--arch timm:NAME" in refused(tmp_path / "w.safetensors", UsageError)


FACTORY = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
"""


def test_weights_are_loaded_into_a_factory_s_model(tmp_path):
    """Also where all their names begin with the attribute of what was saved around the model."""
    (tmp_path / "own.py").write_text(FACTORY)
    weights = {"1.weight": torch.rand(3, 12), "1.bias": torch.rand(3)}
    arch = {"arch": f"py:{tmp_path / 'own.py'}:build", "input_size": (3, 2, 2)}
    save_file(weights, tmp_path / "w.safetensors")
    inside = {f"vit.{name}": value for name, value in weights.items()}
    torch.save({"state_dict": inside, "epoch": 3}, tmp_path / "epoch=3.ckpt")
    for name in ("w.safetensors", "epoch=3.ckpt"):
        net = load_net(str(tmp_path / name), LoadOptions(**arch))
        assert (net.source, net.classes) == ("file", 3)
        assert torch.equal(net.module[1].weight, weights["1.weight"])
    save_file(weights | {"2.bias": torch.rand(3)}, tmp_path / "w.safetensors")
    assert "2.bias surplus" in refused(str(tmp_path / "w.safetensors"), **arch)
    assert "a fixed number of classes" in refused(
        str(tmp_path / "epoch=3.ckpt"), UsageError, classes=2, **arch
    )


def test_weights_of_timm_may_lie_in_an_attribute(tmp_path):
    arch = {"arch": "timm:test_vit", "model_kwargs": {"num_classes": 7}}
    model = timm.create_model("test_vit", num_classes=7)
    state = {f"vit.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "step=5.ckpt")
    for given in (arch, {"arch": "timm:test_vit"}):  # classes are read off the weights
        net = load_net(str(tmp_path / "step=5.ckpt"), LoadOptions(**given))
        assert torch.equal(net.module.head.weight, model.head.weight)


def test_directories_without_a_usable_configuration(tmp_path):
    assert "has no config.json" in refused(str(tmp_path))
    (tmp_path / "model.onnx").touch()
    assert "ONNX and GGUF have none" in refused(str(tmp_path / "model.onnx"))
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text('{"hidden": 3}')
    assert "has no config.json that names" in refused(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in refused(str(tmp_path))


@pytest.mark.parametrize(
    "error", [AssertionError("odd"), NotImplementedError("odd"), ArithmeticError("odd")]
)
def test_a_model_that_refuses_its_sample_is_refused(error):
    class Picky(torch.nn.Linear):
        def forward(self, x):
            raise error

    spec = ModelSpec(Picky(4, 4), (3, 4), kind="tokens")
    with pytest.raises(InputError, match=f"cannot be run .*{type(error).__name__}: odd"):
        assemble(spec, LoadOptions(device="cpu"), name="m", source="test")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, of which nothing may be asked."""

    def busy(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "init"):
        monkeypatch.setattr(torch.cuda, name, busy)


def test_a_run_on_the_cpu_leaves_busy_gpus_alone(gpus, source):
    net = load_net(f"py:{source}:described", LoadOptions(device="cpu"))
    assert net.device == torch.device("cpu")


def test_a_device_without_float64_is_refused_before_anything_is_loaded(monkeypatch):
    def empty(*size, dtype=None, **_kwargs):
        if dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return original(*size)

    original = torch.empty
    monkeypatch.setattr(torch, "empty", empty)
    text = refused("py:no.such.module:build", UsageError, device="mps")
    assert "no float64" in text


@pytest.mark.parametrize("name", ["hpu", "opengl:0", "cuda:999", "meta", "nonsense", "cpu:x", ""])
def test_a_device_that_is_not_there_is_said_so(name):
    assert "is not available on this machine" in refused("demo", UsageError, device=name)


def test_a_device_without_memory_is_not_taken_for_another_fault(monkeypatch):
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_net("demo", LoadOptions(device="cuda"))


MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(160, 3))
"""


def options(*shape: int) -> LoadOptions:
    return LoadOptions(forms=lambda: list_forms(torch.rand(5, *shape)))


@pytest.mark.parametrize("size", ["8,5,4", "4,8,5"])
def test_the_option_that_a_refusal_names_settles_the_shape(size, tmp_path):
    (tmp_path / "m.py").write_text(MODEL)
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((5, 8, 5, 4), np.float32))
    args = ["jacobian", "-n", "1", f"py:{tmp_path}/m.py:build", "--data", f"{tmp_path}/x.npz"]
    refused = CliRunner().invoke(app, args)
    assert refused.exit_code == ExitCode.USAGE
    assert size in refused.output
    settled = CliRunner().invoke(app, [*args, "--input-size", size])
    assert settled.exit_code == ExitCode.OK, settled.output


def test_a_side_alone_keeps_the_channels_of_the_reading_of_that_size():
    spec = describe(
        nn.Conv2d(3, 4, 1), LoadOptions(input_size=(32,), forms=options(32, 32, 3).forms)
    )
    assert spec.input_shape == (3, 32, 32)
