"""Models of one's own: what they take is read off the data, and every hint can be followed."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import lipaudit
from lipaudit.errors import InputError
from tests.commands import invoke, refuse


def shape(*args: str) -> list[int]:
    invoke("jacobian", *args, "-n", "1", "-o", "a.json")
    return lipaudit.load("a.json").run.preprocess["size"]


def test_data_say_what_a_model_takes_and_a_size_that_is_given_goes_before_them():
    x = np.random.default_rng(0).integers(0, 256, (4, 32, 24, 3), dtype=np.uint8)
    np.savez("last.npz", x=x)
    np.savez("first.npz", images=x.transpose(0, 3, 1, 2))
    np.savez("grey.npz", x=x[..., 0])
    image, grey = ("py:tests.cli.own:image", "--data"), ("--model-kwargs", "channels=1")
    assert shape(*image, "last.npz") == shape(*image, "first.npz") == [3, 32, 24]
    assert shape(*image, "grey.npz", *grey) == [1, 32, 24]
    Path("pictures").mkdir()
    Image.new("RGB", (40, 30)).save("pictures/a.png")
    assert shape(*image, "pictures") == [3, 30, 40]
    assert shape(*image, "pictures", "--input-size", "16") == [3, 16, 16]
    assert shape(*image, "pictures", "--input-size", "16,20") == [3, 16, 20]
    assert shape(image[0], *grey, "--input-size", "1,16,20") == [1, 16, 20]
    Image.new("RGB", (16, 16)).save("pictures/b.png")
    says = "input shape of py:tests.cli.own:image, a Conv, is unknown"
    refuse(2, says, "jacobian", *image, "pictures")
    refuse(4, "there is no data 'picture'", "jacobian", *image, "picture")


class Placed(nn.Module):
    """Positions are looked up before tokens, at as many places."""

    def __init__(self):
        super().__init__()
        self.places, self.tokens = nn.Embedding(6, 4), nn.Embedding(20, 4)

    def forward(self, ids):
        places = torch.arange(ids.shape[1]).expand_as(ids)
        return (self.places(places) * self.tokens(ids)).sum(1)


def test_the_jacobian_is_that_of_the_embedding_which_takes_the_ids():
    module = Placed()
    truth = torch.linalg.matrix_norm(torch.cat([p.diag() for p in module.places.weight], 1), 2)
    ids = torch.arange(12).view(2, 6)
    report = lipaudit.measure(module, "jacobian", data=ids)
    assert report.section("jacobian").samples["norm"][0] == pytest.approx(float(truth), rel=1e-4)
    with pytest.raises(InputError, match="Placed has no linear layer"):
        lipaudit.measure(module, "jacobian", data=ids, to="features")


def test_token_ids_and_vectors_say_so_too():
    np.savez("ids.npz", x=np.arange(12).reshape(4, 3), y=np.array([0, 1, 0, 1]))
    invoke("jacobian", "py:tests.cli.own:ids", "--data", "ids.npz", "-n", "1")
    words = ("attack", "py:tests.cli.own:ids", "--attack", "words", "--eps", "1", "--data")
    invoke(*words, "ids.npz")  # it takes no mask, and texts of three tokens only
    np.savez("large.npz", x=np.array([[1, 2, 20]]), y=np.array([0]))
    refuse(4, "the vocabulary has 20", *words, "large.npz")
    Path("ids.pt").touch()
    refuse(4, "ids.pt has an unsupported format", *words, "ids.pt")
    module = nn.Sequential(nn.Flatten(), nn.Linear(10, 3))
    report = lipaudit.measure(module, "jacobian", data=torch.randn(4, 5, 2), samples=1)
    truth = float(torch.linalg.matrix_norm(module[1].weight.detach(), 2))
    assert report.section("jacobian").samples["norm"][0] == pytest.approx(truth, rel=1e-4)
    assert lipaudit.ModelSpec(module, 32).input_shape == (3, 32, 32)
    assert lipaudit.ModelSpec(module, 32, kind="text").input_shape == (32,)
    assert lipaudit.ModelSpec(module, [1, 8, 8]).input_shape == (1, 8, 8)


def test_a_model_that_takes_no_mask_reads_texts_of_one_length_at_a_time():
    Path("texts.csv").write_text("text,label\na longer text,1\nshort,0\n")
    how = ("py:tests.cli.own:unmasked", "--data", "texts.csv")
    for command in ("check", "jacobian"):
        invoke(command, *how)
    says = "Unmasked cannot be run on texts of several lengths (TypeError"
    refuse(4, says, "attack", *how, "--eps", "0.1", "--attack", "fgsm")
    invoke("attack", *how, "--eps", "0.1", "--attack", "fgsm", "--max-tokens", "1")
    invoke("certify", *how, "--eps", "0.1")


def test_the_command_that_measures_a_trained_module_runs():
    x = np.random.default_rng(0).integers(0, 256, (6, 3, 8, 8), dtype=np.uint8)
    np.savez("images.npz", x=x, y=np.arange(6) % 3)
    done = invoke(
        *("train", "py:tests.cli.own:image", "--data", "images.npz", "--epochs", "1"),
        *("--out", "trained", "--model-kwargs", "prints=true"),
    )
    assert done.stdout == "trained\n"
    assert "loud" in done.stderr
    command = done.stderr.split("Measure the result: lipaudit ")[1].split()
    invoke(*command, "--only", "jacobian", "-o", "a.json")
    assert lipaudit.load("a.json").run.model.spec == "trained/model.safetensors"


class Halves(nn.Module):
    """Attention in each half of the tokens, in the model itself."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        halves = [self.qkv(half).chunk(3, -1) for half in x.chunk(2, 1)]
        return torch.cat([((q @ k.mT).softmax(-1) @ v).mean(1) for q, k, v in halves], 1)


