"""Zero-shot classifiers: their logits are those of the image-text model's own code."""

import re

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from lipaudit import measure
from lipaudit.errors import InputError, UsageError
from lipaudit.models.sources.loader import LoadOptions, load_net
from tests.commands import invoke, refuse
from tests.models.sources.cases import (
    PIXELS,
    SMALL,
    build,
    configure,
    numbered,
    refused,
    save,
    vit,
)

NAMES, PHOTO, WROTE = ("keeper", "he"), "the {} saw", "what the {} wrote"
TEXT = SMALL | {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
KINDS = {
    "CLIPModel": {"padding": True},
    "SiglipModel": {"padding": "max_length", "max_length": 16},
}
"""Padding of each, as the processor of its kind pads."""


def image_text(path, kind):
    """Save an image-text model with random weights that tell its texts apart."""
    size = {"projection_dim": 8} if kind == "CLIPModel" else {}
    module = build(kind, text_config=TEXT, vision_config=PIXELS, **size)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    save(module, path)
    # As transformers writes it for CLIP and SigLIP: no token types, and for SigLIP no mask.
    read = ["input_ids", "attention_mask"][: 2 if kind == "CLIPModel" else 1]
    configure(path, "tokenizer_config.json", model_input_names=read)
    return module.double()


def own_scores(module, path, x, prompts, **padding):
    """The logits of the model's own code, (images, classes, prompts)."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = [prompt.format(name) for name in NAMES for prompt in prompts]
    with torch.no_grad():
        done = module(pixel_values=x, **tokenizer(texts, return_tensors="pt", **padding))
    return done, done.logits_per_image.view(len(x), len(NAMES), len(prompts))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_model_itself(tmp_path, kind):
    module = image_text(tmp_path, kind)
    x = torch.rand(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    known = {"class_names": NAMES, "dtype": "float64", "device": "cpu"}
    net = load_net(str(tmp_path), LoadOptions(**known, prompts=(PHOTO,)))
    _, own = own_scores(module, tmp_path, x, [PHOTO], **KINDS[kind])
    assert (net.labels, net.classes, net.kind) == (NAMES, 2, "image")
    assert (own[:, 0] - own[:, 1]).abs().min() > 1e-5
    torch.testing.assert_close(net.output(numbered(x)), own[..., 0], rtol=0, atol=1e-9)
    # Of two prompts: the cosine with the direction of the mean of the unit vectors.
    net = load_net(str(tmp_path), LoadOptions(**known, prompts=(PHOTO, WROTE)))
    done, own = own_scores(module, tmp_path, x, [PHOTO, WROTE], **KINDS[kind])
    mean = done.text_embeds.view(2, 2, -1).mean(1)
    bias = getattr(module, "logit_bias", torch.zeros(1)).detach()
    expected = (own.mean(2) - bias) / mean.norm(dim=1) + bias
    torch.testing.assert_close(net.output(numbered(x)), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("change", ["hotter", "nan"])
def test_other_logits_than_those_of_the_cosine_are_refused(tmp_path, monkeypatch, change):
    image_text(tmp_path, "CLIPModel")
    forward = transformers.CLIPModel.forward

    def run(self, *args, **kwargs):
        done = forward(self, *args, **kwargs)
        done.logits_per_image = done.logits_per_image * (1.01 if change == "hotter" else torch.nan)
        return done

    monkeypatch.setattr(transformers.CLIPModel, "forward", run)
    says = refused(tmp_path, InputError, class_names=NAMES, prompts=(PHOTO,))
    assert "CLIPModel computes its logits in another way" in says


def photos(path):
    """Save two images for each class, in folders whose names differ in case from the classes'."""
    random = np.random.default_rng(0)
    for name in ("Keeper", "HE"):
        (path / name).mkdir(parents=True)
        for i in range(2):
            pixels = random.integers(0, 256, (8, 8, 3), dtype="uint8")
            Image.fromarray(pixels).save(path / name / f"{i}.png")


def test_measures_and_gate_read_the_image_tower_and_the_names_of_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_text(tmp_path / "model", "CLIPModel")
    photos(tmp_path / "photos")
    (tmp_path / "names.txt").write_text("keeper\n\nhe\n")
    model, data = str(tmp_path / "model"), str(tmp_path / "photos")
    how = {"classes": str(tmp_path / "names.txt"), "prompt": PHOTO, "data": data}
    for name, given in {"bounds": {}, "attention": {}, "certify": {"eps": "1/2550"}}.items():
        section = measure(model, name, samples=2, **given, **how).sections[0]
        note = next(note.text for note in section.notes if note.code == "zero-shot")
        assert re.search(f"2 classes: CLIPModel compares images with '{PHOTO}'", note)
        assert all(
            "vision_model" in getattr(row, "module", "vision_model") for row in section.rows
        )
    report = measure(model, "attack", eps="8/255", attack="pgd", **how)
    assert report.section("attack").samples["label"] == (1, 1, 0, 0)
    line = ["jacobian", model, "-q", "-n", "4", "--data", data, "--classes", how["classes"]]
    invoke(*line, "--prompt", PHOTO, "-o", "base.json")
    (tmp_path / "names.txt").rename(tmp_path / "moved.txt")
    gate = ("gate", model, "-b", "base.json")
    refuse(4, "names.txt cannot be read as class names", *gate)
    invoke(*gate, "--classes", "moved.txt")
    (tmp_path / "names.txt").write_text("keeper\nhe\nwrote\n")
    judged = invoke(*gate, code=5)
    assert "not comparable: jacobian.correct >= -2pp: preprocess zero-shot" in judged.stdout


def test_bad_names_prompts_models_and_tokenizers_are_refused(tmp_path):
    image_text(tmp_path / "model", "CLIPModel")
    model, file = str(tmp_path / "model"), tmp_path / "names.txt"
    line = ("jacobian", model, "--data", "random", "--classes", str(file))
    refuse(4, "names.txt cannot be read as class names", *line)
    refuse(4, "only train takes a number", *line[:-1], "10")
    for text, says in {"\n": "0 class names", "he\n": "1 class names"}.items():
        file.write_text(text)
        refuse(4, says, *line)
    file.write_text("black cat\nBlack_Cat\n")
    refuse(4, "a class name twice: black cat", *line)
    file.write_text("he\nkeeper\n")
    refuse(2, "must have one {}", *line, "--prompt", "the {}|a photo")
    refuse(2, "--prompt needs --classes", "jacobian", model, "--prompt", "{}")
    long = ("--prompt", "a " * 17 + "{}")
    refuse(4, "a prompt has 20 tokens, and CLIPModel reads at most 16", *line, *long)
    refuse(2, "--tower measures features", *line, "--tower", "image")
    refuse(2, "train needs a number", "train", *line[1:])
    save(vit(), tmp_path / "vit")
    named = {"class_names": NAMES, "prompts": (PHOTO,)}
    assert "is no image-text model" in refused(tmp_path / "vit", UsageError, **named)
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "model/tokenizer_config.json").unlink()
    assert "CLIPModel has no tokenizer" in refused(model, InputError, **named)
