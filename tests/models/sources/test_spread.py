"""Weights that are spread over the CPU and the disk: the same figures, from the same function."""

import json
import sys
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.shared.demos import load_shipped
from lipaudit import measure, merge
from lipaudit.engine.launcher import Place, share_run
from lipaudit.errors import EvaluationError, InputError, UsageError
from lipaudit.models import precision
from lipaudit.models.precision import list_devices
from lipaudit.models.sources.loader import LoadOptions, load_net
from lipaudit.settings import RunOptions
from lipaudit.wings.training.loop import train
from lipaudit.wings.training.recipe import Recipe
from tests.goldens.test_values import walk
from tests.models.sources.cases import classifier, figures, texts
from tests.models.sources.cases import qwen as save_qwen

BLOCKS = {"": "cpu", "model.layers.1": "disk", "model.layers.2.mlp": "disk", "lm_head": "disk"}
ON_DISK = tuple(name for name, place in BLOCKS.items() if place == "disk")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Return where a Qwen2 of a precision is."""
    return cache(lambda dtype="float32": save_qwen(tmp_path_factory.mktemp(dtype), dtype))


@pytest.fixture
def written(tmp_path):
    """Write a map, and return its path."""

    def write(places):
        path = tmp_path / "map.json"
        path.write_text(json.dumps(places))
        return str(path)

    return write


ONE = {"max_tokens": 6, "samples": 1}
TIMM = {
    "arch": "timm:vit_tiny_patch16_224", "model_kwargs": "img_size=32,depth=2,num_classes=3",
    "layers": "1", "samples": 1,
}  # fmt: skip


def save_timm(path):
    import timm

    torch.manual_seed(0)
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    save_file(module.state_dict(), path / "vit.safetensors")
    return str(path / "vit.safetensors")


@pytest.mark.parametrize(
    ("name", "dtype", "how", "kept"),
    [
        ("bounds", "float32", ONE, {}),
        ("attention", "bfloat16", ONE | {"max_tokens": 12}, {}),
        ("jacobian", "bfloat16", ONE, {"weights": "stored"}),
        ("jacobian", "float32", ONE | {"target": "hidden:3"}, {}),
        ("attack", None, {"eps": "0.1", "norm": "token-l2", "attack": "fgsm,pgd", "steps": 3}, {}),
        ("scaling", None, {"lengths": "4:8:log2", "layers": "0", "mode": "real"}, {}),
        ("bounds", "timm", TIMM, {}),
    ],
    ids=str,
)
def test_figures_are_those_of_weights_in_memory(qwen, tmp_path, written, name, dtype, how, kept):
    if dtype == "timm":
        model, places = save_timm(tmp_path), {"": "cpu", "blocks.1": "disk"}
    elif dtype is None:
        how = how | {"data": texts(tmp_path)}
        model, places = classifier(tmp_path), {"": "disk", "bert.encoder.layer.1": "cpu"}
    else:
        model, places = qwen(dtype), BLOCKS
    plain, _ = figures(model, name, **how)
    assert figures(model, name, device_map=written(places), **how, **kept)[0] == plain


def test_what_lies_on_the_disk_is_a_view_of_a_file_without_a_name(written, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    from_file, mapped = torch.from_file, set()

    def view(path, **how):
        values = from_file(path, **how)
        mapped.add(values.data_ptr())
        return values

    monkeypatch.setattr("torch.from_file", view)
    options = LoadOptions(device_map=written({"": "cpu", "blocks.1": "disk"}))
    net, plain = load_net("demo", options), dict(load_net("demo").module.named_parameters())
    for name, p in net.module.named_parameters():
        assert torch.equal(p, plain[name])
    assert {p.data_ptr() for p in net.module.blocks[1].parameters()} == mapped
    assert not list(tmp_path.glob("lipaudit-*"))


def test_the_report_says_what_lies_where(qwen, written):
    report = measure(qwen(), "attention", samples=1, device_map=written(BLOCKS))
    assert report.run.device_map == BLOCKS
    (note,) = (n for n in report.sections[0].notes if n.code == "device-map")
    module = load_net(qwen()).module
    there = sum(p.numel() for n, p in module.named_parameters() if n.startswith(ON_DISK))
    assert f"{there:,} on disk" in note.text
    assert measure("demo", "attention", samples=1).run.device_map == {}


def test_shards_may_be_spread_each_by_the_room_it_has(written, tmp_path):
    how = {"samples": 2, "batch_size": 1}
    maps = ({}, {"device_map": written({"": "disk"})})
    for i, more in enumerate(maps, 1):
        measure("demo", "jacobian", shard=f"{i}/2", parts=tmp_path / "run", **how, **more)
    (merged,) = merge(tmp_path / "run").sections
    (whole,) = measure("demo", "jacobian", **how).sections
    assert merged.samples == whole.samples


FACTORY = """
import torch
from torch import nn
from lipaudit import ModelSpec

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))