def test_attention_in_the_model_itself_is_named_so():
    report = lipaudit.measure(Halves(), "bounds", data=torch.randn(2, 6, 4))
    (note,) = [note for note in report.section("bounds").notes if note.code == "in-parts"]
    assert "layers 0, 1 (the model itself, test_own_models.py:" in note.text


def test_what_init_writes_runs_as_it_is():
    done = invoke("init", "py")
    assert done.stdout == ""
    command = done.stderr.split("Measure it: lipaudit ")[1].split()
    done = invoke(*command, "-n", "1", "-o", "a.json")
    assert len(lipaudit.load("a.json").section("bounds").rows) == 8
    refuse(2, "model.py exists", "init", "py")
    refuse(2, "x.txt is not the name of a py file", "init", "py", "-o", "x.txt")
    refuse(2, "", "init", "py", "-o", "no/model.py")


def test_the_hint_on_what_a_module_takes_can_be_followed():
    done = invoke("jacobian", "py:tests.cli.own:image", code=2)
    hint = " ".join(done.stderr.split("hint:")[1].split())
    sizes = re.search(r"--input-size (\S+) \(or (\S+)\)", hint)
    for size, wanted in zip(sizes.groups(), ([3, 224, 224], [1, 28, 28]), strict=True):
        channels = ("--model-kwargs", f"channels={wanted[0]}")
        assert shape("py:tests.cli.own:image", *channels, "--input-size", size) == wanted
    assert "lipaudit init py" in hint


class Weighted(nn.Module):
    """A classifier with one more parameter or buffer than it uses, and a state of its own."""

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("extra", extra)

    def forward(self, x):
        return self.head(x).mean(1)

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


class Packed(Weighted):
    """A model that saves a weight as modules of dynamic quantisation do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = (self.extra, None)


class Constant(Weighted):
    """A model that does not read its input."""

    def forward(self, x):
        return torch.zeros(len(x), 2)


@pytest.mark.parametrize(
    ("model", "measure", "says", "advice"),
    [
        (Weighted(torch.eye(4).to_sparse()), "jacobian", "quantised or sparse: extra", "to_dense"),
        (Packed(torch.eye(4)), "jacobian", "quantised or sparse: packed", "to_dense()"),
        (Constant(torch.eye(4)), "certify", "does not depend on its input", ""),
    ],
    ids=["sparse", "quantised", "constant"],
)
def test_sparse_weights_and_constant_outputs_are_refused(model, measure, says, advice):
    asked = {"eps": "0.1"} if measure == "certify" else {}
    with pytest.raises(InputError, match=says) as refused:
        lipaudit.measure(model, measure, data=torch.randn(2, 3, 4), **asked)
    assert advice in refused.value.advice


def test_a_state_that_is_no_weight_is_left_alone():
    report = lipaudit.measure(Weighted(torch.eye(4)), "jacobian", data=torch.randn(2, 3, 4))
    assert report.status == "complete"


def test_an_audit_of_a_model_without_attention_is_complete_and_says_so_once(tmp_path):
    file = tmp_path / "r.json"
    done = invoke(
        "audit", "py:tests.cli.own:convolution", "-n", "4", "-o", str(file), "--data", "random"
    )
    assert done.exit_code == 0, done.output
    report = json.loads(file.read_text())
    assert report["status"] == "complete"
    assert [section["measure"] for section in report["sections"]] == ["jacobian"]
    assert " ".join(done.stderr.split()).count("no attention was found") == 1
    refuse(4, "no attention was found", "bounds", "py:tests.cli.own:convolution", "-n", "4")


def test_the_example_of_init_has_a_model_with_its_own_call_and_read(tmp_path):
    invoke("init", "py", "-o", "mine.py")
    done = invoke(
        "jacobian", "py:mine.py:conditional", "-n", "1", "--data", "random", "-o", "r.json"
    )
    assert done.exit_code == 0
    report = lipaudit.load("r.json")
    assert report.section("jacobian").samples["norm"][0] > 0
    seen = invoke("check", "py:mine.py:conditional", "--model-kwargs", "age=0.1").stdout
    assert re.search(r"classes +10", seen)


def test_check_of_features_has_no_classes():
    seen = invoke("check", "py:tests.models.sources.features:embed", "-n", "1").stdout
    assert re.search(r"classes +none", seen)
