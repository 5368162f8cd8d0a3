"""What is done to images: the steps that check and report show, --preprocess and --class-names."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.commands import invoke

SIDE = 32
FILE = ["w.safetensors", "--arch", "timm:test_vit", "--model-kwargs", "img_size=32,depth=1"]
NORMALISED = ["--mean", "0.5", "--std", "0.5"]


@pytest.fixture(autouse=True)
def model(_elsewhere):
    """A file of weights, and two folders of pictures, which are 60 x 40 pixels or fit."""
    torch.manual_seed(0)
    module = timm.create_model("test_vit", img_size=SIDE, depth=1, num_classes=2).eval()
    save_file(module.state_dict(), "w.safetensors")
    for folder, size in (("large", (60, 40)), ("fitting", (SIDE, SIDE))):
        for i, name in enumerate(("cat", "dog")):
            Path(folder, name).mkdir(parents=True)
            picture = Image.effect_mandelbrot(size, (-2, -1, 1, 1), 20 + i).convert("RGB")
            picture.save(Path(folder, name, "1.png"))
    return module


def check(*args: str) -> dict:
    done = invoke("check", *FILE, *NORMALISED, *args, "-n", "2", "-f", "json")
    return json.loads(done.stdout)


def test_the_first_image_is_followed_step_by_step():
    seen = check("--data", "large")
    steps = seen["preprocessing"]
    assert steps[0].startswith("L, 60 x 40 pixels") or steps[0] == "RGB, 60 x 40 pixels (PNG)"
    # timm scales the shorter side to 32 / crop_pct, here 0.95, and crops the middle.
    assert steps[1:4] == ["Resize: 49 x 33 pixels", "CenterCrop: 32 x 32 pixels", steps[3]]
    assert steps[-2].startswith("values 0")
    assert steps[-1] == "in the model: minus mean [0.5, 0.5, 0.5], divided by std [0.5, 0.5, 0.5]"
    (note,) = [n for n in seen["notes"] if "--preprocess resize" in n]
    assert note.startswith("2 of 2 images (the first: ")
    assert "test_vit" in note
    seen = check("--data", "fitting")
    assert seen["preprocessing"][1:-2] == ["divided by 255"]
    assert not any("--preprocess" in note for note in seen["notes"])


@pytest.mark.parametrize("choice", ["model", "resize", None])
def test_the_samples_are_those_that_another_library_makes(choice, model):
    from lipaudit.data.loading import DataOptions, load_data
    from lipaudit.models.sources.loader import LoadOptions, load_net

    options = LoadOptions(
        arch="timm:test_vit", model_kwargs={"img_size": SIDE, "depth": 1}, preprocess=choice
    )
    net = load_net("w.safetensors", options)
    config = timm.data.resolve_model_data_config(model) | {"input_size": (3, SIDE, SIDE)}
    whole = timm.data.create_transform(**config, is_training=False, normalize=False)
    for folder in ("large", "fitting"):
        samples = load_data(folder, net, DataOptions(samples=2))
        for origin, x in zip(samples.origins, samples.batch.x, strict=True):
            image = Image.open(Path(folder, origin.place))
            short = SIDE / min(image.size)
            size = [round(length * short) for length in image.size]
            image = image if image.size == (SIDE, SIDE) else image.resize(size, Image.BICUBIC)
            left = (image.width - SIDE) // 2
            plain = np.asarray(image.crop((left, 0, left + SIDE, SIDE))).transpose(2, 0, 1) / 255
            if choice == "model" or (choice is None and folder == "large"):
                plain = whole(Image.open(Path(folder, origin.place))) / 255
            np.testing.assert_allclose(x, plain, atol=1e-6)


def test_images_of_other_sizes_can_be_refused_and_a_report_says_what_was_done():
    assert check("--data", "fitting", "--preprocess", "none")["samples"] == 2
    done = invoke("check", *FILE, "--data", "large", "--preprocess", "none", code=4)
    assert "has 60 x 40 pixels; the model takes 32 x 32" in done.stderr
    attack = ("--attack", "fgsm", "--eps", "0.01", "-n", "2", "-o", "r.json")
    invoke("attack", *FILE, "--data", "large", "--preprocess", "resize", *attack)
    report = json.loads(Path("r.json").read_text())
    assert "; scaled to cover 32 x 32" in report["run"]["data"]["steps"]
    assert report["run"]["options"]["preprocess"] == "resize"
    assert "crop_pct" not in report["run"]["preprocess"]
    page = " ".join(invoke("report", "r.json", "--details").stdout.split())
    assert "scaled to cover 32 x 32, then cropped in the middle; divided by 255" in page
    done = invoke("check", "demo", "--preprocess", "model", code=2)
    assert "has no resizing of its own" in done.stderr


def test_class_names_of_a_weights_file_replace_the_order():
    by_order = check("--data", "fitting")
    assert any("matched only by their order" in note for note in by_order["notes"])
    Path("names.txt").write_text("dog\ncat\n")
    seen = check("--data", "fitting", "--class-names", "names.txt")
    assert not any("matched only by their order" in note for note in seen["notes"])
    labels = {line.split(": ")[0]: line.split(": ")[1] for line in seen["first"]}
    assert labels == {"cat/1.png": "label 1 (cat)", "dog/1.png": "label 0 (dog)"}
    Path("names.txt").write_text("dog\ncat\nelk\n")
    done = invoke("check", *FILE, "--class-names", "names.txt", code=4)
    assert "3 labels (dog, cat, elk) for 2 outputs" in done.stderr
    done = invoke("check", *FILE, "--class-names", "nowhere.txt", code=4)
    assert "--class-names takes a text file" in done.stderr