def make():
    torch.manual_seed(0)
    return ModelSpec(Pooled(), (3, 4), kind="tokens")
"""


def test_any_module_is_spread_even_if_it_reads_the_weights_of_its_parts(tmp_path, written):
    (tmp_path / "own.py").write_text(FACTORY)
    model = f"py:{tmp_path / 'own.py'}:make"
    places = written({"": "cpu", "encoder.layers.0": "disk"})
    for name, how in (
        ("jacobian", {"dtype": "float64"}),
        ("certify", {"eps": "1e-4", "samples": 1, "order": "1"}),
    ):
        plain, spread_out = (
            dict(walk(figures(model, name, **how, **more)[0]))
            for more in ({}, {"device_map": places})
        )
        # LayerNorm is linearised by another formula where its weights come and go.
        for path, value in plain.items():
            one = pytest.approx(value, rel=1e-13, abs=0) if isinstance(value, float) else value
            assert spread_out[path] == one, path


def test_tied_weights_stay_one_tensor(tmp_path, written):
    tied = save_qwen(tmp_path / "tied", "bfloat16", tie_word_embeddings=True)
    net = load_net(tied, LoadOptions(device_map=written({"": "cpu", "lm_head": "disk"})))
    assert net.module.lm_head.weight is net.module.model.embed_tokens.weight
    assert net.parameters == load_net(tied).parameters


def test_accelerate_plans_whole_blocks_for_the_memory_that_is_free(qwen, monkeypatch):
    options = LoadOptions(device_map="auto")
    assert load_net(qwen(), options).device_map == {"": "cpu"}
    module = load_net(qwen()).module
    size = sum(p.numel() for p in module.parameters()) * 4
    monkeypatch.setattr(
        "psutil.virtual_memory", lambda: type("Free", (), {"available": size // 2})
    )
    net = load_net(qwen(), options)
    assert set(net.device_map.values()) == {"cpu", "disk"}
    parts = {name.rpartition(".")[0] for name in net.device_map}
    assert parts <= {"", "model", "model.layers"}  # no block is cut


@pytest.mark.parametrize(
    ("places", "error", "said"),
    [
        ({"": "cpu", "model.layer.1": "disk"}, InputError, "model.layer.1 surplus"),
        ({"model.layers": "disk"}, InputError, "model.embed_tokens.weight, model.norm.weight"),
        ({"": "fridge"}, UsageError, "device 'fridge' is not available"),
        ({"": "meta"}, UsageError, "device 'meta' is not available"),
        ({"": 7}, UsageError, "device '.*:7' is not available"),
        ({"": None}, UsageError, "nor a file that maps modules"),
        (["disk"], UsageError, "nor a file that maps modules"),
    ],
    ids=str,
)
def test_a_map_that_does_not_fit_is_refused(qwen, written, places, error, said):
    with pytest.raises(error, match=said):
        load_net(qwen(), LoadOptions(device_map=written(places)))


def test_what_cannot_be_spread_is_refused_in_one_line(qwen, written, monkeypatch):
    places = written({"": "disk"})
    with pytest.raises(UsageError, match="is neither auto nor balanced, nor a file"):
        load_net("demo", LoadOptions(device_map="even"))
    with pytest.raises(UsageError, match="both choose the device"):
        load_net("demo", LoadOptions(device_map=places, device="cpu"))
    with pytest.raises(UsageError, match="loaded by name"):
        measure(nn.Linear(2, 2), "jacobian", input_shape=(1, 2), device_map=places)
    place, run = Place(0, 2, 0, "localhost", 1), RunOptions(device_map="auto")
    with pytest.raises(UsageError, match="each process would spread its model"):
        share_run(run, place)
    asked = RunOptions(device_map=places)
    assert share_run(asked, place).device_map == places
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(InputError, match="needs the library `accelerate`"):
        load_net("demo", LoadOptions(device_map=places))


@pytest.mark.parametrize("how", ["device_map", "weights"])
def test_weights_that_are_held_cannot_be_trained(tmp_path, written, how):
    (tmp_path / "own.py").write_text(FACTORY.replace("Pooled()", "Pooled().half()"))
    model = "demo" if how == "device_map" else f"py:{tmp_path / 'own.py'}:make"
    places = {"device_map": written({"": "disk"}), "weights": "stored"}
    net = load_net(model, LoadOptions(**{how: places[how]}))
    with pytest.raises(UsageError, match="training needs its weights on one device"):
        next(iter(train(net, load_shipped("train")[:8], Recipe(epochs=1))))


def test_a_full_disk_is_one_line(written, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(EvaluationError, match="No space left") as caught:
        load_net("demo", LoadOptions(device_map=written({"": "disk"})))
    assert "TMPDIR" in caught.value.advice


def test_samples_go_where_the_first_parameter_is_read():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    precision.convert_on_read(
        module, torch.float32, lambda path: torch.device("meta") if path == "0" else None
    )
    assert [d.type for d in list_devices(module)] == ["meta", "meta", "cpu", "cpu"]
