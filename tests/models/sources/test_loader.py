"""Which source a MODEL argument names, what the `Net` promises, and what is refused."""

from importlib.resources import files

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import lipaudit.models.sources.timm as demo
from lipaudit.cli.app import app
from lipaudit.data.arrays import list_forms
from lipaudit.data.loading import DataOptions, load_data
from lipaudit.errors import ExitCode, InputError, UsageError
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.models.sources.own import describe
from tests.models.sources.cases import numbered, refused
from tests.nets import own_net

PLAIN = """
from dataclasses import dataclass
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
def ending(): raise SystemExit(1)
class Exported(Scaled):
    def train(self, mode=True): raise NotImplementedError
def exported(): return Exported()
built = Scaled()
def tied():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight, second.bias = first.weight, first.bias
    return nn.Sequential(nn.Flatten(), first, second)
def failing(): raise RuntimeError("no such licence")
def described():
    return ModelSpec(Scaled(), (3, 2, 2), mean=.5, std=(.25,), labels=tuple("abcd"))
def flat(inputs=12): return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 3))
def sequence(): return ModelSpec(nn.Linear(5, 2), (3, 5), kind="tokens", classifier=False)
@dataclass(frozen=True)
class Dated(ModelSpec):
    date: str = ""
def dated(): return Dated(nn.Linear(5, 2), (3, 5), kind="tokens", classifier=False, date="today")
def string(): return ModelSpec("module", 2)
def video(): return ModelSpec(Scaled(), 2, kind="video")
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


ASSETS = files("lipaudit.models") / "assets"


@pytest.mark.parametrize("name", sorted(demo.DEMOS))
def test_a_demo_is_as_good_as_its_file_says(name):
    net = load_net(f"demo:{name}")
    batch = load_data("demo", net, DataOptions(samples=360)).batch
    with safe_open(str(ASSETS / f"demo_{name}.safetensors"), "pt") as stored:
        said = stored.metadata()["held_out_accuracy"]
    assert f"{(net.output(batch).argmax(1) == batch.y).double().mean():.4f}" == said
    assert float(said) > 0.95


def test_timm_loads_the_demo_and_agrees():
    name, arguments = demo.AS_TIMM
    twin = timm.create_model(name, **arguments).eval()
    twin.load_state_dict(load_file(str(ASSETS / "demo_standard.safetensors")), strict=True)
    net = load_net("demo")
    batch = load_data("demo", net, DataOptions(samples=16)).batch
    with torch.no_grad():
        expected = twin((batch.x - 0.5) / 0.5)
    torch.testing.assert_close(net.output(batch), expected)


def test_demo_assets_stay_small_and_credit_their_data():
    digits = [files("lipaudit.data") / f"assets/digits_{part}.npz" for part in ("train", "test")]
    weights = [ASSETS / f"demo_{name}.safetensors" for name in demo.DEMOS]
    assert sum(len(path.read_bytes()) for path in digits + weights) < 1_000_000
    for images in digits:
        with np.load(str(images)) as archive:
            assert archive["x"].dtype == np.uint8
            assert "Alpaydin" in str(archive["credit"])


def test_the_held_out_digits_are_those_of_scikit_learn():
    from benchmarks.shared.demos import load_sklearn_digits

    train_x, train_y, test_x, test_y = load_sklearn_digits()
    for name, x, y in (("demo", test_x, test_y), ("demo:train", train_x, train_y)):
        batch = load_data(name, load_net("demo"), DataOptions(samples=len(x))).batch
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        assert torch.equal(batch.x, x[order])
        assert torch.equal(batch.y, y[order])


def test_a_net_is_frozen_in_eval_mode_and_hashed_by_content(source):
    """And the caller's state is left alone."""
    torch.manual_seed(7)
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    net, twin = (load_net(f"py:{source}:described") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype
    assert not net.module.training
    assert not any(p.requires_grad for p in net.module.parameters())
    assert net.weights_sha256 == twin.weights_sha256
    # A factory may lie in an importable module.
    demos = [load_net(spec) for spec in ("demo", "py:lipaudit.models.sources.timm:load_demo")]
    assert demos[0].weights_sha256 == demos[1].weights_sha256 != net.weights_sha256
    assert net.parameters == 12 * 4 + 4


@pytest.mark.parametrize(
    ("options", "mean", "std"),
    [({}, [0.5] * 3, 0.25), ({"mean": (0.1, 0.2, 0.3), "std": (2.0,)}, [0.1, 0.2, 0.3], 2.0)],
)
def test_normalisation_happens_inside_and_options_override_it(source, options, mean, std):
    net = load_net(f"py:{source}:described", LoadOptions(**options))
    x = torch.rand(2, 3, 2, 2)
    expected = net.module((x - torch.tensor(mean)[:, None, None]) / std)
    torch.testing.assert_close(net.output(numbered(x)), expected)
    assert (net.box, net.classes, net.labels) == ((0.0, 1.0), 4, tuple("abcd"))
    assert net.preprocess["mean"] == mean


@pytest.mark.parametrize(
    ("factory", "options", "facts", "output"),
    [
        ("half", {"input_size": (3, 2, 2)}, ("image", (3, 2, 2), 4, (0.0, 1.0)), (4,)),
        ("many", {"input_size": (2,)}, ("image", (3, 2, 2), 7, (0.0, 1.0)), (7,)),
        ("sequence", {}, ("tokens", (3, 5), None, None), (3, 2)),
        ("dated", {}, ("tokens", (3, 5), None, None), (3, 2)),
    ],
)
def test_what_a_factory_returns_is_read_by_the_options(source, factory, options, facts, output):
    kwargs = {"classes": 7} if factory == "many" else {}
    net = load_net(f"py:{source}:{factory}", LoadOptions(**options, model_kwargs=kwargs))
    assert (net.kind, net.input_shape, net.classes, net.box) == facts
    assert net.dtype == torch.float32
    assert net.output(load_data("random", net, DataOptions(samples=2)).batch)[0].shape == output
    assert [n.code for n in net.notes] == ["half-precision"] * (factory == "half")
    assert all("float16" in note.text for note in net.notes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_complex_constants_keep_their_imaginary_part(dtype):
    """Rotary positions of Llama's own code are such a buffer."""

    class Turned(nn.Linear):
        def forward(self, x):
            return super().forward((x * self.turn).imag.to(self.weight.dtype))

    module, angles = Turned(4, 2), torch.arange(4.0)
    module.register_buffer("turn", torch.polar(torch.ones(4), angles))
    net = own_net(module, (4,), dtype)
    x = torch.ones(1, 4, dtype=net.dtype)
    expected = nn.functional.linear(x * angles.sin(), module.weight, module.bias)
    torch.testing.assert_close(net.output(numbered(x)), expected)


@pytest.mark.parametrize(
    ("spec", "options", "kind", "message"),
    [
        ("py:{file}:missing", {}, InputError, "has no 'missing'"),
        ("py:{file}:failing", SIZE, InputError, "no such licence"),
        ("py:{file}:nothing", SIZE, InputError, "returned dict"),
        ("py:{file}:nan", SIZE, InputError, "not finite: head.bias"),
        ("py:{file}:empty", SIZE, InputError, "has no parameters"),
        ("py:{file}:ending", SIZE, InputError, "failed (SystemExit: 1)"),
        ("py:{file}:exported", SIZE, InputError, "cannot be put in eval mode"),
        ("py:{file}:string", SIZE, InputError, "a str of the kind 'image'"),
        ("py:{file}:video", SIZE, InputError, "kinds image, tokens, text"),
        ("py:{file}:built", SIZE, InputError, "`def build(): return built`"),
        ("py:{file}:many", SIZE, InputError, "missing 1 required positional argument"),
        ("py:{file}:odd", {}, InputError, "1 labels (a) for 4 outputs"),
        ("py:{file}.none.py:build", {}, InputError, "FileNotFoundError"),
        ("py:no.such.module:build", {}, InputError, "ModuleNotFoundError"),
        ("py:build", {}, UsageError, "has no factory name"),
        ("py:{file}:plain", {}, UsageError, "--input-size"),
        ("py:{file}:plain", {"input_size": (5, 5)}, InputError, "cannot be run on a sample"),
        ("py:{file}:plain", {"input_size": (1, 2, 3, 4)}, UsageError, "is not a shape"),
        ("py:{file}:sequence", {"std": (1.0,)}, UsageError, "takes tokens"),
        ("", {}, InputError, "no model"),
        ("hf:nobody/nothing", {"offline": True}, InputError, "hf download"),
        ("hf:a/b/c", {}, InputError, "hf:ORG/NAME"),
        ("./weights.safetensors", {}, InputError, "no such file or directory"),
        ("org/tiny", {}, InputError, "Did you mean hf:org/tiny"),
        ("bert-base-uncased", {}, InputError, "Did you mean hf:bert-base-uncased"),
        ("timm:timm/vit_tiny", {}, InputError, "Did you mean hf:timm/vit_tiny"),
        ("{file}", {}, InputError, "py:{file}:FUNCTION"),
        ("demo", {"arch": "timm:test_vit"}, UsageError, "demo does not take --arch"),
        ("demo", {"model_kwargs": {"num_classes": 3}}, UsageError, "from the baseline"),
        ("demo", {"tower": "image"}, UsageError, "demo does not take --tower"),
        ("demo", {"weights": "stored"}, UsageError, "demo does not take --weights"),
        *[
            ("demo", {"device": name}, UsageError, "is not available on this machine")
            for name in ("hpu", "opengl:0", "cuda:999", "meta", "nonsense", "cpu:x", "")
        ],
        ("demo", {"mean": (0.1, 0.2, 0.3)}, UsageError, "1 channels"),
        ("demo", {"std": (0.0,)}, UsageError, "must be positive"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(source, spec, options, kind, message):
    assert message.format(file=source) in refused(spec.format(file=source), kind, **options)


def test_weights_are_loaded_into_a_factory_s_model(source, tmp_path):
    """Also where all their names begin with the attribute of what was saved around the model."""
    weights = {"1.weight": torch.rand(3, 12), "1.bias": torch.rand(3)}
    arch = {"arch": f"py:{source}:flat", "input_size": (3, 2, 2)}
    save_file(weights, tmp_path / "w.safetensors")
    assert "--arch timm:NAME" in refused(tmp_path / "w.safetensors", UsageError)
    inside = {f"vit.{name}": value for name, value in weights.items()}
    torch.save({"state_dict": inside, "epoch": 3}, tmp_path / "epoch=3.ckpt")
    last = {"epoch": 3, "best": 0.9, "optimizer": {"state": {0: {"step": torch.ones(1)}}}}
    torch.save(last | {"model_state_dict": weights}, tmp_path / "last.pt")
    torch.save(last | {"net": weights}, tmp_path / "net.pt")
    for name in ("w.safetensors", "epoch=3.ckpt", "last.pt", "net.pt"):
        net = load_net(str(tmp_path / name), LoadOptions(**arch))
        assert (net.source, net.classes) == ("file", 3)
        assert torch.equal(net.module[1].weight, weights["1.weight"])
    torch.save({"net": weights, "teacher": weights}, tmp_path / "net.pt")
    assert "several sets of weights: net, teacher" in refused(tmp_path / "net.pt", **arch)
    save_file(weights | {"loss.weight": torch.rand(3)}, tmp_path / "w.safetensors")
    assert "Sequential: loss.weight surplus" in refused(tmp_path / "w.safetensors", **arch)
    # Beside a model with a prefix, the weights of a loss are left out; a teacher is as likely.
    inner = {f"model.{name}": value for name, value in weights.items()}
    save_file(inner | {"loss.weight": torch.rand(3)}, tmp_path / "w.safetensors")
    net = load_net(str(tmp_path / "w.safetensors"), LoadOptions(**arch))
    assert torch.equal(net.module[1].weight, weights["1.weight"])
    assert "left out: loss.weight" in " ".join(note.text for note in net.notes)
    teacher = {f"teacher.{name}": value + 1 for name, value in weights.items()}
    save_file(inner | teacher, tmp_path / "w.safetensors")
    assert "surplus" in refused(tmp_path / "w.safetensors", **arch)
    save_file(weights | {"ema.1.bias": torch.rand(3)}, tmp_path / "w.safetensors")
    assert "Sequential: ema.1.bias surplus" in refused(tmp_path / "w.safetensors", **arch)
    twice = {f"ema.{name}": value + 1 for name, value in weights.items()}
    save_file(weights | twice, tmp_path / "w.safetensors")
    assert "surplus" in refused(tmp_path / "w.safetensors", **arch)
    assert "a fixed number of classes" in refused(
        str(tmp_path / "epoch=3.ckpt"), UsageError, classes=2, **arch
    )


def test_a_file_may_hold_tied_weights_once(source, tmp_path):
    arch = {"arch": f"py:{source}:tied", "input_size": (1, 1, 2)}
    save_file({"1.weight": torch.rand(2, 2), "1.bias": torch.rand(2)}, tmp_path / "w.safetensors")
    net = load_net(str(tmp_path / "w.safetensors"), LoadOptions(**arch))
    assert torch.equal(net.module[2].weight, load_file(tmp_path / "w.safetensors")["1.weight"])
    save_file({f"{i}.weight": torch.rand(2, 2) for i in (1, 2)}, tmp_path / "w.safetensors")
    assert "1.bias, 2.bias missing" in refused(tmp_path / "w.safetensors", **arch)


def test_weights_of_timm_may_lie_in_an_attribute(tmp_path):
    arch = {"arch": "timm:test_vit", "model_kwargs": {"num_classes": 7}}
    model = timm.create_model("test_vit", num_classes=7)
    state = {f"vit.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "step=5.ckpt")
    for given in (arch, {"arch": "timm:test_vit"}):  # classes are read off the weights
        net = load_net(str(tmp_path / "step=5.ckpt"), LoadOptions(**given))
        assert torch.equal(net.module.head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("notes.txt", "", "has no config.json"),
        ("config.json", "{", "is not JSON"),
        ("config.json", '{"hidden": 3}', "has no config.json that names"),
        ("adapter_config.json", "{}", "names no base model"),
    ],
)
def test_directories_without_a_usable_configuration(tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    assert message in refused(tmp_path)


@pytest.mark.parametrize(
    "error", [AssertionError("odd"), NotImplementedError("odd"), ArithmeticError("odd")]
)
def test_a_model_that_refuses_its_sample_is_refused(error):
    class Picky(torch.nn.Linear):
        def forward(self, x):
            raise error

    with pytest.raises(InputError, match=f"cannot be run .*{type(error).__name__}: odd"):
        own_net(Picky(4, 4), (3, 4))


def run_out(*_args, **_kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_run_on_the_cpu_leaves_busy_gpus_alone(monkeypatch, source):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "init"):
        monkeypatch.setattr(torch.cuda, name, run_out)
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
    assert "or has no float64 | Use --device auto or cpu." in text


def test_a_device_without_memory_is_not_taken_for_another_fault(monkeypatch):
    monkeypatch.setattr(torch, "empty", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        load_net("demo", LoadOptions(device="cuda"))


@pytest.mark.parametrize("size", ["8,5,4", "4,8,5"])
def test_the_option_that_a_refusal_names_settles_the_shape(size, source, tmp_path):
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((5, 8, 5, 4), np.float32))
    args = ["jacobian", "-n", "1", f"py:{source}:flat", "--model-kwargs", "inputs=160"]
    args += ["--data", f"{tmp_path}/x.npz"]
    refused = CliRunner().invoke(app, args)
    assert refused.exit_code == ExitCode.USAGE
    assert size in refused.output
    settled = CliRunner().invoke(app, [*args, "--input-size", size])
    assert settled.exit_code == ExitCode.OK, settled.output


def test_a_side_alone_keeps_the_channels_of_the_reading_of_that_size():
    forms = list_forms(torch.rand(5, 32, 32, 3))
    options = LoadOptions(input_size=(32,), forms=lambda: forms)
    assert describe(nn.Conv2d(3, 4, 1), options).input_shape == (3, 32, 32)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_wide_unsigned_integers_are_read_like_others(dtype):
    """torch cannot compare them."""
    for largest, fits in ((1, True), (300, False)):
        x = torch.from_numpy(np.full((2, 6, 2), largest, dtype))
        assert [form.fits for form in list_forms(x)] == [True, fits]
